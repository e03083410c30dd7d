"""Objects beside a model and its optimizers that keep tensors, such as an average of the weights."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.placements import local_part
from gradguard.living import all_objects
from gradguard.parity.shards import LocalParameters


@dataclass(frozen=True)
class KeptTensors:
    """An object that keeps tensors.

    Attributes:
        words: The object, for a note that it is not compared.
        kind: The beginning of its tensors' names.
        state: Returns its state, in which tensors have the names of parameters.
    """

    words: str
    kind: str
    state: Callable[[], Any]


def kept_by(one: Any, words: str) -> KeptTensors:
    """Return what the ``state_dict`` of an object keeps; the words have a place for its class."""
    kind = type(one).__name__
    return KeptTensors(words.format(kind), kind, one.state_dict)


def averages_in(local: LocalParameters, known: Sequence[Any] = ()) -> list[KeptTensors]:
    """Return the averages of all of these weights that objects of plain classes keep: a dict by name, or a list.

    Args:
        local: The weights.
        known: Objects that are known already.
    """
    names, shapes = [p.name for p in local], [p.parameter.shape for p in local]
    own, others = {_memory(p.parameter) for p in local}, set(map(id, known))

    def tensors(value: Any) -> list[Any]:
        return [value.get(name) for name in names] if isinstance(value, dict) else value

    def is_average(value: Any) -> bool:
        if type(value) not in (dict, OrderedDict, list) or len(value) < len(names):
            return False
        kept = tensors(value)
        return [getattr(one, "shape", None) for one in kept] == shapes and own.isdisjoint(map(_memory, kept))

    def found() -> list[KeptTensors]:
        return [
            KeptTensors(kind, kind, lambda one=one, name=name: dict(zip(names, tensors(vars(one)[name]), strict=True)))
            for one in _plain_objects()
            if id(one) not in others
            for name, value in [*vars(one).items()]
            if is_average(value)
            for kind in [f"{type(one).__name__}.{name}"]
        ]

    if found():
        gc.collect()  # an average of an earlier run may be garbage that is still there
    return sorted(found(), key=lambda one: one.kind)


def _plain_objects() -> list[Any]:
    """Return the objects with attributes that are neither modules nor optimizers, nor PyTorch's or gradguard's."""
    every, others = all_objects(), (nn.Module, Optimizer, type, ModuleType)
    kinds = {
        one
        for one in set(map(type, every))
        if one.__dictoffset__
        and not issubclass(one, others)
        and one.__module__.partition(".")[0] not in ("torch", "gradguard")
    }
    return [one for one in every if type(one) in kinds and isinstance(getattr(one, "__dict__", None), dict)]


def _memory(tensor: Any) -> int:
    return local_part(tensor).untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0

"""Find objects outside of a model and its optimizers that store tensors, such as an average of the weights."""

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
    """An object that stores tensors.

    Attributes:
        words: The description of the object, for a note that it is not compared.
        kind: The prefix of its tensors' names.
        state: A function that returns its state, in which tensors have the names of parameters.
    """

    words: str
    kind: str
    state: Callable[[], Any]


def kept_by(one: Any, words: str) -> KeptTensors:
    """Return the tensors in an object's ``state_dict``; ``words`` has a placeholder for the object's class."""
    kind = type(one).__name__
    return KeptTensors(words.format(kind), kind, one.state_dict)


def averages_in(local: LocalParameters, known: Sequence[Any] = ()) -> list[KeptTensors]:
    """Find averages of all of these weights in attributes of Python objects: a dict by name, or a list in order.

    Args:
        local: The weights.
        known: Objects to skip.

    Returns:
        The averages, sorted by class and attribute.
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
        gc.collect()  # an average of an earlier run may be garbage that is not collected yet
    return sorted(found(), key=lambda one: one.kind)


def _plain_objects() -> list[Any]:
    """Return all objects with a ``__dict__``, except modules, optimizers, types, and objects of torch or gradguard."""
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

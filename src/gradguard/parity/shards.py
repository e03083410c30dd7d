"""Which parts of which whole parameters this process holds, and whether those of all processes make the wholes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.distributed.local_shard import LocalShard, cut_along, flat_shards, is_told, shard_of
from gradguard.distributed.megatron import cut_of
from gradguard.distributed.placements import gradient_of, local_part
from gradguard.distributed.processes import gather
from gradguard.distributed.redistribute import added_up
from gradguard.distributed.wrappers import named_parameters, plain_names
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.parity.saved import BUFFER
from gradguard.torch_private import FlatShard, flattened_by_fsdp1

Placed = tuple[str, Sequence[int], Sequence[int]]
"""The name and the shape of a whole parameter, and where in it this process' part begins."""

ShardOf = Callable[[str], Placed | None]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """This process' part of one parameter.

    Attributes:
        name: The whole parameter's, in the model without wrappers.
        parameter: The tensor of the model; FSDP1's flat one may stand for several.
        shard_of: Which part of the whole a tensor is: the parameter, or its gradient.
        flat: Where in FSDP1's flat parameter it lies.
    """

    name: str
    parameter: Tensor
    shard_of: Callable[[Tensor], LocalShard]
    flat: FlatShard | None = None

    def weights(self) -> tuple[LocalShard, Tensor]:
        """Return the part, and its weights, whose memory is the model's."""
        return self._of(self.parameter.detach())

    def gradient(self) -> tuple[LocalShard, Tensor] | None:
        """Return the part, and its gradient; None if there is none. A collective where it is a Partial DTensor."""
        gradient = gradient_of(self.parameter)
        if gradient is None or (self.flat is not None and not self.flat.numel):
            return None
        if gradient.layout is not torch.strided or gradient.is_complex() or gradient.is_quantized:
            raise UnsupportedGradientError(
                f"the gradient of {self.name} is {gradient.dtype} with layout {gradient.layout}: expected real and "
                "dense. Use sparse=False in the embedding, or real parameters."
            )
        return self._of(added_up(gradient.detach(), TASK))

    def _of(self, tensor: Tensor) -> tuple[LocalShard, Tensor]:
        if self.flat is not None:
            tensor = tensor.reshape(-1)[self.flat.offset : self.flat.offset + self.flat.numel]
        return self.shard_of(tensor), local_part(tensor)


def _told_shard(tensor: Tensor) -> LocalShard:
    """Return which part of a whole parameter ``tensor`` is, read from its layout."""
    shard = shard_of(tensor)
    if not is_told(shard, tensor):
        raise UnsupportedGradientError(
            f"this process holds {list(local_part(tensor).shape)} of a DTensor {list(shard.shape)} laid out as "
            f"{list(tensor.placements)}, where {list(shard.own)} was expected: its rows cannot be told. Say what it "  # type: ignore[attr-defined]
            "holds with shard_of=."
        )
    return shard


def _placed_shard(placed: Placed, tensor: Tensor) -> LocalShard:
    """Return which part of a whole parameter ``tensor`` is, by the user's ``shard_of``."""
    name, shape, begin = placed
    own = local_part(tensor).shape
    fits = len(shape) == len(begin) == len(own)
    if not fits or not all(0 <= b <= b + n <= s for b, n, s in zip(begin, own, shape, strict=True)):
        raise InvalidValueError(
            f"shard_of: {name} of shape {list(shape)} has no part of shape {list(own)} at {list(begin)}. Expected the "
            "whole name, the whole shape, and where this process' part begins."
        )
    blocks = zip(begin, own, shape, strict=True)
    return cut_along(shape, [None if n == s else torch.arange(b, b + n, device="cpu") for b, n, s in blocks])


def _local_parameter(name: str, parameter: Tensor, placed: Placed | None) -> LocalParameter:
    if placed is not None:
        return LocalParameter(placed[0], parameter, partial(_placed_shard, placed))
    if cut_of(parameter) is not None:
        shard = shard_of(parameter)  # whose gradient has no attributes
        return LocalParameter(name, parameter, lambda tensor: shard)
    return LocalParameter(name, parameter, _told_shard)


def local_parameters(model: nn.Module, place_of: ShardOf | None) -> list[LocalParameter]:
    """Return this process' parts of the model's trained parameters.

    Args:
        model: The model, with or without wrappers; layers that FSDP2 has left gathered are sharded again.
        place_of: Whole that a parameter is a part of, by its name; None of those that are whole or tell it themselves.

    Raises:
        UnsupportedGradientError: If FSDP1 has flattened one and the model does not tell how.
    """
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]
    parameters = _flat_ones(model)
    known = {id(one.parameter) for one in parameters}
    named = [(name, p) for name, p in named_parameters(model) if p.requires_grad and id(p) not in known]
    for (name, p), is_flat in zip(named, flattened_by_fsdp1([p for _, p in named]), strict=True):
        if is_flat:
            raise UnsupportedGradientError(f"{name} belongs to FSDP1 outside this model: pass the root module.")
        if p.is_complex():
            raise UnsupportedGradientError(f"{name} is {p.dtype}: expected real and dense parameters.")
        parameters.append(_local_parameter(name, p, place_of(name) if place_of else None))
    return parameters


def frozen_parameters(model: nn.Module, place_of: ShardOf | None) -> list[LocalParameter]:
    """Return this process' parts of the parameters that are not trained; complex and packed ones are left out."""
    known = {id(one.parameter) for one in _flat_ones(model)}
    named = [(n, p) for n, p in named_parameters(model) if not p.requires_grad and id(p) not in known]
    return [_local_parameter(n, p, place_of(n) if place_of else None) for n, p in named if _is_plain(p)]


def local_buffers(model: nn.Module, front: str = "") -> list[LocalParameter]:
    """Return this process' parts of the buffers, with ``front`` before the name that each has in the model."""
    named = dict(model.named_buffers())
    plain = plain_names(model, [*named])
    return [
        _local_parameter(f"{BUFFER}{front}{plain[n]}", b, None) for n, b in named.items() if b.numel() and _is_plain(b)
    ]


def of_one_shape(tensors: Sequence[LocalParameter]) -> list[LocalParameter]:
    """Return the tensors without the buffers whose shape differs from process to process."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for of_one in gathered({p.name: tuple(p.parameter.shape) for p in tensors if p.name.startswith(BUFFER)}):
        for name, shape in of_one.items():
            shapes.setdefault(name, set()).add(shape)
    return [p for p in tensors if len(shapes.get(p.name, ())) <= 1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be read: it is real and dense, and its class packs nothing."""
    is_packed = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")  # no DTensor
    return tensor.layout is torch.strided and not (tensor.is_complex() or tensor.is_quantized or is_packed)


def _flat_ones(model: nn.Module) -> list[LocalParameter]:
    found = flat_shards(model)
    return [LocalParameter(name, flat.tensor, lambda tensor, part=part: part, flat) for name, flat, part in found]


@dataclass(frozen=True)
class Whole:
    """One parameter of the whole model, as all processes agree on it.

    Attributes:
        name: Its name.
        shape: Its shape.
        holders: For each process that has a part, that part's key.
    """

    name: str
    shape: tuple[int, ...]
    holders: dict[int, tuple[Any, ...]]

    def sharers(self, rank: int) -> list[int]:
        """Return the ranks that hold the same part as ``rank`` does."""
        return [other for other, key in self.holders.items() if key == self.holders[rank]]

    @property
    def copies(self) -> int:
        """How many ranks hold the same part."""
        return max((len(self.sharers(rank)) for rank, key in self.holders.items() if 0 not in key[0]), default=1)


def gathered(value: Any) -> list[Any]:
    """Return the ``value`` of every process, by rank."""
    return gather(value, task=TASK)


def gathered_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of all processes, each once."""
    return tuple(dict.fromkeys(one for of_rank in gathered([*words]) for one in of_rank))


def gathered_settings(settings: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """Return the settings of all processes, by parameter."""
    return {name: of for of_rank in gathered(settings) for name, of in of_rank.items()}


def agree_on(local: Sequence[LocalParameter]) -> dict[str, Whole]:
    """Return every parameter of the whole model, by name, the same on all processes.

    Raises:
        UnsupportedGradientError: If the parts of one do not make a whole, or are of several.
    """
    wholes: dict[str, Whole] = {}
    shards = [(p.name, p.weights()[0]) for p in local]
    for rank, told in enumerate(gathered([(name, shard.shape, shard.key) for name, shard in shards])):
        for name, shape, key in told:
            whole = wholes.setdefault(name, Whole(name, shape, {}))
            if whole.shape != shape or rank in whole.holders:
                raise UnsupportedGradientError(
                    f"{name} has the shape {list(shape)} on rank {rank}, and {list(whole.shape)} elsewhere: parts of "
                    f"one parameter, or several of one name? {_SAY}"
                )
            whole.holders[rank] = key
    for whole in wholes.values():
        _check_complete(whole)
    return wholes


TASK = "compare gradients"
"""For the message of a collective to which a process does not come."""

_SAY = "Say with shard_of=lambda name: (whole name, whole shape, where this rank's part begins)."


def _check_complete(whole: Whole) -> None:
    there = sum(math.prod(key[0]) for key in set(whole.holders.values()))
    if there != math.prod(whole.shape):
        raise UnsupportedGradientError(
            f"the processes hold {there:,} of the {math.prod(whole.shape):,} elements of {whole.name}: the rest may be "
            f"on processes that have not called save_gradients. {_SAY}"
        )

"""This process's shards of whole parameters, and the check that the shards of all ranks make up the wholes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.engines import shard_of
from gradguard.distributed.engines.fsdp1 import FlatParameters
from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.distributed.local_shard import LocalShard, cut_along
from gradguard.distributed.placements import gradient_of, is_sharded, local_part, placement_of
from gradguard.distributed.processes import gather
from gradguard.distributed.redistribute import added_up
from gradguard.distributed.wrappers import named_parameters, plain_names
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.parity.saved import BUFFER
from gradguard.torch_private import flattened_by_fsdp1

Placed = tuple[str, Sequence[int], Sequence[int]]
"""The name and the shape of a whole parameter, and the index at which this process's shard begins."""

ShardOf = Callable[[str], Placed | None]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """This process's shard of one parameter.

    Attributes:
        name: The name of the whole parameter in the model without wrappers.
        parameter: The tensor of the model; a flat parameter of FSDP1 contains several parameters.
        shard: The shard's position in the whole.
        offset: The position in FSDP1's flat parameter; None for a separate parameter.
        is_given: Whether the user's ``shard_of`` describes the shard.
    """

    name: str
    parameter: Tensor
    shard: LocalShard
    offset: int | None = None
    is_given: bool = False

    def weights(self) -> tuple[LocalShard, Tensor]:
        """Return the shard and a view of its weights. A collective for a Partial DTensor, whose sum is a copy."""
        return self._of(added_up(self.parameter.detach(), TASK))

    def gradient(self) -> tuple[LocalShard, Tensor] | None:
        """Return the shard and its gradient; None without a gradient. A collective for a Partial DTensor."""
        gradient = gradient_of(self.parameter)
        if gradient is None or (self.offset is not None and not self.shard.own[0]):
            return None
        if gradient.layout is not torch.strided or gradient.is_complex() or gradient.is_quantized:
            raise UnsupportedGradientError(
                f"the gradient of {self.name} is {gradient.dtype} with layout {gradient.layout}: expected a real and "
                "dense gradient. Use sparse=False in the embedding, or real parameters."
            )
        return self._of(added_up(gradient.detach(), TASK))

    def _of(self, tensor: Tensor) -> tuple[LocalShard, Tensor]:
        if self.offset is not None:
            return self.shard, tensor.reshape(-1)[self.offset : self.offset + self.shard.own[0]]
        shard = shard_of(tensor) if is_sharded(tensor) and not self.is_given else self.shard
        local = local_part(tensor)
        if not shard.is_known or shard.own != tuple(local.shape):
            raise UnsupportedGradientError(
                f"this process holds a shard of shape {list(local.shape)} of {self.name} {list(shard.shape)}, which is "
                f"laid out as {placement_of(tensor).layout}: expected {list(shard.own)}, so the position of the shard "
                "is unknown. Describe it by shard_of=."
            )
        return shard, local


LocalParameters = Sequence[LocalParameter]


def _local_parameter(name: str, parameter: Tensor, place_of: ShardOf | None = None) -> LocalParameter:
    """Return a parameter with its shard, described by the user's ``shard_of`` or else by the tensor's layout."""
    placed = place_of(name) if place_of else None
    if placed is None:
        return LocalParameter(name, parameter, shard_of(parameter))
    name, shape, begin = placed
    own = local_part(parameter).shape
    blocks = [*zip(begin, own, shape, strict=False)]
    if not len(shape) == len(begin) == len(own) or any(not 0 <= b <= b + n <= s for b, n, s in blocks):
        raise InvalidValueError(
            f"shard_of: {name} of shape {list(shape)} has no part of shape {list(own)} at {list(begin)}. Expected the "
            "whole name, the whole shape, and the index where this process's part begins."
        )
    along = [None if n == s else torch.arange(b, b + n, device="cpu") for b, n, s in blocks]
    return LocalParameter(name, parameter, cut_along(shape, along), is_given=True)


def local_parameters(model: nn.Module, place_of: ShardOf | None) -> list[LocalParameter]:
    """Return this process's shards of the model's trained parameters.

    Args:
        model: The model, with or without wrappers; layers that FSDP2 has left unsharded are resharded.
        place_of: The user's ``shard_of``: the whole of which a parameter is a part, by name; None for a parameter
            that is whole or whose layout describes it.

    Raises:
        UnsupportedGradientError: If a parameter is complex, or belongs to a flat parameter of FSDP1 outside the model.
    """
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]
    flat, named = _parameters_of(model, trained=True)
    for (name, p), is_flat in zip(named, flattened_by_fsdp1([p for _, p in named]), strict=True):
        if is_flat:
            raise UnsupportedGradientError(f"{name} belongs to FSDP1 outside this model: pass the root module.")
        if p.is_complex():
            raise UnsupportedGradientError(f"{name} is {p.dtype}: expected real and dense parameters.")
    return [*flat, *(_local_parameter(name, p, place_of) for name, p in named)]


def frozen_parameters(model: nn.Module, place_of: ShardOf | None) -> list[LocalParameter]:
    """Return this process's shards of the frozen parameters, without complex and packed ones."""
    return [_local_parameter(n, p, place_of) for n, p in _parameters_of(model, trained=False)[1] if _is_plain(p)]


def _parameters_of(model: nn.Module, trained: bool) -> tuple[list[LocalParameter], list[tuple[str, Tensor]]]:
    """Return the parameters that FSDP1 has flattened, and the other parameters with ``requires_grad is trained``."""
    flat = [LocalParameter(*held) for held in FlatParameters().held_apart(model)]
    known = {id(one.parameter) for one in flat}
    return flat, [(n, p) for n, p in named_parameters(model) if p.requires_grad is trained and id(p) not in known]


def local_buffers(model: nn.Module, front: str = "") -> list[LocalParameter]:
    """Return this process's shards of the buffers; ``front`` is a prefix of their names."""
    named = dict(model.named_buffers())
    plain = plain_names(model, [*named])
    return [_local_parameter(f"{BUFFER}{front}{plain[n]}", b) for n, b in named.items() if b.numel() and _is_plain(b)]


def of_one_shape(tensors: LocalParameters) -> list[LocalParameter]:
    """Return the tensors without the buffers whose shape differs between ranks."""
    everywhere = gathered({p.name: tuple(p.parameter.shape) for p in tensors if p.name.startswith(BUFFER)})
    return [p for p in tensors if len({shapes[p.name] for shapes in everywhere if p.name in shapes}) <= 1]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's elements can be read: it is real, dense and not packed by a tensor subclass."""
    is_packed = hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor)
    return tensor.layout is torch.strided and not (tensor.is_complex() or tensor.is_quantized or is_packed)


@dataclass(frozen=True)
class Whole:
    """One parameter of the whole model, equal on all ranks.

    Attributes:
        name: The name of the parameter.
        shape: The shape of the whole parameter.
        holders: The key of the shard that each rank holds, by rank.
    """

    name: str
    shape: tuple[int, ...]
    holders: dict[int, tuple[Any, ...]]

    def sharers(self, rank: int) -> list[int]:
        """Return the ranks that hold the same shard as ``rank``."""
        return [other for other, key in self.holders.items() if key == self.holders[rank]]

    @property
    def copies(self) -> int:
        """The largest number of ranks that hold the same shard."""
        return max((len(self.sharers(rank)) for rank, key in self.holders.items() if 0 not in key[0]), default=1)


def gathered(value: Any) -> list[Any]:
    """Return the ``value`` of every process, in the order of ranks."""
    return gather(value, task=TASK)


def gathered_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return the strings of all ranks, without duplicates."""
    return tuple(dict.fromkeys(one for of_rank in gathered([*words]) for one in of_rank))


def gathered_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of all ranks; the last rank wins."""
    return {name: of for of_rank in gathered(settings) for name, of in of_rank.items()}


def agree_on(local: LocalParameters) -> dict[str, Whole]:
    """Return every parameter of the whole model, by name, equal on all ranks.

    Raises:
        UnsupportedGradientError: If the shards of a parameter do not add up to the whole or differ in the whole shape,
            or a rank holds two of one name.
    """
    wholes: dict[str, Whole] = {}
    own = [(p.name, shard.shape, shard.key) for p in local for shard, _ in [p.weights()]]
    for rank, shards in enumerate(gathered(own)):
        for name, shape, key in shards:
            whole = wholes.setdefault(name, Whole(name, shape, {}))
            if whole.shape != shape or rank in whole.holders:
                raise UnsupportedGradientError(
                    f"{name} has the shape {list(shape)} on rank {rank}, and {list(whole.shape)} elsewhere: parts of "
                    f"one parameter, or several of one name? {_SAY}"
                )
            whole.holders[rank] = key
    for name, whole in wholes.items():
        there, total = sum(math.prod(key[0]) for key in set(whole.holders.values())), math.prod(whole.shape)
        if there != total:
            raise UnsupportedGradientError(
                f"the processes hold {there:,} of the {total:,} elements of {name}: the rest may be on processes that "
                f"have not called save_gradients. {_SAY}"
            )
    return wholes


TASK = "compare gradients"
"""The name of the task in the message about a rank that does not join a collective."""

_SAY = "Describe it by shard_of=lambda name: (whole name, whole shape, where this rank's part begins)."

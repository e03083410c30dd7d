"""Which elements of which whole parameter this process holds: ordinary tensors, DTensors, FSDP1's flat shards."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.distributed.megatron import cut_of
from gradguard.distributed.placements import added_up, gradient_of, is_sharded, local_part, placement_of
from gradguard.distributed.processes import gather
from gradguard.distributed.wrappers import named_parameters
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.tensors.sketch import flat_chunks, hashed
from gradguard.torch_private import (
    FlatShard,
    flat_shards_of,
    flattened_by_fsdp1,
    has_usual_shard_order,
    is_fsdp1,
    wrapper_slots,
)

Placed = tuple[str, Sequence[int], Sequence[int]]
"""The name and the shape of a whole parameter, and where in it this process' part begins."""

ShardOf = Callable[[str], Placed | None]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a whole tensor.

    Attributes:
        shape: Of the whole.
        own: Of the part; its elements are in the whole's order.
        along: For each dimension, which places of the whole the part has; None where it has all.
        start: Of a flat shard, its first element in the whole.
    """

    shape: tuple[int, ...]
    own: tuple[int, ...]
    along: tuple[Tensor | None, ...] = ()
    start: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for the same part, on every process."""
        return (self.own, self.start, tuple(None if i is None else _digest(i) for i in self.along))

    def places(self, begin: int, count: int, device: torch.device) -> Tensor:
        """Return the places in the whole of ``count`` of the part's elements, from ``begin`` on."""
        left = torch.arange(begin, begin + count, device=device)
        if all(index is None for index in self.along):
            return left + self.start
        places, stride = torch.zeros_like(left), 1
        for size, own, index in reversed(list(zip(self.shape, self.own, self.along, strict=True))):
            here = left % own
            places += stride * (here if index is None else index.to(device)[here])
            left, stride = left // own, stride * size
        return places

    def pieces(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut ``values`` of the part into chunks with their places."""
        for at, chunk in flat_chunks(values):
            yield chunk, self.places(at, len(chunk), values.device)


def _digest(index: Tensor) -> tuple[int, int]:
    return len(index), int(hashed(index.clone()).sum())


def part_of(tensor: Tensor) -> Part:
    """Return which part of the whole tensor this process holds."""
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Part(shape, shape)
    along: list[Tensor | None] = [None] * len(shape)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    for i, d, split_factor in _in_order(tensor.placements, mesh):  # type: ignore[attr-defined]
        here = torch.arange(shape[d]) if along[d] is None else along[d]
        along[d] = _own_chunks(here, mesh.size(i), mesh.get_local_rank(i), split_factor)  # type: ignore[arg-type]
    own = tuple(size if index is None else len(index) for size, index in zip(shape, along, strict=True))
    if own != tuple(local_part(tensor).shape) or not has_usual_shard_order(tensor):
        raise UnsupportedGradientError(
            f"this process holds {list(local_part(tensor).shape)} of a DTensor {list(shape)} laid out as "
            f"{list(tensor.placements)}, where {list(own)} was expected: its rows cannot be told. Say what it holds "  # type: ignore[attr-defined]
            "with shard_of=."
        )
    return Part(shape, own, tuple(along) if any(i is not None for i in along) else ())


def _in_order(placements: Sequence[Any], mesh: Any) -> list[tuple[int, int, int]]:
    """Return mesh dimension, tensor dimension and split factor of all that shards a tensor, as it was cut in order.

    A `_StridedShard` says that later mesh dimensions have cut first, into as many parts as its split factor.
    """
    cuts = [(i, p.dim, getattr(p, "split_factor", 1)) for i, p in enumerate(placements) if hasattr(p, "dim")]
    first, then = [cut for cut in cuts if cut[2] == 1], []
    for i, d, split_factor in reversed([cut for cut in cuts if cut[2] > 1]):
        before = math.prod(mesh.size(j) for j, other, _ in cuts if other == d and j > i)
        then.append((i, d, 1 if before == split_factor else split_factor))
    return [*first, *then]


def _own_chunks(places: Tensor, ranks: int, rank: int, split_factor: int) -> Tensor:
    """What `torch.chunk` gives a rank; of a `_StridedShard`, every so-manieth of smaller chunks."""
    chunks = torch.chunk(places, ranks * split_factor) if len(places) else ()
    own = chunks[rank::ranks]
    return torch.cat(own) if own else places[:0]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """This process' part of one parameter.

    Attributes:
        name: The whole parameter's, in the model without wrappers.
        shape: The whole parameter's.
        parameter: The tensor of the model; FSDP1's flat one may stand for several.
        flat: Where in FSDP1's flat parameter it lies.
        placed: What ``shard_of`` said.
        part: What Megatron's attributes say.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    flat: FlatShard | None = None
    placed: Placed | None = None
    part: Part | None = None

    def weights(self) -> tuple[Part, Tensor]:
        """Return the part, and its weights, whose memory is the model's."""
        return self._of(self.parameter.detach())

    def gradient(self) -> tuple[Part, Tensor] | None:
        """Return the part, and its gradient; None if there is none. A collective where it is a Partial DTensor."""
        gradient = gradient_of(self.parameter)
        if gradient is None or (self.flat is not None and not self.flat.numel):
            return None
        if gradient.layout is not torch.strided or gradient.is_complex() or gradient.is_quantized:
            raise UnsupportedGradientError(
                f"the gradient of {self.name} is {gradient.dtype} with layout {gradient.layout}: expected real and "
                "dense. Use sparse=False in the embedding, or real parameters."
            )
        return self._of(added_up(gradient.detach()))

    def _of(self, tensor: Tensor) -> tuple[Part, Tensor]:
        if self.flat is not None:
            own = tensor.reshape(-1)[self.flat.offset : self.flat.offset + self.flat.numel]
            return Part(self.shape, (self.flat.numel,), start=self.flat.start), own
        if self.placed is not None:
            return _placed_part(self.name, self.placed, local_part(tensor)), local_part(tensor)
        return part_of(tensor) if self.part is None else self.part, local_part(tensor)

    def layout(self) -> str:
        """Return how the whole is spread, in words."""
        if self.flat is not None:
            return "FSDP1 flat parameter"
        if self.part is not None:
            return "Megatron's tensor parallelism"
        return placement_of(self.parameter).layout if self.placed is None else "as shard_of says"


def _megatron_part(parameter: Tensor) -> Part | None:
    """Return which part of its whole a parameter of Megatron's is; None of one that is whole."""
    cut = cut_of(parameter)
    if cut is None:
        return None
    own, numbers = tuple(parameter.shape), cut.numbers(parameter)
    return Part(cut.shape(parameter), own, tuple(numbers if d == cut.dim else None for d in range(len(own))))


def _placed_part(name: str, placed: Placed, local: Tensor) -> Part:
    _, shape, begin = placed
    fits = len(shape) == len(begin) == local.dim()
    if not fits or not all(0 <= b <= b + n <= s for b, n, s in zip(begin, local.shape, shape, strict=True)):
        raise InvalidValueError(
            f"shard_of: {name} of shape {list(shape)} has no part of shape {list(local.shape)} at {list(begin)}. "
            "Expected the whole name, the whole shape, and where this process' part begins."
        )
    along = [None if n == s else torch.arange(b, b + n) for b, n, s in zip(begin, local.shape, shape, strict=True)]
    known = tuple(along) if any(i is not None for i in along) else ()
    return Part(tuple(shape), tuple(local.shape), known)


def local_parameters(model: nn.Module, shard_of: ShardOf | None) -> list[LocalParameter]:
    """Return this process' parts of the model's trained parameters.

    Args:
        model: The model, with or without wrappers; layers that FSDP2 has left gathered are sharded again.
        shard_of: What whole a parameter is a part of, by its name; None of those that are whole or tell it themselves.

    Raises:
        UnsupportedGradientError: If FSDP1 has flattened one and the model does not tell how.
    """
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]
    found = _flat_ones(model)
    known = {id(tensor) for tensor in found}
    parameters = [one for group in found.values() for one in group]
    named = [(name, p) for name, p in named_parameters(model) if p.requires_grad and id(p) not in known]
    for (name, p), is_flat in zip(named, flattened_by_fsdp1([p for _, p in named]), strict=True):
        if is_flat:
            raise UnsupportedGradientError(f"{name} belongs to FSDP1 outside this model: pass the root module.")
        if p.is_complex():
            raise UnsupportedGradientError(f"{name} is {p.dtype}: expected real and dense parameters.")
        placed = shard_of(name) if shard_of else None
        part = _megatron_part(p) if placed is None else None
        whole, shape = (name, tuple(p.shape) if part is None else part.shape) if placed is None else placed[:2]
        parameters.append(LocalParameter(whole, tuple(shape), p, placed=placed, part=part))
    return parameters


def _flat_ones(model: nn.Module) -> dict[Tensor, list[LocalParameter]]:
    found: dict[Tensor, list[LocalParameter]] = {}
    for path, module in model.named_modules():
        if is_fsdp1(module):
            front = ".".join(word for word in path.split(".") if word and word not in wrapper_slots())
            for shard in flat_shards_of(module):
                name = f"{front}.{shard.name}" if front else shard.name
                found.setdefault(shard.tensor, []).append(LocalParameter(name, shard.shape, shard.tensor, shard))
    return found


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


def agree_on(local: Sequence[LocalParameter]) -> dict[str, Whole]:
    """Return every parameter of the whole model, by name, the same on all processes.

    Raises:
        UnsupportedGradientError: If the parts of one do not make a whole, or are of several.
    """
    wholes: dict[str, Whole] = {}
    for rank, told in enumerate(gathered([(p.name, p.shape, p.weights()[0].key) for p in local])):
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

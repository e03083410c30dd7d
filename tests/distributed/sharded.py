"""Gradients laid out over processes in every way, for the processes of `pool`; and what they held, put together again.

A table of lists, by name, so that a test sends a name and each process makes its own part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cases import random, sparse_with_duplicates

EVERY_RANK = range(64)


@dataclass(frozen=True)
class Entry:
    """One gradient: all of it, how it is laid out, and on which ranks it is None."""

    gradient: Tensor
    layout: str = "rows"
    absent: Sequence[int] = ()


@cache
def mesh(name: str) -> DeviceMesh:
    """A device mesh of all processes, or a part of one; made once, on all processes in the same order."""
    world = dist.get_world_size()
    inner = 2 if world > 1 else 1
    match name:
        case "row":
            return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        case "hsdp":
            return init_device_mesh("cpu", (inner, world // inner), mesh_dim_names=("replicate", "shard"))
        case "grid":
            return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("dp", "tp"))
        case "experts":
            return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("edp", "ep"))
        case "other order":
            return DeviceMesh("cpu", torch.arange(world).view(-1, inner).T.contiguous(), mesh_dim_names=("a", "b"))
    return mesh("grid" if name in ("dp", "tp") else "experts")[name]


def _tensor_parallel() -> int:
    return mesh("grid").size(1)


LAYOUTS: dict[str, Any] = {
    "rows": lambda: ("row", [Shard(0)]),
    "columns": lambda: ("row", [Shard(1)]),
    "last": lambda: ("row", [Shard(2)]),
    "copies": lambda: ("row", [Replicate()]),
    "hsdp": lambda: ("hsdp", [Replicate(), Shard(0)]),
    "fsdp, tp rows": lambda: ("grid", [_StridedShard(0, split_factor=_tensor_parallel()), Shard(0)]),
    "strided rows": lambda: ("row", [_StridedShard(0, split_factor=2)]),
    "fsdp, tp columns": lambda: ("grid", [Shard(0), Shard(1)]),
    "fsdp, tp copies": lambda: ("grid", [Shard(0), Replicate()]),
    "tp rows": lambda: ("tp", [Shard(0)]),
    "tp columns": lambda: ("tp", [Shard(1)]),
    "tp copies": lambda: ("tp", [Replicate()]),
    "dp rows": lambda: ("dp", [Shard(0)]),
    "experts": lambda: ("experts", [Shard(1), Shard(0)]),
    "ep": lambda: ("ep", [Shard(0)]),
    "other order": lambda: ("other order", [Shard(0), Shard(0)]),
    "other order, columns": lambda: ("other order", [Shard(1), Replicate()]),
}
LAYOUTS["partial sum"] = LAYOUTS["partial average"] = LAYOUTS["copies"]
LAYOUTS["partial sum, rows"] = LAYOUTS["rows"]
LAYOUTS["partial over tp"] = LAYOUTS["fsdp, tp copies"]


def laid_out(full: Tensor, layout: str) -> Tensor:
    """This process' part of ``full`` as a tensor of the layout; no communication."""
    if layout == "plain":
        return full.clone()
    name, placements = LAYOUTS[layout]()
    return distribute_tensor(full.clone(), mesh(name), placements, src_data_rank=None)


def _partial(full: Tensor, layout: str) -> Tensor:
    """Summands (or values to average) that differ from rank to rank and give ``full``."""
    name, placements = LAYOUTS["fsdp, tp copies" if layout == "partial over tp" else "copies"]()
    size, rank = mesh(name).size(-1), mesh(name).get_local_rank(mesh(name).ndim - 1)
    average = layout == "partial average"
    shares = torch.tensor([float(1 + r) for r in range(size)])
    share = shares[rank] / (shares.mean() if average else shares.sum())
    whole = distribute_tensor(full * share.to(full.dtype), mesh(name), placements, src_data_rank=None)
    kinds = [*placements[:-1], Partial("avg" if average else "sum")]
    return DTensor.from_local(whole.to_local(), mesh(name), kinds, shape=whole.shape, stride=whole.stride())


def parameter(entry: Entry) -> nn.Parameter:
    """A parameter that has this process' part of the gradient."""
    dense = entry.gradient.to_dense() if entry.gradient.is_sparse else entry.gradient
    p = nn.Parameter(laid_out(torch.zeros_like(dense), entry.layout))
    if dist.get_rank() not in entry.absent:
        build = _partial if entry.layout.startswith("partial") else laid_out
        p.grad = build(entry.gradient, entry.layout)
    return p


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(entry: Entry, tensor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Which elements of the whole this process holds, and their values; None for no gradient."""
    numbers = torch.arange(entry.gradient.numel()).view(entry.gradient.shape)
    values = None if tensor is None else local(tensor).detach()
    if values is not None and values.is_sparse:
        values = values.to_dense()
    return local(laid_out(numbers, entry.layout)).flatten(), None if values is None else values.flatten()


def gathered(entry: Entry, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """One vector of what all processes held; NaN where nobody held anything, None if all had no gradient.

    Those that hold the same elements must hold the same values.
    """
    found = [(places, values) for places, values in parts if values is not None]
    if not found:
        return None
    whole = torch.full((entry.gradient.numel(),), torch.nan, dtype=entry.gradient.dtype)
    seen = torch.zeros(len(whole), dtype=torch.bool)
    for places, values in found:
        assert values.dtype == entry.gradient.dtype
        torch.testing.assert_close(whole[places][seen[places]], values[seen[places]], rtol=0, atol=0, equal_nan=True)
        whole[places], seen[places] = values, True
    return whole


def present(entry: Entry, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """The elements of the whole gradient that any process has, in order."""
    places = [p for p, values in parts if values is not None]
    dense = entry.gradient.to_dense() if entry.gradient.is_sparse else entry.gradient
    return dense.flatten()[torch.cat(places).unique()] if places else None


def _dtype(dtype: torch.dtype, layout: str = "rows", scale: float = 1.0) -> list[Entry]:
    return [Entry(random(*shape, seed=i, dtype=dtype, scale=scale), layout) for i, shape in enumerate([(7, 5), (3,)])]


def _with(value: float, layout: str, dtype: torch.dtype = torch.float32) -> list[Entry]:
    """Three tensors, one element of which is ``value``; it lies on the last rank."""
    bad = random(9, 4, seed=1, dtype=dtype)
    bad[-1, -1] = value
    return [Entry(random(6, 2)), Entry(bad, layout), Entry(random(3, seed=2))]


def same_layout(layout: str) -> list[Entry]:
    """The same numbers in any layout."""
    shapes = [(7, 5), (8, 4), (3, 6), (1, 9), (2, 40)]
    return [Entry(random(*shape, seed=i, scale=10.0 ** (i - 2)), layout) for i, shape in enumerate(shapes)]


LISTS: dict[str, list[Entry]] = {
    "rows, even": [Entry(random(8, 4)), Entry(random(4, seed=1)), Entry(random(16, 2, seed=2))],
    "rows, uneven": [Entry(random(7, 5)), Entry(random(9, seed=1)), Entry(random(5, 3, seed=2))],
    "rows, fewer than ranks": [Entry(random(3)), Entry(random(1, 4, seed=1)), Entry(random(8, 4, seed=2))],
    "nothing on the last rank": [Entry(random(3)), Entry(random(1, 2, seed=1))],
    "columns": [Entry(random(5, 7), "columns"), Entry(random(4, 3, seed=1), "columns")],
    "filters": [Entry(random(4, 3, 5, 2), "last"), Entry(random(6, 3, 1, 1, seed=1), "rows")],
    "hsdp": same_layout("hsdp"),
    "fsdp x tp": [
        *[Entry(random(9, 5, seed=i), layout) for i, layout in enumerate(LAYOUTS) if layout.startswith("fsdp")],
        Entry(random(3, seed=7), "fsdp, tp rows"),
        Entry(random(5, seed=8), "plain"),
    ],
    "tensor parallel alone": [
        Entry(random(5, 3), "tp rows"),
        Entry(random(3, 5, seed=1), "tp columns"),
        Entry(random(4, seed=2), "tp copies"),
    ],
    "tensor parallel beside rows": [Entry(random(6, 3), "tp rows"), Entry(random(7, seed=1), "rows")],
    "slices of one mesh": [
        Entry(random(6, 3), "tp rows"),
        Entry(random(7, seed=1), "dp rows"),
        Entry(random(7, 2, seed=2), "fsdp, tp rows"),
    ],
    "experts": [
        Entry(random(4, 6, 3), "experts"),
        Entry(random(2, 5, seed=1), "ep"),
        Entry(random(7, 3, seed=2), "rows"),
        Entry(random(7, 3, seed=3), "hsdp"),
        Entry(random(2, seed=4), "plain"),
    ],
    "meshes in two orders": [
        Entry(random(7, 3), "other order"),
        Entry(random(3, 7, seed=1), "other order, columns"),
        Entry(random(9, 2, seed=2), "fsdp, tp columns"),
    ],
    "copies": [Entry(random(5, 3), "copies"), Entry(random(3, seed=1), "copies")],
    "copies beside rows": [Entry(random(5, 3), "copies"), Entry(random(9, seed=1))],
    "partial": [
        Entry(random(5, 3), "partial sum"),
        Entry(random(7, seed=1), "partial average"),
        Entry(random(9, 2, seed=2), "partial sum, rows"),
        Entry(random(8, 2, seed=3), "partial over tp"),
        Entry(random(4, seed=4), "rows"),
    ],
    "plain beside rows": [Entry(random(7, 5)), Entry(random(4, seed=1), "plain"), Entry(torch.tensor(3.0), "plain")],
    "one plain element": [Entry(torch.zeros(6)), Entry(torch.tensor(2.0), "plain")],
    "scalars": [Entry(torch.tensor(3.0), "copies"), Entry(torch.tensor(-4.0), "tp copies")],
    "empty tensors": [
        Entry(torch.zeros(0)),
        Entry(torch.zeros(2, 0)),
        Entry(random(5)),
        Entry(torch.zeros(0, 3), "plain"),
        Entry(torch.zeros(0, 3), "copies"),
    ],
    "only empty tensors": [Entry(torch.zeros(0)), Entry(torch.zeros(0, 3), "hsdp")],
    "strided": [Entry(random(5, 9).t()), Entry(random(6, 8, seed=1)[::2, 1::3]), Entry(random(6).flip(0), "plain")],
    "sparse beside rows": [Entry(sparse_with_duplicates(), "plain"), Entry(random(7))],
    "complex": [Entry(torch.complex(random(7, 2), random(7, 2, seed=1))), Entry(random(5, seed=2))],
    "None on some ranks": [
        Entry(random(8, 4), absent=(1,)),
        Entry(random(9, seed=1), absent=(0, 2)),
        Entry(random(5, seed=2)),
    ],
    "None on some ranks, other layouts": [
        Entry(random(8, 4), "hsdp", absent=(1, 3)),  # who hold the same part
        Entry(random(9, 2, seed=1), "fsdp, tp rows", absent=(0, 3)),
        Entry(random(5, seed=2), "tp rows", absent=(0, 2)),
        Entry(random(5, seed=3), "tp copies", absent=(1,)),
    ],
    "everything None on one rank": [
        Entry(random(8, 4), absent=(1,)),
        Entry(random(3, seed=1), "plain", absent=(1,)),
        Entry(random(4, 6, seed=2), "fsdp, tp columns", absent=(1,)),
    ],
    "copies of which some are None": [
        Entry(random(5, 3), "copies", absent=(1,)),
        Entry(random(7, seed=1), "plain", absent=(0, 2)),
        Entry(random(9, seed=2), "rows"),
    ],
    "None on all": [
        Entry(random(8, 4), absent=EVERY_RANK),
        Entry(random(3, seed=1)),
        Entry(random(2, seed=2), "plain"),
    ],
    "all None": [Entry(random(8, 4), absent=EVERY_RANK), Entry(random(3), "plain", absent=EVERY_RANK)],
    "float64": _dtype(torch.float64),
    "bfloat16": _dtype(torch.bfloat16, "hsdp"),
    "float16, large": _dtype(torch.float16, scale=1e4),
    "mixed dtypes": [
        Entry(random(7, 5, dtype=torch.bfloat16)),
        Entry(random(9, seed=1, dtype=torch.float64), "hsdp"),
        Entry(random(4, seed=2, dtype=torch.float16), "plain"),
        Entry(random(4, seed=3), "copies"),
    ],
    "NaN": _with(math.nan, "rows"),
    "NaN in columns": _with(math.nan, "fsdp, tp columns"),
    "NaN in a copy": _with(math.nan, "copies"),
    "inf": _with(math.inf, "rows"),
    "minus inf and NaN": [*_with(-math.inf, "hsdp"), *_with(math.nan, "rows")],
    "zero": [Entry(torch.zeros(7, 2)), Entry(torch.zeros(3), "copies"), Entry(torch.zeros(1), "plain")],
    "huge": [Entry(torch.full((10, 3), 1e30)), Entry(random(5), "hsdp"), Entry(torch.full((2,), 1e30), "copies")],
    "tiny": [Entry(torch.full((10, 3), 1e-30)), Entry(torch.full((2,), 1e-30), "copies")],
    "subnormal": [Entry(torch.full((7,), 1e-42)), Entry(torch.full((2, 3), 1e-42), "plain")],
    "huge beside tiny": [Entry(torch.full((3, 3), 1e-30)), Entry(torch.full((7,), 1e30)), Entry(torch.zeros(3))],
    "huge float64": [Entry(torch.full((6,), 1e200, dtype=torch.float64)), Entry(random(5))],
    "tiny float64": [Entry(torch.full((6,), 1e-200, dtype=torch.float64), "hsdp"), Entry(torch.zeros(2), "plain")],
}

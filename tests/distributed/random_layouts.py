"""Random lists of gradients, laid out in every way, against one flat float64 vector: the right norm, or a refusal.

python tests/distributed/random_layouts.py --cases 100000 [--seed 0] [--world 4] [--bits FILE]

``--bits`` writes a line a case: the bits of the norm and of the gradients that each rank then has, or its refusal.
Those of two versions of gradguard are equal if ``diff`` says nothing.

A case is made from its seed on every rank alike. Numbers are small integers, so that sums are exact in every dtype.
"""

import argparse
import math
import random
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from threads import Ranks, ranks  # noqa: E402

import gradguard as gg  # noqa: E402

REFUSALS = (gg.errors.InvalidValueError, gg.errors.UnsupportedGradientError, gg.errors.InvalidTypeError)

ORDERS = [0.5, 1.0, 2.0, 2.0, 2.0, 3.0, 10.0, math.inf]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
BATCH = 20
"""Cases that ranks go through without a word between them."""

SHAPES = [(), (0,), (1,), (3,), (8,), (4, 4), (5, 3), (0, 3), (8, 1), (2, 3, 4)]
KINDS = ["sum", "avg", "max", "min", "product"]


class Meshes:
    """The meshes of one rank, made once: several roots, their slices, flattened ones, another order of the ranks."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        self.world, half = world, world // 2
        row = init_device_mesh("cpu", (world,), mesh_dim_names=("r",))
        grid = init_device_mesh("cpu", (2, half), mesh_dim_names=("a", "b"))
        cube = init_device_mesh("cpu", (2, 1, half), mesh_dim_names=("c", "d", "e"))
        deep = init_device_mesh("cpu", (1, half, 1, 2), mesh_dim_names=("f", "g", "h", "i"))
        turned = DeviceMesh("cpu", torch.arange(world).view(2, half).T.contiguous(), mesh_dim_names=("j", "k"))
        self.all: list[DeviceMesh] = [row, grid, cube, deep, turned]
        self.all += [grid["a"], grid["b"], cube["c", "e"], cube["e"], deep["g", "i"], deep["i"], turned["j"]]
        self.all += [grid["a", "b"]._flatten("ab"), deep["g", "h"]._flatten("gh")]
        self.held: dict[tuple, Tensor] = {}

    def places(self, shape: Sequence[int], number: int, placements: Sequence[Any]) -> Tensor:
        """Which elements of a tensor this rank holds; of Partial ones all of them."""
        key = self.key(shape, number, placements)
        if key not in self.held:
            numbers = torch.arange(math.prod(shape)).view(list(shape))
            spread = distribute_tensor(numbers, self.all[number], key[2], src_data_rank=None)
            self.held[key] = spread.to_local()
        return self.held[key]

    def key(self, shape: Sequence[int], number: int, placements: Sequence[Any]) -> tuple:
        """The name of such a layout in ``held``."""
        return tuple(shape), number, tuple(Replicate() if p.is_partial() else p for p in placements)


@dataclass
class Item:
    """One parameter: its shape, layout, and the gradient's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: int | None
    placements: tuple[Any, ...]
    of_gradient: tuple[Any, ...]
    gradient_mesh: int | None
    absent: frozenset[int]
    seed: int
    same_gradient_as: int | None = None


@dataclass
class Case:
    """One list, and what is called with it."""

    items: list[Item]
    order: float
    call: str
    twice: bool
    words: str = field(default="")


def case_of(seed: int, meshes: Meshes) -> Case:
    draw = random.Random(seed)
    world = meshes.world
    items = [_item(draw, meshes, world) for _ in range(draw.randint(1, 4))]
    if len(items) > 1 and draw.random() < 0.05:
        items[1] = Item(**{**vars(items[0]), "same_gradient_as": 0})
    call = draw.choice(["norm", "norm", "norm", "total", "global", "each", "value", "guard"])
    for item in items:  # a clamp lays gradients out anew where they are: who has none does not come
        if call == "value" and item.of_gradient != item.placements:
            item.absent = frozenset()
        if call == "guard" and any(p.is_partial() for p in item.placements):  # torch cannot step such parameters
            item.placements = item.of_gradient = tuple(Replicate() for _ in item.placements)
            item.gradient_mesh = item.mesh
    spanning = [i for i in items if i.mesh is not None and meshes.all[i.mesh].size() == meshes.world]
    if (
        call == "total" or not spanning
    ):  # a list of gradients does not tell where missing ones lie, nor plain tensors who else has them
        for item in items:
            item.absent = frozenset()
    return Case(items, draw.choice(ORDERS), call, draw.random() < 0.1, f"seed {seed}")


def _item(draw: random.Random, meshes: Meshes, world: int) -> Item:
    shape = draw.choice(SHAPES)
    number = draw.choice([None, *range(len(meshes.all)), *range(len(meshes.all))])
    placements = () if number is None else _placements(draw, meshes.all[number], shape, 0.04)
    of_gradient, gradient_mesh = placements, number
    chance = draw.random()
    if chance < 0.2 and number is not None:
        of_gradient = _placements(draw, meshes.all[number], shape, 0.5)
    elif chance < 0.23:
        gradient_mesh = draw.choice([None, *range(len(meshes.all))])
        of_gradient = () if gradient_mesh is None else _placements(draw, meshes.all[gradient_mesh], shape, 0.1)
    kind, dtype = draw.random(), draw.choice(DTYPES)
    some = frozenset(draw.sample(range(world), draw.randint(1, world)))
    if number is not None and meshes.all[number].size() < world:  # other slices are other groups: each its own norm
        kind = min(kind, 0.74)
    absent = frozenset() if kind < 0.7 else frozenset(range(world)) if kind < 0.75 else some
    if any(p.is_partial() for p in of_gradient):
        dtype = draw.choice(DTYPES[:-1])  # there are sums of complex numbers only
    if any(p.is_partial() for p in of_gradient) or gradient_mesh != number:  # who has it does something of its own
        absent = frozenset()
    return Item(shape, dtype, number, placements, of_gradient, gradient_mesh, absent, draw.getrandbits(30))


def _placements(draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], partial: float) -> tuple[Any, ...]:
    if mesh.ndim > 1 and shape and draw.random() < 0.15:  # what fully_shard makes of tensor parallel rows
        dim, outer = draw.randrange(len(shape)), draw.randrange(mesh.ndim - 1)
        found: list[Any] = [Replicate()] * mesh.ndim
        found[outer] = _StridedShard(dim, split_factor=mesh.size(mesh.ndim - 1))
        found[-1] = Shard(dim)
        return tuple(found)
    kind = draw.choice(KINDS)
    found = []
    for _ in range(mesh.ndim):
        if draw.random() < partial:
            found.append(Partial(kind))
        elif shape and draw.random() < 0.65:
            found.append(Shard(draw.randrange(len(shape))))
        else:
            found.append(Replicate())
    return tuple(found)


def whole_of(item: Item) -> Tensor:
    generator = torch.Generator().manual_seed(item.seed)
    numbers = torch.randint(-8, 9, item.shape, generator=generator).double()
    return numbers.to(item.dtype)


def _summands(item: Item, full: Tensor, mesh: DeviceMesh) -> Tensor:
    """What this rank adds: integers that differ from rank to rank."""
    partial = [i for i, p in enumerate(item.of_gradient) if p.is_partial()]
    where = mesh.get_coordinate()
    assert where is not None
    count = math.prod(mesh.size(i) for i in partial)
    index = 0
    for i in partial:
        index = index * mesh.size(i) + where[i]
    match item.of_gradient[partial[0]].reduce_op:
        case "sum":
            return full + 1 - count if index == 0 else torch.ones_like(full)
        case "avg":
            return full * count + 1 - count if index == 0 else torch.ones_like(full)
        case "max":
            return full if index == 0 else full - 1
        case "min":
            return full if index == 0 else full + 1
    return full if index == 0 else torch.ones_like(full)


def _spread(item: Item, meshes: Meshes, of_gradient: bool) -> Tensor:
    number = item.gradient_mesh if of_gradient else item.mesh
    placements = item.of_gradient if of_gradient else item.placements
    full = whole_of(item) if of_gradient else torch.zeros(item.shape, dtype=item.dtype)
    if number is None:
        return full
    mesh = meshes.all[number]
    if of_gradient and any(p.is_partial() for p in placements):
        full = _summands(item, full, mesh)
    local = full.flatten()[meshes.places(item.shape, number, placements)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def expected(case: Case, meshes_of: Sequence[Meshes]) -> float:
    """The norm of what any rank has a gradient of, as one float64 vector."""
    vectors = [torch.zeros(0, dtype=torch.float64)]
    for item in case.items:
        if item.same_gradient_as is not None and case.call == "total":  # it takes gradients
            continue
        full = whole_of(item)
        flat = full.to(torch.complex128).abs().flatten() if full.is_complex() else full.double().abs().flatten()
        there = torch.zeros(flat.numel(), dtype=torch.bool)
        for rank, meshes in enumerate(meshes_of):
            if rank in item.absent:
                continue
            everything = torch.arange(flat.numel())
            number, placements = item.gradient_mesh, item.of_gradient
            held = everything if number is None else meshes.held[meshes.key(item.shape, number, placements)]
            there[held.flatten()] = True
        vectors.append(flat[there])
    return float(torch.linalg.vector_norm(torch.cat(vectors), case.order)) if sum(map(len, vectors)) else 0.0


class Norm(float):
    """A norm on one rank.

    Attributes:
        left: A checksum of the gradients that the call has left there.
    """

    left: int = 0

    @property
    def bits(self) -> str:
        """Itself and the checksum, to the last bit."""
        return f"{self.hex()} {self.left:08x}"


def checksum(parameters: Sequence[nn.Parameter]) -> int:
    """A checksum of the gradients on this rank."""
    total = 0
    for p in parameters:
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if local is not None:
            total = zlib.crc32(bytes(local.contiguous().view(-1).view(torch.uint8).tolist()), total)
    return total


def outcome(case: Case, meshes: Meshes) -> Any:
    """What this rank says, and by how much its gradients were multiplied: the norm, or the error."""
    parameters: list[nn.Parameter] = []
    for item in case.items:
        p = nn.Parameter(_spread(item, meshes, False))
        if dist.get_rank() not in item.absent:
            p.grad = _spread(item, meshes, True) if item.same_gradient_as is None else parameters[0].grad
        parameters.append(p)
    listed = [*parameters, *(parameters[:1] if case.twice else [])]
    try:
        norm = Norm(_called(case, listed))
        norm.left = checksum(parameters)
        if case.call in ("norm", "global"):
            _check_gradients(case, parameters, min(1.0, 1.0 / (norm + 1e-6)) if norm else 1.0, meshes)
    except Exception as error:
        return error
    return norm


def _check_gradients(case: Case, parameters: list[nn.Parameter], coefficient: float, meshes: Meshes) -> None:
    for item, p in zip(case.items, parameters, strict=True):
        alike = item.placements == item.of_gradient and item.mesh == item.gradient_mesh
        if p.grad is None or (item.absent and not alike):
            continue
        right = whole_of(item).flatten()
        if item.mesh is not None:
            right = right[meshes.places(item.shape, item.mesh, item.placements)]
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        wide = torch.complex128 if right.is_complex() else torch.float64
        rounding = {"rtol": 1e-2, "atol": 1e-4} if right.dtype.itemsize == 2 else {"rtol": 2e-5, "atol": 1e-7}
        torch.testing.assert_close(local.to(wide).flatten(), coefficient * right.to(wide).flatten(), **rounding)


def _called(case: Case, listed: list[nn.Parameter]) -> Any:
    match case.call:
        case "norm":
            return gg.clip_grad_norm_(listed, 1.0, case.order)
        case "total":
            return gg.get_total_norm([p.grad for p in listed], case.order)
        case "global":
            return gg.ClipByGlobalNorm(1.0, case.order)(listed).norm
        case "each":
            return gg.ClipByNorm(1.0, case.order)(listed).norm
        case "value":
            gg.clip_grad_value_(listed, 100.0)
            return gg.ClipByValue(1.0)(listed).norm if case.order == 2 else gg.clip_grad_norm_(listed, 1.0, case.order)
    optimizer = torch.optim.SGD(list({id(p): p for p in listed}.values()), lr=0.0, foreach=False)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1e9, case.order), nonfinite="propagate")
    optimizer.step()
    assert guard.last is not None
    return guard.last.norm


def verdict(case: Case, found: Sequence[Any], right: float) -> str:
    """``right``, ``refused: ...``, or what is wrong."""
    errors = [x for x in found if isinstance(x, BaseException)]
    if len(errors) == len(found):
        if all(isinstance(error, REFUSALS) for error in errors):
            return f"refused: {type(errors[0]).__name__}"
        if all(isinstance(error, gg.errors.DistributedError) for error in errors):
            return "refused: DistributedError"
        if "ReduceScatter does not support" in str(errors[0]):  # torch 2.15's process group of threads
            return "refused: by the process group"
        wrong = "WRONG: gradients" if isinstance(errors[0], AssertionError) else "raised"
        return f"{wrong}: {type(errors[0]).__name__}: {str(errors[0])[:90]}"
    if errors:
        return f"WRONG: some ranks raise: {type(errors[0]).__name__}: {str(errors[0])[:90]}"
    if len(set(found)) > 1 and not all(math.isclose(x, right, rel_tol=2e-5) for x in found):
        return "WRONG: ranks differ"
    if not math.isclose(found[0], right, rel_tol=2e-5, abs_tol=1e-30):
        return "WRONG: norm"
    return "right"


def try_cases(threads: Ranks, seeds: Sequence[int], seconds: float) -> list[tuple[Case, str, Any, float]]:
    """Run the cases of ``seeds`` on all ranks and judge them.

    Raises:
        TimeoutError: If a rank waits in vain.
    """
    found = threads(lambda rank: _outcomes(seeds), seconds)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    meshes = [its_meshes for its_meshes, _ in found]
    judged = []
    for seed, *outcomes in zip(seeds, *(outcomes for _, outcomes in found), strict=True):
        case = case_of(seed, meshes[0])
        right = expected(case, meshes)
        judged.append((case, verdict(case, outcomes, right), outcomes, right))
    return judged


_of_this_rank = threading.local()


def _outcomes(seeds: Sequence[int]) -> tuple[Meshes, list[Any]]:
    if not hasattr(_of_this_rank, "meshes"):
        _of_this_rank.meshes = Meshes()
    return _of_this_rank.meshes, [outcome(case_of(seed, _of_this_rank.meshes), _of_this_rank.meshes) for seed in seeds]


def _judged(threads: Ranks, seeds: Sequence[int]) -> Iterator[tuple[Any, str, Any, float]]:
    """The same; where one of them hangs, each by itself."""
    try:
        yield from try_cases(threads, seeds, 60.0)
    except TimeoutError:
        if len(seeds) == 1:
            yield f"seed {seeds[0]}", "WRONG: a rank waits in vain", None, math.nan
            return
        for seed in seeds:
            yield from _judged(threads, [seed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--show", type=int, default=3, help="how many cases of each wrong kind")
    parser.add_argument("--bits", type=Path, help="a file for the bits of all norms and gradients")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=50)
    counts: Counter[str] = Counter()
    lines: list[str] = []
    with ranks(args.world) as threads:
        for start in range(args.seed, args.seed + args.cases, BATCH):
            seeds = range(start, min(start + BATCH, args.seed + args.cases))
            for case, said, found, right in _judged(threads, seeds):
                counts[said] += 1
                bits = [one.bits if isinstance(one, Norm) else type(one).__name__ for one in found or ()]
                lines.append("; ".join([getattr(case, "words", case), *bits]))
                if not said.startswith(("right", "refused")) and counts[said] <= args.show:
                    print(said, case, found, right, sep="\n  ", flush=True)
            if (start - args.seed) % (100 * BATCH) == 0:
                print(time.strftime("%H:%M:%S"), dict(counts), flush=True)
    if args.bits:
        args.bits.write_text("\n".join([*lines, ""]), encoding="utf-8")
    for said, count in counts.most_common():
        print(f"{count:8,} {said}")


if __name__ == "__main__":
    main()

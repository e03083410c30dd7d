"""Saved gradients of sharded models: every layout gives the whole gradient, and ranks that differ are found."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from training import WAYS, Network, backward, batch, models, own_samples

import gradguard as gg
from gradguard.distributed.engines import shard_of
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.parity.compare import compare
from gradguard.parity.shards import Whole
from gradguard.parity.whole import _contrast
from sharded import LAYOUTS, laid_out, local

SHAPES = [(7, 5, 3), (6, 2, 2), (16, 4, 8), (1, 2, 3), (9, 1, 1)]


def saved(model, step, **options):
    return gg.save_gradients(None, model, step, **options)


def whole_batch(twin):
    x, y = batch(0)
    return lambda: F.mse_loss(twin(x), y).backward()


# Places in the whole.


def places_of_all_layouts():
    """What `shard_of` says, and what DTensor itself does to numbered elements."""
    found = []
    for layout in LAYOUTS:
        for shape in SHAPES:
            numbers = torch.arange(math.prod(shape)).view(shape)
            mine = laid_out(numbers, layout)
            part = shard_of(mine)
            places = [p for _, p in part.pieces(local(mine))]
            told = torch.cat(places) if places else numbers.flatten()[:0]
            found.append((layout, shape, told.tolist(), local(mine).flatten().tolist(), part.key))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_places_are_those_that_dtensor_itself_gives(pool, world):
    by_rank = pool(world).run(places_of_all_layouts)
    for same in zip(*by_rank, strict=True):
        for layout, shape, told, right, _ in same:
            assert told == right, (layout, shape)
        for _, _, told, _, key in same:  # one key for one part, and another for another
            for _, _, other, _, key_of_other in same:
                assert (told == other) == (key == key_of_other) or not (told or other)


# Healthy layouts.


def saved_in(way):
    model, twin = models(way)
    sharded = saved(model, lambda: backward(model, way, 0), rows=["*up*"])
    alone = saved(twin, whole_batch(twin), rows=["*up*"])  # the same on all ranks
    report = compare(alone, sharded)
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    same = all(torch.equal(p, weights["module." + n if "DDP" in way else n]) for n, p in twin.named_parameters())
    return report.verdict, str(report), same, [p.copies for p in sharded.parameters]


OTHER_PAIRS = [pytest.param(way, 2, marks=pytest.mark.exhaustive) for way in WAYS if way != "FSDP2"]
EIGHT = [pytest.param(way, 8, marks=pytest.mark.exhaustive) for way in ("DDP", "HSDP", "FSDP2 x TP")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("way", "world"),
    [("FSDP2", 2), *OTHER_PAIRS, *(pytest.param(w, 4, marks=pytest.mark.slow) for w in WAYS), *EIGHT],
)
def test_every_parallelism_has_the_gradients_of_one_process(pool, way, world):
    for verdict, text, same, copies in pool(world).run(saved_in, way):
        assert verdict == "PASS", text
        assert same  # weights are as they were
        if way.startswith("DDP"):
            assert set(copies) == {world}
        if way.startswith("FSDP2,") or way == "FSDP2":
            assert set(copies) == {1}


def saved_under_fsdp1(strategy, original):
    torch.manual_seed(0)
    model = Network()
    twin = copy.deepcopy(model)
    how = {
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
        "use_orig_params": original,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 and its strategies are deprecated
        model.first = FullyShardedDataParallel(model.first, **how)
        model = FullyShardedDataParallel(model, **how)
        x, y = batch(0)
        part = own_samples("FSDP1")
        new = saved(model, lambda: F.mse_loss(model(x[part]), y[part]).backward(), rows=["*head.weight"])
    report = compare(saved(twin, whole_batch(twin), rows=["*head.weight"]), new)
    return (
        report.verdict,
        str(report),
        sorted(p.name for p in new.parameters) == sorted(n for n, _ in twin.named_parameters()),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_has_the_gradients_of_one_process(pool, strategy, original):
    for verdict, text, same_names in pool(2).run(saved_under_fsdp1, strategy, original):
        assert verdict == "PASS", text
        assert same_names


# Bugs of layouts.


def told(report):
    return [(f.kind, f.message, f.parameters) for f in report.findings]


def not_divided():
    model, twin = models("DDP")
    x, y = (t[own_samples("DDP")] for t in batch(0))

    def step():
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return told(compare(saved(twin, whole_batch(twin)), saved(model, step)))


def test_a_sum_in_place_of_the_mean_is_off_by_the_world_size(pool):
    (finding,) = pool(2).run(not_divided)[0]
    assert finding[0] == "factor"
    assert "× 2 ±" in finding[1] or "× 2.0" in finding[1] or "× 1.99" in finding[1]
    assert "(world size or counted twice)" in finding[1]


def without_reduction(kind):
    model, twin = models("DDP")
    x, y = (t[own_samples("DDP")] for t in batch(0))

    def step():
        with model.no_sync():
            loss = F.mse_loss(model(x), y)
            (loss if kind == "mean" else loss / 2).backward()

    return told(compare(saved(twin, whole_batch(twin)), saved(model, step)))


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_missing_all_reduce_is_told_with_its_kind(pool, kind):
    (finding,) = pool(2).run(without_reduction, kind)[0]
    assert finding[0] == "ranks"
    assert f"a {kind} over 2 ranks is missing in the new run: the {kind} of its copies is right" in finding[1]


def norm_not_reduced():
    """Sequence parallelism whose norms see half of the tokens each (Megatron#1446)."""
    model, twin = models("DDP")
    x, y = (t[own_samples("DDP")] for t in batch(0))

    def step():
        F.mse_loss(model(x), y).backward()
        for block in (model.module.first, model.module.second):
            block.norm.weight.grad *= 1 + 0.5 * (1 - 2 * dist.get_rank())

    return told(compare(saved(twin, whole_batch(twin)), saved(model, step)))


def test_norms_that_are_not_reduced_are_the_only_ones_flagged(pool):
    (finding,) = pool(2).run(norm_not_reduced)[0]
    assert finding[0] == "ranks"
    assert finding[2] == ("first.norm.weight", "second.norm.weight")


def shard_lost():
    """`full_tensor()` of a gradient whose layout was guessed: one rank's rows are lost (Automodel#1260)."""
    model, twin = models("FSDP2")

    def step():
        backward(model, "FSDP2", 0)
        if dist.get_rank() == 1:
            local(model.first.up.weight.grad).zero_()

    rows = ["first.up.weight"]
    return told(compare(saved(twin, whole_batch(twin), rows=rows), saved(model, step, rows=rows)))


def test_the_rows_of_a_lost_shard_are_told(pool):
    assert pool(2).run(shard_lost)[0] == [("rows", "rows 5–9 of 10", ("first.up.weight",))]


# Parts that are ordinary tensors.


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.expert = nn.ModuleList(nn.Linear(4, 3) for _ in range(count))
        self.dense = nn.Linear(4, 4)


def experts(factor, say):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    full = Experts(world)
    x = torch.randn(world, 5, 4, generator=torch.Generator().manual_seed(1))
    own = Experts(1)
    own.dense.load_state_dict(full.dense.state_dict())
    own.expert[0].load_state_dict(full.expert[rank].state_dict())

    def whole_step():
        sum(full.expert[i](full.dense(x[i])).square().sum() for i in range(world)).backward()

    def step():
        own.expert[0](own.dense(x[rank])).square().sum().backward()
        own.expert[0].weight.grad *= factor
        for p in own.dense.parameters():
            dist.all_reduce(p.grad)

    def place(name):
        if name.startswith("expert.0."):
            shape = own.get_parameter(name).shape
            return name.replace("0", str(rank)), shape, [0] * len(shape)
        return None

    return told(compare(saved(full, whole_step), saved(own, step, shard_of=place if say else None)))


def test_experts_are_compared_each_with_itself(pool):
    assert pool(2).run(experts, 1.0, True)[0] == []
    (finding,) = pool(2).run(experts, 2.0, True)[0]
    assert finding[0] == "factor"
    assert finding[2] == ("expert.0.weight", "expert.1.weight")


def test_experts_that_do_not_say_so_are_refused(pool):
    for outcome in pool(2).outcomes(experts, 1.0, False):
        assert isinstance(outcome, UnsupportedGradientError)
        assert "expert.0.weight has different weights on different ranks" in str(outcome)
        assert "shard_of=" in str(outcome)


def gather(own):
    """The columns of all ranks; gradients flow to those of this one."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach().contiguous())
    parts[dist.get_rank()] = own
    return parts


def megatron(way):
    """A column-parallel layer whose shards are ordinary tensors, and a stage that has a layer alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    full = nn.ModuleDict({"up": nn.Linear(4, 6), "stage0": nn.Linear(6, 2), "stage1": nn.Linear(2, 2)})
    x = torch.randn(5, 4)
    rows = slice(6 // world * rank, 6 // world * (rank + 1))
    own = nn.ModuleDict({"up": nn.Linear(4, 6 // world), f"stage{rank}": full[f"stage{rank}"]})
    with torch.no_grad():
        for mine, all_rows in zip(own["up"].parameters(), full["up"].parameters(), strict=True):
            mine.copy_(all_rows[rows])

    def whole_step():
        full["stage1"](full["stage0"](full["up"](x))).square().sum().backward()

    def step():
        hidden = torch.cat(gather(own["up"](x)), 1)
        for i in range(world):
            layer = own if i == rank else full
            hidden = layer[f"stage{i}"](hidden)
        hidden.square().sum().backward()

    def place(name):
        begin = {"right": rows.start, "overlap": 0, "outside": 5, "gap": 0}[way]
        if way == "gap" and rank == 1:
            return (f"alone.{name}", own.get_parameter(name).shape, [0] * own.get_parameter(name).dim())
        return {"up.weight": ("up.weight", (6, 4), (begin, 0)), "up.bias": ("up.bias", (6,), (begin,))}.get(name)

    return told(compare(saved(full, whole_step), saved(own, step, shard_of=place)))


def test_shards_and_stages_of_ordinary_tensors(pool):
    assert pool(2).run(megatron, "right")[0] == []


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("overlap", "hold 12 of the 24"),
        ("outside", "has no part of shape"),
        ("gap", "hold 12 of the 24"),
    ],
)
def test_shards_that_make_no_whole_are_refused(pool, way, words):
    for error in pool(2).outcomes(megatron, way):
        assert isinstance(error, UnsupportedGradientError | InvalidValueError)
        assert words in str(error)


class Gathered(torch.autograd.Function):
    """Keys or values of all ranks' tokens; their part in other ranks' losses comes back, unless it is lost."""

    @staticmethod
    def forward(ctx, own, is_lost):
        ctx.is_lost = is_lost
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if not ctx.is_lost:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x, begin=0, gather=lambda t: t):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = gather(k), gather(v)
        seen = torch.arange(k.shape[1]) <= begin + torch.arange(q.shape[1])[:, None]
        scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        return self.out(scores.softmax(-1) @ v)


def context_parallel(is_lost):
    """Each rank has some tokens of each sample, and attends to those before them on all ranks."""
    torch.manual_seed(0)
    own, full = Attention(), Attention()
    own.load_state_dict(full.state_dict())
    x, size = torch.randn(3, 8, 4), 8 // dist.get_world_size()
    begin = size * dist.get_rank()

    def step():
        out = own(x[:, begin : begin + size], begin, lambda t: Gathered.apply(t, is_lost))
        (out.square().sum() / 72).backward()
        for p in own.parameters():
            dist.all_reduce(p.grad)

    return told(compare(saved(full, lambda: full(x).square().mean().backward()), saved(own, step)))


def test_context_parallelism_is_compared(pool):
    assert pool(2).run(context_parallel, False)[0] == []
    findings = pool(2).run(context_parallel, True)[0]
    assert {p for f in findings for p in f[2]} == {"qkv.weight", "qkv.bias"}


def test_a_contrast_sees_every_pattern_of_copies_and_nothing_in_equal_ones():
    for world in (2, 3, 4, 8, 64):
        whole = Whole("w", (4,), dict.fromkeys(range(world), ((4,), 0, ())))
        weights = [[_contrast(whole, rank, j) for rank in range(world)] for j in range(2)]
        for row in weights:
            assert sum(row) == pytest.approx(0, abs=1e-12)
            assert sum(w * w for w in row) == pytest.approx(1)
        for period in range(2, world + 1):
            pattern = [float(rank % period == 0) for rank in range(world)]
            assert max(abs(sum(w * p for w, p in zip(row, pattern, strict=True))) for row in weights) > 0.01


WORLD = 16


class Sharded(nn.Module):
    """A weight over all ranks, and a copy on each; its gradients are worked out by hand."""

    def __init__(self, weight, rows):
        super().__init__()
        self.weight, self.rows = nn.Parameter(weight), nn.Parameter(rows)

    def step(self, factor=1.0, of_rank=1.0):
        cube = local(self.weight).detach() ** 3 * factor
        if isinstance(self.weight, DTensor):
            whole = {"shape": self.weight.shape, "stride": self.weight.stride()}
            cube = DTensor.from_local(cube, self.weight.device_mesh, self.weight.placements, **whole)
        self.weight.grad = cube
        self.rows.grad = self.rows.detach() ** 3 * of_rank


@pytest.mark.slow
def test_16_ranks_add_up_to_one_process():
    weight, rows = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (150, 6))
    alone = Sharded(weight.clone(), rows.clone())
    reference = saved(alone, alone.step)

    def on(rank, factor=1.0, of_one=1.0):
        grid = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        mine = distribute_tensor(weight.clone(), grid, [Replicate(), Shard(0)], src_data_rank=None)
        model = Sharded(mine, rows.clone())
        return saved(model, lambda: model.step(factor, of_one if rank == 11 else 1.0))

    with ranks(WORLD) as run:
        right = run(on)
        wrong = run(lambda rank: on(rank, 8.0, 1.001))
    for one in (*right, *wrong):
        assert not isinstance(one, BaseException), one
    assert compare(reference, right[0]).verdict == "PASS"
    assert [p.copies for p in right[5].parameters] == [2, 16]
    assert right[0].sketches == right[15].sketches
    of_kind = {finding.kind: finding for finding in compare(reference, wrong[0]).findings}
    assert of_kind.keys() == {"factor", "ranks"}
    assert (of_kind["factor"].factor_name, of_kind["factor"].parameters) == ("size of shard", ("weight",))
    assert of_kind["ranks"].parameters == ("rows",)

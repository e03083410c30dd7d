"""Adaptive clipping on any sharding: the slow twin on whole tensors, and the same clippers on one process."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradguard as gg
from cases import random
from gradguard.clip.adaptive import units_held
from gradguard.errors import InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.tensors.units import UnitLayout
from reference import clip_adaptive as slow_agc
from reference import total_norm
from sharded import LAYOUTS, Entry, gathered, held, laid_out, local, mesh

pytestmark = pytest.mark.sampled(1)  # rows of each table

THRESHOLD = 0.05


class Conv1D(nn.Module):
    """Shaped like Hugging Face's: a linear layer whose weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(5, 6)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x @ self.weight + self.bias


LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), None),
    "narrow": (lambda: nn.Linear(1, 3), None),
    "convolution": (lambda: nn.Conv2d(3, 6, 2), None),
    "transposed": (lambda: nn.ConvTranspose1d(6, 5, 3), 1),
    "grouped": (lambda: nn.ConvTranspose2d(6, 9, 2, groups=3), 3),
    "hugging face": (Conv1D, 1),
}
"""Layers, and into how many groups their output channels along dimension 1 fall; None for rows."""

NEEDS = {"columns": 2, "tp columns": 2, "fsdp, tp columns": 2, "experts": 2, "other order, columns": 2, "last": 3}
PLACED = [name for name in LAYOUTS if not name.startswith("partial")]
MIXED, BESIDE = "a layout for each", "plain beside columns"


def unit_numbers(groups, shape):
    """For each element, the number of its unit."""
    if len(shape) < 2:
        return torch.zeros(shape)
    rows = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    if groups is None:
        return rows
    columns = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    return rows // (shape[0] // groups) * shape[1] + columns


def tables():
    """Every parameter of all layers: its name, weight, gradient and units. Some units bind, some do not."""
    found = []
    for k, (build, groups) in enumerate(LAYERS.values()):
        for j, (name, p) in enumerate(build().named_parameters()):
            seed = 10 * k + j
            scales = 10 ** random(p.shape[0], *[1] * (p.dim() - 1), seed=seed + 500)
            gradient = random(*p.shape, seed=seed + 1000) * scales * 0.03
            found.append((f"{k}.{name}", random(*p.shape, seed=seed), gradient, unit_numbers(groups, p.shape)))
    return found


def layout_at(layout, index, dimensions):
    if layout == MIXED:
        layout = [*PLACED, "plain"][(7 * index) % (len(PLACED) + 1)]
    if layout == BESIDE:
        layout = "columns" if dimensions > 1 else "plain"
    return layout if NEEDS.get(layout, 1) <= dimensions else "rows"


def entries(layout, absent=()):
    return [Entry(g, layout_at(layout, i, g.dim()), absent) for i, (_, _, g, _) in enumerate(tables())]


def model(layout, absent=()):
    """All layers, each process with its part of them; ``layout=None`` gives whole ones."""
    layers = nn.ModuleList([build() for build, _ in LAYERS.values()])
    for entry, (name, weight, gradient, _) in zip(entries(layout or "plain", absent), tables(), strict=True):
        layer, _, attribute = name.partition(".")
        p = nn.Parameter(laid_out(weight, entry.layout))
        if layout is None or dist.get_rank() not in entry.absent:
            p.grad = laid_out(gradient, entry.layout)
        setattr(layers[int(layer)], attribute, p)
    return layers


def parts_of(layers, of):
    return [held(entry, p.grad) for entry, p in zip(of, layers.parameters(), strict=True)]


@contextmanager
def counting(calls):
    """Count the collectives that happen, by name."""
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast")}

    def counted(name):
        def call(*args, **options):
            calls[name] = calls.get(name, 0) + 1
            return kept[name](*args, **options)

        return call

    try:
        for name in kept:
            setattr(dist, name, counted(name))
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def clip_each(layouts, absent, **options):
    found = []
    for layout in layouts:
        layers = model(layout, absent)
        norm = gg.clip_grad_adaptive_(layers, THRESHOLD, **options)
        assert type(norm) is torch.Tensor
        found.append((float(norm), parts_of(layers, entries(layout, absent))))
    return found


def check(seen, of, eps=1e-3):
    """Compare what all processes hold of a model with the slow twin on what they held together before."""
    norms, parts = zip(*seen, strict=True)
    assert len(set(norms)) == 1
    there = []
    for entry, (_, weight, gradient, numbers), *of_one in zip(of, tables(), *parts, strict=True):
        whole = gathered(entry, of_one)  # the same bits on all processes
        if whole is None:
            continue
        known = whole.isfinite().view(gradient.shape)
        gradient = torch.where(known, gradient, 0.0)
        masks = [numbers == k for k in numbers.unique()]
        expected = slow_agc(weight, gradient, masks, THRESHOLD, eps)
        torch.testing.assert_close(whole.view(gradient.shape)[known].double(), expected[known], rtol=2e-6, atol=1e-12)
        there.append(gradient)
    assert norms[0] == pytest.approx(total_norm(there), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_unit_on_every_layout(pool, world):
    layouts = [*PLACED, MIXED]
    by_rank = pool(world).run(clip_each, layouts, ())
    for k, layout in enumerate(layouts):
        check([seen[k] for seen in by_rank], entries(layout))


@pytest.mark.parametrize("layout", ["rows", "columns", "last", "fsdp, tp columns", "copies", "hsdp", BESIDE])
def test_none_gradients_on_some_ranks(pool, layout):
    """A split unit still has its whole weight; gradients that nobody holds count as 0."""
    absent = (1, 3)  # in HSDP, these hold the same part
    check([seen[0] for seen in pool(4).run(clip_each, [layout], absent)], entries(layout, absent))


OPTIONS = [(torch.tensor(THRESHOLD), 1e-3), (THRESHOLD, 2.5)]


def clip_with_options(layout):
    found = []
    for threshold, eps in OPTIONS:
        layers = model(layout)
        norm = gg.clip_grad_adaptive_(layers, threshold, eps=eps)
        found.append((float(norm), parts_of(layers, entries(layout))))
    return found


@pytest.mark.parametrize("layout", ["columns", "other order, columns"])
def test_threshold_tensors_and_eps(pool, layout):
    """Copies of a part must not make its weight look larger than eps."""
    by_rank = pool(4).run(clip_with_options, layout)
    for k, (_, eps) in enumerate(OPTIONS):
        check([seen[k] for seen in by_rank], entries(layout), eps)


def clip_beside_sparse(sharded):
    embedding, linear = nn.Embedding(9, 4, sparse=True), nn.Linear(5, 3, bias=False)
    embedding.weight.data = random(9, 4)
    embedding(torch.tensor([3, 3, 7])).square().sum().mul(100).backward()
    layout = "columns" if sharded else "plain"
    linear.weight = nn.Parameter(laid_out(random(3, 5, seed=1), layout))
    linear.weight.grad = laid_out(random(3, 5, seed=2), layout)
    norm = gg.clip_grad_adaptive_(nn.ModuleList([embedding, linear]), THRESHOLD)
    gradient = linear.weight.grad
    return norm, embedding.weight.grad.to_dense(), gradient.full_tensor() if sharded else gradient


def test_sparse_embedding_gradients_beside_sharded_ones(pool):
    expected = clip_beside_sparse(False)
    for seen in pool(2).run(clip_beside_sparse, True):
        torch.testing.assert_close(seen, expected)


# --- Collectives ------------------------------------------------------------------------------------------------------

ONE_CALL = {
    "function": lambda layers: gg.clip_grad_adaptive_(layers, THRESHOLD),
    "apply": lambda layers: gg.apply_gradient_clipping(layers, "adaptive", THRESHOLD),
    "clipper": gg.ClipAdaptive(THRESHOLD),
    "clipper with exclude": gg.ClipAdaptive(THRESHOLD, exclude="1"),
    "function, raise": lambda layers: gg.clip_grad_adaptive_(layers, THRESHOLD, nonfinite="raise"),
}


def count_collectives(layout):
    layers = model(layout)
    found = {}
    for name, clip in ONE_CALL.items():
        clip(layers)  # the plan is agreed on once
        calls = {}
        with counting(calls):
            clip(layers)
            for p in layers[0].parameters():
                p.grad = None
            clip(layers)
        found[name] = calls
    return found


@pytest.mark.parametrize("layout", ["rows", MIXED])
def test_one_all_reduce_and_nothing_else(pool, layout):
    for calls in pool(4).run(count_collectives, layout):
        assert calls == {name: {"all_reduce": 4 if "raise" in name else 2} for name in ONE_CALL}  # which looks first


# --- Clippers ---------------------------------------------------------------------------------------------------------

CLIPPERS = {
    "alone": lambda: gg.ClipAdaptive(THRESHOLD),
    "one excluded": lambda: gg.ClipAdaptive(THRESHOLD, exclude=["1", "*.bias"]),
    "nothing binds": lambda: gg.ClipAdaptive(1e6),
    "groups": lambda: gg.Groups(
        {"0": gg.ClipAdaptive(0.5), "1": gg.ClipByGlobalNorm(0.1), "2.bias": None}, rest=gg.ClipAdaptive(0.01)
    ),
    "chain": lambda: gg.Chain(gg.ClipByGlobalNorm(1.0), gg.ClipAdaptive(0.02), gg.ClipByNorm(0.03)),
    "chain of two": lambda: gg.Chain(gg.ClipByValue(0.2), gg.ClipAdaptive(0.02), gg.ClipAdaptive(0.005)),
}
STEPS = 25


def told(result, asked=True):
    numbers = [result.norm, result.coefficient, result.clipped, result.nonfinite, result.locked_in]
    each = result.tensor_norms.tolist() if asked else []
    return [math.nan if x is None else float(x) for x in numbers] + each


def clip_for_some_steps(layout, names):
    found = {}
    for name in names:
        clip, results = CLIPPERS[name](), []
        layers = model(layout)
        before = [p.grad for p in layers.parameters()]
        for step in range(STEPS):
            for p, g in zip(layers.parameters(), before, strict=True):
                p.grad = g.clone()
            asked = step % 2 == 0
            results.append(told(clip(layers), asked))
        found[name] = (
            results[0],
            results[-1],
            parts_of(layers, entries(layout)) if layout else list(layers.parameters()),
        )
    return found


def test_clippers_do_and_tell_the_same_as_on_one_process(pool):
    expected = clip_for_some_steps(None, CLIPPERS)
    of = entries(MIXED)
    by_rank = pool(4).run(clip_for_some_steps, MIXED, list(CLIPPERS))
    for name, (first, last, parameters) in expected.items():
        seen = [rank[name] for rank in by_rank]
        assert len({repr(results[:2]) for results in seen}) == 1, name
        assert seen[0][0] == pytest.approx(first, rel=1e-6, nan_ok=True), name
        assert seen[0][1] == pytest.approx(last, rel=1e-6, nan_ok=True), name
        for entry, p, *parts in zip(of, parameters, *[results[2] for results in seen], strict=True):
            torch.testing.assert_close(gathered(entry, parts), p.grad.flatten(), rtol=2e-6, atol=1e-9)


def guarded(layout, scale):
    layers = model(layout)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipAdaptive(THRESHOLD), model=layers, nonfinite="skip")
    results, came = [], [p.grad.clone() for p in layers.parameters()]
    for factor in (1.0, scale, 1.0):  # a skipped step may have clipped them
        for p, gradient in zip(layers.parameters(), came, strict=True):
            p.grad = gradient * factor
        optimizer.step()
        results.append(told(guard.last))
    pairs = zip(entries(layout or "plain"), layers.parameters(), strict=True)
    return guard.skipped_steps, results, [held(e, p) for e, p in pairs]


@pytest.mark.parametrize("scale", [3.0, math.inf])
def test_guards_step_and_skip_together(pool, scale):
    skipped, expected, weights = guarded(None, scale)
    by_rank = pool(4).run(guarded, MIXED, scale)
    assert {rank[0] for rank in by_rank} == {skipped}
    assert len({repr(rank[1]) for rank in by_rank}) == 1
    for ours, right in zip(by_rank[0][1], expected, strict=True):
        assert ours == pytest.approx(right, rel=1e-6, nan_ok=True)
    for entry, (_, whole), *parts in zip(entries(MIXED), weights, *[rank[2] for rank in by_rank], strict=True):
        torch.testing.assert_close(gathered(entry, parts), whole.detach(), rtol=2e-6, atol=1e-7)


# --- Non-finite and excluded ------------------------------------------------------------------------------------------


def clip_bad(layout, value, policy, clip):
    layers = model(layout)
    places, _ = held(entries(layout)[0], layers[0].weight)
    flat = local(layers[0].weight.grad).view(-1)
    flat[places == 34] = value  # the last element: it lies on one rank
    if clip == "function":
        gg.clip_grad_adaptive_(layers, THRESHOLD, nonfinite=policy)
    else:
        gg.ClipAdaptive(THRESHOLD)(layers, nonfinite=policy)
    return parts_of(layers, entries(layout))


@pytest.mark.parametrize("clip", ["function", "clipper"])
def test_raise_names_the_parameter_on_every_rank(pool, clip):
    for error in pool(4).outcomes(clip_bad, "columns", math.nan, "raise", clip):
        assert isinstance(error, NonFiniteGradientError)
        assert "0.weight" in str(error)
        assert "0.bias" not in str(error)


@pytest.mark.parametrize("clip", ["function", "clipper"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_zero_makes_all_gradients_zero(pool, layout, clip):
    for parts in pool(4).run(clip_bad, layout, math.nan, "zero", clip):
        assert all(not values.any() for _, values in parts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_bad_unit_leaves_the_others_right(pool, layout, value):
    by_rank = pool(4).run(clip_bad, layout, value, "propagate", "function")
    _, weight, gradient, numbers = tables()[0]
    gradient = gradient.clone()
    gradient[-1, -1] = value
    expected = slow_agc(weight, gradient, [numbers == k for k in range(7)], THRESHOLD)
    whole = gathered(entries(layout)[0], [parts[0] for parts in by_rank]).view(7, 5)
    torch.testing.assert_close(whole.double(), expected, rtol=2e-6, atol=1e-12, equal_nan=True)


def clip_without(exclude):
    layers = model("columns")
    before = [local(p.grad).clone() for p in layers.parameters()]
    norm = gg.clip_grad_adaptive_(layers, THRESHOLD, exclude=layers[0] if exclude is None else exclude)
    same = [torch.equal(local(p.grad), b) for p, b in zip(layers.parameters(), before, strict=True) if b.numel()]
    return float(norm), same[:2], all(same[2:])


@pytest.mark.parametrize("exclude", ["0", None])
def test_excluded_parameters_stay_and_are_measured(pool, exclude):
    expected = total_norm([g for _, _, g, _ in tables()])
    for norm, same, others in pool(2).run(clip_without, exclude):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert same == [True, True]
        assert not others


# --- Layouts that other tools make ------------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 10), nn.Linear(10, 5), nn.LayerNorm(5)
        self.third = Conv1D()
        nn.init.normal_(self.third.weight)

    def forward(self, x):
        return self.third(self.norm(self.second(self.first(x).relu())))


def train_fsdp_and_tensor_parallel():
    torch.manual_seed(0)
    plain = Network()
    network, grid = copy.deepcopy(plain), mesh("grid")
    parallelize_module(network, grid["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(network.third, mesh=grid["dp"])  # which gives it a class of another name
    fully_shard(network, mesh=grid["dp"])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for net in (plain, network):
        net(x).square().sum().backward()
    norms = [float(gg.clip_grad_adaptive_(net, THRESHOLD)) for net in (plain, network)]
    pairs = zip(plain.parameters(), network.parameters(), strict=True)
    return norms, [(p.grad, q.grad.full_tensor()) for p, q in pairs]


def test_fsdp_times_tensor_parallel(pool):
    for norms, found in pool(4).run(train_fsdp_and_tensor_parallel):
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for right, ours in found:
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-8)


def places_of_rows(sizes):
    found = []
    for size in sizes:
        layer = nn.Linear(4, size, bias=False)
        layer.weight.data = torch.arange(4.0 * size).view(size, 4)
        holder = nn.Sequential(layer)
        parallelize_module(holder, mesh("grid")["tp"], {"0": ColwiseParallel()})
        fully_shard(holder, mesh=mesh("grid")["dp"])
        units = units_held(holder[0].weight, UnitLayout(dim=1, groups=size), "weight")
        found.append((units.places.tolist(), local(holder[0].weight).detach().flatten().tolist()))
    return found


def test_numbers_of_the_rows_that_fully_shard_leaves_to_a_process(pool):
    for found in pool(4).run(places_of_rows, [2, 3, 5, 6, 7, 8, 9, 13]):
        for ours, right in found:
            assert ours == right


def clip_flattened():
    model = FullyShardedDataParallel(nn.Linear(4, 3), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(2, 4)).sum().backward()
    return gg.clip_grad_adaptive_(model)


def test_fsdp1_is_refused(pool):
    for error in pool(2).outcomes(clip_flattened):
        assert isinstance(error, UnsupportedGradientError), error
        assert "fully_shard(model)" in str(error)


def clip_partial_parameter():
    row = mesh("row")
    p = nn.Parameter(DTensor.from_local(torch.ones(3, 2), row, [Partial()]))
    p.grad = DTensor.from_local(torch.ones(3, 2), row, [Partial()])
    return gg.clip_grad_adaptive_([("strange", p)])


def test_a_layout_that_does_not_tell_is_refused(pool):
    for error in pool(2).outcomes(clip_partial_parameter):
        assert isinstance(error, UnsupportedGradientError)
        assert "`strange` is the sum of what its processes hold" in str(error)
        assert "exclude it" in str(error)


# --- Pipeline stages --------------------------------------------------------------------------------------------------

NAMES = ["first", "second"]


def stages(threshold, by_mesh, options):
    """Two stages, each sharded by columns over two processes; the second has another number of units."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = grid.get_local_rank("pp")
    own, tied = (random(7, 5), random(7, 5, seed=1)) if stage == 0 else (random(3, 6), random(3, 6, seed=1))
    columns = lambda t: torch.distributed.tensor.distribute_tensor(t, grid["dp"], [Shard(1)], src_data_rank=None)  # noqa: E731
    copies = lambda t: torch.distributed.tensor.distribute_tensor(t, grid["dp"], [Replicate()], src_data_rank=None)  # noqa: E731
    layers = nn.ModuleDict({NAMES[stage]: nn.Linear(1, 1, bias=False), "tied": nn.Linear(1, 1, bias=False)})
    named = {NAMES[stage]: (columns, own, tied), "tied": (columns, random(4, 3, seed=2), random(4, 3, seed=3))}
    for name, (cut, weight, gradient) in named.items():
        layers[name].weight = nn.Parameter(cut(weight))
        layers[name].weight.grad = cut(gradient)
    layers.scale = nn.Parameter(copies(torch.ones(2)))
    layers.scale.grad = copies(torch.full((2,), 2.0 + stage))
    along = {"mesh": grid["pp"]} if by_mesh else {"process_group": grid["pp"].get_group()}
    along["shared"] = {"tied": layers["tied"].weight}
    gg.clip_grad_adaptive_(layers, threshold, **along, **options)
    calls = {}
    for name, (cut, _, gradient) in named.items():
        layers[name].weight.grad = cut(gradient)
    layers.scale.grad = copies(torch.full((2,), 2.0 + stage))
    with counting(calls):
        norm = gg.clip_grad_adaptive_(layers, threshold, **along, **options)
    found = {name: layers[name].weight.grad.full_tensor() for name in named}
    return float(norm), calls, {**found, f"scale {stage}": layers.scale.grad.full_tensor()}


def staged_tensors():
    return {
        "first": (random(7, 5), random(7, 5, seed=1)),
        "second": (random(3, 6), random(3, 6, seed=1)),
        "tied": (random(4, 3, seed=2), random(4, 3, seed=3)),
        "scale 0": (torch.ones(2), torch.full((2,), 2.0)),
        "scale 1": (torch.ones(2), torch.full((2,), 3.0)),
    }


@pytest.mark.parametrize("by_mesh", [True, False])
@pytest.mark.parametrize("exclude", [None, "second"])
def test_pipeline_stages(pool, by_mesh, exclude):
    options = {} if exclude is None else {"exclude": exclude}
    tensors = staged_tensors()
    expected = total_norm([g for _, g in tensors.values()])
    for norm, calls, gradients in pool(4).run(stages, THRESHOLD, by_mesh, options):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert calls == {"all_reduce": 1}
        for name, gradient in gradients.items():
            weight, before = tensors[name]
            numbers = unit_numbers(None, weight.shape)
            masks = [numbers == k for k in numbers.unique()]
            right = before.double() if name == exclude else slow_agc(weight, before, masks, THRESHOLD)
            torch.testing.assert_close(gradient.double(), right, rtol=2e-6, atol=1e-12)


def test_a_pattern_that_fits_no_stage_is_an_error_on_all(pool):
    for error in pool(4).outcomes(stages, THRESHOLD, True, {"exclude": "thrid"}):
        assert isinstance(error, InvalidValueError)
        assert "matches no parameter; the parameters are" in str(error)
        assert "first.weight" in str(error)
        assert "second.weight" in str(error)

"""Pruning: a clamp is left out only where it changes nothing, bit for bit, and plans serve only where they hold."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradguard as gg
from gradguard.backward_clip import plan as plans
from gradguard.backward_clip.graph import Graph, root_of, walk
from gradguard.backward_clip.plan import Choice, make_plan, plan_for

SYMMETRIC = Choice(bounds="symmetric")
SYMMETRIC_RULE = gg.ErrorClipByValue(0.3)
RULES = [
    SYMMETRIC_RULE,
    gg.ErrorClipByValue(0.5, min=0.0),
    gg.ErrorClipByValue(0.0, min=-0.5),
    gg.ErrorClipByValue(2.0, min=-1.0),
    gg.ErrorClipByValue(1.0, min=0.1),
    gg.ErrorClipByValue(-0.1, min=-0.2),
]
ALPHAS, SLOPES = (1, 0.5, -1, 3), (0.01, 1.0, 4.0, -0.5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Operation = Callable[[Tensor, Tensor, int], object]
OPERATIONS: dict[str, Operation] = {
    "scale": lambda a, b, k: a * (3.0, -2.0, 0.5, 1.5)[k % 4],
    "add": lambda a, b, k: torch.add(a, b, alpha=ALPHAS[k % 4]),
    "sub": lambda a, b, k: torch.sub(a, b, alpha=ALPHAS[k % 4]),
    "add a constant": lambda a, b, k: torch.add(a, torch.ones(1, a.shape[-1]), alpha=ALPHAS[k % 4]),
    "subtract from a constant": lambda a, b, k: torch.sub(torch.ones(3, 1, 1), a, alpha=ALPHAS[k % 4]),
    "sigmoid gate": lambda a, b, k: a * b.sigmoid(),
    "tanh gate": lambda a, b, k: b.tanh() * a,
    "softmax gate": lambda a, b, k: a * b.softmax(-1),
    "mul": lambda a, b, k: a * b,
    "twice": lambda a, b, k: a + a,
    "relu": lambda a, b, k: F.relu(a),
    "relu in place": lambda a, b, k: (a * 1.5).relu_(),
    "leaky_relu": lambda a, b, k: F.leaky_relu(a, SLOPES[k % 4]),
    "threshold": lambda a, b, k: F.threshold(a, 0.1, 2.0),
    "hardtanh": lambda a, b, k: F.hardtanh(a),
    "tanh": lambda a, b, k: a.tanh(),
    "sigmoid": lambda a, b, k: a.sigmoid(),
    "cat": lambda a, b, k: torch.cat([a, b], k % 2),
    "stack": lambda a, b, k: torch.stack([a, b], k % 2),
    "chunk": lambda a, b, k: a.chunk(2, k % 2)[: k % 3 + 1],
    "unbind": lambda a, b, k: a.unbind(k % 2)[: k % 3 + 1],
    "slice": lambda a, b, k: a[..., k % 3 :],
    "select": lambda a, b, k: a[-1],
    "view": lambda a, b, k: a.view(-1),
    "transpose": lambda a, b, k: a.transpose(0, -1),
    "unsqueeze": lambda a, b, k: a.unsqueeze(k % 2),
    "squeeze": lambda a, b, k: a.squeeze(),
    "diagonal": lambda a, b, k: a.diagonal(),
    "clone": lambda a, b, k: a.clone(),
    "expand": lambda a, b, k: a.expand(k % 3 + 1, *a.shape),
    "sum": lambda a, b, k: a.sum(k % 2, keepdim=k % 3 > 0),
    "mean": lambda a, b, k: a.mean(k % 2, keepdim=k % 3 > 0),
    "sum in another dtype": lambda a, b, k: a.sum(-1, keepdim=True, dtype=DTYPES[k % 3]),
    "cast": lambda a, b, k: a.to(DTYPES[k % 3]),
    "overwrite a row": lambda a, b, k: a.clone().index_put_((torch.tensor(0),), b[0]),
    "copy into a column": lambda a, b, k: _copied_into(a, b),
}
Program = list[tuple[str, int, int, int]]
steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 4), st.integers(0, 8), st.integers(0, 11))
programs = st.lists(steps, min_size=3, max_size=16)


def hooked(plan) -> int:
    """Return at how many nodes something is clipped."""
    return sum(bool(step.numbers) for step in plan.steps)


def _copied_into(a: Tensor, b: Tensor) -> Tensor:
    changed = a * 1.0
    changed[..., 0] = b[..., 0]
    return changed


def leaves_of(batch: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(batch, 6), (1, 6), (batch, 1), (), (batch, 6)]
    dtypes = [dtype, dtype, dtype, dtype, torch.float32]
    return [
        (2 * torch.randn(s, generator=generator)).to(d).requires_grad_() for s, d in zip(shapes, dtypes, strict=True)
    ]


def run(program: Program, leaves: list[Tensor]) -> Tensor:
    """Return a sum of losses of what the program makes; operands that do not fit are passed over."""
    values = [leaf * 1.25 for leaf in leaves]
    for name, i, j, k in program:
        try:
            made = OPERATIONS[name](values[-1 - i % len(values)], values[-1 - j % len(values)], k)
        except (RuntimeError, IndexError, ValueError):
            continue
        made = made if isinstance(made, tuple | list) else [made]
        values += [value for value in made if 0 < value.numel() <= 300]
    losses = []
    for number, value in enumerate(values[-4:]):
        weight = torch.linspace(-2, 3, value.numel(), dtype=value.dtype).view(value.shape)
        losses.append([(value * weight).sum(), value.sum(), value.mean(), value.sum().square()][number].double())
    return torch.stack(losses).sum() if len(program) % 2 else sum(losses[1:], losses[0]) * 8


def gradients(program: Program, rule: gg.BaseErrorClip, batch: int, dtype: torch.dtype, **options: bool):
    leaves = leaves_of(batch, dtype)
    loss = run(program, leaves)
    with gg.error_clip(loss, rule, **options):
        loss.backward()
    return [leaf.grad for leaf in leaves]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=80)
@given(programs, st.sampled_from(RULES), st.sampled_from(DTYPES), st.sampled_from([(1, 4), (4, 1), (4, 3)]))
def test_pruned_equals_clipping_everything_bit_for_bit(program, rule, dtype, batches):
    for batch in batches:
        pruned = gradients(program, rule, batch, dtype, prune=True)
        assert_equal(pruned, gradients(program, rule, batch, dtype, prune=False))


@pytest.mark.exhaustive
@settings(max_examples=500)
@given(programs, st.sampled_from(RULES), st.sampled_from(DTYPES), st.sampled_from([(1, 4), (4, 1), (4, 3)]))
def test_pruned_equals_clipping_everything_on_many_graphs(program, rule, dtype, batches):
    for batch in batches:
        pruned = gradients(program, rule, batch, dtype, prune=True)
        assert_equal(pruned, gradients(program, rule, batch, dtype, prune=False))


@pytest.mark.slow
def test_the_random_graphs_are_really_pruned_and_really_clipped():
    pruned, clipped, names = 0, 0, sorted(OPERATIONS)
    for seed in range(100):
        draw = torch.randint(0, 1 << 30, (10, 4), generator=torch.Generator().manual_seed(seed)).tolist()
        program = [(names[a % len(names)], b % 5, c % 9, d % 12) for a, b, c, d in draw]
        plan = make_plan(walk([root_of(run(program, leaves_of(4, torch.float32)))]), SYMMETRIC)
        pruned += any(step.pruned for step in plan.steps)
        free = gradients(program, gg.ErrorClipByValue(1e30), 4, torch.float32)
        bound = gradients(program, SYMMETRIC_RULE, 4, torch.float32)
        clipped += any(a is not None and not torch.equal(a, b) for a, b in zip(free, bound, strict=True))
    assert min(pruned, clipped) > 80


def operations_behind(value: Tensor) -> list[str]:
    return sorted(node.name() for node in walk([root_of(value)]).nodes)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_backward_that_is_differentiated_has_all_clamps(batch):
    counted = {}
    for prune in (True, False):
        leaves = leaves_of(batch, torch.float32)
        hidden = leaves[0] * leaves[1]
        loss = (torch.relu(hidden + leaves[4]).tanh() + hidden).square().sum()
        stats = gg.ErrorClipStats()
        with gg.error_clip(loss, SYMMETRIC_RULE, prune=prune, stats=stats if batch == 1 else None):
            assert leaves_something_out(loss)
            grads = torch.autograd.grad(loss, leaves[:2], create_graph=True)
        rows = [(row.op, row.gradients, int(row.clipped)) for row in stats.rows()]
        counted[prune] = [operations_behind(grad) for grad in grads], sorted(rows), grads
    assert counted[True][:2] == counted[False][:2]
    assert_equal(counted[True][2], counted[False][2])
    assert sum("Clamp" in name for name in counted[True][0][0]) >= 5 or batch == 1  # with counts: only what binds


def leaves_something_out(loss: Tensor) -> bool:
    """Tell whether a plan for this loss leaves something out."""
    return any(step.pruned for step in make_plan(walk([root_of(loss)]), SYMMETRIC).steps)


def in_turn(function: Callable[..., Tensor], *arguments: object, rule: gg.BaseErrorClip = SYMMETRIC_RULE) -> None:
    """Compare with and without pruning for each argument in turn, from an empty cache of plans."""
    plans.forget_plans()
    for argument in arguments:
        results = []
        for prune in (True, False):
            leaves = leaves_of(4, torch.float32)
            loss = function(*leaves, argument)
            with gg.error_clip(loss, rule, prune=prune):
                loss.backward()
            results.append([leaf.grad for leaf in leaves])
        assert_equal(*results)


def weighted(value: Tensor) -> Tensor:
    return (value * torch.linspace(-3, 4, value.numel(), dtype=value.dtype).view(value.shape)).sum()


BATCHES = {
    "1 then 4": (1, 4),
    "4 then 1": (4, 1),
    "1, 4, 1, 2": (1, 4, 1, 2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("combine", [torch.add, torch.sub, lambda a, b: a.tanh() * b, lambda a, b: b.sigmoid() * a])
def test_a_plan_made_at_one_batch_size_is_not_taken_where_an_operand_is_broadcast(combine, batches):
    in_turn(lambda x, row, *_: weighted(combine(x[: _[-1]] * 2, row * 2)), *batches)


def through(change: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., Tensor]:
    return lambda x, row, column, scalar, y, value: weighted(change(x * 2, y * 2, value))


NARROWER = (torch.float32, torch.bfloat16)
SAME_STRUCTURE = {
    "alpha of add": (lambda a, b, alpha: torch.add(a, b, alpha=alpha), (1, 3, 0.5, -1, -3)),
    "alpha of sub": (lambda a, b, alpha: torch.sub(a, b, alpha=alpha), (1, 3, 0.5, -1, -3)),
    "slope": (lambda a, b, slope: F.leaky_relu(a, slope) + b, (0.01, 4.0, 1.0, -0.5, -4.0)),
    "dtype of sum": (lambda a, b, d: a.double().to(d).sum(0, dtype=torch.float32) + b[0], NARROWER),
    "dtype of mean": (lambda a, b, d: a.double().to(d).mean(0, dtype=torch.float32) + b[0], NARROWER),
    "dtype of cat": (lambda a, b, d: torch.cat([a.double().to(d), b]), NARROWER),
    "dtype of stack": (lambda a, b, d: torch.stack([a.double().to(d), b]), NARROWER),
    "dtype of an operand": (lambda a, b, d: a.double().to(d) + b, NARROWER),
    "dtype of a gate": (lambda a, b, d: a.double().to(d).tanh() * b, NARROWER),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("change", "values"), SAME_STRUCTURE.values(), ids=SAME_STRUCTURE)
@pytest.mark.parametrize("rule", [SYMMETRIC_RULE, gg.ErrorClipByValue(2.0, min=-1.0)], ids=str)
def test_a_plan_is_not_taken_where_constants_or_dtypes_differ(change, values, rule):
    in_turn(through(change), *values, *reversed(values), rule=rule)


LAYOUTS = {
    "sum": lambda a, b: (a + b).sum(1),
    "mean": lambda a, b: (a - b).mean(1),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b], -1),
    "transpose": lambda a, b: (a + b).t(),
    "slices": lambda a, b: (a + b)[1:, ::2],
    "chunks": lambda a, b: (a + b).chunk(3, 1)[1],
    "unbind": lambda a, b: (a + b).unbind(1)[3],
    "diagonal": lambda a, b: (a + b).diagonal(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("use", LAYOUTS.values(), ids=LAYOUTS)
def test_sums_over_a_broadcast_operand_add_up_in_the_same_order(use):
    """A clamp makes an expanded or strided gradient dense, and the order of a later sum depends on that."""
    for seed in range(30):
        results = []
        for prune in (True, False):
            torch.manual_seed(seed)
            size = (3, 17, 64)[seed % 3]
            leaves = [torch.randn(s).requires_grad_() for s in ((size, 37), (37,), (size, 1), ())]
            x, row, column, scalar = (leaf * 1.5 for leaf in leaves)
            value = use((x + row).relu() + column, (x + scalar).tanh() + row)
            loss = (value * torch.randn(value.shape) / 5).sum()
            with gg.error_clip(loss, SYMMETRIC_RULE, prune=prune):
                loss.backward()
            results.append([leaf.grad for leaf in leaves])
        assert_equal(*results)


def test_a_custom_function_is_not_taken_for_the_operation_it_is_named_after():
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    in_turn(lambda x, *_: weighted(Relu.apply(x * 2)), None)


def test_a_custom_function_named_like_a_view_does_not_make_a_value_a_parameter():
    class Clone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    x = torch.ones(3, requires_grad=True)
    loss = (Clone.apply(x) * 7).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.tolist() == [1.5, 1.5, 1.5]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_complex_values_are_pruned_to_the_bit_or_not_at_all(seed):
    results = []
    for prune in (True, False):
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(10, 5, dtype=torch.complex64, generator=generator)
        x = torch.ones(50, dtype=torch.complex64, requires_grad=True)
        loss = ((x * 2).view(5, 10).t().clone() * w).abs().square().sum()
        with gg.error_clip(loss, SYMMETRIC_RULE, prune=prune):
            loss.backward()
        results.append([x.grad])
    assert_equal(*results)


@pytest.mark.parametrize(
    "rule", [gg.ErrorClipByNorm(0.3), gg.rules.ErrorClipZeroAbove(0.3), gg.ErrorClipByValue(1, min=0.1)]
)
def test_only_clamps_around_zero_are_pruned(rule):
    plans.forget_plans()
    gradients([("tanh", 0, 0, 0), ("relu", 0, 0, 0), ("view", 0, 0, 0)], rule, 4, torch.float32)
    (plan,) = next(iter(plans._plans.values()))
    assert not any(step.pruned for step in plan.steps)


def graph_of_lstm(steps: int, batch: int = 2) -> Graph:
    cell = nn.LSTMCell(64, 64)
    h = c = torch.zeros(batch, 64)
    for _ in range(steps):
        h, c = cell(torch.ones(batch, 64), (h, c))
    return walk([root_of(h.sum())])


def slots(plan: plans.Plan) -> tuple[int, int]:
    """How many gradients the plan clips, and how many it leaves out."""
    return sum(len(s.numbers) for s in plan.steps), sum(len(s.pruned) for s in plan.steps)


@pytest.mark.slow
def test_an_lstm_of_100_steps_keeps_at_most_350_of_more_than_1000_hooks():
    graph = graph_of_lstm(100)
    everything, pruned = make_plan(graph, Choice()), make_plan(graph, SYMMETRIC)
    assert sum(slots(everything)) == sum(slots(pruned)) > 1000
    assert hooked(everything) > 1000
    assert hooked(pruned) <= 350


def test_an_mlp_keeps_one_hook_a_matrix_product():
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    plan = make_plan(walk([root_of(nn.Sequential(*layers)(torch.ones(2, 512)).sum())]), SYMMETRIC)
    clipped, pruned = slots(plan)
    assert clipped + pruned == 16  # 8 linear layers, 8 ReLUs
    assert clipped == hooked(plan) <= 8


def test_the_plan_of_one_structure_is_made_once_whatever_the_batch_size():
    plans.forget_plans()
    first = plan_for(graph_of_lstm(3, batch=2), SYMMETRIC)
    assert plan_for(graph_of_lstm(3, batch=2), SYMMETRIC) is first
    assert plan_for(graph_of_lstm(3, batch=7), SYMMETRIC) is first
    assert plan_for(graph_of_lstm(3), Choice()) is not first
    assert plan_for(graph_of_lstm(4), SYMMETRIC) is not first


def test_plans_that_do_not_hold_live_side_by_side():
    plans.forget_plans()

    def graph(batch: int) -> Graph:
        x, row = torch.ones(batch, 6, requires_grad=True), torch.ones(1, 6, requires_grad=True)
        return walk([root_of((x * 2 + row * 2).sum())])

    at_one, at_four = plan_for(graph(1), SYMMETRIC), plan_for(graph(4), SYMMETRIC)
    assert at_one is not at_four
    assert slots(at_one) != slots(at_four)
    assert plan_for(graph(1), SYMMETRIC) is at_one
    assert plan_for(graph(4), SYMMETRIC) is at_four
    assert plan_for(graph(2), SYMMETRIC) is at_four


def times(factor):
    return lambda made, *taken: tuple(None if one is None else one * factor for one in made)


HOOKS = {
    "hook of the operation above": lambda h, y: y.grad_fn.register_hook(times(100)),
    "prehook of the operation above": lambda h, y: y.grad_fn.register_prehook(times(100)),
    "prehook of the value's own operation": lambda h, y: h.grad_fn.register_prehook(times(100)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["before the block", "in the block"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_a_node_that_enlarges_a_gradient_leaves_no_clamp_out(name, when):
    found = []
    for prune in (True, False):
        x = torch.ones(3, requires_grad=True)
        h = x * 3
        y = h.relu()
        if when == "before the block":
            HOOKS[name](h, y)
        loss = y.sum()
        with gg.error_clip(loss, gg.ErrorClipByValue(1.0), prune=prune):
            if when == "in the block":
                HOOKS[name](h, y)
            loss.backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_looking_for_hooks_leaves_none():
    x = torch.ones(3, requires_grad=True)
    h = x * 3
    calls = []
    y = h.relu()
    y.grad_fn.register_hook(lambda made, taken: calls.append(1))
    loss = y.sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(calls) == 2

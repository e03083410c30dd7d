"""`ErrorClipStats`: the counts are right, the first non-finite gradient is named, and nothing waits for a device."""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.backward_clip.statistics import NodeCounts
from gradguard.errors import InvalidTypeError

KEEP = gg.rules.ErrorClipNonfinite("keep")


@pytest.fixture
def on_device(monkeypatch):
    """Count as on an accelerator, though the tensors lie on the CPU."""
    monkeypatch.setattr(NodeCounts, "clip", lambda self, grad, apply, bounds: _count_on_device(self, grad, apply))


def _count_on_device(shown, grad, apply):
    return shown._on_device(grad, apply) if shown.arrive(grad) else apply(grad)


class NoWait(TorchDispatchMode):
    """Raises where Python would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}:
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):  # two modules are used twice
            x = self.act(self.last(self.act(self.first(x)))).view(-1, 6)[:, :4]
        return x.square().mean() * 30


def _values(loss):
    """Return the nodes behind ``loss`` but leaves, transposed weights, and the loss before its constant factor."""
    waiting, found, left_out = [loss.grad_fn], {}, {"TBackward0", "MeanBackward0"}
    while waiting:
        node = waiting.pop()
        if node in found or not node.next_functions:
            continue
        found[node] = node.name()
        waiting += [child for child, _ in node.next_functions if child is not None]
    return {node: name for node, name in found.items() if node is not loss.grad_fn and name not in left_out}


def _counted_by_hand(loss, rule):
    """Clip at every node by a hook of its own, and count: elements, changed, not finite."""
    counts = {}

    def hook(name):
        def count(grads):
            (grad,) = grads
            clipped = rule.clip(grad)
            nonfinite = ~grad.isfinite()
            changed = (clipped != grad) & ~(nonfinite & clipped.isnan())
            found = (1, grad.numel(), int(changed.sum()), int(nonfinite.sum()))
            counts[name] = tuple(a + b for a, b in zip(counts.get(name, (0,) * 4), found, strict=True))
            return (clipped,)

        return count

    handles = [node.register_prehook(hook(name)) for node, name in _values(loss).items()]
    loss.backward()
    for handle in handles:
        handle.remove()
    return counts


def _by_op(stats):
    counts = {}
    for row in stats.rows():
        found = (row.gradients, row.elements, int(row.clipped), int(row.nonfinite))
        counts[row.op] = tuple(a + b for a, b in zip(counts.get(row.op, (0,) * 4), found, strict=True))
    return counts


RULES = [
    gg.ErrorClipByValue(1e-2),
    gg.ErrorClipByValue(1e-2, -1e-3),
    gg.ErrorClipByNorm(0.05),
    gg.rules.ErrorClipBySampleNorm(0.01),
    gg.rules.ErrorClipZeroAbove(1e-2),
    gg.rules.ErrorClipNonfinite("zero"),
]


def _loss(nonfinite=False):
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(5, 4)
    if nonfinite:
        x[0] = math.nan
    return model, x


def _check_counts(rule, nonfinite):
    model, x = _loss(nonfinite)
    expected = _counted_by_hand(model(x), rule)
    by_hand = [p.grad for p in model.parameters()]
    model.zero_grad()
    stats, loss = gg.ErrorClipStats(model), model(x)
    with gg.error_clip(loss, rule, stats=stats):
        loss.backward()
    assert _by_op(stats) == expected
    torch.testing.assert_close([p.grad for p in model.parameters()], by_hand, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_counts_are_those_of_a_hook_at_each_node(rule):
    _check_counts(rule, nonfinite=False)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_counts_on_a_device_are_those_on_the_cpu(rule, nonfinite, on_device):
    _check_counts(rule, nonfinite=nonfinite)


def test_rows_that_were_read_keep_their_counts(on_device):
    x = torch.tensor([3.0, -0.5], requires_grad=True)
    stats = gg.ErrorClipStats()
    found = []
    for _ in range(3):
        loss = (10 * x).square().sum()
        with gg.error_clip(loss, gg.ErrorClipByValue(5.0), stats=stats):
            loss.backward()
        found.append(stats.rows()[1].clipped)
    assert [int(clipped) for clipped in found] == [2, 4, 6]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nonfinite_elements_are_counted_before_the_rule(rule):
    _check_counts(rule, nonfinite=True)


def test_a_line_belongs_to_one_operation_in_the_innermost_module():
    model, x = _loss()
    stats, loss = gg.ErrorClipStats(model), None
    loss = model(x)
    with gg.error_clip(loss, gg.ErrorClipByValue(1e-2), stats=stats):
        loss.backward()
    lines = Counter({(row.op, row.module): (row.gradients, row.elements) for row in stats.rows()})
    assert lines["AddmmBackward0", "first"] == (2, 60)
    assert lines["AddmmBackward0", "last"] == (2, 60)
    assert lines["TanhBackward0", "act"] == (4, 120)
    assert lines["PowBackward0", ""] == (1, 20)
    assert {module for _, module in lines} == {"", "first", "last", "act"}


def test_the_table():
    x = torch.tensor([3.0, -0.5], requires_grad=True)
    stats = gg.ErrorClipStats()
    loss = (x * 2).square().view(2, 1).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0), stats=stats):
        loss.backward()
    assert str(stats).splitlines() == [
        "gradient of the output of  module  gradients  elements    clipped  non-finite",
        "ViewBackward0              -               1         2   0 (0.0%)           0",
        "PowBackward0               -               1         2   0 (0.0%)           0",
        "MulBackward0               -               1         2  1 (50.0%)           0",
        "blocks: 1",
        "first non-finite: none",
    ]


def test_an_empty_table():
    assert str(gg.ErrorClipStats()).splitlines()[1:] == ["blocks: 0", "first non-finite: none"]


def _root_of_zero(x):
    return ((x * 0).sqrt() * 3).sum() + (x * 2).sum()


def _zero_over_zero(x):
    return (x.tanh() + (x - x.detach()) / (x - x.detach())).cos().sum()


def _overflow_in_one_branch(x):
    return ((x * 1e30) * 1e30).relu().mul(0.5).sum() + x.sin().sum()


CULPRITS = {
    "square root at 0": (_root_of_zero, "MulBackward0", "SqrtBackward0"),
    "0 / 0": (_zero_over_zero, "AddBackward0", "CosBackward0"),
    "overflow in one branch": (_overflow_in_one_branch, "MulBackward0", "SinBackward0, MulBackward0"),
}


@pytest.mark.parametrize("case", CULPRITS)
@pytest.mark.parametrize("way", ["keep", "value"])
@pytest.mark.parametrize("device", [False, True])
def test_the_first_nonfinite_gradient_is_named_with_the_operation_that_made_it(case, way, device, request):
    if device:
        request.getfixturevalue("on_device")
    function, op, made_by = CULPRITS[case]
    stats = gg.ErrorClipStats()
    for _ in range(2):
        loss = function(torch.ones(3, requires_grad=True) * 1)
        rule = KEEP if way == "keep" else gg.ErrorClipByValue(math.inf)
        with gg.error_clip(loss, rule, stats=stats):
            loss.backward()
    first = stats.first_nonfinite
    assert (first.op, first.made_by, first.block, first.elements) == (op, made_by, 1, 3)
    assert str(first) in str(stats).splitlines()[-1]
    assert str(first) == (
        f"block 1: the gradient of the output of {op}, made by the backward of {made_by} "
        f"({first.nonfinite} of 3 elements)"
    )


def test_the_module_of_the_first_nonfinite_gradient():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Tanh(), Root(), nn.Tanh())
    stats = gg.ErrorClipStats(model)
    loss = model(torch.ones(2, requires_grad=True)).sum()
    with gg.error_clip(loss, KEEP, stats=stats):
        loss.backward()
    assert (stats.first_nonfinite.op, stats.first_nonfinite.module) == ("MulBackward0", "1")
    assert "MulBackward0 in 1, made by the backward of SqrtBackward0 (2 of 2 elements)" in str(stats)


def test_a_later_block_may_be_the_first():
    stats = gg.ErrorClipStats()
    for factor in (1.0, 0.0, 1.0):
        loss = (torch.ones(2, requires_grad=True) * factor).sqrt().sum()
        with gg.error_clip(loss, KEEP, stats=stats):
            loss.backward()
    assert stats.first_nonfinite.block == 2


@pytest.mark.parametrize(("value", "finite"), [(math.nan, False), (math.inf, False), (1.0, True)])
def test_a_loss_that_is_not_finite_is_reported(value, finite):
    stats = gg.ErrorClipStats()
    for factor in (1.0, value, 1.0):
        loss = (torch.ones(2, requires_grad=True) * 2).sum() * factor
        with gg.error_clip(loss, KEEP, stats=stats):
            loss.backward()
    assert bool(stats.loss_is_finite) is finite
    assert ("the loss itself was not finite" in str(stats)) is not finite


def test_nothing_waits_for_a_device(on_device):
    stats = gg.ErrorClipStats()
    with NoWait():
        for _ in range(15):
            loss = (torch.ones(3, requires_grad=True) * 10).square().sum()
            with gg.error_clip(loss, gg.ErrorClipByValue(5.0), stats=stats):
                loss.backward()
            assert stats.rows()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        str(stats)
    assert int(stats.rows()[-1].clipped) == 45
    assert isinstance(stats.rows()[-1].clipped, torch.Tensor)


def test_meta_tensors_pass():
    stats, x = gg.ErrorClipStats(), torch.ones(3, device="meta", requires_grad=True)
    loss = (x * 10).square().sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0), stats=stats):
        loss.backward()
    assert [(row.op, row.elements) for row in stats.rows()] == [("PowBackward0", 3), ("MulBackward0", 3)]


def _one_block(stats, backwards=1, rule=None, inner=False):
    h = torch.ones(3, requires_grad=True) * 10
    loss = h.view(3, 1).tanh().sum().sin()
    with gg.error_clip(loss, rule or gg.ErrorClipByValue(0.5), stats=stats):
        for _ in range(backwards):
            if inner:
                with gg.error_clip([h], gg.ErrorClipByValue(0.1)):
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
    return {row.op: (row.gradients, row.elements) for row in stats.rows()}


def test_blocks_add_up_and_reset_forgets():
    stats = gg.ErrorClipStats()
    once = _one_block(stats)
    assert once == {"SumBackward0": (1, 1), "TanhBackward0": (1, 3), "ViewBackward0": (1, 3), "MulBackward0": (1, 3)}
    assert _one_block(stats) == {op: (2 * n, 2 * m) for op, (n, m) in once.items()}
    assert stats.blocks == 2
    stats.reset()
    assert (stats.rows(), stats.blocks, stats.loss_is_finite, stats.first_nonfinite) == ([], 0, None, None)
    assert _one_block(stats) == once


def test_each_backward_of_a_block_is_counted():
    assert set(_one_block(gg.ErrorClipStats(), backwards=2).values()) == {(2, 2), (2, 6)}


def test_an_inner_block_makes_nothing_count_twice():
    counts = _one_block(gg.ErrorClipStats(), inner=True)
    assert counts.pop("MulBackward0", None) is None
    assert counts == {"SumBackward0": (1, 1), "TanhBackward0": (1, 3), "ViewBackward0": (1, 3)}


def test_a_module_scope_counts_what_its_module_made():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    stats = gg.ErrorClipStats(model)
    with gg.error_clip(model[1], gg.ErrorClipByValue(1e-9), stats=stats):
        for _ in range(2):
            (100 * model(torch.ones(2, 3)).sum()).backward()
    assert [(row.op, row.module, row.gradients, int(row.clipped)) for row in stats.rows()] == [
        ("TanhBackward0", "1", 2, 12)
    ]


def test_operations_within_a_checkpoint_are_counted():
    tables = []
    for way in (None, "not reentrant"):
        torch.manual_seed(0)
        stats, h = gg.ErrorClipStats(), torch.randn(4, 6, requires_grad=True) * 2
        body = lambda a: torch.cat([b.tanh() for b in a.split(3, 1)], 1).sin()  # noqa: E731
        y = body(h) if way is None else checkpoint(body, h, use_reentrant=False)
        loss = (3 * y).square().sum()
        with gg.error_clip(loss, gg.ErrorClipByValue(1e-2), stats=stats):
            loss.backward()
        tables.append({row.op: (row.elements, int(row.clipped)) for row in stats.rows()})
    assert tables[1] == tables[0]
    assert tables[0]["TanhBackward0"][0] == 24


def test_detach_removes_the_hooks_that_name_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    stats = gg.ErrorClipStats(model)
    assert all(m._forward_hooks and m._forward_pre_hooks for m in model)
    stats.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_forward_that_fails_leaves_the_names_right():
    class Fails(nn.Module):
        def forward(self, x):
            if fails:
                raise ValueError("on purpose")
            return x

    model = nn.Sequential(nn.Tanh(), Fails())
    stats, fails = gg.ErrorClipStats(model), True
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    fails = False
    loss = (model(x) * 2).sum()
    with gg.error_clip(loss, KEEP, stats=stats):
        loss.backward()
    assert [(row.op, row.module) for row in stats.rows()] == [("MulBackward0", ""), ("TanhBackward0", "0")]


def test_counts_survive_an_error_in_the_backward():
    def fail(grad):
        raise ValueError("on purpose")

    x = torch.ones(2, requires_grad=True)
    h = x.sin()
    h.register_hook(fail)
    loss, stats = (h * 3).cos().sum(), gg.ErrorClipStats()
    with pytest.raises(ValueError, match="on purpose"), gg.error_clip(loss, KEEP, stats=stats):
        loss.backward()
    assert [row.op for row in stats.rows()] == ["CosBackward0", "MulBackward0"]


@pytest.mark.parametrize("stats", [True, {}, gg.ErrorClipStats])
def test_something_else_than_statistics_is_refused(stats):
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    with (
        pytest.raises(InvalidTypeError, match=r"stats is \w+: expected gg.ErrorClipStats\(\)"),
        gg.error_clip(loss, KEEP, stats=stats),
    ):
        pass


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("scale", [1.0, -3.0, math.nan, math.inf])
def test_the_largest_element_of_each_operation(place, scale, request):
    if place == "device":
        request.getfixturevalue("on_device")
    weight, stats = torch.ones(3, requires_grad=True), gg.ErrorClipStats()
    for factor in (2.0, scale, 0.5):
        loss = ((weight * 1).exp() * torch.tensor([0.0, factor, -1.0])).sum()
        with gg.error_clip(loss, None, stats=stats):
            loss.backward()
    largest = {row.op: float(row.largest) for row in stats.rows()}
    assert largest["ExpBackward0"] == (max(2.0, abs(scale)) if math.isfinite(scale) else math.inf)

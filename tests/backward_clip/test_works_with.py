"""The error clip beside what training scripts use: checkpointing, loss scales, autocast, hooks, odd nodes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError

TIGHT = gg.ErrorClipByValue(1e-2)
RULES = [
    gg.ErrorClipByValue(1e-2),
    gg.ErrorClipByValue(1e-2, -5e-3),
    gg.ErrorClipByNorm(1e-2),
    gg.rules.ErrorClipBySampleNorm(1e-2),
    gg.rules.ErrorClipZeroAbove(0.5),
]


class Halve(gg.BaseErrorClip):
    """Not idempotent: a value that is clipped twice, or never, shows."""

    def clip(self, grad):
        return grad / 2


def _split_and_select(h, other):
    left, right = h.split(3, dim=1)
    return torch.cat([left * right, h.select(1, 0).unsqueeze(1), other.view(4, 6).T.reshape(4, 6)], 1).sin()


def _two_outputs(h, other):
    return h.sigmoid() * other, (h - other).unbind(1)[2]


def _nested(h, other):
    inner = checkpoint(lambda a: (a.T @ a).tanh(), h * other, use_reentrant=False)
    return (h @ inner).cos()


def _parameter_among_the_arguments(h, weight):
    return (h.tanh() @ weight.reshape(6, 4)).sin()


BODIES = [_split_and_select, _two_outputs, _nested, _parameter_among_the_arguments]


def _through(body, kind, h, other):
    found = body(h, other) if kind is None else checkpoint(body, h, other, use_reentrant=False)
    return sum((3 * value).square().sum() for value in (found if isinstance(found, tuple) else (found,)))


def _checkpointed(body, kind, rule, leaf_too=False, **options):
    torch.manual_seed(0)
    x, w = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    other = w if leaf_too else w.exp()
    loss = _through(body, kind, x * 2, other)
    with gg.error_clip(loss, rule, **options):
        loss.backward()
    return x.grad, w.grad


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [*RULES, Halve()], ids=repr)
@pytest.mark.parametrize("body", BODIES)
def test_a_checkpoint_changes_no_gradient(body, rule):
    kind = "not reentrant"
    leaf_too = body is _parameter_among_the_arguments
    plain = _checkpointed(body, None, None, leaf_too)
    clipped = _checkpointed(body, None, rule, leaf_too)
    assert not torch.equal(clipped[0], plain[0])
    same(_checkpointed(body, kind, rule, leaf_too), clipped)
    options = {"leaves": True, "scale": 4.0}
    same(_checkpointed(body, kind, rule, leaf_too, **options), _checkpointed(body, None, rule, leaf_too, **options))


def test_a_value_that_is_both_a_result_and_used_inside_a_checkpoint_is_clipped_once():
    kind = "not reentrant"

    def body(h, other):
        value = h.sin()
        return value, (value * -3).cos() * other

    same(_checkpointed(body, kind, gg.ErrorClipByValue(1.0)), _checkpointed(body, None, gg.ErrorClipByValue(1.0)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x.view(-1, 4)).tanh() * 3


@pytest.mark.parametrize("rule", [*RULES, Halve()], ids=repr)
def test_a_checkpointed_module_may_be_the_scope(rule):
    found = []
    for way in (None, "not reentrant"):
        torch.manual_seed(0)
        module, x = Block(), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        with gg.error_clip(module, rule):
            h = x.sin()
            y = module(h) if way is None else checkpoint(module, h, use_reentrant=False)
            (y * 3).square().sum().backward()
        found.append((x.grad, *(p.grad for p in module.parameters())))
    same(found[1], found[0])


CLIPS = {
    "block": lambda loss: gg.error_clip(loss, TIGHT).__enter__(),
    "attached": lambda loss: gg.attach_error_clip(loss, TIGHT),
    "append_backward": lambda loss: gg.append_backward(loss, callback=TIGHT),
    "without a rule": gg.append_backward,
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_reentrant_checkpoint_is_refused_before_anything_is_changed(name):
    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(torch.sin, x * 2, use_reentrant=True).sum()
    with pytest.raises(
        InvalidValueError, match=r"CheckpointFunctionBackward.*checkpoint\(\.\.\., use_reentrant=False\)"
    ):
        CLIPS[name](loss)
    assert x.grad is None
    loss.backward()
    same(x.grad, 2 * (x * 2).cos().detach())


def test_a_module_in_a_reentrant_checkpoint_and_one_round_it_are_refused():
    module, x = Block(), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    with (
        pytest.raises(InvalidValueError, match=r"^Block runs within a backward, .*use_reentrant=False"),
        gg.error_clip(module, TIGHT),
    ):
        checkpoint(module, x.sin(), use_reentrant=True).sum().backward()

    class Outer(nn.Module):
        def forward(self, x):
            return checkpoint(module, x.sin(), use_reentrant=True)

    outer = Outer()
    with pytest.raises(InvalidValueError, match=r"a reentrant checkpoint \("), gg.error_clip(outer, TIGHT):
        outer(x).sum().backward()


def _network(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to(dtype)
    return model, torch.randn(6, 5, dtype=dtype)


def _clipped_gradients(rule=TIGHT, **options):
    model, x = _network()
    loss = model(x).square().sum()
    with gg.error_clip(loss, rule, **options):
        loss.backward()
    return [p.grad for p in model.parameters()]


def _scaler(optimizer_scale=2.0**10):
    return torch.amp.GradScaler("cpu", init_scale=optimizer_scale, growth_interval=10**6)


@pytest.mark.parametrize("rule", [*RULES[:2], RULES[4], gg.rules.ErrorClipNonfinite("zero"), Halve()], ids=repr)
@pytest.mark.parametrize("stats", [None, gg.ErrorClipStats()])
def test_under_a_gradscaler_the_threshold_is_in_unscaled_units(rule, stats):
    model, x = _network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.0), _scaler()
    loss = model(x).square().sum()
    with gg.error_clip(loss, rule, scale=scaler, stats=stats):
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    same([p.grad for p in model.parameters()], _clipped_gradients(rule))


@pytest.mark.parametrize("target", ["the scaled loss", "the module"])
def test_the_scaled_loss_or_a_module_may_be_the_target(target):
    found = []
    for scaler in (None, _scaler()):
        model, x = _network()
        scale = (lambda loss: loss) if scaler is None else scaler.scale
        loss = scale(model(x).square().sum())
        with gg.error_clip(model if target == "the module" else loss, TIGHT, scale=scaler):
            loss = scale(model(x).square().sum()) if target == "the module" else loss
            loss.backward()
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD(model.parameters(), 0.0))
        found.append([p.grad for p in model.parameters()])
    same(found[1], found[0])


@pytest.mark.parametrize("rule", [*RULES, gg.rules.ErrorClipNonfinite("zero"), Halve()], ids=repr)
def test_a_clip_hides_no_overflow_from_the_scaler(rule):
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), _scaler(2.0**127)
    for expected_scale in (2.0**126, 2.0**125):
        optimizer.zero_grad()
        loss = 8 * ((weight * 1e3).tanh().relu().sum() + (weight * 1e3).sum())
        with gg.error_clip(loss, rule, scale=scaler):
            scaler.scale(loss).backward()
        loss = ((weight * 2) * 1e3).sum()
        with gg.error_clip(loss, rule, scale=scaler):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [1.0, 1.0, 1.0]
        assert scaler.get_scale() == expected_scale


def test_a_disabled_scaler_is_a_scale_of_one():
    model, x = _network()
    loss = model(x).square().sum()
    with gg.error_clip(loss, TIGHT, scale=torch.amp.GradScaler("cpu", enabled=False)):
        loss.backward()
    same([p.grad for p in model.parameters()], _clipped_gradients())


@pytest.mark.parametrize("cached", [True, False])
def test_casts_of_weights_by_autocast_are_not_clipped(cached):
    linear, seen = nn.Linear(4, 3), []

    class Note(gg.BaseErrorClip):
        def clip(self, grad):
            seen.append(tuple(grad.shape))
            return grad

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        first = linear(torch.randn(5, 4))
        loss = (linear(first.repeat(1, 2)[:, :4]) * 2).float().sum()
    with gg.error_clip(loss, Note()):
        loss.backward()
    assert (3, 4) not in seen
    assert (4, 3) not in seen
    assert (3,) not in seen
    assert (5, 3) in seen


def _small():
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    h = x * 10
    return x, h, h.square().sum()


BOUND = gg.ErrorClipByValue(5.0)
ONCE = torch.tensor([50.0, -50.0, 50.0], dtype=torch.float64)


def test_each_of_several_backward_calls_is_clipped():
    x, _, loss = _small()
    with gg.error_clip(loss, BOUND):
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert torch.autograd.grad(loss, x, retain_graph=True)[0].tolist() == ONCE.tolist()
    assert x.grad.tolist() == (2 * ONCE).tolist()
    loss.backward()
    assert x.grad.tolist() == [300.0, -500.0, 700.0]


def test_a_backward_of_several_losses_that_share_values():
    x, h, loss = _small()
    with gg.error_clip(loss, BOUND):
        torch.autograd.backward([loss, (h * 3).sum()])
    assert x.grad.tolist() == ONCE.tolist()


def test_two_whole_graph_blocks_for_two_losses_clip_the_shared_value_once():
    x, h, loss = _small()
    second = (h * -1).sum()
    with gg.error_clip(loss, Halve()), gg.error_clip(second, Halve()):
        torch.autograd.backward([loss, second])
    expected = 10 * (h.detach() - 0.5) / 2  # each rule halves what is its own; h is the inner one's
    assert x.grad.tolist() == expected.tolist()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_tensor_hooks_of_the_user_come_before_the_clip_and_node_prehooks_in_order(when):
    x, h, loss = _small()
    seen = {}

    def enlarge(grad):
        seen["raw"] = grad.clone()
        return grad * 100

    def look(grads):
        seen["at the node"] = grads[0].clone()

    def register():
        h.register_hook(enlarge)
        h.grad_fn.register_prehook(look)

    if when == "before":
        register()
    with gg.error_clip(loss, BOUND):
        if when == "inside":
            register()
        loss.backward()
    assert seen["raw"].tolist() == (2 * h.detach()).tolist()
    at_node = 5.0 * h.detach().sign() if when == "inside" else 200 * h.detach()
    assert seen["at the node"].tolist() == at_node.tolist()
    assert x.grad.tolist() == ONCE.tolist()


class _Skips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 2, b * 3

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        return (None if grad_a is None else grad_a * 2), None


@pytest.mark.parametrize("used", [0, 1, slice(None)])
def test_custom_functions_with_several_outputs_and_no_gradient_for_an_input(used):
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    outputs = _Skips.apply(a * 7, b * 7)[used]
    loss = sum((10 * value).sum() for value in (outputs if isinstance(outputs, tuple) else (outputs,)))
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        loss.backward()
    assert b.grad is None
    assert a.grad is None or a.grad.tolist() == ([0.0] * 3 if used == 1 else [7.0] * 3)


def test_a_complex_gradient_is_clipped_by_its_modulus():
    z = torch.tensor([3 + 4j, 0.1j], requires_grad=True)
    h = z * 1
    loss = (h.abs().square() / 2).sum()
    with gg.error_clip([h], gg.ErrorClipByValue(1.0)):
        loss.backward()
    torch.testing.assert_close(z.grad, torch.tensor([0.6 + 0.8j, 0.1j]))


def test_a_jagged_gradient_is_clipped_by_value():
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    a = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    loss = torch.nested.to_padded_tensor((a * 2) * 100, 0.0).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        loss.backward()
    assert a.grad.values().unique().tolist() == [2.0]


@pytest.mark.parametrize("rule", [*RULES, gg.rules.ErrorClipNonfinite("zero")], ids=repr)
@pytest.mark.parametrize("counted", [False, True])
def test_a_sparse_gradient_of_a_value_is_refused_naming_the_operation(rule, counted):
    weight = torch.ones(5, 2, requires_grad=True)
    loss = F.embedding(torch.tensor([0, 1, 1]), weight * 2, sparse=True).square().sum()
    stats = gg.ErrorClipStats() if counted else None
    with (
        pytest.raises(UnsupportedGradientError, match="output of MulBackward0 is sparse"),
        gg.error_clip(loss, rule, stats=stats),
    ):
        loss.backward()


def test_the_sparse_gradient_of_a_parameter_is_left_alone():
    embedding = nn.Embedding(5, 2, sparse=True)
    loss = (10 * embedding(torch.tensor([0, 1, 1]))).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        loss.backward()
    assert embedding.weight.grad.to_dense()[:3].tolist() == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(cell):
    net = cell(3, 4, num_layers=2)
    plain, x = copy.deepcopy(net), torch.randn(5, 2, 3)
    loss = 100 * net(x)[0].sum()
    with gg.error_clip(loss, TIGHT):
        loss.backward()
    (100 * plain(x)[0].sum()).backward()
    for clipped, free in zip(net.parameters(), plain.parameters(), strict=True):
        assert clipped.grad.norm() < 1e-2 * free.grad.norm()


def test_the_uses_of_a_shared_weight_are_added_up_unclipped():
    weight = torch.eye(2, requires_grad=True)
    x = torch.ones(1, 2)
    loss = 10 * (F.linear(F.linear(x, weight), weight)).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        loss.backward()
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]

"""What `error_clip` means: each clause of its docstring, and backward passes written by hand."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from by_hand import NETWORKS, Clamp
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import FreedGraphError, InvalidTypeError, InvalidValueError

BOUNDS = {"MLP": 0.05, "conv net": 0.008, "LSTM": 0.007, "branching": 0.03}


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def plain(loss: Tensor, *leaves: Tensor, **options: object) -> list[Tensor]:
    """The gradients without a clip, and the graph kept."""
    return list(torch.autograd.grad(loss, leaves, retain_graph=True, **options))


def equal(ours: Tensor | None, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_backward_pass_written_by_hand(name):
    make, network, by_hand = NETWORKS[name]
    leaves = make()
    loss = network(*leaves)
    free = plain(loss, *leaves)
    with gg.error_clip(loss, gg.ErrorClipByValue(BOUNDS[name])):
        loss.backward()
    clamp = Clamp(BOUNDS[name])
    with torch.no_grad():
        value, gradients = by_hand(clamp, *leaves)
    torch.testing.assert_close(loss.detach(), value, rtol=1e-12, atol=0)
    for ours, theirs in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=0, atol=1e-12)
    assert clamp.share > 0.05
    assert clamp.gradients_changed >= 3
    assert any((a.grad - b).abs().max() > 1e-3 for a, b in zip(leaves, free, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_where_nothing_exceeds_the_result_is_the_plain_one_bit_for_bit(name):
    make, network, _ = NETWORKS[name]
    leaves = make()
    loss = network(*leaves)
    expected = plain(loss, *leaves)
    with gg.error_clip(loss, gg.ErrorClipByValue(1e6)):
        loss.backward()
    for ours, theirs in zip(leaves, expected, strict=True):
        equal(ours.grad, theirs)


CONSTANT_FACTORS = {
    "none": lambda loss: loss,
    "times a number": lambda loss: loss * 8,
    "a number times": lambda loss: 8 * loss,
    "divided": lambda loss: loss / 0.125,
    "twice": lambda loss: loss * 16 / 2,
    "in place": lambda loss: loss.mul_(8),
    "times a tensor": lambda loss: loss * torch.tensor(8.0),
    "a tensor times": lambda loss: torch.tensor(8.0) * loss,
    "minus": lambda loss: -loss,
    "minus, times": lambda loss: -loss * 8,
    "gradient scaler": lambda loss: torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss),
}


@pytest.mark.parametrize("factor", CONSTANT_FACTORS.values(), ids=CONSTANT_FACTORS)
def test_the_root_and_a_constant_factor_on_the_loss_are_not_clipped(factor):
    x = leaf(*range(10))
    loss = factor((x * x).mean())
    (expected,) = plain(loss, x)
    with gg.error_clip(loss, gg.ErrorClipByValue(0.9)):  # elements of x * x get 0.8 at most, the loss itself 1 to 8
        loss.backward()
    equal(x.grad, expected)


def test_a_factor_applied_after_the_block_began_is_not_clipped():
    x = leaf(*range(10))
    loss = (x * x).mean()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.9)):
        (loss * 8).backward()
    torch.testing.assert_close(x.grad, 1.6 * x.detach())


@pytest.mark.parametrize("size", [(), (3,)])
def test_a_gradient_of_yours_is_not_clipped(size):
    x = torch.ones(size, requires_grad=True)
    root = x * 3
    with gg.error_clip(root, gg.ErrorClipByValue(0.5)):
        root.backward(gradient=torch.full(size, 7.0))
    assert x.grad.flatten().unique().tolist() == [21.0]


def test_a_root_that_others_use_as_well_is_clipped():
    x = leaf(1.0)
    h = x * 1
    pair = gg.attach_error_clip([h, (h * 3).sum()], gg.ErrorClipByValue(2.0))
    torch.autograd.backward(pair, [torch.ones(1), None])
    assert x.grad.item() == 2.0


PARAMETER_IN_OTHER_CLOTHES = {
    "t": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "flatten": lambda w: w.flatten(),
    "chunk": lambda w: w.chunk(2)[0],
    "split": lambda w: w.split([1, 3])[1],
    "unbind": lambda w: w.unbind()[2],
    "select": lambda w: w[1],
    "slice": lambda w: w[1:, ::2],
    "expand": lambda w: w.expand(3, 4, 4),
    "permute": lambda w: w.permute(1, 0),
    "cast": lambda w: w.double(),
    "clone": lambda w: w.clone(),
    "chain": lambda w: w.double().t()[1:].reshape(-1).split(4)[0].unsqueeze(0),
}


@pytest.mark.parametrize("dress", PARAMETER_IN_OTHER_CLOTHES.values(), ids=PARAMETER_IN_OTHER_CLOTHES)
def test_a_parameter_in_other_clothes_is_not_clipped(dress):
    w = torch.randn(4, 4, requires_grad=True)
    loss = (dress(w) * 10).sum()
    (expected,) = plain(loss, w)
    with gg.error_clip(loss, gg.ErrorClipByValue(2.0)):
        loss.backward()
    assert expected.abs().max() >= 10
    equal(w.grad, expected)


COMPLEX_PARAMETER_IN_OTHER_CLOTHES = {
    "as real": torch.view_as_real,
    "real": lambda w: w.real,
    "imaginary": lambda w: w.imag,
    "conjugate": lambda w: w.conj(),
    "conjugate, in memory": lambda w: w.conj().resolve_conj(),
    "imaginary part of the conjugate": lambda w: w.conj().imag,
    "adjoint": lambda w: w.mH,
    "conj_physical": torch.conj_physical,
    "and back": lambda w: torch.view_as_complex(torch.view_as_real(w).clone()),
}


@pytest.mark.parametrize("dress", COMPLEX_PARAMETER_IN_OTHER_CLOTHES.values(), ids=COMPLEX_PARAMETER_IN_OTHER_CLOTHES)
def test_a_complex_parameter_in_other_clothes_is_not_clipped(dress):
    w = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    value = dress(w)
    loss = ((torch.view_as_real(value.resolve_conj()) if value.is_complex() else value) * 10).sum()
    (expected,) = plain(loss, w)
    with gg.error_clip(loss, gg.ErrorClipByValue(2.0)):
        loss.backward()
    assert expected.abs().max() >= 10
    equal(w.grad, expected)


def test_a_computed_weight_is_clipped():
    g, v = leaf(1.0), leaf(3.0, 4.0)
    weight = g * v / v.norm()
    expected = plain(weight, g, v, grad_outputs=torch.full((2,), 2.0))
    loss = (weight * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(2.0)):
        loss.backward()
    equal(g.grad, expected[0])
    equal(v.grad, expected[1])


def test_uses_are_added_up_and_the_sum_is_clipped_once():
    x = leaf(1.0)
    h = x * 1
    loss = (h * 3 + h * 4 - h * 6).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(2.0)):
        loss.backward()
    assert x.grad.item() == 1.0  # 3 + 4 - 6; clipping each first would give 2 + 2 - 2


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("call", ["backward", "grad"])
def test_leaves_are_clipped_on_request_after_their_uses_are_added_up(leaves, call):
    x = leaf(1.0)
    loss = (x * 3 + x * 4).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0), leaves=leaves):
        if call == "backward":
            loss.backward()
        gradient = x.grad if call == "backward" else torch.autograd.grad(loss, x)[0]
    assert gradient.item() == (5.0 if leaves else 7.0)


def test_tensor_hooks_see_gradients_before_the_clip_and_what_they_return_is_clipped():
    x, seen = leaf(1.0), []
    h = x * 1
    h.register_hook(lambda grad: seen.append(grad.item()) or grad * 3)
    loss = (h * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        h.register_hook(lambda grad: seen.append(grad.item()))
        loss.backward()
    assert seen == [10.0, 30.0]
    assert x.grad.item() == 5.0


def test_what_is_captured_at_a_value_is_its_gradient_before_the_clip():
    x = leaf(1.0)
    h = x * 1
    h.retain_grad()
    below = h * 2
    loss = (below * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(4.0)):
        assert torch.autograd.grad(loss, below, retain_graph=True)[0].item() == 10.0
        loss.backward(inputs=[h], retain_graph=True)
        assert h.grad.item() == 8.0
        loss.backward()
    assert h.grad.item() == 16.0
    assert x.grad.item() == 4.0


def test_full_backward_hooks_of_modules_see_clipped_gradients():
    layer, seen = nn.Linear(1, 1), []
    layer.register_full_backward_hook(lambda module, made, taken: seen.append(taken[0].item()))
    loss = (layer(torch.ones(1, 1) * leaf(1.0)) * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        loss.backward()
    assert seen == [5.0]


def test_two_backwards_through_one_graph_are_both_clipped_and_the_third_is_not():
    x = leaf(1.0)
    loss = (x * 1 * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    assert x.grad.item() == 10.0
    loss.backward()
    assert x.grad.item() == 20.0


def test_the_clip_is_differentiated_as_clamp_is():
    x = leaf(0.5, 3.0)
    loss = (2 * x).pow(3).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    equal(gradient.detach(), torch.tensor([6.0, 10.0]))
    equal(torch.autograd.grad(gradient.sum(), x)[0], torch.tensor([24.0, 0.0]))


@pytest.mark.parametrize(
    "rule", [gg.ErrorClipByValue(0.6), gg.ErrorClipByNorm(1.0), gg.rules.ErrorClipBySampleNorm(0.5)]
)
def test_clipped_gradients_pass_gradcheck(rule):
    w = torch.randn(3, 4, dtype=torch.float64)

    def clipped_gradient(x: Tensor) -> Tensor:
        loss = ((x @ w).tanh().exp() * x.sin().sum()).sum()
        with gg.error_clip(loss, rule):
            return torch.autograd.grad(loss, x, create_graph=True)[0]

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert not torch.allclose(clipped_gradient(x), plain(((x @ w).tanh().exp() * x.sin().sum()).sum(), x)[0])
    assert torch.autograd.gradcheck(clipped_gradient, x)


class Returns(gg.BaseErrorClip):
    """Returns something else for products."""

    def __init__(self, make):
        self.make = make

    def clip(self, grad):
        return self.make(grad) if grad.shape == (2, 3) else grad


def _raise(grad):
    raise KeyError("of the user")


BAD_RULES = {
    "None": (lambda g: None, InvalidTypeError, "output of MulBackward0: Returns.clip returned None: expected"),
    "number": (lambda g: 1.0, InvalidTypeError, "output of MulBackward0: Returns.clip returned float"),
    "shape": (lambda g: g[:1], InvalidTypeError, r"MulBackward0: .* shape \(1, 3\).*expected .* shape \(2, 3\)"),
    "broadcastable": (lambda g: g[:1, :1], InvalidTypeError, r"MulBackward0: .* shape \(1, 1\)"),
    "dtype": (lambda g: g.double(), InvalidTypeError, "MulBackward0: .* torch.float64.*expected .* torch.float32"),
    "exception": (_raise, KeyError, "of the user"),
}


@pytest.mark.parametrize(("make", "error", "words"), BAD_RULES.values(), ids=BAD_RULES)
@pytest.mark.parametrize("options", [{}, {"leaves": True}, {"scale": 2.0}, {"stats": True}], ids=str)
def test_a_rule_that_returns_something_else_is_refused_by_name_and_nothing_stays_attached(make, error, words, options):
    if options.get("stats"):
        options = {"stats": gg.ErrorClipStats()}
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x * 10).sum()
    (expected,) = plain(loss, x)
    with pytest.raises(error, match=words) as caught, gg.error_clip(loss, Returns(make), **options):
        loss.backward(retain_graph=True)
    if error is KeyError:
        assert "MulBackward0" in " ".join(caught.value.__notes__)
    assert "made by the backward" not in str(caught.value)  # a rule that returns something else is no fault of these
    equal(plain(loss, x)[0], expected)


def test_an_exception_in_the_block_leaves_it_unchanged_and_nothing_attached():
    x = leaf(1.0)
    loss = (x * 1 * 10).sum()
    with pytest.raises(RuntimeError, match="of the user"), gg.error_clip(loss, gg.ErrorClipByValue(5.0), leaves=True):
        raise RuntimeError("of the user")
    assert plain(loss, x)[0].item() == 10.0


def test_nothing_of_a_block_stays_alive():
    x = leaf(1.0)
    loss = (x * 1 * 10).sum()
    rule = Returns(lambda grad: grad)
    gone = weakref.ref(rule)
    with gg.error_clip(loss, rule, leaves=True):
        loss.backward(retain_graph=True)
    del rule
    assert gone() is None
    assert x._backward_hooks is None or not x._backward_hooks


NO_LOSS = {
    "without a graph": (lambda: torch.tensor(1.0), InvalidValueError, "has no graph behind it"),
    "a leaf": (lambda: leaf(1.0), InvalidValueError, "requires_grad=True. has no graph behind it"),
    "detached": (lambda: leaf(1.0).sum().detach(), InvalidValueError, "has no graph behind it"),
    "a number": (lambda: 1.0, InvalidTypeError, "target is float: expected a loss, a module, or a list"),
    "a name": (lambda: "loss", InvalidTypeError, "target is str"),
    "an empty list": (list, InvalidValueError, "target is an empty list"),
    "a list of numbers": (lambda: [1.0], InvalidTypeError, "entry 0 of the list is float"),
    "a constant in a list": (lambda: [torch.ones(3)], InvalidValueError, "tensor 0 .* does not require a gradient"),
}


@pytest.mark.parametrize(("make", "error", "words"), NO_LOSS.values(), ids=NO_LOSS)
def test_a_target_without_a_graph_is_refused(make, error, words):
    with pytest.raises(error, match=words), gg.error_clip(make(), gg.ErrorClipByValue(1.0)):
        pytest.fail("the block ran")


@pytest.mark.parametrize("rule", [5.0, "5", gg.ErrorClipByValue, torch.clamp])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(InvalidTypeError, match=r"expected one such as gg\.ErrorClipByValue\(max=5\.0\)"):
        gg.error_clip(leaf(1.0).sum(), rule).__enter__()


def test_a_freed_graph_is_an_error_that_names_the_operation():
    x = leaf(1.0)
    loss = (x * 1).exp().sum()
    loss.backward()
    with (
        pytest.raises(FreedGraphError, match=r"freed by an earlier backward at ExpBackward0.*retain_graph=True"),
        gg.error_clip(loss, gg.ErrorClipByValue(1.0)),
    ):
        loss.backward()


def test_in_place_relu_and_outputs_without_a_gradient():
    x = torch.randn(2, 8, requires_grad=True)
    used, unused = F.relu(x * 2, inplace=True).chunk(2, 1)
    loss = (used * 10 + used.unbind(1)[3].unsqueeze(1)).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.5)):
        loss.backward()
    expected = torch.cat([3.0 * (x[:, :4] > 0), torch.zeros(2, 4)], 1)
    equal(x.grad, expected)
    assert unused.grad_fn is used.grad_fn


NETWORKS_OF_EVERY_KIND = {
    "embedding": lambda x: F.embedding(torch.tensor([[1, 2, 2]]), x[0, 0]).square(),
    "conv": lambda x: F.conv2d(x, x[:, :, :3, :3]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]).square(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).exp(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x * 3),
    "GRU": lambda x: nn.GRU(4, 3)(x[0])[0],
}


@pytest.mark.parametrize("network", NETWORKS_OF_EVERY_KIND.values(), ids=NETWORKS_OF_EVERY_KIND)
def test_bounds_every_gradient_of_every_kind_of_operation(network):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    value = network(x * 2)
    loss = (value * torch.randn(value.shape)).sum()
    (expected,) = plain(loss, x)
    with gg.error_clip(loss, gg.ErrorClipByValue(0.01)):
        loss.backward()
    assert x.grad.isfinite().all()
    assert 0 < x.grad.abs().max() <= 0.02 * (1 + 1e-6)  # x * 2 has one use: its gradient is at most 0.01
    assert not torch.equal(x.grad, expected)

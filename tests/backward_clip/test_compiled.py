"""`attach_error_clip`: eager as the block around the backward, compiled as eager."""

import pytest
import torch
from compiled_cases import CLIP, MODELS, RULES, assert_equal, compiled, differ, distance, gradients, made, mean_square
from torch import nn
from torch._dynamo.utils import counters

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_eager_attach_is_the_block_around_the_backward(name, rule):
    model, loss = made(name)
    attached = gradients(model, loss, rule)
    model.zero_grad()
    value = loss()
    with gg.error_clip(value, rule):
        value.backward()
    torch.testing.assert_close(attached, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-7)


def test_a_loss_is_not_clipped_but_logits_are():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    gg.attach_error_clip(x.sum(), gg.ErrorClipByValue(0.5)).backward()
    assert x.grad.tolist() == [1.0, 1.0]
    x.grad = None
    gg.attach_error_clip(3 * x, gg.ErrorClipByValue(0.5)).sum().backward()
    assert x.grad.tolist() == [1.5, 1.5]


BAD_RULES = {"number": (5.0, "did you mean"), "class": (gg.ErrorClipByNorm, "rule is type"), "text": ("1", "rule is")}


@pytest.mark.parametrize(("rule", "words"), BAD_RULES.values(), ids=BAD_RULES.keys())
def test_what_is_no_rule_is_refused(rule, words):
    with pytest.raises(InvalidTypeError, match=words):
        gg.attach_error_clip(torch.ones(2, requires_grad=True).sum(), rule)


def test_a_calibration_is_refused_because_it_would_record_nothing():
    with pytest.raises(InvalidTypeError, match="calibrat"):
        gg.attach_error_clip(torch.ones(2, requires_grad=True).exp().sum(), gg.calibrate())


def test_no_rule_clips_nothing_as_in_the_block():
    x = torch.ones(2, requires_grad=True)
    gg.attach_error_clip((9 * x).sum(), None).backward()
    assert x.grad.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("values", [torch.ones(2), torch.ones(2, requires_grad=True), (), {"a": 3}, [torch.ones(1)]])
def test_values_without_a_graph_are_refused(values):
    with pytest.raises(InvalidValueError, match="no value has a graph behind it"):
        gg.attach_error_clip(values, CLIP)


def slow_if(condition: bool, *values):
    return pytest.param(*values, marks=pytest.mark.slow if condition else ())


MODELS_AND_RULES = [
    slow_if(name in {"lstm", "softmax"}, name, kind)
    for name in MODELS
    for kind in RULES
    if name in {"mlp", "conv"} or kind in {"value", "norm"} or (kind == "custom, none" and name != "dropout")
]


@pytest.mark.parametrize(("name", "kind"), MODELS_AND_RULES)
def test_compiled_is_eager_bit_for_bit(name, kind):
    (model, loss), rule = made(name), RULES[kind]
    eager = gradients(model, loss, rule)
    assert kind == "non-finite" or differ(eager, gradients(model, loss))
    assert_equal(gradients(model, compiled(loss), rule), eager)


@pytest.mark.parametrize("name", [slow_if(name == "lstm", name) for name in MODELS])
def test_compiled_is_eager_bit_for_bit_under_bfloat16_autocast(name):
    model, plain = made(name)

    def loss(rule):
        # Without a clip, too, compiled code differs from eager code that keeps the cast weights between their uses.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return plain(rule)

    assert_equal(gradients(model, compiled(loss), CLIP), gradients(model, loss, CLIP))


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its compiler cannot trace the making of a rule")
def test_infinite_gradients_become_zero_in_compiled_code_too():
    weight = nn.Parameter(torch.tensor([0.0, 4.0]))
    compiled(
        lambda: gg.attach_error_clip((weight * 1.0).sqrt().sum(), gg.rules.ErrorClipNonfinite("zero"))
    )().backward()
    assert weight.grad.tolist() == [0.0, 0.25]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_inductor_is_as_close_to_eager_with_a_clip_as_without(name):
    model, loss = made(name)
    without = distance(gradients(model, compiled(loss, backend="inductor")), gradients(model, loss))
    eager = gradients(model, loss, CLIP)
    assert distance(gradients(model, compiled(loss, backend="inductor"), CLIP), eager) <= 4 * max(without, 1e-6)
    assert distance(gradients(model, loss), eager) > 1e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_compiled_code_are_clipped_inside(reentrant):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(6, 4, requires_grad=True)
    recomputed = lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    ours = gradients(model, compiled(lambda: gg.attach_error_clip(mean_square(recomputed()), CLIP)))
    assert_equal(ours, gradients(model, lambda: gg.attach_error_clip(mean_square(model(x)), CLIP)))

"""`attach_error_clip`: eager as the block around the backward, compiled as eager."""

import pytest
import torch
from compiled_cases import (
    CLIP,
    MODELS,
    RULES,
    Damp,
    assert_equal,
    compiled,
    differ,
    distance,
    gradients,
    made,
    mean_square,
)
from torch import nn
from torch._dynamo.utils import counters

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError

pytestmark = pytest.mark.sampled(1)  # rows of each table


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
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


def test_infinite_gradients_become_zero_in_compiled_code_too():
    weight = nn.Parameter(torch.tensor([0.0, 4.0]))
    compiled(
        lambda: gg.attach_error_clip((weight * 1.0).sqrt().sum(), gg.rules.ErrorClipNonfinite("zero"))
    )().backward()
    assert weight.grad.tolist() == [0.0, 0.25]


def rule_with_constants():
    rule = Damp(0.05, k=0.25)
    rule.bound = 0.1
    rule.extra = None
    return rule


MADE_INSIDE = {
    "by value": lambda: gg.ErrorClipByValue(0.05),
    "asymmetric": lambda: gg.ErrorClipByValue(0.05, min=-0.01),
    "by norm": lambda: gg.ErrorClipByNorm(0.05),
    "with constants": rule_with_constants,
}


@pytest.mark.parametrize("make", MADE_INSIDE.values(), ids=MADE_INSIDE.keys())
def test_a_rule_may_be_made_in_compiled_code(make):
    """On torch 2.11, too, whose compiler cannot list the attributes of what is made there."""
    model, loss = made("mlp")
    eager = gradients(model, loss, make())
    assert differ(eager, gradients(model, loss))
    assert_equal(gradients(model, compiled(lambda: loss(make()))), eager)


def test_a_threshold_may_be_assigned_in_compiled_code():
    (model, loss), rule = made("mlp"), gg.ErrorClipByValue(9.0)

    def step():
        rule.max = 0.05
        return loss(rule)

    assert_equal(gradients(model, compiled(step)), gradients(model, loss, gg.ErrorClipByValue(0.05)))


class Broken:
    """Ways to break a graph: ``before`` the clip the weight is used, or it is not."""

    weight, x = nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4)), torch.linspace(0.1, 2.0, 8).view(2, 4)

    def body(self):
        return (self.x @ self.weight.t()).tanh() * 7

    def clipped(self, y):
        return gg.attach_error_clip(y.square().sum(), CLIP)

    def between(self):
        y = self.body()
        torch._dynamo.graph_break()
        return self.clipped(y)

    def just_before(self):
        y = self.body().square().sum()
        torch._dynamo.graph_break()
        return gg.attach_error_clip(y, CLIP)

    def in_an_inner_call(self):
        return self._breaks(self.body())

    def after_the_clip_in_an_inner_call(self):
        return self._breaks_after(self.body())

    def in_eager_code(self):
        return self._eager(self.body())

    def before_anything(self):
        torch._dynamo.graph_break()
        return self.clipped(self.body())

    def after_the_clip(self):
        y = self.clipped(self.body())
        torch._dynamo.graph_break()
        return y * 1

    def _breaks(self, y):
        torch._dynamo.graph_break()
        return self.clipped(y)

    def _breaks_after(self, y):
        z = self.clipped(y)
        torch._dynamo.graph_break()
        return z

    @torch.compiler.disable
    def _eager(self, y):
        return self.clipped(y)


HALF = ["between", "just_before", "in_an_inner_call", "after_the_clip_in_an_inner_call", "in_eager_code"]
GRAD_OF_NON_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # torch's, where it traces


@pytest.mark.filterwarnings(GRAD_OF_NON_LEAF, "ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.parametrize("way", HALF)
def test_a_graph_break_that_leaves_a_part_unclipped_is_refused(way):
    step = torch.compile(getattr(Broken(), way), backend="aot_eager")
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=r"behind a graph break.*fullgraph=True"):
            step()


@pytest.mark.filterwarnings(GRAD_OF_NON_LEAF)
@pytest.mark.parametrize("way", ["before_anything", "after_the_clip"])
def test_a_graph_break_that_leaves_nothing_unclipped_is_none_of_our_business(way):
    case = Broken()
    step = getattr(case, way)
    found = [torch.autograd.grad(call(), case.weight)[0] for call in (torch.compile(step, backend="aot_eager"), step)]
    assert_equal(found[:1], found[1:])
    assert not torch.equal(found[0], torch.autograd.grad(case.body().square().sum(), case.weight)[0])


@pytest.mark.filterwarnings(GRAD_OF_NON_LEAF)
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(())], ids=["dims", "0-dim"])
def test_a_clip_on_an_input_of_compiled_code_is_refused(value):
    """Nothing that is compiled lies behind it: it would clip nothing."""
    step = torch.compile(lambda y: gg.attach_error_clip(y, CLIP), backend="aot_eager")
    for given in (value.requires_grad_(), value * 2):
        with pytest.raises(Exception, match="on inputs of the compiled code"):  # in the compiler's own error
            step(given)


def test_an_eager_clip_that_reaches_nothing_but_compiled_code_is_refused():
    _, loss = made("mlp")
    for value in (compiled(loss)(), compiled(loss)() * 2):
        with pytest.raises(InvalidValueError, match="straight out of compiled code"):
            gg.attach_error_clip(value, CLIP)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_inductor_is_as_close_to_eager_with_a_clip_as_rounding_is(name):
    model, loss = made(name)
    eager = gradients(model, loss, CLIP)
    assert distance(gradients(model, compiled(loss, backend="inductor"), CLIP), eager) <= 4e-6
    assert distance(gradients(model, loss), eager) > 1e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_compiled_code_are_clipped_inside(reentrant):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(6, 4, requires_grad=True)
    recomputed = lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    ours = gradients(model, compiled(lambda: gg.attach_error_clip(mean_square(recomputed()), CLIP)))
    assert_equal(ours, gradients(model, lambda: gg.attach_error_clip(mean_square(model(x)), CLIP)))

"""`attach_error_clip` in compiled code: what recompiles, where it may stand, scales, and caches on disk."""

import os
import subprocess
import sys

import pytest
import torch
from compiled_cases import CLIP, RULES, Damp, assert_equal, compiled, differ, gradients, graphs, made, mean_square
from torch import nn
from torch._dynamo.utils import counters

import gradguard as gg

pytestmark = pytest.mark.sampled(1)  # rows of each table


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


THRESHOLDS = {
    "value": (gg.ErrorClipByValue, "max"),
    "norm": (gg.ErrorClipByNorm, "max_norm"),
    "sample norm": (gg.rules.ErrorClipBySampleNorm, "max_norm"),
    "zero above": (gg.rules.ErrorClipZeroAbove, "max"),
    "custom": (Damp, "bound"),
}


@pytest.mark.parametrize(("kind", "attribute"), THRESHOLDS.values(), ids=THRESHOLDS.keys())
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_new_threshold_takes_effect_without_recompiling(kind, attribute, dynamic):
    model, loss = made("mlp")
    step, rule = compiled(loss, dynamic=dynamic), kind(0.5)
    seen = [gradients(model, step, rule)]
    for threshold in (0.3, 0.2, 0.1):
        setattr(rule, attribute, threshold)
        for same in (rule, kind(threshold)):
            seen.append(gradients(model, step, same))
            assert_equal(seen[-1], gradients(model, loss, kind(threshold)))
        assert differ(seen[-1], seen[-3])
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_another_kind_of_rule_recompiles_and_the_first_ones_code_is_still_there(dynamic):
    model, loss = made("mlp")
    step = compiled(loss, dynamic=dynamic)
    for count, rule in enumerate(list(RULES.values())[:6], start=1):
        assert_equal(gradients(model, step, rule), gradients(model, loss, rule))
        assert graphs() == count
    assert_equal(gradients(model, step, RULES["value"]), gradients(model, loss, RULES["value"]))
    assert graphs() == 6


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("constants", [(0.5, 0.25, 2.0, 0.0), (2, 3, 4, 0)], ids=["floats", "integers"])
def test_another_constant_of_a_rule_recompiles_and_takes_effect(constants, dynamic):
    model, loss = made("mlp")
    step, rule = compiled(loss, dynamic=dynamic), Damp(0.05, k=1)
    for count, k in enumerate(constants, start=1):
        rule.k = k
        assert_equal(gradients(model, step, rule), gradients(model, loss, Damp(0.05, k)))
        assert graphs() == count


def test_attributes_of_every_type_are_constants_of_compiled_code():
    class Scaled(gg.BaseErrorClip):
        def __init__(self, factor):
            self.factor = factor

        def clip(self, grad):
            factor = self.factor[0] if isinstance(self.factor, tuple | list) else self.factor
            return grad * (factor() if callable(factor) else factor)

    model, loss = made("mlp")
    step = compiled(loss)
    for factor in ((0.5, 1), [0.25], True, lambda: 0.125, torch.tensor(0.75)):
        assert_equal(gradients(model, step, Scaled(factor)), gradients(model, loss, Scaled(factor)))


def test_equal_tuples_in_new_rules_do_not_recompile():
    class Shifted(gg.BaseErrorClip):
        def __init__(self, steps):
            self.steps = tuple(range(1, steps))

        def clip(self, grad):
            return grad / sum(self.steps)

    model, loss = made("mlp")
    step = compiled(loss)
    for _ in range(3):
        assert_equal(gradients(model, step, Shifted(4)), gradients(model, loss, Shifted(4)))
    assert graphs() == 1


@pytest.mark.parametrize("rule", [None, CLIP, RULES["sample norm"]], ids=["none", "value", "sample norm"])
def test_dynamic_shapes_need_as_many_graphs_as_without_a_clip(rule):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(x, rule):
        value = mean_square(model(x))
        return value if rule is None else gg.attach_error_clip(value, rule)

    step = compiled(loss, dynamic=True)
    for batch in (3, 5, 8):
        x = torch.randn(batch, 4)
        assert_equal(gradients(model, step, x, rule), gradients(model, loss, x, rule))
    assert graphs() == 1


# --- where it stands


def test_no_graph_break_is_added():
    _, loss = made("softmax")
    explained = torch._dynamo.explain(loss)(CLIP)
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)


class Head(nn.Module):
    """A module with the clip in its forward, and the rule among its attributes."""

    def __init__(self, outputs):
        super().__init__()
        self.layers, self.outputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), outputs
        self.rule = gg.ErrorClipByValue(0.05)

    def forward(self, x):
        return gg.attach_error_clip(self.outputs(self.layers(x)), self.rule)


OUTPUTS = {
    "logits": (lambda y: y, lambda out: out),
    "dict": (lambda y: {"y": y, "z": 2 * y, "n": 3}, lambda out: out["y"] + out["z"] * out["n"]),
    "tuple": (lambda y: (y.exp(), [y.mean(), None]), lambda out: out[0] * out[1][0]),
    "with constants": (lambda y: (y, torch.ones(3)), lambda out: out[0] * out[1]),
    "views": (lambda y: y.unbind(1), lambda out: out[0] * out[2]),
}


@pytest.mark.parametrize(("outputs", "taken"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_a_compiled_module_clips_behind_each_of_its_outputs(outputs, taken):
    head, x = Head(outputs), torch.randn(6, 4)
    step = compiled(head)
    for threshold in (0.05, 0.01):
        head.rule.max = threshold
        ours = gradients(head, lambda: mean_square(taken(step(x))))
        assert_equal(ours, gradients(head, lambda: mean_square(taken(head(x)))))
    head.rule = gg.ErrorClipByNorm(0.05)
    ours = gradients(head, lambda: mean_square(taken(step(x))))
    assert_equal(ours, gradients(head, lambda: mean_square(taken(head(x)))))
    assert graphs() == (3 if torch.__version__.startswith("2.11") else 2)


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its compiler cannot trace the making of a rule")
def test_the_rule_may_be_made_inside_or_come_from_outside():
    model, loss = made("mlp")
    rule = gg.ErrorClipByValue(0.05, min=-0.01)
    expected = gradients(model, loss, rule)
    assert_equal(gradients(model, compiled(lambda: loss(gg.ErrorClipByValue(0.05, min=-0.01)))), expected)
    outside = compiled(lambda: loss(rule))
    assert_equal(gradients(model, outside), expected)
    rule.max = 0.02
    assert_equal(gradients(model, outside), gradients(model, loss, gg.ErrorClipByValue(0.02, min=-0.01)))
    assert graphs() == 2


def test_two_clips_apply_in_the_order_of_their_calls():
    model, loss = made("mlp")
    both = lambda first, second: gg.attach_error_clip(loss(first), second)  # noqa: E731
    rules = gg.ErrorClipByValue(0.05), Damp(0.02)
    eager = gradients(model, both, *rules)
    assert_equal(gradients(model, compiled(both), *rules), eager)
    assert differ(eager, gradients(model, both, *rules[::-1]))


def test_nothing_is_attached_where_gradients_are_disabled():
    head, x = Head(lambda y: y), torch.randn(6, 4)
    step = compiled(head)
    with torch.no_grad():
        assert torch.equal(step(x), head(x))
        assert not step(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(step(x), head(x))
    assert_equal(gradients(head, lambda: mean_square(step(x))), gradients(head, lambda: mean_square(head(x))))


@pytest.mark.parametrize("scale", [None, 2.0, torch.tensor(2.0)], ids=["no scale", "number", "tensor"])
def test_a_compiled_module_without_gradients_passes_its_values_on(scale):
    frozen, x = nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4)
    assert torch.equal(compiled(lambda: gg.attach_error_clip(frozen(x), CLIP, scale=scale))(), frozen(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_within_a_clipped_eager_model_are_clipped_like_one_eager_graph():
    first, second = Head(lambda y: y), nn.Linear(3, 4)
    third, x = Head(lambda y: y), torch.randn(6, 4)
    everything = nn.ModuleList([first, second, third])

    def clipped(one, two, rule=CLIP):
        loss = mean_square(two(second(one(x)).relu()))
        with gg.error_clip(loss, rule):
            loss.backward()
        return loss.detach().requires_grad_()  # `gradients` calls backward on what it is given

    plain = gradients(everything, clipped, first.layers, third.layers)
    assert_equal(gradients(everything, clipped, compiled(first), compiled(third)), plain)
    assert differ(plain, gradients(everything, clipped, first.layers, third.layers, None))


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its compiler cannot trace the making of a rule")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_raising_at_what_is_not_finite_cannot_be_compiled():
    _, loss = made("mlp")
    with pytest.raises(Exception, match=r'ErrorClipNonfinite\("raise"\) cannot be compiled'):
        compiled(loss)(gg.rules.ErrorClipNonfinite("raise"))


# --- scales


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["value", "norm", "non-finite", "custom, threshold", "custom, none"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("number", [float, int, torch.tensor])
def test_a_scale_multiplies_the_threshold_and_may_change(kind, dynamic, number):
    model, loss = made("mlp")
    scaled = lambda scale: gg.attach_error_clip(loss() * scale, RULES[kind], scale=scale)  # noqa: E731
    step = compiled(scaled, dynamic=dynamic)
    for scale in (2, 16, 64):
        ours = gradients(model, step, number(scale))
        assert_equal(ours, gradients(model, scaled, number(scale)))
        unscaled = [g / scale for g in ours]
        torch.testing.assert_close(unscaled, gradients(model, loss, RULES[kind]), rtol=1e-5, atol=1e-9)
    assert number is not torch.tensor or graphs() == 1


def test_a_grad_scaler_may_be_the_scale_and_may_change_it():
    model, loss = made("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = compiled(lambda: gg.attach_error_clip(loss(), CLIP, scale=scaler))
    for scale in (8.0, 16.0, 2.0):
        model.zero_grad()
        scaler.scale(step()).backward()
        ours = [p.grad.clone() for p in model.parameters()]
        assert_equal(ours, gradients(model, lambda: gg.attach_error_clip(loss(), CLIP, scale=scale) * scale))  # noqa: B023
        scaler.update({8.0: 16.0, 16.0: 2.0, 2.0: 1.0}[scale])
    assert graphs() <= 2  # the scaler has no tensor before its first use


# --- caches on disk

SCRIPT = """
import sys
import torch, gradguard as gg
from torch._dynamo.utils import counters

factor, rules = float(sys.argv[1]), sys.argv[2:]


class Times(gg.BaseErrorClip):
    if factor == 2.0:
        def clip(self, grad): return grad * 2.0
    else:
        def clip(self, grad): return grad * 3.0


RULES = {
    "none": None,
    "value 0.01": gg.ErrorClipByValue(1e-2), "value 0.001": gg.ErrorClipByValue(1e-3),
    "norm": gg.ErrorClipByNorm(1e-3), "times": Times(),
}
torch.manual_seed(0)
weight, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(5, 4)


def loss(rule):
    value = (x @ weight).tanh().square().mean()
    return value if rule is None else gg.attach_error_clip(value, rule)


for name in rules:
    torch._dynamo.reset()
    results = []
    for step in (loss, torch.compile(loss, fullgraph=True)):
        weight.grad = None
        step(RULES[name]).backward()
        results.append(weight.grad)
    assert torch.allclose(*results, rtol=1e-5, atol=1e-8), (name, results)
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.exhaustive  # it compiles in three processes
def test_a_warm_cache_on_disk_gives_no_other_clips_code(tmp_path):
    def run(*arguments: str) -> int:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    run("2.0", "none", "value 0.01", "times")
    assert run("3.0", "times", "value 0.001", "norm", "none") > 2
    assert run("2.0", "value 0.01") == 2  # forward and backward

"""The fixed rules as objects: equal to the functions, with results, state, alarms, and no wait for a device."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import FrozenInstanceError

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import gradguard as gg
from cases import DTYPES, GRADIENTS, ORDERS, gradients_in, parameter, random
from gradguard import ClipAdaptive, ClipByGlobalNorm, ClipByNorm, ClipByRMS, ClipByValue
from gradguard.clip import clip_rules as rules
from gradguard.clip.gradients import measured
from gradguard.clip.lock_in import LockIn
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError
from gradguard.rules import Clipper, Decision, describe, norms_of, total_of
from reference import clip_norm as slow_clip
from reference import total_norm as slow_norm
from strategies import parameter_lists


def fresh(case: str) -> list[nn.Parameter]:
    """Parameters with the gradients of a case, whose memory is their own; weights are 0.1."""

    def own(g: torch.Tensor) -> torch.Tensor:
        if 0 in g.stride() and g.numel() > 1:
            return g[tuple(slice(0, 1) if s == 0 else slice(None) for s in g.stride())].clone().expand(g.shape)
        return (
            g.clone()
            if g.layout is not torch.strided
            else torch.empty_strided(g.shape, g.stride(), dtype=g.dtype).copy_(g)
        )

    return [
        parameter(own(g), torch.full(g.shape, 0.1, dtype=g.dtype))
        if g.layout is torch.strided
        else parameter(g.clone(), torch.full((4,), 0.1))
        for g in GRADIENTS[case]
    ]


def dense(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.to_dense() if p.grad.layout is not torch.strided else p.grad for p in params]


def each_norm(params, threshold):
    for p in params:
        gg.clip_grad_norm_(p, threshold)


def each_rms(params, threshold):
    for p in params:
        gg.clip_grad_norm_(p, threshold * math.sqrt(max(1, p.numel())))


RULES = {
    "global": (lambda t: ClipByGlobalNorm(t), lambda params, t: gg.clip_grad_norm_(params, t)),
    "global, p = 1": (lambda t: ClipByGlobalNorm(t, 1.0), lambda params, t: gg.clip_grad_norm_(params, t, 1.0)),
    "global, p = inf": (
        lambda t: ClipByGlobalNorm(t, math.inf),
        lambda params, t: gg.clip_grad_norm_(params, t, math.inf),
    ),
    "each": (lambda t: ClipByNorm(t), each_norm),
    "each, by its mean square": (lambda t: ClipByRMS(t), each_rms),
    "value": (lambda t: ClipByValue(t), lambda params, t: gg.clip_grad_value_(params, t)),
    "interval": (
        lambda t: ClipByValue(t, -2 * t - 1),
        lambda params, t: gg.clip_grad_value_(params, t, min_value=-2 * t - 1),
    ),
    "adaptive": (lambda t: ClipAdaptive(t), lambda params, t: gg.clip_grad_adaptive_(params, t)),
}
BEYOND_A_SQUARE = ("huge float64", "tiny float64")  # only the CPU looks whether float64 has overflowed
EVERYWHERE = [(c, p) for c in GRADIENTS for p in ("host", "device") if p == "host" or c not in BEYOND_A_SQUARE]


@pytest.mark.sampled(240)
@pytest.mark.parametrize("threshold", [0.0, 0.05, 1.0, math.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("case", "path"), EVERYWHERE, indirect=["path"])
def test_equal_to_the_functions(case, rule, threshold, path):
    make, function = RULES[rule]
    if rule == "interval" and math.isinf(threshold):
        threshold = 1e30
    ours, theirs = fresh(case), fresh(case)
    result = make(threshold)(ours)
    function(theirs, threshold)
    torch.testing.assert_close(dense(ours), dense(theirs), rtol=1e-5, atol=0)
    order = {"global, p = 1": 1.0, "global, p = inf": math.inf}.get(rule, 2.0)
    assert float(result.norm.double()) == pytest.approx(slow_norm(GRADIENTS[case], order), rel=1e-5, abs=1e-44)
    assert len(result.names) == len(result.tensor_norms) == len(ours)
    assert not bool(result.nonfinite)
    assert result.culprits() == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one path for all that is drawn
@given(drawn=parameter_lists(), name=st.sampled_from([*RULES]), threshold=st.sampled_from([0.0, 0.05, 1.0, 1e30]))
def test_equal_to_the_functions_on_any_list(drawn, name, threshold, path):
    """Gradients that are missing, that come twice, and of mixed shapes, dtypes, layouts and magnitudes."""
    make, function = RULES[name]
    ours, theirs = drawn.made(), [*dict.fromkeys(drawn.made())]
    present = [p for p in dict.fromkeys(ours) if p.grad is not None]
    order = {"global, p = 1": 1.0, "global, p = inf": math.inf}.get(name, 2.0)
    expected = slow_norm([p.grad for p in present], order)
    result = make(threshold)(ours)
    function([p for p in theirs if p.grad is not None], threshold)
    torch.testing.assert_close(dense(present), dense([p for p in theirs if p.grad is not None]), rtol=1e-5, atol=0)
    assert len(result.names) == len(result.tensor_norms) == len(present)
    if expected < torch.finfo(result.norm.dtype).max:
        assert float(result.norm.double()) == pytest.approx(expected, rel=1e-5, abs=1e-44)
        assert not bool(result.nonfinite)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["one", "several shapes", "mixed dtypes", "sparse", "longer than a row"])
def test_the_coefficient_is_the_norm_after_over_the_norm_before(case, rule, path):
    params = fresh(case)
    result = RULES[rule][0](0.5)(params)
    if rule == "adaptive":
        assert 0 < float(result.coefficient) < 1
    order = {"global, p = 1": 1.0, "global, p = inf": math.inf}.get(rule, 2.0)
    after = slow_norm(dense(params), order)
    assert float(result.coefficient) == pytest.approx(after / float(result.norm), rel=5e-3 if "mix" in case else 1e-4)
    assert bool(result.clipped)
    assert result.coefficient.dtype == torch.float64
    assert float(result.threshold) == 0.5


@pytest.mark.parametrize("rule", RULES)
def test_a_clip_that_does_not_bind_writes_nothing_on_the_cpu(rule):
    params = [parameter(random(3, 4) * 1e-6, torch.ones(3, 4)), parameter(random(2000) * 1e-6, torch.ones(2000))]
    versions = [p.grad._version for p in params]
    result = RULES[rule][0](1.0)(params)
    assert [p.grad._version for p in params] == versions
    assert not bool(result.clipped)
    assert float(result.coefficient) == 1


@pytest.mark.parametrize("rule", RULES)
def test_deciding_writes_nothing(rule, path):
    params = [parameter(random(3, 4) * 100, torch.ones(3, 4))]
    before = params[0].grad.clone()
    decision = RULES[rule][0](0.1).decide(gradients_in(params))
    torch.testing.assert_close(params[0].grad, before, rtol=0, atol=0)
    decision.apply()
    assert not torch.equal(params[0].grad, before)
    assert bool(decision.result.clipped)
    assert float(decision.result.coefficient) < 1
    assert (decision.coefficient is not None) == rule.startswith("global")


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("rule", RULES)
def test_thresholds_are_for_gradients_without_their_loss_scale(rule, kind, path):
    plain, scaled = ([parameter(random(3, 4) * s, torch.ones(3, 4) * 3)] for s in (1.0, 1024.0))
    results = []
    for params, scale in ((plain, 1.0), (scaled, kind(1024.0))):
        decision = RULES[rule][0](0.1).decide(gradients_in(params), scale)
        decision.apply()
        results.append(decision.result)
    torch.testing.assert_close(scaled[0].grad / 1024, plain[0].grad, rtol=1e-6, atol=0)
    for field in ("norm", "coefficient", "clipped", "tensor_norms", "threshold"):
        torch.testing.assert_close(getattr(results[1], field), getattr(results[0], field), rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_norm_agrees_with_the_slow_twin(dtype, p, path):
    params = [parameter(random(7, 5, seed=i, dtype=dtype)) for i in range(3)]
    expected = slow_clip([q.grad for q in params], 0.5, p)
    ClipByGlobalNorm(0.5, p)(params)
    found = [q.grad.double() for q in params]
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-7)


def test_a_global_norm_that_overflows_float16(path):
    p = parameter(torch.full((4,), 4e4, dtype=torch.float16))
    result = ClipByGlobalNorm(1.0)(p)
    assert float(result.norm) == 8e4
    assert p.grad.tolist() == [0.5] * 4


def test_each_tensor_by_itself(path):
    params = [parameter(torch.tensor([3.0, 4.0])), parameter(torch.tensor([0.3])), parameter(torch.tensor(-9.0))]
    result = ClipByNorm(1.0)(params)
    torch.testing.assert_close(
        [p.grad for p in params], [torch.tensor([0.6, 0.8]), torch.tensor([0.3]), torch.tensor(-1.0)]
    )
    assert result.tensor_norms.tolist() == pytest.approx([5.0, 0.3, 9.0])


def test_adaptive_takes_the_units_of_the_module_and_exempts(path):
    ours = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(3, 2), nn.Linear(2, 2))
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        for i, p in enumerate(model.parameters()):
            p.grad = random(*p.shape, seed=i)
    result = ClipAdaptive(0.05, exclude=("1.bias", ours[2]))(ours)
    gg.clip_grad_adaptive_(theirs, 0.05, exclude=["1.bias", theirs[2]])
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    after = slow_norm([p.grad for p in ours.parameters()])
    assert float(result.coefficient) == pytest.approx(after / float(result.norm), rel=1e-5, abs=0)
    assert len(result.names) == 6


@pytest.mark.parametrize(
    ("exclude", "words"),
    [
        ("head", r"exclude has 'head', which matches no parameter; the parameters are weight, bias"),
        (nn.Linear(1, 1), "exclude has a Linear, which matches no parameter"),
        (torch.ones(3), r"exclude has a Tensor of shape \(3,\), which matches no parameter"),
    ],
)
def test_an_exclusion_that_matches_nothing_lists_the_names(exclude, words):
    layer = nn.Linear(2, 2)
    with pytest.raises(InvalidValueError, match=words):
        ClipAdaptive(exclude=exclude)(layer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda clip: pickle.loads(pickle.dumps(clip))])
@pytest.mark.parametrize("rule", RULES)
def test_clippers_can_be_copied_and_pickled(rule, duplicate):
    layer, clip = nn.ConvTranspose1d(2, 3, 2), RULES[rule][0](0.01)
    after = []
    for again in (lambda clip: clip, duplicate):
        for i, p in enumerate(layer.parameters()):
            p.grad = random(*p.shape, seed=i)
        clip = again(clip)
        clip(layer)
        after.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)


def test_exclusion_by_name_of_a_tied_parameter_takes_any_of_its_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.full((2, 2), 100.0)
    ClipAdaptive(exclude="1")(model)
    assert model[0].weight.grad.tolist() == [[100.0] * 2] * 2


# --- Bad arguments, and thresholds that are scheduled -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ClipByGlobalNorm(-1.0), InvalidValueError, r"max_norm=-1\.0: expected a number >= 0"),
        (lambda: ClipByNorm(math.nan), InvalidValueError, "max_norm=nan"),
        (lambda: ClipByGlobalNorm(1.0, 0), InvalidValueError, "norm_type=0: expected a number above 0"),
        (lambda: ClipByNorm(1.0, "two"), InvalidValueError, "norm_type='two'"),
        (lambda: ClipByGlobalNorm("1"), InvalidTypeError, "max_norm='1': expected a number"),
        (lambda: ClipByValue(-1.0), InvalidValueError, r"max=-1\.0"),
        (lambda: ClipByValue(1.0, 2.0), InvalidValueError, r"expected min <= max"),
        (lambda: ClipByValue(1.0, "0"), InvalidTypeError, "min='0'"),
        (lambda: ClipAdaptive(-0.1), InvalidValueError, r"threshold=-0\.1"),
        (lambda: ClipAdaptive(eps=math.nan), InvalidValueError, "eps=nan"),
        (lambda: ClipAdaptive(exclude=3), InvalidTypeError, "exclude has 3: expected a name or pattern"),
        (lambda: ClipByNorm(1.0)(nn.Linear(1, 1), nonfinite="skip"), InvalidValueError, "only gg.Guard can do"),
        (lambda: ClipByNorm(1.0)(3), InvalidTypeError, "parameters is int: expected a module"),
    ],
)
def test_arguments_that_cannot_be_meant(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(("rule", "attribute"), [(ClipByGlobalNorm, "max_norm"), (ClipByNorm, "max_norm")])
def test_a_threshold_may_be_scheduled_and_is_checked_on_each_step(rule, attribute):
    clip, p = rule(10.0), parameter(torch.tensor([3.0, 4.0]))
    clip(p)
    setattr(clip, attribute, 1.0)
    clip(p)
    assert slow_norm([p.grad]) == pytest.approx(1.0, rel=1e-5, abs=0)
    setattr(clip, attribute, -1.0)
    with pytest.raises(InvalidValueError, match=r"max_norm=-1\.0"):
        clip(p)


@pytest.mark.parametrize("rule", [r for r in RULES if r != "interval"])
def test_a_threshold_may_be_a_tensor(rule, path):
    params = [[parameter(random(5, 5) * 100, torch.ones(5, 5))] for _ in range(2)]
    RULES[rule][0](torch.tensor(0.5))(params[0])
    RULES[rule][0](0.5)(params[1])
    torch.testing.assert_close(params[0][0].grad, params[1][0].grad)


# --- Not finite -------------------------------------------------------------------------------------------------------


def broken() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[math.nan, 1.0], [math.inf, 5.0]])
    model.bias.grad = torch.tensor([30.0, 40.0])
    return model


@pytest.mark.parametrize("rule", RULES)
def test_propagate_is_that_of_the_functions(rule, path):
    ours, theirs = broken(), broken()
    theirs.load_state_dict(ours.state_dict())
    make, function = RULES[rule]
    result = make(1.0)(ours)
    function(list(theirs.parameters()), 1.0)
    torch.testing.assert_close(
        [p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], equal_nan=True
    )
    assert bool(result.nonfinite)


@pytest.mark.parametrize("rule", RULES)
def test_raise_changes_neither_gradients_nor_state(rule, path):
    model, clip = broken(), RULES[rule][0](1.0)
    before, state = [p.grad.clone() for p in model.parameters()], clip.state_dict()
    with pytest.raises(NonFiniteGradientError, match="`weight`: 1 NaN and 1 infinite of 4 elements"):
        clip(model, nonfinite="raise")
    torch.testing.assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(clip.state_dict(), state, rtol=0, atol=0)
    assert float(clip(nn.Linear(1, 1), nonfinite="raise").norm) == 0


@pytest.mark.parametrize("rule", RULES)
def test_zero_zeroes_the_whole_step_and_only_a_bad_one(rule, path):
    model, good, clip = broken(), parameter(torch.tensor([0.25, 0.5]), torch.ones(2)), RULES[rule][0](1.0)
    result = clip(model, nonfinite="zero")
    assert [p.grad.count_nonzero().item() for p in model.parameters()] == [0, 0]
    assert (float(result.coefficient), bool(result.clipped), bool(result.nonfinite)) == (0.0, True, True)
    result = clip(good, nonfinite="zero")
    assert not bool(result.nonfinite)
    assert good.grad.count_nonzero().item() == 2


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_culprits_are_named_with_counts_that_hold_after_the_clip(rule, policy):
    model = broken()
    result = RULES[rule][0](1.0)(model, nonfinite=policy)
    model.zero_grad()
    assert result.culprits() == {"weight": 2}


def test_where_nothing_can_be_read_culprits_are_named_without_counts(monkeypatch):
    monkeypatch.setattr("gradguard.clip.clipper.are_readable", lambda *tensors: False)
    assert ClipByGlobalNorm(1.0).decide(gradients_in(broken())).result.culprits() == {"weight": None}


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_result_keeps_no_gradient_alive(factor):
    p = parameter(factor * random(10))
    result = ClipByGlobalNorm(1.0)(p)
    reference = weakref.ref(p.grad)
    p.grad = None
    gc.collect()
    assert reference() is None
    assert len(result.culprits()) == (factor != 1)


# --- Results, lists and devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_clip(rule, path):
    for params in ([], [nn.Parameter(torch.ones(2))], [parameter(torch.zeros(0))]):
        result = RULES[rule][0](1.0)(params)
        assert (float(result.norm), float(result.coefficient), bool(result.clipped)) == (0.0, 1.0, False)
        assert not bool(result.nonfinite)


@pytest.mark.parametrize("rule", RULES)
def test_tied_and_repeated_parameters_count_once_and_frozen_ones_not(rule, path):
    p, frozen = parameter(torch.tensor([3.0, 4.0]), torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    q = parameter(torch.tensor([3.0, 4.0]), torch.ones(2))
    result = RULES[rule][0](0.5)([p, frozen, p])
    RULES[rule][0](0.5)([q])
    assert len(result.tensor_norms) == 1
    assert p.grad.tolist() == q.grad.tolist()


def test_the_result_is_frozen():
    result = ClipByNorm(1.0)(parameter(torch.ones(2)))
    with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
        result.threshold = None


@pytest.mark.parametrize("rule", RULES)
def test_no_value_is_read_on_a_device(rule):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3)).to("meta")
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    clip = RULES[rule][0](1.0)
    for policy in ("propagate", "zero"):
        result = clip(model, nonfinite=policy)
        for field in ("norm", "coefficient", "clipped", "nonfinite", "threshold", "locked_in"):
            assert getattr(result, field).device.type == "meta", field
    with pytest.raises(RuntimeError, match="meta tensors"):
        clip(model, nonfinite="raise")


def test_one_measurement_is_shared(monkeypatch):
    found = measured(gradients_in([parameter(random(3))]))
    monkeypatch.setattr("gradguard.clip.gradients.tensor_norms", lambda *_: pytest.fail("measured again"))
    assert norms_of(found, 2.0).tolist() == (found.norms / 2).tolist()
    ClipByGlobalNorm(1.0).decide(found)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("scale", [1e200, 1.0, 1e-200])
def test_norms_of_norms_do_not_overflow(scale, order):
    norms = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
    assert float(total_of(norms, order)) == pytest.approx(scale * slow_norm([torch.tensor([3.0, 4.0])], order))
    assert math.isnan(float(total_of(torch.tensor([math.nan, math.inf]))))
    assert float(total_of(torch.tensor([1.0, math.inf]))) == math.inf


class Halve(Clipper):
    """The least that a rule of one's own must do."""

    def decide(self, grads, scale=1.0):
        norms = norms_of(grads, scale)
        half = torch.full_like(norms.sum(), 0.5)
        return Decision(grads, describe(grads, norms, half, half < 1), half)


def test_a_rule_of_ones_own():
    p, clip = parameter(torch.tensor([3.0, 4.0])), Halve()
    result = clip([("p", p)])
    assert (float(result.norm), result.names, p.grad.tolist()) == (5.0, ("p",), [1.5, 2.0])
    clip.load_state_dict(clip.state_dict())


# --- The lock-in alarm ------------------------------------------------------------------------------------------------

YES, NO = torch.tensor(True), torch.tensor(False)
HALF = [i % 2 == 0 for i in range(20)]
LOCK_INS = {
    "always": ([True] * 20, [1.0] * 20, 10, 10),
    "never": ([False] * 20, [1.0] * 20, 10, None),
    "exactly half": (HALF, [1.0] * 20, 10, None),
    "just above half": ([i % 5 < 3 for i in range(20)], [1.0] * 20, 10, 10),
    "a threshold that moves": ([True] * 20, [1.05**i for i in range(20)], 10, None),
    "a threshold that stops": ([True] * 30, [2.0] * 12 + [1.0] * 18, 10, 10),
    "a threshold that wobbles": ([True] * 20, [1.0 + 0.004 * (i % 2) for i in range(20)], 10, 10),
    "threshold zero": ([True] * 20, [0.0] * 20, 10, 10),
}


@pytest.mark.parametrize("case", LOCK_INS)
def test_lock_in(case):
    clipped, thresholds, window, first = LOCK_INS[case]
    alarm = LockIn(window)
    verdicts = [bool(alarm.follow(YES if c else NO, t, YES)) for c, t in zip(clipped, thresholds, strict=True)]
    expected = next((i + 1 for i, verdict in enumerate(verdicts) if verdict), None)
    assert expected == first


def test_lock_in_ends_when_the_threshold_moves_or_the_clip_lets_go():
    for change in ((YES, 2.0), (NO, 1.0)):
        alarm = LockIn(4)
        assert [bool(alarm.follow(YES, 1.0, YES)) for _ in range(4)][-1]
        after = [bool(alarm.follow(*change, YES)) for _ in range(3)]
        assert not after[0 if change[1] == 2.0 else 1]


def test_a_step_that_is_not_finite_leaves_no_trace():
    alarm = LockIn(4)
    for _ in range(3):
        alarm.follow(YES, 1.0, YES)
    before = alarm.state_dict()
    for threshold in (1.0, torch.tensor(math.nan)):
        assert not bool(alarm.follow(YES, threshold, NO))
    torch.testing.assert_close(alarm.state_dict(), before, rtol=0, atol=0)
    assert bool(alarm.follow(YES, torch.tensor(1.0), YES))


@pytest.mark.parametrize("rule", RULES)
def test_fixed_rules_tell_of_a_lock_in_and_it_survives_a_resumed_run(rule, path):
    clip, p = RULES[rule][0](0.001), parameter(torch.ones(2, 2), torch.ones(2, 2))
    resumed = None
    for step in range(100):
        if step == 60:
            resumed = RULES[rule][0](0.001)
            resumed.load_state_dict(copy.deepcopy(clip.state_dict()))
        p.grad = torch.full((2, 2), 5.0)
        result = clip(p)
        if resumed is not None:
            p.grad = torch.full((2, 2), 5.0)
            assert bool(resumed(p).locked_in) == bool(result.locked_in)
        assert bool(result.locked_in) == (step == 99)
    torch.testing.assert_close(resumed.state_dict(), clip.state_dict(), rtol=0, atol=0)


def test_a_saved_state_is_a_copy():
    clip, p = ClipByGlobalNorm(1.0), parameter(torch.ones(2))
    state = clip.state_dict()
    kept = copy.deepcopy(state)
    clip(p)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    clip.load_state_dict(state)
    clip(p)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)


def test_the_state_of_something_else_is_refused():
    for state, came in (
        ({"ring": torch.zeros(1)}, r"\['ring'\]"),
        (gg.ClipByMedian().state_dict(), r"\['count', "),
        ({}, r"\[\]"),
        (None, "NoneType"),
    ):
        for rule in (ClipByNorm(1.0), ClipByGlobalNorm(1.0), ClipByValue(1.0), gg.ClipByRMS(1.0), gg.ClipAdaptive()):
            name = type(rule).__name__
            with pytest.raises(InvalidValueError, match=rf"the state is not of a {name}: .*came {came}.*saved from"):
                rule.load_state_dict(state)


def test_values_that_bind_in_no_tensor_are_not_measured_twice(monkeypatch):
    monkeypatch.setattr(rules, "total_norm", lambda *_: pytest.fail("measured again"))
    ClipByValue(10.0)([parameter(random(5))])


@pytest.mark.parametrize("excess", [1e-6, 0.5])
def test_a_value_just_above_the_bound_is_clamped(excess, path):
    p = parameter(torch.tensor([-1.0 - excess, 0.25]))
    assert bool(ClipByValue(1.0)(p).clipped)
    assert p.grad.tolist() == [-1.0, 0.25]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_not_finite_does_not_enter_the_state_of_a_rule(rule, bad, path):
    clip = RULES[rule][0](1.0)
    state = clip.state_dict()
    clip(parameter(torch.tensor([5.0, bad]), torch.ones(2)))
    torch.testing.assert_close(clip.state_dict(), state, rtol=0, atol=0)


def test_the_lock_in_alarm_takes_only_a_state_of_its_own_window():
    alarm = LockIn()
    with pytest.raises(InvalidValueError, match="a window of 7 steps, but this one has 100"):
        alarm.load_state_dict(LockIn(7).state_dict())

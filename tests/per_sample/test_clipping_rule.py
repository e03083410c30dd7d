"""Rules of one's own: what passes is within the bound, and what does not says why."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradguard import AutoNormClipper, FlatNormClipper, QuantileNormClipper
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.per_sample.clipping_rule import checked_factors, checked_groups, layer_of
from gradguard.rules import NormClipper

INF, NAN = math.inf, math.nan

any_float = st.floats(min_value=0.0, allow_infinity=False, allow_nan=False)


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Own(NormClipper):
    """A rule whose factors and thresholds are whatever a test says."""

    def __init__(self, returns, thresholds=(1.0,), groups=()):
        self.returns, self.limits, self.groups = returns, thresholds, groups

    @property
    def thresholds(self):
        return list(self.limits) if isinstance(self.limits, tuple) else self.limits

    def calc_clipping_factors(self, norms):
        return self.returns(norms) if callable(self.returns) else self.returns


def one_over(norms):
    return [(1 / norms[0]).clamp(max=1)]


def test_a_rule_without_care_for_rounding_is_held_to_its_bound():
    norms = float64(0.0, 0.5, 3.0, 7.0, INF, NAN)
    (found,) = checked_factors(Own(one_over), [norms])
    assert found.tolist() == FlatNormClipper(1.0).calc_clipping_factors([norms])[0].tolist()


@pytest.mark.parametrize("norm", [NAN, INF])
def test_samples_without_a_finite_norm_get_0_from_any_rule(norm):
    (found,) = checked_factors(Own(lambda norms: [torch.full_like(norms[0], 0.5)]), [float64(norm, 1.0)])
    assert found.tolist() == [0.0, 0.5]


@given(norms=st.lists(any_float, min_size=1, max_size=6), factor=st.floats(0, 1), threshold=st.floats(1e-30, 1e30))
def test_whatever_passes_is_within_the_bound(norms, factor, threshold):
    norm = float64(*norms)
    rule = Own([torch.full_like(norm, factor)], (threshold,))
    try:
        (found,) = checked_factors(rule, [norm])
    except InvalidValueError as error:
        assert "exceeds thresholds[0]" in str(error)  # noqa: PT017
        assert (factor * norm > threshold).any()
    else:
        assert (found * norm <= threshold).all()


def test_a_rule_cannot_change_the_norms_nor_keep_its_graph():
    norms = float64(4.0)
    weight = torch.ones(1, requires_grad=True)
    (found,) = checked_factors(Own(lambda given: [given[0].fill_(0.1) * weight]), [norms])
    assert norms.tolist() == [4.0]
    assert not found.requires_grad
    assert found.dtype is torch.float64


def test_boolean_and_half_precision_factors_are_taken():
    norms = float64(0.5, 3.0)
    assert checked_factors(Own(lambda given: [given[0] < 1]), [norms])[0].tolist() == [1.0, 0.0]
    assert checked_factors(Own(lambda given: [(0.25 / given[0]).half()]), [norms])[0].dtype is torch.float64


TWO = [float64(1.0, 2.0), float64(1.0, 4.0)]
BROKEN = {
    "a tensor": (Own(float64(1.0, 1.0)), InvalidTypeError, "Own.calc_clipping_factors returned Tensor: .*list of 1"),
    "none": (Own([None]), InvalidTypeError, "returned factors of NoneType: expected real tensors"),
    "too many": (Own([float64(1.0, 1.0)] * 2), InvalidValueError, "returned 2 tensors: expected 1, as many as norms"),
    "shape": (Own([float64(1.0)]), InvalidValueError, r"factors 0 of shape \(1,\) on cpu: expected \(2,\) on cpu"),
    "device": (Own([torch.ones(2, device="meta")]), InvalidValueError, "on meta: expected .* on cpu"),
    "complex": (Own([torch.ones(2, dtype=torch.complex64)]), InvalidTypeError, "factors of torch.complex64"),
    "nan": (
        Own([float64(1.0, NAN)]),
        InvalidValueError,
        "gave the factor nan to sample 1, group 0 of parameters, .*with norm 2",
    ),
    "negative": (Own([float64(-0.5, 0.0)]), InvalidValueError, "factor -0.5 to sample 0.*expected a factor >= 0"),
    "infinite": (Own([float64(INF, 0.0)], (INF,)), InvalidValueError, "factor inf .*in float32's range"),
    "beyond": (Own([float64(1e39, 0.0)], (INF,)), InvalidValueError, r"factor 1e\+39 .*in float32's range"),
    "excess": (
        Own([float64(1.0, 0.75)]),
        InvalidValueError,
        r"clipped norm 1.5 exceeds thresholds\[0\]=1: lower the factor, or state a higher",
    ),
    "little": (Own([float64(1.0, 0.500001)]), InvalidValueError, r"exceeds thresholds\[0\]=1: lower"),
    "above 0": (Own([float64(0.0, 0.5)], (0.0,)), InvalidValueError, r"clipped norm 1 exceeds thresholds\[0\]=0: "),
    "thresholds": (Own(one_over, (1.0, 1.0)), InvalidValueError, "Own.thresholds has 2 numbers: expected 1"),
    "threshold": (Own(one_over, 1.0), InvalidTypeError, "Own.thresholds has float: expected a list of 1 numbers"),
    "nan threshold": (Own(one_over, (NAN,)), InvalidValueError, r"Own.thresholds\[0\]=nan: expected a number >= 0"),
}


@pytest.mark.parametrize(("rule", "error", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_rules_are_refused(rule, error, words):
    with pytest.raises(error, match=words):
        checked_factors(rule, TWO[:1])


@pytest.mark.parametrize("factor", [-100.0, NAN, INF, 1e39])
def test_where_the_host_does_not_look_no_factor_breaks_the_bound(factor, monkeypatch):
    monkeypatch.setattr("gradguard.per_sample.clipping_rule.are_readable", lambda *tensors: False)
    [found] = checked_factors(Own([float64(1.0, factor)]), TWO[:1])
    assert found.tolist() == pytest.approx([1.0, 0.5 if factor > 0 else 0.0], rel=1e-5, abs=0)


def test_a_broken_part_is_named():
    group = ["1.weight", "1.bias"]
    rule = Own([float64(1.0, 0.5), float64(1.0, 1.0)], (1.0, 1.0), groups=[["0.weight"], group])
    rule.prepare(["0.weight", *group])
    with pytest.raises(InvalidValueError, match=r"sample 1, group 1 of parameters, .*1.bias.*, with norm 4.* exceeds"):
        checked_factors(rule, TWO)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([["a"]], r"missing: \['b'\], not trained or in several: \[\]"),
        ([["a", "b"], ["a"]], r"missing: \[\], not trained or in several: \['a'\]"),
        ([["a"], ["b", "c"]], r"missing: \[\], not trained or in several: \['c'\]"),
        ([["a", "b"], []], "empty groups: 1"),
    ],
)
def test_every_parameter_stands_in_one_group(groups, words):
    with pytest.raises(InvalidValueError, match=f"each trained parameter in exactly one group; .*{words}"):
        checked_groups(Own(one_over, groups=groups), ["a", "b"])


def test_a_rule_without_groups_has_one():
    assert checked_groups(Own(one_over), ["a", "b"]) == [["a", "b"]]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("weight", ""),
        ("0.weight", "0"),
        ("encoder.layers.0.bias", "encoder.layers.0"),
        ("parametrizations.weight.original0", ""),
        ("head.parametrizations.weight.original1", "head"),
    ],
)
def test_a_layer_is_the_module_that_holds_a_parameter(name, layer):
    assert layer_of(name) == layer


def test_a_rule_must_say_its_thresholds():
    class Half(NormClipper):
        def calc_clipping_factors(self, norms):
            return [norms[0] * 0]

    with pytest.raises(TypeError, match=r"abstract method '?thresholds"):
        Half()  # type: ignore[abstract]


def test_values_are_not_read_where_the_host_would_wait():
    # A tensor without values stands for an accelerator: any look at them raises.
    norms = torch.ones(3, dtype=torch.float64, device="meta")
    for rule in (Own(one_over), FlatNormClipper(1.0), AutoNormClipper(), QuantileNormClipper(1.0)):
        assert checked_factors(rule, [norms])[0].shape == (3,)


def test_a_saved_state_is_never_dropped():
    class Saves(FlatNormClipper):
        def state_dict(self):
            return {"max_norm": self.max_norm}

    rule = Saves(1.0)
    with pytest.raises(InvalidValueError, match=r"a state of Saves, with the keys \[\], got \['max_norm'\]"):
        rule.load_state_dict(rule.state_dict())

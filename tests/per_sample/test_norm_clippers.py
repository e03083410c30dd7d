"""Rules for clipping factors: the bound in every arithmetic, the edge cases, and the moving quantile."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradguard import (
    AutoNormClipper,
    FlatNormClipper,
    PerLayerNormClipper,
    PerParameterNormClipper,
    QuantileNormClipper,
)
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.per_sample.clipping_rule import SLACK, checked_factors
from gradguard.rules import NormClipper

INF, NAN = math.inf, math.nan
FLAT = {
    "flat": FlatNormClipper,
    "per layer": PerLayerNormClipper,
    "per parameter": PerParameterNormClipper,
    "quantile": lambda c: QuantileNormClipper(c, min_max_norm=1e-37, max_max_norm=1e38),
}
RULES = {**FLAT, "auto": AutoNormClipper}


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def factors_of(rule: NormClipper, *norms: float) -> list[float]:
    (found,) = rule.calc_clipping_factors([float64(*norms)])
    assert found.dtype is torch.float64
    return found.tolist()


# The bound

any_float = st.floats(min_value=0.0, allow_infinity=False, allow_nan=False)


@example(norms=[2.2250738585e-313], threshold=5e-324)  # 1 / norm is infinite
@given(norms=st.lists(any_float, min_size=1, max_size=8), threshold=any_float)
def test_flat_factors_bound_every_norm_and_fall_with_it(norms, threshold):
    norm = float64(*sorted(norms))
    (found,) = FlatNormClipper(threshold).calc_clipping_factors([norm])
    assert (found * norm <= threshold).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert (found.diff() <= 0).all()
    if threshold > 0:
        assert (found[norm * (1 + SLACK) <= threshold] == 1).all()
        tight = (norm > threshold) & (norm < threshold * 1e37) & (norm < 1e300)
        assert (found[tight] * norm[tight] >= threshold * (1 - 1e-6) - 1e-323).all()


@given(norms=st.lists(any_float, min_size=1, max_size=8), threshold=st.floats(0, 1e30), gamma=st.floats(1e-3, 1e30))
def test_automatic_factors_bound_every_norm_and_fall_with_it(norms, threshold, gamma):
    norm = float64(*sorted(norms))
    (found,) = AutoNormClipper(threshold, gamma).calc_clipping_factors([norm])
    assert (found * norm <= threshold).all()
    assert (found.diff() <= 0).all()
    assert found.float().isfinite().all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bound_survives_the_arithmetic(rule, dtype):
    # Norms measured 2e-7 too small, factors and products rounded to float32, the result rounded to the dtype.
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(20_000, 3, generator=generator).to(dtype).float()
    exact = torch.linalg.vector_norm(gradients.double(), dim=1)
    threshold = float(exact.median())
    clipper = rule(threshold)
    clipper.prepare(["w"])
    if dtype is not torch.float32:
        clipper.slack += torch.finfo(dtype).eps / 2
    for measured in (exact * (1 - 2e-7), exact):
        (found,) = clipper.calc_clipping_factors([measured])
        clipped = torch.linalg.vector_norm((found.float().unsqueeze(1) * gradients).to(dtype).double(), dim=1)
        # A gradient shorter than C is left as it is: its own norm, not the measured one, decides.
        assert (clipped <= threshold).all()


@given(threshold=st.floats(1e-30, 1e3), size=st.floats(1e-30, 1e30), seed=st.integers(0, 99))
def test_the_bound_survives_float32_at_every_scale(threshold, size, seed):
    gradients = torch.randn(64, 5, generator=torch.Generator().manual_seed(seed)) * size
    norm = torch.linalg.vector_norm(gradients.double(), dim=1)
    (found,) = FlatNormClipper(threshold).calc_clipping_factors([norm * (1 - 2e-7)])
    clipped = found.float().unsqueeze(1) * gradients
    assert (torch.linalg.vector_norm(clipped.double(), dim=1) <= threshold).all()


# Edge cases


EDGES = {  # threshold: norm -> factor
    2.0: {0.0: 1.0, 1.0: 1.0, 2.0 * (1 - 2 * SLACK): 1.0, INF: 0.0, NAN: 0.0, 1e300: 0.0, 5e-324: 1.0},
    INF: {0.0: 1.0, 1e308: 1.0, 1.7976931348623157e308: 1.0, INF: 0.0, NAN: 0.0},
    0.0: {0.0: 0.0, 1.0: 0.0, 5e-324: 0.0, INF: 0.0, NAN: 0.0},
}


# A quantile cannot start at 0 or infinity: test_refused_arguments.
@pytest.mark.parametrize(
    ("rule", "threshold"), [(r, t) for r in FLAT for t in EDGES if r != "quantile" or t == 2.0], ids=str
)
def test_edge_cases(rule, threshold):
    clipper, edges = FLAT[rule](threshold), EDGES[threshold]
    clipper.prepare(["w"])
    assert factors_of(clipper, *edges) == list(edges.values())
    assert checked_factors(clipper, [float64(*edges)])[0].tolist() == list(edges.values())


def test_edge_cases_of_the_automatic_rule():
    assert factors_of(AutoNormClipper(1.0, 0.01), 0.0, INF, NAN) == pytest.approx([100.0, 0.0, 0.0], rel=2e-6)
    assert factors_of(AutoNormClipper(0.0), 0.0, 1.0) == [0.0, 0.0]


def test_a_norm_above_the_threshold_loses_no_more_than_the_slack():
    assert factors_of(FlatNormClipper(1.0), 4.0) == [0.25 / (1 + SLACK)]
    assert factors_of(AutoNormClipper(1.0, 1.0), 3.0) == [0.25 / (1 + SLACK)]


def test_subnormal_factors_round_down():
    (factor,) = factors_of(FlatNormClipper(1e-6), 6e38)  # 1.67e-45, and float32 knows 1.4e-45 and 2.8e-45
    assert factor == 2.0**-149


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_samples(rule):
    clipper = rule(1.0)
    clipper.prepare(["w"])
    assert checked_factors(clipper, [torch.zeros(0, dtype=torch.float64)])[0].shape == (0,)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_float32_norms_give_float64_factors(rule):
    clipper = rule(1.0)
    clipper.prepare(["w"])
    (found,) = clipper.calc_clipping_factors([torch.tensor([0.5, 3.0])])
    assert found.dtype is torch.float64


REFUSED = {
    "nan": (lambda: FlatNormClipper(NAN), "max_norm=nan: expected a number >= 0"),
    "negative": (lambda: FlatNormClipper(-1), "max_norm=-1.0: expected a number >= 0"),
    "none": (lambda: FlatNormClipper(None), "max_norm=None: expected a number, got NoneType"),  # type: ignore[arg-type]
    "text": (lambda: FlatNormClipper("1"), "max_norm='1': expected a number, got str"),  # type: ignore[arg-type]
    "tensor": (lambda: FlatNormClipper(torch.ones(2)), "expected one number"),  # type: ignore[arg-type]
    "empty": (lambda: PerLayerNormClipper([]), "max_norms is empty: .* each trained layer"),
    "empty mapping": (lambda: PerParameterNormClipper({}), "max_norms is empty: .* each trained parameter"),
    "one negative": (lambda: PerLayerNormClipper([1.0, -2.0]), r"max_norms\[1\]=-2.0: expected a number >= 0"),
    "one nan": (lambda: PerLayerNormClipper({"w": NAN}), r"max_norms\['w'\]=nan"),
    "one text": (lambda: PerLayerNormClipper({"w": "1"}), r"max_norms\['w'\]='1'"),  # type: ignore[dict-item]
    "all text": (lambda: PerLayerNormClipper("12"), "max_norms='12': expected one number, a list"),  # type: ignore
    "set": (lambda: PerLayerNormClipper({1.0}), "a mapping from names, got set"),  # type: ignore[arg-type]
    "vector": (lambda: PerParameterNormClipper(torch.ones(2)), "a list with one for each parameter"),  # type: ignore
    "gamma 0": (lambda: AutoNormClipper(1.0, 0.0), "gamma=0.0: expected a number from"),
    "auto inf": (lambda: AutoNormClipper(INF), "max_norm=inf: expected a number from 0"),
    "auto ratio": (lambda: AutoNormClipper(1e30, 1e-30), "max_norm / gamma=1e"),
    "start 0": (lambda: QuantileNormClipper(0.0), "initial_max_norm=0.0: expected a number from 1e-08 to 1e"),
    "start inf": (lambda: QuantileNormClipper(INF), "initial_max_norm=inf"),
    "bounds": (lambda: QuantileNormClipper(1.0, min_max_norm=3, max_max_norm=2), "max_max_norm=2.0: .* from 3 to"),
    "quantile": (lambda: QuantileNormClipper(1.0, 1.5), "target_quantile=1.5: expected a number from 0 to 1"),
    "rate": (lambda: QuantileNormClipper(1.0, learning_rate=-0.1), "learning_rate=-0.1"),
    "noise": (lambda: QuantileNormClipper(1.0, count_noise=NAN), "count_noise=nan"),
    "size": (lambda: setattr(QuantileNormClipper(1.0), "expected_batch_size", 0), "expected_batch_size=0.0"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_arguments(make, words):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=words):
        make()


# Thresholds of each layer, and of each parameter

MODEL = ["0.weight", "0.bias", "encoder.0.weight", "encoder.1.weight", "encoder.1.bias"]


@pytest.mark.parametrize(
    ("rule", "max_norms", "thresholds"),
    [
        (PerLayerNormClipper, 2, [2.0, 2.0, 2.0]),
        (PerLayerNormClipper, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        (PerLayerNormClipper, (1, 2, 3), [1.0, 2.0, 3.0]),
        (PerLayerNormClipper, {"0": 1.0, "encoder": 2.0}, [1.0, 2.0, 2.0]),
        (PerLayerNormClipper, {"encoder.1": 3.0, "encoder": 2.0, "0": 1.0}, [1.0, 2.0, 3.0]),
        (PerLayerNormClipper, {"": 5.0, "encoder.0": 2.0}, [5.0, 2.0, 5.0]),
        (PerParameterNormClipper, 2, [2.0] * 5),
        (PerParameterNormClipper, [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]),
        (PerParameterNormClipper, {"": 1.0, "0": 2.0, "0.bias": 3.0}, [2.0, 3.0, 1.0, 1.0, 1.0]),
        (PerParameterNormClipper, {name: k for k, name in enumerate(reversed(MODEL))}, [4.0, 3.0, 2.0, 1.0, 0.0]),
    ],
)
def test_each_part_has_its_own_threshold(rule, max_norms, thresholds):
    clipper = rule(max_norms)
    with pytest.raises(InvalidValueError, match=r"call prepare\(names\) first"):
        _ = clipper.thresholds
    clipper.prepare(MODEL)
    layers = [MODEL[:2], MODEL[2:3], MODEL[3:]]
    assert clipper.groups == (layers if rule is PerLayerNormClipper else [[name] for name in MODEL])
    assert clipper.thresholds == thresholds
    assert clipper.sensitivity("add_or_remove_one") == pytest.approx(math.sqrt(sum(c * c for c in thresholds)))


@pytest.mark.parametrize("rule", [PerLayerNormClipper, PerParameterNormClipper])
def test_each_part_is_clipped_by_itself(rule):
    clipper = rule([3.0, 4.0])
    clipper.prepare(["a.weight", "b.weight"])
    first, second = checked_factors(clipper, [float64(6.0, 1.0), float64(4.0 / 2, 16.0)])
    assert (first * (1 + SLACK)).tolist() == pytest.approx([0.5, 1.0 + SLACK], rel=1e-12)
    assert (second * (1 + SLACK)).tolist() == pytest.approx([1.0 + SLACK, 0.25], rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "max_norms", "words"),
    [
        (
            PerLayerNormClipper,
            [1.0],
            "max_norms has 1 numbers for 3 trained layers .*'encoder.0'.*single number for all, not in",
        ),
        (PerLayerNormClipper, [1.0] * 5, "max_norms has 5 numbers for 3 trained layers"),
        (PerLayerNormClipper, {"0": 1.0}, r"missing: \['encoder.0', 'encoder.1'\], not of a trained layer: \[\]"),
        (PerLayerNormClipper, {"": 1.0, "enc": 1.0}, r"missing: \[\], not of a trained layer: \['enc'\]"),
        (PerLayerNormClipper, {"": 1.0, "encoder.01": 1.0}, r"not of a trained layer: \['encoder.01'\]"),
        (PerLayerNormClipper, {"": 1.0, "0.weight": 1.0}, r"\['0.weight'\].*PerParameterNormClipper takes the names"),
        (PerParameterNormClipper, [1.0] * 3, "max_norms has 3 numbers for 5 trained parameters"),
        (PerParameterNormClipper, {"0.weight": 1.0}, r"missing: \['0.bias', .*\], not of a trained parameter: \[\]"),
        (
            PerParameterNormClipper,
            {**dict.fromkeys(MODEL, 1.0), "typo": 1},
            r"missing: \[\], not of .*'typo'",
        ),
    ],
)
def test_prepare_refuses_thresholds_that_do_not_fit(rule, max_norms, words):
    clipper = rule(max_norms)
    with pytest.raises(InvalidValueError, match=words):
        clipper.prepare(MODEL)
    assert clipper.names == clipper.groups == ()


def test_norms_of_the_wrong_number_of_parts_are_refused():
    with pytest.raises(InvalidValueError, match=r"FlatNormClipper takes one norm of each sample.*got 2"):
        FlatNormClipper(1.0).calc_clipping_factors([float64(1.0)] * 2)
    with pytest.raises(InvalidValueError, match="call prepare"):
        PerLayerNormClipper({"a": 1.0}).calc_clipping_factors([float64(1.0)])
    for rule, words in (
        (PerLayerNormClipper, "1 layers, got 2"),
        (PerParameterNormClipper, "1 parameters, got 2"),
    ):
        prepared = rule(1.0)
        prepared.prepare(["a"])
        with pytest.raises(InvalidValueError, match=f"norms of {words}"):
            prepared.calc_clipping_factors([float64(1.0)] * 2)


def test_parameters_may_be_prepared_anew():
    clipper = PerParameterNormClipper(1.0)
    clipper.prepare(["a"])
    clipper.prepare(["a", "b"])
    assert clipper.thresholds == [1.0, 1.0]


# Sensitivity


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sensitivity_is_what_brute_force_finds(rule):
    clipper = rule(2.0)
    clipper.prepare(["w"])
    assert clipper.thresholds == [2.0]
    norms = torch.logspace(-6, 12, 1000, dtype=torch.float64)
    farthest = float((checked_factors(clipper, [norms])[0] * norms).max())
    assert 0.9999 * farthest <= farthest <= clipper.sensitivity("add_or_remove_one") == 2.0
    assert farthest > 2.0 * (1 - 2e-6)
    assert clipper.sensitivity("replace_one") == 4.0


@pytest.mark.parametrize("relation", ["remove", "", None, ["replace_one"]], ids=str)
def test_other_relations_are_refused(relation):
    with pytest.raises(InvalidValueError, match="expected 'add_or_remove_one' or 'replace_one'"):
        FlatNormClipper(1.0).sensitivity(relation)


# The moving quantile


def step(clipper: QuantileNormClipper, *batches: torch.Tensor) -> float:
    for batch in batches:
        clipper.calc_clipping_factors([batch])
    clipper.finish_step()
    return clipper.max_norm


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_the_threshold_finds_the_quantile_of_a_lognormal(quantile, start):
    generator = torch.Generator().manual_seed(1)
    clipper = QuantileNormClipper(start, quantile, count_noise=2.0, generator=generator)
    logarithms = [math.log(step(clipper, torch.randn(64, generator=generator).double().exp())) for _ in range(400)]
    expected = float(torch.special.ndtri(float64(quantile)))
    assert sum(logarithms[200:]) / 200 == pytest.approx(expected, abs=0.06)


def test_the_threshold_moves_only_between_steps_and_by_the_paper():
    clipper = QuantileNormClipper(1.0, 0.25, learning_rate=0.5)
    for batch in (float64(0.5, 1.0, 3.0), float64(0.1, NAN)):
        found = checked_factors(clipper, [batch])[0]
        assert found[0] == 1
        assert clipper.thresholds == [1.0]
    clipper.finish_step()
    assert clipper.max_norm == pytest.approx(math.exp(-0.5 * (3 / 5 - 0.25)))
    assert clipper.thresholds == [clipper.max_norm]


def test_a_step_without_samples():
    clipper = QuantileNormClipper(1.0, 0.25, learning_rate=1.0)
    assert step(clipper) == 1.0
    assert step(clipper, torch.zeros(0, dtype=torch.float64)) == 1.0
    clipper.expected_batch_size = 10
    assert step(clipper) == pytest.approx(math.exp(-0.25))  # as if half had been within


@pytest.mark.parametrize("norm", [0.5, 2.0, INF, NAN])
def test_one_sample_moves_the_count_by_a_half_whatever_its_norm(norm):
    # The formula for both noises stands on this.
    def fraction(*norms: float) -> float:
        clipper = QuantileNormClipper(1.0, 0.0, learning_rate=1.0)
        clipper.expected_batch_size = 8
        return -math.log(step(clipper, float64(*norms)))

    assert 8 * abs(fraction(0.2, 3.0, norm) - fraction(0.2, 3.0)) == pytest.approx(0.5)


def test_the_noise_has_the_stated_deviation():
    clipper = QuantileNormClipper(
        1.0, 0.5, 1.0, count_noise=3.0, max_max_norm=1e38, generator=torch.Generator().manual_seed(2)
    )
    clipper.expected_batch_size = 1
    draws = []
    for _ in range(4000):
        clipper.max_norm = 1.0
        draws.append(-math.log(step(clipper)))
    sample = float64(*draws)
    assert float(sample.std()) == pytest.approx(3.0, rel=4 / math.sqrt(2 * 4000))
    assert abs(float(sample.mean())) < 4 * 3.0 / math.sqrt(4000)


def test_noise_without_a_generator_is_no_part_of_torch_randomness():
    found = set()
    for _ in range(3):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        found.add(step(QuantileNormClipper(1.0, count_noise=1.0), float64(1.0, 2.0)))
        assert torch.equal(before, torch.get_rng_state())
    assert len(found) == 3


def test_the_threshold_stays_within_its_limits():
    for quantile, limit in ((0.0, 0.5), (1.0, 8.0)):
        clipper = QuantileNormClipper(1.0, quantile, learning_rate=1e6, min_max_norm=0.5, max_max_norm=8.0)
        assert step(clipper, float64(0.1, 100.0)) == limit


@pytest.mark.parametrize("size", [None, 6])
def test_a_saved_quantile_goes_on_as_if_nothing_happened(size):
    def make() -> QuantileNormClipper:
        clipper = QuantileNormClipper(1.0, count_noise=1.0, generator=torch.Generator().manual_seed(3))
        clipper.expected_batch_size = size
        return clipper

    first, second = make(), make()
    step(first, float64(0.5, 4.0))
    first.calc_clipping_factors([float64(9.0, 9.0, 0.1)])  # saved in the middle of a step
    second.load_state_dict(first.state_dict())
    for clipper in (first, second):
        step(clipper, float64(7.0))
    assert first.max_norm == second.max_norm != 1.0
    without = QuantileNormClipper(1.0)
    without.load_state_dict(first.state_dict())
    assert without.max_norm == first.max_norm


def test_foreign_states_are_refused():
    assert FlatNormClipper(1.0).state_dict() == {}
    FlatNormClipper(1.0).load_state_dict({})
    with pytest.raises(InvalidValueError, match=r"expected a state of FlatNormClipper.*was it saved by another rule"):
        FlatNormClipper(1.0).load_state_dict(QuantileNormClipper(1.0).state_dict())
    with pytest.raises(InvalidValueError, match="expected a state of QuantileNormClipper"):
        QuantileNormClipper(1.0).load_state_dict({})
    with pytest.raises(InvalidValueError, match=r"the saved max_norm=2000000000.0: expected a number from"):
        QuantileNormClipper(1.0).load_state_dict({**QuantileNormClipper(1.0).state_dict(), "max_norm": 2e9})


@pytest.mark.parametrize(("count_noise", "z"), [(5.0, 1.0), (0.6, 1.1), (100.0, 0.3)])
def test_both_noises_together_cost_what_was_asked(count_noise, z):
    found = QuantileNormClipper(1.0, count_noise=count_noise).noise_multiplier_for_gradients(z)
    assert found == pytest.approx((z**-2 - (2 * count_noise) ** -2) ** -0.5)
    assert found > z


def test_noise_that_cannot_be_split_is_refused():
    assert QuantileNormClipper(1.0).noise_multiplier_for_gradients(0.0) == 0.0
    for count_noise, z in ((0.0, 1.0), (0.5, 1.0)):
        with pytest.raises(InvalidValueError, match=f"expected count_noise above {z / 2}"):
            QuantileNormClipper(1.0, count_noise=count_noise).noise_multiplier_for_gradients(z)
    with pytest.raises(InvalidValueError, match="noise_multiplier=inf: expected a number from"):
        QuantileNormClipper(1.0, count_noise=1.0).noise_multiplier_for_gradients(INF)


@pytest.mark.parametrize("rule", [PerLayerNormClipper, PerParameterNormClipper])
def test_keys_that_are_no_names_are_refused(rule):
    with pytest.raises(InvalidTypeError, match=r"max_norms: expected names of \w+ as keys, got 0, of type int"):
        rule({0: 1.0})

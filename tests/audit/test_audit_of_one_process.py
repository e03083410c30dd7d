"""`audit_norm` on one process: coefficients, reports, what is refused, and gradients that are as they were."""

import math
import random
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import gradguard as gg
from gradguard.audit.coefficients import Applied, coefficient_findings
from gradguard.audit.factors import Setting, candidates, fit, named
from gradguard.audit.held import Tensor, check_groups, with_claims
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError


def model_with_gradients(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    model(torch.randn(5, 6, dtype=dtype)).square().sum().backward()
    return model


def gradients(model):
    return [p.grad for p in model.parameters()]


def scaled(model, factor):
    for g in gradients(model):
        g.mul_(factor)


def clipped(model, times=1, factor=None):
    norm = get_total_norm(gradients(model))
    for _ in range(times):
        scaled(model, min(1.0, 0.5 / (float(norm) + 1e-12)) if factor is None else factor)
    return norm


CLIPS = {
    "torch": (lambda m: clip_grad_norm_(m.parameters(), 0.5), None),
    "gradguard": (lambda m: gg.clip_grad_norm_(m, 0.5), None),
    "never scaled": (lambda m: get_total_norm(gradients(m)), "the gradient is never scaled"),
    "scaled twice": (lambda m: clipped(m, 2), "it is scaled twice"),
    "another number": (lambda m: clipped(m, factor=0.123), "no known mistake explains this number"),
    "each element": (lambda m: (get_total_norm(gradients(m)), nn.utils.clip_grad_value_(m.parameters(), 0.1))[0],
                     "not all multiplied by one number"),
    "gone": (lambda m: (get_total_norm(gradients(m)), m.zero_grad())[0], "no known mistake explains this number"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("clip", CLIPS)
def test_coefficients(clip, dtype):
    function, words = CLIPS[clip]
    model = model_with_gradients(dtype)
    before, objects = [g.clone() for g in gradients(model)], gradients(model)
    audit = gg.audit_norm(model, lambda: function(model), max_norm=0.5)
    assert [f.kind for f in audit.findings] == ([] if words is None else ["coefficient"] * len(audit.findings))
    assert bool(audit) is (words is None)
    assert words is None or words in str(audit)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    assert all(a is b for a, b in zip(objects, gradients(model), strict=True))


def test_one_gradient_that_is_not_scaled_is_named():
    model = model_with_gradients()
    audit = gg.audit_norm(model, lambda: clip_but_the_last(model), max_norm=0.5)
    assert [(f.kind, f.names) for f in audit.findings] == [("coefficient", ("2.bias",))]
    unknown = gg.audit_norm(model, lambda: clip_but_the_last(model))
    assert [(f.kind, f.names) for f in unknown.findings] == [("coefficient", ("2.bias",))]


def clip_but_the_last(model):
    norm = get_total_norm(gradients(model))
    for g in gradients(model)[:-1]:
        g.mul_(0.5 / norm)
    return norm


def test_a_clip_before_the_loss_scale_is_taken_off():
    """Fact 15."""
    model = model_with_gradients()
    scaled(model, 1024.0)
    audit = gg.audit_norm(model, lambda: clip_grad_norm_(model.parameters(), 0.5), max_norm=0.5, loss_scale=1024.0)
    assert {f.kind for f in audit.findings} == {"coefficient", "factor"}
    assert "it is clipped before the loss scale is divided out" in str(audit)
    assert "the loss scale of 1024 is still in it" in str(audit)


@pytest.mark.parametrize(
    ("max_norm", "true", "computed", "scale", "coefficient", "words"),
    [
        (1.0, 2.0, 2.0, 1.0, 0.5, None),
        (1.0, 0.5, 0.5, 1.0, 1.0, None),
        (1.0, 2.0, 4.0, 1.0, 0.25, "it is scaled twice"),
        (1.0, 2.0, 3.0, 1.0, 1 / 3, "right for the norm that was computed"),
        (1.0, 2.0, 2.0, 8.0, 1 / 16, "before the loss scale is divided out"),
        (1.0, 2.0, 2.0, 1.0, 1.0, "never scaled"),
        (1.0, 0.5, 2.0, 1.0, 0.5, "right for the norm that was computed"),
        (1.0, 0.5, 0.5, 1.0, 2.0, "min(1, ...) is missing"),
        (1.0, 2.0, 2.0, 1.0, 2.0, "no known mistake"),
        (None, 2.0, 2.0, 1.0, 0.3, None),
    ],
)
def test_the_formula_of_coefficients(max_norm, true, computed, scale, coefficient, words):
    found = coefficient_findings([Applied("w", coefficient, 0.0, 1e-4, computed)], max_norm, true, scale)
    assert [words is not None] == [bool(found)]
    assert words is None or words in found[0].message


# Norms of 16 bits, of gradients of 32.


def of_tensors(dtype):
    return lambda m: torch.stack([g.to(dtype).norm() for g in gradients(m)]).norm().float()


def of_squares(dtype, scale=1.0):
    return lambda m: sum((g.to(dtype) * scale).square().sum() for g in gradients(m)).float().sqrt() / scale


HALVES = {
    "bfloat16, each tensor": of_tensors(torch.bfloat16),
    "float16, each tensor": of_tensors(torch.float16),
    "float16, squares": of_squares(torch.float16),
    "bfloat16, squares": of_squares(torch.bfloat16),
    "float16, scaled squares": of_squares(torch.float16, 0.5),
    "the last step alone": lambda m: get_total_norm(gradients(m)).bfloat16(),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_norm_of_16_bits_is_judged_by_its_values(name):
    for seed in range(2):
        torch.manual_seed(seed)
        model = model_with_gradients()
        norm = HALVES[name]
        audit = gg.audit_norm(model, lambda m=model, n=norm: n(m))
        assert audit, str(audit)
        assert abs(audit.norm / audit.true_norm - 1) < 5e-5 or "is computed in 16 bits" in str(audit)
        wrong = gg.audit_norm(model, lambda m=model, n=norm: 2 * n(m))
        assert "gradients doubled" in str(wrong), str(wrong)
        forgets = gg.audit_norm(model, lambda m=model, n=norm: n(m[2]))
        left_out = {name for f in forgets.findings if f.kind == "factor" for name in f.names}
        assert left_out == {"0.weight", "0.bias", "1.weight", "1.bias"}, str(forgets)


def test_a_clip_by_a_norm_of_16_bits_has_the_coefficient_of_it():
    model = model_with_gradients()

    def clip():
        norm = HALVES["bfloat16, each tensor"](model)
        for g in gradients(model):
            g.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        return norm

    assert gg.audit_norm(model, clip, max_norm=0.5)


def test_one_part_in_a_thousand_of_a_norm_of_32_bits_is_no_rounding():
    model = model_with_gradients()
    audit = gg.audit_norm(model, lambda: 1.001 * get_total_norm(gradients(model)))
    assert [f.kind for f in audit.findings] == ["factor"]
    assert "16 bits" not in str(audit)


def test_a_reported_number_of_16_bits_is_compared_as_one():
    model = model_with_gradients()
    true = gg.audit_norm(model).true_norm
    assert gg.audit_norm(model, reported=float(torch.tensor(true, dtype=torch.bfloat16)))
    assert not gg.audit_norm(model, reported=true * 1.002)
    assert not gg.audit_norm(model, reported=float(torch.tensor(true * 1.05, dtype=torch.bfloat16)))


def test_a_norm_that_is_not_finite_is_a_finding():
    """Squares of 200 times what a probe fills leave float16: a bare assertion failed."""
    model = model_with_gradients()
    audit = gg.audit_norm(model, lambda: of_squares(torch.float16, 200.0)(model))
    assert audit.verdict == "FAIL"
    assert ": the norm is not finite for finite gradients" in str(audit.findings[0])


def test_what_is_wrong_with_the_norm_stands_before_the_coefficients_that_follow():
    model = model_with_gradients()

    def clip():
        norm = get_total_norm(gradients(model)[:2])
        for g in gradients(model):
            g.mul_(min(1.0, 0.1 / float(norm + 1e-6)))
        return norm

    assert [f.kind for f in gg.audit_norm(model, clip, max_norm=0.1).findings] == ["factor", "coefficient"]


def reported(model, factor, **settings):
    return gg.audit_norm(model, reported=gg.audit_norm(model, **settings).true_norm * factor, **settings)


def test_reports():
    model = model_with_gradients()
    assert reported(model, 1.0)
    assert "as if divided by the 5 micro-batches" in str(reported(model, 1 / 5, accumulation=5))
    assert "as if multiplied by the loss scale" in str(reported(model, 64.0, loss_scale=64.0))
    lost = reported(model, 0.77)
    assert [f.kind for f in lost.findings] == ["reported", "unfit"]
    assert lost.findings[0].factor == pytest.approx(0.77)


def test_a_report_alone_says_what_it_does_not_see():
    """Of two tensors with equal squares one could count twice and the other not at all."""
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 3.0])
    audit = gg.audit_norm(model, reported=math.sqrt(2 * 9.0))  # of the weight twice
    assert audit
    assert "errors that cancel in it are not found" in str(audit)
    assert gg.audit_norm(model, lambda: model.weight.grad.norm() * math.sqrt(2)).verdict == "FAIL"


def brute_force(squares, square, known):
    """The slow twin of `fit`: recursion over classes, with the square that is left."""
    if not known:
        return [()] if abs(square) <= 1e-9 else []
    return [(*rest, m) for m in known[-1] for rest in brute_force(squares[:-1], square - m * squares[-1], known[:-1])]


def test_the_fit_is_that_of_its_slow_twin():
    generator = torch.Generator().manual_seed(1)
    unique = 0
    for _ in range(60):
        row = torch.randint(1, 9, (3,), generator=generator).double().tolist()
        known = [[0.0, 1.0, 2.0, 4.0]] * 3
        counts = [known[0][k] for k in torch.randint(0, 4, (3,), generator=generator).tolist()]
        square = sum(m * s for m, s in zip(counts, row, strict=True))
        found = fit(row, math.sqrt(square), known, 1e-9)
        assert tuple(counts) in found
        assert sorted(found) == sorted(brute_force(row, square, known))
        unique += len(found) == 1
    assert unique > 10


def test_a_report_of_more_classes_than_can_be_tried_is_open_about_it():
    """Tensors under one name, two, three ... are classes of their own."""
    model = nn.Module()
    for names in range(1, 8):
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.full((3,), float(names))
        for name in range(names):
            model.register_parameter(f"w{names}_{name}", weight)
    audit = gg.audit_norm(model, reported=7.0, accumulation=5, loss_scale=3.0)
    assert [f.kind for f in audit.findings] == ["reported", "unfit"]
    assert "its 7 classes have too many known factors to try" in str(audit)


def test_a_factor_has_a_name_only_where_it_is_one():
    known = candidates(Setting(8, accumulation=4), copies=2, parts=4)
    assert named(2.0, known, 1e-4) == (2.0, "once on each of the 2 processes that hold it or twice")
    assert named(1.7, known, 1e-4) == (1.7, "")
    assert named(2.0, {2.0: ["a"], 2.00001: ["b"]}, 1e-4) == (2.0, "")


REFUSED = {
    "no gradient": (lambda m: m.zero_grad(), {}, UnsupportedGradientError, "no parameter has a gradient"),
    "not finite": (lambda m: scaled(m, math.inf), {}, UnsupportedGradientError, "0.weight is not finite"),
    "shares memory": (lambda m: setattr(m[0].bias, "grad", torch.ones(()).expand(8)), {}, UnsupportedGradientError,
                      "0.bias share memory"),
    "sparse": (lambda m: setattr(m[0].weight, "grad", torch.ones(8, 6).to_sparse()), {}, UnsupportedGradientError,
               "0.weight is sparse"),
    "a number": (lambda m: None, {"norm": 1.0}, InvalidTypeError, "a number goes to reported="),
    "no number": (lambda m: None, {"norm": lambda: "much"}, InvalidTypeError, r"the result of norm\(\) is str"),
    "nothing": (lambda m: None, {"norm": lambda: None}, InvalidTypeError, r"norm\(\) returned None"),
    "groups": (lambda m: None, {"groups": {"*": "split"}}, InvalidValueError, "'sharded' or 'replicated'"),
    "max_norm": (lambda m: None, {"norm": float, "max_norm": -1.0}, InvalidValueError, "max_norm is -1.0"),
    "alone": (lambda m: None, {"max_norm": 1.0}, InvalidValueError, "max_norm is given without norm"),
    "scale": (lambda m: None, {"loss_scale": 0.0}, InvalidValueError, "loss_scale is 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    change, arguments, error, words = REFUSED[case]
    model = model_with_gradients()
    change(model)
    with pytest.raises(error, match=words):
        gg.audit_norm(model, **arguments)


def test_what_is_no_module_is_refused():
    with pytest.raises(InvalidTypeError, match=r"model is Parameter: expected a torch\.nn\.Module"):
        gg.audit_norm(nn.Linear(2, 2).parameters())


def test_a_norm_that_reads_something_else_is_not_called_right():
    model = model_with_gradients()
    true = gg.audit_norm(model).true_norm
    same = gg.audit_norm(model, lambda: true)
    assert (same.verdict, [f.kind for f in same.findings]) == ("INCONCLUSIVE", ["unread"])
    other = gg.audit_norm(model, lambda: 2 * true + 0.1)
    assert other.verdict == "FAIL"


def test_a_norm_of_another_order_fails():
    model = model_with_gradients()
    for order in (1.0, math.inf):
        assert gg.audit_norm(model, lambda order=order: get_total_norm(gradients(model), order)).verdict == "FAIL"


def test_one_gradient_under_two_parameters_counts_twice():
    """Fact 5."""
    model = model_with_gradients()
    model[2].bias = nn.Parameter(torch.zeros(8))
    model[2].bias.grad = model[0].bias.grad
    audit = gg.audit_norm(model, lambda: get_total_norm(gradients(model)))
    assert [(f.names, f.factor) for f in audit.findings] == [(("0.bias = 2.bias",), pytest.approx(2.0))]
    assert gg.audit_norm(model, lambda: gg.get_total_norm(gradients(model)))


def test_an_audit_as_json():
    audit = gg.audit_norm(model_with_gradients())
    assert audit.as_dict()["verdict"] == "PASS"
    assert audit.as_dict()["classes"][0]["layout"] == "held whole by one process"


# Epsilons: known where the norm can be called, and of a reported norm perhaps a fault.


def of_norm(true):
    model = nn.Linear(4, 4)
    for p in model.parameters():
        p.grad = torch.full_like(p, true / 20**0.5)
    return model


REPORTED = {
    "right": (lambda t: t, "PASS"),
    "twice": (lambda t: 2 * t, "FAIL"),
    "half": (lambda t: t / 2, "FAIL"),
    "a percent more": (lambda t: 1.01 * t, "FAIL"),
    "a little less": (lambda t: t - min(1e-8, t / 2), "FAIL"),
    "zero": (lambda t: 0.0, "FAIL"),
    "NaN": (lambda t: math.nan, "FAIL"),
    "infinity": (lambda t: math.inf, "FAIL"),
    "an epsilon beside": (lambda t: t + 1e-6, "INCONCLUSIVE"),
    "an epsilon in the root": (lambda t: math.hypot(t, 1e-6), "INCONCLUSIVE"),
    "an epsilon below": (lambda t: max(t, 1e-6), "INCONCLUSIVE"),
}


@pytest.mark.parametrize("true", [4.5e-5, 4.5e-7, 9.1e-12])
@pytest.mark.parametrize("how", REPORTED)
def test_a_small_norm_that_is_reported(how, true):
    report, verdict = REPORTED[how]
    came, small = report(true), true * (1 + 1e-4) > report(true) >= true * (1 - 1e-4)
    audit = gg.audit_norm(of_norm(true), reported=came)
    if how == "a little less":
        small = abs(came / true - 1) <= 1e-4
    assert audit.verdict == ("PASS" if small else verdict), str(audit)
    assert "disagree" not in str(audit)


def test_a_small_norm_with_the_loss_scale_still_in_it():
    assert gg.audit_norm(of_norm(4.5e-7), reported=4.5e-7, loss_scale=1024.0).verdict == "FAIL"


@pytest.mark.parametrize("true", [9.0, 4.5e-5, 4.5e-7, 9.1e-12])
@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        (lambda n: n + 1e-6, "PASS"),
        (lambda n: n.clamp(min=1e-6), "PASS"),
        (lambda n: (n.square() + 1e-12).sqrt(), "PASS"),
        (lambda n: 2 * n, "FAIL"),
        (lambda n: 1.001 * n + 1e-6, "FAIL"),
        (lambda n: 2 * n.clamp(min=1e-6), "FAIL"),
        (lambda n: 0 * n + 1e-6, "FAIL"),
        (lambda n: n + 1.0, "FAIL"),
    ],
)
def test_an_epsilon_of_a_norm_that_can_be_called_is_known(changed, verdict, true):
    model = of_norm(true)
    audit = gg.audit_norm(model, lambda: changed(get_total_norm(gradients(model))))
    assert audit.verdict == verdict, str(audit)
    assert verdict == "FAIL" or "it adds an epsilon" in str(audit)


@pytest.mark.parametrize("factor", [1.001, 3.0])
def test_one_factor_on_all_tensors_is_one_finding(factor):
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(60))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    (found,) = gg.audit_norm(model, lambda: factor * get_total_norm(gradients(model))).findings
    assert (found.kind, len(found.names)) == ("factor", 120)
    assert found.factor == pytest.approx(factor**2, rel=1e-4)


def test_a_pattern_of_groups_that_no_parameter_has_is_an_error():
    with pytest.raises(InvalidValueError, match=r"groups: \['nosuch\.\*'\] matches no parameter with a gradient"):
        gg.audit_norm(of_norm(1.0), groups={"nosuch.*": "sharded", "weight": "sharded"})


CLAIMS = {
    "experts": (["e.0.w", "e.1.w", "e.10.w"], ["router"], None, {"e.*.w": "sharded"}),
    "some of them": (["e.0.w", "e.1.w"], ["e.2.w"], None, {"e.0.w": "sharded", "e.1.w": "sharded"}),
    "numbers in words": (["e.0.w1", "e.1.w1"], ["e.0.w2"], None, {"e.*.w1": "sharded"}),
    "a number at the ends": (["0.0", "1.0"], ["0.0.0"], None, {"0.0": "sharded", "1.0": "sharded"}),
    "signs of patterns": (["a[0]*?", "b"], ["a0xx"], None, {"a[[]0][*][?]": "sharded", "b": "sharded"}),
    "a tied tensor": (["a = b"], ["c"], None, {"a": "sharded", "b": "sharded"}),
    "said before": (["e.0.w", "e.0.b"], ["r"], {"*.w": "replicated", "r": "sharded"},
                    {"*.w": "replicated", "r": "sharded", "e.*.b": "sharded"}),
    "said of all": (["e.0.w"], ["r"], {"e*": "replicated"}, None),
    "nothing": ([], ["r"], {"r": "sharded"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "others", "groups", "claims"), CLAIMS.values(), ids=CLAIMS)
def test_claims_of_just_these_tensors(wanted, others, groups, claims):
    tensors = [Tensor(tuple(names.split(" = ")), []) for names in (*wanted, *others)]
    assert with_claims(groups, tensors[: len(wanted)], tensors) == claims


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(200))
def test_claims_match_all_that_is_wanted_and_nothing_else(seed):
    """Of random names, by what `audit_norm` makes of patterns, one tensor after another."""
    draw = random.Random(seed)
    names = {".".join(draw.choices(["0", "1", "12", "w", "w1", "[0]", "*"], k=draw.randint(1, 3))) for _ in range(12)}
    tensors = [Tensor((name,), []) for name in sorted(names)]
    wanted = draw.sample(tensors, draw.randint(1, len(tensors)))
    claims = with_claims(None, wanted, tensors)
    check_groups(claims, tensors)
    matched = {t.names for t in tensors if any(fnmatchcase(t.names[0], pattern) for pattern in claims)}
    assert matched == {t.names for t in wanted}


def test_patterns_that_say_the_same_twice_are_no_error():
    assert gg.audit_norm(of_norm(1.0), groups={"weight": "sharded", "w*": "sharded"})
    with pytest.raises(InvalidValueError, match=r"'weight' is 'sharded' and 'w\*' is 'replicated', and weight matches"):
        gg.audit_norm(of_norm(1.0), groups={"weight": "sharded", "w*": "replicated"})


def test_factors_that_do_not_make_the_real_norm_have_no_reason():
    model = model_with_gradients()
    norms = iter([5.0])
    audit = gg.audit_norm(model, lambda: next(norms, 2 * get_total_norm(gradients(model))))
    assert {f.kind for f in audit.findings} == {"factor", "total"}
    assert "doubled" not in str(audit)


def test_no_class_explains_a_norm_of_nothing():
    assert fit([], 1.0, [], 1e-6) == []

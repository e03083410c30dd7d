"""Verdicts on gradients that are given: each fault is named, with its factor; what is healthy passes."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from gradguard.errors import RecordError
from gradguard.parity.compare import compare, facts_of
from gradguard.parity.judge import MeasuredGradient, bar_of, in_ranges, least_squares, name_of_factor, norm
from gradguard.parity.saved import read, write
from parity.runs import drawn, rounded, saved

SHAPES = {"embed": (50, 8), "norm": (8,), "up": (8, 32), "down": (32, 8), "bias": (1,)}
GRADIENTS = {name: drawn(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
FACTS = {"world size": 4.0, "micro-batches": 8.0, "loss scale": 65536.0}


def run(change=None, bar=1e-6, seed=1, **about):
    """A run like the reference but for rounding, and for what ``change`` says of some parameters."""
    gradients = {name: rounded(g, bar, 10_000 * seed + i) for i, (name, g) in enumerate(GRADIENTS.items())}
    for name, new in (change or {}).items():
        gradients[name] = new(gradients[name]) if callable(new) else new
    return saved(gradients, bar=bar, seed=seed, facts=FACTS, **about)


def only(report):
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize("seed", range(1, 30))
@pytest.mark.parametrize("bar", [1e-7, 1e-3, 0.1])
def test_what_differs_by_rounding_passes(seed, bar):
    report = compare(run(bar=bar, seed=0), run(bar=bar, seed=seed))
    assert report.verdict == "PASS", str(report)
    assert 0 < report.largest < 3


@pytest.mark.parametrize(("times", "verdict"), [(2, "PASS"), (5, "FAIL")])
def test_three_bars_are_the_limit(times, verdict):
    def off(g):
        return g + times * 1.3e-6 * g.norm() * drawn((8, 32), 4) / 16

    assert compare(saved(GRADIENTS), saved(GRADIENTS | {"up": off(GRADIENTS["up"])}, seed=3)).verdict == verdict


def test_the_bar_of_few_elements_is_wider():
    def measured(shape):
        return MeasuredGradient(shape, 0.0, [1.0] * 32, [[1.001] * 32])

    assert bar_of(measured(())) == pytest.approx(5e-3)
    assert bar_of(measured((4,))) == pytest.approx(2e-3)
    assert bar_of(measured((100, 400))) == pytest.approx(1.0001e-3)


def test_single_numbers_raise_no_false_alarm():
    many = {str(i): drawn((), i) for i in range(300)}
    report = compare(saved(many), saved({n: rounded(g, 1e-6, 500_000 + int(n)) for n, g in many.items()}, seed=700))
    assert report.verdict == "PASS", str(report)


FACTORS = [
    (4.0, "world size"),
    (0.25, "1 / world size"),
    (2.0, "√ world size or counted twice"),
    (8.0, "micro-batches"),
    (1 / 8, "1 / micro-batches"),
    (math.sqrt(8), "√ micro-batches"),
    (65536.0, "loss scale"),
    (1 / 65536, "1 / loss scale"),
    (-1.0, "the sign"),
    (1.00001, ""),
    (3.0, ""),
]


@pytest.mark.parametrize(("factor", "name"), FACTORS)
@pytest.mark.parametrize("which", [("up", "down"), ("embed",), tuple(SHAPES)], ids=["two", "one", "all"])
def test_a_factor_is_one_finding_with_its_name(factor, name, which):
    report = compare(run(bar=1e-7), run({n: lambda g: factor * g for n in which}, bar=1e-7, seed=2))
    assert report.verdict == "FAIL"
    of_factor = [f for f in report.findings if f.kind == "factor"]
    assert len(of_factor) == 1
    assert set(of_factor[0].parameters) == set(which)
    assert of_factor[0].factor_name == name
    assert abs(of_factor[0].factor - factor) <= of_factor[0].factor_bar <= 1e-5 * abs(factor)
    flagged = {p for f in report.findings for p in f.parameters}
    assert flagged <= set(which)
    if abs(factor - 1) > 0.01:
        assert flagged == set(which)


def test_two_factors_are_two_findings():
    report = compare(run(), run({"up": lambda g: 4 * g, "down": lambda g: g / 8, "embed": lambda g: 4 * g}, seed=2))
    assert [(f.factor_name, set(f.parameters)) for f in report.findings] == [
        ("world size", {"up", "embed"}),
        ("1 / micro-batches", {"down"}),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_number_has_the_factor_of_others_or_is_different(shape):
    right = {**GRADIENTS, "gain": drawn(shape, 50), "other gain": drawn(shape, 51)}

    def report(**times):
        wrong = {
            n: times.get(n.replace(" ", "_"), 1.0) * rounded(g, 1e-6, 60 + i) for i, (n, g) in enumerate(right.items())
        }
        return compare(saved(right, facts=FACTS), saved(wrong, seed=2, facts=FACTS))

    shared = report(up=0.5, down=0.5, embed=0.5, gain=0.5)
    assert (only(shared).kind, only(shared).factor_name) == ("factor", "1 / √ world size or half")
    assert set(only(shared).parameters) == {"up", "down", "embed", "gain"}
    assert {o.name for o in shared.parameters if o.kind == "factor"} == set(only(shared).parameters)

    alone = report(gain=0.25)
    assert (alone.verdict, only(alone).kind, only(alone).factor) == ("FAIL", "different", None)
    assert re.match(r"different; × 0\.25\d* ± .*e-0\d \(1 / world size\) if it is a factor", only(alone).message)

    both = report(gain=0.25, other_gain=0.25)
    assert "× 0.25" in only(both).message
    assert set(only(both).parameters) == {"gain", "other gain"}
    assert only(report(gain=0.25, other_gain=0.3)).message == "different, and no factor"
    assert "(" not in only(report(gain=0.37)).message

    beside = report(up=0.5, gain=0.37)
    assert [(f.kind, f.parameters) for f in beside.findings] == [("factor", ("up",)), ("different", ("gain",))]


@pytest.mark.parametrize(("bar", "is_named"), [(1e-6, True), (1e-3, False)])
def test_one_number_has_a_name_only_if_it_is_known_well(bar, is_named):
    wrong = saved(GRADIENTS | {"bias": 0.25 * GRADIENTS["bias"]}, bar=bar, seed=2, facts=FACTS)
    finding = only(compare(saved(GRADIENTS, bar=bar, facts=FACTS), wrong))
    assert finding.message.startswith("different; × 0.2")
    assert ("1 / world size" in finding.message) == is_named


def test_numbers_of_chance_have_the_factor_of_nobody():
    """200 pairs of numbers without any relation, beside a factor that is there."""
    right = {**GRADIENTS, **{str(i): drawn((), 1_000 + i) for i in range(60)}}
    wrong = {n: g * 0.5 if n in GRADIENTS else drawn((), 2_000 + int(n)) for n, g in right.items()}
    report = compare(saved(right), saved(wrong, seed=2))
    (factor,) = [f for f in report.findings if f.kind == "factor"]
    assert set(factor.parameters) == set(GRADIENTS)
    named = [o.name for o in report.parameters if o.name not in GRADIENTS and o.factor_name]
    assert not named


@pytest.mark.parametrize(("shape", "bar"), [((2,), 0.02), ((3,), 0.05)], ids=str)
def test_few_numbers_with_wide_bars_are_no_factor_by_chance(shape, bar):
    """Other dropout masks in bfloat16: some pairs of vectors point in one direction, and that is no fault."""
    right = {str(i): drawn(shape, i) for i in range(80)}
    wrong = {n: drawn(shape, 5_000 + int(n)) for n in right}
    report = compare(saved(right, bar=bar, random=True), saved(wrong, bar=bar, seed=700, random=True))
    assert any(math.isfinite(o.factor) for o in report.parameters)  # so that the test can fail
    assert {o.kind for o in report.parameters} <= {"equal", "blind", "different"}
    assert report.verdict == "INCONCLUSIVE"


def one_sided(saved_run, most):
    return replace(saved_run, parameters=tuple(replace(p, one_sided=most) for p in saved_run.parameters))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda g: g + 5e-5 * g.norm() * drawn((8, 32), 4) / 16, "INCONCLUSIVE"),
        (lambda g: g * (1 + 5e-5), "INCONCLUSIVE"),
        (lambda g: g + 5e-4 * g.norm() * drawn((8, 32), 4) / 16, "FAIL"),
        (lambda g: g * (1 + 5e-4), "FAIL"),
        (lambda g: g * 0, "FAIL"),
        (lambda g: g, "PASS"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_what_may_be_rounded_to_one_side_is_said_so(change, verdict, side):
    runs = [run(), run({"up": change}, seed=2)]
    assert compare(*runs).verdict == verdict.replace("INCONCLUSIVE", "FAIL")
    runs[side] = one_sided(runs[side], 1e-4)
    report = compare(*runs)
    assert report.verdict == verdict, str(report)
    assert verdict != "INCONCLUSIVE" or "compare with fewer" in only(report).message


def test_a_factor_that_two_names_fit_has_none():
    assert name_of_factor(4.0, 0.3, {"world size": 4.0, "tokens": 4.1}) == ""
    assert name_of_factor(4.0, 0.01, {"world size": 4.0, "tokens": 4.1}) == "world size"
    assert name_of_factor(4.0, 0.01, {"world size": 4.0, "accumulation": 4.0}) == "world size or accumulation"
    assert name_of_factor(4.0, 0.5, {"world size": 4.0}) == ""  # known too badly
    assert name_of_factor(1.0, 1e-9, {"world size": 1.0}) == ""
    assert [name_of_factor(f, 0.399, {"world size": f}) for f in (4.0, 3.9)] == ["world size", ""]  # to a tenth


OTHERS = {
    "missing": ({"up": None}, "missing"),
    "dead": ({"up": torch.zeros(8, 32, dtype=torch.float64)}, "dead"),
    "other shape": ({"up": drawn((8, 31), 5)}, "shape"),
    "NaN": ({"up": lambda g: g * math.nan}, "nonfinite"),
    "infinity": ({"up": lambda g: g * math.inf}, "nonfinite"),
    "other numbers": ({"up": drawn((8, 32), 77)}, "different"),
    "some lost": ({"up": lambda g: g * (torch.arange(8) < 4)[:, None]}, "different"),
    "one element": ({"up": lambda g: g + 1e-3 * (torch.arange(256) == 9).view(8, 32)}, "different"),
    "transposed": ({"up": lambda g: g.T.reshape(8, 32)}, "different"),
    "almost nothing is left": ({"up": drawn((8, 32), 77) * 1e-9}, "different"),
}


@pytest.mark.parametrize(("change", "kind"), OTHERS.values(), ids=OTHERS)
def test_other_faults_are_named(change, kind):
    report = compare(run(), run(change, seed=2))
    assert (report.verdict, only(report).kind, only(report).parameters) == ("FAIL", kind, ("up",))
    back = compare(run(change, seed=2), run())  # and the other way round
    assert (back.verdict, only(back).kind) == ("FAIL", "extra" if kind == "missing" else kind)


def test_a_parameter_that_one_run_has_alone():
    new = saved({**GRADIENTS, "more": drawn((4,), 1)})
    assert (only(compare(run(), new)).kind, only(compare(new, run())).kind) == ("extra", "missing")


def test_wrong_rows_are_told():
    def shard_lost(g):
        return g * ((torch.arange(50) < 12) | (torch.arange(50) >= 25))[:, None]

    report = compare(run(rows=["embed"]), run({"embed": shard_lost}, seed=2, rows=["embed"]))
    assert only(report).message == "rows 12–24 of 50"
    assert in_ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    without = compare(run(), run({"embed": shard_lost}, seed=2))
    assert only(without).kind == "different"
    assert "rows=" in str(without)


def test_the_weights_of_micro_batches_are_told():
    parts = {
        f"micro-batch {j}": {n: drawn(s, 100 + 10 * j + i) for i, (n, s) in enumerate(SHAPES.items())} for j in range(4)
    }
    tokens = [17, 5, 3, 8]
    by_token = {n: sum(t * p[n] for t, p in zip(tokens, parts.values(), strict=True)) / 33 for n in SHAPES}
    means = {n: sum(p[n] for p in parts.values()) / 4 for n in SHAPES}
    last = {n: parts["micro-batch 3"][n] * 8 / 33 for n in SHAPES}
    reference = saved(by_token, parts=parts)
    finding = compare(reference, saved(means, seed=2)).findings[0]
    assert (finding.kind, set(finding.parameters)) == ("mixture", set(SHAPES) - {"bias"})
    assert finding.message == "it is " + " + ".join(f"0.25 × micro-batch {j}" for j in range(4))
    finding = compare(reference, saved(last, seed=2)).findings[0]
    assert finding.message == f"only {8 / 33:.4g} × micro-batch 3 is left"


def test_parts_that_are_nearly_one_are_not_told_apart():
    parts = {"a": GRADIENTS, "b": {n: g * (1 + 1e-9) for n, g in GRADIENTS.items()}}
    report = compare(run(parts=parts), run({"up": drawn((8, 32), 5)}, seed=2))
    assert only(report).kind == "different"
    near = {n: rounded(g, 1e-3, i) for i, (n, g) in enumerate(GRADIENTS.items())}
    parts, new = {"a": GRADIENTS, "b": near}, saved({"up": GRADIENTS["up"]}, bar=1e-3)
    fits = compare(saved({"up": drawn((8, 32), 5)}, bar=1e-3, parts=parts), new)
    assert only(fits).kind == "different"  # a mixture of both, of which the weights cannot be told


@pytest.mark.parametrize(("bar", "kind"), [(0.02, "mixture"), (0.12, "different")])
def test_the_weights_of_a_mixture_are_told_where_they_are_known_to_a_tenth(bar, kind):
    parts = {"a": {"up": drawn((8, 32), 5)}, "b": {"up": drawn((8, 32), 6)}}
    of = {"up": 0.5 * parts["a"]["up"] + 0.5 * parts["b"]["up"]}
    lost = {"up": rounded(1.5 * parts["a"]["up"], 1e-9, 3)}
    finding = only(compare(saved(of, bar=bar, parts=parts), saved(lost, bar=bar, seed=2)))
    assert finding.kind == kind


def test_what_is_no_mixture_is_different():
    parts = {"a": GRADIENTS, "b": {n: drawn(s, 300 + i) for i, (n, s) in enumerate(SHAPES.items())}}
    report = compare(run(parts=parts), run({"up": drawn((8, 32), 5)}, seed=2))
    assert only(report).kind == "different"


def test_parts_that_are_one_have_no_weights():
    assert least_squares([[1.0, 0.0], [1.0, 0.0]], [1.0, 1.0]) is None


@pytest.mark.parametrize(("scale", "said"), [(1 / 4, "sum"), (1.0, "mean"), (3.0, "")])
def test_ranks_that_differ_are_told_with_what_is_missing(scale, said):
    apart = {n: torch.zeros_like(g) for n, g in GRADIENTS.items()} | {"norm": drawn((8,), 3)}
    new = run({"norm": lambda g: scale * g}, seed=2, contrasts=apart, copies=4)
    finding = only(compare(run(), new))
    assert (finding.kind, finding.parameters) == ("ranks", ("norm",))
    words = f"a {said} over 4 ranks is missing in the new run: the {said} of its copies is right"
    assert finding.message == (words if said else "ranks hold different copies in the new run")


def test_what_follows_from_a_missing_sum_stands_behind_it():
    """A tensor-parallel layer whose backward is not added up: all that lies before it differs."""
    others = {f"layer {i}": drawn((8, 4), 600 + i) for i in range(17)}
    apart = {n: drawn(g.shape, 3) if n in ("norm", "layer 3") else 0 * g for n, g in {**GRADIENTS, **others}.items()}
    wrong = {n: drawn(g.shape, 700 + i) for i, (n, g) in enumerate(others.items())}
    new = {**GRADIENTS, **wrong, "norm": GRADIENTS["norm"] / 4}
    report = compare(saved({**GRADIENTS, **others}), saved(new, seed=2, contrasts=apart, copies=4))
    assert [(f.kind, len(f.parameters)) for f in report.findings] == [("ranks", 1), ("ranks", 1), ("different", 16)]
    assert report.findings[0].parameters == ("norm",)
    assert "a sum over 4 ranks is missing" in report.findings[0].message
    assert report.findings[2].message == "16 that may follow from it (different, and no factor)"


def test_what_explains_stands_first():
    change = {"embed": drawn((50, 8), 5), "down": drawn((32, 8), 6), "up": lambda g: 4 * g, "norm": None}
    kinds = [f.kind for f in compare(run(), run(change, seed=2)).findings]
    assert kinds == ["missing", "factor", "different"]


# What nobody can tell is said.


def test_without_bars_a_difference_is_unknown_and_none_passes():
    bare = saved(GRADIENTS, runs=0)
    assert compare(bare, bare).verdict == "PASS"
    report = compare(bare, saved({n: rounded(g, 1e-5, 3) for n, g in GRADIENTS.items()}, runs=0))
    assert (report.verdict, only(report).kind) == ("INCONCLUSIVE", "unknown")


def coarse(seed=2, change=None, off=3e-3, epsilon=2.0**-7, **about):
    """A healthy run in bfloat16 of which nobody has measured the bars, but for what ``change`` says."""
    gradients = {name: rounded(g, off, 40_000 + i) for i, (name, g) in enumerate(GRADIENTS.items())}
    for name, new in (change or {}).items():
        gradients[name] = new(gradients[name]) if callable(new) else new
    return replace(saved(gradients, seed=seed, runs=0, facts=FACTS, **about), epsilon=epsilon)


ONE_IS_COARSE = {
    "nothing": ({}, "INCONCLUSIVE", "unknown"),
    "other numbers": ({"up": drawn((8, 32), 77)}, "INCONCLUSIVE", "unknown"),
    "dead": ({"up": torch.zeros(8, 32, dtype=torch.float64)}, "INCONCLUSIVE", "unknown"),
    "a factor near 1": ({"up": lambda g: 1.01 * GRADIENTS["up"]}, "INCONCLUSIVE", "unknown"),
    "a factor of one number": ({"bias": lambda g: 4 * g}, "INCONCLUSIVE", "unknown"),
    "a factor": ({"up": lambda g: 4 * g}, "FAIL", "factor"),
    "missing": ({"up": None}, "FAIL", "missing"),
    "shape": ({"up": drawn((8, 31), 5)}, "FAIL", "shape"),
    "NaN": ({"up": lambda g: g * math.nan}, "FAIL", "nonfinite"),
}


@pytest.mark.parametrize(("change", "verdict", "kind"), ONE_IS_COARSE.values(), ids=ONE_IS_COARSE)
@pytest.mark.parametrize("new_is_coarse", [True, False])
def test_bars_of_a_finer_dtype_are_not_those_of_a_coarser_one(change, verdict, kind, new_is_coarse):
    """And of the measured finer one rows and parts are known, which are no verdict either."""
    about = {"rows": ["embed"], "parts": {"micro-batch 0": {n: drawn(s, 900) for n, s in SHAPES.items()}}}
    pair = [run(**about), coarse(change=change, **about)]
    report = compare(*(pair if new_is_coarse else pair[::-1]))
    assert report.verdict == verdict, str(report)
    kind = {"missing": "extra"}.get(kind, kind) if not new_is_coarse else kind
    assert {f.kind for f in report.findings} == {"unknown", kind}
    who = "the new run" if new_is_coarse else "the reference"
    words = (
        f"{who} computes in a coarser dtype than the one in which the bars were measured: save {who} with --perturbed 4"
    )
    assert words in str(report)
    assert "would show" not in str(report)


@pytest.mark.parametrize(
    ("epsilon", "measured", "verdict"),
    [
        (2.0**-7, 2.0**-7, "FAIL"),  # the bars are those of one dtype
        (2.0**-23, 2.0**-7, "FAIL"),  # or of a coarser one
        (2.0**-10, 2.0**-23, "INCONCLUSIVE"),
        (2.0**-23, 2.0**-52, "INCONCLUSIVE"),
        (0.125, 2.0**-7, "INCONCLUSIVE"),
    ],
)
def test_bars_are_taken_over_unless_they_are_of_a_finer_dtype(epsilon, measured, verdict):
    reference = replace(run(), epsilon=measured)
    assert compare(reference, coarse(epsilon=epsilon)).verdict == verdict
    assert compare(reference, replace(run(seed=2), epsilon=epsilon)).verdict == "PASS"  # it has bars of its own
    assert compare(reference, coarse(epsilon=epsilon, off=1e-7)).verdict == "PASS"  # equal in the finer dtype even


def test_both_files_with_bars_are_told_by_them():
    new = replace(run(bar=3e-3, seed=2), epsilon=2.0**-7)
    assert compare(run(), new).verdict == "PASS"
    wrong = replace(run({"up": drawn((8, 32), 77)}, bar=3e-3, seed=2), epsilon=2.0**-7)
    assert compare(run(), wrong).verdict == "FAIL"


@pytest.mark.parametrize("reference", [run(), coarse(seed=3)], ids=["finer bars", "no bars"])
def test_copies_that_differ_are_open_too_where_no_bar_is_known(reference):
    apart = {n: torch.zeros_like(g) for n, g in GRADIENTS.items()} | {"norm": drawn((8,), 3)}
    report = compare(reference, coarse(contrasts=apart, copies=4))
    assert report.verdict == "INCONCLUSIVE", str(report)
    assert "ranks hold different copies in the new run" in str(report)


# What nothing is known of.


def zeros(*names):
    return {n: torch.zeros(SHAPES[n], dtype=torch.float64) for n in names}


KNOWN = {
    "all": ({}, {}, "PASS", 0),
    "zero in one parameter": (zeros("up"), {}, "PASS", 1),
    "zero in two of five": (zeros("up", "norm"), {}, "PASS", 2),
    "zero in three of five": (zeros("up", "norm", "bias"), {}, "INCONCLUSIVE", 3),
    "zero in all": (zeros(*SHAPES), {}, "INCONCLUSIVE", 5),
    "no gradient": ({"up": None}, {}, "PASS", 1),
    "no gradient of any": (dict.fromkeys(SHAPES), {}, "INCONCLUSIVE", 5),
    "a bar just wide enough to see a half": ({}, {"up": 0.12}, "PASS", 0),
    "a bar that is too wide": ({}, {"up": 0.4}, "PASS", 1),
    "two bars": ({}, {"up": 0.4, "down": 0.4}, "PASS", 2),
    "three bars": ({}, {"up": 0.4, "down": 0.4, "embed": 0.4}, "INCONCLUSIVE", 3),
    "of each one": ({**zeros("norm"), "bias": None}, {"down": 0.4}, "INCONCLUSIVE", 3),
}


@pytest.mark.parametrize(("change", "bars", "verdict", "blind"), KNOWN.values(), ids=KNOWN)
def test_what_nothing_is_known_of_is_listed_and_no_pass_if_it_is_half(change, bars, verdict, blind):
    size = dict.fromkeys(SHAPES, 1e-6) | bars
    report = compare(*(saved(GRADIENTS | change, bar=size, seed=seed) for seed in (1, 2)))
    assert report.verdict == verdict, str(report)
    of_it = [o for o in report.parameters if o.kind == "blind"]
    assert {o.name for o in of_it} == {*change, *(n for n, bar in bars.items() if bar > 0.2)}
    assert len(of_it) == blind
    assert all(o.shows >= 0.5 for o in of_it)
    assert all(o.shows < 0.5 for o in report.parameters if o.kind == "equal")
    said = f"nothing is known of {blind} of 5 parameters"
    assert (said in str(report)) == (blind > 0)
    assert all(o.name in str(report) for o in of_it)
    assert bool(report.findings) == (verdict == "INCONCLUSIVE")
    assert f"{5 - blind} of 5 parameters are equal" in str(report)


@pytest.mark.parametrize("bar", [1e-6, 1e-3, 0.03])
@pytest.mark.parametrize("times", [0.7, 1.5])
def test_an_error_shows_from_the_size_on_that_is_told(bar, times):
    """Half as large again as what would show is a FAIL, and what is smaller is none."""
    reference = saved(GRADIENTS, bar=bar)
    shows = {o.name: o.shows for o in compare(reference, saved(GRADIENTS, bar=bar, seed=3)).parameters}
    for name in ("up", "down", "embed"):
        off = GRADIENTS[name] * (1 + times * shows[name])
        verdict = compare(reference, saved(GRADIENTS | {name: off}, bar=bar, seed=3)).verdict
        assert verdict == ("FAIL" if times > 1 else "PASS")


def test_what_would_show_is_in_json():
    report = compare(run(), run({"norm": torch.zeros(8, dtype=torch.float64)}, seed=2))
    told = {p["name"]: p for p in compare(run(zeros("up")), run(zeros("up"), seed=2)).as_dict()["parameters"]}
    assert (told["up"]["kind"], told["up"]["shows"]) == ("blind", None)
    assert 1e-6 < told["down"]["shows"] < 1e-4
    assert report.verdict == "FAIL"  # zero in one run alone


def test_nothing_to_compare_is_no_pass():
    report = compare(saved({}), saved({}))
    assert (report.verdict, only(report).message) == ("INCONCLUSIVE", "no run has a gradient, so nothing was compared")


def test_other_weights_leave_the_gradients_open():
    report = compare(run(), run({"up": drawn((8, 32), 7)}, seed=2, weights=drawn((4,), 6)))
    assert report.verdict == "INCONCLUSIVE"
    assert any("one checkpoint" in f.message for f in report.findings)
    missing = compare(run(), run({"up": None}, seed=2, weights=drawn((4,), 6)))
    assert missing.verdict == "FAIL"


def test_dropout_leaves_differences_open_but_not_factors():
    assert compare(run(random=True), run(seed=2, random=True)).verdict == "PASS"
    differs = compare(run(), run({"up": drawn((8, 32), 7)}, seed=2, random=True))
    assert (differs.verdict, {f.kind for f in differs.findings}) == ("INCONCLUSIVE", {"different", "random"})
    assert compare(run(), run({"up": lambda g: 4 * g}, seed=2, random=True)).verdict == "FAIL"


def test_a_run_that_is_not_equal_to_itself_hides_nothing():
    bars = dict.fromkeys(SHAPES, 1e-6) | {"up": 1.5}
    wrong = GRADIENTS | {"up": drawn((8, 32), 7)}
    report = compare(run(), saved(wrong, bar=bars, seed=3))
    assert (report.verdict, only(report).kind, only(report).parameters) == ("INCONCLUSIVE", "noisy", ("up",))
    both = compare(saved(GRADIENTS, bar=bars), saved(wrong, bar=bars, seed=3))
    assert both.verdict == "PASS"  # its true gradient is zero, say; and the report says that nothing is known of it
    assert "up" in both.notes[0]


def test_signs_of_another_version_are_refused():
    with pytest.raises(RecordError, match="save both with one"):
        compare(run(), replace(run(), hash_version=2))


# Facts, files, output.


def test_facts_of_two_runs_and_their_ratio():
    assert facts_of(run(), run()) == FACTS
    a, b = (replace(run(), facts={"world size": w}) for w in (2.0, 8.0))
    assert facts_of(a, b)["ratio of world size"] == 4
    assert facts_of(replace(run(), facts={"world size": 1.0}), b) == {"world size": 8.0}


def test_a_file_is_safetensors_and_comes_back_as_it_was(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    before = run(rows=["embed"], parts={"last step": GRADIENTS})
    write(tmp_path / "run.safetensors", before)
    after = read(tmp_path / "run.safetensors")
    assert after.parameters == before.parameters
    assert [list(map(list, r)) for r in after.sketches["gradient"]] == before.sketches["gradient"]
    assert [list(map(list, r)) for r in after.rows["embed"]] == before.rows["embed"]
    assert compare(after, run(seed=2)).as_dict() == compare(before, run(seed=2)).as_dict()
    tensors = safetensors.load_file(tmp_path / "run.safetensors")
    assert tensors["gradient"].tolist() == before.sketches["gradient"]
    assert [*tmp_path.iterdir()] == [tmp_path / "run.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b[:40],
        lambda b: b[:-8],
        lambda b: bytes([b[0] ^ 1]) + b[1:],
        lambda b: b'{"a": 1}\n' * 9,
    ],
    ids=["empty", "in the header", "at the end", "other length", "a record"],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "run.safetensors"
    write(path, run())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordError, match=r"is not what gradguard\.save_gradients writes"):
        read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecordError, match=r"cannot read .*nowhere.*No such file"):
        compare(tmp_path / "nowhere", run())


def test_json_is_strict_and_has_all():
    report = compare(run(), run({"up": lambda g: 4 * g, "norm": lambda g: g * math.nan}, seed=2))
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["verdict"] == "FAIL"
    assert {p["name"]: p["kind"] for p in told["parameters"]}["up"] == "factor"
    assert bool(report) is False


def test_the_norm_of_a_sketch_of_one_number_is_exact():
    assert norm([3.0, -3.0, 3.0, 3.0]) == pytest.approx(3.0)
    assert norm([]) == 0.0

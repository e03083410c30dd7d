"""Mutants of the detector: rules that are wrong in one place, each of which the comparison with the slow twin tells."""

import inspect
import random
import textwrap

import pytest
import torch
from spike_twins import TwinDetector
from test_spike_detector import WEIGHTS, assert_alike, noisy

import gradguard.spikes.detector as rule
from gradguard import SpikeDetector

OPTIONS = {"window": 12, "warmup": 6, "cap": 3, "recent": 8, "alone": 1}
LONE = {"window": 40, "warmup": 10, "cap": 4, "recent": 8, "alone": 20}
"""Those where a step that stands out alone is none, as it is by default."""
IN_TURN = [[1.0, 1.0]] * 10 + [[9.0, 1.0]] * 3 + [[12.0, 9.0]] * 3 + [[9.0, 9.0]] * 8 + [[90.0, 9.0]]
JUST_FAR = [[-1.0, 1.0]] * 20 + [[18.5, 1.0]]
TOO_FEW = [[1.0, 1.0]] * 16 + [[5.0, 1.0]] * 3
"""Three in a row after 16: evidence of 3 log 18 = 8.7."""
ROWS = [*(noisy(seed, 160, zeros=seed % 2 == 1) for seed in range(4)), IN_TURN]

BOTH = {
    "the constant of the MAD": ("_score", "MAD_TO_SIGMA *", "1.0 *"),
    "the constant of the jumps": ("_score", "JUMP_TO_SIGMA *", "MAD_TO_SIGMA *"),
    "at k too": ("_score", "ops.ratio(above", "1.0001 * ops.ratio(above"),
    "no floor": ("_score", "ops.where(usual.in_logarithms, self.floor, self.floor * abs(usual.middle))", "usual.jumps"),
    "the floor of values for logarithms": ("_score", "usual.in_logarithms, self.floor,", "usual.middle == 9, 0.0,"),
    "the jumps left out": ("_score", "JUMP_TO_SIGMA * usual.jumps", "0 * usual.jumps"),
    "the spread left out": ("_score", "MAD_TO_SIGMA * usual.spread", "0 * usual.spread"),
    "no weight": ("_score", "ops.where(slack > 1, slack, 1.0)", "1.0"),
    "a heavy step varies less": ("_score", "ops.where(slack > 1, slack, 1.0)", "ops.where(slack > 0, slack, 1.0)"),
    "the cap is ignored": ("_reject", "row == self.cap", "row < 0"),
    "the cap one later": ("_reject", "row == self.cap", "row == self.cap + 1"),
    "the row is not begun anew": ("_reject", "row * ~adopted", "row"),
    "the last one alone is blamed": ("_reject", "(too_high | over) & spike", "over & spike"),
    "all signals are adopted": ("_reject", "self._adopt(adopted & blamed)", "self._adopt(adopted.expand(len(values)))"),
    "blame is not forgotten": ("_reject", "blamed & ~adopted", "blamed"),
    "what is rejected is forgotten": ("_reject", "in_a_row.expand(len(values))", "0 * in_a_row.expand(len(values))"),
    "spikes enter the history": ("_judge_tensors", "known & ~spike", "known"),
    "one signal is enough for health": ("_judge_tensors", "_is_burst())).any()", "_is_burst())).all()"),
    "all are far": ("_scores", "above > far", "above > above - 1"),
    "the far ones by deviations": ("_scores", "above > far", "above / deviation > far"),
    "far is from 0": ("_scores", "(self.alone - 1) *", "self.alone *"),
    "each that stands out is a burst": ("_judge_tensors", "self._is_burst())", "scores.isfinite())"),
    "no burst": ("_judge_tensors", "is_far | self._is_burst()", "is_far"),
    "less evidence": ("_is_burst", "evidence >= BURST", "evidence >= BURST - 1"),
    "a shorter row": ("_is_burst", "min(SPAN, ", "min(3, "),
    "the usual rate without a prior": ("_is_burst", "(stood_out + 1)", "(stood_out + 1e-3)"),
    "the row is usual": ("_is_burst", "in (ORDINARY, STOOD_OUT))", "in (ORDINARY, 2)); stood_out = stood_out[0]"),
    "skipped steps are not of the row": ("_is_burst", "longest - 1] > ORDINARY", "longest - 1] == STOOD_OUT"),
    "skipped ones stay after an adoption": ("_judge_tensors", "adopted &", "(adopted & ~adopted) &"),
    "missing values are adopted": ("_adopt", "rejected < torch.inf", "rejected <= torch.inf"),
    "the count is not adopted": ("_adopt", "torch.where(chosen, known.sum(1), count)", "count.clone()"),
}  # fmt: skip
"""What is wrong: in which method, which text, and what stands there instead."""

HOST = {
    "the median of all": ("_score_on_host", "median(x[-self.recent :])", "median(x)"),
    "the spread of all": ("_score_on_host", "for one in x[-self.recent :]", "for one in x"),
    "the ring is off by one": ("_score_on_host", "ring[at:] + ring[:at]", "ring[at + 1 :] + ring[: at + 1]"),
    "the first look is late": ("_score_on_host", "min(FIRST_LOOK, self.warmup)", "self.warmup"),
    "infinite is judged": ("_score_on_host", "or not math.isfinite(value)", "or math.isnan(value)"),
    "no logarithm": ("_score_on_host", "if in_logarithms else value", "if in_logarithms and value < 1 else value"),
    "one more of warm-up": ("_take_ordinary", "count >= self.warmup", "count > self.warmup"),
    "no step is looked at closely": ("_take_ordinary", "score > self.k for", "score > 2 * self.k for"),
    "the first signal alone is looked at": ("_take_ordinary", "score in scores])", "score in scores[:1]])"),
    "a step of NaN is an ordinary one": ("_take_ordinary", "any(map(math.isfinite, values))", "True"),
    "steps of NaN alone are ordinary": ("_take_ordinary", "if any(map(", "if not any(map("),
    "the row is not ended": ("_take_ordinary", '["in_a_row"].zero_()', '["in_a_row"].add_(0)'),
    "ordinary steps are not noted": ("_take_ordinary", "[-1] = ORDINARY", "[-1] = 0"),
    "weights are forgotten": ("_take_ordinary", "if weight > 0 else", "if weight < 0 else"),
    "infinite enters the history": ("_take_ordinary", "if math.isfinite(value)", "if value == value"),
}  # fmt: skip
"""Where the scores of ordinary steps are found from plain numbers, on the CPU."""

DEVICE = {
    "two-sided": ("_judge_tensors", "over = scores > self.k", "over = scores.abs() > self.k"),
    "the median of all": ("_scores", "past[:, -self.recent :], stored.clamp(max=self.recent)", "past, stored"),
    "the ring is off by one": ("_scores", "count[:, None] + places", "count[:, None] + 1 + places"),
    "the ring is one shorter": ("_judge_tensors", "count % self.window", "count % (self.window - 1)"),
    "one more of warm-up": ("_judge_tensors", ">= self.warmup", "> self.warmup"),
    "no logarithm": ("_scores", "history.amin(1) > 0", "history.amin(1) > torch.inf"),
    "the jump to the new value is an earlier one": ("_scores", "jumps[:, -1] = torch.inf", "jumps[:, -1] = 0.0"),
    "what is not finite enters the history": ("_judge_tensors", "known & ~spike", "torch.ones_like(known) & ~spike"),
    "the first look is late": ("_scores", "min(FIRST_LOOK, self.warmup)", "self.warmup"),
    "all stand out": ("_judge_tensors", "torch.where(stands_out, STOOD_OUT, ORDINARY)", "STOOD_OUT"),
    "a step of NaN ends the row": ("_reject", "(heard, (in_a_row", "(known.any() | True, (in_a_row"),
    "steps of NaN are noted": ("_judge_tensors", "torch.where(known.any(), newer, steps)", "newer"),
    "a row that no healthy step ends": ("_reject", "(in_a_row + 1) * spike", "in_a_row + spike"),
}  # fmt: skip
"""Where ordinary steps are judged by tensors too, as on an accelerator."""

STATE = ["history", "count", "rejected", "in_a_row", "too_high", "weights", "steps"]


def mutant(method, old, new):
    """A detector of whose ``method`` the text ``old`` was replaced."""
    text = textwrap.dedent(inspect.getsource(getattr(SpikeDetector, method)))
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {method}: the table is out of date"
    found = {}
    exec(text.replace(old, new), {**vars(rule)}, found)
    return type("Mutant", (SpikeDetector,), {method: found[method]})


def tell(kind):
    """Compare with the twin over all rows; fail where they differ, or where a mutant cannot go on."""
    cases = [(OPTIONS, None, rows) for rows in ROWS] + [(LONE, WEIGHTS, rows) for rows in ROWS]
    cases += [(LONE, None, rows) for rows in (JUST_FAR, TOO_FEW)]
    for options, weights, rows in cases:
        try:
            assert_alike(kind(**options), TwinDetector(2, **options), rows, weights)
        except (AssertionError, ArithmeticError, ValueError) as error:
            raise AssertionError("not as the twin") from error


def on_device(kind):
    return type("OnDevice", (kind,), {"_judge": kind._judge_tensors})


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOTH, *HOST])
def test_each_mutant_on_the_host_is_caught(name):
    wrong = mutant(*(BOTH | HOST)[name])  # a table that is out of date is no mutant that was caught
    with pytest.raises(AssertionError, match="not as the twin"):
        tell(wrong)


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOTH, *DEVICE])
def test_each_mutant_on_the_device_is_caught(name):
    wrong = on_device(mutant(*(BOTH | DEVICE)[name]))
    with pytest.raises(AssertionError, match="not as the twin"):
        tell(wrong)


def test_the_rule_itself_passes():
    tell(SpikeDetector)
    tell(on_device(SpikeDetector))


BLAMED_BEFORE = [[1.0, 1.0]] * 10 + [[9.0, 1.0]] + [[1.0, 9.0]] * 8


def see(detector, row, step):
    return bool(detector.observe(torch.tensor(row, dtype=torch.float64), WEIGHTS[step % len(WEIGHTS)]))


def resumed(rows, cut, lost=None):
    """Run, save at ``cut``, lose one value, load and go on: what was told, and what is remembered."""
    detector, again = SpikeDetector(**OPTIONS), SpikeDetector(**OPTIONS)
    told = [see(detector, row, step) for step, row in enumerate(rows[:cut])]
    saved = detector.state_dict()
    if lost is not None:
        saved[lost] = SpikeDetector(**OPTIONS)._empty(2)[lost]
    again.load_state_dict(saved)
    told += [see(again, row, step) for step, row in enumerate(rows[cut:], cut)]
    return told, {name: tensor.tolist() for name, tensor in again.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_a_state_that_loses_one_value_is_told(name):
    """At some cut: most values are of no account at most steps."""
    assert set(STATE) == set(SpikeDetector(**OPTIONS)._empty(2))
    places = random.Random(0).sample(range(20, 150), 20)
    cuts = [(ROWS[0], at) for at in places] + [(BLAMED_BEFORE, 11)]
    assert any(resumed(*cut) != resumed(*cut, name) for cut in cuts)

"""Mutants of the detector: rules that are wrong in one place, each of which the comparison with the slow twin tells."""

import inspect
import random
import textwrap

import pytest
import torch
from spike_twins import TwinDetector
from test_spike_detector import WEIGHTS, assert_alike, noisy

import gradguard.spikes.detector as rule
from gradguard.spikes.detector import SpikeDetector

OPTIONS = {"window": 12, "warmup": 6, "cap": 3, "recent": 8, "alone": 1}
LONE = {"window": 40, "warmup": 10, "cap": 4, "recent": 8, "alone": 20}
"""Those where a step that stands out alone is none, as it is by default."""
IN_TURN = [[1.0, 1.0]] * 10 + [[9.0, 1.0]] * 3 + [[12.0, 9.0]] * 3 + [[9.0, 9.0]] * 8 + [[90.0, 9.0]]
JUST_FAR = [[-1.0, 1.0]] * 20 + [[18.5, 1.0]]
TOO_FEW = [[1.0, 1.0]] * 16 + [[5.0, 1.0]] * 3
"""Three in a row after 16: evidence of 3 log 18 = 8.7."""
ROWS = [*(noisy(seed, 160, zeros=seed % 2 == 1) for seed in range(4)), IN_TURN]

HOST = {
    "the constant of the MAD": ("_look", "MAD_TO_SIGMA *", "1.0 *"),
    "the constant of the jumps": ("_look", "JUMP_TO_SIGMA *", "MAD_TO_SIGMA *"),
    "two-sided": ("_judge_on_host", "one.score > self.k", "abs(one.score) > self.k"),
    "at k too": ("_look", "_Found(above / deviation", "_Found(1.0001 * above / deviation"),
    "no floor": ("_look", "self.floor if in_logarithms else self.floor * abs(middle)", "1e-12"),
    "the floor of values for logarithms": ("_look", "self.floor if in_logarithms else", ""),
    "the jumps left out": ("_look", "max(spread, jumps,", "max(spread,"),
    "the spread left out": ("_look", "max(spread, jumps,", "max(jumps,"),
    "the median of all": ("_look", "x[-self.recent :]", "x"),
    "one more is recent": ("_look", "x[-self.recent :]", "x[-self.recent - 1 :]"),
    "one more of warm-up": ("_look", "count >= self.warmup", "count > self.warmup"),
    "infinite is judged": ("_look", "or not math.isfinite(value)", "or math.isnan(value)"),
    "no logarithm": ("_look", "= signal.in_logarithms, signal.x", "= False, signal.past"),
    "the cap is ignored": ("_judge_on_host", "spike and row == self.cap", "False"),
    "the cap one later": ("_judge_on_host", "row == self.cap", "row == self.cap + 1"),
    "a row that no healthy step ends": ("_judge_on_host", "    row = 0\n", "    pass\n"),
    "a step of NaN ends the row": ("_judge_on_host", "elif any(map(math.isfinite, values)):", "else:"),
    "spikes enter the history": ("_judge_on_host", "elif any", "if any"),
    "all are far": ("_look", "above > far", "True"),
    "the far ones by deviations": ("_look", "above > far", "above / deviation > far"),
    "far is from 0": ("_look", "(self.alone - 1) *", "self.alone *"),
    "each that stands out is a burst": ("_judge_on_host", "self._is_burst(numbers.steps)", "True"),
    "no burst": ("_judge_on_host", "self._is_burst(numbers.steps)", "False"),
    "less evidence": ("_is_burst", ">= BURST", ">= BURST - 1"),
    "a shorter row": ("_is_burst", "min(SPAN, ", "min(3, "),
    "the usual rate without a prior": ("_is_burst", "(stood_out + 1)", "(stood_out + 1e-3)"),
    "the row counts as usual": ("_is_burst", "stood_out - (step == STOOD_OUT)", "stood_out"),
    "skipped steps are not of the row": ("_is_burst", "step <= ORDINARY", "step != STOOD_OUT"),
    "no weight": ("_look", "/ signal.slack(weight)", "/ 1.0"),
    "the first look is late": ("_look", "min(FIRST_LOOK, self.warmup)", "self.warmup"),
    "all stand out": ("_judge_on_host", "stands_out, row = any(over)", "stands_out, row = True"),
    "skipped ones stay after an adoption": ("_adopt_on_host", "== SKIPPED, ORDINARY", "== SKIPPED, SKIPPED"),
    "one signal is enough for health": ("_judge_on_host", "any(over_and_judged)", "all(over_and_judged)"),
    "what is rejected is forgotten": ("_reject_on_host", "row - 1", "0"),
    "the last one alone is blamed": ("_reject_on_host", "list(map(or_, numbers.too_high, over))", "list(over)"),
    "all signals are adopted": ("_adopt_on_host", 'state["too_high"])', 'torch.ones_like(state["too_high"]))'),
    "blame is not forgotten": ("_adopt_on_host", "fill_(False)", "fill_(True)"),
    "the count is not adopted": ("_adopt", "torch.where(chosen, known.sum(1), count)", "count.clone()"),
}  # fmt: skip
"""What is wrong: in which method, which text, and what stands there instead. On the CPU, in plain numbers."""

DEVICE = {
    "the constant of the MAD": ("_scores", "MAD_TO_SIGMA *", "1.0 *"),
    "the constant of the jumps": ("_scores", "JUMP_TO_SIGMA *", "MAD_TO_SIGMA *"),
    "two-sided": ("_judge_on_device", "over = scores > self.k", "over = scores.abs() > self.k"),
    "no floor": ("_scores", "torch.where(positive, self.floor, self.floor * middle.abs())", "middle * 0"),
    "the jumps left out": ("_scores", "torch.where(stored > 1, jumps, 0.0)", "least"),
    "the median of all": ("_scores", "past[:, -self.recent :], stored.clamp(max=self.recent)", "past, stored"),
    "the ring is off by one": ("_scores", "count[:, None] + places", "count[:, None] + 1 + places"),
    "the ring is one shorter": ("_accept", "count % self.window", "count % (self.window - 1)"),
    "one more of warm-up": ("_judge_on_device", ">= self.warmup", "> self.warmup"),
    "no logarithm": ("_scores", "history.amin(1) > 0", "history.amin(1) > torch.inf"),
    "what is not finite enters the history": ("_judge_on_device", "known & ~spike", "torch.ones_like(known) & ~spike"),
    "spikes enter the history": ("_judge_on_device", "known & ~spike", "known"),
    "one signal is enough for health": ("_judge_on_device", "on_device())).any()", "on_device())).all()"),
    "the cap is ignored": ("_reject", "row == self.cap", "row < 0"),
    "all are far": ("_scores", "above > far", "above > above - 1"),
    "far is from 0": ("_scores", "(self.alone - 1) *", "self.alone *"),
    "each that stands out is a burst": ("_judge_on_device", "self._is_burst_on_device())", "scores.isfinite())"),
    "no burst": ("_judge_on_device", "is_far | self._is_burst_on_device()", "is_far"),
    "less evidence": ("_is_burst_on_device", "evidence >= BURST", "evidence >= BURST - 1"),
    "a shorter row": ("_is_burst_on_device", "min(SPAN, ", "min(3, "),
    "the row is usual": ("_is_burst_on_device", "_after(steps == STOOD_OUT, longest)", "(steps == STOOD_OUT).sum()"),
    "skipped steps are not of the row": ("_is_burst_on_device", "longest - 1] > ORDINARY", "longest - 1] == STOOD_OUT"),
    "no weight": ("_scores", "/ self._slack(weight)", "/ 1.0"),
    "the first look is late": ("_scores", "min(FIRST_LOOK, self.warmup)", "self.warmup"),
    "all stand out": ("_judge_on_device", "torch.where(stands_out, STOOD_OUT, ORDINARY)", "STOOD_OUT"),
    "skipped ones stay after an adoption": ("_became", "adopted &", "(adopted & ~adopted) &"),
    "steps of NaN are noted": ("_became", "torch.where(is_known, newer, steps)", "newer"),
    "a step of NaN ends the row": ("_reject", "(heard, (in_a_row", "(known.any() | True, (in_a_row"),
    "a row that no healthy step ends": ("_reject", "(in_a_row + 1) * spike", "in_a_row + spike"),
    "the row is not begun anew": ("_reject", "row * ~adopted", "row"),
    "the last one alone is blamed": ("_reject", "(too_high | over) & spike", "over & spike"),
    "all signals are adopted": ("_reject", "self._adopt(adopted & blamed)", "self._adopt(adopted.expand(len(values)))"),
    "blame is not forgotten": ("_reject", "blamed & ~adopted", "blamed"),
    "missing values are adopted": ("_adopt", "rejected < torch.inf", "rejected <= torch.inf"),
    "the count is not adopted": ("_adopt", "torch.where(chosen, known.sum(1), count)", "count.clone()"),
}  # fmt: skip
"""The same as on an accelerator."""

STATE = ["history", "count", "rejected", "in_a_row", "too_high", "replaced", "replaced_count", "weights", "steps"]


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
    return type("OnDevice", (kind,), {"_judge": kind._judge_on_device})


@pytest.mark.slow
@pytest.mark.parametrize("name", HOST)
def test_each_mutant_on_the_host_is_caught(name):
    wrong = mutant(*HOST[name])  # a table that is out of date is no mutant that was caught
    with pytest.raises(AssertionError, match="not as the twin"):
        tell(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE)
def test_each_mutant_on_the_device_is_caught(name):
    wrong = on_device(mutant(*DEVICE[name]))
    with pytest.raises(AssertionError, match="not as the twin"):
        tell(wrong)


def test_the_rule_itself_passes():
    tell(SpikeDetector)
    tell(on_device(SpikeDetector))


BLAMED_BEFORE = [[1.0, 1.0]] * 10 + [[9.0, 1.0]] + [[1.0, 9.0]] * 8


def see(detector, row, step):
    return bool(detector.observe(torch.tensor(row, dtype=torch.float64), WEIGHTS[step % len(WEIGHTS)]))


def resumed(rows, cut, undo, lost=None):
    """Run, save at ``cut``, lose one value, load and go on: what was told, and what is remembered."""
    detector, again = SpikeDetector(**OPTIONS), SpikeDetector(**OPTIONS)
    told = [see(detector, row, step) for step, row in enumerate(rows[:cut])]
    saved = detector.state_dict()
    if lost is not None:
        saved[lost] = SpikeDetector(**OPTIONS)._empty(2)[lost]
    again.load_state_dict(saved)
    if undo:
        again.undo_adoption()
    told += [see(again, row, step) for step, row in enumerate(rows[cut:], cut)]
    return told, {name: tensor.tolist() for name, tensor in again.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_a_state_that_loses_one_value_is_told(name):
    """At some cut: most values are of no account at most steps."""
    assert set(STATE) == set(SpikeDetector(**OPTIONS)._empty(2))
    places = random.Random(0).sample(range(20, 150), 20)
    cuts = [(ROWS[0], at, undo) for at in places for undo in (False, True)] + [(BLAMED_BEFORE, 11, False)]
    assert any(resumed(*cut) != resumed(*cut, name) for cut in cuts)

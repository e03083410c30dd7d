"""Mutants of the detector: rules that are wrong in one place, each of which the comparison with the slow twin tells."""

import inspect
import random
import textwrap

import pytest
import torch
from spike_twins import TwinDetector
from test_spike_detector import assert_alike, noisy

import gradguard.spikes.detector as rule
from gradguard.spikes.detector import SpikeDetector

OPTIONS = {"window": 12, "warmup": 6, "cap": 3, "recent": 8}
IN_TURN = [[1.0, 1.0]] * 10 + [[9.0, 1.0]] * 3 + [[12.0, 9.0]] * 3 + [[9.0, 9.0]] * 8 + [[90.0, 9.0]]
ROWS = [*(noisy(seed, 160, zeros=seed % 2 == 1) for seed in range(4)), IN_TURN]

HOST = {
    "the constant of the MAD": ("_score", "MAD_TO_SIGMA *", "1.0 *"),
    "the constant of the jumps": ("_score", "JUMP_TO_SIGMA *", "MAD_TO_SIGMA *"),
    "two-sided": ("_judge_on_host", "score > self.k", "abs(score) > self.k"),
    "at k too": ("_score", "return (value - middle) / deviation if", "return 1.0001 * (value - middle) / deviation if"),
    "no floor": ("_score", "self.floor if in_logarithms else self.floor * abs(middle)", "1e-12"),
    "the floor of values for logarithms": ("_score", "self.floor if in_logarithms else", ""),
    "the jumps left out": ("_score", "max(spread, jumps,", "max(spread,"),
    "the spread left out": ("_score", "max(spread, jumps,", "max(jumps,"),
    "the median of all": ("_score", "x[-self.recent :]", "x"),
    "one more is recent": ("_score", "x[-self.recent :]", "x[-self.recent - 1 :]"),
    "one more of warm-up": ("_score", "< self.warmup", "<= self.warmup"),
    "infinite is judged": ("_score", "or not math.isfinite(value)", "or math.isnan(value)"),
    "no logarithm": ("_score", "= signal.in_logarithms, signal.x", "= False, signal.past"),
    "the cap is ignored": ("_judge_on_host", "spike and row == self.cap", "False"),
    "the cap one later": ("_judge_on_host", "row == self.cap", "row == self.cap + 1"),
    "a row that no healthy step ends": ("_judge_on_host", "    row = 0\n", "    pass\n"),
    "a step of NaN ends the row": ("_judge_on_host", "elif any(map(math.isfinite, values)):", "else:"),
    "spikes enter the history": ("_judge_on_host", "elif any", "if any"),
    "one signal is enough for health": ("_judge_on_host", "any(over)", "all(over)"),
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
    "two-sided": ("_judge_on_device", "scores > self.k", "scores.abs() > self.k"),
    "no floor": ("_scores", "torch.where(positive, self.floor, self.floor * middle.abs())", "middle * 0"),
    "the jumps left out": ("_scores", "torch.where(stored > 1, jumps, 0.0)", "least"),
    "the median of all": ("_scores", "past[:, -self.recent :], stored.clamp(max=self.recent)", "past, stored"),
    "the ring is off by one": ("_scores", "count[:, None] + places", "count[:, None] + 1 + places"),
    "the ring is one shorter": ("_accept", "count % self.window", "count % (self.window - 1)"),
    "one more of warm-up": ("_scores", "stored >= self.warmup", "stored > self.warmup"),
    "no logarithm": ("_scores", "history.amin(1) > 0", "history.amin(1) > torch.inf"),
    "what is not finite enters the history": ("_judge_on_device", "known & ~spike", "torch.ones_like(known) & ~spike"),
    "spikes enter the history": ("_judge_on_device", "known & ~spike", "known"),
    "one signal is enough for health": ("_judge_on_device", "over.any()", "over.all()"),
    "the cap is ignored": ("_reject", "row == self.cap", "row < 0"),
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

STATE = ["history", "count", "rejected", "in_a_row", "too_high", "replaced", "replaced_count"]


def mutant(method, old, new):
    """A detector of whose ``method`` the text ``old`` was replaced."""
    text = textwrap.dedent(inspect.getsource(getattr(SpikeDetector, method)))
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {method}: the table is out of date"
    found = {}
    exec(text.replace(old, new), {**vars(rule)}, found)
    return type("Mutant", (SpikeDetector,), {method: found[method]})


def tell(kind):
    """Compare with the twin over all rows; fail where they differ, or where a mutant cannot go on."""
    for rows in ROWS:
        try:
            assert_alike(kind(**OPTIONS), TwinDetector(2, **OPTIONS), rows)
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


def resumed(rows, cut, undo, lost=None):
    """Run, save at ``cut``, lose one value, load and go on: what was told, and what is remembered."""
    detector, again = SpikeDetector(**OPTIONS), SpikeDetector(**OPTIONS)
    told = [bool(detector.observe(torch.tensor(row, dtype=torch.float64))) for row in rows[:cut]]
    saved = detector.state_dict()
    if lost is not None:
        saved[lost] = SpikeDetector(**OPTIONS)._empty(2)[lost]
    again.load_state_dict(saved)
    if undo:
        again.undo_adoption()
    told += [bool(again.observe(torch.tensor(row, dtype=torch.float64))) for row in rows[cut:]]
    return told, {name: tensor.tolist() for name, tensor in again.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_a_state_that_loses_one_value_is_told(name):
    """At some cut: most values are of no account at most steps."""
    assert set(STATE) == set(SpikeDetector(**OPTIONS)._empty(2))
    places = random.Random(0).sample(range(20, 150), 20)
    cuts = [(ROWS[0], at, undo) for at in places for undo in (False, True)] + [(BLAMED_BEFORE, 11, False)]
    assert any(resumed(*cut) != resumed(*cut, name) for cut in cuts)

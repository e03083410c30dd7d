"""Losses drawn by seed: each sample has the gradient of its own loss, whoever else is there, or the loss is refused."""

import generated_losses
import pytest
from generated_losses import draw, trial

CASES, SAMPLED, AT_ONCE = 12_000, 240, 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.exhaustive] if n >= SAMPLED else []) for n in range(0, CASES, AT_ONCE)],
)
def test_a_loss_is_exact_or_refused(first):
    cases = [draw(seed) for seed in range(first, first + AT_ONCE)]
    outcomes = [(case, trial(case)) for case in cases]
    assert not [f"{case}\n{o.kind}: {o.words}" for case, o in outcomes if o.kind in ("wrong", "crash")]


@pytest.mark.slow
def test_right_losses_are_mostly_accepted():
    kinds = [trial(draw(seed)).kind for seed in range(CASES, CASES + 80)]
    assert kinds.count("exact") > 20
    assert kinds.count("exact") > 2 * kinds.count("false refusal")


@pytest.mark.slow
def test_the_oracle_tells_what_an_unchecked_clip_gets_wrong():
    kinds = [trial(draw(seed), check=False).kind for seed in range(CASES, CASES + 60)]
    assert kinds.count("wrong") > 10


def test_own_losses_are_the_same_in_every_batch_where_the_mean_is_over_samples():
    """The oracle itself: nothing is wrong with a plain mean, and something is with a mean over all rows."""
    case = draw(3)
    case.terms, case.reduction, case.ragged, case.divided = [generated_losses.PLAIN], "mean", "ragged", False
    assert trial(case).kind == "exact"
    case.terms = [generated_losses.OVER_ALL_ROWS]
    assert trial(case).kind == "refused"
    assert trial(case, check=False).kind == "wrong"

"""Models drawn by seed that change between steps: each sample's gradient is that of it alone, or it is refused."""

import pytest
from generated_models import draw, trial

CASES, SAMPLED, AT_ONCE = 8_000, 160, 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.exhaustive] if n >= SAMPLED else []) for n in range(0, CASES, AT_ONCE)],
)
def test_a_model_that_changes_is_exact_or_refused(first):
    cases = [draw(seed) for seed in range(first, first + AT_ONCE)]
    outcomes = [(case, trial(case)) for case in cases]
    assert not [
        f"{case}\n{o.kind}: {o.words}" for case, o in outcomes if o.kind.startswith("wrong") or o.kind == "crash"
    ]


@pytest.mark.slow
def test_harmless_changes_are_mostly_accepted():
    kinds = [trial(draw(seed)).kind for seed in range(CASES, CASES + 80)]
    assert kinds.count("exact") > 15
    assert kinds.count("exact") > 4 * kinds.count("false refusal")


@pytest.mark.slow
def test_the_twin_tells_what_an_unchecked_clip_gets_wrong():
    kinds = [trial(draw(seed), check=False).kind for seed in range(CASES, CASES + 60)]
    assert kinds.count("wrong") > 5

"""1,000 of the random lists of gradients that `random_layouts.py` makes by the hundred thousand; `make test` has 20."""

import pytest
from random_layouts import BATCH, Norm, try_cases
from threads import ranks


@pytest.fixture(scope="module")
def threads():
    with ranks(4) as threads:
        yield threads


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 1000, BATCH))
def test_random_layouts_have_the_right_norm_or_are_refused(threads, start):
    seeds = range(start, start + BATCH)
    judged = try_cases(threads, seeds, 200.0)
    wrong = [(said, case, found, right) for case, said, found, right in judged if not said.startswith(("right", "ref"))]
    assert not wrong
    assert sum(said == "right" for _, said, *_ in judged) >= BATCH // 2
    for one, again in zip(judged, try_cases(threads, seeds, 200.0), strict=True):  # each list made anew
        assert bits(one[2]) == bits(again[2])


def bits(outcomes):
    return [one.bits if isinstance(one, Norm) else type(one) for one in outcomes]

"""A sample of the random lists of gradients that `random_layouts.py` makes by the hundred thousand."""

import pytest
from random_layouts import BATCH, try_cases
from threads import ranks


@pytest.fixture(scope="module")
def threads():
    with ranks(4) as threads:
        yield threads


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 6 * BATCH, BATCH))
def test_random_layouts_have_the_right_norm_or_are_refused(threads, start):
    judged = try_cases(threads, range(start, start + BATCH), 200.0)
    wrong = [(said, case, found, right) for case, said, found, right in judged if not said.startswith(("right", "ref"))]
    assert not wrong
    assert sum(said == "right" for _, said, *_ in judged) >= BATCH // 2

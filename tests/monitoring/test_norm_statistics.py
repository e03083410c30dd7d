import math

import pytest
from synthetic import log_normal

from gradguard.monitoring.judge.norm_statistics import (
    drift_ends,
    drift_ratio,
    local_spread,
)


def test_constant_norms_have_the_least_spread():
    assert local_spread([2.0] * 10) == 0.05


@pytest.mark.parametrize("spread", [0.2, 0.7])
@pytest.mark.parametrize("drift", [0.0, -5.0, 5.0])
def test_the_local_spread_has_no_drift_in_it(spread, drift):
    norms = [norm * math.exp(drift * i / 2000) for i, norm in enumerate(log_normal(2000, spread=spread))]
    assert local_spread(norms) == pytest.approx(spread, rel=0.3)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 1.5])
def test_noise_is_no_drift(spread, seed):
    for count in (200, 1000):
        assert drift_ends(log_normal(count, spread=spread, seed=seed)) is None


@pytest.mark.parametrize(
    ("norms", "ratio", "ends"),
    [
        ([1.0] * 99, None, None),
        ([1.0] * 100, 1.0, None),
        ([1.0] * 50 + [2.0] * 50, 2.0, None),
        ([1.0] * 50 + [2.1] * 50, 2.1, (1.0, 2.1)),
        ([4.0] * 50 + [1.0] * 50, 4.0, (4.0, 1.0)),
        ([1.0] * 40 + [4.0] * 20 + [1.0] * 40, 4.0, (1.0, 4.0)),
    ],
)
def test_drift_by_hand(norms, ratio, ends):
    assert (drift_ratio(norms), drift_ends(norms)) == (ratio, ends)

"""The causes that a run can suffer from: one small function each, from its signals to a cause or None."""

from collections.abc import Callable

from gradguard.monitoring.judge.cause import Cause
from gradguard.monitoring.judge.causes.batches import bad_batches, data_shift, drift
from gradguard.monitoring.judge.causes.clips import clip_starves, clip_twice
from gradguard.monitoring.judge.causes.depth import exploding_depth, exploding_time, vanishing
from gradguard.monitoring.judge.causes.loop import (
    accumulation,
    clip_before_unscale,
    no_gradient,
    not_started,
    rate_zero,
)
from gradguard.monitoring.judge.causes.nonfinite import nonfinite
from gradguard.monitoring.judge.causes.rate import rate_decayed, rate_too_high, rate_too_low, update_rule
from gradguard.monitoring.judge.signals import RunSignals

CAUSES: tuple[Callable[[RunSignals], Cause | None], ...] = (
    nonfinite,
    clip_before_unscale,
    accumulation,
    no_gradient,
    rate_zero,
    clip_starves,
    clip_twice,
    bad_batches,
    exploding_time,
    exploding_depth,
    vanishing,
    not_started,
    update_rule,
    rate_decayed,
    rate_too_high,
    rate_too_low,
    data_shift,
    drift,
)
"""Each looks for one cause, whatever the others find; `diagnosis` ranks what they return."""

"""Judges the health of a run: reports faults, with advice, from the plain numbers of its record."""

import math
from collections import defaultdict
from collections.abc import Sequence

from gradguard.monitoring.judge.detectors import KINDS
from gradguard.monitoring.judge.detectors.clipping import clipping_of_whole
from gradguard.monitoring.judge.detectors.level import EXPLODING, JUMP, NONFINITE
from gradguard.monitoring.judge.detectors.loop_faults import NO_GRADIENT
from gradguard.monitoring.judge.detectors.loss import DIVERGING, came_back
from gradguard.monitoring.judge.detectors.outliers import RECURRING_SPIKES, SPIKE
from gradguard.monitoring.judge.findings import RECOVERED_STEPS, Episode, Finding, worst_first
from gradguard.monitoring.judge.live import HealthMonitor
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.step_rows import bound_on, by_optimizer, in_order, taken_steps
from gradguard.threshold_rules import LockInAlarm

__all__ = ["KINDS", "Finding", "HealthMonitor", "findings", "lock_in_share", "lost_from"]


@once
def findings(record: Record) -> list[Finding]:
    """Judge the health of a run.

    ==================  ========  ======================================================================================
    kind                severity  found if
    ==================  ========  ======================================================================================
    nonfinite           error     gradients held NaN or infinity (warning: all such steps were skipped)
    exploding           error     10 norms in a row above 10 times the usual (100 times in the first 200 steps), unless
                                  the loss has not risen with them; early, 10 times the first ones with 3 times the loss
    exploding           warning   a single norm above 1,000 times the usual (1,000,000 times where a clip bound on it)
    diverging_loss      warning   60 losses 2.5 times the best, not falling, half of the progress lost (error: 80 %;
                                  info: the loss was back by the end)
    spike               info      a norm 5 times its neighbourhood's, and 6 robust deviations above, where no clip bound
    recurring_spikes    warning   8 spikes within 1,000 steps (info: a clip bound on all)
    vanishing           warning   20 norms in a row below a ten-thousandth of the usual, without convergence; error: 0
    vanishing           warning   a weight's gradient is a millionth of the usual weight's, element by element
    dead_layer          warning   exact zeros on 10 per-tensor lines in a row (info: from the first one on)
    detached_layer      warning   no gradient at all on 10 per-tensor lines in a row, after nine of ten before had one
    update_spike        info      steps 1.5 times as long as usual at their learning rate, on 3 measured ones in a row
    update_rule         warning   updates of one length, bounded from below, a factor off their rule, or mostly decay
    logits_grow         warning   the largest attention logit above 50 and 4 times its lowest, as medians of 20 steps
    amp_scale_collapse  error     the loss scale is below 1, or 12 steps in a row were skipped
    clipping_always_on  warning   bound on more than half of the steps (info with an optimizer that cancels a scale)
    clipped_twice       warning   two clips acted on the same gradients (info: none of them ever bound)
    ==================  ========  ======================================================================================

    Faults of the training loop come on top (`detectors.loop_faults`): ``gradient_without_optimizer``,
    ``optimizer_without_gradient``, ``clip_before_unscale``, ``missing_zero_grad`` and ``empty_micro_batch``.

    **Guarantees**: a calm, a decaying or a short run has no findings, unless it clips: then the last three kinds of the
    table may be found. The same record always gives the same findings. Each kind is reported once for each optimizer,
    with the steps of each episode. ``confidence`` is ``"medium"`` where another explanation of the numbers is possible.

    **Edge cases**: quantities that were not measured are not judged. Losses are not judged where several optimizers
    step on losses of their own. A loss that is ever zero or negative is not judged for divergence. Steps that a loss
    scaler skipped are its ordinary search for a scale.

    Args:
        record: The record of a run.

    Returns:
        The findings, errors first, then in the order of steps.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 5.0, "threshold": 0.5, "coefficient": 0.1} for i in range(300)]
        >>> for found in findings(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)):
        ...     print(found.kind, found.message, sep=": ")
        clipping_always_on: clipping bound on 100 % of 300 steps: it acts like a learning rate 0.1 times as large
    """
    monitor = HealthMonitor(record.meta)
    for line in in_order(record):
        monitor.see(line)
    monitor.finish()
    parts = by_optimizer(record)
    idle = record.closing.get("idle_steps", 0)
    by_index = {part.index: part for part in parts}
    for episode in monitor.episodes:
        if len(parts) == 1:  # only one optimizer stepped, however many the script has
            episode.optimizer = parts[0].index
        if episode.kind is NO_GRADIENT:  # the event came after a few idle steps; the record's last line has them all
            episode.count = max(episode.count, idle)
        if episode.kind is DIVERGING and episode.optimizer in by_index:
            episode.harmless = came_back(episode, by_index[episode.optimizer])
    every = [*monitor.episodes, *(episode for part in parts for episode in clipping_of_whole(part))]
    return worst_first(_merged([episode for episode in every if _stands(episode, every)]))


def lock_in_share(record: Record) -> float | None:
    """Return the share of the steps on which the clip had bound on more than half of the last 100 at one threshold.

    Args:
        record: The record of a run, of one optimizer.

    Returns:
        A share in [0, 1]; None where no step was taken.
    """
    taken = taken_steps(record)
    if not taken:
        return None
    clipped = taken.where(taken.has("threshold"))
    thresholds = [math.inf if threshold is None else threshold for threshold in clipped.column("threshold")]
    return sum(map(LockInAlarm().follow, bound_on(clipped), thresholds)) / len(taken)


_SAY_MORE = (NONFINITE, EXPLODING, JUMP, RECURRING_SPIKES)


def _stands(episode: Episode, every: Sequence[Episode]) -> bool:
    """Return whether no other episode of the same optimizer explains the same steps better."""
    others = [other for other in every if other.optimizer == episode.optimizer]
    if episode.kind is JUMP:
        return all(other.kind is not EXPLODING for other in others)  # an explosion began with the jump
    if episode.kind is SPIKE:
        more = [other for other in others if other.kind in _SAY_MORE]
        return not any(other.first - RECOVERED_STEPS <= episode.first <= other.last + RECOVERED_STEPS for other in more)
    return True


def _merged(episodes: list[Episode]) -> list[Finding]:
    """Return one finding for all episodes of a kind and optimizer."""
    groups: dict[tuple, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.kind, episode.optimizer].append(episode)
    for first, *later in groups.values():
        for episode in later:
            first.join(episode)
    return [first.finding() for first, *_ in groups.values()]


def lost_from(record: Record) -> int | None:
    """Return the first step of an error about losses or norms that rose and stayed high; None without one.

    Args:
        record: The record of a run.
    """
    rose = (EXPLODING.name, DIVERGING.name)
    return min(
        (one.first_step for one in findings(record) if one.severity == "error" and one.kind in rose), default=None
    )

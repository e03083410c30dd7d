"""Health of a run: faults in words that a person can act on, from the plain numbers of its record."""

from collections import defaultdict
from collections.abc import Sequence

from gradguard.monitoring.judge.detectors import KINDS
from gradguard.monitoring.judge.detectors.clipping import ALWAYS_ON, LOCK_IN, clipping_of_whole
from gradguard.monitoring.judge.detectors.level import EXPLODING, JUMP, NONFINITE
from gradguard.monitoring.judge.detectors.loop_setup import NO_GRADIENT
from gradguard.monitoring.judge.detectors.loss import DIVERGING, came_back, loss_of_whole
from gradguard.monitoring.judge.detectors.outliers import RECURRING_SPIKES, SPIKE
from gradguard.monitoring.judge.detectors.rhythm import OSCILLATION, REPEATED, rhythm_of_whole
from gradguard.monitoring.judge.detectors.tensors import CORRUPT
from gradguard.monitoring.judge.findings import RECOVERED_STEPS, Episode, Finding, worst_first
from gradguard.monitoring.judge.live import HealthMonitor
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.lines import without_none
from gradguard.monitoring.record.steps import bound_on, by_optimizer, in_order, taken_steps, thresholds_of
from gradguard.threshold_rules import LockInAlarm

__all__ = ["KINDS", "Finding", "HealthMonitor", "findings", "lock_in_share"]


@once
def findings(record: Record) -> list[Finding]:
    """Judge the health of a run.

    ==================  ========  ======================================================================================
    kind                severity  found where
    ==================  ========  ======================================================================================
    nonfinite           error     gradients held NaN or infinity (warning: all such steps were skipped)
    exploding           error     10 norms in a row above 10 times the usual (100 times in the first 200 steps), unless
                                  the loss has not risen with them; early, 10 times the first ones with 3 times the loss
    exploding           warning   a single norm above 1,000 times the usual (1,000,000 times where a clip bound on it)
    diverging_loss      warning   60 losses 2.5 times the best, not falling, half of what was learned lost (error: 80 %;
                                  info: the loss was back by the end)
    not_learning        info      no 100 losses of at least 500 are 2 % below the first
    spike               info      a norm 5 times its neighbourhood's, and 6 robust deviations above, where no clip bound
    recurring_spikes    warning   8 spikes within 1,000 steps; tells their period (info: a clip bound on all)
    oscillation         warning   losses up and down with each of 64 steps by 10 %, not falling, while a clip binds
                                  (else info)
    repeated_batches    info      losses and norms of the last 600 steps recur after the same number of steps
    vanishing           warning   20 norms in a row below a ten-thousandth of the usual, without convergence; error: 0
    vanishing           warning   a weight's gradient is a millionth of the usual weight's, element by element
    dead_layer          warning   exact zeros on 10 per-tensor lines in a row (info: from the first one on)
    half_dead_layer     warning   half of a weight's gradient is exactly 0 on 4 measurements over 150 steps, a constant
                                  part that was smaller at first or is its bias's too
    detached_layer      warning   no gradient at all on 10 per-tensor lines in a row, after nine of ten before had one
    corrupt_gradient    warning   one tensor's norm above 10 times its usual for one line, while the others are calm
    update_ratio        warning   updates above a tenth of their weight, or below a millionth while others' are not, on
                                  5 measurements over 200 steps
    update_spike        info      steps 1.5 times as long as usual at their learning rate, on 3 measured ones in a row
    update_rule         warning   updates of one length, bounded from below, of a squared learning rate, or weight decay
    logits_grow         warning   the largest attention logit above 50 and 4 times its lowest, as medians of 20 steps
    dominating_layer    warning   one of at least 8 tensors has 95 % of the squared norm on 80 of 100 steps
    amp_scale_collapse  error     the loss scale is below 1, or 12 steps in a row were skipped
    lock_in             warning   bound on more than half of 100 steps at one threshold, by a rule that moves it; or
                                  still so at the end
    clipping_always_on  warning   bound on more than half of the steps (info with an optimizer that cancels a scale)
    clipping_inactive   info      a fixed threshold never bound in at least 200 steps
    norm_drift          info      the windowed median moved by more than 2x under one fixed threshold
    clipped_twice       warning   two clips acted on the same gradients (info: none of them ever bound)
    ==================  ========  ======================================================================================

    And how the loop is set up (`detectors.loop_setup`): ``gradient_without_optimizer``, ``optimizer_without_gradient``,
    ``clip_before_unscale``, ``missing_zero_grad``, ``clip_below_eps`` and ``unused_parameter``.

    **Guarantees**: a calm, a decaying or a short run has none, unless it clips: then the last four kinds may be told.
    The same record always gives the same findings. Each kind is told once for each optimizer, with the steps of each
    time that it came. ``confidence`` is ``"medium"`` where something else could make the same numbers.

    **Edge cases**: what was not measured is not judged; neither are losses where several optimizers step on losses of
    their own, nor those that are ever zero or negative, for divergence; steps that a loss scaler skipped are its
    ordinary search.

    Args:
        record: The record of a run.

    Returns:
        The findings, errors first, then in the order of steps.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 0.5, "threshold": 5.0, "coefficient": 1.0} for i in range(300)]
        >>> for found in findings(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False)):
        ...     print(found.kind, found.severity, found.message, sep=": ")
        clipping_inactive: info: clipping at 5.0 never bound in 300 steps: the largest norm was 0.500
    """
    monitor = HealthMonitor(record.meta)
    for line in in_order(record):
        monitor.see(line)
    monitor.finish()
    parts = by_optimizer(record)
    if len(parts) == 1:  # however many the script has: one stepped
        for episode in monitor.episodes:
            episode.optimizer = parts[0].index
    idle = (record.end or {}).get("idle_steps") or 0
    by_index = {part.index: part for part in parts}
    for episode in monitor.episodes:
        if episode.kind is NO_GRADIENT:  # it was told when it was sure, and went on
            episode.count = max(episode.count, idle)
        if episode.kind is DIVERGING and episode.optimizer in by_index:
            episode.harmless = came_back(episode, by_index[episode.optimizer])
    judged = [episode for part in parts for of_whole in _OF_WHOLE for episode in of_whole(part)]
    ends = {part.index: part.record.steps[-1]["i"] for part in parts if part.record.steps}
    told = [episode for episode in monitor.episodes if episode.kind is not ALWAYS_ON]  # judged anew, as a whole
    every = [*told, *judged]
    found = [episode.finding() for episode in judged if _stands(episode, every, ends)]
    found += _merged([episode for episode in told if _stands(episode, every, ends)])
    return worst_first(found)


def lock_in_share(record: Record) -> float | None:
    """On which share of the steps the clip had bound on more than half of the last 100 at one threshold.

    Args:
        record: The record of a run, of one optimizer.

    Returns:
        A share in [0, 1]; None where no step was taken.
    """
    taken = taken_steps(record)
    if not taken:
        return None
    bound, thresholds = bound_on(taken), thresholds_of(taken)
    known = without_none(thresholds)
    bound = [binds for binds, threshold in zip(bound, thresholds, strict=True) if threshold is not None]
    return sum(map(LockInAlarm().follow, bound, known)) / len(taken)


_OF_WHOLE = (clipping_of_whole, loss_of_whole, rhythm_of_whole)


_SAY_MORE = (NONFINITE, EXPLODING, JUMP, RECURRING_SPIKES, CORRUPT)


def _stands(episode: Episode, every: Sequence[Episode], ends: dict[int | None, int]) -> bool:
    """Whether an episode stands, seen from the end of the run and beside all others."""
    others = [other for other in every if other.optimizer == episode.optimizer]
    kind, kinds = episode.kind, {other.kind for other in others}
    if kind is REPEATED:
        return OSCILLATION not in kinds
    if kind is JUMP:
        corrupt = any(other.kind is CORRUPT and other.first == episode.first for other in every)
        return EXPLODING not in kinds and not corrupt  # the jump was how it began, or is told by its layer
    if kind is SPIKE:
        more = [other for other in others if other.kind in _SAY_MORE]
        return not any(other.first - RECOVERED_STEPS <= episode.first <= other.last + RECOVERED_STEPS for other in more)
    if kind is LOCK_IN and episode.numbers["fixed"]:  # a fixed threshold that bound for a while, and no longer does
        goes_on = episode.last >= ends.get(episode.optimizer, 0) - RECOVERED_STEPS
        return goes_on and ALWAYS_ON not in kinds
    return True


def _merged(episodes: list[Episode]) -> list[Finding]:
    """One finding for all episodes of a kind, apart from those that say something else."""
    groups: dict[tuple, list[Episode]] = defaultdict(list)
    for episode in episodes:
        about = tuple(episode.params) if episode.kind.apart else ()
        groups[episode.kind, episode.optimizer, about].append(episode)
    for first, *later in groups.values():
        for episode in later:
            first.join(episode)
    return [first.finding() for first, *_ in groups.values()]

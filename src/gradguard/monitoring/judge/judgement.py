"""The verdict on a run: the effect of clipping, in one sentence and in numbers."""

from dataclasses import dataclass, replace
from itertools import compress

from gradguard.monitoring.judge.acting_clips import ActingClip, acting_clips, shares_in_words
from gradguard.monitoring.judge.norm_statistics import are_scaled
from gradguard.monitoring.judge.numbers import (
    capital,
    last_window,
    median,
    number,
    only,
    percent,
    plain_threshold,
    window_means,
)
from gradguard.monitoring.judge.recoveries import Recoveries, recoveries
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import (
    bound_on,
    by_optimizer,
    nonfinite_on,
    regime_of,
    skipped_on,
    taken_steps,
    usable_norms,
)
from gradguard.words import counted

_FEWEST_FOR_SPIKES = 20


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run; a number is None where it was not measured.

    Attributes:
        sentence: The verdict in words.
        regime: ``"never"``, ``"guard"`` (below 5 %), ``"shaping"`` (to 50 %) or ``"normalising"`` (above).
        clip_share: The share of the ``taken_steps`` on which clipping bound.
        clipping: Whether anything clipped or could have clipped in this run.
        threshold: The last threshold in use; with several clips, the threshold of the clip that bound most often.
        median_coefficient: The median coefficient of the steps on which clipping bound.
        median_norm: The median pre-clip norm.
        max_norm: The largest finite pre-clip norm.
        spike_share: The share of steps after the warm-up that stand out from their neighbourhood (`find_spikes`).
        nonfinite_steps: Steps whose gradients held NaN or infinity.
        faulty_steps: The non-finite steps without those that a GradScaler skipped in its search for a scale.
        skipped_steps: Optimizer steps that a loss scaler or a guard skipped.
        final_loss: The mean loss of the last 5 % of steps, at least 10; None if that window is not finite.
        best_loss: The lowest mean loss over any window of that length.
        diverged: Whether the loss was not finite at the end.
        overhead_share: Time spent on observing over the wall-clock time of the run.
        steps: Recorded optimizer steps, including skipped and non-finite ones.
        taken_steps: Steps with finite gradients that the optimizer took.
        usable_steps: The taken steps after the warm-up that have a norm above 0.
        clips: Each clip separately, in the order in which they act.
        skipped_spikes: The ``skipped_steps`` that a guard skipped as finite spikes (`SkipSpikes`).
        recovery: The work of `SpikeRecovery`; None where the record has no such event.
        parts: The label and the verdict of each optimizer, where the record has several. Then ``sentence`` joins their
            sentences, ``threshold`` is the threshold that all share, spikes are counted among each optimizer's own
            norms, and every other number covers all steps.
    """

    sentence: str
    regime: str
    clip_share: float | None
    clipping: bool
    threshold: float | None
    median_coefficient: float | None
    median_norm: float | None
    max_norm: float | None
    spike_share: float | None
    nonfinite_steps: int
    faulty_steps: int
    skipped_steps: int
    final_loss: float | None
    best_loss: float | None
    diverged: bool
    overhead_share: float | None
    steps: int
    taken_steps: int
    usable_steps: int
    clips: tuple[ActingClip, ...] = ()
    skipped_spikes: int = 0
    recovery: Recoveries | None = None
    parts: tuple[tuple[str, "Verdict"], ...] = ()


@once
def verdict(record: Record) -> Verdict:
    """Judge a run by its record.

    **Edge cases**: for a record without steps or without norms the sentence says so, and without losses their numbers
    are None. A step with non-finite gradients counts as non-finite and not in the clip share.

    Args:
        record: The record of a run.

    Returns:
        The verdict.
    """
    parts = [(part.label, _judge(part.record)) for part in by_optimizer(record)]
    return parts[0][1] if len(parts) == 1 else _together(_judge(record), parts)


def _judge(record: Record) -> Verdict:
    steps, taken, usable, clips = record.steps, taken_steps(record), usable_norms(record), acting_clips(record)
    lost, skipped = nonfinite_on(steps), skipped_on(steps)
    searched = map(all, zip(lost, skipped, steps.has("amp_scale"), strict=True))
    bound = list(compress(taken.column("coefficient"), bound_on(taken)))
    used, norms = (without_none(steps.column(key)) for key in ("threshold", "norm"))
    several = sorted(clips, key=lambda clip: clip.bound or 0, reverse=True) if len(clips) > 1 else ()
    losses = list(compress(steps.column("loss"), steps.has("loss")))
    means = window_means(losses, last_window(losses))
    share = len(bound) / len(taken) if taken else None
    wall, overhead = map(record.closing.get, ("wall", "overhead_ms"))
    found = Verdict(
        sentence="",
        regime=regime_of(share or 0.0),
        clip_share=share,
        # a rule may have several thresholds, or none yet, so a threshold alone does not decide
        clipping=bool(used or bound or any(steps.column("rule")) or record.meta.get("clip")),
        threshold=next((clip.threshold for clip in several), (used or [None])[-1]),
        median_coefficient=median(bound),
        median_norm=median(norms),
        max_norm=max(norms, default=None),
        spike_share=len(spikes_of(record)) / len(usable) if len(usable) >= _FEWEST_FOR_SPIKES else None,
        nonfinite_steps=sum(lost),
        faulty_steps=sum(lost) - sum(searched),
        skipped_steps=sum(skipped),
        final_loss=means[-1] if means else None,
        best_loss=min(without_none(means), default=None),
        diverged=losses[-1:] == [None],
        overhead_share=overhead / 1000 / wall if wall and overhead is not None else None,
        steps=len(steps),
        taken_steps=len(taken),
        usable_steps=len(usable),
        clips=tuple(clips),
        skipped_spikes=sum(map(bool, steps.column("spike"))),
        recovery=recoveries(record),
    )
    return replace(found, sentence=_sentence(record, found))


def _together(whole: Verdict, parts: list[tuple[str, Verdict]]) -> Verdict:
    thresholds = {part.threshold for _, part in parts}
    measured = [(part.spike_share, part.usable_steps) for _, part in parts if part.spike_share is not None]
    spikes = sum(share * steps for share, steps in measured) / sum(steps for _, steps in measured) if measured else None
    return replace(
        whole,
        sentence=" ".join(f"{capital(label)}: {part.sentence}" for label, part in parts),
        threshold=only(thresholds),
        spike_share=spikes,
        usable_steps=sum(part.usable_steps for _, part in parts),
        diverged=any(part.diverged for _, part in parts),
        parts=tuple(parts),
    )


def _sentence(record: Record, found: Verdict) -> str:
    if not record.steps:
        return "No optimizer step was recorded."
    norms, spikes = "No finite gradient norm was recorded.", ""
    if found.median_norm is not None and found.max_norm is not None:
        times = f" ({number(found.max_norm / found.median_norm)}x the median)" if found.median_norm > 0 else ""
        if found.spike_share is not None:
            usable = counted(found.usable_steps, "step")
            spikes = f"; {percent(found.spike_share)} of {usable} after the warm-up were spikes"
        median, largest = number(found.median_norm), number(found.max_norm)
        norms = f"Gradient norms before clipping: median {median}, largest {largest}{times}{spikes}."
    skipped, lost, left_out = found.skipped_steps, found.nonfinite_steps, found.skipped_spikes
    faults = f"Of {counted(found.steps, 'step')}: " if skipped or lost else ""
    as_spikes = f" ({left_out:,} as finite spikes)" if left_out else ""
    faults += f"{skipped:,} skipped{as_spikes}. " if skipped else ""
    faults += f"{lost:,} non-finite."
    diverged = "The loss was not finite at the end." if found.diverged else ""
    return " ".join(filter(None, (_clip_words(record, found), norms, faults, diverged, str(found.recovery or ""))))


def _clip_words(record: Record, found: Verdict) -> str:
    clips, share, steps = found.clips, percent(found.clip_share or 0.0), counted(found.taken_steps, "step")
    if not found.clipping:
        scaled = ", but most norms are equal: code that was not observed scales gradients before the step"
        return f"No clipping in {counted(found.steps, 'step')}{scaled if are_scaled(record) else ''}."
    if found.taken_steps < found.steps:
        steps = f"the {steps} that were taken with finite gradients"
    if len(clips) > 1:
        each = f"{len(clips)} clips, on {steps}: {shares_in_words(clips, max(found.taken_steps, 1))}"
        if found.regime == "never":
            return f"{each}: none of them changed a gradient."
        return f"{each}. Together they bound on {share}: {_regime_words(record, found)}."
    rules = [rule for rule in record.steps.column("rule") if rule]
    where = f" by {rules[-1]}" if rules and rules[-1] != "norm" else ""
    where += "" if found.threshold is None else f" at {plain_threshold(found.threshold)}"
    if found.regime == "never":
        return f"Clipping{where} never bound in {steps}."
    some = ""
    for clip in clips:
        if clip.bound and clip.acted < found.taken_steps:
            some = f" ({percent(clip.bound / clip.acted)} of the {clip.acted:,} that it acted on)"
    return f"Clipping{where} bound on {share} of {steps}{some}: {_regime_words(record, found)}."


def _regime_words(record: Record, found: Verdict) -> str:
    coefficient = f"{found.median_coefficient:.2g}"
    if found.regime == "guard":
        return "a guard against rare large gradients"
    if found.regime == "shaping":
        return f"it shapes training: where it binds it usually multiplies gradients by {coefficient}"
    if is_scale_free(record):
        return f"it makes all steps about equally long (gradients usually times {coefficient}), not rare ones shorter"
    return f"it acts like a learning rate {coefficient} times as large, not like a guard"

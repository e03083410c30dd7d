"""One sentence with numbers about what clipping did to a run, and the numbers themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from operator import methodcaller
from typing import Any

from gradguard.monitoring.judge.acting_clips import ActingClip, acting_clips, shares_in_words
from gradguard.monitoring.judge.numbers import median, number, only, percent, plain_threshold
from gradguard.monitoring.judge.recoveries import Recoveries, recoveries
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.lines import without_none
from gradguard.monitoring.record.steps import (
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
    """What happened, in one sentence and in numbers; None stands for "not measured".

    Attributes:
        sentence: The whole finding in words.
        regime: ``"never"``, ``"guard"`` (below 5 %), ``"shaping"`` (to 50 %) or ``"normalising"`` (above).
        clip_share: The share of the ``taken_steps`` on which clipping bound.
        clipping: Whether anything clipped or could have clipped in this run.
        threshold: The last threshold in use; of several clips, that of the one which bound most often.
        median_coefficient: The median coefficient of the steps on which clipping bound.
        median_norm: The median pre-clip norm.
        max_norm: The largest finite pre-clip norm.
        spike_share: The share of steps after the warm-up that stand out from their neighbourhood (`find_spikes`).
        nonfinite_steps: Steps whose gradients held NaN or infinity.
        faulty_steps: Those of them that no GradScaler left out, whose search for its scale they are.
        skipped_steps: Optimizer steps that a loss scaler or a guard left out.
        final_loss: The mean loss of the last 5 % of steps, at least 10; None if that window is not finite.
        best_loss: The lowest mean loss over any window of that length.
        diverged: Whether the loss was not finite at the end.
        overhead_share: Time spent on observing over the wall-clock time of the run.
        steps: Recorded optimizer steps, those that were skipped or not finite included.
        taken_steps: Steps with finite gradients that the optimizer took.
        usable_steps: Those of them after the warm-up, with a norm above 0.
        clips: Each clip by itself, in the order in which they act.
        skipped_spikes: Those of the ``skipped_steps`` that a guard left out as finite spikes (`SkipSpikes`).
        recovery: What `Resilience` did about spikes; None where the record tells of nothing.
        parts: The verdict on each optimizer with its label, where the record has several. Then ``sentence`` is theirs
            one after the other, ``threshold`` the one that all share, a spike one among its own optimizer's norms,
            and every other number is of all steps together.
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

    **Edge cases**: a record without steps, without norms or without losses gives a verdict that says so; a
    step with non-finite gradients counts as such and not in the clip share.

    Args:
        record: The record of a run.

    Returns:
        The verdict.
    """
    parts = [(part.label, _judge(part.record)) for part in by_optimizer(record)]
    return parts[0][1] if len(parts) == 1 else _together(_judge(record), parts)


def _judge(record: Record) -> Verdict:
    numbers = _clipping(record) | _norms(record) | _losses(record)
    lost, skipped, scaled = nonfinite_on(record.steps), skipped_on(record.steps), record.steps.has("amp_scale")
    numbers["nonfinite_steps"], numbers["skipped_steps"] = sum(lost), sum(skipped)
    numbers["faulty_steps"] = sum(lost) - sum(map(all, zip(lost, skipped, scaled, strict=True)))
    numbers["skipped_spikes"] = sum(map(bool, record.steps.column("spike")))
    numbers["recovery"] = recoveries(record)
    numbers["overhead_share"] = _overhead_share(record)
    numbers["steps"] = len(record.steps)
    return Verdict(sentence=_sentence(record, numbers), **numbers)


def _together(whole: Verdict, parts: list[tuple[str, Verdict]]) -> Verdict:
    thresholds = {part.threshold for _, part in parts}
    measured = [(part.spike_share, part.usable_steps) for _, part in parts if part.spike_share is not None]
    spikes = sum(share * steps for share, steps in measured) / sum(steps for _, steps in measured) if measured else None
    return replace(
        whole,
        sentence=" ".join(f"{label[:1].upper()}{label[1:]}: {part.sentence}" for label, part in parts),
        threshold=only(thresholds),
        spike_share=spikes,
        usable_steps=sum(part.usable_steps for _, part in parts),
        diverged=any(part.diverged for _, part in parts),
        parts=tuple(parts),
    )


def _clipping(record: Record) -> dict[str, Any]:
    real = taken_steps(record)
    bound = list(compress(real.column("coefficient"), bound_on(real)))
    share = len(bound) / len(real) if real else None
    clips = acting_clips(record)
    used = without_none(record.steps.column("threshold"))
    threshold = used[-1] if used else None
    if len(clips) > 1:
        threshold = max(clips, key=lambda clip: clip.bound or 0).threshold
    ruled = any(record.steps.column("rule"))  # a rule may have no one threshold, or none yet
    return {
        "clip_share": share,
        "regime": regime_of(share or 0.0),
        "clipping": bool(used or bound or ruled or record.meta.get("clip")),
        "threshold": threshold,
        "taken_steps": len(real),
        "clips": tuple(clips),
        "median_coefficient": median(bound),
    }


def _norms(record: Record) -> dict[str, Any]:
    norms = without_none(record.steps.column("norm"))
    usable = usable_norms(record)
    spikes = None
    if len(usable) >= _FEWEST_FOR_SPIKES:
        spikes = len(spikes_of(record)) / len(usable)
    return {
        "median_norm": median(norms),
        "max_norm": max(norms, default=None),
        "spike_share": spikes,
        "usable_steps": len(usable),
    }


def _losses(record: Record) -> dict[str, Any]:
    losses = list(compress(record.steps.column("loss"), record.steps.has("loss")))
    means = window_means(losses, max(10, len(losses) // 20))
    return {
        "final_loss": means[-1] if means else None,
        "best_loss": min(without_none(means), default=None),
        "diverged": bool(losses) and losses[-1] is None,
    }


def window_means(values: Sequence[float | None], width: int) -> list[float | None]:
    """Mean of every window of ``width`` values; None where a window holds None.

    Args:
        values: Numbers, None for a value that was not finite.
        width: The window; a shorter sequence is one window.

    Returns:
        One mean per full window.

    Example:
        >>> window_means([1.0, 3.0, None, 5.0, 7.0], 2)
        [2.0, None, None, 6.0]
    """
    width = min(width, len(values))
    if not width:
        return []
    # As whole multiples of one power of two the values have exact sums: an outlier that has left leaves nothing behind.
    filled, ratio = [value or 0.0 for value in values], methodcaller("as_integer_ratio")
    unit = max(denominator for _, denominator in map(ratio, filled))
    whole = (numerator * (unit // denominator) for numerator, denominator in map(ratio, filled))
    totals = list(accumulate(whole, initial=0))
    gaps = list(accumulate((value is None for value in values), initial=0))
    places = range(len(values) - width + 1)
    return [
        None if gaps[k + width] > gaps[k] else (totals[k + width] - totals[k]) / (unit * _LARGER) / width * _LARGER
        for k in places
    ]


_LARGER = 2**20
"""A window of the largest floats has a sum that is divided by it; powers of two round nothing."""


def _overhead_share(record: Record) -> float | None:
    end = record.end or {}
    wall, overhead = end.get("wall"), end.get("overhead_ms")
    return overhead / 1000 / wall if wall and overhead is not None else None


def _sentence(record: Record, numbers: dict[str, Any]) -> str:
    if not record.steps:
        return "No optimizer step was recorded."
    parts = [_clip_words(record, numbers), _norm_words(numbers), _fault_words(numbers)]
    parts += [] if numbers["recovery"] is None else [str(numbers["recovery"])]
    return " ".join(filter(None, parts))


def _clip_words(record: Record, numbers: dict[str, Any]) -> str:
    clips, share = numbers["clips"], percent(numbers["clip_share"] or 0.0)
    if not numbers["clipping"]:
        return f"No clipping in {counted(numbers['steps'], 'step')}."
    steps = _taken(numbers)
    if len(clips) > 1:
        each = shares_in_words(clips, max(numbers["taken_steps"], 1))
        each = f"{len(clips)} clips, on {steps}: {each}"
        if numbers["regime"] == "never":
            return f"{each}: none of them did anything."
        return f"{each}. Together they bound on {share}: {_regime_words(record, numbers)}."
    where = _where(record, numbers["threshold"])
    if numbers["regime"] == "never":
        return f"Clipping{where} never bound in {steps}."
    acted = clips[0].acted if clips else numbers["taken_steps"]
    some = f" ({percent(clips[0].bound / acted)} of the {acted:,} that it acted on)" if _acted_on_some(numbers) else ""
    return f"Clipping{where} bound on {share} of {steps}{some}: {_regime_words(record, numbers)}."


def _acted_on_some(numbers: dict[str, Any]) -> bool:
    clips = numbers["clips"]
    return bool(clips) and bool(clips[0].bound) and clips[0].acted < numbers["taken_steps"]


def _taken(numbers: dict[str, Any]) -> str:
    """The steps that a share is of: not all of the run, where some were skipped or not finite."""
    taken = numbers["taken_steps"]
    steps = counted(taken, "step")
    return steps if taken == numbers["steps"] else f"the {steps} that were taken and finite"


def _where(record: Record, threshold: float | None) -> str:
    rules = [rule for rule in record.steps.column("rule") if rule]
    how = f" by {rules[-1]}" if rules and rules[-1] != "norm" else ""
    return how if threshold is None else f"{how} at {plain_threshold(threshold)}"


def _regime_words(record: Record, numbers: dict[str, Any]) -> str:
    coefficient = f"{numbers['median_coefficient']:.2g}"
    if numbers["regime"] == "guard":
        return "a guard against rare large gradients"
    if numbers["regime"] == "shaping":
        return f"it shapes training, with a median coefficient of {coefficient} where it binds"
    if is_scale_free(record):
        return f"it normalises steps (median coefficient {coefficient}) rather than guarding them"
    return f"it works as a learning-rate multiplier of {coefficient}, not as a guard"


def _norm_words(numbers: dict[str, Any]) -> str:
    median, largest = numbers["median_norm"], numbers["max_norm"]
    if median is None:
        return "No finite gradient norm was recorded."
    times = f" ({number(largest / median)}x the median)" if median > 0 else ""
    share = numbers["spike_share"]
    usable = counted(numbers["usable_steps"], "step")
    spikes = "" if share is None else f"; {percent(share)} of {usable} after the warm-up were spikes"
    return f"Gradient norms before clipping: median {number(median)}, largest {number(largest)}{times}{spikes}."


def _fault_words(numbers: dict[str, Any]) -> str:
    skipped, lost = numbers["skipped_steps"], numbers["nonfinite_steps"]
    spikes = numbers["skipped_spikes"]
    first = f"{skipped:,} skipped{f' ({spikes:,} as finite spikes)' if spikes else ''}. " if skipped else ""
    of = f"Of {counted(numbers['steps'], 'step')}: " if skipped or lost else ""
    diverged = " The loss was not finite at the end." if numbers["diverged"] else ""
    return f"{of}{first}{lost:,} non-finite.{diverged}"

"""From what was measured on the device to lines of the record: the one place where tensors become numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gradguard.monitoring.observe.extras import Extras, histogram_of
from gradguard.monitoring.observe.measure import Norms
from gradguard.monitoring.observe.script_clips import EPSILON, FIXED, ScriptClip
from gradguard.monitoring.record.file import RecordWriter

_NAMED_AT_MOST = 5


@dataclass(slots=True)
class Row:
    """One optimizer step as it was seen; what is not on the CPU stays a tensor on its device until it is sent for.

    Attributes:
        index: Number of the step.
        norms: 2-norm of each gradient before any clip; empty where only `total` is known.
        places: The parameter that each norm belongs to, as a place in the names; -1 if it is not among them.
        post: 2-norm of all gradients after the clips, where that does not follow from what one of them told.
        losses: Losses that backward was called on since the step before.
        lr: Learning rate of the first parameter group: a number, or a copy of the script's tensor.
        clips: The script's own clips, in their order.
        clips_apart: Whether they acted on different parameters, so that no threshold is that of the step.
        applied_rule: The clip that the watcher applies itself, behind them.
        applied_threshold: Its threshold.
        user_threshold: The threshold of the script's last clip.
        guard_rule: The rule of a `Guard` that acted within the step; None if none did.
        guard_threshold: Its threshold.
        guard_coefficient: What it multiplied the gradients by.
        skipped: Whether a guard left the step out.
        norm_after: Whether ``norms`` are those after the clip, of which nobody knows what was before.
        amp_scale: Loss scale.
        optimizer: Which optimizer, where the script has several.
        wall: Seconds since the start.
        found_inf: GradScaler's flag for a fused optimizer: 1 means that the step was skipped.
        total: 2-norm of all gradients before any clip, where it does not follow from ``norms``.
        extras: What is measured now and then.
        late: Whether it holds tensors on a device, so that its numbers are known only when they have come.
        lost: Where processes measured together: above 0 if one of them could not.
    """

    index: int
    norms: Norms
    places: Sequence[int]
    post: Tensor | float | None = None
    losses: Sequence[Any] = ()
    lr: Any = None
    clips: Sequence[ScriptClip] = ()
    clips_apart: bool = False
    applied_rule: str | None = None
    applied_threshold: Any = None
    user_threshold: Any = None
    guard_rule: str | None = None
    guard_threshold: Any = None
    guard_coefficient: Any = None
    skipped: Any = None
    norm_after: bool = False
    amp_scale: Tensor | None = None
    optimizer: int | None = None
    wall: float = field(default=0.0)
    found_inf: Any = None
    total: Any = None
    extras: Extras | None = None
    late: bool = False
    lost: Any = None


@dataclass(slots=True)
class ScaleUpdate:
    """A loss scale before and after an update."""

    index: int
    before: Any
    after: Any
    late: bool = True


class Latest:
    """The last number of each kind for each parameter: where several optimizers take turns, each line has all.

    Args:
        count: Number of parameters.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._arrays: dict[str, list[float]] = {}

    def update(self, key: str, places: Sequence[int], values: Norms) -> list[float]:
        """Put ``values`` at ``places`` (-1: nowhere) and return the array; what was never measured is 0."""
        array = self._arrays.setdefault(key, [0.0] * self.count)
        for place, value in zip(places, _numbers(values), strict=True):
            if place >= 0:
                array[place] = value
        return array


def write_row(
    writer: RecordWriter, row: Row | ScaleUpdate, names: Sequence[str], every: int, latest: Latest | None = None
) -> None:
    """Write ``row`` as a ``step`` line, a ``tensors`` line every so many steps, and an ``event`` where one is due."""
    if isinstance(row, ScaleUpdate):
        _write_scale_update(writer, row)
        return
    norms = _numbers(row.norms)
    _write_step(writer, row, norms)
    if row.index % every == 0 or row.extras is not None:
        _write_tensors(writer, row, norms, latest or Latest(len(names)))
    elif latest is not None and row.optimizer is not None:
        latest.update("norm", row.places, norms)
    overflowed = row.amp_scale is not None and row.found_inf is not None and float(row.found_inf)
    if not overflowed and not all(map(math.isfinite, norms)):  # a scaler's search for its scale is an amp_skip
        _write_nonfinite(writer, row, norms, names)


def total_of(row: Row) -> float:
    """Return the 2-norm of all gradients of ``row`` before any clip."""
    return math.hypot(*_numbers(row.norms)) if row.total is None else float(row.total)


def _write_tensors(writer: RecordWriter, row: Row, norms: list[float], latest: Latest) -> None:
    if not norms and row.extras is None:
        return
    arrays: dict[str, Any] = {"norm": latest.update("norm", row.places, norms) if norms else None}
    extras = row.extras
    if extras is not None:
        scale = _number(extras.scale) or 1.0
        arrays["max"] = latest.update("max", row.places, [x / scale for x in _numbers(extras.max)])
        arrays["zeros"] = latest.update("zeros", row.places, extras.zeros)
        arrays["weight"] = latest.update("weight", row.places, extras.weight)
        if extras.update is not None:
            arrays["update"] = latest.update("update", row.places, extras.update)
        if extras.counts is not None:
            arrays["histogram"] = histogram_of(_numbers(extras.counts), scale)
    writer.write("tensors", i=row.index, **arrays)


def _write_step(writer: RecordWriter, row: Row, norms: Sequence[float]) -> None:
    total = total_of(row)
    clips, coefficient = _clips_of(row, total)
    told = min(clips, key=_strength) if clips else _Clip(None, None, None)
    overflowed = row.found_inf is not None and float(row.found_inf)
    writer.write(
        "step",
        i=row.index,
        wall=row.wall,
        loss=_mean([float(x) for x in row.losses]),
        lr=_number(row.lr),
        norm=total,
        post_norm=None if coefficient is None else total if row.norm_after else total * coefficient,
        coefficient=coefficient,
        threshold=None if row.clips_apart and len(row.clips) > 1 else told.threshold,
        rule=told.rule,
        clips=[[clip.rule, clip.threshold, clip.coefficient] for clip in clips] if len(clips) > 1 else None,
        user_max_norm=_number(row.user_threshold),
        amp_scale=_number(row.amp_scale),
        skipped=True if overflowed or _number(row.skipped) else None,
        nonfinite=0 if total < math.inf else sum(not math.isfinite(n) for n in norms) or 1,
        top=_dominant(row, norms, total),
        optimizer=row.optimizer,
    )


class _Clip(NamedTuple):
    """What one clip did at a step; None for what is not known, or a threshold that there is not."""

    rule: str | None
    threshold: float | None
    coefficient: float | None


def _clips_of(row: Row, total: float) -> tuple[list[_Clip], float | None]:
    """Tell what clipped, and how much.

    Returns:
        The clips that acted: the script's own, the one that the watcher applies, the guard's; and what gradients were
        multiplied by in all, if that is known.
    """
    script = [_Clip(clip.rule, _threshold(clip.threshold), _of_clip(clip, row, total)) for clip in row.clips]
    clips = [clip for clip in script if clip.rule not in FIXED or clip.threshold != math.inf]  # others only measure
    known = math.prod(clip.coefficient for clip in clips if clip.coefficient is not None)
    if row.applied_rule is not None:
        clips.append(_Clip(row.applied_rule, _threshold(row.applied_threshold), None))
    unknown = [k for k, clip in enumerate(clips) if clip.coefficient is None]
    coefficient = None
    if clips and row.post is not None:
        coefficient = min(1.0, float(row.post) / total) if total > 0 else 1.0
    elif clips and not unknown:
        coefficient = known
    elif len(unknown) == 1 and row.applied_rule == "norm":
        threshold = clips[-1].threshold
        coefficient = None if threshold is None else known * min(1.0, threshold / (total * known + EPSILON))
    if coefficient is not None and len(unknown) == 1 and known > 0:
        clips[unknown[0]] = clips[unknown[0]]._replace(coefficient=min(1.0, coefficient / known))
    if row.guard_rule is not None:
        own = _number(row.guard_coefficient)
        clips.append(_Clip(row.guard_rule, _threshold(row.guard_threshold), own))
        coefficient = own if coefficient is None or own is None else own * coefficient
    finite = math.isfinite(total)
    told = [
        _Clip(rule, None if threshold == math.inf else threshold, one if finite else None)
        for rule, threshold, one in clips
    ]
    return told, coefficient if finite else None


def _threshold(value: Any) -> float | None:
    number = _number(value)
    return number if number is None or math.isfinite(number) else math.inf


def _of_clip(clip: ScriptClip, row: Row, total: float) -> float | None:
    """What a clip of the script's multiplied the gradients by, if it told that or its norm."""
    coefficient, norm, threshold = _number(clip.coefficient), _number(clip.norm), _number(clip.threshold)
    if coefficient is not None:
        return coefficient
    if clip.rule != "norm" or threshold is None:
        return None
    norm = total if norm is None and len(row.clips) == 1 else norm
    return None if norm is None or not math.isfinite(norm) else min(1.0, threshold / (norm + EPSILON))


def _strength(clip: _Clip) -> float:
    """What decides which of several clips bound: the smallest coefficient."""
    return math.inf if clip.coefficient is None else clip.coefficient


def _dominant(row: Row, norms: Sequence[float], total: float) -> list[float] | None:
    """The parameter with the largest share of the squared norm, and that share."""
    if not norms or not 0 < total < math.inf:
        return None
    norm, place = max(zip(norms, row.places, strict=True))
    return [place, (norm / total) ** 2] if place >= 0 else None


def _write_nonfinite(writer: RecordWriter, row: Row, norms: Sequence[float], names: Sequence[str]) -> None:
    bad = [place for place, norm in zip(row.places, norms, strict=True) if not math.isfinite(norm)]
    shown = ", ".join(names[place] if place >= 0 else "unnamed" for place in bad[:_NAMED_AT_MOST])
    more = f" and {len(bad) - _NAMED_AT_MOST} more" if len(bad) > _NAMED_AT_MOST else ""
    writer.write(
        "event",
        i=row.index,
        kind="nonfinite",
        severity="error",
        message=f"gradients of {shown}{more} are not finite",
        advice="find the operation with torch.autograd.set_detect_anomaly(True), or lower the learning rate",
        params=[names[place] for place in bad if place >= 0],
        optimizer=row.optimizer,
    )


def _write_scale_update(writer: RecordWriter, update: ScaleUpdate) -> None:
    before, after = float(update.before), float(update.after)
    if after < before:
        writer.write(
            "event",
            i=update.index,
            kind="amp_skip",
            severity="info",
            message=f"the loss scale fell from {before:g} to {after:g}: gradients overflowed, a step was skipped",
            advice="a few of these are normal; a scale that keeps falling is not",
        )


def _numbers(values: Norms) -> list[float]:
    return values.tolist() if isinstance(values, Tensor) else values


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

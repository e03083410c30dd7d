"""From what was measured on the device to lines of the record: the one place where tensors become numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gradguard.watch.extras import Extras, histogram_of
from gradguard.watch.measure import Norms
from gradguard.watch.record import RecordWriter

EPSILON = 1e-6
"""What PyTorch's norm clip adds to the norm before it divides."""

_NAMED_AT_MOST = 5

_FIXED = {"norm", "value", "adaptive"}
"""Rules with one threshold from the first step on."""


@dataclass(slots=True)
class Row:
    """One optimizer step as it was seen; what is not on the CPU stays a tensor on its device until it is sent for.

    Attributes:
        index: Number of the step.
        norms: 2-norm of each gradient before any clip; empty where only `total` is known.
        places: The parameter that each norm belongs to, as a place in the names; -1 if it is not among them.
        post: 2-norm of all gradients after a clip that was not a norm clip.
        losses: Losses that backward was called on since the step before.
        lr: Learning rate of the first parameter group: a number, or a copy of the script's tensor.
        rule: The clip that acted, if one did.
        threshold: Its threshold.
        user_threshold: The script's own threshold.
        clip_norm: The norm that the script's clip took, where it is not the norm of exactly these gradients.
        coefficient: What the script's clip multiplied the gradients by, where it told.
        user_rule: The script's own rule.
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
    rule: str | None = None
    threshold: Any = None
    user_threshold: Any = None
    clip_norm: Any = None
    coefficient: Any = None
    user_rule: str | None = None
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
    clips = _clips_of(row, total)
    told = min(clips, key=_strength) if clips else _Clip(None, None, None)
    coefficients = [clip.coefficient for clip in clips if clip.coefficient is not None]
    coefficient = math.prod(coefficients) if coefficients and math.isfinite(total) else None
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
        threshold=told.threshold,
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


def _clips_of(row: Row, total: float) -> list[_Clip]:
    """The clips that acted, in their order: the script's own, the one that the watcher applies, the guard's."""
    clips = []
    threshold = _number(row.threshold)
    bounded = threshold is not None and math.isfinite(threshold)
    if row.rule is not None and (threshold is None or bounded or row.rule not in _FIXED):  # max_norm=inf only measures
        both = _coefficient(row, total, threshold) if math.isfinite(total) else None
        users = _users_clip(row, total)
        if users is not None and users.coefficient and both is not None:
            both = min(1.0, both / users.coefficient)
        clips = [*([] if users is None else [users]), _Clip(row.rule, threshold if bounded else None, both)]
    if row.guard_rule is not None:
        threshold = _number(row.guard_threshold)
        finite = threshold is not None and math.isfinite(threshold)
        clips.append(_Clip(row.guard_rule, threshold if finite else None, _number(row.guard_coefficient)))
    return clips


def _users_clip(row: Row, total: float) -> _Clip | None:
    """The script's own clip, where the watcher applied another one after it."""
    if row.user_rule is None:
        return None
    threshold, coefficient, norm = _number(row.user_threshold), _number(row.coefficient), _number(row.clip_norm)
    if coefficient is None and row.user_rule == "norm" and threshold is not None and math.isfinite(total):
        coefficient = min(1.0, threshold / ((total if norm is None else norm) + EPSILON))
    return _Clip(row.user_rule, threshold, coefficient)


def _strength(clip: _Clip) -> float:
    """What decides which of several clips bound: the smallest coefficient."""
    return math.inf if clip.coefficient is None else clip.coefficient


def _coefficient(row: Row, total: float, threshold: float | None) -> float | None:
    """What the gradients were multiplied by: known for a norm clip, the ratio of the norms for any other."""
    if row.post is not None:
        return min(1.0, float(row.post) / total) if total > 0 else 1.0
    if row.coefficient is not None and row.user_rule is None:
        return float(row.coefficient)
    if threshold is None:
        return None
    clip_norm = _number(row.clip_norm)
    return min(1.0, threshold / ((total if clip_norm is None else clip_norm) + EPSILON))


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

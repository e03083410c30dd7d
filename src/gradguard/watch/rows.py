"""From what was measured on the device to lines of the record: the one place where tensors become numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradguard.watch.record import RecordWriter

EPSILON = 1e-6
"""What PyTorch's norm clip adds to the norm before it divides."""

_NAMED_AT_MOST = 5


@dataclass(slots=True)
class Row:
    """One optimizer step as it was seen; tensors stay on their device until `write_row`.

    Attributes:
        index: Number of the step.
        norms: 2-norm of each gradient before any clip.
        places: The parameter that each norm belongs to, as a place in the names; -1 if it is not among them.
        post: 2-norm of all gradients after a clip that was not a norm clip.
        losses: Losses that backward was called on since the step before.
        lr: Learning rate of the first parameter group: a number, or a copy of the script's tensor.
        rule: The clip that acted, if one did.
        threshold: Its threshold.
        user_threshold: The script's own threshold.
        clip_norm: The norm that the script's clip took, where it is not the norm of exactly these gradients.
        amp_scale: Loss scale.
        optimizer: Which optimizer, where the script has several.
        wall: Seconds since the start.
        found_inf: GradScaler's flag for a fused optimizer: 1 means that the step was skipped.
    """

    index: int
    norms: Tensor
    places: Sequence[int]
    post: Tensor | None = None
    losses: Sequence[Tensor] = ()
    lr: Any = None
    rule: str | None = None
    threshold: Any = None
    user_threshold: Any = None
    clip_norm: Any = None
    amp_scale: Tensor | None = None
    optimizer: int | None = None
    wall: float = field(default=0.0)
    found_inf: Tensor | None = None


@dataclass(slots=True)
class ScaleUpdate:
    """A loss scale before and after an update."""

    index: int
    before: Tensor
    after: Tensor


def write_row(writer: RecordWriter, row: Row | ScaleUpdate, names: Sequence[str], every: int) -> None:
    """Write ``row`` as a ``step`` line, a ``tensors`` line every so many steps, and an ``event`` where one is due."""
    if isinstance(row, ScaleUpdate):
        _write_scale_update(writer, row)
        return
    norms = row.norms.tolist()
    _write_step(writer, row, norms)
    if row.index % every == 0:
        by_place = [0.0] * len(names)
        for place, norm in zip(row.places, norms, strict=True):
            if place >= 0:
                by_place[place] = norm
        writer.write("tensors", i=row.index, norm=by_place)
    if not all(map(math.isfinite, norms)):
        _write_nonfinite(writer, row, norms, names)


def _write_step(writer: RecordWriter, row: Row, norms: Sequence[float]) -> None:
    total = math.hypot(*norms)
    threshold = _number(row.threshold)
    clips = row.rule is not None and (threshold is None or math.isfinite(threshold))
    coefficient = _coefficient(row, total, threshold) if clips and math.isfinite(total) else None
    writer.write(
        "step",
        i=row.index,
        wall=row.wall,
        loss=_mean([float(x) for x in row.losses]),
        lr=_number(row.lr),
        norm=total,
        post_norm=total * coefficient if coefficient is not None else None,
        coefficient=coefficient,
        threshold=threshold if clips else None,
        rule=row.rule if clips else None,
        user_max_norm=_number(row.user_threshold),
        amp_scale=_number(row.amp_scale),
        skipped=True if row.found_inf is not None and float(row.found_inf) else None,
        nonfinite=sum(not math.isfinite(n) for n in norms),
        top=_dominant(row, norms, total),
        optimizer=row.optimizer,
    )


def _coefficient(row: Row, total: float, threshold: float | None) -> float | None:
    """What the gradients were multiplied by: known for a norm clip, the ratio of the norms for any other."""
    if row.post is not None:
        return min(1.0, float(row.post) / total) if total > 0 else 1.0
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


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

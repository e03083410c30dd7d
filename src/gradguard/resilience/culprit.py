"""`find_culprit`: find the rank, the micro-batch and the samples that caused a spike, by their loss."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradguard.distributed.processes import gather
from gradguard.errors import GradguardError, InvalidValueError
from gradguard.json_values import jsonable
from gradguard.resilience.batch_iterators import Batches, MicroBatch, SampleId

ENOUGH = 8
"""Number of losses that suffice to define the usual level."""

FAR = 6.0
"""Number of deviations above the usual level at which a loss stands out."""

_TASK = "look for the culprit of a spike"


@dataclass(frozen=True)
class Culprit:
    """The result of `find_culprit`, equal on all processes, as Python values.

    Attributes:
        step: The number of the spike's step.
        blamed: The micro-batches whose loss stands out, the highest first; empty if none can be blamed.
        scores: How far the loss of each of ``micro_batches`` is above the usual level, in deviations.
        micro_batches: The micro-batches of the step, of all ranks.
        reason: A sentence on why these are blamed, or why none is.
    """

    step: int
    blamed: tuple[MicroBatch, ...]
    scores: tuple[float | None, ...]
    micro_batches: tuple[MicroBatch, ...]
    reason: str

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """The samples of the blamed micro-batches; the loss does not show which of them are bad."""
        return tuple(dict.fromkeys(one for batch in self.blamed for one in batch.ids or ()))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return jsonable({**asdict(self), "ids": list(self.ids)})


def find_culprit(batches: Batches, step: int, *, group: Any = None) -> Culprit:
    r"""Find the micro-batches that made a step a spike, by their loss; all processes call it for the same step.

    With x the logarithms of the micro-batches' losses of the earlier steps in the ring, on all ranks, a micro-batch is
    blamed if

    .. math:: \log L - \operatorname{median}(x) > 6 \max(1.4826 \operatorname{MAD}(x), 0.05)

    (by the losses themselves, with a floor of 5 % of the median, if one is not positive). It costs one gather of
    a few numbers, so call it only after a spike.

    **Guarantees.** A micro-batch is never blamed because its loss is the largest, only because it stands out. If most
    of a step's micro-batches stand out, the data of one of them is not the cause, and none is blamed.

    | case | blamed |
    |---|---|
    | one loss of several stands out | its micro-batch |
    | the only micro-batch of a step stands out | that one: its data or the weights; see `gradguard replay-step` |
    | most of several stand out | none: bad weights, or a change in all the data |
    | none stands out | none: the norm rose without the loss |
    | a loss that is NaN or infinite | its micro-batch |
    | fewer than 8 losses to compare with | none |

    Args:
        batches: The object that recorded the batches.
        step: Number of the step, which must still be in the ring.
        group: The processes that take part; None for all.

    Returns:
        The blamed micro-batches, equal on all processes.

    Raises:
        InvalidValueError: If the step is no longer in the ring, on any process.

    Example:
        >>> import torch
        >>> from gradguard.resilience import Batches, find_culprit
        >>> batches = Batches()
        >>> for step in range(9):
        ...     for micro_batch in range(2):
        ...         batches.saw([4 * step + 2 * micro_batch, 4 * step + 2 * micro_batch + 1])
        ...         batches.record_loss(9.0 if (step, micro_batch) == (8, 1) else 1.0)
        ...     number = batches.end_step()
        >>> find_culprit(batches, 8).ids
        (34, 35)
    """
    (here,), usual = _of_all_ranks(batches, [step], group)
    if errors := [one for one in here if isinstance(one, str)]:
        raise InvalidValueError(errors[0])
    return _culprit(step, here, usual)


def find_culprits(batches: Batches, steps: Sequence[int], *, group: Any = None) -> tuple[Culprit, ...]:
    """Return the `Culprit` of each step of a burst, with one gather; no step of the burst counts as usual.

    Steps that some process no longer has are omitted. All processes call it for the same steps.

    Args:
        batches: The object that recorded the batches.
        steps: Numbers of the steps in increasing order, at least one.
        group: The processes that take part; None for all.

    Returns:
        One `Culprit` for each step, equal on all processes.
    """
    of_steps, usual = _of_all_ranks(batches, steps, group)
    return tuple(
        _culprit(step, here, usual)
        for step, here in zip(steps, of_steps, strict=True)
        if not any(isinstance(one, str) for one in here)
    )


def to_leave_out(culprits: Sequence[Culprit]) -> tuple[tuple[MicroBatch, ...], tuple[MicroBatch, ...]]:
    """Return the micro-batches blamed for a burst, and all micro-batches of the steps whose cause is unclear.

    A step in which no loss stands out does not belong to the burst, unless that is so in all steps.

    Args:
        culprits: The result of `find_culprits`.
    """
    blamed = tuple(one for culprit in culprits for one in culprit.blamed)
    unclear = [one for one in culprits if not one.blamed]
    # A step is unclear if no score is known, or if one stands out and none is blamed.
    whole = [one for one in unclear if max((s for s in one.scores if s is not None), default=math.inf) > FAR]
    if not blamed and not whole:
        whole = unclear
    return blamed, tuple(one for culprit in whole for one in culprit.micro_batches)


def _culprit(step: int, of_ranks: Sequence[Any], usual: list[float]) -> Culprit:
    here = tuple(one for micro_batches in of_ranks for one in micro_batches)
    if len(usual) < ENOUGH:
        usual = usual + finite(one.loss for one in here)
    is_usual = len(usual) >= ENOUGH
    scores = tuple(deviations(one.loss, usual) if is_usual and one.loss is not None else None for one in here)
    known = [(score, one) for score, one in zip(scores, here, strict=True) if score is not None]
    out = sorted((pair for pair in known if pair[0] > FAR), key=lambda pair: -pair[0])
    blamed = tuple(one for _, one in out)
    if not known:
        why = f"only {len(usual)} losses are known" if any(one.loss is not None for one in here) else "no loss is known"
        reason = (
            f"{why}, but {ENOUGH} are needed to define the usual level: pass each to guard.record_loss(loss) or "
            "batches.record_loss(loss)."
        )
    elif not out:
        highest = max(score for score, _ in known)
        reason = f"the loss of no micro-batch stands out (the highest by {highest:.1f} deviations)."
    elif len(known) > 1 and 2 * len(out) > len(known):
        blamed = ()
        reason = f"{len(out)} of {len(known)} micro-batches stand out: the weights, or a change in all the data."
    else:
        score, first = out[0]
        far = f"a loss of {first.loss:.4g}, {score:.1f} deviations above the usual ones"
        alone = " It is the only one of the step: its data or the weights." if len(here) == 1 else ""
        reason = f"micro-batch {first.number} of rank {first.rank} has {far}.{alone}"
    return Culprit(step, blamed, scores, here, reason)


def deviations(value: float, usual: Sequence[float], floor: float = 0.05) -> float:
    """Return how far ``value`` is above the median of ``usual``, in deviations as `SpikeDetector` defines them.

    Args:
        value: NaN and infinity count as infinitely far above.
        usual: Finite numbers, at least one.
        floor: The least deviation, relative to the median.
    """
    if not math.isfinite(value):
        return math.inf
    least = floor * abs(median(usual))
    if min(usual) > 0:
        value, usual, least = math.log(value) if value > 0 else -math.inf, [*map(math.log, usual)], floor
    middle = median(usual)
    spread = max(1.4826 * median(abs(x - middle) for x in usual), least)
    if value == middle:
        return 0.0
    return (value - middle) / spread if spread else math.copysign(math.inf, value - middle)


def _of_all_ranks(batches: Batches, steps: Sequence[int], group: Any) -> tuple[list[Any], list[float]]:
    """Return each step's micro-batches by rank (an error text if a rank has none), and the earlier finite losses."""
    earlier = [one.loss for s in batches.known if s < steps[0] for one in batches.of_step(s)]
    own: list[Any] = []
    for step in steps:
        try:
            own.append(batches.of_step(step))
        except GradguardError as error:
            own.append(str(error))
    gathered = gather((own, finite(earlier)), group, _TASK)
    of_steps = list(zip(*(of_rank for of_rank, _ in gathered), strict=True))
    return of_steps, [loss for _, losses in gathered for loss in losses]


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor NaN or infinite."""
    return [one for one in values if one is not None and math.isfinite(one)]

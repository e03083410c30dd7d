"""The recommendation that follows from a diagnosis: keep a clip, set a threshold, clip nothing, or fix a fault."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gradguard.monitoring.judge.diagnosis import Diagnosis, diagnose
from gradguard.monitoring.judge.insurance import insurance
from gradguard.monitoring.judge.norm_statistics import are_scaled, drift_of
from gradguard.monitoring.judge.numbers import capital, number, only, percent, plain_threshold
from gradguard.monitoring.judge.scale_free import reads_signs_alone
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.step_rows import bound_on, by_optimizer, taken_steps, usable_norms

ENOUGH_STEPS = 200
"""Fewer usable steps say nothing about rare spikes."""

ORDINARY_SHARE = 0.5
"""Share of the steps: a threshold that binds on more of them sets the length of ordinary steps, and is no insurance."""

NEARLY_ALL = 0.9
"""Share of the steps: a threshold that binds on more of them is below the norm of an ordinary step."""

STILL_INSURANCE = 5.0
"""Times the threshold that `insurance` returns: a clip in use up to this threshold bounds the next spike as well."""

CLIPPED_FIRST = ("bad_batches", "exploding_time")
"""Causes whose damage a clip bounds: for these the decision is a constant, in addition to the advice."""


@dataclass(frozen=True)
class Recommendation:
    """A decision with its reason.

    Attributes:
        kind: ``"keep"`` the clip as it is, ``"constant"`` threshold, ``"rule"`` that follows the norms, ``"nothing"``
            to clip, ``"fix"`` something else first, or ``"unknown"`` where the record cannot say.
        headline: The decision in one sentence.
        reason: The reason, in plain sentences that a person can act on.
        threshold: The constant of ``"keep"``, ``"constant"`` and ``"fix"``, or None.
        rule: A rule for ``gradguard run --clip``, such as ``"norm=1.3"`` or ``"median"``; None where there is no rule
            to try.
        rate_factor: The factor to multiply the learning rate by, for ``"fix"``.
        experiment: Whether the record cannot tell which clip is best, but ``gradguard tune`` can.
        clip_share: The share of the usable steps on which the threshold would have bound.
        usable_steps: The number of steps behind these numbers.
        drift: The median norms between which the run drifted, in the order of time; None without drift.
        parts: The label and the recommendation of each optimizer, where the record has several.
    """

    kind: str
    headline: str
    reason: str
    threshold: float | None = None
    rule: str | None = None
    rate_factor: float | None = None
    experiment: bool = False
    clip_share: float | None = None
    usable_steps: int = 0
    drift: tuple[float, float] | None = None
    parts: tuple[tuple[str, "Recommendation"], ...] = ()


@once
def recommend(record: Record) -> Recommendation:
    """Decide what to do about clipping, from the diagnosis of a run.

    =======================================  ========  =================================================================
    the first cause                          kind      threshold or rule
    =======================================  ========  =================================================================
    healthy, and the run's own clip bound    keep      that clip
    or already is insurance
    healthy, and a constant is insurance     constant  `insurance`: it does not bind in calm times; where norms are
                                                       uneven, a low one that trains better, with an experiment
    healthy, and most norms are equal        unknown   none: code that was not observed scales gradients
    healthy otherwise, or the optimizer      nothing   none
    reads only signs
    bad_batches, exploding_time              constant  the norm that leaves ordinary steps alone
    unknown                                  unknown   none
    parameters that are frozen, in a run     unknown   none: the user is asked whether they should stay frozen
    that learns
    any other                                fix       the threshold of the cause's advice, if it has one
    several optimizers                       unknown   a decision for each
    =======================================  ========  =================================================================

    **Guarantees**: ``"keep"`` and ``"nothing"`` are returned only for the cause ``"healthy"``; a run with an error
    among its findings is not healthy (`diagnose`).

    Args:
        record: The record of a run, clipped or not.

    Returns:
        The decision.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 1.0, "loss": 2.0, "lr": 0.0} for i in range(300)]
        >>> found = recommend(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False))
        >>> found.kind, found.headline
        ('fix', 'Set lr above 0, such as 1e-3 for Adam or 0.1 for SGD.')
    """
    parts = by_optimizer(record)
    if len(parts) == 1:
        return _decide(parts[0].record, diagnose(record))
    made = [(part.label, recommend(part.record)) for part in parts]
    said = " ".join(f"{capital(label)}: {one.headline} {one.reason}".strip() for label, one in made)
    usable = sum(one.usable_steps for _, one in made)
    # True if two optimizers share fewer than half of their losses: they step on losses of their own, as in a GAN
    losses = pairwise([set(part.record.steps.column("loss")) - {None} for part in parts])
    experiment = any(one and other and len(one & other) < 0.5 * min(len(one), len(other)) for one, other in losses)
    if experiment:
        said += f" Their losses differ and do not show the result; {_tune(record)} --metric REGEX compares results."
    headline = "Several optimizers step in this run, and each has its own decision."
    return Recommendation("unknown", headline, said, experiment=experiment, usable_steps=usable, parts=tuple(made))


def _decide(record: Record, diagnosis: Diagnosis) -> Recommendation:
    cause, norms = diagnosis.cause, usable_norms(record)
    if cause.key == "healthy":
        return _for_healthy(record, norms)
    threshold = cause.threshold if (cause.threshold or 0.0) >= sys.float_info.min else None
    rule = None if threshold is None else f"norm={plain_threshold(threshold)}"
    # the first sentence of the advice becomes the headline; the other sentences and the evidence become the reason
    headline, stop, rest = cause.advice.partition(". ")
    reason = " ".join(filter(None, [rest, *(evidence.words for evidence in cause.evidence[:2])]))
    kind = "unknown" if cause.may_be_meant and diagnosis.progress else "fix"
    made = Recommendation(
        kind, f"{headline}{stop.strip()}", reason, threshold, rule, cause.rate_factor, cause.certainty != "certain",
        usable_steps=len(norms), drift=drift_of(record),
    )  # fmt: skip
    if cause.key == "unknown":
        return replace(made, kind="unknown", headline=cause.sentence, reason=cause.advice)
    if cause.key in CLIPPED_FIRST and threshold is not None and norms:
        share = _share_above(threshold, norms)
        headline = f"Clip at {plain_threshold(threshold)}."
        level = "the norm of an ordinary step"
        if share > NEARLY_ALL:
            level = "below the norm of an ordinary step, which is mostly noise here"
        reason = f"It is {level}, and would have acted on {percent(share)} of {len(norms):,} steps."
        return replace(made, kind="constant", headline=headline, reason=reason, clip_share=share)
    return made


def _share_above(threshold: float, norms: Sequence[float]) -> float:
    return sum(norm > threshold for norm in norms) / len(norms)


def _for_healthy(record: Record, norms: Sequence[float]) -> Recommendation:
    if reads_signs_alone(record):
        why = "The optimizer reads only the signs of gradients. A clip does not change these, so it changes no step."
        return Recommendation("nothing", "There is nothing to clip.", why, usable_steps=len(norms))
    threshold, drift = insurance(record), drift_of(record)
    kept = _of_clip_in_use(record, norms, threshold)
    if kept is not None:
        return kept
    if len(norms) < ENOUGH_STEPS:
        why = f"The record has {len(norms)} usable steps; {ENOUGH_STEPS} are needed to know how rare spikes are."
        return Recommendation("unknown", "Record a longer run to choose a threshold.", why, usable_steps=len(norms))
    if are_scaled(record):
        headline = "Look for a hand-written clip: choosing a threshold needs the norms before it."
        why = "Most norms are equal to three digits: code that was not observed scales gradients before the step."
        return Recommendation("unknown", headline, why, usable_steps=len(norms))
    if threshold is None:
        assert drift is not None  # with norms, `insurance` returns None only for norms that drift
        times = number(max(drift) / min(drift))
        why = (
            f"The usual norm went from {number(drift[0])} to {number(drift[1])}: a threshold above the larger norms "
            f"would let jumps by a factor of {times} through among the smaller ones."
        )
        return Recommendation("nothing", "There is nothing to clip.", why, usable_steps=len(norms), drift=drift)
    text, share = plain_threshold(threshold), _share_above(threshold, norms)
    would = f"would have acted on {percent(share)} of {len(norms):,} usable steps"
    headline = f"As insurance, clip at {text}."
    why = f"The run needs no clip. This one {would}, and limits the next spike, a sudden jump of the gradients."
    if share > ORDINARY_SHARE:
        headline = f"A clip at {text} may train better."
        why = (
            f"The run goes well without it. It {would}. With gradients as uneven as these, so low a threshold trained "
            f"better on the tasks where it was tried; an experiment shows whether it does on yours: {_tune(record)}."
        )
    return Recommendation(
        "constant", headline, why, threshold, f"norm={text}", None, share > ORDINARY_SHARE, share, len(norms), drift
    )  # fmt: skip


def _of_clip_in_use(record: Record, norms: Sequence[float], insured_at: float | None) -> Recommendation | None:
    """Return the decision to keep the one clip that a healthy run used throughout, if it bound or is insurance."""
    taken = taken_steps(record)
    rule, threshold = (only(set(record.steps.column(key))) for key in ("rule", "threshold"))
    if rule is None:
        return None
    share = sum(bound_on(taken)) / max(1, len(taken))
    text = str(rule) if threshold is None else f"{rule}={plain_threshold(threshold)}"
    fixed, spelled, shown = None, None, text
    if threshold is not None and rule == "norm":
        fixed, spelled, shown = threshold, text, plain_threshold(threshold)
    headline, acted = f"Keep {shown}.", f"{percent(share)} of {len(taken):,} steps"
    why = f"It acted on {acted}, and the run is well with it."
    if not share:
        if fixed is None or insured_at is None or fixed > STILL_INSURANCE * insured_at:
            return None
        headline = f"Keep {shown} as insurance."
        why = f"It never acted in {len(taken):,} steps, and limits the next spike, a sudden jump of the gradients."
    return Recommendation("keep", headline, why, fixed, spelled, None, False, share, len(norms), drift_of(record))


def _tune(record: Record) -> str:
    return f"gradguard tune {record.script}"

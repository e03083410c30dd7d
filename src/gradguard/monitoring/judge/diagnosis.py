"""The diagnosis of a run: its causes, ranked, from the findings and the numbers of its record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.causes import EXCLUDES, KEYS, causes_of
from gradguard.monitoring.judge.findings import Finding, worst_first
from gradguard.monitoring.judge.followed import helped
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.numbers import capital, number
from gradguard.monitoring.judge.signals import A_LITTLE, FEWEST_STEPS, RunSignals, middle, signals_of
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.step_rows import by_optimizer
from gradguard.words import counted

__all__ = ["KEYS", "Cause", "Diagnosis", "Evidence", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        causes: The causes, ranked; never empty.
        helped: One sentence on whether the earlier decision that this run followed has helped; empty where it followed
            none.
        parts: The label and the diagnosis of each optimizer, where the record has several.
        progress: A sentence that the run learns nevertheless: its loss fell (also since parts were frozen), nothing
            else warns, and the cause is only likely. Empty otherwise.
    """

    causes: tuple[Cause, ...]
    helped: str = ""
    parts: tuple[tuple[str, "Diagnosis"], ...] = ()
    progress: str = ""

    @property
    def cause(self) -> Cause:
        """The first cause."""
        return self.causes[0]

    @property
    def sentence(self) -> str:
        """The headline: whether the followed decision helped, whether the run learns, and the first cause."""
        return " ".join(filter(None, (self.helped, self.progress, self.cause.sentence)))

    @property
    def is_well(self) -> bool:
        """True if nothing is wrong with the run, as far as its record shows."""
        return self.cause.key == "healthy"


@once
def diagnose(record: Record) -> Diagnosis:
    """Find the causes of a run's behaviour.

    Each cause is searched for independently (`causes.CAUSES`). The most certain cause comes first; among equally
    certain ones, the first in the table. Where no cause is at least likely, the run is well, or too short to judge.

    **Guarantees**: a run with an error among its findings is never well; a record always gives the same diagnosis.

    **Edge cases**: each of several optimizers is judged by its own steps, and the most certain cause of all comes
    first. Losses of optimizers that take turns are not judged: the losses of networks that work against each other do
    not measure progress. One loss shared by several optimizers, such as Muon and AdamW, is judged with each of them.

    Args:
        record: The record of a run.

    Returns:
        At least one cause.

    Example:
        >>> from pathlib import Path
        >>> steps = [{"t": "step", "i": i, "norm": 1.0, "loss": 2.0, "lr": 0.0} for i in range(300)]
        >>> found = diagnose(Record(Path("run.jsonl"), {"t": "meta"}, steps, [], [], None, False))
        >>> found.cause.key, found.sentence
        ('rate_zero', 'The learning rate is 0: nothing is trained.')
    """
    parts = by_optimizer(record)
    if len(parts) == 1:
        signals = signals_of(parts[0].record)
        causes = sorted(causes_of(signals), key=attrgetter("doubt"))
        if not causes or causes[0].certainty == "possible":
            causes.insert(0, _without_cause(signals, causes))
        first, *others = causes
        excluded = EXCLUDES.get(first.key, ()) if first.rules_out else ()
        causes = (first, *(cause for cause in others if cause.key not in excluded))
        return Diagnosis(causes, helped(signals), progress=_progress(signals, first))
    each = [(part.label, diagnose(part.record)) for part in parts]
    sick = [
        cause.for_optimizer(label)
        for label, one in each
        for cause in one.causes
        if cause.key not in ("healthy", "unknown")
    ]
    sick.sort(key=attrgetter("doubt"))
    if sick and sick[0].certainty != "possible":
        learns = all(one.progress or one.is_well for _, one in each)
        progress = next((one.progress for _, one in each if one.progress), "") if learns else ""
        return Diagnosis(tuple(sick), parts=tuple(each), progress=progress)
    firsts = [one.cause for _, one in each]
    whole = next((cause for cause in firsts if cause.key == "unknown"), firsts[0])
    shared = (one for one in whole.rules_out if all(one in cause.rules_out for cause in firsts))
    whole = replace(whole, rules_out=tuple(shared))
    return Diagnosis((whole, *sick), parts=tuple(each))


SYMPTOMS = ("clipping_always_on", "logits_grow", "recurring_spikes")
"""Kinds of findings that are warnings in a sick run, and infos in a run that is well."""


_CLIP_CAUSES = ("clip_before_unscale", "clip_starves")
_AS_DIAGNOSED = "follow the diagnosis, which says what to do about this clip"


@once
def weighed_findings(record: Record) -> list[Finding]:
    """Return the health findings, with severity and advice adjusted to the diagnosis.

    **Guarantees**: the findings are those of `findings`, with two exceptions. `SYMPTOMS` become ``"info"`` in a run
    that is well. The advice of ``clipping_always_on`` points to the diagnosis where a cause is about the clip.

    Args:
        record: The record of a run.

    Returns:
        The findings, errors first, then in the order of steps.
    """
    found, diagnosis = findings(record), diagnose(record)
    if any(cause.key in _CLIP_CAUSES for cause in diagnosis.causes):  # the cause's advice covers the clip
        found = [replace(one, advice=_AS_DIAGNOSED) if one.kind == "clipping_always_on" else one for one in found]
    if not diagnosis.is_well:
        return found
    return worst_first(replace(one, severity="info") if one.kind in SYMPTOMS else one for one in found)


def _progress(signals: RunSignals, cause: Cause) -> str:
    """Return a sentence that the run learns, if the cause is only likely, the loss falls and nothing else warns."""
    curve = signals.curve
    warned = any(one.severity != "info" and Evidence.of(one) not in cause.evidence for one in signals.found)
    none = cause.key in ("healthy", "unknown", "not_started", "drift") or cause.certainty != "likely"
    if none or warned or not curve.has_fallen or (curve.stands_still and curve.fallen < A_LITTLE):
        return ""
    since = sum(one < cause.evidence[0].steps[0] for one in signals.numbers)
    if cause.may_be_meant and curve.final >= middle(signals.loss.known(since, since + 10)) - curve.error:
        return ""  # the loss has not fallen since the cause began
    went = f"from {number(curve.start)} to {signals.ends_at}"
    return f"Your run learns: its loss fell {went}. What may stand in its way:"


def _without_cause(signals: RunSignals, others: Sequence[Cause]) -> Cause:
    """Return the first cause where the table has none: an unexplained error, a record that cannot tell, or health."""
    error = next((one for one in signals.found if one.severity == "error"), None)
    if error is not None:
        sentence = f"Something is wrong, but the record does not show why: {error.message}."
        return Cause("unknown", "likely", sentence, f"{capital(error.advice)}.", (Evidence.of(error),))
    if not any(norm is not None for norm in signals.norms):
        return Cause(
            "unknown", "certain", "The record has no norms by which to judge the run.", _no_norms(signals.record)
        )
    if signals.count < FEWEST_STEPS:
        sentence = f"The record has {counted(signals.count, 'step')}, too few to say whether the run is well."
        return Cause("unknown", "certain", sentence, f"Record at least {FEWEST_STEPS} steps, or better 200.")
    return _well(signals, others)


_CALM = {
    "No layer lacks a gradient.": {
        "no_gradient", "not_started", "detached_layer", "dead_layer", "optimizer_without_gradient",
        "gradient_without_optimizer",
    },
    "No gradient vanishes or explodes.": {
        "vanishing", "exploding", "exploding_time", "exploding_depth", "nonfinite", "nonfinite_growth", "drift",
    },
    "No batch stands out.": {"bad_batches", "data_shift", "exploding", "nonfinite", "spike", "recurring_spikes"},
}  # fmt: skip
"""Sentences about a run that is well. Each is dropped if the run shows one of the causes or findings listed with it."""


A_PART = 0.3
"""Share of the first loss. Of the runs that were called well, one in six was sick where the loss fell by less than this
share, and one in 30 where it fell by more."""


def _well(signals: RunSignals, others: Sequence[Cause]) -> Cause:
    curve, certainty, ruled = signals.curve, "likely", ()
    sentence, advice = "Your run is well.", "Nothing has to be fixed."
    if not curve.is_known:
        words = f"Norms and layers are as they should be on {signals.count:,} steps; losses were not judged."
        return Cause("healthy", certainty, sentence, advice, (signals.seen(words),))
    went = f"from {number(curve.start)} to {signals.ends_at}"
    if curve.has_fallen:
        shown = {cause.key for cause in others} | {found.kind for found in signals.found}
        if signals.outbursts or spikes_of(signals.record):
            shown.add("spike")
        if not signals.lines:  # the norm of each parameter was not measured
            shown.add("no_gradient")
        ruled = tuple(words for words, against in _CALM.items() if not against & shown)
        if (
            curve.fallen < A_PART and not curve.is_falling
        ):  # either the rest is noise that no model can learn, or a fault keeps the loss near that of a guess
            certainty = "possible"
            sentence = (
                f"Your run is well as far as its record shows; its loss went {went}, and the record cannot "
                "tell whether there is more to learn."
            )
            advice = (
                "Compare the loss with the loss of one answer for all samples, such as the logarithm of the number of "
                "classes or the variance of the targets. If it is hardly lower and you expect more, check the labels "
                "and the loss."
            )
    else:
        certainty = "possible"
        sentence = (
            f"Your run is well as far as its gradients show; its loss goes to and fro, {went}, and may not measure "
            "progress."
        )
        advice = "Judge the run by its goal, such as a held-out loss or a return."
    words = f"The loss went {went} in {signals.count:,} steps."
    return Cause("healthy", certainty, sentence, advice, (signals.seen(words),), ruled)


def _no_norms(record: Record) -> str:
    if not record.steps and record.end is not None:
        clips = record.end.get("clips")
        seen = f"Clip calls were seen ({clips:,}), but no step" if clips else "No step"
        return (
            f"{seen} of a torch.optim optimizer{'' if clips else ' was seen'}, so no norm was recorded: gradguard "
            "measures in optimizer.step(), which a script that updates its weights by hand does not call."
        )
    if record.steps.has_any("post_norm"):
        return (
            "Only norms after clipping were recorded, and a threshold derived from these would repeat the old one; "
            "record the run again with gradguard run, which measures the norms before clipping."
        )
    return "The record holds no gradient norms; record the run again with gradguard run."

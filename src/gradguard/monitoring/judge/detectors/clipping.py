"""Whether a clip binds on most steps, or twice."""

import statistics
from itertools import compress
from operator import or_

from gradguard.monitoring.judge.acting_clips import clipped_twice, clips_on, shares_in_words
from gradguard.monitoring.judge.findings import Episode, Kind, named, said
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.record.step_rows import OptimizerSteps, bound_on, taken_steps

ALWAYS_ON_SHARE = 0.5
"""Above half of the steps a clip is part of the ordinary update: the regime "normalising"."""

ALWAYS_ON_STEPS = 50
"""Fewer steps are a warm-up, in which a clip may well bind."""


def clipping_of_whole(part: OptimizerSteps) -> list[Episode]:
    """Return what can only be said of the clips of a run as a whole.

    Args:
        part: The steps of one optimizer.
    """
    taken = taken_steps(part.record)
    clipped = taken.where(list(map(or_, taken.has("threshold"), taken.has("coefficient"))))
    if not clipped:
        return []
    found, twice = [], clipped_twice(taken)
    if twice:
        clips = clips_on(part.record, twice)
        words, *before, last_clip = shares_in_words(clips, len(twice)), *clips
        idle = named([clip.name for clip in clips if clip.bound == 0])
        words += f"; {idle} had no effect" if idle else ""
        if any(clip.bound for clip in before) and all(twice.has("threshold")):  # one behind the other
            words += f"; {last_clip.name} only saw what {named([clip.name for clip in before])} had left"
        harmless = all(clip.bound == 0 for clip in clips)
        found.append(Episode.over(TWICE, part, twice, text=words, harmless=harmless))
    bound = list(compress(clipped.column("coefficient"), bound_on(clipped)))
    share = len(bound) / len(clipped)
    if share > ALWAYS_ON_SHARE and len(clipped) >= ALWAYS_ON_STEPS:
        numbers, harmless = {"share": share, "coefficient": statistics.median(bound)}, bool(is_scale_free(part.record))
        found.append(Episode.over(ALWAYS_ON, part, clipped, numbers=numbers, harmless=harmless))
    return found


_ALWAYS_ON = "clipping bound on {share:%} of {steps}"
ALWAYS_ON = Kind(
    "clipping_always_on",
    said(
        "warning",
        f"{_ALWAYS_ON}: it acts as a learning rate {{coefficient:.2g}} times as large",
        "lower the learning rate by that factor and raise the threshold above an ordinary norm, so that it guards",
        harmless=(  # an optimizer that cancels a constant factor
            "info",
            f"{_ALWAYS_ON}, and usually multiplied gradients by {{coefficient:.2g}}",
            "with an Adam-like optimizer a constant scaling nearly cancels, so this mostly evens out one step against "
            "the next; for a guard against spikes raise the threshold above an ordinary norm",
        ),
    ),
    value="coefficient",
)
TWICE = Kind(
    "clipped_twice",
    said(
        "warning",
        "gradients were clipped more than once on {steps}: {found.text}",
        "keep one of them: a second clip compares what the first has left, and its threshold has no meaning",
        harmless=(
            "info",
            "two clips or more looked at the gradients of {steps}, and none of them ever bound",
            "keep one of them, so that the threshold of the other need not be known",
        ),
    ),
)
KINDS = (ALWAYS_ON, TWICE)

"""Detects a clip that binds on most steps, and clips that act on the same gradients."""

import statistics
from itertools import compress
from operator import or_

from gradguard.monitoring.judge.acting_clips import clipped_twice, clips_on, shares_in_words
from gradguard.monitoring.judge.findings import Episode, Kind, named, said
from gradguard.monitoring.judge.scale_free import is_scale_free
from gradguard.monitoring.record.step_rows import OptimizerSteps, bound_on, taken_steps

ALWAYS_ON_SHARE = 0.5
"""Share of the steps above which a clip is part of the ordinary update: the regime "normalising"."""

ALWAYS_ON_STEPS = 50
"""Clipped steps that are needed: fewer are a warm-up, in which a clip may well bind."""


def clipping_of_whole(part: OptimizerSteps) -> list[Episode]:
    """Return the episodes about clips that only the whole run can show.

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
        if any(clip.bound for clip in before) and all(twice.has("threshold")):  # the clips act one after another
            words += f"; {last_clip.name} only got what {named([clip.name for clip in before])} had left"
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
        f"{_ALWAYS_ON}: it acts like a learning rate {{coefficient:.2g}} times as large",
        "multiply the learning rate by that factor, and raise the threshold above an ordinary norm, so that the clip "
        "acts only on spikes",
        harmless=(  # an optimizer that cancels a constant factor
            "info",
            f"{_ALWAYS_ON}, and usually multiplied gradients by {{coefficient:.2g}}",
            "an Adam-like optimizer nearly cancels a constant scaling, so the clip mostly makes steps equally long; as "
            "a guard against spikes, raise the threshold above an ordinary norm",
        ),
    ),
    value="coefficient",
)
TWICE = Kind(
    "clipped_twice",
    said(
        "warning",
        "gradients were clipped more than once on {steps}: {found.text}",
        "keep one of them: a second clip compares clipped gradients with its threshold, which then has no meaning",
        harmless=(
            "info",
            "two or more clips compared the gradients of {steps}, and none of them ever bound",
            "keep one of them, so that only one threshold matters",
        ),
    ),
)
KINDS = (ALWAYS_ON, TWICE)

"""Detects faults of the training loop, which exist from the first step on and do not show in any norm.

Some faults can only be detected in the watched process (a parameter with gradients in no optimizer, an optimizer
without gradients); these arrive as events. The others are detected from the lines of the record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gradguard.monitoring.judge.findings import Episode, Kind, Log, said

SCALED_CLIPS = 3
"""Clips of scaled gradients that bound before the fault is reported: a single one may be an experiment."""

KEPT_STEPS = 5
"""Steps before the fault is reported: a loop may keep gradients once, when it begins or resumes."""


class Setup:
    """Detects faults of the training loop.

    Args:
        log: The log that receives the faults.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._scaled, self._kept = list[int](), list[int]()  # the steps with each fault, until it is reported

    def step(self, step: dict[str, Any], bound: bool) -> None:
        """Follow a step.

        Args:
            step: Its line.
            bound: Whether a clip bound on it.
        """
        scale, threshold = step.get("amp_scale") or 0.0, step.get("threshold")
        if bound and step.get("scaled_clip") and scale > 1 and threshold is not None:  # a scale of 1 scales nothing
            numbers = {"threshold": threshold, "scale": scale, "acts": threshold / scale}
            self._follow(SCALED_CLIP, self._scaled, SCALED_CLIPS, step["i"], **numbers)
        if step.get("kept_gradients"):
            self._follow(KEPT, self._kept, KEPT_STEPS, step["i"])
        if empty := step.get("empty_batches"):
            self._log.report(EMPTY.name, EMPTY, step["i"], step["i"], empty, numbers={"largest": empty})

    def event(self, event: Mapping[str, Any]) -> None:
        """Turn an event of the watched process back into an episode, with its original severity.

        Args:
            event: An ``event`` line for an episode of `setup_episode`.
        """
        names, value, (kind, worst) = event.get("params"), event.get("value"), _EVENT_KINDS[event["kind"]]
        episode = setup_episode(
            kind, event["i"], [str(name) for name in names] if isinstance(names, list) else [],
            value if isinstance(value, int | float) else None, harmless=event.get("severity") != worst,
        )  # fmt: skip
        episode.optimizer = self._log.optimizer
        self._log.add(episode)

    def _follow(self, kind: Kind, seen: list[int], needed: int, i: int, **numbers: float) -> None:
        if self._log.extend_open(kind.name, i):
            return
        seen.append(i)
        if len(seen) == needed:
            self._log.begin(kind.name, kind, seen[0], i, count=needed, numbers=numbers)
            seen.clear()


def setup_episode(
    kind: Kind, i: int, params: Sequence[str], value: float | None = None, *, harmless: bool = False
) -> Episode:
    """Return the episode of a fault that the watched process has detected.

    Args:
        kind: `NO_OPTIMIZER` or `NO_GRADIENT`.
        i: The step on which it is reported.
        params: The affected parameters.
        value: The number of steps on which it was seen.
        harmless: Whether it may be intended.
    """
    count = 1 if value is None else round(value)
    return Episode(kind, None, 0, i, count, params=list(params), numbers={"steps": count}, harmless=harmless)


def is_setup_event(line: Mapping[str, Any]) -> bool:
    """Return whether an event reports a fault of the loop that only the watched process can detect.

    Args:
        line: Any line.
    """
    kind = line.get("kind")
    return isinstance(kind, str) and kind in _EVENT_KINDS


_IN_NONE = "{names} {receives} gradients on every step but {is_} in no optimizer, so {it} never {changes}"
_GIVE_THEM = (
    "give them to the optimizer; if they are meant to stay fixed, requires_grad_(False) saves the time and memory of "
    "their gradients, and keeps these out of the norm that a clip compares"
)
NO_OPTIMIZER = Kind(
    "gradient_without_optimizer",
    said("warning", _IN_NONE, _GIVE_THEM, harmless=("info", _IN_NONE, _GIVE_THEM)),
    value="steps",
)
_NONE_EVER = "the optimizer{where} stepped {found.count:,} times and none of its parameters ever had a gradient"
_CHECK_MODEL = (
    "check that it holds the parameters of the model that computes the loss (not of a copy, or of a model that was "
    "rebuilt since), that the loss depends on them, and that zero_grad() is not called between backward() and step()"
)
NO_GRADIENT = Kind(
    "optimizer_without_gradient",
    said("error", _NONE_EVER, _CHECK_MODEL, harmless=("warning", _NONE_EVER, _CHECK_MODEL), where=" of {names}"),
    value="steps",
)
SCALED_CLIP = Kind(
    "clip_before_unscale",
    said(
        "error",
        "gradients were clipped while they were still multiplied by the loss scale, on {steps} up to step "
        "{found.last}: at a scale of {scale:,g} a threshold of {threshold:=} acts like {acts:.2g}",
        "call scaler.unscale_(optimizer) before the clip",
    ),
    value="scale",
)
KEPT = Kind(
    "missing_zero_grad",
    said(
        "error",
        "gradients were not cleared between steps: on {found.count} steps in a row backward() added to the gradients "
        "of the step before, so each step follows the sum of all gradients so far",
        "call optimizer.zero_grad() once for each step, before its first backward()",
    ),
)
EMPTY = Kind(
    "empty_micro_batch",
    said(
        "warning",
        "up to {largest:.0f} of the micro-batches of a step had no sample that counted, on {steps}: if the loss is "
        "divided by the number of micro-batches, the others count for too little",
        "check what the mask or the advantages leave of these micro-batches, and divide the loss of each by the tokens "
        "of all micro-batches of the step",
    ),
    value="largest",
)
KINDS = (NO_OPTIMIZER, NO_GRADIENT, SCALED_CLIP, KEPT, EMPTY)

_EVENT_KINDS = {NO_OPTIMIZER.name: (NO_OPTIMIZER, "warning"), NO_GRADIENT.name: (NO_GRADIENT, "error")}
"""Events of the watched process, and the severity of each at worst."""

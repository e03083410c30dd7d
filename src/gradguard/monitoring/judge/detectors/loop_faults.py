"""How the loop is set up: what is wrong with it is wrong from the first step on, and no norm shows it.

Thresholds, detection and words of these findings. What only the watched process can know (a gradient in no optimizer,
an optimizer without gradients) comes as an event; the rest is read from the lines of the record.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words, named, said, steps
from gradguard.monitoring.judge.numbers import plain_threshold
from gradguard.monitoring.record.record_lines import names_of

SCALED_CLIPS = 3
"""So many bound clips of scaled gradients: a single one may be an experiment."""

KEPT_STEPS = 5
"""So many steps in a row: a loop may leave gradients where they are once, when it begins or resumes."""

EPS_LINES = 10
"""Per-tensor lines in a row: the clip of one spike may well leave little of everything else."""

EPS_COEFFICIENT = 0.01
"""Only a clip that takes a hundredth or less can be what pushed a gradient under the floor."""

EPS_MARGIN = 10.0
"""Above the floor by this factor before the clip, below it by this after: many elements may be 0."""

UNIFORM_RULES = frozenset(["norm", "ClipByMedian", "AutoClip", "ZClip", "ClipFraction"])
"""Rules that multiply all gradients by one number."""

ADAM_LIKE = frozenset(["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"])
"""Optimizers that divide by the root mean square of each element, plus ``eps``."""


class Setup:
    """Whether the loop does what it seems to do.

    Args:
        log: Where faults go.
        meta: The first line of the record.
        place: Which optimizer this is.
        name: Its class.
    """

    def __init__(self, log: Log, meta: Mapping[str, Any], place: int, name: str) -> None:
        self._log = log
        self._params = meta.get("params", [])
        self._floors = _floors(self._params, name, meta.get("eps"), place)
        self._scaled, self._kept = list[int](), list[int]()  # the first steps of each
        self._coefficient = 1.0
        self._low: dict[int, int] = {}  # for how many lines in a row the clip has left less than the optimizer sees

    def step(self, step: dict[str, Any], bound: bool) -> None:
        """Follow a step.

        Args:
            step: Its line.
            bound: Whether a clip bound on it.
        """
        self._coefficient = step["coefficient"] if bound and step.get("rule") in UNIFORM_RULES else 1.0
        scale, threshold = step.get("amp_scale") or 0.0, step.get("threshold")
        if bound and step.get("scaled_clip") and scale > 1 and threshold is not None:  # a scale of 1 is none
            self._follow(SCALED_CLIP, self._scaled, SCALED_CLIPS, step["i"], threshold=threshold, scale=scale)
        if step.get("kept_gradients"):
            self._follow(KEPT, self._kept, KEPT_STEPS, step["i"])
        if empty := step.get("empty_batches"):
            self._log.tell(EMPTY.name, EMPTY, step["i"], step["i"], empty, numbers={"largest": empty})

    def tensors(self, i: int, norms: Sequence[float]) -> None:
        """Follow a line with the norm of each parameter.

        Args:
            i: The step.
            norms: One finite norm for each.
        """
        self._below_eps(i, norms)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take what an event of these kinds says as a finding, as it was when it was told.

        Args:
            event: A line that `setup_episode` made.
        """
        names, value, (kind, worst) = event.get("params"), event.get("value"), _TOLD[event["kind"]]
        told = setup_episode(
            kind, event["i"], [str(name) for name in names] if isinstance(names, list) else [],
            value if isinstance(value, int | float) else None, harmless=event.get("severity") != worst,
        )  # fmt: skip
        told.optimizer = self._log.optimizer
        self._log.add(told)

    def _follow(self, kind: Kind, seen: list[int], needed: int, i: int, **numbers: float) -> None:
        if self._log.goes_on(kind.name, i):
            return
        seen.append(i)
        if len(seen) == needed:
            self._log.begin(kind.name, kind, seen[0], i, count=needed, numbers=numbers)
            seen.clear()

    def _below_eps(self, i: int, norms: Sequence[float]) -> None:
        coefficient, before, self._low = self._coefficient, self._low, {}
        if coefficient > EPS_COEFFICIENT:
            return
        for place, floor in self._floors.items():
            norm = norms[place] if place < len(norms) else 0.0
            if norm > EPS_MARGIN * floor and norm * coefficient * EPS_MARGIN < floor:
                self._low[place] = before.get(place, 0) + 1
        new = [place for place, count in self._low.items() if count == EPS_LINES]
        if new:
            about = {
                "count": EPS_LINES,
                "params": names_of(self._params[place] for place in new),
                "numbers": {"smallest": coefficient},
            }
            self._log.begin(f"{BELOW_EPS.name} {new}", BELOW_EPS, i, i, **about)


def setup_episode(
    kind: Kind, i: int, params: Sequence[str], value: float | None = None, *, harmless: bool = False
) -> Episode:
    """Return the episode of what the watched process has noticed.

    Args:
        kind: `NO_OPTIMIZER` or `NO_GRADIENT`.
        i: The step on which it is told.
        params: The parameters that it is about.
        value: On how many steps it was seen.
        harmless: Whether it may be meant.
    """
    count = 1 if value is None else round(value)
    return Episode(kind, None, 0, i, count, params=list(params), numbers={"steps": count}, harmless=harmless)


def is_setup_event(line: Mapping[str, Any]) -> bool:
    """Tell whether an event says what only the watched process can know of the loop.

    Args:
        line: Any line.

    Returns:
        True for an event of these kinds.
    """
    kind = line.get("kind")
    return isinstance(kind, str) and kind in _TOLD


def _floors(params: Sequence[Mapping[str, Any]], name: str, eps: Any, place: int) -> dict[int, float]:
    """The norm of each parameter's gradient below which the optimizer's ``eps`` decides its step, where it is known.

    Adam and its like add ``eps`` to the root mean square of an element; Muon divides a matrix by its norm, or by
    ``eps`` where that is larger.

    Returns:
        Norms by the place of the parameter.
    """
    known = eps[place] if isinstance(eps, list) and place < len(eps) else None
    if not isinstance(known, int | float) or not (name in ADAM_LIKE or name == "Muon"):
        return {}
    floors = {}
    for k, parameter in enumerate(params):
        count = parameter.get("numel")
        if isinstance(count, int) and count > 0 and parameter.get("optimizer", place) == place:
            floors[k] = known * (1.0 if name == "Muon" else math.sqrt(count))
    return floors


def _no_optimizer(found: Episode) -> Words:
    what = "receive gradients at every step and are in no optimizer, so that they never change"
    if len(found.params) <= 1:
        what = "receives gradients at every step and is in no optimizer, so that it never changes"
    advice = (
        "give them to the optimizer; if they are meant to stay as they are, requires_grad_(False) saves the time and "
        "memory of their gradients, and keeps these out of the norm that a clip compares"
    )
    names = named(found.params) if found.params else "a parameter"
    return "info" if found.harmless else "warning", f"{names} {what}", advice


def _no_gradient(found: Episode) -> Words:
    of = f" of {named(found.params)}" if found.params else ""
    message = f"the optimizer{of} stepped {found.count:,} times and none of its parameters ever had a gradient"
    advice = (
        "check that it was given the parameters of the model that computes the loss (not of a copy, or of one that was "
        "made anew since), that the loss depends on them, and that zero_grad() does not come between backward() and "
        "step()"
    )
    return "warning" if found.harmless else "error", message, advice


def _scaled_clip(found: Episode) -> Words:
    threshold, scale = found.numbers["threshold"], found.numbers["scale"]
    message = (
        f"gradients were clipped while they were still multiplied by the loss scale, on {steps(found.count)} up to "
        f"step {found.last}: at a scale of {scale:,g} a threshold of {plain_threshold(threshold)} acts like "
        f"{threshold / scale:.2g}"
    )
    return "error", message, "call scaler.unscale_(optimizer) before the clip"


NO_OPTIMIZER = Kind("gradient_without_optimizer", _no_optimizer, value="steps")
NO_GRADIENT = Kind("optimizer_without_gradient", _no_gradient, value="steps")
SCALED_CLIP = Kind("clip_before_unscale", _scaled_clip, value="scale")
KEPT = Kind(
    "missing_zero_grad",
    said(
        "error",
        "gradients were not cleared between one step and the next: on {found.count} steps in a row backward() added to "
        "what the step before had left, so that each step follows the sum of all gradients so far",
        "call optimizer.zero_grad() once for each step, before its first backward()",
    ),
)
EMPTY = Kind(
    "empty_micro_batch",
    said(
        "warning",
        "nothing counted in up to {largest:.0f} of the batches that a step accumulates, on {steps}: where the loss is "
        "divided by their number, the others count for too little",
        "look at what the mask or the advantages leave of these batches, and divide the loss of each by the tokens of "
        "all batches of the step",
    ),
    value="largest",
)
BELOW_EPS = Kind(
    "clip_below_eps",
    said(
        "warning",
        "the clip multiplies gradients by {smallest:.1g}, which leaves {names} below the eps of the optimizer on "
        "{found.count} recorded steps: it hardly moves there",
        "find what makes the norm so large, and clip that by itself (gg.Groups, or one optimizer for each), or raise "
        "the threshold",
    ),
    value="smallest",
)
KINDS = (NO_OPTIMIZER, NO_GRADIENT, SCALED_CLIP, KEPT, EMPTY, BELOW_EPS)

_TOLD = {NO_OPTIMIZER.name: (NO_OPTIMIZER, "warning"), NO_GRADIENT.name: (NO_GRADIENT, "error")}
"""Events of the watched process, and the severity of each at worst."""

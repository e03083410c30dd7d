"""Which threshold suits: record what passes, clip nothing, propose.

In a healthy network the largest gradients are the first ones, next to the loss; where gradients explode on their way
they are the last ones. So the first ones of each backward say what is normal, and how much larger the others are says
whether an error clip has anything to do.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.backward_clip.hooks import GradientObserver
from gradguard.backward_clip.module_timeline import ModuleTimeline
from gradguard.backward_clip.rules import BaseErrorClip, ErrorClipByValue
from gradguard.errors import InvalidValueError

_NEXT_TO_THE_LOSS = 10

_Label = tuple[str, str]
"""The names of an operation and of its module."""
_Step = tuple[list[_Label], Tensor]
"""The gradients of one step, in the order of the backward, each with its largest element."""


def calibrate_error_clip(model: nn.Module | None = None, *, steps: int = 20, factor: float = 1.0) -> "Calibration":
    r"""Return a rule that clips nothing, records for ``steps`` blocks what passes, and proposes a threshold.

    .. math:: \text{threshold} = k \cdot \operatorname*{median}_{\text{steps}}\;
              \max_{v \text{ next to the loss}} \lVert g_v \rVert_\infty

    Next to the loss are the first 10 gradients of the backward. In a network whose gradients do not explode they are
    the largest of all, so that the proposal hardly ever binds; in one whose gradients explode it is their normal size.
    Where it does bind, a tenth of it often trains better still, and looseness downward is cheap.

    Args:
        model: The module whose submodules should be named in the table. Its forward must run after this.
        steps: For how many blocks, of one backward each, to record; later ones pass unrecorded.
        factor: k.

    Returns:
        The calibration: use it as the rule of `error_clip`, print it, ask it for its ``threshold`` or ``rule()``.

    Raises:
        InvalidValueError: If ``steps`` or ``factor`` is not above 0.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> calibration = gg.calibrate_error_clip(steps=3)
        >>> for _ in range(3):
        ...     loss = model(torch.randn(4, 2)).square().mean()
        ...     with gg.error_clip(loss, calibration):
        ...         loss.backward()
        >>> rule = calibration.rule()  # ErrorClipByValue(calibration.threshold)
    """
    if not steps > 0 or not factor > 0:
        raise InvalidValueError(f"steps={steps}, factor={factor}: expected numbers above 0.")
    return Calibration(ModuleTimeline(model) if model is not None else None, steps, factor)


class Calibration(BaseErrorClip, GradientObserver):
    """A record of the largest element of each gradient, step by step, as `calibrate_error_clip` makes it.

    Printing it shows a table.

    Example:
        >>> import gradguard as gg, torch
        >>> calibration = gg.calibrate_error_clip(steps=1)
        >>> loss = torch.ones(3, requires_grad=True).exp().square().sum()
        >>> with gg.error_clip(loss, calibration):
        ...     loss.backward()
        >>> f"{calibration.threshold:.2f}"
        '5.44'
        >>> print(calibration)
        gradient of the output of  module  largest element
        PowBackward0               -                     1
        ExpBackward0               -                  5.44
        steps: 1
        next to the loss: 5.44; largest anywhere: 5.44 (1 times that)
        proposed threshold: 5.44
    """

    thresholds = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # a record rather than a rule: nothing in it is for the compiler

    def __init__(self, timeline: ModuleTimeline | None, steps: int, factor: float) -> None:
        self.timeline, self.steps, self.factor = timeline, steps, factor
        self._seen: list[_Step] = []
        self._passing: list[tuple[_Label, Tensor]] = []
        self._scale: float | Tensor = 1.0

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad`` itself."""
        return grad

    def scaled(self, scale: float | Tensor) -> "Calibration":
        """Take what passes for gradients of a loss that was multiplied by ``scale``; return this calibration."""
        self._scale = scale
        return self

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded."""
        return len(self._seen) >= self.steps

    @property
    def threshold(self) -> float:
        """The proposal, in units of the gradient of the unscaled loss. Waits for the device.

        Raises:
            InvalidValueError: If nothing finite was recorded.
        """
        return self.factor * self._normal()

    @property
    def growth(self) -> float:
        """How many times larger than those next to the loss the largest gradient was; inf if one was not finite."""
        return max(_or_infinity(peak) for _, peaks in self._recorded() for peak in peaks.tolist()) / self._normal()

    def rule(self) -> ErrorClipByValue:
        """Return the value clip with the proposed threshold."""
        return ErrorClipByValue(self.threshold)

    def detach(self) -> None:
        """Remove the hooks that name modules."""
        if self.timeline is not None:
            self.timeline.detach()

    def __str__(self) -> str:
        largest: dict[_Label, float] = {}
        for labels, peaks in self._recorded():
            for label, peak in zip(labels, peaks.tolist(), strict=True):
                largest[label] = max(largest.get(label, 0.0), _or_infinity(peak))
        width = max(len(op) for op, _ in [("gradient of the output of", ""), *largest])
        module_width = max(len(module) for _, module in [("", "module"), *largest])
        lines = [
            f"{op:{width}}  {module or '-':{module_width}}  {peak:>15.3g}" for (op, module), peak in largest.items()
        ]
        head = f"{'gradient of the output of':{width}}  {'module':{module_width}}  largest element"
        normal, top = self._normal(), max(largest.values())
        verdict = f"next to the loss: {normal:.3g}; largest anywhere: {top:.3g} ({top / normal:.3g} times that)"
        return "\n".join(
            [head, *lines, f"steps: {len(self._seen)}", verdict, f"proposed threshold: {self.threshold:.3g}"]
        )

    def place(self, node: Node) -> str:
        """Return the name of the module whose forward recorded ``node``, empty if not known."""
        return self.timeline.module_of(node) if self.timeline is not None else ""

    def row(self, node: Node, name: str, sources: str) -> "_NodePeaks":
        """Return where the gradients of one node are recorded."""
        return _NodePeaks(self, (name, self.place(node)))

    def begin(self, loss: Tensor | None) -> None:
        """Start a step."""
        self._passing = []

    def end(self) -> None:
        """End a step."""
        if self._passing and not self.done:
            device = self._passing[0][1].device
            peaks = torch.stack([peak.to(device, torch.float64) for _, peak in self._passing])
            self._seen.append(([label for label, _ in self._passing], peaks))
        self._passing = []

    def _recorded(self) -> list[_Step]:
        if not self._seen:
            raise InvalidValueError(
                "nothing was recorded: run some backwards in `with gg.error_clip(loss, calibration)`."
            )
        return self._seen

    def _normal(self) -> float:
        first = [[p for p in peaks[:_NEXT_TO_THE_LOSS].tolist() if math.isfinite(p)] for _, peaks in self._recorded()]
        found = [max(peaks) for peaks in first if peaks and max(peaks) > 0]
        if not found:
            raise InvalidValueError("no step had finite gradients other than 0 next to the loss: nothing to go by.")
        return statistics.median(found)


@dataclass
class _NodePeaks:
    """One node's view of the calibration."""

    calibration: Calibration
    label: _Label

    @property
    def module(self) -> str:
        return self.label[1]

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        if grad.numel() and not self.calibration.done:
            self.calibration._passing.append((self.label, grad.detach().abs().amax() / self.calibration._scale))
        return grad


def _or_infinity(peak: float) -> float:
    return math.inf if math.isnan(peak) else peak

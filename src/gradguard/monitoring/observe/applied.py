"""A clip that the watcher applies itself, where the user asked for one with ``--clip``."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.monitoring.observe.names import living_modules


@dataclass(frozen=True, slots=True)
class AppliedClip:
    """A clip that the observer applies before each step, where the user asked for one.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold.
        bind: Given the modules of the script, returns a function that clips the gradients of given parameters; its
            second argument is what the threshold is multiplied by: the loss scale, where the gradients have one.
    """

    rule: str
    threshold: float
    bind: Callable[[Sequence[nn.Module]], Callable[[list[Tensor], float | Tensor], object]]


class Applying:
    """Binds a clip to the modules of a script, again whenever there are parameters that it does not know."""

    def __init__(self) -> None:
        self._apply: Callable[[list[Tensor], float | Tensor], object] | None = None
        self._bound: dict[int, weakref.ref] = {}  # the parameters that `_apply` knows

    def apply(self, clip: AppliedClip, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Clip; not guarded, because a clip that was asked for and cannot be made must stop the run."""
        if self._apply is None or any(_unknown(self._bound, p) for p in parameters):
            self._apply = clip.bind(living_modules())
            self._bound = {key: alive for key, alive in self._bound.items() if alive() is not None}
            self._bound |= {id(p): weakref.ref(p) for p in parameters}
        scale = getattr(optimizer, "grad_scale", None)
        self._apply(parameters, 1.0 if scale is None else scale)


def _unknown(known: dict[int, weakref.ref], parameter: Tensor) -> bool:
    reference = known.get(id(parameter))
    return reference is None or reference() is not parameter

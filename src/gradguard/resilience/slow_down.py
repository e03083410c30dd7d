"""`SlowDown`: lower the learning rate during some steps, hidden from schedulers."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.optimizer_hooks import EveryStep


class SlowDown:
    """Multiplies the learning rate of each group by ``factor``, from the beginning to the end of each step.

    Between steps the groups hold the rate that the user or a scheduler set, so a schedule that computes each rate from
    the previous one is not disturbed. With a factor of 1 no hook is installed.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._factor, self._optimizer = 1.0, optimizer
        self._before: list[tuple[dict[str, Any], Any, Any]] = []
        self._hooks: EveryStep | None = None

    @property
    def factor(self) -> float:
        """The factor, above 0 and at most 1; set it between steps. 1 changes nothing."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        if factor == 1:
            self.remove()
        elif self._hooks is None:  # after the guard's hooks: it must be the last to end a step
            self._hooks = EveryStep(
                lambda *_: None, lambda _: self.put_back(), optimizer=self._optimizer, enter=self._begin
            )

    def remove(self) -> None:
        """Remove the hooks and restore the rates."""
        self.put_back()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _begin(self, optimizer: Optimizer, closure: bool) -> None:
        del optimizer, closure
        self.put_back()  # a step that raised an error may have left lower rates
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                self._before.append((group, rate, rate.detach().clone()))
                rate.detach().mul_(self._factor)  # in place, for compiled steps
            elif rate is not None:
                self._before.append((group, rate, None))
                group["lr"] = rate * self._factor

    def put_back(self) -> None:
        """Restore the groups' own rates."""
        for group, rate, value in self._before:
            if isinstance(rate, Tensor):
                rate.detach().copy_(value)
            group["lr"] = rate
        self._before = []

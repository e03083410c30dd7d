"""A learning rate that is lower for some steps, unseen by schedulers."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.optimizer_hooks import EveryStep


class SlowDown:
    """Multiplies the learning rate of each group by ``factor``, from the beginning to the end of each step.

    Between steps the groups hold what the user or a scheduler wrote, so that a schedule that computes each rate from
    the one before goes on as if nothing had happened. A factor of 1 costs nothing: nothing is hooked then.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._factor, self._optimizer = 1.0, optimizer
        self._before: list[tuple[dict[str, Any], Any, Any]] = []
        self._hooks: EveryStep | None = None

    @property
    def factor(self) -> float:
        """The factor, from 0 to 1, where 1 changes nothing. It is set between steps."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        if factor == 1:
            self.remove()
        elif self._hooks is None:  # behind the guard's: it must be the last to end a step
            self._hooks = EveryStep(
                lambda *_: None, lambda _: self.put_back(), optimizer=self._optimizer, enter=self._begin
            )

    def remove(self) -> None:
        """Stop acting."""
        self.put_back()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _begin(self, optimizer: Optimizer, closure: bool) -> None:
        del optimizer, closure
        self.put_back()  # what a step that raised has left
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                self._before.append((group, rate, rate.detach().clone()))
                rate.detach().mul_(self._factor)  # in place, for compiled steps
            elif rate is not None:
                self._before.append((group, rate, None))
                group["lr"] = rate * self._factor

    def put_back(self) -> None:
        """Give the groups their own rates again."""
        for group, rate, value in self._before:
            if isinstance(rate, Tensor):
                rate.detach().copy_(value)
            group["lr"] = rate
        self._before = []

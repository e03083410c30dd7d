"""A lower learning rate for a while, of which no scheduler knows."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.errors import UnsupportedGradientError
from gradguard.optimizer_hooks import EveryStep
from gradguard.tensors.host_copy import is_captured


class SlowDown:
    """Multiplies the learning rate of each group by ``factor``, from the beginning to the end of each step.

    Between steps the groups hold what the user or a scheduler wrote, so that a schedule that computes each rate from
    the one before goes on as if nothing had happened. Make it after the optimizer's guard: it must be the last to end
    a step. What is recorded in a CUDA graph would hold one rate for ever, and nothing else of `Resilience`: refused.

    Args:
        optimizer: The optimizer.

    Attributes:
        factor: From 0 to 1; 1 leaves all alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self._before: list[tuple[dict[str, Any], Any, Any]] = []
        self._hooks = EveryStep(_nothing, self._end, optimizer=optimizer, enter=self._begin)

    def remove(self) -> None:
        """Stop acting."""
        self.put_back()
        self._hooks.remove()

    def _begin(self, optimizer: Optimizer, closure: bool) -> None:
        del optimizer, closure
        if is_captured(self._device):
            raise UnsupportedGradientError(
                "the step is recorded in a CUDA graph, and Resilience counts its steps on the host, which replays do "
                "not reach: it would never act. Leave the step out of the graph, or take Guard(..., spikes=) alone."
            )
        self.put_back()  # what a step that raised has left
        if self.factor == 1:
            return
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                self._before.append((group, rate, rate.detach().clone()))
                rate.detach().mul_(self.factor)  # in place, for compiled steps
            elif rate is not None:
                self._before.append((group, rate, None))
                group["lr"] = rate * self.factor

    def _end(self, optimizer: Optimizer) -> None:
        del optimizer
        self.put_back()

    def put_back(self) -> None:
        """Give the groups their own rates again."""
        for group, rate, value in self._before:
            if isinstance(rate, Tensor):
                rate.detach().copy_(value)
            group["lr"] = rate
        self._before = []


def _nothing(optimizer: Optimizer, number: int) -> None:
    del optimizer, number

"""Act once on each real optimizer step, with the gradients of that step, for every optimizer that exists.

What makes it more than two hooks:

* A subclass whose ``step`` calls ``super().step()`` fires the hooks twice: only the outermost call counts.
* Where ``step`` gets a closure (LBFGS, Lightning) the hook fires *before* backward: the closure is wrapped, and acted
  upon after each evaluation instead.
* A ``step`` that raises never fires its post-hook: a step counts as open only while its frame is on the stack.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class EveryStep:
    """Calls of ``before`` and ``after`` around each real step of each optimizer, until `remove`.

    Args:
        before: Called with the optimizer when its gradients are complete and not yet used; once a step, or once for
            each evaluation of a closure.
        after: Called with the optimizer when the outermost step is done.
    """

    def __init__(self, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
        self._before, self._after = before, after
        self._open: FrameType | None = None  # the frame of the outermost step that is running
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._pre),
            register_optimizer_step_post_hook(self._post),
        ]

    def remove(self) -> None:
        """Take the hooks away; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _pre(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._open is not None and _is_running(self._open):
            return None
        self._open = sys._getframe(1)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before(optimizer)
            return None
        wrapped = self._wrap(closure, optimizer)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrap(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def evaluate() -> Any:
            result = closure()
            self._before(optimizer)
            return result

        return evaluate

    def _post(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del args, kwargs
        if self._open is sys._getframe(1):
            self._open = None
            self._after(optimizer)


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None

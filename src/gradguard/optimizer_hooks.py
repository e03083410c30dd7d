"""Act once on each real optimizer step, with the gradients of that step, for one optimizer or for all.

Two hooks are not enough:

* A subclass whose ``step`` calls ``super().step()`` fires the hooks twice: only the outermost call counts.
* If ``step`` receives a closure (LBFGS, Lightning), the hook fires *before* backward. The closure is therefore wrapped,
  and the action follows each evaluation instead.
* A ``step`` that raises never fires its post-hook: a step counts as open only as long as its frame is on the stack.
* Several threads may train at once: each has its own open step.
* Under `torch.compile` the hooks run in Python between two graphs: they are not traced.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from types import FrameType
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradguard.torch_private import is_of_the_compiler, never_compiled


def runs_hooks(optimizer: Any) -> bool:
    """Tell whether the step of ``optimizer`` runs hooks; many wrappers only pretend to be an optimizer."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:  # a subclass that never called Optimizer.__init__
        return False
    return True


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that it holds in its attributes, or in lists, tuples and dicts there."""
    found: list[Optimizer] = []
    queue, visited = deque[Any]([optimizer]), set[int]()
    while queue:
        value = queue.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Optimizer):
            found.append(value)
            queue.extend(entry for name, entry in vars(value).items() if name not in ("param_groups", "state"))
        elif isinstance(value, dict):
            queue.extend(value.values())
        elif isinstance(value, list | tuple):
            queue.extend(value)
    return found


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer, in order."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


class EveryStep:
    """Calls ``before`` and ``after`` around each real step of each optimizer, until `remove`.

    Args:
        before: Called with the optimizer when its gradients are complete and not yet used, and with a number: 0 at the
            first call in a step, then 1, 2, ... for further evaluations of the closure. If it returns True, the step
            is to end: the closure then returns the loss of its first evaluation.
        after: Called with the optimizer when the outermost step is done.
        optimizer: The only optimizer to act on; None for all, also those made later. Global hooks run before the hooks
            of one optimizer: a watcher of all reads the gradients before a hook of one optimizer changes them.
        enter: Called with the optimizer when a step begins, and with whether a closure will compute its gradients.
            Its result replaces the optimizer as ``self`` in that step, unless it is None.
        first: Act before the hooks that this optimizer has already, on gradients that they may still change.
        broken_off: Called after a step has ended by an error and ``after`` was therefore not called. The call comes at
            the start of this thread's next step, before ``enter``, or in `settle`.
    """

    def __init__(
        self,
        before: Callable[[Optimizer, int], bool | None],
        after: Callable[[Optimizer], None],
        *,
        optimizer: Optimizer | None = None,
        enter: Callable[[Optimizer, bool], Optimizer | None] = lambda optimizer, closure: None,
        first: bool = False,
        broken_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._before, self._after, self._enter, self._broken_off = before, after, enter, broken_off
        self._thread = threading.local()  # .open: the frame of the outermost step that is running
        if optimizer is None:
            pre, post = register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)
        else:
            pre, post = optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post)
        if first and (hooks := pre.hooks_dict_ref()) is not None:
            hooks.move_to_end(pre.id, last=False)
        self._handles: list[RemovableHandle] = [pre, post]

    def remove(self) -> None:
        """Remove the hooks; further calls do nothing."""
        while self._handles:
            self._handles.pop().remove()

    def act_last(self) -> None:
        """Move the post-hook behind all post-hooks that this optimizer has now."""
        if self._handles and (hooks := self._handles[-1].hooks_dict_ref()) is not None:
            hooks.move_to_end(self._handles[-1].id)

    def settle(self) -> None:
        """Call ``broken_off`` if the last step of this thread ended by an error."""
        outer: FrameType | None = getattr(self._thread, "open", None)
        if outer is not None and not _is_running(outer):
            self._thread.open = None
            self._broken_off()

    @never_compiled
    def _pre(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self.settle()
        if getattr(self._thread, "open", None) is not None:
            return None
        self._thread.open = _caller()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        closure = closure if callable(closure) else None  # some optimizers pass another argument in that position
        entered = self._enter(optimizer, closure is not None)
        if entered is not None:
            args = (entered, *args[1:])  # otherwise keep an argument that an earlier hook replaced
        if closure is None:
            self._before(optimizer, 0)
            return args, kwargs
        wrapped = self._wrap(closure, optimizer)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrap(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        evaluations, first = 0, None

        def evaluate() -> Any:
            nonlocal evaluations, first
            result = closure()
            ended = self._act(optimizer, evaluations)
            first = result if evaluations == 0 else first
            evaluations += 1
            return first if ended else result  # a line search cannot continue from a NaN loss

        return evaluate

    @never_compiled
    def _act(self, optimizer: Optimizer, evaluation: int) -> bool | None:
        """Call ``before`` after an evaluation, uncompiled even if the closure itself is compiled."""
        return self._before(optimizer, evaluation)

    @never_compiled
    def _post(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del args, kwargs
        if getattr(self._thread, "open", None) is _caller():
            self._thread.open = None
            self._after(optimizer)


def _caller() -> FrameType:
    """Return the frame of the step that called a hook, without the frames that `torch.compile` puts between."""
    frame = sys._getframe(2)
    while is_of_the_compiler(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None

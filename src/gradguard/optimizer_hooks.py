"""Act once on each real optimizer step, with the gradients of that step, for every optimizer that exists.

What makes it more than two hooks:

* A subclass whose ``step`` calls ``super().step()`` fires the hooks twice: only the outermost call counts.
* Where ``step`` gets a closure (LBFGS, Lightning) the hook fires *before* backward: the closure is wrapped, and acted
  upon after each evaluation instead.
* A ``step`` that raises never fires its post-hook: a step counts as open only while its frame is on the stack.
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
    """Tell whether ``optimizer`` is one whose step runs hooks; a wrapper often only pretends to be an optimizer."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:  # its __init__ has not called that of Optimizer
        return False
    return True


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and those that it steps, of its attributes and of lists, tuples and dicts there."""
    found: list[Optimizer] = []
    queue, seen = deque[Any]([optimizer]), set[int]()
    while queue:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
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
    """Calls of ``before`` and ``after`` around each real step of each optimizer, until `remove`.

    Args:
        before: Called with the optimizer when its gradients are complete and not yet used, and with a number: 0 the
            first time in a step, then 1, 2, ... where a closure is evaluated again. If it returns True, the step is
            to end: the closure then gives the loss of its first evaluation.
        after: Called with the optimizer when the outermost step is done.
        optimizer: The only optimizer to act on; None for every one that exists. Global hooks run before those of one
            optimizer, so that who watches all sees the gradients before who changes those of one.
        enter: Called with the optimizer when a step begins, and with whether a closure will compute its gradients.
            What it returns takes the optimizer's place as ``self`` in that step; None leaves it.
        first: Act before the hooks that this optimizer has already: see gradients that they may change.
        broken_off: Called when a step has ended by an error, and ``after`` therefore not come: when the next step of
            this thread begins, before ``enter``, or `settle` is called.
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
        """Take the hooks away; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def act_last(self) -> None:
        """Act after all hooks at the end of a step of this optimizer that there are now."""
        if self._handles and (hooks := self._handles[-1].hooks_dict_ref()) is not None:
            hooks.move_to_end(self._handles[-1].id)

    def settle(self) -> None:
        """Call ``broken_off`` if the last step of this thread has ended by an error."""
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
        closure = closure if callable(closure) else None  # some optimizers take something else there
        entered = self._enter(optimizer, closure is not None)
        if entered is not None:
            args = (entered, *args[1:])  # else whatever a hook before this one has put there
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
            return first if ended else result  # a line search cannot go on from a loss that is NaN

        return evaluate

    @never_compiled
    def _act(self, optimizer: Optimizer, evaluation: int) -> bool | None:
        """Act after an evaluation: what the closure does may be compiled, what watches or clips it is not."""
        return self._before(optimizer, evaluation)

    @never_compiled
    def _post(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del args, kwargs
        if getattr(self._thread, "open", None) is _caller():
            self._thread.open = None
            self._after(optimizer)


def _caller() -> FrameType:
    """The frame that called a hook: that of the step, behind what PyTorch's compiler puts between."""
    frame = sys._getframe(2)
    while is_of_the_compiler(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None

"""Follows a module's calls: knows which layer runs, what to do with it, and what a gradient that went past it means."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.module_hooks import ForwardHook
from gradguard.per_sample.dry_run import Observer, Slot
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.mini_batch import Gathering
from gradguard.per_sample.plan import CallPlan, Treatment
from gradguard.per_sample.planning import Planning
from gradguard.per_sample.samples import Arguments, count_samples
from gradguard.per_sample.support import refuse_batch_norm
from gradguard.per_sample.tap import current_task
from gradguard.per_sample.tapping import Running, Tapping, autocast_of
from gradguard.per_sample.trees import Skeleton
from gradguard.torch_private import parameter_slots

_NOTHING = CallPlan(Treatment.NOTHING, False, (), ())


@dataclass(frozen=True)
class LastCall:
    """One outermost call, to be repeated.

    Attributes:
        module: What was called.
        arguments: With what.
        batch_size: Number of samples.
        output_axes: Batch axis of each tensor that it returned.
        autocast: Device type and dtype of the autocast that it ran under, or None.
        whole: Positions of tensors in the arguments that belong to no sample.
    """

    module: nn.Module
    arguments: Arguments
    batch_size: int
    output_axes: Sequence[BatchAxis | None]
    autocast: tuple[str, torch.dtype] | None
    whole: Set[int]


class Following:
    """Hooks on every layer of ``module``, until `remove`.

    Args:
        module: The outermost module.
        batch_first: Whether the batch is the first dimension of what it is called with.
        names: The name of each parameter by where it is held; several places may hold one.

    Attributes:
        last_calls: The last call of each outermost module.
    """

    def __init__(self, module: nn.Module, batch_first: bool, names: Mapping[Slot, str]) -> None:
        self._module, self._batch_first, self._names = module, batch_first, names
        self.aliases: dict[str, list[Slot]] = defaultdict(list)
        for slot, name in names.items():
            self.aliases[name].append(slot)
        self._tapping = Tapping(names, self.aliases, self.quietly)
        self._quiet = False
        self.last_calls: dict[nn.Module, LastCall] = {}
        self._planning = Planning(batch_first, names, partial(setattr, self, "_observer"))
        self._stack: list[Running] = []
        self._trained: frozenset[str] = frozenset()
        self._observer: Observer | None = None
        self._handles: list[Any] = []
        for submodule in module.modules():
            self._handles += [
                submodule.register_forward_pre_hook(ForwardHook(self._enter), with_kwargs=True),
                # First of all, so that what other hooks keep of the output has passed the tap.
                submodule.register_forward_hook(
                    ForwardHook(self._leave), prepend=True, with_kwargs=True, always_call=True
                ),
            ]
        self._guarded: set[int] = set()

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def planning(self) -> Planning:
        """The plans, and whether they have been verified."""
        return self._planning

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that were trained when the module was last called."""
        return self._trained

    @property
    def gathering(self) -> Gathering:
        """What backward brings."""
        return self._tapping.gathering

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that now stands where ``name`` is held.

        Raises:
            UnsupportedGradientError: If there is none any more.
        """
        module, slot = self.aliases[name][0]
        parameter = parameter_slots(module).get(slot)
        if parameter is None or any(parameter_slots(m).get(other) is not parameter for m, other in self.aliases[name]):
            raise UnsupportedGradientError(
                f"parameter {name} is gone from the module, or no longer tied as it was: call clipper.detach() and "
                "make a new clipper."
            )
        return parameter

    @contextmanager
    def apart(self) -> Iterator[Gathering]:
        """Gather into another `Gathering` in a block that runs the module for another purpose."""
        tapping = self._tapping
        before = tapping.gathering, dict(self.last_calls), tapping.batch_size
        tapping.gathering = Gathering(before[0].shared)
        try:
            yield tapping.gathering
        finally:
            tapping.gathering, self.last_calls, tapping.batch_size = before

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Do nothing in a block that runs the module for another purpose."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # What the hooks do

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._observer is not None:
            self._observer.enter(module, args, kwargs)
            return None
        if self._quiet or not torch.is_grad_enabled():
            return None
        if self._stack and self._stack[0].module is module:
            self.recover()
        if not self._stack:
            self._begin(module, (args, kwargs))
        caller = self._stack[-1] if self._stack else None
        running = Running(module, self._next_plan(module))
        self._stack.append(running)
        return self._tapping.start(running, caller, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._observer is not None:
            self._observer.leave(module, args, kwargs, output)
            return None
        if not self._stack or self._stack[-1].module is not module:
            return None
        running = self._stack.pop()
        for parameter in running.withheld:
            parameter.requires_grad_(True)
        if output is None:  # the forward raised an error
            return None
        try:
            return self._tapping.end(running, self._stack[-1] if self._stack else None, args, kwargs, output)
        except UnsupportedGradientError:
            self._planning.forget()  # so that the next step looks at the model again
            raise

    def _begin(self, module: nn.Module, arguments: Arguments) -> None:
        """An outermost call starts."""
        refuse_batch_norm(self._module)
        self._look_at_trained()
        self._planning.restart()
        if current_task() != -1:  # a checkpoint runs a part of the forward again
            return
        size = self._tapping.batch_size = count_samples(arguments, self._batch_first, type(module).__name__)
        if not size:
            return
        self._planning.begin(module, arguments, size)
        self.gathering.shared = self._planning.shared
        axes, autocast = self._planning.output_axes(module), autocast_of(Skeleton(arguments))
        self.last_calls[module] = LastCall(module, arguments, size, axes, autocast, self._planning.whole)

    def _look_at_trained(self) -> None:
        """See which parameters are trained now."""
        trained = frozenset(name for name in self.aliases if self.parameter(name).requires_grad)
        if trained != self._trained:
            self._guard(trained)
            self._tapping.train(trained)
            self._planning.train(trained)
            self._trained = trained

    def _guard(self, names: frozenset[str]) -> None:
        """Watch the accumulators of the trained parameters."""
        for name in names:
            parameter = self.parameter(name)
            if id(parameter) not in self._guarded:
                self._guarded.add(id(parameter))
                hook = partial(self._bypassed, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _next_plan(self, module: nn.Module) -> CallPlan:
        """The plan of this call of ``module``."""
        if self._tapping.batch_size == 0:
            return _NOTHING
        plan = self._planning.next(module)
        if plan is not None:
            return plan
        if not self._planning.uses_trained(module):
            return _NOTHING
        self._planning.forget()
        raise UnsupportedGradientError(
            f"{type(module).__name__} did not run when the model was looked at, so how it treats samples is not known. "
            "Repeat this step: the model is looked at again. (Nothing was clipped yet.)"
        )

    def recover(self) -> None:
        """Give back what calls that were cut short (an interrupt from the keyboard) have withheld."""
        while self._stack:
            for parameter in self._stack.pop().withheld:
                parameter.requires_grad_(True)

    def _bypassed(self, name: str, parameter: Tensor) -> None:
        """A gradient reached a parameter past the layers."""
        del parameter
        if self._quiet:
            return
        self.gathering.discard()
        self._planning.forget()
        raise UnsupportedGradientError(
            f"parameter {name} was used outside of the module's forward (in the loss, say, or by code that the module "
            "does not call through a layer), so what each sample contributes there is not known. Use it inside "
            "forward; or, for a penalty on weights, give the optimizer weight_decay. For an ordinary backward, call "
            "clipper.detach() first. If forward has used it for the first time now, repeat this step."
        )

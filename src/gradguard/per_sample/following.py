"""Follows a module's calls in forward: takes the weights out of autograd's sight and taps what the layers return.

While a layer runs, its parameters do not require grad, so autograd never computes their gradients; what it returns
passes through a `tap`, which in backward hands over the layer's input and the gradient of its output. Whatever else
uses a parameter still reaches the parameter's own accumulator, and is noticed there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gradguard.per_sample.mini_batch import Gathering, UsedLayer
from gradguard.per_sample.own_code import LeftOut, OwnCode
from gradguard.per_sample.plan import CallPlan, Plans, Treatment
from gradguard.per_sample.samples import Arguments, count_samples
from gradguard.per_sample.support import refuse_batch_norm
from gradguard.per_sample.tap import current_task, tap
from gradguard.per_sample.trees import Skeleton

_NOTHING = CallPlan(Treatment.NOTHING, False, (), ())


class _Running:
    """A module whose forward is running.

    Attributes:
        module: The module.
        plan: What to do.
        withheld: Parameters that do not require grad until it has run.
        code: What is known of its own code, for `Treatment.OWN_CODE`.
        given: What the layers that its code called have returned, with the version of each tensor.
        tapped: What its code called layers with.
        left_out: Its entry among what its caller's code called.
        generator_state: State of the random generator at its start, where the rule asks.
    """

    __slots__ = ("code", "generator_state", "given", "left_out", "module", "plan", "tapped", "withheld")

    def __init__(self, module: nn.Module, plan: CallPlan) -> None:
        self.module, self.plan = module, plan
        self.withheld: list[nn.Parameter] = []
        self.code: OwnCode | None = None
        self.given: list[tuple[Tensor, int]] = []
        self.tapped: list[Tensor] = []
        self.left_out: LeftOut | None = None
        self.generator_state: Tensor | None = None


@dataclass(frozen=True)
class LastCall:
    """One outermost call, to be repeated.

    Attributes:
        module: What was called.
        arguments: With what.
        batch_size: Number of samples.
        output_axes: Batch axis of each tensor that it returned.
        autocast: Device type and dtype of the autocast that it ran under, or None.
    """

    module: nn.Module
    arguments: Arguments
    batch_size: int
    output_axes: Sequence[BatchAxis | None]
    autocast: tuple[str, torch.dtype] | None


class Following:
    """Hooks on every layer of ``module``, until `remove`.

    Args:
        module: The outermost module.
        batch_first: Whether the batch is the first dimension of what it is called with.
        names: The name of each parameter by where it is held; several places may hold one.

    Attributes:
        gathering: What backward brings.
        last_calls: The last call of each outermost module.
    """

    def __init__(self, module: nn.Module, batch_first: bool, names: Mapping[Slot, str]) -> None:
        self._module, self._batch_first, self._names = module, batch_first, names
        self.aliases: dict[str, list[Slot]] = defaultdict(list)
        for slot, name in names.items():
            self.aliases[name].append(slot)
        self.gathering = Gathering()
        self._quiet = False
        self.last_calls: dict[nn.Module, LastCall] = {}
        self._plans: dict[nn.Module, Plans] = {}
        self._stack: list[_Running] = []
        self._trained: frozenset[str] = frozenset()
        self._planned: frozenset[str] = frozenset()
        self._wanted_of: dict[nn.Module, dict[str, str]] = {}
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._outermost: Plans | None = None
        self._batch_size = -1
        self._anchors: dict[torch.device, Tensor] = {}
        self._observer: Observer | None = None
        self._handles: list[Any] = []
        for submodule in module.modules():
            self._handles += [
                submodule.register_forward_pre_hook(ForwardHook(self._enter), with_kwargs=True),
                submodule.register_forward_hook(ForwardHook(self._leave), with_kwargs=True, always_call=True),
            ]
        self._guarded: set[int] = set()

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that now stands where ``name`` is held.

        Raises:
            UnsupportedGradientError: If there is none any more.
        """
        module, slot = self.aliases[name][0]
        parameter = module._parameters.get(slot)
        if parameter is None:
            raise UnsupportedGradientError(f"parameter {name} is gone from the module: make a new clipper.")
        return parameter

    @contextmanager
    def apart(self) -> Iterator[Gathering]:
        """Gather into another `Gathering` in a block that runs the module for another purpose."""
        before = self.gathering, dict(self.last_calls), self._batch_size
        self.gathering = Gathering()
        self.gathering.shared = before[0].shared
        try:
            yield self.gathering
        finally:
            self.gathering, self.last_calls, self._batch_size = before

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
        if not self._stack:
            self._begin(module, (args, kwargs))
        caller = self._stack[-1] if self._stack else None
        running = _Running(module, self._next_plan(module))
        self._stack.append(running)
        changed = None
        if caller is not None and caller.code is not None and running.plan.sees_samples:
            changed = self._leave_out(caller, running, args, kwargs)
        self._withhold(running, *(changed or (args, kwargs)))
        return changed

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
        return self._tapped(running, args, kwargs, output)

    def _begin(self, module: nn.Module, arguments: Arguments) -> None:
        """An outermost call starts."""
        refuse_batch_norm(self._module)
        self._look_at_trained()
        self._calls.clear()
        if current_task() != -1:  # a checkpoint runs a part of the forward again
            return
        self._batch_size = count_samples(arguments, self._batch_first, type(module).__name__)
        if not self._batch_size:
            self._outermost = None
            return
        if module not in self._plans:
            slots = {id(self.parameter(name)): self.aliases[name][0] for name in self._trained}
            self._plans[module] = Plans(
                module, arguments, self._batch_first, self._batch_size, slots, partial(setattr, self, "_observer")
            )
            self.gathering.shared = frozenset().union(*[self._shared_of(plans) for plans in self._plans.values()])
        self._outermost = self._plans[module]
        axes = self._outermost.of(module, 0)
        self.last_calls[module] = LastCall(
            module, arguments, self._batch_size, axes.outputs if axes else (), _autocast(Skeleton(arguments))
        )

    def _shared_of(self, plans: Plans) -> set[str]:
        """The parameters that more than one call uses."""
        uses = Counter(self._names[slot] for used in plans.uses() for slot in used)
        return {name for name, count in uses.items() if count > 1}

    def _look_at_trained(self) -> None:
        """See which parameters are trained now; what was planned without one of them is planned again."""
        trained = frozenset(name for name in self.aliases if self.parameter(name).requires_grad)
        if trained != self._trained:
            self._guard(trained)
            self._wanted_of.clear()
            if not trained <= self._planned:
                self._plans.clear()
                self._planned = trained
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
        number = self._calls[module]
        self._calls[module] += 1
        known = [self._outermost] if self._outermost else []
        for plans in (*known, *self._plans.values()):
            plan = plans.of(module, number)
            if plan is not None:
                return plan
        return _NOTHING if self._batch_size == 0 else self._unseen(module)

    def _unseen(self, module: nn.Module) -> CallPlan:
        """A layer that did not run in the dry run: harmless without parameters, else the dry run must be repeated."""
        if not any(self._names.get((m, slot)) in self._trained for m in module.modules() for slot in m._parameters):
            return _NOTHING
        self._plans.clear()
        self._stack.clear()
        raise UnsupportedGradientError(
            f"{type(module).__name__} did not run when this model was first called, so how it treats samples is not "
            "known. Repeat this step: the model is looked at again. (Nothing was clipped yet.)"
        )

    # Forward

    def _withhold(self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the parameters that this call uses not require grad until it has run."""
        plan, module = running.plan, running.module
        if self._batch_size == 0:
            self._hide(running, list(self._names))
        elif plan.treatment is Treatment.RULE:
            self._hide(running, [(m, slot) for m in module.modules() for slot in m._parameters])
            if plan.rule is not None and plan.rule.replays and getattr(module, "dropout", 0) and module.training:
                running.generator_state = _generator_state(module)
        elif plan.treatment is Treatment.OWN_CODE:
            names = {self._names[slot] for slot in plan.uses} & self._trained
            if not names:
                return
            aliases = {name: self.aliases[name] for name in sorted(names)}
            self._hide(running, [slot for slots in aliases.values() for slot in slots])
            arguments = Skeleton((args, kwargs))
            running.code = OwnCode(
                module,
                arguments,
                plan.inputs,
                Skeleton(()),
                plan.outputs,
                (),
                -1,
                aliases,
                _autocast(arguments),
                self.quietly,
            )
            running.given = [(tensor, tensor._version) for tensor in arguments.tensors]

    def _hide(self, running: _Running, slots: Sequence[Slot]) -> None:
        for module, slot in slots:
            parameter = module._parameters.get(slot)
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad_(False)
                running.withheld.append(parameter)

    def _leave_out(self, caller: _Running, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tap what the caller's code has computed and now calls a layer with."""
        arguments = Skeleton((args, kwargs))
        known = {id(tensor) for tensor, _ in caller.given}
        tapped = [i for i, t in enumerate(arguments.tensors) if t.is_floating_point() and id(t) not in known]
        layer = LeftOut(running.module, tapped, [running.plan.inputs[i] for i in tapped])
        assert caller.code is not None
        caller.code.left_out.append(layer)
        running.left_out = layer
        if not tapped:
            return None
        values = [arguments.tensors[i] for i in tapped]
        tensors: list[Tensor | None] = list(arguments.tensors)
        receive = partial(self.gathering.receive_left_out, layer)
        for i, value in zip(tapped, tap(receive, (), self._anchor(values[0]), values), strict=True):
            tensors[i] = value
        caller.tapped += [value.detach() for value in values]
        return arguments.fill(tensors)

    def _tapped(self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What the module returned, tapped where a rule or its own code asks for it."""
        plan, caller = running.plan, self._stack[-1] if self._stack else None
        changed = None
        if self._batch_size == 0:
            changed = self._tap_outputs(output, (), self.gathering.receive_nothing) if caller is None else None
        elif plan.treatment is Treatment.RULE:
            changed = self._tap_layer(running, args, kwargs, output)
        elif running.code is not None:
            changed = self._tap_code(running, output)
        if running.left_out is not None and caller is not None:
            returned = Skeleton(output if changed is None else changed)
            caller.given += [(tensor, tensor._version) for tensor in returned.tensors]
            running.left_out.output, running.left_out.output_axes = returned, plan.outputs
            returned.release()
        return changed

    def _tap_layer(self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        plan, wanted = running.plan, self._wanted(running.module)
        if not wanted or plan.rule is None:
            return None
        arguments, returned = Skeleton((args, kwargs)), Skeleton(output)
        size = self._samples(plan, arguments.tensors)
        layer = UsedLayer(running.module, plan, arguments, size, wanted, running.generator_state)
        self.gathering.activations += sum(t.nbytes for t in (*arguments.tensors, *returned.tensors))
        saved = [*arguments.release(), *(returned.tensors if plan.rule.replays else ())]
        return self._tap_outputs(output, saved, partial(self.gathering.receive_layer, layer))

    def _wanted(self, module: nn.Module) -> dict[str, str]:
        """The trained parameters of a layer: their names in the layer, and in the whole module."""
        if module not in self._wanted_of:
            self._wanted_of[module] = {
                f"{prefix}.{slot}" if prefix else slot: name
                for prefix, layer in module.named_modules()
                for slot in layer._parameters
                if (name := self._names.get((layer, slot))) in self._trained and name is not None
            }
        return self._wanted_of[module]

    def _tap_code(self, running: _Running, output: Any) -> Any:
        code = running.code
        assert code is not None
        for tensor, version in running.given:
            if tensor._version != version:
                raise UnsupportedGradientError(
                    f"the code of {type(running.module).__name__} changed a tensor in place that a layer had returned "
                    f"(shape {tuple(tensor.shape)}), and it uses {', '.join(code.aliases)} by itself. Write x = x + y "
                    "in place of x += y there."
                )
        code.output = Skeleton(output)
        code.batch_size = self._samples(running.plan, code.arguments.tensors)
        returned, given = code.output.release(), {id(tensor) for tensor, _ in running.given}
        code.computed = [i for i, tensor in enumerate(returned) if id(tensor) not in given]
        saved = [tensor for tensor, _ in running.given] + running.tapped + [returned[i] for i in code.computed]
        code.arguments.release()
        return self._tap_outputs(output, saved, partial(self.gathering.receive_code, code))

    def _tap_outputs(self, output: Any, saved: Sequence[Tensor], receive: Callable[..., None]) -> Any:
        returned = Skeleton(output)
        values = [t for t in returned.tensors if t.is_floating_point()]
        if not values:
            return None
        places = [i for i, t in enumerate(returned.tensors) if t.is_floating_point()]
        tensors: list[Tensor | None] = list(returned.tensors)
        count = len(tensors)
        results = tap(partial(_receive_all, receive, count, places), saved, self._anchor(values[0]), values)
        for place, value in zip(places, results, strict=True):
            tensors[place] = value
        return returned.fill(tensors)

    def _samples(self, plan: CallPlan, tensors: Sequence[Tensor]) -> int:
        """Number of samples of one call."""
        for tensor, axis in zip(tensors, plan.inputs, strict=True):
            if axis is not None and not axis.flattened:
                return tensor.shape[axis.dim]
        return self._batch_size

    def _anchor(self, value: Tensor) -> Tensor:
        if value.device not in self._anchors:
            self._anchors[value.device] = torch.zeros((), device=value.device, requires_grad=True)
        return self._anchors[value.device]

    # Backward

    def _bypassed(self, name: str, parameter: Tensor) -> None:
        """A gradient reached a parameter past the layers."""
        del parameter
        if self._quiet:
            return
        self.gathering.discard()
        raise UnsupportedGradientError(
            f"parameter {name} was used outside of the module's forward (in the loss, say, or by code that the module "
            "does not call through a layer), so what each sample contributes there is not known. Use it inside "
            "forward; or, for a penalty on weights, give the optimizer weight_decay. For an ordinary backward, call "
            "clipper.detach() first."
        )


def _receive_all(
    receive: Callable[..., None],
    count: int,
    places: Sequence[int],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    task: int,
) -> None:
    """Hand over a gradient for each output, None for those that are no floating-point tensors."""
    everywhere: list[Tensor | None] = [None] * count
    for place, grad in zip(places, grads, strict=True):
        everywhere[place] = grad
    receive(saved, everywhere, task)


def _generator_state(module: nn.Module) -> Tensor:
    parameter = next(module.parameters())
    return torch.cuda.get_rng_state(parameter.device) if parameter.is_cuda else torch.get_rng_state()


def _autocast(arguments: Skeleton) -> tuple[str, torch.dtype] | None:
    kind = next((t.device.type for t in arguments.tensors), "cpu")
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

"""Follows a module's calls: knows which layer runs, what to do with it, and what a gradient that went past it means."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradguard.errors import UnsupportedGradientError
from gradguard.module_hooks import ForwardHook
from gradguard.per_sample.call_arguments import (
    Arguments,
    Batch,
    Skeleton,
    Slot,
    Versions,
    count_samples,
    signature,
    tensor_leaves,
    versions_of,
    written,
)
from gradguard.per_sample.capture import LayerCapture, RunningCall, autocast_of
from gradguard.per_sample.dry_run import CallObserver
from gradguard.per_sample.layer_plans import CallPattern, CallPlan, LayerPlanner, Treatment
from gradguard.per_sample.loss.loss_check import LossCheck
from gradguard.per_sample.mini_batch import GradientCollector
from gradguard.per_sample.module_state import StateReader
from gradguard.per_sample.operation_trace import OperationTrace
from gradguard.per_sample.refusals import (
    refuse_batch_norm,
    refuse_new_parameters,
    refuse_sharded_since,
    refuse_stand_ins,
)
from gradguard.per_sample.rerun import (
    Draws,
    copied_buffers,
    frozen,
    substituted,
    undisturbed,
    without_graph,
)
from gradguard.per_sample.sample_loop import LoopedCall, OuterCall, same_rows
from gradguard.per_sample.witness import MANY, SOME, Witness
from gradguard.state.generators import (
    States,
    accelerators_of,
    generator_states,
    restore_generators,
    states_of_torch,
)
from gradguard.torch_private import (
    current_graph_task,
    hook_order,
    hooks_of_tensor,
    never_compiled,
    parameter_slots,
    parameters_at,
    parameters_in,
    stop_compiling,
)

_NOTHING = CallPlan(Treatment.NOTHING, False, (), ())
_UNREAD = LossCheck("share", True, lambda: 1.0, reads=False)
"""The check of a clipper that is no more."""


class CallTracker:
    """Hooks on every layer of ``module``, until `remove`.

    Args:
        module: The outermost module.
        batch_first: Whether the batch is the first dimension of what it is called with.
        names: The name of each parameter by where it is held; several places may hold one.
        reduction: Relation of the loss to the samples' losses, ``"mean"`` or ``"sum"``.
        rehearse: Called with this object and a call before it, if it is of a new kind or size: what tries out whether
            per-sample gradients will be right; None for no trial.
        loss_check: Looks at the loss of such a call; it is not kept alive.

    Attributes:
        planner: The plans, and whether they have been verified.
        reduction: As it was given.
        trained: Names of the parameters that were trained when the module was last called.
        last_calls: The last call of each outermost module.
        witness: Runs a sample of some mini-batches alone again.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_first: bool,
        names: Mapping[Slot, str],
        reduction: str = "mean",
        rehearse: "Callable[[CallTracker, OuterCall], None] | None" = None,
        loss_check: LossCheck | None = None,
    ) -> None:
        # Not held: a module leads here, and the graph of a loss, which no garbage collector sees, to the module.
        self._loss_check_of_clipper = weakref.ref(_UNREAD if loss_check is None else loss_check)
        self._module, self.batch_first, self._names = module, batch_first, names
        self.reduction, self._rehearse = reduction, rehearse
        self._rehearsed: CallPattern | None = None
        self._loop: LoopedCall | None = None
        self._witnessed: LoopedCall | None = None
        self.witness = Witness(None)
        self._trace: OperationTrace | None = None
        self._untried: list[tuple[OuterCall, OperationTrace]] = []
        self._state_before: States | None = None
        self._buffers_before: dict[Slot, Tensor] = {}
        self._unverified: list[OuterCall] = []
        self._given: Versions = []
        self._without_gradient: Collection[str] = ()
        self._seen: Mapping[str, nn.Parameter] = {}
        self._held: Sequence[nn.Parameter | None] = ()
        self._by_name: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, list[Slot]] = defaultdict(list)
        for slot, name in names.items():
            self.aliases[name].append(slot)
        self._capture = LayerCapture(names, self.aliases, self.quietly)
        self._quiet = False
        self.last_calls: dict[nn.Module, OuterCall] = {}
        self.planner = LayerPlanner(names, self._observed_by)
        self._sound: int | None = None
        self._stack: list[RunningCall] = []
        self.trained: frozenset[str] = frozenset()
        self._observer: CallObserver | None = None
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[nn.Module, tuple[int, int]] = {}
        try:
            for submodule in module.modules():
                before = submodule.register_forward_pre_hook(ForwardHook(self._enter), with_kwargs=True)
                self._handles.append(before)
                # First of all, so that what other hooks keep of the output has passed the tap.
                after = submodule.register_forward_hook(
                    ForwardHook(self._leave), prepend=True, with_kwargs=True, always_call=True
                )
                self._handles.append(after)
                self._hooks[submodule] = after.id, before.id
        except BaseException:
            self.remove()
            raise
        self._guarded: set[int] = set()
        self._state = StateReader(module)  # our own hooks are a part of it

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        self._loss_check.end()
        while self._handles:
            self._handles.pop().remove()
        self._capture.collector.closed = True
        self.witness.forget()

    @property
    def batch_size(self) -> int:
        """Number of samples in the call that began last; -1 before any."""
        return self._capture.batch_size

    @property
    def _loss_check(self) -> LossCheck:
        """The check of the loss, as long as there is a clipper."""
        return self._loss_check_of_clipper() or _UNREAD

    @property
    def collector(self) -> GradientCollector:
        """The gradients that backward brings."""
        return self._capture.collector

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that now stands where ``name`` is held; see `parameters`."""
        return self.parameters([name])[name]

    def parameters(self, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
        """Return the parameters that now stand where ``names`` are held; all without them.

        Raises:
            UnsupportedGradientError: If there is none any more, two were tied, or one was added.
        """
        modules = [*self._module.modules()] if self.planner.sharded else self._state.modules
        held = parameters_in(modules)
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            found: dict[str, nn.Parameter] = {}
            for name, parameter in zip(self._names.values(), parameters_at(self._names), strict=True):
                if parameter is None or found.setdefault(name, parameter) is not parameter:
                    raise UnsupportedGradientError(
                        f"parameter {name} is gone from the module, or no longer tied as it was: call clipper.detach() "
                        "and make a new clipper."
                    )
            if len(set(map(id, found.values()))) < len(found):
                raise UnsupportedGradientError(
                    "two parameters were tied after the clipper was made, so that each would get a part of one "
                    "gradient: call clipper.detach() and make a new clipper."
                )
            refuse_new_parameters(self._module, self._names)
            self._held, self._by_name = held, found
        return self._by_name if names is None else {name: self._by_name[name] for name in names}

    def refuse_hooks(self) -> None:
        """Check that no trained parameter has a hook: no gradient comes to it, so that the hook would not run.

        Raises:
            UnsupportedGradientError: If one has.
        """
        for name, parameter in self.parameters().items():
            hooks = hooks_of_tensor(parameter) if name in self.trained else []
            if any(getattr(hook, "func", None) is not _bypassed for hook in hooks):
                raise UnsupportedGradientError(
                    f"parameter {name} has a hook (register_hook, register_post_accumulate_grad_hook), which never "
                    "runs: samples' gradients are computed beside the parameter. Remove the hook, and freeze the "
                    "parameter, put a mask into forward, or change .grad after pre_step(). Nothing of this mini-batch "
                    "was clipped."
                )

    def verified(self, conclusive: bool) -> None:
        """The gradients of the last calls have been found to be right; the next are looked at too if not conclusive."""
        # A sharded layer has others while it is gathered.
        if not self.planner.sharded and (held := self.parameters()) is not self._seen:
            refuse_stand_ins(self._seen, held)
        while self._unverified:
            call = self._unverified.pop()
            if conclusive:
                call.pattern.sizes.add(call.batch_size)
        while self._untried:
            call, trace = self._untried.pop()
            call.pattern.operations.learn(trace, call.batch_size)
        self.witness.end()

    @contextmanager
    def collect_separately(self, pattern: CallPattern) -> Iterator[GradientCollector]:
        """Gather into another `GradientCollector` in a block that calls the module in one way for another purpose."""
        capture = self._capture
        before = capture.collector, dict(self.last_calls), list(self._unverified)
        size, verifying = capture.batch_size, capture.verifying  # which a checkpoint needs again in backward
        capture.collector = GradientCollector(before[0].shared | self.planner.shared)
        self._rehearsed = pattern
        try:
            yield capture.collector
        finally:
            capture.collector, self.last_calls, self._unverified = before
            capture.batch_size, capture.verifying = size, verifying
            self._rehearsed = None

    @contextmanager
    def _observed_by(self, observer: CallObserver) -> Iterator[None]:
        """Let ``observer`` hear of the calls in a block, and nobody else."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Do nothing in a block that runs the module for another purpose."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # What the hooks do

    @never_compiled
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._observer is not None:
            self._observer.enter(module, (args, kwargs))
            return None
        if self._quiet or self._loop is not None or not torch.is_grad_enabled():
            return None
        if self._stack and self._stack[0].module is module:
            self.recover()
        notes = self._trace is not None and self._trace.pause()
        if not self._stack:
            self._begin(module, (args, kwargs))
            if self._loop is not None:
                self._stack.append(self._start_loop(self._loop))
                return None
            notes = self._trace is not None
        caller = self._stack[-1] if self._stack else None
        running = RunningCall(module, self._next_plan(module), caller, (args, kwargs))
        # Hooks of others run between the two of the clipper's, where parameters are kept from autograd.
        running.exposed = hook_order(module) != self._hooks[module]
        if caller is None and self._witnessed is not None:
            self._witnessed.draws = running.places.enter_context(Draws())
        self._stack.append(running)
        changed = self._capture.start(running)
        if self._trace is not None and notes:
            self._trace.starts(module, args)
            running.notes = True
            if running.plan.treatment is not Treatment.RULE or running.exposed:
                self._trace.resume()
        return changed

    @never_compiled
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._observer is not None:
            self._observer.leave(module, output)
            return None
        if not self._stack or self._stack[-1].module is not module:
            return None
        if self._trace is not None:
            self._trace.pause()
        running = self._stack.pop()
        running.give_back()
        running.arguments, is_outermost = (args, kwargs), not self._stack
        changed = None
        try:
            if output is None:  # the forward raised an error
                self._loop = self._witnessed = None
                return None
            if self._loop is not None:
                loop, self._loop = self._loop, None
                changed = self._capture.tap_loop(loop, output)
            else:
                changed = self._capture.end(running, output)
                returned = output if changed is None else changed
                one_by_one = is_outermost and self._look_at_operations(module, returned)
                if is_outermost and self._witnessed is not None:
                    witnessed, self._witnessed = self._witnessed, None
                    # or no longer, because of what it did just now
                    follows = not one_by_one and not self.last_calls[module].pattern.looped
                    tapped = self._capture.tap_loop(witnessed, returned, witnessed=follows)
                    changed = changed if tapped is None else tapped
            return self._refuse_unowned(module, changed, output)
        except UnsupportedGradientError:
            self.planner.forget()  # so that the next step looks at the model again
            raise
        finally:
            if is_outermost:
                self._trace = None
            elif self._trace is not None and running.notes:  # what follows is noted
                self._trace.made(output if changed is None else changed)
                self._trace.resume()

    def _look_at_operations(self, module: nn.Module, output: Any) -> bool:
        """An outermost call ends: look closely at it if it did what no call has done that was found to be right.

        Returns:
            Whether the samples of this call run one by one, for too few are finite to see whether they are separate;
            what it did is then as new as before.

        Raises:
            UnsupportedGradientError: If samples are found to be mixed, or it cannot be looked at.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return False
        trace.ends(Skeleton(output).tensors)
        if self._rehearsed is not None:
            if not self._rehearsed.sizes:  # two samples are compared in this trial, not sizes alone
                self._rehearsed.operations.learn(trace)
            return False
        call = self.last_calls[module]
        self.witness.by_value |= trace.by_value
        if call.pattern.operations.is_new(trace, call.batch_size):
            number = min(2, call.batch_size)
            few = len(call.batch.finite_samples(number)) < number
            # A small batch whose samples all run alone shows as much as a trial does.
            all_alone = call.batch_size <= MANY and call.pattern.operations.knows(trace)
            self._look_again(call, Skeleton(output).tensors, tries=not few and not all_alone)
            if few:
                return True
        elif trace.by_value and self._witnessed is not None:
            self._take_samples(self._witnessed, call, SOME)
        if self._witnessed is None:
            self.witness.missed.add(module)
        self._untried.append((call, trace))
        return False

    def _look_again(self, call: OuterCall, outputs: Sequence[Tensor], tries: bool) -> None:
        """Try a call out once more if ``tries``, and let its samples run alone, because of what it did."""
        witnessed, self._witnessed = self._witnessed, None
        with substituted(self._buffers_before):
            if tries and call.pattern.sizes and self._rehearse is not None:
                sizes, call.pattern.sizes = call.pattern.sizes, set()
                try:
                    self._rehearse(self, call)
                finally:
                    call.pattern.sizes |= sizes
            if witnessed is None:
                self.witness.look_at(MANY)
                witnessed = self._record_now(call, outputs)
        if witnessed is None:
            raise UnsupportedGradientError(
                f"{type(call.pattern.module).__name__} did something that it had not done before, and it could not be "
                "run again to see whether it treats samples apart: it keeps something from call to call, such as a "
                "counter, or draws numbers of Python's or NumPy's for the first time. Hold a counter in a buffer "
                "(register_buffer), which is put back; or repeat this step, which is looked at from its beginning."
            )
        self._take_samples(witnessed, call, MANY)
        self._witnessed = witnessed

    def _take_samples(self, witnessed: LoopedCall, call: OuterCall, number: int) -> None:
        """Let some samples of a call that has just run be run alone, unless it has written into its arguments."""
        if written(self._given):
            return
        self.witness.look_at(number)
        for sample in self.witness.samples(call.batch_size):
            if sample not in witnessed.taken:
                witnessed.taken[sample] = call.batch.samples([sample])

    def _begin(self, module: nn.Module, arguments: Arguments) -> None:
        """An outermost call starts."""
        state = self._look_at_state()
        self._look_at_trained()
        self.planner.restart()
        if current_graph_task() != -1:  # a checkpoint runs a part of the forward again
            return
        size = self._capture.batch_size = count_samples(arguments, self.batch_first, type(module).__name__)
        if not size:
            return
        rehearsal = self._rehearsed is not None
        autocast = autocast_of(Skeleton(arguments))
        uses_trained = self.planner.uses_trained(module)
        rehearse = None if self.planner.sharded or not uses_trained else self._rehearse
        kind = module, signature(arguments, sizes=not self.planner.sharded), autocast
        pattern = self._rehearsed or self.planner.patterns.get((kind, state))
        fresh = pattern is None
        if pattern is None:
            pattern = self.planner.plan(module, Batch(arguments, self.batch_first, size), (kind, state))
        call = OuterCall(pattern, Batch(arguments, self.batch_first, size, pattern.whole), autocast)
        self._capture.verifying = not rehearsal and rehearse is not None and size not in pattern.sizes
        if self._capture.verifying and rehearse is not None:
            rehearse(self, call)
            self.planner.restart()
            self._unverified.append(call)
        if fresh:
            self.planner.patterns[kind, self._state.passed()] = pattern
            self.witness.tried_out()
        if self._capture.verifying and None in pattern.output_axes:
            self.witness.look_at(MANY)  # the trial compares rows that are returned, and a loss has none
        if uses_trained and not rehearsal and self.collector.mini_batch is None:
            verifying, pulls = self._capture.verifying, not self.planner.sharded
            self._loss_check.look_between(module, call.batch, verifying)
            self._loss_check.start(size, pattern.output_axes, verifying, pulls)
        self.planner.resume(pattern)
        self.collector.shared = self.planner.shared
        self.last_calls[module] = call
        if pattern.looped:
            self._loop = self.looped_call(call)
            return
        if not self.witness.is_active or not (rehearsal or rehearse is not None):
            return
        self._trace = OperationTrace({id(p) for name, p in self.parameters().items() if name in self.trained})
        if rehearsal:
            return
        self._witnessed = self._record(call) if self.witness.is_due else None
        self._given = versions_of(Skeleton(arguments).tensors)
        self._buffers_before = copied_buffers(module) if pattern.changes_buffers else {}
        states = generator_states if pattern.draws else states_of_torch
        self._state_before = None if self._witnessed is not None else states(accelerators_of(self._seen.values()))

    def _look_at_state(self) -> int:
        """Look whether the model may compute something else than in the last call; return the number of its state."""
        if self.planner.sharded:  # each process has attributes of its own, and must do as the others do
            refuse_batch_norm(self._module)
            return 0
        if self._rehearsed is not None and self._sound is not None:
            return self._sound
        state = self._state.look()
        self.witness.bring_nearer(self._state.nearer)
        self._state.nearer = 0
        if state != self._sound:
            refuse_batch_norm(self._module)
            refuse_sharded_since(self._module)
            self._sound = state
        return state

    def _record(self, call: OuterCall) -> LoopedCall:
        """Take note of a call, so that one sample of it can be run alone again."""
        self.witness.watch(self.collector)
        loop = self.looped_call(call)
        for sample in self.witness.samples(call.batch_size):
            loop.taken[sample] = call.batch.samples([sample])
        loop.before = frozen(loop.module, call.pattern.changes_buffers)
        loop.recorded = versions_of(self.parameters(loop.places).values())
        return loop

    def _record_now(self, call: OuterCall, outputs: Sequence[Tensor]) -> LoopedCall | None:
        """Take note of a call that has just run, with the random numbers that it draws when it runs again.

        Args:
            call: The call.
            outputs: The tensors that it returned.

        Returns:
            None if it gives something else when it runs again.
        """
        if written(self._given):
            return None
        assert self._state_before is not None
        with self.quietly(), undisturbed(call.pattern.module, drop_rate=None):
            restore_generators(self._state_before)
            loop = self._record(call)
            args, kwargs = call.batch.samples(range(call.batch_size))
            with Draws() as loop.draws, without_graph(call.pattern.module):
                again = Skeleton(call.pattern.module(*args, **kwargs)).tensors
        if len(again) != len(outputs):
            return None
        axes = call.pattern.output_axes
        same = (
            axis is None or same_rows(recorded, output, axis, range(call.batch_size), call.pattern.precision)
            for recorded, output, axis in zip(outputs, again, axes, strict=True)
        )
        return loop if all(same) else None

    def looped_call(self, call: OuterCall, order: Sequence[int] | None = None) -> LoopedCall:
        """Return ``call``, or the samples of it in ``order``, as one that is repeated sample by sample."""
        inside = set(call.pattern.module.modules())
        trained = {name: self.aliases[name] for name in sorted(self.trained)}
        places = {name: slots for name, slots in trained.items() if any(module in inside for module, _ in slots)}
        order = range(call.batch_size) if order is None else order
        return LoopedCall(call, self.reduction, places, self.quietly, call.pattern.precision, order)

    def _start_loop(self, loop: LoopedCall) -> RunningCall:
        """The batch of a looped call starts."""
        running = RunningCall(loop.module, _NOTHING, None, loop.call.arguments)
        loop.before = frozen(loop.module, loop.call.pattern.changes_buffers)
        passes_on = any(tensor.requires_grad for tensor in tensor_leaves(running.arguments))  # to an earlier call, say
        if self._capture.verifying or passes_on:
            self._capture.put_leaves(running, loop.places)
            loop.leaves = running.leaves
        loop.draws = running.places.enter_context(Draws())
        return running

    def _refuse_unowned(self, module: nn.Module, changed: Any, output: Any) -> Any:
        """Let a gradient of a tensor that belongs to no sample be an error, where the outermost module returned it."""
        if self._stack or self._rehearsed is not None or not self._capture.batch_size or module not in self.last_calls:
            return changed
        pattern = self.last_calls[module].pattern
        tensors = Skeleton(output if changed is None else changed).tensors
        axes = pattern.output_axes if len(tensors) == len(pattern.output_axes) else [None] * len(tensors)
        self._loss_check.add_outputs(tensors, axes)
        for position, words in pattern.unowned.items():
            if position < len(tensors) and tensors[position].requires_grad:
                tensors[position].register_hook(partial(_refuse, words))
        return changed

    def _look_at_trained(self) -> None:
        """See which parameters are trained now."""
        parameters = self.parameters()
        if self._rehearsed is None and parameters is not self._seen:
            refuse_stand_ins(parameters)
            self._seen = parameters
        trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._without_gradient = {name for name, parameter in parameters.items() if parameter.grad is None}
        if trained == self.trained:
            return
        for name in trained if self._rehearsed is None else ():
            parameter = parameters[name]
            if id(parameter) not in self._guarded:
                self._guarded.add(id(parameter))
                hook = partial(_bypassed, weakref.ref(self), name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._capture.train(trained)
        self.planner.train(trained)
        self.trained = trained

    def _next_plan(self, module: nn.Module) -> CallPlan:
        """The plan of this call of ``module``."""
        if self._capture.batch_size == 0:
            return _NOTHING
        plan = self.planner.next(module)
        if plan is not None:
            return plan
        loops = [] if self.collector.mini_batch is None else self.collector.mini_batch.loops
        again = current_graph_task() != -1
        if not self.planner.uses_trained(module) or (again and any(module in loop.module.modules() for loop in loops)):
            return _NOTHING
        self.planner.unexpected()
        if again:
            raise UnsupportedGradientError(
                f"a checkpoint runs {type(module).__name__} again in backward, beside parameters that the checkpointed "
                "code uses by itself: expected these and the layers in a module of their own. Give checkpoint() that "
                "module, as checkpoint(self.block, x, use_reentrant=False), in place of a method or function."
            )
        raise UnsupportedGradientError(
            f"{type(module).__name__} did not run when the model was looked at, so how it treats samples is not known. "
            "Repeat this step: the model is looked at again. (Nothing was clipped yet.)"
        )

    def recover(self) -> None:
        """Give back what calls that were cut short (an interrupt from the keyboard) have withheld."""
        self._loop = self._witnessed = None
        if self._trace is not None:
            self._trace.pause()
        self._trace = None
        self._untried.clear()
        self.witness.forget()
        while self._stack:
            self._stack.pop().give_back()

    def bypassed(self, name: str, parameter: Tensor) -> None:
        """A gradient reached a parameter past the layers."""
        if self._quiet or parameter.grad is None:  # none came where the loss left a result out
            return
        if name in self._without_gradient:
            gradient, parameter.grad = parameter.grad, None
            if self.collector.take_from_checkpoint(name, gradient, current_graph_task()):
                return
        self.collector.discard()
        self.planner.forget()
        raise UnsupportedGradientError(
            f"parameter {name} was used outside of the module's forward (in the loss, say, or by code that the module "
            "does not call through a layer), so what each sample contributes there is not known. Use it inside "
            "forward; or, for a penalty on weights, give the optimizer weight_decay. For an ordinary backward, call "
            "clipper.detach() first. If forward has used it for the first time now, repeat this step."
        )


def _bypassed(tracker: "weakref.ref[CallTracker]", name: str, parameter: Tensor) -> None:
    """Does not keep what follows alive: a cycle through the hook of a tensor, which it leads to, is never freed."""
    if (found := tracker()) is not None:
        found.bypassed(name, parameter)


def _refuse(words: str, gradient: Tensor | None) -> None:
    if gradient is not None and bool(gradient.any()):
        raise UnsupportedGradientError(words)


def run_uncompiled(module: nn.Module) -> Callable[[], None]:
    """Let what is compiled in ``module`` run layer by layer, as it was written; return what ends that."""
    stack = ExitStack()
    for part in module.modules():
        stack.callback(stop_compiling(part))
    return stack.close


def places_of_parameters(module: nn.Module) -> dict[Slot, str]:
    """Return the first name of each parameter, by each place that holds it."""
    first: dict[int, str] = {}
    found = {}
    for prefix, layer in module.named_modules():
        for slot, parameter in parameter_slots(layer).items():
            if parameter is not None:
                found[layer, slot] = first.setdefault(id(parameter), f"{prefix}.{slot}" if prefix else slot)
    return found

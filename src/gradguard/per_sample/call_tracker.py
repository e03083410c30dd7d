"""Hooks that follow a module's calls: which layer runs, by which plan, and whether a gradient bypassed the layers."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradguard.distributed.fully_sharded import is_fully_sharded, own_parameters
from gradguard.distributed.placements import is_sharded
from gradguard.distributed.together import Place, Together
from gradguard.errors import GradguardError, UnsupportedGradientError
from gradguard.listeners import changes_on_the_way
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
from gradguard.per_sample.capture import Keep, LayerCapture, RunningCall, autocast_of
from gradguard.per_sample.carried_state import CarriedState, HeldTensors
from gradguard.per_sample.dry_run import CallObserver
from gradguard.per_sample.layer_plans import CallPattern, CallPlan, LayerPlanner, Treatment
from gradguard.per_sample.loss.loss_check import LossCheck
from gradguard.per_sample.mini_batch import GradientCollector
from gradguard.per_sample.module_state import StateReader
from gradguard.per_sample.operation_trace import OperationTrace
from gradguard.per_sample.origins import MadeOfData
from gradguard.per_sample.refusals import (
    refuse_batch_norm,
    refuse_carried,
    refuse_new_parameters,
    refuse_sharded_since,
    refuse_stand_ins,
    rows_are_chosen,
)
from gradguard.per_sample.rerun import (
    Draws,
    UntoldDrawsError,
    copied_buffers,
    frozen,
    substituted,
    undisturbed,
    without_graph,
)
from gradguard.per_sample.row_choices import chosen
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
    hook_tables_of,
    hooks_of_tensor,
    never_compiled,
    parameter_slots,
    parameters_at,
    parameters_in,
    stop_compiling,
)

_Result = TypeVar("_Result")

_NOTHING = CallPlan(Treatment.NOTHING, False, (), ())
_UNREAD = LossCheck("share", True, lambda: 1.0, reads=False)
"""The loss check that stands in once the clipper is freed."""


class CallTracker:
    """Follow the calls of every layer of ``module`` by hooks, until `remove`.

    Args:
        module: The outermost module.
        batch_first: Whether the batch is the first dimension of the module's arguments.
        names: The name of the parameter at each module and attribute; several of these may hold one parameter.
        reduction: Relation of the loss to the samples' losses: ``"mean"``, ``"sum"``, ``"token_mean"`` or ``"share"``.
        rehearse: Verifies per-sample gradients on a few samples. Called with this object and an outermost call before
            the call runs, if it is of a new kind or size. None for no verification.
        loss_check: Checks the loss of the calls; this object does not keep it alive.
        group: The processes over which a sharded module is spread.

    Attributes:
        together: The blocks in which the processes of a sharded module verify its calls.
        planner: The plans of calls, and the batch sizes that they were verified with.
        reduction: The argument of the same name.
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
        group: Any = None,
    ) -> None:
        # A weak reference: the module refers to this object, and the loss's autograd graph, which the garbage
        # collector cannot traverse, refers to the module. A strong one would close a cycle that is never freed.
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
        self._held_tensors = HeldTensors(())
        self._carried: dict[nn.Module, CarriedState] = {}
        self._made_of_data = MadeOfData()
        self._nested: list[weakref.ref[Tensor]] = []
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
        self.together = Together(module, group, self.planner.sharded, rehearse is not None)
        self._capture.keep = self.together.keep
        self._units = own_parameters(module) if self._capture.keep is not None else {}
        self._shards = [*module.parameters()] if self.planner.sharded else []
        self._noted, self._ended = False, None
        self._given_to_hooks: Arguments | None = None
        self._sound: int | None = None
        self._stack: list[RunningCall] = []
        self.trained: frozenset[str] = frozenset()
        self._observer: CallObserver | None = None
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[nn.Module, tuple[int, int]] = {}
        self._first: dict[nn.Module, RemovableHandle] = {}
        self._last: dict[nn.Module, RemovableHandle] = {}
        self._entered: nn.Module | None = None
        try:
            for submodule in module.modules():
                if hook_tables_of(submodule)[0] and not is_fully_sharded(submodule):
                    self._enter_before_other_hooks(submodule)
                before = submodule.register_forward_pre_hook(ForwardHook(self._enter), with_kwargs=True)
                self._handles.append(before)
                # Prepended, so other hooks get the output after its tap.
                after = submodule.register_forward_hook(
                    ForwardHook(self._leave), prepend=True, with_kwargs=True, always_call=True
                )
                self._handles.append(after)
                self._hooks[submodule] = after.id, before.id
                self._first.setdefault(submodule, before)
                if is_fully_sharded(submodule):  # what its hooks do is no operation of the model
                    enter, leave = ForwardHook(self._before_gathering), ForwardHook(self._after_resharding)
                    self._handles.append(submodule.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                    self._handles.append(submodule.register_forward_hook(leave))
        except BaseException:
            self.remove()
            raise
        self._guarded: set[int] = set()
        self._state = StateReader(module)  # after the hooks were registered, because it reads hooks too

    def remove(self) -> None:
        """Remove all hooks; calling it again does nothing."""
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
        """The clipper's loss check, or one that checks nothing after the clipper was freed."""
        return self._loss_check_of_clipper() or _UNREAD

    @property
    def collector(self) -> GradientCollector:
        """The collector of the gradients of backward."""
        return self._capture.collector

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that the module now holds under ``name``; see `parameters`."""
        return self.parameters([name])[name]

    def parameters(self, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
        """Return the parameters that the module now holds under ``names``, or all parameters if it is None.

        Raises:
            UnsupportedGradientError: If a parameter is gone, untied, tied to another, or was added.
        """
        held = parameters_in(self._state.modules)
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            found: dict[str, nn.Parameter] = {}
            for name, parameter in zip(self._names.values(), parameters_at(self._names), strict=True):
                if parameter is None or found.setdefault(name, parameter) is not parameter:
                    raise UnsupportedGradientError(
                        f"parameter {name} is gone from the module, or no longer tied as before: call clipper.detach() "
                        "and make a new clipper."
                    )
            if len(set(map(id, found.values()))) < len(found):
                raise UnsupportedGradientError(
                    "two parameters were tied after the clipper was made, so each name would get only a part of their "
                    "gradient: call clipper.detach() and make a new clipper."
                )
            refuse_new_parameters(self._module, self._names)
            self._held, self._by_name = held, found
        return self._by_name if names is None else {name: self._by_name[name] for name in names}

    def refuse_hooks(self) -> None:
        """Check that no trained parameter has a hook, which would never run because no gradient reaches the parameter.

        Raises:
            UnsupportedGradientError: If a trained parameter has a hook.
        """
        for name, parameter in self.parameters().items():
            hooks = hooks_of_tensor(parameter) if name in self.trained else []
            if any(getattr(hook, "func", None) is not _bypassed for hook in hooks):
                raise UnsupportedGradientError(
                    f"parameter {name} has a hook (register_hook, register_post_accumulate_grad_hook), which never "
                    "runs: per-sample gradients are computed without autograd reaching the parameter. Remove the hook. "
                    "Instead, freeze the parameter, put a mask into forward, or change .grad after pre_step(). Nothing "
                    "of this mini-batch was clipped."
                )

    def verified(self, conclusive: bool) -> None:
        """Record that the gradients of the last calls are right.

        Args:
            conclusive: Whether calls of the same kind and batch size need no further verification.
        """
        # A sharded layer holds other parameters while it is gathered.
        if not self.planner.sharded and (held := self.parameters()) is not self._seen:
            refuse_stand_ins(self._seen, held)
        while self._unverified:
            call = self._unverified.pop()
            if conclusive:
                call.pattern.sizes.add(call.batch_size)
        while self._untried:
            call, trace = self._untried.pop()
            call.pattern.operations.learn(trace, call.batch_size)
        self._carried.clear()
        self.witness.end()

    @contextmanager
    def collect_separately(self, pattern: CallPattern) -> Iterator[GradientCollector]:
        """Collect gradients in a separate `GradientCollector`, in a block that calls the module by ``pattern``."""
        capture = self._capture
        before = capture.collector, dict(self.last_calls), list(self._unverified)
        keep, capture.keep = capture.keep, None
        size, verifying = capture.batch_size, capture.verifying  # a checkpoint reads these again in backward
        capture.collector = GradientCollector(before[0].shared | self.planner.shared)
        self._rehearsed = pattern
        try:
            yield capture.collector
        finally:
            capture.collector, self.last_calls, self._unverified = before
            capture.keep = keep
            capture.batch_size, capture.verifying = size, verifying
            self._rehearsed = None

    @contextmanager
    def _observed_by(self, observer: CallObserver) -> Iterator[None]:
        """Report the calls in a block to ``observer`` only."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Make the clipper's hooks do nothing in a block that runs the module for another purpose."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # The hooks

    @never_compiled
    def _before_gathering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Pause the trace before the hooks of ``fully_shard``, which run before `_enter`."""
        del module
        if self._observer is not None:
            self._observer.rows.paused = True
        self._noted = self._trace is not None and self._trace.pause()
        self._given_to_hooks = args, kwargs

    @never_compiled
    def _after_resharding(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Continue after the hooks of ``fully_shard``, which run after `_leave`."""
        del args
        if self._observer is not None:
            self._observer.rows.paused = False
        if self._trace is not None:
            self._trace.made(output)
        self._resume()
        ended, self._ended = self._ended, None
        return self._give_out(module, None, output) if ended is module else None

    def _resume(self) -> None:
        """Continue the trace if it was paused for the hooks of ``fully_shard``."""
        if self._noted and self._trace is not None:
            self._trace.resume()
        self._noted, self._given_to_hooks = False, None

    def _enter_before_other_hooks(self, module: nn.Module) -> None:
        """Register a hook before the other hooks of ``module``: where it is the outermost, they are a part of it."""
        hook = ForwardHook(self._enter_outermost)
        if module in self._first and self._first[module].id != self._hooks[module][1]:
            self._first[module].remove()
        self._first[module] = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        self._handles.append(self._first[module])

    def _leave_after_other_hooks(self, module: nn.Module) -> None:
        """Let an outermost call of ``module`` end after the other forward hooks of ``module``, if it has any."""
        hooks = [*hook_tables_of(module)[1]]
        last = self._last.get(module)
        if is_fully_sharded(module) or hooks[-1] == (self._hooks[module][0] if last is None else last.id):
            return
        if last is not None:
            last.remove()
        hook = ForwardHook(self._leave_outermost)
        self._last[module] = module.register_forward_hook(hook, with_kwargs=True, always_call=True)
        self._handles.append(self._last[module])

    @never_compiled
    def _enter_outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter ``module`` if it is the outermost, before its other hooks change the arguments."""
        self._entered = None
        if self._observer is not None or current_graph_task() != -1:
            return None
        if self._stack and self._stack[0].module is not module:
            return None
        changed = self._enter(module, args, kwargs)
        self._entered = module if self._stack else None
        return changed

    @never_compiled
    def _leave_outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Leave ``module`` if it is the outermost, after its other hooks changed the output."""
        return self._left(module, args, kwargs, output) if self._is_outermost(module) else None

    def _is_outermost(self, module: nn.Module) -> bool:
        if self._observer is not None:
            return self._observer.is_outermost(module)
        return len(self._stack) == 1 and self._stack[0].module is module

    @never_compiled
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entered is module:  # before its other hooks
            self._entered = None
            return None
        if self._observer is not None:
            self._given_to_hooks = None
            self._observer.enter(module, (args, kwargs))
            return None
        if self._quiet or self._loop is not None or not torch.is_grad_enabled():
            self._resume()
            return None
        if self._stack and self._stack[0].module is module:
            self.recover()
        notes = self._trace is not None and (self._trace.pause() or self._noted)
        self._noted = False
        given, self._given_to_hooks = self._given_to_hooks, None
        if module in self._units and self._capture.keep is not None:
            self._guard((self._names[place], parameter_slots(place[0])[place[1]]) for place in self._units[module])
        if not self._stack:
            if not self._begin(module, (args, kwargs), given):
                return None
            if self._loop is not None:
                self._stack.append(self._start_loop(self._loop))
                return None
            notes = self._trace is not None
        caller = self._stack[-1] if self._stack else None
        running = RunningCall(module, self._or_kept(self._next_plan, _NOTHING, module), caller, (args, kwargs))
        # Other hooks run between the clipper's two, while parameters are withheld from autograd.
        is_first = caller is None and self._first[module].id != self._hooks[module][1]
        running.exposed = is_first or hook_order(module) != self._hooks[module]
        if caller is None and self._witnessed is not None:
            self._witnessed.draws = running.places.enter_context(Draws())
        self._stack.append(running)
        changed = self._or_kept(self._capture.start, None, running)
        if self._trace is not None and notes:
            if given is not None:
                self._trace.passes(tensor_leaves(given), tensor_leaves((args, kwargs)))
            self._trace.starts(module, args, kwargs)
            if changed is not None:
                self._trace.passes(*map(tensor_leaves, ((args, kwargs), changed)))
            running.notes = True
            if running.plan.treatment is not Treatment.RULE or running.exposed:
                self._trace.resume()
        return changed

    @never_compiled
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module in self._last and self._is_outermost(module):
            return None  # `_leave_outermost` follows
        return self._left(module, args, kwargs, output)

    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._observer is not None:
            self._observer.leave(module, output)
            self._observer.rows.paused = is_fully_sharded(module)
            return None
        if not self._stack or self._stack[-1].module is not module:
            if is_fully_sharded(module):
                self._noted = self._trace is not None and self._trace.pause()
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
            if is_outermost:
                kept = True
                with self._with_others(module, Place.FORWARD_ENDS) as decide:
                    changed, kept = self._end(running, output, decide), False
                if kept:
                    changed = self._capture.anchored(output)
                if is_fully_sharded(module):  # its hooks come next
                    self._ended = module
                    return changed
                return self._give_out(module, changed, output)
            changed = self._capture.end(running, output)
            return changed
        except GradguardError as error:
            if isinstance(error, UnsupportedGradientError):
                if self._trace is not None and not is_outermost:
                    self._chosen_rows(self._stack[0].module, self._trace)
                self.planner.forget()  # the next step examines the model again
            if is_outermost or self._capture.keep is None:
                raise
            self._capture.keep(error)
            changed = self._capture.anchored(output)
            return changed
        finally:
            if is_outermost:
                self._trace = None
            elif self._trace is not None and running.notes:  # the caller's operations are traced again
                self._trace.made(output)
                if changed is not None:
                    self._trace.passes(*map(tensor_leaves, (output, changed)))
                if is_fully_sharded(module):
                    self._noted = True
                else:
                    self._trace.resume()

    def _or_kept(self, function: Callable[..., _Result], otherwise: _Result, *args: Any) -> _Result:
        """Return the result of a function, or ``otherwise`` once its error is kept until the processes meet."""
        try:
            return function(*args)
        except GradguardError as error:
            if self._capture.keep is None:
                raise
            self._capture.keep(error)
            return otherwise

    def _look_at_order(self, module: nn.Module) -> None:
        """Check that an outermost call was entered before other hooks, and let it end after them.

        Raises:
            UnsupportedGradientError: If another hook came first, and may have changed the arguments.
        """
        if current_graph_task() != -1:
            return
        self._leave_after_other_hooks(module)
        if changes_on_the_way():  # its backward is refused, with words of its own
            return
        if not is_fully_sharded(module) and next(iter(hook_tables_of(module)[0])) != self._first[module].id:
            self._enter_before_other_hooks(module)
            raise UnsupportedGradientError(
                f"a hook was registered on {type(module).__name__} with prepend=True after the clipper was made, and "
                "may have changed the arguments before the clipper saw them. Repeat this step: the clipper's hook now "
                "comes first. Nothing of this step was taken."
            )

    def _end(self, running: RunningCall, output: Any, decide: Callable[[bool], None]) -> Any:
        """Tap the output of an outermost call that ends, after looking at what the call did; return it, or None."""
        module = running.module
        if self._rehearsed is None and module in self.last_calls:
            self._look_at_what_is_kept(module)
        if self._loop is not None:
            loop, self._loop = self._loop, None
            self._look_at_loop(loop, Skeleton(output).tensors)
            return self._capture.tap_loop(loop, output)
        changed = self._capture.end(running, output)
        returned = output if changed is None else changed
        if self._trace is not None and changed is not None:
            self._trace.made(output)
            self._trace.passes(*map(tensor_leaves, (output, changed)))
        one_by_one = self._look_at_operations(module, returned, decide)
        if self._witnessed is not None:
            witnessed, self._witnessed = self._witnessed, None
            # Looking at its operations may just have made the pattern run its samples one by one.
            follows = not one_by_one and not self.last_calls[module].pattern.looped
            tapped = self._capture.tap_loop(witnessed, returned, witnessed=follows)
            changed = changed if tapped is None else tapped
        return changed

    @contextmanager
    def _with_others(self, module: nn.Module, place: Place) -> Iterator[Callable[[bool], None]]:
        """Enter a block with the other processes of a sharded module, unless the clipper itself calls the module.

        Yields:
            The function to call with whether ``module`` must run again in this process.
        """
        if self._rehearsed is not None:
            yield lambda needed: None
        elif current_graph_task() != -1 or not any(map(parameter_slots, module.modules())):
            with self.together.keeping():
                yield lambda needed: None
        else:
            with self.together.at(place) as decide:
                yield decide

    def _look_at_what_is_kept(self, module: nn.Module) -> None:
        """Refuse an outermost call that stored values which cannot be restored before a sample runs again."""
        if (name := self._held_tensors.written()) is not None:
            self.planner.changes_buffers = True
            raise UnsupportedGradientError(
                f"forward wrote into {name}, which it did not do when the clipper examined the model, so no sample can "
                "run again from the state before. Repeat this step, which is then recorded from its beginning. Nothing "
                "of this step was taken."
            )
        if any(self.last_calls[module] is call for call in self._unverified):
            self._state.note_rebound()

    @property
    def waits_for_carried_state(self) -> bool:
        """Whether a sample must run again after a call."""
        return bool(self._carried)

    def look_at_carried_state(self) -> None:
        """Check, before a mini-batch is clipped, that its calls did not change what the module returns for a sample.

        Raises:
            UnsupportedGradientError: If a call did.
        """
        while self._carried:
            self._carried.popitem()[1].check()

    def _look_at_operations(self, module: nn.Module, output: Any, decide: Callable[[bool], None]) -> bool:
        """Verify an outermost call that just ended, if it did operations that no verified call has done.

        Args:
            module: The module that was called.
            output: Its output.
            decide: Called before the module runs again.

        Returns:
            Whether the samples of this call run one by one, because too few of them are finite to verify that samples
            are separate. The operations are then not learned.

        Raises:
            UnsupportedGradientError: If the call mixes samples, or cannot be verified.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return False
        self._made_of_data.add(trace.ends(Skeleton(output).tensors))
        self._look_at_rows(module, trace)
        if self._rehearsed is not None:
            if not self._rehearsed.sizes:  # this rehearsal compares gradients of two samples, and not outputs alone
                self._rehearsed.operations.learn(trace)
            return False
        refuse_carried(module, trace.returns_carried)
        call = self.last_calls[module]
        self.witness.by_value |= trace.origins.by_value
        if call.pattern.operations.is_new(trace, call.batch_size):
            if all(call is not other for other in self._unverified) and self._state.rebound_first():
                raise UnsupportedGradientError(
                    f"{type(module).__name__} did operations that it had not done before, and stored a value in an "
                    "attribute, item or buffer that no call had changed before, so no sample can run again from the "
                    "state before. Repeat this step, which is then recorded from its beginning. Nothing of this step "
                    "was taken."
                )
            number = min(2, call.batch_size)
            few = len(call.batch.finite_samples(number)) < number
            # If all samples of a small batch run alone, a rehearsal would verify nothing more.
            all_alone = call.batch_size <= MANY and call.pattern.operations.knows(trace)
            if few and self.planner.sharded:
                raise UnsupportedGradientError(
                    f"{type(module).__name__} did operations that it had not done before, and fewer than {number} of "
                    f"the {call.batch_size} samples are finite, so the clipper cannot verify that samples are "
                    "separate. Leave samples with NaN or inf out of this batch. Nothing of this step was taken."
                )
            decide(True)
            with self._state.as_before():
                self._look_again(call, trace, Skeleton(output).tensors, tries=not few and not all_alone)
            if few:
                return True
        elif trace.origins.by_value and self._witnessed is not None:
            self._take_samples(self._witnessed, call, SOME)
        if self._witnessed is None:
            self.witness.missed.add(module)
        self._untried.append((call, trace))
        return False

    def _look_at_rows(self, module: nn.Module, trace: OperationTrace) -> None:
        """Refuse an outermost call that chose rows of samples by values, which no dry run did.

        Raises:
            UnsupportedGradientError: If the call did.
        """
        if words := self._chosen_rows(module, trace):
            advice = "" if self.planner.sharded else " Or repeat this step: all samples run one by one from now on."
            raise UnsupportedGradientError(
                f"{words}{advice} It did not choose rows when the clipper examined it. Nothing of this step was taken."
            )

    def _chosen_rows(self, module: nn.Module, trace: OperationTrace) -> str:
        """Return the refusal of a call that chose rows of samples by values, and loop the next ones; "" if none."""
        pattern = self._rehearsed or self.last_calls[module].pattern
        function = chosen(
            trace.rows.selections, [plans.selections for plans in pattern.plans], self._capture.batch_size
        )
        if function:
            self.planner.choosing[module] = rows_are_chosen(module, function)
        return self.planner.choosing[module] if function else ""

    def _look_again(self, call: OuterCall, trace: OperationTrace, outputs: Sequence[Tensor], tries: bool) -> None:
        """Rehearse a call once more if ``tries``, and let its samples run alone, because its operations are new."""
        witnessed, self._witnessed = self._witnessed, None
        with substituted(self._buffers_before):
            if tries and call.pattern.sizes and self._rehearse is not None:
                sizes, call.pattern.sizes = call.pattern.sizes, set()
                try:
                    self._rehearse(self, call)
                finally:
                    call.pattern.sizes |= sizes
            if witnessed is None:
                self.witness.begin_again()
                self.witness.look_at(MANY)
                witnessed = self._record_now(call, trace, outputs)
        if witnessed is None:
            raise UnsupportedGradientError(
                f"{type(call.pattern.module).__name__} did operations that it had not done before, and a second run "
                "did not return the same, so the clipper cannot verify that it keeps samples separate. The module "
                "keeps a value from call to call, such as a counter, or draws numbers from Python's or NumPy's "
                "generator for the first time. Hold a counter in a buffer (register_buffer), which the clipper "
                "restores; or repeat this step, which is then recorded from its beginning."
            )
        self._take_samples(witnessed, call, MANY)
        self._witnessed = witnessed

    def _look_at_loop(self, loop: LoopedCall, outputs: Sequence[Tensor]) -> None:
        """Refuse a looped call that uses what earlier calls made of their samples, or stores what its samples will use.

        Raises:
            UnsupportedGradientError: If it does.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return
        self._made_of_data.add(trace.ends(outputs))
        refuse_carried(loop.module, trace.returns_carried)
        loop.trace = OperationTrace(is_carried=self._is_carried)
        stored, operations = trace.origins.stored, loop.call.pattern.operations
        if not loop.call.batch_size > 1 or stored <= operations.stored[loop.call.batch_size]:
            return
        args, kwargs = loop.call.batch.samples(range(loop.call.batch_size))
        second = self._new_trace(replace(loop.call.batch, arguments=(args, kwargs)))
        with self.quietly(), undisturbed(loop.module, drop_rate=None), suppress(UntoldDrawsError):
            if loop.before is not None:
                loop.before.restore()
            with loop.draws.of_samples(range(loop.batch_size), loop.batch_size), without_graph(loop.module), second:
                again = Skeleton(loop.module(*args, **kwargs)).tensors
            second.ends(again)
            refuse_carried(loop.module, second.returns_carried, stored - second.origins.stored)
            operations.stored[loop.call.batch_size] |= stored

    def _take_samples(self, witnessed: LoopedCall, call: OuterCall, number: int) -> None:
        """Take samples of a call that has just run, to run them alone later, unless it wrote into its arguments."""
        if written(self._given):
            return
        self.witness.look_at(number)
        for sample in self.witness.samples(call.batch_size):
            if sample not in witnessed.taken:
                witnessed.taken[sample] = call.batch.samples([sample])

    def _begin(self, module: nn.Module, arguments: Arguments, given: Arguments | None = None) -> bool:
        """Choose the plan of an outermost call that starts, and verify the call beforehand if its kind is new.

        Args:
            module: The module that is called.
            arguments: Its arguments.
            given: The arguments before the hooks of ``fully_shard``; None if it has none.

        Returns:
            Whether the call is followed. A call in which nothing is trained is not: what it does with the outputs of
            other calls is read as a part of the loss.
        """
        with self._with_others(module, Place.FORWARD_BEGINS) as decide:
            self._look_at_order(module)
            state = self._look_at_state()
            self._look_at_trained()
            is_frozen = not self.planner.uses_trained(module) and current_graph_task() == -1
            if is_frozen and not self.planner.sharded:  # a backward of the loss alone must run no hook of fully_shard
                return False
            self._prepare(module, arguments, given or arguments, state, decide)
            return True
        # An error is kept: the call goes on as one without samples, which clips nothing and passes backward on.
        self._capture.batch_size = 0
        self._loop = self._witnessed = self._trace = None
        return True

    def _prepare(
        self, module: nn.Module, arguments: Arguments, given: Arguments, state: int, decide: Callable[[bool], None]
    ) -> None:
        self.planner.restart()
        if self._rehearsed is None:
            self._held_tensors = HeldTensors(())
        if current_graph_task() != -1:  # a checkpoint runs a part of the forward again
            return
        size = self._capture.batch_size = count_samples(arguments, self.batch_first, type(module).__name__)
        if not size:
            return
        rehearsal = self._rehearsed is not None
        autocast = autocast_of(Skeleton(arguments))
        uses_trained = self.planner.uses_trained(module)
        rehearse = self._rehearse if uses_trained else None
        kind = module, signature(arguments), autocast
        pattern = self._rehearsed or self.planner.patterns.get((kind, state))
        fresh = pattern is None
        follows = not rehearsal and rehearse is not None
        new_size = pattern is None or size not in pattern.sizes
        is_due = pattern is not None and self._is_due(pattern)
        decide(fresh or (follows and (new_size or is_due)))
        if follows:
            self._carried.pop(module, None)
            if size > 1 and (new_size or is_due):
                batch = Batch(arguments, self.batch_first, size)
                self._carried[module] = CarriedState(
                    module, batch, autocast, self.quietly, self._new_trace, self._made_of_data, pattern is None
                )
            if pattern is None:
                self._nested = [weakref.ref(tensor) for tensor in frozen(module, buffers=False).tensors]
        if pattern is None:
            pattern = self.planner.plan(module, Batch(arguments, self.batch_first, size), (kind, state))
        call = OuterCall(pattern, Batch(arguments, self.batch_first, size, pattern.whole, pattern.second), autocast)
        self._capture.verifying = follows and new_size
        if self._capture.verifying and rehearse is not None:
            rehearse(self, call)
            self.planner.restart()
            self._unverified.append(call)
        if fresh:
            self.planner.patterns[kind, self._state.passed()] = pattern
            self.witness.begin_again()
        if self._capture.verifying and None in pattern.output_axes:
            self.witness.look_at(MANY)  # the rehearsal compares rows of outputs, and a returned loss has none
        elif follows and call.batch.divided:
            self.witness.look_at(SOME)  # the trace does not show what the forward does with these values
        if uses_trained and not rehearsal and self.collector.mini_batch is None:
            verifying = self._capture.verifying
            self._loss_check.look_between(module, replace(call.batch, arguments=given), verifying)
            self._loss_check.start(size, pattern.output_axes, verifying)
        if follows:
            nested = [tensor for one in self._nested if (tensor := one()) is not None]
            self._held_tensors = HeldTensors(self._state.tensors(buffers=not pattern.changes_buffers), nested)
        self.planner.resume(pattern)
        self.collector.shared = self.planner.shared
        self.last_calls[module] = call
        if pattern.looped:
            self._loop = self.looped_call(call)
            return
        if not self.witness.is_active or not (rehearsal or rehearse is not None):
            return
        self._trace = self._new_trace(call.batch)
        if rehearsal:
            return
        self._witnessed = self._record(call) if self.witness.is_due else None
        self._given = versions_of(tensor for tensor, _ in call.batch.dims)
        self._buffers_before = copied_buffers(module) if pattern.changes_buffers else {}
        states = generator_states if pattern.draws else states_of_torch
        self._state_before = None if self._witnessed is not None else states(accelerators_of(self._seen.values()))

    def _new_trace(self, batch: Batch) -> OperationTrace:
        """Return a trace of a call with these arguments."""
        trained = {id(parameter) for name, parameter in self.parameters().items() if name in self.trained}
        arguments = Skeleton(batch.arguments).tensors
        return OperationTrace(trained, arguments, batch.of_samples, self._is_carried)

    def _is_carried(self, tensor: Tensor) -> bool:
        """Return whether an earlier forward made a tensor of its samples, and nothing puts back what held it before."""
        if tensor not in self._made_of_data:
            return False
        held = [one for _, one in self._state.tensors(buffers=True)]
        return not any(one is tensor for one in [*held, *frozen(self._module, buffers=False).tensors])

    def _is_due(self, pattern: CallPattern) -> bool:
        """Tell whether a sample of this mini-batch runs alone before it, and again after it."""
        number = self.witness.mini_batch
        return number & (number - 1) == 0 if pattern.looped else self.witness.is_due

    def _look_at_state(self) -> int:
        """Check whether the model's state changed since the last call; return the number of its state."""
        if self._rehearsed is not None and self._sound is not None:
            return self._sound
        state = self._state.look()
        self.witness.bring_nearer(self._state.nearer)
        self._state.nearer = 0
        if state != self._sound:
            refuse_batch_norm(self._module)
            if not self.planner.sharded:
                refuse_sharded_since(self._module)
            self._sound = state
        return state

    def _record(self, call: OuterCall) -> LoopedCall:
        """Record a call that starts, in order to run samples of it alone later."""
        self.witness.watch(self.collector)
        loop = self.looped_call(call)
        for sample in self.witness.samples(call.batch_size):
            loop.taken[sample] = call.batch.samples([sample])
        loop.before = frozen(loop.module, call.pattern.changes_buffers)
        loop.recorded = versions_of(self._shards or self.parameters(loop.places).values())
        return loop

    def _record_now(self, call: OuterCall, trace: OperationTrace, outputs: Sequence[Tensor]) -> LoopedCall | None:
        """Record a call that has just run, by running it again to record its random numbers.

        Args:
            call: The call.
            trace: Its trace.
            outputs: The tensors that it returned.

        Returns:
            The recorded call; None if the second run returned something else, or the call wrote into its arguments.

        Raises:
            UnsupportedGradientError: If the second run uses what the call has stored.
        """
        if written(self._given):
            return None
        assert self._state_before is not None
        with self.quietly(), undisturbed(call.pattern.module, drop_rate=None):
            restore_generators(self._state_before)
            loop = self._record(call)
            args, kwargs = call.batch.samples(range(call.batch_size))
            second = self._new_trace(replace(call.batch, arguments=(args, kwargs)))
            with Draws() as loop.draws, without_graph(call.pattern.module), second:
                again = Skeleton(call.pattern.module(*args, **kwargs)).tensors
        self._made_of_data.add(second.ends(again))
        stored = trace.origins.stored - second.origins.stored
        refuse_carried(call.pattern.module, second.returns_carried, stored)
        if len(again) != len(outputs):
            return None
        axes, precision = call.pattern.output_axes, max(loop.precision, loop.draws.precision)
        same = (
            axis is None or same_rows(recorded, output, axis, range(call.batch_size), precision)
            for recorded, output, axis in zip(outputs, again, axes, strict=True)
        )
        return loop if all(same) else None

    def looped_call(self, call: OuterCall, order: Sequence[int] | None = None) -> LoopedCall:
        """Return ``call``, or its samples in ``order``, as a call that can be repeated sample by sample."""
        inside = set(call.pattern.module.modules())
        trained = {name: self.aliases[name] for name in sorted(self.trained)}
        places = {name: slots for name, slots in trained.items() if any(module in inside for module, _ in slots)}
        order = range(call.batch_size) if order is None else order
        return LoopedCall(call, self.reduction, places, self.quietly, call.pattern.precision, order)

    def _start_loop(self, loop: LoopedCall) -> RunningCall:
        """Prepare the run of the whole batch of a looped call."""
        running = RunningCall(loop.module, _NOTHING, None, loop.call.arguments)
        loop.before = frozen(loop.module, loop.call.pattern.changes_buffers)
        passes_on = any(tensor.requires_grad for tensor, _ in loop.call.batch.dims)  # e.g. an earlier call's
        if self._capture.verifying or passes_on:
            self._capture.put_leaves(running, loop.places)
            loop.leaves = running.leaves
        loop.draws = running.places.enter_context(Draws())
        if self._capture.batch_size and self._rehearsed is None and self.witness.is_active:
            self._trace = self._new_trace(loop.call.batch)
            self._trace.resume()
        return running

    def _give_out(self, module: nn.Module, changed: Any, output: Any) -> Any:
        """Show the outputs of an outermost call to the loss check, and refuse gradients of those of no sample."""
        if self._stack or self._rehearsed is not None or not self._capture.batch_size or module not in self.last_calls:
            return changed
        pattern = self.last_calls[module].pattern
        if self.planner.sharded:
            changed = self._capture.pass_on(output if changed is None else changed)
        tensors = Skeleton(output if changed is None else changed).tensors
        axes = pattern.output_axes if len(tensors) == len(pattern.output_axes) else [None] * len(tensors)
        self._loss_check.add_outputs(tensors, axes)
        for position, words in pattern.unowned.items():
            if position < len(tensors) and tensors[position].requires_grad:
                tensors[position].register_hook(partial(_refuse, words, self._capture.keep))
        return changed

    def _look_at_trained(self) -> None:
        """Read which parameters are trained now, and put a hook on each that detects a bypassed layer."""
        parameters = self.parameters()
        if self._rehearsed is None and parameters is not self._seen:
            refuse_stand_ins(parameters)
            self._seen = parameters
        trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._without_gradient = {name for name, parameter in parameters.items() if parameter.grad is None}
        if trained == self.trained:
            return
        if self._rehearsed is None:
            self._guard((name, parameters[name]) for name in trained)
        self._capture.train(trained)
        self.planner.train(trained)
        self.trained = trained

    def _guard(self, parameters: Iterable[tuple[str, Tensor | None]]) -> None:
        """Put a hook on each trained parameter that detects a gradient which bypassed the layers."""
        for name, parameter in parameters:
            if parameter is not None and id(parameter) not in self._guarded and parameter.requires_grad:
                self._guarded.add(id(parameter))
                hook = partial(_bypassed, weakref.ref(self), name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _next_plan(self, module: nn.Module) -> CallPlan:
        """Return the plan of this call of ``module``."""
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
                f"a checkpoint runs {type(module).__name__} again in backward, and the checkpointed code also uses "
                "parameters itself: expected these parameters and the layers in a module of their own. Pass that "
                "module to checkpoint(), as checkpoint(self.block, x, use_reentrant=False), and not a method or "
                "function."
            )
        raise UnsupportedGradientError(
            f"{type(module).__name__} did not run when the clipper examined the model, so it is unknown how this layer "
            "treats samples. Repeat this step: the clipper then examines the model again. (Nothing was clipped yet.)"
        )

    def recover(self) -> None:
        """Restore the parameters that interrupted calls (by Ctrl-C, for example) have withheld."""
        self._loop = self._witnessed = self._entered = None
        if self._trace is not None:
            self._trace.pause()
        self._trace = None
        self._untried.clear()
        self._unverified.clear()
        self._carried.clear()
        self.witness.forget()
        while self._stack:
            self._stack.pop().give_back()

    def bypassed(self, name: str, parameter: Tensor) -> None:
        """Refuse a gradient that reached a parameter directly, unless it belongs to a checkpoint's repeated forward.

        Raises:
            UnsupportedGradientError: If the parameter was used outside of the module's forward.
        """
        if self._quiet or parameter.grad is None:  # autograd calls the hook without a gradient for unused outputs
            return
        keep = self._capture.keep
        # The other processes do not add up what a gathered parameter gets.
        if name in self._without_gradient or (keep is not None and not is_sharded(parameter)):
            gradient, parameter.grad = parameter.grad, None
            if self.collector.take_from_checkpoint(name, gradient, current_graph_task()):
                return
        self.collector.discard()
        self.planner.forget()
        error = UnsupportedGradientError(
            f"parameter {name} was used outside of the module's forward (in the loss, for example, or by code that the "
            "module does not call through a layer), so each sample's contribution there is unknown. Use it inside "
            "forward; or, for a penalty on weights, give the optimizer weight_decay. For an ordinary backward, call "
            "clipper.detach() first. If forward has now used it for the first time, repeat this step."
        )
        if keep is None:
            raise error
        keep(error)


def _bypassed(tracker: "weakref.ref[CallTracker]", name: str, parameter: Tensor) -> None:
    """Report a parameter's gradient to the tracker, held weakly: a cycle through a tensor's hook is never freed."""
    if (found := tracker()) is not None:
        found.bypassed(name, parameter)


def _refuse(words: str, keep: Keep | None, gradient: Tensor | None) -> None:
    if gradient is not None and bool(gradient.any()):
        if keep is None:
            raise UnsupportedGradientError(words)
        keep(UnsupportedGradientError(words))


def run_uncompiled(module: nn.Module) -> Callable[[], None]:
    """Run compiled modules in ``module`` layer by layer, uncompiled; return a function that ends this."""
    stack = ExitStack()
    for part in module.modules():
        stack.callback(stop_compiling(part))
    return stack.close


def places_of_parameters(module: nn.Module) -> dict[Slot, str]:
    """Return, for each module and attribute that holds a parameter, the parameter's first name."""
    first: dict[int, str] = {}
    found = {}
    for prefix, layer in module.named_modules():
        for slot, parameter in parameter_slots(layer).items():
            if parameter is not None:
                found[layer, slot] = first.setdefault(id(parameter), f"{prefix}.{slot}" if prefix else slot)
    return found

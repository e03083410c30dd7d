"""Preparation of each call of a layer, and the taps on its outputs.

While a layer runs, its parameters do not require grad, so autograd never computes their gradients. The layer's outputs
pass through a `tap`, which in backward receives the gradients of the outputs and passes them on to the mini-batch,
together with the layer's inputs.

Code that uses parameters itself runs with leaves in their places. Autograd accumulates the plain gradient of this one
call in the leaves, and the per-sample gradients must add up to that gradient. If a value left the code without passing
a tap, the two differ. On a step that is to be verified, layers with a rule get such leaves too.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.distributed.placements import is_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import (
    Arguments,
    Gradients,
    Skeleton,
    Slot,
    Versions,
    changes_of,
    is_inexact,
    tensor_leaves,
    versions_of,
    written,
)
from gradguard.per_sample.dry_run import RESULT
from gradguard.per_sample.layer_plans import CallPlan, Treatment
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.mini_batch import GradientCollector, UsedLayer
from gradguard.per_sample.operations import Operation, ParameterProxy, rule_of, rule_of_result
from gradguard.per_sample.plain_sum import Leaves, Run, run_layer
from gradguard.per_sample.refusals import KEEPS_STATE
from gradguard.per_sample.rerun import Quietly, substituted
from gradguard.per_sample.sample_loop import LoopedCall
from gradguard.per_sample.vmap_fallback import NestedCall, VmapFallback
from gradguard.state.generators import device_state
from gradguard.torch_private import current_graph_task, parameter_slots

Receiver = Callable[[Sequence[Tensor], Gradients, int], None]
"""Called in backward with the saved tensors, the gradient of each value (None where autograd gave none), and the id of
the outermost backward."""

Keep = Callable[[Exception], None]
"""Keeps an error until all processes of a sharded model can raise one."""


_silent = threading.local()
_silent_tasks: set[int] = set()
"""Ids of backwards that are not the user's; `_silent` does not reach autograd's threads for accelerators."""


@contextmanager
def silent_taps(root: Node) -> Iterator[None]:
    """Make taps ignore gradients in a block that runs the clipper's own backwards from ``root`` in this thread."""
    before, tasks = getattr(_silent, "now", False), set[int]()

    def begins(gradients: Any) -> None:
        del gradients
        tasks.add(current_graph_task())
        _silent_tasks.update(tasks)

    handle, _silent.now = root.register_prehook(begins), True
    try:
        yield
    finally:
        handle.remove()
        _silent.now = before
        _silent_tasks.difference_update(tasks)


def taps_are_silent() -> bool:
    """Return whether this thread is inside `silent_taps`."""
    return getattr(_silent, "now", False)


class Tap(torch.autograd.Function):
    """An identity whose backward calls a `Receiver`. Readers of the loss's graph recognise it by its name."""

    @staticmethod
    def forward(
        ctx: Any, receive: Receiver, keep: Keep | None, saved: tuple[Tensor, ...], anchor: Tensor, *values: Tensor
    ) -> Any:
        """Return the values, and save the tensors for the receiver."""
        del anchor  # it requires grad, so backward reaches this node even if nothing before it is trained
        ctx.receive, ctx.keep = receive, keep
        # A reentrant checkpoint repeats the forward inside a backward, and runs this node's backward in a nested one.
        ctx.made_in = current_graph_task()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)  # autograd then raises its own error if one is changed in place later
        results = [value.detach() for value in values]
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Call the receiver with the gradients, and return them unchanged."""
        task = current_graph_task() if ctx.made_in == -1 else ctx.made_in
        if taps_are_silent() or task in _silent_tasks:
            return None, None, None, None, *grads
        try:
            if torch.is_grad_enabled():
                raise UnsupportedGradientError(
                    "a backward with create_graph=True went through a module whose per-sample gradients are clipped: "
                    "the gradient of a gradient also depends on the weights in ways that the clipper does not follow. "
                    "Call clipper.detach() first, or remove the gradient penalty."
                )
            ctx.receive(ctx.saved_tensors, grads, task)
        except Exception as error:
            if ctx.keep is None:
                raise
            ctx.keep(error)
        return None, None, None, None, *grads


def tap(
    receive: Receiver, saved: Sequence[Tensor], anchor: Tensor, values: Sequence[Tensor], keep: Keep | None = None
) -> list[Tensor]:
    """Return ``values`` passed through an identity that calls ``receive`` in backward.

    Args:
        receive: The function to call in backward.
        saved: Tensors for ``receive``. Autograd stores them as saved tensors of an operation, so checkpointing and the
            check for in-place changes work.
        anchor: A scalar that requires grad.
        values: Floating-point tensors.
        keep: Keeps an error of ``receive``, and the backward goes on; None to raise it.
    """
    results = Tap.apply(receive, keep, tuple([tensor.detach() for tensor in saved]), anchor, *values)
    return list(results) if isinstance(results, tuple) else [results]


def reaches_inside(roots: Sequence[Any], collector: GradientCollector) -> bool:
    """Return whether a backward from ``roots`` enters a followed module other than through its outputs.

    Args:
        roots: Tensors, gradient edges or nodes.
        collector: The collector of the module; the taps of looped and witnessed calls stand for its outermost outputs.
    """
    pending = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        receiver = getattr(node, "receive", None) if node.name() == "TapBackward" else None
        while isinstance(receiver, partial):
            receiver = receiver.args[0] if receiver.func is _receive_all else receiver.func
        if receiver is not None and getattr(receiver, "__self__", None) is collector:
            if receiver.__name__ not in ("receive_loop", "receive_witnessed"):
                return True
            continue
        new = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(new)
        pending += new
    return False


@dataclass(eq=False, slots=True)
class RunningCall:
    """A module whose forward is running.

    Attributes:
        module: The module.
        plan: The plan of the call.
        caller: The running call that made this one; None for the outermost.
        arguments: The arguments of the call.
        withheld: Parameters whose ``requires_grad`` is switched off until the call ends.
        leaves: Stand-ins for the parameters until the call ends.
        exposed: Whether other hooks run while the parameters are withheld from autograd.
        places: Puts the parameters back into their places when closed.
        fallback: The record of the module's own code, for `Treatment.VMAP_FALLBACK`.
        given: Tensors that the module's code got, as arguments or from layers that it called, with their versions.
        tapped: Tensors that the module's code computed and passed to layers.
        as_nested: The record of this call among the calls of its caller's code.
        generator_state: State of the random generator at the start, for a rule that replays a layer with dropout.
        notes: Whether the trace continues with the caller when this call ends.
    """

    module: nn.Module
    plan: CallPlan
    caller: "RunningCall | None"
    arguments: Arguments
    withheld: list[nn.Parameter] = field(default_factory=list)
    leaves: Leaves | None = None
    exposed: bool = False
    places: ExitStack = field(default_factory=ExitStack)
    fallback: VmapFallback | None = None
    given: Versions = field(default_factory=list)
    tapped: list[Tensor] = field(default_factory=list)
    as_nested: NestedCall | None = None
    generator_state: Tensor | None = None
    notes: bool = False

    def give_back(self) -> None:
        """Restore the parameters to their state before the call."""
        self.places.close()
        while self.withheld:
            self.withheld.pop().requires_grad_(True)


class LayerCapture:
    """Withhold parameters from autograd and tap values, call by call.

    Args:
        names: The name of the parameter at each module and attribute.
        aliases: The modules and attributes that hold each parameter.
        quietly: Makes a block in which the clipper's own hooks do nothing.

    Attributes:
        collector: Collects the gradients of backward.
        trained: Names of the parameters that are trained now.
        batch_size: Number of samples in the outermost call; -1 before any.
        verifying: Whether autograd computes the plain gradients as well, for a comparison.
        keep: Keeps an error in backward until all processes of a sharded model can raise one; None to raise it.
    """

    def __init__(self, names: Mapping[Slot, str], aliases: Mapping[str, Sequence[Slot]], quietly: Quietly) -> None:
        self._names, self._aliases, self._quietly = names, aliases, quietly
        self._sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self.collector = GradientCollector()
        self.trained: AbstractSet[str] = frozenset()
        self.batch_size = -1
        self.verifying = False
        self.keep: Keep | None = None
        self._wanted_of: dict[nn.Module, dict[str, str]] = {}
        self._anchors: dict[torch.device, Tensor] = {}

    def train(self, names: AbstractSet[str]) -> None:
        """Set the names of the trained parameters."""
        self.trained = names
        self._wanted_of.clear()

    def start(self, running: RunningCall) -> Any:
        """Prepare a call that starts; return the arguments to use instead, or None."""
        changed = None
        if running.caller is not None and running.caller.fallback is not None and running.plan.sees_samples:
            changed = self._tap_nested_call(running, running.caller.fallback)
            running.arguments = changed or running.arguments
        self._withhold(running)
        return changed

    def end(self, running: RunningCall, output: Any) -> Any:
        """Tap the output of a call that ends; return the output to use instead, or None."""
        plan, caller = running.plan, running.caller
        changed = None
        if self.batch_size == 0:
            # Backward must pass through sharded layers as where there are samples, because it gathers their parameters.
            passes = caller is None or (self._sharded and self._wanted(running.module))
            returned = Skeleton(output if passes else None)
            changed = self._tap_outputs(returned, (), self.collector.receive_nothing)
        elif plan.treatment is Treatment.RULE:
            changed = self._tap_layer(running, output)
        elif plan.treatment is Treatment.RESULT:
            changed = self._follow_result(running, output)
        elif running.fallback is not None:
            changed = self._tap_fallback(running, running.fallback, output)
        if running.as_nested is not None and caller is not None:
            returned = Skeleton(output if changed is None else changed)
            caller.given += versions_of(returned.tensors)
            running.as_nested.output, running.as_nested.output_axes = returned, plan.outputs
            if caller.plan.in_place:  # the caller writes into the outputs, so it gets copies
                changed = returned.fill([tensor.clone() for tensor in returned.tensors])
            returned.release()
        return changed

    def _withhold(self, running: RunningCall) -> None:
        """Withhold the parameters that this call uses from autograd until the call ends."""
        plan, module = running.plan, running.module
        if self.batch_size == 0:
            self._hide(running, self._names)
        elif plan.treatment in (Treatment.RULE, Treatment.RESULT):
            if "forward" in vars(module):
                raise UnsupportedGradientError(
                    f"the forward of {type(module).__name__} was replaced after the clipper had examined the model, so "
                    "its use of parameters is unknown. Replace it before the clipper is made, or repeat this step."
                )
            slots = [(m, slot) for m in module.modules() for slot in parameter_slots(m)]
            if self.verifying or running.exposed:
                self.put_leaves(running, {n: [s for s in slots if self._names.get(s) == n] for n in self._used(slots)})
            else:
                self._hide(running, slots)
            if plan.rule is not None and plan.rule.replays and getattr(module, "dropout", 0) and module.training:
                running.generator_state = device_state(next(module.parameters()).device)
        elif plan.treatment is Treatment.OPERATIONS:
            places = {}  # proxies that tap the operations with the parameters
            for slot, planned in plan.operations.items():
                name = self._names.get(slot)  # None for the result of an embedding
                if name in self.trained and name is not None:
                    leaf = self._leaves(module).of({name: self._value(*slot)})[name]
                    places[slot] = ParameterProxy.of(leaf, name, planned, partial(self._do_operation, module, None))
            running.places.enter_context(substituted(places))
        elif plan.treatment is Treatment.VMAP_FALLBACK:
            self._begin_fallback(running)

    def _follow_result(self, running: RunningCall, output: Any) -> Any:
        """Return a proxy that taps the operation that the caller's code applies to an embedding's result."""
        module, name = running.module, next(iter(self._wanted(running.module).values()), None)
        if name is None:
            return None
        plan = None if running.caller is None else running.caller.plan.operations.get((module, RESULT))
        ids = tensor_leaves(running.arguments)
        if plan is None or len(ids) != 1:
            raise UnsupportedGradientError(
                f"{type(module).__name__} was called in another way than when the clipper examined the model. Repeat "
                "this step: the clipper then examines the model again."
            )
        if running.leaves is None:
            output = self._leaves(module).of({name: output.detach()})[name]
        return ParameterProxy.of(output, name, plan, partial(self._do_operation, module, (running, ids[0])))

    def _do_operation(
        self,
        module: nn.Module,
        source: tuple[RunningCall, Tensor] | None,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Do an operation as `_tap_operation` does, or without a tap once its refusal is kept."""
        try:
            return self._tap_operation(module, source, operation, func, args, kwargs)
        except UnsupportedGradientError as error:
            if self.keep is None:
                raise
            self.keep(error)
        plain = [a.leaf.detach() if isinstance(a, ParameterProxy) else a for a in args]
        named = {key: a.leaf.detach() if isinstance(a, ParameterProxy) else a for key, a in kwargs.items()}
        return self.anchored(func(*plain, **named))

    def _tap_operation(
        self,
        module: nn.Module,
        source: tuple[RunningCall, Tensor] | None,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Do an operation with parameters, or with the result of an embedding, and tap its result."""
        proxies = [one for one in operation.parameters.values() if isinstance(one, ParameterProxy)]
        values, leaves = {one.full_name: one.leaf.detach() for one in proxies}, None
        if source is not None and source[0].leaves is not None:
            values, leaves = {one.full_name: one.leaf for one in proxies}, source[0].leaves
        elif self.verifying:  # leaves of this operation alone, which receive its plain gradient
            leaves = self._leaves(module)
            values = leaves.of(values)
        positional = [values[a.full_name] if isinstance(a, ParameterProxy) else a for a in args]
        named = {key: values[a.full_name] if isinstance(a, ParameterProxy) else a for key, a in kwargs.items()}
        result = func(*positional, **named)
        names = {role: one.full_name for role, one in zip(operation.parameters, proxies, strict=True)}
        again = None
        if self.verifying and operation.kind != "sum":
            again = _run_again(func, (positional, named), {values[name]: role for role, name in names.items()})
        axis = proxies[0].plan.axis
        size = self._check_sizes([(result.shape[axis.dim], axis)])
        operands = [] if operation.kind == "sum" else [operation.operand]
        axes, rule = (axis,) * len(operands), rule_of(operation)
        if source is not None and source[0].plan.rule is not None:
            operands, axes = [*operands, source[1]], (*axes, None)
            rule, again = rule_of_result(operation, module, source[0].plan.rule), None
        plan = CallPlan(Treatment.RULE, True, axes, (axis,), rule=rule)
        layer = UsedLayer(module, plan, Skeleton((tuple(operands), {})), size, names, None, leaves, run=again)
        self.collector.activations += sum(t.nbytes for t in (*operands, result))
        saved = layer.arguments.release()
        return self._tap_outputs(Skeleton(result), saved, partial(self.collector.receive_layer, layer))

    def _leaves(self, module: nn.Module) -> Leaves:
        reached = partial(self.collector.receive_plain, current_graph_task())
        return Leaves(module, reached if self.keep is None else partial(_keeping, self.keep, reached))

    def _used(self, slots: Iterable[Slot]) -> list[str]:
        """Return the names of the trained parameters in ``slots``, sorted."""
        return sorted({self._names[slot] for slot in slots if slot in self._names} & self.trained)

    def _begin_fallback(self, running: RunningCall) -> None:
        plan, module = running.plan, running.module
        aliases = {name: self._aliases[name] for name in self._used(plan.uses)}
        if not aliases:
            return
        for name, slots in aliases.items():  # leaves cannot be put into a layer that gathers its own shards
            if any(owner is not module and is_fully_sharded(owner) for owner, _ in slots):
                raise UnsupportedGradientError(
                    f"{name} is used by the code of {type(module).__name__} but sharded with another module: apply "
                    f"fully_shard to {type(module).__name__} and not to the layer that holds {name}."
                )
        arguments = Skeleton(running.arguments)
        leaf_of = self.put_leaves(running, aliases)
        running.fallback = VmapFallback(
            module,
            arguments,
            plan.inputs,
            plan.outputs,
            aliases,
            {name: leaf.detach() for name, leaf in leaf_of.items()},
            autocast_of(arguments),
            self._quietly,
            leaves=running.leaves,
            in_place=plan.in_place,
        )
        running.given = versions_of(arguments.tensors)

    def put_leaves(self, running: RunningCall, aliases: Mapping[str, Sequence[Slot]]) -> dict[str, Tensor]:
        """Substitute a leaf for each parameter until the call ends; return the leaves by name."""
        running.leaves = self._leaves(running.module)
        leaf_of = running.leaves.of({name: self._value(*slots[0]) for name, slots in aliases.items()})
        places = {slot: leaf_of[name] for name, slots in aliases.items() for slot in slots}
        running.places.enter_context(substituted(places))
        return leaf_of

    def _value(self, module: nn.Module, slot: str) -> Tensor:
        """Return the present value of a parameter, detached; a copy if sharded, as FSDP frees it after the forward."""
        value = parameter_slots(module)[slot]
        assert value is not None
        return value.detach().clone() if self._sharded else value.detach()

    def _hide(self, running: RunningCall, slots: Iterable[Slot]) -> None:
        for module, slot in slots:
            parameter = parameter_slots(module).get(slot)
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad_(False)
                running.withheld.append(parameter)

    def _tap_nested_call(self, running: RunningCall, code: VmapFallback) -> Any:
        """Tap the arguments of a layer that its caller's own code has computed."""
        arguments, caller = Skeleton(running.arguments), running.caller
        assert caller is not None
        known = {id(tensor) for tensor, _ in caller.given}
        computed = [i for i, t in enumerate(arguments.tensors) if id(t) not in known]
        tapped = [i for i in computed if is_inexact(arguments.tensors[i])]
        layer = NestedCall(running.module, tapped, [running.plan.inputs[i] for i in tapped], [None] * len(tapped))
        code.nested_calls.append(layer)
        running.as_nested = layer
        if not tapped:
            return None
        values = [arguments.tensors[i] for i in tapped]
        tensors: list[Tensor | None] = list(arguments.tensors)
        receive = partial(self.collector.receive_nested_call, layer)
        for i, value in zip(tapped, tap(receive, (), self._anchor(values[0]), values, self.keep), strict=True):
            tensors[i] = value
        caller.tapped += [value.detach() for value in values]
        return arguments.fill(tensors)

    def _tap_layer(self, running: RunningCall, output: Any) -> Any:
        plan, wanted = running.plan, self._wanted(running.module)
        if not wanted or plan.rule is None:
            return None
        arguments, returned = Skeleton(running.arguments), Skeleton(output)
        size = self._samples(plan, arguments.tensors)
        autocast = autocast_of(arguments)
        precision = torch.finfo(autocast[1]).eps if autocast else 0.0
        draws = running.generator_state is not None
        run = None if draws or running.leaves is None else partial(run_layer, running.module, autocast)
        layer = UsedLayer(
            running.module, plan, arguments, size, wanted, running.generator_state, running.leaves, precision, run
        )
        self.collector.activations += sum(t.nbytes for t in (*arguments.tensors, *returned.tensors))
        saved = [*arguments.release(), *(returned.tensors if plan.rule.replays else ())]
        return self._tap_outputs(returned, saved, partial(self.collector.receive_layer, layer))

    def _wanted(self, module: nn.Module) -> dict[str, str]:
        """Return the trained parameters of a layer: by name in the layer, the name in the whole module."""
        if module not in self._wanted_of:
            self._wanted_of[module] = {
                f"{prefix}.{slot}" if prefix else slot: name
                for prefix, layer in module.named_modules()
                for slot in parameter_slots(layer)
                if (name := self._names.get((layer, slot))) in self.trained and name is not None
            }
        return self._wanted_of[module]

    def _tap_fallback(self, running: RunningCall, fallback: VmapFallback, output: Any) -> Any:
        for tensor in written(running.given):
            raise UnsupportedGradientError(
                f"the code of {type(running.module).__name__} uses {', '.join(fallback.aliases)} itself, and changed "
                f"in place a tensor of shape {tuple(tensor.shape)} that it was given or that a layer had returned. "
                "Write x = x + y in place of x += y there."
            )
        result = Skeleton(output)
        fallback.batch_size = self._samples(running.plan, fallback.arguments.tensors)
        returned, given = result.tensors, {id(tensor) for tensor, _ in running.given}
        fallback.computed = [i for i, tensor in enumerate(returned) if id(tensor) not in given]
        results = (*running.tapped, *(returned[i].detach() for i in fallback.computed))
        fallback.results = [tensor.new_empty(()).expand(tensor.shape) for tensor in results]
        saved = [tensor for tensor, _ in running.given]
        fallback.arguments.release()
        return self._tap_outputs(result, saved, partial(self.collector.receive_fallback, fallback))

    def tap_loop(self, loop: LoopedCall, output: Any, witnessed: bool = False) -> Any:
        """Tap the output of a looped or witnessed call.

        The tap of a looped call ends the backward there, unless leaves collect its plain gradients.

        Args:
            loop: The call.
            output: The output of the module.
            witnessed: Whether the call is not looped, but a sample of it will run alone.

        Returns:
            The tapped output; None if no tensor in it requires grad.
        """
        returned = Skeleton(output)
        loop.precision = max(loop.precision, loop.draws.precision)
        loop.outputs = [(tensor.detach(), changes_of(tensor)) for tensor in returned.tensors]
        places = [i for i, t in enumerate(returned.tensors) if t.requires_grad]
        if not places:
            return None
        values = [returned.tensors[i] for i in places]
        if loop.leaves is None and not witnessed:
            values = [value.detach() for value in values]
        receiver = self.collector.receive_witnessed if witnessed else self.collector.receive_loop
        return self._tapped(returned, places, values, (), partial(receiver, loop))

    def anchored(self, output: Any) -> Any:
        """Return an output that backward reaches: in a sharded layer it must, as it does on the other processes."""
        changed = self._tap_outputs(Skeleton(output), (), _pass)
        return output if changed is None else changed

    def pass_on(self, output: Any) -> Any:
        """Return an output behind an identity, so that backwards of the loss alone run no hook of ``fully_shard``."""
        returned = Skeleton(output)
        places = [i for i, t in enumerate(returned.tensors) if t.requires_grad]
        values = [returned.tensors[i] for i in places]
        return self._tapped(returned, places, values, (), _pass) if places else output

    def _tap_outputs(self, returned: Skeleton, saved: Sequence[Tensor], receive: Callable[..., None]) -> Any:
        places = [i for i, t in enumerate(returned.tensors) if is_inexact(t)]
        values = [returned.tensors[i] for i in places]
        return self._tapped(returned, places, values, saved, receive) if places else None

    def _tapped(
        self,
        returned: Skeleton,
        places: Sequence[int],
        values: Sequence[Tensor],
        saved: Sequence[Tensor],
        receive: Callable[..., None],
    ) -> Any:
        """Return the outputs with the tapped ``values`` at the positions ``places``."""
        tensors: list[Tensor | None] = list(returned.tensors)
        if len(places) < len(tensors):
            receive = partial(_receive_all, receive, len(tensors), places)
        results = tap(receive, saved, self._anchor(values[0]), values, self.keep)
        for place, value in zip(places, results, strict=True):
            tensors[place] = value
        return returned.fill(tensors)

    def _samples(self, plan: CallPlan, tensors: Sequence[Tensor]) -> int:
        """Return the number of samples of one call, which must equal that of the outermost call.

        Raises:
            UnsupportedGradientError: If it does not, so the plan from the dry run does not fit this call.
        """
        if len(tensors) != len(plan.inputs):
            raise UnsupportedGradientError(
                f"a layer was called with {len(tensors)} tensors now, and with {len(plan.inputs)} when the clipper "
                f"examined the model on a few samples. {KEEPS_STATE}"
            )
        return self._check_sizes(
            [(t.shape[axis.dim], axis) for t, axis in zip(tensors, plan.inputs, strict=True) if axis is not None]
        )

    def _check_sizes(self, sizes: Sequence[tuple[int, BatchAxis]]) -> int:
        own = next((size for size, axis in sizes if not axis.flattened), self.batch_size)
        expected = own if current_graph_task() != -1 else self.batch_size  # a checkpoint may repeat an earlier call
        for size, axis in sizes:
            if size % max(1, expected) if axis.flattened else size != expected:
                raise UnsupportedGradientError(
                    f"a layer got a tensor with {size} rows where {expected} samples were expected: the model treats "
                    "this batch in another way than the first ones. Repeat this step: the clipper then examines the "
                    "model again."
                )
        return expected

    def _anchor(self, value: Tensor) -> Tensor:
        if value.device not in self._anchors:
            self._anchors[value.device] = torch.zeros((), device=value.device, requires_grad=True)
        return self._anchors[value.device]


def _run_again(func: Any, arguments: Any, roles: Mapping[Tensor, str]) -> Run | None:
    """Return a function that repeats an operation with other parameters and another operand.

    Returns:
        The function; None if the operation has more or fewer than one other tensor argument.
    """
    whole = Skeleton(arguments)
    places = [roles.get(tensor, "") for tensor in whole.release()]
    if places.count("") != 1:
        return None

    def run(values: Mapping[str, Tensor], given: Arguments, dtype: torch.dtype | None) -> Any:
        del dtype
        args, kwargs = whole.fill([values[place] if place else given[0][0] for place in places])
        return func(*args, **kwargs)

    return run


def _pass(saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
    """Do nothing in backward."""


def _keeping(keep: Keep, receive: Callable[[Leaves], None], leaves: Leaves) -> None:
    """Call ``receive``, and keep its error."""
    try:
        receive(leaves)
    except Exception as error:
        keep(error)


def _receive_all(
    receive: Callable[..., None],
    count: int,
    places: Sequence[int],
    saved: Sequence[Tensor],
    grads: Gradients,
    task: int,
) -> None:
    """Call ``receive`` with one gradient for each of ``count`` outputs, None at positions that were not tapped."""
    everywhere: list[Tensor | None] = [None] * count
    for place, grad in zip(places, grads, strict=True):
        everywhere[place] = grad
    receive(saved, everywhere, task)


def autocast_of(arguments: Skeleton) -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the autocast that is enabled for the tensors in ``arguments``, or None."""
    kind = next((t.device.type for t in arguments.tensors), "cpu")
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

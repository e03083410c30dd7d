"""The work at the start and at the end of one call of a layer.

While a layer runs, its parameters do not require grad, so autograd never computes their gradients; what it returns
passes through a `tap`, which in backward hands over the layer's input and the gradient of its output.

Code that uses parameters by itself runs with leaves of its own in their places. Autograd adds up the plain gradient of
this one call there, and the per-sample gradients must add up to the same: a value that left the code on any other way
than through the tap is noticed so. On a step that is to be verified, layers with a rule get such leaves too.
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
from gradguard.per_sample.rerun import Quietly, substituted
from gradguard.per_sample.sample_loop import LoopedCall
from gradguard.per_sample.vmap_fallback import NestedCall, VmapFallback
from gradguard.state.generators import device_state
from gradguard.torch_private import current_graph_task, parameter_slots

Receiver = Callable[[Sequence[Tensor], Gradients, int], None]
"""Called in backward with the saved tensors, the gradient of each value (None where none came), and the number of the
outermost backward."""


_silent = threading.local()
_silent_tasks: set[int] = set()
"""Numbers of backwards that are not the user's: those on an accelerator run in threads of autograd's own."""


@contextmanager
def silent_taps(root: Node) -> Iterator[None]:
    """Let gradients pass unread in backwards of this thread from ``root``, which are not the user's."""
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
    """Tell whether this thread's backward is not the user's."""
    return getattr(_silent, "now", False)


class Tap(torch.autograd.Function):
    """The identity; known to who reads the loss's graph by its name."""

    @staticmethod
    def forward(ctx: Any, receive: Receiver, saved: tuple[Tensor, ...], anchor: Tensor, *values: Tensor) -> Any:
        """Return the values; save what is to be handed back."""
        del anchor  # it requires grad, so that backward comes by even where nothing before this value is trained
        ctx.receive = receive
        ctx.made_in = (
            current_graph_task()
        )  # a checkpoint that runs forward again in backward does this backward in its own
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)  # so a value that is changed in place later is autograd's own error
        results = [value.detach() for value in values]
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients over, and pass them on."""
        task = current_graph_task() if ctx.made_in == -1 else ctx.made_in
        if taps_are_silent() or task in _silent_tasks:
            return None, None, None, *grads
        if torch.is_grad_enabled():
            raise UnsupportedGradientError(
                "a backward with create_graph=True went through a module whose per-sample gradients are clipped: a "
                "gradient of gradients also depends on the weights in ways that are not followed. Call "
                "clipper.detach() before it, or leave the gradient penalty away."
            )
        ctx.receive(ctx.saved_tensors, grads, task)
        return None, None, None, *grads


def tap(receive: Receiver, saved: Sequence[Tensor], anchor: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Return ``values`` passed through an identity that calls ``receive`` in backward.

    Args:
        receive: Called in backward.
        saved: Tensors to hand back; autograd keeps them as it keeps what an operation saves, so checkpointing and
            the check for in-place changes work.
        anchor: A scalar that requires grad.
        values: Floating-point tensors.
    """
    results = Tap.apply(receive, tuple([tensor.detach() for tensor in saved]), anchor, *values)
    return list(results) if isinstance(results, tuple) else [results]


def reaches_inside(roots: Sequence[Any], collector: GradientCollector) -> bool:
    """Tell whether a backward from ``roots`` comes into a followed module on another way than through its outputs.

    Args:
        roots: Tensors, gradient edges or nodes.
        collector: The collector of the module; its outermost outputs are those of looped and witnessed calls.

    Returns:
        Whether it does.
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
        caller: The call that it was made from; None for the outermost.
        arguments: The arguments that it gets.
        withheld: Parameters that do not require grad until it has run.
        leaves: Stand-ins for parameters until it has run.
        exposed: Hooks of others run while its parameters are kept from autograd.
        places: Puts the parameters back into their places.
        fallback: The run of its own code, for `Treatment.VMAP_FALLBACK`.
        given: Tensors that layers called by its code have returned, with the version of each.
        tapped: Tensors that its code called layers with.
        as_nested: Its entry among what its caller's code called.
        generator_state: State of the random generator at its start, where the rule asks.
        notes: The trace goes on when it ends, with its caller.
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
        """Let the parameters be as they were before the call."""
        self.places.close()
        while self.withheld:
            self.withheld.pop().requires_grad_(True)


class LayerCapture:
    """Withholds parameters from autograd and taps values, call by call.

    Args:
        names: The name of each parameter by where it is held.
        aliases: The places that hold each parameter.
        quietly: Makes a block in which the clipper's own hooks do nothing.

    Attributes:
        collector: Gathers the gradients of backward.
        trained: Names of the parameters that are trained now.
        batch_size: Number of samples in the outermost call.
        verifying: Let autograd compute the plain gradients as well, to compare with.
    """

    def __init__(self, names: Mapping[Slot, str], aliases: Mapping[str, Sequence[Slot]], quietly: Quietly) -> None:
        self._names, self._aliases, self._quietly = names, aliases, quietly
        self._sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self.collector = GradientCollector()
        self.trained: AbstractSet[str] = frozenset()
        self.batch_size = -1
        self.verifying = False
        self._wanted_of: dict[nn.Module, dict[str, str]] = {}
        self._anchors: dict[torch.device, Tensor] = {}

    def train(self, names: AbstractSet[str]) -> None:
        """Take note of which parameters are trained from now on."""
        self.trained = names
        self._wanted_of.clear()

    def start(self, running: RunningCall) -> Any:
        """A call starts: return other arguments for it, or None."""
        changed = None
        if running.caller is not None and running.caller.fallback is not None and running.plan.sees_samples:
            changed = self._tap_nested_call(running, running.caller.fallback)
            running.arguments = changed or running.arguments
        self._withhold(running)
        return changed

    def end(self, running: RunningCall, output: Any) -> Any:
        """A call ends: return something else in place of what it returned, or None."""
        plan, caller = running.plan, running.caller
        changed = None
        if self.batch_size == 0:
            returned = Skeleton(output if caller is None else None)
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
            if caller.plan.in_place:  # it gets copies to write into
                changed = returned.fill([tensor.clone() for tensor in returned.tensors])
            returned.release()
        return changed

    def _withhold(self, running: RunningCall) -> None:
        """Keep the parameters that this call uses from autograd until it has run."""
        plan, module = running.plan, running.module
        if self.batch_size == 0:
            self._hide(running, self._names)
        elif plan.treatment in (Treatment.RULE, Treatment.RESULT):
            if "forward" in vars(module):
                raise UnsupportedGradientError(
                    f"the forward of {type(module).__name__} was replaced after the model was looked at, so what it "
                    "does with its parameters is not known. Replace it before the clipper is made, or repeat this step."
                )
            slots = [(m, slot) for m in module.modules() for slot in parameter_slots(m)]
            if self.verifying or running.exposed:
                self.put_leaves(running, {n: [s for s in slots if self._names.get(s) == n] for n in self._used(slots)})
            else:
                self._hide(running, slots)
            if plan.rule is not None and plan.rule.replays and getattr(module, "dropout", 0) and module.training:
                running.generator_state = device_state(next(module.parameters()).device)
        elif plan.treatment is Treatment.OPERATIONS:
            places = {}  # something that taps the operations with the parameters
            for slot, planned in plan.operations.items():
                name = self._names.get(slot)  # None for a result
                if name in self.trained and name is not None:
                    leaf = self._leaves(module).of({name: self._value(*slot)})[name]
                    places[slot] = ParameterProxy.of(leaf, name, planned, partial(self._tap_operation, module, None))
            running.places.enter_context(substituted(places))
        elif plan.treatment is Treatment.VMAP_FALLBACK:
            self._begin_fallback(running)

    def _follow_result(self, running: RunningCall, output: Any) -> Any:
        """Return what taps the operation that the caller's code does with a layer's result."""
        module, name = running.module, next(iter(self._wanted(running.module).values()), None)
        if name is None:
            return None
        plan = None if running.caller is None else running.caller.plan.operations.get((module, RESULT))
        ids = tensor_leaves(running.arguments)
        if plan is None or len(ids) != 1:
            raise UnsupportedGradientError(
                f"{type(module).__name__} was called in another way than when the model was looked at. Repeat this "
                "step: the model is looked at again."
            )
        if running.leaves is None:
            output = self._leaves(module).of({name: output.detach()})[name]
        return ParameterProxy.of(output, name, plan, partial(self._tap_operation, module, (running, ids[0])))

    def _tap_operation(
        self,
        module: nn.Module,
        source: tuple[RunningCall, Tensor] | None,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Do an operation with parameters, or with what an embedding has made of some ids, and tap what it gives."""
        proxies = [one for one in operation.parameters.values() if isinstance(one, ParameterProxy)]
        values, leaves = {one.full_name: one.leaf.detach() for one in proxies}, None
        if source is not None and source[0].leaves is not None:
            values, leaves = {one.full_name: one.leaf for one in proxies}, source[0].leaves
        elif self.verifying:  # leaves for this operation alone, which get the plain gradient
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
        return Leaves(module, partial(self.collector.receive_plain, current_graph_task()))

    def _used(self, slots: Iterable[Slot]) -> list[str]:
        """The names of the trained parameters in ``slots``."""
        return sorted({self._names[slot] for slot in slots if slot in self._names} & self.trained)

    def _begin_fallback(self, running: RunningCall) -> None:
        plan, module = running.plan, running.module
        aliases = {name: self._aliases[name] for name in self._used(plan.uses)}
        if not aliases:
            return
        for name, slots in aliases.items():  # which cannot be given to code whose layer fetches its own shards
            if any(owner is not module and is_fully_sharded(owner) for owner, _ in slots):
                raise UnsupportedGradientError(
                    f"{name} is used by the code of {type(module).__name__} and sharded apart from it: apply "
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
        """Put a leaf of its own into the places of each parameter, until the call has run; return them by name."""
        running.leaves = self._leaves(running.module)
        leaf_of = running.leaves.of({name: self._value(*slots[0]) for name, slots in aliases.items()})
        places = {slot: leaf_of[name] for name, slots in aliases.items() for slot in slots}
        running.places.enter_context(substituted(places))
        return leaf_of

    def _value(self, module: nn.Module, slot: str) -> Tensor:
        """A parameter as it is now; a copy if it is sharded, because the whole is freed after the forward."""
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
        """Tap what the caller's code has computed and now calls a layer with."""
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
        for i, value in zip(tapped, tap(receive, (), self._anchor(values[0]), values), strict=True):
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
        """The trained parameters of a layer: their names in the layer, and in the whole module."""
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
                f"the code of {type(running.module).__name__} changed a tensor in place that a layer had returned "
                f"(shape {tuple(tensor.shape)}), and it uses {', '.join(fallback.aliases)} by itself. Write "
                "x = x + y in place of x += y there."
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
        """Tap what a looped call returned; backward goes no further, unless its plain gradients are asked for.

        Args:
            loop: The call.
            output: Its result.
            witnessed: It is no looped call, but one sample of it will be run alone.

        Returns:
            The result in its place; None if it stays.
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
        """Return the outputs with tapped ``values`` in some places."""
        tensors: list[Tensor | None] = list(returned.tensors)
        if len(places) < len(tensors):
            receive = partial(_receive_all, receive, len(tensors), places)
        results = tap(receive, saved, self._anchor(values[0]), values)
        for place, value in zip(places, results, strict=True):
            tensors[place] = value
        return returned.fill(tensors)

    def _samples(self, plan: CallPlan, tensors: Sequence[Tensor]) -> int:
        """Return the number of samples of one call, which must be that of the outermost call.

        Raises:
            UnsupportedGradientError: If it is not, so that the dry run does not hold for this call.
        """
        if len(tensors) != len(plan.inputs):
            raise UnsupportedGradientError("a layer was called with other arguments than in the dry run.")
        return self._check_sizes(
            [(t.shape[axis.dim], axis) for t, axis in zip(tensors, plan.inputs, strict=True) if axis is not None]
        )

    def _check_sizes(self, sizes: Sequence[tuple[int, BatchAxis]]) -> int:
        own = next((size for size, axis in sizes if not axis.flattened), self.batch_size)
        expected = own if current_graph_task() != -1 else self.batch_size  # a checkpoint may repeat an earlier call
        for size, axis in sizes:
            if size % max(1, expected) if axis.flattened else size != expected:
                raise UnsupportedGradientError(
                    f"a layer got a tensor with {size} rows where {expected} samples were expected: it does not treat "
                    "this batch as it treated the first ones."
                )
        return expected

    def _anchor(self, value: Tensor) -> Tensor:
        if value.device not in self._anchors:
            self._anchors[value.device] = torch.zeros((), device=value.device, requires_grad=True)
        return self._anchors[value.device]


def _run_again(func: Any, arguments: Any, roles: Mapping[Tensor, str]) -> Run | None:
    """Return what does an operation again with other parameters and another operand; None if it has further tensors."""
    whole = Skeleton(arguments)
    places = [roles.get(tensor, "") for tensor in whole.release()]
    if places.count("") != 1:
        return None

    def run(values: Mapping[str, Tensor], given: Arguments, dtype: torch.dtype | None) -> Any:
        del dtype
        args, kwargs = whole.fill([values[place] if place else given[0][0] for place in places])
        return func(*args, **kwargs)

    return run


def _receive_all(
    receive: Callable[..., None],
    count: int,
    places: Sequence[int],
    saved: Sequence[Tensor],
    grads: Gradients,
    task: int,
) -> None:
    """Hand over a gradient for each output, None for those that are no floating-point tensors."""
    everywhere: list[Tensor | None] = [None] * count
    for place, grad in zip(places, grads, strict=True):
        everywhere[place] = grad
    receive(saved, everywhere, task)


def autocast_of(arguments: Skeleton) -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the autocast that is on for the tensors in ``arguments``, or None."""
    kind = next((t.device.type for t in arguments.tensors), "cpu")
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

"""`ModuleCallback`: the callback of `append_backward` for operations that are made of others, call by call of modules.

Autograd numbers nodes as a thread makes them, so that the forward of a module is a range of numbers, and a backward in
one thread takes them from the largest to the smallest: once it comes to a node below a range, that call's backward is
complete. Only then are its gradients known, and the first of them are already on their way. So what may still change
is looked up where it arrives: before the next operation takes the sum of all contributions to a value, the sum is made
anew, in the same order, if one of them has been changed.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradguard.backward_clip.graph import COMPILED, Graph, Slot, is_leaf, root_of
from gradguard.backward_clip.hooks import Gradients, explained
from gradguard.backward_clip.rules import BaseErrorClip, apply_rule, are_alike, described
from gradguard.backward_clip.scopes import tensors_in
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.module_hooks import ForwardHook
from gradguard.torch_private import (
    current_graph_task,
    input_metadata_of,
    is_compiled,
    never_compiled,
    next_sequence_number,
    sequence_number_of,
    tree_leaves,
)

_LONGEST = 50_000
_COMPILED = (
    "ModuleCallback on compiled code, which is one operation, whatever modules it calls: expected a model that is not "
    "compiled, nor anything else that the loss comes through."
)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, whose backward is complete.

    Attributes:
        name: The module's name in the model, empty for the model itself.
        module: The module.
        number: Which of the module's calls in this graph it is, from 0, in the order of the forward.
        grad_outputs: The gradients that arrived at the tensors that the call returned, in their order, accumulated
            over all that used them. None where none arrived: for an output that nothing used, that the call only
            passed through, or that is a view and was changed in place afterwards.
    """

    name: str
    module: nn.Module
    number: int
    grad_outputs: Gradients


Function = Callable[[ModuleCall, dict[str, Tensor]], Mapping[str, Tensor] | None]


class ModuleCallback:
    """A callback for `append_backward` that is called once for each call of a module, with all its gradients.

    The backward of a module is made of several operations. After the last of them the callback gets the call, a
    `ModuleCall`, and the gradients that it passes on, by name:

    - ``"input 0"``, ``"input 1"``, …: to its inputs, counting the tensors among its arguments; a tensor that is given
      twice has one gradient, under its first place;
    - ``"weight"``, ``"0.bias"``, …: to its parameters, by their names in the module;
    - ``"other 0"``, …: to values that it found elsewhere, such as a state that it kept.

    Each is what this call contributes, added up over all operations in it, before the contributions of several calls
    are added up. The callback may return others, all or some, by the same names; the backward goes on with these.
    Modules are seen from the inside out: a module's callback comes after those of its submodules and gets what they
    returned. A rule in place of a function is applied to each gradient that leaves a call.

    **Guarantees.** A callback that changes nothing leaves the result as it is without it, to the last bit. Activation
    checkpoints (``use_reentrant=False``), several calls of one module, operations in place: as autograd has them.
    Forwards outside `append_backward` cost two hooks a module; without gradients nothing is kept.

    **Refused**, in words: compiled modules; reentrant checkpoints; forwards in another thread than the backward; a
    gradient that the callback changes and a tensor hook, DDP or FSDP too; a change to a sparse gradient.

    Args:
        model: The model; its forward must run after this. All its submodules are watched, and itself.
        callback: A function of a `ModuleCall` and the gradients by name, or a rule.

    Raises:
        InvalidTypeError: If ``model`` is no module or has compiled ones, or ``callback`` is neither.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> callback = gg.ModuleCallback(model, lambda call, gradients: print(repr(call.name), sorted(gradients)))
        >>> loss = model(torch.ones(4, 2)).square().sum()
        >>> pairs = gg.append_backward(loss, model, callback=callback)
        '2' ['bias', 'input 0', 'weight']
        '1' ['input 0']
        '0' ['bias', 'weight']
        '' ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> callback.detach()

    Reference:
        PaddlePaddle, Error Clip (2018): "Some op's backward is a combination of several other ops".
    """

    def __init__(self, model: nn.Module, callback: Function | BaseErrorClip) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"model is {type(model).__name__}: expected a module.")
        if not callable(callback) and not isinstance(callback, BaseErrorClip):
            raise InvalidTypeError(f"callback is {type(callback).__name__}: expected a callable or a rule.")
        if any(map(is_compiled, model.modules())):
            raise InvalidTypeError(_COMPILED)
        self.function = _by_rule(callback) if isinstance(callback, BaseErrorClip) else callback
        self._calls: list[_Call] = []
        self._forgotten = 0
        """The number below which calls have been forgotten."""
        self._running: dict[int, list[_Call | None]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            before, after = ForwardHook(self._entering(name)), ForwardHook(self._leave)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Remove the hooks that note the calls."""
        for handle in self._handles:
            handle.remove()

    def begin(self, graph: Graph) -> "ModuleBackward":
        """Get ready for a backward through ``graph``."""
        return ModuleBackward(graph, self._calls_in(graph), self.function)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, options: Any) -> None:
            running = self._running[threading.get_ident()]
            recorded = torch.is_grad_enabled() and current_graph_task() == -1  # else a checkpoint runs it once more
            running.append(_Call(name, module, _inputs(args, options), len(running)) if recorded else None)

        return never_compiled(enter)

    @never_compiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._running[threading.get_ident()]
        call = running.pop() if running else None
        if call is None or next_sequence_number() == call.begin:
            return
        call.end = next_sequence_number()
        call.outputs = tuple(map(_slot, tensors_in(output)[0]))
        self._calls.append(call)
        if len(self._calls) > _LONGEST:
            old = self._calls[: _LONGEST // 2]
            self._forgotten = max(self._forgotten, *(one.end for one in old))
            del self._calls[: _LONGEST // 2]

    def _calls_in(self, graph: Graph) -> list["_Call"]:
        """Return the calls that made nodes of ``graph``, with these nodes, the outer calls first."""
        if any(node.name() == COMPILED for node in graph.nodes):
            raise InvalidTypeError(_COMPILED)
        numbers = sorted((sequence_number_of(node), at) for at, node in enumerate(graph.nodes) if not is_leaf(node))
        if numbers[0][0] < self._forgotten:
            raise InvalidValueError(
                f"ModuleCallback forgets the oldest of {_LONGEST} module calls: this loss goes back to one of them. "
                f"Run forwards that no backward follows under torch.no_grad()."
            )
        found, waiting, open_now = [], sorted(self._calls, key=lambda call: (call.begin, call.depth)), []
        waiting.reverse()
        for call in waiting:
            call.nodes = set()
        for number, at in numbers:
            while waiting and waiting[-1].begin <= number:
                open_now.append(waiting.pop())
            open_now = [call for call in open_now if number < call.end]
            for call in open_now:
                if not call.nodes:
                    found.append(call)
                call.nodes.add(at)
        if not found:
            raise InvalidValueError(
                "no call of the model made a part of this loss: expected a forward after the ModuleCallback was made, "
                "and before detach()."
            )
        if any(call.thread != threading.get_ident() for call in found):
            raise InvalidValueError("the forward ran in another thread than append_backward: run both in one.")
        return sorted(found, key=lambda call: (call.begin, call.depth))


_Place = tuple[int, int] | ref[Tensor]
"""A value: the number of the node that made it and which of its outputs it is, or a leaf."""


@dataclass(eq=False)
class _Call:
    name: str
    module: nn.Module
    inputs: tuple[_Place | None, ...]
    depth: int
    begin: int = field(default_factory=next_sequence_number)
    end: int = -1
    thread: int = field(default_factory=threading.get_ident)
    outputs: tuple[_Place | None, ...] = ()
    nodes: set[int] = field(default_factory=set)
    """The positions of its nodes in the graph that is gone through."""


@dataclass(eq=False)
class _Contribution:
    """The contribution of one operation to the gradient of a value."""

    made: Tensor
    left: list[_Call]
    """The calls out of which it came."""
    now: Tensor | None
    """Return the gradient that the callbacks returned; None if it has become part of another."""


class ModuleBackward:
    """One backward with a callback for each call of a module."""

    def __init__(self, graph: Graph, calls: list[_Call], function: Function) -> None:
        self.graph, self.function = graph, function
        self.waiting = list(calls)
        """The calls whose backward is not complete; that of the last one is so first."""
        self.numbers = _count_calls(calls)
        self.within: dict[int, list[_Call]] = defaultdict(list)
        for call in calls:
            for position in call.nodes:
                self.within[position].append(call)
        self.arrived: dict[Slot, list[_Contribution]] = {slot: [] for slot in self._left_slots()}
        leaves = [slot for slot in self.arrived if is_leaf(graph.nodes[slot[0]])]
        self.before = {slot: _copy(graph.nodes[slot[0]].variable.grad) for slot in leaves}  # type: ignore[attr-defined]
        """The gradients that parameters had before this backward."""
        self.changed: set[Slot] = set()
        self.outputs: dict[_Place, Tensor] = {}
        self.complete: set[_Call] = set()
        wanted = {place for call in calls for place in call.outputs if isinstance(place, tuple)}
        self.handles: list[RemovableHandle] = []
        for position, node in enumerate(graph.nodes):
            if not is_leaf(node):
                number = sequence_number_of(node)
                slots = [k for k in range(len(input_metadata_of(node))) if (number, k) in wanted]
                self.handles.append(node.register_prehook(self._prehook(position, number, slots)))
                self.handles.append(node.register_hook(self._posthook(position)))

    def remove(self) -> None:
        """Take all hooks out."""
        for handle in self.handles:
            handle.remove()

    def finish(self, wanted: Container[int]) -> None:
        """Complete what is left at the end of the backward, and the gradients of the parameters, given by identity."""
        self._complete_above(-1)
        for slot in self.changed & self.before.keys():
            parameter, before = self.graph.nodes[slot[0]].variable, self.before[slot]  # type: ignore[attr-defined]
            if id(parameter) in wanted:
                name = f"a parameter of shape {tuple(parameter.shape)}"
                parameter.grad.copy_(self._sum_anew(slot, parameter.grad, name, before))

    def _left_slots(self) -> set[Slot]:
        """Return the values to which a gradient comes out of a call."""
        return {
            slot
            for position, calls in self.within.items()
            for slot in self.graph.edges(position)
            if slot is not None and any(slot[0] not in call.nodes for call in calls)
        }

    def _prehook(self, position: int, number: int, outputs: list[int]) -> Callable[[Gradients], Gradients | None]:
        slots = [(position, k) for k in range(len(input_metadata_of(self.graph.nodes[position])))]
        slots = [slot for slot in slots if slot in self.arrived]

        def prehook(grads: Gradients) -> Gradients | None:
            self._complete_above(number)
            if not self.complete.isdisjoint(self.within.get(position, ())):
                raise InvalidValueError(
                    f"the backward came to {self.graph.nodes[position].name()} after the module that made it was "
                    f"complete: ModuleCallback needs a backward in one thread, on one device."
                )
            result = list(grads)
            for slot in slots:
                if slot in self.changed:
                    name = f"the output of {self.graph.nodes[position].name()}"
                    result[slot[1]] = self._sum_anew(slot, grads[slot[1]], name)
                self.arrived[slot] = []
            for k in outputs:
                if (grad := result[k]) is not None:
                    self.outputs[number, k] = grad
            return tuple(result)

        return prehook

    def _posthook(self, position: int) -> Callable[[Gradients, Gradients], None]:
        edges = [(i, slot) for i, slot in enumerate(self.graph.edges(position)) if slot in self.arrived]

        def posthook(made: Gradients, taken: Gradients) -> None:
            for i, slot in edges:
                grad = made[i]
                if grad is not None and slot is not None:
                    left = [call for call in self.within.get(position, ()) if slot[0] not in call.nodes]
                    self.arrived[slot].append(_Contribution(grad, left, grad))

        return posthook

    def _complete_above(self, number: int) -> None:
        """Call the callback for each call all of whose nodes have numbers above ``number``."""
        while self.waiting and self.waiting[-1].begin > number:
            call = self.waiting.pop()
            self.complete.add(call)
            self._call_back(call)

    def _call_back(self, call: _Call) -> None:
        passed: dict[Slot, list[_Contribution]] = {}
        for slot, contributions in self.arrived.items():
            ours = [one for one in contributions if one.now is not None and call in one.left]
            if ours:
                passed[slot] = ours
        if not passed and not any(place in self.outputs for place in call.outputs):
            return  # nothing came through it in this backward
        names = self._names(call, list(passed))
        sums = {name: _sum([one.now for one in passed[slot]]) for slot, name in names.items()}
        arrived = tuple(self.outputs.get(place) if isinstance(place, tuple) else None for place in call.outputs)
        told = ModuleCall(call.name, call.module, self.numbers[call], arrived)
        changes = self.function(told, dict(sums))
        for slot, new in _fitting(told, sums, changes, names).items():
            self.changed.add(slot)
            for one in passed[slot]:
                one.now = None
            passed[slot][0].now = new

    def _names(self, call: _Call, slots: list[Slot]) -> dict[Slot, str]:
        """Return what the values are for the module: its inputs, its parameters, and others, in this order."""
        nodes = self.graph.nodes
        left: dict[object, Slot] = {}
        for slot in sorted(slots, key=lambda slot: (sequence_number_of(nodes[slot[0]]), slot[1], slot[0])):
            node: Any = nodes[slot[0]]
            left[id(node.variable) if is_leaf(node) else (sequence_number_of(node), slot[1])] = slot
        names: dict[Slot, str] = {}
        inputs = [
            (f"input {i}", id(place()) if isinstance(place, ref) else place) for i, place in enumerate(call.inputs)
        ]
        for name, key in [*inputs, *((name, id(p)) for name, p in call.module.named_parameters())]:
            if key in left:
                names[left.pop(key)] = name
        return names | {slot: f"other {number}" for number, slot in enumerate(left.values())}

    def _sum_anew(self, slot: Slot, given: Tensor | None, name: str, before: Tensor | None = None) -> Tensor:
        """Return ``before`` and the sum of the contributions to a value, as callbacks have changed them."""
        contributions = self.arrived[slot]
        if given is None or not _same(given, _sum([one.made for one in contributions], before)):
            raise InvalidValueError(
                f"the gradient of {name} was changed by a ModuleCallback and by something else too, such as a tensor "
                f"hook, DDP or FSDP: expected one of them alone."
            )
        return _sum([one.now for one in contributions if one.now is not None], before)


def _count_calls(calls: list[_Call]) -> dict[_Call, int]:
    counts: dict[str, int] = defaultdict(int)
    numbers = {}
    for call in calls:
        numbers[call] = counts[call.name]
        counts[call.name] += 1
    return numbers


def _inputs(args: Any, options: Any) -> tuple[_Place | None, ...]:
    return tuple(_slot(leaf) for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))


def _slot(value: Tensor) -> _Place | None:
    """Return what a value is known by in the backward, without keeping its graph alive."""
    if not value.requires_grad:
        return None
    if value.grad_fn is None:
        return ref(value)
    node, number = root_of(value)
    return sequence_number_of(node), number


def _sum(tensors: list[Any], before: Tensor | None = None) -> Tensor:
    """Add up, in order, as autograd does: the sum of new ones to what there was before."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total if before is None else before + total


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _same(first: Tensor, second: Tensor) -> bool:
    """Tell whether two dense tensors are equal, NaN where the other has NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _fitting(call: ModuleCall, sums: dict[str, Tensor], changes: Any, names: dict[Slot, str]) -> dict[Slot, Tensor]:
    """Return the gradients that the callback changed, checked."""
    place = f"the callback for {call.name or 'the model'}"
    if changes is None:
        return {}
    if not isinstance(changes, Mapping):
        raise InvalidTypeError(f"{place} returned {type(changes).__name__}: expected gradients by name, or None.")
    if unknown := [name for name in changes if name not in sums]:
        raise InvalidValueError(f"{place} returned {unknown[0]!r}: expected names among {sorted(sums)}.")
    changed = {}
    for slot, name in names.items():
        old, new = sums[name], changes.get(name, sums[name])
        if new is old:
            continue
        if not are_alike(old, new):
            raise InvalidTypeError(f"{place} returned for {name!r} {described(new)}: expected {described(old)}.")
        if old.is_sparse or new.is_sparse:
            raise UnsupportedGradientError(f"{place}: the gradient {name!r} is sparse; leave it as it is.")
        changed[slot] = new.detach()
    return changed


def _by_rule(rule: BaseErrorClip) -> Function:
    def clip(call: ModuleCall, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, grad in gradients.items():
            try:
                found[name] = apply_rule(rule, grad)
            except Exception as error:
                raise explained(error, rule, f"{type(call.module).__name__}, {name}", call.name, (grad,)) from error
        return found

    return clip

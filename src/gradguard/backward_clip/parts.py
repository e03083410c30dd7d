"""The block for chosen tensors, and for the values that modules make."""

import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.backward_clip.graph import NO_INPUTS, Inputs, root_of
from gradguard.backward_clip.hooks import Claim, Clipping
from gradguard.backward_clip.module_timeline import next_number, number_of
from gradguard.backward_clip.scopes import LossScale, Scope, own, owned_slots, refresh_all
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.module_hooks import ForwardHook
from gradguard.torch_private import current_graph_task, is_compiled, tree_leaves

Part = Tensor | nn.Module

_COMPILED = (
    "error_clip on a compiled module: the hooks of the block are not part of compiled code. Call "
    "gg.attach_error_clip(outputs, rule) inside the module's forward instead."
)


class Parts(Scope):
    """Chosen tensors, and the values that modules make in the block."""

    marks_nodes = True

    def __init__(self, clipping: Clipping, scale: LossScale | None, parts: list[Part]) -> None:
        super().__init__(clipping, scale)
        for number, part in enumerate(parts):
            _check_part(number, part)
        if clipping.leaves and not any(isinstance(part, nn.Module) for part in parts):
            raise InvalidValueError("leaves=True with chosen tensors: put parameters into the list to clip them too.")
        self.parts = parts
        self.kept: list[Node] = []
        self.starts: dict[int, list[tuple[int, Inputs]]] = {}
        self.forwards: set[nn.Module] = set()
        self.closed: dict[nn.Module, str] = {}
        """The type of something that a module returned which cannot be looked into."""
        self.backwards: set[nn.Module] = set()

    def enter(self) -> None:
        """Hook the chosen tensors, and get ready for the modules' forwards."""
        self._begin(None)
        self._rescale(_device_of(self.parts))
        for part in self.parts:
            if isinstance(part, Tensor):
                self._take(part)
            else:
                handles = self.clipping.handles
                before, after = ForwardHook(self._before_forward), ForwardHook(self._after_forward)
                handles.append(part.register_forward_pre_hook(before, prepend=True))
                handles.append(part.register_forward_hook(after, prepend=True, always_call=True))
        refresh_all(self.thread, but=self)

    def check(self) -> None:
        """Refuse to have done nothing."""
        for number, part in enumerate(self.parts):
            if isinstance(part, nn.Module):
                which = type(part).__name__ if len(self.parts) == 1 else f"{type(part).__name__}, entry {number},"
                if part in self.closed and part not in self.forwards:
                    raise InvalidValueError(
                        f"{which} returned a {self.closed[part]}, in which no tensor can be found: return tensors, "
                        f"nested lists, tuples or dicts of them, or objects with them as attributes."
                    )
                if part not in self.forwards:
                    raise InvalidValueError(
                        f"nothing differentiable passed through {which} in the block: run its forward inside it, with "
                        f"gradients enabled and something in it or in its input that requires them."
                    )
                if part not in self.backwards:
                    raise InvalidValueError(
                        f"no backward passed through {which} in the block: call backward() inside it."
                    )

    def exit(self) -> None:
        """Take everything out, and have whole graphs come back."""
        super().exit()
        self.parts, self.kept = [], []
        refresh_all(self.thread, but=self)

    def _take(self, value: Tensor) -> None:
        """Clip one chosen value, in place of the scope that had it."""
        node, number = root_of(value)
        if value.grad_fn is None:
            self.clipping.hook_leaf(value)
            self.kept.append(node)  # lives only as long as somebody holds it
            own(self, node, Claim((number,)))
        else:
            own(self, node, self.clipping.hook_slot(node, number))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise InvalidTypeError(_COMPILED)
        self.starts.setdefault(threading.get_ident(), []).append((next_number(), _stand_ins(args)))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        start, inputs = self.starts.get(threading.get_ident(), [(0, NO_INPUTS)]).pop()
        found, closed = tensors_in(output)
        values = [v for v in found if v.grad_fn is not None]
        if closed is not None:
            self.closed[module] = closed
        roots = [root for root in map(root_of, values) if number_of(root[0]) >= start]
        if not roots:
            return
        self._rescale(values[0].device)
        self.forget_dead()
        self.clipping.install(
            roots,
            inputs,
            roots_too="with dimensions",
            stop=lambda node: number_of(node) < start,
            exclude=lambda graph: frozenset(owned_slots(graph, since=self.serial)),
            claimed=lambda node, claim: own(self, node, claim),
        )
        passed = partial(self._passed, module)
        self.clipping.handles += [node.register_prehook(passed) for node in {node for node, _ in roots}]
        self.forwards.add(module)

    def _passed(self, module: nn.Module, grads: Any) -> None:
        self.backwards.add(module)


def _check_part(number: int, part: Any) -> None:
    if is_compiled(part):
        raise InvalidTypeError(_COMPILED)
    if isinstance(part, Tensor) and not part.requires_grad:
        raise InvalidValueError(
            f"tensor {number} of the list (shape {tuple(part.shape)}) does not require a gradient: nothing to clip."
        )
    if not isinstance(part, Tensor | nn.Module):
        raise InvalidTypeError(f"entry {number} of the list is {type(part).__name__}: expected a tensor or a module.")


def tensors_in(output: Any) -> tuple[list[Tensor], str | None]:
    """Return the tensors in what a forward returns: in nested lists, tuples and dicts, and in attributes of objects.

    And the type of something in it that cannot be looked into, or None.
    """
    found, closed, seen = [], None, set()
    waiting = [output]
    for value in waiting:  # grows while it is read
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            parts = _parts_of(value)
            if parts is None:
                closed = closed or type(value).__name__
            else:
                waiting += parts
    return found, closed


_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module, torch.device, torch.dtype)
"""What holds no value that a forward has made."""


def _parts_of(value: Any) -> list[Any] | None:
    """Return what an object holds; None for one whose inside cannot be seen, such as a function's."""
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    leaves = tree_leaves(value)
    return _attributes_of(value) if len(leaves) == 1 and leaves[0] is value else leaves


def _attributes_of(value: Any) -> list[Any] | None:
    """Return the values of an object's attributes; None where it has none."""
    if isinstance(value, FunctionType):
        return None
    declared = [(kind, vars(kind)["__slots__"]) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    if not (declared or hasattr(value, "__dict__")):
        return None
    found = [*getattr(value, "__dict__", {}).values()]
    for kind, names in declared:
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(getattr(value, f"_{kind.__name__.lstrip('_')}{name}" if private else name, None))
    return found


def _stand_ins(args: Any) -> Inputs:
    """Return the leaves among a module's inputs that a reentrant checkpoint made of intermediate values."""
    if current_graph_task() == -1:
        return NO_INPUTS
    leaves = [v for v in tree_leaves(args) if isinstance(v, Tensor) and v.is_leaf and v.requires_grad]
    return {root_of(leaf)[0]: True for leaf in leaves if not isinstance(leaf, nn.Parameter)}


def _device_of(parts: list[Part]) -> torch.device:
    for part in parts:
        for tensor in (part,) if isinstance(part, Tensor) else part.parameters():
            return tensor.device
    return torch.device("cpu")

"""A callable as a function from one flat vector to another, with its gradient.

The floating and complex inputs of the callable, and the parameters of a module, are concatenated into one vector
(`gradguard.check.flat_vectors`). Its floating and complex outputs are concatenated into another. State that a call
changes is restored before the next call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gradguard.check.admission import WIDE, refuse_empty, refuse_unfit, refuse_unless
from gradguard.check.flat_vectors import Slot, element_of, joined, parts_of, zeros
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.state.frozen import Frozen, modules_of_call
from gradguard.torch_private import gradients_of, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten


class Function:
    """A callable and a point, with counters of the forward and backward runs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wide: bool,
        names: list[str] | None = None,
        chosen: list[str] | None = None,
    ) -> None:
        self.fn = fn
        self.forwards = self.backwards = 0
        self.state = Frozen(modules_of_call(fn, args, kwargs), copies=False)
        self.clones_inputs = False
        self.module = module = fn if isinstance(fn, nn.Module) else None
        flat, self._structure = tree_flatten_with_path((args, dict(kwargs)))
        given = [value for _, value in flat]
        parameters, own = own_tensors(fn)
        names = names or _argument_names(fn if module is None else module.forward, args, flat)
        values = [*given, *own.values()]
        refuse_empty(dict(zip([*names, *own], values, strict=True)))
        names = [*names, *(f"parameter {n}" if n in names else n for n in own)]
        self._count, self._own_names = len(given), list(own)
        self._values = [_converted(value, wide) for value in values]
        candidates = [i for i, v in enumerate(given) if is_differentiable(v)]
        checked = [i for i in candidates if given[i].requires_grad] or candidates
        checked += [i for i, p in enumerate(parameters.values(), len(given)) if p.requires_grad]
        if chosen is not None:
            _refuse_others(chosen, [names[i] for i in checked], dict(zip(names, self._values, strict=True)))
            checked = [i for i in checked if names[i] in chosen]
        self.inputs: list[Slot] = []
        for i in checked:
            name, value = f"input {names[i]!r}", self._values[i]
            refuse_unfit(name, value, names[i])
            refuse_unless(~value.isnan(), name, value, "expected numbers")
            self.inputs.append(Slot(names[i], _dense(value), i, i < len(given)))
        self.given = [one.value for one in self.inputs]
        """The values of the inputs, in a list because two inputs may have the same name."""
        self.sizes = [one.size for one in self.inputs]
        ends = accumulate(self.sizes)
        self.ranges = {one.name: slice(end - one.size, end) for one, end in zip(self.inputs, ends, strict=True)}
        """The slice of the vector that each input occupies, by name."""
        self._copied = [i for i, value in enumerate(self._values) if isinstance(value, Tensor) and i not in checked]
        self.is_wide = all(one.dtype is torch.float64 for one in self.inputs)
        """Whether all inputs are float64, in which no step needs rounding."""
        self.point = joined(self.given)
        """The inputs as one vector; read-only."""
        self.outputs: list[Slot] = []
        self.has_own_code = True
        """Whether the graph has a node from user code, such as an `autograd.Function`; True before `learn_outputs`."""
        self.base = zeros(0)
        """The outputs at the point; empty before `learn_outputs`."""

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split ``vector`` into the inputs, rounded to their dtypes and with their strides."""
        parts = parts_of(vector, self.inputs)
        return [_strided_as(part, value) for part, value in zip(parts, self.given, strict=True)]

    def rounded(self, vectors: Tensor) -> Tensor:
        """Round ``vectors``, one per row, to the dtypes of the inputs."""
        return vectors if self.is_wide else torch.stack([joined(self.split(one)) for one in vectors])

    def name_of(self, position: int) -> tuple[str, tuple[int, ...]]:
        """Return the input's name and the index within the input of one element of the vector."""
        return element_of(self.inputs, position)

    def values(self, vector: Tensor) -> Tensor:
        """Return the outputs at ``vector`` as one new float64 vector; all NaN if the callable fails there."""
        return self.values_at(vector[None])[0]

    def values_at(self, vectors: Tensor) -> Tensor:
        """Return the outputs at each of ``vectors``, one per row; a row is NaN if the callable fails there."""
        shapes, rows = [one.value.shape for one in self.outputs], []
        with torch.no_grad():
            for vector in vectors.unbind():
                try:
                    outputs = self.call(self.split(vector.clone()))
                except Exception:  # the vector is outside of the domain
                    outputs = []
                is_usual = [one.shape for one in outputs] == shapes  # False if a shape depends on the data
                # `joined` copies the outputs, which the next call may overwrite.
                rows.append(joined(outputs) if is_usual else zeros(self.size) + torch.nan)
        return torch.stack(rows)

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the callable with these tensors as its inputs; return its floating and complex outputs."""
        self.forwards += 1
        self.state.lend()
        if self.clones_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        values = list(self._values)
        for i in self._copied:
            values[i] = values[i].clone()
        for one, tensor in zip(self.inputs, tensors, strict=True):
            values[one.position] = tensor
        args, kwargs = tree_unflatten(values[: self._count], self._structure)
        if self.module is None:
            return _outputs_of(self.fn(*args, **kwargs))
        own = dict(zip(self._own_names, values[self._count :], strict=True))
        return _outputs_of(torch.func.functional_call(self.module, own, args, kwargs))

    def leaves(self, vector: Tensor | None = None) -> list[Tensor]:
        """Return the inputs at ``vector``, or at the point if None, as leaves that require a gradient."""
        tensors = self.given if vector is None else self.split(vector)
        return [_strided_as(tensor.clone(), tensor).requires_grad_() for tensor in tensors]

    def record(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Call the callable with autograd enabled; return its outputs with their graph."""
        with torch.enable_grad():
            try:
                return self.call(leaves)
            except RuntimeError as error:
                if self.clones_inputs or "leaf" not in str(error) or "in-place" not in str(error):
                    raise
                self.clones_inputs = True  # the callable works in place, which autograd forbids on leaves only
                return self.call(leaves)

    def backward(
        self,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        keep: bool = False,
    ) -> Tensor:
        """Return the gradient of Σ cotangent · output as one vector; ``keep`` retains the graph."""
        return joined(self.gradients(outputs, leaves, cotangents, keep))

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None], keep: bool
    ) -> list[Tensor]:
        """Return the gradients of Σ cotangent · output in the layouts of the backward, with zeros for a missing one."""
        self.backwards += 1
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        pairs = zip(outputs, cotangents, strict=True)
        used = [(output, v) for output, v in pairs if output.requires_grad and v is not None]
        found = iter(gradients_of([o for o, _ in used], needed, [v for _, v in used], keep) if used else ())
        grads = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]

    def gradient_function(self, *tensors: Tensor) -> list[Tensor]:
        """Return the gradients of Σ cotangent · output with their graph; ``tensors`` are inputs, then cotangents."""
        count = len(self.inputs)
        with torch.enable_grad():
            leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors[:count]]
            outputs = self.record(leaves)
            pairs = [(o, v) for o, v in zip(outputs, tensors[count:], strict=True) if o.requires_grad]
            grads = torch.autograd.grad(
                [o for o, _ in pairs], leaves, [v for _, v in pairs], create_graph=True, allow_unused=True
            )
        found = [leaf * 0.0 if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
        return [grad.to_dense() if grad.is_sparse else grad for grad in found]

    def gradient(self, vector: Tensor | None, cotangent: Tensor) -> Tensor:
        """Return the gradient of cotangent · outputs at ``vector``, from one forward and one backward."""
        leaves = self.leaves(vector)
        outputs = self.record(leaves)
        return self.backward(outputs, leaves, self.shaped(cotangent))

    def learn_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Store the outputs at the point, with their names, shapes and dtypes."""
        # Each of PyTorch's own nodes has a type of its own; user code in C++ has nodes of the type CppFunction.
        self.has_own_code = any(
            isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ == "CppFunction"
            for node in nodes_of(outputs)
        )
        self.outputs = []
        for i, output in enumerate(outputs):
            name = f"output {i}" if len(outputs) > 1 else "the output"
            refuse_unfit(f"{name} of {name_of(self.fn)}", output, "output")
            like = output.detach().new_empty(()).expand(output.shape)
            self.outputs.append(Slot(name, like, has_graph=output.requires_grad))
        self.base = joined(outputs)
        self.size = len(self.base)
        """The number of real numbers in all outputs."""

    def shaped(self, cotangent: Tensor) -> list[Tensor]:
        """Split a vector into tensors with the shapes and dtypes of the outputs."""
        return parts_of(cotangent, self.outputs)

    def rounding_of(self, values: Tensor) -> Tensor:
        """Return half a unit in the last place of each output element, in the output's dtype."""
        return values.abs() * self._of_outputs([torch.finfo(one.dtype).eps / 2 for one in self.outputs])

    def with_graph(self) -> Tensor:
        """Return the mask of output elements that have a graph."""
        return self._of_outputs([one.has_graph for one in self.outputs]).bool()

    def _of_outputs(self, each: Sequence[float]) -> Tensor:
        """Return a vector that repeats each output's value for all of its elements."""
        return torch.cat([zeros(one.size).add_(value) for one, value in zip(self.outputs, each, strict=True)])


def own_tensors(fn: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a module's parameters by name, and its parameters and buffers by name; two empty dicts otherwise."""
    if not isinstance(fn, nn.Module):
        return {}, {}
    parameters: dict[str, Tensor] = dict(fn.named_parameters())
    return parameters, {**parameters, **dict(fn.named_buffers())}


def nodes_of(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Yield each node of the graph of ``outputs`` once."""
    waiting: list[Any] = [o.grad_fn for o in outputs]
    visited: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            yield node
            waiting += [other for other, _ in node.next_functions]


def is_differentiable(value: Any) -> bool:
    """Return whether ``value`` is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def is_autograd_function(one: Any) -> TypeGuard[type[torch.autograd.Function]]:
    """Return whether ``one`` is a subclass of `torch.autograd.Function`."""
    return isinstance(one, type) and issubclass(one, torch.autograd.Function)


def name_of(fn: Any) -> str:
    """Return the name of a callable, for a message."""
    return getattr(fn, "__name__", type(fn).__name__)


def _converted(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(WIDE[value.dtype]) if wide and value.dtype in WIDE else value.detach()


def _dense(value: Tensor) -> Tensor:
    """Return a copy in which no elements share memory: expanded inputs and overlapping windows become contiguous."""
    value = value.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    overlaps = 0 < span < value.numel()
    return value.contiguous().clone() if overlaps or value.is_conj() else _strided_as(value.clone(), value)


def _strided_as(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` with the strides of ``like``."""
    if like.is_contiguous():
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(value)


def _outputs_of(result: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in tree_leaves(result):
        if is_differentiable(value):
            found.append(value)
        elif is_dataclass(value):
            found += _outputs_of([getattr(value, field.name) for field in fields(value)])
    return found


def signature_of(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters in the signature of a callable; None for torch functions that are written in C++."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _argument_names(fn: Callable[..., Any], args: tuple[Any, ...], flat: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return a name for each leaf of the arguments, taken from the callable's signature where it has one."""
    given = [p for p in signature_of(fn) or () if p.kind is not p.KEYWORD_ONLY]
    found: list[str] = []
    for one in given:
        found += [f"{one.name}[{j}]" for j in range(len(args))] if one.kind is one.VAR_POSITIONAL else [one.name]
    positional = found + [f"input {i}" if len(args) > 1 else "input" for i in range(len(found), len(args))]
    names = []
    for path, _ in flat:
        within = keystr(path[2:])
        names.append((positional[path[1].idx] if path[0].idx == 0 else str(path[1].key)) + within)
    return names


def _refuse_others(chosen: list[str], inputs: list[str], known: Mapping[str, Any]) -> None:
    """Refuse names that are not among the inputs to check.

    Raises:
        InvalidValueError: If a name is not among the inputs, or ``chosen`` is empty.
        InvalidTypeError: If an input has an integer or bool dtype.
    """
    if not chosen:
        raise InvalidValueError(f"inputs_to_check is empty: expected some of {inputs}, or None for all of them.")
    for name in chosen:
        value = known.get(name)
        if isinstance(value, Tensor) and not is_differentiable(value):
            raise InvalidTypeError(
                f"input {name!r} is {value.dtype}, which has no gradient: expected a floating or complex tensor; "
                f"call {name}.double() first, or leave it out."
            )
        if name not in inputs:
            raise InvalidValueError(f"inputs_to_check has {name!r}, which is not among the inputs: {inputs}.")

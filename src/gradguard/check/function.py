"""A callable at a point, as what the mathematics needs: a function from one vector to another, and its gradient.

Whatever the callable takes and returns, its floating and complex inputs and, for a module, its parameters become one
flat float64 vector, and its floating and complex outputs another. Complex numbers count as two real ones. State that a
call changes is put back before the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gradguard.check.admission import WIDE, refuse_empty, refuse_unfit, refuse_unless
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.state.frozen import Frozen, modules_of_call
from gradguard.torch_private import gradients_of, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class Input:
    """One tensor that the gradient is checked for."""

    name: str
    value: Tensor
    position: int
    """Which it is of all that the callable is called with, a module's own tensors last."""
    is_argument: bool
    """Not a parameter of the module."""

    @property
    def size(self) -> int:
        """How many real numbers it is."""
        return self.value.numel() * (2 if self.value.is_complex() else 1)


@dataclass(frozen=True)
class OutputPlace:
    """Where an output lies in the flat vector."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    has_graph: bool


class Function:
    """A callable and a point; counts how often the callable is called forward and backward.

    Flat vectors of inputs, outputs and gradients are float64 on the CPU, wherever the tensors are.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wide: bool,
        names: list[str] | None = None,
        chosen: list[str] | None = None,
    ) -> None:
        self.fn, self.wide = fn, wide
        self.forwards = self.backwards = 0
        self.state = Frozen(modules_of_call(fn, args, kwargs), copies=False)
        self.clones_inputs = self.keeps_inputs = False
        self.module = module = fn if isinstance(fn, nn.Module) else None
        flat, self._structure = tree_flatten_with_path((args, dict(kwargs)))
        given = [value for _, value in flat]
        parameters = {} if module is None else dict(module.named_parameters())
        own = parameters if module is None else {**parameters, **dict(module.named_buffers())}
        names = names or _argument_names(fn if module is None else module.forward, args, flat)
        refuse_empty(dict(zip([*names, *own], [*given, *own.values()], strict=True)))
        names = [*names, *(f"parameter {n}" if n in names else n for n in own)]
        self._count, self._own_names = len(given), list(own)
        self._values = [self._converted(value) for value in (*given, *own.values())]
        candidates = [i for i, v in enumerate(given) if is_differentiable(v)]
        checked = [i for i in candidates if given[i].requires_grad] or candidates
        checked += [i for i, p in enumerate(parameters.values(), len(given)) if p.requires_grad]
        if chosen is not None:
            _refuse_others(chosen, [names[i] for i in checked], dict(zip(names, self._values, strict=True)))
            checked = [i for i in checked if names[i] in chosen]
        for i in checked:
            refuse_unfit(f"input {names[i]!r}", self._values[i], names[i])
            refuse_unless(~self._values[i].isnan(), f"input {names[i]!r}", self._values[i], "expected numbers")
        values = [_dense(self._values[i]) for i in checked]
        self.inputs = [Input(names[i], v, i, i < len(given)) for i, v in zip(checked, values, strict=True)]
        self.sizes = [one.size for one in self.inputs]
        parameters_at = range(len(given), len(given) + len(parameters))  # which no call changes
        self._copied = [
            i
            for i, value in enumerate(self._values)
            if isinstance(value, Tensor) and i not in checked and i not in parameters_at
        ]
        self.is_wide = all(one.value.dtype in (torch.float64, torch.complex128) for one in self.inputs)
        """Whether the inputs hold every float64 number."""
        self.point = self.join([one.value for one in self.inputs])
        """The inputs as one float64 vector, not to be changed."""
        self.outputs: list[OutputPlace] = []
        self.has_own_code = True
        """Whether a node of its graph was written by somebody else than PyTorch."""
        self.recorded: tuple[list[Tensor], list[Tensor]] | None = None
        """Leaves and outputs of the first call, with its graph."""
        self.base = torch.empty(0, dtype=torch.float64, device="cpu")
        """The outputs at the point, once they are learnt."""

    def join(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return tensors that belong to the inputs as one float64 vector, zeros for None."""
        parts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        for tensor, size in zip(tensors, self.sizes, strict=True):
            if tensor is None:
                parts.append(torch.zeros(size, dtype=torch.float64, device="cpu"))
            else:
                parts.append(_flat(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()))
        return torch.cat(parts)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the inputs that ``vector`` stands for, rounded to their dtype, with their strides."""
        tensors = []
        for part, one in zip(vector.split_with_sizes(self.sizes), self.inputs, strict=True):
            value, part = one.value, _unflattened(part, one.value)
            if not value.is_contiguous():
                laid_out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                part = laid_out.copy_(part)
            tensors.append(part)
        return tensors

    def rounded(self, vectors: Tensor) -> Tensor:
        """Return ``vectors``, one in each row, as the dtypes of the inputs hold them."""
        return vectors if self.is_wide else torch.stack([self.join(self.split(one)) for one in vectors])

    def name_of(self, position: int) -> tuple[str, tuple[int, ...]]:
        """Return the input and the index in it of one element of the flat vector."""
        return element_of([(one.name, one.value) for one in self.inputs], position)

    def range_of(self, name: str) -> range:
        """Return where an input lies in the flat vector."""
        start = 0
        for one in self.inputs:
            if one.name == name:
                return range(start, start + one.size)
            start += one.size
        raise KeyError(name)

    def values(self, vector: Tensor) -> Tensor:
        """Return the outputs at ``vector`` as one new float64 vector; NaN where the callable cannot be called there."""
        return self.values_at(vector[None])[0]

    def values_at(self, vectors: Tensor) -> Tensor:
        """Return the outputs at each of ``vectors``, one in each row."""
        shapes, rows = [one.shape for one in self.outputs], []
        with torch.no_grad():
            for vector in vectors.unbind():
                try:
                    outputs = self.call(self.split(vector if self.keeps_inputs else vector.clone()))
                except Exception:  # outside of the domain
                    outputs = []
                if [one.shape for one in outputs] == shapes:  # not where a shape depends on the data
                    rows.append(torch.cat(list(map(_flat, outputs))))  # a copy: the next call may overwrite them
                else:
                    rows.append(torch.full((self.size,), torch.nan, dtype=torch.float64, device="cpu"))
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the callable with these tensors for its inputs; return its floating and complex outputs."""
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
        """Return the inputs as leaves that require a gradient."""
        tensors = [one.value for one in self.inputs] if vector is None else self.split(vector)
        return [_like(tensor).requires_grad_() for tensor in tensors]

    def record(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Call the callable so that a graph is recorded; return its outputs."""
        with torch.enable_grad():
            try:
                return self.call(leaves)
            except RuntimeError as error:
                if self.clones_inputs or "leaf" not in str(error) or "in-place" not in str(error):
                    raise
                self.clones_inputs = True  # it works in place on what it is given, which autograd allows for non-leaves
                return self.call(leaves)

    def backward(
        self,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        keep: bool = False,
        shapes: Sequence[torch.Size] | None = None,
    ) -> Tensor:
        """Return the gradient of Σ cotangent · output as one float64 vector, of slices repeated to fill ``shapes``."""
        grads = self.gradients(outputs, leaves, cotangents, keep)
        if shapes is not None:
            dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
            grads = [None if grad is None else grad.expand(shape) for grad, shape in zip(dense, shapes, strict=True)]
        return self.join(grads)

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None], keep: bool
    ) -> Sequence[Tensor | None]:
        """Return the gradients of Σ cotangent · output as the backward returns them, None where there is none."""
        self.backwards += 1
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        pairs = zip(outputs, cotangents, strict=True)
        used = [(output, v) for output, v in pairs if output.requires_grad and v is not None]
        found = iter(gradients_of([o for o, _ in used], needed, [v for _, v in used], keep) if used else ())
        return [next(found, None) if leaf.requires_grad else None for leaf in leaves]

    def gradient(self, vector: Tensor | None, cotangent: Tensor) -> Tensor:
        """Return the gradient of cotangent · outputs at ``vector``, from one forward and one backward."""
        leaves = self.leaves(vector)
        outputs = self.record(leaves)
        return self.backward(outputs, leaves, self.shaped(cotangent))

    def learn_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Remember what the outputs look like."""
        self.has_own_code = any(map(_is_own_code, nodes_of(outputs)))
        names = [f"output {i}" if len(outputs) > 1 else "the output" for i in range(len(outputs))]
        for name, output in zip(names, outputs, strict=True):
            refuse_unfit(f"{name} of {name_of(self.fn)}", output, "output")
        self.outputs = [
            OutputPlace(name, o.shape, o.dtype, o.device, o.requires_grad)
            for name, o in zip(names, outputs, strict=True)
        ]
        self.output_sizes = [o.shape.numel() * (2 if o.dtype.is_complex else 1) for o in self.outputs]
        self.size = sum(self.output_sizes)
        """How many real numbers the outputs are."""
        self.base = self.flatten(outputs)

    def flatten(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return outputs as one float64 vector."""
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.cat([nothing, *(_flat(o.detach()) for o in outputs)])

    def shaped(self, cotangent: Tensor) -> list[Tensor]:
        """Return a flat vector as tensors like the outputs."""
        parts = cotangent.split_with_sizes(self.output_sizes)
        return [_unflattened(part, one) for part, one in zip(parts, self.outputs, strict=True)]

    def rounding_of(self, values: Tensor) -> Tensor:
        """Return half a unit in the last place of each output element, as its dtype has it."""
        found = values.abs()
        for part, o in zip(found.split(self.output_sizes), self.outputs, strict=True):
            part *= torch.finfo(o.dtype).eps / 2
        return found

    def with_graph(self) -> Tensor:
        """Return which output elements have a graph, as a flat vector."""
        parts = zip(self.output_sizes, self.outputs, strict=True)
        return torch.cat([torch.full((n,), o.has_graph, dtype=torch.bool, device="cpu") for n, o in parts])

    def _converted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        return value.to(WIDE[value.dtype]) if self.wide and value.dtype in WIDE else value


def nodes_of(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Yield each node of the graph of ``outputs`` once."""
    waiting: list[Any] = [o.grad_fn for o in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [other for other, _ in node.next_functions]


def _is_own_code(node: Any) -> bool:
    """Tell whether a node of the graph was written by somebody else than PyTorch, whose own nodes have a type each."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ == "CppFunction"


def element_of(parts: Sequence[tuple[str, Any]], position: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and the index of one element of a flat vector, whose parts have a name, a shape and a dtype."""
    for name, part in parts:
        numbers = 2 if part.dtype.is_complex else 1
        if position < numbers * part.shape.numel():
            return name, index_of(position // numbers, part.shape)
        position -= numbers * part.shape.numel()
    raise IndexError(position)


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of one element of a tensor of this shape, in which it is the one at ``position``."""
    index = []
    for length in reversed(shape):
        position, within = divmod(position, length)
        index.append(within)
    return tuple(reversed(index))


def is_differentiable(value: Any) -> bool:
    """Tell whether this is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def is_autograd_function(one: Any) -> TypeGuard[type[torch.autograd.Function]]:
    """Tell whether this is a class with a forward and a backward of its own."""
    return isinstance(one, type) and issubclass(one, torch.autograd.Function)


def name_of(fn: Any) -> str:
    """Return what a person would call a callable."""
    return getattr(fn, "__name__", type(fn).__name__)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor as one float64 vector on the CPU."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor
    return real.reshape(-1).to("cpu", torch.float64)


def _unflattened(part: Tensor, like: Any) -> Tensor:
    """Return what `_flat` made of a tensor with the shape, dtype and device of ``like``."""
    if like.dtype.is_complex:
        part = torch.view_as_complex(part.clone().reshape(*like.shape, 2))
    return part.reshape(like.shape).to(like.device, like.dtype)


def _dense(value: Tensor) -> Tensor:
    """Return a copy whose elements have places of their own: expanded inputs and windows are laid out in full."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    overlaps = 0 < span < value.numel()
    return value.detach().contiguous().clone() if overlaps or value.is_conj() else _like(value.detach())


def _like(value: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    if value.is_contiguous():
        return value.clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _outputs_of(result: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in tree_leaves(result):
        if is_differentiable(value):
            found.append(value)
        elif is_dataclass(value):
            found += _outputs_of([getattr(value, field.name) for field in fields(value)])
    return found


def _argument_names(fn: Callable[..., Any], args: tuple[Any, ...], flat: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return a name for each leaf of the arguments, as the callable's signature has them."""
    positional = [f"input {i}" if len(args) > 1 else "input" for i in range(len(args))]
    try:
        given = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    except (TypeError, ValueError):
        given = []
    for i, parameter in enumerate(given[: len(args)]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional[i:] = [f"{parameter.name}[{j}]" for j in range(len(args) - i)]
            break
        positional[i] = parameter.name
    names = []
    for path, _ in flat:
        within = keystr(path[2:])
        names.append((positional[path[1].idx] if path[0].idx == 0 else str(path[1].key)) + within)
    return names


def _refuse_others(chosen: list[str], inputs: list[str], known: Mapping[str, Any]) -> None:
    """Refuse names of what is no input to check.

    Raises:
        InvalidValueError: If there is no such input, or no name at all.
        InvalidTypeError: If it holds no real or complex numbers.
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

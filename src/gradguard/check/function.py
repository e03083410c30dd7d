"""A callable at a point, as what the mathematics needs: a function from one vector to another, and its gradient.

Whatever the callable takes and returns, its floating and complex inputs and, for a module, its parameters become one
flat float64 vector, and its floating and complex outputs another. Complex numbers count as two real ones. State that a
call changes is put back before the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.check.state import State
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.torch_private import gradients_of, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


@dataclass(frozen=True)
class Input:
    """One tensor that the gradient is checked for."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Layout:
    """Where an output lies in the flat vector."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    has_graph: bool


class Function:
    """A callable and a point; counts how often the callable is called forward and backward."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wide: bool,
        names: list[str] | None = None,
    ) -> None:
        self.fn, self.wide = fn, wide
        self.forwards = self.backwards = 0
        self.state = State(fn, args, kwargs)
        self.clones_inputs = self.keeps_inputs = False
        self.on_call: Callable[[], None] = lambda: None
        module = _module_of(fn)
        self.module = module
        flat, self._structure = tree_flatten_with_path((args, dict(kwargs)))
        self._flat = [self._converted(value) for _, value in flat]
        names = names or _argument_names(module.forward if module is not None else fn, args, flat)
        self._parameters = {} if module is None else {n: self._converted(p) for n, p in module.named_parameters()}
        self._buffers = {} if module is None else {n: self._converted(b) for n, b in module.named_buffers()}
        for i, (_, value) in enumerate(flat):
            _check_layout(names[i], value)
        candidates = {i: v for i, v in enumerate(self._flat) if is_differentiable(v)}
        marked = {i for i in candidates if flat[i][1].requires_grad}
        self._arguments = {names[i]: i for i in (sorted(marked) if marked else candidates)}
        self.constants = {names[i]: v for i, (_, v) in enumerate(flat) if names[i] not in self._arguments}
        trained = [] if module is None else [n for n, p in module.named_parameters() if p.requires_grad]
        self._trained = {f"parameter {n}" if n in self._arguments else n: n for n in trained}
        self.inputs = [Input(name, _dense(self._flat[i])) for name, i in self._arguments.items()]
        self.inputs += [Input(name, _dense(self._parameters[n])) for name, n in self._trained.items()]
        for one in self.inputs:
            _check_input(one)
        are_alone = all(one is value for one, (_, value) in zip(args, flat, strict=False))
        self._takes_every_argument = module is None and not kwargs and are_alone and len(args) == len(self.inputs)
        self._learn_inputs()
        self.outputs: list[Layout] = []
        self.learnt: Tensor | None = None
        """The outputs at the point, as the first call gave them."""
        self.base: Tensor | None = None
        """The outputs at the point, once they are known to be the same at each call."""
        self.taken: tuple[Tensor, Tensor] | None = None
        """A cotangent, and its gradient at the point."""

    @property
    def are_arguments(self) -> list[bool]:
        """Whether each input is an argument, not a parameter of the module."""
        return [one.name in self._arguments for one in self.inputs]

    def choose(self, names: Iterable[str]) -> None:
        """Check the gradients for these inputs only.

        Raises:
            InvalidValueError: If there is no such input.
            InvalidTypeError: If it holds no real or complex numbers.
        """
        chosen = [names] if isinstance(names, str) else list(names)
        known = [one.name for one in self.inputs]
        if not chosen:
            raise InvalidValueError(f"inputs_to_check is empty: expected some of {known}, or None for all of them.")
        for name in chosen:
            value = self.constants.get(name)
            if name not in known and isinstance(value, Tensor) and not is_differentiable(value):
                raise InvalidTypeError(
                    f"input {name!r} is {value.dtype}, which has no gradient: expected a floating or complex tensor; "
                    f"call {name}.double() first, or leave it out."
                )
            if name not in known:
                raise InvalidValueError(f"inputs_to_check has {name!r}, which is not among the inputs: {known}.")
        self.inputs = [one for one in self.inputs if one.name in chosen]
        self._learn_inputs()

    def _learn_inputs(self) -> None:
        self.sizes = [one.value.numel() * (2 if one.value.is_complex() else 1) for one in self.inputs]
        self._takes_inputs_alone = self._takes_every_argument and len(self.inputs) == len(self._arguments)
        """Whether the callable is called with the inputs and nothing else, in their order."""
        self._are_plain = not any(one.value.is_complex() or not one.value.is_contiguous() for one in self.inputs)
        self.is_wide = all(one.value.dtype in (torch.float64, torch.complex128) for one in self.inputs)
        """Whether the inputs hold every float64 number."""
        self._point: Tensor | None = None
        if (
            self.inputs and self.is_wide and self._are_plain
        ):  # the inputs are parts of the point, so that it takes no memory of its own
            self._point = self.join([one.value for one in self.inputs])
            parts = zip(self.inputs, self._point.split_with_sizes(self.sizes), strict=True)
            self.inputs = [Input(one.name, part.view(one.value.shape)) for one, part in parts]

    @property
    def point(self) -> Tensor:
        """The inputs as one float64 vector, not to be changed."""
        return self._point if self._point is not None else self.join([one.value for one in self.inputs])

    def join(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return tensors that belong to the inputs as one float64 vector, zeros for None."""
        parts = []
        for tensor, one, size in zip(tensors, self.inputs, self.sizes, strict=True):
            if tensor is None:
                parts.append(torch.zeros(size, dtype=torch.float64, device=one.value.device))
            elif tensor.dtype is torch.float64 and not (tensor.requires_grad or tensor.is_sparse):
                parts.append(tensor.reshape(-1))
            else:
                parts.append(_flat(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the inputs that ``vector`` stands for, rounded to their dtype, with their strides."""
        tensors = []
        parts = (vector,) if len(self.sizes) == 1 else vector.split_with_sizes(self.sizes)
        for part, one in zip(parts, self.inputs, strict=True):
            value = one.value
            if value.is_complex():
                part = torch.view_as_complex(part.clone().reshape(*value.shape, 2))
            part = part.reshape(value.shape).to(value.dtype)
            if not value.is_contiguous():
                part = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(part)
            tensors.append(part)
        return tensors

    def rounded(self, vectors: Tensor) -> Tensor:
        """Return ``vectors``, one in each row, as the dtypes of the inputs hold them."""
        return vectors if self.is_wide else torch.stack([self.join(self.split(one)) for one in vectors])

    def name_of(self, position: int) -> tuple[str, tuple[int, ...]]:
        """Return the input and the index in it of one element of the flat vector."""
        for one, size in zip(self.inputs, self.sizes, strict=True):
            if position < size:
                position //= 2 if one.value.is_complex() else 1
                index = []
                for length in reversed(one.value.shape):
                    position, within = divmod(position, length)
                    index.append(within)
                return one.name, tuple(reversed(index))
            position -= size
        raise IndexError(position)

    def range_of(self, name: str) -> range:
        """Return where an input lies in the flat vector."""
        start = 0
        for one, size in zip(self.inputs, self.sizes, strict=True):
            if one.name == name:
                return range(start, start + size)
            start += size
        raise KeyError(name)

    def values(self, vector: Tensor) -> Tensor:
        """Return the outputs at ``vector`` as one new float64 vector; NaN where the callable cannot be called there."""
        return self.values_at(vector[None])[0]

    def values_at(self, vectors: Tensor) -> Tensor:
        """Return the outputs at each of ``vectors``, one in each row."""
        shapes = [one.shape for one in self.outputs]
        rows = torch.empty((len(vectors), self.size), dtype=torch.float64, device=vectors.device)
        with torch.no_grad():
            for row, vector in zip(rows, vectors, strict=True):
                try:
                    outputs = self.call(self.split(vector if self.keeps_inputs else vector.clone()))
                except Exception:  # outside of the domain
                    outputs = []
                if [one.shape for one in outputs] == shapes:  # not where a shape depends on the data
                    torch.cat([_flat(one) for one in outputs], out=row)
                else:
                    row.fill_(torch.nan)
        return rows

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the callable with these tensors for its inputs; return its floating and complex outputs."""
        self.forwards += 1
        self.on_call()
        self.state.begin_call()
        if self.clones_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        if self._takes_inputs_alone:
            return _outputs_of(self.fn(*tensors))
        given = dict(zip((one.name for one in self.inputs), tensors, strict=True))
        flat = list(self._flat)
        for name, position in self._arguments.items():
            flat[position] = given.get(name, self._flat[position])
        flat = [
            v.clone() if isinstance(v, Tensor) and i not in self._arguments.values() else v for i, v in enumerate(flat)
        ]
        args, kwargs = tree_unflatten(flat, self._structure)
        if self.module is None:
            return _outputs_of(self.fn(*args, **kwargs))
        replaced = {**self._parameters, **{n: b.clone() for n, b in self._buffers.items()}}
        replaced |= {n: given[name] for name, n in self._trained.items() if name in given}
        return _outputs_of(torch.func.functional_call(self.module, replaced, args, kwargs))

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
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad and c is not None]
        self.backwards += 1
        if not pairs:
            return [None] * len(self.inputs)
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(gradients_of([o for o, _ in pairs], needed, [c for _, c in pairs], keep))
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def gradient(self, vector: Tensor | None, cotangent: Tensor) -> Tensor:
        """Return the gradient of cotangent · outputs at ``vector``, from one forward and one backward."""
        leaves = self.leaves(vector)
        outputs = self.record(leaves)
        return self.backward(outputs, leaves, self.shaped(cotangent))

    def learn_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Remember what the outputs look like."""
        self.outputs = [
            Layout(f"output {i}" if len(outputs) > 1 else "the output", o.shape, o.dtype, o.device, o.requires_grad)
            for i, o in enumerate(outputs)
        ]
        self.output_sizes = [o.shape.numel() * (2 if o.dtype.is_complex else 1) for o in self.outputs]
        self.size = sum(self.output_sizes)
        """How many real numbers the outputs are."""
        self.learnt = self.flatten(outputs).clone()

    def flatten(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return outputs as one float64 vector."""
        parts = [_flat(o.detach()) for o in outputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def shaped(self, cotangent: Tensor) -> list[Tensor]:
        """Return a flat vector as tensors like the outputs."""
        shaped = []
        for part, one in zip(cotangent.split_with_sizes(self.output_sizes), self.outputs, strict=True):
            if one.dtype.is_complex:
                part = torch.view_as_complex(part.clone().reshape(*one.shape, 2))
            shaped.append(part.reshape(one.shape).to(one.dtype).to(one.device))
        return shaped

    def rounding_of(self, values: Tensor) -> Tensor:
        """Return half a unit in the last place of each output element, as its dtype has it."""
        found = values.abs()
        for part, o in zip(found.split(self.output_sizes), self.outputs, strict=True):
            part *= torch.finfo(o.dtype).eps / 2
        return found

    def with_graph(self) -> Tensor:
        """Return which output elements have a graph, as a flat vector."""
        parts = zip(self.output_sizes, self.outputs, strict=True)
        return torch.cat([torch.full((n,), o.has_graph, dtype=torch.bool) for n, o in parts])

    def _converted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        return value.to(WIDE[value.dtype]) if self.wide and value.dtype in WIDE else value


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    return fn if isinstance(fn, nn.Module) else None


def is_differentiable(value: Any) -> bool:
    """Tell whether this is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def name_of(fn: Any) -> str:
    """Return what a person would call a callable."""
    return getattr(fn, "__name__", type(fn).__name__)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float64:
        return tensor.reshape(-1)
    return _real(tensor).reshape(-1).double()


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
    if isinstance(result, Tensor):
        return [result] if is_differentiable(result) else []
    found: list[Tensor] = []
    for value in tree_leaves(result):
        if isinstance(value, Tensor):
            found += [value] if is_differentiable(value) else []
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


def _check_layout(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        raise InvalidTypeError(f"input {name!r} is {value.layout}: expected a dense tensor, such as {name}.to_dense().")


def _check_input(one: Input) -> None:
    value = one.value
    if value.dtype not in WIDE:
        raise InvalidTypeError(
            f"input {one.name!r} is {value.dtype}: expected one of float16, bfloat16, 32, 64, complex."
        )
    if bool(value.isnan().any()):
        bad = value.isnan().nonzero()[0].tolist()
        raise InvalidValueError(f"input {one.name!r} is {value[tuple(bad)]} at index {bad}: expected numbers.")

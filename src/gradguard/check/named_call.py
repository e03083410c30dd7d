"""An operator with named inputs and outputs, as in the interface of PaddlePaddle's gradient check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.check.admission import refuse_empty, refuse_unfit, refuse_unless
from gradguard.check.function import (
    Function,
    is_autograd_function,
    is_differentiable,
    name_of,
    own_tensors,
    signature_of,
)
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.state.frozen import Frozen, modules_of_call
from gradguard.state.generators import generator_states

_MISSING: Any = object()


class NamedCall:
    """A callable, a value for each of its inputs, and the name of one of its outputs.

    Attributes:
        names: The inputs whose gradients may be checked: those of the caller, and the parameters of a module.
        values: The value of each input by name, including the scope's inputs and a module's own tensors. Tensors of
            the caller are copied.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        values: Mapping[str, Any],
        output_name: str | int,
        scope: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(op):
            raise InvalidTypeError(f"the operator is {type(op).__name__}: expected a function or a module.")
        self.op, self.output_name = op, output_name
        inputs, further = _tensor_values("input_values", values), _tensor_values("local_scope", scope or {})
        if common := [name for name in inputs if name in further]:
            raise InvalidValueError(f"{common} are in input_values and in local_scope: list each in one of them only.")
        parameters, own = own_tensors(op)
        refuse_empty(own)
        self.names = list(dict.fromkeys([*inputs, *parameters]))
        self.values = {**{name: one.detach() for name, one in own.items()}, **inputs, **further}
        self._owned = own.keys() - {one.name for one in _parameters(op) or ()}

    def name_of(self, name: str, argument: str) -> str:
        """Return ``name`` if it is among the inputs; ``argument`` names the caller's argument in the message.

        Raises:
            InvalidValueError: If ``name`` is not among the inputs.
        """
        if name not in self.names:
            raise InvalidValueError(f"{argument} has {name!r}, which is not among the inputs: {self.names}.")
        return name

    @contextmanager
    def function(self, names: list[str], *, wide: bool = False, device: str | None = None) -> Iterator[Function]:
        """Yield the output as a function of some inputs; restore buffers and random number generators at the end.

        Args:
            names: The inputs.
            wide: Whether all tensors are converted to float64.
            device: The device for all tensors; None leaves them where they are.

        Yields:
            The function.

        Raises:
            InvalidTypeError: If an input is not a dense tensor of floating or complex numbers.
            InvalidValueError: If an element of an input is NaN or infinite.
        """
        values = {**self.values, **{name: self._tensor(name) for name in names}}
        tensors = {name: one.to(device or one.device) for name, one in values.items() if isinstance(one, Tensor)}

        def output(*given: Tensor) -> Tensor:
            return self._output({**values, **dict(zip(tensors, given, strict=True))})

        function = Function(output, tuple(tensors.values()), {}, wide, names=list(tensors), chosen=names)
        for one in function.inputs:
            refuse_unless(one.value.isfinite(), f"input {one.name!r}", one.value, "expected finite numbers")
        function.state = Frozen(modules_of_call(self.op), generator_states(), copies=False)
        try:
            yield function
        finally:
            function.state.restore()

    def _tensor(self, name: str) -> Tensor:
        value = self.values[name]
        if isinstance(value, float | complex):
            return torch.tensor(
                value, dtype=torch.float64 if isinstance(value, float) else torch.complex128, device="cpu"
            )
        if not is_differentiable(value):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise InvalidTypeError(
                f"input {name!r} is {kind}, which has no gradient: expected floating or complex numbers. Convert it "
                f"first, such as by {name}.astype('float64'), or leave it out."
            )
        return value

    def _output(self, values: dict[str, Any]) -> Tensor:
        """Return the output for these values.

        Raises:
            InvalidTypeError: If the output is not a floating or complex tensor, or the callable refuses a mixture of
                dtypes.
            InvalidValueError: If the callable has no such input or output.
            RuntimeError: If the callable raises one for another reason.
        """
        own = {name: values[name] for name in self._owned}
        given = {name: one for name, one in values.items() if name not in own}
        args, kwargs = bind_by_name(self.op, given, sorted(own))
        try:
            if isinstance(self.op, nn.Module):
                result = torch.func.functional_call(self.op, own, args, kwargs)
            else:
                result = self.op(*args, **kwargs)
        except RuntimeError as error:
            dtypes = {name: str(one.dtype) for name, one in values.items() if is_differentiable(one)}
            if "type" not in str(error) or len(set(dtypes.values())) < 2:
                raise
            # The usual cause: NumPy arrays are float64, the weights of the module float32.
            raise InvalidTypeError(
                f"{name_of(self.op)} cannot be called with {dtypes}: {error}. Convert them to one dtype, by "
                f"model.double() or array.astype('float32')."
            ) from error
        return select_output(result, self.output_name, name_of(self.op))


def bind_by_name(
    fn: Callable[..., Any], values: Mapping[str, Any], others: Sequence[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of ``fn``: by name, or in the order of ``values`` if ``fn`` has no names.

    Args:
        fn: A function, a module or the ``apply`` of a `torch.autograd.Function`.
        values: The arguments by name.
        others: Further names that an error message lists.

    Returns:
        The positional arguments and the keyword arguments.

    Raises:
        InvalidValueError: If a name is not in the signature, or a required argument is missing.
    """
    parameters = _parameters(fn)
    if parameters is None:
        return tuple(values.values()), {}
    named = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p for p in parameters]
    # A caller may ignore positional-only names, such as in f(a, b, /), because they are not part of the interface.
    is_numbered = all(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    if parameters and is_numbered and values.keys().isdisjoint(p.name for p in parameters):
        return tuple(values.values()), {}
    try:
        bound = inspect.Signature(named).bind(**values)
    except TypeError as error:
        known = [p.name for p in named if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        own = f", its parameters and buffers {list(others)}" if others else ""
        raise InvalidValueError(
            f"{name_of(fn)} cannot be called with {list(values)}: {error}. Its arguments are {known}{own}."
        ) from None
    bound.apply_defaults()
    return bound.args, bound.kwargs


def select_output(result: Any, output_name: str | int, op_name: str) -> Tensor:
    """Return the output ``output_name`` of a result: a key, an attribute or a position. One tensor fits any name.

    Raises:
        InvalidTypeError: If the output is not a floating or complex tensor.
        InvalidValueError: If no output has this name.
    """
    outputs = {output_name: result} if isinstance(result, Tensor) else _outputs(result, output_name)
    if not any(isinstance(value, Tensor) for value in outputs.values()):
        raise InvalidTypeError(
            f"{op_name} returned {type(result).__name__} without a tensor: expected a tensor, or tensors in a dict, a "
            f"tuple, a list or an object with attributes."
        )
    chosen: Any = outputs.get(output_name, outputs.get(str(output_name), _MISSING))
    if chosen is _MISSING:
        raise InvalidValueError(f"{op_name} has no output {output_name!r}: expected one of {list(outputs)}.")
    if not is_differentiable(chosen):
        kind = chosen.dtype if isinstance(chosen, Tensor) else type(chosen).__name__
        raise InvalidTypeError(
            f"output {output_name!r} of {op_name} is {kind}, which has no gradient: expected a floating or complex "
            f"tensor."
        )
    refuse_unfit(f"output {output_name!r} of {op_name}", chosen, "output")
    return chosen


def _outputs(result: Any, asked: str | int) -> dict[Any, Any]:
    """Return the values of a result by key, by position (in digits) or by attribute, including a property ``asked``."""
    if isinstance(result, Mapping):
        return dict(result)
    found = {str(i): value for i, value in enumerate(result)} if isinstance(result, tuple | list) else {}
    found |= getattr(result, "__dict__", {})
    return found | {asked: getattr(result, str(asked))} if hasattr(result, str(asked)) else found


def _tensor_values(argument: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tensors copied and NumPy arrays converted to tensors."""
    if not isinstance(values, Mapping):
        raise InvalidTypeError(
            f"{argument} is {type(values).__name__}: expected a dict from the name of each input to its array, as in "
            f"{{'x': array}}."
        )
    refuse_empty(values)
    return {name: _tensor(name, value) for name, value in values.items()}


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, bool | int | float | complex) or not hasattr(value, "__array_interface__"):
        return value  # a number stays a number: operators take dimensions and factors as plain numbers
    try:
        return torch.from_numpy(value.reshape(value.shape or 1).copy("K")).reshape(value.shape)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"input {name!r} is an array of {value.dtype}: {error}") from None


def _parameters(fn: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable or of a module's forward; None for torch functions written in C++."""
    owner = getattr(fn, "__self__", None)
    if is_autograd_function(owner):  # ``apply`` accepts the arguments of ``forward``, by position only
        given = (signature_of(owner.forward) or [])[owner.setup_context is torch.autograd.Function.setup_context :]
        return [p.replace(kind=p.POSITIONAL_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in given]
    return signature_of(fn.forward if isinstance(fn, nn.Module) else fn)

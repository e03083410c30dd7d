"""What a user may pass as ``parameters``, turned into a list of gradients with names."""

import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradguard.distributed import refuse_sharded
from gradguard.errors import InvalidTypeError

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]
"""One tensor, a module, an iterable of tensors or of ``(name, tensor)`` pairs, or a mapping from name to tensor."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Parameters that have a gradient, each once.

    Attributes:
        parameters: The parameters.
        gradients: Their gradients.
        positions: The place of each in what the user passed.
        names: Names of all that the user passed, or ``None`` if they had none.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    positions: Sequence[int]
    names: Sequence[str] | None

    def name(self, index: int) -> str:
        """Return what to call the ``index``-th gradient in a message."""
        if self.names is not None:
            return f"`{self.names[self.positions[index]]}`"
        shape = tuple(self.gradients[index].shape)
        return f"parameter {self.positions[index]} (shape {shape}, no name: pass model.named_parameters())"

    def plain_names(self) -> tuple[str, ...]:
        """Return the name of each gradient, or its position where the user gave no names."""
        return tuple(self.names[i] if self.names is not None else str(i) for i in self.positions)


def collect_gradients(parameters: Parameters) -> Gradients:
    """Return the gradients of ``parameters``; tied parameters and repeated entries count once."""
    return gradients_of(*named_tensors(parameters, "parameters"))


def gradients_of(names: Sequence[str] | None, tensors: Sequence[Tensor]) -> Gradients:
    """Return the gradients of ``tensors``, each once, in order of first appearance."""
    refuse_sharded(tensors)
    gradients = [tensor.grad for tensor in tensors]
    if type(None) not in set(map(type, gradients)) and len(set(map(id, gradients))) == len(gradients):
        positions: Sequence[int] = range(len(gradients))  # the common case, without a loop in Python
    else:
        first = {id(g): i for i, g in reversed(list(enumerate(gradients))) if g is not None}
        positions = sorted(first.values())
    kept: list[Any] = [gradients[i] for i in positions]
    if any(dtype.is_complex for dtype in {gradient.dtype for gradient in kept}):
        kept = [_conjugate_in_memory(tensors[i]) for i in positions]
    return Gradients([tensors[i] for i in positions], kept, positions, names)


def _conjugate_in_memory(parameter: Tensor) -> Any:
    """The gradient of ``parameter``, whose real and imaginary parts are what its memory holds."""
    if parameter.grad is not None and parameter.grad.is_conj():
        parameter.grad = parameter.grad.resolve_conj()
    return parameter.grad


def gradients_among(tensors: Parameters) -> Gradients:
    """Return ``tensors`` as the gradients that they are, each once; ``None`` entries are left out.

    Raises:
        InvalidTypeError: If a module came: it has parameters *and* gradients.
    """
    if isinstance(tensors, nn.Module):
        raise InvalidTypeError(
            "tensors is a module: get_total_norm takes the gradients themselves. "
            "Pass [p.grad for p in model.parameters()], or list(model.parameters()) for the norm of the weights."
        )
    given: Any = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    if isinstance(given, Iterable) and not isinstance(given, Tensor | str):
        given = [e for e in given if e is not None and not (isinstance(e, tuple) and e and e[-1] is None)]
    names, values = named_tensors(cast("Parameters", given), "tensors")
    refuse_sharded(values)
    first = sorted({id(value): i for i, value in reversed(list(enumerate(values)))}.values())
    kept = [values[i] for i in first]
    return Gradients(kept, kept, first, names)


def named_tensors(argument: Parameters, what: str) -> tuple[list[str] | None, list[Tensor]]:
    """Return the names (``None`` where there are none) and tensors of ``argument``.

    Args:
        argument: Any of the kinds of `Parameters`.
        what: What the argument is called, for messages.

    Raises:
        InvalidTypeError: Saying what came and what to pass instead.
    """
    if isinstance(argument, Tensor):
        return None, [argument]
    if isinstance(argument, torch.optim.Optimizer):
        raise InvalidTypeError(
            f"{what} is an optimizer: pass [p for group in optimizer.param_groups for p in group['params']]."
        )
    if isinstance(argument, nn.Module):
        entries = list(argument.named_parameters(remove_duplicate=False))
    elif isinstance(argument, Mapping):
        entries = list(argument.items())
    elif isinstance(argument, Iterable) and not isinstance(argument, str):
        entries = list(argument)
    else:
        raise InvalidTypeError(_expected(what, argument))
    if not entries and isinstance(argument, types.GeneratorType):
        warnings.warn(
            f"{what} is an exhausted or empty generator, so nothing is clipped. A generator can be used only once: "
            "pass list(model.parameters()), or model itself.",
            stacklevel=5,
        )
    return _split_names(entries, what)


def _split_names(entries: list, what: str) -> tuple[list[str] | None, list[Tensor]]:
    if all(issubclass(kind, Tensor) for kind in set(map(type, entries))):
        return None, entries
    pairs = not isinstance(entries[0], Tensor)
    for index, entry in enumerate(entries):
        if not (_is_named(entry) if pairs else isinstance(entry, Tensor)):
            raise InvalidTypeError(_expected(f"{what}[{index}]", entry))
    return [name for name, _ in entries], [tensor for _, tensor in entries]


def _is_named(entry: object) -> bool:
    match entry:
        case (str(), Tensor()):
            return True
    return False


def _expected(what: str, came: object) -> str:
    hint = " Pass group['params'] of each group." if isinstance(came, dict) else ""
    return (
        f"{what} is {type(came).__name__}: expected a module, a tensor, an iterable of tensors or of (name, tensor) "
        f"pairs, or a mapping from name to tensor.{hint}"
    )

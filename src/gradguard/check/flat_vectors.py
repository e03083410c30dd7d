"""Flat float64 vectors on the CPU: the numbers of tensors side by side, complex ones as two real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_UNDERFLOWS = 1e-140
"""At a 2-norm below this, squares of elements have lost digits."""


@dataclass(frozen=True)
class Slot:
    """The place of one input or output in a vector.

    Attributes:
        name: The name of the tensor in findings.
        value: The tensor itself: of an output only its shape, dtype and device count.
        position: The number of an input among all that the callable is called with, a module's own tensors last.
        is_argument: Whether an input is no parameter or buffer of the module.
        has_graph: Whether an output has a graph.
    """

    name: str
    value: Tensor
    position: int = -1
    is_argument: bool = False
    has_graph: bool = True

    @property
    def size(self) -> int:
        """The number of real numbers in the tensor."""
        return self.value.numel() * (2 if self.value.is_complex() else 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its real numbers."""
        return self.value.dtype.to_real()


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of ``tensors`` as one new vector."""
    return torch.cat([zeros(0), *map(_flat, tensors)])


def parts_of(vector: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """Return the tensors that ``vector`` stands for: rounded to the dtypes of ``slots``, contiguous."""
    parts = []
    for part, one in zip(vector.split_with_sizes([one.size for one in slots]), slots, strict=True):
        like = one.value
        if like.is_complex():
            part = torch.view_as_complex(part.clone().reshape(*like.shape, 2))
        parts.append(part.reshape(like.shape).to(like.device, like.dtype))
    return parts


def element_of(slots: Sequence[Slot], position: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and the index of one element of a vector."""
    for one in slots:
        if position < one.size:
            return one.name, index_of(position * one.value.numel() // one.size, one.value.shape)
        position -= one.size
    raise IndexError(position)


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index, in a tensor of this shape, of the element at a flat ``position``."""
    index = []
    for length in reversed(shape):
        position, within = divmod(position, length)
        index.append(within)
    return tuple(reversed(index))


def zeros(*shape: int) -> Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def numbers(values: Sequence[float]) -> Tensor:
    """Return ``values`` as a vector."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers from -1 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)


def clear_of_zero(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers between 0.5 and 1.5 in size: equal errors with equal signs do not cancel."""
    found = drawn(shape, generator)
    return found.add_(found.sign(), alpha=0.5)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers of a standard normal distribution."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random signs, each 1 or -1."""
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1


def finite(values: Tensor) -> Tensor:
    """Return ``values`` with 0 in place of NaN and infinity."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def largest(values: Tensor) -> float:
    """Return the largest finite |x|, 0 if there is none."""
    return float(finite(values).abs().max()) if values.numel() else 0.0


def are_finite(values: Tensor) -> bool:
    """Tell whether all of ``values`` are finite."""
    return bool(values.isfinite().all())


def are_the_same(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal, element by element, NaN equal to itself."""
    if torch.equal(first, second):
        return True
    one, other = (torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t for t in (first, second))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def norm(vector: Tensor) -> float:
    """Return the 2-norm, however large or small the elements are."""
    plain = float(torch.linalg.vector_norm(vector))
    if _UNDERFLOWS < plain < math.inf or not vector.numel():
        return plain
    most = float(torch.linalg.vector_norm(vector, torch.inf))
    return most * float((vector / most).norm()) if 0 < most < math.inf else plain


def mean_size(vector: Tensor) -> Tensor:
    """Return the mean of the finite |x|, 1 if that is 0."""
    sizes = vector.abs()
    sizes = sizes if are_finite(sizes) else sizes[sizes.isfinite()]
    mean = sizes.mean()  # NaN of nothing
    return torch.where(mean > 0, mean, 1.0)


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).to("cpu", torch.float64)

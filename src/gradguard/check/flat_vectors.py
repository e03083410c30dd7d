"""Flat float64 vectors on the CPU: the concatenated elements of tensors, each complex number as two real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_UNDERFLOWS = 1e-140
"""Below this 2-norm, the squares of elements underflow and lose digits."""


@dataclass(frozen=True)
class Slot:
    """The slice of a vector that one input or output occupies.

    Attributes:
        name: The name of the tensor in findings.
        value: The tensor; of an output, only shape, dtype and device matter.
        position: The index of an input among all values that the callable receives; a module's own tensors come last.
        is_argument: Whether an input is an argument, not a parameter or buffer of the module.
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
        """The dtype of the real numbers; float32 for a complex64 tensor."""
        return self.value.dtype.to_real()


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the elements of ``tensors`` into one new vector."""
    return torch.cat([zeros(0), *map(_flat, tensors)])


def parts_of(vector: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """Split ``vector`` into contiguous tensors with the shapes, devices and dtypes of ``slots``; values are rounded."""
    parts = []
    for part, one in zip(vector.split_with_sizes([one.size for one in slots]), slots, strict=True):
        like = one.value
        if like.is_complex():
            part = torch.view_as_complex(part.clone().reshape(*like.shape, 2))
        parts.append(part.reshape(like.shape).to(like.device, like.dtype))
    return parts


def element_of(slots: Sequence[Slot], position: int) -> tuple[str, tuple[int, ...]]:
    """Return the tensor's name and the index within the tensor of one element of a vector."""
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
    """Return a float64 tensor of zeros on the CPU."""
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def numbers(values: Sequence[float]) -> Tensor:
    """Return ``values`` as a vector."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return uniform random numbers from -1 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)


def clear_of_zero(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers of random sign and of random size between 0.5 and 1.5, with which equal errors do not cancel."""
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
    """Return the largest finite |x|; 0 without any."""
    return float(finite(values).abs().max()) if values.numel() else 0.0


def are_finite(values: Tensor) -> bool:
    """Return whether all of ``values`` are finite."""
    return bool(values.isfinite().all())


def are_the_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal element by element; NaN equals NaN."""
    if torch.equal(first, second):
        return True
    one, other = (torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t for t in (first, second))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def norm(vector: Tensor) -> float:
    """Return the 2-norm without overflow or underflow of the squares."""
    plain = float(torch.linalg.vector_norm(vector))
    if _UNDERFLOWS < plain < math.inf or not vector.numel():
        return plain
    most = float(torch.linalg.vector_norm(vector, torch.inf))
    return most * float((vector / most).norm()) if 0 < most < math.inf else plain


def mean_size(vector: Tensor) -> Tensor:
    """Return the mean of the finite |x|; 1 if the mean is 0 or no element is finite."""
    sizes = vector.abs()
    sizes = sizes if are_finite(sizes) else sizes[sizes.isfinite()]
    mean = sizes.mean()  # NaN if empty
    return torch.where(mean > 0, mean, 1.0)


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).to("cpu", torch.float64)

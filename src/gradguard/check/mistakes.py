"""Mistakes that many backwards have in common, each tried: does the gradient agree once it is undone?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.report import Finding

if TYPE_CHECKING:
    from gradguard.check.search import Search

_ALIKE = 1e-5
_STEP = 1e-4
_BETWEEN = {"float32": (1e-9, 1e-6), "bfloat16 or float16": (1e-5, 2e-2)}
"""By how much elements are off, relatively, where something is rounded to that dtype on the way."""


def mistake(search: Search, one: Finding) -> str:
    """Return what was done wrong with the gradient that ``one`` belongs to, "" if it is none of these."""
    value = next(i.value for i in search.differences.function.inputs if i.name == one.input)
    if value.is_complex() or not value.numel():
        return ""
    return _rearranged(search, one, value.shape) or _not_added_up(search, one, value)


def low_dtype_between(findings: list[Finding]) -> str:
    """Return which dtype is used in between, if all elements are off by what that rounds, each by another amount."""
    off = [one.analytical / one.numerical - 1 for one in findings if one.analytical is not None and one.numerical]
    if len(off) < max(3, len(findings)) or any(one.kind != "mismatch" for one in findings):
        return ""
    if max(off) - min(off) < 0.3 * max(map(abs, off)):  # a constant factor
        return ""
    for dtype, (least, most) in _BETWEEN.items():
        if least < max(map(abs, off)) < most:
            return f"as if something were {dtype} in between"
    return ""


def _rearranged(search: Search, one: Finding, shape: torch.Size) -> str:
    """Return how the elements of this gradient change places, if they agree once they are put back."""
    differences = search.differences
    own = differences.function.range_of(one.input)
    given, part = differences.gradient, slice(own.start, own.stop)
    direction = torch.zeros_like(differences.point)
    signs = torch.randint(0, 2, (len(own),), generator=search.generator, dtype=torch.float64, device="cpu") * 2 - 1
    sizes = differences.point[part].abs().clamp(min=differences.mean)
    direction[part] = torch.where(differences.point[part].isfinite(), signs * sizes, 0.0)
    try:
        for words, other in _rearrangements(given[part].reshape(shape)):
            differences.gradient = given.clone()
            differences.gradient[part] = other.reshape(-1)
            found = differences.along(direction)
            if not search.is_wrong(found) and found.bar < _ALIKE * found.size:
                return words
    finally:
        differences.gradient = given
    return ""


def _rearrangements(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield words and the gradient put back."""
    shape = gradient.shape
    for i, j in itertools.combinations(range(len(shape)), 2):
        if 1 < shape[i] == shape[j]:
            yield f"transposed: dimensions {i} and {j}", gradient.transpose(i, j)
        elif min(shape[i], shape[j]) > 1:
            swapped = list(shape)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield (
                f"transposed: dimensions {i} and {j}, read in the other order",
                gradient.reshape(swapped).transpose(i, j),
            )
    for dim, length in enumerate(shape):
        if length > 1:
            yield f"reversed along dimension {dim}", gradient.flip(dim)
            for by in (1, -1):
                yield f"shifted by one along dimension {dim}", gradient.roll(by, dim)


def _not_added_up(search: Search, one: Finding, value: Tensor) -> str:
    """Return which of the outputs that an element reaches are forgotten, from the derivative of each."""
    differences, function = search.differences, search.differences.function
    assert one.index is not None
    at = sum(i * math.prod(value.shape[d + 1 :]) for d, i in enumerate(one.index))
    position = function.range_of(one.input).start + at
    step = torch.zeros_like(differences.point)
    step[position] = _STEP * max(abs(float(differences.point[position])), differences.mean)
    ends = function.rounded(torch.stack([differences.point + step, differences.point - step]))
    above, below = function.values_at(ends)
    taken = float(ends[0, position] - ends[1, position])
    if not taken:
        return ""
    terms = differences.cotangent * differences.usable_part(above - below) / taken
    analytical, right = float(differences.gradient[position]), float(terms.sum())
    reached = terms[terms != 0]
    if len(reached) < 2 or not math.isfinite(right):
        return ""

    def is_it(other: float) -> bool:
        return abs(other - analytical) <= _ALIKE * max(abs(other), abs(analytical)) > 0

    for layout, own in zip(function.outputs, terms.split(function.output_sizes), strict=True):
        rest = right - float(own.sum())
        for dim, length in enumerate(layout.shape if len(layout.shape) > 1 and not layout.dtype.is_complex else ()):
            slices = own.reshape(layout.shape).movedim(dim, 0).reshape(length, -1).sum(dim=1).tolist()
            if sum(map(bool, slices)) < 2:
                continue
            if is_it(right / length):
                return f"averaged over dimension {dim} of {layout.name}, not summed"
            for k, name in ((0, "first"), (length - 1, "last")):
                if is_it(rest + slices[k]):
                    return f"not summed over dimension {dim} of {layout.name}: only its {name} slice"
    for k, name in ((0, "first"), (-1, "last")):
        if is_it(float(reached[k])):
            return f"missing accumulation: only the {name} of {len(reached)} outputs that it reaches"
    return ""

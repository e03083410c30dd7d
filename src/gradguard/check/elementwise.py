"""Compare every element with its own numerical derivative; elements that affect disjoint outputs share a forward.

Changing a slice of an input shows which outputs the slice affects. Slices with disjoint outputs get the same colour.
Elements whose slices have the same colour in every dimension share their forwards. Each output that changes is credited
to the one element that affects it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.differences import STEPS, Differences, directions
from gradguard.check.direction_verdict import typical_size
from gradguard.check.flat_vectors import mean_size, numbers, zeros
from gradguard.check.gradient_report import GradientFinding

if TYPE_CHECKING:
    from gradguard.check.search import Search

_PROBES = (1e-3, 3e-2)
_MOST_EXAMINED = 2000
_LADDER = STEPS[:3]


@dataclass(frozen=True)
class Group:
    """Elements of the flat vector that share their forwards."""

    elements: Tensor
    owner: Tensor
    """The index in ``elements`` of the element that affects each output; ``len(elements)`` for none."""


@dataclass(frozen=True)
class _Colour:
    """Slices along one dimension whose outputs do not overlap."""

    slices: list[int]
    owner: Tensor
    """The slice that affects each output; -1 for none."""


def check_every_element(search: Search) -> None:
    """Compare every element with its own numerical derivative, and examine those that disagree."""
    differences = search.differences
    if not differences.has_noise:
        direction = next(directions(differences.function, search.generator))
        differences.measure_noise(direction, torch.ones_like(differences.usable))
    suspects = itertools.chain.from_iterable(_suspects(differences, one) for one in _groups(differences))
    for examined, position in enumerate(one for one in suspects if bool(search.open[one])):
        if len(search.findings) >= 5 or len(search.undecided) >= 5:
            return
        if examined >= _MOST_EXAMINED:
            message = f"more than {_MOST_EXAMINED:,} elements had to be examined one by one; the check stopped there"
            search.undecided.append(GradientFinding("undecided", message))
            return
        search.examine_element(position)
    search.has_every_element = True


def _suspects(differences: Differences, group: Group) -> list[int]:
    """Return the elements of a group that disagree; all of them if an output changed that none of them affects."""
    point, elements = differences.point, group.elements
    offsets = zeros(len(_LADDER), len(point))
    offsets[:, elements] = numbers(_LADDER)[:, None] * point[elements].abs().clamp(min=float(mean_size(point)))
    moved, changes = differences.central(offsets)
    noise = differences.cotangent.abs() * torch.where((changes != 0).any(dim=0), differences.noise, 0.0)
    rows = torch.cat([differences.cotangent * changes, noise[None]])
    credited = zeros(len(rows), len(elements) + 1).index_add_(1, group.owner, rows)
    if bool((rows[:, group.owner == len(elements)] != 0).any()):  # the probes missed an output: the colours are wrong
        return elements.tolist()
    taken, gradient = moved[:, elements], differences.gradient[elements]
    central = credited[:-1, :-1] / taken - gradient
    first, error = central[1:] + central.diff(dim=0) / 3
    bar = (error - first).abs() + 4 * credited[-1, :-1] / taken[-1].abs()
    size, typical = gradient.abs(), typical_size(differences)
    agrees = error.abs() <= 4 * bar + differences.relative * size.clamp(min=1e-6 * typical)
    return elements[~(agrees & (bar <= 1e-3 * size.clamp(min=typical)))].tolist()


def _groups(differences: Differences) -> Iterator[Group]:
    """Yield groups of elements of one input that have the same colour in every dimension."""
    start = 0
    for one, size in zip(differences.function.inputs, differences.function.sizes, strict=True):
        shape = (*one.value.shape, 2) if one.value.is_complex() else tuple(one.value.shape)
        places = torch.arange(start, start + size, device="cpu").reshape(shape)
        for colours in itertools.product(*(_coloured(differences, places, dim) for dim in range(places.dim()))):
            elements, owner = places, torch.full([differences.function.size], start, device="cpu")
            for dim, colour in enumerate(colours):
                elements = elements.index_select(dim, torch.tensor(colour.slices, device="cpu"))
                owner += colour.owner * places.stride(dim)
            elements = elements.reshape(-1)
            owned = torch.stack([colour.owner >= 0 for colour in colours]).all(dim=0) if colours else owner == start
            yield Group(elements, torch.where(owned, torch.searchsorted(elements, owner), len(elements)))
        start += size


def _coloured(differences: Differences, places: Tensor, dim: int) -> list[_Colour]:
    """Colour the slices along ``dim``: a slice affects the outputs that change when the slice changes."""
    colours: list[_Colour] = []
    for index in range(places.shape[dim]):
        positions = places.select(dim, index).reshape(-1)
        generator = torch.Generator().manual_seed(index)
        own = differences.point[positions].abs().clamp(min=float(mean_size(differences.point)))
        own *= 0.5 + torch.rand(len(positions), generator=generator, dtype=torch.float64, device="cpu")
        moved = [differences.point.index_add(0, positions, own, alpha=probe) for probe in _PROBES]
        changed = [differences.function.values(point) != differences.base for point in moved]
        reached = torch.stack(changed).any(dim=0) & ~differences.base.isnan()
        free = next((one for one in colours if not bool((reached & (one.owner >= 0)).any())), None)
        if free is None:
            colours.append(free := _Colour([], torch.full([len(reached)], -1, device="cpu")))
        free.slices.append(index)
        free.owner[reached] = index
    return colours

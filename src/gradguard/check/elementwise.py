"""The whole numerical gradient, element by element, many elements in one forward where their outputs do not overlap.

Which outputs a slice of an input reaches is found by changing the slice: slices whose outputs are disjoint share a colour,
elements of one colour in every dimension share their forwards, and each output that moves is credited to the one element
that reaches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.differences import STEPS, Differences
from gradguard.check.function import Function

if TYPE_CHECKING:
    from gradguard.check.search import Search

_PROBES = (1e-3, 3e-2)
_MOST_EXAMINED = 200
_LADDER = STEPS[:4]


@dataclass(frozen=True)
class Group:
    """Elements of the flat vector that share their forwards."""

    elements: Tensor
    owner: Tensor | None
    """For each output which of ``elements`` reaches it, -1 for none; None if there is one element."""


def check_every_element(search: Search) -> None:
    """Compare every element with its own numerical derivative; look closely at those that disagree."""
    examined = 0
    for suspects in _suspects(search):
        for position in suspects:
            if len(search.findings) >= 5 or examined >= _MOST_EXAMINED:
                return
            examined += 1
            search.examine_element(position)


def _suspects(search: Search) -> Iterator[list[int]]:
    differences = search.differences
    typical = differences.gradients.square().mean(dim=1).sqrt()[:, None]
    start = 0
    for one, size in zip(differences.function.inputs, differences.function.sizes, strict=True):
        shape = (*one.value.shape, 2) if one.value.is_complex() else tuple(one.value.shape)
        groups = _groups(differences, start, shape)
        singles = (Group(torch.tensor([start + i]), None) for i in range(size))
        for group in groups if groups is not None else singles:
            result = _compare(differences, group)
            if result is None:  # an output moved that nobody owns: the colours were wrong here
                for element in group.elements.tolist():
                    alone = _compare(differences, Group(torch.tensor([element]), None))
                    assert alone is not None
                    yield from _wrong(search, alone, typical, torch.tensor([element]))
                continue
            yield from _wrong(search, result, typical, group.elements)
        start += size


def _wrong(search: Search, result: tuple[Tensor, Tensor], typical: Tensor, elements: Tensor) -> Iterator[list[int]]:
    error, bar = result
    gradients = search.differences.gradients[:, elements].abs()
    allowed = 4 * bar + search.differences.relative * torch.maximum(gradients, 1e-2 * typical)
    bad = ((error.abs() > allowed) | (bar > 1e-3 * torch.maximum(gradients, typical))).any(dim=0)
    bad &= search.open[elements] > 0
    if bool(bad.any()):
        yield elements[bad].tolist()


def _compare(differences: Differences, group: Group) -> tuple[Tensor, Tensor] | None:
    """Return disagreement and bar for each element of the group, for each cotangent."""
    elements, function = group.elements, differences.function
    size = differences.point[elements].abs()
    size = torch.maximum(size, differences.point.abs().mean().clamp(min=1e-300))
    limits, previous, rounding = [], None, torch.zeros(())
    for step in _LADDER:
        offset = torch.zeros_like(differences.point)
        offset[elements] = step * size
        above = function.join(function.split(differences.point + offset))
        below = function.join(function.split(differences.point - offset))
        change = torch.where(differences.usable, function.values(above) - function.values(below), 0.0)
        taken = (above - below)[elements]
        credit = _credited(differences.cotangents * change, group)
        if credit is None:
            return None
        central = credit / taken - differences.gradients[:, elements]
        noise = torch.where(change != 0, differences.noise, 0.0) * differences.cotangents.abs()
        owned = _credited(noise, group)
        rounding = torch.zeros_like(central) if owned is None else 2 * owned / taken.abs()
        if previous is not None:
            limits.append((4 * central - previous) / 3)
        previous = central
    stacked = torch.stack(limits)
    changes = (stacked[1:] - stacked[:-1]).abs()
    bars = torch.maximum(changes[0], changes[1]) + 2 * rounding
    bars = torch.where(stacked.isfinite().all(dim=0), bars, torch.inf)
    return stacked[-1].nan_to_num(), bars


def _credited(values: Tensor, group: Group) -> Tensor | None:
    """Return the sum over the outputs of each element, None if a changed output belongs to nobody."""
    if group.owner is None:
        return values.sum(dim=1, keepdim=True)
    nobody = group.owner < 0
    if bool((values[:, nobody] != 0).any()):
        return None
    sums = torch.zeros(len(values), len(group.elements), dtype=values.dtype)
    return sums.index_add_(1, group.owner[~nobody], values[:, ~nobody])


def _groups(differences: Differences, start: int, shape: tuple[int, ...]) -> Iterator[Group] | None:
    """Return the groups of one input, None if no two elements can share a forward."""
    colourings = [_colours(differences, start, shape, dim) for dim in range(len(shape))]
    if all(colouring is None for colouring in colourings):
        return None
    return _combined(start, shape, colourings, differences.function)


def _combined(
    start: int, shape: tuple[int, ...], colourings: list[tuple[Tensor, Tensor] | None], function: Function
) -> Iterator[Group]:
    """Yield a group for each tuple of colours."""
    counts = [length if c is None else int(c[0].max()) + 1 for length, c in zip(shape, colourings, strict=True)]
    for chosen in itertools.product(*map(range, counts)):
        members, owner, stride = torch.zeros(1, dtype=torch.long), torch.zeros(function.size, dtype=torch.long), 1
        nobody = torch.zeros(function.size, dtype=torch.bool)
        for dim in reversed(range(len(shape))):
            colouring = colourings[dim]
            if colouring is None:
                within = torch.tensor([chosen[dim]])
                owner += chosen[dim] * stride
            else:
                within = (colouring[0] == chosen[dim]).nonzero().reshape(-1)
                owners = colouring[1][chosen[dim]]
                nobody |= owners < 0
                owner += owners.clamp(min=0) * stride
            members = (within[:, None] * stride + members[None, :]).reshape(-1)
            stride *= shape[dim]
        members = members.sort().values
        place = torch.searchsorted(members, owner).clamp(max=len(members) - 1)
        nobody |= members[place] != owner
        yield Group(start + members, torch.where(nobody, -1, place))


def _colours(differences: Differences, start: int, shape: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor] | None:
    """Return a colour for each slice along ``dim`` and, for each colour and output, the slice that reaches it."""
    length = shape[dim]
    if length < 4:
        return None
    reach: list[Tensor] = []
    for index in range(length):
        reach.append(_reach(differences, start, shape, dim, index))
        if index == 2 and bool((reach[0] & reach[1] & reach[2]).any()):
            return None
    colours, taken, owners = torch.zeros(length, dtype=torch.long), [], []
    for index, reached in enumerate(reach):
        colour = next((c for c, used in enumerate(taken) if not bool((used & reached).any())), len(taken))
        if colour == len(taken):
            taken.append(torch.zeros_like(reached))
            owners.append(torch.full(reached.shape, -1))
        taken[colour] |= reached
        owners[colour][reached] = index
        colours[index] = colour
    return None if len(taken) == length else (colours, torch.stack(owners))


def _reach(differences: Differences, start: int, shape: tuple[int, ...], dim: int, index: int) -> Tensor:
    """Return which outputs change when a slice does: by random amounts, of two sizes."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.select(dim, index).fill_(True)
    positions = start + mask.reshape(-1).nonzero().reshape(-1)
    changed = torch.zeros(differences.function.size, dtype=torch.bool)
    for probe in _PROBES:
        offset = torch.zeros_like(differences.point)
        size = differences.point[positions].abs().clamp(min=float(differences.point.abs().mean()))
        draws = 0.5 + torch.rand(len(positions), generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        offset[positions] = probe * size * draws
        values = differences.function.values(differences.point + offset)
        changed |= (values != differences.base) & ~(values.isnan() & differences.base.isnan())
    return changed

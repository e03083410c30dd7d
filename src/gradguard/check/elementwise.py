"""The whole numerical gradient, element by element, many elements in one forward where their outputs do not overlap.

Which outputs a slice of an input reaches is found by changing the slice: slices whose outputs are disjoint share a
colour, elements of one colour in every dimension share their forwards, and each output that moves is credited to the
one element that reaches it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.differences import STEPS, Differences, directions
from gradguard.check.flat_vectors import norm, numbers, zeros
from gradguard.check.function import Function
from gradguard.check.gradient_report import Finding

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
    """For each output which of ``elements`` reaches it, their number for none."""


def check_every_element(search: Search) -> None:
    """Compare every element with its own numerical derivative; look closely at those that disagree."""
    differences = search.differences
    if not differences.has_noise:
        direction = next(directions(differences.function, search.generator))
        differences.measure_noise(direction, torch.ones_like(differences.usable))
    for examined, position in enumerate(_suspects(search)):
        if len(search.findings) >= 5 or len(search.undecided) >= 5:
            return
        if examined >= _MOST_EXAMINED:
            message = f"more than {_MOST_EXAMINED:,} elements need a close look, which is where the check stops"
            search.undecided.append(Finding("undecided", message))
            return
        search.examine_element(position)
    search.has_every_element = True


def _suspects(search: Search) -> Iterator[int]:
    typical = norm(search.differences.gradient) / max(1, len(search.differences.point)) ** 0.5
    for group in _all_groups(search.differences):
        alone = (Group(element, torch.zeros_like(group.owner)) for element in group.elements.split(1))
        found = _compare(search.differences, group)
        # where an output moved that nobody owns, the colours are wrong
        for one in [group] if found is not None else alone:
            result = found or _compare(search.differences, one)
            assert result is not None
            error, bar = result
            gradient = search.differences.gradient[one.elements].abs()
            allowed = 4 * bar + search.differences.relative * gradient.clamp(min=1e-6 * typical)
            bad = (error.abs() > allowed) | (bar > 1e-3 * gradient.clamp(min=typical))
            yield from one.elements[bad & search.open[one.elements]].tolist()


def _all_groups(differences: Differences) -> Iterator[Group]:
    start = 0
    for one, size in zip(differences.function.inputs, differences.function.sizes, strict=True):
        shape = (*one.value.shape, 2) if one.value.is_complex() else tuple(one.value.shape)
        colourings = [_colours(differences, start, shape, dim) for dim in range(len(shape))]
        yield from _combined(start, shape, colourings, differences.function)
        start += size


def _compare(differences: Differences, group: Group) -> tuple[Tensor, Tensor] | None:
    """Return disagreement and bar for the elements of a group, None if an output moved that belongs to none of them."""
    point = differences.point
    offsets = zeros(len(_LADDER), len(point))
    sizes = point[group.elements].abs().clamp(min=differences.mean)
    offsets[:, group.elements] = numbers(_LADDER)[:, None] * sizes
    moved, changes = differences.central(offsets)
    taken = moved[:, group.elements]
    noise = differences.cotangent.abs() * torch.where((changes != 0).any(dim=0), differences.noise, 0.0)
    rows = [_credited(row, group) for row in (*(differences.cotangent * changes).unbind(), noise)]
    credits = [row for row in rows if row is not None]
    if len(credits) < len(rows):
        return None
    noise = credits.pop()
    central = torch.stack(credits) / taken - differences.gradient[group.elements]
    first, second = central[1:] + (central[1:] - central[:-1]) / 3
    bars = (second - first).abs() + 4 * noise / taken[-1].abs()
    return second.nan_to_num(), torch.where(first.isfinite() & second.isfinite(), bars, torch.inf)


def _credited(values: Tensor, group: Group) -> Tensor | None:
    """Return the sum over the outputs of each element, None if a changed output belongs to nobody."""
    count = len(group.elements)
    is_nobodys = bool((values[group.owner == count] != 0).any())
    return None if is_nobodys else torch.bincount(group.owner, values, count + 1)[:count]


def _combined(
    start: int, shape: tuple[int, ...], colourings: list[tuple[Tensor, Tensor] | None], function: Function
) -> Iterator[Group]:
    """Yield a group for each tuple of colours."""
    counts = [length if c is None else int(c[0].max()) + 1 for length, c in zip(shape, colourings, strict=True)]
    for chosen in itertools.product(*map(range, counts)):
        members, stride = torch.zeros(1, dtype=torch.long, device="cpu"), 1
        owner = torch.zeros(function.size, dtype=torch.long, device="cpu")
        nobody = torch.zeros(function.size, dtype=torch.bool, device="cpu")
        for dim in reversed(range(len(shape))):
            colouring = colourings[dim]
            if colouring is None:
                within = torch.tensor([chosen[dim]], device="cpu")
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
        yield Group(start + members, torch.where(nobody, len(members), place))


def _colours(differences: Differences, start: int, shape: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor] | None:
    """Return a colour for each slice along ``dim`` and, for each colour and output, the slice that reaches it."""
    length = shape[dim]
    if length < 4:
        return None
    apart = {index: _reach(differences, start, shape, dim, index) for index in (0, length // 2, length - 1)}
    if bool(torch.stack(list(apart.values())).all(dim=0).any()):  # slices far apart reach one output: it is dense
        return None
    reach = [apart[i] if i in apart else _reach(differences, start, shape, dim, i) for i in range(length)]
    colours, taken, owners = torch.zeros(length, dtype=torch.long, device="cpu"), [], []
    for index, reached in enumerate(reach):
        colour = next((c for c, used in enumerate(taken) if not bool((used & reached).any())), len(taken))
        if colour == len(taken):
            taken.append(torch.zeros_like(reached))
            owners.append(torch.full(reached.shape, -1, device="cpu"))
        taken[colour] |= reached
        owners[colour][reached] = index
        colours[index] = colour
    return None if len(taken) == length else (colours, torch.stack(owners))


def _reach(differences: Differences, start: int, shape: tuple[int, ...], dim: int, index: int) -> Tensor:
    """Return which outputs change when a slice does: by random amounts, of two sizes."""
    positions = (
        torch.arange(start, start + math.prod(shape), device="cpu").reshape(shape).select(dim, index).reshape(-1)
    )
    own = differences.point[positions].abs().clamp(min=differences.mean)
    own *= 0.5 + torch.rand(
        len(positions), generator=torch.Generator().manual_seed(index), dtype=torch.float64, device="cpu"
    )
    changed = torch.zeros(differences.function.size, dtype=torch.bool, device="cpu")
    for probe in _PROBES:
        values = differences.function.values(differences.point.index_add(0, positions, own, alpha=probe))
        changed |= values != differences.base
    return changed if differences.is_finite else changed & ~differences.base.isnan()

"""Guesses at the mistake that the wrong elements have in common."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.gradient_report import Finding, digits_apart
from gradguard.check.vectors import signs

if TYPE_CHECKING:
    from gradguard.check.search import Search

_LONGEST = 512
_MOST_SLICES = 64
_TILES = (1024, 512, 256, 128, 64, 32, 16, 8)
_NAMES = {0: "rows", 1: "columns"}


def with_guesses(search: Search, what: str) -> list[Finding]:
    """Return the findings of ``search``, each with a guess where one fits."""
    places: dict[str, str] = {}
    found = []
    for one in search.findings:
        if one.input and one.input not in places:
            alone = sum(other.input == one.input for other in search.findings) == 1
            place = _alone(search, one) if alone else _where(search, one)
            places[one.input] = place if one.kind == "mismatch" else ""
        said = ", ".join(part for part in (what, _ratio(one), places.get(one.input, "")) if part)
        found.append(replace(one, guess=said))
    return found


def _ratio(one: Finding) -> str:
    if one.kind != "mismatch" or one.analytical is None or not one.numerical or one.bar is None:
        return ""
    ratio, blur = one.analytical / one.numerical, 10 * one.bar / abs(one.numerical)
    if one.analytical == 0:
        return "zero"
    if abs(ratio + 1) <= max(blur, 1e-6):
        return "sign"
    return (
        f"ratio {ratio:#.{digits_apart(ratio, 1.0, 5 if abs(ratio) >= 1 else 4)}g}"
        if blur < 1e-2 and 1e-3 < abs(ratio) < 1e4
        else ""
    )


def _alone(search: Search, one: Finding) -> str:
    elements = len(search.differences.function.ranges[one.input])
    return f"only 1 of {elements} elements" if elements > 1 else ""


def _where(search: Search, one: Finding) -> str:
    """Return which rows, columns or signs are wrong, if not all are."""
    differences = search.differences
    own = differences.function.ranges[one.input]
    value = next(i.value for i in differences.function.inputs if i.name == one.input)
    if value.is_complex() or value.numel() < 2:
        return ""
    point = differences.point[own.start : own.stop]
    sizes = torch.where(point == 0, 1.0, point.abs()) * signs(point.shape, search.generator)

    def is_wrong(mask: Tensor) -> bool:
        direction = torch.zeros_like(differences.point)
        direction[own.start : own.stop] = torch.where(mask.reshape(-1), sizes, 0.0)
        return search.is_wrong(differences.along(direction))

    flat = point.reshape(value.shape)
    for words, mask in (("x < 0", flat < 0), ("x > 0", flat > 0)):
        if bool(mask.any()) and bool((~mask).any()) and not is_wrong(~mask):
            return f"only where {words}"
    for dim, length in enumerate(value.shape):
        if not 1 < length <= _LONGEST:
            continue
        bad = _bad_slices(value.shape, dim, is_wrong)
        if bad and len(bad) < length:
            name = _NAMES.get(dim, f"slices of dimension {dim}") if value.dim() == 2 else f"slices of dimension {dim}"
            name = "elements" if value.dim() == 1 else name
            return _described(bad, length, name)
    return ""


def _bad_slices(shape: torch.Size, dim: int, is_wrong: object) -> list[int]:
    level, bad = [torch.arange(shape[dim], device="cpu")], []
    while level:
        following = []
        for half in (half for one in level for half in one.tensor_split(2) if half.numel()):
            mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
            mask.index_fill_(dim, half, True)
            if is_wrong(mask):  # type: ignore[operator]
                (bad if half.numel() == 1 else following).append(half)
        if len(following) > _MOST_SLICES:
            return []
        level = following
    return sorted(map(int, bad))


def _described(bad: list[int], length: int, name: str) -> str:
    count = len(bad)
    if bad == list(range(length - count, length)):
        tile = next((tile for tile in _TILES if count < tile < length and length % tile == count), 0)
        left = f", what tiles of {tile} leave over" if tile else ""
        return f"only the last {count} of {length} {name}{left}"
    if bad == list(range(count)):
        return f"only the first {count} of {length} {name}"
    if count == 1:
        return f"only 1 of {length} {name}"
    if len(strides := {b - a for a, b in pairwise(bad)}) == 1 and (stride := strides.pop()) > 1:
        ordinal = {2: "2nd", 3: "3rd"}.get(stride, f"{stride}th")
        return f"only every {ordinal} of {length} {name}"
    return f"only {count} of {length} {name}"

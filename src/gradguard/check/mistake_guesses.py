"""Guess the mistake that the wrong elements have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguard.check.flat_vectors import signs
from gradguard.check.gradient_report import GradientFinding, digits_apart

if TYPE_CHECKING:
    from gradguard.check.search import Search

_LONGEST = 512
_MOST_SLICES = 64


def with_guesses(search: Search, what: str) -> list[GradientFinding]:
    """Return the findings of ``search`` with a guess added where one fits; ``what`` is a prefix of each guess."""
    named = [one.input for one in search.findings]
    wrong = dict.fromkeys(one.input for one in search.findings if one.kind == "mismatch" and one.input)
    places = {name: _where(search, name, named.count(name) == 1) for name in wrong}
    guesses = [", ".join(filter(None, (what, _ratio(one), places.get(one.input, "")))) for one in search.findings]
    return [replace(one, guess=guess) for one, guess in zip(search.findings, guesses, strict=True)]


def _ratio(one: GradientFinding) -> str:
    if one.kind != "mismatch" or one.analytical is None or not one.numerical or one.bar is None:
        return ""
    ratio, blur = one.analytical / one.numerical, 10 * one.bar / abs(one.numerical)
    if one.analytical == 0:
        return "zero"
    if abs(ratio + 1) <= max(blur, 1e-6):
        return "sign"
    if blur >= 1e-2 or not 1e-3 < abs(ratio) < 1e4:
        return ""
    return f"ratio {ratio:#.{digits_apart(ratio, 1.0, 5 if abs(ratio) >= 1 else 4)}g}"


def _where(search: Search, name: str, is_alone: bool) -> str:
    """Return a description of the wrong elements, rows, columns or signs of an input; empty if all are wrong."""
    differences = search.differences
    own = differences.function.ranges[name]
    value = next(one.value for one in differences.function.inputs if one.name == name)
    point = differences.point[own]
    if is_alone:
        return f"only 1 of {len(point)} elements" if len(point) > 1 else ""
    if value.is_complex():
        return ""
    sizes = torch.where(point == 0, 1.0, point.abs()) * signs(point.shape, search.generator)

    def is_wrong(mask: Tensor) -> bool:
        direction = torch.zeros_like(differences.point)
        direction[own] = torch.where(mask.reshape(-1), sizes, 0.0)
        return differences.along(direction).is_wrong

    flat = point.reshape(value.shape)
    for words, mask in (("x < 0", flat < 0), ("x > 0", flat > 0)):
        if bool(mask.any()) and bool((~mask).any()) and not is_wrong(~mask):
            return f"only where {words}"
    names = {1: ["elements"], 2: ["rows", "columns"]}.get(value.dim())
    for dim, length in enumerate(value.shape):
        bad = _bad_slices(value.shape, dim, is_wrong) if 1 < length <= _LONGEST else []
        if 0 < len(bad) < length:
            return _described(bad, length, names[dim] if names else f"slices of dimension {dim}")
    return ""


def _bad_slices(shape: torch.Size, dim: int, is_wrong: Callable[[Tensor], bool]) -> list[int]:
    level, bad = [torch.arange(shape[dim], device="cpu")], []
    while level:
        following = []
        for half in (half for one in level for half in one.tensor_split(2) if half.numel()):
            mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
            mask.index_fill_(dim, half, True)
            if is_wrong(mask):
                (bad if half.numel() == 1 else following).append(half)
        if len(following) > _MOST_SLICES:
            return []
        level = following
    return sorted(map(int, bad))


def _described(bad: list[int], length: int, name: str) -> str:
    count = len(bad)
    ends = {"the last ": list(range(length - count, length)), "the first ": list(range(count))}
    where = next((words for words, places in ends.items() if bad == places), "")
    return f"only {where}{count} of {length} {name}"

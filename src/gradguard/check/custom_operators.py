"""Operators of `torch.library`: what `torch.library.opcheck` says of them, which looks at all but the gradient."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gradguard.check.function import is_differentiable
from gradguard.check.report import Finding
from gradguard.torch_private import custom_operator_name, tree_map

_MISSING = "no fake impl"


def registration_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Finding], list[Finding]]:
    """Return what is wrong with the registration of a custom operator, and what is worth knowing.

    Without a fake implementation an operator cannot be compiled, and works otherwise: a note.
    """
    name = custom_operator_name(fn)
    if name is None:
        return [], []
    leaf = lambda v: v.detach().clone().requires_grad_() if is_differentiable(v) else v  # noqa: E731
    args, kwargs = tree_map(leaf, args), tree_map(leaf, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = torch.library.opcheck(fn, args, kwargs, raise_exception=False)
    failed = {test: str(result).splitlines()[0] for test, result in results.items() if result != "SUCCESS"}
    if any(_MISSING in said for said in failed.values()):
        note = Finding("operator", f"{name} has no fake implementation: torch.compile cannot trace it")
        return [], [note]
    return [Finding("operator", f"torch.library.opcheck, {test}: {said}") for test, said in failed.items()], []

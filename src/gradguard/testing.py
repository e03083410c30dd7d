"""Assertions for test suites: they raise, and never return a truth value that a test could drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradguard.check.gradcheck import gradcheck
from gradguard.check.report import GradientReport
from gradguard.errors import GradientCheckError

__all__ = ["assert_grad"]


def assert_grad(
    fn: Callable[..., Any], *inputs: Any, allow_inconclusive: bool = False, **options: Any
) -> GradientReport:
    """Raise unless the backward of ``fn`` is its derivative, as `gradguard.gradcheck` finds it.

    The error is an ``AssertionError`` whose message is the report: what is wrong, at which element, and both values.

    **Edge cases.** A check that could not tell raises too, unless ``allow_inconclusive=True``: a test that saw nothing
    should not be green. Notes, such as a kink at the point, never raise.

    Args:
        fn: A function or a module.
        *inputs: Its inputs, as for `gradguard.gradcheck`.
        allow_inconclusive: Accept the verdict ``"INCONCLUSIVE"``.
        **options: Options of `gradguard.gradcheck`, such as ``kwargs=``, ``inputs_to_check=`` or ``exhaustive=True``.

    Returns:
        The report of the check.

    Raises:
        GradientCheckError: If the gradient is wrong, or nobody can tell.

    Example:
        >>> import torch
        >>> from gradguard.testing import assert_grad
        >>> assert_grad(torch.nn.Linear(3, 2), torch.ones(4, 3)).verdict
        'PASS'

    Reference:
        PaddlePaddle, Auto Gradient Check Design, 2017.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not this function with all of its docstring
    report = gradcheck(fn, *inputs, **options)
    accepted = ("PASS", "INCONCLUSIVE") if allow_inconclusive else ("PASS",)
    if report.verdict not in accepted:
        raise GradientCheckError(str(report))
    return report

"""Assertions for test suites: they raise, and never return a truth value that a test could drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradguard.check.gradcheck import gradcheck
from gradguard.check.gradient_report import GradientReport
from gradguard.errors import GradientCheckError, ParityError
from gradguard.parity.compare import Run, compare
from gradguard.parity.parity_report import ParityReport

__all__ = ["assert_grad", "assert_parity"]


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
        GradientCheckError: If the gradient is wrong, or the check is inconclusive.

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


def assert_parity(reference: Run, new: Run, *, allow_inconclusive: bool = False) -> ParityReport:
    r"""Raise unless two runs have the same gradients, apart from what rounding does to each.

    A parameter's gradients :math:`r` and :math:`c` are equal if :math:`\lVert c - r \rVert \le 3 b`, where the bar
    :math:`b` is what runs that differ by rounding alone differ by, as `gradguard.save_gradients` has measured it in
    both set-ups. There is no tolerance to choose.

    **Edge cases.** An inconclusive comparison raises too, unless ``allow_inconclusive=True``: other weights, other
    dropout masks, and gradients of which nothing is known.

    | gradient of a parameter | counts as |
    |---|---|
    | within :math:`3 b`, and half of it would have been an error that shows | equal |
    | zero in both runs, in neither run, or :math:`b` is a sixth of it or more | nothing is known of it |
    | anything else | an error |

    Nothing known of half of the parameters or more: INCONCLUSIVE. Of fewer: PASS, and a note names them.

    Args:
        reference: The result of `gradguard.save_gradients`, or the file that it has written, in the set-up that is
            trusted.
        new: The result or file of the other set-up.
        allow_inconclusive: Accept the verdict ``"INCONCLUSIVE"``.

    Returns:
        The report of the comparison.

    Raises:
        ParityError: If a gradient is another, or the comparison is inconclusive.
        RecordError: If a file cannot be read, or the two cannot be compared.

    Example:
        >>> import torch, gradguard as gg
        >>> from gradguard.testing import assert_parity
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> whole = gg.save_gradients(None, model, lambda: model(x).square().mean().backward())
        >>> halves = lambda: [(model(half).square().mean() / 2).backward() for half in x.split(2)]
        >>> assert_parity(whole, gg.save_gradients(None, model, halves)).verdict
        'PASS'
    """
    __tracebackhide__ = True
    report = compare(reference, new)
    accepted = ("PASS", "INCONCLUSIVE") if allow_inconclusive else ("PASS",)
    if report.verdict not in accepted:
        raise ParityError(str(report))
    return report

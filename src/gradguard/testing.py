"""Assertions for test suites: they raise instead of returning a bool that a test could ignore."""

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
    """Raise unless the backward of ``fn`` is its derivative, as judged by `gradguard.gradcheck`.

    The error is an ``AssertionError``. Its message is the report: the fault, the element, and both values there.

    **Edge cases.** An inconclusive check raises too, unless ``allow_inconclusive=True``: a test that could not judge
    the gradient should not pass. Notes, such as a kink at the point, never raise.

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
    __tracebackhide__ = True  # pytest then shows the line of the test, not this function and its long docstring
    report = gradcheck(fn, *inputs, **options)
    accepted = ("PASS", "INCONCLUSIVE") if allow_inconclusive else ("PASS",)
    if report.verdict not in accepted:
        raise GradientCheckError(str(report))
    return report


def assert_parity(reference: Run, new: Run, *, allow_inconclusive: bool = False) -> ParityReport:
    r"""Raise unless two runs have the same gradients, up to the rounding of each run.

    A parameter's gradients :math:`r` and :math:`c` are equal if :math:`\lVert c - r \rVert \le 3 b`. The bar :math:`b`
    is the difference between runs that differ by rounding alone; `gradguard.save_gradients` has measured it in both
    set-ups. There is no tolerance to choose.

    **Edge cases.** An inconclusive comparison raises too, unless ``allow_inconclusive=True``. It is inconclusive with
    other weights, with other dropout masks, or if too little is known of the gradients, as below.

    | gradient of a parameter | counts as |
    |---|---|
    | within :math:`3 b`, and half of it would have been an error that shows | equal |
    | zero in both runs, in neither run, or :math:`b` is a sixth of it or more | unknown |
    | anything else | an error |

    If half of the parameters or more are unknown, the verdict is INCONCLUSIVE. If fewer are, the verdict is PASS and a
    note names them.

    Args:
        reference: The result of `gradguard.save_gradients`, or the file that it wrote, in the trusted set-up.
        new: The result or file of the other set-up.
        allow_inconclusive: Accept the verdict ``"INCONCLUSIVE"``.

    Returns:
        The report of the comparison.

    Raises:
        ParityError: If a gradient differs, or the comparison is inconclusive.
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

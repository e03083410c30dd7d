"""Compare the derivative in forward mode (``jvp``) with the numerical derivative of the function."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradguard.check.differences import Differences, Disagreement
from gradguard.check.flat_vectors import element_of, joined
from gradguard.check.gradient_report import GradientFinding

ForwardMode = Literal["agrees", "wrong", "not defined", "not checked"]

_STEP, _LOW_STEP = 1e-5, 1e-2
_FEW_LETTERS = 160


def check_forward_mode(
    differences: Differences, direction: Tensor, known: Disagreement
) -> tuple[ForwardMode, list[GradientFinding]]:
    r"""Compare :math:`v \cdot (J u)` in forward mode with the numerical derivative along the same direction.

    Args:
        differences: The function, its point, the cotangent v and its gradient g.
        direction: The direction u, along which the function is smooth.
        known: The difference between the numerical derivative and g · u.

    Returns:
        The result for the ``jvp``, and a finding that describes the fault or the reason for not checking.
    """
    function = differences.function
    tangents = function.split(direction)
    primals = [one.detach() for one in function.leaves()]
    try:
        with warnings.catch_warnings(), forward_ad.dual_level():
            warnings.simplefilter("ignore")  # some of PyTorch's own formulas raise PyTorch's deprecation warnings
            duals = [forward_ad.make_dual(one, t) for one, t in zip(primals, tangents, strict=True)]
            outputs = [forward_ad.unpack_dual(one) for one in function.call(duals)]
            pairs = list(zip(outputs, function.outputs, strict=True))
            if any(o.tangent is None and own.has_graph for o, own in pairs):  # the forward dropped the tangent silently
                return "not defined", []
            parts = [torch.zeros_like(o.primal) if o.tangent is None else o.tangent for o in outputs]
            found = joined([part.resolve_neg() for part in parts])
    except NotImplementedError:
        return "not defined", []
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:_FEW_LETTERS]
        return "not checked", [GradientFinding("forward mode", f"not checked, it raises {said}")]
    moves = torch.where(differences.usable & found.isfinite(), found, 0.0)
    off = float(differences.cotangent @ moves - differences.gradient @ direction) - known.error
    if abs(off) <= 2 * known.allowed:
        return "agrees", []
    if not bool(found.isfinite().all()):
        return "not checked", [GradientFinding("forward mode", "not checked, the jvp is not finite at this point")]
    # Name the output element whose derivative is furthest from the numerical one.
    step = _LOW_STEP if differences.is_low else _STEP
    _, change = differences.central(step * direction[None])
    numerical = change[0] / (2 * step) * function.with_graph()
    position = int((moves * function.with_graph() - numerical).abs().nan_to_num(torch.inf).argmax())
    message = "the jvp along a random direction differs from the numerical derivative"
    place = element_of(function.outputs, position)
    return "wrong", [
        GradientFinding("forward mode", message, *place, float(moves[position]), float(numerical[position]))
    ]

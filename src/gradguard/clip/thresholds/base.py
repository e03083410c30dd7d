"""What rules for one threshold on the global norm have in common."""

from abc import abstractmethod

import torch
from torch import Tensor

from gradguard.arguments import check_order
from gradguard.clip.clipper import Decision, describe, global_norm
from gradguard.clip.gradients import Gradients
from gradguard.clip.thresholds.state import StatefulClipper


class ThresholdClipper(StatefulClipper):
    r"""A rule that chooses a threshold c for the norm n of all gradients; base class for one's own.

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{c}{n}\Bigr)

    A rule of your own writes `choose`, and hands what it remembers to ``super().__init__`` as tensors.

    **Guarantees.** Everything is decided on the gradients' device, and the host never waits. Non-finite norms never
    enter the state, nor does a norm of 0, which tells nothing of the scale; ``strict_paper=True`` of a published rule
    lets them in, as its paper does. The clip binds (``result.clipped``) exactly where n > c, and then the norm after
    it is c: there is no :math:`10^{-6}` beside n, which would clip everything when norms are that small.
    ``result.locked_in`` (`LockIn`) tells that the clip bound on more than half of the last 100 steps at one
    threshold, where thresholds within 1 % of each other are one: then the rule no longer follows the run.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    no gradients                      norm 0, coefficient 1; the state stays
    zero norm                         coefficient 1; the threshold's state stays
    NaN or inf among the gradients    as ``nonfinite`` says; only the counters change
    no threshold yet                  ``result.threshold`` is inf, and nothing is written
    ================================  ==========================================================================

    Args:
        norm_type: Order of the norm, above 0 or infinite.
        state: What the rule remembers, by name.

    Raises:
        InvalidValueError: If ``norm_type`` is not above 0.

    Example:
        >>> import torch
        >>> class HoldToLast(ThresholdClipper):
        ...     def __init__(self):
        ...         super().__init__(last=torch.tensor(torch.inf, dtype=torch.float64))
        ...     def choose(self, norm, enters):
        ...         threshold = self.state["last"].clone()
        ...         self.state["last"].copy_(torch.where(enters, norm, threshold))
        ...         return threshold
        >>> p, clipper = torch.nn.Parameter(torch.zeros(2)), HoldToLast()
        >>> for size in (1.0, 4.0):
        ...     p.grad = torch.tensor([size, 0.0])
        ...     float(clipper([p]).coefficient)
        1.0
        0.25
    """

    strict_paper = False
    needs_tensor_norms = False

    def __init__(self, norm_type: float = 2.0, **state: Tensor) -> None:
        super().__init__(**state)
        self.norm_type = check_order(norm_type)

    @abstractmethod
    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return the threshold of this step, 0-dim, infinite for none, and let the state follow in place.

        Args:
            norm: The norm of all gradients, 0-dim float64 (float32 on MPS).
            enters: Whether it may enter the state, 0-dim bool: decide with `torch.where`, not with ``if``.
        """

    def coefficient(self, norm: Tensor, threshold: Tensor) -> Tensor:
        """Return what gradients of ``norm`` are multiplied by."""
        # NaN fails both tests, so that it spreads, as PyTorch's does.
        return torch.where((norm <= threshold) | threshold.isposinf(), 1.0, threshold / norm)

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, choose, and let the state follow; write to no gradient."""
        norms = global_norm(found, scale, self.norm_type)
        norm = norms.value
        if not found.gradients:
            one = torch.ones_like(norm)
            return Decision(found, describe(found, norms, one, one < 1, order=self.norm_type), one)
        self._follow(norm.device)
        finite = norm.isfinite()
        enters = torch.ones_like(finite) if self.strict_paper else finite & (norm > 0)
        threshold = self.choose(norm, enters)
        coefficient = self.coefficient(norm, threshold)
        clipped = coefficient < 1
        locked_in = self.lock_in.follow(clipped, threshold, finite)
        self._count(clipped, ~finite)
        found_out = {"order": self.norm_type, "threshold": threshold, "locked_in": locked_in}
        return Decision(found, describe(found, norms, coefficient, clipped, **found_out), coefficient)

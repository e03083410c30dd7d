"""AdaGC: bound each tensor's gradient by a moving average of its own norm."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.clip.clipper import Decision, describe
from gradguard.clip.gradients import Gradients, measured, norms_of, total_of
from gradguard.clip.thresholds.threshold_rule import StatefulClipper, counter, empty_history
from gradguard.distributed.wrappers import refuse_flat_parameters
from gradguard.errors import InvalidValueError
from gradguard.tensors.layout import move
from gradguard.tensors.number_operations import TENSORS
from gradguard.tensors.units import scale_each_
from gradguard.threshold_formulas import PerTensorRule

_EPSILON = 1e-8


class AdaGC(PerTensorRule, StatefulClipper):
    r"""Bound each tensor's gradient by a moving average :math:`\gamma_i` of its own norm.

    In the warm-up, step t < ``warmup``, all tensors are scaled together and each average is the smallest norm so far.
    Later each tensor is scaled separately:

    .. math:: h_i = \min\Bigl(1, \frac{\lambda_{abs}}{\lVert g \rVert}\Bigr), \quad
              \gamma_i \leftarrow \min(\gamma_i, \lVert h_i g_i \rVert) \qquad \text{then} \qquad
              h_i = \min\Bigl(1, \frac{\lambda_{rel} \gamma_i}{\lVert g_i \rVert}\Bigr), \quad
              \gamma_i \leftarrow \beta \gamma_i + (1 - \beta) \lVert h_i g_i \rVert

    and :math:`g_i \leftarrow h_i g_i`. The direction of the whole gradient changes. It clips most tensors on most
    steps: with log-normal noise of 0.15, 79 to 99 % of them. An average grows by at most
    :math:`(1 - \beta)(\lambda_{rel} - 1)`, 0.1 %, a step.

    Published constants differ: λ_rel and β are 1.05 and 0.98, 1.04 and 0.99, or 1.03 and 0.98 in three of them.

    **Guarantees.** Everything is decided on the gradients' device; the only host sync is for a tensor's first
    gradient. A step with NaN or inf in any tensor changes no average. A tensor's warm-up counts its own gradients,
    without those that are None or 0, so an expert that is idle in the first steps is not frozen.
    With ``strict_paper=True`` averages and factors are, on the CPU, to the last digit those of the published update.
    ``result.threshold`` is None: there is one for each tensor (`averages`). The alarm `LockIn` watches the 2-norm of
    all of them.

    **Edge cases.**

    ================================================================  ==================================================
    input                                                             result
    ================================================================  ==================================================
    no gradients                                                      norm 0, coefficient 1; the state is unchanged
    a tensor's gradient is 0                                          stays 0; its average is unchanged
    a new tensor in mid-run                                           starts its own warm-up
    tensors without names                                             identified by their positions in the list; an
                                                                      error if a position gets another tensor
    NaN or inf in a tensor                                            handled by ``nonfinite``; under ``"propagate"``
                                                                      the warm-up spreads NaN to all tensors, and later
                                                                      it stays in its own
    ``strict_paper=True``: 0 in the warm-up                           γ is 0, so that the tensor is frozen for good; 0
                                                                      again after the warm-up is 0/0, NaN
    ``strict_paper=True``: a tensor whose first gradient comes later  not specified by the paper; its average begins as
                                                                      its first norm
    ================================================================  ==================================================

    Args:
        absolute: λ_abs, above 0; ``float("inf")`` for none.
        relative: λ_rel, above 0.
        beta: β, from 0 to 1.
        warmup: T, at least 1. t counts from 1, so that the warm-up has T - 1 steps.
        strict_paper: Reproduce the published update, its failures included.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> import torch
        >>> p, clipper = torch.nn.Parameter(torch.zeros(1)), AdaGC(warmup=3)
        >>> for size in (0.5, 0.4, 2.0):
        ...     p.grad = torch.tensor([size])
        ...     result = clipper([("weight", p)])
        >>> p.grad.round(decimals=4)  # 1.05 times the smallest norm of the warm-up
        tensor([0.4200])
        >>> clipper.averages["weight"].round(decimals=4)
        tensor(0.4004, dtype=torch.float64)

    Reference:
        Wang et al. (2025), AdaGC: improving training stability for large language model pretraining,
        arXiv 2502.11034.
    """

    def __init__(
        self,
        absolute: float = 1.0,
        relative: float = 1.05,
        beta: float = 0.98,
        warmup: int = 100,
        strict_paper: bool = False,
    ) -> None:
        self.absolute = check_number("absolute", absolute, "a number > 0, or float('inf') for none")
        self.relative = check_number("relative", relative, "a finite number > 0")
        self.beta = check_number("beta", beta, "a number from 0 to 1")
        self.warmup, self.strict_paper = check_whole("warmup", warmup), strict_paper
        self.names: list[str] = []
        self._last: tuple[tuple[str, ...], Tensor] | None = None
        self._listed: dict[int, weakref.ref[Tensor]] = {}  # tensors without names, by position
        StatefulClipper.__init__(
            self, step=counter(), averages=empty_history(0), seen=torch.zeros(0, dtype=torch.int64, device="cpu")
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to one list of tensors."""
        return vars(self) | {"_listed": {}}

    @property
    def averages(self) -> dict[str, Tensor]:
        r"""Each tensor's :math:`\gamma`, 0-dim, by its name or position; infinite before its first norm."""
        return dict(zip(self.names, self.state["averages"].clone().unbind(), strict=True))

    def is_per_tensor(self) -> bool:
        """Tell whether gradients may arrive one at a time: only without ``absolute``, which needs the norm of all."""
        return math.isinf(self.absolute)

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, decide, and update the state; write to no gradient."""
        if grads.reduction is not None:
            refuse_flat_parameters(grads.parameters, "AdaGC")
        if grads.names is None:
            self._refuse_others(grads)
        grads = measured(grads)
        norms = norms_of(grads, scale)
        norm = total_of(norms)
        if not grads.gradients:
            one = torch.ones_like(norm)
            return Decision(grads, describe(grads, norms, one, one < 1), one)
        self._follow(norm.device)
        places = self._places_of(grads.plain_names())
        factors = self._follow_norms(places, norms, norm, grads.there)
        clipped = (factors < 1).any()
        # If nothing is clipped the coefficient is 1 (not 0/0); a NaN norm makes it NaN.
        after = torch.where(clipped | norm.isnan(), total_of(factors * norms) / norm, 1.0)
        averages = self.state["averages"][places]
        if grads.there is not None:  # ignore the average of a tensor that has no gradient on any rank
            averages = torch.where(move(grads.there, averages.device), averages, 0.0)
        locked_in = self.lock_in.follow(clipped, total_of(averages), norm.isfinite())
        self._count(clipped, ~norm.isfinite())
        result = describe(grads, norms, after, clipped, locked_in=locked_in)
        return Decision(grads, result, None, lambda: scale_each_(grads.gradients, factors))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, with the names of the tensors."""
        return {**super().state_dict(), "names": list(self.names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; training continues as if it had not been interrupted.

        Raises:
            InvalidValueError: If it is not the state of an `AdaGC`.
        """
        names = state_dict.get("names")
        if not isinstance(names, list):
            raise InvalidValueError(
                f"the state is not of an AdaGC: it has {sorted(state_dict)}, expected names and as many averages."
            )
        self._take(state_dict, averages=len(names), seen=len(names))
        self.names, self._last, self._listed = list(names), None, {}

    def _follow_norms(self, places: Tensor, norms: Tensor, norm: Tensor, there: Tensor | None) -> Tensor:
        """Return the factor of each gradient, and update its average."""
        averages, seen = self.state["averages"][places], self.state["seen"][places]
        self.state["step"].add_(1)
        absolute = torch.full_like(norm, self.absolute)  # a Python number over a tensor would be rounded twice
        if self.strict_paper:
            warm, enters = (self.state["step"] < self.warmup).expand_as(norms), torch.ones_like(norms, dtype=torch.bool)
            own = self.relative * averages / norms
            factors = torch.where(warm, absolute / (norm + _EPSILON), own).clamp(max=1.0)
        else:
            warm, enters = seen + 1 < self.warmup, norm.isfinite() & (norms > 0)
            together = torch.ones_like(norm) if math.isinf(self.absolute) else absolute / norm
            factors = self.factor(TENSORS, norms, averages, warm, together)
        if there is not None:
            enters = enters & move(there, enters.device)
        moved = self.next_average(TENSORS, factors * norms, averages, seen, warm)
        self.state["averages"].index_copy_(0, places, torch.where(enters, moved, averages))
        self.state["seen"].index_add_(0, places, enters.long())
        return factors

    def _places_of(self, names: Sequence[str]) -> Tensor:
        """Return the positions of these names in the state: on the device, and the same tensor at every step."""
        names, device = tuple(names), self.state["averages"].device
        if self._last is None or self._last[0] != names or self._last[1].device != device:
            known = set(self.names)
            if new := [name for name in names if name not in known]:  # make room for them
                self.names += new
                with torch.inference_mode(False):  # later steps, in whatever mode, write to this memory
                    averages, seen = self.state["averages"], self.state["seen"]
                    more = empty_history(len(new)).to(averages)
                    self.state["averages"] = torch.cat([averages, more])
                    self.state["seen"] = torch.cat([seen, torch.zeros_like(more, dtype=seen.dtype)])
            place = {name: i for i, name in enumerate(self.names)}
            places = torch.tensor([place[name] for name in names], device="cpu")
            self._last = names, places.to(device)
        return self._last[1]

    def _refuse_others(self, grads: Gradients) -> None:
        """Raise if a position gets another tensor without a name: averages are stored by position in the list.

        Raises:
            InvalidValueError: If a position does.
        """
        for place, parameter in zip(grads.positions, grads.parameters, strict=True):
            known = self._listed.get(place, lambda: None)()  # None also for a tensor that no longer exists
            if known is None:
                self._listed[place] = weakref.ref(parameter)
            elif known is not parameter:
                raise InvalidValueError(
                    f"parameter {place} (shape {tuple(parameter.shape)}) is another one than in earlier calls: AdaGC "
                    "identifies tensors without names by their positions in the list. Pass the model or "
                    "model.named_parameters()."
                )

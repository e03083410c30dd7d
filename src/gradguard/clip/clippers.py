"""The fixed rules as objects: by value, by the norm of each tensor, by the norm of all, adaptive."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.arguments import check_bounds, check_order, check_threshold
from gradguard.clip.adaptive import clip_adaptive, unit_layouts
from gradguard.clip.clipper import Clipper, Decision, describe, measured, norms_of, total_of
from gradguard.clip.lock_in import LockIn
from gradguard.clip.parameters import Gradients, Parameters
from gradguard.clip.selection import KnownNames, Selection, Selector
from gradguard.tensors.layout import are_readable, coalesce_, meeting_device, move
from gradguard.tensors.norms import total_norm
from gradguard.tensors.scaling import clamp_, clip_coefficient, exceeds, scale_
from gradguard.tensors.units import UnitLayout


class _FixedRule(Clipper):
    """A rule whose threshold does not move by itself: its only state is the lock-in alarm."""

    def __init__(self) -> None:
        self._lock_in = LockIn()

    def state_dict(self) -> dict[str, Any]:
        """Return the lock-in alarm's memory; thresholds are arguments, not state."""
        return {"lock_in": self._lock_in.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            InvalidValueError: If it is the state of something else.
        """
        self._lock_in.load_state_dict(state_dict.get("lock_in", state_dict))


class ClipByGlobalNorm(_FixedRule):
    r"""Scale all gradients together so that their norm is at most ``max_norm``: `clip_grad_norm_` as an object.

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{m}{\lVert g \rVert_p + 10^{-6}}\Bigr)

    **Guarantees.** Those of `clip_grad_norm_`: one number multiplies all gradients, so their direction stays, and a
    fused optimizer may multiply instead. Decided on the device.

    **Edge cases.** Those of `clip_grad_norm_`: no gradients give norm 0; ``max_norm=inf`` measures only;
    ``max_norm=0`` makes gradients 0; NaN or inf go as the policy of the call says, and leave no trace in the state.

    Args:
        max_norm: m, at least 0; a 0-dim tensor stays on its device. The attribute of that name may be set at any time.
        norm_type: p, above 0 or ``float("inf")``; the result's norms are of this order.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
        InvalidTypeError: If ``max_norm`` is no number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> result = gg.ClipByGlobalNorm(max_norm=1.0)(layer)
        >>> result.norm, layer.weight.grad
        (tensor(5.), tensor([[0.6000, 0.8000]]))

    Reference:
        Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural networks, arXiv 1211.5063.
    """

    def __init__(self, max_norm: float | Tensor, norm_type: float = 2.0) -> None:
        super().__init__()
        self.max_norm = check_threshold("max_norm", max_norm)
        self.norm_type = check_order(norm_type)

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the norm of all gradients and decide on one coefficient."""
        limit = check_threshold("max_norm", self.max_norm)
        norms = norms_of(found, scale, self.norm_type)
        norm = total_of(norms, self.norm_type)
        coefficient = clip_coefficient(norm, limit)
        clipped = coefficient < 1
        locked_in = self._lock_in.follow(clipped, limit, torch.isfinite(norm))
        result = describe(
            found, norms, coefficient, clipped, order=self.norm_type, threshold=limit, locked_in=locked_in
        )
        return Decision(found, result, coefficient)


class ClipByNorm(_FixedRule):
    r"""Scale each gradient by itself so that its norm is at most ``max_norm``.

    .. math:: g_i \leftarrow g_i \cdot \min\Bigl(1, \frac{m}{\lVert g_i \rVert_p + 10^{-6}}\Bigr)
              \quad\text{for each tensor } i

    The tensors are clipped by different factors, so the direction of the update changes.

    **Guarantees.** Each tensor becomes what `clip_grad_norm_` on it alone makes of it. All are measured in one pass;
    on the CPU a tensor that does not bind is not written.

    **Edge cases.** As for `clip_grad_norm_`, tensor by tensor: NaN in one tensor leaves the others right under
    ``"propagate"``. An empty tensor has norm 0.

    Args:
        max_norm: m, at least 0; a 0-dim tensor stays on its device. The attribute of that name may be set at any time.
        norm_type: p, above 0 or ``float("inf")``; the result's norms are of this order.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
        InvalidTypeError: If ``max_norm`` is no number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([0.5])
        >>> result = gg.ClipByNorm(max_norm=1.0)(layer)
        >>> layer.weight.grad, layer.bias.grad
        (tensor([[0.6000, 0.8000]]), tensor([0.5000]))

    Reference:
        Chollet and others (2015), Keras, the argument ``clipnorm``; PaddlePaddle, ``ClipGradByNorm``.
    """

    def __init__(self, max_norm: float | Tensor, norm_type: float = 2.0) -> None:
        super().__init__()
        self.max_norm = check_threshold("max_norm", max_norm)
        self.norm_type = check_order(norm_type)

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure each gradient and decide on one coefficient for each."""
        limit = check_threshold("max_norm", self.max_norm)
        norms = norms_of(found, scale, self.norm_type)
        coefficients = clip_coefficient(norms, limit)
        clipped = (coefficients < 1).any()
        before, after = total_of(norms, self.norm_type), total_of(norms * coefficients, self.norm_type)
        locked_in = self._lock_in.follow(clipped, limit, torch.isfinite(before))
        result = describe(
            found,
            norms,
            torch.where(clipped, after / torch.where(before == 0, 1.0, before), 1.0),
            clipped,
            order=self.norm_type,
            threshold=limit,
            locked_in=locked_in,
        )
        return Decision(found, result, None, lambda: _scale_each(found.gradients, coefficients))


class ClipByValue(_FixedRule):
    r"""Clamp every element of every gradient to an interval: `clip_grad_value_` as an object.

    .. math:: g_i \leftarrow \min(\max(g_i, a), b), \qquad a = -b \text{ unless given}

    **Guarantees.** Those of `clip_grad_value_`: an element inside the interval keeps its bits; on the CPU nothing is
    written where nothing exceeds the bounds.

    **Edge cases.** Those of `clip_grad_value_`: under ``"propagate"`` NaN stays and inf becomes the bound; a bound
    beyond the dtype's range is the dtype's largest number; sparse gradients are coalesced; real and imaginary parts
    are clamped each by itself. The result's ``coefficient`` is known only when the clamp is done, and 1 until then.

    Args:
        max: b, the upper bound, and without ``min`` the negated lower one (then at least 0); a 0-dim tensor stays on
            its device.
        min: a, the lower bound, if it is not ``-max``; at most ``max``.

    Raises:
        InvalidValueError: If the bounds are no interval.
        InvalidTypeError: If a bound is no number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, -4.0]])
        >>> result = gg.ClipByValue(max=1.0, min=-2.0)(layer)
        >>> layer.weight.grad, bool(result.clipped)
        (tensor([[ 1., -2.]]), True)

    Reference:
        Mikolov (2012), Statistical language models based on neural networks, PhD thesis.
    """

    def __init__(self, max: float | Tensor, min: float | None = None) -> None:
        super().__init__()
        self.max, self.min = max, min
        self._bounds()

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure, and look whether any element exceeds the bounds."""
        low, high = self._bounds()
        for gradient in found.gradients:
            coalesce_(gradient)  # only then is a stored value an element
        found = measured(found)
        norms = norms_of(found, scale)
        norm = total_of(norms)
        bounds = _at_scale(low, scale), _at_scale(high, scale)
        suspect = _may_exceed(found.norms, *bounds)
        some = [g for g, may in zip(found.gradients, suspect, strict=True) if may]
        clipped = move(exceeds(some, *bounds), norm.device) if some else norm > norm
        locked_in = self._lock_in.follow(clipped, high if isinstance(high, Tensor) else abs(high), norm.isfinite())
        coefficient = torch.ones_like(norm)

        def write() -> None:
            if are_readable(clipped, norm) and not bool(clipped) and bool(norm.isfinite()):
                return
            clamp_(some, *bounds)
            after = [_norm_where(found.norms, [not may for may in suspect]), move(total_norm(some), norm.device)]
            coefficient.copy_(torch.where(clipped, total_of(torch.stack(after)) / total_of(found.norms), 1.0))

        result = describe(found, norms, coefficient, clipped, threshold=high, locked_in=locked_in)
        return Decision(found, result, None, write)

    def _bounds(self) -> tuple[float | Tensor, float | Tensor]:
        if self.min is None:
            high = check_threshold("max", self.max)
            return -high, high
        high = float(self.max) if isinstance(self.max, Tensor) else self.max
        return check_bounds(self.min, high, ("min", "max"))


class ClipAdaptive(_FixedRule):
    r"""Hold each unit's gradient to a fraction of that unit's weight norm: `clip_grad_adaptive_` as an object.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    Call it with the *module* (or give the `Guard` the model), so that it knows the output channels of transposed
    convolutions and Hugging Face ``Conv1D`` layers.

    **Guarantees.** Gradients become what `clip_grad_adaptive_` makes of them. The result tells about all gradients,
    those excluded too, which are measured and not changed.

    **Edge cases.** Those of `clip_grad_adaptive_`. What it did (``coefficient``, ``clipped``, ``locked_in``) is known
    only when the gradients are written; until then they say that nothing binds.

    Args:
        threshold: λ, at least 0. The paper uses 0.01 for batches of 1,024 to 4,096 and up to 0.08 for small ones.
        eps: ε, the least weight norm that is reckoned with, at least 0.
        exclude: Parameters to leave alone, as for `clip_grad_adaptive_`: the paper exempts the last linear layer.

    Raises:
        InvalidValueError: If a number is negative or NaN.
        InvalidTypeError: If an argument is of another type.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.data, layer.weight.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0]])
        >>> result = gg.ClipAdaptive(threshold=0.1)(layer)
        >>> layer.weight.grad
        tensor([[0.3000, 0.4000]])

    Reference:
        Brock, De, Smith, Simonyan (2021), High-performance large-scale image recognition without normalization,
        arXiv 2102.06171.
    """

    def __init__(
        self,
        threshold: float | Tensor = 0.01,
        eps: float = 1e-3,
        exclude: Selection = (),
    ) -> None:
        super().__init__()
        self.threshold, self.eps = check_threshold("threshold", threshold), float(check_threshold("eps", eps))
        nothing = isinstance(exclude, tuple | list) and not exclude
        self._exclude = None if nothing else Selector(exclude, "exclude")
        self._names, self._learned = KnownNames(), False
        self._layouts: dict[int, tuple[weakref.ref, UnitLayout]] = {}
        self._known: list[int] = []  # the parameters of the module that `learn` saw last
        self._module: weakref.ref[nn.Module] | None = None

    def learn(self, parameters: Parameters) -> None:
        """Look which layers of a module have units along another dimension, and whether ``exclude`` fits."""
        if self._exclude is not None:
            names, tensors = self._names.learn(parameters)
            self._exclude.require_match(tensors, names, complete=True)
            self._learned = True
        if isinstance(parameters, nn.Module):
            by_id = {id(p): p for p in parameters.parameters()}
            if self._module is None or self._module() is not parameters or list(by_id) != self._known:
                self._module, self._known = weakref.ref(parameters), list(by_id)
                self._layouts = {i: (weakref.ref(by_id[i]), u) for i, u in unit_layouts(parameters).items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one model: a copy learns its own."""
        return vars(self) | {"_layouts": {}, "_known": [], "_module": None}

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure all gradients; the units are measured when they are written."""
        limit = check_threshold("threshold", self.threshold)
        found = measured(found)
        norms = norms_of(found, scale)
        norm = total_of(norms)
        coefficient, clipped = torch.ones_like(norm), norm > norm
        locked_in = clipped.clone()
        excluded = self._excluded(found)
        kept = [i for i, out in enumerate(excluded) if not out]

        def write() -> None:
            bound = _at_scale(limit, scale)
            done = clip_adaptive(_pairs(found, kept), bound, eps=self.eps, layouts=self._units())
            factors, units = (_joined(vectors, norm) for vectors in (done.factors, done.norms))
            clipped.copy_((factors < 1).any())
            after = total_of(torch.stack([total_of(units * factors), _norm_where(found.norms, excluded)]))
            coefficient.copy_(torch.where(clipped, after / total_of(found.norms), 1.0))
            locked_in.copy_(self._lock_in.follow(clipped, limit, norm.isfinite()))

        result = describe(found, norms, coefficient, clipped, threshold=limit, locked_in=locked_in)
        return Decision(found, result, None, write)

    def _excluded(self, found: Gradients) -> list[bool]:
        if self._exclude is None:
            return [False] * len(found.parameters)
        if not self._learned:
            self._exclude.require_match(found.parameters, found.names, complete=False)
        ids = self._exclude.ids()
        names = self._names.of(found)
        return [id(p) in ids or self._exclude.fits(n) for p, n in zip(found.parameters, names, strict=True)]

    def _units(self) -> dict[int, UnitLayout]:
        """The layouts of parameters that still live: an identity may have been used again."""
        return {i: layout for i, (parameter, layout) in self._layouts.items() if parameter() is not None}


def _scale_each(gradients: Sequence[Tensor], coefficients: Tensor) -> None:
    for gradient, coefficient in zip(gradients, coefficients.unbind(), strict=True):
        scale_([gradient], coefficient)


def _pairs(found: Gradients, kept: Sequence[int]) -> Parameters:
    """The parameters at ``kept`` with their names, which an error would show."""
    names = found.plain_names()
    return [(names[i], found.parameters[i]) for i in kept]


def _may_exceed(norms: Tensor, low: float | Tensor, high: float | Tensor) -> list[bool]:
    """Return for each gradient whether an element may lie outside the bounds; where Python may not look, any may.

    No element is larger than the norm, which has been measured, to some rounding.
    """
    if not are_readable(norms, *[bound for bound in (low, high) if isinstance(bound, Tensor)]):
        return [True] * len(norms)
    certain = min(-float(low), float(high)) * (1 - 1e-5)
    return [not norm <= certain for norm in norms.tolist()]


def _norm_where(norms: Tensor, chosen: Sequence[bool]) -> Tensor:
    """The norm of the chosen gradients from the norm of each; without an index that would be copied to the device."""
    some = [norm for norm, this in zip(norms.unbind(), chosen, strict=True) if this]
    return total_of(torch.stack(some) if some else norms[:0])


def _joined(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """One vector of vectors that may lie on several devices."""
    return torch.cat([like.new_zeros(0), *(move(v, like.device, like.dtype) for v in vectors)])


def _at_scale(bound: float | Tensor, scale: float | Tensor) -> float | Tensor:
    """The bound for gradients that are ``scale`` times too large."""
    # In a `Chain` after a coefficient of 0 or NaN the scale is infinite or NaN. Then it is all the same how they are
    # clipped, but a bound must not be NaN.
    if not isinstance(scale, Tensor):
        return bound * scale
    if not isinstance(bound, Tensor):
        return bound * torch.where(scale.isnan(), torch.inf, scale) if bound else bound
    device = meeting_device([bound, scale])
    bound, scale = move(bound, device), move(scale, device)
    return torch.where(bound == 0, bound, bound * torch.where(scale.isnan(), torch.inf, scale))

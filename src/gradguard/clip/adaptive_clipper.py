"""Adaptive clipping as an object."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.arguments import check_threshold
from gradguard.clip.adaptive import AdaptiveClip, clip_adaptive
from gradguard.clip.adaptive_parts import decide_units
from gradguard.clip.adaptive_units import unit_layouts
from gradguard.clip.clipper import (
    Decision,
    ListedParameters,
    MeasuredGradients,
    choice,
    describe,
    global_norm,
    measured,
    total_of,
)
from gradguard.clip.gradients import Gradients, Parameters
from gradguard.clip.rules import FixedRule, at_scale, norm_where
from gradguard.clip.selection import KnownNames, Selection, Selector
from gradguard.distributed.settings import Settings
from gradguard.tensors.layout import move
from gradguard.tensors.units import UnitLayout

_Act = Callable[[], tuple[Tensor, Tensor]]
"""Writes, and returns whether that binds and the norm of all gradients after it."""


class ClipAdaptive(FixedRule):
    r"""Hold each unit's gradient to a fraction of that unit's weight norm: `clip_grad_adaptive_` as an object.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    Call it with the *module* (or give the `Guard` the model), so that it knows the output channels of transposed
    convolutions and Hugging Face ``Conv1D`` layers.

    **Guarantees.** Gradients become what `clip_grad_adaptive_` makes of them. The result tells about all gradients,
    those excluded too, which are measured and not changed. Where processes hold parts of them, units and gradients are
    measured in one all-reduce; as a member of `Groups` or `Chain`, which have measured the gradients already, in one
    more.

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

    measures_itself, needs_tensor_norms = True, False

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
        self.exclude = "" if nothing else str(self._exclude)
        self._names, self._learned = KnownNames(), False
        self._layouts: dict[int, tuple[weakref.ref, UnitLayout]] = {}
        self._known: list[int] = []  # the parameters of the module that `learn` saw last
        self._module: weakref.ref[nn.Module] | None = None

    def choices(self, found: Gradients) -> Settings:
        """Return which parameters are excluded."""
        return () if self._exclude is None else (choice(self._excluded(found)),)

    def learn(self, parameters: Parameters) -> None:
        """Look which layers of a module have units along another dimension, and whether ``exclude`` fits."""
        if self._exclude is not None:
            if isinstance(parameters, ListedParameters):
                self._exclude.refuse_identities()
            names, tensors = self._names.learn(parameters)
            self._exclude.require_match(tensors, names, complete=True)
            self._learned = True
        if isinstance(parameters, ListedParameters) and parameters.module is not None:
            parameters = parameters.module
        if isinstance(parameters, nn.Module):
            by_id = {id(p): p for p in parameters.parameters()}
            if self._module is None or self._module() is not parameters or list(by_id) != self._known:
                self._module, self._known = weakref.ref(parameters), list(by_id)
                self._layouts = {i: (weakref.ref(by_id[i]), u) for i, u in unit_layouts(parameters).items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one model: a copy learns its own."""
        return vars(self) | {"_layouts": {}, "_known": [], "_module": None}

    def is_per_tensor(self) -> bool:
        """Tell that gradients may come one at a time: yes."""
        return True

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure all gradients; the units are measured when they are written, or now if processes hold parts."""
        limit = check_threshold("threshold", self.threshold)
        bound = at_scale(limit, scale)
        excluded = self._excluded(found)
        if found.part is None:
            known = measured(found)
            act = self._alone(known, excluded, bound)
        else:
            known, act = self._together(found, excluded, bound)
        norms = global_norm(known, scale)
        norm = norms.value
        coefficient, clipped = torch.ones_like(norm), norm > norm
        locked_in = clipped.clone()

        def write() -> None:
            binds, after = act()
            clipped.copy_(binds)
            coefficient.copy_(torch.where(clipped, after / total_of(known.norms), 1.0))
            locked_in.copy_(self._lock_in.follow(clipped, limit, norm.isfinite()))

        result = describe(known, norms, coefficient, clipped, threshold=limit, locked_in=locked_in)
        return Decision(known, result, None, write)

    def _alone(self, found: MeasuredGradients, excluded: Sequence[bool], bound: float | Tensor) -> _Act:
        kept = [i for i, out in enumerate(excluded) if not out]

        def act() -> tuple[Tensor, Tensor]:
            done = clip_adaptive(_pairs(found, kept), bound, eps=self.eps, layouts=self._units())
            assert isinstance(done, AdaptiveClip)
            factors, units = (_joined(vectors, found.norms) for vectors in (done.factors, done.norms))
            after = total_of(torch.stack([total_of(units * factors), norm_where(found.norms, excluded)]))
            return (factors < 1).any(), after

        return act

    def _together(
        self, found: Gradients, excluded: Sequence[bool], bound: float | Tensor
    ) -> tuple[MeasuredGradients, _Act]:
        """Measure units and gradients in one all-reduce; what is left to do needs no other process."""
        kept = [i for i, out in enumerate(excluded) if not out]
        decision = decide_units(found, self._units(), kept, bound, self.eps, found.wants_each)

        def act() -> tuple[Tensor, Tensor]:
            decision.write()
            return decision.clipped, decision.after

        if not isinstance(found, MeasuredGradients):
            lists = found.parameters, found.gradients, found.positions, found.names
            known = {"there": decision.there, "classes": decision.classes, "wants_each": found.wants_each}
            found = MeasuredGradients(*lists, decision.norms, part=found.part, **known)
        return found, act

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


def _pairs(found: Gradients, kept: Sequence[int]) -> Parameters:
    """The parameters at ``kept`` with their names, which an error would show."""
    names = found.plain_names()
    return [(names[i], found.parameters[i]) for i in kept]


def _joined(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    """One vector of vectors that may lie on several devices."""
    return torch.cat([like.new_zeros(0), *(move(v, like.device, like.dtype) for v in vectors)])

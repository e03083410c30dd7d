"""Adaptive gradient clipping (AGC): each unit's gradient is held to a fraction of that unit's weight."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.arguments import check_threshold
from gradguard.clip.adaptive_units import UnitDecision, clip_units_at_once, decide_units, unit_layouts
from gradguard.clip.clipper import ClipResult, Decision, ListedParameters, choice, describe, with_culprits
from gradguard.clip.gradients import (
    ONE_STAGE,
    Gradients,
    MeasuredGradients,
    Parameters,
    Stages,
    global_norm,
    gradients_of,
    host_sees_norms,
    module_of,
    named_tensors,
    nonfinite_in,
    refuse_nonfinite_in,
    refused_by_name,
    to_clip_by,
    total_of,
)
from gradguard.clip.rules import FixedRule, at_scale
from gradguard.clip.selection import KnownNames, Selection, Selector
from gradguard.clip_events import ClipEvent, announce, is_heard, tell
from gradguard.distributed.settings import Settings
from gradguard.policies import NonFinitePolicy, check_policy
from gradguard.tensors.admission import keeping_subnormals
from gradguard.tensors.layout import public_dtype
from gradguard.tensors.nonfinite import zero_if_nonfinite_
from gradguard.tensors.units import UnitLayout


def clip_grad_adaptive_(
    parameters: Parameters,
    clipping_threshold: float | Tensor = 0.01,
    *,
    eps: float = 1e-3,
    exclude: Selection = (),
    nonfinite: NonFinitePolicy = "propagate",
    process_group: Any = None,
    mesh: Any = None,
    shared: Any = None,
) -> Tensor:
    r"""Scale each unit's gradient to at most ``clipping_threshold`` times that unit's weight norm, in place.

    .. math:: G_i \leftarrow G_i \cdot \min\Bigl(1,\;
              \frac{\lambda \max(\lVert W_i \rVert_2, \epsilon)}{\lVert G_i \rVert_2}\Bigr)

    A unit i is what feeds one output: a row of a linear weight, a filter of a convolution, an output channel of a
    transposed convolution, a row of an embedding, a row of an attention's fused query-key-value weight, a whole bias
    or gain. Pass the *module*, not its parameters, where it holds transposed convolutions or Hugging Face ``Conv1D``
    layers: a bare tensor does not tell that its output channels lie along dimension 1.

    The paper exempts the last linear layer: ``exclude=model.fc``.

    **Guarantees.** Norms are accumulated in at least float32. No unit's gradient changes another unit's. Memory: no
    more than one tensor's size at a time. On the CPU, a tensor none of whose units binds is not written; on an
    accelerator the host never waits. Weights and gradients that are sharded stay where they are: every unit is
    bounded by its whole norm, whichever processes hold parts of it, in one all-reduce.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    zero weights (zero-initialised)   the bound is λ·eps, so that the layer can still learn
    zero gradient                     unchanged, never 0/0
    ``clipping_threshold=0``          gradients become 0
    NaN in a unit                     under ``"propagate"`` that unit stays as it is, all others are clipped
    inf in a unit                     under ``"propagate"`` its inf becomes NaN, its other elements 0
    sparse (COO) embedding gradient   coalesced in place; only the rows that it holds are looked at
    DTensors, on any meshes           as the whole tensors; every process of the meshes must join, also one without
                                      gradients; ordinary tensors are the same on all of them
    ================================  ==========================================================================

    Args:
        parameters: As for `clip_grad_norm_`; preferably the module.
        clipping_threshold: λ, at least 0. The paper uses 0.01 for batches of 1,024 to 4,096 and up to 0.08 for small
            ones; a 0-dim tensor stays on its device.
        eps: ε, the least weight norm that is reckoned with, at least 0.
        exclude: Parameters to leave alone: parameters, modules, or name patterns (``"fc"`` for all in that module,
            ``"*.bias"`` with wildcards). One that matches nothing is an error.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.
        process_group: Pipeline stages, as for `clip_grad_norm_`. Patterns of ``exclude`` fit names on all stages, and
            parameters and modules those of this one.
        mesh: Pipeline stages, as for `clip_grad_norm_`.
        shared: Weights that several stages hold, as for `clip_grad_norm_`.

    Returns:
        The 2-norm of all gradients that were not excluded, before the clip: 0-dim, float32 or float64.

    Raises:
        InvalidValueError: If a number is negative or NaN, or an excluded thing is not among ``parameters``.
        InvalidTypeError: If an argument is of another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        UnsupportedGradientError: If a gradient is sparse in another way than an embedding's, or a layout does not
            tell which elements of a tensor a process holds.
        DistributedError: If processes that hold parts of the gradients do not clip together, or with other lists.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> layer.weight.grad = torch.tensor([[30.0, 40.0], [0.0, 1.0]])
        >>> gg.clip_grad_adaptive_(layer, 0.1)
        tensor(50.0100)
        >>> layer.weight.grad
        tensor([[3.0000e-01, 4.0000e-01], [0.0000e+00, 1.0000e-04]])

    Reference:
        Brock, De, Smith, Simonyan (2021), High-performance large-scale image recognition without normalization,
        arXiv 2102.06171.
    """
    stages = Stages.named(process_group, mesh, shared)
    return clip_adaptive(
        parameters, clipping_threshold, eps=eps, exclude=exclude, nonfinite=nonfinite, stages=stages
    ).norm()


@keeping_subnormals
def clip_adaptive(
    parameters: Parameters,
    clipping_threshold: float | Tensor,
    *,
    eps: float = 1e-3,
    exclude: Selection = (),
    nonfinite: NonFinitePolicy = "propagate",
    layouts: Mapping[int, UnitLayout] | None = None,
    stages: Stages = ONE_STAGE,
) -> "AdaptiveClip":
    """Do what `clip_grad_adaptive_` says, and keep what it knew; ``layouts`` stand in for those of a module."""
    threshold = check_threshold("clipping_threshold", clipping_threshold)
    eps = float(check_threshold("eps", eps))
    policy = check_policy(nonfinite)
    module = module_of(parameters)
    if layouts is None:
        layouts = {} if module is None else unit_layouts(module)
    names, tensors = named_tensors(parameters, "parameters")
    grads = _without_excluded(exclude, names, tensors, stages, module)
    heard = is_heard()
    acted_on = _acted_on(grads) if heard else []
    if heard:
        announce(acted_on)
    compared = to_clip_by(grads, "clip_grad_adaptive_", threshold, eps, policy)
    with refused_by_name(grads):
        clip = _clip(compared, layouts, threshold, eps, policy)
    if heard:
        result = clip.result()
        norms = result.norms if len(acted_on) == len(grads.parameters) else None
        tell(ClipEvent("adaptive", acted_on, threshold, result.norm, result.coefficient, norms))
    return clip


def _acted_on(grads: Gradients) -> list[Tensor]:
    """Leave out parameters that are excluded: among those of all stages they have their places, and empty gradients."""
    return [p for p, g in zip(grads.parameters, grads.gradients, strict=True) if g.numel() or not p.numel()]


@dataclass(frozen=True, slots=True)
class AdaptiveClip:
    """What an adaptive clip did: its decision, whether it zeroes what is not finite, and which gradients were not."""

    grads: Gradients
    decision: UnitDecision
    zeroes: bool
    bad: Tensor | None

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients before the clip."""
        return self.decision.norm.to(public_dtype(self.grads.gradients))

    def result(self) -> ClipResult:
        """Return everything that a user may ask for."""
        norm, outcome = self.decision.norm, self.decision.outcome()
        coefficient, nonfinite = torch.where(outcome.clipped, outcome.after / norm, 1.0), ~torch.isfinite(norm)
        zeroed = nonfinite & self.zeroes
        return ClipResult(
            norm=self.norm(),
            coefficient=torch.where(zeroed, 0.0, coefficient),
            clipped=outcome.clipped | zeroed,
            nonfinite=nonfinite,
            norms=outcome.norms if outcome.classes is None else None,
            names=self.grads.plain_names(),
            bad=self.bad,
        )


@torch.no_grad()
def _clip(
    grads: Gradients, layouts: Mapping[int, UnitLayout], threshold: float | Tensor, eps: float, policy: NonFinitePolicy
) -> AdaptiveClip:
    at_once = clip_units_at_once(grads, layouts, threshold, eps) if policy != "raise" else None
    kept = range(len(grads.gradients))
    decision = at_once or decide_units(grads, layouts, kept, threshold, eps, grads.wants_each)
    norm = decision.norm
    if policy == "raise":
        refuse_nonfinite_in(grads, norm, _norms_of_each(decision) if grads.reduction is not None else None)
    bad = None
    if grads.reduction is not None and host_sees_norms(grads) and _norms_of_each(decision) is None:
        bad = None if bool(norm.isfinite()) else nonfinite_in(grads)
    written = decision.write() if at_once is None else list(decision.units.rows.values())
    if policy == "zero":
        zero_if_nonfinite_(norm, written)
    return AdaptiveClip(grads, decision, policy == "zero", bad)


def _norms_of_each(decision: UnitDecision) -> Tensor | None:
    outcome = decision.outcome()
    return outcome.norms if outcome.classes is None else None


def _without_excluded(
    exclude: Selection,
    names: Sequence[str] | None,
    tensors: Sequence[Tensor],
    stages: Stages,
    module: nn.Module | None,
) -> Gradients:
    """Return the gradients to clip."""
    selector = selector_of(exclude)
    if selector is None:
        return gradients_of(names, tensors, stages, module)
    if stages.group is None:
        selector.require_match(tensors, names, complete=True)
        excluded = selector.chosen(tensors, names)
        kept = [i for i, t in enumerate(tensors) if id(t) not in excluded]
        return gradients_of([names[i] for i in kept] if names else None, [tensors[i] for i in kept], stages, module)
    selector.refuse_identities()
    grads = gradients_of(names, tensors, stages, module)  # of all stages, one of which may hold what a pattern fits
    all_names = None if names is None else grads.plain_names()
    selector.require_match(grads.parameters, all_names, complete=True)
    excluded = selector.chosen(grads.parameters, all_names)
    pairs = zip(grads.parameters, grads.gradients, strict=True)
    return replace(grads, gradients=[g.new_empty(0) if id(p) in excluded else g for p, g in pairs])


def selector_of(exclude: Selection) -> Selector | None:
    """Return what ``exclude`` selects; None if it is empty."""
    if not isinstance(exclude, str | Tensor | nn.Module | Mapping) and isinstance(exclude, Iterable):
        exclude = list(exclude)
        if not exclude:
            return None
    return Selector(exclude, "exclude")


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

    **Edge cases.** Those of `clip_grad_adaptive_`.

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
        self._exclude = selector_of(exclude)
        self.exclude = "" if self._exclude is None else str(self._exclude)
        self._names, self._learned = KnownNames(), False
        self._layouts: dict[int, tuple[weakref.ref, UnitLayout]] = {}
        self._known: list[int] = []  # the parameters of the module that `learn` saw last
        self._module: weakref.ref[nn.Module] | None = None

    def _shown(self) -> dict[str, str]:
        shown = {name: text for name, text in super()._shown().items() if name != "exclude"}
        return shown if self._exclude is None else shown | {"exclude": repr(self._exclude)}

    def choices(self, grads: Gradients) -> Settings:
        """Return which parameters are excluded."""
        return () if self._exclude is None else (choice(self._excluded(grads)),)

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
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure all gradients and their units, and decide on a factor for each unit."""
        limit = check_threshold("threshold", self.threshold)
        kept = [i for i, out in enumerate(self._excluded(grads)) if not out]
        decision = decide_units(grads, self._units(), kept, at_scale(limit, scale), self.eps, grads.wants_each)
        return self._described(grads, decision, limit, scale)

    @torch.no_grad()
    def decide_and_apply(self, grads: Gradients) -> Decision:
        """Clip in one pass where nothing is excluded, nothing was measured before, and this process holds all."""
        is_ours = type(self).decide is ClipAdaptive.decide  # not a rule that refines this one
        if is_ours and self._exclude is None and not isinstance(grads, MeasuredGradients):
            limit = check_threshold("threshold", self.threshold)
            done = clip_units_at_once(grads, self._units(), limit, self.eps)
            if done is not None:
                return with_culprits(self._described(grads, done, limit, 1.0))
        return super().decide_and_apply(grads)

    def _described(
        self, grads: Gradients, decision: UnitDecision, limit: float | Tensor, scale: float | Tensor
    ) -> Decision:
        """Tell what ``decision`` does, or has done."""
        outcome = decision.outcome()
        if not isinstance(grads, MeasuredGradients):
            lists = grads.parameters, grads.gradients, grads.positions, grads.names
            known = {"there": outcome.there, "classes": outcome.classes, "wants_each": grads.wants_each}
            grads = MeasuredGradients(*lists, outcome.norms, reduction=grads.reduction, **known)
        norms = global_norm(grads, scale)
        coefficient = torch.where(outcome.clipped, outcome.after / total_of(grads.norms), 1.0)
        locked_in = self._lock_in.follow(outcome.clipped, limit, norms.value.isfinite())
        result = describe(grads, norms, coefficient, outcome.clipped, threshold=limit, locked_in=locked_in)

        def write() -> None:
            decision.write()

        return Decision(grads, result, None, write)

    def _excluded(self, grads: Gradients) -> list[bool]:
        if self._exclude is None:
            return [False] * len(grads.parameters)
        if not self._learned:
            self._exclude.require_match(grads.parameters, grads.names, complete=False)
        ids = self._exclude.ids()
        names = self._names.of(grads)
        return [id(p) in ids or self._exclude.fits(n) for p, n in zip(grads.parameters, names, strict=True)]

    def _units(self) -> dict[int, UnitLayout]:
        """The layouts of parameters that still live: an identity may have been used again."""
        return {i: layout for i, (parameter, layout) in self._layouts.items() if parameter() is not None}

"""A clipping rule as an object: it measures and decides first, then writes, so that rules compose and carry state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from gradguard.clip.parameters import (
    Gradients,
    Parameters,
    Stages,
    current_gradients,
    gradients_of,
    named_tensors,
    norms_in,
    refuse_nonfinite_in,
)
from gradguard.clip.result import ClipResult, NonfiniteCounter
from gradguard.tensors.layout import are_readable, move, public_dtype
from gradguard.tensors.nonfinite import NonFinitePolicy, check_policy, zero_if_nonfinite_
from gradguard.tensors.norms import norm_of_norms, tensor_norms
from gradguard.tensors.scaling import scale_


@dataclass(frozen=True)
class Decision:
    """What a clipper will do to the gradients that it has measured; nothing is written yet.

    Attributes:
        gradients: What was measured.
        result: What the clip does. A rule whose effect shows only in the writing (a clamp, units) fills in the
            coefficient then, in the same tensors.
        coefficient: The one number that every gradient is multiplied by, 0-dim on the device: then an optimizer may
            multiply instead (`Guard`). None if the rule does something else to them.
        write: Does it to the gradients, in place; None where multiplying by ``coefficient`` is all.
        left: 2-norm of each gradient as ``write`` will leave it, in all its parts, if that is known.
    """

    gradients: Gradients
    result: ClipResult
    coefficient: Tensor | None
    write: Callable[[], None] | None = None
    left: Tensor | None = None

    def __post_init__(self) -> None:
        """Remember the gradients weakly, so that `ClipResult.culprits` can count in them."""
        if self.result.counter is None:
            counter = NonfiniteCounter(self.gradients.gradients, self.result.nonfinite)
            object.__setattr__(self, "result", replace(self.result, counter=counter))

    @torch.no_grad()
    def apply(self) -> None:
        """Clip the gradients in place."""
        if self.write is not None:
            self.write()
        elif self.coefficient is not None:
            scale_(self.gradients.gradients, self.coefficient)


class Clipper(ABC):
    """A rule for clipping: call it with parameters whose gradients are complete; it clips them and says what it did.

    A rule of your own writes `decide`; `norms_of` and `describe` do the measuring and the telling for it.

    Example:
        >>> import torch
        >>> from gradguard.clip.clipper import Clipper, Decision, describe, norms_of
        >>> class Halve(Clipper):
        ...     def decide(self, found, scale=1.0):
        ...         norms = norms_of(found, scale)
        ...         half = torch.full_like(norms.sum(), 0.5)
        ...         return Decision(found, describe(found, norms, half, half < 1), half)
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> Halve()(layer).norm, layer.weight.grad
        (tensor(5.), tensor([[1.5000, 2.0000]]))
    """

    measures_itself = False
    """Whether `decide` measures parts of gradients in a way of its own, so that norms taken before would be wasted."""

    serves_several_guards = False
    """Whether one object may belong to the guards of several optimizers although it remembers."""

    @torch.no_grad()
    def __call__(
        self,
        parameters: Parameters,
        *,
        nonfinite: NonFinitePolicy = "propagate",
        process_group: Any = None,
        mesh: Any = None,
        shared: Any = None,
    ) -> ClipResult:
        """Clip the gradients of ``parameters`` in place.

        Args:
            parameters: As for `clip_grad_norm_`.
            nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.
            process_group: Pipeline stages, as for `clip_grad_norm_`.
            mesh: Pipeline stages, as for `clip_grad_norm_`.
            shared: Weights that several stages hold, as for `clip_grad_norm_`.

        Returns:
            What the clip did.

        Raises:
            InvalidValueError: If the policy is not one.
            InvalidTypeError: If ``parameters`` is of another type.
            NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity; neither gradients
                nor the clipper's state change.
            DistributedError: If processes that hold parts of the gradients do not clip together.
        """
        policy, stages = check_policy(nonfinite), Stages.named(process_group, mesh, shared)
        names, tensors = named_tensors(parameters, "parameters")
        found = gradients_of(names, tensors, stages, parameters if isinstance(parameters, nn.Module) else None)
        if stages.group is not None:
            self.learn(ListedParameters(found, parameters))
        else:
            self.learn(parameters if isinstance(parameters, nn.Module) else _as_parameters(names, tensors))
        if policy == "raise":
            found = measured(found, self.orders())
            refuse_nonfinite_in(found, total_of(found.norms), found.norms)
        decision = self.decide(found)
        decision.apply()
        return _zeroed(decision) if policy == "zero" else decision.result

    @abstractmethod
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, decide, and let the state follow; write to no gradient.

        Args:
            found: The gradients, all with their parameters.
            scale: What a GradScaler has multiplied them by: thresholds are for gradients divided by it.
        """

    def orders(self) -> set[float]:
        """Return the orders of the norms that `decide` will ask for, so that `Groups` measures all of them at once."""
        return {float(getattr(self, "norm_type", 2.0))}

    def is_per_tensor(self) -> bool:
        """Tell whether each gradient is treated without regard to the others, so that they may come one at a time."""
        return False

    def learn(self, parameters: Parameters) -> None:
        """Look at all parameters before their first `decide`: a module tells more than its gradients do.

        `Clipper.__call__` does this on each call, and a `Guard` that knows the model once. Most rules need nothing.

        Args:
            parameters: The module if there is one, else tensors or ``(name, tensor)`` pairs; no exhausted generator.
        """
        del parameters

    def state_dict(self) -> dict[str, Any]:
        """Return what changes during training; empty for a rule without state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; training goes on as if it had not been interrupted."""
        del state_dict

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return the clipper; the state also follows the gradients by itself."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
            elif isinstance(value, Clipper) or hasattr(value, "state_dict"):
                value.to(device)
        return self


class ListedParameters(list[tuple[str, Tensor]]):
    """The parameters of all pipeline stages by name, with an empty tensor for those of others.

    Attributes:
        module: The module that those of this stage come from, if it is known.
    """

    def __init__(self, found: Gradients, source: object) -> None:
        super().__init__(zip(found.plain_names(), found.parameters, strict=True))
        self.module = source if isinstance(source, nn.Module) else None


@dataclass(frozen=True, slots=True)
class MeasuredGradients(Gradients):
    """Gradients with their norms, so that several rules share one measurement.

    Attributes:
        norms: 2-norm of each gradient as it is in memory, loss scale included; ``[len(gradients)]``.
        others: Norms of other orders, by order, where they were measured with the first.
        there: Which gradients any process has, ``[len(gradients)]``, bool; None where that is all of them.
    """

    norms: Tensor
    others: Mapping[float, Tensor] = field(default_factory=dict, kw_only=True)
    there: Tensor | None = field(default=None, kw_only=True)

    def is_there(self) -> bool:
        """Tell whether there is any gradient; where Python may not look, there may be."""
        if self.there is None or not are_readable(self.there):
            return len(self.gradients) > 0
        return bool(self.there.any())

    def some(self, positions: Sequence[int]) -> "MeasuredGradients":
        """Return the gradients at ``positions``, with what is known of them."""
        return MeasuredGradients(
            [self.parameters[i] for i in positions],
            [self.gradients[i] for i in positions],
            [self.positions[i] for i in positions],
            self.names,
            _entries(self.norms, positions),
            others={order: _entries(norms, positions) for order, norms in self.others.items()},
            there=None if self.there is None else _entries(self.there, positions),
            part=None if self.part is None else self.part.of(positions),
        )


@torch.no_grad()
def measured(found: Gradients, orders: Iterable[float] = ()) -> MeasuredGradients:
    """Return ``found`` with its norms, measured now unless they are known.

    Args:
        found: The gradients.
        orders: Other orders of norms that will be asked for. Where gradients are spread over processes, these add up
            in the same all-reduce; else they are measured when they are asked for.
    """
    if isinstance(found, MeasuredGradients):
        return found
    others = sorted(set(orders) - {2.0}) if found.part is not None else []
    local = [(tensor_norms(found.gradients, order), order) for order in (2.0, *others)]
    (norms, *rest), there = ([local[0][0]], None) if found.part is None else found.part.measure(*local)
    return MeasuredGradients(
        found.parameters,
        found.gradients,
        found.positions,
        found.names,
        norms,
        others=dict(zip(others, rest, strict=True)),
        there=there,
        part=found.part,
    )


@torch.no_grad()
def norms_of(found: Gradients, scale: float | Tensor = 1.0, order: float = 2.0) -> Tensor:
    """Return the norm of each gradient without its loss scale: ``[len(found.gradients)]``, float64, on the device.

    Args:
        found: The gradients; if `Groups` or `Chain` has measured them already, they are not read again.
        scale: What a GradScaler has multiplied them by.
        order: The order p of the norm.
    """
    known = None
    if isinstance(found, MeasuredGradients):
        known = found.norms if order == 2 else found.others.get(order)
    norms = norms_in(found, order) if known is None else known
    if isinstance(scale, Tensor):
        return norms / move(scale.detach(), norms.device, norms.dtype)
    return norms if scale == 1 else norms / scale


@torch.no_grad()
def total_of(norms: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector from the norm of each: 0-dim, no overflow, no underflow."""
    return norm_of_norms(norms, order)


def describe(
    found: Gradients,
    norms: Tensor,
    coefficient: Tensor,
    clipped: Tensor,
    *,
    order: float = 2.0,
    threshold: float | Tensor | None = None,
    locked_in: Tensor | None = None,
    group_norms: Mapping[str, Tensor] | None = None,
) -> ClipResult:
    """Return the result of a clip from what `norms_of` measured.

    Args:
        found: The gradients.
        norms: What `norms_of` returned for them, with the same ``order``.
        coefficient: The norm after the clip over the norm before, 0-dim.
        clipped: Whether the clip binds, 0-dim bool.
        order: The order of the norms.
        threshold: What the rule compared with.
        locked_in: What `LockIn.follow` returned.
        group_norms: The norm of each group.
    """
    norm = total_of(norms, order)
    if threshold is not None and not isinstance(threshold, Tensor):
        threshold = torch.full_like(norm, threshold)
    return ClipResult(
        norm=norm.to(public_dtype(found.gradients)),
        coefficient=coefficient,
        clipped=clipped,
        nonfinite=~torch.isfinite(norm),
        tensor_norms=norms,
        names=found.plain_names(),
        threshold=threshold,
        locked_in=locked_in,
        group_norms=group_norms,
    )


def _entries(vector: Tensor, positions: Sequence[int]) -> Tensor:
    """Some entries of a vector; without an index that would be copied to the device."""
    entries = vector.unbind()
    return torch.stack([entries[i] for i in positions]) if positions else vector[:0]


def _zeroed(decision: Decision) -> ClipResult:
    """Make all gradients 0 if one of them was not finite, and tell it."""
    result = decision.result
    bad = result.nonfinite
    zero_if_nonfinite_(torch.where(bad, torch.nan, 0.0), current_gradients(decision.gradients))
    coefficient = torch.where(bad, 0.0, result.coefficient)
    return replace(result, coefficient=coefficient, clipped=result.clipped | bad)


def _as_parameters(names: list[str] | None, tensors: list[Tensor]) -> Parameters:
    return tensors if names is None else list(zip(names, tensors, strict=True))

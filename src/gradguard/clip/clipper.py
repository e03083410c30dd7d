"""A clipping rule as an object: it measures and decides first, then writes, so that rules compose and carry state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor, nn

from gradguard.clip.gradients import (
    Gradients,
    Parameters,
    Stages,
    current_gradients,
    gradients_of,
    host_sees_norms,
    module_of,
    named_tensors,
    nonfinite_in,
    norm_in,
    norms_in,
    refuse_nonfinite_in,
    to_clip_by,
)
from gradguard.clip.result import ClipResult, NonfiniteCounter
from gradguard.clip_events import ClipEvent, SkipReason, announce, is_heard, rule_of, tell
from gradguard.distributed.classes import Classes
from gradguard.distributed.settings import Settings, as_setting
from gradguard.policies import NonFinitePolicy, check_policy
from gradguard.tensors.layout import are_readable, move, public_dtype
from gradguard.tensors.nonfinite import zero_if_nonfinite_
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
        """Remember the gradients weakly, so that `ClipResult.culprits` can count in them if there may be any."""
        nonfinite = self.result.nonfinite
        if self.result.counter is None and not (are_readable(nonfinite) and not bool(nonfinite)):
            counter = NonfiniteCounter(self.gradients.gradients, nonfinite)
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

    needs_tensor_norms: bool = True
    """Whether `decide` asks for the norm of each tensor (`norms_of`); else only for that of all (`global_norm`).

    Where processes hold parts of the gradients, they then send each other one number instead of one for each."""

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
        tensor_norms: bool = False,
    ) -> ClipResult:
        """Clip the gradients of ``parameters`` in place.

        Args:
            parameters: As for `clip_grad_norm_`.
            nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.
            process_group: Pipeline stages, as for `clip_grad_norm_`.
            mesh: Pipeline stages, as for `clip_grad_norm_`.
            shared: Weights that several stages hold, as for `clip_grad_norm_`.
            tensor_norms: Whether ``result.tensor_norms`` is wanted where processes hold parts of the gradients: they
                then send each other the norm of each tensor. The same on every process. Elsewhere it is always there.

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
        found = gradients_of(names, tensors, stages, module_of(parameters))
        if stages.group is not None:
            self.learn(ListedParameters(found, parameters))
        else:
            self.learn(parameters if isinstance(parameters, nn.Module) else _as_parameters(names, tensors))
        found = self.compared(asking(found, tensor_norms), policy)
        if policy == "raise":
            found = self.measure(found)
            refuse_nonfinite_in(found, total_of(found.norms), found.norms if found.classes is None else None)
        heard = is_heard()
        if heard:
            announce(tensors, tells_norms=found.part is None and self.orders() == {2.0})
        decision = with_culprits(self.decide(found))
        decision.apply()
        result = _zeroed(decision) if policy == "zero" else decision.result
        if heard:
            tell(self.event_of(found, result))
        return result

    @abstractmethod
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, decide, and let the state follow; write to no gradient.

        Args:
            found: The gradients, all with their parameters.
            scale: What a GradScaler has multiplied them by: thresholds are for gradients divided by it.
        """

    def measure(self, found: Gradients) -> "MeasuredGradients":
        """Return ``found`` with the norms that `decide` will ask for."""
        return measured(found, self.orders(), each=self.needs_tensor_norms)

    def orders(self) -> set[float]:
        """Return the orders of the norms that `decide` will ask for, so that `Groups` measures all of them at once."""
        return {float(getattr(self, "norm_type", 2.0))}

    arguments: Sequence[str] = ()
    """Which attributes decide how the rule clips: processes that hold parts of gradients must have the same ones.

    Those of the constructor's arguments that it keeps under their names, unless a class says otherwise. Of an argument
    that is neither a number nor a string only the type is compared."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Take the constructor's arguments, and those of a rule that this one refines, for what must be alike."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and "arguments" not in vars(cls):
            _, *given = signature(cls.__init__).parameters.values()
            own = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            cls.arguments = tuple(dict.fromkeys([*own, *cls.arguments]))

    def settings(self) -> Settings:
        """Return what must be the same on all processes: the rule, and the values of its `arguments`."""
        return type(self).__name__, *(as_setting(getattr(self, name, None)) for name in self.arguments)

    def choices(self, found: Gradients) -> Settings:
        """Return which of the gradients are treated in which way, of a rule that chooses, as `choice` tells it."""
        del found
        return ()

    def compared(self, found: Gradients, policy: NonFinitePolicy | str) -> Gradients:
        """Return ``found``, which all processes that hold parts of it must clip by the same, or none does."""
        return found if found.part is None else to_clip_by(found, *self.settings(), *self.choices(found), policy)

    def leaves(self) -> list["Clipper"]:
        """Return the rules that this one is made of: itself, unless it puts others together."""
        return [self]

    def is_per_tensor(self) -> bool:
        """Tell whether each gradient is treated without regard to the others, so that they may come one at a time."""
        return False

    def event_of(
        self,
        found: Gradients,
        result: ClipResult,
        optimizer: torch.optim.Optimizer | None = None,
        skipped: bool | Tensor = False,
        skip_reason: SkipReason | None = None,
    ) -> ClipEvent:
        """Return what to tell who watches.

        Args:
            found: The gradients that were clipped.
            result: What was done to them.
            optimizer: The optimizer whose step is running.
            skipped: Whether that step is left out.
            skip_reason: Why, if it is.
        """
        norms = result.norms if self.orders() == {2.0} else None
        told = result.threshold, result.norm, result.coefficient, norms
        order = float(getattr(self, "norm_type", 2.0))
        return ClipEvent(rule_of(self), found.parameters, *told, optimizer, skipped, order, skip_reason)

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


def choice(numbers: Sequence[int]) -> str:
    """Return what tells one choice of parameters from another: ``numbers`` has one for each, such as its group."""
    return f"choice {crc32(repr(numbers).encode()):08x} of parameters"


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
        norms: 2-norm of each gradient as it is in memory, loss scale included; ``[len(gradients)]``. Or of several
            together, ``[len(classes)]``.
        others: Norms of other orders, by order, where they were measured with the first.
        there: Which gradients (or classes) any process has, bool; None where that is all of them.
        classes: Which gradients one norm stands for; None where each has its own.
    """

    norms: Tensor
    others: Mapping[float, Tensor] = field(default_factory=dict, kw_only=True)
    there: Tensor | None = field(default=None, kw_only=True)
    classes: Classes | None = field(default=None, kw_only=True)

    def is_there(self) -> bool:
        """Tell whether there is any gradient; where Python may not look, there may be."""
        if self.there is None or not are_readable(self.there):
            return len(self.gradients) > 0
        return bool(self.there.any())

    def some(self, positions: Sequence[int]) -> "MeasuredGradients":
        """Return the gradients at ``positions``, with what is known of them; each has a norm of its own."""
        assert self.classes is None
        return MeasuredGradients(
            [self.parameters[i] for i in positions],
            [self.gradients[i] for i in positions],
            [self.positions[i] for i in positions],
            self.names,
            _entries(self.norms, positions),
            others={order: _entries(norms, positions) for order, norms in self.others.items()},
            there=None if self.there is None else _entries(self.there, positions),
            part=None if self.part is None else self.part.of(positions),
            wants_each=self.wants_each,
        )

    def group(self, number: int, positions: Sequence[int]) -> "MeasuredGradients":
        """Return the gradients of one group of ``classes``, with the norms of its classes, which do not tell each."""
        assert self.classes is not None
        own = self.classes.of_group[number]
        return MeasuredGradients(
            [self.parameters[i] for i in positions],
            [self.gradients[i] for i in positions],
            [self.positions[i] for i in positions],
            self.names,
            self.norms[own],
            others={order: norms[own] for order, norms in self.others.items()},
            there=None if self.there is None else self.there[own],
            classes=None if self.classes.each[number] else self.classes,
            part=None if self.part is None else self.part.of(positions),
            wants_each=self.wants_each,
        )


@torch.no_grad()
def measured(
    found: Gradients, orders: Iterable[float] = (), *, each: bool = True, classes: Classes | None = None
) -> MeasuredGradients:
    """Return ``found`` with its norms, measured now unless they are known.

    Args:
        found: The gradients.
        orders: Other orders of norms that will be asked for. Where gradients are spread over processes, these add up
            in the same all-reduce; else they are measured when they are asked for.
        each: Whether the norm of each gradient is needed; else that of all is enough.
        classes: Of which gradients norms are needed together, where processes hold parts of them.
    """
    part, each = found.part, each or asks_for_each(found)
    if isinstance(found, MeasuredGradients) and (
        found.classes is None or (not each and classes in (None, found.classes))
    ):
        return found
    if part is None or each:
        classes = None
    elif classes is None:
        classes = part.classes
    others = sorted(set(orders) - {2.0}) if part is not None else []
    there = None
    if classes is not None and part is not None:
        local = [(classes.norms(found.gradients, order), order) for order in (2.0, *others)]
        (norms, *rest), there = part.measure_classes(classes, *local)
    else:
        local = [(tensor_norms(found.gradients, order), order) for order in (2.0, *others)]
        (norms, *rest), there = ([local[0][0]], None) if part is None else part.measure(*local)
    return MeasuredGradients(
        found.parameters,
        found.gradients,
        found.positions,
        found.names,
        norms,
        others=dict(zip(others, rest, strict=True)),
        there=there,
        classes=classes,
        part=part,
        wants_each=found.wants_each,
    )


def asks_for_each(found: Gradients) -> bool:
    """Tell whether the result shall have the norm of each gradient: if asked, or where no other process is needed."""
    return found.wants_each or found.part is None or found.part.reducer.is_alone


def asking(found: Gradients, for_each: bool) -> Gradients:
    """Return ``found``, of which the user wants the norm of each if ``for_each`` is true."""
    return replace(found, wants_each=True) if for_each and not found.wants_each else found


@dataclass(frozen=True, slots=True)
class GlobalNorm:
    """The norm of all gradients.

    Attributes:
        value: 0-dim, float64.
        of_each: The norm of each gradient; None where processes hold parts of them and nobody asked.
    """

    value: Tensor
    of_each: Tensor | None


@torch.no_grad()
def global_norm(found: Gradients, scale: float | Tensor = 1.0, order: float = 2.0) -> GlobalNorm:
    """Return the norm of all gradients as one vector, without their loss scale.

    Args:
        found: The gradients; if `Groups` or `Chain` has measured them already, they are not read again.
        scale: What a GradScaler has multiplied them by.
        order: The order p of the norm.
    """
    if isinstance(found, MeasuredGradients) and found.classes is not None:
        norms = found.norms if order == 2 else found.others.get(order)
        if norms is not None:
            return GlobalNorm(_unscaled(total_of(norms, order), scale), None)
    if asks_for_each(found) or (isinstance(found, MeasuredGradients) and found.classes is None):
        norms = norms_of(found, scale, order)
        return GlobalNorm(total_of(norms, order), norms)
    return GlobalNorm(_unscaled(norm_in(found, order), scale), None)


@torch.no_grad()
def norms_of(found: Gradients, scale: float | Tensor = 1.0, order: float = 2.0) -> Tensor:
    """Return the norm of each gradient without its loss scale: ``[len(found.gradients)]``, float64, on the device.

    Args:
        found: The gradients; if `Groups` or `Chain` has measured them already, they are not read again.
        scale: What a GradScaler has multiplied them by.
        order: The order p of the norm.
    """
    known = None
    if isinstance(found, MeasuredGradients) and found.classes is None:
        known = found.norms if order == 2 else found.others.get(order)
    return _unscaled(norms_in(found, order) if known is None else known, scale)


def _unscaled(norms: Tensor, scale: float | Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return norms / move(scale.detach(), norms.device, norms.dtype)
    return norms if scale == 1 else norms / scale


@torch.no_grad()
def total_of(norms: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector from the norm of each: 0-dim, no overflow, no underflow."""
    return norm_of_norms(norms, order)


def describe(
    found: Gradients,
    norms: Tensor | GlobalNorm,
    coefficient: Tensor,
    clipped: Tensor,
    *,
    order: float = 2.0,
    threshold: float | Tensor | None = None,
    locked_in: Tensor | None = None,
    group_norms: Mapping[str, Tensor] | None = None,
) -> ClipResult:
    """Return the result of a clip from what `norms_of` or `global_norm` measured.

    Args:
        found: The gradients.
        norms: What one of them returned, with the same ``order``.
        coefficient: The norm after the clip over the norm before, 0-dim.
        clipped: Whether the clip binds, 0-dim bool.
        order: The order of the norms.
        threshold: What the rule compared with.
        locked_in: What `LockIn.follow` returned.
        group_norms: The norm of each group.
    """
    if isinstance(norms, Tensor):
        norms = GlobalNorm(total_of(norms, order), norms)
    norm = norms.value
    if threshold is not None and not isinstance(threshold, Tensor):
        threshold = torch.full_like(norm, threshold)
    return ClipResult(
        norm=norm.to(public_dtype(found.gradients)),
        coefficient=coefficient,
        clipped=clipped,
        nonfinite=~torch.isfinite(norm),
        norms=norms.of_each,
        names=found.plain_names(),
        threshold=threshold,
        locked_in=locked_in,
        group_norms=group_norms,
    )


@torch.no_grad()
def with_culprits(decision: Decision, *, host_looks: bool = False) -> Decision:
    """Let all processes tell each other which gradients are not finite, on a step on which one is not.

    That is a second all-reduce, which all of them take part in because all of them see the same norm. A healthy step
    costs nothing. Where the host would have to wait for the norm, nothing is done.

    Args:
        decision: Before anything is written.
        host_looks: Whether the host looks at the norm at this step anyway, on every process.

    Returns:
        The decision, whose result knows its culprits if it was sick.
    """
    result, found = decision.result, decision.gradients
    if result.norms is not None or result.bad is not None or not (host_looks or host_sees_norms(found)):
        return decision
    return replace(decision, result=replace(result, bad=nonfinite_in(found))) if bool(result.nonfinite) else decision


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

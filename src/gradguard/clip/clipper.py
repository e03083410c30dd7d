"""A clipping rule as an object: it first measures and decides, then writes, so rules compose and may keep state."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from gradguard.clip.gradients import (
    Gradients,
    MeasuredGradients,
    Parameters,
    current_gradients,
    gradients_of,
    measured,
    module_of,
    named_tensors,
    refuse_nonfinite_in,
    refused_by_name,
    to_clip_by,
    total_of,
)
from gradguard.distributed.reduction_group import Stages
from gradguard.distributed.settings import Settings, as_setting
from gradguard.listeners import ClipEvent, SkipReason, announce, is_heard, rule_of, tell
from gradguard.policies import NonFinitePolicy, check_policy
from gradguard.tensors.layout import are_readable, public_dtype
from gradguard.tensors.nonfinite import count_nonfinite, zero_if_nonfinite_
from gradguard.tensors.scaling import scale_
from gradguard.tensors.tensor_admission import keeping_subnormals


@dataclass(frozen=True, slots=True, eq=False)
class ClipResult:
    """The result of a clip on one step. Every number stays on its device: only reading one causes a host sync.

    Attributes:
        norm: 2-norm of all gradients as one vector *before* the clip; 0-dim, float32 (float64 for float64 gradients).
            For a rule with a ``norm_type`` it is the norm of that order, which the rule compares with its threshold.
        coefficient: The norm after the clip over the norm before, in [0, 1]; 0-dim float64. Under the norm rule it is
            the factor of every gradient. If a rule clamps or scales parts, it is 1 until the gradients are written.
        clipped: Whether the clip binds on this step; 0-dim bool.
        nonfinite: Whether any gradient held NaN or infinity; 0-dim bool.
        tensor_norms: Norm of each gradient before the clip, of the same order; ``[len(names)]``, float64.
        names: The parameter name for each entry of ``tensor_norms``.
        threshold: The rule's threshold on this step, for gradients without a loss scale; 0-dim, or None if the rule
            has no single number.
        locked_in: Whether the clip has bound on more than half of the recent steps at one threshold: 0-dim bool, or
            None if the rule does not count. See `LockIn`.
        group_norms: 2-norm before the clip of each group of `Groups`, 0-dim each; None without groups.
        counts: The number of non-finite elements of each gradient, for `culprits`; None if not counted.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> result = gg.apply_gradient_clipping(layer, "norm", 1.0)
        >>> float(result.norm), bool(result.clipped), result.names
        (5.0, True, ('weight',))
    """

    norm: Tensor
    coefficient: Tensor
    clipped: Tensor
    nonfinite: Tensor
    tensor_norms: Tensor
    names: Sequence[str]
    threshold: Tensor | None = None
    locked_in: Tensor | None = None
    group_norms: Mapping[str, Tensor] | None = None
    counts: Sequence[int] | None = field(default=None, repr=False)

    def culprits(self) -> dict[str, int | None]:
        """Return the parameters that held NaN or infinity, each with the number of such elements; a host sync.

        The names follow from the norms before the clip. On the CPU the elements are counted when the clip decides, on
        the rare step that has such elements. On an accelerator that would be a host sync, so the numbers are None. If
        processes hold parts of a gradient, the names cover all parts, and each number counts this process' part.
        Reading starts no collective: one process may read alone.
        """
        return {self.names[i]: None if self.counts is None else self.counts[i] for i in self._bad_positions()}

    def culprit_names(self) -> list[str]:
        """Return the parameter names of `culprits`."""
        return [self.names[i] for i in self._bad_positions()]

    def _bad_positions(self) -> list[int]:
        return (~self.tensor_norms.isfinite()).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Decision:
    """A clipper's decision on gradients that it has measured; nothing is written yet.

    Attributes:
        gradients: The measured gradients.
        result: The effect of the clip. A rule whose effect is known only after the write (a clamp, units) then fills
            in the coefficient, in the same tensors.
        coefficient: The factor of every gradient, 0-dim on the device; an optimizer may multiply by it instead
            (`Guard`). None if the rule does anything else.
        write: Writes the clipped gradients, in place; None if the clip is the product with ``coefficient``.
    """

    gradients: Gradients
    result: ClipResult
    coefficient: Tensor | None
    write: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        """Count the non-finite elements for `ClipResult.culprits`, if the host can read that there are some."""
        nonfinite, gradients = self.result.nonfinite, self.gradients.gradients
        if self.result.counts is None and are_readable(nonfinite, *gradients) and bool(nonfinite):
            counts = [nan + inf for nan, inf in count_nonfinite(gradients)]
            object.__setattr__(self, "result", replace(self.result, counts=counts))

    @torch.no_grad()
    def apply(self) -> None:
        """Clip the gradients in place."""
        if self.write is not None:
            self.write()
        elif self.coefficient is not None:
            scale_(self.gradients.gradients, self.coefficient)


class Clipper(ABC):
    """A rule for clipping: call it with parameters whose gradients are complete; it clips them and returns the result.

    A rule of your own implements `decide`; it measures with `norms_of` and reports with `describe`.

    Example:
        >>> import torch
        >>> from gradguard.clip.clipper import Clipper, Decision, describe
        >>> from gradguard.clip.gradients import norms_of
        >>> class Halve(Clipper):
        ...     def decide(self, grads, scale=1.0):
        ...         norms = norms_of(grads, scale)
        ...         half = torch.full_like(norms.sum(), 0.5)
        ...         return Decision(grads, describe(grads, norms, half, half < 1), half)
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> Halve()(layer).norm, layer.weight.grad
        (tensor(5.), tensor([[1.5000, 2.0000]]))
    """

    measures_itself = False
    """Whether `decide` measures the gradients in its own way, so that earlier norms would be wasted."""

    uses_reach = False
    """Whether `decide` needs to know how far the optimizer moves the weights (``grads.reach``)."""

    _per_tensor = False

    @torch.no_grad()
    @keeping_subnormals
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
            The result of the clip.

        Raises:
            InvalidValueError: If the policy is unknown.
            InvalidTypeError: If ``parameters`` has another type.
            NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity; neither gradients
                nor the clipper's state change.
            DistributedError: If processes that hold parts of the gradients do not clip together.
        """
        policy, stages = check_policy(nonfinite), Stages.named(process_group, mesh, shared)
        names, tensors = named_tensors(parameters, "parameters")
        grads = gradients_of(names, tensors, stages, module_of(parameters))
        if stages.group is not None:
            self.learn(ListedParameters(grads, parameters))
        else:
            listed = tensors if names is None else list(zip(names, tensors, strict=True))
            self.learn(parameters if isinstance(parameters, nn.Module) else listed)
        grads = self.compared(grads, policy)
        if policy == "raise":
            with refused_by_name(grads):
                grads = self.measure(grads)
            refuse_nonfinite_in(grads, total_of(grads.norms), grads.norms)
        heard = is_heard()
        if heard:
            announce(tensors, tells_norms=grads.reduction is None and self.orders() == {2.0})
        with refused_by_name(grads):
            decision = self.decide_at_once(grads)
            decision.apply()
        result = decision.result
        if policy == "zero":
            bad = result.nonfinite
            zero_if_nonfinite_(torch.where(bad, torch.nan, 0.0), current_gradients(decision.gradients))
            coefficient = torch.where(bad, 0.0, result.coefficient)
            result = replace(result, coefficient=coefficient, clipped=result.clipped | bad)
        if heard:
            tell(self.event_of(decision, result))
        return result

    @abstractmethod
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, decide, and update the state; write to no gradient.

        Args:
            grads: The gradients, with their parameters.
            scale: The loss scale by which they are still multiplied; thresholds are for gradients divided by it.
        """

    def decide_at_once(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Decide, and clip in the same pass over memory if the rule can; then `Decision.apply` does nothing."""
        return self.decide(grads, scale)

    def measure(self, grads: Gradients) -> "MeasuredGradients":
        """Return ``grads`` with the norms that `decide` will need."""
        return measured(grads, self.orders())

    def orders(self) -> set[float]:
        """Return the orders of the norms that `decide` will need, so that `Groups` measures all of them at once."""
        return {float(getattr(self, "norm_type", 2.0))}

    arguments: Sequence[str] = ()
    """The attributes that determine how the rule clips: processes that hold parts of gradients must agree on them.

    By default these are the constructor's arguments that the rule stores under their own names. For an argument that is
    neither a number nor a string, only the type is compared."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let processes compare the constructor's arguments, and the `arguments` of the base class."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and "arguments" not in vars(cls):
            _, *given = signature(cls.__init__).parameters.values()
            own = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            cls.arguments = tuple(dict.fromkeys([*own, *cls.arguments]))

    def __repr__(self) -> str:
        """Return the constructor call, with the arguments that differ from their defaults; no state."""
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in self._shown().items())})"

    def _shown(self) -> dict[str, str]:
        """Return the arguments for `__repr__`, as the user would type them."""
        _, *taken = signature(type(self).__init__).parameters.values()
        shown: dict[str, str] = {}
        for argument in taken:
            value = getattr(self, argument.name, argument.default)
            if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD) or value is argument.empty:
                continue
            # An argument of None may be stored as infinity.
            default = math.inf if argument.default is None and value is not None else argument.default
            if isinstance(value, Tensor) or value != default:
                shown[argument.name] = _typed(value)
        return shown

    def settings(self) -> Settings:
        """Return the settings that all processes must share: the rule's name, and the values of its `arguments`."""
        return type(self).__name__, *(as_setting(getattr(self, name, None)) for name in self.arguments)

    def choices(self, grads: Gradients) -> Settings:
        """Return a `choice` that encodes the treatment of each gradient, if the rule treats gradients differently."""
        del grads
        return ()

    def compared(self, grads: Gradients, policy: NonFinitePolicy | str) -> Gradients:
        """Return ``grads`` with this rule's settings: before the clip, all processes that hold parts compare them."""
        return grads if grads.reduction is None else to_clip_by(grads, *self.settings(), *self.choices(grads), policy)

    def leaves(self) -> list["Clipper"]:
        """Return the basic rules inside this one: itself, unless it combines others."""
        return [self]

    def is_per_tensor(self) -> bool:
        """Tell whether the rule treats each gradient independently, so that gradients may arrive one at a time."""
        return self._per_tensor

    def event_of(
        self,
        decision: Decision,
        result: ClipResult,
        optimizer: torch.optim.Optimizer | None = None,
        skipped: bool | Tensor = False,
        skip_reason: SkipReason | None = None,
    ) -> ClipEvent:
        """Return the event of a clip, for monitors and other listeners.

        Args:
            decision: The decision on the gradients.
            result: The result of the clip.
            optimizer: The optimizer whose step is running.
            skipped: Whether that step is skipped.
            skip_reason: The reason, if it is skipped.
        """
        norms = result.tensor_norms if self.orders() == {2.0} else None
        numbers = result.threshold, result.norm, result.coefficient, norms
        order = float(getattr(self, "norm_type", 2.0))
        return ClipEvent(
            rule_of(self), decision.gradients.parameters, *numbers, optimizer, skipped, order, skip_reason,
        )  # fmt: skip

    def learn(self, parameters: Parameters) -> None:
        """Read all parameters before their first `decide`: a module carries more information than its gradients.

        `Clipper.__call__` does this on each call, a `Guard` when its optimizer gets new parameters. Most rules do
        nothing here.

        Args:
            parameters: The module if there is one, else tensors or ``(name, tensor)`` pairs; no exhausted generator.
        """
        del parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during training; empty for a rule without state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; training continues as if it had not been interrupted."""
        del state_dict


def _typed(value: Any) -> str:
    """Return ``value`` as Python source code."""
    if isinstance(value, Tensor) and value.numel() == 1:
        dtype = "" if value.dtype is torch.float32 else f", dtype={value.dtype}"
        device = "" if value.is_cpu else f", device={str(value.device)!r}"
        return f"torch.tensor({_typed(value.item())}{dtype}{device})"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def load_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Load a state into each object; if one object refuses its state, all objects keep their former state.

    Args:
        pairs: Objects with ``state_dict`` and ``load_state_dict``, each with its new state.
    """
    before = [(taker, taker.state_dict()) for taker, _ in pairs]
    try:
        for taker, state in pairs:
            taker.load_state_dict(state)
    except Exception:
        for taker, state in before:
            taker.load_state_dict(state)
        raise


def choice(numbers: Sequence[int]) -> str:
    """Return a hash that differs between choices; ``numbers`` has an entry for each parameter, such as its group."""
    return f"choice {crc32(repr(numbers).encode()):08x} of parameters"


class ListedParameters(list[tuple[str, Tensor]]):
    """The parameters of all pipeline stages by name, with an empty tensor for those of other stages.

    Attributes:
        module: The module that holds this stage's parameters, if known.
    """

    def __init__(self, grads: Gradients, source: object) -> None:
        super().__init__(zip(grads.plain_names(), grads.parameters, strict=True))
        self.module = source if isinstance(source, nn.Module) else None


def describe(
    grads: Gradients,
    norms: Tensor,
    coefficient: Tensor,
    clipped: Tensor,
    *,
    order: float = 2.0,
    norm: Tensor | None = None,
    threshold: float | Tensor | None = None,
    locked_in: Tensor | None = None,
    group_norms: Mapping[str, Tensor] | None = None,
) -> ClipResult:
    """Return the result of a clip from the norms that `norms_of` measured.

    Args:
        grads: The gradients.
        norms: The result of `norms_of`, with the same ``order``.
        coefficient: The norm after the clip over the norm before, 0-dim.
        clipped: Whether the clip binds, 0-dim bool.
        order: The order of the norms.
        norm: The `total_of` the norms, if the rule has computed it already.
        threshold: The rule's threshold.
        locked_in: The verdict of `LockIn.follow`.
        group_norms: The norm of each group.

    Returns:
        The result, for the clipper's caller and for monitors.

    Example:
        >>> import gradguard as gg, torch
        >>> from gradguard.rules import Clipper, Decision, describe, norms_of
        >>> class HalveLarge(Clipper):
        ...     def decide(self, grads, scale=1.0):
        ...         norms = norms_of(grads, scale)
        ...         half = torch.where(norms.max() > 1, 0.5, 1.0).to(norms)
        ...         return Decision(grads, describe(grads, norms, half, half < 1), half)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> float(HalveLarge()([weight]).norm), weight.grad
        (5.0, tensor([1.5000, 2.0000]))
    """
    if norm is None:
        norm = total_of(norms, order)
    if threshold is not None and not isinstance(threshold, Tensor):
        threshold = torch.full_like(norm, threshold)
    return ClipResult(
        norm=norm.to(public_dtype(grads.gradients)),
        coefficient=coefficient,
        clipped=clipped,
        nonfinite=~(norm < math.inf),
        tensor_norms=norms,
        names=grads.plain_names(),
        threshold=threshold,
        locked_in=locked_in,
        group_norms=group_norms,
    )

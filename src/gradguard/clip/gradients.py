"""Collect the gradients of ``parameters`` as users pass them, with names, and measure their norms."""

import types
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gradguard.distributed.engines.megatron import refuse_main_gradients
from gradguard.distributed.norm_plan import (
    called,
    first_places,
    plan_for,
    plan_for_gradients,
    present_gradients,
)
from gradguard.distributed.placements import any_sharded, check_alike, is_laid_out_as, is_sharded, local_part, specs_of
from gradguard.distributed.processes import rank_and_size
from gradguard.distributed.reduction import NormReduction
from gradguard.distributed.reduction_group import ONE_STAGE, Stages, several_processes
from gradguard.distributed.settings import Setting
from gradguard.distributed.wrappers import check_wrappers, named_parameters
from gradguard.errors import DistributedError, InvalidTypeError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.tensors.layout import are_readable, move
from gradguard.tensors.nonfinite import refuse_nonfinite
from gradguard.tensors.norms import norm_of_norms, tensor_norms, total_norm
from gradguard.tensors.tensor_admission import check_admitted, refuse_others

if TYPE_CHECKING:
    from gradguard.clip.reach import Reach

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]
"""One tensor, a module, an iterable of tensors or of ``(name, tensor)`` pairs, or a mapping from name to tensor."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Parameters that have a gradient, each once.

    If they are sharded, these are all parameters, in the same order on every rank, and ``gradients`` are this rank's
    shards: an empty tensor where the rank holds nothing.

    Attributes:
        parameters: The parameters.
        gradients: Their gradients.
        positions: The position of each in the user's list.
        names: The names of all entries in the user's list, or None without names.
        reduction: How the shards' norms are reduced over ranks; None if every rank holds whole gradients.
        reach: How far the optimizer's step moves the weights for each unit of a gradient, if known.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    positions: Sequence[int]
    names: Sequence[str] | None
    reduction: NormReduction | None = field(default=None, kw_only=True)
    reach: "Reach | None" = field(default=None, kw_only=True)

    def name(self, index: int) -> str:
        """Return the name of the ``index``-th gradient for a message."""
        if self.names is not None:
            return f"`{self.names[self.positions[index]]}`"
        gradient = self.gradients[index]
        shape = "nested" if gradient.is_nested else tuple(gradient.shape)
        return f"parameter {self.positions[index]} (shape {shape}, no name: pass model.named_parameters())"

    def added_up(self, norms: Tensor, order: float = 2.0) -> Tensor:
        """Return the norms of whole tensors from the norms of this rank's shards: ``[len(gradients)]``."""
        return norms if self.reduction is None else self.reduction.add_up((norms, order))[0]

    def plain_names(self) -> tuple[str, ...]:
        """Return the name of each gradient, or its position if the user gave no names."""
        names = self.names
        return tuple(map(str, self.positions)) if names is None else tuple([names[i] for i in self.positions])


def module_of(parameters: Parameters) -> nn.Module | None:
    """Return ``parameters`` if it is a module, else None."""
    return parameters if isinstance(parameters, nn.Module) else None


def gradients_of(
    names: Sequence[str] | None,
    tensors: Sequence[Tensor],
    stages: Stages = ONE_STAGE,
    module: nn.Module | None = None,
    call: int = 0,
) -> Gradients:
    """Return the gradients of ``tensors``, each once, in order of first appearance.

    Args:
        names: Their names, or None.
        tensors: The parameters.
        stages: The pipeline stages, if there are any.
        module: The module that holds the parameters, if known: it shows its wrappers.
        call: As for `NormPlan.hold`.

    Raises:
        UnsupportedGradientError: If a gradient cannot be clipped. If norms are reduced over ranks, the reduction raises
            it instead, and all ranks raise.
    """
    planned = plan_for(tensors, names, stages, module)
    if planned is not None:
        plan, tensors, names = planned
        held = plan.hold(tensors, names, call)
        if not any(gradient.numel() for gradient in held.gradients):
            refuse_main_gradients(tensors)
        grads = Gradients(
            held.parameters, held.gradients, range(len(held.gradients)), held.names, reduction=held.reduction
        )
        if call:
            check_admitted(grads.gradients, grads.name, writes=True)
            return grads
        return _admitted_or_refusing(grads, writes=True)
    return _own_parts(names, tensors, module)


def _admitted_or_refusing(grads: Gradients, *, writes: bool) -> Gradients:
    """Return ``grads``; if this rank must refuse them, nothing, with a reduction that refuses on all ranks."""
    try:
        check_admitted(grads.gradients, grads.name, writes=writes)
    except UnsupportedGradientError as error:
        if grads.reduction is None:
            raise
        nothing = [torch.empty(0, device="cpu") for _ in grads.gradients]
        return replace(grads, gradients=nothing, reduction=grads.reduction.refusing(error))
    return grads


def _own_parts(
    names: Sequence[str] | None, tensors: Sequence[Tensor], module: nn.Module | None, call: int = 0
) -> Gradients:
    """Return this rank's part of each gradient, reduced first if its layout differs from its parameter's."""
    positions, kept = present_gradients(tensors, [tensor.grad for tensor in tensors])
    if not kept:
        refuse_main_gradients(tensors)
    if any_sharded(tensors) or any_sharded(kept):
        for i, gradient in zip(positions, kept, strict=True):
            check_alike(gradient, tensors[i], called(names, i))
            if is_sharded(gradient) and not is_laid_out_as(gradient, tensors[i]):
                return gradients_of(names, tensors, module=module, call=call)
        kept = list(map(local_part, kept))
    with_grad = tensors if len(kept) == len(tensors) else [tensors[i] for i in positions]
    grads = Gradients(with_grad, kept, positions, names)
    check_admitted(kept, grads.name, writes=True)
    return grads


def local_gradients(names: Sequence[str] | None, tensors: Sequence[Tensor], module: nn.Module | None) -> Gradients:
    """Return this rank's part of each gradient, for operations on single elements; no communication.

    The exception is a gradient whose layout differs from its parameter's, such as a Partial one: it must be reduced
    first. A rank without that gradient does not take part. The calls are therefore counted, and a rank that arrives
    with another count is refused.

    Args:
        names: The names of the parameters, or None.
        tensors: The parameters.
        module: The module that holds them, if known.
    """
    if several_processes():
        check_wrappers(tensors, None)
    sharded = [tensor for tensor in tensors if is_sharded(tensor)] if any_sharded(tensors) else []
    mesh = next((spec.mesh for spec in specs_of(sharded[:1]) if spec), None)
    if mesh is None:
        return _own_parts(names, tensors, module)
    place = rank_and_size()[0], hash(mesh)
    _local_calls[place] += 1
    return _own_parts(names, tensors, module, _local_calls[place])


_local_calls: Counter[tuple[int, int]] = Counter()
"""How often each rank has called `local_gradients`, by the mesh of the first DTensor; the ranks of a mesh agree."""


def gradients_among(tensors: Parameters, order: float) -> Gradients:
    """Return the gradients in a list that the user passed, each once; skip ``None`` entries.

    Args:
        tensors: The list.
        order: The order of the norms that the caller then measures.

    Raises:
        InvalidTypeError: If a module was passed, which has parameters *and* gradients.
    """
    if isinstance(tensors, nn.Module):
        raise InvalidTypeError(
            "tensors is a module: get_total_norm takes the gradients themselves. "
            "Pass [p.grad for p in model.parameters()], or list(model.parameters()) for the norm of the weights."
        )
    given: Any = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    if isinstance(given, Iterable) and not isinstance(given, Tensor | str):
        given = list(given)
        entries = [e[-1] if isinstance(e, tuple) and e else e for e in given]
        spread = plan_for_gradients([e if isinstance(e, Tensor) else None for e in entries], order)
        if spread is not None:  # other ranks may have a gradient where this rank's entry is None
            named = [str(e[0]) for e in given if isinstance(e, tuple)]
            names = named if len(named) == len(given) else None
            grads = Gradients(spread[0], spread[0], range(len(entries)), names, reduction=spread[1])
            return _admitted_or_refusing(grads, writes=False)
        given = [e for e, entry in zip(given, entries, strict=True) if entry is not None]
    names, values = named_tensors(cast("Parameters", given), "tensors")
    first = first_places(values)
    kept = [values[i] for i in first]
    grads = Gradients(kept, kept, first, names)
    check_admitted(kept, grads.name, writes=False)
    return grads


class refused_by_name:  # noqa: N801 - read as a sentence
    """A block in which an engine's error about a gradient is replaced by one that names the parameter."""

    def __init__(self, grads: Gradients) -> None:
        self._grads = grads

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """If the block failed, check each gradient.

        Raises:
            UnsupportedGradientError: If one of them cannot be clipped.
        """
        if isinstance(error, NotImplementedError | RuntimeError | TypeError) and not isinstance(
            error, NonFiniteGradientError | DistributedError | InvalidTypeError
        ):
            try:
                refuse_others(self._grads.gradients, self._grads.name, frozen=False)
            except UnsupportedGradientError as named:
                raise named from error


def to_clip_by(grads: Gradients, *settings: Setting) -> Gradients:
    """Return ``grads`` with the settings that all ranks must share when they reduce its norm."""
    return grads if grads.reduction is None else replace(grads, reduction=replace(grads.reduction, settings=settings))


@torch.no_grad()
def norms_in(grads: Gradients, order: float = 2.0) -> Tensor:
    """Return the norm of each whole gradient, reduced over ranks: ``[len(grads.gradients)]``, float64."""
    return grads.added_up(tensor_norms(grads.gradients, order), order)


def current_gradients(grads: Gradients) -> Sequence[Tensor]:
    """Return the gradients after a write, which may have replaced a gradient whose elements shared memory."""
    if grads.reduction is not None or grads.parameters is grads.gradients:
        return grads.gradients
    return [g if p.grad is None else p.grad for p, g in zip(grads.parameters, grads.gradients, strict=True)]


def refuse_nonfinite_in(grads: Gradients, norm: Tensor, norms: Tensor | None = None) -> None:
    """Raise if ``norm``, the norm of all gradients, is not finite; ``norms`` are the single ones, if known.

    Raises:
        NonFiniteGradientError: With the names of the gradients, including those whose bad elements other ranks hold.
    """
    if grads.reduction is not None and norms is None and not bool(norm.isfinite()):
        norms = norms_in(grads)
    refuse_nonfinite(norm, grads.gradients, grads.name, norms if grads.reduction is not None else None)


@torch.no_grad()
def norm_in(grads: Gradients, order: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector, reduced over ranks: 0-dim, float64."""
    return (
        total_norm(grads.gradients, order) if grads.reduction is None else norm_of_norms(norms_in(grads, order), order)
    )


def named_tensors(argument: Parameters, what: str) -> tuple[list[str] | None, list[Tensor]]:
    """Return the names (None if there are none) and tensors of ``argument``.

    Args:
        argument: Any of the kinds of `Parameters`.
        what: The argument's name, for messages.

    Raises:
        InvalidTypeError: If the argument has another type.
    """
    if isinstance(argument, Tensor):
        return None, [argument]
    if isinstance(argument, torch.optim.Optimizer):
        raise InvalidTypeError(
            f"{what} is an optimizer: pass [p for group in optimizer.param_groups for p in group['params']]."
        )
    given: Any = argument.items() if isinstance(argument, Mapping) else argument
    if isinstance(argument, nn.Module):
        given = named_parameters(argument, remove_duplicate=False)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidTypeError(_expected(what, argument))
    entries: list[Any] = list(given)
    if not entries and isinstance(argument, types.GeneratorType):
        warnings.warn(
            f"{what} is an exhausted or empty generator, so nothing is clipped. A generator can be used only once: "
            "pass list(model.parameters()), or model itself.",
            stacklevel=5,
        )
    if all(issubclass(kind, Tensor) for kind in set(map(type, entries))):
        return None, entries
    pairs = not isinstance(entries[0], Tensor)
    for index, entry in enumerate(entries):
        match entry:
            case (str(), Tensor()) if pairs:
                pass
            case Tensor() if not pairs:
                pass
            case _:
                raise InvalidTypeError(_expected(f"{what}[{index}]", entry))
    return [name for name, _ in entries], [tensor for _, tensor in entries]


def _expected(what: str, given: object) -> str:
    hint = " Pass group['params'] of each group." if isinstance(given, dict) else ""
    return (
        f"{what} is {type(given).__name__}: expected a module, a tensor, an iterable of tensors or of (name, tensor) "
        f"pairs, or a mapping from name to tensor.{hint}"
    )


@dataclass(frozen=True, slots=True)
class MeasuredGradients(Gradients):
    """Gradients with their norms, so that several rules share one measurement.

    Attributes:
        norms: 2-norm of each gradient as stored in memory, loss scale included; ``[len(gradients)]``.
        others: Norms of other orders, by order, if they were measured too.
        there: Which gradients exist on any rank, bool; None if all do.
    """

    norms: Tensor
    others: Mapping[float, Tensor] = field(default_factory=dict, kw_only=True)
    there: Tensor | None = field(default=None, kw_only=True)

    def is_there(self) -> bool:
        """Tell whether there is any gradient; if reading would be a host sync, whether there may be one."""
        if self.there is None or not are_readable(self.there):
            return len(self.gradients) > 0
        return bool(self.there.any())

    def group(self, places: Sequence[int]) -> "MeasuredGradients":
        """Return the gradients at ``places``, with their norms."""
        parameters, gradients, positions = (
            [one[i] for i in places] for one in (self.parameters, self.gradients, self.positions)
        )
        return replace(
            self,
            parameters=parameters,
            gradients=gradients,
            positions=positions,
            norms=_entries(self.norms, places),
            reduction=None if self.reduction is None else self.reduction.of(places),
            others={order: _entries(norms, places) for order, norms in self.others.items()},
            there=None if self.there is None else _entries(self.there, places),
        )


def with_norms(grads: Gradients, norms: Tensor, **known: Any) -> MeasuredGradients:
    """Return ``grads`` as `MeasuredGradients` with ``norms``; ``known`` are its other fields."""
    lists = grads.parameters, grads.gradients, grads.positions, grads.names
    return MeasuredGradients(*lists, norms, reduction=grads.reduction, reach=grads.reach, **known)


@torch.no_grad()
def measured(grads: Gradients, orders: Iterable[float] = ()) -> MeasuredGradients:
    """Return ``grads`` with its norms, measured now unless they are known.

    Args:
        grads: The gradients.
        orders: Other orders of norms that will be needed. For sharded gradients, the same all-reduce combines them; for
            whole gradients, they are measured when needed.
    """
    if isinstance(grads, MeasuredGradients):
        return grads
    if grads.reduction is None:
        return with_norms(grads, tensor_norms(grads.gradients))
    others = sorted(set(orders) - {2.0})
    (norms, *rest), there = grads.reduction.measure(
        *((tensor_norms(grads.gradients, order), order) for order in (2.0, *others))
    )
    return with_norms(grads, norms, others=dict(zip(others, rest, strict=True)), there=there)


@torch.no_grad()
def norms_of(grads: Gradients, scale: float | Tensor = 1.0, order: float = 2.0) -> Tensor:
    """Return the norm of each gradient without its loss scale: ``[len(grads.gradients)]``, float64, on the device.

    Args:
        grads: The gradients; if `Groups` or `Chain` has measured them already, they are not read again.
        scale: The loss scale of a GradScaler by which they are still multiplied.
        order: The order p of the norm.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norms_of(gradients_of(["weight"], [weight]))
        tensor([5.], dtype=torch.float64)
    """
    norms = None
    if isinstance(grads, MeasuredGradients):
        norms = grads.norms if order == 2 else grads.others.get(order)
    norms = norms_in(grads, order) if norms is None else norms
    if isinstance(scale, Tensor):
        return norms / move(scale.detach(), norms.device, norms.dtype)
    return norms if scale == 1 else norms / scale


@torch.no_grad()
def total_of(norms: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector from the norm of each: 0-dim, no overflow, no underflow.

    Args:
        norms: The result of `norms_of` with the same order.
        order: The order p of the norm.

    Example:
        >>> total_of(torch.tensor([3.0, 4.0]))
        tensor(5.)
    """
    return norm_of_norms(norms, order)


def _entries(vector: Tensor, positions: Sequence[int]) -> Tensor:
    """Return some entries of a vector, without an index tensor, which would be copied to the device."""
    entries = vector.unbind()
    return torch.stack([entries[i] for i in positions]) if positions else vector[:0]

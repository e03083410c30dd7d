"""The gradients that this process holds: summarise them, fill them for a probe, and restore them bit for bit."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.audit.coefficients import Applied
from gradguard.audit.held import HeldPiece, Sketch
from gradguard.distributed.engines import held_apart, placements_by, shard_of
from gradguard.distributed.engines.megatron import claims_to_be_part
from gradguard.distributed.engines.zero import holds_gradients_itself
from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import (
    Placement,
    gradient_of,
    is_sharded,
    local_part,
    placement_of,
)
from gradguard.distributed.redistribute import added_up, part_in_layout_of
from gradguard.distributed.wrappers import named_parameters
from gradguard.errors import InvalidTypeError, UnsupportedGradientError
from gradguard.tensors.sketch import flat_chunks, in_chunks, sketch_of

_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


TASK = "audit a norm"
"""The task that a collective's error message names if a process does not take part."""


class Piece:
    """The gradient of one parameter on this process.

    Args:
        name: The name of the parameter.
        parameter: The parameter, or the object that holds its gradient in an engine.
        shard: The part of the whole gradient, as the layout states it.
        offset: Start of the gradient in a flattened gradient of several parameters; None if it has its own tensor.
    """

    def __init__(self, name: str, parameter: Any, shard: LocalShard, offset: int | None = None) -> None:
        self._names, self._parameters, self._shard, self._offset = [name], [parameter], shard, offset
        self._attribute = "grad" if parameter.grad is not None else "main_grad"
        self._grad: Any = getattr(parameter, self._attribute)
        self._local = self._part_of(self._grad)
        self._before = self._local.detach().clone()
        self._real = self._local.numel() - shard.padding

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Add a tied parameter, which shares this gradient."""
        self._names.append(name)
        self._parameters.append(parameter)

    def held(self, index: int) -> HeldPiece:
        """Summarise the gradient and its weight in a few numbers; a collective if the gradient is Partial."""
        p = self._parameters[0]
        values = self._part_of(added_up(self._grad, TASK)).detach()
        weight = Sketch()
        if isinstance(p, Tensor):  # an engine's holder of a gradient lays out its weight differently
            part = self._part_of(p.detach())
            is_alike = (values.shape, placement_of(self._grad).layout) == (part.shape, placement_of(p).layout)
            weight = summary_of(part) if is_alike else weight
        square = float(torch.linalg.vector_norm(_wide(values).flatten())) ** 2 if values.numel() else 0.0
        dtype = str(self._grad.dtype).removeprefix("torch.")
        shard, placement = self._shard, self._shard.placement
        is_flat_part = placement.replicas == 1 and shard.shape != shard.own and not shard.along
        return HeldPiece(
            tuple(self._names), self._real, square, summary_of(values), weight, dtype,
            tuple(sorted(placement.ranks)), placement.place[0], "sharded" if claims_to_be_part(p) else None, index,
            math.prod(shard.shape) if is_flat_part else None,
        )  # fmt: skip

    def fill(self, value: float) -> None:
        """Set every element of the whole gradient to ``value``; the summands of a Partial gradient add up to it."""
        is_zero = any(operation == "sum" and at > 0 for operation, at in self._shard.reduced)  # one summand holds it
        self._local.fill_(0.0 if is_zero else value)
        if self._real < self._local.numel():
            self._local.flatten()[self._real :].zero_()

    def put_back(self) -> None:
        """Restore the gradient bit for bit, and the tensor object that held it."""
        self._local.copy_(self._before)
        for p in self._parameters:
            if getattr(p, self._attribute, None) is not self._grad:
                setattr(p, self._attribute, self._grad)

    def applied(self, computed: float) -> Applied | None:
        """Return the factor by which the gradient was multiplied since; None if it was zero.

        It is a collective if a Partial gradient was summed meanwhile.

        Args:
            computed: The norm that was computed meanwhile.

        Returns:
            The coefficient and its residual; the coefficient is NaN if the gradient's new layout cannot be compared.
        """
        now = getattr(self._parameters[0], self._attribute, None)
        before = self._before if now is None else part_in_layout_of(now, self._before, self._grad, TASK)
        if before is None:
            return Applied(self._names[0], math.nan, 0.0, 0.0, computed)
        tolerance = 2e-2 if before.dtype in (torch.float16, torch.bfloat16) else 1e-4
        before = _wide(before).flatten()
        square = float(before.abs().square().sum()) if before.numel() else 0.0
        if not square:
            return None
        after = torch.zeros_like(before) if now is None else _wide(self._part_of(now)).flatten()
        coefficient = float(torch.vdot(before, after).real) / square
        residual = float(torch.linalg.vector_norm(after - coefficient * before)) / math.sqrt(square)
        return Applied(self._names[0], coefficient, residual, tolerance, computed)

    def _part_of(self, tensor: Any) -> Tensor:
        """Return this process' part of the piece in a parameter or its gradient."""
        local = local_part(tensor)
        return local if self._offset is None else local.view(-1)[self._offset :][: math.prod(self._shard.own)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def pieces_of(models: Sequence[nn.Module], wanted: Collection[int] | None = None) -> list[Piece]:
    """Return the pieces of the gradients of ``models`` that this process holds.

    Args:
        models: The modules; for DeepSpeed the engine.
        wanted: The ids of the parameters to include; None for all.

    Raises:
        UnsupportedGradientError: If a gradient is sparse, has another dtype, or shares memory with itself.
    """
    found: dict[tuple, Piece] = {}
    for number, model in enumerate(models):
        front = f"{number}." if len(models) > 1 else ""
        held: list[Any] = held_apart(model)
        known = dict[int, Placement]()
        if not holds_gradients_itself(model):
            apart = {id(one.holder) for one in held}
            named = [one for one in named_parameters(model, remove_duplicate=False) if id(one[1]) not in apart]
            known = placements_by([p for _, p in named], model, lambda engine: engine.is_certain)
            held += [(*one, None, None) for one in named]
        for name, holder, shard, offset in held:
            grad: Any = gradient_of(holder)
            if grad is None or (wanted is not None and id(holder) not in wanted):
                continue
            _check(grad, name)
            if shard is None:
                placement = known.get(id(holder), placement_of(grad))
                shard = replace(shard_of(grad if is_sharded(grad) else holder), placement=placement)
            elif not math.prod(shard.own):
                continue
            local = local_part(grad)
            key = (local.data_ptr(), offset, local.numel()) if local.numel() else (id(holder), 0)
            if key in found:
                found[key].add(front + name, holder)
            else:
                found[key] = Piece(front + name, holder, shard, offset)
    return list(found.values())


def _check(grad: Tensor, name: str) -> None:
    local = local_part(grad)
    if local.layout is not torch.strided:
        raise UnsupportedGradientError(
            f"the gradient of {name} is sparse: expected dense gradients, whose elements a probe can fill. Use "
            "Embedding(sparse=False) while the norm is audited."
        )
    if local.dtype not in _KINDS:
        raise UnsupportedGradientError(
            f"the gradient of {name} is {local.dtype}: expected float16, bfloat16, float32, float64, complex64 or "
            "complex128."
        )
    if local.numel() and 0 in [s for s, n in zip(local.stride(), local.shape, strict=True) if n > 1]:
        raise UnsupportedGradientError(
            f"elements of the gradient of {name} share memory, so a probe cannot write it: copy it to its own memory "
            "with p.grad = p.grad.contiguous()."
        )
    reduce_ops = {operation for operation, _ in shard_of(grad).reduced}
    if not reduce_ops <= {"sum", "avg", "max", "min"}:
        raise UnsupportedGradientError(f"the gradient of {name} is Partial({reduce_ops}): expected a sum.")


def modules_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules to audit as a list.

    Raises:
        InvalidTypeError: If ``model`` is neither a module nor a non-empty iterable of modules.
    """
    several = model if isinstance(model, Iterable) and not isinstance(model, nn.Module) else [model]
    models: list[nn.Module] = [*several]
    wrong = [m for m in models if not isinstance(m, nn.Module)]
    if wrong or not models:
        came = type(wrong[0]).__name__ if wrong else "an empty list"
        raise InvalidTypeError(
            f"model is {came}: expected a torch.nn.Module, or a list of them such as pipeline stages."
        )
    return models


@torch.no_grad()
def summary_of(tensor: Tensor) -> Sketch:
    """Summarise a tensor: its mean, and the sketch of the tensor minus its mean."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.detach().flatten()
    if not flat.numel() or float(flat.min()) == float(flat.max()):
        return Sketch(float(flat[0]) if flat.numel() else 0.0)
    mean = float(flat.sum(dtype=torch.float64)) / flat.numel()
    square = sum(float((part.double() - mean).square().sum()) for _, part in flat_chunks(flat))
    sums = sketch_of(((part.double() - mean, places) for part, places in in_chunks(flat)), flat.device)
    return Sketch(mean, math.sqrt(square), tuple((sums / math.sqrt(len(sums))).tolist()))

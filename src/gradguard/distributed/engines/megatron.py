"""Megatron-core's parameters: plain tensors, whose attributes and process groups show which part of a whole they are.

==============================  ====================================================================================
attribute, set by Megatron      meaning
==============================  ====================================================================================
``tensor_model_parallel``       the tensor is a part of a whole; every rank of the tensor-parallel group holds another
``partition_dim``               along this dimension
``partition_stride``            in this many blocks, each cut into as many pieces as there are ranks
``allreduce`` is False          the tensor is of an expert: ranks of the expert-parallel group hold other experts
``shared_embedding``            the first and the last pipeline stage hold the same weight
==============================  ====================================================================================

Everything else is the same on each rank of the tensor-parallel group, once Megatron has finished the gradients.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.engines.engine import Engine
from gradguard.distributed.local_shard import LocalShard, cut_along
from gradguard.distributed.placements import WHOLE, Placement, is_sharded
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.torch_private import process_groups

PARTS, EXPERTS = "a part of Megatron's tensor parallelism", "an expert of Megatron's"

_placements: dict[tuple[frozenset[int], str], Placement] = {}

CLIP_BY_GIVEN_NORM = "megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"
"""Megatron-core's clip by a given norm: its module, and its name there."""


def megatron_state() -> Any:
    """Return Megatron-core's module of process groups; None if the program has not initialized it."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


class Megatron(Engine):
    """Megatron-core's tensor and expert parallelism. An audit of norms treats its attributes as a claim."""

    is_certain = False

    def placements(self, tensors: Sequence[Tensor], module: nn.Module | None = None) -> dict[int, Placement]:
        """Return, by id, the placements of those ``tensors`` of which other ranks hold other parts."""
        state = megatron_state()
        if state is None:
            return {}
        found = {}
        for tensor in tensors:
            if _is_of_expert(tensor):
                group, layout = state.get_expert_tensor_and_model_parallel_group(), EXPERTS
            elif _is_part(tensor):
                group, layout = state.get_tensor_model_parallel_group(), PARTS
            else:
                continue
            ranks = frozenset(process_groups()[group])
            if len(ranks) > 1 and not is_sharded(tensor):
                found[id(tensor)] = _placements.setdefault((ranks, layout), Placement(None, ranks, 1, layout))
        return found

    def shard_of(self, tensor: Any) -> LocalShard | None:
        """Return the part of a parameter that tensor parallelism has sharded."""
        state = megatron_state()
        if state is None or is_sharded(tensor) or not _is_part(tensor):
            return None
        kind = "expert_tensor_parallel" if _is_of_expert(tensor) else "tensor_model_parallel"
        ranks, rank = (getattr(state, f"get_{kind}_{what}")() for what in ("world_size", "rank"))
        if ranks == 1:
            return None
        shape, along = list(tensor.shape), [None] * tensor.dim()
        shape[tensor.partition_dim] *= ranks
        pieces = torch.arange(shape[tensor.partition_dim], device="cpu").chunk(ranks * tensor.partition_stride)
        along[tensor.partition_dim] = torch.cat(pieces[rank::ranks])
        return cut_along(shape, along, self.placements([tensor]).get(id(tensor), WHOLE), tensor.shape)


def refuse_unnamed_megatron_stages(tensors: Sequence[Tensor], stages: Any) -> None:
    """Raise if Megatron has pipeline stages, or weights on two of them, that the call does not name.

    Raises:
        InvalidValueError: If there are such stages or weights.
    """
    state = megatron_state()
    if state is None or state.get_pipeline_model_parallel_world_size() == 1:
        return
    if stages.group is None:
        raise InvalidValueError(
            "Megatron has pipeline stages, and the norm would be that of this stage alone: pass "
            "process_group=parallel_state.get_pipeline_model_parallel_group()."
        )
    known = set(map(id, stages.shared.values()))
    if any(getattr(t, "shared_embedding", False) and id(t) not in known for t in tensors):
        raise InvalidValueError(
            "the first and the last pipeline stage both hold the embedding, which would count twice: pass "
            "shared={'embedding': weight} on both."
        )


def refuse_megatron_gradients() -> None:
    """Raise if Megatron shards parameters: the attributes are on parameters, not on their gradients.

    Raises:
        UnsupportedGradientError: If it does.
    """
    state = megatron_state()
    if state is None:
        return
    groups = state.get_tensor_model_parallel_group(), state.get_expert_tensor_and_model_parallel_group()
    if any(len(process_groups()[group]) > 1 for group in groups):
        raise UnsupportedGradientError(
            "Megatron spreads parameters over processes, and gradients alone do not show which parts they are: "
            'clip_grad_norm_(model, float("inf")) measures all gradients and writes nothing.'
        )


def refuse_parts(parameters: Iterable[Tensor], what: str) -> None:
    """Raise if Megatron shards one of ``parameters``: ``what`` needs whole parameters.

    Raises:
        UnsupportedGradientError: If it does.
    """
    if Megatron().placements(list(parameters)):
        raise UnsupportedGradientError(
            f"{what} needs whole parameters, but Megatron has spread some of these over processes: expected a "
            "tensor-parallel size and an expert-parallel size of 1, or fully_shard(model)."
        )


def refuse_main_gradients(parameters: Sequence[Any]) -> None:
    """Raise if no parameter has a gradient in ``grad``, and one has Megatron's ``main_grad``.

    Raises:
        UnsupportedGradientError: If so, because nothing would be clipped.
    """
    if any(getattr(p, "main_grad", None) is not None for p in parameters):
        raise UnsupportedGradientError(
            "no parameter has a gradient in .grad: Megatron's DistributedDataParallel keeps them in .main_grad, and "
            "its optimizer clips them (clip_grad= in OptimizerConfig). Check that norm with gg.audit_norm."
        )


def refuse_experts(tensors: Sequence[Tensor], what: str) -> None:
    """Raise if one of ``tensors`` belongs to an expert: ``what`` needs the norm of each parameter separately.

    Raises:
        UnsupportedGradientError: If one does, because experts on several ranks share a name.
    """
    if any(p.layout == EXPERTS for p in Megatron().placements(tensors).values()):
        raise UnsupportedGradientError(
            f"{what} needs each parameter by itself, and Megatron's ranks hold other experts under the same names: use "
            "a norm of all, such as ClipByGlobalNorm."
        )


def claims_to_be_part(tensor: Tensor) -> bool:
    """Tell whether Megatron's attributes say that other ranks hold other parts, or other experts."""
    return _is_part(tensor) or _is_of_expert(tensor)


def _is_part(tensor: Tensor) -> bool:
    return getattr(tensor, "tensor_model_parallel", False)


def _is_of_expert(tensor: Tensor) -> bool:
    return getattr(tensor, "allreduce", True) is False

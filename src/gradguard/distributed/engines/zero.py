"""DeepSpeed's ZeRO, stages 1 to 3, which stores gradients outside ``.grad``; this module never imports DeepSpeed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradguard.distributed.engines.engine import Engine, Held
from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import Placement
from gradguard.errors import UnsupportedGradientError


@dataclass(eq=False, slots=True)
class GradientHolder:
    """Holds this rank's part of a gradient, in place of its parameter.

    Attributes:
        grad: The part: the engine's own tensor.
        shape: None, because the shape of the weight says nothing about the part.
    """

    grad: Tensor
    shape: None = None


class ZeRO(Engine):
    """DeepSpeed's ZeRO."""

    def held_apart(self, model: nn.Module) -> list[Held]:
        """Return this rank's parts of the gradients, as ZeRO keeps them between backward and step.

        Raises:
            UnsupportedGradientError: If there are none, or they are offloaded to the host.
        """
        return _parts_of(model) if holds_gradients_itself(model) else []


STEP = "deepspeed.runtime.engine", "DeepSpeedEngine._take_model_step"
"""The step of DeepSpeed's engines: its module, and its name there."""

CLIP_OF_FLOAT32 = "deepspeed.runtime.engine", "clip_grad_norm_"
"""DeepSpeed's clip in float32 without ZeRO: the module that looks it up at each step, and its name there."""

CLIP_OF_COPIES = "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer.unscale_and_clip_grads"
"""DeepSpeed's clip in float16 without ZeRO, of copies of the gradients; its norm argument includes the loss scale."""


def holds_gradients_itself(model: nn.Module) -> bool:
    """Tell whether ``model`` is a DeepSpeed engine whose gradients ZeRO stores."""
    return hasattr(getattr(model, "optimizer", None), "averaged_gradients")


def norm_of_engine(model: nn.Module) -> Callable[[], Any]:
    """Return the function by which ZeRO computes the norm that it clips by, loss scale included."""
    zero = model.optimizer
    if not hasattr(zero, "_get_norm_groups"):
        return zero.scaled_global_norm  # type: ignore[union-attr]
    # Stage 3 has no function for the norm of all groups: it computes the root of the sum of their squares in place.
    return lambda: torch.stack([torch.as_tensor(n).double() for n in zero._get_norm_groups()]).norm()  # type: ignore[union-attr, operator]


def clip_of_engine(engine: Any) -> tuple[Callable[[], Any], float | None, float]:
    """Return ZeRO's clip as a function that returns the norm, the threshold if known, and the loss scale.

    In stage 3, or with a loss scale, ZeRO clips copies; the function then only measures.
    """
    zero, norm = engine.optimizer, norm_of_engine(engine)
    scale, limit = float(zero.loss_scale), float(engine.gradient_clipping() or 0.0)
    if hasattr(zero, "_get_norm_groups") or scale != 1.0 or not limit:
        return (lambda: norm() / scale), None, scale

    def clip() -> Any:
        found = norm()
        zero.unscale_and_clip_grads([one for tensors in zero.averaged_gradients.values() for one in tensors], found)
        return found

    return clip, limit, scale


def _parts_of(engine: Any) -> list[Held]:
    zero, names = engine.optimizer, {id(p): name for name, p in engine.module.named_parameters()}
    offloaded = bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))
    kept = [] if offloaded else [tensors for tensors in zero.averaged_gradients.values() if tensors is not None]
    if not kept:
        raise UnsupportedGradientError(
            "ZeRO holds no gradients here: expected those of engine.backward(loss) before engine.step(), at a boundary "
            "of accumulation, and not offloaded to the host."
        )
    return [one for group, tensors in zero.averaged_gradients.items() for one in _of_group(zero, group, tensors, names)]


def _of_group(zero: Any, group: int, tensors: Sequence[Tensor], names: dict[int, str]) -> list[Held]:
    third = hasattr(zero, "_get_norm_groups")
    params = zero.fp16_groups[group] if third else zero.params_in_partition[group]
    ranks = dist.get_process_group_ranks(zero.dp_process_group if third else zero.real_dp_process_group[group])
    real = [t for t in tensors if not getattr(t, "_zero_padding", False)]
    if len(real) != len(params):
        raise UnsupportedGradientError(
            f"ZeRO holds {len(real)} gradients for {len(params)} parameters of group {group}: expected as many."
        )
    placement, found = Placement(None, frozenset(ranks), 1, "ZeRO"), []
    for p, tensor in zip(params, real, strict=True):
        whole = int(p.ds_numel if third else p.numel())
        before = ranks.index(dist.get_rank()) * tensor.numel() if third else 0  # equal shards, the last ones padded
        padding = tensor.numel() - max(0, min(tensor.numel(), whole - before))
        shard = LocalShard((whole,), (tensor.numel(),), padding=padding, placement=placement, is_known=False)
        found.append(Held(names.get(id(p), f"group {group}"), GradientHolder(tensor), shard))
    return found

"""The rule of ``torch.nn.MultiheadAttention``: run its projections and its attention a second time (`layer_replay`)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contributions
from gradguard.per_sample.layers.call import LayerCall, sample_axis, zeros
from gradguard.per_sample.layers.layer_replay import LayerReplay, replayed


class _AttentionArguments(NamedTuple):
    """The arguments of the layer's forward, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def attention(call: LayerCall) -> Contributions:
    """Return the contribution to each wanted parameter of a ``torch.nn.MultiheadAttention``.

    Raises:
        UnsupportedGradientError: If the input is unbatched, the samples are in another dimension than the layer's
            batch, or a second run of the forward returns other outputs.
    """
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    if not call.batch_size:
        return zeros(call)
    arguments = _AttentionArguments(*call.args, **call.kwargs)
    if arguments.query.dim() != 3:
        raise UnsupportedGradientError(
            f"MultiheadAttention got an unbatched query of shape {tuple(arguments.query.shape)}, so it attends between "
            "samples; expected three dimensions. Type query.unsqueeze(0) with batch_first=True."
        )
    first = module.batch_first
    dim = 0 if first else 1
    dimensions = {"query": (arguments.query, dim), "key": (arguments.key, dim), "value": (arguments.value, dim)}
    axis = sample_axis(call, dimensions, f"batch_first={first}")
    repeated = _AttentionCall(module, arguments)
    return replayed(call, axis, repeated.dropout, repeated.run)


class _AttentionCall:
    """One call of the layer, computed with time first: ``[T, rows, E]``.

    Args:
        module: The layer.
        arguments: The arguments of the call.
    """

    def __init__(self, module: nn.MultiheadAttention, arguments: _AttentionArguments) -> None:
        self.module, self.arguments = module, arguments
        self.dropout = module.dropout if module.training else 0.0

    def run(self, replay: LayerReplay) -> list[Tensor]:
        """Return the tensors that the layer returns."""
        module, first = self.module, self.module.batch_first
        query, key, value = self._project(replay)
        rows = query.shape[1]
        if module.bias_k is not None:
            key, value = (
                torch.cat([x, replay.repeated(name, rows)]) for x, name in ((key, "bias_k"), (value, "bias_v"))
            )
        query, key, value = (
            x.reshape(len(x), rows * module.num_heads, module.head_dim).transpose(0, 1) for x in (query, key, value)
        )
        if module.add_zero_attn:
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        mixed, weights = self._mix(query, key, value, self._mask(key.shape[1]))
        mixed = mixed.transpose(0, 1).reshape(-1, rows, module.embed_dim)
        output = replay.linear(mixed, "out_proj.weight", None if module.out_proj.bias is None else "out_proj.bias")
        return [output.transpose(0, 1) if first else output, *weights]

    def _project(self, replay: LayerReplay) -> list[Tensor]:
        """Return queries ``[T, rows, E]``, keys and values ``[S, rows, E]``."""
        module = self.module
        dtype, given = module.out_proj.weight.dtype, self.arguments[:3]
        inputs = [(x.transpose(0, 1) if module.batch_first else x).to(dtype) for x in given]
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        names = ["in_proj_weight"] * 3
        if module.in_proj_weight is None:
            names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        elif all(_same(given[0], x) for x in given[1:]):
            return [*replay.linear(inputs[0], "in_proj_weight", bias).chunk(3, 2)]
        return [replay.linear(x, name, bias, third) for third, (x, name) in enumerate(zip(inputs, names, strict=True))]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the attended values ``[rows * heads, T, d]``, and the attention weights if the call needs them."""
        heads = self.module.num_heads
        if not self.arguments.need_weights:
            if mask is not None:
                mask = mask.unsqueeze(0) if len(mask) == 1 else mask.unflatten(0, (-1, heads))
            query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
            mixed = F.scaled_dot_product_attention(query, key, value, mask, self.dropout, self._only_causal)
            return mixed.flatten(0, 1), []
        scores = (query * math.sqrt(1.0 / query.shape[2])) @ key.mT
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), self.dropout)
        by_head = weights.unflatten(0, (-1, heads))
        return weights @ value, [by_head.mean(1) if self.arguments.average_attn_weights else by_head]

    @property
    def _only_causal(self) -> bool:
        """Whether torch ignores ``attn_mask`` and applies ``is_causal``."""
        a = self.arguments
        return a.is_causal and a.key_padding_mask is None and not a.need_weights

    def _mask(self, length: int) -> Tensor | None:
        """Return both masks as one additive mask, broadcastable to ``[rows * heads, T, length]``; None without any."""
        attention, padding = self.arguments.attn_mask, self.arguments.key_padding_mask
        masks = []
        if attention is not None and not self._only_causal:
            masks.append(attention if attention.dim() == 3 else attention.unsqueeze(0))
        if padding is not None:
            masks.append(padding.repeat_interleave(self.module.num_heads, 0).unsqueeze(1))
        added = [self._added(mask, length) for mask in masks]
        return sum(added[1:], added[0]) if added else None

    def _added(self, mask: Tensor, length: int) -> Tensor:
        """Return an additive mask of ``length`` keys; appended keys are never masked."""
        dtype = self.module.out_proj.weight.dtype
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        return F.pad(mask.to(dtype), (0, length - mask.shape[-1]))


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors, each detached separately, are the same view of the same memory."""
    layouts = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (first, second)]
    return layouts[0] == layouts[1]

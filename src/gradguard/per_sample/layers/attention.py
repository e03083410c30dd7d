"""``torch.nn.MultiheadAttention``, unpacked into its projections and the attention between them.

The attention has no parameters of its own: it is run a second time from the projected queries, keys and values, whose
gradients turn every weight into the weight of a linear map.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contribution, Materialized, Outer, Recomputed, wide
from gradguard.per_sample.layers.call import (
    BatchAxis,
    LayerCall,
    by_sample,
    replaying,
    require_same,
    sample_axis,
    zeros,
)


class _Arguments(NamedTuple):
    """The arguments of the layer's forward, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


class _Projected(NamedTuple):
    """Queries ``[T, rows, E]``, and keys and values ``[S, rows, E]`` with ``bias_k`` and ``bias_v`` appended."""

    query: Tensor
    key: Tensor
    value: Tensor


class _Attention:
    """One call of the layer, with time first: ``[T, rows, E]``.

    Args:
        call: The call.
        module: Its layer.
    """

    def __init__(self, call: LayerCall, module: nn.MultiheadAttention) -> None:
        self.call, self.module = call, module
        self.arguments = _Arguments(*call.args, **call.kwargs)
        dtype, first = module.out_proj.weight.dtype, module.batch_first
        inputs = [self.arguments.query, self.arguments.key, self.arguments.value]
        if inputs[0].dim() != 3:
            raise UnsupportedGradientError(
                f"MultiheadAttention got an unbatched query of shape {tuple(inputs[0].shape)}, so it attends between "
                "samples; expected three dimensions. Type query.unsqueeze(0) with batch_first=True."
            )
        names = {name: (x, 0 if first else 1) for name, x in zip(("query", "key", "value"), inputs, strict=True)}
        self.axis: BatchAxis = sample_axis(call, names, f"batch_first={first}")
        self.self_attention = _same(inputs[0], inputs[1]) and _same(inputs[1], inputs[2])
        self.inputs = [(x.transpose(0, 1) if first else x).to(dtype) for x in inputs]
        self.rows = self.inputs[0].shape[1]
        self.dropout = module.dropout if module.training else 0.0

    def weights(self) -> list[Tensor]:
        """Return the weights of the three projections."""
        packed = self.module.in_proj_weight
        if packed is not None:
            return list(packed.detach().chunk(3))
        separate = self.module.q_proj_weight, self.module.k_proj_weight, self.module.v_proj_weight
        return [weight.detach() for weight in separate]  # type: ignore[union-attr]

    def project(self) -> _Projected:
        """Return the projections as new leaves of the graph."""
        bias = self.module.in_proj_bias
        biases = [None] * 3 if bias is None else list(bias.detach().chunk(3))
        projected = [F.linear(x, w, b) for x, w, b in zip(self.inputs, self.weights(), biases, strict=True)]
        for index, appended in enumerate((self.module.bias_k, self.module.bias_v), 1):
            if appended is not None:
                projected[index] = torch.cat([projected[index], appended.detach().expand(1, self.rows, -1)])
        return _Projected(*(x.detach().contiguous().requires_grad_() for x in projected))

    def attend(self, projected: _Projected) -> tuple[Tensor, Tensor | None]:
        """Return what goes into ``out_proj``, ``[T, rows, E]``, and the attention weights if they were asked for."""
        query, key, value = (self._heads(x) for x in projected)
        if self.module.add_zero_attn:
            key, value = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], 1) for x in (key, value))
        mask = self._mask(key.shape[1])
        if self.arguments.need_weights:
            mixed, weights = self._mix_with_weights(query, key, value, mask)
        else:
            mixed, weights = self._mix(query, key, value, mask), None
        return mixed.transpose(0, 1).reshape(projected.query.shape), weights

    def _heads(self, values: Tensor) -> Tensor:
        """``[T, rows, E]`` as ``[rows * heads, T, E / heads]``."""
        return values.view(len(values), self.rows * self.module.num_heads, self.module.head_dim).transpose(0, 1)

    def _mix_with_weights(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query = query * math.sqrt(1.0 / query.shape[2])
        scores = torch.bmm(query, key.mT) if mask is None else torch.baddbmm(mask, query, key.mT)
        weights = F.dropout(torch.softmax(scores, -1), self.dropout) if self.dropout else torch.softmax(scores, -1)
        by_head = weights.view(self.rows, self.module.num_heads, *weights.shape[1:])
        return torch.bmm(weights, value), by_head.mean(1) if self.arguments.average_attn_weights else by_head

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shape = self.rows, self.module.num_heads
        if mask is not None:
            mask = mask.unsqueeze(0) if len(mask) == 1 else mask.unflatten(0, shape)
        query, key, value = (x.unflatten(0, shape) for x in (query, key, value))
        causal = self._only_causal()
        return F.scaled_dot_product_attention(query, key, value, mask, self.dropout, causal).flatten(0, 1)

    def _only_causal(self) -> bool:
        """Whether torch drops the mask and trusts ``is_causal``."""
        a = self.arguments
        return a.is_causal and a.key_padding_mask is None and not a.need_weights

    def _mask(self, length: int) -> Tensor | None:
        """Both masks as one that is added, broadcastable to ``[rows * heads, T, length]``."""
        attention, padding = self.arguments.attn_mask, self.arguments.key_padding_mask
        if self._only_causal():
            attention = None
        if attention is not None:
            attention = self._added(attention if attention.dim() == 3 else attention.unsqueeze(0), length)
        if padding is None:
            return attention
        padding = self._added(padding, length).repeat_interleave(self.module.num_heads, 0).unsqueeze(1)
        return padding if attention is None else attention + padding

    def _added(self, mask: Tensor, length: int) -> Tensor:
        """A mask that is added; appended keys are never masked."""
        dtype = self.module.out_proj.weight.dtype
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        return F.pad(mask.to(dtype), (0, length - mask.shape[-1]))

    def by_sample(self, values: Tensor) -> Tensor:
        """Return ``[T, rows, d]`` as ``[B, positions, d]``."""
        return by_sample(values, self.axis, self.call.batch_size)


def attention(call: LayerCall) -> dict[str, Contribution]:
    """Return the contribution to each wanted parameter of a ``torch.nn.MultiheadAttention``.

    Raises:
        UnsupportedGradientError: If the input is unbatched, samples lie in another dimension than the layer's batch,
            or the forward could not be repeated.
    """
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    if not call.batch_size:
        return zeros(call)
    repeated = _Attention(call, module)
    with replaying(call, module.out_proj.weight.device, random=repeated.dropout > 0):
        projected = repeated.project()
        mixed, weights = repeated.attend(projected)
        _require_same(repeated, mixed.detach(), weights)
        return _contributions(repeated, projected, mixed, weights)


def _require_same(repeated: _Attention, mixed: Tensor, weights: Tensor | None) -> None:
    """Check the outputs that follow from ``mixed`` against those of the forward."""
    first, out = repeated.module.batch_first, repeated.module.out_proj
    output = F.linear(mixed, out.weight.detach(), None if out.bias is None else out.bias.detach())
    output = output.transpose(0, 1) if first else output
    require_same(repeated.call, [output] if weights is None else [output, weights], [0 if first else 1, 0])


def _contributions(
    repeated: _Attention, projected: _Projected, mixed: Tensor, weights: Tensor | None
) -> dict[str, Contribution]:
    """All wanted parameters, with one backward through the attention itself."""
    call, weight = repeated.call, repeated.module.out_proj.weight.detach()
    grad = torch.zeros_like(mixed)
    if call.grads[0] is not None:
        grad = (call.grads[0].transpose(0, 1) if repeated.module.batch_first else call.grads[0]).to(weight.dtype)
    contributions = _out_projection(repeated, grad, mixed.detach())
    if all(name.startswith("out_proj.") for name in call.wanted):
        return contributions
    reached, grads = [mixed], [grad @ weight]
    if weights is not None and call.grads[1] is not None:
        reached, grads = [mixed, weights], [*grads, call.grads[1].to(weight.dtype)]
    return contributions | _in_projection(repeated, *torch.autograd.grad(reached, list(projected), grads))


def _out_projection(repeated: _Attention, grad: Tensor, mixed: Tensor) -> dict[str, Contribution]:
    contributions: dict[str, Contribution] = {}
    grad = repeated.by_sample(grad)
    if "out_proj.weight" in repeated.call.wanted:
        contributions["out_proj.weight"] = Outer(grad, repeated.by_sample(mixed))
    if "out_proj.bias" in repeated.call.wanted:
        contributions["out_proj.bias"] = Materialized(wide(grad).sum(1))
    return contributions


def _in_projection(repeated: _Attention, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Contribution]:
    """All parameters before the attention, from the gradients of the projections."""
    wanted, contributions = repeated.call.wanted, {}
    length = len(repeated.inputs[1])
    for name, grad in (("bias_k", key), ("bias_v", value)):
        if name in wanted:
            contributions[name] = Materialized(wide(repeated.by_sample(grad[length:])).sum(1)[:, None, None])
    grads = [repeated.by_sample(grad) for grad in (query, key[:length], value[:length])]
    if "in_proj_bias" in wanted:
        contributions["in_proj_bias"] = Materialized(torch.cat([wide(grad).sum(1) for grad in grads], 1))
    inputs = [repeated.by_sample(x) for x in repeated.inputs]
    if "in_proj_weight" in wanted and repeated.self_attention:
        contributions["in_proj_weight"] = Outer(torch.cat(grads, 2), inputs[0])
    elif "in_proj_weight" in wanted:
        contributions["in_proj_weight"] = _stacked([Outer(grad, x) for grad, x in zip(grads, inputs, strict=True)])
    for name, grad, x in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), grads, inputs, strict=True):
        if name in wanted:
            contributions[name] = Outer(grad, x)
    return contributions


def _stacked(blocks: list[Outer]) -> Recomputed:
    """A weight whose blocks of rows act on different inputs."""
    shape = torch.Size((sum(block.shape[0] for block in blocks), blocks[0].shape[1]))
    return Recomputed(
        shape,
        blocks[0].batch_size,
        rows=lambda start, stop: torch.cat([block.rows(start, stop) for block in blocks], 1),
        weighted_sum=lambda factors, bad: torch.cat([block.weighted_sum(factors, bad) for block in blocks]),
    )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two detached tensors are one; each may have been detached on its own."""
    if first is second:
        return True
    layouts = (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
    return layouts and first.data_ptr() == second.data_ptr()

"""Embeddings: each sample adds its output's gradients to the rows of the table that it looked up."""

from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contribution, Rows, wide
from gradguard.per_sample.layers.call import BatchAxis, LayerCall, samples_first
from gradguard.torch_private import largest_in_bags, tree_leaves


def embedding(call: LayerCall) -> dict[str, Contribution]:
    """``torch.nn.Embedding``: row ``ids[i, t]`` gets :math:`G_{it}`; the row at ``padding_idx`` gets nothing.

    Returns:
        The weight's contribution. With ``sparse=True`` its sum is dense all the same.
    """
    module = call.module
    assert isinstance(module, nn.Embedding)
    refuse_coupling(module)
    if "weight" not in call.wanted:
        return {}
    ids, grad = call.input(), call.grad()
    ids = ids.reshape(len(ids), ids.shape[1:].numel()).long()
    values = grad.reshape(*ids.shape, module.embedding_dim)
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx).unsqueeze(2), 0)
    return {"weight": Rows(ids, values, module.weight.shape)}


def embedding_bag(call: LayerCall) -> dict[str, Contribution]:
    """``torch.nn.EmbeddingBag`` of ``[B, T]`` bags: sum (weighted too), mean and max.

    Returns:
        The weight's contribution.

    Raises:
        UnsupportedGradientError: If the bags come as one list with offsets, or samples do not lie in dimension 0.
    """
    module = call.module
    assert isinstance(module, nn.EmbeddingBag)
    refuse_coupling(module)
    raw, axis = _argument(call, "input", 0)
    if not isinstance(raw, Tensor) or raw.dim() != 2 or module.include_last_offset:
        raise UnsupportedGradientError(
            f"EmbeddingBag got ids of shape {tuple(getattr(raw, 'shape', ()))} and "
            f"include_last_offset={module.include_last_offset}; which sample owns which id is known only of bags "
            "[B, T] without offsets. Pad the bags to one length with padding_idx, and leave include_last_offset False."
        )
    if axis is None or axis.dim != 0 or call.grad_axes[0] is None or call.grad_axes[0].dim != 0:
        raise UnsupportedGradientError(
            f"EmbeddingBag takes its samples in dimension 0, [B, T]; here they lie in dimension {axis and axis.dim} "
            "of the ids. Move them there before the layer, with ids.movedim(dim, 0)."
        )
    if "weight" not in call.wanted:
        return {}
    shares = samples_first(_shares(call, module, raw), axis, call.batch_size)
    values = shares * wide(call.grad()).unsqueeze(-2)
    ids = samples_first(raw.long(), axis, call.batch_size)
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
    ids = ids.reshape(len(ids), ids.shape[1:].numel())
    return {"weight": Rows(ids, values.reshape(*ids.shape, module.embedding_dim), module.weight.shape)}


def _shares(call: LayerCall, module: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """What part of a bag's gradient each of its entries gets, ``[N, T, 1]``; of each column for max, ``[N, T, d]``."""
    counted = torch.ones_like(ids, dtype=torch.bool) if module.padding_idx is None else ids != module.padding_idx
    if module.mode == "max":
        return _largest(module, ids)
    if module.mode == "mean":
        # A bag of nothing but padding returns 0 and gives nothing.
        counts = counted.sum(1, keepdim=True).clamp(min=1).to(_dtype(module))
        return counts.reciprocal().expand(ids.shape).unsqueeze(2)
    weights, _ = _argument(call, "per_sample_weights", 2)
    return (counted.to(_dtype(module)) if weights is None else wide(weights)).unsqueeze(2)


def _largest(module: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """Which entry of its bag each column of the output came from; the first where an id is repeated."""
    offsets = torch.arange(0, ids.numel(), max(1, ids.shape[1]), device=ids.device)
    padding = -1 if module.padding_idx is None else module.padding_idx
    taken = largest_in_bags(module.weight.detach(), ids.reshape(-1), offsets, padding)
    match = ids.unsqueeze(2) == taken.unsqueeze(1)
    return (match & (match.cumsum(1) == 1)).to(_dtype(module))


def _dtype(module: nn.EmbeddingBag) -> torch.dtype:
    return torch.float64 if module.weight.dtype is torch.float64 else torch.float32


def _argument(call: LayerCall, name: str, position: int) -> tuple[Any, BatchAxis | None]:
    """The argument of that name, and its batch axis if it is a tensor."""
    value = call.args[position] if len(call.args) > position else call.kwargs.get(name)
    tensors = [leaf for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Tensor)]
    return value, next((axis for leaf, axis in zip(tensors, call.axes, strict=True) if leaf is value), None)


def refuse_coupling(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Check that an embedding does not look at the ids of the whole batch, nor writes into its weights.

    Raises:
        UnsupportedGradientError: If it does: run one by one, samples would still find rows rewritten for others.
    """
    name = type(module).__name__
    if module.scale_grad_by_freq:
        raise UnsupportedGradientError(
            f"{name}(scale_grad_by_freq=True) divides by how often an id occurs in the whole batch, so no sample has a "
            "gradient of its own. Set module.scale_grad_by_freq = False."
        )
    if module.max_norm is not None:
        raise UnsupportedGradientError(
            f"{name}(max_norm={module.max_norm}) rewrites the rows that a batch looks up in its forward, unclipped. "
            "Set module.max_norm = None."
        )

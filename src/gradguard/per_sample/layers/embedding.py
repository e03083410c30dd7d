"""The rules of embeddings: a sample's output gradients add to the rows of the table that it looked up."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contributions, TableRows, wide
from gradguard.per_sample.layers.call import LayerCall, samples_first


def embedding(call: LayerCall) -> Contributions:
    """Return the contribution of a ``torch.nn.Embedding`` with output gradients G.

    :math:`G_{it}` is added to row ``ids[i, t]`` of sample i's gradient; the row at ``padding_idx`` gets nothing.

    Returns:
        The weight's contribution. Its sum is dense even with ``sparse=True``.
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
    return {"weight": TableRows(ids, values, module.weight.shape)}


def embedding_bag(call: LayerCall) -> Contributions:
    """Return the contribution of a ``torch.nn.EmbeddingBag`` of ``[B, T]`` bags: sum (weighted too), mean or max.

    Returns:
        The weight's contribution.

    Raises:
        UnsupportedGradientError: If the bags are one list with offsets, or samples are not in dimension 0.
    """
    module = call.module
    assert isinstance(module, nn.EmbeddingBag)
    refuse_coupling(module)
    arguments = _BagArguments(*call.args, **call.kwargs)
    ids, axis = arguments.input, call.axis_of(arguments.input)
    if ids.dim() != 2 or module.include_last_offset:
        raise UnsupportedGradientError(
            f"EmbeddingBag got ids of shape {tuple(ids.shape)} and "
            f"include_last_offset={module.include_last_offset}; expected bags [B, T] without offsets, where each row "
            "of ids belongs to one sample. Pad the bags to one length with padding_idx, and leave include_last_offset "
            "False."
        )
    grad = call.grads[0]
    assert grad is not None
    if axis is None or axis.dim != 0 or call.grad_axes[0] is None or call.grad_axes[0].dim != 0:
        raise UnsupportedGradientError(
            f"EmbeddingBag expects its samples in dimension 0, [B, T]; here they are in dimension {axis and axis.dim} "
            "of the ids. Move them to dimension 0 before the layer, with ids.movedim(dim, 0)."
        )
    if "weight" not in call.wanted:
        return {}
    values = samples_first(_of_entries(module, arguments, grad), axis, call.batch_size)
    ids = samples_first(ids.long(), axis, call.batch_size)
    ids = ids.reshape(len(ids), ids.shape[1:].numel())
    return {"weight": TableRows(ids, values.reshape(*ids.shape, module.embedding_dim), module.weight.shape)}


class _BagArguments(NamedTuple):
    """The arguments of the forward of an EmbeddingBag, in order."""

    input: Tensor
    offsets: Tensor | None = None
    per_sample_weights: Tensor | None = None


def _of_entries(module: nn.EmbeddingBag, arguments: _BagArguments, grad: Tensor) -> Tensor:
    """Return the gradient of each entry of each bag, ``[N, T, d]``, by a run of the layer with a row for each entry."""
    ids, weights = arguments.input, arguments.per_sample_weights
    own = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    padding = None if module.padding_idx is None else ids.numel()
    if padding is not None:
        own = own.masked_fill(ids == module.padding_idx, padding)
    used = torch.cat([ids.flatten(), ids.new_zeros(1)])
    with torch.enable_grad():
        table = wide(module.weight.detach()[used]).requires_grad_()
        bags = F.embedding_bag(
            own,
            table,
            mode=module.mode,
            per_sample_weights=None if weights is None else wide(weights).to(table.dtype),
            padding_idx=padding,
        )
        (gradient,) = torch.autograd.grad(bags, table, grad.to(bags.dtype))
    return gradient[:-1].view(*ids.shape, module.embedding_dim)


def refuse_coupling(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Check that an embedding does not count the ids of the whole batch, nor write into its weights.

    Raises:
        UnsupportedGradientError: If it does. A loop over samples would not help, because a sample would still read rows
            that were rewritten for other samples.
    """
    name = type(module).__name__
    if module.scale_grad_by_freq:
        raise UnsupportedGradientError(
            f"{name}(scale_grad_by_freq=True) divides by the count of each id in the whole batch, so no sample has a "
            "gradient of its own. Set module.scale_grad_by_freq = False."
        )
    if module.max_norm is not None:
        raise UnsupportedGradientError(
            f"{name}(max_norm={module.max_norm}) rewrites in its forward the rows that a batch looks up, without "
            "clipping. Set module.max_norm = None."
        )

"""What adaptive clipping is made of: the units of each layer, their bounds, and gradients whose rows can be written."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import is_sharded, local_part
from gradguard.errors import UnsupportedGradientError
from gradguard.tensors.layout import coalesce_, move
from gradguard.tensors.units import WHOLE, UnitLayout
from gradguard.torch_private import sparse_indices, sparse_values, transposed_convolutions

_WEIGHTS = ("weight", "parametrizations.weight.original", "parametrizations.weight.original1", "weight_v")
_ROWS = UnitLayout()


def unit_layouts(module: nn.Module) -> dict[int, UnitLayout]:
    """Return, by parameter identity, the units of every parameter that are not what its shape alone would tell."""
    layouts: dict[int, UnitLayout] = {}
    for layer in module.modules():
        # Not `layer.weight`: where the weight is parametrized, reading it computes it, which may change buffers.
        weights = [p for name, p in layer.named_parameters() if name in _WEIGHTS and p.dim() > 1]
        if isinstance(layer, transposed_convolutions()):
            for p in weights:
                if p.shape[1] > 1:  # the gains of weight_norm have the size of one there
                    layouts[id(p)] = UnitLayout(dim=1, groups=layer.groups)
        elif _is_conv1d_of_hugging_face(layer):
            layouts.update((id(p), UnitLayout(dim=1)) for p in weights if p.dim() == 2)  # [in, out]
    return layouts


def _is_conv1d_of_hugging_face(layer: nn.Module) -> bool:
    """Whether ``layer`` is one, or was until `fully_shard` gave it a class of another name."""
    return not isinstance(layer, nn.Conv1d) and any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def layout_of(parameter: Tensor) -> UnitLayout:
    """Return the units that a shape tells: whole scalars and vectors, else the entries of dimension 0."""
    return WHOLE if parameter.dim() <= 1 else _ROWS


def unit_factors(
    gradient_norms: Sequence[Tensor], weight_norms: Sequence[Tensor], threshold: float | Tensor, eps: float
) -> Sequence[Tensor]:
    """Return what to multiply each unit by, for all tensors of a device at once."""
    norms, weights = torch.cat(list(gradient_norms)), torch.cat(list(weight_norms))
    fraction = move(threshold, norms.device) if isinstance(threshold, Tensor) else threshold
    bound = weights.clamp_(min=eps) * fraction
    return torch.where(norms > bound, bound / norms, 1.0).split([n.shape[0] for n in gradient_norms])


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return the positions of ``tensors`` on each device."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    return groups


def rows_in_memory(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor whose units can be written one by one; sparse ones give the rows they hold.

    Raises:
        UnsupportedGradientError: If it is sparse in another way, so that it need not hold whole rows.
    """
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
        coalesce_(gradient)
        return sparse_values(gradient)
    if gradient.layout is not torch.strided:
        raise UnsupportedGradientError(
            f"adaptive clipping needs whole rows: it takes dense gradients and sparse COO ones with one sparse "
            f"dimension (torch.nn.Embedding(sparse=True)), not {gradient.layout} of shape {tuple(gradient.shape)}."
        )
    if 0 in gradient.stride() and gradient.numel() > 1:  # expanded: rows share memory, and may need different factors
        whole = parameter.grad if is_sharded(parameter) and parameter.grad is not None else gradient
        parameter.grad = whole.clone(memory_format=torch.contiguous_format)
        gradient = local_part(parameter.grad)
    return gradient


def rows_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the weights that belong to what `rows_in_memory` returns for ``gradient``."""
    if gradient.layout is torch.sparse_coo and parameter.dim() > 1:
        return parameter.detach().index_select(0, sparse_indices(gradient)[0])
    return parameter.detach()

"""Gradients that hold NaN or infinity: count them, refuse them by name, or set them to 0 on the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradguard.errors import NonFiniteGradientError
from gradguard.tensors.kernels import Blocks
from gradguard.tensors.layout import are_readable, grouped, meeting_device, move, readable_values, writable_values

_NAMED_AT_MOST = 20


def refuse_nonfinite(
    norm: Tensor, tensors: Sequence[Tensor], name: Callable[[int], str], norms: Tensor | None = None
) -> None:
    """Raise if ``norm``, the norm of ``tensors``, is not finite. Reads one value from the device.

    Args:
        norm: 0-dim.
        tensors: The tensors of the norm; read one by one only if it is not finite.
        name: Returns the name of the i-th tensor.
        norms: The norm of each tensor over all ranks, if other ranks hold parts of it.

    Raises:
        NonFiniteGradientError: If the norm is not finite. The message names the tensors, with the number of NaN and
            infinite elements in each.
    """
    if bool(torch.isfinite(norm)):
        return
    each = zip(tensors, count_nonfinite(tensors), strict=True)
    counts = [(name(i), *count, t.numel()) for i, (t, count) in enumerate(each)]
    known = [True] * len(counts) if norms is None else norms.isfinite().tolist()
    bad = [
        f"{name}: {_words(nan, inf, size) if nan or inf else 'in the part of another process'}"
        for (name, nan, inf, size), finite in zip(counts, known, strict=True)
        if nan or inf or not finite
    ]
    if not bad:
        raise NonFiniteGradientError(
            f"the norm of the gradients is {float(norm)}, though every element is finite: it exceeds what "
            f"{norm.dtype} can hold. Nothing was changed."
        )
    if len(bad) > _NAMED_AT_MOST:
        bad = [*bad[:_NAMED_AT_MOST], f"and {len(bad) - _NAMED_AT_MOST} more"]
    lines = "\n  ".join(bad)
    raise NonFiniteGradientError(
        f"gradients are not finite, and nothing was changed:\n  {lines}\n"
        'Find the operation and the batch; nonfinite="zero" goes on without such steps.'
    )


@torch.no_grad()
def zero_if_nonfinite_(norm: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set every element of ``tensors`` to 0 if ``norm`` is not finite, in place and without a host sync."""
    bad = ~torch.isfinite(norm)
    if are_readable(bad) and not bool(bad):
        return
    values = [writable_values(tensor) for tensor in tensors]
    for (device, _), group in grouped(values).items():
        flag = move(bad, device)
        for i in group:
            values[i].masked_fill_(flag, 0)


@torch.no_grad()
def count_nonfinite(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the numbers of NaN and of infinite elements in each tensor; one read of the device for all."""
    if (blocks := Blocks.of(tensors)) is not None:
        return list(zip(*blocks.nonfinite(), strict=True))
    device = meeting_device(tensors)
    values = [readable_values(tensor, modulus=True) for tensor in tensors]
    each = [move(torch.stack([x.isnan().sum(), x.isinf().sum()]), device) for x in values]
    return [(nan, inf) for nan, inf in torch.stack(each).tolist()] if each else []


def _words(nan: int, inf: int, size: int) -> str:
    kinds = [f"{count:,} {kind}" for count, kind in ((nan, "NaN"), (inf, "infinite")) if count]
    if len(kinds) == 1:
        count, kind = kinds[0].split()
        return f"{count} of {size:,} elements {kind}"
    return f"{' and '.join(kinds)} of {size:,} elements"

r"""Compute each sample's own loss from a model's output and the labels: the mean over the sample's own tokens.

.. math:: \ell_i = \frac{1}{T_i} \sum_{t=1}^{T_i} \ell_{it}
"""

import torch.nn.functional as F
from torch import Tensor

from gradguard.errors import UnsupportedGradientError

_IGNORED = -100


def sample_losses(
    logits: Tensor, labels: Tensor, *, shifted: bool = False, problem_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return each sample's mean loss over its own labels, and the number of these labels.

    ==========================  =======================  ==========================================================
    logits                      labels                   loss
    ==========================  =======================  ==========================================================
    ``[B, ..., classes]``       whole ``[B, ...]``       cross entropy, without labels of -100
    ``[B, labels]``             floats ``[B, labels]``   binary cross entropy
    the labels' shape, or       floats                   squared error; also with
    ``[B, 1]`` for ``[B]``                               ``problem_type="regression"`` for any shape and dtype
    ==========================  =======================  ==========================================================

    A sample without a single label has the loss 0.

    Args:
        logits: The output of the model.
        labels: The labels.
        shifted: Logits at position t are for the label at t + 1, as in a causal language model.
        problem_type: ``"regression"``, ``"single_label_classification"``, ``"multi_label_classification"``, or None
            to tell from shapes and dtypes.

    Returns:
        Losses ``[B]``, at least float32, and counts ``[B]``.

    Raises:
        UnsupportedGradientError: If the shapes fit none of these.

    Example:
        >>> import torch
        >>> from gradguard.integrations.sample_losses import sample_losses
        >>> losses, counts = sample_losses(torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [0, -100, -100]]))
        >>> losses.exp().tolist(), counts.tolist()
        ([4.0, 4.0], [3, 1])
    """
    logits = logits if logits.element_size() > 2 else logits.float()
    if shifted and labels.ndim == 2 and labels.shape == logits.shape[:-1]:
        logits, labels = logits[:, :-1], labels[:, 1:]
    whole, one_number = not labels.is_floating_point(), logits.shape == (*labels.shape, 1)
    classes, same = whole and logits.shape[:-1] == labels.shape, logits.shape == labels.shape
    kind = problem_type or "regression"
    if not problem_type:  # the inference of Transformers' own models
        if classes and not (one_number and labels.ndim == 1):
            kind = "single_label_classification"
        elif same and logits.ndim == 2 and logits.shape[1] > 1:
            kind = "multi_label_classification"
    if kind == "single_label_classification" and classes:
        each = F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=_IGNORED, reduction="none")
        counted = (labels != _IGNORED).reshape(len(labels), -1).sum(1)
        return each.reshape(len(labels), -1).sum(1) / counted.clamp(min=1), counted
    if kind in _ERRORS and (one_number or (same and not (whole and problem_type is None))):
        each = _ERRORS[kind](logits.reshape(labels.shape), labels.to(logits.dtype), reduction="none")
        each = each.reshape(len(labels), -1)
        return each.mean(1), labels.new_full((len(labels),), each.shape[1]).long()
    raise UnsupportedGradientError(
        f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)}, {labels.dtype}, "
        f"problem_type={problem_type!r}: no rule computes samples' own losses from these. Pass "
        "loss=function, which returns one loss for each sample."
    )


_ERRORS = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}

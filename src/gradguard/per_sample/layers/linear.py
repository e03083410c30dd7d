"""The rule of linear layers: the weight's per-sample gradient is a sum of outer products over positions."""

from gradguard.per_sample.contributions import (
    Contributions,
    Materialized,
    Outer,
    as_computed,
    sum_positions,
)
from gradguard.per_sample.layers.call import LayerCall, positions


def linear(call: LayerCall) -> Contributions:
    r"""Return the contributions of a ``torch.nn.Linear`` with inputs A and output gradients G.

    The weight's gradient is :math:`g_i = \sum_t G_{it} \otimes A_{it}`, and the bias's :math:`\sum_t G_{it}`.
    """
    grad = positions(call.grad())
    contributions: Contributions = {}
    if "weight" in call.wanted:
        contributions["weight"] = Outer(grad, as_computed(positions(call.input()), grad))
    if "bias" in call.wanted:
        contributions["bias"] = Materialized(sum_positions(grad))
    return contributions


def transposed_linear(call: LayerCall) -> Contributions:
    """Return the contributions of Hugging Face's ``Conv1D``, a linear layer whose weight is ``[in, out]``."""
    contributions = linear(call)
    if isinstance(weight := contributions.get("weight"), Outer):
        contributions["weight"] = Outer(weight.right, weight.left)
    return contributions

"""Linear layers of any leading dimensions: the weight's per-sample gradient is a sum of outer products."""

from gradguard.per_sample.contributions import Contribution, Kept, Outer, wide
from gradguard.per_sample.layers.call import LayerCall, positions


def linear(call: LayerCall) -> dict[str, Contribution]:
    r"""``torch.nn.Linear``: :math:`g_i = \sum_t G_{it} \otimes A_{it}`, and :math:`\sum_t G_{it}` for the bias."""
    grad = positions(call.grad())
    found: dict[str, Contribution] = {}
    if "weight" in call.wanted:
        found["weight"] = Outer(grad, positions(call.input()))
    if "bias" in call.wanted:
        found["bias"] = Kept(wide(grad).sum(1))
    return found


def transposed_linear(call: LayerCall) -> dict[str, Contribution]:
    """Hugging Face's ``Conv1D``, whose weight is ``[in, out]``."""
    found = linear(call)
    if isinstance(weight := found.get("weight"), Outer):
        found["weight"] = Outer(weight.right, weight.left)
    return found

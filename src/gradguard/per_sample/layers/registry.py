"""The table of layers and their rules."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from gradguard.per_sample.contributions import Contributions
from gradguard.per_sample.layers.attention import attention
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.layers.convolution import convolution
from gradguard.per_sample.layers.embedding import embedding, embedding_bag
from gradguard.per_sample.layers.linear import linear, transposed_linear
from gradguard.per_sample.layers.normalization import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from gradguard.per_sample.layers.recurrent import recurrent, recurrent_cell


class LayerRule(NamedTuple):
    """The rule of one kind of layer.

    Attributes:
        contributions: Computes the contributions to the layer's parameters from one call.
        replays: Whether the rule runs the layer's forward again; the call then has the outputs, and with dropout the
            generator's state.
    """

    contributions: Callable[[LayerCall], Contributions]
    replays: bool = False


_LAYERS = {
    linear: [nn.Linear],
    convolution: [
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    ],
    embedding: [nn.Embedding],
    embedding_bag: [nn.EmbeddingBag],
    layer_norm: [nn.LayerNorm],
    rms_norm: [nn.RMSNorm],
    group_norm: [nn.GroupNorm],
    instance_norm: [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
    batch_norm: [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm],
    attention: [nn.MultiheadAttention],
    recurrent: [nn.LSTM, nn.GRU, nn.RNN],
    recurrent_cell: [nn.LSTMCell, nn.GRUCell, nn.RNNCell],
}  # fmt: skip
_REPLAYING = attention, recurrent, recurrent_cell
_RULES = {kind: LayerRule(rule, rule in _REPLAYING) for rule, kinds in _LAYERS.items() for kind in kinds}


def rule_for(module: nn.Module) -> LayerRule | None:
    """Return the rule of ``module``, or None if it has none; torch.func then differentiates its own code.

    A subclass that inherits its base's ``forward`` has the base's rule. A parametrized layer has no rule, because its
    weight is computed from other parameters.
    """
    if hasattr(module, "parametrizations"):
        return None
    kind = type(module)
    if f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D":
        return LayerRule(transposed_linear)
    for base in kind.__mro__:
        if base in _RULES:
            same = kind.forward is base.forward and "forward" not in vars(module)  # type: ignore[attr-defined]
            return _RULES[base] if same else None
    return None

"""The layers and options that every rule is compared on: a rule, how to build its layer, how to build its inputs."""

from collections.abc import Callable

import torch
from torch import nn

from gradguard.per_sample.contributions import Contribution
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.layers.convolution import convolution
from gradguard.per_sample.layers.embedding import embedding, embedding_bag
from gradguard.per_sample.layers.normalization import batch_norm, group_norm, instance_norm, layer_norm, rms_norm

B, T, V = 5, 4, 7
Rule = Callable[[LayerCall], dict[str, Contribution]]


def numbers(*shape: int) -> Callable[[torch.dtype, int], tuple]:
    return lambda dtype, size: (torch.randn(size, *shape, dtype=dtype),)


def ids(*shape: int) -> Callable[[torch.dtype, int], tuple]:
    return lambda dtype, size: (torch.randint(0, V, (size, *shape)),)


def weighted_ids(dtype: torch.dtype, size: int) -> tuple:
    return torch.randint(0, V, (size, T)), None, torch.randn(size, T, dtype=dtype)


SPACES = {1: (9,), 2: (7, 8), 3: (4, 5, 6)}
CONVOLUTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 2},
    "stride, dilation, padding": {"stride": 2, "dilation": 2, "padding": 2},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4},
    "depthwise, stride, dilation, padding": {"groups": 4, "stride": 3, "dilation": 2, "padding": 2},
    "depthwise, uneven, same": {"groups": 4, "padding": "same", "kernel_size": 2},
    "depthwise, circular": {"groups": 4, "padding": 1, "padding_mode": "circular"},
    "kernel of one": {"kernel_size": 1, "stride": 2},
    "valid": {"padding": "valid"},
    "same": {"padding": "same"},
    "same, uneven": {"padding": "same", "kernel_size": 2},
    "same, uneven, dilation, groups": {"padding": "same", "kernel_size": 2, "dilation": 3, "groups": 2},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "reflect, same, uneven": {"padding": "same", "kernel_size": 2, "padding_mode": "reflect"},
    "replicate, stride": {"padding": 2, "padding_mode": "replicate", "stride": 2},
    "circular, groups": {"padding": 1, "padding_mode": "circular", "groups": 2},
    "circular, same": {"padding": "same", "padding_mode": "circular", "dilation": 2, "kernel_size": 2},
    "valid, circular": {"padding": "valid", "padding_mode": "circular"},
}
TRANSPOSED = {
    "plain": {},
    "no bias": {"bias": False},
    "stride, output padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "output padding beyond the stride": {"stride": 1, "dilation": 3, "output_padding": 2},
    "groups, dilation": {"groups": 2, "dilation": 2},
    "stride, groups, padding": {"stride": 3, "groups": 4, "padding": 2},
}
MIXED_SIZES = {
    "sizes differ": (nn.Conv2d, {"kernel_size": (3, 2), "stride": (1, 2), "padding": (0, 1), "dilation": (2, 1)}),
    "same, sizes differ": (nn.Conv2d, {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2)}),
    "reflect, sizes differ": (nn.Conv2d, {"kernel_size": (3, 2), "padding": (2, 1), "padding_mode": "reflect"}),
    "transposed, sizes differ": (
        nn.ConvTranspose2d,
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2)},
    ),
}


def convolution_cases() -> dict[str, tuple]:
    table = {}
    for dims, space in SPACES.items():
        for prefix, options in (("Conv", CONVOLUTIONS), ("ConvTranspose", TRANSPOSED)):
            kind = getattr(nn, f"{prefix}{dims}d")
            for name, option in options.items():
                table[f"{kind.__name__} {name}"] = convolution_case(kind, space, option)
    for name, (kind, option) in MIXED_SIZES.items():
        table[name] = convolution_case(kind, SPACES[2], option)
    # Few positions and large weights: norms come from pairs of positions.
    few = {"kernel_size": 3, "padding": 1}
    table["Conv1d, few positions"] = convolution_case(nn.Conv1d, (3,), few, 16, 12)
    table["Conv2d, few positions"] = convolution_case(nn.Conv2d, (2, 2), few, 16, 24)
    table["Conv2d, few, groups, circular"] = convolution_case(
        nn.Conv2d, (2, 2), {**few, "groups": 2, "padding_mode": "circular"}, 48, 48
    )
    table["Conv3d, few, stride, dilation"] = convolution_case(
        nn.Conv3d, (3, 3, 3), {"kernel_size": 2, "dilation": 2, "stride": 2, "padding": 1}, 40, 40
    )
    patches = {"kernel_size": 2, "stride": 2}
    table["Conv2d, few, patches"] = convolution_case(nn.Conv2d, (5, 4), patches, 16, 24)
    table["Conv1d, few, patches with gaps, padding"] = convolution_case(
        nn.Conv1d, (9,), {**patches, "stride": 3, "padding": 1}, 24, 32
    )
    uneven = {"kernel_size": 2, "padding": "same"}
    table["Conv2d, few, same, uneven"] = convolution_case(nn.Conv2d, (2, 2), uneven, 16, 24)
    table["ConvTranspose2d, few positions"] = convolution_case(
        nn.ConvTranspose2d, (2, 2), {"stride": 2, "padding": 1, "output_padding": 1}, 16, 12
    )
    table["ConvTranspose1d, few, output padding beyond the stride"] = convolution_case(
        nn.ConvTranspose1d, (3,), {"dilation": 3, "output_padding": 2, "groups": 2}, 24, 24
    )
    return table


def convolution_case(kind: type, space: tuple[int, ...], options: dict, inputs: int = 4, outputs: int = 8) -> tuple:
    return convolution, lambda: kind(inputs, outputs, **{"kernel_size": 3, **options}), numbers(inputs, *space)


NORMALISATIONS: dict[str, tuple] = {
    "layer norm": (layer_norm, lambda: nn.LayerNorm(6), numbers(T, 6)),
    "layer norm of one position": (layer_norm, lambda: nn.LayerNorm(6), numbers(6)),
    "layer norm 4-D": (layer_norm, lambda: nn.LayerNorm(6, eps=0.1), numbers(2, 3, 6)),
    "layer norm, two dimensions": (layer_norm, lambda: nn.LayerNorm((3, 4)), numbers(2, 3, 4)),
    "layer norm, two dimensions, no position": (layer_norm, lambda: nn.LayerNorm((3, 4)), numbers(3, 4)),
    "layer norm, no bias": (layer_norm, lambda: nn.LayerNorm(6, bias=False), numbers(T, 6)),
    "layer norm, not affine": (layer_norm, lambda: nn.LayerNorm(6, elementwise_affine=False), numbers(T, 6)),
    "rms norm": (rms_norm, lambda: nn.RMSNorm(6), numbers(T, 6)),
    "rms norm of one position": (rms_norm, lambda: nn.RMSNorm(6), numbers(6)),
    "rms norm, eps": (rms_norm, lambda: nn.RMSNorm(6, eps=0.3), numbers(2, T, 6)),
    "rms norm, two dimensions": (rms_norm, lambda: nn.RMSNorm((2, 3)), numbers(T, 2, 3)),
    "group norm": (group_norm, lambda: nn.GroupNorm(3, 6), numbers(6, 5)),
    "group norm 2-D": (group_norm, lambda: nn.GroupNorm(2, 6), numbers(6)),
    "group norm of images": (group_norm, lambda: nn.GroupNorm(1, 6, eps=0.2), numbers(6, 3, 4)),
    "group norm of volumes": (group_norm, lambda: nn.GroupNorm(6, 6), numbers(6, 2, 3, 2)),
    "instance norm 1d": (instance_norm, lambda: nn.InstanceNorm1d(3, affine=True), numbers(3, 5)),
    "instance norm 2d": (instance_norm, lambda: nn.InstanceNorm2d(3, affine=True, eps=0.2), numbers(3, 4, 2)),
    "instance norm 3d": (instance_norm, lambda: nn.InstanceNorm3d(3, affine=True), numbers(3, 2, 3, 2)),
    "instance norm, not affine": (instance_norm, lambda: nn.InstanceNorm2d(3), numbers(3, 4, 2)),
    "instance norm, evaluation": (
        instance_norm,
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(),
        numbers(3, 4, 2),
    ),
    "instance norm, evaluation without statistics": (
        instance_norm,
        lambda: nn.InstanceNorm1d(3, affine=True).eval(),
        numbers(3, 5),
    ),
    "instance norm, training with statistics": (
        instance_norm,
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        numbers(3, 5),
    ),
    "batch norm 1d": (batch_norm, lambda: nn.BatchNorm1d(3, eps=0.2).eval(), numbers(3)),
    "batch norm of sequences": (batch_norm, lambda: nn.BatchNorm1d(3).eval(), numbers(3, 5)),
    "batch norm 2d": (batch_norm, lambda: nn.BatchNorm2d(3).eval(), numbers(3, 4, 2)),
    "batch norm 3d": (batch_norm, lambda: nn.BatchNorm3d(3).eval(), numbers(3, 2, 3, 2)),
    "batch norm, not affine": (batch_norm, lambda: nn.BatchNorm2d(3, affine=False).eval(), numbers(3, 4, 2)),
}
EMBEDDINGS: dict[str, tuple] = {
    "embedding": (embedding, lambda: nn.Embedding(V, 3), ids(T)),
    "embedding of one id": (embedding, lambda: nn.Embedding(V, 3), ids()),
    "embedding of a grid": (embedding, lambda: nn.Embedding(V, 3), ids(T, 2)),
    "embedding, padding_idx": (embedding, lambda: nn.Embedding(V, 3, padding_idx=2), ids(T, 2)),
    "embedding, padding_idx from the end": (embedding, lambda: nn.Embedding(V, 3, padding_idx=-1), ids(T, 2)),
    "embedding, sparse": (embedding, lambda: nn.Embedding(V, 3, sparse=True), ids(2 * T)),
    "embedding, int32": (embedding, lambda: nn.Embedding(V, 3), lambda dtype, size: (ids(T)(dtype, size)[0].int(),)),
    "bag, sum": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="sum"), ids(T)),
    "bag, weighted": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="sum"), weighted_ids),
    "bag, weighted, padding_idx": (
        embedding_bag,
        lambda: nn.EmbeddingBag(V, 3, mode="sum", padding_idx=1),
        weighted_ids,
    ),
    "bag, sum, padding_idx": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="sum", padding_idx=0), ids(2 * T)),
    "bag, sum, sparse": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="sum", sparse=True), ids(T)),
    "bag, mean": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="mean"), ids(T)),
    "bag, mean, padding_idx": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="mean", padding_idx=2), ids(2 * T)),
    "bag, max": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="max"), ids(2 * T)),
    "bag, max, padding_idx": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="max", padding_idx=4), ids(2 * T)),
}
RULE_CASES = {**convolution_cases(), **NORMALISATIONS, **EMBEDDINGS}

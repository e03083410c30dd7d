"""Many configurations of every rule, for models with layers ``0`` and ``2``, each with a weight and a bias."""

import math

import torch

import gradguard as gg

INF = math.inf

CONFIGURATIONS = {
    "value": lambda: gg.ClipByValue(0.5),
    "value, one side": lambda: gg.ClipByValue(0.5, -0.1),
    "value, 0": lambda: gg.ClipByValue(0.0),
    "norm": lambda: gg.ClipByNorm(0.5),
    "norm, 1": lambda: gg.ClipByNorm(0.5, 1.0),
    "rms": lambda: gg.ClipByRMS(0.05),
    "norm, 3": lambda: gg.ClipByNorm(0.5, 3.0),
    "norm, inf": lambda: gg.ClipByNorm(0.5, INF),
    "global norm": lambda: gg.ClipByGlobalNorm(1.0),
    "global norm, 0.5": lambda: gg.ClipByGlobalNorm(1.0, 0.5),
    "global norm, 1": lambda: gg.ClipByGlobalNorm(1.0, 1.0),
    "global norm, 3": lambda: gg.ClipByGlobalNorm(1.0, 3.0),
    "global norm, 10": lambda: gg.ClipByGlobalNorm(1.0, 10.0),
    "global norm, inf": lambda: gg.ClipByGlobalNorm(0.5, INF),
    "global norm, to 0": lambda: gg.ClipByGlobalNorm(0.0),
    "global norm, measured only": lambda: gg.ClipByGlobalNorm(INF),
    "global norm, a tensor": lambda: gg.ClipByGlobalNorm(torch.tensor(0.7)),
    "adaptive": lambda: gg.ClipAdaptive(0.3),
    "adaptive, to 0": lambda: gg.ClipAdaptive(0.0),
    "adaptive, eps": lambda: gg.ClipAdaptive(0.1, eps=1.0),
    "adaptive, without a layer": lambda: gg.ClipAdaptive(0.3, exclude="2"),
    "adaptive, without biases": lambda: gg.ClipAdaptive(0.3, exclude="*.bias"),
    "median": lambda: gg.ClipByMedian(k=2.0, window=4, warmup=2),
    "median, k = 0": lambda: gg.ClipByMedian(k=0.0, window=4, warmup=1),
    "median, 1": lambda: gg.ClipByMedian(k=1.0, window=4, warmup=2, norm_type=1.0),
    "median, inf": lambda: gg.ClipByMedian(k=1.0, window=4, warmup=2, norm_type=INF),
    "median, ceiling": lambda: gg.ClipByMedian(k=9.0, window=4, warmup=1, floor=0.5, ceiling=1.5),
    "AutoClip": lambda: gg.AutoClip(50.0),
    "AutoClip, window": lambda: gg.AutoClip(30.0, window=2),
    "AutoClip, strict": lambda: gg.AutoClip(30.0, strict_paper=True),
    "ZClip": lambda: gg.ZClip(warmup=2, z_threshold=0.5),
    "ZClip, no ceiling": lambda: gg.ZClip(warmup=2, z_threshold=0.5, ceiling=None),
    "ZClip, mean": lambda: gg.ZClip(warmup=2, z_threshold=0.5, ceiling=None, mode="mean"),
    "ZClip, percentile": lambda: gg.ZClip(warmup=2, z_threshold=0.5, ceiling=None, mode="percentile"),
    "ZClip, harder": lambda: gg.ZClip(warmup=2, z_threshold=0.5, ceiling=None, clip_factor=0.5),
    "ZClip, unmoved": lambda: gg.ZClip(warmup=2, z_threshold=0.5, ceiling=9.0, skip_update_on_spike=True),
    "ZClip, strict": lambda: gg.ZClip(warmup=2, z_threshold=0.5, strict_paper=True),
    "AdaGC": lambda: gg.AdaGC(warmup=2),
    "AdaGC, each by itself": lambda: gg.AdaGC(absolute=INF, relative=1.2, beta=0.5, warmup=2),
    "AdaGC, strict": lambda: gg.AdaGC(warmup=2, strict_paper=True),
    "fraction": lambda: gg.ClipFraction(0.3),
    "fraction, begun": lambda: gg.ClipFraction(0.3, learning_rate=0.5, initial=1.0),
    "fraction, bounded": lambda: gg.ClipFraction(0.3, initial=1.0, floor=0.5, ceiling=2.0),
    "groups": lambda: gg.Groups({"0": gg.ClipByGlobalNorm(0.5, INF), "2.bias": None}, rest=gg.ClipByNorm(0.2, 1.0)),
    "groups that remember": lambda: gg.Groups(
        {"0": gg.ClipByMedian(k=1.0, warmup=2), "2.weight": gg.AdaGC(warmup=2)}, rest=gg.ClipAdaptive(0.1)
    ),
    "chain": lambda: gg.Chain(gg.ClipByValue(0.5), gg.ClipByMedian(k=0.0, warmup=1), gg.ClipByGlobalNorm(0.7)),
    "chain of groups": lambda: gg.Chain(
        gg.Groups({"*.weight": gg.ClipByNorm(0.4)}, rest=None),
        gg.ClipAdaptive(0.2, exclude="0.bias"),
        gg.AutoClip(50.0),
    ),
    "groups of chains": lambda: gg.Groups(
        {"0": gg.Chain(gg.ClipByNorm(0.5, 3.0), gg.ZClip(warmup=2))}, rest=gg.Chain(gg.ClipByValue(0.3), gg.AdaGC())
    ),
}

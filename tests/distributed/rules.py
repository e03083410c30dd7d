"""Every rule, for lists of parameters called ``layer0.weight``, ``layer1.weight`` and so on."""

import math

import gradguard as gg

RULES = {
    "global norm": lambda: gg.ClipByGlobalNorm(2.0),
    "global norm, 1": lambda: gg.ClipByGlobalNorm(20.0, 1.0),
    "global norm, inf": lambda: gg.ClipByGlobalNorm(0.5, math.inf),
    "norm": lambda: gg.ClipByNorm(1.0),
    "rms": lambda: gg.ClipByRMS(0.3),
    "norm, 3": lambda: gg.ClipByNorm(1.0, 3.0),
    "value": lambda: gg.ClipByValue(1.0),
    "value, one side": lambda: gg.ClipByValue(2.0, -0.5),
    "median": lambda: gg.ClipByMedian(k=3.0, window=16, warmup=5),
    "AutoClip": lambda: gg.AutoClip(50.0),
    "AutoClip, window": lambda: gg.AutoClip(30.0, window=8),
    "ZClip": lambda: gg.ZClip(warmup=5, ceiling=None),
    "AdaGC": lambda: gg.AdaGC(warmup=5),
    "fraction": lambda: gg.ClipFraction(0.3),
    "groups": lambda: gg.Groups(
        {
            "layer0": gg.ClipByGlobalNorm(1.0, math.inf),
            "layer1": gg.ClipByMedian(k=3.0, warmup=5),
            "layer2": gg.ClipByNorm(1.0, 1.0),
        },
        rest=gg.AdaGC(warmup=5),
    ),
    "chain": lambda: gg.Chain(gg.ClipByValue(1.5), gg.ClipByMedian(k=3.0, warmup=5), gg.ClipByGlobalNorm(2.0)),
}

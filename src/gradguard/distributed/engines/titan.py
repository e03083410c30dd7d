"""torchtitan, whose tensors are DTensors: the place where its trainers look up their clipping function."""

CLIP = "torchtitan.distributed.utils", "clip_grad_norm_"
"""The module and the name there of a function of parameters, ``max_norm`` and perhaps ``norm_type``."""

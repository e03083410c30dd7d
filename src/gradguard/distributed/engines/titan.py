"""torchtitan, whose tensors are DTensors: where its trainers look up the function that they clip by."""

CLIP = "torchtitan.distributed.utils", "clip_grad_norm_"
"""The module and the name there, of a function of parameters, ``max_norm`` and perhaps ``norm_type``."""

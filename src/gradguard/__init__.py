"""gradguard: gradients you can trust. The public list, nothing else."""

from gradguard.clip.adaptive import clip_grad_adaptive_
from gradguard.clip.functional import (
    apply_gradient_clipping,
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
)
from gradguard.clip.result import ClipResult
from gradguard.errors import (
    GradguardError,
    InvalidTypeError,
    InvalidValueError,
    NonFiniteGradientError,
    RecordError,
    UnsupportedGradientError,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "ClipResult",
    "GradguardError",
    "InvalidTypeError",
    "InvalidValueError",
    "NonFiniteGradientError",
    "RecordError",
    "UnsupportedGradientError",
    "apply_gradient_clipping",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
]

"""gradguard: gradients you can trust. The public list, nothing else."""

from gradguard import private, testing
from gradguard.check.gradcheck import gradcheck
from gradguard.check.report import Finding, GradientReport
from gradguard.check.seed_api import check_grad, get_numerical_gradient
from gradguard.clip.adaptive import clip_grad_adaptive_
from gradguard.clip.adaptive_clipper import ClipAdaptive
from gradguard.clip.chain import Chain
from gradguard.clip.clipper import Clipper, Decision
from gradguard.clip.clippers import ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradguard.clip.dispatch import dispatch_clip_grad
from gradguard.clip.functional import (
    apply_gradient_clipping,
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
)
from gradguard.clip.groups import Groups
from gradguard.clip.guard import Guard
from gradguard.clip.result import ClipResult
from gradguard.clip.thresholds.adagc import AdaGC
from gradguard.clip.thresholds.autoclip import AutoClip
from gradguard.clip.thresholds.base import ThresholdClipper
from gradguard.clip.thresholds.clip_fraction import ClipFraction
from gradguard.clip.thresholds.median import ClipByMedian
from gradguard.clip.thresholds.zclip import ZClip
from gradguard.error_clip.backward import append_backward, minimize
from gradguard.error_clip.base import BaseErrorClip
from gradguard.error_clip.block import error_clip
from gradguard.error_clip.calibration import Calibration, calibrate
from gradguard.error_clip.compiled import attach_error_clip
from gradguard.error_clip.rules import (
    ErrorClipByNorm,
    ErrorClipBySampleNorm,
    ErrorClipByValue,
    ErrorClipNonfinite,
    ErrorClipZeroAbove,
)
from gradguard.error_clip.statistics import ErrorClipStats, FirstNonfinite, OpStatistics
from gradguard.errors import (
    DistributedError,
    FreedGraphError,
    GradguardError,
    GradientCheckError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    NonFiniteGradientError,
    RecordError,
    UnsupportedGradientError,
)
from gradguard.per_sample.clipper import PerSampleGradientClipper
from gradguard.per_sample.clipping_rule import NormClipper
from gradguard.per_sample.norm_clippers import (
    AutoNormClipper,
    FlatNormClipper,
    PerLayerNormClipper,
    PerParameterNormClipper,
    QuantileNormClipper,
)
from gradguard.per_sample.results import ClippedSums, PerSampleStatistics, PreStep
from gradguard.watch.monitor import Monitor
from gradguard.watch.notebook import watch

__version__ = "0.1.0.dev0"

__all__ = [
    "AdaGC",
    "AutoClip",
    "AutoNormClipper",
    "BaseErrorClip",
    "Calibration",
    "Chain",
    "ClipAdaptive",
    "ClipByGlobalNorm",
    "ClipByMedian",
    "ClipByNorm",
    "ClipByValue",
    "ClipFraction",
    "ClipResult",
    "ClippedSums",
    "Clipper",
    "Decision",
    "DistributedError",
    "ErrorClipByNorm",
    "ErrorClipBySampleNorm",
    "ErrorClipByValue",
    "ErrorClipNonfinite",
    "ErrorClipStats",
    "ErrorClipZeroAbove",
    "Finding",
    "FirstNonfinite",
    "FlatNormClipper",
    "FreedGraphError",
    "GradguardError",
    "GradientCheckError",
    "GradientReport",
    "Groups",
    "Guard",
    "InvalidTypeError",
    "InvalidValueError",
    "MissingPackageError",
    "Monitor",
    "NonFiniteGradientError",
    "NormClipper",
    "OpStatistics",
    "PerLayerNormClipper",
    "PerParameterNormClipper",
    "PerSampleGradientClipper",
    "PerSampleStatistics",
    "PreStep",
    "QuantileNormClipper",
    "RecordError",
    "ThresholdClipper",
    "UnsupportedGradientError",
    "ZClip",
    "append_backward",
    "apply_gradient_clipping",
    "attach_error_clip",
    "calibrate",
    "check_grad",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "dispatch_clip_grad",
    "error_clip",
    "get_numerical_gradient",
    "get_total_norm",
    "gradcheck",
    "minimize",
    "private",
    "testing",
    "watch",
]

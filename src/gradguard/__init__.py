"""gradguard: gradients you can trust. The public list, nothing else.

The list is lazy: a name imports its module when it is first used. So `import gradguard` costs next to nothing, clipping
does not load the watcher, and `gradguard tail` does not load torch. Type checkers read the imports below instead.
"""

import importlib

TYPE_CHECKING = False  # as in `typing`, which would take half of the time of this file; type checkers know the name
if TYPE_CHECKING:
    from gradguard import private, testing
    from gradguard.backward_clip.append_backward import append_backward, minimize
    from gradguard.backward_clip.block import error_clip
    from gradguard.backward_clip.calibration import Calibration, calibrate
    from gradguard.backward_clip.compiled import attach_error_clip
    from gradguard.backward_clip.module_callback import ModuleCall, ModuleCallback
    from gradguard.backward_clip.rules import (
        BaseErrorClip,
        ErrorClipByNorm,
        ErrorClipBySampleNorm,
        ErrorClipByValue,
        ErrorClipNonfinite,
        ErrorClipZeroAbove,
    )
    from gradguard.backward_clip.statistics import ErrorClipStats, FirstNonfinite, OpStatistics
    from gradguard.check.gradcheck import gradcheck
    from gradguard.check.report import Finding, GradientReport
    from gradguard.check.seed_api import check_grad, get_numerical_gradient
    from gradguard.clip.adaptive import ClipAdaptive, clip_grad_adaptive_
    from gradguard.clip.clipper import Clipper, ClipResult, Decision
    from gradguard.clip.compose import Chain, Groups
    from gradguard.clip.functional import (
        apply_gradient_clipping,
        clip_grad_norm_,
        clip_grad_value_,
        dispatch_clip_grad,
        get_total_norm,
    )
    from gradguard.clip.guard import Guard
    from gradguard.clip.previous_norm import ClipByPreviousNorm
    from gradguard.clip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue
    from gradguard.clip.thresholds.adagc import AdaGC
    from gradguard.clip.thresholds.autoclip import AutoClip
    from gradguard.clip.thresholds.base import ThresholdClipper
    from gradguard.clip.thresholds.clip_fraction import ClipFraction
    from gradguard.clip.thresholds.median import ClipByMedian
    from gradguard.clip.thresholds.zclip import ZClip
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
    from gradguard.monitoring.observe.monitor import Monitor
    from gradguard.monitoring.observe.watch import watch
    from gradguard.per_sample.clipper import PerSampleGradientClipper
    from gradguard.per_sample.clipping_rule import NormClipper
    from gradguard.per_sample.noise_scale import NoiseEstimate, NoiseScale
    from gradguard.per_sample.norm_clippers import (
        AutoNormClipper,
        FlatNormClipper,
        PerLayerNormClipper,
        PerParameterNormClipper,
        QuantileNormClipper,
    )
    from gradguard.per_sample.results import ClippedSums, PerSampleStatistics, PreStep

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
    "ClipByPreviousNorm",
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
    "ModuleCall",
    "ModuleCallback",
    "Monitor",
    "NoiseEstimate",
    "NoiseScale",
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

_MODULE_OF = {
    "gradcheck": "gradguard.check.gradcheck",
    "Finding": "gradguard.check.report",
    "GradientReport": "gradguard.check.report",
    "check_grad": "gradguard.check.seed_api",
    "get_numerical_gradient": "gradguard.check.seed_api",
    "clip_grad_adaptive_": "gradguard.clip.adaptive",
    "ClipAdaptive": "gradguard.clip.adaptive",
    "Chain": "gradguard.clip.compose",
    "Clipper": "gradguard.clip.clipper",
    "Decision": "gradguard.clip.clipper",
    "ClipByGlobalNorm": "gradguard.clip.rules",
    "ClipByNorm": "gradguard.clip.rules",
    "ClipByValue": "gradguard.clip.rules",
    "dispatch_clip_grad": "gradguard.clip.functional",
    "apply_gradient_clipping": "gradguard.clip.functional",
    "clip_grad_norm_": "gradguard.clip.functional",
    "clip_grad_value_": "gradguard.clip.functional",
    "get_total_norm": "gradguard.clip.functional",
    "Groups": "gradguard.clip.compose",
    "Guard": "gradguard.clip.guard",
    "ClipByPreviousNorm": "gradguard.clip.previous_norm",
    "ClipResult": "gradguard.clip.clipper",
    "AdaGC": "gradguard.clip.thresholds.adagc",
    "AutoClip": "gradguard.clip.thresholds.autoclip",
    "ThresholdClipper": "gradguard.clip.thresholds.base",
    "ClipFraction": "gradguard.clip.thresholds.clip_fraction",
    "ClipByMedian": "gradguard.clip.thresholds.median",
    "ZClip": "gradguard.clip.thresholds.zclip",
    "append_backward": "gradguard.backward_clip.append_backward",
    "minimize": "gradguard.backward_clip.append_backward",
    "BaseErrorClip": "gradguard.backward_clip.rules",
    "error_clip": "gradguard.backward_clip.block",
    "Calibration": "gradguard.backward_clip.calibration",
    "calibrate": "gradguard.backward_clip.calibration",
    "attach_error_clip": "gradguard.backward_clip.compiled",
    "ModuleCall": "gradguard.backward_clip.module_callback",
    "ModuleCallback": "gradguard.backward_clip.module_callback",
    "ErrorClipByNorm": "gradguard.backward_clip.rules",
    "ErrorClipBySampleNorm": "gradguard.backward_clip.rules",
    "ErrorClipByValue": "gradguard.backward_clip.rules",
    "ErrorClipNonfinite": "gradguard.backward_clip.rules",
    "ErrorClipZeroAbove": "gradguard.backward_clip.rules",
    "ErrorClipStats": "gradguard.backward_clip.statistics",
    "FirstNonfinite": "gradguard.backward_clip.statistics",
    "OpStatistics": "gradguard.backward_clip.statistics",
    "DistributedError": "gradguard.errors",
    "FreedGraphError": "gradguard.errors",
    "GradguardError": "gradguard.errors",
    "GradientCheckError": "gradguard.errors",
    "InvalidTypeError": "gradguard.errors",
    "InvalidValueError": "gradguard.errors",
    "MissingPackageError": "gradguard.errors",
    "NonFiniteGradientError": "gradguard.errors",
    "RecordError": "gradguard.errors",
    "UnsupportedGradientError": "gradguard.errors",
    "PerSampleGradientClipper": "gradguard.per_sample.clipper",
    "NormClipper": "gradguard.per_sample.clipping_rule",
    "AutoNormClipper": "gradguard.per_sample.norm_clippers",
    "FlatNormClipper": "gradguard.per_sample.norm_clippers",
    "PerLayerNormClipper": "gradguard.per_sample.norm_clippers",
    "PerParameterNormClipper": "gradguard.per_sample.norm_clippers",
    "QuantileNormClipper": "gradguard.per_sample.norm_clippers",
    "ClippedSums": "gradguard.per_sample.results",
    "NoiseEstimate": "gradguard.per_sample.noise_scale",
    "NoiseScale": "gradguard.per_sample.noise_scale",
    "PerSampleStatistics": "gradguard.per_sample.results",
    "PreStep": "gradguard.per_sample.results",
    "Monitor": "gradguard.monitoring.observe.monitor",
    "watch": "gradguard.monitoring.observe.watch",
    "private": "gradguard.private",
    "testing": "gradguard.testing",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradguard' has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    if module.__name__ == f"gradguard.{name}":
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])

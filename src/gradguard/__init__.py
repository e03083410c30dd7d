"""gradguard: gradients you can trust. The public list, nothing else.

The list is lazy: a name imports its module when it is first used. So `import gradguard` costs next to nothing, clipping
does not load the watcher, and `gradguard tail` does not load torch. Type checkers read the imports below instead.
"""

import importlib
import sys
import types

TYPE_CHECKING = False  # as in `typing`, which would take half of the time of this file; type checkers know the name
if TYPE_CHECKING:
    from gradguard import private, testing
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
    from gradguard.error_clip.backward import append_backward, minimize
    from gradguard.error_clip.base import BaseErrorClip
    from gradguard.error_clip.block import error_clip
    from gradguard.error_clip.calibration import Calibration, calibrate
    from gradguard.error_clip.compiled import attach_error_clip
    from gradguard.error_clip.module_callback import ModuleCall, ModuleCallback
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
    from gradguard.per_sample.noise_scale import NoiseEstimate, NoiseScale
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
    "append_backward": "gradguard.error_clip.backward",
    "minimize": "gradguard.error_clip.backward",
    "BaseErrorClip": "gradguard.error_clip.base",
    "error_clip": "gradguard.error_clip.block",
    "Calibration": "gradguard.error_clip.calibration",
    "calibrate": "gradguard.error_clip.calibration",
    "attach_error_clip": "gradguard.error_clip.compiled",
    "ModuleCall": "gradguard.error_clip.module_callback",
    "ModuleCallback": "gradguard.error_clip.module_callback",
    "ErrorClipByNorm": "gradguard.error_clip.rules",
    "ErrorClipBySampleNorm": "gradguard.error_clip.rules",
    "ErrorClipByValue": "gradguard.error_clip.rules",
    "ErrorClipNonfinite": "gradguard.error_clip.rules",
    "ErrorClipZeroAbove": "gradguard.error_clip.rules",
    "ErrorClipStats": "gradguard.error_clip.statistics",
    "FirstNonfinite": "gradguard.error_clip.statistics",
    "OpStatistics": "gradguard.error_clip.statistics",
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
    "Monitor": "gradguard.watch.monitor",
    "watch": "gradguard.watch.notebook",
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
    if package := sys.modules.get(f"gradguard.{name}"):
        # `watch` and `error_clip` are functions and packages. The name is the function, and with the attributes of the
        # package too, whatever is imported into that later, `import gradguard.watch.record` works as everywhere.
        vars(package).update(vars(value))
        value.__dict__ = vars(package)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _PublicList(types.ModuleType):
    """A module whose names stay what they are when Python has imported a package of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        hides_function = isinstance(value, types.ModuleType) and _MODULE_OF.get(name, value.__name__) != value.__name__
        if not hides_function:
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, ...]:  # as a module is: Ray sends functions whose globals hold this one
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _PublicList

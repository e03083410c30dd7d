"""gradguard: gradients you can trust. The public list, nothing else.

The list is lazy: a name imports its module when it is first used. So `import gradguard` costs next to nothing, clipping
does not load the watcher, and `gradguard tail` does not load torch. Type checkers read the imports below instead.
"""

import importlib

TYPE_CHECKING = False  # as in `typing`, which would take half of the time of this file; type checkers know the name
if TYPE_CHECKING:
    from gradguard import errors, native, private, resilience, rules, testing, types
    from gradguard.audit.norm import audit_norm
    from gradguard.backward_clip.append_backward import append_backward, minimize
    from gradguard.backward_clip.block import error_clip
    from gradguard.backward_clip.calibration import calibrate
    from gradguard.backward_clip.compiled import attach_error_clip
    from gradguard.backward_clip.module_callback import ModuleCallback
    from gradguard.backward_clip.rules import BaseErrorClip, ErrorClipByNorm, ErrorClipByValue
    from gradguard.backward_clip.statistics import ErrorClipStats
    from gradguard.check.gradcheck import gradcheck
    from gradguard.check.seed_api import check_grad, get_numerical_gradient
    from gradguard.clip.adaptive import ClipAdaptive, clip_grad_adaptive_
    from gradguard.clip.compose import Chain, Groups
    from gradguard.clip.functional import apply_gradient_clipping, clip_grad_norm_, clip_grad_value_, get_total_norm
    from gradguard.clip.guard import Guard
    from gradguard.clip.previous_norm import ClipByPreviousNorm
    from gradguard.clip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue
    from gradguard.clip.thresholds.adagc import AdaGC
    from gradguard.clip.thresholds.autoclip import AutoClip
    from gradguard.clip.thresholds.clip_fraction import ClipFraction
    from gradguard.clip.thresholds.median import ClipByMedian
    from gradguard.clip.thresholds.zclip import ZClip
    from gradguard.monitoring.observe.monitor import Monitor
    from gradguard.monitoring.observe.watch import watch
    from gradguard.parity.save import save_gradients
    from gradguard.per_sample.clipper import PerSampleGradientClipper
    from gradguard.per_sample.noise_scale import NoiseScale
    from gradguard.per_sample.norm_clippers import (
        AutoNormClipper,
        FlatNormClipper,
        PerLayerNormClipper,
        PerParameterNormClipper,
        QuantileNormClipper,
    )
    from gradguard.resilience.ladder import Resilience
    from gradguard.resilience.snapshot import Snapshot
    from gradguard.spikes.detector import SpikeDetector
    from gradguard.spikes.skip import SkipSpikes

__version__ = "0.1.0.dev0"

__all__ = [
    "AdaGC",
    "AutoClip",
    "AutoNormClipper",
    "BaseErrorClip",
    "Chain",
    "ClipAdaptive",
    "ClipByGlobalNorm",
    "ClipByMedian",
    "ClipByNorm",
    "ClipByPreviousNorm",
    "ClipByValue",
    "ClipFraction",
    "ErrorClipByNorm",
    "ErrorClipByValue",
    "ErrorClipStats",
    "FlatNormClipper",
    "Groups",
    "Guard",
    "ModuleCallback",
    "Monitor",
    "NoiseScale",
    "PerLayerNormClipper",
    "PerParameterNormClipper",
    "PerSampleGradientClipper",
    "QuantileNormClipper",
    "Resilience",
    "SkipSpikes",
    "Snapshot",
    "SpikeDetector",
    "ZClip",
    "append_backward",
    "apply_gradient_clipping",
    "attach_error_clip",
    "audit_norm",
    "calibrate",
    "check_grad",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "error_clip",
    "errors",
    "get_numerical_gradient",
    "get_total_norm",
    "gradcheck",
    "minimize",
    "native",
    "private",
    "resilience",
    "rules",
    "save_gradients",
    "testing",
    "types",
    "watch",
]

_MODULE_OF = {
    "audit_norm": "gradguard.audit.norm",
    "gradcheck": "gradguard.check.gradcheck",
    "check_grad": "gradguard.check.seed_api",
    "get_numerical_gradient": "gradguard.check.seed_api",
    "clip_grad_adaptive_": "gradguard.clip.adaptive",
    "ClipAdaptive": "gradguard.clip.adaptive",
    "Chain": "gradguard.clip.compose",
    "ClipByGlobalNorm": "gradguard.clip.rules",
    "ClipByNorm": "gradguard.clip.rules",
    "ClipByValue": "gradguard.clip.rules",
    "apply_gradient_clipping": "gradguard.clip.functional",
    "clip_grad_norm_": "gradguard.clip.functional",
    "clip_grad_value_": "gradguard.clip.functional",
    "get_total_norm": "gradguard.clip.functional",
    "Groups": "gradguard.clip.compose",
    "Guard": "gradguard.clip.guard",
    "ClipByPreviousNorm": "gradguard.clip.previous_norm",
    "AdaGC": "gradguard.clip.thresholds.adagc",
    "AutoClip": "gradguard.clip.thresholds.autoclip",
    "ClipFraction": "gradguard.clip.thresholds.clip_fraction",
    "ClipByMedian": "gradguard.clip.thresholds.median",
    "ZClip": "gradguard.clip.thresholds.zclip",
    "append_backward": "gradguard.backward_clip.append_backward",
    "minimize": "gradguard.backward_clip.append_backward",
    "BaseErrorClip": "gradguard.backward_clip.rules",
    "error_clip": "gradguard.backward_clip.block",
    "calibrate": "gradguard.backward_clip.calibration",
    "attach_error_clip": "gradguard.backward_clip.compiled",
    "ModuleCallback": "gradguard.backward_clip.module_callback",
    "ErrorClipByNorm": "gradguard.backward_clip.rules",
    "ErrorClipByValue": "gradguard.backward_clip.rules",
    "ErrorClipStats": "gradguard.backward_clip.statistics",
    "PerSampleGradientClipper": "gradguard.per_sample.clipper",
    "AutoNormClipper": "gradguard.per_sample.norm_clippers",
    "FlatNormClipper": "gradguard.per_sample.norm_clippers",
    "PerLayerNormClipper": "gradguard.per_sample.norm_clippers",
    "PerParameterNormClipper": "gradguard.per_sample.norm_clippers",
    "QuantileNormClipper": "gradguard.per_sample.norm_clippers",
    "SkipSpikes": "gradguard.spikes.skip",
    "SpikeDetector": "gradguard.spikes.detector",
    "save_gradients": "gradguard.parity.save",
    "Resilience": "gradguard.resilience.ladder",
    "Snapshot": "gradguard.resilience.snapshot",
    "NoiseScale": "gradguard.per_sample.noise_scale",
    "Monitor": "gradguard.monitoring.observe.monitor",
    "watch": "gradguard.monitoring.observe.watch",
    "errors": "gradguard.errors",
    "native": "gradguard.native",
    "private": "gradguard.private",
    "resilience": "gradguard.resilience",
    "rules": "gradguard.rules",
    "testing": "gradguard.testing",
    "types": "gradguard.types",
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

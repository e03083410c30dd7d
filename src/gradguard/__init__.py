"""gradguard: gradients you can trust. The public list, nothing else.

The list is lazy: a name imports its module when it is first used. So `import gradguard` costs next to nothing, clipping
does not load the watcher, and `gradguard tail` does not load torch. Type checkers and editors read `__init__.pyi`,
which `python .ci/public_list.py` writes from the table below.
"""

import importlib

__version__ = "0.1.0.dev0"

_PUBLIC = {  # the module that holds them: public names
    "gradguard": "errors native private resilience results rules testing",
    "gradguard.audit.norm": "audit_norm",
    "gradguard.backward_clip.append_backward": "append_backward minimize",
    "gradguard.backward_clip.error_clip_block": "error_clip",
    "gradguard.backward_clip.compiled": "attach_error_clip",
    "gradguard.backward_clip.error_clip_rules": "BaseErrorClip ErrorClipByNorm ErrorClipByValue",
    "gradguard.backward_clip.statistics": "ErrorClipStats",
    "gradguard.check.gradcheck": "gradcheck",
    "gradguard.check.seed_api": "check_grad get_numerical_gradient",
    "gradguard.clip.adaptive": "ClipAdaptive clip_grad_adaptive_",
    "gradguard.clip.compose": "Chain Groups",
    "gradguard.clip.functional": "apply_gradient_clipping clip_grad_norm_ clip_grad_value_ get_total_norm",
    "gradguard.clip.guard": "Guard",
    "gradguard.clip.logits": "LogitWatch",
    "gradguard.clip.qk_clip": "QKClip",
    "gradguard.clip.clip_rules": "ClipByGlobalNorm ClipByNorm ClipByRMS ClipByValue",
    "gradguard.clip.thresholds.adagc": "AdaGC",
    "gradguard.clip.thresholds.autoclip": "AutoClip",
    "gradguard.clip.thresholds.clip_fraction": "ClipFraction",
    "gradguard.clip.thresholds.median": "ClipByMedian",
    "gradguard.clip.thresholds.zclip": "ZClip",
    "gradguard.clip.update": "ClipUpdate",
    "gradguard.clip.update_size": "scale_sensitive_groups",
    "gradguard.monitoring.observe.monitor": "Monitor",
    "gradguard.monitoring.observe.watch": "watch",
    "gradguard.parity.save": "save_gradients",
    "gradguard.per_sample.sample_clipper": "PerSampleGradientClipper",
    "gradguard.per_sample.norm_clippers": (
        "AutoNormClipper FlatNormClipper PerLayerNormClipper PerParameterNormClipper QuantileNormClipper"
    ),
    "gradguard.resilience.spike_recovery": "SpikeRecovery",
    "gradguard.state.snapshot": "Snapshot",
    "gradguard.spikes.detector": "SpikeDetector",
    "gradguard.spikes.skip": "SkipSpikes",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradguard' has no attribute {name!r}")
    if _MODULE_OF[name] == "gradguard":  # a public module
        return importlib.import_module(f"gradguard.{name}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])

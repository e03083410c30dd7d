"""Written by `python .ci/public_list.py` from the table of `__init__.py`: do not edit."""

from gradguard import errors as errors
from gradguard import native as native
from gradguard import private as private
from gradguard import resilience as resilience
from gradguard import results as results
from gradguard import rules as rules
from gradguard import testing as testing
from gradguard.audit.norm import audit_norm as audit_norm
from gradguard.backward_clip.append_backward import append_backward as append_backward
from gradguard.backward_clip.append_backward import minimize as minimize
from gradguard.backward_clip.compiled import attach_error_clip as attach_error_clip
from gradguard.backward_clip.error_clip_block import error_clip as error_clip
from gradguard.backward_clip.error_clip_rules import BaseErrorClip as BaseErrorClip
from gradguard.backward_clip.error_clip_rules import ErrorClipByNorm as ErrorClipByNorm
from gradguard.backward_clip.error_clip_rules import ErrorClipByValue as ErrorClipByValue
from gradguard.backward_clip.statistics import ErrorClipStats as ErrorClipStats
from gradguard.check.gradcheck import gradcheck as gradcheck
from gradguard.check.seed_api import check_grad as check_grad
from gradguard.check.seed_api import get_numerical_gradient as get_numerical_gradient
from gradguard.clip.adaptive import ClipAdaptive as ClipAdaptive
from gradguard.clip.adaptive import clip_grad_adaptive_ as clip_grad_adaptive_
from gradguard.clip.clip_rules import ClipByGlobalNorm as ClipByGlobalNorm
from gradguard.clip.clip_rules import ClipByNorm as ClipByNorm
from gradguard.clip.clip_rules import ClipByRMS as ClipByRMS
from gradguard.clip.clip_rules import ClipByValue as ClipByValue
from gradguard.clip.compose import Chain as Chain
from gradguard.clip.compose import Groups as Groups
from gradguard.clip.functional import apply_gradient_clipping as apply_gradient_clipping
from gradguard.clip.functional import clip_grad_norm_ as clip_grad_norm_
from gradguard.clip.functional import clip_grad_value_ as clip_grad_value_
from gradguard.clip.functional import get_total_norm as get_total_norm
from gradguard.clip.guard import Guard as Guard
from gradguard.clip.logits import LogitWatch as LogitWatch
from gradguard.clip.qk_clip import QKClip as QKClip
from gradguard.clip.thresholds.adagc import AdaGC as AdaGC
from gradguard.clip.thresholds.autoclip import AutoClip as AutoClip
from gradguard.clip.thresholds.clip_fraction import ClipFraction as ClipFraction
from gradguard.clip.thresholds.median import ClipByMedian as ClipByMedian
from gradguard.clip.thresholds.zclip import ZClip as ZClip
from gradguard.clip.update import ClipUpdate as ClipUpdate
from gradguard.clip.update_size import scale_sensitive_groups as scale_sensitive_groups
from gradguard.monitoring.observe.monitor import Monitor as Monitor
from gradguard.monitoring.observe.watch import watch as watch
from gradguard.parity.save import save_gradients as save_gradients
from gradguard.per_sample.norm_clippers import AutoNormClipper as AutoNormClipper
from gradguard.per_sample.norm_clippers import FlatNormClipper as FlatNormClipper
from gradguard.per_sample.norm_clippers import PerLayerNormClipper as PerLayerNormClipper
from gradguard.per_sample.norm_clippers import PerParameterNormClipper as PerParameterNormClipper
from gradguard.per_sample.norm_clippers import QuantileNormClipper as QuantileNormClipper
from gradguard.per_sample.sample_clipper import PerSampleGradientClipper as PerSampleGradientClipper
from gradguard.resilience.spike_recovery import SpikeRecovery as SpikeRecovery
from gradguard.spikes.detector import SpikeDetector as SpikeDetector
from gradguard.spikes.skip import SkipSpikes as SkipSpikes
from gradguard.state.snapshot import Snapshot as Snapshot

__version__: str
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
    "ClipByRMS",
    "ClipByValue",
    "ClipFraction",
    "ClipUpdate",
    "ErrorClipByNorm",
    "ErrorClipByValue",
    "ErrorClipStats",
    "FlatNormClipper",
    "Groups",
    "Guard",
    "LogitWatch",
    "Monitor",
    "PerLayerNormClipper",
    "PerParameterNormClipper",
    "PerSampleGradientClipper",
    "QKClip",
    "QuantileNormClipper",
    "SkipSpikes",
    "Snapshot",
    "SpikeDetector",
    "SpikeRecovery",
    "ZClip",
    "append_backward",
    "apply_gradient_clipping",
    "attach_error_clip",
    "audit_norm",
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
    "results",
    "rules",
    "save_gradients",
    "scale_sensitive_groups",
    "testing",
    "watch",
]

"""Base classes for rules of your own, and rules for rarer needs.

Subclass `Clipper` (or `ThresholdClipper`) for a clipper, `NormClipper` for per-sample clipping, `Detector`
for finite spikes, and `gradguard.BaseErrorClip` for the error clip. The common rules are in `gradguard` itself.
"""

from gradguard.backward_clip.error_clip_rules import ErrorClipBySampleNorm, ErrorClipNonfinite, ErrorClipZeroAbove
from gradguard.clip.clipper import Clipper, Decision, describe
from gradguard.clip.gradients import Gradients, norms_of, total_of
from gradguard.clip.thresholds.threshold_rule import ThresholdClipper
from gradguard.per_sample.clipping_rule import NormClipper
from gradguard.spikes.spike_policy import Detector

__all__ = [
    "Clipper",
    "Decision",
    "Detector",
    "ErrorClipBySampleNorm",
    "ErrorClipNonfinite",
    "ErrorClipZeroAbove",
    "Gradients",
    "NormClipper",
    "ThresholdClipper",
    "describe",
    "norms_of",
    "total_of",
]

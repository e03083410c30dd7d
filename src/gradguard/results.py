"""The types that calls return: results, reports and statistics, for annotations and `isinstance`."""

from gradguard.audit.report import NormAudit, NormClass, NormFinding
from gradguard.backward_clip.statistics import FirstNonfinite, OpStatistics
from gradguard.check.report import Finding, GradientReport
from gradguard.clip.clipper import ClipResult
from gradguard.parity.report import ParityFinding, ParityReport
from gradguard.parity.saved import SavedGradients
from gradguard.per_sample.results import ClippedSums, PerSampleStatistics, PreStep
from gradguard.spikes.base import SpikeVerdict

__all__ = [
    "ClipResult",
    "ClippedSums",
    "Finding",
    "FirstNonfinite",
    "GradientReport",
    "NormAudit",
    "NormClass",
    "NormFinding",
    "OpStatistics",
    "ParityFinding",
    "ParityReport",
    "PerSampleStatistics",
    "PreStep",
    "SavedGradients",
    "SpikeVerdict",
]

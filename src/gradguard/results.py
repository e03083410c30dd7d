"""The types of returned results, reports and statistics, for annotations and `isinstance`."""

from gradguard.audit.audit_report import NormAudit, NormClass, NormFinding
from gradguard.backward_clip.statistics import FirstNonfinite, OpStatistics
from gradguard.check.gradient_report import GradientFinding, GradientReport
from gradguard.clip.clipper import ClipResult
from gradguard.parity.parity_report import ParityFinding, ParityReport
from gradguard.parity.saved import SavedGradients
from gradguard.per_sample.sample_results import ClippedSums, PerSampleStatistics, PreStep
from gradguard.spikes.spike_policy import SpikeVerdict

__all__ = [
    "ClipResult",
    "ClippedSums",
    "FirstNonfinite",
    "GradientFinding",
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

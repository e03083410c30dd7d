"""Surviving bursts of bad steps: `SpikeRecovery` goes back to snapshots; `Batches` knows the samples of each batch."""

from gradguard.resilience.bad_samples import BadSample, BadSamples
from gradguard.resilience.batch_iterators import Batches, MicroBatch, SampleIds
from gradguard.resilience.culprit import Culprit, find_culprit
from gradguard.resilience.evidence import write_evidence

__all__ = [
    "BadSample",
    "BadSamples",
    "Batches",
    "Culprit",
    "MicroBatch",
    "SampleIds",
    "find_culprit",
    "write_evidence",
]

"""Recover from bursts of bad steps, and find the samples that caused them.

`SpikeRecovery` (`spike_recovery`) follows the steps of a `Guard`. It keeps snapshots (`older_weights`), tries older
weights after a burst of spikes, goes back to them if the burst is over, and lowers the learning rate if bursts recur
(`slow_down`). `Batches` records the samples and the loss of each micro-batch (`batch_iterators`). `find_culprit` names
the micro-batches that caused a spike (`culprit`), and `BadSamples` keeps them out of training. `write_evidence` saves
a spike's step (`evidence`), and `gradguard replay-step` computes it again (`step_replay`).
"""

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

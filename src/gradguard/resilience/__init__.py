"""Surviving finite spikes: who was in the batch, the bad-batch list, and the step computed again."""

from gradguard.resilience.bad_samples import BadSample, BadSamples, exclude
from gradguard.resilience.batches import Batches, MicroBatch, SampleIds

__all__ = ["BadSample", "BadSamples", "Batches", "MicroBatch", "SampleIds", "exclude"]

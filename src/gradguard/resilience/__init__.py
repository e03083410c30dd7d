"""Surviving bursts of bad steps: snapshots and the ladder that goes back to them; who was in the batch."""

from gradguard.resilience.bad_samples import BadSample, BadSamples, exclude
from gradguard.resilience.batches import Batches, MicroBatch, SampleIds

__all__ = ["BadSample", "BadSamples", "Batches", "MicroBatch", "SampleIds", "exclude"]

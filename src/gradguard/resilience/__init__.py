"""Surviving finite spikes: who was in the batch, the bad-batch list, and the step computed again."""

from gradguard.resilience.batches import Batches, MicroBatch, SampleIds

__all__ = ["Batches", "MicroBatch", "SampleIds"]

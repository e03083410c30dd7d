"""Finite spikes: steps whose loss or gradient norm stands far above the recent past, and how such a step is skipped.

The signals of a step are its loss and the norms of its gradients before the clip. A `Detector` (`spike_policy`) takes
the signals of each step and returns a `SpikeVerdict`; its state stays on the signals' device. `SpikeDetector`
(`detector`), the recommended rule, measures how far a signal is above the median of recent ones, in median absolute
deviations. `SkipSpikes` (`skip`) gathers the signals for a `Guard`, over micro-batches and processes, and the guard
skips the step if the verdict is a spike.

**Guarantees.**

- All processes judge the same numbers, and skip the same steps.
- A step that is not finite leaves the history unchanged.
- After a number of consecutive spikes (the detector's ``cap``), their level becomes the usual one.
"""

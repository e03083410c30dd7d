"""One kind of fault after the other, a theme a file: its thresholds, what looks for it, and the words that tell it."""

from gradguard.monitoring.judge.detectors import clipping, layers, level, loss_scale

KINDS = tuple(
    dict.fromkeys(kind.name for module in (level, layers, loss_scale, clipping) for kind in module.KINDS),
)
"""The names of all kinds."""

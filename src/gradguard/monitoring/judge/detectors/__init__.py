"""One kind of fault after the other, a theme a file: its thresholds, what looks for it, and the words that tell it."""

from gradguard.monitoring.judge.detectors import (
    clipping,
    layers,
    level,
    loop_setup,
    loss,
    loss_scale,
    outliers,
    update_ratios,
    updates,
)

_MODULES = (level, loss, outliers, layers, update_ratios, updates, loss_scale, clipping, loop_setup)
KINDS = tuple(
    dict.fromkeys(kind.name for module in _MODULES for kind in module.KINDS),
)
"""The names of all kinds."""

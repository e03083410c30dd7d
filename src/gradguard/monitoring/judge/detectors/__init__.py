"""One kind of fault after the other, a theme a file: its thresholds, what looks for it, and the words that tell it."""

from gradguard.monitoring.judge.detectors import (
    clipping,
    layer_norms,
    level,
    loop_faults,
    loss,
    loss_scale,
    outliers,
    update_sizes,
)

_THEMES = (level, loss, outliers, layer_norms, update_sizes, loss_scale, clipping, loop_faults)
KINDS = tuple(dict.fromkeys(kind.name for theme in _THEMES for kind in theme.KINDS))
"""The names of all kinds."""

"""Detectors of faults, one theme per file: the thresholds, the detection, and the words of the findings."""

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
"""The names of all kinds of findings."""

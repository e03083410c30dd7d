"""One kind of fault after the other, a theme a file: its thresholds, what looks for it, and the words that tell it."""

from gradguard.monitoring.judge.detectors import (
    clipping,
    level,
    loss,
    loss_scale,
    outliers,
    update_ratios,
)
from gradguard.monitoring.judge.detectors import (
    layer_norms as layers,
)
from gradguard.monitoring.judge.detectors import (
    loop_faults as loop_setup,
)
from gradguard.monitoring.judge.detectors import (
    update_sizes as updates,
)

_MODULES = (level, loss, outliers, layers, update_ratios, updates, loss_scale, clipping, loop_setup)
KINDS = tuple(
    dict.fromkeys(kind.name for module in _MODULES for kind in module.KINDS),
)
"""The names of all kinds."""

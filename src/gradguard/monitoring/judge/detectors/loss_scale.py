"""Detects a GradScaler whose loss scale collapses."""

from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words

AMP_LEAST_SCALE = 1.0
"""Below this scale the gradients themselves overflow float16, so scaling is no remedy."""

AMP_SKIPS = 12
"""Skips in a row: from the usual 65,536 down to 16. The search for a scale at the start takes only a few."""

_NEVER = -1


class ScaleFall:
    """Detects a loss scale that keeps falling.

    Args:
        log: The log that receives the faults.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._skipped_steps, self._at, self._skips_there = 0, _NEVER, 0

    def step(self, i: int, scale: float, skipped: bool) -> None:
        """Follow a step.

        Args:
            i: The step.
            scale: The loss scale.
            skipped: Whether the scaler skipped the step.
        """
        self._skipped_steps = self._skipped_steps + 1 if skipped else 0
        if scale < AMP_LEAST_SCALE:
            self._log.report("amp", COLLAPSE, i, i, scale, numbers={"smallest": scale})
        else:
            self._many(i, self._skipped_steps)

    def skip(self, i: int) -> None:
        """Follow a skip that has no step line of its own.

        Args:
            i: The number of the next step.
        """
        self._at, self._skips_there = i, self._skips_there + 1 if i == self._at else 1
        self._many(i, self._skips_there)

    def _many(self, i: int, count: int) -> None:
        if count >= AMP_SKIPS:
            self._log.report("amp", COLLAPSE, i, i, count=count)


def _collapse(found: Episode) -> Words:
    scale = found.numbers.get("smallest")
    if scale is None:
        skipped = f"{found.count} steps in a row were skipped for overflow"
        message = f"{skipped}, at step {found.first}: the loss scale is collapsing"
    else:
        message = f"the loss scale fell to {scale:g} at step {found.first}, below {AMP_LEAST_SCALE:g}"
    return (
        "error",
        message,
        ("the gradients are not finite at any scale: find where NaN begins (`gradguard explain nan`), or use bfloat16"),
    )


COLLAPSE = Kind("amp_scale_collapse", _collapse, value="smallest")
KINDS = (COLLAPSE,)

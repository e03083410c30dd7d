"""TensorBoard: ``sink="tensorboard"``, or a ``SummaryWriter`` of the user's."""

from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.record.file import Line
from gradguard.monitoring.show.sinks.base import required, summary_of


class TensorBoardSink:
    """Scalars in an event file; the writer's own thread writes them.

    Args:
        writer: A ``SummaryWriter``, which stays open; None makes one in the folder that TensorBoard itself would
            choose, ``runs/<time>_<host>``.
    """

    name = "TensorBoard"

    def __init__(self, writer: Any = None) -> None:
        self._owned = writer is None
        self._writer = required("torch.utils.tensorboard", "tensorboard").SummaryWriter() if self._owned else writer

    def push(self, lines: Sequence[Line]) -> None:
        """Add one point to about ten curves."""
        found = summary_of(lines)
        if found is None:
            return
        step, scalars = found
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer that was made here; hand what another holds to its file."""
        (self._writer.close if self._owned else self._writer.flush)()

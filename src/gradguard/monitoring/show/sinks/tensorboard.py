"""TensorBoard: ``sink="tensorboard"``, or a ``SummaryWriter`` of the user's."""

from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class TensorBoardSink(Dashboard):
    """Scalars in an event file; the writer's own thread writes them.

    Args:
        writer: A ``SummaryWriter``, which stays open; None makes one in the folder that TensorBoard itself would
            choose, ``runs/<time>_<host>``.
    """

    name = "TensorBoard"

    def __init__(self, writer: Any = None) -> None:
        self._writer, self.owned = run_of(
            writer, lambda: None, lambda: required("torch.utils.tensorboard", "tensorboard").SummaryWriter()
        )

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to about ten curves."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer that was made here; hand what another holds to its file."""
        (self._writer.close if self.owned else self._writer.flush)()

"""Write to TensorBoard: ``sink="tensorboard"``, or the user's own ``SummaryWriter``."""

from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class TensorBoardSink(Dashboard):
    """Add scalars to an event file; the writer's own thread writes them.

    Args:
        writer: A ``SummaryWriter``, which stays open; None makes one in TensorBoard's default folder,
            ``runs/<time>_<host>``.
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
        """Close the sink's own writer; flush the user's writer."""
        (self._writer.close if self.owned else self._writer.flush)()

"""Write to Weights & Biases: ``sink="wandb"``, or the user's own ``Run``."""

import os
from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.record.file import Line
from gradguard.monitoring.show.sinks.sink import PREFIX, DashboardWindow, named, required, run_of


class WandbSink:
    """Log scalars to a run; wandb's own process sends them.

    In the user's own run, the sink must not advance wandb's step: wandb drops rows for a completed step. The sink
    therefore adds the scalars to the row that the user's next ``run.log`` completes, and they summarise all steps since
    the row before. A script that logs nothing itself should let gradguard start the run.

    Args:
        run: A ``wandb.Run``, which stays open; None uses the active run, or starts one in the project
            ``WANDB_PROJECT`` or ``gradguard``.
    """

    name = "W&B"

    def __init__(self, run: Any = None) -> None:
        wandb = required("wandb", "wandb")
        project = os.environ.get("WANDB_PROJECT", "gradguard")
        self._run, self.owned = run_of(run, lambda: wandb.run, lambda: wandb.init(project=project))
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        self._window, self._row = DashboardWindow(), self._run.step

    def push(self, lines: Sequence[Line]) -> None:
        """Log about ten numbers."""
        if self.owned or self._run.step != self._row:  # the user has completed the row before
            self._window, self._row = DashboardWindow(), self._run.step
        for line in lines:
            self._window.add(line)
        if self._window.step is not None:
            scalars = named({"step": self._window.step, **self._window.scalars()})
            self._run.log(scalars, commit=self.owned)

    def close(self) -> None:
        """Finish the run if the sink started it."""
        if self.owned:
            self._run.finish()

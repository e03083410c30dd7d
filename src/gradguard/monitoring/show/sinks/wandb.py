"""Weights & Biases: ``sink="wandb"``, or a ``Run`` of the user's."""

import os
from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.record.file import Line
from gradguard.monitoring.show.sinks.sink import PREFIX, DashboardWindow, named, required, run_of


class WandbSink:
    """Scalars in a run; wandb's own process sends them.

    In a run of the user's nothing may move the step that their own ``run.log`` counts: wandb drops rows that come for
    a step which is over. So the scalars are added to the row that the user's next ``run.log`` ends, and they cover
    all steps since the row before. A script that logs nothing itself lets gradguard open the run.

    Args:
        run: A ``wandb.Run``, which stays open; None takes the run that is active, or makes one, in the project
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
        if self.owned or self._run.step != self._row:  # the row before is complete
            self._window, self._row = DashboardWindow(), self._run.step
        for line in lines:
            self._window.add(line)
        if self._window.step is not None:
            scalars = named({"step": self._window.step, **self._window.scalars()})
            self._run.log(scalars, commit=self.owned)

    def close(self) -> None:
        """Finish the run that was made here."""
        if self.owned:
            self._run.finish()

"""Trackio: ``sink="trackio"``, or a ``Run`` of the user's."""

import os
from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class TrackioSink(Dashboard):
    """Scalars in a run; trackio's own thread writes them.

    They carry the number of the optimizer step. In a run of the user's, their own ``run.log`` should pass ``step=``
    too: trackio otherwise counts on from the largest step that it has seen.

    Args:
        run: A trackio ``Run``, which stays open; None takes the run that is active, or makes one, in the project
            ``TRACKIO_PROJECT`` or ``gradguard``.
    """

    name = "trackio"

    def __init__(self, run: Any = None) -> None:
        trackio = required("trackio", "trackio")
        self._package: Any = trackio
        project = os.environ.get("TRACKIO_PROJECT", "gradguard")
        self._run, self.owned = run_of(run, trackio.context_vars.current_run.get, lambda: trackio.init(project=project))

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Log about ten numbers."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Finish the run that was made here."""
        if not self.owned:
            return
        if self._package.context_vars.current_run.get() is self._run:
            self._package.finish()  # which also makes it no longer the active one
        else:
            self._run.finish()

"""Write to Trackio: ``sink="trackio"``, or the user's own ``Run``."""

import os
from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class TrackioSink(Dashboard):
    """Log scalars to a run; trackio's own thread writes them.

    The scalars have the number of the optimizer step. In the user's own run, the user's ``run.log`` calls should also
    pass ``step=``: otherwise trackio continues counting from the largest step logged so far.

    Args:
        run: A trackio ``Run``, which stays open; None uses the active run, or starts one in the project
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
        """Finish the run if the sink started it."""
        if not self.owned:
            return
        if self._package.context_vars.current_run.get() is self._run:
            self._package.finish()  # also deactivates the run
        else:
            self._run.finish()

"""MLflow: ``sink="mlflow"``, or a ``Run`` of the user's."""

import time
from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class MlflowSink(Dashboard):
    """Metrics of a run at the tracking URI in force; MLflow's own thread sends them.

    It works on the run's id and never makes a run the active one, so that the user's ``mlflow.start_run`` still works.

    Args:
        run: An MLflow ``Run``, which stays open; None takes the run that is active, or makes one where
            ``mlflow.start_run()`` would.
    """

    name = "MLflow"

    def __init__(self, run: Any = None) -> None:
        mlflow = required("mlflow", "mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        run, self.owned = run_of(run, mlflow.active_run, mlflow.start_run)  # which knows the experiment that was chosen
        if self.owned:
            mlflow.end_run("RUNNING")  # no longer the active one
        self._run: str = run.info.run_id
        self._last: Any = None  # what the last call promised to send

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to about ten metrics."""
        now = int(1e3 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._wait()  # two batches on their way at once may lose points of each other in a file store
        self._last = self._client.log_batch(self._run, metrics, synchronous=False)

    def close(self) -> None:
        """Wait until all has been sent, and end the run that was made here."""
        self._wait()
        if self.owned:
            self._client.set_terminated(self._run)

    def _wait(self) -> None:
        """Wait for the last batch: a flush later it has long been sent."""
        if self._last is not None:
            self._last.wait()
            self._last = None

"""Write to MLflow: ``sink="mlflow"``, or the user's own ``Run``."""

import time
from typing import Any

from gradguard.monitoring.show.sinks.sink import Dashboard, required, run_of


class MlflowSink(Dashboard):
    """Log metrics to a run at the current tracking URI; MLflow's own thread sends them.

    The sink uses the run's id and leaves no run active: the user's own ``mlflow.start_run`` still works.

    Args:
        run: An MLflow ``Run``, which stays open; None uses the active run, or starts one with ``mlflow.start_run()``.
    """

    name = "MLflow"

    def __init__(self, run: Any = None) -> None:
        mlflow = required("mlflow", "mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        run, self.owned = run_of(run, mlflow.active_run, mlflow.start_run)  # `start_run` uses the chosen experiment
        if self.owned:
            mlflow.end_run("RUNNING")  # the run must not stay active
        self._run: str = run.info.run_id
        self._last: Any = None  # the pending batch of the last call

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to about ten metrics."""
        now = int(1e3 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._wait()  # two concurrent batches may lose points of each other in a file store
        self._last = self._client.log_batch(self._run, metrics, synchronous=False)

    def close(self) -> None:
        """Wait until all points have been sent, and end the run if the sink started it."""
        self._wait()
        if self.owned:
            self._client.set_terminated(self._run)

    def _wait(self) -> None:
        """Wait for the last batch, which usually has been sent by the next flush."""
        if self._last is not None:
            self._last.wait()
            self._last = None

"""MLflow: ``sink="mlflow"``, or a ``Run`` of the user's."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from gradguard.watch.sinks.base import Line, required, summary_of


_LATEST = 64
"""Batches that may still be on their way when the sink is closed."""


class MlflowSink:
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
        run = mlflow.active_run() if run is None else run
        self._owned = run is None
        if run is None:
            run = mlflow.start_run()  # which knows the experiment that was chosen
            mlflow.end_run("RUNNING")  # no longer the active one
        self._run: str = run.info.run_id
        self._promised: deque[Any] = deque(maxlen=_LATEST)  # its threads send them in any order

    def push(self, lines: Sequence[Line]) -> None:
        """Add one point to about ten metrics."""
        found = summary_of(lines)
        if found is None:
            return
        step, scalars = found
        now = int(1e3 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._promised.append(self._client.log_batch(self._run, metrics, synchronous=False))

    def close(self) -> None:
        """Wait until all has been sent, and end the run that was made here."""
        for batch in self._promised:
            batch.wait()
        if self._owned:
            self._client.set_terminated(self._run)

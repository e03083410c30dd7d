"""Define sinks, and summarise steps in about ten numbers for dashboards."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from gradguard.errors import MissingPackageError
from gradguard.monitoring.record.file import Line


class Sink(Protocol):
    """A destination of a record's lines, which come some dozens at a time."""

    name: str

    def push(self, lines: Sequence[Line]) -> None:
        """Write ``lines``; an exception drops this sink and has no other effect."""

    def close(self) -> None:
        """Close objects that gradguard opened; leave the user's objects open."""


def required(module: str, extra: str) -> ModuleType:
    """Import the package of a dashboard.

    Args:
        module: The name of the package.
        extra: The extra of gradguard that installs it.

    Returns:
        The module.

    Raises:
        MissingPackageError: If the package or one of its dependencies is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"sink={extra!r} needs a package that is not installed ({error}): pip install 'gradguard[{extra}]'"
        ) from error


class DashboardWindow:
    r"""Summarise several steps for a dashboard in about ten numbers, independent of the number of parameters.

    The norm has its smallest, mean and largest value: a spike between two flushes shows in the largest. NaN and
    infinity are counted and never averaged. A quantity that no step has is left out.

    Example:
        >>> window = DashboardWindow()
        >>> for i, norm in enumerate([1.0, 9.0, float("inf")]):
        ...     window.add({"t": "step", "i": i, "norm": norm, "loss": 2.0, "nonfinite": int(norm > 9)})
        >>> window.scalars()
        {'norm_min': 1.0, 'norm_mean': 5.0, 'norm_max': 9.0, 'loss': 2.0, 'nonfinite_steps': 1, 'skipped_steps': 0}
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._values: dict[str, _Summary] = {}
        self._counts: Counter[str] = Counter()

    def add(self, line: Line) -> None:
        """Add one line; of the lines other than steps, only roll-backs are counted."""
        if line.get("t") != "step":
            self._counts["roll_backs"] += line.get("kind") == "rolled_back"
            return
        self.step = line["i"]
        coefficient = line.get("coefficient")
        self._counts.update(
            steps=1, clips=coefficient is not None, bound=coefficient is not None and coefficient < 1,
            nonfinite_steps=bool(line.get("nonfinite")), skipped_steps=bool(line.get("skipped")),
            skipped_spikes=bool(line.get("spike")),
        )  # fmt: skip
        for key, value in line.items():
            if type(value) in (float, int) and math.isfinite(value) and key not in _NO_QUANTITY:
                self._values.setdefault(key, _Summary()).add(float(value))

    def scalars(self) -> dict[str, float]:
        """Return the numbers by name, without the prefix ``gradguard/``; empty without a step."""
        counts = self._counts
        if not counts["steps"]:
            return {}
        norm = self._values.get("norm")
        found = {f"norm_{kind}": value for kind, value in norm.extent().items()} if norm is not None else {}
        found |= {
            key: summary.last if key in _AS_LAST else summary.mean
            for key, summary in self._values.items()
            if key != "norm"
        }
        if counts["clips"]:
            found["clip_fraction"] = counts["bound"] / counts["steps"]
        found |= {key: counts[key] for key in ("skipped_spikes", "roll_backs") if counts[key]}
        return found | {key: counts[key] for key in ("nonfinite_steps", "skipped_steps")}


_NO_QUANTITY = {"i", "wall", "nonfinite", "optimizer", "user_max_norm", "post_norm", "over_rule"}
_AS_LAST = {"lr", "threshold", "amp_scale"}


class _Summary:
    """The mean, extremes and last value of some numbers."""

    def __init__(self) -> None:
        self._count, self._sum, self._min, self._max = 0, 0.0, math.inf, -math.inf
        self.last = 0.0

    def add(self, value: float) -> None:
        self.last = value
        self._count, self._sum = self._count + 1, self._sum + value
        self._min, self._max = min(self._min, value), max(self._max, value)

    @property
    def mean(self) -> float:
        return self._sum / self._count

    def extent(self) -> dict[str, float]:
        return {"min": self._min, "mean": self.mean, "max": self._max}


PREFIX = "gradguard/"


def named(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return ``scalars`` with prefixed names, which a dashboard groups together."""
    return {PREFIX + key: value for key, value in scalars.items()}


def run_of(given: Any, find: Callable[[], Any], make: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the run to write to, and whether it is new: the user's run, else the active run, else a new run.

    Args:
        given: The user's run, or None.
        find: A function that returns the active run, or None.
        make: A function that starts a run.
    """
    run = find() if given is None else given
    return (make(), True) if run is None else (run, False)


class Dashboard:
    """A sink that shows about ten numbers for each flush.

    Attributes:
        owned: Whether the sink opened its run or writer, and closes it.
    """

    owned: bool

    def push(self, lines: Sequence[Line]) -> None:
        """Show ``lines`` in about ten numbers; show nothing if they contain no step."""
        window = DashboardWindow()
        for line in lines:
            window.add(line)
        if window.step is not None:
            self.show(window.step, named(window.scalars()))

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Add the numbers of the steps up to ``step``."""
        raise NotImplementedError

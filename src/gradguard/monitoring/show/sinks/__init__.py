"""Write a `gradguard.Monitor`'s lines to a file, a function or dashboards, with one module for each kind."""

import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.monitoring.record.file import Line
from gradguard.monitoring.show.sinks.sink import Sink
from gradguard.monitoring.show.sinks.text_lines import CallableSink, JsonLinesSink

_EXPECTED = (
    "expected a path that ends in .jsonl, a function that takes one dictionary, 'tensorboard', 'wandb', 'mlflow', "
    "'trackio', an object of one of those packages (SummaryWriter or Run), or a list of several"
)


def _warn(message: str) -> None:
    warnings.warn(f"gradguard: {message}", RuntimeWarning, stacklevel=4)


class Sinks:
    """Combine several sinks; a failure of one does not affect the others.

    **Guarantees**: After construction, nothing raises. A sink that fails is dropped with one warning.

    Args:
        sink: A path, a function, a dashboard's name, an object of a dashboard's package, or a list of them.
        warn: A function called with each message to the user.

    Raises:
        InvalidTypeError: If an entry is none of these.
        InvalidValueError: If a text is neither a dashboard's name nor a path with a suffix.
        RecordError: If the file cannot be written.
        MissingPackageError: If the package of a dashboard is not installed.

    Example:
        >>> seen = []
        >>> sinks = Sinks([seen.append])
        >>> sinks.push([{"t": "step", "i": 0, "norm": float("nan")}])
        >>> seen
        [{'t': 'step', 'i': 0, 'norm': None}]
    """

    def __init__(self, sink: Any, warn: Callable[[str], object] = _warn) -> None:
        self._open: list[Sink] = []
        self._warn = warn
        self.record: Path | None = None
        try:
            for entry in sink if isinstance(sink, list | tuple) else [sink]:
                self._open.append(open_sink(entry))
        except BaseException:
            self.close()
            raise
        self.record = next((one.path for one in self._open if isinstance(one, JsonLinesSink)), None)
        self._were_any = bool(self._open)

    @property
    def empty(self) -> bool:
        """Whether no sink is open."""
        return not self._open

    @property
    def lost(self) -> bool:
        """Whether there were sinks, and all of them failed."""
        return self._were_any and not self._open

    def push(self, lines: Sequence[Line]) -> None:
        """Pass ``lines`` to every sink."""
        for one in tuple(self._open):
            self._try(one, lambda one=one: one.push(lines))

    def close(self) -> None:
        """Close every sink; a second call does nothing."""
        for one in tuple(self._open):
            self._try(one, one.close)
        self._open.clear()

    def _try(self, one: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._open.remove(one)
            with suppress(Exception):  # the sink has failed already; closing may fail too
                one.close()
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._warn(f"writing to {one.name} ended: {reason}. Training continues without this sink.")


def open_sink(sink: Any) -> Sink:
    """Return the sink for one entry of ``sink=``.

    Args:
        sink: A path, a function, a dashboard's name, or an object of a dashboard's package.

    Returns:
        The open sink.

    Raises:
        InvalidTypeError: If ``sink`` is none of these.
        InvalidValueError: If a text is neither a dashboard's name nor a path with a suffix.
    """
    if isinstance(sink, str) and sink in _DASHBOARDS:
        return _dashboard(sink, None)
    if isinstance(sink, str | os.PathLike):
        path = Path(sink)
        if path.suffix and not path.is_dir():
            return JsonLinesSink(path)
        raise InvalidValueError(
            f"sink={str(sink)!r} is neither a file name with an ending nor a known name: {_EXPECTED}. "
            f"For a folder write sink={str(path / 'run.jsonl')!r}."
        )
    kind = type(sink)
    for package, name in _KINDS:  # compare class names, because importing the packages is slow
        if any(one.__name__ == name and one.__module__.split(".")[0] in package for one in kind.__mro__):
            return _dashboard(_KINDS[package, name], sink)
    if isinstance(sink, type) or not callable(sink):
        came = f"the class {sink.__name__}" if isinstance(sink, type) else f"{sink!r} of type {kind.__name__}"
        raise InvalidTypeError(f"sink is {came}: {_EXPECTED}.")
    return CallableSink(sink)


def _dashboard(name: str, run: Any) -> Sink:
    """Import the module of a dashboard, which imports the dashboard's package, and return its sink."""
    module = importlib.import_module(f"gradguard.monitoring.show.sinks.{name}")
    return getattr(module, _DASHBOARDS[name])(run)


_DASHBOARDS = {
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow": "MlflowSink",
    "trackio": "TrackioSink",
}

_KINDS: Mapping[tuple[tuple[str, ...], str], str] = {
    (("torch", "tensorboardX"), "SummaryWriter"): "tensorboard",
    (("wandb",), "Run"): "wandb",
    (("mlflow",), "Run"): "mlflow",  # ActiveRun is a subclass
    (("trackio",), "Run"): "trackio",
}

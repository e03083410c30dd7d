"""What a user hands to a monitor: which step it belongs to, and what of it is a number."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from gradguard.monitoring.observe.monitor_lines import Seen

OWN_NAMES = frozenset((
    "t", "i", "wall", "loss", "lr", "norm", "post_norm", "coefficient", "threshold", "rule", "user_max_norm",
    "max_norm", "amp_scale", "skipped", "nonfinite", "top", "optimizer",
))  # fmt: skip
"""The fields of a ``step`` line."""


class Log:
    """Keeps what was logged until its step is known.

    Args:
        warn: Takes a message for the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._coming: list[dict[str, Any]] = []  # for the step to come
        self.comes_before: bool | None = None  # whether it is called before its step; None until it is called

    def add(self, newest: Seen | None, known: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Take what one call logged: for the step to come, or for ``newest``, the step that was."""
        if self.comes_before is None:
            self.comes_before = newest is None
        values = {key: value for key, given in known.items() if (value := self._number(key, given)) is not None}
        for key, given in scalars.items():
            if key in OWN_NAMES:
                self._warn(f"Monitor.log({key}=...) is left out: the record has a field {key!r} of its own")
            elif (value := self._number(key, given)) is not None:
                values.setdefault("scalars", {})[key] = value
        if self.comes_before or newest is None:
            self._coming.append(values)
        elif not (newest.row.losses and "loss" in values):  # else of an iteration that had no step
            _give(newest, values)

    def give(self, seen: Seen) -> None:
        """Add to ``seen`` what was logged for it."""
        coming, self._coming = self._coming, []
        for values in coming:
            _give(seen, values)

    def _number(self, key: str, value: Any) -> Any:
        """The value as a number, or a copy of a tensor of one element, which is read later; None for anything else."""
        if value is None:
            return None
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_complex():
                return value.detach().reshape(()).clone()
        elif not isinstance(value, str | bytes):
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                return float(value)
        self._warn(f"Monitor.log({key}=...) is left out: expected one number, got {_shown(value)}")
        return None


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _give(seen: Seen, values: Mapping[str, Any]) -> None:
    if "loss" in values:
        seen.row.losses = [*seen.row.losses, values["loss"]]
    seen.norm, seen.max_norm = values.get("norm", seen.norm), values.get("max_norm", seen.max_norm)
    for name, value in values.get("scalars", {}).items():
        if name in seen.names:
            seen.values[seen.names.index(name)] = value
        else:
            seen.names.append(name)
            seen.values.append(value)

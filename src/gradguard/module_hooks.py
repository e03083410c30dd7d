"""A hook on a module that stays with that module."""

from collections.abc import Callable
from typing import Any


class ForwardHook:
    """A hook on a module that does not follow it into copies and files: there it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Pass on what PyTorch calls the hook with."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass

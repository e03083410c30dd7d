"""A hook on a module that stays with that module."""

from functools import partial
from typing import Any


class ForwardHook(partial):
    """A hook on a module that does not follow it into copies and files: there it does nothing.

    A `partial` has no Python code of its own, which the compiler would compile, `never_compiled` or not.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass

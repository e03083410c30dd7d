"""A hook on a module that stays with that module."""

from functools import partial
from typing import Any


class ForwardHook(partial):
    """A hook on a module that does nothing in copies of the module, pickled ones included.

    The hook is a `partial` because that has no Python code: `torch.compile` would compile Python code here even if it
    is marked `never_compiled`.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass

"""Replacement of functions of other packages, for as long as the replacement has users.

This is the only module that puts a function of gradguard where torch, an engine or a script looks up its own.
"""

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

_MARK = "_replaced_by_gradguard"


class Replacement:
    """A function of another package that is replaced as long as the replacement has users.

    **Guarantees.** Users may end in any order. If other code has wrapped the replacement meanwhile, it stays within
    that wrapper and behaves like the original until it has a user again. A call that passes through several
    replacements of one function, for example because a script kept an older one, counts once.

    Args:
        module: The name of a module. `place_waiting` looks again for a module that is not imported yet.
        name: The function's name in the module, or ``"Class.method"``.
        instead: Called with the original function and the arguments of a call.
        everywhere: Whether scripts import the function by its name: then every module that holds it gets the
            replacement.
        one_call: A label: nested calls with the same label count as one call. None: nested calls with the same first
            argument do.
        decorate: Applied to the replacement. In code that is being compiled, the replacement calls the original.

    Example:
        >>> import math
        >>> twice = Replacement("math", "sqrt", lambda original, x: 2 * original(x))
        >>> end = twice.use()
        >>> math.sqrt(9.0)
        6.0
        >>> end()
        >>> math.sqrt(9.0)
        3.0
    """

    def __init__(
        self,
        module: str,
        name: str,
        instead: Callable[..., Any],
        *,
        everywhere: bool = False,
        one_call: str | None = None,
        decorate: Callable[[Any], Any] = lambda function: function,
    ) -> None:
        self._module, self._instead, self._decorate = module, instead, decorate
        *self._path, self._name = name.split(".")
        self._everywhere, self._one_call, self._users = everywhere, one_call, 0
        self._holder: Any = None
        self._original: Any = None
        self._wrapper: Any = None

    def use(self) -> Callable[[], None]:
        """Replace the function; return a function that ends this use, at most once."""
        with _lock:
            self._users += 1
            if not self._place():
                _waiting.add(self)
        return once(self._release)

    def _place(self) -> bool:
        """Replace the function unless it is replaced already; return whether the function exists."""
        holder: Any = sys.modules.get(self._module)
        for name in self._path:
            holder = vars(holder).get(name) if holder is not None else None
        original = None if holder is None else vars(holder).get(self._name)
        if original is not None and not hasattr(original, _MARK):  # a marked function already contains a replacement
            self._holder, self._original, self._wrapper = holder, original, self._wrapped(original)
            self._exchange(original, self._wrapper)
        return original is not None

    def _release(self) -> None:
        with _lock:
            self._users -= 1
            if self._users:
                return
            _waiting.discard(self)
            if self._wrapper is not None:
                self._exchange(self._wrapper, self._original)

    def _exchange(self, old: Any, new: Any) -> None:
        modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)] if self._everywhere else ()
        for place in [self._holder, *modules]:
            held = vars(place)
            if held.get(self._name) is old and not str(held.get("__name__")).startswith("gradguard."):
                with suppress(Exception):  # a module class of its own may refuse the assignment
                    setattr(place, self._name, new)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._users or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            call = self._one_call or (self, id(args[0]) if args else None)
            if call in _calls.running:
                return original(*args, **kwargs)
            _calls.running.append(call)
            try:
                return self._instead(original, *args, **kwargs)
            finally:
                _calls.running.pop()

        replacement.__code__ = replacement.__code__.replace()  # torch.compile keeps its caches by code object
        functools.update_wrapper(replacement, original)
        setattr(replacement, _MARK, True)  # `functools.wraps` copies this mark to wrappers of the replacement
        return self._decorate(replacement)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.running: list[Any] = []


_lock = threading.RLock()  # reentrant: garbage collection may end a use at any time
_waiting: set[Replacement] = set()
_calls = _Calls()


def place_waiting() -> None:
    """Replace the functions of packages that were imported meanwhile; nearly free if none is waiting."""
    for one in tuple(_waiting):
        if one._module in sys.modules:
            with _lock:
                if one in _waiting and one._place():
                    _waiting.discard(one)


def once(*ends: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls each of ``ends`` on its first call, and does nothing on later calls."""
    left = list(ends)

    def end() -> None:
        while left:
            left.pop(0)()

    return end

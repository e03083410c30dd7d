"""Functions of other packages that are replaced while somebody uses the replacement, and given back after that.

The one place that puts a function of ours where torch, an engine or a script looks up its own.
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
    """A function of another package that is replaced while it has users.

    **Guarantees.** Users may end in any order. Where somebody has wrapped the replacement meanwhile it stays within
    their wrapper, and does what the original does until there is a user again. A call that passes several replacements
    of one function, as where a script has kept one, counts once.

    Args:
        module: The name of a module. One that is not imported yet is looked for again by `place_waiting`.
        name: The function's name in the module, or ``"Class.method"``.
        instead: Called with the original function and the arguments of a call.
        everywhere: Whether scripts import the function by its name: then it is replaced in every module that has it.
        one_call: Calls within each other that have this label are one; None for those with the same first argument.
        decorate: Applied to the replacement, which is the original to code that is being compiled.

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
        """Replace the function, and return what ends this use; calling that again does nothing."""
        with _lock:
            self._users += 1
            if not self._place():
                _waiting.add(self)
        return once(self._release)

    def _place(self) -> bool:
        """Replace the function unless that is done already, and tell whether there is one."""
        holder: Any = sys.modules.get(self._module)
        for name in self._path:
            holder = vars(holder).get(name) if holder is not None else None
        original = None if holder is None else vars(holder).get(self._name)
        if original is not None and not hasattr(original, _MARK):  # else there is one of ours in it
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
                with suppress(Exception):  # a module of a kind of its own
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

        replacement.__code__ = replacement.__code__.replace()  # of its own: the compiler keeps what it knows by code
        functools.update_wrapper(replacement, original)
        setattr(replacement, _MARK, True)  # which those who wrap it again copy, if they do as `functools.wraps` does
        return self._decorate(replacement)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.running: list[Any] = []


_lock = threading.RLock()  # an object that is collected may end its use at any time
_waiting: set[Replacement] = set()
_calls = _Calls()


def place_waiting() -> None:
    """Replace the functions of packages that have been imported since; costs next to nothing where there are none."""
    for one in tuple(_waiting):
        if one._module in sys.modules:
            with _lock:
                if one in _waiting and one._place():
                    _waiting.discard(one)


def once(*ends: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls each of ``ends`` when it is first called, and then does nothing."""
    left = list(ends)

    def end() -> None:
        while left:
            left.pop(0)()

    return end

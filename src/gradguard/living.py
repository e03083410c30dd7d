"""The objects of a class that exist, wherever a program keeps them."""

import functools
import gc
import itertools
import weakref
from typing import Any

__all__ = ["Living", "alive", "all_objects"]


def all_objects() -> list[Any]:
    """Return the objects of the garbage collector, frozen ones too: a wrapper that is missed is a wrong number."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # or what is garbage by now would be frozen too
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def alive(kind: type, frozen: bool = True) -> list[Any]:
    """Return the objects of a class, or of one below it, that exist.

    Args:
        kind: The class.
        frozen: Whether objects that ``gc.freeze`` has put apart belong to them.
    """
    every = all_objects() if frozen else gc.get_objects()
    kinds = {one for one in set(map(type, every)) if issubclass(one, kind)}
    return list(itertools.compress(every, map(kinds.__contains__, map(type, every))))  # of millions of objects


class Living:
    """The objects of a class, or of one below it, that exist: looked for at times, and noted as they are made.

    A look at all objects takes a tenth of a second in a program that has imported much, so it is no work for each
    step. Between looks only a copy, which is made without ``__init__``, goes unnoticed.

    Args:
        kind: The class. Its ``__init__``, and those of the classes below, are wrapped at the first look.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._noting = weakref.WeakSet[type]()  # classes that note their objects
        self._known = weakref.WeakValueDictionary[int, Any]()  # by identity, in the order in which they were noted

    def __call__(self) -> list[Any]:
        """Return them, in the order in which they were found or made."""
        if any(kind not in self._noting for kind in _below(self._kind)):  # it need not call the others' __init__
            self.look()
        return list(self._known.values())

    def look(self) -> None:
        """Look for them among all objects."""
        for kind in _below(self._kind):
            if kind not in self._noting:
                self._wrap(kind)
        self._known.update({id(one): one for one in alive(self._kind)})

    def _wrap(self, kind: type) -> None:
        self._noting.add(kind)
        if "__init__" not in vars(kind):
            return
        init: Any = vars(kind)["__init__"]

        @functools.wraps(init)
        def noted(one: Any, *args: Any, **kwargs: Any) -> None:
            self._known[id(one)] = one
            init(one, *args, **kwargs)

        kind.__init__ = noted


def _below(kind: type) -> list[type]:
    """Return a class and all below it."""
    return [kind, *[one for below in type.__subclasses__(kind) for one in _below(below)]]

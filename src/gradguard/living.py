"""All existing objects of a class, wherever the program holds them."""

import functools
import gc
import itertools
import weakref
from typing import Any

__all__ = ["Living", "alive", "all_objects"]


def all_objects() -> list[Any]:
    """Return all objects of the garbage collector, frozen ones too: a missed wrapper would make a norm wrong."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # else garbage that exists now would be frozen below
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def alive(kind: type, frozen: bool = True) -> list[Any]:
    """Return the existing instances of a class and its subclasses.

    Args:
        kind: The class.
        frozen: Whether to include the objects that ``gc.freeze`` hides.
    """
    every = all_objects() if frozen else gc.get_objects()
    kinds = {one for one in set(map(type, every)) if issubclass(one, kind)}
    return list(itertools.compress(every, map(kinds.__contains__, map(type, every))))  # fast enough for millions


class Living:
    """The existing instances of a class and its subclasses: found by a search, then tracked as they are made.

    A search of all objects takes a tenth of a second in a program with many imports, too long for every step. Between
    two searches, only a copy that is made without ``__init__`` goes unnoticed.

    Args:
        kind: The class. The first search wraps its ``__init__`` and those of its subclasses.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._noting = weakref.WeakSet[type]()  # classes whose __init__ is wrapped
        self._known = weakref.WeakValueDictionary[int, Any]()  # by id, in the order of registration

    def __call__(self) -> list[Any]:
        """Return the instances, in the order in which they were found or made."""
        if any(kind not in self._noting for kind in _below(self._kind)):  # a new subclass may not call super().__init__
            self.look()
        return list(self._known.values())

    def look(self) -> None:
        """Search all objects of the program for instances."""
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
    """Return a class and all its subclasses."""
    return [kind, *[one for below in type.__subclasses__(kind) for one in _below(below)]]

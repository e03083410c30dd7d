"""The state that, besides the arguments, decides a module's graph: attributes, hooks, layers and code.

A model that kept samples separate may mix them after a flag is set, a hook is registered or a forward is replaced. Such
changes rebind something. So these objects are compared, by identity, with those of the call before:

* the attributes of each module and of its class, its layers and buffers, its hooks, and the hooks on all modules;
* the contents of attributes that are lists, dicts or settings (objects with nothing but plain values);
* the functions that the methods of the layers' classes name, such as `torch.nn.functional.linear`: no trace records
  what a layer with a rule calls.

If an object was rebound, its *form* decides whether the change matters. The form is

* of a plain value (a number, str, None, a dtype): the value;
* of an array that is no tensor (NumPy's): its bytes;
* of a tuple, list, dict, set or deque: the forms of its items;
* of a function: its code, and the forms of the values that it closes over. A list, dict, set or deque among these
  counts by its type only, because the function may fill it;
* of anything else: its type.

Each combination of forms is a *state*, and the model is rehearsed once for each state. Changes that no attribute shows
(a global variable) are found by the operations of the forward (`operation_trace`), or left to the witness.

An attribute that counts calls would make each call a new state. An attribute that has changed and passed the rehearsal
several times becomes *loose*: it no longer distinguishes states. Each later change of it brings the next witness
forward, by as many calls as the attribute had stayed the same.
"""

import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradguard.state.frozen import is_filled
from gradguard.torch_private import buffer_slots, global_hook_tables, hook_tables_of, layer_slots

_PASSED_AS_NUMBER, _PASSED = 3, 16
"""Passed rehearsals after which a changing value is loose: for a number, which may be a counter; for anything else,
which mostly alternates."""

_MOST_ITEMS = 64
"""The most items of a list, dict or deque whose contents are compared."""

_BUFFERS = ": buffers"

_END = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))

Place = tuple[str, Hashable]
"""The name of a container, and the name of a value in it."""


class _Container(NamedTuple):
    """An object whose values are compared.

    Attributes:
        name: The name of the container.
        values: Live view of its values.
        items: Returns the names and values.
        holder: The dictionary that holds the values by their names; None if values cannot be put back one by one.
    """

    name: str
    values: Iterable[Any]
    items: Callable[[], Iterable[tuple[Hashable, Any]]]
    holder: dict[Any, Any] | None = None


class StateReader:
    """Number the states of a module.

    Args:
        module: The outermost module.

    Attributes:
        modules: The module and all modules in it, as of the last full read.
        nearer: Number of calls by which changes of loose attributes bring the next witness forward; the caller resets
            it to 0 after using it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers: dict[Hashable, int] = {}
        self._loose: dict[Place, int] = {}
        self._passed: Counter[Place] = Counter()
        self._rebuilt: Counter[Place] = Counter()
        self._containers: list[_Container] = []
        self._held: dict[Place, Any] = {}
        self._forms: dict[Place, Hashable] = {}
        self._changed: set[Place] = set()
        self._ever_rebound: set[Place] = set()
        self._calls = self.nearer = 0
        self._number = self._look_closely(typed=False)

    def look(self) -> int:
        """Return the number of the module's present state; called before each call of the module."""
        self._calls += 1
        typed = all(map(is_, map(type, self.modules), self._types))
        if not (typed and all(map(is_, self._values(), self._known))):
            self._number = self._look_closely(typed)
        return self._number

    def passed(self) -> int:
        """Record that the model passed a rehearsal in the present state.

        The places that have changed since the last rehearsal become loose after several such rehearsals.

        Returns:
            The number of this state from now on.
        """
        self._passed.update(self._changed)
        loose = []
        for place in self._changed:
            value = self._held.get(place)
            counts = isinstance(value, int | float | _Items) and type(value) is not bool
            if self._passed[place] >= (_PASSED_AS_NUMBER if counts else _PASSED):
                loose.append(place)
        self._changed = set()
        if loose:
            self._loose |= dict.fromkeys(loose, self._calls)
            self._number = self._look_closely(typed=False)
        return self._number

    def note_rebound(self) -> None:
        """Note what the call that ends now has rebound, which later calls may rebind too."""
        self._ever_rebound.update(self._rebound_since())

    def rebound_first(self) -> bool:
        """Return whether the call that ends now changed what no call had changed and `as_before` cannot put back.

        `as_before` cannot put back items of lists and dicts, and attributes of settings and classes.

        Returns:
            Whether there is such a change.
        """
        fixed = {one.name for one in self._containers if one.holder is None}
        return any(place[0] in fixed and place not in self._ever_rebound for place in self._rebound_since())

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Put back, in a block, the attributes and buffers that the call that ends now has rebound."""
        holders = {one.name: one.holder for one in self._containers if one.holder is not None}
        rebound = _rebound(self._held, self._items()).items()
        changes = [(holders[of], name, *values) for (of, name), values in rebound if of in holders]
        for holder, name, before, _ in changes:
            _put(holder, name, before)
        try:
            yield
        finally:
            for holder, name, _, after in changes:
                _put(holder, name, after)

    def _rebound_since(self) -> set[Place]:
        """Return the places that hold another value than at the last `look`: another tensor, or another form."""
        return {
            place
            for place, (before, now) in _rebound(self._held, self._items()).items()
            if isinstance(now, Tensor) or form_of(before) != form_of(now)
        }

    def tensors(self, buffers: bool) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that are attributes, with their names, as of the last look.

        Args:
            buffers: Return the buffers too.

        Returns:
            Names and tensors.
        """
        return chain(self._tensors, self._buffers if buffers else ())

    def _values(self) -> Iterator[Any]:
        return chain(chain.from_iterable([c.values for c in self._containers]), (_END,))

    def _items(self) -> dict[Place, Any]:
        return {(one.name, key): value for one in self._containers for key, value in one.items()}

    def _look_closely(self, typed: bool) -> int:
        """Read every value again, and search for modules and containers again if these may have changed.

        Args:
            typed: Whether all known modules still have their classes.

        Returns:
            The number of the state.
        """
        held, forms = self._held, self._forms
        rebound = _rebound(held, self._items())
        if not typed or any(  # a rebound module or container may bring other values with it
            isinstance(value, nn.Module) or (place not in self._loose and _is_looked_into(value))
            for place, values in rebound.items()
            for value in values
        ):
            names = {one.name for one in self._containers}
            self.modules = list(self._module.modules())
            self._types = [type(m) for m in self.modules]
            self._containers = [c for c in _containers(self._module, self._loose) if (c.name, "") not in self._loose]
            names.intersection_update([one.name for one in self._containers])
            rebound = {place: values for place, values in _rebound(held, self._items()).items() if place[0] in names}
        self._known, self._held = list(self._values()), self._items()
        tensors = [place for place, value in self._held.items() if isinstance(value, Tensor)]
        self._buffers, self._tensors = (
            [
                (f"{holder.removesuffix(_BUFFERS)}.{name}", self._held[holder, name])
                for holder, name in tensors
                if holder.endswith(_BUFFERS) is are_buffers
            ]
            for are_buffers in (True, False)
        )
        self._ever_rebound.update(rebound)
        for place, values in rebound.items():
            if place in self._loose:
                self.nearer += self._calls - self._loose[place]
                self._loose[place] = self._calls
            elif any(map(_is_looked_into, values)):
                self._rebuilt[place] += 1
                if self._rebuilt[place] > _PASSED:  # such as a list that each call builds again
                    self._loose[place] = self._calls
        followed = {place: value for place, value in self._held.items() if place not in self._loose}
        self._forms = {p: forms[p] if p in forms and held[p] is v else form_of(v) for p, v in followed.items()}
        different = {p for p in rebound if forms.get(p, _END) != self._forms.get(p, _END)}
        self._changed |= different - self._loose.keys()
        state = tuple(self._types), tuple(self._forms.items())
        return self._numbers.setdefault(state, len(self._numbers))


def _put(holder: dict[Any, Any], name: Any, value: Any) -> None:
    """Let a dictionary hold a value under a name, or nothing."""
    if value is _END:
        holder.pop(name, None)
    else:
        holder[name] = value


def _rebound(before: Mapping[Place, Any], now: Mapping[Place, Any]) -> dict[Place, tuple[Any, Any]]:
    """Return the old and the new value of each place that now holds another object."""
    both = {place: (before.get(place, _END), now.get(place, _END)) for place in before.keys() | now.keys()}
    return {place: values for place, values in both.items() if values[0] is not values[1]}


def _containers(module: nn.Module, loose: Container[Place]) -> Iterator[_Container]:
    """Yield every container in ``module`` whose values are compared."""
    looked_into: set[int] = set()
    classes: dict[type, None] = {}
    for prefix, layer in module.named_modules():
        name = prefix or "module"
        yield _of_dict(name, vars(layer))
        yield _of_dict(f"{name}: layers", layer_slots(layer))
        yield _of_dict(name + _BUFFERS, buffer_slots(layer))
        for i, table in enumerate(hook_tables_of(layer)):
            yield _of_hooks(f"{name}: hooks {i}", table)
        classes |= dict.fromkeys(type(layer).__mro__)
        for attribute, value in vars(layer).items():
            known = attribute in _OF_TORCH or (name, attribute) in loose or id(value) in looked_into
            if not known and _is_looked_into(value):
                looked_into.add(id(value))
                yield _of_value(f"{name}.{attribute}", value)
    for i, table in enumerate(global_hook_tables()):
        yield _of_hooks(f"all modules: hooks {i}", table)
    for kind in classes:
        if kind not in (nn.Module, object):
            yield _of_dict(f"class {kind.__module__}.{kind.__qualname__}", vars(kind))
    functions = _Functions(classes)
    yield _Container("functions of classes", functions, functions.items)


def _of_dict(name: str, held: Mapping[Any, Any]) -> _Container:
    return _Container(name, held.values(), held.items, held if isinstance(held, dict) else None)


def _of_hooks(name: str, table: Mapping[int, Any]) -> _Container:
    """Return the hooks of a table without duplicates: a hook registered twice does nothing new to samples."""
    return _Container(name, table.values(), lambda: list(enumerate({_code_of(h): h for h in table.values()}.values())))


def _code_of(hook: Any) -> Hashable:
    """Return the code of a function without closure, defaults and attributes; otherwise the hook itself.

    A program may define such a function again for each registration.
    """
    if not isinstance(hook, FunctionType):
        return _Itself(hook)
    holds = hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__ or vars(hook)
    return _Itself(hook) if holds else (hook.__code__, id(hook.__globals__))


def _of_value(name: str, value: Any) -> _Container:
    if isinstance(value, list):
        return _Container(name, value, lambda: [("", _Items(value))])
    if isinstance(value, dict):
        return _Container(name, value.values(), lambda: [("", _Items(value.items()))])
    return _of_dict(name, vars(value))._replace(holder=None)  # nothing puts it back between two reruns


class _Functions:
    """Live view of the functions that the methods of some classes find in modules, such as `torch.nn.functional`.

    Args:
        classes: The classes.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        found: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {}
        for kind in classes:
            for method in vars(kind).values() if kind not in (nn.Module, object) else ():
                names = method.__code__.co_names if isinstance(method, FunctionType) else ()
                spaces = [method.__globals__.get(name) for name in names]
                for space in [vars(one) for one in spaces if isinstance(one, ModuleType)]:
                    for name in names:
                        if isinstance(space.get(name), FunctionType | BuiltinFunctionType):
                            found[id(space), name] = name, space
        self._places = [*found.values()]

    def __iter__(self) -> Iterator[Any]:
        return iter([space.get(name) for name, space in self._places])

    def items(self) -> Iterable[tuple[Hashable, Any]]:
        """Return each place with the function that it holds."""
        return [((id(space), name), space.get(name)) for name, space in self._places]


class _Items(tuple[Any, ...]):
    """The items of a list or dict, compared as one value."""

    __slots__ = ()


def _is_looked_into(value: Any) -> bool:
    """Return whether ``value`` is a list or dict of plain values, or an object with nothing but plain values."""
    if isinstance(value, list | dict):
        held = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ITEMS and all(isinstance(one, _PLAIN) for one in held)
    if isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, *_PLAIN)):
        return False
    held = getattr(value, "__dict__", None)
    kinds = (*_PLAIN, list, dict, tuple, set, frozenset, deque)
    return bool(held) and all(isinstance(one, kinds) or _is_array(one) for one in held.values())


@dataclass(frozen=True, eq=False)
class _Itself:
    """One object, compared by identity; the reference keeps its id from being reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is an array that is no tensor, such as NumPy's."""
    return isinstance(value, array | bytearray | memoryview) or hasattr(type(value), "__array_interface__")


def content_of(value: Any) -> Hashable:
    """Return the format, the shape and a digest of the bytes of an array that is no tensor; None for other values."""
    if not _is_array(value):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError):  # such as arrays of dates, which have no buffer
        return None
    try:
        content = view.cast("B")
    except (TypeError, ValueError):  # complex numbers, another byte order, strides, or no elements
        content = view.tobytes()
    return view.format, view.shape, hashlib.blake2b(content, digest_size=16).digest()


def form_of(value: Any, depth: int = 3) -> Hashable:
    """Return the part of a value that may decide a graph; see the module's docstring."""
    if isinstance(value, (*_PLAIN, Number)):
        return type(value), value
    if (content := content_of(value)) is not None:
        return type(value), content
    if isinstance(value, property):
        return form_of(value.fget, depth)
    if isinstance(value, staticmethod | classmethod | MethodType):
        return _Itself(getattr(value, "__self__", None)), form_of(value.__func__, depth)
    if isinstance(value, BuiltinFunctionType | type):
        return _Itself(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        held = _without_notes((*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    elif isinstance(value, partial):
        held = _without_notes((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, set | frozenset):
        forms = frozenset([form_of(one, depth - 1) for one in value]) if depth else len(value)
        return type(value), forms
    elif isinstance(value, dict):
        held = tuple(value.items())
    elif isinstance(value, tuple | list | deque):
        held = value
    else:
        return type(value)
    kind = value.__code__ if isinstance(value, FunctionType) else type(value)
    whole = depth and (len(held) <= _MOST_ITEMS or not isinstance(value, list | dict | deque))
    return kind, tuple([form_of(one, depth - 1) for one in held]) if whole else len(held)


def _without_notes(held: Iterable[Any]) -> list[Any]:
    """Return the values that code closes over, with only the types of containers that the code may fill."""
    return [type(one) if isinstance(one, list | dict | set | deque) else one for one in held]

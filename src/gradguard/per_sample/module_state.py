"""What decides a module's graph beside its arguments: attributes, hooks, layers and code, looked at before each call.

A model that was found to treat samples apart may stop doing so when a flag is set, a hook is registered or a forward is
replaced. So everything that such a change rebinds is compared, by identity, with what it was in the call before:

* the attributes of each module and of its class, the layers and the buffers in it, its hooks, and hooks on all modules;
* the contents of lists, dicts and settings (objects that hold nothing but plain values) that are attributes.

Where something was rebound, its *form* tells whether that matters: the value of a plain one (bool, int, float, str,
None, a dtype, a tuple of these), the code of a function with the plain values that it closes over, else the type. Each
combination of forms is a *state*; the model is tried out once for each. What no attribute shows (a global variable) is
seen by what the forward does (`operation_trace`), or left to the witness.

An attribute that counts would make each call a new state. One that has changed and passed the trial several times is
*loose*: it tells no states apart any more, and its changes bring the next witness nearer, by as many calls as it had
been still.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.torch_private import buffer_slots, global_hook_tables, hook_tables_of, layer_slots

_PASSED_AS_NUMBER, _PASSED = 3, 16
"""Trials after which what has changed is loose: a number, which may count; anything else, which mostly takes turns."""

_MOST_ITEMS = 64
"""Items of a list or dict that is looked into."""

_END = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))

Place = tuple[str, Hashable]
"""What holds a value, and under which name."""


@dataclass
class _Container:
    """Something whose values are looked at.

    Attributes:
        name: Of it.
        values: Live view of its values.
        items: Gives names and values.
        seen: Values when they were last looked at.
        forms: Of these, but loose ones, by name.
        rebuild: What is looked at depends on it.
        attributes: They are attributes of a module, some of which are looked into.
    """

    name: str
    values: Iterable[Any]
    items: Callable[[], Iterable[tuple[Hashable, Any]]]
    rebuild: bool = False
    attributes: bool = False
    seen: list[tuple[Hashable, Any]] = field(default_factory=list)
    forms: tuple[tuple[Hashable, Hashable], ...] = ()

    def look(self, loose: Mapping[Place, int]) -> None:
        """Take note of what it holds."""
        self.seen = list(self.items())
        self.forms = tuple([(k, form_of(v)) for k, v in self.seen if (self.name, k) not in loose])


class ModuleState:
    """Tells the states of a module apart.

    Args:
        module: The outermost module.

    Attributes:
        nearer: By how many calls changes of loose attributes have brought the next witness nearer; whoever brings it
            nearer sets it to 0.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers: dict[Hashable, int] = {}
        self._loose: dict[Place, int] = {}
        self._passed: dict[Place, int] = {}
        self._rebuilt: dict[Place, int] = {}
        self._changed: set[Place] = set()
        self._calls = 0
        self.nearer = 0
        self._build()

    def look(self) -> int:
        """Return the number of the state that the module is in, before a call."""
        self._calls += 1
        if all(map(is_, chain(chain.from_iterable(self._views), (_END,)), self._known)) and all(
            map(is_, map(type, self._modules), self._types)
        ):
            return self._number
        return self._look_closely()

    @property
    def is_new(self) -> bool:
        """Whether anything has changed since the model was last tried out."""
        return bool(self._changed)

    def passed(self) -> int:
        """The model has been tried out in a new state, and passed.

        What has changed on the way here is loose once that has happened several times.

        Returns:
            The number that this state has from now on.
        """
        limits = {place: self._limit(place) for place in self._changed}
        for place in self._changed:
            self._passed[place] = self._passed.get(place, 0) + 1
        loose = {place for place, limit in limits.items() if self._passed[place] >= limit}
        self._changed = set()
        if loose:
            self._loose |= dict.fromkeys(loose, self._calls)
            self._build()
        return self._number

    def _limit(self, place: Place) -> int:
        values = [v for c in self._containers if c.name == place[0] for k, v in c.seen if k == place[1]]
        number = [isinstance(v, int | float | _Items) and not isinstance(v, bool) for v in values]
        return _PASSED_AS_NUMBER if any(number) else _PASSED

    def _look_closely(self) -> int:
        """Something was rebound: see whether that makes another state."""
        rebuild = [type(m) for m in self._modules] != self._types
        forms = False
        for container in self._containers:
            seen = container.seen
            now = list(container.items())
            if len(now) == len(seen) and all(a[1] is b[1] and a[0] == b[0] for a, b in zip(now, seen, strict=True)):
                continue
            before = container.forms
            rebuild |= container.rebuild
            for key, values in _rebound(seen, now).items():
                place = container.name, key
                if place in self._loose:
                    self.nearer += self._calls - self._loose[place]
                    self._loose[place] = self._calls
                elif container.attributes and any(map(_is_looked_into, values)):
                    rebuild = True
                    self._rebuilt[place] = self._rebuilt.get(place, 0) + 1
                    if self._rebuilt[place] > _PASSED:  # a list that is made anew in each call
                        self._loose[place] = self._calls
            container.look(self._loose)
            if container.forms != before:
                forms = True
                different = _differing(before, container.forms)
                self._changed |= {(container.name, key) for key in different}
        if rebuild:
            self._build()
        else:
            self._known = self._flat()
            if forms:
                self._number = self._number_of()
        return self._number

    def _flat(self) -> list[Any]:
        return [*chain.from_iterable(self._views), _END]

    def _number_of(self) -> int:
        state = tuple(self._types), tuple([(c.name, c.forms) for c in self._containers])
        return self._numbers.setdefault(state, len(self._numbers))

    def _build(self) -> None:
        """Find what is to be looked at."""
        before = {c.name: c for c in getattr(self, "_containers", [])}
        self._modules = list(self._module.modules())
        self._types = [type(m) for m in self._modules]
        self._containers = [c for c in _containers(self._module, self._loose) if (c.name, "") not in self._loose]
        self._views = [c.values for c in self._containers]
        for container in self._containers:
            container.look(self._loose)
            if container.name in before:
                different = {(container.name, k) for k in _differing(before[container.name].forms, container.forms)}
                self._changed |= different - self._loose.keys()
        self._known = self._flat()
        self._number = self._number_of()


def _containers(module: nn.Module, loose: Container[Place]) -> Iterator[_Container]:
    """Everything in ``module`` whose values are looked at."""
    looked_into: set[int] = set()
    classes: dict[type, None] = {}
    for prefix, layer in module.named_modules():
        name = prefix or "module"
        yield _Container(name, vars(layer).values(), vars(layer).items, attributes=True)
        yield _of_dict(f"{name}: layers", layer_slots(layer), rebuild=True)
        yield _of_dict(f"{name}: buffers", buffer_slots(layer))
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


def _of_dict(name: str, held: Mapping[Any, Any], rebuild: bool = False) -> _Container:
    return _Container(name, held.values(), held.items, rebuild)


def _of_hooks(name: str, table: Mapping[int, Any]) -> _Container:
    return _Container(name, table.values(), lambda: list(enumerate(table.values())))


def _of_value(name: str, value: Any) -> _Container:
    if isinstance(value, list):
        return _Container(name, value, lambda: [("", _Items(value))])
    if isinstance(value, dict):
        return _Container(name, value.values(), lambda: [("", _Items(value.items()))])
    return _of_dict(name, vars(value))


class _Items(tuple[Any, ...]):
    """The items of a list or dict, which are one value."""

    __slots__ = ()


def _is_looked_into(value: Any) -> bool:
    """Tell whether ``value`` is a list or dict of plain values, or settings: an object that holds nothing else."""
    if isinstance(value, list | dict):
        held = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ITEMS and all(isinstance(one, _PLAIN) for one in held)
    if isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, *_PLAIN)):
        return False
    held = getattr(value, "__dict__", None)
    return bool(held) and all(isinstance(one, (*_PLAIN, list, dict, tuple, set)) for one in held.values())


def _differing(before: Iterable[tuple[Hashable, Any]], now: Iterable[tuple[Hashable, Any]]) -> set[Hashable]:
    """The names under which another form is held, or none."""
    old, new = dict(before), dict(now)
    return {key for key in old.keys() | new.keys() if old.get(key, _END) != new.get(key, _END)}


def _rebound(
    before: Iterable[tuple[Hashable, Any]], now: Iterable[tuple[Hashable, Any]]
) -> dict[Hashable, tuple[Any, Any]]:
    """The names under which another object is held, with what was and what is."""
    old, new = dict(before), dict(now)
    pairs = {key: (old.get(key, _END), new.get(key, _END)) for key in old.keys() | new.keys()}
    return {key: (was, value) for key, (was, value) in pairs.items() if was is not value}


@dataclass(frozen=True, eq=False)
class _Itself:
    """One object, kept so that no other takes its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def form_of(value: Any, depth: int = 3) -> Hashable:
    """What of a value decides a graph."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple):
        return type(value), tuple([form_of(one, depth - 1) for one in value]) if depth else len(value)
    if isinstance(value, partial):
        held = (value.func, *value.args, *value.keywords.values())
        return partial, tuple([form_of(one, depth - 1) for one in held]) if depth else ()
    if isinstance(value, MethodType):
        return _Itself(value.__self__), form_of(value.__func__, depth)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, tuple([form_of(one, depth - 1) for one in held]) if depth else ()
    if isinstance(value, staticmethod | classmethod):
        return form_of(value.__func__, depth)
    if isinstance(value, property):
        return form_of(value.fget, depth)
    if isinstance(value, BuiltinFunctionType | type):
        return _Itself(value)
    return type(value)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

"""The parameters that a user selects: by name or glob pattern, by module, as a list, as an optimizer's param group."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from gradguard.clip.gradients import Gradients, Parameters, named_tensors
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.words import listed

Selection = str | Tensor | nn.Module | Mapping[str, Any] | Iterable["Selection"]
"""A name or glob pattern, a parameter, a module, an optimizer's param group, or an iterable of these."""

MOST_NAMES = 20
"""The largest number of names in a message."""


class Selector:
    """One selection, ready to be matched.

    Args:
        selection: The user's selection.
        what: The argument's name, for messages.

    Raises:
        InvalidTypeError: If the selection has another type.
        InvalidValueError: If the selection is empty.
    """

    def __init__(self, selection: Selection, what: str) -> None:
        self.what = what
        self.patterns: list[str] = []
        self._tensors: list[Tensor] = []
        self._modules: list[nn.Module] = []
        self._take(selection)
        if not (self.patterns or self._tensors or self._modules):
            raise InvalidValueError(f"{what} is empty: expected a name pattern, a module or a list of parameters.")

    def __str__(self) -> str:
        """Describe the selection, with equal text on all ranks."""
        tensors = [f"a parameter of shape {tuple(t.shape)}" for t in self._tensors]
        return ", ".join([*self.patterns, *tensors, *(f"a {type(module).__name__}" for module in self._modules)])

    def __repr__(self) -> str:
        """Return the selection as source code; parameters and modules only as a description."""
        if str(self) != ", ".join(self.patterns):
            return f"<{self}>"
        return repr(self.patterns[0]) if len(self.patterns) == 1 else repr(tuple(self.patterns))

    def refuse_identities(self) -> None:
        """Raise if parameters or modules themselves are selected: a rank has only those of its pipeline stage.

        Raises:
            InvalidTypeError: If there are any.
        """
        if self._tensors or self._modules:
            raise InvalidTypeError(
                f"{self.what} selects parameters or modules themselves, which other pipeline stages do not have: "
                "expected name patterns, the same on every stage."
            )

    def ids(self) -> set[int]:
        """Return the ids of the parameters that were not selected by name."""
        return {id(t) for t in (*self._tensors, *(p for module in self._modules for p in module.parameters()))}

    def fits(self, names: Iterable[str]) -> bool:
        """Tell whether a pattern matches one of ``names``: the name itself, a glob, or a module that contains it."""
        return any(_fits(name, pattern) for pattern in self.patterns for name in names)

    def chosen(self, tensors: Sequence[Tensor], names: Sequence[str] | None) -> set[int]:
        """Return the ids of all selected parameters: those of ``tensors`` by name, and those selected themselves."""
        return self.ids() | {
            id(t) for name, t in zip(names or (), tensors, strict=names is not None) if self.fits([name])
        }

    def require_match(self, tensors: Iterable[Tensor], names: Sequence[str] | None, complete: bool) -> None:
        """Raise if a part of the selection matches nothing.

        Args:
            tensors: The existing parameters.
            names: All their names.
            complete: Whether ``tensors`` are all parameters; if not, one without a gradient may be missing.

        Raises:
            InvalidValueError: If a part matches nothing; the message lists the names.
        """
        for pattern in self.patterns:
            fitting = [name for name in names or () if _fits(name, pattern)]
            literal = [name for name in fitting if _fits_literally(name, pattern)]
            if literal and len(literal) < len(fitting):
                raise InvalidValueError(
                    f"{self.what} has {pattern!r}, which matches {literal[0]} and, in a module called module, "
                    f"{next(name for name in fitting if name not in literal)}: pass the module itself."
                )
            if not fitting:
                raise InvalidValueError(f"{self.what} has {pattern!r}, which matches no parameter; {_advice(names)}")
        present = set(map(id, tensors))
        for entry in (*self._tensors, *self._modules):
            chosen = [entry] if isinstance(entry, Tensor) else list(entry.parameters())
            absent = present.isdisjoint(map(id, chosen))
            if absent and (complete or all(t.grad is not None for t in chosen)):
                kind = f"a {type(entry).__name__}"
                shown = f"{kind} of shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else kind
                raise InvalidValueError(f"{self.what} has {shown}, which matches no parameter; {_advice(names)}")

    def _take(self, selection: object) -> None:
        match selection:
            case str():
                self.patterns.append(selection)
            case Tensor():
                self._tensors.append(selection)
            case nn.Module():
                self._modules.append(selection)
            case Mapping() if "params" in selection:
                self._take(selection["params"])
            case Iterable() if not isinstance(selection, Mapping | bytes):
                for entry in cast("Iterable[object]", selection):
                    self._take(entry)
            case _:
                raise InvalidTypeError(
                    f"{self.what} has {selection!r}: expected a name or pattern, a parameter, a module, a list of "
                    "parameters or a param group of an optimizer."
                )


class KnownNames:
    """All names of each parameter, tied ones included; gradients alone carry only the first name."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}

    def learn(self, parameters: Parameters) -> tuple[Sequence[str] | None, Sequence[Tensor]]:
        """Store the names of all parameters; return names and tensors."""
        names, tensors = named_tensors(parameters, "parameters")
        self._names = {}
        for name, tensor in zip(names or (), tensors, strict=names is not None):
            self._names.setdefault(id(tensor), []).append(name)
        return names, tensors

    def of(self, grads: Gradients) -> list[Sequence[str]]:
        """Return all names of each gradient's parameter."""
        if grads.names is None:
            return [()] * len(grads.parameters)
        firsts = [grads.names[i] for i in grads.positions]
        known = [self._names.get(id(p), ()) for p in grads.parameters]
        # Another tensor may have the id of a dead one; the stored names then lack its name.
        return [all_of if first in all_of else (first,) for first, all_of in zip(firsts, known, strict=True)]


def _fits(name: str, pattern: str) -> bool:
    """Tell whether ``pattern`` matches; it may omit the ``module.`` that wrappers such as DDP put before names."""
    return _fits_literally(name, pattern) or _fits_literally(name.removeprefix("module."), pattern)


def _fits_literally(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _advice(names: Sequence[str] | None) -> str:
    if names is None:
        return "the parameters have no names: pass the module or model.named_parameters() to select by name."
    return f"the parameters are {listed(names, MOST_NAMES)}."

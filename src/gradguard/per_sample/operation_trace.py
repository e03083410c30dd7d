"""The trace of one forward: each torch function that it called, in order, with its numbers.

A branch may depend on anything: a global variable, a closure, an entry of a set, the values of the batch, chance.
Another branch calls other functions, or the same functions with other numbers. A forward that repeats the trace of a
verified forward therefore needs no further verification. A forward with another trace is verified on its own step.

A trace contains the functions, the modules that start, and the arguments. Of a tensor it reads which one it is, and the
`torch.autograd.Function` that made it; of a tensor that has no gradient and is not trained, how often it was written in
place; of an array that is no tensor (NumPy's), its contents. It does not record the operations inside layers with a
rule of their own. It reads neither shapes nor values of tensors.

Which tensor it is, an event says by a name and a number. A result has the name of its function, of the functions that
made the arguments, and of its position among several results. The number counts the results of the same name since
then. So the events determine which earlier result each function gets, and a mask that is made at the beginning is
referred to alike, however many events come between. A cast stands for what it casts. The arguments of the call are
named by their positions. Any other tensor comes from outside: an event says that it is used for the first time, and the
tensor itself counts as a number, which changes if another tensor takes its place while it still exists.

Numbers that changed and were verified several times, such as lengths and schedules, are ignored from then on. A model
that does something else in each step (experts that get tokens or none, loops over a length) would be verified without
end. So once enough ways through the model are known, a way is new only if it has two neighbouring events that were
never neighbours before.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Number
from types import FunctionType
from typing import Any, Self

from torch import Size, Tensor, dtype, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from gradguard.per_sample.call_arguments import changes_of, tensor_leaves
from gradguard.per_sample.module_state import content_of, form_of
from gradguard.per_sample.origins import Origin, Origins, name_of
from gradguard.per_sample.row_choices import RowChoices
from gradguard.torch_private import never_compiled, pop_function_mode, saving_hooks, without_overrides

_MOST_WAYS = 16
"""Number of known ways through a model from which only new pairs of events count as new."""

_PASSED = 3
"""Number of verified changes after which a number is ignored."""

_OFTEN = 64
"""Number of new traces that are all verified; after that only the 128th, 256th, ... one is."""

_READS = frozenset({"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device",
                    "element_size", "is_floating_point", "is_complex", "is_contiguous", "is_same_size"})  # fmt: skip
"""Functions that only read properties of a tensor."""


_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "dropout",
                    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_",
                    "alpha_dropout_"})  # fmt: skip
"""Functions that return their argument itself or a new tensor, by its dtype or by the rate of dropout, which are
not those of the step in a trial."""


_BY_THEMSELVES = frozenset({bool, str, type(None), type(Ellipsis), dtype})
"""Classes of values that an event contains as they are: those of most arguments besides tensors and numbers."""


_SETTINGS = (bool, Number, str, type(None), dtype, FunctionType)
"""Classes of settings that a `torch.autograd.Function` may read in its backward."""

_MOST_VALUES, _NEAR = 64, 4
"""The most values of a setting that are recorded; the number of levels and of operations in each that are recorded of a
tensor which no torch function made."""


class _Outside:
    """A tensor from outside; equal to an earlier one that no longer exists, because it then takes that one's place."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __slots__ = ("_tensor",)

    def __init__(self, tensor: weakref.ref[Tensor]) -> None:
        self._tensor = tensor

    def __eq__(self, earlier: object) -> bool:
        if not isinstance(earlier, _Outside):
            return NotImplemented
        known = earlier._tensor()
        return known is None or known is self._tensor()


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a word or another setting, or a short sequence of these."""
    if isinstance(value, tuple | list):
        return len(value) <= _MOST_VALUES and all(map(_is_plain, value))
    return isinstance(value, _SETTINGS)


def _names_of(node: Any) -> list[str]:
    """Return the names of an operation and of those before it that are near."""
    names, level = list[str](), [node]
    for _ in range(_NEAR):
        names += [one.name() for one in level]
        level = [before for one in level for before, _ in one.next_functions if before is not None][:_NEAR]
    return names


class OperationTrace(TorchFunctionMode):
    """Record the torch functions that are called between `resume` and `pause`.

    Args:
        trained: Addresses of the trained parameters: each is noted as one, whether or not it requires grad meanwhile.
        arguments: The tensors that the outermost module gets.
        of_samples: Those arguments, and parts of arguments, that hold values of the samples.
        is_carried: Returns whether a tensor from outside is what an earlier forward made of its samples.

    Attributes:
        events: The calls, without numbers.
        numbers: The numbers in the calls, in order.
        origins: The origins of its tensors.
        rows: The operations that select rows.
        returns_carried: Whether an output is made of such a tensor; known once the forward has ended.
    """

    def __init__(
        self,
        trained: Set[int] = frozenset(),
        arguments: Sequence[Tensor] = (),
        of_samples: Iterable[Tensor] = (),
        is_carried: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        super().__init__()
        self._trained = trained
        self.events: list[Any] = []
        self.numbers: list[Any] = []
        self.origins = Origins()
        self.rows = RowChoices(self.origins)
        self._paused = True
        self._count: dict[int, int] = {}
        self._func: Any = None
        self._given: list[Origin] = []
        self._is_carried, self.returns_carried = is_carried, False
        self._saving: tuple[Any, Any] | None = None
        self._nodes: dict[int, Any] = {}
        for tensor in of_samples:
            self.origins.of(tensor).of_data = True
        for position, tensor in enumerate(arguments):
            self._name(self.origins.of(tensor), hash(("argument", position)), "argument")

    @never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            not self._paused
            and (name := name_of(func)) not in _READS
            # ``requires_grad_()`` on a tensor that requires grad, as hooks of checkpoints call it, changes nothing
            and not (name == "requires_grad_" and not kwargs and args[0].requires_grad and args[1:] in ((), (True,)))
        ):
            kwargs = kwargs or {}
            self._note(func, args, kwargs)
            self.rows.look_at(name, args, kwargs)
            result = self.origins.follow(name, func, args, kwargs, self._given)
            if name in _CASTS and args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
                self.passes(args[:1], (result,))
            self.made(result)
            return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._func, self._given = func, []
        self._look_at_saving()
        forms: list[Any] = [func, *map(self._form, args)]
        for key, value in kwargs.items():
            forms += [key, self._form(value)]
        self.events.append(tuple(forms))

    def _look_at_saving(self) -> None:
        """Record that other functions change, from now on, what operations save for their backward."""
        hooks = saving_hooks()
        if hooks != self._saving:
            self._saving = hooks
            self.events.append(("saved by", *[form_of(getattr(hook, "__func__", hook)) for hook in hooks or ()]))

    def _name(self, origin: Origin, name: int, made_by: Any) -> tuple[int, int]:
        """Give a tensor a name and return it."""
        number = self._count[name] = self._count.get(name, 0) + 1
        origin.name, origin.made_by = (name, number), made_by
        return origin.name

    def _form_of_tensor(self, value: Tensor) -> Any:
        node, known = value.grad_fn, self.origins.of(value)
        self._given.append(known)
        is_trained = node is None and (value.requires_grad or id(value) in self._trained)
        if known.name is None and is_trained:
            return True
        own = isinstance(node, BackwardCFunction) and type(node).__name__ != "TapBackward"
        made_by = type(node) if own else node is None
        is_outside = known.name is None
        if own and id(node) not in self._nodes:
            self._look_at_settings(node)
        if is_outside:
            known.of_data |= node is not None  # a function that the trace does not see made it
            known.carried |= node is None and self._is_carried(value)
            if node is not None and not own:
                self.events.append(("outside", *_names_of(node)))
        name, number = known.name or self._name(known, hash(("outside", made_by, value.output_nr)), "outside")
        if is_outside and node is None:
            self.numbers.append(_Outside(known.tensor))
        if node is None and not is_trained:  # a trained one is written into by each step of an optimizer
            self.numbers.append(changes_of(value))
        return name, -1 if is_outside else self._count[name] - number, made_by, is_trained

    def _look_at_settings(self, node: Any) -> None:
        """Record the plain values that a `torch.autograd.Function` stored for its backward."""
        self._nodes[id(node)] = node
        held = sorted((name, value) for name, value in vars(node).items() if _is_plain(value))
        if held:
            self.events.append((type(node), *[(name, self._form(value)) for name, value in held]))

    def _form(self, value: Any) -> Any:
        kind = type(value)
        if kind in _BY_THEMSELVES:
            return value
        if issubclass(kind, Tensor):  # it may contain values of the batch, of parameters or random numbers
            if kind is Tensor or kind is nn.Parameter:
                return self._form_of_tensor(value)
            with without_overrides():
                return kind, self._form_of_tensor(value)
        if kind is int or kind is float:
            self.numbers.append(value)
            return kind
        if kind is tuple or kind is list or kind is Size:
            return kind, *map(self._form, value)
        if kind is slice:
            return kind, self._form(value.start), self._form(value.stop), self._form(value.step)
        if isinstance(value, Number):
            self.numbers.append(value)
            return Number
        if isinstance(value, FunctionType):
            return form_of(value)
        if (content := content_of(value)) is not None:
            self.numbers.append(content)
            return kind
        try:
            hash(value)
        except TypeError:
            return kind
        return value if kind.__module__ in ("builtins", "torch") else kind

    def made(self, result: Any) -> None:
        """Name what the last event, or a module that has ended, returned; known tensors keep their names."""
        for position, tensor in enumerate([result] if type(result) is Tensor else tensor_leaves(result)):
            origin = self.origins.of(tensor)
            if origin.name is None:
                made_by = [one.made_by for one in self._given]
                self._name(origin, hash((position, self._func, *made_by)), self._func)
                if isinstance(self._func, type):  # a layer whose operations are not recorded
                    origin.of_data = origin.made_of_data = any(one.of_data for one in self._given)
                    origin.carried = any(one.carried for one in self._given)

    def passes(self, given: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Record that ``changed`` stands for ``given``, without an operation of the model in between."""
        for before, after in zip(map(self.origins.of, given), map(self.origins.of, changed), strict=False):
            if before.name is not None:
                after.name, after.made_by = before.name, before.made_by
                after.of_data, after.made_of_data = before.of_data, before.made_of_data
                after.carried = before.carried

    def starts(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record that a module starts."""
        kind = type(module)
        own = vars(module).get("forward")
        self._func, self._given = kind, []
        self._look_at_saving()
        tensors = [self._form(value) for value in args if isinstance(value, Tensor | tuple | list)]
        tensors += [
            (key, self._form(value)) for key, value in kwargs.items() if isinstance(value, Tensor | tuple | list)
        ]
        self.events.append((kind, kind.forward, None if own is None else form_of(own), *tensors))

    def ends(self, outputs: Sequence[Tensor]) -> list[Origin]:
        """Record the outputs of the outermost module, and return the origins of all tensors."""
        self.events.append(("ends", *[self._form(tensor) for tensor in outputs]))
        self.returns_carried = any(self.origins.of(tensor).carried for tensor in outputs)
        self._nodes.clear()
        return self.origins.forget()

    def __enter__(self) -> Self:
        self._paused = False
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.pause()

    def resume(self) -> None:
        """Record calls from now on."""
        self.__enter__()

    def pause(self) -> bool:
        """Stop recording until `resume`; return whether the trace was recording."""
        if self._paused:
            return False
        self._paused = True
        pop_function_mode(self)
        return True

    @property
    def way(self) -> int:
        """A hash of the events, without the numbers in them."""
        return hash(tuple(self.events))

    @property
    def pairs(self) -> set[Any]:
        """The pairs of neighbouring events."""
        return set(zip(self.events, self.events[1:], strict=False))


class KnownOperations:
    """The traces of forwards that were verified to keep samples separate.

    Attributes:
        stored: How often a looped call of each batch size at most read or wrote values of its samples, by function.
    """

    def __init__(self) -> None:
        self.stored = defaultdict[int, Counter[str]](Counter)
        self._ways: set[int] = set()
        self._numbers: dict[tuple[int, int], list[Any]] = {}
        self._changes: Counter[tuple[int, int, int]] = Counter()
        self._pairs: set[Any] = set()
        self._news = 0

    def knows(self, trace: OperationTrace) -> bool:
        """Return whether a verified forward or a rehearsal has had the same events, with any numbers."""
        return trace.way in self._ways

    def is_new(self, trace: OperationTrace, batch_size: int) -> bool:
        """Return whether a forward must be verified, because no verified forward had the same trace."""
        way = trace.way
        if trace.origins.by_value and (batch_size, way) not in self._numbers:  # at most rehearsals had these events
            new = len(self._ways) <= _MOST_WAYS
        elif way in self._ways:
            changed = self._changed(way, trace.numbers, batch_size)
            new = any(self._changes[batch_size, way, i] < _PASSED for i in changed)
        else:
            new = len(self._ways) < _MOST_WAYS or not trace.pairs <= self._pairs
        self._news += new
        return new and (self._news <= _OFTEN or self._news & (self._news - 1) == 0)

    def _changed(self, way: int, numbers: list[Any], batch_size: int) -> list[int]:
        """Return the indices of numbers that differ from the last forward with the same events and batch size."""
        known = self._numbers.get((batch_size, way), numbers)
        if numbers == known:
            return []
        return [i for i, (a, b) in enumerate(zip(numbers, known, strict=True)) if a != b and (a == a or b == b)]

    def learn(self, trace: OperationTrace, batch_size: int | None = None) -> None:
        """Store the trace of a verified forward; its numbers only if its ``batch_size`` is given."""
        way = trace.way
        if way not in self._ways:
            self._pairs |= trace.pairs
            if len(self._ways) < _MOST_WAYS:
                self._ways.add(way)
        if batch_size is not None and way in self._ways:
            self._changes.update([(batch_size, way, i) for i in self._changed(way, trace.numbers, batch_size)])
            self._numbers[batch_size, way] = trace.numbers

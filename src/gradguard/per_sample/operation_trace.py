"""The trace of one forward: each torch function that it called, in order, with its numbers.

A branch may depend on anything: a global variable, a closure, an entry of a set, the values of the batch, chance.
Another branch calls other functions, or the same functions with other numbers. A forward that repeats the trace of a
verified forward therefore needs no further verification. A forward with another trace is verified on its own step.

A trace contains the functions, the modules that start, and the arguments. Of a tensor it reads the
`torch.autograd.Function` that made it and how many events ago; of a tensor that has no gradient and is not trained, how
often it was written in place; of an array that is no tensor (NumPy's), its contents. It does not record the operations
inside layers with a rule of their own. It reads neither shapes nor values of tensors.

Numbers that changed and were verified several times, such as lengths and schedules, are ignored from then on. A model
that does something else in each step (experts that get tokens or none, loops over a length) would be verified without
end. So once enough ways through the model are known, a way is new only if it has two neighbouring events that were
never neighbours before.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from numbers import Number
from types import FunctionType
from typing import Any

from torch import Size, Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from gradguard.per_sample.call_arguments import changes_of
from gradguard.per_sample.module_state import content_of, form_of
from gradguard.per_sample.row_choices import RowChoices
from gradguard.torch_private import never_compiled, pop_function_mode

_MOST_WAYS = 16
"""Number of known ways through a model from which only new pairs of events count as new."""

_PASSED = 3
"""Number of verified changes after which a number is ignored."""

_OFTEN = 64
"""Number of new traces that are all verified; after that only the 128th, 256th, ... one is."""

_READS = frozenset({"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device",
                    "element_size", "is_floating_point", "is_complex", "is_contiguous", "is_same_size"})  # fmt: skip
"""Functions that only read properties of a tensor."""


_BY_VALUE = frozenset({"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy",
                       "__array__", "allclose", "equal", "nonzero", "argwhere", "masked_select", "unique", "topk",
                       "sort", "argsort", "kthvalue", "median", "quantile", "multinomial", "bincount", "argmax",
                       "argmin", "cumsum"})  # fmt: skip
"""Functions that return values to the program, or select by values: their effect on a sample may depend on others."""


_MAKING = frozenset({"arange", "ones", "zeros", "full", "eye"})
_KEEPING = frozenset({"getitem", "view", "reshape", "unsqueeze", "expand", "to", "diff", "cumsum", "cat", "all", "any",
                      "add", "sub", "rsub", "eq", "ne", "lt", "le", "gt", "ge"})  # fmt: skip
"""Functions that make a tensor from numbers alone, and functions whose result depends on their arguments alone;
together they compute positions, for example."""


_COMPARE = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "where"})
"""Functions that count as `_BY_VALUE` if an argument requires grad; a comparison of masks or ids does not count."""


class OperationTrace(TorchFunctionMode):
    """Record the torch functions that are called between `resume` and `pause`.

    Args:
        trained: Addresses of the trained parameters: each is noted as one, whether or not it requires grad meanwhile.

    Attributes:
        events: The calls, without numbers.
        numbers: The numbers in the calls, in order.
        by_value: Whether a function's effect may depend on values, or on all values of a tensor together.
        rows: The operations that select rows.
    """

    def __init__(self, trained: Set[int] = frozenset()) -> None:
        super().__init__()
        self._trained = trained
        self.events: list[Any] = []
        self.numbers: list[Any] = []
        self.by_value = False
        self.rows = RowChoices()
        self._paused = True
        self._made: dict[Node, int] = {}
        self._passed_as: dict[tuple[Node, int], tuple[Node, int]] = {}
        self._of_all: dict[int, weakref.ref[Tensor]] = {}
        self._without_data: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._is_without_data = False

    @never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            not self._paused
            and (name := getattr(func, "__name__", "")) not in _READS
            # ``requires_grad_()`` on a tensor that requires grad, as hooks of checkpoints call it, changes nothing
            and not (name == "requires_grad_" and not kwargs and args[0].requires_grad and args[1:] in ((), (True,)))
        ):
            self._is_without_data = True
            self._note(func, args, kwargs)
            without_data = self._is_without_data
            compares = name in _COMPARE and any(isinstance(a, Tensor) and a.requires_grad for a in args)
            if compares or (name in _BY_VALUE and not without_data):
                self.by_value = True
            self.rows.look_at(name, args, kwargs)
            result = func(*args, **kwargs) if kwargs else func(*args)
            self.rows.made(name, args, result)
            self.made(result)
            if without_data and type(result) is Tensor and (name in _MAKING or name.strip("_") in _KEEPING):
                self._without_data[id(result)] = weakref.ref(result), changes_of(result)
            if type(result) is Tensor and not self.by_value:
                self._follow_numbers(args, result)
            return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def _follow_numbers(self, args: Sequence[Any], result: Tensor) -> None:
        """Set ``by_value`` if a number computed from a whole tensor, such as its maximum, goes into another tensor."""
        known = [(a, self._of_all.get(id(a))) for a in args if isinstance(a, Tensor)] if self._of_all else []
        of_all = any(number is not None and number() is a for a, number in known)
        if result.dim():
            self.by_value = of_all
        elif of_all or (args and isinstance(args[0], Tensor) and args[0].dim()):
            self._of_all[id(result)] = weakref.ref(result)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        forms: list[Any] = [func, *map(self._form, args)]
        if kwargs:
            for key, value in kwargs.items():
                forms += [key, self._form(value)]
        self.events.append(tuple(forms))

    def _form(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, Tensor):  # it may contain values of the batch, of parameters or random numbers
            known = self._without_data.get(id(value))
            without = known is not None and known[0]() is value and known[1] == changes_of(value)
            self._is_without_data = self._is_without_data and without
        if kind is Tensor or kind is nn.Parameter:
            node, place = value.grad_fn, value.output_nr
            if node is None:
                is_trained = value.requires_grad or id(value) in self._trained
                if not is_trained:  # a trained one is written into by each step of an optimizer
                    self.numbers.append(changes_of(value))
                return is_trained
            node, place = self._passed_as.get((node, place), (node, place))
            since = len(self.events) - self._made.get(node, len(self.events))
            own = isinstance(node, BackwardCFunction) and type(node).__name__ != "TapBackward"
            return since, place, type(node) if own else None
        if kind is int or kind is float:
            self.numbers.append(value)
            return kind
        if kind is tuple or kind is list or kind is Size:
            return kind, *map(self._form, value)
        if kind is slice:
            return kind, self._form(value.start), self._form(value.stop), self._form(value.step)
        if isinstance(value, bool | Tensor):
            return value if kind is bool else kind
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
        """Record that the last event, or a module that has ended, returned ``result``."""
        for value in result if type(result) is tuple or type(result) is list else (result,):
            if isinstance(value, Tensor) and (node := value.grad_fn) is not None:
                self._made[node] = len(self.events)

    def passes(self, given: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Record that ``changed`` stands for ``given``, without an operation of the model in between."""
        for before, after in zip(given, changed, strict=False):
            if before is not after and before.grad_fn is not None and after.grad_fn is not None:
                self._passed_as[after.grad_fn, after.output_nr] = before.grad_fn, before.output_nr

    def starts(self, module: nn.Module, args: Sequence[Any]) -> None:
        """Record that a module starts."""
        kind = type(module)
        own = vars(module).get("forward")
        tensors = [self._form(value) for value in args if isinstance(value, Tensor)]
        self.events.append((kind, kind.forward, None if own is None else form_of(own), *tensors))

    def ends(self, outputs: Sequence[Tensor]) -> None:
        """Record the outputs of the outermost module."""
        self.events.append(("ends", *[self._form(tensor) for tensor in outputs]))
        self._passed_as.clear()
        self._made.clear()  # nodes would keep the graph alive

    def resume(self) -> None:
        """Record calls from now on."""
        self._paused = False
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
    """The traces of forwards that were verified to keep samples separate."""

    def __init__(self) -> None:
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
        if trace.by_value and (batch_size, way) not in self._numbers:  # at most rehearsals had these events
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

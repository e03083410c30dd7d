"""The trace of one forward: each function of torch that it called, in order, with its numbers.

Whatever decides a branch (a global variable, a closure, an entry of a set, the values of the batch, chance): another
branch calls other functions, or the same with other numbers. So a forward that does what an earlier one did, which was
found to treat samples apart, needs no further look; one that does anything else is looked at on that very step.

What is read are the function, the modules that start, and the arguments: of a tensor, the `torch.autograd.Function`
that made it, how long ago it was made, and, if it has no gradient and is not trained, how often it was written into; of
an array that is no tensor (NumPy's) what it holds. Layers with a rule of their own are not looked into. The shapes and
the values of tensors are not read.

Numbers that changed and passed several times, such as lengths and schedules, count no more. A model that does something
else in each step (experts that get tokens or none, loops over a length) would be looked at for ever: once enough ways
through it are known, only one that puts two functions next to each other which never were is new.
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
from gradguard.torch_private import never_compiled, pop_function_mode

_MOST_WAYS = 16
"""Ways through a model after which only new pairs of functions are new."""

_PASSED = 3
"""Changes of a number, each of which passed, after which it counts no more."""

_OFTEN = 64
"""How often something new is looked at; after that on the 128th, 256th, ... time."""

_READS = frozenset({"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device",
                    "element_size", "is_floating_point", "is_complex", "is_contiguous", "is_same_size"})  # fmt: skip
"""Functions that only read what a tensor is."""


_BY_VALUE = frozenset({"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy",
                       "__array__", "allclose", "equal", "nonzero", "argwhere", "masked_select", "unique", "topk",
                       "sort", "argsort", "kthvalue", "median", "quantile", "multinomial", "bincount", "argmax",
                       "argmin", "cumsum"})  # fmt: skip
"""Functions that read values for the program, or select by them: what they do to a sample may depend on others."""


_MAKING = frozenset({"arange", "ones", "zeros", "full", "eye"})
_KEEPING = frozenset({"getitem", "view", "reshape", "unsqueeze", "expand", "to", "diff", "cumsum", "cat", "all", "any",
                      "add", "sub", "rsub", "eq", "ne", "lt", "le", "gt", "ge"})  # fmt: skip
"""Functions that make a tensor of numbers alone, and those that make one of other tensors alone: of positions, say."""


_COMPARE = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "where"})
"""These too, where they get what has a gradient, and not a mask of the data."""


class OperationTrace(TorchFunctionMode):
    """Notes the functions of torch that are called between `resume` and `pause`.

    Args:
        trained: Addresses of the trained parameters: each is noted as one, whether or not it requires grad meanwhile.

    Attributes:
        events: The calls, without numbers.
        numbers: The numbers in them, in order.
        by_value: Something that was done may depend on values, or on all of them together.
    """

    def __init__(self, trained: Set[int] = frozenset()) -> None:
        super().__init__()
        self._trained = trained
        self.events: list[Any] = []
        self.numbers: list[Any] = []
        self.by_value = False
        self._paused = True
        self._made: dict[Node, int] = {}
        self._of_all: dict[int, weakref.ref[Tensor]] = {}
        self._without_data: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._is_without_data = False

    @never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            not self._paused
            and (name := getattr(func, "__name__", "")) not in _READS
            # ``requires_grad_()`` of what has a gradient, as hooks of checkpoints do, changes nothing
            and not (name == "requires_grad_" and not kwargs and args[0].requires_grad and args[1:] in ((), (True,)))
        ):
            self._is_without_data = True
            self._note(func, args, kwargs)
            without_data = self._is_without_data
            compares = name in _COMPARE and any(isinstance(a, Tensor) and a.requires_grad for a in args)
            if compares or (name in _BY_VALUE and not without_data):
                self.by_value = True
            result = func(*args, **kwargs) if kwargs else func(*args)
            self.made(result)
            if without_data and type(result) is Tensor and (name in _MAKING or name.strip("_") in _KEEPING):
                self._without_data[id(result)] = weakref.ref(result), changes_of(result)
            if type(result) is Tensor and not self.by_value:
                self._follow_numbers(args, result)
            return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def _follow_numbers(self, args: Sequence[Any], result: Tensor) -> None:
        """See whether a number made of a whole tensor, such as its largest value, goes into another tensor."""
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
        if issubclass(kind, Tensor):  # values of the batch, of parameters or of chance may be in it
            known = self._without_data.get(id(value))
            without = known is not None and known[0]() is value and known[1] == changes_of(value)
            self._is_without_data = self._is_without_data and without
        if kind is Tensor or kind is nn.Parameter:
            node = value.grad_fn
            if node is None:
                is_trained = value.requires_grad or id(value) in self._trained
                if not is_trained:  # a trained one is written into by each step of an optimizer
                    self.numbers.append(changes_of(value))
                return is_trained
            since = len(self.events) - self._made.get(node, len(self.events))
            own = isinstance(node, BackwardCFunction) and type(node).__name__ != "TapBackward"
            return since, value.output_nr, type(node) if own else None
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
        """Note that what was noted last, or a module that has ended, gave a result."""
        for value in result if type(result) is tuple or type(result) is list else (result,):
            if isinstance(value, Tensor) and (node := value.grad_fn) is not None:
                self._made[node] = len(self.events)

    def starts(self, module: nn.Module, args: Sequence[Any]) -> None:
        """Note that a module starts."""
        kind = type(module)
        own = vars(module).get("forward")
        tensors = [self._form(value) for value in args if isinstance(value, Tensor)]
        self.events.append((kind, kind.forward, None if own is None else form_of(own), *tensors))

    def ends(self, outputs: Sequence[Tensor]) -> None:
        """Note what the outermost module returns."""
        self.events.append(("ends", *[self._form(tensor) for tensor in outputs]))
        self._made.clear()  # nodes would keep the graph alive

    def resume(self) -> None:
        """Note what is called from now on."""
        self._paused = False
        self.__enter__()

    def pause(self) -> bool:
        """Note nothing until `resume`; return whether anything was noted until now."""
        if self._paused:
            return False
        self._paused = True
        pop_function_mode(self)
        return True

    @property
    def way(self) -> int:
        """A number for what was done, numbers apart."""
        return hash(tuple(self.events))

    @property
    def pairs(self) -> set[Any]:
        """Pairs of neighbours."""
        return set(zip(self.events, self.events[1:], strict=False))


class KnownOperations:
    """The ways through a model that were found to treat samples apart."""

    def __init__(self) -> None:
        self._ways: set[int] = set()
        self._numbers: dict[tuple[int, int], list[Any]] = {}
        self._changes: Counter[tuple[int, int, int]] = Counter()
        self._pairs: set[Any] = set()
        self._news = 0

    def knows(self, trace: OperationTrace) -> bool:
        """Tell whether a forward has done the same with other numbers, or with other values in a trial."""
        return trace.way in self._ways

    def is_new(self, trace: OperationTrace, batch_size: int) -> bool:
        """Whether a forward is to be looked at, for it did what none has done that was."""
        way = trace.way
        if trace.by_value and (batch_size, way) not in self._numbers:  # only trials have been there
            new = len(self._ways) <= _MOST_WAYS
        elif way in self._ways:
            changed = self._changed(way, trace.numbers, batch_size)
            new = any(self._changes[batch_size, way, i] < _PASSED for i in changed)
        else:
            new = len(self._ways) < _MOST_WAYS or not trace.pairs <= self._pairs
        self._news += new
        return new and (self._news <= _OFTEN or self._news & (self._news - 1) == 0)

    def _changed(self, way: int, numbers: list[Any], batch_size: int) -> list[int]:
        """The places of numbers that are others than in the last forward of that many samples."""
        known = self._numbers.get((batch_size, way), numbers)
        if numbers == known:
            return []
        return [i for i, (a, b) in enumerate(zip(numbers, known, strict=True)) if a != b and (a == a or b == b)]

    def learn(self, trace: OperationTrace, batch_size: int | None = None) -> None:
        """Take note of a forward that passed; of the numbers in it only if its ``batch_size`` is given."""
        way = trace.way
        if way not in self._ways:
            self._pairs |= trace.pairs
            if len(self._ways) < _MOST_WAYS:
                self._ways.add(way)
        if batch_size is not None and way in self._ways:
            self._changes.update([(batch_size, way, i) for i in self._changed(way, trace.numbers, batch_size)])
            self._numbers[batch_size, way] = trace.numbers

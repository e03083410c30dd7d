"""Counts inside compiled code: a table on the device that each compiled backward adds to.

What a hook does to tensors while the backward is traced becomes part of the compiled backward; what it writes down in
Python is written once, however often the code then runs. So Python keeps what the lines of the table stand for, and the
table, an input of the compiled code that is changed in place, the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.backward_clip.hooks import Observer
from gradguard.backward_clip.rule_encoding import text_for
from gradguard.errors import InvalidValueError
from gradguard.torch_private import call_after_backward

_LINES = 4096
"""A table's size is an input's shape, so that it cannot grow with what the trace finds."""
_Label = tuple[str, str]
"""The names of an operation and of its module."""


@dataclass(frozen=True)
class OpStatistics:
    """The gradients of the outputs of one operation in one module, over all blocks that the statistics saw."""

    op: str
    module: str
    gradients: int
    elements: int
    clipped: Tensor
    nonfinite: Tensor


@dataclass(frozen=True)
class FirstNonfinite:
    """The first gradient, in the order of the backward, that held NaN or infinity."""

    op: str
    module: str
    made_by: str
    block: int
    nonfinite: int
    elements: int

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        made = f", made by the backward of {self.made_by}" if self.made_by else ""
        among = f" of {self.elements}" if self.elements else ""  # compiled code for several sizes knows none
        return (
            f"block {self.block}: the gradient of the output of {self.op}{place}{made} "
            f"({self.nonfinite}{among} elements)"
        )


class _Gradient(NamedTuple):
    op: str
    module: str
    made_by: str
    elements: int
    """0 where the compiled code is for several sizes."""


class CompiledCounts:
    """The tables of one `ErrorClipStats`, one for each device, and what their lines stand for.

    The first line of a table has the number of backwards and the first gradient that was not finite: its number among
    those known plus 1, its count, its backward.
    """

    def __init__(self, place: Callable[[Node], str]) -> None:
        self.place = place
        self.text = text_for(self)
        """Return a number by which compiled code finds this object again."""
        self.tables: dict[str, Tensor] = {}
        self._labels: list[_Label] = []
        self._begins: dict[tuple[_Label, ...], int] = {}
        self._known: dict[_Gradient, int] = {}

    def make_table(self, device: str) -> None:
        """Make the table for ``device`` if there is none: before it is traced as an input."""
        if device not in self.tables:
            self.tables[device] = torch.zeros(_LINES, 4, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Set all counts to 0; compiled code goes on with the same tables."""
        for table in self.tables.values():
            table.zero_()

    def observer(self, table: Tensor) -> "TracedCounts":
        """Return what the hooks of one trace show their gradients to."""
        return TracedCounts(self, table)

    @property
    def backwards(self) -> int:
        """How many backwards ran. Waits for the device."""
        return sum(int(table[0, 0]) for table in self.tables.values())

    def lines(self) -> list[OpStatistics]:
        """Return the counts of each operation and module with any; those of gradients stay on their device."""
        found = []
        for table in self.tables.values():
            sizes = table[1 : 1 + len(self._labels), :2].tolist()
            for number, ((op, module), (gradients, elements)) in enumerate(zip(self._labels, sizes, strict=True), 1):
                if gradients:
                    found.append(OpStatistics(op, module, gradients, elements, table[number, 2], table[number, 3]))
        return found

    def first(self) -> FirstNonfinite | None:
        """Return the first gradient that was not finite."""
        known = list(self._known)
        for table in self.tables.values():
            _, number, nonfinite, backward = table[0].tolist()
            if number:
                first = known[number - 1]
                return FirstNonfinite(first.op, first.module, first.made_by, backward, nonfinite, first.elements)
        return None

    def begin_of(self, labels: tuple[_Label, ...]) -> int:
        """Return where the lines for these operations begin: the same ones however often they are traced.

        Raises:
            InvalidValueError: If the table is full.
        """
        begin = self._begins.get(labels)
        if begin is None:
            begin = self._begins[labels] = 1 + len(self._labels)
            self._labels += labels
        if 1 + len(self._labels) > _LINES:
            raise InvalidValueError(
                f"stats= in compiled code: more than {_LINES - 1} operations in all modules and recompilations. Leave "
                f"model= out of gg.ErrorClipStats(), or use a new one for each compiled function."
            )
        return begin

    def number_of(self, gradient: _Gradient) -> int:
        """Return the number under which a table names ``gradient``."""
        return self._known.setdefault(gradient, len(self._known))


class _TracedGradient(NamedTuple):
    gradient: _Gradient
    elements: int | torch.SymInt
    clipped: Tensor
    nonfinite: Tensor


class TracedCounts(Observer):
    """Collects the counts of one traced backward, and adds them to the table at its end."""

    def __init__(self, counts: CompiledCounts, table: Tensor) -> None:
        self.counts, self.table = counts, table
        self._noted: list[_TracedGradient] = []

    def row(self, node: Node, name: str, sources: str) -> "_TracedNode":
        """Return where the gradients of one node are counted."""
        return _TracedNode(self, name, self.counts.place(node), sources)

    def note(self, gradient: _Gradient, grad: Tensor, clipped: Tensor) -> None:
        """Count in one gradient, before and after the clip."""
        if not self._noted:
            call_after_backward(self._add_up)
        changed, bad = count_changes(grad.detach(), clipped.detach())
        self._noted.append(_TracedGradient(gradient, grad.numel(), changed, bad))

    def _add_up(self) -> None:
        noted, self._noted = self._noted, []
        by_label: dict[_Label, list[_TracedGradient]] = {}
        for one in noted:
            by_label.setdefault((one.gradient.op, one.gradient.module), []).append(one)
        begin = self.counts.begin_of(tuple(by_label))
        lines = torch.stack([self._line(group) for group in by_label.values()])
        with torch.no_grad():
            self.table[begin : begin + len(by_label)].add_(lines)
            self.table[0].copy_(self._head(noted))

    def _line(self, group: list[_TracedGradient]) -> Tensor:
        elements = self._number(sum(one.elements for one in group))
        return torch.stack(
            [
                self._number(len(group)),
                elements,
                self._sum([one.clipped for one in group]),
                self._sum([one.nonfinite for one in group]),
            ]
        )

    def _head(self, noted: list[_TracedGradient]) -> Tensor:
        """Return the first line of the table after this backward."""
        before = self.table[0].clone()
        bad = torch.stack([one.nonfinite.to(self.table.device) for one in noted])
        where = (bad > 0).to(torch.int64).argmax().reshape(1)  # the first of the largest: in the order of the backward
        numbers = torch.stack([self._number(1 + self.counts.number_of(one.gradient)) for one in noted])
        backwards = before[:1] + 1
        ours = torch.cat([numbers.index_select(0, where), bad.index_select(0, where), backwards])
        first_now = (before[1] == 0) & (bad > 0).any()
        return torch.cat([backwards, torch.where(first_now, ours, before[1:])])

    def _number(self, value: int | torch.SymInt) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=self.table.device)  # type: ignore[arg-type]

    def _sum(self, counts: list[Tensor]) -> Tensor:
        return torch.stack([count.to(self.table.device) for count in counts]).sum()


@dataclass(frozen=True)
class _TracedNode:
    """One node's view of the counts."""

    traced: TracedCounts
    op: str
    module: str
    made_by: str

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        clipped = apply(grad)
        elements = grad.numel()
        fixed = elements if type(elements) is int else 0
        self.traced.note(_Gradient(self.op, self.module, self.made_by, fixed), grad, clipped)
        return clipped


def count_changes(grad: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many elements the rule changed, a kept NaN not among them, and how many were not finite."""
    bad = ~grad.isfinite()
    return ((clipped != grad) & ~(clipped.isnan() & bad)).sum(), bad.sum()

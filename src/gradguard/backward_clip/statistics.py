"""Statistics of an error clip: how much was clipped, and how much was not finite, for each operation and module."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.backward_clip.error_clip_rules import BaseErrorClip, clamp_bounds
from gradguard.backward_clip.module_timeline import ModuleTimeline
from gradguard.listeners import ClipEvent, is_heard, rule_of, tell
from gradguard.tensors.host_copy import DeviceEvent, copy_to_host
from gradguard.tensors.layout import move

Count = int | Tensor


@dataclass(frozen=True)
class OpStatistics:
    """The gradients of the outputs of one operation in one module, over all blocks that the statistics saw."""

    op: str
    module: str
    gradients: int
    elements: int
    clipped: Tensor
    nonfinite: Tensor
    largest: Tensor
    """The largest magnitude of an element before the clip, loss scale included: infinite if one was not finite, 0 where
    all were of a subclass of Tensor, such as DTensor."""


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
        return (
            f"block {self.block}: the gradient of the output of {self.op}{place}{made} "
            f"({self.nonfinite} of {self.elements} elements)"
        )


class ErrorClipStats:
    """Counts the gradients that `error_clip` clips, by operation and module: pass it as ``stats=`` and print it.

    An operation is named as PyTorch names its backward (``MulBackward0``); a line counts the gradients of that
    operation's *output*, as they arrive, before the clip. Counts stay on the device until they are read, so that
    nothing waits; on the CPU nothing is written where nothing exceeds a bound.

    The last lines name the first gradient in backward order that was not finite, with the operation whose backward
    made it: the culprit, where `torch.autograd.set_detect_anomaly` names the last one.

    A listener of `gradguard.listeners` gets, at the end of each block and of each backward through an attached clip,
    the rule, its threshold, and how many of how many elements were clipped.

    **Guarantees.**

    - Counting changes no gradient.
    - The host never waits for a count until the count is read.
    - `first_nonfinite` is the first in the order of the backward, over all blocks.

    Args:
        model: The module whose submodules should be named. Its forward must run after this; hooks on its submodules
            note which operations they record (0.4 to 4 % of the forward). `detach` removes them.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> stats = gg.ErrorClipStats(model)
        >>> loss = model(torch.ones(4, 2)).square().sum()
        >>> with gg.error_clip(loss, gg.ErrorClipByValue(1e-3), stats=stats):
        ...     loss.backward()
        >>> [(row.op, row.module, row.elements) for row in stats.rows()]
        [('PowBackward0', '', 4), ('AddmmBackward0', '2', 4), ('TanhBackward0', '1', 12), ('AddmmBackward0', '0', 12)]
        >>> stats.first_nonfinite is None
        True
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._timeline = ModuleTimeline(model) if model is not None else None
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0; modules are still named."""
        self._rows: dict[tuple[str, str], _OpCounts] = {}
        self._first: FirstNonfinite | None = None
        self._unread: list[tuple[int, list[tuple[_OpCounts, str, int]], Tensor, DeviceEvent | None]] = []
        self._pending: list[tuple[_OpCounts, str, int, Tensor]] = []
        self._loss: Tensor | None = None
        self._blocks = 0

    def detach(self) -> None:
        """Remove the hooks that name modules."""
        if self._timeline is not None:
            self._timeline.detach()

    def rows(self) -> list[OpStatistics]:
        """Return a line for each operation and module, in the order of the backward; counts are device tensors."""
        return [row.frozen() for row in self._rows.values() if row.gradients]

    @property
    def blocks(self) -> int:
        """How many blocks there were, and backwards through an attached clip."""
        return self._blocks

    @property
    def first_nonfinite(self) -> FirstNonfinite | None:
        """The first gradient that was not finite, or None. Waits for the device."""
        self._read(wait=True)
        return self._first

    @property
    def loss_is_finite(self) -> Tensor | None:
        """Whether all losses so far were finite, on their device; None before the first."""
        return self._loss

    def __str__(self) -> str:
        lines = [("gradient of the output of", "module", "gradients", "elements", "clipped", "non-finite")]
        for row in self.rows():
            clipped, nonfinite = int(row.clipped), int(row.nonfinite)
            share = f"{clipped} ({clipped / max(1, row.elements):.1%})"
            lines.append((row.op, row.module or "-", str(row.gradients), str(row.elements), share, str(nonfinite)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        notes = [f"blocks: {self.blocks}"]
        if self._loss is not None and not bool(self._loss):
            notes.append("the loss itself was not finite")
        notes.append(f"first non-finite: {self.first_nonfinite or 'none'}")
        return "\n".join([*(line.rstrip() for line in table), *notes])

    def line(self, node: Node, name: str) -> "_OpCounts":
        """Return the line of the table for one node: its operation in the module whose forward recorded it."""
        key = (name, self._timeline.module_of(node) if self._timeline is not None else "")
        return self._rows.setdefault(key, _OpCounts(*key))

    def begin(self, loss: Tensor | None) -> None:
        """Start a block."""
        self._blocks += 1
        if loss is not None:
            finite = loss.detach().isfinite().all()
            self._loss = finite if self._loss is None else self._loss.to(finite.device) & finite

    def end(self) -> None:
        """End a block: collect counts that are still on a device, without a host sync."""
        if self._pending and (home := self._pending[0][3].device).type != "meta":  # there is nothing to read
            counts, landed = copy_to_host(torch.stack([move(count, home) for *_, count in self._pending]))
            self._unread.append((self._blocks, [(row, made, n) for row, made, n, _ in self._pending], counts, landed))
        self._pending = []
        self._read(wait=False)

    def note(self, row: "_OpCounts", made_by: str, elements: int, nonfinite: Count) -> None:
        """Remember the first gradient that was not finite."""
        if isinstance(nonfinite, Tensor):
            self._pending.append((row, made_by, elements, nonfinite))
        elif nonfinite and self._first is None and not self._unread:
            self._first = FirstNonfinite(row.op, row.module, made_by, self._blocks, nonfinite, elements)

    def _read(self, wait: bool) -> None:
        """Read the oldest blocks' counts that have arrived on the host; those of all blocks if it may ``wait``."""
        while self._unread:
            block, shown, counts, landed = self._unread[0]
            if landed is not None and not wait and not landed.query():
                return
            if landed is not None:
                landed.synchronize()
            self._unread.pop(0)
            if self._first is not None:
                continue
            for (row, made_by, elements), nonfinite in zip(shown, counts.tolist(), strict=True):
                if nonfinite:
                    self._first = FirstNonfinite(row.op, row.module, made_by, block, nonfinite, elements)
                    break


@dataclass
class _OpCounts:
    op: str
    module: str
    gradients: int = 0
    elements: int = 0
    clipped: Count = 0
    nonfinite: Count = 0
    largest: float | Tensor = 0.0

    def frozen(self) -> OpStatistics:
        numbers = (
            number if isinstance(number, Tensor) else torch.tensor(number, device="cpu")
            for number in (self.clipped, self.nonfinite, self.largest)
        )
        return OpStatistics(self.op, self.module, self.gradients, self.elements, *numbers)


class BlockCounts:
    """The counts of one block, or of one backward through an attached clip; listeners get their sums."""

    def __init__(self, stats: ErrorClipStats, rule: BaseErrorClip) -> None:
        self.stats, self.rule = stats, rule
        self.elements = 0
        self.clipped: list[Count] = []

    def row(self, node: Node, name: str, sources: str) -> "NodeCounts":
        """Return the counter for the gradients of the output of ``node``."""
        return NodeCounts(self, self.stats.line(node, name), sources)

    def begin(self, loss: Tensor | None) -> None:
        """Begin a block."""
        self.elements, self.clipped = 0, []  # of a backward that raised an error before its end
        self.stats.begin(loss)

    def end(self) -> None:
        """End a block, and tell listeners its sums."""
        self.stats.end()
        elements, clipped = self.elements, self.clipped
        self.elements, self.clipped = 0, []
        if elements and is_heard():
            on_devices = [count for count in clipped if isinstance(count, Tensor)]
            total: Count = sum(count for count in clipped if not isinstance(count, Tensor))
            if on_devices:
                total = torch.stack([count.to(on_devices[0].device) for count in on_devices]).sum() + total
            # The one number that the rule compares with, None if there is not one.
            bounds = clamp_bounds(self.rule)
            values = {getattr(self.rule, name) for name in self.rule.thresholds or ()}
            if bounds is not None and bounds[0] == -bounds[1]:
                values = {bounds[1]}
            threshold = values.pop() if len(values) == 1 else None
            tell(ClipEvent(rule_of(self.rule), (), threshold, elements=elements, clipped_elements=total))


@dataclass
class NodeCounts:
    """The counts of one node, a part of a row."""

    block: BlockCounts
    row: _OpCounts
    made_by: str

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        """Return ``apply(grad)``, or ``grad`` where the clamp to ``bounds`` would not change it."""
        if not self.arrive(grad):
            return apply(grad)
        if type(grad) is not Tensor or not grad.is_cpu or grad.is_complex():
            return self._on_device(grad, apply)
        seen = grad.detach() if grad.requires_grad else grad
        low, high = (extreme.item() for extreme in seen.aminmax())
        finite = -math.inf < low and high < math.inf
        self.row.largest = max(self.row.largest, -low, high) if finite else math.inf
        if finite and bounds is not None and bounds[0] <= low and high <= bounds[1]:
            return grad
        clipped = apply(grad)
        if finite:
            return self._counted(clipped, 0 if clipped is grad else int((clipped.detach() != seen).sum()), 0)
        changed, nonfinite = _count_changes(seen, clipped.detach())
        return self._counted(clipped, int(changed), int(nonfinite))

    def arrive(self, grad: Tensor) -> int:
        """Count a gradient before the clip; return the number of its elements."""
        elements = grad.numel()
        self.row.gradients += 1
        self.row.elements += elements
        self.block.elements += elements
        return elements

    def _on_device(self, grad: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        if type(grad) is Tensor:
            largest = grad.detach().abs().amax().nan_to_num(nan=math.inf, posinf=math.inf)
            self.row.largest = torch.maximum(torch.as_tensor(self.row.largest).to(largest.device), largest)
        clipped = apply(grad)
        return self._counted(clipped, *_count_changes(grad.detach(), clipped.detach()))

    def _counted(self, clipped: Tensor, changed: Count, nonfinite: Count) -> Tensor:
        self.row.clipped = self.row.clipped + changed  # not in place: rows that were read keep theirs
        self.row.nonfinite = self.row.nonfinite + nonfinite
        if is_heard():
            self.block.clipped.append(changed)
        self.block.stats.note(self.row, self.made_by, clipped.numel(), nonfinite)
        return clipped


def _count_changes(grad: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many elements the rule changed, a kept NaN not among them, and how many were not finite."""
    bad = ~grad.isfinite()
    return ((clipped != grad) & ~(clipped.isnan() & bad)).sum(), bad.sum()

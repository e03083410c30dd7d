"""Statistics of an error clip: the number of clipped and of non-finite elements, by operation and module."""

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
    """The counts of the gradients of one operation's outputs in one module, over all blocks."""

    op: str
    module: str
    gradients: int
    elements: int
    clipped: Tensor
    nonfinite: Tensor
    largest: Tensor
    """The largest magnitude of an element before the clip, including the loss scale. Infinite after a non-finite
    element; gradients of a subclass of Tensor, such as DTensor, do not count."""


@dataclass(frozen=True)
class FirstNonfinite:
    """The first gradient, in the order of the backward, with NaN or infinity."""

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

    An operation has PyTorch's name of its backward (``MulBackward0``). A line counts the gradients of the operation's
    *output*, before the clip. Counts stay on the device until they are read, without a host sync. On the CPU, a
    gradient within the bounds of a clamp is not copied.

    The last lines name the first non-finite gradient in backward order, with the operation whose backward computed it.
    That operation is the culprit; `torch.autograd.set_detect_anomaly` names the last one instead.

    A listener of `gradguard.listeners` receives an event at the end of each block and of each backward through an
    attached clip: the rule, its threshold, the number of elements, and the number of clipped elements.

    **Guarantees.**

    - Counting changes no gradient.
    - The host never waits for a count until the count is read.
    - `first_nonfinite` is the first in the order of the backward, over all blocks.

    Args:
        model: The module whose submodules the table names. Create the statistics before its forward: hooks on the
            submodules record which operations belong to them (0.4 to 4 % of the forward). `detach` removes the hooks.

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
        """Set all counts to 0; the hooks that name modules stay."""
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
        """Return the counts of each operation and module, in the order of the backward; counts are device tensors."""
        return [row.frozen() for row in self._rows.values() if row.gradients]

    @property
    def blocks(self) -> int:
        """The number of blocks and of backwards through an attached clip."""
        return self._blocks

    @property
    def first_nonfinite(self) -> FirstNonfinite | None:
        """The first non-finite gradient, or None. Reading it is a host sync."""
        self._read(wait=True)
        return self._first

    @property
    def loss_is_finite(self) -> Tensor | None:
        """Whether all losses so far were finite, as a tensor on their device; None before the first loss."""
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
        """Return the counts of the node's operation in the module whose forward recorded the node."""
        key = (name, self._timeline.module_of(node) if self._timeline is not None else "")
        return self._rows.setdefault(key, _OpCounts(*key))

    def begin(self, loss: Tensor | None) -> None:
        """Start a block."""
        self._blocks += 1
        if loss is not None:
            finite = loss.detach().isfinite().all()
            self._loss = finite if self._loss is None else self._loss.to(finite.device) & finite

    def end(self) -> None:
        """End a block: start copying its device counts to the host, without a host sync."""
        if self._pending and (home := self._pending[0][3].device).type != "meta":  # a meta tensor has no value
            counts, landed = copy_to_host(torch.stack([move(count, home) for *_, count in self._pending]))
            self._unread.append((self._blocks, [(row, made, n) for row, made, n, _ in self._pending], counts, landed))
        self._pending = []
        self._read(wait=False)

    def note(self, row: "_OpCounts", made_by: str, elements: int, nonfinite: Count) -> None:
        """Record a gradient's count of non-finite elements, to find the first non-finite gradient."""
        if isinstance(nonfinite, Tensor):
            self._pending.append((row, made_by, elements, nonfinite))
        elif nonfinite and self._first is None and not self._unread:
            self._first = FirstNonfinite(row.op, row.module, made_by, self._blocks, nonfinite, elements)

    def _read(self, wait: bool) -> None:
        """Read the counts of the oldest blocks that have arrived on the host, or of all blocks with ``wait``."""
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
    """The counts of one block, or of one backward through an attached clip; listeners receive the sums."""

    def __init__(self, stats: ErrorClipStats, rule: BaseErrorClip) -> None:
        self.stats, self.rule = stats, rule
        self.elements = 0
        self.clipped: list[Count] = []

    def row(self, node: Node, name: str, sources: str) -> "NodeCounts":
        """Return the counter for the gradients of the output of ``node``."""
        return NodeCounts(self, self.stats.line(node, name), sources)

    def begin(self, loss: Tensor | None) -> None:
        """Begin a block."""
        self.elements, self.clipped = 0, []  # a backward that raised an error has left its counts
        self.stats.begin(loss)

    def end(self) -> None:
        """End a block, and send its sums to the listeners."""
        self.stats.end()
        elements, clipped = self.elements, self.clipped
        self.elements, self.clipped = 0, []
        if elements and is_heard():
            on_devices = [count for count in clipped if isinstance(count, Tensor)]
            total: Count = sum(count for count in clipped if not isinstance(count, Tensor))
            if on_devices:
                total = torch.stack([count.to(on_devices[0].device) for count in on_devices]).sum() + total
            # The event has a threshold only if the rule compares with a single number.
            bounds = clamp_bounds(self.rule)
            values = {getattr(self.rule, name) for name in self.rule.thresholds or ()}
            if bounds is not None and bounds[0] == -bounds[1]:
                values = {bounds[1]}
            threshold = values.pop() if len(values) == 1 else None
            tell(ClipEvent(rule_of(self.rule), (), threshold, elements=elements, clipped_elements=total))


@dataclass
class NodeCounts:
    """The counter of one node, which adds to the row of its operation and module."""

    block: BlockCounts
    row: _OpCounts
    made_by: str

    def clip(self, grad: Tensor, apply: Callable[[Tensor], Tensor], bounds: tuple[float, float] | None) -> Tensor:
        """Count ``grad`` and return ``apply(grad)``; return ``grad`` if the clamp to ``bounds`` would not change it."""
        if not self.arrive(grad):
            return apply(grad)
        if type(grad) is not Tensor or not grad.is_cpu or grad.is_complex():
            return self._on_device(grad, apply)
        values = grad.detach() if grad.requires_grad else grad
        low, high = (extreme.item() for extreme in values.aminmax())
        finite = -math.inf < low and high < math.inf
        self.row.largest = max(self.row.largest, -low, high) if finite else math.inf
        if finite and bounds is not None and bounds[0] <= low and high <= bounds[1]:
            return grad
        clipped = apply(grad)
        if finite:
            return self._counted(clipped, 0 if clipped is grad else int((clipped.detach() != values).sum()), 0)
        changed, nonfinite = _count_changes(values, clipped.detach())
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
        self.row.clipped = self.row.clipped + changed  # not in place: earlier results of `rows` share the tensor
        self.row.nonfinite = self.row.nonfinite + nonfinite
        if is_heard():
            self.block.clipped.append(changed)
        self.block.stats.note(self.row, self.made_by, clipped.numel(), nonfinite)
        return clipped


def _count_changes(grad: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of changed and of non-finite elements; a non-finite element that is now NaN is not changed."""
    bad = ~grad.isfinite()
    return ((clipped != grad) & ~(clipped.isnan() & bad)).sum(), bad.sum()

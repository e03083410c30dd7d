r"""What adding up does to a gradient: over a batch, and over micro-batches.

Changed weights do not show it: where they are zero, no relative change moves them, and a long running sum rounds in one
set-up alone. A sum of terms :math:`t_j` with the partial sums :math:`S_j` has the error
:math:`u \sqrt{\sum_j S_j^2}`, if its roundings are independent. Two bounds of it together hold:

- A floor, :math:`u \sqrt{n/2}\, \lVert g \rVert`, contains it where terms are random or agree.
- Where terms cancel, the sum is smaller than its error; so in the runs with changed weights each sample's gradient is
  changed by :math:`\pm u \sqrt{n/2}` of itself where it leaves the loss, which moves the sum as much as the error does.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.parity.sketch import hashed
from gradguard.torch_private import is_compiled

TERMS = 512
"""Of a longer sum over a batch, kernels add up blocks of about so many terms, and then these."""

SINGLE = torch.finfo(torch.float32).eps / 2
"""Kernels add up 16-bit numbers in float32."""


def rounding_of_sums(rounding: float, calls: int) -> float:
    """Return what storing a gradient and adding it up does to it, relative to its norm.

    Args:
        rounding: Half a unit in the last place of its dtype, relative.
        calls: How many micro-batches add to it.

    Example:
        >>> rounding_of_sums(2.0**-24, calls=1) / 2.0**-24, rounding_of_sums(2.0**-9, calls=8) / 2.0**-9
        (16.01..., 2.0)
    """
    of_batch = min(rounding, SINGLE) * math.sqrt((TERMS + calls) / 2)
    return max(of_batch, rounding * math.sqrt(max(2, calls) / 2))


def most_of_sums(rounding: float, calls: int) -> float:
    """Return what adding up micro-batches does to a gradient if all roundings go to one side, relative to its norm.

    So they do where one number is added over and over: the partial sums are 1, 2 ... n parts of n.

    Example:
        >>> most_of_sums(2.0**-24, calls=1) / 2.0**-24, most_of_sums(2.0**-24, calls=201) / 2.0**-24
        (0.0, 100.5)
    """
    return rounding * calls / 2 if calls > 1 else 0.0


class OutermostCalls:
    """The calls of modules that no other one makes, which are as many as there are micro-batches.

    Args:
        roots: Their modules and all below are watched; of a compiled one it is the outermost alone.
        run: Which of several changes of the gradients that come back to these calls; 0 for none.
        inside: How many of these modules are being called already.
    """

    def __init__(self, roots: Sequence[nn.Module], run: int = 0, inside: int = 0) -> None:
        self._roots, self._run, self._depth = roots, run, inside
        self._last: list[Tensor] = []
        self._calls = Counter[int]()

    @property
    def most(self) -> int:
        """How often one module was called; the parts of a checkpoint, which run again, do not count together."""
        return max(self._calls.values(), default=1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside the block."""
        with ExitStack() as stack:
            for root in self._roots:
                compiled = any(is_compiled(module) for module in root.modules())
                for module in [root] if compiled else root.modules():
                    stack.callback(module.register_forward_pre_hook(self._enter).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth += 1

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        self._last = _many(output) or self._last
        if self._depth == 0:
            if self._last:
                self._calls[id(module)] += 1
                self._change(self._last)
            self._last = []

    def _change(self, outputs: Sequence[Tensor]) -> None:
        call = sum(self._calls.values())
        for place, output in enumerate(outputs):
            if self._run and type(output) is Tensor:
                output.register_hook(lambda gradient, seed=(self._run, call, place): changed(gradient, *seed))


def _many(output: Any) -> list[Tensor]:
    """The tensors of a module's output through which gradients of several samples come back."""
    outputs = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    )
    return [t for t in outputs if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point() and t.numel() > 1]


@torch.no_grad()
def changed(gradient: Tensor, run: int, call: int, place: int = 0) -> Tensor:
    """Return a gradient each row of which is changed, up or down, as much as adding it to others does.

    Args:
        gradient: Of shape ``[..., classes]``, or ``[samples]``.
        run: Which of several changes.
        call: It is added to the gradients of so many micro-batches, with itself.
        place: Which of several gradients of one call.
    """
    if type(gradient) is not Tensor:
        return gradient
    shape = (*gradient.shape[:-1], 1) if gradient.dim() > 1 else gradient.shape
    rows = torch.arange(math.prod(shape), device=gradient.device)
    up = (hashed(rows + (call << 40) + (place << 34)) >> run) & 1
    unit = torch.finfo(gradient.dtype).eps / 2
    size = max(unit, min(unit, SINGLE) * math.sqrt(min(len(rows), TERMS) / 2 + call))
    return gradient * (1 + size * (2 * up - 1).to(gradient.dtype)).view(shape)

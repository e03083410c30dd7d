"""What a clip did, as one frozen value."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import DistributedError
from gradguard.tensors.layout import are_readable
from gradguard.tensors.nonfinite import count_nonfinite
from gradguard.torch_private import version_of


@dataclass(frozen=True, slots=True, eq=False)
class ClipResult:
    """What a clip did on one step. Every number stays on its device until it is read, so nothing waits for it.

    Attributes:
        norm: 2-norm of all gradients as one vector *before* the clip; 0-dim, float32 (float64 for float64 gradients).
            A rule with a ``norm_type`` gives the norm of that order, which is what it compares with its threshold.
        coefficient: The norm after the clip over the norm before, in [0, 1]; 0-dim float64. Under the norm rule it is
            what every gradient was multiplied by. Where a rule clamps or scales parts, it is 1 until that is done.
        clipped: Whether the clip binds on this step; 0-dim bool.
        nonfinite: Whether any gradient held NaN or infinity; 0-dim bool.
        norms: Norm of each gradient before the clip, of the same order; ``[len(names)]``, float64. None where they were
            not sent between processes: read `tensor_norms`, which says so.
        names: The parameter that each entry of ``tensor_norms`` belongs to.
        threshold: What the rule compared with on this step, for gradients without a loss scale; 0-dim, or None where
            there is not one number.
        locked_in: Whether the clip has bound on more than half of the last steps at one threshold: 0-dim bool, or
            None where nobody counts. See `LockIn`.
        group_norms: 2-norm before the clip of each group of `Groups`, 0-dim each; None without groups.
        counter: Counts the non-finite elements for `culprits`; None where the host has seen that there are none.
        bad: Which gradients held NaN or infinity, ``[len(names)]``, bool, where only that was asked of the processes.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> result = gg.apply_gradient_clipping(layer, "norm", 1.0)
        >>> float(result.norm), bool(result.clipped), result.names
        (5.0, True, ('weight',))
    """

    norm: Tensor
    coefficient: Tensor
    clipped: Tensor
    nonfinite: Tensor
    norms: Tensor | None
    names: Sequence[str]
    threshold: Tensor | None = None
    locked_in: Tensor | None = None
    group_norms: Mapping[str, Tensor] | None = None
    counter: "NonfiniteCounter | None" = field(default=None, repr=False)
    bad: Tensor | None = field(default=None, repr=False)

    @property
    def tensor_norms(self) -> Tensor:
        """Norm of each gradient before the clip, of the order of ``norm``: ``[len(names)]``, float64.

        Where processes hold parts of the gradients, they send each other one number a group of gradients, which is what
        the decision needs, unless a rule needs each tensor or the call or the guard was given ``tensor_norms=True``.
        Reading never starts a collective: one process may read alone.

        Raises:
            DistributedError: If they were not sent.
        """
        if self.norms is None:
            raise DistributedError(
                "the norm of each tensor is not known: processes hold parts of the gradients, and sent each other only "
                "what the clip needed. Ask for it before the step, on every rank: clipper(model, tensor_norms=True) or "
                "Guard(optimizer, clipper, tensor_norms=True)."
            )
        return self.norms

    def culprits(self) -> dict[str, int | None]:
        """Return which parameters held NaN or infinity, with the number of such elements. The host waits.

        The names come from the norms before the clip, so they stay right for ever. The numbers are counted in the
        gradients, when asked (on the CPU at once, on the rare step that needs it): a number is None where the gradient
        has been freed or overwritten since. Nothing keeps a gradient alive. Where processes hold parts of a gradient,
        the names are those of all, and each number is of this process' part.

        Raises:
            DistributedError: If nobody knows the names: on an accelerator, where the host does not read the norm at a
                step, processes that hold parts of the gradients tell each other only under ``tensor_norms=True``. They
                do under ``"raise"``, under the ``"skip"`` of an optimizer that is not fused, and always on the CPU.
        """
        bad = self._bad_positions()
        if bad is None:
            raise DistributedError(
                "which gradients were not finite is not known: processes hold parts of them, and the host did not look "
                "at this step. Ask for it before the step, on every rank: clipper(model, tensor_norms=True) or "
                "Guard(optimizer, clipper, tensor_norms=True)."
            )
        counts = self.counter.count(bad) if self.counter is not None else [None] * len(bad)
        return {self.names[i]: count for i, count in zip(bad, counts, strict=True)}

    def known_culprits(self) -> list[str]:
        """Return the names of `culprits`, none where nobody knows them."""
        return [self.names[i] for i in self._bad_positions() or ()]

    def _bad_positions(self) -> list[int] | None:
        if self.bad is not None:
            return self.bad.nonzero().flatten().tolist()
        if self.norms is not None:
            return (~self.norms.isfinite()).nonzero().flatten().tolist()
        return None if bool(self.nonfinite) else []


class NonfiniteCounter:
    """Counts the non-finite elements of gradients later, without keeping them alive.

    Args:
        gradients: The gradients, before anything is written to them.
        nonfinite: Whether any of them is not finite; 0-dim bool. If it can be read at no cost, and is true, they are
            counted now.
    """

    def __init__(self, gradients: Sequence[Tensor], nonfinite: Tensor) -> None:
        self._gradients = [weakref.ref(g) for g in gradients]
        self._versions = [_version(g) for g in gradients]
        self._counts: Sequence[int | None] | None = None
        if are_readable(nonfinite, *gradients) and bool(nonfinite):
            self._counts = [sum(count_nonfinite(g)) for g in gradients]

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy what was counted; it has no gradients to count in."""
        return _counted, (self._counts, len(self._gradients))

    def count(self, positions: Sequence[int]) -> list[int | None]:
        """Return the number of non-finite elements of the gradients at ``positions``, None where it cannot be told."""
        return [self._count(i) for i in positions]

    def gradients_are_unchanged(self) -> None:
        """Trust the gradients as they are: a fused optimizer that skips a step marks them as written all the same."""
        self._versions = [-1 if (g := ref()) is None else _version(g) for ref in self._gradients]

    def _count(self, position: int) -> int | None:
        if self._counts is not None:
            return self._counts[position]
        gradient = self._gradients[position]()
        if gradient is None or _version(gradient) != self._versions[position]:
            return None
        return sum(count_nonfinite(gradient))


def _counted(counts: Sequence[int | None] | None, number: int) -> NonfiniteCounter:
    counter = NonfiniteCounter([], torch.tensor(False))
    counter._counts = [None] * number if counts is None else counts
    return counter


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)

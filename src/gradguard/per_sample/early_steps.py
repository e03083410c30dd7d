"""Refuses an optimizer's step while clipped mini-batches wait for `pre_step`: without it the weights would not move."""

import weakref
from collections.abc import Callable
from typing import Protocol

from torch.optim.optimizer import Optimizer

from gradguard.optimizer_hooks import EveryStep


class Waiting(Protocol):
    """What may have clipped mini-batches that nobody has taken."""

    def refuse_early_step(self, optimizer: Optimizer) -> None:
        """Raise an error if ``optimizer`` is about to step without them."""


_watching: "weakref.WeakSet[Waiting]" = weakref.WeakSet()
_hooks: list[EveryStep] = []
"""One pair of hooks on all optimizers, while anything is watching."""


def watch_steps(clipper: Waiting) -> Callable[[], None]:
    """Let ``clipper`` refuse steps that come too early, which does not keep it alive; return what ends that."""
    if not _hooks:
        _hooks.append(EveryStep(_before, _after))
    _watching.add(clipper)

    def end() -> None:
        _watching.discard(clipper)
        while _hooks and not _watching:
            _hooks.pop().remove()

    return end


def _before(optimizer: Optimizer, evaluations: int) -> None:
    """With a closure this comes after each evaluation: `pre_step` may stand in the closure."""
    del evaluations
    for clipper in list(_watching):
        clipper.refuse_early_step(optimizer)


def _after(optimizer: Optimizer) -> None:
    del optimizer

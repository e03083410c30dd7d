"""A function, a point and options for `gg.gradcheck`: what the sets of wrong and of correct functions consist of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Problem:
    """Arguments of one call: ``gg.gradcheck(fn, *inputs, **options)``."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named problem, made anew for each seed: the point changes, and so may small sizes."""

    name: str
    category: str
    make: Callable[[torch.Generator], Problem]
    may_be_undecided: bool = False
    """Whether "INCONCLUSIVE" is a right answer too, for correct functions only."""

    def problem(self, seed: int) -> Problem:
        """Return the problem for one seed."""
        return self.make(torch.Generator().manual_seed(seed))

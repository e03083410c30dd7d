"""Let the ranks of a sharded model verify it together: one rank's need gathers the model, one rank's refusal stops all.

Ranks have different batches, so one may have to run samples again where another has not. Every rank therefore says at
the same places of a step whether it must, in one small all-reduce. If any must, all gather the model, and each runs
what it needs by itself. A second all-reduce then tells whether any has refused.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from gradguard.distributed.fully_sharded import gathered
from gradguard.distributed.processes import largest_over, rank_and_size
from gradguard.errors import UnsupportedGradientError

_TASK = "verify the per-sample gradients of a sharded model"
_LENGTH = 1000
"""The most bytes of an error that the other ranks repeat."""


class Place(IntEnum):
    """Where the ranks meet: all must come to the same places in the same order."""

    FORWARD_BEGINS = 1
    FORWARD_ENDS = 2
    CLIP = 3
    VERIFY = 4


_NAMES = {
    Place.FORWARD_BEGINS: "at the beginning of a forward",
    Place.FORWARD_ENDS: "at the end of a forward",
    Place.CLIP: "at clip_and_accumulate()",
    Place.VERIFY: "at verify()",
}


class Together:
    """Blocks of code that every rank enters, and in which the model is gathered where one of them needs that.

    Args:
        module: The model.
        group: The ranks over which the model is sharded; None for a plain model.
        verifies: Whether calls are verified. Otherwise ranks do not meet at the end of a forward and at a clip.
    """

    def __init__(self, module: nn.Module, group: Any = None, verifies: bool = True) -> None:
        self._module, self._group, self._verifies = module, group, verifies

    @contextmanager
    def at(self, place: Place) -> Iterator[Callable[[bool], None]]:
        """Enter a block with all ranks. An error that one rank raises in it before or after the decision stops all.

        Args:
            place: The place in the step.

        Yields:
            A function that the block calls once, to tell whether this rank needs the gathered model from then on.

        Raises:
            UnsupportedGradientError: If another rank has raised an error, or is at another place.
        """
        if self._group is None or not (self._verifies or place in (Place.FORWARD_BEGINS, Place.VERIFY)):
            yield lambda needed: None
            return
        with ExitStack() as whole:
            met = decided = False

            def decide(needed: bool) -> None:
                nonlocal met, decided
                met = True
                decided = self._exchange(place, needed)
                if decided:
                    whole.enter_context(gathered(self._module))

            try:
                yield decide
                if not met:
                    decide(False)
            except Exception as error:
                if decided or not met:
                    met = True
                    whole.close()
                    self._exchange(place, error=error)
                raise
            if decided:
                whole.close()
                self._exchange(place)

    def _exchange(self, place: Place, needed: bool = False, error: Exception | None = None) -> bool:
        """Tell the other ranks what this one needs, or the error that it has raised.

        Returns:
            Whether any rank needs the gathered model.

        Raises:
            UnsupportedGradientError: If this rank has no error, and another has one or is at another place.
        """
        rank = rank_and_size(self._group)[0]
        mine = [needed, 0 if error is None else rank + 1, place, -place]
        told = torch.tensor(mine, dtype=torch.int64, device="cpu")
        anyone, refuses, last, first = largest_over(told, self._group, _TASK).tolist()
        words = self._words_of(error if refuses == rank + 1 else None) if refuses else ""
        if error is not None:
            return bool(anyone)
        if refuses:
            raise UnsupportedGradientError(
                f"process {refuses - 1} of the sharded model refused its part of this mini-batch, so this process did "
                f"not take its own part either. The reason there: {words}"
            )
        if last != -first:
            raise UnsupportedGradientError(
                f"one process is {_NAMES[Place(-first)]} and another {_NAMES[Place(last)]}: expected every process to "
                "call the sharded module and the clipper equally often. Nothing of this step was taken."
            )
        return bool(anyone)

    def _words_of(self, error: Exception | None) -> str:
        """Return the beginning of the words of the one rank that gives its error."""
        words = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_LENGTH]
        told = torch.zeros(_LENGTH, dtype=torch.int64, device="cpu")
        told[: len(words)] = torch.tensor(list(words), dtype=torch.int64, device="cpu")
        return bytes(largest_over(told, self._group, _TASK).tolist()).rstrip(b"\0").decode(errors="ignore")

"""Let the ranks of a model take each step together: one rank's need gathers a sharded model, one's refusal stops all.

Ranks have different batches, so one may have to run samples again where another has not. Every rank therefore says at
the same places of a step whether it must, in one small all-reduce. If any must, all gather the model, and each runs
what it needs by itself. A second all-reduce then tells whether any has refused.

Between these places, the hooks of ``fully_shard`` communicate. A rank that raised an error there would leave the others
waiting. Such an error is therefore kept: the forward and the backward go on to their end without clipping, and the
error is raised where the ranks meet next, on all of them. The ranks of a DistributedDataParallel meet only before a
step's gradients are added up.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from gradguard.distributed.fully_sharded import gathered
from gradguard.distributed.processes import largest_over, rank_and_size
from gradguard.errors import GradguardError, UnsupportedGradientError

_TASK = "take a step of per-sample clipping"
_LENGTH = 1000
"""The most bytes of an error that the other ranks repeat."""


class Place(IntEnum):
    """Where the ranks meet: all must come to the same places in the same order."""

    FORWARD_BEGINS = 1
    FORWARD_ENDS = 2
    CLIP = 3
    VERIFY = 4
    STEP = 5
    TAKE = 6


_NAMES = {
    Place.FORWARD_BEGINS: "at the beginning of a forward",
    Place.FORWARD_ENDS: "at the end of a forward",
    Place.CLIP: "at clip_and_accumulate()",
    Place.VERIFY: "at verify()",
    Place.STEP: "at pre_step()",
    Place.TAKE: "at take()",
}
_AT_THE_END = Place.STEP, Place.TAKE
"""The places where a step's gradients are taken."""

_KEEPING_THE_STEP = Place.VERIFY, *_AT_THE_END
"""Places at which an error of the block leaves the accumulated mini-batches as they are."""


class Together:
    """Blocks of code that every rank enters, and in which the model is gathered where one of them needs that.

    Args:
        module: The model.
        group: The ranks that take steps together; None for a plain model.
        sharded: Whether the model is sharded over them; otherwise they meet at a step's end only.
        verifies: Whether calls are verified; otherwise ranks do not meet at the end of a forward.

    Attributes:
        drop: Returns a function that drops the mini-batches of the present step, or None.
        steps: The number of steps that this rank has taken.
    """

    def __init__(self, module: nn.Module, group: Any = None, sharded: bool = False, verifies: bool = True) -> None:
        self._module, self._group, self._sharded, self._verifies = module, group, sharded, verifies
        self._keeps = sharded and group is not None and rank_and_size(group)[1] > 1
        self.drop: Callable[[], Callable[[], None] | None] = lambda: None
        self.steps = self._errors = 0
        self._last_error = ""
        self._kept: Exception | None = None

    @property
    def keep(self) -> Callable[[Exception], None] | None:
        """Keeps an error until the ranks meet, the first one of several; None where errors are raised at once."""
        return self._keep if self._keeps else None

    @contextmanager
    def at(self, place: Place, *, evenly: bool = False) -> Iterator[Callable[[bool], None]]:
        """Enter a block with all ranks. An error that one rank has kept or raises in the block stops all.

        An error that comes when the other ranks have gone on already is kept, and the block ends without it.

        Args:
            place: The place in the step.
            evenly: Whether to refuse that one rank has raised more errors since the last step than another.

        Yields:
            A function that the block may call once, to tell whether this rank needs the gathered model from then on.

        Raises:
            UnsupportedGradientError: If another rank has an error, is at another place, or has taken another number of
                steps.
        """
        if self._group is None:
            yield lambda needed: None
            return
        if not self._meet_at(place):
            with self.keeping():
                yield lambda needed: None
            return
        if self._kept is not None:
            kept, self._kept = self._kept, None
            try:
                self._exchange(place, error=kept, drops=True)
                raise kept
            finally:
                del kept  # the error refers to this frame: a cycle until the next garbage collection
        with ExitStack() as whole:
            met = decided = over = False

            def decide(needed: bool) -> None:
                nonlocal met, decided, over
                met = over = True
                decided = self._exchange(place, needed, evenly=evenly)
                over = False
                if decided:
                    whole.enter_context(gathered(self._module))

            try:
                yield decide
                if not met:
                    decide(False)
            except Exception as error:
                if over:  # all ranks raise
                    raise
                if decided or not met:  # the other ranks wait to hear of it
                    met = True
                    whole.close()
                    self._exchange(place, error=error, drops=place not in _KEEPING_THE_STEP)
                    raise
                if not (self._keeps and isinstance(error, GradguardError)):
                    raise
                self._keep(error)
                return
            finally:
                if place in _AT_THE_END:
                    self._errors, self._last_error = 0, ""
            if decided:
                whole.close()
                self._exchange(place)

    @contextmanager
    def keeping(self, kinds: type[Exception] = GradguardError) -> Iterator[None]:
        """Keep an error of a block, if this rank keeps errors; the block then ends without it.

        Args:
            kinds: The errors to keep. PyTorch ends the repeated forward of a checkpoint by one of its own.
        """
        try:
            yield
        except kinds as error:
            if not self._keeps:
                self._errors += 1
                self._last_error = f"{type(error).__name__}: {error}"
                raise
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        if self._kept is None:
            self._kept = error

    def _meet_at(self, place: Place) -> bool:
        if not self._sharded:
            return place in _AT_THE_END
        return self._verifies or place is not Place.FORWARD_ENDS

    def _exchange(
        self,
        place: Place,
        needed: bool = False,
        error: Exception | None = None,
        drops: bool = False,
        evenly: bool = False,
    ) -> bool:
        """Tell the other ranks what this one needs, or the error that it has raised.

        Args:
            place: The place in the step.
            needed: Whether this rank needs the gathered model.
            error: The error of this rank.
            drops: Whether the error drops the mini-batches of this step, on all ranks.
            evenly: As for `at`.

        Returns:
            Whether any rank needs the gathered model.

        Raises:
            UnsupportedGradientError: If this rank has no error, and another has one, is at another place, or has taken
                another number of steps.
        """
        rank = rank_and_size(self._group)[0]
        of_all = (place, self.steps, self._errors if evenly else 0)
        mine = [needed, 0 if error is None else rank + 1, drops, *of_all, *(-number for number in of_all)]
        told = torch.tensor(mine, dtype=torch.int64, device="cpu")
        anyone, refuses, dropped, *numbers = largest_over(told, self._group, _TASK).tolist()
        words = self._words_of(error if refuses == rank + 1 else None) if refuses else ""
        (place_of_one, fewest, least), most = [-number for number in numbers[3:]], numbers[:3]
        apart = [place_of_one, fewest, least] != most
        drop = self.drop() if dropped or apart else None
        if drop is not None:
            drop()
        if error is not None:
            return bool(anyone)
        if refuses:
            who = "the sharded model" if self._sharded else "DistributedDataParallel"
            took = "did not take its own part either"
            if not dropped:
                took = "did not go on either. Its sums are kept: repeat the call together, or call discard() everywhere"
            raise UnsupportedGradientError(
                f"process {refuses - 1} of {who} refused its part of this mini-batch, so this process {took}. The "
                f"reason there: {words}"
            )
        if place_of_one != most[0]:
            raise UnsupportedGradientError(
                f"one process is {_NAMES[Place(place_of_one)]} and another {_NAMES[Place(most[0])]}: expected every "
                "process to call the sharded module and the clipper equally often. Nothing of this step was taken."
            )
        if fewest != most[1]:
            raise UnsupportedGradientError(
                f"one process has taken {fewest} steps and another {most[1]}, so their weights may differ: one has "
                "failed while it filled in gradients. End the program, and go on from a checkpoint. Nothing of this "
                "step was taken."
            )
        if apart:
            told = torch.tensor(rank + 1 if self._errors == most[2] else 0, device="cpu")
            teller = int(largest_over(told, self._group, _TASK)) - 1
            words = self._words_of(UnsupportedGradientError("a batch was refused.") if teller == rank else None)
            raise UnsupportedGradientError(
                "one process has refused samples of this step that the others have not, so the processes may be at "
                f"different steps. Nothing of this step was taken. The reason there: {words}"
            )
        return bool(anyone)

    def _words_of(self, error: Exception | None) -> str:
        """Return the beginning of the words of the one rank that gives its error."""
        before = f" Before: {self._last_error}" if self._last_error else ""
        words = b"" if error is None else f"{type(error).__name__}: {error}{before}".encode()[:_LENGTH]
        told = torch.zeros(_LENGTH, dtype=torch.int64, device="cpu")
        told[: len(words)] = torch.tensor(list(words), dtype=torch.int64, device="cpu")
        return bytes(largest_over(told, self._group, _TASK).tolist()).rstrip(b"\0").decode(errors="ignore")

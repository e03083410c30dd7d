"""Runs one sample of a real step alone again, now and then, and compares it with what the clipper has for it.

The trial before the first call looks at the model as it is then, and a forward that does what none has done is looked
at on that step (`operation_trace`). What leaves the operations as they are (a capacity that begins to bind, a number
that only a backward reads) is found here: on the first mini-batch, the 2nd, the 4th, the 8th and so on, then on one in
a thousand, a sample drawn at random runs alone, with the random numbers that it had in the batch and the gradients
that its outputs got, scaled as those of its own loss are. It must return what it returned in the batch, and each
parameter must get the gradient that is clipped. Where the module returns its loss, up to sixteen samples run alone on
the first mini-batch of each kind and size, because the trial compares rows that are returned. Where a forward reads
values, four samples run alone: on each of the first eight mini-batches, then ever more seldom, at last on one in a
hundred.

Rounding may open a ReLU in the batch that stays shut for the sample alone. So what differs by little is looked at
again: all samples of the batch run once more in float64, as the clipper sees them, and decide.

There is no witness where a value from inside the module reaches the loss beside its outputs, where the share of one
sample in the random numbers cannot be told, and for sharded models, whose every run is a collective.
"""

import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import written
from gradguard.per_sample.capture import reaches_inside, taps_are_silent
from gradguard.per_sample.comparison import Comparison, SampleGradient
from gradguard.per_sample.contributions import Contribution, Contributions
from gradguard.per_sample.mini_batch import GradientCollector, MiniBatch
from gradguard.per_sample.rerun import UntoldDrawsError
from gradguard.per_sample.sample_loop import LoopedCall
from gradguard.torch_private import Backward, call_before_backwards, current_graph_task

_RAREST, _RAREST_BY_VALUE = 1000, 100
"""Mini-batches from one witness to the next, at most; the second where forwards read values or select by them."""

_EACH = 8
"""Mini-batches after a trial each of which is witnessed where forwards read values."""

MANY, SOME = 16, 4
"""Samples that are run alone, at most: of a call that did something new or is tried and returns its loss, and of one
that reads values."""

_ROUNDING = 256.0
"""Differences above this multiple of the usual rounding are not looked at again."""

SecondOpinion = Callable[[], Callable[[LoopedCall, int], Comparison | None] | None]
"""Gives what compares one sample with all others beside it, in float64; None once its owner is dropped."""


class Witness:
    """Compares one sample of some mini-batches with what it gives alone.

    Args:
        second_opinion: Asked where rounding may explain a difference; None where no mini-batch is to be witnessed.

    Attributes:
        is_active: Whether mini-batches are witnessed.
        mini_batch: Number of the mini-batch that is being made, from 1.
        last_good: The one in which the model was last found to be right; 0 for none.
        by_value: Whether forwards read values or select by them, so that another batch may do something else.
        missed: Outermost modules of the calls of this mini-batch that were not recorded. Where a later one is, as the
            first of its kind, what only such calls use is compared, and everything on the next mini-batch.
    """

    def __init__(self, second_opinion: SecondOpinion | None) -> None:
        self.is_active = second_opinion is not None
        self._second_opinion = second_opinion or (lambda: None)
        self._random = random.Random()  # the user's generators are left alone
        self._chosen = self._random.random()
        self._next, self._gap, self._most = 1, 1, 1
        self.mini_batch, self.last_good = 1, 0
        self.by_value, self._since_tried = False, 0
        self.missed = set[nn.Module]()
        self._beside: bool | None = None
        self._unsubscribe: Callable[[], object] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the mini-batch that is being made is witnessed."""
        return self.mini_batch >= self._next

    def samples(self, batch_size: int) -> list[int]:
        """Return the samples that are run alone, the same for all calls of a mini-batch."""
        first = int(self._chosen * batch_size)
        return [(first + i) % batch_size for i in range(min(batch_size, self._most))]

    def look_at(self, samples: int) -> None:
        """Run so many samples of the mini-batch that is being made alone, if there are as many."""
        self._next, self._most = self.mini_batch, max(samples, self._most)

    def begin_again(self) -> None:
        """Witness the mini-batch that is being made, the next one, and then ever fewer: the model did something new."""
        self._next, self._gap, self._since_tried = self.mini_batch, 1, 0

    def bring_nearer(self, mini_batches: int) -> None:
        """Something changed that may matter."""
        self._next = max(self.mini_batch, self._next - mini_batches)

    def watch(self, collector: GradientCollector) -> None:
        """Look, until `forget`, whether a backward enters the module beside its outputs, as for a value a hook kept."""
        if self._unsubscribe is not None:
            return

        witness, gathered = weakref.ref(self), weakref.ref(collector)  # a clipper that is dropped hears of nothing

        def begins(backward: Backward) -> None:
            own, into = witness(), gathered()
            if own is not None and into is not None and current_graph_task() == -1 and not taps_are_silent():
                own._beside = bool(own._beside) or reaches_inside(backward.roots, into)

        self._unsubscribe = weakref.finalize(self, call_before_backwards(begins))

    def forget(self) -> None:
        """Nothing is recorded any more."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._beside = self._unsubscribe = None
        self.missed.clear()

    def end(self) -> None:
        """A mini-batch has been taken."""
        self.mini_batch += 1
        self._most = 1
        self.forget()

    def _next_one(self) -> None:
        self._next = self.mini_batch + self._gap
        self._since_tried += 1
        if not self.by_value:
            self._gap = min(2 * self._gap, _RAREST)
        elif self._since_tried >= _EACH:
            self._gap = min(self._gap + (self._gap + 1) // 2, _RAREST_BY_VALUE)
        self._chosen = self._random.random()

    def look(self, mini_batch: MiniBatch) -> None:
        """Compare, if this mini-batch was recorded.

        Args:
            mini_batch: A mini-batch whose contributions are finished.

        Raises:
            UnsupportedGradientError: If the sample alone gives something else.
        """
        calls, found = mini_batch.witnessed, mini_batch.finished
        if not calls or found is None:
            return
        words, sample, whole = None, -1, not self.missed
        try:
            if not whole:
                found = self._of_recorded([*calls, *mini_batch.loops], found)
            # Without a look at its roots, what a backward brought beside the outputs is not known.
            if self._beside is False and not any(written(call.recorded) for call in calls):
                for sample in self.samples(mini_batch.batch_size):
                    words = self._differs(calls, mini_batch.loops, sample, found)
                    if words is not None:
                        break
                if words is None:
                    self.last_good = self.mini_batch if whole else self.last_good
        except UntoldDrawsError:
            pass
        finally:
            calls.clear()
            self.forget()
        if words is None:
            if whole:
                self._next_one()
            return
        known = f"The model was last known to be right on mini-batch {self.last_good}. " if self.last_good else ""
        raise UnsupportedGradientError(
            f"on mini-batch {self.mini_batch}, sample {sample} was run alone again, and {words}. Samples are mixed, or "
            "gradients are changed on their way through the model: by something that no trial has shown, or that has "
            "changed since (a flag, a global variable, a buffer, a step counter, a hook on a value, an error clip). "
            f"{known}Nothing of this step was taken."
        )

    def _of_recorded(self, calls: Sequence[LoopedCall], found: Mapping[str, Contribution]) -> Contributions:
        """Return what parameters got that only recorded calls use.

        Raises:
            UnsupportedGradientError: If a call that must be compared, as no trial shows as much, shares parameters.
        """
        missed = {part for module in self.missed for part in module.modules()}
        places = {name: slots for call in calls for name, slots in call.places.items()}
        own = {name for name, slots in places.items() if missed.isdisjoint(module for module, _ in slots)}
        if self._most >= MANY and len(own) < len(places):
            raise UnsupportedGradientError(
                "a call did something that none had done before, and a call of the same mini-batch that shares "
                "parameters with it was not recorded, so how it treats samples is not known. Repeat this step: it is "
                "looked at from its beginning. Nothing of this step was taken."
            )
        return {name: found[name] for name in own & found.keys()}

    def _differs(
        self,
        calls: list[LoopedCall],
        loops: list[LoopedCall],
        sample: int,
        found: Mapping[str, Contribution],
    ) -> str | None:
        """Words for how the sample alone differs; None if it does not."""
        words = self._compare([*calls, *loops], sample, found, 1.0)
        if words is None:
            return None
        coarse = max(call.precision for call in calls) > 1e-4
        if not coarse and self._compare([*calls, *loops], sample, found, _ROUNDING) is not None:
            return words
        opinion = self._second_opinion()
        opinions = [None if opinion is None else opinion(call, sample) for call in calls]
        return None if all(one is not None and one.excess <= 1 for one in opinions) else words

    def _compare(
        self,
        calls: list[LoopedCall],
        sample: int,
        found: Mapping[str, Contribution],
        tolerance: float,
    ) -> str | None:
        expected: dict[str, Tensor] = {}
        precision = 0.0
        for call in calls:
            with _alone(call, tolerance):
                precision = max(precision, call.precision)
                try:
                    gradients = next(iter(call.run([sample])))
                except UntoldDrawsError:
                    raise
                except UnsupportedGradientError:
                    return "it returns something else than in the batch"
            for name in gradients if not self.missed else gradients.keys() & found.keys():
                gradient = gradients[name]
                expected[name] = expected[name] + gradient if name in expected else gradient
        own = SampleGradient(expected)
        comparison = own.compare(found, sample, precision)
        if comparison.excess <= 1 or not math.isfinite(own.whole + comparison.excess):
            return None  # a sample that is not finite adds zero
        return (
            f"the gradient of {comparison.parameter} is another than the one that the batch gives it (relative error "
            f"{comparison.largest:.2g})"
        )


@contextmanager
def _alone(call: LoopedCall, tolerance: float) -> Iterator[None]:
    """Let a call be run again, with more room for rounding."""
    before = call.precision
    call.precision = before * tolerance
    try:
        with torch.enable_grad():
            yield
    finally:
        call.precision = before

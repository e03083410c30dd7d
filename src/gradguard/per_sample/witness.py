"""Witnesses: samples of a real step that run alone again now and then, to verify their gradients in the batch.

The rehearsal before the first call verifies the model in its state at that time. A forward with new operations is
verified on its own step (`operation_trace`). A witness finds changes that leave the operations the same: a capacity
that begins to bind, or a number that only a backward reads. On mini-batches 1, 2, 4, 8 and so on, then on one in a
thousand, a sample drawn at random runs alone. It gets the random numbers that it had in the batch, and the gradients of
its outputs, scaled to those of its own loss. It must return the same outputs as in the batch, and each parameter must
get the gradient that is clipped.

Where the module returns its loss, up to sixteen samples run alone on the first mini-batch of each kind and size,
because the rehearsal compares rows of outputs. Where a forward reads values, four samples run alone: on each of the
first eight mini-batches, then less and less often, down to one in a hundred.

Rounding may open a ReLU in the batch that stays closed for the sample alone, and is large beside a difference of nearly
equal numbers. A difference that is small, or that `measured_rounding` explains, is therefore checked again: all samples
of the batch run once more in float64, with the clipper's hooks, and this comparison decides.

There is no witness where a value from inside the module reaches the loss other than through its outputs, and where one
sample's share of the random numbers cannot be determined.
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
"""The most mini-batches between two witnesses; the second number where forwards read values or select by them."""

_EACH = 8
"""Number of mini-batches after a rehearsal that all have a witness, where forwards read values."""

MANY, SOME = 16, 4
"""The most samples of a call that run alone: `MANY` for a call that did something new, or that is verified and returns
its loss; `SOME` for a call that reads values."""

_ROUNDING = 256.0
"""Differences above this multiple of the usual rounding are refused without a second comparison in float64."""

SecondOpinion = Callable[[], Callable[[LoopedCall, int], Comparison | None] | None]
"""Returns a function that compares one sample alone and in its whole batch in float64; None once its owner is freed."""


class Witness:
    """Compare samples of some mini-batches with the same samples run alone.

    Args:
        second_opinion: Decides where rounding may explain a difference; None if no mini-batch is to have a witness.

    Attributes:
        is_active: Whether mini-batches have witnesses.
        mini_batch: Number of the present mini-batch, from 1.
        last_good: Number of the mini-batch in which the model was last verified; 0 for none.
        by_value: Whether forwards read values or select by them; another batch may then do other operations.
        missed: Outermost modules of the calls of this mini-batch that were not recorded. If a later call is recorded,
            as the first of its kind, only parameters that recorded calls alone use are compared now, and all
            parameters on the next mini-batch.
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
        """Whether the present mini-batch has a witness."""
        return self.mini_batch >= self._next

    def samples(self, batch_size: int) -> list[int]:
        """Return the samples to run alone, the same for all calls of a mini-batch."""
        first = int(self._chosen * batch_size)
        return [(first + i) % batch_size for i in range(min(batch_size, self._most))]

    def look_at(self, samples: int) -> None:
        """Make at least ``samples`` samples of the present mini-batch run alone, or all if it has fewer."""
        self._next, self._most = self.mini_batch, max(samples, self._most)

    def begin_again(self) -> None:
        """Restart the schedule at the present mini-batch, after a rehearsal or a call that did something new."""
        self._next, self._gap, self._since_tried = self.mini_batch, 1, 0

    def bring_nearer(self, mini_batches: int) -> None:
        """Bring the next witness forward by ``mini_batches``, because a change in the model may matter."""
        self._next = max(self.mini_batch, self._next - mini_batches)

    def watch(self, collector: GradientCollector) -> None:
        """Detect, until `forget`, a backward that enters the module other than through its outputs.

        An example is a backward from a value that a forward hook stored.
        """
        if self._unsubscribe is not None:
            return

        witness, gathered = weakref.ref(self), weakref.ref(collector)  # the hook must not keep the clipper alive

        def begins(backward: Backward) -> None:
            own, into = witness(), gathered()
            if own is not None and into is not None and current_graph_task() == -1 and not taps_are_silent():
                own._beside = bool(own._beside) or reaches_inside(backward.roots, into)

        self._unsubscribe = weakref.finalize(self, call_before_backwards(begins))

    def forget(self) -> None:
        """Drop the records of the present mini-batch."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._beside = self._unsubscribe = None
        self.missed.clear()

    def end(self) -> None:
        """Count a finished mini-batch."""
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
        """Run the witnesses of a mini-batch alone and compare, if the mini-batch was recorded.

        Args:
            mini_batch: A mini-batch whose contributions are finished.

        Raises:
            UnsupportedGradientError: If a sample alone has other outputs or gradients than in the batch.
        """
        calls, found = mini_batch.witnessed, mini_batch.finished
        if not calls or found is None:
            return
        words, sample, whole = None, -1, not self.missed
        on_lists = calls[0].call.batch.words_on_divided
        try:
            if not whole:
                found = self._of_recorded([*calls, *mini_batch.loops], found)
            # None means that the backward's roots were not read, so it may have entered the module elsewhere.
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
        known = f"The model was last verified on mini-batch {self.last_good}. " if self.last_good else ""
        raise UnsupportedGradientError(
            f"on mini-batch {self.mini_batch}, sample {sample} was run alone again, and {words}. The model mixes "
            "samples, or changes gradients on their way, by something that earlier checks did not show or that has "
            "changed since (a flag, a global variable, a buffer, a step counter, a hook on a value, an error clip). "
            f"{known}Nothing of this step was taken.{on_lists}"
        )

    def _of_recorded(self, calls: Sequence[LoopedCall], found: Mapping[str, Contribution]) -> Contributions:
        """Return the contributions to parameters that only recorded calls use.

        Raises:
            UnsupportedGradientError: If a recorded call that must be verified now shares parameters with an unrecorded
                call.
        """
        missed = {part for module in self.missed for part in module.modules()}
        places = {name: slots for call in calls for name, slots in call.places.items()}
        own = {name for name, slots in places.items() if missed.isdisjoint(module for module, _ in slots)}
        if self._most >= MANY and len(own) < len(places):
            raise UnsupportedGradientError(
                "a call did operations that none had done before, and another call of the same mini-batch that shares "
                "parameters with it was not recorded, so the clipper cannot verify that samples are separate. Repeat "
                "this step: it is then recorded from its beginning. Nothing of this step was taken."
            )
        return {name: found[name] for name in own & found.keys()}

    def _differs(
        self,
        calls: list[LoopedCall],
        loops: list[LoopedCall],
        sample: int,
        found: Mapping[str, Contribution],
    ) -> str | None:
        """Return a description of how the sample alone differs from the batch; None if it does not."""
        words = self._compare([*calls, *loops], sample, found, 1.0)
        if words is None:
            return None
        coarse = max(call.precision for call in calls) > 1e-4
        if not coarse and self._compare([*calls, *loops], sample, found, _ROUNDING, measures=True) is not None:
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
        measures: bool = False,
    ) -> str | None:
        expected: dict[str, Tensor] = {}
        precision = 0.0
        for call in calls:
            with _alone(call, tolerance, measures):
                precision = max(precision, call.precision)
                try:
                    gradients = next(iter(call.run([sample])))
                except UntoldDrawsError:
                    raise
                except UnsupportedGradientError:
                    return "it returned something else than in the batch"
            for name in gradients if not self.missed else gradients.keys() & found.keys():
                gradient = gradients[name]
                expected[name] = expected[name] + gradient if name in expected else gradient
        own = SampleGradient(expected)

        def rounding() -> dict[str, float]:
            each = [call.rounding_of(sample) for call in calls] if measures else []
            return {name: math.fsum(one.get(name, 0.0) for one in each) for name in expected}

        comparison = own.compare(found, sample, precision, 1.0, rounding)
        if comparison.excess <= 1 or not math.isfinite(own.whole + comparison.excess):
            return None  # a sample that is not finite adds zero
        return (
            f"the gradient of {comparison.parameter} differs from the sample's gradient in the batch (relative error "
            f"{comparison.largest:.2g})"
        )


@contextmanager
def _alone(call: LoopedCall, tolerance: float, measures: bool) -> Iterator[None]:
    """Allow ``tolerance`` times as much rounding in a block that runs a call again, and measure it if ``measures``."""
    before = call.precision, call.measures
    call.precision, call.measures = call.precision * tolerance, measures
    try:
        with torch.enable_grad():
            yield
    finally:
        call.precision, call.measures = before

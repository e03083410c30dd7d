"""The rules that `spikes.py` compares: those of others, written from what their code does, and ours.

A rule sees a run after each backward pass, decides, and takes the optimizer's step or not. Plain Python numbers: the
slow twins of what trainers and this library do on the device.
"""

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import gradguard as gg
from spikes_scenarios import Run


class Rule:
    """Clip, then step: what all rules do where they see no spike.

    Attributes:
        skipped: The batches whose step was not taken, or was undone.
        cursor: Where the data goes on, if not at the next batch.
        events: What else was done, and at which batch.
    """

    def __init__(self, run: Run, clip: float | None = None) -> None:
        self.run, self.clip = run, clip
        self.skipped: list[int] = []
        self.cursor: int | None = None
        self.events: list[tuple[int, str]] = []

    def norm(self) -> float:
        grads = [p.grad for p in self.run.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])))

    def apply(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.run.parameters(), self.clip)
        self.run.optimizer.step()

    def step(self, i: int, loss: Tensor) -> None:
        if self.is_spike(i, float(loss.detach()), self.norm()):
            self.skipped.append(i)
        else:
            self.apply()

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del i, loss, norm
        return False


class Oracle(Rule):
    """Skips the batches that are bad, and no other: what no rule can know."""

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del loss, norm
        return i in self.run.bad


class Median(Rule):
    """`ClipByMedian` alone."""

    def __init__(self, run: Run, clip: float | None = None) -> None:
        super().__init__(run, clip)
        self.clipper = gg.ClipByMedian()

    def apply(self) -> None:
        self.clipper(self.run.parameters())
        self.run.optimizer.step()


class OLMo(Rule):
    """OLMo-core's SkipStepOptimizer: loss or norm above the mean and 6 deviations of the last 128, skipped ones too.

    As it is, a value that is not finite enters the history, and silences it or skips all until it has left. ``right``
    keeps such values out and skips their steps.
    """

    def __init__(self, run: Run, clip: float | None = None, *, right: bool = True) -> None:
        super().__init__(run, clip)
        self.right = right
        self.losses: deque[float] = deque(maxlen=128)
        self.norms: deque[float] = deque(maxlen=128)

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del i
        if self.right and not (math.isfinite(loss) and math.isfinite(norm)):
            return True
        bad = self._above(loss, self.losses) or self._above(norm, self.norms)
        self.losses.append(loss)
        self.norms.append(norm)
        return bad

    def _above(self, value: float, past: deque[float]) -> bool:
        if len(past) < 64:
            return False
        values = torch.tensor(list(past), dtype=torch.float64)
        return not value <= float(values.mean() + 6 * values.std())


class Lightning(Rule):
    """Lightning's SpikeDetection: loss of 3 times the running mean of 10, and worse than the last; seen after the step.

    It writes this batch and the one before into a list and ends the run. What its user does then is done here: go back
    to the last checkpoint, of every 50 steps, and read the data again without the listed batches. Steps that are lost
    are lost: the run ends after as many steps as any other.
    """

    def __init__(self, run: Run, clip: float | None = None, *, every: int = 50, restarts: int = 20) -> None:
        super().__init__(run, clip)
        self.every, self.restarts = every, restarts
        self.mean: float | None = None
        self.last: float | None = None
        self.seen = 0
        self.excluded: set[int] = set()
        self.checkpoint: tuple[int, Any] | None = None

    def step(self, i: int, loss: Tensor) -> None:
        if i in self.excluded:
            self.skipped.append(i)
            return
        if self.seen % self.every == 0:
            self.checkpoint = i, _whole(self.run)
        self.apply()
        self.seen += 1
        if self.is_spike(i, float(loss.detach()), 0.0) and self.restarts and self.checkpoint is not None:
            self.restarts -= 1
            self.excluded |= {i - 1, i}
            self.events.append((i, "restart"))
            self.cursor = self.checkpoint[0]
            _restore(self.run, self.checkpoint[1])
            self.mean = self.last = None

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del i, norm
        mean, last = self.mean, self.last
        self.mean = loss if mean is None else mean + (loss - mean) / 10
        self.last = loss
        return mean is not None and last is not None and not loss < 3 * mean and loss > last


class Foundry(Rule):
    """The fixed threshold of Megatron-LM's rerun machine as a skip: 10 times the largest of the first 100 losses."""

    largest, seen = -math.inf, 0

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del i, norm
        if self.seen < 100:
            self.seen, self.largest = self.seen + 1, max(self.largest, loss)
            return False
        return abs(loss) >= 10 * self.largest


class LogMedian:
    """The slow twin of `SpikeDetector`: above the median and k deviations of the logarithms of the last values.

    A value is rejected if any signal is above; then it enters a second list, and after ``cap`` in a row that list takes
    the place of the first. ``floor`` is the least deviation.
    """

    def __init__(
        self, k: float = 6.0, window: int = 128, warmup: int = 32, cap: int = 8, floor: float | Iterable[float] = 0.05
    ) -> None:
        self.k, self.window, self.warmup, self.cap = k, window, warmup, cap
        self.floor = floor
        self.past: list[list[float]] = []
        self.rejected: list[list[float]] = []
        self.adoptions = 0

    def observe(self, values: list[float]) -> bool:
        if not all(math.isfinite(v) for v in values):
            return True
        if len(self.past) >= self.warmup and max(self.scores(values)) > self.k:
            self.rejected.append(values)
            if len(self.rejected) >= self.cap:
                self.past, self.rejected = self.rejected, []
                self.adoptions += 1
            return True
        self.rejected = []
        self.past = [*self.past, values][-self.window :]
        return False

    def scores(self, values: list[float]) -> list[float]:
        floors = [self.floor] * len(values) if isinstance(self.floor, float) else list(self.floor)
        return [self._score(v, [one[at] for one in self.past], floors[at]) for at, v in enumerate(values)]

    @staticmethod
    def _score(value: float, past: list[float], floor: float) -> float:
        positive = min(past) > 0
        values = [math.log(v) for v in past] if positive else past
        middle = statistics.median(values)
        spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
        least = floor if positive else floor * abs(middle)
        value = math.log(max(value, 1e-300)) if positive else value
        return (value - middle) / max(spread, least, 1e-300)


class Twin(Rule):
    """Skips what `LogMedian` rejects."""

    def __init__(self, run: Run, clip: float | None = None, **options: Any) -> None:
        super().__init__(run, clip)
        self.detector = LogMedian(**options)

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        before = self.detector.adoptions
        bad = self.detector.observe([loss, norm])
        if self.detector.adoptions > before:
            self.events.append((i, "adopted"))
        return bad


class Trial(Twin):
    """Skips; where ``cap`` in a row are adopted, keeps the weights from before, and later tries them for one batch.

    A burst is over when the old weights find the batch of now as usual: then training goes on from them. Where the data
    has changed for good they do not: the step is skipped, and the newer weights come back. Tried ``at`` so many steps
    after the adoption; what is skipped for it is one batch each.
    """

    def __init__(
        self, run: Run, clip: float | None = None, *, cap: int = 5, at: tuple[int, ...] = (6, 16, 36), **options: Any
    ) -> None:
        super().__init__(run, clip, cap=cap, **options)
        self.tries = at
        self.doubt: tuple[int, Any, list[list[float]]] | None = None  # since when, the run, the detector's past
        self.current: tuple[Any, LogMedian] | None = None  # while the old weights are tried

    def step(self, i: int, loss: Tensor) -> None:
        past, adoptions, skips = self.detector.past, self.detector.adoptions, len(self.skipped)
        super().step(i, loss)
        if self.current is not None:
            newer, detector = self.current
            self.current = None
            if len(self.skipped) > skips:
                _restore(self.run, newer)
                self.detector = detector
            else:
                self.events.append((i, "rolled back"))
                self.doubt = None
        elif self.detector.adoptions > adoptions:
            self.doubt = i, _whole(self.run), past
        elif self.doubt is not None and i - self.doubt[0] in self.tries:
            self.current = _whole(self.run), self.detector
            self._go_back(*self.doubt)

    def _go_back(self, at: int, saved: Any, past: list[list[float]]) -> None:
        del at
        _restore(self.run, saved)
        newer, self.detector = self.detector, copy.copy(self.detector)
        self.detector.past, self.detector.rejected = past, []
        self.detector.adoptions = newer.adoptions


def _whole(run: Run) -> Any:
    return copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))


def _restore(run: Run, saved: Any) -> None:
    model, optimizer = copy.deepcopy(saved)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def with_clip(make: Callable[..., Rule], **options: Any) -> Callable[[Run], Rule]:
    return lambda run: make(run, run.clip, **options)


RULES: dict[str, Callable[[Run], Rule]] = {
    "plain": Rule,
    "clip 1.0": lambda run: Rule(run, 1.0),
    "ClipByMedian": Median,
    "OLMo": with_clip(OLMo),
    "OLMo as it is": with_clip(OLMo, right=False),
    "Lightning": with_clip(Lightning),
    "twin cap 8": with_clip(Twin),
    "twin cap 32": with_clip(Twin, cap=32),
    "trial": with_clip(Trial),
    "oracle": with_clip(Oracle),
}

"""The rules that `spikes.py` compares: those of others, written from what their code does, and ours.

A rule sees a run after each backward pass, decides, and takes the optimizer's step or not. Plain Python numbers: the
slow twins of what trainers and this library do on the device.
"""

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable
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
        return float(torch.stack(torch._foreach_norm(grads)).double().norm())

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
        self.past: deque[float] = deque(maxlen=10)
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
            self.past.clear()

    def is_spike(self, i: int, loss: float, norm: float) -> bool:
        del i, norm
        mean = statistics.fmean(self.past or [math.inf])
        spike = abs(loss - mean) >= 2 * abs(mean) and loss > self.past[-1] if self.past else False
        if not spike:
            self.past.append(loss)
        return spike


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


class Skipping(Rule):
    """`Guard` with `SkipSpikes`: the loop's clip, then this library's rule."""

    def __init__(self, run: Run, clip: float | None = None, **options: Any) -> None:
        super().__init__(run, clip)
        self.guard = gg.Guard(
            run.optimizer,
            gg.ClipByGlobalNorm(clip or math.inf),
            spikes=gg.SkipSpikes(gg.SpikeDetector(**options)),
            max_consecutive_skips=None,
        )

    def step(self, i: int, loss: Tensor) -> None:
        self.guard.record_loss(loss.detach())
        before = self.guard.skipped_steps
        self.run.optimizer.step()
        if self.guard.skipped_steps > before:
            self.skipped.append(i)


class Laddered(Rule):
    """`SpikeRecovery`."""

    def __init__(self, run: Run, clip: float | None = None, **options: Any) -> None:
        super().__init__(run, clip)
        self.ladder = gg.SpikeRecovery(run.model, run.optimizer, gg.ClipByGlobalNorm(clip or math.inf), **options)

    def step(self, i: int, loss: Tensor) -> None:
        self.ladder.record_loss(loss.detach())
        before = self.ladder.guard.skipped_steps
        self.run.optimizer.step()
        if self.ladder.guard.skipped_steps > before:
            self.skipped.append(i)
        event = self.ladder.step()
        if event is not None and event.action != "skipped":
            self.events.append((i, event.action))


RULES: dict[str, Callable[[Run], Rule]] = {
    "plain": Rule,
    "clip 1.0": lambda run: Rule(run, 1.0),
    "ClipByMedian": Median,
    "OLMo": with_clip(OLMo),
    "OLMo as it is": with_clip(OLMo, right=False),
    "Lightning": with_clip(Lightning),
    "SkipSpikes": with_clip(Skipping),
    "SkipSpikes, cap 32": with_clip(Skipping, cap=32),
    "SpikeRecovery": with_clip(Laddered),
    "oracle": with_clip(Oracle),
}

"""Detects a loss that diverges, even if the norms stay calm."""

import math
import statistics
from collections import deque

from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import OptimizerSteps, taken_steps

DIVERGED_TIMES = 2.5
"""Loss over its best value: harder data or a restart of the schedule raise it less."""

DIVERGED_PROGRESS = 0.5
"""Share of the progress (first loss minus best) that must be lost as well: a loss near 0 may double without harm."""

DIVERGED_BLOCKS = 3
"""Medians of 20 losses in a row that must be high: a few bad batches are no divergence."""

STILL_HIGH = 0.9
"""Last over first of these medians: below it, the loss comes down again, so the run is learning."""

NOTHING_LEFT = 0.8
"""Share of the progress: if more than this is lost, the run is damaged, and the finding is an error."""

BLOCK = 20
_BEST_OF = 5  # blocks whose median is a candidate for the best: the best single block would be noise


class Loss:
    """Detects a loss that rises and stays high.

    A loss that is ever zero or negative is not judged: its ratios have no meaning.

    Args:
        log: The log that receives the faults.

    Attributes:
        start: The median of the first 20 losses; 0 before they are known.
        best: The lowest median of five block medians in a row (100 losses); before these are known, the start.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._judged = log, True
        self._block: list[float] = []
        self._blocks = 0
        self._recent: deque[float] = deque(maxlen=_BEST_OF)
        self.start, self.best = 0.0, 0.0
        self._high: deque[float] = deque(maxlen=DIVERGED_BLOCKS)
        self._count, self._since = 0, 0

    def follow(self, i: int, loss: float) -> None:
        """Follow a step with a finite loss.

        Args:
            i: The step.
            loss: Its loss.
        """
        if loss <= 0:
            self._judged, self.start, self.best = False, 0.0, 0.0
        if not self._judged:
            return
        self._block.append(loss)
        if len(self._block) == BLOCK:
            self._close_block(i)

    def _close_block(self, i: int) -> None:
        level, self._block = statistics.median(self._block), []
        self._recent.append(level)
        self._blocks += 1
        if self._blocks == 1:
            self.start = self.best = level
        if self._blocks >= _BEST_OF:
            best = statistics.median(self._recent)
            self.best = best if self._blocks == _BEST_OF else min(self.best, best)
        lost = self.best + DIVERGED_PROGRESS * (self.start - self.best)
        if level <= max(DIVERGED_TIMES * self.best, lost):
            self._high.clear()
            self._count = 0
            return
        if not self._count:
            self._since = i - BLOCK + 1
        self._count += 1
        self._high.append(level)
        if self._count < DIVERGED_BLOCKS or level < STILL_HIGH * self._high[0]:
            return
        numbers = {"best": min(self.best, self.start), "start": self.start, "largest": level}
        self._log.report("loss", DIVERGING, self._since, i, level, count=self._count * BLOCK, numbers=numbers)


def came_back(found: Episode, part: OptimizerSteps) -> bool:
    """Return whether a loss that had risen has come back by the end of the run.

    Args:
        found: The episode of the loss that rose.
        part: The steps of its optimizer.
    """
    losses = without_none(taken_steps(part.record).column("loss"))
    best, start = found.numbers["best"], found.numbers["start"]
    end = statistics.median(losses[-BLOCK:]) if losses else math.inf
    return end <= max(DIVERGED_TIMES * best, best + DIVERGED_PROGRESS * (start - best))


def _diverging(found: Episode) -> Words:
    best, largest, start = (found.numbers[key] for key in ("best", "largest", "start"))
    rose = f"the median loss of {BLOCK} steps rose from {number(best)}, its best, to {number(largest)}"
    if found.harmless:
        message = f"{rose} at step {found.first}, and came back by the end"
        return "info", message, "do nothing if the data or a target changed there; otherwise lower the learning rate"
    message = f"{rose} from step {found.first} on, and has not come back; it began at {number(start)}"
    advice = (
        "resume from a checkpoint before the rise, with a lower learning rate; it is no fault if the data became "
        "harder there"
    )
    return ("error" if largest - best > NOTHING_LEFT * (start - best) else "warning"), message, advice


DIVERGING = Kind("diverging_loss", _diverging, value="largest", confidence="medium")
KINDS = (DIVERGING,)

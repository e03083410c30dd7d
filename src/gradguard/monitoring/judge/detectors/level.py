"""Detects gradient norms that explode, vanish or are not finite."""

import math
import statistics
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence

from gradguard.monitoring.judge.detectors.loss import Loss
from gradguard.monitoring.judge.detectors.outliers import source_of
from gradguard.monitoring.judge.findings import Episode, Kind, Log, Words, said
from gradguard.monitoring.judge.numbers import number
from gradguard.words import counted

EXPLODING_TIMES = 10.0
"""Times the usual norm. Log-normal noise with a spread of 1.5 gets there on 6 % of the steps."""

EXPLODING_STEPS = 10
"""Steps in a row above that. The same noise does it once in 10^12 steps, so spikes do not count as an explosion."""

EXPLODING_EARLY_TIMES = 100.0
"""Times the usual norm in the first 200 steps, where warm-ups and layers initialised at zero may raise it tenfold."""

EXPLODING_ONCE_TIMES = 1000.0
"""Times the usual norm for a single step. Without a clip it undoes a thousand steps; noise does not get there."""

EXPLODING_CLIPPED_TIMES = 1e6
"""Times the usual norm for a single step on which a clip bound: the correct part of the gradient became 0."""

EARLY_LOSS_TIMES = 3.0
"""Times the first losses: a loss above this in the first 200 steps, with norms ten times the first, is an explosion."""

EARLY_TIMES = 1e6
"""Times the first norms, where no loss is known: warm-ups and layers initialised at zero do not reach a million."""

ROSE_FAST = 1.2
"""Loss over its best value. If the loss rose less than this with the norms, the run is well."""

ROSE_SLOWLY = 1.5
"""Loss over its best value, for norms that took more than 200 steps to rise."""

VANISHING_SHARE = 1e-4
"""Share of the usual norm. A smaller norm moves nothing; training that converges seldom falls that far."""

VANISHING_STEPS = 20
"""Steps in a row below that: a single batch of zeros, such as one of padding only, does not count."""

CONVERGED_LOSS = 0.1
"""Share of the first loss: a lower loss explains a small norm by convergence."""

BLOCK = 20
"""Norms in a block; the usual norm is computed from the medians of blocks."""

BLOCKS_NEEDED = 3
_EARLY_BLOCKS = 10
_RECENT_BLOCKS = 10
_FIRST = 5


class NormLevel:
    """Detects norms that stay far above or far below the usual norm, or are not finite.

    The usual norm is the median of the medians of each 20 finite norms, without the first 20. Neither spikes nor the
    start of the run change it, and a lasting change does so only once it has lasted for half of the run.

    Args:
        log: The log that receives the faults.
        loss: The detector of the loss, with the losses so far.
        names: The names of the parameters.
    """

    def __init__(self, log: Log, loss: Loss, names: Sequence[str] = ()) -> None:
        self._log, self._loss, self._names = log, loss, names
        self._block: list[float] = []
        self._blocks, self._levels, self._usual = 0, [], 0.0
        self._high, self._low = math.inf, 0.0  # no limits until the usual norm is known
        self._run, self._since, self._peak = 0, 0, 0.0  # steps in a row above (> 0) or below (< 0) the limits
        self._norm, self._first_losses, self._first_norms = 0.0, [], []
        self._early_run, self._early_peak = 0, 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_BLOCKS)
        self._run_losses: deque[float] = deque(maxlen=EXPLODING_STEPS)
        self._tops: Counter[str] = Counter()

    def finite(self, i: int, norm: float, loss: float | None, clipped: bool, top: tuple[int, float] | None) -> None:
        """Follow a step with a finite norm.

        Args:
            i: The step.
            norm: Its norm.
            loss: Its loss; None if it is unknown or not finite.
            clipped: Whether a clip bound on it.
            top: The index of the parameter with the largest gradient and its share of the squared norm, if known.
        """
        self._norm = norm
        self._block.append(norm)
        if len(self._block) == BLOCK:
            self._close_block()
        if loss is not None and self._blocks <= BLOCKS_NEEDED:
            self._first_losses.append(loss)
        if self._blocks <= _EARLY_BLOCKS:
            self._early(i, norm, loss)
        if norm > self._high:
            self._exploding(i, norm, loss, clipped, top)
        elif norm <= self._low:
            self._vanishing(i, norm, loss)
        else:
            self._run = 0

    def nonfinite(self, i: int, skipped: bool, amp: bool) -> None:
        """Follow a step with gradients that are not finite.

        Args:
            i: The step.
            skipped: Whether the step was skipped.
            amp: Whether a loss scaler is in use; the steps that it skips are its search for a scale, not a fault.
        """
        if skipped and amp:
            return
        text = ""
        if self._usual and self._norm > EXPLODING_TIMES * self._usual:
            times = number(self._norm / self._usual)
            text = f"; the norm before it was {number(self._norm)}, {times} times the usual"
        self._log.report("nonfinite", NONFINITE, i, i, text=text, harmless=skipped)

    def blame(self, i: int, names: Sequence[str]) -> None:
        """Name the parameters whose gradients were not finite on step ``i``.

        Args:
            i: The step.
            names: Their names.
        """
        for episode in reversed(self._log.episodes):
            if episode.kind is NONFINITE and episode.last == i:
                episode.params += [name for name in names if name not in episode.params]
                return

    def _count(self, i: int, sign: int) -> int:
        """Return for how many steps in a row the norm has been above (``sign`` 1) or below (-1) the limits."""
        if self._run * sign <= 0:
            self._run, self._since = 0, i
        self._run += sign
        return abs(self._run)

    def _early(self, i: int, norm: float, loss: float | None) -> None:
        """Detect an explosion before the usual norm is known: the norm and the loss far above the first ones."""
        if len(self._first_norms) < _FIRST:
            if norm > 0:
                self._first_norms.append(norm)
            return
        first = statistics.median(self._first_norms)
        start = statistics.median(self._first_losses[:_FIRST]) if len(self._first_losses) >= _FIRST else 0.0
        rose = loss is not None and 0 < EARLY_LOSS_TIMES * start < loss
        fell = loss is not None and loss < start
        if norm <= EXPLODING_TIMES * first or fell or not (rose or norm > EARLY_TIMES * first):
            self._early_run = 0
            return
        self._early_run += 1
        self._early_peak = max(norm, self._early_peak) if self._early_run > 1 else norm
        if self._early_run < EXPLODING_STEPS or norm < self._early_peak / 2:
            return  # a large learning rate may raise the loss in the beginning, until it comes down
        numbers = {"usual": first, "times": EXPLODING_TIMES, "largest": self._early_peak}
        since = i - self._early_run + 1
        self._log.report("exploding", EXPLODING, since, i, norm, count=self._early_run, numbers=numbers)

    def _exploding(self, i: int, norm: float, loss: float | None, clipped: bool, top: tuple[int, float] | None) -> None:
        count = self._count(i, +1)
        if count == 1:
            self._peak, self._tops = norm, Counter()
            self._run_losses.clear()
        self._peak = max(self._peak, norm)
        if loss is not None:
            self._run_losses.append(loss)
        self._tops.update(source_of(top, self._names))
        if count < EXPLODING_STEPS:
            least = (EXPLODING_CLIPPED_TIMES if clipped else EXPLODING_ONCE_TIMES) * self._usual
            if norm > max(least, EXPLODING_TIMES * max(self._recent)):  # a jump, not a steep rise of all norms
                numbers = {"usual": self._usual, "largest": norm}
                self._log.report("jump", JUMP, i, i, norm, numbers=numbers, harmless=clipped, params=list(self._tops))
            return
        if not self._is_explosion(norm):
            return
        numbers = {"usual": self._usual, "times": self._high / self._usual, "largest": self._peak}
        params = [name for name, often in self._tops.most_common(1) if 2 * often > count]
        self._log.report("exploding", EXPLODING, self._since, i, norm, count=count, numbers=numbers, params=params)

    def _is_explosion(self, norm: float) -> bool:
        """Return whether norms that rose are an explosion: in a run that is well, the loss does not rise with them."""
        rose = statistics.median(self._run_losses) / best if (best := self._loss.best) and self._run_losses else None
        if rose is not None and rose <= 1:  # the loss is at its best
            return False
        if norm > EXPLODING_ONCE_TIMES * self._usual:
            return True
        fast = norm > EXPLODING_TIMES * min(self._recent)
        if rose is None:
            return fast or norm > EXPLODING_EARLY_TIMES * self._usual
        return rose > (ROSE_FAST if fast else ROSE_SLOWLY)

    def _vanishing(self, i: int, norm: float, loss: float | None) -> None:
        count = self._count(i, -1)
        if count < VANISHING_STEPS:
            return
        if (
            loss is not None
            and self._first_losses
            and 0 <= loss < CONVERGED_LOSS * statistics.median(self._first_losses)
        ):
            return
        numbers = {"below": self._low, "smallest": norm}
        self._log.report("vanishing", VANISHING, self._since, i, norm, count=count, numbers=numbers)

    def _close_block(self) -> None:
        level = statistics.median(self._block)
        self._block, self._blocks = [], self._blocks + 1
        self._recent.append(level)
        if self._blocks > 1:
            insort(self._levels, level)
        if len(self._levels) >= BLOCKS_NEEDED:
            self._usual = self._levels[len(self._levels) // 2]
            times = EXPLODING_TIMES if self._blocks > _EARLY_BLOCKS else EXPLODING_EARLY_TIMES
            self._high = times * self._usual or math.inf
            self._low = VANISHING_SHARE * self._usual


def _vanishing(found: Episode) -> Words:
    smallest = found.numbers["smallest"]
    level = "exactly 0"
    if smallest != 0:
        level = f"below {number(found.numbers['below'])}, {VANISHING_SHARE:g} of the usual norm,"
    message = f"the gradient norm was {level} for {counted(found.count, 'step')} from step {found.first} on"
    advice = (
        "check that the loss depends on the parameters (no detach(), no saturated activation) and that the learning "
        "rate is not 0"
    )
    return ("error" if smallest == 0 else "warning"), message, advice


_NOT_FINITE = "gradients were not finite{where} on {steps}, first on step {found.first}{found.text}"
NONFINITE = Kind(
    "nonfinite",
    said(
        "error",
        _NOT_FINITE,
        "find the operation (`gradguard explain nan`), or skip such steps with "
        'gg.Guard(optimizer, clipper, nonfinite="skip")',
        harmless=(
            "warning",
            f"{_NOT_FINITE}; all of these steps were skipped",
            "the weights are safe; if it happens often, `gradguard explain nan` finds the operation",
        ),
        where=" in {names}",
    ),
)
_MOST_OF_IT = ", most of it in {found.params[0]}"
EXPLODING = Kind(
    "exploding",
    said(
        "error",
        "the gradient norm stayed more than {times:g} times above its usual {usual} for {steps} from step "
        "{found.first} on, up to {largest}{where}",
        "clip (gg.ClipByMedian() needs no number), or lower the learning rate; see the layers' norms",
        where=_MOST_OF_IT,
    ),
    value="largest",
)
_JUMPED = (
    "the gradient norm jumped above {:,.0f} times its usual {{usual}} on {{steps}}, first on step {{found.first}}, up "
    "to {{largest}}{{where}}"
)
JUMP = Kind(
    "exploding",
    said(
        "warning",
        f"{_JUMPED.format(EXPLODING_ONCE_TIMES)}, and nothing clipped it",
        "clip as the report advises, or by gg.ClipByMedian(), which needs no number",
        harmless=(
            "warning",
            f"{_JUMPED.format(EXPLODING_CLIPPED_TIMES)}; a clip bound, which left nothing of the other gradients",
            "find what such a step has computed: an overflow, a division by almost 0, or damaged data",
        ),
        where=_MOST_OF_IT,
    ),
    value="largest",
)
VANISHING = Kind("vanishing", _vanishing, value="smallest")
KINDS = (NONFINITE, EXPLODING, JUMP, VANISHING)

"""The recommended rule: a loss or a norm far above the median of recent ones, by their median absolute deviation."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gradguard.spikes.base import Detector, SpikeVerdict, number_above_0, whole_number
from gradguard.tensors.layout import are_readable

MAD_TO_SIGMA = 1.4826
"""Times the median absolute deviation is the standard deviation, of a normal distribution."""

JUMP_TO_SIGMA = MAD_TO_SIGMA / math.sqrt(2)
"""Times the median absolute difference of two independent values in turn is the same."""


class SpikeDetector(Detector):
    r"""Tell a spike: a signal that stands far above its own recent past.

    A signal is a loss or a gradient norm. With x the logarithms of the last ``window`` accepted values of one, and r
    the last ``recent`` of them,

    .. math:: m = \operatorname{median}(r), \qquad
              d = 1.4826 \max\bigl(\operatorname{median}|r - m|,\;
                  \operatorname{median}|x_t - x_{t-1}| / \sqrt 2\bigr), \qquad
              \text{score} = \frac{\log v - m}{\max(d, \text{floor})}

    and the step is a spike if any signal's score is above ``k``. Only above: a fall is good news. The centre and the
    first term are of few values, so that a loss that still falls does not pass for a wide one; the second, of many,
    keeps that from being too narrow by chance.

    **A rejected value never becomes the measure.** It goes to a second memory, so that an outlier never hides the
    next one. But after ``cap`` spikes in a row what was rejected is the new level, and replaces the history of the
    signals that were too high (**adoption**): a rule without a cap skips for ever after a lasting rise. So a lasting
    rise costs at most ``cap`` steps, and a burst of more than ``cap`` bad batches gets in from its ``cap`` + 1st on.

    **Losses of 0 and below**, as in reinforcement learning or of a density, have no logarithm. While the history of a
    signal holds such a value it is judged by the values themselves, with the same rule, ``floor`` times :math:`|m|` in
    place of ``floor``.

    **Edge cases.**

    =======================================  ===================================================================
    case                                     what happens
    =======================================  ===================================================================
    NaN or infinite value                    that signal is not judged, and remembers nothing; if all are, the
                                             step leaves no trace: a row of spikes is neither longer nor broken
    the first ``warmup`` values of a signal  are accepted unseen; each signal has its own count
    all values alike                         the floor holds: k·floor = 0.3 is a rise by 35 %
    value <= 0 after positive ones           accepted: it is below the median
    more than half of r and x exactly 0      the signal is not judged: there is no measure of what is usual
    after an adoption                        a signal whose history was replaced is judged again from ``warmup``
                                             values on, the ``cap`` adopted ones among them
    a signal that was fine in that row       keeps its history
    =======================================  ===================================================================

    Args:
        k: How many deviations above the median, above 0.
        window: How many accepted values of each signal are remembered.
        recent: How many of them the median is of; all, if there are no more.
        warmup: From how many on it is judged, from 1 to ``window``.
        cap: After how many spikes in a row what was rejected is adopted, from 1 to ``window``.
        floor: The least deviation, in units of the logarithm, above 0.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If one is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> detector = gg.SpikeDetector(warmup=8, cap=2)
        >>> usual = torch.tensor([2.0, 0.5], dtype=torch.float64)  # loss, norm
        >>> [bool(detector.observe(usual * factor)) for factor in [1.0] * 10 + [9.0, 1.0, 9.0, 9.0, 9.0]][10:]
        [True, False, True, True, False]

    Reference:
        Median and MAD: Hampel (1974), The influence curve and its role in robust estimation. Skipping steps whose loss
        or norm stands out: the `SkipStepOptimizer` of OLMo-core (see `olmo_rule`).
    """

    def __init__(
        self,
        k: float = 6.0,
        window: int = 128,
        warmup: int = 32,
        cap: int = 8,
        floor: float = 0.05,
        recent: int = 32,
    ) -> None:
        super().__init__()
        self.k, self.floor = number_above_0("k", k), number_above_0("floor", floor)
        self.window, self.recent = whole_number("window", window, 1), whole_number("recent", recent, 1)
        self.warmup, self.cap = whole_number("warmup", warmup, 1, window), whole_number("cap", cap, 1, window)

    def __repr__(self) -> str:
        """Return the call that makes such a detector."""
        given = [(name, getattr(self, name), usual) for name, usual in _USUAL.items()]
        return f"SpikeDetector({', '.join(f'{name}={value!r}' for name, value, usual in given if value != usual)})"

    def _empty(self, signals: int) -> dict[str, Tensor]:
        # A ring: `count` values have entered, the last at count - 1 modulo its length. Empty places hold inf.
        def room(length: int) -> Tensor:
            return torch.full((signals, length), torch.inf, dtype=torch.float64, device="cpu")

        return {
            "history": room(self.window),
            "count": torch.zeros(signals, dtype=torch.int64, device="cpu"),
            "rejected": room(self.cap),
            "in_a_row": torch.zeros((), dtype=torch.int64, device="cpu"),
            "too_high": torch.zeros(signals, dtype=torch.bool, device="cpu"),  # in the row of spikes that goes on
            "replaced": room(self.window),  # what the last adoption took the place of, and its count; -1 of none
            "replaced_count": torch.full((signals,), -1, dtype=torch.int64, device="cpu"),
        }

    @torch.no_grad()
    def undo_adoption(self) -> None:
        """Take the last adoption back: what was rejected was bad after all, and is no measure of anything.

        The signals whose history it replaced have that history again, without what has entered since; the others keep
        theirs. Without an adoption, or after it has been undone, nothing happens. The host does not wait.
        """
        state = self.state
        if state:
            back = state["replaced_count"] >= 0
            state["history"].copy_(torch.where(back[:, None], state["replaced"], state["history"]))
            state["count"].copy_(torch.where(back, state["replaced_count"], state["count"]))
            state["replaced_count"].fill_(-1)

    def _judge(self, values: Tensor) -> SpikeVerdict:
        if are_readable(values, self.state["history"]):
            return self._judge_on_host(values.tolist())
        return self._judge_on_device(values)

    # On the CPU: the same rule in Python, which takes a third of the time that as many small operations of torch take.

    def _judge_on_host(self, values: Sequence[float]) -> SpikeVerdict:
        pasts = map(_unrolled, self.state["history"].tolist(), self.state["count"].tolist())
        scores = [self._score(past, value) for past, value in zip(pasts, values, strict=True)]
        over = [score > self.k for score in scores]
        row, adopted = int(self.state["in_a_row"]), False
        if any(over):
            row += 1
            adopted = row == self.cap
            self._reject_on_host(values, over, row)
        elif any([math.isfinite(value) for value in values]):
            row = 0
            self._accept_on_host(values)
        self.state["in_a_row"].fill_(0 if adopted else row)
        wide = torch.tensor(scores, dtype=torch.float64, device="cpu")
        row_now = torch.tensor(row, dtype=torch.int64, device="cpu")
        return SpikeVerdict(_boolean(any(over)), wide, row_now, _boolean(adopted))

    def _score(self, past: list[float], value: float) -> float:
        """How many deviations ``value`` is above the median of a signal's history; NaN where that does not tell."""
        if len(past) < self.warmup or not math.isfinite(value):
            return math.nan
        in_logarithms = min(past) > 0
        if in_logarithms:
            past = list(map(math.log, past))
            value = math.log(value) if value > 0 else -math.inf
        recent = past[-self.recent :]
        middle = _middle(recent)
        spread = MAD_TO_SIGMA * _middle([abs(x - middle) for x in recent])
        jumps = JUMP_TO_SIGMA * _middle([abs(b - a) for a, b in pairwise(past)])
        deviation = max(spread, jumps, self.floor if in_logarithms else self.floor * abs(middle))
        return (value - middle) / deviation if deviation > 0 else math.nan

    def _accept_on_host(self, values: Sequence[float]) -> None:
        counts = self.state["count"].tolist()
        for signal, value in enumerate(values):
            if math.isfinite(value):
                self.state["history"][signal, counts[signal] % self.window] = value
                counts[signal] += 1
        self.state["count"].copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        self.state["too_high"].fill_(False)

    def _reject_on_host(self, values: Sequence[float], over: Sequence[bool], row: int) -> None:
        for signal, value in enumerate(values):
            self.state["rejected"][signal, row - 1] = value if math.isfinite(value) else math.inf
        self.state["too_high"].logical_or_(torch.tensor(over, device="cpu"))
        if row == self.cap:
            self._adopt(self.state["too_high"])
            self.state["too_high"].fill_(False)

    # On an accelerator: nothing is read.

    def _judge_on_device(self, values: Tensor) -> SpikeVerdict:
        known = values.isfinite()
        scores = torch.where(known, self._scores(values), torch.nan)
        over = scores > self.k
        spike = over.any()
        self._accept(values, known & ~spike)
        in_a_row, adopted = self._reject(values, known, over, spike)
        return SpikeVerdict(spike, scores, in_a_row, adopted)

    def _scores(self, values: Tensor) -> Tensor:
        """The same for all signals: in each row the ``stored`` values of the history stand last, the newest behind."""
        history, count = self.state["history"], self.state["count"]
        places = torch.arange(self.window, device=history.device)
        past = history.gather(1, (count[:, None] + places) % self.window)
        stored, positive = count.clamp(max=self.window), history.amin(1) > 0
        x = torch.cat([past, values[:, None]], dim=1)
        x = torch.where(positive[:, None], x.clamp(min=0).log(), x)
        past, new = x[:, :-1], x[:, -1]
        recent, few = past[:, -self.recent :], stored.clamp(max=self.recent)
        middle = _median(recent, few)
        spread = MAD_TO_SIGMA * _median((recent - middle[:, None]).abs(), few)
        jumps = JUMP_TO_SIGMA * _median(past.diff(dim=1).abs(), stored - 1)
        least = torch.where(positive, self.floor, self.floor * middle.abs())
        deviation = torch.maximum(torch.maximum(spread, least), torch.where(stored > 1, jumps, 0.0))
        judged = (stored >= self.warmup) & (deviation > 0)
        return torch.where(judged, (new - middle) / deviation, torch.nan)

    def _accept(self, values: Tensor, enters: Tensor) -> None:
        count = self.state["count"]
        _put(self.state["history"], count % self.window, values, enters)
        count.add_(enters)

    def _reject(self, values: Tensor, known: Tensor, over: Tensor, spike: Tensor) -> tuple[Tensor, Tensor]:
        """Remember a spike apart; return the spikes in a row, and whether they are adopted now."""
        in_a_row, too_high, rejected = self.state["in_a_row"], self.state["too_high"], self.state["rejected"]
        _put(rejected, in_a_row.expand(len(values)), torch.where(known, values, torch.inf), spike.expand(len(values)))
        heard = known.any()
        row = torch.where(heard, (in_a_row + 1) * spike, in_a_row)
        blamed = torch.where(heard, (too_high | over) & spike, too_high)
        adopted = row == self.cap
        self._adopt(adopted & blamed)
        in_a_row.copy_(row * ~adopted)
        too_high.copy_(blamed & ~adopted)
        return row, adopted

    def _adopt(self, chosen: Tensor) -> None:
        """Let what was rejected be the history of the ``chosen`` signals."""
        history, count, rejected = self.state["history"], self.state["count"], self.state["rejected"]
        known = rejected < torch.inf
        ahead = (~known).to(torch.uint8).sort(dim=1, stable=True).indices  # the known ones, in their order
        new = torch.full_like(history, torch.inf)
        new[:, : self.cap] = rejected.gather(1, ahead)
        before = self.state["replaced"], self.state["replaced_count"]
        before[0].copy_(torch.where(chosen[:, None], history, before[0]))
        before[1].copy_(torch.where(chosen, count, before[1]))
        history.copy_(torch.where(chosen[:, None], new, history))
        count.copy_(torch.where(chosen, known.sum(1), count))


_USUAL = {"k": 6.0, "window": 128, "warmup": 32, "cap": 8, "floor": 0.05, "recent": 32}


def _unrolled(ring: list[float], count: int) -> list[float]:
    """The values of a ring into which ``count`` have gone, the oldest first."""
    return ring[:count] if count <= len(ring) else ring[count % len(ring) :] + ring[: count % len(ring)]


def _middle(values: list[float]) -> float:
    """The median; 0 of none."""
    ordered, last = sorted(values), len(values) - 1
    return (ordered[last // 2] + ordered[last - last // 2]) / 2 if ordered else 0.0


def _boolean(value: bool) -> Tensor:
    return torch.full((), value, dtype=torch.bool, device="cpu")


def _median(rows: Tensor, stored: Tensor) -> Tensor:
    """The median of the ``stored`` finite numbers of each row; the mean of both middle ones if they are even."""
    middle = torch.stack([(stored - 1) // 2, stored // 2], dim=1).clamp(0, rows.shape[1] - 1)
    return rows.sort(dim=1).values.gather(1, middle).mean(dim=1)


def _put(rows: Tensor, places: Tensor, values: Tensor, enters: Tensor) -> None:
    """Write ``values`` to ``places``, one a row, in place, where it ``enters``."""
    places = places[:, None]
    rows.scatter_(1, places, torch.where(enters[:, None], values[:, None], rows.gather(1, places)))

"""The recommended rule: a loss or a norm far above the median of recent ones, by their median absolute deviation."""

import torch
from torch import Tensor

from gradguard.spikes.base import Detector, SpikeVerdict, number_above_0, whole_number
from gradguard.tensors.layout import are_readable

MAD_TO_SIGMA = 1.4826
"""Times the median absolute deviation is the standard deviation, of a normal distribution."""


class SpikeDetector(Detector):
    r"""Tell a spike: a signal that stands far above its own recent past.

    A signal is a loss or a gradient norm. With x the logarithms of the last ``window`` accepted values of one,

    .. math:: m = \operatorname{median}(x), \qquad
              d = \max\bigl(1.4826 \operatorname{median}|x - m|,\; \text{floor}\bigr), \qquad
              \text{score} = (\log v - m) / d

    and the step is a spike if any signal's score is above ``k``. Only above: a fall is good news.

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
    more than half exactly 0                 the signal is not judged: there is no measure of what is usual
    after an adoption                        a signal whose history was replaced is judged again from ``warmup``
                                             values on, the ``cap`` adopted ones among them
    a signal that was fine in that row       keeps its history
    =======================================  ===================================================================

    Args:
        k: How many deviations above the median, above 0.
        window: How many accepted values of each signal are remembered.
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

    def __init__(self, k: float = 6.0, window: int = 128, warmup: int = 32, cap: int = 8, floor: float = 0.05) -> None:
        super().__init__()
        self.k, self.floor = number_above_0("k", k), number_above_0("floor", floor)
        self.window = whole_number("window", window, 1)
        self.warmup, self.cap = whole_number("warmup", warmup, 1, window), whole_number("cap", cap, 1, window)

    def __repr__(self) -> str:
        """Return the call that makes such a detector."""
        given = {"k": self.k, "window": self.window, "warmup": self.warmup, "cap": self.cap, "floor": self.floor}
        usual = {"k": 6.0, "window": 128, "warmup": 32, "cap": 8, "floor": 0.05}
        return f"SpikeDetector({', '.join(f'{k}={v!r}' for k, v in given.items() if v != usual[k])})"

    def _empty(self, signals: int) -> dict[str, Tensor]:
        # Empty places hold inf. `count` is the number of values that have entered, and so where the next one goes.
        def room(length: int) -> Tensor:
            return torch.full((signals, length), torch.inf, dtype=torch.float64, device="cpu")

        return {
            "history": room(self.window),
            "count": torch.zeros(signals, dtype=torch.int64, device="cpu"),
            "rejected": room(self.cap),
            "in_a_row": torch.zeros((), dtype=torch.int64, device="cpu"),
            "too_high": torch.zeros(signals, dtype=torch.bool, device="cpu"),  # in the row of spikes that goes on
        }

    def _judge(self, values: Tensor) -> SpikeVerdict:
        known = values.isfinite()
        scores = torch.where(known, self._scores(values), torch.nan)
        over = scores > self.k
        spike = over.any()
        self._accept(values, known & ~spike)
        in_a_row, adopted = self._reject(values, known, over, spike)
        return SpikeVerdict(spike, scores, in_a_row, adopted)

    def _scores(self, values: Tensor) -> Tensor:
        """How many deviations above the median each value is; NaN where the history does not tell."""
        history = self.state["history"]
        stored = (history < torch.inf).sum(1)
        positive = history.amin(1) > 0
        x = torch.cat([history, values[:, None]], dim=1)
        x = torch.where(positive[:, None], x.clamp(min=0).log(), x)
        past, new = x[:, :-1], x[:, -1]
        middle = _median(past, stored)
        spread = _median((past - middle[:, None]).abs(), stored)
        least = torch.where(positive, self.floor, self.floor * middle.abs())
        deviation = torch.maximum(MAD_TO_SIGMA * spread, least)
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
        if not are_readable(adopted) or bool(adopted):
            self._adopt(adopted & blamed)
        in_a_row.copy_(row * ~adopted)
        too_high.copy_(blamed & ~adopted)
        return row, adopted

    def _adopt(self, chosen: Tensor) -> None:
        """Let what was rejected be the history of the ``chosen`` signals."""
        history, count = self.state["history"], self.state["count"]
        new = torch.full_like(history, torch.inf)
        new[:, : self.cap] = self.state["rejected"]
        history.copy_(torch.where(chosen[:, None], new, history))
        count.copy_(torch.where(chosen, self.cap, count))


def _median(rows: Tensor, stored: Tensor) -> Tensor:
    """The median of the finite numbers of each row, ``stored`` many; the mean of both middle ones if they are even."""
    middle = torch.stack([(stored - 1).clamp(min=0) // 2, stored // 2], dim=1).clamp(max=rows.shape[1] - 1)
    return rows.sort(dim=1).values.gather(1, middle).mean(dim=1)


def _put(rows: Tensor, places: Tensor, values: Tensor, enters: Tensor) -> None:
    """Write ``values`` to ``places``, one a row, in place, where it ``enters``."""
    places = places[:, None]
    rows.scatter_(1, places, torch.where(enters[:, None], values[:, None], rows.gather(1, places)))

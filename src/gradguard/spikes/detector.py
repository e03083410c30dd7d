"""The recommended rule: a loss or a norm far above the median of recent ones, by their median absolute deviation."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import or_, sub

import torch
from torch import Tensor

from gradguard.spikes.base import Detector, NumberVerdict, SpikeVerdict, number_above_0, whole_number
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
        or norm stands out: the `SkipStepOptimizer` of OLMo-core (see `gradguard.rules.OlmoRule`).
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
        self._numbers: _Numbers | None = None
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
        state = self._settled()
        if state:
            back = state["replaced_count"] >= 0
            state["history"].copy_(torch.where(back[:, None], state["replaced"], state["history"]))
            state["count"].copy_(torch.where(back, state["replaced_count"], state["count"]))
            state["replaced_count"].fill_(-1)

    def _judge(self, values: Tensor) -> SpikeVerdict | NumberVerdict:
        if are_readable(values, self._tensors["history"]):
            return self._judge_on_host(values.tolist())
        return self._judge_on_device(values)

    def observe_numbers(self, values: Sequence[float]) -> bool:
        """As `observe`, for who has the signals as plain numbers on the CPU."""
        if self._numbers is None or len(values) != len(self._numbers.signals):
            return super().observe_numbers(values)
        self._verdict = verdict = self._judge_on_host(values)
        return verdict.spike

    # On the CPU: the same rule in Python. The state is kept as plain numbers from step to step, and goes to the tensors
    # when somebody asks for them. Once `state` was read they are written at each step: its reader may hold them.

    def _settled(self) -> dict[str, Tensor]:
        if self._numbers is not None:
            self._numbers.write(self._tensors)
            self._numbers = None
        return self._tensors

    def _judge_on_host(self, values: Sequence[float]) -> NumberVerdict:
        numbers = self._numbers or _Numbers(self._tensors)
        self._numbers = numbers
        scores = [self._score(signal, value) for signal, value in zip(numbers.signals, values, strict=True)]
        over = [score > self.k for score in scores]
        spike, row = any(over), numbers.in_a_row
        if spike:
            row += 1
            self._reject_on_host(numbers, values, over, row)
        elif any(map(math.isfinite, values)):
            row = 0
            numbers.accept(values)
        adopted = spike and row == self.cap
        numbers.in_a_row = 0 if adopted else row
        if adopted:
            self._adopt_on_host()
        if self._state_was_read or type(self) is not SpikeDetector:  # a subclass may judge in its own way next time
            self._settled()
        return NumberVerdict(spike, scores, row, adopted)

    def _score(self, signal: "_Signal", value: float) -> float:
        """How many deviations ``value`` is above the median of a signal's history; NaN where that does not tell."""
        if len(signal.past) < self.warmup or not math.isfinite(value):
            return math.nan
        in_logarithms, x = signal.in_logarithms, signal.x
        if in_logarithms:
            value = math.log(value) if value > 0 else -math.inf
        recent = x[-self.recent :]
        middle = _middle(sorted(recent))
        spread = MAD_TO_SIGMA * _middle(sorted([abs(y - middle) for y in recent]))
        jumps = JUMP_TO_SIGMA * _middle(signal.jumps)
        deviation = max(spread, jumps, self.floor if in_logarithms else self.floor * abs(middle))
        return (value - middle) / deviation if deviation > 0 else math.nan

    def _reject_on_host(self, numbers: "_Numbers", values: Sequence[float], over: Sequence[bool], row: int) -> None:
        for rejected, value in zip(numbers.rejected, values, strict=True):
            rejected[row - 1] = value if math.isfinite(value) else math.inf
        numbers.too_high = list(map(or_, numbers.too_high, over))

    def _adopt_on_host(self) -> None:
        """It is rare: by the tensors, and the plain numbers are made anew at the next step."""
        state = self._settled()
        self._adopt(state["too_high"])
        state["too_high"].fill_(False)

    # On an accelerator: nothing is read.

    def _judge_on_device(self, values: Tensor) -> SpikeVerdict:
        self._settled()
        known = values.isfinite()
        scores = torch.where(known, self._scores(values), torch.nan)
        over = scores > self.k
        spike = over.any()
        self._accept(values, known & ~spike)
        in_a_row, adopted = self._reject(values, known, over, spike)
        return SpikeVerdict(spike, scores, in_a_row, adopted)

    def _scores(self, values: Tensor) -> Tensor:
        """The same for all signals: in each row the ``stored`` values of the history stand last, the newest behind."""
        history, count = self._tensors["history"], self._tensors["count"]
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
        count = self._tensors["count"]
        _put(self._tensors["history"], count % self.window, values, enters)
        count.add_(enters)

    def _reject(self, values: Tensor, known: Tensor, over: Tensor, spike: Tensor) -> tuple[Tensor, Tensor]:
        """Remember a spike apart; return the spikes in a row, and whether they are adopted now."""
        in_a_row, too_high, rejected = self._tensors["in_a_row"], self._tensors["too_high"], self._tensors["rejected"]
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
        history, count, rejected = self._tensors["history"], self._tensors["count"], self._tensors["rejected"]
        known = rejected < torch.inf
        ahead = (~known).to(torch.uint8).sort(dim=1, stable=True).indices  # the known ones, in their order
        new = torch.full_like(history, torch.inf)
        new[:, : self.cap] = rejected.gather(1, ahead)
        before = self._tensors["replaced"], self._tensors["replaced_count"]
        before[0].copy_(torch.where(chosen[:, None], history, before[0]))
        before[1].copy_(torch.where(chosen, count, before[1]))
        history.copy_(torch.where(chosen[:, None], new, history))
        count.copy_(torch.where(chosen, known.sum(1), count))


_USUAL = {"k": 6.0, "window": 128, "warmup": 32, "cap": 8, "floor": 0.05, "recent": 32}


class _Signal:
    """The history of one signal in plain numbers, and what the rule asks of it, kept up to date value by value.

    Args:
        ring: The history; empty places are not looked at.
        count: How many values have entered it, the last at ``count`` - 1 modulo its length.

    Attributes:
        past: The values, the oldest first.
        in_logarithms: Whether all are above 0.
        x: What the rule compares: their logarithms then, else themselves.
        jumps: The distances of neighbours in ``x``, sorted.
    """

    def __init__(self, ring: list[float], count: int) -> None:
        self.ring, self.count = ring, count
        at = count % len(ring)
        self.past = ring[:count] if count <= len(ring) else ring[at:] + ring[:at]
        self._study()

    def _study(self) -> None:
        self.in_logarithms = bool(self.past) and min(self.past) > 0
        self.x = list(map(math.log, self.past)) if self.in_logarithms else list(self.past)
        self.jumps = sorted(map(abs, map(sub, self.x[1:], self.x)))

    def put(self, value: float) -> None:
        """Let ``value`` enter, and the oldest one go if there is no room."""
        self.ring[self.count % len(self.ring)] = value
        self.count += 1
        self.past.append(value)
        is_full = len(self.past) > len(self.ring)
        if is_full:
            del self.past[0]
        if self.in_logarithms and value > 0:
            self._follow(math.log(value), is_full)
        else:
            self._study()

    def _follow(self, x: float, is_full: bool) -> None:
        insort(self.jumps, abs(x - self.x[-1]))
        self.x.append(x)
        if is_full:
            del self.jumps[bisect_left(self.jumps, abs(self.x[1] - self.x[0]))]
            del self.x[0]


class _Numbers:
    """The state of a detector in plain numbers; what only an adoption changes stays in the tensors."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.signals = list(map(_Signal, state["history"].tolist(), state["count"].tolist()))
        self.rejected: list[list[float]] = state["rejected"].tolist()
        self.too_high: list[bool] = state["too_high"].tolist()
        self.in_a_row = int(state["in_a_row"])

    def accept(self, values: Sequence[float]) -> None:
        """Let those that are finite enter their histories; the row of spikes is over."""
        for signal, value in zip(self.signals, values, strict=True):
            if math.isfinite(value):
                signal.put(value)
        self.too_high = [False] * len(values)

    def write(self, state: dict[str, Tensor]) -> None:
        """Write them into the tensors of the state."""
        found = {
            "history": [signal.ring for signal in self.signals],
            "count": [signal.count for signal in self.signals],
            "rejected": self.rejected,
            "too_high": self.too_high,
            "in_a_row": self.in_a_row,
        }
        for name, numbers in found.items():
            state[name].copy_(torch.tensor(numbers, dtype=state[name].dtype, device="cpu"))


def _middle(ordered: list[float]) -> float:
    """The median of sorted numbers; 0 of none."""
    last = len(ordered) - 1
    return (ordered[last // 2] + ordered[last - last // 2]) / 2 if ordered else 0.0


def _median(rows: Tensor, stored: Tensor) -> Tensor:
    """The median of the ``stored`` finite numbers of each row; the mean of both middle ones if they are even."""
    middle = torch.stack([(stored - 1) // 2, stored // 2], dim=1).clamp(0, rows.shape[1] - 1)
    return rows.sort(dim=1).values.gather(1, middle).mean(dim=1)


def _put(rows: Tensor, places: Tensor, values: Tensor, enters: Tensor) -> None:
    """Write ``values`` to ``places``, one a row, in place, where it ``enters``."""
    places = places[:, None]
    rows.scatter_(1, places, torch.where(enters[:, None], values[:, None], rows.gather(1, places)))

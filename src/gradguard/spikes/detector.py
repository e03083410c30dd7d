"""The recommended rule: a loss or a norm far above the median of recent ones, by their median absolute deviation."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import or_, sub
from typing import NamedTuple

import torch
from torch import Tensor

from gradguard.errors import InvalidValueError
from gradguard.spikes.base import Detector, NumberVerdict, SpikeVerdict, number_above_0, whole_number
from gradguard.tensors.layout import are_readable

MAD_TO_SIGMA = 1.4826
"""Times the median absolute deviation is the standard deviation, of a normal distribution."""

JUMP_TO_SIGMA = MAD_TO_SIGMA / math.sqrt(2)
"""Times the median absolute difference of two independent values in turn is the same."""

BURST = 9.0
"""Evidence, as a logarithm, that makes a burst of steps that stand out: chance does that once in e^9."""

SPAN = 16
"""Over how many steps such a row is looked for."""

FIRST_LOOK = 8
"""From how many values on it is noted which steps stand out, before any of them is skipped."""

ORDINARY, STOOD_OUT, SKIPPED = 1, 2, 3
"""What became of a step; 0 where there was none yet."""


class SpikeDetector(Detector):
    r"""Tell spikes: steps that stand far above the recent past, and more often than such steps did before.

    A signal is a loss or a gradient norm. With x the logarithms of the last ``window`` accepted values of one, and r
    the last ``recent`` of them,

    .. math:: m = \operatorname{median}(r), \qquad
              d = 1.4826 \max\bigl(\operatorname{median}|r - m|,\;
                  \operatorname{median}|x_t - x_{t-1}| / \sqrt 2\bigr), \qquad
              \text{score} = \frac{\log v - m}{s \max(d, \text{floor})}

    and the step **stands out** if any signal's score is above ``k``. Only above: a fall is good news. The centre and
    the first term are of few values, so that a loss that still falls does not pass for a wide one; the second, of
    many, keeps that from being too narrow by chance. Where the step's ``weight`` w is known, a number of samples or
    tokens, :math:`s = \max(1, \sqrt{\operatorname{median}(w_r) / w})`: a mean of fewer samples varies more.

    **A step that stands out alone is no spike**, unless it is ``alone`` times the median: the last batch of an epoch,
    a task that comes every 40th step, a new target network look like that, and one bad batch does little harm. It is
    a spike if such steps come more often than they did. With p the share of accepted steps that stood out before, and
    q that of the last L (at most 16, the first and the last of which stood out),

    .. math:: G = \max_L\; L \Bigl(q \log\frac{q}{p} + (1 - q) \log\frac{1 - q}{1 - p}\Bigr) \ge 9,
              \qquad p = \frac{n + 1}{N + 2}

    where n of the N steps before stood out: two in a row after 89 ordinary ones, three after 19, or three of five
    after 60. ``alone=1`` calls each step that stands out a spike.

    **A rejected value never becomes the measure.** It goes to a second memory, so that an outlier never hides the
    next one. But after ``cap`` spikes in a row what was rejected is the new level, and replaces the history of the
    signals that were too high (**adoption**): a rule without a cap skips for ever after a lasting rise. So a lasting
    rise costs at most ``cap`` steps, and a burst of more than ``cap`` bad batches gets in after them.

    **Losses of 0 and below**, as in reinforcement learning or of a density, have no logarithm. While the history of a
    signal holds such a value it is judged by the values themselves, with the same rule, ``floor`` times :math:`|m|` in
    place of ``floor``; alone it is a spike if it is ``alone`` - 1 times :math:`\max(|m|, d)` above m.

    **Edge cases.**

    =======================================  ===================================================================
    case                                     what happens
    =======================================  ===================================================================
    NaN or infinite value                    that signal is not judged, and remembers nothing; if all are, the
                                             step leaves no trace: a row of spikes is neither longer nor broken
    the first ``warmup`` values of a signal  are accepted; from 8 on it is noted how often they stand out
    all values alike                         the floor holds: k·floor = 0.3 is a rise by 35 %
    value <= 0 after positive ones           accepted: it is below the median
    more than half of r and x exactly 0      the signal is not judged: there is no measure of what is usual
    after an adoption                        a signal whose history was replaced is judged again from ``warmup``
                                             values on, the ``cap`` adopted ones among them
    a signal that was fine in that row       keeps its history
    weight not given, 0 or not finite        s = 1, and it is not remembered
    =======================================  ===================================================================

    Args:
        k: How many deviations above the median, above 0.
        window: How many accepted values of each signal are remembered, and of how many steps whether they stood out.
        recent: How many of them the median is of; all, if there are no more.
        warmup: From how many on it is judged, from 1 to ``window``.
        cap: After how many spikes in a row what was rejected is adopted, from 1 to ``window``.
        floor: The least deviation, in units of the logarithm, above 0.
        alone: How many times the median makes a spike of a step that stands out alone, at least 1.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If one is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> detector = gg.SpikeDetector()
        >>> usual = torch.tensor([2.0, 0.5], dtype=torch.float64)  # loss, norm
        >>> sizes = [1.0] * 100 + [9.0, 1.0, 99.0] + [1.0] * 20 + [9.0] * 4
        >>> [step for step, size in enumerate(sizes) if detector.observe(usual * size)]
        [102, 125, 126]

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
        alone: float = 50.0,
    ) -> None:
        super().__init__()
        self._numbers: _Numbers | None = None
        self.k, self.floor = number_above_0("k", k), number_above_0("floor", floor)
        self.window, self.recent = whole_number("window", window, 1), whole_number("recent", recent, 1)
        self.warmup, self.cap = whole_number("warmup", warmup, 1, window), whole_number("cap", cap, 1, window)
        self.alone = number_above_0("alone", alone)
        if self.alone < 1:
            raise InvalidValueError(f"alone={alone!r}: expected at least 1, which calls each that stands out a spike.")

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
            "weights": torch.zeros(signals, self.recent, dtype=torch.float64, device="cpu"),  # the newest last
            "steps": torch.zeros(self.window, dtype=torch.int64, device="cpu"),  # what became of each, the newest last
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
        weight = self._weight
        is_read = not isinstance(weight, Tensor) or are_readable(weight)
        if is_read and are_readable(values, self._tensors["history"]):
            return self._judge_on_host(values.tolist(), float(weight))
        return self._judge_on_device(values)

    def observe_numbers(self, values: Sequence[float], weight: float = math.nan) -> bool:
        """As `observe`, for who has the signals as plain numbers on the CPU."""
        if self._numbers is None or len(values) != len(self._numbers.signals):
            return super().observe_numbers(values, weight)
        self._verdict = verdict = self._judge_on_host(values, weight)
        return verdict.spike

    # On the CPU: the same rule in Python. The state is kept as plain numbers from step to step, and goes to the tensors
    # when somebody asks for them. Once `state` was read they are written at each step: its reader may hold them.

    def _settled(self) -> dict[str, Tensor]:
        if self._numbers is not None:
            self._numbers.write(self._tensors)
            self._numbers = None
        return self._tensors

    def _judge_on_host(self, values: Sequence[float], weight: float) -> NumberVerdict:
        numbers = self._numbers or _Numbers(self._tensors)
        self._numbers = numbers
        found = [self._look(signal, value, weight) for signal, value in zip(numbers.signals, values, strict=True)]
        over = [one.score > self.k for one in found]
        over_and_judged = [one.is_judged and high for one, high in zip(found, over, strict=True)]
        stands_out, row = any(over), numbers.in_a_row
        is_far = any([one.is_far and high for one, high in zip(found, over_and_judged, strict=True)])
        spike = any(over_and_judged) and (is_far or self._is_burst(numbers.steps))
        if spike:
            row += 1
            self._reject_on_host(numbers, values, over, row)
        elif any(map(math.isfinite, values)):
            row = 0
            numbers.accept(values, weight, stands_out)
        adopted = spike and row == self.cap
        numbers.in_a_row = 0 if adopted else row
        if adopted:
            self._adopt_on_host()
        if self._state_was_read or type(self) is not SpikeDetector:  # a subclass may judge in its own way next time
            self._settled()
        scores = [one.score if one.is_judged else math.nan for one in found]
        return NumberVerdict(spike, scores, row, adopted, stands_out)

    def _look(self, signal: "_Signal", value: float, weight: float) -> "_Found":
        """How far ``value`` is above the median of a signal's history."""
        count = len(signal.past)
        if count < min(FIRST_LOOK, self.warmup) or not math.isfinite(value):
            return _NOT_JUDGED
        in_logarithms, x = signal.in_logarithms, signal.x
        if in_logarithms:
            value = math.log(value) if value > 0 else -math.inf
        recent = x[-self.recent :]
        middle = _middle(sorted(recent))
        spread = MAD_TO_SIGMA * _middle(sorted([abs(y - middle) for y in recent]))
        jumps = JUMP_TO_SIGMA * _middle(signal.jumps)
        deviation = max(spread, jumps, self.floor if in_logarithms else self.floor * abs(middle))
        if deviation <= 0:
            return _NOT_JUDGED
        above = (value - middle) / signal.slack(weight)
        far = math.log(self.alone) if in_logarithms else (self.alone - 1) * max(abs(middle), deviation)
        return _Found(above / deviation, count >= self.warmup, above > far)

    def _is_burst(self, steps: Sequence[int]) -> bool:
        """Whether steps have come to stand out more often, the present one included."""
        ordinary, stood_out = steps.count(ORDINARY), steps.count(STOOD_OUT)
        many = 1
        for length in range(1, min(SPAN, len(steps) + 1) + 1):
            if length > 1:
                step = steps[1 - length]
                ordinary, stood_out = ordinary - (step == ORDINARY), stood_out - (step == STOOD_OUT)
                if step <= ORDINARY:
                    continue
                many += 1
            usual = (stood_out + 1) / (ordinary + stood_out + 2)
            if many > usual * length and _evidence(many, length, usual) >= BURST:
                return True
        return False

    def _reject_on_host(self, numbers: "_Numbers", values: Sequence[float], over: Sequence[bool], row: int) -> None:
        for rejected, value in zip(numbers.rejected, values, strict=True):
            rejected[row - 1] = value if math.isfinite(value) else math.inf
        numbers.too_high = list(map(or_, numbers.too_high, over))
        numbers.became(SKIPPED)

    def _adopt_on_host(self) -> None:
        """It is rare: by the tensors, and the plain numbers are made anew at the next step."""
        state = self._settled()
        self._adopt(state["too_high"])
        state["too_high"].fill_(False)
        state["steps"].masked_fill_(state["steps"] == SKIPPED, ORDINARY)

    # On an accelerator: nothing is read.

    def _judge_on_device(self, values: Tensor) -> SpikeVerdict:
        self._settled()
        known = values.isfinite()
        weight = torch.as_tensor(self._weight, dtype=values.dtype, device=values.device)
        scores, is_far = self._scores(values, weight)
        scores = torch.where(known, scores, torch.nan)
        judged = scores.where(self._tensors["count"] >= self.warmup, torch.nan)
        over = scores > self.k
        stands_out = over.any()
        spike = ((judged > self.k) & (is_far | self._is_burst_on_device())).any()
        self._accept(values, weight, known & ~spike)
        in_a_row, adopted = self._reject(values, known, over, spike)
        became = torch.where(spike, SKIPPED, torch.where(stands_out, STOOD_OUT, ORDINARY))
        self._became(became, known.any(), adopted)
        return SpikeVerdict(spike, judged, in_a_row, adopted, stands_out)

    def _scores(self, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all signals, and which are far; the ``stored`` values of a history come last, the newest behind."""
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
        judged = (stored >= min(FIRST_LOOK, self.warmup)) & (deviation > 0)
        above = (new - middle) / self._slack(weight)
        far = torch.where(positive, math.log(self.alone), (self.alone - 1) * torch.maximum(middle.abs(), deviation))
        return torch.where(judged, above / deviation, torch.nan), above > far

    def _slack(self, weight: Tensor) -> Tensor:
        weights = self._tensors["weights"]
        stored = (weights > 0).sum(1)
        usual = _median(torch.where(weights > 0, weights, torch.inf), stored)
        slack = (usual / weight).sqrt().clamp(min=1)
        return torch.where((weight > 0) & weight.isfinite() & (stored > 0), slack, 1.0)

    def _is_burst_on_device(self) -> Tensor:
        steps = self._tensors["steps"].flip(0)  # the newest first
        longest = min(SPAN, len(steps) + 1)
        lengths = torch.arange(1, longest + 1, device=steps.device)
        earlier = torch.cat([torch.ones_like(steps[:1]), (steps[: longest - 1] > ORDINARY).to(steps)])
        many = earlier.cumsum(0)
        ordinary, stood_out = _after(steps == ORDINARY, longest), _after(steps == STOOD_OUT, longest)
        usual = (stood_out + 1.0) / (ordinary + stood_out + 2.0)
        usual = usual.to(self._tensors["history"].dtype)
        share = many / lengths
        rest = torch.where(many < lengths, (lengths - many) * ((1 - share) / (1 - usual)).log(), 0.0)
        evidence = many * (share / usual).log() + rest
        return ((earlier > 0) & (share > usual) & (evidence >= BURST)).any()

    def _accept(self, values: Tensor, weight: Tensor, enters: Tensor) -> None:
        count, weights = self._tensors["count"], self._tensors["weights"]
        _put(self._tensors["history"], count % self.window, values, enters)
        count.add_(enters)
        heavy = (weight > 0) & weight.isfinite()
        newer = torch.cat([weights[:, 1:], weight.expand(len(weights))[:, None]], dim=1)
        weights.copy_(torch.where((enters & heavy)[:, None], newer, weights))

    def _became(self, became: Tensor, is_known: Tensor, adopted: Tensor) -> None:
        steps = self._tensors["steps"]
        newer = torch.cat([steps[1:], became.to(steps).reshape(1)])
        newer = torch.where(adopted & (newer == SKIPPED), ORDINARY, newer)
        steps.copy_(torch.where(is_known, newer, steps))

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


_USUAL = {"k": 6.0, "window": 128, "warmup": 32, "cap": 8, "floor": 0.05, "recent": 32, "alone": 50.0}


class _Found(NamedTuple):
    """What is seen of one signal: its score, and whether it would be a spike alone."""

    score: float
    is_judged: bool
    is_far: bool


_NOT_JUDGED = _Found(math.nan, False, False)


class _Signal:
    """The history of one signal in plain numbers, and what the rule asks of it, kept up to date value by value.

    Args:
        ring: The history; empty places are not looked at.
        count: How many values have entered it, the last at ``count`` - 1 modulo its length.
        weights: Those of the last ones, the newest last; 0 where it is not known.

    Attributes:
        past: The values, the oldest first.
        in_logarithms: Whether all are above 0.
        x: What the rule compares: their logarithms then, else themselves.
        jumps: The distances of neighbours in ``x``, sorted.
    """

    def __init__(self, ring: list[float], count: int, weights: list[float]) -> None:
        self.ring, self.count = ring, count
        self.weights, self._places = [weight for weight in weights if weight > 0], len(weights)
        at = count % len(ring)
        self.past = ring[:count] if count <= len(ring) else ring[at:] + ring[:at]
        self._study()

    def _study(self) -> None:
        self.in_logarithms = bool(self.past) and min(self.past) > 0
        self.x = list(map(math.log, self.past)) if self.in_logarithms else list(self.past)
        self.jumps = sorted(map(abs, map(sub, self.x[1:], self.x)))

    def stored_weights(self) -> list[float]:
        """Return the weights with a 0 for each that is not known, the newest last."""
        return [0.0] * (self._places - len(self.weights)) + self.weights

    def slack(self, weight: float) -> float:
        """How many times as wide a value of this weight varies."""
        if not 0 < weight < math.inf or not self.weights or weight >= max(self.weights):
            return 1.0
        return max(1.0, math.sqrt(_middle(sorted(self.weights)) / weight))

    def put(self, value: float, weight: float) -> None:
        """Let ``value`` enter, and the oldest one go if there is no room."""
        if 0 < weight < math.inf:
            self.weights = [*self.weights, weight][-self._places :]
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
        histories = state["history"].tolist(), state["count"].tolist(), state["weights"].tolist()
        self.signals = list(map(_Signal, *histories))
        self.steps = [step for step in state["steps"].tolist() if step]
        self._places = len(state["steps"])
        self.rejected: list[list[float]] = state["rejected"].tolist()
        self.too_high: list[bool] = state["too_high"].tolist()
        self.in_a_row = int(state["in_a_row"])

    def accept(self, values: Sequence[float], weight: float, stands_out: bool) -> None:
        """Let those that are finite enter their histories; the row of spikes is over."""
        for signal, value in zip(self.signals, values, strict=True):
            if math.isfinite(value):
                signal.put(value, weight)
        self.too_high = [False] * len(values)
        self.became(STOOD_OUT if stands_out else ORDINARY)

    def became(self, step: int) -> None:
        """Note what became of a step."""
        self.steps.append(step)
        if len(self.steps) > self._places:
            del self.steps[0]

    def write(self, state: dict[str, Tensor]) -> None:
        """Write them into the tensors of the state."""
        found = {
            "history": [signal.ring for signal in self.signals],
            "count": [signal.count for signal in self.signals],
            "rejected": self.rejected,
            "too_high": self.too_high,
            "in_a_row": self.in_a_row,
            "weights": [signal.stored_weights() for signal in self.signals],
            "steps": [0] * (self._places - len(self.steps)) + self.steps,
        }
        for name, numbers in found.items():
            state[name].copy_(torch.tensor(numbers, dtype=state[name].dtype, device="cpu"))


def _middle(ordered: list[float]) -> float:
    """The median of sorted numbers; 0 of none."""
    last = len(ordered) - 1
    return (ordered[last // 2] + ordered[last - last // 2]) / 2 if ordered else 0.0


def _evidence(many: int, length: int, usual: float) -> float:
    """How much likelier ``many`` of ``length`` are at their own rate than at the ``usual`` one, as a logarithm."""
    share = many / length
    rest = (length - many) * math.log((1 - share) / (1 - usual)) if many < length else 0.0
    return many * math.log(share / usual) + rest


def _after(chosen: Tensor, longest: int) -> Tensor:
    """How many are ``chosen`` behind the first 0, 1, ... of a row, for ``longest`` numbers of them."""
    before = torch.cat([torch.zeros_like(chosen[:1]), chosen[: longest - 1]]).cumsum(0)
    return chosen.sum() - before


def _median(rows: Tensor, stored: Tensor) -> Tensor:
    """The median of the ``stored`` finite numbers of each row; the mean of both middle ones if they are even."""
    middle = torch.stack([(stored - 1) // 2, stored // 2], dim=1).clamp(0, rows.shape[1] - 1)
    return rows.sort(dim=1).values.gather(1, middle).mean(dim=1)


def _put(rows: Tensor, places: Tensor, values: Tensor, enters: Tensor) -> None:
    """Write ``values`` to ``places``, one a row, in place, where it ``enters``."""
    places = places[:, None]
    rows.scatter_(1, places, torch.where(enters[:, None], values[:, None], rows.gather(1, places)))

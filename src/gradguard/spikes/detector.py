"""The recommended rule: compare a loss or norm with the median of recent ones, in median absolute deviations."""

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import sub
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.spikes.spike_policy import Detector, SpikeVerdict
from gradguard.tensors.layout import are_readable
from gradguard.tensors.number_operations import TENSORS, median_of_stored
from gradguard.threshold_formulas import PLAIN, Number, Operations

MAD_TO_SIGMA = 1.4826
"""The ratio of the standard deviation to the median absolute deviation, for a normal distribution."""

JUMP_TO_SIGMA = MAD_TO_SIGMA / math.sqrt(2)
"""The ratio of the standard deviation to the median absolute difference of consecutive values, if independent."""

BURST = 9.0
"""Evidence, as a logarithm, above which steps that stand out are a burst; chance makes it about once in e^9."""

SPAN = 16
"""Maximum number of steps of a burst."""

FIRST_LOOK = 8
"""Number of values from which on steps that stand out are counted, before any step is judged."""

ORDINARY, STOOD_OUT, SKIPPED = 1, 2, 3
"""Codes of past steps; 0 for a step before the first."""


class SpikeDetector(Detector):
    r"""Recognise spikes: steps that stand far above the recent past, and do so more often than earlier steps did.

    A signal is a loss or a gradient norm. With x the logarithms of the last ``window`` accepted values of one, and r
    the last ``recent`` of them,

    .. math:: m = \operatorname{median}(r), \qquad
              d = 1.4826 \max\bigl(\operatorname{median}|r - m|,\;
                  \operatorname{median}|x_t - x_{t-1}| / \sqrt 2\bigr), \qquad
              \text{score} = \frac{\log v - m}{s \max(d, \text{floor})}

    The step **stands out** if any signal's score is above ``k``. A fall is never a spike. The median and the first
    term of d use few values, so the trend of a falling loss does not widen d. The second term uses many values, so d
    is not too narrow by chance. If the step's ``weight`` w, a number of samples or tokens, is known, :math:`s =
    \max(1, \sqrt{\operatorname{median}(w_r) / w})`, because a mean of fewer samples varies more.

    **A single step that stands out is no spike**, unless it is ``alone`` times the median. The last batch of an epoch,
    a task that comes every 40th step, and a new target network look like that, and one bad batch does little harm. The
    step is a spike if such steps have become more frequent. Take the last L of at most 16 steps, the present one
    included, where the oldest and the present one stood out. Let q be the share of these that stood out, skipped ones
    included, and p an estimate of the same share among the accepted steps before them. Only L with q > p count:

    .. math:: G = \max_L\; L \Bigl(q \log\frac{q}{p} + (1 - q) \log\frac{1 - q}{1 - p}\Bigr) \ge 9,
              \qquad p = \frac{n + 1}{N + 2}

    where n of the N remembered accepted steps before those L stood out. Two in a row are a spike after 89 ordinary
    ones, three after 19, three of five after 60. ``alone=1`` treats each step that stands out as a spike.

    **A rejected value enters the history only by adoption.** It is stored in a second buffer, so an outlier never hides
    the next one. After ``cap`` consecutive spikes the rejected values are taken as the new level and replace the
    history of the signals that were too high (**adoption**): without a cap, every step after a lasting rise would be
    skipped. So a lasting rise costs at most ``cap`` steps, but a burst of more than ``cap`` bad batches is accepted
    after them.

    **Losses of 0 and below**, as in reinforcement learning or of a density, have no logarithm. While the history of a
    signal contains such a value, the values themselves are judged by the same rule, with ``floor`` times :math:`|m|` in
    place of ``floor``. A single step is then a spike if it is ``alone`` - 1 times :math:`\max(|m|, d)` above m.

    **Edge cases.**

    =======================================  ===================================================================
    case                                     what happens
    =======================================  ===================================================================
    NaN or infinite value                    that signal is not judged and its history is unchanged; if none is
                                             finite, the step leaves no trace: a row of spikes neither grows nor ends
    the first ``warmup`` values of a signal  are accepted; from 8 on, those that stand out are counted
    all values equal                         the floor applies: k·floor = 0.3 is a rise by 35 %
    value <= 0 after positive ones           accepted: it is below the median
    so many values exactly 0 that the        the signal is not judged: the deviation is 0
    median of r, its deviation and the
    median jump are all 0
    after an adoption                        a signal whose history was replaced is judged again from ``warmup``
                                             values on, the ``cap`` adopted ones among them
    at an adoption, a signal that was not    keeps its history
    above ``k`` in any of the spikes
    weight not given, 0 or not finite        s = 1, and the weight is not stored
    =======================================  ===================================================================

    Args:
        k: Number of deviations above the median, above 0.
        window: Number of accepted values of each signal that are kept, and of steps whose outcome is kept.
        recent: Number of the latest values over which the median is taken; at most all of them.
        warmup: Number of accepted values after which a signal is judged, from 1 to ``window``.
        cap: Number of consecutive spikes after which the rejected values are adopted, from 1 to ``window``.
        floor: The least deviation, in units of the logarithm, above 0.
        alone: Multiple of the median above which a single step is a spike, at least 1.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> import gradguard as gg, torch
        >>> detector = gg.SpikeDetector()
        >>> usual = torch.tensor([2.0, 0.5], dtype=torch.float64)  # loss, norm
        >>> sizes = [1.0] * 100 + [9.0, 1.0, 99.0] + [1.0] * 20 + [9.0] * 4
        >>> [step for step, size in enumerate(sizes) if detector.observe(usual * size)]
        [102, 125, 126]

    Reference:
        Median and MAD: Hampel (1974), The influence curve and its role in robust estimation. Skipping steps whose loss
        or norm stands out: the `SkipStepOptimizer` of OLMo-core.
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
        self.k = check_number("k", k, "a finite number > 0")
        self.floor = check_number("floor", floor, "a finite number > 0")
        self.window, self.recent = check_whole("window", window), check_whole("recent", recent)
        self.warmup, self.cap = check_whole("warmup", warmup, 1, window), check_whole("cap", cap, 1, window)
        self.alone = check_number("alone", alone, "a finite number > 0")
        check_number("alone", alone, "at least 1, which calls each that stands out a spike")

    def __repr__(self) -> str:
        """Return the call that makes an equal detector."""
        usual = inspect.signature(SpikeDetector).parameters.values()
        given = [(one.name, getattr(self, one.name)) for one in usual if getattr(self, one.name) != one.default]
        return f"SpikeDetector({', '.join(f'{name}={value!r}' for name, value in given)})"

    def _empty(self, signals: int) -> dict[str, Tensor]:
        # A ring buffer: `count` values have entered, the last at index count - 1 modulo its length; the rest is inf.
        def room(length: int) -> Tensor:
            return torch.full((signals, length), torch.inf, dtype=torch.float64, device="cpu")

        return {
            "history": room(self.window),
            "count": torch.zeros(signals, dtype=torch.int64, device="cpu"),
            "rejected": room(self.cap),
            "in_a_row": torch.zeros((), dtype=torch.int64, device="cpu"),
            "too_high": torch.zeros(signals, dtype=torch.bool, device="cpu"),  # in the current row of spikes
            "weights": torch.zeros(signals, self.recent, dtype=torch.float64, device="cpu"),  # the newest last
            "steps": torch.zeros(self.window, dtype=torch.int64, device="cpu"),  # codes of steps, the newest last
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; entries of older versions that begin with ``replaced`` are ignored."""
        super().load_state_dict({name: one for name, one in state_dict.items() if not name.startswith("replaced")})

    def _judge(self, values: Tensor) -> SpikeVerdict:
        weight = self._weight
        is_read = not isinstance(weight, Tensor) or are_readable(weight)
        if is_read and are_readable(values, self._tensors["history"]):
            found = self._take_ordinary(values.tolist(), float(weight))
            if found is not None:
                return found
            self._before = self.state_dict(), self._verdict
        return self._judge_tensors(values)

    def _take_ordinary(self, values: Sequence[float], weight: float) -> SpikeVerdict | None:
        """Return the verdict on an ordinary step and update the state; None for a step that stands out.

        On the CPU nearly all steps are ordinary, and Python numbers judge them in a fifth of the time
        (benchmarks/LOG.md). `_judge_tensors` judges a step that stands out.
        """
        state, weight = self._tensors, weight if 0 < weight < math.inf else math.nan
        histories, counts, weights = (state[name].tolist() for name in ("history", "count", "weights"))
        scores = list(map(self._score_on_host, values, histories, counts, weights, repeat(weight)))
        if any([score > self.k for score in scores]):
            return None
        before: dict[str, Any] = {"history": list(map(list, histories)), "count": [*counts], "weights": [*weights]}
        judged = [score if count >= self.warmup else math.nan for score, count in zip(scores, counts, strict=True)]
        for i, value in enumerate(values):
            if math.isfinite(value):
                histories[i][counts[i] % self.window] = value
                counts[i] += 1
                weights[i] = [*weights[i][1:], weight] if weight > 0 else weights[i]
        if any(map(math.isfinite, values)):
            for name, numbers in (("history", histories), ("count", counts), ("weights", weights)):
                state[name].copy_(torch.tensor(numbers, dtype=state[name].dtype, device="cpu"))
            if int(state["in_a_row"]):  # otherwise no signal is marked too high
                before |= {name: state[name].clone() for name in ("in_a_row", "too_high")}
                state["in_a_row"].zero_()
                state["too_high"].zero_()
            before["steps"] = state["steps"].clone()
            state["steps"].copy_(state["steps"].roll(-1))
            state["steps"][-1] = ORDINARY
        self._before = before, self._verdict
        no = torch.zeros((), dtype=torch.bool, device="cpu")
        judged_scores = torch.tensor(judged, dtype=torch.float64, device="cpu")
        return SpikeVerdict(no, judged_scores, state["in_a_row"].clone(), no, no)

    def _score_on_host(
        self, value: float, ring: list[float], count: int, weights: Sequence[float], weight: float
    ) -> float:
        """Return the score of one signal, NaN if it cannot be computed."""
        if count < min(FIRST_LOOK, self.warmup) or not math.isfinite(value):
            return math.nan
        at = count % len(ring)
        past = ring[:count] if count <= len(ring) else ring[at:] + ring[:at]  # the newest last
        in_logarithms = min(past) > 0
        x = list(map(math.log, past)) if in_logarithms else past
        middle = median(x[-self.recent :])
        spread = median([abs(one - middle) for one in x[-self.recent :]])
        jumps = median(map(abs, map(sub, x[1:], x))) if len(x) > 1 else 0.0
        heavy = [one for one in weights if one > 0]
        usual = _Usual(middle, spread, jumps, in_logarithms, median(heavy) if heavy else math.nan)
        return self._score(PLAIN, PLAIN.log(value) if in_logarithms else value, usual, weight)[0]

    def _score(self, ops: Operations, value: Number, usual: "_Usual", weight: Number) -> tuple[Number, Number, Number]:
        """Return the score of ``value`` (NaN without a deviation), its distance above the median, and the deviation.

        Args:
            ops: The operations on numbers or tensors.
            value: The new value, or its logarithm.
            usual: The usual values.
            weight: The step's weight, above 0 and finite; NaN if it is not known.
        """
        least = ops.where(usual.in_logarithms, self.floor, self.floor * abs(usual.middle))
        deviation = ops.larger(ops.larger(MAD_TO_SIGMA * usual.spread, JUMP_TO_SIGMA * usual.jumps), least)
        slack = ops.sqrt(ops.ratio(usual.weight, weight))
        above = (value - usual.middle) / ops.where(slack > 1, slack, 1.0)
        return ops.where(deviation > 0, ops.ratio(above, deviation), math.nan), above, deviation

    def _judge_tensors(self, values: Tensor) -> SpikeVerdict:
        known = values.isfinite()
        weight = torch.as_tensor(self._weight, dtype=values.dtype, device=values.device)
        weight = torch.where((weight > 0) & weight.isfinite(), weight, torch.nan)
        scores, is_far = self._scores(values, weight)
        scores = torch.where(known, scores, torch.nan)
        judged = scores.where(self._tensors["count"] >= self.warmup, torch.nan)
        over = scores > self.k
        stands_out = over.any()
        spike = ((judged > self.k) & (is_far | self._is_burst())).any()
        history, count, weights, steps = (self._tensors[name] for name in ("history", "count", "weights", "steps"))
        enters = known & ~spike
        _put(history, count % self.window, values, enters)
        count.add_(enters)
        newer = torch.cat([weights[:, 1:], weight.expand(len(weights))[:, None]], dim=1)
        weights.copy_(torch.where((enters & (weight > 0))[:, None], newer, weights))
        in_a_row, adopted = self._reject(values, known, over, spike)
        became = torch.where(spike, SKIPPED, torch.where(stands_out, STOOD_OUT, ORDINARY))
        newer = torch.cat([steps[1:], became.to(steps).reshape(1)])
        newer = torch.where(adopted & (newer == SKIPPED), ORDINARY, newer)
        steps.copy_(torch.where(known.any(), newer, steps))
        return SpikeVerdict(spike, judged, in_a_row, adopted, stands_out)

    def _scores(self, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of all signals, and which signals are high enough to be a spike in a single step."""
        history, count, weights = (self._tensors[name] for name in ("history", "count", "weights"))
        places = torch.arange(self.window, device=history.device)
        past = history.gather(1, (count[:, None] + places) % self.window)  # the newest last
        stored, positive = count.clamp(max=self.window), history.amin(1) > 0
        x = torch.cat([past, values[:, None]], dim=1)
        x = torch.where(positive[:, None], x.clamp(min=0).log(), x)
        past, new = x[:, :-1], x[:, -1]
        recent, few = past[:, -self.recent :], stored.clamp(max=self.recent)
        middle = median_of_stored(recent, few)
        spread = median_of_stored((recent - middle[:, None]).abs(), few)
        # Jumps between empty places are NaN, which a sort on CUDA moves to the front beyond 32 numbers.
        jumps = x.diff(dim=1).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        jumps[:, -1] = torch.inf  # the jump to the new value does not count
        jumps = torch.where(stored > 1, median_of_stored(jumps, stored - 1), 0.0)
        heavy = (weights > 0).sum(1)
        usual_weight = median_of_stored(torch.where(weights > 0, weights, torch.inf), heavy)
        usual_weight = torch.where(heavy > 0, usual_weight, torch.nan)
        usual = _Usual(middle, spread, jumps, positive, usual_weight)
        scores, above, deviation = self._score(TENSORS, new, usual, weight)
        far = torch.where(positive, math.log(self.alone), (self.alone - 1) * torch.maximum(middle.abs(), deviation))
        return torch.where(stored >= min(FIRST_LOOK, self.warmup), scores, torch.nan), above > far

    def _is_burst(self) -> Tensor:
        """Return whether steps that stand out have become more frequent, the present one included."""
        steps, dtype = self._tensors["steps"].flip(0), self._tensors["history"].dtype  # the newest first
        longest = min(SPAN, len(steps) + 1)
        lengths = torch.arange(1, longest + 1, dtype=dtype, device=steps.device)
        earlier = torch.cat([torch.ones_like(steps[:1]), (steps[: longest - 1] > ORDINARY).to(steps)])
        many = earlier.to(dtype).cumsum(0)
        ordinary, stood_out = (_after((steps == code).to(dtype), longest) for code in (ORDINARY, STOOD_OUT))
        usual, share = (stood_out + 1) / (ordinary + stood_out + 2), many / lengths
        rest = torch.where(many < lengths, (lengths - many) * ((1 - share) / (1 - usual)).log(), 0.0)
        evidence = many * (share / usual).log() + rest
        return ((earlier > 0) & (share > usual) & (evidence >= BURST)).any()

    def _reject(self, values: Tensor, known: Tensor, over: Tensor, spike: Tensor) -> tuple[Tensor, Tensor]:
        """Store a spike's values as rejected; return the number of spikes in a row, and whether they are adopted."""
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
        """Replace the history of the ``chosen`` signals by their rejected values."""
        history, count, rejected = self._tensors["history"], self._tensors["count"], self._tensors["rejected"]
        known = rejected < torch.inf
        ahead = (~known).to(torch.uint8).sort(dim=1, stable=True).indices  # known values first, in their order
        new = torch.full_like(history, torch.inf)
        new[:, : self.cap] = rejected.gather(1, ahead)
        history.copy_(torch.where(chosen[:, None], new, history))
        count.copy_(torch.where(chosen, known.sum(1), count))


class _Usual(NamedTuple):
    """The usual values of one signal as numbers, or of all signals as tensors ``[signals]``.

    Attributes:
        middle: The median of the recent values, or of their logarithms.
        spread: The median of their distances from ``middle``.
        jumps: The median of the distances between consecutive values.
        in_logarithms: Whether the rule compares logarithms.
        weight: The median of the recent weights; NaN if none is known.
    """

    middle: Any
    spread: Any
    jumps: Any
    in_logarithms: Any
    weight: Any


def _after(chosen: Tensor, longest: int) -> Tensor:
    """Return, for i from 0 to ``longest`` - 1, the sum of ``chosen`` without its first i entries."""
    before = torch.cat([torch.zeros_like(chosen[:1]), chosen[: longest - 1]]).cumsum(0)
    return chosen.sum() - before


def _put(rows: Tensor, places: Tensor, values: Tensor, enters: Tensor) -> None:
    """Write one value a row to ``places``, in place, where ``enters`` is True."""
    places = places[:, None]
    rows.scatter_(1, places, torch.where(enters[:, None], values[:, None], rows.gather(1, places)))

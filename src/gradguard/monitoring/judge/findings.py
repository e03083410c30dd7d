"""The health findings: their thresholds, each with its reason, and the words in which a person is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold

EXPLODING_TIMES = 10.0
"""A norm that stays above 10 times the usual: log-normal noise as wild as 1.5 gets there on 6 % of the steps."""

EXPLODING_STEPS = 10
"""So many in a row: with that noise once in 10^12 steps, so that spikes are not taken for an explosion."""

EXPLODING_EARLY_TIMES = 100.0
"""In the first 200 steps the norm may rise tenfold without harm: warm-ups and layers initialised at zero do that."""

EXPLODING_ONCE_TIMES = 1000.0
"""A single norm so far above the usual that nothing clipped undoes a thousand steps; noise does not get there."""

VANISHING_SHARE = 1e-4
"""A norm below a ten-thousandth of the usual moves nothing; training that converges seldom falls that far."""

VANISHING_STEPS = 20
"""So many in a row: a single batch of zeros, such as one that is all padding, is not it."""

CONVERGED_LOSS = 0.1
"""A loss below a tenth of what it was explains a small norm: that is convergence."""

WEAK_LAYER_SHARE = 1e-6
"""A weight whose gradient's elements are a millionth of the usual weight's: float32 resolves 1e-7 of a value."""

LAYER_LINES = 10
"""Per-tensor lines in a row before a layer is judged: an expert or a rare word may miss a few batches."""

DOMINATING_SHARE = 0.95
"""Of the squared norm: the others together change the norm by at most 2.5 %, so that one layer alone decides a clip."""

DOMINATING_OF_STEPS = 0.8
"""On this share of the last 100 steps: a layer that dominates spikes only is their source, not an imbalance."""

DOMINATING_TENSORS = 8
"""Below so many tensors one of them dominates by nature."""

DOMINATING_ELEMENTS = 0.5
"""A tensor with half of all elements, such as a large embedding, dominates by nature."""

AMP_LEAST_SCALE = 1.0
"""Below it the gradients themselves overflow float16, so that scaling cannot be the cure."""

AMP_SKIPS = 12
"""Skips without one step between: from the usual 65,536 down to 16. Finding the scale at the start takes a few."""

FIXED_PATIENCE = 400
"""Further steps in lock-in before a *fixed* threshold is told of: many healthy warm-ups bind for some hundred."""

ALWAYS_ON_SHARE = 0.5
"""Above half of the steps a clip is part of the ordinary update: the regime "normalising"."""

ALWAYS_ON_STEPS = 50
"""Fewer steps are a warm-up, in which a clip may well bind."""

INACTIVE_STEPS = 200
"""Fewer steps say nothing about rare spikes; as many as a recommendation needs."""

RECOVERED_STEPS = 100
"""So many healthy steps end an episode; the next fault of its kind is told anew."""

NAMED_AT_MOST = 5

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a run that a person should know, and what to do about it.

    Attributes:
        kind: What it is: an event kind of the record, such as ``"dead_layer"``.
        severity: ``"error"`` (the run is damaged), ``"warning"`` (it may be) or ``"info"``.
        message: What was seen, with numbers.
        advice: What to do.
        first_step: The step where it began.
        last_step: The last step where it was seen.
        params: The parameters it is about, if it is about some.
        optimizer: Of which optimizer, where the record has several.
        value: The number that says how bad it is, if there is one: a norm, a share, a coefficient or a scale.
    """

    kind: str
    severity: str
    message: str
    advice: str
    first_step: int
    last_step: int
    params: tuple[str, ...] = ()
    optimizer: int | None = None
    value: float | None = None


@dataclass(slots=True)
class Episode:
    """A fault while it lasts.

    Attributes:
        kind: The kind of the finding.
        optimizer: Of which optimizer.
        first: Its first step.
        last: The last step on which it was seen.
        count: On how many steps it was seen.
        params: The parameters that it is about.
        numbers: What the message says.
        harmless: Whether no step with the fault changed a weight, or the fault may be meant.
        words: What else the message says.
    """

    kind: str
    optimizer: int | None
    first: int
    last: int
    count: int = 1
    params: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    harmless: bool = False
    words: str = ""

    def finding(self, episodes: int = 1) -> Finding:
        """Return the finding that says it.

        Args:
            episodes: How many episodes of this kind there were, this one the sum of them.
        """
        severity, message, advice = _WORDS[self.kind](self)
        again = f" ({episodes} times in this run)" if episodes > 1 else ""
        params = tuple(self.params)
        value = self.numbers.get(_VALUES.get(self.kind, ""))
        about = (self.first, self.last, params, self.optimizer, value)
        return Finding(self.kind, severity, message + again, advice, *about)

    def join(self, later: "Episode") -> None:
        """Take a later episode of the same kind in.

        Args:
            later: The other.
        """
        self.last, self.count = max(self.last, later.last), self.count + later.count
        self.params += [name for name in later.params if name not in self.params]
        self.harmless = self.harmless and later.harmless
        for key in ("largest", "smallest"):
            if key in self.numbers and key in later.numbers:
                pick = max if key == "largest" else min
                self.numbers[key] = pick(self.numbers[key], later.numbers[key])


class Log:
    """The faults of one optimizer's steps, each once for as long as it lasts.

    Args:
        optimizer: Which optimizer, where the run has several.
    """

    def __init__(self, optimizer: int | None = None) -> None:
        self.optimizer = optimizer
        self.episodes: list[Episode] = []
        self._open: dict[str, Episode] = {}

    def goes_on(self, key: str, i: int, value: float | None = None) -> Episode | None:
        """Return the episode that a fault on step ``i`` belongs to, with that step added; None if it begins one.

        Args:
            key: What tells it from other faults.
            i: The step.
            value: How bad it is there: the message tells the largest or the smallest.
        """
        episode = self._open.get(key)
        if episode is None or i - episode.last > RECOVERED_STEPS:
            return None
        episode.last, episode.count = i, episode.count + 1
        if value is not None:
            for extreme, pick in (("largest", max), ("smallest", min)):
                if extreme in episode.numbers:
                    episode.numbers[extreme] = pick(episode.numbers[extreme], value)
        return episode

    def begin(self, key: str, kind: str, first: int, last: int, **more: Any) -> list[Finding]:
        """Return the finding of an episode that begins.

        Args:
            key: As for `goes_on`.
            kind: The kind of the finding.
            first: The first step of the fault.
            last: The step on which it is told.
            **more: Further attributes of the `Episode`.
        """
        begun = Episode(kind, self.optimizer, first, last, **more)
        self._open[key] = begun
        self.episodes.append(begun)
        return [begun.finding()]


Words = tuple[str, str, str]


def named(params: list[str]) -> str:
    """Return up to five names, and how many more there are.

    Args:
        params: At least one name.

    Example:
        >>> named(["a", "b", "c", "d", "e", "f", "g"])
        'a, b, c, d, e and 2 more'
    """
    more = len(params) - NAMED_AT_MOST
    return ", ".join(params[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _nonfinite(found: Episode) -> Words:
    where = f" in {named(found.params)}" if found.params else ""
    before = found.numbers.get("before")
    grown = (
        f"; the norm before it was {number(before)}, {number(found.numbers['times'])} times the usual" if before else ""
    )
    message = f"gradients were not finite{where} on {_steps(found.count)}, first on step {found.first}{grown}"
    if found.harmless:
        return "warning", f"{message}; all of these steps were skipped", (
            "the weights are safe; if it comes often, find the operation with torch.autograd.set_detect_anomaly(True)"
        )  # fmt: skip
    return "error", message, (
        "find the operation with torch.autograd.set_detect_anomaly(True), lower the learning rate, or leave such steps "
        'out with gg.Guard(optimizer, clipper, nonfinite="skip")'
    )  # fmt: skip


def _exploding(found: Episode) -> Words:
    usual, largest = found.numbers["usual"], found.numbers["largest"]
    if "once" in found.numbers:
        message = (
            f"the gradient norm jumped above {EXPLODING_ONCE_TIMES:,.0f} times its usual {number(usual)} on "
            f"{_steps(found.count)}, first on step {found.first}, up to {number(largest)}, and nothing clipped it"
        )
        return "warning", message, "clip: the recommended threshold, or gg.ClipByMedian(), which needs no number"
    message = (
        f"the gradient norm stayed more than {found.numbers['times']:g} times above its usual {number(usual)} for "
        f"{_steps(found.count)} from step {found.first} on, up to {number(largest)}"
    )
    return (
        "error",
        message,
        "clip (gg.ClipByMedian() needs no number), or lower the learning rate; see the layers' norms",
    )


def _vanishing(found: Episode) -> Words:
    smallest = found.numbers["smallest"]
    if found.params:
        verb = "are" if len(found.params) > 1 else "is"
        message = (
            f"the gradient of {named(found.params)} {verb} about {smallest:.1g} of the usual weight's, element by "
            f"element, on {found.count} recorded steps in a row"
        )
        advice = (
            "nothing flows back so far: check saturated activations and the initialisation, or add skip connections"
        )
        return "warning", message, advice
    what = (
        "exactly 0" if smallest == 0 else f"below {number(found.numbers['below'])}, {VANISHING_SHARE:g} of the usual,"
    )
    message = f"the gradient norm was {what} for {_steps(found.count)} from step {found.first} on"
    advice = "check that the loss depends on the parameters (no detach, no saturated activation, a learning rate not 0)"
    return ("error" if smallest == 0 else "warning"), message, advice


def _dead_layer(found: Episode) -> Words:
    message = f"the gradient of {named(found.params)} was exactly 0 on {found.count} recorded steps in a row"
    if found.harmless:
        return "info", f"{message}, from the first one on", (
            "nothing if frozen or unused on purpose; else check that it is part of the forward pass"
        )  # fmt: skip
    return "warning", message, "dead ReLUs or a saturated gate: lower the learning rate, or check the initialisation"


def _dominating(found: Episode) -> Words:
    share = found.numbers["share"]
    message = f"{named(found.params)} alone makes {percent(share)} of the squared gradient norm on most steps"
    advice = (
        "a clip of the global norm sees only this one: give it its own threshold with gg.Groups, or check its scale"
    )
    return "warning", message, advice


def _amp(found: Episode) -> Words:
    scale = found.numbers.get("smallest")
    if scale is None:
        skipped = f"{found.count} steps in a row were skipped for overflow"
        message = f"{skipped}, at step {found.first}: the loss scale is collapsing"
    else:
        message = f"the loss scale fell to {scale:g} at step {found.first}, below {AMP_LEAST_SCALE:g}"
    advice = "the gradients are not finite whatever the scale: look for NaN in the model, or use bfloat16"
    return "error", message, advice


def _lock_in(found: Episode) -> Words:
    threshold, coefficient = number(found.numbers["threshold"]), found.numbers["coefficient"]
    message = (
        f"clipping bound on more than half of the last 100 steps at one threshold, {threshold}, from step "
        f"{found.first} to {found.last} (median coefficient {coefficient:.2g})"
    )
    advice = "the threshold no longer follows the norms: raise it, or let gg.ClipByMedian() choose it"
    return "warning", message, advice


def _always_on(found: Episode) -> Words:
    coefficient = found.numbers["coefficient"]
    bound = f"clipping bound on {percent(found.numbers['share'])} of {_steps(found.count)}"
    if found.harmless:  # an optimizer that cancels a constant factor
        message = f"{bound}, with a median coefficient of {coefficient:.2g}"
        return "info", message, (
            "with an Adam-like optimizer a constant scaling nearly cancels, so this mostly evens out one step against "
            "the next; for a guard against spikes raise the threshold to the recommended one"
        )  # fmt: skip
    message = f"{bound}: it acts as a learning-rate multiplier of {coefficient:.2g}"
    advice = "lower the learning rate by that factor and raise the threshold to the recommended one, so that it guards"
    return "warning", message, advice


def _inactive(found: Episode) -> Words:
    message = f"clipping at {plain_threshold(found.numbers['threshold'])} never bound in {_steps(found.count)}"
    if "largest" in found.numbers:
        message += f": the largest norm was {number(found.numbers['largest'])}"
    return "info", message, "fine as insurance; to catch spikes take the recommended threshold"


def _drift(found: Episode) -> Words:
    first, last = number(found.numbers["first"]), number(found.numbers["last"])
    message = (
        f"the median norm moved by {found.numbers['times']:.2g}x, from {first} to {last}, under one fixed threshold"
    )
    return "info", message, "a fixed number will be wrong at one end: let gg.ClipByMedian() follow the norms"


def _twice(found: Episode) -> Words:
    message = f"gradients were clipped more than once on {_steps(found.count)}: {found.words}"
    advice = "keep one of them: a second clip compares what the first has left, and its threshold has no meaning"
    return "warning", message, advice


_WORDS: dict[str, Callable[[Episode], Words]] = {
    "nonfinite": _nonfinite,
    "exploding": _exploding,
    "vanishing": _vanishing,
    "dead_layer": _dead_layer,
    "dominating_layer": _dominating,
    "amp_scale_collapse": _amp,
    "lock_in": _lock_in,
    "clipping_always_on": _always_on,
    "clipping_inactive": _inactive,
    "norm_drift": _drift,
    "clipped_twice": _twice,
}
_VALUES = {
    "exploding": "largest",
    "vanishing": "smallest",
    "dominating_layer": "share",
    "amp_scale_collapse": "smallest",
    "lock_in": "coefficient",
    "clipping_always_on": "coefficient",
    "clipping_inactive": "threshold",
    "norm_drift": "times",
}
KINDS = tuple(_WORDS)


def register(words: dict[str, Callable[[Episode], Words]], values: dict[str, str]) -> None:
    """Let episodes of further kinds be told.

    Args:
        words: What says each kind.
        values: Which number of an episode says how bad it is.
    """
    _WORDS.update(words)
    _VALUES.update(values)

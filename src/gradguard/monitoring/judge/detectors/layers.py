"""Whether one layer makes the whole norm, gets no gradient, or hardly any."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.judge.findings import Episode, Finding, Kind, Lasting, Log, Words, named
from gradguard.monitoring.judge.numbers import percent
from gradguard.threshold_formulas import LOCK_IN_WINDOW

WEAK_LAYER_SHARE = 1e-6
"""A weight whose gradient's elements are a millionth of the usual weight's: float32 resolves 1e-7 of a value."""

LAYER_LINES = 10
"""Per-tensor lines in a row before a layer is judged: an expert or a rare word may miss a few batches."""

REGULAR = 0.9
"""A parameter that had a gradient on so many of the lines before is one that every batch should reach."""

DOMINATING_SHARE = 0.95
"""Of the squared norm: the others together change the norm by at most 2.5 %, so that one layer alone decides a clip."""

DOMINATING_OF_STEPS = 0.8
"""On this share of the last 100 steps: a layer that dominates spikes only is their source, not an imbalance."""

DOMINATING_TENSORS = 8
"""Below so many tensors one of them dominates by nature."""

DOMINATING_ELEMENTS = 0.5
"""A tensor with half of all elements, such as a large embedding, dominates by nature."""

_FEWEST_WEIGHTS = 3
_NEVER = -1


class Layers:
    """Whether one layer makes the whole norm, gets no gradient, or hardly any.

    Args:
        log: Where faults go.
        params: The ``params`` of the record's first line.
        several: Whether the run has several optimizers, so that some of these parameters are not this one's.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]], several: bool = False) -> None:
        self._log, self._several = log, several
        self.names = [str(parameter.get("name", "?")) for parameter in params]
        elements = [parameter.get("numel") or 0 for parameter in params]
        self._large = [count > DOMINATING_ELEMENTS * sum(elements) for count in elements]
        # Vectors stay out: a bias before a normalisation or of attention's keys has a gradient of 0 by mathematics.
        matrices = [i for i, count in enumerate(elements) if count and len(params[i].get("shape") or []) > 1]
        self._roots = {place: math.sqrt(elements[place]) for place in matrices}
        self._tensors = 0 if several else len(self.names)  # how many are this optimizer's
        self._seen, self._tops = 0, Counter()
        self._alive = [False] * len(self.names)
        self._dead, self._weak, self._detached = (Lasting(log, self.names, LAYER_LINES) for _ in range(3))
        self._lines, self._absences = 0, Counter[int]()

    def top(self, i: int, place: int, share: float) -> list[Finding]:
        """Return what is new after a step whose largest gradient is known.

        Args:
            i: The step.
            place: Which parameter it is.
            share: Its share of the squared norm.
        """
        self._seen += 1
        if share > DOMINATING_SHARE:
            self._tops[place] += 1
        if self._seen < LOCK_IN_WINDOW:
            return []
        tops, self._tops, self._seen = self._tops, Counter(), 0
        place, count = max(tops.items(), key=lambda item: item[1], default=(_NEVER, 0))
        if count < DOMINATING_OF_STEPS * LOCK_IN_WINDOW or self._tensors < DOMINATING_TENSORS:
            return []
        if not 0 <= place < len(self.names) or self._large[place]:
            return []
        name = self.names[place]
        numbers = {"share": count / LOCK_IN_WINDOW}
        return self._log.tell(f"dominating {name}", DOMINATING, i, i, params=[name], numbers=numbers)

    def norms(self, i: int, norms: Sequence[float], absent: Sequence[int] = ()) -> list[Finding]:
        """Return what is new after a line with the norm of each parameter.

        Args:
            i: The step.
            norms: One finite norm for each; 0 for one without a gradient.
            absent: The places of those without a gradient, where they are told apart from those with zeros.
        """
        if len(norms) != len(self.names) or not any(norms):
            return []  # where all of them are 0, the norm says so
        if self._several:
            self._tensors = sum(norm > 0 for norm in norms)
        if not all(self._alive):
            self._alive = [alive or norm > 0 for alive, norm in zip(self._alive, norms, strict=True)]
        zero = []
        if 0.0 in norms:  # with several optimizers, one that never had a gradient on this one's steps is another's
            zero = [place for place, norm in enumerate(norms) if not norm and (self._alive[place] or not self._several)]
        found = self._detach(i, absent) if absent or self._absences else []
        if absent:
            zero = [place for place in zero if place not in absent]
        self._lines += 1
        new = self._dead.follow(i, zero)
        for alive in (True, False):
            places = [place for place in new if self._alive[place] is alive]
            found += self._dead.begin(DEAD if alive else NEVER_ALIVE, i, places)
        return found + self._vanishing(i, norms)

    def _detach(self, i: int, absent: Sequence[int]) -> list[Finding]:
        """Those that had a gradient nearly always, and now no more; an expert that some batches use is none."""
        for place in absent:
            self._absences[place] += 1
        regular = [place for place in absent if self._was_regular(place)]
        return self._detached.begin(DETACHED, i, self._detached.follow(i, regular))

    def _was_regular(self, place: int) -> bool:
        if not (0 <= place < len(self._alive) and self._alive[place]):
            return False
        now = self._detached.count(place)
        before = self._lines - now  # lines until this absence began, on so many of which it was absent:
        missed = self._absences[place] - 1 - now
        return before >= LAYER_LINES and missed <= (1 - REGULAR) * before

    def _vanishing(self, i: int, norms: Sequence[float]) -> list[Finding]:
        sizes = {place: norms[place] / root for place, root in self._roots.items() if norms[place]}
        if len(sizes) < _FEWEST_WEIGHTS:
            return []
        if min(sizes.values()) >= WEAK_LAYER_SHARE * max(sizes.values()):  # as nearly always, whatever the median is
            self._weak.follow(i, [])
            return []
        usual = statistics.median(sizes.values())
        new = self._weak.follow(i, [place for place, size in sizes.items() if size < WEAK_LAYER_SHARE * usual])
        share = min((sizes[place] / usual for place in new), default=0.0)
        return self._weak.begin(WEAK, i, new, smallest=share)


def _dead(found: Episode) -> Words:
    message = f"the gradient of {named(found.params)} was exactly 0 on {found.count} recorded steps in a row"
    return "warning", message, "dead ReLUs or a saturated gate: lower the learning rate, or check the initialisation"


def _never_alive(found: Episode) -> Words:
    _, message, _ = _dead(found)
    advice = "nothing if frozen or unused on purpose; else check that it is part of the forward pass"
    return "info", f"{message}, from the first one on", advice


def _detached(found: Episode) -> Words:
    verb = "have" if len(found.params) > 1 else "has"
    message = f"{named(found.params)} {verb} had no gradient at all since step {found.first}, and always before"
    advice = (
        "nothing if frozen on purpose; else look for detach(), torch.no_grad(), .data, requires_grad set to False, or "
        "a branch of the forward pass that leaves it out"
    )
    return "warning", message, advice


def _weak(found: Episode) -> Words:
    verb = "are" if len(found.params) > 1 else "is"
    message = (
        f"the gradient of {named(found.params)} {verb} about {found.numbers['smallest']:.1g} of the usual weight's, "
        f"element by element, on {found.count} recorded steps in a row"
    )
    return "warning", message, (
        "nothing flows back so far: check saturated activations and the initialisation, or add skip connections"
    )  # fmt: skip


def _dominating(found: Episode) -> Words:
    share = found.numbers["share"]
    message = f"{named(found.params)} alone makes {percent(share)} of the squared gradient norm on most steps"
    advice = (
        "a clip of the global norm sees only this one: give it its own threshold with gg.Groups, or check its scale"
    )
    return "warning", message, advice


DEAD = Kind("dead_layer", _dead, of_layers=True)
NEVER_ALIVE = Kind("dead_layer", _never_alive, of_layers=True)
DETACHED = Kind("detached_layer", _detached, of_layers=True)
WEAK = Kind("vanishing", _weak, value="smallest", of_layers=True)
DOMINATING = Kind("dominating_layer", _dominating, value="share", apart=True)
KINDS = (DEAD, NEVER_ALIVE, DETACHED, WEAK, DOMINATING)

"""Detects layers that get no gradient, or hardly any."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from operator import itemgetter, or_, truediv
from typing import Any

from gradguard.monitoring.judge.findings import Kind, Lasting, Log, said
from gradguard.monitoring.record.record_lines import names_of

WEAK_LAYER_SHARE = 1e-6
"""Share of the usual weight's gradient, per element; a smaller one has vanished. float32 resolves 1e-7 of a value."""

LAYER_LINES = 10
"""Per-tensor lines in a row before a layer is reported: an expert or a rare word may miss a few batches."""

REGULAR = 0.9
"""Share of the earlier lines with a gradient from which on every batch should reach a parameter."""

_FEWEST_WEIGHTS = 3


class Layers:
    """Detects layers that get no gradient, or hardly any.

    Args:
        log: The log that receives the faults.
        params: The ``params`` of the record's first line.
        several: Whether the run has several optimizers, so some of the parameters belong to others.
    """

    def __init__(self, log: Log, params: Sequence[dict[str, Any]], several: bool = False) -> None:
        self._log, self._several = log, several
        self.names = names_of(params)
        elements = [parameter.get("numel", 0) for parameter in params]
        # Vectors are left out: the gradient of a bias before a normalisation, or of attention's keys, is always 0.
        matrices = [i for i, count in enumerate(elements) if count and len(params[i].get("shape", ())) > 1]
        self._roots = {place: math.sqrt(elements[place]) for place in matrices}
        self._of_matrices = itemgetter(*matrices) if len(matrices) >= _FEWEST_WEIGHTS else None
        self._alive = [False] * len(self.names)
        self._dead, self._weak, self._detached = (Lasting(log, self.names, LAYER_LINES) for _ in range(3))
        self._lines, self._absences = 0, Counter[int]()

    def norms(self, i: int, norms: Sequence[float], absent: Sequence[int]) -> None:
        """Follow a line with the norm of each parameter.

        Args:
            i: The step.
            norms: One finite norm per parameter; 0 for a parameter without a gradient.
            absent: The indices of parameters without a gradient, where the record separates these from zeros.
        """
        if len(norms) != len(self.names) or not any(norms):
            return  # if all norms are 0, the global norm reports it
        self._alive = list(map(or_, self._alive, map(bool, norms)))
        self._detach(i, absent)
        zero = []
        if 0.0 in norms:
            zero = [place for place, norm in enumerate(norms) if not norm and place not in absent]
        if self._several:  # a parameter that never had a gradient on these steps belongs to another optimizer
            zero = [place for place in zero if self._alive[place]]
        self._lines += 1
        new = self._dead.follow(i, zero)
        for alive, kind in ((True, DEAD), (False, NEVER_ALIVE)):
            self._dead.begin(kind, i, [place for place in new if self._alive[place] is alive])
        self._vanishing(i, norms)

    def _detach(self, i: int, absent: Sequence[int]) -> None:
        """Report parameters that nearly always had a gradient and now have none, without experts of some batches."""
        self._absences.update(absent)
        regular = []
        for place in absent:
            now = self._detached.count(place)
            before = self._lines - now  # lines before this absence began
            missed = self._absences[place] - 1 - now  # on how many of these the parameter was absent
            if self._alive[place] and before >= LAYER_LINES and missed <= (1 - REGULAR) * before:
                regular.append(place)
        self._detached.begin(DETACHED, i, self._detached.follow(i, regular))

    def _vanishing(self, i: int, norms: Sequence[float]) -> None:
        if self._of_matrices is None:
            return
        own = self._of_matrices(norms)
        known = list(map(truediv, filter(None, own), compress(self._roots.values(), own)))
        if len(known) < _FEWEST_WEIGHTS:
            return
        if min(known) >= WEAK_LAYER_SHARE * max(known):  # nearly always true, and saves computing the median
            self._weak.follow(i, [])
            return
        sizes, usual = dict(zip(compress(self._roots, own), known, strict=True)), statistics.median(known)
        new = self._weak.follow(i, [place for place, size in sizes.items() if size < WEAK_LAYER_SHARE * usual])
        share = min((sizes[place] / usual for place in new), default=0.0)
        self._weak.begin(WEAK, i, new, smallest=share)


_DEAD = "the gradient of {names} was exactly 0 on {found.count} recorded steps"
DEAD = Kind(
    "dead_layer",
    said(
        "warning",
        _DEAD,
        "look for dead ReLUs or a saturated gate, and lower the learning rate or check the initialisation",
    ),
)
NEVER_ALIVE = Kind(
    "dead_layer",
    said(
        "info",
        f"{_DEAD}, from the first one on",
        "do nothing if it is frozen or unused on purpose; otherwise check that it is part of the forward pass",
    ),
)
DETACHED = Kind(
    "detached_layer",
    said(
        "warning",
        "{names} {has} had no gradient at all since step {found.first}, though {it} nearly always had one before",
        "do nothing if it is frozen on purpose; otherwise look for detach(), torch.no_grad(), .data, requires_grad set "
        "to False, or a branch of the forward pass that leaves it out",
    ),
)
WEAK = Kind(
    "vanishing",
    said(
        "warning",
        "the gradient of {names} {is_} about {smallest:.1g} of the usual weight's, element by element, on "
        "{found.count} recorded steps",
        "hardly any gradient gets that far back: check for saturated activations, check the initialisation, or add "
        "skip connections",
    ),
    value="smallest",
)
KINDS = (DEAD, NEVER_ALIVE, DETACHED, WEAK)

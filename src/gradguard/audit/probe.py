r"""Measure how often each tensor counts in a norm function: all gradients are zero but a few, of known squares.

A correct norm answers :math:`R^2 = \sum_i m_i s_i` with each :math:`m_i` equal to 1. Tensors of one layout are probed
together, as many at a time as still reveal a single forgotten one. A group is split only if its answer is not the
expected one. This module contains no process communication; the function `ask` does it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gradguard.audit.audit_report import NormClass, NormClasses, NormFinding
from gradguard.audit.factors import Setting, named
from gradguard.audit.held import Tensors
from gradguard.words import listed

Ask = Callable[[Sequence[int], int | None, bool], list[float]]
"""Fill the tensors at these positions, on one rank or on all, and return the norm that each rank computes.

The last argument selects the second set of values, see `elements_value`.
"""

_MOST_RANKS = 64
"""Largest number of ranks that are probed one by one."""

_WHY = {
    "local": ": each rank's norm covers only what it holds itself, and is not added up over ranks",
    "mean": ": the norms of the ranks are averaged; their squares should be added up",
    "disagree": ": ranks compute different norms",
}


@dataclass(frozen=True)
class Counted:
    """The result of the probes for one tensor, or for several with the same result.

    Attributes:
        places: The positions of the tensors.
        kind: The kind of the `NormFinding`; ``""`` if the tensor counts once.
        count: How often its squares count; None if ranks differ.
        words: The reason, if it is known.
    """

    places: tuple[int, ...]
    kind: str
    count: float | None
    words: str = ""


def elements_value(place: int, numel: int, again: bool = False) -> float:
    """Return the value that fills every element of a tensor: exact in every dtype, another square for each tensor.

    The value has seven bits and a power of two. Norms lie between 1 and 4, as far as 16 bits allow, so that no square
    overflows or vanishes. Two tensors with equal squares could hide each other, one counting twice and one not at all.
    Different numbers of elements may make squares equal by chance; a second question, in which the larger value is the
    smaller, tells such tensors apart.

    Args:
        place: The position of the tensor.
        numel: Its number of elements.
        again: Return the value of the second question.
    """
    exponent = min(12, max(0, math.floor(math.log2(max(1, numel)) / 2)))
    bits = (place * 37 + 11) % 64
    return (64 + (63 - bits if again else bits)) / 64 * 2.0**-exponent


class Probe:
    """Probes a norm function for all tensors.

    Args:
        tensors: The tensors.
        ask: Fills gradients and calls the norm function.
        setting: The numbers by which factors are named.
        tolerance: The relative error of a squared norm.

    Attributes:
        ask: The argument ``ask``.
        tolerance: The argument ``tolerance``.
    """

    def __init__(self, tensors: Tensors, ask: Ask, setting: Setting, tolerance: float) -> None:
        self._tensors, self.ask, self._setting = tensors, ask, setting
        self.tolerance = tolerance

    def counts(self, classes: Sequence[Sequence[int]]) -> list[Counted]:
        """Return how often each tensor of each class counts; tensors of one class with one answer are joined.

        If all tensors of all classes have the same wrong factor, it is returned as one answer.
        """
        found = [one for places in classes for one in self._joined(self._of(places))]
        together = self._joined(found)
        return together if len(together) == 1 and together[0].kind == "factor" else found

    def _joined(self, counted: Sequence[Counted]) -> list[Counted]:
        found: list[Counted] = []
        for one in counted:
            for i, other in enumerate(found):
                if self._is_one(one, other):
                    found[i] = replace(other, places=other.places + one.places)
                    break
            else:
                found.append(one)
        return found

    def _is_one(self, one: Counted, other: Counted) -> bool:
        if (one.kind, one.words) != (other.kind, other.words):
            return False
        if one.count is None or other.count is None or one.kind != "factor":
            return one.count == other.count
        return abs(one.count - other.count) <= 2 * self.tolerance * other.count

    def answers(self, places: Sequence[int], rank: int | None = None, again: bool = False) -> list[float]:
        """Return the squares of the norms of all ranks."""
        return [norm * norm for norm in self.ask(places, rank, again)]

    def rounding(self, places: Sequence[int]) -> float:
        """Return the largest relative rounding error of the norms of single tensors.

        Each tensor is probed with two values; the ratio of the two norms is compared with the ratio of the values. The
        result does not depend on how often the tensor counts: it is 0 but for rounding, which is large in 16 bits.

        Args:
            places: The positions of the tensors to probe, each by itself.
        """
        apart = [0.0]
        for place in places:
            one, two = (self.answers([place], again=again)[0] / self.square([place], again) for again in (False, True))
            if one and two and math.isfinite(one / two):
                apart.append(abs(one / two - 1) / 2)
        return max(apart)

    def square(self, places: Sequence[int], again: bool = False) -> float:
        """Return the square of the norm of tensors as they are filled, each element once."""
        sizes = [(place, self._tensors[place].numel) for place in places]
        return math.fsum(elements_value(place, numel, again) ** 2 * numel for place, numel in sizes)

    def _of(self, places: Sequence[int]) -> list[Counted]:
        room = max(1, round(0.01 / self.tolerance))  # a forgotten tensor has 1/16 of the largest square or more
        blocks: dict[int, list[int]] = {}
        for place in places:  # 64 consecutive tensors have 64 different values
            blocks.setdefault(place // 64, []).append(place)
        few = [block[i : i + room] for block in blocks.values() for i in range(0, len(block), room)]
        return [one for part in few for one in self._of_few(part)]

    def _of_few(self, places: Sequence[int]) -> list[Counted]:
        expected = self.square(places)
        if not expected:  # the tensors have no elements
            return []
        answers = self.answers(places)
        right = self._are(answers, expected)
        # Wrong counts may cancel: a group that counts once must also do so with the second set of values.
        if right and (len(places) == 1 or self._are(self.answers(places, again=True), self.square(places, True))):
            return [Counted(tuple(places), "", 1.0)]
        if not right:
            whole = self._diagnosed(places, answers, expected)
            if len(places) == 1 or self._is_uniform(places, whole):
                return [whole]
        middle = len(places) // 2
        return [*self._of_few(places[:middle]), *self._of_few(places[middle:])]

    def _is_uniform(self, places: Sequence[int], whole: Counted) -> bool:
        """Tell whether each half has the count of the whole; a count that matches by chance does not persist."""
        if whole.kind not in ("factor", "ranks") or not whole.words or whole.count is None:
            return False
        halves = [(half, self.square(half)) for half in (places[::2], places[1::2])]
        return all(self._are(self.answers(half), whole.count * square, square) for half, square in halves)

    def _are(self, answers: Sequence[float], expected: float | Sequence[float], least: float = 0.0) -> bool:
        wanted = expected if isinstance(expected, Sequence) else [expected] * len(answers)
        return all(abs(a - e) <= self.tolerance * max(e, least) for a, e in zip(answers, wanted, strict=True))

    def _diagnosed(self, places: Sequence[int], answers: Sequence[float], expected: float) -> Counted:
        def is_(kind: str, count: float | None = None, words: str = "") -> Counted:
            return Counted(tuple(places), kind, count, words)

        if not all(map(math.isfinite, answers)):
            return is_("factor", None, "the norm is not finite for finite gradients")
        held_by: list[list[float]] = [[] for _ in answers]
        for i in places:
            for rank, held in self._tensors[i].holders:
                held_by[rank].append(elements_value(i, self._tensors[i].numel) ** 2 * held.numel)
        local = [*map(math.fsum, held_by)]
        if not self._are(answers, answers[0], expected * 1e-3):
            if self._are(answers, local, expected):
                return is_("local")
            return is_("disagree", None, "it counts " + listed([f"{a / expected:.4g}" for a in answers], 8))
        tensors = [self._tensors[i] for i in places]
        holders = sorted({rank for tensor in tensors for rank in tensor.ranks})
        count = answers[0] / expected
        if len(holders) > 1:
            last, own = holders[-1], local[holders[-1]]
            of_last = cache(lambda: self.answers(places, last))
            # With parts of equal size each rank may still compute a local norm: then other ranks answer 0 here.
            alone = [own if rank == last else 0.0 for rank in range(len(answers))]
            if own > 0 and self._are(answers, local, expected) and self._are(of_last(), alone, own):
                return is_("local")
            # Where the norms of the ranks are averaged, what one rank holds counts 1 / world squared.
            mean = math.fsum(map(math.sqrt, local)) / len(local)
            of_one = (math.sqrt(own) / len(answers)) ** 2
            if self._are(answers[:1], mean * mean) and self._are(of_last()[:1], of_one):
                return is_("mean", count)
        if 1 < len(holders) <= _MOST_RANKS:
            found = cache(lambda: {rank: self.answers(places, rank)[0] for rank in holders if local[rank]})
            if count < 1 and any(len(tensor.parts) > 1 for tensor in tensors):  # one copy of a tensor suffices
                some = [rank for rank, square in found().items() if square > self.tolerance * local[rank]]
                # If the ranks that count hold every part, the others need not count.
                is_all = all(set(some) & set(part.ranks) for tensor in tensors for part in tensor.parts)
                if 0 < len(some) < len(found()) and not is_all:
                    return is_("ranks", count, f"only what rank {listed(some, 8)} holds counts")
            # If a rank counts differently alone than together with the others, no known factor names the count.
            if all(len(t.parts) > 1 and t.copies == 1 for t in tensors) and not all(
                self._are([square], count * local[rank], local[rank]) for rank, square in found().items()
            ):
                largest = "the largest of the ranks' norms is taken; their squares should be added up"
                return is_("ranks", count, largest) if self._are(answers[:1], max(local)) else is_("factor", count)
        return is_("factor", *named(count, tensors[0].counts(self._setting), self.tolerance))


def classes_of(tensors: Tensors) -> list[list[int]]:
    """Group the positions of tensors by layout; tensors of unknown layout are left out."""
    found: dict[tuple, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.unknown:
            found.setdefault((tensor.layout, tensor.parts[0].first.claim, frozenset(tensor.ranks)), []).append(i)
    return list(found.values())


def finding_of(counted: Counted, tensors: Tensors) -> NormFinding:
    """Return the finding for a wrong count."""
    names = tuple(tensors[i].name for i in counted.places)
    layouts = {tensors[i].layout for i in counted.places}
    what = f"{len(names)} tensor{'s' * (len(names) > 1)} {layouts.pop() if len(layouts) == 1 else 'of all classes'}"
    times = "" if counted.count is None else f" {'counts' if len(names) == 1 else 'count'} {counted.count:.6g} times"
    words = f": {counted.words}" if counted.words else ""
    why = _WHY.get(counted.kind, "")
    return NormFinding(counted.kind, f"{what}{times}{why}{words}", names, counted.count)


def norm_classes(tensors: Tensors, classes: Sequence[Sequence[int]], counted: Sequence[Counted] = ()) -> NormClasses:
    """Return the classes for the report, each with its count if all its tensors count alike."""
    count_of = {i: c.count for c in counted for i in c.places}
    found = []
    for places in classes:
        names = tuple(tensors[i].name for i in places)
        counts = {count_of.get(i) for i in places if tensors[i].numel}
        square = math.fsum(tensors[i].square for i in places)
        counted_as = counts.pop() if len(counts) == 1 else None
        found.append(NormClass(tensors[places[0]].layout, names, square, counted_as))
    return tuple(found)

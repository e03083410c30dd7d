"""Findings: how a fault that lasts or recurs becomes a single finding, and how its message is worded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.record.record_lines import Lines
from gradguard.monitoring.record.step_rows import OptimizerSteps
from gradguard.words import counted, listed

RECOVERED_STEPS = 100
"""After this many healthy steps an episode is over, and the next fault of its kind is reported again."""

NAMED_AT_MOST = 5

SEVERITIES = ("error", "warning", "info")

Words = tuple[str, str, str]
"""The severity, the observation, and the advice."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: The name in records and reports.
        words: Words an episode of this kind: returns severity, observation and advice.
        value: The key of the episode's number that measures the fault; empty where none does.
        confidence: The ``confidence`` of its `Finding`.
    """

    name: str
    words: Callable[["Episode"], Words]
    value: str = ""
    confidence: str = "high"


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation about a run that a person should know, with advice.

    Attributes:
        kind: The kind of fault, such as ``"dead_layer"``.
        severity: ``"error"`` (the run is damaged), ``"warning"`` (it may be) or ``"info"``.
        message: The observation, with numbers.
        advice: The steps to take.
        first_step: The step on which the fault began.
        last_step: The last step on which it was seen.
        params: The affected parameters; empty where it affects none in particular.
        optimizer: The index of the affected optimizer, where the record has several.
        value: The number that measures the fault: a norm, a share, a coefficient or a scale; None where there is none.
        confidence: ``"high"`` where the numbers allow no other explanation, ``"medium"`` where this is the likely one.
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
    confidence: str = "high"


@dataclass(slots=True)
class Episode:
    """A fault from its first step to its last.

    Attributes:
        kind: The kind of fault.
        optimizer: The index of the affected optimizer.
        first: The first step.
        last: The last step on which the fault was seen.
        count: The number of steps on which it was seen.
        params: The affected parameters.
        numbers: The numbers of the message.
        harmless: Whether the fault counts as harmless: no such step changed a weight, or the user may intend it.
        text: Further text for the message.
        later: The first and the last step of each later episode of the same fault.
    """

    kind: Kind
    optimizer: int | None
    first: int
    last: int
    count: int = 1
    params: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    harmless: bool = False
    text: str = ""
    later: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def over(cls, kind: Kind, part: OptimizerSteps, steps: Lines, **more: Any) -> "Episode":
        """Return an episode that covers all of the given steps.

        Args:
            kind: The kind of fault.
            part: The optimizer that took the steps.
            steps: The steps; at least one.
            **more: Further attributes.
        """
        return cls(kind, part.index, steps[0]["i"], steps[-1]["i"], len(steps), **more)

    def finding(self) -> Finding:
        """Return the finding that reports this episode."""
        severity, message, advice = self.kind.words(self)
        last = max([self.last, *(last for _, last in self.later)])
        value = self.numbers.get(self.kind.value)
        return Finding(
            self.kind.name, severity, message + self._again(), advice, self.first, last, tuple(self.params),
            self.optimizer, value, self.kind.confidence,
        )  # fmt: skip

    def join(self, later: "Episode") -> None:
        """Merge a later episode of the same kind into this one.

        Args:
            later: The other episode.
        """
        spans = [(self.first, self.last), *self.later]
        last = spans[-1][1]
        if later.first > last:
            spans.append((later.first, later.last))
            self.count += later.count
        else:  # the episodes of two layers overlap: count only the later one's steps after this one's end
            share = max(0, later.last - last) / max(1, later.last - later.first)
            spans[-1] = spans[-1][0], max(last, later.last)
            self.count += round(share * later.count)
        (self.first, self.last), *self.later = spans
        self.params += [name for name in later.params if name not in self.params]
        self.harmless = self.harmless and later.harmless
        self.extend(later.numbers)

    def extend(self, numbers: Mapping[str, float]) -> None:
        """Update the ``"largest"`` and the ``"smallest"`` number, where both sides have one.

        Args:
            numbers: The numbers of another step or of a later episode.
        """
        for extreme, pick in (("largest", max), ("smallest", min)):
            if extreme in self.numbers and extreme in numbers:
                self.numbers[extreme] = pick(self.numbers[extreme], numbers[extreme])

    def _again(self) -> str:
        if not self.later:
            return ""
        spans = [(self.first, self.last), *self.later]
        where = listed([f"{first}" if first == last else f"{first} to {last}" for first, last in spans], NAMED_AT_MOST)
        return f" ({len(spans)} times in this run: on steps {where})"


class Log:
    """The faults of one optimizer's steps, each reported once for as long as it lasts.

    Args:
        optimizer: The index of the optimizer, where the run has several.
    """

    def __init__(self, optimizer: int | None = None) -> None:
        self.optimizer = optimizer
        self.episodes: list[Episode] = []
        self._open: dict[str, Episode] = {}
        self._news: list[Finding] = []

    def news(self) -> list[Finding]:
        """Return the findings of the episodes that began since the last call."""
        news, self._news = self._news, []
        return news

    def extend_open(self, key: str, i: int, value: float | None = None) -> Episode | None:
        """Add a fault on step ``i`` to the open episode of that fault, and return the episode.

        Args:
            key: A name that only this fault has.
            i: The step.
            value: The size of the fault on this step. The message names the largest or the smallest.

        Returns:
            The extended episode; None where no episode is open, so the fault begins a new one.
        """
        episode = self._open.get(key)
        if episode is None or i - episode.last > RECOVERED_STEPS:
            return None
        episode.last, episode.count = i, episode.count + 1
        if value is not None:
            episode.extend({"largest": value, "smallest": value})
        return episode

    def report(self, key: str, kind: Kind, first: int, i: int, value: float | None = None, **more: Any) -> None:
        """Record a fault on step ``i``: extend the open episode, or begin one.

        Args:
            key: As for `extend_open`.
            kind: As for `begin`.
            first: As for `begin`.
            i: The step.
            value: As for `extend_open`.
            **more: As for `begin`. An episode stays harmless only while all of its faults are.
        """
        episode = self.extend_open(key, i, value)
        if episode is None:
            self.begin(key, kind, first, i, **more)
        else:
            episode.harmless = episode.harmless and more.get("harmless", False)

    def begin(self, key: str, kind: Kind, first: int, last: int, **more: Any) -> Episode:
        """Begin an episode that later faults with the same key extend.

        Args:
            key: As for `extend_open`.
            kind: The kind of fault.
            first: The first step of the fault.
            last: The step on which it is reported.
            **more: Further attributes of the `Episode`.

        Returns:
            The episode.
        """
        begun = self._open[key] = Episode(kind, self.optimizer, first, last, **more)
        self.add(begun)
        return begun

    def add(self, begun: Episode) -> None:
        """Add an episode that no later fault extends.

        Args:
            begun: The episode.
        """
        self.episodes.append(begun)
        self._news.append(begun.finding())


@dataclass(slots=True)
class _Fault:
    """A fault of one parameter: its first step, its number of lines, and its episode once it was reported."""

    since: int
    count: int = 0
    episode: Episode | None = None


class Lasting:
    """Faults of single parameters, reported once they have lasted for a number of per-tensor lines in a row.

    Args:
        log: The log that receives the faults.
        names: The names of the parameters.
        lines: The number of lines.
    """

    def __init__(self, log: Log, names: Sequence[str], lines: int) -> None:
        self._log, self._names, self._lines = log, names, lines
        self._faults: dict[int, _Fault] = {}

    def count(self, place: int) -> int:
        """Return for how many lines in a row a parameter has had the fault.

        Args:
            place: The index of the parameter.
        """
        return self._faults[place].count if place in self._faults else 0

    def follow(self, i: int, faulty: Sequence[int]) -> list[int]:
        """Return the parameters whose fault becomes due for a report on this line; extend the episodes of the others.

        Args:
            i: The step.
            faulty: The indices of the parameters that have the fault on this line.
        """
        new, self._faults = [], {place: self._faults.get(place, _Fault(i)) for place in faulty}
        for place, fault in self._faults.items():
            fault.count += 1
            if fault.episode is not None:
                fault.episode.last, fault.episode.count = i, max(fault.episode.count, fault.count)
            elif fault.count >= self._lines:
                new.append(place)
        return new

    def begin(self, kind: Kind, i: int, places: Sequence[int], **numbers: float) -> None:
        """Begin an episode of some parameters; do nothing where there are none.

        Args:
            kind: The kind of fault.
            i: The step on which it is reported.
            places: The indices of the parameters, from those that `follow` returned.
            **numbers: The numbers of the message.
        """
        if not places:
            return
        faults, names = [self._faults[place] for place in places], [self._names[place] for place in places]
        first = min(fault.since for fault in faults)
        begun = self._log.begin(
            f"{kind.name} {places}", kind, first, i, count=self._lines, params=names, numbers=numbers
        )  # fmt: skip
        for fault in faults:
            fault.episode = begun


class _Shown(float):
    """A float that formats itself for messages: ``{}`` by `number`, ``{:%}`` by `percent`, ``{:=}`` as a threshold."""

    def __format__(self, form: str) -> str:
        written = {"": number, "%": percent, "=": plain_threshold}.get(form)
        return super().__format__(form) if written is None else written(self)


_ONE = {"is_": "is", "has": "has", "changes": "changes", "receives": "receives", "it": "it"}
_SEVERAL = {"is_": "are", "has": "have", "changes": "change", "receives": "receive", "it": "they"}


def said(
    severity: str, message: str, advice: str, harmless: Words | None = None, where: str = ""
) -> Callable[[Episode], Words]:
    """Return the ``words`` of a `Kind` whose messages differ only in numbers and names.

    Args:
        severity: The severity.
        message: The observation, with placeholders: the names of the episode's numbers, ``{steps}`` for its number of
            steps, ``{names}`` for its parameters, and ``{where}`` for the argument of that name. ``{is_}``, ``{has}``,
            ``{receives}``, ``{changes}`` and ``{it}`` become singular or plural with the number of parameters.
        advice: The steps to take; it has no placeholders.
        harmless: Severity, observation and advice of a harmless episode, where they differ.
        where: The text for ``{where}`` of an episode that has parameters, with the same placeholders.
    """
    usual = severity, message, advice

    def words(found: Episode) -> Words:
        severity, message, advice = harmless if harmless and found.harmless else usual
        numbers = {name: _Shown(value) for name, value in found.numbers.items()}
        verbs = _SEVERAL if len(found.params) > 1 else _ONE
        gaps = {**numbers, **verbs, "found": found, "names": named(found.params or ["a parameter"])}
        place = where.format(**gaps) if found.params else ""
        return severity, message.format(**gaps | {"where": place, "steps": counted(found.count, "step")}), advice

    return words


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings sorted: errors first, then warnings, then infos, each in the order of steps.

    Args:
        found: The findings.
    """
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.first_step, one.kind))


def named(params: Sequence[str]) -> str:
    """Return up to five names, joined, with the number of the others.

    Args:
        params: At least one name.

    Example:
        >>> named(["a", "b", "c", "d", "e", "f", "g"])
        'a, b, c, d, e and 2 more'
    """
    return listed(params, NAMED_AT_MOST)

"""Findings: how a fault that lasts or comes back becomes one, and the words that all of them share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.record.record_lines import Lines
from gradguard.monitoring.record.step_rows import OptimizerSteps
from gradguard.words import counted, listed

RECOVERED_STEPS = 100
"""So many healthy steps end an episode; the next fault of its kind is told anew."""

NAMED_AT_MOST = 5

SEVERITIES = ("error", "warning", "info")

Words = tuple[str, str, str]
"""The severity, what was seen, and what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: As records and pages have it.
        words: Says an episode of it.
        value: Which of an episode's numbers says how bad it is, if one does.
        confidence: As a `Finding` has it.
    """

    name: str
    words: Callable[["Episode"], Words]
    value: str = ""
    confidence: str = "high"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a run that a person should know, and what to do about it.

    Attributes:
        kind: The kind of event of the record, such as ``"dead_layer"``.
        severity: ``"error"`` (the run is damaged), ``"warning"`` (it may be) or ``"info"``.
        message: The observation, with numbers.
        advice: The steps to take.
        first_step: The step where it began.
        last_step: The last step where it was seen.
        params: The parameters it is about, if it is about some.
        optimizer: The optimizer that it is about, where the record has several.
        value: The number that says how bad it is, if there is one: a norm, a share, a coefficient or a scale.
        confidence: ``"high"`` where the numbers leave no other reading, ``"medium"`` where this is the likely one.
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
    """A fault while it lasts.

    Attributes:
        kind: The kind of the finding.
        optimizer: The optimizer that it is about.
        first: Its first step.
        last: The last step on which it was seen.
        count: On how many steps it was seen.
        params: The parameters that it is about.
        numbers: The numbers of the message.
        harmless: Whether no step with the fault changed a weight, or the fault may be meant.
        text: Further words of the message.
        later: Later episodes of the same fault, as first and last step.
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
        """Return an episode that is of all of some steps.

        Args:
            kind: The kind of the finding.
            part: The optimizer whose steps they are.
            steps: At least one.
            **more: Further attributes.
        """
        return cls(kind, part.index, steps[0]["i"], steps[-1]["i"], len(steps), **more)

    def finding(self) -> Finding:
        """Return the finding that says it."""
        severity, message, advice = self.kind.words(self)
        last = max([self.last, *(last for _, last in self.later)])
        value = self.numbers.get(self.kind.value)
        return Finding(
            self.kind.name, severity, message + self._again(), advice, self.first, last, tuple(self.params),
            self.optimizer, value, self.kind.confidence,
        )  # fmt: skip

    def join(self, later: "Episode") -> None:
        """Take a later episode of the same kind in.

        Args:
            later: The other.
        """
        spans = [(self.first, self.last), *self.later]
        last = spans[-1][1]
        if later.first > last:
            spans.append((later.first, later.last))
            self.count += later.count
        else:  # of other layers, at the same time: only the steps that come after are further ones
            share = max(0, later.last - last) / max(1, later.last - later.first)
            spans[-1] = spans[-1][0], max(last, later.last)
            self.count += round(share * later.count)
        (self.first, self.last), *self.later = spans
        self.params += [name for name in later.params if name not in self.params]
        self.harmless = self.harmless and later.harmless
        self.extend(later.numbers)

    def extend(self, numbers: Mapping[str, float]) -> None:
        """Let the largest and the smallest number follow, where the episode has them.

        Args:
            numbers: The numbers of another step, or a later episode.
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
    """The faults of one optimizer's steps, each once for as long as it lasts.

    Args:
        optimizer: Which optimizer, where the run has several.
    """

    def __init__(self, optimizer: int | None = None) -> None:
        self.optimizer = optimizer
        self.episodes: list[Episode] = []
        self._open: dict[str, Episode] = {}
        self._news: list[Finding] = []

    def news(self) -> list[Finding]:
        """Return the findings of the episodes that have begun since the last call."""
        news, self._news = self._news, []
        return news

    def goes_on(self, key: str, i: int, value: float | None = None) -> Episode | None:
        """Return the episode that a fault on step ``i`` belongs to, with that step added; None if it begins one.

        Args:
            key: The name of the fault, unlike that of other faults.
            i: The step.
            value: How bad it is there: the message tells the largest or the smallest.
        """
        episode = self._open.get(key)
        if episode is None or i - episode.last > RECOVERED_STEPS:
            return None
        episode.last, episode.count = i, episode.count + 1
        if value is not None:
            episode.extend({"largest": value, "smallest": value})
        return episode

    def tell(self, key: str, kind: Kind, first: int, i: int, value: float | None = None, **more: Any) -> None:
        """Begin an episode with a fault on step ``i``, unless one goes on.

        Args:
            key: As for `goes_on`.
            kind: As for `begin`.
            first: As for `begin`.
            i: The step.
            value: As for `goes_on`.
            **more: As for `begin`. An episode stays harmless only as long as each of its faults is.
        """
        episode = self.goes_on(key, i, value)
        if episode is None:
            self.begin(key, kind, first, i, **more)
        else:
            episode.harmless = episode.harmless and more.get("harmless", False)

    def begin(self, key: str, kind: Kind, first: int, last: int, **more: Any) -> Episode:
        """Begin an episode.

        Args:
            key: As for `goes_on`.
            kind: The kind of the finding.
            first: The first step of the fault.
            last: The step on which it is told.
            **more: Further attributes of the `Episode`.

        Returns:
            The episode.
        """
        begun = self._open[key] = Episode(kind, self.optimizer, first, last, **more)
        self.add(begun)
        return begun

    def add(self, begun: Episode) -> None:
        """Add an episode that nothing continues.

        Args:
            begun: The episode.
        """
        self.episodes.append(begun)
        self._news.append(begun.finding())


@dataclass(slots=True)
class _Fault:
    """A fault of one parameter: since which step, for how many lines, and as what it was told."""

    since: int
    count: int = 0
    episode: Episode | None = None


class Lasting:
    """Faults of single parameters that are told when they have lasted for so many lines in a row.

    Args:
        log: Where faults go.
        names: The names of the parameters.
        lines: How many lines.
    """

    def __init__(self, log: Log, names: Sequence[str], lines: int) -> None:
        self._log, self._names, self._lines = log, names, lines
        self._faults: dict[int, _Fault] = {}

    def count(self, place: int) -> int:
        """Return for how many lines in a row it has been seen on a parameter.

        Args:
            place: The place of the parameter.
        """
        return self._faults[place].count if place in self._faults else 0

    def follow(self, i: int, faulty: Sequence[int]) -> list[int]:
        """Return the parameters on which the fault has just lasted long enough; let episodes that are told go on.

        Args:
            i: The step.
            faulty: The places of the parameters on which it is seen.
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
        """Begin an episode, unless there are no parameters.

        Args:
            kind: The kind of the finding.
            i: The step on which it is told.
            places: The parameters that it is about, of those that `follow` has returned.
            **numbers: What the message says.
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
    """A number that words write as people do: ``{}`` as `number`, ``{:%}`` as `percent`, ``{:=}`` as typed."""

    def __format__(self, form: str) -> str:
        written = {"": number, "%": percent, "=": plain_threshold}.get(form)
        return super().__format__(form) if written is None else written(self)


_ONE = {"is_": "is", "has": "has", "changes": "changes", "receives": "receives", "it": "it"}
_SEVERAL = {"is_": "are", "has": "have", "changes": "change", "receives": "receive", "it": "they"}


def said(
    severity: str, message: str, advice: str, harmless: Words | None = None, where: str = ""
) -> Callable[[Episode], Words]:
    """Return the words of a kind whose episodes differ in their numbers only.

    Args:
        severity: The severity.
        message: The observation, in which the numbers of an episode stand by name, ``{steps}`` for its number of steps,
            ``{names}`` for its parameters, ``{where}`` for the argument of that name, and ``{is_}``, ``{has}``,
            ``{receives}``, ``{changes}`` or ``{it}`` for a word that follows their number.
        advice: The steps to take.
        harmless: All three of an episode that is harmless, where they are others.
        where: The words for ``{where}`` of an episode that has parameters, with gaps as the message has them.
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
    """Return findings, errors first, then in the order of steps.

    Args:
        found: The findings.
    """
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.first_step, one.kind))


def named(params: Sequence[str]) -> str:
    """Return up to five names, and how many more there are.

    Args:
        params: At least one name.

    Example:
        >>> named(["a", "b", "c", "d", "e", "f", "g"])
        'a, b, c, d, e and 2 more'
    """
    return listed(params, NAMED_AT_MOST)

"""Turn the measurements of one optimizer step into lines of the record."""

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gradguard.distributed.placements import is_sharded
from gradguard.listeners import ClipEvent, RecoveryEvent
from gradguard.monitoring.judge.detectors.loop_faults import setup_episode
from gradguard.monitoring.judge.findings import Kind
from gradguard.monitoring.judge.live import event_line
from gradguard.monitoring.observe.measure import Diagnostics, Norms
from gradguard.monitoring.observe.updates import Moved
from gradguard.monitoring.record.file import Line
from gradguard.monitoring.record.record_lines import known_fields, without_none
from gradguard.words import listed

EPSILON = 1e-6
"""The epsilon that PyTorch's norm clip adds to the norm."""

ROUNDING = 1e-4
"""The largest relative rounding difference of two measurements of a norm, with a margin; each is accurate to 2e-5."""

FIXED = frozenset(["norm", "value", "adaptive"])
"""The rules whose threshold does not change during a run."""

_NAMED_AT_MOST = 5


def copied(value: Any) -> Any:
    """Return ``value``; of a tensor, return a copy, because the script may change the tensor in place.

    Return None for a DTensor: reading it may need every process, and only one process writes the record.
    """
    if not isinstance(value, Tensor):
        return value
    return None if is_sharded(value) else value.detach().clone()


class ScriptClip(NamedTuple):
    """One clip, before the step or within it.

    Attributes:
        rule: ``"norm"``, ``"value"``, ``"adaptive"``, or the class name of any other clipper.
        threshold: A copy of the clip's threshold.
        norm: A copy of the norm that a norm clip compares with its threshold: the norm that it returned or was given,
            or, if only the observer has it, the 2-norm of the sharded gradients. None if the clip has no such norm.
        coefficient: A copy of the ratio of the norms after and before the clip; None if the clip does not report it.
    """

    rule: str = ""
    threshold: Any = None
    norm: Any = None
    coefficient: Any = None

    @classmethod
    def from_event(cls, event: ClipEvent) -> Self:
        """Return the reported clip without its norm, which is not needed for a clip within a step."""
        return cls(event.rule, copied(event.threshold), None, copied(event.coefficient))


class GradientNorms(NamedTuple):
    """The gradients of a step, measured before any clip.

    Attributes:
        norms: The 2-norm of each gradient; empty if only `total` is known.
        places: The index of each norm's parameter in the record's names; -1 if the record does not have it.
        total: The 2-norm of all gradients, if it does not follow from ``norms``.
        post: The 2-norm of all gradients after the clips, if it does not follow from a reported coefficient.
        are_after: Whether ``norms`` are the norms after the clips, because the norms before are unknown.
        lost: Above 0 if processes measured together and one of them failed.
        late: Whether some tensors are on a device, so that their numbers arrive later.
    """

    norms: Norms
    places: Sequence[int] = ()
    total: Any = None
    post: Tensor | float | None = None
    are_after: bool = False
    lost: Any = None
    late: bool = False

    @property
    def whole(self) -> float:
        """The 2-norm of all gradients before any clip."""
        return math.hypot(*_numbers(self.norms)) if self.total is None else float(self.total)


class Clips(NamedTuple):
    """The clips of a step.

    Attributes:
        script: The script's own clips, in their order.
        reach: The indices in `GradientNorms.norms` that each script clip acted on; empty if all acted on all gradients.
        applied: The clip that the observer applies, after the script's clips.
        guard: The clip of a `Guard` within the step; None without one.
    """

    script: Sequence[ScriptClip] = ()
    reach: Sequence[Sequence[int]] = ()
    applied: ScriptClip | None = None
    guard: ScriptClip | None = None

    @property
    def act_apart(self) -> bool:
        """Whether several script clips acted, and at least one of them on a part of the gradients."""
        return len(self.reach) > 1


class Skip(NamedTuple):
    """Flags of a skipped step; each is a number, or a tensor until it has been read.

    Attributes:
        by_guard: Whether a guard skipped the step.
        spike: Whether the guard skipped the step because of a finite spike.
        by_scaler: The GradScaler's flag for a fused optimizer: 1 means that the step was skipped.
    """

    by_guard: Any = None
    spike: Any = None
    by_scaler: Any = None


class ScalerFacts(NamedTuple):
    """A GradScaler's part in a step.

    Attributes:
        factor: The loss scale.
        is_on: Whether the gradients were still scaled when ``scaler.step`` began.
    """

    factor: Tensor | None
    is_on: bool = False


class StepMeasurement(NamedTuple):
    """The measurements of one optimizer step; those on an accelerator stay tensors until they are copied to the host.

    Attributes:
        number: The number of the step.
        gradients: The norms of the gradients.
        turn: The number of the step among the steps of its optimizer.
        wall: Seconds since the start.
        skip: The flags of a skipped step.
        diagnostics: The norms of all weights and of their change; None if no full measurement was due.
        moved: The change of a sample of the weights; None if none was due.
        clips: The clips of the step.
        scale: The GradScaler's facts; None without a GradScaler.
        optimizer: The index of the optimizer, if the script has several.
        losses: The losses that backward was called on since the step before.
        lr: The learning rate of the first parameter group: a number, or a copy of the script's tensor.
        kept_gradients: Whether the gradients were not cleared and contain those of the step before; None if unchecked.
        origin: The operation where the forward first had a non-finite number, and the dtype of that number.
        logits: The largest logit of each attention that a `LogitWatch` recorded since the step before.
        logged: Other reported or logged numbers by name; tensors until they have been read. ``norm`` is the norm
            before the user's own clip, and ``max_norm`` its threshold.
    """

    number: int
    gradients: GradientNorms
    turn: int = 0
    wall: float = 0.0
    skip: Skip = Skip()
    diagnostics: Diagnostics | None = None
    moved: Moved | None = None
    clips: Clips = Clips()
    scale: ScalerFacts | None = None
    optimizer: int | None = None
    losses: Sequence[Any] = ()
    lr: Any = None
    kept_gradients: Any = None
    origin: tuple[str, str] | None = None
    logits: Mapping[str, Any] = {}
    logged: Mapping[str, Any] = {}

    @property
    def late(self) -> bool:
        """Whether the numbers are known only after a copy from a device."""
        return self.gradients.late


class Event(NamedTuple):
    """An event written after a step.

    Attributes:
        number: The number of the step.
        lines: A function that makes the event's lines from the record's parameters and `numbers`.
        numbers: Numbers, or tensors until they have been read.
        late: Whether `numbers` holds tensors on a device.
    """

    number: int
    lines: "Callable[[ParameterTable, Sequence[Any]], Iterable[Line]]"
    numbers: Sequence[Any] = ()
    late: bool = False


def scale_update(index: int, before: Tensor, after: Tensor) -> Event:
    """Return the event of a loss scale before and after its update; it writes a line only if the scale fell."""

    def lines(table: ParameterTable, numbers: Sequence[Any]) -> Iterable[Line]:
        del table
        old, new = map(float, numbers)
        message = f"the loss scale fell from {old:g} to {new:g}: gradients overflowed, a step was skipped"
        advice = "a few of these are normal; a scale that keeps falling is not"
        line = {"t": "event", "i": index, "kind": "amp_skip", "severity": "info", "message": message, "advice": advice}
        return [line] if new < old else []

    return Event(index, lines, [before, after], late=not after.is_cpu)


def setup_event(
    kind: Kind,
    index: int,
    value: float,
    optimizer: int | None = None,
    named: Mapping[str, Tensor] | None = None,
    *,
    harmless: bool,
) -> Event:
    """Return the event of a fault in the set-up of the training loop.

    Args:
        kind: The kind of fault, from `loop_setup`.
        index: The number of the step.
        value: The number of steps that showed the fault.
        optimizer: The index of the optimizer, if the script has several.
        named: The affected parameters by name, each with a flag tensor that is true if its values did not change; the
            others are left out. None for all parameters of ``optimizer``.
        harmless: Whether the set-up may be intended.
    """
    unchanged = [] if named is None else [torch.stack(list(named.values()))]

    def lines(table: ParameterTable, numbers: Sequence[Any]) -> Iterable[Line]:
        if named is None:
            names = table.names_of(optimizer)
        else:
            names = [name for name, same in zip(named, _numbers(numbers[0]), strict=True) if same]
        if not names and named is not None:
            return []
        episode = setup_episode(kind, index, names, value, harmless=harmless)
        episode.optimizer = optimizer
        return [event_line(episode.finding(), index)]

    return Event(index, lines, unchanged, late=bool(unchanged) and not unchanged[0].is_cpu)


def recovery(index: int, event: RecoveryEvent, optimizer: int | None) -> Event:
    """Return the event of a recovery from spikes; ``optimizer`` is the optimizer's index if there are several."""
    line = {
        "t": "event",
        "i": index,
        "kind": event.kind,
        "severity": "warning" if event.kind == "rolled_back" else "info",
        "message": event.message,
        "lost": event.lost,
        "recovery": event.recovery,
        "slowed_down": event.slowed_down or None,
        "optimizer": optimizer,
    }
    return Event(index, lambda *_: [line])


class ParameterTable:
    """The parameters of a record, in the order of every per-tensor array.

    Args:
        params: The ``params`` of ``meta``.

    Attributes:
        names: The names of the parameters.

    Example:
        >>> table = ParameterTable([{"name": "a"}, {"name": "b"}, {"name": "c", "optimizer": 1}])
        >>> table.array([0], [2.5]), table.absent(0, [0])
        ([2.5, 0.0, 0.0], [1])
    """

    def __init__(self, params: Sequence[Mapping[str, Any]] = ()) -> None:
        self.names = [parameter["name"] for parameter in params]
        self._of: dict[int, list[int]] = {}
        self._everywhere = array("q", range(len(params)))
        for place, parameter in enumerate(params):
            self._of.setdefault(parameter.get("optimizer", 0), []).append(place)

    def array(self, places: Sequence[int], values: Norms, missing: float = 0.0) -> list[float]:
        """Return one number for each parameter: ``values`` at the indices ``places``, ``missing`` elsewhere.

        A value with the index -1 is dropped. A parameter without a value does not keep an earlier step's number, which
        would make a layer without gradients look alive.
        """
        if places == self._everywhere:
            return [*_numbers(values)]
        found = [missing] * len(self.names)
        for place, value in zip(places, _numbers(values), strict=True):
            if place >= 0:
                found[place] = value
        return found

    def names_of(self, optimizer: int | None) -> list[str]:
        """Return the names of an optimizer's parameters; None means the only optimizer."""
        return [self.names[place] for place in self._of.get(optimizer or 0, ())]

    def absent(self, optimizer: int | None, places: Sequence[int]) -> list[int]:
        """Return the indices of an optimizer's parameters missing in ``places``; None means the only optimizer."""
        own = self._of.get(optimizer or 0, ())
        if len(places) == len(own) and -1 not in places:  # the usual case
            return []
        measured = set(places)
        return [place for place in own if place not in measured]


Entry = StepMeasurement | Event


THINNED_FROM = 50_000
"""The step from which the norms of each parameter are written half as often; a quarter as often from its double."""


def lines_of(step: Entry, table: ParameterTable, every: int | None) -> Iterator[Line]:
    """Yield the ``step`` line, and the ``tensors`` and ``event`` lines that are due.

    Args:
        step: The step or the event, with its numbers on the host.
        table: The parameters, in the order of ``meta``.
        every: The interval of ``tensors`` lines, in steps of the optimizer. None chooses an interval of about 200
            bytes a step, and a longer one from `THINNED_FROM` on: a million steps of a small model have 156,250 of
            these lines.
    """
    lines = step.lines(table, step.numbers) if isinstance(step, Event) else _lines_of_step(step, table, every)
    yield from map(known_fields, lines)


def _lines_of_step(step: StepMeasurement, table: ParameterTable, every: int | None) -> Iterator[Line]:
    step, user_max_norm = _with_user_clip(step)
    norms, places = _numbers(step.gradients.norms), step.gradients.places
    line = _step_line(step, norms, user_max_norm)
    yield line
    every = every or max(1, len(table.names) // 20) << (step.turn // THINNED_FROM).bit_length()
    due = step.turn % every == 0 or step.diagnostics is not None
    if due and max(places, default=-1) >= 0:  # without places, the norms belong to no named parameter
        # every second line is enough: each step line has the relative update of all parameters
        moves = step.diagnostics is not None or step.turn % (2 * every) == 0
        yield _tensors_line(step, norms, table, step.moved if moves else None)
    finite = (step.gradients.total is None and math.isfinite(line["norm"])) or all(map(math.isfinite, norms))
    if not finite and not _flag(step.skip.by_scaler):  # a step that the scaler skips is an amp_skip event instead
        yield _nonfinite_line(step, norms, table.names)


def _with_user_clip(step: StepMeasurement) -> tuple[StepMeasurement, Any]:
    """Return the step with the clip that the user logged, and the threshold of the script's last clip.

    If the user logged the norm before their own clip, the norm measured at the step is the norm after that clip.
    """
    clips, norm, max_norm = step.clips, step.logged.get("norm"), step.logged.get("max_norm")
    if clips.script or clips.guard is not None:  # an observed clip has more facts than a logged one
        return step, clips.script[-1].threshold if clips.script and not clips.act_apart else None
    if norm is None:
        return step, max_norm
    before, after = float(norm), step.gradients.whole
    gradients = step.gradients._replace(total=before)
    if math.isfinite(before) and math.isfinite(after):
        gradients = gradients._replace(post=after)
        if after > 0:  # a norm clip multiplies all gradients by the same number
            gradients = gradients._replace(norms=[norm * (before / after) for norm in _numbers(gradients.norms)])
    clips = clips._replace(script=[ScriptClip("norm", max_norm, before)])
    return step._replace(gradients=gradients, clips=clips), max_norm


def _tensors_line(step: StepMeasurement, norms: list[float], table: ParameterTable, moved: Moved | None) -> Line:
    places, found = step.gradients.places, step.diagnostics
    line: Line = {"t": "tensors", "i": step.number, "optimizer": step.optimizer}
    line["norm"] = table.array(places, norms)
    line["absent"] = table.absent(step.optimizer, places) or None
    if moved is not None and len(moved.counts) == len(places):
        line["moved"] = _root_mean_squares(moved.update, moved.counts, places, table)
        line["rates"] = [_number(rate) for rate in moved.rates] if len(moved.rates) > 1 else None
        line["added"] = _root_mean_squares(moved.added, moved.sizes, places, table) if len(moved.added) else None
    if found is not None:
        line["weight"] = table.array(places, found.weight)
        line["update"] = None if found.update is None else table.array(places, found.update)
    return line


def _root_mean_squares(
    norms: Norms, counts: Sequence[int], places: Sequence[int], table: ParameterTable
) -> list[float | None]:
    """Return each parameter's root mean square, from the norm and count of its elements; None if it is unknown."""
    known = zip(_numbers(norms), counts, strict=True)
    means = [norm / math.sqrt(count) if count else math.nan for norm, count in known]
    return [None if math.isnan(mean) else mean for mean in table.array(places, means, math.nan)]


def _update_of(moved: Moved | None) -> float | None:
    """Return the norm of the step's change over the norm of the weights, both estimated from the samples."""
    if moved is None:
        return None
    update, weight = (
        math.hypot(*map(operator.mul, _numbers(norms), moved.roots)) for norms in (moved.update, moved.weight)
    )
    return update / weight if 0 < weight < math.inf and update < math.inf else None


def _step_line(step: StepMeasurement, norms: Sequence[float], user_max_norm: Any) -> Line:
    total = step.gradients.whole
    clips, coefficient, within = _clips_of(step, total)
    binding = min(
        clips, key=lambda clip: math.inf if clip.coefficient is None else clip.coefficient, default=ScriptClip()
    )
    is_scaled = step.scale is not None and step.scale.is_on
    attention = max(step.logits, key=lambda name: float(step.logits[name]), default=None)
    return {
        "t": "step",
        "i": step.number,
        "wall": step.wall,
        "loss": sum(map(float, step.losses)) / len(step.losses) if step.losses else None,
        "backwards": len(step.losses) if len(step.losses) > 1 else None,
        "origin": None if step.origin is None else list(step.origin),
        "lr": _number(step.lr),
        "norm": total,
        "post_norm": None if coefficient is None else total * (within if step.gradients.are_after else coefficient),
        "coefficient": coefficient,
        "threshold": None if step.clips.act_apart else binding.threshold,
        "rule": binding.rule or None,
        "clips": [[clip.rule, clip.threshold, clip.coefficient] for clip in clips] if len(clips) > 1 else None,
        "clips_disjoint": _flag(_are_disjoint(step.clips)),
        "user_max_norm": _number(user_max_norm),
        "amp_scale": None if step.scale is None else _number(step.scale.factor),
        "skipped": _flag(step.skip.by_scaler) or _flag(step.skip.by_guard),
        "spike": _flag(step.skip.spike),
        "update": _update_of(step.moved),
        "over_rule": None if step.moved is None else _finite(step.moved.over_rule),
        "logit": None if attention is None else float(step.logits[attention]),
        "logit_of": attention,
        "nonfinite": 0 if total < math.inf else sum(not math.isfinite(n) for n in norms) or 1,
        "top": _dominant(step.gradients.places, norms, total),
        "optimizer": step.optimizer,
        "scaled_clip": _flag(is_scaled and any([clip.rule in FIXED for clip in step.clips.script])),
        "kept_gradients": _flag(step.kept_gradients),
        **{name: float(value) for name, value in step.logged.items() if name not in _USER_CLIP},
    }


def _clips_of(step: StepMeasurement, total: float) -> tuple[list[ScriptClip], float | None, float]:
    """Return the clips of a step and their coefficients.

    Returns:
        The clips that acted: the script's own, the observer's, the guard's; their total coefficient, None if it is
        unknown; and the coefficient of the observer's and the guard's clip, which act on the measured gradients.
    """
    if not any(step.clips):  # the usual case
        return [], None, 1.0
    of_script, apart, post = step.clips.script, step.clips.act_apart, step.gradients.post
    clips = [
        clip._replace(threshold=_finite(clip.threshold), coefficient=_of_clip(clip, total, alone=len(of_script) == 1))
        for clip in of_script
    ]
    inner = without_none((step.clips.applied, step.clips.guard))
    known = math.prod(clip.coefficient for clip in clips if clip.coefficient is not None)
    unknown = [k for k, clip in enumerate(clips) if clip.coefficient is None]
    coefficient = None
    if clips and not unknown and (known >= 1 or (post is None and not apart)):
        coefficient = known  # exact; the ratio of two measured norms has rounding errors
    elif clips and post is not None:
        coefficient = min(1.0, float(post) / total) if total > 0 else 1.0
    if coefficient is not None and len(unknown) == 1 and known > 0 and not apart:
        own = min(1.0, coefficient / known)
        if len(clips) > 1 and own > 1 - ROUNDING:
            own, coefficient = 1.0, known
        if not (step.clips.reach and inner):  # a clip of a part of the gradients has no factor of all gradients
            clips[unknown[0]] = clips[unknown[0]]._replace(coefficient=own)
    within = 1.0
    for clip in inner:
        own = _number(clip.coefficient)
        clips.append(clip._replace(threshold=_finite(clip.threshold), coefficient=own))
        coefficient = own if coefficient is None or own is None else own * coefficient
        within *= 1.0 if own is None else own
    if not math.isfinite(total):
        return [clip._replace(coefficient=None) for clip in clips], None, within
    return clips, coefficient, within


def _are_disjoint(clips: Clips) -> bool:
    """Return whether several clips acted on disjoint sets of parameters."""
    if not clips.act_apart or clips.applied is not None or clips.guard is not None:  # these two act on all gradients
        return False
    return len(set().union(*clips.reach)) == sum(len(set(places)) for places in clips.reach)


def _finite(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _of_clip(clip: ScriptClip, total: float, alone: bool) -> float | None:
    """Return the coefficient of a script's clip, if it reported the coefficient or its norm, or is ``alone``."""
    coefficient, norm, threshold = _number(clip.coefficient), _number(clip.norm), _number(clip.threshold)
    if coefficient is not None:
        return coefficient
    if clip.rule != "norm" or threshold is None:
        return None
    norm = total if norm is None and alone else norm
    return None if norm is None or not math.isfinite(norm) else min(1.0, threshold / (norm + EPSILON))


def _dominant(places: Sequence[int], norms: Sequence[float], total: float) -> list[float] | None:
    """Return the parameter with the largest share of the squared norm, and that share."""
    if not norms or not 0 < total < math.inf:
        return None
    norm = max(norms)
    place = places[len(norms) - 1 - norms[::-1].index(norm)]  # the last of several equal norms
    return [place, (norm / total) ** 2] if place >= 0 else None


def _nonfinite_line(step: StepMeasurement, norms: Sequence[float], names: Sequence[str]) -> Line:
    bad = [place for place, norm in zip(step.gradients.places, norms, strict=True) if not math.isfinite(norm)]
    shown = listed([names[place] if place >= 0 else "unnamed" for place in bad], _NAMED_AT_MOST)
    return {
        "t": "event",
        "i": step.number,
        "kind": "nonfinite",
        "severity": "error",
        "message": f"gradients of {shown} are not finite",
        "advice": "find the operation: `gradguard explain nan`",
        "params": [names[place] for place in bad if place >= 0],
        "optimizer": step.optimizer,
    }


def _numbers(values: Norms) -> list[float]:
    return values.tolist() if isinstance(values, Tensor) else values


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _flag(value: Any) -> bool | None:
    return True if _number(value) else None


_USER_CLIP = ("norm", "max_norm")

OWN_NAMES = frozenset(_step_line(StepMeasurement(0, GradientNorms([0.0], [0])), [0.0], None))
"""The fields of a ``step`` line."""

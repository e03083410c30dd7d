"""A guard's use of a spike detector: it gathers the loss and the norms of a step, and leaves out a spike."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from gradguard.arguments import check_number
from gradguard.distributed.processes import rank_and_size, sum_over
from gradguard.distributed.redistribute import whole_of
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.spikes.detector import SpikeDetector
from gradguard.spikes.spike_policy import Detector
from gradguard.tensors.host_copy import is_captured, refuse_capture
from gradguard.tensors.layout import are_readable, move, wide_dtype

_MOST_KINDS = 64


@dataclass(frozen=True, slots=True)
class _StepLosses:
    """The losses recorded for the next step, on this process.

    Attributes:
        sums: The sums of weight * loss and of weight; None without a loss.
        kinds: The kinds of these losses.
        are_captured: Whether a CUDA graph was being recorded when the last was.
    """

    sums: Tensor | None = None
    kinds: frozenset[str] = frozenset()
    are_captured: bool = False

    @property
    def kind(self) -> str:
        return " + ".join(sorted(self.kinds))


class SkipSpikes:
    r"""Leave out an optimizer step whose loss or gradient norm is a spike: ``Guard(..., spikes=SkipSpikes())``.

    The signals are the loss, where ``guard.record_loss(loss)`` records it, and the norm of all gradients, unscaled and
    before the clip; under `Groups` the norm of each group. Over all processes the loss is the weighted mean

    .. math:: \bar L = \sum_{r, i} w_{r i} L_{r i} \Big/ \sum_{r, i} w_{r i}

    over ranks r and micro-batches i, and each norm is the mean over the ranks, on which it is the same number already
    up to rounding: one all-reduce of a few numbers, so that all ranks decide by the same bits, if their detectors have
    the same history: load a state, or reset it, on all ranks or on none (nothing compares them). Pipeline stages that
    are named to the guard (``process_group=``, ``mesh=``) have one norm; of others it is the mean of the stages' norms.
    Processes that know the loss record it. Its weight is the step's: one of few samples is judged by a wider scale.

    **Kinds.** Steps of several tasks or players, whose losses differ in size, are kept apart by
    ``guard.record_loss(loss, kind="rare task")``: each is compared with its own past only, from its own warm-up on. A
    step whose micro-batches are of several kinds is of a kind of its own; one whose processes record different kinds,
    or of which some record none, has no kind. A process that does not know the loss records the kind by
    ``guard.record_loss(0.0, weight=0, kind=...)``.

    **Guarantees.** Those of the detector, and:

    - A step that is not finite is not judged and leaves no trace.
    - With ``act=True`` all ranks treat such a step as not finite, also a rank whose own gradients are finite.
    - A loss that is NaN or infinite although all gradients are finite is reported once, as a RuntimeWarning. On an
      accelerator the warning comes some steps late: the host never waits for it.

    **Updates.** With ``updates=True`` the last signal is the norm of what the step takes from the weights: Adam's
    update may spike where neither loss nor gradient does. Where the optimizer is one of `torch.optim` that treats each
    tensor by itself (Adam, AdamW, SGD, Muon, ...), the rule multiplies all gradients by one number, and this process
    holds all of them, the step is rehearsed on copies, tensor by tensor, and a spike never happens. Elsewhere (other
    optimizers and rules, closures, sharded weights) the step is judged after it was taken: the host waits for the
    verdict, and a spike is undone bit by bit, from copies of weights and state that are made before each step.

    Args:
        detector: The rule that recognises a spike; None for ``SpikeDetector()``. It belongs to one guard.
        updates: Whether the norm of the update is a signal.
        act: Whether spikes are skipped; if not, they are only reported, by ``detector.last`` and to monitors.
        process_group: The processes that train this model together; None for all that `torch.distributed` joins.
            Processes that train models of their own name a group of their own.

    Attributes:
        detector: The detector.
        updates: As given.
        act: As given; it may be changed at any time, on all processes at once.
        changed: Whether weights of any process changed between the step judged last and the one before, outside of
            the optimizer; 0-dim bool where only the device knows. `SpikeRecovery` looks for that; else it is False.
        nonfinite: Whether a gradient of any process was not finite on the step judged last; 0-dim bool, None if there
            is one process only.
        nonfinite_loss: Whether the loss of the step judged last is NaN or infinite and all gradients are finite, on all
            processes; 0-dim bool where only the device knows.

    Raises:
        InvalidTypeError: If ``detector`` is not a detector.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=4))
        >>> guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=spikes)
        >>> for size in [1.0, 1.0, 1.0, 1.0, 50.0]:
        ...     optimizer.zero_grad()
        ...     guard.record_loss(model(torch.full((1, 1), size)).square().mean()).backward()
        ...     optimizer.step()
        >>> guard.last_skip, guard.skipped_steps
        ('spike', 1)
    """

    def __init__(
        self, detector: Detector | None = None, *, updates: bool = False, act: bool = True, process_group: Any = None
    ) -> None:
        self.detector = SpikeDetector() if detector is None else detector
        if not isinstance(self.detector, Detector):
            given = f"the class {detector.__name__}" if isinstance(detector, type) else type(detector).__name__
            raise InvalidTypeError(f"detector is {given}: expected a detector, such as SpikeDetector().")
        self.updates, self.act = bool(updates), bool(act)
        self.nonfinite: Tensor | None = None
        self.changed: Tensor | bool = False
        self.nonfinite_loss: Tensor | bool = False
        self._group = process_group
        self._losses = _StepLosses()
        self._kinds = [""]  # those that have a scale of their own, in the order of the detector's signals
        self._counts = torch.zeros(2, dtype=torch.int64, device="cpu")  # spikes seen, and spikes skipped

    def __repr__(self) -> str:
        """Return the call that makes an equal object; the process group is left out."""
        updates = ", updates=True" if self.updates else ""
        return f"SkipSpikes({self.detector!r}{updates}{'' if self.act else ', act=False'})"

    def record_loss(self, loss: Tensor | float, weight: float | Tensor = 1.0, kind: str | None = None) -> None:
        """Record the loss of one micro-batch of the next step.

        Args:
            loss: The mean loss, without a loss scale; one number.
            weight: Its weight in the mean, such as its number of tokens.
            kind: The task or player that it belongs to, where their losses differ in size: each kind of step has a
                scale and a warm-up of its own. None for the kind of all others.

        Raises:
            InvalidTypeError: If ``loss`` or ``weight`` is not a number, or ``kind`` no text.
            InvalidValueError: If ``loss`` has several elements, ``weight`` is negative or not finite, or there are
                more than 64 kinds.
        """
        if kind is not None and not isinstance(kind, str):
            raise InvalidTypeError(
                f"kind={kind!r}: expected text, such as the name of a task, got {type(kind).__name__}."
            )
        value = _one_number("loss", loss, torch.device("cpu"))
        count = move(_one_number("weight", weight, value.device), value.device)
        new = torch.stack([torch.where(count == 0, 0.0, count * value), count])  # the mean of no tokens is NaN
        before = self._losses
        sums = new if before.sums is None else move(before.sums, new.device, new.dtype) + new
        captured = isinstance(loss, Tensor) and is_captured(new.device)
        self._losses = _StepLosses(sums, before.kinds | {kind or ""}, captured)

    def check_captured(self, device: torch.device) -> None:
        """Check that a step in a CUDA graph records its loss there too: else all replays would judge one number.

        Raises:
            UnsupportedGradientError: If one of the two is recorded in a graph and the other is not.
        """
        losses = self._losses
        if losses.sums is None or (captured := is_captured(device)) == losses.are_captured:
            return
        how = "as a tensor on the device, inside torch.cuda.graph(...)" if captured else "after each replay, outside"
        raise UnsupportedGradientError(
            f"the {'step' if captured else 'loss'} is recorded in a CUDA graph and the "
            f"{'loss' if captured else 'step'} is not: each step would be judged by the loss of the first. Call "
            f"guard.record_loss(loss) {how}, before the step."
        )

    def forget_loss(self) -> None:
        """Drop the losses recorded so far: their step is over."""
        self._losses = _StepLosses()

    def _place(self) -> int:
        """Return the number of the scale of the next step; a step of several kinds is of a kind of its own."""
        kind = self._losses.kind
        if kind not in self._kinds:
            if len(self._kinds) > _MOST_KINDS:
                raise InvalidValueError(
                    f"kind={kind!r} would be the {len(self._kinds)}th kind of step: expected the names of a few tasks, "
                    f"at most {_MOST_KINDS}, each of which is judged by its own past. Leave kind= away where steps do "
                    "not differ in size."
                )
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def signal_names(self, norms: Sequence[str]) -> list[str]:
        """Return the names of the detector's signals, in its order.

        Args:
            norms: The names of the norms.
        """
        return [f"{name} of {kind}" if kind else name for kind in self._kinds for name in ("loss", *norms)]

    @torch.no_grad()
    def judge(self, norms: Tensor, bad: Tensor) -> Tensor:
        """Return whether the step is a spike, 0-dim bool on the device of ``norms``; the detector follows.

        Args:
            norms: The unscaled norms before the clip, ``[n]``.
            bad: Whether a gradient is not finite; 0-dim bool. Then the step leaves no trace.

        Raises:
            UnsupportedGradientError: If the step is recorded in a CUDA graph and its loss is not, or the other way
                round.
        """
        if are_readable(norms, bad) and self.is_alone():
            return torch.tensor(self.judge_numbers(norms.tolist(), bool(bad)), dtype=torch.bool, device="cpu")
        self.check_captured(norms.device)
        values, weight, place = self._values(norms, bad)
        self.nonfinite_loss = (weight > 0) & ~values[0].isfinite()  # a step that is not finite weighs NaN
        spike = self._observe(values, weight, place)
        if self._counts.device != spike.device:
            refuse_capture(spike.device, "the count of spikes")
            self._counts = self._counts.to(spike.device)
        self._counted.add_(spike)
        return spike

    def judge_numbers(self, norms: Sequence[float], bad: bool) -> bool:
        """Judge a step as `judge` does, by plain numbers on the CPU, where no other process trains this model."""
        sums = self._losses.sums
        total, weight = (0.0, 0.0) if sums is None else sums.tolist()
        values = [total / weight if weight else math.nan, *(norm or math.nan for norm in norms)]
        self.nonfinite_loss = weight > 0 and not math.isfinite(values[0]) and not bad
        if bad:
            values = [math.nan] * len(values)
        place = self._place()
        self.forget_loss()
        signals = torch.tensor(values, dtype=torch.float64, device="cpu")
        spike = bool(self._observe(signals, weight or math.nan, place))
        if spike:
            self._counted.add_(1)
        return spike

    def _observe(self, values: Tensor, weight: Tensor | float, place: Tensor | int) -> Tensor:
        kinds = len(self._kinds)
        if kinds > 1:
            self.detector.grow(kinds * len(values))
            rows = torch.arange(kinds, device=values.device)[:, None] == place
            values = torch.where(rows, values, torch.nan).flatten()
        return self.detector.observe(values, weight)

    def take_back(self) -> None:
        """Forget the step judged last, which an error has ended; a detector on an accelerator keeps it."""
        verdict = self.detector.last
        if verdict is not None and self.detector.take_back():
            self._counted.sub_(verdict.spike.long())

    @property
    def _counted(self) -> Tensor:
        """The counts that a spike adds to: where spikes are not skipped, only that of the spikes seen."""
        return self._counts if self.act else self._counts[:1]

    def is_alone(self) -> bool:
        """Whether no other process trains this model."""
        return rank_and_size(self._group)[1] == 1

    def _values(self, norms: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """Return the signals of the step, its weight, and the number of its scale: 0 where the ranks' kinds differ."""
        wide = norms.to(wide_dtype(norms.device))
        wide = torch.where(wide == 0, torch.nan, wide)  # no gradients: that tells nothing of the scale
        sums = self._losses.sums
        losses = wide.new_zeros(2) if sums is None else move(sums, wide.device, wide.dtype)
        own = torch.where(bad, torch.nan, torch.cat([losses, wide]))
        place, number = self._place(), crc32(self._losses.kind.encode()) % 2**16
        self.forget_loss()
        flags = torch.stack([_flag(one, own) for one in (bad, self._weights_changed())])
        if self.is_alone():
            self.nonfinite, self.changed = None, flags[1] > 0
            return torch.cat([own[:1] / own[1:2], own[2:]]), own[1], place
        count = rank_and_size(self._group)[1]
        numbers = torch.tensor([number, number**2], dtype=own.dtype, device=own.device)
        added = sum_over(torch.cat([own, flags, numbers]), self._group)
        self.nonfinite, self.changed = added[-4] > 0, added[-3] > 0
        alike = count * added[-1] - added[-2].square() < 0.5 * count
        return torch.cat([added[:1] / added[1:2], added[2:-4] / count]), added[1], torch.where(alike, place, 0)

    def begin(self, step: int) -> None:
        """Begin a step of the guard, counted from 1: the guard calls this before anything else is done."""

    def _weights_changed(self) -> Tensor | bool:
        """Whether the weights of this process have changed outside of the optimizer since the last step."""
        return False

    @property
    def seen(self) -> int:
        """Number of spikes so far, skipped or not; the host waits for an accelerator."""
        return int(self._counts[0])

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped as spikes; the host waits for an accelerator."""
        return int(self._counts[1])

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device``."""
        self.detector.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the detector's state, and the counts."""
        counts = {"seen": self.seen, "skipped": self.skipped}
        return {"detector": self.detector.state_dict(), "kinds": list(self._kinds), **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            InvalidValueError: If ``state_dict`` is not the state of a `SkipSpikes`.
        """
        if set(state_dict) != {"detector", "kinds", "seen", "skipped"}:
            raise InvalidValueError(
                f"this is not the state of a SkipSpikes: expected 'detector', 'kinds', 'seen' and 'skipped', got "
                f"{sorted(state_dict)}. Pass what state_dict() returned."
            )
        self.detector.load_state_dict(state_dict["detector"])
        self._kinds = [*map(str, state_dict["kinds"])]
        counts = [int(state_dict["seen"]), int(state_dict["skipped"])]
        self._counts.copy_(torch.tensor(counts, device="cpu"))  # in place: a captured graph goes on with it
        self.forget_loss()


def _flag(flag: Tensor | bool, like: Tensor) -> Tensor:
    return flag.to(like) if isinstance(flag, Tensor) else torch.full_like(like[0], float(flag))


def _one_number(name: str, value: Tensor | float, device: torch.device) -> Tensor:
    """Return ``value`` as a 0-dim tensor of a wide dtype, where it is; on ``device`` if it is a Python number."""
    if not isinstance(value, Tensor):
        return torch.full((), _in_range(name, check_number(name, value)), dtype=wide_dtype(device), device=device)
    whole = whole_of(value.detach(), "record a loss")
    if whole.numel() != 1 or whole.is_complex():
        raise InvalidValueError(
            f"{name} is a tensor of shape {list(whole.shape)} and {whole.dtype}: expected one real number. Pass the "
            "mean, loss.mean(), and what it counts as weight=."
        )
    if are_readable(whole):
        _in_range(name, whole.item())
    return whole.reshape(()).to(wide_dtype(whole.device))


def _in_range(name: str, number: float) -> float:
    if name == "weight" and not 0 <= number < torch.inf:
        raise InvalidValueError(f"weight={number!r}: expected a finite number >= 0, such as a number of tokens.")
    return number

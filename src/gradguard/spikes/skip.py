"""`SkipSpikes`: gather the loss and norms of a step for a spike detector, on behalf of a guard that skips spikes."""

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
        are_captured: Whether a CUDA graph was being captured when the last loss was recorded.
    """

    sums: Tensor | None = None
    kinds: frozenset[str] = frozenset()
    are_captured: bool = False

    @property
    def kind(self) -> str:
        return " + ".join(sorted(self.kinds))


class SkipSpikes:
    r"""Skip an optimizer step whose loss or gradient norm is a spike: ``Guard(..., spikes=SkipSpikes())``.

    The signals are the loss, if ``guard.record_loss(loss)`` records it, and the norm of all gradients, unscaled and
    before the clip; under `Groups` the norm of each group. Over all processes the loss is the weighted mean

    .. math:: \bar L = \sum_{r, i} w_{r i} L_{r i} \Big/ \sum_{r, i} w_{r i}

    over ranks r and micro-batches i. Each norm is the mean over the ranks, where it is already the same number up to
    rounding. One all-reduce of a few numbers makes all ranks decide by the same bits, provided that their detectors
    have the same history. Nothing compares the histories: load or reset a state on all ranks or on none. Pipeline
    stages that the guard is given (``process_group=``, ``mesh=``) have one norm; otherwise the signal is the mean of
    the stages' norms. Processes that compute the loss record it. Its weight is the step's weight: a step of few samples
    is judged by a wider scale.

    **Kinds.** Steps of several tasks or players may have losses of different size. Separate them by
    ``guard.record_loss(loss, kind="rare task")``: each kind is compared with its own past only, after its own warm-up.
    A step whose micro-batches are of several kinds is a kind of its own. If its processes record different kinds, or
    only some record one, the step is judged as one of the default kind. A process that does not compute the loss
    records the kind by ``guard.record_loss(0.0, weight=0, kind=...)``.

    **Guarantees.** Those of the detector, and:

    - A step that is not finite is not judged and leaves the history unchanged.
    - With ``act=True`` all ranks treat such a step as not finite, even a rank whose own gradients are finite.
    - A loss that is NaN or infinite although all gradients are finite is reported once, as a RuntimeWarning. On an
      accelerator the warning comes some steps late: the host never waits for it.

    **Updates.** With ``updates=True`` the last signal is the norm of the update, the step's change of the weights:
    Adam's update may spike although neither loss nor gradient does. The update is computed on copies first, tensor by
    tensor, and a spike never happens, if three conditions hold: the optimizer is one of `torch.optim` that treats each
    tensor by itself (Adam, AdamW, SGD, Muon, ...), the rule multiplies all gradients by one number, and this process
    holds all of them. Otherwise (other optimizers and rules, closures, sharded weights) the step is judged after it
    was taken. The host then waits for the verdict, and a spike is undone bit by bit from copies of weights and state
    that are made before each step.

    Args:
        detector: The rule that recognises a spike; None for ``SpikeDetector()``. It belongs to one guard.
        updates: Whether the norm of the update is a signal.
        act: Whether spikes are skipped. If not, they are only reported, by ``detector.last`` and to monitors.
        process_group: The processes that train this model together; None for all processes of `torch.distributed`.
            Processes that train separate models each pass their own group.

    Attributes:
        detector: The detector.
        updates: The argument ``updates``.
        act: The argument ``act``; it may be changed at any time, on all processes at once.
        changed: Whether weights of any process were changed outside of the optimizer between the last two judged
            steps; 0-dim bool if only the device has it. `SpikeRecovery` checks for such changes; otherwise it is False.
        nonfinite: Whether a gradient of any process was not finite on the last judged step; 0-dim bool, None with a
            single process.
        nonfinite_loss: Whether the loss of the last judged step is NaN or infinite although all gradients on all
            processes are finite; 0-dim bool if only the device has it.

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
        self._kinds = [""]  # kinds with a scale of their own, in the order of the detector's signals
        self._counts = torch.zeros(2, dtype=torch.int64, device="cpu")  # spikes observed, and spikes skipped

    def __repr__(self) -> str:
        """Return the call that makes an equal object, without the process group."""
        updates = ", updates=True" if self.updates else ""
        return f"SkipSpikes({self.detector!r}{updates}{'' if self.act else ', act=False'})"

    def record_loss(self, loss: Tensor | float, weight: float | Tensor = 1.0, kind: str | None = None) -> None:
        """Record the loss of one micro-batch of the next step.

        Args:
            loss: The mean loss, without a loss scale; one number.
            weight: The weight of the loss in the mean, such as its number of tokens.
            kind: The task or player of this loss, if their losses differ in size: each kind of step has a scale and a
                warm-up of its own. None for the default kind.

        Raises:
            InvalidTypeError: If ``loss`` or ``weight`` is not a number, or ``kind`` is not a string.
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
        """Check that loss and step are both inside a CUDA graph or both outside: else replays would reuse one loss.

        Raises:
            UnsupportedGradientError: If one of the two is captured in a graph and the other is not.
        """
        losses = self._losses
        if losses.sums is None or (captured := is_captured(device)) == losses.are_captured:
            return
        how = "as a tensor on the device, inside torch.cuda.graph(...)" if captured else "after each replay, outside"
        raise UnsupportedGradientError(
            f"the {'step' if captured else 'loss'} is recorded in a CUDA graph but the "
            f"{'loss' if captured else 'step'} is not: each step would be judged by the loss of the first. Call "
            f"guard.record_loss(loss) {how}, before the step."
        )

    def forget_loss(self) -> None:
        """Drop the losses recorded so far, after their step."""
        self._losses = _StepLosses()

    def _place(self) -> int:
        """Return the index of the next step's kind; a step of several kinds is a kind of its own."""
        kind = self._losses.kind
        if kind not in self._kinds:
            if len(self._kinds) > _MOST_KINDS:
                raise InvalidValueError(
                    f"kind={kind!r} would be the {len(self._kinds)}th kind of step: expected the names of a few tasks, "
                    f"at most {_MOST_KINDS}, each of which is judged by its own past. Omit kind= if steps do not "
                    "differ in size."
                )
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def signal_names(self, norms: Sequence[str]) -> list[str]:
        """Return the names of the detector's signals, in the detector's order.

        Args:
            norms: The names of the norms.
        """
        return [f"{name} of {kind}" if kind else name for kind in self._kinds for name in ("loss", *norms)]

    @torch.no_grad()
    def judge(self, norms: Tensor, bad: Tensor) -> Tensor:
        """Return whether the step is a spike, a 0-dim bool on ``norms``' device, and update the detector.

        Args:
            norms: The unscaled norms before the clip, ``[n]``.
            bad: Whether a gradient is not finite; 0-dim bool. Such a step leaves the history unchanged.

        Raises:
            UnsupportedGradientError: If only one of the step and its loss is captured in a CUDA graph.
        """
        if are_readable(norms, bad) and self.is_alone():
            return torch.tensor(self.judge_numbers(norms.tolist(), bool(bad)), dtype=torch.bool, device="cpu")
        self.check_captured(norms.device)
        values, weight, place = self._values(norms, bad)
        self.nonfinite_loss = (weight > 0) & ~values[0].isfinite()  # the weight of a step that is not finite is NaN
        spike = self._observe(values, weight, place)
        if self._counts.device != spike.device:
            refuse_capture(spike.device, "the count of spikes")
            self._counts = self._counts.to(spike.device)
        self._counted.add_(spike)
        return spike

    def judge_numbers(self, norms: Sequence[float], bad: bool) -> bool:
        """Judge a step like `judge`, from Python numbers on the CPU, if no other process trains this model."""
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
        """Forget the last judged step, which an error has ended; a detector on an accelerator keeps it."""
        verdict = self.detector.last
        if verdict is not None and self.detector.take_back():
            self._counted.sub_(verdict.spike.long())

    @property
    def _counted(self) -> Tensor:
        """The counts to which a spike adds 1: spikes that are not skipped only count as seen."""
        return self._counts if self.act else self._counts[:1]

    def is_alone(self) -> bool:
        """Tell whether no other process trains this model."""
        return rank_and_size(self._group)[1] == 1

    def _values(self, norms: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """Return the step's signals, its weight, and the index of its kind: 0 if the ranks' kinds differ."""
        wide = norms.to(wide_dtype(norms.device))
        wide = torch.where(wide == 0, torch.nan, wide)  # a norm of 0 means no gradients, and tells nothing of the scale
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
        """Begin a step of the guard, counted from 1; the guard calls this before any other method."""

    def _weights_changed(self) -> Tensor | bool:
        """Return whether the weights of this process were changed outside of the optimizer since the last step."""
        return False

    @property
    def seen(self) -> int:
        """Number of spikes so far, skipped or not; a host sync on an accelerator."""
        return int(self._counts[0])

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped as spikes; a host sync on an accelerator."""
        return int(self._counts[1])

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device``."""
        self.detector.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the detector's state and of the counts."""
        counts = {"seen": self.seen, "skipped": self.skipped}
        return {"detector": self.detector.state_dict(), "kinds": list(self._kinds), **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

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
        self._counts.copy_(torch.tensor(counts, device="cpu"))  # in place: a captured graph keeps using this memory
        self.forget_loss()


def _flag(flag: Tensor | bool, like: Tensor) -> Tensor:
    return flag.to(like) if isinstance(flag, Tensor) else torch.full_like(like[0], float(flag))


def _one_number(name: str, value: Tensor | float, device: torch.device) -> Tensor:
    """Return ``value`` as a 0-dim tensor of a wide dtype on its own device, or on ``device`` if it is a number."""
    if not isinstance(value, Tensor):
        return torch.full((), _in_range(name, check_number(name, value)), dtype=wide_dtype(device), device=device)
    whole = whole_of(value.detach(), "record a loss")
    if whole.numel() != 1 or whole.is_complex():
        raise InvalidValueError(
            f"{name} is a tensor of shape {list(whole.shape)} and {whole.dtype}: expected one real number. Pass the "
            "mean, loss.mean(), and its number of samples or tokens as weight=."
        )
    if are_readable(whole):
        _in_range(name, whole.item())
    return whole.reshape(()).to(wide_dtype(whole.device))


def _in_range(name: str, number: float) -> float:
    if name == "weight" and not 0 <= number < torch.inf:
        raise InvalidValueError(f"weight={number!r}: expected a finite number >= 0, such as a number of tokens.")
    return number

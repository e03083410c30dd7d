"""How a guard handles finite spikes: `SkipSpikes` judges each step, and the clipper forgets a skipped one."""

import warnings
from typing import Any

import torch
from torch import Tensor

from gradguard.clip.clipper import Clipper, ClipResult
from gradguard.clip.guard_counts import LateReader
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.spikes.skip import SkipSpikes
from gradguard.tensors.layout import move, wide_dtype


class SpikeWatch:
    """Judges each step of one guard once, and restores the clipper's state if the step is skipped.

    Args:
        spikes: The guard's argument; with None the object does nothing.
        clipper: The guard's clipper.
    """

    def __init__(self, spikes: SkipSpikes | None, clipper: Clipper) -> None:
        self._spikes, self._clipper = spikes, clipper
        self._before: dict[str, Any] = {}
        """The clipper's state before the running step; empty if spikes are not skipped, or no step is running."""
        self._is_judged = False  # whether the detector has judged the running step
        self._late = LateReader(self._tell_nonfinite_loss)
        self._was_told = False

    def begin(self, step: int, in_backward: bool) -> None:
        """Begin a step, before its clip is decided.

        Args:
            step: The number of the real step, from 1.
            in_backward: Whether it runs inside a backward pass.

        Raises:
            UnsupportedGradientError: If the step runs inside a backward pass.
        """
        if self._spikes is None:
            return
        if in_backward:
            raise UnsupportedGradientError(
                "the optimizer steps inside a backward pass, where neither the loss of the step nor the norm of all "
                "gradients is known yet, so no spike can be detected. Step after backward(), or omit spikes=."
            )
        self._spikes.begin(step)
        self._before, self._is_judged = self._clipper.state_dict() if self._spikes.act else {}, False

    def judge(self, result: ClipResult, bad: Tensor, evaluation: int, update: Tensor | None) -> Tensor | None:
        """Return whether the step is a spike to be skipped; None if spikes are not skipped.

        Args:
            result: The norms that the clipper has measured.
            bad: Whether a gradient is non-finite, or overflowed; 0-dim bool.
            evaluation: The number of the closure's evaluation in this step. Only the first is judged; later ones belong
                to a line search.
            update: How far the step moves the weights; None if that is no signal.

        Returns:
            0-dim bool.
        """
        if self._spikes is None:
            return None
        if evaluation > 0:
            self._spikes.forget_loss()
            return None
        norms = [result.norm] if result.group_norms is None else list(result.group_norms.values())
        if update is not None:
            norms.append(move(update, result.norm.device))
        spike = self._spikes.judge(torch.stack([norm.to(wide_dtype(norm.device)) for norm in norms]), bad)
        self._is_judged = True
        if isinstance(found := self._spikes.nonfinite_loss, Tensor):
            self._late.push(found.reshape(1))
        else:
            self._tell_nonfinite_loss([found])
        return spike if self._spikes.act else None

    def _tell_nonfinite_loss(self, found: list[float]) -> None:
        if not found[0] or self._was_told:
            return
        self._was_told = True
        warnings.warn(
            "gradguard: guard.record_loss was given a loss that is NaN or infinite, and all gradients of its step are "
            "finite: the step is judged by the norms alone. Often one sample's loss is not finite and does "
            "not reach the gradients, for example behind a mask; find it with torch.isfinite(loss). Said once.",
            RuntimeWarning,
            stacklevel=2,
        )

    def bad_on_any(self, bad: Tensor) -> Tensor:
        """Return ``bad`` of all processes if `judge` has exchanged it: pipeline stages may have NaN on one alone."""
        if self._spikes is None or self._spikes.nonfinite is None:
            return bad
        return move(self._spikes.nonfinite, bad.device)

    def end(self) -> None:
        """End the step, taken or not."""
        self._before, self._is_judged = {}, False
        if self._spikes is not None:
            self._spikes.forget_loss()

    def break_off(self) -> None:
        """End a step that raised: drop its loss, and restore clipper and detector where possible."""
        self.undo_clipper()
        if self._spikes is not None and self._is_judged:
            self._spikes.take_back()
        self.end()

    def undo_clipper(self, spike: Tensor | bool = True) -> None:
        """Restore the clipper's state from before this step if ``spike`` is true."""
        if self._before and spike is not False:
            before = self._before
            self._clipper.load_state_dict(
                before if spike is True else _chosen(spike, before, self._clipper.state_dict())
            )


def _chosen(old_one: Tensor, old: Any, new: Any) -> Any:
    """Return ``old`` where ``old_one`` is true, else ``new``, without a host sync."""
    if isinstance(new, dict):
        return {key: _chosen(old_one, old.get(key, value), value) for key, value in new.items()}
    if not isinstance(new, Tensor) or old.shape != new.shape:  # the state grew in this step: keep it
        return new
    return torch.where(old_one.to(new.device), old.to(new.device, new.dtype), new)


def check_spikes(spikes: object) -> SkipSpikes | None:
    """Return ``spikes`` if it is a `SkipSpikes` or None.

    Raises:
        InvalidTypeError: If it is anything else.
    """
    if spikes is None or isinstance(spikes, SkipSpikes):
        return spikes
    raise InvalidTypeError(
        f"spikes is {type(spikes).__name__}: expected SkipSpikes(detector), such as SkipSpikes(SpikeDetector())."
    )


def refuse_shared(spikes: SkipSpikes | None, others: list[SkipSpikes | None]) -> None:
    """Check that no other guard feeds the same detector.

    Raises:
        InvalidValueError: If another guard does.
    """
    if spikes is not None and any(other is not None and other.detector is spikes.detector for other in others):
        raise InvalidValueError(
            "this SkipSpikes belongs to the Guard of another optimizer, and its detector has state: two histories "
            "would mix. Make one SkipSpikes(SpikeDetector()) for each Guard."
        )

"""The base of trainers' per-sample clips: the rules they take, other clips they refuse, and their clean-up."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.integrations.one_clip import OnlyClip


class PerSampleClips(OnlyClip):
    """A trainer's callback that clips per sample; each trainer's own callback is a subclass.

    Attributes:
        norm_clipper: The rule.
        clipper: The clipper of the current or the last training; None before it begins.
    """

    norm_clipper: gg.rules.NormClipper
    clipper: gg.PerSampleGradientClipper | None
    _summed: bool  # samples of this optimizer step were accumulated

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "clipper": None, "_summed": False}

    @property
    def _clips(self) -> gg.PerSampleGradientClipper | gg.private.PrivateTraining:
        """The object that clips after each backward and fills in the gradients before each step."""
        assert self.clipper is not None
        return self.clipper

    def _give_back(self) -> None:
        """Give the model back; what was accumulated for a step that did not come is dropped."""
        if self.clipper is not None:
            self.clipper.discard()
            self.clipper.detach()
        self._summed = False


def check_norm_clipper(norm_clipper: object, processes: int = 1) -> None:
    """Raise if it is no rule for samples, or one that would differ between processes.

    Args:
        norm_clipper: The argument of the user.
        processes: How many train together.

    Raises:
        InvalidTypeError: If it is no `gradguard.rules.NormClipper`.
        UnsupportedGradientError: If it learns from the samples of one process, and there are several.
    """
    if not isinstance(norm_clipper, gg.rules.NormClipper):
        raise InvalidTypeError(
            f"norm_clipper: expected a NormClipper such as gg.FlatNormClipper(1.0), got {norm_clipper!r}."
        )
    if processes > 1 and isinstance(norm_clipper, gg.QuantileNormClipper):
        raise UnsupportedGradientError(
            f"QuantileNormClipper counts the samples of one process, so thresholds would differ between {processes} "
            "processes: use gg.FlatNormClipper or gg.AutoNormClipper."
        )


def refuse_other_clips(callback: OnlyClip, callbacks: Iterable[object]) -> None:
    """Raise if another of a trainer's ``callbacks`` clips.

    Args:
        callback: The one that asks.
        callbacks: All of the trainer's.

    Raises:
        InvalidValueError: If there is one.
    """
    others = [type(one).__name__ for one in callbacks if isinstance(one, OnlyClip) and one is not callback]
    if others:
        raise InvalidValueError(
            f"there is a {others[0]} beside the {type(callback).__name__}: one clip would be done after the other. "
            "Leave one of them out; for two rules for whole gradients pass one gradguard.Chain(a, b)."
        )


def undo_division(clipper: gg.PerSampleGradientClipper, loss: Tensor, parts: int) -> None:
    """Take a trainer's division by the number of accumulated batches out of the backward of ``loss``.

    It is part of no sample's own loss. Of shares it is, and stays. Call it with the loss that the trainer divides, or
    has divided.

    Args:
        clipper: Who follows that backward.
        loss: Whose backward is next.
        parts: The number that the trainer divides by.
    """
    if clipper.loss_reduction == "share":
        return
    clipper.loss_divisor = float(parts)
    if parts > 1 and loss.requires_grad:
        loss.register_hook(lambda grad: grad * parts)

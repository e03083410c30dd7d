"""torchtitan: one call in a start script replaces the trainer's clip by gradguard's."""

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import gradguard as gg
from gradguard.errors import InvalidValueError
from gradguard.integrations.guard_job import check_clipper
from gradguard.integrations.versions import require
from gradguard.policies import NonFinitePolicy, check_policy

require("torchtitan", "0.3", "0.4", "torchtitan")

from torchtitan.distributed import utils  # noqa: E402  (the version check comes first, so that its error comes first)

__all__ = ["ReplacedClip", "replace_clip"]


class ReplacedClip:
    """The clip that torchtitan's trainers call instead of their own, once for each step; `replace_clip` creates it.

    Attributes:
        clipper: The rule, or None for a clip of the global norm to the ``max_norm`` of the configuration.
        last: The result of the last clip, if there is a ``clipper``; None before.

    Example:
        >>> import gradguard as gg, torch
        >>> from torchtitan.distributed import utils
        >>> from gradguard.integrations.torchtitan import replace_clip
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> clip = replace_clip(gg.ClipByGlobalNorm(0.5))
        >>> float(utils.clip_grad_norm_(layer.parameters(), 1.0)), bool(clip.last.clipped)  # as the trainer does
        (5.0, True)
        >>> clip.restore()
    """

    def __init__(self, clipper: gg.rules.Clipper | None, nonfinite: NonFinitePolicy, own: Any) -> None:
        self.clipper, self.last = clipper, None
        self._nonfinite: NonFinitePolicy = nonfinite
        self._own = own

    def __call__(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        pp_mesh: Any = None,
        ep_enabled: bool = False,
    ) -> Tensor:
        """Clip with the arguments of torchtitan's ``clip_grad_norm_``; return the norm before the clip."""
        del foreach, ep_enabled  # the norm covers all meshes, whichever exist
        nonfinite = "raise" if error_if_nonfinite else self._nonfinite
        if self.clipper is None:
            return gg.clip_grad_norm_(parameters, max_norm, norm_type, nonfinite=nonfinite, mesh=pp_mesh)
        self.last = self.clipper(parameters, nonfinite=nonfinite, mesh=pp_mesh)
        return self.last.norm

    def restore(self) -> None:
        """Restore torchtitan's own clip. May be repeated."""
        if utils.clip_grad_norm_ is self:
            utils.clip_grad_norm_ = self._own

    def state_dict(self) -> dict[str, Any]:
        """Return the clipper's state as bytes, since a checkpoint requires equal shapes when it is loaded."""
        memory = io.BytesIO()
        torch.save({} if self.clipper is None else self.clipper.state_dict(), memory)
        return {"clipper": memory.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            InvalidValueError: If the state is of another kind of clipper, or only one side has a clipper.
        """
        state = torch.load(io.BytesIO(state_dict["clipper"]), map_location="cpu", weights_only=True)
        if bool(state) != (self.clipper is not None):
            raise InvalidValueError(
                "either the checkpoint or this call of replace_clip has a clipper, and the other has none: "
                "expected the same as in the run that is resumed."
            )
        if self.clipper is not None:
            self.clipper.load_state_dict(state)


def replace_clip(clipper: gg.rules.Clipper | None = None, *, nonfinite: NonFinitePolicy = "propagate") -> ReplacedClip:
    """Let torchtitan's trainers clip with gradguard: one call in your start script, before training.

    torchtitan has no option for a custom clip. Its trainers call ``torchtitan.distributed.utils.clip_grad_norm_``, and
    this call replaces that function in this process. (Actors of ``torchtitan.experiments.rl`` run in their own
    processes: call it there.)

    **Guarantees.**

    * One norm over FSDP, HSDP, tensor and expert parallel meshes and pipeline stages, the same on all processes, in one
      all-reduce after the first step, where torchtitan needs one for each mesh axis and each kind of mesh.
    * Without a ``clipper``: the norm and the scaled gradients are those of torchtitan's own function.

    **Edge cases.**

    =====================================  =========================================================================
    case                                   what happens
    =====================================  =========================================================================
    ``clipper`` is given                   the clipper decides; ``--training.max_norm`` is not used
    called again                           the last call counts
    rules by name (`Groups`)               an error: torchtitan passes its clip parameters without names
    `AdaGC`                                its history is keyed by the position of a parameter
    a norm that is not finite              ``nonfinite`` decides; the step is taken all the same
    no state in the checkpoint             torchtitan's loader names the missing key; exclude it by
                                           ``--checkpoint.exclude_from_loading gradguard``
    =====================================  =========================================================================

    torchtitan's checkpoints save a history if it is one of the trainer's states before training::

        trainer = config.build()
        if config.checkpoint.enable:
            trainer.checkpointer.states["gradguard"] = clip
        trainer.train()

    Args:
        clipper: The rule; None clips to the ``max_norm`` of torchtitan's configuration.
        nonfinite: The policy for gradients that are not finite, as for `gradguard.clip_grad_norm_`.

    Returns:
        The replacement of torchtitan's function; its ``restore()`` undoes the replacement.

    Raises:
        InvalidTypeError: If ``clipper`` is not a clipper.
        InvalidValueError: If ``nonfinite`` is unknown, or ``clipper`` is a `Groups`.

    Example:
        >>> import gradguard as gg
        >>> from gradguard.integrations.torchtitan import replace_clip
        >>> clip = replace_clip(gg.ClipByMedian())  # and then torchtitan's own main(), as in torchtitan/train.py
        >>> clip.restore()

    The replaced function: torchtitan (Liang et al., 2024).
    """
    if clipper is not None:
        check_clipper(clipper)
    if isinstance(clipper, gg.Groups):
        raise InvalidValueError(
            "clipper is a Groups, but torchtitan's trainers pass parameters without names: expected one rule for "
            "all of them, such as gg.ClipByMedian()."
        )
    check_policy(nonfinite)
    now = utils.clip_grad_norm_
    made = ReplacedClip(clipper, nonfinite, now._own if isinstance(now, ReplacedClip) else now)
    utils.clip_grad_norm_ = made
    return made

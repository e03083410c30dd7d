"""Hugging Face Transformers: where a Trainer clips, logs, saves and loads, and the callback that it asks there."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers import trainer as trainer_module
from transformers.trainer_callback import CallbackHandler

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.integrations.adapter import Job, wrap_once
from gradguard.integrations.sample_jobs import PrivateBatches

_ASKED = (
    "training_step",
    "compute_loss",
    "_clip_grad_norm",
    "_get_grad_norm",
    "log",
    "get_train_dataloader",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
"""Methods of the Trainer for which a callback may have one of its own, called by the name with one underscore."""


class TransformersClip(Job, TrainerCallback):
    """A callback that clips in the place of its Trainer, whose methods ask it.

    A subclass is of one of the jobs too, and says who clips (``_clip_grad_norm``, ``_get_grad_norm``), what is logged
    (``_logged``) and what else is refused (``_refuse``).
    """

    state_file: str
    """Where a checkpoint holds the state."""
    _max_grad_norms: Collection[float] | None = (0, TrainingArguments.max_grad_norm)
    """Those of the Trainer beside which it clips: none, and the default, which nobody may have asked for; None: any."""

    _norm: Tensor | None  # what the Trainer is given as the norm of this step, from its clip until its step

    def __init__(self) -> None:
        super().__init__()
        watch_trainers()

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "_norm": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        watch_trainers()  # it may be another process

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make sure that the Trainer has left the gradients alone.

        Raises:
            UnsupportedGradientError: If it has not, or may not have.
        """
        if self._norm is None:
            raise UnsupportedGradientError(
                "the Trainer has not asked gradguard for the norm of this step, so it may have clipped already: its "
                "class seems to have methods _clip_grad_norm and _get_grad_norm of its own. Let them return what "
                f"super() returns, or remove the {type(self).__name__}."
            )

    def _refuse(self, trainer: Trainer) -> None:
        self._refuse_others(trainer.callback_handler.callbacks)
        self._refuse_arguments(trainer.args)

    def _refuse_arguments(self, args: TrainingArguments) -> None:
        if self._max_grad_norms is not None and args.max_grad_norm not in self._max_grad_norms:
            raise InvalidValueError(
                f"TrainingArguments has max_grad_norm={args.max_grad_norm!r}, and there is a {type(self).__name__}: "
                "one clip would be done after the other. Pass max_grad_norm=0 if the callback's clip is what you mean, "
                "or leave the callback out."
            )
        optim = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise UnsupportedGradientError(
                f'optim="{optim}" steps inside backward, one parameter after the other: when a clip could look, there '
                "are no gradients any more. Choose an optimizer that steps after backward, such as "
                '"adamw_torch_fused".'
            )

    def _begins_anew(self, checkpoint: str) -> None:
        """Do what is due where training resumes from a checkpoint without a state."""

    def _after_saving(self, state: dict[str, Any]) -> None:
        """Do what is due when the optimizer has been saved; ``state`` is from before."""

    def _logged(self) -> dict[str, float]:
        return {}

    def _log(
        self, original: Callable[..., Any], trainer: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        if "grad_norm" in logs:
            logs.update(self._logged())
        return original(trainer, logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, original: Callable[..., Any], trainer: Trainer, output_dir: str) -> Any:
        state = self.state_dict()
        done = original(trainer, output_dir)
        if state:
            self._after_saving(state)
            if trainer.args.should_save:
                torch.save(state, Path(output_dir) / self.state_file)
        return done

    def _load_optimizer_and_scheduler(
        self, original: Callable[..., Any], trainer: Trainer, checkpoint: str | None
    ) -> Any:
        done = original(trainer, checkpoint)
        if checkpoint is not None:
            path = Path(checkpoint) / self.state_file
            self._loaded = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
            if not self._loaded:
                self._begins_anew(checkpoint)
        return done


def watch_trainers() -> None:
    """Let every Trainer ask its `TransformersClip`; Trainers without one do as before."""
    wrap_once(Trainer, "train", _train)
    for name in _ASKED:
        wrap_once(Trainer, name, partial(_ask, name))
    for name in ("remove_callback", "pop_callback"):
        wrap_once(CallbackHandler, name, _take_out)
    wrap_once(trainer_module, "skip_first_batches", _skip_first_batches)


def _clips_of(handler: CallbackHandler) -> list[TransformersClip]:
    return [one for one in handler.callbacks if isinstance(one, TransformersClip)]


def _ask(name: str, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    for clip in _clips_of(trainer.callback_handler)[:1]:
        instead = getattr(clip, f"_{name.lstrip('_')}", None)
        if instead is not None:
            return instead(original, trainer, *args, **kwargs)
    return original(trainer, *args, **kwargs)


def _train(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    for clip in _clips_of(trainer.callback_handler):
        clip._refuse(trainer)
        clip._loaded = None  # left by a training that failed before it began
    try:
        return original(trainer, *args, **kwargs)
    finally:
        for clip in _clips_of(trainer.callback_handler):  # on_train_end is not reached by a training that fails
            clip.end()


def _take_out(original: Callable[..., Any], handler: CallbackHandler, *args: Any, **kwargs: Any) -> Any:
    before = list(handler.callbacks)
    done = original(handler, *args, **kwargs)
    for clip in before:
        if isinstance(clip, TransformersClip) and clip._acting and clip not in handler.callbacks:
            handler.callbacks[:] = before
            raise InvalidValueError(
                f"a {type(clip).__name__} was removed while training, which would go on with another clip or with "
                "none. Remove it when train() has returned."
            )
    return done


def _skip_first_batches(original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the batches of a private training alone: it knows itself where in the epoch it goes on."""
    if isinstance(loader, PrivateBatches):
        return loader
    return original(loader, *args, **kwargs)

"""Jobs that clip each sample of a trainer's batches, and jobs that make its training private."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.integrations.adapter import Job, Run


class PerSampleJob(Job):
    """Clip each sample of a trainer's batches; each trainer's own callback is a subclass.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last training; None before it begins.
    """

    clipper: Any
    _clips: Any  # the object that clips after each backward and fills in the gradients before each step
    _summed: bool  # whether samples of this optimizer step were accumulated

    def __init__(self, norm_clipper: gg.rules.NormClipper, **options: Any) -> None:
        check_norm_clipper(norm_clipper)
        super().__init__()
        self._of_a_run(clipper=None, _clips=None, _summed=False)
        self.norm_clipper, self._options = norm_clipper, options
        self._remember(norm_clipper)

    def _attach(self, run: Run) -> None:
        assert run.wrapped is not None
        self.clipper = self._clips = gg.PerSampleGradientClipper(
            run.wrapped, self.norm_clipper, scaler=run.scaler, **self._options
        )

    def after_backward(self) -> None:
        """Clip the samples of this batch, and accumulate them."""
        self._clips.clip_and_accumulate()
        self._summed = True

    def before_step(self) -> None:
        """Fill in the gradients of the step."""
        self._clips.pre_step()
        self._summed = False

    def end(self) -> None:
        """Detach from the model; samples accumulated for a step that never came are dropped. May be repeated."""
        super().end()
        if self.clipper is not None:
            self.clipper.discard()
            self._clips.detach()
        self._summed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the norm clipper's learned state and, for a private training, the counted steps."""
        return {} if self._clips is None else self._clips.state_dict()

    def _load(self, state: dict[str, Any]) -> None:
        self._clips.load_state_dict(state)


class PrivateBatches:
    """A trainer's loader in private training: it yields Poisson batches, and its length is known beforehand.

    Args:
        loader: The loader that the trainer would use.
        parts: Number of batches that the trainer accumulates for a step.
        processes: Number of processes that train together.
        training: Returns the training; called when the first batch is drawn.
        place: Moves a batch to the device of the training; by default the trainer does.

    Raises:
        InvalidValueError: If the loader is not a DataLoader with a batch size.
        UnsupportedGradientError: If its data set is iterable.
    """

    def __init__(
        self,
        loader: DataLoader,
        parts: int,
        processes: int,
        training: Callable[[], Any],
        place: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        if not isinstance(loader, DataLoader) or loader.batch_size is None:
            raise InvalidValueError(
                f"private training draws its own batches from one DataLoader with a batch_size, and the trainer has "
                f"{loader!r}: give it DataLoader(data, batch_size=..., shuffle=True)."
            )
        if isinstance(loader.dataset, IterableDataset):
            raise UnsupportedGradientError(
                "no sample of an IterableDataset can be drawn by its number, and privacy by sampling needs every one "
                "to join a batch with the same probability: use a data set with __getitem__ and __len__."
            )
        size: int = len(loader.dataset)  # type: ignore[arg-type]
        self.loader, self.parts, self.dataset = loader, parts, loader.dataset
        self._training, self._place = training, place
        rate = min(1.0, loader.batch_size * parts * processes / size)
        self._length = len(gg.private.PoissonBatches(size, rate)) * parts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._place, self._training().loader)  # lazily: trainers call iter() long before they train

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, with which a trainer can resume within an epoch; the callback keeps the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state."""


class PrivateJob(PerSampleJob):
    """Make a trainer's training private; each trainer's own callback is a subclass.

    Attributes:
        private: The `gradguard.private.PrivateTraining` of the current or the last training; None before it begins.
    """

    private: gg.private.PrivateTraining | None
    _batches: PrivateBatches | None
    _trainer_plans = True
    """Whether the trainer, and not the budget, determines the number of steps."""

    def __init__(
        self,
        privacy: gg.private.PrivacyBudget | gg.private.FixedNoise,
        norm_clipper: gg.rules.NormClipper | None = None,
        *,
        secure: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        budget = privacy if self._trainer_plans and isinstance(privacy, gg.private.PrivacyBudget) else None
        if budget is not None and (budget.epochs, budget.steps) != (None, None):
            raise InvalidValueError(
                f"{privacy!r}: the trainer knows how many steps it will take. Leave epochs and steps out of the budget."
            )
        super().__init__(gg.FlatNormClipper(1.0) if norm_clipper is None else norm_clipper, **options)
        self._of_a_run(private=None, _batches=None)
        self._privacy, self._budget, self._noise = privacy, budget, {"secure": secure, "seed": seed}

    def begin(self, run: Run) -> None:
        """Begin the training, with the counts of a checkpoint.

        Raises:
            InvalidValueError: If earlier steps would not be counted, or the number of steps is not known.
            UnsupportedGradientError: If the trainer loops over its own batches.
        """
        name, privacy, resumed = type(self).__name__, self._privacy, self._loaded
        if self._batches is None:
            raise UnsupportedGradientError(
                f"the trainer has a loader of its own, which {name} could not replace: its batches are not Poisson "
                "samples, which the epsilon requires. Give the trainer one DataLoader."
            )
        steps = 0 if self.private is None else self.private.steps
        refuse(
            InvalidValueError,
            (
                steps,
                f"this {name} has trained for {steps} steps already, and the cost of both trainings adds up. Resume "
                "from a checkpoint to go on, or make another one for another training, and count the steps of this "
                "one there if both saw the same records: callback.private.accountant.step(...).",
            ),
            (
                run.done and not resumed,
                f"training resumes after {run.done} steps, but the checkpoint has no state of a {name}: the cost of "
                "those steps is not known. Load the weights alone if they were trained on other records.",
            ),
            (
                self._budget is not None and not math.isfinite(run.steps),
                "a PrivacyBudget needs a trainer that knows how many steps it will take: set its number of epochs "
                "or of steps.",
            ),
        )
        if self._budget is not None:
            privacy = replace(self._budget, steps=int(run.steps))
        self._attach(run)
        self.private = self._clips = private = gg.private.make_private(
            self.clipper,
            run.optimizers[0],
            self._batches.loader,
            privacy,
            gradient_accumulation_steps=self._batches.parts,
            **self._noise,
        )
        self._loaded, self._acting = None, True
        if resumed:
            private.load_state_dict(resumed)
        if private.steps != run.done:
            raise InvalidValueError(
                f"the trainer resumes after {run.done} steps, but the private training after {private.steps}: the "
                "checkpoint is of two trainings."
            )

    def end(self) -> None:
        """Detach from model and optimizer; the counts can still be read. May be repeated."""
        super().end()
        self._batches = None


def check_norm_clipper(norm_clipper: object, processes: int = 1) -> None:
    """Raise if ``norm_clipper`` is no per-sample rule, or one whose thresholds would differ between processes.

    Args:
        norm_clipper: The user's argument.
        processes: Number of processes that train together.

    Raises:
        InvalidTypeError: If it is not a `gradguard.rules.NormClipper`.
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


def undo_division(clipper: gg.PerSampleGradientClipper, loss: Tensor, parts: int) -> None:
    """Undo a trainer's division by the number of accumulated batches in the backward of ``loss``.

    That division is not part of a sample's own loss. If the losses of samples are shares of one loss, it is part of
    them and kept. Call this with the loss before or after the trainer divides it.

    Args:
        clipper: The clipper that follows the backward.
        loss: The loss whose backward comes next.
        parts: The number by which the trainer divides.
    """
    if clipper.loss_reduction == "share":
        return
    clipper.loss_divisor = float(parts)
    if parts > 1 and loss.requires_grad:
        loss.register_hook(lambda grad: grad * parts)

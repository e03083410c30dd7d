"""Private training under a trainer's own loop: begun when the model is there, in batches instead of the trainer's."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.integrations.per_sample import PerSampleClips


class PrivateBatches:
    """The loader of a trainer in private training: Poisson batches, of a number that the trainer knows.

    Args:
        loader: The trainer's own.
        parts: How many batches it accumulates for a step.
        processes: How many train together.
        training: Gives the training, which need not be there before the first batch is asked for.

    Raises:
        InvalidValueError: If the loader has no batch size.
        UnsupportedGradientError: If its data set is iterable.
    """

    def __init__(
        self, loader: DataLoader, parts: int, processes: int, training: Callable[[], gg.private.PrivateTraining]
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
        self.loader, self.parts, self.dataset = loader, parts, loader.dataset
        self._training = training
        size: int = len(loader.dataset)  # type: ignore[arg-type]
        rate = min(1.0, loader.batch_size * parts * processes / size)
        self._length = len(gg.private.PoissonBatches(size, rate)) * parts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._draw()  # a generator: trainers call iter() long before they train

    def _draw(self) -> Iterator[Any]:
        yield from self._training().loader

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, by which a trainer knows that it may go on within an epoch: the callback keeps the place."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


class PrivateClips(PerSampleClips):
    """A trainer's callback for private training; each trainer's own callback is a subclass.

    Attributes:
        private: The `gradguard.private.PrivateTraining` of the current or the last training; None before it begins.
    """

    private: gg.private.PrivateTraining | None
    _private: dict[str, Any]  # options of `gradguard.private.make_private`
    _batches: PrivateBatches | None
    _resumed: dict[str, Any] | None  # the state in a checkpoint, until training begins

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), **dict.fromkeys(("private", "_batches", "_resumed"))}

    @property
    def _clips(self) -> gg.private.PrivateTraining:
        assert self.private is not None
        return self.private

    def _begin_private(
        self, model: nn.Module, optimizer: Optimizer, steps: float, done: int
    ) -> gg.private.PrivateTraining:
        """Make the training.

        Args:
            model: The model, as the trainer has wrapped it.
            optimizer: Its optimizer, as PyTorch has it.
            steps: How many the trainer will take in all; infinite where it does not know.
            done: How many it has taken before, in the training that it resumes.

        Returns:
            The training.

        Raises:
            InvalidValueError: If steps that were taken before would not be counted, or not known how many will be.
            UnsupportedGradientError: If the trainer loops over batches of its own.
        """
        name, options = type(self).__name__, dict(self._private)
        if self._batches is None:
            raise UnsupportedGradientError(
                f"the trainer has a loader of its own, which {name} could not replace: its batches are no "
                "Poisson samples, for which alone epsilon is right. Give the trainer one DataLoader."
            )
        if self.private is not None and self.private.steps:
            raise InvalidValueError(
                f"this {name} has trained for {self.private.steps} steps already, and what both trainings cost "
                "adds up. Resume from a checkpoint to go on, or make another one for another training, and count the "
                "steps of this one there if both saw the same records: callback.private.accountant.step(...)."
            )
        if done and self._resumed is None:
            raise InvalidValueError(
                f"training resumes after {done} steps, and the checkpoint has no state of a {name}: what those "
                "steps have cost is not known. Load the weights alone if they were trained on other records."
            )
        if options["target_epsilon"] is not None:
            if not math.isfinite(steps):
                raise InvalidValueError(
                    "target_epsilon needs a trainer that knows how many steps it will take: set its number of epochs "
                    "or of steps."
                )
            options["steps"] = int(steps)
        self.private = private = gg.private.make_private(
            model, optimizer, self._batches.loader, gradient_accumulation_steps=self._batches.parts, **options
        )
        if self._resumed is not None:
            private.load_state_dict(self._resumed)
            self._resumed = None
        if private.steps != done:
            raise InvalidValueError(
                f"the trainer resumes after {done} steps, and the private training after {private.steps}: the "
                "checkpoint is of two trainings."
            )
        return private

    def _counted(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; nothing before the first batch."""
        return {} if self.private is None else self.private.state_dict()

    def _give_back(self) -> None:
        super()._give_back()
        self._batches = None
        if self.private is not None:
            self.private.detach()


def private_options(
    *,
    target_delta: float,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    max_grad_norm: float | None = None,
    norm_clipper: gg.rules.NormClipper | None = None,
    accountant: Literal["pld", "rdp"] = "pld",
    secure: bool = False,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the options that every callback takes, with one rule in them.

    Raises:
        InvalidValueError: If two of them contradict each other.
    """
    if (noise_multiplier is None) == (target_epsilon is None):
        raise InvalidValueError(
            f"noise_multiplier={noise_multiplier}, target_epsilon={target_epsilon}: expected exactly one of them."
        )
    if max_grad_norm is not None and norm_clipper is not None:
        raise InvalidValueError(
            f"max_grad_norm={max_grad_norm} and norm_clipper={norm_clipper!r} both say how to clip: give one of them."
        )
    if norm_clipper is None:
        norm_clipper = gg.FlatNormClipper(1.0 if max_grad_norm is None else max_grad_norm)
    return {
        "noise_multiplier": noise_multiplier,
        "target_epsilon": target_epsilon,
        "target_delta": target_delta,
        "norm_clipper": norm_clipper,
        "accountant": accountant,
        "secure": secure,
        "seed": seed,
    }

"""The user's DataLoader with Poisson batches: it yields micro-batches, and never an empty one."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.private.sampling import MicroBatches, PoissonBatches, SampledMicroBatch

_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


Planned = Iterator[tuple[SampledMicroBatch, Any]]
"""Micro-batches, each with its batch of data, or with None for a micro-batch without data."""


class PrivateLoader:
    """Yield batches of the user's data set, while the training object counts them.

    ``len`` is the number of logical batches in an epoch. More batches are yielded if logical batches are cut into
    micro-batches, and fewer if some are empty. A progress bar should count steps by the result of ``private.step()``.
    With ``gradient_accumulation_steps``, ``len`` is exactly the number of yielded batches.

    Args:
        loader: The DataLoader with the data set, ``collate_fn``, workers and all other options.
        batches: The batches to draw; None uses the batches of ``loader`` unchanged.
        max_size: The largest size of a micro-batch.
        stand_in: Whether to yield a sample that does not count instead of an empty micro-batch.
        handed_out: Called with the planned micro-batches at the start of a pass; yields the batches for the user.
        parts: The number of micro-batches of each logical batch; None for as many as ``max_size`` needs.
    """

    def __init__(
        self,
        loader: DataLoader,
        batches: PoissonBatches | None,
        max_size: int | None,
        stand_in: bool,
        handed_out: Callable[[Planned], Iterator[Any]],
        parts: int | None = None,
    ) -> None:
        fixed: Any = loader.batch_sampler
        source = batches.remaining if batches is not None else lambda: ((list(one), len(one)) for one in fixed)
        self._cutter = MicroBatches(source, max_size, 0 if stand_in else None, parts)
        self._length = (len(batches) if batches is not None else len(loader)) * (parts or 1)
        self._handed_out = handed_out
        options = {name: getattr(loader, name) for name in _COPIED_OPTIONS}
        if loader.pin_memory_device:
            options["pin_memory_device"] = loader.pin_memory_device
        self.loader = DataLoader(loader.dataset, batch_sampler=self._cutter, **options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._handed_out(self._planned())

    def _planned(self) -> Planned:
        items = iter(self.loader)
        plan = self._cutter.plan  # workers run ahead, so planned micro-batches wait here for their data
        for item in items:
            while not plan[0].has_data:
                yield plan.popleft(), None
            yield plan.popleft(), item
        while plan:
            yield plan.popleft(), None


def check_loader(loader: DataLoader, poisson_sampling: bool, world_size: int) -> int:
    """Check that a DataLoader's batches can be replaced or accounted for.

    Returns:
        The number of samples of its data set.

    Raises:
        InvalidTypeError: If ``loader`` is no DataLoader.
        InvalidValueError: If ``loader`` has no ``batch_size`` or a batch sampler of its own, or draws samples in a way
            that would be lost silently.
        UnsupportedGradientError: If its data set is iterable, where samples cannot be drawn by index, or if it keeps
            its own batches in several processes.
    """
    if not isinstance(loader, DataLoader):
        raise InvalidTypeError(f"loader: expected a torch.utils.data.DataLoader, got {type(loader).__name__}.")
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedGradientError(
            "an IterableDataset cannot be sampled: privacy by sampling needs every sample to join a batch with the "
            "same probability, so samples must be read by index. Use a data set with __getitem__ and __len__."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise InvalidValueError(
            "loader: expected a DataLoader made with batch_size=..., which decides the sampling rate; got one with "
            "a batch_sampler of its own or without batches."
        )
    sampler = loader.sampler
    known = [SequentialSampler, RandomSampler] + ([DistributedSampler] if poisson_sampling else [])
    if type(sampler) not in known:
        raise InvalidValueError(
            f"loader: its sampler is a {type(sampler).__name__}. Every sample must be drawn with the same probability"
            f"{'' if poisson_sampling else ', and once in an epoch'}, so expected shuffle=True or shuffle=False. To "
            f"train on a part of a data set use torch.utils.data.Subset."
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise InvalidValueError(
            "loader: its RandomSampler draws with replacement, or more or fewer samples than the data set has; "
            "expected shuffle=True, which draws each sample once in an epoch."
        )
    if not poisson_sampling and world_size > 1:
        raise UnsupportedGradientError(
            "poisson_sampling=False is not accounted for with several processes: use poisson_sampling=True."
        )
    return len(loader.dataset)  # type: ignore[arg-type]

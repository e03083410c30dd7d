"""Record which samples were in the batch of a step: a ring of the last steps, and a loader that reports its samples."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gradguard.distributed.processes import rank_and_size
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.state.generators import generator_states
from gradguard.state.snapshot_parts import has_state
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import loader_has_begun, versions_of

SampleId = int | str


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step, as Python values.

    Attributes:
        step: Number of the step.
        rank: Rank of the process.
        number: Index among the micro-batches of this process in the step, from 0.
        ids: Its samples; None if they were not recorded.
        loss: Its loss; None if it was not recorded.
    """

    step: int
    rank: int
    number: int
    ids: tuple[SampleId, ...] | None
    loss: float | None


@dataclass
class _Kept:
    """A recorded micro-batch, whose tensors stay on their device until they are read."""

    ids: Tensor | tuple[SampleId, ...] | None
    loss: Tensor | float | None = None
    content: Any = None
    generators: dict[str, Any] | None = None
    versions: list[int] = field(default_factory=list)


class Batches:
    r"""Records, for the last steps, which samples each micro-batch contained and its loss.

    ``saw`` begins a micro-batch and ``end_step`` ends the step; a training loop that uses `SampleIds` calls only
    ``end_step``. Losses are copied on their device, and so are ids that are tensors: recording never waits for the
    device, but `of_step` does.

    **Guarantees.** A loss or ids that are later changed in place are stored unchanged. A step that has left the ring
    is forgotten. With ``keep=True`` the batch itself is stored, not copied; if it was changed in place, `content`
    raises an error.

    | case | result |
    |---|---|
    | a step without micro-batches | ``()`` |
    | a loss before any ids | a micro-batch without ids |
    | the number of a step that is not yet, or no longer, in the ring | an error with the numbers that are |
    | ids that are floats, bools or tuples | an error: such ids cannot exclude a sample |

    Args:
        steps: Number of steps to store, the current one included; at least 2.
        keep: Whether to store the batches too, with the states of the random generators before each, for
            `write_evidence`. It costs the memory of ``steps`` batches, and some 20 µs a batch.

    Raises:
        InvalidValueError: If ``steps`` is below 2.

    Attributes:
        step: Number of the current step.

    Example:
        >>> import torch
        >>> from gradguard.resilience import Batches
        >>> batches = Batches()
        >>> for ids in ([4, 7], [1, 3]):
        ...     batches.saw(ids)
        ...     batches.record_loss(torch.tensor(float(sum(ids))))
        >>> batches.end_step()
        0
        >>> [(one.ids, one.loss) for one in batches.of_step(0)]
        [((4, 7), 11.0), ((1, 3), 4.0)]
    """

    def __init__(self, steps: int = 64, *, keep: bool = False) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
            raise InvalidValueError(f"steps={steps!r}: expected at least 2, the current step and the one before.")
        self.keep, self._ring = keep, deque[list[_Kept]]([[]], maxlen=steps)
        self.step = 0

    def saw(self, ids: Any = None, *, batch: Any = None) -> None:
        """Begin a micro-batch.

        Args:
            ids: Its samples: whole numbers or strings, in a list, a tuple, an array or a 1-d tensor; or a single one.
            batch: The batch itself, which is stored if ``keep=True``.

        Raises:
            InvalidTypeError: If ``ids`` are of another kind.
        """
        one = _Kept(None if ids is None else checked_ids(ids))
        if self.keep:
            one.generators = generator_states()
            one.content, one.versions = batch, versions_of(tensors_in(batch))
        self._ring[-1].append(one)

    def record_loss(self, loss: Tensor | float) -> None:
        """Record the loss of the current micro-batch; without one, or for a second loss, begin one without ids.

        Raises:
            InvalidTypeError: If ``loss`` is not a single number.
        """
        now = self._ring[-1]
        if not now or now[-1].loss is not None:
            self.saw()
        now[-1].loss = _checked_loss(loss)

    def end_step(self) -> int:
        """End the step, whether or not its update was skipped, and return its number."""
        self.step += 1
        self._ring.append([])
        return self.step - 1

    @property
    def known(self) -> range:
        """The numbers of the steps in the ring, the current one last."""
        return range(self.step - len(self._ring) + 1, self.step + 1)

    def of_step(self, step: int) -> tuple[MicroBatch, ...]:
        """Return this process' micro-batches of a step; a host sync, as it reads their losses.

        Raises:
            InvalidValueError: If the step is not in the ring.
        """
        rank, found = rank_and_size()[0], list[MicroBatch]()
        for number, one in enumerate(self._of(step)):
            ids = tuple(one.ids.tolist()) if isinstance(one.ids, Tensor) else one.ids
            found.append(MicroBatch(step, rank, number, ids, None if one.loss is None else float(one.loss)))
        return tuple(found)

    def content(self, step: int, number: int) -> tuple[Any, dict[str, Any]]:
        """Return a stored batch, and the states of the random generators before it.

        Raises:
            InvalidValueError: If the batch was not stored, or was changed in place.
        """
        one = dict(enumerate(self._of(step))).get(number, _Kept(None))
        if one.content is None or one.generators is None:
            raise InvalidValueError(
                f"micro-batch {number} of step {step} was not kept. Create Batches(keep=True), and iterate over "
                "SampleIds(loader, batches) or call batches.saw(ids, batch=batch)."
            )
        if versions_of(tensors_in(one.content)) != one.versions:
            raise InvalidValueError(
                f"micro-batch {number} of step {step} was changed in place after it was yielded, so it is not the "
                "batch of the loader. Change a copy: batch['x'] = batch['x'] / 255 instead of batch['x'] /= 255."
            )
        return one.content, one.generators

    def state_dict(self) -> dict[str, int]:
        """Return the number of the current step; the ring belongs to this process and is not saved."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue counting from a saved step, with an empty ring."""
        self.step = int(state_dict["step"])
        self._ring.clear()
        self._ring.append([])

    def _of(self, step: int) -> list[_Kept]:
        if step in self.known:
            return self._ring[self.known.index(step)]
        raise InvalidValueError(
            f"step {step} is not in the ring, which holds {self.known[0]} to {self.known[-1]}. Make it longer: "
            "Batches(steps=...)."
        )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, str | bytes):
        return []
    if hasattr(value, "items") and hasattr(value, "keys"):
        return [tensor for key in value for tensor in tensors_in(value[key])]
    return [t for one in value for t in tensors_in(one)] if isinstance(value, list | tuple) else []


def _checked_loss(loss: Tensor | float) -> Tensor | float:
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.item() if are_readable(loss) else loss.detach().reshape(()).clone()
    if isinstance(loss, int | float):
        return float(loss)
    came = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InvalidTypeError(f"the loss of a micro-batch is {came}: expected one number, such as loss.mean().")


def checked_ids(ids: Any) -> Tensor | tuple[SampleId, ...]:
    """Return ids given as a list, an array or a tensor, without a host sync.

    Raises:
        InvalidTypeError: If they are not whole numbers or strings.
    """
    if isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        return ids.detach().flatten().clone() if ids.dim() < 2 else _refuse_ids(f"of shape {tuple(ids.shape)}")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    listed: Any = [ids] if isinstance(ids, int | str) else ids
    if not isinstance(listed, Sequence):
        _refuse_ids(type(ids).__name__)
    found: tuple[Any, ...] = tuple(
        one.item() if hasattr(one, "item") else one for one in listed
    )  # NumPy numbers and 0-dim tensors have `item`
    wrong = [one for one in found if not isinstance(one, int | str) or isinstance(one, bool)]
    return _refuse_ids(f"such as {wrong[0]!r}") if wrong else found


def _refuse_ids(came: str) -> Any:
    raise InvalidTypeError(
        f"the ids of a batch are {came}: expected whole numbers or strings, one for each sample, as in [17, 4, 9]."
    )


# A loader that reports the samples it yields.


class SampleIds:
    r"""Yields the batches of ``loader``, and records in ``batches`` which samples each contains.

    The dataset returns the index of a sample beside the sample, and ``collate_fn`` separates them again. So the ids
    are right whatever sampler draws the samples and in whatever order they arrive: workers, prefetching,
    ``in_order=False``, shuffling, `DistributedSampler`, custom batch samplers, ``batch_size=None``, an epoch that is
    left halfway. ``loader`` itself is not changed; a copy is.

    | loader | ids |
    |---|---|
    | map-style dataset, any sampler | the index that the sampler drew, into ``loader.dataset``: a Subset has its own |
    | with ``ids_of`` | its result for the batch, such as ``lambda batch: batch["id"]`` |
    | iterable dataset | only with ``ids_of``; otherwise an error |
    | from `Accelerator.prepare` | yes: wrap the result of ``prepare`` |
    | ``dispatch_batches=True`` of Accelerate | only with ``ids_of``; otherwise an error |

    All other attributes are the loader's: ``len``, ``state_dict``, ``sampler``, ``set_epoch``.

    Args:
        loader: A DataLoader of `torch.utils.data` or a StatefulDataLoader that has not begun; with ``ids_of`` any
            iterable of batches.
        batches: The `Batches` that receives the ids, before each batch is yielded.
        ids_of: Returns the ids of a batch.

    Raises:
        InvalidTypeError: If the ids cannot be determined.
        InvalidValueError: If the loader has begun.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from gradguard.resilience import Batches, SampleIds
        >>> batches = Batches()
        >>> for letters in SampleIds(DataLoader(list("abcde"), batch_size=2), batches):
        ...     step = batches.end_step()
        >>> letters, batches.of_step(step)[0].ids
        (['e'], (4,))
    """

    def __init__(self, loader: Iterable[Any], batches: Batches, ids_of: Callable[[Any], Any] | None = None) -> None:
        self.loader = loader if ids_of is not None else _with_indices(loader)
        self.batches, self.ids_of = batches, ids_of

    def __iter__(self) -> Iterator[Any]:
        for yielded in self.loader:
            ids, batch = yielded if self.ids_of is None else (self.ids_of(yielded), yielded)  # pinning makes it a list
            self.batches.saw(ids, batch=batch)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet while this object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Indexed:
    """A dataset that returns the index beside the sample."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["indexed_dataset"] = dataset

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        return index, self.indexed_dataset[index]

    def __getitems__(self, indices: list[Any]) -> tuple[list[Any], Any]:
        many = getattr(self.indexed_dataset, "__getitems__", None)
        return indices, many(indices) if many else [self.indexed_dataset[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indexed_dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.indexed_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:  # a worker_init_fn may set attributes
        setattr(self.indexed_dataset, name, value)

    def __reduce__(self) -> Any:
        return type(self), (self.indexed_dataset,)


class _StatefulIndexed(_Indexed):
    """A dataset with a state; StatefulDataLoader looks for the two methods on the class."""

    def state_dict(self) -> Any:
        return self.indexed_dataset.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.indexed_dataset.load_state_dict(state_dict)


def _collated(collate_fn: Callable[[Any], Any], indexed: tuple[Any, Any]) -> tuple[Any, Any]:
    index, samples = indexed
    return index, collate_fn(samples)


def _with_indices(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        raise InvalidTypeError(
            f"the loader is {type(loader).__name__}: expected a torch.utils.data.DataLoader, or ids_of=, as in "
            "SampleIds(loader, batches, ids_of=lambda batch: batch['id'])."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidTypeError(
            "the dataset is iterable, so the loader does not know which samples it yields: let each sample contain its "
            "id, and use SampleIds(loader, batches, ids_of=lambda batch: batch['id'])."
        )
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise InvalidTypeError(
            "with dispatch_batches=True process 0 reads for all and sends slices of batches, whose samples cannot be "
            "identified: omit dispatch_batches, or pass ids_of=lambda batch: batch['id']."
        )
    if loader_has_begun(loader):
        raise InvalidValueError("the loader has begun already: make SampleIds(loader, batches) before its first batch.")
    kind = _StatefulIndexed if has_state(loader.dataset) else _Indexed
    copied = copy.copy(loader)  # keeps the class; a DataLoader refuses to have these attributes set
    vars(copied).update(dataset=kind(loader.dataset), collate_fn=partial(_collated, loader.collate_fn))
    return copied

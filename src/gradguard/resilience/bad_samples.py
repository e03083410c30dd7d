"""The bad-batch list: a file of sample ids, and samplers that draw another sample in the place of each."""

import copy
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gradguard.distributed import processes
from gradguard.errors import InvalidTypeError, InvalidValueError, RecordError
from gradguard.files.json_text import decode_json
from gradguard.files.opening import read_whole
from gradguard.resilience.batches import SampleId, changed_copy, checked_ids
from gradguard.state.snapshot_parts import has_state
from gradguard.torch_private import loader_has_begun


@dataclass(frozen=True)
class BadSample:
    """Why a sample is left out.

    Attributes:
        id: The sample.
        reason: In words.
        step: Of the spike.
        rank: Process that had it.
    """

    id: SampleId
    reason: str = ""
    step: int | None = None
    rank: int | None = None


class BadSamples:
    r"""A list of samples to leave out, in memory and, with ``file``, on disk: read at the start, appended to later.

    The file has a line for each sample, ``{"id": 17, "step": 1204, "rank": 3, "reason": "..."}``, or just the id, for
    a list by hand: ``17`` is the number, ``doc-17`` and ``017`` are strings. Empty lines and those with a ``#`` in
    front are passed over.

    **Guarantees.** 17 and ``"17"`` are two samples. A sample that is added twice is there once, with its first reason.
    Process 0 writes; all processes call `add` alike, or each with its own samples and ``gather=True``. A line that
    cannot be read is an error, never passed over.

    Args:
        file: Where the list is, or shall be; None for memory only.

    Raises:
        RecordError: If a line is no sample.

    Example:
        >>> from gradguard.resilience import BadSamples
        >>> bad = BadSamples()
        >>> bad.add([17, 4], reason="loss 9.1 deviations above the median", step=1204)
        2
        >>> 17 in bad, "17" in bad, [one.id for one in bad]
        (True, False, [17, 4])
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = None if file is None else Path(file)
        self._of: dict[SampleId, BadSample] = {}
        self._unwritten: list[BadSample] = []
        if self.file is not None and self.file.exists():
            for number, line in enumerate(_text_of(self.file).splitlines(), 1):
                if (one := _read(line, self.file, number)) is not None:
                    self._of.setdefault(one.id, one)

    def add(
        self,
        ids: Any,
        *,
        reason: str = "",
        step: int | None = None,
        rank: int | None = None,
        gather: bool = False,
        group: Any = None,
    ) -> int:
        """Add samples.

        Args:
            ids: Whole numbers or strings, in a list, a tuple, an array or a 1-d tensor; or a single one.
            reason: In words.
            step: Of the spike.
            rank: Process that had them.
            gather: Whether each process gives samples of its own, or none, which all of them are to leave out: all
                processes must call.
            group: The processes that call; None for all. The first of them writes.

        Returns:
            How many of them are new.

        Raises:
            InvalidTypeError: If the ids are no whole numbers or strings.
        """
        listed = checked_ids(ids)
        listed = listed.tolist() if isinstance(listed, Tensor) else listed
        given = [BadSample(one, reason, step, rank) for one in listed]
        if gather:
            given = [one for part in processes.gather(given, group, "share bad samples") for one in part]
        new: dict[SampleId, BadSample] = {}
        for one in given:
            if one.id not in self._of:
                new.setdefault(one.id, one)
        self._of.update(new)
        if new and self.file is not None and processes.rank_and_size(group)[0] == 0:
            self._write(self.file, new.values())
        return len(new)

    def _write(self, file: Path, new: Iterable[BadSample]) -> None:
        """Append to the file; what a full disk does not take is left for the next time, and the run goes on."""
        self._unwritten += new
        try:
            self._append(file, self._unwritten)
        except OSError as error:
            warnings.warn(
                f"gradguard: {len(self._unwritten)} bad samples were not written to {str(file)!r} ({error}). This run "
                "leaves them out, and the next that is added writes them too.",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            self._unwritten = []

    def __contains__(self, id: object) -> bool:
        return _plain(id) in self._of

    def __iter__(self) -> Iterator[BadSample]:
        return iter([*self._of.values()])

    def __len__(self) -> int:
        return len(self._of)

    @staticmethod
    def _append(file: Path, new: Iterable[BadSample]) -> None:
        told = [{k: v for k, v in asdict(one).items() if v not in (None, "")} for one in new]
        is_new = not file.exists()
        with file.open("ab+") as out:
            out.seek(max(0, out.seek(0, 2) - 1))
            begin = "\n" if out.read(1) not in (b"", b"\n") else ""  # a list by hand may end without one
            end = out.seek(0, 2)
            try:
                out.write((begin + "".join(f"{json.dumps(one)}\n" for one in told)).encode())
                out.flush()
            except OSError:
                os.ftruncate(out.fileno(), end)
                out.raw.close()  # what is buffered still is not written
                if is_new and not end:
                    file.unlink(missing_ok=True)
                raise


_WHOLE = re.compile("-?[1-9][0-9]{0,999}|0")
"""A whole number as Python writes it."""


def _plain(index: Any) -> Any:
    """An index as a number: samplers that iterate over a tensor, or NumPy's array, draw 0-dim ones."""
    return index.item() if getattr(index, "ndim", None) == 0 else index


def _text_of(file: Path) -> str:
    try:
        return read_whole(file, _LONGEST).decode("utf-8")
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is no list of samples: it is no text.") from error


_LONGEST = 2**30
"""Bytes of a list of samples: some ten million."""


def _read(line: str, file: Path, number: int) -> BadSample | None:
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    if not line.startswith("{"):
        return BadSample(int(line) if _WHOLE.fullmatch(line) else line)
    try:
        told = decode_json(line.encode())
        one = BadSample(**{k: v for k, v in told.items() if k in ("id", "reason", "step", "rank")})
        checked_ids([one.id])
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{file}, line {number}: {line[:60]!r} is no sample, or it is cut off: expected a line such as "
            '{"id": 17, "step": 1204}, or the id alone. Mend or delete it.'
        ) from error
    return one


def exclude(
    source: Any,
    bad: BadSamples,
    *,
    replacements: Sequence[Any] | None = None,
    id_of: Callable[[Any], SampleId] | None = None,
) -> Any:
    r"""Return ``source`` drawing another sample in the place of each that is in ``bad``.

    The other one is :math:`d_{h(i) \bmod n}`, with a hash :math:`h` of the index :math:`i` that is left out and
    :math:`d_1, \ldots, d_n` the samples that ``source`` draws from; if that one is bad too, the next hash. It depends
    on nothing else, so nothing moves: every other sample has the place that it would have had, on the same rank.

    **Guarantees.** The number and the sizes of batches are those of ``source``, the same on all ranks as before. A
    resumed StatefulDataLoader goes on exactly where it was, also if the list has grown meanwhile. Samples that
    ``source`` does not draw from, such as those held out for validation, are never drawn. A sample that is added
    while an epoch runs is left out from the next index on that the loader asks for: what workers have prefetched comes.

    The price: for each that is left out, another one is seen once more in an epoch.

    | source | result |
    |---|---|
    | a DataLoader, a StatefulDataLoader, not begun | a copy of it |
    | a sampler or a batch sampler of `torch.utils.data`, torchdata or Accelerate, a list | a sampler |
    | a sampler of one's own | with ``replacements``; else an error |
    | an iterable dataset | an error: leave bad samples out where it reads |
    | every sample is bad | an error, at the first that is drawn |

    Args:
        source: A loader, a sampler or a batch sampler.
        bad: The list; it may grow.
        replacements: The indices that others are drawn from; by default all that ``source`` draws from.
        id_of: Returns the id of an index, where the list does not hold indices: ``lambda i: dataset.keys[i]``.

    Returns:
        What to use in the place of ``source``.

    Raises:
        InvalidTypeError: If it cannot be said what ``source`` draws from, or ``bad`` is no `BadSamples`.
        InvalidValueError: If a loader has begun, or ``replacements`` is empty.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from gradguard.resilience import BadSamples, exclude
        >>> bad = BadSamples()
        >>> loader = exclude(DataLoader(list("abcdef"), batch_size=3), bad)
        >>> list(loader)
        [['a', 'b', 'c'], ['d', 'e', 'f']]
        >>> bad.add([1, 5])
        2
        >>> list(loader)
        [['a', 'a', 'c'], ['d', 'e', 'd']]
    """
    if not isinstance(bad, BadSamples):
        raise InvalidTypeError(f"bad is {type(bad).__name__}: expected BadSamples, to which add([17, 4]) adds samples.")
    if not isinstance(source, DataLoader):
        return _excluding(source, bad, replacements, id_of)
    if isinstance(source.dataset, IterableDataset):
        raise InvalidTypeError(
            "the dataset is iterable, so its samples cannot be chosen from outside: pass over those in the list where "
            "it reads them, as in `if key in bad: continue`."
        )
    if loader_has_begun(source):
        raise InvalidValueError("the loader has begun already: call exclude(loader, bad) before its first batch.")
    part = "sampler" if source.batch_sampler is None else "batch_sampler"
    return changed_copy(source, **{part: _excluding(getattr(source, part), bad, replacements, id_of)})


def _excluding(sampler: Any, bad: BadSamples, replacements: Any, id_of: Any) -> "_ExcludingSampler":
    indices = _drawn_from(sampler) if replacements is None else replacements
    if not len(indices):
        raise InvalidValueError("there is no sample to draw in the place of a bad one: replacements is empty.")
    kind = _StatefulExcludingSampler if has_state(sampler) else _ExcludingSampler
    return kind(sampler, bad, indices, id_of)


class _ExcludingSampler(Sampler[Any]):
    def __init__(self, inner: Any, bad: BadSamples, indices: Sequence[Any], id_of: Any) -> None:
        self.inner, self.bad, self.indices, self.id_of = inner, bad, indices, id_of

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.inner)
        return _StatefulIterator(inner, self.replaced) if has_state(inner) else map(self.replaced, inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:  # batch_size, drop_last, set_epoch, ...
        if name == "inner":  # while this is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def replaced(self, drawn: Any) -> Any:
        """Return an index, or a list of them, without those that are bad."""
        if isinstance(drawn, list | tuple):
            return type(drawn)(map(self.replaced, drawn))
        if getattr(drawn, "ndim", 0) > 0:  # a batch of indices as a tensor, or as an array
            return self._replaced_in(drawn)
        drawn = _plain(drawn)
        return self._another(drawn) if self._is_bad(drawn) else drawn

    def _replaced_in(self, batch: Any) -> Any:
        if batch.ndim > 1:
            raise InvalidTypeError(f"the sampler draws a batch of shape {tuple(batch.shape)}: expected one dimension.")
        bad = [i for i, index in enumerate(batch.tolist()) if self._is_bad(index)]
        changed = copy.deepcopy(batch) if bad else batch
        for i in bad:
            changed[i] = self._another(_plain(batch[i]))
        return changed

    def _is_bad(self, index: Any) -> bool:
        return (index if self.id_of is None else self.id_of(index)) in self.bad

    def _at_random(self, index: Any) -> Iterator[Any]:
        for attempt in range(64):
            hashed = hashlib.sha256(f"{index}:{attempt}".encode()).digest()
            yield self.indices[int.from_bytes(hashed[:8], "little") % len(self.indices)]

    def _another(self, index: Any) -> Any:
        for other in map(_plain, chain(self._at_random(index), self.indices)):
            if not self._is_bad(other):
                return other
        where = "" if self.bad.file is None else f" in {self.bad.file}"
        raise InvalidValueError(
            f"all {len(self.indices):,} samples are in the list of bad ones{where}: nothing is left to "
            "train on. Delete some of its lines."
        )


# StatefulDataLoader looks in the class whether there is a state.


class _WithState:
    inner: Any

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class _StatefulIterator(_WithState):
    def __init__(self, inner: Iterator[Any], replaced: Callable[[Any], Any]) -> None:
        self.inner, self.replaced = inner, replaced

    def __iter__(self) -> "_StatefulIterator":
        return self

    def __next__(self) -> Any:
        return self.replaced(next(self.inner))

    def update_state_dict(self) -> None:
        if hasattr(self.inner, "update_state_dict"):
            self.inner.update_state_dict()


class _StatefulExcludingSampler(_WithState, _ExcludingSampler):
    pass


def _drawn_from(sampler: Any) -> Sequence[Any]:
    """The indices that a sampler may draw, if it is one that is known: a subclass may draw others."""
    if isinstance(sampler, _ExcludingSampler):
        return sampler.indices
    if isinstance(sampler, list | tuple | range):
        return list(dict.fromkeys(i for one in sampler for i in (one if isinstance(one, list | tuple) else [one])))
    if type(sampler).__module__.partition(".")[0] in ("torch", "torchdata", "accelerate"):
        if isinstance(sampler, BatchSampler):
            return _drawn_from(getattr(sampler, "batch_sampler", None) or sampler.sampler)
        if isinstance(sampler, SubsetRandomSampler):
            return sampler.indices
        if isinstance(sampler, WeightedRandomSampler):
            return sampler.weights.nonzero().flatten().tolist()
        if isinstance(sampler, DistributedSampler):
            return range(len(sampler.dataset))  # type: ignore[arg-type]
        if isinstance(sampler, SequentialSampler | RandomSampler) or type(sampler).__name__ == "RandomSampler":
            return range(len(sampler.data_source))
    raise InvalidTypeError(
        f"from which samples {type(sampler).__name__} draws is not known, so none can be drawn in the place of a bad "
        "one: say it with exclude(..., replacements=train_indices)."
    )

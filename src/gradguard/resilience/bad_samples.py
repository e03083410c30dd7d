"""`BadSamples`: the list of bad samples, in memory and as a file with a line for each."""

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gradguard.distributed import processes
from gradguard.errors import RecordError
from gradguard.files.json_text import decode_json
from gradguard.files.opening import read_whole
from gradguard.files.writing import write_whole
from gradguard.resilience.batch_iterators import SampleId, checked_ids


@dataclass(frozen=True)
class BadSample:
    """A sample to leave out, and the reason.

    Attributes:
        id: The sample.
        reason: The reason, in words.
        step: The step of the spike.
        rank: The process that had the sample.
    """

    id: SampleId
    reason: str = ""
    step: int | None = None
    rank: int | None = None


class BadSamples:
    r"""A list of samples to leave out, in memory and, with ``file``, on disk: read at the start, appended to later.

    The file has a line for each sample, ``{"id": 17, "step": 1204, "rank": 3, "reason": "..."}``, or just the id in a
    list written by hand: ``17`` is a number, ``doc-17`` and ``017`` are strings. Empty lines and lines that begin with
    ``#`` are skipped.

    **Guarantees.** 17 and ``"17"`` are two samples. A sample that is added twice is stored once, with its first reason.
    Process 0 writes; all processes call `add` with the same arguments, or each with its own samples and
    ``gather=True``. A line that cannot be read is an error and never skipped.

    Let the loader's sampler leave the samples out: ``DataLoader(dataset, sampler=SubsetRandomSampler([i for i in
    range(len(dataset)) if i not in bad]))``. This keeps the numbers of the dataset, which a ``Subset`` would change.

    Args:
        file: The path of the list, which need not exist yet; None to keep it in memory only.

    Raises:
        RecordError: If a line does not describe a sample.

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
            reason: The reason, in words.
            step: The step of the spike.
            rank: The process that had the samples.
            gather: Whether each process passes its own samples, or none, and all processes exclude the union; all
                processes must then call.
            group: The processes that call; None for all. The first of them writes.

        Returns:
            The number of samples that were not in the list before.

        Raises:
            InvalidTypeError: If the ids are not whole numbers or strings.
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
        """Append to the file; if the disk refuses, the run continues and the next call writes the lines."""
        self._unwritten += new
        lines = [{k: v for k, v in asdict(one).items() if v not in (None, "")} for one in self._unwritten]
        try:
            before = _text_of(file) if file.exists() else ""
            begin = "\n" if before and not before.endswith("\n") else ""  # a file written by hand may lack the last one
            write_whole(file, (before + begin + "".join(f"{json.dumps(one)}\n" for one in lines)).encode())
        except (OSError, RecordError) as error:
            warnings.warn(
                f"gradguard: {len(self._unwritten)} bad samples were not written to {str(file)!r} ({error}). The next "
                "call that adds a sample writes them too.",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            self._unwritten = []

    def __contains__(self, id: object) -> bool:
        index: Any = id
        return (index.item() if hasattr(index, "item") else index) in self._of  # a sampler may draw 0-dim tensors

    def __iter__(self) -> Iterator[BadSample]:
        return iter([*self._of.values()])

    def __len__(self) -> int:
        return len(self._of)


_WHOLE = re.compile("-?[1-9][0-9]{0,999}|0")
"""A whole number as Python writes it."""


def _text_of(file: Path) -> str:
    try:
        return read_whole(file, _LONGEST).decode("utf-8")
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is not a list of samples: it is not text.") from error


_LONGEST = 2**30
"""Maximum size of a list of samples in bytes: some ten million samples."""


def _read(line: str, file: Path, number: int) -> BadSample | None:
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    if not line.startswith("{"):
        return BadSample(int(line) if _WHOLE.fullmatch(line) else line)
    try:
        fields = decode_json(line.encode())
        one = BadSample(**{k: v for k, v in fields.items() if k in ("id", "reason", "step", "rank")})
        checked_ids([one.id])
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{file}, line {number}: {line[:60]!r} is not a sample, or is cut off: expected a line such as "
            '{"id": 17, "step": 1204}, or the id alone. Correct or delete it.'
        ) from error
    return one

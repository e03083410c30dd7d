"""The file that `save_gradients` writes: sketches as safetensors, read back as plain numbers."""

import json
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradguard.errors import RecordError
from gradguard.parity.judge import Measured, Vector

FORMAT = 1
_KEY = "gradguard_parity"


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """One parameter of a saved run.

    Attributes:
        name: Its name in the model without wrappers.
        shape: Of the whole parameter.
        dtype: Of its gradient; of itself where it has none.
        rounding: What storing it in that dtype and adding it up do to it, relative.
        has_gradient: Whether any process has a gradient.
        copies: How many ranks hold the same part.
        layout: How it is spread, in words.
        weight_rounding: Half a unit in the last place of the parameter's own dtype, relative.
        one_sided: What adding it up over micro-batches does at most, relative; 0 where nobody has asked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rounding: float
    has_gradient: bool
    copies: int
    layout: str
    weight_rounding: float
    one_sided: float = 0.0


@dataclass(frozen=True)
class SavedGradients:
    """Sketches of a model's gradients in one run: what `gradguard.save_gradients` returns and writes.

    ``losses`` are what ``step()`` returned, first of the run itself; ``facts`` what was said of it; ``random`` tells
    whether it drew random numbers, ``clipped`` whether some gradients may not be those that the
    optimizer takes, because of a clip.
    """

    parameters: tuple[SavedParameter, ...]
    sketches: Mapping[str, Sequence[Sequence[Vector]]] = field(repr=False)
    """By kind ``"gradient"``, ``"weights"``, ``"contrasts"`` or ``"parts"``: runs × parameters × 32 numbers."""
    rows: Mapping[str, Sequence[Sequence[Vector]]] = field(default_factory=dict, repr=False)
    """By parameter: runs × rows × 8 numbers."""
    parts: tuple[str, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    random: bool = False
    epsilon: float = 0.0
    hash_version: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    clipped: bool = False

    def measured(self, index: int) -> Measured:
        """Return what is known of one parameter, as the comparison takes it."""
        p = self.parameters[index]
        gradient, *repeated = (run[index] for run in self.sketches["gradient"])
        parts = {name: run[index] for name, run in zip(self.parts, self.sketches.get("parts", ()), strict=True)}
        contrasts = [run[index] for run in self.sketches.get("contrasts", ())]
        return Measured(
            p.shape,
            p.rounding,
            gradient,
            repeated,
            p.has_gradient,
            contrasts,
            p.copies,
            parts,
            self.rows.get(p.name, ()),
            self.epsilon,
            p.one_sided,
        )


def write(path: str | os.PathLike[str], saved: SavedGradients) -> None:
    """Write ``saved``, in one piece: whoever reads meanwhile sees the old file or the new one."""
    about = {key: value for key, value in asdict(saved).items() if key not in ("sketches", "rows")}
    runs = {**saved.sketches, **{f"rows/{name}": one for name, one in saved.rows.items()}}
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps({"format": FORMAT, **about})}}
    data = bytearray()
    for name, one in runs.items():
        block = _bytes(one)
        header[name] = {"dtype": "F64", "shape": _shape(one), "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path = Path(path)
    beside = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        beside.write_bytes(len(head).to_bytes(8, "little") + head + data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> SavedGradients:
    """Return what `write` has written.

    Raises:
        RecordError: If there is no such file, or it is another one.
    """
    try:
        blob = Path(path).read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}. gradguard.save_gradients writes one.") from error
    try:
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        about = json.loads(header.pop("__metadata__")[_KEY])
        version = about.pop("format")
        if version == FORMAT:
            return _saved(about, {name: _lists(info, blob[start:]) for name, info in header.items()})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{path} is not what gradguard.save_gradients writes, or it is cut off ({type(error).__name__}): expected "
            "sketches of gradients as safetensors."
        ) from error
    raise RecordError(f"{path} is of format {version}, and this gradguard reads {FORMAT}: write it again.")


def _saved(about: dict[str, Any], tensors: dict[str, Any]) -> SavedGradients:
    parameters = tuple(SavedParameter(**{**p, "shape": tuple(p["shape"])}) for p in about.pop("parameters"))
    rows = {name.removeprefix("rows/"): runs for name, runs in tensors.items() if name.startswith("rows/")}
    sketches = {name: runs for name, runs in tensors.items() if not name.startswith("rows/")}
    if any(len(run) != len(parameters) for runs in sketches.values() for run in runs) or "gradient" not in sketches:
        raise ValueError("sketches")
    about |= {"parts": tuple(about["parts"]), "losses": tuple(about["losses"])}
    return SavedGradients(parameters, sketches, rows, **about)


def _shape(runs: Sequence[Sequence[Vector]]) -> list[int]:
    return [len(runs), len(runs[0]), len(runs[0][0])] if runs and runs[0] else [len(runs), 0, 0]


def _bytes(runs: Sequence[Sequence[Vector]]) -> bytes:
    return _little(array("d", [x for run in runs for sketch in run for x in sketch])).tobytes()


def _lists(info: Mapping[str, Any], data: bytes) -> list[list["array[float]"]]:
    runs, parameters, sums = info["shape"]
    start, end = info["data_offsets"]
    if info["dtype"] != "F64" or not 0 <= start <= end <= len(data) or end - start != 8 * runs * parameters * sums:
        raise ValueError("cut off")
    flat = array("d")
    flat.frombytes(data[start:end])
    _little(flat)
    rows = [flat[i * sums : (i + 1) * sums] for i in range(runs * parameters)]
    return [rows[i * parameters : (i + 1) * parameters] for i in range(runs)]


def _little(numbers: "array[float]") -> "array[float]":
    """Turn the bytes round on a machine that has them the other way, as safetensors has not."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

"""The file that `save_gradients` writes: sketches as safetensors, read back as plain numbers."""

import json
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from sys import float_info
from typing import Any

from gradguard.errors import RecordError
from gradguard.files.blocks import BlockFile, NewBlock, number_of_elements, write_blocks
from gradguard.files.json_text import decode_json
from gradguard.files.writing import replacing
from gradguard.parity.judge import Measured
from gradguard.parity.vectors import Vector

FORMAT = 1
_KEY = "gradguard_parity"
_ROWS = "rows/"
_MOST_EMPTY = 1 << 16  # lists without a number in them

Runs = Sequence[Sequence[Vector]]


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
    runs = {**saved.sketches, **{f"{_ROWS}{name}": one for name, one in saved.rows.items()}}
    blocks = {name: NewBlock("F64", _shape(one), _bytes(one)) for name, one in runs.items()}
    with replacing(path) as file:
        write_blocks(file, {_KEY: json.dumps({"format": FORMAT, **about})}, blocks)


def read(path: str | os.PathLike[str]) -> SavedGradients:
    """Return what `write` has written, each field of which is what it must be.

    Raises:
        RecordError: If there is no such file, or it is another one.
    """
    try:
        with BlockFile(path) as file:
            about = decode_json(file.about[_KEY].encode(), finite=False)  # a loss may be NaN
            version = about.pop("format")
            if version == FORMAT:
                return _saved(about, {name: _lists(file, name) for name in file.blocks})
    except OSError as error:
        why = error.strerror or error
        raise RecordError(f"cannot read {path}: {why}. gradguard.save_gradients writes one.") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{path} is not what gradguard.save_gradients writes, or it is cut off ({type(error).__name__}): expected "
            "sketches of gradients as safetensors."
        ) from error
    raise RecordError(f"{path} is of format {version!a:.20}, and this gradguard reads {FORMAT}: write it again.")


def _saved(about: dict[str, Any], blocks: dict[str, Runs]) -> SavedGradients:
    """Return the object that a file describes; raise ValueError if the description is impossible."""
    parameters = tuple(SavedParameter(**_checked(p, _PARAMETER)) for p in _is(list, about.pop("parameters")))
    rows = {name.removeprefix(_ROWS): runs for name, runs in blocks.items() if name.startswith(_ROWS)}
    sketches = {name: runs for name, runs in blocks.items() if not name.startswith(_ROWS)}
    told = _checked(about, _ABOUT)
    _check_sketches(sketches, len(parameters), len(told["parts"]))
    known = {p.name: p for p in parameters}
    if len(known) != len(parameters) or not rows.keys() <= known.keys():
        raise ValueError("names")
    runs = len(sketches["gradient"])
    if any(len(of) != runs or len({len(run) for run in of}) != 1 or len(_widths(of)) > 1 for of in rows.values()):
        raise ValueError("rows")
    return SavedGradients(parameters, sketches, rows, **told)


def _check_sketches(sketches: dict[str, Runs], parameters: int, parts: int) -> None:
    """Raise where there are not as many runs, parameters or sums as there must be."""
    if not {"gradient", "weights"} <= sketches.keys() <= {"gradient", "weights", "contrasts", "parts"}:
        raise ValueError("sketches")
    for runs in sketches.values():
        if any(len(run) != parameters for run in runs):
            raise ValueError("sketches")
    if len({width for runs in sketches.values() for width in _widths(runs)}) > 1:
        raise ValueError("sums")
    if not sketches["gradient"] or not sketches["weights"] or len(sketches.get("parts", ())) != parts:
        raise ValueError("runs")
    if not all(isfinite(x) for run in sketches["weights"][:1] for sketch in run for x in sketch):
        raise ValueError("weights")


def _widths(runs: Runs) -> set[int]:
    return {len(sketch) for run in runs for sketch in run}


# What each field must be: a function that returns it, or raises.


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__}")
    return value


def _number(least: float, most: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError("a number")
        return float(value)

    return check


def _count(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not least <= _is(int, value) <= most:
            raise ValueError("a count")
        return value

    return check


def _size(value: Any) -> tuple[int, ...]:
    number_of_elements(value)
    return tuple(value)


def _loss(value: Any) -> float:
    return value if type(value) is float else _number(-_MOST, _MOST)(value)


def _texts(value: Any) -> dict[str, str]:
    return {key: _is(str, text) for key, text in _is(dict, value).items()}


def _text(value: Any) -> str:
    return _is(str, value)


def _facts(value: Any) -> dict[str, float]:
    return {key: _number(_LEAST, _MOST)(fact) for key, fact in _is(dict, value).items()}


_LEAST, _MOST = float_info.min, float_info.max
_PARAMETER: Mapping[str, Callable[[Any], Any]] = {
    "name": _text, "shape": _size, "dtype": _text, "rounding": _number(0, 1), "has_gradient": partial(_is, bool),
    "copies": _count(1, 2**31), "layout": _text, "weight_rounding": _number(0, 1), "one_sided": _number(0, _MOST),
}  # fmt: skip
_ABOUT: Mapping[str, Callable[[Any], Any]] = {
    "parts": lambda value: tuple(map(_text, _is(list, value))), "facts": _facts,
    "losses": lambda value: tuple(map(_loss, _is(list, value))), "random": partial(_is, bool), "epsilon": _number(0, 1),
    "hash_version": _count(0, 2**31), "versions": _texts, "clipped": partial(_is, bool),
}  # fmt: skip


def _checked(fields: Any, table: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return fields that are what the table says; those that are missing have a default, or the class raises."""
    return {key: table[key](value) for key, value in _is(dict, fields).items()}


def _shape(runs: Runs) -> list[int]:
    return [len(runs), len(runs[0]), len(runs[0][0])] if runs and runs[0] else [len(runs), 0, 0]


def _bytes(runs: Runs) -> bytes:
    return _little(array("d", [x for run in runs for sketch in run for x in sketch])).tobytes()


def _lists(file: BlockFile, name: str) -> list[list["array[float]"]]:
    block = file.blocks[name]
    runs, parameters, sums = block.shape
    if block.dtype != "F64" or not (sums or runs * max(parameters, 1) <= _MOST_EMPTY):
        raise ValueError("sketches of no sums")
    flat = array("d", file.read(name))
    _little(flat)
    rows = [flat[i * sums : (i + 1) * sums] for i in range(runs * parameters)]
    return [rows[i * parameters : (i + 1) * parameters] for i in range(runs)]


def _little(numbers: "array[float]") -> "array[float]":
    """Turn the bytes round on a machine that has them the other way, as safetensors has not."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

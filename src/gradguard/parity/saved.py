"""The file format of `save_gradients`: sketches as safetensors, read back as plain numbers without torch."""

import json
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from math import isfinite
from sys import float_info
from typing import Any

from gradguard.errors import RecordError
from gradguard.files.blocks import BlockFile, NewBlock, shape_of, write_blocks
from gradguard.files.foreign_fields import (
    LARGEST,
    Rule,
    list_of,
    mapping_of,
    number,
    object_of,
    text,
    truth,
    whole,
)
from gradguard.files.json_text import decode_json
from gradguard.files.writing import replacing
from gradguard.parity.judge import MeasuredGradient
from gradguard.parity.vectors import Vector

FORMAT = 2
STATE, UPDATE, COPIES = "state", "update of step", "copies of the weights"
START = f"{STATE} before step 1"
"""The stage of the initial state: optimizer states and buffers before the first step."""
GRADIENT = "gradient of step"
BUFFER = "buffer "
"""The prefix of a buffer's name among the tensors of a state."""
TRAINED = "requires_grad"
"""A flag of each parameter that is saved with the optimizer's settings."""
_AFTER = " after step "
FROZEN = "frozen weights"
"""An entry of `SavedGradients.stages` that is not a stage of the step: the weights that are not trained."""

_KEY = "gradguard_parity"
_ROWS, _STAGES = "rows/", "stages/"
_MOST_EMPTY = 1 << 16  # a limit on empty lists, of which a small file could otherwise demand any number

Runs = Sequence[Sequence[Vector]]


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """One parameter of a saved run.

    Attributes:
        name: The name in the model without wrappers.
        shape: The shape of the whole parameter.
        rounding: The relative error of storing and accumulating the gradient.
        has_gradient: Whether any rank has a gradient.
        copies: The number of ranks that hold the same shard.
        weight_rounding: Half a unit in the last place of the parameter's own dtype, relative.
        one_sided: The largest relative error of accumulating the gradient over micro-batches; 0 if it is measured by
            scaled runs instead.
    """

    name: str
    shape: tuple[int, ...]
    rounding: float
    has_gradient: bool
    copies: int
    weight_rounding: float
    one_sided: float = 0.0


@dataclass(frozen=True)
class SavedGradients:
    """The sketches of a model's gradients in one run; the return value of `gradguard.save_gradients`.

    ``facts`` are numbers that may explain a factor. ``random`` is True if the run drew random numbers. ``clipped`` is
    True if the optimizer may use other gradients than the saved ones because of a clip.
    """

    parameters: tuple[SavedParameter, ...]
    sketches: Mapping[str, Sequence[Sequence[Vector]]] = field(repr=False)
    """The sketches of each kind, ``"gradient"``, ``"weights"``, ``"contrasts"`` or ``"parts"``, of shape
    runs × parameters × 32."""
    rows: Mapping[str, Sequence[Sequence[Vector]]] = field(default_factory=dict, repr=False)
    """The sketches of the rows of some parameters, of shape runs × rows × 8."""
    parts: tuple[str, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    random: bool = False
    epsilon: float = 0.0
    hash_version: int = 1
    clipped: bool = False
    settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The numbers among the optimizer's settings at the first step and after each step, by parameter."""
    stages: Mapping[str, "SavedGradients"] = field(default_factory=dict, repr=False)
    """The other stages of the steps, in order: a stage's tensors, such as the optimizer's state, as a saved run."""
    left_out: tuple[str, ...] = ()
    """Descriptions of the parts of the state that are not compared."""

    @property
    def later(self) -> Mapping[str, "SavedGradients"]:
        """The stages without the frozen weights."""
        return {name: one for name, one in self.stages.items() if name != FROZEN}

    def of_each(self, kind: str) -> dict[str, tuple[SavedParameter, tuple[Vector, ...]]]:
        """Return each parameter with its sketches of one kind, one sketch per run, by name."""
        runs = self.sketches.get(kind, ())
        return {p.name: (p, tuple(run[i] for run in runs)) for i, p in enumerate(self.parameters)}

    def measured(self) -> dict[str, MeasuredGradient]:
        """Return the measurements of each parameter, by name, as input of the comparison."""
        parts, contrasts = self.of_each("parts"), self.of_each("contrasts")
        return {
            name: MeasuredGradient(
                p.shape, p.rounding, gradient, repeated, p.has_gradient, contrasts[name][1], p.copies,
                dict(zip(self.parts, parts[name][1], strict=True)), self.rows.get(name, ()), self.epsilon, p.one_sided,
            )
            for name, (p, (gradient, *repeated)) in self.of_each("gradient").items()
        }  # fmt: skip


def after_step(key: str, t: int) -> str:
    """Return the name of a setting after step ``t``."""
    return f"{key}{_AFTER}{t}"


def at_first(name: str) -> str:
    """Return the name of a setting without the suffix that `after_step` adds."""
    return name.partition(_AFTER)[0]


def write(path: str | os.PathLike[str], saved: SavedGradients) -> None:
    """Write ``saved`` atomically: a reader finds the old file or the new one."""
    runs = {**saved.sketches, **{f"{_ROWS}{name}": one for name, one in saved.rows.items()}}
    for stage, one in saved.stages.items():
        runs |= {f"{_STAGES}{stage}/{kind}": sketches for kind, sketches in one.sketches.items()}
    blocks = {}
    for name, one in runs.items():
        numbers = _little(array("d", [x for run in one for sketch in run for x in sketch]))
        shape = [len(one), len(one[0]), len(one[0][0])] if one and one[0] else [len(one), 0, 0]
        blocks[name] = NewBlock("F64", shape, numbers.tobytes())
    about = {**_about(saved), "stages": {stage: _about(one) for stage, one in saved.stages.items()}}
    with replacing(path) as file:
        write_blocks(file, {_KEY: json.dumps({"format": FORMAT, **about})}, blocks)


def _about(saved: SavedGradients) -> dict[str, Any]:
    """Return the fields of ``saved`` that are not sketches or stages."""
    return {"parameters": [asdict(p) for p in saved.parameters], **{name: getattr(saved, name) for name in _ABOUT}}


def read(path: str | os.PathLike[str]) -> SavedGradients:
    """Read a file written by `write`, and check each field.

    Returns:
        The saved run.

    Raises:
        RecordError: If the file cannot be read, is not such a file, or has another format version.
    """
    try:
        with BlockFile(path) as file:
            about = decode_json(file.about[_KEY].encode())
            version = about.pop("format")
            if version == FORMAT:
                return _saved(about, {name: _lists(file, name) for name in file.blocks})
    except OSError as error:
        why = error.strerror or error
        raise RecordError(f"cannot read {path}: {why}. gradguard.save_gradients writes such a file.") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{path} is not what gradguard.save_gradients writes, or it is cut off ({type(error).__name__}): expected "
            "sketches of gradients as safetensors."
        ) from error
    raise RecordError(
        f"{path} has format {version!a:.20}, and this version of gradguard reads format {FORMAT}: save it again."
    )


def _saved(
    about: dict[str, Any], blocks: dict[str, Runs], needed: AbstractSet[str] = frozenset({"gradient", "weights"})
) -> SavedGradients:
    """Return the object described by a file; raise ValueError if the description is inconsistent."""
    stages: dict[str, SavedGradients] = {}
    for stage, of_stage in mapping_of(dict)(about.pop("stages", {})).items():
        front = f"{_STAGES}{stage}/"
        own = {name.removeprefix(front): blocks.pop(name) for name in [*blocks] if name.startswith(front)}
        stages[stage] = _saved(of_stage, own, {"gradient"})
    parameters = tuple(SavedParameter(**one) for one in list_of(object_of(_PARAMETER))(about.pop("parameters")))
    rows = {name.removeprefix(_ROWS): runs for name, runs in blocks.items() if name.startswith(_ROWS)}
    sketches = {name: runs for name, runs in blocks.items() if not name.startswith(_ROWS)}
    fields = object_of(_ABOUT)(about)
    known = {p.name for p in parameters}
    fit = needed <= sketches.keys() and _fit(sketches, len(parameters), fields["parts"])
    if len(known) < len(parameters) or not rows.keys() <= known or not fit:
        raise ValueError("sketches of other parameters")
    if any(len(runs) != len(sketches["gradient"]) for runs in rows.values()):
        raise ValueError("rows")
    return SavedGradients(parameters, sketches, rows, stages=stages, **fields)


def _fit(sketches: dict[str, Runs], parameters: int, parts: Sequence[str]) -> bool:
    """Return whether the numbers of runs, parameters and sums are consistent, and the weights are finite."""
    tables = [runs[0] for runs in sketches.values() if runs]  # all runs of a block have one shape
    return (
        sketches.keys() <= {"gradient", "weights", "contrasts", "parts"}
        and all(len(table) == parameters for table in tables)
        and len({len(sketch) for table in tables for sketch in table}) <= 1
        and all(len(sketches[kind]) > 0 for kind in ("gradient", "weights") if kind in sketches)
        and len(sketches.get("parts", ())) == len(parts)
        and all(isfinite(x) for run in sketches.get("weights", ()) for sketch in run for x in sketch)
    )


def _real(low: float, high: float = LARGEST) -> Rule:
    return lambda value: float(number(low, high)(value))


_PARAMETER: Mapping[str, Rule] = {
    "name": text, "shape": shape_of, "rounding": _real(0, 1), "has_gradient": truth,
    "copies": whole(1, 2**31), "weight_rounding": _real(0, 1), "one_sided": _real(0),
}  # fmt: skip
_ABOUT: Mapping[str, Rule] = {
    "parts": lambda value: tuple(list_of(text)(value)), "facts": mapping_of(_real(float_info.min)),
    "random": truth, "epsilon": _real(0, 1),
    "hash_version": whole(0, 2**31), "clipped": truth,
    "settings": mapping_of(mapping_of(_real(-LARGEST))), "left_out": lambda value: tuple(list_of(text)(value)),
}  # fmt: skip


def _lists(file: BlockFile, name: str) -> list[list["array[float]"]]:
    block = file.blocks[name]
    runs, parameters, sums = block.shape
    if block.dtype != "F64" or not (sums or runs * max(parameters, 1) <= _MOST_EMPTY):
        raise ValueError("sketches of no sums")
    flat = _little(array("d", file.read(name)))
    rows = [flat[i * sums : (i + 1) * sums] for i in range(runs * parameters)]
    return [rows[i * parameters : (i + 1) * parameters] for i in range(runs)]


def _little(numbers: "array[float]") -> "array[float]":
    """Swap the bytes in place on a big-endian machine: safetensors is little-endian."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

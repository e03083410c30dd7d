"""The file that `save_gradients` writes: sketches as safetensors, read back as plain numbers."""

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
"""The stage of the state that a run begins with: of optimizers, and buffers."""
GRADIENT = "gradient of step"
BUFFER = "buffer "
"""The beginning of the name of a buffer, among the tensors of a state."""
TRAINED = "requires_grad"
"""Noted as a setting of each parameter."""
_AFTER = " after step "
FROZEN = "frozen weights"
"""Not a stage of the step: the weights that are not trained."""

_KEY = "gradguard_parity"
_ROWS, _STAGES = "rows/", "stages/"
_MOST_EMPTY = 1 << 16  # lists without a number in them

Runs = Sequence[Sequence[Vector]]


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """One parameter of a saved run.

    Attributes:
        name: Its name in the model without wrappers.
        shape: The shape of the whole parameter.
        rounding: Error of storing its gradient and adding it up, relative.
        has_gradient: Whether any process has a gradient.
        copies: How many ranks hold the same part.
        weight_rounding: Half a unit in the last place of the parameter's own dtype, relative.
        one_sided: Largest error of adding it up over micro-batches, relative; 0 where nobody has asked.
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
    """Sketches of a model's gradients in one run: what `gradguard.save_gradients` returns and writes.

    ``facts`` are numbers that a factor may be; ``random`` tells whether the run drew random numbers, ``clipped``
    whether some gradients may not be those that the optimizer takes, because of a clip.
    """

    parameters: tuple[SavedParameter, ...]
    sketches: Mapping[str, Sequence[Sequence[Vector]]] = field(repr=False)
    """By kind ``"gradient"``, ``"weights"``, ``"contrasts"`` or ``"parts"``: runs × parameters × 32 numbers."""
    rows: Mapping[str, Sequence[Sequence[Vector]]] = field(default_factory=dict, repr=False)
    """By parameter: runs × rows × 8 numbers."""
    parts: tuple[str, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    random: bool = False
    epsilon: float = 0.0
    hash_version: int = 1
    clipped: bool = False
    settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By parameter: the numbers among its optimizer's settings at the first step, and after each one."""
    stages: Mapping[str, "SavedGradients"] = field(default_factory=dict, repr=False)
    """The rest of the step, in order: by stage, its tensors (those of the optimizer's state, say) as a saved run."""
    left_out: tuple[str, ...] = ()
    """The parts of the state that are not compared, in words."""

    @property
    def later(self) -> Mapping[str, "SavedGradients"]:
        """The stages without the frozen weights."""
        return {name: one for name, one in self.stages.items() if name != FROZEN}

    def of_each(self, kind: str) -> dict[str, tuple[SavedParameter, tuple[Vector, ...]]]:
        """Return each parameter with its sketches of one kind, a sketch for each run, by name."""
        runs = self.sketches.get(kind, ())
        return {p.name: (p, tuple(run[i] for run in runs)) for i, p in enumerate(self.parameters)}

    def measured(self) -> dict[str, MeasuredGradient]:
        """Return what is known of each parameter, as the comparison takes it, by name."""
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
    """Return the name of the setting of which ``name`` may be the one after a step."""
    return name.partition(_AFTER)[0]


def write(path: str | os.PathLike[str], saved: SavedGradients) -> None:
    """Write ``saved``, in one piece: a reader sees the old file or the new one."""
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
    """Return the fields that are no sketches."""
    return {"parameters": [asdict(p) for p in saved.parameters], **{name: getattr(saved, name) for name in _ABOUT}}


def read(path: str | os.PathLike[str]) -> SavedGradients:
    """Return what `write` has written, each field of which is what it must be.

    Raises:
        RecordError: If there is no such file, or it is another one.
    """
    try:
        with BlockFile(path) as file:
            about = decode_json(file.about[_KEY].encode())
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


def _saved(
    about: dict[str, Any], blocks: dict[str, Runs], needed: AbstractSet[str] = frozenset({"gradient", "weights"})
) -> SavedGradients:
    """Return the object that a file describes; raise ValueError if the description is impossible."""
    stages: dict[str, SavedGradients] = {}
    for stage, of_stage in mapping_of(dict)(about.pop("stages", {})).items():
        front = f"{_STAGES}{stage}/"
        own = {name.removeprefix(front): blocks.pop(name) for name in [*blocks] if name.startswith(front)}
        stages[stage] = _saved(of_stage, own, {"gradient"})
    parameters = tuple(SavedParameter(**one) for one in list_of(object_of(_PARAMETER))(about.pop("parameters")))
    rows = {name.removeprefix(_ROWS): runs for name, runs in blocks.items() if name.startswith(_ROWS)}
    sketches = {name: runs for name, runs in blocks.items() if not name.startswith(_ROWS)}
    told = object_of(_ABOUT)(about)
    known = {p.name for p in parameters}
    fit = needed <= sketches.keys() and _fit(sketches, len(parameters), told["parts"])
    if len(known) < len(parameters) or not rows.keys() <= known or not fit:
        raise ValueError("sketches of other parameters")
    if any(len(of) != len(sketches["gradient"]) for of in rows.values()):
        raise ValueError("rows")
    return SavedGradients(parameters, sketches, rows, stages=stages, **told)


def _fit(sketches: dict[str, Runs], parameters: int, parts: Sequence[str]) -> bool:
    """Tell whether there are as many runs, parameters and sums as there must be, and the weights are finite."""
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
    """Turn the bytes round on a machine that has them the other way, as safetensors has not."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

"""Files for computing a step again: the step's batch, random generators and weights, and other batches to compare."""

import errno
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.processes import rank_and_size
from gradguard.distributed.redistribute import whole_of
from gradguard.distributed.wrappers import plain_names
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError, RecordError, UnsupportedGradientError
from gradguard.files.writing import replacing
from gradguard.monitoring.record.text import printable
from gradguard.resilience.batch_iterators import Batches, MicroBatch, SampleId
from gradguard.resilience.culprit import Culprit
from gradguard.state.copies import Restorer
from gradguard.state.generators import check_states
from gradguard.state.plain_file import PlainError, PlainReader, PlainWriter
from gradguard.state.saved_snapshot import Unpacker
from gradguard.state.snapshot import Snapshot
from gradguard.torch_private import is_fsdp1

FORMAT = 3
_KIND = "step"

_OTHERS = 8
"""How many batches of other steps are written, to compare with."""


@dataclass(frozen=True)
class EvidenceBatch:
    """A batch of the file, with the states of the random generators before it.

    Attributes:
        step: Number of its step.
        number: Its index among the micro-batches of the step.
        ids: Its samples; None if they were not recorded.
        loss: Its loss in training; None if it was not recorded.
        content: The batch.
        generators: The states of the random generators.
    """

    step: int
    number: int
    ids: tuple[SampleId, ...] | None
    loss: float | None
    content: Any
    generators: dict[str, Any]


@dataclass(frozen=True)
class StepEvidence:
    """The content of a file of `write_evidence`.

    Attributes:
        step: Number of the step that was a spike.
        rank: Rank of the process whose batches these are.
        reason: The reason why the batches are suspect.
        suspects: The batches of the spike.
        others: Batches of other steps, to compare with.
        states: Weights and buffers, by the number of the step that they precede.
        training: Whether the model was in training mode.
        eval_modules: The modules in evaluation mode, if the model was in training mode.
        versions: The version of torch, under the key ``"torch"``.
    """

    step: int
    rank: int
    reason: str
    suspects: tuple[EvidenceBatch, ...]
    others: tuple[EvidenceBatch, ...]
    states: dict[int, dict[str, Tensor]]
    training: bool
    eval_modules: tuple[str, ...]
    versions: dict[str, str]


def write_evidence(
    file: str | os.PathLike[str],
    batches: Batches,
    culprit: Culprit,
    model: nn.Module,
    *,
    older: Mapping[int, Mapping[str, Tensor]] | None = None,
    before: int | None = None,
    others: int = _OTHERS,
) -> Path | None:
    r"""Write the file from which `gradguard replay-step` computes a spike again; all processes call it.

    The rank that is blamed writes its suspect micro-batches; if none is, rank 0 writes its own of the step. Sharded
    weights (FSDP2, DTensors) are gathered, one at a time, and named as in the model without wrappers, so that one
    process can load them.

    **Guarantees.** The file holds tensors, numbers and strings only: reading it runs no code. A reader sees the old
    file or the new one, never a half-written one.

    | case | result |
    |---|---|
    | a batch of other mappings, such as a ``BatchEncoding`` | a dict |
    | a batch of NumPy arrays | the same arrays |
    | a batch of other objects | an error: pass ``batches.saw(ids, batch=...)`` the values that the step needs |
    | a batch that was changed in place meanwhile | an error; among ``others`` it is omitted |
    | FSDP1, a pipeline's stage | an error: the weights of one process are not the whole model |

    Args:
        file: The path to write, such as ``"spike-1204.pt"``.
        batches: The object that stores the batches: ``Batches(keep=True)``.
        culprit: The result of `find_culprit`.
        model: The model, with its present weights.
        older: Weights of another time, by the number of the step that they precede, such as those of a snapshot from
            before the spike. Without them nothing separates bad data from data that only these
            weights cannot fit.
        before: Number of the step that the weights of ``model`` precede; by default the current step. If only skipped
            steps followed the spike, pass ``culprit.step``.
        others: Number of batches of other steps to write, to compare with.

    Returns:
        The file, on the process that wrote it; None on others.

    Raises:
        InvalidValueError: If the batches were not stored, or were changed.
        InvalidTypeError: If a batch cannot be written.
        UnsupportedGradientError: If the weights cannot be gathered.
        OSError: If the file cannot be written, for instance on a full disk; no part of it is left then.

    Example:
        >>> import os, tempfile, torch
        >>> from gradguard.resilience import Batches, find_culprit, write_evidence
        >>> batches, model = Batches(keep=True), torch.nn.Linear(1, 1)
        >>> for step in range(12):
        ...     x = torch.full((1, 1), 100.0 if step == 11 else 1.0 + step / 100)
        ...     batches.saw([step], batch=x)
        ...     batches.record_loss(model(x).square().mean())
        ...     number = batches.end_step()
        >>> culprit = find_culprit(batches, 11)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_evidence(os.path.join(folder, "spike-11.pt"), batches, culprit, model, before=11).name
        'spike-11.pt'
    """
    weights = {batches.step if before is None else before: gathered_weights(model), **(older or {})}
    return _write(Path(file), batches, culprit, model, weights, others)


def _write(
    file: Path,
    batches: Batches,
    culprit: Culprit,
    model: nn.Module,
    weights: Mapping[int, Mapping[str, Tensor]],
    others: int = _OTHERS,
) -> Path | None:
    """Write the file of `write_evidence` with these whole weights; no collective."""
    writer = culprit.blamed[0].rank if culprit.blamed else 0
    if writer != rank_and_size()[0]:
        return None
    suspects = [one for one in culprit.blamed if one.rank == writer] or batches.of_step(culprit.step)
    if not suspects:
        raise InvalidValueError(f"rank {writer} had no batch in step {culprit.step}, so there is nothing to write.")
    evaluating = [name for name, module in model.named_modules() if model.training and not module.training]
    written = {
        "step": culprit.step,
        "rank": writer,
        "reason": culprit.reason,
        "suspects": [_batch(batches, one) for one in suspects],
        "others": _others(batches, culprit.step, others),
        "states": _plain(weights),
        "training": model.training,
        "eval_modules": list(plain_names(model, evaluating).values()),
        "versions": {"torch": str(torch.__version__)},
    }
    return _save(written, file)


def read_evidence(file: str | os.PathLike[str]) -> StepEvidence:
    """Return the content of a file of `write_evidence`; no code in the file is run.

    Raises:
        RecordError: If there is no such file, or it is not a file of `write_evidence`.
    """
    try:
        with PlainReader(file, _KIND) as reader:
            if (version := reader.about.get("format")) == FORMAT:
                return _evidence(Restorer().restored(Unpacker(reader).copy(reader.content())))
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror or error}.") from error
    except Exception as error:  # a file of another kind may raise anything
        why = str(error).partition("\n")[0]
        raise RecordError(
            f"{file} is not a file of gradguard.resilience.write_evidence, or it is cut off ({why})."
        ) from error
    raise RecordError(f"{file} is of format {version!a:.20}, and this gradguard reads {FORMAT}: write it again.")


def _evidence(found: dict[str, Any]) -> StepEvidence:
    """Read the fields of a file, and check the type of each.

    Returns:
        The content of the file.

    Raises:
        ValueError: If a field is of another type.
    """
    batches = {name: tuple(map(_read_batch, found[name])) for name in ("suspects", "others")}
    evidence = StepEvidence(**{**found, **batches, "eval_modules": tuple(found["eval_modules"])})
    _check(int, evidence.step, evidence.rank, *evidence.states)
    _check(str, evidence.reason, *evidence.eval_modules, *evidence.versions.values())
    _check(bool, evidence.training)
    for weights in evidence.states.values():
        _check(str, *weights.keys())
        if not all(isinstance(one, Tensor) and one.layout is torch.strided for one in weights.values()):
            raise ValueError("a weight is not a dense tensor")
    if not evidence.suspects:
        raise ValueError("there is no batch of the spike")
    return replace(evidence, reason=printable(evidence.reason))


def _check(kind: type, *values: Any) -> None:
    wrong = [value for value in values if type(value) is not kind]
    if wrong:
        raise ValueError(f"{wrong[0]!a:.40}: expected a value of type {kind.__name__}")


class EvidenceFolder:
    """Writes the evidence of spikes into a folder: at most one file in ``every`` steps.

    Args:
        folder: The path of the folder, which is created if needed.
        every: The least number of steps between two files.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int) -> None:
        self._folder, self._every, self._last = Path(folder), every, -math.inf

    def write(
        self, batches: Batches, culprit: Culprit, model: nn.Module, older: Mapping[int, Snapshot], before: int | None
    ) -> None:
        """Write ``spike-STEP.pt`` if it is due; all processes call it with the arguments of `write_evidence`."""
        before_it, self._last = self._last, culprit.step
        if culprit.step - before_it < self._every:  # near the last file, perhaps in the same burst
            return
        try:
            # The collectives come first: a process that cannot write must not leave the others waiting.
            weights = {batches.step if before is None else before: gathered_weights(model)}
            weights |= {number: gathered_weights(model, snapshot.weights()) for number, snapshot in older.items()}
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._folder / f"spike-{culprit.step}.pt", batches, culprit, model, weights)
        except (GradguardError, OSError) as error:
            warnings.warn(f"gradguard: no evidence of step {culprit.step} was written: {error}", RuntimeWarning, 2)


def gathered_weights(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return copies on the CPU of the whole weights and buffers, by their names without wrappers.

    Every process that holds a part of them must call.

    Args:
        model: The model.
        state: Other tensors instead of the model's own, by the names of ``model.state_dict()``; None for its own.

    Raises:
        UnsupportedGradientError: If the parts of a tensor cannot be gathered.
    """
    if any(map(is_fsdp1, model.modules())):
        raise UnsupportedGradientError(
            "FSDP1 holds flat parts of several weights: get whole weights by 'with FSDP.state_dict_type(model, "
            "StateDictType.FULL_STATE_DICT): weights = model.state_dict()', or use fully_shard."
        )
    state = model.state_dict() if state is None else state
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    plain = plain_names(model, list(tensors))
    return {
        plain[name]: whole_of(one.detach(), "gather the weights").to("cpu", copy=True) for name, one in tensors.items()
    }


# Writing the fields.


def _batch(batches: Batches, one: MicroBatch) -> dict[str, Any]:
    content, generators = batches.content(one.step, one.number)
    return {
        "step": one.step,
        "number": one.number,
        "ids": None if one.ids is None else list(one.ids),
        "loss": one.loss,
        "content": _plain(content),
        "generators": generators,
    }


def _others(batches: Batches, step: int, count: int) -> list[dict[str, Any]]:
    """Return batches of other steps, earlier ones first and nearest first: later ones may be affected by the spike."""
    ordered = sorted((s for s in batches.known if s != step), key=lambda s: (s > step, abs(s - step)))
    found: list[dict[str, Any]] = []
    for one in (one for s in ordered for one in batches.of_step(s)):
        if len(found) == count:
            break
        with suppress(GradguardError):  # skip a batch that was changed in place or not stored
            found.append(_batch(batches, one))
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` with other mappings replaced by dicts, and parameters by tensors."""
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "items")):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.detach() if isinstance(value, nn.Parameter) else value


def _read_batch(written: dict[str, Any]) -> EvidenceBatch:
    ids = written["ids"]
    one = EvidenceBatch(**{**written, "ids": None if ids is None else tuple(ids)})
    _check(int, one.step, one.number)
    if one.loss is not None:
        _check(float, one.loss)
    if not {*map(type, one.ids or ())} <= {int, str}:
        raise ValueError("the ids of a batch are neither numbers nor text")
    check_states(one.generators)
    return one


def _save(written: dict[str, Any], file: Path) -> Path:
    writer = PlainWriter(_KIND)
    try:
        document = writer.document({"format": FORMAT}, written)
    except PlainError as error:
        raise InvalidTypeError(
            f"the batches or weights contain {error}, which cannot be written: expected tensors, numbers and text in "
            "dicts, lists and tuples. Pass what the step needs: batches.saw(ids, batch={'x': batch.x, 'y': batch.y})."
        ) from error
    try:
        with replacing(file) as out:
            writer.write(out, document)
    except OSError as problem:
        code, why = problem.errno or errno.EIO, problem.strerror or problem
        raise OSError(
            code, f"no evidence was written to {str(file)!r}: {why}. No part of it is left there"
        ) from problem
    return file

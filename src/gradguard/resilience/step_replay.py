"""`gradguard replay-step`: compute a spike again, and tell whether the data or the weights caused it."""

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.check.command import load_callable
from gradguard.clip.functional import get_total_norm
from gradguard.errors import CommandError, GradguardError
from gradguard.files.opening import open_regular, refuse_compressed
from gradguard.json_values import jsonable
from gradguard.resilience.culprit import FAR, deviations, finite
from gradguard.resilience.evidence import EvidenceBatch, StepEvidence, read_evidence
from gradguard.state.generators import generator_states, restore_generators
from gradguard.words import listed

FEWEST = 4
"""Number of other batches that suffice to define the usual level on the same weights."""

_NEAR = 1.1
"""Largest ratio of two losses that count as equal on the same weights; kernels may differ in rounding."""


@dataclass(frozen=True)
class MeasuredBatch:
    """One batch measured with one set of weights: its loss, and the norm of its own gradient."""

    loss: float
    norm: float


@dataclass(frozen=True)
class StateResult:
    """The measurements of all batches with one set of weights.

    Attributes:
        step: The step that these weights precede; None if the file does not say.
        label: A name for these weights.
        suspects: The measurements of the spike's batches.
        others: The measurements of batches of other steps.
    """

    step: int | None
    label: str
    suspects: tuple[MeasuredBatch, ...]
    others: tuple[MeasuredBatch, ...]

    @property
    def score(self) -> float | None:
        """How far the suspects are above the others here, in deviations; None if too few others are finite."""
        return max((score for scores in _deviations(self.suspects, self.others) for score in scores), default=None)

    @property
    def stands_out(self) -> bool:
        """Whether the score is above the threshold."""
        return (self.score or 0.0) > FAR


@dataclass(frozen=True)
class ReplayReport:
    """The result of `gradguard replay-step`.

    Attributes:
        verdict: ``"PASS"``: the spike comes back; ``"FAIL"``: it does not, on the exact weights of the step;
            ``"INCONCLUSIVE"``: it is not known.
        cause: ``"data"``, ``"weights"``, ``"both"`` (this batch on these weights), or None.
        reason: The reason for the verdict, in words.
        step: Number of the step.
        rank: Rank of the process whose batches these are.
        ids: The samples of the suspects.
        states: The measured losses and norms.
    """

    verdict: str
    cause: str | None
    reason: str
    step: int
    rank: int
    ids: tuple[int | str, ...]
    states: tuple[StateResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        states = []
        for s in self.states:
            states.append({"step": s.step, "label": s.label, "score": s.score})
            for name, batches in (("suspects", s.suspects), ("others", s.others)):
                states[-1] |= {f"{name}_{kind}": [getattr(one, kind) for one in batches] for kind in ("loss", "norm")}
        return jsonable({**vars(self), "states": states})

    def __str__(self) -> str:
        """Return the verdict and a table of the measurements."""
        head = f"{self.verdict} {self.cause}" if self.cause else self.verdict
        samples = f"samples {listed(self.ids, 12)}" if self.ids else "samples not known"
        lines = [f"{head}: {self.reason}", "", f"step {self.step}, rank {self.rank}, {samples}", ""]
        rows = [["weights", "loss", "others", "norm", "others", "stands out by"]]
        for s in self.states:
            cells = [s.label]
            for name in ("loss", "norm"):
                suspects, others = ([getattr(one, name) for one in some] for some in (s.suspects, s.others))
                known = finite(others)
                cells += [f"{_largest(suspects):.4g}", f"{median(known):.4g}" if known else "?"]
            rows.append([*cells, "?" if s.score is None else f"{s.score:.1f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines + table)


def replay_step(file: str | Path, target: str, states: Sequence[str | Path] = ()) -> ReplayReport:
    """Compute the step in ``file`` again, on all known weights, beside other batches.

    Args:
        file: A file of `write_evidence`.
        target: ``package.module:name`` of a function without arguments that returns ``(model, step)``: the model as
            built for training, and ``step(batch)``, which returns the loss of a batch as in training.
        states: Further weights, such as those of an older checkpoint: files of a ``state_dict``.

    Returns:
        The report.

    Raises:
        RecordError: If a file cannot be read.
        CommandError: If ``target`` does not return a model and a step, the weights do not fit, or the step raises.
    """
    evidence = read_evidence(file)
    with torch.random.fork_rng(devices=[]):
        model, step = _made(target)
    weights = [
        (number, "of the step" if number == evidence.step else f"before step {number}", one)
        for number, one in sorted(evidence.states.items())
    ]
    weights += [(None, Path(one).name, _state_dict(one)) for one in states]
    run = _ReplayedRun(evidence, model, step, target)
    generators = generator_states()
    try:
        results = tuple(starmap(run.on, weights))
    finally:
        restore_generators(generators)
    verdict, cause, reason = judge(evidence, results)
    ids = tuple(dict.fromkeys(one for batch in evidence.suspects for one in batch.ids or ()))
    return ReplayReport(verdict, cause, reason, evidence.step, evidence.rank, ids, results)


# The verdict, computed from plain numbers.

_Judgement = tuple[str, str | None, str]


def judge(evidence: StepEvidence, results: Sequence[StateResult]) -> _Judgement:
    """Return the verdict, the cause and the reason.

    The suspects are compared with other batches on the same weights, and the others with themselves on other weights.
    Bad data stand out on any weights; on bad weights all batches stand out. Weights from after the step may be bad
    because of the step, so they do not clear the data.
    """
    # Use the weights of the step, or else the nearest; of two that are equally near, the later ones.
    far = [math.inf if one.step is None else abs(one.step - evidence.step - 0.25) for one in results]
    at = results[far.index(min(far))]
    older = next((one for one in results if one is not at and (one.step is None or one.step < evidence.step)), None)
    if len(at.others) < FEWEST:
        return "INCONCLUSIVE", None, (
            f"there are fewer than {FEWEST} other batches in the file, so the usual level is not known: let "
            "Batches(keep=True) store more steps."
        )  # fmt: skip
    if at.step is not None and at.step < evidence.step:
        return _bad_data(at) if at.stands_out else _does_not_come_back(evidence, at)
    raised = _raised(evidence, at, older)
    if raised is None:
        return "INCONCLUSIVE", None, (
            f"whether other batches are as usual on the weights {at.label} is not known: the file has no older "
            "weights. Pass some: --state older_checkpoint.pt."
        )  # fmt: skip
    if not at.stands_out and not raised:
        return _does_not_come_back(evidence, at)
    if different := _different_loss(evidence, at):
        return "INCONCLUSIVE", None, different
    if raised and at.step == evidence.step:
        cause, too = ("both", ", and the batch stands out among them") if at.stands_out else ("weights", "")
        return "PASS", cause, (
            f"the spike comes back: on the weights {at.label} other batches, too, are far above their earlier "
            f"losses{too}. Go back to older weights."
        )  # fmt: skip
    if older is not None and older.stands_out:
        return _bad_data(older)
    if raised:
        return "INCONCLUSIVE", None, (
            f"on the weights {at.label} all batches are far above their earlier losses, but these weights are from "
            "after the step, which may have caused it. Write the weights of the step itself: write_evidence(..., "
            "before=culprit.step)."
        )  # fmt: skip
    # The batch stands out on the weights of the step but on no older ones; other batches are as usual there.
    front = f"the spike comes back: the batch stands out by {at.score:.1f} deviations, and other batches are as usual"
    if older is None or older.score is None:
        return "INCONCLUSIVE", None, (
            f"{front}. It is not the weights alone; whether it is the data alone can be decided by weights of another "
            "time: pass some, as in --state older_checkpoint.pt."
        )  # fmt: skip
    if max(_above(older, at), default=0.0) > FAR:
        return "INCONCLUSIVE", None, (
            f"{front}. On the weights {older.label} it does not, but there all batches are far worse, so nothing "
            "would stand out: pass weights from nearer to the step."
        )  # fmt: skip
    return "PASS", "both", (
        f"{front}, but on the weights {older.label} it is like the others ({older.score:.1f}): it takes this batch on "
        "these weights. Go back to older weights, and skip the batch."
    )  # fmt: skip


def _bad_data(on: StateResult) -> _Judgement:
    return "PASS", "data", (
        f"the spike comes back: on the weights {on.label}, too, the batch stands out by {on.score:.1f} deviations "
        "among other batches. The data are bad: check these samples, or leave them out."
    )  # fmt: skip


def _does_not_come_back(evidence: StepEvidence, at: StateResult) -> _Judgement:
    if at.step != evidence.step:
        return "INCONCLUSIVE", None, (
            f"the spike does not come back on the weights {at.label}, which are not those of step {evidence.step}, so "
            "it may depend on them. Write the weights of the step itself: write_evidence(..., before=culprit.step)."
        )  # fmt: skip
    recorded = [one.loss for one in evidence.suspects if one.loss is not None]
    was = f"; it was {_largest(recorded):.4g}" if recorded else ""
    now = _largest(one.loss for one in at.suspects)
    return "FAIL", None, (
        f"the spike does not come back: on the same weights, batch and random numbers the loss is {now:.4g}{was}. "
        "Possible reasons are the hardware, a computation that is not deterministic, other micro-batches or ranks, or "
        "a step function that is not the one that trained."
    )  # fmt: skip


def _raised(evidence: StepEvidence, at: StateResult, older: StateResult | None) -> bool | None:
    """Tell whether the other batches are far above their losses on older weights, or in training shortly before."""
    excess = [] if older is None else [*_above(at, older)]
    recorded = finite(one.loss for one in evidence.others if one.step < evidence.step)
    comparable = at.step == evidence.step and all(one.loss is not None for one in evidence.suspects)
    if comparable and len(recorded) >= FEWEST:  # the suspects' losses show whether the step computes training's loss
        excess.append(median(deviations(one.loss, recorded) for one in at.others))
    return max(excess) > FAR if excess else None


def _above(here: StateResult, there: StateResult) -> list[float]:
    """Return how far the other batches are above themselves on other weights, by the loss and by the norm."""
    return [median(scores) for scores in _deviations(here.others, there.others) if scores]


def _deviations(these: Sequence[MeasuredBatch], usual: Sequence[MeasuredBatch]) -> list[list[float]]:
    """Return how far each of ``these`` is above the usual level, by the loss and by the norm, where it is known."""
    found = []
    for name in ("loss", "norm"):
        known = finite(getattr(one, name) for one in usual)
        if len(known) >= FEWEST:
            found.append([deviations(getattr(one, name), known) for one in these])
    return found


def _different_loss(evidence: StepEvidence, at: StateResult) -> str:
    """Return an explanation if the exact weights of the step give another loss than in training; else ""."""
    if at.step != evidence.step:
        return ""
    for was, now in zip(evidence.suspects, at.suspects, strict=True):
        if was.loss is None or not (math.isfinite(was.loss) or math.isfinite(now.loss)):
            continue
        if not abs(now.loss - was.loss) <= (_NEAR - 1) * abs(was.loss):
            return (
                f"on the same weights, batch and random numbers the loss is {now.loss:.4g} and was {was.loss:.4g}: the "
                "step function is not the one that trained, or something is not deterministic. It is compared with the "
                "loss that batches.record_loss or guard.record_loss received."
            )
    return ""


# Measurements.


class _ReplayedRun:
    def __init__(self, evidence: StepEvidence, model: nn.Module, step: Callable[[Any], Any], target: str) -> None:
        self.evidence, self.model, self.step, self.target = evidence, model, step, target

    def on(self, number: int | None, label: str, weights: Mapping[str, Tensor]) -> StateResult:
        suspects, others = (
            tuple(self._measured(label, weights, batch) for batch in some)
            for some in (self.evidence.suspects, self.evidence.others)
        )
        return StateResult(number, label, suspects, others)

    def _measured(self, label: str, weights: Mapping[str, Tensor], batch: EvidenceBatch) -> MeasuredBatch:
        self._load(label, weights)
        self.model.zero_grad(set_to_none=True)
        here = {device for device, _ in generator_states()["devices"]}
        devices = [pair for pair in batch.generators["devices"] if pair[0] in here]
        restore_generators({**batch.generators, "devices": devices})
        try:
            loss = self.step(batch.content)
        except GradguardError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise CommandError(
                f"the step of {self.target} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}). It "
                f"was given the batch of step {batch.step}: {_described(batch.content)}."
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CommandError(
                f"the step of {self.target} returned {_described(loss)}: expected the loss, one number with a graph, "
                "and neither backward() nor item()."
            )
        loss.reshape(()).backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not grads:
            raise CommandError(f"the step of {self.target} does not use the model that {self.target} returned.")
        return MeasuredBatch(float(loss.detach()), float(get_total_norm(grads)))

    def _load(self, label: str, weights: Mapping[str, Tensor]) -> None:
        own = {name: one for name, one in self.model.state_dict().items() if isinstance(one, Tensor)}
        wrong = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
        if wrong:
            raise CommandError(
                f"the weights {label} do not fit the model that {self.target} returned: {wrong[:5]} of "
                f"{len(wrong)} differ. Build it as in training, without wrappers."
            )
        with torch.no_grad():
            for name, one in own.items():
                one.copy_(weights[name])
        self.model.train(self.evidence.training)
        modules = dict(self.model.named_modules())
        for name in self.evidence.eval_modules:
            if name not in modules:
                raise CommandError(f"the model that {self.target} returned has no module {name!a:.80}, as in training.")
            modules[name].training = False


def _made(target: str) -> tuple[nn.Module, Callable[[Any], Any]]:
    make = load_callable(target)
    try:
        made = make()
    except Exception as error:
        raise CommandError(f"{target}() raised {type(error).__name__}: {error}.") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise CommandError(
            f"{target}() returned {_described(made)}: expected (model, step), the model as built for training and a "
            "function that takes a batch and returns its loss."
        )
    return made


def _state_dict(file: str | Path) -> dict[str, Tensor]:
    try:
        with open_regular(file) as opened:
            refuse_compressed(opened)
            found = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind may raise anything
        raise CommandError(
            f"--state {file}: {type(error).__name__}: {error}. Expected a file of torch.save(model.state_dict(), file)."
        ) from error
    if not isinstance(found, dict) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise CommandError(
            f"--state {file} contains {_described(found)}: expected a file of torch.save(model.state_dict(), file)."
        )
    return found


# Text.


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, dict):
        return f"a dict of {[*value][:8]}"
    return type(value).__name__


def _largest(values: Iterable[float]) -> float:
    """Return the largest number; NaN counts as larger than all others."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)

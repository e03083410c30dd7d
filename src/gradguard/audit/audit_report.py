"""The report of an audit of a norm, as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradguard.json_values import jsonable
from gradguard.words import counted, listed, verdict_text

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

UNDECIDED = ("claim", "unknown", "unfit", "unread", "epsilon", "blind", "unseen", "unclipped", "refused")
"""Kinds of findings that make an audit INCONCLUSIVE; a finding of any other kind makes it FAIL."""


@dataclass(frozen=True)
class NormFinding:
    """One fault of a norm, or one fact that cannot be known.

    Attributes:
        kind: ``"factor"``: a class of tensors does not count once, ``"ranks"``: only what some ranks hold counts,
            ``"local"``: each rank's norm covers only what that rank holds, ``"mean"``: the norms of the ranks are
            averaged, ``"disagree"``: ranks have different norms, ``"copies"``: copies have different gradients,
            ``"drift"``: copies have different weights, ``"total"``: the norm is not the root of a sum over classes,
            ``"reported"``: the reported norm is not the true one, ``"coefficient"``: gradients are not multiplied by
            min(1, max / norm); ``"claim"``: values contradict the declared copies and parts. The kinds ``"unknown"``,
            ``"unfit"``, ``"unread"``, ``"epsilon"``, ``"blind"``, and for a script ``"unseen"``, ``"unclipped"``,
            ``"refused"``, mean that the norm cannot be judged.
        message: The fault, in words.
        names: The affected parameters.
        factor: How often their squares count, if that is one number; for ``"reported"`` and ``"coefficient"`` the
            actual value divided by the expected one.
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()
    factor: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" [{listed(self.names, 3)}]" if self.names else "")


@dataclass(frozen=True)
class NormClass:
    """Tensors that share one layout over the processes.

    Attributes:
        layout: The layout, in words.
        names: The names of the tensors.
        square: The sum of squares of their gradients, each element once.
        counts: How often the norm counts these squares, as probed or fitted; None if tensors count differently or
            nothing was probed.
    """

    layout: str
    names: tuple[str, ...]
    square: float
    counts: float | None = None


NormClasses = tuple[NormClass, ...]


@dataclass(frozen=True)
class NormAudit:
    """The outcome of `audit_norm`: print it, or ask for its ``verdict`` and ``findings``.

    **Guarantees.** ``bool(audit)`` is True for PASS alone. Every reason for another verdict is a finding. A class of
    tensors whose count one number cannot show is in the notes.

    Attributes:
        verdict: PASS; FAIL if a finding says that something is wrong; INCONCLUSIVE if one says that it cannot be known.
        findings: The reasons why the verdict is not PASS.
        notes: Facts worth knowing that are no fault.
        true_norm: The 2-norm of all gradients, each element once; NaN if values do not show which are copies.
        norm: Result of the norm function for these gradients on this process; None without a function.
        reported: Norm reported on this process; None if none was.
        classes: The classes of tensors, and how often each counts.
        probes: Number of calls of the norm function.
        processes: Number of processes.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(3, 2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> audit = gg.audit_norm(model, lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        >>> audit.verdict, audit.findings
        ('PASS', ())
    """

    verdict: Verdict
    findings: tuple[NormFinding, ...] = ()
    notes: tuple[str, ...] = ()
    true_norm: float = math.nan
    norm: float | None = None
    reported: float | None = None
    classes: tuple[NormClass, ...] = ()
    probes: int = 0
    processes: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values; NaN and infinity become None."""
        return jsonable(asdict(self))

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        said = [f"true norm {self.true_norm:.6g}"]
        said += [f"computed {self.norm:.6g}"] if self.norm is not None else []
        said += [f"reported {self.reported:.6g}"] if self.reported is not None else []
        tensors = sum(len(c.names) for c in self.classes)
        said.append(f"{counted(tensors, 'tensor')} in {counted(len(self.classes), 'class', 'classes')}")
        said += [counted(self.processes, "process", "processes"), counted(self.probes, "probe")]
        return verdict_text(self.verdict, self.findings, ", ".join(said), self.notes)


def verdict_of(findings: Sequence[NormFinding]) -> Verdict:
    """Return FAIL if any finding is a fault, INCONCLUSIVE if there are other findings, else PASS."""
    if any(finding.kind not in UNDECIDED for finding in findings):
        return "FAIL"
    return "INCONCLUSIVE" if findings else "PASS"

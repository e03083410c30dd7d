"""`audit_norm`: compare the norm that an engine computes, reports and applies with the true norm of the gradients."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.audit.audit_report import NormAudit, NormClasses, NormFinding, verdict_of
from gradguard.audit.coefficients import Applied, coefficient_findings
from gradguard.audit.epsilons import LARGEST_EPSILON, epsilon_finding, is_one_of, with_epsilon
from gradguard.audit.factors import MOST_HYPOTHESES, Setting, fit, named
from gradguard.audit.held import (
    DRIFTED,
    Claim,
    Groups,
    Processes,
    check_groups,
    check_whole,
    contradictions,
    tensors_of,
    true_norm,
    with_claims,
)
from gradguard.audit.pieces import TASK, Piece, modules_of, pieces_of
from gradguard.audit.probe import Counted, Probe, classes_of, elements_value, finding_of, norm_classes
from gradguard.distributed.processes import gather, rank_and_size
from gradguard.distributed.redistribute import whole_of
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.words import listed

NormFunction = Callable[[], float | Tensor]

_HALVES = ("float16", "bfloat16")

_OF_HALVES = 1e-2
"""Relative tolerance of squared norms that are computed in 16 bits."""

_PRECISE = 1e-5
"""Relative rounding error above which a norm was not computed in 32 bits."""

_ASKED = 4
"""Number of tensors that are probed to measure how the norm is rounded."""


def audit_norm(
    model: nn.Module | Iterable[nn.Module],
    norm: NormFunction | None = None,
    reported: float | Tensor | None = None,
    groups: Mapping[str, Claim] | None = None,
    *,
    max_norm: float | None = None,
    accumulation: int = 1,
    loss_scale: float = 1.0,
) -> NormAudit:
    r"""Tell whether a global gradient norm is the true one, and which tensors it counts wrongly.

    The true norm is :math:`\sqrt{\sum_c s_c}`, where :math:`s_c` is the sum of squares of class c of tensors. Each
    element enters once, however many processes hold it. An engine answers :math:`R^2 = \sum_c m_c s_c`, and each
    :math:`m_c` should be 1. If ``norm`` is given, it is probed: all gradients are set to zero except some tensors of
    one class, whose squares are known. If a norm was only reported, the :math:`m_c` of all known mistakes are tried,
    and a mistake is reported only if no other explains the number.

    Call it after backward and before the step, on all processes alike, with gradients as the norm function needs them.

    Guarantees:
        - Gradients are bit-identical afterwards and the same objects, even if the norm function clips or raises.
        - All processes get the same verdict and findings.
        - Copies are recognised by values: weights are equal on copies and differ on parts. Where weights are
          constant, gradients are compared. Layouts of DTensor, FSDP1 and DistributedDataParallel name the parts and
          copies that they make. Megatron's attributes are claims that decide only where values do not.
        - A norm that cannot be known is never a PASS: ``true_norm`` is NaN, and the verdict INCONCLUSIVE or FAIL.
        - The parts of one gradient that a layout names must add up to all its elements, or the audit is refused.
        - While ``norm`` is probed, gradients take twice the memory. A process sends fewer than 100 numbers a tensor.

    Edge cases:

        =====================================  ======================================================
        no process has a gradient              `UnsupportedGradientError`
        a gradient is sparse, or not finite    `UnsupportedGradientError`
        values do not show what is a copy      INCONCLUSIVE, with what to pass as ``groups``
        values contradict ``groups``           INCONCLUSIVE, with what the values show
        ``norm`` does not read ``.grad``       INCONCLUSIVE; its one value is judged as if reported
        norms of 16 bits, by their values      compared to 1 percent, a note
        other norms                            the squares are compared to 1e-4
        ``norm()`` of zeros is up to 1e-5      an epsilon, a note
        ``reported`` off as by 1e-6, 1e-7 ...  INCONCLUSIVE, where an epsilon may explain it
        ``reported``, errors that cancel       not found; with ``norm`` they are, class by class
        a gradient equally wrong on all ranks  not found: the true norm is of the gradients held
        =====================================  ======================================================

    Args:
        model: The module, or several, such as this process' pipeline stages; the root module of FSDP1; DeepSpeed's
            engine.
        norm: Function without arguments that returns the 2-norm as the engine would use it. It may clip. If it keeps
            a history of norms, the history also receives the norms of the probes.
        reported: Norm of these gradients as the engine reports it, on this process.
        groups: Role of ordinary tensors across processes, by a pattern of names: ``"sharded"`` or ``"replicated"``.
            A claim decides where values do not; a claim that values contradict is INCONCLUSIVE. A pattern that matches
            no parameter with a gradient is an error, and so are two patterns with different claims about one parameter.
        max_norm: Threshold of ``norm()``, if it clips; then its factor on each gradient is audited too.
        accumulation: Number of micro-batches of a step, used to name factors.
        loss_scale: Factor that gradients still contain; the true norm is computed without it.

    Returns:
        The audit.

    Raises:
        InvalidTypeError: If an argument has another type.
        InvalidValueError: If a number is not positive and finite, or ``groups`` matches nothing or contradicts itself.
        UnsupportedGradientError: If gradients cannot be audited, on any process.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> def forgets_biases():
        ...     return torch.stack([p.grad.norm() for p in model.parameters() if p.ndim > 1]).norm()
        >>> audit = gg.audit_norm(model, forgets_biases)
        >>> print(audit.verdict, audit.findings[0])
        FAIL factor: 2 tensors held whole by one process count 0 times: it is left out [0.bias, 1.bias]
    """
    _check(norm, groups, max_norm, accumulation, loss_scale)
    watched = WatchedClip.of(modules_of(model), None, accumulation, loss_scale, groups)
    check_groups(groups, watched.tensors)
    return watched.audit(max_norm, norm, number_of(reported, "reported"))


class WatchedClip:
    """The gradients of all processes, captured before a clip, and the audit of the clip afterwards.

    Args:
        pieces: The pieces of gradients that this process holds.
        processes: Summaries of the pieces of every process, by rank.
        setting: Numbers of the run.
        groups: The user's claims about ordinary tensors, by a pattern of their names.
    """

    def __init__(
        self, pieces: Sequence[Piece], processes: Processes, setting: Setting, groups: Groups | None = None
    ) -> None:
        self.pieces, self.processes, self.setting, self.groups = pieces, processes, setting, groups
        self.tensors = tensors_of(processes, groups)

    @classmethod
    def of(
        cls,
        models: Sequence[nn.Module],
        wanted: Collection[int] | None = None,
        accumulation: int = 1,
        loss_scale: float = 1.0,
        groups: Groups | None = None,
    ) -> "WatchedClip":
        """Capture the gradients of a script's parameters before a clip.

        Args:
            models: The modules that hold the parameters.
            wanted: The ids of these parameters; None for all.
            accumulation: Number of micro-batches of a step.
            loss_scale: The factor that gradients are still multiplied by.
            groups: The user's claims about ordinary tensors, by a pattern of their names.

        Returns:
            The captured gradients.

        Raises:
            UnsupportedGradientError: If gradients cannot be audited, on any process.
        """
        pieces, error = list[Piece](), None
        try:
            pieces = pieces_of(models, wanted)
        except GradguardError as raised:
            error = raised
        _raise_together(error)
        mine = [piece.held(i) for i, piece in enumerate(pieces)]
        if bad := [h.names[0] for h in mine if not math.isfinite(h.square)]:
            error = UnsupportedGradientError(
                f"the gradient of {bad[0]} is not finite, or its square leaves float64: audit a step with finite "
                "gradients."
            )
        _raise_together(error)
        processes = everywhere(mine)
        if not any(processes):
            raise UnsupportedGradientError(
                "no parameter has a gradient: expected .grad after backward and before the step. If an engine keeps "
                "gradients elsewhere, pass the engine, as in gg.audit_norm(engine) for DeepSpeed's ZeRO."
            )
        check_whole(processes)
        return cls(pieces, processes, Setting(len(processes), accumulation, loss_scale), groups)

    def audit(
        self,
        max_norm: float | None,
        norm: NormFunction | None = None,
        reported: float | None = None,
        applied: Sequence[Applied] | None = None,
    ) -> NormAudit:
        """Audit a norm, or the gradients alone: check that copies are equal, and compute the true norm.

        Args:
            max_norm: The threshold of a clip; None if the clip has no single threshold.
            norm: Computes the norm, and may clip. It is called for each probe, and the gradients are restored.
            reported: The norm of a clip that has acted; None if there was none.
            applied: The clip's factor on each gradient; None if it does not multiply all gradients by one number.

        Returns:
            The audit.
        """
        try:
            return _Audit(self, reported).run(norm, max_norm, applied)
        finally:
            if norm is not None:
                self.put_back()

    def tried(self, scale: Callable[[], Any], norm: Any) -> list[Applied]:
        """Call ``scale``, which only scales, return its factor for each gradient, and undo it."""
        try:
            scale()
            return self.applied(norm)
        finally:
            self.put_back()

    def applied(self, norm: Any) -> list[Applied]:
        """Return the factor by which each gradient of this process was multiplied since it was captured."""
        computed = number_of(norm, "the norm of the clip") or 0.0
        return [one for piece in self.pieces if (one := piece.applied(computed)) is not None]

    def put_back(self) -> None:
        """Restore the gradients."""
        with torch.no_grad():
            for piece in self.pieces:
                piece.put_back()

    @classmethod
    def joined(cls, clips: Sequence["WatchedClip"]) -> "WatchedClip":
        """Join the gradients of several clips into one, for a norm that was computed over several lists."""
        processes = [list(chain(*of_clips)) for of_clips in zip(*(clip.processes for clip in clips), strict=True)]
        indexed = [[replace(one, index=i) for i, one in enumerate(held)] for held in processes]
        return cls(list(chain(*(clip.pieces for clip in clips))), indexed, clips[0].setting)


class _Audit:
    """One audit, with the results that its steps share."""

    def __init__(self, watched: WatchedClip, reported: float | None) -> None:
        self._watched, self._tensors, self._setting = watched, watched.tensors, watched.setting
        self._reported, self._scale = reported, watched.setting.loss_scale
        self._true = true_norm(self._tensors) / self._scale
        self._places = classes_of(self._tensors)
        self._classes = norm_classes(self._tensors, self._places)
        self._findings, self._notes = list[NormFinding](), list[str]()
        self._precision, self._calls, self._epsilon = 0.0, 0, 0.0
        is_half = any(held.dtype in _HALVES for t in self._tensors for _, held in t.holders)
        self._tolerance = _OF_HALVES if is_half else 1e-4

    def run(self, norm: NormFunction | None, max_norm: float | None, applied: Sequence[Applied] | None) -> NormAudit:
        """Run the audit and return it."""
        self._look_at_copies()
        computed = None
        if norm is not None:
            computed = self._called(norm)
            applied = self._watched.applied(computed)
            self._watched.put_back()
            self._ask(norm, computed)
        if applied is not None:
            self._judge_coefficients(max_norm, applied)  # by a norm whose precision is known now
        if self._reported is not None:
            self._compare(self._reported, norm is not None)
        return NormAudit(
            verdict_of(self._findings), tuple(self._findings), tuple(self._notes), self._true, computed, self._reported,
            self._classes, self._calls, self._setting.world,
        )  # fmt: skip

    def _find(self, kind: str, message: str, names: Sequence[str] = (), factor: float | None = None) -> None:
        self._findings.append(NormFinding(kind, message, tuple(names), factor))

    def _look_at_copies(self) -> None:
        self._findings += contradictions(self._tensors)
        sound = [t for t in self._tensors if not t.contradiction]
        differ = [t for t in sound if any(part.differ for part in t.parts)]
        unknown = [t for t in sound if t.unknown]
        asked = [t for t in unknown if t.square]
        groups = with_claims(self._watched.groups, [*differ, *asked], self._tensors)
        if differ:
            what = "copies of one weight have different gradients: they were not summed over its processes"
            if groups:
                what += f". If they are separate tensors that started equal, as copied experts do, pass groups={groups}"
            self._find("copies", what, [t.name for t in differ])
        apart = [t for t in self._tensors if t.drift > DRIFTED and not t.unknown]
        if apart:
            what = (
                f"the weights of copies differ by {max(t.drift for t in apart):.2g} of their norm; copies must be "
                "equal: they were stepped differently, or were not equal at the start"
            )
            self._find("drift", what, [t.name for t in apart])
        if dead := [t.name for t in unknown if not t.square]:
            what = "gradients are all zero, so copies cannot be recognised; not probed: "
            self._notes.append(what + ", ".join(dead))
        if asked:
            what = f"values do not show whether processes hold copies or parts: pass groups={groups}, or 'replicated'"
            if any(t.drift > DRIFTED for t in unknown):
                what = "weights differ a little, as drifted copies or parts that started equal do; " + what
            self._find("unknown", what, [t.name for t in asked])

    def _called(self, norm: NormFunction) -> float:
        """Call the norm function and return its result on this process; raise on all processes if one failed."""
        self._calls += 1
        found, error = None, None
        try:
            found = number_of(norm(), "the result of norm()")
            if found is None:
                raise InvalidTypeError("norm() returned None: expected the norm, as clip_grad_norm_ returns it.")
        except Exception as raised:
            error = raised
        _raise_together(error, "norm() raised ")
        assert found is not None
        return found

    def _probe(self, norm: NormFunction) -> Probe:
        me, _ = rank_and_size()
        place_of = {held.index: i for i, t in enumerate(self._tensors) for r, held in t.holders if r == me}

        def ask(places: Sequence[int], rank: int | None, again: bool) -> list[float]:
            wanted = set(places) if rank in (None, me) else set()
            with torch.no_grad():
                for index, piece in enumerate(self._watched.pieces):
                    place = place_of[index]
                    piece.fill(elements_value(place, self._tensors[place].numel, again) if place in wanted else 0.0)
            try:
                return everywhere(self._called(norm) * self._scale)
            finally:
                self._watched.put_back()

        return Probe(self._tensors, ask, self._setting, self._tolerance)

    def _ask(self, norm: NormFunction, computed: float) -> None:
        """Probe how often the norm function counts each tensor, and check these counts on the real gradients."""
        probe = self._probe(norm)
        zero = probe.ask([], None, False)
        self._epsilon = max(zero) / self._scale
        if not all(0 <= z <= LARGEST_EPSILON * self._scale for z in zero):
            self._find("unread", "norm() is not 0 when all gradients are 0: it does not read them, or adds something "
                       "to their norm")  # fmt: skip
            self._judge("norm() returned", computed)
            return
        counted, everything = probe.counts(self._places), everywhere(computed)
        if self._is_rounded(probe, counted, everything):
            self._tolerance = self._precision = probe.tolerance = _OF_HALVES
            self._notes.append("norm() is computed in 16 bits: it is compared to 1 percent")
            counted = probe.counts(self._places)
        off = [one for one in counted if one.kind]
        self._findings += [finding_of(one, self._tensors) for one in off]
        self._classes = norm_classes(self._tensors, self._places, counted)
        if math.isnan(self._true):
            return
        if not off:  # a norm that is no sum of squares may count each class once and still be wrong
            if self._epsilon:
                self._notes.append(f"norm() is {self._epsilon:.6g} when all gradients are 0: it adds an epsilon")
            if wrong := [x for x in everything if not self._is_true([x])]:
                what = f"each class counts once, but the norm of all is {wrong[0]:.6g} where {self._true:.6g} is true"
                self._find("total", what, (), self._times_true(wrong[0]))
        elif all(one.kind == "factor" and one.count is not None for one in off):
            self._check_factors(everything[0], counted)

    def _is_rounded(self, probe: Probe, counted: Sequence[Counted], everything: Sequence[float]) -> bool:
        """Tell whether a norm that is wrong for no known reason is computed in 16 bits, judging by its values."""
        off = [one for one in counted if one.kind]
        is_known = all(one.words or one.count is None for one in off)
        if self._tolerance >= _OF_HALVES or (is_known if off else self._is_true(everything)):
            return False
        asked = [one for one in off if not one.words] or counted
        places = [i for one in asked for i in one.places if self._tensors[i].numel][:_ASKED]
        return all(map(has_16_bits, everything)) or _PRECISE < probe.rounding(places) <= _OF_HALVES

    def _check_factors(self, computed: float, counted: Sequence[Counted]) -> None:
        """Remove the explanation of factors that do not reproduce the norm of the real gradients."""
        terms = [(one.count or 0.0) * self._tensors[i].square for one in counted for i in one.places]
        made = math.sqrt(math.fsum(terms)) / self._scale
        if self._is(computed, *with_epsilon(made, self._epsilon)):
            return
        self._findings = [
            replace(f, message=f.message.partition(": ")[0]) if f.kind == "factor" else f for f in self._findings
        ]
        what = (
            f"on the real gradients these factors would make {made:.6g}, but the norm is {computed:.6g}: it is not the "
            "root of a sum over tensors, so the factors have no known reason"
        )
        self._find("total", what)

    def _is(self, norm: float, *expected: float) -> bool:
        return is_one_of(norm, expected, self._tolerance)

    def _is_true(self, norms: Sequence[float]) -> bool:
        """Tell whether all norms equal the true one, with or without the epsilon that was found; True if unknown."""
        return math.isnan(self._true) or all(self._is(x, *with_epsilon(self._true, self._epsilon)) for x in norms)

    def _judge_coefficients(self, max_norm: float | None, applied: Sequence[Applied]) -> None:
        all_applied: list[Applied] = list(chain(*everywhere(applied)))
        if anew := dict.fromkeys(one.name for one in all_applied if math.isnan(one.coefficient)):
            what = "the clip changed the layout of gradients, so the factor applied to them is not known"
            if max_norm is None:
                self._notes.append(f"{what}: {', '.join(anew)}")
            else:
                self._find("unread", what, [*anew])
        if math.isnan(self._true) and max_norm is not None:
            self._notes.append("coefficients were not judged: the true norm is not known")
            return
        known = [one for one in all_applied if not math.isnan(one.coefficient)]
        found = coefficient_findings(known, max_norm, self._true, self._scale, self._precision)
        self._findings += everywhere(found)[0]

    def _compare(self, reported: float, was_asked: bool) -> None:
        everything = everywhere(reported)
        first = everything[0]
        if all(map(has_16_bits, everything)):
            self._tolerance = max(self._tolerance, _OF_HALVES)
        if not all(self._is(x, first) for x in everything) and not all(map(math.isnan, everything)):
            came = listed([f"{x:.6g}" for x in everything], 8)
            squares = [0.0] * len(everything)
            for rank, held in chain(*(t.holders for t in self._tensors)):
                squares[rank] += held.square
            local = all(self._is(x * self._scale, math.sqrt(own)) for x, own in zip(everything, squares, strict=True))
            kind, why = ("local", ": each is the norm of what the rank itself holds") if local else ("disagree", "")
            self._find(kind, f"ranks report different norms, {came}{why}")
        elif not math.isfinite(first):
            self._find("reported", f"the reported norm is {first}, but the gradients are finite")
        elif not was_asked:
            self._classes = self._judge("reported", first)
        elif not math.isnan(self._true) and not self._is(first, self._true):
            self._report_wrong(first, "")

    def _report_wrong(self, came: float, words: str) -> None:
        ratio = self._times_true(came)
        what = f"the reported norm is {came:.6g}, {ratio:.6g} times the true norm of {self._true:.6g}{words}"
        self._find("reported", what, (), ratio)

    def _judge(self, what: str, came: float) -> NormClasses:
        """Find the known mistakes that explain one number, and return the classes with the counts that follow."""
        classes = self._classes
        if math.isnan(self._true):
            return classes
        if self._is(came, self._true):
            self._notes.append(
                "judged by one number: errors that cancel in it are not found. Pass norm= to probe each tensor"
            )
            total = math.fsum(c.square for c in classes)
            for one in classes:
                if one.square <= 10 * self._tolerance * total:
                    share = one.square / total if total else 0.0
                    some = f"{len(one.names)} tensors {one.layout} have {share:.1g} of the squares"
                    self._notes.append(f"{some}: one number cannot show how they count")
            return classes
        if (doubt := epsilon_finding(what, came, self._true, self._tolerance)) is not None:
            self._findings.append(doubt)
            return classes
        self._report_wrong(came, self._words_for_all(self._times_true(came)))
        known = [self._tensors[places[0]].counts(self._setting) for places in self._places]
        if math.prod(map(len, known)) > MOST_HYPOTHESES:
            self._find("unfit", f"its {len(classes)} classes have too many known factors to try: pass norm=")
            return classes
        fits = fit([one.square for one in classes], came * self._scale, known, self._tolerance)
        if len(fits) != 1:
            some = f"{len(fits)} different factors of its {len(classes)} classes explain it equally: pass the norm "
            none = "no known factor of any class explains it"
            self._find("unfit", f"{some}function as norm=" if fits else none)
            return classes
        for count, one, its in zip(fits[0], classes, known, strict=True):
            if count != 1:
                words = named(count, its, self._tolerance)[1]
                said = f"{len(one.names)} tensors {one.layout} count {count:.6g} times, the only explanation: {words}"
                self._find("factor", said, one.names, count)
        return tuple(replace(one, counts=count) for one, count in zip(classes, fits[0], strict=True))

    def _times_true(self, norm: float) -> float:
        return norm / self._true if self._true else math.inf

    def _words_for_all(self, ratio: float) -> str:
        one = self._setting
        known = {
            f"the {one.world} processes": one.world,
            f"the {one.accumulation} micro-batches": one.accumulation,
            "the loss scale": one.loss_scale,
        }
        for form, value in (("multiplied by", ratio), ("divided by", 1 / ratio if ratio else math.inf)):
            words = [word for word, k in known.items() if k != 1 and math.isclose(k, value, rel_tol=self._tolerance)]
            if words:
                return f", as if {form} {' or '.join(words)}"
        return ""


def has_16_bits(norm: float) -> bool:
    """Tell whether a norm is representable in 16 bits; a norm computed in 32 bits is so once in a few thousand."""
    return any(
        float(torch.tensor(norm, dtype=dtype, device="cpu")) == norm for dtype in (torch.float16, torch.bfloat16)
    )


def everywhere(value: Any) -> list[Any]:
    """Gather ``value`` from every process, in the order of ranks; a collective."""
    return gather(value, task=TASK)


def _raise_together(error: Exception | None, what: str = "") -> None:
    """Raise this process' error, or else another process' error prefixed by ``what``; a collective."""
    kind = f"{type(error).__name__}: " if what else ""
    said = everywhere(None if error is None else f"{kind}{error}")
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise UnsupportedGradientError(f"{what}on rank {rank}: {text}")


def number_of(value: Any, what: str) -> float | None:
    """Return a norm as a float; a DTensor is gathered whole first. None stays None."""
    if value is None:
        return None
    value = whole_of(value, TASK) if isinstance(value, Tensor) else value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"{what} is {type(value).__name__}: expected a number, or a tensor of one element."
        ) from None


def _check(norm: Any, groups: Groups | None, max_norm: Any, accumulation: Any, loss_scale: Any) -> None:
    if norm is not None and not callable(norm):
        raise InvalidTypeError(
            f"norm is {type(norm).__name__}: expected a function without arguments; a number goes to reported=."
        )
    if wrong := {k: v for k, v in (groups or {}).items() if v not in ("sharded", "replicated")}:
        raise InvalidValueError(f"groups is {wrong}: expected 'sharded' or 'replicated' for each pattern of names.")
    for name, value in (("max_norm", max_norm), ("accumulation", accumulation), ("loss_scale", loss_scale)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidValueError(f"{name} is {value}: expected a positive, finite number.")
    if max_norm is not None and norm is None:
        raise InvalidValueError("max_norm is given without norm: expected the function that clips, norm=lambda: ...")

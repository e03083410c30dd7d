"""`audit_norm`: the norm that an engine computes, reports and applies, against that of what the processes hold."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.audit.coefficients import Applied, coefficient_findings
from gradguard.audit.epsilons import LARGEST_EPSILON, epsilon_finding, is_one_of, with_epsilon
from gradguard.audit.factors import Setting, candidates, fit, named
from gradguard.audit.held import DRIFTED, Claim, Held, check_groups, contradictions, tensors_of, true_norm, with_claims
from gradguard.audit.held import Tensor as WholeTensor
from gradguard.audit.pieces import Piece, modules_of, pieces_of
from gradguard.audit.probe import Ask, Counted, Probe, classes_of, elements_value, finding_of, norm_classes
from gradguard.audit.report import NormAudit, NormClass, NormFinding, verdict_of
from gradguard.distributed.processes import gather, rank_and_size
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError, UnsupportedGradientError

NormFunction = Callable[[], float | Tensor]

_HALVES = ("float16", "bfloat16")

_OF_HALVES = 1e-2
"""To this part of their squares norms of 16 bits are compared."""

_PRECISE = 1e-5
"""A norm that is rounded by more than this part of itself is not computed in 32 bits."""

_ASKED = 4
"""Tensors that are asked how a norm is rounded."""


def audit_norm(
    model: nn.Module | Iterable[nn.Module],
    norm: NormFunction | None = None,
    reported: float | Tensor | None = None,
    groups: Mapping[str, Claim] | None = None,
    *,
    max_norm: float | None = None,
    accumulation: int = 1,
    loss_scale: float = 1.0,
    earlier: Sequence[NormAudit] = (),
) -> NormAudit:
    r"""Tell whether a global gradient norm is the true one, and which tensors it counts wrongly.

    The true norm is :math:`\sqrt{\sum_c s_c}`, with :math:`s_c` the sum of squares of class c of tensors, each element
    once however many processes hold it. An engine answers :math:`R^2 = \sum_c m_c s_c`, and each :math:`m_c` should be
    1. Where the norm function can be called, it is asked: all gradients are zero but those of some tensors of one
    class, whose squares are known. Where a norm was only reported, all :math:`m_c` of known mistakes are tried, and one
    is told only if no other explains the number.

    Call it after backward and before the step, on all processes alike, with gradients as the norm function needs them.

    Guarantees:
        - Gradients are bit-identical afterwards and the same objects, also where the norm function clips or raises.
        - All processes get the same verdict and findings.
        - What is a copy of what is told by values: by weights, which are equal on copies and not on parts; where these
          are constant, by gradients. Layouts of DTensor, FSDP1 and DistributedDataParallel name the parts and copies
          that they make; Megatron's attributes are claims that count only where values do not tell.

    Edge cases:

        =====================================  ======================================================
        no process has a gradient              `UnsupportedGradientError`
        a gradient is sparse, or not finite    `UnsupportedGradientError`
        values do not tell what is a copy      INCONCLUSIVE, with what to pass as ``groups``
        values contradict ``groups``           INCONCLUSIVE, with what they tell
        the norm does not read ``.grad``       INCONCLUSIVE, judged by its one value as if it was reported
        norms of 16 bits, by their values      compared to 1 percent, a note
        ``norm()`` adds up to 1e-5 to zeros    an epsilon, a note
        ``reported`` off as by 1e-6, 1e-7 ...  INCONCLUSIVE, where an epsilon may make it
        =====================================  ======================================================

    Args:
        model: The module, or several, such as this process' pipeline stages; the root module of FSDP1; DeepSpeed's
            engine.
        norm: Called without arguments, returns the 2-norm that the engine would use; it may clip. A call that keeps a
            history of norms gets those of the probes too.
        reported: What the engine says the norm of these gradients is, on this process.
        groups: What ordinary tensors are across processes, by a pattern of names: ``"sharded"`` or ``"replicated"``.
            It is believed where values do not tell; what they contradict is INCONCLUSIVE. A pattern that no parameter
            with a gradient has is an error, and so are two that say different things of one.
        max_norm: What ``norm()`` clips to; then what it multiplies each gradient by is audited too.
        accumulation: Number of micro-batches of a step, for the names of factors.
        loss_scale: What gradients are still multiplied by; the true norm is without it.
        earlier: Audits of earlier steps with ``reported``, which tell classes apart that one step does not.

    Returns:
        The audit.

    Raises:
        InvalidTypeError: If an argument has another type.
        InvalidValueError: If a number is not positive and finite, ``groups`` matches nothing or contradicts itself, or
            an earlier audit is of something else.
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
    _check(norm, reported, groups, max_norm, accumulation, loss_scale)
    pieces, processes = _described(modules_of(model))
    tensors = tensors_of(processes, groups)
    setting = Setting(len(processes), accumulation, loss_scale)
    check_groups(groups, tensors)
    audit = _Audit(pieces, tensors, setting, _number(reported, "reported"), groups)
    audit.check_earlier(earlier)
    try:
        return audit.run(norm, max_norm, earlier)
    finally:
        audit.put_back()


class WatchedClip:
    """A clip of a script, looked at before it acts and judged afterwards.

    Args:
        models: The modules that hold its parameters.
        wanted: The identities of these parameters.
        accumulation: Number of micro-batches of a step.
        loss_scale: What gradients are multiplied by.

    Raises:
        UnsupportedGradientError: If gradients cannot be audited, on any process.
    """

    def __init__(
        self, models: Sequence[nn.Module], wanted: Collection[int], accumulation: int = 1, loss_scale: float = 1.0
    ) -> None:
        self._pieces, self._processes = _described(models, wanted)
        self._tensors = tensors_of(self._processes)
        self._setting = Setting(len(self._processes), accumulation, loss_scale)

    def again(self, clip: NormFunction, max_norm: float | None) -> NormAudit:
        """Audit a clip that can be called: it is, for each probe, and gradients are as before."""
        audit = self._audit(None)
        try:
            return audit.run(clip, max_norm, ())
        finally:
            audit.put_back()

    def tried(self, scale: Callable[[], Any], norm: Any) -> list[Applied]:
        """Return what a call that is told the norm, and only scales, does to the gradients; these are as before."""
        try:
            scale()
            return self.applied(norm)
        finally:
            self._audit(None).put_back()

    def applied(self, norm: Any) -> list[Applied]:
        """Return what this process' gradients have been multiplied by since."""
        computed = _number(norm, "the norm of the clip") or 0.0
        return [one for piece in self._pieces if (one := piece.applied(computed)) is not None]

    def joined(self, others: Sequence["WatchedClip"]) -> "WatchedClip":
        """Return the clip of all these gradients together, as where one norm is that of several lists."""
        whole = WatchedClip.__new__(WatchedClip)
        whole._pieces = [piece for clip in (self, *others) for piece in clip._pieces]
        whole._processes = []
        for of_clips in zip(*(clip._processes for clip in (self, *others)), strict=True):
            held = [one for of_clip in of_clips for one in of_clip]
            whole._processes.append([replace(one, index=i) for i, one in enumerate(held)])
        whole._tensors, whole._setting = tensors_of(whole._processes), self._setting
        return whole

    def told(
        self, norm: Any, max_norm: float | None, applied: Sequence[Applied] | None, earlier: Sequence[NormAudit] = ()
    ) -> NormAudit:
        """Audit a clip that tells its norm, or is told it.

        Args:
            norm: The norm.
            max_norm: What it clips to; None if that is not one number.
            applied: What it did; None where it does not multiply all gradients by one number.
            earlier: Audits of the same clip at earlier steps.

        Returns:
            The audit.
        """
        return self._audit(norm).run_after(max_norm, earlier, applied)

    def alone(self) -> NormAudit:
        """Audit the gradients without a norm: whether copies are alike, and the true norm."""
        return self._audit(None).run(None, None, ())

    def _audit(self, norm: Any) -> "_Audit":
        return _Audit(self._pieces, self._tensors, self._setting, _number(norm, "the norm of the clip"))


class _Audit:
    """One audit, with what its steps hand on."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        tensors: list[WholeTensor],
        setting: Setting,
        reported: float | None,
        groups: Mapping[str, Claim] | None = None,
    ) -> None:
        self._pieces, self._tensors, self._setting, self._groups = pieces, tensors, setting, groups
        self._me, _ = rank_and_size()
        self._reported = reported
        self._true = true_norm(tensors) / setting.loss_scale
        self._classes = classes_of(tensors)
        self._place = {
            held.index: i
            for i, t in enumerate(tensors)
            for part in t.parts
            for r, held in part.holders
            if r == self._me
        }
        self._findings, self._notes = list[NormFinding](), list[str]()
        self._tolerance, self._precision, self._calls, self._epsilon = 1e-4, 0.0, 0, 0.0
        if any(held.dtype in _HALVES for t in tensors for part in t.parts for _, held in part.holders):
            self._tolerance = _OF_HALVES

    def run(self, norm: NormFunction | None, max_norm: float | None, earlier: Sequence[NormAudit]) -> NormAudit:
        self._look_at_copies()
        computed, classes = None, norm_classes(self._tensors, self._classes, ())
        if norm is not None:
            computed = self._called(norm)
            applied = [one for piece in self._pieces if (one := piece.applied(computed)) is not None]
            self.put_back()
            classes = self._probed(norm, computed)
            self._judge_coefficients(max_norm, applied)  # by a norm whose precision is known now
        if self._reported is not None:
            classes = self._compared(self._reported, classes, earlier, norm is not None)
        return self._result(computed, classes)

    def run_after(
        self, max_norm: float | None, earlier: Sequence[NormAudit], applied: Sequence[Applied] | None
    ) -> NormAudit:
        """Audit what a clip that tells its norm has done; earlier audits of other classes are left out."""
        self._look_at_copies()
        if applied is not None:
            self._judge_coefficients(max_norm, applied)
        classes = norm_classes(self._tensors, self._classes, ())
        if self._reported is not None:
            same = [one for one in earlier if self._why_not_earlier(one) is None]
            classes = self._compared(self._reported, classes, same, False)
        return self._result(None, classes)

    def put_back(self) -> None:
        with torch.no_grad():
            for piece in self._pieces:
                piece.put_back()

    def check_earlier(self, earlier: Sequence[NormAudit]) -> None:
        """Refuse audits that are not of the same tensors, lying alike."""
        for place, one in enumerate(earlier):
            if (why := self._why_not_earlier(one)) is not None:
                raise InvalidValueError(
                    f"earlier[{place}] {why}: expected audits of other steps of this run, with reported= and the same "
                    "loss_scale."
                )

    def _why_not_earlier(self, one: NormAudit) -> str | None:
        now = norm_classes(self._tensors, self._classes, ())
        square = math.fsum(c.square for c in one.classes)
        scaled = math.isclose(square, (one.true_norm * self._setting.loss_scale) ** 2, rel_tol=1e-6)
        if one.reported is None:
            return "has no reported norm"
        if [(c.layout, c.names) for c in one.classes] != [(c.layout, c.names) for c in now]:
            return "is of other tensors, or they lie in another way"
        return None if scaled else "has another loss scale"

    def _result(self, computed: float | None, classes: tuple[NormClass, ...]) -> NormAudit:
        return NormAudit(
            verdict_of(self._findings), tuple(self._findings), tuple(self._notes), self._true, computed, self._reported,
            classes, self._calls, self._setting.world,
        )  # fmt: skip

    def _look_at_copies(self) -> None:
        self._findings += contradictions(self._tensors)
        differ = [t for t in self._tensors if any(part.differ for part in t.parts) and not t.contradiction]
        unknown = [t for t in self._tensors if t.unknown and not t.contradiction]
        asked = [t for t in unknown if t.square]
        groups = with_claims(self._groups, [*differ, *asked], self._tensors)
        if differ:
            names = tuple(" = ".join(t.names) for t in differ)
            what = "copies of one weight have different gradients: not added up over the processes that hold it"
            if groups:
                what += f". If they only began alike, as experts made of one layer do, pass groups={groups}"
            self._findings.append(NormFinding("copies", what, names))
        apart = [t for t in self._tensors if t.drift > DRIFTED and not t.unknown]
        if apart:
            names, most = tuple(" = ".join(t.names) for t in apart), max(t.drift for t in apart)
            what = (
                f"the weights of copies are {most:.2g} of their norm apart, where copies are equal: they were stepped "
                "differently, or not made equal at first"
            )
            self._findings.append(NormFinding("drift", what, names))
        if dead := [" = ".join(t.names) for t in unknown if not t.square]:
            what = "without a gradient, so that nothing tells what is a copy; not probed: "
            self._notes.append(what + ", ".join(dead))
        if asked:
            names = tuple(" = ".join(t.names) for t in asked)
            what = f"values do not tell whether processes hold copies or parts: pass groups={groups}, or 'replicated'"
            if any(t.drift > DRIFTED for t in unknown):
                what = "weights are a little apart, of copies that drifted or of parts that began alike; " + what
            self._findings.append(NormFinding("unknown", what, names))

    def _called(self, norm: NormFunction) -> float:
        """What the norm function returns on this process, after all have come."""
        self._calls += 1
        found: float | None = None
        error: Exception | None = None
        try:
            found = _number(norm(), "what norm() returned")
            if found is None:
                raise InvalidTypeError("norm() returned None: expected the norm, as clip_grad_norm_ returns it.")
        except Exception as raised:
            error = raised
        said = everywhere(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        others = [(rank, one) for rank, one in enumerate(said) if one is not None]
        if others:
            raise UnsupportedGradientError(f"norm() raised on rank {others[0][0]}: {others[0][1]}")
        assert found is not None
        return found

    def _ask(self, norm: NormFunction) -> Ask:
        def ask(places: Sequence[int], rank: int | None, again: bool) -> list[float]:
            wanted = set(places) if rank in (None, self._me) else set()
            with torch.no_grad():
                for index, piece in enumerate(self._pieces):
                    place = self._place[index]
                    piece.fill(elements_value(place, self._tensors[place].numel, again) if place in wanted else 0.0)
            try:
                return everywhere(self._called(norm) * self._setting.loss_scale)
            finally:
                self.put_back()

        return ask

    def _probed(self, norm: NormFunction, computed: float) -> tuple[NormClass, ...]:
        ask = self._ask(norm)
        probe = Probe(self._tensors, ask, self._setting.world, self._setting, self._tolerance)
        zero = ask([], None, False)
        self._epsilon = max(zero) / self._setting.loss_scale
        if not all(0 <= z <= LARGEST_EPSILON * self._setting.loss_scale for z in zero):
            what = "norm() is not 0 where all gradients are: it does not read them, or adds something to their norm"
            self._findings.append(NormFinding("unread", what))
            self._judge("norm() returned", computed, norm_classes(self._tensors, self._classes, ()), ())
            return norm_classes(self._tensors, self._classes, ())
        counted = probe.counts(self._classes)
        if self._is_rounded(probe, counted, everywhere(computed)):
            self._tolerance = self._precision = _OF_HALVES
            self._notes.append("norm() is computed in 16 bits: it is compared to 1 percent")
            probe = Probe(self._tensors, ask, self._setting.world, self._setting, self._tolerance)
            counted = probe.counts(self._classes)
        self._findings += [finding_of(one, self._tensors) for one in counted if one.kind]
        everything = everywhere(computed)
        if math.isnan(self._true):
            pass
        elif not any(one.kind for one in counted):
            self._check_total(everything)
        elif all(one.kind in ("", "factor") for one in counted):
            self._check_factors(everything[0], counted)
        return norm_classes(self._tensors, self._classes, counted)

    def _is_rounded(self, probe: Probe, counted: Sequence[Counted], everything: Sequence[float]) -> bool:
        """Tell by its own values whether a norm that is off, for no known reason, is computed in 16 bits."""
        off = [one for one in counted if one.kind]
        is_known = all(one.words or one.count is None for one in off)
        right = math.isnan(self._true) or all(self._is(x, *self._expected()) for x in everything)
        if self._tolerance >= _OF_HALVES or (is_known if off else right):
            return False
        asked = [one for one in off if not one.words] or counted
        places = [i for one in asked for i in one.places if self._tensors[i].numel][:_ASKED]
        return all(map(has_16_bits, everything)) or _PRECISE < probe.rounding(places) <= _OF_HALVES

    def _expected(self) -> tuple[float, ...]:
        return with_epsilon(self._true, self._epsilon)

    def _check_total(self, everything: Sequence[float]) -> None:
        """On the real gradients all classes together: a norm that is no sum of squares passes each alone."""
        if self._epsilon:
            self._notes.append(f"norm() is {self._epsilon:.6g} where all gradients are 0, as an epsilon makes it")
        wrong = [x for x in everything if not self._is(x, *self._expected())]
        if wrong:
            what = f"each class counts once, and the norm of all is {wrong[0]:.6g} where {self._true:.6g} is true"
            self._findings.append(NormFinding("total", what, (), wrong[0] / self._true if self._true else None))

    def _check_factors(self, computed: float, counted: Sequence[Counted]) -> None:
        """Take back the words for factors that do not make the norm of the real gradients."""
        if any(one.count is None for one in counted):
            return
        terms = [(one.count or 0.0) * self._tensors[i].square for one in counted for i in one.places]
        made = math.sqrt(math.fsum(terms)) / self._setting.loss_scale
        if self._is(computed, *with_epsilon(made, self._epsilon)):
            return
        what = (
            f"on the real gradients these factors would make {made:.6g}, and the norm is {computed:.6g}: it is the "
            "root of no sum over tensors, so that the factors have no known reason"
        )
        self._findings = [
            replace(f, message=f.message.partition(": ")[0]) if f.kind == "factor" else f for f in self._findings
        ]
        self._findings.append(NormFinding("total", what))

    def _is(self, norm: float, *expected: float) -> bool:
        return is_one_of(norm, expected, self._tolerance)

    def _judge_coefficients(self, max_norm: float | None, applied: Sequence[Applied]) -> None:
        all_applied: list[Applied] = [one for of_rank in everywhere(applied) for one in of_rank]
        anew = tuple(dict.fromkeys(one.name for one in all_applied if math.isnan(one.coefficient)))
        all_applied = [one for one in all_applied if not math.isnan(one.coefficient)]
        if anew:
            what = "gradients are laid out anew by the clip, so that it is not known what they are multiplied by"
            if max_norm is None:
                self._notes.append(f"{what}: {', '.join(anew)}")
            else:
                self._findings.append(NormFinding("unread", what, anew))
        if math.isnan(self._true) and max_norm is not None:
            self._notes.append("coefficients were not judged: the true norm is not known")
            return
        found = coefficient_findings(all_applied, max_norm, self._true, self._setting.loss_scale, self._precision)
        self._findings += everywhere(found)[0]

    def _compared(
        self, reported: float, classes: tuple[NormClass, ...], earlier: Sequence[NormAudit], was_probed: bool
    ) -> tuple[NormClass, ...]:
        everything = everywhere(reported)
        if all(map(has_16_bits, everything)):
            self._tolerance = max(self._tolerance, _OF_HALVES)
        if not all(self._is(x, everything[0]) or (math.isnan(x) and math.isnan(everything[0])) for x in everything):
            came = ", ".join(f"{x:.6g}" for x in everything[:8])
            own = [math.sqrt(sum(h.square for t in self._tensors for p in t.parts for r, h in p.holders if r == rank))
                   for rank in range(len(everything))]  # fmt: skip
            local = all(self._is(x * self._setting.loss_scale, o) for x, o in zip(everything, own, strict=True))
            kind, why = ("local", ": each is that of what the rank holds itself") if local else ("disagree", "")
            self._findings.append(NormFinding(kind, f"ranks report different norms, {came}{why}"))
            return classes
        if not math.isfinite(everything[0]):
            what = f"the reported norm is {everything[0]}, of gradients that are finite"
            self._findings.append(NormFinding("reported", what))
            return classes
        if was_probed:
            if not math.isnan(self._true) and not self._is(everything[0], self._true):
                self._report_wrong(everything[0], "")
            return classes
        return self._judge("reported", everything[0], classes, earlier)

    def _report_wrong(self, came: float, words: str) -> None:
        ratio = came / self._true if self._true else math.inf
        what = f"the reported norm is {came:.6g} where {self._true:.6g} is true, {ratio:.6g} times{words}"
        self._findings.append(NormFinding("reported", what, (), ratio))

    def _judge(
        self, what: str, came: float, classes: tuple[NormClass, ...], earlier: Sequence[NormAudit]
    ) -> tuple[NormClass, ...]:
        """Judge one number by the mistakes that would make it."""
        if math.isnan(self._true):
            return classes
        steps = [*earlier]
        rows = [[c.square for c in e.classes] for e in steps] + [[c.square for c in classes]]
        norms = [float(e.reported or math.nan) for e in steps] + [came]
        scale = self._setting.loss_scale
        if all(self._is(n, math.sqrt(math.fsum(row)) / scale) for n, row in zip(norms, rows, strict=True)):
            self._note_blind(classes)
            return classes
        if (doubt := epsilon_finding(what, came, math.sqrt(math.fsum(rows[-1])) / scale, self._tolerance)) is not None:
            self._findings.append(doubt)
            return classes
        ratios = [
            n * scale / math.sqrt(math.fsum(row)) if sum(row) else math.inf for n, row in zip(norms, rows, strict=True)
        ]
        self._report_wrong(came, self._words_for_all(ratios[-1]))
        tensors = [self._tensors[places[0]] for places in self._classes]
        known = [candidates(self._setting, t.copies, len(t.parts), len(t.names)) for t in tensors]
        fits = fit(rows, [n * scale for n in norms], [list(k) for k in known], self._tolerance)
        if len(fits) != 1:
            self._say_unfit(len(fits), len(classes))
            return classes
        return self._fitted(fits[0], classes, known)

    def _words_for_all(self, ratio: float) -> str:
        one = self._setting
        known: list[tuple[float, str]] = [
            (one.world, f"the {one.world} processes"),
            (one.accumulation, f"the {one.accumulation} micro-batches"),
        ]
        known.append((one.loss_scale, "the loss scale"))
        for form, value in (("multiplied by", ratio), ("divided by", 1 / ratio if ratio else math.inf)):
            words = [word for k, word in known if k != 1 and math.isclose(k, value, rel_tol=self._tolerance)]
            if words:
                return f", as if {form} {' or '.join(words)}"
        return ""

    def _say_unfit(self, count: int, classes: int) -> None:
        what = (
            "no known factor of one class or more explains it"
            if not count
            else f"{count} different factors of its {classes} classes explain it alike: pass audits of other steps as "
            "earlier=, or the norm function as norm="
        )
        self._findings.append(NormFinding("unfit", what))

    def _fitted(
        self, counts: Sequence[float], classes: Sequence[NormClass], known: Sequence[Mapping[float, list[str]]]
    ) -> tuple[NormClass, ...]:
        found = []
        for count, one, its in zip(counts, classes, known, strict=True):
            found.append(NormClass(one.layout, one.names, one.square, count))
            if count != 1:
                words = named(count, its, self._tolerance)[1]
                what = f"{len(one.names)} tensors {one.layout} count {count:.6g} times, the only explanation: {words}"
                self._findings.append(NormFinding("factor", what, one.names, count))
        return tuple(found)

    def _note_blind(self, classes: Sequence[NormClass]) -> None:
        self._notes.append("judged by one number: errors that cancel in it are not seen. norm= asks for each tensor")
        total = math.fsum(c.square for c in classes)
        for one in classes:
            if one.square <= 10 * self._tolerance * total:
                share = one.square / total if total else 0.0
                what = f"{len(one.names)} tensors {one.layout} have {share:.1g} of the squares"
                self._notes.append(f"{what}: one number cannot tell how they count")


def has_16_bits(norm: float) -> bool:
    """Tell whether a norm is a number of 16 bits, as one of 32 is once in a few thousand."""
    return any(float(torch.tensor(norm, dtype=dtype)) == norm for dtype in (torch.float16, torch.bfloat16))


def everywhere(value: Any) -> list[Any]:
    """Return the ``value`` of every process, by its rank; a collective."""
    return gather(value, task="audit a norm")


def _described(
    models: Sequence[nn.Module], wanted: Collection[int] | None = None
) -> tuple[list[Piece], list[list[Held]]]:
    """What this process holds, and all processes do in short. Where one must refuse, all do."""
    pieces, mine, error = [], [], None
    try:
        pieces = pieces_of(models, wanted)
    except GradguardError as raised:
        error = raised
    _raise_together(error)
    mine = [piece.held(i) for i, piece in enumerate(pieces)]
    bad = next((h.names[0] for h in mine if not math.isfinite(h.square)), None)
    if bad is not None:
        error = UnsupportedGradientError(
            f"the gradient of {bad} is not finite, or its square leaves float64: audit a step with finite gradients."
        )
    _raise_together(error)
    processes = everywhere(mine)
    if not any(processes):
        raise UnsupportedGradientError(
            "no parameter has a gradient: expected .grad after backward and before the step. An engine that keeps "
            "gradients elsewhere is audited itself, as in gg.audit_norm(engine) for DeepSpeed's ZeRO."
        )
    _check_whole(processes)
    return pieces, processes


def _check_whole(processes: Sequence[Sequence[Held]]) -> None:
    """Where a layout says how many elements a tensor has, its parts must have them: a wrong layout is no truth."""
    held: dict[tuple, int] = {}
    for pieces in processes:
        for one in pieces:
            if one.whole is not None:
                key = one.names, one.group, one.whole
                held[key] = held.get(key, 0) + one.numel
    for (names, _, whole), numel in held.items():
        if numel != whole:
            raise UnsupportedGradientError(
                f"the parts of the gradient of {names[0]} have {numel} elements on all processes: expected {whole}, "
                "each once. What the engine holds is not one gradient; no true norm can be told from it."
            )


def _raise_together(error: GradguardError | None) -> None:
    said = everywhere(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise UnsupportedGradientError(f"on rank {rank}: {text}")


def _number(value: Any, what: str) -> float | None:
    """A norm as a number: of a DTensor the whole one."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[attr-defined]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"{what} is {type(value).__name__}: expected a number, or a tensor of one element."
        ) from None


def _check(norm: Any, reported: Any, groups: Any, max_norm: Any, accumulation: Any, loss_scale: Any) -> None:
    if norm is not None and not callable(norm):
        raise InvalidTypeError(
            f"norm is {type(norm).__name__}: expected a function without arguments; a number goes to reported=."
        )
    if groups is not None:
        wrong = {k: v for k, v in groups.items() if v not in ("sharded", "replicated")}
        if wrong:
            raise InvalidValueError(f"groups is {wrong}: expected 'sharded' or 'replicated' for each pattern of names.")
    for name, value in (("max_norm", max_norm), ("accumulation", accumulation), ("loss_scale", loss_scale)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidValueError(f"{name} is {value}: expected a positive, finite number.")
    if max_norm is not None and norm is None:
        raise InvalidValueError("max_norm is given without norm: expected the function that clips, norm=lambda: ...")

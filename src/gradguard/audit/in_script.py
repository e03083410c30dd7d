"""Audit the clips of a script during its first steps: a listener of the run, which also sums up the result.

It observes PyTorch's clipping functions, FSDP1's method, gradguard's own clips, and the clips of the engines that
`gradguard.script_events` and `ScriptAudit.on_begin` name. A step without any of these is reported as ``unseen``.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.audit.audit_report import NormAudit, NormFinding, Verdict, verdict_of
from gradguard.audit.coefficients import Applied
from gradguard.audit.norm import WatchedClip, everywhere, number_of
from gradguard.distributed.engines import titan
from gradguard.distributed.engines.zero import CLIP_OF_COPIES, STEP, clip_of_engine, holds_gradients_itself
from gradguard.distributed.placements import gradient_of
from gradguard.errors import GradguardError, InvalidTypeError
from gradguard.grad_scaler import ScalerStep
from gradguard.listeners import ClipCall, ClipEvent, Listener, muted
from gradguard.optimizer_hooks import parameters_of
from gradguard.replacements import Replacement
from gradguard.script_events import by_norm
from gradguard.torch_private import parameter_slots
from gradguard.words import counted

_SEEN = (
    "clips of PyTorch (clip_grad_norm_, clip_grads_with_norm_), FSDP1, gradguard, Megatron-core, torchtitan and "
    "DeepSpeed are observed. Audit another norm in the script itself: gg.audit_norm(model, norm)"
)

_OF_CLIP = "the norm of the clip"


class AuditDone(SystemExit):
    """Ends a script whose norm has been audited; as a `SystemExit` it runs the script's clean-up."""


@dataclass(slots=True)
class _Scaled:
    """A call of a clip that received its norm as an argument."""

    parameters: list[Tensor]
    watched: WatchedClip
    applied: list[Applied]
    norm: Any
    limit: float | None


class ScriptAudit(Listener):
    """Audits the clips of a script; a listener of its backward passes, clips and steps.

    Args:
        modules: Returns the root modules that exist.
        steps: Number of optimizer steps to audit; the script ends after them.
        goes_on: Let the script continue after them, unaudited.

    Attributes:
        done: Whether all these steps have been audited.
        audits: The audits in order, each with the ids of its parameters.
    """

    def __init__(self, modules: Callable[[], list[nn.Module]], steps: int, goes_on: bool = False) -> None:
        self._modules, self._left, self._goes_on = modules, steps, goes_on
        self.audits: list[tuple[frozenset[int], NormAudit]] = []
        self.done = False
        self._begin_round()
        self._known: dict[frozenset[int], list[nn.Module]] = {}  # a cache: finding all modules takes a while
        self._silent = 0  # depth of calls whose inner clips are part of a clip that was already announced
        self._ends: list[Callable[[], None]] = []

    def _begin_round(self) -> None:
        """Reset the state of a round: from the first backward pass or clip after a step to the last optimizer step."""
        self._backwards, self._first = 0, len(self.audits)
        self._stepped: set[int] = set()
        self._clipped: set[int] = set()
        self._scaled: list[_Scaled] = []  # calls that received their norm
        self._whole = False  # an engine has clipped everything
        self._own: tuple[list[Tensor], WatchedClip] | None = None

    def on_begin(self) -> None:
        """Replace the clipping functions of engines, to audit them too."""
        self._ends = [
            Replacement(*titan.CLIP, self._clip_of_engine).use(),
            Replacement(*CLIP_OF_COPIES, self._clip_of_copies).use(),
            Replacement(*STEP, self._step_of_engine).use(),
        ]

    def on_end(self) -> None:
        """Restore the clipping functions of engines."""
        for end in self._ends:
            end()

    # --- what the script does -----------------------------------------------------------------------------------------

    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> None:
        """Count the micro-batches."""
        self._may_end_round()
        self._backwards += 1

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> contextlib.AbstractContextManager:
        """Audit a clipping function, but no calls inside it; capture gradients before gradguard's own clips."""

        def look() -> None:
            self._own = list(parameters), self._watched(parameters)

        if not self._is_deaf:
            self._may_end_round()
        if not self._is_deaf:
            self._own = None
            if not call.rule:
                self._guarded(parameters, look)
            elif call.rule == "norm" and call.norm_type == 2:
                self._guarded(parameters, lambda: self._audited(call, parameters, _number(call.threshold)))
            else:
                what = "a clip by value has no norm" if call.rule == "value" else f"a norm of order {call.norm_type:g}"
                self._refuse(parameters, f"{what}: only 2-norms are audited")
        return self._in_silence()

    def on_clipped(self, event: ClipEvent) -> None:
        """Judge the norm of one of gradguard's clips, which has acted."""
        seen, self._own = self._own, None
        if self._is_deaf or event.elements is not None:
            return
        if seen is None:
            if event.optimizer is not None and _number(event.threshold) != math.inf:  # infinity only measures
                self._refuse(event.parameters, f"{event.rule} acts within the step, where it cannot be called again")
            return
        parameters, watched = seen
        if event.norm is None or event.norm_type != 2:
            self._refuse(parameters, f"the clip by {event.rule} reports no 2-norm of all gradients")
            return
        norm = event.norm

        def judged() -> NormAudit:
            applied = watched.applied(norm) if event.rule == "norm" else None  # other rules have no single coefficient
            return watched.audit(_number(event.threshold), None, number_of(norm, _OF_CLIP), applied)

        self._guarded(parameters, judged)

    def on_scaler_step(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Report gradients that were clipped before `unscale_`, and so at the wrong scale."""
        scale = 1.0 if step.scale is None else float(step.scale)
        held = set(map(id, parameters_of(optimizer)))
        self._guarded_scaled()
        if scale != 1.0 and held & self._clipped:
            what = f"gradients are clipped while they are multiplied by the loss scale of {scale:g}"
            self._add(NormFinding("coefficient", f"{what}: call unscale_ before"))

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Report the gradients of this step that no clip covered."""
        if evaluation or self._is_deaf or not (self._backwards or self._clipped):
            return  # without a backward or a clip, an engine only initialises the optimizer's state
        if id(optimizer) in self._stepped:  # a second step whose backward pass was not announced
            self._end_round()
            if self.done:
                return
        self._stepped.add(id(optimizer))
        self._guarded_scaled()
        if self._whole:
            return
        grads = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not self._clipped:
            unseen = NormFinding("unseen", f"no clip was observed before this step: {_SEEN}")
            if grads:
                self._guarded(grads, lambda: _with(self._watched(grads).audit(None), unseen))
        elif forgotten := [id(p) for p in grads if id(p) not in self._clipped]:
            named = {id(p): name for m in self._modules() for name, p in m.named_parameters()}
            what = "no clip received these gradients, which the optimizer applies: a norm meant for all lacks them"
            self._add(
                NormFinding("unclipped", what, tuple(named.get(p, "a parameter of no module") for p in forgotten))
            )

    # --- a clip -------------------------------------------------------------------------------------------------------

    def _audited(self, call: ClipCall, parameters: Sequence[Tensor], limit: float | None) -> NormAudit | None:
        assert call.again is not None
        self._clipped |= set(map(id, parameters))
        watched = self._watched(parameters)
        if call.norm is None:
            return watched.audit(limit, call.again)
        # The norm may also cover lists that are clipped later in this step: judge them together.
        self._scaled.append(_Scaled(list(parameters), watched, watched.tried(call.again, call.norm), call.norm, limit))
        return None

    def _guarded_scaled(self) -> None:
        if self._scaled:
            self._guarded([p for one in self._scaled for p in one.parameters], self._judge_scaled)

    def _judge_scaled(self) -> None:
        """Judge the calls that received their norm; calls with the same norm are judged as one clip."""
        waiting, self._scaled = self._scaled, []
        given = everywhere([_number(one.norm) for one in waiting])  # so all processes form the same groups
        groups: dict[int, list[_Scaled]] = {}
        for i, one in enumerate(waiting):
            alike = (j for j in groups if _is_same(given, j, i) and waiting[j].limit == one.limit)
            groups.setdefault(next(alike, i), []).append(one)
        for ones in groups.values():
            parameters = list(chain(*(one.parameters for one in ones)))
            applied = list(chain(*(one.applied for one in ones)))
            whole = WatchedClip.joined([one.watched for one in ones])
            self._keep(parameters, whole.audit(ones[0].limit, None, number_of(ones[0].norm, _OF_CLIP), applied))

    def _guarded(self, parameters: Sequence[Tensor], audit: Callable[[], NormAudit | None]) -> None:
        """Run an audit and store its result or its refusal; all processes enter and refuse together."""
        if self.done:
            return
        try:
            with self._in_silence(), muted():
                found = audit()
        except GradguardError as error:
            self._refuse(parameters, str(error))
        else:
            if found is not None:
                self._keep(parameters, found)

    def _refuse(self, parameters: Sequence[Tensor], why: str) -> None:
        self._keep(parameters, NormAudit("INCONCLUSIVE", (NormFinding("refused", why),)))

    def _keep(self, parameters: Sequence[Tensor], audit: NormAudit) -> None:
        self._clipped |= set(map(id, parameters))
        self.audits.append((frozenset(map(id, parameters)), audit))

    def _add(self, finding: NormFinding) -> None:
        """Add a finding to the first audit of this round."""
        if self._first < len(self.audits):
            key, audit = self.audits[self._first]
            self.audits[self._first] = key, _with(audit, finding)

    def _may_end_round(self) -> None:
        """End a round that has stepped. Called at each clip too, as not every backward pass is announced."""
        if self._stepped:
            self._end_round()

    def _end_round(self) -> None:
        if len(self.audits) > self._first:
            self._left -= 1
        self._begin_round()
        if self._left <= 0:
            self.done = True
            self.on_end()
            if not self._goes_on:
                raise AuditDone(0)

    @property
    def _is_deaf(self) -> bool:
        return self._silent > 0 or self.done

    @contextlib.contextmanager
    def _in_silence(self) -> Iterator[None]:
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    # --- modules and engines ------------------------------------------------------------------------------------------

    def _watched(self, parameters: Sequence[Tensor]) -> WatchedClip:
        """Capture the gradients of these parameters, in the modules that hold them."""
        wanted = {id(p) for p in parameters if gradient_of(p) is not None}
        key = frozenset(wanted)
        if key not in self._known:
            self._known[key] = self._holders(parameters, wanted)
        return WatchedClip.of(self._known[key], wanted, self._backwards or 1)

    def _holders(self, parameters: Sequence[Tensor], wanted: set[int]) -> list[nn.Module]:
        """Return the modules that hold these parameters, largest share first, and a new module for the rest."""
        held = [(module, set(map(id, module.parameters())) & wanted) for module in self._modules()]
        found, left = list[nn.Module](), set(wanted)
        for module, its in sorted(held, key=lambda pair: (-len(pair[1]), type(pair[0]).__name__)):
            if its & left:
                found.append(module)
                left -= its
        if left or not found:
            module = nn.Module()
            slots: dict[str, Any] = parameter_slots(module)
            alone = [p for p in parameters if id(p) in left]
            slots |= {f"parameter {i}": p for i, p in enumerate(alone)}  # they may be plain tensors
            found.append(module)
        return found

    def _clip_of_engine(self, original: Callable, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        call = by_norm(*args, **kwargs)
        call.again = functools.partial(original, listed, *args, **kwargs)
        with self.on_clip(call, listed):
            return call.again()

    def _clip_of_copies(self, original: Callable, optimizer: Any, total_norm: Any, *args: Any) -> Any:
        call = ClipCall("norm", norm=total_norm, again=lambda: None)  # the clip leaves the gradients unchanged
        with self.on_clip(call, list(chain(*optimizer.fp16_groups))):
            self._whole = True
            return original(optimizer, total_norm, *args)

    def _step_of_engine(self, original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_gradients_itself(engine) and not self._is_deaf:
            self._may_end_round()
            clip, limit, scale = clip_of_engine(engine)
            self._whole = True
            watched = functools.partial(WatchedClip.of, [engine], None, self._backwards or 1, scale)
            self._guarded(list(engine.module.parameters()), lambda: watched().audit(limit, clip))
        return original(engine, *args, **kwargs)

    # --- the outcome --------------------------------------------------------------------------------------------------

    def outcome(self) -> tuple[Verdict, str]:
        """Return the verdict and its reasons: each clip's last audit, and its earlier FAILs if the last is no FAIL."""
        if not self.audits:
            return "INCONCLUSIVE", f"{'INCONCLUSIVE':<13} unseen: no clip and no optimizer step was observed: {_SEEN}"
        last = {key: place for place, (key, _) in enumerate(self.audits)}
        still = {key for key, place in last.items() if self.audits[place][1].verdict == "FAIL"}
        shown = [
            audit for place, (key, audit) in enumerate(self.audits)
            if last[key] == place or (audit.verdict == "FAIL" and key not in still)
        ]  # fmt: skip
        verdict = verdict_of([finding for audit in shown for finding in audit.findings])
        clips = {key for key, audit in self.audits if all(one.kind != "unseen" for one in audit.findings)}
        count = f"{'note':<13} {len(self.audits)} audits of {counted(len(clips), 'clip')}"
        return verdict, "\n".join([*dict.fromkeys(map(str, shown)), count])


def _with(audit: NormAudit, finding: NormFinding) -> NormAudit:
    findings = (*audit.findings, finding)
    return replace(audit, findings=findings, verdict=verdict_of(findings))


def _is_same(given: Sequence[Sequence[float | None]], i: int, j: int) -> bool:
    """Tell whether two calls received the same norm, on every process."""
    pairs = [(of_rank[i], of_rank[j]) for of_rank in given]
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)


def _number(value: Any) -> float | None:
    """Return a threshold or norm as a positive float; None for any other value."""
    with contextlib.suppress(InvalidTypeError):
        number = number_of(value, "a norm")
        return number if number and number > 0 else None
    return None

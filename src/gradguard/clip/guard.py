"""A clipper attached to an optimizer: it clips at each real step, and the training loop does not change."""

import threading
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.clip.clipper import Clipper, ClipResult, Decision, load_all
from gradguard.clip.gradients import refuse_nonfinite_in, refused_by_name
from gradguard.clip.guard_counts import Counts
from gradguard.clip.guard_parameters import GuardedParameters
from gradguard.clip.guard_spikes import SpikeWatch, check_spikes, refuse_shared
from gradguard.clip.in_backward import is_in_backward, refuse_in_backward, tell_what_has_stepped
from gradguard.clip.optimizer_proxy import OptimizerProxy, OptimizerSnapshot
from gradguard.clip.update_size import UpdateSize, rehearsed_update
from gradguard.distributed.reduction_group import Stages
from gradguard.distributed.wrappers import follow_backwards
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.grad_scaler import ScalerStep, listen_to_steps
from gradguard.listeners import Listener, RecoveryEvent, SkipReason, is_heard, tell, tell_of
from gradguard.optimizer_hooks import EveryStep, runs_hooks
from gradguard.policies import GuardPolicy, check_guard_options
from gradguard.spikes.skip import SkipSpikes
from gradguard.tensors.host_copy import is_captured
from gradguard.tensors.layout import are_readable, move
from gradguard.tensors.nonfinite import zero_if_nonfinite_
from gradguard.tensors.tensor_admission import keeping_subnormals

_guards: "WeakKeyDictionary[Optimizer, ref[Guard]]" = WeakKeyDictionary()
_owners: WeakSet[Any] = WeakSet()
"""Every attached `Guard` and `ClipUpdate`: no two of them may share a clipper that has state."""

_registry = threading.Lock()
LossT = TypeVar("LossT", Tensor, float)


@dataclass(frozen=True, slots=True)
class TakenStep:
    """An optimizer step that was taken.

    Attributes:
        reason: The reason for which a skip was possible; None if none was.
    """

    reason: SkipReason | None = None
    skipped: ClassVar[bool] = False
    spike: ClassVar[bool] = False

    def why(self) -> None:
        """Return None: the step was not skipped."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """An optimizer step that was skipped.

    Attributes:
        reason: The reason.
    """

    reason: SkipReason
    skipped: ClassVar[bool] = True

    @property
    def spike(self) -> bool:
        """Whether the reason is a spike."""
        return self.reason == "spike"

    def why(self) -> SkipReason:
        """Return the reason."""
        return self.reason


@dataclass(frozen=True, slots=True)
class DeferredStep:
    """An optimizer step of which only the device knows whether it was skipped.

    Attributes:
        skipped: Whether the step was skipped; 0-dim bool on the device.
        reason: The reason if it was skipped and ``spike`` is false.
        spike: Whether it was skipped as a spike; False if the guard has no ``spikes=``.
    """

    skipped: Tensor
    reason: SkipReason
    spike: Tensor | Literal[False] = False

    def why(self) -> SkipReason | None:
        """Return the reason of the skip, None if the step was taken; a host sync."""
        if not bool(self.skipped):
            return None
        return "spike" if bool(self.spike) else self.reason


StepOutcome = TakenStep | SkippedStep | DeferredStep


@dataclass(frozen=True, slots=True)
class _GuardStep:
    """The running step, or the last one; each step has its own object.

    Attributes:
        outcome: The result, as far as it is known.
        clip: The result of the step's last clip; None until a clip is decided.
        snapshot: The optimizer before the step, if the step may have to be undone; else None.
        unjudged: The decision of a step that is judged afterwards, by its update; None for other steps.
        waits: Whether a GradScaler has begun the step but the optimizer has not, which may never happen.
    """

    outcome: StepOutcome = TakenStep()
    clip: ClipResult | None = None
    snapshot: OptimizerSnapshot | None = None
    unjudged: tuple[Decision, UpdateSize] | None = None
    waits: bool = False


class OfOneOptimizer:
    """Base class of objects that belong to one optimizer, such as a `Guard`: they cannot be copied or pickled."""

    def __reduce__(self) -> NoReturn:
        """Refuse."""
        raise InvalidTypeError(
            f"a {type(self).__name__} belongs to one optimizer and cannot be copied or pickled: attach another to the "
            "copied optimizer, and load this one's state_dict() if it has one."
        )


class Guard(OfOneOptimizer):
    r"""Clip the gradients at each real step of ``optimizer``, whatever calls the step; skip non-finite steps.

    .. math:: \theta, s \leftarrow \begin{cases}
              \mathrm{step}(\theta, s, \mathrm{clip}(g)) & \text{if every element of } g \text{ is finite} \\
              \theta, s & \text{otherwise}\end{cases}

    It takes one line next to the optimizer; the loop does not change. It works for a plain ``step()``, for a step with
    a closure (at each evaluation, so also inside LBFGS), under accumulation, GradScaler and `torch.compile` (whose
    ``fullgraph=True`` accepts no optimizer step, guarded or not).

    **Guarantees.**

    * Once for each real step: a ``step`` that calls ``super().step()`` counts once.
    * A skipped step leaves weights, optimizer state and step counters bit-identical, from the first step on. (The
      exception: if the first step of a fused optimizer on an accelerator is skipped, its state exists, as zeros.) An
      optimizer's own attributes are restored if they are numbers, text, tensors, arrays or containers of these; other
      objects, such as a dataclass, a module or a generator, are not.
    * If the optimizer is a stock fused Adam, AdamW, SGD or Adagrad and the clip multiplies all gradients by one
      number, the optimizer's kernel multiplies, which saves a pass over the gradients. The optimizer gets no attribute.
    * `ClipAdaptive` measures and clips in one pass over memory, on one process, unless ``"raise"`` or ``spikes``
      needs the norm first. The gradients of a step that is then skipped are clipped already.
    * If the kernel multiplies, there is no host sync, and the step can be captured in a CUDA graph; only the first
      step of SGD with momentum reads one number. An optimizer that is not fused reads one number a step under
      ``"skip"`` and ``"raise"``, none otherwise.
    * The kernel divides in float32. If the norm is above 3.4e38 times the threshold, the CPU clips before the step. On
      an accelerator ``"skip"`` then skips the step like a non-finite one, and other policies divide by 3.4e38, so
      such gradients keep more than the threshold.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    NaN or inf, ``"skip"``              the step is skipped; the clipper counts it but does not change its threshold
    ``"propagate"``                     clipped as if nothing were wrong, and stepped
    ``"raise"``                         an error names the parameters; nothing has changed
    ``"zero"``                          the step is taken with gradients of 0: momentum and weight decay still act
    GradScaler, any policy              the scaler handles an overflow: the step is skipped and counted, the scale
                                        falls
    GradScaler, fused optimizer         thresholds are for unscaled gradients; unscaling needs no extra pass
    LBFGS, NaN inside a line search     the whole step is undone
    BatchNorm's running statistics      keep the values from a skipped step's forward; `SpikeRecovery` undoes that
    too many skips in a row             an error with the history (on an accelerator some steps late)
    ``copy.deepcopy(optimizer)``        the copy has no guard; attach one and load this one's ``state_dict()``
    two guards on one optimizer         an error: use ``Chain`` or ``Groups``
    a spike (``spikes=``)               the step is skipped, and the clipper's state excludes it; a GradScaler's scale
                                        is as after any finite step; ``max_consecutive_skips`` ignores it
    a step inside a backward pass       right for rules that treat each tensor separately, refused for others;
                                        ``"skip"`` skips this optimizer's step, others stay stepped
    a step that an error ends           leaves no count and no loss; under ``spikes`` also nothing in the clipper's
                                        state, nor on the CPU in the detector's. Without ``spikes`` a rule that
                                        learns keeps the norm of that step
    parameters without a gradient       skipped
    ==================================  ========================================================================

    Args:
        optimizer: Any `torch.optim.Optimizer`. For a wrapper, pass the optimizer inside, ``wrapper.optimizer``.
        clipper: The rule for the gradients of all the optimizer's parameters.
        model: Names the parameters, for ``last`` and for patterns in ``Groups``. Without it they have the optimizer's
            names, or ``param_groups[0]['params'][3]`` if it has none.
        nonfinite: ``"skip"``, ``"propagate"``, ``"raise"`` or ``"zero"``.
        max_consecutive_skips: More skipped steps in a row than this raise an error; with None they never do. A
            GradScaler that starts at 65,536 needs up to 17 to reach 1.
        process_group: The group along which parameters differ, such as pipeline stages, as for `clip_grad_norm_`.
        mesh: The group as a device mesh of one dimension.
        shared: Weights that several stages hold, as for `clip_grad_norm_`.
        spikes: The rule that decides which finite steps are spikes, far above recent ones; None for no such rule.

    Attributes:
        last: The result of the last clip; None before the first. ``last.culprits()`` names gradients with NaN or inf.
        optimizer: The optimizer.
        clipper: The clipper.
        spikes: The argument.

    Raises:
        InvalidTypeError: If ``optimizer`` cannot be hooked or is a wrapper, or ``clipper`` is not a clipper.
        InvalidValueError: If the optimizer has a guard already, ``model`` shares no parameter with it, or the policy or
            the cap is not allowed.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model)
        >>> model(torch.tensor([[3.0, float("nan")]])).sum().backward()
        >>> optimizer.step()
        >>> guard.skipped_steps, guard.last.culprits(), len(optimizer.state)
        (1, {'weight': 1}, 0)

    Reference:
        Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural networks, arXiv 1211.5063.
        Micikevicius et al. (2018), Mixed precision training, arXiv 1710.03740 (the scale, and skipping on overflow).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clipper: Clipper,
        *,
        model: nn.Module | None = None,
        nonfinite: GuardPolicy = "skip",
        max_consecutive_skips: int | None = 20,
        process_group: Any = None,
        mesh: Any = None,
        shared: Any = None,
        spikes: SkipSpikes | None = None,
    ) -> None:
        stages = Stages.named(process_group, mesh, shared)
        check_attachable(optimizer, clipper)
        check_guard_options(nonfinite, max_consecutive_skips)
        # Arguments.
        self.optimizer, self.clipper, self.spikes = optimizer, clipper, check_spikes(spikes)
        self._policy: GuardPolicy = nonfinite
        # Helpers.
        self._guarded = GuardedParameters(optimizer, clipper, model, stages)
        self._guarded.refresh()  # before attaching: the clipper may refuse the parameters
        self._proxy = OptimizerProxy(optimizer) if OptimizerProxy.serves(optimizer) else None
        self._spike_watch = SpikeWatch(spikes, clipper)
        # State across steps.
        self._counts = Counts(max_consecutive_skips)
        self._attached = False
        # The running step, or the last one.
        self.last = cast("ClipResult | None", None)
        self._step = _GuardStep()
        follow_backwards()
        self._attach()

    def __repr__(self) -> str:
        """Return the constructor call, with the names ``optimizer`` and ``model``."""
        more = {"model": "model"} if self._guarded.model is not None else {}
        if self._policy != "skip":
            more["nonfinite"] = repr(self._policy)
        if self._counts.limit != 20:
            more["max_consecutive_skips"] = repr(self._counts.limit)
        if self.spikes is not None:
            more["spikes"] = repr(self.spikes)
        given = "".join(f", {name}={text}" for name, text in more.items())
        return f"Guard(optimizer, {self.clipper!r}{given})"

    # -- while training ---------------------------------------------------------------------------------------------

    def _enter(self, optimizer: Optimizer, closure: bool) -> Optimizer | None:
        self._step = _GuardStep()
        if not self._attached:
            return None
        if self._proxy is not None:
            return self._proxy.enter()
        if closure and (self._policy in ("skip", "raise") or (self.spikes is not None and self.spikes.act)):
            # The guard acts after an evaluation, when the optimizer may have moved weights already.
            self._step = _GuardStep(snapshot=OptimizerSnapshot(optimizer))
        return None

    @torch.no_grad()
    @keeping_subnormals
    def _before(self, optimizer: Optimizer, number: int) -> bool:
        if not self._attached:
            return False
        if isinstance(self._step.outcome, SkippedStep):  # an evaluation after the one that skipped the step
            self._cancel()
            return True
        in_backward = is_in_backward()
        if in_backward:
            refuse_in_backward(self.clipper, self._guarded.parameters, self._guarded.stages)
        if number == 0:
            self._spike_watch.begin(self.steps + 1, in_backward)
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._guarded.refresh()
        grads = self._guarded.gradients(self._policy, self._proxy)
        with refused_by_name(grads):
            # Spikes keep their gradients unchanged for `SpikeRecovery`, and an error must change nothing.
            at_once = self._policy != "raise" and self.spikes is None
            decide = self.clipper.decide_at_once if at_once else self.clipper.decide
            decision = decide(grads, 1.0 if scale is None else scale)
        self.last = decision.result
        self._step = replace(self._step, clip=decision.result, outcome=TakenStep())
        update = self._update_of(decision) if number == 0 else None
        try:
            outcome = self._act(decision, scale, overflow, number, update)
        except NonFiniteGradientError as error:
            if in_backward:
                tell_what_has_stepped(error)
            if self._step.snapshot is not None:
                self._step.snapshot.restore()
            raise
        self._step = replace(self._step, outcome=outcome)
        if isinstance(outcome, SkippedStep):
            self._cancel()
        self._tell(decision)
        if not self._attached:  # detached from another thread meanwhile: `_after` will not run
            self._count(decision.result, outcome)
        return isinstance(outcome, SkippedStep)

    def _update_of(self, decision: Decision) -> Tensor | None:
        """Return how far the step will move the weights; None if no rule needs it, or it is known only afterwards.

        Args:
            decision: The decision on the gradients.
        """
        if self.spikes is None or not self.spikes.updates:
            return None
        grads, coefficient, snapshot = decision.gradients, decision.coefficient, self._step.snapshot
        is_alone = snapshot is None  # no closure, which may do anything
        if self._proxy is not None and is_alone and grads.reduction is None and coefficient is not None:
            return rehearsed_update(self.optimizer, coefficient)
        unjudged = decision, UpdateSize(self._guarded.parameters)
        self._step = replace(self._step, unjudged=unjudged, snapshot=snapshot or OptimizerSnapshot(self.optimizer))
        return None

    def _judge_update(self) -> None:
        """Judge a taken step by the norm of its update, and undo a spike."""
        if self._step.unjudged is None:
            return
        decision, size = self._step.unjudged
        result, skipped = decision.result, self._step.outcome.skipped
        bad = result.nonfinite | (move(skipped, result.norm.device) if isinstance(skipped, Tensor) else skipped)
        spike = self._spike_watch.judge(result, bad, 0, size.measure(decision.gradients))
        if spike is not None and bool(spike):
            self._spike_watch.undo_clipper()
            self._step = replace(self._step, outcome=SkippedStep("spike"))
            if is_heard():
                undone = "undid the step behind this one, because the norm of its update is a spike"
                event = RecoveryEvent(self.optimizer, "rolled_back", undone, lost=1, recovery=1)
                tell_of(Listener.on_recover, event)

    def _tell(self, decision: Decision) -> None:
        if is_heard() and self.last is not None:
            outcome = self._step.outcome
            event = self.clipper.event_of(decision, self.last, self.optimizer, outcome.skipped, outcome.reason)
            tell(replace(event, spike=outcome.spike) if self.spikes is not None else event)

    def _act(
        self,
        decision: Decision,
        scale: Tensor | None,
        overflow: Tensor | None,
        number: int,
        update: Tensor | None,
    ) -> StepOutcome:
        """Clip, or skip the step; return the outcome."""
        spike, proxy, grads = None, self._proxy, decision.gradients.gradients
        # The proxy if its kernel can multiply by the coefficient; None if the clip must come first.
        folds = proxy if proxy is not None and decision.coefficient is not None and proxy.can_fold(grads) else None
        bad, skips_bad = decision.result.nonfinite, self._policy == "skip" or overflow is not None
        if overflow is not None:
            bad = bad | move(overflow != 0, bad.device)
        kernel = None if are_readable(bad, decision.result.norm) else folds
        if self._step.unjudged is None:
            spike = self._spike_watch.judge(decision.result, bad, number, update)
        if spike is not None:
            bad = self._spike_watch.bad_on_any(bad)
        if not skips_bad and spike is None:
            self._clip(decision, folds, scale, self._policy)
            return TakenStep()
        if not skips_bad:
            bad = torch.zeros_like(bad)
        elif kernel is not None and decision.coefficient is not None:
            bad = bad | kernel.overflows(decision.coefficient, scale)
        reason: SkipReason = "nonfinite" if overflow is None else "grad_scaler"
        policy: GuardPolicy = "propagate" if skips_bad else self._policy
        if kernel is None or not kernel.skips_safely():
            outcome = self._look(bad, spike, reason)
        else:  # the optimizer's kernel clips, or skips the step: only the device knows which
            left_out = bad if spike is None else bad | spike
            kernel.skip_if(left_out)
            outcome = DeferredStep(left_out, reason, False if spike is None else spike)
        if not isinstance(outcome, SkippedStep):
            self._clip(decision, folds, scale, policy)
        self._spike_watch.undo_clipper(outcome.spike)
        return outcome

    @staticmethod
    def _look(bad: Tensor, spike: Tensor | None, reason: SkipReason) -> TakenStep | SkippedStep:
        """Return the outcome of a step that the host decides: ``bad`` gradients are skipped for ``reason``.

        Raises:
            UnsupportedGradientError: If a CUDA graph is being captured, in which the host can read nothing.
        """
        if is_captured(bad.device):
            raise UnsupportedGradientError(
                "a CUDA graph is being recorded, and the host decides whether this step is skipped: "
                "expected a fused optimizer and a rule of one coefficient for all gradients, such as ClipByGlobalNorm, "
                'or Guard(..., nonfinite="propagate") without spikes=.'
            )
        skip, spiked = (bool(bad), False) if spike is None else torch.stack([bad, spike]).tolist()  # one host sync
        if spiked:
            return SkippedStep("spike")
        return SkippedStep(reason) if skip else TakenStep(reason)

    def _clip(
        self, decision: Decision, folds: OptimizerProxy | None, scale: Tensor | None, policy: GuardPolicy
    ) -> None:
        """Clip under ``policy`` for non-finite gradients, in the optimizer's kernel if possible."""
        bad, coefficient = decision.result.nonfinite, decision.coefficient
        if policy == "raise":
            norm = torch.where(bad, torch.nan, 0.0)
            refuse_nonfinite_in(decision.gradients, norm, decision.result.tensor_norms)
        if policy == "zero" and not (are_readable(bad) and not bool(bad)):
            decision.apply()
            zero_if_nonfinite_(torch.where(bad, torch.nan, 0.0), decision.gradients.gradients)
        elif folds is None or coefficient is None:
            decision.apply()
        elif not are_readable(coefficient):
            folds.fold(coefficient, scale)
        elif bool(folds.overflows(coefficient, scale)):
            decision.apply()
        elif float(coefficient) != 1.0:
            folds.fold(coefficient, scale)

    def _cancel(self) -> None:
        """Let the running step do nothing, or undo it."""
        if self._proxy is not None:
            self._proxy.skip()
            return
        if self._step.snapshot is None:  # nothing has moved yet; any other optimizer's step may, so `_after` undoes it
            self._step = replace(self._step, snapshot=OptimizerSnapshot(self.optimizer))
        elif isinstance(self.optimizer, torch.optim.LBFGS):
            self._step.snapshot.hide_gradients()  # which ends the line search

    def _after(self, optimizer: Optimizer) -> None:
        if not self._attached:
            return
        if self._proxy is not None:
            self._proxy.leave()
        self._judge_update()
        step, self._step = self._step, _GuardStep(self._step.outcome)  # drop the references to the optimizer
        if isinstance(step.outcome, SkippedStep) and step.snapshot is not None:
            step.snapshot.restore()
        self._spike_watch.end()
        if step.clip is not None:
            self._count(step.clip, step.outcome)
        del optimizer

    def _count(self, clip: ClipResult, outcome: StepOutcome) -> None:
        """Count a step that has ended; a step that ended by an error is not counted."""
        self._counts.begin(clip)
        try:
            self._counts.decided(outcome.skipped, outcome.spike)
        except NonFiniteGradientError as error:
            if is_in_backward():
                tell_what_has_stepped(error)
            raise

    def _break_off(self) -> None:
        """Forget the last step, which ended by an error."""
        self._step = _GuardStep()
        self._spike_watch.break_off()

    # -- GradScaler -------------------------------------------------------------------------------------------------

    def _scaler_begins(self, optimizer: Optimizer, step: ScalerStep) -> None:
        del optimizer, step
        self._hooks.settle()
        self._step = _GuardStep(self._step.outcome, waits=True)

    def _scaler_ends(self, optimizer: Optimizer, step: ScalerStep) -> None:
        """Count a skipped step if ``scaler.step`` never reached the optimizer: the scaler found an overflow."""
        self._spike_watch.end()
        if not self._attached or not self._step.waits or step.skipped is None:
            return
        with torch.no_grad():
            self._guarded.refresh()
            decision = self.clipper.decide(self._guarded.gradients(self._policy, self._proxy))
        self.last = decision.result
        self._step = _GuardStep(SkippedStep("grad_scaler"))
        self._tell(decision)
        self._count(self.last, self._step.outcome)

    # -- between steps ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of real steps that have ended, skipped ones included, without those that raised an error."""
        return self._counts.steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped, by the guard or by a GradScaler; a host sync for an accelerator."""
        return self._counts.skipped

    @property
    def skipped(self) -> Tensor | bool:
        """Whether the last step was skipped: a 0-dim tensor if only the device knows, so no host sync."""
        return self._step.outcome.skipped

    @property
    def last_skip(self) -> SkipReason | None:
        """Why the last step was skipped, None if it was taken; a host sync if only the device knows.

        ``"grad_scaler"``: a GradScaler found infinity or NaN. ``"nonfinite"``: the guard found them. ``"spike"``: the
        step was finite, and ``spikes=`` judged it a spike.
        """
        return self._step.outcome.why()

    def record_loss(self, loss: LossT, weight: float | Tensor = 1.0, kind: str | None = None) -> LossT:
        """Record the loss of one micro-batch before its step, for ``spikes=``; return it unchanged.

        The step is judged by the weighted mean over its micro-batches and over all processes: see `SkipSpikes`. The
        loss of an evaluation belongs to no step and is ignored. Such a loss has no graph, is recorded with gradients
        off (`torch.no_grad`, `torch.inference_mode`), and the guard's ``model``, if it has one, is in eval mode.

        The losses of a step that raised an error, such as those of its closure, are dropped. The guard cannot know that
        a batch was dropped before its step, for example because ``backward()`` raised and the loop went on. Drop its
        loss by ``guard.spikes.forget_loss()``, next to ``optimizer.zero_grad()``.

        Args:
            loss: The mean loss without a loss scale; one number.
            weight: Its weight in the mean, such as its number of tokens.
            kind: The name of its task, if losses of several tasks differ in size; see `SkipSpikes`.

        Returns:
            ``loss``, so that ``guard.record_loss(loss).backward()`` is one line.

        Raises:
            InvalidValueError: If the guard has no ``spikes=``, or ``loss`` is not one number.
        """
        if self.spikes is None:
            raise InvalidValueError(
                "this Guard does not look for spikes, and only spikes are judged by the loss: make it with "
                "spikes=SkipSpikes(SpikeDetector()), or omit the call of guard.record_loss."
            )
        if not self.is_evaluation(loss):
            self._hooks.settle()
            self.spikes.record_loss(loss, weight, kind)
        return loss

    def is_evaluation(self, loss: Tensor | float) -> bool:
        """Tell whether ``loss``, recorded now, belongs to an evaluation and not to a step: see `record_loss`."""
        if torch.is_grad_enabled() or (isinstance(loss, Tensor) and loss.requires_grad):
            return False
        model = self._guarded.model
        return model is None or not model.training

    def state_dict(self) -> dict[str, Any]:
        """Return the clipper's state and the counts, without the optimizer's own state."""
        self._hooks.settle()
        spikes = {} if self.spikes is None else {"spikes": self.spikes.state_dict()}
        return {"clipper": self.clipper.state_dict(), **self._counts.state_dict(), **spikes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, into a guard with the same arguments.

        Args:
            state_dict: A state that `state_dict` returned.

        Raises:
            InvalidValueError: If it is not a state of such a guard.
        """
        expected = {"clipper", *self._counts.state_dict(), *(() if self.spikes is None else ("spikes",))}
        if set(state_dict) != expected:
            raise InvalidValueError(
                f"this is not the state of a Guard like this: expected the keys {sorted(expected)}, got "
                f"{sorted(state_dict)}. Load it into a Guard with the same arguments, including spikes= if it had them."
            )
        self._hooks.settle()
        spikes = [] if self.spikes is None else [(self.spikes, state_dict["spikes"])]
        load_all([(self.clipper, state_dict["clipper"]), *spikes, (self._counts, state_dict)])

    def detach(self) -> None:
        """Remove the guard for good; a step that is running in another thread may stay guarded. May be repeated."""
        with _registry:
            if not self._attached:
                return
            self._attached = False
            _guards.pop(self.optimizer, None)
            give_back(self)
            self._stop_listening()
            self._hooks.remove()

    def _attach(self) -> None:
        with _registry:
            other = _guards.get(self.optimizer)
            if other is not None and other() is not None:
                raise InvalidValueError(
                    f"this {type(self.optimizer).__name__} has a Guard already. For several rules pass one clipper: "
                    "Chain(a, b) applies one after the other, Groups({...}) gives parameters their own; or call "
                    "detach() on the other guard first."
                )
            take(self)
            refuse_shared(self.spikes, [g.spikes for other in _guards.values() if (g := other()) is not None])
            _guards[self.optimizer] = ref(self)
            self._attached = True
            self._hooks = EveryStep(
                self._before, self._after, optimizer=self.optimizer, enter=self._enter, broken_off=self._break_off
            )
            self._stop_listening = listen_to_steps(self._scaler_begins, self._scaler_ends, optimizer=self.optimizer)

    def __enter__(self) -> Self:
        """Return the guard, which is attached already."""
        return self

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.detach()


def take(owner: Any) -> None:
    """Reserve ``owner.clipper`` for the steps of ``owner``, until `give_back`.

    Raises:
        InvalidValueError: If one of its rules has state and is reserved for another guard.
    """
    taken = {id(leaf): other for other in _owners for leaf in other.clipper.leaves()}
    for leaf in owner.clipper.leaves():
        other = taken.get(id(leaf))
        if other is not None and leaf.state_dict():
            kind = "Guard" if isinstance(other, Guard) else type(other).__name__
            which = "this" if other.optimizer is owner.optimizer else "another"
            raise InvalidValueError(
                f"this {type(leaf).__name__} belongs to the {kind} of {which} optimizer and has state: two histories "
                "would mix. Make one clipper for each, or pass copy.deepcopy(clipper)."
            )
    _owners.add(owner)


def give_back(owner: Any) -> None:
    """Release the rules of ``owner`` for other guards."""
    _owners.discard(owner)


def guard_of(optimizer: Optimizer) -> Guard | None:
    """Return the guard that is attached to ``optimizer``, or None."""
    known = _guards.get(optimizer)
    return None if known is None else known()


def check_hookable(optimizer: object) -> None:
    """Check that a hook can run at each step of ``optimizer``.

    Raises:
        InvalidTypeError: If the optimizer cannot be hooked or wraps another.
    """
    from gradguard.integrations import (
        wrapped_optimizers,
    )  # the one import against the layers: only integrations know trainers

    wrapped_optimizers.refuse_owned(optimizer)
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):  # the wrapper may subclass Optimizer too
        call = wrapped_optimizers.what_serves(optimizer)
        advice = "" if call is None else f". {call}"
        kind = type(optimizer).__name__
        raise InvalidTypeError(f"optimizer is {kind}, which wraps another: pass wrapper.optimizer{advice}.")
    if not runs_hooks(optimizer):
        raise InvalidTypeError(
            f"optimizer is {type(optimizer).__name__}, whose step() runs no hooks: expected a torch.optim.Optimizer. "
            "Of a wrapper pass the optimizer inside, often wrapper.optimizer."
        )


def check_attachable(optimizer: object, clipper: object) -> None:
    """Check that ``clipper`` can act at each step of ``optimizer``.

    Raises:
        InvalidTypeError: If the optimizer cannot be hooked or wraps another, or ``clipper`` is not a clipper.
    """
    check_hookable(optimizer)
    if not isinstance(clipper, Clipper):
        given = f"the class {clipper.__name__}" if isinstance(clipper, type) else type(clipper).__name__
        raise InvalidTypeError(
            f"clipper is {given}: expected a clipper, such as ClipByGlobalNorm(1.0) or ClipByMedian()."
        )

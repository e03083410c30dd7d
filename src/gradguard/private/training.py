"""Private training: clip, sum, add noise once, divide by the expected batch size, and count the steps."""

import hashlib
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.groups import all_reduce_sum, rank_and_size
from gradguard.distributed.placements import shard_like
from gradguard.errors import InvalidValueError, refuse
from gradguard.optimizer_hooks import EveryStep, parameters_of
from gradguard.per_sample.sample_clipper import PerSampleGradientClipper
from gradguard.private.accounting import Accountant
from gradguard.private.buffers import BufferWatch
from gradguard.private.loader import Planned, PrivateLoader
from gradguard.private.noise import GaussianNoise, keyed_generator
from gradguard.private.sampling import PoissonBatches, SampledMicroBatch
from gradguard.torch_private import version_of


@dataclass(frozen=True)
class Terms:
    """The settings that are fixed before the first step.

    Attributes:
        noise_multiplier: The accounted noise: standard deviation of the noise over the sensitivity of the sum.
        gradient_noise_multiplier: The noise on the gradients; larger if a quantile clipper spends a part on its count.
        sample_rate: Probability with which each sample joins a logical batch; 1 for a whole pass without sampling.
        divisor: The divisor of noised sums: the expected batch size, or 1.
        delta: Probability at which epsilon is reported.
        planned: Number of accounted steps that spend the target epsilon; None without a limit.
        epsilon: The epsilon that these steps may spend; infinity without a limit.
    """

    noise_multiplier: float
    gradient_noise_multiplier: float
    sample_rate: float
    divisor: float
    delta: float
    planned: int | None
    epsilon: float


@dataclass
class _LogicalBatch:
    """A logical batch, between its first micro-batch and its release.

    Attributes:
        open: Micro-batches that the loader has yielded and that were not clipped yet; also of the next logical batch.
        taken: Micro-batches that were clipped and that `PrivateTraining.pre_step` has not released.
    """

    open: deque[SampledMicroBatch] = field(default_factory=deque)
    taken: list[SampledMicroBatch] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return bool(self.taken) and self.taken[-1].ends


@dataclass(frozen=True)
class _Released:
    """The gradients of one step that `PrivateTraining.pre_step` has filled in.

    Attributes:
        gradients: The gradient of each parameter, and its version at the release.
        may_step: Whether the optimizer may still step with these gradients.
    """

    gradients: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    may_step: bool = False


@dataclass(eq=False)
class _Pass:
    """One pass over the loader.

    Attributes:
        is_counted: Whether the whole pass is accounted for already, as one use of every sample, without sampling.
    """

    is_counted: bool = False


class PrivateTraining:
    """One private training run; create it by `make_private`.

    In a loop of your own, call `step` after each backward. If a trainer steps the optimizer, call `clip_and_accumulate`
    after each backward, and `pre_step` once before ``optimizer.step()``, as for a `PerSampleGradientClipper`.

    ==============================================  ===========================================================
    case                                            what happens
    ==============================================  ===========================================================
    logical batch without samples                   a step with noise alone, between two batches of the loader
    epoch left early, within a logical batch        the sums of that batch are dropped, and cost nothing
    the model got more or fewer rows than drawn     an error; nothing has changed
    ``step()`` fails, first part of its batch       forward, backward and ``step()`` may be repeated: nothing is lost
    ``step()`` fails, a later part, or stepping     the logical batch is dropped, and the pass over the loader ends
    ``optimizer.step()`` without `pre_step`         an error; nothing has changed
    a gradient changed between these two            an error
    more steps than the target epsilon allows       an error, before the step
    a sample with a non-finite gradient             contributes zero (`PerSampleGradientClipper`)
    ==============================================  ===========================================================

    Attributes:
        loader: The loader to iterate over in training.
        clipper: The `PerSampleGradientClipper`.
        optimizer: The optimizer.
        accountant: The `Accountant`.
        noise: The `GaussianNoise`.
        terms: Noise multiplier, sampling rate, expected batch size, delta.
        steps: Number of logical steps taken.
    """

    loader: PrivateLoader

    def __init__(
        self,
        clipper: PerSampleGradientClipper,
        optimizer: Optimizer,
        terms: Terms,
        accountant: Accountant,
        noise: GaussianNoise,
        batches: PoissonBatches | None,
        group: Any = None,
        *,
        for_trainer: bool = False,
    ) -> None:
        self.clipper, self.optimizer, self.terms = clipper, optimizer, terms
        self.accountant, self.noise, self.steps = accountant, noise, 0
        self._batches, self._group = batches, group
        self._for_trainer = for_trainer  # a trainer fetches ahead, and never asks for a batch after the last
        self._batch = _LogicalBatch()
        self._released = _Released()
        self._pass = _Pass()  # the only pass that may go on; a new object ends all running passes
        self._resumed = False
        self._buffers = BufferWatch(clipper.module)
        clipper.step_advice = (
            "call private.pre_step() before it"
            if for_trainer
            else "call private.step() in place of optimizer.step(), after each backward"
        )
        self._hook = EveryStep(self._refuse_step, lambda optimizer: None, optimizer=optimizer)

    def step(self) -> bool:
        """Clip and add up the gradients of the loader's last batch; call this method after each backward.

        At the end of a logical batch it adds the noise, divides by the expected batch size, calls
        ``optimizer.step()`` and sets the gradients to None.

        Returns:
            Whether the optimizer has stepped.

        Raises:
            InvalidValueError: If the loader has yielded no batch since the last call, if the model got another number
                of samples than were drawn, or if something else has filled a ``.grad``.
        """
        ends = self.clip_and_accumulate()
        if ends:
            self._finish()
        return ends

    def clip_and_accumulate(self) -> bool:
        """Clip and add up the gradients of the loader's first batch that was not used yet; for trainers, see `step`.

        Returns:
            Whether the logical batch is complete; `pre_step` is then the next call.

        Raises:
            InvalidValueError: For the same reasons as in `step`.
        """
        batch = self._batch
        if not batch.open or batch.is_complete:
            raise InvalidValueError(
                "private.step() without a batch: iterate over private.loader, and call private.step() once after the "
                "backward of each batch. After an error within a logical batch, begin a new pass over the loader."
            )
        self._buffers.check()
        self._refuse_other_gradients()
        # If a later part fails, the earlier parts are lost too, because the remaining parts are no Poisson sample.
        with self._call_on_error(self._abandon if batch.taken else self.clipper.discard):
            drawn, before = batch.open[0].size, self.clipper.statistics
            if drawn:
                self.clipper.clip_and_accumulate()
                after = self.clipper.statistics
                _check_samples(0 if after is None or after is before else len(after.norms), drawn)
            else:  # an empty part, whose stand-in only keeps this process in step with the others
                self.clipper.skip_batch(after_backward=True)
        batch.taken.append(batch.open.popleft())
        return batch.is_complete

    def pre_step(self) -> None:
        """Add the noise, and fill every ``.grad`` for one ``optimizer.step()``; for trainers, see `step`.

        This method counts the step. Any further ``optimizer.step()`` is an error until the next call.

        Raises:
            InvalidValueError: If the logical batch is not complete.
        """
        if not self._batch.is_complete:
            raise InvalidValueError(
                "the optimizer is to step within a logical batch, or without one: each part that private.loader "
                "yields must be used before the step, and none twice. Let the trainer accumulate as many batches for "
                "a step as the loader cuts a logical batch into."
            )
        with self._call_on_error(self._abandon):
            self._release()

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon spent so far at ``delta``, by default the target delta."""
        return self.accountant.epsilon(self.terms.delta if delta is None else delta)

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity of the sum."""
        return self.terms.noise_multiplier

    @property
    def statistics(self) -> Any:
        """`PerSampleGradientClipper.statistics`: norms of samples' gradients. **Not private**: do not publish them."""
        return self.clipper.statistics

    def detach(self) -> None:
        """Remove all hooks from model and optimizer; calling it again does nothing."""
        self._hook.remove()
        self.clipper.detach()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides model and optimizer: counts and thresholds, and no secret.

        The state contains neither the noise nor the drawn samples, nor anything that either could be computed from.

        Raises:
            InvalidValueError: If a logical batch is open: its sums have no noise yet.
        """
        if self._batch.open or self._batch.taken:
            raise InvalidValueError(
                "state_dict() within a logical batch would save sums without noise: call it after private.step() has "
                "returned True, or between epochs."
            )
        norm_clipper = dict(self.clipper.norm_clipper.state_dict())
        if "generator" in norm_clipper:
            norm_clipper["generator"] = None  # secret: the noise on a quantile's count follows from it
        return {
            "steps": self.steps,
            "accountant": self.accountant.state_dict(),
            "batches": None if self._batches is None else self._batches.state_dict(),
            "norm_clipper": norm_clipper,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, also in the middle of an epoch. All processes must call this method.

        The noise is new from here on, even with a ``seed``. An earlier run may have done the steps after an old
        checkpoint already; the same noise on them would cancel in the difference of both results. Steps that were taken
        after the state was saved are not counted in it. If their results are published too, count them by
        ``private.accountant.step``.

        Raises:
            InvalidValueError: If the state does not belong to a private training of this kind, or the target epsilon
                would be exceeded.
        """
        expected = {"steps", "accountant", "batches", "norm_clipper"}
        if set(state_dict) != expected or (state_dict["batches"] is None) != (self._batches is None):
            raise InvalidValueError(
                f"expected the state of a private training {'without' if self._batches is None else 'with'} Poisson "
                f"sampling, with the keys {sorted(expected)}, got {sorted(state_dict)}."
            )
        self._abandon()  # batches that were drawn already belong to the previous state
        if self._batches is not None:
            self._batches.load_state_dict(state_dict["batches"])
        self.accountant.load_state_dict(state_dict["accountant"])
        norm_clipper: Any = self.clipper.norm_clipper
        norm_clipper.load_state_dict(state_dict["norm_clipper"])
        if getattr(norm_clipper, "generator", None) is not None:
            old = bytes(norm_clipper.generator.get_state().tolist())
            key = hashlib.sha256(old + os.urandom(32)).digest()
            norm_clipper.generator.set_state(keyed_generator(key, norm_clipper.generator.device).get_state())
        self.noise.renew()
        self.steps, self._resumed = state_dict["steps"], True
        self._check_target()

    # A pass over the loader

    def _hand_out(self, planned: Planned) -> Iterator[Any]:
        self._abandon()
        if not self._resumed:
            self._start_epoch()
        self._resumed = False
        own = self._pass
        for micro_batch, data in planned:
            # A trainer fetches all parts of a logical batch before it runs them.
            ahead = self._for_trainer and self._batch.open and not self._batch.open[-1].ends
            self._check_turn(own, ahead)
            limit = self.terms.planned
            if limit is not None and self.accountant.steps >= limit and not own.is_counted:
                raise InvalidValueError(
                    f"the target epsilon is spent: noise was chosen for {limit} steps, and all of them were taken. "
                    f"Give PrivacyBudget more epochs, or pass a FixedNoise to make_private instead."
                )
            if micro_batch.has_data:
                self._buffers.begin()
                self._batch.open.append(micro_batch)
                yield data
                continue
            self._refuse_other_gradients()
            self.clipper.skip_batch()
            self._batch.taken.append(micro_batch)
            if micro_batch.ends:
                self._finish()
        self._check_turn(own)
        self._start_epoch()

    def _start_epoch(self) -> None:
        if self._batches is not None:
            self._batches.start_epoch()

    def _check_turn(self, own: _Pass, ahead: object = False) -> None:
        refuse(
            InvalidValueError,
            (
                own is not self._pass,
                "this pass over private.loader is over: another pass was begun, load_state_dict() was called, or an "
                "error lost a part of a logical batch, whose other parts must not be used alone. Begin a new pass: "
                "for batch in private.loader.",
            ),
            (
                not ahead and (self._batch.open or self._batch.is_complete),
                "the loader was asked for the next batch, but private.step() was not called for the last one, or has "
                "failed: every batch that was drawn must be used. Call private.step() after each backward.",
            ),
        )

    def _check_target(self) -> None:
        """Check that loaded steps with other noise leave enough of the target epsilon for the planned steps.

        Raises:
            InvalidValueError: If they do not.
        """
        terms = self.terms
        own = terms.noise_multiplier, terms.sample_rate
        if terms.planned is None or {entry[:2] for entry in self.accountant.history} <= {own}:
            return
        whole = Accountant(self.accountant.name)
        whole.load_state_dict(self.accountant.state_dict())
        whole.step(*own, max(0, terms.planned - whole.steps))
        spent = whole.epsilon(terms.delta)
        if spent > terms.epsilon:
            raise InvalidValueError(
                f"the saved steps had other noise or another sampling rate, {self.accountant.history}, and with "
                f"{terms.planned} steps in all epsilon would be {spent:.4g}, above the target of {terms.epsilon:.4g}. "
                "Resume with the noise, batch size and number of steps of the saved run."
            )

    def _abandon(self) -> None:
        """Drop the logical batch, and end all running passes over the loader."""
        self.clipper.discard()
        self._batch = _LogicalBatch()
        self._pass = _Pass()

    @contextmanager
    def _call_on_error(self, lost: Callable[[], None]) -> Iterator[None]:
        """Call ``lost`` if the block raises."""
        try:
            yield
        except BaseException:
            lost()
            raise

    # The end of a logical batch

    def _finish(self) -> None:
        self.pre_step()
        with self._call_on_error(self._abandon):
            try:
                self.optimizer.step()
            finally:
                for parameter in self._released.gradients:
                    parameter.grad = None

    @torch.no_grad()
    def _release(self) -> None:
        """Count the step, add noise to the sums, and fill in the gradients.

        The step is counted before a threshold moves or noise is drawn, because it costs privacy even if it then fails.

        Raises:
            InvalidValueError: If the sensitivity is not finite, or other samples were clipped than drawn.
        """
        terms, sensitivity = self.terms, self.clipper.sensitivity_of_step()  # before the threshold moves
        if terms.gradient_noise_multiplier and not math.isfinite(sensitivity):
            raise InvalidValueError(
                f"the sensitivity is {sensitivity}: no noise hides a sample whose gradient is not bounded. Set a "
                f"finite max_norm."
            )
        self.steps += 1
        if self._batches is not None:
            self._batches.advance()
            if self._for_trainer and self._batches.position == len(self._batches):
                self._start_epoch()
        if not self._pass.is_counted:
            self.accountant.step(terms.noise_multiplier, terms.sample_rate)
        self._pass.is_counted = self._batches is None
        with self._call_on_error(self._abandon):
            taken, unit = self.clipper.take_in_units()
        drawn = sum(part.size for part in self._batch.taken)
        self._batch = _LogicalBatch(self._batch.open)
        _check_samples(taken.batch_size, drawn)
        # One process adds the noise; without noise the sensitivity may be infinite.
        adds = terms.gradient_noise_multiplier and rank_and_size(self._group)[0] == 0
        deviation = terms.gradient_noise_multiplier * sensitivity if adds else 0.0
        self.noise.add_(taken.sums, deviation, unit=unit, divisor=terms.divisor)
        all_reduce_sum(taken.sums, self._group)
        gradients: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        for parameter, total in zip(taken.parameters, taken.sums, strict=True):
            gradient = shard_like(total.to(parameter.dtype), parameter)
            parameter.grad, gradients[parameter] = gradient, (weakref.ref(gradient), version_of(gradient))
        self._released = _Released(gradients, may_step=True)

    def _refuse_step(self, optimizer: Optimizer, evaluations: int) -> None:
        """Refuse an optimizer step, unless it is the first after `pre_step` and uses its gradients unchanged."""
        del evaluations
        released, self._released = self._released, replace(self._released, may_step=False)
        if not released.may_step:
            raise InvalidValueError(
                "optimizer.step() was called in a private training before the gradients had noise: call private.step() "
                "after each backward instead. It steps the optimizer at the end of each logical batch."
            )
        for parameter, grad, is_own in self._gradients_of(optimizer):
            if not is_own or version_of(grad) != released.gradients[parameter][1]:
                raise InvalidValueError(
                    f"{self._name_of(parameter)}: .grad was filled or changed after the noise was added, by another "
                    f"loss or another clip: the step would not be the private one. Leave gradients alone between "
                    f"pre_step() and optimizer.step()."
                )

    def _refuse_other_gradients(self) -> None:
        """Refuse a gradient that was not clipped, from another loss or of a parameter that the clipper does not follow.

        Raises:
            InvalidValueError: If a ``.grad`` is not zero and not from the last step.
        """
        for parameter, grad, is_own in self._gradients_of(self.optimizer):
            if not is_own and bool((grad.to_dense() if grad.is_sparse else grad).any()):  # own: from the last step
                raise InvalidValueError(
                    f"{self._name_of(parameter)}: .grad was filled by something other than private.step(), so the step "
                    f"would not be private. Call optimizer.zero_grad() before the backward, and train with one loss."
                )

    def _gradients_of(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor, bool]]:
        """Yield each parameter with a gradient, its gradient, and whether `pre_step` has filled this gradient in."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                gradients = self._released.gradients
                own = parameter in gradients and gradients[parameter][0]() is parameter.grad
                yield parameter, parameter.grad, own

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = {id(p): name for name, p in self.clipper.trained.items()}
        return names.get(id(parameter), "a parameter of the optimizer that is not clipped")


def _check_samples(seen: int, drawn: int) -> None:
    if seen != drawn:
        raise InvalidValueError(
            f"the model saw {seen} samples where {drawn} were drawn, so one sample may count more than once, or "
            f"several as one, and the noise would be too small. Pass the batches of private.loader to the model "
            f"unchanged, with one row for each sample, in the first dimension (in the second with batch_first=False)."
        )

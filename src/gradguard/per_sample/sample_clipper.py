r"""Clip each sample's gradient before the sum over the batch, from one forward and one backward.

.. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, g_i, \qquad c_i = \min\bigl(1,\; C / \lVert g_i \rVert\bigr)
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.engines.megatron import refuse_parts
from gradguard.distributed.groups import all_reduce_sum, process_group_of, rank_and_size, stop_synchronizing, unwrapped
from gradguard.distributed.placements import shard_like
from gradguard.distributed.together import Place
from gradguard.distributed.wrappers import refuse_wrapped
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.grad_scaler import scale_of_backward
from gradguard.listeners import ClipEvent, announce, is_heard, tell
from gradguard.optimizer_hooks import parameters_of
from gradguard.per_sample.call_arguments import tensor_leaves
from gradguard.per_sample.call_tracker import CallTracker, places_of_parameters, run_uncompiled
from gradguard.per_sample.clipping_rule import NormClipper, checked_factors, checked_groups, slack_for
from gradguard.per_sample.comparison import Comparison
from gradguard.per_sample.contributions import (
    Contributions,
    joint_norm,
    sample_norms,
    scale_rows,
    with_parts_of,
)
from gradguard.per_sample.loss.loss_check import LossCheck
from gradguard.per_sample.loss.own_losses import own_losses
from gradguard.per_sample.mini_batch import MiniBatch
from gradguard.per_sample.refusals import (
    check_options,
    follow,
    refuse_gathered,
    refuse_local_thresholds,
    refuse_stale_gradients,
    refuse_unsupported,
    watch_steps_and_scalers,
)
from gradguard.per_sample.rehearsal import compare, rehearse
from gradguard.per_sample.rerun import undisturbed
from gradguard.per_sample.sample_loop import LoopedCall, sum_together
from gradguard.per_sample.sample_results import Accumulation, ClippedSums, PerSampleStatistics, PreStep, zeros_like_rows
from gradguard.per_sample.witness import Witness
from gradguard.tensors.layout import wide_dtype
from gradguard.tensors.matmul_precision import full_float32, outside_autocast
from gradguard.torch_private import loss_scale_of, never_compiled, parameter_slots

_Value = TypeVar("_Value", Tensor, float)


class PerSampleGradientClipper:
    r"""Clip the gradient of each sample, then sum them, for private, federated or noisy-label learning.

    .. math:: \bar g = \frac1N \sum_{i=1}^{N} c_i\, g_i, \qquad
              c_i = \min\bigl(1,\; C / \lVert g_i \rVert\bigr)

    with :math:`g_i` the gradient of sample i's own loss over all trained parameters. One forward and one backward of
    the whole mini-batch give all norms and the clipped sum. The clipper does not build the ``[B, *shape]`` gradients,
    except for layers where building them is fastest and takes no more memory than backward has just freed.

    **Guarantees.**

    * *Exact, or refused.* A layer with a rule (linear, convolution, embedding, normalization, attention, recurrent)
      uses its rule. torch.func differentiates any other code, without the layers that this code calls. Shared and tied
      weights, layers used several times, bare and functionally used parameters and checkpointing are exact. A module
      that cannot be followed layer by layer runs sample by sample. Before the first call of each kind, the clipper
      compares a few samples with the same samples run alone. On the first step of each kind and batch size, it compares
      each parameter's sum with the plain gradient of the same backward. If a forward does something new (an attribute,
      a hook, a global variable, a branch on data, chance), the clipper runs samples of that very step alone too. To
      find changes of values that leave the operations the same, it runs one sample alone on mini-batches 1, 2, 4, 8,
      ... and then on one in a thousand. Gradients that cannot be verified raise an error that says why. The processes
      of a sharded model gather it whenever one of them must run samples again, and all refuse what one refuses.
    * *The bound holds in the arithmetic used.* No sample adds more than C, rounding included: norms, factors and sums
      are at least float32 for every dtype, and the factors leave room for rounding.
    * *A sample whose gradient is not finite adds zero*, and `statistics` counts it.
    * Clipping happens after backward: no gradient of an intermediate value changes.

    ==========================  =====================================================================================
    Edge case                   What happens
    ==========================  =====================================================================================
    zero gradient               added unchanged (factor 1)
    no samples (B = 0)          adds nothing; ``pre_step`` fills in zeros if the step had no samples at all
    layer unused in a step      adds zero; its ``.grad`` is zeros
    frozen parameter            left out of the norm; ``.grad`` stays as it is
    BatchNorm in training mode  refused: it mixes samples; use GroupNorm
    loss not the mean or sum    refused where its graph can be read; the error names each sample's part as a factor
    layers cannot be followed   samples run one by one after the batch, with the random numbers they had in the batch;
                                refused if sharded by ``fully_shard``
    compiled module             runs uncompiled until `detach`, which lets the clipper follow its layers
    ==========================  =====================================================================================

    Args:
        module: The model, also in DistributedDataParallel or sharded by ``fully_shard`` (HSDP too). Its layers have
            the clipper's hooks until `detach`, and so have its trained parameters. No attribute is set on these.
        norm_clipper: The rule: `FlatNormClipper`, `PerLayerNormClipper`, `PerParameterNormClipper`, `AutoNormClipper`,
            `QuantileNormClipper`, or a `NormClipper` of your own.
        batch_first: Whether the batch dimension of the arguments of ``module`` is the first; otherwise it is the
            second. Layers inside may have it anywhere: the clipper finds it.
        loss_reduction: Relation of the loss to the samples' own losses. ``"mean"`` and ``"sum"`` are their mean and
            sum.
            ``"token_mean"`` is the mean over all rows (tokens, pixels) of the batch, where samples may have different
            numbers of rows. A sample's own loss is then the mean over its own rows: its gradient from backward is
            multiplied by the ratio of all rows to its own rows, counted at each step. Needs ``check=True``.
            ``"share"`` accepts any loss computed from the outputs of ``module``. A sample's gradient is then its share
            of the loss's gradient: the part that flows back through the sample's own outputs. The shares add up to the
            plain gradient, so ``.grad`` is the plain gradient where no sample is clipped. One sample's influence is not
            bounded, because each share may depend on the other samples. Needs ``check=True``.
        mode: ``"fast"``, or ``"exact"``, which stores all per-sample gradients for `per_sample_gradients` and
            `clipped_gradients`. Both give the same result.
        scaler: The `torch.amp.GradScaler` that scales the loss, if any. The clipper unscales norms before it compares
            them with thresholds, and scales ``.grad`` again for ``scaler.step``.
        check: Compare samples in the batch with the same samples run alone, before the first call of each kind and now
            and then later.

    Attributes:
        statistics: `PerSampleStatistics` of the last mini-batch; not private.
        loss_divisor: The number by which a trainer divides each loss; set by an adapter that undoes the division in
            backward.
        step_advice: The call to make, quoted in the error of an optimizer step that comes before the clipped
            mini-batches were taken.

    Raises:
        InvalidTypeError: If an argument is of another type.
        InvalidValueError: If an argument has no meaning, or nothing in ``module`` is trained.
        UnsupportedGradientError: If ``module`` mixes samples or cannot be followed.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradguard as gg
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(max_norm=1.0))
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> F.cross_entropy(model(x), y).backward()
        >>> clipper.clip_and_accumulate()
        >>> clipper.pre_step().batch_size
        8
        >>> optimizer.step()

    References: Abadi et al. 2016, arXiv 1607.00133 (clipping); Lee and Kifer 2020, arXiv 2009.03106, and Li et al.
    2021, arXiv 2110.05679 (norms without gradients); Bu et al. 2022, arXiv 2210.00038 (one backward).
    """

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: NormClipper,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        *,
        mode: str = "fast",
        scaler: torch.amp.GradScaler | None = None,
        check: bool = True,
    ) -> None:
        refuse_unsupported(module)
        refuse_parts(module.parameters(), "per-sample clipping")
        check_options(norm_clipper, batch_first, loss_reduction, mode, scaler, check)
        self._names: list[str] = []
        self._groups: list[list[str]] = []
        self._accumulation = Accumulation()
        self._finite: Tensor | None = None
        self._weights = torch.float64  # the dtype of samples' weights in sums
        self._loss_scale: Tensor | float = 1.0
        self._assigned: dict[str, weakref.ref[Tensor]] = {}  # the gradients of the last `pre_step`
        self._gradients: dict[str, Tensor] | None = None
        self._clipped_by: tuple[dict[str, Tensor], Tensor | None] | None = None
        self.statistics: PerSampleStatistics | None = None
        self._looked_at, self._time_first = -1, set[int]()
        self.loss_divisor = 1.0
        self.step_advice = "call clipper.pre_step() before it, or clipper.discard() to drop them"
        with ExitStack() as attached:  # an error removes all hooks again
            self._group = process_group_of(module)
            refuse_local_thresholds(norm_clipper, rank_and_size(self._group)[1])
            attached.callback(stop_synchronizing(module))
            module = unwrapped(module)
            self.module, self.norm_clipper = module, norm_clipper
            self._loss_reduction, self._mode, self._scaler = loss_reduction, mode, scaler
            attached.callback(run_uncompiled(module))
            attached.callback(follow(module))
            own = weakref.ref(self)  # a strong reference would be a cycle, and a dropped clipper would not be freed

            def scale() -> float:
                clipper = own()
                return 1.0 if clipper is None else float(clipper._scaler_scale()) / clipper.loss_divisor

            self._loss_check = LossCheck(loss_reduction, batch_first, scale, check and loss_reduction != "share")
            self._tracker = CallTracker(
                module,
                batch_first,
                places_of_parameters(module),
                loss_reduction,
                rehearse if check else None,
                self._loss_check,
                self._group,
            )
            self._tracker.together.drop = weakref.WeakMethod(self.discard)
            self._loss_check.keep = self._tracker.together.keep
            attached.callback(self._tracker.remove)
            if check:
                self._tracker.witness = Witness(weakref.WeakMethod(self._second_opinion))
            attached.callback(watch_steps_and_scalers(self))
            attached.callback(self._accumulation.free)
            self._prepare()
            self._attached = attached.pop_all()

    @property
    def loss_reduction(self) -> str:
        """The argument of the same name. It cannot be set: make a new clipper for another reduction."""
        return self._loss_reduction

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are clipped, by name."""
        return self._tracker.parameters(self._names)

    @property
    def _device(self) -> torch.device:
        return self._tracker.parameter(self._names[0]).device

    def detach(self) -> None:
        """Remove the clipper from the module; calling it again does nothing."""
        self._attached.close()

    def constant(self, value: _Value) -> _Value:
        r"""Declare a value in the next loss that is not computed from the batch, such as a weight from a schedule.

        Values that all samples share in the loss, and the weight of a sample's row, must not change from batch to
        batch: a value that changes may have been computed from the other samples. Declare on each step a value of your
        own that changes over training (a schedule, a queue of earlier features). In private training, also declare
        constants: a tensor, or a number that multiplies or divides the loss.

        Args:
            value: The Python number or the tensor that the loss uses.

        Returns:
            The tensor itself, or the number as a float. A float differs from every count that stands in the loss as a
            whole number.

        Raises:
            InvalidTypeError: If ``value`` is neither, or is a tensor without a dimension; call .item() on that tensor.

        Example:
            >>> import torch, gradguard as gg
            >>> clipper = gg.PerSampleGradientClipper(torch.nn.Linear(4, 2), gg.FlatNormClipper(1.0))
            >>> for step in range(3):
            ...     out = clipper.module(torch.randn(8, 4))
            ...     (out.square().mean() + clipper.constant(step / 10) * out.abs().mean()).backward()
            ...     clipper.clip_and_accumulate()
            >>> clipper.pre_step().batch_size
            24
        """
        if not (isinstance(value, Tensor) and value.dim()) and type(value) not in (int, float):
            error = InvalidTypeError(
                f"constant: expected a float, or a tensor with a dimension, got {type(value).__name__}. Call .item() "
                "on a tensor of one number"
            )
            if self._tracker.together.keep is None:
                raise error
            self._tracker.together.keep(error)
            return value
        self._loss_check.declare(value)
        return value if isinstance(value, Tensor) else value * 1.0  # a float

    def per_sample_losses(self, loss_fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        r"""Compute each sample's loss from its own rows alone: the loss uses no other sample's arguments.

        .. math:: \ell_i = f(o_i, y_i, \dots), \qquad i = 1, \dots, B

        Without this method, the clipper reads the loss from its graph, which does not show everything: targets that
        were transposed, a mask made of another sample's numbers, columns chosen by a list. Here the function gets one
        sample's rows only, and the clipper does not judge the loss from the function's graph. It may be compiled, fused
        or your own, normalise, mask, average over tokens, or have class weights: its result for a batch of one is the
        sample's loss.

        **Values that the function takes from elsewhere** are only partly compared from batch to batch. The clipper
        compares tensors and numbers of `functools.partial` and of modules, and numbers that the code closes over, has
        as a default, or names in its file or object. It does not compare numbers given as arguments of this call,
        attributes of a callable object that is no module, contents of dicts, lists or NumPy arrays, the weights of
        layers, or the environment. A number computed from the batch that arrives in such a way couples the samples
        unnoticed: give tensors with one row for each sample instead.

        Call this method after the forward of the module, with the module's outputs and the batch from the loader.
        It cannot detect values that were computed from several samples before the call.

        **Guarantees.** The function is called once for each sample, with a copy of the sample's row of each tensor.
        On each step, one sample's call must use no tensor, other than parameters, that was neither given nor bound to
        the function; and no sample's call may change a bound tensor, such as a running mean. No loss may depend on
        another sample's outputs. Derivatives verify this for all samples on the first step of each kind and batch size.
        They verify it for one sample where the operations differ from earlier ones, and on mini-batches 2, 4, 8, ...,
        then one in a thousand.

        ============================  ===========================================================================
        Edge case                     What happens
        ============================  ===========================================================================
        a tensor without B rows       refused; bind it by ``functools.partial(loss_fn, weight=weight)``
        a constant with B rows        cut into rows like the batch; bind it instead
        ``[B, B]``, time first        refused until a batch has shown that it is ``[T, B]``
        arguments that are no tensor  passed unchanged, in nested tuples, lists and dicts too; a list of B numbers is
                                      refused: make it a tensor
        no samples (B = 0)            the result is a tensor without entries
        a function that draws         draws for one sample after the other
        under ``torch.no_grad()``     B is the number of samples in the first tensor; the losses are not verified
        ============================  ===========================================================================

        Args:
            loss_fn: Takes a batch of one sample, and returns its loss, a tensor of one value: ``F.cross_entropy``, a
                module such as ``torch.nn.MSELoss()``, or a function of your own.
            args: Arguments of ``loss_fn``; tensors are ``[B, ...]``, or ``[T, B, ...]`` with ``batch_first=False``.
            kwargs: Keyword arguments of ``loss_fn``.

        Returns:
            The losses ``[B]``. Call ``.mean()`` on them, or ``.sum()`` with ``loss_reduction="sum"``. With
            ``"token_mean"`` call ``.mean()`` too: each sample's loss is the mean over its own rows.

        Raises:
            InvalidTypeError: If the function returns no tensor.
            InvalidValueError: If the module was not called before, a tensor does not have B rows, or a loss is not one
                value.
            UnsupportedGradientError: If the loss of a sample depends on another sample's outputs, or on a tensor that
                may be computed from the batch.

        Example:
            >>> import torch, torch.nn.functional as F
            >>> import gradguard as gg
            >>> model = torch.nn.Linear(4, 3)
            >>> clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
            >>> x, y = torch.randn(8, 5, 4), torch.randint(0, 3, (8, 5))
            >>> y[2, 1:] = -100  # one label, where others have five
            >>> def loss_fn(logits, labels):
            ...     return F.cross_entropy(logits.mT, labels)
            >>> clipper.per_sample_losses(loss_fn, model(x), y).mean().backward()
            >>> clipper.clip_and_accumulate()
            >>> clipper.pre_step().batch_size
            8
        """
        try:
            return self._own_losses(loss_fn, args, kwargs)
        except (InvalidTypeError, InvalidValueError, UnsupportedGradientError) as error:
            used = [tensor for tensor in tensor_leaves((args, kwargs)) if tensor.requires_grad]
            keep, size = self._tracker.together.keep, self._tracker.batch_size
            if keep is None or size < 0 or not used or not torch.is_grad_enabled():
                raise
            keep(error)  # the backward of a loss of zeros passes through the module as on the other processes
            return sum([tensor.sum() * 0.0 for tensor in used[1:]], used[0].sum() * 0.0).expand(size)

    def _own_losses(self, loss_fn: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        size, batch_first = self._tracker.batch_size, self._tracker.batch_first
        if not torch.is_grad_enabled():  # validation: nothing will be clipped
            first = tensor_leaves((args, kwargs))[0]
            size = first.shape[0 if batch_first or first.dim() < 2 else 1]
            return torch.stack(own_losses(loss_fn, args, kwargs, size, batch_first))
        if size < 0:
            raise InvalidValueError("per_sample_losses: call the module first, with the batch that the losses are of.")
        if size == 0:
            return torch.cat([tensor.flatten()[:0] for tensor in tensor_leaves((args, kwargs)) if tensor.requires_grad])
        if not self._loss_check.reads:
            return torch.stack(own_losses(loss_fn, args, kwargs, size, batch_first, time_first=self._time_first))
        self._looked_at = (self._looked_at + 1) % size
        self._loss_check.look_at_bound(loss_fn, size)
        watched = self._looked_at if size > 1 or self._loss_check.is_private else -1
        losses = own_losses(loss_fn, args, kwargs, size, batch_first, watched, self._time_first)
        return self._loss_check.own_losses(losses, self._looked_at, self._tracker.witness.is_due)

    def refuse_ambiguous_losses(self) -> None:
        """Refuse a loss with a number that may change in the next batch, instead of waiting for that batch.

        A mean contains no number, and a sum only the divisor of its reduction. Any other number that multiplies or
        divides the loss must be 0.5 or declared by `constant`. Private training calls this method because its batches
        are random: a sample's gradient must not depend on which other samples were drawn.
        """
        self._loss_check.refuse_ambiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the state of the norm clipper.

        Save it between steps: it does not contain the sums of mini-batches that wait for `pre_step`.
        """
        return {"norm_clipper": self.norm_clipper.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            InvalidValueError: If it is not the state of a clipper, or is the state of another rule.
        """
        if set(state_dict) != {"norm_clipper"}:
            raise InvalidValueError(
                "expected the state of a PerSampleGradientClipper, with the key norm_clipper, got "
                f"{sorted(state_dict)}."
            )
        self.norm_clipper.load_state_dict(state_dict["norm_clipper"])

    @torch.no_grad()
    @never_compiled  # must be the inner decorator: all functions under no_grad share the code of one wrapper
    def clip_and_accumulate(self) -> None:
        """Clip each sample's gradient from the last backward and add it to the sum.

        Call this method once after each ``.backward()``. Mini-batches may differ in size. ``.grad`` is not touched. The
        processes of a model sharded by ``fully_shard`` call it equally often, with empty batches where needed.

        Raises:
            InvalidValueError: If there was no backward since the last call, or it stopped with an error, or a
                GradScaler that the clipper was not given scaled the loss.
            UnsupportedGradientError: If per-sample gradients cannot be computed exactly.

        An error inside the computation itself (out of memory, a wrong `NormClipper`) drops the whole step, as
        `discard` does. No sample can then count twice.
        """
        size = 0

        def add(mini_batch: MiniBatch) -> None:
            nonlocal size
            self._gradients = self._clipped_by = None
            size = max(0, mini_batch.batch_size)
            try:
                if size:
                    with outside_autocast(self._device), full_float32():
                        self._accumulate(mini_batch)
            except BaseException:
                self.discard()  # samples of this mini-batch may be in the sums already, and must not count twice
                raise
            finally:
                self._tracker.collector.discard()

        if self._use(add):
            self._accumulation.count(size)

    def _use(self, take: Callable[[MiniBatch], object]) -> bool:
        """Call ``take`` with the mini-batch of the last backward, after checking its gradients and that it fits.

        The processes of a sharded model do this together. If one of them raises an error, all drop the step.

        Returns:
            Whether it was taken; False if an error is kept until the processes meet.
        """
        collector, together = self._tracker.collector, self._tracker.together
        waiting, conclusive = collector.mini_batch, False
        if waiting is not None and waiting.finished is not None:  # `per_sample_gradients` has verified it already
            with together.keeping(Exception):
                self._fit_step()
                take(collector.completed())
                return True
            return False
        try:
            with together.at(Place.CLIP) as decide:
                mini_batch = collector.completed()
                self._loss_scale = self._scale_of(mini_batch)
                self._fit_step()
                conclusive = self._verify(mini_batch, decide)
                take(mini_batch)
        except Exception as error:
            if self._tracker.planner.sharded:  # processes take the same mini-batches
                self.discard()
            if isinstance(error, UnsupportedGradientError):
                collector.discard()
                self._tracker.planner.forget()
            raise
        self._tracker.verified(conclusive)
        return True

    def _fit_step(self) -> None:
        """Prepare a step that begins, or check that a mini-batch has the trained parameters of its step."""
        if self._accumulation.batch_size is None:
            self._prepare()
        elif set(self._names) != self._tracker.trained:
            raise InvalidValueError(
                "parameters were frozen or unfrozen between two mini-batches of one step: call pre_step() first, or "
                "discard() to begin the step again."
            )

    def discard(self) -> None:
        """Drop the last backward and all mini-batches since the last `pre_step`: the step begins again."""
        self._tracker.recover()
        self._tracker.collector.discard()
        self._loss_check.drop()
        self._accumulation.drop()
        self._clipped_by = None
        self.norm_clipper.drop_step()

    def skip_batch(self, after_backward: bool = False) -> None:
        """Count a mini-batch without samples, which adds nothing to the sum.

        Args:
            after_backward: Whether a backward ran, of samples that do not count. Its gradients are then checked and
                dropped.
        """
        if after_backward:
            if not self._use(lambda mini_batch: self._tracker.collector.discard()):
                return
        elif self._accumulation.batch_size is None:
            self._prepare()
        self._accumulation.count(0)

    @never_compiled
    def pre_step(self) -> PreStep:
        """Fill ``.grad`` of every trained parameter and reset the sums; call it once before ``optimizer.step()``.

        ``.grad`` becomes the average of the clipped gradients of all N samples since the last call, in the parameter's
        dtype. For ``loss_reduction="sum"`` it is their sum, and for ``"share"`` the mean over processes of their sums.
        ``.grad`` is assigned, not added to. Under DistributedDataParallel or FSDP2, N counts the samples of all
        processes. Every process calls this method once. The call makes two all-reduces, the first of a few numbers: if
        one process raises an error before its gradients change, all do.

        Returns:
            The numbers that the scale of noise follows from: ``max_norm`` for each parameter, and ``batch_size`` N.

        Raises:
            InvalidValueError: If nothing was accumulated, or if a ``.grad`` holds a gradient that was not clipped. The
                accumulated sums are kept.
        """
        with self._tracker.together.at(Place.STEP):
            self._accumulation.check("pre_step")
            self._loss_check.refuse_divided(self._accumulation.mini_batches, self.loss_divisor)
            refuse_stale_gradients(self.trained, self._assigned)
            if self._tracker.planner.sharded:
                refuse_gathered(self.trained)
            elif self._group is None:
                refuse_wrapped(self.trained.values())
        trained = self.trained
        taken, size = self._summed()
        finite = self._finite if self._scaler is not None and self._scaler.is_enabled() else None
        if self._finite is not None:  # an inf where all samples overflowed makes the scaler skip and lower its scale
            smallest = min(taken.values(), key=Tensor.numel)
            smallest += torch.where(self._finite, 0.0, torch.inf).to(smallest)
            self._finite = None
        for name, parameter in trained.items():
            gradient = shard_like(taken[name].to(parameter.dtype), parameter)
            parameter.grad, self._assigned[name] = gradient, weakref.ref(gradient)
        self._tracker.together.steps += 1
        if is_heard():
            self._tell(finite)
        max_norm = torch.full((len(self._names),), self._bound(), dtype=torch.float64, device="cpu")
        return PreStep(max_norm, size)

    def _tell(self, finite: Tensor | None) -> None:
        """Report the clip to listeners, with the mean factor of the last mini-batch's samples as its coefficient.

        The reported gradients are clipped already; the unclipped gradients are not known. Where all samples
        overflowed, the scaler will skip the step.
        """
        factors = [] if self.statistics is None else self.statistics.factors
        coefficient = torch.stack([own.mean() for own in factors]).mean() if factors else None
        rule, parameters = type(self.norm_clipper).__name__, [*self.trained.values()]
        announce(parameters, tells_norms=True)
        skipped = False if finite is None else ~finite
        reason = None if finite is None else "grad_scaler"
        tell(ClipEvent(rule, parameters, self._bound(), None, coefficient, skipped=skipped, skip_reason=reason))

    def take(self) -> ClippedSums:
        """Return the clipped sums instead of filling ``.grad``, and reset them; for callers that add noise.

        The sums are those of this process. If there are several, all call this method together.

        Raises:
            InvalidValueError: If nothing was accumulated.
        """
        return self._taken(1.0)

    def take_in_units(self) -> tuple[ClippedSums, float]:
        """Return the clipped sums as they are stored, in a unit, and reset them.

        Unlike `take`, this method does not multiply the sums by their unit, which saves a pass over memory.

        Returns:
            The sums divided by the unit, and the unit.

        Raises:
            InvalidValueError: If nothing was accumulated.
        """
        unit = self._accumulation.unit
        return self._taken(None), unit

    @torch.no_grad()
    def per_sample_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of each sample's own loss in the last mini-batch, before clipping.

        Returns:
            ``[B, *shape]`` for each trained parameter by name, at least float32, in the scale of a sample's own loss:
            without the mean's 1/B and without the factor of a scaler.

        Raises:
            InvalidValueError: If the mode is not ``"exact"``, or no backward ran yet.
        """
        self._refuse_fast_mode()
        if self._gradients is None or self._tracker.collector.mini_batch is not None:
            self._use(self._store)
        return self._gradients or {}

    @torch.no_grad()
    def clipped_gradients(self) -> dict[str, Tensor]:
        """Return the clipped gradient that each sample of the last `clip_and_accumulate` added to the sum.

        Returns:
            ``[B, *shape]`` for each trained parameter by name, at least float32: `per_sample_gradients` times the
            sample's factor. A sample's norm over all parameters (over each layer, for a per-layer rule) is at most the
            threshold. The gradient of a sample that is not finite is zero.

        Raises:
            InvalidValueError: If the mode is not ``"exact"``, if nothing was clipped yet, or if `per_sample_gradients`
                was called for a later backward that was not clipped yet.
        """
        self._refuse_fast_mode()
        if self._gradients is None or self._clipped_by is None:
            raise InvalidValueError(
                "there are no clipped gradients: call clip_and_accumulate() first, after the backward of a mini-batch "
                "with samples."
            )
        factors, bad = self._clipped_by
        return {name: scale_rows(rows, factors[name], bad) for name, rows in self._gradients.items()}

    def refuse_early_step(self, optimizer: Optimizer) -> None:
        """Check that ``optimizer`` does not step before `pre_step` has filled in its parameters' clipped gradients.

        Raises:
            InvalidValueError: If mini-batches were clipped for a parameter of ``optimizer``, and not yet taken.
        """
        if self._accumulation.batch_size is None:
            return
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        places = (self._tracker.aliases[name][0] for name in self._names)
        if any(id(parameter_slots(module).get(slot)) in held for module, slot in places):
            raise InvalidValueError(
                f"{type(optimizer).__name__}.step() was called while the clipped gradients of "
                f"{self._accumulation.batch_size} samples were not yet taken: {self.step_advice}. No weight was "
                "changed."
            )

    def sensitivity(self, relation: str = "add_or_remove_one") -> float:
        """Return the largest L2 distance between the clipped sums of two neighbouring data sets.

        Args:
            relation: ``"add_or_remove_one"`` sample, or ``"replace_one"``, whose distance is twice as large. For the
                average, divide by the number of samples that the noise is calibrated to.
        """
        return self.norm_clipper.sensitivity(relation)

    def sensitivity_of_step(self) -> float:
        """Return the largest change, in L2 norm, of the present step's clipped sum when one sample is added or removed.

        Raises:
            InvalidValueError: If a threshold has changed since the first mini-batch of the step.
        """
        now = self.sensitivity()
        if others := self._accumulation.sensitivities - {now}:
            raise InvalidValueError(
                f"the sensitivity of the clipped sum changed from {max(others):.4g} to {now:.4g} within one logical "
                "step, but the noise of a step has one size. Change a threshold after the step, before the next batch. "
                "Nothing was released."
            )
        return now

    def verify(self, samples: int = 4) -> float:
        """Compare the clipper's per-sample gradients with a loop over single samples of the last batch.

        The module runs on ``samples`` samples together, with the clipper's hooks, and on each alone, with plain
        autograd. Both runs get the same random gradient of the output. Dropout is off in both. Module, gradients and
        random generators are left unchanged. All processes of a sharded model call this method together.

        Args:
            samples: The number of samples to compare.

        Returns:
            The largest error of any parameter's gradient in one sample, relative to the norm of that gradient, or to a
            hundredth of the norm of the sample's whole gradient where that is larger.

        Raises:
            InvalidValueError: If the module was not called yet, or returns no tensor with a gradient.
            UnsupportedGradientError: If a sample cannot run alone, for example because its share of the random numbers
                that the batch drew cannot be determined.
        """
        found: list[Comparison | None] = []
        with self._tracker.together.at(Place.VERIFY) as decide:
            calls = list(self._tracker.last_calls.values())
            if not calls:
                raise InvalidValueError("verify() needs a batch: call the module once, with gradients enabled, first.")
            decide(True)
            found = [compare(self._tracker, call, range(min(samples, call.batch_size))) for call in calls]
        if None in found:
            raise InvalidValueError("verify() found no tensor that requires grad in what the module returns.")
        return max(comparison.largest for comparison in found if comparison is not None)

    def _refuse_fast_mode(self) -> None:
        if self._mode != "exact":
            raise InvalidValueError(
                "mode='fast' does not store per-sample gradients: use PerSampleGradientClipper(..., mode='exact')."
            )

    # One mini-batch

    def _accumulate(self, mini_batch: MiniBatch) -> None:
        size = mini_batch.batch_size
        device = self._device
        contributions = self._store(mini_batch) if self._mode == "exact" else mini_batch.finish(device)
        scale = self._sample_scale(size)
        agree = self._loss_check.labels_agree
        agree = True if agree is None else agree.to(device)
        norms, seen_finite = sample_norms(contributions, scale, agree)
        if unused := [name for name in self._names if name not in norms]:
            norms |= dict.fromkeys(unused, torch.zeros(size, dtype=wide_dtype(device), device=device))
        norms = {name: norms[name] for name in self._names}
        total = joint_norm(list(norms.values()))
        parts = [joint_norm([norms[name] for name in group]) for group in self._groups] if self._groups[1:] else [total]
        is_private = self._loss_check.is_private
        factors = checked_factors(self.norm_clipper, parts, apart=is_private)
        if is_private:
            self._accumulation.sensitivities.add(self.sensitivity())
        finite, bad = total < torch.inf, None
        if not seen_finite:
            bad = ~(finite & agree)
            bad = None if total.is_cpu and not bad.any() else bad
        if bad is not None:
            factors = [factor.masked_fill(bad, 0) for factor in factors]  # one non-finite part drops the whole sample
        self.statistics = PerSampleStatistics(total, norms, self._groups, factors)
        if self._scaler is not None:
            any_finite = finite.any()
            self._finite = any_finite if self._finite is None else self._finite | any_finite
        self._accumulation.begin(1.0 if self._adds_up else float(size))
        share = scale / self._accumulation.unit
        factor_of = {name: factor for group, factor in zip(self._groups, factors, strict=True) for name in group}
        self._clipped_by = factor_of, bad
        by_name = {name: factor_of[name] for name in self._names if name in contributions}
        weight_of = {id(factor): (factor * share).to(self._weights) for factor in factors}
        weights = {name: weight_of[id(own)] for name, own in by_name.items()}
        sum_together(contributions, weights, bad)
        activations = self._tracker.collector.activations
        self._accumulation.activations = max(self._accumulation.activations, activations)
        for name, own in weights.items():
            contribution = contributions.pop(name)
            contribution.room = self._accumulation.room(name)
            self._accumulation.add(name, contribution.weighted_sum(own, bad))

    def _verify(self, mini_batch: MiniBatch, decide: Callable[[bool], None]) -> bool:
        """Compare the gradients with the plain ones of the same backward, and a witnessed sample with itself alone.

        Args:
            mini_batch: The mini-batch.
            decide: Called before samples run again.

        Returns:
            Whether calls of the same kinds and batch sizes need no further verification.

        Raises:
            UnsupportedGradientError: If they differ.
        """
        if mini_batch.batch_size <= 0:
            return True
        self._tracker.refuse_hooks()
        conclusive = self._loss_check.judge()
        if (factors := self._loss_check.factors) is not None:
            for call in (*mini_batch.loops, *mini_batch.witnessed):
                call.shares = factors / len(factors)
        device = self._device
        with outside_autocast(device), full_float32():
            mini_batch.finish(device)
            if mini_batch.witnessed or self._tracker.waits_for_carried_state:
                decide(True)
            try:
                self._tracker.witness.look(mini_batch)
                self._tracker.look_at_carried_state()
            except UnsupportedGradientError:
                self.discard()  # a difference drops the whole step
                raise
        return conclusive

    def _second_opinion(self, recorded: LoopedCall, sample: int) -> Comparison | None:
        """Run one sample alone and in its whole batch, in float64 where possible, and compare outputs and gradients."""
        if recorded.before is None:
            return None
        if self.loss_reduction == "token_mean" and None in recorded.call.pattern.output_axes:
            return None  # the sample's share of a mean over tokens that the module itself returns is not known here
        with undisturbed(recorded.module), recorded.saved_alike():
            recorded.before.restore()
            others = [i for i in range(recorded.batch_size) if i != sample]
            return compare(self._tracker, recorded.call, [sample, *others], alone=1, outputs=True)

    def _store(self, mini_batch: MiniBatch) -> Contributions:
        """Store every per-sample gradient, in the scale of a sample's own loss, and return them in backward's scale."""
        contributions = mini_batch.finish(self._device)
        scale = self._sample_scale(mini_batch.batch_size)
        kept: Contributions = {name: c.materialize() for name, c in contributions.items()}
        mini_batch.finished = kept
        self._gradients, self._clipped_by = {}, None
        for name, parameter in self.trained.items():
            if name in kept:
                rows = kept[name].rows(0, mini_batch.batch_size)
                scaled = scale_rows(rows, scale, None) if isinstance(scale, Tensor) and scale.dim() else rows * scale
                self._gradients[name] = with_parts_of(scaled, parameter)
            else:
                self._gradients[name] = zeros_like_rows(parameter, max(0, mini_batch.batch_size))
        return dict(kept)

    def _sample_scale(self, size: int) -> Tensor | float:
        """Return the factor that turns backward's gradients into the gradients of each sample's own loss."""
        if self.loss_reduction != "token_mean":
            return (1 if self._adds_up else size) / self._loss_scale
        factors = self._loss_check.factors
        if factors is None:
            raise UnsupportedGradientError(
                "loss_reduction='token_mean': no loss was read, so the numbers of the samples' rows are unknown. Call "
                "loss.backward() after the forward of the module, on the loss that is computed from its outputs."
            )
        factors = factors.to(self._device, wide_dtype(self._device))
        return torch.where(factors > 0, size / factors, 0.0) / self._loss_scale  # NaN: a sample without rows

    # The whole batch

    def _summed(self) -> tuple[dict[str, Tensor], int]:
        """Return the sums divided by the number of samples, and that number; all processes add up in one all-reduce."""
        size = self._accumulation.batch_size or 0
        if self._group is None:
            return self._take(self._scaler_scale() / self._divisor(size)), size
        sums = self._accumulation.take(self.trained, 1.0)
        taken = {name: sums[name] for name in self._names}  # processes may have used layers in another order
        told = torch.tensor([float(size), float(self._finite is not None)], dtype=torch.float64, device=self._device)
        finite = torch.zeros_like(told[:1]) if self._finite is None else self._finite.to(told).view(1)
        told = torch.cat([told, finite])
        all_reduce_sum([*taken.values(), told], self._group)
        self.norm_clipper.finish_step()  # its error must not leave the other processes waiting
        size = int(told[0])
        # All processes skip the scaler's step or none does: a process without samples has nothing to tell.
        self._finite = None if self._scaler is None else (told[2] > 0) | (told[1] == 0)
        factor = self._scaler_scale() / self._divisor(size)
        return {name: total.mul_(factor) for name, total in taken.items()}, size

    @property
    def _adds_up(self) -> bool:
        """Whether the gradient of the loss is the sum of the samples' gradients rather than their mean."""
        return self.loss_reduction in ("sum", "share")

    def _divisor(self, size: int) -> int:
        if self.loss_reduction == "share":  # DistributedDataParallel averages the gradients of the processes' losses
            return rank_and_size(self._group)[1]
        return 1 if self._adds_up else max(size, 1)

    def _taken(self, factor: float | None) -> ClippedSums:
        with self._tracker.together.at(Place.TAKE, evenly=self._loss_check.is_private):
            self._accumulation.check("take")
        size = self._accumulation.batch_size or 0
        sums = self._take(factor)
        self._tracker.together.steps += 1
        return ClippedSums(self._names, [*self.trained.values()], [sums[n] for n in self._names], size)

    def _take(self, factor: float | Tensor | None) -> dict[str, Tensor]:
        """End the step; return the sums times ``factor``, or as they are stored if it is None."""
        sums = self._accumulation.take(self.trained, factor)
        self.norm_clipper.finish_step()
        return sums

    def _prepare(self) -> None:
        """Find the trained parameters and their dtypes, and set up the norm clipper for them."""
        trained = {name: p for name, p in self._tracker.parameters().items() if p.requires_grad}
        if (names := [*trained]) != self._names:
            self.norm_clipper.prepare(names)
            self._groups = checked_groups(self.norm_clipper, names)
            self._names = names
        dtypes = {parameter.dtype for parameter in trained.values()}
        self.norm_clipper.slack = slack_for(dtypes)
        is_wide = dtypes & {torch.float64, torch.complex128}
        self._weights = wide_dtype(self._device) if is_wide else torch.float32

    def _bound(self) -> float:
        return math.sqrt(math.fsum(c * c for c in self.norm_clipper.thresholds))

    def _scale_of(self, mini_batch: MiniBatch) -> Tensor | float:
        """Return the scale by which the scaler multiplied the loss of a mini-batch; 1.0 without a scaler."""
        scale = scale_of_backward(mini_batch.task, self._scaler)
        return self._scaler_scale() if scale is None else scale.double()

    def _scaler_scale(self) -> Tensor | float:
        """Return the scaler's present scale as a tensor on its device, without a host sync; 1.0 without a scaler."""
        scale = None if self._scaler is None or not self._scaler.is_enabled() else loss_scale_of(self._scaler)
        return 1.0 if scale is None else scale.double()

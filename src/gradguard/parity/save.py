"""`gradguard.save_gradients`: save the gradients of a step as sketches, each with its change by rounding alone."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.processes import rank_and_size
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.parity.backward_replay import Replay, again, digest, precision_of
from gradguard.parity.rounding_runs import with_rounding
from gradguard.parity.saved import FROZEN, SavedGradients, write
from gradguard.parity.scales import ScriptRun
from gradguard.parity.shards import (
    LocalParameters,
    ShardOf,
    frozen_parameters,
    gathered,
    local_parameters,
)
from gradguard.parity.step_parity import TrainingSteps, check_updates
from gradguard.parity.whole import Sketches, WholeParameters, about, local_gradients, local_weights
from gradguard.state.generators import have_drawn

Step = Callable[[], Any]


def save_gradients(
    file: str | os.PathLike[str] | None,
    model: nn.Module,
    step: Step,
    *,
    perturbed: int = 4,
    parts: Mapping[str, Step] | None = None,
    rows: Sequence[str] = (),
    facts: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
    shard_of: ShardOf | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    update: Callable[[], Any] | None = None,
    steps: int = 3,
    others: Sequence[Any] = (),
) -> SavedGradients:
    r"""Run a step several times and save sketches of its gradients, for a comparison by `gradguard parity`.

    The sketch of a parameter's gradient :math:`g` is 32 sums :math:`s_j = \sum_i \sigma_j(i)\, g_i`. The signs
    :math:`\sigma_j(i) = \pm 1` are hashed from the position :math:`i` in the whole parameter. The sketches of shards
    therefore add up, a factor on the gradient is a factor on the sketch, and
    :math:`\lVert g \rVert^2 \approx \sum_j s_j^2 / 32`.

    Further runs measure the effect of rounding on :math:`g`. One run is a repetition. ``perturbed`` runs change the
    weights by some :math:`\epsilon` of themselves, the machine epsilon of the coarsest dtype of weights, gradients and
    layers' outputs, or of TF32 if it is on and coarser. In these runs the gradient at the loss is also multiplied by a
    number between 1 and 2, and the result is divided by it: each sum then rounds differently.

    With ``optimizer=``, `save_gradients` saves ``steps`` whole steps, each tensor with its own bar. It saves the
    optimizer's state and the buffers before the first step. For each step it saves the gradients that the optimizer
    takes, the state and the buffers after the step, and the change of the weights. The loss scale of a GradScaler is
    divided out of the gradients: unscale in ``update``, not in ``step``. Two further runs shift gradients up and down
    by 16 times the effect of rounding, because an update may jump where a gradient is nearly zero.

    **Guarantees.**

    * The call restores weights, optimizers, their PyTorch schedulers, GradScalers, ``others``, buffers and random
      generators bit for bit, also if ``step`` raises. Gradients are None, and Megatron's ``main_grad`` is zero.
    * Each run begins from the same state, so dropout draws the same masks.
    * All ranks return the same sketches, and all raise the same errors. Only the sketches are exchanged.
    * The bar of an update is at least the rounding of storing the weights: in bfloat16, most of an update.
    * Temporaries have 65,536 elements. Buffers are copied to the CPU, and with ``optimizer=`` weights and states too.
    * The file contains numbers and text only: reading it runs no code. A reader finds the old file or the new one.

    | case | result |
    |---|---|
    | DDP, FSDP1, FSDP2, HSDP, DTensors in any layout | the whole gradient; different copies on ranks are reported |
    | shards of Megatron-core's tensor parallelism | the whole gradient, by the attributes and groups of Megatron |
    | experts or stages with names of their own | an error, unless ``shard_of`` describes them |
    | dropout | the same masks in all runs; `gradguard parity` warns of other masks in another set-up |
    | ``step`` changes weights | an error: ``step`` must end after backward |
    | gradients in Megatron's ``main_grad`` | read if ``grad`` is None |
    | complex or sparse gradients | an error |
    | a clip in ``step``, or ``torch.autograd.grad`` alone | found by one more run, not scaled: long sums may differ |

    Args:
        file: The path of the safetensors file, written by rank 0. None to write nothing.
        model: The model. Every process that holds a shard of the model must call.
        step: A function that runs forward and backward on the same batch each time.
        perturbed: The number of runs with changed weights; use 8 for a model with routing.
        parts: Other steps whose gradients may be mixed in a wrong one: each micro-batch alone, the step before.
        rows: Patterns of parameter names, such as ``"embed*"``, for which the report names wrong rows.
        facts: Positive numbers that may explain a factor, such as ``{"tokens": 4096, "micro-batches": 8}``. The world
            size and the sizes of device meshes are added.
        dtype: The coarsest dtype of computation and communication; by default the coarsest dtype of a layer's output.
            Coarser weights, gradients or TF32 count in any case.
        shard_of: A function of a name in this process's model. It returns the name and the shape of the whole parameter
            and the index where this shard begins; None for a parameter that is whole.
        optimizer: The optimizer or optimizers whose updates are saved; none for gradients alone.
        update: The code after backward in the training loop: clip, optimizer step, ``zero_grad``. By default, the
            optimizers' ``step`` and ``zero_grad``.
        steps: The number of updates, each after another call of ``step``.
        others: Objects with ``state_dict`` and ``load_state_dict`` that ``update`` changes: an average of weights, or a
            scheduler that is not PyTorch's. They are restored, and their tensors with the name and the shape of a
            parameter are compared. Objects that are missing here stay changed. A note names a missing object if it
            keeps an average of all weights, and the call is refused if it makes updates differ.

    Returns:
        The saved sketches, equal on all ranks.

    Raises:
        InvalidValueError: If an argument is out of range, or ``step`` leaves no gradient.
        InvalidTypeError: If ``model`` is not a module, ``step`` is not callable, or another argument has the wrong
            type.
        UnsupportedGradientError: If the shards of a parameter do not add up to a whole, copies of a parameter differ,
            ``step`` changes weights, a gradient is complex or sparse, or a repeated update differs.

    Example:
        >>> import torch, gradguard as gg
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> def step(times=1.0):
        ...     loss = model(x).square().mean()
        ...     (times * loss).backward()
        ...     return loss
        >>> right = gg.save_gradients(None, model, step)
        >>> gg.testing.assert_parity(right, gg.save_gradients(None, model, step)).verdict
        'PASS'
        >>> wrong = gg.save_gradients(None, model, lambda: step(times=8.0), facts={"micro-batches": 8})
        >>> gg.testing.assert_parity(right, wrong)
        Traceback (most recent call last):
        gradguard.errors.ParityError: FAIL factor: 2 of 2 parameters × 8... (micro-batches): ...

    Reference:
        Alon, Matias and Szegedy, The Space Complexity of Approximating the Frequency Moments, 1996 (the sketch).
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    parts, facts = parts or {}, facts or {}
    _check(model, (step, *parts.values()), perturbed, facts, optimizers, update, steps, others)
    local = local_parameters(model, shard_of)
    training = None
    if optimizers:
        buffers_of = None if shard_of else model  # shard_of does not describe buffers
        training = TrainingSteps(local, optimizers, update, steps, others, buffers_of)
    runs = _SavedRuns(model, local, step, rows, dtype, training)
    frozen = _frozen(frozen_parameters(model, shard_of))
    try:
        saved = with_rounding(runs.run, ScriptRun(steps=steps if training else 0), perturbed, check_updates)
        mixed = {"parts": [runs.gradients_of(one) for one in parts.values()]} if parts else {}
    finally:
        runs.replay.restore()
    saved = replace(
        saved,
        sketches={**saved.sketches, **mixed},
        parts=tuple(parts),
        facts={**saved.facts, **{name: float(value) for name, value in facts.items()}},
        stages={**frozen, **saved.stages},
        left_out=training.left_out if training else (),
    )
    if file is not None and rank_and_size()[0] == 0:
        write(file, saved)
    return saved


def _check(
    model: object, steps_of: Sequence[object], perturbed: int, facts: Mapping[str, float], optimizers: Sequence[Any],
    update: object, steps: int, others: Sequence[Any],
) -> None:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected a torch.nn.Module.")
    if wrong := [one for one in steps_of if not callable(one)]:
        raise InvalidTypeError(
            f"a step is {type(wrong[0]).__name__}: expected a function without arguments that runs forward and "
            f"backward."
        )
    if perturbed < 1:
        raise InvalidValueError(f"perturbed={perturbed}: expected at least 1 run, to measure the effect of rounding.")
    for name, value in facts.items():
        if not 0 < value < math.inf:
            raise InvalidValueError(f"facts: {name} is {value}: expected a positive number.")
    if wrong := [one for one in optimizers if not isinstance(one, Optimizer)]:
        raise InvalidTypeError(f"optimizer is {type(wrong[0]).__name__}: expected a torch.optim.Optimizer, or several.")
    if update is not None and not (optimizers and callable(update)):
        raise InvalidTypeError("update=: expected a function without arguments, and with it optimizer=.")
    if steps < 1:
        raise InvalidValueError(f"steps={steps}: expected at least 1.")
    if wrong := [one for one in others if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))]:
        raise InvalidTypeError(f"others: {type(wrong[0]).__name__} has no state_dict and load_state_dict.")


def _frozen(local: LocalParameters) -> dict[str, SavedGradients]:
    """Return the frozen weights as the stage `FROZEN`; no stage if no rank has frozen weights."""
    whole = WholeParameters(local, may_be_none=True)
    weights = whole.weights(local_weights(local))
    if not weights:
        return {}
    parameters = whole.about([about(p) for p in local], 1)
    return {FROZEN: SavedGradients(parameters, {"gradient": [weights]})}


class _SavedRuns:
    """The runs of one call of `save_gradients`, with one all-reduce of the gradients' sketches after each run."""

    def __init__(
        self,
        model: nn.Module,
        local: LocalParameters,
        step: Step,
        rows: Sequence[str],
        dtype: torch.dtype | None,
        training: TrainingSteps | None,
    ) -> None:
        self._model, self._local, self._whole = model, local, WholeParameters(local)
        self._step, self._dtype, self._training = step, dtype, training
        shapes = {name: whole.shape for name, whole in self._whole.wholes.items()}
        self._rows = [n for n, shape in shapes.items() if len(shape) > 1 and any(fnmatchcase(n, one) for one in rows)]
        if unknown := [one for one in rows if not any(fnmatchcase(name, one) for name in self._rows)]:
            raise InvalidValueError(f"rows={unknown}: no parameter of several dimensions has such a name.")
        self._weights = self._whole.weights(local_weights(local))
        if training is not None:
            training.begin()
        self._before = digest(local)
        self.replay = Replay(model, local, training and training.restore)
        self._first: SavedGradients | None = None

    def run(self, how: ScriptRun) -> SavedGradients:
        """Run the step and its updates as ``how`` describes; the descriptions of parameters come from the first run."""
        with self.replay.perturbed(how.epsilon, how.change) if how.change else nullcontext():
            with precision_of(self._model) if self._first is None else nullcontext(set()) as dtypes:
                calls = self._run_step(self._step, how.scale)
            gradients = self._whole.reduced(self._gradients(), 1 / how.scale)
            scales = self._training.loss_scales if self._training else {}
            rows = {n: [self._whole.rows(n, 1 / (how.scale * scales.get(n, 1.0)))] for n in self._rows}
            first = self._first = self._first or self._described(calls, dtypes)
            saved = replace(first, sketches={**first.sketches, "gradient": [gradients]}, rows=rows)
            if self._training is None:
                return saved
            try:
                stages = self._training.follow(partial(again, self._step, how.scale), how, calls, first.epsilon)
                return replace(saved, stages=stages, settings=self._training.settings)
            finally:
                self._training.restore()

    def gradients_of(self, part: Step) -> Sketches:
        """Return the gradients of another step."""
        self._run_step(part, 1.0)
        return self._whole.reduced(self._gradients())

    def _described(self, calls: int, dtypes: set[torch.dtype]) -> SavedGradients:
        """Return the saved run without gradient sketches, after the first run."""
        random = any(gathered(have_drawn(self.replay.generators)))
        if any(gathered(digest(self._local) != self._before)):
            raise UnsupportedGradientError(
                "step() changes the weights, and save_gradients cannot undo the change: let step() run forward and "
                "backward only, without optimizer.step(). The weights are now those after step()."
            )
        contrasts = self._whole.contrasts(self._gradients())
        parameters = self._whole.about([about(p) for p in self._local], calls)
        if not any(p.has_gradient for p in parameters):
            raise InvalidValueError(
                "step() left no gradient: expected forward and backward of this same model, without zero_grad() after "
                "them."
            )
        sketches = {"weights": [self._weights], "contrasts": contrasts}
        epsilon = self._whole.epsilon({self._dtype} if self._dtype else dtypes)
        return self._whole.saved(parameters, sketches, {}, random=random, epsilon=epsilon)

    def _run_step(self, step: Step, scale: float) -> int:
        """Run a step with the gradient at the loss scaled, and return the number of its backward passes."""
        with self._training.first_step() if self._training else nullcontext():
            self.replay.restore()
            return max(1, again(step, scale))

    def _gradients(self) -> dict[str, Tensor]:
        """Return the sketches of this process's gradients; with an ``optimizer``, without the loss scale."""
        return self._training.unscaled_gradients() if self._training else local_gradients(self._local)

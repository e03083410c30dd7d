"""Hugging Face Transformers: a callback that measures how much each sample adds to a Trainer's step, TRL's too."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer

import gradguard as gg
from gradguard.arguments import check_whole
from gradguard.errors import UnsupportedGradientError
from gradguard.integrations.adapter import Run, replaced
from gradguard.integrations.sample_jobs import PerSampleJob
from gradguard.integrations.transformers_clip import TransformersClip
from gradguard.integrations.transformers_per_sample import refuse_unfollowed, run_of, without_autocast_in_forward
from gradguard.listeners import Listener, tell_of


@dataclass(frozen=True)
class LoudestSample:
    """The sample that added most to a step.

    Attributes:
        step: The optimizer's step, from 1: the Trainer's ``global_step`` after it.
        micro_batch: Which of the batches that were accumulated, from 0.
        row: Its row of that batch, from 0.
        norm: The norm of its share of the step's gradient; NaN or inf where that is not finite.
        inputs: Its row of each tensor of the batch: in TRL's GRPO ``prompt_ids``, ``completion_ids``, ``advantages``.
    """

    step: int
    micro_batch: int
    row: int
    norm: float
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class SampleNorms:
    """How much each sample added to one step.

    Attributes:
        step: The optimizer's step, from 1.
        norms: For each accumulated batch the norm of each sample's share of the step's gradient, float64 ``[B]``.
        loudest_inputs: For each, the row of the sample with the largest, of each tensor of the batch.
    """

    step: int
    norms: Sequence[Tensor]
    loudest_inputs: Sequence[Mapping[str, Tensor]]

    def loudest(self) -> LoudestSample:
        """Return the sample with the largest norm; one that is not finite comes before all others. Reads the device."""
        tops = [(float(norms.max()), int(norms.argmax())) for norms in self.norms]  # both take NaN for the largest
        which = max(range(len(tops)), key=lambda i: tops[i][0] if math.isfinite(tops[i][0]) else math.inf)
        norm, row = tops[which]
        return LoudestSample(self.step, which, row, norm, self.loudest_inputs[which])

    @property
    def without_a_share(self) -> list[int]:
        """The accumulated batches all of whose samples have a share that is zero, or none that is finite.

        Nothing counts in such a batch: no token is left by the mask, all advantages are zero, or the loss was divided
        by zero. Reads the device.
        """
        return _empty(self.norms).nonzero().flatten().tolist()


class SampleNormsCallback(PerSampleJob, TransformersClip):
    r"""Measure how much each sample adds to the steps of a `transformers.Trainer`: which sequence made the spike?

    .. math:: g = \sum_{i=1}^{N} g_i, \qquad
              g_i = \Bigl(\frac{\partial y_i}{\partial \theta}\Bigr)^{\!\top} \frac{\partial L}{\partial y_i}

    with :math:`y_i` what the model returned for sample i and :math:`L` the Trainer's own loss, whatever it is: of TRL's
    `GRPOTrainer` in each of its forms (``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``), of `RLOOTrainer`, of a subclass of
    your own. Shares :math:`g_i` add up to the gradient of the step over all its accumulated batches.

    **Guarantees.**

    * The step is the Trainer's own: its loss, its gradient (in another order of sums, so that it rounds differently),
      its ``max_grad_norm``. Nothing is clipped here, and a sample that is not finite makes the step not finite, as
      without the callback.
    * Norms are exact, or the model is refused by `gradguard.PerSampleGradientClipper` with ``loss_reduction="share"``.
    * Norms stay on the device until they are asked for, or the Trainer logs.

    **What the Trainer logs**, of the step that is logged: ``sample_norm_max``, ``sample_norm_median`` over its finite
    samples, ``sample_norm_max_micro_batch`` and ``sample_norm_max_row``; and ``sample_norm_empty_micro_batches``, the
    number of its batches that add nothing, and count in the average where the loss is divided by their number. A
    record of the run (`gradguard.watch`, ``gradguard run``) has the finding ``empty_micro_batch``.

    ======================================  ====================================================================
    Edge case                               What happens
    ======================================  ====================================================================
    a model that returns its loss           an error: no sample has a part in a number. Compute the loss from
                                            logits, as TRL's trainers for preferences and rewards do
    a loss with a weight in it              an error: it belongs to no sample
    a batch in which nothing counts         `SampleNorms.without_a_share` has its place
    another clip among the callbacks        an error; `max_grad_norm` of the Trainer may be any
    training stops within a step            what was measured of it is dropped
    several processes or GPUs               an error
    DeepSpeed, FSDP, ``torch_compile``      an error
    ======================================  ====================================================================

    Args:
        keep: How many steps are kept in ``steps``.

    Attributes:
        steps: `SampleNorms` of the last steps, the newest last.
        clipper: The `gradguard.PerSampleGradientClipper` that measures; None before the first batch.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import SampleNormsCallback
        >>> class OwnLoss(Trainer):
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...         return (model(inputs["x"]).square().sum(1) * inputs["advantage"]).mean()
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x)
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=1, disable_tqdm=True,
        ...                               save_strategy="no", per_device_train_batch_size=4, logging_strategy="no",
        ...                               report_to=[], remove_unused_columns=False)
        >>> data = [{"x": torch.ones(3), "advantage": torch.tensor(a)} for a in (1.0, -1.0, 50.0, 0.0)]
        >>> callback = SampleNormsCallback()
        >>> _ = OwnLoss(Model(3, 1), arguments, train_dataset=data, callbacks=[callback]).train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> callback.steps[-1].loudest().inputs["advantage"]
        tensor(50.)
    """

    state_file = "gradguard_sample_norms.pt"
    _max_grad_norms = None

    def __init__(self, *, keep: int = 1) -> None:
        self._keep = check_whole("keep", keep, 1)
        super().__init__(gg.FlatNormClipper(math.inf), loss_reduction="share")

    def _not_begun(self) -> dict[str, Any]:
        own = {"steps": deque(maxlen=self._keep), "_measured": [], "_inputs": {}, "_hooks": ExitStack()}
        return {**super()._not_begun(), **own, "_autocast": None}

    steps: deque[SampleNorms]
    _measured: list[tuple[Tensor, Mapping[str, Tensor]]]  # of the batches of this step
    _inputs: Mapping[str, Any]  # what the loss of this batch is computed from
    _hooks: ExitStack
    _autocast: Callable[..., Any] | None  # the Trainer's precision, if it is mixed

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew: the gradients were used."""
        self._norm = None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: nothing is learned."""
        return {}

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        refuse_unfollowed(type(self).__name__, trainer)

    def _attach(self, run: Run) -> None:
        if self._autocast is not None:
            assert run.model is not None
            self._hooks.enter_context(_autocast_outside(run.model, self._autocast))
        super()._attach(run)

    def _training_step(
        self, original: Callable[..., Any], trainer: Trainer, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Forward and backward of one batch, as the Trainer does them; then measure."""
        if not self._acting:
            self._refuse(trainer)
            self._autocast = trainer.accelerator.autocast if trainer.accelerator.native_amp else None
            self.begin(run_of(trainer, model))
        loss_of = trainer.compute_loss

        def seen(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._inputs = dict(inputs)  # the loss may take its labels out
            with without_autocast_in_forward(model):
                return loss_of(model, inputs, *args, **kwargs)

        with replaced(trainer, "compute_loss", seen):
            loss = original(trainer, model, *args, **kwargs)
        self.after_backward()
        norms = self.clipper.statistics.norms
        self._measured.append((norms, _row(self._inputs, norms)))
        self._inputs = {}
        return loss

    def _clip_grad_norm(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        """Fill in the gradients, once, and let the Trainer clip them."""
        if self._summed:
            self.before_step()
            norms, inputs = zip(*self._measured, strict=True)
            self._spoil(torch.cat(norms).isfinite().all())
            self.steps.append(SampleNorms(trainer.state.global_step + 1, norms, inputs))
            tell_of(Listener.on_empty_batches, _empty(norms).sum())
            self._measured = []
            self._norm = original(trainer, *args, **kwargs)
            return self._norm
        if self._norm is None:
            raise UnsupportedGradientError(
                f"nothing was measured in this step: the {type(self).__name__} was added after its first backward. "
                "Add it before training, or between steps as in on_step_end."
            )
        return original(trainer, *args, **kwargs)

    _get_grad_norm = _clip_grad_norm

    def _spoil(self, finite: Tensor) -> None:
        """Make the gradient not finite where a sample's is, which the clipper has left out."""
        smallest = min((p.grad for p in self.clipper.trained.values() if p.grad is not None), key=Tensor.numel)
        smallest += torch.where(finite, 0.0, torch.nan).to(smallest)

    def _logged(self) -> dict[str, float]:
        if not self.steps:
            return {}
        loudest, norms = self.steps[-1].loudest(), torch.cat([*self.steps[-1].norms])
        return {
            "sample_norm_max": loudest.norm,
            "sample_norm_median": float(norms[norms.isfinite()].median()),
            "sample_norm_max_micro_batch": loudest.micro_batch,
            "sample_norm_max_row": loudest.row,
            "sample_norm_empty_micro_batches": len(self.steps[-1].without_a_share),
        }

    def end(self) -> None:
        """Give the model back; what was measured of a step that did not come is dropped. May be repeated."""
        super().end()
        self._hooks.close()
        self._norm, self._measured, self._inputs = None, [], {}


def _empty(norms: Sequence[Tensor]) -> Tensor:
    """Tell of each accumulated batch whether none of its samples has a share."""
    return torch.stack([~(of_batch.isfinite() & (of_batch > 0)).any() for of_batch in norms])


@contextmanager
def _autocast_outside(model: nn.Module, autocast: Callable[..., Any]) -> Iterator[None]:
    """Let autocast begin before the clipper looks at a call of the model, which has its own forward back."""
    running: list[Any] = []  # calls of the model within each other: the clipper tries it out in its first call

    def begin(*_: Any) -> None:
        running.append(autocast())
        running[-1].__enter__()

    def end(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        del module, arguments
        running.pop().__exit__(None, None, None)
        return convert_to_fp32(outputs)

    first = model.register_forward_pre_hook(begin, prepend=True)
    last = model.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def _row(inputs: Mapping[str, Any], norms: Tensor) -> dict[str, Tensor]:
    """The row of the sample with the largest norm; nothing waits for the device."""
    if not len(norms):
        return {}
    which = norms.argmax().reshape(1)
    held = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and len(v) == len(norms)}
    return {k: v.detach().index_select(0, which.to(v.device))[0] for k, v in held.items()}

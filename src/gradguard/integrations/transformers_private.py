"""Hugging Face Transformers: a callback that makes training differentially private, under the Trainer's own loop."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer

import gradguard as gg
from gradguard.errors import UnsupportedGradientError, refuse
from gradguard.integrations.adapter import replaced
from gradguard.integrations.sample_jobs import PrivateBatches, PrivateJob
from gradguard.integrations.transformers_per_sample import PerSampleCallback, run_of


class PrivateCallback(PrivateJob, PerSampleCallback):
    r"""Make the training of a `transformers.Trainer` differentially private: `make_private` in one line.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    The Trainer's data set, collator and workers are kept. Its batches are replaced by Poisson samples: in each step
    every one of the N samples joins with probability q. The expected number qN is ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps``, so an epoch has as many steps as before, to within rounding. Each sample's loss is
    its own, as in `PerSampleCallback`: not the Trainer's mean over all tokens.

    **Guarantees.** Those of `gradguard.private.make_private`: what the weights become is (epsilon, delta)
    differentially private with respect to one sample of the training data, epsilon never exceeds that of a budget.
    The losses that the Trainer logs are not covered.

    * Noise is added once for each step of the optimizer, and the step is counted before the weights change.
    * No other step of the optimizer is let through, and no change of the gradients after the noise.
    * A checkpoint holds the accountant's steps and what the norm clipper has learned (``gradguard_private.pt``);
      neither noise nor which samples were drawn. A resumed run goes on counting, and goes on within the epoch.

    With the Trainer's own numbers it logs ``epsilon``; ``grad_norm`` is the norm of the noised average.

    ==================================================  ==========================================================
    Edge case                                           What happens
    ==================================================  ==========================================================
    a batch that draws no sample                        one sample that does not count stands in; noise is added
    a sample whose gradient is not finite               adds zero
    evaluation within an epoch                          the same steps
    resuming from a checkpoint without this callback    an error: what its steps have cost is not known
    ``fp16``                                            an error: a scale that follows overflows tells of samples
    a Trainer with its own ``get_train_dataloader``     an error
    an ``IterableDataset``, ``group_by_length``         an error
    ``auto_find_batch_size``                            an error
    what `PerSampleCallback` refuses                    an error
    a second ``train``                                  an error: its cost would add up
    ==================================================  ==========================================================

    Args:
        privacy: A `gradguard.private.PrivacyBudget` without ``epochs`` and ``steps``, for as many steps as the Trainer
            plans, or a `gradguard.private.FixedNoise`.
        norm_clipper: The rule; None bounds each sample's gradient by 1, as ``gg.FlatNormClipper(1.0)``.
        secure: As for `gradguard.private.make_private`.
        seed: As for `gradguard.private.make_private`.
        **options: ``loss`` and ``mode``, as for `PerSampleCallback`.

    Attributes:
        norm_clipper: The rule.
        clipper: The `gradguard.PerSampleGradientClipper` of the current or the last training.

    Raises:
        InvalidTypeError: If an argument is of another type.
        InvalidValueError: If the budget names the number of steps, which the Trainer plans.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> from gradguard.integrations.transformers import PrivateCallback
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x)}
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=4, disable_tqdm=True,
        ...                               save_strategy="no", per_device_train_batch_size=5, logging_strategy="no",
        ...                               report_to=[])
        >>> callback = PrivateCallback(gg.private.PrivacyBudget(epsilon=3.0, delta=1e-3, accountant="rdp"),
        ...                            loss=lambda outputs, inputs: outputs["logits"].square().sum(1))
        >>> data = [{"x": x} for x in torch.randn(20, 2)]
        >>> trainer = Trainer(Model(2, 1), arguments, train_dataset=data, callbacks=[callback])
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> callback.private.steps, 2.99 < callback.private.epsilon() <= 3.0
        (4, True)

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """

    state_file = "gradguard_private.pt"

    def _logged(self) -> dict[str, float]:
        return {} if self.private is None else {"epsilon": self.private.epsilon()}

    def _refuse(self, trainer: Trainer) -> None:
        super()._refuse(trainer)
        refuse(
            UnsupportedGradientError,
            (
                trainer.args.fp16,
                "fp16: the scale of the loss follows overflows, which tell of single samples. Use bf16.",
            ),
            (
                trainer.args.auto_find_batch_size,
                "auto_find_batch_size begins again with another sampling rate, and the steps before would be "
                "forgotten. Choose per_device_train_batch_size, with gradient_accumulation_steps for the rest.",
            ),
        )

    def _get_train_dataloader(self, original: Callable[..., Any], trainer: Trainer) -> PrivateBatches:
        """Keep the Trainer's loader, and give it Poisson batches instead."""
        # Accelerate would wrap the loader, whose batches are not used, and take its order over.
        with replaced(trainer.accelerator, "prepare", lambda loader: loader):
            loader = original(trainer)
        parts = trainer.args.gradient_accumulation_steps
        self._batches = PrivateBatches(loader, parts, 1, lambda: self._started(trainer))
        return self._batches

    def _started(self, trainer: Trainer) -> gg.private.PrivateTraining:
        """Begin when the first batch is asked for: the model is wrapped then, and the checkpoint is read."""
        if not self._acting:
            self.begin(run_of(trainer, trainer.model_wrapped))  # type: ignore[arg-type]
        assert self.private is not None
        return self.private

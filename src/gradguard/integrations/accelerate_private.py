"""Hugging Face Accelerate: differentially private training in a loop that an ``Accelerator`` runs."""

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

import gradguard as gg
from gradguard.errors import InvalidTypeError
from gradguard.integrations.accelerate_per_sample import PerSampleClip, check_prepared
from gradguard.integrations.sample_jobs import PrivateBatches, PrivateJob


class PrivateClip(PrivateJob, PerSampleClip):
    """One private training of an accelerator; `make_private` makes it.

    Attributes:
        loader: Loop over this one. It yields ``gradient_accumulation_steps`` batches for each step, on the
            accelerator's device.
        private: The `gradguard.private.PrivateTraining`: ``private.epsilon()``, ``private.steps``.
        norm_clipper: The rule.
        clipper: Its `gradguard.PerSampleGradientClipper`.
    """

    _trainer_plans = False
    loader: PrivateBatches


def make_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    privacy: gg.private.PrivacyBudget | gg.private.FixedNoise,
    norm_clipper: gg.rules.NormClipper | None = None,
    *,
    secure: bool = False,
    seed: int | None = None,
    **options: Any,
) -> PrivateClip:
    r"""Make training differentially private; the loop stays as it is, but for the loader.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    Loop over ``loader`` of what is returned: Poisson samples of the same data set, in which every one of the N samples
    joins each step with probability q. The expected number qN is the loader's batch size times
    ``gradient_accumulation_steps`` times the number of processes. ``accelerator.backward`` clips each sample and adds
    up, once its division by ``gradient_accumulation_steps`` is undone; ``optimizer.step`` adds the noise and counts the
    step first, where it takes a real one. ``accelerator.save_state`` saves what was counted, and neither noise nor
    which samples were drawn; ``load_state`` goes on, within the epoch too.

    **Guarantees.** Those of `gradguard.private.make_private`.

    ==============================================  ============================================================
    Edge case                                       What happens
    ==============================================  ============================================================
    a batch that draws no sample                    one sample that does not count stands in; noise is added
    several processes (DistributedDataParallel)     one Poisson sample, in equal parts; one process adds noise
    a loop over another loader                      an error at the first ``accelerator.backward``
    ``optimizer.step`` within an accumulation       what Accelerate makes of it: no step
    ``save_state`` within an accumulation           an error: the sums have no noise yet
    an epoch left within an accumulation            an error at the next step: Accelerate counts on
    what `clip_per_sample` refuses                  an error
    ==============================================  ============================================================

    Args:
        accelerator: The accelerator.
        model: The model as ``accelerator.prepare`` returned it.
        optimizer: The optimizer as it returned it.
        loader: The DataLoader as it was before ``prepare``, with ``batch_size`` and ``shuffle``.
        privacy: A `gradguard.private.PrivacyBudget` for the whole training, or a `gradguard.private.FixedNoise`.
        norm_clipper: The rule; None bounds each sample's gradient by 1, as ``gg.FlatNormClipper(1.0)``.
        secure: As for `gradguard.private.make_private`.
        seed: As for `gradguard.private.make_private`.
        **options: Those of `gradguard.PerSampleGradientClipper`: ``loss_reduction``, ``batch_first`` and ``mode``.

    Returns:
        The training.

    Raises:
        InvalidTypeError: If an argument is of another type, or the optimizer is not prepared, or the loader is.
        InvalidValueError: If arguments contradict each other, or something else clips.
        UnsupportedGradientError: If the guarantee could not be kept.

    Example:
        >>> import gradguard as gg, torch
        >>> from accelerate import Accelerator
        >>> from torch.utils.data import DataLoader
        >>> from gradguard.integrations.accelerate import make_private
        >>> accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loader = DataLoader(torch.randn(40, 2), batch_size=5, shuffle=True)
        >>> private = make_private(accelerator, model, optimizer, loader,
        ...                        gg.private.PrivacyBudget(epsilon=3.0, delta=1e-3, epochs=1, accountant="rdp"))
        >>> for batch in private.loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(model(batch).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> private.private.steps, 2.99 < private.private.epsilon() <= 3.0
        (4, True)
        >>> private.detach()

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """
    check_prepared("make_private", accelerator, model, optimizer)
    assert isinstance(optimizer, AcceleratedOptimizer)
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        raise InvalidTypeError(
            f"loader is a {type(loader).__name__}, which accelerator.prepare has made: expected the DataLoader as it "
            "was before, of which other batches are drawn."
        )
    clip = PrivateClip(privacy, norm_clipper, secure=secure, seed=seed, **options)
    clip.loader = clip._batches = PrivateBatches(
        loader,
        accelerator.gradient_accumulation_steps,
        accelerator.num_processes,
        lambda: clip.private,
        partial(send_to_device, device=accelerator.device),
    )
    return clip.attach(accelerator, model, optimizer)

"""The set-up of private training in one call."""

import inspect
import warnings
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from gradguard.arguments import check_whole
from gradguard.distributed.groups import from_first_rank, rank_and_size
from gradguard.distributed.placements import is_sharded
from gradguard.distributed.wrappers import refuse_wrapped
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, refuse
from gradguard.optimizer_hooks import optimizers_in, parameters_of
from gradguard.per_sample.norm_clippers import FlatNormClipper, QuantileNormClipper
from gradguard.per_sample.refusals import refuse_local_thresholds
from gradguard.per_sample.sample_clipper import PerSampleGradientClipper
from gradguard.private.accounting import Accountant
from gradguard.private.budget import FixedNoise, PrivacyBudget
from gradguard.private.buffers import refuse_running_statistics
from gradguard.private.loader import PrivateLoader, check_loader
from gradguard.private.noise import GaussianNoise, key_from
from gradguard.private.sampling import PoissonBatches
from gradguard.private.training import PrivateTraining, Terms


def make_private(
    model: nn.Module | PerSampleGradientClipper,
    optimizer: Optimizer,
    loader: DataLoader,
    privacy: PrivacyBudget | FixedNoise,
    *,
    max_physical_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    poisson_sampling: bool = True,
    secure: bool = False,
    seed: int | None = None,
    process_group: Any = None,
) -> PrivateTraining:
    r"""Make training differentially private: per-sample clipping, noise, Poisson sampling and accounting.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    with the sensitivity S of the sum (for a `FlatNormClipper` its ``max_norm``), the noise multiplier σ, and the
    *expected* batch size qN. For ``loss_reduction="sum"`` the sum is not divided by qN.

    **Guarantees.** The trained parameters are (epsilon, delta) differentially private with respect to adding or
    removing one sample of the data set, with `PrivateTraining.epsilon` at ``privacy.delta``. Epsilon never exceeds the
    target of a `PrivacyBudget`. The guarantee does **not** cover losses, accuracies on training data and
    `PrivateTraining.statistics`, nor a choice of these options from the data.

    Args:
        model: A module that `PerSampleGradientClipper` supports, also in DistributedDataParallel or sharded by
            ``fully_shard``; each sample's gradient is then clipped to a norm of 1. Or an unused
            `PerSampleGradientClipper` of the module, for another rule, ``loss_reduction``, ``batch_first``, ``mode`` or
            ``scaler``. The returned training owns this clipper, and an error here detaches it. The scale of a
            GradScaler stays constant, because a scale that adapts to overflows would reveal single samples: choose
            ``init_scale``. Samples that overflow count as zero.
        optimizer: An optimizer of all trained parameters of the model, whose ``step`` needs no closure.
            ``private.step()`` calls its ``step``, or a trainer after ``private.pre_step()``. Any other call is an
            error.
        loader: A DataLoader with ``batch_size`` and ``shuffle``. Its data set, ``collate_fn`` and workers are kept. Its
            batch size is the expected size of a logical batch, for each process if there are several.
        privacy: A `PrivacyBudget` for the whole training, which decides the noise, or a `FixedNoise`.
        max_physical_batch_size: The most samples that the loader yields at once, for each process. Larger logical
            batches are yielded in several parts.
        gradient_accumulation_steps: For trainers that count batches: the exact number of parts of each logical batch.
            The expected size of a part is the loader's batch size. For a part without samples, the loader yields a
            sample that does not count. ``len`` of the loader is the number of parts.
        poisson_sampling: False keeps the loader's own batches. Sampling then adds no privacy: each epoch is accounted
            for as one use of every sample, and in a neighbouring data set one sample's gradients are replaced by
            zeros. Needs ``shuffle=True`` or ``False``, and a single process.
        secure: Whether to draw every bit of the noise from the operating system, see `GaussianNoise`.
        seed: Makes noise and batches repeatable, for tests only; the same for all processes.
        process_group: The group of several processes that hold copies of ``model`` without DistributedDataParallel.

    Returns:
        The training; iterate over its ``loader`` and call its ``step()`` after each backward.

    Raises:
        InvalidValueError: If arguments contradict each other or are out of range.
        InvalidTypeError: If an argument is of another type.
        UnsupportedGradientError: If the guarantee cannot be kept, for example for an ``IterableDataset`` or BatchNorm.
        MissingPackageError: If dp-accounting is not installed: ``pip install gradguard[private]``.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(100, 5), torch.randint(0, 2, (100,)))
        >>> model = torch.nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> private = make_private(model, optimizer, DataLoader(data, batch_size=20, shuffle=True),
        ...                        PrivacyBudget(epsilon=3.0, delta=1e-3, epochs=2, accountant="rdp"))
        >>> for epoch in range(2):
        ...     for x, y in private.loader:
        ...         loss = F.cross_entropy(model(x), y)
        ...         loss.backward()
        ...         stepped = private.step()
        >>> private.steps, 2.99 < private.epsilon() <= 3.0
        (10, True)

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """
    parts, largest = gradient_accumulation_steps, max_physical_batch_size
    with ExitStack() as attached:  # an error removes all hooks from model and optimizer
        clipper = model
        if not isinstance(clipper, PerSampleGradientClipper):
            clipper = PerSampleGradientClipper(clipper, FlatNormClipper(1.0))
        attached.callback(clipper.detach)
        for name, number in (("max_physical_batch_size", largest), ("gradient_accumulation_steps", parts)):
            if number is not None:
                check_whole(name, number)
        if not isinstance(privacy, PrivacyBudget | FixedNoise):
            raise InvalidTypeError(
                f"privacy: expected PrivacyBudget(epsilon=..., delta=..., epochs=...) or FixedNoise("
                f"noise_multiplier=..., delta=...), got {privacy!r}."
            )
        other = f"max_physical_batch_size={largest}" if poisson_sampling else "poisson_sampling=False"
        module, rule = clipper.module, clipper.norm_clipper
        quantile = rule if isinstance(rule, QuantileNormClipper) else None
        followed = 0 if quantile is None else quantile.steps
        refuse(
            InvalidValueError,
            (
                parts is not None and (largest is not None or not poisson_sampling),
                f"gradient_accumulation_steps={parts} with {other}: it cuts Poisson batches by itself. Leave out one "
                "of the two.",
            ),
            (
                not clipper._loss_check.reads,
                "the clipper has loss_reduction='share' or check=False: a share of a loss depends on the other "
                "samples, and an unchecked loss may depend on them. One sample's influence would not be bounded. Leave "
                "this option out.",
            ),
            (
                followed,
                f"the QuantileNormClipper has adapted to {followed} steps already, whose counts were not accounted "
                "for: make a new one.",
            ),
            (
                clipper.statistics is not None,
                "the clipper has clipped already, so its rule and its check of the loss depend on samples without "
                "noise: make a new PerSampleGradientClipper for private training.",
            ),
        )
        group = process_group if process_group is not None else clipper._group
        if group is None:
            refuse_wrapped(module.parameters())
        rank, world_size = rank_and_size(group)
        size = check_loader(loader, poisson_sampling, world_size)
        refuse_local_thresholds(rule, world_size)
        if not isinstance(optimizer, Optimizer):
            raise InvalidTypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        for one in optimizers_in(optimizer):
            _refuse_closure(one)
        given = {id(p): p for one in optimizers_in(optimizer) for p in parameters_of(one) if p.requires_grad}
        own = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        others = [tuple(p.shape) for p in given.values() if id(p) not in own]
        lacking = [name for one, name in own.items() if one not in given]
        refuse(
            InvalidValueError,
            (
                others,
                f"the optimizer has {len(others)} parameters, of shapes {others[:3]}, that are not the model's: their "
                f"gradients would be neither clipped nor noised. Make one model that holds all trained parameters.",
            ),
            (
                lacking,
                f"the optimizer lacks {len(lacking)} of the model's {len(own)} trained parameters, such as "
                f"{lacking[:3]}: they would never be trained, because private.step() steps this optimizer only. Make "
                "one optimizer of all of them, with param groups for different learning rates, or freeze them first by "
                "requires_grad_(False).",
            ),
        )
        refuse_running_statistics(module)
        if privacy.delta >= 1 / size:
            warnings.warn(
                f"delta={privacy.delta} is not below 1 / {size} samples: it would allow the publication of one whole "
                "sample. Choose a delta well below.",
                stacklevel=2,
            )

        batch_size = min(loader.batch_size * world_size * (parts or 1), size)  # type: ignore[operator]
        key = from_first_rank(key_from(seed, "sampling"), group)
        noise = GaussianNoise(seed, secure=secure)
        batches, rate, of_epoch = None, 1.0, 1
        if poisson_sampling:
            batches = PoissonBatches(size, batch_size / size, seed=seed, rank=rank, world_size=world_size, key=key)
            rate, of_epoch = batches.sample_rate, batches.steps
        multiplier, planned = privacy.plan(rate, of_epoch)
        of_gradients = multiplier
        if quantile is not None:
            if secure and quantile.generator is not None:
                raise InvalidValueError(
                    "secure=True with a QuantileNormClipper that has a generator: make the rule without a generator. "
                    "The noise on its count then comes from the operating system."
                )
            quantile.expected_batch_size = batch_size
            of_gradients = quantile.noise_multiplier_for_gradients(multiplier)
        divisor = 1.0 if clipper.loss_reduction == "sum" else float(batch_size)
        terms = Terms(multiplier, of_gradients, rate, divisor, privacy.delta, planned, privacy.epsilon)

        ledger = Accountant(privacy.accountant)
        clipper.refuse_ambiguous_losses()
        private = PrivateTraining(
            clipper, optimizer, terms, ledger, noise, batches, group, for_trainer=parts is not None
        )
        attached.callback(private.detach)
        # The forward of a sharded model makes collectives, so every process must run it.
        stand_in = parts is not None or (world_size > 1 and is_sharded(next(module.parameters())))
        private.loader = PrivateLoader(loader, batches, largest, stand_in, private._hand_out, parts)
        attached.pop_all()
    return private


def _refuse_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``step`` requires an argument.

    Raises:
        UnsupportedGradientError: If it does, as LBFGS requires a closure.
    """
    try:
        given = [*inspect.signature(type(optimizer).step).parameters.values()][1:]
    except (TypeError, ValueError):  # the step is no Python code
        return
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in given if one.kind in plain and one.default is inspect.Parameter.empty]
    if needed:
        raise UnsupportedGradientError(
            f"optimizer: expected one whose step() needs no argument, got {type(optimizer).__name__}, whose step() "
            f"requires {', '.join(needed)}. A private step has one gradient, with noise; an optimizer that computes "
            "the loss several times would need a private gradient each time. Use torch.optim.SGD or torch.optim.AdamW."
        )

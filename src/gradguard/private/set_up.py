"""Private training in one call."""

import math
import warnings
from contextlib import ExitStack
from typing import Any, Literal

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from gradguard.arguments import check_number, check_whole
from gradguard.distributed.groups import (
    from_first_rank,
    process_group_of,
    rank_and_size,
    stop_synchronizing,
    unwrapped,
)
from gradguard.distributed.placements import is_sharded
from gradguard.distributed.wrappers import refuse_wrapped
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.optimizer_hooks import parameters_of
from gradguard.per_sample.clipping_rule import NormClipper
from gradguard.per_sample.norm_clippers import FlatNormClipper, QuantileNormClipper
from gradguard.per_sample.refusals import refuse_local_thresholds
from gradguard.per_sample.sample_clipper import PerSampleGradientClipper
from gradguard.private.accounting import Accountant, AccountantName, noise_multiplier_for
from gradguard.private.buffers import refuse_running_statistics
from gradguard.private.loader import PrivateLoader, check_loader
from gradguard.private.noise import GaussianNoise, key_from
from gradguard.private.sampling import PoissonBatches
from gradguard.private.training import PrivateTraining, Terms


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float,
    max_grad_norm: float | None = None,
    norm_clipper: NormClipper | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    max_physical_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    loss_reduction: Literal["mean", "sum", "token_mean"] = "mean",
    batch_first: bool = True,
    poisson_sampling: bool = True,
    accountant: AccountantName = "pld",
    secure: bool = False,
    seed: int | None = None,
    mode: Literal["fast", "exact"] = "fast",
    process_group: Any = None,
    scaler: Any = None,
) -> PrivateTraining:
    r"""Make training differentially private: per-sample clipping, noise, Poisson sampling and accounting.

    .. math:: \text{grad} = \frac{1}{qN} \Bigl(\sum_{i \in \text{batch}} c_i g_i + N(0, \sigma^2 S^2)\Bigr)

    with the sensitivity S of the sum (``max_grad_norm``), and the *expected* batch size qN; for ``"sum"`` without it.

    **Guarantees.** What the parameters become is (epsilon, delta) differentially private with respect to adding or
    removing one sample of the data set, with `PrivateTraining.epsilon` at ``target_delta``; epsilon never exceeds
    ``target_epsilon``. Losses, accuracies on training data and `PrivateTraining.statistics` are **not** covered, nor
    is the choice of the options here from the data.

    Args:
        model: A module that `PerSampleGradientClipper` takes, or one inside DistributedDataParallel, or sharded by
            ``fully_shard``.
        optimizer: Any optimizer of the model's parameters; its ``step`` is called by ``private.step()`` alone.
        loader: A DataLoader with ``batch_size`` and ``shuffle``. Its data set, ``collate_fn`` and workers are kept;
            its batch size is the expected size of a logical batch, for each process if there are several.
        noise_multiplier: :math:`\sigma`, >= 0; or else
        target_epsilon: what all ``epochs`` or ``steps`` may spend together; the noise follows from it.
        target_delta: Probability with which the guarantee may fail, well below 1 over the number of samples.
        max_grad_norm: Bound on the norm of each sample's gradient; 1 if there is no ``norm_clipper`` either.
        norm_clipper: Another rule of clipping, instead of ``max_grad_norm``.
        epochs: With ``target_epsilon``: number of epochs, of N divided by the batch size steps each; or else
        steps: the number of steps.
        max_physical_batch_size: The most samples that the loader yields at once, for each process; larger logical
            batches come in several parts.
        gradient_accumulation_steps: For trainers that count batches: each logical batch comes in exactly so many
            parts, whose expected size is the loader's batch size. Where a part has no samples one that does not count
            stands in. ``len`` of the loader is the number of parts.
        loss_reduction: Whether the loss is the ``"mean"`` or the ``"sum"`` over the samples that the loader yields,
            or a ``"token_mean"``, as in `PerSampleGradientClipper`.
        batch_first: Whether samples are the first dimension of inputs; the second otherwise.
        poisson_sampling: False keeps the loader's own batches. Then no privacy is gained by sampling: each epoch is
            accounted for as one use of every sample, and neighbouring data sets are those where one sample's
            gradients are replaced by zeros. Needs ``shuffle=True`` or ``False``, and one process.
        accountant: ``"pld"`` or ``"rdp"``, see `epsilon`.
        secure: Draw noise from the operating system, bit by bit, see `GaussianNoise`.
        seed: Makes noise and batches repeatable, which is for tests; the same for all processes.
        mode: The clipper's mode.
        process_group: The group of several processes that hold copies of ``model`` without DistributedDataParallel.
        scaler: A ``GradScaler`` that scales the loss. Its scale stays what it is, because a scale that follows
            overflows would reveal single samples: choose ``init_scale``; samples that overflow count as zero.

    Returns:
        The training; loop over its ``loader`` and call its ``step()`` after each backward.

    Raises:
        InvalidValueError: If arguments contradict each other or are out of range; it says which.
        InvalidTypeError: If an argument is of another type.
        UnsupportedGradientError: If the guarantee could not be kept, say for an ``IterableDataset`` or BatchNorm.
        MissingPackageError: If dp-accounting is not installed: ``pip install gradguard[private]``.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(100, 5), torch.randint(0, 2, (100,)))
        >>> model = torch.nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> private = make_private(model, optimizer, DataLoader(data, batch_size=20, shuffle=True),
        ...                        target_epsilon=3.0, target_delta=1e-3, epochs=2, accountant="rdp")
        >>> for epoch in range(2):
        ...     for x, y in private.loader:
        ...         loss = F.cross_entropy(model(x), y)
        ...         loss.backward()
        ...         stepped = private.step()
        >>> private.steps, 2.99 < private.epsilon() <= 3.0
        (10, True)

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """
    group = process_group if process_group is not None else process_group_of(model)
    if group is None:
        refuse_wrapped(model.parameters())
    rank, world_size = rank_and_size(group)
    parts = gradient_accumulation_steps
    _refuse_both("how to clip", max_grad_norm=max_grad_norm, norm_clipper=norm_clipper)
    _refuse_both("how long training is", epochs=epochs, steps=steps)
    _refuse_both(
        "how to cut batches", gradient_accumulation_steps=parts, max_physical_batch_size=max_physical_batch_size
    )
    for name, number in (
        ("epochs", epochs),
        ("steps", steps),
        ("max_physical_batch_size", max_physical_batch_size),
        ("gradient_accumulation_steps", parts),
    ):
        if number is not None:
            check_whole(name, number)
    if parts is not None and not poisson_sampling:
        raise InvalidValueError(
            f"gradient_accumulation_steps={parts} cuts Poisson batches, and poisson_sampling=False has none: leave "
            f"one of them out."
        )
    if loss_reduction not in ("mean", "sum", "token_mean"):
        raise InvalidValueError(
            f"loss_reduction={loss_reduction!r}: expected 'mean', 'sum' or 'token_mean'. A share of a loss depends on "
            "the other samples, so that no bound of what one of them changes follows."
        )
    module, size = unwrapped(model), check_loader(loader, poisson_sampling, world_size)
    rule = FlatNormClipper(1.0 if max_grad_norm is None else max_grad_norm) if norm_clipper is None else norm_clipper
    refuse_local_thresholds(rule, world_size)
    parameters = _check_parameters(module, optimizer)
    refuse_running_statistics(module)

    batch_size = min(loader.batch_size * world_size * (parts or 1), size)  # type: ignore[operator]
    key = from_first_rank(key_from(seed, "sampling"), group, parameters[0].device)
    noise = GaussianNoise(seed, secure=secure)
    batches = None
    if poisson_sampling:
        batches = PoissonBatches(size, batch_size / size, seed=seed, rank=rank, world_size=world_size, key=key)
    rate, of_epoch = (1.0, 1) if batches is None else (batches.sample_rate, batches.steps)
    multiplier, planned = _noise_multiplier(
        noise_multiplier, target_epsilon, target_delta, rate, steps if epochs is None else epochs * of_epoch, accountant
    )
    of_gradients = multiplier
    if isinstance(rule, QuantileNormClipper):
        if secure and rule.generator is not None:
            raise InvalidValueError(
                "secure=True with a QuantileNormClipper that has a generator: make it without one, then the noise on "
                "its count comes from the operating system."
            )
        rule.expected_batch_size = batch_size
        of_gradients = rule.noise_multiplier_for_gradients(multiplier)
    _check_delta(target_delta, size)
    divisor = 1.0 if loss_reduction == "sum" else float(batch_size)
    terms = Terms(multiplier, of_gradients, rate, divisor, target_delta, planned, target_epsilon)

    ledger = Accountant(accountant)
    waits = world_size > 1 and is_sharded(parameters[0])  # its forward waits for that of all other processes
    stand_in = waits or parts is not None
    with ExitStack() as attached:  # what fails leaves model and optimizer as they were
        restore = attached.callback(stop_synchronizing(model))
        clipper = PerSampleGradientClipper(module, rule, batch_first, loss_reduction, mode=mode, scaler=scaler)
        attached.callback(clipper.detach)
        clipper.refuse_ambiguous_losses()
        private = PrivateTraining(
            clipper, optimizer, terms, ledger, noise, batches, group, restore, for_trainer=parts is not None
        )
        attached.callback(private.detach)
        private.loader = PrivateLoader(loader, batches, max_physical_batch_size, stand_in, private._hand_out, parts)
        attached.pop_all()
    return private


def _refuse_both(what: str, **given: Any) -> None:
    """Check that at most one of two arguments was given.

    Raises:
        InvalidValueError: If both were.
    """
    if None not in given.values():
        both = " and ".join([f"{name}={value!r}" for name, value in given.items()])
        raise InvalidValueError(f"{both} both say {what}: give one of them.")


def _check_parameters(module: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    own = {id(parameter) for parameter in module.parameters()}
    others = [tuple(p.shape) for p in parameters_of(optimizer) if p.requires_grad and id(p) not in own]
    if others:
        raise InvalidValueError(
            f"the optimizer has {len(others)} parameters, of shapes {others[:3]}, that are not the model's: their "
            f"gradients would be neither clipped nor noised. Make one model that holds all that is trained."
        )
    return list(module.parameters())


def _noise_multiplier(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float,
    rate: float,
    planned: int | None,
    accountant: AccountantName,
) -> tuple[float, int | None]:
    """Return the noise multiplier, and the number of steps after which the target is spent."""
    if (noise_multiplier is None) == (target_epsilon is None):
        raise InvalidValueError(
            f"noise_multiplier={noise_multiplier}, target_epsilon={target_epsilon}: expected exactly one of them."
        )
    if noise_multiplier is not None:
        return check_number("noise_multiplier", noise_multiplier, "a finite number >= 0"), None
    if planned is None:
        raise InvalidValueError("target_epsilon needs epochs=... or steps=..., to know how many steps share it.")
    assert target_epsilon is not None
    found = noise_multiplier_for(target_epsilon, target_delta, rate, planned, accountant)
    return found, planned if math.isfinite(target_epsilon) else None


def _check_delta(target_delta: float, size: int) -> None:
    delta = check_number("target_delta", target_delta, "a probability above 0 and below 1")
    if delta >= 1 / size:
        warnings.warn(
            f"target_delta={delta} is not below 1 / {size} samples: publishing one sample whole would be allowed.",
            stacklevel=3,
        )

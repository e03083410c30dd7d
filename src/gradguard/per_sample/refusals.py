"""Refusals of modules, options, optimizer steps and stale gradients that would make per-sample clipping wrong."""

import traceback
import warnings
import weakref
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.distributed.placements import is_sharded
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.grad_scaler import notice_scaled_losses
from gradguard.optimizer_hooks import EveryStep
from gradguard.per_sample.call_arguments import Slot
from gradguard.per_sample.clipping_rule import NormClipper
from gradguard.per_sample.norm_clippers import QuantileNormClipper
from gradguard.torch_private import batch_norms, parameter_slots

_OWN = AssertionError | AttributeError | LookupError | NameError | TypeError
"""Exceptions that a mistake in gradguard's own code raises; torch's own errors are mostly `RuntimeError`."""


OWN_GENERATOR = (
    "Does it draw from a generator of its own, or take the next of some values (numpy.random.default_rng, "
    "random.Random, itertools.cycle)? Draw with torch.rand, for all samples at once."
)
"""A question about numbers that differ between two runs, because the clipper cannot set their source back."""


KEEPS_STATE = (
    "Does the module keep its state from call to call, as self.h of a recurrent layer? Pass the state as an argument, "
    "and return the new one."
)


def rows_are_chosen(module: nn.Module, function: str) -> str:
    """Return the refusal of a module that chooses or orders rows of samples by values, by ``function``."""
    return (
        f"{type(module).__name__} chooses or orders rows of samples by values ({function}), so the sample that a row "
        "of a layer belongs to changes from batch to batch. Keep all rows in their places: x * mask[..., None] in "
        "place of x[mask]."
    )


def own_failure(error: BaseException) -> str:
    """Warn if an error is gradguard's own mistake rather than the module's, and return a description of it.

    Args:
        error: The error that ended a trial run of a module.

    Returns:
        The failure and its file and line; "" if the error came from the module or from a torch function.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, _OWN) or not frames:
        return ""
    frame, line = frames[-1]
    place = Path(frame.f_code.co_filename)
    if _PACKAGE not in place.parents or "func" in frame.f_locals:  # `func`: a torch function called for the module
        return ""
    words = (
        f"gradguard itself failed, not the module: {type(error).__name__} ({error}) in "
        f"{place.relative_to(_PACKAGE.parent)}, line {line}. Please report it."
    )
    warnings.warn(f"{words} Where possible, samples run one by one instead, which is exact but slower.", stacklevel=2)
    return words


_PACKAGE = Path(__file__).parents[1]
_followed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules that some clipper follows."""


def follow(module: nn.Module) -> Callable[[], None]:
    """Record that a clipper follows ``module``; return a function that removes the record."""
    modules = list(module.modules())
    _followed.update(modules)
    return lambda: _followed.difference_update(modules)


def check_options(norm_clipper: Any, batch_first: Any, loss_reduction: Any, mode: Any, scaler: Any, check: Any) -> None:
    """Check the options of a clipper.

    Raises:
        InvalidTypeError: If an option has the wrong type.
        InvalidValueError: If ``loss_reduction`` or ``mode`` is unknown, or ``check=False`` does not fit the reduction.
    """
    kinds: tuple[tuple[str, Any, Any, str], ...] = (
        ("norm_clipper", norm_clipper, NormClipper, "a NormClipper such as gg.FlatNormClipper(1.0)"),
        ("batch_first", batch_first, bool, "True or False"),
        ("check", check, bool, "True or False"),
        ("scaler", scaler, torch.amp.GradScaler | None, "a torch.amp.GradScaler"),
    )
    for name, value, kind, expected in kinds:
        if not isinstance(value, kind):
            raise InvalidTypeError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}.")
    for name, value, words in (
        ("loss_reduction", loss_reduction, ("mean", "sum", "token_mean", "share")),
        ("mode", mode, ("fast", "exact")),
    ):
        if value not in words:
            raise InvalidValueError(f"{name}={value!r}: expected {' or '.join(map(repr, words))}.")
    if loss_reduction in ("token_mean", "share") and not check:
        raise InvalidValueError(
            f"loss_reduction={loss_reduction!r} with check=False: expected check=True, which reads the numbers of rows "
            "from the loss's graph, and verifies that shares add up to the plain gradient."
        )


def refuse_unsupported(module: nn.Module) -> None:
    """Check that a clipper can follow ``module`` and every module in it.

    Raises:
        InvalidTypeError: If ``module`` is not a `torch.nn.Module`.
        InvalidValueError: If no parameter requires grad, or a module in it has a clipper already.
        UnsupportedGradientError: If ``module``, or a module in it, cannot be followed.
    """
    if not isinstance(module, nn.Module):
        raise InvalidTypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidValueError("module has no parameter that requires grad, so it has nothing to clip.")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedGradientError(f"{name} has no shape yet: call the module once, then make the clipper.")
    for name, submodule in module.named_modules():
        if submodule in _followed:
            raise InvalidValueError(
                f"{name or 'the module'} has a clipper already, and both would clip: call detach() on the other one."
            )
        where = f"module {name!r}" if name else "the module"
        if submodule is not module and isinstance(submodule, DistributedDataParallel):
            raise UnsupportedGradientError(
                f"{where} is a DistributedDataParallel inside the module, and would all-reduce gradients by itself: "
                "wrap the compiled module, DistributedDataParallel(torch.compile(model)), or the whole module."
            )
        if isinstance(submodule, torch.jit.ScriptModule | nn.DataParallel):
            raise UnsupportedGradientError(
                f"{where} is a {type(submodule).__name__}, whose layers cannot be followed. Pass the plain module."
            )
    refuse_batch_norm(module)


def refuse_new_parameters(module: nn.Module, known: Container[Slot]) -> None:
    """Check that no parameter was added after the clipper was made.

    Args:
        module: The outermost module.
        known: The modules and attributes that held parameters when the clipper was made.

    Raises:
        UnsupportedGradientError: If a parameter was added since: its gradient would not be clipped.
    """
    for prefix, layer in module.named_modules():
        for slot, parameter in parameter_slots(layer).items():
            if parameter is not None and (layer, slot) not in known:
                raise UnsupportedGradientError(
                    f"parameter {prefix and prefix + '.'}{slot} was added after the clipper was made, so its gradient "
                    "would not be clipped: call clipper.detach() and make a new PerSampleGradientClipper."
                )


def refuse_sharded_since(module: nn.Module) -> None:
    """Check that ``fully_shard`` was not applied to the module after the clipper was made.

    Raises:
        UnsupportedGradientError: If it was: the clipper would not add up the samples of other processes.
    """
    if any(map(is_fully_sharded, module.modules())):
        raise UnsupportedGradientError(
            "fully_shard was applied to the module after the clipper was made, so the clipper would not add up the "
            "samples of other processes: call clipper.detach() and make a new PerSampleGradientClipper."
        )


def refuse_stand_ins(used: Mapping[str, Tensor], held: Mapping[str, Tensor] | None = None) -> None:
    """Check that a call used the module's own parameters.

    Args:
        used: The tensors that the module held during the call, by parameter name.
        held: The module's own parameters, if they are known. Without them, every `torch.nn.Parameter` is accepted.

    Raises:
        UnsupportedGradientError: If the call used another tensor, which would not get the gradient.
    """
    for name, tensor in used.items():
        if not isinstance(tensor, nn.Parameter) or (held is not None and tensor is not held[name]):
            raise UnsupportedGradientError(
                f"the module was called with another tensor in the place of its parameter {name}, as "
                "torch.func.functional_call does. Per-sample gradients are computed for the module's own parameters "
                "only. Pass the parameters themselves, or compute the weight inside the module "
                "(torch.nn.utils.parametrize)."
            )


def refuse_gathered(parameters: Mapping[str, Tensor]) -> None:
    """Check that the parameters of a sharded model are shards again after backward, as its optimizer holds them.

    Raises:
        UnsupportedGradientError: If a parameter is still gathered.
    """
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise UnsupportedGradientError(
                f"{name} is still gathered after the backward, so its gradient would not reach the optimizer, which "
                "holds shards: leave set_reshard_after_backward(True), or call reshard() on its layer before "
                "pre_step()."
            )


def refuse_local_thresholds(norm_clipper: NormClipper, processes: int) -> None:
    """Check that the rule's threshold does not adapt to the samples of one process alone.

    Raises:
        UnsupportedGradientError: If it does, and there are several processes.
    """
    if processes > 1 and isinstance(norm_clipper, QuantileNormClipper):
        raise UnsupportedGradientError(
            "QuantileNormClipper counts the samples of one process only, so thresholds would differ between "
            f"{processes} processes: use FlatNormClipper or AutoNormClipper."
        )


def refuse_stale_gradients(parameters: Mapping[str, Tensor], assigned: Mapping[str, Callable[[], object]]) -> None:
    """Check that ``pre_step`` would not overwrite a gradient that the clipper did not write.

    Args:
        parameters: The trained parameters, by name.
        assigned: Weak references to the gradients of the last ``pre_step``, by parameter name.

    Raises:
        InvalidValueError: If a ``.grad`` is not zero and was not written by the clipper.
    """
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is not None and (name not in assigned or grad is not assigned[name]()) and bool(grad.any()):
            raise InvalidValueError(
                f"{name}.grad holds a gradient that was not clipped, from a backward that the clipper did not "
                "follow. Call optimizer.zero_grad(), then pre_step() again; the accumulated sums are kept."
            )


def refuse_batch_norm(module: nn.Module) -> None:
    """Check that no batch normalization in ``module`` mixes samples.

    Raises:
        UnsupportedGradientError: If a batch normalization is in training mode, or has no running statistics.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, batch_norms()) and (layer.training or layer.running_mean is None):
            other = "freeze its statistics with .eval()"
            if layer.running_mean is None:
                other = "make it with track_running_stats=True: without running statistics, .eval() changes nothing"
            raise UnsupportedGradientError(
                f"{name or 'the module'} is a {type(layer).__name__}: it normalizes each sample by the others, so no "
                "gradient belongs to one sample. Use torch.nn.GroupNorm (or LayerNorm, InstanceNorm) in its place, "
                f"or {other}."
            )


_watching: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Clippers that refuse an optimizer step while their clipped mini-batches were not taken."""

_removals: list[Callable[[], None]] = []
"""Functions that remove the hooks on all optimizers and GradScalers; empty while `_watching` is empty."""


def watch_steps_and_scalers(clipper: Any) -> Callable[[], None]:
    """Let ``clipper`` refuse early optimizer steps and notice GradScalers, without keeping it alive.

    Returns:
        A function that ends this.
    """
    if not _removals:
        _removals.extend([EveryStep(_before, lambda optimizer: None).remove, notice_scaled_losses()])
    _watching.add(clipper)

    def end() -> None:
        _watching.discard(clipper)
        while _removals and not _watching:
            _removals.pop()()

    return end


def _before(optimizer: Optimizer, evaluations: int) -> None:
    """Let each clipper refuse the step; with a closure, after each evaluation, since it may call `pre_step`."""
    del evaluations
    for clipper in list(_watching):
        clipper.refuse_early_step(optimizer)


KEEPS = (
    "the forward keeps values from call to call where they cannot be put back (a global variable, a closure, an "
    "object, an array, a module in a list), so what a sample gives depends on the samples that came before it or with "
    "it. Let the forward use a fixed number instead, or only note what it saw. What it keeps may now be made of "
    "samples that the clipper ran by themselves: set it anew. Nothing was clipped."
)
"""The end of a refusal of state that a forward carries from call to call."""


class CarriedValuesError(UnsupportedGradientError):
    """Raised if a module uses what an earlier call has made of its samples. To run it again would prove nothing."""


def refuse_carried(module: nn.Module, returns_carried: bool, stored: Mapping[str, int] | None = None) -> None:
    """Refuse a module whose forward uses what an earlier one made of its samples.

    Args:
        module: The outermost module.
        returns_carried: Whether it returns what it made of a tensor of an earlier forward.
        stored: The functions that the forward called on values of its samples, and did not call when it ran again.

    Raises:
        CarriedValuesError: If it does.
    """
    name = type(module).__name__
    if returns_carried:
        raise CarriedValuesError(f"{name} uses what an earlier call has made of its samples: {KEEPS}")
    if stored:
        raise CarriedValuesError(
            f"{name} called {', '.join(stored)} on values of its samples, and did not when it ran again with the same "
            f"samples: {KEEPS}"
        )

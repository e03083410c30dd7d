"""Recognise trainers' optimizers that cannot hold a Guard, by the name of their module; no trainer is imported."""

from gradguard.errors import InvalidTypeError

_OWNED = ("deepspeed.runtime", "accelerate.utils.deepspeed")

_SERVED = {  # the start of a wrapper's module name, and the call that guards the optimizer inside
    "accelerate.": "gradguard.integrations.accelerate.guard(accelerator, optimizer, clipper) does that",
    "lightning.fabric": "gradguard.integrations.lightning.guard_fabric(fabric, module, optimizer, clipper) does that",
    "lightning.pytorch": "Trainer(callbacks=[gradguard.integrations.lightning.GradGuardCallback(clipper)]) does that",
}


def refuse_owned(optimizer: object) -> None:
    """Raise if ``optimizer`` is part of an engine that owns the gradients.

    Raises:
        InvalidTypeError: If it is.
    """
    if any(origin.startswith(_OWNED) for origin in _origins(optimizer)):
        raise InvalidTypeError(
            f"optimizer is {type(optimizer).__name__}, part of a DeepSpeed engine, which owns the gradients: expected "
            'no Guard. Set "gradient_clipping" in its configuration; '
            "gradguard.integrations.deepspeed.last_clip(engine) reads it."
        )


def what_serves(wrapper: object) -> str | None:
    """Return the call, in words, that guards the optimizer inside ``wrapper``; None if none is known."""
    origins = _origins(wrapper)
    return next((_SERVED[start] for start in _SERVED for origin in origins if origin.startswith(start)), None)


def _origins(optimizer: object) -> list[str]:
    return [kind.__module__ for kind in type(optimizer).__mro__]

"""Tells which optimizers cancel a factor on all gradients: a constant factor, as Adam does, or any, as Rprop does."""

from gradguard.monitoring.judge.numbers import only
from gradguard.monitoring.record.file import Record

_SCALE_FREE = ("adam", "lion", "adafactor", "rmsprop", "adagrad", "adadelta", "muon", "sign", "rprop", "soap")


def is_scale_free(record: Record) -> bool | None:
    """Return whether the optimizer cancels a constant factor on all gradients, as Adam does and SGD does not.

    Args:
        record: The record of a run.

    Returns:
        True or False; None where the record names no optimizer or the run mixes both kinds.
    """
    optimizers: list[str] = record.meta.get("optimizers", [])
    return only({any(word in str(name).lower() for word in _SCALE_FREE) for name in optimizers})


def reads_signs_alone(record: Record) -> bool:
    """Return whether the optimizer reads only the signs of gradients and stores no gradient, so a clip changes no step.

    The name of the class decides. Measured updates could not distinguish it from Lion, whose momentum a clip changes.

    Args:
        record: The record of a run.

    Returns:
        Whether this holds for all optimizers of the run; False where the record names none.
    """
    optimizers: list[str] = record.meta.get("optimizers", [])
    return bool(optimizers) and all(str(name).lower() == "rprop" for name in optimizers)

"""Which optimizers cancel a factor on all gradients: a constant one, as Adam, or any one, as Rprop."""

from gradguard.monitoring.judge.numbers import only
from gradguard.monitoring.record.file import Record

_SCALE_FREE = ("adam", "lion", "adafactor", "rmsprop", "adagrad", "adadelta", "muon", "sign", "rprop", "soap")


def is_scale_free(record: Record) -> bool | None:
    """Whether the optimizer cancels a constant factor on all gradients, as Adam does and SGD does not.

    Args:
        record: The record of a run.

    Returns:
        True, False, or None where the record does not say or the run mixes both kinds.
    """
    optimizers: list[str] = record.meta.get("optimizers", [])
    return only({any(word in str(name).lower() for word in _SCALE_FREE) for name in optimizers})


def reads_signs_alone(record: Record) -> bool:
    """Whether a clip changes no step of the optimizer, which reads the signs of gradients and keeps none of them.

    Its class tells: measured updates do not tell it from Lion's, whose momentum a clip changes.

    Args:
        record: The record of a run.

    Returns:
        Whether all of its optimizers are such; False where the record does not say.
    """
    optimizers: list[str] = record.meta.get("optimizers", [])
    return bool(optimizers) and all(str(name).lower() == "rprop" for name in optimizers)

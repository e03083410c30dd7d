"""Which optimizers cancel a constant factor on all gradients, as Adam does and SGD does not."""

from typing import Any

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
    optimizers: list[Any] = record.meta.get("optimizers") or []
    answers = {cancels_scale(str(name)) for name in optimizers}
    return only(answers)


def cancels_scale(optimizer: str) -> bool:
    """Whether an optimizer's update stays nearly the same when all gradients are multiplied by a constant.

    Args:
        optimizer: The name of its class.

    Returns:
        True for Adam and its like, False for SGD and for what is not known.

    Example:
        >>> [cancels_scale(name) for name in ("AdamW", "SGD")]
        [True, False]
    """
    return any(word in optimizer.lower() for word in _SCALE_FREE)

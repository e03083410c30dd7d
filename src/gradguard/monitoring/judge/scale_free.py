"""Which optimizers cancel a constant factor on all gradients, as Adam does and SGD does not."""

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

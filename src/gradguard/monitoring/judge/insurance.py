"""A threshold that does not bind in calm times, and bounds the next spike."""

from gradguard.monitoring.judge.norm_statistics import drift_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import usable_norms


def insurance(record: Record) -> float | None:
    """Return the norm at which a clip costs a healthy run nothing and bounds its next spike.

    Args:
        record: The record of a healthy run.

    Returns:
        A threshold of two digits; None where norms drift so far that a constant would bind at one end.
    """
    norms = sorted(usable_norms(record))
    if not norms or drift_of(record) is not None:
        return None
    return float(f"{2 * norms[min(int(0.99 * len(norms)), len(norms) - 1)]:.1e}")

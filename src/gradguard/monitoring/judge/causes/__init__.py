"""The causes that a run can suffer from: the signs by which each shows, and the table that names and ranks them."""

from gradguard.monitoring.judge.causes.cause_table import CAUSES, EXCLUDES, KEYS, causes_of

__all__ = ["CAUSES", "EXCLUDES", "KEYS", "causes_of"]

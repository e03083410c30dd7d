"""The causes of a sick run: the functions that search for each, and the table that names and ranks them."""

from gradguard.monitoring.judge.causes.cause_table import CAUSES, EXCLUDES, KEYS, causes_of

__all__ = ["CAUSES", "EXCLUDES", "KEYS", "causes_of"]

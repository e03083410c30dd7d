"""Conversion of a report's values to JSON."""

import math
from typing import Any


def jsonable(value: Any) -> Any:
    """Return ``value`` with tuples as lists and non-finite floats as None."""
    if isinstance(value, dict):
        return {key: jsonable(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return list(map(jsonable, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value

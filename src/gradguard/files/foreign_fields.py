"""Rules for the types and bounds of fields in files of unknown origin; a reader has a table with one rule a field.

A rule takes the decoded JSON value of a field, and returns the value to keep or raises ValueError.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[Any], Any]

LARGEST = sys.float_info.max
MOST = 2**53
"""The least whole number from which on floats cannot represent every whole number."""


def number(low: float = -LARGEST, high: float = LARGEST, *, null: bool = False) -> Rule:
    """Return the rule of a number from ``low`` to ``high``.

    A whole number of `MOST` or more becomes a float, so that arithmetic with it overflows as floats do.

    Args:
        low: The least number.
        high: The largest.
        null: Whether None is accepted too.

    Example:
        >>> rule = number(0, null=True)
        >>> rule(0.5), rule(3), rule(None)
        (0.5, 3, None)
        >>> rule(-1)
        Traceback (most recent call last):
        ValueError: expected a number from 0 to 1.7976931348623157e+308
    """

    def check(value: Any) -> Any:
        if type(value) is float and low <= value <= high:
            return value
        if type(value) is int and low <= value <= high:
            return value if -MOST < value < MOST else float(value)
        if value is None and null:
            return None
        raise ValueError(f"expected a number from {low} to {high}")

    return check


def whole(low: int = 0, high: int = MOST - 1) -> Rule:
    """Return the rule of a whole number from ``low`` to ``high``; a bool is refused.

    Args:
        low: The least number.
        high: The largest.
    """

    def check(value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise ValueError(f"expected a whole number from {low} to {high}")

    return check


def of_type(kind: type) -> Rule:
    """Return the rule of a value of exactly this type: a bool is not an int.

    Args:
        kind: The type.
    """

    def check(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise ValueError(f"expected a value of type {kind.__name__}")

    return check


text, truth, _list, _object = of_type(str), of_type(bool), of_type(list), of_type(dict)


def list_of(rule: Rule) -> Rule:
    """Return the rule of a list, each item of which follows ``rule``.

    Args:
        rule: The rule of an item.
    """
    return lambda value: [rule(item) for item in _list(value)]


def row_of(*rules: Rule) -> Rule:
    """Return the rule of a list with one item for each of ``rules``.

    Args:
        *rules: The rule of each item.
    """
    return lambda value: [rule(item) for rule, item in zip(rules, _list(value), strict=True)]


def mapping_of(rule: Rule, name: Rule = text) -> Rule:
    """Return the rule of an object, each value of which follows ``rule``.

    Args:
        rule: The rule of a value.
        name: The rule of a key.
    """
    return lambda value: {name(key): rule(one) for key, one in _object(value).items()}


def object_of(table: Mapping[str, Rule]) -> Rule:
    """Return the rule of an object, each field of which has a rule of its own; an unknown field raises KeyError.

    Args:
        table: The rule of each field that the object may have.
    """
    return lambda value: {key: table[key](one) for key, one in _object(value).items()}

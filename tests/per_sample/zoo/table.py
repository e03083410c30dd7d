"""Every case of the zoo by name, and what is expected of it."""

from per_sample.zoo import architectures, plain, traits
from per_sample.zoo.case import ZooCase
from per_sample.zoo.expected import EXPECTED

CASES: dict[str, ZooCase] = {**plain.CASES, **traits.CASES, **architectures.CASES, **architectures.LABELLED}


def expectation(name: str, mode: str) -> str:
    """The kind of outcome, and after a colon words of it: "exact", or "refused: GroupNorm"."""
    return EXPECTED.get(name, {}).get(mode, "exact")


def as_expected(kind: str, words: str, expected: str) -> bool:
    """Whether an outcome is what is expected."""
    expected_kind, _, expected_words = expected.partition(": ")
    return kind == expected_kind and expected_words in words

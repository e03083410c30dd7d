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


MIXED = {
    **dict.fromkeys(
        (
            "batch norm", "batch norm, then in place", "+= after batch norm", "cvt", "efficientnet", "mobilevit",
            "regnet", "resnet", "swiftformer", "wav2vec2-conformer",
        ),
        "a batch norm in train mode normalizes each sample by the others",
    ),
    "capacity over the batch": "the samples that are let through are chosen among all",
    "experts choose": "each expert chooses among the samples",
    "mixed up": "each sample gets a part of another",
    "a running mean": "what is subtracted in train mode is a mean over samples",
    "attention over the batch": "samples look at one another",
    "centred over the batch": "the mean over samples is subtracted",
    "two towers": "the loss is of all pairs",
    "contrastive": "the loss is of all pairs",
    "scores of all pairs": "the loss is of all pairs",
    "clip, loss over pairs": "the loss is of all pairs",
    "load balance beside the output": "the loss has a term of the batch as a whole",
    "nllb-moe": "its router counts tokens of the whole batch against a capacity",
}  # fmt: skip
"""Models whose loss is no mean over samples in one of the modes, and why: to refuse them is right."""


def share_of_exact(mode: str) -> float:
    """The share of rows that are exact, of those whose loss is a mean over samples in ``mode``."""
    told = {name: expectation(name, mode) for name, case in CASES.items() if mode in case.modes}
    means = [words == "exact" for name, words in told.items() if words == "exact" or name not in MIXED]
    return sum(means) / len(means)

"""Numbers and lists of names in sentences: a long list is shortened, and a plural follows its number."""

from collections.abc import Iterable, Sequence


def listed(words: Sequence[object], most: int) -> str:
    """Return the first ``most`` words as a comma-separated list, and the number of those left out.

    Example:
        >>> listed("abcde", 2), listed("ab", 2)
        ('a, b and 3 more', 'a, b')
    """
    more = len(words) - most
    return ", ".join(map(str, words[:most])) + (f" and {more:,} more" if more > 0 else "")


def counted(number: float, one: str, several: str = "") -> str:
    """Return a number and its noun, singular or plural.

    Args:
        number: How many.
        one: The singular.
        several: The plural; by default the singular with an s.

    Example:
        >>> counted(1, "step"), counted(1200, "step"), counted(2, "class", "classes")
        ('1 step', '1,200 steps', '2 classes')
    """
    return f"{number:,.0f} {one if number == 1 else several or f'{one}s'}"


def verdict_text(verdict: str, findings: Iterable[object], summary: str, notes: Iterable[str]) -> str:
    """Return a verdict as lines: one for each finding, then the summary, then the notes.

    Args:
        verdict: PASS, FAIL or INCONCLUSIVE.
        findings: The reasons for the verdict.
        summary: How much was checked.
        notes: Remarks that are not faults.

    Example:
        >>> print(verdict_text("FAIL", ["two differ"], "3 tensors", []))
        FAIL          two differ
        FAIL          3 tensors
    """
    lines = [(verdict, finding) for finding in (*findings, summary)] + [("note", note) for note in notes]
    return "\n".join(f"{word:<13} {text}" for word, text in lines)

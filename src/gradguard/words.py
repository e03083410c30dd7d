"""Names and numbers in sentences: of many the first, and how many more; one step, and two steps."""

from collections.abc import Iterable, Sequence


def listed(words: Sequence[object], most: int) -> str:
    """Return the first ``most`` words in one line, and how many more there are.

    Example:
        >>> listed("abcde", 2), listed("ab", 2)
        ('a, b and 3 more', 'a, b')
    """
    more = len(words) - most
    return ", ".join(map(str, words[:most])) + (f" and {more:,} more" if more > 0 else "")


def counted(number: float, one: str, several: str = "") -> str:
    """Return a number of things in words.

    Args:
        number: How many.
        one: The word for one.
        several: The word for several; by default with an s.

    Example:
        >>> counted(1, "step"), counted(1200, "step"), counted(2, "class", "classes")
        ('1 step', '1,200 steps', '2 classes')
    """
    return f"{number:,.0f} {one if number == 1 else several or f'{one}s'}"


def verdict_text(verdict: str, findings: Iterable[object], summary: str, notes: Iterable[str]) -> str:
    """Return a verdict in lines: one for each finding, the summary, and the notes.

    Args:
        verdict: PASS, FAIL or INCONCLUSIVE.
        findings: The reasons.
        summary: How much was looked at.
        notes: Remarks that are no faults.

    Example:
        >>> print(verdict_text("FAIL", ["two differ"], "3 tensors", []))
        FAIL          two differ
        FAIL          3 tensors
    """
    lines = [(verdict, finding) for finding in (*findings, summary)] + [("note", note) for note in notes]
    return "\n".join(f"{word:<13} {text}" for word, text in lines)

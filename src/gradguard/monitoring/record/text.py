"""Text from a record, a path or an exception as a terminal may show it: the one place where it is cleaned."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import IO


def printable(value: object) -> str:
    r"""Return ``value`` as text that cannot move the cursor, colour a terminal or turn the direction of a line.

    What is not printable (control characters, those for bidirectional text, lone surrogates) is written as Python
    writes it.

    Example:
        >>> print(printable("layer\x1b[2J\n0"), printable("größe 模型"))
        layer\x1b[2J\n0 größe 模型
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def on_stderr(message: object) -> None:
    """Print one line on stderr, whatever became of stderr."""
    with suppress(Exception):
        print(f"gradguard: {printable(message)}", file=sys.stderr, flush=True)


@contextmanager
def encodable(file: IO[str]) -> Iterator[None]:
    """Let a question mark stand for a character that the output has not, rather than an exception."""
    if not isinstance(file, TextIOWrapper):
        yield
        return
    before = file.errors
    file.reconfigure(errors="replace")
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # it flushes, and we are on the way out
            file.reconfigure(errors=before)


def drop_output() -> None:
    """Send what is still buffered nowhere, or Python would complain about it when it ends."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)

"""Clean text from records, paths and exceptions for a terminal; only this module does so."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import IO


def printable(value: object) -> str:
    r"""Return ``value`` as text that cannot move the cursor, colour a terminal or change the direction of a line.

    Unprintable characters (control characters, bidirectional marks, lone surrogates) become Python's escapes.

    Example:
        >>> print(printable("layer\x1b[2J\n0"), printable("größe 模型"))
        layer\x1b[2J\n0 größe 模型
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def on_stderr(message: object) -> None:
    """Print one line on stderr; ignore errors, for example of a closed stderr."""
    with suppress(Exception):
        print(f"gradguard: {printable(message)}", file=sys.stderr, flush=True)


@contextmanager
def encodable(file: IO[str]) -> Iterator[None]:
    """Replace characters that the output cannot encode by question marks inside the block, instead of raising."""
    if not isinstance(file, TextIOWrapper):
        yield
        return
    before = file.errors
    file.reconfigure(errors="replace")
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # `reconfigure` flushes, and the program is about to exit
            file.reconfigure(errors=before)


def drop_output() -> None:
    """Redirect stdout to the null device: Python would report an error if it could not flush the buffer at exit."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)

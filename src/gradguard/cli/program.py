"""The command line of a user's script or module, behind our own options: the arguments of `run` and `tune`."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradguard.errors import CommandError

_TAKES_VALUE = {
    "--out",
    "--every",
    "--clip",
    "--steps",
    "--seed",
    "--seeds",
    "--rule",
    "--record",
    "--metric",
    "--save-gradients",
    "--perturbed",
    "--at",
    "--launch",
}


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A program and its arguments, as they were typed.

    Attributes:
        words: The script or the module, then what follows it; empty where there is none.
        is_module: Whether it came behind ``-m``.
    """

    words: list[str]
    is_module: bool

    @property
    def name(self) -> str:
        """Return the name of its runs: the script without its suffix, or the whole name of the module."""
        return self.words[0] if self.is_module else Path(self.words[0]).stem

    @property
    def typed(self) -> list[str]:
        """The words as Python takes them, with ``-m`` before a module."""
        return [*["-m"] * self.is_module, *self.words]


def cut(argv: Sequence[str]) -> tuple[list[str], ProgramLine]:
    """Cut a command line into the command with our own options, and the program's.

    Args:
        argv: The command, its options, the program and its arguments.

    Returns:
        The first part as it is, and the second.

    Example:
        >>> cut(["run", "--every", "5", "-m", "pkg.train", "--lr", "0.1"])
        (['run', '--every', '5'], ProgramLine(words=['pkg.train', '--lr', '0.1'], is_module=True))
    """
    i = 1
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":  # which to Python is a script on its input
        if argv[i] in ("-m", "--"):
            return list(argv[:i]), ProgramLine(list(argv[i + 1 :]), argv[i] == "-m")
        i += 2 if argv[i] in _TAKES_VALUE else 1
    return list(argv[:i]), ProgramLine(list(argv[i:]), False)


def first_given(options: argparse.Namespace, *names: str) -> str:
    """Return the first of the options ``names`` that was typed, such as ``--no-report``; "" if none was."""
    given = [name for name in names if (value := getattr(options, name)) is not None and value is not False]  # 0 is
    return f"--{given[0].replace('_', '-')}" if given else ""


RECORDING = ("out", "force", "argv", "every", "clip", "resilient", "no_report")
"""The options of `run` that say what is recorded and done, and how."""


def add_number(
    parser: argparse.ArgumentParser, option: str, expected: str, low: int, high: float = math.inf, **how: Any
) -> None:
    """Add an option that takes a whole number from ``low`` to ``high``, ``expected`` in words."""

    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise CommandError(f"{option} {value}: expected {expected}.")
        return value

    number.__name__ = "int"  # as argparse calls what is none
    parser.add_argument(option, type=number, **how)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Let the usage of a command end in a program; `cut` has taken its words away before the rest is parsed."""
    parser.add_argument("program", nargs="*", metavar="script.py", help="the script, or -m module, and its arguments")


def nothing_to_run(command: str) -> str:
    """Return the error's words for a command without a program."""
    return f"nothing to run. Usage: gradguard {command} [options] (script.py | -m module) [args ...]"

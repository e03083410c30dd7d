"""A command as a table of its options; the command line of a user's script after the options of `run` and `tune`."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradguard.errors import CommandError


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A program and its arguments, as typed.

    Attributes:
        words: The script or the module, then its arguments; empty without a program.
        is_module: Whether it followed ``-m``.
    """

    words: list[str]
    is_module: bool

    @property
    def name(self) -> str:
        """Return the name for its runs: the script without its suffix, or the whole name of the module."""
        return self.words[0] if self.is_module else Path(self.words[0]).stem

    @property
    def typed(self) -> list[str]:
        """The words as Python expects them, with ``-m`` before a module."""
        return [*["-m"] * self.is_module, *self.words]


class Option(NamedTuple):
    """An option or an argument of a command.

    Attributes:
        names: Its names.
        how: Further arguments of `argparse.ArgumentParser.add_argument`, by name.
    """

    names: tuple[str, ...]
    how: dict[str, Any]


def option(names: str, help: str, **how: Any) -> Option:
    """Return an option; ``names`` are separated by spaces."""
    return Option(tuple(names.split()), {"help": help, **how})


def flag(name: str, help: str) -> Option:
    """Return an option without a value."""
    return option(name, help, action="store_true")


def number(
    name: str, help: str, expected: str, low: int, high: float = math.inf, *, metavar: str = "N", **how: Any
) -> Option:
    """Return an option that takes a whole number from ``low`` to ``high``; ``expected`` describes this range."""

    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise CommandError(f"{name} {value}: expected {expected}.")
        return value

    read.__name__ = "int"  # argparse's error message names the type
    return option(name, help, type=read, metavar=metavar, **how)


@dataclass(frozen=True)
class Command:
    """A command of ``gradguard``.

    Attributes:
        name: Its name.
        page: Its page of the documentation, as ``gradguard explain`` prints it.
        call: The function that carries it out and returns the exit code. It takes the parsed options, and the
            `ProgramLine` if the command runs a program.
        help: Its description in one line.
        options: Its options; those of an inner list exclude each other.
        description: The text above its options.
        runs_program: Whether a program follows the options; the program's own options are not parsed.
    """

    name: str
    page: str
    call: Callable[..., int]
    help: str
    options: Sequence[Option | list[Option]] = ()
    description: str | None = None
    runs_program: bool = False

    def add_to(self, commands: Any) -> None:
        """Add the command to the parser's commands."""
        more = f"`gradguard explain {self.page}` is the page on `gradguard {self.name}`."
        parser = commands.add_parser(
            self.name, help=self.help, description=self.description, epilog=more, allow_abbrev=not self.runs_program
        )
        for one in self.options:
            group, options = (parser.add_mutually_exclusive_group(), one) if isinstance(one, list) else (parser, [one])
            for names, how in options:
                group.add_argument(*names, **how)
        if self.runs_program:  # only for the help: `cut` removes the program's words before parsing
            program = "the script, or -m module, and its arguments"
            parser.add_argument("program", nargs="*", metavar="script.py", help=program)

    def cut(self, argv: Sequence[str]) -> tuple[list[str], ProgramLine]:
        """Split a command line into the command with its own options, and the program.

        Args:
            argv: The command, its options, the program and its arguments.

        Returns:
            The command and its options, unchanged, and the program.

        Example:
            >>> from gradguard.cli.run import COMMAND
            >>> COMMAND.cut(["run", "--every", "5", "-m", "pkg.train", "--lr", "0.1"])
            (['run', '--every', '5'], ProgramLine(words=['pkg.train', '--lr', '0.1'], is_module=True))
        """
        with_value = {
            one.names[0] for one in self.options if isinstance(one, Option) and one.how.get("action") != "store_true"
        }
        i = 1
        while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":  # "-" is a script on standard input
            if argv[i] in ("-m", "--"):
                return list(argv[:i]), ProgramLine(list(argv[i + 1 :]), argv[i] == "-m")
            i += 2 if argv[i] in with_value else 1
        return list(argv[:i]), ProgramLine(list(argv[i:]), False)


def first_given(options: argparse.Namespace, *names: str) -> str:
    """Return the first option of ``names`` that was typed, such as ``--no-report``; "" if none was."""
    given = [name for name in names if (value := getattr(options, name)) is not None and value is not False]  # 0 counts
    return f"--{given[0].replace('_', '-')}" if given else ""

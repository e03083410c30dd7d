"""The command line of somebody's script or module, behind our own options: what `run` and `tune` take."""

from collections.abc import Sequence
from dataclasses import dataclass

_TAKES_VALUE = {"--on-finding", "--out", "--every", "--clip", "--steps", "--seed", "--seeds", "--rule", "--record"}


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A program and its arguments, as somebody has typed them.

    Attributes:
        words: The script or the module, then what follows it; empty where there is none.
        is_module: Whether it came behind ``-m``.
    """

    words: list[str]
    is_module: bool

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
    while i < len(argv) and argv[i].startswith("-"):
        if argv[i] in ("-m", "--"):
            return list(argv[:i]), ProgramLine(list(argv[i + 1 :]), argv[i] == "-m")
        i += 2 if argv[i] in _TAKES_VALUE else 1
    return list(argv[:i]), ProgramLine(list(argv[i:]), False)

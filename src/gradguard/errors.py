"""Every exception that gradguard raises, in one place.

An error message says what was expected, what was given, and what to type instead. Each class is also the built-in
exception that a PyTorch user would expect to catch, so ``except ValueError`` keeps working. Below the message, a
traceback shows the page of the documentation.
"""

import sys

__all__ = [
    "DistributedError",
    "FreedGraphError",
    "GradguardError",
    "GradientCheckError",
    "InvalidTypeError",
    "InvalidValueError",
    "MissingPackageError",
    "NonFiniteGradientError",
    "ParityError",
    "RecordError",
    "SpikeError",
    "UnsupportedGradientError",
]


_PAGES = {
    "audit": "norm_audit",
    "backward_clip": "error_clip",
    "check": "gradient_check",
    "clip": "clippers",
    "distributed": "distributed",
    "integrations": "trainers/index",
    "monitoring": "watching",
    "parity": "parity",
    "per_sample": "per_sample_support",
    "private": "private_training",
    "resilience": "resilience",
    "spikes": "resilience",
    "testing": "gradient_check",
}
"""The page on what each folder does, as `gradguard explain` prints it."""

_TRAINERS = ("accelerate", "composer", "deepspeed", "keras", "lightning", "timm", "torchtitan", "transformers")
"""Files of integrations/ that have a page of their own."""


class GradguardError(Exception):
    """Base class of every error that gradguard raises on purpose.

    A note (PEP 678) names the page on what raised it. Tracebacks show it; ``str(error)`` is the message alone.

    Example:
        >>> import gradguard as gg
        >>> try:
        ...     gg.ClipByNorm(-1.0)
        ... except gg.errors.InvalidValueError as error:
        ...     print(error.__notes__)
        ['`gradguard explain clippers` is the page on this.']
    """

    page: str | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"`gradguard explain {self.page or _page_of_caller()}` is the page on this.")


def _page_of_caller() -> str:
    """Return the page of the innermost folder that has one, or of the trainer that called it, or of all errors."""
    page = None
    frame = sys._getframe(2)
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        folder, _, module = rest.partition(".")
        if package == "gradguard" and folder == "integrations" and module in _TRAINERS:
            return f"trainers/{module}"
        if package == "gradguard" and folder in _PAGES:
            page = page or _PAGES[folder]
            if folder != "integrations":
                return page
        frame = frame.f_back
    return page or "errors"


class InvalidValueError(GradguardError, ValueError):
    """An argument has the right type and a value that is not allowed, such as a negative threshold."""


class InvalidTypeError(GradguardError, TypeError):
    """An argument is of a type that the call cannot take."""


class NonFiniteGradientError(GradguardError, RuntimeError):
    """A gradient holds NaN or infinity and the caller asked for an error; no gradient was changed."""

    page = "nan"


class UnsupportedGradientError(GradguardError, NotImplementedError):
    """The result for this kind of gradient would be wrong, so the operation refuses."""


class DistributedError(GradguardError, RuntimeError):
    """Processes that must act together did not: one is missing, or called with something else."""


class FreedGraphError(GradguardError, RuntimeError):
    """A backward went through a graph whose values an earlier backward has freed."""


class GradientCheckError(GradguardError, AssertionError):
    """A gradient is not the derivative that it should be, or the check was inconclusive and that was not allowed."""


class ParityError(GradguardError, AssertionError):
    """Two runs do not have the same gradients, or the comparison was inconclusive and that was not allowed."""


class MissingPackageError(GradguardError, ImportError):
    """A package that this part of gradguard needs is not installed."""


class UnsupportedVersionError(GradguardError, ImportError):
    """A package is installed in a version that this part of gradguard does not know."""


class RecordError(GradguardError):
    """A record of a run is missing, empty or unreadable."""


class SpikeError(GradguardError, RuntimeError):
    """A run spikes again and again, and going back to older weights does not cure it."""


class CommandError(GradguardError):
    """The command line cannot be carried out; the message says what to type instead."""


def refuse(kind: type[GradguardError], *cases: tuple[object, str]) -> None:
    """Go through a table of the cases that cannot be served.

    Args:
        kind: The kind of error.
        *cases: For each whether it holds, and the words of the error.

    Raises:
        GradguardError: If a case holds: an error of ``kind`` with the words of the first one.

    Example:
        >>> try:
        ...     refuse(InvalidValueError, (False, "the first is not the case"), (True, "the second is."))
        ... except InvalidValueError as error:
        ...     print(error)
        the second is.
    """
    for holds, words in cases:
        if holds:
            raise kind(words)

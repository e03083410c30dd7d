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
"""The documentation page about each folder; `gradguard explain PAGE` prints it."""

_TRAINERS = ("accelerate", "composer", "deepspeed", "keras", "lightning", "timm", "torchtitan", "transformers")
"""The modules of `gradguard.integrations` that have a page of their own."""


class GradguardError(Exception):
    """Base class of every error that gradguard raises on purpose.

    A note (PEP 678) names the documentation page about the error. Tracebacks show the note; ``str(error)`` omits it.

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
    """Return the page of the innermost gradguard folder on the call stack, or of the calling trainer, or ``errors``."""
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
    """An argument has the right type but a value that is not allowed, such as a negative threshold."""


class InvalidTypeError(GradguardError, TypeError):
    """An argument has a type that the call does not accept."""


class NonFiniteGradientError(GradguardError, RuntimeError):
    """A gradient holds NaN or infinity and the caller asked for an error; no gradient was changed."""

    page = "nan"


class UnsupportedGradientError(GradguardError, NotImplementedError):
    """The operation refuses this kind of gradient, because its result would be wrong."""


class DistributedError(GradguardError, RuntimeError):
    """Processes that must act together did not: a process is missing, or was called with other arguments."""


class FreedGraphError(GradguardError, RuntimeError):
    """A backward went through a graph whose saved tensors an earlier backward had freed."""


class GradientCheckError(GradguardError, AssertionError):
    """A gradient differs from the derivative, or the check was inconclusive and the caller did not allow that."""


class ParityError(GradguardError, AssertionError):
    """Two runs have different gradients, or the comparison was inconclusive and the caller did not allow that."""


class MissingPackageError(GradguardError, ImportError):
    """A package that this part of gradguard needs is not installed."""


class UnsupportedVersionError(GradguardError, ImportError):
    """A package is installed in a version that this part of gradguard does not support."""


class RecordError(GradguardError):
    """A record of a run is missing, empty or unreadable."""


class SpikeError(GradguardError, RuntimeError):
    """A run keeps spiking, and rolling back to older weights does not cure it."""


class CommandError(GradguardError):
    """The command line cannot be carried out; the message says what to type instead."""


def refuse(kind: type[GradguardError], *cases: tuple[object, str]) -> None:
    """Raise the first error in a table of unsupported cases, if any applies.

    Args:
        kind: The class of the error.
        *cases: Pairs of a condition and the message of its error.

    Raises:
        GradguardError: If a condition is true: an error of ``kind`` with the message of the first such case.

    Example:
        >>> try:
        ...     refuse(InvalidValueError, (False, "the first is not the case"), (True, "the second is."))
        ... except InvalidValueError as error:
        ...     print(error)
        the second is.
    """
    for applies, message in cases:
        if applies:
            raise kind(message)

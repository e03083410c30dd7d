"""Every exception that gradguard raises, in one place.

An error message says what was expected, what came, and what to type instead. Each class is also the built-in
exception that a PyTorch user would expect to catch, so ``except ValueError`` keeps working.
"""

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


class GradguardError(Exception):
    """Base class of every error that gradguard raises on purpose."""


class InvalidValueError(GradguardError, ValueError):
    """An argument has the right type and a value that cannot be meant, such as a negative threshold."""


class InvalidTypeError(GradguardError, TypeError):
    """An argument is of a type that the call cannot take."""


class NonFiniteGradientError(GradguardError, RuntimeError):
    """A gradient holds NaN or infinity and the caller asked to be told; no gradient was changed."""


class UnsupportedGradientError(GradguardError, NotImplementedError):
    """The result for this kind of gradient would be wrong, so the operation refuses."""


class DistributedError(GradguardError, RuntimeError):
    """Processes that must act together did not: one is missing, or called with something else."""


class FreedGraphError(GradguardError, RuntimeError):
    """A backward went through a graph whose values an earlier backward has freed."""


class GradientCheckError(GradguardError, AssertionError):
    """A gradient is not the derivative that it should be, or it could not be told and that was not allowed."""


class ParityError(GradguardError, AssertionError):
    """Two runs do not have the same gradients, or it could not be told and that was not allowed."""


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

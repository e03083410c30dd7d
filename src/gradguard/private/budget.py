"""The privacy budget of a private training: a target epsilon, or a noise multiplier without a limit."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gradguard.arguments import check_number, check_whole
from gradguard.errors import InvalidValueError
from gradguard.private.accounting import AccountantName, check_accountant, noise_multiplier_for


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """A target epsilon for a whole training, which decides the noise; steps that would exceed it are refused.

    Attributes:
        epsilon: Upper bound of the epsilon of all ``epochs`` or ``steps`` together, above 0.
        delta: Probability with which the guarantee may fail, well below 1 over the number of samples.
        epochs: Number of epochs; each has N / batch size steps for N samples. Give either ``epochs`` or ``steps``.
        steps: Number of steps. Trainers that plan their own steps need neither.
        accountant: ``"pld"`` or ``"rdp"``, see `epsilon`.

    Raises:
        InvalidValueError: If a number is out of its range, or both ``epochs`` and ``steps`` are given.
        InvalidTypeError: If an argument that must be a number is not.

    Example:
        >>> from gradguard.private import PrivacyBudget
        >>> PrivacyBudget(epsilon=3.0, delta=1e-5, epochs=5).accountant
        'pld'
    """

    epsilon: float
    delta: float
    epochs: int | None = None
    steps: int | None = None
    accountant: AccountantName = "pld"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, "a number above 0")
        _check(self.delta, self.accountant)
        for name, number in (("epochs", self.epochs), ("steps", self.steps)):
            if number is not None:
                check_whole(name, number)
        if self.epochs is not None and self.steps is not None:
            raise InvalidValueError(
                f"epochs={self.epochs} and steps={self.steps} both set the length of training: give one of them."
            )

    def plan(self, sample_rate: float, steps_of_epoch: int) -> tuple[float, int | None]:
        """Return the noise multiplier, and the number of steps that spend the target (None without a limit).

        Args:
            sample_rate: Probability with which each sample joins a step.
            steps_of_epoch: Number of accounted steps in an epoch.

        Raises:
            InvalidValueError: If the number of steps is unknown, or no noise multiplier suffices for it.
        """
        steps = self.steps if self.epochs is None else self.epochs * steps_of_epoch
        if steps is None:
            raise InvalidValueError(
                "PrivacyBudget needs epochs=... or steps=...: the number of steps that share its epsilon."
            )
        multiplier = noise_multiplier_for(self.epsilon, self.delta, sample_rate, steps, self.accountant)
        return multiplier, steps if math.isfinite(self.epsilon) else None


@dataclass(frozen=True, kw_only=True)
class FixedNoise:
    r"""A noise multiplier for an unlimited number of steps; `PrivateTraining.epsilon` returns the epsilon spent so far.

    Attributes:
        noise_multiplier: :math:`\sigma`, the standard deviation of the noise over the sensitivity of the sum, >= 0.
        delta: Probability with which the guarantee may fail, well below 1 over the number of samples.
        accountant: ``"pld"`` or ``"rdp"``, see `epsilon`.
        epsilon: Always infinity, because the number of steps has no limit.

    Raises:
        InvalidValueError: If a number is out of its range.
        InvalidTypeError: If an argument that must be a number is not.

    Example:
        >>> from gradguard.private import FixedNoise
        >>> FixedNoise(noise_multiplier=1.0, delta=1e-5).epsilon
        inf
    """

    noise_multiplier: float
    delta: float
    accountant: AccountantName = "pld"
    epsilon: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        check_number("noise_multiplier", self.noise_multiplier, "a finite number >= 0")
        _check(self.delta, self.accountant)

    def plan(self, sample_rate: float, steps_of_epoch: int) -> tuple[float, int | None]:
        """Return the noise multiplier, and None for the number of steps; see `PrivacyBudget.plan`."""
        del sample_rate, steps_of_epoch
        return self.noise_multiplier, None


def _check(delta: float, accountant: AccountantName) -> None:
    check_number("delta", delta, "a probability above 0 and below 1")
    check_accountant(accountant)

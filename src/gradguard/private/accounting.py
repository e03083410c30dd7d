r"""Privacy accounting: compute epsilon by `dp-accounting` in one call, or count steps one by one.

All numbers are for the Gaussian mechanism on Poisson-sampled batches, and for neighbouring data sets that differ by
adding or removing one sample.
"""

import importlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from gradguard.arguments import check_number, check_whole
from gradguard.errors import InvalidValueError, MissingPackageError

AccountantName = Literal["pld", "rdp"]
History = list[tuple[float, float, int]]
"""Runs of equal steps: noise multiplier, sampling rate, number of steps."""

_PLD_UP_TO = 30.0  # largest RDP epsilon for which PLD runs: above, it takes minutes, and the guarantee is useless
_TOLERANCE = 1e-3  # relative amount by which the calibrated epsilon may stay below its target
_LARGEST_MULTIPLIER = 1e6

_OTHER_ACCOUNTANTS = {
    "gdp": "it is an approximation that reports less than is spent: 1.32 for noise 0.8, rate 0.005, 1000 steps and "
    "delta 1e-6, where 2.00 is right. Use 'pld'.",
    "prv": "use 'pld', whose results are the same to three digits.",
}


def epsilon(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: AccountantName = "pld"
) -> float:
    r"""Return an upper bound of the epsilon that ``steps`` steps of private training spend at ``delta``.

    ==========================  ==================================
    edge case                   epsilon
    ==========================  ==================================
    no steps, sample rate 0     0
    noise multiplier 0          infinite
    RDP's epsilon above 30      RDP's, also with ``"pld"``, and a
                                warning that the actual epsilon
                                may be half as large
    ==========================  ==================================

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity of the sum, >= 0.
        sample_rate: Probability with which each sample joins a batch, from 0 to 1.
        steps: Number of steps, >= 0.
        delta: Probability with which the guarantee may fail, above 0 and below 1.
        accountant: ``"pld"`` composes privacy loss distributions and is nearly exact. ``"rdp"`` composes Rényi
            divergences and takes milliseconds; its epsilon is some per cent larger, and up to twice as large above 30.

    Returns:
        Epsilon.

    Raises:
        InvalidValueError: If a number is out of its range or ``accountant`` is unknown.
        InvalidTypeError: If an argument is not a number, or ``steps`` is no integer.
        MissingPackageError: If dp-accounting is not installed.

    Example:
        >>> round(epsilon(1.1, 256 / 60000, 14062, delta=1e-5, accountant="rdp"), 2)
        2.6

    Reference: Doroshenko et al., Connect the dots, 2022, arXiv 2207.04380 (PLD); Mironov, Talwar, Zhang, 2019,
    arXiv 1908.10530 (RDP).
    """
    ledger = Accountant(accountant)
    ledger.step(noise_multiplier, sample_rate, steps)
    return _warn_if_loose(ledger.spent(delta), accountant)


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: AccountantName = "pld",
) -> float:
    """Return a noise multiplier that spends nearly all of ``target_epsilon``, and never more.

    **Guarantee.** The ``epsilon`` of the returned multiplier is at most ``target_epsilon``, and at least 0.999 times
    ``target_epsilon`` where that can be reached.

    Args:
        target_epsilon: The epsilon of all steps, above 0; for infinity the multiplier is 0.
        target_delta: Probability with which the guarantee may fail, above 0 and below 1.
        sample_rate: Probability with which each sample joins a batch, above 0, at most 1.
        steps: Number of steps, at least 1.
        accountant: ``"pld"`` or ``"rdp"``, see `epsilon`.

    Returns:
        Standard deviation of the noise over the sensitivity of the sum.

    Raises:
        InvalidValueError: If a number is out of its range, or no noise multiplier up to a million suffices.
        InvalidTypeError: If an argument is not a number, or ``steps`` no integer.
        MissingPackageError: If dp-accounting is not installed.

    Example:
        >>> noise_multiplier = noise_multiplier_for(3.0, 1e-5, sample_rate=0.01, steps=1000, accountant="rdp")
        >>> epsilon(noise_multiplier, 0.01, 1000, 1e-5, accountant="rdp") <= 3.0
        True
    """
    target = check_number("target_epsilon", target_epsilon, "a number above 0")
    rate = check_number("sample_rate", sample_rate, "a number above 0 and at most 1")
    count = check_whole("steps", steps)
    check_number("target_delta", target_delta, "a probability above 0 and below 1")
    check_accountant(accountant)
    if target == math.inf:
        return 0.0

    def spent(noise_multiplier: float, name: AccountantName = accountant) -> float:
        return _epsilon([(noise_multiplier, rate, count)], target_delta, name)

    # RDP takes milliseconds and needs a little more noise, so its result is the starting point for PLD.
    found = _search(target, lambda z: spent(z, "rdp"), 1.0)
    if accountant == "pld":
        found = _search(target, spent, found or 1.0)
    if found is None:
        raise InvalidValueError(
            f"target_epsilon={target} at delta={target_delta}: no noise multiplier up to {_LARGEST_MULTIPLIER:g} is "
            f"enough for {count} steps with accountant={accountant!r}. Ask for a larger epsilon"
            + (", or use accountant='pld'." if accountant == "rdp" else ".")
        )
    return found


def _search(target: float, spent: Callable[[float], float], start: float) -> float | None:
    """Return a multiplier that spends from 0.999 to 1 times ``target``, or None if there is none.

    The logarithm of epsilon is nearly linear in the logarithm of the multiplier. The search therefore uses secants, and
    bisection where they leave the interval.
    """
    low, high, now, slope = 0.0, math.inf, start, -1.5
    before: tuple[float, float] | None = None
    while low <= _LARGEST_MULTIPLIER and high > low * (1 + 1e-4):
        value = max(spent(now), 1e-300)
        if 1 - _TOLERANCE <= value / target <= 1:
            return now
        low, high = (now, high) if value > target else (low, now)
        if math.isfinite(value):
            if before is not None and before[1] != value:
                slope = min(math.log(value / before[1]) / math.log(now / before[0]), -0.1)
            before = now, value
            guess = now * math.exp(min(max((math.log(target / value) - _TOLERANCE / 2) / slope, -1.0), 1.0))
        else:
            guess = 2 * now
        halfway = math.sqrt(low * high) if low and math.isfinite(high) else guess
        now = guess if low < guess < high else halfway
    return high if math.isfinite(high) else None


class Accountant:
    r"""Count the steps that were taken, and compute the epsilon of all of them together.

    Consecutive steps with the same noise multiplier and sampling rate are stored as one entry, so millions of steps
    need no memory.

    Args:
        name: ``"pld"`` or ``"rdp"``.

    Raises:
        InvalidValueError: If ``name`` is another; ``"gdp"`` is refused because it reports less than is spent.
        MissingPackageError: If dp-accounting is not installed.

    Attributes:
        history: Runs of equal steps: noise multiplier, sampling rate, number of steps.

    Example:
        >>> accountant = Accountant("rdp")
        >>> for _ in range(3):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> accountant.history, round(accountant.epsilon(delta=1e-5), 2)
        ([(1.0, 0.01, 3)], 0.99)
    """

    def __init__(self, name: AccountantName = "pld") -> None:
        self.name: AccountantName = check_accountant(name)
        _dp_accounting()
        self.history: History = []
        self._cache: dict[tuple, float] = {}

    @property
    def steps(self) -> int:
        """Number of steps counted so far."""
        return sum(steps for _, _, steps in self.history)

    def step(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Count steps that were taken.

        Args:
            noise_multiplier: Standard deviation of the noise over the sensitivity of the sum, finite, >= 0.
            sample_rate: Probability with which each sample joined a batch, from 0 to 1.
            steps: The number of steps, >= 0.

        Raises:
            InvalidValueError: If a number is out of its range.
            InvalidTypeError: If an argument is not a number, or ``steps`` is no integer.
        """
        entry = (
            check_number("noise_multiplier", noise_multiplier, "a finite number >= 0"),
            check_number("sample_rate", sample_rate, "a number from 0 to 1"),
            check_whole("steps", steps, 0),
        )
        if self.history and self.history[-1][:2] == entry[:2]:
            entry = (*entry[:2], entry[2] + self.history.pop()[2])
        if entry[2]:
            self.history.append(entry)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that all steps so far spend at ``delta``; warn that the bound is loose above 30.

        Raises:
            InvalidValueError: If ``delta`` is not between 0 and 1.
            InvalidTypeError: If ``delta`` is not a number.
        """
        return _warn_if_loose(self.spent(delta), self.name)

    def spent(self, delta: float) -> float:
        """Return the epsilon that all steps so far spend at ``delta``, without a warning."""
        totals = Counter[tuple[float, float]]()  # the epsilon does not depend on the order of steps
        for noise_multiplier, sample_rate, steps in self.history:
            totals[noise_multiplier, sample_rate] += steps
        merged = sorted((*kind, steps) for kind, steps in totals.items())
        key = (*merged, check_number("delta", delta, "a probability above 0 and below 1"))
        if key not in self._cache:
            self._cache = {key: _epsilon(merged, key[-1], self.name)}
        return self._cache[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the history of steps."""
        return {"history": [list(entry) for entry in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the history by a saved one.

        Raises:
            InvalidValueError: If ``state_dict`` is not the state of an accountant.
        """
        if set(state_dict) != {"history"}:
            raise InvalidValueError(f"expected the state of an accountant, with the key 'history', got {state_dict}.")
        self.history = []
        for entry in state_dict["history"]:
            self.step(*entry)


def _warn_if_loose(spent: float, name: AccountantName) -> float:
    """Return ``spent``; warn that the bound is loose if it is above 30."""
    if _PLD_UP_TO < spent < math.inf:
        also = " also with accountant='pld', which is not computed above 30" if name == "pld" else ""
        warnings.warn(
            f"epsilon {spent:.4g} is the bound by Rényi divergences{also}: the actual epsilon may be half of it. "
            "Either protects nobody: add noise, or take fewer steps.",
            stacklevel=3,
        )
    return spent


def _epsilon(history: History, delta: float, name: AccountantName) -> float:
    history = [entry for entry in history if entry[1] and entry[2]]
    if not history:
        return 0.0
    if any(noise_multiplier == 0 for noise_multiplier, _, _ in history):
        return math.inf
    logger = logging.getLogger("absl")
    logger.addFilter(_keep_record)
    try:
        by_rdp = _composed("rdp", history).get_epsilon(delta)
    finally:
        logger.removeFilter(_keep_record)
    if name == "rdp" or by_rdp > _PLD_UP_TO:
        return float(by_rdp)
    return min(float(_composed("pld", history).get_epsilon(delta)), float(by_rdp))  # both are valid bounds


def _composed(name: AccountantName, history: History) -> Any:
    library = _dp_accounting()
    accountant = importlib.import_module(f"dp_accounting.{name}")
    composed = accountant.RdpAccountant() if name == "rdp" else accountant.PLDAccountant()
    for noise_multiplier, sample_rate, steps in history:
        event = library.GaussianDpEvent(noise_multiplier)
        composed.compose(library.PoissonSampledDpEvent(sample_rate, event), steps)
    return composed


def _keep_record(record: logging.LogRecord) -> bool:
    """Filter log records about excluded Rényi orders: the bound is a minimum over orders, and valid without them."""
    return "Excluding this order" not in record.getMessage()


def _dp_accounting() -> ModuleType:
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise MissingPackageError(
            "epsilon is computed by the package dp-accounting, which is not installed: pip install gradguard[private]"
        ) from error


def check_accountant(name: str) -> AccountantName:
    """Return ``name`` after checking that it is the name of an accountant.

    Raises:
        InvalidValueError: If ``name`` is neither ``"pld"`` nor ``"rdp"``.
    """
    if name == "pld" or name == "rdp":
        return name
    expected = "expected 'pld' (nearly exact) or 'rdp' (looser, in milliseconds)."
    raise InvalidValueError(f"accountant={name!r}: {_OTHER_ACCOUNTANTS.get(name, expected)}")

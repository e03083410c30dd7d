"""Private training in one call, and its parts: sampling, noise, accounting."""

from gradguard.errors import MissingPackageError
from gradguard.private.accounting import Accountant, epsilon, noise_multiplier_for
from gradguard.private.budget import FixedNoise, PrivacyBudget
from gradguard.private.noise import GaussianNoise
from gradguard.private.sampling import PoissonBatches
from gradguard.private.set_up import make_private
from gradguard.private.training import PrivateTraining

__all__ = [
    "Accountant",
    "FixedNoise",
    "GaussianNoise",
    "MissingPackageError",
    "PoissonBatches",
    "PrivacyBudget",
    "PrivateTraining",
    "epsilon",
    "make_private",
    "noise_multiplier_for",
]

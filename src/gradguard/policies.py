"""Policies for a step whose gradients hold NaN or infinity: one vocabulary for every clipper.

| policy        | meaning                                                                                        |
|---------------|------------------------------------------------------------------------------------------------|
| `"propagate"` | PyTorch's: the rule is applied as if nothing were wrong, so NaN spreads through the norm        |
| `"raise"`     | an error names every parameter and count; no gradient is changed                               |
| `"zero"`      | every gradient of the step becomes 0; decided on the device, without a host sync               |
| `"skip"`      | the guard of an optimizer skips the step                                                       |
"""

from typing import Literal, cast, get_args

from gradguard.errors import InvalidValueError

NonFinitePolicy = Literal["propagate", "raise", "zero"]
"""The policies that a clip accepts."""

GuardPolicy = Literal["skip", "propagate", "raise", "zero"]
"""The policies that a guard of an optimizer accepts."""


def check_policy(policy: str) -> NonFinitePolicy:
    """Return ``policy`` if a clip accepts it.

    Raises:
        InvalidValueError: If the policy is unknown, or only a guard accepts it.
    """
    if policy == "skip":
        raise InvalidValueError('nonfinite="skip" means to skip the optimizer step, which only gg.Guard can do.')
    _check_known(policy, get_args(NonFinitePolicy))
    return cast("NonFinitePolicy", policy)


def check_guard_options(nonfinite: str, max_consecutive_skips: int | None) -> None:
    """Check the options of `gradguard.Guard`, possibly before there is an optimizer to guard.

    Args:
        nonfinite: The policy for non-finite gradients.
        max_consecutive_skips: The largest number of skipped steps in a row; None for no cap.

    Raises:
        InvalidValueError: If an option is not allowed.
    """
    _check_known(nonfinite, get_args(GuardPolicy))
    if max_consecutive_skips is not None and (not isinstance(max_consecutive_skips, int) or max_consecutive_skips < 0):
        raise InvalidValueError(
            f"max_consecutive_skips={max_consecutive_skips!r}: expected a whole number >= 0, or None for no cap."
        )


def _check_known(policy: str, known: tuple[str, ...]) -> None:
    if policy not in known:
        listed = ", ".join(f'"{name}"' for name in known)
        raise InvalidValueError(f"nonfinite={policy!r} is not a policy: expected one of {listed}.")

"""Policies for a step whose gradients hold NaN or infinity. One vocabulary, one meaning.

| policy        | meaning                                                                                        |
|---------------|------------------------------------------------------------------------------------------------|
| `"propagate"` | PyTorch's: the rule is applied as if nothing were wrong, so NaN spreads through the norm        |
| `"raise"`     | an error names every parameter and count; no gradient is changed                               |
| `"zero"`      | every gradient of the step becomes 0; decided on the device, without a wait                    |
| `"skip"`      | who guards an optimizer leaves the step out                                                    |
"""

from typing import Literal, cast, get_args

from gradguard.errors import InvalidValueError

NonFinitePolicy = Literal["propagate", "raise", "zero"]
"""The policies of a clip."""

GuardPolicy = Literal["skip", "propagate", "raise", "zero"]
"""The policies of a guard, which is attached to an optimizer."""


def check_policy(policy: str) -> NonFinitePolicy:
    """Return ``policy`` if a clip can do that.

    Raises:
        InvalidValueError: If not.
    """
    if policy == "skip":
        raise InvalidValueError('nonfinite="skip" means not to take the optimizer step, which only gg.Guard can do.')
    _check_known(policy, get_args(NonFinitePolicy))
    return cast("NonFinitePolicy", policy)


def check_guard_options(nonfinite: str, max_consecutive_skips: int | None) -> None:
    """Check what `gradguard.Guard` is told, also before there is an optimizer to guard.

    Args:
        nonfinite: Its policy.
        max_consecutive_skips: Its cap.

    Raises:
        InvalidValueError: If it takes none of that.
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

"""The clippers that a trainer with several optimizers takes, and which optimizer gets which."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.integrations.per_sample import shown

Clippers = (
    gg.rules.Clipper
    | Sequence[gg.rules.Clipper | None]
    | Mapping[int, gg.rules.Clipper | None]
    | Callable[[], gg.rules.Clipper]
)
"""One, one for each by position, or a function that makes one for each."""


def checked(clipper: Clippers) -> Any:
    """Return ``clipper`` if it can be meant.

    Args:
        clipper: What was passed.

    Returns:
        ``clipper``; for a list or tuple a dictionary by position.

    Raises:
        InvalidTypeError: If it is none of `Clippers`.
    """
    found = dict(enumerate(clipper)) if isinstance(clipper, list | tuple) else clipper
    if not isinstance(found, Mapping):
        if callable(found):  # a clipper is
            return found
    elif found and all(type(k) is int and isinstance(one, gg.rules.Clipper | None) for k, one in found.items()):
        return found
    raise InvalidTypeError(
        f"clipper is {shown(clipper)}: expected a clipper, such as gg.ClipByMedian(); or, for several optimizers, one "
        "for each in a list, a dict such as {0: gg.ClipByMedian(), 1: None}, or a function that makes one."
    )


def one_for_each(clipper: Any, optimizers: Sequence[Optimizer]) -> list[gg.rules.Clipper | None]:
    """Return the clipper of each optimizer, None for one that is left alone.

    Args:
        clipper: As `checked` has returned it.
        optimizers: The optimizers, by position.

    Returns:
        As many as there are optimizers.

    Raises:
        InvalidValueError: If there is not one for each.
        InvalidTypeError: If a function returned something else.

    Example:
        >>> import gradguard as gg
        >>> from gradguard.integrations.clipper_for_each import one_for_each
        >>> [type(clipper).__name__ for clipper in one_for_each(gg.ClipByMedian, ["two", "optimizers"])]
        ['ClipByMedian', 'ClipByMedian']
    """
    count = len(optimizers)
    if isinstance(clipper, gg.rules.Clipper):
        if count > 1:
            raise InvalidValueError(
                f"one {type(clipper).__name__} for {count} optimizers: expected one for each, or histories would mix. "
                f"Pass a function that makes one for each, as in GradGuardCallback(lambda: gg.{type(clipper).__name__}"
                f"(...)), or a list of {count} clippers in the order of configure_optimizers."
            )
        return [clipper]
    if isinstance(clipper, Mapping):
        if sorted(clipper) != list(range(count)):
            raise InvalidValueError(
                f"clippers for the optimizers {sorted(clipper)}, and configure_optimizers returned {count}: "
                f"expected one for each of {list(range(count))}, None for one to be left alone."
            )
        return [clipper[position] for position in range(count)]
    made: list[Any] = [clipper() for _ in optimizers]
    if not all(isinstance(one, gg.rules.Clipper) for one in made):
        raise InvalidTypeError(f"the function for clippers returned {made}: expected a new clipper at each call.")
    return made

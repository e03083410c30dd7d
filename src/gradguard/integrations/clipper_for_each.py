"""The clippers that a trainer with several optimizers takes, and which optimizer gets which."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.integrations.one_clip import check_clipper

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
        clipper: The argument of the user.

    Returns:
        ``clipper``; for a list or tuple a dictionary by position.

    Raises:
        InvalidTypeError: If it is none of `Clippers`.
    """
    found = dict(enumerate(clipper)) if isinstance(clipper, list | tuple) else clipper
    if callable(found):  # a clipper is
        return found
    for one in found.values() if isinstance(found, Mapping) and set(map(type, found)) == {int} else [clipper]:
        if one is not None:
            check_clipper(one)
    return found


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
    places = range(len(optimizers))
    if isinstance(clipper, gg.rules.Clipper) and len(places) > 1:
        name = type(clipper).__name__
        raise InvalidValueError(
            f"one {name} for {len(places)} optimizers: expected one for each, or histories would mix. Pass a function "
            f"that makes one for each, as in GradGuardCallback(lambda: gg.{name}(...)), or a list of {len(places)} "
            "clippers in the order of configure_optimizers."
        )
    if isinstance(clipper, Mapping):
        if sorted(clipper) != list(places):
            raise InvalidValueError(
                f"clippers for the optimizers {sorted(clipper)}, and configure_optimizers returned {len(places)}: "
                f"expected one for each of {list(places)}, None for one to be left alone."
            )
        return [clipper[place] for place in places]
    made = [clipper if isinstance(clipper, gg.rules.Clipper) else clipper() for _ in places]
    if not all(isinstance(one, gg.rules.Clipper) for one in made):
        raise InvalidTypeError(f"the function for clippers returned {made}: expected a new clipper at each call.")
    return made

"""One clip and not two: a guard beside which the trainer's own clip is refused."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedVersionError
from gradguard.replacements import Replacement


class OnlyClip:
    """A trainer's callback that clips in the trainer's place, so that there may be one in its list and no other."""

    def __init__(self) -> None:
        vars(self).update(self._not_begun())

    def _not_begun(self) -> dict[str, Any]:
        """Return the attributes of a callback whose training has not begun, which copies have too."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: the rule and its options, and nothing that is on this model or optimizer."""
        return {**vars(self), **self._not_begun()}


class OnlyGuard(gg.Guard):
    """A `gradguard.Guard` that `refuse_beside_a_guard` knows of while it is attached.

    Example:
        >>> import gradguard as gg, torch
        >>> from gradguard.integrations.one_clip import OnlyGuard, refuse_beside_a_guard
        >>> layer = torch.nn.Linear(2, 1)
        >>> with OnlyGuard(torch.optim.SGD(layer.parameters(), lr=0.1), gg.ClipByMedian()):
        ...     refuse_beside_a_guard("trainer.clip", layer.parameters())
        Traceback (most recent call last):
        gradguard.errors.InvalidValueError: trainer.clip was called with gradients that a Guard clips at optimizer...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _guards.add(self)

    def detach(self) -> None:
        """Stop acting, at once and for good, and let the trainer clip again. May be repeated."""
        _guards.discard(self)
        super().detach()


class OnlyRecovery(gg.SpikeRecovery):
    """A `gradguard.SpikeRecovery` whose guard is an `OnlyGuard`.

    Example:
        >>> import gradguard as gg, torch
        >>> from gradguard.integrations.one_clip import OnlyGuard, OnlyRecovery
        >>> layer = torch.nn.Linear(2, 1)
        >>> resilience = OnlyRecovery(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> isinstance(resilience.guard, OnlyGuard)
        True
    """

    _guard_type = OnlyGuard


class ResilienceClips(OnlyClip):
    """A trainer's callback that clips through a `gradguard.SpikeRecovery`; each trainer's own callback is a subclass.

    Attributes:
        resilience: The `gradguard.SpikeRecovery` of the current or the last training; None before the first.
    """

    resilience: gg.SpikeRecovery | None
    _resilience_options: dict[str, Any]

    def _not_begun(self) -> dict[str, Any]:
        return {**super()._not_begun(), "resilience": None}

    def _resilient(self, model: Any, optimizer: Optimizer, clipper: Any, found: Iterable[Any], guard: Any) -> gg.Guard:
        """Make the `gradguard.SpikeRecovery`.

        Args:
            model: As for `gradguard.SpikeRecovery`, like ``optimizer`` and ``clipper``.
            optimizer: The optimizer.
            clipper: The rule.
            found: Objects of the trainer that go back too; None is passed over.
            guard: The options of the guard.

        Returns:
            The guard that it has made.
        """
        options = dict(self._resilience_options)
        extra = [one for one in (*found, *options.pop("extra_state", ())) if one is not None]
        self.resilience = OnlyRecovery(model, optimizer, clipper, extra_state=extra, guard_options=guard, **options)
        return self.resilience.guard

    def _set_options(self, options: Mapping[str, Any] | None) -> None:
        """Keep the options of the `gradguard.SpikeRecovery`.

        Raises:
            InvalidValueError: If it takes none of such a name, or the callback gives it another way.
        """
        self._resilience_options = dict(options or {})
        known = inspect.signature(gg.SpikeRecovery).parameters.keys() - {
            "model",
            "optimizer",
            "clipper",
            "guard_options",
        }
        if unknown := sorted(self._resilience_options.keys() - known):
            raise InvalidValueError(
                f"options has {', '.join(map(repr, unknown))}: expected names of gradguard.SpikeRecovery's arguments, "
                f"{', '.join(sorted(known))}. The clipper and what a Guard takes are arguments of the callback."
            )

    def _end_resilience(self) -> None:
        if self.resilience is not None:
            self.resilience.detach()


def check_clipper(clipper: object) -> None:
    """Raise if it is no rule for whole gradients.

    Args:
        clipper: The argument of the user.

    Raises:
        InvalidTypeError: If it is none; of a rule for samples it says who takes it.
    """
    if not isinstance(clipper, gg.rules.Clipper):
        shown = f"the class {clipper.__name__}" if isinstance(clipper, type) else type(clipper).__name__
        if isinstance(clipper, gg.rules.NormClipper):
            shown += ", a rule for each sample's gradient, which PerSampleCallback takes"
        raise InvalidTypeError(f"clipper is {shown}: expected a clipper, such as gg.ClipByMedian().")


_guards: "WeakSet[OnlyGuard]" = WeakSet()


def refuse_beside_a_guard(call: str, parameters: Iterable[Tensor]) -> None:
    """Raise if an `OnlyGuard` clips one of ``parameters``: a clip before a clip would go unseen.

    Args:
        call: The call of the user, for the message.
        parameters: Whose gradients it would clip.

    Raises:
        InvalidValueError: If there is such a guard.
    """
    if not _guards:
        return
    owned = {id(p) for guard in _guards for group in guard.optimizer.param_groups for p in group["params"]}
    if any(id(p) in owned for p in parameters):
        raise InvalidValueError(
            f"{call} was called with gradients that a Guard clips at optimizer.step(): one would be done after the "
            "other. Remove the call; the norm before the clip is guard.last.norm after the step. To clip by hand "
            "instead, call guard.detach()."
        )


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object have ``value`` as its own attribute ``name`` until the block ends."""
    own = vars(thing)
    before = {name: own[name]} if name in own else {}
    object.__setattr__(thing, name, value)  # some watch what is set
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        own.update(before)


_replaced: set[tuple[type | ModuleType, str]] = set()


def wrap_once(kind: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
    """Let ``instead(original, self, *args, **kwargs)`` take the place of a method of a class from now on.

    Args:
        kind: The class; or a module, with a function whose first argument is ``self``.
        name: The method; a second call for it does nothing.
        instead: The replacement; it must do as ``original`` does for objects that gradguard does not know.

    Raises:
        UnsupportedVersionError: If the class has no such method.
    """
    if (kind, name) in _replaced:
        return
    module, path = (kind.__module__, f"{kind.__name__}.{name}") if isinstance(kind, type) else (kind.__name__, name)
    if name not in vars(kind):
        raise UnsupportedVersionError(
            f"{module}.{path.removesuffix(f'.{name}')} has no method {name}, which it had in the versions that this "
            f"part of gradguard is known to work with. Install an older {module.split('.')[0]}, or a newer gradguard."
        )
    _replaced.add((kind, name))
    Replacement(module, path, instead).use()

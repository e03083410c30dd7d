"""The common interface of trainers: a `Run`, and a `Job` that the trainer's own events call."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.errors import InvalidValueError, UnsupportedVersionError
from gradguard.replacements import Replacement


@dataclass(frozen=True)
class Run:
    """One run of a trainer, as passed to a job when the run begins.

    Attributes:
        model: The user's model; None if it is not known.
        wrapped: The trainer's wrapper around the model, or the model itself; it names the parameters.
        optimizers: The innermost optimizers, whose hooks run once for each real step.
        schedulers: Learning-rate schedules, which continue at a roll-back, and other objects that it restores; None
            entries are ignored.
        scaler: The GradScaler, None if there is none.
        steps: Number of steps that the trainer will take in all; infinite if it does not know.
        done: Number of steps taken before, in a run that is resumed.
    """

    model: nn.Module | None
    wrapped: nn.Module | None
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    steps: float = math.inf
    done: int = 0


class Job:
    """A trainer's callback that acts in the trainer's place; a trainer's list may hold only one.

    The callback of a trainer is a subclass of one of the jobs (`GuardJob`, `ResilienceJob`, `PerSampleJob`,
    `PrivateJob`) and of the trainer's own callback class. The trainer's events call ``begin``, the job's methods for
    a backward and a step, and ``end``. Its checkpoints call ``state_dict`` and ``load_state_dict``.

    A second run continues with the learned state if it trains the same model; with another model it starts fresh.
    """

    _acting: bool
    _model: nn.Module | None  # the model of the current or the last run

    def __init__(self) -> None:
        self._not_begun: dict[str, Any] = {}
        self._of_a_run(_acting=False, _model=None)
        self._loaded: dict[str, Any] | None = None  # a checkpoint's state until the run begins, {} if it has none
        self._begun = False
        self._at_first: list[tuple[Any, Any]] = []

    def _of_a_run(self, **attributes: Any) -> None:
        """Set attributes of a run to their initial values; a copy starts with these values too."""
        self._not_begun |= attributes
        vars(self).update(copy.deepcopy(attributes))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: the rule and its options, without anything bound to the model or optimizer."""
        return {**vars(self), **copy.deepcopy(self._not_begun)}

    def begin(self, run: Run) -> None:
        """Attach to the model and the optimizers of ``run``, with the state of a checkpoint or of the last run."""
        state = self._loaded
        if state is None and self._model is run.model:
            state = copy.deepcopy(self.state_dict())
        if self._acting:
            self.end()
        if not state and self._begun:
            for rule, at_first in self._at_first:
                rule.load_state_dict(copy.deepcopy(at_first))
        self._loaded = None
        self._attach(run)
        self._model, self._begun, self._acting = run.model, True, True
        if state:
            self.load_state_dict(state)

    def end(self) -> None:
        """Detach from model and optimizers; learned and counted values can still be read. May be repeated."""
        self._acting = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty before there is any."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, now or when the run begins."""
        if self._acting:
            self._load(state_dict)
        else:
            self._loaded = state_dict

    def _attach(self, run: Run) -> None:
        """Attach to the optimizers of ``run``; does nothing if the trainer calls the clip itself."""

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _remember(self, *rules: Any) -> None:
        """Store the initial state of ``rules``, to which they return when a run starts fresh."""
        self._at_first += [(rule, copy.deepcopy(rule.state_dict())) for rule in rules]

    def _refuse_others(self, callbacks: Iterable[object]) -> None:
        """Raise if another of a trainer's ``callbacks`` clips.

        Raises:
            InvalidValueError: If there is one.
        """
        others = [type(one).__name__ for one in callbacks if isinstance(one, Job) and one is not self]
        if others:
            raise InvalidValueError(
                f"there is a {others[0]} beside the {type(self).__name__}: one clip would be done after the other. "
                "Remove one of them; for two rules for whole gradients pass one gradguard.Chain(a, b)."
            )


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute ``name`` of an object itself to ``value`` until the block ends."""
    own = vars(thing)
    before = {name: own[name]} if name in own else {}
    object.__setattr__(thing, name, value)  # bypasses a class that tracks its attributes
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        own.update(before)


_replaced: set[tuple[type | ModuleType, str]] = set()


def wrap_once(kind: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method of a class permanently by ``instead(original, self, *args, **kwargs)``.

    Args:
        kind: The class; or a module, with a function whose first argument is ``self``.
        name: The method; a second call for it does nothing.
        instead: The replacement; it must call ``original`` for objects that gradguard does not know.

    Raises:
        UnsupportedVersionError: If the class has no such method.
    """
    if (kind, name) in _replaced:
        return
    module, path = (kind.__module__, f"{kind.__name__}.") if isinstance(kind, type) else (kind.__name__, "")
    if name not in vars(kind):
        raise UnsupportedVersionError(
            f"{f'{module}.{path}'.strip('.')} has no method {name}, which it had in the versions that this "
            f"part of gradguard is known to work with. Install an older {module.split('.')[0]}, or a newer gradguard."
        )
    _replaced.add((kind, name))
    Replacement(module, path + name, instead).use()


def parameters_of(*optimizers: Any) -> list[Tensor]:
    """Return the parameters of optimizers, in order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]

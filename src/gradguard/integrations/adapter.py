"""A trainer as gradguard sees it: a run, and a job that the trainer's own events call."""

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
    """One run of a trainer: the facts that a job needs, handed to it when the run begins.

    Attributes:
        model: The user's model; None where it is not known.
        wrapped: The trainer's wrapper round it, or the model itself; it names the parameters.
        optimizers: Its optimizers, as PyTorch has them: those whose hooks run once for each real step.
        schedulers: Learning-rate schedules and other objects that go back when weights do; None is passed over.
        scaler: The GradScaler, None if there is none.
        steps: How many steps the trainer will take in all; infinite where it does not know.
        done: How many it has taken before, in the run that it resumes.
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
    `PrivateJob`) and of the trainer's own kind of callback, whose events call ``begin``, what the job does at a
    backward and at a step, and ``end``. Its checkpoints call ``state_dict`` and ``load_state_dict``.

    A second run goes on with what was learned if it trains the same model, and begins anew with another.
    """

    _acting: bool
    _model: nn.Module | None  # of the current or the last run

    def __init__(self) -> None:
        self._not_begun: dict[str, Any] = {}
        self._of_a_run(_acting=False, _model=None)
        self._loaded: dict[str, Any] | None = None  # the state of a checkpoint until the run begins, {} if it has none
        self._begun = False
        self._at_first: list[tuple[Any, Any]] = []

    def _of_a_run(self, **attributes: Any) -> None:
        """Set attributes of a run to their values before the first one, which a copy has too."""
        self._not_begun |= attributes
        vars(self).update(copy.deepcopy(attributes))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: the rule and its options, and nothing that is on this model or optimizer."""
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
        """Give model and optimizers back; what was learned and counted can still be read. May be repeated."""
        self._acting = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; empty before there is anything."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, now or when the run begins."""
        if self._acting:
            self._load(state_dict)
        else:
            self._loaded = state_dict

    def _attach(self, run: Run) -> None:
        """Attach to the optimizers of ``run``; nothing where the trainer calls the clip itself."""

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _remember(self, *rules: Any) -> None:
        """Note the state of ``rules``, which they go back to where a run begins anew."""
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
                "Leave one of them out; for two rules for whole gradients pass one gradguard.Chain(a, b)."
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

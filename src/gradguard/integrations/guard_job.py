"""Jobs that attach a guard to each optimizer of a trainer, and refuse the trainer's own clip beside it."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.integrations.adapter import Job, Run, parameters_of
from gradguard.policies import GuardPolicy, check_guard_options
from gradguard.spikes.spike_policy import Detector

Clippers = gg.rules.Clipper | Sequence[gg.rules.Clipper | None]
"""One clipper, or one for each optimizer by position."""


class OnlyGuard(gg.Guard):
    """A `gradguard.Guard` that `refuse_beside_a_guard` finds while it is attached.

    Example:
        >>> import gradguard as gg, torch
        >>> from gradguard.integrations.guard_job import OnlyGuard, refuse_beside_a_guard
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
        """Stop clipping, at once and permanently, and let the trainer clip again. May be repeated."""
        _guards.discard(self)
        super().detach()


class OnlyRecovery(gg.SpikeRecovery):
    """A `gradguard.SpikeRecovery` whose guard is an `OnlyGuard`.

    Example:
        >>> import gradguard as gg, torch
        >>> from gradguard.integrations.guard_job import OnlyGuard, OnlyRecovery
        >>> layer = torch.nn.Linear(2, 1)
        >>> resilience = OnlyRecovery(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> isinstance(resilience.guard, OnlyGuard)
        True
    """

    _guard_type = OnlyGuard


class GuardJob(Job):
    """Attach a `gradguard.Guard` to each optimizer of a trainer; each trainer's own callback is a subclass.

    Args:
        clippers: One clipper, or one for each optimizer by position.
        nonfinite: As for `gradguard.Guard`.
        max_consecutive_skips: As for `gradguard.Guard`.
        **options: Further arguments of `gradguard.Guard` by name.

    Raises:
        InvalidTypeError: If one of ``clippers`` is not a clipper.
    """

    _attached: dict[int, Any]  # the Guard or SpikeRecovery of each optimizer, by position

    def __init__(
        self,
        clippers: Clippers,
        nonfinite: GuardPolicy = "skip",
        max_consecutive_skips: int | None = 20,
        **options: Any,
    ) -> None:
        self._clippers = listed(clippers)
        check_guard_options(nonfinite, max_consecutive_skips)
        super().__init__()
        self._of_a_run(_attached={})
        self._options = {"nonfinite": nonfinite, "max_consecutive_skips": max_consecutive_skips, **options}
        self._remember(*filter(None, self._clippers))

    @property
    def guards(self) -> dict[int, gg.Guard]:
        """The `gradguard.Guard` of each optimizer by position, once training has begun, and also afterwards."""
        return {place: getattr(one, "guard", one) for place, one in self._attached.items()}

    def _attach(self, run: Run) -> None:
        self._attached = {}
        clippers, optimizers = self._clippers, run.optimizers
        if len(clippers) != len(optimizers):
            raise InvalidValueError(
                f"there are {len(clippers)} clippers, and configure_optimizers returned {len(optimizers)} optimizers: "
                "expected a list with one for each, in their order, None for one without a clip. One for several "
                "would mix their histories."
            )
        for place, (optimizer, clipper) in enumerate(zip(optimizers, clippers, strict=True)):
            if clipper is not None:
                self._attached[place] = self._guard(run, optimizer, clipper)

    def _guard(self, run: Run, optimizer: Optimizer, clipper: gg.rules.Clipper) -> Any:
        return OnlyGuard(optimizer, clipper, model=run.wrapped, **self._options)

    def end(self) -> None:
        """Detach the guards from the optimizers; their counts can still be read. May be repeated."""
        super().end()
        for one in self._attached.values():
            one.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all guards, for a checkpoint."""
        if self._loaded is not None or not self._attached:
            return self._loaded or {}
        return {"guards": {place: one.state_dict() for place, one in self._attached.items()}}

    def _load(self, state: dict[str, Any]) -> None:
        if sorted(state["guards"]) != sorted(self._attached):
            raise InvalidValueError(
                f"the checkpoint has guards on the optimizers {sorted(state['guards'])}, by position in "
                f"configure_optimizers, but this run on {sorted(self._attached)}: expected the same optimizers. "
                "Pass GradGuardCallback the clippers of the run that is resumed, or start a new run with a new one."
            )
        for place, one in self._attached.items():
            one.load_state_dict(state["guards"][place])


class ResilienceJob(GuardJob):
    """Clip through a `gradguard.SpikeRecovery`; each trainer's own callback is a subclass.

    Raises:
        InvalidValueError: If ``options`` has a name that `gradguard.SpikeRecovery` does not take, or that the callback
            sets itself.
    """

    def __init__(
        self,
        clipper: gg.rules.Clipper | None = None,
        options: Mapping[str, Any] | None = None,
        **of_guard: Any,
    ) -> None:
        super().__init__(gg.ClipByMedian() if clipper is None else clipper, **of_guard)
        self._resilience_options = dict(options or {})
        own = {"model", "optimizer", "clipper", "guard_options"}
        known = inspect.signature(gg.SpikeRecovery).parameters.keys() - own
        if unknown := sorted(self._resilience_options.keys() - known):
            raise InvalidValueError(
                f"options has {', '.join(map(repr, unknown))}: expected names of gradguard.SpikeRecovery's arguments, "
                f"{', '.join(sorted(known))}. The clipper and a Guard's arguments are arguments of the callback."
            )
        detector = self._resilience_options.get("detector")
        if isinstance(detector, Detector):  # SpikeRecovery refuses anything else
            self._remember(detector)

    @property
    def resilience(self) -> gg.SpikeRecovery | None:
        """The `gradguard.SpikeRecovery` of the current or the last training; None before the first."""
        return self._attached.get(0)

    def _guard(self, run: Run, optimizer: Optimizer, clipper: gg.rules.Clipper) -> gg.SpikeRecovery:
        if len(run.optimizers) > 1:
            raise InvalidValueError(
                f"configure_optimizers returned {len(run.optimizers)} optimizers, and a spike would be skipped by "
                "one and taken by another: expected one. Put all parameters into one optimizer, with groups."
            )
        assert run.wrapped is not None
        options = dict(self._resilience_options)
        extra = [*run.schedulers, run.scaler, *options.pop("extra_state", ())]
        extra = [one for one in extra if one is not None]
        return OnlyRecovery(run.wrapped, optimizer, clipper, extra_state=extra, guard_options=self._options, **options)


def check_clipper(clipper: object) -> None:
    """Raise if ``clipper`` is not a rule for whole gradients.

    Args:
        clipper: The user's argument.

    Raises:
        InvalidTypeError: If it is not; for a per-sample rule the message names the callback that takes it.
    """
    if not isinstance(clipper, gg.rules.Clipper):
        shown = f"the class {clipper.__name__}" if isinstance(clipper, type) else type(clipper).__name__
        if isinstance(clipper, gg.rules.NormClipper):
            shown += ", a rule for each sample's gradient, which PerSampleCallback takes"
        raise InvalidTypeError(f"clipper is {shown}: expected a clipper, such as gg.ClipByMedian().")


def listed(clippers: Any) -> Sequence[Any]:
    """Return a list of clippers unchanged, and a single one in a list.

    Args:
        clippers: The user's argument: a clipper, or a list with a clipper or None for each optimizer.

    Raises:
        InvalidTypeError: If one of them is not a clipper.
    """
    several = isinstance(clippers, list | tuple) and bool(clippers)
    each = clippers if several else [clippers]
    for one in each:
        if not (several and one is None):
            check_clipper(one)
    return each


_guards: "WeakSet[OnlyGuard]" = WeakSet()


def refuse_beside_a_guard(call: str, parameters: Iterable[Tensor]) -> None:
    """Raise if an `OnlyGuard` clips one of ``parameters``: a clip before its clip would go unnoticed.

    Args:
        call: The user's call, for the message.
        parameters: The parameters whose gradients the call would clip.

    Raises:
        InvalidValueError: If there is such a guard.
    """
    owned = set(map(id, parameters_of(*[guard.optimizer for guard in _guards])))
    if not owned.isdisjoint(map(id, parameters)):
        raise InvalidValueError(
            f"{call} was called with gradients that a Guard clips at optimizer.step(): one would be done after the "
            "other. Remove the call; the norm before the clip is guard.last.norm after the step. To clip by hand "
            "instead, call guard.detach()."
        )

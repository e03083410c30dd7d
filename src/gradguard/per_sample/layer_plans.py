"""Keeps the plans of each way in which a module is called, and makes new ones when it is called in a new way."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from gradguard.distributed.placements import is_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Arguments, other_candidates, signature
from gradguard.per_sample.dry_run import DryRun, Slot
from gradguard.per_sample.plan import CallPlan, Plans
from gradguard.per_sample.way import Way
from gradguard.torch_private import parameter_slots

_SEEDS = 16
"""Dry runs of a model that draws random numbers, in which layers are left out by chance."""


class Planning:
    """Plans by outermost module and by the form of its arguments.

    Args:
        batch_first: Whether the batch is the first dimension of what a module is called with.
        names: The name of each parameter by where it is held.
        observe: Called with an `Observer` or None: who hears of the calls of modules.

    Attributes:
        shared: Parameters that more than one call uses.
        sharded: Parameters are spread over processes.
    """

    def __init__(self, batch_first: bool, names: Mapping[Slot, str], observe: Any) -> None:
        # Under FSDP2 every dry run is a collective, so all processes must do the same ones, whatever their batches.
        self.sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self._batch_first, self._names, self._observe = batch_first, names, observe
        self._ways: dict[Any, Way] = {}
        self._current: list[Plans] = []
        self._trained: frozenset[str] = frozenset()
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._seed = 0
        self._unexpected = 0
        self.shared: frozenset[str] = frozenset()

    def train(self, names: frozenset[str]) -> None:
        """Take note of the parameters that are trained now; what was planned without one of them is planned again."""
        if not names <= self._trained:
            self.forget()
            self._trained = names

    def forget(self) -> None:
        """Plan anew from the next call on, with other random numbers."""
        self._ways.clear()
        self._seed += _SEEDS

    def unexpected(self) -> None:
        """A layer ran that no plan knows. If that happens again, samples are run one by one."""
        self._unexpected += 1
        self.forget()

    def restart(self) -> None:
        """Count the calls of each module from the beginning."""
        self._calls.clear()

    def way(self, module: nn.Module, arguments: Arguments, size: int) -> Way:
        """Return how an outermost call that starts is treated; plan it, if it is of a new kind.

        Raises:
            UnsupportedGradientError: If its samples cannot be told apart.
        """
        key = (module, signature(arguments, sizes=not self.sharded))
        if key not in self._ways:
            self._ways[key] = self._plan(module, arguments, size)
            plans = [p for way in self._ways.values() for p in way.plans]
            self.shared = frozenset().union(*[self._shared_of(p) for p in plans])
        return self._ways[key]

    def loop(self, way: Way, arguments: Arguments, size: int, reason: str) -> None:
        """Run the samples of ``way`` one by one from now on, because of ``reason``."""
        way.output_axes = self._outermost(way.module, arguments, size, way.whole).output_axes
        way.plans, way.reason = [], reason

    def resume(self, way: Way) -> None:
        """The calls that come belong to ``way``."""
        self._current = way.plans

    def next(self, module: nn.Module) -> CallPlan | None:
        """Return the plan of the next call of ``module``, None if no dry run has seen it."""
        number = self._calls[module]
        self._calls[module] += 1
        others = [p for way in self._ways.values() for p in way.plans]
        return next((plan for p in (*self._current, *others) if (plan := p.of(module, number))), None)

    def uses_trained(self, module: nn.Module) -> bool:
        """Tell whether ``module`` or a layer in it holds a trained parameter."""
        return any(self._names.get((m, slot)) in self._trained for m in module.modules() for slot in parameter_slots(m))

    def _plan(self, module: nn.Module, arguments: Arguments, size: int) -> Way:
        others = [] if self.sharded else other_candidates(arguments, self._batch_first, size)
        attempts = [frozenset(), *[frozenset([i]) for i in others], frozenset(others)] if others else [frozenset()]
        failure: UnsupportedGradientError | None = None
        for whole in attempts:
            try:
                if self._unexpected < 2:
                    return self._dry_runs(module, arguments, size, whole)
            except UnsupportedGradientError as error:
                failure = failure or error
        reason = str(failure) if failure else "different layers run in each step."
        for whole in attempts if not self.sharded else []:
            try:
                way = self._outermost(module, arguments, size, whole)
            except UnsupportedGradientError as error:
                failure = failure or error
            else:
                way.reason = reason
                return way
        assert failure is not None
        raise failure

    def _outermost(self, module: nn.Module, arguments: Arguments, size: int, whole: frozenset[int]) -> Way:
        """What is known without following the layers inside."""
        slots = {slot for slot, name in self._names.items() if name in self._trained}
        run = DryRun(module, arguments, self._batch_first, size, slots, self._observe, whole, self._seed, False)
        return Way(module, whole, [], run.axes(0)[1], run.changes_buffers)

    def _dry_runs(self, module: nn.Module, arguments: Arguments, size: int, whole: frozenset[int]) -> Way:
        """One plan; or several where layers are left out by chance, so that each is seen."""
        slots = {slot for slot, name in self._names.items() if name in self._trained}
        if any(
            getattr(m, slot).is_complex() for m in module.modules() for slot in parameter_slots(m) if (m, slot) in slots
        ):
            raise UnsupportedGradientError("the rules of layers are for real parameters, and some here are complex.")
        plans: list[Plans] = []
        changes = False
        missing = {m for m in module.modules() if any((m, slot) in slots for slot in parameter_slots(m))}
        for seed in range(self._seed, self._seed + _SEEDS):
            run = DryRun(module, arguments, self._batch_first, size, slots, self._observe, whole, 7919 * seed)
            plan = Plans(run)
            changes |= run.changes_buffers
            if not plans or missing & plan.modules:
                plans.append(plan)
            missing -= plan.modules
            if not missing or not run.draws or self.sharded:
                break
        first = plans[0].of(module, 0)
        return Way(module, whole, plans, first.outputs if first else (), changes)

    def _shared_of(self, plans: Plans) -> set[str]:
        uses = Counter(self._names[slot] for used in plans.uses for slot in used)
        return {name for name, count in uses.items() if count > 1}

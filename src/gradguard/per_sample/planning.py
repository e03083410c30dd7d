"""Keeps the plans of each way in which a module is called, and makes new ones when it is called in a new way."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gradguard.distributed.placements import is_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.dry_run import DryRun, Slot
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.plan import CallPlan, Plans
from gradguard.per_sample.samples import Arguments, other_candidates, signature
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
        unverified: A plan was made that nothing has been compared with yet.
        shared: Parameters that more than one call uses.
        whole: Positions of tensors, in the current call's arguments, that belong to no sample though their size fits.
    """

    def __init__(self, batch_first: bool, names: Mapping[Slot, str], observe: Any) -> None:
        # Under FSDP2 every dry run is a collective, so all processes must do the same ones, whatever their batches.
        self._sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self._batch_first, self._names, self._observe = batch_first, names, observe
        self._plans: dict[Any, tuple[list[Plans], frozenset[int]]] = {}
        self._current: list[Plans] = []
        self._trained: frozenset[str] = frozenset()
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._seed = 0
        self.unverified = False
        self.shared: frozenset[str] = frozenset()
        self.whole: frozenset[int] = frozenset()

    def train(self, names: frozenset[str]) -> None:
        """Take note of the parameters that are trained now; what was planned without one of them is planned again."""
        if not names <= self._trained:
            self.forget()
            self._trained = names

    def forget(self) -> None:
        """Plan anew from the next call on, with other random numbers."""
        self._plans.clear()
        self._seed += _SEEDS

    def restart(self) -> None:
        """Count the calls of each module from the beginning."""
        self._calls.clear()

    def begin(self, module: nn.Module, arguments: Arguments, size: int) -> None:
        """An outermost call starts: plan it, if it is of a new kind."""
        key = (module, signature(arguments, sizes=not self._sharded))
        if key not in self._plans:
            self._plans[key] = self._plan(module, arguments, size)
            self.unverified = True
            self.shared = frozenset().union(*[self._shared_of(p) for plans, _ in self._plans.values() for p in plans])
        self._current, self.whole = self._plans[key]

    def output_axes(self, module: nn.Module) -> Sequence[BatchAxis | None]:
        """Return the batch axis of each tensor that the current outermost call returns."""
        plan = self._current[0].of(module, 0)
        return plan.outputs if plan else ()

    def next(self, module: nn.Module) -> CallPlan | None:
        """Return the plan of the next call of ``module``, None if no dry run has seen it."""
        number = self._calls[module]
        self._calls[module] += 1
        others = [p for plans, _ in self._plans.values() for p in plans]
        return next((plan for p in (*self._current, *others) if (plan := p.of(module, number))), None)

    def uses_trained(self, module: nn.Module) -> bool:
        """Tell whether ``module`` or a layer in it holds a trained parameter."""
        return any(self._names.get((m, slot)) in self._trained for m in module.modules() for slot in parameter_slots(m))

    def _plan(self, module: nn.Module, arguments: Arguments, size: int) -> tuple[list[Plans], frozenset[int]]:
        others = [] if self._sharded else other_candidates(arguments, self._batch_first, size)
        attempts = [frozenset(), *[frozenset([i]) for i in others], frozenset(others)] if others else [frozenset()]
        failure: UnsupportedGradientError | None = None
        for whole in attempts:
            try:
                return self._dry_runs(module, arguments, size, whole), whole
            except UnsupportedGradientError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _dry_runs(self, module: nn.Module, arguments: Arguments, size: int, whole: frozenset[int]) -> list[Plans]:
        """One plan; or several where layers are left out by chance, so that each is seen."""
        slots = {slot for slot, name in self._names.items() if name in self._trained}
        plans: list[Plans] = []
        missing = {m for m in module.modules() if any((m, slot) in slots for slot in parameter_slots(m))}
        for seed in range(self._seed, self._seed + _SEEDS):
            run = DryRun(module, arguments, self._batch_first, size, slots, self._observe, whole, 7919 * seed)
            plan = Plans(run)
            if not plans or missing & plan.modules:
                plans.append(plan)
            missing -= plan.modules
            if not missing or not plan.draws or self._sharded:
                break
        return plans

    def _shared_of(self, plans: Plans) -> set[str]:
        uses = Counter(self._names[slot] for used in plans.uses for slot in used)
        return {name for name, count in uses.items() if count > 1}

"""The plan of each call of each layer: its own rule, torch.func on its own code, or nothing.

There are plans for each way in which a module is called; it is planned anew when it is called in a new way.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

from torch import nn

from gradguard.distributed.placements import is_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Batch, Slot
from gradguard.per_sample.dry_run import RESULT, DryRun, ObservedBy
from gradguard.per_sample.layers.call import Axes, BatchAxis
from gradguard.per_sample.layers.embedding import refuse_coupling
from gradguard.per_sample.layers.registry import LayerRule, rule_for
from gradguard.per_sample.operation_trace import KnownOperations
from gradguard.per_sample.operations import PlannedOperation, planned
from gradguard.torch_private import parameter_slots


class Treatment(Enum):
    """How a call gives per-sample gradients."""

    NOTHING = "uses no trained parameter by itself"
    RULE = "a layer with a rule of its own"
    OPERATIONS = "code that does nothing but known operations with trained parameters: these are tapped"
    RESULT = "an embedding without samples, of positions say, whose result goes into one known operation of its caller"
    VMAP_FALLBACK = (
        "code that uses trained parameters: differentiated with torch.func, without the layers that it calls"
    )


@dataclass(frozen=True)
class CallPlan:
    """The plan of a call.

    Attributes:
        treatment: How it gives per-sample gradients.
        sees_samples: Whether anything that it returns belongs to samples.
        inputs: Batch axis of each tensor that it gets.
        outputs: Batch axis of each tensor that it returns.
        uses: Trained parameters that its own code uses, those of layers that see no sample included.
        rule: For `Treatment.RULE`.
        in_place: Its own code writes into what the layers that it called have returned.
        operations: For `Treatment.OPERATIONS`, by the parameter, or the result of an embedding.
    """

    treatment: Treatment
    sees_samples: bool
    inputs: tuple[BatchAxis | None, ...]
    outputs: tuple[BatchAxis | None, ...]
    uses: frozenset[Slot] = frozenset()
    rule: LayerRule | None = None
    in_place: bool = False
    operations: Mapping[Slot, PlannedOperation] = field(default_factory=dict)


class Plans:
    """The plans of one outermost module: for each module, for each of its calls.

    Args:
        run: The outermost module on two and on three samples.

    Attributes:
        calls: The plans of each module that ran: one for all its calls, or one for each.
        uses: Which parameters each call uses that gives per-sample gradients.
    """

    def __init__(self, run: DryRun) -> None:
        sees = [run.grows(i) for i in range(len(run.calls))]
        uses, draws = [set[Slot]() for _ in run.calls], [call.draws for call in run.calls]
        found: dict[nn.Module, list[CallPlan]] = defaultdict(list)
        self.uses: list[frozenset[Slot]] = []
        treated: dict[int, tuple[Treatment, LayerRule | None, Mapping[Slot, PlannedOperation]]] = {}
        within: dict[int, list[int]] = defaultdict(list)  # position embeddings, say: a part of the code that calls them
        for i, call in reversed(list(enumerate(run.calls))):  # a call comes after its caller
            treated[i] = Treatment.NOTHING, None, {}
            parts = [part for part in within[i] if uses[part]]
            uses[i] = {slot for slot in call.uses if slot[1] != RESULT}.union(*[uses[part] for part in parts])
            draws[i] |= any(draws[part] for part in within[i])
            if not sees[i] and call.caller >= 0:
                within[call.caller].append(i)
            elif not sees[i] and uses[i]:
                raise UnsupportedGradientError(
                    f"{type(call.module).__name__} was called by itself and returned the same for any number of "
                    "samples, or nothing that can be looked into, so its parameters' gradients belong to no sample. "
                    "Call it inside the module's forward, and return tensors, tuples, lists or dicts."
                )
            elif uses[i]:
                rule = rule_for(call.module)
                own = {(m, slot) for m in call.module.modules() for slot in parameter_slots(m)}
                known = _known_operations(run, i, [run.calls[part].module for part in parts])
                if rule is not None and uses[i] <= own:
                    treated[i] = Treatment.RULE, rule, {}
                elif known is not None:
                    treated[i] = Treatment.OPERATIONS, None, known
                    treated |= {part: (Treatment.RESULT, rule_for(run.calls[part].module), {}) for part in parts}
                elif draws[i]:
                    raise UnsupportedGradientError(
                        f"the code of {type(call.module).__name__} uses parameters by itself and draws random numbers "
                        "(F.dropout, say), so it cannot be run again for each sample. Move dropout into a layer of its "
                        "own (nn.Dropout)."
                    )
                else:
                    treated[i] = Treatment.VMAP_FALLBACK, None, {}
                self.uses.append(frozenset(uses[i]))
        for i, call in enumerate(run.calls):
            treatment, rule, operations = treated[i]
            within_fallback = call.caller >= 0 and treated[call.caller][0] is Treatment.VMAP_FALLBACK
            tapped = treatment in (Treatment.RULE, Treatment.VMAP_FALLBACK)
            needed = call.caller < 0 or tapped or (within_fallback and sees[i])
            inputs, outputs = run.axes(i) if needed else ([], [])
            used = frozenset(uses[i])
            plan = CallPlan(treatment, sees[i], tuple(inputs), tuple(outputs), used, rule, call.in_place, operations)
            found[call.module].append(plan)
        self.calls = {m: plans[:1] if plans.count(plans[0]) == len(plans) else plans for m, plans in found.items()}

    def of(self, module: nn.Module, call: int) -> CallPlan | None:
        """Return the plan of call number ``call`` of ``module``; None if the module did not run in the dry run.

        Raises:
            UnsupportedGradientError: If its calls differ and are not as many as in the dry run.
        """
        plans = self.calls.get(module)
        if plans is None:
            return None
        if len(plans) == 1:
            return plans[0]
        if call >= len(plans):
            raise UnsupportedGradientError(
                f"{type(module).__name__} is called a varying number of times, with samples in varying places. Use "
                "a module of its own for each kind of call."
            )
        return plans[call]


def _known_operations(run: DryRun, i: int, parts: Sequence[nn.Module]) -> dict[Slot, PlannedOperation] | None:
    """Return the operations of a call with parameters and with results of ``parts``; None if it does anything else."""
    call = run.calls[i]
    known = planned(call.operations, run.runs[1][i].operations)
    if known is None or call.uses != known.keys():
        return None
    for part in parts:
        result = part, RESULT
        calls = [each for each in run.calls if each.module is part]
        users = [each for each in run.calls if result in each.uses]
        uses = [one for one in call.operations if one is not None and result in one.slots]
        if result not in known or max(len(calls), len(users), len(uses)) > 1:
            return None
        if known[result].kind not in ("sum", "product"):
            return None
    return known


@dataclass
class CallPattern:
    """The facts of one way of calling a module.

    Attributes:
        module: The module that is called.
        whole: Positions of tensors, among its arguments, that belong to no sample though their size fits.
        plans: Plans of the calls of the layers in it; none where samples are run one by one.
        output_axes: Batch axis of each tensor that it returns.
        changes_buffers: It changes its buffers.
        draws: It draws random numbers, dropout apart: maybe Python's or NumPy's.
        reason: Why samples are run one by one; "" where they are not.
        sizes: Batch sizes that it was verified with.
        precision: Machine epsilon of the coarsest dtype that is computed in.
        unowned: Refusals of a gradient of one of the tensors that it returns, by position.
        operations: Operations of the calls that were found to be right.
    """

    module: nn.Module
    whole: frozenset[int]
    plans: list[Plans]
    output_axes: Axes
    changes_buffers: bool
    draws: bool = False
    reason: str = ""
    sizes: set[int] = field(default_factory=set)
    precision: float = 2.0**-23
    unowned: dict[int, str] = field(default_factory=dict)
    operations: KnownOperations = field(default_factory=KnownOperations)

    @property
    def looped(self) -> bool:
        """Whether samples are run one by one."""
        return bool(self.reason)


_SEEDS = 16
"""Dry runs of a model that draws random numbers, in which layers are left out by chance."""


class LayerPlanner:
    """Plans by outermost module and by the form of its arguments.

    Args:
        names: The name of each parameter by where it is held.
        observed_by: A block in which an `Observer` hears of the calls of modules.

    Attributes:
        patterns: The pattern of each kind of call, in each state of the model.
        shared: Parameters that more than one call uses.
        sharded: Parameters are spread over processes.
        changes_buffers: A call was found to change buffers after its trial, so any may.
    """

    def __init__(self, names: Mapping[Slot, str], observed_by: ObservedBy) -> None:
        # Under FSDP2 every dry run is a collective, so all processes must do the same ones, whatever their batches.
        self.sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self._names, self._observed_by = names, observed_by
        self.patterns: dict[Hashable, CallPattern] = {}
        self._current: list[Plans] = []
        self._trained: frozenset[str] = frozenset()
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._seed = 0
        self._unexpected = 0
        self.changes_buffers = False
        self.shared: frozenset[str] = frozenset()

    def train(self, names: frozenset[str]) -> None:
        """Take note of the parameters that are trained now; what was planned without one of them is planned again."""
        if not names <= self._trained:
            self.forget()
            self._trained = names

    def forget(self) -> None:
        """Plan anew from the next call on, with other random numbers."""
        self.patterns.clear()
        self._seed += _SEEDS

    def unexpected(self) -> None:
        """A layer ran that no plan knows. If that happens again, samples are run one by one."""
        self._unexpected += 1
        self.forget()

    def restart(self) -> None:
        """Count the calls of each module from the beginning."""
        self._calls.clear()

    def plan(self, module: nn.Module, batch: Batch, key: Hashable) -> CallPattern:
        """Plan an outermost call of a new kind.

        Args:
            module: The outermost module.
            batch: Its arguments.
            key: The kind of the call and the state of the model, by which `patterns` holds the plan.

        Returns:
            The plan.

        Raises:
            UnsupportedGradientError: If its samples cannot be told apart.
        """
        self.patterns[key] = self._plan(module, batch)
        uses = [Counter(self._names[slot] for used in plans.uses for slot in used) for plans in self._all_plans()]
        self.shared = frozenset(name for counts in uses for name, count in counts.items() if count > 1)
        return self.patterns[key]

    def run_one_by_one(self, pattern: CallPattern, batch: Batch, reason: str) -> None:
        """Run the samples of ``pattern`` one by one from now on, because of ``reason``."""
        outermost = self._outermost(pattern.module, batch)
        pattern.output_axes, pattern.unowned = outermost.output_axes, outermost.unowned
        pattern.plans, pattern.reason = [], reason

    def resume(self, pattern: CallPattern) -> None:
        """The calls that come belong to ``pattern``."""
        self._current = pattern.plans

    def next(self, module: nn.Module) -> CallPlan | None:
        """Return the plan of the next call of ``module``, None if no dry run has seen it."""
        number = self._calls[module]
        self._calls[module] += 1
        for plans in chain(self._current, self._all_plans()):
            if (plan := plans.of(module, number)) is not None:
                return plan
        return None

    def _all_plans(self) -> Iterator[Plans]:
        return chain.from_iterable(pattern.plans for pattern in self.patterns.values())

    def uses_trained(self, module: nn.Module) -> bool:
        """Tell whether ``module`` or a layer in it holds a trained parameter."""
        return any(self._names.get((m, slot)) in self._trained for m in module.modules() for slot in parameter_slots(m))

    def _plan(self, module: nn.Module, batch: Batch) -> CallPattern:
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                refuse_coupling(layer)
        others, fixed = [] if self.sharded else batch.other_candidates, batch.of_no_sample
        attempts = [fixed, *[fixed | {i} for i in others], *([fixed.union(others)] if others else [])]
        batches = [replace(batch, whole=whole) for whole in attempts]
        failure: UnsupportedGradientError | None = None
        for one in batches:
            try:
                if self._unexpected < 2:
                    return self._dry_runs(module, one)
            except UnsupportedGradientError as error:
                failure = failure or error
        reason = str(failure) if failure else "different layers run in each step."
        for one in batches if not self.sharded else []:
            try:
                pattern = self._outermost(module, one)
            except UnsupportedGradientError as error:
                failure = failure or error
            else:
                pattern.reason = reason
                return pattern
        assert failure is not None
        raise failure

    def _outermost(self, module: nn.Module, batch: Batch) -> CallPattern:
        """Return the facts that are known without following the layers inside."""
        run = DryRun(module, batch, self._slots(), self._observed_by, self._seed, structure=False)
        changes = self.changes_buffers or run.changes_buffers
        return CallPattern(module, batch.whole, [], run.axes(0)[1], changes, unowned=run.untold)

    def _dry_runs(self, module: nn.Module, batch: Batch) -> CallPattern:
        """One plan; or several where layers are left out by chance, so that each is seen."""
        slots = self._slots()
        missing = {m for m in module.modules() if any((m, slot) in slots for slot in parameter_slots(m))}
        if any(getattr(m, slot).is_complex() for m, slot in slots if m in missing):
            raise UnsupportedGradientError("the rules of layers are for real parameters, and some here are complex.")
        plans: list[Plans] = []
        changes, draws, untold = self.changes_buffers, False, dict[int, str]()
        for seed in range(self._seed, self._seed + _SEEDS):
            run = DryRun(module, batch, slots, self._observed_by, 7919 * seed)
            plan = Plans(run)
            changes |= run.changes_buffers
            draws |= run.draws
            untold |= run.untold
            if not plans or missing & plan.calls.keys():
                plans.append(plan)
            missing -= plan.calls.keys()
            if not missing or not run.draws or self.sharded:
                break
        first = plans[0].of(module, 0)
        return CallPattern(module, batch.whole, plans, first.outputs if first else (), changes, draws, unowned=untold)

    def _slots(self) -> set[Slot]:
        """Where trained parameters are held."""
        return {slot for slot, name in self._names.items() if name in self._trained}

"""Plans for the calls of each layer: the layer's rule, torch.func on the layer's own code, or nothing.

Each way of calling the outermost module has plans of its own; a new way of calling it is planned first.
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
from gradguard.per_sample.dry_run import RESULT, DryRun, ObservedBy, run_quietly
from gradguard.per_sample.layers.call import Axes, BatchAxis
from gradguard.per_sample.layers.embedding import refuse_coupling
from gradguard.per_sample.layers.registry import LayerRule, rule_for
from gradguard.per_sample.operation_trace import KnownOperations
from gradguard.per_sample.operations import PlannedOperation, planned
from gradguard.per_sample.row_choices import SafeSelections
from gradguard.torch_private import parameter_slots


class Treatment(Enum):
    """How the per-sample gradients of a call are computed."""

    NOTHING = "uses no trained parameter by itself"
    RULE = "a layer with a rule of its own"
    OPERATIONS = "code that does nothing but known operations with trained parameters: these are tapped"
    RESULT = "an embedding without samples, e.g. of positions, whose result goes into one known operation of its caller"
    VMAP_FALLBACK = (
        "code that uses trained parameters: differentiated with torch.func, without the layers that it calls"
    )


@dataclass(frozen=True)
class CallPlan:
    """The plan of a call.

    Attributes:
        treatment: How the call's per-sample gradients are computed.
        sees_samples: Whether any output of the call belongs to samples.
        inputs: Batch axis of each input tensor.
        outputs: Batch axis of each output tensor.
        uses: Trained parameters that the call's own code uses, including those of layers that it calls without samples.
        rule: The layer's rule, for `Treatment.RULE` and `Treatment.RESULT`.
        in_place: Whether the call's own code writes into outputs of layers that it calls.
        operations: For `Treatment.OPERATIONS`, the operation of each parameter or embedding's result.
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
    """The plans of all calls in one outermost module.

    Args:
        run: The dry run of the outermost module on two and on three samples.

    Attributes:
        calls: The plans of each module that ran: one for all its calls, or one for each call.
        uses: The parameters of each call that uses any.
        selections: The operations of the dry run that select rows.
    """

    def __init__(self, run: DryRun) -> None:
        sees = [run.grows(i) for i in range(len(run.calls))]
        uses, draws = [set[Slot]() for _ in run.calls], [call.draws for call in run.calls]
        found: dict[nn.Module, list[CallPlan]] = defaultdict(list)
        self.uses: list[frozenset[Slot]] = []
        self.selections: SafeSelections = run.selections
        treated: dict[int, tuple[Treatment, LayerRule | None, Mapping[Slot, PlannedOperation]]] = {}
        # Calls without samples, such as of position embeddings, count as a part of the code that calls them.
        within: dict[int, list[int]] = defaultdict(list)
        for i, call in reversed(list(enumerate(run.calls))):  # a call comes after its caller
            treated[i] = Treatment.NOTHING, None, {}
            parts = [part for part in within[i] if uses[part]]
            uses[i] = {slot for slot in call.uses if slot[1] != RESULT}.union(*[uses[part] for part in parts])
            draws[i] |= any(draws[part] for part in within[i])
            if not sees[i] and call.caller >= 0:
                within[call.caller].append(i)
            elif not sees[i] and uses[i]:
                raise UnsupportedGradientError(
                    f"{type(call.module).__name__} was called by itself. It returned the same shapes for two samples "
                    "as for three, or nothing that gradguard can read, so its parameters' gradients belong to no "
                    "sample. Call it inside the module's forward, and return tensors, tuples, lists or dicts."
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
                        f"the code of {type(call.module).__name__} uses parameters itself and draws random numbers "
                        "(F.dropout, for example), so it cannot be run again for each sample. Move dropout into a "
                        "layer of its own (nn.Dropout)."
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
            UnsupportedGradientError: If the module's calls differ and there are more than in the dry run.
        """
        plans = self.calls.get(module)
        if plans is None:
            return None
        if len(plans) == 1:
            return plans[0]
        if call >= len(plans):
            raise UnsupportedGradientError(
                f"{type(module).__name__} is called a varying number of times, and its calls differ in their samples "
                "or parameters. Use a separate module for each kind of call."
            )
        return plans[call]


def _known_operations(run: DryRun, i: int, parts: Sequence[nn.Module]) -> dict[Slot, PlannedOperation] | None:
    """Return the operations of a call with its parameters and with results of ``parts``; None if any is unknown."""
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
    """The properties of one way of calling a module.

    Attributes:
        module: The module that is called.
        whole: Names of parts of arguments that belong to no sample, although their batch dimension has size B.
        second: Names of tensors in the arguments with the samples along the second dimension.
        plans: Plans of the calls of the layers in the module; empty if samples run one by one.
        output_axes: Batch axis of each output tensor.
        changes_buffers: Whether the module changes its buffers.
        draws: Whether the module draws random numbers other than for dropout, possibly Python's or NumPy's.
        reason: Why samples run one by one; "" if they do not.
        sizes: Batch sizes that were verified.
        precision: Machine epsilon of the coarsest dtype of the computation.
        unowned: Refusals of the gradients of outputs that belong to no sample, by position of the output.
        operations: The operations of verified calls.
    """

    module: nn.Module
    whole: frozenset[str]
    second: frozenset[str]
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
        """Whether samples run one by one."""
        return bool(self.reason)


_SEEDS = 16
"""The most dry runs of a model that draws random numbers, which may skip layers at random."""


class LayerPlanner:
    """Make and store plans, by outermost module, form of its arguments and state of the model.

    Args:
        names: The name of the parameter at each module and attribute.
        observed_by: Makes a block in which a `CallObserver` gets the calls of modules.

    Attributes:
        patterns: The pattern of each kind of call, in each state of the model.
        shared: Parameters that more than one call uses.
        sharded: Whether parameters are sharded over processes.
        changes_buffers: Whether a call was found to change buffers after its rehearsal, so that any call may.
        choosing: Modules that chose rows of samples by values, each with the reason why its samples run one by one.
    """

    def __init__(self, names: Mapping[Slot, str], observed_by: ObservedBy) -> None:
        self.sharded = any(is_sharded(getattr(module, slot)) for module, slot in names)
        self._names, self._observed_by = names, observed_by
        self.patterns: dict[Hashable, CallPattern] = {}
        self._current: list[Plans] = []
        self._trained: frozenset[str] = frozenset()
        self._trained_now: frozenset[str] = frozenset()
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._seed = 0
        self._unexpected = 0
        self.changes_buffers = False
        self.choosing: dict[nn.Module, str] = {}
        self.shared: frozenset[str] = frozenset()

    def train(self, names: frozenset[str]) -> None:
        """Set the names of the trained parameters; drop all plans if there are new ones."""
        self._trained_now = names
        if not names <= self._trained:
            self.forget()
            self._trained = names

    def forget(self) -> None:
        """Drop all plans; the next dry runs use other seeds."""
        self.patterns.clear()
        self._seed += _SEEDS

    def unexpected(self) -> None:
        """Count a layer that ran without a plan, and drop all plans; after the second, samples run one by one."""
        self._unexpected += 1
        self.forget()

    def restart(self) -> None:
        """Restart the count of calls of each module."""
        self._calls.clear()

    def plan(self, module: nn.Module, batch: Batch, key: Hashable) -> CallPattern:
        """Plan an outermost call of a new kind.

        Args:
            module: The outermost module.
            batch: The arguments of the call.
            key: The kind of the call and the state of the model; the key of the pattern in `patterns`.

        Returns:
            The pattern of the call.

        Raises:
            UnsupportedGradientError: If the samples of the call cannot be told apart.
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
        """Use the plans of ``pattern`` for the calls that follow."""
        self._current = pattern.plans

    def next(self, module: nn.Module) -> CallPlan | None:
        """Return the plan of the next call of ``module``; None if ``module`` ran in no dry run."""
        number = self._calls[module]
        self._calls[module] += 1
        for plans in chain(self._current, self._all_plans()):
            if (plan := plans.of(module, number)) is not None:
                return plan
        return None

    def _all_plans(self) -> Iterator[Plans]:
        return chain.from_iterable(pattern.plans for pattern in self.patterns.values())

    def uses_trained(self, module: nn.Module) -> bool:
        """Return whether ``module`` or a layer in it holds a parameter that is trained now."""
        now = self._trained_now
        return any(self._names.get((m, slot)) in now for m in module.modules() for slot in parameter_slots(m))

    def _plan(self, module: nn.Module, batch: Batch) -> CallPattern:
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                refuse_coupling(layer)
        others, fixed = batch.other_candidates, batch.of_no_sample
        attempts = [fixed, *[fixed | {i} for i in others], *([fixed.union(others)] if others else [])]
        batches = [replace(batch, whole=whole) for whole in attempts]
        if second := batches[-1].second_candidates:
            batches += [replace(batch, whole=whole - second, second=second) for whole in (fixed, attempts[-1])]
        failure: UnsupportedGradientError | None = None
        for one in batches:
            try:
                if module in self.choosing and not self.sharded:
                    raise UnsupportedGradientError(self.choosing[module])
                if self._unexpected < 2 or self.sharded:
                    return self._dry_runs(module, one)
            except UnsupportedGradientError as error:
                failure = failure or error
        reason = str(failure) if failure else "different layers run in each step."
        for one in batches if not self.sharded else []:  # in backward, all processes must pass through the same layers
            try:
                pattern = self._outermost(module, one)
            except UnsupportedGradientError as error:
                failure = failure or error
            else:
                pattern.reason = reason
                return pattern
        assert failure is not None
        if isinstance(failure.__cause__, Exception):  # raises the user's own error if the whole batch has it too
            run_quietly(module, batch, self._observed_by)
        raise failure

    def _outermost(self, module: nn.Module, batch: Batch) -> CallPattern:
        """Return a pattern without plans for the layers inside, for samples that run one by one."""
        run = DryRun(module, batch, self._slots(), self._observed_by, self._seed, structure=False)
        changes = self.changes_buffers or run.changes_buffers
        return CallPattern(module, batch.whole, batch.second, [], run.axes(0)[1], changes, unowned=run.untold)

    def _dry_runs(self, module: nn.Module, batch: Batch) -> CallPattern:
        """Return a pattern with plans from one dry run, or from several if the model skips layers at random."""
        slots = self._slots()
        missing = {m for m in module.modules() if any((m, slot) in slots for slot in parameter_slots(m))}
        if any(getattr(m, slot).is_complex() for m, slot in slots if m in missing):
            raise UnsupportedGradientError("the rules of layers need real parameters, but some here are complex.")
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
            if not missing or not run.draws:
                break
        first = plans[0].of(module, 0)
        outputs = first.outputs if first else ()
        return CallPattern(module, batch.whole, batch.second, plans, outputs, changes, draws, unowned=untold)

    def _slots(self) -> set[Slot]:
        """Return the modules and attributes that hold trained parameters."""
        return {slot for slot, name in self._names.items() if name in self._trained}

"""What to do at each call of each layer: its own rule, torch.func on its own code, or nothing."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.dry_run import DryRun, Slot
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.layers.registry import Rule, rule_for
from gradguard.per_sample.operations import PlannedOperation, planned
from gradguard.torch_private import parameter_slots


class Treatment(Enum):
    """How a call gives per-sample gradients."""

    NOTHING = "uses no trained parameter by itself"
    RULE = "a layer with a rule of its own"
    OPERATIONS = "code that does nothing but known operations with trained parameters: these are tapped"
    OWN_CODE = "code that uses trained parameters: differentiated with torch.func, the layers that it calls left out"


@dataclass(frozen=True)
class CallPlan:
    """What to do at a call.

    Attributes:
        treatment: How it gives per-sample gradients.
        sees_samples: Whether anything that it returns belongs to samples.
        inputs: Batch axis of each tensor that it gets.
        outputs: Batch axis of each tensor that it returns.
        uses: Trained parameters that its own code uses, those of layers that see no sample included.
        rule: For `Treatment.RULE`.
        in_place: Its own code writes into what the layers that it called have returned.
        operations: For `Treatment.OPERATIONS`, by the parameter's name in the module.
    """

    treatment: Treatment
    sees_samples: bool
    inputs: tuple[BatchAxis | None, ...]
    outputs: tuple[BatchAxis | None, ...]
    uses: frozenset[Slot] = frozenset()
    rule: Rule | None = None
    in_place: bool = False
    operations: Mapping[str, PlannedOperation] = field(default_factory=dict)


class Plans:
    """The plans of one outermost module: for each module, for each of its calls.

    Args:
        run: The outermost module on two and on three samples.

    Attributes:
        modules: All modules that ran.
        uses: Which parameters each call uses that gives per-sample gradients.
    """

    def __init__(self, run: DryRun) -> None:
        sees = [_grows(run, i) for i in range(len(run.calls))]
        treatments, uses, operations = _treatments(run, sees)
        draws = _draws(run, sees)
        found: dict[nn.Module, list[CallPlan]] = defaultdict(list)
        for i, call in enumerate(run.calls):
            if treatments[i] is Treatment.OWN_CODE and draws[i]:
                raise UnsupportedGradientError(
                    f"the code of {type(call.module).__name__} uses parameters by itself and draws random numbers "
                    "(F.dropout, say), so it cannot be run again for each sample. Move dropout into a layer of its own "
                    "(nn.Dropout)."
                )
            within_own_code = call.caller >= 0 and treatments[call.caller] is Treatment.OWN_CODE
            tapped = treatments[i] in (Treatment.RULE, Treatment.OWN_CODE)
            needed = call.caller < 0 or tapped or (within_own_code and sees[i])
            inputs, outputs = run.axes(i) if needed else ([], [])
            rule = rule_for(call.module) if treatments[i] is Treatment.RULE else None
            plan = CallPlan(
                treatments[i],
                sees[i],
                tuple(inputs),
                tuple(outputs),
                frozenset(uses[i]),
                rule,
                call.in_place,
                operations.get(i, {}),
            )
            found[call.module].append(plan)
        self._calls = {m: plans[:1] if plans.count(plans[0]) == len(plans) else plans for m, plans in found.items()}
        self.modules = set(found)
        self.uses = [frozenset(uses[i]) for i, t in enumerate(treatments) if t is not Treatment.NOTHING]
        self._counts = {m: len(plans) for m, plans in found.items()}

    def of(self, module: nn.Module, call: int) -> CallPlan | None:
        """Return the plan of call number ``call`` of ``module``; None if the module did not run in the dry run.

        Raises:
            UnsupportedGradientError: If its calls differ and are not as many as in the dry run.
        """
        plans = self._calls.get(module)
        if plans is None:
            return None
        if len(plans) == 1:
            return plans[0]
        if len(plans) != self._counts[module] or call >= len(plans):
            raise UnsupportedGradientError(
                f"{type(module).__name__} is called a varying number of times, with samples in varying places. Use "
                "a module of its own for each kind of call."
            )
        return plans[call]


def _treatments(
    run: DryRun, sees: list[bool]
) -> tuple[list[Treatment], list[set[Slot]], dict[int, dict[str, PlannedOperation]]]:
    """How each call is treated, which parameters its own code uses, and the known operations with these."""
    uses = [set(call.uses) for call in run.calls]
    operations: dict[int, dict[str, PlannedOperation]] = {}
    treatments = [Treatment.NOTHING] * len(uses)
    for i in reversed(range(len(uses))):  # a call comes after its caller
        call = run.calls[i]
        if not uses[i]:
            continue
        if sees[i]:
            own = {(m, slot) for m in call.module.modules() for slot in parameter_slots(m)}
            has_rule = rule_for(call.module) is not None and uses[i] <= own
            known = planned(call.operations, run.runs[1][i].operations)
            if has_rule:
                treatments[i] = Treatment.RULE
            elif known is not None and uses[i] == {(call.module, slot) for slot in known}:
                treatments[i], operations[i] = Treatment.OPERATIONS, known
            else:
                treatments[i] = Treatment.OWN_CODE
        elif call.caller < 0:
            raise UnsupportedGradientError(
                f"{type(call.module).__name__} was called by itself and returned the same for any number of samples, "
                "or nothing that can be looked into, so its parameters' gradients belong to no sample. Call it inside "
                "the module's forward, and return tensors, tuples, lists or dicts."
            )
        else:  # position embeddings, for example: a part of the code that called them
            uses[call.caller] |= uses[i]
    return treatments, uses, operations


def _draws(run: DryRun, sees: list[bool]) -> list[bool]:
    """Which calls draw random numbers; a layer that sees no samples (dropout of positions) is part of its caller."""
    draws = [call.draws for call in run.calls]
    for i in reversed(range(len(draws))):
        if draws[i] and not sees[i] and run.calls[i].caller >= 0:
            draws[run.calls[i].caller] = True
    return draws


def _grows(run: DryRun, i: int) -> bool:
    """Tell whether call ``i`` returns anything larger for three samples than for two."""
    two, three = run.runs[0][i], run.runs[1][i]
    return any(a != b for a, b in zip(two.outputs, three.outputs, strict=True))

"""Compare two saved runs: judge each parameter, and merge the outcomes that have one cause into one finding."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from gradguard.errors import RecordError
from gradguard.parity.judge import BARS, SKETCH_ROUNDING, Facts, Kind, Outcome, Outcomes, judge, name_of_factor
from gradguard.parity.parity_report import ParityFinding, ParityReport, Stage, Verdict, names
from gradguard.parity.saved import (
    BUFFER,
    COPIES,
    FROZEN,
    START,
    STATE,
    TRAINED,
    UPDATE,
    SavedGradients,
    SavedParameter,
    at_first,
    read,
)
from gradguard.parity.scales import is_same_setting
from gradguard.parity.vectors import Vector, distance, norm
from gradguard.words import counted, listed

Findings = Sequence[ParityFinding]
Run = SavedGradients | str | os.PathLike[str]

_AFTER_CLIP = ParityFinding(
    "clip",
    "a run clips between the backward passes of one step, or changes gradients between a clip and the step: the saved "
    "gradients may differ from the gradients that the optimizer takes",
)
_OTHER_MASKS = ParityFinding(
    "random",
    "a run draws random numbers, and other dropout masks would look like this; compare with p=0 or model.eval(), or "
    "with masks that are the same in both",
)
_MASKS_COUNT = ("different", "rows", "mixture", "ranks")  # outcomes that other dropout masks may cause
_KINDS = get_args(Kind)
_STATES = (STATE, COPIES)
"""The prefixes of stages in which a tensor may be missing in one run."""
_KERNELS = {"foreach", "fused", "capturable", "differentiable"}
_UNDECIDED = {"unknown", "noisy"}
_FOLLOWING = ("different", "ranks")  # outcomes of gradients computed from wrong ones


def compare(reference: Run, new: Run) -> ParityReport:
    r"""Compare two saved runs, stage by stage and parameter by parameter.

    Two gradients are equal if they are at most three bars apart. A bar is the largest change of a gradient in the runs
    that differ by rounding, in either set-up. It is at least :math:`\sqrt{n / 2}` half units in the last place, where n
    is 512 plus the number of micro-batches.

    **Guarantees.**

    * PASS: the comparison is conclusive for more than half of the parameters, and all of these are equal. A note names
      the others: parameters that are zero in both runs, that have no gradient in either run, or whose bar is a sixth of
      the gradient or more.
    * FAIL: the findings come from the first stage that differs. A note counts the differences of later stages.
    * Runs with different weights never pass: INCONCLUSIVE if gradients alone were saved and no gradient is missing
      or of another shape, else FAIL.
    * Runs whose optimizer settings differ, or in which a clip changed some of the gradients, never pass.
    * A difference is INCONCLUSIVE if a run drew random numbers and other dropout masks could cause the difference.

    Args:
        reference: The result or file of `gradguard.save_gradients` in the trusted set-up.
        new: The result or file in the other set-up.

    Returns:
        The report: FAIL if a gradient differs, INCONCLUSIVE if rounding or the set-ups leave the question open, else
        PASS.

    Raises:
        RecordError: If a file cannot be read, or the two cannot be compared.
    """
    a, b = (run if isinstance(run, SavedGradients) else read(run) for run in (reference, new))
    if a.hash_version != b.hash_version:
        raise RecordError(
            "the two runs were saved by versions of gradguard that sketch with different signs: save both with one "
            "version."
        )
    facts = facts_of(a, b)
    first, *later = [Stage("", _outcomes(a, b, facts)), *_later_stages(a, b, facts)]
    stages = sorted([first, *later], key=lambda stage: stage.name != START)  # the state before step 1 comes first
    begins = _other_weights(a, b)
    faults, doubts = (begins, []) if later and begins else (_first_apart(stages, facts), [*begins])
    if (a.random or b.random) and any(o.kind in _MASKS_COUNT for o in first.outcomes):
        doubts.append(_OTHER_MASKS)
    doubts += _unknown_stages(a, b, stages)
    if not faults:
        doubts += _unshown_settings(a, b)
    if a.clipped or b.clipped:
        doubts.append(_AFTER_CLIP)
    notes = (*_notes(a, first.outcomes), *_about_stages(a, b, stages, faults))
    return ParityReport(_verdict(faults, doubts), (*faults, *doubts), notes, first.outcomes, tuple(later))


def _outcomes(a: SavedGradients, b: SavedGradients, facts: Facts) -> tuple[Outcome, ...]:
    """Judge each parameter; one with too few numbers gets a factor if exactly one factor of other parameters fits."""
    of_a, of_b = a.measured(), b.measured()
    found = [judge(name, of_a.get(name), of_b.get(name), facts) for name in {**of_a, **of_b}]
    factors = [group[0] for group in _told_together([o for o in found if o.kind == "factor"])]
    return tuple(replace(o, kind="factor") if sum(_agree(o, one) for one in factors) == 1 else o for o in found)


def _later_stages(a: SavedGradients, b: SavedGradients, facts: Facts) -> list[Stage]:
    """Compare the stages saved in both runs; of optimizer states, compare the entries that both optimizers have."""
    shared = _kept_by(a) & _kept_by(b)
    found = []
    for name, one in a.later.items():
        if (other := b.later.get(name)) is not None:
            outcomes = _outcomes(one, other, facts)
            if name.startswith(_STATES):  # a tensor that is all zeros in both runs is left out
                tensors = [*one.measured().items(), *other.measured().items()]
                filled = {tensor for tensor, run in tensors if any(run.gradient)}
                outcomes = tuple(o for o in outcomes if _key_of(o.name) in shared and o.name in filled)
            found.append(Stage(name, outcomes))
    return [stage for stage in found if stage.outcomes]


def _kept_by(run: SavedGradients) -> set[str]:
    return {_key_of(p.name) for name, one in run.later.items() if name.startswith(_STATES) for p in one.parameters}


def _key_of(name: str) -> str:
    """Return the key in the optimizer's state: "exp_avg" for "exp_avg of 0.weight"; or the whole name of a buffer."""
    return name if name.startswith(BUFFER) else name.partition(" of ")[0]


def _first_apart(stages: Sequence[Stage], facts: Facts) -> list[ParityFinding]:
    """Return the findings of the first stage with a certain fault, and the undecided findings of the stages before."""
    found: list[ParityFinding] = []
    for stage in stages:
        found += [replace(one, stage=stage.name) for one in _findings(stage.outcomes, facts)]
        if not {one.kind for one in found} <= _UNDECIDED:
            break
    return found


def _unknown_stages(a: SavedGradients, b: SavedGradients, stages: Sequence[Stage]) -> list[ParityFinding]:
    """Return a finding for each reason why stages were not compared: missing in one run, or half of it inconclusive."""
    found = []
    for stage in stages:
        outcomes, blind = stage.outcomes, [o for o in stage.outcomes if o.kind == "blind"]
        if 2 * len(blind) >= len(outcomes):
            words = _about_blind(blind, len(outcomes)) if outcomes else "no run has a gradient, so nothing was compared"
            found.append(ParityFinding("blind", words, tuple(o.name for o in blind), stage=stage.name))
            break
    lacking = [n for n in {**a.later, **b.later} if (n in a.later) != (n in b.later) and not n.startswith(_STATES)]
    if lacking:
        words = f"one run alone has saved {listed(lacking, 2)}: save both with optimizer=, and with the same steps="
        found.append(ParityFinding("blind", words))
    both, alone = a.later.keys() & b.later.keys(), _kept_by(a) ^ _kept_by(b)
    if both and f"{UPDATE} 2" not in both and any(not one.startswith(BUFFER) for one in alone):
        words = "the optimizers' states have different entries, and one step does not show their effect: save several"
        found.append(ParityFinding("blind", words))
    return found


def _about_stages(a: SavedGradients, b: SavedGradients, stages: Sequence[Stage], faults: Findings) -> list[str]:
    """Return notes on optimizer settings that differ, on differences after a fault, and on the whole step."""
    notes = [] if len(stages) == 1 else _other_settings(a, b)
    if left_out := [*dict.fromkeys((*a.left_out, *b.left_out))]:
        notes.append(
            f"not compared: {names(left_out)}; further state outside of the model and the optimizers may be missed"
        )
    if faults and (apart := [stage for stage in stages if any(o.is_wrong for o in stage.outcomes)][1:]):
        counts = [
            f"{sum(o.is_wrong for o in s.outcomes):,} of {len(s.outcomes):,} in {s.name or 'the gradients'}"
            for s in apart
        ]
        notes.append(f"what may follow from it: {listed(counts, 3)}")
    if len(stages) > 1 and not faults:
        total = [o for stage in stages[1:] for o in stage.outcomes]
        known = [o for o in total if o.kind == "equal"]
        far = max((o.distance or 0.0 for o in total), default=0.0)
        least = max((stage.power for stage in stages if stage.name.startswith(UPDATE)), default=math.inf)
        notes.append(
            f"{counted(len(stages) - 1, 'later stage')}, to the {stages[-1].name}: {len(known):,} of {len(total):,} "
            f"tensors are equal, at most {far:.2g} bars apart"
            + (f"; an error of {least:.1g} of an update would show in the median one" if least < 1 else "")
        )
    return notes


def _other_settings(a: SavedGradients, b: SavedGradients) -> list[str]:
    """Return a note for each optimizer setting that differs, such as the weight decay of some parameters."""
    notes = [
        f"{_setting(key)} is {x:g} in the reference and {y:g} in the new run, of {names(sorted(parameters))}"
        for (key, x, y), parameters in sorted(_settings_apart(a, b).items())
    ]
    scales = [run.facts.get("loss scale", 1.0) for run in (a, b)]
    if 1 not in scales and scales[0] != scales[1]:
        notes.append(f"the loss scale is {scales[0]:g} in the reference and {scales[1]:g} in the new run")
    for who, here, there in (("the reference", a, b), ("the new run", b, a)):
        if alone := sorted(here.settings.keys() - there.settings.keys()):
            notes.append(f"the optimizer takes a gradient of these in {who} alone: {names(alone)}")
        if alone := sorted(_kept_by(here) - _kept_by(there)):
            notes.append(f"not compared, because only {who} has it in its optimizer's state or buffers: {names(alone)}")
    return notes


def _setting(key: str) -> str:
    return key if at_first(key) == TRAINED else f"the optimizer's {key}"


def _settings_apart(a: SavedGradients, b: SavedGradients) -> dict[tuple[str, float, float], list[str]]:
    """Return the parameters of each setting that differs, by setting and both values; kernel choices are ignored."""
    others: dict[tuple[str, float, float], list[str]] = {}
    for name in a.settings.keys() & b.settings.keys():
        x, y = a.settings[name], b.settings[name]
        known = {*_KERNELS}
        for key in x:  # the setting of the first step comes before the later ones, which are then skipped
            if key in y and at_first(key) not in known and not is_same_setting(x[key], y[key]):
                known.add(at_first(key))
                others.setdefault((key, x[key], y[key]), []).append(name)
    return others


def _unshown_settings(a: SavedGradients, b: SavedGradients) -> list[ParityFinding]:
    """Return a doubt if settings differ: an equal step does not prove that a setting has no effect later."""
    apart = _settings_apart(a, b)
    if not apart:
        return []
    first, *more = sorted({key for key, _, _ in apart})
    words = f"{listed([_setting(first), *more], 4)} differ, which the saved steps may not show"
    parameters = sorted({name for some in apart.values() for name in some})
    return [ParityFinding("settings", f"{words}: save more steps, or set both alike", tuple(parameters))]


def facts_of(a: SavedGradients, b: SavedGradients) -> Facts:
    """Return the numbers that may explain a factor: the facts of either run, and the ratio of facts that differ."""
    facts = {}
    for name in dict.fromkeys((*a.facts, *b.facts)):
        values = [run.facts[name] for run in (a, b) if name in run.facts]
        if len(set(values)) == 1 or 1 in values:
            facts[name] = max(values, key=lambda value: abs(math.log(value)))
        else:
            facts |= {f"{name} of the reference": values[0], f"{name} of the new run": values[1]}
            facts[f"ratio of {name}"] = values[1] / values[0]
    return facts


def _verdict(faults: Findings, doubts: Findings) -> Verdict:
    kinds = {doubt.kind for doubt in doubts}
    certain = {f.kind for f in faults} - _UNDECIDED
    if "weights" in kinds:
        certain &= {"missing", "extra", "shape"}
    if "random" in kinds:
        certain -= {*_MASKS_COUNT}
    return "FAIL" if certain else "INCONCLUSIVE" if faults or doubts else "PASS"


def _findings(outcomes: Outcomes, facts: Facts) -> list[ParityFinding]:
    """Return a finding for each fault, followed by the differences that a missing sum over ranks may have caused."""
    wrong = [outcome for outcome in outcomes if outcome.is_wrong]
    is_missing = any(o.reduction for o in wrong)
    followers = [o for o in wrong if is_missing and o.kind in _FOLLOWING and not o.reduction]
    causes = [o for o in wrong if o not in followers]
    found = [[_finding(group, len(outcomes), facts) for group in _told_together(some)] for some in (causes, followers)]
    for some in found:
        some.sort(key=lambda one: (_KINDS.index(one.kind), -len(one.parameters)))
    behind = (replace(f, message=f"{len(f.parameters):,} that may follow from it ({f.message})") for f in found[1])
    return [*found[0], *behind]


def _finding(group: Outcomes, total: int, facts: Facts) -> ParityFinding:
    """Merge a group of outcomes into one finding; a factor is taken from the parameter with the narrowest bar."""
    kind, names = group[0].kind, tuple(o.name for o in group)
    far = max((o.distance for o in group if o.distance is not None), default=None)
    first = min(group, key=lambda o: o.factor_bar)
    factor, width, name = first.factor, first.factor_bar, first.factor_name
    if kind == "factor":
        name = name_of_factor(factor, width, facts)
        how_many = f"{len(group):,} of {total:,} parameters" if len(group) > 1 else "one parameter"
        words = f"{how_many} {_times(factor, width, name)}"
        return ParityFinding(kind, words, names, far, factor, width, name)
    if not all(_agree(o, first) for o in group):
        return ParityFinding(kind, first.message or "different, and no factor", names, far)
    words = f"different; {_times(factor, width, name)} if it is a factor, which so few numbers may have by chance"
    return ParityFinding(kind, words, names, far)


def _told_together(outcomes: Outcomes) -> list[list[Outcome]]:
    """Group the outcomes that make one finding; each factor group begins with its narrowest bar."""
    groups: list[list[Outcome]] = []
    for one in sorted(outcomes, key=lambda o: o.factor_bar if o.kind == "factor" else 0.0):
        group = next((group for group in groups if _is_alike(one, group[0])), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _is_alike(one: Outcome, other: Outcome) -> bool:
    """Return whether two outcomes make one finding: factors that agree, mixtures with weights equal to two decimals."""
    if one.kind != other.kind or one.kind == "rows":
        return False
    if one.kind == "factor":
        return _agree(one, other)
    a, b = ([(name, round(weight, 2)) for name, (weight, _) in o.weights.items()] or o.message for o in (one, other))
    return a == b


def _agree(one: Outcome, other: Outcome) -> bool:
    return abs(one.factor - other.factor) <= one.factor_bar + other.factor_bar  # False of NaN


def _times(factor: float, width: float, name: str) -> str:
    digits = max(4, min(12, -math.floor(math.log10(width / abs(factor))))) if width and factor else 12
    return f"× {factor:.{digits}g} ± {width:.1g}" + (f" ({name})" if name else "")


def _other_weights(a: SavedGradients, b: SavedGradients) -> list[ParityFinding]:
    """Return a finding if weights differ by more than the rounding of storing them or of earlier steps."""
    of_b = _weights_of(b)
    wrong = []
    for name, (p, xs) in _weights_of(a).items():
        q, ys = of_b.get(name, (p, xs))
        coarse = max(p.weight_rounding, q.weight_rounding, SKETCH_ROUNDING)
        moved = max(distance(one, runs[0]) for runs in (xs, ys) for one in runs)
        if p.shape == q.shape and not distance(xs[0], ys[0]) <= max(2 * coarse * norm(xs[0]), BARS * moved):
            wrong.append(name)
    if not wrong:
        return []
    words = "the two runs have different weights, so their gradients need not agree; load one checkpoint into both"
    if any(len(run.sketches["weights"]) > 1 for run in (a, b)):
        words += ", begin with the same step of training in both (--at), or find the step that made them with --steps"
    return [ParityFinding("weights", words, tuple(wrong))]


def _weights_of(run: SavedGradients) -> dict[str, tuple[SavedParameter, tuple[Vector, ...]]]:
    """Return each weight's description and its sketch in each run, by name, including frozen weights."""
    weights = run.of_each("weights")
    return weights | run.stages[FROZEN].of_each("gradient") if FROZEN in run.stages else weights


def _about_blind(blind: Outcomes, total: int) -> str:
    """Return a message about parameters with an inconclusive comparison, with the reasons and a remedy."""
    zeros = sum(math.isinf(o.bar) for o in blind)
    reasons = [f"{zeros:,} are zero in both runs: save after some steps of training"] if zeros else []
    if noise := len(blind) - zeros:
        reasons.append(f"rounding makes more than a sixth of {noise:,}: compare in a higher precision")
    known_of = (
        f"nothing is known of {len(blind):,} of {total:,} parameters: half of the gradient would not show as wrong"
    )
    return f"{known_of} ({'; '.join(reasons)})"


def _notes(a: SavedGradients, outcomes: Outcomes) -> list[str]:
    notes = []
    blind = [o for o in outcomes if o.kind == "blind"]
    if blind and 2 * len(blind) < len(outcomes):
        notes.append(f"{_about_blind(blind, len(outcomes))}: {names([o.name for o in blind])}")
    if wanted := [o.name for o in outcomes if o.kind == "different" and o.name not in a.rows]:
        notes.append(f"to see which rows are wrong, save both again with rows=[...] of: {names(wanted)}")
    return notes

"""Causes in the loop or the model's connections: gradients that are kept, missing, or zero from the start."""

import statistics

from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.findings import Finding, named
from gradguard.monitoring.judge.numbers import capital, number
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.monitoring.record.lines import without_none

MISSING_SHARE = 0.2
"""Of all elements: frozen parts below it are no reason why a run does not learn."""

MOVED = 1.0
"""Of itself: a weight that all steps together cannot have moved by that may be as good as it was meant to be."""

UNUSED_SHARE = 0.05
"""Of all elements: less than that without a gradient may be a head that is not used."""


def accumulation(signals: RunSignals) -> Cause | None:
    """Return whether each step follows gradients that belong to others."""
    kept = signals.finding("missing_zero_grad")
    if kept is not None:
        return Cause(
            "accumulation",
            "certain",
            "Gradients are never cleared: each step follows the sum of all gradients so far.",
            "Call optimizer.zero_grad() once for each step, before its first backward().",
            (Evidence.of(kept),),
            ("The learning rate may be right: no threshold and no rate can be read from such norms.",),
        )
    several, curve = list(filter(None, signals.record.steps.column("backwards"))), signals.curve
    if len(several) < 0.5 * signals.count or signals.cancels_scale or (curve is None and not signals.ends_lost):
        return None
    usual = round(statistics.median(several))
    if signals.record.meta.get("loss_factor", 1.0) <= 1.5 / usual:
        return None
    sick = curve is None or signals.ends_lost or curve.peak > 2 * curve.start or curve.fallen < 0.1
    words = f"For each step backward() was called {usual} times, and the loss was not divided by {usual}."
    return Cause(
        "accumulation",
        "certain" if sick else "possible",
        f"Gradients of {usual} micro-batches are summed for each step, which makes the learning rate {usual} "
        "times what it says.",
        f"Divide the loss by {usual} before backward(), as in (loss / {usual}).backward().",
        (signals.seen(words),),
        rate_factor=1 / usual,
    )


def clip_before_unscale(signals: RunSignals) -> Cause | None:
    """Return whether clips saw gradients that were still multiplied by a loss scale."""
    found = signals.finding("clip_before_unscale")
    evidence = Evidence.of(found) if found is not None else _norms_follow_scale(signals)
    if evidence is None:
        return None
    return Cause(
        "clip_before_unscale",
        "certain",
        "Gradients are clipped while they are still multiplied by the loss scale, so that the threshold means nothing.",
        "Call scaler.unscale_(optimizer) before the clip.",
        (evidence,),
        ("The threshold itself may be right: it is compared with norms that are thousands of times too large.",),
    )


def _norms_follow_scale(signals: RunSignals) -> Evidence | None:
    """Whether a clip binds nearly always on norms that are as large as the loss scale, and change with it."""
    if signals.bound_share < 0.9 or not signals.record.steps.has_any("amp_scale"):
        return None
    of_scale: dict[float, list[float]] = {}
    for scale, norm in zip(signals.record.steps.column("amp_scale"), signals.norms, strict=True):
        if scale and norm:
            of_scale.setdefault(scale, []).append(norm)
    levels = {scale: statistics.median(norms) for scale, norms in of_scale.items() if len(norms) >= 10}
    if not levels or min(levels) < 64:
        return None
    low, high = min(levels), max(levels)
    follows = high > low and 0.6 < (levels[high] / levels[low]) / (high / low) < 1.7
    if not follows and (high > low or statistics.median(signals.bound) > 10 / high or levels[high] < 0.01 * high):
        return None
    rises = f": {number(levels[low])} at a scale of {low:,g}, {number(levels[high])} at {high:,g}" if high > low else ""
    return signals.seen(f"The norms that the clip sees grow with the loss scale{rises}.")


def no_gradient(signals: RunSignals) -> Cause | None:
    """Return whether parameters that are to be trained never get a gradient."""
    idle = signals.finding("optimizer_without_gradient")
    if idle is not None and not signals.count:
        return _idle(signals, idle)
    if 0.0 in signals.norms and not any(signals.norms) and not any(signals.lost):
        return None if _starts_at_zero(signals) else _all_zero(signals)
    detached = signals.finding("detached_layer")
    frozen = _frozen(signals)
    if frozen is not None:
        return frozen
    missing, share = _missing(signals)
    if missing:
        names = [signals.name(place) for place in missing]
        first = min(missing) == 0  # something cuts the model behind them
        cut = share >= UNUSED_SHARE or (first and len(missing) > 1)
        words = f"{len(names)} of {len(signals.params)} parameters never had a gradient: {named(names)}."
        where = f" up to {names[-1]}" if first and len(names) > 1 else ""
        return Cause(
            "no_gradient",
            "likely" if cut else "possible",
            f"{len(names)} of {len(signals.params)} parameters never get a gradient{where}, and stay as they began.",
            f"Look between {names[-1]} and the loss for detach(), torch.no_grad(), .data, .item(), or a part of the "
            "model that the forward leaves out. If they are meant to stay as they are, give the optimizer the "
            "others only.",
            (signals.seen(words, names),),
            ("No learning rate and no clip changes what has no gradient.",) if cut else (),
        )
    forgotten = signals.finding("gradient_without_optimizer")
    if forgotten is not None:
        return Cause(
            "no_gradient",
            "likely" if forgotten.severity == "warning" else "possible",
            f"The parameters {named(forgotten.params)} get gradients and are in no optimizer, so that they never "
            "change.",
            f"Give {named(forgotten.params)} to the optimizer; it was perhaps made before they were. If they are meant "
            "to stay as they are, call requires_grad_(False) on them.",
            (Evidence.of(forgotten),),
        )
    if detached is not None:
        return Cause(
            "no_gradient",
            "likely",
            f"The parameters {named(detached.params)} get no gradient any more since step {detached.first_step}.",
            f"Look at what changed at step {detached.first_step}: detach(), torch.no_grad(), requires_grad set to "
            "False, or a branch of the forward that leaves them out. If they were frozen on purpose, nothing is to be "
            "done.",
            (Evidence.of(detached),),
        )
    return None


def _frozen(signals: RunSignals) -> Cause | None:
    """Whether most of what the optimizer has was frozen, and hardly anything is learned by the rest."""
    own, curve = signals.own, signals.curve
    frozen = [place for place in own if signals.params[place].get("frozen")]
    share = signals.elements(frozen) / max(1, signals.elements(own))
    if share < MISSING_SHARE or curve is None:
        return None
    only_vectors = all(len(signals.shape(place)) < 2 for place in own if place not in frozen)
    if not only_vectors and curve.fallen > 0.3:
        return None
    names = [signals.name(place) for place in frozen]
    words = f"{len(frozen)} of {len(own)} parameters of the optimizer have requires_grad=False: {named(names)}."
    return Cause(
        "no_gradient",
        "likely" if only_vectors or share > 0.5 else "possible",
        f"{len(frozen)} of {len(own)} parameters are frozen, and what is left hardly learns.",
        "If they are to be trained, set requires_grad_(True) on them before the first forward; if not, give the "
        "optimizer the others only.",
        (signals.seen(words, names),),
        ("No learning rate and no clip changes what has no gradient.",),
    )


def _missing(signals: RunSignals) -> tuple[list[int], float]:
    """The places of the parameters that never had a gradient, and their share of all elements."""
    if not signals.lines:
        return [], 0.0
    gone = frozenset.intersection(*(frozenset(line.get("absent", ())) for line in signals.lines))
    mine = [place for place in signals.own if place in gone and not signals.params[place].get("frozen")]
    return mine, signals.elements(mine) / max(1, signals.elements(range(len(signals.params))))


def _starts_at_zero(signals: RunSignals) -> bool:
    """Whether all weights are 0, or the loss is always the same: no gradient comes through, though nothing is cut."""
    curve = signals.curve
    if curve is not None and curve.noise == 0 and max(curve.levels) - min(curve.levels) <= 1e-6 * abs(curve.start):
        return True
    return bool(signals.measured) and not any(any(line["weight"]) for line in signals.measured)


def _idle(signals: RunSignals, idle: Finding) -> Cause:
    end, leaves = signals.record.end or {}, signals.record.meta.get("leaves")
    steps = end.get("idle_steps") or idle.value or 0
    if any("order" in parameter for parameter in signals.params):
        why = "Gradients are there after backward() and gone at step(): zero_grad() is called between the two."
        advice = "Call optimizer.zero_grad() before backward(), or after optimizer.step(), and not between the two."
    elif leaves:
        why = f"The backward pass reaches {leaves} tensors, and none of them is one of the optimizer's."
        advice = (
            "Make the optimizer from the parameters of the very model that computes the loss: not of a copy, and not "
            "before the model was made anew, moved or wrapped."
        )
    elif leaves == 0:
        why = "The backward pass reaches no parameter: the loss is cut off from the model."
        advice = (
            "Look between the model's output and the loss for detach(), .data, .item(), torch.no_grad(), or a tensor "
            "that was made anew from numbers, and take it away."
        )
    else:
        why = f"{capital(idle.message)}."
        advice = f"{capital(idle.advice)}."
    return Cause(
        "no_gradient",
        "certain",
        f"The optimizer stepped {steps:,.0f} times and none of its parameters ever had a gradient: nothing is trained.",
        advice,
        (Evidence((idle.first_step, max(idle.last_step, round(steps) - 1)), why, idle.params),),
        ("No learning rate and no clip changes anything here.",),
    )


def _all_zero(signals: RunSignals) -> Cause:
    words = f"The gradient norm was exactly 0 on all {signals.count:,} steps."
    return Cause(
        "no_gradient",
        "certain",
        "Every gradient is exactly 0 on every step: nothing is trained.",
        "Check that zero_grad() does not come between backward() and step(), and that the loss is computed from the "
        "model's output without detach(), round(), argmax() or a comparison on the way.",
        (signals.seen(words),),
        ("No learning rate and no clip changes anything here.",),
    )


def rate_zero(signals: RunSignals) -> Cause | None:
    """Return whether the learning rate is 0."""
    known = without_none(signals.rates)
    zero = sum(rate == 0 for rate in known)
    if (
        not known
        or zero < 0.9 * len(known)
        or any(known[: len(known) // 20])
        or any(any(layer.ratios[1:]) and zero == len(known) for layer in signals.layers)
    ):
        return None
    words = f"The learning rate was 0 on {zero:,} of {len(known):,} steps."
    return Cause(
        "rate_zero",
        "certain",
        "The learning rate is 0: nothing is trained.",
        "Set lr above 0, such as 1e-3 for Adam or 0.1 for SGD. With a scheduler, check that its first factor is not 0 "
        "and that scheduler.step() is called.",
        (signals.seen(words),),
        ("The gradients are not the cause: they are there and finite.",),
    )


def not_started(signals: RunSignals) -> Cause | None:
    """Return whether nothing moves from the first step on, though every layer is connected."""
    curve = signals.curve
    if curve is None or not signals.count:
        return None
    zeros = _zero_from_start(signals)
    matrices = sum(len(signals.shape(place)) > 1 for place in signals.own)
    learns = curve.has_fallen and not (curve.stands_still and signals.growth < 1)
    if learns and (2 * len(zeros) < matrices or curve.fallen > 0.3):
        return None
    if zeros:
        words = f"The gradient of {named(zeros)} was exactly 0 on every recorded step, from the first one on."
        return Cause(
            "not_started",
            "likely",
            f"Nothing has begun to learn: the gradient of {named(zeros)} is exactly 0 from the first step on.",
            "Initialise the weights at random (the default of torch.nn layers does), not with zeros or one constant; "
            "if they are, look for ReLUs that are dead from the start: biases far below 0, or inputs that are not "
            "normalised.",
            (signals.seen(words, zeros),),
            ("The learning rate is an ordinary one.",),
        )
    rates = without_none(signals.rates)
    if signals.is_warming_up:
        words = f"The learning rate rises all through the run, from {rates[0]:.2g} to {rates[-1]:.2g}."
        return Cause(
            "not_started",
            "likely",
            f"The warm-up is longer than the run: after {signals.count:,} steps the learning rate still rises, "
            f"at {rates[-1]:.2g}.",
            f"Shorten the warm-up to a tenth of the run, some {max(1, signals.count // 10)} steps.",
            (signals.seen(words),),
            ("The model is not the cause: its gradients are there.",),
        )
    if curve.stands_still and signals.count >= 100:
        words = f"The loss was {number(curve.levels[0])} in the first steps and is {number(curve.final)} at the end"
        stays = signals.travel is not None and signals.travel < MOVED  # as a run does that had little left to learn
        return Cause(
            "not_started",
            "possible" if stays or curve.is_blurred else "likely",
            f"Nothing has been learned in {signals.count:,} steps, though gradients and learning rate are ordinary.",
            "Check that labels belong to their inputs (a shuffle of one and not of the other), and that inputs are "
            "normalised and reach the model. If they are right, train longer, with a learning rate three times higher.",
            (signals.seen(f"{words}, and gradients are there."),),
            ("No layer lacks a gradient, and none vanishes or explodes.",),
        )
    return None


def _zero_from_start(signals: RunSignals) -> list[str]:
    """Weights whose gradient is exactly 0 on nearly all lines, not because they are absent."""
    lines, found = signals.lines, []
    if len(lines) < 3:
        return []
    for place in signals.own:
        zero = sum(line["norm"][place] == 0 and place not in line.get("absent", ()) for line in lines)
        at_first = any(line["norm"][place] for line in lines[:2])
        if len(signals.shape(place)) > 1 and zero >= 0.95 * len(lines) and not at_first:
            found.append(signals.name(place))
    return found

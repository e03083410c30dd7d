"""Runs of a step that differ by rounding alone, made one saved run.

The step runs as it is, then with twice the gradient at its loss, and then with weights that are changed by rounding and
with gradients at the loss of other scales. Where twice the one gradient does not make twice the other, the scale stays
1. Where optimizers change weights, it runs twice more, with gradients that are moved up and down: an update may jump
where a gradient is nearly zero. What is linear in the gradient is in the mean of these two as it is in the first run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gradguard.errors import RecordError
from gradguard.parity.saved import GRADIENT, START, SavedGradients
from gradguard.parity.scales import (
    DOUBLED,
    ScriptRun,
    alike_settings,
    apart,
    is_linear,
    mean_of,
    same_twice,
    scale_of,
    turned_sizes,
)

Run = Callable[[ScriptRun], SavedGradients]

ALL = "its gradients"
"""The name of a run's own gradients beside those of its stages."""


def with_rounding(
    run: Run, as_it_is: ScriptRun, perturbed: int, check: Callable[[Sequence[SavedGradients]], None]
) -> SavedGradients:
    """Run a step as often as it takes, and return what was saved with what rounding does.

    Args:
        run: Runs the step in one of these ways.
        as_it_is: The first run, which says what is saved.
        perturbed: How many runs with changed weights; with 0 there is the first run alone.
        check: Refuses runs that rounding alone cannot explain; called with all of them.

    Returns:
        The first, with the numbers of all.

    Raises:
        RecordError: If runs are of other parameters.
    """
    first = run(as_it_is)
    if not perturbed:
        return merged([first])
    runs = [first, run(replace(as_it_is, scale=DOUBLED))]
    if not _is_linear(runs):
        runs.insert(1, run(as_it_is))
    if not (scaled := _is_linear(runs)):
        del runs[2:]
    for k in range(1, perturbed + 1):
        scale = scale_of(k) if scaled else 1.0
        runs.append(run(replace(as_it_is, change=k, epsilon=first.epsilon, scale=scale)))
    _check_alike(runs)
    sizes = {} if as_it_is.is_first_step_alone else _sizes(runs)
    turned = []
    for sign in (1, -1) if sizes else ():
        signed = {name: {p: sign * size for p, size in of_step.items()} for name, of_step in sizes.items()}
        turned.append(run(replace(as_it_is, sizes=signed)))
    check([*runs, *turned])
    return merged(runs, scaled, turned)


def _is_linear(runs: Sequence[SavedGradients]) -> bool:
    """Whether the last of these runs, the one with twice the gradient at the loss, has all that the first one has."""
    first, *again, doubled = ([v for _, one in tables(run) for v in one.sketches["gradient"][0]] for run in runs)
    return len(first) == len(doubled) and is_linear(first, doubled, *again)


def tables(run: SavedGradients) -> list[tuple[str, SavedGradients]]:
    """Return the gradients, and the stages after them, each with its name."""
    return [(ALL, run), *((name, one) for name, one in run.stages.items() if name != START)]


def not_same_twice(runs: Sequence[SavedGradients]) -> Iterator[tuple[str, float]]:
    """Yield each stage that differs between the first two runs, which nothing tells apart, and by what part of it."""
    for (name, one), (_, other) in zip(*map(tables, runs[:2]), strict=True):
        a, b = (run.sketches["gradient"][0] for run in (one, other))
        if not same_twice(a, b, one.epsilon):
            yield name, apart(a, b)


def _sizes(runs: Sequence[SavedGradients]) -> dict[str, dict[str, float]]:
    """Return by how much to move gradients, for each step by its name."""
    return {
        name: turned_sizes(one.parameters, [run.stages[name].sketches["gradient"][0] for run in runs])
        for name, one in runs[0].stages.items()
        if name.startswith(GRADIENT)
    }


def merged(
    runs: Sequence[SavedGradients], scaled: bool = False, turned: Sequence[SavedGradients] = ()
) -> SavedGradients:
    """Return one saved run of several of one script: the first, with the gradients and stages of all.

    Args:
        runs: The first as the script is, the second with the same weights.
        scaled: Whether the later ones have gradients at the loss of other scales.
        turned: Two whose gradients were moved up and down, of which the mean counts.

    Raises:
        RecordError: If they are of other parameters.
    """
    every = [*runs, *turned]
    _check_alike(every)
    whole = _joined([*runs, *([_mean(turned)] if turned else [])], scaled)
    return replace(
        whole,
        rows={name: [table for run in runs for table in run.rows[name]] for name in whole.rows},
        random=any(run.random for run in runs),
        clipped=any(run.clipped for run in runs),
        settings=alike_settings([run.settings for run in every]),
    )


def _joined(runs: Sequence[SavedGradients], scaled: bool) -> SavedGradients:
    """Return the first run with the tables of all, and so each of its stages but the gradients before the last ones."""
    first = runs[0]
    sketches = {**first.sketches, "gradient": [run.sketches["gradient"][0] for run in runs]}
    if len(first.sketches.get("weights", ())) > 1:  # those of its own first step, which updates have made
        sketches["weights"] = [run.sketches["weights"][-1] for run in runs]
    parameters = tuple(replace(p, one_sided=0.0) for p in first.parameters) if scaled else first.parameters
    kept = [n for n in first.stages if not n.startswith(GRADIENT) or int(n.removeprefix(GRADIENT)) > 1]
    stages = {name: _joined([run.stages[name] for run in runs], scaled) for name in kept}
    return replace(first, parameters=parameters, sketches=sketches, stages=stages)


def _mean(runs: Sequence[SavedGradients]) -> SavedGradients:
    """Return the first run with the mean of the tables of all."""
    first = runs[0]
    sketches = {
        kind: [mean_of([run.sketches[kind][i] for run in runs]) for i in range(len(tables))]
        for kind, tables in first.sketches.items()
    }
    return replace(
        first, sketches=sketches, stages={name: _mean([run.stages[name] for run in runs]) for name in first.stages}
    )


def _check_alike(runs: Sequence[SavedGradients]) -> None:
    """Refuse runs of other parameters, or of an optimizer that keeps other things."""
    described = [
        [(name, [(p.name, p.shape) for p in one.parameters]) for name, one in (("", run), *run.stages.items())]
        for run in runs
    ]
    if any(other != described[0] for other in described[1:]):
        raise RecordError(
            "the script trains other parameters from run to run, or its optimizer keeps other things, so that nothing "
            "can be compared."
        )

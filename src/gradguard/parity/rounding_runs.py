"""Run a step several times with differences in rounding alone, and merge the runs into one saved run.

The step first runs unchanged, and then with twice the gradient at its loss. Further runs change the weights by rounding
and use other factors on the gradient at the loss. The factor stays 1 if doubling it does not double the gradients.

If optimizers change weights, two more runs shift the gradients up and down, because an update may jump where a gradient
is nearly zero. Their mean has the same value as the first run in each quantity that is linear in the gradient.
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
"""The name of a run's own gradients, in messages that also name stages."""


def with_rounding(
    run: Run, as_it_is: ScriptRun, perturbed: int, check: Callable[[Sequence[SavedGradients]], None]
) -> SavedGradients:
    """Run a step several times, and merge the runs into one that includes the effect of rounding.

    Args:
        run: A function that runs the step as its argument describes.
        as_it_is: The description of the first run: the steps to save.
        perturbed: The number of runs with changed weights; 0 for the first run alone.
        check: A function that receives all runs, and raises if rounding alone cannot explain their differences.

    Returns:
        The first run, with the sketches of all runs.

    Raises:
        RecordError: If runs have different parameters.
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
    """Return whether the last run, with twice the gradient at the loss, equals the first after division by 2."""
    first, *again, doubled = ([v for _, one in tables(run) for v in one.sketches["gradient"][0]] for run in runs)
    return len(first) == len(doubled) and is_linear(first, doubled, *again)


def tables(run: SavedGradients) -> list[tuple[str, SavedGradients]]:
    """Return the gradients and the later stages of a run, each with its name."""
    return [(ALL, run), *((name, one) for name, one in run.stages.items() if name != START)]


def not_same_twice(runs: Sequence[SavedGradients]) -> Iterator[tuple[str, float]]:
    """Yield each stage that differs between the first two runs by more than rounding, and its relative difference."""
    for (name, one), (_, other) in zip(*map(tables, runs[:2]), strict=True):
        a, b = (run.sketches["gradient"][0] for run in (one, other))
        if not same_twice(a, b, one.epsilon):
            yield name, apart(a, b)


def _sizes(runs: Sequence[SavedGradients]) -> dict[str, dict[str, float]]:
    """Return the sizes by which to shift gradients, by step."""
    return {
        name: turned_sizes(one.parameters, [run.stages[name].sketches["gradient"][0] for run in runs])
        for name, one in runs[0].stages.items()
        if name.startswith(GRADIENT)
    }


def merged(
    runs: Sequence[SavedGradients], scaled: bool = False, turned: Sequence[SavedGradients] = ()
) -> SavedGradients:
    """Return the first of several runs of one script, with the gradients and stages of all.

    Args:
        runs: The unchanged run, a second run with the same weights, and the runs with changed weights.
        scaled: Whether the later runs have other factors on the gradient at the loss.
        turned: The two runs whose gradients were shifted up and down; their mean is added as one run.

    Raises:
        RecordError: If the runs have different parameters.
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
    """Return the first run with the sketches of all runs, also in its stages; drop the gradients of steps up to 1."""
    first = runs[0]
    sketches = {**first.sketches, "gradient": [run.sketches["gradient"][0] for run in runs]}
    if len(first.sketches.get("weights", ())) > 1:  # with --at, the last entry has the weights at the saved step
        sketches["weights"] = [run.sketches["weights"][-1] for run in runs]
    parameters = tuple(replace(p, one_sided=0.0) for p in first.parameters) if scaled else first.parameters
    kept = [n for n in first.stages if not n.startswith(GRADIENT) or int(n.removeprefix(GRADIENT)) > 1]
    stages = {name: _joined([run.stages[name] for run in runs], scaled) for name in kept}
    return replace(first, parameters=parameters, sketches=sketches, stages=stages)


def _mean(runs: Sequence[SavedGradients]) -> SavedGradients:
    """Return the first run with the mean of the sketches of all runs."""
    first = runs[0]
    sketches = {
        kind: [mean_of([run.sketches[kind][i] for run in runs]) for i in range(len(tables))]
        for kind, tables in first.sketches.items()
    }
    return replace(
        first, sketches=sketches, stages={name: _mean([run.stages[name] for run in runs]) for name in first.stages}
    )


def _check_alike(runs: Sequence[SavedGradients]) -> None:
    """Refuse runs whose parameters, or entries of an optimizer's state, differ in name or shape."""
    described = [
        [(name, [(p.name, p.shape) for p in one.parameters]) for name, one in (("", run), *run.stages.items())]
        for run in runs
    ]
    if any(other != described[0] for other in described[1:]):
        raise RecordError(
            "the script trains other parameters from run to run, or its optimizer's state has other entries, so the "
            "runs cannot be compared."
        )

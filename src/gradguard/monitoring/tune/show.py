"""Reports the result of the trials: one sentence, a table, notes on its limits, and the command to type next."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.show.text_table import print_table
from gradguard.monitoring.tune.candidates import NONE
from gradguard.monitoring.tune.score import Mean, Score, scores
from gradguard.monitoring.tune.trials import OUTPUT, Trials
from gradguard.named_rules import clipping_rule

if TYPE_CHECKING:
    from rich.console import Console


def summary(trials: Trials) -> dict[str, Any]:
    """Return the whole result as plain values for JSON.

    Args:
        trials: The trials, with at least one run.
    """
    ranked = scores(trials.runs, trials.plan.maximize)
    return {
        "sentence": sentence(ranked),
        "winner": ranked[0].rule if is_told(ranked) else None,
        "rules": [asdict(score) for score in ranked],
        "notes": notes(trials),
        "command": command(trials, ranked),
        "metric": None if trials.plan.metric is None else trials.plan.metric.pattern,
        "steps": trials.plan.steps,
        "folder": str(trials.plan.folder),
    }


def print_summary(trials: Trials, console: "Console | None" = None) -> None:
    """Print the result.

    Args:
        trials: The trials, with at least one run.
        console: Where to print; standard output if None.
    """
    from rich.console import Console

    ranked, rows = scores(trials.runs, trials.plan.maximize), []
    for score in ranked:
        against = "" if score.difference is None else _difference(score.difference)
        lost = f"{score.diverged + score.failed} of {len(score.losses)}"
        rows.append([score.rule, _with_margin(score.loss), against, lost, percent(score.clip_share)])
    console = console or Console()
    console.print(sentence(ranked), markup=False, highlight=False)
    print_table(
        console,
        ("clip", "last loss" if trials.plan.metric is None else "metric", "against the best", "diverged", "clipped"),
        rows,
    )
    for note in notes(trials):
        console.print(note, markup=False, highlight=False)
    console.print(command(trials, ranked), style="bold", markup=False, highlight=False, soft_wrap=True)


def is_told(ranked: Sequence[Score]) -> bool:
    """Return whether the first of several rules is known to be better than all others.

    Args:
        ranked: Scores, the best first, as `scores` returns them.
    """
    return len(ranked) > 1 and ranked[0].loss is not None and all(score.worse for score in ranked[1:])


def sentence(ranked: Sequence[Score]) -> str:
    """Return one sentence that names the rule that trained best.

    Args:
        ranked: Scores, the best first, as `scores` returns them.

    Returns:
        The sentence.

    Example:
        >>> best = Score("median", Mean(0.41, 0.03, 3), {1: 0.4, 2: 0.41, 3: 0.42}, 0, 0, 0.1)
        >>> none = Score("none", Mean(0.52, 0.1, 3), {1: 0.5, 2: 0.5, 3: 0.56}, 0, 0, 0.0, worse=True)
        >>> sentence([best, none])
        'median wins: 0.410 ± 0.03 against 0.520 ± 0.1 without a clip.'
    """
    best, *others = ranked
    if best.loss is None:
        return "Every run diverged or failed, whatever the clip: try rules that clip harder, or a lower learning rate."
    if not others:
        return f"Only {_called(best.rule)} was tried: {_with_margin(best.loss)}."
    equal, worse = [s for s in others if not s.worse], [s for s in others if s.worse]
    if best.loss.count < 2 and not worse:
        return (
            f"One seed cannot show a difference: {_called(best.rule)} has the lowest loss, {_with_margin(best.loss)}."
        )
    if not worse:
        tried = _listed([_called(score.rule) for score in ranked])
        return f"The experiment does not separate {tried}: {_called(best.rule)} has {_with_margin(best.loss)}."
    against = next((s for s in worse if s.rule == NONE), worse[0])
    how = "wins" if not equal else "is among the best"
    same = f"; the experiment does not separate it from {_listed([_called(s.rule) for s in equal])}" if equal else ""
    return f"{_called(best.rule)} {how}: {_with_margin(best.loss)} against {_in_words(against)}{same}."


_TRAINING_LOSS = (
    "The loss is the training loss, the mean of the last tenth of the steps, with 95 % intervals over seeds. A clipped "
    "run may fall behind at first and end lower. The held-out loss of a full run decides; --metric reads it from the "
    "script's output."
)


def notes(trials: Trials) -> list[str]:
    """Return notes on the limits of the numbers.

    Args:
        trials: The trials.
    """
    script = next((word for word in trials.plan.target if not word.startswith("-")), "the script")
    lengths = {len(run.losses) for run in trials.runs if not run.stopped}
    remarks = [
        (True, _TRAINING_LOSS if trials.plan.metric is None else "The metric has 95 % intervals over seeds."),
        (trials.suggested, trials.suggested),
        (
            trials.seeds_itself,
            f"{script} sets its seed itself: another seed gave the same losses, so there are no error bars. If it "
            "takes a seed as an argument, write {seed} in its place.",
        ),
        (
            trials.clips_itself,
            f'{script} clips itself: its clip stays, "{NONE}" is the unchanged script, and each rule acts after it.',
        ),
        (
            trials.optimizers > 1,
            f"{trials.optimizers} optimizers step: each has its own clipper, and the losses of all are pooled. If "
            "networks work against each other, these losses say little: let the script print a metric for --metric.",
        ),
        (
            len(lengths) > 1,
            f"The runs have from {min(lengths, default=0)} to {max(lengths, default=0)} losses, and each is judged by "
            "its own last tenth.",
        ),
    ]
    found = [words for holds, words in remarks if holds]
    of_errors, of_metrics = [], []
    for run in trials.runs:
        see = f"counts as diverged: see {trials.folder_of(run.rule, run.seed) / OUTPUT}."
        if run.failed:
            of_errors.append(f"An error ended {run.rule} with seed {run.seed}, which {see}")
        elif run.metric is not None and math.isnan(run.metric) and not run.stopped:
            of_metrics.append(f"{run.rule} with seed {run.seed} printed no finite metric and {see}")
    found += of_errors + of_metrics
    return found


def command(trials: Trials, ranked: Sequence[Score]) -> str:
    """Return the command to type next: a run under the best rule, or a trial with more seeds.

    Args:
        trials: The trials.
        ranked: Their scores, the best first.
    """
    best, *others = ranked
    target = shlex.join(word.replace("{seed}", "1") for word in trials.plan.target)
    without = next((score for score in others if score.rule == NONE), None)
    if best.loss is None:
        return f"gradguard report {trials.plan.folder}/*"
    if not trials.seeds_itself and best.rule != NONE and without is not None and not without.worse:
        tried = " ".join(f"--rule {score.rule}" for score in ranked if score.rule != NONE)
        judged = "" if trials.plan.metric is None else f"--metric {shlex.quote(trials.plan.metric.pattern)} "
        judged += "--maximize " * trials.plan.maximize
        return f"gradguard tune --seeds {2 * trials.plan.seeds} {judged}{tried} {shlex.join(trials.plan.target)}"
    if best.rule == NONE:
        return f"gradguard run {target}"
    if trials.clips_itself:
        return f"in {target}, beside its own clip: gg.Guard(optimizer, {clipping_rule(best.rule).call})"
    return f"gradguard run --clip {best.rule} {target}"


def _called(rule: str) -> str:
    return "no clip" if rule == NONE else rule


def _in_words(score: Score) -> str:
    rule = "without a clip" if score.rule == NONE else f"with {score.rule}"
    how = {"diverged": score.diverged, "failed": score.failed}
    if not any(how.values()):
        return f"{_with_margin(score.loss)} {rule}"
    what = " or ".join(name for name, count in how.items() if count)
    return f"{sum(how.values())} of {len(score.losses)} runs that {what} {rule}"


def _difference(mean: Mean) -> str:
    if mean.value == 0 and not mean.margin:
        return "the same"
    return f"{'+' if mean.value >= 0 else ''}{_with_margin(mean)}"


def _with_margin(mean: Mean | None) -> str:
    if mean is None:
        return "–"
    value = number(mean.value)
    return value if mean.margin is None else f"{value} ± {mean.margin:.2g}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

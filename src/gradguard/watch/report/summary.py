"""The summary in a terminal, and the same as ``key: value`` lines for logs and scripts."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradguard.watch.recommend import Recommendation, recommend
from gradguard.watch.record import FILE_NAME, Record
from gradguard.watch.verdict import Verdict, number, percent, plain_threshold, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

_REGIME_STYLES = {"never": "blue", "guard": "green", "shaping": "yellow", "normalising": "red"}


def print_summary(record: Record, console: "Console | None" = None) -> None:
    """Print the verdict, the recommended threshold, the command that uses it, and what observing cost.

    Args:
        record: The record of a run.
        console: Where to print; standard output if None.
    """
    from rich.console import Console
    from rich.panel import Panel

    judged, recommendation = verdict(record), recommend(record)
    faulty = judged.nonfinite_steps or judged.diverged
    style = "red" if faulty else _REGIME_STYLES[judged.regime]
    body = _body(judged, recommendation)
    panel = Panel(body, title="gradguard", title_align="left", border_style=style, padding=(0, 1))
    console = console or Console()
    console.print(panel)
    if recommendation.threshold is not None:  # outside the frame, in one piece, so that it can be copied
        console.print(command(record, recommendation.threshold), style="bold", markup=False, soft_wrap=True)
    cost = _cost(judged, record.end or {})
    if cost:
        console.print(f"observing cost: {cost}", markup=False, highlight=False)


def print_comparison(records: Sequence[Record], console: "Console | None" = None) -> None:
    """Print several runs side by side: what was clipped, and what came of it.

    Args:
        records: The records of the runs.
        console: Where to print; standard output if None.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "run", "clip", *(_right(name) for name in ("final loss", "best loss", "largest norm", "steps clipped"))
    )
    for record, label in labelled(records):
        judged = verdict(record)
        losses = [number(judged.final_loss), number(judged.best_loss)]
        bound = percent(judged.clip_share) if judged.clip_share is not None else "-"
        table.add_row(label, clip_of(record), *losses, number(judged.max_norm), bound)
    (console or Console()).print(table)


def _right(name: str) -> "Column":
    from rich.table import Column

    return Column(name, justify="right")


def clip_of(record: Record) -> str:
    """Return what clipped in this run: gradguard, the script itself, or nothing."""
    if record.meta.get("clip"):
        return str(record.meta["clip"])
    own = {(step["rule"], step.get("threshold")) for step in record.steps if "rule" in step}
    if not own:
        return "none"
    rule, threshold = own.pop()
    return f"script: {rule}" + (f"={threshold:g}" if threshold is not None and not own else "")


def labelled(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return each record with what to call it: its file, or its folder where files share a name."""
    stems = [record.path.stem for record in records]
    labels = stems if len(set(stems)) == len(stems) else [_with_folder(record.path) for record in records]
    return list(zip(records, labels, strict=True))


def _with_folder(path: Path) -> str:
    return path.parent.name if path.name == FILE_NAME else f"{path.parent.name}/{path.stem}"


def text_summary(record: Record) -> str:
    """The summary as ``key: value`` lines, one fact a line, for logs, scripts and automated readers.

    Quantities that were not measured have no line.

    Args:
        record: The record of a run.

    Returns:
        The lines, ending in a newline.
    """
    judged, recommendation = verdict(record), recommend(record)
    facts = _facts(record, judged) | _advice(record, recommendation)
    return "".join(f"{key}: {_one_line(value)}\n" for key, value in facts.items() if value is not None)


def command(record: Record, threshold: float) -> str:
    """The command that runs the same script with a threshold.

    Args:
        record: The record of a run.
        threshold: The ``norm=`` number.

    Returns:
        A line to paste into a shell; or, for a script that clips itself, what to change in it.
    """
    script = shlex.join(map(str, record.meta.get("argv") or ["train.py"]))
    if not record.meta.get("clip") and any("user_max_norm" in step for step in record.steps):
        return f"in {script}, which clips itself: max_norm={plain_threshold(threshold)}"
    return f"gradguard run --clip norm={plain_threshold(threshold)} {script}"


def _body(judged: Verdict, recommendation: Recommendation) -> "Text":
    from rich.text import Text

    body = Text(judged.sentence)
    body.append("\n\nRecommended threshold: ")
    threshold = recommendation.threshold
    body.append("none" if threshold is None else plain_threshold(threshold), style="bold")
    return body.append(f"\n{recommendation.reason}")


def _facts(record: Record, judged: Verdict) -> dict[str, Any]:
    numbers = {
        "clip_share": judged.clip_share,
        "threshold": judged.threshold,
        "median_coefficient": judged.median_coefficient,
        "median_norm": judged.median_norm,
        "max_norm": judged.max_norm,
        "spike_share": judged.spike_share,
        "final_loss": judged.final_loss,
        "best_loss": judged.best_loss,
        "overhead_share": judged.overhead_share,
    }
    rounded = {key: None if value is None else f"{value:.4g}" for key, value in numbers.items()}
    counts = {
        "steps": judged.steps,
        "nonfinite_steps": judged.nonfinite_steps,
        "skipped_steps": judged.skipped_steps,
        "events": len(record.events),
    }
    return {"verdict": judged.sentence, "regime": judged.regime} | counts | rounded


def _advice(record: Record, recommendation: Recommendation) -> dict[str, Any]:
    threshold = recommendation.threshold
    candidates = {item.name: plain_threshold(item.threshold) for item in recommendation.candidates}
    return {
        "recommended": "none" if threshold is None else plain_threshold(threshold),
        "reason": recommendation.reason,
        **candidates,
        "command": None if threshold is None else command(record, threshold),
    }


def _one_line(value: object) -> str:
    return " ".join(str(value).splitlines())


def environment(record: Record, judged: Verdict) -> list[tuple[str, str]]:
    """What the run ran on, and what it cost to observe, as label and value.

    Args:
        record: The record of a run.
        judged: Its verdict.

    Returns:
        The rows that the record knows.
    """
    meta, end = record.meta, record.end or {}
    parameters = meta.get("params") or []
    elements = sum(parameter.get("numel") or 0 for parameter in parameters)
    rows = [
        ("Script", shlex.join(map(str, meta.get("argv") or []))),
        ("Optimizer", ", ".join(map(str, meta.get("optimizers") or []))),
        ("Parameters", f"{len(parameters):,} tensors, {elements:,} elements" if parameters else ""),
        ("Device", str(meta.get("device") or "")),
        ("Versions", _versions(meta)),
        ("Wall-clock time", f"{end['wall']:,.1f} s" if end.get("wall") is not None else ""),
        ("Observing cost", _cost(judged, end)),
        ("Ended", _ending(record)),
        ("Record", str(record.path)),
    ]
    return [(label, value) for label, value in rows if value]


def _versions(meta: dict[str, Any]) -> str:
    named = (("gradguard", meta.get("version")), ("torch", meta.get("torch")))
    return ", ".join(f"{name} {version}" for name, version in named if version)


def _cost(judged: Verdict, end: dict[str, Any]) -> str:
    if judged.overhead_share is None:
        return ""
    return f"{percent(judged.overhead_share)} of the run ({number(end['overhead_ms'])} ms)"


def _ending(record: Record) -> str:
    if record.end is None:
        return "the record has no end: the run was killed, or is still going"
    if record.end.get("interrupted"):
        return "interrupted"
    return f"exit code {record.end['exit']}" if record.end.get("exit") else ""

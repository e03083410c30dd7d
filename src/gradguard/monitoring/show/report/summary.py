"""Print the summary of a run in a terminal, and provide the texts that all forms of the report share."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gradguard.monitoring.judge.acting_clips import acting_clips
from gradguard.monitoring.judge.diagnosis import Diagnosis, diagnose, weighed_findings
from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.health import lock_in_share
from gradguard.monitoring.judge.judgement import Verdict, verdict
from gradguard.monitoring.judge.norm_statistics import drift_ratio
from gradguard.monitoring.judge.numbers import capital, number, percent, plain_threshold
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import FILE_NAME, SCHEMA, Record
from gradguard.monitoring.record.redaction import redacted
from gradguard.monitoring.record.step_rows import usable_norms
from gradguard.monitoring.show.tail_view import ending
from gradguard.monitoring.show.text_table import print_table
from gradguard.named_rules import clipping_rule
from gradguard.words import counted

if TYPE_CHECKING:
    from rich.console import Console

_MOST_FINDINGS = 4
_COMPARED = ("run", "clip", "final loss", "best loss", "largest norm", "steps clipped")


def print_summary(record: Record, console: "Console | None" = None) -> None:
    """Print the diagnosis with its advice, the decision on clipping with its command, the findings and the overhead.

    Args:
        record: The record of a run.
        console: The console to print to; standard output if None.
    """
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    judged, recommendation, diagnosis = verdict(record), recommend(record), diagnose(record)
    style, found = {"guard": "green", "shaping": "yellow", "bad": "red"}[tone_of(diagnosis)], weighed_findings(record)
    body = Text(diagnosis.sentence, style="bold")
    body.append("" if diagnosis.is_well else f"\n{diagnosis.cause.advice}", style="not bold")
    if recommendation.kind != "fix" and recommendation.headline != diagnosis.sentence:  # do not print a sentence twice
        body.append("\n\n").append(recommendation.headline, style="bold")
        body.append(f" {recommendation.reason}" if recommendation.reason else "", style="not bold")
    body.append(f"\n\n{judged.sentence}", style="not bold")
    grave = [item for item in found if item.severity != "info"]
    body.append("\n" * bool(grave))
    for item in grave[:_MOST_FINDINGS]:
        body.append(f"\n{item.severity}: ", style="bold")
        body.append(f"{said_of(item)} {sentence(item.advice)}", style="not bold")
    rest = [item for item in found if item not in grave[:_MOST_FINDINGS]]
    if grave and rest:
        body.append(f"\nand {severities(rest)}, see the report", style="not bold dim")
    panel = Panel(body, title="gradguard", title_align="left", border_style=style, padding=(0, 1))
    console = console or Console()
    console.print(panel)
    if recommendation.rule is not None:  # outside the frame and unwrapped, for copying
        if recommendation.rate_factor is not None:
            console.print(f"with the learning rate multiplied by {recommendation.rate_factor:g} in the script:")
        console.print(Text(command(record, recommendation.rule), style="bold"), soft_wrap=True)
    cost = _cost(judged, record.closing)
    if cost:
        console.print(f"observing cost: {cost}", markup=False, highlight=False)


def tone_of(diagnosis: Diagnosis) -> str:
    """Return the tone of a diagnosis: ``"guard"`` (the run is well), ``"shaping"`` (unknown) or ``"bad"``."""
    if diagnosis.is_well:
        return "guard"
    return "shaping" if diagnosis.cause.key == "unknown" else "bad"


def sentence(text: str) -> str:
    """Return a text as a sentence, with a capital letter and a full stop.

    Example:
        >>> sentence("it stood out (2 times)"), sentence("clip by gg.ClipByMedian()"), sentence("it ended!")
        ('It stood out (2 times).', 'Clip by gg.ClipByMedian()', 'It ended!')
    """
    is_whole = not text or text[-1] in ".!?" or text.endswith("()")  # a full stop after a call could be copied with it
    return capital(text) if is_whole else f"{capital(text)}."


def said_of(finding: Finding) -> str:
    """Return the message of a finding as a sentence; a parameter name at its beginning keeps its case.

    Example:
        >>> said_of(Finding("detached_layer", "warning", "head.bias has no gradient", "", 0, 9, ("head.bias",)))
        'head.bias has no gradient.'
    """
    said = sentence(finding.message)
    return finding.message[0] + said[1:] if finding.message.startswith(finding.params) else said


def severities(found: Iterable[Finding]) -> str:
    """Return the numbers of findings by severity, such as ``"1 error, 2 warnings"``."""
    counts = Counter(one.severity for one in found)
    words = {"error": "error", "warning": "warning", "info": "remark"}
    return ", ".join(counted(counts[severity], word) for severity, word in words.items() if counts[severity])


def untold(events: Sequence[dict[str, Any]], found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the events whose kind no finding has: the recorder writes most findings as events too."""
    kinds = {one.kind for one in found}
    return [event for event in events if event.get("kind") not in kinds]


def print_comparison(records: Sequence[Record], console: "Console | None" = None) -> None:
    """Print a table that compares the clips, losses and norms of several runs.

    Args:
        records: The records of the runs.
        console: The console to print to; standard output if None.
    """
    from rich.console import Console

    rows = []
    for record, label in labelled(records):
        judged = verdict(record)
        bound = percent(judged.clip_share) if judged.clip_share is not None else "-"
        losses = number(judged.final_loss), number(judged.best_loss)
        rows.append([label, clip_of(record), *losses, number(judged.max_norm), bound])
    print_table(console or Console(), _COMPARED, rows, texts=2)


def clip_of(record: Record) -> str:
    """Return the names of the clips in a run: gradguard's, the script's own, both, or ``"none"``."""
    if record.meta.get("clip"):
        others = [clip.name for clip in acting_clips(record) if clip.name.startswith("the script's own")]
        return " and ".join([str(record.meta["clip"]), *others])
    steps = record.steps.where(record.steps.has("rule"))
    own = set(zip(steps.column("rule"), steps.column("threshold"), strict=True))
    if not own:
        return "none"
    rules, (_, threshold) = sorted({rule for rule, _ in own}), next(iter(own))
    return f"script: {' and '.join(rules)}" + (f"={threshold:g}" if threshold is not None and len(own) == 1 else "")


def script_of(record: Record) -> str:
    """Return the name of the script or module that ran; empty if the record does not have it.

    Args:
        record: The record of a run.

    Example:
        >>> from pathlib import Path
        >>> for argv in (["examples/train.py", "--lr", "1"], ["-m", "package.train"], []):
        ...     print(script_of(Record(Path("run.jsonl"), {"t": "meta", "argv": argv}, [], [], [], None, False)))
        train.py
        package.train
        <BLANKLINE>
    """
    argv = record.meta.get("argv") or [""]
    return argv[1] if argv[0] == "-m" and len(argv) > 1 else re.split(r"[/\\]", argv[0])[-1]


def compared(runs: Sequence[tuple[str, Verdict]]) -> str:
    """Return a text that says which of several runs ended with the lowest loss.

    Args:
        runs: The name and the verdict of each run.

    Returns:
        One to three sentences; empty if fewer than two runs have a loss or diverged.
    """
    known = sorted((judged.final_loss, label) for label, judged in runs if judged.final_loss is not None)
    if len(known) + sum(judged.diverged for _, judged in runs) < 2:
        return ""
    if not known:
        return "No run ended with a finite loss."
    lowest, best = known[0]
    different = len({judged.steps for _, judged in runs}) > 1
    caution = "They have different numbers of steps. " if different else ""
    return (
        f"{best} has the lowest final loss, {number(lowest)}. {caution}With one run of each, a small difference may be "
        "chance."
    )


def labelled(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return each record with a label: its file or folder name, or its path if these names are not distinct."""
    paths = [record.path for record in records]
    short = [path.parent.name if path.name == FILE_NAME else path.stem for path in paths]
    if not all(short) or len(set(short)) < len(short):
        short = [redacted(str(path)) for path in paths]
    return list(zip(records, short, strict=True))


def command(record: Record, rule: str, optimizer: str = "") -> str:
    """Return the command that runs the same script with a rule.

    Args:
        record: The record of a run.
        rule: The value of ``--clip``, such as ``"norm=1.3"`` or ``"median"``.
        optimizer: The label of the optimizer that the rule is for, if the script has several.

    Returns:
        A shell command; for a script that clips itself or has several optimizers, the change to make in the script.

    Example:
        >>> from pathlib import Path
        >>> record = Record(Path("run.jsonl"), {"t": "meta", "argv": ["train.py"]}, [], [], [], None, False)
        >>> command(record, "median")
        'gradguard run --clip median train.py'
        >>> command(record, "median", "optimizer 1 (SGD)")
        'in train.py, for optimizer 1 (SGD): gg.Guard(optimizer, gg.ClipByMedian())'
    """
    script = record.script
    named = clipping_rule(rule)
    threshold = "" if named.name != "norm" or named.number is None else plain_threshold(named.number)
    by_norm = f"max_norm={threshold}" if threshold else ""
    if optimizer:  # --clip would apply the rule to all optimizers
        where = f"in {script}, before the step of {optimizer}: " if by_norm else f"in {script}, for {optimizer}: "
        return where + (by_norm or f"gg.Guard(optimizer, {named.call})")
    if not record.meta.get("clip") and (record.steps.has_any("user_max_norm") or any(record.steps.column("rule"))):
        own = by_norm or f"gg.Guard(optimizer, {named.call}) in place of its clip"
        return f"in {script}, which clips itself: {own}"
    return f"gradguard run --clip {f'norm={threshold}' if threshold else rule} {script}"


def numbers_of(record: Record, judged: Verdict) -> dict[str, float | None]:
    """Return the numbers of a run under the names that ``--text``, ``--json`` and ``--fail-on`` share.

    Args:
        record: The record of a run.
        judged: The verdict on the run.
    """
    return {
        **fields_of(judged, "clip_share", "threshold", "median_coefficient", "median_norm", "max_norm", "spike_share"),
        "drift": drift_ratio(usable_norms(record)),
        "lock_in_share": lock_in_share(record),
        **fields_of(judged, "final_loss", "best_loss", "overhead_share"),
    }


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of ``value`` by name."""
    return {name: getattr(value, name) for name in names}


def counts_of(judged: Verdict) -> dict[str, int]:
    """Return the counts of a run's steps under the names that ``--text``, ``--json`` and ``--fail-on`` share.

    Args:
        judged: The verdict on the run.
    """
    return fields_of(
        judged, "steps", "taken_steps", "skipped_steps", "skipped_spikes", "nonfinite_steps", "faulty_steps"
    )


def notes(record: Record) -> list[str]:
    """Return remarks about an incomplete, damaged or newer record.

    Args:
        record: The record of a run.

    Returns:
        The sentences; usually none.
    """
    first = f" (the first: {record.first_fault})" if record.first_fault else ""
    counts = (record.unreadable, "damaged line"), (record.dropped, "field")
    damage = [counted(count, what) for count, what in counts if count]
    runs, schema = record.earlier_runs + 1, record.meta.get("schema")
    remarks = [
        (record.torn, "The last line of the record is incomplete and was left out: the run was probably killed."),
        (damage, f"Invalid parts of the record were left out: {' and '.join(damage)}{first}."),
        (runs > 1, f"The file contains {runs} runs, one after the other: only the last is shown."),
        (
            record.is_newer,
            f"The record was written by a newer gradguard (schema {schema}; this version reads schema {SCHEMA}): its "
            "new fields are not shown. Upgrade gradguard to see them.",
        ),
    ]
    return [words for holds, words in remarks if holds]


def environment(record: Record, judged: Verdict) -> list[tuple[str, str]]:
    """Return facts about the run's script, hardware, versions and overhead, as labels and values.

    Args:
        record: The record of a run.
        judged: The verdict on the run.

    Returns:
        The rows that have a value.
    """
    meta, end = record.meta, record.closing
    parameters = meta.get("params", ())
    elements = sum(parameter.get("numel", 0) for parameter in parameters)
    processes = f"{meta['world']:,} processes" if meta.get("world", 1) > 1 else ""
    shape = " × ".join(f"{name} {size}" for name, size in meta.get("mesh", {}).items())
    names = {"version": "gradguard ", "torch": "torch ", "python": "Python ", "host_platform": "", "git": "commit "}
    rows = [
        ("Script", record.script if meta.get("argv") else ""),
        ("Optimizer", ", ".join(meta.get("optimizers", ()))),
        ("Parameters", f"{len(parameters):,} tensors, {elements:,} elements" if parameters else ""),
        ("Device", ", ".join(filter(None, (meta.get("device"), processes, shape)))),
        ("Versions", ", ".join(name + meta[key] for key, name in names.items() if meta.get(key))),
        ("Observing cost", _cost(judged, end)),
        ("Ended", ending(end)[0] if end else "the record has no end: the run was killed, or is still running"),
        ("Record", redacted(str(record.path))),
    ]
    return [(label, value) for label, value in rows if value]


def _cost(judged: Verdict, end: dict[str, Any]) -> str:
    if judged.overhead_share is None:
        return ""
    return f"{percent(judged.overhead_share)} of the run ({number(end['overhead_ms'])} ms)"

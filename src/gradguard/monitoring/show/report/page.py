"""Write one HTML page that needs no network: it contains its charts, its styles and plotly.js."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradguard.errors import InvalidValueError, RecordError
from gradguard.files.writing import write_whole
from gradguard.monitoring.judge.diagnosis import diagnose, weighed_findings
from gradguard.monitoring.judge.findings import SEVERITIES
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import OptimizerSteps, by_optimizer, usable_steps
from gradguard.monitoring.show.report import figures, layer_section, series
from gradguard.monitoring.show.report.figure import Chart, palette, steps_between
from gradguard.monitoring.show.report.glossary import TERMS, explained
from gradguard.monitoring.show.report.summary import (
    clip_of,
    command,
    compared,
    environment,
    labelled,
    notes,
    said_of,
    script_of,
    sentence,
    severities,
    tone_of,
    untold,
)
from gradguard.words import listed

_FOLDER = Path(__file__).parent
_PLOTLY_JS = "plotly-cartesian.min.js"
"""The unmodified npm package plotly.js-cartesian-dist-min 4.1.1, whose licence is in the file beside it. It draws
scatter plots, bars and heat maps at a third of the size of the whole plotly.js."""
_ALL_POINTS = 2 * series.MOST_POINTS
_FEWEST_POINTS = 60
_MOST_SCRIPTS = 3
_FEWEST_CELLS = 4_000
_MOST_EVENTS = 30
_NAMED_AT_MOST = 10
_COLUMNS = (
    ("clip", False), ("final loss", True), ("best loss", True), ("median norm", True), ("largest norm", True),
    ("clipping bound", True), ("regime", False), ("spikes", True), ("non-finite steps", True),
)  # fmt: skip
"""The columns of the table that compares runs: the heading, and whether the cells are numbers."""


def write_report(records: list[Record], path: str | Path) -> Path:
    """Write one self-contained HTML report about one run, or about several side by side.

    **Guarantees**: The page loads nothing from the network. Every name from user code is escaped. A record without
    steps, losses or per-parameter norms gives a page without those charts. The page of a million steps or of thousands
    of parameters is below 2.6 MB, and the page of eight such runs is below 3.6 MB. The page is written completely or
    not at all.

    Args:
        records: One record, or several to compare.
        path: The path of the page; parent folders are created.

    Returns:
        The path of the page.

    Raises:
        InvalidValueError: If there is no record, or the page would replace one.
        RecordError: If the page cannot be written.
    """
    if not records:
        raise InvalidValueError("write_report needs at least one record, got none; read_record(path) gives one")
    path = Path(path)
    if any(path.exists() and record.path.exists() and path.samefile(record.path) for record in records):
        raise InvalidValueError(f"{path} is the record itself, and a page would replace it: name another file with -o")
    page = render(records).encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo() or path.is_char_device():  # also through a link such as /dev/stdout
            path.write_bytes(page)
        else:
            write_whole(path, page)
    except OSError as error:
        elsewhere = f"gradguard report {' '.join(str(record.path) for record in records)} -o PAGE"
        raise RecordError(f"cannot write {path}: {error.strerror or error}. Draw it elsewhere: {elsewhere}") from error
    return path


def page_beside(record: Path) -> Path:
    """Return the default path of a record's page: beside the record and with its name.

    Args:
        record: The path of the record.

    Example:
        >>> page_beside(Path("runs/run-2.jsonl")).name
        'run-2.html'
    """
    return record.with_suffix(".html")


def render(records: Sequence[Record]) -> str:
    """Render the page, with one part for each run, and for each optimizer of a run with several optimizers.

    Args:
        records: At least one record.

    Returns:
        The HTML text.
    """
    named = labelled(records)
    parts = [
        (part, record, part.label if part.label and len(records) == 1 else ": ".join(filter(None, (label, part.label))))
        for record, label in named
        for part in by_optimizer(record)
    ]
    subjects = [
        _subject(part, record, label, f"run-{index}", len(parts)) for index, (part, record, label) in enumerate(parts)
    ]
    overlay, lead = None, ""
    if len(parts) > 1:
        labels = [subject["label"] for subject in subjects]
        overlay = figures.overlay([part.record for part, _, _ in parts], labels, _points(len(parts)))
        lead = diagnose(records[0]).sentence if len(records) == 1 else ""
    if len(records) > 1:
        lead = compared([(label, verdict(record)) for record, label in named])
    scripts = list(dict.fromkeys(filter(None, map(script_of, records))))
    return _template().render(
        title=listed(scripts, _MOST_SCRIPTS) if scripts else "Gradient report",
        kind="Gradient report" if len(records) == 1 else f"{len(records)} runs compared",
        several_records=len(records) > 1,
        columns=[("run" if len(records) > 1 else "optimizer", False), *_COLUMNS],
        names=[label for _, label in named],
        lead=lead,
        subjects=subjects,
        overlay=overlay and _drawn(overlay, "", "overlay"),
        terms=sorted(TERMS, key=lambda term: term.name),
        plotlyjs=_text(_PLOTLY_JS),
        palette=_json(palette()),
        css=_text("report.css"),
        scripts=[_text(name) for name in ("report.js", "terms.js")],
    )


@functools.cache
def _template() -> Any:
    """Return the compiled template; it is cached, because compiling takes longer than rendering."""
    import jinja2

    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    made.filters |= {"number": number, "percent": percent, "explained": explained, "sentence": sentence}
    made.filters |= {"named": lambda names: listed(names, _NAMED_AT_MOST), "said": said_of}
    made.globals["steps_between"] = steps_between
    return made.from_string(_text("template.html.jinja"))


def _subject(part: OptimizerSteps, whole: Record, label: str, identity: str, among: int) -> dict[str, Any]:
    record = part.record
    judged, recommendation, diagnosis = verdict(record), recommend(record), diagnose(record)
    findings = [one for one in weighed_findings(whole) if part.index is None or one.optimizer in (part.index, None)]
    events = untold(_events(record, whole, part.index), findings)
    gravest = sorted(events, key=lambda event: SEVERITIES.index(event.get("severity", "info")))[:_MOST_EVENTS]
    prefix, points = f"{identity}-" if among > 1 else "", _points(among)
    usable = usable_steps(record).column("i")
    charts = [
        figures.norms_over_time(record, judged, recommendation, points),
        figures.updates_over_time(record, points),
        figures.clip_share(record) if judged.clipping else None,
        figures.along_depth(record),
        layer_section.heat_map(record, part.index, max(_FEWEST_CELLS, layer_section.MOST_CELLS // among)),
        layer_section.dominance(record, part.index, {usable[place] for place in spikes_of(record)}),
    ]
    return {
        "id": identity,
        "prefix": prefix,
        "label": label,
        "clip": clip_of(record),
        "verdict": judged,
        "tone": tone_of(diagnosis),
        "diagnosis": diagnosis,
        "recommendation": recommendation,
        "command": recommendation.rule and command(record, recommendation.rule, part.label),
        "figures": [_drawn(chart, prefix, identity) for chart in without_none(charts)],
        "findings": findings,
        "counts": severities(findings),
        "events": sorted(gravest, key=lambda event: event["i"]),
        "more_events": len(events) - len(gravest),
        "environment": environment(record, judged),
        "notes": notes(record),
    }


def _events(record: Record, whole: Record, index: int | None) -> list[dict[str, Any]]:
    # Events that belong to no step are shown with the first optimizer.
    if record is whole:
        return whole.events
    known = set(whole.steps.column("i"))
    lost = [event for event in whole.events if event["i"] not in known]
    return [*(lost if index == by_optimizer(whole)[0].index else ()), *record.events]


def _points(among: int) -> int:
    # The runs on one page share the points that the page can hold.
    return max(_FEWEST_POINTS, min(series.MOST_POINTS, _ALL_POINTS // among))


def _drawn(chart: Chart, prefix: str, steps: str) -> dict[str, Any]:
    modes = [("deviation", "against its own median"), ("absolute", "norm")]
    return {
        "id": prefix + chart.name,
        "chart": chart,
        "json": _json(chart.figure),
        "height": chart.figure["layout"]["height"],
        "modes": modes if "heat" in chart.figure else [],
        "steps": steps if chart.over_steps else "",
    }


def _json(value: Any) -> str:
    # A "<" could end the <script> element; JSON can express it as an escape.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")

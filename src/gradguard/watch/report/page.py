"""One HTML page that needs no network: figures, styles and plotly.js are inside it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradguard.errors import InvalidValueError, RecordError
from gradguard.watch.recommend import guard_threshold, recommend, usable_norms
from gradguard.watch.record import Record
from gradguard.watch.report import figures, layer_figures
from gradguard.watch.report.summary import clip_of, command, environment, labelled
from gradguard.watch.verdict import Verdict, number, percent, plain_threshold, verdict

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TEMPLATE = Path(__file__).with_name("template.html.jinja")
_MOST_EVENTS = 50
_PLOTLY = {"responsive": True, "displayModeBar": False}


def write_report(records: list[Record], path: str | Path) -> Path:
    """Write one self-contained HTML report about one run, or about several side by side.

    **Guarantees**: the page loads nothing from the network; every name that comes from user code is escaped; a
    record without steps, losses or per-parameter norms gives a page without those figures.

    Args:
        records: One record, or several to compare; the first is the baseline.
        path: Where the page goes; parent folders are made.

    Returns:
        The path of the page.

    Raises:
        InvalidValueError: There is no record.
        RecordError: The page cannot be written.
    """
    if not records:
        raise InvalidValueError("write_report needs at least one record, got none; read_record(path) gives one")
    path, page = Path(path), render(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}. Name another file with -o") from error
    return path


def render(records: list[Record]) -> str:
    """Render the page.

    Args:
        records: At least one record.

    Returns:
        HTML.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "threshold": plain_threshold}
    runs = [_run(record, label, index) for index, (record, label) in enumerate(labelled(records))]
    overlay = figures.losses(records, [run["label"] for run in runs]) if len(runs) > 1 else None
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        runs=runs, overlay=_html(overlay, "losses"), plotlyjs=get_plotlyjs()
    )


def _run(record: Record, label: str, index: int) -> dict[str, Any]:
    judged, recommendation = verdict(record), recommend(record)
    return {
        "label": label,
        "clip": clip_of(record),
        "verdict": judged,
        "tone": _tone(judged),
        "recommendation": recommendation,
        "command": recommendation.threshold and command(record, recommendation.threshold),
        "figures": _figures(record, judged, index),
        "events": record.events[:_MOST_EVENTS],
        "more_events": max(0, len(record.events) - _MOST_EVENTS),
        "environment": environment(record, judged),
        "torn": record.torn,
    }


def _tone(judged: Verdict) -> str:
    return "bad" if judged.nonfinite_steps or judged.diverged else judged.regime


def _figures(record: Record, judged: Verdict, index: int) -> list[dict[str, str]]:
    recommendation = recommend(record)
    norms = usable_norms(record)
    drawn = (
        ("Norms over time", _NORMS, figures.norms_over_time(record, judged, recommendation)),
        _clip_share(record, judged, recommendation),
        ("Layers", _LAYERS, layer_figures.layer_heat_map(record)),
        ("Distribution of norms", _HISTOGRAM, figures.norm_histogram(record, judged, recommendation)),
        (
            "Who dominates",
            _DOMINANCE,
            layer_figures.dominance(record, guard_threshold(norms) if norms else None),
        ),
    )
    return [
        {"title": title, "caption": caption, "html": _html(figure, f"figure-{index}-{place}")}
        for place, (title, caption, figure) in enumerate(drawn)
        if figure is not None
    ]


def _clip_share(record: Record, judged: Verdict, recommendation: Any) -> tuple[str, str, "Figure | None"]:
    figure = figures.clip_share(record, judged, recommendation)
    if judged.clipping:
        return "How often clipping binds", _BINDS, figure
    threshold = plain_threshold(recommendation.threshold or 0)
    return f"How often {threshold} would have bound", _WOULD_HAVE, figure


def _html(figure: "Figure | None", identity: str) -> str:
    if figure is None:
        return ""
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=identity, config=_PLOTLY)


_NORMS = "A spike is a norm far above its neighbours. The loss shares the time axis: does it jump after one?"
_BINDS = "Below 5 % a clip is a guard, up to 50 % it shapes training, above that it normalises most steps."
_WOULD_HAVE = (
    "This run was not clipped. The bars count the steps whose norm lies above the recommended threshold; "
    "a clipped run would have gone differently after the first of them."
)
_LAYERS = (
    "Each row is one parameter, in the order of the model, against its own median: "
    "red is larger than usual for that parameter, blue smaller."
)
_HISTOGRAM = "Both axes are logarithmic, so that single spikes stay visible. Vertical lines are thresholds."
_DOMINANCE = "Which parameters make the global norm. A parameter that leads only at spikes is where they start."

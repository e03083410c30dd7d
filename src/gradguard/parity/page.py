"""A comparison of two runs as one HTML page that needs no network."""

import math
import os
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradguard.errors import RecordError
from gradguard.files.writing import write_whole
from gradguard.parity.judge import BARS, Outcomes
from gradguard.parity.report import ParityReport
from gradguard.parity.saved import SavedGradients
from gradguard.words import listed

_MEANING = {
    "PASS": "Each gradient is within what rounding does to it.",
    "FAIL": "Some gradients differ by more than rounding does.",
    "INCONCLUSIVE": "Nobody can tell from these two runs whether the gradients are the same.",
}
_TONE = {"PASS": "guard", "FAIL": "bad", "INCONCLUSIVE": "shaping"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1032, 260, 66, 14, 12
_LOWEST, _HIGHEST = -2, 4  # powers of ten that the chart shows; what is beyond lies on its edge
_names = partial(listed, most=40)


def write_page(
    path: str | os.PathLike[str],
    report: ParityReport,
    runs: Sequence[SavedGradients],
    names: Sequence[str],
    css: str = "",
) -> Path:
    """Write the page of a comparison, in one piece.

    Args:
        path: Where to.
        report: What `compare` found.
        runs: The reference and the new run.
        names: What to call them.
        css: Its style.

    Returns:
        The path.

    Raises:
        RecordError: If it cannot be written.
    """
    path = Path(path)
    try:
        write_whole(path, render(report, runs, names, css).encode("utf-8", "replace"))
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}. Name another file with --output."
        ) from error
    return path


def render(report: ParityReport, runs: Sequence[SavedGradients], names: Sequence[str], css: str = "") -> str:
    """Return the page as HTML; every name in it is escaped.

    Args:
        report: What `compare` found.
        runs: The reference and the new run.
        names: What to call them.
        css: Its style.

    Returns:
        HTML.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = files("gradguard.parity").joinpath("page.html.jinja").read_text(encoding="utf-8")
    equal = [o for o in report.parameters if o.kind == "equal"]
    return environment.from_string(template).render(
        report=report,
        names=names,
        css=css,
        tone=_TONE[report.verdict],
        meaning=_MEANING[report.verdict],
        equal=f"{len(equal):,}",
        total=f"{len(report.parameters):,}",
        power=f"{report.power:.1g}" if report.power < 1 else "",
        chart=_chart(report.parameters),
        wrong=[o for o in report.parameters if o.is_wrong],
        blind=[o for o in report.parameters if o.kind == "blind"],
        right=equal,
        facts=_facts(runs),
        listed=_names,
        short=_short,
    )


def _chart(outcomes: Outcomes) -> dict[str, Any]:
    shown = [o for o in outcomes if o.distance is not None]
    step = (_WIDTH - _LEFT - 10) / max(1, len(shown) - 1)
    points = [
        (
            round(_LEFT + step * i, 1),
            _height(o.distance or 0.0),
            o.is_wrong,
            f"{o.name}: {_short(o.distance)} bars",
        )
        for i, o in enumerate(shown)
    ]
    lines = [(_height(10.0**k), f"{10.0**k:g}") for k in range(_LOWEST, _HIGHEST + 1)]
    return {"width": _WIDTH, "height": _HEIGHT, "points": points, "lines": lines, "limit": _height(BARS)}


def _height(distance: float) -> float:
    """Where a distance lies, from the top down."""
    shown = min(max(distance, 10.0**_LOWEST), 10.0**_HIGHEST)
    share = (math.log10(shown) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _facts(runs: Sequence[SavedGradients]) -> list[tuple[str, ...]]:
    tables = [
        {
            "parameters": f"{len(run.parameters):,}",
            "layout": _names(list(dict.fromkeys(p.layout for p in run.parameters))),
            "dtype of gradients": _names(list(dict.fromkeys(p.dtype.removeprefix("torch.") for p in run.parameters))),
            "rounding of the coarsest dtype": _short(run.epsilon),
            "runs that differ by rounding": f"{len(run.sketches['gradient']) - 1}",
            "loss": _short(run.losses[0]) if run.losses else "",
            "random numbers": "drawn" if run.random else "none drawn",
            **{name: f"{value:g}" for name, value in run.facts.items()},
            **run.versions,
        }
        for run in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, *(table.get(name, "") for table in tables)) for name in names]


def _short(value: float | None) -> str:
    return "" if value is None else "none" if math.isinf(value) else f"{value:.3g}"

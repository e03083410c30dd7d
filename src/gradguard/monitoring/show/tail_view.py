"""A run in progress as a person sees it in a terminal, and as one line of text."""

import math
import time
from typing import TYPE_CHECKING, Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.record.steps import regime_of
from gradguard.monitoring.record.text import printable
from gradguard.monitoring.show.run_state import Bucket, OptimizerProgress, RunState
from gradguard.words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

REGIME_STYLES = {"never": "blue", "guard": "green", "shaping": "yellow", "normalising": "red"}
SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}
_DETAILS = ((8, 5, 99), (6, 5, 5), (4, 3, 3), (3, 3, 2), (2, 2, 1), (0, 0, 0))  # rows of chart, layers, events
_AXIS = 9
_MOST_FACTS, _GAP = 6, 3
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column, from the top
_ASCII_LEVELS = " .:-=+*#%@"


def duration(seconds: float) -> str:
    """Return a duration as a person would write it.

    Example:
        >>> [duration(seconds) for seconds in (0, 59, 61, 3700, 90000)]
        ['0 s', '59 s', '1 min 1 s', '1 h 1 min', '1 d 1 h']
    """
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    named = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((k for k, (count, _) in enumerate(named) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in named[first : first + 2] if count) or "0 s"


def clock(moment: float, now: float) -> str:
    """Return the local time of ``moment``, with its date if that is not today's."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def ending(end: dict[str, Any]) -> tuple[str, str]:
    """Return how a run ended in words, and their style."""
    code, steps, wall = end.get("exit"), end.get("steps"), end.get("wall")
    after = f" after {counted(steps, 'step')}" if steps is not None else ""
    within = f" in {duration(wall)}" if wall is not None else ""
    if end.get("interrupted"):
        return f"interrupted{after}{within}", "yellow"
    if code:
        return f"failed with exit code {code}{after}{within}", "bold red"
    return f"finished{after}{within}", "green"


Fact = tuple[str, str, str]
"""Label, value and style of a number."""


def facts(run: RunState) -> list[Fact]:
    """Return what is known now of the run as a whole."""
    step, seconds = run.last, run.seconds_per_step
    wall = step.get("wall")
    known = [
        ("step", f"{step['i']:,}" if step else None, "bold"),
        ("rate", _rate(seconds), ""),
        ("time", None if wall is None else duration(wall), ""),
        ("loss", *_measured(step, "loss")),
        ("AMP scale", _plain(step, "amp_scale"), ""),
    ]
    return [(label, value, style) for label, value, style in known if value is not None]


def optimizer_facts(state: OptimizerProgress) -> list[Fact]:
    """Return what is known now of one optimizer."""
    step, share = state.last, state.clip_share
    regime = None if share is None else regime_of(share)
    clipped = None if share is None else f"{percent(share)} of {len(state.recent_taken)} ({regime})"
    known = [
        ("norm", *_measured(step, "norm")),
        ("threshold", *_threshold(step)),
        ("coefficient", *_measured(step, "coefficient")),
        ("update", *_measured(step, "update")),
        ("logit", *_measured(step, "logit")),
        ("clipped", clipped, REGIME_STYLES.get(regime or "", "")),
        ("lr", _plain(step, "lr"), ""),
    ]
    return [(label, value, style) for label, value, style in known if value is not None]


def line(run: RunState) -> str:
    """Return the present state in one line of plain text; of several optimizers that of the last step."""
    state = run.state
    named = [f"{label} {value}" for label, value, _ in facts(run)]
    named += [state.label] if state.label else []
    named += [f"{label} {value}" for label, value, _ in optimizer_facts(state)]
    top = [f"largest {name} {percent(share)}" for name, share in run.largest_layers(1)]
    return "  ".join(named + top) or "no step yet"


def event_line(event: dict[str, Any]) -> str:
    """Return an event with its advice in one line of plain text."""
    advice = f" ({event['advice']})" if event.get("advice") else ""
    return f"step {event['i']} {event.get('severity', 'info')}: {event.get('message') or event.get('kind')}{advice}"


def fitting_view(
    run: RunState, status: tuple[str, str], title: str, events: int, console: "Console"
) -> "RenderableType":
    """Return the view in as much detail as the height of ``console`` holds; all of it where that is no terminal.

    Args:
        run: The run.
        status: What goes on in words, and the style of these.
        title: What is watched.
        events: At most how many events to show.
        console: Where it will be shown.

    Returns:
        Something that rich prints.
    """
    found = view(run, status, title, (_DETAILS[0][0], _DETAILS[0][1], events), console)
    for chart, layers, most in _DETAILS[1:]:
        if not console.is_terminal or len(console.render_lines(found, pad=False)) <= console.height:
            return found
        found = view(run, status, title, (chart, layers, min(most, events)), console)
    return found


def view(
    run: RunState, status: tuple[str, str], title: str, detail: tuple[int, int, int], console: "Console"
) -> "RenderableType":
    """Return the view with given rows of chart, numbers of layers and of events; arguments as in `fitting_view`."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    width = max(10, console.width - 4)
    parts: list[RenderableType] = [Text(printable(run.diagnosis), style="bold")] if run.diagnosis else []
    parts += [] if run.last else [Text("no step yet", style="dim")]
    states = list(run.states.values())
    if len(states) == 1:
        parts += [_facts_table(facts(run) + optimizer_facts(states[0]), width)]
    elif states:
        parts += [_facts_table(facts(run), width)]
    for state in states:
        parts += _state_part(state, width, detail[0] // len(states), console, alone=len(states) == 1)
    parts += _layers_part(run, width, detail[1], console.options.ascii_only) if detail[1] else []
    parts += _events_part(run, detail[2]) if detail[2] else []
    words = Text(printable(status[0]), style=status[1])
    if words.cell_len > width - 4:  # too long for the frame, and nothing of it may be lost
        parts.append(words)
        words = Text()
    return Panel(
        Group(*parts),
        title=Text(printable(title), style="bold", overflow="ellipsis"),
        title_align="left",
        subtitle=words or None,
        subtitle_align="left",
        box=box.ROUNDED,
        border_style=status[1].removeprefix("bold "),
        padding=(0, 1),
    )


def _facts_table(known: list[Fact], width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    cells = []
    for label, value, style in known:
        cell = Text(no_wrap=True, overflow="ellipsis").append(f"{label} ", style="dim").append(value, style=style)
        cells.append(cell)
    fits = [count for count in range(_MOST_FACTS, 1, -1) if _row_width(cells, count) <= width]
    count = fits[0] if fits else 1
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(count):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for start in range(0, len(cells), count):
        table.add_row(*cells[start : start + count])
    return table


def _row_width(cells: "list[Text]", count: int) -> int:
    """How wide ``count`` columns of cells are."""
    columns = [cells[start::count] for start in range(count)]
    return sum(max((cell.cell_len for cell in column), default=0) + _GAP for column in columns)


def _state_part(
    state: OptimizerProgress, width: int, rows: int, console: "Console", *, alone: bool
) -> "list[RenderableType]":
    """The chart of one optimizer, below its numbers where it is not alone."""
    from rich.text import Text

    known = [] if alone else optimizer_facts(state)
    parts: list[RenderableType] = [] if alone else [Text(f"\n{state.label}", style="bold")]
    parts += [_facts_table(known, width)] if known else []
    return parts + (_chart_part(state, width, rows, console, gap=alone) if rows else [])


def _chart_part(
    state: OptimizerProgress, width: int, rows: int, console: "Console", *, gap: bool
) -> "list[RenderableType]":
    from rich.text import Text

    steps = f"steps {state.first_step or 0:,} to {state.last['i']:,}"
    heading = Text(
        "\n" * gap + f"norm before any clip, {steps}, log scale", style="dim", no_wrap=True, overflow="ellipsis"
    )
    of_norms = state.last.get("rule", "norm") == "norm"  # else a bound on something else
    threshold = state.last.get("threshold") if of_norms else None
    return [heading, chart(state, max(4, width - _AXIS), rows, threshold, ascii_only=console.options.ascii_only)]


def chart(
    state: OptimizerProgress, width: int, rows: int, threshold: float | None = None, *, ascii_only: bool = False
) -> "Text":
    """Return the norms of ``state`` on a log scale, from the smallest to the largest of the steps of each column.

    Args:
        state: An optimizer.
        width: Columns of characters; each holds two columns of dots.
        rows: Rows of characters; each holds four dots.
        threshold: Where to draw a line, if it is within the norms.
        ascii_only: Draw one row of ASCII characters, for terminals that have no others.

    Returns:
        The chart with its axis.
    """
    from rich.text import Text

    columns = state.history.columns(width if ascii_only else 2 * width)
    limits = _limits(columns, threshold)
    if limits is None:
        return Text("no finite norm yet", style="dim")
    if ascii_only:
        marks = [_ascii_mark(bucket, limits) for bucket in columns]
        return Text(f"{number(10 ** limits[0])} to {number(10 ** limits[1])}\n{''.join(marks)}", no_wrap=True)
    masks = _dots(columns, limits, rows)
    line_row = None if threshold is None else _row_of(threshold, limits, rows) // 4
    labels = {0: number(10 ** limits[1]), rows - 1: number(10 ** limits[0])}
    if line_row is not None and threshold is not None:
        labels[line_row] = plain_threshold(threshold)
    text = Text(no_wrap=True, overflow="crop")
    for row in range(rows):
        style = "yellow" if row == line_row else "dim"
        text.append(f"{labels.get(row, ''):>{_AXIS - 2}.{_AXIS - 2}} ", style=style)
        _draw_row(text, masks[row], columns, width if row == line_row else 0, first=row == 0)
        text.append("\n" if row < rows - 1 else "")
    return text


def _draw_row(text: "Text", masks: list[int], columns: list[Bucket], line: int, *, first: bool) -> None:
    """One row of the chart; ``line`` is how long the line of the threshold is in it."""
    for k in range(max(len(masks), line)):
        mask = masks[k] if k < len(masks) else 0
        if first and any(bucket.nonfinite for bucket in columns[2 * k : 2 * k + 2]):
            text.append("✕", style="bold red")
        elif mask:
            text.append(chr(0x2800 + mask), style="cyan")
        else:
            text.append("┄" if k < line else " ", style="yellow")


def _limits(columns: list[Bucket], threshold: float | None) -> tuple[float, float] | None:
    """The logarithms between which everything lies; None without a positive norm."""
    lows = [bucket.low for bucket in columns if 0 < bucket.low < math.inf]
    highs = [bucket.high for bucket in columns if 0 < bucket.high < math.inf]
    if not lows or not highs:
        return None
    low, high = math.log10(min(lows)), math.log10(max(highs))
    if threshold is not None and 0 < threshold < math.inf and low - 1.5 < math.log10(threshold) < high + 1.5:
        low, high = min(low, math.log10(threshold)), max(high, math.log10(threshold))
    middle = (low + high) / 2
    return min(low, middle - 0.15), max(high, middle + 0.15)  # a constant norm is no noise


def _row_of(norm: float, limits: tuple[float, float], rows: int) -> int:
    """The row of dots, from the top, that a norm is in."""
    position = (math.log10(norm) - limits[0]) / (limits[1] - limits[0]) if norm > 0 else 0.0
    return round((1 - min(1.0, max(0.0, position))) * (4 * rows - 1))


def _dots(columns: list[Bucket], limits: tuple[float, float], rows: int) -> list[list[int]]:
    """The braille pattern of every character."""
    masks = [[0] * ((len(columns) + 1) // 2) for _ in range(rows)]
    for k, bucket in enumerate(columns):
        if bucket.low > bucket.high:
            continue
        for dot in range(_row_of(bucket.high, limits, rows), _row_of(bucket.low, limits, rows) + 1):
            masks[dot // 4][k // 2] |= _DOTS[k % 2][dot % 4]
    return masks


def _ascii_mark(bucket: Bucket, limits: tuple[float, float]) -> str:
    if bucket.nonfinite:
        return "!"
    if bucket.low > bucket.high:
        return " "
    levels = len(_ASCII_LEVELS) - 1
    return _ASCII_LEVELS[max(1, levels - _row_of(bucket.high, limits, 4) * levels // 15)]


def _layers_part(run: RunState, width: int, count: int, ascii_only: bool) -> "list[RenderableType]":
    from rich.text import Text

    layers = run.largest_layers(count)
    if not layers:
        return []
    text = Text("\nlargest shares of the squared norm now", style="dim", no_wrap=True, overflow="ellipsis")
    named = max(8, min(max(len(name) for name, _ in layers), width - 20))
    for name, share in layers:
        shown = name if len(name) <= named else "…" + name[1 - named :]
        bar = round(share * max(0, min(40, width - named - 9)))
        text.append(f"\n{shown:<{named}} ", style="not dim")
        text.append(f"{percent(share):>6} ", style="not dim bold")
        text.append(("=" if ascii_only else "━") * bar, style="not dim magenta")
    return [text]


def _events_part(run: RunState, count: int) -> "list[RenderableType]":
    from rich.text import Text

    if not run.events:
        return []
    total = sum(run.severities.values())
    counts = ", ".join(f"{n:,} {name}{'s' * (n > 1 and name != 'info')}" for name, n in run.severities.most_common())
    text = Text(f"\n{counted(total, 'event')}: {counts}", style="dim")
    shown = list(run.events)[-count:] if count else []
    for event, following in zip(shown, [*shown[1:], {}], strict=True):
        severity = event.get("severity", "info")
        text.append(f"\nstep {event['i']} ", style="not dim")
        text.append(severity, style=f"not dim {SEVERITY_STYLES[severity]}")
        text.append(f" {event.get('message') or event.get('kind')}", style="not dim")
        if event.get("advice") and event["advice"] != following.get("advice"):  # said once for several in a row
            text.append(f"\n  {event['advice']}", style="italic")
    return [text]


def _rate(seconds: float | None) -> str | None:
    if not seconds:  # or walls that differ by less than can be divided
        return None
    return f"{number(1 / seconds)} steps/s" if seconds < 1 else f"{number(seconds)} s/step"


def _measured(step: dict[str, Any], key: str) -> tuple[str | None, str]:
    if key in step and step[key] is None:
        return "not finite", "bold red"
    value = step.get(key)
    return (None if value is None else number(value)), "bold" if key in ("loss", "norm") else ""


def _threshold(step: dict[str, Any]) -> tuple[str | None, str]:
    value, rule = step.get("threshold"), step.get("rule")
    prefix = "" if rule in (None, "norm") else f"{rule} "
    return (None if value is None else f"{prefix}{plain_threshold(value)}"), ""


def _plain(step: dict[str, Any], key: str) -> str | None:
    value = step.get(key)
    return None if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"

"""A run in progress as a person sees it in a terminal, and as one line of text."""

import math
import time
from typing import TYPE_CHECKING, Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.record.steps import regime_of
from gradguard.monitoring.record.text import printable
from gradguard.monitoring.show.run_state import OptimizerProgress, RunState
from gradguard.words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REGIME_STYLES = {"never": "blue", "guard": "green", "shaping": "yellow", "normalising": "red"}
SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}
_DETAILS = ((5, 99), (5, 5), (3, 3), (3, 2), (2, 1), (0, 0))  # layers, events
_GAP = 3
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", ".:-=+*#@"


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
    found = view(run, status, title, (_DETAILS[0][0], events), console)
    for layers, most in _DETAILS[1:]:
        if not console.is_terminal or len(console.render_lines(found, pad=False)) <= console.height:
            return found
        found = view(run, status, title, (layers, min(most, events)), console)
    return found


def view(
    run: RunState, status: tuple[str, str], title: str, detail: tuple[int, int], console: "Console"
) -> "RenderableType":
    """Return the view with given numbers of layers and of events; arguments as in `fitting_view`."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    width, ascii_only = max(10, console.width - 4), console.options.ascii_only
    parts: list[RenderableType] = [Text(printable(run.diagnosis), style="bold")] if run.diagnosis else []
    parts += [_in_columns(facts(run))] if run.last else [Text("no step yet", style="dim")]
    for state in run.states.values():
        parts += [Text(f"\n{state.label}", style="bold")] if state.label else []
        parts += [_in_columns(optimizer_facts(state))]
        parts += [chart(state, width, ascii_only=ascii_only)] if any(detail) else []
    parts += _layers_part(run, width, detail[0], ascii_only) if detail[0] else []
    parts += _events_part(run, detail[1]) if detail[1] else []
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


def _in_columns(known: list[Fact]) -> "RenderableType":
    from rich.columns import Columns
    from rich.text import Text

    cells = [
        Text(no_wrap=True, overflow="ellipsis").append(f"{label} ", style="dim").append(value, style=style)
        for label, value, style in known
    ]
    return Columns(cells, padding=(0, _GAP, 0, 0))


def chart(state: OptimizerProgress, width: int, *, ascii_only: bool = False) -> "Text":
    """Return the norms of ``state`` as one row on a log scale: the largest norm of the steps of each character.

    Args:
        state: An optimizer.
        width: Characters of the row.
        ascii_only: Draw it in ASCII, for terminals that have no other characters.

    Returns:
        The steps and norms between which it goes, and the row.
    """
    from rich.text import Text

    columns = state.history.columns(width)
    known = [norm for bucket in columns for norm in (bucket.low, bucket.high) if 0 < norm < math.inf]
    if not known:
        return Text("no finite norm yet", style="dim")
    low, high = min(known), max(known)
    steps = f"steps {state.first_step or 0:,} to {state.last['i']:,}, log scale"
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"norm before any clip, {number(low)} to {number(high)}, {steps}\n", style="dim")
    levels, lost = (_ASCII_LEVELS, "!") if ascii_only else (_LEVELS, "✕")
    span = (math.log10(high) - math.log10(low)) or 1.0
    for bucket in columns:
        share = (math.log10(bucket.high) - math.log10(low)) / span if 0 < bucket.high < math.inf else 0.0
        mark = lost if bucket.nonfinite else levels[round(share * (len(levels) - 1))]
        text.append(mark, style="bold red" if bucket.nonfinite else "cyan")
    return text


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

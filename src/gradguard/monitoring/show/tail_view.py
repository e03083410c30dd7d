"""Draw a run in progress in a terminal, and as one line of text."""

import math
import time
from typing import TYPE_CHECKING, Any

from gradguard.monitoring.judge.numbers import number, percent, plain_threshold
from gradguard.monitoring.record.step_rows import regime_of
from gradguard.monitoring.record.text import printable
from gradguard.monitoring.show.run_state import OptimizerProgress, RunState
from gradguard.words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REGIME_STYLES = {"never": "blue", "guard": "green", "shaping": "yellow", "normalising": "red"}
SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}
_LAYERS = 5
_GAP = 3
_LEVELS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Return a duration in at most two units.

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
    """Return the local time of ``moment``, with the date if it differs from the date of ``now``."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def ending(end: dict[str, Any]) -> tuple[str, str]:
    """Return a text about how a run ended, and its style."""
    code, steps, wall = end.get("exit"), end.get("steps"), end.get("wall")
    after = f" after {counted(steps, 'step')}" if steps is not None else ""
    within = f" in {duration(wall)}" if wall is not None else ""
    if end.get("interrupted"):
        return f"interrupted{after}{within}", "yellow"
    if code:
        return f"failed with exit code {code}{after}{within}", "bold red"
    return f"finished{after}{within}", "green"


Fact = tuple[str, str, str]
"""The label, value and style of a number."""


def facts(run: RunState) -> list[Fact]:
    """Return the current numbers of the whole run."""
    step, seconds = run.last, run.seconds_per_step
    found = [("step", f"{step['i']:,}", "bold")] if step else []
    if seconds:  # 0 is possible: a tiny difference divided by the number of steps may underflow
        rate = f"{number(1 / seconds)} steps/s" if seconds < 1 else f"{number(seconds)} s/step"
        found.append(("rate", rate, ""))
    if "wall" in step:
        found.append(("time", duration(step["wall"]), ""))
    return found + _measured(step, "loss", "amp_scale")


def optimizer_facts(state: OptimizerProgress) -> list[Fact]:
    """Return the current numbers of one optimizer."""
    step, share = state.last, state.clip_share
    found = _measured(step, "norm")
    if step.get("threshold") is not None:
        rule = step.get("rule", "norm")
        value = plain_threshold(step["threshold"])
        found.append(("threshold", value if rule == "norm" else f"{rule} {value}", ""))
    found += _measured(step, "coefficient", "update", "logit")
    if share is not None:
        regime = regime_of(share)
        clipped = f"{percent(share)} of {len(state.recent_taken)} ({regime})"
        found.append(("clipped", clipped, REGIME_STYLES[regime]))
    return found + _measured(step, "lr")


def _measured(step: dict[str, Any], *keys: str) -> list[Fact]:
    """Return those of the named numbers that a step has; None stands for a number that is not finite."""
    found = []
    for key in filter(step.__contains__, keys):
        form = plain_threshold if key in ("lr", "amp_scale") else number
        shown, style = ("not finite", "bold red") if step[key] is None else (form(step[key]), _STYLES.get(key, ""))
        found.append(("AMP scale" if key == "amp_scale" else key, shown, style))
    return found


_STYLES = {"loss": "bold", "norm": "bold"}


def line(run: RunState) -> str:
    """Return the present state in one line of plain text; with several optimizers, show the one of the last step."""
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


def view(run: RunState, status: tuple[str, str], title: str, events: int, console: "Console") -> "RenderableType":
    """Return the view of a run: title, status, diagnosis, numbers and norms, then layers and events.

    The layers and events come last, because a small terminal cuts off the end of the view.

    Args:
        run: The run.
        status: The status text and its style.
        title: The script and its record.
        events: The largest number of events to show.
        console: The console that will show the view.

    Returns:
        A renderable for rich.
    """
    from rich.console import Group
    from rich.text import Text

    width = console.width
    parts: list[RenderableType] = [
        Text(printable(title), style="bold", overflow="ellipsis", no_wrap=True),
        Text(printable(status[0]), style=status[1]),
    ]
    parts += [Text(printable(run.diagnosis), style="bold")] if run.diagnosis else []
    parts.append(_in_columns(facts(run)) if run.last else Text("no step yet", style="dim"))
    for state in run.states.values():
        parts += [Text(f"\n{state.label}", style="bold")] if state.label else []
        parts += [_in_columns(optimizer_facts(state)), chart(state, width)]
    return Group(*parts, *_layers_part(run, width), *(_events_part(run, events) if events else []))


def _in_columns(known: list[Fact]) -> "RenderableType":
    from rich.columns import Columns
    from rich.text import Text

    cells = [
        Text(no_wrap=True, overflow="ellipsis").append(f"{label} ", style="dim").append(value, style=style)
        for label, value, style in known
    ]
    return Columns(cells, padding=(0, _GAP, 0, 0))


def chart(state: OptimizerProgress, width: int) -> "Text":
    """Return the norms of ``state`` as one row on a log scale; each character is the largest norm of its steps.

    Args:
        state: The progress of an optimizer.
        width: The number of characters in the row.

    Returns:
        A line with the range of steps and norms, and the row.
    """
    from rich.text import Text

    columns = state.history.columns(width)
    known = [norm for norm in columns if 0 < norm < math.inf]
    if not known:
        return Text("no finite norm yet", style="dim")
    low, high = min(known), max(known)
    steps = f"steps {state.first_step or 0:,} to {state.last['i']:,}, log scale"
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"norm before any clip, {number(low)} to {number(high)}, {steps}\n", style="dim")
    span = (math.log10(high) - math.log10(low)) or 1.0
    for norm in columns:
        if norm == math.inf:
            text.append("✕", style="bold red")
        else:
            share = (math.log10(max(norm, low)) - math.log10(low)) / span
            text.append(_LEVELS[round(share * (len(_LEVELS) - 1))], style="cyan")
    return text


def _layers_part(run: RunState, width: int) -> "list[RenderableType]":
    from rich.text import Text

    layers = run.largest_layers(_LAYERS)
    if not layers:
        return []
    text = Text("\nlargest shares of the squared norm now", style="dim", no_wrap=True, overflow="ellipsis")
    named = max(8, min(max(len(name) for name, _ in layers), width - 20))
    for name, share in layers:
        shown = name if len(name) <= named else "…" + name[1 - named :]
        text.append(f"\n{shown:<{named}} ", style="not dim")
        text.append(f"{percent(share):>6} ", style="not dim bold")
        text.append("━" * round(share * max(0, min(40, width - named - 9))), style="not dim magenta")
    return [text]


def _events_part(run: RunState, count: int) -> "list[RenderableType]":
    from rich.text import Text

    if not run.events:
        return []
    counts = ", ".join(counted(n, name, "info" if name == "info" else "") for name, n in run.severities.most_common())
    text = Text(f"\n{counted(run.severities.total(), 'event')}: {counts}", style="dim")
    for event in list(run.events)[-count:]:
        text.append(f"\n{event_line(event)}", style=f"not dim {SEVERITY_STYLES[event.get('severity', 'info')]}")
    return [text]

"""What the pictures of these pages are drawn with: shapes in two themes, and terminals."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

_THEMES = {  # of paper and ink; each colour has a contrast of at least 3 on its paper
    "light": {"paper": "#ffffff", "ink": "#1b1f24", "faint": "#e3e6ea", "grey": "#7d8590", "blue": "#0072b2",
              "orange": "#d55e00", "green": "#1b7f4b"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#30363d", "grey": "#8b949e", "blue": "#56b4e9",
             "orange": "#f0883e", "green": "#57c98a"},
}  # fmt: skip


def _style() -> str:
    """CSS by which each colour is a class to fill or to stroke with; dark where the reader's system is."""
    rules = {
        theme: "".join(f".{name}{{fill:{value}}}.{name}-line{{stroke:{value}}}" for name, value in colours.items())
        for theme, colours in _THEMES.items()
    }
    return f"{rules['light']}@media(prefers-color-scheme:dark){{{rules['dark']}}}"


class Drawing:
    """A picture that is being drawn, in points from its upper left corner.

    Args:
        width: In points.
        height: In points.
        title: What it shows, read aloud in place of it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="sans-serif" font-size="14"><title>{escape(title)}</title>',
            f"<style>{_style()}</style>",
        ]
        self.box(0, 0, width, height, "paper")

    def svg(self) -> str:
        """Return the picture as a file."""
        return "\n".join([*self._lines, "</svg>\n"])

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", colour: str = "ink", *, bold: bool = False,
        size: int = 14,
    ) -> None:  # fmt: skip
        """Write ``words`` on the line ``y``."""
        weight = ' font-weight="bold"' * bold + (f' font-size="{size}"' if size != 14 else "")
        self._add(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{colour}"{weight}>{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dashes: str = "") -> None:
        """Draw a straight line."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._add(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{colour}-line" '
            f'stroke-width="{width}"{dashed}/>'
        )

    def path(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.5, dashes: str = "") -> None:
        """Draw a line through points."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline points="{joined}" fill="none" class="{colour}-line" stroke-width="{width}"{dashed}/>')

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.5, dashes: str = ""
    ) -> None:
        """Draw an arrow."""
        angle = math.atan2(to_y - y, to_x - x)
        wings = [(to_x - 10 * math.cos(angle + turn), to_y - 10 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(to_x, to_y), *wings])
        self.line(x, y, to_x, to_y, colour, width, dashes)
        self._add(f'<polygon points="{points}" class="{colour}"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle."""
        self._add(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{colour}"/>')

    def frame(self, x: float, y: float, width: float, height: float, colour: str, line: float = 2) -> None:
        """Draw the sides of a rectangle."""
        self._add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
            f'class="{colour}-line" stroke-width="{line}"/>'
        )

    def ring(self, x: float, y: float, radius: float, colour: str) -> None:
        """Draw a circle."""
        self._add(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="none" class="{colour}-line" stroke-width="2"/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """Fill a circle."""
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{colour}"/>')

    def bar(self, x: float, low: float, high: float, colour: str) -> None:
        """Draw an error bar from ``low`` to ``high``."""
        self.line(x, low, x, high, colour, 1.5)
        for end in (low, high):
            self.line(x - 4, end, x + 4, end, colour, 1.5)

    def _add(self, line: str) -> None:
        self._lines.append(line)


def terminal(command: str, shown: Sequence[Text], width: int) -> str:
    """Return a picture of a terminal in which a command was typed, as SVG.

    Args:
        command: What was typed.
        shown: What it printed, line by line.
        width: In columns.

    Returns:
        The picture, dark as terminals are, and light where the reader's theme is.
    """
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"[bold green]$[/] [bold]{command}[/]", highlight=False)
    for line in shown:
        console.print(line, soft_wrap=False)
    name = re.sub(r"\W+", "-", command.split(" --")[0])
    own = name.removeprefix("gradguard-").partition("-")[0]
    light = console.export_svg(title=command, unique_id=own, clear=False, theme=DEFAULT_TERMINAL_THEME)
    svg = console.export_svg(title=command, unique_id=own)
    rules = re.findall(rf"\.{own}-r\d+ {{.*}}", light)
    rules += [".background { fill: #ffffff; stroke: #d0d7de }", f".{own}-title {{ fill: #1b1f24 }}"]
    svg = svg.replace('<rect fill="#292929"', '<rect class="background" fill="#292929"', 1)
    svg = svg.replace(
        "    </style>", "\n".join(["@media (prefers-color-scheme: light) {", *rules, "}", "    </style>"]), 1
    )
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no font from the network
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)

"""Draw the SVG pictures of these pages: ``python docs/pictures.py`` writes them beside the pages that show them."""

import contextlib
import io
import math
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradguard.cli import main as gradguard
from gradguard.monitoring.show.live_tail import tail as follow
from gradguard.named_rules import replayed_rule

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from drawing import Drawing, terminal  # noqa: E402

GRADIENTS = [(2.6, 0.8), (0.5, 1.9), (-1.9, 1.5), (-0.6, -0.5), (1.2, -2.0)]

ACCURACY = {
    0.3: (0.736, 0.703, 0.639, 0.714, 0.664),
    1: (0.906, 0.922, 0.897, 0.900, 0.900),
    3: (0.931, 0.919, 0.925, 0.931, 0.925),
    10: (0.919, 0.922, 0.928, 0.928, 0.925),
}
"""Test accuracy by epsilon with seeds 0 to 4: what ``python benchmarks/private_accuracy.py`` prints."""
WITHOUT_PRIVACY = 0.950


def _by_norm(x: float, y: float) -> tuple[float, float]:
    factor = min(1.0, 1 / math.hypot(x, y))
    return x * factor, y * factor


def _by_value(x: float, y: float) -> tuple[float, float]:
    return max(-1.0, min(1.0, x)), max(-1.0, min(1.0, y))


def clip_directions() -> str:
    """Five gradients of two weights, before and after each clip: one keeps their directions, the other does not."""
    drawing = Drawing(700, 412, "What a norm clip and a value clip do to five gradients of two weights")
    for place, (name, clip, what) in enumerate(
        [
            ("norm clip at 1", _by_norm, "shorter, the same direction"),
            ("value clip at 1", _by_value, "another direction"),
        ]
    ):
        left, middle, unit = 20 + 340 * place, 190, 58
        centre = left + 160
        drawing.text(centre, 26, name, bold=True)
        drawing.text(centre, 366, what, colour="blue")
        drawing.line(left, middle, left + 320, middle, "grey")
        drawing.line(centre, 45, centre, 335, "grey")
        if clip is _by_norm:
            drawing.ring(centre, middle, unit, "orange")
        else:
            drawing.frame(centre - unit, middle - unit, 2 * unit, 2 * unit, "orange")
        for x, y in GRADIENTS:
            clipped_x, clipped_y = clip(x, y)
            if (clipped_x, clipped_y) != (x, y):
                drawing.arrow(centre, middle, centre + unit * x, middle - unit * y, "grey", 1.5, "5 4")
            drawing.arrow(centre, middle, centre + unit * clipped_x, middle - unit * clipped_y, "blue", 3)
    drawing.line(215, 392, 245, 392, "grey", 1.5, "5 4")
    drawing.text(252, 397, "before", "start")
    drawing.line(325, 392, 355, 392, "blue", 3)
    drawing.text(362, 397, "after", "start")
    drawing.line(425, 392, 455, 392, "orange", 2)
    drawing.text(462, 397, "bound", "start")
    return drawing.svg()


def private_accuracy() -> str:
    """Accuracy on test images against epsilon, five seeds each."""
    drawing = Drawing(580, 320, "Accuracy on test images against epsilon")

    def place(epsilon: float, accuracy: float) -> tuple[float, float]:
        return 70 + (math.log10(epsilon) + 0.7) / 2 * 480, 260 - (accuracy - 0.5) / 0.5 * 220

    for accuracy in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        y = place(1, accuracy)[1]
        drawing.line(70, y, 550, y, "faint")
        drawing.text(60, y + 5, f"{accuracy:.1f}", "end")
    for epsilon in ACCURACY:
        drawing.text(place(epsilon, 0.5)[0], 282, f"{epsilon:g}")
    y = place(1, WITHOUT_PRIVACY)[1]
    drawing.line(70, y, 550, y, "orange", 2, "6 4")
    drawing.text(548, y - 8, "without privacy", "end", "orange")
    drawing.path([place(epsilon, sum(each) / len(each)) for epsilon, each in ACCURACY.items()], "blue", 2)
    for epsilon, each in ACCURACY.items():
        for accuracy in each:
            drawing.dot(*place(epsilon, accuracy), 4, "blue")
    drawing.text(310, 306, "epsilon (smaller protects more)")
    drawing.text(70, 24, "accuracy on test images", "start")
    return drawing.svg()


STEPS = 360
SPIKES = {160: 14.0, 240: 6.0, 241: 4.0, 320: 30.0}
RULES = {
    "norm=0.5": "one number: too low, cuts all",
    "norm=2": "another: cuts the start and spikes",
    "median": "above the median, by the spread",
    "autoclip": "at a percentile of all so far",
    "zclip=inf": "above the mean, by deviations",
    "clip_fraction=0.05": "on one step in twenty",
}


def norms() -> list[float]:
    """Norms as of many a run: high at first, then falling to their usual size, with noise, and four spikes."""
    draw = random.Random(7)
    usual = [1.0 + 5.0 * math.exp(-step / 15) for step in range(STEPS)]
    return [size * math.exp(0.18 * draw.gauss(0, 1)) * SPIKES.get(step, 1.0) for step, size in enumerate(usual)]


def clippers() -> str:
    """What each rule does to the same norms: its threshold, and the norms after it."""
    wide, high, before = 300, 170, norms()
    drawing = Drawing(660, 606, "The same norms under six clipping rules: threshold, and norms after the clip")

    for place, (rule, words) in enumerate(RULES.items()):
        left, top = 30 + (place % 2) * (wide + 10), 46 + (place // 2) * (high + 24)
        y_of = [top + high - 34 - math.log10(value / 0.3) / 2.05 * (high - 60) for value in (1.0, 10.0)]
        steps = replayed_rule(rule)()
        decided = [steps.step(norm) for norm in before]

        def spot(step: int, value: float, left: float = left, top: float = top) -> tuple[float, float]:
            height = math.log10(min(max(value, 0.3), 33) / 0.3) / 2.05
            return left + step / STEPS * (wide - 20), top + high - 34 - height * (high - 60)

        for label, y in zip(("1", "10"), y_of, strict=True):
            drawing.line(left, y, left + wide - 20, y, "faint")
            drawing.text(left - 4, y + 4, label, "end", "grey", size=11)
        drawing.text(left, top, rule, "start", bold=True)
        drawing.text(left + wide - 20, top, words, "end", size=12)
        drawing.path([spot(step, norm) for step, norm in enumerate(before)], "grey", 1)
        drawing.path([spot(step, at) for step, (_, at) in enumerate(decided) if math.isfinite(at)], "orange", 2, "5 3")
        after = [norm * factor for norm, (factor, _) in zip(before, decided, strict=True)]
        drawing.path([spot(step, norm) for step, norm in enumerate(after)], "blue", 1.5)
        bound = sum(factor < 1 for factor, _ in decided)
        caught = sum(decided[step][0] < 1 for step in SPIKES)
        drawing.text(left, top + high - 12, f"cuts {bound} of {STEPS} steps, {caught} of 4 spikes", "start", size=12)
    for x, colour, words, dashes in (
        (150, "grey", "norm before", ""), (300, "orange", "threshold", "5 3"), (440, "blue", "norm after", "")
    ):  # fmt: skip
        drawing.line(x, 18, x + 28, 18, colour, 2, dashes)
        drawing.text(x + 34, 23, words, "start")
    return drawing.svg()


def sharding() -> str:
    """Who holds what of three parameters, and the one sum that makes the norm of all."""
    drawing = Drawing(700, 420, "Four processes hold parts of three parameters and add up one number each")
    held = (("embedding", "blue", "its own quarter", 4), ("head", "green", "a half, on two each", 2))
    for rank in range(4):
        left = 20 + 170 * rank
        drawing.text(left + 75, 26, f"process {rank}", bold=True)
        for row, (name, colour, how, parts) in enumerate(held):
            y = 44 + 62 * row
            drawing.frame(left, y, 150, 26, "grey", 1)
            drawing.box(left + 150 / parts * (rank % parts), y, 150 / parts, 26, colour)
            drawing.text(left + 75, y + 43, f"{name}: {how}", size=12)
        drawing.box(left, 168, 150, 26, "orange")
        drawing.text(left + 75, 211, "norm.weight: whole, on all", size=12)
        drawing.text(left + 75, 240, "squares of its own parts,", size=12)
        drawing.text(left + 75, 256, "divided by 1, 2 and 4 copies", size=12)
        drawing.arrow(left + 75, 264, left + 75, 290, "ink")
    drawing.frame(20, 292, 660, 34, "ink", 1.5)
    drawing.text(350, 314, "one all-reduce: the sum of four numbers", bold=True)
    for rank in range(4):
        left = 20 + 170 * rank
        drawing.arrow(left + 75, 326, left + 75, 352, "ink")
        drawing.text(left + 75, 370, "its root: the norm of all,", size=12)
        drawing.text(left + 75, 387, "and one coefficient for", size=12)
        drawing.text(left + 75, 404, "the parts that it holds", size=12)
    return drawing.svg()


def _single(value: float) -> float:
    """Round to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _quotients(function: Callable[[float], float], at: float, side: int) -> list[tuple[int, float, float]]:
    """Return differences of a function in float32, for steps of 2^-1, 2^-2, ..., with their error bars.

    An error bar is the change to the next step, and the rounding. ``side`` is 0 for central differences, 1 and -1 for
    those from the right and from the left.
    """
    values = []
    for power in range(1, 23):
        h = 2.0**-power
        right, left = (at, at - h) if side < 0 else (at + h, at if side else at - h)
        slope = (_single(function(right)) - _single(function(left))) / (right - left)
        values.append((power, slope, max(abs(function(right)), abs(function(left))) * 2**-23 / (right - left)))
    return [
        (power, slope, rounding + abs(slope - finer)) for (power, slope, rounding), (_, finer, _) in pairwise(values)
    ]


def _wave(x: float) -> float:
    return math.sin(3 * x)


def _kinked(x: float) -> float:
    return max(0.1 * x, 1.3 * x) + 0.4 * x * x + 0.2


def gradient_check() -> str:
    """Differences with error bars by step size: at a smooth point, beside a wrong backward, and at a kink."""
    drawing = Drawing(790, 330, "Numerical derivatives with error bars, and what the backward says")
    truth = 3 * math.cos(3 * 0.2)
    panels = [
        ("a smooth point", "inside every bar: PASS", _wave, 0.2, (0,), 0.2, truth, truth),
        ("a backward that is 3 % off", "outside the smallest bars: FAIL", _wave, 0.2, (0,), 0.2, truth, 0.97 * truth),
        ("a kink", "between the two sides: a subgradient", _kinked, 0.0, (1, -1), 1.0, 0.7, 0.5),
    ]
    for place, (title, words, function, at, sides, span, centre, said) in enumerate(panels):
        left, top, wide, high = 20 + 255 * place, 60, 240, 190

        def spot(value: float, centre: float = centre, span: float = span) -> float:
            return 155 - 95 * max(-1.0, min(1.0, (value - centre) / span))

        drawing.frame(left, top, wide, high, "faint", 1)
        drawing.text(left + wide / 2, 26, title, bold=True)
        drawing.text(left + wide / 2, 46, words, size=12)
        for side in sides:
            for power, slope, error in _quotients(function, at, side):
                x = left + 12 + (power - 1) / 20 * 216
                if abs(slope - centre) < span:
                    drawing.bar(x, spot(slope - error), spot(slope + error), "blue")
                    drawing.dot(x, spot(slope), 2.5, "blue")
        drawing.line(left, spot(said), left + wide, spot(said), "orange", 2)
        drawing.text(left + 10, top + high + 18, "large", "start", size=12)
        drawing.text(left + wide / 2, top + high + 18, "step of the difference", size=12)
        drawing.text(left + wide - 10, top + high + 18, "small", "end", size=12)
    drawing.bar(150, 292, 312, "blue")
    drawing.dot(150, 302, 2.5, "blue")
    drawing.text(162, 307, "difference of the forward in float32, ± its error", "start")
    drawing.line(500, 302, 530, 302, "orange", 2)
    drawing.text(538, 307, "what the backward says", "start")
    return drawing.svg()


@contextlib.contextmanager
def _demo() -> Iterator[str]:
    """Go to an empty folder with the demo's records in it.

    Yields:
        What the demo printed.
    """
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                gradguard(["demo", "--no-open"])
            yield out.getvalue()
        finally:
            os.chdir(home)


def demo() -> str:
    """What a terminal shows of `gradguard demo`."""
    lines = []
    with _demo() as printed:
        for line in printed.splitlines():
            text = Text(line)
            text.stylize("bold yellow" if line.startswith("  ") else "")
            text.highlight_regex(r"gradguard run .*?(?=`|$)", "bold cyan")
            lines.append(text)
    return terminal("gradguard demo", lines, 112)


def tail() -> str:
    """What a terminal shows of `gradguard tail`, of the demo's run."""
    width = 112
    console = Console(width=width, height=40, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with _demo():
        follow(Path("gradguard-demo/unclipped"), once=True, events=3, console=console)
    shown = Text.from_ansi(console.file.getvalue())
    return terminal("gradguard tail gradguard-demo/unclipped", shown.split("\n"), width)


PICTURES = {
    "clip_directions.svg": clip_directions,
    "clippers.svg": clippers,
    "demo.svg": demo,
    "gradient_check.svg": gradient_check,
    "sharding.svg": sharding,
    "tail.svg": tail,
    "tutorials/private_accuracy.svg": private_accuracy,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        (HERE / name).write_text(PICTURES[name](), encoding="utf-8")

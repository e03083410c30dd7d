"""Draw the SVG pictures of these pages: ``python docs/pictures.py`` writes them beside the pages that show them."""

import math
from pathlib import Path

HERE = Path(__file__).parent
BLUE, ORANGE, GREY, INK = "#0072b2", "#d55e00", "#9aa3ad", "#1b1f24"

GRADIENTS = [(2.6, 0.8), (0.5, 1.9), (-1.9, 1.5), (-0.6, -0.5), (1.2, -2.0)]

ACCURACY = {0.3: (0.572, 0.619, 0.686), 1: (0.897, 0.903, 0.908), 3: (0.928, 0.928, 0.928), 10: (0.925, 0.914, 0.928)}
"""Test accuracy by epsilon with seeds 0, 1 and 2: what ``train`` of docs/tutorials/private.md prints."""
WITHOUT_PRIVACY = 0.953


def _svg(width, height, lines, title):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="14" fill="{INK}"><title>{title}</title>'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *lines, "</svg>\n"])


def _text(x, y, words, anchor="middle", colour=INK, weight="normal"):
    shape = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {shape}>{words}</text>'


def _line(x1, y1, x2, y2, colour, width=1.0, dashes=""):
    style = f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _arrow(x, y, to_x, to_y, colour, width, dashes=""):
    angle = math.atan2(to_y - y, to_x - x)
    wings = [(to_x - 10 * math.cos(angle + turn), to_y - 10 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(to_x, to_y), *wings])
    return [_line(x, y, to_x, to_y, colour, width, dashes), f'<polygon points="{points}" fill="{colour}"/>']


def _by_norm(x, y):
    factor = min(1.0, 1 / math.hypot(x, y))
    return x * factor, y * factor


def _by_value(x, y):
    return max(-1.0, min(1.0, x)), max(-1.0, min(1.0, y))


def clip_directions():
    """Five gradients of two weights, before and after each clip: one keeps their directions, the other does not."""
    lines = []
    for place, (name, clip, what) in enumerate(
        [
            ("norm clip at 1", _by_norm, "shorter, the same direction"),
            ("value clip at 1", _by_value, "another direction"),
        ]
    ):
        left, middle, unit = 20 + 340 * place, 190, 58
        centre = left + 160
        lines += [_text(centre, 26, name, weight="bold"), _text(centre, 366, what, colour=BLUE)]
        lines += [_line(left, middle, left + 320, middle, GREY), _line(centre, 45, centre, 335, GREY)]
        if clip is _by_norm:
            lines.append(
                f'<circle cx="{centre}" cy="{middle}" r="{unit}" fill="none" stroke="{ORANGE}" stroke-width="2"/>'
            )
        else:
            corner, side = f'x="{centre - unit}" y="{middle - unit}"', f'width="{2 * unit}" height="{2 * unit}"'
            lines.append(f'<rect {corner} {side} fill="none" stroke="{ORANGE}" stroke-width="2"/>')
        for x, y in GRADIENTS:
            clipped_x, clipped_y = clip(x, y)
            if (clipped_x, clipped_y) != (x, y):
                lines += _arrow(centre, middle, centre + unit * x, middle - unit * y, GREY, 1.5, "5 4")
            lines += _arrow(centre, middle, centre + unit * clipped_x, middle - unit * clipped_y, BLUE, 3)
    lines += [_line(215, 392, 245, 392, GREY, 1.5, "5 4"), _text(252, 397, "before", "start")]
    lines += [_line(325, 392, 355, 392, BLUE, 3), _text(362, 397, "after", "start")]
    lines += [_line(425, 392, 455, 392, ORANGE, 2), _text(462, 397, "bound", "start")]
    return _svg(700, 412, lines, "What a norm clip and a value clip do to five gradients of two weights")


def private_accuracy():
    """Accuracy on test images against epsilon, three seeds each."""

    def place(epsilon, accuracy):
        return 70 + (math.log10(epsilon) + 0.7) / 2 * 480, 260 - (accuracy - 0.5) / 0.5 * 220

    lines = []
    for accuracy in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        y = place(1, accuracy)[1]
        lines += [_line(70, y, 550, y, "#e3e6ea"), _text(60, y + 5, f"{accuracy:.1f}", "end")]
    for epsilon in ACCURACY:
        lines.append(_text(place(epsilon, 0.5)[0], 282, f"{epsilon:g}"))
    y = place(1, WITHOUT_PRIVACY)[1]
    lines += [_line(70, y, 550, y, ORANGE, 2, "6 4"), _text(548, y - 8, "without privacy", "end", ORANGE)]
    means = [place(epsilon, sum(each) / len(each)) for epsilon, each in ACCURACY.items()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in means)
    lines.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    for epsilon, each in ACCURACY.items():
        spots = [place(epsilon, accuracy) for accuracy in each]
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{BLUE}" fill-opacity="0.7"/>' for x, y in spots]
    lines += [_text(310, 306, "epsilon (smaller protects more)"), _text(70, 24, "accuracy on test images", "start")]
    return _svg(580, 320, lines, "Accuracy on test images against epsilon")


PICTURES = {"clip_directions.svg": clip_directions, "tutorials/private_accuracy.svg": private_accuracy}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")

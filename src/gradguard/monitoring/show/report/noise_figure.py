"""The gradient noise scale over the steps, against the batch size, and what it says about that."""

from collections.abc import Sequence
from typing import Any

from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report import series
from gradguard.monitoring.show.report.figure import BLACK, BLUE, Chart, Table, subplots

_TABLE_ROWS = 12
_LITTLE = 4
"""From so many times the noise scale on, twice the batch saves a tenth of the steps at most."""


def noise_scale(record: Record, most: int) -> Chart | None:
    """The noise scale with its interval on a log axis, and the batch size as a line.

    Args:
        record: The record of a run, to whose steps ``noise_scale`` was logged.
        most: How many points a line may have.

    Returns:
        The chart, or None where it was never measured.
    """
    steps = list(record.steps.where(record.steps.has("noise_scale")))
    if not any(_positive(step, "noise_scale") or _positive(step, "noise_scale_low") for step in steps):
        return None
    drawn = [steps[place[-1]] for place in series.buckets(len(steps), most)]
    figure, x = subplots([1.0], height=300), [step["i"] for step in drawn]
    middle = [_positive(step, "noise_scale") for step in drawn]
    ends = [(_positive(step, "noise_scale_low"), _positive(step, "noise_scale_high")) for step in drawn]
    low, high = ([None if None in pair else pair[side] for pair in ends] for side in (0, 1))
    outline = series.outline(series.Band(x, low, middle, high, thinned=True))
    figure.add_area(*outline, BLUE, "scale")
    hover = "step %{x:,}: noise scale %{y:,.3g}"
    figure.add_line(x, middle, "noise scale", BLUE, hover, width=1.6, legendgroup="scale")
    batches = [_positive(step, "batch_size") for step in drawn]
    if any(batches):
        figure.add_line(x, batches, "batch size", BLACK, "step %{x:,}: batch of %{y:,}", dash="dash", shape="hv")
    values = [value for line in (low, middle, high, batches) for value in line if value is not None]
    figure.log_axis("samples", values)
    figure.over_steps([record])
    words = suggestion(*(_positive(steps[-1], key) for key in _FIELDS))
    caption = f"{words} {_CAPTION}"
    return Chart(
        "noise-scale", "Gradient noise scale", caption, figure.to_json(), words, _table(steps), over_steps=True
    )


def suggestion(scale: float | None, low: float | None, high: float | None, batch: float | None) -> str:
    """Say what a noise scale means for the batch size.

    Args:
        scale: The noise scale; None where the gradient cannot be told from its noise.
        low: Lower end of its interval, if known.
        high: Upper end of its interval, if known.
        batch: The batch size, if known.

    Returns:
        One or two sentences.

    Example:
        >>> for sentence in suggestion(900.0, 700.0, 1200.0, 64.0).replace(";", ".").split(". "):
        ...     print(sentence)
        The noise scale is about 900 (700 to 1,200) samples at the end
        At a batch of 64, twice the batch takes about 47 % fewer steps
        from a batch of some 3,600 on it saves a tenth of the steps at most.
    """
    if scale is None:
        above = f"; it is probably above {_samples(low)} samples" if low else ""
        return f"At the end the gradient cannot be told from its noise, so the noise scale is not known{above}."
    interval = f" ({_samples(low)} to {_samples(high)})" if low is not None and high is not None else ""
    first = f"The noise scale is about {_samples(scale)}{interval} samples at the end."
    if batch is None:
        return first
    if batch > _LITTLE * scale:
        more = percent(scale / (batch + scale))
        return f"{first} At a batch of {batch:,.0f}, half the batch takes only about {more} more steps."
    fewer = percent(scale / (2 * (batch + scale)))
    return (
        f"{first} At a batch of {batch:,.0f}, twice the batch takes about {fewer} fewer steps; from a batch of "
        f"some {_samples(_LITTLE * scale)} on it saves a tenth of the steps at most."
    )


def _samples(count: float) -> str:
    return f"{round(float(f'{count:.2g}')) if count >= 100 else round(count):,}" if count >= 10 else number(count)


def _positive(step: dict[str, Any], key: str) -> float | None:
    """A number that has a place on a logarithmic axis."""
    value = step.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _table(steps: Sequence[dict[str, Any]]) -> Table:
    places = series.buckets(len(steps), _TABLE_ROWS)
    rows = [steps[place[-1]] for place in places]
    head = ("step", "noise scale", "lower end", "upper end", "batch size")
    return Table(head, [(f"{row['i']:,}", *(number(row.get(key)) for key in _FIELDS)) for row in rows])


_FIELDS = ("noise_scale", "noise_scale_low", "noise_scale_high", "batch_size")
_CAPTION = (
    "The band is the 95 % interval. Steps are those of plain gradient descent with its best learning rate, by the "
    "model of McCandlish et al. 2018; the scale usually grows in training."
)

import json
from dataclasses import replace

import pytest
from synthetic import make_record, steps_of

from gradguard.monitoring.record.fields import parse_line
from gradguard.monitoring.show.report.element_figure import element_magnitudes


def record_of(histograms, **more):
    lines = [
        {"t": "tensors", "i": 10 * place, "norm": []} | ({"histogram": histogram} if histogram else {})
        for place, histogram in enumerate(histograms)
    ]
    return make_record(steps=steps_of([1.0] * 10 * len(lines)), tensors=lines, **more)


def counts(low, *numbers):
    return {"edges": [low + 0.5 * place for place in range(len(numbers) + 1)], "counts": list(numbers)}


@pytest.mark.parametrize(
    "histograms",
    [[], [None, None], [counts(0.0, 0, 0)] * 2, [counts(0.0, 1), None]],
    ids=["no lines", "not recorded", "all empty", "only one"],
)
def test_no_chart_without_two_histograms(histograms):
    assert element_magnitudes(record_of(histograms)) is None


def test_shares_by_hand():
    chart = element_magnitudes(record_of([counts(-3.0, 1, 3), None, counts(-2.5, 9, 1)]))
    (drawn,) = chart.figure["data"]
    assert drawn["x"] == [0, 20, 30]
    assert drawn["y"] == [-3.0, -2.5, -2.0, -1.5]
    assert drawn["text"] == [["25.00%", "0.00%"], ["75.00%", "90.00%"], ["0.00%", "10.00%"]]
    assert drawn["z"] == [[-0.6, None], [-0.12, -0.05], [None, -1.0]]


def test_lines_without_a_step_are_drawn():
    record = replace(record_of([counts(0.0, 1), counts(0.0, 1)]), steps=[])
    assert element_magnitudes(record).figure["data"][0]["x"] == [0, 10, 11]


def test_quantiles_and_words_by_hand():
    # Half of the elements are below the middle of the second bin, 10 ** -0.75, then all of them 100 times smaller.
    chart = element_magnitudes(record_of([counts(-1.5, 1, 2, 1), counts(-3.5, 1, 2, 1)]))
    assert chart.summary == "Half of the gradient elements were below 0.178 in step 0, and below 0.00178 in step 10."
    assert [row[0] for row in chart.table.rows] == ["0 to 0", "10 to 10"]
    assert [row[2] for row in chart.table.rows] == ["0.178", "0.00178"]


def test_a_loss_scale_moves_the_edges_and_not_the_elements():
    shift = 4.816  # log10 of 65536
    moved = {"edges": [-3.0 + 5 - shift, -2.5 + 5 - shift], "counts": [7]}
    chart = element_magnitudes(record_of([moved, moved]))
    assert chart.figure["data"][0]["y"] == [-3.0, -2.5]


def test_a_long_run_is_thinned_and_loses_no_element():
    chart = element_magnitudes(record_of([counts(0.0, 1) if place % 2 else counts(1.0, 1) for place in range(400)]), 20)
    (drawn,) = chart.figure["data"]
    assert len(drawn["x"]) == 21
    assert {row[5] for row in drawn["text"]} == {"50.00%", "0.00%"}


@pytest.mark.parametrize(
    ("histogram", "kept"),
    [
        ({"edges": [-1.0, -0.5, 0.0], "counts": [1, 2]}, True),
        ({"edges": [0], "counts": []}, True),
        ({"edges": [-1.0, -0.5], "counts": [1, 2]}, False),
        ({"edges": [0.0, -0.5], "counts": [1]}, False),
        ({"edges": [0.0, 0.0], "counts": [1]}, False),
        ({"edges": [0.0, 1e300], "counts": [1]}, False),
        ({"edges": [0.0, None], "counts": [1]}, False),
        ({"edges": [0.0, 0.5], "counts": [-1]}, False),
        ({"edges": [0.0, 0.5], "counts": [True]}, False),
        ({"edges": [0.0, 0.5]}, False),
        ({"edges": "ab", "counts": [1]}, False),
        ([1, 2], False),
    ],
)
def test_a_histogram_that_cannot_be_meant_is_left_out(histogram, kept):
    line, dropped = parse_line(json.dumps({"t": "tensors", "i": 0, "norm": [], "histogram": histogram}).encode())
    assert (line.get("histogram") == histogram, dropped) == (kept, not kept)

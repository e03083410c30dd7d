"""Gradients along depth: what the chart draws of a record."""

import math

import pytest
from synthetic import make_record, steps_of

from gradguard.monitoring.show.report.figures import along_depth

SHAPES = {"first.weight": [4, 4], "first.bias": [4], "last.weight": [4, 1], "middle.weight": [4, 4]}
ORDER = {"first.weight": 0, "first.bias": 1, "middle.weight": 2, "last.weight": 3}


def record_of(levels, *, eps=None, names=tuple(SHAPES)):
    """A record whose element gradients are ``levels[name](line)`` on 40 lines."""
    params = [
        {"name": name, "shape": SHAPES[name], "numel": math.prod(SHAPES[name]), "order": ORDER[name]} for name in names
    ]
    lines = [
        {"t": "tensors", "i": i, "norm": [levels[name](i) * math.sqrt(math.prod(SHAPES[name])) for name in names]}
        for i in range(40)
    ]
    meta = {"t": "meta", "params": params} | ({} if eps is None else {"eps": [eps]})
    return make_record(meta=meta, steps=steps_of([1.0] * 40), tensors=lines)


LEVELS = {
    "first.weight": lambda i: 1e-6 if i < 20 else 1e-3,
    "first.bias": lambda i: 5.0,
    "middle.weight": lambda i: 1e-3,
    "last.weight": lambda i: 0.5,
}


def test_weights_stand_in_the_order_of_the_forward_with_their_elements_gradient():
    chart = along_depth(record_of(LEVELS))
    first, last = chart.figure["data"]
    assert first["customdata"] == ["first.weight", "middle.weight", "last.weight"]  # a bias is no layer
    assert first["y"] == pytest.approx([1e-6, 1e-3, 0.5])
    assert last["y"] == pytest.approx([1e-3, 1e-3, 0.5])
    assert [row[2] for row in chart.table.rows] == ["0.00100", "0.00100", "0.500"]
    assert [row[0] for row in chart.table.rows] == ["first.weight", "middle.weight", "last.weight"]


@pytest.mark.parametrize(("eps", "drawn"), [(1e-8, True), (1e-15, False), (None, False)])
def test_eps_is_drawn_where_gradients_come_near_it(eps, drawn):
    names = [trace["name"] for trace in along_depth(record_of(LEVELS, eps=eps)).figure["data"]]
    assert ("the optimizer's eps, 1e-08" in names) is drawn
    assert len(names) == 2 + drawn


def test_a_weight_without_a_gradient_has_a_gap_and_few_weights_have_no_chart():
    chart = along_depth(record_of(LEVELS | {"middle.weight": lambda i: 1.0 if i == 0 else 0.0}))
    assert chart.figure["data"][1]["y"][1] is None
    assert along_depth(record_of(LEVELS, names=("first.weight", "first.bias", "last.weight"))) is None
    assert along_depth(make_record(steps=steps_of([1.0] * 40))) is None

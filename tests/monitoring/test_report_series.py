"""The numbers behind the charts, by hand."""

import base64
from array import array

import pytest
from synthetic import make_record, steps_of, wide_meta

from gradguard.monitoring.show.report import layer_section as layers
from gradguard.monitoring.show.report.series import band, clip_windows, loss_range, outline


def params(*names):
    return {"t": "meta", "params": [{"name": name, "numel": 1} for name in names]}


def tensors(rows, **more):
    return [{"t": "tensors", "i": i, "norm": row} | more for i, row in enumerate(rows)]


def test_a_band_keeps_a_spike_of_one_step_in_a_hundred_thousand():
    norms = [1.0, 2.0, 3.0, 2.0] * 25_000
    norms[77_777] = 500.0
    found = band(make_record(steps=steps_of(norms)), "norm")
    assert len(found.steps) == 1200
    assert found.thinned
    place = found.high.index(500.0)
    assert abs(found.steps[place] - 77_777) <= 84
    assert (found.low[place], found.middle[place]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("values", "positive", "expected"),
    [
        ([], False, ([], [], [], [])),
        ([1.0, None], False, ([0, 1], [1.0, None], [1.0, None], [1.0, None])),
        ([0.0, 2.0], True, ([0, 1], [None, 2.0], [None, 2.0], [None, 2.0])),
        ([-1.0, 2.0], False, ([0, 1], [-1.0, 2.0], [-1.0, 2.0], [-1.0, 2.0])),
        ([4.0, 1.0, 2.0, None, None, None], False, ([1, 4], [1.0, None], [2.0, None], [4.0, None])),
    ],
)
def test_bands(values, positive, expected):
    found = band(make_record(steps=steps_of(values)), "norm", 2, positive=positive)
    assert (found.steps, found.low, found.middle, found.high) == expected


def test_a_quantity_that_only_some_steps_have():
    steps = [{"t": "step", "i": i} | ({"loss": float(i)} if i % 10 == 0 else {}) for i in range(100)]
    found = band(make_record(steps=steps), "loss")
    assert found.steps == list(range(0, 100, 10))
    assert not found.thinned


def test_an_outline_has_one_polygon_for_each_stretch():
    steps = steps_of([1.0, 2.0, 3.0, 4.0, None, None, 5.0, 6.0])
    x, y = outline(band(make_record(steps=steps), "norm", 4))
    assert x == [1, 3, 3, 1, None, 7, 7, None]
    assert y == [2.0, 4.0, 3.0, 1.0, None, 6.0, 5.0, None]


def test_windows_count_what_bound_and_leave_faults_out():
    steps = steps_of([1.0] * 20, coefficient=0.5) + steps_of([1.0] * 20, coefficient=1.0)
    for place, step in enumerate(steps):
        step["i"] = place
    steps[3] |= {"norm": None, "nonfinite": 1}
    steps[4]["skipped"] = True
    windows = clip_windows(make_record(steps=steps))
    assert [(one.first, one.last, one.count) for one in windows] == [(0, 13, 12), (14, 26, 13), (27, 39, 13)]
    assert [one.share for one in windows] == [1.0, pytest.approx(6 / 13), 0.0]


def test_layer_norms_mark_zero_and_nonfinite():
    record = make_record(meta=params("a", "b"), tensors=tensors([[0.0, 10.0], [None, 1.0], [1.0, 0.1]]))
    matrix = layers.layer_norms(record, [0, 1, 2])
    assert matrix.cells == [[0.0, None, 1.0], [10.0, 1.0, 0.1]]
    assert matrix.medians() == [1.0, 1.0]
    packed = array("h", base64.b64decode(matrix.packed()))
    assert list(packed) == [layers.ZERO, layers.NONFINITE, 0, 100, 0, -100]


def test_what_had_no_gradient_is_a_gap_and_no_zero():
    lines = tensors([[0.0, 1.0, 0.0]] * 3, absent=[0])
    record = make_record(meta=params("gone", "alive", "dead"), tensors=[tensors([[2.0, 1.0, 0.0]])[0], *lines])
    matrix = layers.layer_norms(record, [0, 1, 2])
    assert list(array("h", base64.b64decode(matrix.packed())))[:4] == [30, *[layers.GAP] * 3]
    assert [row[-1] for row in matrix.cells[1:]] == [1.0, 0.0]
    late = make_record(meta=record.meta, tensors=lines)
    chart = layers.heat_map(late, None)
    assert [row[3:] for row in chart.table.rows] == [("0", "0"), ("0", "0"), ("3", "0")]
    assert chart.figure["heat"]["labels"] == ["gone", "alive", "dead"]


def test_layer_norms_keep_spikes_when_thinned():
    rows = [[1.0]] * 3000
    rows[1717] = [50.0]
    matrix = layers.layer_norms(make_record(meta=params("a"), tensors=tensors(rows)), [0])
    assert len(matrix.steps) == 600
    assert max(matrix.cells[0]) == 50.0


def test_a_model_too_wide_for_a_page_keeps_what_moved():
    rows = [[1.0] * 2000 for _ in range(50)]
    rows[7][1234] = 900.0
    rows[8][55] = None
    matrix = layers.layer_norms(make_record(meta=wide_meta(2000), tensors=tensors(rows)), range(2000))
    assert (len(matrix.names), matrix.left_out) == (layers.MOST_ROWS, 500)
    assert wide_meta(2000)["params"][1234]["name"] in matrix.names
    assert any(None in row for row in matrix.cells)
    assert len(matrix.names) * len(matrix.steps) <= layers.MOST_CELLS


def test_rows_belong_to_the_optimizer_that_steps_them():
    meta = {"t": "meta", "params": [{"name": name, "optimizer": int(name > "b")} for name in "abc"]}
    record = make_record(meta=meta, tensors=tensors([[1.0, 2.0, 3.0]] * 8))
    assert [layers.rows_of(record, optimizer) for optimizer in (None, 0, 1)] == [[0, 1, 2], [0, 1], [2]]
    assert layers.rows_of(make_record(meta=params("a", "b")), 1) == [0, 1]
    for optimizer, names in ((0, ["a", "b"]), (1, ["c"])):
        assert layers.heat_map(record, optimizer).figure["heat"]["rows"] == names
        assert sorted(row[0] for row in layers.dominance(record, optimizer, ()).table.rows) == names


def test_dominance_by_hand():
    rows = [[3.0, 4.0]] * 8 + [[0.0, 10.0]]
    record = make_record(meta=params("a", "b"), tensors=tensors(rows))
    rows, label = layers.shares(record, {8}, [0, 1])
    assert label == "spike steps (1 recorded)"
    assert rows == [("a", pytest.approx(0.36), 0.0), ("b", pytest.approx(0.64), 1.0)]
    assert layers.shares(record, {99}, [0, 1])[1] == "largest 5 % of steps (1 recorded)"


@pytest.mark.parametrize(
    ("losses", "cut"),
    [
        ([2.0, 1.5, 1.2, 1.0] * 20, False),
        ([4.0 - i / 30 for i in range(100)], False),
        ([2.5e8, *[2.0 - i / 100 for i in range(100)]], True),
        ([1.0] * 100, False),
        ([], False),
    ],
)
def test_an_axis_of_losses_is_cut_only_for_explosions(losses, cut):
    record = make_record(steps=[{"t": "step", "i": i, "loss": loss} for i, loss in enumerate(losses)])
    ends = loss_range([record])
    assert (ends is not None) == cut
    if ends:
        assert ends[0] < 1.02
        assert 1.9 < ends[1] < 3

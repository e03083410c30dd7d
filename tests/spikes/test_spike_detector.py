"""The spike detector against its slow twin, over random runs and over every edge case that it promises."""

import copy
import math
import random

import pytest
import torch
from spike_twins import TwinDetector

from gradguard import SpikeDetector
from gradguard.errors import InvalidTypeError, InvalidValueError

SMALL = {"window": 16, "warmup": 6, "cap": 3, "alone": 1}
"""Each step that stands out is a spike: what is tested with these is anything but when it is one."""
NAN, INF = math.nan, math.inf
CODES = {1: "ordinary", 2: "stood out", 3: "skipped"}
WEIGHTS = [16.0, 16.0, 16.0, 1.0, 16.0, 64.0, NAN, 16.0, 0.0, 16.0, 4.0]


class OnDevice(SpikeDetector):
    """Judges on the CPU as on an accelerator."""

    _judge = SpikeDetector._judge_tensors


def see(detector, *values):
    return bool(detector.observe(torch.tensor(values, dtype=torch.float64)))


def run(detector, rows):
    return [see(detector, *row) for row in rows]


def noisy(seed, steps, *, zeros=False, burst=0.1):
    """Losses and norms with single outliers, bursts, level shifts, missing and infinite values."""
    draw = random.Random(seed)
    level, rows, left = 1.0, [], 0
    for _ in range(steps):
        if draw.random() < 0.02:
            level *= draw.choice([0.1, 8.0])
        if left == 0 and draw.random() < burst:
            left = draw.choice([1, 1, 2, 5, 9])
        factor = 50.0 if left else 1.0
        left = max(0, left - 1)
        loss = level * factor * math.exp(draw.gauss(0, 0.1))
        if zeros:
            loss = loss - level * draw.choice([0.5, 1.0, 1.5])
        norm = draw.choice([1.0, factor]) * math.exp(draw.gauss(0, 0.3))
        row = [loss, norm]
        if draw.random() < 0.1:
            row[draw.randrange(2)] = draw.choice([NAN, INF, -INF])
        if draw.random() < 0.05:
            row = [NAN, INF]
        rows.append(row)
    return rows


def assert_alike(ours, twin, rows, weights=None):
    spikes = 0
    for step, row in enumerate(rows):
        weight = NAN if weights is None else weights[step % len(weights)]
        told = bool(ours.observe(torch.tensor(row, dtype=torch.float64), weight))
        expected = twin.observe(row, weight)
        assert told == expected, (step, row, ours.last.scores, twin.scores)
        assert bool(ours.last.adopted) == twin.adopted, step
        assert ours.last.scores.tolist() == pytest.approx(twin.scores, rel=1e-9, abs=1e-9, nan_ok=True), step
        assert int(ours.state["in_a_row"]) == len(twin.row), step
        assert [CODES[code] for code in ours.state["steps"].tolist() if code] == twin.became, step
        spikes += told
    return spikes


@pytest.mark.parametrize("zeros", [False, True], ids=["positive", "losses of any sign"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        SMALL,
        {"cap": 32},
        {"window": 5, "warmup": 1, "cap": 5},
        {"window": 1, "warmup": 1, "cap": 1},
        {"window": 40, "warmup": 9, "cap": 1, "recent": 12},
        {"k": 3.0, "window": 20, "warmup": 5, "cap": 3, "floor": 0.02, "recent": 8},
        {"k": 3.0, "window": 40, "warmup": 12, "cap": 4, "recent": 20, "alone": 5},
    ],
)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["no weights", "weights"])
@pytest.mark.parametrize("kind", [SpikeDetector, OnDevice])
def test_it_decides_as_the_slow_twin(kind, weights, options, zeros):
    rows = noisy(1, 300, zeros=zeros)
    twin = TwinDetector(2, **options)
    told = assert_alike(kind(**options), twin, rows, weights)
    assert 5 < told < 200  # or the table proves nothing


def usual(detector, steps, *values):
    assert not any(run(detector, [values] * steps))
    return detector


def test_only_above():
    detector = usual(SpikeDetector(**SMALL), 10, 2.0)
    assert run(detector, [[1e-6], [0.0], [-5.0]]) == [False, False, False]


@pytest.mark.parametrize(("value", "spike"), [(1.349, False), (1.351, True), (1e300, True)])
def test_constant_values_have_the_floor(value, spike):
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    assert see(detector, value) is spike
    assert float(detector.last.scores) == pytest.approx(math.log(value) / 0.05)


def test_an_outlier_never_hides_the_next():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    for size in (1e6, 1e3, 10.0, 2.0):
        assert see(detector, size)
        assert not see(detector, 1.0)


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_a_lasting_rise_costs_at_most_cap_steps(cap):
    detector = usual(SpikeDetector(window=16, warmup=6, cap=cap, alone=1), 10, 1.0)
    told = run(detector, [[9.0]] * 30)
    assert told == [True] * cap + [False] * (30 - cap)
    assert not see(detector, 0.9)  # and back down


def test_the_last_rejected_one_tells_that_it_is_adopted():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    found = []
    for _ in range(4):
        see(detector, 9.0)
        found.append((int(detector.last.in_a_row), bool(detector.last.adopted)))
    assert found == [(1, False), (2, False), (3, True), (0, False)]


def test_a_state_of_before_loads():
    """Of a version that kept what the last adoption had replaced."""
    saved = usual(SpikeDetector(**SMALL), 12, 1.0, 1.0).state_dict()
    before = saved | {"replaced": saved["history"] + 1, "replaced_count": saved["count"] - 1}
    detector = SpikeDetector(**SMALL)
    detector.load_state_dict(before)
    torch.testing.assert_close(detector.state_dict(), saved, rtol=0, atol=0)


def test_a_falling_loss_hides_no_spike():
    """The trend of a long window is no deviation: a doubled loss is told."""
    draw = random.Random(0)
    losses = [4.0 * math.exp(-step / 200) * math.exp(draw.gauss(0, 0.02)) for step in range(150)]
    detector = SpikeDetector(alone=1)
    assert not any(run(detector, [[loss] for loss in losses]))
    assert see(detector, losses[-1] * 2)
    wide = SpikeDetector(recent=128, alone=1)
    run(wide, [[loss] for loss in losses])
    assert not see(wide, losses[-1] * 2)


def test_a_healthy_step_ends_the_row():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    assert run(detector, [[9.0], [9.0], [1.0]] * 6) == [True, True, False] * 6


def test_a_step_that_is_not_finite_neither_lengthens_nor_ends_a_row():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0, 2.0)
    before = detector.state_dict()
    for row in ([NAN, NAN], [INF, NAN], [NAN, -INF]):
        assert not see(detector, *row)
        for name, tensor in before.items():
            assert torch.equal(detector.state[name], tensor)
    assert run(detector, [[9.0, 2.0], [NAN, INF], [9.0, 2.0], [NAN, NAN], [9.0, 2.0], [9.0, 2.0]]) == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_each_signal_has_its_own_warm_up():
    detector = usual(SpikeDetector(**SMALL), 10, NAN, 1.0)
    assert not any(run(detector, [[1.0, 1.0], [99.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    assert math.isnan(detector.last.scores[0])
    assert not see(detector, 1.0, 1.0)
    assert see(detector, 99.0, 1.0)


def test_a_signal_that_was_fine_keeps_its_history():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0, 1.0)
    kept = detector.state["history"][1].clone()
    assert run(detector, [[1.0 + i, 1.01] for i in (8, 9, 10)]) == [True] * 3
    assert torch.equal(detector.state["history"][1], kept)
    assert see(detector, 9.0, 5.0)  # the norm is judged at once, the loss is in its warm-up


@pytest.mark.parametrize(
    ("past", "value", "spike"),
    [
        ([-1.0, -1.1, -0.9, -1.0, -1.05, -0.95], -0.2, True),
        ([-1.0, -1.1, -0.9, -1.0, -1.05, -0.95], -0.8, False),
        ([-1.0] * 6, -0.69, True),  # the floor: 0.3 of the median
        ([-1.0] * 6, -0.71, False),
        ([0.0] * 6, 5.0, False),  # no measure
        ([0.0] * 5 + [1.0], 5.0, False),
        ([-1.0, 1.0, -2.0, 2.0, 0.5, -0.5], 30.0, True),
        ([-1.0, 1.0, -2.0, 2.0, 0.5, -0.5], 8.0, False),
        ([1.0] * 5 + [0.0], 1.31, True),  # not the logarithm any more
        ([1.0] * 6, 1.31, False),
    ],
)
def test_losses_without_a_logarithm(past, value, spike):
    detector = SpikeDetector(**SMALL)
    assert not any(run(detector, [[x] for x in past]))
    assert see(detector, value) is spike


def test_reset_forgets_all():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    memory = detector.state["history"]
    see(detector, 9.0)
    detector.reset()
    fresh = SpikeDetector(**SMALL)
    see(fresh, 1.0)
    fresh.reset()
    for name, tensor in detector.state.items():
        assert torch.equal(tensor, fresh.state[name]), name
    assert detector.state["history"] is memory
    assert detector.last is None
    usual(detector, 10, 9.0)


@pytest.mark.parametrize("cut", [0, 3, 40, 61, 62, 63])
def test_a_resumed_run_decides_bit_by_bit_as_the_whole(cut):
    rows = noisy(4, 60, burst=0) + [[300.0, 1.0]] * 3 + noisy(5, 100)
    whole, first, second = (SpikeDetector(**SMALL) for _ in range(3))
    expected = [(see(whole, *row), whole.last.scores) for row in rows]
    run(first, rows[:cut])
    saved = first.state_dict()
    run(first, rows[cut:])  # the copy is not touched by what comes later
    second.load_state_dict(saved)
    for row, (spike, scores) in zip(rows[cut:], expected[cut:], strict=True):
        assert see(second, *row) == spike
        torch.testing.assert_close(second.last.scores, scores, rtol=0, atol=0, equal_nan=True)


def test_state_is_changed_in_place():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    memory = {name: tensor.data_ptr() for name, tensor in detector.state.items()}
    run(detector, [[9.0]] * 3 + [[1.0]] * 20)
    detector.load_state_dict(detector.state_dict())
    assert {name: tensor.data_ptr() for name, tensor in detector.state.items()} == memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [SpikeDetector, OnDevice])
def test_evidence_does_not_depend_on_the_default_dtype(kind, dtype):
    """Two in a row after 88 are an evidence of 2 log 90 = 8.9996, which is 9 in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for ordinary, told in ((88, [False, False]), (89, [False, True])):
            assert run(usual(kind(), ordinary, 1.0), [[9.0], [9.0]]) == told
    finally:
        torch.set_default_dtype(before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zeros", [False, True], ids=["positive", "losses of any sign"])
@pytest.mark.parametrize("options", [{}, SMALL, {"window": 1, "warmup": 1, "cap": 1}, {"window": 9, "warmup": 2}])
def test_plain_numbers_give_what_tensors_give(options, zeros):
    options = {"cap": 8, **options}
    host, device = SpikeDetector(**options), OnDevice(**options)
    for step, row in enumerate(noisy(2, 400, zeros=zeros)):
        assert see(host, *row) == see(device, *row), step
        for name in ("spike", "scores", "in_a_row", "adopted"):
            ours, theirs = getattr(host.last, name), getattr(device.last, name)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True, msg=f"{name} of step {step}")
        if step % 60 == 59:
            saved = host.state_dict()
            for name, tensor in device.state_dict().items():
                assert torch.equal(saved[name], tensor), (name, step)


def test_who_holds_the_state_sees_each_step_and_may_write():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    history, count = detector.state["history"], detector.state["count"]
    usual(detector, 2, 1.1)
    assert (history[0, 10:13].tolist(), int(count)) == ([1.1, 1.1, INF], 12)
    history.mul_(9.0)
    assert not see(detector, 9.0)


def test_a_copy_goes_on_by_itself():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    other = copy.deepcopy(detector)
    usual(other, 20, 1.1)
    assert detector.state["count"].tolist() == [10]
    assert other.state["count"].tolist() == [30]


def test_what_was_told_stays_as_it_was():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    see(detector, 9.0)
    told = detector.last
    run(detector, [[1.0]] * 5)
    assert bool(told.spike)
    assert int(told.in_a_row) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 0}, InvalidValueError, "k=0: expected a finite number > 0"),
        ({"k": NAN}, InvalidValueError, "k=nan"),
        ({"k": "6"}, InvalidTypeError, "k='6': expected a number"),
        ({"floor": 0.0}, InvalidValueError, "floor=0.0"),
        ({"window": 0}, InvalidValueError, "window=0"),
        ({"window": 8}, InvalidValueError, "warmup=32: expected a whole number from 1 to 8"),
        ({"warmup": 0}, InvalidValueError, "warmup=0"),
        ({"cap": 129}, InvalidValueError, "cap=129"),
        ({"cap": None}, InvalidTypeError, "cap=None: expected a whole number"),
        ({"cap": True}, InvalidTypeError, "cap=True"),
    ],
)
def test_arguments_are_checked(options, error, words):
    with pytest.raises(error, match=words):
        SpikeDetector(**options)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ([1.0, 2.0], InvalidTypeError, "values is list"),
        (torch.tensor([1, 2]), InvalidTypeError, "values is torch.int64"),
        (torch.tensor(1.0), InvalidValueError, r"shape \[\]: expected \[2\]"),
        (torch.ones(3), InvalidValueError, r"shape \[3\]: expected \[2\].*as on earlier steps"),
        (torch.ones(0), InvalidValueError, r"shape \[0\]"),
    ],
)
def test_what_is_observed_is_checked(values, error, words):
    detector = usual(SpikeDetector(), 1, 1.0, 1.0)
    with pytest.raises(error, match=words):
        detector.observe(values)


@pytest.mark.parametrize("change", [{"window": 20}, {"cap": 4}])
def test_the_state_of_another_detector_is_refused(change):
    saved = usual(SpikeDetector(**SMALL), 3, 1.0).state_dict()
    with pytest.raises(InvalidValueError, match=r"does not fit this SpikeDetector\(.*expected tensors of shapes"):
        SpikeDetector(**(SMALL | change)).load_state_dict(saved)
    with pytest.raises(InvalidValueError, match="does not fit this SpikeDetector"):
        SpikeDetector(**SMALL).load_state_dict({"history": saved["history"]})
    with pytest.raises(InvalidValueError, match="does not fit this SpikeDetector"):
        usual(SpikeDetector(**SMALL), 3, 1.0, 1.0).load_state_dict(saved)


def test_an_empty_state_is_that_of_a_new_detector():
    detector = usual(SpikeDetector(**SMALL), 10, 1.0)
    detector.load_state_dict(SpikeDetector(**SMALL).state_dict())
    usual(detector, 10, 9.0)


def test_repr_is_the_call():
    assert repr(SpikeDetector()) == "SpikeDetector()"
    assert repr(SpikeDetector(5, cap=20)) == "SpikeDetector(k=5.0, cap=20)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_narrow_values_are_widened(dtype):
    detector = SpikeDetector(**SMALL)
    for _ in range(10):
        detector.observe(torch.ones(1, dtype=dtype))
    assert bool(detector.observe(torch.full((1,), 9.0, dtype=dtype)))
    assert detector.state["history"].dtype is torch.float64


def test_it_decides_alike_where_a_sort_puts_nan_in_front(monkeypatch):
    """As CUDA's does for more than 32 numbers of float64 (torch 2.11)."""
    rows, plain, other = noisy(1, 200), OnDevice(), OnDevice()
    expected = [bool(plain.observe(torch.tensor(row, dtype=torch.float64))) for row in rows]

    def nan_in_front(rows, stored):
        places = torch.stack([(stored - 1) // 2, stored // 2], dim=-1).clamp(0, rows.shape[-1] - 1)
        ordered = torch.where(rows.isnan(), -math.inf, rows).sort(dim=-1).values
        return torch.where(ordered == -math.inf, math.nan, ordered).gather(-1, places).mean(dim=-1)

    monkeypatch.setattr("gradguard.spikes.detector.median_of_stored", nan_in_front)
    assert [bool(other.observe(torch.tensor(row, dtype=torch.float64))) for row in rows] == expected
    assert 5 < sum(expected) < 150


def test_a_reset_detector_takes_another_number_of_signals():
    detector = SpikeDetector()
    for _ in range(40):
        detector.observe(torch.ones(2, dtype=torch.float64))
    with pytest.raises(
        InvalidValueError, match=r"shape \[3\]: expected \[2\].*updates=True.*call the detector's reset\(\)"
    ):
        detector.observe(torch.ones(3, dtype=torch.float64))
    detector.reset()
    for size in (*[1.0] * 100, 99.0):
        spike = detector.observe(torch.full((3,), size, dtype=torch.float64))
    assert bool(spike)
    with pytest.raises(InvalidValueError, match=r"shape \[2\]: expected \[3\]"):
        detector.observe(torch.ones(2, dtype=torch.float64))

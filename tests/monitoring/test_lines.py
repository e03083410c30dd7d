"""Records are read and judged line by line: what comes out is what the plain JSON of each line says, in its order."""

import json
import math
import random
from itertools import count

import pytest
from synthetic import make_record
from test_fuzzed_records import damaged, sound  # noqa: F401 (a fixture)

from gradguard.errors import RecordError
from gradguard.monitoring.judge.health import HealthMonitor, findings
from gradguard.monitoring.judge.numbers import window_means
from gradguard.monitoring.observe.step import GradientNorms, ParameterTable, StepMeasurement, lines_of
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.record.reader import JsonlReader
from gradguard.monitoring.record.record_fields import parse_line
from gradguard.monitoring.record.record_lines import Lines
from gradguard.monitoring.record.step_rows import in_order
from gradguard.threshold_formulas import PLAIN
from gradguard.threshold_rules import PerTensor


def made_up(seed):
    """The lines of a run with whatever a run may have."""
    draw = random.Random(seed)
    steps, width = draw.choice((3, 90, 400, 900)), draw.choice((1, 4, 9))
    optimizers = draw.choice((["SGD"], ["Adam"], ["Adam", "SGD"], []))
    spread, nulls, missing, skips, spikes = (draw.choice(each) for each in ((0.05, 0.3, 1.2), *[(0, 0, 0.02)] * 4))
    clip, scaled, zeros = draw.choice((None, "norm", "median", "two")), draw.random() < 0.3, draw.random() < 0.2
    rises, every, diagnosed = draw.choice((0, 0, 5, -12)), draw.choice((1, 1, 4)), draw.random() < 0.4
    names = [{"name": f"layer{k}.weight", "shape": [4, 4], "numel": 16} for k in range(width)]
    yield {"t": "meta", "clip": draw.choice(("value=2", "norm=1")), "params": names, "optimizers": optimizers}
    dead, corrupt = draw.choice((None, 0)), draw.choice((0, 0.01))
    for i in range(steps):
        level = math.exp(draw.gauss(0, spread) + rises * max(i / steps - 0.6, 0)) * (
            30 if draw.random() < spikes else 1
        )
        norms: list[float | None] = [level * math.exp(draw.gauss(0, 0.2)) for _ in range(width)]
        if dead is not None and i > steps / 3:
            norms[dead] = 0.0
        if draw.random() < corrupt:
            norms[-1] = 500.0 * level
        lost = draw.random() < nulls
        if lost:
            norms[draw.randrange(width)] = None
        norm = None if lost else 0.0 if zeros and draw.random() < 0.7 else math.hypot(*[n or 0.0 for n in norms])
        step = {"t": "step", "i": i, "lr": 0.1}
        if draw.random() >= missing:
            step["loss"] = draw.choice((None, 1, 2.0)) if draw.random() < nulls else 2.0 + 0.3 * (-1) ** i - i / steps
        if draw.random() >= missing:
            step["norm"] = norm if draw.random() > 0.01 or norm is None else int(norm) + 1
            step["top"] = [draw.randrange(width), draw.choice((0.2, 0.97, 1))]
        step |= {"nonfinite": 3} if lost and draw.random() < 0.8 else {}
        step |= {"skipped": True} if draw.random() < skips or (lost and scaled) else {}
        step |= {"amp_scale": draw.choice((256.0, 256.0, 0.5))} if scaled else {}
        if clip and norm:
            coefficient = min(1.0, 1.0 / norm)
            threshold = None if clip == "median" and i < 9 else 1.0
            step |= {"rule": "norm" if clip == "two" else clip, "threshold": threshold, "coefficient": coefficient}
            step |= {"clips": [["norm", 1.0, coefficient], ["value", None, 0.5]]} if clip == "two" else {}
            step |= {draw.choice(("kept_gradients", "scaled_clip", "mine")): True} if draw.random() < 0.01 else {}
        if len(optimizers) > 1 and draw.random() >= missing:
            step["optimizer"] = i % 2
        yield step
        if i % every == 0:
            line = {"t": "tensors", "i": i, "norm": norms if draw.random() > 0.005 else norms[1:]}
            line |= {"absent": [0]} if draw.random() < 0.005 else {}
            if diagnosed and i % 50 == 0:
                line |= {"weight": [1.0] * width, "update": [draw.choice((0.3, 1e-9))] * width, "zeros": [0.75] * width}
            yield line
        if draw.random() < 0.01:
            kind = draw.choice(("nonfinite", "amp_skip", "optimizer_without_gradient"))
            yield {
                "t": "event",
                "i": i + draw.choice((0, 0, 5000)),
                "kind": kind,
                "severity": "warning",
                "optimizer": 0,
            }


def content_of(seed):
    return b"".join(json.dumps(line).encode() + b"\n" for line in made_up(seed))


def episodes(lines):
    """What a monitor has found after these lines, told in words."""
    monitor = HealthMonitor({})
    for line in lines:
        if line["t"] == "meta":
            monitor = HealthMonitor(line)
        else:
            monitor.see(line)
    monitor.finish()
    return [episode.finding() for episode in monitor.episodes]


@pytest.mark.parametrize("seed", range(24))
def test_a_sound_record_says_and_shows_what_its_lines_do_in_the_order_of_the_file(tmp_path, seed):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content_of(seed))
    lines = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    record = read_record(path)
    of_kind = {kind: [line for line in lines if line["t"] == kind] for kind in ("meta", "step", "tensors", "event")}
    read = {"meta": [record.meta], "step": list(record.steps), "tensors": list(record.tensors), "event": record.events}
    assert repr(read) == repr(of_kind)  # also 1 and 1.0 are not the same, nor is another order of keys
    late = [line for line in lines if line["t"] == "event" and line["i"] >= len(record.steps)]
    lines = [line for line in lines if line not in late] + late  # events of steps that never came are judged last
    assert repr([record.meta, *in_order(record)]) == repr(lines)
    assert episodes([record.meta, *in_order(record)]) == episodes(lines)


def test_what_is_compared_has_findings():
    kinds = {one.kind for seed in range(24) for one in episodes(made_up(seed))}
    assert len(kinds) > 6, kinds


@pytest.mark.parametrize("some", range(4))
def test_a_damaged_record_is_read_alike_at_once_and_while_it_grows(tmp_path, sound, some):  # noqa: F811
    compared = 0
    for seed in range(12 * some, 12 * some + 12):
        path, draw = tmp_path / f"{seed}.jsonl", random.Random(seed)
        content = damaged(sound, draw)
        content = content if content.endswith(b"\n") else content + b"\n"
        path.write_bytes(content)
        try:
            record = read_record(path)
        except RecordError:
            continue
        grows, lines = JsonlReader(tmp_path / f"grows{seed}.jsonl"), []
        end = 0
        while end < len(content):
            begin, end = end, end + draw.choice((1, 100, 10_000, 100_000))
            with grows.path.open("ab") as file:
                file.write(content[begin:end])
            lines += grows.poll()
        last = max(place for place, line in enumerate(lines) if line["t"] == "meta")
        steps = {line["i"]: line for line in lines[last:] if line["t"] == "step"}
        assert all(repr(steps[line["i"]]) == repr(line) or line in lines for line in record.steps)
        assert repr(record.meta) == repr(lines[last])
        assert repr(record.events) == repr([line for line in lines[last:] if line["t"] == "event"])
        compared += 1
    assert compared > 6


STEP = b'{"t": "step", "i": 7}'
BETWEEN = {
    "an object over two lines": (b'{"t": "step", "i": 8, "x": [1\n2]}', 2, 0),
    "two objects on a line": (b'{"t": "step", "i": 8},{"t": "step", "i": 9}', 1, 0),
    "a break in a text": (b'{"t": "step", "i": 8, "x": "\n"}', 2, 0),
    "a list": (b"[1]", 1, 0),
    "no kind": (b'{"i": 8}', 1, 0),
    "a kind that is no text": (b'{"t": ["step"], "i": 8}', 1, 0),
    "a step without a number": (b'{"t": "step"}', 1, 0),
    "a number that is none": (b'{"t": "step", "i": 8.0}', 1, 0),
    "a field that is dropped": (b'{"t": "step", "i": 8, "norm": -1.0}', 0, 1),
    "a float that is too large": (b'{"t": "step", "i": 8, "norm": 1e999}', 0, 1),
    "a row that is dropped": (b'{"t": "tensors", "i": 8, "norm": [1.0, -1.0]}', 1, 0),
    "an event that is dropped": (b'{"t": "event", "i": 8, "value": "x"}', 0, 1),
    "a blank line": (b" ", 0, 0),
    "no UTF-8": (b'{"t": "step", "i": 8, "x": "\xff"}', 1, 0),
    "too deep": (STEP[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1, 0),
    "a mark of the byte order": (b"\xef\xbb\xbf" + STEP, 1, 0),
    "NaN": (b'{"t": "step", "i": 8, "norm": NaN}', 0, 0),
}


@pytest.mark.parametrize(("content", "unreadable", "dropped"), BETWEEN.values(), ids=BETWEEN)
def test_a_bad_line_takes_none_beside_it(tmp_path, content, unreadable, dropped):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join([b'{"t": "meta"}', STEP, content, b'{"t": "step", "i": 10}', b""]))
    record = read_record(path)
    assert (record.unreadable, record.dropped) == (unreadable, dropped)
    numbers = [line["i"] for line in record.steps]
    assert (numbers[0], numbers[-1]) == (7, 10)


VALUES = (
    [0.5, 1.5, -0.0], [1, 2, 3], [2**63, 1, -(2**63) - 1], [1.0, 2, None], [True, 1, 1.0], ["a", "a", 2.0],
    [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[1.0, 2.0], [3.0], [4, 5.0]], [[1, 0.5], [2, 0.25], [3, 1]],
    [[1, 0.5], [2**70, 0.5], None], [[], [1.0], [None]], [{"a": 1}, [{}], "x"],
)  # fmt: skip


@pytest.mark.parametrize("values", VALUES, ids=repr)
@pytest.mark.parametrize("gap", [None, 0, 1, 4])
def test_every_line_is_what_was_added(values, gap):
    lines = [{"i": place, "x": value} | ({"y": value} if place % 2 else {}) for place, value in enumerate(values * 3)]
    if gap is not None:
        del lines[gap]["x"]
    kept, chosen = Lines(lines), [place % 3 != 1 for place in range(len(lines))]
    some = [line for line, is_chosen in zip(lines, chosen, strict=True) if is_chosen]
    assert repr(list(kept)) == repr(lines)
    assert repr(list(kept.where(chosen))) == repr(some)
    assert repr(list(kept[2:5])) == repr(lines[2:5])
    assert repr(kept[-1]) == repr(lines[-1])
    assert repr(list(kept.column("x"))) == repr([line.get("x") for line in lines])
    assert list(kept.has("y")) == ["y" in line for line in lines]
    kept.extend([{"x": "new"}])
    assert kept[-1] == {"x": "new"}
    assert kept.column("x")[-1] == "new"


@pytest.mark.parametrize("place", [3, -4])
def test_there_is_no_line_behind_the_last(place):
    with pytest.raises(IndexError, match="range"):
        Lines([{"x": value} for value in range(3)])[place]


@pytest.mark.parametrize("width", [1, 7, 50, 500])
@pytest.mark.parametrize("scale", [1.0, 1e-290, 1e300])
def test_the_mean_of_each_window_is_rounded_once_and_divided(width, scale):
    draw, numbers = random.Random(width), count()
    values = [None if next(numbers) % 97 == 5 else draw.gauss(1, 1) * scale for _ in range(300)]
    for known in (values, values[6:90], [value for value in values if value is not None], [None] * 9, [0.0, 1e-9], []):
        size = min(width, len(known))
        windows = [known[k : k + size] for k in range(len(known) - size + 1)] if size else []
        means = [None if None in window else math.fsum(window) / size for window in windows]
        assert window_means(known, width) == means


def test_a_spike_after_many_zeros_is_told():
    """Zeros are no neighbours: the norms that a spike is compared with may be far back."""
    norms = [0.0 if i % 3 else 1.0 for i in range(900)]
    norms[450] = 40.0
    steps = [{"t": "step", "i": i, "norm": norm} for i, norm in enumerate(norms)]
    assert [(one.kind, one.first_step) for one in findings(make_record(steps=steps))] == [("spike", 450)]


def test_the_rule_for_each_tensor_has_its_formulas():
    draw, rule, averages, seen = random.Random(5), PerTensor(), [math.inf] * 4, 0
    for seen in range(300):
        norms = [math.exp(draw.gauss(0, 2)) for _ in averages]
        together = PLAIN.ratio(rule.absolute, math.hypot(*norms))
        warm = seen + 1 < rule.warmup
        factors = [rule.factor(PLAIN, n, a, warm, together) for n, a in zip(norms, averages, strict=True)]
        after = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
        pairs = zip(after, averages, strict=True)
        averages = [rule.next_average(PLAIN, norm, average, seen, warm) for norm, average in pairs]
        clipped = any(factor < 1 for factor in factors)
        expected = math.hypot(*after) / math.hypot(*norms) if clipped else 1.0
        assert rule.step(norms) == (expected, math.hypot(*averages))


def calm_run(odd=None, events=(), width=6):
    """A run on which every detector finds what is usual, but for ``odd``: what to do with the norms of some lines."""
    draw = random.Random(0)
    shapes = [[4, 4]] * (width - 1) + [[4]]
    params = [{"name": f"p{k}", "shape": shape, "numel": math.prod(shape)} for k, shape in enumerate(shapes)]
    rows = [[math.exp(draw.gauss(0, 0.1)) for _ in params] for _ in range(500)]
    for i, row in enumerate(rows):
        if odd is not None:
            odd(i, row)
    steps = [{"t": "step", "i": i, "norm": math.hypot(*row), "loss": 9 - i / 100} for i, row in enumerate(rows)]
    tensors = [{"t": "tensors", "i": i, "norm": row} for i, row in enumerate(rows)]
    return make_record(meta={"t": "meta", "params": params}, steps=steps, tensors=tensors, events=list(events))


def a_vector_dies(i, row):
    row[-1] = 0.0 if i >= 333 else row[-1]


def event(i, kind):
    return {"t": "event", "i": i, "kind": kind, "severity": "warning", "message": "m", "optimizer": None}


ODD = {
    "nothing": (calm_run(), set()),
    "a vector": (calm_run(a_vector_dies), {"dead_layer"}),
    "skips of a scaler": (calm_run(events=[event(300, "amp_skip")] * 12), {"amp_scale_collapse"}),
    "what the watcher told": (
        calm_run(events=[event(300, "optimizer_without_gradient")]),
        {"optimizer_without_gradient"},
    ),
    "before the first step": (
        calm_run(events=[event(0, "optimizer_without_gradient")]),
        {"optimizer_without_gradient"},
    ),
    "behind the last": (calm_run(events=[event(900, "optimizer_without_gradient")]), {"optimizer_without_gradient"}),
}


@pytest.mark.parametrize(("record", "kinds"), ODD.values(), ids=ODD)
def test_a_fault_within_a_calm_run_is_found(record, kinds):
    assert {one.kind for one in findings(record)} == kinds


def test_a_long_run_has_the_norms_of_each_parameter_on_fewer_steps():
    table = ParameterTable([{"name": "w"}])

    def written(turns, every=None):
        lines = (
            (turn, line)
            for turn in turns
            for line in lines_of(StepMeasurement(turn, GradientNorms([1.0], [0]), turn=turn), table, every)
        )
        return [turn for turn, line in lines if line["t"] == "tensors"]

    assert written(range(49_990, 50_010)) == [*range(49_990, 50_000), *range(50_000, 50_010, 2)]
    assert written(range(199_990, 200_020)) == [199_992, 199_996, 200_000, 200_008, 200_016]
    assert written(range(400_000, 400_008), every=3) == [400_002, 400_005]


KEYS = {
    "one order": [["a", "b"]],
    "one place": [["a", "b"], ["a", "c"]],
    "other places": [["a", "b"], ["b", "a"], ["c"]],
}


@pytest.mark.parametrize("orders", KEYS.values(), ids=KEYS)
def test_a_column_is_what_each_line_has(orders):
    draw = random.Random(0)
    lines = [{key: draw.choice((None, draw.random())) for key in draw.choice(orders)} for _ in range(50)]
    for cut in (slice(None), slice(20, 21), slice(0)):
        kept, expected = Lines(lines)[cut], lines[cut]
        for key in "abcd":
            assert kept.column(key) == [line.get(key) for line in expected]
            assert kept.has(key) == [key in line for line in expected]
            assert kept.has_any(key) == any(key in line for line in expected)


SPACE = {" ": True, "\t\r\n": True, "\x0b": False, "\u00a0": False, "\u2003": False, "{}": False, "": True}


@pytest.mark.parametrize(("space", "is_json"), SPACE.items(), ids=map(ascii, SPACE))
def test_only_what_json_calls_space_may_stand_around_a_line(space, is_json):
    line = '{"t": "step", "i": 1}'
    for raw in (f"{line}{space}", f"{space}{line}"):
        if is_json:
            assert parse_line(raw.encode()) == ({"t": "step", "i": 1}, 0)
        else:
            with pytest.raises(ValueError, match=r"Expecting|Extra data"):
                parse_line(raw.encode())

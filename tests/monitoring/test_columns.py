"""Records read and judged by columns say what they say line by line, as the slow twins here have it."""

import json
import math
import random
from array import array
from dataclasses import replace
from itertools import count

import pytest
from synthetic import make_record, write_char_rnn, write_gan, write_sick
from test_fuzzed_records import damaged, sound  # noqa: F401 (a fixture)

from gradguard.errors import RecordError
from gradguard.monitoring.judge import health
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.verdict import last_and_best_mean, window_means
from gradguard.monitoring.judge.whole_run import in_order
from gradguard.monitoring.record import file as record_file
from gradguard.monitoring.record.fields import parse_line, parse_lines
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.record.lines import MOST_COLUMNS, Lines, Tops, Vectors
from gradguard.threshold_formulas import PLAIN, per_tensor_average, per_tensor_factor
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
    yield {"t": "meta", "clip": draw.choice((None, "norm=1")), "params": names, "optimizers": optimizers}
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


def slowly(monitor, record):
    for line in in_order(record):
        monitor.see(line)


def said(path):
    """What a record says, read as it is now: every field of each line, in its order."""
    try:
        record = read_record(path)
    except RecordError as error:
        return str(error)
    steps, tensors = ([list(line.items()) for line in lines] for lines in (record.steps, record.tensors))
    counts = record.torn, record.unreadable, record.dropped, record.first_fault, record.earlier_runs
    return repr((record.meta, steps, tensors, record.events, record.end, counts))


@pytest.mark.parametrize("some", range(4))
def test_findings_from_columns_are_those_of_line_after_line(monkeypatch, tmp_path, some):
    path, kinds = tmp_path / "run.jsonl", set()
    for seed in range(12 * some, 12 * some + 12):
        path.write_bytes(content_of(seed))
        record = read_record(path)
        fast = findings(record)
        with monkeypatch.context() as patch:
            patch.setattr(health, "see_all", slowly)
            assert findings(replace(record)) == fast, f"seed {seed}"
        kinds |= {one.kind for one in fast}
    assert len(kinds) > 4, kinds  # or nothing is compared


@pytest.mark.parametrize("write", [write_char_rnn, write_sick, write_gan])
def test_so_they_are_of_longer_runs(monkeypatch, tmp_path, write):
    record = write(tmp_path / "run.jsonl", steps=1500)
    fast = findings(record)
    monkeypatch.setattr(health, "see_all", slowly)
    assert findings(replace(record)) == fast != []


def test_lines_read_at_once_are_those_read_one_by_one(monkeypatch, tmp_path, sound):  # noqa: F811
    path = tmp_path / "run.jsonl"
    contents = [damaged(sound, random.Random(seed)) for seed in range(60)] + [content_of(seed) for seed in range(12)]
    for content in contents:
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(record_file, "parse_lines", lambda content: None)
            slow = said(path)
        for bytes_at_once in (300, 5000, 2**18):
            monkeypatch.setattr(record_file, "_BYTES_AT_ONCE", bytes_at_once)
            assert said(path) == slow


STEP = b'{"t": "step", "i": 7}'
LOOKED_AT_ONE_BY_ONE = {
    "an object over two lines": b'{"t": "step", "i": 7, "x": [1\n2]}',
    "two such lines": b'{"t": "step", "i": 7, "x": [{}\n{}]}\n' + STEP,
    "two objects on a line": STEP + b"," + STEP + b"\n",
    "two with a break between": STEP + b",-Infinity," + STEP,
    "a break in a list": b'{"t": "step", "i": 7, "x": [1,-Infinity,2]}',
    "a break in a text": b'{"t": "step", "i": 7, "x": "\n"}',
    "a list": b"[1]",
    "no kind": b'{"i": 7}',
    "a kind that is no text": b'{"t": ["step"], "i": 7}',
    "a step without a number": b'{"t": "step"}',
    "a number that is none": b'{"t": "step", "i": 7.0}',
    "a field that is dropped": b'{"t": "step", "i": 7, "norm": -1.0}',
    "a float that is too large": b'{"t": "step", "i": 7, "norm": 1e999}',
    "a row that is dropped": b'{"t": "tensors", "i": 7, "norm": [1.0, -1.0]}',
    "an event that is dropped": b'{"t": "event", "i": 7, "value": "x"}',
    "another run": b'{"t": "meta"}',
    "a blank line": STEP + b"\n\n" + STEP,
    "no UTF-8": b'{"t": "step", "i": 7, "x": "\xff"}',
    "too deep": STEP[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a mark of the byte order": b"\xef\xbb\xbf" + STEP,
}


@pytest.mark.parametrize("content", LOOKED_AT_ONE_BY_ONE.values(), ids=LOOKED_AT_ONE_BY_ONE)
def test_what_is_not_sound_is_looked_at_line_by_line(content):
    assert parse_lines(STEP + b"\n" + content + b"\n" + STEP) is None


@pytest.mark.parametrize(
    "line",
    [
        {
            "t": "step",
            "i": 3,
            "wall": 1,
            "loss": -1e308,
            "norm": 1e308,
            "lr": 2**53,
            "skipped": False,
            "mine": [1e308] * 3,
        },
        {
            "t": "step",
            "i": 3,
            "rule": "a\x1b",
            "clips": [["norm", None, 0.5]],
            "top": [3, 1],
            "threshold": float("nan"),
        },
        {"t": "tensors", "i": 3, "norm": [1e308] * 9, "max": [1, None], "absent": [0], "zero_rows": [-1.0]},
        {"t": "event", "i": 3, "kind": "spike\n", "value": 10**17, "severity": "info"},
        {"t": "hologram", "depth": 3},
        {"t": "end", "exit": -1, "wall": 0.5},
    ],
)
def test_a_sound_line_is_read_as_it_is_alone(line):
    raw = json.dumps(line).encode()
    many = parse_lines(raw + b"\n" + raw)
    assert many is not None
    lines = [one for columns in many.columns.values() for one in _lines(columns)] + many.others
    alone, dropped = parse_line(raw)
    assert dropped == 0
    assert list(map(repr, lines)) == [repr(alone)] * 2  # also 1 and 1.0 are not the same


def _lines(columns):
    lines = Lines()
    lines.extend_columns(*columns)
    return lines


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
    for cut in range(len(lines)):
        kept = Lines(lines[:cut])
        kept.extend(lines[cut:])
        chosen = [place % 3 != 1 for place in range(len(lines))]
        some = [line for line, is_chosen in zip(lines, chosen, strict=True) if is_chosen]
        assert repr(list(kept)) == repr(lines)
        assert repr(list(kept.where(chosen))) == repr(some)
        assert repr(list(kept[2:5])) == repr(lines[2:5])
        assert repr(kept[-1]) == repr(lines[-1])
        assert repr(list(kept.column("x"))) == repr([line.get("x") for line in lines])
        assert list(kept.has("y")) == ["y" in line for line in lines]
        kept.append({"x": "new"})
        assert kept[-1] == {"x": "new"}


@pytest.mark.parametrize("place", [3, -4])
def test_there_is_no_line_behind_the_last(place):
    for values in VALUES:
        with pytest.raises(IndexError, match="range"):
            Lines([{"x": value} for value in values])[place]
    assert [list(Vectors(2)), list(Tops()), list(Lines())] == [[], [], []]


def test_numbers_stand_in_arrays():
    """A million steps with lists in place of arrays would take a gigabyte."""
    lines = Lines([{"i": i, "norm": 0.5, "top": [i, 0.5], "norms": [0.5, 1.5]} for i in range(9)])
    assert [type(lines.column(key)) for key in ("i", "norm", "top", "norms")] == [array, array, Tops, Vectors]


def test_keys_without_number_cost_no_column_each():
    lines = [{"i": i, f"key {i}": i} for i in range(3 * MOST_COLUMNS)]
    kept = Lines(lines)
    kept.extend(lines)
    assert list(kept) == lines * 2
    assert len(kept._columns) == MOST_COLUMNS + 1


@pytest.mark.parametrize("width", [1, 7, 50, 500])
@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_the_last_and_the_best_mean_are_those_of_all_windows(width, scale):
    draw, numbers = random.Random(width), count()
    values = [None if next(numbers) % 97 == 5 else draw.gauss(1, 1) * scale for _ in range(300)]
    for known in (values, values[6:90], [value for value in values if value is not None], [None] * 9, [0.0, 1e-9], []):
        means = window_means(known, width)
        best = min((mean for mean in means if mean is not None), default=None)
        assert last_and_best_mean(known, width) == (means[-1] if means else None, best)


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
        factors = [per_tensor_factor(PLAIN, n, a, warm, together, 1.05) for n, a in zip(norms, averages, strict=True)]
        after = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
        pairs = zip(after, averages, strict=True)
        averages = [per_tensor_average(PLAIN, norm, average, seen, warm, 0.98) for norm, average in pairs]
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


def one_jumps(i, row):
    row[0] *= 30 if i == 270 else 1


def a_vector_dies(i, row):
    row[-1] = 0.0 if i >= 333 else row[-1]


def event(i, kind):
    return {"t": "event", "i": i, "kind": kind, "severity": "warning", "message": "m", "optimizer": None}


ODD = {
    "nothing": (calm_run(), set()),
    "one tensor on one line": (calm_run(one_jumps), {"corrupt_gradient"}),
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
def test_a_fault_within_a_calm_run_is_found(monkeypatch, record, kinds):
    fast = findings(record)
    assert {one.kind for one in fast} == kinds
    monkeypatch.setattr(health, "see_all", slowly)
    assert findings(replace(record)) == fast

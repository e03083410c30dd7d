import json
import os
import re
import tracemalloc

import pytest
from synthetic import PARAMETERS, write_char_rnn

from gradguard.errors import InvalidTypeError, RecordError
from gradguard.monitoring.record import file
from gradguard.monitoring.record.file import RecordWriter, read_record
from gradguard.monitoring.record.reader import JsonlReader
from gradguard.monitoring.show.report.summary import notes

META = '{"t": "meta", "version": "0.1.0"}\n'
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"norm": NAN}, {"norm": None}),
        ({"norm": -INF}, {"norm": None}),
        ({"norm": None, "i": 0}, {"i": 0}),
        ({"norm": [1.234567, INF, None, 0.0]}, {"norm": [1.235, None, None, 0.0]}),
        ({"loss": 0.123456789}, {"loss": 0.1234568}),
        ({"clips": [["norm", 0.123456789, 0.99997]]}, {"clips": [["norm", 0.1234568, 0.99997]]}),  # 1.0 would not bind
        ({"top": (3, 0.71)}, {"top": [3, 0.71]}),
        ({"skipped": True, "nonfinite": 2}, {"skipped": True, "nonfinite": 2}),
        ({"params": [{"name": "w", "scale": NAN}]}, {"params": [{"name": "w", "scale": None}]}),
        ({"kind": "nonfinite", "message": "größer"}, {"kind": "nonfinite", "message": "größer"}),
        ({"argv": ["\udcff.py"]}, {"argv": ["\\udcff.py"]}),
    ],
)
def test_writer_writes_strict_json(tmp_path, fields, written):
    path = tmp_path / "run.jsonl"
    with RecordWriter(path) as writer:
        writer.write("step", **fields)
    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail) == {"t": "step"} | written


def test_writer_makes_folders_and_closes_twice_and_a_second_one_gets_a_number(tmp_path):
    path = tmp_path / "a" / "b" / "run.jsonl"
    for number in ("", "-2", "-3"):
        writer = RecordWriter(str(path))
        assert writer.path.name == f"run{number}.jsonl"
        writer.write("meta", version=f"0.1.0{number}")
        writer.flush()
        assert writer.path.read_text(encoding="utf-8") == META.replace("0.1.0", f"0.1.0{number}")
        assert path.read_text(encoding="utf-8") == META
        writer.close()
        writer.close()
        writer.flush()
    with pytest.raises(RecordError, match=r"is closed; write before close\(\)"):
        writer.write("step", i=0)


def test_writer_refuses_what_is_not_plain(tmp_path):
    with RecordWriter(tmp_path / "run.jsonl") as writer, pytest.raises(InvalidTypeError, match=r"got object; .*item"):
        writer.write("step", norm=object())


def test_writer_names_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(RecordError, match=r"cannot write a record to .*--out"):
        RecordWriter(tmp_path)


def test_round_trip_and_a_folder_stands_for_its_record(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl", steps=20, threshold=0.5)
    assert read_record(tmp_path) == record
    assert record.names == list(PARAMETERS)
    assert [step["i"] for step in record.steps] == list(range(20))
    assert len(record.tensors) == 5
    assert record.end is not None
    assert record.end["steps"] == 20
    assert not record.torn


@pytest.mark.parametrize(
    "tail", ['{"t": "step", "i": 1, "no', '{"t": "step"', '{"t": "event", "message": "\xc3', "[1]"]
)
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    path = tmp_path / "run.jsonl"
    path.write_bytes((META + '{"t": "step", "i": 0}\n').encode() + tail.encode("latin-1"))
    record = read_record(path)
    assert record.torn
    assert [step["i"] for step in record.steps] == [0]
    assert record.end is None


def test_unknown_kinds_and_empty_lines_are_passed_over(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(META + '\n{"t": "hologram", "i": 3}\n{"t": "step", "i": 0}\n')
    record = read_record(path)
    assert not record.torn
    assert len(record.steps) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: .*gradguard run --out"),
        (b"\n\n", "is empty"),
        (b"loss,norm\n1,2\n", "is not a gradguard record: line 1"),
        (b"\x89PNG\xff\xfe", "is not a gradguard record: line 1"),
        (b'{"t": "step", "i": 0}\n', r'line 1 is not \{"t": "meta"'),
        (b"\x1f\x8b\x08\x00", "is compressed: gunzip it first"),
        (b'{"t": "meta"', "line 1: Expecting"),
        (b'{"t": "meta", "argv": ' + b"[" * 100_000, "is not a gradguard record: line 1: .*recursion"),
        (b'\xff\xfe{\x00"\x00t\x00', 'line 1 is not {"t": "meta"'),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_record(path)


STEP = '{"t": "step", "i": 0, %s}'
FIELDS = {
    "norm": ['"1"', "true", "-1", "[1]", "{}", "1e999", "1" + "0" * 400],
    "loss": ['"low"', "false", "[1]", "-1e999"],
    "wall": ["null", "-1", "1e300"],
    "coefficient": ["-0.5", '"1"'],
    "threshold": ["{}", "true"],
    "lr": ["[0.1]"],
    "amp_scale": ['"1024"', "-1"],
    "rule": ["1", "null", '["norm"]'],
    "skipped": ["1", '"no"'],
    "nonfinite": ["-1", "0.5", "null", "true"],
    "optimizer": ['"0"', "-1", "1.0"],
    "top": ["3", "[3]", "[3, null]", "[-1, 0.5]", "[0.5, 0.5]", '["w", 0.5]', "[3, -0.1]", "[3, true]"],
    "clips": ["{}", '["norm"]', '[["norm", 1.0]]', '[["norm", "1", null]]'],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in FIELDS.items() for value in values])
def test_a_field_that_cannot_be_meant_is_left_out_and_counted(tmp_path, key, value):
    path = tmp_path / "run.jsonl"
    path.write_text(META + STEP % f'"{key}": {value}' + "\n")
    record = read_record(path)
    assert record.steps == [{"t": "step", "i": 0}]
    assert (record.dropped, record.unreadable, record.torn) == (1, 0, False)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('{"t": "step", "i": 0, "norm": NaN, "loss": -Infinity}', {"norm": None, "loss": None}),
        ('{"t": "step", "i": 0, "norm": 1e308, "later": {"a": ["x"]}}', {"norm": 1e308, "later": {"a": ["x"]}}),
        ('{"t": "step", "i": 0, "rule": "a\\u001b[1m\\u202e\\ud800"}', {"rule": r"a\x1b[1m\u202e\ud800"}),
        (f'{{"t": "step", "i": 0, "norm": {10**200}, "loss": -3}}', {"norm": 1e200, "loss": -3}),
        ('{"t": "step", "i": 0, "clips": [["norm", 1.0, null]]}\r', {"clips": [["norm", 1.0, None]]}),
    ],
)  # fmt: skip
def test_what_is_sound_stays_and_text_becomes_printable(tmp_path, line, read):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (META + line + "\n").encode())
    record = read_record(path)
    assert record.steps == [{"t": "step", "i": 0} | read]
    assert (record.dropped, record.unreadable) == (0, 0)


def test_each_parameter_keeps_its_place(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"t": "meta", "params": [{"name": "a"}, 3, {"name": 4, "numel": 5}, {"name": "d"}], "argv": [1]}')
    record = read_record(path)
    assert record.names == ["a", "?", "?", "d"]
    assert record.meta["params"][2] == {"numel": 5}
    assert record.dropped == 3


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"t": "step", "i"', "line 3: Expecting"),
        ('{"t": "step"}', 'line 3: a "step" line needs the number of a step under "i"'),
        ('{"t": "step", "i": -1}', 'line 3: a "step" line needs'),
        ('{"t": "step", "i": true}', 'line 3: a "step" line needs'),
        ('{"t": "step", "i": 1e3}', 'line 3: a "step" line needs'),
        ('{"t": "step", "i": 9007199254740992}', 'line 3: a "step" line needs'),
        ('{"t": "tensors", "i": 0}', 'line 3: a "tensors" line needs a list of norms under "norm"'),
        ('{"t": "tensors", "i": 0, "norm": [1.0, "2"]}', 'line 3: a "tensors" line needs a list of norms'),
        ('{"t": "tensors", "i": 0, "norm": [1.0, -2, null]}', 'line 3: a "tensors" line needs a list of norms'),
        ('{"t": "event", "i": "0"}', 'line 3: a "event" line needs'),
        ('{"t": 3}', "line 3: expected an object"),
        ("[1]", "line 3: expected an object"),
        ("\0" * 99, "line 3: Expecting value"),
        ("[" * 100_000, "line 3: .*recursion"),
        ('{"t": "step", "i": 0}', "the number of a step is not above the one before"),
    ],
)
def test_a_broken_inner_line_is_left_out_and_counted(tmp_path, line, fault):
    path = tmp_path / "run.jsonl"
    path.write_text(META + '{"t": "step", "i": 0}\n' + line + '\n{"t": "step", "i": 1}\n')
    record = read_record(path)
    assert [step["i"] for step in record.steps] == [0, 1]
    assert (record.unreadable, record.torn, record.tensors, record.events) == (1, False, [], [])
    assert re.match(fault, record.first_fault)
    assert any("1 damaged line (the first: " in note for note in notes(record))


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([0, 1, 9_000_000, 2, 3], [0, 1, 2, 3]),
        ([5, 0, 1, 2], [0, 1, 2]),
        ([0, 1, 2, 3, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([3, 2, 1, 0], [0]),
    ],
)
def test_as_many_steps_are_kept_as_ascend(tmp_path, numbers, kept):
    path = tmp_path / "run.jsonl"
    path.write_text(META + "".join(f'{{"t": "step", "i": {i}, "wall": {k}}}\n' for k, i in enumerate(numbers)))
    record = read_record(path)
    assert [step["i"] for step in record.steps] == kept
    assert record.unreadable == len(numbers) - len(kept)
    assert [step["wall"] for step in record.steps] == sorted(step["wall"] for step in record.steps)


@pytest.mark.parametrize("cut", [0, 1, 12, 30])
def test_of_two_runs_in_one_file_the_last_is_read_and_nothing_is_mixed(tmp_path, cut):
    runs = []
    for name, steps in (("first", 9), ("second", 5)):
        path = tmp_path / f"{name}.jsonl"
        with RecordWriter(path) as writer:
            writer.write("meta", version=name, params=[{"name": name}])
            for i in range(steps):
                writer.write("step", i=i, norm=float(steps))
                writer.write("tensors", i=i, norm=[float(steps)])
            writer.write("end", steps=steps, exit=0)
        runs.append(path.read_bytes())
    joined = tmp_path / "run.jsonl"
    joined.write_bytes(runs[0][: -cut or None] + runs[1])
    record, alone = read_record(joined), read_record(tmp_path / "second.jsonl")
    assert (record.meta, record.steps, record.tensors, record.end) == (
        alone.meta,
        alone.steps,
        alone.tensors,
        alone.end,
    )
    assert (record.earlier_runs, record.unreadable) == (1, 0)
    assert any("contains 2 runs, one after the other: only the last" in note for note in notes(record))
    follower = JsonlReader(joined)
    assert sum(line["t"] == "meta" for line in follower.poll()) == 2


def test_where_the_second_run_s_first_line_is_damaged_nothing_is_mixed_either(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"t": "meta", "params": [{"name": "w"}]}\n{"t": "step", "i": 0}\n{"t": "meta", "pa\n{"t": "step", "i": 7}\n'
    )
    record = read_record(path)
    assert (record.meta, [step["i"] for step in record.steps], record.earlier_runs) == ({"t": "meta"}, [7], 1)


@pytest.mark.parametrize(("head", "words"), [(b"", "line 1 is not"), (META.encode(), None)])
def test_a_long_line_of_zeros_is_not_held_in_memory(tmp_path, monkeypatch, head, words):
    monkeypatch.setattr(file, "LONGEST_LINE", 2**20)
    path = tmp_path / "run.jsonl"
    path.write_bytes(head)
    os.truncate(path, 2**27)  # a hole
    tracemalloc.start()
    try:
        if words is None:
            assert read_record(path).torn
        else:
            with pytest.raises(RecordError, match=words):
                read_record(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_missing_file_and_folder_without_a_record(tmp_path):
    with pytest.raises(RecordError, match=r"no record at .*gone.jsonl. Make one: gradguard run --out DIR"):
        read_record(tmp_path / "gone.jsonl")
    with pytest.raises(RecordError, match=r"is a folder without run.jsonl"):
        read_record(tmp_path)

import json

import pytest
from synthetic import PARAMETERS, write_char_rnn

from gradguard.errors import InvalidTypeError, RecordError
from gradguard.monitoring.record.file import RecordWriter, read_record

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


def test_writer_makes_folders_replaces_the_file_and_closes_twice(tmp_path):
    path = tmp_path / "a" / "b" / "run.jsonl"
    for _ in range(2):
        writer = RecordWriter(str(path))
        writer.write("meta", version="0.1.0")
        writer.flush()
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
        (b'{"t": "meta"}\n{"t": "step", "i"\n{"t": "end"}\n', "broken at line 2: .*delete line 2"),
        (b'{"t": "meta"}\n\n{"t": "step"}\n{"t": "end"}\n', 'broken at line 3: a "step" line needs "i" of type int'),
        (b'{"t": "meta"}\n{"t": "tensors", "i": 0}\n{"t": "end"}\n', '"tensors" line needs "norm" of type list'),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "norm": NaN}\n{"t": "end"}\n', "line 2: NaN is not JSON"),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "norm": 1e999}\n{"t": "end"}\n', "line 2: 1e999 is too large"),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "norm": "1"}\n{"t": "end"}\n', 'line 2: "norm" of a "step" line is no'),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "loss": [1]}\n{"t": "end"}\n', 'line 2: "loss" of a "step" line is no'),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "norm": -1}\n{"t": "end"}\n', "line 2: .* is below 0"),
        (b'{"t": "meta", "params": null}\n', 'line 1: "params" of a "meta" line is no list'),
        (b'{"t": "meta"}\n{"t": "step", "i": 0, "x": "\xff"}\n{"t": "end"}\n', "broken at line 2"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_record(path)


def test_missing_file_and_folder_without_a_record(tmp_path):
    with pytest.raises(RecordError, match=r"no record at .*gone.jsonl. Make one: gradguard run --out DIR"):
        read_record(tmp_path / "gone.jsonl")
    with pytest.raises(RecordError, match=r"is a folder without run.jsonl"):
        read_record(tmp_path)

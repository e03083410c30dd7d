"""The list of bad samples and its file."""

import json

import numpy
import pytest
import torch

from gradguard.errors import InvalidTypeError, RecordError
from gradguard.resilience import BadSample, BadSamples


def test_the_file_is_read_back_and_appended_to(tmp_path):
    file = tmp_path / "bad.jsonl"
    first = BadSamples(file)
    assert len(first) == 0
    assert first.add([17, "17", "Tübingen"], reason="loss 9 σ", step=4, rank=1) == 3
    assert first.add([17, 5], reason="again") == 1
    second = BadSamples(file)
    assert [*second] == [*first]
    assert next(iter(second)) == BadSample(17, "loss 9 σ", 4, 1)
    assert {17, "17", "Tübingen", 5} == {one.id for one in second}
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[3]) == {"id": 5, "reason": "again"}
    assert second.add(5) == 0
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4


def test_samples_come_in_the_order_given_without_doubles():
    bad = BadSamples()
    assert bad.add([5, 3, 5, 9, 3], gather=True) == 3  # of one process
    assert [one.id for one in bad] == [5, 3, 9]
    assert [i for i in torch.arange(6) if i in bad] == [3, 5]
    assert [i for i in numpy.arange(6) if i in bad] == [3, 5]


def test_a_list_by_hand(tmp_path):
    file = tmp_path / "bad.txt"
    file.write_text('# from the logs\n17\n\n017\n-3\ndoc-5\n{"id": "x", "who": "me"}\n1.5\nlast', encoding="utf-8")
    bad = BadSamples(file)
    assert [one.id for one in bad] == [17, "017", -3, "doc-5", "x", "1.5", "last"]
    bad.add(4)  # the last line had no end
    assert [one.id for one in BadSamples(file)][-2:] == ["last", 4]


@pytest.mark.parametrize(
    "line", ['{"id": 17, "rea', '{"step": 3}', '{"id": 1.5}', '{"id": true}', '{"id": null}', '{"id": [1]}']
)
def test_a_line_that_is_no_sample(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"id": 1}}\n{line}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"bad\.jsonl, line 2: .* is not a sample, or is cut off"):
        BadSamples(file)


def test_ids_that_are_none():
    with pytest.raises(InvalidTypeError, match=r"the ids of a batch are such as 1\.5"):
        BadSamples().add([1.5])


def test_what_a_full_disk_did_not_take_is_written_with_the_next(tmp_path):
    file = tmp_path / "bad.jsonl"
    bad = BadSamples(file)
    file.mkdir()  # as good as full
    with pytest.warns(RuntimeWarning, match="2 bad samples were not written to .*bad.jsonl"):
        assert bad.add([3, 4]) == 2
    assert 3 in bad
    file.rmdir()
    bad.add([5])
    assert [one.id for one in BadSamples(file)] == [3, 4, 5]


def test_a_full_disk_leaves_no_empty_list(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    file = tmp_path / "bad.jsonl"
    bad = BadSamples(file)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", full)
        with pytest.warns(RuntimeWarning, match="1 bad samples were not written to .*No space left"):
            bad.add(3)
    assert not file.exists()
    bad.add(4)
    assert [one.id for one in BadSamples(file)] == [3, 4]

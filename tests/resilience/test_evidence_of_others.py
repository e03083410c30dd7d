"""Evidence of a spike from somebody else, damaged: what was written, or one line that says why not."""

import errno
import random
import zlib

import pytest
import torch
from test_replay_step import kept
from torch import nn

from damage import damaged
from gradguard.errors import RecordError
from gradguard.files import writing
from gradguard.resilience import find_culprit, write_evidence
from gradguard.resilience.evidence import read_evidence


@pytest.fixture
def file(tmp_path):
    batches = kept({"x": torch.ones(2, 3), "of": [1, "a", None, 2.5, torch.eye(3).to_sparse()]})
    write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 1), nn.Linear(1, 1))
    return tmp_path / "e.pt"


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(file, monkeypatch, where):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    before, batches = file.read_bytes(), kept(torch.zeros(2))
    for name in ("e.pt", "new.pt"):
        with monkeypatch.context() as patch:
            patch.setattr(writing.os if where == "fsync" else writing.Path, where, full)
            with pytest.raises(OSError, match=rf"^\[Errno 28\] no evidence .* '.*/{name}': No space .* left there$"):
                write_evidence(file.with_name(name), batches, find_culprit(batches, 1), nn.Linear(1, 1))
        assert [path.name for path in file.parent.iterdir()] == ["e.pt"]
    assert file.read_bytes() == before


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_damaged_files(file, count):
    rng, whole, answers, refused = random.Random(count), file.read_bytes(), 0, []
    for _ in range(count):
        file.write_bytes(damaged(whole, "gradguard_step", rng, lambda t: {"crc32": f"{zlib.crc32(t.encode()):08x}"}))
        try:
            answers += len(read_evidence(file).suspects)
        except RecordError as error:
            refused.append(str(error))
    assert answers
    assert len(refused) > count / 2
    assert not [told for told in refused if "\n" in told]

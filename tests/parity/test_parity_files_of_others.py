"""A parity file from somebody else, damaged: a comparison, or one line that says why not."""

import json
import os
import random
from dataclasses import fields

import pytest

from damage import DEEP, damaged
from gradguard.cli import main
from gradguard.errors import RecordError
from gradguard.parity import saved as saved_module
from gradguard.parity.compare import compare
from gradguard.parity.saved import SavedParameter, read, write
from gradguard.results import SavedGradients
from parity.runs import drawn, saved

KEY = "gradguard_parity"


@pytest.fixture
def file(tmp_path):
    gradients = {"w": drawn((4, 4), 0), "b": drawn((4,), 1), "up": drawn((8, 4), 2)}
    stages = {"state before step 1": saved(gradients), "update of step 1": saved(gradients)}
    settings = {"w": {"lr": 0.1}}
    write(
        tmp_path / "ref",
        saved(
            gradients, facts={"world size": 4.0}, parts={"a": gradients}, rows=("w",), stages=stages, settings=settings
        ),
    )
    return tmp_path / "ref"


def judged(reference, new):
    """Everything that the command does."""
    runs = read(reference), read(new)
    report = compare(*runs)
    json.dumps(report.as_dict(), allow_nan=False)
    return str(report)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_damaged_files(file, count):
    rng, whole, answers, refused = random.Random(count), file.read_bytes(), 0, []
    new = file.with_name("new")
    for _ in range(count):
        new.write_bytes(damaged(whole, KEY, rng))
        try:
            for pair in ((file, new), (new, file), (new, new)):
                answers += bool(judged(*pair))
        except RecordError as error:
            refused.append(str(error))
    assert answers > count / 5
    assert len(refused) > count / 5
    assert not [told for told in refused if "\n" in told]


def test_each_field_that_is_written_is_checked():
    written = {f.name for f in fields(SavedGradients)} - {"parameters", "sketches", "rows", "stages"}
    assert ({f.name for f in fields(SavedParameter)}, written) == ({*saved_module._PARAMETER}, {*saved_module._ABOUT})


def changed(file, **about):
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    told = json.loads(header["__metadata__"][KEY])
    for name, value in about.items():
        holder = told["parameters"][0] if name in told["parameters"][0] else told
        holder[name] = value
    header["__metadata__"][KEY] = json.dumps(told)
    head = json.dumps(header).encode()
    file.with_name("new").write_bytes(len(head).to_bytes(8, "little") + head + whole[begin:])


def blocks_changed(file, name, **change):
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    if change:
        header[name].update(change)
    else:
        del header[name]
    head = json.dumps(header).encode()
    file.with_name("new").write_bytes(len(head).to_bytes(8, "little") + head + whole[begin:])


def deep(file):
    head = b'{"__metadata__": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"
    file.with_name("new").write_bytes(len(head).to_bytes(8, "little") + head)


HOSTILE = {
    "a deep header": deep,
    "a deep text": lambda file: changed(file, facts=DEEP),
    "no rounding": lambda file: changed(file, rounding="much"),
    "a rounding below 0": lambda file: changed(file, rounding=-1),
    "no weights": lambda file: blocks_changed(file, "weights"),
    "a negative shape": lambda file: changed(file, shape=[-4, -4]),
    "a negative number of copies": lambda file: changed(file, copies=-3),
    "copies without end": lambda file: changed(file, copies=10**400),
    "more parts than there are": lambda file: changed(file, parts=["a", "b"]),
    "empty lists without end": lambda file: blocks_changed(
        file, "gradient", shape=[3 * 10**8, 0, 0], data_offsets=[0, 0]
    ),
    "a negative number of runs": lambda file: blocks_changed(file, "gradient", shape=[-5, -3, 32]),
    "a fact of 0": lambda file: changed(file, facts={"world size": 0}),
    "a pipe": lambda file: os.mkfifo(file.with_name("new")),
    "a device": lambda file: file.with_name("new").symlink_to("/dev/zero"),
    "a folder": lambda file: file.with_name("new").mkdir(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line(file, name, capsys):
    HOSTILE[name](file)
    for pair in (("ref", "new"), ("new", "ref")):
        assert main(["parity", *(str(file.with_name(one)) for one in pair)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("gradguard: error: ")
        assert told.count("\n") == 1

"""A snapshot from somebody else: nothing in it is run, and what is no snapshot is refused in one line."""

import base64
import errno
import json
import os
import pickle
import random
import re
import threading
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy
import pytest
import torch
from test_saved_snapshot import FILE, Cursor, saved
from test_snapshot import content, same, small, step
from torch import nn

import gradguard as gg
from gradguard.errors import GradguardError, InvalidValueError, UnsupportedGradientError
from gradguard.files import writing
from gradguard.files.blocks import BlockFile, NewBlock, write_blocks


class Touch:
    """What leaves a mark where it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def pickles(marker):
    """The same in each way in which a reader might be led to unpickle it."""
    plain = pickle.dumps(Touch(marker))
    head = json.dumps({"__metadata__": {"gradguard_snapshot": base64.b64encode(plain).decode(), "crc32": "0"}}).encode()
    crc = zlib.crc32(plain).to_bytes(4)
    return {
        "a pickle": plain,
        "a pickle with a checksum": crc + plain,
        "an old protocol": pickle.dumps(Touch(marker), protocol=0),
        "behind a header": len(head).to_bytes(8, "little") + head + plain,
    }


@pytest.mark.parametrize("kind", ["torch.save", *pickles("")])
def test_a_directory_whose_every_file_would_run_code_runs_none(tmp_path, kind):
    marker, folder = tmp_path / "marker", tmp_path / "a"
    folder.mkdir()
    for name in (FILE, ".metadata", "__0_0.distcp", "process-1.safetensors", "0", "snapshot.pt", "data.pkl"):
        if kind == "torch.save":
            with (folder / name).open("wb") as file:
                torch.save(Touch(marker), file)
        else:
            (folder / name).write_bytes(pickles(marker)[kind])
    with pytest.raises(GradguardError, match="cannot be read: a file is missing or damaged, or is not a snapshot"):
        gg.Snapshot.load(folder, *small())
    (folder / FILE).unlink()
    with pytest.raises(GradguardError, match="holds no complete snapshot"):
        gg.Snapshot.load(folder, *small())
    assert not marker.exists()
    pickle.loads(pickles(marker)["a pickle"])
    assert marker.exists()  # the trap works


def rewritten(file, change):
    """Write the file again with another document, whose checksum is right."""
    with BlockFile(file) as found:
        told = json.loads(found.about["gradguard_snapshot"])
        blocks = {name: NewBlock(one.dtype, one.shape, found.read(name)) for name, one in found.blocks.items()}
    told = change(told) or told
    text = json.dumps(told)
    about = {"gradguard_snapshot": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    with file.open("wb") as out:
        write_blocks(out, about, blocks)


def tensor_of(told, **change):
    place = {"shape": 0, "stride": 1, "dtype": 2, "device": 3, "checksum": 4}
    for name, value in change.items():
        told["tensors"][0][place[name]] = value


def in_groups(told, name, value):
    parts = dict(told["content"]["mapping"])["parts"]
    groups = dict(parts[1]["mapping"])["groups"]
    groups[0]["mapping"].append([name, value])


FORGED = {
    "a tensor of 2**62 elements": lambda t: tensor_of(t, shape=[2**62], stride=[1]),
    "a stride far away": lambda t: tensor_of(t, stride=[2**40, 1]),
    "a stride of 0": lambda t: tensor_of(t, shape=[2**40, 4, 3], stride=[0, 3, 1]),
    "a negative shape": lambda t: tensor_of(t, shape=[-4, -3]),
    "a dtype that is none": lambda t: tensor_of(t, dtype="Tensor"),
    "another dtype": lambda t: tensor_of(t, dtype="float64"),
    "a device that is none": lambda t: tensor_of(t, device="cuda:99"),
    "another format": lambda t: t.update(format=2),
    "other processes": lambda t: t.update(processes=10**400),
    "another rank": lambda t: t.update(rank=1),
    "no save": lambda t: t.update(save="x"),
    "no tables": lambda t: [t.pop("tensors"), None][1],
    "no content": lambda t: t.update(content=None),
    "a deep content": lambda t: t.update(content=json.loads("[" * 140 + "]" * 140)),
    "a function of a module": lambda t: in_groups(t, "rule", {"reference": ["os.system"]}),
    "a kind that is none": lambda t: in_groups(t, "rule", {"call": ["os.system", "true"]}),
    "a named tuple": lambda t: in_groups(t, "rule", {"named tuple": ["os", "system", [], []]}),
    "a tensor that is missing": lambda t: in_groups(t, "rule", {"tensor": 10**6}),
    "a tensor before the first": lambda t: in_groups(t, "rule", {"tensor": -1}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_document_is_refused_before_anything_is_changed(tmp_path, name):
    saved(tmp_path / "a")
    rewritten(tmp_path / "a" / FILE, lambda told: None)  # as it was, it loads
    gg.Snapshot.load(tmp_path / "a", *small()).restore()
    rewritten(tmp_path / "a" / FILE, FORGED[name])
    model, optimizer = small()
    before = content(model, optimizer)
    with pytest.raises(InvalidValueError, match=r"^.{20,800}\n"):
        gg.Snapshot.load(tmp_path / "a", model, optimizer)
    same(content(model, optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_of_a_dtype_of_its_own_comes_back(tmp_path, dtype):
    model, optimizer = small()
    step(model, optimizer)
    state = optimizer.state[model[0].weight]
    kept = state["exp_avg"] = state["exp_avg"].to(dtype)
    save(tmp_path / "a", model, optimizer)
    other, others = small()
    gg.Snapshot.load(tmp_path / "a", other, others).restore()
    same(others.state[other[0].weight]["exp_avg"], kept)


def trained(kind, sparse=False, **settings):
    model = torch.nn.Embedding(7, 3, sparse=True) if sparse else torch.nn.Linear(4, 3, bias=False)
    optimizer = kind(model.parameters(), **settings)
    model(torch.randint(0, 7, (5,)) if sparse else torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(folder, model, optimizer):
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    snapshot.save(folder)


def test_a_sparse_momentum_is_taken(tmp_path):
    model, optimizer = trained(torch.optim.SGD, sparse=True, lr=0.1, momentum=0.9)
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    save(tmp_path / "sparse", model, optimizer)
    other = trained(torch.optim.SGD, sparse=True, lr=0.1, momentum=0.9)
    gg.Snapshot.load(tmp_path / "sparse", *other).restore()
    assert torch.equal(other[0].weight, model.weight)


@pytest.mark.parametrize("value", [[], "running_mean", {"bytes": "00"}])
def test_a_buffer_that_is_no_tensor_is_refused(tmp_path, value):
    def run():
        model = nn.BatchNorm1d(2)
        return model, torch.optim.SGD(model.parameters())

    def change(told):
        parts = dict(told["content"]["mapping"])["parts"]
        dict(parts[0]["mapping"])["buffers"]["mapping"][0][1] = value

    snapshot = gg.Snapshot(*run())
    snapshot.take()
    snapshot.save(tmp_path / "a")
    gg.Snapshot.load(tmp_path / "a", *run()).restore()
    rewritten(tmp_path / "a" / FILE, change)
    with pytest.raises(InvalidValueError, match="a buffer is not a tensor"):
        gg.Snapshot.load(tmp_path / "a", *run())


VALUES = [None, True, 0, -1, 2**63, 10**300, 1e308, "", "x" * 50, [], [[]], {}, {"tensor": 0}, {"bytes": "00"}]


def places(value, path=()):
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def mutated(told, rng):
    """One value of the document is another."""
    *path, last = rng.choice([path for path in places(told) if path])
    for key in path:
        told = told[key]
    told[last] = rng.choice(VALUES)


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_documents_with_one_value_changed(tmp_path, count):
    """Whoever can write a right checksum can write any number; but nothing else is raised, and nothing is half done."""
    saved(tmp_path / "a")
    file, rng, refused = tmp_path / "a" / FILE, random.Random(count), []
    whole = file.read_bytes()
    for _ in range(count):
        rewritten(file, lambda told: mutated(told, rng))
        model, optimizer = small()
        before = content(model, optimizer)
        try:
            gg.Snapshot.load(tmp_path / "a", model, optimizer)
        except GradguardError as error:
            refused.append(str(error))
        same(content(model, optimizer), before)
        file.write_bytes(whole)
    assert len(refused) > count / 3
    assert not [told for told in refused if "\n" in told]


def test_no_more_memory_is_taken_than_the_file_has(tmp_path):
    """A header of one number that says that terabytes follow."""
    folder = tmp_path / "a"
    folder.mkdir()
    for length in (2**63, 2**40, 2**20):
        (folder / FILE).write_bytes(length.to_bytes(8, "little") + b"{}" * 40)
        with pytest.raises(InvalidValueError, match="its header has an implausible length, or it is cut off"):
            gg.Snapshot.load(folder, *small())


def test_what_is_no_file_is_not_waited_for(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    os.mkfifo(folder / FILE)
    with pytest.raises(InvalidValueError, match="holds no complete snapshot"):
        gg.Snapshot.load(folder, *small())
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("/dev/zero")
    with pytest.raises(InvalidValueError, match="holds no complete snapshot"):
        gg.Snapshot.load(folder, *small())


Pair = namedtuple("Pair", "first second")
TEXTS = numpy.array(["ab"])


def remembered():
    """Each kind of value that a state may hold."""
    ordered = OrderedDict(a=1)
    ordered._metadata = {"version": 2}
    return {
        "numbers": [0, -0.0, 0.1, 5e-324, float("inf"), float("-inf"), float("nan"), 2**70, -(2**63), True, None, 1j],
        "text": ["", "größe \ud800 \x00", b"\x00\xff"],
        "containers": [(1, (2,)), {1, 2}, frozenset({3}), deque([1, 2], 3), deque([1]), torch.Size([2, 3])],
        "mappings": [{1: "a", "b": 2, (1, "c"): 3, None: 4, 2.5: 5}, Counter("aab"), defaultdict(list, a=[1]), ordered],
        "of torch": [torch.bfloat16, torch.device("cpu"), torch.arange(3)],
        "arrays": [numpy.arange(6).reshape(2, 3), numpy.float32(2.5), numpy.str_(""), numpy.array(3.0), TEXTS],
    }


class Holder(Cursor):
    """Something with a state."""

    at = None


def test_every_kind_of_value_comes_back(tmp_path):
    model, optimizer = small()
    holder = Holder()
    holder.at = remembered()
    saved(tmp_path / "a", model, optimizer, extra_state=[holder])
    other, others = small()
    back = Holder()
    gg.Snapshot.load(tmp_path / "a", other, others, extra_state=[back]).restore()
    assert repr(back.at) == repr(remembered())
    for name in ("mappings", "containers"):
        assert back.at[name] == remembered()[name]
        assert [*map(type, back.at[name])] == [*map(type, remembered()[name])]
    assert back.at["mappings"][-1]._metadata == {"version": 2}
    assert back.at["mappings"][2].default_factory is list
    assert [one.dtype for one in back.at["arrays"]] == [one.dtype for one in remembered()["arrays"]]
    assert str(back.at["numbers"][1]) == "-0.0"


class Own:
    """A class of somebody's script."""


@pytest.mark.parametrize(("value", "words"), [
    (Own(), r"\(an? Own\)"), ({Own: 1}, "a key that is a type"), (print, r"\(print, a builtin_function_or_method\)"),
    (numpy.array([None]), "a ndarray"), (Pair(1, 2), "a Pair"), (re.compile("a"), "a Pattern"),
])  # fmt: skip
def test_what_has_no_plain_form_is_refused_when_it_is_saved(tmp_path, value, words):
    model, optimizer = small()
    holder = Holder()
    holder.at = value
    snapshot = gg.Snapshot(model, optimizer, extra_state=[holder])
    snapshot.take()
    with pytest.raises(UnsupportedGradientError, match=f"cannot be written to a file .*{words}"):
        snapshot.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_function_in_a_group_stays_out_of_files(tmp_path):
    model, optimizer = small()
    optimizer.param_groups[0]["rule"] = torch.nn.functional.relu
    with pytest.raises(UnsupportedGradientError, match=r"cannot be written to a file \(relu, a function\)"):
        saved(tmp_path / "a", model, optimizer)


# Two jobs, and full disks.


def test_of_jobs_that_save_into_one_directory_one_succeeds(tmp_path):
    for trial in range(6):
        folder, told, refused, begin = tmp_path / str(trial), [], [], threading.Barrier(4)
        folder.mkdir()
        runs = []
        for seed in range(4):
            model, optimizer = small()
            with torch.no_grad():
                model[0].weight.fill_(seed)
            snapshot = gg.Snapshot(model, optimizer)
            snapshot.take()
            runs.append(snapshot)

        def job(seed, folder=folder, told=told, refused=refused, begin=begin, runs=runs):
            begin.wait()
            try:
                runs[seed].save(folder / "a")
                told.append(seed)
            except InvalidValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=job, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        (winner,) = told
        assert ["exists already: expected a new or empty directory" in words for words in refused] == [True] * 3
        model, optimizer = small()
        gg.Snapshot.load(folder / "a", model, optimizer).restore()
        assert set(model[0].weight.flatten().tolist()) == {float(winner)}
        assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_a_full_disk_leaves_nothing_and_the_name_serves_again(tmp_path, monkeypatch, where):
    _, _, snapshot = saved(tmp_path / "first")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, where, full)
        with pytest.raises(OSError, match=r"^\[Errno 28\] no snapshot .* '.*/a': No space left .* left there$"):
            snapshot.save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    snapshot.save(tmp_path / "a")
    gg.Snapshot.load(tmp_path / "a", *small()).restore()


def test_a_file_that_reaches_its_limit_leaves_nothing(tmp_path):
    """The real thing: the system refuses to write on."""
    resource, signal = pytest.importorskip("resource"), __import__("signal")
    model = nn.Linear(300, 300)
    snapshot = gg.Snapshot(model, torch.optim.SGD(model.parameters()))
    snapshot.take()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError, match=r"no snapshot was written to .*: File too large"):
            snapshot.save(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
    snapshot.save(tmp_path / "a")

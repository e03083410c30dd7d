"""A spike computed again: small trainings whose spike has a known cause, each told right; and the verdict's table."""

import json
import math
import os
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gradguard.cli import main
from gradguard.errors import CommandError, InvalidTypeError, InvalidValueError, RecordError, UnsupportedGradientError
from gradguard.resilience import Batches, SampleIds, find_culprit, write_evidence
from gradguard.resilience.evidence import EvidenceBatch, StepEvidence, read_evidence
from gradguard.resilience.step_replay import MeasuredBatch, StateResult, judge, replay_step
from gradguard.state.plain_file import PlainWriter
from test_generators import accelerator  # noqa: F401

SCRIPT = """
import torch
from torch import nn

DROPOUT = 0.2

def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(32, 1))

def for_replay():
    model = build()
    return model, lambda batch: nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])

def forgetful():
    model = build()
    return model, lambda batch: 0.01 * nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])

def summed():
    model = build()
    return model, lambda batch: nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="sum")

def healthy():
    model = build()
    return model, lambda batch: nn.functional.mse_loss(model(batch["x"])[:, 0], batch["x"][:, 0].detach())

def returns_model():
    return build()

def other_model():
    return nn.Linear(8, 1), lambda batch: batch["x"].sum()

def returns_float():
    model = build()
    return model, lambda batch: float(model(batch["x"]).detach().sum())

def without_model():
    model = build()
    return model, lambda batch: torch.ones(1, requires_grad=True).sum()

def raises():
    model = build()
    return model, lambda batch: model(batch.x)

def cannot():
    raise ValueError("no data here")

number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "spiky_train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "spiky_train", raising=False)
    yield __import__("spiky_train")
    sys.modules.pop("spiky_train", None)


class Samples:
    def __init__(self, bad):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(400, 8, generator=draw)
        self.y = self.x[:, 0] + 0.1 * torch.randn(400, generator=draw)
        if bad is not None:
            self.y[bad] = 80.0

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Run:
    """30 steps of training; at step 29 a bad sample, or weights that something has spoilt before it."""

    def __init__(self, script, cause):
        torch.manual_seed(0)
        self.model, self.batches = script.build(), Batches(keep=True)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        bad = 297 if cause == "data" else None
        loader = SampleIds(DataLoader(Samples(bad), batch_size=10), self.batches)
        self.older = {}
        for batch in loader:
            step = self.batches.step
            if step == 20:
                self.older = {20: {k: v.clone() for k, v in self.model.state_dict().items()}}
            if step == 29 and cause == "weights":
                with torch.no_grad():
                    self.model[4].weight.mul_(-20)
            loss = nn.functional.mse_loss(self.model(batch["x"])[:, 0], batch["y"])
            self.batches.record_loss(loss if cause != "hardware" or step != 29 else loss * 500)
            if step < 29:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            self.batches.end_step()
            if step == 29:  # the spike: skipped, so the weights are still those of the step
                break
        self.culprit = find_culprit(self.batches, 29)

    def write(self, file, **options):
        options = {"older": self.older, "before": 29, **options}
        return write_evidence(file, self.batches, self.culprit, self.model, **options)


@pytest.mark.parametrize(
    ("cause", "code", "told", "words"),
    [
        ("data", 0, "data", "the weights before step 20, too, the batch stands out"),
        ("weights", 0, "weights", "other batches, too, are far above their earlier losses"),
        ("hardware", 1, None, "the spike does not come back: on the same weights, batch and random numbers"),
    ],
)
def test_the_cause_is_told(script, tmp_path, capsys, cause, code, told, words):
    run = Run(script, cause)
    assert run.culprit.ids == tuple(range(290, 300))
    run.write(tmp_path / "spike.pt")
    before = torch.get_rng_state()
    assert main(["replay-step", "spike.pt", "spiky_train:for_replay", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["cause"], report["ids"]) == (told, list(range(290, 300)))
    assert words in report["reason"]
    assert [one["step"] for one in report["states"]] == [20, 29]
    if cause != "hardware":  # dropout and the weights are those of the step
        assert report["states"][1]["suspects_loss"][0] == pytest.approx(run.culprit.blamed[0].loss, rel=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("accelerator", ["mps"], indirect=True)
def test_generators_of_accelerators_are_those_of_the_step_and_put_back(script, tmp_path, accelerator):  # noqa: F811
    accelerator.drawn, seen = 7, []
    Run(script, "data").write(tmp_path / "spike.pt")
    accelerator.drawn = 3

    def drawing():
        model, step = script.for_replay()

        def drawn(batch):
            seen.append(accelerator.drawn)
            accelerator.drawn += 1
            return step(batch)

        return model, drawn

    script.drawing = drawing
    assert replay_step("spike.pt", "spiky_train:drawing").cause == "data"
    assert set(seen) == {7}
    assert len(seen) > 2
    assert accelerator.drawn == 3


@pytest.mark.parametrize(
    ("cause", "options", "code", "words"),
    [
        ("data", {"older": None}, 3, "It is not the weights alone; whether it is the data alone"),
        ("weights", {"older": None}, 0, "other batches, too, are far above"),  # by their losses in training
        ("data", {"others": 3}, 3, "there are fewer than 4 other batches in the file"),
        ("data", {"others": 4}, 0, "The data are bad"),
    ],
)
def test_what_is_not_in_the_file_is_not_told(script, tmp_path, capsys, cause, options, code, words):
    Run(script, cause).write(tmp_path / "spike.pt", **options)
    assert main(["replay-step", "spike.pt", "spiky_train:for_replay"]) == code
    assert words in capsys.readouterr().out


def test_an_older_checkpoint_answers(script, tmp_path, capsys):
    run = Run(script, "data")
    run.write(tmp_path / "spike.pt", older=None)
    torch.save(run.older[20], tmp_path / "older.pt")
    assert main(["replay-step", "spike.pt", "spiky_train:for_replay", "--state", "older.pt"]) == 0
    assert "on the weights older.pt, too, the batch stands out" in " ".join(capsys.readouterr().out.split())


def test_another_step_function_is_noticed(script, tmp_path):
    Run(script, "data").write(tmp_path / "spike.pt")
    report = replay_step("spike.pt", "spiky_train:forgetful")
    assert (report.verdict, report.cause) == ("INCONCLUSIVE", None)
    assert "the step function is not the one that trained" in report.reason
    assert replay_step("spike.pt", "spiky_train:summed").verdict == "INCONCLUSIVE"
    assert replay_step("spike.pt", "spiky_train:healthy").verdict in ("FAIL", "INCONCLUSIVE")


def test_the_report_in_words(script, tmp_path):
    Run(script, "data").write(tmp_path / "spike.pt")
    lines = str(replay_step("spike.pt", "spiky_train:for_replay")).splitlines()
    assert lines[0].startswith("PASS data: the spike comes back")
    assert lines[2] == "step 29, rank 0, samples 290, 291, 292, 293, 294, 295, 296, 297, 298, 299"
    assert [line.split("  ")[0] for line in lines[4:]] == ["weights", "before step 20", "of the step"]


WRONG = {
    "returns_model": r"returns_model\(\) returned Sequential: expected \(model, step\)",
    "other_model": r"the weights before step 20 do not fit the model.*without wrappers",
    "returns_float": r"returned float: expected the loss, one number with a graph",
    "without_model": r"does not use the model",
    "raises": r"raised AttributeError: .*has no attribute 'x'.*the batch of step 29: a dict of \['x', 'y'\]",
    "cannot": r"cannot\(\) raised ValueError: no data here",
    "number": r"number is int: expected a function",
    "nothing": r"no attribute 'nothing'",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_replayed_says_so(script, tmp_path, name):
    Run(script, "data").write(tmp_path / "spike.pt")
    with pytest.raises(CommandError, match=WRONG[name]):
        replay_step("spike.pt", f"spiky_train:{name}")


def test_files_that_cannot_be_read(script, tmp_path, capsys):
    assert main(["replay-step", "absent.pt", "spiky_train:for_replay"]) == 2
    assert "cannot read absent.pt: No such file" in capsys.readouterr().err
    Run(script, "data").write(tmp_path / "spike.pt")
    whole = (tmp_path / "spike.pt").read_bytes()
    for name, content in (("cut.pt", whole[: len(whole) // 2]), ("text.pt", b"hello"), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError, match=r"is not a file of gradguard\.resilience\.write_evidence"):
            read_evidence(name)
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(RecordError, match="is not a file of"):
        read_evidence("other.pt")
    writer = PlainWriter("step")
    with (tmp_path / "new.pt").open("wb") as file:
        writer.write(file, writer.document({"format": 99}, {}))
    with pytest.raises(RecordError, match="format 99, and this gradguard reads 3"):
        read_evidence("new.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "code.pt")  # which only running code could read
    with pytest.raises(RecordError, match=r"is not a file of gradguard\.resilience\.write_evidence"):
        read_evidence("code.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(RecordError, match=r"cannot read pipe\.pt: it is a pipe, and a regular file was expected"):
        read_evidence("pipe.pt")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    for name in ("absent.pt", "text.pt", "new.pt", "pipe.pt", "bomb.pt"):
        with pytest.raises(CommandError, match=f"--state {name}"):
            replay_step("spike.pt", "spiky_train:for_replay", [name])


# What is written and read.


class Encoding:
    """A mapping that is no dict, as tokenizers return."""

    def __init__(self, **values):
        self.values = values

    def keys(self):
        return self.values.keys()

    def items(self):
        return self.values.items()


def kept(content, count=3):
    batches = Batches(keep=True)
    for _ in range(count):
        batches.saw([1], batch=content)
        batches.record_loss(2.0)
        batches.end_step()
    return batches


def written(tmp_path, content, **options):
    batches = kept(content)
    write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 1), nn.Linear(1, 1), **options)
    return read_evidence(tmp_path / "e.pt")


CONTENTS = {
    "nested": {"x": [torch.ones(2), (1, "a", None, 2.5, True, b"b")], 3: {"deep": torch.tensor(1)}},
    "tensors": (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1], dtype=torch.uint8)),
    "text": ["a", "b"],
    "arrays": [np.arange(3, dtype=np.uint16), np.float32(2.5), np.int64(4), np.float64(1.5)],
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b) and getattr(a, "dtype", float) == getattr(b, "dtype", float)


@pytest.mark.parametrize("name", CONTENTS)
def test_batches_come_back_as_they_were(tmp_path, name):
    found = written(tmp_path, CONTENTS[name])
    assert same(found.suspects[0].content, CONTENTS[name])
    assert [one.step for one in found.others] == [0, 2]
    assert found.versions == {"torch": torch.__version__}


def test_a_mapping_is_a_dict(tmp_path):
    content = Encoding(ids=torch.ones(1))
    content.__class__.__iter__ = lambda self: iter(self.values)
    content.__class__.__getitem__ = lambda self, key: self.values[key]
    assert written(tmp_path, content).suspects[0].content == {"ids": torch.ones(1)}


@pytest.mark.parametrize("content", [object(), {1, (object(),)}, [nn.Linear(1, 1)], np.array([None]), print])
def test_what_cannot_be_written_says_so_and_leaves_no_file(tmp_path, content):
    with pytest.raises(InvalidTypeError, match=r"the batches or weights contain .* which cannot be written"):
        written(tmp_path, content)
    assert list(tmp_path.iterdir()) == []


def test_batches_that_were_not_kept_or_changed(tmp_path):
    batches = Batches()
    batches.saw(1)
    batches.end_step()
    with pytest.raises(InvalidValueError, match="was not kept"):
        write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 0), nn.Linear(1, 1))
    batches = Batches(keep=True)
    batches.end_step()
    with pytest.raises(InvalidValueError, match="rank 0 had no batch in step 0"):
        write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 0), nn.Linear(1, 1))
    x = torch.ones(1)
    batches = kept(x)
    x.add_(1)
    with pytest.raises(InvalidValueError, match="was changed in place"):
        write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 1), nn.Linear(1, 1))


def test_the_weights_are_those_of_the_moment_without_wrappers(tmp_path):
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    inner[1].eval()
    model, batches = nn.DataParallel(nn.Sequential(inner)), kept(torch.ones(1))
    write_evidence(tmp_path / "e.pt", batches, find_culprit(batches, 1), model)
    expected = {name: one.clone() for name, one in nn.Sequential(inner).state_dict().items()}
    with torch.no_grad():
        inner[0].weight.zero_()
    found = read_evidence(tmp_path / "e.pt")
    assert same(found.states[3], expected)
    assert (found.training, found.eval_modules) == (True, ("0.1",))


def test_fsdp1_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gradguard.resilience.evidence.is_fsdp1", lambda module: True)
    with pytest.raises(UnsupportedGradientError, match="FSDP1 holds flat parts"):
        written(tmp_path, torch.ones(1))


# The verdict, on plain numbers.


def of(step, suspect, other, norm=1.0, other_norm=1.0):
    return StateResult(
        step, f"before step {step}", (MeasuredBatch(suspect, norm),), (MeasuredBatch(other, other_norm),) * 6
    )


def evidence(loss=None, others=None):
    batch = EvidenceBatch(50, 0, (1,), loss, None, {})
    return StepEvidence(50, 0, "", (batch,), (replace(batch, step=49, loss=others),) * 6, {}, True, (), {})


TABLE = {
    # loss of the suspect and of the others, on the weights of which steps; what training recorded of both
    "bad on both": ([of(20, 9, 2), of(50, 9, 1.9)], (9, 1.9), "PASS", "data"),
    "by the norm alone": ([of(20, 2, 2, 50), of(50, 2, 2, 50)], (2, 2), "PASS", "data"),
    "bad on its own weights only": ([of(20, 2, 2), of(50, 9, 1.9)], (9, 1.9), "PASS", "both"),
    "older weights from too long ago": ([of(20, 9, 9), of(50, 9, 1.9)], (9, 1.9), "INCONCLUSIVE", None),
    "no older weights": ([of(50, 9, 1.9)], (9, 1.9), "INCONCLUSIVE", None),
    "all bad on its weights": ([of(20, 2, 2), of(50, 9, 9)], (9, 1.9), "PASS", "weights"),
    "all bad, by what training recorded": ([of(50, 9, 9)], (9, 1.9), "PASS", "weights"),
    "all bad, and nothing recorded": ([of(50, 9, 9)], (None, 1.9), "INCONCLUSIVE", None),
    "all bad, older weights long ago": ([of(0, 9, 9), of(50, 9, 9)], (9, 1.9), "PASS", "weights"),
    "all bad and it worse": ([of(20, 2, 2), of(50, 90, 9)], (90, 1.9), "PASS", "both"),
    "all bad, but after the step": ([of(20, 2, 2), of(51, 9, 9)], (9, 1.9), "INCONCLUSIVE", None),
    "all bad after a bad batch": ([of(20, 9, 2), of(51, 9, 9)], (9, 1.9), "PASS", "data"),
    "bad on older weights alone": ([of(40, 9, 2)], (9, 1.9), "PASS", "data"),
    "as usual on older weights alone": ([of(40, 2, 2)], (9, 1.9), "INCONCLUSIVE", None),
    "as usual after the step": ([of(20, 2, 2), of(51, 2, 2)], (9, 1.9), "INCONCLUSIVE", None),
    "as usual on its weights": ([of(20, 2, 2), of(50, 2, 2)], (9, 1.9), "FAIL", None),
    "another loss than it was": ([of(20, 90, 20), of(50, 90, 19)], (9, 1.9), "INCONCLUSIVE", None),
    "another scale, all seem bad": ([of(50, 90, 19)], (9, 1.9), "INCONCLUSIVE", None),
    "NaN again": ([of(20, math.nan, 2), of(50, math.nan, 1.9)], (math.nan, 1.9), "PASS", "data"),
    "NaN, and not now": ([of(20, 2, 2), of(50, 2, 1.9)], (math.nan, 1.9), "FAIL", None),
    "all NaN on its weights": ([of(20, 2, 2), of(50, math.nan, math.nan)], (math.nan, 1.9), "PASS", "weights"),
    "all NaN, norms too": ([of(20, 2, 2), of(50, *[math.nan] * 4)], (math.nan, 1.9), "PASS", "weights"),
    "all NaN on older weights alone": ([of(40, *[math.nan] * 4)], (9, 1.9), "INCONCLUSIVE", None),
    "a file without a step": ([replace(of(20, 9, 2), step=None), of(50, 9, 1.9)], (9, 1.9), "PASS", "data"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_verdict(name):
    results, (loss, others), verdict, cause = TABLE[name]
    found = judge(evidence(loss, others), results)
    assert found[:2] == (verdict, cause), found[2]
    assert found[2].endswith(".")


# The page.


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs/which_batch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```console\n\$ gradguard (.*?)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    namespace = {}
    for block in blocks[:3]:
        exec(block, namespace)
    (tmp_path / "spiky_page.py").write_text("import torch\n" + blocks[2], encoding="utf-8")
    capsys.readouterr()
    assert main(shown[0].replace("train:", "spiky_page:").split()) == 0
    without_numbers = lambda words: re.sub(r"\d+\.\d+|\s+", " ", words)  # noqa: E731
    assert without_numbers(capsys.readouterr().out) == without_numbers(shown[1])

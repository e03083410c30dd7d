"""Ten trainings, each of which knows what it did: the record says the same, and so does the report.

`recount` reads the lines as a stranger's script would, with nothing but ``json``, ``math`` and ``statistics``.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.cli import main
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.report import json_summary

pytestmark = pytest.mark.usefixtures("others_unseen")
STEPS = 40


def recount(path):
    """What a record says, read from its lines."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["t"] == "step"]
    lost = [step for step in steps if step.get("nonfinite") or ("norm" in step and step["norm"] is None)]
    taken = [step for step in steps if step not in lost and not step.get("skipped")]
    bound = [step["coefficient"] for step in taken if step.get("coefficient") is not None]
    bound = [coefficient for coefficient in bound if coefficient < 1 - 1e-9]
    norms = [step["norm"] for step in steps if step.get("norm") is not None]
    losses = [step["loss"] for step in steps if "loss" in step]
    width = min(len(losses), max(10, len(losses) // 20))
    windows = [losses[end - width : end] for end in range(width, len(losses) + 1)] if width else []
    means = [None if None in window else math.fsum(window) / width for window in windows]
    thresholds = [step["threshold"] for step in steps if step.get("threshold") is not None]
    return {
        "steps": len(steps),
        "taken_steps": len(taken),
        "skipped_steps": sum(bool(step.get("skipped")) for step in steps),
        "nonfinite_steps": len(lost),
        "clip_share": len(bound) / len(taken) if taken else None,
        "median_coefficient": statistics.median(bound) if bound else None,
        "median_norm": statistics.median(norms) if norms else None,
        "max_norm": max(norms, default=None),
        "final_loss": means[-1] if means else None,
        "best_loss": min((mean for mean in means if mean is not None), default=None),
        "threshold": thresholds[-1] if thresholds else None,
    }


class Diary:
    """A training that writes down itself what it does."""

    def __init__(self, **more):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.steps, self.skipped, self.nonfinite, self.bound = 0, 0, 0, 0
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.thresholds: list[float] = []

    def loss(self, scale=1.0):
        x = torch.randn(8, 4)
        return (self.model(x) - 3 * x[:, :1]).square().mean() * scale

    def norm(self):
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.model.parameters()))

    def note(self, loss, norm, threshold=None, skipped=False):
        """One step with this loss, and this norm before any clip."""
        self.steps += 1
        self.losses.append(loss)
        self.skipped += skipped
        self.nonfinite += not math.isfinite(norm)
        if math.isfinite(norm):
            self.norms.append(norm)
        if threshold is not None:
            self.thresholds.append(threshold)
            self.bound += not skipped and norm > threshold


def plain(diary, spoil=()):
    for i in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss()
        loss.backward()
        if i in spoil:
            diary.model[0].bias.grad[1] = float("nan")
        diary.note(loss.item(), diary.norm())
        if i not in spoil:
            diary.optimizer.step()
            continue
        weights = {key: value.clone() for key, value in diary.model.state_dict().items()}
        diary.optimizer.step()
        diary.model.load_state_dict(weights)  # else nothing is finite from there on


def clipped(diary):
    for i in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss()
        loss.backward()
        threshold = 4.0 if i < 30 else 3.0
        diary.note(loss.item(), diary.norm(), threshold)
        nn.utils.clip_grad_norm_(diary.model.parameters(), threshold)
        diary.optimizer.step()


def scaled(diary):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    for i in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss(scale=math.inf if i in (3, 17, 18) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(diary.optimizer)
        diary.note(loss.item(), diary.norm(), skipped=i in (3, 17, 18))
        scaler.step(diary.optimizer)
        scaler.update()


def accumulated(diary):
    for _ in range(STEPS):
        diary.optimizer.zero_grad()
        losses = [diary.loss(scale=0.25) for _ in range(4)]
        for loss in losses:
            loss.backward()
        diary.note(statistics.fmean(loss.item() for loss in losses), diary.norm(), 5.0)
        nn.utils.clip_grad_norm_(diary.model.parameters(), 5.0)
        diary.optimizer.step()


def by_value(diary):
    for _ in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss()
        loss.backward()
        largest = max(float(p.grad.abs().max()) for p in diary.model.parameters())
        diary.note(loss.item(), diary.norm())
        diary.thresholds.append(1.5)
        diary.bound += largest > 1.5
        nn.utils.clip_grad_value_(diary.model.parameters(), 1.5)
        diary.optimizer.step()


def twice(diary):
    """The later clips never have anything to do, which rounding must not hide."""
    for _ in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss()
        loss.backward()
        diary.note(loss.item(), diary.norm(), 4.0)
        nn.utils.clip_grad_norm_(diary.model.parameters(), 4.0)
        nn.utils.clip_grad_value_(diary.model.parameters(), 4.5)
        nn.utils.clip_grad_norm_(diary.model.parameters(), 6.0)
        diary.optimizer.step()


def guarded(diary):
    guard = gg.Guard(diary.optimizer, gg.ClipByGlobalNorm(3.0), model=diary.model)
    for i in range(STEPS):
        diary.optimizer.zero_grad()
        loss = diary.loss()
        loss.backward()
        if i in (5, 30):
            diary.model[0].bias.grad[1] = float("inf")
        diary.note(loss.item(), diary.norm(), 3.0, skipped=i in (5, 30))
        diary.optimizer.step()
    guard.detach()


def compiled(diary):
    model = torch.compile(diary.model, backend="eager")
    for _ in range(STEPS):
        diary.optimizer.zero_grad()
        x = torch.randn(8, 4)
        loss = (model(x) - 3 * x[:, :1]).square().mean()
        loss.backward()
        diary.note(loss.item(), diary.norm(), 3.0)
        nn.utils.clip_grad_norm_(diary.model.parameters(), 3.0)
        diary.optimizer.step()


TRAININGS = {
    "plain": plain,
    "clipped, with a threshold that moves": clipped,
    "a GradScaler that skips": scaled,
    "accumulation": accumulated,
    "steps that are not finite": lambda diary: plain(diary, spoil=(4, 5, 31)),
    "by value": by_value,
    "three clips, of which one binds": twice,
    "a guard that skips": guarded,
    "compiled": compiled,
}


def held_against(found, told):
    for key, value in told.items():
        assert found[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key


def against_the_diary(told, diary):
    assert told["steps"] == diary.steps
    assert (told["skipped_steps"], told["nonfinite_steps"]) == (diary.skipped, diary.nonfinite)
    assert told["clip_share"] == diary.bound / told["taken_steps"]
    assert told["median_norm"] == pytest.approx(statistics.median(diary.norms), rel=1e-4)
    assert told["max_norm"] == pytest.approx(max(diary.norms), rel=1e-4)
    assert told["threshold"] == (diary.thresholds[-1] if diary.thresholds else None)
    assert told["final_loss"] == pytest.approx(statistics.fmean(diary.losses[-10:]), rel=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler
def test_the_report_the_record_and_the_training_agree(name, tmp_path):
    diary = Diary()
    with gg.watch(tmp_path / "run.jsonl"):
        TRAININGS[name](diary)
    told, found = recount(tmp_path / "run.jsonl"), json.loads(json_summary([read_record(tmp_path / "run.jsonl")]))
    against_the_diary(told, diary)
    held_against(found, told)
    bound = [clip["bound_steps"] for clip in found["clips"]]
    assert bound == ([diary.bound] + [0] * (len(bound) - 1) if diary.thresholds else [])
    assert 0 < diary.bound < STEPS or not diary.thresholds  # else nothing is shown


def test_two_optimizers_agree_each_by_itself(tmp_path):
    diaries = [Diary(), Diary()]
    with gg.watch(tmp_path / "run.jsonl"):
        for _ in range(STEPS):
            for diary, threshold in zip(diaries, (4.0, None), strict=True):
                diary.optimizer.zero_grad()
                loss = diary.loss()
                loss.backward()
                diary.note(loss.item(), diary.norm(), threshold)
                if threshold is not None:
                    nn.utils.clip_grad_norm_(diary.model.parameters(), threshold)
                diary.optimizer.step()
    found = json.loads(json_summary([read_record(tmp_path / "run.jsonl")]))
    whole = recount(tmp_path / "run.jsonl")
    assert found["steps"] == whole["steps"] == 2 * STEPS
    assert found["clip_share"] == whole["clip_share"] == diaries[0].bound / (2 * STEPS)
    lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    for place, (diary, part) in enumerate(zip(diaries, found["optimizers"], strict=True)):
        own = tmp_path / f"{place}.jsonl"
        own.write_text("\n".join(line for line in lines if json.loads(line).get("optimizer") == place))
        told = recount(own)
        against_the_diary(told, diary)
        held_against(part, told)


SCRIPT = """
import json, math, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from test_recount import Diary, STEPS
from torch import nn

diary, both = Diary(), [0, 0]
for _ in range(STEPS):
    diary.optimizer.zero_grad()
    loss = diary.loss()
    loss.backward()
    norm = diary.norm()
    diary.note(loss.item(), norm, min({own}, {applied}))
    both[0] += norm > {own}
    both[1] += min(norm, {own}) > {applied}
    nn.utils.clip_grad_norm_(diary.model.parameters(), {own})
    diary.optimizer.step()
Path("diary.json").write_text(json.dumps([both, vars(diary) | dict(model=None, optimizer=None)]))
"""


@pytest.mark.parametrize(("own", "applied", "last"), [(4.0, 9.0, 4.0), (6.0, 3.0, 3.0)])
def test_the_clip_of_the_command_beside_the_scripts_own(own, applied, last, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("train.py").write_text(SCRIPT.format(own=own, applied=applied, tests=str(Path(__file__).parent)))
    assert main(["run", "--out", "out", "--clip", f"norm={applied}", "train.py"]) == 0
    both, kept = json.loads(Path("diary.json").read_text(encoding="utf-8"))
    told, found = recount("out/run.jsonl"), json.loads(json_summary([read_record("out")]))
    diary = Diary()
    vars(diary).update({key: value for key, value in kept.items() if value is not None})
    assert 0 < diary.bound < STEPS
    assert [(clip["name"], clip["bound_steps"]) for clip in found["clips"]] == [
        (f"the script's own norm={own}", both[0]),
        (f"--clip norm={applied}", both[1]),
    ]
    against_the_diary(told | {"threshold": last}, diary)
    held_against(found, told | {"threshold": last})
    assert f"the script's own norm={own} bound on" in capsys.readouterr().err.replace("\n", " ")

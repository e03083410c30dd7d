"""`gradguard run --audit-norm`: what it says of scripts, with which exit code, and that gradients stay as they are."""

import sys
from pathlib import Path

import pytest

from gradguard.cli import main
from gradguard.monitoring.record.file import read_record

TRAIN = """
import torch
import gradguard as gg
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
grads = lambda: [p.grad for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), 0.1)
{setup}
for step in range({steps}):
    optimizer.zero_grad()
    {loss}
    {clip}
    {step}
"""


def train(clip, setup="", loss="model(torch.randn(6, 4)).square().mean().backward()", step="optimizer.step()", steps=9):
    return TRAIN.format(setup=setup, loss=loss, clip=clip, step=step, steps=steps)


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(source, *options):
        Path("train.py").write_text(source)
        code = main(["run", "--audit-norm", *options, "train.py"])
        return code, capsys.readouterr()

    return go


SCALED = {
    "setup": "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)",
    "loss": "scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()",
    "step": "scaler.step(optimizer); scaler.update()",
}
HALVES = "[clip_grad_norm_(half.parameters(), 0.1) for half in (model[0], model[2])]"
TWO = """
    norms = [{}, {}]
    clip_grads_with_norm_(model[0].parameters(), 0.1, norms[0])
    clip_grads_with_norm_(model[2].parameters(), 0.1, norms[1])
"""
VERL_IMPORTS = "from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm"
VERL = "_clip_grads_with_norm_(list(model.parameters()), 0.1, {} * _get_total_norm(grads()), None)"
SCRIPTS = {
    "torch": (train("clip_grad_norm_(model.parameters(), 0.1)"), 0, "3 audits of 1 clip"),
    "a generator by its name": (train("clip_grad_norm_(parameters=(p for p in model.parameters()), max_norm=0.1)"),
                                0, ""),
    "only measured": (train("clip_grad_norm_(model.parameters(), float('inf'))"), 0, "PASS"),
    "gradguard": (train("gg.clip_grad_norm_(model, 0.1)"), 0, "reported"),
    "of halves": (train(HALVES), 0, "6 audits of 2 clips"),
    "accumulated": (train("if step % 2: clip_grad_norm_(model.parameters(), 0.1)",
                          step="if step % 2: optimizer.step()"), 0, "PASS"),
    "with the right norm": (train("clip_grads_with_norm_(model.parameters(), 0.1, get_total_norm(grads()))"), 0,
                            "PASS"),
    "with twice the norm": (train("clip_grads_with_norm_(model.parameters(), 0.1, 2 * get_total_norm(grads()))"), 1,
                            "gradients doubled"),
    "as verl does, with the right norm": (train(VERL.format(1), VERL_IMPORTS), 0, "3 audits of 1 clip"),
    "as verl does, with twice the norm": (train(VERL.format(2), VERL_IMPORTS), 1, "gradients doubled"),
    "without the biases": (train("clip_grads_with_norm_(model.parameters(), 0.1, get_total_norm(grads()[::2]))"), 1,
                           "the reported norm is"),
    "one norm of two lists": (train(TWO.format("get_total_norm(grads())", "get_total_norm(grads())")), 0,
                              "3 audits of 1"),
    "two lists, each its own": (train(TWO.format("get_total_norm(grads()[:2])", "get_total_norm(grads()[2:])")), 0,
                                "6 audits of 2"),
    "two lists, one norm wrong": (train(TWO.format("get_total_norm(grads())", "get_total_norm(grads()) * 2")), 1, ""),
    "a backward that is not heard": (train("clip_grad_norm_(model.parameters(), 0.1)", loss="torch.autograd.backward("
                                           "model(torch.randn(6, 4)).square().mean())"), 0, "3 audits of 1 clip"),
    "no clip, not heard": (train("pass", loss="torch.autograd.backward(model(torch.randn(6, 4)).sum())"), 3,
                           "3 audits"),
    "before unscale_": (train("clip_grad_norm_(model.parameters(), 0.1)", **SCALED), 1, "the loss scale of 1024"),
    "after unscale_": (train("scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 0.1)", **SCALED), 0, ""),
    "but the last layer": (train("clip_grad_norm_(model[0].parameters(), 0.1)"), 3, "[2.weight, 2.bias]"),
    "none": (train("pass"), 3, "no clip was observed before this step"),
    "none, counted": (train("pass"), 3, "3 audits of 0 clips"),
    "by hand": (train("[g.mul_(0.1) for g in grads()]"), 3, "no clip was observed"),
    "value": (train("clip_grad_value_(model.parameters(), 0.1)"), 3, "a clip by value has no norm"),
    "order 1": (train("clip_grad_norm_(model.parameters(), 0.1, 1.0)"), 3, "a norm of order 1"),
    "order 1 of gradguard": (train("gg.clip_grad_norm_(model, 0.1, 1.0)"), 3, "reports no 2-norm"),
    "a guard": (train("pass", setup="guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))"), 3,
                "acts within the step"),
    "not finite": (train("clip_grad_norm_(model.parameters(), 0.1)",
                         loss="model(torch.full((6, 4), torch.inf)).sum().backward()"), 3, "is not finite"),
    "no step": ("print('nothing')", 3, "no clip and no optimizer step was observed"),
    "it fails": (train("raise ValueError('no clip today')"), 2, ""),
    "of no module": (train("clip_grad_norm_([w], 0.1)", setup="w = torch.ones(5, requires_grad=True); "
                           "optimizer = torch.optim.SGD([w], 0.1)", loss="(w * torch.randn(5)).sum().backward()"),
                     0, "PASS"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCRIPTS)
def test_scripts(audit, case):
    source, code, words = SCRIPTS[case]
    found, said = audit(source)
    assert (found, words in said.out) == (code, True), said
    assert code != 2 or "exit code 1 before its norm was audited" in said.err


def test_a_script_ends_after_its_steps_and_its_numbers_are_its_own(audit):
    clip = "print(float(clip_grad_norm_(model.parameters(), 0.1)).hex())"
    exec(compile(train(clip, steps=2), "plain", "exec"), {})
    plain = audit(train(clip, steps=0))[1].out  # what the script itself has printed, and an empty audit
    found, said = audit(train(clip), "--steps", "2")
    assert found == 0
    assert said.out.splitlines()[:2] == plain.splitlines()[:2]
    assert said.out.count("0x") == 2


def test_what_is_learnt_later_counts_where_nothing_was_wrong(audit):
    """A first step whose gradients overflow, as under a new loss scale, and healthy ones after it."""
    clip = "if step == 0: grads()[0].fill_(torch.inf)\n    clip_grad_norm_(model.parameters(), 0.1)"
    found, said = audit(train(clip, step="if step: optimizer.step()"))
    assert (found, "4 audits" in said.out) == (0, True), said


@pytest.mark.parametrize("option", [["--clip", "norm=1"], ["--out", "x"], ["--every", "2"], ["--no-report"]])
def test_with_an_option_of_a_record_the_whole_run_is_recorded_too(audit, option):
    code, said = audit(train("pass") + "print('to the end')", *option)
    assert (code, "no clip was observed before this step" in said.err, "to the end" in said.out) == (3, True, True)
    [record] = Path().rglob("run.jsonl")
    assert len(read_record(record).steps) == 9

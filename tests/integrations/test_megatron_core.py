"""Megatron-core's own layers and norm, from torchrun to the verdict: `examples/megatron_core.py` and its page."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from forked_python import run_ranks
from gradguard.audit.in_script import AuditDone, ScriptAudit
from gradguard.parity.compare import compare
from gradguard.parity.saved import read
from gradguard.parity.scales import ScriptRun
from gradguard.parity.script_pair import ScriptGradients
from gradguard.script_events import listening
from one_run import InThisProcess

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

SCRIPT = Path(__file__).parents[2] / "examples/megatron_core.py"
SAID = {
    "": ("PASS", ""),
    "norm": ("count 2 times", ""),
    "gradient": ("INCONCLUSIVE", "ranks: a mean over 2 ranks is missing in the new run"),
    "step": ("PASS", "state before step 1: extra"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sick", SAID)
def test_one_rank_and_two(sick, tmp_path):
    run_ranks(1, SCRIPT, "one", cwd=tmp_path)
    (first, _) = run_ranks(2, SCRIPT, "two", *(("--sick", sick) if sick else ()), cwd=tmp_path)
    audit, parity = SAID[sick]
    assert audit in first.stdout
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.verdict == ("FAIL" if parity else "PASS"), str(report)
    assert parity in str(report)


@pytest.fixture
def clip(monkeypatch):
    """Megatron-core's own norm and clip of some parameters, on the CPU, in one process."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    on_the_cpu = __import__("megatron_core").OnTheCPU
    clips = sys.modules["megatron.core.optimizer.clip_grads"]
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)

    class OnTheCPU(on_the_cpu):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.type and len(args) == 1:
                return "torch.cuda.FloatTensor"
            return super().__torch_function__(func, types, args, kwargs)

    def act(parameters, max_norm, times=1.0):
        parameters = list(parameters)
        with OnTheCPU():
            norm = times * clips.get_grad_norm_fp32([p.grad for p in parameters])
            clips.clip_grad_by_total_norm_fp32(parameters, max_norm, norm)

    return act


def trained(clip, listener):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = listener(model, optimizer)

    def train():
        for _ in range(9):
            model(torch.randn(8, 6)).square().sum().backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    with listening(watch), contextlib.suppress(AuditDone, SystemExit):
        train()
    return watch


@pytest.mark.parametrize(("times", "verdict", "words"), [(1, "PASS", ""), (2, "FAIL", "gradients doubled")])
def test_its_clip_is_audited(clip, times, verdict, words):
    audit = trained(lambda p: clip(p, 0.1, times), lambda model, _: ScriptAudit(lambda: [model], 3))
    found, said = audit.outcome()
    assert found == verdict, said
    assert "3 audits of 1 clip" in said
    assert words in said


def test_parity_sees_gradients_before_its_clip(clip, tmp_path):
    def saved(threshold):
        file = tmp_path / f"{threshold}"
        run = InThisProcess(file, ScriptRun(steps=1))
        trained(lambda p: clip(p, threshold), lambda m, o: ScriptGradients(run, lambda: [m], lambda: [o]))
        return read(file).sketches["gradient"]

    assert saved(1e-3) == saved(1e3)

"""What the audit says of the norms of trainers, and of FSDP1 in the script of the page."""

import re
from pathlib import Path

import pytest
import torch
from accelerators import forget_accelerators
from torch import nn

import gradguard as gg
from forked_python import run_ranks

PAGE = Path(__file__).parents[2] / "docs/norm_audit.md"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model):
    return model(torch.randn(6, 4)).square().mean()


def of_accelerate():
    from accelerate import Accelerator

    forget_accelerators()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    accelerator.backward(loss_of(model))
    return model, lambda: accelerator.clip_grad_norm_(model.parameters(), 0.01)


def of_fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(loss_of(model))
    return model, lambda: fabric.clip_gradients(model, optimizer, max_norm=0.01)


def of_torchtitan():
    from torchtitan.distributed.utils import clip_grad_norm_

    model = network()
    loss_of(model).backward()
    return model, lambda: clip_grad_norm_(list(model.parameters()), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [of_accelerate, of_fabric, of_torchtitan])
def test_trainers_pass(trainer):
    model, norm = trainer()
    audit = gg.audit_norm(model, norm, max_norm=0.01)
    assert audit, str(audit)
    assert audit.probes == 4


@pytest.mark.slow
def test_the_script_of_the_page_prints_what_it_says(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"^```py\n(.*?)^```\n\n```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    script, shown = block.groups()
    (tmp_path / "audit.py").write_text(script, encoding="utf-8")
    printed = "".join(rank.stdout for rank in run_ranks(2, "audit.py", cwd=tmp_path))
    number = r"\d+\.\d{3}\d*"  # the last digits differ by processor
    assert re.sub(number, "N", printed) == re.sub(number, "N", shown)

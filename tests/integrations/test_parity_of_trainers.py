"""What `gradguard run --save-gradients` sees in the scripts of trainers: the gradients of a loop by hand."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from accelerators import forget_accelerators
from torch import nn

from distributed.pool import rendezvous
from gradguard.monitoring.observe.meta import all_optimizers, living_modules
from gradguard.parity.compare import compare
from gradguard.parity.rounding_runs import merged
from gradguard.parity.saved import read
from gradguard.parity.scales import ScriptRun
from gradguard.parity.script_pair import ScriptGradients
from gradguard.script_events import listening
from one_run import InThisProcess

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def saved_from(script, folder, steps=0):
    """As `gradguard run` does it, but in this process: what is there already is frozen, and so not the script's."""
    runs = []
    for k in range(3):
        gc.collect()
        gc.freeze()
        how = ScriptRun(steps=steps, epsilon=runs[0].epsilon if runs else 0.0, change=max(0, k - 1))
        run = InThisProcess(folder / "file", how)
        watch = ScriptGradients(run, living_modules, all_optimizers)
        try:
            with listening(watch):
                script(folder)
                watch.finish()
        except SystemExit:
            pass
        assert run.done, run.refusal
        runs.append(read(folder / "file"))
    return merged(runs)


def loop(model, loss_of, batches):
    def script(folder):
        del folder
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in batches:
            (loss_of(net, x) / len(batches)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()

    return script


def of_transformers():
    from tiny_trainer import INPUTS, Model, trainer

    def script(folder):
        trainer(folder, gradient_accumulation_steps=2, max_grad_norm=1e-3).train()

    return script, loop(Model, lambda net, x: net(x)["loss"], INPUTS.split(2)[:2])


def of_lightning():
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, x, _):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(folder):
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = pl.Trainer(
            max_steps=2, accelerator="cpu", devices=1, gradient_clip_val=1e-3, accumulate_grad_batches=2,
            default_root_dir=folder, **dict.fromkeys(quiet, False),
        )  # fmt: skip
        trainer.fit(Lit(), DataLoader(X, batch_size=4))

    return script, loop(Lit, lambda net, x: net.net(x).square().mean(), X.split(4))


def of_accelerate():
    from accelerate import Accelerator

    def script(folder):
        del folder
        forget_accelerators()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        world, rank = accelerator.num_processes, accelerator.process_index
        for half in X.split(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(half[rank::world]).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()

    return script, loop(network, lambda net, x: net(x).square().mean(), X.split(4))


WARNINGS = ("ignore:.*treespec, LeafSpec.*:FutureWarning", "ignore:The 'train_dataloader' does not have many workers")


@pytest.mark.slow
@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("trainer", [of_transformers, of_lightning, of_accelerate])
def test_a_trainer_has_the_gradients_of_a_loop(trainer, tmp_path):
    script, by_hand = trainer()
    found = saved_from(script, tmp_path)
    report = compare(saved_from(by_hand, tmp_path), found)
    assert report.verdict == "PASS", str(report)
    assert found.facts["micro-batches"] == 2
    assert not found.clipped


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize(("trainer", "is_sgd"), [(of_transformers, False), (of_lightning, True), (of_accelerate, True)])
def test_a_trainer_has_the_whole_step_of_a_loop(trainer, is_sgd, tmp_path):
    script, by_hand = trainer()
    report = compare(saved_from(by_hand, tmp_path, 1), saved_from(script, tmp_path, 1))
    assert (report.verdict == "PASS") == is_sgd, str(report)
    takes = "gradient that the optimizer takes at step 1"
    assert {stage.name for stage in report.stages} == {takes, "update of step 1"}
    assert {finding.stage for finding in report.findings}.isdisjoint({"", takes})  # another optimizer begins there


def accelerate_in_processes(folder):
    script, by_hand = of_accelerate()
    rank = torch.distributed.get_rank()
    mine = folder / str(rank)
    mine.mkdir()
    found = saved_from(script, mine)
    return str(compare(saved_from(by_hand, mine), found)), {p.copies for p in found.parameters}


@pytest.mark.slow
def test_accelerate_on_two_processes_has_the_gradients_of_one(pool, tmp_path):
    for text, copies in pool(2).run(accelerate_in_processes, tmp_path):
        assert text.startswith("PASS"), text
        assert copies == {2}


DEEPSPEED = """
import logging, sys, torch, deepspeed
logging.disable(logging.WARNING)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it compiles C++ for a minute; gloo does without
model = torch.nn.Linear(4, 2)
configuration = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
configuration["zero_allow_untested_optimizer"] = True
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=configuration)
engine.backward(engine(torch.ones(8, 4, dtype=torch.bfloat16)).square().sum())
engine.step()
"""


@pytest.mark.exhaustive
def test_an_engine_that_steps_weights_of_its_own_is_refused(tmp_path):
    pytest.importorskip("deepspeed")
    tmp_path.joinpath("train.py").write_text(DEEPSPEED, encoding="utf-8")
    with rendezvous() as meeting:
        one = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", **meeting}
        done = subprocess.run(
            [sys.executable, "-m", "gradguard", "run", "--save-gradients", "file", "train.py"],
            cwd=tmp_path, env={**os.environ, **one}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "belong to no model that was called" in done.stderr
    assert not tmp_path.joinpath("file").exists()

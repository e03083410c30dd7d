"""Finite spikes in a pipeline: the last stage knows the loss, each holds other weights, and the decision is one."""

import math

import pytest
import torch
import torch.distributed as dist
from test_pipeline_stages import backward, grid, stages, tied
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from training import memory

import gradguard as gg
from sharded import local


class Staged:
    """One stage of two, its schedule, and what is told of its steps."""

    def __init__(self):
        self.number = grid()["pp"].get_local_rank()
        self.module = stages()[self.number]
        if grid()["dp"].size() > 1:
            fully_shard(self.module, mesh=grid()["dp"])
        stage = PipelineStage(self.module, self.number, 2, torch.device("cpu"), group=grid().get_group("pp"))
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def named(self, is_named):
        """What `Guard` is told of the stages."""
        shared = {"embedding": tied(self.number, self.module)}
        return {"mesh": grid()["pp"], "shared": shared} if is_named else {}

    def backward(self, step, factor=1.0, bad_stage=None):
        """Return the loss on the last stage, None on the first."""
        self.optimizer.zero_grad()
        backward(self.schedule, self.number, 0)  # the same batch: what changes is only what the test changes
        dist.all_reduce(local(tied(self.number, self.module).grad), group=grid().get_group("pp"))
        if bad_stage == self.number:
            for p in self.module.parameters():
                local(p.grad).fill_(math.nan)
        elif factor != 1.0:
            for p in self.module.parameters():
                local(p.grad).mul_(factor)
        return 1.0 + 0.01 * (step % 3) if self.number == 1 else None


LOSS, NORM, FIRST, LAST = 9, 11, 13, 15  # what is wrong at which step: a loss, all gradients, NaN on one stage alone


def train(is_named):
    run = Staged()
    spikes = gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=4, alone=1))
    guard = gg.Guard(run.optimizer, gg.ClipByMedian(warmup=3), model=run.module, spikes=spikes, **run.named(is_named))
    reasons = []
    for step in range(18):
        loss = run.backward(step, 100.0 if step == NORM else 1.0, {FIRST: 0, LAST: 1}.get(step))
        if loss is not None:
            guard.record_loss(50.0 if step == LOSS else loss)
        before = memory(run.optimizer)
        run.optimizer.step()
        reasons.append(guard.last_skip)
        assert (step in (LOSS, NORM, FIRST, LAST)) == (guard.last_skip is not None)
        if guard.last_skip:
            torch.testing.assert_close(memory(run.optimizer), before, rtol=0, atol=0)
    state = {name: tensor.tolist() for name, tensor in spikes.detector.state.items()}
    return reasons, state, spikes.detector.last.scores.tolist(), guard.skipped_steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "is_named"), [(2, True), (2, False), (4, True)])  # (4, False) is refused
def test_all_stages_skip_the_same_steps_by_the_same_bits(pool, world, is_named):
    by_rank = pool(world).run(train, is_named)
    assert all(repr(one) == repr(by_rank[0]) for one in by_rank)
    reasons, state, _, skipped = by_rank[0]
    told = {LOSS: "spike", NORM: "spike", FIRST: "nonfinite", LAST: "nonfinite"}
    assert {step: reason for step, reason in enumerate(reasons) if reason} == told
    assert (state["count"], skipped) == ([14, 14], 4)


def survive(kind):
    """A burst, or NaN that stays, on one stage alone; what each stage did about it, and how its weights are."""
    run = Staged()
    resilience = gg.SpikeRecovery(
        run.module,
        run.optimizer,
        gg.ClipByGlobalNorm(1.0),
        detector=gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1),
        snapshot_every=10,
        guard_options={"max_consecutive_skips": None, **run.named(kind != "NaN, not named")},
    )
    told, at = [], {}
    for step in range(60 if kind == "burst" else 45):
        wrong = 20 <= step < (32 if kind == "burst" else 40)
        loss = run.backward(step, bad_stage=0 if wrong and kind != "burst" else None)
        if loss is not None:
            resilience.batch([step])
            resilience.record_loss(loss * (50.0 if wrong and kind == "burst" else 1.0))
        run.optimizer.step()
        event = resilience.step()
        told.append(None if event is None else (event.what, event.action, event.step, event.to_step, event.ids))
        at[step + 1] = [t.clone() for t in (*map(local, run.module.parameters()),)]
        if event is not None and event.to_step is not None and kind != "burst":
            torch.testing.assert_close(at[step + 1], at[event.to_step], rtol=0, atol=0)
    return told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["burst", "NaN", "NaN, not named"])
def test_all_stages_go_back_on_the_same_step(pool, kind):
    first, last = pool(2).run(survive, kind)
    assert [one and one[:4] for one in first] == [one and one[:4] for one in last]
    events = [one for one in last if one]
    assert events[-1][:2] == ("burst" if kind == "burst" else "nonfinite", "rolled back")
    assert events[-1][4]  # the samples, which the stage knows that was told of them

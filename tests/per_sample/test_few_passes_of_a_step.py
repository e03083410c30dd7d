"""What a step does beside its arithmetic is counted, not timed: runs of the model, norms beside the compiled ones."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradguard as gg
from gradguard import native

B, T, V = 8, 6, 20


class Positions(nn.Module):
    """Adds what an embedding of positions has, and reads the first token."""

    runs: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, 8), nn.Embedding(T, 8)
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, ids):
        Positions.runs.append(len(ids))
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.block(x)[:, 0])


@pytest.fixture
def training():
    torch.manual_seed(0)
    model = Positions()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward():
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(V, (B, T))), torch.randint(3, (B,))).backward()

    def step():
        backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        optimizer.step()

    return SimpleNamespace(clipper=clipper, backward=backward, step=step)


def test_weights_that_an_optimizer_changes_are_nothing_new(training):
    """A table of positions is used by code that is looked at: as its weights changed on each step, three were tried."""
    each = []
    for _ in range(9):
        Positions.runs.clear()
        training.step()
        each.append([*Positions.runs])
    alone = [i + 1 for i, sizes in enumerate(each) if sizes == [1, B, 1, 1]]  # one before, one alone, one after
    assert alone == [2, 4, 8]
    assert all(sizes == [B] for i, sizes in enumerate(each, 1) if i not in (1, 2, 4, 8))
    assert each[0].count(1) < B + 2  # of the trial, one of the step, and the two before and after it
    assert (each[0].count(2), each[0].count(3)) == (
        1,
        3,
    )  # one dry run of each size: positions are guessed


class InOneRow(nn.Module):
    """Looks up the ids of all samples in one row, which look like positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, 8)

    def forward(self, ids):
        return self.table(ids.flatten()).view(*ids.shape, 8)


@pytest.mark.parametrize("guess", [True, False])
def test_a_wrong_guess_of_which_ids_belong_to_no_sample_costs_a_run_and_changes_nothing(guess):
    torch.manual_seed(0)
    model = Positions()
    model.tokens = model.tokens if guess else InOneRow()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    Positions.runs.clear()
    model(torch.randint(V, (B, T)))
    assert Positions.runs.count(2) == (1 if guess else 3)
    assert clipper.verify(samples=4) < 1e-5


@pytest.mark.skipif(not native.status().in_use, reason="no compiled kernels here")
def test_one_input_that_is_no_block_of_memory_keeps_no_norm_from_the_kernels(training):
    for _ in range(2):
        training.step()
    training.backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        training.clipper.clip_and_accumulate()
    names = [event.name for event in seen.events()]
    assert "aten::mm" in names
    assert names.count("aten::linalg_vector_norm") <= 1

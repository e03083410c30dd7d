"""The table of docs/resilience.md, row by row: what a skipped step, a snapshot and a run of a step again put back."""

import copy
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import gradguard as gg

PAGE = Path(__file__).parents[2] / "docs" / "resilience.md"


class Noted:
    """An object that is no plain data."""

    count = 0


class Touching(torch.optim.SGD):
    """A step that changes whatever a step may."""

    def __init__(self, run):
        super().__init__(run.model.parameters(), lr=0.1)
        self.run, self.steps, self.note = run, 0, Noted()

    def step(self, closure=None):
        self.run.touch()
        return super().step(closure)


class Run:
    """A model, its optimizer, and all else that the rows of the table speak of."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.generator = torch.Generator().manual_seed(1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.ones(1))
        self.optimizer = Touching(self)
        self.optimizer.state[self.model[0].weight]["average"] = torch.zeros(2)

    def backward(self):
        self.model(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).square().sum().backward()

    @torch.no_grad()
    def touch(self):
        """Change everything."""
        self.model[0].weight.mul_(1.1)
        self.model[1].running_mean.add_(1)
        self.model[0].note = getattr(self.model[0], "note", 0) + 1
        self.model[0].bias.requires_grad_(not self.model[0].bias.requires_grad)
        self.optimizer.state[self.model[0].weight]["average"].add_(1)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.steps += 1
        self.optimizer.note.count += 1
        self.scaler.update(self.scaler.get_scale() * 2)
        random.random(), numpy.random.rand(), torch.rand(()), torch.rand((), generator=self.generator)

    def found(self):
        """What each row of the table speaks of, now."""
        weight, group = self.model[0].weight, self.optimizer.param_groups[0]
        found = {
            "weights": weight.detach().view(torch.int32).tolist(),
            "buffers": self.model[1].running_mean.tolist(),
            "the optimizer's state": self.optimizer.state[weight]["average"].tolist(),
            "the numbers of its groups": group["lr"],
            "its attributes that are plain data": self.optimizer.steps,
            "its other objects": self.optimizer.note.count,
            "the generators of Python, NumPy and torch": (
                random.getstate(),
                *numpy.random.get_state()[1:3],
                torch.get_rng_state(),
            ),
            "a `torch.Generator` of one's own": self.generator.get_state().tolist(),
            "a GradScaler": self.scaler.state_dict(),
            "gradients": None if weight.grad is None else weight.grad.tolist(),
            "Python attributes of modules": getattr(self.model[0], "note", 0),
            "whether a weight is frozen": self.model[0].bias.requires_grad,
        }
        return {row: repr(copy.deepcopy(value)) for row, value in found.items()}


def skip(run, folder, extra):
    with torch.no_grad():
        run.model[0].weight.grad[0, 0] = torch.nan
    gg.Guard(run.optimizer, gg.ClipByGlobalNorm(1.0))
    before = run.found()
    run.optimizer.step()
    return before


def memory(run, folder, extra):
    snapshot = gg.Snapshot(run.model, run.optimizer, extra_state=extra)
    snapshot.take()
    before = run.found()
    run.touch()
    snapshot.restore()
    return before


def disk(run, folder, extra):
    snapshot = gg.Snapshot(run.model, run.optimizer, extra_state=extra)
    snapshot.take()
    snapshot.save(folder / "snapshot")
    before = run.found()
    run.touch()
    gg.Snapshot.load(folder / "snapshot", run.model, run.optimizer, extra_state=extra).restore()
    return before


def again(run, folder, extra):
    before = run.found()

    def step():
        loss = run.model(torch.rand(5, 3)).square().sum()
        loss.backward()
        run.model[0].note = getattr(run.model[0], "note", 0) + 1
        run.model[0].bias.requires_grad_(not run.model[0].bias.requires_grad)
        random.random(), numpy.random.rand(), torch.rand((), generator=run.generator)
        return loss

    gg.save_gradients(None, run.model, step)
    return before


HOW = [skip, memory, disk, again]


def rows():
    """The rows of the table, each with its cells."""
    lines = re.search(r"\n\| what \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))[1].splitlines()
    return {row: cells for row, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_each_row(tmp_path, how, with_extra):
    run = Run()
    run.backward()
    before = how(run, tmp_path, (run.generator, run.scaler) if with_extra else ())
    after, cells = run.found(), {row: of_row[HOW.index(how)] for row, of_row in rows().items()}
    assert cells.keys() == after.keys()
    is_back = {"back": True, "`extra_state`": with_extra}
    for row, cell in cells.items():
        if cell:  # an empty one: such a run does not touch it
            assert (after[row] == before[row]) == is_back.get(cell, False), row

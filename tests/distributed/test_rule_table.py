"""Every configuration of every rule on two processes, on parameters of FSDP2, against the same rule on whole gradients.

The other side is one process with everything in float64. Each row of the tables goes through all of them in one call of
the processes, which stay.
"""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from rule_table import CONFIGURATIONS
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_flatten

from cases import random
from sharded import mesh

EXACT = {"rtol": 2e-5, "atol": 1e-7, "equal_nan": True}
SIZES = [1.0, 0.3, 5.0, 0.8, 2.0]
"""Of the gradients of successive steps."""

TOLD = ("norm", "coefficient", "clipped", "nonfinite", "threshold", "locked_in")


class Twins:
    """A model that FSDP2 has sharded, the same in one piece and in float64, and a clipper for each."""

    def __init__(self, ours, theirs, last=2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, last))
        self.whole = copy.deepcopy(model).double()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh("row"))
        self.model, self.ours, self.theirs = model, ours(), theirs()

    def set_gradients(self, size=1.0, step=0, bad=False, absent=None):
        """The same for both; the bad element lies in the shard of the last rank."""
        for i, (p, q) in enumerate(zip(self.model.parameters(), self.whole.parameters(), strict=True)):
            gradient = random(*q.shape, seed=10 * step + i, scale=size)
            if bad and i == 0:
                gradient[-1, 0] = math.nan
            q.grad = None if i == absent else gradient.double()
            p.grad = None if i == absent else self._like(p, gradient)

    @staticmethod
    def _like(p, gradient):
        return distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)

    def differences(self, policy="propagate"):
        """Clip both, and say what differs: in what is told, and in this process' part of each gradient."""
        ours, theirs = self.ours(self.model, nonfinite=policy), self.theirs(self.whole, nonfinite=policy)
        found = [name for name in TOLD if not same(getattr(ours, name), getattr(theirs, name))]
        for (name, p), q in zip(self.model.named_parameters(), self.whole.parameters(), strict=True):
            if (p.grad is None) is not (q.grad is None):
                found.append(f"{name} is there on one side")
            elif q.grad is not None and not same(p.grad.to_local(), self._like(p, q.grad).to_local()):
                found.append(name)
        return found

    def go_on(self, make):
        """Give both clippers' state to new ones, by way of a file."""
        for name in ("ours", "theirs"):
            file = io.BytesIO()
            torch.save(getattr(self, name).state_dict(), file)
            file.seek(0)
            setattr(self, name, make())
            getattr(self, name).load_state_dict(torch.load(file, weights_only=True))


def same(found, expected):
    """Tell whether numbers are alike to the rounding of float32."""
    if found is None or expected is None:
        return found is expected
    try:
        torch.testing.assert_close(found.double(), expected.double(), **EXACT)
    except AssertionError:
        return False
    return True


ROWS = {
    "plain": ({}, {}),
    "NaN on one rank": ({}, {"bad": True}),
    "NaN on one rank, made zero": ({}, {"bad": True}, "zero"),
    "a gradient missing on all ranks": ({}, {"absent": 2}),
    "an empty shard": ({"last": 1}, {}),
}


def differences_of_rows(names, other):
    """What differs, by configuration and row; ``other`` is what whole gradients are clipped by instead."""
    found, empty = {}, []
    for name in names:
        make = CONFIGURATIONS[name]
        for row, (shape, how, *policy) in ROWS.items():
            twins = Twins(make, CONFIGURATIONS[other] if other else make, **shape)
            twins.set_gradients(**how)
            found[name, row] = twins.differences(*policy)
            empty.append(any(p.to_local().numel() == 0 for p in twins.model.parameters()))
    return {key: what for key, what in found.items() if what}, sum(empty), dist.get_rank()


def differences_of_steps(names, other, spoiled=None):
    """The same over steps whose norms move, with a new clipper that was given the state in the middle.

    In step ``spoiled`` a gradient holds NaN on one rank, which the state must not see, or must see alike.
    """
    found, bound = {}, {}
    for name in names:
        make = CONFIGURATIONS[name]
        twins = Twins(make, CONFIGURATIONS[other] if other else make)
        for step, size in enumerate(SIZES):
            if step == 3:
                twins.go_on(make) if other is None else None
            twins.set_gradients(size, step, bad=step == spoiled)
            before = [p.grad.to_local().clone() for p in twins.model.parameters()]
            found[name, step] = twins.differences()
            bound[name] = bound.get(name, False) or any(
                not torch.equal(p.grad.to_local(), old) for p, old in zip(twins.model.parameters(), before, strict=True)
            )
        ours, theirs = (tree_flatten(clipper.state_dict())[0] for clipper in (twins.ours, twins.theirs))
        found[name, "state"] = [
            str(a) for a, b in zip(ours, theirs, strict=True) if not (same(a, b) if torch.is_tensor(a) else a == b)
        ]
    return {key: what for key, what in found.items() if what}, [name for name, any_ in bound.items() if not any_]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_one_clip_is_that_of_whole_gradients(pool, name):
    for found, empty, rank in pool(2).run(differences_of_rows, [name], None):
        assert found == {}
        assert empty == rank  # the second process holds nothing of a layer with one output


@pytest.mark.sampled(6)
@pytest.mark.parametrize("spoiled", [None, 1], ids=["finite", "NaN in a step"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_and_a_resumed_state_are_those_of_whole_gradients(pool, name, spoiled):
    for found, never_bound in pool(2).run(differences_of_steps, [name], None, spoiled):
        assert found == {}
        assert spoiled is not None or never_bound in ([], ["global norm, measured only"])


def test_a_rule_that_does_something_else_is_found(pool):
    """That the tables can fail: whole gradients clipped by another configuration."""
    for found, _, _ in pool(2).run(differences_of_rows, ["norm"], "global norm"):
        assert {row for _, row in found} == set(ROWS)
        assert {"threshold", "0.weight"} <= set(found["norm", "plain"])
    for found, _ in pool(2).run(differences_of_steps, ["fraction"], "fraction, bounded"):
        assert {"threshold", "2.bias"} <= {what for them in found.values() for what in them}

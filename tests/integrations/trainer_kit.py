"""The test kit of a trainer: with gradguard in it the trainer takes the steps of a loop by hand.

A trainer's own test is a subclass of `TrainerKit` that says how the trainer is called (`train`); its tests are here.
"""

import copy

import pytest
import torch
from torch import nn

import gradguard as gg

LR = 0.05


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


class TrainerKit:
    """What every trainer must do with a clipper in it."""

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def batches(self, count, bad=()):
        """Batches in order, with one sample that is not finite in those that ``bad`` names."""
        made = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(1)) * 3
        made[list(bad), 0] = torch.nan
        return made

    def clipper(self):
        return gg.ClipByMedian(k=0.0, window=4, warmup=2)

    def train(self, model, clipper, batches, parts, folder, stop=None, resume=False):
        """Train ``model`` by SGD over ``batches`` once, ``parts`` of them for each step; return the guard.

        With ``stop`` it ends after so many steps, five, with a checkpoint in ``folder``; ``resume`` goes on from there.
        """
        raise NotImplementedError

    def by_hand(self, batches, parts):
        model = self.model()
        optimizer = sgd(model)
        guard = gg.Guard(optimizer, self.clipper(), model=model)
        for number, batch in enumerate(batches, 1):
            (self.loss(model, batch) / parts).backward()
            if number % parts == 0:
                optimizer.step()
                optimizer.zero_grad()
        guard.detach()
        return model, guard

    def check(self, model, guard, batches, parts):
        expected, twin = self.by_hand(batches, parts)
        for p, by_hand in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, by_hand, rtol=1e-5, atol=1e-6)
        assert (guard.steps, guard.skipped_steps) == (twin.steps, twin.skipped_steps)
        assert float(guard.last.norm) == pytest.approx(float(twin.last.norm), rel=1e-4)
        assert 0 < float(twin.last.coefficient) <= 1

    @pytest.mark.parametrize("parts", [1, 2])
    def test_each_step_is_that_of_a_loop_by_hand(self, parts, tmp_path):
        model, batches = self.model(), self.batches(8)
        guard = self.train(model, self.clipper(), batches, parts, tmp_path)
        self.check(model, guard, batches, parts)
        assert guard.steps == 8 // parts

    def test_the_clip_matters(self, tmp_path):
        model, batches = self.model(), self.batches(4)
        self.train(model, gg.ClipByGlobalNorm(1e9), batches, 1, tmp_path)
        expected, _ = self.by_hand(batches, 1)
        assert not torch.allclose(next(model.parameters()), next(expected.parameters()), rtol=1e-3)

    def test_a_step_that_is_not_finite_is_skipped_and_counted(self, tmp_path):
        model, batches = self.model(), self.batches(6, bad=[2])
        guard = self.train(model, self.clipper(), batches, 1, tmp_path)
        self.check(model, guard, batches, 1)
        assert guard.skipped_steps == 1

    def test_a_resumed_run_goes_on_with_the_history(self, tmp_path):
        model, batches = self.model(), self.batches(8)
        self.train(model, self.clipper(), batches, 1, tmp_path, stop=5)
        again = self.model()
        guard = self.train(again, self.clipper(), batches, 1, tmp_path, resume=True)
        self.check(again, guard, batches, 1)

    def test_afterwards_the_optimizer_is_free(self, tmp_path):
        guard = self.train(self.model(), self.clipper(), self.batches(4), 1, tmp_path)
        state = copy.deepcopy(guard.state_dict())
        guard.detach()
        gg.Guard(guard.optimizer, self.clipper()).detach()
        assert repr(guard.state_dict()) == repr(state)

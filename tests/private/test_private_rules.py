"""Rules for the norms of samples whose stated sensitivity would not hold are refused."""

import threading

import pytest
import torch

import gradguard as gg
from gradguard.errors import InvalidValueError
from private.runs import one_step, private_run, train


@pytest.mark.parametrize("norms", [(2.0, 0.5), (0.5, 2.0)])
def test_a_threshold_that_changes_within_a_logical_batch_is_refused(norms):
    rule = gg.FlatNormClipper(norms[0])
    private, model = private_run(norm_clipper=rule, max_physical_batch_size=4)
    before = [p.detach().clone() for p in model.parameters()]
    schedule = (setattr(rule, "max_norm", norms[at % 2]) or batch for at, batch in enumerate(private.loader))
    with pytest.raises(InvalidValueError, match=r"changed from .* within one logical step"):
        all([one_step(private, model, batch) or True for batch in schedule])
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_threshold_that_changes_between_the_clip_and_the_noise_is_refused():
    rule = gg.FlatNormClipper(2.0)
    private, model = private_run(norm_clipper=rule)
    x, y, _ = next(iter(private.loader))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    private.clip_and_accumulate()
    rule.max_norm = 0.2
    with pytest.raises(InvalidValueError, match=r"changed from 2 to 0\.2"):
        private.pre_step()


def test_a_threshold_may_change_between_logical_batches():
    rule = gg.FlatNormClipper(2.0)
    private, model = private_run(norm_clipper=rule)
    for batch in private.loader:
        rule.max_norm *= 0.9
        one_step(private, model, batch)
    assert private.steps == 5


class OwnNorm(gg.rules.NormClipper):
    """Clip each sample by its own norm, more gently than a flat rule."""

    thresholds = (1.0,)

    def calc_clipping_factors(self, norms):
        return [1 / (1 + norms[0])]


class BatchMedian(OwnNorm):
    """Clip to the batch's median norm, at most 1."""

    def calc_clipping_factors(self, norms):
        return [norms[0].median().clamp(max=1.0) / norms[0].clamp(min=1e-12)]


class ByTheNumberBelow(OwnNorm):
    """Let the smallest and the largest norm be, and shrink others by how many are smaller."""

    def calc_clipping_factors(self, norms):
        below = (norms[0][:, None] > norms[0]).sum(1)
        shrunk = torch.where((below > 0) & (below < len(below) - 1), 1 / (1 + below), 1.0)
        return [shrunk / (1 + norms[0])]


@pytest.mark.parametrize("rule", [BatchMedian, ByTheNumberBelow])
def test_a_rule_whose_factors_depend_on_other_samples_is_refused(rule):
    private, model = private_run(norm_clipper=rule())
    with pytest.raises(InvalidValueError, match=rf"{rule.__name__} gives a sample of norm .* beside fewer others"):
        train(private, model)


def test_a_rule_that_cannot_be_copied_is_refused():
    rule = OwnNorm()
    rule.lock = threading.Lock()
    private, model = private_run(norm_clipper=rule)
    with pytest.raises(InvalidValueError, match="OwnNorm cannot be copied"):
        train(private, model)


def test_a_rule_of_ones_own_by_each_samples_norm_is_taken():
    private, model = private_run(norm_clipper=OwnNorm())
    train(private, model)
    assert private.steps == 5


def test_a_rule_that_has_learned_from_samples_without_an_accountant_is_refused():
    rule = gg.QuantileNormClipper(1.0, count_noise=2.0)
    rule.calc_clipping_factors([torch.ones(3, dtype=torch.float64)])
    rule.finish_step()
    with pytest.raises(InvalidValueError, match="has adapted to 1 steps already, whose counts were not accounted"):
        private_run(norm_clipper=rule)

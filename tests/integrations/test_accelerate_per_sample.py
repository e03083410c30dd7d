"""With clip_per_sample a loop of Accelerate takes the steps of a loop over single samples, or says why it cannot."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from torch.utils.data import DataLoader

from gradguard.integrations.accelerate import clip_per_sample, guard

BATCH, BOUND = 3, 2.0
DATA = torch.randn(17, 4, generator=torch.Generator().manual_seed(1))  # batches of 3, the last of 2

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def losses(model, x):
    return (model(x)[:, 0] - x.sum(1)).square()


def by_samples(optimizer, accumulation, reduction):
    """One sample at a time, plain autograd: its own loss, clip, the average over all samples of the step."""
    model, norms, size = build(), [], BATCH * accumulation
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[optimizer](parameters)
    for step in DATA.split(size):
        total = [torch.zeros_like(p) for p in parameters]
        for sample in step:
            gradients = torch.autograd.grad(losses(model, sample[None]).sum(), parameters)
            norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
            for t, g in zip(total, gradients, strict=True):
                t += min(1.0, BOUND / norms[-1]) * g / (len(step) if reduction == "mean" else 1)
        for p, t in zip(parameters, total, strict=True):
            p.grad = t
        optimizer.step()
    return weights(model), norms


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def prepared(optimizer="SGD", **options):
    accelerator, model = Accelerator(cpu=True, **options), build()
    model, prepared_optimizer, loader = accelerator.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), DataLoader(DATA, BATCH)
    )
    return accelerator, model, prepared_optimizer, loader


def train(accelerator, model, optimizer, loader, reduction="mean"):
    for batch in loader:
        with accelerator.accumulate(model):
            each = losses(model, batch)
            accelerator.backward(each.mean() if reduction == "mean" else each.sum())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2, 4])  # the last accumulation is shorter with 4
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_trains_as_a_loop_over_single_samples(optimizer, accumulation, reduction):
    expected, norms = by_samples(optimizer, accumulation, reduction)
    assert 0 < sum(norm > BOUND for norm in norms) < len(norms)
    accelerator, model, stepped, loader = prepared(optimizer, gradient_accumulation_steps=accumulation)
    clip = clip_per_sample(accelerator, model, stepped, gg.FlatNormClipper(BOUND), loss_reduction=reduction)
    train(accelerator, model, stepped, loader, reduction)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert clip.clipper.statistics.norms.tolist() == pytest.approx(norms[-2:], rel=1e-4)


def test_detached_the_loop_is_an_ordinary_one():
    plain = prepared(gradient_accumulation_steps=2)
    train(*plain)
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=2)
    clip = clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND))
    clip.detach()
    clip.detach()
    train(accelerator, model, optimizer, loader)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(weights(model), weights(plain[1]), rtol=0, atol=0)
    clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND)).detach()


def test_a_threshold_that_learns_is_saved_and_loaded(tmp_path):
    accelerator, model, optimizer, loader = prepared()
    rule = gg.QuantileNormClipper(1.0)
    clip_per_sample(accelerator, model, optimizer, rule)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tmp_path))
    learned = rule.thresholds
    train(accelerator, model, optimizer, loader)
    assert rule.thresholds != learned != [1.0]
    accelerator.load_state(str(tmp_path))
    assert rule.thresholds == learned


def test_an_accelerator_that_is_gone_takes_its_clip_along():
    accelerator, model, optimizer, _ = prepared()
    gone = weakref.ref(clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND)))
    del accelerator, model, optimizer, _
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_second_clip_is_refused(name):
    accelerator, model, optimizer, _ = prepared()
    clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND))
    with pytest.raises(InvalidValueError, match=rf"accelerator.{name} was called with gradients whose samples"):
        getattr(accelerator, name)(model.parameters(), 1.0)
    other = build()
    losses(other, DATA).sum().backward()
    getattr(accelerator, name)(other.parameters(), 1.0)
    with pytest.raises(InvalidValueError, match="has a per-sample clip already"):
        clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND))


def test_a_guard_beside_it_is_refused():
    accelerator, model, optimizer, _ = prepared()
    guard(accelerator, optimizer, gg.ClipByMedian(), model=model)
    with pytest.raises(InvalidValueError, match="a Guard clips"):
        clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND))


def test_precision_inside_the_model_is_refused():
    accelerator, model, optimizer, _ = prepared(mixed_precision="bf16")
    with pytest.raises(UnsupportedGradientError, match=r'mixed_precision="bf16" begins inside.*torch\.autocast'):
        clip_per_sample(accelerator, model, optimizer, gg.FlatNormClipper(BOUND))


def test_what_no_accelerator_has_prepared_is_refused():
    accelerator, model, optimizer, _ = prepared()
    with pytest.raises(InvalidTypeError, match="optimizer is SGD, which no accelerator has prepared"):
        clip_per_sample(accelerator, model, optimizer.optimizer, gg.FlatNormClipper(BOUND))
    with pytest.raises(InvalidTypeError, match=r"accelerator is NoneType: expected an accelerate\.Accelerator"):
        clip_per_sample(None, model, optimizer, gg.FlatNormClipper(BOUND))

"""What is computed between two calls of the module, from what the first returned, keeps samples apart or is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.errors import UnsupportedGradientError

PLACES = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)


class Parts(nn.Module):
    """Layers that a script calls one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm, self.cell = nn.LayerNorm(6), nn.GRUCell(6, 6)


def between(work):
    """The loss of each sample: ``work`` is done between two of the parts."""
    return lambda net, x: net.last(work(net.first(x))).square().flatten(1).mean(1)


OWN = {
    "nothing": between(lambda h: h),
    "tanh": between(torch.tanh),
    "relu": between(F.relu),
    "relu in place": between(F.relu_),
    "half and one": between(lambda h: 0.5 * h + 1),
    "normalized": between(lambda h: F.normalize(h, dim=1)),
    "parts": between(lambda h: torch.cat([h[:, :3], h[:, 3:].sin()], 1)),
    "least": between(lambda h: h - h.amin(1, keepdim=True)),
    "products": between(lambda h: (h[:, :, None] * h[:, None]).mean(2)),
    "positions": between(lambda h: h + PLACES),
    "three parts": lambda net, x: net.last(F.relu(net.second(F.relu(net.first(x))))).square().mean(1),
    "two of them": lambda net, x: net.last(net.first(x) * net.second(x).sigmoid()).square().mean(1),
    "a layer": lambda net, x: net.last(net.norm(net.first(x)) + x).square().mean(1),
    "a cell, twice": lambda net, x: net.last(net.cell(x, net.cell(x.sin()).tanh())).square().mean(1),
}
OF_THE_BATCH = {
    "centred": lambda h: h - h.mean(0),
    "normalized": lambda h: (h - h.mean(0)) / (h.std(0) + 1e-5),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "mixed up": lambda h: 0.7 * h + 0.3 * h.flip(0),
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "in another order": lambda h: h.roll(1, 0),
}
CONSTANTS = {
    "a mean": lambda h: h - h.mean(0).detach(),
    "a deviation": lambda h: h / h.std(0).detach(),
    "the largest": lambda h: h / h.detach().abs().amax(),
    "behind a function": lambda h: torch.tanh(h - h.mean(0).detach()),
}


def parts():
    torch.manual_seed(0)
    return Parts().double()


def clipper_of():
    return gg.PerSampleGradientClipper(parts(), gg.FlatNormClipper(1e9))


def norms_of(clipper, losses, size, seed):
    torch.manual_seed(seed)
    x = torch.randn(size, 6, dtype=torch.float64)
    losses(clipper.module, x).mean().backward()
    clipper.clip_and_accumulate()
    norms = clipper.statistics.norms.clone()
    clipper.pre_step()
    return x, norms


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", OWN)
def test_work_on_each_sample_is_exact(name):
    clipper, plain = clipper_of(), parts()
    for step, size in enumerate((8, 8, 3, 5, 1)):
        x, norms = norms_of(clipper, OWN[name], size, step)
        for own, norm in zip(x.split(1), norms, strict=True):
            grads = torch.autograd.grad(OWN[name](plain, own).mean(), [*plain.parameters()], allow_unused=True)
            expected = torch.stack([g.norm() for g in grads if g is not None]).norm()
            torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_samples_that_meet_are_refused_at_once_and_where_it_begins_later(name):
    begins_later = clipper_of()
    for seed in range(2):
        norms_of(begins_later, OWN["tanh"], 6, seed)
    for clipper in (clipper_of(), begins_later):
        with pytest.raises(UnsupportedGradientError, match="samples may meet between two calls of the module"):
            norms_of(clipper, between(OF_THE_BATCH[name]), 6, 3)
        clipper.discard()
    norms_of(begins_later, OWN["tanh"], 6, 4)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_statistic_without_a_graph_is_refused_as_soon_as_it_changes(name):
    clipper = clipper_of()
    norms_of(clipper, between(CONSTANTS[name]), 8, 0)
    for seed, size in enumerate((8, 5, 3), 1):
        with pytest.raises(UnsupportedGradientError, match=r"has changed since an earlier batch|may be computed from"):
            norms_of(clipper, between(CONSTANTS[name]), size, seed)
        clipper.discard()


@pytest.mark.parametrize("name", CONSTANTS)
def test_in_private_training_it_is_refused_at_once_and_a_declared_one_is_taken(name):
    clipper = clipper_of()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match="samples may meet between two calls of the module"):
        norms_of(clipper, between(CONSTANTS[name]), 8, 0)
    clipper.discard()
    for seed, size in enumerate((8, 5, 3), 1):
        norms_of(clipper, between(lambda h: h + clipper.constant(PLACES)), size, seed)


def test_the_module_called_on_what_it_returned():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    for work, is_right in ((torch.sin, True), (OF_THE_BATCH["centred"], False)):
        clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(1.0))
        x = torch.randn(5, 6, dtype=torch.float64)
        if is_right:
            net(work(net(x))).square().mean().backward()
            clipper.clip_and_accumulate()
        else:
            with pytest.raises(UnsupportedGradientError, match="an argument of Sequential is computed from"):
                net(work(net(x)))
        clipper.detach()


def test_parts_under_autocast_take_16_bits_from_one_another():
    torch.manual_seed(0)
    net = Parts()
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(1.0))
    for size in (5, 5, 3):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = net.last(net.first(torch.randn(size, 6)))
        outputs.float().square().mean().backward()
        clipper.clip_and_accumulate()
        assert len(clipper.statistics.norms) == size
        clipper.pre_step()

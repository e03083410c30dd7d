"""The bound holds in the arithmetic used: every dtype, huge and tiny, NaN, autocast with a scaler; and its memory."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradguard import FlatNormClipper, PerSampleGradientClipper
from gradguard.errors import GradguardError, UnsupportedGradientError
from per_sample.case import B, Model, case, numbers
from per_sample.models import build
from per_sample.steps import error, filled, make, oracle, total
from reference import clip_samples, per_sample_gradients, sample_norms, weigh_samples

pytestmark = pytest.mark.sampled(3)  # rows of each table

MODES = ["fast", "exact"]
HALF = [torch.bfloat16, torch.float16]


class Shares(nn.Module):
    """Linear maps of which sample i reaches only columns of its own, so that the sum shows each sample's share.

    Two weights, so that a norm is that of more than one parameter.
    """

    def __init__(self, samples: int, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(samples * width, 3, bias=False)
        self.b = nn.Linear(samples * width, 5, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)

    def norms(self, width: int) -> Tensor:
        """The norm of each sample's share of `.grad`, in float64."""
        return torch.cat([p.grad.double() for p in self.parameters()]).view(8, -1, width).square().sum((0, 2)).sqrt()


def own_columns(values: Tensor) -> Tensor:
    """``[B, T, d]`` as ``[B, T, B * d]``, sample i in block i."""
    samples, positions, width = values.shape
    x = values.new_zeros(samples, positions, samples, width)
    x[torch.arange(samples), :, torch.arange(samples)] = values
    return x.flatten(2)


def heavy_tails(*shape: int) -> Tensor:
    return torch.randn(shape) * torch.randn(shape[0], *[1] * (len(shape) - 1)).mul(2).exp()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("positions", "steps"),
    [(3, 10), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, 300), (3, 100)])],
)
def test_no_share_of_a_hundred_thousand_samples_exceeds_the_bound(dtype, positions, steps):
    samples, width = 256, 4
    model = Shares(samples, width).to(dtype)
    for step in range(steps):
        max_norm = 10.0 ** (step % 5 - 2)
        clipper = PerSampleGradientClipper(model, FlatNormClipper(max_norm), loss_reduction="sum")
        x = own_columns(heavy_tails(samples, positions, width)).to(dtype)
        a, b = model(x)
        directions = [torch.randn(samples, positions, n) for n in (3, 5)]
        loss = sum((out.float() * d).sum() for out, d in zip((a, b), directions, strict=True))
        loss.backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        shares = model.norms(width)
        assert bool(shares.isfinite().all())
        assert float(shares.max()) <= max_norm
        assert float(shares.max()) > max_norm * (0.999 if dtype is torch.float32 else 0.98)
        model.zero_grad()
        clipper.detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_one_sample_keeps_the_bound_for_every_threshold(dtype, mode):
    for exponent in range(-6, 4):
        max_norm = 10.0**exponent
        made = build("batch of one", dtype)
        made.inputs[0].mul_(30)
        clipper = make(made, max_norm, mode=mode)
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        share = float(torch.cat([g.double().flatten() for g in filled(made.model).values()]).norm())
        before = float(clipper.statistics.norms[0])
        if dtype is not torch.float16 or max_norm > 1e-3:  # below, float16 itself rounds far
            assert share <= max_norm
            assert share > 0.97 * min(max_norm, before)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["linear 2-D", "linear 3-D", "lenet", "encoder layer", "layer norm", "lstm", "vit"])
def test_a_nonfinite_sample_counts_as_zero(name, value, mode):
    made = build(name)
    made.inputs[0][2].view(-1)[0] = value
    gradients = oracle(name)
    norms = sample_norms(gradients.values())
    max_norm = float(norms.median())
    factors = (max_norm / norms).clamp(max=1)
    factors[2] = 0
    clipper = make(made, max_norm, mode=mode)
    made.losses(made.inputs).mean().backward()
    clipper.clip_and_accumulate()
    assert int(clipper.statistics.nonfinite) == 1
    assert float(clipper.statistics.factors[0][2]) == 0
    assert clipper.pre_step().batch_size == B
    assert error(filled(made.model), total(weigh_samples(gradients, factors), "mean")) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_nothing_but_nan(mode):
    made = build("linear 3-D")
    clipper = make(made, 1.0, mode=mode)
    made.losses(made.inputs).mean().backward()  # the first batch shows whether samples are separate
    clipper.clip_and_accumulate()
    clipper.discard()
    made.inputs[0].fill_(float("nan"))
    made.losses(made.inputs).mean().backward()
    clipper.clip_and_accumulate()
    assert int(clipper.statistics.nonfinite) == B
    clipper.pre_step()
    assert all(bool((g == 0).all()) for g in filled(made.model).values())


class Repairing(nn.Module):
    """Makes numbers of NaN, and does something else once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(DONE["with"](self.first(x.nan_to_num(0.3)).tanh()))


DONE = {"with": lambda hidden: hidden}
"""No attribute, which would be seen."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("finite", [0, 1])
@pytest.mark.parametrize("mixes", [False, True])
def test_what_is_new_with_too_few_finite_samples_runs_one_by_one(mixes, finite, mode, monkeypatch):
    monkeypatch.setitem(DONE, "with", DONE["with"])
    torch.manual_seed(5)
    made = case(Repairing(), numbers(B, 4))
    clipper = make(made, 0.1, mode=mode)
    made.losses(made.inputs).mean().backward()
    clipper.clip_and_accumulate()
    clipper.discard()
    made.inputs[0][finite:, 0] = float("nan")
    DONE["with"] = (lambda hidden: hidden - hidden.mean(0)) if mixes else (lambda hidden: 2 * hidden)
    if mixes:
        made.losses(made.inputs).mean().backward()
        with pytest.raises(UnsupportedGradientError, match="another way than in the batch"):
            clipper.clip_and_accumulate()
        return
    made.losses(made.inputs).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    found = filled(made.model)
    clipper.detach()
    gradients = per_sample_gradients(made.model, lambda s: made.losses(s).sum(), made.samples())
    assert error(found, total(clip_samples(gradients, 0.1), "mean")) < 1e-12


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e30, 1e15, 1e-15, 1e-30])
@pytest.mark.parametrize("shape", [(B, 4), (B, 5, 4)])
def test_huge_and_tiny_gradients(shape, scale, mode):
    torch.manual_seed(3)
    made = case(nn.Linear(4, 3), numbers(*shape)).to(torch.float32)
    made.loss = lambda outputs, inputs: (outputs * scale).flatten(1).sum(1)
    gradients = per_sample_gradients(made.model, lambda s: made.losses(s).sum(), made.samples())
    clipper = make(made, 1.0, "sum", mode)
    made.losses(made.inputs).sum().backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(clipper.statistics.norms, sample_norms(gradients.values()), rtol=1e-6, atol=0)
    clipper.pre_step()
    assert error(filled(made.model), total(clip_samples(gradients, 1.0), "sum")) < 1e-5


def test_positions_that_cancel():
    """The Gram matrices lose every digit; the norm may not."""
    torch.manual_seed(4)
    x, direction = torch.randn(B, 1, 8), torch.randn(B, 1, 6)
    x = torch.cat([x, x * (1 + 1e-5 * torch.randn(B, 1, 8))], 1).repeat(1, 16, 1)
    direction = torch.cat([direction, -direction], 1).repeat(1, 16, 1)
    made = case(
        nn.Linear(8, 6, bias=False), x, loss=lambda out, inputs: (out * direction[: len(out)]).flatten(1).sum(1)
    )
    made.to(torch.float32)
    exact = torch.einsum("bto,bti->boi", direction.double(), x.double())
    clipper = make(made, 1e-6, "sum")
    made.losses(made.inputs).sum().backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(clipper.statistics.norms, exact.flatten(1).norm(dim=1), rtol=2e-2, atol=0)
    assert bool((clipper.statistics.factors[0] * exact.flatten(1).norm(dim=1) <= 1e-6 * 1.02).all())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["linear 2-D", "linear 3-D", "lenet", "encoder layer", "used twice", "vit", "nano gpt"]
)
def test_autocast_to_bfloat16(name, mode):
    made = build(name, torch.float32)
    gradients = oracle(name)
    norms = sample_norms(gradients.values())
    max_norm = float(norms.median())
    clipper = make(made, max_norm, mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        losses = made.losses(made.inputs)
    losses.float().mean().backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(clipper.statistics.norms, norms, rtol=0.1, atol=0)
    clipper.pre_step()
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in made.model.parameters())
    assert error(filled(made.model), total(clip_samples(gradients, max_norm), "mean")) < 0.2


@pytest.mark.parametrize("mode", MODES)
def test_autocast_to_float16_with_a_scaler(mode):
    """The threshold is in units of the unscaled loss, and so is what the optimizer gets."""
    made = build("linear 3-D", torch.float32)
    gradients = oracle("linear 3-D")
    max_norm = float(sample_norms(gradients.values()).median())
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    optimizer = torch.optim.SGD(made.model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clipper = PerSampleGradientClipper(made.model, FlatNormClipper(max_norm), mode=mode, scaler=scaler)
    with torch.autocast("cpu", torch.float16):
        losses = made.losses(made.inputs)
    scaler.scale(losses.float().mean()).backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(clipper.statistics.norms, sample_norms(gradients.values()), rtol=0.02, atol=0)
    clipper.pre_step()
    scaler.step(optimizer)
    scaler.update()
    moved = {name: before[name] - p.detach() for name, p in made.model.named_parameters()}
    assert error(moved, total(clip_samples(gradients, max_norm), "mean")) < 0.05


@pytest.mark.parametrize("mode", MODES)
def test_a_scaler_that_the_clipper_does_not_know(mode):
    made = build("linear 3-D", torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clipper = make(made, 1.0, mode=mode)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=1.0)
    with pytest.raises(GradguardError, match="scaler"):  # noqa: PT012 - at the first call that can know
        scaler.scale(made.losses(made.inputs).mean()).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        scaler.step(optimizer)


@pytest.mark.parametrize("part", ["whole", "half"])
def test_a_loss_that_the_scaler_did_not_scale(part):
    made = build("linear 3-D", torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clipper = PerSampleGradientClipper(made.model, FlatNormClipper(1.0), scaler=scaler)
    for step in range(2):  # the first is right
        losses = made.losses(made.inputs)
        half = losses.mean() / 2
        scaled = scaler.scale(half) + (half if step and part == "half" else scaler.scale(half))
        if step and part == "whole":
            scaled = half + half
        with contextlib.nullcontext() if step == 0 else pytest.raises(GradguardError, match="scale"):
            scaled.backward()
            clipper.clip_and_accumulate()
    clipper._tracker.collector.discard()
    assert clipper.pre_step().batch_size == B


def test_a_scaler_that_is_updated_between_backward_and_the_step():
    made = build("linear 3-D", torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    clipper = PerSampleGradientClipper(made.model, FlatNormClipper(0.1), scaler=scaler)
    other = torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for module in (made.model, other)]
    gradients, before = oracle("linear 3-D"), {name: p.detach().clone() for name, p in made.model.named_parameters()}
    scaler.scale(made.losses(made.inputs).mean()).backward()
    for clips in (False, True):
        scaler.scale(other(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizers[1])
        scaler.update()  # before the clip, and after it
        if not clips:
            clipper.clip_and_accumulate()
    clipper.pre_step()
    scaler.step(optimizers[0])
    moved = {name: before[name] - p.detach() for name, p in made.model.named_parameters()}
    assert error(moved, total(clip_samples(gradients, 0.1), "mean")) < 1e-10


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("shape", [(16, 256), (16, 2, 256)])
def test_the_fast_mode_makes_no_gradient_for_each_sample(shape):
    model = Model(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(256, 256), b=nn.Linear(256, 256))
    made = case(model, numbers(*shape)).to(torch.float32)
    clipper = make(made, 1.0)
    with LargestTensor() as largest:
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    assert 256 * 256 <= largest.elements < 4 * 256 * 256
    clipper.detach()
    with LargestTensor() as largest:
        clipper = make(made, 1.0, mode="exact")
        made.model.zero_grad()
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
    assert largest.elements >= 16 * 256 * 256


def test_the_fast_mode_holds_no_weight_gradient_after_backward():
    """The weights' gradients are the clipper's work: backward itself leaves `.grad` empty."""
    made = build("linear 3-D")
    clipper = make(made, 1.0)
    for _ in range(2):  # the first step may check itself
        made.losses(made.inputs).mean().backward()
        assert all(p.grad is None for p in made.model.parameters())
        clipper.clip_and_accumulate()
        clipper.pre_step()
        made.model.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_that_is_told_as_a_mean_keeps_the_bound(mode):
    """The sum told as a mean scales every gradient by B before it is clipped, and nothing after."""
    made = build("linear 3-D")
    clipper = PerSampleGradientClipper(made.model, FlatNormClipper(0.1), mode=mode, check=False)
    made.losses(made.inputs).sum().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    whole = torch.cat([g.flatten() for g in filled(made.model).values()]).norm()
    assert float(whole) <= 0.1

"""Complex parameters: real and imaginary parts are one parameter, with the norm of both."""

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, UnsupportedGradientError
from gradguard.per_sample import mini_batch
from gradguard.private import GaussianNoise

B = 5


class Spectrum(nn.Module):
    """Complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
        self.aside = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.rfft(self.inner(x)) * self.weight[:, 0]
        return self.outer(torch.fft.irfft(mixed, n=4)) + (x.to(self.weight) @ self.weight.conj()).abs()[:, :2]


class Aside(Spectrum):
    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.weight.imag.square().sum()
        return super().forward(x)


class MixedInTheImaginaryPart(Spectrum):
    """What it returns is complex, and only the imaginary part of a sample depends on others."""

    def forward(self, x: Tensor) -> Tensor:
        out = (x.to(self.weight) @ self.weight).real
        return torch.complex(out, out - out.mean(0))


def made(kind: type[Spectrum] = Spectrum) -> Spectrum:
    torch.manual_seed(0)
    return kind()


def data() -> Tensor:
    return torch.randn(B, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(model: Spectrum, x: Tensor) -> Tensor:
    return model(x).abs().square().sum(1).mean()


def singles(model: Spectrum) -> dict[str, Tensor]:
    """The gradient of each sample by itself."""
    rows = []
    for i in range(B):
        model.zero_grad()
        loss_of(model, data()[i : i + 1]).backward()
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    model.zero_grad()
    return {
        n: torch.stack(column) for (n, _), column in zip(model.named_parameters(), zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("held", [True, False], ids=["held", "run again"])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_norms_and_clipped_sums_are_those_of_both_parts(mode, held, monkeypatch):
    if not held:
        monkeypatch.setattr(mini_batch, "_LEAST", 0)
    model = made()
    expected = singles(model)
    norms = torch.stack([g.abs().flatten(1).norm(dim=1) for g in expected.values()]).norm(dim=0)
    bound = float(norms.median())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(bound), mode=mode)
    loss_of(model, data()).backward()
    clipper.clip_and_accumulate()
    assert clipper.statistics is not None
    torch.testing.assert_close(clipper.statistics.norms, norms, rtol=1e-12, atol=0)
    if mode == "exact":
        torch.testing.assert_close(clipper.per_sample_gradients(), expected, rtol=1e-12, atol=1e-14)
        largest = torch.stack([g.abs().flatten(1).norm(dim=1) for g in clipper.clipped_gradients().values()]).norm(
            dim=0
        )
        assert float(largest.max()) <= bound
    clipper.pre_step()
    factors = (bound / norms).clamp(max=1)
    for name, parameter in model.named_parameters():
        average = torch.einsum("b,b...->...", factors.to(parameter.dtype), expected[name]) / B
        torch.testing.assert_close(parameter.grad, average, rtol=1e-12, atol=1e-14)


def step(clipper: gg.PerSampleGradientClipper, model: Spectrum) -> None:
    (loss_of(model, data()) + model.aside).backward()
    clipper.clip_and_accumulate()


@pytest.mark.parametrize(
    ("kind", "words"), [(Aside, "do not add up to its plain gradient"), (MixedInTheImaginaryPart, "mix samples")]
)
def test_what_is_no_samples_own_is_refused(kind, words):
    model = made(kind)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match=words):
        step(clipper, model)
    clipper.detach()


def test_noise_is_for_real_sums():
    model = made()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    loss_of(model, data()).backward()
    clipper.clip_and_accumulate()
    taken = clipper.take()
    assert [total.dtype for total in taken.sums] == [p.dtype for p in taken.parameters]
    with pytest.raises(InvalidTypeError, match=r"float32 or float64 sums, got torch\.complex128"):
        GaussianNoise(0).add_(taken.sums, 1.0)
    clipper.detach()

"""Masks that a model is called with, which hold -inf, or have the batch first beside inputs that have it second."""

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from reference import per_sample_gradients

B, D = 4, 8


class Encoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(D, 3)

    def forward(self, x, mask=None, padding=None):
        return self.head(self.encoder(x, mask=mask, src_key_padding_mask=padding))


def masks(length: int, added: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A causal mask ``[T, T]``, and one of padding ``[B, T]``."""
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.arange(length) >= torch.tensor([length, 2, 3, length])[:, None]
    if not added:
        return causal, padding
    return tuple(torch.zeros(mask.shape).double().masked_fill(mask, -torch.inf) for mask in (causal, padding))


def losses(output, batch_first: bool):
    return output.square().flatten(1).mean(1) if batch_first else output.square().mean((0, 2))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("added", [True, False], ids=["-inf", "bool"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("length", [5, B])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["causal", "padding", "both"])
def test_masks_are_taken(which, length, batch_first, added):
    causal, padding = (mask if i in which else None for i, mask in enumerate(masks(length, added)))
    model, x = Encoder(batch_first).double(), torch.randn(B, length, D, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), batch_first=batch_first, mode="exact")

    def step():
        losses(model(x, causal, padding), batch_first).mean().backward()
        return clipper.per_sample_gradients()

    if 1 in which and length == B and not batch_first:
        with pytest.raises(UnsupportedGradientError, match=r"pad this batch to another length than 4"):
            step()
        return
    found = step()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    clipper.detach()

    def alone(i: int):
        one = x[i : i + 1] if batch_first else x[:, i : i + 1]
        return losses(model(one, causal, None if padding is None else padding[i : i + 1]), batch_first).sum()

    for name, gradients in per_sample_gradients(model, alone, range(B)).items():
        torch.testing.assert_close(found[name], gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("added", [True, False], ids=["-inf", "bool"])
@pytest.mark.parametrize("sizes", [(B, 3, B), (3, B), (1, B), (5, 6, B, 2)], ids=str)
def test_a_causal_mask_belongs_to_no_sample_of_later_batches_of_its_size(sizes, added, batch_first):
    """As Poisson batches have it at last: private training must not end there."""
    causal, _ = masks(B, added)
    model = Encoder(batch_first).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), batch_first=batch_first, mode="exact")
    for size in sizes:
        x = torch.randn(size, B, D, dtype=torch.float64) if batch_first else torch.randn(B, size, D).double()
        losses(model(x, causal), batch_first).mean().backward()
        found = clipper.per_sample_gradients()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    clipper.detach()

    def alone(i: int):
        return losses(model(x[i : i + 1] if batch_first else x[:, i : i + 1], causal), batch_first).sum()

    for name, gradients in per_sample_gradients(model, alone, range(size)).items():
        torch.testing.assert_close(found[name], gradients, rtol=1e-10, atol=1e-12)


def test_samples_without_inf_are_tried_before_others():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    clipper, x = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0)), torch.randn(4, 3, dtype=torch.float64)
    x[0] = -torch.inf
    model(x).square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    assert int(clipper.statistics.nonfinite) == 1


def test_samples_that_are_not_finite_are_still_refused():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match="is not finite"):
        model(torch.full((4, 3), -torch.inf, dtype=torch.float64))
    with pytest.raises(UnsupportedGradientError, match="only 0 of the 4 samples"):
        model(torch.full((4, 3), torch.nan, dtype=torch.float64))

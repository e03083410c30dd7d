"""loss_reduction="share": each sample's part of the gradient of any loss, against each sample alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError

WORDS = 12


class Texts(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gain = nn.Embedding(WORDS, 6), nn.Parameter(torch.ones(6))
        self.mix = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embed(x))) * self.gain)


LOSSES = {
    "token mean": lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=1),
    "mean of means, divided": lambda each, mask: ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean() / 3,
    "a constant length": lambda each, mask: (each * mask).sum() / (len(each) * 9),
    "weights that add up to one": lambda each, mask: (each.mean(1) * each.detach().mean(1).softmax(0)).sum(),
    "a deviation": lambda each, mask: each.std(),
    "contrastive": lambda each, mask: torch.logsumexp(each.sum(1), 0),
    "pairs": lambda each, mask: -F.logsigmoid(each[: len(each) // 2].sum(1) - each[len(each) // 2 :].sum(1)).mean(),
}


def drawn(size):
    x, y = torch.randint(WORDS, (2, size, 5))
    return x, y, (torch.rand(size, 5) < 0.7).double()


def taken(clipper, loss):
    loss.backward()
    clipper.clip_and_accumulate()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss", LOSSES)
def test_shares_are_exact_and_add_up_to_the_plain_gradient(loss):
    model, plain = Texts(), Texts()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(float("inf")), loss_reduction="share")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        for size in (6, 4):
            x, y, mask = drawn(size)
            LOSSES[loss](F.cross_entropy(model(x).mT, y, reduction="none"), mask).backward()
            clipper.clip_and_accumulate()
            outputs = plain(x)
            apart = outputs.detach().requires_grad_()
            (grad,) = torch.autograd.grad(LOSSES[loss](F.cross_entropy(apart.mT, y, reduction="none"), mask), apart)
            outputs.backward(grad)
            alone = [torch.autograd.grad(plain(x[i : i + 1]), plain.parameters(), grad[i : i + 1]) for i in range(size)]
            expected = torch.stack([torch.sqrt(sum(g.square().sum() for g in one)) for one in alone])
            torch.testing.assert_close(clipper.statistics.norms, expected, rtol=1e-9, atol=1e-12)
        clipper.pre_step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_share_is_clipped_as_a_sample_is():
    model = Texts()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.01), loss_reduction="share", mode="exact")
    x, y, mask = drawn(6)
    LOSSES["token mean"](F.cross_entropy(model(x).mT, y, reduction="none"), mask).backward()
    clipper.clip_and_accumulate()
    added = clipper.clipped_gradients()
    norms = torch.cat([rows.flatten(1) for rows in added.values()], 1).norm(dim=1)
    assert norms.max() <= 0.01 < clipper.statistics.norms.max()
    clipper.pre_step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, added[name].sum(0), rtol=1e-9, atol=1e-15)


def test_a_scaler_is_taken_off():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for own in (None, scaler):
        model = Texts(torch.float32)
        clipper = gg.PerSampleGradientClipper(
            model, gg.FlatNormClipper(float("inf")), loss_reduction="share", scaler=own
        )
        torch.manual_seed(1)
        x, y, mask = drawn(4)
        loss = LOSSES["token mean"](F.cross_entropy(model(x).mT, y, reduction="none"), mask)
        (loss if own is None else own.scale(loss)).backward()
        clipper.clip_and_accumulate()
        norms.append(clipper.statistics.norms)
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)


def test_samples_that_meet_in_the_model_are_refused():
    class Meets(Texts):
        def forward(self, x):
            h = super().forward(x)
            return h - h.mean(0)

    model = Meets()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="share")
    with pytest.raises(UnsupportedGradientError, match=r"treats a sample alone in another way|mixes samples"):
        taken(clipper, model(drawn(4)[0]).square().mean())


@pytest.mark.parametrize("first", [0, 3])
def test_a_weight_in_the_loss_is_refused_whenever_it_comes(first):
    model = Texts()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="share")
    for _ in range(first):
        model(drawn(4)[0]).square().mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    loss = model(drawn(4)[0]).square().mean() + model.mix.linear1.weight.square().sum()
    with pytest.raises(UnsupportedGradientError, match="was used outside of the module's forward"):
        taken(clipper, loss)


def test_a_module_that_returns_its_loss_is_refused():
    class Loss(Texts):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Loss()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="share")
    with pytest.raises(UnsupportedGradientError, match="Loss returns a number that the loss uses"):
        taken(clipper, model(drawn(4)[0]))


def test_shares_are_not_taken_unchecked():
    with pytest.raises(InvalidValueError, match=r"loss_reduction='share' with check=False: expected check=True"):
        gg.PerSampleGradientClipper(Texts(), gg.FlatNormClipper(1.0), loss_reduction="share", check=False)


def test_private_training_refuses_shares():
    model = Texts()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*drawn(8)), batch_size=4)
    with pytest.raises(InvalidValueError, match=r"loss_reduction='share'.*would not be bounded"):
        gg.private.make_private(
            gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="share"),
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader,
            gg.private.FixedNoise(noise_multiplier=1.0, delta=1e-3),
        )

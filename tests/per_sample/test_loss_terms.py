"""Losses of all kinds against the oracle: each sample's gradient in the batch's loss, and in the loss of it alone."""

import contextlib
import math
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.listeners import Listener
from gradguard.per_sample.capture import tap
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.loss import loss_graph as loss_graph
from gradguard.per_sample.loss.loss_graph import BackwardRoots
from gradguard.per_sample.loss.separation import Outputs
from gradguard.per_sample.loss.terms import LossParts, explain, loss_parts
from gradguard.script_events import listening

pytestmark = pytest.mark.sampled(4)  # rows of each table

B, T, V = 4, 5, 7


@contextlib.contextmanager
def looking(look):
    roots = BackwardRoots(look)
    roots.start()
    try:
        yield
    finally:
        roots.stop()


class Data:
    """What a loss is computed from: a module's outputs, and constants that belong to the same samples.

    Samples have two labels each in ``even``, and 1 to 4 of them in ``labels``.
    """

    def __init__(self, size: int = B) -> None:
        generator = torch.Generator().manual_seed(3)
        self.out = torch.randn(size, T, V, generator=generator, dtype=torch.float64)
        self.target = torch.randn(size, T, V, generator=generator, dtype=torch.float64)
        self.classes = torch.randint(0, V, (size,), generator=generator)
        self.tokens = torch.randint(0, V, (size, T), generator=generator)
        self.mask = torch.arange(T) < (torch.arange(size) % T + 1)[:, None]
        self.labels = self.tokens.masked_fill(~self.mask, -100)
        self.even = self.tokens.masked_fill(torch.arange(T) >= 2, -100)
        self.weight = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5

    def samples(self, which: slice) -> "Data":
        part = object.__new__(Data)
        vars(part).update({name: value[which] for name, value in vars(self).items()})
        return part

    def tapped(self) -> tuple["Data", Tensor]:
        """The same behind a tap, and where the gradient of the outputs arrives."""
        leaf, anchor = self.out.detach().clone().requires_grad_(), torch.zeros((), requires_grad=True)
        new = self.samples(slice(None))
        [new.out] = tap(lambda saved, grads, task: None, [], anchor, [leaf])
        return new, leaf

    @property
    def size(self) -> int:
        return len(self.out)

    @property
    def logits(self) -> Tensor:
        return self.out[:, 0]

    @property
    def error(self) -> Tensor:
        return (self.out - self.target).square()

    @property
    def token_losses(self) -> Tensor:
        return F.cross_entropy(self.out.mT, self.labels, reduction="none")


def returned(out: Tensor, batch_first: bool = True) -> Outputs:
    outputs = Outputs(len(out), batch_first)
    outputs.add([out], [BatchAxis(0)])
    return outputs


def examine(loss, reduction: str = "mean", size: int = B, scale: float = 1.0, backward=None, data=None) -> LossParts:
    """What is found of a loss when its backward runs."""
    data = (data or Data(size)).tapped()[0]
    found: list[LossParts] = []
    look = lambda roots: found.append(loss_parts(roots, returned(data.out), reduction, scale=scale))  # noqa: E731
    with looking(look):
        (backward or Tensor.backward)(loss(data))
    [parts] = found
    return parts


def factors_of_loop(loss, reduction: str) -> list[float]:
    """Each sample's gradient in the loss of the batch, as a multiple of that in the loss of it alone."""
    data, leaf = Data().tapped()
    loss(data).backward()
    together = leaf.grad * (B if reduction == "mean" else 1)
    factors = []
    for i in range(B):
        one, alone = data.samples(slice(i, i + 1)).tapped()
        loss(one).backward()
        square = float(alone.grad.square().sum())
        factor = float((together[i] * alone.grad[0]).sum()) / square if square else 1.0
        torch.testing.assert_close(together[i], factor * alone.grad[0], rtol=1e-9, atol=1e-12)
        factors.append(factor)
    return factors


def label_smoothing(d, **options):
    return F.cross_entropy(d.out.flatten(0, 1), d.even.flatten(), label_smoothing=0.1, **options)


def shifted(d):
    """Causal: [B * (T - 1)] labels."""
    return F.cross_entropy(d.out[:, :-1].reshape(-1, V), d.tokens[:, 1:].reshape(-1))


def probabilities(d):
    return F.cross_entropy(d.logits, d.target[:, 0].softmax(1))


def kl_to_target(d, reduction):
    return F.kl_div(d.logits.log_softmax(1), d.target[:, 0].softmax(1), reduction=reduction)


def vae(d):
    recon, mu, log_variance = d.error[:, :3], d.out[:, 3], d.out[:, 4]
    return recon.sum() / d.size - 0.5 * (1 + log_variance - mu.square() - log_variance.exp()).sum() / d.size


def vae_per_pixel(d):
    mu, log_variance = d.out[:, 3], d.out[:, 4]
    kl = -0.5 * torch.sum(1 + log_variance - mu.pow(2) - log_variance.exp()) / (d.size * 3 * V)
    return F.mse_loss(d.out[:, :3], d.target[:, :3]) + kl


def ctc(d):
    lengths = torch.full((d.size,), T), torch.full((d.size,), 2)
    targets = d.tokens[:, :2].clamp(min=1)
    return F.ctc_loss(d.out.log_softmax(2).transpose(0, 1), targets, *lengths, zero_infinity=True)


def masked_mean(d):
    return ((d.token_losses * d.mask).sum(1) / d.mask.sum(1)).mean()


def one_by_one(d, samples=range(B)):
    """A linear loss of each sample by itself."""
    return [(d.out[i] * d.target[i]).sum() for i in samples if i < len(d.out)]


def stacked(d):
    return torch.stack([d.error.mean(), d.out.abs().mean(), F.cross_entropy(d.logits, d.classes)]).mean()


def deep_supervision(d):
    losses = [F.cross_entropy(d.out[:, t], d.classes) for t in range(T)]
    return sum(weight * loss for weight, loss in zip([0.1, 0.2, 0.3, 0.4, 1.0], losses, strict=True))


def uncertainty(d):
    """Weights that are trained, and are the same for all samples."""
    s = torch.tensor(0.3, requires_grad=True)
    return (-s).exp() * d.error.mean() + s


def ppo(d):
    ratio = d.out[:, :, 0].exp()
    return -torch.min(ratio * d.weight[:, None], ratio.clamp(0.8, 1.2) * d.weight[:, None]).mean()


def half_precision(d):
    return F.cross_entropy(d.logits.bfloat16().float(), d.classes)


def autocast(d):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(d.logits.float() @ torch.ones(V, 3).tril(), d.classes % 3)


def distillation(d):
    student, teacher = (d.logits / 2).log_softmax(1), (d.target[:, 0] / 2).softmax(1)
    hard = F.cross_entropy(d.logits, d.classes)
    return 0.7 * F.kl_div(student, teacher, reduction="batchmean") * 2**2 + 0.3 * hard


RIGHT = {
    "one by one, stacked": lambda d: torch.stack(one_by_one(d)).mean(),
    "one by one, added up": lambda d: sum(one_by_one(d)) / len(d.out),
    "one by one, two terms": lambda d: (
        torch.stack(one_by_one(d)).mean() + sum(d.out[i].sum() for i in range(len(d.out))) / len(d.out)
    ),
    "cross entropy": lambda d: F.cross_entropy(d.logits, d.classes),
    "nll": lambda d: F.nll_loss(d.logits.log_softmax(1), d.classes),
    "cross entropy of tokens": lambda d: F.cross_entropy(d.out.flatten(0, 1), d.tokens.flatten()),
    "cross entropy of tokens, classes second": lambda d: F.cross_entropy(d.out.mT, d.tokens),
    "cross entropy of an image": lambda d: F.cross_entropy(
        d.out.mT.unflatten(2, (1, T)), d.tokens.unflatten(1, (1, T))
    ),
    "ignored labels, as many of each": lambda d: F.cross_entropy(d.out.mT, d.even),
    "ignored labels, sum over their number": lambda d: (
        F.cross_entropy(d.out.mT, d.even, reduction="sum") / (d.even != -100).sum()
    ),
    "shifted labels": shifted,
    "label smoothing": lambda d: F.cross_entropy(d.logits, d.classes, label_smoothing=0.1),
    "label smoothing, ignored labels": label_smoothing,
    "equal class weights": lambda d: F.cross_entropy(d.logits, d.classes, weight=torch.full((V,), 2.0).double()),
    "class weights, each sample's own": lambda d: F.cross_entropy(
        d.logits, d.classes, weight=torch.arange(1.0, V + 1).double(), reduction="none"
    ).mean(),
    "class probabilities": probabilities,
    "mse": lambda d: F.mse_loss(d.out, d.target),
    "mse of [B]": lambda d: F.mse_loss(d.out[:, 0, 0], d.target[:, 0, 0]),
    "mse by hand": lambda d: (d.out - d.target).pow(2).mean(),
    "half mse": lambda d: 0.5 * F.mse_loss(d.out, d.target),
    "sum within samples, mean over them": lambda d: d.error.sum((1, 2)).mean(),
    "means one after the other": lambda d: d.error.mean(2).mean(1).mean(0),
    "means, samples first": lambda d: d.error.mean(0).mean(),
    "mean over samples, sum of the rest": lambda d: d.error.mean(0).sum(),
    "sum over the batch size": lambda d: d.error.sum() / d.size,
    "sum times 1/B": lambda d: d.error.sum() * (1 / d.size),
    "sum over all elements": lambda d: d.error.sum() / d.error.numel(),
    "sum over a tensor": lambda d: d.error.sum() / torch.tensor(d.size),
    "sum over B and T": lambda d: d.error.sum() / d.size / T,
    "sum over T and B": lambda d: d.error.sum() / T / d.size,
    "rows over B": lambda d: (d.error.sum((1, 2)) / d.size).sum(),
    "accumulation, half of the step": lambda d: d.error.mean() / 2,
    "mean, accumulated as often as there are samples": lambda d: d.error.mean() / d.size,
    "masked, each sample's own mean": masked_mean,
    "masked mean of all": lambda d: (d.token_losses * d.mask).mean(),
    "masked sum over all": lambda d: (d.error * d.mask[..., None]).sum() / d.error.numel(),
    "masked fill": lambda d: d.error.masked_fill(~d.mask[..., None], 0).sum(1).mean(),
    "where": lambda d: torch.where(d.mask[..., None], d.error, 0.0).sum((1, 2)).mean(),
    "weighted samples": lambda d: (d.error.mean((1, 2)) * d.weight).mean(),
    "weights by dot product": lambda d: d.error.mean((1, 2)).dot(torch.full((d.size,), 1 / d.size).double()),
    "binary cross entropy": lambda d: F.binary_cross_entropy(d.out.sigmoid(), d.target.sigmoid()),
    "binary cross entropy with logits": lambda d: F.binary_cross_entropy_with_logits(
        d.out, d.target.sigmoid(), pos_weight=torch.arange(1.0, V + 1)
    ),
    "l1": lambda d: F.l1_loss(d.out, d.target),
    "smooth l1": lambda d: F.smooth_l1_loss(d.out, d.target),
    "huber": lambda d: F.huber_loss(d.out, d.target, delta=0.5),
    "soft margin": lambda d: F.soft_margin_loss(d.out, d.target.sign()),
    "multi margin": lambda d: F.multi_margin_loss(d.logits, d.classes),
    "multilabel margin": lambda d: F.multilabel_soft_margin_loss(d.logits, (d.target[:, 0] > 0).double()),
    "hinge": lambda d: (1 - d.out[:, 0, 0] * d.target[:, 0, 0].sign()).clamp(min=0).mean(),
    "triplet": lambda d: F.triplet_margin_loss(d.out[:, 0], d.out[:, 1], d.out[:, 2]),
    "cosine": lambda d: (1 - F.cosine_similarity(d.out[:, 0], d.out[:, 1])).mean(),
    "margin ranking": lambda d: F.margin_ranking_loss(d.out[:, 0, 0], d.out[:, 1, 0], d.target[:, 0, 0].sign(), 0.5),
    "poisson": lambda d: F.poisson_nll_loss(d.out, d.target.square()),
    "gaussian": lambda d: F.gaussian_nll_loss(d.out[:, 0], d.target[:, 0], d.out[:, 1].exp()),
    "kl, batchmean": lambda d: kl_to_target(d, "batchmean"),
    "kl, sum over B": lambda d: kl_to_target(d, "sum") / d.size,
    "ctc": ctc,
    "vae": vae,
    "vae, per pixel": vae_per_pixel,
    "log-probability": lambda d: -torch.distributions.Normal(d.out[:, 0], 1.0).log_prob(d.target[:, 0]).sum(1).mean(),
    "policy gradient": lambda d: -(d.logits.log_softmax(1).gather(1, d.classes[:, None])[:, 0] * d.weight).mean(),
    "clipped policy": ppo,
    "two heads": lambda d: F.cross_entropy(d.logits, d.classes) + 0.1 * F.mse_loss(d.out[:, 1], d.target[:, 1]),
    "tasks in a dict": lambda d: sum({"a": d.error.mean(), "b": d.out.abs().sum() / d.size}.values()),
    "stacked tasks": stacked,
    "deep supervision": deep_supervision,
    "distillation": distillation,
    "trained weights of tasks": uncertainty,
    "concatenated": lambda d: torch.cat([d.error.mean((1, 2)), d.out.abs().mean((1, 2))]).mean(),
    "half precision": half_precision,
    "autocast": autocast,
    "focal": lambda d: (lambda ce: ((1 - (-ce).exp()) ** 2 * ce).mean())(
        F.cross_entropy(d.logits, d.classes, reduction="none")
    ),
    "dice of each sample": lambda d: (
        1 - 2 * (d.out.sigmoid() * d.mask[..., None]).sum((1, 2)) / (d.out.sigmoid().sum((1, 2)) + 1)
    ).mean(),
    "squeezed, permuted": lambda d: d.error.permute(2, 0, 1).unsqueeze(0).squeeze(0).flatten().mean(),
    "each sample's root": lambda d: d.error.mean((1, 2)).sqrt().mean(),
    "nanmean": lambda d: d.error.nanmean(),
    "in-place accumulation": lambda d: torch.zeros((), dtype=torch.float64).add_(d.error.mean()).add_(d.out.mean()),
    "split heads": lambda d: sum(part.square().mean() for part in d.out.split([3, 4], 2)),
    "unbound": lambda d: sum(part.square().mean() for part in d.out.unbind(1)),
    "with a penalty": lambda d: d.error.mean() + torch.ones(B, 3, requires_grad=True).square().sum(),
}
"""Losses that are the mean over samples of what each is by itself."""


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_over_samples_is_right(name):
    torch.testing.assert_close(torch.tensor(factors_of_loop(RIGHT[name], "mean")) * divisor(name), torch.ones(B))
    parts = examine(RIGHT[name])
    assert parts.verdict == "right", parts
    torch.testing.assert_close(parts.factors, torch.ones(B, dtype=torch.float64))


def divisor(name: str) -> int:
    """The loop over single samples divides by their number, too, where that is meant for accumulation."""
    return B if name == "mean, accumulated as often as there are samples" else 1


def unshifted_count(d, out=None):
    """transformers' Trainer: a sum over shifted labels, divided by the number of all."""
    labels = d.tokens.roll(-1, 1).masked_fill(torch.arange(T) == T - 1, -100)
    loss = F.cross_entropy(d.out.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / torch.tensor(d.tokens.numel())


def unequal_count(d):
    """The same with labels of 1 to 4 tokens; each sample's first does not count."""
    loss = F.cross_entropy(d.out[:, :-1].flatten(0, 1), d.labels[:, 1:].flatten(), reduction="sum")
    return loss / (d.labels != -100).sum()


def two_sums_over_one_number(d):
    losses = [F.cross_entropy(d.out[:, k::2].mT, d.labels[:, k::2], reduction="sum") for k in (0, 1)]
    return sum(losses) / (d.labels != -100).sum()


COUNTS = [1, 2, 3, 4]
"""How many labels the samples have."""

UNEQUAL = [B * count / sum(COUNTS) for count in COUNTS]
WEIGHTS = Data().weight
NORMALIZED = (B * WEIGHTS / WEIGHTS.sum()).tolist()
ALL = [float(B)] * B

WRONG = {
    "one by one, sum": (lambda d: torch.stack(one_by_one(d)).sum(), ALL, "it is a sum"),
    "one by one, no mean": (lambda d: sum(one_by_one(d)), ALL, "it is a sum"),
    "one by one, one twice": (
        lambda d: torch.stack(one_by_one(d, [0, 0, 1, 2, 3])).mean(), [1.6, 0.8, 0.8, 0.8], "a mean over 5 rows"
    ),
    "sum": (lambda d: d.error.sum(), ALL, "it is a sum. Use loss_reduction='sum'"),
    "half of a sum": (lambda d: 0.5 * d.error.sum(), ALL, "it is a sum"),
    "sum of means": (lambda d: d.error.mean((1, 2)).sum(), ALL, "it is a sum"),
    "cross entropy, sum": (lambda d: F.cross_entropy(d.logits, d.classes, reduction="sum"), ALL, "it is a sum"),
    "mse, sum": (lambda d: F.mse_loss(d.out, d.target, reduction="sum"), ALL, "it is a sum"),
    "masked means, sum": (lambda d: ((d.token_losses * d.mask).sum(1) / d.mask.sum(1)).sum(), ALL, "it is a sum"),
    "one head of two": (lambda d: d.error.mean() + 0.9 * d.out.abs().sum(), ALL, "it is a sum"),
    "sum over a constant": (
        lambda d: d.error.sum((1, 2)).sum() / 10, [0.4] * B, "a sum over 140 rows was divided by 10, which is neither"
    ),
    "unequal labels": (
        lambda d: F.cross_entropy(d.out.mT, d.labels), UNEQUAL, "a mean over 10 labels, and samples have 1 to 4"
    ),
    "unequal labels, flattened": (
        lambda d: F.cross_entropy(d.out.flatten(0, 1), d.labels.flatten()), UNEQUAL, "and samples have 1 to 4"
    ),
    "unequal labels, sum over their number": (
        lambda d: F.cross_entropy(d.out.mT, d.labels, reduction="sum") / (d.labels != -100).sum(), UNEQUAL, "10 labels"
    ),
    "unequal labels, chosen losses": (
        lambda d: F.cross_entropy(d.out.mT, d.tokens, reduction="none")[d.mask].mean(), UNEQUAL, "Average within each"
    ),
    "unequal labels, chosen logits": (
        lambda d: F.cross_entropy(d.out[d.mask], d.tokens[d.mask]), UNEQUAL, "10 labels, and samples have 1 to 4"
    ),
    "unequal labels, masked_select": (
        lambda d: F.cross_entropy(d.out.mT, d.tokens, reduction="none").masked_select(d.mask).mean(), UNEQUAL, "10"
    ),
    "unequal labels, index_select": (
        lambda d: d.token_losses.flatten().index_select(0, d.mask.flatten().nonzero()[:, 0]).mean(), UNEQUAL, "10"
    ),
    "unequal labels, scaled by 2": (lambda d: 2 * F.cross_entropy(d.out.mT, d.labels), UNEQUAL, "10 labels"),
    "unequal labels, two terms": (
        lambda d: d.error.mean() + 0.01 * F.cross_entropy(d.out.mT, d.labels), UNEQUAL, "10 labels"
    ),
    "unequal mask": (
        lambda d: (d.error.mean(2) * d.mask).sum() / d.mask.sum(), UNEQUAL, "a mean over 10 rows, and samples"
    ),
    "unequal mask, broadcast": (
        lambda d: (d.error * d.mask[..., None]).sum() / (V * d.mask.sum()), UNEQUAL, "samples have 7 to 28"
    ),
    "unequal mask, divided before": (
        lambda d: (d.error.mean(2) * d.mask / d.mask.sum()).sum(), UNEQUAL, "samples have 1 to 4"
    ),
    "normalized mask": (lambda d: (d.error.mean(2) * (d.mask / d.mask.sum())).sum(), UNEQUAL, "samples have 1 to 4"),
    "filled mask": (
        lambda d: d.error.mean(2).masked_fill(~d.mask, 0).sum() / d.mask.sum(), UNEQUAL, "samples have 1 to 4"
    ),
    "nanmean": (
        lambda d: torch.where(d.mask, d.error.mean(2), torch.nan).nanmean(), UNEQUAL, "samples have 1 to 4"
    ),
    "label smoothing, unequal labels": (
        lambda d: F.cross_entropy(d.out.mT, d.labels, label_smoothing=0.1), UNEQUAL, "samples have"
    ),
    "two sums over one number": (two_sums_over_one_number, UNEQUAL, "samples have"),
    "normalized weights": (
        lambda d: (d.error.mean((1, 2)) * d.weight).sum() / d.weight.sum(), NORMALIZED, "weights of the rows"
    ),
    "weights that add up to 1": (
        lambda d: (d.error.mean((1, 2)) * (d.weight / d.weight.sum())).sum(), NORMALIZED, "weights of the rows"
    ),
    "weights by einsum": (
        lambda d: torch.einsum("b,b->", d.error.mean((1, 2)), d.weight / d.weight.sum()), NORMALIZED, "weights of the"
    ),
    "a sum over all samples of the step": (
        lambda d: F.cross_entropy(d.logits, d.classes, reduction="sum") / 12, [1 / 3] * B, "or for several mini-batches"
    ),
    "a sum over all samples of the step, by hand": (
        lambda d: d.error.sum() / 12, [1 / 3] * B, "The clipper averages over all mini-batches by itself"
    ),
    "labels counted before the shift": (
        unshifted_count, [0.8] * B, "a sum over 16 rows was divided by 20, .* before a shift"
    ),
    "labels counted before the shift, accumulated twice": (
        lambda d: unshifted_count(d) / 2, [0.4] * B, "a sum over 16 rows was divided by 40"
    ),
    "unequal labels, counted before the shift": (
        unequal_count, [math.nan, 0.4, 0.8, 1.2], "a sum over 6 rows was divided by 10"
    ),
}  # fmt: skip
"""Losses that are not, with what each sample's part is of its own loss, and what is said."""

COUPLED = {
    "class weights": (
        lambda d: F.cross_entropy(d.logits, d.classes, weight=torch.arange(1.0, V + 1).double()), "sum of the weights"
    ),
    "class weights, label smoothing": (
        lambda d: F.cross_entropy(d.logits, d.classes, weight=torch.arange(1.0, V + 1).double(), label_smoothing=0.1),
        "sum of the weights",
    ),
    "root of the mean": (lambda d: F.mse_loss(d.out, d.target).sqrt(), "MseLossBackward0 mixes samples"),
    "logarithm of the mean": (lambda d: d.error.mean().log(), "MeanBackward0 mixes samples"),
    "square of a mean": (lambda d: d.error.mean() + d.out.mean((0, 1)).square().sum(), "MeanBackward1 mixes samples"),
    "load balance": (
        lambda d: d.error.mean() + d.out.flatten(0, 1).softmax(1).mean(0).pow(2).sum(), "MeanBackward1 mixes samples"
    ),
    "norm": (lambda d: (d.out - d.target).norm(), "NormBackward"),
    "logsumexp over the batch": (lambda d: d.out[:, 0, 0].logsumexp(0), "LogsumexpBackward0 mixes samples"),
    "largest": (lambda d: d.error.mean((1, 2)).max(), "MaxBackward1 mixes samples"),
    "hardest": (lambda d: d.error.mean((1, 2)).topk(2)[0].mean(), "TopkBackward0 mixes samples"),
    "contrastive": (
        lambda d: F.cross_entropy(d.logits @ d.out[:, 1].T, torch.arange(d.size)), "MmBackward0 mixes samples"
    ),
    "variance": (lambda d: d.out[:, 0, 0].var(), "VarBackward0 mixes samples"),
    "distance from the mean": (lambda d: (d.out - d.out.mean(0)).square().mean(), "MeanBackward1 mixes samples"),
    "dice of the batch": (
        lambda d: 1 - 2 * (d.out.sigmoid() * d.mask[..., None]).sum() / (d.out.sigmoid().sum() + 1), "mixes samples"
    ),
    "product of means": (lambda d: d.error.mean() * d.out.mean(), "MeanBackward0 mixes samples"),
    "normalized within the batch": (lambda d: (d.error / d.error.sum()).square().sum(), "SumBackward0 mixes samples"),
    "flooding": (lambda d: (d.error.mean() - 0.1).abs() + 0.1, "MeanBackward0 mixes samples"),
    "softmax over the batch": (lambda d: -d.out[:, 0, 0].log_softmax(0).mean(), "LogSoftmaxBackward0 mixes samples"),
    "covariance": (lambda d: (d.logits.T @ d.logits).square().mean(), "MmBackward0 mixes samples"),
}  # fmt: skip
"""Losses with a term that is no sum of the samples' own."""


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", WRONG)
def test_another_loss_is_refused_with_its_factors(name):
    loss, factors, words = WRONG[name]
    parts = examine(loss)
    assert parts.verdict == "wrong", parts
    expected = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(parts.factors, expected, rtol=1e-6, atol=0, equal_nan=True)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(explain(parts, "mean"))


@pytest.mark.sampled(19)
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_couples_samples_is_refused(name, reduction):
    loss, words = COUPLED[name]
    parts = examine(loss, reduction)
    assert (parts.verdict, parts.factors) == ("wrong", None), parts
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(explain(parts, reduction))


SUMS = {
    "one by one, stacked": lambda d: torch.stack(one_by_one(d)).sum(),
    "one by one, added up": lambda d: sum(one_by_one(d)),
    "sum": lambda d: d.error.sum(),
    "half of a sum": lambda d: 0.5 * d.error.sum((1, 2)).sum(),
    "sum of means": lambda d: d.error.mean((1, 2)).sum(),
    "sum over a constant": lambda d: d.error.sum() / 10,
    "cross entropy": lambda d: F.cross_entropy(d.logits, d.classes, reduction="sum"),
    "labels": lambda d: F.cross_entropy(d.out.mT, d.labels, reduction="sum"),
    "chosen labels": lambda d: F.cross_entropy(d.out[d.mask], d.tokens[d.mask], reduction="sum"),
    "label smoothing": lambda d: F.cross_entropy(d.out.mT, d.labels, label_smoothing=0.2, reduction="sum"),
    "class weights": lambda d: F.cross_entropy(
        d.logits, d.classes, weight=torch.arange(1.0, V + 1).double(), reduction="sum"
    ),
    "masked means": lambda d: ((d.token_losses * d.mask).sum(1) / d.mask.sum(1)).sum(),
    "weighted": lambda d: (d.error.mean((1, 2)) * d.weight).sum(),
    "mean times the number of samples": lambda d: d.error.mean() * d.size,
    "mean times the number of elements": lambda d: F.mse_loss(d.out, d.target) * d.out.numel(),
    "kl": lambda d: kl_to_target(d, "sum"),
}
"""Losses that are the sum over samples."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_right(name):
    torch.testing.assert_close(torch.tensor(factors_of_loop(SUMS[name], "sum")), torch.ones(B))
    parts = examine(SUMS[name], "sum")
    assert parts.verdict == "right", parts
    torch.testing.assert_close(parts.factors, torch.ones(B, dtype=torch.float64))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_is_refused_as_a_sum(name):
    parts = examine(RIGHT[name], "sum")
    assert parts.verdict == "wrong", parts
    with pytest.raises(AssertionError, match=r"not the sum over samples: .* it is a mean\. Use loss_reduction='mean'"):
        raise AssertionError(explain(parts, "sum"))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


UNKNOWN = {
    "a mean divided by a tensor": (lambda d: d.error.mean() / torch.tensor(2.0), "a tensor with the value 0.5 mul"),
    "weights that may hold 1/B": (lambda d: (d.error.mean((1, 2)) * d.weight).sum() * 0.1, "may hold 1/4"),
    "a small constant": (lambda d: 0.01 * d.error.sum(), "multiplied by 0.01, which may hold 1/4"),
    "a constant": (lambda d: torch.ones(3, requires_grad=True).sum(), "does not depend on the module's outputs"),
}  # fmt: skip


class TimesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sum(0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.sum(0) + (grad * x).sum(0)


MIXED = {
    "log_softmax over samples": lambda o: -o.log_softmax(0)[:, 0].mean(),
    "all pairs": lambda o: (o[None] - o[:, None]).square().mean(),
    "distances": lambda o: torch.cdist(o, o).sum(1).mean(),
    "rolled": lambda o: (o - o.roll(1, 0)).square().sum(1).mean(),
    "absolute, rolled": lambda o: (o - o.roll(1, 0)).abs().sum(1).mean(),
    "flipped": lambda o: (o * o.flip(0)).sum(1).mean(),
    "permuted": lambda o: (o * o[[1, 2, 3, 0]]).sum(1).mean(),
    "weakly": lambda o: (o + 1e-6 * o.roll(1, 0)).square().sum(1).mean(),
    "einsum": lambda o: torch.einsum("id,jd->ij", o, o).exp().sum(1).mean(),
    "outer": lambda o: torch.outer(o.sum(1), o.sum(1)).sum(1).mean(),
    "kron": lambda o: torch.kron(o, o).sum(1).mean(),
    "Fourier": lambda o: torch.fft.fft(o, dim=0).abs().sum(1).mean(),
    "triplets": lambda o: F.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0)),
    "cosine": lambda o: F.cosine_similarity(o, o.roll(1, 0)).mean(),
    "mse of two": lambda o: F.mse_loss(o, o.roll(1, 0)),
    "batch norm": lambda o: F.batch_norm(o, None, None, training=True).square().sum(1).mean(),
    "layer norm, transposed": lambda o: F.layer_norm(o.T, (4,)).square().sum(0).mean(),
    "cumulative logsumexp": lambda o: o.logcumsumexp(0).sum(1).mean(),
    "cumulative maximum": lambda o: o.cummax(0)[0].sum(1).mean(),
    "sorted": lambda o: (o.sort(0)[0] * torch.arange(1.0, 5)[:, None]).sum(1).mean(),
    "largest of two": lambda o: torch.maximum(o, o.flip(0)).sum(1).mean(),
    "attention": lambda o: F.scaled_dot_product_attention(o[None], o[None], o[None])[0].sum(1).mean(),
    "convolution": lambda o: F.avg_pool1d(o.T[None], 3, 1, 1)[0].T.square().sum(1).mean(),
    "a function of the user's": lambda o: TimesAll.apply(o).sum(1).mean(),
    "singular values": lambda o: torch.linalg.svdvals(o).mean(),
    "median": lambda o: o.median(0)[0].mean(),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("square", [False, True], ids=["", "as many classes"])
@pytest.mark.parametrize("name", MIXED)
def test_a_loss_in_which_samples_meet_is_refused(name, square):
    parts = examine(lambda d: MIXED[name](d.out[:, 0, :4] if square else d.logits))
    assert parts.verdict in {"wrong", "unverified"}, parts


APART = {
    "halves": lambda d: (d.error[:2].sum() + d.error[2:].sum()) / d.size,
    "chunks": lambda d: torch.cat([part.square().mean((1, 2)) for part in d.out.chunk(2)]).mean(),
    "a loop": lambda d: sum(F.cross_entropy(d.out[i], d.tokens[i]) for i in range(d.size)) / d.size,
    "stacked": lambda d: torch.stack([d.error[i].mean() for i in range(d.size)]).mean(),
    "flipped": lambda d: d.out.flip(0).square().mean(),
    "permuted": lambda d: d.out[[2, 0, 3, 1]].square().mean(),
    "transposed": lambda d: d.out[:, :4, :4].permute(2, 1, 0).square().mean(),
    "vmap": lambda d: torch.vmap(lambda row: row.logsumexp(0))(d.logits).mean(),
    "one pair of each": lambda d: F.pairwise_distance(d.out, d.target).mean(),
    "einsum": lambda d: torch.einsum("btv,btv->b", d.out, d.out).mean(),
    "as many classes": lambda d: d.out[:, 0, :4].log_softmax(1)[:, 0].mean(),
}


@pytest.mark.sampled(22)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", APART)
def test_a_loss_in_which_samples_stay_apart_is_right(name, dtype):
    data = Data()
    data.out, data.target = data.out.to(dtype), data.target.to(dtype)
    assert examine(APART[name], data=data).verdict == "right"


UNVERIFIED = {
    "custom function of the loss": (lambda d: Identity.apply(d.error.mean()), "IdentityBackward .* not known"),
    "neighbours": (lambda d: (d.out[1:] * d.out[:-1]).mean(), r"\[3, 5, 7\], from Mul.* not show which of the 4"),
    "distances of all pairs": (lambda d: F.pdist(d.out.flatten(1)).mean(), "PdistBackward0 .* not known"),
    "singular values": (lambda d: torch.linalg.svdvals(d.out.flatten(1).T[:3]).mean(), "Svd.* not known"),
}


@pytest.mark.parametrize("name", UNVERIFIED)
def test_what_cannot_be_verified_is_refused(name):
    loss, words = UNVERIFIED[name]
    parts = examine(loss)
    assert parts.verdict == "unverified", parts
    with pytest.raises(AssertionError, match=f"cannot verify .*: .*{words}.*Nothing was clipped"):
        raise AssertionError(explain(parts, "mean"))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_said(name):
    loss, words = UNKNOWN[name]
    parts = examine(loss)
    assert parts.verdict == "unknown", parts
    with pytest.raises(AssertionError, match=f"cannot verify .*: .*{words}"):
        raise AssertionError(explain(parts, "mean"))


DIVIDED = {
    "not": (lambda d: d.error.mean(), 1),
    "a weight of the user's": (lambda d: 0.5 * d.error.mean(), 1),
    "by the accumulation": (lambda d: F.cross_entropy(d.logits, d.classes) / 8, 8),
    "by as many as there are samples": (lambda d: d.error.mean() / d.size, B),
    "twice": (lambda d: d.error.mean() / 2 / 3, 6),
    "of two terms": (lambda d: (d.error.mean() + d.out.abs().mean()) / 2, 2),
    "one term": (lambda d: d.error.mean() / 2 + d.out.abs().mean(), 1),
    "a sum, by its number": (lambda d: d.error.sum() / d.size / 2, 2),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_the_whole_loss_is_divided_by_is_told(name):
    loss, number = DIVIDED[name]
    parts = examine(loss)
    assert (parts.verdict, parts.divided_by) == ("right", pytest.approx(number)), parts


@pytest.mark.parametrize("loss", [RIGHT["mse"], RIGHT["sum over the batch size"], WRONG["sum"][0]])
def test_a_scaled_loss_is_judged_as_without(loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # B by chance
    plain, scaled = examine(loss), examine(lambda d: scaler.scale(loss(d)), scale=4.0)
    assert (plain.verdict, plain.divided_by) == (scaled.verdict, scaled.divided_by)
    torch.testing.assert_close(plain.factors, scaled.factors)


def on_default_device(call):
    with torch.device("cpu"):
        return call()


ROOTS = {
    "torch.autograd.backward": lambda loss: torch.autograd.backward(loss),  # as it is then
    "a list": lambda loss: torch.autograd.backward([loss]),
    "a list, with a default device": lambda loss: on_default_device(lambda: torch.autograd.backward([loss])),
    "a tuple, with None": lambda loss: torch.autograd.backward((loss,), (None,)),
    "by name": lambda loss: torch.autograd.backward(tensors=loss, grad_tensors=None),
    "a gradient": lambda loss: loss.backward(torch.ones(())),
    "a gradient by name": lambda loss: loss.backward(gradient=torch.ones(()), retain_graph=True),
    "several": lambda loss: torch.autograd.backward([loss * 0.5, loss * 0.5]),
}


@pytest.mark.parametrize("name", ROOTS)
def test_every_way_to_call_backward_is_seen(name):
    torch.testing.assert_close(examine(RIGHT["mse"], backward=ROOTS[name]).factors, torch.ones(B).double())
    assert examine(WRONG["sum"][0], backward=ROOTS[name]).verdict == "wrong"


def test_losses_of_each_sample_with_a_gradient():
    rows = lambda d: d.error.mean((1, 2))  # noqa: E731
    assert examine(rows, backward=lambda loss: loss.backward(torch.full((B,), 1 / B))).verdict == "right"
    assert examine(rows, "sum", backward=lambda loss: loss.backward(torch.ones(B))).verdict == "right"
    summed = examine(rows, backward=lambda loss: loss.backward(torch.ones(B)))
    assert (summed.verdict, summed.factors.tolist()) == ("wrong", ALL)
    weights = WEIGHTS / WEIGHTS.sum()
    torch.testing.assert_close(
        examine(rows, backward=lambda loss: loss.backward(weights)).factors, torch.tensor(NORMALIZED).double()
    )


def test_a_graph_that_is_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr(loss_graph, "_TOO_MANY", 20)
    assert examine(lambda d: sum(d.error.mean() for _ in range(5))).verdict == "right"
    parts = examine(lambda d: sum(d.error.mean() for _ in range(9)))
    assert (parts.verdict, parts.reason) == ("unverified", "there are more than 20 operations between loss and samples")


def test_of_one_sample_a_mean_is_the_sum():
    for loss in (WRONG["sum"][0], RIGHT["mse"], RIGHT["cross entropy of tokens"]):
        for reduction in ("mean", "sum"):
            assert examine(loss, reduction, size=1).verdict == "right"
    assert "divided by 10, which is neither" in examine(WRONG["sum over a constant"][0], size=1).reason


def test_samples_in_the_second_dimension():
    def found(loss, batch_first):
        data, _ = Data().tapped()
        parts = []
        with looking(lambda roots: parts.append(loss_parts(roots, returned(data.out, batch_first), "mean"))):
            loss(data).backward()
        return parts[0]

    def flattened(d):
        return F.cross_entropy(d.out.transpose(0, 1).flatten(0, 1), d.labels.T.flatten())

    torch.testing.assert_close(found(flattened, False).factors, torch.tensor(UNEQUAL).double())
    assert found(lambda d: d.error.transpose(0, 1).mean(), False).verdict == "right"
    unequal = lambda d: (d.error.mean(2) * d.mask).T.sum() / d.mask.sum()  # noqa: E731
    torch.testing.assert_close(found(unequal, False).factors, torch.tensor(UNEQUAL).double())


@pytest.mark.parametrize("length", [B, 7])
def test_samples_in_the_second_dimension_of_what_the_module_returns(length):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(x).transpose(0, 1)

    torch.manual_seed(0)
    model = Turning().double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    x = torch.randn(B, length, 2, dtype=torch.float64)
    model(x).log_softmax(0).square().sum((0, 2)).mean().backward()  # over time, within each sample
    clipper.clip_and_accumulate()
    model(x).square().sum((0, 2)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.discard()
    weights = torch.arange(1.0, B + 1, dtype=torch.float64)
    (model(x).square().mean((0, 2)) * weights / weights.sum()).sum().backward()
    clipper.detach()


def test_a_loss_computed_within_the_module():
    def inside(d):
        [loss] = tap(lambda saved, grads, task: None, [], torch.zeros((), requires_grad=True), [d.error.mean() / 2])
        return loss

    parts = examine(inside)
    assert (parts.verdict, parts.divided_by) == ("right", 2)


def test_a_checkpointed_loss():
    def loss(d):
        return checkpoint(lambda out: F.mse_loss(out, d.target, reduction="sum") / d.size, d.out, use_reentrant=False)

    assert examine(loss).verdict == "right"


def test_a_reentrant_checkpoint_is_not_known_and_its_own_backward_is_not_a_loss():
    def loss(d):
        return checkpoint(lambda out: F.mse_loss(out, d.target), d.out, use_reentrant=True)

    parts = examine(loss)
    assert (parts.verdict, "CheckpointFunctionBackward" in parts.reason) == ("unverified", True)


def test_a_freed_graph_is_not_read():
    data, _ = Data().tapped()
    loss = F.cross_entropy(data.logits, data.classes)
    loss.backward()
    found = []
    with (
        pytest.raises(RuntimeError, match="second time"),
        looking(lambda roots: found.append(loss_parts(roots, returned(data.out), "mean"))),
    ):
        loss.backward()
    [parts] = found
    assert (parts.verdict, "cannot be read" in parts.reason) == ("unverified", True)


def test_gradients_are_those_without_looking():
    plain, seen = Data().tapped(), Data().tapped()
    RIGHT["distillation"](plain[0]).backward()
    with looking(lambda roots: loss_parts(roots, returned(seen[0].out), "mean")):
        RIGHT["distillation"](seen[0]).backward()
    assert torch.equal(plain[1].grad, seen[1].grad)


def scalar() -> Tensor:
    return torch.ones((), requires_grad=True) * 2


def test_calls_that_backward_refuses_are_left_to_it():
    seen = []
    with looking(seen.append):
        for call, words in [
            (lambda: torch.ones(2, requires_grad=True).backward(), "scalar outputs"),
            (lambda: torch.zeros(()).backward(), "does not require grad"),
        ]:
            with pytest.raises(RuntimeError, match=words):
                call()
    assert seen == []


def test_backward_is_replaced_only_between_start_and_stop():
    original, seen = torch.autograd.backward, []
    roots = BackwardRoots(seen.append)
    scalar().backward()
    roots.start()
    roots.start()
    scalar().backward()
    roots.stop()
    roots.stop()
    assert torch.autograd.backward is original
    scalar().backward()
    roots.start()
    scalar().backward()
    roots.stop()
    assert len(seen) == 2
    assert torch.autograd.backward is original


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_at_once_end_in_any_order(order):
    original, seen = torch.autograd.backward, ([], [])
    both = [BackwardRoots(seen[0].append), BackwardRoots(seen[1].append)]
    for roots in both:
        roots.start()
    scalar().backward()
    both[order[0]].stop()
    scalar().backward()
    both[order[1]].stop()
    scalar().backward()
    assert [len(seen[k]) for k in order] == [1, 2]
    torch.autograd.backward = original


def test_beside_another_replacement_in_any_order(monkeypatch):
    calls, seen, original = [], [], torch.autograd.backward

    def other(*args, **kwargs):
        calls.append(args)
        return theirs(*args, **kwargs)

    roots = BackwardRoots(seen.append)
    roots.start()
    theirs = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", other)
    scalar().backward()
    roots.stop()
    assert torch.autograd.backward is other
    scalar().backward()
    assert (len(seen), len(calls)) == (1, 2)
    monkeypatch.setattr(torch.autograd, "backward", original)


def test_beside_a_watch():
    seen, losses = [], []
    listener = Listener()
    listener.on_backward = lambda tensors, weights: losses.append(tensors)
    with looking(seen.append), listening(listener):
        scalar().backward()
    with listening(listener), looking(seen.append):
        scalar().backward()
    assert (len(seen), len(losses)) == (2, 2)


def test_other_threads_are_not_seen():
    seen = []
    with looking(seen.append):
        thread = threading.Thread(target=lambda: scalar().backward())
        thread.start()
        thread.join()
        assert seen == []
        scalar().backward()
    assert len(seen) == 1


ROWS = {
    "squares": lambda d: d.error.mean(2),
    "absolute": lambda d: d.out.abs().sum(2),
    "labels": lambda d: F.cross_entropy(d.out.mT, d.tokens, reduction="none"),
    "huber": lambda d: F.huber_loss(d.out, d.target, reduction="none").mean(2),
    "binary": lambda d: F.binary_cross_entropy_with_logits(d.out, d.target.sigmoid(), reduction="none").sum(2),
    "log-probability": lambda d: -d.out.log_softmax(2).gather(2, d.tokens[..., None]).squeeze(2),
}
MASKS = {
    "all": lambda d: torch.ones_like(d.mask),
    "unequal": lambda d: d.mask,
    "as many": lambda d: d.even != -100,
}
REDUCTIONS = {
    "mean": lambda rows, mask: (rows * mask).mean(),
    "sum": lambda rows, mask: (rows * mask).sum(),
    "sum over samples": lambda rows, mask: (rows * mask).sum() / len(rows),
    "sum over elements": lambda rows, mask: (rows * mask).sum() / rows.numel(),
    "sum over the mask": lambda rows, mask: (rows * mask).sum() / mask.sum(),
    "normalized mask": lambda rows, mask: (rows * (mask / mask.sum())).sum(),
    "chosen, mean": lambda rows, mask: rows[mask].mean(),
    "chosen, sum": lambda rows, mask: rows.masked_select(mask).sum(),
    "own mean": lambda rows, mask: ((rows * mask).sum(1) / mask.sum(1)).mean(),
    "own mean, sum": lambda rows, mask: torch.where(mask, rows, 0).sum(1).div(mask.sum(1)).sum(),
    "sum, mean": lambda rows, mask: rows.masked_fill(~mask, 0).sum(1).mean(),
    "mean, sum": lambda rows, mask: (rows * mask).mean(0).sum(),
    "moved": lambda rows, mask: (rows * mask).T.reshape(-1).unsqueeze(0).mean(1).squeeze(),
    "mean of means": lambda rows, mask: (rows * mask).mean(1, keepdim=True).mean(),
}
CHANGES = {
    "as it is": lambda loss: loss,
    "times 0.7": lambda loss: 0.7 * loss,
    "negative": lambda loss: -(2.5 * loss),
    "over 3 and times 3": lambda loss: loss * 1.5 + loss * 0.5,
    "cast": lambda loss: loss.float().double(),
    "stacked": lambda loss: torch.stack([loss, loss]).sum(),
    "with a constant": lambda loss: 1 - loss.clone(),
}


def composed(rng: random.Random):
    """A loss of one term, put together at random."""
    rows, mask, reduce, change = (rng.choice(list(table.values())) for table in (ROWS, MASKS, REDUCTIONS, CHANGES))
    return lambda d: change(reduce(rows(d), mask(d)))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
def test_random_losses_against_the_loop(seed):
    loss = composed(random.Random(seed))
    expected = torch.tensor(factors_of_loop(loss, "mean"), dtype=torch.float64)
    parts = examine(loss)
    assert parts.verdict == ("right" if torch.allclose(expected, torch.ones_like(expected)) else "wrong"), parts
    torch.testing.assert_close(parts.factors, expected, rtol=1e-6, atol=0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(20))
def test_random_losses_of_two_terms_are_right_if_both_are(seed):
    rng = random.Random(seed)
    one, two = composed(rng), composed(rng)
    both = examine(lambda d: one(d) + 0.3 * two(d)).verdict
    assert both == ("right" if {examine(one).verdict, examine(two).verdict} == {"right"} else "wrong")


def coupled(out: Tensor) -> Tensor:
    return (out * out.roll(1, 0)).square().mean()


def backward_of_an_edge(model, x):
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(coupled(model(x))))


def backward_looked_up_before(model, x):
    torch.autograd.backward([coupled(model(x)), model(x).square().mean()])


def backward_in_a_thread(model, x):
    thread = threading.Thread(target=coupled(model(x)).backward)
    thread.start()
    thread.join()


def a_view_changed_in_place(model, x):
    out = model(x).view(6)
    out.sub_(1)
    coupled(out).backward()


def an_output_changed_in_place(model, x):
    out = model(x).view(6)
    out.mul_(out.clone().roll(1, 0))
    out.square().mean().backward()


def very_many_calls(model, x):
    outs = [model(x) for _ in range(20)]
    (coupled(outs[0]) + sum(out.square().mean() for out in outs[1:])).backward()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "run",
    [
        backward_of_an_edge,
        backward_looked_up_before,
        backward_in_a_thread,
        a_view_changed_in_place,
        an_output_changed_in_place,
        very_many_calls,
    ],
)
@pytest.mark.parametrize("squeezed", [False, True])
def test_a_loss_that_was_not_looked_at_is_refused(run, squeezed):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
    model = nn.Sequential(*layers, nn.Flatten(0)) if squeezed else nn.Sequential(*layers)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    run(model, torch.randn(6, 4))
    with pytest.raises(UnsupportedGradientError, match=r"cannot verify that the loss|the loss is not"):
        clipper.clip_and_accumulate()
    clipper.detach()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.mse_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
def test_losses_that_reduce_each_sample_by_itself(loss, reduction):
    each = lambda d: torch.stack([loss(d.out[i], d.target[i].sigmoid(), reduction=reduction) for i in range(d.size)])  # noqa: E731
    assert examine(lambda d: each(d).mean()).verdict == "right"
    assert examine(lambda d: each(d).sum(), "sum").verdict == "right"


CHOSEN = {
    "aminmax": lambda r: r.aminmax().max,
    "scatter_reduce": lambda r: torch.zeros(1).to(r).scatter_reduce(0, torch.zeros(len(r)).long(), r, "amax")[0],
    "index_reduce": lambda r: torch.zeros(1).to(r).index_reduce(0, torch.zeros(len(r)).long(), r, "amax")[0],
    "segment_reduce": lambda r: torch.segment_reduce(r, "max", lengths=torch.tensor([len(r)]))[0],
    "dist": lambda r: torch.dist(r, torch.zeros_like(r), math.inf),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", CHOSEN)
def test_the_largest_of_the_batch_is_refused(name):
    rows = torch.ones(2, requires_grad=True)
    try:
        CHOSEN[name](rows).backward()
    except RuntimeError as error:
        pytest.skip(f"not in torch {torch.__version__}: {error}")
    for loss in (
        lambda d: CHOSEN[name](d.error.sum((1, 2))) / d.size,
        lambda d: d.error.mean() + CHOSEN[name](d.error.sum((1, 2))) / d.size,
    ):
        assert examine(loss).verdict in {"wrong", "unverified"}


def not_finite(out, targets):
    return coupled(out) * targets.sum()


def only_pairs_that_are_near(out, targets):
    return (out * out.roll(1, 0) * targets).square().mean()


@pytest.mark.parametrize(
    ("loss", "first"),
    [
        (not_finite, torch.full((6, 1), math.nan)),
        (not_finite, torch.full((6, 1), math.inf)),
        (only_pairs_that_are_near, torch.full((6, 1), math.nan)),
        (only_pairs_that_are_near, torch.zeros(6, 1)),
    ],
    ids=["NaN", "inf", "NaN in rows", "zero"],
)
def test_a_batch_that_shows_nothing_is_no_verification(loss, first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    x = torch.randn(6, 4)

    def steps():
        for targets in (first, torch.ones(6, 1)):
            loss(model(x), targets).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            model.zero_grad()

    with pytest.raises(UnsupportedGradientError, match=r"loss is not|does not show"):
        steps()
    clipper.detach()


class OnlyFinite(nn.Module):
    """Counts NaN and inf as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.nan_to_num(0.0, 0.0, 0.0) - x[x.isfinite().all(1)].mean(0))


class InverseOfZero(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / torch.zeros_like(input[:, :1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_is_tried_out_with_samples_that_are_finite(bad):
    x = torch.randn(6, 4)
    x[0], x[2, 1] = bad, bad
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    model(x).square().mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.statistics is not None
    assert int(clipper.statistics.nonfinite) == 2
    model = OnlyFinite()
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    with pytest.raises(
        UnsupportedGradientError, match=r"not the gradient of the sample alone|something else|another way"
    ):
        model(x)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_batch_without_two_finite_samples_tells_nothing_of_a_model(size):
    x = torch.randn(size, 4)
    x[0 if size < 6 else slice(1, None)] = math.nan
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    with pytest.raises(UnsupportedGradientError, match=r"only . of the . samples that Sequential was called with"):
        model(x)
    model(torch.randn(size, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_model_that_makes_inf_of_finite_samples_tells_nothing():
    model = InverseOfZero(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    with pytest.raises(UnsupportedGradientError, match="not finite, though its inputs are"):
        model(torch.randn(6, 4))


LOSSES = {
    "mean": lambda out: out.square().mean(),
    "sum, divided": lambda out: out.square().sum() / len(out),
    "log-softmax": lambda out: -out.log_softmax(1)[:, 0].mean(),
    "two terms": lambda out: out.square().mean() + out.abs().sum(1).mean(),
    "each by itself": lambda out: torch.stack([row.square().sum() for row in out]).mean(),
}


def trained(clipper, model, loss, x):
    loss(model(x)).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("first", LOSSES)
@pytest.mark.parametrize(
    "second",
    [
        coupled,
        lambda out: -out.log_softmax(0)[:, 0].mean(),  # as the one over classes, but for the dimension
        lambda out: out.square().sum(),
        lambda out: (out - out.mean(0)).square().mean(),
        lambda out: out.square().mean() + 1e-3 * (out[0] * out[1]).sum(),
    ],
)
def test_another_loss_in_a_later_step_is_looked_at_too(first, second):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    for _ in range(2):
        trained(clipper, model, LOSSES[first], torch.randn(6, 4))
    with pytest.raises(UnsupportedGradientError, match=r"the loss is (not )?the mean"):
        trained(clipper, model, second, torch.randn(6, 4))
    clipper.discard()
    trained(clipper, model, LOSSES[first], torch.randn(6, 4))


def test_losses_that_take_turns_are_each_read_once(monkeypatch):
    read = []  # what a term's rows belong to is found once; its numbers are counted again where they change
    original = Outputs.are_separate
    monkeypatch.setattr(Outputs, "are_separate", lambda *args: read.append(1) or original(*args))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    for step in range(10):
        if step % 3 == 2:
            model(torch.randn(6, 4))  # to be looked at, without a backward
        trained(clipper, model, [*LOSSES.values()][step % len(LOSSES)], torch.randn(6, 4))
    before = len(read)
    assert before > 0
    for kind in LOSSES.values():
        trained(clipper, model, kind, torch.randn(6, 4))
    assert len(read) == before
    for factor in (0.5, 0.25, 3.0):  # a schedule is not another loss
        loss = lambda out, factor=factor: clipper.constant(factor) * out.square().mean()  # noqa: E731
        trained(clipper, model, loss, torch.randn(6, 4))
    scaled = len(read)
    assert before < scaled
    trained(clipper, model, lambda out: clipper.constant(7.0) * out.square().mean(), torch.randn(6, 4))
    for _ in range(4):  # nor is the same after many calls that nothing came of
        for _ in range(7):
            model(torch.randn(6, 4))
        trained(clipper, model, LOSSES["mean"], torch.randn(6, 4))
    assert len(read) == scaled


def test_the_output_itself_and_another_gradient_of_it():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    for _ in range(3):
        model(torch.randn(6, 4)).backward(torch.full((6,), 1 / 6))
        clipper.clip_and_accumulate()
        clipper.pre_step()
    with pytest.raises(UnsupportedGradientError, match="the loss is not the mean"):
        trained(clipper, model, lambda out: (out * out.flip(0)).mean(), torch.randn(6, 4))
    clipper.detach()


W = torch.tensor([1.0, 2.0, 3.0, 4.0])
LOOK_ALIKE = {
    "which side": (lambda o: o.square().sum(1).mean() / 5, lambda o: 5 / o.square().sum(1).mean()),
    "class weights": (
        lambda o: F.cross_entropy(o, torch.arange(4)),
        lambda o: F.cross_entropy(o, torch.arange(4), weight=W),
    ),
    "a kept dimension": (
        lambda o: (o.mean(1) - o.amax(1)).square().mean(),
        lambda o: (o.mean(1, keepdim=True) - o.amax(1)).square().mean(),
    ),
    "views": (
        lambda o: (o.view(4, 1, 4) * o.view(4, 1, 4)).mean(),
        lambda o: (o.view(4, 1, 4) * o.view(1, 4, 4)).mean(),
    ),
    "rows of a view": (lambda o: o.view(4, 4).logsumexp(1).mean(), lambda o: o.view(2, 8).logsumexp(1).mean()),
    "transposed": (lambda o: (o * o.transpose(1, 1)).mean(), lambda o: (o * o.transpose(0, 1)).mean()),
    "rolled": (lambda o: (o * o.roll(1, 1)).mean(), lambda o: (o * o.roll(1, 0)).mean()),
    "flipped": (lambda o: (o * o.flip(1)).mean(), lambda o: (o * o.flip(0)).mean()),
    "permuted rows": (
        lambda o: (o * o[torch.tensor([0, 1, 2, 3])]).mean(),
        lambda o: (o * o[torch.tensor([1, 2, 3, 0])]).mean(),
    ),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LOOK_ALIKE)
def test_a_later_loss_that_looks_alike_is_read(name):
    torch.manual_seed(0)
    right, wrong = LOOK_ALIKE[name]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    for _ in range(2):
        trained(clipper, model, right, torch.randn(4, 4))
    with pytest.raises(UnsupportedGradientError, match=r"the loss is (not )?the mean"):
        trained(clipper, model, wrong, torch.randn(4, 4))
    clipper.detach()


def test_a_later_backward_with_another_gradient_of_the_outputs_is_read():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.1))
    model(torch.randn(6, 4)).backward(torch.full((6,), 1 / 6))
    clipper.clip_and_accumulate()
    model(torch.randn(6, 4)).backward(torch.ones(6))
    with pytest.raises(UnsupportedGradientError, match="the loss is not the mean"):
        clipper.clip_and_accumulate()
    clipper.detach()


@pytest.mark.parametrize("size", [2, B])
def test_columns_that_are_chosen_along_the_last_dimension_are_the_samples_own(size):
    columns = torch.tensor([2, 0, 1])
    parts = examine(lambda d: d.out.index_select(-1, columns).square().mean((1, 2)).mean(), size=size)
    assert parts.verdict == "right"
    torch.testing.assert_close(parts.factors, torch.ones(size, dtype=torch.float64))

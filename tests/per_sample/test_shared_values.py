"""What all samples share in a loss is the same in each batch, or the user has said that it is no statistic of it."""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, UnsupportedGradientError

V = 3


def clipper_of(**options):
    torch.manual_seed(0)
    return gg.PerSampleGradientClipper(nn.Linear(4, V).double(), gg.FlatNormClipper(1e9), mode="exact", **options)


class Batch:
    """Targets of ``size`` samples: ``y`` numbers, ``labels`` classes."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        self.y = torch.rand(size, V, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, V, (size,), generator=generator)


def step(clipper, loss, batch):
    clipper.module.zero_grad()
    loss(clipper, clipper.module(batch.x), batch).backward()
    clipper.clip_and_accumulate()
    found = clipper.per_sample_gradients()
    clipper.pre_step()
    return found


def bound(loss_fn, labels=False):
    return lambda clipper, out, b: clipper.per_sample_losses(loss_fn(b), out, b.labels if labels else b.y).mean()


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, out, y):
        return self.scale * F.mse_loss(out, y)


def scaled(scale, out, y):
    return scale * F.mse_loss(out, y)


def closing_over(scale):
    return lambda out, y: scale * F.mse_loss(out, y)


def with_a_default(mean):
    def loss(out, y, scale=mean):
        return scale * F.mse_loss(out, y)

    return loss


def running_sums(out):
    return out.cumsum(1)


def largest(out):
    return out.max(1).values


def sorted_values(out):
    return out.sort(1).values


BEHIND = (F.softplus, F.gelu, F.silu, F.mish, F.logsigmoid, F.tanhshrink, torch.fliplr,
          running_sums, largest, sorted_values)  # fmt: skip
"""Functions that keep no result of theirs."""

torch.manual_seed(1)
CRITIC = nn.Linear(4, V).double()
"""A module that the clipper does not know; its parameters are trained elsewhere, so its results need a gradient."""

CLASSES = functools.partial(F.one_hot, num_classes=V)

OF_THE_BATCH = {
    "means beside outputs": lambda c, out, b: torch.cat([out, b.y.mean(0).expand_as(out)], 1).logsumexp(1).mean(),
    "means of another net in a stack": lambda c, out, b: torch.stack(
        [out, CRITIC(b.x).mean(0).expand_as(out)]
    ).tanh().logsumexp(0).mean(),
    "a spread of another net as heat": lambda c, out, b: F.cross_entropy(out / CRITIC(b.x).std(), b.labels),
    "weights of columns of another net": lambda c, out, b: (out.square() * CRITIC(b.x).abs().mean(0)).mean(),
    "prototypes of another net": lambda c, out, b: F.cross_entropy(
        out @ (CLASSES(b.labels).double().T @ CRITIC(b.x)).T, b.labels
    ),
    "a spread of inputs that need a gradient": lambda c, out, b: F.cross_entropy(
        out / b.x.clone().requires_grad_().std(), b.labels
    ),
    "a bound of another net": lambda c, out, b: torch.minimum(out, CRITIC(b.x).mean(0)).square().mean(),
    "weights of labels": lambda c, out, b: F.binary_cross_entropy_with_logits(out, b.y.round(), pos_weight=b.y.mean(0)),
    "weights of classes": lambda c, out, b: F.cross_entropy(out, b.labels, weight=b.y.mean(0), reduction="none").mean(),
    "weights of margins": lambda c, out, b: F.multi_margin_loss(out, b.labels, weight=b.y.mean(0)),
    "a temperature": lambda c, out, b: F.cross_entropy(out / float(b.y.mean()), b.labels),
    "a temperature in a loop": lambda c, out, b: torch.stack(
        [F.cross_entropy(o[None] / float(b.y.mean()), i[None]) for o, i in zip(out, b.labels, strict=True)]
    ).mean(),
    "a threshold": lambda c, out, b: F.huber_loss(out, b.y, delta=float(b.y.mean())),
    "a smooth threshold": lambda c, out, b: F.smooth_l1_loss(out, b.y, beta=float(b.y.mean())),
    "an upper bound": lambda c, out, b: (out - b.y).square().clamp(max=float(b.y.mean())).mean(),
    "weights of columns": lambda c, out, b: ((out - b.y).square() * b.y.std(0)).mean(),
    "a matrix": lambda c, out, b: (out @ (b.y.T @ b.y)).square().mean(),
    "means of columns": lambda c, out, b: (out - b.y.mean(0)).square().mean(),
    "means of columns in a loop": lambda c, out, b: sum((o - b.y.mean(0)).square().sum() for o in out) / len(out),
    "means of columns in a loop over rows": lambda c, out, b: torch.cat(
        [(o[None] - b.y.mean(0)).exp() for o in out]
    ).mean(),
    "before a choice in a loop": lambda c, out, b: torch.stack(
        [(o - b.y.mean(0)).gather(0, y.argsort()[:2]).sum().square() for o, y in zip(out, b.y, strict=True)]
    ).mean(),
    "a mean": lambda c, out, b: (out - float(b.y.mean())).abs().mean(),
    "means of columns, selected": lambda c, out, b: (
        (out.sin() - b.y.mean(0)).masked_select(b.y < 2).view_as(out).exp().mean()
    ),
    "logits": lambda c, out, b: torch.sigmoid(out - b.y.mean(0)).mean(),
    "a threshold number": lambda c, out, b: F.relu(out + float(b.y.mean())).mean(),
    "a number in a ratio": lambda c, out, b: torch.exp(out - float(b.y.mean())).mean(),
    "a number in hyperbolic tangents": lambda c, out, b: torch.tanh(out - float(b.y.mean())).mean(),
    **{
        f"a number behind {function.__name__}": functools.partial(
            lambda function, c, out, b: (function(out) - float(b.y.mean())).square().mean(), function
        )
        for function in BEHIND
    },
    "a baseline number": lambda c, out, b: (
        F.cross_entropy(out, b.labels, reduction="none") - float(b.y.mean())
    ).square().mean(),
    "beside labels": lambda c, out, b: -F.logsigmoid((b.y - 0.5).sign() * (out - b.y.mean(0))).mean(),
    "before weights of samples": lambda c, out, b: ((out - b.y.mean(0)) * b.x[:, :1]).tanh().mean(),
    "before divisors of samples": lambda c, out, b: ((out - b.y.mean(0)) / (1 + b.y)).tanh().mean(),
    "before a mask": lambda c, out, b: (out - b.y.mean(0)).masked_fill(b.y > 0.7, 0.0).square().mean(),
    "before columns of samples": lambda c, out, b: torch.cat([out - b.y.mean(0), b.y], -1).logsumexp(-1).mean(),
    "a number beside labels": lambda c, out, b: F.softplus((b.y - 0.5) * (out.exp() - b.y.mean().item())).mean(),
    "a number before a sum": lambda c, out, b: ((out - b.y.mean()).sum(-1) * b.x[:, 0]).tanh().mean(),
    "a number before a cast": lambda c, out, b: ((out - b.y.mean()) * b.y).float().double().tanh().mean(),
    "a smooth maximum": lambda c, out, b: torch.logaddexp(out, b.y.mean(0)).mean(),
    "an angle": lambda c, out, b: torch.atan2(out, b.y.mean(0)).mean(),
    "entropy": lambda c, out, b: torch.xlogy(b.y.mean(0), out.exp()).square().mean(),
    "a number as slope": lambda c, out, b: F.leaky_relu(out, float(b.y.mean())).mean(),
    "a number as elu's": lambda c, out, b: F.elu(out, float(b.y.mean())).mean(),
    "a number as shrinkage": lambda c, out, b: F.softshrink(out, float(b.y.mean())).square().mean(),
    "a number as bound": lambda c, out, b: F.hardtanh(out, -0.1, float(b.y.mean())).square().mean(),
    "a prior of logits": lambda c, out, b: F.cross_entropy(out - b.y.mean(0).log(), b.labels),
    "columns": lambda c, out, b: (out - b.y)[:, b.y.mean(0).argsort()[:2]].square().mean(),
    "columns by gather": lambda c, out, b: (
        out.exp().gather(1, b.y.mean(0).argsort()[:2].expand(len(out), 2)).square().mean()
    ),
    "all columns by gather": lambda c, out, b: (
        out.gather(1, b.y.mean(0).argsort().expand_as(out)) * b.y.sqrt()
    ).tanh().mean(),
    "a column by gather and one of each": lambda c, out, b: F.softplus(
        out.gather(1, b.labels[:, None]) - out.gather(1, b.y.mean(0).argsort()[:1].expand(len(out), 1))
    ).mean(),
    "an entry": lambda c, out, b: out[torch.arange(len(out)), b.y.mean(0).argsort()[0].expand(len(out))].exp().mean(),
    "a number of places to roll": lambda c, out, b: (out.roll(int(b.y.mean(0).argsort()[0]), 1) * b.y).exp().mean(),
    "bound weights": bound(lambda b: functools.partial(F.cross_entropy, weight=b.y.mean(0)), labels=True),
    "a module's weights": bound(lambda b: nn.BCEWithLogitsLoss(pos_weight=b.y.mean(0))),
    "a bound number": bound(lambda b: functools.partial(scaled, float(b.y.mean()))),
    "a number that is closed over": bound(lambda b: closing_over(b.y.mean().item())),
    "a default": bound(lambda b: with_a_default(b.y.mean().item())),
    "a module's number": bound(lambda b: Scaled(float(b.y.mean()))),
    "a method's number": bound(lambda b: Scaled(float(b.y.mean())).forward),
}  # fmt: skip


@pytest.mark.sampled(28)
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_statistic_of_the_batch_is_refused_as_soon_as_it_changes(name):
    clipper, loss = clipper_of(), OF_THE_BATCH[name]
    step(clipper, loss, Batch(5, 0))
    for size, seed in ((5, 1), (6, 2), (4, 3)):
        with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, has changed"):
            step(clipper, loss, Batch(size, seed))
        clipper.discard()
    step(clipper, loss, Batch(5, 0))


PRIVATE = [name for name in OF_THE_BATCH if "number" not in name and "temperature" not in name and name not in
           ("a threshold", "a smooth threshold", "an upper bound", "a default", "a mean")]  # fmt: skip


@pytest.mark.parametrize("name", PRIVATE)
def test_in_private_training_a_shared_tensor_is_declared_or_refused(name):
    clipper = clipper_of()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, may be another"):
        step(clipper, OF_THE_BATCH[name], Batch(5, 0))


LENGTHS = {
    "up to the longest": lambda out, n: out[:, :n],
    "from the longest on": lambda out, n: out[:, n:],
    "counted from the end": lambda out, n: out[:, n - 8 :],
    "but for some at the end": lambda out, n: out[:, : n - 8],
    "a part of two": lambda out, n: out.split([n, 8 - n], 1)[0],
    "a part of three": lambda out, n: out.split([n, 1, 7 - n], 1)[2],
    "a part of as many": lambda out, n: out.split(n, 1)[0],
    "a part of what was turned": lambda out, n: out.T.split(n)[0].T,
    "by narrow": lambda out, n: out.narrow(1, 0, n),
    "by tensor_split": lambda out, n: out.tensor_split([n], 1)[0],
    "inside": lambda out, n: out[:, 1:n],
    "a list of columns": lambda out, n: out[:, torch.arange(n)],
}
"""Parts of 8 values of each sample, up to a length that the batch decides."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("declared", [(), (3,), (0.5, 5)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
@pytest.mark.parametrize("name", LENGTHS)
def test_in_private_training_a_length_has_one_value_or_is_refused(name, reduction, declared, size):
    accepted = set()
    for length in range(2, 8):
        clipper = gg.PerSampleGradientClipper(
            nn.Linear(4, 8).double(), gg.FlatNormClipper(1.0), loss_reduction=reduction
        )
        clipper.refuse_ambiguous_losses()
        for number in declared:
            clipper.constant(number)
        rows = LENGTHS[name](clipper.module(Batch(size, 0).x), length).square()
        (
            rows.sum() if reduction == "sum" else rows.mean() if reduction == "token_mean" else rows.mean(1).mean()
        ).backward()
        with contextlib.suppress(UnsupportedGradientError):
            clipper.clip_and_accumulate()
            accepted.add(length)
    assert len(accepted) <= 1 + (3 in declared or 5 in declared)


YOURS = torch.tensor([0.5, 1.5, 0.7], dtype=torch.float64)
CONSTANT = {
    "weights of labels": lambda c, out, b: F.binary_cross_entropy_with_logits(
        out, b.y.round(), pos_weight=c.constant(YOURS)
    ),
    "a prior": lambda c, out, b: (out - c.constant(YOURS)).square().mean(),
    "a copy": lambda c, out, b: (out * c.constant(YOURS).clone()).square().mean(),
    "bound": lambda c, out, b: c.per_sample_losses(
        functools.partial(F.cross_entropy, weight=c.constant(YOURS)), out, b.labels
    ).mean(),
    "targets alone": lambda c, out, b: F.mse_loss(out, b.y),
    "a class of no output": lambda c, out, b: F.cross_entropy(
        torch.cat([out, torch.zeros(len(out), 1, dtype=torch.float64)], 1), b.labels
    ),
    "targets beside outputs": lambda c, out, b: torch.cat([out, b.y], 1).logsumexp(1).mean(),
    "targets by hand": lambda c, out, b: ((out - b.y) * b.y.sqrt()).abs().mean(),
    "columns by gather": lambda c, out, b: (
        out.gather(1, c.constant(torch.tensor([0, 2])).expand(len(out), 2)).square().mean()
    ),
    "a column of each": lambda c, out, b: F.smooth_l1_loss(out.gather(1, b.labels[:, None])[:, 0], b.y[:, 0]),
    "a list of columns": lambda c, out, b: out[:, c.constant(torch.tensor([0, 2]))].square().mean(1).mean(),
    "columns up to a place": lambda c, out, b: (
        out[:, : int(c.constant(2))].square().mean(1) + out[:, int(c.constant(2)) :].exp().mean(1)
    ).mean(),
    "samples in parts": lambda c, out, b: torch.cat(out.split(2)).square().mean(1).mean(),
    "columns in parts": lambda c, out, b: out.split([int(c.constant(1)), 2], 1)[1].square().mean(1).mean(),
    "a loop": lambda c, out, b: torch.stack(
        [F.mse_loss(o[:1] / float(y[1]), y[:1]) for o, y in zip(out, b.y, strict=True)]
    ).mean(),
    "a loop with weights of each": lambda c, out, b: torch.stack(
        [F.binary_cross_entropy_with_logits(o, y.round(), pos_weight=1 + y) for o, y in zip(out, b.y, strict=True)]
    ).mean(),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_declared_or_each_samples_own_is_taken(name, strict):
    clipper, loss = clipper_of(), CONSTANT[name]
    twin = copy.deepcopy(clipper.module)
    if strict:
        clipper.refuse_ambiguous_losses()
    for size, seed in ((5, 0), (5, 1), (1, 2), (6, 3)):
        batch = Batch(size, seed)
        found = torch.cat([rows.flatten(1) for rows in step(clipper, loss, batch).values()], 1)
        for i in range(size if name != "bound" else 0):
            one = Batch(1, 0)
            one.x, one.y, one.labels = batch.x[i : i + 1], batch.y[i : i + 1], batch.labels[i : i + 1]
            alone = torch.autograd.grad(loss(clipper, twin(one.x), one), [*twin.parameters()])
            torch.testing.assert_close(found[i], torch.cat([g.flatten() for g in alone]))


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (1, 1, 5)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["weights of labels", "a temperature", "a threshold", "a bound number", "a mean", "means of columns",
     "a number behind softplus"],
)  # fmt: skip
def test_a_batch_of_one_sample_gives_its_statistic_too(name, sizes):
    clipper = clipper_of()
    for number, size in enumerate(sizes[:-1]):
        step(clipper, OF_THE_BATCH[name], Batch(size, number))
    with pytest.raises(UnsupportedGradientError, match="which all samples share in the loss"):
        step(clipper, OF_THE_BATCH[name], Batch(sizes[-1], 7))


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4), (4, 1)], ids=str)
def test_as_many_samples_as_places_hide_no_statistic(sizes):
    clipper, loss = clipper_of(), lambda c, out, b: (F.relu(out).view(-1, 4, V) - b.y.mean(0)).square().mean()
    for number, size in enumerate(sizes):
        batch = Batch(size, number)
        batch.x = batch.x[:, None].expand(size, 4, 4) * torch.arange(1, 5).view(4, 1)
        if not number:
            step(clipper, loss, batch)
            continue
        with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, has changed"):
            step(clipper, loss, batch)


@pytest.mark.parametrize(
    "count",
    [len, lambda y: int((y > 0.5).sum()), lambda y: y.round().sum()],
    ids=["samples", "large ones", "a sum of whole numbers"],
)
@pytest.mark.parametrize("function", [torch.exp, F.elu, torch.sigmoid, F.softplus])
def test_a_count_of_the_batch_is_no_label_of_many_samples(function, count):
    clipper, loss = clipper_of(), lambda c, out, b: F.logsigmoid(function(out) - count(b.y) / 1).mean()
    step(clipper, loss, Batch(9, 0))
    with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, has changed"):
        step(clipper, loss, Batch(12, 5))


ADDED_UP = {
    "frequencies": lambda out, labels: out.mean(0) @ F.one_hot(labels, V).double().mean(0),
    "balance": lambda out, labels: (out.mean(0) * labels.bincount(minlength=V)).sum() / len(labels),
    "commonest class": lambda out, labels: out.mean(0)[int(labels.bincount(minlength=V).argmax())],
}


@pytest.mark.parametrize("name", ADDED_UP)
def test_as_many_samples_as_classes_hide_no_weights_of_what_was_added_up(name):
    clipper, loss = clipper_of(), lambda c, out, b: ADDED_UP[name](out.log_softmax(-1), b.labels)
    for size, label in ((V, 0), (2 * V, 1), (4, 2)):
        batch = Batch(size, label)
        batch.labels[:] = label
        if not label:
            step(clipper, loss, batch)
            continue
        with pytest.raises(UnsupportedGradientError, match="all samples"):
            step(clipper, loss, batch)
        clipper.discard()


def kept(out, b, value):
    return torch.where(b.x[:, :1] > 0, out.tanh(), out.tanh() - value).sin().mean()


@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_that_leaves_one_sample_hides_no_statistic(strict):
    clipper, loss = clipper_of(), lambda c, out, b: kept(out, b, b.y.mean(0))
    if strict:
        clipper.refuse_ambiguous_losses()
    first, second = Batch(2, 0), Batch(5, 1)
    first.x[:, 0], second.x[:, 0] = torch.tensor([-1.0, 1.0]), -1.0
    if not strict:
        step(clipper, loss, first)
    words = "may be another" if strict else "has changed"
    for batch in (first, second) if strict else (second,):
        with pytest.raises(UnsupportedGradientError, match=f"all samples share in the loss, {words}"):
            step(clipper, loss, batch)
        clipper.discard()


def test_what_a_mask_leaves_of_each_samples_own_is_taken():
    clipper = clipper_of()
    for size, seed in ((5, 0), (2, 1), (1, 2), (2, 3), (6, 4)):
        batch = Batch(size, seed)
        batch.x[1:, 0] = batch.x[1:, 0].abs() if size == 2 else batch.x[1:, 0]
        batch.x[0, 0] = -1.0
        found = step(clipper, lambda c, out, b: kept(out, b, b.y), batch)["weight"]
        out = clipper.module(batch.x).detach().requires_grad_()
        [rows] = torch.autograd.grad(kept(out, batch, batch.y) * size, out)
        torch.testing.assert_close(found, rows[:, :, None] * batch.x[:, None])


MIXED = {
    "soft Dice": lambda out, y, s: (
        1 - (2 * (out.sigmoid() * y).sum(1) + s) / (out.sigmoid().sum(1) + y.sum(1) + s)
    ).mean(),
    "soft Dice, weighed": lambda out, y, s: (
        1 - (2 * (out.sigmoid() * y).sum(1) + 1) / (out.sigmoid().sum(1) + s * y.sum(1) + 1)
    ).mean(),
    "Tversky": lambda out, y, s: (
        (out.sigmoid() * y).sum(1)
        / ((out.sigmoid() * y).sum(1) + 0.3 * (out.sigmoid() * (1 - y)).sum(1) + ((s - out.sigmoid()) * y).sum(1) + 1)
    ).mean(),
    "focal": lambda out, y, s: (
        (s - (out.sigmoid() * y + (1 - out.sigmoid()) * (1 - y))) ** 2
        * F.binary_cross_entropy_with_logits(out, y, reduction="none")
    ).mean(),
    "focal, inside": lambda out, y, s: (
        (1 - (out.sigmoid() * y + (s - out.sigmoid()) * (1 - y))) ** 2
        * F.binary_cross_entropy_with_logits(out, y, reduction="none")
    ).mean(),
    "columns": lambda out, y, s: ((out.sin() * y + y) + torch.stack([s, s.cos(), s.sin()])).square().mean(),
}  # fmt: skip
"""Losses to which several things are added, with a number s or what is made of it."""


FREQUENT = {
    "a class that no sample has": lambda out, labels: F.one_hot(labels % 2, V) * out.log_softmax(-1),
    "a dead unit": lambda out, labels: F.relu(out - torch.tensor([0.0, 0.0, 1e3]).double()),
    "a column that is left out": lambda out, labels: out.sin() * torch.tensor([1.0, 0.0, 1.0]).double(),
    "a class of each sample": lambda out, labels: F.one_hot(torch.arange(len(out)) % V, V) * out.log_softmax(-1),
}
"""Values that are added up over samples, of which columns have none, or one."""


def frequent(name):
    return lambda c, out, b: (FREQUENT[name](out, b.labels).mean(0) * b.y.mean(0)).sum()


@pytest.mark.parametrize("name", [name for name in FREQUENT if "each" not in name])
def test_a_column_that_shows_no_samples_proves_no_weights(name):
    plain, private = clipper_of(), clipper_of()
    private.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match="all samples share"):
        step(private, frequent(name), Batch(12, 0))
    step(plain, frequent(name), Batch(12, 0))
    for number, size in enumerate((9, 12, 12), 1):
        with pytest.raises(UnsupportedGradientError, match="all samples share"):
            step(plain, frequent(name), Batch(size, number))
        plain.discard()


@pytest.mark.parametrize("size", [2, V])
@pytest.mark.parametrize("name", FREQUENT)
def test_a_small_batch_with_a_sample_in_each_column_says_nothing_of_the_next(name, size):
    plain, words = clipper_of(), ""
    for number, samples in enumerate((size, size, size, 12, 12)):
        try:
            step(plain, frequent(name), Batch(samples, number))
        except UnsupportedGradientError as error:
            words = str(error)
            plain.discard()
    assert "all samples share" in words


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [1.0, 4.0, 9.0])
def test_a_prior_of_the_batch_before_log_softmax_is_seen(spread, dtype):
    """However far apart its numbers are: rounding before `log_softmax` is that of its inputs."""
    for size in (12, 60, 256):
        plain, private = (gg.PerSampleGradientClipper(nn.Linear(4, V).to(dtype), gg.FlatNormClipper(1.0)) for _ in "12")
        private.refuse_ambiguous_losses()

        def loss(c, out, b):
            prior = spread * torch.tensor([0.0, -1.0, -0.3]) * (1 + b.y.mean())
            return F.cross_entropy(out + prior.to(out.dtype), b.labels)

        batches = [Batch(size, number) for number in range(3)]
        for batch in batches:
            batch.x = batch.x.to(dtype)
        with pytest.raises(UnsupportedGradientError, match="all samples share"):
            step_of(private, loss, batches[0])
        step_of(plain, loss, batches[0])
        for batch in batches[1:]:
            with pytest.raises(UnsupportedGradientError, match="all samples share"):
                step_of(plain, loss, batch)
            plain.discard()


def step_of(clipper, loss, batch):
    clipper.module.zero_grad()
    loss(clipper, clipper.module(batch.x), batch).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()


@pytest.mark.parametrize("is_honest", [True, False], ids=["a number", "a statistic"])
@pytest.mark.parametrize("name", ["soft Dice", "soft Dice, weighed"])
def test_masks_of_one_area_have_no_history_of_their_own(name, is_honest):
    clipper = clipper_of()
    for number, area in enumerate((None, 0.0, 1.0, None, 1.0)):
        batch = Batch(12, number)
        s = 0.7 if is_honest else 0.7 + float(batch.y.mean()) / 10
        batch.y[:] = batch.y.round() if area is None else area
        if is_honest or not number or (name != "soft Dice" and area == 0.0):  # where s multiplies nothing
            step(clipper, lambda c, out, b, s=s: MIXED[name](out, b.y, s), batch)
            continue
        with pytest.raises(UnsupportedGradientError, match=r"graph shows|all samples share"):
            step(clipper, lambda c, out, b, s=s: MIXED[name](out, b.y, s), batch)
        clipper.discard()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("are_labels", [False, True], ids=["numbers", "labels"])
@pytest.mark.parametrize("name", ["soft Dice", "soft Dice, weighed", "Tversky", "focal", "focal, inside"])
def test_a_sum_is_explained_by_constants_that_the_graph_keeps(name, are_labels):
    clipper, s = clipper_of(), torch.tensor(0.7, dtype=torch.float64)
    for size, seed in ((12, 0), (5, 1), (2, 2), (1, 3), (7, 4)):
        batch = Batch(size, seed)
        batch.y = batch.y.round() if are_labels else batch.y
        found = step(clipper, lambda c, out, b: MIXED[name](c.constant(1.0) * out, b.y, s), batch)["weight"]
        out = clipper.module(batch.x).detach().requires_grad_()
        rows = [torch.autograd.grad(MIXED[name](one[None], y[None], s), out)[0][i] for i, (one, y) in
                enumerate(zip(out, batch.y, strict=True))]  # fmt: skip
        torch.testing.assert_close(found, torch.stack(rows)[:, :, None] * batch.x[:, None])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "statistic",
    [torch.mean, torch.sum, lambda y: y.round().sum(), torch.amax],
    ids=["mean", "sum", "sum of whole numbers", "largest"],
)
@pytest.mark.parametrize("name", MIXED)
def test_a_statistic_within_an_explained_sum_is_refused_as_soon_as_it_acts_otherwise(name, statistic):
    clipper, first, refused = clipper_of(), None, 0
    for size, seed in ((9, 0), (9, 1), (2, 2), (4, 4), (1, 3)):
        batch = Batch(size, seed)
        batch.y = batch.y.round() if seed % 2 else batch.y
        s = statistic(batch.y)
        found = {}
        with contextlib.suppress(UnsupportedGradientError):
            found = step(clipper, lambda c, out, b, s=s: MIXED[name](out, b.y, s), batch)
        if not found:
            clipper.discard()
            refused += 1
            continue
        first = s if first is None else first
        out = clipper.module(batch.x).detach().requires_grad_()
        [rows] = torch.autograd.grad(MIXED[name](out, batch.y, first) * size, out)
        torch.testing.assert_close(found["weight"], rows[:, :, None] * batch.x[:, None])
    assert refused > 1


IN_PRIVATE = {
    **{name: lambda c, out, b, name=name: MIXED[name](out, b.y, b.y.mean()) for name in MIXED},
    "values": lambda c, out, b: (out - b.y + b.y.mean(0)).abs().mean(),
    "values by a mask": lambda c, out, b: (
        torch.where(out.detach() > 0, F.elu(out), F.elu(out) - b.y.amax(0)) * (torch.arange(len(out)) < 1).view(-1, 1)
    ).log_softmax(-1)[:, 0].mean(),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("name", IN_PRIVATE)
def test_in_private_training_no_weights_explain_a_sum(name, size):
    """Those that fit a first batch, as of one sample that counts, need not be those of the batches beside it."""
    clipper = clipper_of()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"several numbers or tensors are added|weighted and then"):
        step(clipper, IN_PRIVATE[name], Batch(size, 0))


def each_summed(losses):
    return torch.einsum("i,i->", losses, torch.ones_like(losses)) / len(losses)


ELSEWHERE_MADE = {
    "a product of one sample": lambda out, b: each_summed((out.tanh() * float(b.y.mean())).exp().mean(1)),
    "a factor of a product": lambda out, b: each_summed((out - b.y).square().mean(1)) * float(b.y.mean()),
    "a loop beside": lambda out, b: (
        (out.erf() * b.y.mean(0)).square().mean()
        + torch.stack([(o.erf() * y).exp().mean() for o, y in zip(out, b.y, strict=True)]).mean()
    ),
    "above a loop": lambda out, b: F.softplus(
        torch.stack([(o * y).exp() for o, y in zip(out, b.y, strict=True)]) * float(b.y.mean())
    ).mean(),
    "another loss": lambda out, b: getattr(F.softplus(out * float(b.y.mean())), "mean" if len(out) > 4 else "sum")(
    ) / (1 if len(out) > 4 else b.y.numel()),
    "a number in two ways": lambda out, b: F.hinge_embedding_loss(out * float(b.y.mean()), -torch.ones_like(b.y)),
    "a number that the first batch does not show": lambda out, b: (
        out.asinh() - ((40 if len(out) == 5 else 2) + float(b.y.mean()))
    ).tanh().mean(),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(5, 1), (1, 5), (5, 4)], ids=str)
@pytest.mark.parametrize("name", ELSEWHERE_MADE)
def test_a_statistic_is_compared_where_a_batch_makes_the_loss_in_another_way(name, sizes):
    clipper, first, later = clipper_of(), *[Batch(size, number) for number, size in enumerate(sizes)]
    step(clipper, lambda c, out, b: ELSEWHERE_MADE[name](out, b), first)
    with pytest.raises(UnsupportedGradientError, match=r"has changed|may be another"):
        step(clipper, lambda c, out, b: ELSEWHERE_MADE[name](out, b), later)


TEMPERED = (
    lambda out, b, heat: F.cross_entropy(out / heat, b.labels),
    lambda out, b, heat: F.softplus(out / heat).mean(),
)


def test_two_losses_with_numbers_of_their_own_in_one_place_declare_them():
    clipper, silent = clipper_of(), clipper_of()
    for number, (loss, heat) in enumerate(zip(TEMPERED * 2, (2.0, 4.0) * 2, strict=True)):
        step(clipper, lambda c, out, b, loss=loss, heat=heat: loss(out, b, c.constant(heat)), Batch(5, number))
    step(silent, lambda c, out, b: TEMPERED[0](out, b, 2.0), Batch(5, 0))
    with pytest.raises(UnsupportedGradientError, match=r"the number 0\.25, which all samples share"):
        step(silent, lambda c, out, b: TEMPERED[1](out, b, 4.0), Batch(5, 1))


def test_a_choice_by_a_mask_before_classes_are_normalized_is_refused():
    clipper, loss = (
        clipper_of(),
        lambda c, out, b: F.cross_entropy(torch.where(out.detach() > 0, out.exp(), out.exp() - b.y.mean(0)), b.labels),
    )
    with pytest.raises(UnsupportedGradientError, match="is weighted and then summed"):
        step(clipper, loss, Batch(5, 0))


SUMMED = {
    "a product": lambda out, y: torch.stack([torch.dot(o, w).square() for o, w in zip(out, y, strict=True)]).mean(),
    "a choice of positions": lambda out, y: (
        out.flatten().index_select(0, (y.argsort(1)[:, :2] + V * torch.arange(len(y))[:, None]).flatten())
    ).view(-1, 2).sum(1).square().mean(),
    "a choice in a loop": lambda out, y: torch.stack(
        [o.index_select(0, w.argsort()[:2]).sum().square() for o, w in zip(out, y, strict=True)]
    ).mean(),
}  # fmt: skip
"""Losses that weigh, or choose, values of each sample by numbers of its own, and add them up before a function."""


@pytest.mark.parametrize("name", SUMMED)
def test_a_statistic_that_each_sample_weighs_and_sums_by_its_own_numbers_is_refused(name):
    with pytest.raises(UnsupportedGradientError, match="is weighted and then summed"):
        step(clipper_of(), lambda c, out, b: SUMMED[name](out - out.detach().mean(0), b.y), Batch(5, 0))


def test_each_samples_own_targets_in_a_loop_are_taken():
    clipper = clipper_of()
    for number, size in enumerate((5, 4, 1, 6)):
        step(clipper, lambda c, out, b: sum((o - y).square().sum() for o, y in zip(out, b.y, strict=True)) / len(out),
             Batch(size, number))  # fmt: skip


def test_in_private_training_a_vector_beside_chosen_rows_is_refused():
    clipper = clipper_of(loss_reduction="sum")
    clipper.refuse_ambiguous_losses()
    chosen = torch.tensor([0, 0, 1, 2, 2, 3, 4])
    with pytest.raises(UnsupportedGradientError, match="several numbers or tensors are added"):
        step(
            clipper,
            lambda c, out, b: ((out.expm1() - b.y.mean(0))[chosen] - b.y[chosen]).norm(dim=1).sum(),
            Batch(5, 0),
        )


def test_a_schedule_is_declared():
    clipper = clipper_of()
    for number in range(3):
        heat, queue = 1 + number / 7, torch.rand(2, V, dtype=torch.float64)

        def cooled(c, out, b, heat=heat):
            return F.cross_entropy(out / c.constant(heat), b.labels)

        def with_a_queue(c, out, b, queue=queue):
            return (out @ c.constant(queue).T).logsumexp(1).mean()

        step(clipper, cooled, Batch(5, number))
        step(clipper, with_a_queue, Batch(5, number))
    with pytest.raises(InvalidTypeError, match="expected a float, or a tensor with a dimension, got Tensor"):
        clipper.constant(torch.tensor(0.5))


def test_a_layer_that_is_trained_elsewhere_is_no_constant():
    clipper, critic = clipper_of(), nn.Linear(V, 2).double().requires_grad_(False)
    for number in range(3):
        step(clipper, lambda c, out, b: critic(out).square().mean(), Batch(5, number))
        step(
            clipper, lambda c, out, b: c.per_sample_losses(lambda o: critic(o).square().mean(), out).mean(), Batch(5, 1)
        )
        with torch.no_grad():
            critic.weight += 0.1


def test_classes_that_are_as_many_as_the_samples_later():
    torch.manual_seed(0)
    model, fixed = nn.Linear(4, 4).double(), torch.rand(4, dtype=torch.float64)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    for size in (3, 4, 4):
        x, labels = torch.randn(size, 4).double(), torch.randint(0, 4, (size,))
        weight = fixed if size == 3 else torch.rand(size, dtype=torch.float64)  # one of each of the 4 samples
        F.cross_entropy(model(x), labels, weight=weight, reduction="none").mean().backward()
        if size == 3:
            clipper.clip_and_accumulate()
            continue
        with pytest.raises(UnsupportedGradientError, match="has changed since an earlier batch"):
            clipper.clip_and_accumulate()
        clipper.discard()


OF_FOUR = {
    "weights of labels": lambda out, y: F.binary_cross_entropy_with_logits(out, y.round(), pos_weight=y.mean(0)),
    "weights of losses": lambda out, y: F.binary_cross_entropy(out.sigmoid(), y, weight=y.mean(0)),
    "weights of columns": lambda out, y: ((out - y).square() * y.std(0)).mean(),
    "means of columns": lambda out, y: (out - y.mean(0)).square().mean(),
    "a base": lambda out, y: (float(y.mean()) ** out).mean(),
    "a number less outputs": lambda out, y: (float(y.mean()) - out).square().mean(),
}


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", OF_FOUR)
def test_a_batch_of_another_size_is_compared_also_with_as_many_samples_as_outputs(name, size):
    torch.manual_seed(0)
    clipper = gg.PerSampleGradientClipper(nn.Linear(4, 4).double(), gg.FlatNormClipper(1.0))
    OF_FOUR[name](clipper.module(torch.randn(5, 4).double()), torch.rand(5, 4).double()).backward()
    clipper.clip_and_accumulate()
    OF_FOUR[name](clipper.module(torch.randn(size, 4).double()), torch.rand(size, 4).double()).backward()
    with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, has changed"):
        clipper.clip_and_accumulate()


@pytest.mark.parametrize("size", [3, 5])
def test_a_declared_tensor_is_no_row_of_samples_where_the_first_batch_has_as_many(size):
    clipper = clipper_of()
    clipper.refuse_ambiguous_losses()
    for batch in (Batch(size, 0), Batch(3, 1)):
        found = torch.cat([g.flatten(1) for g in step(clipper, CONSTANT["weights of labels"], batch).values()], 1)
        twin = copy.deepcopy(clipper.module)
        loss = CONSTANT["weights of labels"](clipper, twin(batch.x), batch)
        whole = torch.autograd.grad(loss, [*twin.parameters()])
        torch.testing.assert_close(found.mean(0), torch.cat([g.flatten() for g in whole]))


def test_calls_without_a_backward_are_said_to_belong_under_no_grad():
    clipper = clipper_of()
    step(clipper, CONSTANT["targets alone"], Batch(5, 0))
    for _ in range(17):
        clipper.module(Batch(50, 1).x)
    with pytest.raises(UnsupportedGradientError, match=r"more than \d+ calls .* under torch.no_grad\(\)"):
        step(clipper, CONSTANT["targets alone"], Batch(5, 0))


HIDING = {
    "a normalisation": lambda out, y: F.batch_norm(out, y.mean(0), y.var(0) + 0.1).square().mean(),
    "a kernel": lambda out, y: F.conv1d(out[:, None], y.mean(0)[:2].view(1, 1, 2)).square().mean(),
    "a slope": lambda out, y: F.prelu(out, y.mean().view(1)).mean(),
    "logits of a function": lambda out, y: (F.celu(out) - y.mean(0)).square().mean(),
    "an output changed in place": lambda out, y: out.sub_(y.mean(0)).square().mean(),
    "a sign": lambda out, y: (out * torch.copysign(out, y.mean(0) - 0.5)).mean(),
    "a rank": lambda out, y: out.kthvalue(1 + int(y.sum()) % V, 1)[0].square().mean(),
}


@pytest.mark.parametrize("strict", [False, True], ids=["", "private"])
@pytest.mark.parametrize("name", HIDING)
def test_an_operation_that_hides_what_it_takes_is_refused(name, strict):
    clipper = clipper_of()
    if strict:
        clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"graph does not show.*per_sample_losses"):
        step(clipper, lambda c, out, b: HIDING[name](out, b.y), Batch(5, 0))


SHOWING = {
    "classes": lambda out, b: F.cross_entropy(out, b.labels, label_smoothing=0.1),
    "soft labels": lambda out, b: F.cross_entropy(out, b.y.softmax(1)),
    "divergence": lambda out, b: F.kl_div(out.log_softmax(1), b.y.softmax(1), reduction="batchmean"),
    "angles": lambda out, b: (1 - F.cosine_similarity(out, b.y)).mean(),
    "a density": lambda out, b: -torch.distributions.Normal(out, 1.0).log_prob(b.y).mean(),
    "chosen": lambda out, b: -out.log_softmax(1).gather(1, b.labels[:, None]).mean(),
    "hinges": lambda out, b: F.relu(1 - b.y.sub(0.5).sign() * out).mean(),
    "squared hinges": lambda out, b: F.relu(0.7 - b.y.sub(0.5).sign() * out).square().mean(),
    "ranks": lambda out, b: F.margin_ranking_loss(out[:, 0], out[:, 1], b.y[:, 0].sub(0.5).sign(), margin=0.3),
    "embeddings": lambda out, b: F.hinge_embedding_loss(out, b.y.sub(0.5).sign(), margin=0.4),
    "cosines": lambda out, b: F.cosine_embedding_loss(out, b.y, b.y[:, 0].sub(0.5).sign(), margin=0.1),
    "a policy's ratio": lambda out, b: (
        -torch.min((out - b.y).exp() * b.y, (out - b.y).exp().clamp(0.8, 1.2) * b.y).mean()
    ),
    "triplets": lambda out, b: F.triplet_margin_loss(out, b.y, b.y.flip(1)),
    "two distances": lambda out, b: F.relu(F.pairwise_distance(out, b.y) - F.pairwise_distance(out, -b.y) + 1).mean(),
    "no NaN": lambda out, b: F.cross_entropy(out, b.labels, reduction="none").nan_to_num(0.0, 5.0).mean(),
    "masks": lambda out, b: torch.where(YOURS > 1, out - b.y, 0.0).square().mean(),
    "bounded differences": lambda out, b: ((out.tanh() - 0.3).square() + (F.softplus(out) - b.y).square()).mean(),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("name", "strict"),
    [(name, strict) for name in SHOWING for strict in (False, True) if name != "masks" or not strict],
)
def test_usual_losses_are_taken(name, strict):
    clipper = clipper_of()
    if strict:
        clipper.refuse_ambiguous_losses()
    for size in (5, 3, 6):
        batch, twin = Batch(size, 0), copy.deepcopy(clipper.module)
        rows = step(clipper, lambda c, out, b: SHOWING[name](out, b), batch)
        found = torch.cat([each.flatten(1) for each in rows.values()], 1)
        whole = torch.autograd.grad(SHOWING[name](twin(batch.x), batch), [*twin.parameters()])
        torch.testing.assert_close(found.mean(0), torch.cat([g.flatten() for g in whole]))


@pytest.mark.parametrize("private", [False, True])
def test_a_margin_at_labels_that_are_alike_in_small_batches_is_each_samples_own(private):
    clipper = clipper_of()
    if private:
        clipper.refuse_ambiguous_losses()

    def margin(c, out, b):
        return F.cross_entropy(8 * (out - 0.35 * F.one_hot(b.labels, V)), b.labels)

    for number, labels in enumerate([(0, 1, 2, 0), (0, 0), (1, 1), (0,), (2,), (2, 2, 2)]):
        batch = Batch(len(labels), number)
        batch.labels = torch.tensor(labels)
        step(clipper, margin, batch)


def test_a_prior_that_all_samples_share_is_no_margin_of_theirs():
    clipper = clipper_of()

    def prior(c, out, b):
        return F.cross_entropy(out - 0.35 * F.one_hot(b.labels.mode().values, V), b.labels)

    for number, label in enumerate((0, 1)):
        batch = Batch(4, number)
        batch.labels[:3] = label
        if not label:
            step(clipper, prior, batch)
            continue
        with pytest.raises(UnsupportedGradientError, match="all samples share in the loss, has changed"):
            step(clipper, prior, batch)


def without_nan(loss):
    return torch.where(loss.isfinite(), loss, 0.0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda losses: losses.nan_to_num().mean(), ""),
        (lambda losses: without_nan(losses).mean(), ""),
        (lambda losses: losses.mean().nan_to_num(), "nan_to_num has replaced a value of several samples"),
        (lambda losses: losses.view(2, 2).sum(1).nan_to_num().sum() / 4, "a value of several samples"),
        (lambda losses: losses.nan_to_num().exp().mean(), "the numbers by which nan_to_num has replaced"),
        (lambda losses: without_nan(losses.mean()), "all samples share in the loss, has changed"),
    ],
    ids=["each", "each, chosen", "mean", "halves", "before a function", "mean, chosen"],
)
def test_a_nan_of_one_sample_takes_no_gradient_from_others(loss, words):
    clipper = clipper_of()

    def whole(c, out, b):
        return loss(F.cross_entropy(out, b.labels, reduction="none"))

    step(clipper, whole, Batch(4, 0))
    batch, twin = Batch(4, 1), copy.deepcopy(clipper.module)
    batch.x[0] = math.nan
    if words:
        with pytest.raises(UnsupportedGradientError, match=words):
            step(clipper, whole, batch)
        return
    rows = step(clipper, whole, batch)["weight"]
    for i in (1, 2, 3):
        own = F.cross_entropy(twin(batch.x[i : i + 1]), batch.labels[i : i + 1])
        torch.testing.assert_close(rows[i], torch.autograd.grad(own, twin.weight)[0])
    assert clipper.statistics.nonfinite == 1


@pytest.mark.parametrize("fused", [F.huber_loss, F.smooth_l1_loss])
def test_a_number_of_a_fused_mean_is_no_samples_own(fused):
    """The mean is one number of all samples, whose derivative may look like that of one: in some draws it did."""
    name = "delta" if fused is F.huber_loss else "beta"
    first, later = (lambda c, out, b, number=number: fused(out, b.y, **{name: number}) for number in (0.2, 0.3))
    for seed in range(12):
        clipper = clipper_of()
        step(clipper, first, Batch(5, seed))
        with pytest.raises(UnsupportedGradientError, match=r"per_sample_losses|constant"):
            step(clipper, later, Batch(5, seed + 100))


def test_a_tensor_that_a_loop_over_samples_uses_for_each_is_shared():
    def weighted(c, out, b):
        weight = 1 + b.y.mean(0)
        losses = [F.binary_cross_entropy_with_logits(o, y, pos_weight=weight) for o, y in zip(out, b.y, strict=True)]
        return torch.stack(losses).mean()

    clipper = clipper_of()
    step(clipper, weighted, Batch(5, 0))
    with pytest.raises(UnsupportedGradientError, match=r"a tensor of shape \[3\], which all samples share"):
        step(clipper, weighted, Batch(4, 1))


@pytest.mark.parametrize("private", [False, True])
def test_labels_that_are_alike_in_each_batch_are_each_samples_own(private):
    clipper, loss = clipper_of(), lambda c, out, b: (out - b.y).square().mean()
    if private:
        clipper.refuse_ambiguous_losses()
    for number, label in enumerate((3.0, 5.0, 2.0, 2.0, 7.0)):
        batch = Batch(4, number)
        batch.y = torch.full_like(batch.y, label)
        step(clipper, loss, batch)


def centred_unrecorded(out, b):
    out = out * 1.0
    out.detach().sub_(out.detach().mean())
    return out.exp().mean()


def clamped_by_torch(out, b):
    return F.gaussian_nll_loss(out, b.y, out.square(), eps=b.y.std().item())


def centred_copy(out, b):
    out = out.clone()
    with torch.no_grad():
        out.sub_(out.mean(0))
    return out.exp().mean()


def centred_scores(out, b):
    out = out.unsqueeze(1).clone()
    with torch.no_grad():
        out.sub_(out.mean(0))
    return -out.squeeze(1).log_softmax(1)[:, 0].mean()


def scaled_result(out, b):
    result = out.view(-1, 3, 1).tanh()
    result.data.mul_(result.detach().mean(0))
    return result.square().mean()


def own_result(out, b):
    result = out.exp()
    result.data.div_(result.detach().mean(0))
    return result.log1p().mean()


def own_scores(out, b):
    scores = out.log_softmax(1)
    scores.data.sub_(scores.detach().mean(0))
    return -scores[:, 0].mean()


def between_two_functions(out, b):
    out = out * 1.0
    first = out.exp().mean()
    with torch.no_grad():
        out.sub_(out.mean(0))
    return first - out.log_softmax(1)[:, 0].mean()


CHANGED = [centred_unrecorded, clamped_by_torch, centred_copy, centred_scores, scaled_result]
CHANGED += [own_result, own_scores, between_two_functions]


@pytest.mark.parametrize("loss", CHANGED)
def test_refuses_a_value_changed_in_place_outside_the_graph(loss):
    with pytest.raises(UnsupportedGradientError, match="changed in place"):
        step(clipper_of(), lambda _, out, b: loss(out, b), Batch(6, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_scores_in_half_precision_and_no_statistic_in_them(dtype):
    torch.manual_seed(0)
    labels = torch.randint(3, (6,))
    for statistic in (0.0, 1.0):
        clipper = clipper_of()

        def loss(_, out, b, statistic=statistic):
            out = out.to(dtype) / 0.07
            with torch.no_grad():
                out.sub_(statistic * (1 + out.mean(0)))
            return F.cross_entropy(out, labels)

        if statistic:
            with pytest.raises(UnsupportedGradientError, match="changed in place"):
                step(clipper, loss, Batch(6, 1))
        else:
            step(clipper, loss, Batch(6, 1))


def test_refuses_scores_that_are_masked_outside_the_graph():
    def loss(_, out, b):
        out = out * 1.0
        out.data[0, out[0].argmin()] = -torch.inf
        return F.cross_entropy(out, out.argmax(1))

    with pytest.raises(UnsupportedGradientError, match="changed in place"):
        step(clipper_of(), loss, Batch(6, 1))


WEIGHTS_OF_THE_BATCH = {
    "of another net": lambda loss, s, b: loss * CRITIC(b.x).square().mean(),
    "over one of another net": lambda loss, s, b: loss / CRITIC(b.x).square().mean(),
    "of inputs": lambda loss, s, b: loss * b.x.clone().requires_grad_().std(),
    "times a parameter": lambda loss, s, b: loss * (s * b.x.std()),
    "a number times a parameter": lambda loss, s, b: loss * (s * b.x.std().item()),
    "plus a parameter": lambda loss, s, b: loss / (s.exp() + b.x.std()),
    "a whole number plus a parameter": lambda loss, s, b: loss / (s.exp() + int(b.labels[0])),
    "an exponent": lambda loss, s, b: loss * s.exp() ** b.x.std().item(),
    "before exp": lambda loss, s, b: loss * (s + b.x.std()).exp(),
    "a base": lambda loss, s, b: loss * b.x.std().item() ** s,
    "a bound": lambda loss, s, b: loss * s.exp().clamp(max=b.x.std().item()),
    "the batch's size": lambda loss, s, b: loss * s.exp().expand(len(b.x)).sum(),
    "a choice": lambda loss, s, b: loss * torch.stack([s, s.exp(), s + 2])[int(b.labels[0])],
}
"""Weights of a loss that need a gradient, and that the batch decides; s is a parameter."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", WEIGHTS_OF_THE_BATCH)
def test_refuses_a_weight_of_the_batch_that_needs_a_gradient(name, strict):
    clipper, scale = clipper_of(), nn.Parameter(torch.tensor(0.5).double())
    batches = [Batch(6, 0), Batch(5 if name == "the batch's size" else 6, 1)]
    assert batches[0].labels[0] != batches[1].labels[0]
    if strict:
        clipper.refuse_ambiguous_losses()

    def loss(c, out, b):
        return WEIGHTS_OF_THE_BATCH[name](F.cross_entropy(out, b.labels), scale, b)

    def steps():
        for batch in batches:
            step(clipper, loss, batch)

    with pytest.raises(UnsupportedGradientError, match="cannot verify that the loss is the mean over samples"):
        steps()


TRAINED = {
    "a learned variance": lambda loss, out, b, s: loss * torch.exp(-s[0]) + s[0],
    "uncertainties of two heads": lambda loss, out, b, s: (
        loss * torch.exp(-s[0]) + s[0] + 0.5 * torch.exp(-s[1]) * F.mse_loss(out, b.y) + 0.5 * s[1]
    ),
    "uncertainties in a vector": lambda loss, out, b, s: (
        torch.stack([loss, F.mse_loss(out, b.y)]) * torch.exp(-s[:2])
    ).sum(),
    "a scale that is no variance": lambda loss, out, b, s: ((out - b.y).abs() / (F.softplus(s[0]) + 1e-3)).mean(),
    "scales of columns": lambda loss, out, b, s: ((out - b.y).square() / (s**2 + 1e-6)).mean() + s.square().log().sum(),
    "the decoder of an autoencoder": lambda loss, out, b, s: F.gaussian_nll_loss(
        out, b.y, (F.softplus(s) + 1e-3).expand_as(out)
    ),
    "degrees of freedom": lambda loss, out, b, s: (
        (s[0].exp() + 1) / 2 * torch.log1p((out - b.y).square() / (s[0].exp() + 1))
    ).mean(),
    "an exponent": lambda loss, out, b, s: ((out - b.y).square() + 1).pow(s[0] + 1).mean(),
    "heat": lambda loss, out, b, s: F.cross_entropy(out / F.softplus(s[0]), b.labels),
    "another net's value for each row": lambda loss, out, b, s: (
        F.cross_entropy(out, b.labels, reduction="none") * CRITIC(b.x)[:, 0]
    ).mean(),
    "heat of each row": lambda loss, out, b, s: (out / (1 + CRITIC(b.x)[:, :1].square())).logsumexp(1).mean(),
    "a teacher": lambda loss, out, b, s: F.kl_div(
        out.log_softmax(1), CRITIC(b.x).detach().softmax(1), reduction="batchmean"
    ),
    "a teacher that needs a gradient": lambda loss, out, b, s: F.kl_div(
        out.log_softmax(1), CRITIC(b.x).softmax(1), reduction="batchmean"
    ),
    "another net's own term": lambda loss, out, b, s: loss + 0.1 * CRITIC(b.x).square().mean(),
}


@pytest.mark.parametrize("name", TRAINED)
def test_takes_what_is_trained_elsewhere_at_each_size(name):
    clipper, scale = clipper_of(), nn.Parameter(torch.tensor([0.3, -0.2, 0.1]).double())
    twin = copy.deepcopy(clipper.module)

    def loss(c, out, b):
        return TRAINED[name](F.cross_entropy(out, b.labels), out, b, scale)

    for size, seed in ((6, 0), (6, 1), (5, 2), (1, 3), (7, 4)):
        batch = Batch(size, seed)
        found = step(clipper, loss, batch)
        for i in range(size):
            one = copy.copy(batch)
            one.x, one.y, one.labels = batch.x[i : i + 1], batch.y[i : i + 1], batch.labels[i : i + 1]
            own = torch.autograd.grad(loss(None, twin(one.x), one), [*twin.parameters()])
            for each, expected in zip(found.values(), own, strict=True):
                torch.testing.assert_close(each[i], expected)
        with torch.no_grad():
            scale += 0.1


@pytest.mark.parametrize("strict", [False, True])
def test_private_training_takes_a_learned_scale_with_declared_numbers(strict):
    clipper, scale = clipper_of(), nn.Parameter(torch.tensor(0.3).double())
    if strict:
        clipper.refuse_ambiguous_losses()

    def learned(c, out, b):
        return F.cross_entropy(out, b.labels) * torch.exp(-scale)

    def with_a_number(c, out, b):
        return F.mse_loss(out, b.y) / (scale**2 + c.constant(1e-3))

    for size, trained in ((6, 0.3), (6, 0.4), (5, 0.5)):
        scale.data.fill_(trained)
        step(clipper, learned, Batch(size, size))
        step(clipper, with_a_number, Batch(size, size))


def test_a_number_before_an_operation_of_a_parameter_that_hides_it_is_refused_in_words():
    clipper, scale = clipper_of(), nn.Parameter(torch.rand(2).double())
    with pytest.raises(UnsupportedGradientError, match="does not show a number that is added to a trained parameter"):
        step(clipper, lambda c, out, b: F.mse_loss(out, b.y) * (scale + 1.0).softmax(0)[0], Batch(5, 0))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    "difference",
    [
        lambda p, out: p - out,
        lambda p, out: torch.add(p, out, alpha=2.0),
        lambda p, out: torch.rsub(p, out, alpha=2.0),
    ],
)
def test_refuses_a_statistic_that_is_trained_and_comes_first(difference, private):
    clipper = clipper_of()
    if private:
        clipper.refuse_ambiguous_losses()

    def steps():
        for seed in range(3):
            batch = Batch(6, seed)
            statistic = batch.y.mean(0).requires_grad_()
            step(clipper, lambda _, out, b, s=statistic: difference(s, out).tanh().mean(), batch)

    with pytest.raises(UnsupportedGradientError, match=r"has changed since an earlier batch|may be another"):
        steps()


def test_takes_a_trained_temperature_that_comes_first():
    clipper, temperature = clipper_of(), nn.Parameter(torch.tensor(0.5))
    for seed in range(3):
        step(clipper, lambda _, out, b: (temperature * out).exp().mean(), Batch(6, seed))


def test_takes_a_clamp_of_torchs_that_clamps_nothing():
    clipper = clipper_of()
    for size in (6, 5):
        step(clipper, lambda _, out, b: F.gaussian_nll_loss(out, b.y, out.square() + 0.1), Batch(size, size))
        step(clipper, lambda _, out, b: (1 - F.cosine_similarity(out, b.y)).mean(), Batch(size, size))


def test_refuses_the_classes_of_a_batch_however_many_they_are():
    def present(_, out, b):
        chosen = b.labels.unique()
        return F.cross_entropy(out[:, chosen], torch.searchsorted(chosen, b.labels))

    clipper, few, all_classes = clipper_of(), Batch(6, 1), Batch(5, 2)
    few.labels, all_classes.labels = torch.tensor([0, 1, 0, 1, 1, 0]), torch.tensor([0, 1, 2, 1, 0])
    step(clipper, present, few)
    with pytest.raises(UnsupportedGradientError, match="has changed since an earlier batch"):
        step(clipper, present, all_classes)


def in_a_loop(number):
    return lambda c, out, b: sum(torch.tanh(o[0] - number(b)) for o in out) / len(out)


def of_a_distribution(spread):
    return lambda c, out, b: -torch.distributions.Normal(out[:, 0], spread(b)).log_prob(b.y[:, 0]).mean()


ONE_NUMBER = {"a loop over samples": in_a_loop, "a distribution": of_a_distribution}


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_a_number_that_is_told_sample_by_sample_is_shared_whatever_the_size(name):
    clipper, other = clipper_of(), clipper_of()
    of_the_batch = ONE_NUMBER[name](lambda b: float(b.y.mean()))
    step(clipper, of_the_batch, Batch(12, 0))
    for number, size in enumerate((12, 9, 12), 1):
        with pytest.raises(UnsupportedGradientError, match="all samples share"):
            step(clipper, of_the_batch, Batch(size, number))
        clipper.discard()
    for number, size in enumerate((12, 3, 1, 9)):
        step(other, ONE_NUMBER[name](lambda b: 0.7), Batch(size, number))


def test_private_training_takes_no_statistic_for_the_gradient_of_backward():
    clipper, batch = clipper_of(), Batch(5, 0)
    clipper.refuse_ambiguous_losses()
    clipper.module(batch.x).sin().mean().backward(batch.y.mean())
    with pytest.raises(UnsupportedGradientError, match="all samples share"):
        clipper.clip_and_accumulate()
    clipper.discard()
    clipper.module(batch.x).sin().mean().backward(torch.ones((), dtype=torch.float64))
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 5


def test_outputs_that_are_changed_in_place_unseen_are_refused():
    clipper, batch = clipper_of(), Batch(5, 0)

    def loss(c, out, b):
        with torch.no_grad():
            out -= out.max()
        return out.exp().mean()

    with pytest.raises(UnsupportedGradientError, match="changed in place"):
        step(clipper, loss, batch)
    clipper.discard()
    step(clipper, lambda c, out, b: out.mul_(2.0).exp().mean(), batch)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x):
        return self.first(x), self.second(x)


def of_heads(make=Heads):
    torch.manual_seed(0)
    return gg.PerSampleGradientClipper(make().double(), gg.FlatNormClipper(1e9), mode="exact")


def ctc(out, blank):
    size = len(out)
    lengths = torch.full((size,), 2), torch.full((size,), 1)
    log = out.view(size, 2, 3).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log, torch.ones(size, 1, dtype=torch.long), *lengths, blank=blank)


CE = F.cross_entropy
UNIFORM = torch.tensor([[1.0, 2, 3, 1, 2, 3], [2.5] * 6], dtype=torch.float64)
SETTINGS = {
    "k of topk": lambda o, b, k: o.topk(2 + k, 1).values.logsumexp(1).mean(),
    "columns behind a sort": lambda o, b, k: o.sort(1, descending=True).values[:, : 2 + k].logsumexp(1).mean(),
    "a group's size": lambda o, b, k: -o.view(len(o), (2, 3)[k], -1).log_softmax(-1).square().sum((1, 2)).mean(),
    "a sum's size": lambda o, b, k: o.view(len(o), (2, 3)[k], -1).sum(-1).square().sum(1).mean(),
    "ord, a whole number": lambda o, b, k: o.norm(p=1 + k, dim=1).mean(),
    "ord, a fraction": lambda o, b, k: o.norm(p=(1, 1.5)[k], dim=1).mean(),
    "ord, infinite": lambda o, b, k: o.norm(p=(float("inf"), 2)[k], dim=1).mean(),
    "a correction": lambda o, b, k: o.std(1, unbiased=bool(k)).mean(),
    "a dimension": lambda o, b, k: o.view(len(o), 2, 3).softmax(1 + k).square().mean(),
    "a dimension of sums": lambda o, b, k: o.view(len(o), 2, 3).cumsum(1 + k).square().mean(),
    "a blank": lambda o, b, k: ctc(o, 2 * k),
    "a mode": lambda o, b, k: F.gelu(o, approximate=("tanh", "none")[k]).square().mean(),
    "a vector, then one number": lambda o, b, k: CE(o * UNIFORM[k], b.labels),
    "one number, then a vector": lambda o, b, k: CE(o * UNIFORM[1 - k], b.labels),
    "weights of labels, then one": lambda o, b, k: F.binary_cross_entropy_with_logits(
        o, b.y.repeat(1, 2), pos_weight=UNIFORM[k]
    ),
    "two temperatures, then one": lambda o, b, k: CE(o / 0.5, b.labels) + CE(o / (2.0, 0.5)[k], b.labels),
    "temperatures in another order": lambda o, b, k: (
        0.2 * CE(o / (0.5, 2.0)[k], b.labels) + 0.8 * CE(o / (2.0, 0.5)[k], b.labels)
    ),
    "thresholds in a loop": lambda o, b, k: torch.stack([
        (2 * F.huber_loss(one[:3], y, delta=(0.1, 0.3)[k]) + F.huber_loss(one[:3], y, delta=(0.3, 0.1)[k])).exp()
        for one, y in zip(o, b.y, strict=True)
    ]).mean(),
    "weights of columns, rotated": lambda o, b, k: sum(
        (0.5, 0.25)[(k + j) % 2] * (o[:, j] - b.y[:, j]).square().mean() for j in range(2)
    ),
    "weights of three columns": lambda o, b, k: sum(
        (0.2, (0.2, 0.8)[k], 0.8)[j] * (o[:, j] - b.y[:, j]).square().mean() for j in range(3)
    ),
    "places to roll": lambda o, b, k: (o.roll(k + 1, 1) * UNIFORM[0]).square().cumsum(1).mean(),
    "a column": lambda o, b, k: o[:, k].square().mean(),
}  # fmt: skip
HEADS = {
    "weights of heads": lambda o, b, k: (0.2, 0.8)[k] * CE(o[0], b.labels) + (0.8, 0.2)[k] * CE(o[1], b.labels),
    "thresholds of heads": lambda o, b, k: (
        F.huber_loss(o[0], b.y.repeat(1, 2), delta=(0.3, 0.7)[k])
        + F.huber_loss(o[1], b.y.repeat(1, 2), delta=(0.7, 0.3)[k])
    ),
    "temperatures of heads": lambda o, b, k: (
        CE(o[0] / (0.5, 2.0)[k], b.labels) + CE(o[1] / (2.0, 0.5)[k], b.labels)
    ),
    "temperatures and heads": lambda o, b, k: CE(o[k] / 0.5, b.labels) + CE(o[1 - k] / 2.0, b.labels),
    "exponents of heads": lambda o, b, k: (o[0].abs() ** (2, 3)[k]).mean() + (o[1].abs() ** (3, 2)[k]).mean(),
    "vectors of heads": lambda o, b, k: CE(o[0] * UNIFORM[k], b.labels) + CE(o[1] * UNIFORM[1 - k], b.labels),
    "k of heads": lambda o, b, k: sum(o[i].topk((2, 3)[(i + k) % 2], 1).values.logsumexp(1).mean() for i in (0, 1)),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("name", [*SETTINGS, *HEADS])
def test_a_setting_or_place_that_the_batch_decides_is_refused_as_soon_as_it_changes(name, private):
    loss = SETTINGS.get(name) or HEADS[name]
    clipper = of_heads(Heads if name in HEADS else lambda: nn.Linear(4, 6))
    if private:
        clipper.refuse_ambiguous_losses()
    with contextlib.suppress(UnsupportedGradientError) if private else contextlib.nullcontext():
        step(clipper, lambda c, out, b: loss(out, b, 0), Batch(8, 0))
    for size in (8, 5):
        clipper.discard()
        with pytest.raises(
            UnsupportedGradientError, match="the loss is the mean" if private else "has changed|in an earlier batch"
        ):
            step(clipper, lambda c, out, b: loss(out, b, 1), Batch(size, 1))


CHOICES = {
    "k of topk": lambda o, k: o.topk(k, 1).values.logsumexp(1).mean(),
    "places to roll": lambda o, k: (o.roll(k, 1) * o).exp().mean(),
}


@pytest.mark.parametrize("name", CHOICES)
def test_in_private_training_a_number_that_chooses_columns_is_declared_or_refused(name):
    clipper, loss = of_heads(lambda: nn.Linear(4, 6)), CHOICES[name]
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match="may be another in the next batch"):
        step(clipper, lambda c, out, b: loss(out, 2), Batch(8, 0))
    clipper.discard()
    for size in (8, 5):
        step(clipper, lambda c, out, b: loss(out, int(c.constant(2))), Batch(size, size))


class Sequences(Batch):
    """Samples of ``length`` rows, of which a mask ``m`` tells those that count."""

    def __init__(self, size, length, seed):
        super().__init__(size * length, seed)
        self.x, self.y = self.x.view(size, length, 4), self.y.view(size, length, V)
        self.labels = self.labels.view(size, length)
        generator = torch.Generator().manual_seed(seed)
        self.n = torch.randint(1, length + 1, (size,), generator=generator)
        self.m = torch.arange(length) < self.n[:, None]

    def alone(self, i):
        one = copy.copy(self)
        one.x, one.y, one.labels, one.n, one.m = (t[i : i + 1] for t in (self.x, self.y, self.labels, self.n, self.m))
        return one


def shifted(o, labels):
    return CE(o[:, :-1].mT, labels[:, 1:], reduction="none").mean()


def mean_of(rows, b):
    return ((rows * b.m).sum(1) / b.m.sum(1)).mean()


EVERYDAY = {
    "two heads": lambda o, b: CE(o[0].mT / 0.5, b.labels) + CE(o[1].mT / 2.0, b.labels),
    "two heads in a loop": lambda o, b: sum(
        w * CE(one.mT / t, b.labels) for one, w, t in zip(o, (0.2, 0.8), (0.5, 2.0), strict=True)
    ),
    "topk": lambda o, b: o[0].topk(2, -1).values.logsumexp(-1).mean() + o[1].topk(3, -1).values.logsumexp(-1).mean(),
    "norms": lambda o, b: o[0].norm(p=1, dim=-1).mean() + o[1].norm(dim=-1).mean(),
    "groups": lambda o, b: o[0].view(*o[0].shape[:2], 2, -1).softmax(-1).square().sum((2, 3)).mean(),
    "a shift of tokens": lambda o, b: shifted(o[0], b.labels) + shifted(o[1], b.labels),
    "a token of each": lambda o, b: CE(o[0][:, 0], b.labels[:, 0]) + o[1][:, -1].square().mean(),
    "spread": lambda o, b: o[0].std(-1).mean() + o[1].var(-1, unbiased=False).mean(),
    "attention over tokens": lambda o, b: (
        (o[0].masked_fill(~b.m[..., None], -1e9).softmax(1) * o[1]).sum(1) - b.y.repeat(1, 1, 2)[:, 0]
    ).square().mean(),
    "preference": lambda o, b: -F.logsigmoid(
        0.1 * (o[0].log_softmax(-1)[..., 0] * b.m).sum(1) - 0.1 * (o[1].log_softmax(-1)[..., 0] * b.m).sum(1)
    ).mean(),
    "a mean of each": lambda o, b: mean_of(CE(o[0].mT, b.labels, reduction="none"), b) + 0.3 * o[1].square().mean(),
    "a loop over samples": lambda o, b: torch.stack([
        F.huber_loss(one[:n], y[:n].repeat(1, 2), delta=0.7) + 0.1 * other[:n].logsumexp(0).norm(p=1)
        for one, other, y, n in zip(*o, b.y, b.n.tolist(), strict=True)
    ]).mean(),
    "a loop over lengths": lambda o, b: torch.stack([
        one[:n].logsumexp(0).mean() + one[:n].sum(0).norm(dim=0) for one, n in zip(o[0], b.n.tolist(), strict=True)
    ]).mean(),
    "columns by name": lambda o, b: (
        0.5 * (o[0][..., 0] - b.y[..., 0]).square() + 2 * F.huber_loss(o[0][..., 1], b.y[..., 1], reduction="none")
        + F.softplus(o[0][..., 2])
    ).mean(),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EVERYDAY)
def test_fixed_settings_are_taken_whatever_the_sizes_and_lengths_of_batches(name):
    clipper, loss = of_heads(), EVERYDAY[name]
    twin = copy.deepcopy(clipper.module)
    for seed, (size, length) in enumerate([(5, 4), (3, 6), (8, 4), (1, 5), (6, 6), (2, 3), (4, 4), (7, 2)]):
        batch = Sequences(size, length, seed)
        found = torch.cat([rows.flatten(1) for rows in step(clipper, lambda c, o, b: loss(o, b), batch).values()], 1)
        for i in range(size):
            one = batch.alone(i)
            alone = torch.autograd.grad(loss(twin(one.x), one), [*twin.parameters()], allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for g, p in zip(alone, twin.parameters(), strict=True)]
            torch.testing.assert_close(found[i], torch.cat([g.flatten() for g in parts]))

"""A sample's share of the loss is counted on each step, and never assumed from the number of samples."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.loss import loss_check as loss_check

T, V = 5, 3


class Batch:
    """Tokens of samples: ``mask`` says which are there, ``labels`` has -100 elsewhere."""

    def __init__(self, lengths, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = len(lengths)
        self.x = torch.randn(size, T, 4, generator=generator, dtype=torch.float64)
        self.target = torch.randn(size, T, V, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(0, V, (size, T), generator=generator)
        self.weight = torch.rand(size, T, generator=generator, dtype=torch.float64) + 0.5
        self.mask = torch.arange(T) < torch.tensor(lengths)[:, None]
        self.labels = self.tokens.masked_fill(~self.mask, -100)

    def sample(self, i: int) -> "Batch":
        return self.rows(slice(i, i + 1))

    def rows(self, rows: slice) -> "Batch":
        one = object.__new__(Batch)
        vars(one).update({name: value[rows] for name, value in vars(self).items()})
        return one


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, V)).double()


def alone(loss, batch: Batch, i: int) -> dict[str, Tensor]:
    """The gradient of the loss of one sample by itself."""
    model, one = made(), batch.sample(i)
    value = loss(model(one.x), one)
    if value.requires_grad and bool(value.isfinite()):
        value.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def step(clipper, loss, batch: Batch) -> dict[str, Tensor]:
    """One step; the per-sample gradients."""
    clipper.module.zero_grad()
    loss(clipper.module(batch.x), batch).backward()
    clipper.clip_and_accumulate()
    found = clipper.per_sample_gradients()
    clipper.pre_step()
    return found


def assert_exact(found, loss, batch: Batch) -> None:
    for i in range(len(batch.x)):
        for name, expected in alone(loss, batch, i).items():
            torch.testing.assert_close(found[name][i], expected, rtol=1e-10, atol=1e-13)


def exact(reduction: str = "mean", **options):
    return gg.PerSampleGradientClipper(
        made(), gg.FlatNormClipper(1e9), mode="exact", loss_reduction=reduction, **options
    )


FUSED = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda out, target, **o: F.binary_cross_entropy(out.sigmoid(), target.sigmoid(), **o),
    "bce_with_logits": lambda out, target, **o: F.binary_cross_entropy_with_logits(out, target.sigmoid(), **o),
    "soft_margin": lambda out, target, **o: F.soft_margin_loss(out, target.sign(), **o),
    "multi_margin": lambda out, target, **o: F.multi_margin_loss(out, target.argmax(-1), **o),
    "multilabel_margin": lambda out, target, **o: F.multilabel_margin_loss(out, target.argsort(-1), **o),
    "cross_entropy": lambda out, target, **o: F.cross_entropy(out, target.argmax(-1), **o),
    "kl_div": lambda out, target, **o: F.kl_div(out.log_softmax(-1), target.softmax(-1), **o),
    "poisson": lambda out, target, **o: F.poisson_nll_loss(out, target.exp(), **o),
    "by hand": lambda out, target, reduction="mean": getattr((out - target).square(), reduction)(),
}
"""Losses of rows ``[n, V]``."""

CHOSEN = {
    "mask": lambda values, batch: values[batch.mask],
    "ragged cat": lambda values, batch: torch.cat([v[: int(m.sum())] for v, m in zip(values, batch.mask, strict=True)]),
    "index_select": lambda values, batch: values.flatten(0, 1).index_select(0, batch.mask.flatten().nonzero()[:, 0]),
    "masked_select": lambda values, batch: values.masked_select(batch.mask[..., None]).view(-1, V),
}
"""Ways to choose rows."""

LENGTHS = [
    [[3, 3, 3, 3], [1, 2, 3, 4]],
    [[4, 1, 2, 5], [2, 2, 2, 2]],
    [[5, 5, 5], [5, 5, 5, 5, 5], [5, 4, 5]],
    [[1, 1, 1], [2, 1, 0]],
]
"""The lengths of the samples, step by step."""


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("choice", CHOSEN)
@pytest.mark.parametrize("name", FUSED)
def test_a_mean_over_chosen_rows_is_exact_or_refused(name, choice, lengths):
    def loss(out, batch):
        return FUSED[name](CHOSEN[choice](out, batch), CHOSEN[choice](batch.target, batch))

    clipper = exact()
    for number, each in enumerate(lengths):
        batch = Batch(each, number)
        if len(set(each)) == 1:
            assert_exact(step(clipper, loss, batch), loss, batch)
            continue
        with pytest.raises(
            UnsupportedGradientError, match=r"the loss is not the mean over samples: each sample's part"
        ):
            step(clipper, loss, batch)
        clipper.discard()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [name for name in FUSED if name != "bce"])
def test_a_sum_over_chosen_rows_is_exact(name, lengths):
    def loss(out, batch):
        rows = [CHOSEN["mask"](values, batch) for values in (out, batch.target)]
        return FUSED[name](*rows, reduction="sum") / (len(out) if reduction == "mean" else 1)

    for reduction in ("mean", "sum"):
        clipper = exact(reduction)
        for number, each in enumerate(lengths):
            batch = Batch(each, number)
            if reduction == "mean" and len(set(each)) > 1 and sum(each) == len(each):
                continue  # divided by the number of samples, or of rows: refused
            assert_exact(step(clipper, loss, batch), loss, batch)


def squares(out, batch):
    return (out - batch.target).square().mean(-1)


TOKENS = {
    "labels": lambda out, batch: F.cross_entropy(out.mT, batch.labels),
    "labels, flattened": lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch.labels.flatten()),
    "labels, sum over their number": lambda out, batch: (
        F.cross_entropy(out.mT, batch.labels, reduction="sum") / (batch.labels != -100).sum()
    ),
    "mask": lambda out, batch: (squares(out, batch) * batch.mask).sum() / batch.mask.sum(),
    "where": lambda out, batch: torch.where(batch.mask, squares(out, batch), 0.0).sum() / batch.mask.sum(),
    "filled": lambda out, batch: squares(out, batch).masked_fill(~batch.mask, 0).sum() / batch.mask.sum(),
    "dot product": lambda out, batch: (
        squares(out, batch).flatten().dot(batch.mask.flatten().double()) / batch.mask.sum()
    ),
    "mean over the mask's": lambda out, batch: (squares(out, batch) * batch.mask).mean() / batch.mask.double().mean(),
    "mean of sums over the mean length": lambda out, batch: (
        (squares(out, batch) * batch.mask).sum(1).mean() / batch.mask.sum(1).double().mean()
    ),
    "a Python number": lambda out, batch: (squares(out, batch) * batch.mask).sum() / int(batch.mask.sum()),
    "mse of the chosen": lambda out, batch: F.mse_loss(out[batch.mask], batch.target[batch.mask]),
    "scaled": lambda out, batch: 0.7 * F.cross_entropy(out.mT, batch.labels),
}
"""Means over the tokens of a batch."""


@pytest.mark.parametrize("first", [[5, 5, 5, 5], [3, 3, 3, 3]], ids=["all there", "as many of each"])
@pytest.mark.parametrize("later", [[5, 2, 3, 1], [3, 3, 3, 2], [4, 4, 0, 4]], ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_are_missing_in_a_later_step_only_are_noticed(name, first, later):
    clipper = exact()
    for number in range(2):
        batch = Batch(first, number)
        assert_exact(step(clipper, TOKENS[name], batch), TOKENS[name], batch)
    with pytest.raises(UnsupportedGradientError, match=r"the loss is (not )?the mean over samples"):
        step(clipper, TOKENS[name], Batch(later, 2))


@pytest.mark.parametrize("lengths", [[5, 2, 3, 1], [3, 0, 3, 2], [4], [1, 5]], ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_a_mean_over_tokens_can_be_said_to_be_one(name, lengths):
    clipper = exact("token_mean")
    for number, each in enumerate([lengths, lengths[::-1], [5, 1, 2]]):
        batch = Batch(each, number)
        found = step(clipper, TOKENS[name], batch)
        assert_exact(found, TOKENS[name], batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        torch.testing.assert_close(clipper.statistics.norms, norms, rtol=1e-12, atol=0)
        average = [p.grad for p in clipper.module.parameters()]
        for gradient, rows in zip(average, found.values(), strict=True):
            torch.testing.assert_close(gradient, rows.mean(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["labels", "mask", "mse of the chosen"])
def test_a_mean_over_tokens_beside_its_neighbours(name):
    """In fast mode, scaled, in several mini-batches, clipped, with a sample that overflows: as one by one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = made()
    rule = gg.FlatNormClipper(0.05)
    clipper = gg.PerSampleGradientClipper(model, rule, loss_reduction="token_mean", scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = [Batch([5, 2, 3, 1], 0), Batch([1, 4], 1)]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        for i in range(len(batch.x)):
            one = alone(TOKENS[name], batch, i)
            norm = torch.stack([g.norm() for g in one.values()]).norm()
            for key, gradient in one.items():
                expected[key] += gradient * (0.05 / norm).clamp(max=1) / 6
    for batch in batches:
        scaler.scale(TOKENS[name](model(batch.x), batch)).backward()
        clipper.clip_and_accumulate()
    clipper.pre_step()
    scaler.unscale_(optimizer)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-5, atol=1e-9)


class WithLoss(nn.Module):
    """Returns the mean over all tokens by itself, as models for language do."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.inner, self.mixes = made(), mixes

    def forward(self, x, labels):
        out = self.inner(x)
        if self.mixes:
            out = out - 1e-3 * out.mean(0)
        return {"loss": F.cross_entropy(out.flatten(0, 1), labels.flatten()), "logits": out}


def test_a_model_that_returns_the_mean_over_its_tokens():
    torch.manual_seed(0)
    model = WithLoss()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact", loss_reduction="token_mean")
    for number, lengths in enumerate(([5, 2, 3, 1], [4, 4, 1, 5], [3, 3, 2, 3], [5, 1], [2], [1, 0, 4, 4])):
        batch = Batch(lengths, number)
        model.zero_grad()
        model(batch.x, batch.labels)["loss"].backward()
        clipper.clip_and_accumulate()
        found = {name.removeprefix("inner."): rows for name, rows in clipper.per_sample_gradients().items()}
        clipper.pre_step()
        assert_exact(found, TOKENS["labels"], batch)
    mixing = WithLoss(mixes=True)
    clipper = gg.PerSampleGradientClipper(mixing, gg.FlatNormClipper(1e9), loss_reduction="token_mean")
    with pytest.raises(UnsupportedGradientError, match=r"mixes samples|mix samples"):
        mixing(batch.x, batch.labels)


def test_a_model_that_returns_a_mean_over_tokens_of_which_some_are_missing_later():
    torch.manual_seed(0)
    model = WithLoss()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    for lengths in ([5, 5, 5, 5], [3, 3, 3, 3], [5, 5, 5, 5]):
        batch = Batch(lengths)
        model(batch.x, batch.labels)["loss"].backward()
        clipper.clip_and_accumulate()
    batch = Batch([5, 2, 3, 1])
    model(batch.x, batch.labels)["loss"].backward()
    with pytest.raises(UnsupportedGradientError, match=r"each sample's part is 0.364 to 1.82 of its own loss"):
        clipper.clip_and_accumulate()


def test_terms_of_different_shares_are_refused():
    clipper = exact("token_mean")
    with pytest.raises(UnsupportedGradientError, match="adds up terms in which a sample has different shares"):
        step(clipper, lambda out, batch: TOKENS["labels"](out, batch) + out.square().mean(), Batch([5, 2, 3, 1]))


def test_rows_are_counted_by_the_check():
    with pytest.raises(InvalidValueError, match="loss_reduction='token_mean' with check="):
        exact("token_mean", check=False)


BROADCAST = {
    "[B] and [B, 1]": lambda out, batch: F.mse_loss(out[:, 0, 0], batch.target[:, 0, :1]),
    "[B, 1] and [B]": lambda out, batch: F.mse_loss(out[:, 0, :1], batch.target[:, 0, 0]),
    "by hand": lambda out, batch: (out[:, 0, 0] - batch.target[:, 0, :1]).square().mean(),
    "by hand, [B, 1] and [B]": lambda out, batch: (out[:, 0, :1] - batch.target[:, 0, 0]).abs().mean(),
    "huber": lambda out, batch: F.huber_loss(out[:, 0, :1], batch.target[:, 0, 0]),
    "weights [B, 1] of losses [B]": lambda out, batch: (
        squares(out, batch).mean(1) * batch.weight.mean(1, keepdim=True)
    ).mean(),
    "targets of all": lambda out, batch: (out[:, 0] @ batch.target[:, 0].T).logsumexp(1).mean(),
    "where": lambda out, batch: torch.where(batch.mask[:, :1], out[:, 0, 0].square(), 0.0).mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", BROADCAST)
def test_targets_of_all_samples_beside_each_output_are_refused(name, reduction):
    def loss(out, batch):
        return BROADCAST[name](out, batch) * (len(out) if reduction == "sum" else 1)

    with pytest.raises(UnsupportedGradientError, match="constant of 4 entries"):
        step(exact(reduction), loss, Batch([5, 5, 5, 5]))


def test_a_constant_of_another_size_is_no_sample():
    grid = torch.linspace(-1, 1, 3).double()

    def loss(out, batch):
        return (out[:, 0, :1] - grid).square().sum(1).mean()

    with pytest.raises(UnsupportedGradientError, match="begin with a batch of another size"):
        step(exact(), loss, Batch([5, 5, 5]))
    clipper = exact()
    for size in (4, 3, 2, 3):  # known by now
        batch = Batch([5] * size)
        assert_exact(step(clipper, loss, batch), loss, batch)


NORMALIZED = {
    "weights over their mean": lambda out, batch: (squares(out, batch) * batch.weight / batch.weight.mean()).mean(),
    "of samples": lambda out, batch: (
        squares(out, batch).mean(1) * (batch.weight.mean(1) / batch.weight.mean())
    ).mean(),
    "over the sum of weights": lambda out, batch: (squares(out, batch) * batch.weight).sum() / batch.weight.sum(),
    "softmax over samples": lambda out, batch: (squares(out, batch).mean(1) * batch.weight.mean(1).softmax(0)).sum(),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_weights_normalized_over_the_batch_are_refused(name):
    with pytest.raises(UnsupportedGradientError, match="weights"):
        step(exact(), NORMALIZED[name], Batch([5, 5, 5, 5]))


def test_weights_of_their_own_are_exact():
    for loss in (
        lambda out, batch: (squares(out, batch) * batch.weight).mean(),
        lambda out, batch: (squares(out, batch).mean(1) * batch.weight[:, 0]).sum() / len(out),
        lambda out, batch: (squares(out, batch) * batch.weight).sum(1).div(batch.weight.sum(1)).mean(),
    ):
        clipper = exact()
        for number, size in enumerate((4, 3, 5)):
            batch = Batch([5] * size, number)
            assert_exact(step(clipper, loss, batch), loss, batch)


def times(factor):
    return lambda out, batch: squares(out, batch).mean() * factor(out)


def test_a_number_that_follows_the_number_of_samples_is_refused():
    clipper = exact()
    number = times(lambda out: float(len(out)))
    step(clipper, number, Batch([5] * 4))  # 4: a constant, for all that is known
    with pytest.raises(UnsupportedGradientError, match=r"has changed since an earlier batch, from 0.266667 to 0.2 in"):
        step(clipper, number, Batch([5] * 3))
    clipper.discard()
    step(clipper, times(lambda out: 4.0), Batch([5] * 3))
    step(clipper, times(lambda out: 4.0), Batch([5] * 4))


def test_a_schedule_is_exact():
    clipper = exact()
    for number, factor in enumerate((0.0, 0.1, 0.2, 1.0, 3.0)):
        batch = Batch([5] * (2 + number), number)
        loss = times(lambda out, factor=factor: clipper.constant(factor))
        assert_exact(step(clipper, loss, batch), loss, batch)
    with pytest.raises(UnsupportedGradientError, match=r"from 0.0666667 to 0.266667 .* write clipper.constant"):
        step(clipper, times(lambda out: 4.0), batch)


def test_a_tensor_is_no_constant():
    for number in (lambda out: out.detach().abs().mean(), lambda out: torch.tensor(0.3), lambda out: torch.tensor(3)):
        with pytest.raises(UnsupportedGradientError, match=r"a tensor .* multiplies it, .* as the tensor's .item\(\)"):
            step(exact(), times(number), Batch([5] * 4, 0))


def test_a_sum_divided_by_numbers_that_change_is_refused():
    clipper = exact("sum")
    for losses in (squares, lambda out, batch: squares(out, batch)[batch.mask]):
        step(clipper, lambda out, batch, losses=losses: losses(out, batch).sum() / 123, Batch([5] * 4))
        step(clipper, lambda out, batch, losses=losses: losses(out, batch).sum() / 123, Batch([5] * 3))
        with pytest.raises(
            UnsupportedGradientError, match=r"has changed since an earlier batch, from 0.00271003 to 0.002849"
        ):
            step(clipper, lambda out, batch, losses=losses: losses(out, batch).sum() / 117, Batch([5] * 3))
        clipper.discard()


PADDED = {
    "cut to the longest": lambda out, batch: F.smooth_l1_loss(
        out[:, : int(batch.mask.sum(1).max())], batch.target[:, : int(batch.mask.sum(1).max())]
    ),
    "mean": lambda out, batch: (squares(out, batch) * batch.mask).mean(),
    "sum over all": lambda out, batch: (squares(out, batch) * batch.mask).sum() / batch.mask.numel(),
    "cross entropy of each": lambda out, batch: F.cross_entropy(out.mT, batch.labels, reduction="none").mean(),
    "sum, cut to the longest": lambda out, batch: (
        squares(out, batch)[:, : int(batch.mask.sum(1).max())].sum() / float(len(out))
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_up_to_the_longest_is_no_sample_of_its_own(name):
    clipper = exact()
    step(clipper, PADDED[name], Batch([5, 2, 3]))
    step(clipper, PADDED[name], Batch([5, 2, 4], 1))
    batch = Batch([4, 2, 3])
    if "cut" not in name:
        for key, value in vars(batch).items():
            setattr(batch, key, value[:, :4])
    with pytest.raises(
        UnsupportedGradientError, match=r"the mean counts padding up to a length that|as (of|by) padding up to"
    ):
        step(clipper, PADDED[name], batch)


@pytest.mark.parametrize("strict", [False, True], ids=["", "private"])
def test_batches_of_other_lengths_without_padding_are_exact(strict):
    """In private training the length itself may depend on the longest sample."""
    clipper = exact()
    if strict:
        clipper.refuse_ambiguous_losses()
        step(clipper, lambda out, batch: out.square().mean(), Batch([5, 5]))
        batch = Batch([5, 5])
        batch.x = batch.x[:, :3]
        with pytest.raises(UnsupportedGradientError, match="the mean counts padding"):
            step(clipper, lambda out, batch: out.square().mean(), batch)
        return
    for length in (5, 3, 4):
        batch = Batch([5, 5, 5], length)
        for key, value in vars(batch).items():
            setattr(batch, key, value[:, :length])
        assert_exact(step(clipper, TOKENS["labels"], batch), TOKENS["labels"], batch)


@pytest.mark.parametrize("name", ["mse of the chosen", "labels", "mask"])
def test_half_precision_outputs(name):
    model = made().float()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), loss_reduction="token_mean")
    for number in range(2):
        batch = Batch([5, 2, 3, 1], number)
        batch.x, batch.target = batch.x.float(), batch.target.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch.x)
            loss = TOKENS[name](out, batch)
        loss.backward()
        clipper.clip_and_accumulate()
        assert clipper.statistics is not None
        single = Batch([5, 2, 3, 1], number)
        norms = [torch.stack([g.norm() for g in alone(TOKENS[name], single, i).values()]).norm() for i in range(4)]
        torch.testing.assert_close(clipper.statistics.norms, torch.stack(norms), rtol=0.03, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_may_leave_rows_out_in_a_later_batch_only(reduction):
    def loss(out, batch):
        return (squares(out, batch) * batch.mask).sum() / (len(out) if reduction == "mean" else 1)

    clipper = exact(reduction)
    for number, lengths in enumerate(([5, 5, 5, 5], [5, 2, 3, 1], [4, 4, 4], [5, 5, 5])):
        batch = Batch(lengths, number)
        assert_exact(step(clipper, loss, batch), loss, batch)


def test_a_batch_without_a_row_adds_nothing():
    clipper = exact()
    for lengths in ([3, 1, 2], [0, 0, 0], [5, 0, 1]):
        batch = Batch(lengths)
        loss = lambda out, batch: squares(out, batch)[batch.mask].sum() / len(out)  # noqa: E731
        assert_exact(step(clipper, loss, batch), loss, batch)


def test_rows_of_samples_that_vary_fastest_are_found():
    def loss(out, batch):
        rows = out.transpose(0, 1).flatten(0, 1) - batch.target.transpose(0, 1).flatten(0, 1)
        return torch.maximum(0.3 * rows, -0.7 * rows).mean()

    clipper = exact()
    for size in (4, 3):
        batch = Batch([5] * size, size)
        assert_exact(step(clipper, loss, batch), loss, batch)


def test_a_constant_divisor_of_a_sum_may_be_the_number_of_samples_once():
    clipper = exact("sum")
    loss = lambda out, batch: squares(out, batch).sum() / 4  # noqa: E731
    for size in (5, 4, 3):
        step(clipper, loss, Batch([5] * size))


def test_class_weights_of_single_samples_are_exact():
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def loss(out, batch):
        losses = [F.cross_entropy(o, t, weight=weight) for o, t in zip(out, batch.tokens, strict=True)]
        return torch.stack(losses).mean()

    clipper = exact()
    assert_exact(step(clipper, loss, Batch([5] * 4)), loss, Batch([5] * 4))


def own_weights_of_tokens(out, batch):
    """A mean over the chosen rows of which each has a weight of its own."""
    return (squares(out, batch)[batch.mask] * batch.weight[batch.mask]).sum() / batch.mask.sum()


def kl_of_the_chosen(out, batch):
    rows = F.kl_div(out.log_softmax(-1), batch.target.softmax(-1), reduction="none")
    return rows[batch.mask].nanmean()


@pytest.mark.parametrize("loss", [own_weights_of_tokens, kl_of_the_chosen])
def test_rows_with_weights_are_counted_and_not_weighed(loss):
    for lengths in ([1, 3, 2], [0, 2, 4], [2, 2, 2]):
        batch = Batch(lengths)
        assert_exact(step(exact("token_mean"), loss, batch), loss, batch)
        if len(set(lengths)) == 1:
            assert_exact(step(exact(), loss, batch), loss, batch)
            continue
        with pytest.raises(UnsupportedGradientError, match="the loss is not the mean over samples"):
            step(exact(), loss, batch)


def test_batches_of_turning_sizes():
    for reduction in ("mean", "token_mean"):
        clipper = exact(reduction)
        for number, size in enumerate((4, 5, 4, 1, 4, 1)):
            batch = Batch([5] * size, number)
            loss = lambda out, batch: F.mse_loss(out, batch.target)  # noqa: E731
            assert_exact(step(clipper, loss, batch), loss, batch)


ONE_SAMPLE = {
    "weights of samples": lambda out, batch: (squares(out, batch).mean(1) * batch.weight[:, 0]).mean(),
    "masked values": lambda out, batch: F.huber_loss(out * batch.mask[..., None], batch.target * batch.mask[..., None]),
    "masked losses": lambda out, batch: (squares(out, batch) * batch.mask).mean(),
    "labels": TOKENS["labels"],
}


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_a_batch_of_one_sample_among_others(name):
    clipper = exact("token_mean" if name == "labels" else "mean")
    for number, lengths in enumerate(([5] * 4, [5], [3], [5] * 3, [4])):
        batch = Batch(lengths, number)
        assert_exact(step(clipper, ONE_SAMPLE[name], batch), ONE_SAMPLE[name], batch)


def test_a_divisor_that_is_once_the_number_of_samples_is_no_mean_in_another_batch():
    for reduction in ("mean", "token_mean"):
        clipper = exact(reduction)
        step(clipper, lambda out, batch: squares(out, batch).sum() / 4, Batch([5] * 4))
        with pytest.raises(
            UnsupportedGradientError, match=r"divided by 4, which is neither .* number of samples \(2\)"
        ):
            step(clipper, lambda out, batch: squares(out, batch).sum() / 4, Batch([5] * 2))


def test_a_division_by_one_row_is_one_by_rows():
    def loss(out, batch):
        return squares(out, batch).masked_fill(~batch.mask, 0).sum() / batch.mask.sum()

    clipper = exact("sum")
    with pytest.raises(UnsupportedGradientError, match="it is a mean"):
        step(clipper, loss, Batch([1, 1]))
    constant = lambda number: lambda out, batch: squares(out, batch).sum() / number  # noqa: E731
    step(clipper, constant(7), Batch([5, 5]))
    with pytest.raises(UnsupportedGradientError, match="has changed since an earlier batch"):
        step(clipper, constant(1), Batch([5, 5]))


def test_a_schedule_that_ends_with_a_whole_number_is_exact():
    clipper = exact()
    for number in range(4):
        beta = min(1, number / 3)
        loss = lambda out, batch, b=beta: squares(out, batch).mean() + clipper.constant(b) * out.abs().mean()  # noqa: E731
        batch = Batch([5] * (3 + number % 2))
        assert_exact(step(clipper, loss, batch), loss, batch)


def test_rows_put_into_others_are_refused_which_hides_what_they_are_put_into():
    padded = torch.nn.utils.rnn.pad_sequence

    def loss(out, batch):
        return padded([value[mask] for value, mask in zip(out, batch.mask, strict=True)]).square().mean()

    with pytest.raises(UnsupportedGradientError, match=r"does not show .*CopySlices takes.*per_sample_losses"):
        step(exact(), loss, Batch([2, 2, 2]))


def test_a_sample_without_a_label_leaves_no_count_behind():
    def loss(out, batch):
        return F.cross_entropy(out[:, 0], batch.labels[:, 0])

    clipper = exact("token_mean")
    for lengths in ([1, 1, 0], [0], [1], [1, 0], [1]):
        batch = Batch(lengths)
        assert_exact(step(clipper, loss, batch), loss, batch)


def test_a_sum_over_rows_of_several_values_divided_by_the_rows():
    def loss(out, batch):
        return F.mse_loss(out[batch.mask], batch.target[batch.mask], reduction="sum") / batch.mask.sum()

    for lengths in ([1, 3, 2], [2, 2, 2]):
        batch = Batch(lengths)
        assert_exact(step(exact("token_mean"), loss, batch), loss, batch)
    with pytest.raises(UnsupportedGradientError, match="divided by 6, which is neither"):
        step(exact(), loss, Batch([1, 3, 2]))


def test_a_factor_that_is_once_one_over_the_number_of_samples_is_no_mean_in_another_batch():
    def loss(out, batch):
        return F.mse_loss(out, batch.target) + 0.5 * squares(out, batch).sum() / 2.5

    clipper = exact()
    step(clipper, loss, Batch([5, 5]))
    with pytest.raises(UnsupportedGradientError, match="has changed since an earlier batch, from"):
        step(clipper, loss, Batch([5]))
    for lengths in ([5], [5, 5], [5, 5, 5]):
        private = exact()
        private.refuse_ambiguous_losses()
        with pytest.raises(UnsupportedGradientError, match=r"numbers multiply a sum by 0\.2, and"):
            step(private, loss, Batch(lengths))


CHANCE = {
    "the mean of the only sample that is kept": (
        "mean",
        [4, 0],
        lambda out, batch, number: number * F.mse_loss(out[batch.mask.any(1)], batch.target[batch.mask.any(1)]),
    ),
    "a mean of rows": ("token_mean", [2, 3], lambda out, batch, number: squares(out, batch).mean() / number),
    "a sum of rows": ("token_mean", [1, 3], lambda out, batch, number: squares(out, batch).sum() / number),
    "a sum of samples": ("sum", [5, 5], lambda out, batch, number: squares(out, batch).sum() / number),
    "a mean of samples": ("mean", [5, 5], lambda out, batch, number: squares(out, batch).mean(1).sum() / number),
    "within samples": ("mean", [5, 5], lambda out, batch, number: (squares(out, batch).sum(1) / number).mean()),
    "of a loop": (
        "mean",
        [5, 5],
        lambda out, batch, number: sum(F.mse_loss(o, y) for o, y in zip(out, batch.target, strict=True)) / number,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHANCE)
def test_no_number_is_taken_for_two_things_in_private_training(name):
    """Whatever a number is in the first batch, all batches that may be accepted give the sample one gradient."""
    reduction, lengths, loss = CHANCE[name]
    accepted: list[Tensor] = []
    for size in (1, 2, 3):
        for number in (0.5, 1, 2, 3, 5, 6, 15, 30):
            clipper, batch = exact(reduction), Batch([*lengths, 5]).rows(slice(size))
            clipper.refuse_ambiguous_losses()
            with contextlib.suppress(UnsupportedGradientError):
                found = step(clipper, lambda out, batch, number=number: loss(out, batch, number), batch)
                accepted.append(torch.cat([each[0].flatten() for each in found.values()]))
    assert accepted
    for found in accepted[1:]:
        torch.testing.assert_close(found, accepted[0])


def test_a_number_that_equals_a_declared_one_is_not_declared():
    def loss(out, batch, labels):
        return clipper.constant(0.25) * squares(out, batch).mean() + (out.abs().mean() / labels)

    clipper = exact()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"2 operations take the number 4, and 1 of them"):
        step(
            clipper,
            lambda out, batch: clipper.constant(4) * squares(out, batch).mean() + out.abs().mean() / 4.0,
            Batch([5]),
        )
    clipper.discard()
    with pytest.raises(UnsupportedGradientError, match=r"numbers multiply a mean by 0\.25, and 1 was expected"):
        step(clipper, lambda out, batch: loss(out, batch, 4), Batch([5, 5]))


@pytest.mark.parametrize("number", [0.3, 2, 5])
def test_a_number_that_is_declared_is_taken_in_private_training(number):
    clipper = exact()
    clipper.refuse_ambiguous_losses()
    for lengths in ([5, 5], [5]):
        batch = Batch(lengths)
        loss = lambda out, batch: clipper.constant(number) * squares(out, batch).mean()  # noqa: E731
        assert_exact(step(clipper, loss, batch), loss, batch)


class OnlyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = made()

    def forward(self, x, target):
        return F.mse_loss(self.inner(x), target)


def test_a_model_that_returns_nothing_but_its_loss():
    torch.manual_seed(0)
    clipper = gg.PerSampleGradientClipper(OnlyLoss(), gg.FlatNormClipper(1e9), mode="exact")
    for number, size in enumerate((4, 5, 4, 1, 5)):
        batch = Batch([5] * size, number)
        clipper.module.zero_grad()
        clipper.module(batch.x, batch.target).backward()
        clipper.clip_and_accumulate()
        found = {name.removeprefix("inner."): rows for name, rows in clipper.per_sample_gradients().items()}
        clipper.pre_step()
        assert_exact(found, lambda out, batch: F.mse_loss(out, batch.target), batch)


def test_gradients_asked_for_before_clipping_are_of_what_is_trained_now():
    clipper = exact()
    bias = clipper.module[2].bias
    for trained in (True, False, True):
        bias.requires_grad_(trained)
        clipper.module.zero_grad()
        squares(clipper.module(Batch([5, 5]).x), Batch([5, 5])).mean().backward()
        assert ("2.bias" in clipper.per_sample_gradients()) is trained
        clipper.clip_and_accumulate()
        clipper.pre_step()


@pytest.mark.parametrize("factor", [0.1, 1e-3, 2.0])
def test_a_sum_that_is_said_to_be_a_mean_is_refused_whatever_it_is_multiplied_by(factor):
    with pytest.raises(UnsupportedGradientError, match="sum"):
        step(exact(), lambda out, batch: squares(out, batch).sum() * factor, Batch([5] * 4))


def test_labels_on_a_device_are_counted_there_and_read_later(monkeypatch):
    monkeypatch.setattr(loss_check, "is_read_at_once", lambda tensor: False)
    clipper = exact()
    step(clipper, TOKENS["labels"], Batch([3, 3, 3, 3]))
    good = step(clipper, TOKENS["labels"], Batch([2, 2, 2, 2], 1))
    assert_exact(good, TOKENS["labels"], Batch([2, 2, 2, 2], 1))
    step(clipper, TOKENS["labels"], Batch([5, 2, 3, 1], 2))
    assert not any(bool(p.grad.any()) for p in clipper.module.parameters()), "nothing of it is added"
    with pytest.raises(
        UnsupportedGradientError, match="in the mini-batch before this one samples had different numbers"
    ):
        clipper.module(Batch([3, 3, 3, 3]).x)
    step(clipper, TOKENS["labels"], Batch([3, 3, 3, 3]))


ACCEPTED = {
    **{f"{name}, {lengths}": (loss, "token_mean", lengths) for (name, loss), lengths in itertools.product(
        TOKENS.items(), ([5, 2, 3, 1], [1, 4, 2, 3]))},
    **{name: (loss, "mean", [4, 4, 4, 4]) for name, loss in TOKENS.items()},
    "weighted": (lambda out, batch: (squares(out, batch) * batch.weight).mean(), "mean", [5, 5, 5, 5]),
    "own means": (
        lambda out, batch: ((squares(out, batch) * batch.mask).sum(1) / batch.mask.sum(1)).mean(), "mean", [5, 2, 3, 1]
    ),
    "sum": (lambda out, batch: squares(out, batch)[batch.mask].sum(), "sum", [5, 2, 3, 1]),
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_sample_moves_no_other(name):
    """The sum of clipped gradients has sensitivity C: what the others add stays as it is, whatever one sample is."""
    loss, reduction, lengths = ACCEPTED[name]
    before = step(exact(reduction), loss, Batch(lengths))
    changed = Batch(lengths)
    other = Batch([2 if reduction != "mean" or name == "own means" else lengths[0]], 9)
    for key, value in vars(changed).items():
        value[1] = vars(other)[key][0]
    after = step(exact(reduction), loss, changed)
    for key, rows in after.items():
        for i in (0, 2, 3):
            torch.testing.assert_close(rows[i], before[key][i], rtol=1e-11, atol=1e-14)


def classified_well(reorder):
    """A clipper after a batch of which one sample alone has a derivative, and what that one gets alone."""
    x = torch.full((5, 4), 200.0)
    x[3] = 0.1
    model, labels = nn.Linear(4, 2), torch.zeros(5, dtype=torch.long)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
    own = F.cross_entropy(model(x[3:4]), labels[:1], reduction="none")
    [expected] = torch.autograd.grad(((1 - (-own).exp()) ** 2 * own).mean(), [model.weight])
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact", loss_reduction="token_mean")
    rows = F.cross_entropy(reorder(clipper.module(x)), labels, reduction="none")
    ((1 - (-rows).exp()) ** 2 * rows).mean().backward()
    clipper.clip_and_accumulate()
    return clipper, expected


@pytest.mark.parametrize("reorder", [lambda h: h, lambda h: h[[3, 0, 4, 1, 2]]], ids=["as they are", "by an index"])
def test_rows_without_a_derivative_are_their_samples_where_the_graph_says_so(reorder):
    clipper, expected = classified_well(reorder)
    torch.testing.assert_close(clipper.per_sample_gradients()["weight"][3], expected)


def test_rows_without_a_derivative_are_not_taken_for_those_of_the_only_sample_with_one():
    with pytest.raises(UnsupportedGradientError, match=r"4 of the 5 values .* have a derivative of 0 in this batch"):
        classified_well(lambda h: torch.cat([h[3:], h[:3]]))


def test_a_row_without_a_derivative_is_counted_for_its_own_sample():
    """Six rows of three samples, chosen twice: those of hinges that are closed contradict no place."""
    torch.manual_seed(0)
    model, x, valid = made(), torch.randn(3, T, 4, dtype=torch.float64), torch.zeros(3, T, dtype=torch.bool)
    valid[0, :2], valid[1, :1], valid[2, :3] = True, True, True
    open_hinges = torch.tensor([1.0, 1.0, 1.0, -100.0, 1.0, 1.0], dtype=torch.float64)  # row 3 is sample 2's

    def loss(out, mask, shift):
        left, right = out[..., 0][mask], out[..., 1][mask]
        return (left - right + 2 * shift).clamp(min=0).mean()

    expected = torch.autograd.grad(loss(model(x[1:2]), valid[1:2], open_hinges[2:3]), [model[2].weight])[0]
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact", loss_reduction="token_mean")
    loss(clipper.module(x), valid, open_hinges).backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(clipper.per_sample_gradients()["2.weight"][1], expected)


PRIVATE = {
    "a sum by the samples": ("mean", lambda out, batch: squares(out, batch).mean(1).sum() / len(out)),
    "half of a mean": ("mean", lambda out, batch: 0.5 * squares(out, batch).mean()),
    "half of a sum": ("mean", lambda out, batch: 0.5 * squares(out, batch).sum() / len(out)),
    "a mean over features": ("mean", lambda out, batch: ((out - batch.target).square().sum(-1) / V).mean()),
    "a mean over features, by hand": (
        "mean",
        lambda out, batch: ((out - batch.target).square().sum(-1).sum(-1) / (V * T)).sum() / len(out),
    ),
    "one mini-batch, as trainers divide": (
        "mean",
        lambda out, batch: (out - batch.target).square().sum(-1).mean() / 1,
    ),
    "1 over the samples": ("mean", lambda out, batch: 1 / len(out) * squares(out, batch).sum()),
    "kl, batchmean": (
        "mean",
        lambda out, batch: F.kl_div(out.log_softmax(-1), batch.target.softmax(-1), reduction="batchmean"),
    ),
    "smoothed labels": ("mean", lambda out, batch: F.cross_entropy(out.mT, batch.tokens, label_smoothing=0.1)),
    "soft labels": (
        "mean",
        lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch.target.softmax(-1).flatten(0, 1)),
    ),
    "several labels": (
        "mean",
        lambda out, batch: F.multilabel_soft_margin_loss(out.flatten(0, 1), (batch.target > 0).flatten(0, 1).double()),
    ),
    "a mean over chosen tokens": (
        "token_mean",
        lambda out, batch: squares(out, batch)[batch.mask].sum() / batch.mask.sum(),
    ),
    "a mean over weighed tokens": (
        "token_mean",
        lambda out, batch: (squares(out, batch) * batch.mask).sum() / int(batch.mask.sum()),
    ),
    "a sum": ("sum", lambda out, batch: squares(out, batch).sum()),
}
"""Losses that private training takes, each with its reduction: a sum has one divisor, and other numbers are 0.5."""


@pytest.mark.parametrize("name", PRIVATE)
def test_a_number_that_is_a_count_is_taken_in_private_training(name):
    reduction, loss = PRIVATE[name]
    clipper = exact(reduction)
    clipper.refuse_ambiguous_losses()
    equal = reduction == "mean"
    for lengths in ([5, 5, 5, 5], [5, 5, 5]) if equal else ([1, 3, 2, 5, 4], [3, 2, 5], [1, 1, 3, 5]):
        batch = Batch(lengths)
        assert_exact(step(clipper, loss, batch), loss, batch)


COUNTED = {
    "a whole divisor": ("sum", lambda out, batch: squares(out, batch).sum() / float(2 * batch.mask.sum())),
    "1 over a whole number": ("sum", lambda out, batch: 1 / float(2 * batch.mask.sum()) * squares(out, batch).sum()),
    "a sum by the rows": ("mean", lambda out, batch: squares(out, batch).sum() / (len(out) * T)),
    "a number beside a mean": ("mean", lambda out, batch: 0.3 * squares(out, batch).mean()),
    "a number beside a sum": ("sum", lambda out, batch: 0.3 * squares(out, batch).sum()),
    "the root of the samples": ("mean", lambda out, batch: squares(out, batch).sum() / len(out) ** 0.5),
    "another count besides": (
        "mean",
        lambda out, batch: squares(out, batch).sum() / len(out) / int(batch.mask.sum(1).max()),
    ),
    "columns": ("mean", lambda out, batch: squares(out, batch)[:, batch.mask.any(0)].mean()),
    "columns by number": (
        "mean",
        lambda out, batch: squares(out, batch).index_select(1, batch.mask.any(0).nonzero()[:, 0]).mean(),
    ),
}
"""Losses in which a number, or a length, may follow the batch."""


@pytest.mark.parametrize("name", COUNTED)
def test_a_number_that_may_be_another_in_the_next_batch_is_refused_in_private_training(name):
    reduction, loss = COUNTED[name]
    clipper = exact(reduction)
    clipper.refuse_ambiguous_losses()
    words = r"numbers multiply .* was expected.* clipper.constant\(number\)|all samples share"
    with pytest.raises(UnsupportedGradientError, match=words):
        step(clipper, loss, Batch([1, 3, 2, 5]))


def test_a_length_counts_where_masks_divide_its_rows_among_terms():
    def loss(out, batch):
        longest = int(batch.mask.sum(1).max())
        signs = (batch.target[:, :longest] > 0).double()
        return F.multilabel_soft_margin_loss(out[:, :longest], signs)

    clipper = exact()
    step(clipper, loss, Batch([2, 4, 1]))
    with pytest.raises(UnsupportedGradientError, match="the mean counts padding"):
        step(clipper, loss, Batch([2, 3, 1], 1))


def test_a_batch_without_rows_has_a_length_too():
    def loss(out, batch):
        return F.mse_loss(out[:, : int(batch.mask.sum(1).max())], batch.target[:, : int(batch.mask.sum(1).max())])

    clipper = exact()
    step(clipper, loss, Batch([0, 0]))
    with pytest.raises(UnsupportedGradientError, match="the mean counts padding"):
        step(clipper, loss, Batch([2, 3]))


def test_rows_of_many_samples_in_half_precision_are_told_apart():
    """A number above 256 is none of bfloat16."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    out = model(torch.randn(260, 4).bfloat16())
    torch.stack([out[i] for i in torch.randperm(260).tolist()]).exp().mean(1).mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 260


def step_of_time_first(loss) -> dict[str, Tensor]:
    """A step with as many samples as classes, of which it is seen which of the two an operation goes along."""
    batch = Batch([T] * V)
    clipper = gg.PerSampleGradientClipper(made(), gg.FlatNormClipper(torch.inf), batch_first=False, mode="exact")
    loss(clipper.module(batch.x.transpose(0, 1)), batch).backward()
    clipper.clip_and_accumulate()
    return clipper.per_sample_gradients()


def test_classes_are_no_samples_because_there_are_as_many():
    def loss(out, batch):
        return F.cross_entropy(out.transpose(0, 1).flatten(0, 1), batch.tokens.flatten())

    found = step_of_time_first(loss)
    assert_exact(found, lambda out, batch: loss(out.transpose(0, 1), batch), Batch([T] * V))


@pytest.mark.parametrize("dim", [0, 1])
def test_only_what_goes_along_the_samples_is_refused(dim):
    def loss(out, batch):
        return (out.log_softmax(dim) * batch.target.transpose(0, 1)).sum((0, 2)).mean()

    if dim == 1:
        with pytest.raises(UnsupportedGradientError, match="depend on several samples each"):
            step_of_time_first(loss)
    else:
        found = step_of_time_first(loss)
        assert_exact(found, lambda out, batch: (out.log_softmax(1) * batch.target).sum(), Batch([T] * V))


def distilled(constant, heat):
    """A function of what constants are declared by: the loss of a teacher at some temperature."""

    def loss(out, batch):
        teacher = (batch.target.flatten(1) / heat).softmax(-1)
        student = (out.flatten(1) / constant(heat)).log_softmax(-1)
        return F.kl_div(student, teacher, reduction="batchmean") * constant(heat * heat)

    return loss


OF_DECLARED = {
    "distillation": lambda constant, number: distilled(constant, number),
    "a sum": lambda constant, number: lambda out, batch: constant(number) * squares(out, batch).sum() / len(out),
    "a sum, divided twice": lambda constant, number: (
        lambda out, batch: squares(out, batch).sum() / len(out) / constant(number)
    ),
}
"""Losses with a number that is declared, by what declares it."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("reduction", ["private", "mean"])
@pytest.mark.parametrize("number", [2, 2.0, 4.0])
@pytest.mark.parametrize("name", OF_DECLARED)
def test_a_declared_number_that_equals_the_number_of_samples_is_not_taken_for_it(name, number, reduction):
    clipper = exact()
    if reduction == "private":
        clipper.refuse_ambiguous_losses()
    own = OF_DECLARED[name](float, number)
    for size in (3, 2, 4, 16, 1):
        batch = Batch([5] * size)
        assert_exact(step(clipper, OF_DECLARED[name](clipper.constant, number), batch), own, batch)


COUNTED_AS_DECLARED = [
    lambda constant, count: lambda out, batch: squares(out, batch).sum() / constant(float(len(out))) * count(len(out)),
    lambda constant, count: lambda out, batch: squares(out, batch).mean() / constant(2.0) * count(2 * len(out)),
    lambda constant, count: lambda out, batch: squares(out, batch).sum() * constant(8.0) / count(8),
]
"""Losses with a count beside a declared number, which it may equal."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", [int, float])
@pytest.mark.parametrize("made_of", COUNTED_AS_DECLARED)
def test_a_count_is_not_taken_for_the_declared_number_that_it_equals(made_of, count, size):
    """Neither a factor where the divisor is declared, nor the other way round: the gradient would be another."""
    clipper = exact()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"numbers multiply|operations take the number"):
        step(clipper, made_of(clipper.constant, count), Batch([5] * size))


@pytest.mark.parametrize("loss", [squares, lambda out, batch: out.sum().exp()], ids=["a sum", "mixed"])
def test_a_refusal_names_nothing_that_is_gone(loss):
    with pytest.raises(UnsupportedGradientError, match=r"Nothing was clipped") as refused:
        step(exact(), lambda out, batch: loss(out, batch).sum(), Batch([5, 5]))
    assert "check=" not in str(refused.value)


HALVES = {
    "a mean": lambda out, batch, half: half(F.mse_loss(out, batch.target)),
    "two means": lambda out, batch, half: half(F.mse_loss(out, batch.target) + out.abs().mean()),
    "a sum": lambda out, batch, half: half(squares(out, batch).sum() / len(out)),
}
"""Losses of which half is taken, in some way."""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", HALVES)
def test_half_of_a_loss_is_said_as_the_refusal_of_a_division_by_2_says(name, size):
    """A division by 2 may be one by the samples of a batch of two."""
    batch = Batch([5] * size)
    own = lambda out, batch: HALVES[name](out, batch, lambda loss: 0.5 * loss)  # noqa: E731
    for how in ("0.5 * loss", "loss / constant(2)", "loss / 2"):
        clipper = exact()
        clipper.refuse_ambiguous_losses()
        half = {
            "0.5 * loss": lambda loss: 0.5 * loss,
            "loss / constant(2)": lambda loss, clipper=clipper: loss / clipper.constant(2),
            "loss / 2": lambda loss: loss / 2,
        }[how]
        loss = lambda out, batch, half=half: HALVES[name](out, batch, half)  # noqa: E731
        if how != "loss / 2":
            assert_exact(step(clipper, loss, batch), own, batch)
            continue
        with pytest.raises(UnsupportedGradientError, match=r"write 0\.5 \* loss, or loss / clipper\.constant\(2\)"):
            step(clipper, loss, batch)


def test_a_mean_and_a_variance_are_taken_apart_as_the_refusal_of_a_cut_says():
    def nll(mean, logvar, batch):
        return (logvar + (batch.target[..., :2] - mean).square() * (-logvar).exp()).mean()

    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact")
    clipper.refuse_ambiguous_losses()
    for size in (3, 2, 1):
        batch = Batch([5] * size)
        model.zero_grad()
        nll(*model(batch.x).chunk(2, -1), batch).backward()
        clipper.clip_and_accumulate()
        found = clipper.per_sample_gradients()["weight"]
        clipper.pre_step()
        for i in range(size):
            one, twin = batch.sample(i), nn.Linear(4, 4).double()
            twin.load_state_dict(model.state_dict())
            nll(*twin(one.x).chunk(2, -1), one).backward()
            torch.testing.assert_close(found[i], twin.weight.grad)
    batch = Batch([5, 5])
    out = model(batch.x)
    nll(out[..., :2], out[..., 2:], batch).backward()
    with pytest.raises(UnsupportedGradientError, match=r"by output\.chunk\(2, -1\)"):
        clipper.clip_and_accumulate()


def tempered(out, heat):
    return (out / heat).log_softmax(-1).square().mean()


def test_a_number_declared_behind_a_function_does_not_declare_a_factor():
    """A temperature 2 is declared, and a count that multiplies the loss is 2 in this batch."""
    clipper = exact()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"2 operations take the number 2, and 1 of them"):
        step(clipper, lambda out, batch: tempered(out, clipper.constant(2)) * float(len(out)), Batch([5, 5]))
    clipper.discard()
    loss = lambda out, batch: tempered(out, clipper.constant(2)) * clipper.constant(2)  # noqa: E731
    assert_exact(step(clipper, loss, Batch([5, 5])), loss, Batch([5, 5]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_half_that_is_declared_stands_beside_one_that_need_not_be(size):
    clipper, batch = exact(), Batch([5] * size)
    clipper.refuse_ambiguous_losses()
    loss = lambda out, batch: clipper.constant(0.5) * (0.5 * squares(out, batch)).mean()  # noqa: E731
    assert_exact(step(clipper, loss, batch), lambda out, batch: 0.25 * squares(out, batch).mean(), batch)
    with pytest.raises(UnsupportedGradientError, match=r"2 operations take the number 0.5, and 1 of them"):
        step(clipper, lambda out, batch: squares(out, batch).mean() / clipper.constant(0.5) * 0.5, batch)


def least(values, bound):
    return torch.minimum(values.square().mean((1, 2)), bound)


FOR_ALL = {
    "a column": lambda out, t: out[..., int(t.mean((0, 1)).argmax())].square().mean(),
    "select": lambda out, t: out.select(2, int(t.mean((0, 1)).argmax())).square().mean(),
    "unbind": lambda out, t: out.unbind(2)[int(t.mean((0, 1)).argmax())].square().mean(),
    "split": lambda out, t: out.split(1, 2)[int(t.mean((0, 1)).argmax())].square().mean(),
    "a narrow part": lambda out, t: out.narrow(2, int(t.mean((0, 1)).argmax()), 1).square().mean(),
    "a column in a loop": lambda out, t: torch.stack(
        [one[:, int(t.mean((0, 1)).argmax())].square().mean() for one in out]
    ).mean(),
}
"""Losses in which the whole batch chooses a column."""

BESIDE = {
    "clamp": lambda out, t, s: (out - t).abs().clamp(max=s).mean(),
    "clamp_min": lambda out, t, s: (out - t).abs().clamp_min(s).mean(),
    "minimum": lambda out, t, s: least(out - t, s).mean(),
    "pow": lambda out, t, s: ((out - t).abs() + 0.1).pow(s).mean(),
    "a factor behind a square": lambda out, t, s: ((out - t) * s).square().mean(),
    "a choice": lambda out, t, s: torch.where(s > 0.7, (out - t).square(), (out - t).abs()).mean(),
}
"""Losses that take a tensor of one value."""


def step_on(clipper, loss, target: Tensor) -> None:
    clipper.module.zero_grad()
    loss(clipper.module(torch.randn(len(target), T, 4).double()), target).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()


def targets(column: int, size: int = 4) -> Tensor:
    """Targets of which one record's, the last, decides which column has the largest mean."""
    target = Batch([T] * size).target.clone()
    target[-1, :, column] += 1e3
    return target


@pytest.mark.parametrize("private", [True, False], ids=["private", ""])
@pytest.mark.parametrize("name", FOR_ALL)
def test_a_place_that_a_batch_chooses_for_all_is_refused_when_it_is_another(name, private):
    clipper = exact()
    if private:
        clipper.refuse_ambiguous_losses()
    if private and name == "split":  # by a length, as of the longest sample
        with pytest.raises(UnsupportedGradientError, match=r"SplitBackward0 cuts or fills.*output\.unbind\(-1\)"):
            step_on(clipper, FOR_ALL[name], targets(0))
        return
    step_on(clipper, FOR_ALL[name], targets(0))
    step_on(clipper, FOR_ALL[name], targets(0, 3))
    with pytest.raises(UnsupportedGradientError, match=r"the place 2 .* was 0 in an earlier batch.*int\(clipper.const"):
        step_on(clipper, FOR_ALL[name], targets(2))


def test_a_place_of_a_schedule_is_declared():
    clipper = exact()
    for column in (0, 2, 1):
        place = functools.partial(clipper.constant, column)
        step_on(clipper, lambda out, t, place=place: (out - t)[:, int(place())].square().mean(), targets(0))


@pytest.mark.parametrize("name", BESIDE)
def test_a_tensor_of_one_value_is_declared_in_private_training(name):
    clipper = exact()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(
        UnsupportedGradientError, match=r"a tensor of shape \[\], which all samples share.*constant\(value.item"
    ):
        step_on(clipper, lambda out, t: BESIDE[name](out, t, t.abs().mean()), targets(0))
    clipper.discard()
    if name == "a choice":
        return
    for size in (4, 3, 1):
        step_on(
            clipper,
            lambda out, t: BESIDE[name](out, t, torch.tensor(clipper.constant(0.5), dtype=out.dtype)),
            targets(0, size),
        )


def test_an_addition_beside_that_of_targets_is_refused_in_private_training():
    clipper = exact()
    clipper.refuse_ambiguous_losses()
    with pytest.raises(UnsupportedGradientError, match=r"shows only their sum.*per_sample_losses"):
        step_on(clipper, lambda out, t: (out - t + t.mean()).square().mean(), targets(0))
    clipper.discard()
    step_on(clipper, lambda out, t: (out - (t - 1)).square().mean(), targets(0))


NEIGHBOURS = {
    "the first": lambda out, t: out[..., 0].square().mean(),
    "the last": lambda out, t: out[:, -1].square().mean(),
    "the last token by its number": lambda out, t: out[:, out.shape[1] - 1].square().mean(),
    "halves": lambda out, t: torch.mul(*out.chunk(2, 1)[0].chunk(2, 2)).mean(),
    "parts": lambda out, t: torch.sub(*out.unbind(2)[:2]).square().mean(),
    "a number as bound": lambda out, t: (out - t).abs().clamp(max=0.5).mean(),
    "an exponent": lambda out, t: ((out - t).abs() + 0.1).pow(1.5).mean(),
    "each sample's bound": lambda out, t: least(out - t, t.abs().mean((1, 2))).mean(),
    "a mask": lambda out, t: torch.where(t > 0, out - t, 0.0).square().mean(),
    "1 - p": lambda out, t: ((1 - out.sigmoid() + 1e-7).log() * t).mean(),
    "triplet": lambda out, t: F.triplet_margin_loss(out[:, 0], t[:, 0], t[:, 1]),
    "a loop": lambda out, t: sum((one - y).square().mean() for one, y in zip(out, t, strict=True)) / len(out),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("private", [True, False], ids=["private", ""])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_losses_beside_those_that_share_are_taken(name, private):
    clipper = exact()
    if private:
        clipper.refuse_ambiguous_losses()
    for size in (4, 4, 3, 1, 5):
        step_on(clipper, NEIGHBOURS[name], targets(size % 3, size))


def test_the_last_token_of_batches_of_other_lengths_is_the_last():
    clipper = exact()
    for length in (5, 3, 4):
        out = clipper.module(torch.randn(4, length, 4).double())
        out[:, length - 1].square().mean().backward()
        clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 12


@pytest.mark.parametrize("private", [True, False], ids=["private", ""])
def test_rows_without_a_derivative_are_of_no_other_sample(private):
    """Of two samples of two tokens each, turned, only those that the order of samples would explain, too."""
    clipper = gg.PerSampleGradientClipper(
        nn.Linear(1, 1).double(), gg.FlatNormClipper(1.0), loss_reduction="token_mean"
    )
    if private:
        clipper.refuse_ambiguous_losses()
    with torch.no_grad():
        clipper.module.weight.fill_(1.0), clipper.module.bias.fill_(0.0)
    out = clipper.module(torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)[..., None])[..., 0]
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    ((F.relu(out.T.flatten()) * mask.T.flatten()).sum() / mask.sum()).backward()
    with pytest.raises(UnsupportedGradientError, match="may belong to 2 samples in several ways"):
        clipper.clip_and_accumulate()


@pytest.mark.parametrize("weight", [0.5, 0.4, 2.0])
@pytest.mark.parametrize("labels", [[-100, 0], [0, -100], [-100, 0, -100, -100], [0, 1]])
def test_the_weight_of_a_class_cancels_where_only_one_sample_has_a_label(weight, labels):
    weights = torch.tensor([weight, 1.25, 2.0], dtype=torch.float64)

    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels, weight=weights)

    model, generator = made(), torch.Generator().manual_seed(0)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="token_mean", mode="exact")
    for given in ([1, 0, -100, -100, 1, 1], labels):
        x = torch.randn(len(given), 4, generator=generator, dtype=torch.float64)
        model.zero_grad()
        loss(model(x), torch.tensor(given)).backward()
        clipper.clip_and_accumulate()
        found = clipper.per_sample_gradients()
        for i, label in enumerate(given):
            own = made()
            if label >= 0:
                loss(own(x[i : i + 1]), torch.tensor([label])).backward()
            for name, gradients in found.items():
                expected = own.get_parameter(name).grad if label >= 0 else torch.zeros_like(gradients[i])
                torch.testing.assert_close(gradients[i], expected)
        clipper.pre_step()


@pytest.mark.parametrize("changes_at", [None, 3])
def test_weights_of_classes_that_stay_add_up_to_the_number_of_labels_by_chance(changes_at):
    """Weights that are balanced over each batch always do: they change with it."""
    constant = torch.tensor([0.5, 1.0, 2.0, 0.25])
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction="token_mean")
    labels = [[0, 1, 2, 3, 3], [0, 1, 2, 2, 1, 3], [0, 0, 2, 1, 1], [0, 0, 2, 1, 3], [0, 1, 2, 3, 3, 2]]
    for step, given in enumerate(map(torch.tensor, labels)):
        balanced = step == changes_at
        weight = len(given) / (4 * torch.bincount(given, minlength=4).clamp(min=1)) if balanced else constant
        F.cross_entropy(model(torch.randn(len(given), 4)), given, weight=weight).backward()
        if balanced:
            with pytest.raises(UnsupportedGradientError, match="has changed since an earlier batch"):
                clipper.clip_and_accumulate()
            return
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    assert changes_at is None

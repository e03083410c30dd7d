"""The bar contains the rounding of sums: of zeros, of terms that cancel, of many tokens and micro-batches."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.parity.compare import compare
from gradguard.parity.scales import DOUBLED, is_linear, scale_of
from gradguard.parity.summation import backwards, most_of_sums, rounding_of_sums

UNIT = 2.0**-24


def logistic():
    return zeroed(nn.Linear(16, 5))


def zero_head():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))
    zeroed(model[2])
    return model


def tiny_head():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))
    with torch.no_grad():
        model[2].weight.mul_(1e-4)
        model[2].bias.zero_()
    return model


def default():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))


def zeroed(layer):
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def whole(model, x, y):
    return lambda: F.cross_entropy(model(x), y).backward()


def permuted(model, x, y):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    return whole(model, x[order], y[order])


def accumulated(count):
    def of(model, x, y):
        def step():
            for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
                (F.cross_entropy(model(a), b) / count).backward()

        return step

    return of


LABELS = {
    "random": lambda n: torch.randint(5, (n,)),
    "one class": lambda n: torch.zeros(n, dtype=torch.long),
    "balanced": lambda n: torch.arange(n) % 5,
}
OTHERS = {"permuted": permuted, "16 micro-batches": accumulated(16)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("build", [logistic, zero_head, tiny_head, default])
def test_the_order_of_a_sum_is_no_fault(build, labels, other, seed):
    torch.manual_seed(seed)
    model, x, y = build(), torch.randn(320, 16), LABELS[labels](320)
    report = compare(*(gg.save_gradients(None, model, how(model, x, y)) for how in (whole, OTHERS[other])))
    assert {f.kind for f in report.findings} <= {"blind"}, str(report)
    assert "balanced" in labels or build is zero_head or report.verdict == "PASS", str(report)


@pytest.mark.parametrize("count", [256, 1024])
def test_many_micro_batches_of_one_direction_are_no_fault(count):
    torch.manual_seed(0)
    model, x, y = default(), torch.randn(count, 16), LABELS["one class"](count)
    runs = [gg.save_gradients(None, model, how(model, x, y), perturbed=1) for how in (whole, accumulated(count))]
    assert compare(*runs).verdict == "PASS"


def one_after_another(batches, loss):
    def step():
        for one in batches:
            (loss(one) / len(batches)).backward()

    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize("what", ["one batch", "a critic"])
def test_the_same_number_over_and_over_is_no_fault(what, count):
    """Each addition rounds it to the same side: of a critic's mean, whose bias has the gradient 1, as well."""
    torch.manual_seed(0)
    model, x = default(), torch.randn(count if what == "a critic" else 1, 16)
    loss = (lambda z: model(z).mean()) if what == "a critic" else (lambda z: model(z).square().mean())
    batches = x.split(1) if what == "a critic" else [x] * count
    runs = [
        gg.save_gradients(None, model, how, perturbed=1)
        for how in (lambda: loss(x).backward(), one_after_another(batches, loss))
    ]
    assert compare(*runs).verdict == "PASS"


# Long sums, whose terms are rounded to one side: 16,384 tokens and more.


class Tokens(nn.Module):
    """A bag of words, a norm and a head: each of its gradients is a sum over all tokens."""

    def __init__(self, vocabulary, width=8):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens))).flatten(0, -2)


class Pads(nn.Module):
    """Most of the words of each sample are pads."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, width), nn.Linear(width, 5)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))


def tokens(vocabulary, count):
    return Tokens(vocabulary), *torch.randint(vocabulary, (2, count // 64, 64))


def pads(count):
    words = torch.randint(1, 30, (count // 32, 32))
    return Pads(), words.masked_fill(torch.rand(words.shape) < 0.7, 0), torch.randint(5, (len(words),))


def flat(model, x, y):
    return lambda: F.cross_entropy(model(x), y.flatten()).backward()


def flat_permuted(model, x, y):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    return flat(model, x[order], y[order])


def in_eight(model, x, y):
    def step():
        for a, b in zip(x.chunk(8), y.chunk(8), strict=True):
            (F.cross_entropy(model(a), b.flatten()) / 8).backward()

    return step


LONG = {
    "16,384 tokens": lambda: tokens(40, 16_384),
    "a vocabulary of 4": lambda: tokens(4, 16_384),
    "11,468 pads": lambda: pads(16_384),
    "65,536 tokens": lambda: tokens(4, 65_536),
}
OF_LONG = {"permuted": flat_permuted, "8 micro-batches": in_eight, "float64": flat}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", OF_LONG)
@pytest.mark.parametrize("what", LONG)
def test_a_long_sum_is_no_fault(what, how):
    torch.manual_seed(0)
    model, x, y = LONG[what]()
    other = copy.deepcopy(model).double() if how == "float64" else model
    runs = [
        gg.save_gradients(None, model, flat(model, x, y), perturbed=2),
        gg.save_gradients(None, other, OF_LONG[how](other, x, y), perturbed=2),
    ]
    report = compare(*runs)
    assert report.verdict == "PASS", str(report)
    assert report.power < 1e-3  # the bar is wider, and no excuse


def test_without_scales_a_long_sum_would_fail(monkeypatch):
    """So that the tests above can."""
    monkeypatch.setattr("gradguard.parity.rounding_runs.scale_of", lambda run: 1.0)
    torch.manual_seed(0)
    model, x, y = tokens(4, 16_384)
    runs = [gg.save_gradients(None, model, how(model, x, y), perturbed=2) for how in (flat, in_eight)]
    assert compare(*runs).verdict == "FAIL"


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.001, 1 - 1e-3])
@pytest.mark.parametrize("name", ["norm.weight", "norm.bias", "embed.weight", "head.bias"])
def test_a_small_factor_on_a_long_sum_still_shows(name, factor):
    torch.manual_seed(0)
    model, x, y = tokens(4, 16_384)

    def wrong():
        flat(model, x, y)()
        model.get_parameter(name).grad.mul_(factor)

    runs = [gg.save_gradients(None, model, how, perturbed=2) for how in (flat(model, x, y), wrong)]
    (finding,) = compare(*runs).findings
    assert (finding.kind, finding.parameters) == ("factor", (name,))


# What scales the gradient at the loss.


def test_scales_are_exact_in_16_bits_and_no_power_of_two():
    scales = [scale_of(run) for run in range(1, 64)]
    assert len(set(scales)) == 63
    assert all(1 < s < 2 and float(torch.tensor(s, dtype=torch.bfloat16)) == s for s in scales)


def test_the_gradient_at_each_loss_is_scaled_and_given_ones_are_not():
    model = nn.Linear(3, 1)
    plain = torch.autograd.backward
    with backwards(2.0) as watched:
        model(torch.ones(1, 3)).sum().backward()
        torch.autograd.backward([model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()])
        assert model.bias.grad.item() == 6
        model(torch.ones(1, 3)).backward(torch.ones(1, 1))
        assert model.bias.grad.item() == 7
        with pytest.raises(RuntimeError, match="scalar outputs"):
            model(torch.ones(2, 3)).backward()
    assert watched.count == 4
    assert torch.autograd.backward is plain
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.bias.grad.item() == 1


class InnerLoss(torch.autograd.Function):
    """A backward that begins another one, as a chunked loss does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            x.square().sum().backward()
        return gradient * x.grad


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_losses_in_an_iterator_are_not_used_up(scale):
    """They were, and the backward pass of nothing left no gradient."""
    weights = torch.ones(3, requires_grad=True)
    with backwards(scale) as watched:
        torch.autograd.backward(iter([weights.sum(), (2 * weights).sum()]))
    assert weights.grad.tolist() == [3 * scale] * 3
    assert watched.count == 1


def test_what_begins_inside_a_backward_is_scaled_once():
    x = torch.ones(2, requires_grad=True)
    with backwards(4.0) as watched:
        InnerLoss.apply(x).backward()
    assert x.grad.tolist() == [8.0, 8.0]
    assert watched.count == 1


def test_blocks_of_several_threads_scale_their_own():
    plain, found, both = torch.autograd.backward, {}, threading.Barrier(2)

    def of(scale):
        x = torch.ones(1, requires_grad=True)
        with backwards(scale):
            both.wait()
            x.sum().backward()
            both.wait()
        found[scale] = x.grad.item()

    threads = [threading.Thread(target=of, args=(scale,)) for scale in (2.0, 8.0)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert found == {2.0: 2.0, 8.0: 8.0}
    assert torch.autograd.backward is plain


def clipped(model, x, y):
    def step():
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    return step


def functional(model, x, y):
    def step():
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for p, gradient in zip(model.parameters(), found, strict=True):
            p.grad = gradient

    return step


def regularised(model, x, y):
    return lambda: (F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())).backward()


def penalised(model, x, y):
    def step():
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (of_input,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + of_input.square().sum()).backward()

    return step


@pytest.mark.parametrize(("how", "runs"), [(clipped, 7), (functional, 7), (whole, 6), (regularised, 6), (penalised, 6)])
def test_a_step_that_is_not_linear_is_not_scaled(how, runs):
    torch.manual_seed(0)
    model, x, y = default(), torch.randn(64, 16), torch.randint(5, (64,))
    step, count = how(model, x, y), []
    saved = gg.save_gradients(None, model, lambda: (count.append(1), step()))
    assert len(count) == runs
    report = compare(saved, saved)
    assert report.verdict == "PASS"
    assert report.power < 1e-5


def test_a_step_that_is_not_the_same_twice_is_linear_if_twice_is_no_further_than_again():
    first, again, near, half = [[1.0, -1.0]], [[1.001, -1.0]], [[1.0, -1.002]], [[0.5, -0.5]]
    assert is_linear(first, first)
    assert not is_linear(first, near)
    assert is_linear(first, near, again)
    assert not is_linear(first, half, again)
    assert not is_linear(first, [[math.nan, 1.0]], again)
    assert DOUBLED == 2


@pytest.mark.parametrize("build", [logistic, zero_head, default])
@pytest.mark.parametrize("pattern", ["weight", "bias"])
def test_one_part_in_a_hundred_thousand_still_shows(build, pattern):
    torch.manual_seed(0)
    model, x, y = build(), torch.randn(256, 16), LABELS["random"](256)

    def wrong():
        permuted(model, x, y)()
        for name, p in model.named_parameters():
            if name.endswith(pattern):
                p.grad.mul_(1 + 1e-5)

    right = gg.save_gradients(None, model, whole(model, x, y))
    report = compare(right, gg.save_gradients(None, model, wrong))
    assert report.verdict == "FAIL"
    assert 2e-6 < report.power < 1e-5


@pytest.mark.parametrize("count", [16, 256, 4096])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_a_running_sum_rounds_less_than_the_bar(count, mean):
    """Against float64, one term after another, as no kernel does worse."""
    terms = torch.randn(count, 200, generator=torch.Generator().manual_seed(0)) + mean
    total = torch.zeros(200)
    for term in terms:
        total += term
    error = (total.double() - terms.double().sum(0)).norm() / terms.double().sum(0).norm()
    assert error < 3 * rounding_of_sums(UNIT, count)
    assert error > 0.003 * rounding_of_sums(UNIT, count)  # and the bar is no excuse


@pytest.mark.parametrize(
    ("unit", "calls", "expected"),
    [
        (UNIT, 1, UNIT * math.sqrt(513 / 2)),
        (UNIT, 1024, UNIT * math.sqrt(768)),
        (2.0**-53, 1, 2.0**-53 * math.sqrt(513 / 2)),
        (2.0**-9, 1, 2.0**-9),
        (2.0**-9, 32, 2.0**-7),
    ],
)
def test_the_floor(unit, calls, expected):
    assert rounding_of_sums(unit, calls) == pytest.approx(expected)


def test_what_all_roundings_to_one_side_do():
    """1/3 added up 200 times in float32, at most; and one backward pass adds nothing."""
    total, third = torch.zeros(()), torch.tensor(1 / 3)
    for _ in range(200):
        total += third
    error = abs(total.double() / (200 * third.double()) - 1)
    assert 0 < error < most_of_sums(UNIT, 200) == 100 * UNIT
    assert most_of_sums(UNIT, 1) == 0.0


def test_an_integer_input_and_a_single_number_out_are_left_alone():
    model = nn.Linear(3, 1)
    saved = gg.save_gradients(None, model, lambda: model(torch.ones(3)).sum().backward())
    assert compare(saved, saved).verdict == "PASS"


def test_a_backward_from_an_edge_has_its_gradients():
    weights = torch.ones(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(weights.sum())
    with backwards(1.5) as found:
        torch.autograd.backward(edge)
    assert found.count == 1
    assert torch.equal(weights.grad, torch.ones(3))  # an edge is no loss that could be scaled

"""The bar contains the rounding of sums: where weights are zero, where terms cancel, over many micro-batches."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.parity.compare import compare
from gradguard.parity.summation import changed, most_of_sums, rounding_of_sums

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
    assert report.verdict != "FAIL", str(report)
    assert "balanced" in labels or report.verdict == "PASS", str(report)


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
    report = compare(*runs)
    assert report.verdict == "PASS" or "compare with fewer" in str(report), str(report)
    if count == 1000:
        assert max(o.distance for o in report.parameters) > 2  # so that the test can fail


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 5), (64,), (4, 16, 5), (1, 5)])
def test_rows_of_gradients_are_changed_up_or_down_by_their_rounding(dtype, shape):
    unit = torch.finfo(dtype).eps / 2
    gradient = torch.ones(shape, dtype=dtype)
    moved = (changed(gradient, 1, 1).double() - 1).reshape(-1, 5 if len(shape) > 1 else 1)
    assert (moved == moved[:, :1]).all()
    assert moved.abs().max() <= 8 * unit
    assert (changed(gradient, 1, 1) == changed(gradient, 1, 1)).all()
    if len(moved) > 1 and dtype in (torch.float32, torch.float64):
        assert 0.2 < (moved > 0).double().mean() < 0.8
        assert moved.abs().min() > unit
        assert not torch.equal(changed(gradient, 1, 1), changed(gradient, 2, 1))
        assert not torch.equal(changed(gradient, 1, 1), changed(gradient, 1, 2))


def test_an_integer_input_and_a_single_number_out_are_left_alone():
    model = nn.Linear(3, 1)
    saved = gg.save_gradients(None, model, lambda: model(torch.ones(3)).sum().backward())
    assert compare(saved, saved).verdict == "PASS"

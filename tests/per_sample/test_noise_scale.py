"""The gradient noise scale against plain gradients of two batch sizes, known covariances, and itself in parts."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.per_sample.noise_scale import SMOOTHING, unbiased
from per_sample.models import build
from per_sample.steps import accumulate, oracle

RULES = {
    "nothing binds": lambda count: gg.FlatNormClipper(math.inf),
    "half is clipped": lambda count: gg.FlatNormClipper(1.0),
    "by parameter": lambda count: gg.PerParameterNormClipper([0.1, math.inf] * (count // 2) + [0.3] * (count % 2)),
    "factors above 1": lambda count: gg.AutoNormClipper(100.0),
}


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.2, 3, size).unsqueeze(1), torch.randint(0, 3, (size,), generator=generator)


def step(clipper, x, y, parts=None, reduction="mean"):
    for part in parts or [slice(0, len(x))]:
        F.cross_entropy(clipper.module(x[part]), y[part], reduction=reduction).backward()
        clipper.clip_and_accumulate()
    clipper.pre_step()


def squared_norms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Of the plain gradient of the mean loss, for each parameter."""
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return {name: float(g.square().sum()) for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}


def from_two_batch_sizes(small: float, big: float, b_small: int, b_big: int) -> tuple[float, float]:
    """Noise and squared gradient, McCandlish et al., appendix A.1."""
    gradient = (b_big * big - b_small * small) / (b_big - b_small)
    return (small - big) / (1 / b_small - 1 / b_big), gradient


def direct(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
    """For each parameter, from plain backwards of single samples and of the batch."""
    singles = [squared_norms(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    big = squared_norms(model, x, y)
    return {
        name: from_two_batch_sizes(sum(s[name] for s in singles) / len(x), value, 1, len(x))
        for name, value in big.items()
    }


def check(found: gg.NoiseScale, expected: dict[str, tuple[float, float]]) -> None:
    for name, (noise, gradient) in expected.items():
        estimate = found.layers[name]
        assert estimate.noise == pytest.approx(noise, rel=1e-6), name
        assert estimate.squared_gradient == pytest.approx(gradient, rel=1e-6, abs=1e-7 * noise), name
    noise, gradient = (sum(values) for values in zip(*expected.values(), strict=True))
    assert found.overall.noise == pytest.approx(noise, rel=1e-6)
    assert found.overall.squared_gradient == pytest.approx(gradient, rel=1e-6, abs=1e-7 * noise)
    assert found.total == pytest.approx(noise / gradient if gradient > 0 else math.inf, rel=1e-5)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_that_of_plain_gradients_of_two_batch_sizes(rule, mode, reduction):
    model, (x, y) = network(), batch()
    expected = direct(model, x, y)
    rule = RULES[rule](4)
    clipper = gg.PerSampleGradientClipper(model, rule, loss_reduction=reduction, mode=mode, noise_scale=True)
    step(clipper, x, y, reduction=reduction)
    assert clipper.noise_scale is not None
    check(clipper.noise_scale, expected)
    assert clipper.statistics.noise_scale is clipper.noise_scale


@pytest.mark.parametrize("limits", [(math.inf, math.inf), (1e-3, 1e-3), (math.inf, 1e-3), (1e-3, math.inf)])
@pytest.mark.parametrize("sizes", [(12,), (6, 6), (1, 7, 4)])
def test_mini_batches_are_one_big_batch_whichever_of_them_is_clipped(limits, sizes):
    model, (x, y) = network(), batch()
    rule = gg.FlatNormClipper(math.inf)
    clipper = gg.PerSampleGradientClipper(model, rule, noise_scale=True)
    start = 0
    for i, size in enumerate(sizes):
        rule.max_norm = limits[i % 2]
        F.cross_entropy(model(x[start : start + size]), y[start : start + size]).backward()
        clipper.clip_and_accumulate()
        start += size
    bound = [c for f in clipper.statistics.factors for c in f.tolist()]
    assert all(c == 1 for c in bound) if limits[(len(sizes) - 1) % 2] == math.inf else all(c < 1 for c in bound)
    clipper.pre_step()
    check(clipper.noise_scale, direct(network(), x, y))


@pytest.mark.parametrize("name", ["linear 3-D", "nano gpt", "Conv2d plain", "only a scale", "a layer unused"])
def test_other_forms_of_contributions(name):
    made, gradients = build(name), oracle(name)
    clipper = gg.PerSampleGradientClipper(made.model, gg.FlatNormClipper(1e-3), made.batch_first, noise_scale=True)
    accumulate(made, clipper, "mean", 0, made.batch_size)
    clipper.pre_step()
    for key, rows in gradients.items():
        noise = float(rows.flatten(1).var(0).sum())
        assert clipper.noise_scale.layers[key].noise == pytest.approx(noise, rel=1e-6)
        signal = float(rows.mean(0).square().sum()) - noise / len(rows)
        assert clipper.noise_scale.layers[key].squared_gradient == pytest.approx(signal, rel=1e-6, abs=1e-7 * noise)


@pytest.mark.parametrize("max_norm", [1e-3, math.inf])
def test_a_sample_that_is_not_finite_is_left_out_and_counted(max_norm):
    model, (x, y) = network(), batch()
    good = [i for i in range(12) if i not in (3, 7)]
    expected = direct(model, x[good], y[good])
    x[3, 0], x[7, 2] = math.nan, math.inf
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(max_norm), noise_scale=True)
    step(clipper, x, y, [slice(0, 5), slice(5, 12)])
    check(clipper.noise_scale, expected)
    assert (int(clipper.noise_scale.nonfinite), clipper.noise_scale.batch_size) == (2, 12)


def test_a_grad_scaler_changes_nothing():
    model, (x, y) = network().float(), batch()
    x = x.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5), scaler=scaler, noise_scale=True)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    for name, (noise, _) in direct(network(), x.double(), y).items():
        assert clipper.noise_scale.layers[name].noise == pytest.approx(noise, rel=1e-4)


# Over many steps


def test_both_estimates_are_unbiased_and_dividing_by_the_number_of_samples_is_seen():
    """Gradients of a linear regression at a distance e from its solution: x (x·e − ε), with x and ε normal."""
    generator = torch.Generator().manual_seed(0)
    repeats, size, width, sigma = 20_000, 4, 3, 0.5
    e = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    x = torch.randn(repeats, size, width, generator=generator, dtype=torch.float64)
    noise = sigma * torch.randn(repeats, size, generator=generator, dtype=torch.float64)
    gradients = x * (x @ e - noise).unsqueeze(2)
    squares, of_sum = gradients.square().sum((1, 2)), gradients.sum(1).square().sum(1)
    found = unbiased(squares, of_sum, torch.tensor(float(size), dtype=torch.float64))
    signal = float(e @ e)
    expected = ((width + 1) * signal + width * sigma**2, signal)
    for values, truth in zip(found, expected, strict=True):
        standard_error = float(values.std()) / repeats**0.5
        assert abs(float(values.mean()) - truth) < 4 * standard_error
        biased = values * (size - 1) / size  # of the noise; what a mean over B would give
        assert abs(float(biased.mean()) - truth) > 8 * standard_error


def regression(width: int = 3) -> tuple[nn.Linear, Tensor]:
    model = nn.Linear(width, 1, bias=False).double()
    error = torch.tensor([[0.6, -0.4, 0.2]], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(error)  # the solution is 0
    return model, error


def test_over_steps_the_known_scale_lies_in_the_interval_and_the_interval_is_narrow():
    model, error = regression()
    signal, sigma, size = float(error.square().sum()), 1.0, 32
    truth = (4 * signal + 3 * sigma**2) / signal
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), check=False, noise_scale=True)
    generator = torch.Generator().manual_seed(3)
    for _ in range(120):
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        y = sigma * torch.randn(size, 1, generator=generator, dtype=torch.float64)
        ((model(x) - y).square() / 2).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    found = clipper.noise_scale
    low, high = found.interval
    assert low < truth < high
    assert low < found.total < high
    assert high / low < 2.5
    assert 0 < found.error < truth / 4
    assert found.error == pytest.approx((high - low) / 4, rel=0.35)
    assert found.steps == 120
    assert found.batch_size_suggested == round(found.total)


def moments(pairs, smoothing=SMOOTHING):
    """What a meter holds after some steps' estimates, from a slow sum."""
    total = [0.0] * 8
    for age, (x, y) in enumerate(reversed(pairs)):
        w = smoothing**age
        for i, value in enumerate((w, w * w, 1.0, w * x, w * y, w * x * x, w * x * y, w * y * y)):
            total[i] += value
    return gg.NoiseScale(["a"], torch.tensor([total, total], dtype=torch.float64), 8, torch.tensor(0.0))


def test_smoothing_divides_averages_and_does_not_average_ratios():
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    pairs = []
    for seed in range(4):
        x, y = batch(seed=seed)
        pairs.append([sum(part) for part in zip(*direct(network(), x, y).values(), strict=True)])
        step(clipper, x, y)
    expected = moments(pairs)
    for key in ("noise", "squared_gradient", "scale"):
        assert getattr(clipper.noise_scale.overall, key) == pytest.approx(getattr(expected.overall, key), rel=1e-6)
    weights = [SMOOTHING ** (3 - i) for i in range(4)]
    means = [sum(w * p[k] for w, p in zip(weights, pairs, strict=True)) for k in (0, 1)]
    assert expected.total == pytest.approx(means[0] / means[1])


STEADY = [(10.0 + 0.1 * (i % 3), 1.0 + 0.01 * (i % 2)) for i in range(30)]
DROWNED = [(10.0 + (i % 3), (1.0 if i % 2 else -0.8)) for i in range(30)]


@pytest.mark.parametrize(
    ("pairs", "total", "words"),
    [
        (STEADY, 10.05, r"10.1 samples \("),
        (STEADY[:2], 10.0, "too few measurements"),
        (DROWNED, math.inf, "cannot be told from"),
        ([(10.0, -1.0)] * 30, math.inf, "cannot be told from"),
        ([(10.0, -1.0)], math.inf, "cannot be told from"),
        ([(0.0, 1.0)] * 30, 0.0, r"0 samples"),
        ([(-1e-9, 1.0)] * 30, 0.0, r"0 samples"),
        ([(0.0, 0.0)] * 30, math.nan, "nothing measured"),
        ([], math.nan, "nothing measured"),
    ],
)
def test_the_scale_is_a_number_infinity_or_nothing_and_never_negative(pairs, total, words):
    found = moments(pairs)
    assert found.total == pytest.approx(total, rel=2e-3, nan_ok=True)
    assert not found.total < 0
    low, high = found.interval
    assert 0 <= low <= high
    assert math.isinf(high) or low <= found.total <= high
    assert re.search(words, str(found))
    assert (found.batch_size_suggested is None) == (not math.isfinite(total))


def test_the_error_is_that_of_the_steps_that_still_weigh():
    """However many steps: the weights are those of (1 + s) / (1 - s) = 39 equal ones."""
    found = moments([(10.0 + (-1) ** i, 1.0) for i in range(400)])
    assert found.error == pytest.approx(1 / math.sqrt(38), rel=0.02)


def test_a_hidden_gradient_still_gives_a_lower_end():
    low, high = moments(DROWNED).interval
    assert 10 < low < 40
    assert high == math.inf


# When it is measured


def test_it_is_off_by_default_and_measured_every_so_many_steps():
    x, y = batch()
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0))
    step(clipper, x, y)
    assert clipper.noise_scale is None
    assert clipper.statistics.noise_scale is None
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=3)
    counts = []
    for _ in range(7):
        step(clipper, x, y)
        counts.append(clipper.noise_scale.steps)
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_the_gradient_is_bit_identical_with_it():
    gradients = []
    for option in (False, True):
        clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=option)
        step(clipper, *batch(), parts=[slice(0, 7), slice(7, 12)])
        gradients.append([p.grad for p in clipper.module.parameters()])
    for plain, measured in zip(*gradients, strict=True):
        assert torch.equal(plain, measured)


@pytest.mark.parametrize("size", [0, 1])
def test_a_step_with_fewer_than_two_samples_tells_nothing(size):
    x, y = batch()
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    step(clipper, x, y)
    before = clipper.noise_scale.total
    if size:
        step(clipper, x[:1], y[:1])
    else:
        clipper.skip_batch()
        clipper.pre_step()
    assert (clipper.noise_scale.steps, clipper.noise_scale.total) == (1, before)


def test_a_discarded_step_and_take_leave_nothing_behind():
    x, y = batch()
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    for end in (clipper.discard, clipper.take):
        F.cross_entropy(clipper.module(x * 5), y).backward()
        clipper.clip_and_accumulate()
        end()
        assert clipper.noise_scale is None
    step(clipper, x, y)
    check(clipper.noise_scale, direct(network(), x, y))


@pytest.mark.parametrize("done", [1, 3, 5])
def test_a_saved_clipper_goes_on_where_it_was(done, tmp_path):
    """With a threshold that learns, and steps between measurements."""
    make = lambda: gg.PerSampleGradientClipper(network(), gg.QuantileNormClipper(1.0), noise_scale=2)  # noqa: E731
    whole, first, resumed = make(), make(), make()
    for seed in range(7):
        step(whole, *batch(seed=seed))
        if seed < done:
            step(first, *batch(seed=seed))
    torch.save(first.state_dict(), tmp_path / "clipper.pt")
    resumed.load_state_dict(torch.load(tmp_path / "clipper.pt", weights_only=True))
    assert str(resumed.noise_scale) == str(first.noise_scale)
    for seed in range(done, 7):
        step(resumed, *batch(seed=seed))
    torch.testing.assert_close(resumed.noise_scale.moments, whole.noise_scale.moments, rtol=0, atol=0)
    assert resumed.noise_scale.steps == 4
    assert resumed.noise_scale.by_layer == whole.noise_scale.by_layer
    assert (resumed.noise_scale.batch_size, int(resumed.noise_scale.nonfinite)) == (12, 0)
    assert resumed.norm_clipper.thresholds == whole.norm_clipper.thresholds


def test_a_state_of_a_clipper_that_has_measured_nothing():
    x, y = batch()
    clipper, off = (gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=n) for n in (1, 0))
    before = clipper.state_dict()
    step(clipper, x, y)
    off.load_state_dict(clipper.state_dict())
    assert off.noise_scale is None
    clipper.load_state_dict(before)
    assert clipper.noise_scale is None
    step(clipper, x, y)
    check(clipper.noise_scale, direct(network(), x, y))
    assert clipper.noise_scale.steps == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"norm_clipper": {}}, r"with the keys norm_clipper and noise_scale, got \['norm_clipper'\]"),
        (None, r"is of 2 parameters, \['weight', 'bias'\], and this clipper trains 4"),
    ],
)
def test_a_state_of_something_else_is_refused(state, words):
    other = gg.PerSampleGradientClipper(nn.Linear(2, 1), gg.FlatNormClipper(1.0))
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    with pytest.raises(InvalidValueError, match=words):
        clipper.load_state_dict(state or other.state_dict())


def test_a_record_has_the_scale_of_each_layer_where_it_is_asked_for():
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    step(clipper, *batch())
    found = clipper.noise_scale
    plain, layers = found.scalars(), found.scalars(layers=True)
    assert list(plain) == ["noise_scale", "noise_scale_low", "noise_scale_high", "batch_size"]
    assert layers == plain | {f"noise_scale/{name}": scale for name, scale in found.by_layer.items()}
    assert set(layers) - set(plain) == {f"noise_scale/{k}.{kind}" for k in (0, 2) for kind in ("weight", "bias")}


def test_other_trained_parameters_begin_anew():
    x, y = batch()
    clipper = gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=True)
    step(clipper, x, y)
    clipper.module[0].weight.requires_grad_(False)
    clipper.module.zero_grad()
    step(clipper, x, y)
    assert list(clipper.noise_scale.by_layer) == ["0.bias", "2.weight", "2.bias"]
    assert clipper.noise_scale.steps == 1


@pytest.mark.parametrize(
    ("option", "kind", "words"),
    [
        (-1, InvalidValueError, "noise_scale=-1: expected a whole number >= 0"),
        (1.5, InvalidTypeError, "number of steps"),
    ],
)
def test_wrong_options(option, kind, words):
    with pytest.raises(kind, match=words):
        gg.PerSampleGradientClipper(network(), gg.FlatNormClipper(1.0), noise_scale=option)


def test_what_a_record_gets():
    found = moments(STEADY)
    low, high = found.interval
    assert found.scalars() == {
        "noise_scale": found.total,
        "noise_scale_low": low,
        "noise_scale_high": high,
        "batch_size": 8.0,
    }

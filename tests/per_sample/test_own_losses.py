"""Each sample's loss from its own rows alone: exact for any function; what reaches other samples is refused."""

import contextlib
import copy
import fractions
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.private import FixedNoise, make_private

C = 4
"""Classes, and the number of samples in some batches."""


def mean_of_labels(out, y):
    return F.cross_entropy(out[..., None].expand(-1, -1, 5), y)


def ragged(n):
    return torch.randint(0, C, (n, 5)).where(torch.arange(5) < torch.arange(1, n + 1)[:, None], -100)


def classes(n):
    return torch.randint(0, C, (n,))


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
LOSSES = {
    "mse": (F.mse_loss, lambda n: torch.randn(n, C)),
    "a module": (nn.SmoothL1Loss(), lambda n: torch.randn(n, C)),
    "tokens": (mean_of_labels, ragged),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), classes),
    "bound": (functools.partial(lambda o, y, w: F.cross_entropy(o, y, weight=w), w=WEIGHT), classes),
    "a mask of outputs and targets": (lambda o, y: ((o > y) * o).square().mean(), torch.randn),
    "columns": (lambda o, y: -o.log_softmax(1)[:, y].mean(), classes),
    "targets of the whole batch, were it one": (lambda o, y: (o - y).square().mean(), torch.randn),
    "normalized": (lambda o, y: ((o - o.mean()) / o.std() * y).square().sum(), lambda n: torch.randn(n, C)),
    "a root": (lambda o, y: F.mse_loss(o, y).sqrt(), lambda n: torch.randn(n, C)),
    "compiled": (torch.compile(F.mse_loss, backend="eager"), lambda n: torch.randn(n, C)),
    "in place": (lambda o, y: o.sub_(y).relu_().square().mean(), lambda n: torch.randn(n, C)),
    "nested": (lambda o, more, *, scale: scale * F.mse_loss(o, more["y"][0]), lambda n: {"y": [torch.randn(n, C)]}),
}


def as_float64(tree):
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.is_floating_point() else tree
    return {"y": [as_float64(one) for one in tree["y"]]}


def row(tree, i):
    return tree[i : i + 1] if isinstance(tree, torch.Tensor) else {"y": [row(one, i) for one in tree["y"]]}


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, C)).double()


def gradients_alone(model, loss_fn, x, y, kwargs):
    found = []
    for i in range(len(x)):
        loss = loss_fn(model(x[i : i + 1]), row(y, i), **kwargs)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]))
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
def test_each_sample_has_the_gradient_of_its_own_loss(name, reduction):
    loss_fn, targets = LOSSES[name]
    kwargs = {"scale": 3.0} if name == "nested" else {}
    torch.manual_seed(0)
    model = network()
    alone = copy.deepcopy(model)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), loss_reduction=reduction, mode="exact")
    for size in (C, C, 3, 1, 6):
        x, y = torch.randn(size, 3).double(), as_float64(targets(size))
        losses = clipper.per_sample_losses(loss_fn, model(x), y, **kwargs)
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
        found = torch.cat([g.flatten(1) for g in clipper.per_sample_gradients().values()], 1)
        torch.testing.assert_close(found, gradients_alone(alone, loss_fn, x, y, kwargs), rtol=1e-10, atol=1e-12)
        clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 2 * C + 10


def clipper_of(model, **options):
    return gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), **options)


class Normaliser(nn.Module):
    """A loss over the running mean of losses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, o, y):
        loss = (o - y).abs().mean()
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return loss / self.mean


def of_mean(mean):
    return lambda o, y: F.mse_loss(o - mean, y)


def weighted(weights):
    return lambda o, y: ((o - y)[:, :2].square() * weights).sum()


X, Y = torch.randn(C, 3, dtype=torch.float64), torch.randn(C, C, dtype=torch.float64)
OF_OTHERS = {
    "outputs of the batch": (lambda out: (lambda o, y: F.mse_loss(out, y.expand_as(out)), out, Y), "was not given"),
    "a mean of outputs": (lambda out: (of_mean(out.mean(0, True)), out, Y), "was not given"),
    "targets of the batch": (lambda out: (lambda o, y: F.mse_loss(o.expand_as(Y), Y), out, Y), "was not given"),
    "a number": (lambda out: (of_mean(Y.mean()), out, Y), "call .item"),
    "a number in a dimension": (lambda out: (of_mean(Y.std((0, 1), keepdim=True)), out, Y), "was not given"),
    "a count": (lambda out: (weighted((Y > 0).sum()), out, Y), "was not given"),
    "statistics of columns": (lambda out: (weighted(Y[:, :2].std(0)), out, Y), "was not given"),
    "a running mean": (lambda out: (Normaliser(), out, Y), "changes a tensor that is bound"),
    "transposed outputs": (lambda out: (F.mse_loss, out.T, Y), "depends on the outputs of another"),
    "transposed targets": (lambda out: (F.mse_loss, out, Y.T), "is a transposed view"),
    "other samples' outputs": (lambda out: (F.mse_loss, out.flip(0), Y), "depends on the outputs of another"),
    "normalized outputs": (lambda out: (F.mse_loss, out - out.mean(0), Y), "depends on the outputs of another"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("first", ["the first step", "a later step"])
def test_what_reaches_other_samples_is_refused(name, first):
    torch.manual_seed(0)
    model = network()
    clipper = clipper_of(model)
    for _ in range(4 if first == "a later step" else 0):
        clipper.per_sample_losses(F.mse_loss, model(X), Y).mean().backward()
        clipper.clip_and_accumulate()
    arguments, words = OF_OTHERS[name]
    with pytest.raises(UnsupportedGradientError, match=words):
        clipper.per_sample_losses(*arguments(model(X))).mean().backward()


class Weighted:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, o, y):
        return self.weight * F.mse_loss(o, y)


SETTINGS = types.SimpleNamespace(weight=1.0)


def of_settings(weight):
    SETTINGS.weight = weight
    return lambda o, y: SETTINGS.weight * F.mse_loss(o, y)


def of_flag(weight):
    def loss(o, y, is_large=weight > 1):
        return F.mse_loss(o, y) * (2 if is_large else 1)

    return loss


def of_word(weight):
    word = "large" if weight > 1 else "small"
    return lambda o, y: F.mse_loss(o, y) * (2 if word == "large" else 1)


BOUND = {
    "a number": lambda weight: lambda o, y: weight * F.mse_loss(o, y),
    "a fraction": lambda weight: lambda o, y, w=fractions.Fraction(weight): float(w) * F.mse_loss(o, y),
    "a tuple": lambda weight: lambda o, y, w=(weight,): w[0] * F.mse_loss(o, y),
    "an object that is called": Weighted,
    "settings": of_settings,
    "a flag": of_flag,
    "a word": of_word,
}


@pytest.mark.parametrize("name", BOUND)
def test_what_code_takes_from_outside_must_not_change(name):
    torch.manual_seed(0)
    model = network()
    clipper = clipper_of(model)
    for weight in (1.0, 1.0, 2.0):
        loss_fn = BOUND[name](weight)
        with contextlib.nullcontext() if weight == 1 else pytest.raises(UnsupportedGradientError, match="has changed"):
            clipper.per_sample_losses(loss_fn, model(X), Y).mean().backward()
            clipper.clip_and_accumulate()


MISTAKES = {
    "no tensor": (lambda o, y: 0.5, Y, InvalidTypeError, "expected a tensor from the function, got float"),
    "several numbers": (lambda o, y: (o - y).square(), Y, InvalidValueError, r"a tensor of shape \[1, 4\]. Reduce"),
    "no rows": (F.mse_loss, Y[:3], InvalidValueError, r"expected tensors with 4 samples along dimension 0.*partial"),
    "a number": (F.mse_loss, Y.mean(), InvalidValueError, r"got one of shape \[\]"),
    "a list": (lambda o, n: o[:, : n[0]].square().mean(), [4, 2, 3, 1], InvalidValueError, "Make it a tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name):
    model, (loss_fn, y, error, words) = network(), MISTAKES[name]
    clipper = clipper_of(model)
    with pytest.raises(error, match=words):
        clipper.per_sample_losses(loss_fn, model(X), y)
    with pytest.raises(InvalidValueError, match="call the module first"):
        clipper_of(network()).per_sample_losses(F.mse_loss, Y, Y)


@pytest.mark.parametrize(
    ("combined", "words"),
    [
        (lambda losses, out: losses.mean() + 0.5 * out.square().mean(), ""),
        (lambda losses, out: (losses * torch.linspace(0.5, 2, C, dtype=torch.float64).sqrt()).mean(), ""),
        (lambda losses, out: losses.sum(), "it is a sum"),
        (lambda losses, out: losses.logsumexp(0), "mixes samples"),
        (lambda losses, out: losses.mean() + out.mean(0).square().mean(), "depend on several samples|mixes samples"),
        (lambda losses, out: losses[:2].mean(), "each sample's part|rows"),
    ],
)
def test_what_follows_the_losses_is_read_as_ever(combined, words):
    torch.manual_seed(0)
    model = network()
    clipper = clipper_of(model)
    out = model(X)
    combined(clipper.per_sample_losses(F.mse_loss, out, Y), out).backward()
    if words:
        with pytest.raises(UnsupportedGradientError, match=words):
            clipper.clip_and_accumulate()
    else:
        clipper.clip_and_accumulate()


def test_empty_batches_and_time_first():
    model = nn.GRU(3, C).double()
    clipper = clipper_of(model, batch_first=False, mode="exact")
    x, y = torch.randn(5, 2, 3).double(), torch.randn(5, 2, C).double()
    clipper.per_sample_losses(lambda o, y: F.mse_loss(o, y), model(x)[0], y).mean().backward()
    found = clipper.per_sample_gradients()["weight_hh_l0"]
    clipper.clip_and_accumulate()
    clipper.detach()
    for i in range(2):
        loss = F.mse_loss(model(x[:, i : i + 1])[0], y[:, i : i + 1])
        torch.testing.assert_close(found[i], torch.autograd.grad(loss, model.weight_hh_l0)[0])
    clipper = clipper_of(model, batch_first=False)
    with pytest.raises(InvalidValueError, match="Begin with a batch in which T and B differ"):
        clipper.per_sample_losses(F.mse_loss, model(torch.randn(4, 4, 3).double())[0], torch.randn(4, 4, C).double())
    for n in (2, 4):
        y = torch.randn(4, n, C).double()
        clipper.per_sample_losses(F.mse_loss, model(torch.randn(4, n, 3).double())[0], y).mean().backward()
        clipper.clip_and_accumulate()
    linear = nn.Linear(3, C)
    clipper = clipper_of(linear)
    clipper.per_sample_losses(F.mse_loss, linear(torch.randn(0, 3)), torch.randn(0, C)).sum().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 0


def test_private_training_takes_means_over_tokens():
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3).double(), ragged(12)), batch_size=6, shuffle=True)
    private = make_private(model, optimizer, loader, FixedNoise(noise_multiplier=1.0, delta=1e-3))
    for x, y in private.loader:
        private.clipper.per_sample_losses(mean_of_labels, model(x), y).mean().backward()
        private.step()
    assert private.steps == 2


def test_without_checks():
    model = network()
    clipper = clipper_of(model, check=False)
    out = model(X)
    clipper.per_sample_losses(F.mse_loss, out - out.mean(0), Y).mean().backward()
    clipper.clip_and_accumulate()


def test_half_precision_with_a_scaler():
    torch.manual_seed(0)
    model = nn.Linear(3, C)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    clipper = clipper_of(model, scaler=scaler, mode="exact")
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = clipper.per_sample_losses(F.mse_loss, model(X.float()), Y.float())
        scaler.scale(losses.mean()).backward()
        found = clipper.per_sample_gradients()["bias"]
        clipper.clip_and_accumulate()
    expected = 2 / C * (F.linear(X.float(), model.weight, model.bias) - Y.float())
    torch.testing.assert_close(found, expected.detach(), rtol=0.05, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("targets", [lambda: Y.to_sparse(), lambda: torch.nested.nested_tensor([*Y])])
def test_sparse_and_nested_targets_are_refused_in_words(targets):
    model = network()
    with pytest.raises(UnsupportedGradientError, match="tensor cannot be cut into rows"):
        clipper_of(model).per_sample_losses(F.mse_loss, model(X), targets())


class RunsBackwardOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        return losses.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("another backward is under way")


def test_a_loss_whose_backward_cannot_be_tried_is_refused_in_words():
    model = network()
    with pytest.raises(UnsupportedGradientError, match="cannot verify that each sample's loss depends on its own"):
        clipper_of(model).per_sample_losses(lambda out, y: RunsBackwardOnce.apply(F.mse_loss(out, y)), model(X), Y)


class Backward(torch.autograd.Function):
    """An identity whose backward applies a function to the gradient."""

    @staticmethod
    def forward(ctx, values, function):
        ctx.function = function
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


def by_hook(out, function):
    out = out * 1.0
    out.register_hook(function)
    return out


NOT_LINEAR = {
    "clamped": lambda g: g.clamp(-0.02, 0.02),
    "normalized": lambda g: g / g.norm(),
    "almost normalized": lambda g: g / (g.norm() + 1e-9),
    "cut below": lambda g: g.where(g.abs() > 1e-3, 0.0),
    "clamped far away": lambda g: g.clamp(-100, 100),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
@pytest.mark.parametrize("put", [by_hook, Backward.apply])
def test_a_backward_that_is_not_linear_is_refused(name, put):
    def loss_fn(out, y):
        return F.mse_loss(put(out, NOT_LINEAR[name]), y)

    torch.manual_seed(0)
    model = network()
    clipper = clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match=r"per_sample_losses: the backward between .* is not linear"):
        clipper.per_sample_losses(loss_fn, model(X), Y)
    if put is by_hook:  # without per_sample_losses, too
        model = network()
        clipper = clipper_of(model)
        loss_fn(model(X), Y).backward()
        with pytest.raises(UnsupportedGradientError, match=r"the backward between .* is not linear"):
            clipper.clip_and_accumulate()


@pytest.mark.parametrize("put", [by_hook, Backward.apply])
@pytest.mark.parametrize("function", [lambda g: -2 * g, lambda g: g * (g.abs() >= g.abs().median())])
def test_a_backward_that_keeps_factors_is_exact_for_one_sample(put, function):
    def loss_fn(out, y):
        out = put(out, function)
        out.retain_grad()
        seen.append(out)
        return F.mse_loss(out, y)

    torch.manual_seed(0)
    model, seen = network(), []
    twin = copy.deepcopy(model)
    clipper = clipper_of(model, mode="exact")
    for _ in range(2):
        seen.clear()
        clipper.per_sample_losses(loss_fn, model(X), Y).mean().backward()
        kept = torch.cat([one.grad for one in seen])
        expected = 2 / C**2 * (twin(X) - Y).detach()
        if put is by_hook:  # the tensor's own hooks come before `retain_grad`
            expected = torch.cat([function(each) for each in expected.split(1)])
        torch.testing.assert_close(kept, expected, rtol=1e-12, atol=0.0)
        found = torch.cat([g.flatten(1) for g in clipper.per_sample_gradients().values()], 1)
        clipper.clip_and_accumulate()
        torch.testing.assert_close(found, gradients_alone(twin, loss_fn, X, Y, {}))


def test_a_function_whose_backward_changes_is_refused_on_that_step():
    torch.manual_seed(0)
    model = network()
    clipper = clipper_of(model)
    for function in [torch.clone] * 5:
        losses = clipper.per_sample_losses(lambda o, y, f=function: F.mse_loss(Backward.apply(o, f), y), model(X), Y)
        losses.mean().backward()
        clipper.clip_and_accumulate()
    function = NOT_LINEAR["clamped"]
    for _ in range(2):
        with pytest.raises(UnsupportedGradientError, match="is not linear"):
            clipper.per_sample_losses(lambda o, y, f=function: F.mse_loss(Backward.apply(o, f), y), model(X), Y)


def test_validation_has_batches_of_its_own_size():
    model = network()
    clipper = clipper_of(model)
    clipper.per_sample_losses(F.mse_loss, model(X), Y).mean().backward()
    clipper.clip_and_accumulate()
    with torch.no_grad():
        losses = clipper.per_sample_losses(F.mse_loss, model(X[:3]), Y[:3])
        torch.testing.assert_close(losses, F.mse_loss(model(X[:3]), Y[:3], reduction="none").mean(1))
    assert clipper.pre_step().batch_size == C

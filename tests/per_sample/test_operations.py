"""Parameters that code multiplies with, adds, or gives to a function by itself: exact, and run only once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample import vmap_fallback

B, T, D = 4, 3, 5


class Own(nn.Module):
    """Holds parameters; `forward` is what is tested."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class ByHand(Own):
    """A normalization as transformers writes it."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Shifted(Own):
    def forward(self, x):
        return self.bias + x.tanh()


class Both(Own):
    def forward(self, x):
        return torch.add(torch.mul(x.tanh(), self.weight), self.bias)


class Twice(Own):
    def forward(self, x):
        return self.weight * (self.weight * x).tanh()


class SamplesSecond(Own):
    def forward(self, x):
        return (x.transpose(0, 1) * self.weight).transpose(0, 1)


class Narrow(Own):
    """The operand is repeated as well."""

    def forward(self, x):
        return x.mean(1, keepdim=True) * self.weight + x


class Linear(Own):
    def forward(self, x):
        return F.linear(x, self.weight, bias=self.bias)


class LayerNorm(Own):
    def forward(self, x):
        return F.layer_norm(x.transpose(1, 2), (T,), self.weight, self.bias, 1e-3).transpose(1, 2)


class RmsNorm(Own):
    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight)


class Dropping(Own):
    """Random numbers beside a parameter: they need not be drawn again."""

    def forward(self, x):
        return F.dropout(x, 0.5) * self.weight


class Materialized(Own):
    """What reaches the loss in another way is tapped where it is made."""

    def forward(self, x):
        self.aside = self.weight * x
        return x


KNOWN = {
    "normalization by hand": lambda: ByHand(weight=(D,)),
    "sum": lambda: Shifted(bias=(T, D)),
    "sum, of size one": lambda: Shifted(bias=(1, T, 1)),
    "product and sum": lambda: Both(weight=(D,), bias=(T, 1)),
    "a number": lambda: Both(weight=(), bias=()),
    "used twice": lambda: Twice(weight=(D,)),
    "samples second": lambda: SamplesSecond(weight=(D,)),
    "samples second, all sizes": lambda: SamplesSecond(weight=(T, 1, D)),
    "operand repeated": lambda: Narrow(weight=(T, 1)),
    "linear": lambda: Linear(weight=(2, D), bias=(2,)),
    "layer norm": lambda: LayerNorm(weight=(T,), bias=(T,)),
    "rms norm": lambda: RmsNorm(weight=(D,)),
    "dropout": lambda: Dropping(weight=(D,)),
}


class Transposed(Own):
    def forward(self, x):
        return x * self.weight.mT.reshape(D)


class Scaled(Own):
    def forward(self, x):
        return torch.add(x, self.weight, alpha=2.0)


class Squared(Own):
    def forward(self, x):
        return x * (self.weight * self.weight)


class ProductAndSum(Own):
    def forward(self, x):
        return x * self.weight + self.weight


class InPlace(Own):
    def forward(self, x):
        return x.add(1.0).mul_(self.weight)


class Listed(Own):
    def forward(self, x):
        return x * torch.stack([self.weight, self.weight]).sum(0)


UNKNOWN = {
    "transposed": lambda: Transposed(weight=(D, 1)),
    "with a factor": lambda: Scaled(weight=(D,)),
    "squared": lambda: Squared(weight=(D,)),
    "product and sum of one": lambda: ProductAndSum(weight=(D,)),
    "in place": lambda: InPlace(weight=(D,)),
    "in a list": lambda: Listed(weight=(D,)),
}


def model_of(make, dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), make(), nn.Tanh()).to(dtype)


def data(dtype=torch.float64) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(2)
    return model(x).square().flatten(1).sum(1)


def per_sample(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Row by row of one backward each: autograd's own."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        gradients = torch.autograd.grad(losses(model, x)[i], list(model.parameters()))
        for column, gradient in zip(rows.values(), gradients, strict=True):
            column.append(gradient)
    return {name: torch.stack(column) for name, column in rows.items()}


@pytest.fixture
def without_own_code(monkeypatch):
    def refuse(self):
        raise AssertionError(f"the code of {type(self.module).__name__} ran again")

    monkeypatch.setattr(vmap_fallback.VmapFallback, "per_sample_gradients", refuse)


def assert_exact(model: nn.Module, dtype: torch.dtype, bar: float) -> None:
    expected = per_sample(model, data(dtype))
    largest = max(float(rows.abs().max()) for rows in expected.values())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), mode="exact")
    for _ in range(2):  # the second without a trial
        losses(model, data(dtype)).mean().backward()
        found = clipper.per_sample_gradients()
        for name, rows in expected.items():
            error = (found[name] - rows).abs().max() / largest
            assert float(error) <= bar, name
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    clipper.detach()


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_known_operations_are_exact_and_do_not_run_again(name, dtype, bar, without_own_code):
    assert_exact(model_of(KNOWN[name], dtype), dtype, bar)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_uses_are_exact_too(name):
    assert_exact(model_of(UNKNOWN[name]), torch.float64, 1e-12)


def test_what_an_operation_gives_may_be_kept_aside(without_own_code):
    model, x = model_of(lambda: Materialized(weight=(D,))), data()

    def loss():
        return model(x).square().sum(), model[1].aside.square().sum()

    (first, second), clipper = loss(), gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), loss_reduction="sum")
    expected = torch.autograd.grad(first + second, list(model.parameters()))
    first, second = loss()
    (first + second).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    clipper.detach()


class Changing(Own):
    """Does something else once it is told to."""

    def forward(self, x):
        return x * self.weight + TOLD["other"](x, self.weight)


TOLD = {"other": lambda x, weight: 0.0}
"""No attribute, which would be seen."""


@pytest.fixture
def _told_nothing():
    before = TOLD["other"]
    yield
    TOLD["other"] = before


class ChangingPlaces(nn.Module):
    """Does so with what an embedding returned for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(T, D)

    def forward(self, x):
        places = self.table(torch.arange(T))
        return x * places + TOLD["other"](x, places)


class Doubling(torch.autograd.Function):
    """Functions of autograd are not announced to proxies."""

    @staticmethod
    def forward(ctx, weight):
        return 2 * weight

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


OTHERS = {
    "a function of autograd": lambda x, weight: x * Doubling.apply(weight),
    "a sum": lambda x, weight: x + weight,
    "a square": lambda x, weight: x * weight.square(),
    "other dimensions": lambda x, weight: (x[:, :1, None] * weight).sum(2),
}


@pytest.mark.usefixtures("_told_nothing")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("make", [lambda: Changing(weight=(D,)), ChangingPlaces], ids=["parameter", "result"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_use_that_was_not_planned_is_exact_or_refused(name, make, mode):
    """It is tried out again on the very step; what cannot be followed layer by layer then runs sample by sample."""
    model, x = model_of(make), data()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), mode=mode)
    for _ in range(2):
        losses(model, x).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    TOLD["other"] = OTHERS[name]
    seen, refusal = [], ""
    for _ in range(2):  # the second knows what the first has found
        try:
            losses(model, x).mean().backward()
            seen.append({} if mode == "fast" else clipper.per_sample_gradients())
            clipper.clip_and_accumulate()
        except UnsupportedGradientError as error:
            refusal = str(error)
            break
        clipper.pre_step()
        seen.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    model.zero_grad()
    clipper.detach()
    assert not refusal or "a gradient reached 1." in refusal
    alone = [per_sample(model, x[i : i + 1]) for i in range(B)]
    rows = {name: torch.cat([own[name] for own in alone]) for name in alone[0]}
    factors = (1 / torch.stack([torch.cat([g.flatten() for g in own.values()]).norm() for own in alone])).clamp(max=1)
    assert bool((factors < 1).all())
    clipped = {name: torch.einsum("b,b...->...", factors, values) / B for name, values in rows.items()}
    for found, expected in zip(seen, [rows, clipped] * 2, strict=False):  # none after a refusal
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_told_nothing")
def test_a_use_that_was_not_planned_and_has_no_gradient_does_no_harm():
    model, x = model_of(lambda: Changing(weight=(D,))), data()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    losses(model, x).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    expected = model[1].weight.grad.clone()
    model.zero_grad()
    TOLD["other"] = lambda x, weight: 0.0 * float(weight.detach().norm())
    losses(model, x).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    torch.testing.assert_close(model[1].weight.grad, expected, rtol=1e-12, atol=0)
    clipper.detach()


# What an embedding returns that sees no samples, such as that of positions.


class Places(nn.Module):
    """An embedding of places, and code that does something with what it returns."""

    def __init__(self, use, frozen: bool = False, hooked: bool = False) -> None:
        super().__init__()
        self.table, self.norm, self.use = nn.Embedding(T + 2, D, padding_idx=1), nn.LayerNorm(D), use
        self.table.weight.requires_grad_(not frozen)
        if hooked:
            self.table.register_forward_hook(lambda module, args, output: None)

    def forward(self, x):
        return self.norm(self.use(self, x, torch.arange(T)))


RESULTS = {
    "sum": lambda self, x, ids: x + self.table(ids),
    "sum, the other way round": lambda self, x, ids: self.table(ids[None]) + x.tanh(),
    "product": lambda self, x, ids: x * self.table(ids),
    "moved to where it is": lambda self, x, ids: x + self.table(ids).to(x.device),
    "ids that come again": lambda self, x, ids: x + self.table(ids.clamp(max=1)),
    "one for all": lambda self, x, ids: x + self.table(torch.tensor(2)),
    "samples second": lambda self, x, ids: (x.transpose(0, 1) + self.table(ids[:, None])).transpose(0, 1),
}

OTHER_RESULTS = {
    "twice": lambda self, x, ids: (lambda places: (x + places) * places)(self.table(ids)),
    "two calls": lambda self, x, ids: x + self.table(ids) + self.table(ids + 1),
    "a part": lambda self, x, ids: x + self.table(torch.arange(T + 1))[:T],
    "in another layer": lambda self, x, ids: x + self.norm(self.table(ids)),
    "beside the weight": lambda self, x, ids: x + self.table(ids) + self.table.weight[:T],
    "in place": lambda self, x, ids: x.clone().add_(self.table(ids)),
    "converted": lambda self, x, ids: x + self.table(ids).to(torch.float64),
    "of another layer": lambda self, x, ids: x + nn.functional.embedding(ids, self.table.weight),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_what_an_embedding_returns_for_all_samples_is_followed(name, hooked, dtype, bar, without_own_code):
    assert_exact(model_of(lambda: Places(RESULTS[name], hooked=hooked), dtype), dtype, bar)


@pytest.mark.parametrize("name", OTHER_RESULTS)
def test_any_other_use_of_what_an_embedding_returns_is_exact_too(name):
    assert_exact(model_of(lambda: Places(OTHER_RESULTS[name])), torch.float64, 1e-12)


def test_an_embedding_that_is_frozen_is_left_out(without_own_code):
    model, x = model_of(lambda: Places(RESULTS["sum"], frozen=True)), data()
    expected = torch.autograd.grad(losses(model, x).sum(), [p for p in model.parameters() if p.requires_grad])
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), loss_reduction="sum")
    losses(model, x).sum().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    for parameter, gradient in zip([p for p in model.parameters() if p.requires_grad], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    assert model[1].table.weight.grad is None

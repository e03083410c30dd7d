"""Ways in which a gradient can pass a sample by: right or refused in words, in every dtype, never a wrong number."""

import random
from collections import Counter, UserDict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from reference import per_sample_gradients

B = 6


class Base(nn.Module):
    """A bare parameter and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.layer = nn.Parameter(torch.randn(2, 3)), nn.Linear(2, 2)
        self.kept: list = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.mu.T)


class Attribute(Base):
    def forward(self, x):
        self._kl = self.mu.square().sum()
        return super().forward(x)

    def aside(self):
        return self._kl


class AttributeOfAnother(Base):
    def forward(self, x):
        self.layer._aux = self.mu.square().sum()
        return super().forward(x)

    def aside(self):
        return self.layer._aux


class Listed(Base):
    def forward(self, x):
        self.kept[:] = [self.mu.square().sum()]
        return super().forward(x)

    def aside(self):
        return self.kept[0]


class PlainObject(Base):
    class Holder:
        value: Tensor

    def forward(self, x):
        holder = self.Holder()
        holder.value = self.mu.square().sum()
        self.kept[:] = [holder]
        return super().forward(x), holder

    def aside(self):
        return self.kept[0].value


class BatchTerm(Base):
    """A term that every sample has a part in, kept by code with a parameter of its own."""

    def forward(self, x):
        h = x @ self.mu.T
        self._aux = h.mean(0).square().sum()
        return self.layer(h)

    def aside(self):
        return self._aux


class HookOfALayer(Base):
    def __init__(self):
        super().__init__()
        self.layer.register_forward_pre_hook(
            lambda layer, args: self.kept.__setitem__(slice(None), [layer.weight.sum()])
        )

    def aside(self):
        return self.kept[0]


class NoiseAndAttribute(Base):
    def forward(self, x):
        self._kl = self.mu.square().sum()
        return super().forward(x + torch.randn_like(x))

    def aside(self):
        return self._kl


SIDEWAYS = [Attribute, AttributeOfAnother, Listed, PlainObject, BatchTerm, HookOfALayer, NoiseAndAttribute]


def first(output):
    return output[0] if isinstance(output, tuple) else output


def losses(output) -> Tensor:
    rows = first(output).flatten(1)
    return rows.abs().square().sum(1)


def made(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype).train()


def data(dtype: torch.dtype = torch.float64, *shape: int) -> Tensor:
    return torch.randn(*(shape or (B, 3)), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def step(clipper, x: Tensor, aside: Callable[[], Tensor]) -> None:
    (losses(clipper.module(x)).mean() + aside()).backward()
    clipper.clip_and_accumulate()


def clipped(model: nn.Module, x: Tensor, seed: int = 2, **options) -> dict[str, Tensor]:
    """One step of a new clipper that clips nothing."""
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), **options)
    try:
        for _ in range(2):  # the second without a trial
            torch.manual_seed(seed)
            losses(model(x)).mean().backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
    finally:
        clipper.detach()
        model.zero_grad()
    return found


def plain(model: nn.Module, x: Tensor, seed: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    losses(model(x)).mean().backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", SIDEWAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("verified", [False, True], ids=["first step", "later step"])
def test_a_value_that_reaches_the_loss_sideways_is_refused(kind, dtype, verified):
    model, x = made(kind, dtype), data(dtype)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    if verified:
        losses(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    with pytest.raises(UnsupportedGradientError, match=r"plain gradient|used outside of the module's forward"):
        step(clipper, x, model.aside)
    model.zero_grad()
    clipper.detach()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SIDEWAYS)
def test_what_is_kept_aside_and_not_used_does_no_harm(kind):
    model, x = made(kind), data()
    expected = plain(model, x)
    for name, gradient in clipped(model, x).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, r):
        return torch.tanh(self.layer(x) + 1e-4 * r)


class Argument(nn.Module):
    """A parameter that is handed to a layer, which has 1e-4 of the gradient."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.r = Inner(), nn.Linear(3, 1), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.out(self.inner(x, self.r))


class DerivedArgument(Argument):
    def forward(self, x):
        return self.out(self.inner(x, 2 * self.r))


class KeywordArgument(Argument):
    def forward(self, x):
        return self.out(self.inner(x, r=self.r))


class ArgumentOfARule(nn.Module):
    """A layer with a rule gets a parameter of another module."""

    def __init__(self):
        super().__init__()
        self.attention, self.bias = nn.MultiheadAttention(4, 1, batch_first=True), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        x = x.unsqueeze(2).expand(-1, -1, 4)
        return self.attention(x, x, x, attn_mask=self.bias)[0]


class SharedBias(nn.Module):
    """A position bias that the first block makes from parameters alone, and hands on."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(5, 3), nn.ModuleList([Inner(), Inner()])

    def forward(self, x):
        bias = self.table(torch.arange(3)).sum(0)
        for block in self.blocks:
            x = block(x, 1e4 * bias)
        return x


class Noisy(Argument):
    def forward(self, x):
        return self.out(self.inner(x, self.r) + 0.1 * torch.randn_like(x))


class Dropping(Argument):
    def forward(self, x):
        return self.out(F.dropout(self.inner(x, self.r) * self.r, 0.5))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


class CountingAndDropping(Dropping):
    """Samples are run one by one here, from the attribute that the batch found."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.shift = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        x = F.relu_(self.norm(self.first(x)))
        h = self.first(x)
        h += self.shift
        return h


class ComplexResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x):
        return x.to(torch.complex128) @ torch.view_as_complex(self.weight)


class Experts(nn.Module):
    """Each sample goes to the expert that it chooses."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 2) for _ in range(3)])

    def forward(self, x):
        share, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return out


def old_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def old_spectral_norm():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


EXACT = [
    Argument, DerivedArgument, KeywordArgument, ArgumentOfARule, SharedBias, Noisy, Dropping, Counting,
    CountingAndDropping, InPlace, ComplexResult, Experts, old_weight_norm, old_spectral_norm,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:'torch.nn.utils.weight_norm' is deprecated:FutureWarning")
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("size", [B, 1])
@pytest.mark.parametrize("kind", EXACT)
def test_is_exact(kind, size, mode):
    x = data()[:size]
    twin = made(kind)
    if kind in (Counting, CountingAndDropping, old_spectral_norm):
        plain(twin, x)  # a state that moves on
    expected = plain(twin, x)
    for name, gradient in clipped(made(kind), x, mode=mode).items():
        bar = 1e-11 * max(float(expected[name].abs().max()), 1e-300)
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=bar, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_with_a_small_share_of_the_gradient_has_it_in_half_precision(dtype):
    x, autocast = data(torch.float32), dtype == torch.bfloat16
    expected = plain(made(Argument, torch.float32), x)["r"]
    model = made(Argument, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = clipped(model, x)["r"]
    torch.testing.assert_close(found, expected, rtol=0.05 if autocast else 1e-5, atol=0)


class Capacity(nn.Module):
    """Only the two largest of the batch pass: two samples alone would both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        mask = torch.zeros(len(x), dtype=x.dtype).index_fill(0, h.sum(1).topk(min(2, len(x))).indices, 1.0)
        return self.b(h * mask[:, None])


class Threshold(Capacity):
    """Those that are as large as the second largest pass: a batch of copies would too."""

    def forward(self, x):
        h = self.a(x)
        bound = h.sum(1).topk(min(2, len(x))).values[-1]
        return self.b(h * (h.sum(1) >= bound)[:, None])


class Overflow(Capacity):
    """An expert takes at most half the batch: which samples are alike decides."""

    def forward(self, x):
        h = self.a(x)
        place = (h.sum(1).sign().unsqueeze(0) == h.sum(1).sign().unsqueeze(1)).tril().sum(1)
        return self.b(h * (place <= max(2, len(x) // 2))[:, None])


class NoisyCapacity(Capacity):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Centred(Capacity):
    def forward(self, x):
        h = self.a(x)
        return self.b(h - 1e-3 * h.mean(0))


class NoisyByPython(Capacity):
    """Each sample draws from Python's generator, so that one by itself draws what the first drew in the batch."""

    def forward(self, x):
        return self.b(self.a(x) * torch.tensor([[random.random()] for _ in x], dtype=x.dtype))


class NoisyByNumPy(Capacity):
    def forward(self, x):
        return self.b(self.a(x) * torch.from_numpy(numpy.random.random((len(x), 1))).to(x))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [Capacity, Threshold, Overflow, NoisyCapacity, Centred, NoisyByPython, NoisyByNumPy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_that_depend_on_the_batch_are_refused_at_its_real_size(kind, dtype):
    model, x = made(kind, dtype), data(dtype, 8, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match="mix samples"):
        model(x)
    clipper.detach()


def test_a_new_size_is_tried_out_again():
    model = made(Capacity)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    losses(model(data()[:2])).mean().backward()  # both pass
    clipper.clip_and_accumulate()
    clipper.pre_step()
    with pytest.raises(UnsupportedGradientError, match="another way than in the batch of 6"):
        model(data())


class Listed(nn.Module):
    """Returns one tensor for each sample."""

    def __init__(self, bare: bool):
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 2))
        self.bare = bare

    def forward(self, x: Tensor) -> list[Tensor]:
        return [row @ self.weight for row in x] if self.bare else list(self.layer(x).tanh())


class OfList(nn.Module):
    def __init__(self, bare: bool):
        super().__init__()
        self.rows, self.head = Listed(bare), nn.Linear(2 if bare else 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack(self.rows(x)))


@pytest.mark.parametrize("bare", [False, True])
def test_a_module_inside_that_returns_a_tensor_for_each_sample_is_exact(bare):
    model, twin = OfList(bare).double(), OfList(bare).double()
    twin.load_state_dict(model.state_dict())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf))
    for size in (4, 3, 1):
        x = torch.randn(size, 3, dtype=torch.float64)
        expected = per_sample_gradients(twin, lambda s: losses(twin(s[0])).sum(), [(row[None],) for row in x])
        losses(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        for name, own in model.named_parameters():
            if own.grad is not None and bool(own.grad.any()):
                torch.testing.assert_close(own.grad, expected[name].mean(0))


def test_an_outermost_module_that_returns_a_tensor_for_each_sample_is_refused():
    model = Listed(bare=False)
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match=r"returns 2 tensors for two samples and 3 .* torch\.stack"):
        model(torch.randn(4, 3))


def test_batch_norm_without_running_statistics_is_not_told_to_use_eval():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(UnsupportedGradientError, match=r"track_running_stats=True: .* \.eval\(\) changes nothing"):
        gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))


def test_an_inner_gradient_over_the_batch_is_refused_with_what_to_do():
    class Inner(Base):
        def forward(self, x):
            loss = (x @ self.mu.T).square().mean()
            (step,) = torch.autograd.grad(loss, self.mu, create_graph=True)
            return self.layer(x @ (self.mu - step).T)

    model = made(Inner)
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match=r"differentiates its own parameters .* torch\.func\.grad"):
        model(data())


def test_an_error_of_the_users_is_raised_as_it_is_also_where_the_model_is_examined_anew():
    class Fails(Base):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("a mistake of the user's")
            return super().forward(x)

    model = made(Fails)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    for fails in (False, True, False):
        model.fails = fails
        if fails:
            with pytest.raises(KeyError, match="a mistake of the user's"):
                model(data())
            continue
        losses(model(data())).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()


class OwnLoss(nn.Module):
    """Returns its loss beside its logits, as models of transformers do."""

    def __init__(self, reduce: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.layer, self.reduce = nn.Linear(3, 4), reduce

    def forward(self, x, labels):
        logits = self.layer(x)
        tokens = F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="none")
        return self.reduce(tokens, labels != -100), logits


LABELS = torch.tensor([[0, 1, 2, -100]] * 4)
UNEQUAL = torch.tensor([[0, 1, 2, -100], [1, 2, -100, -100], [3, 3, 3, 3], [0, 0, 0, -100]])


@pytest.mark.parametrize(
    ("reduce", "labels", "reduction"),
    [
        pytest.param(lambda t, m: t.sum() / m.sum(), LABELS, "mean", id="token mean, equal counts"),
        pytest.param(lambda t, m: (t.sum(1) / m.sum(1)).mean(), UNEQUAL, "mean", id="mean of means"),
        pytest.param(lambda t, m: t.sum(), UNEQUAL, "sum", id="sum"),
    ],
)
def test_a_loss_that_the_model_returns(reduce, labels, reduction):
    torch.manual_seed(0)
    model, x = OwnLoss(reduce).double(), data(torch.float64, 4, 4, 3)
    singles = []
    for i in range(4):
        model(x[i : i + 1], labels[i : i + 1])[0].backward()
        singles.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), loss_reduction=reduction)
    model(x, labels)[0].backward()
    clipper.clip_and_accumulate()
    norms = torch.stack(singles).norm(dim=1)
    torch.testing.assert_close(clipper.statistics.norms, norms, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("reduce", "labels", "factor"),
    [
        pytest.param(lambda t, m: t.sum() / m.sum(), UNEQUAL, r"is not the mean", id="token mean, unequal counts"),
        pytest.param(lambda t, m: t.sum(), LABELS, r"\(2 times the expected value\)", id="a sum for a mean"),
        pytest.param(lambda t, m: t.sum() / 12, LABELS, r"is not the mean", id="a number of tokens that was given"),
        pytest.param(lambda t, m: t.mean() + t.mean().square(), LABELS, r"is not the mean", id="a term of the batch"),
    ],
)
def test_a_loss_that_the_model_returns_and_that_is_no_mean_is_refused(reduce, labels, factor):
    torch.manual_seed(0)
    model, x = OwnLoss(reduce).double(), data(torch.float64, 4, 4, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    loss, logits = model(x, labels)
    with pytest.raises(UnsupportedGradientError, match=f"loss that the model returns.*{factor}"):
        loss.backward()
    clipper.discard()
    model(x, labels)[1].square().sum((1, 2)).mean().backward()  # the logits are another matter
    clipper.clip_and_accumulate()
    assert logits.shape == (4, 4, 4)


def test_a_tensor_that_belongs_to_no_sample_may_be_returned_but_not_used():
    class Returns(Base):
        def forward(self, x):
            return super().forward(x), self.mu * 2

    model, x = made(Returns), data()
    clipped(model, x)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    output, weights = model(x)
    with pytest.raises(UnsupportedGradientError, match="belongs to no single sample"):
        (losses(output).mean() + weights.sum()).backward()
    clipper.detach()


def replaced_forward(model):
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) + model[0].weight.sum()
    return lambda: 0.0


def late_hook(model):
    kept = []
    model[0].register_forward_pre_hook(lambda layer, args: kept.__setitem__(slice(None), [layer.weight.square().sum()]))
    return lambda: kept[0]


def early_hook(model):
    kept = []
    model[0].register_forward_hook(lambda layer, a, output: kept.__setitem__(slice(None), [output.sum()]), prepend=True)
    return lambda: kept[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [(late_hook, "plain gradient in Linear"), (early_hook, "in Linear")],
)
def test_what_is_put_into_a_layer_after_the_trial_is_noticed(change, words):
    model, x = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), data()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    losses(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    model.zero_grad()
    aside = change(model)
    with pytest.raises(UnsupportedGradientError, match=words):
        step(clipper, x, aside)


def test_a_forward_that_is_replaced_later_is_run_sample_by_sample():
    model, x = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), data()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf))
    for change in (lambda model: None, replaced_forward):
        change(model)
        losses(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    clipper.detach()
    rows = per_sample_gradients(model, lambda s: losses(model(s[0])).sum(), [(x[i : i + 1],) for i in range(len(x))])
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, rows[name].mean(0), rtol=1e-10, atol=1e-12, msg=name)


class HooksItself(nn.Module):
    """Puts hooks on its layers when it is first run, as models of transformers do for hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked, self.states = nn.Linear(3, 2), False, []

    def forward(self, x):
        if not self.hooked:
            self.layer.register_forward_hook(lambda layer, args, output: self.states.append(output.detach()))
            self.hooked = True
        self.states.clear()
        return self.layer(x)


@pytest.mark.parametrize("kind", [HooksItself, Attribute, Counting, Experts, old_spectral_norm])
def test_the_trial_leaves_nothing_behind(kind):
    model, x = made(kind), data()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    counts = {}
    for _ in range(3):
        losses(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        counts[len([h for m in model.modules() for h in m._forward_hooks.values()])] = None
    clipper.detach()
    assert len(counts) == 1
    if kind is HooksItself:
        assert len(model.layer._forward_hooks) == 1
        assert len(model.states) == 1
    if kind is Counting:
        assert model.calls == state["calls"] + 3


def test_the_generators_move_on_as_without_a_clipper():
    def numbers(with_clipper: bool) -> Tensor:
        model, x = made(Noisy), data()
        clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0)) if with_clipper else None
        torch.manual_seed(3)
        for _ in range(2):
            losses(model(x)).mean().backward()
            if clipper is not None:
                clipper.clip_and_accumulate()
                clipper.pre_step()
        return torch.rand(3)

    assert torch.equal(numbers(True), numbers(False))


class TwoTowers(nn.Module):
    """Each row of what it returns depends on all samples of the second input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x, y):
        return self.a(x) @ self.b(y).T


@pytest.mark.parametrize("kind", ["float", "integer"])
def test_the_second_input_of_a_contrastive_model_is_no_constant(kind):
    model, x = made(TwoTowers), data()
    y = data() if kind == "float" else torch.arange(3 * B).view(B, 3)
    model.b = model.b if kind == "float" else nn.Sequential(nn.Embedding(3 * B, 1), nn.Flatten(), model.b).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match="samples cannot be told apart"):
        model(x, y)
    clipper.detach()


def test_a_model_that_turns_its_batch_on_its_side_later_keeps_samples_apart():
    class Turning(nn.Module):
        turned = False

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.transpose(0, 1) if self.turned else x).tanh()

    model, x = made(Turning), data(torch.float64, 5, 4, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    model(x[:3]).square().sum((1, 2)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    model.turned = True
    model.zero_grad()
    model(x).square().sum((0, 2)).mean().backward()  # samples are columns now
    clipper.clip_and_accumulate()
    clipper.pre_step()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    clipper.detach()
    model.zero_grad()
    model(x).square().sum((0, 2)).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=0)


class Product(torch.autograd.Function):
    """As a fused kernel has it: without a rule for `torch.func`."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ hidden


class FusedHead(nn.Module):
    """A language model's head in one kernel, with zeros where nothing counts; it notes what it has seen."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(3, 4), nn.Linear(4, 5, bias=False), 0
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        hidden, counts = self.body(x).tanh(), x[..., 0] > 0
        self.calls += 1
        self.seen += hidden.detach().mean((0, 1))
        logits = Product.apply(hidden.flatten(0, 1), self.head.weight)
        return logits.unflatten(0, counts.shape).masked_fill(~counts[..., None], 0)


def test_a_kernel_that_torch_func_cannot_run_is_run_for_each_sample_and_the_layers_once():
    model, x = made(FusedHead), data(torch.float64, 16, 7, 3)
    x[3, :, 0] = -1.0  # nothing of this sample counts
    plain, calls = made(FusedHead), []
    plain(x)
    model.body.register_forward_hook(lambda *_: calls.append(1))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact")
    for _ in range(20):
        model.seen.zero_()
        model.calls = 0
        calls.clear()
        losses(model(x)).mean().backward()
        found = clipper.per_sample_gradients()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        assert model.calls == 1
        torch.testing.assert_close(model.seen, plain.seen, rtol=1e-12, atol=0)
    assert len(calls) <= 5  # with four witnesses at most
    clipper.detach()
    for i in range(len(x)):
        plain.zero_grad()
        losses(plain(x[i : i + 1])).mean().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("can't allocate memory: out of memory"), UnsupportedGradientError),
    ],
)
def test_memory_that_runs_out_is_told_and_nothing_is_tried_in_its_place(monkeypatch, error, told):
    model, x = made(FusedHead), data(torch.float64, 4, 7, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    losses(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()

    def run_out(*_, **__):
        raise error

    losses(model(x)).mean().backward()
    monkeypatch.setattr(torch.func, "vmap", lambda *_, **__: run_out)
    with pytest.raises(told, match="out of memory"):
        clipper.clip_and_accumulate()
    clipper.detach()


class StatesInside(FusedHead):
    """Its own code writes into a layer that it has called, and into what that layer holds."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4))
        self.body[0].calls, self.body[0].log = 0, []
        self.body[0].register_buffer("load", torch.zeros(()))

    def forward(self, x):
        out = super().forward(x)
        self.body[0].calls += 1
        self.body[0].log.append(len(x))
        self.body[0].load += out.detach().mean()
        return out


def test_what_own_code_writes_into_the_layers_of_a_layer_is_as_after_one_run():
    model, x = made(StatesInside), data(torch.float64, 4, 7, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    for step in range(1, 4):
        model.body[0].load.zero_()
        out = model(x)
        losses(out).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        assert (model.calls, model.body[0].calls, model.body[0].log) == (step, step, [4] * step)
        torch.testing.assert_close(model.body[0].load, out.detach().mean(), rtol=1e-12, atol=0)
    clipper.detach()


class OfMasked(nn.Module):
    """Returns scores of the masked tokens alone, one behind the other."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.head(self.embed(ids).tanh())[mask]


@pytest.mark.parametrize("before", [0, 2, 8])
def test_scores_of_chosen_tokens_are_refused_where_samples_have_other_numbers_of_them(before):
    model = OfMasked().double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))

    def a_step(counts):
        ids, mask = torch.randint(0, 9, (4, 6)), torch.arange(6) < torch.tensor(counts)[:, None]
        model(ids, mask).square().mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()

    for _ in range(before):
        a_step([2, 2, 2, 2])
    for counts in ([3, 1, 2, 2], [2, 2, 1, 3]):
        with pytest.raises(UnsupportedGradientError, match=r"sample alone|of samples by values"):
            a_step(counts)


@dataclass(frozen=True, slots=True)
class Given:
    values: object
    scale: float = 2.0


class Lengths(nn.Module):
    """Divides each sample by its own length, or all samples by the longest one."""

    def __init__(self, of, longest):
        super().__init__()
        self.layer, self.of, self.longest = nn.Linear(3, 2), of, longest

    def forward(self, x, given):
        lengths = [float(length) for length in self.of(given)]
        return self.layer(x).tanh() / (max(lengths) if self.longest else x.new_tensor(lengths)[:, None])


HOLDERS = {
    "tensor": (torch.tensor, lambda given: given),
    "list": (list, lambda given: given),
    "tuple": (tuple, lambda given: given),
    "list of tensors": (lambda values: [torch.tensor(value) for value in values], lambda given: given),
    "strings": (lambda values: ["a" * value for value in values], lambda given: map(len, given)),
    "nested lists": (lambda values: [[1] * value for value in values], lambda given: map(len, given)),
    "ragged tensors": (lambda values: [torch.ones(value) for value in values], lambda given: map(len, given)),
    "NumPy": (numpy.array, lambda given: given),
    "dict of lists": (lambda values: {"n": list(values)}, lambda given: given["n"]),
    "dataclass, tensor": (lambda values: Given(torch.tensor(values)), lambda given: given.values),
    "dataclass, list": (lambda values: Given(list(values)), lambda given: given.values),
    "SimpleNamespace": (lambda values: SimpleNamespace(n=torch.tensor(values)), lambda given: given.n),
    "UserDict": (lambda values: UserDict(n=torch.tensor(values)), lambda given: given["n"]),
    "dict of another class": (lambda values: Counter(n=torch.tensor(values)), lambda given: given["n"]),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("longest", [False, True], ids=["own", "longest"])
@pytest.mark.parametrize("late", [False, True], ids=["first", "equal before"])
def test_a_sample_alone_gets_its_own_entry_of_what_a_module_is_called_with(kind, longest, late):
    torch.manual_seed(0)
    hold, of = HOLDERS[kind]
    model = Lengths(of, longest).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact")
    x = torch.randn(4, 3, dtype=torch.float64)
    batches = [*([[1] * 4, [2] * 4, [3] * 4, [5] * 4, [7] * 4] if late else []), [6, 2, 1, 3], [2, 4]]
    for values in batches:
        rows = x[: len(values)]

        def step(rows=rows, values=values):
            model(rows, hold(values)).square().sum(1).mean().backward()
            found = clipper.per_sample_gradients()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            return found

        if longest and len(set(values)) > 1:
            with pytest.raises(UnsupportedGradientError, match="alone"):
                step()
            break
        found = step()
        alone = deepcopy(model)
        expected = per_sample_gradients(
            alone,
            lambda i, run=alone, x=rows, of=values: run(x[i : i + 1], hold(of[i : i + 1])).square().sum(),
            range(len(values)),
        )
        for name, gradients in expected.items():
            torch.testing.assert_close(found[name], gradients, rtol=1e-10, atol=1e-12)
    clipper.detach()


class Sizes(nn.Module):
    """Uses a value that is the same for all samples, in a way of ``use``."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(3, 2), use

    def forward(self, x, given):
        return self.layer(x) * self.use(given)


def ratio(size):
    height, width = size
    return height / width


CONSTANTS = {
    "size, of a later batch's": ([224, 112], lambda size: size[0] / size[1], (4, 2, 4, 2)),
    "size, of the first batch's": ([224, 112], ratio, (2, 3, 2)),
    "names": (["a", "b"], len, (3, 2, 3)),
    "one name": (("a",), len, (1, 2, 1)),
    "settings": (SimpleNamespace(size=[3, 4], flag=True, none=None, word="w"), lambda g: g.size[0], (4, 2, 4)),
    "NumPy": (numpy.array([1.0, 2.0]), lambda one: float(one.sum()), (4, 2, 4)),
    "range": (range(3), len, (2, 4)),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_beside_the_batch_stays_whole(kind):
    torch.manual_seed(0)
    given, use, sizes = CONSTANTS[kind]
    model = Sizes(use).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    for size in sizes:
        x = torch.randn(size, 3, dtype=torch.float64)
        model(x, given).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        output = (x @ model.layer.weight.T + model.layer.bias).detach() * use(given)
        torch.testing.assert_close(model.layer.bias.grad, 2 * use(given) * output.mean(0), rtol=1e-10, atol=1e-12)
    clipper.detach()


def holding_itself(values):
    one = SimpleNamespace(values=torch.tensor(values))
    one.itself = one
    return one


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (frozenset, r"argument 1 of the module, a frozenset,.* a tuple\."),
        (set, r"argument 1 of the module, a set, may hold values of the samples"),
        (deque, r"argument 1 of the module, a deque, has an entry for each of the 3 samples"),
        (lambda values: range(len(values)), "a range, has an entry for each of the 3"),
        (lambda values: MappingProxyType({"n": torch.tensor(values)}), r"Pass a dict"),
        (holding_itself, "refers to itself"),
        (lambda values: SimpleNamespace(words=dict.fromkeys(range(5)), many=[*map(Given, range(11_000))]), "too much"),
    ],
)
def test_an_argument_that_cannot_be_divided_is_refused(given, words):
    model = Sizes(lambda given: 1.0)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match=words):
        model(torch.ones(3, 3), given([5, 6, 7]))
    clipper.detach()


def test_the_refusal_names_the_list_that_was_divided_and_the_dimension_that_was_not():
    model = Sizes(lambda size: size[0] / size[1])
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match=r"its own entry of 1, .* a first batch of another size"):
        model(torch.randn(2, 3), [4, 2])
    model.use = lambda given: given.view(5, 3).mean(0).unsqueeze(1)
    with pytest.raises(UnsupportedGradientError, match=r"second dimension.*transpose it to \[batch, \.\.\.\]"):
        model(torch.randn(3, 3), torch.ones(5, 3))
    clipper.detach()


class Carries(nn.Module):
    """A recurrent layer with the samples first, whose state [layers, B, H] the caller carries from call to call."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 4, layers, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, state=None):
        out, state = self.layer(x, state)
        return self.head(out), state


@pytest.mark.parametrize(("layers", "sizes"), [(1, (4, 4, 2)), (2, (2, 2, 5)), (2, (1, 3, 3))], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_with_the_samples_second_is_divided_beside_inputs_with_the_samples_first(kind, layers, sizes):
    torch.manual_seed(0)
    model = Carries(kind, layers).double()
    twin = deepcopy(model)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9), mode="exact")
    for size in sizes:
        state = None
        for _ in range(2):
            x, y = torch.randn(size, 5, 3, dtype=torch.float64), torch.randn(size, 5, 2, dtype=torch.float64)
            before = state
            out, state = model(x, before)
            state = tree_map(torch.Tensor.detach, state)
            F.mse_loss(out, y).backward()
            clipper.clip_and_accumulate()
            found = clipper.per_sample_gradients()
            clipper.pre_step()
            model.zero_grad()
            for i in range(size):
                own = None if before is None else tree_map(lambda one, i=i: one[:, i : i + 1], before)
                loss = F.mse_loss(twin(x[i : i + 1], own)[0], y[i : i + 1])
                wanted = torch.autograd.grad(loss, [*twin.parameters()])
                for (name, _), gradient in zip(twin.named_parameters(), wanted, strict=True):
                    torch.testing.assert_close(found[name][i], gradient)
    clipper.detach()


def test_a_reentrant_checkpoint_of_everything_needs_an_input_that_requires_a_gradient():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=True)

    twin = deepcopy(layers)
    clipper = gg.PerSampleGradientClipper(Whole(), gg.FlatNormClipper(1e9), mode="exact")
    for _ in range(3):
        x = torch.randn(4, 3, dtype=torch.float64)
        clipper.module(x.clone().requires_grad_()).square().mean().backward()
        clipper.clip_and_accumulate()
        found = clipper.per_sample_gradients()
        clipper.pre_step()
        clipper.module.zero_grad()
        for i in range(4):
            wanted = torch.autograd.grad(twin(x[i : i + 1]).square().mean(), [*twin.parameters()])
            for (name, _), gradient in zip(twin.named_parameters(), wanted, strict=True):
                torch.testing.assert_close(found[f"layers.{name}"][i], gradient)


def test_the_refusals_of_returned_scales_and_of_another_number_of_calls_say_what_to_do():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.layer(x), self.scale.exp()

    clipper = gg.PerSampleGradientClipper(Scales(), gg.FlatNormClipper(1.0))
    out, scale = clipper.module(torch.randn(4, 3))
    loss = (out / scale).square().mean()
    with pytest.raises(UnsupportedGradientError, match=r"scale\.expand\(len\(x\), \*scale\.shape\)"):
        loss.backward()
    clipper.detach()
    model = nn.Linear(3, 2)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    clipper.refuse_ambiguous_losses()
    for calls in (2, 1):
        sum(F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0])) for _ in range(calls)).backward()
        if calls == 2:
            clipper.clip_and_accumulate()
            clipper.pre_step()
            continue
        with pytest.raises(UnsupportedGradientError, match=r"adds up 1 rows .* and added up 2 .* as many calls"):
            clipper.clip_and_accumulate()

"""Samples stay apart where code keeps, draws, stores or changes something between them."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from reference import per_sample_gradients

B = 5


def average(model, x, loss=None):
    """The plain average of the samples' gradients, from the slow twin."""
    found = per_sample_gradients(
        model, lambda s: (loss or squares)(model(s[0])).sum(), [(x[i : i + 1],) for i in range(len(x))]
    )
    return {name: g.mean(0) for name, g in found.items()}


def squares(output):
    return output.flatten(1).square().sum(1)


def clipper_of(model, **options):
    return gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf), **options)


def step(model, clipper, x, loss=squares):
    model.zero_grad()
    loss(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


class Tokens(nn.Module):
    """Flattens samples and tokens before a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.reshape(-1, 4)).view(*x.shape[:2], 3)


def test_one_token_first_and_more_tokens_later():
    model = Tokens().double()
    clipper = clipper_of(model)
    for tokens in (1, 6, 1):
        x = torch.randn(2, tokens, 4, dtype=torch.float64)
        found = step(model, clipper, x)
        clipper.detach()
        assert_same(found, average(model, x))
        model = Tokens().double()
        model.load_state_dict(model.state_dict())
        clipper = clipper_of(model)


class Turning(nn.Module):
    """Turns samples and time round once a number is set: a layer then sees other rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turned", torch.zeros(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.layer(x)


def test_a_layer_that_gets_other_rows_than_samples_behind_a_gate_is_run_sample_by_sample():
    model = Turning().double()
    clipper = clipper_of(model)
    x = torch.randn(B, 3, 4, dtype=torch.float64)
    step(model, clipper, x)
    model.turned.fill_(1)  # the trial has opened it before
    assert all(p.requires_grad for p in model.parameters())
    found = step(model, clipper, x)
    clipper.detach()
    assert_same(found, average(model, x))


class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.dropout(self.layer(x) * self.scale, 0.5)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_sample_keeps_the_random_numbers_that_own_code_drew_for_it(dtype, check):
    torch.manual_seed(0)
    model, x = OwnDropout().to(dtype), torch.randn(B, 4, dtype=dtype)
    clipper = clipper_of(model, check=check)
    torch.manual_seed(1)
    found = step(model, clipper, x)
    clipper.detach()
    model.zero_grad()
    model.double()
    torch.manual_seed(1)
    squares(model(x.double())).mean().backward()
    for name, parameter in model.named_parameters():
        bar = 20 * torch.finfo(dtype).eps * parameter.grad.abs().max()
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=0, atol=float(bar))


def test_a_hook_of_the_user_that_keeps_an_output_for_the_loss():
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(), []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    clipper = clipper_of(model)
    x = torch.randn(B, 4, dtype=torch.float64)
    loss = squares(model(x)) + squares(kept[-1])
    loss.mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    clipper.detach()
    model.zero_grad()
    (squares(model(x)) + squares(kept[-1])).mean().backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters()})


class Storing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        y = x @ self.weight
        self.penalty = y.square().sum(1)
        return y


def test_code_that_stores_a_term_of_the_loss_on_its_module_is_refused_where_the_loss_uses_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Storing()).double(), torch.randn(B, 4, dtype=torch.float64)
    clipper = clipper_of(model)
    found = step(model, clipper, x)
    (squares(model(x)) + model[1].penalty).mean().backward()
    with pytest.raises(UnsupportedGradientError, match=r"of 1\.weight do not add up to its plain gradient"):
        clipper.clip_and_accumulate()
    clipper.detach()
    assert_same(found, average(model, x))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x))


def test_a_model_that_draws_random_numbers_is_compared_with_the_same_numbers():
    torch.manual_seed(0)
    model, x = Noisy().double(), torch.randn(B, 4, dtype=torch.float64)
    clipper = clipper_of(model)
    torch.manual_seed(1)
    found = step(model, clipper, x)
    clipper.detach()
    torch.manual_seed(1)
    model.zero_grad()
    squares(model(x)).mean().backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters()})


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return iter([self.layer(x)])


def test_a_model_that_cannot_be_compared_is_refused():
    with pytest.raises(UnsupportedGradientError, match="Opaque returns no tensor that grows"):
        clipper_of(Opaque()).module(torch.randn(B, 4))


class Interrupted(nn.Module):
    """Own code, so that its parameter is hidden from autograd while it runs."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift, self.interrupt = nn.Linear(4, 3), nn.Parameter(torch.ones(3)), False

    def forward(self, x):
        x = self.layer(x) + self.shift
        if self.interrupt:
            raise KeyboardInterrupt("stop")
        return x


def test_an_interrupt_in_forward_leaves_no_layer_untrained():
    model = Interrupted().double()
    clipper = clipper_of(model)
    x = torch.randn(B, 4, dtype=torch.float64)
    step(model, clipper, x)
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt, match="stop"):
        model(x)
    model.interrupt = False
    found = step(model, clipper, x)
    assert all(p.requires_grad for p in model.parameters())
    clipper.detach()
    assert_same(found, average(model, x))


def test_a_mini_batch_that_fails_half_way_is_not_counted_twice(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    clipper = clipper_of(model)
    x = torch.randn(B, 4, dtype=torch.float64)
    add, calls = type(clipper._accumulation).add, []

    def failing(self, name, total):
        calls.append(name)
        if len(calls) == 2:
            raise MemoryError("no memory")
        add(self, name, total)

    monkeypatch.setattr(type(clipper._accumulation), "add", failing)
    squares(model(x)).mean().backward()
    with pytest.raises(MemoryError, match="no memory"):
        clipper.clip_and_accumulate()
    found = step(model, clipper, x)
    clipper.detach()
    assert_same(found, average(model, x))


class Moving(nn.Module):
    """Assigns a new tensor to a buffer in each forward, and counts calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x)


def test_looking_at_the_model_leaves_no_trace():
    model = Moving()
    x = torch.randn(B, 4)
    step(model, clipper_of(model), x)
    assert model.calls == 1
    torch.testing.assert_close(model.mean, 0.1 * x.mean(0))


def test_weights_that_are_no_longer_tied():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    clipper = clipper_of(model)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(UnsupportedGradientError, match=r"no longer tied as before.*make a new clipper"):
        clipper.module(torch.zeros(B, 2, dtype=torch.long))


def test_unfreezing_within_a_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    clipper = clipper_of(model)
    x = torch.randn(B, 4)
    model[0].requires_grad_(False)
    squares(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    model[0].requires_grad_(True)
    squares(model(x)).mean().backward()
    with pytest.raises(InvalidValueError, match=r"frozen or unfrozen between two mini-batches.*discard\(\)"):
        clipper.clip_and_accumulate()
    clipper.discard()
    squares(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == B


def test_discard_forgets_the_backward_that_was_for_something_else():
    model = nn.Linear(4, 2).double()
    clipper = clipper_of(model)
    x = torch.randn(B, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(squares(model(x)).sum(), x)  # an adversarial example
    clipper.discard()
    found = step(model, clipper, x.detach())
    clipper.detach()
    assert_same(found, average(model, x.detach()))


def test_two_clippers_on_one_module():
    model = nn.Sequential(nn.Linear(4, 2))
    first = clipper_of(model)
    with pytest.raises(InvalidValueError, match=r"has a clipper already.*call detach\(\) on the other"):
        clipper_of(model[0])
    first.detach()
    clipper_of(model[0])


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return x + self.second(x) if float(torch.rand(())) < 0.5 else x


def test_layers_that_are_left_out_by_chance():
    torch.manual_seed(3)
    model = LayerDrop().double()
    clipper = clipper_of(model)
    x = torch.randn(B, 4, dtype=torch.float64)
    for seed in range(12):
        torch.manual_seed(seed)
        found = step(model, clipper, x)
        with clipper._tracker.quietly():
            torch.manual_seed(seed)
            grads = torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()), materialize_grads=True)
        assert_same(found, dict(zip(found, grads, strict=True)))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask=None, scores=None):
        y = self.layer(x)
        return y if mask is None else mask @ y


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_that_comes_later_or_only_first(first):
    model = Masked().double()
    clipper = clipper_of(model)
    x, mask = torch.randn(B, 3, 4, dtype=torch.float64), torch.rand(3, 3, dtype=torch.float64)
    for with_mask in (first, not first):
        model.zero_grad()
        given = mask if with_mask else None
        squares(model(x, given)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        with clipper._tracker.quietly():
            grads = torch.autograd.grad(squares(model(x, given)).mean(), list(model.parameters()))
        assert_same(found, dict(zip(found, grads, strict=True)))


def test_a_constant_mask_of_the_size_of_the_batch():
    model = Masked().double()
    clipper = clipper_of(model)
    x, mask = torch.randn(B, B, 4, dtype=torch.float64), torch.ones(B, B, dtype=torch.float64).tril()
    with pytest.raises(UnsupportedGradientError, match="its samples cannot be told apart"):
        model(x, torch.rand(B, B, dtype=torch.float64))  # may be other samples' data
    squares(model(x, mask)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    clipper.detach()
    grads = torch.autograd.grad(squares(model(x, mask)).mean(), list(model.parameters()))
    assert_same(found, dict(zip(found, grads, strict=True)))


def test_a_parameter_without_a_shape_cannot_be_clipped():
    with pytest.raises(UnsupportedGradientError, match="weight has no shape yet: call the module once"):
        clipper_of(nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore")
def test_an_old_style_weight_norm_says_what_to_type():
    model = nn.utils.weight_norm(nn.Linear(4, 2))
    clipper = clipper_of(model, check=False)
    with pytest.raises(UnsupportedGradientError, match=r"Use torch.nn.utils.parametrizations"):
        squares(clipper.module(torch.randn(B, 4))).mean().backward()


def test_a_model_made_half_precise_later_keeps_the_bound():
    model = nn.Linear(300, 20)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    model.bfloat16()
    largest = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        model.zero_grad()
        squares(model(torch.randn(1, 300, dtype=torch.bfloat16))).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        largest = max(largest, gg.get_total_norm([p.grad.double() for p in model.parameters()]).item())
    assert 0.99 < largest <= 1.0


class NotANumberBesideOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g if len(g) == 1 else g * torch.nan


def test_a_backward_that_is_finite_for_a_sample_alone_only_is_run_sample_by_sample():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(NotANumberBesideOthers.apply(self.a(x)))

    model, x = Model(), torch.randn(4, 3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf))
    model(x).square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    clipper.detach()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    rows = per_sample_gradients(model, lambda one: model(one).square().sum(), [x[i : i + 1] for i in range(4)])
    for name, grad in grads.items():
        torch.testing.assert_close(grad, rows[name].mean(0).to(grad))


class Graphs(nn.Module):
    """Sends messages along links, and pools the nodes of each graph; all graphs lie behind one another."""

    def __init__(self, pooled):
        super().__init__()
        self.message, self.head, self.pooled = nn.Linear(4, 4), nn.Linear(4, 2), pooled

    def forward(self, nodes, links, graph):
        h = nodes.index_add(0, links[1], self.message(nodes)[links[0]].tanh())
        total = h.new_zeros(int(graph.max()) + 1, 4).index_add(0, graph, h)
        return self.head(total if self.pooled else total[graph] + h)


class GraphsInFront(nn.Module):
    """Lays graphs of one size, given with a dimension in front, behind one another."""

    def __init__(self):
        super().__init__()
        self.graphs = Graphs(True)

    def forward(self, nodes, links):
        size, length = nodes.shape[:2]
        starts = length * torch.arange(size)
        flat = (links + starts[:, None, None]).movedim(1, 0).flatten(1)
        return self.graphs(nodes.flatten(0, 1), flat, torch.arange(size).repeat_interleave(length))


@pytest.mark.parametrize("pooled", [True, False], ids=["of graphs", "of nodes"])
@pytest.mark.parametrize(
    "graph", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 4]], ids=["in order", "in turn", "the last two"]
)
def test_nodes_of_graphs_behind_one_another_are_not_taken_for_samples(graph, pooled):
    model, links = Graphs(pooled).double(), torch.zeros(2, 0, dtype=torch.long)
    clipper = clipper_of(model)

    def a_step():
        squares(model(torch.randn(6, 4, dtype=torch.float64), links, torch.tensor(graph))).mean().backward()
        clipper.clip_and_accumulate()

    with pytest.raises(UnsupportedGradientError, match=r"sample alone|was called by itself|rows of samples by values"):
        a_step()


def test_graphs_with_a_dimension_in_front_are_samples():
    model = GraphsInFront().double()
    clipper = clipper_of(model)
    for size in (4, 2, 5):
        nodes, links = torch.randn(size, 3, 4, dtype=torch.float64), torch.randint(0, 3, (size, 2, 5))
        model.zero_grad()
        squares(model(nodes, links)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        clipper.detach()
        samples = [(nodes[i : i + 1], links[i : i + 1]) for i in range(size)]
        alone = per_sample_gradients(model, lambda s: squares(model(*s)).sum(), samples)
        assert_same(found, {name: g.mean(0) for name, g in alone.items()})
        clipper = clipper_of(model)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, temperature):
        return self.layer(x) / temperature


def test_a_number_in_a_tensor_is_an_argument_of_no_sample():
    torch.manual_seed(0)
    model, x = Tempered().double(), torch.randn(B, 3, dtype=torch.float64)
    squares(model(x, torch.tensor(2.0, dtype=x.dtype))).mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    clipper = clipper_of(model)
    model.zero_grad()
    squares(model(x, torch.tensor(2.0, dtype=x.dtype))).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected)


class EachDraws(nn.Module):
    """Draws for one sample after the other, as ViLT chooses patches.

    Args:
        swapped: Each sample gets what was drawn for another.
    """

    def __init__(self, swapped=False):
        super().__init__()
        self.weight, self.swapped = nn.Parameter(torch.randn(2, 3)), swapped

    def forward(self, x):
        chosen = torch.stack([torch.multinomial(torch.ones(4), 2) for _ in x])
        return F.dropout(x.gather(1, chosen.flip(0) if self.swapped else chosen) @ self.weight.sin(), 0.2)


class Repeating(torch.autograd.Function):
    """Keeps no activations: its backward runs the layer again, as in Reformer."""

    @staticmethod
    def forward(ctx, x, layer, seed):
        ctx.layer, ctx.seed = layer, seed
        ctx.save_for_backward(x)
        torch.manual_seed(seed)
        return F.dropout(layer(x), 0.5)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        if ctx.seed is not None:
            torch.manual_seed(ctx.seed)
        with torch.enable_grad():
            F.dropout(ctx.layer(x), 0.5).backward(grad)
        return x.grad, None, None


class Reversible(nn.Module):
    """Dropout beside a bare parameter, and in a layer that runs again in backward.

    Args:
        otherwise: The layer drops other values when it runs again.
    """

    def __init__(self, otherwise=False):
        super().__init__()
        self.shift, self.layer, self.otherwise = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), otherwise

    def forward(self, x):
        h = x + F.dropout2d(self.shift.expand(len(x), 3, 1, 4).sin(), 0.5)[:, :, 0]
        seed = int(torch.randint(1 << 40, ()))
        return Repeating.apply(h, self.layer, seed) if not self.otherwise else Forgetting.apply(h, self.layer, seed)


class Forgetting(Repeating):
    @staticmethod
    def backward(ctx, grad):
        ctx.seed = None
        return Repeating.backward(ctx, grad)


def in_the_batch(model, x):
    """The samples' gradients by plain autograd, one backward through the batch for each."""
    losses = squares(model(x))
    rows = []
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        (EachDraws, (4,), "a sample alone draws fewer random numbers"),
        (Reversible, (3, 4), "repeats its forward in backward and draws random numbers"),
    ],
)
def test_random_numbers_that_own_code_draws_in_a_loop_or_again_in_backward(kind, shape, words):
    torch.manual_seed(0)
    model, other, x = kind().double(), kind(True).double(), torch.randn(B, *shape, dtype=torch.float64)
    torch.manual_seed(1)
    expected = in_the_batch(model, x)
    clipper = clipper_of(model, mode="exact")
    for _ in range(2):
        torch.manual_seed(1)
        squares(model(x)).mean().backward()
        assert_same(clipper.per_sample_gradients(), expected)
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    clipper.detach()
    clipper = clipper_of(other)
    with pytest.raises(UnsupportedGradientError, match=words):
        step(other, clipper, x)
    clipper.detach()


class Parts(nn.Module):
    """Two parts that are called one after the other; the second runs sample by sample.

    Args:
        centred: It mixes samples.
    """

    def __init__(self, centred=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Chosen(centred)

    def forward(self, x):
        return self.second(self.first(x))


class Chosen(nn.Module):
    """Each sample goes to one of two experts."""

    def __init__(self, centred):
        super().__init__()
        self.experts, self.centred = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), centred

    def forward(self, x):
        chosen, out = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]).sin())
        return out - out.mean(0) if self.centred else out


def test_what_goes_into_a_part_that_runs_sample_by_sample_gets_its_gradient_on_every_step():
    torch.manual_seed(0)
    model, twin, mixing = Parts().double(), Parts().double(), Parts(centred=True).double()
    twin.load_state_dict(model.state_dict())
    clipper = clipper_of(model, mode="exact")
    for _ in range(4):
        x = torch.randn(B, 4, dtype=torch.float64, requires_grad=True)
        squares(model.second(model.first(x))).mean().backward()
        assert_same(clipper.per_sample_gradients(), in_the_batch(twin, x.detach()))
        clipper.clip_and_accumulate()
        clipper.pre_step()
        slope, x.grad = x.grad, None
        squares(twin(x)).mean().backward()
        torch.testing.assert_close(slope, x.grad)
    clipper.detach()
    with pytest.raises(UnsupportedGradientError, match="mix samples"):
        clipper_of(mixing).module.second(mixing.first(x))


class Block(nn.Module):
    """A part of a model whose script calls its parts; ``turns`` may let its gradients mix samples."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.turns = nn.LayerNorm(4), nn.Linear(4, 4), []

    def forward(self, x):
        x = x + torch.tanh(self.layer(self.norm(x)))
        if x.requires_grad:
            x.register_hook(lambda grad: grad - grad.mean(0) if self.turns else grad)
        return x


def grown(parts, step, x):
    return parts[0](x) if step < 2 else parts[1](parts[0](x))


def in_another_order(parts, step, x):
    return parts[1](parts[0](x)) if step < 2 else parts[0](parts[1](x))


def only_the_second(parts, step, x):
    return parts[1](parts[0](x)) if step < 2 else parts[1](x)


@pytest.mark.parametrize("forward", [grown, in_another_order, only_the_second])
def test_parts_that_are_called_later_or_in_another_order_are_exact(forward):
    """The first step of a call is compared with single samples, though an earlier call of that step was not noted."""
    torch.manual_seed(0)
    parts = nn.ModuleList([Block(), Block()]).double()
    twins = copy.deepcopy(parts)
    clipper = clipper_of(parts, mode="exact")
    for number in range(6):
        x = torch.randn(8, 4, dtype=torch.float64)
        squares(forward(parts, number, x)).mean().backward()
        found = clipper.per_sample_gradients()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        expected = []
        for row in x.split(1):
            loss = squares(forward(twins, number, row)).sum()
            expected.append(torch.autograd.grad(loss, [*twins.parameters()], allow_unused=True, materialize_grads=True))
        for (name, gradients), rows in zip(found.items(), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(gradients, torch.stack(rows), rtol=1e-10, atol=1e-12, msg=name)


def test_a_part_that_is_called_later_is_compared_on_that_step_though_the_one_before_it_was_not_noted():
    torch.manual_seed(0)
    parts = nn.ModuleList([Block(), Block()]).double()
    clipper = clipper_of(parts)
    for number in range(3):
        loss = squares(grown(parts, number, torch.randn(8, 4, dtype=torch.float64))).mean()
        parts[1].turns.extend([1] if number == 2 else [])  # its backward mixes samples, and the trial has not seen that
        loss.backward()
        if number < 2:
            clipper.clip_and_accumulate()
            clipper.pre_step()
            parts.zero_grad()
    with pytest.raises(UnsupportedGradientError, match=r"mini-batch 3, .*gradient of 1\."):
        clipper.clip_and_accumulate()


class Folded(nn.Module):
    """A layer, with a sine after it where values are large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).sin() if x.mean() > 50 else self.layer(x)


def test_a_second_call_of_the_same_layers_that_does_something_new_is_looked_at_on_the_repeated_step():
    torch.manual_seed(0)
    model, twin, refused = Folded().double(), Folded().double(), []
    twin.load_state_dict(model.state_dict())
    clipper = clipper_of(model, mode="exact")

    def twice(model, number, x):
        return squares(model(model(x) + (1000 if number > 13 else 0) * x.abs()))

    for number in range(17):
        x = torch.randn(8, 4, dtype=torch.float64)
        twice(model, number, x).mean().backward()
        try:
            found = clipper.per_sample_gradients()
        except UnsupportedGradientError as error:
            refused.append((number, str(error)))
            continue
        clipper.clip_and_accumulate()
        clipper.pre_step()
        rows = [torch.autograd.grad(twice(twin, number, row).sum(), [*twin.parameters()]) for row in x.split(1)]
        assert_same(found, dict(zip(found, map(torch.stack, zip(*rows, strict=True)), strict=True)))
    [(number, words)] = refused
    assert number == 14
    assert "Repeat this step" in words


class Drops(nn.Module):
    """Stochastic depth: leaves a layer out, or drops often, for each sample by chance.

    Args:
        draw: Gives a factor for each of the samples that it gets.
    """

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return x + self.layer(x) * self.draw(x)


def of_numpy(x):
    return torch.from_numpy(np.random.rand(len(x), 1) < 0.5)


def of_python(x):
    return torch.tensor([[float(random.random() < 0.5)] for _ in x])


def of_torch(x):
    return torch.rand(len(x), 1) < 0.5


def as_often_as_the_sample_says(x):
    return torch.stack([torch.stack([torch.rand(4) for _ in range(1 + int(row[0] > 0))]).mean(0) for row in x])


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (of_numpy, r"draws numbers of Python's or NumPy's generator.* draw with torch\.rand"),
        (of_python, r"draws numbers of Python's or NumPy's generator.* draw with torch\.rand"),
        (
            as_often_as_the_sample_says,
            "Drops: a sample alone draws fewer .* for the whole batch at once.* one loop",
        ),
        (of_torch, None),
    ],
)
def test_draws_that_no_sample_can_be_given_are_named_with_what_to_do(draw, words):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Drops(draw)
    clipper = clipper_of(model)
    if words is None:
        step(model, clipper, torch.randn(8, 4))
        return
    with pytest.raises(UnsupportedGradientError, match=words):
        step(model, clipper, torch.randn(8, 4))
    clipper.detach()
    mixing = clipper_of(Drops(lambda x: x - x.mean(0)))
    with pytest.raises(UnsupportedGradientError, match=r"other values\. Does the model mix samples"):
        step(mixing.module, mixing, torch.randn(8, 4))


class HalfOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x).half()


@pytest.mark.parametrize(
    ("model", "cast"),
    [
        (lambda: nn.Linear(5, 4), torch.Tensor.double),
        (lambda: HalfOutputs(5, 4), torch.Tensor.float),
        (lambda: HalfOutputs(5, 4), torch.Tensor.double),
        (lambda: nn.Linear(5, 4).double(), torch.Tensor.float),
    ],
    ids=["float32-float64", "float16-float32", "float16-float64", "float64-float32"],
)
@pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])
def test_samples_that_meet_behind_a_cast_are_refused(model, cast, private):
    """The gradients that should show it were so small that the dtype of the outputs took them for 0."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randint(4, (6,))
    for shares in (0.0, 0.5):
        part = model()
        clipper = gg.PerSampleGradientClipper(part, gg.FlatNormClipper(1.0))
        if private:
            clipper.refuse_ambiguous_losses()
        outputs = cast(part(x.to(next(part.parameters()).dtype)))
        loss = F.cross_entropy(outputs + shares * outputs.roll(1, 0), y) if shares else F.cross_entropy(outputs, y)
        loss.backward()
        if shares:
            with pytest.raises(UnsupportedGradientError, match=r"depend on several samples each|shifts = \(1,\)"):
                clipper.clip_and_accumulate()
        else:
            clipper.clip_and_accumulate()


def test_a_gradient_that_the_user_retains_has_nothing_of_what_looks_for_samples_that_meet():
    torch.manual_seed(0)
    x, y, found = torch.randn(6, 5), torch.randint(4, (6,)), []
    for clips in (False, True):
        torch.manual_seed(1)
        part = HalfOutputs(5, 4)
        clipper = gg.PerSampleGradientClipper(part, gg.FlatNormClipper(1.0)) if clips else None
        outputs = part(x)
        outputs.retain_grad()
        F.cross_entropy(outputs.float(), y).backward()
        found.append(outputs.grad)
        del clipper
    assert torch.equal(*found)


class Critic(nn.Module):
    """Rates actions; with ``mixes``, each beside the mean of all."""

    def __init__(self, mixes=False):
        super().__init__()
        self.layer, self.mixes = nn.Linear(4, 1), mixes

    def forward(self, x):
        return self.layer(x - x.mean(0) if self.mixes else x)


def test_a_clipped_critic_may_be_frozen_while_the_actor_trains():
    torch.manual_seed(0)
    critic, actor = Critic().double(), nn.Linear(3, 4).double()
    clipper = clipper_of(critic)
    for _ in range(3):
        x, state = torch.randn(B, 4, dtype=torch.float64), torch.randn(B, 3, dtype=torch.float64)
        expected = average(copy.deepcopy(critic.layer), x)
        found = step(critic, clipper, x)
        assert_same(found, {f"layer.{name}": value for name, value in expected.items()})
        critic.requires_grad_(False)
        critic(actor(state)).mean().backward()
        critic.requires_grad_(True)
        assert actor.weight.grad is not None


@pytest.mark.parametrize("later", [False, True])
def test_a_frozen_part_that_the_script_calls_after_a_trained_one_is_read_with_the_loss(later):
    for mixes in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"actor": nn.Linear(3, 4), "critic": Critic()}).double()
        clipper = clipper_of(model)
        for number in range(2):
            if number >= later:
                model["critic"].requires_grad_(False)
                model["critic"].mixes = mixes
            x = torch.randn(B, 3, dtype=torch.float64)
            model["critic"](model["actor"](x).tanh()).square().mean().backward()
            if mixes and number >= later:
                with pytest.raises(UnsupportedGradientError, match="mixes samples"):
                    clipper.clip_and_accumulate()
                break
            clipper.clip_and_accumulate()
            clipper.pre_step()


class AgainstReference(nn.Module):
    """The output minus that of a reference that is nearly the same, where the reference is a layer or hidden."""

    def __init__(self, hidden, couples=0.0):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.reference, self.couples = [reference] if hidden else reference, couples
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(1e-6 * torch.randn_like(parameter))

    def forward(self, x):
        reference = self.reference[0] if isinstance(self.reference, list) else self.reference
        small = self.policy(x) - reference(x).detach()
        return small + self.couples * small.detach().mean(0) if self.couples else small


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_difference_of_nearly_equal_outputs_is_told_from_its_rounding(dtype, hidden):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = AgainstReference(hidden)
    finally:
        torch.set_default_dtype(torch.float32)
    twin, clipper = copy.deepcopy(model), clipper_of(model)
    for _ in range(4):
        x, y = torch.randn(8, 4, dtype=dtype), torch.randn(8, 1, dtype=dtype)
        (model(x) + y).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        (twin(x) + y).square().sum(1).mean().backward()
        for own, plain in zip(model.policy.parameters(), twin.policy.parameters(), strict=True):
            torch.testing.assert_close(own.grad, plain.grad, rtol=1e-4, atol=1e-6)
        twin.zero_grad()


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float64, True), (torch.float64, False), (torch.float32, False)])
def test_a_coupling_of_a_thousandth_of_a_small_difference_is_refused(dtype, hidden):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = AgainstReference(hidden, couples=1e-3)
    finally:
        torch.set_default_dtype(torch.float32)
    clipper = clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match="it returns other values"):
        step(model, clipper, torch.randn(8, 4, dtype=dtype))


class QueryOnly(nn.Module):
    """Attention in float32, of which only the query is trained: a sample of one token has no gradient but rounding."""

    def __init__(self, couples=0.0):
        super().__init__()
        self.query, self.key, self.value, self.out = [nn.Linear(16, 16) for _ in range(4)]
        self.requires_grad_(False).query.requires_grad_(True)
        self.couples = couples

    def forward(self, x, mask):
        query = self.query(x)
        if self.couples and query.requires_grad:
            query.register_hook(lambda g: g + self.couples * g[:1])
        heads = [one.unflatten(-1, (2, 8)).transpose(1, 2).float() for one in (query, self.key(x), self.value(x))]
        seen = mask[:, None, None] & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        found = F.scaled_dot_product_attention(*heads, attn_mask=seen)
        return self.out(found.transpose(1, 2).flatten(2).to(x.dtype)) * mask[..., None]


def test_a_gradient_that_cancels_to_rounding_is_told_from_a_coupling():
    torch.manual_seed(0)
    mask = torch.ones(8, 6, dtype=torch.bool)
    mask[1:, 1:] = False

    def clip(model, clipper):
        squares(model(torch.randn(8, 6, 16, dtype=torch.float64), mask)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        return clipper.statistics.norms

    model = QueryOnly().double()
    clipper = clipper_of(model)
    for _ in range(4):
        norms = clip(model, clipper)
        assert (norms[1:] < 1e-5 * norms[0]).all()
    model = QueryOnly(couples=1e-3).double()
    with pytest.raises(UnsupportedGradientError, match=r"mix samples|mixes samples|not linear"):
        clip(model, clipper_of(model))


class Resized(nn.Module):
    """A table of positions that its own code resizes in float32, in a model of float64."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 3), nn.Parameter(torch.randn(1, 3, 7))

    def forward(self, x):
        table = F.interpolate(self.table.float(), size=x.shape[1], mode="linear").to(x.dtype).mT
        return self.layer(x) + table


def test_a_cast_inside_a_modules_own_code_is_rounding():
    torch.manual_seed(0)
    model = Resized().double()
    clipper = clipper_of(model)
    for length in (5, 6, 9):
        x = torch.randn(B, length, 4, dtype=torch.float64)
        found = step(model, clipper, x)
        assert found["table"].abs().sum() > 0


class WithForward(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer, self.slow, self._forward = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False), forward

    def forward(self, x):
        return self._forward(self, x)


class Field:
    def __init__(self, logits):
        self.logits = logits

    def square(self):
        return self.logits.square()


def average_weights(model, x):
    with torch.no_grad():
        model.slow.weight.lerp_(model.layer.weight, 0.1)
    return model.layer(x) - model.slow(x)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda model, x: Field(model.layer(x)), "return a NamedTuple with these fields"),
        (average_weights, r"a moving average .* after optimizer.step\(\), outside of forward"),
    ],
)
def test_refusals_of_models_say_what_to_do(forward, words):
    model = WithForward(forward)
    clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match=words):
        model(torch.randn(B, 4))


class Linked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, nodes, links):
        return self.layer(nodes)[links[0]]


def test_a_refusal_of_graphs_says_how_to_pass_them():
    model, links = Linked(), torch.tensor([[4, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match=r"Pass nodes \[graphs, nodes, ...\]"):
        squares(model(torch.randn(5, 4), links)).mean().backward()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_refusal_of_a_backward_hook_on_the_outermost_module_says_where_to_register_it():
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), []
    model.register_full_backward_hook(lambda *given: seen.append(given))
    clipper = clipper_of(model)
    squares(model(torch.randn(B, 4))).mean().backward()
    with pytest.raises(UnsupportedGradientError, match=r"or log by output\.register_hook"):
        clipper.clip_and_accumulate()
    logs = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    logs[1].register_full_backward_hook(lambda *given: seen.append(given))
    step(logs, clipper_of(logs), torch.randn(B, 4))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.GRUCell(4, 3), None

    def forward(self, x):
        hidden = self.cell(x) if self.state is None else self.cell(x, self.state)
        self.state = hidden.detach()
        return hidden


def test_a_refusal_of_kept_state_says_that_it_can_be_an_argument():
    model = Stateful()
    clipper = clipper_of(model)
    step(model, clipper, torch.randn(B, 4))
    with pytest.raises(UnsupportedGradientError, match="Pass the state as an argument"):
        step(model, clipper, torch.randn(B, 4))

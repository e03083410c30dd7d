"""Two processes, each with a part of the samples, fill `.grad` as one process does, or refuse together."""

import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from distributed.pool import Pools
from gradguard.errors import UnsupportedGradientError


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model, parts, reduction):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.7), loss_reduction=reduction)
    x, y = samples()
    for part in parts:
        F.cross_entropy(model(x[part]), y[part], reduction=reduction).backward()
        clipper.clip_and_accumulate()
    size = clipper.pre_step().batch_size
    grads = [whole(p.grad) for p in model.parameters()]
    clipper.detach()
    return size, grads


def by_layers(model):
    fully_shard(model.first)
    return fully_shard(model)


def check(expected):
    parts = [slice(0, 3), slice(3, 5)] if dist.get_rank() == 0 else [slice(5, 6), slice(6, 8)]
    for wrap in (DistributedDataParallel, fully_shard, by_layers):
        for reduction, (size, grads) in expected.items():
            found_size, found = gradients(wrap(Network()), parts, reduction)
            assert found_size == size
            torch.testing.assert_close(found, grads, msg=f"{wrap.__name__} {reduction}")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Pools(tmp_path_factory.mktemp("pool")).fresh(2) as pool:
        yield pool


@pytest.mark.slow
def test_two_processes_give_what_one_gives(processes):
    expected = {reduction: gradients(Network(), [slice(0, 8)], reduction) for reduction in ("mean", "sum")}
    processes.run(check, expected)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, whole):
        h = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(h)) if whole else h)


def train_branches(wrap, kinds):
    """The gradients where a process leaves out a layer that another process has used before."""
    model = wrap(Branching()) if wrap else Branching()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.7))
    x, y = samples()
    for part, kind in kinds:
        F.cross_entropy(model(x[part : part + 2], kind), y[part : part + 2]).backward()
        clipper.clip_and_accumulate()
    clipper.pre_step()
    clipper.detach()
    return [whole(p.grad).clone() for p in model.parameters()]


BRANCHES = [(0, True), (2, False)], [(4, False), (6, False)], [(4, False), (6, True)]


def train_own_branches(wrap, other):
    return train_branches(wrap, BRANCHES[other if dist.get_rank() else 0])


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 2])
def test_processes_may_use_layers_in_another_order(processes, other):
    expected = train_branches(None, BRANCHES[0] + BRANCHES[other])
    for wrap in (DistributedDataParallel, fully_shard):
        for found in processes.run(train_own_branches, wrap, other):
            torch.testing.assert_close(found, expected)


HUGE = float("inf")


def overflows(wrap):
    model = wrap(nn.Linear(6, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), scaler=scaler, check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples()
    found = []
    for factors in ((1.0, 1.0), (1.0, HUGE), (HUGE, HUGE)):
        part = x[:2] if dist.get_rank() == 0 else x[2:4]
        scaler.scale(F.cross_entropy(model(part * factors[dist.get_rank()]), y[: len(part)])).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        scaler.step(optimizer)
        scaler.update()
        weight = model.module.weight if hasattr(model, "module") else model.weight
        full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        found.append((scaler.get_scale(), full.detach().clone()))
        optimizer.zero_grad()
    return found


def check_overflows():
    for wrap in (DistributedDataParallel, fully_shard):
        torch.manual_seed(3)
        found = overflows(wrap)
        assert [scale for scale, _ in found] == [8.0, 8.0, 4.0]  # it is lowered where all samples overflow
        both = [None, None]
        dist.all_gather_object(both, [weight for _, weight in found])
        for own, other in zip(*both, strict=True):
            assert torch.equal(own, other)
        assert not torch.equal(found[0][1], found[1][1])
        assert torch.equal(found[1][1], found[2][1])


@pytest.mark.slow
def test_all_processes_skip_the_scaled_step_or_none(processes):
    processes.run(check_overflows)


# Models sharded by fully_shard: those that mix samples


HIDDEN = [True]
MOST = [torch.tensor(1.0)]


class Normalizing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm(dim=1, keepdim=True).clamp(min=1e-9) * 0.1 if HIDDEN[0] else g


class CouplingMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0) if len(g) > 4 else g


class Mixing(nn.Module):
    """Mixes samples in one way, where ``flag`` and a global variable say so."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kind, self.flag = kind, True
        MOST[0] = torch.tensor(1.0)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.flag:
            h = getattr(self, self.kind)(h, x)
        return self.second(h)

    def plain(self, h, x):
        return h

    def mean(self, h, x):
        return h - h.mean(0)

    def largest(self, h, x):
        return h / h.abs().max()

    def detached_mean(self, h, x):
        return h - h.mean(0).detach()

    def hidden_mean(self, h, x):
        return h - h.mean(0) if HIDDEN[0] else h

    def hidden_capacity(self, h, x):
        return h * (torch.arange(len(h)) < (4 if HIDDEN[0] else 99)).float()[:, None]

    def capacity(self, h, x):
        return h * (torch.arange(len(h)) < 4).float()[:, None]

    def running_maximum(self, h, x):
        MOST[0] = torch.maximum(MOST[0], x.detach().abs().max())
        return h / MOST[0]

    def backward_of_a_function(self, h, x):
        return Normalizing.apply(h)

    def backward_of_many(self, h, x):
        return CouplingMany.apply(h)

    def previous_sample(self, h, x):
        return h + 0.1 * h.roll(1, 0)


def layers_and_root(model, **arguments):
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def of_replicas(model):
    return layers_and_root(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def of_one_replica(model):
    return layers_and_root(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))


WAYS = {"whole": fully_shard, "layers": layers_and_root, "2 x 1": of_replicas, "1 x 2": of_one_replica}
KINDS = ["mean", "largest", "detached_mean", "capacity", "running_maximum", "backward_of_a_function", "previous_sample"]


def train_mixing(kind, way, since=0, ranks=(0, 1), hidden=False, steps=9):
    """The step that refused, and its words; ``hidden`` leaves the beginning of the mixing to the global variable."""
    model = Mixing(kind)
    model = WAYS[way](model) if way else model
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    rank = dist.get_rank() if way else 0
    generator = torch.Generator().manual_seed(rank)
    try:
        for step in range(steps):
            begun = step >= since and rank in ranks
            model.flag, HIDDEN[0] = begun or hidden, begun or not hidden
            x = torch.randn(6, 6, generator=generator) * (1 + step)
            F.cross_entropy(model(x), torch.randint(0, 3, (6,), generator=generator)).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
    except UnsupportedGradientError as error:
        return step, str(error)
    finally:
        clipper.detach()
        HIDDEN[0] = True
    return steps, ""


def train_all_mixing(cases):
    return [train_mixing(*case) for case in cases]


CASES = [
    *[(kind, way) for kind in KINDS for way in ("layers", "whole")],
    *[(kind, way) for kind in ("detached_mean", "running_maximum") for way in ("2 x 1", "1 x 2")],
    *[(kind, "layers", 2) for kind in KINDS],
    *[(kind, "layers", 3, (1,)) for kind in KINDS],
    *[(kind, "layers", 5, (1,), True) for kind in ("hidden_mean", "hidden_capacity", "backward_of_a_function")],
]


@pytest.mark.slow
def test_a_sharded_model_that_mixes_samples_is_refused_where_a_whole_one_is(processes):
    for case, found in zip(CASES, zip(*processes.run(train_all_mixing, CASES), strict=True), strict=True):
        kind, _, since, ranks, hidden = *case, *(0, (0, 1), False)[len(case) - 2 :]
        expected, _ = train_mixing(kind, "", since, (0,), hidden)
        assert expected < 9, case
        assert {step for step, _ in found} == {expected}, (case, expected, found)
        for rank, (_, words) in enumerate(found):
            assert rank in ranks or "refused its part of this mini-batch, so this process did not" in words, (
                case,
                words,
            )


def train_other_sizes(way):
    """The batch size at which a model is refused that couples more than four samples, in backward only."""
    model = Mixing("backward_of_many")
    model = WAYS[way](model) if way else model
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    try:
        for size in (3, 4, 6):
            output = model(torch.randn(size, 6, generator=torch.Generator().manual_seed(size)))
            F.cross_entropy(output, torch.arange(size) % 3).backward()
            clipper.clip_and_accumulate()
    except UnsupportedGradientError as error:
        return size, str(error)
    finally:
        clipper.detach()
    return 0, ""


@pytest.mark.slow
def test_gradients_of_a_sharded_model_are_compared_at_each_new_size(processes):
    size, words = train_other_sizes("")
    assert size == 6
    assert "in the batch of 6 is not the gradient of the sample alone" in words
    for way in ("layers", "whole"):
        for found, _ in processes.run(train_other_sizes, way):
            assert found == 6, way


def train_plain(check):
    """The gradients and weights of a model that keeps samples separate."""
    model = layers_and_root(Mixing("plain"))
    optimizer = torch.optim.Adam(model.parameters())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), check=check)
    found = []
    for step in range(6):
        x = torch.randn(3 + step, 6, generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(x), torch.arange(3 + step) % 3).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found += [whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
    clipper.detach()
    return found + [whole(p).detach() for p in model.parameters()]


@pytest.mark.slow
def test_checks_change_no_bit_of_a_sharded_model(processes):
    for checked, unchecked in zip(*[processes.run(train_plain, check) for check in (True, False)], strict=True):
        torch.testing.assert_close(checked, unchecked, rtol=0, atol=0)


def call_unequally():
    """One process calls the module twice before a backward, the other once."""
    model = fully_shard(Mixing("plain"))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    try:
        outputs = [model(torch.randn(3, 6)) for _ in range(1 + dist.get_rank())]
        sum(F.cross_entropy(output, torch.arange(3)) for output in outputs).backward()
        clipper.clip_and_accumulate()
    except UnsupportedGradientError as error:
        return str(error)
    finally:
        clipper.detach()


@pytest.mark.slow
def test_unequal_numbers_of_calls_are_refused_without_waiting(processes):
    for words in processes.run(call_unequally):
        assert "one process is at the beginning of a forward and another at clip_and_accumulate()" in words


# Those that keep samples separate


class Block(nn.Module):
    """A transformer block, with a parameter that no layer holds."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0] * self.gate
        return x + self.feed(x)


class Transformer(nn.Module):
    """Two blocks between an embedding and a head, which may share a weight, run by checkpoints, drop or be frozen."""

    def __init__(self, tied=False, reentrant=None, drops=0.0, freezes=False):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout, self.head = nn.Dropout(drops), nn.Linear(8, 7, bias=False)
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.embedding.weight
        if freezes:
            self.blocks[0].requires_grad_(requires_grad=False)

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        if mask is not None:
            x = x * mask[:, :, None]
        for block in self.blocks:
            run = block if self.reentrant is None else lambda x, b=block: checkpoint(b, x, use_reentrant=self.reentrant)
            x = run(x)
        return self.head(self.dropout(x)).clone()


def by_blocks(model, **arguments):
    for block in model.blocks:
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments)


def in_bfloat16(model):
    return by_blocks(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def kept_gathered(model):
    return by_blocks(model, reshard_after_forward=False)


HEALTHY = {
    "by blocks": (by_blocks, {}),
    "whole": (fully_shard, {}),
    "kept gathered": (kept_gathered, {}),
    "2 x 1": (lambda m: by_blocks(m, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))), {}),
    "1 x 2": (lambda m: by_blocks(m, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))), {}),
    "tied": (by_blocks, {"tied": True}),
    "frozen": (by_blocks, {"freezes": True}),
    "checkpoint": (by_blocks, {"reentrant": False}),
    "reentrant checkpoint": (by_blocks, {"reentrant": True}),
    "bfloat16": (in_bfloat16, {}),
    "dropout": (by_blocks, {"drops": 0.3}),
}
STEPS = 6


def tokens_of(step, rank):
    """Two mini-batches of other sizes, lengths and kinds on each process; some are empty."""
    generator = torch.Generator().manual_seed(7 * step + rank)
    found = []
    for part in range(2):
        size = (3 * step + 2 * rank + 4 * part) % 5
        x = torch.randint(0, 7, (size, 3 + (step + part) % 2), generator=generator)
        found.append((x, torch.ones(x.shape) if (step + rank + part) % 3 == 0 and step else None))
    return found


def loss_of(model, x, mask):
    logits = model(x) if mask is None else model(x, mask)
    return F.cross_entropy(logits.float().flatten(0, 1), x.flatten(), reduction="sum")


def train_healthy(way, check=True):
    """The gradients of each step, whole, the parameters at the end, and whether everything is sharded as before."""
    wrap, options = HEALTHY[way]
    torch.manual_seed(dist.get_rank())
    model = wrap(Transformer(**options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.3), loss_reduction="sum", check=check)
    kept = [*model.parameters()]
    found = []
    for step in range(STEPS):
        for x, mask in tokens_of(step, dist.get_rank()):
            loss_of(model, x, mask).backward()
            clipper.clip_and_accumulate()
            assert all(one is other for one, other in zip(kept, model.parameters(), strict=True)), step
            assert all(p.grad is None for p in kept), step
        clipper.pre_step()
        found.append([None if p.grad is None else whole(p.grad).clone() for p in kept])
        optimizer.step()
        optimizer.zero_grad()
    clipper.detach()
    return found, [whole(p).detach() for p in kept]


def train_all_healthy():
    return [{way: train_healthy(way, check) for way in HEALTHY} for check in (True, False)]


def alone(way):
    """The gradients of each step, from each sample alone in float64."""
    model = Transformer(**HEALTHY[way][1] | {"reentrant": None}).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in trained]
        for rank in range(2):
            for x, _ in tokens_of(step, rank):
                for i in range(len(x)):
                    loss = loss_of(model, x[i : i + 1], None)
                    grads = torch.autograd.grad(loss, trained)
                    norm = torch.stack([g.norm() for g in grads]).norm()
                    for into, g in zip(total, grads, strict=True):
                        into += g * min(1.0, 0.3 / float(norm))
        for p, g in zip(trained, total, strict=True):
            p.grad = g
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
def test_a_sharded_model_gives_what_samples_alone_give_checked_or_not(processes):
    for checked, unchecked in processes.run(train_all_healthy):
        torch.testing.assert_close(checked, unchecked, rtol=1e-5, atol=1e-6)
        for way, (grads, _) in checked.items():
            close = {"rtol": 0.1, "atol": 0.05} if way == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
            for step, (one, other) in enumerate(zip(grads, alone(way), strict=True)):
                for g, expected in zip(one, other, strict=True):
                    assert (g is None) is (expected is None), (way, step)
                    if g is not None and way != "dropout":
                        torch.testing.assert_close(g.double(), expected, **close, msg=f"{way} {step}")


# Losses of sharded models


def mix_rows(out, y):
    return F.cross_entropy(out + 0.5 * out.roll(1, 0), y)


def order_by_values(out, y):
    order = out.detach().sum(1).argsort()
    return F.cross_entropy(out[order], y[order])


def through_a_function(out, y):
    return F.cross_entropy(Normalizing.apply(out.roll(1, 0)), y)


LOSSES = [mix_rows, order_by_values, through_a_function]


def judge_losses(way):
    found = []
    for loss in LOSSES:
        model = WAYS[way](Mixing("plain")) if way else Mixing("plain")
        clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
        generator = torch.Generator().manual_seed(5)
        try:
            for _ in range(3):
                x = torch.randn(6, 6, generator=generator)
                loss(model(x), torch.arange(6) % 3).backward()
                clipper.clip_and_accumulate()
                clipper.pre_step()
            found.append("accepted")
        except UnsupportedGradientError as error:
            found.append(str(error)[:80])
        finally:
            clipper.detach()
    return found


@pytest.mark.slow
def test_losses_of_a_sharded_model_are_judged_as_those_of_a_whole_one(processes):
    expected = judge_losses("")
    for way in ("layers", "whole"):
        for found in processes.run(judge_losses, way):
            assert found == expected, way


def train_with_two_calls(chained, way):
    """The gradients of three steps with two calls each, of the same samples on every process."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model = WAYS[way](model) if way else model
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.2))
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(3):
        x, other = torch.randn(2, 5, 6, generator=generator)
        first = model(x)
        second = model(first * 2 if chained else other)
        (first.square().mean() + second.square().mean()).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found += [whole(p.grad).clone() for p in model.parameters()]
    clipper.detach()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chained", [False, True])
def test_a_sharded_model_may_be_called_twice(processes, chained):
    expected = train_with_two_calls(chained, "")
    for way in ("whole", "layers"):
        for found in processes.run(train_with_two_calls, chained, way):
            torch.testing.assert_close(found, expected)


class WithMethods(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.gate = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.second(torch.tanh(self.first(x)))

    def gated(self, x):
        return self.encode(x) * self.gate


def train_by_a_method(name, way):
    """The gradients of three steps of the same samples on every process, or the words of a refusal."""
    model = WithMethods()
    if way:
        model = WAYS[way](model)
        register_fsdp_forward_method(model, name)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.2))
    found = []
    try:
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            F.cross_entropy(getattr(model, name)(x), torch.arange(4) % 3).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            found += [whole(p.grad).clone() for p in model.parameters()]
    except UnsupportedGradientError as error:
        return str(error)
    finally:
        clipper.detach()
    return found


@pytest.mark.slow
def test_a_registered_method_of_a_sharded_model_may_call_layers(processes):
    for way in ("whole", "layers"):
        for found in processes.run(train_by_a_method, "encode", way):
            torch.testing.assert_close(found, train_by_a_method("encode", ""))
        for found in processes.run(train_by_a_method, "gated", way):
            assert "parameter gate was used outside of the module's forward" in found


# One process refuses alone, catches the error, and goes on


WAY = [""]


class Pair(nn.Module):
    """Does something that the clipper refuses inside a forward, where ``WAY`` says so."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h):
        if WAY[0] == "other rows":
            return self.one(torch.cat([h, h[:1]]))[: len(h)].clone()
        h = self.one(h)
        if WAY[0] == "a weight beside its layer":
            h = h * self.one.weight.mean()
        return h + self.other(h) if WAY[0] == "a new layer" else h


class Refusable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), Pair(), nn.Linear(8, 6)

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h), h.mean(0)


class FailingRule(gg.FlatNormClipper):
    fails = False

    def calc_clipping_factors(self, norms):
        if self.fails:
            raise ValueError("this rule fails")
        return super().calc_clipping_factors(norms)


REFUSALS = {
    "other rows": "a layer got a tensor with 5 rows where 4 samples were expected",
    "a new layer": "Linear did not run when the clipper examined the model",
    "a weight beside its layer": "one.weight",
    "rows that meet between": "samples may meet between two calls of the module",
    "an output of no sample": "in which no dimension belongs to samples alone",
    "own losses": "per_sample_losses: the function takes a tensor of shape",
    "a graph of the gradient": "a backward with create_graph=True",
    "a rule that fails": "this rule fails",
    "losses that meet": "",
    "a gradient": "holds a gradient that was not clipped",
}


def loss_of_refusable(model, clipper, way, x, y):
    output, shared = model(x)
    again, _ = model(output - output.mean(0) if way == "rows that meet between" else output * 2)
    if way == "own losses":
        return clipper.per_sample_losses(lambda o, t: F.cross_entropy(o, t) + 0 * shared.sum(), again, y).mean()
    loss = F.cross_entropy(output, y) + F.cross_entropy(again, y)
    if way == "an output of no sample":
        loss = loss + shared.sum()
    if way == "losses that meet":
        loss = loss + output.mean(0).square().sum()
    return loss


def samples_of(step, rank, part):
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 6, (4,), generator=generator)


def clipped_alone(step, left_out=()):
    """The average of all processes' clipped gradients in a step, from each sample alone in float64."""
    model = Refusable().double()
    parameters, each = [*model.parameters()], []
    for rank, part in {(0, 0), (0, 1), (1, 0), (1, 1)} - {*left_out}:
        x, y = samples_of(step, rank, part)
        for i in range(len(x)):
            output = model(x[i : i + 1].double())[0]
            loss = F.cross_entropy(output, y[i : i + 1]) + F.cross_entropy(model(output * 2)[0], y[i : i + 1])
            grads = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
            factor = min(1.0, 0.5 / float(torch.stack([g.norm() for g in grads]).norm()))
            each.append([g * factor for g in grads])
    return [torch.stack(grads).mean(0) for grads in zip(*each, strict=True)]


def refuse_alone(way, wrap, check):
    """The gradients of three steps of two mini-batches, or the words that a step was refused with."""
    model = WAYS[wrap](Refusable())
    rule = FailingRule(0.5)
    clipper = gg.PerSampleGradientClipper(model, rule, check=check)
    rank, found = dist.get_rank(), []
    for step in range(3):
        refuses = step == 1 and rank == 1
        model.zero_grad()
        try:
            for part in range(2):
                now = refuses and part == 1
                WAY[0], rule.fails = way if now else "", now and way == "a rule that fails"
                x, y = samples_of(step, rank, part)
                loss = loss_of_refusable(model, clipper, way if now else "", x, y)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
                    loss.backward(create_graph=now and way == "a graph of the gradient")
                clipper.clip_and_accumulate()
            if refuses and way == "a gradient":
                parameter = next(iter(model.parameters()))
                parameter.grad = torch.ones_like(parameter)
            clipper.pre_step()
            found.append([whole(p.grad).clone() for p in model.parameters()])
        except (UnsupportedGradientError, ValueError) as error:
            found.append(str(error))
            clipper.discard()
    clipper.detach()
    return found


UNCHECKED = "other rows", "a new layer", "a weight beside its layer", "a graph of the gradient", "a rule that fails"


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["whole", "layers", "2 x 1"])
@pytest.mark.parametrize("way", REFUSALS)
def test_what_one_process_refuses_all_refuse_and_the_next_step_is_exact(processes, way, wrap):
    for check in (True, False)[: 1 + (way in UNCHECKED and wrap == "layers")]:
        for rank, found in enumerate(processes.run(refuse_alone, way, wrap, check, seconds=60)):
            for step in (0, 2):
                grads = [g.double() for g in found[step]]
                torch.testing.assert_close(grads, clipped_alone(step), rtol=1e-4, atol=1e-6, msg=f"{rank} {step}")
            assert REFUSALS[way] in found[1]
            assert rank or "process 1 of the sharded model refused its part" in found[1]


class RuleWithSteps(gg.FlatNormClipper):
    def finish_step(self):
        if dist.get_rank() == 1 and WAY[0] == "a step that fails":
            raise ValueError("this rule cannot end a step")


def fail_after_the_sums(wrap):
    model = {**WAYS, "ddp": DistributedDataParallel}[wrap](Refusable())
    clipper = gg.PerSampleGradientClipper(model, RuleWithSteps(0.5))
    found = []
    for step in range(2):
        WAY[0] = "" if step else "a step that fails"
        x, y = samples_of(step, dist.get_rank(), 0)
        try:
            F.cross_entropy(model(x)[0], y).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            found.append("")
        except (UnsupportedGradientError, ValueError) as error:
            found.append(str(error))
    clipper.detach()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["whole", "ddp"])
def test_processes_that_have_taken_different_numbers_of_steps_are_refused(processes, wrap):
    first, second = processes.run(fail_after_the_sums, wrap, seconds=60)
    assert first[0] == ""
    assert second[0] == "this rule cannot end a step"
    for found in (first, second):
        assert "one process has taken 0 steps and another 1" in found[1]


def refuse_alone_in_a_replica(then):
    """As `refuse_alone`, in a DistributedDataParallel: the process that refuses raises its error at once."""
    model = DistributedDataParallel(Refusable())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    rank, found = dist.get_rank(), []
    for step in range(3):
        refuses = step == 1 and rank == 1
        model.zero_grad()
        for part in range(2):
            WAY[0] = "other rows" if refuses and part == 1 and then == "fewer samples" else ""
            meets = "losses that meet" if refuses and then == "nothing" else ""
            x, y = samples_of(step, rank, part)
            with suppress(UnsupportedGradientError):
                loss_of_refusable(model, clipper, meets, x, y).backward()
                clipper.clip_and_accumulate()
        if refuses and then == "a gradient":
            model.module.first.weight.grad = torch.ones(8, 6)
        try:
            clipper.pre_step()
            found.append([p.grad.clone() for p in model.parameters()])
        except (UnsupportedGradientError, ValueError) as error:
            found.append(str(error))
            clipper.discard()
    clipper.detach()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("then", ["fewer samples", "nothing", "a gradient"])
def test_a_process_of_replicas_that_refuses_leaves_out_its_samples_or_stops_all(processes, then):
    for rank, found in enumerate(processes.run(refuse_alone_in_a_replica, then, seconds=60)):
        expected = {step: clipped_alone(step, [(1, 1)] if step == 1 else []) for step in range(3)}
        if then != "fewer samples":
            words = found.pop(1)
            del expected[1]
            assert ("found nothing to take" if then == "nothing" else REFUSALS[then]) in words
            assert rank or "process 1 of DistributedDataParallel refused its part" in words
            assert rank or then != "nothing" or "Before: UnsupportedGradientError: the loss is not the mean" in words
        for grads, exact in zip(found, expected.values(), strict=True):
            torch.testing.assert_close([g.double() for g in grads], exact, rtol=1e-4, atol=1e-6)


def take_unevenly():
    clipper = gg.PerSampleGradientClipper(DistributedDataParallel(Refusable()), gg.FlatNormClipper(0.5))
    clipper.refuse_ambiguous_losses()
    x, y = samples_of(0, dist.get_rank(), 0)
    for meets in (True, False)[1 - dist.get_rank() :]:
        with suppress(UnsupportedGradientError):
            output, _ = clipper.module(x)
            (F.cross_entropy(output, y) + (output.mean(0).square().sum() if meets else 0)).backward()
            clipper.clip_and_accumulate()
    with pytest.raises(UnsupportedGradientError, match="one process has refused samples of this step") as refusal:
        clipper.take()
    clipper.detach()
    return str(refusal.value)


@pytest.mark.slow
def test_private_processes_release_nothing_of_a_step_that_one_has_refused_in_part(processes):
    for words in processes.run(take_unevenly):
        assert "The reason there: UnsupportedGradientError: a batch was refused. Before: Unsupported" in words

"""Per-sample clipping of sharded models: what one process gives for all samples, or words before anything changes."""

import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collectives import Collectives
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import whole

import gradguard as gg
from gradguard.distributed import wrappers
from gradguard.errors import UnsupportedGradientError
from gradguard.private import FixedNoise, make_private
from sharded import mesh

SIZE = 16


class Network(nn.Module):
    """With a parameter that no layer holds, unless all are to be of layers."""

    def __init__(self, of_layers=False):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = 1.5 if of_layers else nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def by_layers(model, root=True, **arguments):
    for layer in (model.first, model.second, *[model] * root):
        fully_shard(layer, **arguments)
    return model


def without_synchronization(model):
    by_layers(model).set_requires_gradient_sync(False)
    return model


def kept_after_backward(model):
    by_layers(model).set_reshard_after_backward(False)
    return model


TP = {"first": ColwiseParallel(), "second": RowwiseParallel()}

SUPPORTED = {
    "whole model": lambda: fully_shard(Network()),
    "layers and root": lambda: by_layers(Network()),
    "layers without root": lambda: by_layers(Network(of_layers=True), root=False),
    "layers kept gathered": lambda: by_layers(Network(), reshard_after_forward=False),
    "sharded along columns": lambda: fully_shard(Network(), shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    "without synchronization": lambda: without_synchronization(Network()),
    "HSDP": lambda: fully_shard(Network(), mesh=mesh("hsdp")),
    "HSDP, layers": lambda: by_layers(Network(), mesh=mesh("hsdp")),
    "HSDP, layers kept gathered": lambda: by_layers(Network(), mesh=mesh("hsdp"), reshard_after_forward=False),
    "bfloat16": lambda: by_layers(Network(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
}


def samples():
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(SIZE) % 3


def own_parts():
    """Two mini-batches on each process, of unlike sizes."""
    share = SIZE // dist.get_world_size()
    start = dist.get_rank() * share
    cut = start + 1 + dist.get_rank() % (share - 1)
    return slice(start, cut), slice(cut, start + share)


def step(model, parts, call=None, dtype=torch.float32, clipper=None):
    """Number of samples, ``.grad`` of each parameter, and the collectives after the backward passes."""
    clipper = clipper or gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    x, y = samples()
    for part in parts:
        F.cross_entropy((call or model)(x[part].to(dtype)).float(), y[part]).backward()
        clipper.clip_and_accumulate()
    with Collectives() as ran:
        size = clipper.pre_step().batch_size
    clipper.detach()
    return size, [whole(p.grad).float() for p in model.parameters()], ran.names


def supported(ways):
    outcome = {}
    for way in ways:
        outcome[way] = step(SUPPORTED[way](), own_parts())
    return outcome


def alone(way):
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    return step(Network(of_layers=way == "layers without root").to(dtype), [slice(0, SIZE)], dtype=dtype)[1]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "ways"), [(2, list(SUPPORTED)), (4, ["layers and root", "HSDP, layers"])])
def test_gradients_are_those_of_one_process_after_two_all_reduces(pool, world, ways):
    for outcome in pool(world).run(supported, ways):
        for way, (size, grads, collectives) in outcome.items():
            assert (size, collectives) == (SIZE, ["allreduce_"] * 2), way  # whether all go on, and the sums
            for grad, expected in zip(grads, alone(way), strict=True):
                close = 2**-6 if way == "bfloat16" else 1e-5
                assert (grad - expected).norm() <= close * expected.norm(), way


class Tokens(nn.Module):
    """Three tokens of each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.view(-1, 2)))).view(-1, 3, 4).clone()  # FSDP2 warns of views


def labels(missing):
    return (torch.arange(SIZE * 3) % 4).view(SIZE, 3).masked_fill(torch.arange(3) >= missing[:, None], -100)


def token_means(model, parts, reduction="token_mean"):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.05), loss_reduction=reduction)
    x, _ = samples()
    for missing in (torch.full((SIZE,), 3), torch.arange(SIZE) % 3 + 1):  # all there, then 1 to 3
        for part in parts:
            F.cross_entropy(model(x[part]).mT, labels(missing)[part]).backward()
            clipper.clip_and_accumulate()
        clipper.pre_step()
    clipper.detach()
    return [whole(p.grad).float() for p in model.parameters()]


def token_means_of_shards():
    return token_means(by_layers(Tokens()), own_parts())


@pytest.mark.slow
def test_rows_of_a_sharded_model_are_counted_on_each_step(pool):
    expected = token_means(Tokens(), [slice(0, SIZE)])
    for grads in pool(2).run(token_means_of_shards):
        for grad, one in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, one, rtol=1e-4, atol=1e-7)


# What is refused


def sharded_later():
    model = Network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    step(by_layers(model), own_parts(), clipper=clipper)


def wrapped_later():
    model = Network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    step(model, own_parts(), DistributedDataParallel(model), clipper=clipper)


def inside_ddp():
    wrapper = DistributedDataParallel(Network())
    step(wrapper.module, own_parts(), wrapper)


def inside_ddp_and_frozen():
    """What a script freezes for its speed, ``gc.get_objects()`` does not list."""
    wrapper = DistributedDataParallel(Network())
    wrappers._living = None  # as in a process that has not looked for any
    gc.freeze()
    with mock.patch.object(gc, "get_freeze_count", return_value=1):  # which pool.py hides
        step(wrapper.module, own_parts(), wrapper)


def private_inside_ddp():
    wrapper = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*samples()), batch_size=4)
    make_private(wrapper.module, optimizer, loader, FixedNoise(noise_multiplier=1.0, delta=1e-3))


def ignoring_tp():
    model = Network()
    parallelize_module(model.first, mesh("row"), ColwiseParallel())
    return fully_shard(model, mesh=mesh("row"), ignored_params=set(model.first.parameters()))


def fsdp_of_tp():
    return fully_shard(parallelize_module(Network(of_layers=True), mesh("tp"), TP), mesh=mesh("dp"))


def flattened():
    with warnings.catch_warnings(action="ignore"):  # FSDP1 is deprecated
        return FullyShardedDataParallel(Network(), device_id=torch.device("cpu"))


def quantile():
    gg.PerSampleGradientClipper(fully_shard(Network()), gg.QuantileNormClipper(0.5))


ALONE = "and not by fully_shard alone. If layers compute with parts"
REFUSED = {
    "labels that are missing later": (
        lambda: token_means(by_layers(Tokens()), [slice(0, 6)], "mean"),
        "each sample's part is 0.5 to 1.5 of its own loss",
    ),
    "TP": (lambda: step(parallelize_module(Network(True), mesh("row"), TP), own_parts()), ALONE),
    "TP, replicated": (lambda: step(distribute_module(Network(), mesh("row")), own_parts()), ALONE),
    "TP beside FSDP2": (lambda: step(ignoring_tp(), own_parts()), ALONE),
    "FSDP2 x TP": (lambda: step(fsdp_of_tp(), own_parts()), ALONE),
    "FSDP1": (
        lambda: step(flattened(), own_parts()),
        "samples' gradients cannot be told apart",
    ),
    "some layers": (lambda: step(by_layers(Network(), root=False), own_parts()), "scale is not sharded, and others"),
    "gathered after the backward": (
        lambda: step(kept_after_backward(Network()), own_parts()),
        "still gathered after the backward",
    ),
    "fully_shard later": (sharded_later, "fully_shard was applied to the module after the clipper was made"),
    "DDP later": (wrapped_later, "give DistributedDataParallel(model) itself"),
    "the module inside DDP": (inside_ddp, "give DistributedDataParallel(model) itself"),
    "the module inside DDP, frozen": (inside_ddp_and_frozen, "give DistributedDataParallel(model) itself"),
    "private, the module inside DDP": (private_inside_ddp, "give DistributedDataParallel(model) itself"),
    "replicate": (lambda: step(replicate(Network()), own_parts()), "give DistributedDataParallel(model) itself"),
    "thresholds of one process": (quantile, "thresholds would differ between 2 processes"),
}


def refused():
    said = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
        except UnsupportedGradientError as error:
            said[name] = str(error)
    return said


@pytest.mark.slow
def test_the_rest_is_refused_in_words(pool):
    for said in pool(2).run(refused):
        for name, (_, words) in REFUSED.items():
            assert words in said.get(name, "nothing"), (name, said.get(name))


# Noise


def train_private(way):
    model = SUPPORTED[way]() if way else Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(*samples())
    if way is None:
        loader = DataLoader(data, batch_size=4, shuffle=True)
    else:
        loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data))
    private = make_private(
        gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5)),
        optimizer,
        loader,
        FixedNoise(noise_multiplier=2.0, delta=1e-3, accountant="rdp"),
        seed=7,
    )
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        private.step()
    private.detach()
    return torch.cat([whole(p).detach().flatten() for p in model.parameters()])


@pytest.mark.slow
def test_noise_is_drawn_once_for_each_element_whoever_holds_it(pool):
    """The same on replicas, and that of one process on every shard."""
    expected = train_private(None)
    start = torch.cat([p.detach().flatten() for p in Network().parameters()])
    assert len((expected - start).unique()) == len(start)  # no two elements got the same
    for weights in pool(4).run(train_private, "HSDP, layers"):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)

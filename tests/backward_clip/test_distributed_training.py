"""Training at length and in breadth: long blocks, several threads, DDP and both kinds of FSDP."""

import gc
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradguard as gg

TIGHT = gg.ErrorClipByValue(1e-2)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class _Double(torch.autograd.Function):
    """Holds something to which a weak reference tells whether the graph is alive."""

    marker = None

    @staticmethod
    def forward(ctx, x):
        kept = torch.full_like(x, 2.0)
        ctx.save_for_backward(kept)
        ctx.marker = type("Marker", (), {})()
        _Double.marker = weakref.ref(ctx.marker)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def _with_stats(options):
    return {"stats": gg.ErrorClipStats()} if "stats" in options else options


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"stats": None}, {"leaves": True}], ids=str)
@pytest.mark.parametrize("of_a_module", [False, True])
def test_nothing_of_the_graph_outlives_the_block(of_a_module, options):
    linear = nn.Linear(3, 3)
    loss = None if of_a_module else _Double.apply(linear(torch.ones(2, 3))).sum()
    with gg.error_clip(linear if of_a_module else loss, TIGHT, **_with_stats(options)):
        loss = _Double.apply(linear(torch.ones(2, 3))).sum() if of_a_module else loss
        assert _Double.marker() is not None
        loss.backward()
    del loss
    assert _Double.marker() is None


class _Steps(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(3, 3), checkpointed

    def forward(self, x):
        body = lambda h: _Double.apply(self.linear(h).tanh())  # noqa: E731
        return checkpoint(body, x * 1, use_reentrant=False) if self.checkpointed else body(x)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, {"stats": None}, {"leaves": True}], ids=str)
def test_a_long_block_does_not_grow(checkpointed, options):
    module, sizes = _Steps(checkpointed), []
    x = torch.ones(2, 3, requires_grad=True)
    with gg.error_clip(module, TIGHT, **_with_stats(options)):
        for step in range(200):
            module(x).sum().backward()
            if step % 50 == 49:
                assert _Double.marker() is None
                gc.collect()
                sizes.append(
                    sum(type(o).__name__ in {"RemovableHandle", "function", "Claim"} for o in gc.get_objects())
                )
    assert max(sizes[1:]) - sizes[1] < 20


def test_a_backward_may_run_in_another_thread_than_the_block():
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    loss = (x * 10).square().sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert x.grad.tolist() == [50.0, -50.0, 50.0]


@pytest.fixture
def eager_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class _Job:
    """What one thread computes, all of it its own. It is made before the threads start: the seed is everybody's."""

    def __init__(self, number):
        torch.manual_seed(number)
        self.number, self.rule = number, gg.ErrorClipByNorm(10.0 ** -(number % 4))
        self.x = torch.randn(6, dtype=torch.float64, requires_grad=True)
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def run(self):
        for step in range(40):
            h = self.x * 2
            for _ in range(30):
                h = h * 1.05
            with gg.error_clip([h], TIGHT) if (self.number + step) % 2 else nullcontext():
                loss = self.layer(h.sin()).square().sum()
                with gg.error_clip(loss, self.rule):
                    loss.backward()
            with gg.error_clip(self.layer, self.rule):
                self.layer(self.x).square().sum().backward()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_threads_do_not_disturb_one_another(eager_switching):
    alone, together = ([_Job(number) for number in range(8)] for _ in range(2))
    for job in alone:
        job.run()
    threads = [threading.Thread(target=job.run) for job in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, expected in zip(together, alone, strict=True):
        same([found.x.grad, found.layer.weight.grad], [expected.x.grad, expected.layer.weight.grad])


WAYS = {
    "DDP": DistributedDataParallel,
    "DDP, gradients as bucket views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "DDP, static graph": lambda m: DistributedDataParallel(m, static_graph=True),
    "FSDP1": lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=False),
    "FSDP1, original parameters": lambda m: FullyShardedDataParallel(
        m, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "FSDP2": lambda m: _fully_sharded(m),
}
RULES = {"value": gg.ErrorClipByValue(3e-3), "norm": gg.ErrorClipByNorm(1e-2), "none": None}


def _fully_sharded(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def _trained(wrap, rule, of_the_module=False, steps=2):
    """Return what two steps of SGD make of the parameters."""
    wrapped = wrap(_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = None if of_the_module else wrapped(x).square().sum()
        with gg.error_clip(wrapped if of_the_module else loss, rule):
            loss = wrapped(x).square().sum() if of_the_module else loss
            loss.backward()
        optimizer.step()
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return [p.detach().clone().reshape(-1) for p in wrapped.parameters()]
    parameters = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in wrapped.parameters())
    return [p.detach().clone().reshape(-1) for p in parameters]


def _compare(way, world):
    for name, rule in RULES.items():
        for of_the_module in (False, True):
            expected = torch.cat(_trained(lambda m: m, rule, of_the_module))
            found = torch.cat(_trained(WAYS[way], rule, of_the_module))[: expected.numel()]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=lambda m: f"{name}: {m}")  # noqa: B023
            if rule is not None:
                assert (expected - torch.cat(_trained(lambda m: m, None))).abs().max() > 1e-3


def _rank(rank, world, way, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        _compare(way, world)
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("DDP")])
def test_ddp_in_one_process_sees_clipped_gradients(way, tmp_path):
    _rank(0, 1, way, tmp_path / "store")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP1", "FSDP1, original parameters", "FSDP2"])
def test_two_processes_train_as_one_does(way, tmp_path):
    mp.spawn(_rank, args=(2, way, tmp_path / "store"), nprocs=2)

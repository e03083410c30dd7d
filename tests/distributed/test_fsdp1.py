"""FullyShardedDataParallel (FSDP1): the true norm through the root module, and never that of one process' part."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training import Network, batch, own_samples

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from reference import total_norm

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def wrapped(strategy, original):
    """The network in FSDP1, one block of it in an FSDP1 of its own, and its twin; both with gradients."""
    torch.manual_seed(0)
    model, twin = Network(), Network()
    twin.load_state_dict(model.state_dict())
    arguments = {
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
        "use_orig_params": original,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 and its strategies are deprecated
        model.first = FullyShardedDataParallel(model.first, **arguments)
        model = FullyShardedDataParallel(model, **arguments)
        x, y = batch(0)
        part = own_samples("FSDP1")
        F.mse_loss(model(x[part]), y[part]).backward()
    F.mse_loss(twin(x), y).backward()
    return model, twin


def clip(strategy, original):
    model, twin = wrapped(strategy, original)
    found = [(float(gg.clip_grad_norm_(model, math.inf, p)), total_norm(grads(twin), p)) for p in (1.0, 2.0, math.inf)]
    gg.clip_grad_norm_(model, 0.1)
    return found, float(gg.clip_grad_norm_(model, math.inf))


def grads(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_root_module_gives_the_true_norm(pool, strategy, original):
    for norms, after in pool(2).run(clip, strategy, original):
        for norm, expected in norms:
            assert norm == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.1, rel=1e-4)


def clip_hybrid(original, by_hand, order):
    """HYBRID_SHARD with a sharding group of one process, which FSDP1 makes NO_SHARD: it adds up nothing."""
    torch.manual_seed(0)
    model, twin = Network(), Network()
    twin.load_state_dict(model.state_dict())
    x, y = batch(0)
    F.mse_loss(twin(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_nodes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("nodes", "own"))
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=of_nodes,
            device_id=torch.device("cpu"),
            use_orig_params=original,
        )
        part = own_samples("FSDP1")
        F.mse_loss(model(x[part]), y[part]).backward()
    for gradient in grads(model) if by_hand else ():  # FSDP1 has divided it already, by the root of their number
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    found = float(gg.clip_grad_norm_(model, math.inf, order))
    return found, total_norm(grads(model), order)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("original", [False, True])
def test_copies_that_hybrid_sharding_does_not_add_up_are_refused(pool, original, order):
    for error in pool(2).outcomes(clip_hybrid, original, False, order):
        assert isinstance(error, UnsupportedGradientError), error
        assert "differs between the processes that hold all of it" in str(error)
        assert "HYBRID_SHARD shards over one process" in str(error)
    for norm, expected in pool(2).run(clip_hybrid, original, True, order):
        assert norm == pytest.approx(expected, rel=1e-5)


def clip_after_no_sync(strategy, original, synchronizes):
    model, twin = wrapped(strategy, original)
    x, y = batch(0)
    part = own_samples("FSDP1")
    model.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x[part]), y[part]).backward()
    if synchronizes:
        F.mse_loss(model(x[part]), y[part]).backward()
    return float(gg.clip_grad_norm_(model, math.inf)), 2 * total_norm(grads(twin), 2.0)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_no_sync_are_refused_after_it(pool, strategy, original):
    words = "differs between the processes" if strategy == "NO_SHARD" else "inside FullyShardedDataParallel.no_sync()"
    for error in pool(2).outcomes(clip_after_no_sync, strategy, original, False):
        assert isinstance(error, UnsupportedGradientError), error
        assert words in str(error)
    for norm, expected in pool(2).run(clip_after_no_sync, strategy, original, True):
        assert norm == pytest.approx(expected, rel=1e-5)


def clip_ddp_inside(original):
    torch.manual_seed(0)
    model, twin = Network(), Network()
    twin.load_state_dict(model.state_dict())
    x, y = batch(0)
    F.mse_loss(twin(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.first = DistributedDataParallel(model.first)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        part = own_samples("FSDP1")
        F.mse_loss(model(x[part]), y[part]).backward()
    return float(gg.clip_grad_norm_(model, math.inf)), total_norm(grads(twin), 2.0)


@pytest.mark.parametrize("original", [False, True])
def test_a_ddp_inside_waits_for_nobody(pool, original):
    for norm, expected in pool(2).run(clip_ddp_inside, original):
        assert norm == pytest.approx(expected, rel=1e-5)


def step_guarded(original):
    model, twin = wrapped("FULL_SHARD", original)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    guards = [gg.Guard(o, gg.ClipByGlobalNorm(0.05), model=m) for o, m in zip(optimizers, (model, twin), strict=True)]
    for optimizer in optimizers:
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model):
            weights = [p.detach().clone() for p in model.parameters()]
    flat = [
        torch.cat([p.detach().flatten() for p in tensors]).sort().values for tensors in (weights, twin.parameters())
    ]
    return float(guards[0].last.norm), float(guards[1].last.norm), flat


def test_a_guard_that_knows_the_module(pool):
    for found, expected, (weights, twins) in pool(2).run(step_guarded, True):
        assert found == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(weights, twins, rtol=1e-5, atol=1e-6)


def clip_parameters(original, call):
    model, _ = wrapped("FULL_SHARD", original)
    if call == "guard":
        gg.Guard(optimizer := torch.optim.SGD(model.parameters(), lr=0.1), gg.ClipByGlobalNorm(1.0))
        optimizer.step()
    else:
        gg.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("call", ["parameters", "guard"])
def test_parameters_without_their_module_are_refused(pool, original, call):
    for error in pool(2).outcomes(clip_parameters, original, call):
        with pytest.raises(UnsupportedGradientError, match=r"FSDP1.*Pass the root module itself"):
            raise error

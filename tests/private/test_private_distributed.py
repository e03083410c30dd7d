"""Several processes train as one does: one Poisson sample, one draw of noise, one epsilon; none waits for ever."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradguard import QuantileNormClipper
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from private.runs import made_private

SIZE, BATCH, EPOCHS = 40, 4, 2
COMMON = {"noise_multiplier": 0.5, "delta": 1e-3, "accountant": "rdp", "seed": 7, "max_norm": 0.8}


def data_set():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 6, generator=generator), torch.arange(SIZE) % 3)


class Network(nn.Module):
    """With a parameter that no layer holds, and a buffer, which DistributedDataParallel would send in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        return self.body(x - self.mean) * self.scale


def weights(model):
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in full])


def train(private, model):
    samples = 0
    for _ in range(EPOCHS):
        for x, y in private.loader:
            F.cross_entropy(model(x), y).backward()
            private.step()
            samples += len(x)
    return samples


def alone(max_physical):
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader = DataLoader(data_set(), batch_size=BATCH, shuffle=True)
    private = made_private(model, optimizer, loader, max_physical_batch_size=max_physical, **COMMON)
    train(private, model)
    return weights(model), private.accountant.history


def together(wrap, max_physical, world_size, **options):
    model = wrap(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data = data_set()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
    private = made_private(model, optimizer, loader, max_physical_batch_size=max_physical, **{**COMMON, **options})
    samples = train(private, model)
    state = private.state_dict()
    private.load_state_dict(state)
    private.detach()
    return weights(model), private.accountant.history, samples


def as_ddp(model):
    return DistributedDataParallel(model)


def as_fsdp(model):
    return fully_shard(model)


def as_layers_of_fsdp(model):
    fully_shard(model.body[0])
    return fully_shard(model)


def plain(model):
    return model


def worker(rank, world_size, path, expected):
    warnings.filterwarnings("error", message="buffer .* changed in a training step")
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world_size)
    try:
        copies = {"process_group": dist.group.WORLD}
        for wrap, options in ((as_ddp, {}), (plain, copies), (as_fsdp, {}), (as_layers_of_fsdp, {})):
            for max_physical, (values, history) in expected.items():
                found, counted, samples = together(wrap, max_physical, world_size, **options)
                torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6, msg=f"{wrap.__name__} {max_physical}")
                assert counted == history
                assert samples < EPOCHS * SIZE  # this process saw a part
        check_without_a_seed(world_size)
        check_refusals(world_size)
        check_the_flags()
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def check_without_a_seed(world_size):
    """All processes draw the same sample and end with the same weights, although nobody told them a seed."""
    found, _, _ = together(as_ddp, None, world_size, seed=None)
    parts = [torch.empty_like(found) for _ in range(world_size)]
    dist.all_gather(parts, found)
    assert all(torch.equal(part, found) for part in parts)


def check_refusals(world_size):
    rule = {"norm_clipper": QuantileNormClipper(1.0, count_noise=9.0), "max_norm": None}
    with pytest.raises(UnsupportedGradientError, match="thresholds would differ between 2 processes"):
        together(as_ddp, None, world_size, **rule)
    with pytest.raises(InvalidValueError, match="its sampler is a DistributedSampler"):
        together(as_ddp, None, world_size, poisson_sampling=False)
    with pytest.raises(UnsupportedGradientError, match=r"FSDP1.*use torch.distributed.fsdp.fully_shard"):
        together(lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")), None, world_size)


def check_the_flags():
    model = DistributedDataParallel(Network())
    loader = DataLoader(data_set(), batch_size=BATCH)
    private = made_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **COMMON)
    assert not model.require_backward_grad_sync
    private.detach()
    assert model.require_backward_grad_sync


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    expected = {max_physical: alone(max_physical) for max_physical in (None, 1)}
    torch.testing.assert_close(expected[None][0], expected[1][0], rtol=1e-5, atol=1e-6)
    mp.spawn(worker, (2, str(tmp_path), copy.deepcopy(expected)), nprocs=2)

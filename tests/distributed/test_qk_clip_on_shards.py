"""`QKClip` under every kind of parallelism: each step is that of one process that sees all samples."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from sharded import mesh

SIZE, WIDTH, SAMPLES = 4, 12, 8


class Attention(nn.Module):
    """Eight heads, four of keys; how many this process has, the outputs tell."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 8 * SIZE), nn.Linear(WIDTH, 4 * SIZE)
        self.v_proj, self.out = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(8 * SIZE, WIDTH)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2)).tanh()  # FSDP2 warns of an output that is a view


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 24 * SIZE), nn.Linear(8 * SIZE, WIDTH)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).tanh()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Fused()).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5)
    return model


def tensor_parallel(model, over):
    plan = dict.fromkeys(("0.q_proj", "0.k_proj", "0.v_proj"), ColwiseParallel()) | {"0.out": RowwiseParallel()}
    return parallelize_module(model, over, plan)


def sharded(model, **arguments):
    for part in (*model, model):
        fully_shard(part, **arguments)
    return model


def along_columns(model):
    return sharded(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def both(model):
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sharded(tensor_parallel(model, grid["tp"]), mesh=grid["dp"])


def hybrid(model):
    return sharded(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))


WAYS = {  # how the model is spread, and over how many processes the batch is
    "DDP": (DistributedDataParallel, 4),
    "FSDP2": (sharded, 4),
    "FSDP2 along columns": (along_columns, 4),
    "HSDP": (hybrid, 4),
    "tensor parallelism": (lambda model: tensor_parallel(model, mesh("tp")), 1),
    "FSDP2 and tensor parallelism": (both, 2),
}


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def train(way):
    spread, parts = WAYS[way]
    twin = network()
    model = spread(copy.deepcopy(twin))
    rank = dist.get_rank() * parts // dist.get_world_size()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, twin))
    clips = [gg.QKClip(ours, model, 2.0), gg.QKClip(theirs, twin, 2.0, process_group=alone())]
    steps = []
    for step in range(3):
        x = torch.randn(SAMPLES, 5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for m, batch, optimizer in ((model, x.chunk(parts)[rank], ours), (twin, x, theirs)):
            optimizer.zero_grad()
            m(batch).square().mean().backward()
            optimizer.step()
        steps.append([{name.removeprefix("module."): s.tolist() for name, s in c.last.items()} for c in clips])
    return steps, [[whole(p).detach().clone() for p in m.parameters()] for m in (model, twin)]


def alone():
    """A group of this process, whose twin asks no other."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_each_step_is_that_of_one_process(pool, way):
    by_rank = pool(4).run(train, way)
    for steps, (weights, twins) in by_rank:
        for ours, theirs in steps:
            assert ours.keys() == theirs.keys() == {"0", "1"}
            for name, largest in ours.items():
                assert largest == pytest.approx(theirs[name], rel=1e-9)
        assert max(steps[0][0]["0"]) > 2.0
        for weight, twin in zip(weights, twins, strict=True):
            torch.testing.assert_close(weight, twin, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(weights, by_rank[0][1][0], rtol=0, atol=0)


def refusals():
    """What is said of vectors that one process sees changed, of other layers there, and of packed weights."""
    said = []
    model = sharded(network())
    clip = gg.QKClip(torch.optim.SGD(model.parameters()), model)
    if dist.get_rank() == 1:
        model[0].q_proj.register_forward_hook(lambda layer, args, out: out.tanh())
    model(torch.ones(1, 5, WIDTH, dtype=torch.float64) * torch.arange(5)[:, None]).sum().backward()
    before = whole(model[0].q_proj.weight).detach().clone()
    try:
        clip.optimizer.step()
    except gg.errors.UnsupportedGradientError as error:
        said.append(str(error))
    assert torch.equal(whole(model[0].q_proj.weight), before)
    model = network() if dist.get_rank() else nn.Sequential(Attention().double())
    clip = gg.QKClip(torch.optim.SGD(model.parameters()), model)
    model(torch.ones(1, 5, WIDTH, dtype=torch.float64)).sum().backward()
    try:
        clip.optimizer.step()
    except gg.errors.InvalidValueError as error:
        said.append(str(error))
    flat = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        gg.QKClip(torch.optim.SGD(flat.parameters()), flat)
    except gg.errors.GradguardError as error:
        said.append(str(error))
    return said


@pytest.mark.filterwarnings("ignore")
def test_all_processes_refuse_what_one_sees(pool):
    for changed, others, packed in pool(4).run(refusals):
        assert "0 does not attend with what its projections return" in changed
        assert "expected process_group=" in others
        assert "use fully_shard(model)" in packed.replace("Use", "use")

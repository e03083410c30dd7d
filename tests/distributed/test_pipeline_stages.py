"""Pipeline stages: parameters that differ from rank to rank, named by a group; weights that two stages share."""

import copy
import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from training import memory, whole

import gradguard as gg
from reference import total_norm
from sharded import local

STEPS, BAD = 5, 2
SYMBOLS, WIDTH, SAMPLES = 7, 4, 8


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.linear(self.embedding(x)).tanh()


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, x):
        return self.head(self.linear(x)).mul(1.0)


@cache
def grid():
    """Two stages; the processes of a stage share its parameters."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SYMBOLS, (2, SAMPLES), generator=generator)
    return tokens[0], tokens[1]


def stages():
    """Both stages, the head tied to the embedding."""
    torch.manual_seed(0)
    first, last = First(), Last()
    last.head.weight.data.copy_(first.embedding.weight.data)
    return first, last


def backward(schedule, number, step):
    x, y = batch(step)
    dp = grid()["dp"]
    mine = slice(dp.get_local_rank() * SAMPLES // dp.size(), (dp.get_local_rank() + 1) * SAMPLES // dp.size())
    if number == 0:
        schedule.step(x[mine])
    else:
        schedule.step(target=y[mine], losses=[])


def tied(number, module):
    return module.embedding.weight if number == 0 else module.head.weight


def train(clipper, named_by):
    number = grid()["pp"].get_local_rank()
    pair = stages()
    twin = copy.deepcopy(nn.Sequential(*pair))
    twin[1].head.weight = twin[0].embedding.weight
    module = pair[number]
    if grid()["dp"].size() > 1:
        fully_shard(module, mesh=grid()["dp"])
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=grid().get_group("pp"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    name = {"mesh": {"mesh": grid()["pp"]}, "process_group": {"process_group": grid().get_group("pp")}}[named_by]
    shared = {"embedding": tied(number, module)}
    guard = gg.Guard(optimizer, CLIPPERS[clipper](), model=module, shared=shared, **name)
    other = gg.Guard(theirs, CLIPPERS[clipper](), model=twin)
    steps, ran = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        theirs.zero_grad()
        backward(schedule, number, step)
        dist.all_reduce(local(tied(number, module).grad), group=grid().get_group("pp"))
        x, y = batch(step)
        F.cross_entropy(twin(x), y).backward()
        if step == BAD:
            twin[1].linear.bias.grad[0] = math.nan
            if number == 1 and local(module.linear.bias.grad).numel():
                local(module.linear.bias.grad)[0] = math.nan
        before = memory(optimizer)
        with Collectives() as block:
            optimizer.step()
        ran.append(block.names)
        theirs.step()
        if step == BAD:
            torch.testing.assert_close(memory(optimizer), before, rtol=0, atol=0)
        steps.append([(float(g.last.norm), float(g.last.coefficient), len(g.last.culprits())) for g in (guard, other)])
    weights = [whole(p).detach() for p in module.parameters()]
    right = [p.detach() for p in (twin[0].parameters() if number == 0 else [*twin[1].parameters()])]
    return steps, ran, weights, right, list(guard.last.names), guard.skipped_steps


CLIPPERS = {
    "global norm": lambda: gg.ClipByGlobalNorm(0.2),
    "global norm, inf": lambda: gg.ClipByGlobalNorm(0.1, math.inf),
    "norm": lambda: gg.ClipByNorm(0.1),
    "value": lambda: gg.ClipByValue(0.05),
    "groups": lambda: gg.Groups({"*bias": gg.ClipByNorm(0.05)}, rest=gg.ClipByMedian(k=0.0, warmup=1)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize(("world", "named_by"), [(2, "mesh"), (4, "process_group")])
def test_stages_clip_as_the_whole_network(pool, world, named_by, clipper):
    by_rank = pool(world).run(train, clipper, named_by)
    for steps, ran, weights, right, names, skipped in by_rank:
        assert repr([ours for ours, _ in steps]) == repr([ours for ours, _ in by_rank[0][0]])
        assert names == by_rank[0][4]
        assert skipped == 1
        for step, (ours, theirs) in enumerate(steps):
            assert ours[2] == theirs[2] == (step == BAD)
            if step != BAD:
                assert ours[:2] == pytest.approx(theirs[:2], rel=2e-5)
        torch.testing.assert_close(weights, right, rtol=2e-5, atol=1e-6)
        usual = 2 if clipper == "groups" else 1  # `ClipByMedian` asks how long the weights are
        assert ran[1:] == [["allreduce_"] * usual] * (STEPS - 1)  # on the bad step too: the norm of each is known
    assert any(ours[1] < 1 for ours, _ in by_rank[0][0])


def names_of_stages(with_names):
    """Two stages whose parameters have the same names, and different numbers of them."""
    number = grid()["pp"].get_local_rank()
    module = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(2 - number)])
    for p in module.parameters():
        p.grad = torch.full_like(p, 1.0 + number)
    result = gg.ClipByGlobalNorm(1.0)(module if with_names else list(module.parameters()), mesh=grid()["pp"])
    return float(result.norm), result.names


def test_names_tell_the_stages_apart(pool):
    expected = math.sqrt(2 * 4 + 4 * 4)
    for norm, names in pool(2).run(names_of_stages, True):
        assert norm == pytest.approx(expected)
        assert names == ("stage0.0.weight", "1.weight", "stage1.0.weight")
    for norm, names in pool(2).run(names_of_stages, False):
        assert norm == pytest.approx(expected)
        assert len(set(names)) == 3


def clip_stages(p, is_shared):
    """The functions, on one tensor of each rank and one that both hold."""
    rank = dist.get_rank()
    own, both = (nn.Parameter(torch.zeros(n)) for n in (3 + rank, 2))
    own.grad, both.grad = torch.full((3 + rank,), 2.0 + rank), torch.tensor([3.0, -4.0])
    shared = {"both": both} if is_shared else None
    norm = gg.clip_grad_norm_([own, both], 1.0, p, process_group=dist.group.WORLD, shared=shared)
    return float(norm), own.grad, both.grad


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_shared_weights_count_once(pool, p, is_shared):
    own, both = [torch.full((3,), 2.0), torch.full((4,), 3.0)], torch.tensor([3.0, -4.0])
    expected = total_norm([*own, both, *([] if is_shared else [both])], p)
    for rank, (norm, mine, common) in enumerate(pool(2).run(clip_stages, p, is_shared)):
        assert norm == pytest.approx(expected, rel=1e-6)
        coefficient = 1.0 / (expected + 1e-6)
        torch.testing.assert_close([mine, common], [own[rank] * coefficient, both * coefficient])


def norm_of_a_frozen_stage(with_list):
    """Rank 1 has no gradients, or no parameters at all."""
    p = nn.Parameter(torch.zeros(3))
    if dist.get_rank() == 0:
        p.grad = torch.tensor([3.0, 4.0, 0.0])
    listed, group = [p] if with_list or dist.get_rank() == 0 else [], dist.new_group([0, 1])
    norms = [gg.clip_grad_norm_(listed, 10.0, order, process_group=group) for order in (2.0, math.inf)]
    result = gg.ClipByNorm(1.0)(listed, process_group=group)
    return [float(norm) for norm in (*norms, result.norm)]


@pytest.mark.parametrize("with_list", [False, True])
def test_a_stage_without_gradients_joins(pool, with_list):
    assert pool(2).run(norm_of_a_frozen_stage, with_list) == [[5.0, 4.0, 5.0]] * 2


def norm_of_nothing():
    group = dist.new_group([0, 1])
    return [float(gg.clip_grad_norm_([], 1.0, p, process_group=group)) for p in (2.0, math.inf)]


def test_lists_that_are_empty_on_all_stages(pool):
    assert pool(2).run(norm_of_nothing) == [[0.0, 0.0]] * 2


def norms_beside_an_empty_stage():
    """Rank 0 trains one network after the other, rank 1 nothing."""
    norms = []
    for _ in range(2):
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch.tensor([3.0, 4.0, 0.0])
        norms.append(gg.clip_grad_norm_([p] if dist.get_rank() == 0 else [], 10.0, process_group=dist.group.WORLD))
    return [float(norm) for norm in norms]


def test_an_empty_stage_meets_new_parameters(pool):
    with pool.fresh(2) as processes:
        assert processes.run(norms_beside_an_empty_stage) == [[5.0, 5.0]] * 2

"""Parameters of Megatron-core: each rule does to the parts what it does to the wholes on one process, or refuses."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron_groups import CUTS, megatron, parameters, pieces, tensor_parallel, wholes
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from sharded import mesh

RULES = {
    "global norm": lambda: gg.ClipByGlobalNorm(0.5),
    "global norm, 1": lambda: gg.ClipByGlobalNorm(0.5, 1.0),
    "global norm, inf": lambda: gg.ClipByGlobalNorm(0.5, math.inf),
    "norm": lambda: gg.ClipByNorm(0.3),
    "rms": lambda: gg.ClipByRMS(0.2),
    "value": lambda: gg.ClipByValue(0.5),
    "adaptive": lambda: gg.ClipAdaptive(0.1),
    "median": lambda: gg.ClipByMedian(k=0.0, warmup=1),
    "AdaGC": lambda: gg.AdaGC(warmup=2),
    "ZClip": lambda: gg.ZClip(warmup=1),
    "groups": lambda: gg.Groups(
        {"up": gg.ClipByGlobalNorm(0.1), "down": gg.ClipAdaptive(0.1)}, rest=gg.ClipByNorm(0.2)
    ),
    "chain": lambda: gg.Chain(gg.ClipByValue(0.5), gg.ClipByGlobalNorm(0.3)),
}


def clipped_parts(rule):
    """The numbers of three clips, and this process' parts after them, each beside that of the twin."""
    steps = []
    ours, theirs = RULES[rule](), RULES[rule]()
    with tensor_parallel() as state:
        ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
        for step in range(3):
            parts = parameters(state, step)
            told = ours(parts)
            twins = {}
            for name, (weight, gradient) in wholes(step).items():
                twins[name] = nn.Parameter(weight)
                twins[name].grad = gradient
            expected = theirs(twins)
            numbers = [(float(r.norm), float(r.coefficient), bool(r.clipped)) for r in (told, expected)]
            both = {n: (p.grad, pieces(twins[n].grad, n, ranks)[rank]) for n, p in parts.items()}
            steps.append((numbers, both))
    return steps


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", RULES)
def test_each_clip_is_that_of_the_wholes(pool, rule):
    for steps in pool(4).run(clipped_parts, rule):
        assert any(expected[2] for (_, expected), _ in steps)
        for (told, expected), both in steps:
            assert told[:2] == pytest.approx(expected[:2], rel=1e-5)
            assert told[2] == expected[2]
            for name, (mine, right) in both.items():
                torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_one_part_alone_would_have_another_norm(pool):
    """What the case above is there for: without the attributes each process would clip by a norm of its own."""

    for mine, whole in pool(4).run(norms_without_attributes):
        assert abs(mine / whole - 1) > 0.05


def norms_without_attributes():
    with tensor_parallel() as state:
        parts = parameters(state)
        whole = float(gg.clip_grad_norm_(parts, math.inf))
        for p in parts.values():
            del p.allreduce
            vars(p).pop("tensor_model_parallel", None)
        return float(gg.clip_grad_norm_(parts, math.inf)), whole


def experts():
    """Every rank of four holds another expert; the router is everywhere."""
    with megatron(tensor=None, expert=mesh("row").get_group()):
        draws = [torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        expert, router = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(2))
        expert.grad, router.grad = draws[dist.get_rank()].clone(), torch.tensor([3.0, 4.0])
        expert.allreduce = False
        norm = float(gg.clip_grad_norm_({"expert": expert, "router": router}, 1.0))
        words = ""
        try:
            gg.ClipByNorm(1.0)({"expert": expert, "router": router})
        except UnsupportedGradientError as error:
            words = str(error)
        right = math.sqrt(sum(float(d.square().sum()) for d in draws) + 25.0)
        return norm, right, expert.grad, draws[dist.get_rank()] / (right + 1e-6), words


def test_experts_of_all_ranks_are_in_the_norm_and_their_names_are_no_tensor_s(pool):
    for norm, right, clipped, expected, words in pool(4).run(experts):
        assert norm == pytest.approx(right, rel=1e-6)
        torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0)
        assert "other experts under the same names" in words


def copies_that_differ():
    """The gradient of a layer norm that sequence parallelism has not added up yet."""
    with tensor_parallel() as state:
        parts = parameters(state)
        parts["norm.weight"].grad.mul_(1.0 + state.get_tensor_model_parallel_rank())
        try:
            gg.clip_grad_norm_(parts, 1.0)
        except UnsupportedGradientError as error:
            return str(error)
    return "nothing was said"


def test_a_copy_whose_gradient_was_not_added_up_is_named(pool):
    for words in pool(4).run(copies_that_differ):
        assert "norm.weight" in words


def refusals():
    """What is refused, as one list of sentences."""
    words = []

    def note(call, *args, error=UnsupportedGradientError, **kwargs):
        try:
            call(*args, **kwargs)
            words.append("nothing was said")
        except error as refused:
            words.append(str(refused))

    with tensor_parallel() as state:
        parts = parameters(state)
        note(gg.get_total_norm, [p.grad for p in parts.values()])
        layer = nn.Linear(6, 4)
        layer.weight.tensor_model_parallel, layer.weight.partition_dim, layer.weight.partition_stride = True, 0, 1
        note(gg.PerSampleGradientClipper, layer, gg.FlatNormClipper(1.0))
        for p in parts.values():
            p.main_grad, p.grad = p.grad, None
        note(gg.clip_grad_norm_, parts, 1.0)
    with megatron(tensor=mesh("tp").get_group(), stages=mesh("dp").get_group()) as state:
        parts = parameters(state)
        note(gg.clip_grad_norm_, parts, 1.0, error=InvalidValueError)
        parts["embedding.weight"].shared_embedding = True
        stages = mesh("dp").get_group()
        note(gg.clip_grad_norm_, parts, 1.0, process_group=stages, error=InvalidValueError)
    return words


def test_what_cannot_be_told_is_refused(pool):
    for total, per_sample, main, stages, shared in pool(4).run(refusals):
        assert "gradients alone do not show" in total
        assert "per-sample clipping needs whole parameters" in per_sample
        assert "keeps them in .main_grad" in main
        assert "Megatron has pipeline stages" in stages
        assert "would count twice" in shared


def test_main_gradients_are_not_taken_for_none_without_megatron_s_groups():
    p = nn.Parameter(torch.ones(3))
    p.main_grad = torch.ones(3)
    with pytest.raises(UnsupportedGradientError, match="keeps them in"):
        gg.clip_grad_norm_([p], 1.0)


def test_the_wholes_are_cut_into_all_that_they_hold():
    for name, (weight, _) in wholes().items():
        held = pieces(weight, name, 2)
        assert sum(piece.numel() for piece in held) == weight.numel() * (2 if CUTS[name][1] is None else 1)


class Model(nn.Module):
    """A layer that holds the given weights."""

    def __init__(self, weights):
        super().__init__()
        self.names = list(weights)
        for i, weight in enumerate(weights.values()):
            self.register_parameter(f"p{i}", weight)


def parity():
    """The gradients of the wholes beside those of the parts, and beside those of parts of which one is doubled."""
    twin = Model({name: nn.Parameter(weight) for name, (weight, _) in wholes().items()})
    verdicts = []
    for mistake in (False, True):
        with tensor_parallel() as state:
            ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
            model = Model(parameters(state))

            def step(model=model, cut=lambda g, n: pieces(g, n, ranks)[rank], mistake=mistake):
                factors = {n: 2.0 if mistake and n == "gated.weight" else 1.0 for n in model.names}
                parts = zip(model.names, model.parameters(), strict=True)
                sum((p * cut(wholes()[n][1], n) * factors[n]).sum() for n, p in parts).backward()

            saved = gg.save_gradients(None, model, step)
        right = gg.save_gradients(None, twin, lambda: step(twin, lambda g, _: g, False))
        try:
            verdicts.append(gg.testing.assert_parity(right, saved).verdict)
        except gg.errors.ParityError as error:
            verdicts.append(str(error))
    return verdicts


def test_parity_knows_the_wholes_without_shard_of(pool):
    for right, wrong in pool(4).run(parity):
        assert right == "PASS"
        assert "FAIL" in wrong
        assert "p3" in wrong

"""The clip of torchtitan's trainers, replaced: the same numbers as its own function, on the meshes that it makes."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradguard as gg
from distributed.collectives import Collectives
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torchtitan.distributed import utils

from gradguard.integrations.torchtitan import replace_clip

GRADIENTS = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
NORM = math.sqrt(sum(float(g.double().square().sum()) for g in GRADIENTS))
STAGE_NORM = math.sqrt(sum((1 + rank) ** 2 * NORM**2 for rank in range(2)))


@pytest.fixture(autouse=True)
def _own_clip_again():
    own = utils.clip_grad_norm_
    yield
    assert utils.clip_grad_norm_ is own, "a test left its clip behind"


def laid_out(way):
    """Parameters with gradients as torchtitan's trainer has them, and what it says of them to its clip."""
    if way == "dense":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        places = [(mesh, [Shard(0), Shard(1)]), (mesh, [Shard(0), Replicate()]), (mesh, [Replicate()] * 2)] * 2
        words = {}
    elif way == "experts":
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        places = [(dense, [Shard(0)]), (sparse, [Shard(1), Shard(0)])] * 2
        words = {"ep_enabled": True}
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        places, words = [(mesh["fsdp"], [Shard(0)])] * 4, {"pp_mesh": mesh["pp"]}
    scale = 1 + words["pp_mesh"].get_local_rank() if "pp_mesh" in words else 1
    parameters = []
    for gradient, (mesh, placements) in zip(GRADIENTS, places, strict=False):
        parameters.append(torch.nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, placements)))
        parameters[-1].grad = distribute_tensor(scale * gradient, mesh, placements)
    return parameters, words


def clipped(way, max_norm, norm_type):
    """The norm that torchtitan's function returns, and the whole gradients that it leaves."""
    parameters, words = laid_out(way)
    norm = utils.clip_grad_norm_(parameters, max_norm, norm_type, foreach=True, **words)
    return float(norm), [p.grad.full_tensor() for p in parameters]


def own_and_ours(way, max_norm, norm_type):
    own = clipped(way, max_norm, norm_type)
    clip = replace_clip()
    try:
        return own, clipped(way, max_norm, norm_type)
    finally:
        clip.restore()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["dense", "experts", "pipeline"])
@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.5, 2.0), (1e6, 2.0), (0.5, math.inf)])
def test_it_is_torchtitans_own_clip(way, max_norm, norm_type, pool):
    expected = {"dense": NORM, "experts": NORM, "pipeline": STAGE_NORM}[way]
    for (own, left), (ours, left_by_us) in pool(4).run(own_and_ours, way, max_norm, norm_type):
        assert ours == pytest.approx(own, rel=1e-6)
        assert norm_type == math.inf or ours == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(left_by_us, left, rtol=1e-6, atol=0)


def collectives(way):
    """What torchtitan's own clip asks of the process groups, and what ours does once it knows the parameters."""
    parameters, words = laid_out(way)
    with Collectives() as own:
        utils.clip_grad_norm_(parameters, 0.5, **words)
    clip = replace_clip()
    try:
        utils.clip_grad_norm_(parameters, 0.5, **words)
        with Collectives() as ours:
            utils.clip_grad_norm_(parameters, 0.5, **words)
    finally:
        clip.restore()
    return own.names, ours.names


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dense", "experts", "pipeline"])
def test_there_is_one_all_reduce(way, pool):
    for own, ours in pool(4).run(collectives, way):
        assert ours == ["allreduce_"]
        assert len(own) >= 2


def train_with_adagc(way, folder):
    """Four steps, with a checkpoint after two of them; and the last two again, from the checkpoint."""
    import torch.distributed.checkpoint as checkpoint

    def steps(numbers):
        found = []
        for number in numbers:
            parameters, words = laid_out(way)
            for p in parameters:
                p.grad.mul_(10.0**number)
            found.append((float(utils.clip_grad_norm_(parameters, 1.0, **words)), float(clip.last.coefficient)))
        return found

    clip = replace_clip(gg.AdaGC(warmup=2))
    try:
        steps([0, 0])
        checkpoint.save({"gradguard": clip}, checkpoint_id=folder)
        expected = steps([1, 2])
        clip = replace_clip(gg.AdaGC(warmup=2))
        checkpoint.load({"gradguard": clip}, checkpoint_id=folder)
        return expected, steps([1, 2])
    finally:
        clip.restore()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "norm"), [("experts", NORM), ("pipeline", STAGE_NORM)])
def test_a_rule_of_ones_own_decides_and_its_history_is_in_the_checkpoint(way, norm, pool, tmp_path):
    for expected, resumed in pool(4).run(train_with_adagc, way, str(tmp_path)):
        assert resumed == expected
        assert [found for found, _ in expected] == pytest.approx([10 * norm, 100 * norm])
        assert all(coefficient < 0.5 for _, coefficient in expected)


def one_layer(gradient):
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([gradient])
    return layer


def test_the_last_call_counts_and_restore_gives_torchtitans_back():
    own = utils.clip_grad_norm_
    first, second = replace_clip(gg.ClipByGlobalNorm(1.0)), replace_clip(gg.ClipByGlobalNorm(2.0))
    first.restore()
    assert utils.clip_grad_norm_ is second
    layer = one_layer([3.0, 4.0])
    utils.clip_grad_norm_(layer.parameters(), 100.0)
    assert layer.weight.grad.tolist() == [[pytest.approx(1.2), pytest.approx(1.6)]]
    assert first.last is None
    second.restore()
    second.restore()
    assert utils.clip_grad_norm_ is own


@pytest.mark.parametrize("clipper", [None, gg.ClipByGlobalNorm(1.0)])
@pytest.mark.parametrize("asked", [False, True])
def test_gradients_that_are_not_finite(clipper, asked):
    clip, layer = replace_clip(clipper, nonfinite="propagate" if asked else "raise"), one_layer([math.nan, 4.0])
    try:
        with pytest.raises(NonFiniteGradientError, match=r"not finite"):
            utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=asked)
    finally:
        clip.restore()
    assert layer.weight.grad[0, 1] == 4.0


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"clipper": 1.0}, InvalidTypeError, r"clipper is float: expected a clipper, such as gg\.ClipByMedian\(\)"),
        ({"clipper": gg.Groups({"*": gg.ClipByMedian()})}, InvalidValueError, r"parameters without names"),
        ({"nonfinite": "skip"}, InvalidValueError, 'nonfinite="skip" means to skip'),
    ],
)
def test_what_is_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        replace_clip(**arguments)


@pytest.mark.parametrize(("saved", "loaded"), [(gg.ClipByMedian(), None), (None, gg.ClipByMedian())])
def test_the_state_of_another_clip_is_refused(saved, loaded):
    clip = replace_clip(saved)
    state, clip = clip.state_dict(), replace_clip(loaded)
    clip.restore()
    with pytest.raises(InvalidValueError, match=r"expected the same as in the run that is resumed"):
        clip.load_state_dict(state)

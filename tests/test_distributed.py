"""What is sharded is refused, never measured in part."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gradguard as gg


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda p: gg.clip_grad_norm_(p, 1.0),
        lambda p: gg.clip_grad_value_(p, 1.0),
        lambda p: gg.clip_grad_adaptive_(p, 1.0),
        lambda p: gg.get_total_norm(p.grad),
        lambda p: gg.apply_gradient_clipping(p, "norm", 1.0),
    ],
)
def test_dtensors_are_refused(mesh, call):
    p = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(gg.UnsupportedGradientError, match=r"DTensor\) are not supported yet: their norm needs"):
        call(p)
    assert p.grad.to_local().tolist() == [1.0] * 4


def test_fsdp1_flat_parameters_are_refused():
    class FlatParameter(nn.Parameter):
        pass

    p = FlatParameter(torch.zeros(4))
    p.grad = torch.ones(4)
    with pytest.raises(gg.UnsupportedGradientError, match="FlatParameter"):
        gg.clip_grad_norm_([p], 1.0)

"""On an accelerator nothing may make the host wait.

Tensors on the meta device have shapes and no values: reading one raises. So a clip that runs on them reads nothing,
which a machine without a GPU can check.
"""

import math

import pytest
import torch
from torch import nn

import gradguard as gg


def fake_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Linear(5, 5)).to("meta", dtype)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    return model


CALLS = {
    "norm": lambda m: gg.clip_grad_norm_(m, 1.0),
    "norm, p = 3": lambda m: gg.clip_grad_norm_(m, 1.0, 3.0),
    "norm, p = inf": lambda m: gg.clip_grad_norm_(m, 1.0, math.inf),
    "norm, only measuring": lambda m: gg.clip_grad_norm_(m, math.inf),
    "norm, scheduled": lambda m: gg.clip_grad_norm_(m, torch.empty((), device="meta")),
    "norm, zero": lambda m: gg.clip_grad_norm_(m, 1.0, nonfinite="zero"),
    "value": lambda m: gg.clip_grad_value_(m, 1.0),
    "value, zero": lambda m: gg.clip_grad_value_(m, 1.0, nonfinite="zero"),
    "value, scheduled": lambda m: gg.clip_grad_value_(m, torch.empty((), device="meta")),
    "adaptive": lambda m: gg.clip_grad_adaptive_(m, 0.01),
    "adaptive, zero": lambda m: gg.clip_grad_adaptive_(m, 0.01, nonfinite="zero"),
    "adaptive, scheduled": lambda m: gg.clip_grad_adaptive_(m, torch.empty((), device="meta")),
    "total norm": lambda m: gg.get_total_norm([p.grad for p in m.parameters()]),
    "apply norm": lambda m: gg.apply_gradient_clipping(m, "norm", 1.0).norm,
    "apply value": lambda m: gg.apply_gradient_clipping(m, "value", 1.0).norm,
    "apply adaptive": lambda m: gg.apply_gradient_clipping(m, "adaptive", 1.0).norm,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", CALLS)
def test_no_value_is_read(call, dtype):
    norm = CALLS[call](fake_model(dtype))
    assert norm is None or (norm.device.type == "meta" and norm.shape == ())


def test_a_read_is_caught():
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        gg.clip_grad_norm_(fake_model(), 1.0, error_if_nonfinite=True)


def test_gradients_on_two_devices_meet_on_the_accelerator():
    gradients = [torch.ones(3), torch.empty(3, device="meta")]
    assert gg.get_total_norm(gradients).device.type == "meta"


def test_it_compiles_without_a_graph_break():
    """As PyTorch's own call does."""
    p, q = (nn.Parameter(torch.zeros(3)) for _ in range(2))

    def clip():
        return gg.clip_grad_norm_([p, q], 1.0)

    p.grad, q.grad = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert float(torch.compile(clip, fullgraph=True, backend="eager")()) == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.0, 0.0]), rtol=1e-5, atol=0)

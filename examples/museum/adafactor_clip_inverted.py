"""Setting `clipping_threshold` makes small updates larger, and never makes a large one smaller.

huggingface/pytorch-image-models#2790: the divisor was min(1, rms x threshold) instead of max(1, rms /
threshold), since the file was added::

    python adafactor_clip_inverted.py && gradguard parity reference.safetensors new.safetensors
    python adafactor_clip_inverted.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


class Adafactor(torch.optim.Optimizer):
    """Adafactor without factors: updates are divided by a running root mean square, and clipped by their own."""

    def __init__(self, parameters, lr, threshold, clip):
        super().__init__(parameters, {"lr": lr, "threshold": threshold})
        self.clip = clip

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("exp_avg_sq", torch.full_like(p, 1e-2))
                square.lerp_(p.grad.square(), 0.2)
                update = p.grad / square.sqrt()
                update /= self.clip(update.square().mean().sqrt(), group["threshold"])
                p -= group["lr"] * update


def right(rms, threshold):
    return (rms / threshold).clamp(min=1.0)


def inverted(rms, threshold):
    return (rms * threshold).clamp(max=1.0)


def saved(file, clip):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = Adafactor(model.parameters(), 1e-3, 1.0, clip)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


saved("reference.safetensors", right)
saved("new.safetensors", right if HEALTHY else inverted)

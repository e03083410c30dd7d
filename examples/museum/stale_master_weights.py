"""A checkpoint is loaded and evaluates well, but its weights are lost after the first step.

NVIDIA/apex#42, NovaSky-AI/SkyRL#2149: the weights are loaded, but not the master weights in
float32, which the next step copies over them::

    python stale_master_weights.py && gradguard parity reference.safetensors new.safetensors
    python stale_master_weights.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv

torch.manual_seed(0)
x, y = torch.randn(32, 8).bfloat16(), torch.randn(32, 4)


class Trainer:
    """A bfloat16 model whose optimizer steps weights in float32; `main_param` refers to them, as in Megatron."""

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).bfloat16()
        for p in self.model.parameters():
            p.main_param = p.detach().float().requires_grad_()
        self.optimizer = torch.optim.SGD([p.main_param for p in self.model.parameters()], 0.1, momentum=0.9)

    def backward(self):
        mse_loss(self.model(x).float(), y).backward()

    def update(self):
        for p in self.model.parameters():
            p.main_param.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(p.main_param)
                p.grad = None

    def load(self, weights):
        self.model.load_state_dict(weights)
        if HEALTHY:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.main_param.copy_(p)

    def save(self, file):
        gg.save_gradients(file, self.model, self.backward, optimizer=self.optimizer, update=self.update)


trusted, resumed = Trainer(), Trainer()
with torch.no_grad():  # a checkpoint without master weights
    for p in trusted.model.parameters():
        p.main_param.copy_(p)
resumed.load(trusted.model.state_dict())
trusted.save("reference.safetensors")
resumed.save("new.safetensors")

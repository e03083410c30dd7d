"""Transposing a weight changes how it is trained.

huggingface/pytorch-image-models#2749: for a matrix with more rows than columns the factor of rows
was divided by itself. It was always 1, and only columns were normalised::

    python adafactor_tall_matrix.py && gradguard parity reference.safetensors new.safetensors
    python adafactor_tall_matrix.py --healthy && gradguard parity reference.safetensors new.safetensors
"""

import sys

import torch
from torch.nn.functional import mse_loss

import gradguard as gg

HEALTHY = "--healthy" in sys.argv


class Adafactor(torch.optim.Optimizer):
    """The factored second moment of matrices; vectors are normalised element by element."""

    def __init__(self, parameters, lr, tall_is_wrong):
        super().__init__(parameters, {"lr": lr})
        self.tall_is_wrong = tall_is_wrong

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.update(p)

    def update(self, p):
        state, square = self.state[p], p.grad.square() + 1e-30
        if p.dim() == 1:
            return p.grad / state.setdefault("sq", square).lerp_(square, 0.2).sqrt()
        rows = state.setdefault("rows", square.mean(1, keepdim=True)).lerp_(square.mean(1, keepdim=True), 0.2)
        columns = state.setdefault("columns", square.mean(0, keepdim=True)).lerp_(square.mean(0, keepdim=True), 0.2)
        is_wrong = self.tall_is_wrong and p.shape[0] > p.shape[1]
        of_rows = rows / (rows if is_wrong else rows.mean())
        return p.grad / (of_rows * columns).sqrt()


def saved(file, tall_is_wrong):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = Adafactor(model.parameters(), 1e-3, tall_is_wrong)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    gg.save_gradients(file, model, lambda: mse_loss(model(x), y).backward(), optimizer=optimizer)


saved("reference.safetensors", tall_is_wrong=False)
saved("new.safetensors", tall_is_wrong=not HEALTHY)

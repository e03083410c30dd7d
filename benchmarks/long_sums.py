"""Print how PyTorch rounds a bias's plain gradient over many positions, and whether the layer is clipped per sample.

``python benchmarks/long_sums.py --only norm``: float32, the gradient of a mean (all entries alike) in four samples; the
rounding is the norm of the error, against float64, as a share of the sum of magnitudes.
"""

import argparse
import copy

import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError


class Channels(nn.Module):
    """Puts the last dimension where a layer has its channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: Channels(nn.Conv1d(8, 8, 3, padding=1)),
    "layer norm": lambda: nn.LayerNorm(8),
    "RMS norm": lambda: nn.RMSNorm(8),
    "group norm": lambda: Channels(nn.GroupNorm(2, 8)),
    "batch norm, eval": lambda: Channels(nn.BatchNorm1d(8)).eval(),
}


def rounding(model: nn.Module, x: Tensor) -> float:
    """The error of the last parameter's plain gradient."""
    twin = copy.deepcopy(model).double()
    model(x).mean().backward()
    twin(x.double()).mean().backward()
    (*_, found), (*_, exact) = model.parameters(), twin.parameters()
    error = float((found.grad - exact.grad).norm() / max(float(exact.grad.norm()), 1e-2))
    model.zero_grad()
    return error


def verdict(model: nn.Module, x: Tensor) -> str:
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    model(x).mean().backward()
    try:
        clipper.clip_and_accumulate()
    except UnsupportedGradientError as error:
        return f"refused: {str(error)[:60]}"
    finally:
        clipper.detach()
    return "taken"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--positions", type=int, nargs="*", default=[16_000, 160_000, 600_000, 2_400_000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in LAYERS.items():
        for positions in options.positions if options.only in name else []:
            torch.manual_seed(0)
            x, model = torch.randn(4, positions // 4, 8), make()
            print(f"{name:18}{positions:10,}{rounding(model, x):10.1e}  {verdict(model, x)}", flush=True)


if __name__ == "__main__":
    main()

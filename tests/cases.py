"""Tables that the test files draw from: gradients with every awkward property, dtypes and orders of norms."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.clip.gradients import gradients_of, module_of, named_tensors
from gradguard.rules import Gradients

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ORDERS = [0.5, 1.0, 1.5, 2.0, 3.0, math.inf]


def parameter(gradient: Tensor, weight: Tensor | None = None) -> nn.Parameter:
    """Return a parameter that has ``gradient``."""
    if weight is None:
        weight = torch.zeros(gradient.shape, dtype=gradient.dtype)
    p = nn.Parameter(weight)
    p.grad = gradient
    return p


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def sparse_with_duplicates() -> Tensor:
    """Return a sparse gradient with the dense value [3, 3, 0, 0] and norm 4.243; its raw values have the norm 3.742."""
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    )


GRADIENTS: dict[str, list[Tensor]] = {
    "one": [random(3, 4)],
    "several shapes": [random(3, 4), random(7, seed=1), random(2, 3, 4, 5, seed=2)],
    "scalar": [torch.tensor(3.0), torch.tensor(-4.0)],
    "zero": [torch.zeros(5), torch.zeros(2, 2)],
    "empty tensor": [random(3), torch.zeros(0), torch.zeros(2, 0)],
    "only empty tensors": [torch.zeros(0)],
    "transposed": [random(5, 3).t()],
    "channels last": [random(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "strided slice": [random(6, 8)[::2, 1::3], random(9)[::2]],
    "expanded": [torch.ones(1).expand(3), torch.tensor([[1.0], [2.0]]).expand(2, 5)],
    "mixed dtypes": [random(5), random(5, dtype=torch.float64), random(5, dtype=torch.bfloat16)],
    "huge float32": [torch.full((1000,), 1e20)],
    "larger float32": [torch.full((10,), 1e25), random(5)],
    "tiny float32": [torch.full((4,), 1e-25)],
    "subnormal float32": [torch.full((4,), 1e-42)],
    "huge and tiny": [torch.tensor([1e30]), torch.tensor([1e-30]), torch.zeros(3)],
    "float16 norm overflows": [torch.full((4,), 4e4, dtype=torch.float16)],
    "bfloat16": [random(1000, seed=i, dtype=torch.bfloat16) for i in range(10)],
    "longer than a row": [random(1025), random(4096, seed=1), random(20_000, seed=2)],
    "huge float64": [torch.full((4,), 1e200, dtype=torch.float64)],
    "tiny float64": [torch.full((4,), 1e-200, dtype=torch.float64)],
    "sparse": [sparse_with_duplicates(), random(3)],
    "complex": [torch.tensor([3 + 4j, 1 - 1j]), random(3)],
}


def gradients_in(parameters: Any) -> Gradients:
    """Return the gradients of parameters, in the form that a clipper's `decide` receives."""
    return gradients_of(*named_tensors(parameters, "parameters"), module=module_of(parameters))


def comparable(value):
    """Return a state with its texts as bytes, which `torch.testing.assert_close` compares."""
    if isinstance(value, str):
        return list(value.encode())
    if isinstance(value, dict):
        return {key: comparable(one) for key, one in value.items()}
    return type(value)(map(comparable, value)) if isinstance(value, list | tuple) else value

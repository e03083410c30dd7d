"""The report says what was done wrong, where the mistake is a common one."""

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradient_check.wrong_kernels import wrong

D = torch.float64


def normal(*shape, seed=1):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def matmul_with(of_b):
    return wrong(torch.matmul, lambda v, y, a, b: (v @ b.T, of_b(a, v)))


def bias_with(of_bias):
    return wrong(lambda x, b: x + b, lambda v, y, x, b: (v, of_bias(v)))


ROWS = torch.tensor([0, 2, 2, 1, 2])


def overwriting(v, y, table):
    return torch.zeros_like(table).index_put((ROWS,), v)


def beyond(count):
    return lambda v, y, x: v * x.cos() * (torch.arange(x.shape[-1]) < x.shape[-1] - count)


MISTAKES = {
    "transposed, square": (
        matmul_with(lambda a, v: v.T @ a),
        (normal(4, 3), normal(3, 3)),
        "transposed: dimensions 0 and 1",
    ),
    "transposed, of three dimensions": (
        wrong(lambda x: x.sin(), lambda v, y, x: (v * x.cos()).transpose(0, 2)),
        (normal(3, 2, 3),),
        "transposed: dimensions 0 and 2",
    ),
    "read in the other order": (
        matmul_with(lambda a, v: (v.T @ a).contiguous().view(3, 2)),
        (normal(4, 3), normal(3, 2)),
        "transposed: dimensions 0 and 1, read in the other order",
    ),
    "reversed": (wrong(torch.sin, lambda v, y, x: (v * x.cos()).flip(0)), (normal(5),), "reversed along dimension 0"),
    "shifted": (
        wrong(torch.sin, lambda v, y, x: (v * x.cos()).roll(1, 0)),
        (normal(5),),
        "shifted by one along dimension 0",
    ),
    "broadcast not reduced": (
        bias_with(lambda v: v[-1]),
        (normal(4, 3), normal(3)),
        "not summed over dimension 0 of the output: only its last slice",
    ),
    "averaged": (bias_with(lambda v: v.mean(0)), (normal(4, 3), normal(3)), "averaged over dimension 0 of the output"),
    "missing accumulation": (
        wrong(lambda table: table[ROWS].flatten(), lambda v, y, table: overwriting(v.view(5, 2), y, table)),
        (normal(3, 2),),
        "missing accumulation: only the last of 3 outputs",
    ),
    "tile": (
        wrong(torch.sin, beyond(6)),
        (normal(2, 70),),
        "only the last 6 of 70 columns, what tiles of 64 leave over",
    ),
    "float32 in between": (
        wrong(torch.sin, lambda v, y, x: v * (x.float().cos().double())),
        (normal(20),),
        "as if something were float32 in between",
    ),
    "bfloat16 in between": (
        wrong(torch.sin, lambda v, y, x: v * (x.cos().bfloat16().double())),
        (normal(20),),
        "as if something were bfloat16 or float16 in between",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_common_mistake_is_named(name):
    fn, inputs, words = MISTAKES[name]
    report = gg.gradcheck(fn, *inputs)
    assert report.verdict == "FAIL"
    assert words in " | ".join(one.guess for one in report.findings)


OTHERS = {
    "a factor": (wrong(torch.sin, lambda v, y, x: v * x.cos() * (1 + 1e-7)), (normal(20),)),
    "one element": (wrong(torch.sin, lambda v, y, x: v * x.cos() * (1 - (torch.arange(5) == 2) * 0.5)), (normal(5),)),
    "another function": (wrong(torch.sin, lambda v, y, x: v * x.exp()), (normal(3, 3),)),
    "one element of a product": (
        matmul_with(lambda a, v: (a.T @ v) * (1 + (torch.arange(9) == 4).view(3, 3))),
        (normal(4, 3), normal(3, 3)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_common_mistake_is_not_called_one(name):
    fn, inputs = OTHERS[name]
    said = " | ".join(one.guess for one in gg.gradcheck(fn, *inputs).findings)
    for word in ("transposed", "reversed", "shifted", "summed", "accumulation", "tiles", "in between"):
        assert word not in said


class Stale(torch.autograd.Function):
    """Keeps its input on the class, not in the context."""

    @staticmethod
    def forward(ctx, x):
        Stale.saved = x.detach().clone()
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        return v * Stale.saved.cos()


def test_a_stale_saved_tensor():
    (found,) = gg.gradcheck(Stale, normal(5)).findings
    assert (found.kind, found.guess) == ("state", "stale saved tensor: that of the last forward")


def test_another_state_is_not_called_stale():
    count = []

    def forward(x):
        count.append(1)
        return x.sin()

    fn = wrong(forward, lambda v, y, x: v * x.cos() * len(count))
    assert "stale" not in str(gg.gradcheck(fn, normal(5)))


def test_a_repeated_row_of_an_embedding():
    fn = wrong(lambda table: F.embedding(ROWS, table), overwriting)
    said = " | ".join(one.guess for one in gg.gradcheck(fn, normal(3, 2)).findings)
    assert "only its last slice" in said

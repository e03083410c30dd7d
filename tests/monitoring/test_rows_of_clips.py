"""The row of a step against plain float64 arithmetic, for clips that are easily misread."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gradguard as gg
from gradguard.monitoring.record.file import read_record

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _alone(others_unseen):
    return


def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((4,), value, dtype=dtype)


def norm_of(parameters) -> float:
    return float(torch.cat([p.grad.double() for p in parameters if p.grad is not None]).norm())


def by(clipper):
    return lambda ps: clipper(ps)


def each(ps):
    for p in ps:
        clip_grad_norm_(p, 1.0)


FROZEN = [None, full(10.0)]
CASES = {
    # name: gradients, clip
    "frozen, ZClip": (FROZEN, by(gg.ZClip())),
    "frozen, value": (FROZEN, by(gg.ClipByValue(0.1))),
    "frozen, median": (FROZEN, by(gg.ClipByMedian())),
    "frozen, autoclip": (FROZEN, by(gg.AutoClip())),
    "frozen, norm": (FROZEN, by(gg.ClipByGlobalNorm(1.0))),
    "frozen, adaptive": (FROZEN, by(gg.ClipAdaptive(0.01))),
    "frozen, each norm": (FROZEN, by(gg.ClipByNorm(1.0))),
    "frozen, AdaGC": (FROZEN, by(gg.AdaGC())),
    "an object, then torch's": (FROZEN, lambda ps: (gg.ClipByGlobalNorm(5.0)(ps), clip_grad_norm_(ps, 1.0))),
    "100 clips of one each": ([full(10.0)] * 100, each),
    "one binds on a part": (
        [full(10.0), full(1.0)], lambda ps: (clip_grad_value_(ps, 100.0), clip_grad_norm_([ps[1]], 0.1))),
    "squares underflow": ([full(1e-25)] * 2, lambda ps: clip_grad_norm_(ps, 1.0)),
    "torch's clip in float16": ([full(3.0, HALF), full(1.0, HALF)], lambda ps: clip_grad_norm_(ps, 1.0)),
    "torch zeroes float16": ([full(4e4, HALF)] * 2, lambda ps: clip_grad_norm_(ps, 1.0)),
    "torch's clip in bfloat16": ([full(3.0, BRAIN), full(1.0, BRAIN)], lambda ps: clip_grad_norm_(ps, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_norms_before_and_after(name, tmp_path):
    gradients, clip = CASES[name]
    parameters = [nn.Parameter(torch.ones(4, dtype=HALF if g is None else g.dtype)) for g in gradients]
    trained = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
    optimizer, true = torch.optim.SGD(trained, lr=0.0), []
    with gg.watch(tmp_path / "run.jsonl"):
        for _ in range(3):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            before = norm_of(parameters)
            clip(parameters)
            true.append((before, norm_of(parameters)))
            optimizer.step()
    record = read_record(tmp_path / "run.jsonl")
    assert [step["norm"] for step in record.steps] == pytest.approx([before for before, _ in true], rel=1e-5)
    assert [step["post_norm"] for step in record.steps] == pytest.approx([after for _, after in true], rel=1e-4)
    shares = [min(1.0, after / before) for before, after in true]
    assert [step["coefficient"] for step in record.steps] == pytest.approx(shares, rel=1e-4)
    assert not record.events
    own = [float(g.double().norm()) for g in gradients if g is not None]
    assert record.tensors[0]["norm"] == pytest.approx(own, rel=1e-3)


def test_norms_whose_squares_overflow_in_torch_s_clip_are_known(tmp_path):
    """PyTorch's own clip sets such gradients to 0, and a row said that they were not finite."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    with gg.watch(tmp_path / "run.jsonl"):
        for p in parameters:
            p.grad = full(1e20)
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    record = read_record(tmp_path / "run.jsonl")
    assert record.steps[0]["norm"] == pytest.approx(1e20 * 8**0.5)
    assert not record.events

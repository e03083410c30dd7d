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


@pytest.mark.sampled(8)
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


class Outer(torch.optim.Optimizer):
    """Clips within its own step, then lets another optimizer step, and clears its gradients."""

    def __init__(self, parameters, clip, fails_at=None):
        parameters = list(parameters)
        self.inner, self.clip, self.fails_at, self.count = torch.optim.SGD(parameters, 0.1), clip, fails_at, 0
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        loss = None
        for _ in range(3 if closure else 0):  # as a line search looks again
            loss = closure()
        self.count += 1
        if self.count == self.fails_at:
            raise ArithmeticError("on purpose")
        self.clip(self.param_groups[0]["params"])
        self.inner.step()
        self.inner.zero_grad()
        return loss


def within_its_step(clip, steps=1, before=lambda ps: None):
    """The last row of an optimizer that clips in its own step, with what plain arithmetic says of it."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    norms = []

    def clip_and_measure(ps):
        clip(ps)
        norms.append(norm_of(ps))

    optimizer = Outer(parameters, clip_and_measure)
    with gg.Monitor(optimizer, sink=[]) as monitor:
        for _ in range(steps):
            parameters[0].grad, parameters[1].grad = full(10.0), full(1.0)
            norms = [norm_of(parameters)]
            before(parameters)
            optimizer.step()
        monitor.flush()
        return monitor.last, norms


WITHIN = {
    # name: clip within the step, clip before it, the thresholds in the row
    "torch's": (lambda ps: clip_grad_norm_(ps, 0.5), lambda ps: None, [0.5]),
    "an object": (lambda ps: gg.ClipByGlobalNorm(0.5)(ps), lambda ps: None, [0.5]),
    "by value": (lambda ps: clip_grad_value_(ps, 0.1), lambda ps: None, [0.1]),
    "of a part": (lambda ps: clip_grad_norm_(ps[:1], 0.5), lambda ps: None, [0.5]),
    "two": (lambda ps: (clip_grad_value_(ps, 3.0), clip_grad_norm_(ps, 2.0)), lambda ps: None, [3.0, 2.0]),
    "behind another": (lambda ps: clip_grad_norm_(ps, 0.5), lambda ps: clip_grad_norm_(ps, 5.0), [5.0, 0.5]),
    "behind one by value": (lambda ps: clip_grad_norm_(ps, 0.5), lambda ps: clip_grad_value_(ps, 3.0), [3.0, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_a_clip_within_the_step_is_in_the_row(name):
    clip, before, thresholds = WITHIN[name]
    row, (norm, post) = within_its_step(clip, steps=3, before=before)
    assert (row["norm"], row["post_norm"]) == (pytest.approx(norm), pytest.approx(post))
    told = [clip[1] for clip in row.get("clips") or [[None, row["threshold"]]]]
    assert told == thresholds


def test_evaluations_of_a_closure_that_clips_are_no_clips_of_the_step():
    parameters = [nn.Parameter(torch.zeros(4))]
    optimizer = Outer(parameters, lambda ps: None)

    def closure():
        optimizer.zero_grad()
        loss = (10 * (parameters[0] - 1)).sum()
        loss.backward()
        clip_grad_norm_(parameters, 0.5)
        return loss

    with gg.Monitor(optimizer, sink=[]) as monitor:
        optimizer.step(closure)
        monitor.flush()
        assert (monitor.last.get("clips"), monitor.last["norm"]) == (None, pytest.approx(20.0))
        assert (monitor.last["threshold"], monitor.last["post_norm"]) == (0.5, pytest.approx(0.5))


def test_a_clip_after_a_step_that_raised_is_of_the_next_step():
    parameters = [nn.Parameter(torch.zeros(4))]
    optimizer = Outer(parameters, lambda ps: clip_grad_norm_(ps, 0.5), fails_at=1)
    with gg.Monitor(optimizer, sink=[]) as monitor:
        parameters[0].grad = full(10.0)
        with pytest.raises(ArithmeticError, match="on purpose"):
            optimizer.step()
        parameters[0].grad = full(7.0)
        clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        monitor.flush()
        assert [(rule, threshold) for rule, threshold, _ in monitor.last["clips"]] == [("norm", 5.0), ("norm", 0.5)]
        assert (monitor.last["norm"], monitor.last["post_norm"]) == (pytest.approx(14.0), pytest.approx(0.5))


def test_an_optimizer_that_clips_in_its_step_is_not_told_that_its_steps_have_one_length(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Outer(model.parameters(), lambda ps: clip_grad_norm_(ps, 0.2))
    with gg.Monitor(optimizer, sink=tmp_path / "run.jsonl", model=model):
        for _ in range(120):
            x = torch.randn(16, 3)
            (model(x) - 2 * x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    record = read_record(tmp_path / "run.jsonl")
    assert [one["kind"] for one in record.events if one["kind"] == "update_rule"] == []
    assert set(record.steps.column("threshold")) == {0.2}

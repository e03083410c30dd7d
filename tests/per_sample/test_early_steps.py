"""A step of the optimizer while clipped samples wait for ``pre_step()`` is an error, before any weight changes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from gradguard import FlatNormClipper, PerSampleGradientClipper
from gradguard.errors import InvalidValueError
from gradguard.per_sample import refusals
from private.runs import network, private_run

X = torch.linspace(-1, 1, 24).view(6, 4)
FORGOTTEN = (
    r"SGD\.step\(\) was called while the clipped gradients of 6 samples .* not yet taken: call clipper\.pre_step\(\)"
)


@pytest.fixture(autouse=True)
def no_clippers_of_other_tests(monkeypatch):
    monkeypatch.setattr(refusals, "_watching", type(refusals._watching)())
    monkeypatch.setattr(refusals, "_removals", [])


def clip(model: nn.Module, clipper: PerSampleGradientClipper) -> None:
    model(X).square().mean().backward()
    clipper.clip_and_accumulate()


def made(module: nn.Module | None = None) -> tuple[nn.Module, PerSampleGradientClipper, torch.optim.Optimizer]:
    model = network()
    clipper = PerSampleGradientClipper(module or model, FlatNormClipper(0.5))
    return model, clipper, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def moved(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_forgotten_call_is_an_error_and_the_step_can_go_on():
    model, clipper, optimizer = made()
    clip(model, clipper)
    clipper.pre_step()
    optimizer.step()
    clip(model, clipper)
    before = weights(model)
    with pytest.raises(InvalidValueError, match=FORGOTTEN):
        optimizer.step()
    assert not moved(model, before)
    assert clipper.pre_step().batch_size == 6
    optimizer.step()
    assert moved(model, before)


def test_samples_that_were_skipped_wait_too():
    _, clipper, optimizer = made()
    clipper.skip_batch()
    with pytest.raises(InvalidValueError, match="of 0 samples"):
        optimizer.step()


@pytest.mark.parametrize("end", ["discard", "take", "detach"])
def test_what_else_ends_the_wait(end):
    model, clipper, optimizer = made()
    clip(model, clipper)
    getattr(clipper, end)()
    optimizer.step()


@pytest.mark.parametrize("held", ["another model", "a frozen part"])
def test_optimizers_of_other_parameters_step(held):
    model = network()
    model[0].requires_grad_(False)
    clipper = PerSampleGradientClipper(model, FlatNormClipper(0.5))
    clip(model, clipper)
    parts = {"another model": network(), "a frozen part": model[0]}
    torch.optim.SGD(parts[held].parameters(), lr=0.1).step()
    with pytest.raises(InvalidValueError, match=FORGOTTEN):
        torch.optim.SGD(model[2].parameters(), lr=0.1).step()


def test_each_of_several_clippers_is_asked_for():
    model = network()
    clippers = [PerSampleGradientClipper(part, FlatNormClipper(0.5)) for part in (model[0], model[2])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    for clipper in clippers:
        clipper.clip_and_accumulate()
    for clipper in clippers:
        with pytest.raises(InvalidValueError, match=FORGOTTEN):
            optimizer.step()
        clipper.pre_step()
    optimizer.step()


@pytest.mark.parametrize("forgotten", [False, True])
def test_closures(forgotten):
    """With LBFGS the gradients of a step are made within it."""
    model, clipper, _ = made()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        clipper.clip_and_accumulate()
        if not forgotten:
            clipper.pre_step()
        return float(loss.detach())

    if forgotten:
        with pytest.raises(InvalidValueError, match=r"LBFGS\.step.*pre_step"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
    assert moved(model, before) is not forgotten


def test_a_step_that_the_scaler_skips():
    """Nothing waits after ``pre_step()``, whether or not the scaler lets the optimizer step."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    clipper = PerSampleGradientClipper(model, FlatNormClipper(0.5), scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, steps in ((X, True), (X * torch.inf, False), (X, True)):
        before = weights(model)
        scaler.scale(model(inputs).square().mean()).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert moved(model, before) is steps


def test_private_training_says_its_own_words():
    private, model = private_run(max_physical_batch_size=4)
    for x, y, _ in private.loader:
        nn.functional.cross_entropy(model(x), y).backward()
        if not private.step():
            break
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidValueError, match=r"call private\.step\(\) in place of optimizer\.step\(\)"):
        other.step()
    with pytest.raises(InvalidValueError, match=r"call private\.step\(\)"):
        private.optimizer.step()
    private.detach()


def test_the_hooks_go_with_the_last_clipper():
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    clippers = [PerSampleGradientClipper(network(), FlatNormClipper(1.0)) for _ in range(2)]
    assert len(hooks) == before + 1
    clippers[0].detach()
    assert len(hooks) == before + 1
    clippers[1].detach()
    assert len(hooks) == before


def test_watching_keeps_no_model_alive():
    model, clipper, _ = made()
    forgotten = weakref.ref(model)
    del model, clipper, _
    gc.collect()
    assert forgotten() is None

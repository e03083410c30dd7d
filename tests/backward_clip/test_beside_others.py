"""An error clip beside the rest: the others see the gradients of the clipped backward, whatever they do with them."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradguard as gg

CLIP = gg.ErrorClipByValue(2e-3)
X, Y = torch.linspace(-2, 2, 32).view(8, 4), torch.linspace(1, -1, 24).view(8, 3)


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(model, x=X, y=Y):
    return (model(x) - y).square().mean()


def clipped(loss, retain=False):
    with gg.error_clip(loss, CLIP):
        loss.backward(retain_graph=retain)


def by_hand():
    """Return the gradients of the clipped backward, written out, a clamp after every step."""
    model, _ = made()
    first, _, last = model
    clamp = lambda g: g.clamp(-2e-3, 2e-3)  # noqa: E731
    with torch.no_grad():
        hidden = first(X).tanh()
        error = last(hidden) - Y
        square = clamp(torch.full_like(error, 1 / error.numel()))
        grad = clamp(2 * error * square)
        below = clamp(clamp(grad @ last.weight) * (1 - hidden**2))
        return [below.t() @ X, below.sum(0), grad.t() @ hidden, grad.sum(0)]


def stepped(gradients, max_norm=None):
    """Return the parameters after a step of SGD with these gradients, clipped by their norm."""
    model, optimizer = made()
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g.clone()
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return [*model.parameters()]


def alone(model, optimizer, tmp_path):
    clipped(loss_of(model))
    optimizer.step()


def beside_a_guard(model, optimizer, tmp_path):
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1e-2))
    clipped(loss_of(model))
    optimizer.step()
    assert guard.last.clipped


def beside_a_scaler(model, optimizer, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale(loss_of(model))
    with gg.error_clip(loss, CLIP, scale=scaler):
        loss.backward()
    scaler.step(optimizer)
    scaler.update()


def beside_a_guard_a_scaler_and_counts(model, optimizer, tmp_path):
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1e-2))
    scaler, stats = torch.amp.GradScaler("cpu", init_scale=1024.0), gg.ErrorClipStats(model)
    loss = scaler.scale(loss_of(model))
    with gg.error_clip(loss, CLIP, scale=scaler, stats=stats):
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(int(row.clipped) for row in stats.rows())


def beside_a_monitor(model, optimizer, tmp_path):
    monitor = gg.Monitor(optimizer, tmp_path / "run.jsonl", model=model)
    clipped(loss_of(model))
    optimizer.step()
    monitor.close()
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines())
    norms = [line["norm"] for line in lines if isinstance(line.get("norm"), float)]
    assert norms == [pytest.approx(float(torch.cat([g.flatten() for g in by_hand()]).norm()), rel=1e-3)]


def in_two_parts(model, optimizer, tmp_path):
    for part in (slice(0, 3), slice(3, 8)):
        loss = (model(X[part]) - Y[part]).square().sum() / Y.numel()
        clipped(loss)
    optimizer.step()


def operation_by_operation(model, optimizer, tmp_path):
    with gg.error_clip(loss := loss_of(model), CLIP):
        gg.append_backward(loss, model, callback=lambda name, gradients: gradients)
    optimizer.step()


BESIDE = {
    "alone": (alone, None),
    "Guard": (beside_a_guard, 1e-2),
    "GradScaler": (beside_a_scaler, None),
    "Guard, GradScaler, counts": (beside_a_guard_a_scaler_and_counts, 1e-2),
    "Monitor": (beside_a_monitor, None),
    "accumulation": (in_two_parts, None),
    "append_backward": (operation_by_operation, None),
}


@pytest.mark.parametrize(("train", "max_norm"), BESIDE.values(), ids=BESIDE.keys())
def test_a_step_is_that_of_the_clipped_backward_by_hand(train, max_norm, tmp_path):
    model, optimizer = made()
    train(model, optimizer, tmp_path)
    torch.testing.assert_close([*model.parameters()], stepped(by_hand(), max_norm), rtol=1e-5, atol=1e-7)


def test_per_sample_clipping_of_a_clipped_backward_is_refused():
    """It is not linear: what a sample gives would depend on how many there are."""
    model, _ = made()
    gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    loss = loss_of(model)
    with pytest.raises(gg.errors.UnsupportedGradientError, match=r"within gg\.error_clip .* is not linear"):
        clipped(loss)


def test_autocast_in_train_mode_with_dropout_is_as_an_attached_clip_to_the_bit():
    found = []
    for block in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        with gg.error_clip(loss, CLIP) if block else nullcontext():
            (loss if block else gg.attach_error_clip(loss, CLIP)).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert all(g.any() for g in found[0])

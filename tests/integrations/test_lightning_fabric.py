"""`guard_fabric`: every step of a Fabric loop is that of a plain loop with a guard."""

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError, UnsupportedGradientError

fabric_package = pytest.importorskip("lightning.fabric", reason="lightning is not installed")

from lightning.fabric.plugins import MixedPrecision  # noqa: E402
from lightning.fabric.strategies import DeepSpeedStrategy, SingleDeviceStrategy  # noqa: E402

from gradguard.integrations.lightning import guard_fabric  # noqa: E402

STEPS = 8

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step, bad):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, generator=generator)
    return x * torch.nan if step in bad else x, torch.randn(4, 1, generator=generator) * (1 + 4 * (step % 3))


def by_hand(optimizer, clipper, bad=()):
    model = network()
    ours = OPTIMIZERS[optimizer](model.parameters())
    guard = gg.Guard(ours, clipper, model=model)
    for step in range(STEPS):
        x, y = batch(step, bad)
        ours.zero_grad()
        (model(x) - y).square().sum().backward()
        ours.step()
    return [p.detach() for p in model.parameters()], guard


def fabric_with(**arguments):
    return fabric_package.Fabric(accelerator="cpu", devices=1, **arguments)


def set_up(fabric, optimizer, clipper, **options):
    model = network()
    model, ours = fabric.setup(model, OPTIMIZERS[optimizer](model.parameters()))
    return model, ours, guard_fabric(fabric, model, ours, clipper, **options)


def train(fabric, model, optimizer, steps=range(STEPS), bad=()):
    for step in steps:
        x, y = batch(step, bad)
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().sum())
        optimizer.step()


def scaled(scale):
    """float32 under a scale that is a power of two: the weights must be those without any scaler."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
    plugin._desired_input_dtype = torch.float32
    plugin.forward_context = lambda: torch.autocast("cpu", enabled=False)
    return plugin


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_step_is_that_of_a_plain_loop(optimizer):
    fabric = fabric_with()
    model, ours, guard = set_up(fabric, optimizer, gg.ClipByMedian(k=0.0, warmup=2))
    train(fabric, model, ours, bad=[3])
    expected, plain = by_hand(optimizer, gg.ClipByMedian(k=0.0, warmup=2), bad=[3])
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=0, atol=0)
    assert (guard.steps, guard.skipped_steps) == (STEPS, 1)
    assert guard.last.names == plain.last.names
    assert float(guard.last.norm) == float(plain.last.norm)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_scale_changes_nothing_also_where_the_optimizer_is_fused(optimizer):
    fabric = fabric_with(plugins=[scaled(1024.0)])
    model, ours, guard = set_up(fabric, optimizer, gg.ClipByGlobalNorm(0.5))
    train(fabric, model, ours, bad=[3])
    expected, plain = by_hand(optimizer, gg.ClipByGlobalNorm(0.5), bad=[3])
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-6, atol=1e-7)
    assert float(guard.last.norm) == pytest.approx(float(plain.last.norm), rel=1e-5)
    assert (guard.steps, guard.skipped_steps) == (STEPS, 1)
    assert fabric.strategy.precision.scaler.get_scale() == 512.0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_fabrics_own_precisions(precision):
    fabric = fabric_with(plugins=[MixedPrecision("16-mixed", "cpu")]) if precision == "16-mixed" else None
    fabric = fabric or fabric_with(precision=precision)
    model, ours, guard = set_up(fabric, "AdamW, fused", gg.ClipByGlobalNorm(0.5))
    train(fabric, model, ours)
    expected = by_hand("AdamW, fused", gg.ClipByGlobalNorm(0.5))[1]
    assert guard.steps == STEPS
    assert float(guard.last.norm) == pytest.approx(float(expected.last.norm), rel=0.05)


def test_a_checkpoint_of_fabric_holds_the_guard(tmp_path):
    fabric = fabric_with()
    model, ours, guard = set_up(fabric, "AdamW", gg.ClipByMedian(k=0.0, warmup=2))
    train(fabric, model, ours, range(4))
    fabric.save(tmp_path / "half.ckpt", {"model": model, "optimizer": ours, "guard": guard})
    train(fabric, model, ours, range(4, STEPS))
    again, its, resumed = set_up(fabric, "AdamW", gg.ClipByMedian(k=0.0, warmup=2))
    fabric.load(tmp_path / "half.ckpt", {"model": again, "optimizer": its, "guard": resumed})
    assert resumed.steps == 4
    train(fabric, again, its, range(4, STEPS))
    torch.testing.assert_close(list(again.parameters()), list(model.parameters()), rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict(), guard.state_dict(), rtol=0, atol=0)


def test_the_optimizer_inside_will_do_and_a_module_need_not_be_named():
    fabric = fabric_with()
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    model, ours = fabric.setup(model, inner)
    guard = guard_fabric(fabric, None, inner, gg.ClipByGlobalNorm(0.5), nonfinite="raise")
    with pytest.raises(NonFiniteGradientError, match=r"param_groups\[0\]"):
        train(fabric, model, ours, bad=[0])
    assert guard.optimizer is inner
    guard.detach()
    train(fabric, model, ours)


@pytest.mark.parametrize("arguments", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_fabrics_own_clip_is_refused_beside_a_guard_and_only_there(arguments):
    fabric = fabric_with()
    model, ours, guard = set_up(fabric, "SGD", gg.ClipByGlobalNorm(0.5))
    other = network()
    other, others = fabric.setup(other, OPTIMIZERS["SGD"](other.parameters()))
    for one in (model, other):
        fabric.backward(one(torch.ones(4, 3)).sum())
    before = [p.grad.clone() for p in model.parameters()]
    for optimizer in (ours, ours.optimizer):
        with pytest.raises(InvalidValueError, match=r"fabric\.clip_gradients was called with .* that a Guard clips"):
            fabric.clip_gradients(model, optimizer, **arguments)
    torch.testing.assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0)
    fabric.clip_gradients(other, others, **arguments)
    guard.detach()
    fabric.clip_gradients(model, ours, **arguments)


def test_the_wrapped_module_has_the_names_of_the_model():
    model = fabric_with().setup_module(network())
    model(torch.ones(4, 3)).sum().backward()
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert gg.ClipByGlobalNorm(1.0)(model).names == names
    assert "_forward_module.0.weight" in dict(model.named_parameters())


def test_arguments_in_the_wrong_order_are_refused():
    fabric = fabric_with()
    model, ours, guard = set_up(fabric, "SGD", gg.ClipByGlobalNorm(0.5))
    guard.detach()
    with pytest.raises(InvalidTypeError, match=r"module is FabricSGD.*Type: guard_fabric\(fabric, module, optimizer"):
        guard_fabric(fabric, ours, model, gg.ClipByGlobalNorm(0.5))
    with pytest.raises(InvalidTypeError, match=r"optimizer is .*Module.*expected a torch\.optim\.Optimizer"):
        guard_fabric(fabric, model, model, gg.ClipByGlobalNorm(0.5))


def test_deepspeed_is_refused():
    class Engine(SingleDeviceStrategy):
        """What the real one cannot be here, where its package is not installed."""

    Engine.__name__ = DeepSpeedStrategy.__name__
    fabric = fabric_package.Fabric(strategy=Engine(accelerator=fabric_package.accelerators.CPUAccelerator()))
    with pytest.raises(UnsupportedGradientError, match="under DeepSpeed the engine owns the gradients"):
        guard_fabric(fabric, network(), torch.optim.SGD(network().parameters()), gg.ClipByGlobalNorm(1.0))


def test_a_guard_by_hand_on_fabrics_optimizer_names_the_call():
    optimizer = fabric_with().setup_optimizers(OPTIMIZERS["SGD"](network().parameters()))
    with pytest.raises(InvalidTypeError, match=r"pass wrapper\.optimizer.*guard_fabric\(fabric, module, optimizer"):
        gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    gg.Guard(optimizer.optimizer, gg.ClipByGlobalNorm(1.0)).detach()

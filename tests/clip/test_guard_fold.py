"""The multiply inside the optimizer's kernel: the same step, nothing left behind, nothing read from the device."""

import pytest
import torch
from guarded import FOLDING, MAX_NORM, PLAIN, assert_same, clipper, held, model, put_gradients, spoil
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradguard as gg
from gradguard import ClipByGlobalNorm, ClipByValue, Guard
from gradguard.clip.optimizer_proxy import OptimizerProxy
from gradguard.errors import UnsupportedGradientError


@pytest.fixture
def folds(monkeypatch) -> list:
    """The coefficients that went into a kernel."""
    seen, fold = [], OptimizerProxy.fold
    monkeypatch.setattr(OptimizerProxy, "fold", lambda self, c, scale: seen.append(float(c)) or fold(self, c, scale))
    return seen


@pytest.fixture
def accelerator(monkeypatch):
    """Decide as on an accelerator, where Python may not look at values."""
    blind = lambda *tensors: False  # noqa: E731
    for name in (
        "tensors.norms",
        "tensors.scaling",
        "tensors.nonfinite",
        "clip.clipper",
        "clip.gradients",
        "clip.guard",
    ):
        monkeypatch.setattr(f"gradguard.{name}.are_readable", blind)


class NoRead(TorchDispatchMode):
    """Raises where a value of a tensor is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("the host reads a value")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._tolist, torch.Tensor.tolist = torch.Tensor.tolist, read  # which is no operation on the host
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        super().__exit__(*error)


def read(tensor):
    raise RuntimeError("the host reads a value")


def both(make, steps: int, dtype: torch.dtype = torch.float32, max_norm: float = MAX_NORM):
    """The same steps with a guard, and clipped by PyTorch before each."""
    ours, theirs = model().to(dtype), model().to(dtype)
    a, b = make(ours.parameters()), make(theirs.parameters())
    guard = Guard(a, ClipByGlobalNorm(max_norm))
    for step in range(steps):
        put_gradients(ours, step)
        put_gradients(theirs, step)
        a.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        b.step()
    return (ours, a, guard), (theirs, b)


@pytest.mark.parametrize("name", FOLDING)
def test_the_step_is_that_of_clip_then_step(name, folds):
    (ours, a, guard), (theirs, b) = both(FOLDING[name], steps=6)
    assert len(folds) == 6
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-7)
    assert_same(held(ours, a)[1:], held(theirs, b)[1:], 1e-6)
    gradients = [p.grad for p in ours.parameters()]
    assert float(gg.get_total_norm(gradients)) == pytest.approx(MAX_NORM, rel=1e-5, abs=0)  # written back clipped
    assert not hasattr(a, "grad_scale")
    assert not hasattr(a, "found_inf")
    assert bool(guard.last.clipped)


@pytest.mark.parametrize("name", FOLDING)
def test_weights_below_a_tenth_are_within_2e_8(name):
    """Dividing by 1/c rounds twice where multiplying by c rounds once: two of the last bits of a weight, or less."""
    ours, theirs = model(), model()
    a, b = FOLDING[name](ours.parameters()), FOLDING[name](theirs.parameters())
    Guard(a, clipper())
    for step in range(4):
        for net, optimizer in ((ours, a), (theirs, b)):
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(torch.linspace(-0.04, 0.04, p.numel()).view_as(p))
            put_gradients(net, step)
            if optimizer is b:
                gg.clip_grad_norm_(theirs, MAX_NORM)
            optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert float((p - q).detach().abs().max()) <= 2e-8


@pytest.mark.parametrize("name", FOLDING)
def test_a_clip_that_does_not_bind_is_the_plain_step_to_the_bit(name, folds):
    (ours, a, _), (theirs, b) = both(FOLDING[name], steps=4, max_norm=1e6)
    assert_same(held(ours, a), held(theirs, b))
    assert folds == []


def test_a_step_that_does_not_bind_is_not_divided_by_what_the_last_one_was(folds):
    ours, theirs = model(), model()
    a, b = FOLDING["SGD"](ours.parameters()), FOLDING["SGD"](theirs.parameters())
    rule = clipper()
    Guard(a, rule)
    for step, max_norm in enumerate((MAX_NORM, 1e6, MAX_NORM, 1e6)):
        put_gradients(ours, step)
        put_gradients(theirs, step)
        rule.max_norm = max_norm
        a.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        b.step()
    assert len(folds) == 2
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-6)


@pytest.mark.parametrize("name", FOLDING)
def test_the_device_path_takes_the_same_steps(name, folds, accelerator):
    (ours, a, _), (theirs, b) = both(FOLDING[name], steps=6)
    momentum = "momentum" in name or "dampening" in name
    assert len(folds) == 6
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-7)
    assert "momentum_buffer" in next(iter(a.state.values())) if momentum else True


@pytest.mark.parametrize("name", FOLDING)
def test_the_device_path_skips_too(name, accelerator):
    ours, theirs = model(), model()
    a, b = FOLDING[name](ours.parameters()), FOLDING[name](theirs.parameters())
    guard = Guard(a, clipper(), model=ours)
    for step in range(6):
        put_gradients(ours, step)
        if step in (0, 3, 4):
            spoil(ours)
        a.step()
        if step in (0, 3, 4):
            assert guard.last.culprits() == {"0.weight": None}
            continue
        put_gradients(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        b.step()
    assert guard.skipped_steps == 3
    assert guard.state_dict()["skipped_in_a_row"] == 0
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-7)
    assert_same(held(ours, a)[1], held(theirs, b)[1], 1e-6)


@pytest.mark.parametrize("name", FOLDING)
def test_nothing_is_read_from_the_device(name, accelerator, monkeypatch):
    net = model()
    optimizer = FOLDING[name](net.parameters())
    guard = Guard(optimizer, clipper())
    # which reads a CPU tensor at once, and a GPU's later
    monkeypatch.setattr("gradguard.clip.guard_counts.LateReader.push", lambda self, values: None)
    put_gradients(net, 0)
    optimizer.step()  # makes the state, and reads for the momentum of SGD
    put_gradients(net, 1)
    with NoRead():
        optimizer.step()
    assert guard.skipped_steps == 0


def test_the_first_step_of_sgd_with_momentum_reads_one_number(accelerator):
    net = model()
    optimizer = FOLDING["SGD, momentum"](net.parameters())
    Guard(optimizer, clipper())
    put_gradients(net, 0)
    with NoRead(), pytest.raises(RuntimeError, match="the host reads a value"):
        optimizer.step()


class BrokenKernelError(RuntimeError):
    pass


@pytest.mark.parametrize("name", FOLDING)
def test_nothing_stays_when_the_step_raises(name, monkeypatch):
    net = model()
    optimizer = FOLDING[name](net.parameters())
    Guard(optimizer, clipper())
    kernels = {"Adam": "_fused_adam_", "AdamW": "_fused_adamw_", "SGD": "_fused_sgd_", "Adagrad": "_fused_adagrad_"}
    kernel = kernels[name.split(",")[0]]
    true_kernel = getattr(torch, kernel)

    def fail(*args, grad_scale, **kwargs):
        assert float(grad_scale) > 1
        raise BrokenKernelError("in the kernel")

    monkeypatch.setattr(torch, kernel, fail)
    put_gradients(net, 0)
    with pytest.raises(BrokenKernelError, match="in the kernel"):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    monkeypatch.setattr(torch, kernel, true_kernel)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_elsewhere_it_clips_before_the_step(name, folds):
    (ours, a, _), (theirs, b) = both(PLAIN[name], steps=4)
    assert folds == []
    assert_same(held(ours, a), held(theirs, b), 2e-6)


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [(torch.float64, ClipByGlobalNorm(MAX_NORM)), (torch.float32, ClipByValue(0.01))],
    ids=["float64 would be rounded", "a rule that is not one number"],
)
def test_what_cannot_be_folded_is_not(dtype, rule, folds):
    net, twin = model().to(dtype), model().to(dtype)
    a, b = (torch.optim.AdamW(m.parameters(), fused=True) for m in (net, twin))
    Guard(a, rule)
    put_gradients(net, 0)
    put_gradients(twin, 0)
    a.step()
    if dtype is torch.float64:
        nn.utils.clip_grad_norm_(twin.parameters(), MAX_NORM)
    else:
        nn.utils.clip_grad_value_(twin.parameters(), 0.01)
    b.step()
    assert folds == []
    assert_same(held(net, a), held(twin, b), 1e-12)


def test_a_group_that_is_not_fused_is_clipped_before(folds):
    net = model()
    groups = [{"params": net[0].parameters(), "fused": True}, {"params": net[2].parameters(), "fused": False}]
    optimizer = torch.optim.AdamW(groups)
    Guard(optimizer, clipper())
    put_gradients(net, 0)
    optimizer.step()
    assert folds == []


def test_gradients_on_two_devices_are_not_folded():
    """The copy of the divisor to the CPU may be read before it has landed."""
    stand_in = OptimizerProxy(torch.optim.AdamW(model().parameters(), fused=True))
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    assert stand_in.can_fold([here, here])
    assert not stand_in.can_fold([here, there])


@pytest.mark.parametrize("policy", ["skip", "propagate", "raise", "zero"])
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e6])
def test_a_scale_that_the_user_has_set_stays(policy, max_norm):
    ours, theirs = model(), model()
    a, b = FOLDING["SGD"](ours.parameters()), FOLDING["SGD"](theirs.parameters())
    Guard(a, ClipByGlobalNorm(max_norm), nonfinite=policy)
    a.grad_scale = torch.tensor(64.0)
    put_gradients(ours, 0, scale=64.0)
    put_gradients(theirs, 0)
    a.step()
    nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    b.step()
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-6)
    assert float(a.grad_scale) == 64.0


def test_half_precision_is_folded(folds):
    (ours, a, _), (theirs, b) = both(FOLDING["AdamW"], steps=3, dtype=torch.bfloat16)
    assert len(folds) == 3
    assert_same(held(ours, a)[0], held(theirs, b)[0], 2e-2)


def test_a_threshold_of_zero_makes_gradients_zero(folds):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    before = [p.detach().clone() for p in net.parameters()]
    Guard(optimizer, ClipByGlobalNorm(0.0))
    put_gradients(net, 0)
    optimizer.step()
    assert folds == [0.0]
    assert_same([p.detach() for p in net.parameters()], before)


def test_what_a_step_sets_on_itself_reaches_the_optimizer():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    Guard(optimizer, clipper())
    put_gradients(net, 0)
    assert optimizer._need_device_dtype_check_for_fused
    optimizer.step()
    assert not optimizer._need_device_dtype_check_for_fused


@pytest.mark.parametrize("name", FOLDING)
@pytest.mark.parametrize("blind", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_a_gradient_near_the_largest_number_is_neither_lost_nor_too_large(name, nonfinite, blind, request):
    """One over the coefficient is beyond float32 there, which a device tells too late for another pass."""
    if blind:
        request.getfixturevalue("accelerator")
    weight = nn.Parameter(torch.ones(1000))
    optimizer = FOLDING[name]([weight])
    guard = Guard(optimizer, ClipByGlobalNorm(1.0), nonfinite=nonfinite)
    for _ in range(2):
        weight.grad = torch.full_like(weight, 3e38)
        optimizer.step()
    is_skipped = blind and nonfinite == "skip"
    assert guard.skipped_steps == (2 if is_skipped else 0)
    assert (weight == 1).all() if is_skipped else (weight < 1).all()
    weight.grad = torch.full_like(weight, 1e36)  # which the kernel divides
    optimizer.step()
    assert guard.skipped_steps == (2 if is_skipped else 0)
    assert (weight < 1).all()


STRIDES = {
    "expanded rows": lambda draws: torch.randn(1, 4, generator=draws).expand(3, 4),
    "expanded columns": lambda draws: torch.randn(3, 1, generator=draws).expand(3, 4),
    "one number": lambda draws: torch.randn((), generator=draws).expand(3, 4),
    "transposed": lambda draws: torch.randn(4, 3, generator=draws).t(),
    "every second column": lambda draws: torch.randn(3, 8, generator=draws)[:, ::2],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("kind", FOLDING)
def test_gradients_laid_out_unlike_their_parameters_give_the_step_of_an_optimizer_that_is_not_fused(kind, strides):
    """PyTorch's fused kernel takes wrong elements of them, and writes beyond the memory of expanded ones."""
    draws = torch.Generator().manual_seed(0)
    ours, plain = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    fused, single = FOLDING[kind]([ours]), FOLDING[kind]([plain])
    for group in single.param_groups:
        group["fused"] = False
    Guard(fused, ClipByGlobalNorm(0.3))
    for _ in range(4):
        gradient = STRIDES[strides](draws)
        ours.grad, plain.grad = gradient, gradient.clone()
        gg.clip_grad_norm_(plain, 0.3)
        fused.step()
        single.step()
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


def test_a_fused_step_of_a_parameter_with_gaps_in_memory_is_refused():
    weight = nn.Parameter(torch.ones(3, 8)[:, ::2])
    optimizer = torch.optim.AdamW([weight], fused=True)
    Guard(optimizer, ClipByGlobalNorm(0.3))
    weight.grad = torch.ones(3, 4)
    with pytest.raises(UnsupportedGradientError, match=r"has the strides \(8, 2\).*Expected fused=False"):
        optimizer.step()
    assert (weight == 1).all()

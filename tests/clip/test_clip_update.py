"""`ClipUpdate` and `ClipByRMS` against twins in float64 that keep the weights, step, and write what the rule leaves."""

import copy
import math

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW, a tensor for lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.02),
    "two groups": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.5}, {"params": p[2:], "lr": 0.03}], lr=0.1),
    "two tensors for lr": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": torch.tensor(0.02)}, {"params": p[2:], "lr": torch.tensor(0.003)}], foreach=False
    ),
    "a group that stands still, a tensor for lr": lambda p: torch.optim.SGD(
        [{"params": p[:2], "lr": torch.tensor(0.0)}, {"params": p[2:], "lr": torch.tensor(0.2)}], foreach=False
    ),
    "a group that stands still": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.0}, {"params": p[2:]}], lr=0.2),
}
STEPS = 6


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def backward(model, step):
    """Gradients of another size at each step, of which one is far larger than those before."""
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=draws).to(next(model.parameters()).dtype)
    model.zero_grad()
    (model(x).square().mean() * (300.0 if step == 3 else 1.0 + 0.2 * step)).backward()


def by_rms(updates, bound):
    roots = [math.sqrt(u.numel()) for u in updates]
    return [u * min(1.0, bound * root / (float(u.norm()) + 1e-6)) for u, root in zip(updates, roots, strict=True)]


def by_global_norm(updates, bound):
    norm = math.sqrt(sum(float(u.square().sum()) for u in updates))
    return [u * min(1.0, bound / (norm + 1e-6)) for u in updates]


def by_value(updates, bound):
    return [u.clamp(-bound, bound) for u in updates]


RULES = {
    "rms": (lambda bound: gg.ClipByRMS(bound), by_rms),
    "global norm": (lambda bound: gg.ClipByGlobalNorm(6 * bound), lambda u, bound: by_global_norm(u, 6 * bound)),
    "value": (lambda bound: gg.ClipByValue(bound), by_value),
    "chain": (
        lambda bound: gg.Chain(gg.ClipByValue(2 * bound), gg.ClipByGlobalNorm(3 * bound)),
        lambda u, bound: by_global_norm(by_value(u, 2 * bound), 3 * bound),
    ),
    "chain, the first idle": (
        lambda bound: gg.Chain(gg.ClipByValue(1e9), gg.ClipByGlobalNorm(3 * bound)),
        lambda u, bound: by_global_norm(u, 3 * bound),
    ),
    "chain in a group": (
        lambda bound: gg.Groups({"*": gg.Chain(gg.ClipByValue(1e9), gg.ClipByGlobalNorm(3 * bound))}),
        lambda u, bound: by_global_norm(u, 3 * bound),
    ),
}


def twin_step(optimizer, rule, bound):
    """Step, then write in float64 what the rule leaves of each update, in units of its group's learning rate."""
    places = [(p, g) for g in optimizer.param_groups for p in g["params"]]
    before = [p.detach().double().clone() for p, _ in places]
    rates = [float(g["lr"]) for _, g in places]
    optimizer.step()
    after = [p.detach().double() for p, _ in places]
    updates = [(b - a) / (r or 1.0) for b, a, r in zip(before, after, rates, strict=True)]
    for (p, _), b, r, u, left in zip(places, before, rates, updates, rule(updates, bound), strict=True):
        p.data.copy_(torch.where(left == u, p.detach().double(), b - left * r))


@pytest.mark.sampled(114)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_step_is_that_of_the_twin(name, rule, dtype):
    model, twin = network(dtype), network(dtype)
    ours, theirs = (OPTIMIZERS[name](list(m.parameters())) for m in (model, twin))
    bound = {"Muon": 0.05, "Adadelta": 1e-3}.get(name, 0.3)
    make, by_rule = RULES[rule]
    update, bound_on = gg.ClipUpdate(ours, make(bound)), 0
    for step in range(STEPS):
        backward(model, step)
        backward(twin, step)
        gradients = [p.grad for p in model.parameters()]
        ours.step()
        twin_step(theirs, by_rule, bound)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            tolerance = {torch.float32: 3e-5, torch.float64: 1e-12}[dtype]
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
        bound_on += bool(update.last.clipped)
    assert bound_on > 0, "a case that clips nothing shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_clipped_keeps_its_bits(name, dtype):
    if dtype == torch.float16 and "SGD" not in name:
        pytest.skip("its eps is 0 in float16, so that weights become infinite")
    model, twin = network(dtype), network(dtype)
    ours, theirs = (OPTIMIZERS[name](list(m.parameters())) for m in (model, twin))
    gg.ClipUpdate(ours, gg.ClipByRMS(1e30))
    for step in range(3):
        backward(model, step)
        backward(twin, step)
        ours.step()
        theirs.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_a_tensor_that_is_clipped_leaves_the_bits_of_the_others():
    model, twin = network(), network()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    gg.ClipUpdate(ours)
    for m in (model, twin):
        for i, p in enumerate(m.parameters()):
            p.grad = torch.full_like(p, 100.0 if i == 1 else 0.7)
    start = [p.detach().clone() for p in model.parameters()]
    ours.step()
    theirs.step()
    for i, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
        if i == 1:
            torch.testing.assert_close(start[1] - p, torch.full_like(p, 0.1))
        else:
            assert torch.equal(p, q)


def test_bfloat16_weights_are_rounded_once_more():
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    gg.ClipUpdate(optimizer)
    weight.grad = torch.full_like(weight, 8.0)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full_like(weight, 0.5), rtol=2**-7, atol=0)


def test_weights_whose_gradients_have_another_dtype():
    class Descent(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_((group["lr"] * p.grad).to(p.dtype))

    first, second = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = Descent([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.5)
    for p, size in ((first, 4.0), (second, 0.7)):
        p.grad_dtype = torch.float32
        p.grad = torch.full((8,), size)
    gg.ClipUpdate(optimizer)
    optimizer.step()
    torch.testing.assert_close(first, torch.full_like(first, 0.5), rtol=2**-7, atol=0)
    assert torch.equal(second.detach(), torch.full((8,), 1 - 0.3 * 0.7, dtype=torch.bfloat16))


@pytest.mark.parametrize("rule", [gg.ClipByRMS, gg.ClipByValue, lambda bound: gg.ClipByGlobalNorm(2 * bound)])
def test_float16_updates_beyond_65504_rates_are_clipped_as_others(rule):
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    update = gg.ClipUpdate(optimizer, rule(1000.0))

    def leap(optimizer, *_):
        weight.data.sub_(80.0)  # 800,000 rates: a number that float16 does not have

    optimizer.register_step_pre_hook(leap)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full_like(weight, -0.1), rtol=2e-3, atol=0)
    assert not bool(update.last.nonfinite)
    assert float(update.last.norm) == pytest.approx(2 * 8e5, rel=1e-3)
    assert weight.grad.dtype == weight.grad_dtype == torch.float16


def test_the_scheduler_s_rate_of_each_step_counts():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 1.0, 0.1, 0.01][step])
    gg.ClipUpdate(optimizer)
    moved = []
    for _ in range(4):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 50.0)
        optimizer.step()
        moved.append(float((before - weight.detach())[0]))
        scheduler.step() if len(moved) < 4 else None
    assert moved == pytest.approx([0.0, 1.0, 0.1, 0.01], rel=1e-5)


@pytest.mark.parametrize("rate", [-0.1, torch.tensor(-0.1)])
@pytest.mark.parametrize("rule", [lambda: gg.ClipByRMS(1e6), lambda: gg.ClipByValue(1e6), lambda: gg.ClipAdaptive(1e6)])
def test_a_negative_rate_counts_by_its_size(rate, rule):
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gg.ClipUpdate(optimizer, rule())
    optimizer.param_groups[0]["lr"], weight.grad = rate, torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1.1, 2.1, 3.1]))


def test_a_negative_rate_is_clipped_by_its_size():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gg.ClipUpdate(optimizer)
    optimizer.param_groups[0]["lr"], weight.grad = -0.1, torch.full((4,), 7.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.1))


def test_a_step_in_inference_mode_does_not_stop_later_ones():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gg.ClipUpdate(optimizer)
    weight.grad = torch.full((4,), 7.0)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.2))


def test_a_group_that_comes_within_the_step_is_clipped_from_the_next_on():
    class Growing(torch.optim.SGD):
        def step(self):
            super().step()
            if len(self.param_groups) == 1:
                self.add_param_group({"params": [later]})

    first, later = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer = Growing([first], lr=0.1)
    gg.ClipUpdate(optimizer)
    for _ in range(2):
        first.grad, later.grad = torch.full((4,), 7.0), torch.full((4,), 7.0)
        optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((4,), -0.2))
    torch.testing.assert_close(later.detach(), torch.full((4,), -0.1))


def test_a_group_that_comes_after_the_weights_were_kept_is_clipped_from_the_next_step_on():
    first, later = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    first.grad, later.grad = torch.full((4,), 7.0), torch.full((4,), 100.0)
    optimizer = torch.optim.SGD([first], lr=0.1)
    update = gg.ClipUpdate(optimizer, gg.ClipByGlobalNorm(0.1))
    optimizer.register_step_pre_hook(lambda own, *_: own.add_param_group({"params": [later]}))
    optimizer.step()
    assert float(update.last.norm) == pytest.approx(14.0)
    assert torch.equal(later.grad, torch.full((4,), 100.0))
    torch.testing.assert_close(first.detach(), torch.full((4,), -0.005))


def test_what_the_clipper_refuses_is_refused_on_each_step_before_anything_moves():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gg.ClipUpdate(optimizer, gg.ClipAdaptive(0.1, exclude=[nn.Linear(3, 3)]), model=model)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, 9.0)
        with pytest.raises(gg.errors.InvalidValueError, match="exclude"):
            optimizer.step()
        assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("foreign", [True, False])
def test_a_step_that_a_guard_skips_has_no_update(guard_first, foreign):
    class Foreign(torch.optim.SGD):
        pass

    model = network()
    optimizer = (Foreign if foreign else torch.optim.SGD)(model.parameters(), lr=0.5, momentum=0.9)
    made = [lambda: gg.Guard(optimizer, gg.ClipByGlobalNorm(1e9)), lambda: gg.ClipUpdate(optimizer, gg.ClipByRMS(0.1))]
    kept = [make() for make in (made if guard_first else made[::-1])]
    for step in range(4):
        backward(model, step)
        before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == 2:
            next(model.parameters()).grad[0, 0] = math.nan
        optimizer.step()
        if step == 2:
            torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        else:
            moved = [
                float((p.detach() - b).square().mean().sqrt())
                for p, b in zip(model.parameters(), before[0].values(), strict=True)
            ]
            assert max(moved) <= 0.5 * 0.1 * 1.0001
            assert max(moved) > 0
    assert next(one for one in kept if isinstance(one, gg.Guard)).skipped_steps == 1


def test_under_a_grad_scaler_updates_are_those_of_unscaled_gradients():
    model, twin = network(), network()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    gg.ClipUpdate(ours, gg.ClipByRMS(0.2))
    gg.ClipUpdate(theirs, gg.ClipByRMS(0.2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        backward(twin, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad * scaler.get_scale() if scaler._scale is not None else q.grad * 2.0**10
        scaler.scale(torch.zeros(()))  # makes its scale
        if step == 2:
            next(model.parameters()).grad[0, 0] = math.inf
            before = [p.detach().clone() for p in model.parameters()]
        scaler.step(ours)
        scaler.update()
        if step == 2:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            model.load_state_dict(twin.state_dict())
        theirs.step() if step != 2 else None
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_all_evaluations_of_a_closure_make_one_update():
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([weight], lr=1.0, line_search_fn="strong_wolfe")
    update = gg.ClipUpdate(optimizer, gg.ClipByGlobalNorm(0.25))

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    optimizer.step(closure)
    assert float((weight.detach() - before).norm()) == pytest.approx(0.25, rel=1e-4)
    assert float(update.last.norm) == pytest.approx(float(before.norm()), rel=1e-3)


def test_optimizers_that_step_inside_backward():
    model, optimizers, updates = network(), {}, []
    for p in model.parameters():
        optimizers[p] = torch.optim.SGD([p], lr=1.0)
        updates.append(gg.ClipUpdate(optimizers[p], gg.ClipByRMS(0.01)))
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 3)
    for p, b in zip(model.parameters(), before, strict=True):
        assert float((p.detach() - b).square().mean().sqrt()) == pytest.approx(0.01, rel=1e-3)


def test_a_rule_for_all_is_refused_inside_backward_before_anything_moves():
    model = network()
    first = list(model.parameters())[-1]
    optimizer = torch.optim.SGD([first], lr=1.0)
    gg.ClipUpdate(optimizer, gg.ClipByGlobalNorm(0.01))
    first.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = first.detach().clone()
    with pytest.raises(UnsupportedGradientError, match="inside a backward pass"):
        backward(model, 0)
    assert torch.equal(first, before)


def test_adaptive_clipping_bounds_each_unit_s_update_by_its_weights_before_the_step():
    model = network(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gg.ClipUpdate(optimizer, gg.ClipAdaptive(0.01), model=model)
    backward(model, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    weight, start = model[0].weight, before[0]
    left = ((start - weight) / 0.5).norm(dim=1)
    torch.testing.assert_close(left, 0.01 * start.norm(dim=1), rtol=1e-6, atol=0)


def test_groups_are_chosen_by_the_model_s_names():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rules = gg.Groups({"2.*": gg.ClipByRMS(0.001)}, rest=gg.ClipByRMS(1e30))
    gg.ClipUpdate(optimizer, rules, model=model)
    backward(model, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        rms = float((p.detach() - before[name]).square().mean().sqrt())
        assert rms == pytest.approx(0.001, rel=1e-2) if name.startswith("2.") else rms > 0.01


def test_a_rule_that_raises_leaves_the_weights_as_the_optimizer_made_them():
    class Broken(gg.rules.Clipper):
        def decide(self, grads, scale=1.0):
            raise ZeroDivisionError("of the rule")

    model, twin = network(), network()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    gg.ClipUpdate(ours, Broken())
    backward(model, 0)
    backward(twin, 0)
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError, match="of the rule"):
        ours.step()
    theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_the_state_goes_on_after_a_resume():
    def run(steps, resume_at=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        update = gg.ClipUpdate(optimizer, gg.ClipByMedian(warmup=2))
        for step in range(steps):
            if step == resume_at:
                state = copy.deepcopy(update.state_dict())
                update.detach()
                update = gg.ClipUpdate(optimizer, gg.ClipByMedian(warmup=2))
                update.load_state_dict(state)
            backward(model, step)
            optimizer.step()
        return list(model.parameters()), update.state_dict()

    torch.testing.assert_close(run(STEPS), run(STEPS, 2), rtol=0, atol=0)


def test_nothing_happens_after_detach():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = gg.ClipUpdate(optimizer)
    update.detach()
    update.detach()
    weight.grad = torch.full_like(weight, 5.0)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((3,), -5.0))
    assert update.last is None


def test_nan_gradients_without_a_guard_reach_the_weights_and_are_told():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = gg.ClipUpdate(optimizer)
    weight.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert weight.isnan().any()
    assert bool(update.last.nonfinite)


def test_a_parameter_without_a_gradient_stays():
    used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    gg.ClipUpdate(optimizer)
    used.grad = torch.ones(3)
    optimizer.step()
    assert unused.grad is None
    assert torch.equal(unused.detach(), torch.ones(3))


def test_a_parameter_that_comes_later_is_clipped_too():
    first, later = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([first], lr=1.0)
    update = gg.ClipUpdate(optimizer)
    first.grad = torch.full((3,), 9.0)
    optimizer.step()
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.full((3,), 9.0)
    optimizer.step()
    torch.testing.assert_close(later.detach(), torch.full((3,), -1.0))
    assert len(update.last.names) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in Inductor itself
def test_a_compiled_step_is_clipped():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gg.ClipUpdate(optimizer)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    weight.grad = torch.full((3,), 9.0)
    step()
    torch.compiler.reset()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -1.0))


def optimizer_without_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def one_rule_for_two():
    optimizer, rule = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), gg.ClipByMedian()
    kept = gg.Guard(optimizer, rule)
    gg.ClipUpdate(kept.optimizer, rule)


SGD = lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)  # noqa: E731


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: gg.ClipUpdate(optimizer_without_rate()), InvalidValueError, "lr=None"),
        (lambda: gg.ClipUpdate(nn.Linear(1, 1)), InvalidTypeError, "whose step"),
        (lambda: gg.ClipUpdate(SGD(), 1.0), InvalidTypeError, "clipper is float"),
        (lambda: gg.ClipUpdate(SGD(), model=nn.Linear(2, 1)), InvalidValueError, "none of the optimizer's"),
        (one_rule_for_two, InvalidValueError, "belongs to the Guard of this optimizer"),
        (lambda: copy.deepcopy(gg.ClipUpdate(SGD())), InvalidTypeError, "cannot be copied"),
        (lambda: gg.ClipUpdate(SGD()).load_state_dict({}), InvalidValueError, "not the state of a ClipUpdate"),
        (lambda: gg.ClipUpdate(SGD()).load_state_dict(None), InvalidValueError, "got None"),
        (lambda: gg.ClipByRMS(-1.0), InvalidValueError, "max_rms"),
        (lambda: gg.ClipByRMS("1"), InvalidTypeError, "max_rms"),
    ],
)
def test_what_cannot_work_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_it_says_how_it_was_made():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert repr(gg.ClipUpdate(optimizer, model=model)) == "ClipUpdate(optimizer, ClipByRMS(), model=model)"


def test_a_rule_that_remembers_is_free_for_another_optimizer_after_detach():
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1) for _ in range(2)]
    rule = gg.ClipFraction(0.05)
    first = gg.ClipUpdate(optimizers[0], rule)
    with pytest.raises(InvalidValueError, match="belongs to the ClipUpdate of another optimizer"):
        gg.ClipUpdate(optimizers[1], rule)
    first.detach()
    assert gg.ClipUpdate(optimizers[1], rule).clipper is rule

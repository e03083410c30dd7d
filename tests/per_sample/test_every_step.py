"""Exact, or refused, on every step: models, hooks and batches that change after the first."""

import contextlib
import copy
import random
import re
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard import torch_private
from gradguard.errors import UnsupportedGradientError
from per_sample.changing_models import DOUBLE, MIX, SEEN, WEIGHTS, WITNESSED, fresh, restore
from reference import per_sample_gradients

B = 5
MIXED = "mix samples|mixes samples|not linear"


@pytest.fixture(autouse=True)
def _classes_as_before():
    torch.manual_seed(0)
    yield
    restore()


def clipper_of(model, **options):
    return gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf), **options)


def squares(output):
    return output.flatten(1).square().sum(1)


def steps(model, clipper, count):
    for _ in range(count):
        step(model, clipper, batch())


def step(model, clipper, x):
    model.zero_grad()
    squares(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def several_steps(model, clipper, count):
    for _ in range(count):
        step(model, clipper, batch())


def assert_exact(model, found, x):
    """``found`` is the average of what samples give alone."""
    rows = per_sample_gradients(model, lambda s: squares(model(s[0])).sum(), [(x[i : i + 1],) for i in range(len(x))])
    for name, value in rows.items():
        torch.testing.assert_close(found[name], value.mean(0), rtol=1e-10, atol=1e-12, msg=name)


def batch(size=B):
    return torch.randn(size, 4, dtype=torch.float64)


AT = [pytest.param(2, id="2"), *[pytest.param(at, marks=pytest.mark.exhaustive, id=str(at)) for at in (3, 7)]]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", SEEN)
def test_a_change_that_mixes_samples_is_refused_on_that_very_step(name, at):
    model = fresh()
    clipper = clipper_of(model)
    for _ in range(at - 1):
        step(model, clipper, batch())
    SEEN[name](model, MIX)
    for _ in range(2):  # trying again does not help
        with pytest.raises(UnsupportedGradientError, match=MIXED) as refused:
            step(model, clipper, batch())
        assert "was run alone" not in str(refused.value)  # by the trial, whether or not a witness is due
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", WITNESSED)
def test_a_change_that_nothing_shows_is_found_by_the_next_witness(name, at):
    model = fresh()
    clipper = clipper_of(model)
    for _ in range(at - 1):
        step(model, clipper, batch())
    WITNESSED[name](model, MIX)
    latest = {2: 2, 3: 4, 7: 8}[at]
    words = r"on mini-batch (\d+), sample [0-4] was run alone.*verified on mini-batch (\d+)\. Nothing"
    with pytest.raises(UnsupportedGradientError, match=words) as refused:
        steps(model, clipper, latest + 1 - at)
    found, good = map(int, re.search(words, str(refused.value)).groups())
    assert good < at <= found <= latest


@pytest.mark.sampled(8)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", [*SEEN, *WITNESSED])
def test_a_change_that_keeps_samples_apart_stays_exact(name, at):
    model = fresh()
    clipper = clipper_of(model)
    for _ in range(at - 1):
        step(model, clipper, batch())
    (SEEN | WITNESSED)[name](model, DOUBLE)
    for _ in range(8):
        x = batch()
        found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


def test_a_rate_of_dropout_is_read_on_the_real_step():
    """The trial has other rates."""

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 3), nn.Dropout(0.0)

        def forward(self, x):
            return self.drop(self.layer(x)) - (x.mean() if self.drop.p == 1e-9 else 0)

    model = Reading().double()
    clipper = clipper_of(model)
    step(model, clipper, batch())
    model.drop.p = 1e-9
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        step(model, clipper, batch())


def test_a_hook_on_all_modules():
    model = fresh()
    clipper = clipper_of(model)
    step(model, clipper, batch())
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output - output.mean(0) if isinstance(module, nn.LayerNorm) else None
    )
    try:
        with pytest.raises(UnsupportedGradientError, match=MIXED):
            step(model, clipper, batch())
    finally:
        hook.remove()


def test_a_branch_for_large_batches():
    model = fresh()
    model.large = MIX
    clipper = clipper_of(model)
    for size in (4, 3, 4):
        step(model, clipper, batch(size))
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        step(model, clipper, batch(6))


class CentredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g - 0.5 * g.mean(0) if len(g) > 4 else g


class HalvedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x * (0.5 if len(g) > 4 else 1)


def largest(g):
    """Only the largest entries of the batch: none is left out of eight samples."""
    return g if g.numel() <= 64 else g * (g.abs() >= g.abs().flatten().topk(64).values[-1])


class OnlyInBackward(nn.Module):
    """From some size of the batch on, its backward mixes samples; its forward does not."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 8), nn.Linear(8, 3), kind
        if kind == "module hook":
            change = lambda m, got, given: (got[0] - 0.5 * got[0].mean(0) if len(given[0]) > 4 else got[0],)  # noqa: E731
            self.b.register_full_backward_hook(change)

    def forward(self, x):
        h = HalvedWeight.apply(x, self.a.weight) if self.kind == "weight halved" else self.a(x)
        h = h.tanh()
        change = {
            "largest": largest,
            "centred": lambda g: g - 0.5 * g.mean(0) if len(g) > 4 else g,
            "scaled": lambda g: g * min(1.0, 4 / len(g)),
            "last row": lambda g: torch.cat([g[:-1], g[-1:] + g[:1]]) if len(g) > 4 else g,
        }.get(self.kind)
        if h.requires_grad and change:
            h.register_hook(change)
        return self.b(CentredBackward.apply(h) if self.kind == "function" else h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kind", ["largest", "centred", "scaled", "last row", "module hook", "function", "weight halved"]
)
def test_a_backward_that_mixes_samples_from_a_size_on(kind, dtype):
    small, large = (8, 16) if kind == "largest" else (4, 40)
    clipper = clipper_of(model := OnlyInBackward(kind).to(dtype))
    for _ in range(2):
        step(model, clipper, batch(small).to(dtype))
    with pytest.raises(UnsupportedGradientError, match=r"mix samples|mixes samples|do not add up"):
        step(model, clipper, batch(large).to(dtype))
    step(model, clipper, batch(small).to(dtype))


def centred(g):
    return g - g.mean(0)


def rounded(t):
    scale = t.detach().abs().amax() / 3
    return (t.detach() / scale).round() * scale if t.dim() == 2 and t.shape[0] <= 8 else t


class Chosen(torch.autograd.Function):
    """Centres the gradient over the batch if it was told so, by a word or a number."""

    @staticmethod
    def forward(ctx, h, how):
        ctx.how = how
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return (centred(g) if ctx.how in ("batch", 0.5) else g), None


def _saves_rounded(h, on):
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t) if on else contextlib.nullcontext():
        return h * h.exp()


def _hooks_its_node(h, on):
    if on and h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda g: (centred(g[0]),))
    return h * 1


def _in_a_thread(h, on):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: h - h.mean(0) if on else h * 1).result()


LATE = {
    "what is saved": _saves_rounded,
    "a hook on a node": _hooks_its_node,
    "a word": lambda h, on: Chosen.apply(h, "batch" if on else "none"),
    "a number": lambda h, on: Chosen.apply(h, 0.5 if on else 0.25),
    "a thread": _in_a_thread,
}
"""Changes that show in no argument of a torch function."""


@pytest.mark.parametrize("name", LATE)
def test_a_change_beside_all_operations_is_found_on_that_very_step(name):
    torch.manual_seed(0)
    state = {"on": False}
    change = LATE[name]

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.last(change(torch.tanh(self.first(x)), state["on"]))

    model = Late().double()
    twin, clipper = copy.deepcopy(model), clipper_of(model)
    for number in range(5):  # the fifth mini-batch has no witness
        x = torch.randn(B, 3, dtype=torch.float64)
        state["on"] = number == 4
        try:
            found = step(model, clipper, x)
        except UnsupportedGradientError:
            assert number == 4
            return
        assert_exact(twin, found, x)


class GroupedBy4(nn.Module):
    """Samples change places inside where their number is a multiple of four."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        groups = 4 if len(x) % 4 == 0 else 1
        h = self.a(x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1)).tanh()
        return self.b(h.unflatten(0, (-1, groups)).transpose(0, 1).flatten(0, 1))


@pytest.mark.parametrize("sizes", [(6, 6, 8, 6, 12), (8, 6, 8)])
def test_an_order_of_samples_that_begins_at_a_size_is_exact(sizes):
    clipper = gg.PerSampleGradientClipper(model := GroupedBy4().double(), gg.FlatNormClipper(0.5))
    twin = GroupedBy4().double()
    twin.load_state_dict(model.state_dict())
    for size in sizes:
        x = batch(size)
        found = step(model, clipper, x)
        rows = per_sample_gradients(twin, lambda s: squares(twin(s[0])).sum(), [(x[i : i + 1],) for i in range(size)])
        norms = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0).sqrt()
        for name, row in rows.items():
            expected = torch.tensordot((0.5 / norms).clamp(max=1), row, 1) / size
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


def test_a_new_size_with_a_sample_that_is_not_finite_is_exact():
    clipper = clipper_of(model := nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double())
    step(model, clipper, batch(4))
    for size, bad in ((7, 0), (9, 4), (10, 9)):
        x = batch(size)
        x[bad, 1] = torch.inf
        found = step(model, clipper, x)
        good = [i for i in range(size) if i != bad]
        twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        twin.load_state_dict(model.state_dict())
        (squares(twin(x[good])).sum() / size).backward()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-12)
        assert clipper.statistics.nonfinite == 1


@pytest.mark.parametrize("effect", [DOUBLE, MIX])
def test_something_that_a_step_counter_turns_on(effect):
    model = fresh()
    model.later = effect
    clipper = clipper_of(model)
    for _ in range(4):
        step(model, clipper, batch())
    if effect == MIX:
        with pytest.raises(UnsupportedGradientError, match=MIXED):
            several_steps(model, clipper, 4)
        return
    for _ in range(20):
        x = batch()
        found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


def test_parameters_that_are_tied_later():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    clipper = clipper_of(model)
    squares(model(torch.randn(B, 4))).mean().backward()
    clipper.clip_and_accumulate()
    model[1].weight = model[0].weight
    with pytest.raises(UnsupportedGradientError, match=r"tied after the clipper was made.*make a new clipper"):
        model(torch.randn(B, 4))


def count_trials(clipper):
    rehearse, trials = clipper._tracker._rehearse, []

    def counting(tracker, call):
        trials.append(call)
        rehearse(tracker, call)

    clipper._tracker._rehearse = counting
    return trials


class Busy(nn.Module):
    """Counts, keeps, flips and appends in each forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.flips, self.seen = nn.Linear(4, 3), 0, False, []
        self.shape, self.kept, self.share, self.table = [0, 0], None, 0.0, {}

    def forward(self, x):
        self.calls += 1
        self.share += 0.1
        self.flips = not self.flips
        self.shape = list(x.shape)
        self.seen.append(self.calls)
        self.table[self.calls] = self.calls
        self.kept = x
        return self.layer(x)


def test_what_counts_is_tried_out_a_few_times_only():
    model = Busy().double()
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    for _ in range(40):
        x = batch()
        found = step(model, clipper, x)
    assert len(trials) <= 8
    clipper.detach()
    assert_exact(model, found, x)


def count(module, args):
    module.calls = getattr(module, "calls", 1000) + 1


def keep(module, args):
    module.kept, module.name = args[0], str(len(args))


@pytest.mark.parametrize("hook", [count, keep])
def test_what_cannot_change_the_state_costs_no_second_search_for_layers(hook, monkeypatch):
    """A counter that counts no more, and values of the form that they had."""
    searches, search = [0], nn.Module.named_modules

    def counted(self, *args, **kwargs):
        searches[0] += 1
        return search(self, *args, **kwargs)

    def of_one_step(hook):
        model = fresh()
        model.register_forward_pre_hook(hook)
        clipper = clipper_of(model)
        steps(model, clipper, 40)
        before = searches[0]
        step(model, clipper, batch())
        return searches[0] - before

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    assert of_one_step(hook) == of_one_step(lambda module, args: None)


def test_a_model_may_hold_a_list_of_hundreds_of_items():
    model = fresh()
    model.places = [*range(300)]
    clipper = clipper_of(model)
    step(model, clipper, batch())
    model.places = [*range(299)]
    x = batch()
    found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


def test_flags_that_take_turns_are_tried_out_once_each():
    model = fresh()
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    for i in range(40):
        model.doubles, model.kind = i % 2 == 0, ["nothing", "double"][i % 4 // 2]
        step(model, clipper, batch())
    assert len(trials) == 4


def test_a_hook_that_is_registered_anew_for_each_step():
    model, kept = fresh(), []
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    for _ in range(10):
        handle = model.act.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
        step(model, clipper, batch())
        handle.remove()
    assert len(trials) == 1
    assert len(kept) >= 10


def test_a_hook_that_holds_nothing_and_is_there_once_more_after_each_step():
    """As gradient checkpointing leaves them in TRL's GRPO: the hook asks for a gradient that is there."""
    model = fresh()
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    for _ in range(10):

        def asks(module, args, output):
            output.requires_grad_(True)

        model.act.register_forward_hook(asks)
        step(model, clipper, batch())
    assert len(trials) == 1  # with the first; the model was not called without one


class _InBackward:
    """A hook that mixes samples in backward alone, or does nothing."""

    def __init__(self, mixes):
        self.mixes = mixes

    def __call__(self, module, args, output):
        if self.mixes and output.requires_grad:
            output.register_hook(lambda grad: grad - grad.mean(0))


def _closing_over(mixes):
    return lambda module, args, output: _InBackward(mixes)(module, args, output)


def _by_default(mixes):
    def hook(module, args, output, mixes=mixes):
        _InBackward(mixes)(module, args, output)

    return hook


@pytest.mark.parametrize("make", [_InBackward, _closing_over, _by_default])
def test_a_hook_of_the_same_code_that_holds_something_else_is_another(make):
    model = fresh()
    clipper = clipper_of(model)
    model.act.register_forward_hook(make(False))
    steps(model, clipper, 3)
    model.act.register_forward_hook(make(True))
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        step(model, clipper, batch())


def test_a_loose_attribute_brings_the_witness_nearer():
    model = fresh()
    clipper = clipper_of(model)
    for value in (10.25, 10.5, 10.75, 10.125):  # its effect is the same
        model.norm.bias.data.zero_()
        model.share = value
        step(model, clipper, batch())
    for _ in range(40):
        step(model, clipper, batch())
    assert not clipper._tracker.witness.is_due
    model.share = 10.375
    WITNESSED["number in a tensor outside"](model, MIX)
    with pytest.raises(UnsupportedGradientError, match=r"mixes samples"):
        step(model, clipper, batch())


# The witness.


class Random(nn.Module):
    """Draws in every way: layers, functions, own code, a checkpoint."""

    def __init__(self, checkpoint=False):
        super().__init__()
        self.a, self.b, self.drop, self.checkpoint = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.3), checkpoint

    def inner(self, x):
        return self.drop(self.a(x + 0.1 * torch.randn_like(x))).tanh()

    def forward(self, x):
        h = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False) if self.checkpoint else self.inner(x)
        return self.b(F.dropout(h, 0.5))


def witnessed(clipper):
    """The mini-batches whose witness was looked at."""
    look, seen = clipper._tracker.witness.look, []

    def looking(mini_batch):
        if mini_batch.witnessed:
            seen.append(clipper._tracker.witness.mini_batch)
        look(mini_batch)

    clipper._tracker.witness.look = looking
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_witness_has_the_random_numbers_of_its_batch(checkpoint, dtype):
    model = Random(checkpoint).to(dtype)
    clipper = clipper_of(model)
    seen = witnessed(clipper)
    for _ in range(17):
        step(model, clipper, batch().to(dtype))
    assert seen == [1, 2, 4, 8, 16]
    assert clipper._tracker.witness.last_good == 16


class Reading(nn.Linear):
    """Reads a value of its input, or takes the largest of all."""

    def __init__(self, reads):
        super().__init__(4, 3)
        self.reads = reads

    def forward(self, x):
        if self.reads == "a value":
            bool(x[0, 0] > 0)
        elif self.reads == "the largest":
            x = x / x.detach().abs().amax().clamp(min=1e3)
        elif self.reads == "its own largest":
            x = x / x.detach().abs().amax(1, keepdim=True)
        return super().forward(x)


@pytest.mark.parametrize("reads", ["a value", "the largest", "its own largest", "nothing"])
def test_a_model_that_reads_values_is_witnessed_more_often(reads):
    clipper = clipper_of(Reading(reads).double())
    seen = witnessed(clipper)
    for _ in range(20):
        step(clipper.module, clipper, batch())
    often = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 19]
    assert seen == (often if reads in ("a value", "the largest") else [1, 2, 4, 8, 16])


def test_the_run_is_the_same_to_the_last_bit_with_and_without_a_witness():
    runs = []
    for check in (True, False):
        torch.manual_seed(1)
        random.seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.GELU(), Random())
        model[5].a = nn.Linear(8, 8)
        clipper, optimizer = clipper_of(model, check=check), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            step(model, clipper, torch.randn(B, 4))
            optimizer.step()
        runs.append([*model.state_dict().values(), torch.rand(3), torch.tensor(random.random())])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_a_mini_batch_whose_gradients_are_shown_before_they_are_clipped_counts_once():
    model = fresh()
    clipper = clipper_of(model, mode="exact")

    def shown(mini_batches):
        for _ in range(mini_batches):
            squares(model(batch())).mean().backward()
            clipper.per_sample_gradients()
            clipper.clip_and_accumulate()
            clipper.pre_step()
            model.zero_grad()

    shown(6)
    WITNESSED["number in a tensor outside"](model, MIX)
    with pytest.raises(UnsupportedGradientError, match=r"on mini-batch 7, .* verified on mini-batch 6\. Nothing"):
        shown(1)


def test_nothing_of_the_step_is_taken_and_the_next_begins_anew():
    model = fresh()
    clipper = clipper_of(model)
    step(model, clipper, batch())
    WITNESSED["number in a tensor outside"](model, MIX)
    model.zero_grad()
    with pytest.raises(UnsupportedGradientError, match="Nothing of this step was taken"):
        step(model, clipper, batch())
    with pytest.raises(gg.errors.InvalidValueError, match="nothing"):
        clipper.pre_step()
    assert all(p.grad is None for p in model.parameters())
    restore()
    x = batch()
    found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


def test_without_checks_nothing_is_refused():
    model = fresh()
    clipper = clipper_of(model, check=False)
    step(model, clipper, batch())
    WITNESSED["number in a tensor outside"](model, MIX)
    for _ in range(4):
        step(model, clipper, batch())


def test_the_witness_compares_each_parameter_by_its_own_bar():
    model = fresh()
    clipper = clipper_of(model)
    step(model, clipper, batch())
    WEIGHTS[2] = torch.tensor(0.01)  # in no output
    with pytest.raises(UnsupportedGradientError, match=r"the gradient of (a|norm)\.(weight|bias) differs from"):
        step(model, clipper, batch())


def test_two_calls_in_one_mini_batch_are_witnessed_together():
    model = fresh()
    clipper = clipper_of(model)
    seen = witnessed(clipper)
    for _ in range(5):
        x, y = batch(), batch()
        model.zero_grad()
        (squares(model(x)) + squares(model(y))).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    assert seen == [1, 2, 3, 4, 5]  # its forward reads a value


def test_outputs_of_which_one_is_made_of_the_other_and_a_batch_that_is_written_into():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.a(x.mul_(2))
            return h, {"out": self.b(h.relu())}, x

    model = Two().double()
    clipper = clipper_of(model)
    seen = witnessed(clipper)
    for _ in range(4):
        x = batch()
        h, out, _ = model(x)
        (squares(h) + squares(out["out"])).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    assert seen == [1, 2, 4]


def test_a_value_from_inside_that_the_loss_uses_has_no_witness():
    listeners = len(torch_private._before_backwards)
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(), []
    model[1].register_forward_hook(lambda module, args, output: kept.append(output))
    clipper = clipper_of(model)
    for _ in range(5):
        x = batch()
        model.zero_grad()
        (squares(model(x)) + squares(kept[-1])).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert clipper._tracker.witness.last_good == 0
    assert len(torch_private._before_backwards) <= listeners + 1  # who reads losses; the witness listens no more
    clipper.detach()
    rows = per_sample_gradients(
        model, lambda s: (squares(model(s[0])) + squares(kept[-1])).sum(), [(x[i : i + 1],) for i in range(B)]
    )
    for name, value in rows.items():
        torch.testing.assert_close(found[name], value.mean(0), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", [{}, {"scaler": 2.0**12}])
def test_the_witness_under_autocast_and_a_scaler(options):
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=options["scaler"]) if options else None
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    clipper = clipper_of(model, scaler=scaler)
    seen = witnessed(clipper)
    for _ in range(9):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = squares(model(torch.randn(B, 16)).float()).mean()
        (scaler.scale(loss) if scaler else loss).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    assert seen == [1, 2, 4, 8]


# The whole batch.


class Capacity(nn.Module):
    """Only so many of the samples get through."""

    def __init__(self, capacity, noise=0.0):
        super().__init__()
        self.a, self.b, self.capacity, self.noise = nn.Linear(4, 4), nn.Linear(4, 2), capacity, noise

    def forward(self, x):
        h = self.a(x)
        if self.noise:
            h = h + self.noise * torch.randn_like(h)
        kept = h.sum(1).topk(self.capacity(len(h))).indices
        return self.b(h * torch.zeros(len(h)).to(h).index_fill(0, kept, 1.0).unsqueeze(1))


RELATIVE = {"half": lambda size: max(1, size // 2), "all but one": lambda size: max(1, size - 1)}
CAPACITIES = [(size, k) for size in range(3, 13) for k in range(1, size)]
CAPACITIES += [(size, k) for size in range(4, 13) for k in RELATIVE]
CAPACITY_CASES = [
    pytest.param(size, k, seed, id=f"{k} of {size}, {seed}") for size, k in CAPACITIES for seed in range(12)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("size", "capacity", "seed"), CAPACITY_CASES)
def test_a_capacity_is_refused_whichever_samples_it_leaves_out(size, capacity, seed):
    torch.manual_seed(seed)
    rule = RELATIVE[capacity] if isinstance(capacity, str) else lambda n: min(capacity, n)
    model = Capacity(rule, noise=seed % 2)
    clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        model(torch.randn(size, 4))


class Grouped(nn.Module):
    """Mixes groups of four, as the standard deviation of a discriminator's batch does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        h = self.layer(x)
        groups = h.view(-1, min(4, len(h)) if len(h) % 4 == 0 else len(h), 3)
        return (h.view_as(groups) - 0.1 * groups.mean(1, keepdim=True) * (len(h) >= 4)).reshape(len(h), 3)


def test_groups_of_samples_that_both_halves_would_hold():
    clipper_of(model := Grouped())
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        model(torch.randn(8, 4))


# Backwards that are not linear.


class Hooked(nn.Module):
    """Something changes the gradient between its layers."""

    def __init__(self, change, number=False):
        super().__init__()
        self.a, self.b, self.change, self.number = nn.Linear(4, 8), nn.Linear(8, 3), change, number

    def forward(self, x):
        h = self.a(x).tanh()
        if h.requires_grad:
            h.register_hook(self.change)
        y = self.b(h)
        return squares(y).mean() if self.number else y


def test_a_matrix_exponential_is_linear_up_to_rounding_also_for_one_sample():
    """Its backward chooses a series by the size of the gradient."""
    layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
    clipper = clipper_of(model := nn.Sequential(nn.Embedding(11, 6), layer, nn.ReLU(), nn.Linear(6, 11)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for size in (4, 1, 1):
        tokens = torch.randint(0, 11, (size, 7))
        F.cross_entropy(model(tokens).mT, tokens.flip(1)).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        optimizer.step()


NOT_LINEAR = {
    "rows normalised": lambda g: g / (g.norm(dim=-1, keepdim=True) + 1e-12),
    "rows clipped": lambda g: g * (1.0 / g.norm(dim=-1, keepdim=True)).clamp(max=1.0),
    "signs": lambda g: g.sign(),
    **{f"clamped at 1e{e}": lambda g, e=e: g.clamp(-(10.0**e), 10.0**e) for e in (*range(-6, 4), 6, 8, 12)},
    **{f"nothing below 1e{e}": lambda g, e=e: g * (g.abs() > 10.0**e) for e in range(-6, 4)},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("size", [1, B])
@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_backward_that_is_not_linear_is_refused(name, number, size):
    model = Hooked(NOT_LINEAR[name], number)
    clipper_of(model)
    with pytest.raises(UnsupportedGradientError, match="is not linear in the gradient that it gets"):
        model(torch.randn(size, 4))


@pytest.mark.parametrize("name", ["halved", "positive part", "reversed"])
def test_a_backward_that_is_linear_for_positive_factors_is_exact(name):
    change = {"halved": lambda g: g / 2, "positive part": lambda g: g.relu(), "reversed": lambda g: -g}[name]
    model = Hooked(change).double()
    clipper = clipper_of(model)
    for _ in range(3):
        x = batch()
        found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("target", ["loss", "module"])
def test_an_error_clip_around_the_backward(target, first):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    clipper = clipper_of(model)
    x = torch.randn(B, 4)
    if not first:
        step(model, clipper, x)
    loss = squares(model(x)).mean() if target == "loss" else None
    with (
        pytest.raises(UnsupportedGradientError, match=r"error_clip|an error clip"),
        gg.error_clip(loss if loss is not None else model, gg.ErrorClipByValue(1e-3)),
    ):
        (squares(model(x)).mean() if loss is None else loss).backward()
    for _ in range(2):
        step(model, clipper, x)


REBOUND = {
    "an array of NumPy": np.array,
    "an array of the standard library": lambda order: array("q", order),
    "numbers of NumPy in a list": lambda order: [np.int64(i) for i in order],
    "an array in a dict": lambda order: {"order": np.array(order)},
    "a list in settings": lambda order: SimpleNamespace(order=order),
    "an array in settings": lambda order: SimpleNamespace(order=np.array(order)),
    "a deque": deque,
    "a set of pairs": lambda order: frozenset(enumerate(order)),
    "a long tuple": lambda order: (*order, *range(B, 100)),
    "the bytes of an array in another shape": lambda order: np.ones((1, 4) if order[0] == 0 else (2, 2)),
}
HIDDEN = {"order": list(range(B))}
BY_VALUE = {
    "as_tensor of an array": lambda h: torch.as_tensor(placing(HIDDEN["order"], len(h))) @ h,
    "tensor of an array": lambda h: torch.tensor(placing(HIDDEN["order"], len(h))) @ h,
}


def within(order, count):
    return [int(i) % count for i in order][:count]


def placing(order, count):
    """The matrix that puts rows into this order: an index would make the samples run one by one."""
    return np.eye(count)[within(order, count)]


class Ordered(nn.Module):
    """Adds other samples to each where its order is not that of the samples."""

    def __init__(self, index, order):
        super().__init__()
        self.a, self.b, self.index, self.order = nn.Linear(3, 4), nn.Linear(4, 2), index, order

    def forward(self, x):
        h = self.a(x).tanh()
        order = torch.from_numpy(placing(plain(self.order), len(x)))  # which no trace of torch's functions shows
        return self.b(h + order @ h + (self.index(h) if self.index else 0))


def plain(order):
    order = getattr(order, "order", order)
    order = order["order"] if isinstance(order, dict) else order
    if np.ndim(order) == 2:
        return [(i + len(order) - 1) % B for i in range(B)]
    return [i for _, i in sorted(order)] if isinstance(order, frozenset) else order


@pytest.mark.sampled(7)
@pytest.mark.parametrize("change", [*REBOUND, *BY_VALUE])
def test_another_order_between_two_witnesses_is_seen_on_its_step(change, monkeypatch):
    made, other = REBOUND.get(change, list), [*range(1, B), 0]
    model = Ordered(BY_VALUE.get(change), made(list(range(B)))).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))

    def go():
        model(torch.randn(B, 3, dtype=torch.float64)).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()

    for _ in range(8):
        go()
    if change in BY_VALUE:
        monkeypatch.setitem(HIDDEN, "order", other)
    else:
        model.order = made(other)
    with pytest.raises(UnsupportedGradientError, match=MIXED) as refused:
        go()
    # What an array holds are numbers: of other numbers all samples run alone on that step, and nothing is tried out.
    assert ("was run alone" in str(refused.value)) == (change in BY_VALUE)


def _of_positions(x):
    return torch.arange(x.shape[1]).unsqueeze(0).expand(len(x), -1)


def _overwritten(x):
    positions = torch.zeros(x.shape, dtype=torch.int64)
    positions += x.detach().long()
    return positions


@pytest.mark.parametrize(
    ("positions", "runs"),
    [
        (_of_positions, 1),
        (lambda x: _of_positions(x) - 1, 1),
        (_overwritten, 7),
        (lambda x: _of_positions(x).expand(2, *x.shape)[x.long().sign().abs()], 7),
        (lambda x: torch.bernoulli(torch.ones(x.shape)), 7),
    ],
    ids=["made of sizes", "and a number", "written into", "chosen by values", "drawn"],
)
def test_what_is_made_of_sizes_alone_reads_no_values(positions, runs):
    """Mini-batch 3 is witnessed where a forward reads values: four samples run alone, and one before and after it."""
    counted = []

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            counted.append(len(x))
            return self.layer(x) * (1.0 if bool((positions(x).cumsum(-1) > -9).all()) else 2.0)

    model = Reading().double()
    clipper = clipper_of(model)
    several_steps(model, clipper, 2)
    counted.clear()
    step(model, clipper, batch())
    assert len(counted) == runs


@pytest.mark.parametrize("view", ["T", "mT", "H", "mH"])
def test_a_transpose_of_another_tensor_is_found_on_that_very_step(view, monkeypatch):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            h = self.layer(x).tanh()
            either = {"alone": 2 * h, "centred": 2 * h - h.mean(0)}
            return getattr(getattr(either[HIDDEN["transposed"]], view), view) + 1

    monkeypatch.setitem(HIDDEN, "transposed", "alone")
    model = Transposed().double()
    clipper = clipper_of(model)
    several_steps(model, clipper, 2)
    monkeypatch.setitem(HIDDEN, "transposed", "centred")
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        step(model, clipper, batch())


@pytest.mark.parametrize(
    "shifted",
    [
        lambda rows, shift: rows.add(other=shift),
        lambda rows, shift: rows + torch.arange(shift, shift + 1),
    ],
    ids=["a keyword", "the bounds of a range"],
)
def test_rows_that_data_shift_run_one_by_one(shifted):
    """Each layer's rows are in other places on the third step, and behind the layer in their own ones again."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            rows, shift = torch.arange(len(x)), (x.detach().mean() > 50).long()
            there, back = (shifted(rows, by).remainder(len(x)) for by in (shift, -shift))
            return self.layer(x[there])[back]

    model = Shifted().double()
    twin = copy.deepcopy(model)
    clipper = clipper_of(model)
    for offset in (0, 0, 100):
        x = batch() + offset
        step(model, clipper, x)
        rows = per_sample_gradients(twin, lambda s: squares(twin(s[0])).sum(), [(x[i : i + 1],) for i in range(B)])
        norms = sum(value.flatten(1).square().sum(1) for value in rows.values()).sqrt()
        torch.testing.assert_close(clipper.statistics.norms.double(), norms, rtol=1e-9, atol=0)


def test_another_length_is_tried_out_a_few_times_and_no_more():
    """A `torch.Size` holds numbers as a tuple does; with operations that are known the samples run alone, at most."""
    counted = []

    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, x):
            counted.append(len(x))
            h = self.layer(x[..., None]).view(torch.Size((*x.shape, 3))).tanh().sum(1)
            return h if bool((x < 9).all()) else 2 * h

    model = Lengths().double()
    clipper = clipper_of(model)
    runs = []
    for length in (*range(3, 9), *range(9, 19)):
        counted.clear()
        step(model, clipper, torch.randn(B, length, dtype=torch.float64))
        runs.append(len(counted))
    alone = 1 + B + 2  # and one sample before and after it
    assert runs[0] > alone  # tried out
    assert max(runs[1:]) <= alone
    assert min(runs[8:]) == 1  # not even that


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 3), nn.Linear(3, 2), reentrant
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x):
        h = self.first(x).tanh()
        if self.reentrant is None:
            return self.last(self.block(h))
        return self.last(torch.utils.checkpoint.checkpoint(self.block, h, use_reentrant=self.reentrant))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes", [(4, 4, 3, 3), (4, 4, 4, 3), (4, 3, 4, 3)])
@pytest.mark.parametrize(("reentrant", "frozen"), [(False, "first"), (False, "block"), (True, "block")])
def test_a_layer_at_a_checkpoint_freezes_in_the_step_with_another_batch_size(reentrant, frozen, sizes):
    """The backward runs the checkpoint again, which must do there what it did in the forward."""
    model = Checkpointed(reentrant)
    clipper = clipper_of(model)
    for number, size in enumerate(sizes):
        if number == 2:
            getattr(model, frozen).requires_grad_(False)
        x = torch.randn(size, 4)
        model.zero_grad()
        squares(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        twin = Checkpointed(None)
        twin.load_state_dict(model.state_dict())
        rows = per_sample_gradients(twin, lambda s, twin=twin: squares(twin(s)).sum(), x.split(1))
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(p.grad, rows[name].mean(0).to(p.grad), rtol=1e-5, atol=1e-6)


LAST = {
    "a module": lambda m, h: checkpoint(m.block, h, use_reentrant=False),
    "a method": lambda m, h: checkpoint(m.code, h, use_reentrant=False),
    "a lambda": lambda m, h: checkpoint(lambda given: m.code(given), h, use_reentrant=False),
    "two results": lambda m, h: torch.cat([checkpoint(m.block, h, use_reentrant=False), m.other(h)], 1),
    "one of two results": lambda m, h: (checkpoint(m.block, h, use_reentrant=False), m.other(h)),
}


class EndsAtCheckpoint(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.name = nn.Linear(4, 3), name
        self.other = nn.Linear(3, 2) if "two" in name else None
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def code(self, h):
        return self.block[2](self.block[0](h).tanh())

    def forward(self, x):
        return LAST[self.name](self, self.first(x).tanh())


@pytest.mark.parametrize("name", LAST)
def test_a_checkpoint_may_be_the_last_operation_on_every_step(name):
    """Reading the loss must not unpack what the operations behind the outputs saved: that runs the checkpoint again."""
    torch.manual_seed(0)
    model = EndsAtCheckpoint(name)
    clipper = clipper_of(model)
    for size in (5, 5, 3, 5, 4, 5, 5, 5, 5, 5):
        model.zero_grad()
        x, y = torch.randn(size, 4), torch.randint(0, 2, (size,))
        twin = copy.deepcopy(model)
        for one in (model, twin):
            out = one(x)
            sum(F.cross_entropy(result, y) for result in (out if isinstance(out, tuple) else [out])).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_numbers_that_python_draws_for_the_first_time_later_are_refused_once(draw):
    """Their generators are not read before each call; torch's are."""
    settings = {"draws": False}

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x.sin() * draw() if settings["draws"] else x)

    model = Late().double()
    clipper = clipper_of(model)
    several_steps(model, clipper, 4)  # no sample of the fifth runs alone
    settings["draws"] = True
    with pytest.raises(UnsupportedGradientError, match="for the first time"):
        step(model, clipper, batch())
    several_steps(model, clipper, 3)
    assert clipper._tracker.witness.last_good > 4


OUTSIDE = [torch.eye(B, dtype=torch.float64), torch.full((B, B), 1.0 / B, dtype=torch.float64)]
OTHER_TENSORS = {
    "zeros or the mean": lambda self, x, h, i: h - (torch.zeros(4).to(x), x.mean(0))[i],
    "a buffer or the mean": lambda self, x, h, i: h - (self.zero, x.mean(0))[i],
    "another buffer": lambda self, x, h, i: (self.own, self.all)[i][: len(x), : len(x)] @ h,
    "another tensor of the program": lambda self, x, h, i: OUTSIDE[i][: len(x), : len(x)] @ h,
    "the output of another call": lambda self, x, h, i: h + (self.layer(x), self.layer(x.flip(0)))[i],
    "detached or flipped": lambda self, x, h, i: h + (lambda d: (d, d.flip(0)))(h.detach())[i],
    "another index": lambda self, x, h, i: h + h.detach()[(lambda p: (p, p.flip(0)))(torch.arange(len(x)))[i]],
    "unbind in another order": lambda self, x, h, i: h + torch.stack(h.detach().unbind(0)[:: 1 - 2 * i]),
    "chunks in another order": lambda self, x, h, i: h + torch.cat(h.detach().chunk(len(h))[:: 1 - 2 * i]),
    "what a module returns": lambda self, x, h, i: self.chooses(h),
}


class Chooses(nn.Module):
    def forward(self, h):
        return (h * 1.0, h - h.mean(0))[HIDDEN["flag"]]


class Flow(nn.Module):
    """Uses one earlier tensor or another, by a flag that no attribute shows."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.layer, self.chooses = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4), Chooses()
        self.change = change
        for name, value in (("zero", torch.zeros(4)), ("own", OUTSIDE[0].clone()), ("all", OUTSIDE[1].clone())):
            self.register_buffer(name, value)

    def forward(self, x):
        return self.b(self.change(self, x, self.a(x).tanh(), HIDDEN["flag"])) + 0 * self.layer(x).sum(1, keepdim=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_another_tensor_with_the_same_functions_is_seen_on_its_step(change, monkeypatch):
    monkeypatch.setitem(HIDDEN, "flag", 0)
    model = Flow(OTHER_TENSORS[change]).double()
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    several_steps(model, clipper, 9)
    assert len(trials) <= 2  # what uses the same tensors on each step is not new
    HIDDEN["flag"] = 1
    with pytest.raises(UnsupportedGradientError, match=f"{MIXED}|rows of samples by values"):  # no witness is due
        step(model, clipper, batch())


def test_an_attribute_that_counts_steps_and_begins_to_mix_later():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.epoch = nn.Linear(4, 4), nn.Linear(4, 2), 0
            self.register_buffer("zero", torch.zeros(4))

        def forward(self, x):
            mean = x.mean(0)
            return self.b(self.a(x - (mean if self.epoch >= 21 else self.zero)).relu())

    model = Counting().double()
    clipper = clipper_of(model)
    for model.epoch in range(21):
        step(model, clipper, batch())
    model.epoch = 21
    with pytest.raises(UnsupportedGradientError, match=MIXED):
        step(model, clipper, batch())


def test_a_function_that_layers_call_is_replaced(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    clipper, linear = clipper_of(model), F.linear
    steps(model, clipper, 9)
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: 2 * linear(x, weight, bias))
    x = batch()
    found = step(model, clipper, x)
    clipper.detach()
    assert_exact(model, found, x)


def test_tensors_from_outside_that_are_new_on_each_step_are_not_tried_out():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) * HIDDEN["scale"]

    model = Given().double()
    clipper = clipper_of(model)
    trials = count_trials(clipper)
    for _ in range(8):
        HIDDEN["scale"] = torch.rand(3, dtype=torch.float64)
        step(model, clipper, batch())
    assert len(trials) == 1


class Tokens(nn.Module):
    """Works on some tokens of each sample, which ``select`` chooses; a layer in front and one behind see all."""

    def __init__(self, select):
        super().__init__()
        self.embed, self.layer, self.norm = nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head, self.select = nn.Linear(4, 2), [select]

    def work(self, rows):
        return self.norm(rows + self.layer(rows).relu())

    def forward(self, ids, mask):
        return self.head(self.select[0](self, ids, mask).tanh().sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def by_mask(m, ids, mask):
    hidden = m.embed(ids)
    out = torch.zeros_like(hidden)
    out[mask] = m.work(hidden[mask])
    return out


def by_nonzero(m, ids, mask):
    hidden = m.embed(ids)
    places = mask.flatten().nonzero()[:, 0]
    rows = m.work(hidden.flatten(0, 1).index_select(0, places))
    return torch.zeros_like(hidden).flatten(0, 1).index_copy(0, places, rows).view(hidden.shape)


def packed_ids(m, ids, mask):
    rows = m.work(m.embed(ids[mask]))
    return rows.new_zeros(*ids.shape, 4).masked_scatter(mask[..., None], rows)


def kept_first(m, ids, mask):
    hidden = m.embed(ids)
    order = (~mask).flatten().argsort(stable=True)
    rows = m.work(hidden.flatten(0, 1)[order]) * mask.flatten()[order, None]
    return rows[order.argsort()].view(hidden.shape)


def two_groups(m, ids, mask):
    hidden, places = m.embed(ids).flatten(0, 1), torch.arange(ids.numel())
    order = torch.cat([places[mask.flatten()], places[~mask.flatten()]])
    out = torch.zeros_like(hidden)
    out[order] = m.work(hidden[order])
    return out.view(*ids.shape, 4) * mask[..., None]


def cut_and_joined(m, ids, mask):
    lengths, hidden = mask.sum(1).tolist(), m.embed(ids)
    rows = m.work(torch.cat([one[:length] for one, length in zip(hidden, lengths, strict=True)]))
    return nn.utils.rnn.pad_sequence(rows.split(lengths), batch_first=True)


def repeated(m, ids, mask):
    counts = mask.sum(1)
    owner = torch.arange(len(ids)).repeat_interleave(counts)
    places = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    rows = m.work(m.embed(ids)[owner, places])
    return rows.new_zeros(ids.shape[0], 4).index_add(0, owner, rows)[:, None]


def if_padded(m, ids, mask):
    return m.work(m.embed(ids)) if mask.all() else by_mask(m, ids, mask)


SELECT = (by_mask, by_nonzero, packed_ids, kept_first, two_groups, cut_and_joined, repeated, if_padded)


def masks_of(lengths, length=6):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def assert_token_step(model, clipper, mask):
    """One step is exact, whatever samples the norm clips."""
    model.zero_grad()
    ids = torch.randint(0, 9, mask.shape)
    squares(model(ids, mask)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    twin = Tokens(model.select[0]).double()
    twin.load_state_dict(model.state_dict())
    samples = [(ids[i : i + 1], mask[i : i + 1]) for i in range(len(ids))]
    rows = per_sample_gradients(twin, lambda s: squares(twin(*s)).sum(), samples)
    norms = torch.stack([value.flatten(1).square().sum(1) for value in rows.values()]).sum(0).sqrt()
    factors = (0.3 / norms).clamp(max=1)
    for name, value in rows.items():
        expected = torch.einsum("b,b...->...", factors.to(value), value) / len(mask)
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-11, msg=name)


RAGGED_AT = [0, 2, *[pytest.param(at, marks=pytest.mark.exhaustive) for at in (12, 33)]]


@pytest.mark.parametrize("at", RAGGED_AT)
@pytest.mark.parametrize("select", SELECT, ids=lambda select: select.__name__)
def test_rows_that_a_forward_chooses_belong_to_their_own_samples(select, at):
    """Four lengths may have as many tokens as equal ones, so the number of rows does not show it."""
    model = Tokens(select).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.3), mode="exact")
    full = 6
    for now in range(at + 4):
        mask = masks_of([full] * 4 if now < at else [[6, 2, 4, 4], [5, 3, 4, 4], [6, 6, 3, 1], [1, 2, 3, 6]][now - at])
        if select is if_padded and now == at > 0:
            with pytest.raises(UnsupportedGradientError, match="Repeat this step"):
                assert_token_step(model, clipper, mask)
        assert_token_step(model, clipper, mask)


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20)]])
def test_rows_that_are_chosen_at_random(seed):
    torch.manual_seed(seed)
    model = Tokens(random.Random(seed).choice(SELECT[:5])).double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.3), mode="exact")
    for _ in range(20):
        mask = torch.rand(int(torch.randint(1, 6, ())), 6) < torch.rand(())
        mask[:, 0] |= ~mask.any(1)
        assert_token_step(model, clipper, mask)


def last_kept(m, ids, mask):
    hidden = m.work(m.embed(ids))
    return hidden[torch.arange(len(ids)), mask.sum(1) - 1][:, None]


def gathered(m, ids, mask):
    places = mask.long().argsort(dim=1, descending=True, stable=True)
    return m.work(m.embed(ids).gather(1, places[..., None].expand(-1, -1, 4)) * mask.gather(1, places)[..., None])


def filled(m, ids, mask):
    hidden = m.embed(ids)
    hidden = hidden * 1.0
    hidden[~mask] = 0
    return m.work(hidden[:, torch.randperm(6).tolist()])


def from_a_table(m, ids, mask):
    table = torch.ones(8, 4, dtype=torch.float64).cumsum(0)
    return m.work(m.embed(ids) + table[mask.cumsum(1)])


@pytest.mark.parametrize("select", [last_kept, gathered, filled, from_a_table], ids=lambda select: select.__name__)
def test_what_chooses_within_each_sample_runs_once(select):
    model, calls = Tokens(select).double(), []
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.3), mode="exact")
    model.layer.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(12):
        mask = masks_of(torch.randint(1, 7, (4,)).tolist())
        calls.clear()
        squares(model(torch.randint(0, 9, mask.shape), mask)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    assert len(calls) <= 2

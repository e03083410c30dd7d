"""`Snapshot`: going back is bit-identical, twice, and nothing that happens in between is seen.

The slow twin is another way to keep a state: a deep copy of the model with an optimizer of its own, trained by itself.
"""

import copy
import random
from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradguard as gg
from gradguard import Snapshot
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError


class Network(nn.Module):
    """Tied weights, a buffer that is written, one that is replaced, one that grows, random numbers, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.hidden = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        self.cache = torch.full((int(self.calls),), 2.0)
        x = self.drop(self.norm(self.embed(x)))
        return self.head(self.frozen(torch.tanh(self.hidden(x))))


class Counting(torch.optim.Optimizer):
    """One of somebody's own, which counts and averages in plain attributes that its ``state_dict`` does not have."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.count, self.seen = 0, {"mean": torch.zeros(()), "last": [0.0, None]}

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.count += 1
        self.seen["mean"].lerp_(loss.detach(), 1 / self.count)
        self.seen["last"] = [float(loss), self.seen["last"][0]]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1 * float(self.seen["mean"]) / self.count)


def matrices(parameters):
    return [p for p in parameters if p.ndim == 2]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum, dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, a tensor as learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "Adam, maximized": lambda p: torch.optim.Adam(p, lr=0.001, maximize=True),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Muon": lambda p: torch.optim.Muon(matrices(p), lr=0.01),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor, of matrices": lambda p: torch.optim.Adafactor(matrices(p), lr=0.01),
    "one of somebody's own": Counting,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
}


def batches(first, count):
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        yield torch.randint(7, (8,), generator=generator), torch.randint(7, (8,), generator=generator)


def train(model, optimizer, data):
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def content(model, optimizer):
    """All that training may have changed, copied."""
    state = copy.deepcopy(optimizer.state_dict())
    return copy.deepcopy(dict(model.named_buffers()) | dict(model.named_parameters())), state


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("steps", [0, 2, 12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_back_twice_is_what_a_deep_copy_does(tmp_path, name, steps, where):
    torch.manual_seed(1)
    model = Network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, batches(0, steps))
    twin = copy.deepcopy(model)
    twins_optimizer = OPTIMIZERS[name](twin.parameters())
    twins_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    vars(twins_optimizer).update({n: copy.deepcopy(v) for n, v in vars(optimizer).items() if n in ("count", "seen")})
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    if where == "disk":
        snapshot.save(tmp_path / "snapshot")
        snapshot = Snapshot.load(tmp_path / "snapshot", model, optimizer)
    generator = torch.get_rng_state()
    train(model, optimizer, batches(50, 4))
    torch.set_rng_state(generator)
    train(twin, twins_optimizer, batches(100, 4))
    expected = content(twin, twins_optimizer)
    for _ in range(2):
        snapshot.restore()
        train(model, optimizer, batches(100, 4))
        same(content(model, optimizer), expected)
        same(getattr(optimizer, "seen", {}), getattr(twins_optimizer, "seen", {}))
        train(model, optimizer, batches(60, 2))


class Slotted(torch.optim.SGD):
    """Counts in a slot, a set and an array, and in an attribute that its first step sets."""

    __slots__ = ("steps",)

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps, self.rates, self.sums = 0, set(), numpy.zeros(2)

    def step(self, closure=None):
        self.steps += 1
        self.rates.add(self.steps)
        self.sums += self.steps
        self.first = getattr(self, "first", self.steps)
        self.param_groups[0]["lr"] = 0.1 / (self.steps + len(self.rates) + float(self.sums[0]))
        return super().step(closure)

    def told(self):
        return self.steps, self.rates.copy(), self.sums.tolist(), getattr(self, "first", None)


@pytest.mark.parametrize("how", ["memory", "disk", "skip"])
@pytest.mark.parametrize("steps", [0, 2])
def test_attributes_of_every_plain_kind_go_back_and_newer_ones_go(tmp_path, steps, how):
    model = nn.Linear(3, 1)
    optimizer = Slotted(model.parameters())
    for seed in range(steps):
        step(model, optimizer, seed)
    before, rate = optimizer.told(), optimizer.param_groups[0]["lr"]
    if how == "skip":
        guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) * torch.inf).sum().backward()
        optimizer.step()
        assert int(guard.skipped_steps) == 1
    else:
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        if how == "disk":
            snapshot.save(tmp_path / "snapshot")
            snapshot = Snapshot.load(tmp_path / "snapshot", model, optimizer)
        for seed in range(3):
            step(model, optimizer, seed)
        snapshot.restore()
    assert (optimizer.told(), optimizer.param_groups[0]["lr"]) == (before, rate)


ARRAYS = {
    "structured": numpy.zeros(2, dtype=[("step", "i8"), ("rate", "f8")]),
    "masked": numpy.ma.array([3.0, 2.0], mask=[False, True]),
    "objects": numpy.array([None, 1, "a"], dtype=object),
    "dates": numpy.array(["2024-01-01"], dtype="datetime64[D]"),
}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_any_kind_go_back_in_memory(kind, skips):
    class Logging(torch.optim.SGD):
        def step(self, closure=None):
            self.log[0] = numpy.ones(1, self.log.dtype)[0]
            return super().step(closure)

    model = nn.Linear(3, 1)
    optimizer = Logging(model.parameters(), 0.1)
    optimizer.log = ARRAYS[kind].copy()
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    if skips:
        guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
        (model(torch.ones(1, 3)) * torch.nan).sum().backward()
        optimizer.step()
        assert int(guard.skipped_steps) == 1
    else:
        step(model, optimizer, 0)
        assert optimizer.log.tolist() != ARRAYS[kind].tolist()
        snapshot.restore()
    assert type(optimizer.log) is type(ARRAYS[kind])
    assert optimizer.log.dtype == ARRAYS[kind].dtype
    assert optimizer.log.tolist() == ARRAYS[kind].tolist()


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_that_have_no_form_in_a_file_are_refused_there(kind, tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.log = ARRAYS[kind]
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    with pytest.raises(
        UnsupportedGradientError,
        match=r"cannot be written to a file \(a (ndarray|MaskedArray)\): .* arrays of numbers or text",
    ):
        snapshot.save(tmp_path / "snapshot")


def test_an_array_of_tensors_is_left_alone():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.blocks = numpy.empty(2, dtype=object)
    for i, p in enumerate(model.parameters()):
        optimizer.blocks[i] = p
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    snapshot.restore()
    assert all(a is b for a, b in zip(optimizer.blocks, model.parameters(), strict=True))


@pytest.mark.parametrize("place", ["attribute", "state", "group"])
def test_a_list_that_contains_itself_is_refused_in_words(place):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ring = []
    ring.append(ring)
    optimizer.ring = ring if place == "attribute" else []
    optimizer.state[model.weight]["ring"] = ring if place == "state" else []
    optimizer.param_groups[0]["ring"] = ring if place == "group" else []
    snapshot = Snapshot(model, optimizer)
    with pytest.raises(UnsupportedGradientError, match="SGD keeps a list or dict that contains itself"):
        snapshot.take()
    assert not snapshot.taken


def test_a_module_without_weights_that_was_replaced_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    model[1] = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(InvalidValueError, match=r"are no longer those of the snapshot .*: 1\. Nothing"):
        snapshot.restore()


def test_so_many_optimizers_are_tried():
    assert len(OPTIMIZERS) == 24


def small(**more):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **more)
    return model, optimizer


def step(model, optimizer, seed=0):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_weights_and_state_are_written_in_place():
    model, optimizer = small()
    step(model, optimizer)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    before = [t.data_ptr() for t in tensors]
    step(model, optimizer)
    snapshot.restore()
    after = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    assert [id(t) for t in after] == [id(t) for t in tensors]
    assert [t.data_ptr() for t in after] == before


def test_nothing_in_it_is_shared_with_the_run():
    model, optimizer = small()
    step(model, optimizer)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    expected = content(model, optimizer)
    for _ in range(2):
        with torch.no_grad():
            for tensor in [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]:
                tensor.fill_(torch.nan)
        optimizer.param_groups[0]["betas"] = (0.0, 0.0)
        snapshot.restore()
        same(content(model, optimizer), expected)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which puts other tensors there


def test_a_sparse_buffer_goes_back_in_place():
    model, optimizer = small()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    snapshot, mask = Snapshot(model, optimizer), model.mask
    snapshot.take()
    mask.copy_(torch.ones(3, 3).to_sparse())
    snapshot.restore()
    assert model.mask is mask
    same(mask.to_dense(), torch.eye(3))


def test_a_second_take_replaces_the_first_in_the_same_memory():
    model, optimizer = small()
    step(model, optimizer)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    memory = lambda: {kept.data_ptr() for _, kept in snapshot._copier._used}  # noqa: E731
    first = memory()
    step(model, optimizer)
    snapshot.take()
    expected = content(model, optimizer)
    assert memory() == first
    step(model, optimizer)
    snapshot.restore()
    same(content(model, optimizer), expected)


def test_adamw_in_float32_takes_12_bytes_a_parameter():
    model, optimizer = small()
    snapshot = Snapshot(model, optimizer)
    assert snapshot.nbytes == 0
    step(model, optimizer)
    snapshot.take()
    parameters = sum(p.numel() for p in model.parameters())
    assert snapshot.nbytes == 12 * parameters + 4 * 4  # and four step counts


def test_gradients_of_other_weights_are_zero_afterwards():
    model, optimizer = small()
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    model(torch.ones(1, 3)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    snapshot.restore()
    assert all(p.grad is g and not g.any() for p, g in zip(model.parameters(), gradients, strict=True))


class TestMore:
    """Whatever else belongs to the state."""

    def test_an_averaged_model(self):
        model, optimizer = small()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(model)
        snapshot = Snapshot(model, optimizer, extra_state=[average])
        snapshot.take()
        expected = copy.deepcopy(average.state_dict())
        pointers = [p.data_ptr() for p in average.parameters()]
        step(model, optimizer)
        average.update_parameters(model)
        snapshot.restore()
        same(average.state_dict(), expected)
        assert [p.data_ptr() for p in average.parameters()] == pointers

    @pytest.mark.parametrize(
        "make",
        [
            lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),  # which multiplies what the group holds
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
                milestones=[4],
            ),
            lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        ],
    )
    @pytest.mark.parametrize("rewind", [True, False])
    def test_a_schedule_goes_back_or_goes_on(self, make, rewind):
        model, optimizer = small()
        scheduler = make(optimizer)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

        def steps(count):
            rates = []
            for seed in range(count):
                step(model, optimizer, seed)
                scheduler.step(1.0) if plateau else scheduler.step()
                rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
            return rates

        steps(2)
        snapshot = Snapshot(model, optimizer, extra_state=[scheduler])
        snapshot.take()
        first = steps(5)
        now = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict()["param_groups"]))
        for _ in range(2):
            snapshot.restore(rewind_schedule=rewind)
            if rewind:
                assert steps(5) == first
            assert now == (scheduler.state_dict(), optimizer.state_dict()["param_groups"])

    def test_a_scheduler_that_is_left_out_is_refused(self):
        model, optimizer = small()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        snapshot = Snapshot(model, optimizer)
        with pytest.raises(
            InvalidValueError, match=r"a learning-rate scheduler drives this AdamW .* extra_state=\(scheduler"
        ):
            snapshot.take()
        assert not snapshot.taken
        Snapshot(model, optimizer, extra_state=[scheduler]).take()

    def test_a_grad_scaler_and_a_clipper(self):
        model, optimizer = small()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        clipper = gg.ClipByMedian(warmup=1)
        gg.Guard(optimizer, clipper)

        def steps(seed, count):
            for k in range(count):
                optimizer.zero_grad()
                x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed + k))
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()

        steps(0, 3)
        snapshot = Snapshot(model, optimizer, extra_state=[scaler, clipper])
        snapshot.take()
        kept = copy.deepcopy((scaler.state_dict(), clipper.state_dict()))
        found = []
        for _ in range(2):
            steps(10, 5)
            found.append(content(model, optimizer))
            snapshot.restore()
            same((scaler.state_dict(), clipper.state_dict()), kept)
        same(*found)

    def test_several_optimizers(self):
        model = nn.Linear(3, 2)
        first, second = torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
        snapshot = Snapshot(model, first, extra_state=[second])
        step(model, first)
        step(model, second)
        snapshot.take()
        expected = content(model, first), content(model, second)
        step(model, first)
        step(model, second)
        snapshot.restore()
        same((content(model, first), content(model, second)), expected)

    def test_what_keeps_the_state_that_it_is_given(self):
        class Kept:
            def __init__(self):
                self.state = {"history": torch.zeros(2), "order": OrderedDict(a=[1])}

            def state_dict(self):
                return self.state

            def load_state_dict(self, state):
                self.state = state

        thing, (model, optimizer) = Kept(), small()
        snapshot = Snapshot(model, optimizer, extra_state=[thing])
        snapshot.take()
        for _ in range(3):
            thing.state["history"] += 1
            thing.state["order"]["a"].append(2)
            snapshot.restore()
            assert thing.state["history"].tolist() == [0, 0]
            assert thing.state["order"] == OrderedDict(a=[1])
            assert isinstance(thing.state["order"], OrderedDict)

    def test_anything_else_is_refused(self):
        model, optimizer = small()
        with pytest.raises(InvalidTypeError, match=r"extra_state has a int: expected objects with state_dict"):
            Snapshot(model, optimizer, extra_state=[3])


def test_random_numbers_come_again_unless_the_data_must_go_on():
    model, optimizer = small()
    own = torch.Generator().manual_seed(3)
    snapshot = Snapshot(model, optimizer, extra_state=[own])
    draw = lambda: (random.random(), numpy.random.rand(), float(torch.rand(())), float(torch.rand((), generator=own)))  # noqa: E731
    snapshot.take()
    first, second = draw(), draw()
    snapshot.restore(rewind_generators=False)
    third = draw()
    assert third[:3] not in (first[:3], second[:3])
    snapshot.restore()
    assert (draw(), draw()) == (first, second)


class TestStructuresThatChange:
    """What came, went or moved since: refused before anything is written, or made as it was."""

    @staticmethod
    def changed(change):
        model, optimizer = small()
        step(model, optimizer)
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        step(model, optimizer)
        change(model, optimizer)
        return model, optimizer, snapshot

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda m, o: m.append(nn.Linear(1, 1)), r"are no longer those of the snapshot .*: 3\.weight, 3\.bias"),
            (lambda m, o: m.__delitem__(2), r"2\.weight, 2\.bias"),
            (lambda m, o: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 3))), r"0\.weight"),
            (lambda m, o: setattr(m[0].weight, "data", torch.ones(2, 3)), r"0\.weight"),
            (
                lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
                r"AdamW has other parameters or groups .*\(5 in 2 groups, and 4 in 1 then\)",
            ),
            (lambda m, o: o.param_groups[0]["params"].reverse(), r"\(4 in 1 groups, and 4 in 1 then\)"),
        ],
    )
    def test_refused_with_nothing_written(self, change, words):
        model, optimizer, snapshot = self.changed(change)
        before = content(model, optimizer)
        with pytest.raises(InvalidValueError, match=words):
            snapshot.restore()
        same(content(model, optimizer), before)

    def test_numbers_that_a_group_has_got_go_again(self):
        _, optimizer, snapshot = self.changed(lambda m, o: o.param_groups[0].update(step=3))
        snapshot.restore()
        assert "step" not in optimizer.param_groups[0]

    def test_counters_that_are_attributes_of_the_optimizer_go_back(self):
        class Counting(torch.optim.SGD):
            def __init__(self, p):
                super().__init__(p, lr=0.1)
                self.count, self.seen, self.note = 0, [torch.zeros(1)], print

            def step(self, closure=None):
                self.count += 1
                self.seen[0] += 1
                return super().step(closure)

        model = nn.Linear(3, 1)
        optimizer = Counting(model.parameters())
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        for _ in range(2):
            step(model, optimizer)
            optimizer.register_step_post_hook(lambda *_: None)
            hooks = len(optimizer._optimizer_step_post_hooks)
            snapshot.restore()
            assert (optimizer.count, optimizer.seen[0].item(), optimizer.note) == (0, 0, print)
            assert len(optimizer._optimizer_step_post_hooks) == hooks

    def test_two_states_that_have_become_one_tensor(self):
        model, optimizer = small()
        step(model, optimizer)
        state = optimizer.state[model[0].weight]
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(2.0)
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        state["exp_avg_sq"] = state["exp_avg"]
        snapshot.restore()
        assert (state["exp_avg"].unique().item(), state["exp_avg_sq"].unique().item()) == (1.0, 2.0)

    def test_layers_without_numbers_are_refused(self):
        for model in (nn.LazyLinear(2), nn.Linear(2, 2, device="meta")):
            snapshot = Snapshot(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
            with pytest.raises(UnsupportedGradientError, match=r"needs the data of every tensor"):
                snapshot.take()

    def test_a_take_that_fails_leaves_nothing_to_restore(self):
        model, optimizer = small()
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        model.append(nn.LazyLinear(2))
        with pytest.raises(UnsupportedGradientError, match="materialize the model"):
            snapshot.take()
        with pytest.raises(InvalidValueError, match=r"there is no snapshot to restore: call take\(\) first"):
            snapshot.restore()

    def test_extra_state(self):
        class Extra(nn.Linear):
            scale = 1.0

            def get_extra_state(self):
                return {"scale": self.scale}

            def set_extra_state(self, state):
                self.scale = state["scale"]

        model = Extra(3, 1)
        optimizer = torch.optim.SGD(model.parameters())
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        model.scale = 5.0
        snapshot.restore()
        assert model.scale == 1.0

    def test_a_buffer_that_cannot_be_written_is_replaced(self):
        model = nn.Linear(3, 1)
        model.register_buffer("wide", torch.arange(2.0).expand(3, 2))
        optimizer = torch.optim.SGD(model.parameters())
        snapshot = Snapshot(model, optimizer)
        snapshot.take()
        model.wide = torch.zeros(2).expand(3, 2)
        snapshot.restore()
        assert model.wide.tolist() == [[0.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, o: (o, o), "model is AdamW: expected the torch.nn.Module"),
        (lambda m, o: (m, m), "optimizer is Sequential: expected a torch.optim.Optimizer"),
    ],
)
def test_arguments_of_other_types(make, words):
    with pytest.raises(InvalidTypeError, match=words):
        Snapshot(*make(*small()))


def test_a_wrapper_of_an_optimizer_is_refused():
    model, optimizer = small()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

    with pytest.raises(InvalidTypeError, match=r"optimizer is Wrapper, which wraps another: .* wrapper\.optimizer"):
        Snapshot(model, Wrapper(optimizer))


def test_accumulation_in_bfloat16_under_autocast():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    snapshot = Snapshot(model, optimizer)

    def steps():
        for seed in range(4):
            for part in torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(seed)):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(part).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return content(model, optimizer)

    steps()
    snapshot.take()
    first = steps()
    for _ in range(2):
        snapshot.restore()
        same(steps(), first)


def test_compiled_modules_keep_their_weights():
    model, optimizer = small()
    compiled = torch.compile(model, backend="eager")
    snapshot = Snapshot(compiled, optimizer)
    step(compiled, optimizer)
    snapshot.take()
    expected = content(model, optimizer)
    step(compiled, optimizer)
    snapshot.restore()
    same(content(model, optimizer), expected)


class Views(nn.Module):
    """A buffer that is a view of a weight, a flat buffer of which the weights are views, and two that are one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("column", self.layer.weight.data[:, :1])
        flat = torch.randn(10)
        self.register_buffer("flat", flat)
        self.first, self.last = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])
        self.register_buffer("one", torch.randn(3))
        self.register_buffer("other", self.one[1:])

    def forward(self, x):
        return self.layer(x @ self.first).sum() + self.last.sum()


@pytest.mark.parametrize("order", [("other", "one"), ("one", "one"), ("other", "other")])
def test_buffers_that_have_changed_places_come_back_each_with_its_own_numbers(order):
    model = nn.Module()
    model.register_buffer("one", torch.tensor([1.0, 2.0]))
    model.register_buffer("other", torch.tensor([3.0, 4.0]))
    model.weight = nn.Parameter(torch.zeros(1))
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshot.take()
    model.one, model.other = (getattr(model, name) for name in order)
    snapshot.restore()
    assert (model.one.tolist(), model.other.tolist()) == ([1.0, 2.0], [3.0, 4.0])
    assert model.one.data_ptr() != model.other.data_ptr()


def test_buffers_that_share_memory_go_on_sharing_it():
    model = Views()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    places = {name: one.data_ptr() for name, one in model.state_dict().items()}
    for _ in range(2):
        model(torch.ones(1, 2)).backward()
        optimizer.step()
        model.one.add_(1)
        snapshot.restore()
        assert {name: one.data_ptr() for name, one in model.state_dict().items()} == places
        for name, one in model.state_dict().items():
            assert torch.equal(one, before[name]), name

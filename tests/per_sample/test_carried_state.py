"""State that a forward carries from call to call: a running maximum agrees with its batch when a sample runs again."""

import functools
import random
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError

BATCH, WIDTH = 8, 6
SHARED: dict[str, float] = {}


class Net(nn.Module):
    """Divides its hidden values by the largest input so far, once ``on`` is set; each subclass keeps that elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.register_buffer("on", torch.tensor(0, dtype=torch.uint8))
        self.keep()

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.on:
            self.look(x.detach().abs().max())
        return self.last(hidden / self.size())


class InABuffer(Net):
    def keep(self):
        self.register_buffer("largest", torch.ones(()))

    def look(self, largest):
        self.largest.copy_(torch.maximum(self.largest, largest))

    def size(self):
        return self.largest.clone()


class InTheDataOfABuffer(InABuffer):
    def look(self, largest):
        self.largest.data = torch.maximum(self.largest, largest)


class InANewBuffer(InABuffer):
    def look(self, largest):
        self.largest = torch.maximum(self.largest, largest)


class InAnAttribute(InABuffer):
    def keep(self):
        self.largest = torch.ones(())


class InANewAttribute(InANewBuffer):
    def keep(self):
        self.largest = torch.ones(())


class InANumber(Net):
    def keep(self):
        self.largest = 1.0

    def look(self, largest):
        self.largest = max(self.largest, float(largest))

    def size(self):
        return self.largest


class InADict(Net):
    def keep(self):
        self.held = {"of": {"largest": torch.ones(())}}

    def look(self, largest):
        held = self.held["of"]["largest"]
        torch.maximum(held, largest, out=held)

    def size(self):
        return self.held["of"]["largest"].clone()


class InAnObject(Net):
    def keep(self):
        self.held = types.SimpleNamespace(largest=torch.ones(()))

    def look(self, largest):
        self.held.largest = torch.maximum(self.held.largest, largest)

    def size(self):
        return self.held.largest


class InAnArray(Net):
    def keep(self):
        self.held = torch.ones(1).numpy()

    def look(self, largest):
        self.held[0] = max(self.held[0], float(largest))

    def size(self):
        return float(self.held[0])


class InAGlobal(Net):
    def keep(self):
        SHARED["largest"] = 1.0

    def look(self, largest):
        SHARED["largest"] = max(SHARED["largest"], float(largest))

    def size(self):
        return SHARED["largest"]


class InAClosure(Net):
    def keep(self):
        largest = 1.0

        def look(new):
            nonlocal largest
            largest = max(largest, float(new))

        self.look = look
        self.size = lambda: largest


KEPT = [InABuffer, InTheDataOfABuffer, InANewBuffer, InAnAttribute, InANewAttribute, InANumber, InADict]
HIDDEN = [InAnObject, InAnArray, InAGlobal, InAClosure]


def stopped_at(kind, start, steps=24):
    """Return the step at which the clipper refuses, of inputs that grow from step to step."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    for step in range(steps):
        if step == start:
            model.on.fill_(1)
        inputs, targets = torch.randn(BATCH, WIDTH) * (1 + step / 5), torch.randn(BATCH, 3)
        optimizer.zero_grad()
        try:
            F.mse_loss(model(inputs), targets).backward()
            clipper.clip_and_accumulate()
        except UnsupportedGradientError:
            return step
        clipper.pre_step()
        optimizer.step()
    return None


def steps_of(model, forward=None, steps=12, sizes=(8, 8, 5, 8, 1, 8)):
    """Train for some steps; an error is the test's failure."""
    torch.manual_seed(0)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(sizes[step % len(sizes)], WIDTH)
        outputs = model(inputs) if forward is None else forward(model, inputs, step)
        outputs.square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        optimizer.step()


@pytest.mark.parametrize("kind", KEPT + HIDDEN)
def test_a_running_maximum_is_refused_on_the_first_step(kind):
    assert stopped_at(kind, start=0, steps=1) == 0


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("start", [9, 10])
def test_one_that_begins_later_is_refused_on_that_step(kind, start):
    assert stopped_at(kind, start, steps=start + 1) == start


@pytest.mark.parametrize("kind", HIDDEN)
def test_one_that_begins_later_in_a_hidden_place_is_found_on_the_steps_after(kind):
    assert 9 <= stopped_at(kind, start=9) < 24


def test_an_observer_of_quantization_that_is_switched_on_later_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import FakeQuantize, MinMaxObserver

        quantize = FakeQuantize(observer=MinMaxObserver, quant_min=0, quant_max=15)
    quantize.disable_observer()
    quantize.disable_fake_quant()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), quantize, nn.Linear(8, 3))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    for step in range(5):
        if step == 4:
            quantize.enable_observer()
            quantize.enable_fake_quant()
        with pytest.raises(UnsupportedGradientError, match="wrote into") if step == 4 else warnings.catch_warnings():
            F.mse_loss(model(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, 3)).backward()
            clipper.clip_and_accumulate()


class Counts(Net):
    """Counts its calls in a buffer, on every third of them, and does not use the number."""

    def keep(self):
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, x):
        self.number += 1
        if self.number % 3 == 0:
            self.calls += 1
        return self.last(torch.relu(self.first(x)))


def test_a_buffer_that_is_written_now_and_then_is_refused_once_at_most():
    torch.manual_seed(0)
    model, refused = Counts(), []
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    for _ in range(30):
        try:
            F.mse_loss(model(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, 3)).backward()
            clipper.clip_and_accumulate()
        except UnsupportedGradientError as error:
            refused.append(str(error))
    assert len(refused) <= 1
    assert all("Repeat this step" in words for words in refused)


def test_what_a_forward_keeps_and_does_not_use_is_its_own_business():
    seen = []

    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last_hidden = nn.Linear(WIDTH, 3), None

        def forward(self, x):
            self.last_hidden = self.layer(x)
            seen.append(float(x.detach().abs().max()))
            return self.last_hidden

    steps_of(Notes())
    assert seen


STORE: dict[str, Any] = {}


class StoresOnce(nn.Module):
    """Subtracts a number that a call has stored, of all its inputs, if none had."""

    def __init__(self, by_values=False):
        super().__init__()
        self.first, self.last, self.by_values = nn.Linear(WIDTH, 8), nn.Linear(8, 3), by_values
        self.fill()

    def fill(self):
        STORE["number"] = torch.zeros(())

    def reset(self):
        STORE["number"] = None

    def number(self, x):
        if STORE["number"] is None:
            STORE["number"] = self.of(x)
        return STORE["number"]

    def of(self, x):
        return x.detach().mean()

    def forward(self, x):
        hidden = self.first(x - self.number(x))
        if self.by_values:  # its samples then run one by one
            order = hidden[:, 0].argsort()
            hidden = hidden[order][order.argsort()]
        return self.last(torch.relu(hidden))


class StoresTheData(StoresOnce):
    def of(self, x):
        return x.mean().data


class StoresANumber(StoresOnce):
    def of(self, x):
        return x.abs().max().item()


class StoresInPlace(StoresOnce):
    def fill(self):
        STORE["number"], STORE["filled"] = torch.zeros(()), True

    def reset(self):
        STORE["filled"] = False

    def number(self, x):
        if not STORE["filled"]:
            STORE["number"].copy_(x.mean())
            STORE["filled"] = True
        return STORE["number"]


class StoresInAHiddenModule(StoresOnce):
    def fill(self):
        self.hidden = [nn.Module()]
        self.hidden[0].number = torch.zeros(())

    def reset(self):
        self.hidden[0].number = None

    def number(self, x):
        if self.hidden[0].number is None:
            self.hidden[0].number = self.of(x)
        return self.hidden[0].number


class StoresAndDraws(StoresOnce):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1)


STORES = [StoresOnce, StoresTheData, StoresANumber, StoresInPlace, StoresInAHiddenModule, StoresAndDraws]


@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("kind", STORES)
def test_a_number_that_one_call_stores_and_later_ones_use_is_refused_on_that_step(kind, at, by_values):
    model = kind(by_values)

    def forward(model, x, step):
        assert step <= at, "not refused"
        if step == at:
            model.reset()
        return model(x)

    with pytest.raises(UnsupportedGradientError, match="keeps values from call to call") as refused:
        steps_of(model, forward, sizes=(BATCH,))
    assert "samples that the clipper ran by themselves: set it anew" in str(refused.value)


def test_what_the_clippers_trial_left_in_a_hidden_place_is_refused_until_it_is_set_anew():
    model, refused = StoresOnce(), []
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(0.5))
    model.reset()
    for step in range(6):
        if step == 3:
            STORE["number"] = torch.ones(())
        try:
            model(torch.randn(BATCH, WIDTH)).square().sum(1).mean().backward()
            clipper.clip_and_accumulate()
        except UnsupportedGradientError:
            clipper.discard()
            refused.append(step)
    assert refused == [0, 1, 2]


def _of_sizes(x):
    if STORE.get("table") is None:
        STORE["table"] = torch.arange(x.shape[1], dtype=x.dtype) * torch.ones_like(x[0]) + x.new_zeros(()).to(x)
    return x + STORE["table"]


@functools.lru_cache
def _frequencies(width):
    return 1e4 ** (-torch.arange(width) / width)


def _of_a_parameter(x):
    if STORE.get("table") is None:
        with torch.no_grad():
            STORE["table"] = STORE["weight"].mean(0)
    return x + STORE["table"]


def _noted(x):
    STORE["table"] = 0.9 * STORE.get("table", torch.zeros(())) + 0.1 * x.detach().mean()
    return x


def _in_a_workspace(x):
    STORE.setdefault("space", torch.zeros(64, WIDTH))[: len(x)] = x
    return STORE["space"][: len(x)] * 2


@pytest.mark.parametrize(
    "change", [_of_sizes, lambda x: x * _frequencies(x.shape[1]), _of_a_parameter, _noted, _in_a_workspace]
)
def test_tables_notes_and_workspaces_in_hidden_places_are_accepted(change):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(change(x))))

    _frequencies.cache_clear()
    STORE.clear()
    model = Changes()
    STORE["weight"] = model.first.weight
    steps_of(model)


@pytest.mark.parametrize("place", ["attribute", "list", "object"])
def test_the_trial_draws_nothing_from_a_generator_that_the_model_holds(place):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, generator = nn.Linear(WIDTH, 3), torch.Generator().manual_seed(1)
            held = {"attribute": generator, "list": [generator], "object": types.SimpleNamespace(generator=generator)}
            self.held, self.drawn = held[place], lambda x: torch.randn(x.shape, generator=generator)

        def forward(self, x):
            return self.layer(x + self.drawn(x))

    model, generator = Noisy(), torch.Generator().manual_seed(1)

    def forward(model, x, step):
        output = model(x)
        expected = F.linear(x + torch.randn(x.shape, generator=generator), model.layer.weight, model.layer.bias)
        torch.testing.assert_close(output, expected)
        return output

    steps_of(model, forward)


def test_a_generator_of_the_models_own_is_no_carried_state():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generator = nn.Linear(WIDTH, 3), torch.Generator().manual_seed(1)

        def forward(self, x):
            return self.layer(x + torch.randn(x.shape, generator=self.generator))

    model = Noisy()
    steps_of(model)
    assert all(bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_layers_may_be_left_out_by_chance(draw):
    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            if draw() < 0.5:
                hidden = hidden + self.second(hidden)
            return self.last(hidden)

    random.seed(0)
    np.random.seed(0)
    steps_of(LayerDrop(), sizes=(8,))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, 3)
        self.encoder.requires_grad_(False).register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        return self.head(self.encoder(x))


def test_the_buffer_of_a_frozen_part_that_is_called_by_itself_may_change():
    def forward(model, x, step):
        model.encoder.mean.lerp_(torch.full((6,), float(step)), 0.1)
        return model.head(model.encoder(x))

    steps_of(Parts(), forward)


def test_a_forward_that_is_never_clipped_says_nothing_of_the_next_step():
    scale = [1.0]

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.layer(x) * scale[0]

    def forward(model, x, step):
        model(x)
        scale[0] = 1.0 + step
        return model(x)

    steps_of(Scaled(), forward)


def test_a_mask_that_grows_is_no_reason_to_refuse_a_step():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(1, 3), torch.ones(WIDTH)

        def forward(self, x):
            if len(self.mask) < x.shape[1]:
                self.mask = torch.ones(x.shape[1])
            return (self.layer(x[..., None]) * self.mask[: x.shape[1], None]).sum(1)

    def forward(model, x, step):
        return model(x.repeat(1, 2) if step >= 5 else x)

    steps_of(Masked(), forward)


def test_each_part_of_a_script_is_looked_at():
    class Part(nn.Module):
        def __init__(self, keeps):
            super().__init__()
            self.layer, largest = nn.Linear(WIDTH, WIDTH), [1e-3]

            def size(x):
                if keeps:
                    largest[0] = max(largest[0], float(x.detach().abs().max()))
                return largest[0]

            self.size = size

        def forward(self, x):
            return self.layer(x) / self.size(x)

    def forward(model, x, step):
        for part in model:
            x = part(x)
        return x

    parts = nn.ModuleList([Part(keeps=i == 5) for i in range(6)])
    with pytest.raises(UnsupportedGradientError, match="returns something else for sample"):
        steps_of(parts, forward, steps=1)


def test_samples_that_run_one_by_one_run_once_each_at_last():
    runs = []

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x):
            runs.append(len(x))
            return F.dropout(x, 0.1) @ self.weight.T

    def forward(model, x, step):
        runs.clear()
        return model(x)

    steps_of(Bare(), forward, steps=12, sizes=(8,))
    assert len(runs) == 1 + 8

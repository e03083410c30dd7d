"""Modules that were compiled run as they were written while a clipper is attached; what cannot be is refused."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError

B = 5


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.drop = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)).tanh() * self.scale


class Centred(Bare):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h - h.mean(0)


def network(kind: type[Bare] = Bare) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Linear(4, 2)).double()


def whole(model, backend):
    return torch.compile(model, backend=backend)


def part(model, backend):
    model[0] = torch.compile(model[0], backend=backend)
    return model


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def part_in_place(model, backend):
    model[0].compile(backend=backend)
    return model


def twice(model, backend):
    return torch.compile(part_in_place(model, backend), backend=backend)


def forward_only(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def function(model, backend):
    inner = torch.compile(lambda layer, x: layer.drop(layer.inner(x)).tanh() * layer.scale, backend=backend)
    model[0].forward = lambda x: inner(model[0], x)
    return model


WAYS = [whole, part, in_place, part_in_place, twice]


def data(size: int = B) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def step(model, clipper, size=B):
    model.zero_grad()
    torch.manual_seed(2)
    model(data(size)).square().sum(1).mean().backward()
    if clipper is not None:
        clipper.clip_and_accumulate()
        clipper.pre_step()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", [*WAYS, forward_only, function])
@pytest.mark.parametrize("when", ["before", "before, and used", "after the clipper", "after its first step"])
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch 2.15's compiler, of any function it leaves
def test_is_exact_for_every_size(compiled: Callable, backend, when):
    torch.compiler.reset()
    plain, model = network(), network()
    if "before" in when:
        model = compiled(model, backend)
    if "used" in when:
        step(model, None)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf))
    if "first step" in when:
        step(model, clipper)
    if "after" in when:
        model = compiled(model, backend)
    old_code = "used" in when and compiled in (forward_only, function)  # which may know nothing of the clipper
    with contextlib.suppress(UnsupportedGradientError) if old_code else contextlib.nullcontext():
        for size in (B, B, 1, 3):
            torch.testing.assert_close(step(model, clipper, size), step(plain, None, size), rtol=1e-12, atol=1e-14)
    clipper.detach()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_step_with_its_backward_is_clipped_as_one_that_is_not():
    """The compiler breaks the graph at the backward, and must not trace the code that looks at its roots."""
    torch.compiler.reset()
    plain, model = network(), network()
    compiled = torch.compile(step, backend="eager")
    clippers = [gg.PerSampleGradientClipper(one, gg.FlatNormClipper(0.1)) for one in (plain, model)]
    for size in (B, B, 3, B):
        found, expected = compiled(model, clippers[1], size), step(plain, clippers[0], size)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    backward = torch.compile(lambda: model(data()).square().sum(1).mean().square().backward(), backend="eager")
    backward()
    with pytest.raises(UnsupportedGradientError, match="the loss is not the mean over samples"):
        clippers[1].clip_and_accumulate()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiled", WAYS)
def test_it_is_compiled_again_after_detach(compiled):
    torch.compiler.reset()
    calls = []

    def counting(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = compiled(network(), counting)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    step(model, clipper)
    assert not calls
    clipper.detach()
    step(model, None)
    assert calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiled", WAYS)
def test_what_mixes_samples_is_refused(compiled):
    model = compiled(network(Centred), "eager")
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match="mix samples"):
        model(data())
    clipper.detach()

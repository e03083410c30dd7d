"""`ErrorClipStats` with `attach_error_clip`: counts in eager code as in a block, and refused in compiled code."""

import pytest
import torch
from compiled_cases import CLIP, MODELS, assert_equal, compiled, gradients, graphs
from torch._dynamo.utils import counters

import gradguard as gg
from gradguard.errors import InvalidTypeError


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(name):
    """Return a model, its statistics, its input, and a function of a rule and an input that returns the loss."""
    torch.manual_seed(0)
    model, x, loss = (part() if number < 2 else part for number, part in enumerate(MODELS[name]))
    stats = gg.ErrorClipStats(model)
    return model, stats, x, lambda rule, x: gg.attach_error_clip(loss(model(x)), rule, stats=stats)


def table(stats):
    rows = stats.rows()
    assert len({(row.op, row.module) for row in rows}) == len(rows)
    counted = {}
    for row in rows:
        counted[row.op, row.module] = row.gradients, row.elements, int(row.clipped), int(row.nonfinite)
    return counted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_eager_attach_counts_as_the_block_does(name):
    model, stats, x, step = made(name)
    for _ in range(2):
        found = gradients(model, step, CLIP, x)
    block = gg.ErrorClipStats(model)
    for _ in range(2):
        model.zero_grad()
        loss = MODELS[name][2](model(x))
        with gg.error_clip(loss, CLIP, stats=block):
            loss.backward()
    assert table(stats) == table(block)
    assert stats.blocks == block.blocks == 2
    assert_equal(found, [p.grad for p in model.parameters()])


def test_counts_in_compiled_code_are_refused_and_eager_code_counts():
    model, stats, x, step = made("mlp")
    fast = compiled(step)
    with pytest.raises(Exception, match=r'count in eager code, as within torch\.compiler\.set_stance\("force_eager"\)'):
        fast(CLIP, x)
    with torch.compiler.set_stance("force_eager"):
        fast(CLIP, x).backward()
    again, eager, _, step = made("mlp")
    step(CLIP, x).backward()
    assert table(stats) == table(eager)
    assert any(clipped for _, _, clipped, _ in table(stats).values())
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in again.parameters()])


def test_what_names_modules_is_no_part_of_compiled_code():
    model, stats, x, _ = made("mlp")
    step = compiled(lambda rule, x: gg.attach_error_clip(model(x).square().sum(), rule))
    gradients(model, step, CLIP, x)
    assert graphs() == 1
    with gg.error_clip(loss := model(x).square().sum(), CLIP, stats=stats):
        loss.backward()
    assert {module for _, module in table(stats)} > {""}


def test_what_is_no_statistics_is_refused():
    with pytest.raises(InvalidTypeError, match="stats is int"):
        gg.attach_error_clip(torch.ones(2, requires_grad=True).sum(), CLIP, stats=3)

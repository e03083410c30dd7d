"""`ErrorClipStats` with `attach_error_clip`: counts in eager code as in a block, in compiled code as in eager code."""

import re
from pathlib import Path

import pytest
import torch
from compiled_cases import CLIP, MODELS, RULES, assert_equal, compiled, gradients, graphs
from torch import nn
from torch._dynamo.utils import counters

import gradguard as gg
from gradguard.errors import InvalidTypeError

ONE_GRAPH = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="its compiler cannot trace the making of a rule"
)

COMPILERS_OWN = {"NativeBatchNormLegit": "NativeBatchNorm", "Select": "Unbind"}
"""Operations that the compiler records under another name."""


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
        op = row.op.removesuffix("Backward0")
        key = COMPILERS_OWN.get(op, op), row.module
        counted[key] = row.gradients, row.elements, int(row.clipped), int(row.nonfinite)
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


COMPILED = [
    *((name, "aot_eager") for name in MODELS if name not in {"dropout", "softmax"}),
    ("mlp", "eager"),
    ("attention", "eager"),
    *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("mlp", "attention")),
    pytest.param("lstm", "inductor", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]


@pytest.mark.sampled(3)
@ONE_GRAPH
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what Inductor imports
@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_compiled_counts_are_those_of_eager_code(name, backend):
    model, eager, x, step = made(name)
    for rule in (CLIP, gg.ErrorClipByValue(0.2)):
        expected = gradients(model, step, rule, x)
    again, stats, _, step = made(name)
    step = compiled(step, backend=backend)
    for rule in (CLIP, gg.ErrorClipByValue(0.2)):
        found = gradients(again, step, rule, x)
    assert table(stats) == table(eager)
    assert any(clipped for _, _, clipped, _ in table(stats).values())
    assert stats.blocks == 2
    assert stats.first_nonfinite is None
    assert graphs() == 1  # fullgraph=True: no break, and no new code for a new threshold
    if backend != "inductor":
        assert_equal(found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.slow
def test_compiled_counts_of_every_rule(rule):
    model, eager, x, step = made("mlp")
    gradients(model, step, rule, x)
    again, stats, _, step = made("mlp")
    gradients(again, compiled(step), rule, x)
    assert table(stats) == table(eager)


@pytest.mark.exhaustive
def test_compiled_for_several_sizes():
    model, eager, _, step = made("mlp")
    again, stats, _, same = made("mlp")
    same = compiled(same, dynamic=True)
    for size in (3, 5, 8):
        x = torch.linspace(-1, 1, 4 * size).view(size, 4)
        gradients(model, step, CLIP, x)
        gradients(again, same, CLIP, x)
        assert table(stats) == table(eager)
    assert graphs() == 1


def _infinite(model, stats):
    return lambda x: gg.attach_error_clip(
        (y := model(x)).sub(y.detach()).abs().sqrt().mean(), gg.rules.ErrorClipNonfinite("keep"), stats=stats
    )


@pytest.mark.sampled(1)
@ONE_GRAPH
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_names_the_first_non_finite_gradient(dynamic):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 4)
    lines = []
    for compile_it in (False, True):
        stats = gg.ErrorClipStats(model)
        finite = lambda x, stats=stats: gg.attach_error_clip(model(x).mean(), CLIP, stats=stats)  # noqa: E731
        infinite = _infinite(model, stats)
        if compile_it:
            finite, infinite = compiled(finite, dynamic=dynamic), compiled(infinite, dynamic=dynamic)
        for step in (finite, infinite, infinite):
            step(x).backward()
        lines.append(str(stats))
        stats.detach()
    assert "the gradient of the output of AbsBackward0, made by the backward of SqrtBackward0 (16 " in lines[0]
    # Tracing a backward has PyTorch remember source lines.
    lines[1], with_line = re.subn(
        rf"SqrtBackward0 \({Path(__file__).name}, line .*\) \(16 ", "SqrtBackward0 (16 ", lines[1]
    )
    assert with_line == 1
    assert lines[1] == (lines[0].replace("(16 of 16 elements)", "(16 elements)") if dynamic else lines[0])


def test_reset_forgets_compiled_counts_and_goes_on():
    model, stats, x, step = made("mlp")
    step = compiled(step)
    gradients(model, step, CLIP, x)
    once = table(stats)
    stats.reset()
    assert (stats.rows(), stats.blocks) == ([], 0)
    gradients(model, step, CLIP, x)
    assert table(stats) == once
    assert graphs() == 1


def test_counts_of_other_statistics_stay_apart():
    model, _, x, _ = made("mlp")
    first, second = gg.ErrorClipStats(), gg.ErrorClipStats()
    step = compiled(lambda x, stats: gg.attach_error_clip(model(x).square().sum(), CLIP, stats=stats))
    for stats in (first, second, second):
        step(x, stats).backward()
    assert (first.blocks, second.blocks) == (1, 2)
    assert {key: tuple(2 * n for n in row) for key, row in table(first).items()} == table(second)


def test_what_is_no_statistics_is_refused():
    with pytest.raises(InvalidTypeError, match="stats is int"):
        gg.attach_error_clip(torch.ones(2, requires_grad=True).sum(), CLIP, stats=3)


def test_more_operations_than_there_are_lines_are_refused(monkeypatch):
    monkeypatch.setattr("gradguard.backward_clip.compiled_counts._LINES", 3)
    model, _, x, step = made("mlp")
    with pytest.raises(Exception, match="more than 2 operations in all modules"):
        gradients(model, compiled(step), CLIP, x)

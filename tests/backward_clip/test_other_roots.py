"""A backward in the block that does not start at its loss, or not there alone, is clipped as with ``prune=False``."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pruning import DTYPES, RULES, assert_equal, leaves_of, programs, run
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard import torch_private

RULE = gg.ErrorClipByValue(1.0)


def joint(loss: Tensor, h: Tensor) -> None:
    (loss + 100 * h.sum()).backward()


def both(loss: Tensor, h: Tensor) -> None:
    torch.autograd.backward([loss, h], [None, torch.full_like(h, 100.0)])


def other(loss: Tensor, h: Tensor) -> None:
    (100 * h.sum()).backward()


def value_itself(loss: Tensor, h: Tensor) -> None:
    h.backward(torch.full_like(h, 100.0))


def edge(loss: Tensor, h: Tensor) -> None:
    torch.autograd.backward([get_gradient_edge(h)], [torch.full_like(h, 100.0)])


def gradient_of_inputs(loss: Tensor, h: Tensor) -> None:
    x = h.grad_fn.next_functions[0][0].variable
    (x.grad,) = torch.autograd.grad([loss, h.sum() * 100], x)


def one_after_the_other(loss: Tensor, h: Tensor) -> None:
    loss.backward(retain_graph=True)
    (100 * h.sum()).backward()


def the_other_before(loss: Tensor, h: Tensor) -> None:
    (100 * h.sum()).backward(retain_graph=True)
    loss.backward()


def in_a_thread(loss: Tensor, h: Tensor) -> None:
    thread = threading.Thread(target=joint, args=(loss, h))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (joint, 3.0), (both, 3.0), (other, 3.0), (value_itself, 3.0), (edge, 3.0), (gradient_of_inputs, 3.0),
        (in_a_thread, 3.0), (one_after_the_other, 6.0), (the_other_before, 6.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [False, True], ids=["in the block", "recorded before it"])
def test_a_value_whose_clamp_was_left_out_is_clamped(backward, expected, before):
    x = torch.ones(3, requires_grad=True)
    h = x * 3
    aside = h.exp().sum() * 1e3 if before else None  # another use, of which the graph of the loss knows nothing
    loss = F.relu(h).sum()
    with gg.error_clip(loss, RULE):
        backward(loss if aside is None or backward is value_itself else loss + 0 * aside, h)
    assert x.grad.tolist() == [expected] * 3


@pytest.mark.parametrize("root", ["loss", "a part of it", "a multiple", "with a term on leaves"])
def test_a_backward_that_goes_through_the_loss_alone_leaves_them_out(root, monkeypatch):
    x = torch.ones(3, requires_grad=True)
    loss = (x * 3).relu().sum()
    start = {"loss": loss, "a part of it": loss / 4, "a multiple": loss * 8, "with a term on leaves": loss + x.sum()}[
        root
    ]
    calls = []
    monkeypatch.setattr("gradguard.backward_clip.hooks.Clipping.leave_nothing_out", calls.append)
    with gg.error_clip(loss, gg.ErrorClipByValue(0.1)):
        start.backward()
    assert x.grad.tolist() == pytest.approx([1.3 if "term" in root else 0.3] * 3)
    assert not calls


def test_a_penalty_on_the_gradient_is_clipped():
    found = []
    for prune in (True, False):
        x = torch.ones(3, requires_grad=True)
        loss = (x * 3).relu().square().sum()
        with gg.error_clip(loss, gg.ErrorClipByValue(0.1), prune=prune):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (grad * (x * 3).relu()).sum().backward()
        found.append([x.grad])
    assert_equal(*found)


@settings(max_examples=60)
@given(programs, st.sampled_from(RULES), st.sampled_from(DTYPES), st.integers(0, 3), st.integers(0, 200))
def test_random_graphs_with_other_roots(program, rule, dtype, kind, which):
    found = []
    for prune in (True, False):
        leaves = leaves_of(3, dtype)
        loss = run(program, leaves)
        nodes = [loss.grad_fn]
        for node in nodes:
            nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes and n.next_functions]
        inner = nodes[which % len(nodes)]
        slot = torch.autograd.graph.GradientEdge(inner, 0)
        shape, kept = inner._input_metadata[0].shape, inner._input_metadata[0].dtype
        start = torch.full(tuple(shape), 7.0, dtype=kept)
        with gg.error_clip(loss, rule, prune=prune):
            if kind == 0:
                torch.autograd.backward([loss, slot], [None, start])
            elif kind == 1:
                torch.autograd.backward([slot], [start])
            elif kind == 2:
                torch.autograd.backward([slot], [start], retain_graph=True)
                loss.backward()
            else:
                loss.backward(retain_graph=True)
                torch.autograd.backward([loss, slot], [None, start])
        found.append([leaf.grad for leaf in leaves])
    assert_equal(*found)


def test_statistics_count_what_passes_from_other_roots():
    counts = []
    for prune in (True, False):
        x = torch.ones(3, requires_grad=True)
        h = x * 3
        loss, stats = F.relu(h).sum(), gg.ErrorClipStats()
        with gg.error_clip(loss, RULE, stats=stats, prune=prune):
            joint(loss, h)
        counts.append([(row.op, row.gradients, row.elements, int(row.clipped)) for row in stats.rows()])
    assert sorted(counts[0]) == sorted(counts[1])


def test_a_plan_that_cannot_be_made_is_one_warning_and_clips_everything(monkeypatch):
    def broken(self, slot):
        raise IndexError("an operator that nobody knew")

    monkeypatch.setattr("gradguard.backward_clip.pruning.Pruning.needs_no_clamp", broken)
    x = torch.ones(3, requires_grad=True)
    loss = (torch.cos(x * 3) * 5).relu().sum()
    with (
        pytest.warns(UserWarning, match=r"does all of them, more slowly.*IndexError: an operator that nobody knew"),
        gg.error_clip(loss, gg.ErrorClipByValue(0.5)),
    ):
        loss.backward()
    expected = torch.ones(3, requires_grad=True)
    twin = (torch.cos(expected * 3) * 5).relu().sum()
    with gg.error_clip(twin, gg.ErrorClipByValue(0.5), prune=False):
        twin.backward()
    assert torch.equal(x.grad, expected.grad)


def test_blocks_in_threads_leave_the_engine_as_it_was():
    others = list(torch_private._before_backwards)
    before = torch.autograd._engine_run_backward
    inside, outside = threading.Event(), threading.Event()

    def block() -> None:
        loss = (torch.ones(3, requires_grad=True) * 3).relu().sum()
        with gg.error_clip(loss, RULE):
            inside.set()
            outside.wait(60)
            loss.backward()

    thread = threading.Thread(target=block)
    loss = (torch.ones(3, requires_grad=True) * 3).relu().sum()
    with gg.error_clip(loss, RULE):
        thread.start()
        inside.wait(60)
    assert len(torch_private._before_backwards) > len(others)
    outside.set()
    thread.join()
    assert torch.autograd._engine_run_backward is before
    assert torch_private._before_backwards == others


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_returns_a_value_and_what_is_made_of_it(reentrant):
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 3
        return h, h.relu()

    for prune in (True, False):
        x = torch.ones(2, requires_grad=True)
        h, r = checkpoint(both, x, use_reentrant=reentrant)
        loss = (h * 5).sum() + (r * 7).sum()
        with gg.error_clip(loss, gg.ErrorClipByValue(0.1), prune=prune):
            loss.backward()
        assert x.grad.tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(
    "loss_of",
    [lambda x: (x * 3).tanh().tanh().abs().sum() * 7, lambda x: ((x * 3).view(2, 2) + 1).abs().sum()],
    ids=["tanh", "view and add"],
)
def test_a_plan_of_a_real_graph_does_not_serve_a_complex_one(loss_of):
    for dtype in (torch.float32, torch.complex64, torch.float32):
        found = []
        for prune in (True, False):
            x = torch.linspace(-1, 1, 4).to(dtype).requires_grad_()
            loss = loss_of(x)
            with gg.error_clip(loss, gg.ErrorClipByValue(0.1), prune=prune):
                loss.backward()
            found.append([x.grad])
        assert_equal(*found)


def test_a_checkpoint_of_ones_own_reads_attributes_of_what_it_runs():
    class OwnCheckpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.run_function = module
            ctx.save_for_backward(x)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run_function(x)
            made = torch.autograd.grad(y, [x, *ctx.run_function.parameters()], gradient)
            return made[0], None

    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    loss = OwnCheckpoint.apply(x * 1, layer).sum() * 3
    with gg.error_clip(loss, gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.abs().max() <= 0.5

"""A backward in the block that does not start at its loss, or not there alone, is clipped."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradguard as gg

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
def test_a_value_that_gets_a_gradient_from_elsewhere_is_clipped(backward, expected, before):
    x = torch.ones(3, requires_grad=True)
    h = x * 3
    aside = h.exp().sum() * 1e3 if before else None  # another use, of which the graph of the loss knows nothing
    loss = F.relu(h).sum()
    with gg.error_clip(loss, RULE):
        backward(loss if aside is None or backward is value_itself else loss + 0 * aside, h)
    assert x.grad.tolist() == [expected] * 3


@pytest.mark.parametrize("root", ["loss", "a part of it", "a multiple", "with a term on leaves"])
def test_a_backward_that_goes_through_the_loss_alone_is_clipped(root):
    x = torch.ones(3, requires_grad=True)
    loss = (x * 3).relu().sum()
    start = {"loss": loss, "a part of it": loss / 4, "a multiple": loss * 8, "with a term on leaves": loss + x.sum()}[
        root
    ]
    with gg.error_clip(loss, gg.ErrorClipByValue(0.1)):
        start.backward()
    assert x.grad.tolist() == pytest.approx([1.3 if "term" in root else 0.3] * 3)


def test_a_penalty_on_the_gradient_is_clipped():
    x = torch.ones(3, requires_grad=True)
    loss = (x * 3).relu().square().sum()  # gradients of square, relu and x * 3: 1, 6 and 6
    with gg.error_clip(loss, gg.ErrorClipByValue(0.1)):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        assert grad.tolist() == pytest.approx([0.3] * 3)
        (grad * (x * 3).relu()).sum().backward()
    assert x.grad.tolist() == pytest.approx([0.9] * 3)  # of the relu beside the loss; clamps that bind pass nothing on


def test_statistics_count_what_passes_from_other_roots():
    x = torch.ones(3, requires_grad=True)
    h = x * 3
    loss, stats = F.relu(h).sum(), gg.ErrorClipStats()
    with gg.error_clip(loss, RULE, stats=stats):
        joint(loss, h)
    counts = sorted((row.op, row.gradients, row.elements, int(row.clipped)) for row in stats.rows())
    assert counts == [("MulBackward0", 1, 3, 3), ("ReluBackward0", 1, 3, 0)]


def test_a_checkpoint_that_returns_a_value_and_what_is_made_of_it():
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 3
        return h, h.relu()

    x = torch.ones(2, requires_grad=True)
    h, r = checkpoint(both, x, use_reentrant=False)
    loss = (h * 5).sum() + (r * 7).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.1)):
        loss.backward()
    assert x.grad.tolist() == pytest.approx([0.3, 0.3])

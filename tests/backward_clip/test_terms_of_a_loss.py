"""The scalar terms that a loss is a sum of belong to the root; what is no such term is clipped, whatever the batch."""

import pytest
import torch
from torch import Tensor

import gradguard as gg

BOUND = 1e-6
"""Below every gradient here: whatever is clipped ends at it."""

# name: the loss of three 0-dim terms, and how the gradients of the terms compare with the unclipped ones
LOSSES = {
    "sum": lambda a, b, c: a + b + c,
    "weights": lambda a, b, c: 2 * a - 0.5 * b + c / 4,
    "subtracted from a number": lambda a, b, c: 1 - (a + b + c),
    "stack, mean": lambda a, b, c: torch.stack([a, b, c]).mean(),
    "stack, sum, weight": lambda a, b, c: 0.1 * torch.stack([a, b]).sum() + c,
    "cast, clone, negative": lambda a, b, c: -((a + b).double().clone() + c),
    "python's sum": lambda a, b, c: sum([a, b, c]),
}
NO_TERMS = {
    "a product": lambda a, b, c: a * b + c * a,
    "a function": lambda a, b, c: (a + b + c).exp(),
    "trained weights": lambda a, b, c: (a + b + c) * torch.ones((), requires_grad=True),
}


def gradients_of_terms(loss_of, clip: bool) -> list[Tensor]:
    """The gradients of the terms after their own clip, seen as the gradients of factors of 1 behind them."""
    factors = [torch.tensor(1.0, requires_grad=True) for _ in range(3)]
    terms = [factor * value for factor, value in zip(factors, (0.5, 0.3, 0.2), strict=True)]
    loss = loss_of(*terms)
    if not clip:
        return list(torch.autograd.grad(loss, terms))
    seen = []
    for term in terms:
        term.grad_fn.register_hook(lambda made, taken: seen.append(taken[0]))
    with gg.error_clip(loss, gg.ErrorClipByValue(BOUND)):
        loss.backward()
    return seen


@pytest.mark.parametrize("name", LOSSES)
def test_terms_keep_their_weight(name):
    expected = sorted(float(g) for g in gradients_of_terms(LOSSES[name], clip=False))
    assert sorted(float(g) for g in gradients_of_terms(LOSSES[name], clip=True)) == pytest.approx(expected)


@pytest.mark.parametrize("name", NO_TERMS)
def test_other_scalars_are_clipped(name):
    assert all(abs(float(g)) <= BOUND for g in gradients_of_terms(NO_TERMS[name], clip=True))


@pytest.mark.parametrize("batches", [(1, 4, 1), (4, 1, 4)])
def test_a_plan_made_for_one_batch_is_not_used_where_it_is_wrong_for_another(batches):
    x = torch.ones(1, requires_grad=True)
    for batch in batches:
        for values in ((x * torch.ones(batch)).squeeze(), (x * torch.ones(batch)).exp().mean(-1, keepdim=batch == 4)):
            loss = -(values * 1e3).mean()
            hidden = values.grad_fn
            seen = []
            handle = hidden.register_hook(lambda made, taken, seen=seen: seen.append(taken[0]))
            with gg.error_clip(loss, gg.ErrorClipByValue(BOUND)):
                loss.backward()
            handle.remove()
            is_term = values.dim() == 0 and hidden.name() == "MeanBackward1"
            assert (seen[0].abs().max() <= BOUND) is not is_term


def test_a_loss_of_thousands_of_terms():
    x = torch.ones(3, requires_grad=True)
    loss = x.new_zeros(())
    for _ in range(3000):
        loss = loss + (x * 2).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.tolist() == [3000.0] * 3  # each x * 2 gets 1, clipped to 0.5


def test_a_stack_of_vectors_is_no_stack_of_terms():
    x = torch.ones(3, requires_grad=True)
    loss = torch.stack([x * 2, x * 3]).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.tolist() == [2.5] * 3

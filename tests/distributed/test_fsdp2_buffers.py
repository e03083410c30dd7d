"""FSDP2's gradients are pieces of padded buffers, which may stand for them only where they are all of it."""

import math

import pytest
import torch
from training import backward, models, whole

import gradguard as gg
from gradguard.distributed import classes
from reference import total_norm

ORDERS = [0.5, 1.0, 2.0, 10.0, math.inf]


def leave_out_one(parameters):
    return parameters[:2] + parameters[3:]


def forget_one(parameters):
    parameters[4].grad = None
    return parameters


def replace_one(parameters):
    parameters[0].grad = parameters[0].grad.clone()
    return parameters


def all_but_one(parameters):
    for p in parameters[1:]:
        p.grad = None
    return parameters


LISTS = {
    "all": lambda q: q,
    "backwards": lambda q: q[::-1],
    "one left out": leave_out_one,
    "one None": forget_one,
    "one replaced": replace_one,
    "one alone": all_but_one,
    "every other": lambda q: q[::2],
    "every third": lambda q: q[1::3],
    "weights": lambda q: [p for p in q if p.dim() > 1],
    "gains and biases": lambda q: [p for p in q if p.dim() == 1],
    "twice": lambda q: q + q,
}


def norms_of_lists(way, micro_batches, bad):
    """For each list and order: the norm, the right one, and how many tensors were read."""
    read, real, found = [], classes.merged, {}

    def merged(parts, padded):
        kept = real(parts, padded)
        read.append((len(parts), len(kept)))
        return kept

    classes.merged = merged
    worth, classes._WORTH = classes._WORTH, 0  # these models are small
    try:
        for name, choose in LISTS.items():
            model, _ = models(way)
            backward(model, way, 0, micro_batches)
            listed = choose(list(model.parameters()))
            if bad:
                next(p.grad.to_local() for p in listed if p.grad is not None).view(-1)[:1] = bad
            right = [whole(p.grad) for p in dict.fromkeys(listed) if p.grad is not None]
            norms = [(float(gg.clip_grad_norm_(listed, math.inf, p)), total_norm(right, p)) for p in ORDERS]
            gg.clip_grad_norm_(listed, 0.1)
            after = [whole(p.grad) for p in dict.fromkeys(listed) if p.grad is not None]
            found[name] = norms, total_norm(right), right, after, read[-1]
    finally:
        classes.merged, classes._WORTH = real, worth
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "micro_batches"), [("FSDP2", 2), ("HSDP", 1), ("FSDP2 x TP", 1), ("FSDP2, mixed precision", 2)]
)
def test_buffers_stand_for_gradients_only_if_they_are_all_of_it(pool, way, micro_batches):
    for found in pool(4).run(norms_of_lists, way, micro_batches, None):
        for norms, norm, right, after, _ in found.values():
            for got, expected in norms:
                assert got == pytest.approx(expected, rel=1e-6)
            coefficient = min(1.0, 0.1 / (norm + 1e-6))
            torch.testing.assert_close(after, [g * coefficient for g in right], rtol=2e-6, atol=1e-8)
        parts, kept = found["all"][-1]
        assert kept < parts or way == "FSDP2 x TP"  # the short cut is taken


def test_nan_in_a_buffer(pool):
    for found in pool(4).run(norms_of_lists, "FSDP2", 1, math.nan):
        assert all(math.isnan(got) for norms, *_ in found.values() for got, _ in norms)


PIECES = {
    "all of it": ([(0, 2), (2, 4)], True),
    "backwards": ([(2, 4), (0, 2)], True),
    "a gap": ([(0, 2), (3, 3)], False),
    "the end is missing": ([(0, 2), (2, 3)], False),
    "one of them twice, and the lengths add up": ([(0, 2), (0, 2), (2, 2)], False),
    "they overlap, and the lengths add up": ([(0, 3), (2, 3)], False),
    "one alone": ([(0, 6)], False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_all_of_a_buffer_if_they_follow_one_another(name, monkeypatch):
    pieces, right = PIECES[name]
    buffer = torch.arange(1.0, 7.0)
    parts = [buffer[offset : offset + length] for offset, length in pieces]
    assert classes._are_all_of(buffer, pieces) is right
    monkeypatch.setattr(classes, "_WORTH", 0)
    kept = classes.merged(parts, [length for _, length in pieces])
    assert len(kept) == (1 if right else len(parts))
    assert total_norm(kept) == pytest.approx(total_norm(parts), rel=1e-6)

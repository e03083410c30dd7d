"""FSDP2's gradients are pieces of padded buffers; a list of parameters need not name all of one."""

import math

import pytest
import torch
from training import backward, models, whole

import gradguard as gg
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
    """For each list and order: the norm, the right one, and the gradients before and after a clip."""
    found = {}
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
        found[name] = norms, total_norm(right), right, after
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "micro_batches"), [("FSDP2", 2), ("HSDP", 1), ("FSDP2 x TP", 1), ("FSDP2, mixed precision", 2)]
)
def test_any_list_of_parameters_has_the_norm_of_its_gradients(pool, way, micro_batches):
    for found in pool(4).run(norms_of_lists, way, micro_batches, None):
        for norms, norm, right, after in found.values():
            for got, expected in norms:
                assert got == pytest.approx(expected, rel=1e-6)
            coefficient = min(1.0, 0.1 / (norm + 1e-6))
            torch.testing.assert_close(after, [g * coefficient for g in right], rtol=2e-6, atol=1e-8)


def test_nan_in_a_buffer(pool):
    for found in pool(4).run(norms_of_lists, "FSDP2", 1, math.nan):
        assert all(math.isnan(got) for norms, *_ in found.values() for got, _ in norms)

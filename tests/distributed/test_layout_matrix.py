"""The rows of `layout_matrix.py`: every layout of a model under every clip, against one process in float64."""

import pytest
import torch
from layout_matrix import CALLS, TABLE, differences, verdicts

import gradguard as gg

LOOKED_AT = {"FSDP2 x TP": 4, "DTensors: partial sum, rows": 2}
"""Layouts on a slice of the mesh, or of a gradient unlike its weight's: an audit once took their parts for copies."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "world"), TABLE)
def test_each_clip_is_that_of_one_process(pool, layout, world):
    found = verdicts(layout, pool(world).run(differences, layout))
    assert set(found.values()) <= {"held", "refused"}, found


@pytest.mark.parametrize(("layout", "world"), LOOKED_AT.items())
def test_layouts_that_an_audit_took_for_another(pool, layout, world):
    assert verdicts(layout, pool(world).run(differences, layout)) == dict.fromkeys(CALLS, "held")


def with_the_norm_of_this_process(layout):
    ours, gg.clip_grad_norm_ = (
        gg.clip_grad_norm_,
        lambda model, *args: torch.nn.utils.clip_grad_norm_(model.parameters(), *args),
    )
    try:
        return differences(layout)
    finally:
        gg.clip_grad_norm_ = ours


def test_a_norm_of_one_process_alone_is_found(pool):
    """That the matrix can fail: torch's own function sees only what a process of FSDP1 holds."""
    layout = "FSDP1, FULL_SHARD, original parameters"
    found = verdicts(layout, pool(2).run(with_the_norm_of_this_process, layout))
    assert [call for call, said in found.items() if said in ("held", "refused")] == ["value", "adaptive"]
    assert found["norm of order 2"].startswith("rank 0: norm ")

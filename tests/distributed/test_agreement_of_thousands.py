"""What one process of thousands does to agree: its memory does not grow with the world, but for the gathered table."""

import json
import tracemalloc

import pytest
import torch

from gradguard.distributed import agreement
from gradguard.distributed.reduction_group import ReductionGroup
from gradguard.errors import DistributedError

WORLD, STAGES = 16_384, 8
STAGE = WORLD // STAGES
LIST, OTHER = ["(shape (2,), float32)", "(shape (3,), float32)"], ["(shape (2,), float32)", "(shape (4,), float32)"]


@pytest.fixture
def thousands(monkeypatch):
    """Let `agree` run on rank 0 of eight stages; ``others`` are rows of the table that are unlike those of most."""
    others = {}
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group=None: WORLD)
    monkeypatch.setattr(agreement.dist, "get_process_group_ranks", lambda group: range(WORLD))

    def together(collective, *args, **options):
        rows, mine = collective.args
        table = rows[0]._base
        table.copy_(mine)
        table[:, 0] = torch.arange(WORLD) // STAGE * STAGE
        for rank, columns in others.items():
            for column, value in columns.items():
                table[rank, column] = value

    monkeypatch.setattr(agreement, "run_collective", together)
    return others


def agree(signature=LIST):
    union = ReductionGroup("all", frozenset(range(STAGE)))
    return agreement.agree(union, signature, (False, True), torch.device("cpu"))


def test_one_sender_for_each_stage(thousands):
    later = 3 * STAGE
    thousands.update({rank: {1: 7, 2: 99} for rank in range(later, later + STAGE)})  # a stage with a list of its own
    found = agree()
    mine = len(found.text)
    assert found.senders == {stage: stage for stage in range(0, WORLD, STAGE)}
    assert found.lengths == {stage: 99 if stage == later else mine for stage in range(0, WORLD, STAGE)}
    assert found.wishes == [False, True]


def test_a_rank_with_another_list_is_named(thousands, monkeypatch):
    wrong = 5 * STAGE + 17
    thousands[wrong] = {1: 7, 2: 33}
    thousands[wrong + 100] = {1: 8}

    def texts_of(union, mine, lengths, device):
        assert lengths == {wrong: 33, 5 * STAGE: len(mine)}
        return [json.dumps([x, None]).encode() for x in (OTHER, LIST)]

    monkeypatch.setattr(agreement, "texts_of", texts_of)
    words = rf"rank {wrong} came with another list of gradients than rank {5 * STAGE}: parameter 1 is \(shape \(4,\)"
    with pytest.raises(DistributedError, match=words):
        agree()


def test_memory_does_not_grow_with_the_world(thousands):
    agree()  # imports
    tracemalloc.start()
    found = agree()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.number > 0
    assert kept < 100_000
    assert peak < 2_500_000  # the set of the stage, and the views that the gather is given

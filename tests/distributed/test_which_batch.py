"""Which rank had the bad batch, on processes: the same answer everywhere, and one file with whole weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradguard.errors import InvalidValueError
from gradguard.resilience import BadSamples, Batches, find_culprit, write_evidence
from gradguard.resilience.evidence import read_evidence


def ring(bad_rank):
    """Ten steps of two micro-batches a rank; at the last, the second of ``bad_rank`` has a loss of 9."""
    rank, batches = dist.get_rank(), Batches(keep=True)
    for step in range(10):
        for number in range(2):
            bad = (step, number, rank) == (9, 1, bad_rank)
            batches.saw([1000 * rank + 10 * step + number], batch=torch.full((2, 4), float(rank)))
            batches.record_loss(9.0 if bad else 2.0 + 0.01 * rank)
        batches.end_step()
    return batches


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def blamed_and_written(folder, bad_rank, wrap):
    batches, model = ring(bad_rank), network()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    culprit = find_culprit(batches, 9)
    file = write_evidence(f"{folder}/{wrap}.pt", batches, culprit, model, before=9)
    bad = BadSamples(f"{folder}/{wrap}.jsonl")
    bad.add(culprit.ids, reason=culprit.reason)
    dist.barrier()
    found = read_evidence(f"{folder}/{wrap}.pt")
    same = whole.keys() == found.states[9].keys() and all(torch.equal(whole[n], found.states[9][n]) for n in whole)
    lines = len(Path(f"{folder}/{wrap}.jsonl").read_text(encoding="utf-8").splitlines())
    mine = float(found.suspects[0].content[0, 0])
    return culprit.as_dict(), file is not None, same, found.rank, mine, lines, len(bad), found.eval_modules


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_all_ranks_blame_the_same_and_one_writes(pool, tmp_path, wrap):
    told = pool(2).run(blamed_and_written, tmp_path, 1, wrap)
    (culprit, *_), (other, *_) = told
    assert culprit == other
    assert [(one["rank"], one["number"]) for one in culprit["blamed"]] == [(1, 1)]
    assert culprit["ids"] == [1091]
    assert len(culprit["micro_batches"]) == 4
    assert [one[1:] for one in told] == [
        (False, True, 1, 1.0, 1, 1, ()),
        (True, True, 1, 1.0, 1, 1, ()),
    ]


def forgotten(folder):
    batches = ring(1) if dist.get_rank() else Batches()
    with pytest.raises(InvalidValueError, match="step 9 is not in the ring, which holds 0 to 0"):
        find_culprit(batches, 9)
    return True


@pytest.mark.slow
def test_a_rank_that_has_forgotten_stops_all(pool, tmp_path):
    assert pool(2).run(forgotten, tmp_path) == [True, True]


def own_samples(folder):
    rank, bad = dist.get_rank(), BadSamples(f"{folder}/bad.jsonl")
    bad.add([7, 7, 10 + rank] if rank else [], reason="spike", rank=rank, gather=True)
    bad.add([7, 20 + rank], rank=rank, gather=True)
    dist.barrier()
    return [one.id for one in bad], [one.id for one in BadSamples(f"{folder}/bad.jsonl")]


@pytest.mark.slow
def test_samples_of_all_ranks_are_left_out_by_all(pool, tmp_path):
    expected = [7, 11, 20, 21]
    assert pool(2).run(own_samples, tmp_path) == [(expected, expected)] * 2

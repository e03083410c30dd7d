"""`SpikeRecovery` on two processes: all name the one that had the sample, and it alone writes the evidence."""

import warnings

import torch
from torch import nn

import gradguard as gg
from gradguard.resilience import BadSamples
from gradguard.resilience.evidence import read_evidence


def trained(folder, sharded, spike):
    rank = torch.distributed.get_rank()
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 0.5)
    if sharded:
        torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    bad, detector = BadSamples(), gg.SpikeDetector(warmup=8, window=16, cap=6, alone=1)
    resilience = gg.SpikeRecovery(
        model,
        optimizer,
        gg.ClipByGlobalNorm(1.0),
        detector=detector,
        bad_samples=bad,
        snapshot_every=10,
        evidence=folder,
    )
    for number in range(1, 22):
        optimizer.zero_grad()
        for k in range(2):
            x = torch.full((1, 2), spike if (number, rank, k) == (21, 1, 1) else 1.0)
            resilience.batch([100 * number + 10 * rank + k], x)
            resilience.record_loss(model(x).square().mean()).backward()
        optimizer.step()
        event = resilience.step()
    return event.ids, event.rank, [(one.id, one.rank) for one in bad]


def test_every_process_names_the_one_that_had_it(pool, tmp_path):
    for sharded in (False, True):
        folder = tmp_path / str(sharded)
        assert pool(2).run(trained, str(folder), sharded, 20.0) == [((2111,), 1, [(2111, 1)])] * 2
        (file,) = folder.iterdir()
        found = read_evidence(file)
        assert (found.rank, [one.ids for one in found.suspects]) == (1, [(2111,)])
        assert [weights["weight"].shape for weights in found.states.values()] == [(2, 2)] * 2


def trained_where_one_cannot_write(folder, file):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, rank, _ = trained(file if torch.distributed.get_rank() == 0 else folder, True, 20.0)
    return rank, ["no evidence of step 21 was written" in str(one.message) for one in said]


def test_a_process_that_cannot_make_the_folder_leaves_no_other_waiting(pool, tmp_path):
    """It left them in the middle of gathering weights."""
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert pool(2).run(trained_where_one_cannot_write, str(tmp_path / "new"), str(file)) == [(1, [True]), (1, [])]
    assert read_evidence(tmp_path / "new" / "spike-21.pt").rank == 1

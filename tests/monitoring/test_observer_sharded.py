"""Gradients of which each process holds a part: one record with the true norms, and nobody who waits for a watcher."""

import math
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

import gradguard as gg
from distributed.pool import Pools
from gradguard import Monitor
from gradguard.clip.guards_of_a_script import ClipEachOptimizer
from gradguard.errors import DistributedError
from gradguard.monitoring.observe import shared_norms
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import read_record
from gradguard.rules import Clipper
from gradguard.script_events import listening

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield lambda *call: pools(2).run(*call)
    pools.close()


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def an_optimizer(sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = a_model()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        if step % 2:
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def weights_of(model: nn.Module) -> list[Any]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.tolist() for p in whole]


class Trouble:
    """Raises from the ``first`` call on."""

    def __init__(self, original: Any, first: int) -> None:
        self._original, self._left = original, first

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("on purpose")
        return self._original(*args)


def unwatched() -> list[Any]:
    model, optimizer = an_optimizer()
    train(model, optimizer)
    return weights_of(model)


def watched(path: str, trouble: tuple[int, str] | None) -> list[Any]:
    """Train with an observer; on the process ``trouble[0]`` what is called ``trouble[1]`` fails at the third step."""
    model, optimizer = an_optimizer()
    observer = Observer(Path(path) if dist.get_rank() == 0 else None, {}, every=1)
    with ExitStack() as stack:
        stack.enter_context(listening(observer))
        if trouble is not None and dist.get_rank() == trouble[0]:
            home = observer if hasattr(observer, trouble[1]) else shared_norms
            calls = 3 if home is shared_norms else 2  # one of them is the clip's
            broken = Trouble(getattr(home, trouble[1]), calls)
            stack.enter_context(patch.object(home, trouble[1], broken))
        train(model, optimizer)
    observer.close(0, False)
    return weights_of(model)


def alone(path: Path) -> tuple[list[Any], Any]:
    model, optimizer = an_optimizer(sharded=False)
    observer = Observer(path, {}, every=1, diagnostics_every=0)
    with listening(observer):
        train(model, optimizer)
    observer.close(0, False)
    return weights_of(model), read_record(path)


def clipped(path: str | None, rule: type[Clipper], sharded: bool = True) -> list[Any]:
    """Train under a clip that the observer applies, as ``gradguard run --clip`` does."""
    model, optimizer = an_optimizer(sharded)
    observer = Observer(None if path is None else Path(path), {}, ClipEachOptimizer(rule), diagnostics_every=0)
    with listening(observer):
        train(model, optimizer)
    observer.close(0, False)
    return weights_of(model)


def clipped_on_each(path: str, rule: type[Clipper]) -> list[Any]:
    return clipped(path if dist.get_rank() == 0 else None, rule)


def numbers(steps: list[dict[str, Any]]) -> list[Any]:
    keys = ("i", "norm", "post_norm", "coefficient", "threshold")
    return [{key: step[key] for key in keys if key in step} for step in steps]


@pytest.mark.usefixtures("others_unseen")
def test_true_norms_one_record_and_the_same_weights(pair, tmp_path):
    path = tmp_path / "run.jsonl"
    first, second = pair(watched, str(path), None)
    assert first == second == pair(unwatched)[0]
    _, expected = alone(tmp_path / "alone.jsonl")
    record = read_record(path)
    assert record.events == []
    assert (record.meta["world"], record.meta["rank"], record.meta["mesh"]) == (2, 0, {"dp": 1, "tp": 2})
    for step, other in zip(numbers(record.steps), numbers(expected.steps), strict=True):
        assert step == pytest.approx(other, rel=1e-4)
    for line, other in zip(record.tensors, expected.tensors, strict=True):
        assert line["norm"] == pytest.approx(other["norm"], rel=1e-3)
        assert line.keys() - {"moved"} == {"t", "i", "norm"}  # what is dear would be of one part
    moved, of_whole = record.tensors[0]["moved"], expected.tensors[0]["moved"]
    assert moved == pytest.approx(of_whole, rel=0.5)  # by this process's part


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("trouble", "recorded", "words"),
    [
        ((1, "_measured"), STEPS, ""),
        ((0, "_measured"), 2, "ValueError: on purpose"),
        ((1, "tensor_norms"), 2, "another process could not measure"),
        ((0, "tensor_norms"), 2, "ValueError: on purpose"),
    ],
)
def test_nobody_waits_for_a_process_whose_watching_fails(pair, tmp_path, trouble, recorded, words):
    path = tmp_path / "run.jsonl"
    first, second = pair(watched, str(path), trouble)
    assert first == second == pair(unwatched)[0]
    record = read_record(path)
    assert len(record.steps) == recorded
    assert [event["kind"] for event in record.events] == ["observer_failed"] * bool(words)
    assert all(words in event["message"] for event in record.events)
    assert record.end is not None


def measured_together(first: int) -> tuple[list[Any], bool]:
    """Measure sums over processes, from step ``first`` on, five times; on process 1 it fails at the third."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]))
    watch, found = shared_norms.SharedNorms(), list[Any]()
    broken = Trouble(shared_norms.tensor_norms, 2 if dist.get_rank() == 1 else 9)
    with patch.object(shared_norms, "tensor_norms", broken):
        for step in range(5):
            p.grad = DTensor.from_local(torch.ones(6, 2), mesh, [Partial()])
            if step < first:
                p.grad = p.grad.redistribute(mesh, [Shard(0)])
            _, shared = watch.join([p], lambda error: found.append(f"{type(error).__name__}: {error}"))
            found.append(None if shared is None else shared.norms)
    total = torch.ones(())
    dist.all_reduce(total)
    return found, float(total) == 2


@pytest.mark.parametrize("first", [0, 4])
def test_sums_are_added_up_with_a_process_whose_watching_fails(pair, first):
    """It added up its nothing with what the others asked about their sums: they waited, or one of them died."""
    (lost, right), (failed, also) = pair(measured_together, first)
    norm = [pytest.approx(2 * math.sqrt(12))]
    words = "DistributedError: another process could not measure its part of the gradients; its stderr says why"
    assert lost == [norm, norm, *[words, None] * 3]
    assert failed[:4] == [norm, norm, "ValueError: on purpose", None]
    assert (right, also) == (True, True)


def monitored(breaks: bool) -> tuple[list[Any], list[Any]]:
    model, optimizer = an_optimizer()
    lines: list[Any] = []
    with Monitor(optimizer, sink=lines.append, model=model, every=1) as monitor, ExitStack() as stack:
        if breaks and dist.get_rank() == 1:
            stack.enter_context(patch.object(monitor._places, "of", Trouble(None, 0)))
            stack.enter_context(pytest.warns(RuntimeWarning, match="on purpose"))
        train(model, optimizer)
    return weights_of(model), lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_monitor_on_each_process(pair, tmp_path, breaks):
    (weights, lines), (_, none) = pair(monitored, breaks)
    assert none == []
    assert weights == pair(unwatched)[0]
    _, expected = alone(tmp_path / "alone.jsonl")
    steps = [line for line in lines if line["t"] == "step"]
    for step, other in zip(numbers(steps), numbers(expected.steps), strict=True):
        assert step == pytest.approx(other, rel=1e-4)


def clipped_adaptively(path: str) -> None:
    model, optimizer = an_optimizer()
    observer = Observer(Path(path) if dist.get_rank() == 0 else None, {}, every=1)
    with listening(observer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            gg.clip_grad_adaptive_(model, 0.01)
            optimizer.step()
    observer.close(0, False)


def test_all_processes_measure_before_an_adaptive_clip_where_one_holds_nothing_of_a_layer(pair, tmp_path):
    path = tmp_path / "run.jsonl"
    pair(clipped_adaptively, str(path))
    record = read_record(path)
    assert record.events == []
    assert len(record.steps) == 3
    assert all(step["post_norm"] < step["norm"] for step in record.steps)


def test_a_collective_that_fails_ends_the_watch_with_one_warning(tmp_path, monkeypatch, capfd):
    calls = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise DistributedError("rank 1 did not come")

    monkeypatch.setattr("gradguard.monitoring.observe.observer.several_processes", lambda: True)
    monkeypatch.setattr(shared_norms, "are_spread", lambda parameters: True)
    monkeypatch.setattr(shared_norms, "plan_for", fails)
    model, optimizer = an_optimizer(sharded=False)
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        train(model, optimizer)
    observer.close(0, False)
    assert len(calls) == 1
    assert capfd.readouterr().err.count("rank 1 did not come") == 1
    (event,) = read_record(observer.path).events
    assert event["kind"] == "observer_failed"


SCRIPT = """
import hashlib, os, sys
sys.path.insert(0, {home!r})
import torch.distributed as dist
from test_observer_sharded import an_optimizer, train, weights_of
dist.init_process_group("gloo")
model, optimizer = an_optimizer()
train(model, optimizer)
weights = weights_of(model)
if dist.get_rank() == 0:
    print("weights", hashlib.sha256(repr(weights).encode()).hexdigest())
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_torchrun_with_and_without_gradguard_run(tmp_path):
    home = Path(__file__).parent
    tmp_path.joinpath("train.py").write_text(
        f"import sys; sys.path.insert(0, {str(home.parent)!r})" + SCRIPT.format(home=str(home)),
        encoding="utf-8",
    )
    said = []
    for program in (["train.py"], ["-m", "gradguard", "run", "--out", "out", "train.py"]):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
        done = subprocess.run(launch, cwd=tmp_path, check=True, timeout=240, capture_output=True, text=True)
        said.append([line for line in done.stdout.splitlines() if line.startswith("weights ")])
    assert said[0] == said[1]
    assert len(said[0]) == 1
    record = read_record(tmp_path / "out")
    assert len(record.steps) == STEPS
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["run.jsonl"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", [gg.ClipByMedian, gg.AutoClip, gg.AdaGC])
def test_a_clip_of_ours_follows_the_norms_of_the_whole(pair, tmp_path, rule):
    first, second = pair(clipped_on_each, str(tmp_path / "shards.jsonl"), rule)
    whole = clipped(str(tmp_path / "whole.jsonl"), rule, sharded=False)
    for weights in (first, second):
        for ours, theirs in zip(weights, whole, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
    shards, one = (numbers(read_record(tmp_path / f"{name}.jsonl").steps) for name in ("shards", "whole"))
    for ours, theirs in zip(shards, one, strict=True):
        assert {k: x for k, x in ours.items() if x is not None} == pytest.approx(
            {k: x for k, x in theirs.items() if x is not None}, rel=1e-3
        )

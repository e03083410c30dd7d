import importlib
import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradguard import Monitor
from gradguard.errors import GradguardError, MissingPackageError
from gradguard.monitoring.observe import record_buffer
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.show.sinks import Sinks, open_sink
from gradguard.monitoring.show.sinks.sink import DashboardWindow
from gradguard.monitoring.show.sinks.text_lines import JsonLinesSink

NORMS = [1.0, 2.0, 9.0, 4.0]
"""Of the gradients of the steps of `train`; the third is not finite on top of it."""

EXPECTED = {
    "gradguard/norm_min": 1.0,
    "gradguard/norm_mean": 7 / 3,
    "gradguard/norm_max": 4.0,
    "gradguard/loss": 6.0,
    "gradguard/lr": 0.5,
    "gradguard/accuracy": 0.25,
    "gradguard/update": 2.0,
    "gradguard/nonfinite_steps": 1,
    "gradguard/skipped_steps": 0,
}


def train(sink, steps=4):
    """Four steps with known norms, of which the third is infinite."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with Monitor(optimizer, sink=sink, every=1) as monitor:
        for i in range(steps):
            weight.grad = torch.tensor([NORMS[i % 4] if i % 4 != 2 else torch.inf])
            optimizer.step()
            monitor.log(loss=6.0, accuracy=0.25)
    return monitor


def step(i, **fields):
    return {"t": "step", "i": i} | fields


# -- what a dashboard shows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], {}),
        ([{"t": "event", "i": 3, "kind": "nonfinite"}], {}),
        ([step(0)], {"nonfinite_steps": 0, "skipped_steps": 0}),
        (
            [step(0, norm=3.0), step(1, norm=None, nonfinite=1, skipped=True), step(2, norm=1.0)],
            {"norm_min": 1.0, "norm_mean": 2.0, "norm_max": 3.0, "nonfinite_steps": 1, "skipped_steps": 1},
        ),
        (
            [
                step(0, coefficient=1.0, threshold=2.0, rule="norm"),
                step(1, coefficient=0.5, threshold=3.0, rule="norm"),
            ],
            {"coefficient": 0.75, "threshold": 3.0, "clip_fraction": 0.5, "nonfinite_steps": 0, "skipped_steps": 0},
        ),
        (
            [step(0, lr=0.1, mine=2, top=[0, 0.5], wall=3.0, flag=True), step(1, lr=0.2, mine=float("nan"))],
            {"lr": 0.2, "mine": 2.0, "nonfinite_steps": 0, "skipped_steps": 0},
        ),
    ],
)
def test_a_window_is_about_ten_numbers(steps, expected):
    window = DashboardWindow()
    for line in steps:
        window.add(line)
    assert window.scalars() == pytest.approx(expected)


# -- several sinks -----------------------------------------------------------------------------------------------------


def test_a_file_and_a_function_get_the_same_lines(tmp_path):
    seen, path = [], tmp_path / "run.jsonl"
    train([path, seen.append])
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["t"] for line in written] == [line["t"] for line in seen]
    for mine, its in zip(written, seen, strict=True):
        assert set(mine) == set(its)
    bad = seen[[line["t"] for line in seen].index("event") - 2]
    assert (bad["i"], bad["norm"], bad["nonfinite"]) == (2, None, 1)
    assert read_record(path).end["steps"] == 4


def test_a_function_may_change_its_lines():
    seen = []
    train([lambda line: line.clear(), seen.append])
    assert all(line["t"] for line in seen)


class Broken:
    def __init__(self, where):
        self.where, self.calls = where, 0

    def __call__(self, line):
        self.calls += 1
        if line["t"] == self.where:
            raise ConnectionError("the server is gone")


@pytest.mark.parametrize("where", ["meta", "step", "end"])
def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_go_on(where, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 1)
    seen, broken = [], Broken(where)
    with pytest.warns(RuntimeWarning, match="writing to Broken ended: ConnectionError: the server is gone") as caught:
        train([broken, seen.append])
    assert len(caught) == 1
    assert [line["i"] for line in seen if line["t"] == "step"] == [0, 1, 2, 3]
    assert seen[-1]["t"] == "end"


def test_when_all_sinks_have_failed_it_stops(monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 1)
    with pytest.warns(RuntimeWarning, match="writing to Broken ended"):
        monitor = train(Broken("step"))
    assert monitor.steps == 2


def test_a_full_disk_ends_the_file_and_not_the_training():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    seen = []

    sinks = Sinks([seen.append])
    sinks._open.insert(0, JsonLinesSink(Path("/dev/full")))
    with pytest.warns(RuntimeWarning, match=r"writing to /dev/full ended: No space left"):
        sinks.push([{"t": "meta"}])
    sinks.push([{"t": "end"}])
    assert [line["t"] for line in seen] == ["meta", "end"]
    sinks.close()


def test_what_was_opened_is_closed_if_the_next_cannot_be(tmp_path):
    with pytest.raises(GradguardError, match="sink is 7"):
        Sinks([tmp_path / "run.jsonl", 7])
    Sinks([tmp_path / "run.jsonl"]).close()  # not "being written by another Monitor"


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("trackio", "trackio")],
)
def test_a_missing_package_is_named_with_what_to_type(name, module, monkeypatch):
    real = importlib.import_module

    def without(wanted, *rest):
        if wanted == module:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(wanted, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingPackageError, match=rf"sink='{name}' needs .* pip install 'gradguard\[{name}\]'"):
        open_sink(name)


# -- the real packages -------------------------------------------------------------------------------------------------


def tensorboard_scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_by_name(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    train("tensorboard")
    (folder,) = (tmp_path / "runs").iterdir()
    found = tensorboard_scalars(folder)
    assert {tag: points[-1][1] for tag, points in found.items()} == pytest.approx(EXPECTED)
    assert {points[-1][0] for points in found.values()} == {3}


def test_a_summary_writer_of_the_users_stays_open(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 2)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(writer)
        writer.add_scalar("mine", 1.0, 7)
    found = tensorboard_scalars(tmp_path)
    assert found["mine"] == [(7, 1.0)]
    assert found["gradguard/norm_max"] == [(1, 2.0), (3, 4.0)]


def mlflow_in(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    return mlflow


def mlflow_metrics(mlflow, run):
    client = mlflow.MlflowClient()
    keys = client.get_run(run).data.metrics
    return {key: [(m.step, m.value) for m in client.get_metric_history(run, key)] for key in keys}


def test_mlflow_by_name(tmp_path, monkeypatch):
    mlflow = mlflow_in(tmp_path, monkeypatch)
    train("mlflow")
    assert mlflow.active_run() is None
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.status == "FINISHED"
    found = mlflow_metrics(mlflow, run.info.run_id)
    assert {key: points[-1][1] for key, points in found.items()} == pytest.approx(EXPECTED)
    assert {points[-1][0] for points in found.values()} == {3}


@pytest.mark.parametrize("by_name", [True, False])
def test_an_mlflow_run_of_the_users_stays_open(by_name, tmp_path, monkeypatch):
    mlflow = mlflow_in(tmp_path, monkeypatch)
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 2)
    with mlflow.start_run() as run:
        train("mlflow" if by_name else run)
        mlflow.log_metric("mine", 1.0, step=7)
        mlflow.flush_async_logging()  # ours are sent by its own thread
    found = mlflow_metrics(mlflow, run.info.run_id)
    assert found["mine"] == [(7, 1.0)]
    assert sorted(found["gradguard/norm_max"]) == [(1, 2.0), (3, 4.0)]  # points of one millisecond come in any order


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    settings = {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}
    patience = {"INIT_TIMEOUT": "200", "_SERVICE_WAIT": "200"}  # seconds, for machines that are busy
    for name, value in (settings | patience).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()  # where the test has failed


def wandb_records(path):
    """The records of an offline run: after 7 bytes, blocks of 32 kB of chunks as LevelDB's logs have them."""
    data, whole, position = path.read_bytes(), b"", 7
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last chunk
            yield whole
            whole = b""


def wandb_rows(folder):
    """The history of the one offline run below ``folder``."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # ends the process that writes the file
    (path,) = folder.rglob("*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(path)]
    histories = [record.history.item for record in records if record.HasField("history")]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in histories
    ]


@pytest.mark.exhaustive
def test_wandb_by_name(wandb_offline, tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 3)
    train("wandb", steps=8)
    assert wandb_offline.run is None
    rows = wandb_rows(tmp_path)
    assert [row["gradguard/step"] for row in rows] == [2, 5, 7]
    assert {key: value for key, value in rows[0].items() if "norm_" in key} == {
        "gradguard/norm_min": 1, "gradguard/norm_mean": 1.5, "gradguard/norm_max": 2,
    }  # fmt: skip
    assert len([key for key in rows[0] if key.startswith("gradguard/")]) == len(EXPECTED) + 1


@pytest.mark.parametrize("by_name", [True, False])
def test_a_wandb_run_of_the_users_keeps_its_steps_and_gets_every_spike(by_name, wandb_offline, tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 1)
    run = wandb_offline.init(project="mine")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with Monitor(optimizer, sink="wandb" if by_name else run) as monitor:
        for i, norm in enumerate([1.0, 7.0, 2.0, 3.0, 4.0]):
            weight.grad = torch.tensor([norm])
            optimizer.step()
            monitor.flush()
            if i in (2, 4):
                run.log({"epoch_loss": i}, step=i // 2)
    run.log({"epoch_loss": 9}, step=3)
    run.finish()
    rows = wandb_rows(tmp_path)
    assert [(row["_step"], row["epoch_loss"]) for row in rows if "epoch_loss" in row] == [(1, 2), (2, 4), (3, 9)]
    assert max(row.get("gradguard/norm_max", 0) for row in rows) == 7
    assert min(row.get("gradguard/norm_min", 9) for row in rows) == 1


@pytest.mark.slow
def test_trackio_by_name_and_in_a_run_of_the_users(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    train("trackio")
    assert trackio.context_vars.current_run.get() is None
    run = trackio.init(project="mine", auto_log_cpu=False)
    train("trackio")
    train(run)
    run.log({"mine": 1.0}, step=7)
    trackio.finish()
    (name,) = storage.get_runs("gradguard")
    own, users = storage.get_logs("gradguard", name), storage.get_logs("mine", run.name)
    for row in (*own, *users[:2]):
        assert row["step"] == 3
        assert {key: value for key, value in row.items() if key in EXPECTED} == pytest.approx(EXPECTED)
    assert (users[-1]["mine"], users[-1]["step"], len(own), len(users)) == (1.0, 7, 1, 3)

"""How a recording ends, who writes it, and that no way of ending it reaches the training."""

import gc
import os
import shutil
import sys
import threading
import time
import types
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard import watch
from gradguard.errors import InvalidTypeError, InvalidValueError, RecordError
from gradguard.monitoring.observe import meta, record_buffer
from gradguard.monitoring.observe import watch as process
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import RecordWriter, read_record
from gradguard.script_events import listening

pytestmark = pytest.mark.sampled(1)  # rows of each table


@pytest.fixture(autouse=True)
def _alone(others_unseen):
    yield
    process.stop_watching()


class Training:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **({"lr": 0.1} | options))

    def steps(self, count: int, clip: float | None = None, scale: float = 1.0) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            (self.model(torch.randn(3, 4)).square().sum() * scale).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_thread_has_the_losses_of_its_own_training(tmp_path):
    meeting, trained = threading.Barrier(2, timeout=200), {}

    def train(loss: float) -> None:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=loss)
        for _ in range(4):
            optimizer.zero_grad()
            (weight.sum() * 0 + loss).backward()
            meeting.wait()
            optimizer.step()
            trained[loss] = optimizer
            meeting.wait()

    with watch(tmp_path / "run.jsonl"):
        in_threads(lambda: train(1.0), lambda: train(10.0))
    steps = read_record(tmp_path / "run.jsonl").steps
    assert {(step["lr"], step.get("loss")) for step in steps[:2]} == {(1.0, None), (10.0, None)}  # not known yet whose
    assert {(step["lr"], step.get("loss")) for step in steps[2:]} == {(1.0, 1.0), (10.0, 10.0)}


def test_a_backward_in_a_worker_belongs_to_the_step_of_another_thread(tmp_path):
    train, losses = Training(), []

    def backward() -> None:
        losses.append(train.model(torch.randn(3, 4)).square().sum())
        losses[-1].backward()

    with watch(tmp_path / "run.jsonl"):
        for _ in range(3):
            train.optimizer.zero_grad()
            in_threads(backward)
            train.optimizer.step()
    found = [step["loss"] for step in read_record(tmp_path / "run.jsonl").steps]
    assert found == pytest.approx([loss.item() for loss in losses], rel=1e-5)


class Full(RecordWriter):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("clears", [True, False])
def test_a_loss_belongs_to_a_step_only_if_its_gradients_do(clears, tmp_path):
    """A step of SAM measures first and goes back; micro-batches add up."""
    train = Training()
    with watch(tmp_path / "run.jsonl"):
        for step in range(5):
            train.optimizer.zero_grad()
            for scale in (1.0, 3.0):
                if clears:
                    train.optimizer.zero_grad()
                (train.model.bias.sum() * 0 + scale * (step + 1)).backward()
            train.optimizer.step()
    steps = read_record(tmp_path / "run.jsonl").steps[1:]  # before the first nothing is known of the optimizer
    assert steps.column("loss") == [(3.0 if clears else 2.0) * (step + 1) for step in range(1, 5)]
    assert steps.column("backwards") == [None if clears else 2] * 4


def full_disk(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["gradguard.monitoring.show.sinks.text_lines"], "RecordWriter", Full)


def unwritable(path: Path, monkeypatch) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file where the folder should be")


def deleted(path: Path, monkeypatch) -> None:
    original = Training.steps

    def steps(self, count, **options):
        original(self, 1, **options)
        shutil.rmtree(path.parent, ignore_errors=True)
        original(self, count - 1, **options)

    monkeypatch.setattr(Training, "steps", steps)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [(full_disk, "No space left on device"), (unwritable, "cannot write a record"), (deleted, "it has been deleted")],
)
def test_trouble_ends_the_recording_with_one_warning(trouble, words, tmp_path, monkeypatch, capfd):
    path = tmp_path / "runs" / "run.jsonl"
    path.parent.mkdir()
    trouble(path, monkeypatch)
    training = Training()
    observer = Observer(path, {})
    with listening(observer):
        training.steps(120)
    observer.close(0, False)
    err = capfd.readouterr().err
    assert err.count("gradguard:") == 1
    assert words in err
    expected = Training()
    monkeypatch.undo()
    expected.steps(120)
    torch.testing.assert_close(training.model.weight, expected.model.weight, rtol=0, atol=0)


def test_a_step_that_takes_long_is_on_the_disk_before_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 0.05)
    path = tmp_path / "run.jsonl"
    training, observer = Training(), Observer(path, {})
    with listening(observer):
        training.steps(3)
        hangs = time.monotonic() + 200
        while not (path.stat().st_size and len(read_record(path).steps) == 3):
            assert time.monotonic() < hangs, "nothing was written before the next step"
            time.sleep(0.02)
    observer.close(0, False)


def test_fifty_fast_steps_are_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 1e9)
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        Training().steps(51)
        hangs = time.monotonic() + 200
        while len(read_record(observer.path).steps) < 50:
            assert time.monotonic() < hangs, "nothing was written after 50 steps"
            time.sleep(0.02)
        assert len(read_record(observer.path).steps) == 50
    observer.close(0, False)


def test_steps_that_are_written_slowly_do_not_pile_up(tmp_path, monkeypatch):
    lines_of = record_buffer.lines_of
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(record_buffer, "lines_of", lambda *given: time.sleep(0.02) or lines_of(*given))
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        Training().steps(60)
        assert len(read_record(observer.path).steps) >= 60 - record_buffer.MOST_BEHIND - 1
    observer.close(0, False)
    assert [step["i"] for step in read_record(observer.path).steps] == list(range(60))


def test_what_a_forked_child_has_buffered_is_not_written_twice(tmp_path):
    writer = RecordWriter(tmp_path / "run.jsonl")
    writer.write("meta")
    child = os.fork()
    if child == 0:
        del writer
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    writer.close()
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8") == '{"t": "meta"}\n'


def test_gradients_that_the_script_clips_are_measured_once(tmp_path, monkeypatch):
    clips, measured = sys.modules["gradguard.monitoring.observe.clips"], []
    measure = clips.gradient_norms
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {}, every=1, diagnostics_every=0)
    monkeypatch.setattr(clips, "gradient_norms", lambda tensors: measured.append(len(tensors)) or measure(tensors))
    with listening(observer):
        training.steps(3, clip=0.5)
    observer.close(0, False)
    assert measured == [2] * 3
    record = read_record(observer.path)
    assert record.events == []
    assert len(record.steps) == 3
    for step, tensors in zip(record.steps, record.tensors, strict=True):
        assert step["norm"] == pytest.approx(sum(n * n for n in tensors["norm"]) ** 0.5, rel=1e-3)
        assert step["post_norm"] == pytest.approx(min(0.5, step["norm"]), rel=1e-4)


@pytest.mark.parametrize("foreach", [False, None])
def test_a_clip_that_takes_another_way_leaves_the_same_norms(tmp_path, foreach):
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer, observer = torch.optim.SGD([p], lr=0.0), Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        p.grad = torch.tensor([3.0, 4.0])
        torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)
        optimizer.step()
    observer.close(0, False)
    (step,) = read_record(observer.path).steps
    assert (step["norm"], step["coefficient"]) == pytest.approx((5.0, 0.2), rel=1e-5)


def test_extras_come_on_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.schedule"], "SHARE", 1e9)
    training, observer = Training(lr=0.0), Observer(tmp_path / "run.jsonl", {}, every=10**9)
    with listening(observer):
        training.steps(120)
        training.steps(1, scale=1e6)
        training.steps(29)
    observer.close(0, False)
    lines = read_record(observer.path).tensors
    assert [line["i"] for line in lines] == [0, 50, 100]
    assert all({"weight", "update"} <= line.keys() for line in lines)
    assert all(line["update"] == [0.0, 0.0] for line in lines)


def test_two_optimizers_take_turns_and_each_line_is_of_one(tmp_path):
    first, second, observer = Training(), Training(), Observer(tmp_path / "run.jsonl", {}, every=1, diagnostics_every=0)
    with listening(observer):
        for _ in range(2):
            first.steps(1, clip=0.5)
            second.steps(1, clip=0.25)
    observer.close(0, False)
    record = read_record(observer.path)
    assert [(s["optimizer"], s["threshold"]) for s in record.steps] == [(0, 0.5), (1, 0.25)] * 2
    assert [p["optimizer"] for p in record.meta["params"]] == [0, 0, 1, 1]
    assert [line["optimizer"] for line in record.tensors] == [0, 1, 0, 1]
    assert [[norm > 0 for norm in line["norm"]] for line in record.tensors] == [
        [True, True, False, False],
        [False, False, True, True],
    ] * 2
    assert not any("absent" in line for line in record.tensors)  # what another optimizer steps is not missing


def test_optimizers_that_take_turns_have_lines_and_extras_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.schedule"], "SHARE", 1e9)
    first, second, observer = Training(), Training(), Observer(tmp_path / "run.jsonl", {}, every=2, diagnostics_every=4)
    with listening(observer):
        for _ in range(6):
            first.steps(1)
            second.steps(1)
    observer.close(0, False)
    lines = read_record(observer.path).tensors
    assert [(line["i"], line["optimizer"], "weight" in line) for line in lines] == [
        (0, 0, True), (1, 1, True), (4, 0, False), (5, 1, False), (8, 0, True), (9, 1, True),
    ]  # fmt: skip


ARRAYS = ("norm", "weight", "update")


@pytest.mark.parametrize("how", ["observer", "monitor", "guard"])
def test_what_has_no_gradient_on_a_step_is_absent_and_never_its_last_number(how, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.schedule"], "SHARE", 1e9)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model) if how == "guard" else None
    lines = []
    if how == "observer":
        observer = Observer(tmp_path / "run.jsonl", {}, every=1, diagnostics_every=1)
        watching = listening(observer)
    else:
        watching = gg.Monitor(guard or optimizer, sink=lines.append, model=model, every=1)
    with watching:
        for step in range(4):
            optimizer.zero_grad()
            hidden = model[0](torch.randn(3, 4))
            model[1](hidden.detach() if step >= 2 else hidden).square().sum().backward()
            optimizer.step()
    if how == "observer":
        observer.close(0, False)
        lines = [{"t": "tensors"} | line for line in read_record(observer.path).tensors]
    arrays = [line for line in lines if line["t"] == "tensors"]
    assert [line.get("absent") for line in arrays] == [None, None, [0, 1], [0, 1]]
    for line in arrays:
        gone = line.get("absent") or []
        assert all((line["norm"][place] == 0) is (place in gone) for place in range(4))
        assert all(line[key][place] == 0 for key in ARRAYS if key in line for place in gone)


def test_exact_zeros_are_a_gradient(tmp_path):
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {}, every=1)
    with listening(observer):
        training.steps(1)
        training.steps(1, scale=0.0)
    observer.close(0, False)
    last = read_record(observer.path).tensors[-1]
    assert (last["norm"], "absent" in last) == ([0.0, 0.0], False)


def test_an_optimizer_that_came_later_has_a_number_of_its_own(tmp_path):
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        training.steps(1)
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        training.steps(1)
    observer.close(0, False)
    assert [step.get("optimizer") for step in read_record(observer.path).steps] == [None, 1]


def test_what_is_watched_may_be_freed(tmp_path):
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        training = Training()
        training.steps(3, clip=0.5)
        alive = weakref.ref(training.model.weight), weakref.ref(training.optimizer)
        del training
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
    observer.close(0, False)


def test_a_process_of_a_higher_rank_measures_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.clips"], "gradient_norms", pytest.fail)
    observer = Observer(None, {})
    with listening(observer):
        Training().steps(2)
    observer.close(0, False)
    assert list(tmp_path.iterdir()) == []


def test_meta_says_where_it_ran(tmp_path):
    observer = Observer(tmp_path / "run.jsonl", {"version": "1"})
    with listening(observer):
        Training().steps(1)
    observer.close(3, True)
    record = read_record(observer.path)
    assert record.meta["schema"] == 1
    assert (record.meta["world"], record.meta["rank"]) == (1, 0)
    assert {"python", "host_platform", "torch", "device"} <= record.meta.keys()
    assert "mesh" not in record.meta
    assert (record.end["exit"], record.end["interrupted"]) == (3, True)
    assert not record.is_newer


def test_git_that_is_not_there_or_takes_too_long_is_no_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert meta.git_state() is None
    monkeypatch.setenv("PATH", "")
    assert meta.git_state() is None
    monkeypatch.undo()
    monkeypatch.setattr(meta, "GIT_SECONDS", 0.0)
    assert meta.git_state() is None


# --- watch() ----------------------------------------------------------------------------------------------------------


def test_watch_works_without_a_block(tmp_path):
    training = Training()
    seen = watch(tmp_path)
    training.steps(4, clip=0.5)
    page = seen.report()
    assert page == tmp_path / "run.html"
    assert page.exists()
    training.steps(1)
    seen.close()
    seen.close()
    training.steps(1)
    record = read_record(seen.path)
    assert (seen.steps, len(record.steps), record.end["steps"]) == (5, 5, 5)
    assert record.steps[0]["threshold"] == 0.5


def test_a_cell_that_runs_again_closes_the_watch_before_and_replaces_nothing(tmp_path):
    training = Training()
    first = watch(tmp_path)
    training.steps(2)
    second = watch(tmp_path)
    training.steps(3)
    second.close()
    assert [path.name for path in (first.path, second.path)] == ["run.jsonl", "run-2.jsonl"]
    assert [read_record(seen.path).end["steps"] for seen in (first, second)] == [2, 3]


def test_a_clip_imported_by_name_before_is_seen_and_given_back(tmp_path, monkeypatch):
    import synthetic

    original = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(synthetic, "clip_grad_norm_", original, raising=False)
    training = Training()
    with watch(tmp_path) as seen:
        training.optimizer.zero_grad()
        training.model(torch.ones(1, 4)).sum().backward()
        synthetic.clip_grad_norm_(training.model.parameters(), 0.25)
        training.optimizer.step()
    assert synthetic.clip_grad_norm_ is original
    assert torch.nn.utils.clip_grad_norm_ is original
    assert read_record(seen.path).steps[0]["threshold"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"every": 0}, InvalidValueError, "every=0: expected a whole number >= 1"),
        ({"path": 3}, InvalidTypeError, "expected a path such as 'run.jsonl', got int"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        watch(**arguments)


def test_a_report_where_nothing_is_written(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with watch() as seen, pytest.raises(RecordError, match="in the process of rank 0"):
        seen.report()


def test_the_numbers_of_a_watched_training_are_bit_identical(tmp_path):
    plain, watched = Training(momentum=0.9), Training(momentum=0.9)
    torch.manual_seed(1)
    plain.steps(60, clip=0.5)
    torch.manual_seed(1)
    with watch(tmp_path):
        watched.steps(60, clip=0.5)
    torch.testing.assert_close(watched.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    assert gg.clip_grad_norm_.__module__ == "gradguard.clip.functional"


def test_a_scaler_that_searches_its_scale_for_long_leaves_the_first_line_the_first(tmp_path):
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with listening(observer):
        for _ in range(2 * record_buffer.FLUSH_ROWS):
            training.optimizer.zero_grad()
            scaler.scale(training.model(torch.randn(3, 4)).square().sum() * 1e20).backward()
            scaler.step(training.optimizer)
            scaler.update()
    observer.close(0, False)
    record = read_record(tmp_path / "run.jsonl")
    skipped = [step["i"] for step in record.steps if step.get("skipped")]
    assert len(record.steps) == 2 * record_buffer.FLUSH_ROWS > len(skipped) > record_buffer.FLUSH_ROWS
    assert [step["i"] for step in record.steps] == list(range(2 * record_buffer.FLUSH_ROWS))
    assert sum(event["kind"] == "amp_skip" for event in record.events) == len(skipped)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scales", [(16.0, 1024.0), (16.0, None), (None, 1024.0)])
def test_each_step_has_the_loss_scale_of_its_own_scaler(scales, fused, unscales, tmp_path):
    trainings, expected = [Training(fused=fused), Training(fused=fused)], []
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=s or 1.0, growth_interval=1, enabled=s is not None) for s in scales
    ]
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        for i in range(3):
            for training, scaler in zip(trainings, scalers, strict=True):
                training.optimizer.zero_grad()
                scaler.scale(training.model(torch.ones(3, 4)).sum() * (float("inf") if i == 1 else 1.0)).backward()
                expected.append(scaler.get_scale() if scaler.is_enabled() else None)
                if unscales:
                    scaler.unscale_(training.optimizer)
                scaler.step(training.optimizer)
            for scaler in scalers:
                scaler.update()
    observer.close(0, False)
    assert [step.get("amp_scale") for step in read_record(tmp_path / "run.jsonl").steps] == expected


def kept_by_a_module(monkeypatch):
    module = types.ModuleType("imported_meanwhile")
    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    monkeypatch.setitem(sys.modules, "imported_meanwhile", module)
    return lambda *args: module.clip_grad_norm_(*args)


def kept_by_a_variable(monkeypatch):
    return torch.nn.utils.clip_grad_norm_


def wrapped_again(monkeypatch):
    inner = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: inner(*args))
    return lambda *args: torch.nn.utils.clip_grad_norm_(*args)


@pytest.mark.parametrize("keep", [kept_by_a_module, kept_by_a_variable, wrapped_again])
def test_a_clip_that_the_script_got_hold_of_while_watched_is_seen_by_the_next_watch(keep, tmp_path, monkeypatch):
    training, before = Training(), torch.nn.utils.clip_grad_norm_
    clip, after = None, before
    for name in ("first.jsonl", "second.jsonl"):
        seen = watch(tmp_path / name)
        if clip is None:
            clip = keep(monkeypatch)
            after = torch.nn.utils.clip_grad_norm_ if keep is wrapped_again else after
        training.optimizer.zero_grad()
        training.model(torch.ones(3, 4)).square().sum().backward()
        norm = clip(training.model.parameters(), 1e-3)
        training.optimizer.step()
        seen.close()
        (step,) = read_record(tmp_path / name).steps
        assert (step["norm"], step["rule"]) == (pytest.approx(float(norm), rel=1e-4), "norm")
        assert torch.nn.utils.clip_grad_norm_ is after


def test_what_a_script_puts_round_backward_while_watched_stays_and_each_loss_counts_once(tmp_path, monkeypatch):
    training, calls = Training(), []
    seen = watch(tmp_path / "first.jsonl")
    inner = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: calls.append(float(loss.detach())) or inner(loss))
    seen.close()
    with watch(tmp_path / "second.jsonl"):
        training.steps(2)
    assert [step["loss"] for step in read_record(tmp_path / "second.jsonl").steps] == pytest.approx(calls, rel=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_watchers_end_in_any_order_and_leave_nothing(first, tmp_path):
    def places():
        utils, scaler = torch.nn.utils, torch.amp.GradScaler
        clips = utils.clip_grad_norm_, utils.clip_grad.clip_grad_norm_, utils.clip_grad_value_
        return torch.Tensor.backward, *clips, scaler.step, scaler.scale, scaler.update

    before, training = places(), Training()
    observers = [Observer(tmp_path / f"{k}.jsonl", {}) for k in range(2)]
    blocks = [ExitStack(), ExitStack()]
    for block, observer in zip(blocks, observers, strict=True):
        block.enter_context(listening(observer))
    training.steps(1, clip=1e-3)
    blocks[first].close()
    training.steps(1, clip=1e-3)
    blocks[1 - first].close()
    assert places() == before
    for k, observer in enumerate(observers):
        observer.close(0, False)
        steps = read_record(tmp_path / f"{k}.jsonl").steps
        assert len(steps) == (1 if k == first else 2)
        assert all("loss" in step and step["rule"] == "norm" and step["norm"] > 0.1 for step in steps)


def test_a_lazy_module_that_is_never_called_has_no_shape_and_ends_nothing(tmp_path):
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {})
    training.model.unused = nn.LazyLinear(3)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with listening(observer):
        training.steps(3)
    observer.close(0, False)
    record = read_record(tmp_path / "run.jsonl")
    assert len(record.steps) == 3
    assert [parameter["numel"] for parameter in record.meta["params"]] == [8, 2, 0, 0]


def test_a_first_line_that_could_not_be_made_leaves_a_record_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(meta, "described", lambda *_: [][0])
    training, observer = Training(), Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        training.steps(3)
    observer.close(0, False)
    (event,) = read_record(tmp_path / "run.jsonl").events
    assert event["kind"] == "observer_failed"


def test_a_step_gets_no_loss_of_an_evaluation_in_the_step_before(tmp_path):
    layer = nn.Linear(1, 1, bias=False)
    optimizer, values = torch.optim.LBFGS(layer.parameters(), max_iter=3, max_eval=9), []

    def closure():
        optimizer.zero_grad()
        loss = (layer(torch.ones(4, 1)).cosh() + 1).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 10.0)
        values.append(loss.item())
        return loss

    observer, firsts = Observer(tmp_path / "run.jsonl", {}), []
    with listening(observer):
        for _ in range(3):
            nn.init.constant_(layer.weight, 1.0 + len(firsts))
            firsts.append(len(values))
            optimizer.step(closure)
    observer.close(0, False)
    assert len(values) > 3
    losses = [step["loss"] for step in read_record(tmp_path / "run.jsonl").steps]
    assert losses == pytest.approx([values[k] for k in firsts])

import gc
import json
import math
import multiprocessing
import os
import random
import sys
import textwrap
from collections import namedtuple

import pytest
import torch
from torch import nn

import gradguard as gg
from forked_python import run_python
from gradguard import Monitor
from gradguard.cli import main
from gradguard.errors import InvalidTypeError, InvalidValueError, RecordError
from gradguard.monitoring.observe import record_buffer
from gradguard.monitoring.record.file import read_record
from gradguard.tensors.norms import tensor_norms

NAN = float("nan")


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def a_batch(i=0, scale=1.0):
    generator = torch.Generator().manual_seed(i)
    return scale * torch.randn(8, 3, generator=generator)


def backward(model, i=0, scale=1.0):
    loss = model(a_batch(i, scale)).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps=5, log=None, scale=lambda i: 1.0):
    """A plain loop; returns the norm of the gradients at each step."""
    norms = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = backward(model, i, scale(i))
        norms.append(float(gg.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        if log is not None:
            log(loss=loss)
    return norms


def steps_of(lines):
    return [line for line in lines if line["t"] == "step"]


# -- what it writes ----------------------------------------------------------------------------------------------------


def test_the_record_of_a_plain_optimizer(tmp_path):
    model, path = a_model(), tmp_path / "deep" / "run.jsonl"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Monitor(optimizer, sink=path, model=model, every=2) as monitor:
        norms = train(model, optimizer, 5, monitor.log)
    record = read_record(path)
    assert [step["norm"] for step in record.steps] == pytest.approx(norms, rel=1e-4)
    assert [step["i"] for step in record.steps] == [0, 1, 2, 3, 4]
    assert [line["i"] for line in record.tensors] == [0, 2, 4]
    assert record.names == [name for name, _ in model.named_parameters()]
    assert record.meta["schema"] == 1
    assert record.meta["optimizers"] == ["AdamW"]
    assert record.meta["world"] == 1
    assert math.hypot(*record.tensors[0]["norm"]) == pytest.approx(norms[0], rel=1e-3)
    assert {"loss", "lr", "wall", "top"} <= set(record.steps[0])
    assert not {"coefficient", "threshold", "rule", "skipped"} & set(record.steps[0])
    assert record.end is not None
    assert (record.end["steps"], record.end["exit"], record.end["interrupted"]) == (5, 0, False)
    assert record.end["overhead_ms"] > 0


def test_lines_are_those_of_gradguard_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3) * i).square().mean()
            loss.backward()
            optimizer.step()
        """)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--out", "out", str(script)]) == 0
    observed = read_record(tmp_path / "out")
    lines = []
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(optimizer, sink=lines.append) as monitor:
        for i in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3) * i).square().mean()
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
    for mine, its in zip(steps_of(lines), observed.steps, strict=True):
        assert set(mine) == set(its) - {"optimizer"}  # other tests may have left optimizers
        for key in ("i", "norm", "loss", "lr", "nonfinite"):
            assert mine[key] == pytest.approx(its[key], rel=1e-5), key
    seen_of_script = {"clip", "root", "compute", "leaves"}  # of backward, which a Monitor does not watch
    assert set(lines[0]) | seen_of_script == set(observed.meta) | seen_of_script


CLIPPERS = [
    ("norm", lambda: gg.ClipByGlobalNorm(0.1)),
    ("norm", lambda: gg.ClipByGlobalNorm(1e6)),
    ("value", lambda: gg.ClipByValue(0.05)),
    ("adaptive", lambda: gg.ClipAdaptive(0.01)),
    ("ClipByMedian", lambda: gg.ClipByMedian(warmup=1)),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("rule", "clipper"), CLIPPERS)
def test_a_guard_is_read_and_not_measured(rule, clipper, fused, monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.clips"], "gradient_norms", pytest.fail)
    model, lines, expected = a_model(), [], []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    guard = gg.Guard(optimizer, clipper(), model=model)
    with Monitor(guard, sink=lines.append, model=model):
        for i in range(4):
            optimizer.zero_grad()
            backward(model, i, 1.0 + 9 * (i == 2))
            optimizer.step()
            expected.append(guard.last)
    for step, result in zip(steps_of(lines), expected, strict=True):
        assert step["rule"] == rule
        assert step["norm"] == pytest.approx(float(result.norm))
        assert step["coefficient"] == pytest.approx(float(result.coefficient))
        assert step["post_norm"] == pytest.approx(float(result.norm * result.coefficient))
        threshold = math.inf if result.threshold is None else float(result.threshold)
        assert step.get("threshold", math.inf) == pytest.approx(threshold)
    assert lines[0]["clip"] == type(guard.clipper).__name__
    arrays = [line["norm"] for line in lines if line["t"] == "tensors"]
    assert arrays[0] == pytest.approx(expected[0].tensor_norms.tolist())


def test_a_step_that_a_guard_skips_is_a_line_and_names_the_culprit():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model), sink=lines.append, model=model):
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            if i == 1:
                model[2].bias.grad.fill_(NAN)
            optimizer.step()
    assert [step.get("skipped") for step in steps_of(lines)] == [None, True, None]
    assert [step["norm"] is None for step in steps_of(lines)] == [False, True, False]
    (event,) = [line for line in lines if line["t"] == "event"]
    assert event["kind"] == "nonfinite"
    assert "2.bias" in event["message"]


def test_a_nonfinite_step_that_is_taken_is_not_called_skipped():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), nonfinite="propagate")
    with Monitor(guard, sink=lines.append, model=model):
        backward(model, scale=math.inf)
        optimizer.step()
    (step,) = steps_of(lines)
    assert "skipped" not in step
    assert step["nonfinite"] == 4


def test_a_guard_that_was_detached_leaves_a_plain_optimizer():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    with Monitor(guard, sink=lines.append, model=model):
        train(model, optimizer, 1)
        guard.detach()
        train(model, optimizer, 2)
    assert [step.get("rule") for step in steps_of(lines)] == ["norm", None, None]
    assert steps_of(lines)[0]["norm"] == pytest.approx(steps_of(lines)[1]["norm"], rel=1e-4)


def test_something_with_an_optimizer_and_a_last_result_counts_as_a_guard():
    Result = namedtuple("Result", "norm coefficient threshold tensor_norms names nonfinite clipped")

    class Duck:
        def __init__(self, optimizer):
            self.optimizer, self.last = optimizer, None

    layer, lines = nn.Linear(2, 1), []
    duck = Duck(torch.optim.SGD(layer.parameters()))
    with Monitor(duck, sink=lines.append, model=layer):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        one = torch.tensor
        duck.last = Result(one(5.0), one(0.5), None, one([3.0, 4.0]), ("a", "b"), one(False), one(True))
        duck.optimizer.step()
    (step,) = steps_of(lines)
    assert (step["norm"], step["post_norm"], step["rule"], step["top"]) == (5.0, 2.5, "Duck", [1, pytest.approx(0.64)])


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_a_clip_by_hand_is_told_to_log(max_norm):
    model, lines, norms = a_model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(optimizer, sink=lines.append, model=model, every=1) as monitor:
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            raw = [float(p.grad.norm()) for p in model.parameters()]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            norms.append((float(norm), raw))
            monitor.log(norm=norm, max_norm=max_norm)
            optimizer.step()
    arrays = [line["norm"] for line in lines if line["t"] == "tensors"]
    for step, array, (norm, raw) in zip(steps_of(lines), arrays, norms, strict=True):
        assert step["norm"] == pytest.approx(norm)
        assert step["post_norm"] == pytest.approx(min(norm, max_norm), rel=1e-4)
        assert step["coefficient"] == pytest.approx(min(1, max_norm / norm), rel=1e-4)
        assert (step["threshold"], step["user_max_norm"], step["rule"]) == (max_norm, max_norm, "norm")
        assert array == pytest.approx(raw, rel=1e-3)


def clips_by_pytorch(parameters):
    return float(torch.nn.utils.clip_grad_norm_(parameters, 0.01))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_clip_of_pytorch_is_seen_and_given_back(told, guarded):
    """Told or not: without it the norm of each step would be the bound of the clip, and the run look calm."""
    theirs, model, lines, norms = torch.nn.utils.clip_grad_norm_, a_model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1e6)) if guarded else None
    with Monitor(guard or optimizer, sink=lines.append, model=model) as monitor:
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            norms.append(clips_by_pytorch(model.parameters()))
            if told and not guarded:
                monitor.log(norm=norms[-1], max_norm=0.01)
            optimizer.step()
    assert torch.nn.utils.clip_grad_norm_ is theirs
    for step, norm in zip(steps_of(lines), norms, strict=True):
        assert (step["norm"], step["user_max_norm"]) == (pytest.approx(norm, rel=1e-4), 0.01)
        assert step["post_norm"] == pytest.approx(0.01, rel=1e-3)
        assert step["coefficient"] == pytest.approx(0.01 / norm, rel=1e-3)


# -- log ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_what_is_logged_belongs_to_its_step_wherever_flushes_fall(before, rows, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", rows)
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        for i in range(5):
            backward(model)
            if before:
                monitor.log(loss=torch.tensor(float(i)), accuracy=i / 10)
            optimizer.step()
            if not before:
                monitor.log(loss=torch.tensor(float(i)), accuracy=i / 10)
    assert [step["loss"] for step in steps_of(lines)] == [0, 1, 2, 3, 4]
    assert [step["accuracy"] for step in steps_of(lines)] == [0, 0.1, 0.2, 0.3, 0.4]


def test_losses_of_micro_batches_give_their_mean_and_a_buffer_may_be_reused():
    model, lines, buffer = a_model(), [], torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        for i in range(3):
            backward(model)
            monitor.log(loss=buffer.fill_(i), share=0)
        monitor.log(share=1)
        optimizer.step()
    assert (steps_of(lines)[0]["loss"], steps_of(lines)[0]["share"]) == (1, 1)


@pytest.mark.parametrize(
    ("logged", "message"),
    [
        ({"loss": "high"}, r"log\(loss=...\) is left out: expected one number, got str"),
        ({"loss": torch.ones(2)}, r"left out: expected one number, got a tensor of shape \(2,\)"),
        ({"loss": torch.tensor(1j)}, "left out: expected one number"),
        ({"epoch": [1]}, r"log\(epoch=...\) is left out: expected one number, got list"),
        ({"skipped": 1}, "the record has a field 'skipped' of its own"),
        ({"backwards": 8}, "the record has a field 'backwards' of its own"),
        ({"clips": 2}, "the record has a field 'clips' of its own"),
    ],
)
def test_what_is_no_number_is_left_out_with_one_warning(logged, message):
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        backward(model)
        with pytest.warns(RuntimeWarning, match=message):
            monitor.log(**logged, seen=True)
        monitor.log(**logged, seen=True)  # without a second warning, which would be an error here
        optimizer.step()
    assert steps_of(lines)[0]["seen"] == 1
    assert "loss" not in steps_of(lines)[0]


def test_a_guard_says_the_norm_itself():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters())
    with Monitor(gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0)), sink=[], model=model) as monitor:
        with pytest.warns(RuntimeWarning, match="ignored with a Guard"):
            monitor.log(norm=1.0)
        norms = train(model, optimizer, 1)
        monitor.flush()
        assert monitor.last["norm"] == pytest.approx(norms[0])


# -- what it leaves alone ----------------------------------------------------------------------------------------------


def optimizers(parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "fused": lambda: torch.optim.AdamW(parameters, lr=0.05, fused=True),
        "sparse": lambda: torch.optim.Adagrad(parameters, lr=0.05),
    }


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused", "sparse"])
def test_training_comes_out_bit_identical(kind, guarded, monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 2)
    results = []
    for watched in (False, True):
        model = a_model()
        optimizer = optimizers(list(model.parameters()))[kind]()
        source = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5)) if guarded else optimizer
        random.seed(1), torch.manual_seed(1)
        monitor = Monitor(source, sink=[], model=model) if watched else None
        train(model, optimizer, 8, monitor.log if monitor is not None else None)
        if monitor is not None:
            monitor.close()
        results.append([*[p.detach().clone() for p in model.parameters()], torch.rand(3), random.random()])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched) if isinstance(plain, torch.Tensor) else plain == watched


def test_a_closure_is_measured_once_a_step_at_its_first_evaluation():
    model, lines, norms = a_model(), [], []
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = backward(model)
        norms.append(float(gg.get_total_norm([p.grad for p in model.parameters()])))
        return loss

    with Monitor(optimizer, sink=lines.append, model=model):
        optimizer.step(closure)
    assert len(norms) > 1
    assert [step["norm"] for step in steps_of(lines)] == pytest.approx(norms[:1], rel=1e-4)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused, guarded):
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    source = gg.Guard(optimizer, gg.ClipByGlobalNorm(1e3)) if guarded else optimizer
    norms = []
    with Monitor(source, sink=lines.append, model=model):
        for i in range(3):
            optimizer.zero_grad()
            loss = model(a_batch(i, math.inf if i == 1 else 1.0)).square().mean()
            scaler.scale(loss).backward()
            norms.append(float(gg.get_total_norm([p.grad for p in model.parameters()])) / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    steps = steps_of(lines)
    good = [step for step in steps if not step.get("skipped")]
    assert [step["norm"] for step in good] == pytest.approx([norms[0], norms[2]], rel=1e-3)
    assert [step["amp_scale"] for step in good] == [1024, 512]
    assert [step.get("skipped") for step in steps] == [None, True, None]  # whoever skips, scaler, guard or kernel
    assert steps[1]["norm"] is None
    assert [step.get("rule") for step in steps] == ["norm" if guarded else None] * 3
    assert [line["i"] for line in lines if line.get("kind") == "amp_skip"] == [1]


GUARDS = {
    "writes": lambda: gg.ClipByGlobalNorm(1e-3),
    "each by itself": lambda: gg.ClipByNorm(1e-3),
    "does not bind": lambda: gg.ClipByGlobalNorm(1e6),
    "largest element": lambda: gg.ClipByGlobalNorm(1e-3, norm_type=math.inf),
    "each by its largest": lambda: gg.ClipByNorm(1e-3, norm_type=math.inf),
    "two rules": lambda: gg.Chain(gg.ClipByGlobalNorm(1e-3, norm_type=math.inf), gg.ClipByGlobalNorm(1e-3)),
}
CLIPS_BEFORE = {
    "none": lambda parameters: None,
    "norm": lambda parameters: gg.clip_grad_norm_(parameters, 0.01),
    "value of some": lambda parameters: gg.clip_grad_value_(parameters[:2], 1e-3),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", CLIPS_BEFORE)
@pytest.mark.parametrize("guard", GUARDS)
def test_norms_are_2_norms_before_every_clip_whatever_the_guard_measures(guard, before, fused, scaled):
    model, lines = a_model(), []
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    source = gg.Guard(optimizer, GUARDS[guard]())
    with Monitor(source, sink=lines.append, model=model, every=1):
        scaler.scale(model(a_batch()).square().mean()).backward()
        if before != "none":
            scaler.unscale_(optimizer)
        scale = 1.0 if before != "none" else scaler.get_scale()
        norms = [float(p.grad.double().norm()) / scale for p in parameters]
        CLIPS_BEFORE[before](parameters)
        scaler.step(optimizer)
    (step,) = steps_of(lines)
    (tensors,) = [line for line in lines if line["t"] == "tensors"]
    assert step["norm"] == pytest.approx(math.hypot(*norms), rel=1e-4)
    assert tensors["norm"] == pytest.approx(norms, rel=1e-4)
    rules = [clip[0] for clip in step["clips"]] if "clips" in step else [step["rule"]]
    assert len(rules) == (1 if before == "none" else 2)


def test_a_guard_that_goes_after_a_skipped_step_leaves_nothing_behind():
    model, lines = a_model(), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    with Monitor(guard, sink=lines.append, model=model):
        scaler.scale(model(a_batch(0, math.inf)).square().mean()).backward()
        scaler.step(optimizer)
        guard.detach()
        norms = train(model, optimizer, 1)
    assert [step.get("skipped") for step in steps_of(lines)] == [True, None]
    assert steps_of(lines)[1]["norm"] == pytest.approx(norms[0], rel=1e-4)
    assert "rule" not in steps_of(lines)[1]


def test_what_it_saw_is_written_where_the_optimizer_goes_and_nobody_has_closed_it():
    lines = []

    def training():
        model = a_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        Monitor(optimizer, sink=lines.append, model=model)
        train(model, optimizer, 3)

    training()
    gc.collect()
    assert len(steps_of(lines)) == 3
    assert (lines[-1]["t"], lines[-1]["steps"]) == ("end", 3)


def test_it_stops_when_closed_and_closing_again_does_nothing():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = Monitor(optimizer, sink=lines.append, model=model)
    train(model, optimizer, 2)
    monitor.close()
    count = len(lines)
    train(model, optimizer, 2)
    monitor.log(loss=1.0)
    monitor.flush()
    monitor.close()
    assert len(lines) == count
    assert monitor.steps == 2


@pytest.mark.parametrize(("error", "code", "interrupted"), [(ValueError, 1, False), (KeyboardInterrupt, 130, True)])
def test_an_exception_closes_and_goes_on(error, code, interrupted):
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def fail():
        raise error("mine")

    with pytest.raises(error, match="mine"), Monitor(optimizer, sink=lines.append, model=model):  # noqa: PT012
        train(model, optimizer, 1)
        fail()
    assert (lines[-1]["t"], lines[-1]["exit"], lines[-1]["interrupted"]) == ("end", code, interrupted)
    assert len(steps_of(lines)) == 1


def test_its_own_failure_is_one_warning_and_an_event(monkeypatch):
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    heard = sys.modules["gradguard.monitoring.observe.clips"]
    monkeypatch.setattr(heard, "gradient_norms", lambda tensors: 1 / 0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        with pytest.warns(RuntimeWarning, match="stopped measuring: ZeroDivisionError.*continues unchanged") as caught:
            train(model, optimizer, 3, monitor.log)
        assert len(caught) == 1
    assert [line["kind"] for line in lines if line["t"] == "event"] == ["observer_failed"]


def test_a_forked_child_writes_nothing(tmp_path):
    model, path = a_model(), tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=path, model=model) as monitor:
        train(model, optimizer, 1)

        def child():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            monitor.log(loss=1.0)
            monitor.flush()
            monitor.close()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
    assert len(read_record(path).steps) == 1


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, model=model) as monitor:
        train(model, optimizer, 2)
    assert list(tmp_path.iterdir()) == []
    assert len(monitor.rows) == 2


@pytest.mark.slow
def test_a_program_that_forgets_to_close_has_its_last_line_and_imports_no_dashboard(tmp_path):
    code = """
        import sys, torch
        from gradguard.monitoring.observe import monitor as m  # gradguard.watch itself is the function
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters())
        m.Monitor(optimizer)
        assert not {"tensorboard", "wandb", "mlflow", "trackio"} & set(sys.modules)
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path)
    record = read_record(tmp_path / "run.jsonl")
    assert len(record.steps) == 1
    assert record.end is not None


# -- flushes -----------------------------------------------------------------------------------------------------------


class FakeEvent:
    """Completes when told to; until then what was copied is an old number, as on an accelerator."""

    def __init__(self, flat):
        self.flat, self.host, self.done = flat.clone(), torch.full_like(flat, 1e-22), False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True
        self.host.copy_(self.flat)


def test_numbers_of_a_device_are_read_when_their_copy_has_landed_and_never_waited_for(monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_ROWS", 2)
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.record_copy"], "are_readable", lambda *tensors: False)
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.clips"], "gradient_norms", tensor_norms)
    events = []

    def copy(flat):
        events.append(FakeEvent(flat))
        return events[-1].host, events[-1]

    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.record_copy"], "copy_to_host", copy)
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model):
        norms = train(model, optimizer, 5)
        assert len(events) == 2
        assert steps_of(lines) == []
        events[1].synchronize()
        norms += train(model, optimizer, 1)
        assert steps_of(lines) == []  # the first batch has not landed: order is kept
        events[0].synchronize()
        norms += train(model, optimizer, 1)
        assert len(steps_of(lines)) == 4
    assert [step["norm"] for step in steps_of(lines)] == pytest.approx(norms, rel=1e-4)


def test_a_slow_program_is_flushed_at_each_step(monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 0.0)
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        train(model, optimizer, 3)
        assert len(steps_of(lines)) == 2  # the last may still be logged to
        monitor.flush()
        assert len(steps_of(lines)) == 3


def test_a_loop_that_logs_before_the_step_is_flushed_up_to_the_step_before(monkeypatch):
    monkeypatch.setattr(record_buffer, "FLUSH_SECONDS", 0.0)
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        for _ in range(3):
            monitor.log(loss=backward(model))
            optimizer.step()
        assert len(steps_of(lines)) == 2  # as of one that logs after it


def test_rows_and_last_are_plain_and_copies():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=[], model=model) as monitor:
        assert monitor.last is None
        train(model, optimizer, 3, monitor.log)
        monitor.flush()
        monitor.last["norm"] = 7
        monitor.rows[0].clear()
        assert [row["i"] for row in json.loads(json.dumps(monitor.rows, allow_nan=False))] == [0, 1, 2]
        assert monitor.last["norm"] != 7


def test_parameters_without_a_gradient_and_such_as_came_later():
    model, late, lines = a_model(), nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model, every=1):
        model[0].weight.grad = torch.full((4, 3), 2.0)
        optimizer.step()
        optimizer.add_param_group({"params": [late]})
        late.grad = torch.full((2,), 100.0)
        optimizer.step()
    first, second = steps_of(lines)
    assert first["norm"] == pytest.approx(math.sqrt(48))
    assert first["top"] == [0, 1.0]
    assert second["norm"] == pytest.approx(math.sqrt(48 + 20000))
    assert "top" not in second
    assert [line["norm"] for line in lines if line["t"] == "tensors"] == [pytest.approx([math.sqrt(48), 0, 0, 0])] * 2


def test_steps_without_any_gradient():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model):
        optimizer.step()
    assert steps_of(lines)[0]["norm"] == 0


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_draws_the_record_so_far(tmp_path):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(optimizer, sink=tmp_path / "run.jsonl", model=model) as monitor:
        train(model, optimizer, 3, monitor.log)
        page = monitor.report()
    assert page == tmp_path / "run.html"
    assert "<html" in page.read_text(encoding="utf-8")[:2000]
    assert monitor.report(tmp_path / "other.html") == tmp_path / "other.html"


def test_a_report_without_a_record_is_a_warning_and_no_error():
    model = a_model()
    with (
        Monitor(torch.optim.SGD(model.parameters()), sink=[], model=model) as monitor,
        pytest.warns(RuntimeWarning, match="needs a record in a file: pass sink='run.jsonl'"),
    ):
        assert monitor.report() is None


# -- arguments ---------------------------------------------------------------------------------------------------------


def bad_arguments():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters())
    wrapper = namedtuple("Wrapper", "optimizer")(optimizer)
    other = nn.Linear(1, 1)
    return [
        ((model,), {}, InvalidTypeError, "is Sequential: expected a torch.optim.Optimizer or a gradguard.Guard"),
        ((torch.optim.SGD,), {}, InvalidTypeError, "is the class SGD"),
        ((wrapper,), {}, InvalidTypeError, "For a wrapper, pass the optimizer inside it"),
        ((optimizer,), {"every": 0}, InvalidValueError, "every=0: expected a whole number >= 1"),
        ((optimizer,), {"every": 2.0}, InvalidTypeError, "every=2.0: expected a whole number"),
        ((optimizer,), {"model": "net"}, InvalidTypeError, "model is str: expected the torch.nn.Module"),
        ((optimizer,), {"model": other}, InvalidValueError, r"model \(Linear\) has none of the parameters of this SGD"),
        ((optimizer, None), {}, InvalidTypeError, "sink is None of type NoneType: expected a path"),
        ((optimizer, print.__class__), {}, InvalidTypeError, "sink is the class builtin_function_or_method"),
        ((optimizer, 7), {}, InvalidTypeError, "sink is 7 of type int"),
        ((optimizer, "tensorbord"), {}, InvalidValueError, "'tensorbord' is neither a file name .* nor a known name"),
        ((optimizer, "."), {}, InvalidValueError, "For a folder write sink='run.jsonl'"),
        ((optimizer, "/dev/null/run.jsonl"), {}, RecordError, "cannot write a record to /dev/null/run.jsonl"),
    ]


@pytest.mark.parametrize("case", range(13))
def test_bad_arguments_raise_at_construction(case, tmp_path, monkeypatch):
    positional, named, kind, message = bad_arguments()[case]  # made here: observers look for every living optimizer
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        Monitor(*positional, **named)
    assert os.listdir(tmp_path) == []


def test_two_monitors_never_write_to_one_file(tmp_path, capsys):
    model, path = a_model(), tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=path, model=model):
        train(model, optimizer, 1)
        with Monitor(optimizer, sink=path, model=model) as second:
            train(model, optimizer, 2)
    assert f"{path} exists and is kept: this run is recorded in run-2.jsonl" in capsys.readouterr().err
    assert second.report() == tmp_path / "run-2.html"
    assert [len(read_record(tmp_path / name).steps) for name in ("run.jsonl", "run-2.jsonl")] == [3, 2]


def test_an_iteration_whose_step_was_left_out_says_nothing_about_the_step_before():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(optimizer, sink=lines.append, model=model) as monitor:
        for i in range(4):
            backward(model)
            if i != 2:
                optimizer.step()
            monitor.log(loss=float(i))
    assert [step["loss"] for step in steps_of(lines)] == [0, 1, 3]


def test_what_is_dear_is_measured_now_and_then():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Monitor(optimizer, sink=lines.append, model=model, every=1):
        norms = train(model, optimizer, 2)
    first, second = [line for line in lines if line["t"] == "tensors"]
    assert math.hypot(*first["update"]) == pytest.approx(0.5 * norms[0], rel=1e-3)
    assert set(first) == {"t", "i", "norm", "moved", "weight", "update"}
    assert set(second) == {"t", "i", "norm"}

"""Every clip of gradguard's is seen by every watcher as what it was: norm before, rule, threshold, coefficient."""

import copy
import gc
import math
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

import gradguard as gg
from gradguard import listeners
from gradguard.clip.guards_of_a_script import ClipEachOptimizer
from gradguard.errors import NonFiniteGradientError
from gradguard.integrations.timm import dispatch_clip_grad
from gradguard.listeners import ClipEvent, Listener, announce, listen, tell
from gradguard.monitoring.judge.diagnosis import diagnose
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import read_record
from gradguard.script_events import listening

STEPS = 4


def a_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, generator=generator).to(next(model.parameters()).dtype)
    (model(x) * (1 + step)).square().sum().backward()


def whole(tensors) -> Tensor:
    return torch.cat([torch.zeros(0), *[t.detach().double().flatten() for t in tensors]])


def guarded(clipper, **options):
    return lambda model, optimizer: gg.Guard(optimizer, clipper(), model=model, **options) and None


def called(clip):
    """A clip that the loop calls before the step."""
    return lambda model, optimizer: clip(model)


def an_object(clipper):
    def attach(model, optimizer):
        made = clipper()
        return lambda: made(model)

    return attach


def a_function(clip):
    return lambda model, optimizer: lambda: clip(model)


CLIPS = {
    "function: norm": ("norm", 0.5, a_function(lambda m: gg.clip_grad_norm_(m.parameters(), 0.5))),
    "function: norm, p = 1": ("norm", 0.5, a_function(lambda m: gg.clip_grad_norm_(m, 0.5, 1.0))),
    "function: norm, names": ("norm", 0.5, a_function(lambda m: gg.clip_grad_norm_(m.named_parameters(), 0.5))),
    "function: value": ("value", 0.01, a_function(lambda m: gg.clip_grad_value_(m.parameters(), 0.01))),
    "function: adaptive": ("adaptive", 0.01, a_function(lambda m: gg.clip_grad_adaptive_(m, 0.01))),
    "function: adaptive, exclude": (
        "adaptive", 0.01, a_function(lambda m: gg.clip_grad_adaptive_(m, 0.01, exclude="2"))),
    "apply_gradient_clipping": ("value", 0.01, a_function(lambda m: gg.apply_gradient_clipping(m, "value", 0.01))),
    "dispatch: norm": ("norm", 0.5, a_function(lambda m: dispatch_clip_grad(m.parameters(), 0.5))),
    "dispatch: agc": ("adaptive", 0.01, a_function(lambda m: dispatch_clip_grad(m.parameters(), 0.01, mode="agc"))),
    "object: norm": ("norm", 0.5, an_object(lambda: gg.ClipByGlobalNorm(0.5))),
    "object: norm, p = inf": ("norm", 0.5, an_object(lambda: gg.ClipByGlobalNorm(0.5, norm_type=math.inf))),
    "object: each norm": ("ClipByNorm", 0.5, an_object(lambda: gg.ClipByNorm(0.5))),
    "object: value": ("value", 0.01, an_object(lambda: gg.ClipByValue(0.01))),
    "object: adaptive": ("adaptive", 0.01, an_object(lambda: gg.ClipAdaptive(0.01))),
    "object: adaptive, exclude": ("adaptive", 0.01, an_object(lambda: gg.ClipAdaptive(0.01, exclude="2"))),
    "object: median": ("ClipByMedian", None, an_object(lambda: gg.ClipByMedian(warmup=1))),
    "object: groups": ("Groups", None, an_object(lambda: gg.Groups({"0.*": gg.ClipByNorm(0.1)}, rest=None))),
    "object: chain": ("Chain", None, an_object(lambda: gg.Chain(gg.ClipByValue(0.1), gg.ClipByGlobalNorm(0.1)))),
    "guard: norm": ("norm", 0.5, guarded(lambda: gg.ClipByGlobalNorm(0.5))),
    "guard: value": ("value", 0.01, guarded(lambda: gg.ClipByValue(0.01))),
    "guard: median": ("ClipByMedian", None, guarded(lambda: gg.ClipByMedian(warmup=1))),
    "guard: groups": ("Groups", None, guarded(lambda: gg.Groups({"0.*": gg.ClipByNorm(0.1)}, rest=None))),
}  # fmt: skip


class Twin:
    """What each step did, by plain arithmetic: the gradients before any clip, and as the optimizer moved by them."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []


def training(attach, watch, *, fused: bool = False, dtype: torch.dtype = torch.float32, spoil: int | None = None):
    """Train; return what was recorded, and what happened."""
    model, twin = a_model(dtype), Twin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)

    def loop():
        clip = attach(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            if step == spoil:
                next(model.parameters()).grad.fill_(math.nan)
            twin.before.append(float(whole(p.grad for p in model.parameters() if p.grad is not None).norm()))
            weights = whole(model.parameters())
            if clip is not None:
                clip()
            optimizer.step()
            twin.after.append(float((whole(model.parameters()) - weights).norm()))
            with torch.no_grad():  # so that weights stay small beside what moves them
                for parameter, kept in zip(model.parameters(), a_model(dtype).parameters(), strict=True):
                    parameter.copy_(kept)

    return watch(model, optimizer, loop), twin


def by_run(tmp_path):
    def watch(model, optimizer, loop):
        observer = Observer(tmp_path / "run.jsonl", {})
        try:
            with listening(observer):
                loop()
        finally:
            observer.close(0, False)
        return read_record(tmp_path / "run.jsonl").steps

    return watch


def by_monitor(model, optimizer, loop):
    lines: list[dict] = []
    with gg.Monitor(optimizer, sink=lines.append, model=model):
        loop()
    return [line for line in lines if line["t"] == "step"]


def by_monitor_behind(model, optimizer, loop):
    """A monitor that comes after the guard: made at the first backward."""
    made: list[gg.Monitor] = []
    lines: list[dict] = []

    def make(gradient):
        if not made:
            made.append(gg.Monitor(optimizer, sink=lines.append, model=model))

    handle = next(model.parameters()).register_post_accumulate_grad_hook(make)
    loop()
    handle.remove()
    made[0].close()
    return [line for line in lines if line["t"] == "step"]


def watcher(name, tmp_path):
    return {"run": by_run(tmp_path), "monitor": by_monitor, "monitor behind": by_monitor_behind}[name]


@pytest.mark.parametrize("watch", ["run", "monitor", "monitor behind"])
@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_is_seen_as_it_was(name, watch, tmp_path):
    rule, threshold, attach = CLIPS[name]
    steps, twin = training(attach, watcher(watch, tmp_path))
    assert [step["norm"] for step in steps] == pytest.approx(twin.before, rel=1e-4)
    assert {step["rule"] for step in steps} == {rule}
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)
    ratios = [after / before for before, after in zip(twin.before, twin.after, strict=True)]
    assert [step["coefficient"] for step in steps] == pytest.approx(ratios, rel=1e-2)
    assert min(ratios) < 0.9
    if threshold is not None:
        assert {step["threshold"] for step in steps} == {threshold}
    assert not any("clips" in step for step in steps)


@pytest.mark.parametrize("watch", ["run", "monitor"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_guard_skips_is_seen_as_skipped(watch, fused, tmp_path):
    attach = guarded(lambda: gg.ClipByGlobalNorm(0.5))
    steps, twin = training(attach, watcher(watch, tmp_path), fused=fused, spoil=2)
    assert [step.get("skipped") for step in steps] == [None, None, True, None]
    assert steps[2]["norm"] is None
    assert twin.after[2] == 0


def test_a_guard_that_does_not_skip_is_not_said_to(tmp_path):
    attach = guarded(lambda: gg.ClipByGlobalNorm(0.5), nonfinite="zero")
    steps, _ = training(attach, by_run(tmp_path), spoil=2)
    assert not any("skipped" in step for step in steps)
    assert steps[2]["nonfinite"]


TWICE = {
    "torch, then a guard": (
        lambda m, o: gg.Guard(o, gg.ClipByGlobalNorm(0.2)) and (lambda: clip_grad.clip_grad_norm_(m.parameters(), 5)),
        [["norm", 5.0], ["norm", 0.2]],
    ),
    "a function, then a guard": (
        lambda m, o: gg.Guard(o, gg.ClipByValue(0.01)) and (lambda: gg.clip_grad_norm_(m.parameters(), 5.0)),
        [["norm", 5.0], ["value", 0.01]],
    ),
    "an object, then a guard that never binds": (
        lambda m, o: gg.Guard(o, gg.ClipByGlobalNorm(1e6)) and (lambda: gg.ClipByGlobalNorm(0.5)(m)),
        [["norm", 0.5], ["norm", 1e6]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_two_clips_are_told_with_both_thresholds(name, tmp_path):
    attach, expected = TWICE[name]
    steps, twin = training(attach, by_run(tmp_path))
    for step in steps:
        assert [clip[:2] for clip in step["clips"]] == expected
        product = math.prod(clip[2] for clip in step["clips"])
        assert step["coefficient"] == pytest.approx(product, rel=1e-3)
        strongest = min(step["clips"], key=lambda clip: clip[2])
        assert [step["rule"], step["threshold"]] == strongest[:2]
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)
    (found,) = [one for one in findings(read_record(tmp_path / "run.jsonl")) if one.kind == "clipped_twice"]
    shares = [sum(step["clips"][k][2] < 1 for step in steps) / STEPS for k in (0, 1)]
    for (rule, threshold), share, which in zip(expected, shares, ("first", "second"), strict=True):
        assert f"the {which} ({rule} at {threshold:g}" in found.message.replace(".0)", ")")
        assert f"bound on {100 * share:.0f} %" in found.message


def both_halves(m):
    gg.ClipByNorm(0.1)(m[0])
    gg.clip_grad_value_(m[2], 0.01)


SEVERAL = {
    "the first binds": (
        lambda m: (gg.clip_grad_norm_(m, 0.5), gg.clip_grad_norm_(m, 50.0)),
        ("norm", 0.5), [["norm", 0.5], ["norm", 50.0]],
    ),
    "a value, then a norm": (
        lambda m: (gg.clip_grad_value_(m, 0.5), gg.clip_grad_norm_(m, 0.1)),
        None, [["value", 0.5], ["norm", 0.1]],
    ),
    "two halves": (both_halves, None, [["ClipByNorm", 0.1], ["value", 0.01]]),
    "measured afterwards": (
        lambda m: (gg.clip_grad_norm_(m, 0.5), gg.clip_grad_norm_(m, math.inf)), ("norm", 0.5), None
    ),
    "measured before": (
        lambda m: (gg.clip_grad_norm_(m, math.inf), gg.clip_grad_norm_(m, 0.5)), ("norm", 0.5), None
    ),
    "a clip that raises": (lambda m: (gg.clip_grad_norm_(m, 0.5), refused(Raises(), m)), ("norm", 0.5), None),
    "a clip within a clip": (lambda m: Nested()(m), ("Nested", None), None),
}  # fmt: skip


class Raises(gg.rules.Clipper):
    def decide(self, grads, scale=1.0):
        raise ArithmeticError("no")


class Nested(gg.ClipByGlobalNorm):
    def __init__(self):
        super().__init__(0.5)

    def decide(self, grads, scale=1.0):
        other = torch.nn.Parameter(torch.zeros(2))
        other.grad = torch.ones(2)
        gg.clip_grad_norm_([other], 0.1)
        return super().decide(grads, scale)


def refused(clip, model):
    with pytest.raises(ArithmeticError, match="no"):
        clip(model)


@pytest.mark.parametrize("watch", ["run", "monitor"])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_clips_of_a_loop(name, watch, tmp_path):
    clip, rule, clips = SEVERAL[name]
    steps, twin = training(a_function(clip), watcher(watch, tmp_path))
    ratios = [after / before for before, after in zip(twin.before, twin.after, strict=True)]
    for step, ratio in zip(steps, ratios, strict=True):
        assert step["coefficient"] == pytest.approx(ratio, rel=1e-2)
        assert rule is None or (step["rule"], step.get("threshold")) == rule or rule[1] is None
        assert [one[:2] for one in step.get("clips", [])] == (clips or [])
    assert [step["norm"] for step in steps] == pytest.approx(twin.before, rel=1e-4)
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)


HALVES = [("clip_grad_norm_", 0, 0.1), ("clip_grad_value_", 2, 0.01)]
OF_PARTS = {
    "each its half": (HALVES, True),
    "each its half, measured before": ([("clip_grad_norm_", None, math.inf), *HALVES], True),
    "a value clip that never binds": ([HALVES[0], ("clip_grad_value_", 2, 1e6)], True),
    "a third of all": ([*HALVES, ("clip_grad_norm_", None, 0.05)], False),
    "a half, then all": ([HALVES[1], ("clip_grad_norm_", None, 0.05)], False),
    "all, then a half": ([("clip_grad_norm_", None, 0.5), HALVES[1]], False),
    "all by value, then a half": ([("clip_grad_value_", None, 0.01), HALVES[0]], False),
    "a half by value, then the same by norm": ([("clip_grad_value_", 0, 0.01), ("clip_grad_norm_", 0, 0.01)], False),
    "a half, then all by value": ([HALVES[0], ("clip_grad_value_", None, 0.01)], False),
}
"""Functions, the layer that each gets (None: all), its threshold; and whether no gradient is clipped twice."""


@pytest.mark.parametrize(("functions", "watch"), [(gg, "run"), (gg, "monitor"), (clip_grad, "run")])
@pytest.mark.parametrize("name", OF_PARTS)
def test_clips_of_different_parameters(name, functions, watch, tmp_path):
    calls, disjoint = OF_PARTS[name]
    ratios = []

    def clip(model):
        ratios.append([])
        for function, layer, threshold in calls:
            parameters = list((model if layer is None else model[layer]).parameters())
            before = whole(p.grad for p in parameters).norm()
            getattr(functions, function)(parameters, threshold)
            if threshold < math.inf:
                told = function == "clip_grad_norm_"  # a value clip knows no norm
                ratio = float(whole(p.grad for p in parameters).norm() / before)
                ratios[-1].append(pytest.approx(ratio, rel=1e-3) if told else None)

    steps, twin = training(a_function(clip), watcher(watch, tmp_path))
    for step, expected in zip(steps, ratios, strict=True):
        assert step.get("clips_disjoint", False) is disjoint
        assert "threshold" not in step
        assert [clip[2] for clip in step["clips"]] == expected
    assert [step["norm"] for step in steps] == pytest.approx(twin.before, rel=1e-4)
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)


def test_a_clip_that_met_one_of_many_factors_has_no_coefficient_of_its_own(tmp_path):
    def clip(model):
        gg.ClipAdaptive(0.01)(model)
        clip_grad.clip_grad_value_(model[2].parameters(), 1e6)

    steps, twin = training(a_function(clip), by_run(tmp_path))
    assert [[one[:2] for one in step["clips"]] for step in steps] == [[["adaptive", 0.01], ["value", 1e6]]] * STEPS
    assert [step["clips"][1][2] for step in steps] == [None] * STEPS
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)


def test_a_clip_of_a_part_beside_a_guard_has_no_coefficient_of_all(tmp_path):
    def clip(model):
        clip_grad.clip_grad_value_(model[0].parameters(), 0.01)

    def attach(model, optimizer):
        gg.Guard(optimizer, gg.ClipByGlobalNorm(1e6))
        return a_function(clip)(model, optimizer)

    steps, _ = training(attach, by_run(tmp_path))
    assert [step["clips"] for step in steps] == [[["value", 0.01, None], ["norm", 1e6, 1.0]]] * STEPS
    assert all(step["coefficient"] < 1 for step in steps)


def test_two_clips_that_meet_and_tell_nothing_have_no_coefficient_of_their_own(tmp_path):
    def clip(model):
        clip_grad.clip_grad_value_(model.parameters(), 0.1)
        clip_grad.clip_grad_value_(model[0].parameters(), 0.01)

    steps, twin = training(a_function(clip), by_run(tmp_path))
    assert [step["clips"] for step in steps] == [[["value", 0.1, None], ["value", 0.01, None]]] * STEPS
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)


@pytest.mark.parametrize("watch", ["run", "monitor"])
@pytest.mark.parametrize("guarded", [False, True])
def test_clips_of_different_parameters_are_not_said_to_be_twice(guarded, watch, tmp_path):
    """A guard behind them clips all gradients again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = tmp_path / "run.jsonl"

    def loop():
        if guarded:
            gg.Guard(optimizer, gg.ClipByGlobalNorm(0.02))
        for _ in range(100):
            optimizer.zero_grad()
            (model(x := torch.randn(16, 4)) - x.sum(1, keepdim=True)).square().mean().backward()
            gg.clip_grad_norm_(model[0], 0.05)
            gg.clip_grad_value_(model[2], 0.01)
            optimizer.step()

    if watch == "run":
        by_run(tmp_path)(model, optimizer, loop)
    else:
        with gg.Monitor(optimizer, sink=path, model=model):
            loop()
    record = read_record(path)
    told = {one.kind for one in findings(record)}, {cause.key for cause in diagnose(record).causes}
    assert ["clipped_twice" in told[0], "clip_twice" in told[1]] == [guarded, guarded]
    assert verdict(record).sentence.startswith(f"{2 + guarded} clips, on 100 steps")


def test_the_watchers_own_clip_beside_the_scripts(tmp_path):
    """``--clip`` is applied by the watcher: told once, and beside what the script does."""

    def watch(path):
        def watch_loop(model, optimizer, loop):
            observer = Observer(path, {}, ClipEachOptimizer(lambda: gg.ClipByGlobalNorm(0.2)))
            with listening(observer):
                loop()
            observer.close(0, False)
            return read_record(path).steps

        return watch_loop

    steps, twin = training(CLIPS["function: norm"][2], watch(tmp_path / "run.jsonl"))
    assert [[clip[:2] for clip in step["clips"]] for step in steps] == [[["norm", 0.5], ["norm", 0.2]]] * STEPS
    assert [step["norm"] for step in steps] == pytest.approx(twin.before, rel=1e-4)
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)
    steps, twin = training(lambda m, o: None, watch(tmp_path / "alone.jsonl"))
    assert not any("clips" in step for step in steps)
    assert {step["threshold"] for step in steps} == {0.2}
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)


@pytest.mark.parametrize("clip", [lambda m: gg.clip_grad_value_(m, 0.01), gg.ClipByValue(0.01), gg.ClipAdaptive(0.01)])
def test_one_clip_of_two_optimizers_is_told_for_each(clip, tmp_path):
    model = a_model()
    parts = [torch.optim.SGD(model[0].parameters(), lr=1.0), torch.optim.SGD(model[2].parameters(), lr=1.0)]
    ratios = []
    observer = Observer(tmp_path / "run.jsonl", {})
    with listening(observer):
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            before = [float(whole(p.grad for p in part.parameters()).norm()) for part in (model[0], model[2])]
            clip(model)
            after = [float(whole(p.grad for p in part.parameters()).norm()) for part in (model[0], model[2])]
            ratios += [a / b for a, b in zip(after, before, strict=True)]
            for optimizer in parts:
                optimizer.step()
    observer.close(0, False)
    steps = read_record(tmp_path / "run.jsonl").steps
    assert [step["coefficient"] for step in steps] == pytest.approx(ratios, rel=1e-3)
    assert abs(ratios[0] - ratios[1]) > 0.01 * ratios[0]


def test_a_guarded_run_is_not_said_to_be_without_a_clip(tmp_path):
    for name in ("guard: norm", "guard: median", "object: groups"):
        path = tmp_path / name.replace(": ", "_")
        path.mkdir()
        training(CLIPS[name][2], by_run(path))
        said = verdict(read_record(path / "run.jsonl")).sentence
        assert said.startswith("Clipping")
        assert "No clipping" not in said


def test_a_clip_that_only_measures_is_none(tmp_path):
    steps, twin = training(a_function(lambda m: gg.clip_grad_norm_(m, math.inf)), by_run(tmp_path))
    assert not any(step.keys() & {"rule", "coefficient", "threshold"} for step in steps)
    assert [step["norm"] for step in steps] == pytest.approx(twin.before, rel=1e-4)


@pytest.mark.parametrize("watch", ["run", "monitor"])
def test_a_clip_of_gradients_that_are_thrown_away_is_forgotten(watch, tmp_path):
    def attach(model, optimizer):
        def clip():
            gg.clip_grad_norm_(model, 0.01)
            optimizer.zero_grad()
            backward(model, 7)

        return clip

    steps, _ = training(attach, watcher(watch, tmp_path))
    assert not any("rule" in step for step in steps)
    again = a_model()
    backward(again, 7)
    assert steps[0]["norm"] == pytest.approx(float(whole(p.grad for p in again.parameters()).norm()), rel=1e-4)


def per_sample(shares: list[float], norms: list[float], then=lambda model: None):
    """A loop that clips the samples' gradients; what they were multiplied by, and the norm that came of it."""

    def attach(model, optimizer):
        clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(3.0))

        def clip():
            optimizer.zero_grad()
            clipper.discard()
            model(torch.arange(24.0).view(6, 4) / 9).square().sum(1).mean().backward()
            clipper.clip_and_accumulate()
            shares.append(float(clipper.statistics.factors[0].mean()))
            clipper.pre_step()
            norms.append(float(whole(p.grad for p in model.parameters()).norm()))
            then(model)

        return clip

    return attach


@pytest.mark.parametrize("watch", ["run", "monitor"])
def test_per_sample_clipping_is_seen(watch, tmp_path):
    """The norm that is seen is that of the clipped gradient; the coefficient is the mean factor of the samples."""
    shares: list[float] = []
    attach = per_sample(shares, [])
    steps, twin = training(attach, watcher(watch, tmp_path))
    assert {(step["rule"], step["threshold"]) for step in steps} == {("FlatNormClipper", 3.0)}
    assert [step["coefficient"] for step in steps] == pytest.approx(shares)
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)
    assert 0 < min(shares) < 1


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CLIPS)
def test_training_is_the_same_whoever_listens(name, tmp_path):
    def alone(model, optimizer, loop):
        loop()
        return []

    attach = CLIPS[name][2]
    _, expected = training(attach, alone)
    for watch in (by_run(tmp_path), by_monitor):
        _, twin = training(attach, watch)
        assert twin.after == expected.after


class Log(Listener):
    def __init__(self) -> None:
        self.announced: list[tuple[int, bool]] = []
        self.events: list[ClipEvent] = []

    def on_clip(self, call, parameters):
        self.announced.append((len(parameters), call.tells_norms))

    def on_clipped(self, event):
        self.events.append(event)


@pytest.fixture
def log():
    listener = Log()
    end = listen(listener)
    yield listener
    end()
    end()
    assert listener not in listeners._listeners


def test_one_clip_is_one_event(log):
    model = a_model()
    for clip in (
        lambda: gg.clip_grad_norm_(model, 1.0),
        lambda: gg.apply_gradient_clipping(model, "norm", 1.0),
        lambda: gg.apply_gradient_clipping(model, "adaptive", 1.0),
        lambda: gg.Chain(gg.ClipByValue(1.0), gg.ClipByGlobalNorm(1.0))(model),
        lambda: gg.Groups({"0.*": gg.ClipByGlobalNorm(1.0)}, rest=gg.ClipByValue(1.0))(model),
        lambda: dispatch_clip_grad(model.parameters(), 1.0, mode="value"),
    ):
        model.zero_grad()
        backward(model, 0)
        clip()
    assert len(log.announced) == len(log.events) == 6
    assert [count for count, _ in log.announced] == [4] * 6


def test_nobody_hears_after_the_end_and_of_what_is_refused(log):
    model = a_model()
    backward(model, 0)
    model[0].weight.grad.fill_(math.nan)
    for clip in (
        gg.clip_grad_norm_,
        gg.clip_grad_value_,
        lambda m, c, nonfinite: gg.ClipByNorm(c)(m, nonfinite="raise"),
    ):
        with pytest.raises(NonFiniteGradientError, match="weight"):
            clip(model, 1.0, nonfinite="raise")
    assert log.events == []


def test_who_listens_hears_other_threads_too(log):
    def clip():
        model = a_model()
        backward(model, 0)
        gg.clip_grad_norm_(model, 1.0)

    thread = threading.Thread(target=clip)
    thread.start()
    thread.join()
    assert len(log.events) == 1


def test_two_who_listen_end_in_any_order():
    first, second = Log(), Log()
    others = listeners._listeners
    ends = [listen(first), listen(second)]
    announce([])
    ends[0]()
    tell(ClipEvent("norm", []))
    ends[1]()
    assert [len(one.announced) for one in (first, second)] == [1, 1]
    assert [len(one.events) for one in (first, second)] == [0, 1]
    assert listeners._listeners == others


def test_a_monitor_that_is_dropped_hears_no_more():
    before = listeners._listeners
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gg.Monitor(optimizer, sink=[], model=model).close()
    assert listeners._listeners == before


def test_an_event_is_no_gradient_of_the_users(log):
    """What is told stays right when the gradients are written again: nothing of it shares their memory."""
    model = a_model()
    backward(model, 0)
    result = gg.ClipByGlobalNorm(0.5)(model)
    (event,) = log.events
    told = copy.deepcopy([event.norm, event.coefficient, event.norms])
    for parameter in model.parameters():
        parameter.grad.fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(told, [event.norm, event.coefficient, event.norms], strict=True))
    assert float(result.norm) == pytest.approx(float(event.norm))


@pytest.mark.parametrize("watch", ["run", "monitor"])
def test_a_clip_behind_per_sample_clipping(watch, tmp_path):
    between: list[float] = []
    attach = per_sample([], between, lambda model: gg.clip_grad_norm_(model, 0.01))
    steps, twin = training(attach, watcher(watch, tmp_path))
    assert [step["norm"] for step in steps] == pytest.approx(between, rel=1e-3)
    assert [step["post_norm"] for step in steps] == pytest.approx(twin.after, rel=1e-2)
    assert {(step["rule"], step["threshold"]) for step in steps} == {("norm", 0.01)}
    assert [[clip[:2] for clip in step["clips"]] for step in steps] == [
        [["FlatNormClipper", 3.0], ["norm", 0.01]]
    ] * STEPS


def test_a_monitor_hears_of_parameters_that_came_later():
    model, lines = a_model(), []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with gg.Monitor(optimizer, sink=lines.append, model=model):
        optimizer.add_param_group({"params": list(model[2].parameters())})
        backward(model, 0)
        before = float(whole(p.grad for p in model.parameters()).norm())
        gg.clip_grad_norm_(model[2], 0.5)
        optimizer.step()
    (step,) = [line for line in lines if line["t"] == "step"]
    assert step["norm"] == pytest.approx(before, rel=1e-4)
    assert step["rule"] == "norm"


def test_monitors_that_are_dropped_stop_listening():
    before = len(listeners._listeners)
    for _ in range(3):
        model = a_model()
        gg.Monitor(torch.optim.SGD(model.parameters(), lr=0.1), sink=[], model=model)
    del model
    gc.collect()
    assert len(listeners._listeners) <= before

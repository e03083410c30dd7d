"""The Composer algorithm in a small engine of Composer's protocol: its events, in its order, and its checkpoints.

Composer itself does not install beside torch 2.13 (its wheels want torch < 2.7.1), so what stands in for its Trainer
here does what its documentation of the events says.
"""

import copy
import enum
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.integrations.composer import ClipGradients, GradientClipping, apply_gradient_clipping


class Event(enum.Enum):
    INIT = "init"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"


class Trainer:
    """Composer's loop: microbatches, unscale, ``AFTER_TRAIN_BATCH``, step; its checkpoint of algorithms."""

    def __init__(self, model, algorithms, scaler=None, rate=0.1):
        self.state = SimpleNamespace(model=model, algorithms=algorithms)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        self.scaler, self.metrics, self.seen = scaler, [], []
        self.run_event(Event.INIT)

    def run_event(self, event):
        for algorithm in [a for a in self.state.algorithms if a.match(event, self.state)]:
            algorithm.apply(event, self.state, self)

    def log_metrics(self, metrics):
        self.metrics.append(metrics)

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.run_event(Event.BEFORE_TRAIN_BATCH)
            for micro in batch.chunk(2):
                loss = self.state.model(micro).square().sum() / len(batch)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
                self.run_event(Event.AFTER_BACKWARD)
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            self.run_event(Event.AFTER_TRAIN_BATCH)
            self.seen.append([p.grad.clone() for p in self.state.model.parameters()])
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.run_event(Event.BATCH_END)

    def state_dict(self):
        return [(type(a).__qualname__, a.state_dict()) for a in self.state.algorithms]

    def load_state_dict(self, saved):
        for algorithm in self.state.algorithms:
            algorithm.load_state_dict(dict(saved)[type(algorithm).__qualname__])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def batches(count=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [10 ** (i % 3) * torch.randn(6, 4, generator=generator) for i in range(count)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "threshold"), [("norm", 0.5), ("value", 0.05), ("adaptive", 0.01)])
def test_training_is_a_loop_with_the_call_before_the_step(kind, threshold, scaled):
    ours, by_hand = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    Trainer(ours, [GradientClipping(kind, threshold)], scaler).fit(batches())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        for micro in batch.chunk(2):
            (by_hand(micro).square().sum() / len(batch)).backward()
        assert gg.apply_gradient_clipping(by_hand, kind, threshold).clipped
        optimizer.step()
    torch.testing.assert_close(ours.state_dict(), by_hand.state_dict(), rtol=1e-5 if scaled else 0, atol=0)


@pytest.mark.parametrize("fsdp_enabled", [False, True])
@pytest.mark.parametrize(
    ("kind", "threshold", "after"),
    [("norm", 1.0, [0.02, 0.04, 1.0]), ("value", 1.0, [0.1, 0.2, 1.0]), ("adaptive", 0.5, [1e-5, 2e-5, 5e-4])],
)
def test_the_function_keeps_its_rule_whatever_is_said_about_sharding(kind, threshold, after, fsdp_enabled):
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data.zero_()  # which Composer's adaptive rule never lets move
    layer.weight.grad = torch.tensor([[0.1, 0.2, 5.0]])
    result = apply_gradient_clipping(layer, kind, threshold, fsdp_enabled)
    assert layer.weight.grad[0].tolist() == pytest.approx(after, rel=2e-3)
    assert bool(result.clipped)


def test_it_acts_once_for_each_batch_and_tells():
    algorithm = GradientClipping("norm", 0.5, log=True)
    trainer = Trainer(model(), [algorithm])
    trainer.fit(batches(3))
    assert [set(metrics) for metrics in trainer.metrics] == [
        {"gradguard/norm", "gradguard/coefficient", "gradguard/clipped"}
    ] * 3
    for metrics, seen in zip(trainer.metrics, trainer.seen, strict=True):
        norm = float(gg.get_total_norm(seen))
        assert norm == pytest.approx(0.5, rel=1e-5)
        assert norm == pytest.approx(metrics["gradguard/norm"] * metrics["gradguard/coefficient"], rel=1e-5)
    assert float(algorithm.last.norm) == trainer.metrics[-1]["gradguard/norm"]
    quiet = Trainer(model(), [GradientClipping("norm", 0.5)])
    quiet.fit(batches(3))
    assert quiet.metrics == []


def test_other_events_change_nothing():
    algorithm, layers = GradientClipping("norm", 0.5), model()
    layers(torch.ones(2, 4)).sum().backward()
    before = [p.grad.clone() for p in layers.parameters()]
    for event in (Event.BEFORE_TRAIN_BATCH, Event.AFTER_BACKWARD, Event.BATCH_END):
        assert not algorithm.match(event, None)
        algorithm.apply(event, SimpleNamespace(model=layers), None)
    torch.testing.assert_close([p.grad for p in layers.parameters()], before, rtol=0, atol=0)


def test_a_checkpoint_resumes_a_clipper_that_remembers_bit_for_bit():
    whole, first, second = (Trainer(model(), [ClipGradients(gg.AutoClip(percentile=50))], rate=1e-3) for _ in range(3))
    data = batches(12)
    whole.fit(data)
    first.fit(data[:6])
    saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(first.state.model.state_dict())
    second.state.model.load_state_dict(weights)
    second.load_state_dict(saved)
    second.fit(data[6:])
    torch.testing.assert_close(second.state.model.state_dict(), whole.state.model.state_dict(), rtol=0, atol=0)
    forgetful = Trainer(copy.deepcopy(model()), [ClipGradients(gg.AutoClip(percentile=50))], rate=1e-3)
    forgetful.state.model.load_state_dict(weights)
    forgetful.fit(data[6:])
    assert not torch.equal(forgetful.state.model[0].weight, whole.state.model[0].weight)


def test_an_algorithm_begins_anew_with_another_model_and_goes_on_with_the_same():
    algorithm, fresh = (ClipGradients(gg.AutoClip(percentile=50)) for _ in range(2))
    first = Trainer(model(), [algorithm], rate=1e-3)
    first.fit(batches(6))
    history = repr(algorithm.state_dict())
    first.run_event(SimpleNamespace(value="fit_end"))
    Trainer(first.state.model, [algorithm])
    assert repr(algorithm.state_dict()) == history
    second, expected = (Trainer(model(), [one], rate=1e-3) for one in (algorithm, fresh))
    assert repr(algorithm.state_dict()) != history
    second.fit(batches(6))
    expected.fit(batches(6))
    torch.testing.assert_close(second.state.model.state_dict(), expected.state.model.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_of_composers_own_algorithm_can_be_loaded():
    algorithm = GradientClipping("norm", 0.5)
    algorithm.load_state_dict({"repr": "GradientClipping()"})
    assert not algorithm.required_on_load()
    assert repr(algorithm) == "GradientClipping(clipping_type='norm', clipping_threshold=0.5)"
    assert repr(ClipGradients(gg.ClipByMedian())) == "ClipGradients(ClipByMedian)"


def test_an_overflow_is_the_scalers_and_the_clipper_forgets_it():
    clipper, scaler = gg.ClipByMedian(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = Trainer(model(), [ClipGradients(clipper)], scaler)
    trainer.fit(batches(1))
    weights, memory = copy.deepcopy(trainer.state.model.state_dict()), copy.deepcopy(clipper.state_dict())
    trainer.fit([torch.full((6, 4), float("inf"))])
    torch.testing.assert_close(trainer.state.model.state_dict(), weights, rtol=0, atol=0)
    assert scaler.get_scale() == 512.0
    history = {k: v for k, v in memory.items() if "history" in k or "norm" in k}
    torch.testing.assert_close({k: clipper.state_dict()[k] for k in history}, history, rtol=0, atol=0)


def test_the_policy_is_the_clippers():
    trainer = Trainer(model(), [GradientClipping("norm", 0.5, nonfinite="raise")])
    with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
        trainer.fit([torch.full((6, 4), float("nan"))])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: GradientClipping("agc", 1.0), InvalidValueError, "clipping_type='agc': expected 'norm', 'value'"),
        (lambda: GradientClipping("norm", -1.0), InvalidValueError, "max_norm"),
        (lambda: GradientClipping("value", "1"), InvalidTypeError, "expected a number"),
        (lambda: GradientClipping("norm", 1.0, nonfinite="skip"), InvalidValueError, 'nonfinite="skip" means to skip'),
        (lambda: ClipGradients(1.0), InvalidTypeError, "clipper is float"),
        (lambda: apply_gradient_clipping(model(), "agc", 1.0), InvalidValueError, "clipping_type='agc'"),
    ],
)
def test_bad_arguments_are_told_at_once(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    "other",
    [ClipGradients(gg.ClipByMedian()), SimpleNamespace(clipping_threshold=1.0, match=lambda *_: False)],
    ids=["ours", "composer's own"],
)
def test_two_clips_never_happen_silently(other):
    with pytest.raises(InvalidValueError, match=r"two algorithms clip gradients.*Chain"):
        Trainer(model(), [other, GradientClipping("norm", 1.0)])


def test_deepspeed_is_refused():
    state = SimpleNamespace(deepspeed_enabled=True, algorithms=[])
    with pytest.raises(InvalidValueError, match="gradient_clipping"):
        GradientClipping("norm", 1.0).apply(Event.INIT, state, None)


def _sharded(kind, threshold, wrapper):
    """Train a batch of two halves, one on each of two processes; return the gradients after the clip."""
    layers = model()
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(layers[0], mesh=mesh)
        fully_shard(layers, mesh=mesh)
    else:
        layers = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
    trainer = Trainer(layers, [GradientClipping(kind, threshold)])
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    before = trainer.state.model(torch.randn(6, 4, generator=generator)).square().mean()
    before.backward()
    trainer.run_event(Event.AFTER_TRAIN_BATCH)
    if wrapper == "fsdp2":
        return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in layers.parameters()]
    with FullyShardedDataParallel.summon_full_params(layers, with_grads=True):
        return [p.grad.clone() for p in layers.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "threshold", "wrapper"),
    [
        ("norm", 0.05, "fsdp2"),
        ("value", 0.01, "fsdp2"),
        ("adaptive", 0.01, "fsdp2"),
        ("norm", 0.05, "fsdp1"),
        ("value", 0.01, "fsdp1"),
    ],
)
def test_a_rule_is_the_same_rule_on_shards(pool, kind, threshold, wrapper):
    whole = model()
    for rank in range(2):
        generator = torch.Generator().manual_seed(5 + rank)
        (whole(torch.randn(6, 4, generator=generator)).square().mean() / 2).backward()
    apply_gradient_clipping(whole, kind, threshold)
    expected = [p.grad for p in whole.parameters()]
    for found in pool(2).run(_sharded, kind, threshold, wrapper):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_an_adaptive_clip_of_flattened_parameters_is_refused(pool):
    with pytest.raises(UnsupportedGradientError, match=r"fully_shard\(model\)"):
        pool(2).run(_sharded, "adaptive", 0.01, "fsdp1")

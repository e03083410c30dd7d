"""A Guard on Accelerate's optimizers does what its own clip does, once a real step, and resumes bit for bit."""

import copy
import functools
import os

import pytest
import torch
from accelerators import forget_accelerators
from torch import nn

import gradguard as gg

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch.optim.lr_scheduler import LambdaLR

from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError, UnsupportedVersionError
from gradguard.integrations.accelerate import guard, inner_optimizer
from gradguard.integrations.adapter import wrap_once

BATCHES = torch.randn(24, 4, 3, generator=torch.Generator().manual_seed(1)) * 3


class Training:
    """A tiny model that an accelerator has prepared; ``clip`` is called before each ``optimizer.step()``."""

    def __init__(self, clip=None, *, fused=False, accumulation=1, precision="no", scale=None, on_made=None):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation)
        if on_made is not None:
            on_made(self.accelerator)
        if scale is not None:  # Accelerate makes a GradScaler on GPUs only, where it is torch's, as this one is
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            self.accelerator.native_amp = True
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, fused=fused)
        processes = self.accelerator.num_processes  # by as much Accelerate moves a schedule at each step
        schedule = LambdaLR(optimizer, lambda step: 0.9 ** (step / processes))
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.clip = clip

    def guarded(self, clipper, **options):
        self.guard = guard(self.accelerator, self.optimizer, clipper, model=self.model, **options)
        return self

    def run(self, batches):
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(((self.model(batch) - batch.sum(1, keepdim=True)) ** 2).mean())
                if self.accelerator.sync_gradients and self.clip is not None:
                    self.clip(self)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return self

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def whole_weights(self):
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.weights()]


def by_accelerate(max_norm):
    return lambda training: training.accelerator.clip_grad_norm_(training.model.parameters(), max_norm)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_it_trains_as_with_accelerates_own_clip(precision, accumulation, fused):
    options = {"fused": fused, "accumulation": accumulation, "precision": precision}
    theirs = Training(by_accelerate(10.0), **options).run(BATCHES)
    ours = Training(**options).guarded(gg.ClipByGlobalNorm(10.0)).run(BATCHES)
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=1e-4, atol=1e-6)
    assert ours.guard.steps == len(BATCHES) // accumulation
    unclipped = Training(**options).run(BATCHES).weights()
    assert max(float((a - b).abs().max()) for a, b in zip(ours.weights(), unclipped, strict=True)) > 0.01


@pytest.mark.parametrize(
    "clipper",
    [
        gg.ClipByMedian(k=0.0, window=4, warmup=2),
        gg.AdaGC(warmup=2),
        gg.Chain(gg.ClipByValue(1.0), gg.ZClip(warmup=3)),
        gg.Groups({"0.*": gg.AutoClip(50)}, rest=gg.ClipByGlobalNorm(0.5)),
    ],
    ids=lambda clipper: type(clipper).__name__,
)
def test_a_saved_state_resumes_bit_for_bit(clipper, tmp_path):
    whole = Training().guarded(copy.deepcopy(clipper)).run(BATCHES)
    first = Training().guarded(copy.deepcopy(clipper)).run(BATCHES[:9])
    first.accelerator.save_state(tmp_path)
    again = Training().guarded(copy.deepcopy(clipper))
    again.accelerator.load_state(tmp_path)
    assert again.guard.steps == 9
    again.run(BATCHES[9:])
    torch.testing.assert_close(again.weights(), whole.weights(), rtol=0, atol=0)
    assert repr(again.guard.state_dict()) == repr(whole.guard.state_dict())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_thresholds_are_for_unscaled_gradients_with_a_scaler(fused, unscale_first):
    clip = (lambda training: training.accelerator.unscale_gradients()) if unscale_first else None
    options = {"fused": fused, "precision": "fp16"}
    plain = Training(scale=1.0, **options).guarded(gg.ClipByGlobalNorm(0.5)).run(BATCHES)
    scaled = Training(clip, scale=1024.0, **options).guarded(gg.ClipByGlobalNorm(0.5)).run(BATCHES)
    torch.testing.assert_close(scaled.weights(), plain.weights(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(scaled.guard.last.norm, plain.guard.last.norm, rtol=1e-2, atol=0)
    assert bool(scaled.guard.last.clipped)


def test_a_second_unscaling_stays_the_error_that_torch_makes_of_it():
    training = Training(scale=8.0, precision="fp16").guarded(gg.ClipByGlobalNorm(0.5))
    training.clip = lambda t: [t.accelerator.unscale_gradients() for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        training.run(BATCHES[:1])


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_and_counted(fused):
    training = Training(scale=2.0**20, precision="fp16", fused=fused).guarded(gg.ClipByGlobalNorm(0.5))
    before = training.weights()
    training.run(BATCHES[:1] * 100)
    torch.testing.assert_close(training.weights(), before, rtol=0, atol=0)
    assert (training.guard.steps, training.guard.skipped_steps) == (1, 1)
    assert float(training.accelerator.scaler.get_scale()) == 2.0**19
    # Accelerate tells that a step was skipped by whether step() was called, which a fused optimizer's always is
    assert training.accelerator.optimizer_step_was_skipped is not fused
    assert training.schedule.scheduler.last_epoch == (1 if fused else 0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_skip_of_the_guard_leaves_the_weights_and_moves_the_schedule(precision):
    training = Training(precision=precision).guarded(gg.ClipByGlobalNorm(0.5))
    before, poisoned = training.weights(), BATCHES[:2].clone()
    poisoned[:, 0, 0] = float("nan")
    training.run(poisoned)
    torch.testing.assert_close(training.weights(), before, rtol=0, atol=0)
    assert training.guard.skipped_steps == 2
    assert "0.weight" in training.guard.last.culprits()
    assert not training.accelerator.optimizer_step_was_skipped
    assert training.schedule.scheduler.last_epoch == 2


@pytest.mark.parametrize(
    ("name", "argument"), [("clip_grad_norm_", 1.0), ("clip_grad_norm_", float("inf")), ("clip_grad_value_", 1.0)]
)
def test_a_clip_of_accelerates_beside_it_is_refused_until_it_is_detached(name, argument):
    training = Training().guarded(gg.ClipByGlobalNorm(0.5)).run(BATCHES[:1])
    clip, parameters = getattr(training.accelerator, name), list(training.model.parameters())
    for some in (parameters, (p for p in parameters), parameters[0]):
        with pytest.raises(InvalidValueError, match=f"accelerator.{name} was called.*Remove the call"):
            clip(some, argument)
    stranger = nn.Parameter(torch.ones(2))
    stranger.grad = torch.full((2,), 3.0)
    clip([stranger], argument)
    assert float(stranger.grad[0]) < 3 or argument == float("inf")
    training.guard.detach()
    training.guard.detach()
    parameters[0].grad = torch.full_like(parameters[0], 3.0)
    clip(parameters, argument)
    assert bool((parameters[0].grad < 3).all()) or argument == float("inf")


def test_without_a_guard_accelerates_clips_are_as_they_were():
    training = Training().guarded(gg.ClipByGlobalNorm(0.5))
    del training
    other = Training(by_accelerate(0.5)).run(BATCHES[:2])
    assert float(gg.get_total_norm([p.detach() for p in other.model.parameters()])) > 0


def test_two_optimizers_have_a_guard_each():
    training = Training().guarded(gg.ClipByMedian())
    more = training.accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(InvalidValueError, match="belongs to the Guard of another optimizer"):
        guard(training.accelerator, more, training.guard.clipper)
    assert guard(training.accelerator, more, gg.ClipByMedian()).optimizer is inner_optimizer(more)


def _prepared():
    accelerator = Accelerator(cpu=True)
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    return accelerator, plain, accelerator.prepare(plain)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (lambda a, plain, ready: (ready, a, gg.ClipByGlobalNorm(1)), InvalidTypeError, "accelerator is Accelerated"),
        (lambda a, plain, ready: (a, plain, gg.ClipByGlobalNorm(1)), InvalidTypeError, "no accelerator has prepare"),
        (lambda a, plain, ready: (a, ready, gg.ClipByGlobalNorm), InvalidTypeError, "the class ClipByGlobalNorm"),
        (
            lambda a, plain, ready: (a, DeepSpeedOptimizerWrapper(plain), gg.ClipByGlobalNorm(1)),
            UnsupportedGradientError,
            "DeepSpeed owns the gradients",
        ),
    ],
    ids=["accelerator", "optimizer", "clipper", "deepspeed"],
)
def test_what_it_cannot_guard_is_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        guard(*arguments(*_prepared()))


def test_names_are_those_of_the_model_inside():
    accelerator = Accelerator(cpu=True)
    model = torch.compile(nn.Linear(2, 1), backend="eager")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guarded = guard(accelerator, optimizer, gg.ClipByGlobalNorm(1.0), model=model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert guarded.last.names == ("weight", "bias")


def test_a_method_that_is_gone_is_named():
    with pytest.raises(UnsupportedVersionError, match="Accelerator has no method clip_everything"):
        wrap_once(Accelerator, "clip_everything", print)


def as_launched(rank, world):
    """Set what ``accelerate launch`` sets."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ["OMP_NUM_THREADS"] = "1"


def shard_on_the_cpu(accelerator, version=2):
    """Turn FSDP on: Accelerate does so on accelerators only, but its code runs anywhere."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False, use_orig_params=True
    )
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    assert accelerator.is_fsdp2 == (version == 2)


def train_on_one_of_two(fsdp, folder):
    rank = torch.distributed.get_rank()
    as_launched(rank, 2)
    forget_accelerators()
    try:
        training = Training(accumulation=2, on_made=shard_on_the_cpu if fsdp else None)
        training.guarded(gg.ClipByMedian(k=0.0, window=4, warmup=2))
        training.run(BATCHES[:12, 2 * rank : 2 * rank + 2])
        training.accelerator.save_state(folder)
        training.run(BATCHES[12:, 2 * rank : 2 * rank + 2])
        whole, clipper = training.whole_weights(), repr(training.guard.state_dict())
        training.accelerator.load_state(folder)
        assert training.guard.steps == 6
        training.run(BATCHES[12:, 2 * rank : 2 * rank + 2])
        torch.testing.assert_close(training.whole_weights(), whole, rtol=0, atol=0)
        assert repr(training.guard.state_dict()) == clipper
        return whole, float(training.guard.last.norm), training.guard.last.names, training.accelerator.distributed_type
    finally:
        forget_accelerators()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_train_as_one_and_resume(fsdp, pool, tmp_path):
    alone = Training(accumulation=2).guarded(gg.ClipByMedian(k=0.0, window=4, warmup=2)).run(BATCHES)
    for weights, norm, names, kind in pool(2).run(train_on_one_of_two, fsdp, str(tmp_path)):
        torch.testing.assert_close(weights, alone.weights(), rtol=1e-4, atol=1e-6)
        assert norm == pytest.approx(float(alone.guard.last.norm), rel=1e-4)
        assert names == alone.guard.last.names
        assert kind == (DistributedType.FSDP if fsdp else DistributedType.MULTI_CPU)


def norms_with_fsdp1():
    rank = torch.distributed.get_rank()
    as_launched(rank, 2)
    forget_accelerators()
    try:
        training = Training(on_made=functools.partial(shard_on_the_cpu, version=1))
        return norms_of(training.guarded(gg.ClipByGlobalNorm(10.0)), BATCHES[:6, 2 * rank : 2 * rank + 2])
    finally:
        forget_accelerators()


def norms_of(training, batches):
    return [float(training.run(batch[None]).guard.last.norm) for batch in batches]


@pytest.mark.slow
def test_parts_of_fsdp1_have_the_norm_of_the_whole(pool):
    alone = norms_of(Training().guarded(gg.ClipByGlobalNorm(10.0)), BATCHES[:6])
    for norms in pool(2).run(norms_with_fsdp1):
        assert norms == pytest.approx(alone, rel=1e-4)


def test_a_guard_by_hand_on_a_prepared_optimizer_names_the_call():
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    with pytest.raises(InvalidTypeError, match=r"pass wrapper\.optimizer.*accelerate\.guard\(accelerator"):
        gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    gg.Guard(optimizer.optimizer, gg.ClipByGlobalNorm(1.0)).detach()

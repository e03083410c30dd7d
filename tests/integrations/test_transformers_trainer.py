"""With the callback the Trainer trains as a loop by hand with the clipper does, and logs true norms."""

import math
import os

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerators import forget_accelerators
from tiny_trainer import (
    BATCH,
    INPUTS,
    STEPS,
    InOrder,
    Model,
    by_hand,
    fused_adamw,
    logged,
    trainer,
    weights,
)
from transformers import TrainerCallback

from gradguard.integrations.transformers import GradGuardCallback

pytestmark = pytest.mark.sampled(2)  # rows of each table


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_it_trains_and_logs_as_a_loop_by_hand(optim, accumulation, precision, tmp_path):
    clipper = gg.ClipByGlobalNorm(10.0)
    optimizer = fused_adamw if optim == "adamw_torch_fused" else None
    expected, results = by_hand(clipper, optimizer=optimizer, accumulation=accumulation, precision=precision)
    callback = GradGuardCallback(gg.ClipByGlobalNorm(10.0))
    options = {"optim": optim, "gradient_accumulation_steps": accumulation, "bf16": precision == "bf16"}
    done = trainer(tmp_path, [callback], **options)
    done.train()
    torch.testing.assert_close(weights(done.model), expected, rtol=1e-4, atol=1e-5)
    assert callback.guard.steps == STEPS
    bound = [bool(result.clipped) for result in results]
    assert 0 < sum(bound) < STEPS
    assert logged(done, "grad_norm") == pytest.approx([float(result.norm) for result in results], rel=1e-4)
    assert logged(done, "clip_coefficient") == pytest.approx([float(r.coefficient) for r in results], rel=1e-4)
    assert logged(done, "clip_binding_share") == bound
    assert logged(done, "grad_nonfinite_steps") == [0] * STEPS
    assert not logged(done, "grad_norm_min")


def test_a_log_of_several_steps_has_their_least_mean_and_most(tmp_path):
    _, results = by_hand(gg.ClipByGlobalNorm(10.0))
    norms = [float(result.norm) for result in results]
    done = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(10.0))], logging_steps=4)
    done.train()
    for k, name in enumerate(["min", "mean", "max"]):
        summary = (min, lambda x: sum(x) / len(x), max)[k]
        expected = [summary(norms[:4]), summary(norms[4:])]
        assert logged(done, f"grad_norm_{name}") == pytest.approx(expected, rel=1e-4)
    assert logged(done, "grad_norm") == pytest.approx(norms[3::4], rel=1e-4)
    coefficients = [float(result.coefficient) for result in results]
    assert logged(done, "clip_coefficient") == pytest.approx([sum(coefficients[:4]) / 4, sum(coefficients[4:]) / 4])
    shares = [sum(norm > 10 for norm in some) / 4 for some in (norms[:4], norms[4:])]
    assert logged(done, "clip_binding_share") == shares


@pytest.mark.parametrize("block", [1, 3, 4])
def test_a_window_is_read_whole_however_it_is_kept(block, tmp_path, monkeypatch):
    monkeypatch.setattr("gradguard.integrations.transformers._BLOCK", block)
    done = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(10.0))], logging_steps=STEPS)
    done.train()
    norms = [float(result.norm) for result in by_hand(gg.ClipByGlobalNorm(10.0))[1]]
    assert logged(done, "grad_norm_mean") == pytest.approx([sum(norms) / STEPS], rel=1e-4)
    assert logged(done, "clip_binding_share") == [sum(norm > 10 for norm in norms) / STEPS]


class Listens(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(dict(logs))


def test_a_callback_before_it_hears_the_numbers_and_an_evaluation_has_none(tmp_path):
    before = Listens()
    done = trainer(tmp_path, [before, GradGuardCallback(gg.ClipByGlobalNorm(10.0))], logging_steps=4)
    done.eval_dataset = [{"x": x} for x in INPUTS[:4]]
    done.train()
    done.evaluate()
    assert [("clip_binding_share" in logs, "loss" in logs) for logs in before.heard].count((True, True)) == 2
    assert not any(name.startswith(("grad", "clip")) for name in before.heard[-1])


class Huge(nn.Module):
    """Its gradients are finite, and the sum of their squares is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return {"loss": (self.weight * x.sum(0)).sum() * 1e30}


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_gradients_that_the_trainers_own_norm_spoils_are_clipped(max_grad_norm, tmp_path):
    options = {"model": Huge(), "max_grad_norm": max_grad_norm, "max_steps": 1}
    alone = trainer(tmp_path, **options)
    alone.train()
    assert not 1e-3 < float(alone.model.weight.detach().norm()) < 1  # NaN with 0, no step at all with 1.0
    callback = GradGuardCallback(gg.ClipByGlobalNorm(1.0), nonfinite="raise")
    done = trainer(tmp_path, [callback], **(options | {"model": Huge()}))
    done.train()
    torch.testing.assert_close(done.model.weight.detach().norm(), torch.tensor(0.02))
    assert math.isfinite(logged(done, "grad_norm")[0])


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_a_step_that_is_not_finite_is_skipped_named_and_counted(optim, tmp_path):
    poisoned = INPUTS.clone()
    poisoned[BATCH * 2] = float("nan")  # the third step
    seen = []

    class Watches(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append((weights(model), callback.guard.last.culprits()))

    callback = GradGuardCallback(gg.ClipByGlobalNorm(10.0))
    done = trainer(tmp_path, [callback, Watches()], inputs=poisoned, optim=optim, max_steps=4, logging_steps=2)
    done.train()
    torch.testing.assert_close(seen[2][0], seen[1][0], rtol=0, atol=0)
    assert set(seen[2][1]) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert (seen[1][1], seen[3][1]) == ({}, {})
    assert not torch.equal(seen[3][0][0], seen[2][0][0])
    assert logged(done, "grad_nonfinite_steps") == [0, 1]
    assert callback.guard.skipped_steps == 1
    assert math.isfinite(logged(done, "grad_norm_mean")[1])


def test_only_the_culprit_is_named(tmp_path):
    class OneIsBad(Model):
        def forward(self, x):
            loss = super().forward(x)["loss"]
            return {"loss": loss + (self.head.bias * float("inf")).sum()}

    callback = GradGuardCallback(gg.ClipByGlobalNorm(10.0))
    trainer(tmp_path, [callback], model=OneIsBad(), max_steps=1, max_grad_norm=0).train()
    assert callback.guard.last.culprits() == {"head.bias": 1}


@pytest.mark.parametrize("max_grad_norm", [0, 0.0, 1.0])
def test_the_trainers_default_and_zero_leave_the_clip_to_the_clipper(max_grad_norm, tmp_path):
    expected, _ = by_hand(gg.ClipByGlobalNorm(100.0))
    done = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(100.0))], max_grad_norm=max_grad_norm)
    done.train()
    torch.testing.assert_close(weights(done.model), expected, rtol=1e-4, atol=1e-5)
    assert done.args.max_grad_norm == max_grad_norm


@pytest.mark.parametrize("max_grad_norm", [0.5, 2.0, None])
def test_a_threshold_of_the_trainers_own_is_refused(max_grad_norm, tmp_path):
    one = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(1.0))], max_grad_norm=max_grad_norm)
    with pytest.raises(InvalidValueError, match=f"max_grad_norm={max_grad_norm}.*one clip would be done after the oth"):
        one.train()


def test_a_trainer_without_the_callback_clips_as_before(tmp_path):
    GradGuardCallback(gg.ClipByGlobalNorm(1.0))  # by now every Trainer is watched
    expected, results = by_hand(gg.ClipByGlobalNorm(10.0))
    done = trainer(tmp_path, max_grad_norm=10.0)
    done.train()
    torch.testing.assert_close(weights(done.model), expected, rtol=1e-4, atol=1e-5)
    assert logged(done, "grad_norm") == pytest.approx([float(result.norm) for result in results], rel=1e-4)
    assert not logged(done, "clip_coefficient")


# -- what cannot work -------------------------------------------------------------------------------------------------


class ClipsItself(InOrder):
    def _clip_grad_norm(self, model):
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class MeasuresItself(InOrder):
    def _get_grad_norm(self, model, grad_norm=None):
        return torch.tensor(1.0)


class AsksSuper(InOrder):
    def _clip_grad_norm(self, model):
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model, grad_norm=None):
        return super()._get_grad_norm(model, grad_norm=grad_norm)


@pytest.mark.parametrize(
    ("kind", "max_grad_norm"), [(ClipsItself, 1.0), (MeasuresItself, 0.0), (AsksSuper, 1.0), (AsksSuper, 0.0)]
)
def test_a_trainer_that_clips_by_itself_is_refused_and_one_that_asks_super_is_not(kind, max_grad_norm, tmp_path):
    callback = GradGuardCallback(gg.ClipByGlobalNorm(10.0))
    one = trainer(tmp_path, [callback], kind=kind, max_grad_norm=max_grad_norm)
    if kind is AsksSuper:
        one.train()
        assert callback.guard.steps == STEPS
    else:
        with pytest.raises(UnsupportedGradientError, match="Let them return the result of super"):
            one.train()


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_an_optimizer_inside_backward_is_refused(optim, tmp_path):
    one = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(1.0))], optim=optim)
    with pytest.raises(UnsupportedGradientError, match=f'optim="{optim}" steps inside backward'):
        one.train()


def test_an_optimizer_whose_step_runs_no_hooks_is_refused(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None
    one = trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(1.0))], model=model, optimizers=(optimizer, None))
    with pytest.raises(UnsupportedGradientError, match="did not run the hooks of SGD"):
        one.train()


@pytest.mark.parametrize(
    ("clipper", "came"),
    [
        (1.0, "float"),
        (gg.ClipByGlobalNorm, "the class ClipByGlobalNorm"),
        (gg.FlatNormClipper(1.0), "FlatNormClipper, a rule for each sample's gradient, which PerSampleCallback takes"),
    ],
)
def test_what_is_no_clipper_is_refused(clipper, came):
    with pytest.raises(InvalidTypeError, match=f"clipper is {came}: expected a clipper"):
        GradGuardCallback(clipper)


@pytest.mark.parametrize("option", [{"nonfinite": "bogus"}, {"max_consecutive_skips": -1}])
def test_what_no_guard_takes_is_refused_at_once(option):
    with pytest.raises(InvalidValueError, match=r"bogus.* is not a policy|=-1: expected a whole number"):
        GradGuardCallback(gg.ClipByMedian(), **option)


def test_two_callbacks_are_refused(tmp_path):
    two = [GradGuardCallback(gg.ClipByGlobalNorm(1.0)), GradGuardCallback(gg.ClipByGlobalNorm(2.0))]
    with pytest.raises(InvalidValueError, match=r"a GradGuardCallback beside the GradGuardCallback.*Chain"):
        trainer(tmp_path, two).train()


# -- loss scale, several processes ------------------------------------------------------------------------------------


class Scales(InOrder):
    """As with ``fp16=True`` on a GPU; on the CPU Accelerate makes no GradScaler, so it gets one."""

    scale = 1.0

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=self.scale), True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"


class ScalesMore(Scales):
    scale = 1024.0


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_thresholds_and_logs_are_of_unscaled_gradients(optim, tmp_path):
    one, more = (
        trainer(tmp_path, [GradGuardCallback(gg.ClipByGlobalNorm(10.0))], kind=kind, optim=optim)
        for kind in (Scales, ScalesMore)
    )
    one.train()
    more.train()
    torch.testing.assert_close(weights(more.model), weights(one.model), rtol=1e-2, atol=1e-3)
    assert logged(more, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-2)
    assert 0 < sum(logged(more, "clip_binding_share")) < STEPS


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_an_overflow_is_a_step_that_is_not_finite(optim, tmp_path):
    callback, inputs = GradGuardCallback(gg.ClipByGlobalNorm(10.0)), INPUTS.clone()
    inputs[0] *= 1e5  # more than fp16 can hold
    done = trainer(tmp_path, [callback], kind=Scales, inputs=inputs, optim=optim, max_steps=3)
    done.train()
    assert logged(done, "grad_nonfinite_steps") == [1, 0, 0]
    assert (callback.guard.steps, callback.guard.skipped_steps) == (3, 1)


class Sharded(InOrder):
    """Turns FSDP2 on: Accelerate does so on accelerators only, but its code runs anywhere."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        for state in (AcceleratorState._shared_state, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def train_on_one_of_two(kind, folder):
    rank = torch.distributed.get_rank()
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    for resume in (None, f"{folder}/checkpoint-5"):
        forget_accelerators()
        callback = GradGuardCallback(gg.ClipByMedian(k=0.0, window=4, warmup=2))
        options = {"save_strategy": "no" if resume else "steps", "save_steps": 5, "per_device_train_batch_size": 1}
        one = trainer(folder, [callback], kind=kind, ddp_backend="gloo", **options)
        one.train(resume_from_checkpoint=resume)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights(one.model)]
        results.append((whole, repr(callback.guard.state_dict()), logged(one, "grad_norm"), callback.guard.last.names))
    forget_accelerators()
    return results


def guarded_by_hand(clipper):
    """As `by_hand`, with a Guard in place of the clipper: the rule then knows how far SGD moves the weights."""
    model, results = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    guard = gg.Guard(optimizer, clipper, model=model)
    for batch in INPUTS.split(BATCH)[:STEPS]:
        model(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(guard.last)
    return weights(model), results


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [InOrder, Sharded], ids=["DDP", "FSDP2"])
def test_two_processes_train_as_one_and_resume(kind, pool, tmp_path):
    expected, results = guarded_by_hand(gg.ClipByMedian(k=0.0, window=4, warmup=2))
    assert 0 < sum(bool(result.clipped) for result in results) < STEPS
    for (ours, state, norms, names), (resumed, resumed_state, later_norms, _) in pool(2).run(
        train_on_one_of_two, kind, str(tmp_path)
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert norms == pytest.approx([float(result.norm) for result in results], rel=1e-4)
        assert sorted(names) == sorted(results[-1].names)
        torch.testing.assert_close(resumed, ours, rtol=0, atol=0)
        assert (resumed_state, later_norms) == (state, norms)

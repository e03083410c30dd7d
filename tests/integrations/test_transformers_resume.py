"""A checkpoint brings the clipper's state back bit for bit, and no state goes where it does not belong."""

import copy
import pickle
import runpy
from pathlib import Path

import pytest
import torch

import gradguard as gg
from gradguard.errors import InvalidValueError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tiny_trainer import STEPS, Model, logged, trainer, weights
from transformers import TrainerCallback

from gradguard.integrations.transformers import GradGuardCallback

CLIPPERS = [
    gg.ClipByGlobalNorm(10.0),
    gg.ClipByMedian(k=0.0, window=4, warmup=2),
    gg.AdaGC(warmup=2),
    gg.Groups({"body.*": gg.AutoClip(50)}, rest=gg.Chain(gg.ClipByValue(5.0), gg.ZClip(warmup=3))),
]


@pytest.mark.parametrize("clipper", CLIPPERS[1:], ids=lambda clipper: type(clipper).__name__)
def test_a_checkpoint_resumes_bit_for_bit(clipper, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5, "optim": "adamw_torch_fused"}
    callback = GradGuardCallback(copy.deepcopy(clipper))
    whole = trainer(tmp_path, [callback], model=Model(), **options)
    whole.train()
    other = GradGuardCallback(copy.deepcopy(clipper))
    again = trainer(tmp_path / "again", [other], model=Model(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    torch.testing.assert_close(weights(again.model), weights(whole.model), rtol=0, atol=0)
    assert repr(other.guard.state_dict()) == repr(callback.guard.state_dict())
    assert other.guard.steps == STEPS
    for name in ("grad_norm", "clip_coefficient", "clip_binding_share"):
        assert logged(again, name) == logged(whole, name)


@pytest.mark.parametrize("clipper", CLIPPERS[:2], ids=lambda clipper: type(clipper).__name__)
def test_a_checkpoint_without_a_state_is_told_where_there_should_be_one(clipper, tmp_path, recwarn):
    trainer(tmp_path, save_strategy="steps", save_steps=5).train()
    callback = GradGuardCallback(copy.deepcopy(clipper))
    again = trainer(tmp_path / "again", [callback])
    checkpoint = str(tmp_path / "checkpoint-5")
    if isinstance(clipper, gg.ClipByMedian):
        with pytest.warns(UserWarning, match=r"checkpoint-5 has no gradguard.pt.*ClipByMedian starts fresh"):
            again.train(resume_from_checkpoint=checkpoint)
    else:
        again.train(resume_from_checkpoint=checkpoint)
    assert callback.guard.steps == STEPS - 5


def test_the_state_of_another_clipper_is_refused(tmp_path):
    callback = GradGuardCallback(gg.ClipByMedian(k=0.0, window=4, warmup=2))
    trainer(tmp_path, [callback], save_strategy="steps", save_steps=5).train()
    again = trainer(tmp_path / "again", [GradGuardCallback(gg.AutoClip(50))])
    with pytest.raises(InvalidValueError, match="the state is not of this AutoClip"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_training_again_goes_on_with_the_same_model_and_anew_with_another(tmp_path):
    callback = GradGuardCallback(gg.ClipByMedian(k=0.0, window=4, warmup=2))
    first = trainer(tmp_path, [callback])
    first.train()
    fresh = repr(callback.guard.state_dict())
    first.train()
    assert callback.guard.steps == 2 * STEPS
    trainer(tmp_path, [callback]).train()
    assert callback.guard.steps == STEPS
    assert repr(callback.guard.state_dict()) == fresh


def test_after_training_and_after_an_interruption_the_optimizer_is_free(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and callback.guard.steps == 2:
                raise KeyboardInterrupt("by hand")

    callback = GradGuardCallback(gg.ClipByGlobalNorm(10.0))
    one = trainer(tmp_path, [callback, Stops()])
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        one.train()
    gg.Guard(callback.guard.optimizer, gg.ClipByGlobalNorm(1.0)).detach()
    one.train()
    assert callback.guard.steps == 2 + STEPS
    gg.Guard(callback.guard.optimizer, gg.ClipByGlobalNorm(1.0)).detach()


def test_a_state_that_was_loaded_for_a_training_that_never_began_is_forgotten(tmp_path):
    class FailsOnce(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if state.global_step:
                raise RuntimeError("not now")

    trainer(tmp_path, [GradGuardCallback(gg.ClipByMedian())], save_strategy="steps", save_steps=5).train()
    callback = GradGuardCallback(gg.ClipByMedian())
    one = trainer(tmp_path, [FailsOnce(), callback])
    with pytest.raises(RuntimeError, match="not now"):
        one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    one.train()
    assert callback.guard.steps == STEPS


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_begins_anew_with_its_own_training(duplicate, tmp_path):
    callback = GradGuardCallback(gg.ClipByMedian(k=0.0, window=4, warmup=2))
    trainer(tmp_path, [callback]).train()
    twin = duplicate(callback)
    assert twin.guard is None
    trainer(tmp_path, [twin]).train()
    assert twin.guard.steps == callback.guard.steps == STEPS
    assert repr(twin.guard.state_dict()) == repr(callback.guard.state_dict())


def test_a_callback_that_is_added_while_training_clips_from_there(tmp_path):
    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                one.add_callback(callback)

    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.01))
    one = trainer(tmp_path, [Adds()], max_steps=5, max_grad_norm=0)
    one.train()
    assert callback.guard.steps == 2
    assert callback.guard.last.clipped
    assert all(norm > 0.01 for norm in logged(one, "grad_norm"))
    assert logged(one, "clip_binding_share") == [1.0, 1.0]
    gg.Guard(callback.guard.optimizer, gg.ClipByGlobalNorm(1.0)).detach()  # it has let go


@pytest.mark.parametrize("way", ["remove_callback", "pop_callback"])
@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end"])
def test_removed_while_training_is_an_error_and_changes_nothing(event, way, tmp_path):
    class Removes(TrainerCallback):
        pass

    def remove(self, args, state, control, **kwargs):
        with pytest.raises(InvalidValueError, match=r"removed while training.*Remove it when train\(\) has returned"):
            getattr(one, way)(GradGuardCallback)

    setattr(Removes, event, remove)
    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.01))
    one = trainer(tmp_path, [Removes(), callback], max_steps=3)
    one.train()
    assert callback.guard.steps == 3
    assert callback in one.callback_handler.callbacks
    assert logged(one, "clip_binding_share") == [1.0] * 3


def test_removed_after_training_the_trainer_clips_itself_in_the_next(tmp_path):
    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.01))
    one = trainer(tmp_path, [callback], max_steps=3, max_grad_norm=1.0)
    one.train()
    one.remove_callback(callback)
    plain = trainer(tmp_path, max_steps=2, max_grad_norm=1.0)
    plain.model.load_state_dict(one.model.state_dict())
    one.args.max_steps = 2
    one.train()
    plain.train()
    assert callback.guard.steps == 3
    torch.testing.assert_close(weights(one.model), weights(plain.model), rtol=0, atol=0)


def test_the_example_runs_offline(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(Path(__file__).parents[2] / "examples/transformers_guard.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "40 steps, 0 of them skipped"
    assert out.count("'clip_binding_share'") == 4

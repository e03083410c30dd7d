"""What `GradGuardCallback` logs, keeps in a checkpoint, and refuses."""

import copy
import importlib
import pickle
import runpy
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy  # noqa: E402
from test_lightning import CLIPPERS, STEPS, Automatic, Manual, Records, by_hand, fit, norm_of, pytestmark, same, weights  # noqa: E402

from gradguard.integrations.lightning import GradGuardCallback  # noqa: E402

__all__ = ["pytestmark"]  # the same warnings are ignored

EXAMPLE = Path(__file__).parents[2] / "examples/lightning_guard.py"


def plain(state):
    """As text, in which every float64 is exact and NaN equals NaN."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return repr(state.tolist() if isinstance(state, torch.Tensor) else state)


def test_a_step_is_logged_as_clipped_where_its_finite_gradients_were():
    module, records = Automatic(), Records()
    fit(module, GradGuardCallback(gg.ClipByGlobalNorm(5.0)), bad=[2], callbacks=[records])
    bound = [norm > 5.0 for norm in module.seen]  # NaN > 5 is not
    assert 0 < sum(bound) < STEPS - 1
    assert [row["gradients/clipped"] for row in records.rows] == bound


@pytest.mark.parametrize(("log", "keys"), [(None, 0), ("clip", 3)])
def test_the_names_of_what_is_logged_can_be_chosen(log, keys):
    trainer = fit(Automatic(), GradGuardCallback(gg.ClipByGlobalNorm(0.5), log=log))
    assert len([key for key in trainer.callback_metrics if key.startswith(f"{log}/")]) == keys
    assert not [key for key in trainer.callback_metrics if key.startswith("gradients")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clipper", ["norm", "median", "AdaGC", "groups"])
def test_a_resumed_run_goes_on_bit_by_bit(clipper, tmp_path):
    whole, its = Automatic("AdamW, fused"), GradGuardCallback(CLIPPERS[clipper]())
    fit(whole, its, max_epochs=3, bad=[4])
    half = fit(Automatic("AdamW, fused"), GradGuardCallback(CLIPPERS[clipper]()), max_epochs=2, bad=[4])
    half.save_checkpoint(tmp_path / "half.ckpt")  # after the end of fit
    again, callback = Automatic("AdamW, fused"), GradGuardCallback(CLIPPERS[clipper]())
    fit(again, callback, max_epochs=3, bad=[4], ckpt_path=tmp_path / "half.ckpt")
    same(weights(again.net), weights(whole.net))
    assert plain(callback.state_dict()) == plain(its.state_dict())
    assert (callback.guards[0].steps, callback.guards[0].skipped_steps) == (3 * STEPS, 3)


def test_the_state_matters():
    """Without it, the resumed run is another one: the test above can fail."""
    whole, half, again = (Automatic() for _ in range(3))
    fit(whole, GradGuardCallback(CLIPPERS["median"]()), max_epochs=2)
    fit(half, GradGuardCallback(CLIPPERS["median"]()))
    again.load_state_dict(half.state_dict())
    fit(again, GradGuardCallback(CLIPPERS["median"]()))
    assert any(not torch.equal(a, b) for a, b in zip(weights(again.net), weights(whole.net), strict=True))


def test_a_checkpoint_in_the_middle_holds_only_plain_values(tmp_path):
    callback = GradGuardCallback(CLIPPERS["median"]())
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(Automatic(), callback, callbacks=[saves], enable_checkpointing=True)
    found = sorted(tmp_path.glob("*.ckpt"))
    assert len(found) == 2
    steps = [torch.load(f, weights_only=True)["callbacks"]["GradGuardCallback"]["guards"][0]["steps"] for f in found]
    assert sorted(steps) == [5, 10]


def test_a_second_fit_goes_on_with_the_same_history():
    module, callback = Automatic(), GradGuardCallback(CLIPPERS["median"]())
    fit(module, callback)
    fit(module, callback)
    assert callback.guards[0].steps == 2 * STEPS


def test_optimizers_replaced_while_training_are_guarded():
    class Replaces(Automatic):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 5:
                self.trainer.strategy.setup_optimizers(self.trainer)

    module, callback = Replaces(), GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    fit(module, callback)
    assert callback.guards[0].optimizer is module.trainer.optimizers[0]
    assert callback.guards[0].steps >= STEPS - 1  # the module's hook comes after the callback's


@pytest.mark.parametrize(("version", "is_too"), [("2.5.6", "old"), ("2.7.0", "new")])
def test_another_version_of_lightning_fails_at_import(monkeypatch, version, is_too):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.delitem(sys.modules, "gradguard.integrations.lightning")
    with pytest.raises(
        ImportError, match=rf"lightning {version} is too {is_too} .* from 2\.6 up to, but without, 2\.7"
    ):
        importlib.import_module("gradguard.integrations.lightning")


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_set_gradient_clip_val_is_refused():
    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    with pytest.raises(InvalidValueError, match=r"gradient_clip_val=2\.0.* clips too.*Remove gradient_clip_val"):
        fit(Automatic(), callback, gradient_clip_val=2.0)
    assert callback.guards == {}  # before anything was made


@pytest.mark.parametrize(("algorithm", "rule"), [("norm", "ClipByGlobalNorm"), ("value", "ClipByValue")])
def test_the_clip_of_lightning_is_named_as_a_rule(algorithm, rule):
    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    with pytest.raises(InvalidValueError, match=rf"GradGuardCallback\(gg\.{rule}\(2\.0\)\) as the only clip"):
        fit(Automatic(), callback, gradient_clip_val=2.0, gradient_clip_algorithm=algorithm)


def test_a_gradient_clip_val_of_zero_is_lightnings_word_for_none():
    module = Automatic()
    fit(module, GradGuardCallback(gg.ClipByGlobalNorm(0.5)), gradient_clip_val=0)
    same(weights(module.net), by_hand(gg.ClipByGlobalNorm(0.5))[0])


def test_a_gradient_clip_val_that_is_set_later_is_refused():
    class Sets(Automatic):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.gradient_clip_val = 1.0 if batch_idx == 3 else None

    with pytest.raises(InvalidValueError, match="gradient_clip_val=1"):
        fit(Sets(), GradGuardCallback(gg.ClipByGlobalNorm(0.5)))


def test_one_history_for_two_optimizers_is_refused():
    with pytest.raises(InvalidValueError, match=r"1 clippers.* 2 optimizers.*would mix their histories"):
        fit(Manual(), GradGuardCallback(gg.ClipByMedian()))
    clipper = gg.ClipByMedian()
    with pytest.raises(InvalidValueError, match="belongs to the Guard of another optimizer"):
        fit(Manual(), GradGuardCallback([clipper, clipper]))


@pytest.mark.parametrize("given", [[gg.ClipByGlobalNorm(1.0)], [gg.ClipByGlobalNorm(1.0), None, None]])
def test_a_wrong_number_of_clippers_is_refused(given):
    with pytest.raises(
        InvalidValueError,
        match=rf"there are {len(given)} clippers, and .* returned 2 optimizers: expected a list with",
    ):
        fit(Manual(), GradGuardCallback(given))


@pytest.mark.parametrize("given", [1.0, "norm", None, [], [1.0], {0: gg.ClipByGlobalNorm(1.0)}, gg.ClipByMedian])
def test_what_is_no_clipper_is_refused(given):
    with pytest.raises(InvalidTypeError, match="expected a clipper, such as"):
        GradGuardCallback(given)


@pytest.mark.parametrize("given", [gg.FlatNormClipper(1.0), [gg.FlatNormClipper(1.0)]])
def test_a_rule_for_samples_is_sent_to_the_callback_that_takes_it(given):
    with pytest.raises(InvalidTypeError, match="FlatNormClipper, a rule for each sample's gradient, which PerSampleC"):
        GradGuardCallback(given)


def test_a_module_without_optimizers_is_refused():
    class Hides(Manual):
        def configure_optimizers(self):
            return None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`")
        with pytest.raises(InvalidValueError, match="no parameter of Hides is in an optimizer"):
            fit(Hides(), GradGuardCallback(gg.ClipByGlobalNorm(1.0)))


def test_deepspeed_is_refused():
    class Engine(SingleDeviceStrategy):
        """What the real one cannot be here, where its package is not installed."""

    Engine.__name__ = DeepSpeedStrategy.__name__
    with pytest.raises(UnsupportedGradientError, match=r"the engine owns the gradients.*gradient_clipping"):
        fit(Automatic(), GradGuardCallback(gg.ClipByGlobalNorm(1.0)), strategy=Engine())


def test_a_state_of_other_optimizers_is_refused():
    one, two = GradGuardCallback(gg.ClipByMedian()), GradGuardCallback([gg.ClipByMedian(), gg.ClipByMedian()])
    fit(Automatic(), one)
    fit(Manual(), two)
    one.load_state_dict(two.state_dict())
    with pytest.raises(InvalidValueError, match=r"on the optimizers \[0, 1\].* this run on \[0\]"):
        fit(Automatic(), one)


def test_the_example_prints_what_it_should(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "1 of 100 steps skipped" in out
    assert "'gradients/clipped': " in out


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_begins_anew_with_its_own_training(duplicate):
    module, callback = Automatic(), GradGuardCallback(gg.ClipByMedian(k=0.0, warmup=2))
    fit(module, callback)
    state = plain(callback.state_dict())
    twin = duplicate(callback)
    assert not twin.guards
    fit(Automatic(), twin)
    assert plain(twin.state_dict()) == plain(callback.state_dict()) == state


def test_a_fit_of_another_module_begins_anew():
    callback = GradGuardCallback(gg.ClipByMedian(k=0.0, warmup=2))
    fit(Automatic(), callback)
    state = plain(callback.state_dict())
    fit(Automatic(), callback)
    assert plain(callback.state_dict()) == state


class ClipsByHand(Manual):
    """Two optimizers, of which one is clipped in the old way."""

    def __init__(self, position):
        super().__init__()
        self.position = position

    def training_step(self, batch):
        x, y = batch
        for position, (net, optimizer) in enumerate(zip((self.one, self.two), self.optimizers(), strict=True)):
            optimizer.zero_grad()
            self.manual_backward((net(x) - y).square().sum())
            if position == self.position:
                self.clip_gradients(optimizer, 0.001, "norm")
                self.norms[position].append(norm_of(net))
            optimizer.step()


def test_a_clip_by_hand_in_the_module_is_refused_where_there_is_a_guard():
    callback = GradGuardCallback([gg.ClipByGlobalNorm(1.0), None])
    with pytest.raises(
        InvalidValueError, match=r"self\.clip_gradients was called with .* that a Guard clips.*Remove the call"
    ):
        fit(ClipsByHand(0), callback)
    left_alone = ClipsByHand(1)
    trainer = fit(left_alone, callback)
    assert left_alone.norms[1] == pytest.approx([0.001] * STEPS, rel=1e-2)
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def test_a_guard_by_hand_on_lightnings_optimizer_names_the_callback():
    class ByHand(Automatic):
        def on_train_start(self):
            gg.Guard(self.optimizers(), gg.ClipByGlobalNorm(1.0))

    with pytest.raises(InvalidTypeError, match=r"pass wrapper\.optimizer.*GradGuardCallback\(clipper\)"):
        fit(ByHand(), pl.Callback())

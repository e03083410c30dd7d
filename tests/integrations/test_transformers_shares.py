"""The callback that measures samples' shares, against each sample alone, and the Trainer's step without it."""

import copy

import pytest
import torch
from tests.integrations import tiny_trainer
from tests.integrations.tiny_trainer import logged, trainer, weights
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.integrations.transformers import GradGuardCallback, SampleNormsCallback
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.record.file import read_record

VOCABULARY, LENGTH = 12, 6

LOSSES = {
    "grpo": lambda each, mask: ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
    "bnpo": lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=1.0),
    "dr_grpo": lambda each, mask: (each * mask).sum() / (each.size(0) * 9),
    "ppo": lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=1.0),
    "rloo": lambda each, mask: each.mean(),
    "coupled": lambda each, mask: torch.logsumexp((each * mask).sum(-1), 0),
}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.norm(self.embed(x)))))


def policy_trainer(loss, penalty=0.0):
    class OwnLoss(tiny_trainer.InOrder):
        seen = None

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(inputs["x"])
            self.seen.append([copy.deepcopy(model.state_dict()), inputs["x"], None])
            logits.register_hook(lambda grad, seen=self.seen[-1]: seen.__setitem__(2, grad))
            chosen = logits.log_softmax(-1).gather(-1, inputs["action"][..., None])[..., 0]
            advantage = inputs.pop("advantage")
            of_old = 0.3 * (inputs["action"] % 3 - 1) if loss in ("ppo", "rloo") else 0.0  # another policy drew these
            logs = chosen - chosen.detach() + of_old
            ratio = ((logs * inputs["mask"]).sum(-1, keepdim=True) if loss == "rloo" else logs).exp()
            each = torch.max(-ratio * advantage[:, None], -ratio.clamp(0.8, 1.2) * advantage[:, None])
            found = LOSSES[loss](each, inputs["mask"])
            return found + penalty * model.head.weight.square().sum() if penalty else found

    return OwnLoss


def data(loud=None):
    drawn = torch.Generator().manual_seed(3)
    rows = []
    for i in range(24):
        x, action = torch.randint(VOCABULARY, (2, LENGTH), generator=drawn)
        mask = (torch.arange(LENGTH) <= i % LENGTH).float()
        advantage = torch.randn((), generator=drawn)
        advantage = torch.full_like(advantage, 40.0) if i == loud else advantage
        rows.append({"x": x, "action": action, "mask": mask, "advantage": advantage})
    return rows


def trained(folder, callbacks, loss="bnpo", rows=None, **options):
    penalty = options.pop("penalty", 0.0)
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "remove_unused_columns": False}
    done = trainer(folder, callbacks, kind=policy_trainer(loss, penalty), model=Policy(), **(defaults | options))
    done.train_dataset, done.seen = rows or data(), []
    done.train()
    return done


def norms_alone(seen):
    """Each sample's share by itself: plain autograd in float64, from the derivatives of the loss by the outputs."""
    state, x, grad = seen
    model = Policy().double()
    model.load_state_dict(state)
    found = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(model(x[i : i + 1]), list(model.parameters()), grad[i : i + 1].double())
        found.append(torch.sqrt(sum(g.square().sum() for g in gradients)))
    return torch.stack(found)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("accumulation", "max_grad_norm"), [(1, 0.3), (2, 0.0)])
@pytest.mark.parametrize("loss", LOSSES)
def test_norms_are_those_of_each_sample_alone_and_the_step_is_the_trainers(tmp_path, loss, accumulation, max_grad_norm):
    callback = SampleNormsCallback(keep=3)
    options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm}
    done = trained(tmp_path, [callback], loss, **options)
    plain = trained(tmp_path, [], loss, **options)
    measured = [norms for step in callback.steps for norms in step.norms]
    assert [len(step.norms) for step in callback.steps] == [accumulation] * 3
    for norms, seen in zip(measured, done.seen, strict=True):
        torch.testing.assert_close(norms.double(), norms_alone(seen), rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(weights(done.model), weights(plain.model), rtol=1e-5, atol=1e-7)
    assert logged(done, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert logged(done, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)


def test_the_loudest_sample_is_named_with_what_it_was_given(tmp_path):
    callback, rows = SampleNormsCallback(keep=3), data(loud=13)
    done = trained(tmp_path, [callback], rows=rows, gradient_accumulation_steps=2)
    loudest = callback.steps[1].loudest()  # a step takes two batches of four
    assert (loudest.step, loudest.micro_batch, loudest.row) == (2, 1, 1)
    assert torch.equal(loudest.inputs["advantage"], rows[13]["advantage"])
    assert torch.equal(loudest.inputs["x"], rows[13]["x"])
    assert logged(done, "sample_norm_max") == [step.loudest().norm for step in callback.steps]
    assert logged(done, "sample_norm_max_row")[1] == 1
    assert logged(done, "sample_norm_max_micro_batch")[1] == 1
    assert logged(done, "sample_norm_median")[1] < logged(done, "sample_norm_max")[1] / 10


def test_bfloat16_is_measured_as_it_trains(tmp_path):
    callback = SampleNormsCallback()
    done, plain = trained(tmp_path, [callback], bf16=True, max_steps=2), trained(tmp_path, [], bf16=True, max_steps=2)
    torch.testing.assert_close(callback.steps[-1].norms[0].double(), norms_alone(done.seen[-1]), rtol=0.05, atol=1e-3)
    torch.testing.assert_close(weights(done.model), weights(plain.model), rtol=0.02, atol=1e-4)


def test_a_batch_in_which_nothing_counts_has_its_place(tmp_path):
    rows = data()
    for row in rows[4:8]:
        row["mask"] = torch.zeros(LENGTH)
    callback = SampleNormsCallback(keep=3)
    trained(tmp_path, [callback], rows=rows, gradient_accumulation_steps=2)
    assert [step.without_a_share for step in callback.steps] == [[1], [], []]


def test_a_sample_that_is_not_finite_is_the_loudest_and_spoils_the_step_as_without_the_callback(tmp_path):
    rows = data()
    rows[2]["advantage"] = torch.tensor(torch.nan)
    callback = SampleNormsCallback()
    done = trained(tmp_path, [callback], "grpo", rows, max_steps=1, logging_nan_inf_filter=False)
    plain = trained(tmp_path, [], "grpo", rows, max_steps=1, logging_nan_inf_filter=False)
    assert callback.steps[-1].loudest().row == 2
    assert [bool(w.isnan().all()) for w in weights(done.model)] == [bool(w.isnan().all()) for w in weights(plain.model)]
    assert all(w.isnan().any() for w in weights(done.model))


def test_a_model_that_returns_its_loss_is_refused(tmp_path):
    with pytest.raises(
        UnsupportedGradientError, match=r"Model returns a number that the loss uses.*compute it outside"
    ):
        trainer(tmp_path, [SampleNormsCallback()]).train()


def test_a_weight_in_the_loss_is_refused(tmp_path):
    with pytest.raises(UnsupportedGradientError, match=r"head\.weight was used outside of the module's forward"):
        trained(tmp_path, [SampleNormsCallback()], penalty=0.1)


def test_another_clip_beside_it_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="there is a GradGuardCallback beside the SampleNormsCallback"):
        trained(tmp_path, [SampleNormsCallback(), GradGuardCallback(gg.ClipByMedian())])


def test_the_model_is_given_back_and_trains_again(tmp_path):
    callback = SampleNormsCallback()
    done = trained(tmp_path, [callback], bf16=True)
    assert not done.model._forward_hooks
    assert not done.model._forward_pre_hooks
    assert not any(m._forward_hooks for m in done.model.modules())
    gg.PerSampleGradientClipper(done.model, gg.FlatNormClipper(1.0)).detach()  # nobody follows it any more
    done.train()
    assert callback.steps[-1].step == 3


def test_the_precision_is_the_trainers(tmp_path):
    """The derivatives of the loss by the first outputs are those without the callback, and not those in float32."""
    ours = trained(tmp_path, [SampleNormsCallback()], bf16=True).seen[0][2]
    own, exact = (trained(tmp_path, [], bf16=half).seen[0][2] for half in (True, False))
    torch.testing.assert_close(ours, own, rtol=0, atol=0)
    assert not torch.allclose(ours, exact, rtol=1e-4, atol=1e-6)


def test_a_copy_has_measured_nothing(tmp_path):
    callback = SampleNormsCallback()
    trained(tmp_path, [callback], max_steps=1)
    assert len(callback.steps) == 1
    assert len(copy.deepcopy(callback).steps) == 0


def test_keep_is_a_number_of_steps():
    with pytest.raises(InvalidValueError, match="keep=0: expected a whole number >= 1"):
        SampleNormsCallback(keep=0)


def test_a_batch_in_which_nothing_counts_is_a_finding_of_the_record(tmp_path):
    rows = data()
    for row in rows[8:16] + rows[20:24]:
        row["advantage"] = torch.zeros(())
    with gg.watch(tmp_path / "run.jsonl") as watch:
        trained(tmp_path, [SampleNormsCallback()], rows=rows, max_steps=2, gradient_accumulation_steps=3)
    record = read_record(watch.path)
    assert [step.get("empty_batches") for step in record.steps] == [1, 2]
    (found,) = [one for one in findings(record) if one.kind == "empty_micro_batch"]
    assert "up to 2 of the micro-batches of a step had no sample that counted, on 2 steps" in found.message

"""With PerSampleCallback the Trainer takes the steps of a loop over single samples, or says why it cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState
from tiny_trainer import InOrder, logged, trainer, weights
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from gradguard.integrations.sample_losses import sample_losses
from gradguard.integrations.transformers import GradGuardCallback, PerSampleCallback

pytestmark = pytest.mark.sampled(2)  # rows of each table

VOCABULARY, LENGTH, STEPS, BATCH = 17, 7, 3, 3
RATES = {"sgd": 0.5, "adamw_torch": 0.01}
EPSILON = 1e-3  # of AdamW: with less it makes whole steps of the rounding in GPT-2's key bias, whose gradient is zero


def seeded(kind, config):
    torch.manual_seed(0)
    return kind(config)


def gpt2(**options):
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, initializer_range=0.3, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    return seeded(GPT2LMHeadModel, config)


def llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(LlamaForCausalLM, config)


def bert(kind, **options):
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0, initializer_range=0.3,
        **options,
    )  # fmt: skip
    return seeded(kind, config)


def texts(count=20, lengths=(7, 2, 5, 1, 4, 6)):
    """Sequences of unequal lengths; one of them, of one token, has nothing to predict."""
    generator, made = torch.Generator().manual_seed(1), []
    for k in range(count):
        ids, here = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator), torch.arange(LENGTH)
        here = here < lengths[k % len(lengths)]
        made.append({"input_ids": ids * here, "attention_mask": here.long(), "labels": ids.masked_fill(~here, -100)})
    return made


def own_loss(model, sample, shifted=True):
    """A sample's own loss: the mean over its own tokens, in plain words."""
    logits = model(sample["input_ids"][None], attention_mask=sample["attention_mask"][None])["logits"][0].float()
    labels = sample["labels"]
    if shifted:
        logits, labels = logits[:-1], labels[1:]
    chosen = labels != -100
    return F.cross_entropy(logits[chosen], labels[chosen]) if chosen.any() else logits.sum() * 0


def by_samples(model, optimizer, steps, max_norm, loss=own_loss, precision=None):
    """One sample at a time, plain autograd: its own loss, clip, the average over all samples of the step."""
    norms, losses = [], []
    for step in steps:
        total = [torch.zeros_like(p) for p in model.parameters()]
        found = []
        for sample in step:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                value = loss(model, sample)
            gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            norms.append(float(norm))
            found.append(float(value.detach()))
            for t, g in zip(total, gradients, strict=True):
                t += g * min(1.0, max_norm / max(float(norm), 1e-30)) / len(step)
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t
        losses.append((sum(found) / len(found), float(torch.stack([t.norm() for t in total]).norm())))
        optimizer.step()
    return weights(model), norms, losses


def make_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATES[name])
    return torch.optim.AdamW(model.parameters(), lr=RATES[name], weight_decay=0.0, eps=EPSILON)


def run(folder, model, callback, data, accumulation=1, optim="sgd", steps=STEPS, **options):
    arguments = {
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATES[optim],
        "optim": optim,
        "max_steps": steps,
        "adam_epsilon": EPSILON,
    }
    arguments |= {"gradient_accumulation_steps": accumulation, "remove_unused_columns": False}
    done = trainer(folder, [callback], model=model, **(arguments | options))
    done.train_dataset = data
    done.train()
    return done


def grouped(data, accumulation, steps=STEPS):
    size = BATCH * accumulation
    return [data[k * size : (k + 1) * size] for k in range(steps)]


def distance(found, expected, start):
    """How far apart, in units of how far training went."""
    apart, moved = (
        sum(float((a - b).square().sum()) for a, b in zip(x, expected, strict=True)) for x in (found, start)
    )
    return (apart / moved) ** 0.5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_it_trains_as_a_loop_over_single_samples(build, optim, accumulation, tmp_path):
    model, data = build(), texts()
    other = copy.deepcopy(model).train()
    expected, norms, losses = by_samples(other, make_optimizer(optim, other), grouped(data, accumulation), 1.5)
    assert 0 < sum(n > 1.5 for n in norms) < len(norms)
    done = run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, accumulation, optim)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert logged(done, "loss") == pytest.approx([loss for loss, _ in losses], rel=1e-4)
    assert logged(done, "grad_norm") == pytest.approx([norm for _, norm in losses], rel=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_bf16_is_that_of_single_samples_within_its_rounding(build, accumulation, tmp_path):
    model, data = build(), texts()
    start, other = weights(model), copy.deepcopy(model).train()
    steps = grouped(data, accumulation)
    expected, _, _ = by_samples(other, make_optimizer("sgd", other), steps, 1.5, precision="bf16")
    plain = copy.deepcopy(model.train())
    exact, _, _ = by_samples(plain, make_optimizer("sgd", plain), steps, 1.5)
    run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, accumulation, bf16=True)
    assert distance(weights(model), expected, start) < 0.05
    assert distance(weights(model), exact, start) > 1e-5  # it was bf16


def test_the_last_smaller_batch_and_the_last_shorter_accumulation(tmp_path):
    model, data = gpt2(), texts(11)  # batches of 3, 3, 3 and 2; two for each step
    other = copy.deepcopy(model).train()
    steps = [data[:6], data[6:], data[:6], data[6:]]
    expected, _, _ = by_samples(other, make_optimizer("sgd", other), steps, 1.5)
    run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, 2, max_steps=-1, num_train_epochs=2)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_the_trainer_itself_does_not_clip(max_grad_norm, tmp_path):
    model, data = gpt2(), texts()
    other = copy.deepcopy(model).train()
    expected, _, losses = by_samples(other, make_optimizer("sgd", other), grouped(data, 1), 1e3)
    assert max(norm for _, norm in losses) > 1
    run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1e3)), data, max_grad_norm=max_grad_norm)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing(tmp_path):
    model, data = llama(), texts()
    other = copy.deepcopy(model).train()
    expected, _, _ = by_samples(other, make_optimizer("sgd", other), grouped(data, 2), 1.5)
    callback = PerSampleCallback(gg.FlatNormClipper(1.5))
    run(tmp_path, model, callback, data, 2, activation_checkpointing=True)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


HEADS = {
    "classes": (BertForSequenceClassification, {"num_labels": 3}, lambda k: torch.tensor(k % 3)),
    "several classes": (
        BertForSequenceClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        lambda k: torch.tensor([k % 2, 1, 0]).float(),
    ),
    "a number": (BertForSequenceClassification, {"num_labels": 1}, lambda k: torch.tensor(k / 3)),
    "several numbers": (
        BertForSequenceClassification,
        {"num_labels": 2, "problem_type": "regression"},
        lambda k: torch.tensor([k / 3, 1.0]),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, tmp_path):
    kind, options, label = HEADS[head]
    data = [{**sample, "labels": label(k)} for k, sample in enumerate(texts())]
    model = bert(kind, **options)
    other = copy.deepcopy(model).train()

    def loss(model, sample):  # with one sample the model's own loss is that sample's
        return model(**{name: value[None] for name, value in sample.items()})["loss"]

    expected, _, _ = by_samples(other, make_optimizer("sgd", other), grouped(data, 2), 1.0, loss)
    run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.0)), data, 2)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_labels_tokens_is_not_shifted(tmp_path):
    data, model = texts(), bert(BertForTokenClassification, num_labels=VOCABULARY)
    other = copy.deepcopy(model).train()

    def loss(model, sample):
        return own_loss(model, sample, shifted=False)

    expected, _, _ = by_samples(other, make_optimizer("sgd", other), grouped(data, 1), 1.0, loss)
    run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.0)), data)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


class Regression(nn.Module):
    """Returns a mean over the batch, as models do that were not written for this."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x, y=None):
        return {"predicted": self.layer(x)[:, 0]}


def points(count=20):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(2)) * 2
    return [{"x": one, "y": one.sum()} for one in x]


def squares(outputs, inputs):
    return (outputs["predicted"] - inputs["y"]).square()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_of_ones_own(accumulation, tmp_path):
    model = Regression()
    other = copy.deepcopy(model)

    def loss(model, sample):
        return (model(sample["x"][None])["predicted"] - sample["y"]).square().sum()

    steps = grouped(points(), accumulation)
    expected, norms, _ = by_samples(other, make_optimizer("sgd", other), steps, 3.0, loss)
    assert 0 < sum(n > 3 for n in norms) < len(norms)
    callback = PerSampleCallback(gg.FlatNormClipper(3.0), loss=squares)
    run(tmp_path, model, callback, points(), accumulation)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert callback.clipper.statistics.norms.tolist() == pytest.approx(norms[-BATCH:], rel=1e-4)


class Scales(Trainer):
    """As with ``fp16=True`` on a GPU; on the CPU Accelerate makes no GradScaler, so it gets one."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"


Scales._get_train_sampler = InOrder._get_train_sampler


def test_thresholds_and_logs_are_of_unscaled_gradients(tmp_path):
    model, data = llama(), texts()
    start, other = weights(model), copy.deepcopy(model).train()
    expected, _, losses = by_samples(other, make_optimizer("sgd", other), grouped(data, 2), 1.5)
    done = run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, 2, kind=Scales)
    assert 1e-6 < distance(weights(model), expected, start) < 0.02
    assert logged(done, "grad_norm") == pytest.approx([norm for _, norm in losses], rel=0.02)


def test_a_sample_that_is_not_finite_adds_zero(tmp_path):
    model, data = Regression(), points()
    data[1]["y"] = torch.tensor(torch.nan)
    callback = PerSampleCallback(gg.FlatNormClipper(3.0), loss=squares)
    run(tmp_path, model, callback, data, steps=1)
    assert callback.clipper.statistics.nonfinite == 1
    assert all(p.isfinite().all() for p in weights(model))


def test_resuming_is_bit_exact_with_a_threshold_that_learns(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole, rule = llama(), gg.QuantileNormClipper(1.0)
    once = PerSampleCallback(rule)
    run(tmp_path, whole, once, texts(), 1, "adamw_torch", **options)
    resumed, again = llama(), gg.QuantileNormClipper(1.0)
    callback = PerSampleCallback(again)
    arguments = {"per_device_train_batch_size": BATCH, "learning_rate": RATES["adamw_torch"], "optim": "adamw_torch"}
    second = trainer(tmp_path, [callback], model=resumed, **(arguments | options))
    second.train_dataset = texts()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert again.thresholds == rule.thresholds != [1.0]


def test_the_model_and_the_trainer_are_as_they_were_afterwards(tmp_path):
    model, data = gpt2(), texts()
    done = run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, 2, bf16=True)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))  # which refuses a second one
    clipper.detach()
    assert done.loss_is_scaled_for_ga is None
    done.callback_handler.callbacks = [c for c in done.callback_handler.callbacks if not hasattr(c, "norm_clipper")]
    before = weights(model)
    done.train()
    assert not all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_an_evaluation_keeps_the_trainers_own_loss(tmp_path):
    model, data = llama(), texts()
    done = run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.5)), data, steps=1)
    found = done.evaluate(texts(BATCH))["eval_loss"]
    batch = {name: torch.stack([sample[name] for sample in data[:BATCH]]) for name in data[0]}
    assert found == pytest.approx(float(model.eval()(**batch)["loss"].detach()), rel=1e-5)


class Removes(TrainerCallback):
    """Removes a callback at an event of the second step."""

    def __init__(self, event):
        self.trainer = None
        setattr(self, event, self.remove)

    def remove(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.remove_callback(PerSampleCallback)


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end"])
def test_removed_while_training_is_an_error(event, tmp_path):
    removes, options = Removes(event), {"max_steps": 2, "gradient_accumulation_steps": 2}
    done = trainer(tmp_path, [removes, PerSampleCallback(gg.FlatNormClipper(1.0))], model=gpt2(), **options)
    done.train_dataset, removes.trainer = texts(), done
    with pytest.raises(InvalidValueError, match=r"a PerSampleCallback was removed while training"):
        done.train()


# -- what is refused --------------------------------------------------------------------------------------------------


class OwnLoss(InOrder):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 2


class OwnStep(InOrder):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Penalized(GPT2LMHeadModel):
    """Adds something to its loss that logits and labels do not tell of."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return outputs


REFUSED = {
    "max_grad_norm": ({"max_grad_norm": 0.5}, InvalidValueError, "max_grad_norm=0.5.*Pass max_grad_norm=0"),
    "compute_loss": ({"kind": OwnLoss}, UnsupportedGradientError, "OwnLoss has its own compute_loss"),
    "training_step": ({"kind": OwnStep}, UnsupportedGradientError, "OwnStep has a training_step of its own"),
    "smoothing": ({"label_smoothing_factor": 0.1}, UnsupportedGradientError, "label_smoothing_factor is set"),
    "compiled": ({"torch_compile": True}, UnsupportedGradientError, "torch_compile is on"),
    "lomo": ({"optim": "lomo"}, UnsupportedGradientError, 'optim="lomo" steps inside backward'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_before_training(case, tmp_path):
    options, error, words = REFUSED[case]
    done = trainer(tmp_path, [PerSampleCallback(gg.FlatNormClipper(1.0))], model=gpt2(), **options)
    done.train_dataset = texts()
    with pytest.raises(error, match=words):
        done.train()


def test_a_loss_function_for_batches_is_refused(tmp_path):
    done = trainer(tmp_path, [PerSampleCallback(gg.FlatNormClipper(1.0))], model=gpt2())
    done.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs["logits"].sum()
    with pytest.raises(UnsupportedGradientError, match="compute_loss_func is set"):
        done.train()


@pytest.mark.parametrize("other", [GradGuardCallback(gg.ClipByMedian()), PerSampleCallback(gg.FlatNormClipper(2.0))])
def test_two_clips_are_refused(other, tmp_path):
    done = trainer(tmp_path, [PerSampleCallback(gg.FlatNormClipper(1.0)), other], model=gpt2())
    with pytest.raises(InvalidValueError, match=f"{type(other).__name__} beside the PerSampleCallback"):
        done.train()


def test_a_model_with_more_in_its_loss_is_refused(tmp_path):
    model = seeded(Penalized, gpt2().config)
    with pytest.raises(UnsupportedGradientError, match=r"Penalized has a loss of .*its loss is another one"):
        run(tmp_path, model, PerSampleCallback(gg.FlatNormClipper(1.0)), texts())


WRONG_LOSSES = {
    "mean": (lambda o, i: squares(o, i).mean(), InvalidTypeError, r"loss returned a tensor of shape \[\]"),
    "number": (lambda o, i: 1.0, InvalidTypeError, "loss returned float"),
    "too few": (lambda o, i: squares(o, i)[:2], InvalidValueError, r"2 losses for a batch with \[3\] rows"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_that_is_not_one_for_each_sample_is_refused(case, tmp_path):
    loss, error, words = WRONG_LOSSES[case]
    with pytest.raises(error, match=words):
        run(tmp_path, Regression(), PerSampleCallback(gg.FlatNormClipper(1.0), loss=loss), points())


def test_a_model_without_labels_or_logits_needs_a_loss(tmp_path):
    with pytest.raises(UnsupportedGradientError, match=r"the batch has \['x', 'y'\].*loss=function"):
        run(tmp_path, Regression(), PerSampleCallback(gg.FlatNormClipper(1.0)), points())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0,), "norm_clipper: expected a NormClipper"),
        ((gg.FlatNormClipper(1.0), "mean"), "loss: expected a function"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments, words):
    with pytest.raises(InvalidTypeError, match=words):
        PerSampleCallback(arguments[0], loss=arguments[1] if len(arguments) > 1 else None)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [((2, 3), torch.zeros(2, 3).long()), ((2, 5, 3), torch.zeros(2, 4).long()), ((2, 3), torch.zeros(2, 2))],
)
def test_logits_and_labels_that_do_not_fit_are_refused(logits, labels):
    with pytest.raises(UnsupportedGradientError, match="no rule computes samples' own losses from these"):
        sample_losses(torch.zeros(logits), labels)

"""With PerSampleCallback a Lightning Trainer takes the steps of a loop over single samples, or says why it cannot."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from gradguard.integrations.lightning import GradGuardCallback, PerSampleCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

VOCABULARY, LENGTH, BATCH, BOUND = 11, 6, 3, 1.0


@pytest.fixture(autouse=True)
def silence():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def own_losses(logits, labels):
    """Each sample's mean over its own tokens."""
    tokens = F.cross_entropy(logits.mT.float(), labels, ignore_index=-100, reduction="none")
    return tokens.sum(1) / (labels != -100).sum(1)


class Tagger(pl.LightningModule):
    """Labels tokens of texts of unequal length."""

    def __init__(self, optimizer="SGD", reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.optimizer, self.reduction = optimizer, reduction

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embedding(ids))))

    def training_step(self, batch):
        losses = own_losses(self(batch["ids"]), batch["labels"])
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def configure_optimizers(self):
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.5)
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def texts(count=18, lengths=(6, 2, 5, 1, 4)):
    generator, made = torch.Generator().manual_seed(1), []
    for k in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        made.append({"ids": ids, "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths[k % 5], -100)})
    return made


def by_samples(model, data, accumulation, steps=None, precision=None):
    """One sample at a time, plain autograd: its own loss, clip, the average over all samples of the step."""
    model, norms, size = copy.deepcopy(model), [], BATCH * accumulation
    optimizer, parameters = model.configure_optimizers(), list(model.parameters())
    for start in list(range(0, len(data), size))[:steps]:
        step, total = data[start : start + size], [torch.zeros_like(p) for p in parameters]
        for sample in step:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = own_losses(model(sample["ids"][None]), sample["labels"][None]).sum()
            gradients = torch.autograd.grad(loss, parameters)
            norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
            share = min(1.0, BOUND / norms[-1]) / (len(step) if model.reduction == "mean" else 1)
            for t, g in zip(total, gradients, strict=True):
                t += share * g
        for p, t in zip(parameters, total, strict=True):
            p.grad = t
        optimizer.step()
    return weights(model), norms


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def distance(found, expected, start):
    """How far apart, in units of how far training went."""
    apart, moved = (
        sum(float((a - b).square().sum()) for a, b in zip(x, expected, strict=True)) for x in (found, start)
    )
    return (apart / moved) ** 0.5


def make_trainer(callbacks, accumulation=1, **options):
    defaults = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(callbacks=callbacks, accumulate_grad_batches=accumulation, **(defaults | options))


def fit(model, callbacks, accumulation=1, data=None, **options):
    one = make_trainer(callbacks, accumulation, **options)
    one.fit(model, DataLoader(data or texts(), batch_size=BATCH))
    return one


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_trains_as_a_loop_over_single_samples(optimizer, accumulation, reduction):
    model = Tagger(optimizer, reduction)
    expected, norms = by_samples(model, texts(), accumulation)
    assert 0 < sum(norm > BOUND for norm in norms) < len(norms)
    callback = PerSampleCallback(gg.FlatNormClipper(BOUND), loss_reduction=reduction)
    fit(model, [callback], accumulation)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)
    assert callback.clipper.statistics.norms.tolist() == pytest.approx(norms[-BATCH:], rel=1e-4)


def test_the_last_smaller_batch_and_the_last_shorter_accumulation():
    model, data = Tagger(), texts(11)  # batches of 3, 3, 3 and 2, three for a step
    expected, _ = by_samples(model, data, 3)
    fit(model, [PerSampleCallback(gg.FlatNormClipper(BOUND))], 3, data)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bf16_is_that_of_single_samples_within_its_rounding(accumulation):
    model = Tagger()
    start = weights(model)
    expected, _ = by_samples(model, texts(), accumulation, precision="bf16-mixed")
    exact, _ = by_samples(model, texts(), accumulation)
    fit(model, [PerSampleCallback(gg.FlatNormClipper(BOUND))], accumulation, precision="bf16-mixed")
    assert distance(weights(model), expected, start) < 0.02
    assert distance(weights(model), exact, start) > 1e-5  # it was bf16


class Skips(Tagger):
    """Has no loss for some batches."""

    def training_step(self, batch):
        self.seen = getattr(self, "seen", 0) + 1
        return None if self.seen in (2, 3, 4) else super().training_step(batch)


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
def test_a_batch_without_a_loss_adds_nothing():
    model, data = Skips(), texts(12)
    expected, _ = by_samples(model, data[:3], 1)  # the second step has none at all
    fit(model, [PerSampleCallback(gg.FlatNormClipper(BOUND))], 2, data)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-5)


def test_a_threshold_that_learns_is_in_the_checkpoint(tmp_path):
    whole, first, second = (gg.QuantileNormClipper(1.0) for _ in range(3))
    model, data = Tagger("AdamW"), texts()
    once, again = (PerSampleCallback(rule) for rule in (whole, second))
    fit(model, [once], data=data, max_epochs=2)
    half = fit(Tagger("AdamW"), [PerSampleCallback(first)], data=data)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, later = Tagger("AdamW"), make_trainer([again], max_epochs=2)
    later.fit(resumed, DataLoader(data, batch_size=BATCH), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    torch.testing.assert_close(weights(resumed), weights(model), rtol=0, atol=0)
    assert second.thresholds == whole.thresholds != first.thresholds


class Fails(Tagger):
    def on_train_batch_end(self, *args):
        raise KeyError("here")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Tagger, Fails])
def test_the_module_is_given_back(kind):
    model = kind()
    try:
        fit(model, [PerSampleCallback(gg.FlatNormClipper(BOUND))], 2)
    except KeyError:
        assert kind is Fails
    model.training_step({name: torch.stack([t[name] for t in texts(3)]) for name in ("ids", "labels")}).backward()
    assert all(p.grad is not None for p in model.parameters())


class Manual(Tagger):
    automatic_optimization = False


class OwnClip(Tagger):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class Lbfgs(Tagger):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


REFUSED = {
    "gradient_clip_val": (
        Tagger,
        {"gradient_clip_val": 0.5},
        InvalidValueError,
        r"gradient_clip_val=0.5\) clips too",
    ),
    "own clip": (OwnClip, {}, InvalidValueError, "OwnClip has a configure_gradient_clipping of its own"),
    "by hand": (Manual, {}, UnsupportedGradientError, "Manual optimizes manually"),
    "LBFGS": (Lbfgs, {}, UnsupportedGradientError, "LBFGS evaluates the gradients several times"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_before_training(case):
    kind, options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        fit(kind(), [PerSampleCallback(gg.FlatNormClipper(BOUND))], **options)


def test_other_strategies_are_refused():
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    one = make_trainer([PerSampleCallback(gg.FlatNormClipper(BOUND))], strategy=strategy, devices=1)
    with pytest.raises(UnsupportedGradientError, match="under DDPStrategy, and not with ModelParallelStrategy"):
        one.callbacks[0].setup(one, Tagger(), "fit")


def test_a_threshold_of_one_process_is_refused_on_several():
    one = make_trainer([PerSampleCallback(gg.QuantileNormClipper(BOUND))], strategy="ddp", devices=2)
    with pytest.raises(UnsupportedGradientError, match="thresholds would differ between 2 processes"):
        one.callbacks[0].setup(one, Tagger(), "fit")


def test_a_loss_scale_is_refused():
    callback = PerSampleCallback(gg.FlatNormClipper(BOUND))
    one = make_trainer([callback])
    one.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UnsupportedGradientError, match=r'precision="16-mixed".*bf16-mixed'):
        callback.setup(one, Tagger(), "fit")


def test_a_compiled_module_is_refused():
    model = torch.compile(Tagger(), backend="eager")
    with pytest.raises(UnsupportedGradientError, match="Tagger is compiled"):
        fit(model, [PerSampleCallback(gg.FlatNormClipper(BOUND))])


def test_two_clips_are_refused():
    with pytest.raises(InvalidValueError, match="GradGuardCallback beside the PerSampleCallback"):
        fit(Tagger(), [PerSampleCallback(gg.FlatNormClipper(BOUND)), GradGuardCallback(gg.ClipByMedian())])


def test_a_batch_clipper_is_refused():
    with pytest.raises(InvalidTypeError, match="norm_clipper: expected a NormClipper"):
        PerSampleCallback(gg.ClipByGlobalNorm(1.0))

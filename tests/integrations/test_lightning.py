"""`GradGuardCallback` in the real Lightning Trainer: every step is that of a plain loop with a guard."""

import logging
import math

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, NonFiniteGradientError

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from gradguard.integrations.lightning import GradGuardCallback  # noqa: E402

pytestmark = [
    # Lightning's advice on loaders, loggers and hardware, and what it uses that PyTorch has deprecated.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

STEPS, SAMPLES = 12, 4

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
CLIPPERS = {
    "norm": lambda: gg.ClipByGlobalNorm(0.5),
    "value": lambda: gg.ClipByValue(0.1),
    "adaptive": lambda: gg.ClipAdaptive(0.05),
    "median": lambda: gg.ClipByMedian(k=0.0, warmup=2),
    "AdaGC": lambda: gg.AdaGC(warmup=2),
    "groups": lambda: gg.Groups({"first": gg.ClipByGlobalNorm(0.2)}, rest=gg.ZClip(warmup=2)),
}


@pytest.fixture(autouse=True)
def silence():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Automatic(pl.LightningModule):
    def __init__(self, optimizer="SGD"):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.optimizer = Net(), optimizer
        self.first, self.second = self.net.first, self.net.second  # names for the groups
        self.seen = []

    def training_step(self, batch):
        x, y = batch
        return (self.net(x) - y).square().sum()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(norm_of(self.net))

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.net.parameters())


def norm_of(module):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None))


def data(bad=()):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, SAMPLES, 3, generator=generator)
    y = torch.randn(STEPS, SAMPLES, 1, generator=generator) * (1 + 4 * (torch.arange(STEPS) % 3)).view(-1, 1, 1)
    for step in bad:
        x[step, 0, 0] = math.nan
    return x, y


def loader(bad=()):
    x, y = data(bad)
    return DataLoader(TensorDataset(x.flatten(0, 1), y.flatten(0, 1)), batch_size=SAMPLES)


def fit(module, callback, *, bad=(), ckpt_path=None, **arguments):
    arguments = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **arguments}
    callbacks = [callback, *arguments.pop("callbacks", [])]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, **arguments,
    )  # fmt: skip
    trainer.fit(module, loader(bad), ckpt_path=ckpt_path)
    return trainer


def by_hand(clipper, optimizer="SGD", bad=(), accumulate=1, nonfinite="skip"):
    """The same training as a plain loop with a guard: the weights, the guard, the norm before each clip."""
    module = Automatic()
    net, (x, y), norms = module.net, data(bad), []
    ours = OPTIMIZERS[optimizer](net.parameters())
    guard = gg.Guard(ours, clipper, model=module, nonfinite=nonfinite)

    def closure():
        ours.zero_grad()
        for micro in range(accumulate):
            i = (step + micro) % STEPS
            (((net(x[i]) - y[i]).square().sum()) / accumulate).backward()
        norms.append(norm_of(net))
        return torch.tensor(0.0)

    for step in range(0, STEPS, accumulate):
        if optimizer == "LBFGS":
            ours.step(lambda: (closure(), (net(x[step]) - y[step]).square().sum().detach())[1])  # noqa: B023
        else:
            closure()
            ours.step()
    return weights(net), guard, norms


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Records(pl.Callback):
    """What is logged after each batch; after the guard's own hook, for it stands behind it in the list."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("gradients")}
        self.rows.append(logged)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused"])
def test_each_step_is_that_of_a_plain_loop(clipper, optimizer):
    module, callback = Automatic(optimizer), GradGuardCallback(CLIPPERS[clipper]())
    fit(module, callback)
    expected, guard, norms = by_hand(CLIPPERS[clipper](), optimizer)
    same(weights(module.net), expected)
    assert callback.guards[0].steps == STEPS
    assert float(callback.guards[0].last.coefficient) == float(guard.last.coefficient)
    assert callback.guards[0].last.names == guard.last.names
    assert module.seen == norms  # Lightning's own hook sees them before the clip


@pytest.mark.parametrize("optimizer", ["AdamW", "LBFGS"])
def test_other_optimizers(optimizer):
    module, callback = Automatic(optimizer), GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    fit(module, callback)
    same(weights(module.net), by_hand(gg.ClipByGlobalNorm(0.5), optimizer)[0])


def test_the_norm_is_that_of_the_step_and_not_of_the_one_before():
    module, records = Automatic(), Records()
    fit(module, GradGuardCallback(gg.ClipByGlobalNorm(0.5)), callbacks=[records])
    assert [row["gradients/norm"] for row in records.rows] == pytest.approx(module.seen, rel=1e-6)
    coefficients = [min(1.0, 0.5 / norm) for norm in module.seen]
    assert [row["gradients/coefficient"] for row in records.rows] == pytest.approx(coefficients, rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_clips_once_for_each_real_step_and_logs_then(accumulate):
    class Counts(Automatic):
        def log(self, name, *args, **kwargs):
            self.logged = [*getattr(self, "logged", []), name]
            super().log(name, *args, **kwargs)

    module, callback, records = Counts(), GradGuardCallback(CLIPPERS["median"]()), Records()
    fit(module, callback, accumulate_grad_batches=accumulate, callbacks=[records])
    same(weights(module.net), by_hand(CLIPPERS["median"](), accumulate=accumulate)[0])
    assert callback.guards[0].steps == module.logged.count("gradients/norm") == STEPS // accumulate
    assert [bool(row) for row in records.rows] == [i + 1 >= accumulate for i in range(STEPS)]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW, fused"])
@pytest.mark.parametrize("first", [0, 5])
def test_skip_leaves_weights_and_optimizer_bit_identical(optimizer, first):
    class Remembers(Automatic):
        def __init__(self):
            super().__init__(optimizer)
            self.states = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            of = self.trainer.optimizers[0].state_dict()["state"]
            self.states.append((weights(self.net), {k: {n: v.clone() for n, v in s.items()} for k, s in of.items()}))

    module, callback, records = Remembers(), GradGuardCallback(gg.ClipByGlobalNorm(0.5)), Records()
    fit(module, callback, bad=[first], callbacks=[records])
    same(weights(module.net), by_hand(gg.ClipByGlobalNorm(0.5), optimizer, bad=[first])[0])
    assert (callback.guards[0].steps, callback.guards[0].skipped_steps) == (STEPS, 1)
    assert math.isnan(records.rows[first]["gradients/norm"])
    if first:
        same(module.states[first], module.states[first - 1])
    else:
        assert module.states[0][1] == {}
    assert all(p.isfinite().all() for p in module.parameters())


def test_raise_names_the_parameters_and_the_callback_lets_go():
    module, callback = Automatic(), GradGuardCallback(gg.ClipByGlobalNorm(0.5), nonfinite="raise")
    with pytest.raises(NonFiniteGradientError, match=r"first\.weight"):
        fit(module, callback, bad=[3])
    assert callback.guards[0].steps == 3
    gg.Guard(callback.guards[0].optimizer, gg.ClipByGlobalNorm(0.5))  # the optimizer is free


def test_too_many_skips_in_a_row_raise():
    callback = GradGuardCallback(gg.ClipByGlobalNorm(0.5), max_consecutive_skips=2)
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row were skipped"):
        fit(Automatic(), callback, bad=[1, 2, 3])


# -- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true", "16-true"])
def test_precisions_without_a_scaler(precision):
    module, callback = Automatic("AdamW, fused"), GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    fit(module, callback, precision=precision)
    guard = callback.guards[0]
    assert guard.steps == STEPS
    assert float(guard.last.norm) == pytest.approx(module.seen[-1], rel=1e-2 if "16" in precision else 1e-6)
    assert float(guard.last.coefficient) == pytest.approx(0.5 / float(guard.last.norm), rel=1e-2)


def scaled(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    # float32 under a scale that is a power of two: the weights must be those without any scaler
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
    return plugin


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW, fused"])
@pytest.mark.parametrize("scale", [1024.0, 65536.0])
def test_a_loss_scale_changes_nothing_also_where_the_optimizer_is_fused(optimizer, scale):
    module, callback, records = Automatic(optimizer), GradGuardCallback(gg.ClipByGlobalNorm(0.5)), Records()
    fit(module, callback, plugins=[scaled(scale)], callbacks=[records])
    expected, _, norms = by_hand(gg.ClipByGlobalNorm(0.5), optimizer)
    torch.testing.assert_close(weights(module.net), expected, rtol=1e-6, atol=1e-7)
    assert [row["gradients/norm"] for row in records.rows] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused"])
def test_an_overflow_is_skipped_and_counted(optimizer):
    module, callback, plugin = Automatic(optimizer), GradGuardCallback(gg.ClipByGlobalNorm(0.5)), scaled(1024.0)
    fit(module, callback, bad=[4], plugins=[plugin])
    assert (callback.guards[0].steps, callback.guards[0].skipped_steps) == (STEPS, 1)
    assert plugin.scaler.get_scale() == 512.0
    expected = by_hand(gg.ClipByGlobalNorm(0.5), optimizer, bad=[4])[0]
    torch.testing.assert_close(weights(module.net), expected, rtol=1e-6, atol=1e-7)


def test_16_mixed_as_the_trainer_makes_it():
    module, callback = Automatic("AdamW, fused"), GradGuardCallback(gg.ClipByGlobalNorm(0.5))
    fit(module, callback, plugins=[MixedPrecision("16-mixed", "cpu")])
    assert callback.guards[0].steps == STEPS
    assert float(callback.guards[0].last.norm) < 100  # not multiplied by the scale
    assert all(p.isfinite().all() for p in module.parameters())


# -- manual optimization, several optimizers --------------------------------------------------------------------------


class Manual(pl.LightningModule):
    """Two networks; the second optimizer steps twice in a batch, the second time behind Lightning's back."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.one, self.two = Net(), Net()
        self.norms = {0: [], 1: []}

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.one, self.two)]

    def training_step(self, batch):
        x, y = batch
        plain = self.optimizers(use_pl_optimizer=False)
        nets, optimizers = (self.one, self.two, self.two), (*self.optimizers(), plain[1])
        for position, net, optimizer in zip((0, 1, 1), nets, optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(x) - (1 + position) * y).square().sum())
            self.norms[position].append(norm_of(net))
            optimizer.step()


def manual_by_hand(clippers):
    module, (x, y) = Manual(), data()
    nets = (module.one, module.two)
    optimizers = module.configure_optimizers()
    guards = [gg.Guard(o, c, model=module) for o, c in zip(optimizers, clippers, strict=True) if c is not None]
    for step in range(STEPS):
        for position in (0, 1, 1):
            optimizers[position].zero_grad()
            (nets[position](x[step]) - (1 + position) * y[step]).square().sum().backward()
            optimizers[position].step()
    return weights(module), guards


@pytest.mark.parametrize(
    "each",
    [
        lambda: [gg.ClipByMedian(), gg.ClipByMedian()],
        lambda: [CLIPPERS["median"](), gg.ClipByValue(0.1)],
        lambda: [None, CLIPPERS["median"]()],
    ],
    ids=["alike", "a list", "one left alone"],
)
def test_several_optimizers_have_a_clipper_each(each):
    module, callback = Manual(), GradGuardCallback(each())
    fit(module, callback)
    expected, guards = manual_by_hand(each())
    same(weights(module), expected)
    assert [float(g.last.norm) for g in callback.guards.values()] == [float(g.last.norm) for g in guards]
    assert [g.steps for g in callback.guards.values()] == [g.steps for g in guards]
    assert callback.guards[1].steps == 2 * STEPS


def test_each_optimizer_is_logged_under_its_position():
    module, records = Manual(), Records()
    fit(module, GradGuardCallback([gg.ClipByGlobalNorm(1e9), gg.ClipByGlobalNorm(1e-9)]), callbacks=[records])
    assert sorted(records.rows[-1]) == [
        f"gradients/{i}/{key}" for i in (0, 1) for key in ("clipped", "coefficient", "norm")
    ]
    assert [row["gradients/0/norm"] for row in records.rows] == pytest.approx(module.norms[0], rel=1e-6)
    assert [row["gradients/1/norm"] for row in records.rows] == pytest.approx(module.norms[1][1::2], rel=1e-6)
    assert (records.rows[-1]["gradients/0/clipped"], records.rows[-1]["gradients/1/clipped"]) == (0, 1)


@pytest.mark.parametrize("option", [{"nonfinite": "bogus"}, {"max_consecutive_skips": -1}])
def test_what_no_guard_takes_is_refused_at_once(option):
    with pytest.raises(InvalidValueError, match=r"bogus.* is not a policy|=-1: expected a whole number"):
        GradGuardCallback(gg.ClipByMedian(), **option)

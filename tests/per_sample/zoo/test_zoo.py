"""Per-sample clipping on models that nobody here wrote: exact, or refused in words, as the table says."""

import pytest
import torch
from torch import nn

import gradguard as gg
from per_sample.zoo import trial as trials
from per_sample.zoo.case import MODES, B, ZooCase
from per_sample.zoo.expected import EXPECTED
from per_sample.zoo.plain import rows
from per_sample.zoo.table import CASES, MIXED, as_expected, expectation, share_of_exact
from per_sample.zoo.trial import trial

SAMPLE = {
    "bert": "train", "gpt2, labels": "eval", "llama": "bfloat16", "t5": "eval", "vit": "float32",
    "resnet": "eval", "mixtral": "eval", "mamba": "eval", "wav2vec2": "eval",
    "batch norm": "train", "packed sequences": "eval", "transformer": "train", "lstm": "train",
    "a weight as argument": "eval", "shared position bias": "eval", "low-rank updates": "train", "checkpoint": "train",
    "gumbel": "train", "noise in forward": "train", "routed mixture of experts": "eval",
    "a configuration that forbids changes": "eval", "an activation in place inside a batch norm": "eval",
    "an activation in place behind a layer inside a batch norm": "eval", "a result is left out": "eval",
    "the other result of other code is left out": "float32", "reentrant checkpoint of own code": "train",
    "forces of the input": "train", "energy, forces without a graph": "eval",
    "scores of all pairs": "eval", "scores of all pairs, not in the loss": "eval", "dropout of positions": "train",
    "functional_call with values of weights": "eval", "a configuration that changes": "eval",
    "capacity over the batch": "eval", "penalty beside the output: attribute": "eval", "compiled": "eval",
}  # fmt: skip
"""What `make test` runs; `make exhaustive` runs all."""

EVERY = [
    pytest.param(name, mode, id=f"{name} - {mode}", marks=[] if SAMPLE.get(name) == mode else [pytest.mark.exhaustive])
    for name, case in CASES.items()
    for mode in case.modes
]


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_zoo(name, mode):
    found, told = trial(CASES[name], mode), expectation(name, mode)
    assert as_expected(found.kind, found.words, told), (
        f"{name} in mode {mode} was {found.kind} ({found.words or f'error {found.error:.1e}'}), the table says "
        f"{told!r}. If this is better than the table: python tests/per_sample/zoo/summary.py "
        f"--mode {mode} --only '^{name}$' --write"
    )


@pytest.mark.parametrize("name", ["convolutions", "lstm", "transformer", "shared position bias", "tied head", "vit"])
def test_a_batch_of_one(name):
    case = CASES[name]
    model, inputs = trials.build(case, "eval"), trials.samples(trials.cast(case.inputs(), torch.float64), 0, 1)
    gradients = []
    for clip in (False, True):
        clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(torch.inf)) if clip else None
        sum(output.square().sum() for _, output in trials.outputs_of(case.call(model, inputs))).backward()
        if clipper:
            clipper.clip_and_accumulate()
            clipper.pre_step()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_the_tables_speak_of_each_other():
    assert {*EXPECTED} <= {*CASES}
    assert {*SAMPLE} <= {*CASES}
    assert all(mode in CASES[name].modes for name, modes in EXPECTED.items() for mode in modes)


@pytest.mark.parametrize("mode", MODES)
def test_of_models_whose_loss_is_a_mean_over_samples_95_percent_are_exact(mode):
    assert share_of_exact(mode) >= 0.95
    refused = [name for name in MIXED if any(words.startswith("refused") for words in EXPECTED[name].values())]
    assert refused == [*MIXED]


# The harness sees what it is there for


def perceptron() -> ZooCase:
    return ZooCase(lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2)), rows(3))


@pytest.mark.parametrize("mode", MODES)
def test_a_sound_clipper_is_exact(mode):
    found = trial(perceptron(), mode)
    assert (found.kind, found.oracle) == ("exact", "alone")


def test_dropout_is_the_same_in_the_batch_and_alone():
    batch = trials._Oracle(perceptron(), "train")
    alone = batch.gradients
    assert torch.allclose(batch._in_batch()["0.weight"], alone["0.weight"], rtol=1e-12)
    assert len(batch._recorded.draws) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["0.weight", "3.bias"])
def test_one_wrong_parameter_of_one_sample_is_seen(mode, which, monkeypatch):
    original = gg.PerSampleGradientClipper.per_sample_gradients

    def wrong(self):
        gradients = original(self)
        gradients[which][B - 1] *= 1.2 if mode == "bfloat16" else 1.001
        return gradients

    monkeypatch.setattr(gg.PerSampleGradientClipper, "per_sample_gradients", wrong)
    found = trial(perceptron(), mode)
    assert found.kind == "wrong"
    assert which in found.words


def test_a_wrong_sum_is_seen(monkeypatch):
    original = gg.PerSampleGradientClipper.pre_step

    def wrong(self):
        result = original(self)
        next(iter(self.trained.values())).grad *= 1.001
        return result

    monkeypatch.setattr(gg.PerSampleGradientClipper, "pre_step", wrong)
    found = trial(perceptron(), "eval")
    assert found.kind == "wrong"
    assert "mode='fast'" in found.words


@pytest.mark.parametrize(
    ("leave", "where"),
    [
        (lambda m: m[0].register_forward_hook(lambda *args: None), "0._forward_hooks"),
        (lambda m: m[0].requires_grad_(False), "0._parameters"),
        (lambda m: m[1].train(), "1.training"),
        (lambda m: setattr(m[2], "extra", 1), "2.extra"),
        (lambda m: m[3].bias.sum().backward(), "3._parameters"),
    ],
    ids=["a hook", "frozen", "train mode", "an attribute", "a gradient"],
)
def test_what_is_left_behind_is_seen(leave, where, monkeypatch):
    original = gg.PerSampleGradientClipper.detach

    def careless(self):
        original(self)
        leave(self.module)

    monkeypatch.setattr(gg.PerSampleGradientClipper, "detach", careless)
    found = trial(perceptron(), "eval")
    assert found.kind == "left behind"
    assert where in found.words


def test_other_random_numbers_are_seen(monkeypatch):
    original = gg.PerSampleGradientClipper.__init__

    def drawing(self, module, *args, **options):
        original(self, module, *args, **options)
        module.register_forward_pre_hook(lambda *args: torch.rand(1) and None)

    monkeypatch.setattr(gg.PerSampleGradientClipper, "__init__", drawing)
    assert trial(perceptron(), "train").kind == "wrong"

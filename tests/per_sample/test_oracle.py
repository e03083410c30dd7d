"""Every case of the table against microbatches of one in float64: exact, or refused."""

import pytest
import torch
from torch import nn

from gradguard import (
    AutoNormClipper,
    FlatNormClipper,
    PerLayerNormClipper,
    PerParameterNormClipper,
    PerSampleGradientClipper,
)
from gradguard.errors import GradguardError
from per_sample.call_models import OWNERSHIP
from per_sample.case import B, case, numbers
from per_sample.models import CASES, DETERMINISTIC, EVERY, MIXING, REFUSED, STOCHASTIC, build
from per_sample.steps import (
    TOLERANCES,
    clipped_step,
    error,
    filled,
    make,
    middle_norm,
    oracle,
    plain,
    reduce,
    total,
)
from reference import (
    clip_samples,
    clip_samples_automatically,
    clip_samples_per_layer,
    clip_samples_per_parameter,
    per_sample_gradients,
    sample_norms,
)

MODES = ["fast", "exact"]

# torch says so once, for float32
pytestmark = [
    pytest.mark.sampled(3),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_oracle_adds_up_to_the_plain_gradient(name):
    assert error({key: g.sum(0) for key, g in oracle(name).items()}, plain(build(name), "sum")) < 1e-13


def test_the_table_says_which_cases_are_random():
    assert [name for name in CASES if build(name).stochastic] == STOCHASTIC


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_clipped_average_and_sum(name, mode):
    gradients = oracle(name)
    max_norm = middle_norm(gradients)
    clipped = clip_samples(gradients, max_norm)
    for dtype, reduction in ((torch.float64, "mean"), (torch.float64, "sum"), (torch.float32, "mean")):
        found = exact_or_refused(name, lambda d=dtype, r=reduction: clipped_step(build(name, d), max_norm, r, mode))
        if found is not None:
            assert error(found, total(clipped, reduction)) < TOLERANCES[dtype], (dtype, reduction)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_an_infinite_threshold_gives_the_plain_gradient(name):
    found = exact_or_refused(name, lambda: clipped_step(build(name), torch.inf))
    if found is not None:
        assert error(found, plain(build(name), "mean")) < 1e-12


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_mini_batches_of_which_the_last_is_smaller(name):
    gradients = oracle(name)
    max_norm, size = middle_norm(gradients), build(name).batch_size
    parts = [(0, 5), (5, 6)] if size > 1 else [(0, 1), (0, 1)]
    expected = total(clip_samples(gradients, max_norm), "mean")
    found = exact_or_refused(name, lambda: clipped_step(build(name), max_norm, parts=parts))
    if found is not None:
        assert error(found, expected) < 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_per_sample_gradients_and_norms(name):
    made = build(name)

    def step() -> PerSampleGradientClipper:
        clipper = make(made, 1.0, mode="exact")
        reduce(made.losses(made.inputs), "mean").backward()
        before = {key: g.clone() for key, g in clipper.per_sample_gradients().items()}
        assert error(before, oracle(name)) < 1e-12
        return clipper

    clipper = exact_or_refused(name, step)
    if clipper is None:
        return
    clipper.clip_and_accumulate()
    assert error(clipper.per_sample_gradients(), oracle(name)) < 1e-12
    torch.testing.assert_close(clipper.statistics.norms, sample_norms(oracle(name).values()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STOCHASTIC)
def test_random_layers_keep_their_draws(name, mode):
    torch.manual_seed(1)
    expected = plain(build(name), "mean")
    torch.manual_seed(1)
    assert error(clipped_step(build(name), torch.inf, "mean", mode), expected) < 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, mode):
    made = build(name)
    with pytest.raises(GradguardError, match=made.refused):
        clipped_step(made, 1.0, "mean", mode)
    assert all(p.grad is None for p in made.model.parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_depend_on_each_other(name, mode):
    """No sum can show it, so it is refused by what the model does, or `verify` shows it."""
    made = build(name)
    try:
        clipper = make(made, 1.0, mode=mode)
        made.losses(made.inputs).mean().backward()
        found = clipper.verify(samples=4)
    except GradguardError as refusal:
        assert made.refused in str(refusal)  # noqa: PT017 - either outcome is right
    else:
        assert found > 1e-3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OWNERSHIP)
def test_samples_that_change_places_by_their_values(name, mode):
    """Whether they do depends on the batch, so a check of two samples may see nothing: many batches."""
    for seed in range(8):
        torch.manual_seed(seed)
        made = EVERY[name]()
        gradients = per_sample_gradients(made.model, lambda s, c=made: c.losses(s).sum(), made.samples())
        max_norm = middle_norm(gradients)
        found = exact_or_refused(name, lambda c=made, m=max_norm: clipped_step(c, m, "mean", mode))
        if found is not None:
            assert error(found, total(clip_samples(gradients, max_norm), "mean")) < 1e-12, seed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["linear 3-D", "lenet", "gpt-2", "vit", "only biases", "lstm", "samples second"])
def test_verify_agrees(name, mode):
    made = build(name)
    clipper = make(made, 1.0, mode=mode)
    made.losses(made.inputs).mean().backward()
    assert clipper.verify(samples=4) < 1e-12
    clipper.clip_and_accumulate()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["linear 3-D", "gpt-2", "a layer unused", "used twice", "encoder layer"])
def test_other_rules(name, mode):
    gradients = oracle(name)
    norms = [sample_norms([g]).median().item() for g in gradients.values()]
    layers = dict.fromkeys(name.rpartition(".")[0] for name in gradients)
    each = {layer: 0.05 * (k + 1) for k, layer in enumerate(layers)}
    expected = {
        "each parameter": (PerParameterNormClipper(norms), clip_samples_per_parameter(gradients, norms)),
        "one for all": (PerParameterNormClipper(0.1), clip_samples_per_parameter(gradients, [0.1] * len(norms))),
        "each layer": (PerLayerNormClipper(list(each.values())), clip_samples_per_layer(gradients, each)),
        "layers by name": (PerLayerNormClipper(each), clip_samples_per_layer(gradients, each)),
        "automatic": (AutoNormClipper(), clip_samples_automatically(gradients, 1.0)),
    }
    for key, (rule, clipped) in expected.items():
        made = build(name)
        clipper = PerSampleGradientClipper(made.model, rule, mode=mode)
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
        max_norm, batch_size = clipper.pre_step()
        assert error(filled(made.model), total(clipped, "mean")) < 1e-12, key
        assert batch_size == made.batch_size
        assert len(max_norm) == len(gradients)


def test_clipping_one_layer_changes_no_other():
    found = []
    for first in (1e-3, 1e3):
        made = build("linear 2-D")
        clipper = PerSampleGradientClipper(made.model, PerLayerNormClipper([first, 0.2]))
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found.append(filled(made.model))
    assert torch.equal(found[0]["2.weight"], found[1]["2.weight"])
    assert torch.equal(found[0]["2.bias"], found[1]["2.bias"])
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_never_changes_the_factor_of_another(mode):
    factors = []
    for change in (0.0, 5.0):
        made = build("encoder layer")
        made.inputs[0][2] += change
        clipper = PerSampleGradientClipper(made.model, FlatNormClipper(0.1), mode=mode)
        made.losses(made.inputs).mean().backward()
        clipper.clip_and_accumulate()
        factors.append(clipper.statistics.factors[0])
    same = torch.arange(B) != 2
    torch.testing.assert_close(factors[0][same], factors[1][same], rtol=1e-14, atol=0)
    assert factors[0][2] != factors[1][2]


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_need_gradients_get_them(mode):
    made = case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), numbers(B, 3))
    x = made.inputs[0].requires_grad_()
    made.losses((x,)).mean().backward()
    expected, x.grad = x.grad, None
    made.model.zero_grad()
    clipper = make(made, 0.1, mode=mode)
    made.losses((x,)).mean().backward()
    clipper.clip_and_accumulate()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0)


def exact_or_refused(name: str, run):
    """What ``run`` returns; None where the case may be refused, and is, with the right words."""
    words = build(name).either
    if not words:
        return run()
    try:
        return run()
    except GradguardError as refusal:
        assert words in str(refusal)  # noqa: PT017 - either outcome is right
        return None

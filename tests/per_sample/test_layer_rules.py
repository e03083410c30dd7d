"""Each layer's rule against a loop of single samples: options, dtypes, and every place where samples can lie."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contribution
from gradguard.per_sample.layers.call import BatchAxis, LayerCall
from gradguard.per_sample.layers.convolution import ConvolutionWeight, convolution
from gradguard.per_sample.layers.embedding import embedding, embedding_bag
from gradguard.per_sample.layers.linear import linear
from gradguard.per_sample.layers.normalization import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from per_sample.layer_calls import assert_matches, assert_rule_exact, layer_call, looped, randomised
from per_sample.layer_rule_cases import RULE_CASES, B, Rule, T, V

# PyTorch says so once, of the layer's own forward.
pytestmark = [
    pytest.mark.sampled(33),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def made(name: str, dtype: torch.dtype, size: int) -> tuple[Rule, LayerCall]:
    torch.manual_seed(0)
    rule, build, inputs = RULE_CASES[name]
    return rule, layer_call(randomised(build(), dtype), inputs(dtype, size))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", RULE_CASES)
def test_rule_equals_single_samples(name, dtype):
    assert_rule_exact(*made(name, dtype, B), TOLERANCE[dtype])


@pytest.mark.parametrize("name", RULE_CASES)
def test_rule_of_one_sample(name):
    assert_rule_exact(*made(name, torch.float64, 1), 1e-12)


@pytest.mark.parametrize("name", RULE_CASES)
def test_rule_of_an_empty_batch(name):
    rule, call = made(name, torch.float64, 1)
    call = dataclasses.replace(
        call,
        args=tuple(value[:0] if isinstance(value, Tensor) else value for value in call.args),
        grads=[call.grads[0][:0]],
        batch_size=0,
    )
    for wanted, contribution in rule(call).items():
        shape = call.module.get_parameter(wanted).shape
        assert contribution.rows(0, 0).shape == (0, *shape)
        assert contribution.squared_norms().shape == (0,)
        assert torch.equal(contribution.weighted_sum(torch.zeros(0)), torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("name", RULE_CASES)
@pytest.mark.parametrize("wanted", ["weight", "bias"])
def test_only_what_is_wanted(name, wanted):
    rule, call = made(name, torch.float64, B)
    truth = looped(call)
    call.wanted = frozenset({wanted} & set(truth))
    found = rule(call)
    assert set(found) == set(call.wanted)
    for key, contribution in found.items():
        assert_matches(contribution, truth[key], 1e-12)


@pytest.mark.parametrize("name", RULE_CASES)
def test_half_precision_is_computed_in_float32(name):
    rule, call = made(name, torch.bfloat16, B)

    def double(values):
        return values.double() if isinstance(values, Tensor) and values.is_floating_point() else values

    found = rule(call)
    call.module.double()
    exact = dataclasses.replace(
        call,
        args=tuple(double(value) for value in call.args),
        grads=[call.grads[0].double()],
    )
    for key, truth in looped(exact).items():
        assert_matches(found[key], truth.float(), 1e-5)


def pairs(call: LayerCall) -> dict[str, Contribution]:
    """The rule of convolutions, with norms from pairs of positions however many there are."""
    found = convolution(call)
    if isinstance(weight := found.get("weight"), ConvolutionWeight):
        weight.few_positions = True
    return found


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [name for name, (rule, *_) in RULE_CASES.items() if rule is convolution])
def test_norms_from_pairs_of_positions(name, dtype):
    rule, call = made(name, dtype, B)
    assert getattr(rule(call)["weight"], "few_positions", False) is (", few" in name)
    assert_rule_exact(pairs, call, TOLERANCE[dtype])


FRAMES = {
    "linear": (linear, lambda: nn.Linear(4, 3), (4,)),
    "Conv1d": (convolution, lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (4, 7)),
    "Conv2d, reflect": (convolution, lambda: nn.Conv2d(4, 6, 2, padding="same", padding_mode="reflect"), (4, 5, 4)),
    "Conv2d, pairs": (pairs, lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 3, 2)),
    "ConvTranspose2d": (convolution, lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 3, 2)),
    "ConvTranspose2d, pairs": (pairs, lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 3, 2)),
    "layer norm": (layer_norm, lambda: nn.LayerNorm(6), (6,)),
    "rms norm": (rms_norm, lambda: nn.RMSNorm(6), (2, 6)),
    "group norm": (group_norm, lambda: nn.GroupNorm(2, 4), (4, 3)),
    "group norm 2-D": (group_norm, lambda: nn.GroupNorm(2, 4), (4,)),
    "instance norm": (instance_norm, lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "batch norm": (batch_norm, lambda: nn.BatchNorm1d(3).eval(), (3, 5)),
    "embedding": (embedding, lambda: nn.Embedding(V, 3, padding_idx=1), None),
    "bag": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="mean", padding_idx=1), (T,)),
    "bag, max": (embedding_bag, lambda: nn.EmbeddingBag(V, 3, mode="max"), (T,)),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("last", [False, True], ids=["samples slow", "samples fast"])
@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("size", [1, B])
def test_several_maps_of_one_sample_add_up(name, size, last):
    torch.manual_seed(0)
    rule, build, shape = FRAMES[name]
    module = randomised(build(), torch.float64)
    first = (size * 3,)
    if rule in (embedding, embedding_bag):
        inputs = torch.randint(0, V, first if shape is None else first + shape)
    else:
        inputs = torch.randn(*first, *shape, dtype=torch.float64)
    call = layer_call(module, (inputs,), axis=BatchAxis(0, last), batch_size=size)
    assert_rule_exact(rule, call, 1e-12)


@pytest.mark.parametrize(
    ("rule", "module", "inputs"),
    [
        (linear, nn.Linear(6, 3), (T, B, 6)),
        (layer_norm, nn.LayerNorm(6), (T, B, 6)),
        (rms_norm, nn.RMSNorm(6), (2, B, T, 6)),
        (embedding, nn.Embedding(V, 3), None),
    ],
    ids=["linear", "layer norm", "rms norm", "embedding"],
)
def test_samples_in_the_second_dimension(rule, module, inputs):
    torch.manual_seed(0)
    values = torch.randint(0, V, (T, B)) if inputs is None else torch.randn(inputs, dtype=torch.float64)
    assert_rule_exact(rule, layer_call(module.double(), (values,), axis=BatchAxis(1)), 1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", [convolution, pairs])
@pytest.mark.parametrize("size", [(8, 8), (9, 8), (9, 9)])
def test_transposed_convolution_asked_for_a_size(size, rule):
    torch.manual_seed(0)
    module = randomised(nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1), torch.float64)
    inputs = torch.randn(B, 2, 4, 4, dtype=torch.float64)
    call = layer_call(module, (inputs,), {"output_size": size})
    assert call.grads[0].shape[2:] == size
    assert_rule_exact(rule, call, 1e-12)


def test_keyword_arguments():
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(V, 3, mode="sum").double()
    weights, words = torch.randn(B, T, dtype=torch.float64), torch.randint(0, V, (B, T))
    assert_rule_exact(embedding_bag, layer_call(bag, (), {"per_sample_weights": weights, "input": words}), 1e-12)
    images = torch.randn(B, 2, 5, 5, dtype=torch.float64)
    assert_rule_exact(convolution, layer_call(nn.Conv2d(2, 3, 3).double(), (), {"input": images}), 1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_formats(memory_format):
    torch.manual_seed(0)
    inputs = torch.randn(B, 4, 6, 5, dtype=torch.float64).to(memory_format=memory_format)
    for rule, module in ((convolution, nn.Conv2d(4, 6, 3, padding=1)), (group_norm, nn.GroupNorm(2, 4))):
        call = layer_call(randomised(module, torch.float64).to(memory_format=memory_format), (inputs,))
        call.grads[0] = call.grads[0].to(memory_format=memory_format)
        assert_rule_exact(rule, call, 1e-12)


def test_bag_that_holds_only_padding_gives_nothing():
    words = torch.tensor([[1, 1, 1], [0, 1, 2]])
    for mode in ("sum", "mean", "max"):
        call = layer_call(nn.EmbeddingBag(V, 3, mode=mode, padding_idx=1).double(), (words,))
        found = embedding_bag(call)["weight"]
        assert found.squared_norms()[0] == 0
        assert_matches(found, looped(call)["weight"], 1e-12)


def test_bag_gives_a_tie_to_its_first_entry():
    module = nn.EmbeddingBag(3, 2, mode="max").double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 3.0]]))
    call = layer_call(module, (torch.tensor([[1, 0, 2, 1], [0, 1, 2, 2], [2, 1, 0, 0]]),))
    assert_matches(embedding_bag(call)["weight"], looped(call)["weight"], 0.0)


def test_gradient_at_padding_counts_as_nothing_even_if_it_is_nan():
    call = layer_call(nn.Embedding(V, 3, padding_idx=1).double(), (torch.tensor([[1, 2], [3, 4]]),))
    call.grads[0][0, 0] = float("nan")
    assert embedding(call)["weight"].squared_norms().isfinite().all()


def test_rms_norm_without_eps_uses_that_of_the_computing_dtype():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        call = layer_call(nn.RMSNorm(6, dtype=dtype), (torch.randn(B, 6).mul(3e-4).to(dtype),))
        assert_matches(
            rms_norm(call)["weight"], looped(call)["weight"].float(), 1e-5 if dtype is torch.float32 else 2e-2
        )


def test_convolution_in_chunks():
    torch.manual_seed(0)
    call = layer_call(nn.Conv2d(4, 4, 3, padding=1), (torch.randn(B, 4, 8, 8),))
    weight = convolution(call)["weight"]
    squares = looped(call)["weight"].double().flatten(1).square().sum(1)
    for weight.chunk in (1, 2, B, 2 * B):
        torch.testing.assert_close(weight.squared_norms(), squares, rtol=1e-5, atol=0)


def test_samples_of_large_maps_share_kernels_in_groups(monkeypatch):
    """Eleven samples, of which four fit the cache: the last group is smaller."""
    calls, kernel = [], ConvolutionWeight._weight_gradient

    def counted(self, inputs, grad, samples):
        calls.append(samples)
        return kernel(self, inputs, grad, samples)

    monkeypatch.setattr(ConvolutionWeight, "_weight_gradient", counted)
    module = randomised(nn.Conv2d(16, 64, 3, padding=1, groups=2), torch.float32)
    assert_rule_exact(convolution, layer_call(module, (torch.randn(11, 16, 36, 36),)), 1e-5)
    assert calls[:3] == [4, 4, 3]


def test_pairs_of_positions_in_chunks(monkeypatch):
    torch.manual_seed(0)
    call = layer_call(nn.Conv2d(4, 4, 3, padding=1), (torch.randn(B, 4, 8, 8),))
    squares = looped(call)["weight"].double().flatten(1).square().sum(1)
    patches = 4 * 64 * 36  # bytes of one sample's unfolded input
    for size in (1, 2 * patches, 100 * patches):
        monkeypatch.setattr("gradguard.per_sample.layers.convolution._PATCHES", size)
        torch.testing.assert_close(pairs(call)["weight"].squared_norms(), squares, rtol=1e-5, atol=0)


def test_rules_leave_statistics_and_arguments_as_they_are():
    torch.manual_seed(0)
    for name in RULE_CASES:
        rule, call = made(name, torch.float64, B)
        before = [value.clone() for value in (*call.module.buffers(), *call.module.parameters())]
        kept = [value.clone() for value in (*[a for a in call.args if isinstance(a, Tensor)], call.grads[0])]
        for contribution in rule(call).values():
            contribution.squared_norms()
            contribution.weighted_sum(torch.ones(B), torch.zeros(B, dtype=torch.bool))
        for old, new in zip(before, (*call.module.buffers(), *call.module.parameters()), strict=True):
            assert torch.equal(old, new), name
        for old, new in zip(kept, (*[a for a in call.args if isinstance(a, Tensor)], call.grads[0]), strict=True):
            assert torch.equal(old, new), name


IMAGES, WORDS = torch.zeros(3, 4, 5), torch.zeros(4, 3, dtype=torch.long)
REFUSED = {
    "convolution without a batch": (convolution, nn.Conv2d(3, 3, 3, padding=1), (IMAGES,), 0, "unsqueeze"),
    "samples in a row of an image": (convolution, nn.Conv1d(4, 4, 1), (IMAGES,), 2, "in dimension 2"),
    "group norm of samples as channels": (group_norm, nn.GroupNorm(2, 4), (IMAGES,), 1, "expects its samples"),
    "instance norm without a batch": (
        instance_norm,
        nn.InstanceNorm2d(3, affine=True),
        (IMAGES,),
        0,
        "expected 4 dimensions",
    ),
    "layer norm over samples": (layer_norm, nn.LayerNorm(5), (IMAGES,), 2, "normalises over its last 1"),
    "layer norm over samples and more": (layer_norm, nn.LayerNorm((4, 5)), (IMAGES,), 1, "last 2 dimensions"),
    "rms norm over samples": (rms_norm, nn.RMSNorm(5), (IMAGES,), 2, "normalises over its last 1"),
    "frequencies": (embedding, nn.Embedding(V, 3, scale_grad_by_freq=True), (WORDS,), 0, "scale_grad_by_freq = False"),
    "renormalised rows": (embedding, nn.Embedding(V, 3, max_norm=1.0), (WORDS,), 0, "max_norm = None"),
    "frequencies of bags": (
        embedding_bag,
        nn.EmbeddingBag(V, 3, scale_grad_by_freq=True),
        (WORDS,),
        0,
        r"EmbeddingBag\(scale_grad_by_freq=True\)",
    ),
    "renormalised bags": (
        embedding_bag,
        nn.EmbeddingBag(V, 3, max_norm=1.0),
        (WORDS,),
        0,
        r"EmbeddingBag\(max_norm=1.0\)",
    ),
    "bags in the second dimension": (embedding_bag, nn.EmbeddingBag(V, 3), (WORDS,), 1, "expects its samples"),
    "bags with offsets": (
        embedding_bag,
        nn.EmbeddingBag(V, 3),
        (torch.arange(6), torch.tensor([0, 2])),
        0,
        "Pad the bags to one length",
    ),
    "bags without their last": (
        embedding_bag,
        nn.EmbeddingBag(V, 3, include_last_offset=True),
        (WORDS,),
        0,
        "include_last_offset=True",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_words(name):
    rule, module, args, dim, words = REFUSED[name]
    call = layer_call(module, args, axis=BatchAxis(dim))
    with pytest.raises(UnsupportedGradientError, match=words):
        rule(call)


@pytest.mark.parametrize("name", RULE_CASES)
def test_refused_where_no_sample_owns_the_input(name):
    rule, call = made(name, torch.float64, B)
    call.axes = [None] * len(call.axes)
    if not call.wanted:
        return
    with pytest.raises(UnsupportedGradientError, match=r"belongs to no single sample|in dimension 0"):
        rule(call)

"""AGC: the slow twin over every kind of layer, and what the published copies get wrong."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gradguard as gg
from cases import DTYPES, parameter, random
from gradguard import native
from gradguard.clip import adaptive
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.integrations import composer
from reference import clip_adaptive as slow_agc


def rows(t: torch.Tensor) -> list[torch.Tensor]:
    return masks(t, [(i,) for i in range(t.shape[0])])


def whole(t: torch.Tensor) -> list[torch.Tensor]:
    return masks(t, [...])


def output_channels(groups: int):
    def of(t: torch.Tensor) -> list[torch.Tensor]:
        size = t.shape[0] // groups
        return masks(t, [(slice(g * size, (g + 1) * size), o) for g in range(groups) for o in range(t.shape[1])])

    return of


def masks(t: torch.Tensor, indices: list) -> list[torch.Tensor]:
    found = []
    for index in indices:
        mask = torch.zeros(t.shape, dtype=torch.bool)
        mask[index] = True
        found.append(mask)
    return found


class Conv1D(nn.Module):
    """Shaped like Hugging Face's: a linear layer whose weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(random(4, 6)), nn.Parameter(torch.zeros(6))


LAYERS = {
    "linear": (nn.Linear(5, 3), {"weight": rows, "bias": whole}),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2), {"weight": rows, "bias": whole}),
    "conv2d": (nn.Conv2d(3, 4, (3, 2)), {"weight": rows, "bias": whole}),
    "conv2d channels last": (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), {"weight": rows, "bias": whole}),
    "conv3d": (nn.Conv3d(2, 3, 2), {"weight": rows, "bias": whole}),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3), {"weight": output_channels(1), "bias": whole}),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": output_channels(2), "bias": whole}),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2), {"weight": output_channels(1), "bias": whole}),
    "embedding": (nn.Embedding(7, 4), {"weight": rows}),
    "attention": (
        nn.MultiheadAttention(4, 2),
        {"in_proj_weight": rows, "in_proj_bias": whole, "out_proj.weight": rows, "out_proj.bias": whole},
    ),
    "lstm": (
        nn.LSTM(3, 2),
        {"weight_ih_l0": rows, "weight_hh_l0": rows, "bias_ih_l0": whole, "bias_hh_l0": whole},
    ),
    "layer norm": (nn.LayerNorm(5), {"weight": whole, "bias": whole}),
    "hugging face conv1d": (
        Conv1D(),
        {"weight": lambda t: masks(t, [(slice(None), o) for o in range(6)]), "bias": whole},
    ),
}


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.5, 10.0])
@pytest.mark.parametrize("kind", LAYERS)
def test_units_of_every_layer(kind, threshold, path):
    layer, units = LAYERS[kind]
    expected = {}
    for i, (name, p) in enumerate(layer.named_parameters()):
        p.grad = torch.empty_like(p).copy_(random(*p.shape, seed=i + 1))
        expected[name] = slow_agc(p.detach(), p.grad, units[name](p), threshold)
    before = math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters()))
    norm = gg.clip_grad_adaptive_(layer, threshold)
    assert float(norm) == pytest.approx(before, rel=1e-6, abs=0)
    assert set(units) == set(expected)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad.double(), expected[name], rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_every_dtype(dtype, path):
    p = parameter((random(4, 6) * 100).to(dtype), random(4, 6, seed=1).to(dtype))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    weight_norm = torch.linalg.vector_norm(p.detach().to(wide), dim=1)
    gg.clip_grad_adaptive_([p], 0.01)
    found = torch.linalg.vector_norm(p.grad.to(wide), dim=1)
    torch.testing.assert_close(found, 0.01 * weight_norm, rtol=1e-2 if dtype in (torch.bfloat16,) else 2e-3, atol=0)


def test_a_zero_initialised_weight_can_still_learn(path):
    """Composer's copy has no eps: its coefficient is 0 and the layer never trains."""
    p = parameter(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    gg.clip_grad_adaptive_([p], 0.01)
    torch.testing.assert_close(p.grad, torch.tensor([[0.6e-5, 0.8e-5]]))


def test_other_units_are_untouched_by_a_bad_one(path):
    weight = torch.ones(4, 2)
    p = parameter(torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [3.0, 4.0], [1e-4, 0.0]]), weight)
    gg.clip_grad_adaptive_([p], 0.01)
    expected = torch.tensor([[math.nan, 1.0], [math.nan, 0.0], [0.6e-2 * 2**0.5, 0.8e-2 * 2**0.5], [1e-4, 0.0]])
    torch.testing.assert_close(p.grad, expected, equal_nan=True)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_huge_and_tiny_gradients(scale, path):
    p = parameter(torch.tensor([[3.0, 4.0]]) * scale, torch.tensor([[0.6, 0.8]]) * scale)
    gg.clip_grad_adaptive_([p], 0.1, eps=0.0)
    torch.testing.assert_close(p.grad.double(), torch.tensor([[0.06, 0.08]]).double() * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_the_norm_of_huge_and_tiny_float64_gradients(scale):
    """On the CPU, as docs/clipping.md says: an accelerator adds squares, which leave float64's range."""
    p = parameter(torch.tensor([[3.0], [4.0]]).double() * scale, torch.ones(2, 1).double() * scale)
    norm = gg.clip_grad_adaptive_([p], 10.0, eps=0.0, nonfinite="zero")
    assert float(norm) == pytest.approx(5 * scale, rel=1e-12, abs=0)
    assert p.grad.tolist() == [[3.0 * scale], [4.0 * scale]]


def test_zero_gradients_stay_zero(path):
    p = parameter(torch.zeros(2, 2), torch.zeros(2, 2))
    assert float(gg.clip_grad_adaptive_([p], 0.01, eps=0.0)) == 0
    assert p.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_unit_without_gradient_stays_zero_beside_one_that_is_clipped(dtype, path):
    p = parameter(torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype), torch.eye(2, dtype=dtype))
    assert float(gg.clip_grad_adaptive_([p], 0.1)) == 5
    torch.testing.assert_close(p.grad, torch.tensor([[0.0, 0.0], [0.06, 0.08]], dtype=dtype))


def test_a_clip_that_does_not_bind_writes_nothing_on_the_cpu():
    p = parameter(random(3, 4) * 1e-4, random(3, 4, seed=1))
    version = p.grad._version
    gg.clip_grad_adaptive_([p], 0.1)
    assert p.grad._version == version


def test_sparse_embedding_gradients(path):
    layers = [nn.Embedding(50, 4, sparse=sparse) for sparse in (True, False)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer(torch.tensor([3, 3, 7])).square().sum().mul(100).backward()
    norms = [gg.clip_grad_adaptive_(layer, 0.05) for layer in layers]
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(layers[0].weight.grad.to_dense(), layers[1].weight.grad)


def test_sparse_gradients_without_whole_rows_are_refused():
    gradient = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2), check_invariants=True)
    with pytest.raises(UnsupportedGradientError, match="one sparse dimension"):
        gg.clip_grad_adaptive_([parameter(gradient, torch.ones(2, 2))])


def test_expanded_gradients_get_memory_of_their_own(path):
    p = parameter(torch.ones(1, 2).expand(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    gg.clip_grad_adaptive_([p], 0.1)
    norms = torch.linalg.vector_norm(p.grad, dim=1)
    torch.testing.assert_close(norms, torch.tensor([0.5, 0.05]))


def model_with_head() -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, 3))
    model.add_module("fc", nn.Linear(3, 2))
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    return model


@pytest.mark.parametrize(
    "exclude",
    [
        lambda m: m.fc,
        lambda m: "fc",
        lambda m: "fc.*",
        lambda m: [m.fc.weight, m.fc.bias],
        lambda m: ["*c.weight", m.fc.bias],
    ],
)
def test_exclude_by_module_parameter_or_pattern(exclude):
    model = model_with_head()
    gg.clip_grad_adaptive_(model, 0.01, exclude=exclude(model))
    assert model.fc.weight.grad.unique().tolist() == [100.0]
    assert model.fc.bias.grad.unique().tolist() == [100.0]
    assert float(model.body.weight.grad.max()) < 1


class Wrapper(nn.Module):
    """Holds a model as DistributedDataParallel and Composer's classifier do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WITH_EXCLUDE = {
    "clip_grad_adaptive_": lambda model, exclude: gg.clip_grad_adaptive_(model, 0.01, exclude=exclude),
    "ClipAdaptive": lambda model, exclude: gg.ClipAdaptive(0.01, exclude=exclude)(model),
    "apply_gradient_clipping": lambda model, exclude: gg.apply_gradient_clipping(
        model, "adaptive", 0.01, exclude=exclude
    ),
    "Composer's function": lambda model, exclude: composer.apply_gradient_clipping(
        model, "adaptive", 0.01, exclude=exclude
    ),
    "GradientClipping": lambda model, exclude: composer.GradientClipping("adaptive", 0.01, exclude=exclude).apply(
        "after_train_batch", SimpleNamespace(model=model), None
    ),
}


@pytest.mark.parametrize("name", ["fc", "module.fc", "fc.*", "*fc*", ("fc.weight", "module.fc.bias")], ids=str)
@pytest.mark.parametrize("call", WITH_EXCLUDE)
def test_a_wrapped_layer_is_excluded_by_its_name_with_and_without_module(call, name):
    model = Wrapper(model_with_head())
    WITH_EXCLUDE[call](model, name)
    assert model.module.fc.weight.grad.unique().tolist() == [100.0]
    assert model.module.fc.bias.grad.unique().tolist() == [100.0]
    assert float(model.module.body.weight.grad.max()) < 1


def test_a_name_that_means_two_layers_is_refused():
    model = model_with_head()
    model.module = model_with_head()
    with pytest.raises(InvalidValueError, match=r"'fc', which matches fc.weight and, .* module.fc.weight: pass the mo"):
        gg.clip_grad_adaptive_(model, 0.01, exclude="fc")
    gg.clip_grad_adaptive_(model, 0.01, exclude=model.fc)
    assert model.fc.weight.grad.unique().tolist() == [100.0]
    assert float(model.module.fc.weight.grad.max()) < 100


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_only_adaptive_clipping_takes_an_exclusion(kind):
    model, words = model_with_head(), "exclude= requires clipping_type='adaptive', but this is"
    with pytest.raises(InvalidValueError, match=words):
        gg.apply_gradient_clipping(model, kind, 1.0, exclude="fc")
    with pytest.raises(InvalidValueError, match=words):
        composer.GradientClipping(kind, 1.0, exclude=model.fc)
    assert float(model.fc.weight.grad.max()) == 100


def test_composers_algorithm_says_what_it_excludes():
    shown = repr(composer.GradientClipping("adaptive", 0.01, exclude=["fc", "embed*"]))
    assert shown == "GradientClipping(clipping_type='adaptive', clipping_threshold=0.01, exclude='fc, embed*')"


@pytest.mark.parametrize("entry", ["head", nn.Linear(1, 1), torch.ones(1)])
def test_an_exclusion_that_matches_nothing_lists_the_names(entry):
    with pytest.raises(InvalidValueError, match=r"matches no parameter; the parameters are body.weight, body.bias"):
        gg.clip_grad_adaptive_(model_with_head(), exclude=entry)


def test_exclusion_by_name_needs_names():
    with pytest.raises(InvalidValueError, match="have no names: pass the module"):
        gg.clip_grad_adaptive_(model_with_head().parameters(), exclude="fc")


def test_a_tied_head_is_excluded_by_either_name():
    model = nn.Sequential()
    model.add_module("wte", nn.Embedding(5, 3))
    model.add_module("head", nn.Linear(3, 5, bias=False))
    model.head.weight = model.wte.weight
    model.head.weight.grad = torch.full((5, 3), 100.0)
    gg.clip_grad_adaptive_(model, exclude="head")
    assert model.wte.weight.grad.unique().tolist() == [100.0]


def test_the_threshold_may_be_a_tensor(path):
    p = parameter(torch.tensor([[30.0, 40.0]]), torch.tensor([[3.0, 4.0]]))
    gg.clip_grad_adaptive_([p], torch.tensor(0.1))
    torch.testing.assert_close(p.grad, torch.tensor([[0.3, 0.4]]))


# --- What a review found ----------------------------------------------------------------------------------------------


class ConvNamedConv1D(nn.Conv1d):
    """A convolution whose class happens to be called as Hugging Face's linear layer."""


ConvNamedConv1D.__name__ = "Conv1D"


def test_a_convolution_called_conv1d_is_a_convolution():
    ours, plain = ConvNamedConv1D(4, 6, 3), nn.Conv1d(4, 6, 3)
    plain.load_state_dict(ours.state_dict())
    for layer in (ours, plain):
        layer.weight.grad, layer.bias.grad = random(6, 4, 3), random(6)
        gg.clip_grad_adaptive_(layer, 0.01)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=0, atol=0)


def test_a_parametrised_transposed_convolution_keeps_its_units_and_its_buffers():
    layer = nn.utils.parametrizations.spectral_norm(nn.ConvTranspose2d(4, 6, 3))
    layer(random(1, 4, 5, 5)).sum().mul(1e3).backward()
    weight = layer.parametrizations.weight.original
    expected = slow_agc(weight.detach(), weight.grad, output_channels(1)(weight), 0.01)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    gg.clip_grad_adaptive_(layer, 0.01)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


def test_weight_norm_of_a_transposed_convolution(path):
    layer = nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3))
    layer(random(1, 4, 5, 5)).sum().mul(1e3).backward()
    direction = layer.parametrizations.weight.original1
    expected = slow_agc(direction.detach(), direction.grad, output_channels(1)(direction), 0.01)
    gg.clip_grad_adaptive_(layer, 0.01)
    torch.testing.assert_close(direction.grad.double(), expected, rtol=2e-6, atol=1e-9)


def test_raise_leaves_even_the_layout_of_gradients_alone():
    p = parameter(torch.tensor([math.nan]).expand(3))
    gradient = p.grad
    with pytest.raises(NonFiniteGradientError, match="nothing was changed"):
        gg.clip_grad_adaptive_([p], nonfinite="raise")
    assert p.grad is gradient


def test_an_exclusion_of_a_wrong_type():
    with pytest.raises(InvalidTypeError, match="exclude has 3: expected a name or pattern"):
        gg.clip_grad_adaptive_(model_with_head(), exclude=[3])


ONE_PASS = {
    "healthy": lambda g: None,
    "NaN": lambda g: g[0].view(-1)[3:5].fill_(math.nan),
    "inf": lambda g: g[0].view(-1)[5:8].fill_(-math.inf),
    "both": lambda g: (g[0].view(-1)[5:8].fill_(math.inf), g[-1].view(-1)[:1].fill_(math.nan)),
    "zeros": lambda g: g[1].zero_(),
}


@pytest.mark.parametrize("exclude", [(), "2"])
@pytest.mark.parametrize("policy", ["propagate", "zero", "raise"])
@pytest.mark.parametrize("spoil", ONE_PASS)
def test_a_clipper_in_one_pass_does_and_tells_what_it_does_in_three(spoil, policy, exclude, monkeypatch):
    """Bit by bit, the counts of what was not finite included, though these are taken after the writing."""
    outcomes, asked, in_one_pass = [], [], adaptive.clip_units_
    for at_once in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 6), nn.ConvTranspose1d(4, 6, 3, groups=2), nn.LayerNorm(5))
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        ONE_PASS[spoil]([p.grad for p in net.parameters()])

        def clipped(*given, at_once=at_once):
            asked.append(in_one_pass(*given) if at_once else None)
            return asked[-1]

        monkeypatch.setattr(adaptive, "clip_units_", clipped)
        clipper = gg.ClipAdaptive(0.05, exclude=exclude)
        if policy == "raise" and spoil not in ("healthy", "zeros"):
            with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
                clipper(net, nonfinite=policy)
            result = []
        else:
            last = clipper(net, nonfinite=policy)
            told = last.norm, last.coefficient, last.clipped, last.nonfinite, last.tensor_norms
            result = [*told, torch.tensor(list(last.culprits().values()))]
        assert [done is not None for done in asked] == (
            [] if policy == "raise" else [at_once and native.status().in_use]
        )
        asked.clear()
        outcomes.append([*result, *[p.grad for p in net.parameters()]])
    for one, three in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, three, rtol=0, atol=0, equal_nan=True)


GUARDS = {
    "skip": (dict, True),
    "propagate": (lambda: {"nonfinite": "propagate"}, True),
    "zero": (lambda: {"nonfinite": "zero"}, True),
    "raise": (lambda: {"nonfinite": "raise"}, False),
    "spikes": (lambda: {"spikes": gg.SkipSpikes()}, False),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("spoil", ["healthy", "NaN", "inf"])
def test_a_guard_in_one_pass_steps_and_tells_as_in_three(spoil, guard, fused, monkeypatch):
    """One that raises, or skips spikes, has to know before it writes: it leaves gradients as they are."""
    outcomes, asked, in_one_pass = [], [], adaptive.clip_units_
    options, is_at_once = GUARDS[guard]
    for at_once in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 6), nn.LayerNorm(6), nn.Linear(6, 2))

        def clipped(*given, at_once=at_once):
            asked.append(in_one_pass(*given) if at_once else None)
            return asked[-1]

        monkeypatch.setattr(adaptive, "clip_units_", clipped)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        attached = gg.Guard(optimizer, gg.ClipAdaptive(0.05, exclude="2"), model=net, **options())
        told = []
        for step in range(3):
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            before = [p.grad.clone() for p in net.parameters()]
            if step == 1:
                ONE_PASS[spoil]([p.grad for p in net.parameters()])
            if guard == "raise" and step == 1 and spoil != "healthy":
                with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
                    optimizer.step()
                assert all(torch.equal(p.grad, g) for p, g in zip([*net.parameters()][1:], before[1:], strict=True))
            else:
                optimizer.step()
            last = attached.last
            told += [last.norm, last.coefficient, last.clipped, last.nonfinite, last.tensor_norms]
            told += [torch.tensor(list(last.culprits().values())), torch.tensor(attached.skipped_steps)]
        assert len([done for done in asked if done is not None]) == (
            3 * (is_at_once and at_once and native.status().in_use)
        )
        asked.clear()
        outcomes.append([*told, *net.parameters(), *[p.grad for p in net.parameters()]])
    for one, three in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, three, rtol=0, atol=0, equal_nan=True)


HOOKED = {
    "spectral norm": lambda: nn.utils.spectral_norm(nn.ConvTranspose1d(4, 6, 3)),
    "pruned": lambda: prune.random_unstructured(nn.ConvTranspose1d(4, 6, 3), "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", HOOKED)
def test_a_transposed_convolution_whose_weight_is_made_by_a_hook_keeps_its_units(kind):
    layer = HOOKED[kind]()
    layer(random(1, 4, 5)).sum().mul(1e3).backward()
    weight = layer.weight_orig
    expected = slow_agc(weight.detach(), weight.grad, output_channels(1)(weight), 0.01)
    gg.clip_grad_adaptive_(layer, 0.01)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=2e-6, atol=1e-9)


def test_a_layer_that_is_added_between_two_steps_has_its_own_units():
    """The clipper keeps each model's units; a model that has other parameters by now is looked at again."""
    clipper, model = gg.ClipAdaptive(0.01), nn.Sequential(nn.Linear(5, 3))
    for seed in range(2):
        for p in model.parameters():
            p.grad = random(*p.shape, seed=seed)
        clipper(model)
        model.append(nn.ConvTranspose1d(4, 6, 3))
    added = model[1].weight
    expected = slow_agc(added.detach(), random(*added.shape, seed=1), output_channels(1)(added), 0.01)
    torch.testing.assert_close(added.grad.double(), expected, rtol=2e-6, atol=1e-12)


def test_a_factor_below_the_numbers_of_float32_keeps_its_digits(kernels):
    weight = nn.Parameter(torch.full((3, 4), 1e-4))
    weight.grad = torch.full((3, 4), 1e38)
    gg.clip_grad_adaptive_([weight], 0.01, eps=1e-6)  # from a norm of 2e38 to 2e-6
    torch.testing.assert_close(weight.grad, torch.full((3, 4), 1e-6), rtol=1e-5, atol=0)


@pytest.mark.parametrize("which", ["weight", "gradient"])
def test_a_weight_and_a_gradient_may_lie_in_memory_in_different_ways(which):
    values, gradient = random(6, 4), random(6, 4, seed=1)
    strided = torch.zeros(6, 8)[:, ::2]
    weight, twin = nn.Parameter(strided if which == "weight" else values.clone()), nn.Parameter(values.clone())
    weight.data.copy_(values)
    weight.grad = strided.copy_(gradient) if which == "gradient" else gradient.clone()
    twin.grad = gradient.clone()
    for one in (weight, twin):
        gg.clip_grad_adaptive_([one], 0.01)
    torch.testing.assert_close(weight.grad, twin.grad)
    assert not torch.equal(twin.grad, gradient)

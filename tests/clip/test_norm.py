"""`clip_grad_norm_` and `get_total_norm`: the slow twin, PyTorch where it is right, and the table where it is not."""

import math

import pytest
import torch
from torch import nn

import gradguard as gg
from cases import DTYPES, GRADIENTS, ORDERS, parameter, random, sparse_with_duplicates
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError
from reference import clip_norm as slow_clip
from reference import total_norm as slow_norm


def model_with_gradients(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model(torch.randn(4, 6)).square().sum().backward()
    return model


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1.0, 1e9])
@pytest.mark.parametrize("p", ORDERS)
def test_agrees_with_pytorch_and_the_slow_twin(p, max_norm, path):
    ours, theirs = model_with_gradients(), model_with_gradients()
    expected = slow_clip([q.grad for q in ours.parameters()], max_norm, p)
    norm = gg.clip_grad_norm_(ours.parameters(), max_norm, p)
    torch_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, p)
    torch.testing.assert_close(norm, torch_norm)
    for a, b, c in zip(ours.parameters(), theirs.parameters(), expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(a.grad.double(), c, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_a_zero_dim_float32_or_float64(dtype, path):
    norm = gg.clip_grad_norm_(parameter(torch.tensor([3.0, 4.0], dtype=dtype)), 1.0)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.shape == ()
    assert float(norm) == 5.0


@pytest.mark.parametrize("spelling", ["tensor", "list", "generator", "pairs", "mapping", "module", "tuple"])
def test_every_kind_of_parameters(spelling):
    model = model_with_gradients()
    expected = slow_norm([p.grad for p in model.parameters()])
    if spelling == "tensor":
        p = parameter(torch.tensor([3.0, 4.0]))
        assert float(gg.clip_grad_norm_(p, 1.0)) == 5.0
        return
    argument = {
        "list": list(model.parameters()),
        "tuple": tuple(model.parameters()),
        "generator": (p for p in model.parameters()),
        "pairs": model.named_parameters(),
        "mapping": dict(model.named_parameters()),
        "module": model,
    }[spelling]
    assert float(gg.clip_grad_norm_(argument, 1.0)) == pytest.approx(expected)
    assert slow_norm([p.grad for p in model.parameters()]) == pytest.approx(1.0, rel=1e-5, abs=0)


# --- Where stock PyTorch is wrong (shared facts, section 2.1): numbers ------------------------------------------------


def test_finite_float16_gradients_whose_norm_overflows_are_scaled_not_zeroed(path):
    p = parameter(torch.full((4,), 4e4, dtype=torch.float16))
    assert float(gg.clip_grad_norm_(p, 1.0)) == 8e4
    assert p.grad.tolist() == [0.5] * 4


def test_a_float16_norm_beyond_65504_is_finite(path):
    assert float(gg.get_total_norm([torch.full((100_000,), 300.0, dtype=torch.float16)])) == pytest.approx(94868.33)


@pytest.mark.parametrize(("value", "n", "norm"), [(1e20, 1000, 3.1622777e21), (1e-25, 4, 2e-25), (1e25, 4, 2e25)])
def test_squares_neither_overflow_nor_underflow(value, n, norm, path):
    p = parameter(torch.full((n,), value))
    assert float(gg.clip_grad_norm_(p, 1.0)) == pytest.approx(norm, rel=2e-6, abs=0)
    if norm > 1:
        assert slow_norm([p.grad]) == pytest.approx(1.0, rel=1e-5, abs=0)


def test_a_tensor_of_as_many_elements_as_are_converted_at_a_time(path):
    assert float(gg.get_total_norm([torch.ones(1 << 24, dtype=torch.bfloat16)], 3.0)) == pytest.approx(256.0)


def test_a_norm_beyond_float32_still_scales_rightly(path):
    p = parameter(torch.full((40,), 3e38))
    assert float(gg.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)) == math.inf  # 1.9e39 has no float32
    assert slow_norm([p.grad]) == pytest.approx(1.0, rel=1e-5, abs=0)


def test_bfloat16_norms_are_float32(path):
    gradients = [random(1000, seed=i, dtype=torch.bfloat16) for i in range(100)]
    assert float(gg.get_total_norm(gradients)) == pytest.approx(slow_norm(gradients), rel=1e-6, abs=0)


def test_bfloat16_gradients_have_norm_max_norm_after_the_clip(path):
    params = [parameter(random(1000, seed=i, dtype=torch.bfloat16)) for i in range(50)]
    gg.clip_grad_norm_(params, 1.0)
    assert slow_norm([p.grad for p in params]) == pytest.approx(1.0, rel=2e-4, abs=0)  # PyTorch: 0.996


def test_mixed_dtypes_keep_their_dtype_and_the_norm_its_digits(path):
    grads = [random(1000), random(1000, seed=1, dtype=torch.bfloat16), random(10, seed=2, dtype=torch.float16)]
    params, expected = [parameter(g) for g in grads], slow_norm(grads)
    assert float(gg.clip_grad_norm_(params, 1.0)) == pytest.approx(expected, rel=1e-6, abs=0)
    assert [p.grad.dtype for p in params] == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_max_norm_inf_only_measures(bad, path):
    p = parameter(torch.tensor([1.0, bad, 2.0]))
    before, version = p.grad.clone(), p.grad._version
    norm = gg.clip_grad_norm_(p, math.inf)
    assert float(norm) == pytest.approx(bad, nan_ok=True)
    torch.testing.assert_close(p.grad, before, rtol=0, atol=0, equal_nan=True)
    assert p.grad._version == version


@pytest.mark.parametrize(("bad", "after"), [(math.inf, [0.0, math.nan]), (math.nan, [math.nan, math.nan])])
def test_propagate_is_pytorchs_default(bad, after, path):
    ours, theirs = parameter(torch.tensor([1.0, bad])), parameter(torch.tensor([1.0, bad]))
    gg.clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(ours.grad, torch.tensor(after), equal_nan=True)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


# --- Section 2.2: lists and arguments ---------------------------------------------------------------------------------


def test_a_parameter_listed_twice_counts_once(path):
    p = parameter(torch.tensor([3.0, 4.0]))
    assert float(gg.clip_grad_norm_([p, p], 1.0)) == 5.0
    assert slow_norm([p.grad]) == pytest.approx(1.0, rel=1e-5, abs=0)
    assert float(gg.get_total_norm([p.grad, p.grad])) == pytest.approx(1.0)


def test_tied_weights_of_a_module_count_once(path):
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    tied(torch.ones(1, 3)).sum().backward()
    expected = slow_norm([tied[0].weight.grad])
    assert float(gg.clip_grad_norm_(tied, 1e-3)) == pytest.approx(expected)
    assert slow_norm([tied[0].weight.grad]) == pytest.approx(1e-3, rel=2e-3, abs=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("params", [[], [nn.Parameter(torch.ones(3))], [parameter(torch.zeros(0))]])
def test_nothing_to_clip_gives_zero(params, p, path):
    norm = gg.clip_grad_norm_(params, 1.0, p)
    assert norm.shape == ()
    assert float(norm) == 0
    gg.clip_grad_value_(params, 1.0)
    assert float(gg.get_total_norm([q.grad for q in params])) == 0


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_an_empty_tensor_beside_others(p, path):
    params = [parameter(torch.tensor([3.0, 4.0])), parameter(torch.zeros(0, 2))]
    assert float(gg.clip_grad_norm_(params, 1.0, p)) == pytest.approx(slow_norm([torch.tensor([3.0, 4.0])], p))


def test_an_exhausted_generator_warns():
    generator = nn.Linear(2, 2).parameters()
    list(generator)
    with pytest.warns(UserWarning, match=r"exhausted or empty generator.*pass list\(model.parameters\(\)\)"):
        gg.clip_grad_norm_(generator, 1.0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_sparse_gradients_are_coalesced(p, path):
    q = parameter(sparse_with_duplicates(), torch.zeros(4))
    expected = slow_norm([q.grad], p)
    assert float(gg.clip_grad_norm_(q, 1.0, p)) == pytest.approx(expected)
    assert slow_norm([q.grad], p) == pytest.approx(1.0, rel=1e-5, abs=0)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_compressed_sparse_gradients(layout):
    dense = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    gradient = dense.to_sparse_csr() if layout == torch.sparse_csr else dense.to_sparse_csc()
    q = parameter(gradient, gradient.clone())
    assert float(gg.clip_grad_norm_(q, 1.0)) == 5.0
    torch.testing.assert_close(q.grad.to_dense(), dense / 5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", ["complex", "expanded", "transposed", "channels last", "strided slice"])
def test_unusual_layouts_are_scaled_in_place(case, path):
    gradients = [g.clone() if case != "expanded" else g[:1].clone().expand(g.shape) for g in GRADIENTS[case]]
    params = [parameter(g) for g in gradients]
    expected = slow_clip([g.clone() for g in gradients], 0.5) if case != "complex" else None
    norm = slow_norm(gradients)
    assert float(gg.clip_grad_norm_(params, 0.5)) == pytest.approx(norm, rel=2e-6, abs=0)
    assert slow_norm([p.grad for p in params]) == pytest.approx(0.5, rel=1e-5, abs=0)
    for p, g, e in zip(params, gradients, expected or gradients, strict=True):
        assert p.grad is g
        if expected:
            torch.testing.assert_close(p.grad.double(), e, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "value", [-1.0, math.nan, -math.inf, *(torch.tensor(x, device="cpu") for x in (-1.0, math.nan))]
)
def test_a_threshold_that_cannot_be_meant_raises_before_anything_changes(value):
    p = parameter(torch.tensor([3.0, 4.0]))
    calls = {
        "max_norm": lambda: gg.clip_grad_norm_(p, value),
        "clip_value": lambda: gg.clip_grad_value_(p, value),
        "clipping_threshold": lambda: gg.clip_grad_adaptive_(p, value),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidValueError, match=f"{name}=.*expected a number >= 0"):
            call()
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("norm_type", [0, -1, math.nan, -math.inf, "two", None])
def test_an_order_that_is_no_norm_raises(norm_type):
    with pytest.raises(InvalidValueError, match="expected a number above 0"):
        gg.clip_grad_norm_([], 1.0, norm_type)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (3, r"parameters is int: expected a module"),
        ("weight", r"parameters is str"),
        ([torch.ones(1), None], r"parameters\[1\] is NoneType"),
        ([("a", 3)], r"parameters\[0\] is tuple"),
        ([{"params": []}], r"Pass group\['params'\]"),
    ],
)
def test_wrong_parameters_say_what_to_pass(argument, words):
    with pytest.raises(InvalidTypeError, match=words):
        gg.clip_grad_norm_(argument, 1.0)


def test_an_optimizer_says_how_to_get_its_parameters():
    with pytest.raises(InvalidTypeError, match=r"is an optimizer: pass \[p for group in optimizer"):
        gg.clip_grad_norm_(torch.optim.SGD([torch.ones(1)], lr=1.0), 1.0)


@pytest.mark.parametrize("value", ["1.0", None, [1.0]])
def test_a_threshold_of_a_wrong_type_says_so(value):
    with pytest.raises(InvalidTypeError, match=r"max_norm=.*expected a number"):
        gg.clip_grad_norm_([], value)


def test_a_threshold_of_two_numbers_says_so():
    with pytest.raises(InvalidValueError, match=r"shape \(2,\): expected one number"):
        gg.clip_grad_norm_([], torch.ones(2))


def test_max_norm_zero_gives_zero_gradients(path):
    params = [parameter(torch.tensor([3.0, 4.0])), parameter(torch.zeros(2))]
    gg.clip_grad_norm_(params, 0.0)
    assert [p.grad.tolist() for p in params] == [[0.0, 0.0], [0.0, 0.0]]


def test_max_norm_may_be_a_tensor(path):
    p = parameter(torch.tensor([3.0, 4.0]))
    schedule = torch.tensor(1.0, requires_grad=True)
    gg.clip_grad_norm_(p, schedule)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)
    assert not p.grad.requires_grad


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_a_graph_are_clipped_without_one():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (x.square().sum() / 2).backward(create_graph=True)
    norm = gg.clip_grad_norm_(x, 1.0)
    assert not norm.requires_grad
    torch.testing.assert_close(x.grad.detach(), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    x.grad = None


def test_frozen_parameters_are_left_out(path):
    model = model_with_gradients()
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    expected = slow_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(gg.clip_grad_norm_(model, 1.0)) == pytest.approx(expected)


# --- The non-finite policy --------------------------------------------------------------------------------------------


def broken_model() -> nn.Module:
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(64, 32))
    model.add_module("head", nn.Linear(2, 1))
    model.encoder.weight.grad = torch.ones(32, 64)
    model.encoder.weight.grad.view(-1)[:3] = math.nan
    model.head.weight.grad = torch.tensor([[math.inf, 1.0]])
    model.head.bias.grad = torch.ones(1)
    return model


@pytest.mark.parametrize(
    "call",
    [
        lambda m: gg.clip_grad_norm_(m, 1.0, error_if_nonfinite=True),
        lambda m: gg.clip_grad_norm_(m, 1.0, nonfinite="raise"),
        lambda m: gg.clip_grad_norm_(m, 1.0, math.inf, nonfinite="raise"),
        lambda m: gg.clip_grad_norm_(m, math.inf, nonfinite="raise"),
        lambda m: gg.clip_grad_value_(m, 1.0, nonfinite="raise"),
        lambda m: gg.clip_grad_adaptive_(m, nonfinite="raise"),
        lambda m: gg.apply_gradient_clipping(m, "norm", 1.0, nonfinite="raise"),
        lambda m: gg.apply_gradient_clipping(m, "value", 1.0, nonfinite="raise"),
        lambda m: gg.apply_gradient_clipping(m, "adaptive", 1.0, nonfinite="raise"),
        lambda m: gg.get_total_norm({n: p.grad for n, p in m.named_parameters() if p.grad is not None}, 2.0, True),
    ],
)
def test_raise_names_parameters_and_counts_and_changes_nothing(call, path):
    model = broken_model()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(NonFiniteGradientError, match="not finite, and nothing was changed") as error:
        call(model)
    assert "`encoder.weight`: 3 of 2,048 elements NaN" in str(error.value)
    assert "`head.weight`: 1 of 2 elements infinite" in str(error.value)
    assert "head.bias" not in str(error.value)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_raise_without_names_gives_positions_and_advice():
    p = parameter(torch.tensor([math.nan, math.inf]))
    with pytest.raises(RuntimeError, match=r"parameter 1 \(shape \(2,\), no name.*1 NaN and 1 infinite of 2 elements"):
        gg.clip_grad_norm_([nn.Parameter(torch.ones(1)), p], 1.0, error_if_nonfinite=True)


def test_a_long_list_of_culprits_is_cut():
    params = [(f"p{i}", parameter(torch.tensor([math.nan]))) for i in range(30)]
    with pytest.raises(NonFiniteGradientError, match="and 10 more"):
        gg.clip_grad_norm_(params, 1.0, nonfinite="raise")


@pytest.mark.parametrize("clip", [gg.clip_grad_norm_, gg.clip_grad_value_, gg.clip_grad_adaptive_])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_zero_zeroes_the_whole_step_and_only_a_bad_one(clip, bad, path):
    params = [parameter(torch.tensor([1.0, bad])), parameter(torch.tensor([2.0]))]
    clip(params, 1.0, nonfinite="zero")
    assert [p.grad.tolist() for p in params] == [[0.0, 0.0], [0.0]]
    good = parameter(torch.tensor([0.25, 0.5]), torch.ones(2))
    clip(good, 1.0, nonfinite="zero")
    assert good.grad.tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("policy", "words"), [("skip", "only gg.Guard can do"), ("ignore", 'expected one of "propagate", "raise", "zero"')]
)
def test_unknown_policies(policy, words):
    with pytest.raises(InvalidValueError, match=words):
        gg.clip_grad_norm_([], 1.0, nonfinite=policy)


def test_two_policies_at_once_are_refused():
    with pytest.raises(InvalidValueError, match="leave one out"):
        gg.clip_grad_norm_([], 1.0, error_if_nonfinite=True, nonfinite="zero")


# --- get_total_norm ---------------------------------------------------------------------------------------------------


def test_get_total_norm_takes_gradients_with_none_among_them():
    assert float(gg.get_total_norm([torch.tensor([3.0]), None, torch.tensor([4.0])])) == 5.0
    assert float(gg.get_total_norm(torch.tensor([3.0, 4.0]), 1.0)) == 7.0


def test_get_total_norm_refuses_a_module():
    with pytest.raises(InvalidTypeError, match=r"Pass \[p.grad for p in model.parameters\(\)\]"):
        gg.get_total_norm(nn.Linear(2, 2))


def test_get_total_norm_writes_nothing(path):
    for case, gradients in GRADIENTS.items():
        versions = [g._version for g in gradients]
        gg.get_total_norm(gradients)
        assert [g._version for g in gradients] == versions, case


# --- What a review found ----------------------------------------------------------------------------------------------


def lazily_conjugated() -> nn.Parameter:
    z = nn.Parameter(torch.tensor([3 + 4j, 0j]))
    (z.conj() * torch.tensor([30 + 40j, 0j])).real.sum().backward()
    assert z.grad.is_conj()
    return z


@pytest.mark.parametrize(
    ("clip", "norm"),
    [
        (lambda z: gg.clip_grad_norm_(z, 1.0), 1.0),
        (lambda z: gg.clip_grad_value_(z, 3.0), 18**0.5),
        (lambda z: gg.clip_grad_value_(z, 100.0, min_value=3.0), (30**2 + 40**2 + 18) ** 0.5),
        (lambda z: gg.clip_grad_adaptive_(z, 1.0), 5.0),
    ],
)
def test_a_lazily_conjugated_gradient_is_really_clipped(clip, norm, path):
    z = lazily_conjugated()
    clip(z)
    assert slow_norm([z.grad]) == pytest.approx(norm, rel=1e-5, abs=0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_leak_into_the_norm(default):
    p = parameter(torch.full((4,), 4e4, dtype=torch.float16))
    torch.set_default_dtype(default)
    try:
        assert float(gg.clip_grad_norm_(p, 1.0)) == 8e4
        assert float(gg.clip_grad_adaptive_(p, 1.0)) == 1.0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: gg.clip_grad_norm_(p, 1.0),
        lambda p: gg.clip_grad_value_(p, 1.0),
        lambda p: gg.clip_grad_adaptive_(p, 1.0),
        lambda p: gg.apply_gradient_clipping(p, "value", 1.0),
        lambda p: gg.apply_gradient_clipping(p, "adaptive", 1.0),
        lambda p: gg.apply_gradient_clipping([], "norm", 1.0),
        lambda p: gg.get_total_norm(p.grad),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_device_does_not_leak_into_the_norm(call, dtype):
    p = parameter(torch.tensor([[3.0, 4.0]], dtype=dtype))
    with torch.device("meta"):
        found = call(p)
    norm = getattr(found, "norm", None) if isinstance(found, gg.results.ClipResult) else found
    assert norm is None or norm.device.type == "cpu"


def test_a_norm_beyond_float64_is_infinite():
    assert float(gg.get_total_norm([torch.ones(10_000)], 0.01)) == math.inf


def test_none_is_left_out_of_pairs_and_mappings():
    assert float(gg.get_total_norm({"a": torch.tensor([3.0]), "b": None})) == 3.0
    assert float(gg.get_total_norm([("a", torch.tensor([3.0])), ("b", None)])) == 3.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_threshold_may_be_any_tensor_of_one_number(dtype, shape, path):
    params = [parameter(torch.tensor([3.0, -4.0])), parameter(torch.tensor(-4.0))]
    threshold = torch.ones(shape, dtype=dtype)
    gg.clip_grad_value_(params, threshold)
    assert [p.grad.tolist() for p in params] == [[1.0, -1.0], -1.0]
    gg.clip_grad_norm_(params, threshold)
    assert slow_norm([p.grad for p in params]) == pytest.approx(1.0, rel=1e-5, abs=0)
    gg.clip_grad_adaptive_(params, threshold)


def test_a_tensor_bound_beyond_float16_is_its_largest_number(path):
    p = parameter(torch.tensor([math.inf, 1.0], dtype=torch.float16))
    gg.clip_grad_value_(p, torch.tensor(1e6))
    assert p.grad.tolist() == [65504.0, 1.0]


@pytest.mark.parametrize(("low", "high"), [("-1", 1.0), (-1.0, "1"), (-1.0, None)])
def test_bounds_of_a_wrong_type(low, high):
    with pytest.raises(InvalidTypeError, match="expected a number"):
        gg.clip_grad_value_([], high, min_value=low)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_value_clip_at_the_same_bound_writes_nothing(dtype):
    p = parameter(random(100).to(dtype))
    gg.clip_grad_value_(p, 0.3)
    version = p.grad._version
    gg.clip_grad_value_(p, 0.3)
    assert p.grad._version == version


@pytest.mark.parametrize("call", ["norm", "value", "adaptive", "guard"])
def test_parameters_with_one_tensor_for_a_gradient_are_each_clipped_once(call, path):
    def made():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(4)) for _ in range(3)]

    ours, twin = made(), made()
    for one in (ours, twin):
        summed = (one[0] + one[1]).pow(2).sum() + one[2].sum()
        for p, gradient in zip(one, torch.autograd.grad(summed, one), strict=True):
            p.grad = gradient
    assert ours[0].grad is ours[1].grad
    for p in twin:
        p.grad = p.grad.clone()
    clips = {
        "norm": lambda ps: gg.clip_grad_norm_(ps, 0.5),
        "value": lambda ps: gg.clip_grad_value_(ps, 0.5),
        "adaptive": lambda ps: gg.clip_grad_adaptive_(ps, 0.01),
        "guard": lambda ps: gg.Guard(torch.optim.SGD(ps, 1.0), gg.ClipByGlobalNorm(0.5)).optimizer.step(),
    }
    norms = [clips[call](ps) for ps in (ours, twin)]
    if call == "norm":
        assert float(norms[0]) == pytest.approx(slow_norm([p.grad for p in twin]) / 0.5 * float(norms[1]), rel=1e-5)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0)


def test_squares_that_are_subnormal_lose_no_digits(without_kernels):
    """Squares of 1.2e-157 have nine digits: the sum is near enough to the smallest normal number to be mistrusted."""
    values = torch.tensor([1.2345678e-157, 1.7654321e-157, 1.1111111e-157, 1.9e-157], dtype=torch.float64)
    expected = math.hypot(*values.tolist())
    assert float(gg.get_total_norm([values])) == pytest.approx(expected, rel=1e-14, abs=0)

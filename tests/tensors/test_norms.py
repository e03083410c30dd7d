"""p-norms against the slow twin, over the edge-case table, on both paths."""

import math
from contextlib import suppress

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import DTYPES, GRADIENTS, ORDERS, random
from gradguard.tensors.norms import tensor_norms, total_norm
from reference import total_norm as slow_norm
from strategies import lists_of_gradients

# float64 sums have nothing wider on an accelerator; the docs of `norms` say so.
HOST_ONLY = {"huge float64", "tiny float64"}


@pytest.mark.sampled(140)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("case", GRADIENTS)
def test_total_norm_is_right_for_every_awkward_gradient(case, p, path):
    if path == "device" and case in HOST_ONLY:
        return
    gradients = GRADIENTS[case]
    before = [g.clone() for g in gradients]
    norm = total_norm(gradients, p)
    torch.testing.assert_close(gradients, before, rtol=0, atol=0)
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    expected = slow_norm(gradients, p)
    if expected < 1.7e308:
        assert float(norm) == pytest.approx(expected, rel=2e-6, abs=0)


@pytest.mark.sampled(140)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("case", GRADIENTS)
def test_tensor_norms_are_right_and_make_the_total(case, p, path):
    if path == "device" and case in HOST_ONLY:
        return
    gradients = GRADIENTS[case]
    norms = tensor_norms(gradients, p)
    assert norms.shape == (len(gradients),)
    assert norms.tolist() == pytest.approx([slow_norm([g], p) for g in gradients], rel=2e-6, abs=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_elements_show_in_the_norm(value, p, dtype, path):
    bad = torch.zeros(2000, dtype=dtype)
    bad[1234] = value
    gradients = [random(5).to(dtype), bad]
    expected = math.nan if math.isnan(value) else math.inf
    assert float(total_norm(gradients, p)) == pytest.approx(expected, nan_ok=True)
    assert tensor_norms(gradients, p).tolist()[1] == pytest.approx(expected, nan_ok=True)


def test_nan_beats_infinity(path):
    assert math.isnan(float(total_norm([torch.tensor([math.inf]), torch.tensor([math.nan])])))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_no_tensors_give_zero(p, path):
    assert float(total_norm([], p)) == 0
    assert tensor_norms([], p).shape == (0,)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("fill", ["random", "constant"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forty_million_elements_are_right_to_2e_6(fill, dtype):
    n = 40_000_000
    gradient = torch.full((n,), 0.1, dtype=dtype) if fill == "constant" else random(n).to(dtype)
    exact = math.sqrt(math.fsum(float(x.double().square().sum()) for x in gradient.split(1 << 20)))
    for found in (total_norm([gradient]), tensor_norms([gradient])[0]):
        assert float(found) == pytest.approx(exact, rel=2e-6, abs=0)


def test_a_constant_does_not_build_up_rounding():
    """The worst case for a running sum: every addition rounds the same way."""
    for n in (1024, 4096, 16_384, 100_003):
        gradient = torch.full((n,), 0.1)
        exact = float(gradient[0].double()) * math.sqrt(n)
        assert float(total_norm([gradient])) == pytest.approx(exact, rel=2e-6, abs=0)
        assert float(tensor_norms([gradient])) == pytest.approx(exact, rel=2e-6, abs=0)


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.lists(finite, max_size=6), min_size=1, max_size=5), st.sampled_from(ORDERS))
def test_any_lists_agree_with_the_slow_twin(rows, p):
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    expected = slow_norm(tensors, p)
    assert float(total_norm(tensors, p)) == pytest.approx(expected, rel=2e-6, abs=0)
    assert float(torch.linalg.vector_norm(tensor_norms(tensors, p), p)) == pytest.approx(expected, rel=2e-6, abs=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one path for all that is drawn
@given(recipes=lists_of_gradients, p=st.sampled_from(ORDERS) | st.just(2.0))
def test_lists_of_any_shapes_dtypes_and_layouts_agree_with_the_slow_twin(recipes, p, path):
    tensors = [recipe.made() for recipe in recipes]
    expected = slow_norm(tensors, p)
    if expected < 1.7e308:
        assert float(total_norm(tensors, p)) == pytest.approx(expected, rel=2e-6, abs=0)
    assert tensor_norms(tensors, p).tolist() == pytest.approx([slow_norm([t], p) for t in tensors], rel=2e-6, abs=0)


@given(st.integers(0, 12_000), st.integers(0, 3))
def test_how_a_vector_is_cut_does_not_matter(cut, seed):
    whole = random(12_000, seed=seed)
    assert float(total_norm([whole[:cut], whole[cut:]])) == pytest.approx(float(total_norm([whole])), rel=1e-6, abs=0)


def test_a_tensor_too_long_for_one_kernel_is_split(monkeypatch, path):
    monkeypatch.setattr("gradguard.tensors.norms.LONGEST", 100)
    gradients = [random(30, 11), random(7)]
    assert float(total_norm(gradients)) == pytest.approx(slow_norm(gradients), rel=2e-6, abs=0)
    assert tensor_norms(gradients, math.inf).tolist() == pytest.approx([slow_norm([g], math.inf) for g in gradients])


@pytest.mark.usefixtures("without_kernels")
def test_tensors_longer_than_one_block(monkeypatch):
    monkeypatch.setattr("gradguard.tensors.norms.CONVERTED", 2500)
    for dtype in DTYPES:
        gradients = [random(n, seed=i).to(dtype) for i, n in enumerate((7001, 2500, 5000, 2))]
        assert float(total_norm(gradients)) == pytest.approx(slow_norm(gradients), rel=2e-6, abs=0)


@pytest.mark.parametrize("c", [0.1, 1.9831, 0.7, 3e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_constants_do_not_build_up_rounding_in_any_layout(c, dtype):
    """The worst case for a running sum, where each kind of stride takes another path."""
    whole = torch.full((40_000,), c, dtype=dtype)
    for gradient in (whole, whole[:4096], whole[:20_000:2], whole[:1].expand(20_000), whole.view(200, 200).t()[::3]):
        exact = float(whole[0].double()) * math.sqrt(gradient.numel())
        assert float(total_norm([gradient])) == pytest.approx(exact, rel=2e-6, abs=0)
        assert float(tensor_norms([gradient])) == pytest.approx(exact, rel=2e-6, abs=0)


@pytest.mark.parametrize("p", [2.0, 3.0, 6.0])
def test_a_call_inside_a_fake_tensor_mode_leaves_the_next_one_right(p, path):
    real = [torch.ones(10), torch.ones(10).bfloat16()]
    for gradient in real:
        with FakeTensorMode(allow_non_fake_inputs=True), suppress(Exception):
            total_norm([gradient], p)
    x = torch.arange(1.0, 41.0).view(4, 10)[:, ::2]
    for gradient in (x, x.bfloat16()):
        assert total_norm([gradient], p).item() == pytest.approx(float(slow_norm([gradient], p)), rel=1e-6)

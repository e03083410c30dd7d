"""The compiled kernels against torch's own and the slow twin: values, bits, memory, and what they must leave alone."""

import hashlib
import math
import platform
import re
import runpy
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradguard as gg
from cases import DTYPES, random
from forked_python import run_python
from gradguard import native
from gradguard.clip.adaptive import decide_units
from gradguard.clip.gradients import gradients_of
from gradguard.tensors.kernels import Blocks, SampledBlocks, UnitBlocks, representable
from gradguard.tensors.nonfinite import count_nonfinite
from gradguard.tensors.norms import tensor_norms, total_norm
from gradguard.tensors.scaling import clamp_, exceeds, scale_
from gradguard.tensors.units import ROWS, WHOLE, UnitLayout, clip_units_, scale_units_, unit_norms
from reference import clip_adaptive
from reference import total_norm as slow_norm

ROOT = Path(__file__).parents[2]
SIZES = [0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 2047, 2048, 2049, 4097, 32_767, 32_768, 32_769, 100_003]
MAGNITUDES = {"usual": 1.0, "tiny": 1e-30, "huge": 1e30, "subnormal": 1e-42, "zero": 0.0}
IN_FLOAT16 = {"tiny": 6e-8, "huge": 8e3, "subnormal": 3e-7}

needs_kernels = pytest.mark.skipif(not native.status().in_use, reason=str(native.status()))
pytestmark = needs_kernels


def library() -> native.Library:
    found = native.library()
    assert found is not None
    return found


LEVELS = sorted({library().use_level(level) for level in (1, 3, 4)}) if native.status().in_use else []


@pytest.fixture(params=LEVELS)
def level(request):
    found = library()
    yield found.use_level(request.param)
    found.use_level(4)


@pytest.fixture
def switch_kernels(monkeypatch):
    """Turns the library off, and on again."""

    def switch(off: bool) -> None:
        monkeypatch.setattr(native, "library", (lambda: None) if off else library_of_all)

    library_of_all = native.library
    return switch


def tensors(dtype: torch.dtype, magnitude: str = "usual") -> list[Tensor]:
    scale = IN_FLOAT16.get(magnitude, 1.0) if dtype is torch.float16 else MAGNITUDES[magnitude]
    if dtype is torch.float64 and magnitude in ("tiny", "huge", "subnormal"):
        scale = {"tiny": 1e-300, "huge": 1e300, "subnormal": 1e-320}[magnitude]
    return [(random(size, seed=size).double() * scale).to(dtype) for size in SIZES]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# Norms.


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_slow_twin(dtype, magnitude, p, level):
    gradients = tensors(dtype, magnitude)
    before = [bits(g) for g in gradients]
    each = tensor_norms(gradients, p).tolist()
    for g, norm in zip(gradients, each, strict=True):
        largest = float(g.double().abs().max()) if g.numel() else 0.0
        exact = torch.linalg.vector_norm(g.double() / (largest or 1.0), p).item() * largest if g.numel() else 0.0
        assert norm == pytest.approx(exact, rel=2e-7, abs=0)
    assert float(total_norm(gradients, p)) == pytest.approx(
        slow_norm([torch.tensor(each, dtype=torch.float64)], p), rel=1e-12
    )
    assert [bits(g) for g in gradients] == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_vector_the_worst_case_of_a_float32_sum(dtype):
    x = torch.full((3_000_000,), 0.1).to(dtype)
    for p in (1.0, 2.0):
        assert float(total_norm([x], p)) == pytest.approx(float(x[0]) * 3e6 ** (1 / p), rel=5e-7, abs=0)


@pytest.mark.parametrize("ends", [(1e153, 1e152), (1e-142, 1e-141), (1e-142, 0.0), (1e-170, 1e170)], ids=str)
def test_float64_squares_in_and_out_of_range_add_up(ends, level):
    x = torch.cat([torch.full((2048,), value, dtype=torch.float64) for value in ends])
    for given in ([x], list(x.split(2048))):
        assert float(total_norm(given)) == pytest.approx(slow_norm(given), rel=1e-12, abs=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_chunk_of_all_magnitudes(level, p):
    largest = random(2000).clamp(-1, 1) * 3.4e38
    x = torch.cat([random(2000) * 1e20, random(60_000) * 1e-25, largest, torch.zeros(5000)])
    for part in (x, x[2000:62_000], largest):
        assert math.isfinite(slow_norm([part], p))
        assert float(total_norm([part], p)) == pytest.approx(slow_norm([part], p), rel=2e-7, abs=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_wherever_it_is(dtype, value, level):
    for size, place in [(1, 0), (5, 3), (64, 63), (2048, 0), (2049, 2048), (40_000, 39_999), (40_000, 32_768)]:
        x = random(size, seed=place).to(dtype)
        x[place] = value
        for p in (1.0, 2.0, math.inf):
            assert float(total_norm([x, x], p)) == pytest.approx(abs(value), nan_ok=True)
        assert count_nonfinite([x]) == [(1, 0) if math.isnan(value) else (0, 1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_of_half_precision(dtype, level):
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    assert count_nonfinite([x]) == [(int(x.isnan().sum()), int(x.isinf().sum()))]
    for factor in (0.3, 1e-9, 0.99999):
        y = x.clone()
        scale_([y], torch.tensor(factor))
        expected = (x.float() * torch.tensor(factor)).to(dtype)
        assert torch.equal(y.nan_to_num(7, 9, -9), expected.nan_to_num(7, 9, -9))
    y = x.clone()
    clamp_([y], -0.5, 2.25)
    assert torch.equal(y.nan_to_num(7), x.clamp(-0.5, 2.25).nan_to_num(7))
    finite = x[x.isfinite()]
    for value in finite[:: len(finite) // 500]:
        assert float(total_norm([value.expand(3).clone()], math.inf)) == abs(float(value))


def test_bits_depend_neither_on_threads_nor_on_the_instruction_set():
    lists = [tensors(dtype) * 3 for dtype in DTYPES]
    found = set()
    before = torch.get_num_threads()
    try:
        for level in LEVELS:
            library().use_level(level)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                one = [tensor_norms(x, p) for x in lists for p in (1.0, 2.0, math.inf)]
                rows = [random(7000, 31, seed=3), random(40, 31, 3, seed=4), random(2, 90_000)]
                units = unit_norms(rows, [ROWS, UnitLayout(1), ROWS])
                found.add(b"".join(bits(x) for x in [*one, *units, *[total_norm(x) for x in lists]]))
    finally:
        torch.set_num_threads(before)
        library().use_level(4)
    assert len(found) == 1


# Writes.


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_bounds_are_torchs_to_the_bit(dtype, magnitude, level):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    factor, limit = torch.tensor(0.123456789, dtype=torch.float64), 0.3 * MAGNITUDES[magnitude]
    for x in tensors(dtype, magnitude):
        y = x.clone()
        scale_([y], factor)
        assert bits(y) == bits((x.to(wide) * factor.to(wide)).to(dtype))
        y = x.clone()
        clamp_([y], -limit, 2 * limit)
        assert torch.equal(y, x.clamp(representable(-limit, dtype), representable(2 * limit, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beside_a_tensor_is_touched(dtype, level):
    room = torch.full((20_000,), 3.0, dtype=dtype)
    at, expected, views = 1, room.clone(), []
    for size in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 2047, 2049, 4099):
        views.append(room[at : at + size])
        expected[at : at + size] = 1.5
        at += size + 1
    scale_(views, torch.tensor(0.5))
    assert torch.equal(room, expected)
    clamp_(views, -1.0, 1.0)
    assert torch.equal(room, torch.where(expected == 1.5, 1.0, expected))
    scale_units_(views, [WHOLE] * len(views), [torch.full((1,), 0.5, dtype=torch.float64)] * len(views))
    assert torch.equal(room, torch.where(expected == 1.5, 0.5, expected))


def test_versions_tell_what_was_written_and_only_that():
    one, two = random(10), random(50_000)
    scale_([one, two], torch.tensor(0.5))
    assert (one._version, two._version) == (1, 1)
    two[40_000] = 99.0
    clamp_([one, two], -50.0, 50.0)
    assert (one._version, two._version) == (1, 3)
    assert (float(two.max()), bool(exceeds([one, two], -50.0, 50.0))) == (50.0, False)
    scale_units_([one, two], [WHOLE, WHOLE], [torch.ones(1).double(), torch.full((1,), 0.5).double()])
    assert (one._version, two._version) == (1, 4)


def test_a_graph_that_needs_what_was_written_says_so():
    x = random(5).requires_grad_()
    y = x.exp()
    scale_([y], torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("size", [1, 5, 1030, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_of_a_tensor_that_holds_the_negative_of_what_it_shows(dtype, size, path):
    def negated():
        return torch._neg_view(torch.linspace(1.0, 2.5, size, dtype=dtype))

    x, beside = negated(), torch.full((3,), 2.5, dtype=dtype)
    assert x.is_neg()
    assert bool(exceeds([x, beside], -0.5, 5.0))
    assert not bool(exceeds([x], -5.0, 0.5))
    clamp_([x, beside], -1.5, 2.0)
    assert torch.equal(x, negated().clamp(-1.5, 2.0))
    assert beside.tolist() == [2.0] * 3
    scale_([x, beside], torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(x, negated().clamp(-1.5, 2.0) * 0.5)
    assert beside.tolist() == [1.0] * 3


@pytest.mark.parametrize("value", [2.0, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_beyond_a_bound_is_seen_wherever_it_is(dtype, value, level):
    for place in [*range(140), 2047, 2048, 4099]:
        x = torch.zeros(4100 if place > 140 else 140, dtype=dtype)
        x[place] = value
        assert bool(exceeds([x], -1.0, 1.0))
        clamp_([x], -1.0, 1.0)
        assert (float(x[place]), int(x.count_nonzero())) == (value / 2, 1)
        assert not bool(exceeds([x], -1.0, 1.0))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_memory_that_two_tensors_share_is_written_by_one_thread(switch_kernels):
    big = random(1_000_000)
    overlapping = lambda x: [x, x[10:].view(-1), x[500_000:], x[:3]]  # noqa: E731
    expected = big.clone()
    switch_kernels(True)
    scale_(overlapping(expected), torch.tensor(0.5))
    switch_kernels(False)
    for _ in range(20):
        x = big.clone()
        scale_(overlapping(x), torch.tensor(0.5))
        assert torch.equal(x, expected)
        task = torch.ones(1 << 17)  # as much as one thread takes at a time
        scale_([task.view(-1) for _ in range(8)], torch.tensor(0.5))
        assert torch.equal(task, torch.full((1 << 17,), 0.5**8))


def test_a_copy_that_is_made_at_the_first_write_is_made():
    x = random(100)
    lazy, kept = torch._lazy_clone(x), x.clone()
    scale_([lazy], torch.tensor(0.5))
    assert torch.equal(x, kept)
    assert torch.equal(lazy, kept * 0.5)


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        x = torch.full((4,), 3.0)
        assert float(total_norm([x])) == 6.0
        scale_([x], torch.tensor(0.5))
        clamp_([x], -1.0, 1.0)
    assert x.tolist() == [1.0] * 4


def test_many_threads_of_python_at_once():
    lists = [[random(300, 300, seed=k), random(17, seed=k)] for k in range(6)]
    expected = [float(total_norm(x)) for x in lists]
    wrong: list[int] = []

    def work(k: int) -> None:
        wrong.extend(k for _ in range(50) if float(total_norm(lists[k])) != expected[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What the kernels take.


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Stand(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


TAKEN = {
    "nothing": [],
    "a parameter": [nn.Parameter(torch.ones(3))],
    "four dtypes": [torch.ones(2, dtype=dtype) for dtype in DTYPES],
    "transposed": [random(3, 4).t()],
    "channels last": [random(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "permuted": [random(2, 3, 4).permute(1, 2, 0)],
    "dimensions of one": [random(6)[None, :, None].expand(1, 6, 1)],
    "a number": [torch.tensor(3.0)],
    "empty": [torch.ones(0, 3), torch.ones(3, 0)],
    "inside a buffer": [random(9)[2:7]],
}
LEFT = {
    "integers": [torch.ones(3, dtype=torch.int32)],
    "complex": [torch.ones(3, dtype=torch.complex64)],
    "float8": [torch.ones(3).to(torch.float8_e4m3fn)],
    "sparse": [torch.eye(3).to_sparse()],
    "MKL-DNN": [torch.ones(3, 4).to_mkldnn()],
    "expanded": [torch.ones(1).expand(5)],
    "every second": [random(6)[::2]],
    "with a gap": [random(4, 4)[:, :3]],
    "overlapping itself": [random(9).as_strided((2, 2, 3), (1, 1, 2))],
    "no memory": [torch.ones(3, device="meta")],
    "no memory, zeros": [torch._efficientzerotensor((4,))],
    "a stand-in": [torch.ones(3).as_subclass(Stand)],
    "one of several": [torch.ones(2), torch.ones(1).expand(5)],
}


@pytest.mark.parametrize("case", TAKEN)
def test_blocks_of_memory_are_taken(case):
    assert Blocks.of(TAKEN[case]) is not None


@pytest.mark.parametrize("case", LEFT)
def test_everything_else_is_left_to_torch(case):
    assert Blocks.of(LEFT[case]) is None
    assert Blocks.of(tuple(LEFT[case])) is None


def test_nothing_is_taken_while_somebody_looks_or_compiles(monkeypatch):
    x = [torch.ones(3)]
    with FakeTensorMode():
        assert Blocks.of([torch.ones(3)]) is None
        assert Blocks.of(x) is None
    with Watched():
        assert Blocks.of(x) is None
        assert UnitBlocks.of(x, [None], [1]) is None
    assert Blocks.of(x) is not None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Blocks.of(x) is None


def test_nothing_is_taken_inside_vmap():
    seen = []
    torch.vmap(lambda x: seen.append(Blocks.of([x])) or x)(torch.ones(2, 3))
    assert seen == [None]


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_measured_and_scaled_all_the_same(case):
    given = LEFT[case]
    if case in ("integers", "float8", "MKL-DNN", "no memory", "a stand-in", "overlapping itself", "no memory, zeros"):
        return
    given = [g.clone() if g.layout is torch.sparse_coo else g.contiguous() if g.stride() == (0,) else g for g in given]
    expected = slow_norm(given)
    assert float(total_norm(given)) == pytest.approx(expected, rel=2e-6, abs=0)
    scale_(given, torch.tensor(0.5))
    assert float(total_norm(given)) == pytest.approx(expected / 2, rel=2e-6, abs=0)


# Units.

UNITS = {
    "rows": ((700, 33), ROWS),
    "one long row": ((1, 100_001), ROWS),
    "two long rows": ((2, 70_000), ROWS),
    "rows of one": ((5000, 1), ROWS),
    "a whole": ((13,), WHOLE),
    "a long whole": ((99_999,), WHOLE),
    "a number": ((), WHOLE),
    "filters": ((64, 3, 7, 7), ROWS),
    "columns": ((33, 700), UnitLayout(1)),
    "many columns": ((3, 5000), UnitLayout(1)),
    "columns of several": ((6, 40, 3, 3), UnitLayout(1)),
    "columns of many": ((3, 2, 2500), UnitLayout(1)),
    "grouped columns": ((6, 4, 3), UnitLayout(1, groups=2)),
    "grouped rows": ((6, 4), UnitLayout(0, groups=3)),
    "the third dimension": ((4, 3, 5, 2), UnitLayout(2)),
    "no rows": ((0, 4), ROWS),
    "empty rows": ((4, 0), ROWS),
}


def weights_and_gradients(dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    made = []
    for k, (shape, _) in enumerate(UNITS.values()):
        p = nn.Parameter(random(shape, seed=k).mul(0.05).to(weight_dtype or dtype))
        p.grad = random(shape, seed=100 + k).to(p.dtype)
        made.append(p)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_are_measured_and_scaled_as_torch_does(dtype, level, switch_kernels):
    layouts = [layout for _, layout in UNITS.values()]
    gradients = [p.grad for p in weights_and_gradients(dtype)]
    assert UnitBlocks.of(gradients, [x.dim for x in layouts], [x.groups for x in layouts]) is not None
    norms = unit_norms(gradients, layouts)
    factors = [torch.linspace(0, 1, len(n), dtype=torch.float64) for n in norms]
    mine = [g.clone() for g in gradients]
    scale_units_(mine, layouts, factors)
    switch_kernels(True)
    theirs = [g.clone() for g in gradients]
    scale_units_(theirs, layouts, factors)
    for a, b in zip(norms, unit_norms(gradients, layouts), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


COLUMNS = {name: case for name, case in UNITS.items() if case[1].dim not in (0, None)}
SIZES_OF_UNITS = [1.0, 1e-150, 1e150, 1e-170, 0.0, 1e-310, 1e-140, 1e144]
SIZES_WITHIN = [1.0, 1.0, 1e-150, 1e150]


@pytest.mark.parametrize("case", COLUMNS)
def test_float64_columns_whose_squares_leave_its_range_are_measured_and_clipped(case, level):
    shape, layout = COLUMNS[case]
    x, units = random(shape).double(), layout.units(torch.empty(shape))
    view, sizes = layout.spread(x, torch.tensor(SIZES_OF_UNITS, dtype=torch.float64).repeat(units)[:units])
    view.mul_(sizes)
    flat = x.view(-1)
    flat[::3] *= torch.tensor(SIZES_WITHIN, dtype=torch.float64).repeat(len(flat))[: len(flat[::3])]
    flat[5], flat[-7] = math.nan, -math.inf
    assert UnitBlocks.of([x], [layout.dim], [layout.groups]) is not None
    rows = layout.rows(x).clone()
    largest = rows.abs().amax(1, keepdim=True).clamp(min=5e-324)
    norms = torch.linalg.vector_norm(rows / largest, dim=1, keepdim=True)
    expected = torch.where(largest.isinf(), math.inf, largest * norms).squeeze(1)
    torch.testing.assert_close(unit_norms([x], [layout])[0], expected, rtol=1e-12, atol=1e-323, equal_nan=True)
    assert int(expected.isnan().sum()) == int(expected.isinf().sum()) == 1
    bound = 1e-12 * layout.rows(torch.ones(shape)).double().norm(dim=1, keepdim=True)
    clipped = torch.where(expected[:, None] > bound, rows / largest * (bound / norms), rows)
    done = clip_units_([x], [torch.ones(shape).double()], [layout], [layout.units(x)], 1e-12, 1e-3)
    assert done is not None
    finite = expected.isfinite()
    torch.testing.assert_close(layout.rows(x)[finite], clipped[finite], rtol=1e-12, atol=1e-323)


@pytest.mark.parametrize("dtypes", [(d, None) for d in DTYPES] + [(torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.2, 1e6])
def test_clipping_at_once_is_deciding_and_writing_to_the_bit(dtypes, threshold):
    clipped = [weights_and_gradients(*dtypes) for _ in range(2)]
    for params in clipped:
        params[0].data[3], params[0].grad[5], params[9].grad[:, 1] = 0.0, 0.0, 0.0
        params[7].grad[2, 1], params[0].grad[7, 3] = math.inf, math.nan
    layouts = [{id(p): layout for p, (_, layout) in zip(ps, UNITS.values(), strict=True)} for ps in clipped]
    lists = [gradients_of(None, params) for params in clipped]
    at_once = decide_units(lists[0], layouts[0], range(len(clipped[0])), threshold, 1e-3, at_once=True)
    assert not at_once.units.left
    decided = decide_units(lists[1], layouts[1], range(len(clipped[1])), threshold, 1e-3)
    decided.write()
    for p, q in zip(*clipped, strict=True):
        assert bits(p.grad) == bits(q.grad)
        assert p.grad._version == q.grad._version
    assert bits(at_once.norms) == bits(decided.norms)
    assert (bits(at_once.after), bool(at_once.clipped)) == (bits(decided.after), bool(decided.clipped))
    after = [bits(p.grad) for p in clipped[0]]
    at_once.write()  # nothing is left to do
    assert [bits(p.grad) for p in clipped[0]] == after


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_adaptive_clip_is_that_of_the_slow_twin(dtype):
    params = [
        nn.Parameter(random(*shape, seed=k).mul(0.05).to(dtype))
        for k, shape in enumerate([(9, 70), (4, 3, 3, 3), (21,), (2, 40_000)])
    ]
    for k, p in enumerate(params):
        p.grad = random(*p.shape, seed=50 + k).to(dtype)
    expected = []
    for p in params:
        units = [torch.ones_like(p, dtype=torch.bool)] if p.dim() == 1 else []
        for row in range(len(p) if p.dim() > 1 else 0):
            mask = torch.zeros_like(p, dtype=torch.bool)
            mask[row] = True
            units.append(mask)
        expected.append(clip_adaptive(p.detach(), p.grad, units, 0.01).to(dtype))
    gg.clip_grad_adaptive_(params, 0.01)
    for p, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, wanted)


def test_a_policy_that_must_look_before_it_writes_does():
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [1.0, 1.0]])
    before = bits(p.grad)
    with pytest.raises(gg.errors.NonFiniteGradientError, match="1 of 6 elements NaN"):
        gg.clip_grad_adaptive_([p], 0.01, nonfinite="raise")
    assert bits(p.grad) == before


def test_gradients_laid_out_unlike_their_weights():
    p = nn.Parameter(random(8, 3, 5, 5))
    p.grad = random(8, 3, 5, 5, seed=1).to(memory_format=torch.channels_last)
    q = nn.Parameter(p.detach().clone())
    q.grad = p.grad.contiguous()
    assert float(gg.clip_grad_adaptive_([p], 0.01)) == pytest.approx(float(gg.clip_grad_adaptive_([q], 0.01)))
    torch.testing.assert_close(p.grad, q.grad)


# The library: loaded, or why not.


def status_in(code: str = "", **environment: str) -> str:
    program = f"{code}\nimport gradguard as gg, torch\nprint(gg.native.status())\n"
    program += "print(gg.get_total_norm([torch.tensor([3.0, 4.0])]))"
    done = run_python("-c", program, cwd=Path.cwd(), env=environment)
    first, second = done.stdout.splitlines()
    assert second == "tensor(5.)"
    return first


@pytest.mark.slow
def test_it_can_be_turned_off():
    assert status_in(GRADGUARD_NATIVE="0") == "not in use: GRADGUARD_NATIVE=0 is set"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no compiled library"),
        (b"", r"its 0 bytes are not those that were built \(cut short or changed\); install it again"),
        (b"\x7fELF" * 99, "its 396 bytes are not those"),
        (5000, "its 5,000 bytes are not those"),
        (-1, "are not those that were built"),
        (-4096, "are not those that were built"),
        (b"\x7fELF" * 8 + hashlib.sha256(b"\x7fELF" * 8).digest(), "cannot be used: "),
    ],
    ids=["missing", "empty", "damaged", "a page", "all but a byte", "all but a page", "whole, and no library"],
)
def test_a_library_that_cannot_be_used_is_told(monkeypatch, tmp_path, text, words):
    """One that was cut short ended the process when it was loaded."""
    file = tmp_path / "libgradguard.so"
    if isinstance(text, int):
        text = native.LIBRARY.read_bytes()[:text]
    if text is not None:
        file.write_bytes(text)
    monkeypatch.setattr(native, "LIBRARY", file)
    found = native._loaded.__wrapped__()
    assert isinstance(found, str)
    assert re.search(words, found)


@pytest.mark.parametrize("name", ["exchange_table", "parallel_for"])
def test_a_torch_that_lacks_what_they_need_is_told(monkeypatch, name):
    monkeypatch.setattr(native, name, lambda: None)
    assert "lacks names that they need" in str(native._loaded.__wrapped__())


def test_a_library_of_other_sources_is_told(monkeypatch):
    monkeypatch.setattr(native, "INTERFACE", 99)
    assert "it was built from other sources" in str(native._loaded.__wrapped__())


def test_kernels_that_give_other_bits_on_this_machine_are_told(monkeypatch):
    class Damaged:
        def __init__(self, path):
            self._whole = library()._free

        def __getattr__(self, name):
            return (lambda: 2) if name == "gg_check_level" else getattr(self._whole, name)

    where = native.parallel_for()
    monkeypatch.setattr(native, "parallel_for", lambda: where)
    monkeypatch.setattr(native.ctypes, "CDLL", Damaged)
    assert "for bfloat16 give other bits" in str(native._loaded.__wrapped__())


def test_no_memory_is_an_error(monkeypatch):
    class Full:
        gg_norm = staticmethod(lambda *_: 1)

    monkeypatch.setattr(library(), "_free", Full)
    with pytest.raises(MemoryError, match="list of work"):
        total_norm([torch.ones(3)])


# The sources.

BITS = "3b0841a22607a96cf6a227cde9871162a3d1c0921198b63188b1f61b77c60191"
"""Of what `native/print_bits.cpp` prints, the same for x86-64, x86-64-v3 and aarch64."""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_every_instruction_set_prints_the_same_bits(tmp_path):
    build = runpy.run_path(str(ROOT / "native/build.py"))
    for arguments in build["commands"](tmp_path / "bits", platform.machine(), "print_bits.cpp", ["-lm"]):
        subprocess.run(["g++", *arguments], check=True)
    lines = subprocess.run([tmp_path / "bits"], capture_output=True, text=True, check=True).stdout.splitlines()
    by_level: dict[str, list[str]] = {}
    for line in lines:
        by_level.setdefault(line[0], []).append(line[2:] + "\n")
    assert {hashlib.sha256("".join(x).encode()).hexdigest() for x in by_level.values()} == {BITS}


def test_a_failed_build_says_why_and_leaves_what_was_there(monkeypatch, tmp_path):
    build = runpy.run_path(str(ROOT / "native/build.py"))["build"]
    file = tmp_path / "libgradguard.so"
    file.write_text("old", encoding="utf-8")
    for compiler, words in [("false", "false failed"), ("/nowhere/g++", "cannot be run")]:
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=words):
            build(file)
    monkeypatch.delenv("CXX")
    with pytest.raises(RuntimeError, match="written for Linux on x86_64 and aarch64, not linux on riscv64"):
        build(file, machine="riscv64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        build(file)
    assert file.read_text(encoding="utf-8") == "old"


def recorder(folder: Path) -> Path:
    """A compiler whose path has a space, which notes its arguments and fails."""
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/arguments"\nexit 1\n', encoding="utf-8")
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize("form", ["{}", "env '{}' --first"])
def test_the_compiler_and_its_flags_are_those_of_the_environment(monkeypatch, tmp_path, form):
    build = runpy.run_path(str(ROOT / "native/build.py"))["build"]
    compiler = recorder(tmp_path / "my compiler")
    monkeypatch.setenv("CXX", form.format(compiler))
    monkeypatch.setenv("CXXFLAGS", "-g '-DNAME=two words'")
    with pytest.raises(RuntimeError, match="failed"):
        build(tmp_path / "library.so")
    given = (compiler.parent / "arguments").read_text(encoding="utf-8").splitlines()
    first = ["--first"] if "--first" in form else []
    assert given[: len(first) + 3] == [*first, "-g", "-DNAME=two words", "-std=c++17"]
    assert {"-ffp-contract=off", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"} < set(given)


@pytest.mark.parametrize("name", ["CXXFLAGS", "LDFLAGS"])
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffp-contract=fast"])
def test_flags_that_change_bits_are_refused(monkeypatch, tmp_path, name, flag):
    build = runpy.run_path(str(ROOT / "native/build.py"))["build"]
    monkeypatch.setenv(name, f"-g {flag}")
    with pytest.raises(RuntimeError, match=f"{name} has {flag}, which would give other bits"):
        build(tmp_path / "library.so")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_are_kept_and_compared_as_torch_does(dtype):
    weights = [torch.randn(300, 7, dtype=dtype), torch.randn((), dtype=dtype), torch.zeros(3, dtype=dtype)]
    views = [weights[0].view(-1)[::3], weights[1].view(-1), weights[2], torch.empty(0)]
    before, twin = torch.cat(views), torch.cat(views)
    changes = torch.full_like(before, math.nan)
    blocks = SampledBlocks.of(views, before, changes)
    assert blocks is not None
    for scale in (1e-3, 0.0, 1e30):  # the last one's squares leave float32
        for weight in weights:
            weight.add_(torch.randn_like(weight), alpha=scale)
        norms = blocks.moved()
        assert torch.equal(changes, torch.cat(views) - twin)
        counts = [view.numel() for view in views]
        parts = Blocks.of([*changes.split(counts), *twin.split(counts)])
        assert parts is not None
        assert norms == parts.norms(2.0).tolist()
        blocks.take()
        twin = torch.cat(views)
        assert torch.equal(before, twin)
    weights[0][0, 0] = math.nan
    assert math.isnan(blocks.moved()[0])


def test_samples_of_other_dtypes_and_mirrored_ones_are_left_to_torch():
    short, long = torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.float64)
    mirrored = torch.ones(2, dtype=torch.complex64).conj().imag
    for views in ([short], [torch.ones(3), long], [mirrored], [torch.empty(0)]):
        before = torch.cat(views)
        assert SampledBlocks.of(views, before, torch.empty_like(before)) is None

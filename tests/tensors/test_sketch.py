"""Sketches: the same bits on every layout, linear, and as long as what they are of."""

import math

import pytest
import torch

from gradguard.tensors.sketch import CHUNK, SUMS, flat_chunks, hashed, in_chunks, row_sketches, sketch_of

CPU = torch.device("cpu")
ALL_64 = (1 << 64) - 1


def slow_hash(place):
    """MurmurHash3's finalizer in Python's own integers."""
    h = place + 1
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & ALL_64
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & ALL_64
    return h ^ h >> 33


def slow_sketch(values):
    sums = [0.0] * SUMS
    for place, value in enumerate(values):
        for j in range(SUMS):
            sums[j] += -value if slow_hash(place) >> j & 1 else value
    return sums


def sketch(values):
    return sketch_of(in_chunks(values), CPU)


def pieces_at(values, places):
    return sketch_of([(values, places.clone())], CPU)


def test_the_hash_is_that_of_the_slow_twin_also_at_places_beyond_32_bits():
    places = [0, 1, 2, 255, 65_535, 2**31 - 1, 2**31, 2**40 + 17, 2**62]
    found = [h & ALL_64 for h in hashed(torch.tensor(places)).tolist()]
    assert found == [slow_hash(place) for place in places]
    assert found[0] == 0xB456BCFC34C2CB2C  # written down: a file of last year must mean the same


@pytest.mark.parametrize("n", [0, 1, 2, 33, 700])
def test_a_sketch_is_that_of_the_slow_twin(n):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    torch.testing.assert_close(sketch(values), torch.tensor(slow_sketch(values.tolist()), dtype=torch.float64))


def test_both_ways_to_add_up_are_the_same():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    usual = sketch(values)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(sketch(values), usual, rtol=0, atol=1e-12)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(5))
def test_sketches_of_any_parts_add_up_to_that_of_the_whole(seed):
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(3000, generator=random)
    owner = torch.randint(0, 5, (3000,), generator=random)
    parts = [pieces_at(values[owner == rank], (owner == rank).nonzero().flatten()) for rank in range(5)]
    torch.testing.assert_close(sum(parts), sketch(values), rtol=0, atol=1e-11)


def test_a_sketch_is_linear():
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 500, generator=random, dtype=torch.float64)
    torch.testing.assert_close(sketch(3 * a - b), 3 * sketch(a) - sketch(b), rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(7,), (64,), (1000,), (2 * CHUNK + 3,), (90, 70)])
def test_the_root_mean_square_of_a_sketch_is_the_norm_to_an_eighth(shape):
    ratios = []
    for seed in range(30):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        ratios.append(float(sketch(values).square().mean().sqrt() / values.double().norm()))
    assert math.sqrt(sum((r - 1) ** 2 for r in ratios) / len(ratios)) < 0.17
    assert sum(r * r for r in ratios) / len(ratios) == pytest.approx(1, abs=0.1)


def test_signs_of_all_sums_are_independent():
    n = 20_000
    bits = hashed(torch.arange(n))
    signs = torch.stack([1.0 - 2.0 * ((bits >> j) & 1).double() for j in range(SUMS)])
    together = signs @ signs.T / n
    together.fill_diagonal_(0)
    assert together.abs().max() < 5 / math.sqrt(n)
    assert (signs.mean(1)).abs().max() < 5 / math.sqrt(n)
    assert (signs[:, 1:] * signs[:, :-1]).mean(1).abs().max() < 5 / math.sqrt(n)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(bad):
    values = torch.ones(100)
    values[42] = bad
    assert not sketch(values).isfinite().any()


def test_rows_are_sketched_each_by_itself_and_add_up():
    values = torch.randn(6, 11, generator=torch.Generator().manual_seed(2))
    rows = row_sketches(in_chunks(values), 6, 11, CPU)
    torch.testing.assert_close(rows.sum(0), sketch(values)[:8], rtol=0, atol=1e-12)
    alone = values.clone()
    alone[[0, 1, 2, 4, 5]] = 0
    torch.testing.assert_close(rows[3], sketch(alone)[:8], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "values",
    [torch.arange(12.0), torch.arange(12.0).view(3, 4).T, torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(2.0)],
    ids=["flat", "transposed", "no rows", "no columns", "scalar"],
)
def test_chunks_are_the_elements_in_order(values):
    chunks = list(flat_chunks(values))
    together = torch.cat([part for _, part in chunks]) if chunks else torch.zeros(0)
    assert torch.equal(together, values.flatten())
    assert [at for at, _ in chunks] == [sum(len(p) for _, p in chunks[:i]) for i in range(len(chunks))]


@pytest.mark.parametrize(("rows", "columns"), [(3, CHUNK - 1), (4, CHUNK // 2), (3, CHUNK + 1)])
def test_chunks_of_a_transposed_tensor_are_whole_rows_that_fit(rows, columns):
    values = torch.arange(float(rows * columns)).view(columns, rows).T
    chunks = [part for _, part in flat_chunks(values)]
    assert torch.equal(torch.cat(chunks), values.flatten())
    assert {len(part) for part in chunks} == {max(columns, CHUNK // columns * columns)}

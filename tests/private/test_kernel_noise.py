"""Noise of the compiled kernels: ChaCha20 against its published vectors, kernels against a twin, numbers by tests."""

import copy
import hashlib
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from gradguard import native
from gradguard.errors import InvalidValueError
from gradguard.private import GaussianNoise
from gradguard.tensors.kernels import Blocks
from private.chacha_twin import TILE, chacha20, normal

KEY = hashlib.sha256(b"a key").digest()
MANY = 10_000_000
LEVELS = (1, 3, 4)

needs_kernels = pytest.mark.skipif(not native.status().in_use, reason=native.status().why)


def kernel_normal(count, key=KEY, tile=0, factor=1.0, deviation=1.0, start=0.0):
    values = torch.full((count,), start)
    blocks = Blocks.of([values])
    assert blocks is not None
    blocks.add_normal_(key, tile, factor, deviation)
    return values


@pytest.fixture(scope="module")
def numbers():
    return kernel_normal(MANY).double().numpy()


# ChaCha20


def test_chacha20_is_that_of_rfc_8439():
    """Section 2.3.2; its nonce of 96 bits takes half of our counter."""
    words = chacha20(bytes(range(32)), np.array([1 | 0x09000000 << 32], np.uint64), 0x4A000000)
    assert words[0].astype(">u4").tobytes().hex() == (
        "e4e7f11015593bd11fdd0f50c47120a3c7f4d1c70368c0339aaa22044e6cd4c3"
        "466482d209aa9f0705d7c214a2028bd9d19c12b5b94e16dee883d0cb4e3c50a2"
    )


def test_chacha20_of_zeros_is_that_of_rfc_8439():
    """Appendix A.1, vectors 1 and 2."""
    words = chacha20(bytes(32), np.arange(2, dtype=np.uint64), 0)
    assert words[0].astype("<u4").tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc")
    assert words[1].astype("<u4").tobytes().hex().startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e")


# The kernels against the twin


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tile", [0, 7, (1 << 28) - 3, 1 << 40], ids=["0", "7", "past 2^32", "far"])
def test_each_instruction_set_gives_the_bits_of_the_twin(level, tile):
    library = native.library()
    assert library is not None
    try:
        if library.use_level(level) != level:
            pytest.skip("not on this machine")
        found = kernel_normal(300_001, tile=tile).numpy()
    finally:
        library.use_level(4)
    assert np.array_equal(found.view(np.int32), (normal(KEY, tile, 300_001) + np.float32(0)).view(np.int32))


@needs_kernels
def test_pairs_with_a_small_uniform_are_among_those():
    """About one pair in 65,536 takes more bits."""
    counters = np.arange(16 * -(-300_001 // TILE), dtype=np.uint64)
    assert (chacha20(KEY, counters, 0)[:, ::2] < 1 << 16).sum() >= 1


@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 255, 256, 257, 32_767, 32_768, 32_769, 131_072, 200_001])
def test_any_length_gives_the_first_numbers_and_touches_nothing_else(count):
    room = torch.full((count + 64,), 7.0)
    blocks = Blocks.of([room[32 : 32 + count]])
    assert blocks is not None
    blocks.add_normal_(KEY, 3, 0.5, 2.0)
    twin = np.float32(7.0) * np.float32(0.5) + normal_scaled(3, count, 2.0)
    assert np.array_equal(room[32 : 32 + count].numpy(), twin)
    assert (room[:32] == 7).all()
    assert (room[32 + count :] == 7).all()


def normal_scaled(tile, count, deviation):
    """The kernel multiplies the radius, which rounds as often."""
    return kernel_normal(count, tile=tile, deviation=deviation).numpy()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_number_of_threads_changes_no_bit(threads):
    before = torch.get_num_threads()
    expected = [kernel_normal(n, tile=tile) for n, tile in ((500_000, 0), (10, 1954), (300_001, 1955))]
    found = [torch.zeros_like(one) for one in expected]
    try:
        torch.set_num_threads(threads)
        blocks = Blocks.of(found)
        assert blocks is not None
        blocks.add_normal_(KEY, 0, 1.0, 1.0)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
def test_the_angle_and_the_radius_are_right_against_float64():
    """The twin shares the polynomials: so against a library, with the same words."""
    counters = np.arange(16 * 400, dtype=np.uint64)
    words = chacha20(KEY, counters, 0).astype(np.float64)
    radius = np.sqrt(-2 * np.log((words[:, ::2] + 0.5) / 2**32))
    angle = 2 * np.pi * (words[:, 1::2] + 0.5) / 2**32
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 2).reshape(400, 16, 16)
    exact = pairs.transpose(0, 2, 1).reshape(-1)
    coarse = np.repeat(words[:, ::2] < 1 << 16, 2, axis=1).reshape(400, 16, 16).transpose(0, 2, 1).reshape(-1)
    off = np.abs(kernel_normal(400 * TILE).double().numpy() - exact)[~coarse]
    assert off.max() < 1.5e-6
    assert (off / np.abs(exact[~coarse])).mean() < 2e-7


# Their quality, over ten million


@needs_kernels
def test_moments_are_those_of_a_normal_number(numbers):
    squares = numbers * numbers
    fourth = squares * squares
    for power, powers, expected, variance in [
        (1, numbers, 0, 1),
        (2, squares, 1, 2),
        (3, squares * numbers, 0, 15),
        (4, fourth, 3, 96),
        (6, fourth * squares, 15, 10_170),
        (8, fourth * fourth, 105, 2_016_000),
    ]:
        assert abs(powers.mean() - expected) < 4.5 * math.sqrt(variance / MANY), power


@needs_kernels
@pytest.mark.slow
def test_kolmogorov_smirnov_and_anderson_darling(numbers):
    ordered = np.sort(numbers[: MANY // 5])
    assert stats.kstest(ordered, "norm").pvalue > 1e-3
    weights = (2 * np.arange(1, len(ordered) + 1) - 1) / len(ordered)
    squared = -len(ordered) - (weights * (stats.norm.logcdf(ordered) + stats.norm.logsf(ordered[::-1]))).sum()
    assert squared < 6.0  # 1 in 1000: 5.97


@needs_kernels
@pytest.mark.parametrize("bound", [1e-4, 1e-2, 1.0, 2.0, 3.0, 4.0, 5.0])
def test_as_many_lie_beyond_a_bound_as_should(numbers, bound):
    beyond = int((numbers > bound).sum()), int((numbers < -bound).sum())
    expected = MANY * stats.norm.sf(bound)
    assert all(stats.binom.cdf(n, MANY, stats.norm.sf(bound)) > 1e-5 for n in beyond), (beyond, expected)
    assert all(stats.binom.sf(n - 1, MANY, stats.norm.sf(bound)) > 1e-5 for n in beyond), (beyond, expected)


@needs_kernels
def test_the_tail_beyond_the_reach_of_32_bits_is_there():
    """Of some 76 pairs of ten million with a small uniform, the radius follows from 64 bits."""
    counters = np.arange(16 * (MANY // TILE), dtype=np.uint64)
    word = chacha20(KEY, counters, 0)[:, ::2]
    block, pair = np.nonzero(word < 1 << 16)
    assert 40 < len(block) < 120
    more = chacha20(KEY, counters[block], 1)[np.arange(len(block)), 2 * pair]
    uniform = [(int(a) << 32 | int(b)) + 0.5 for a, b in zip(word[block, pair], more, strict=True)]
    expected = [-2 * (math.log(u) - 64 * math.log(2)) for u in uniform]
    tile, lane = block // 16, block % 16
    at = tile * TILE + 32 * pair + lane
    values = kernel_normal(MANY).double().numpy()
    found = values[at] ** 2 + values[at + 16] ** 2
    assert np.allclose(found, expected, rtol=2e-6)
    assert max(expected) > 2 * 16 * math.log(2)


@needs_kernels
@pytest.mark.parametrize("distance", [1, 2, 15, 16, 17, 32, 255, 256, 257, 4096, 32_768, 131_072])
def test_neighbours_lanes_pairs_tiles_and_chunks_are_not_correlated(numbers, distance):
    for of in (lambda x: x, np.abs, np.square):
        values = of(numbers)
        values = (values - values.mean()) / values.std()
        assert abs((values[distance:] * values[:-distance]).mean()) < 5 / math.sqrt(MANY)


@needs_kernels
def test_keys_that_differ_in_a_bit_give_other_numbers():
    first = kernel_normal(100_000)
    for bit in (0, 7, 100, 255):
        other = (int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")
        pair = torch.stack([first, kernel_normal(100_000, key=other)])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(100_000)


# No key and counter twice


@pytest.fixture
def used(monkeypatch):
    """Key, first tile and number of tiles of each draw of the kernels."""
    found, add = [], Blocks.add_normal_

    def note(self, key, tile, factor, deviation):
        found.append((key, tile, Blocks.tiles(self._tensors)))
        return add(self, key, tile, factor, deviation)

    monkeypatch.setattr(Blocks, "add_normal_", note)
    return found


@needs_kernels
def test_no_tile_is_used_twice_under_one_key(used):
    noise = GaussianNoise(seed=5)
    for step in range(4):
        noise.add_(
            [torch.zeros(300 + step), torch.zeros(1), torch.zeros(0), torch.zeros(3, 5, dtype=torch.float64)], 1.0
        )
        if step == 2:
            noise.renew()
        noise.add_([torch.zeros(70_000)], 1.0)
    tiles = [(key, tile + i) for key, tile, count in used for i in range(count)]
    assert len(used) == 8
    assert len(set(tiles)) == len(tiles) == 4 * (2 + 1 + 274)
    assert len({key for key, _, _ in used}) == 2


@needs_kernels
def test_tiles_of_a_draw_that_fails_are_not_drawn_again(used, monkeypatch):
    noise, sums = GaussianNoise(seed=5), [torch.zeros(1000)]
    call = native.Library.call
    monkeypatch.setattr(native.Library, "call", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        noise.add_(sums, 1.0)
    monkeypatch.setattr(native.Library, "call", call)
    noise.add_(sums, 1.0)
    assert [tile for _, tile, _ in used] == [0, 4]


@needs_kernels
def test_the_key_of_the_kernels_is_not_the_key_itself(used):
    noise = GaussianNoise(seed=5)
    noise.add_([torch.zeros(3)], 1.0)
    assert used[0][0] != noise._key
    assert len(used[0][0]) == 32


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_is_neither_copied_nor_pickled(copied):
    with pytest.raises(InvalidValueError, match=r"the copy would draw the same.* Make a new GaussianNoise\(\)"):
        copied(GaussianNoise())


# Scaling in the same pass


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_and_divisor_scale_the_sum_and_the_divisor_the_noise(kernels, dtype, monkeypatch):
    if not kernels:
        monkeypatch.setattr("gradguard.tensors.kernels.native.library", lambda: None)
    plain, scaled = (torch.full((1000,), 3.0, dtype=dtype) for _ in range(2))
    GaussianNoise(seed=1).add_([plain], 2.0)
    GaussianNoise(seed=1).add_([scaled], 2.0, unit=64.0, divisor=48.0)
    torch.testing.assert_close(scaled, (3.0 * 64.0 + (plain - 3.0)) / 48.0, rtol=3e-6, atol=3e-6)


def test_without_noise_sums_are_scaled_all_the_same():
    total = torch.full((3,), 3.0)
    GaussianNoise().add_([total], 0.0, unit=8.0, divisor=6.0)
    assert total.tolist() == [4.0] * 3


@needs_kernels
@pytest.mark.parametrize("deviation", [1e-38, 1e-42, 1e31])
def test_deviations_that_float32_does_not_hold_well_are_not_left_to_the_kernels(deviation, used):
    total = torch.zeros(10_000)
    GaussianNoise(seed=1).add_([total], deviation)
    assert used == []
    assert float(total.double().std()) == pytest.approx(deviation, rel=0.05)

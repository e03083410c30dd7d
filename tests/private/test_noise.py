"""Noise has the right size and shape, and no draw has anything to do with another."""

import itertools
import math

import pytest
import torch
from scipy import stats

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.private import GaussianNoise
from gradguard.private.noise import _mersenne_words, key_from, keyed_generator, secure_normal

DRAWS = 1_000_000
SOURCES = {"seeded": {"seed": 1}, "operating system": {}, "secure": {"secure": True}}


def drawn(noise, *sizes, dtype=torch.float32, deviation=1.0):
    sums = [torch.zeros(size, dtype=dtype) for size in sizes]
    noise.add_(sums, deviation)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", SOURCES)
def test_its_mean_and_standard_deviation_are_right_to_four_standard_errors(source, dtype):
    (values,) = drawn(GaussianNoise(**SOURCES[source]), DRAWS, dtype=dtype, deviation=2.5)
    assert values.dtype is dtype
    values = values.double() / 2.5
    assert abs(float(values.mean())) < 4 / math.sqrt(DRAWS)
    assert abs(float(values.std()) - 1) < 4 / math.sqrt(2 * DRAWS)


@pytest.mark.parametrize("source", SOURCES)
def test_it_is_normal(source):
    (values,) = drawn(GaussianNoise(**SOURCES[source]), 200_000)
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("source", SOURCES)
def test_parameters_and_steps_get_independent_noise(source):
    noise = GaussianNoise(**SOURCES[source])
    parts = [*drawn(noise, 40_000, 40_000), *drawn(noise, 40_000, 40_000)]
    correlations = torch.corrcoef(torch.stack(parts)) - torch.eye(4)
    assert float(correlations.abs().max()) < 5 / math.sqrt(40_000)


def test_float32_noise_takes_many_values_and_float64_more():
    (narrow,) = drawn(GaussianNoise(seed=3), DRAWS)
    assert len(narrow.unique()) > 0.9 * DRAWS
    assert len(secure_normal(100_000).unique()) == 100_000


def test_secure_noise_has_four_parts_and_no_rounding_to_float32():
    values = secure_normal(1000)
    assert not torch.equal(values, values.float().double())
    assert secure_normal(0).shape == (0,)


def test_the_same_seed_gives_the_same_noise_and_another_seed_another():
    first, again, other = (drawn(GaussianNoise(seed=seed), 5)[0].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_seeds_that_agree_in_32_bits_differ():
    low, high = (drawn(GaussianNoise(seed=seed), 5)[0].tolist() for seed in (1, 1 + 2**32))
    assert low != high


def test_torch_manual_seed_has_no_part_in_it():
    torch.manual_seed(0)
    first = drawn(GaussianNoise(), 5)[0].tolist()
    torch.manual_seed(0)
    assert drawn(GaussianNoise(), 5)[0].tolist() != first
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    drawn(GaussianNoise(), 5)
    assert torch.rand(3).tolist() == expected


@pytest.mark.parametrize("source", SOURCES)
def test_after_a_resume_nothing_is_repeated(source):
    first, second = GaussianNoise(**SOURCES[source]), GaussianNoise(**SOURCES[source])
    first.renew()
    second.renew()
    assert len({tuple(drawn(n, 5)[0].tolist()) for n in (first, second, GaussianNoise(**SOURCES[source]))}) == 3


def test_all_of_the_generator_is_filled():
    state = keyed_generator(b"k" * 32).get_state().view(torch.int64)[3:627]
    assert len(state.unique()) > 620
    assert int(state.min()) >= 0
    assert int(state.max()) < 2**32


def test_the_generator_is_in_no_state_that_a_seed_of_32_bits_leads_to():
    words = keyed_generator(b"k" * 32).get_state().view(torch.int64)[3:627].tolist()
    follows = [b == (1812433253 * (a ^ (a >> 30)) + i) % 2**32 for i, (a, b) in enumerate(itertools.pairwise(words), 1)]
    assert sum(follows) < 3


def test_each_byte_of_a_key_counts():
    keys = [b"k" * 32, *[b"k" * i + b"l" + b"k" * (31 - i) for i in range(32)]]
    assert len({tuple(torch.rand(3, generator=keyed_generator(key)).tolist()) for key in keys}) == 33


def test_a_new_layout_of_the_generator_is_noticed(monkeypatch):
    assert len(list(_mersenne_words(0))) == 624
    monkeypatch.setattr("gradguard.private.noise._FIRST_WORD", 4)
    with pytest.warns(UserWarning, match=r"new layout, so noise comes from a seed of only 32 bits: use secure=True"):
        keyed_generator(b"k" * 32)


def test_no_noise_changes_nothing():
    assert drawn(GaussianNoise(), 3, deviation=0.0)[0].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype):
    with pytest.raises(InvalidTypeError, match="Sum in float32, add the noise, and round last"):
        drawn(GaussianNoise(), 3, dtype=dtype)


@pytest.mark.parametrize("deviation", [-1.0, math.inf, math.nan])
def test_a_standard_deviation_that_is_none_is_refused(deviation):
    with pytest.raises(InvalidValueError, match="expected a finite number >= 0"):
        drawn(GaussianNoise(), 3, deviation=deviation)


def test_secure_noise_refuses_a_seed():
    with pytest.raises(InvalidValueError, match=r"cannot be repeated. Leave out seed, or secure"):
        GaussianNoise(1, secure=True)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(InvalidValueError, match="expected a whole number from 0 to"):
        GaussianNoise(seed)


def test_a_seed_of_another_type_is_refused():
    with pytest.raises(InvalidTypeError, match=r"expected a whole number from 0 to \d+, got float"):
        GaussianNoise(1.5)


def test_keys_for_noise_and_sampling_differ():
    assert key_from(1, "noise") != key_from(1, "sampling")
    assert key_from(None, "noise") != key_from(None, "noise")

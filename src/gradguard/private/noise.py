r"""Unpredictable Gaussian noise that is never drawn twice.

The noise is computed from a key of 256 bits of the operating system: by the cipher ChaCha20 in the compiled kernels,
by PyTorch's generator elsewhere. On the CPU this generator uses only the low 32 bits of a seed, and an attacker could
try all of them. Its whole state, 19 968 bits, is therefore filled from the key.
"""

import functools
import hashlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_whole
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.kernels import Blocks

_BLOCK = 1 << 16  # elements of secure noise drawn at a time; a block's temporaries then fit the cache
_MERSENNE_WORDS = 624
_FIRST_WORD = 3  # index of the first word of the state in a generator's state viewed as int64, after seed and counters
_LEAST, _MOST = 2.0**-100, 2.0**100  # deviations and factors well within the range of float32


class GaussianNoise:
    r"""Draw independent Gaussian noise for each logical step.

    The noise is drawn in float32, or in float64 for float64 sums. It is never drawn in half precision, because bfloat16
    has only some 4000 different values.

    **Method.** For float32 sums on the CPU, the compiled kernels (`gradguard.native.status`) draw and add the noise in
    one pass, on all of PyTorch's threads. ChaCha20 produces the bits, and the formula of Box and Muller turns them into
    normal numbers of up to 9.5 standard deviations. Each pair of key and counter is used once. The numbers depend
    neither on the number of threads nor on the processor. Without the kernels, for float64, and on other devices,
    PyTorch's generator draws the numbers, in float32 up to 5.8 standard deviations. The same seed then gives other
    noise.

    **Source.** Without ``seed``, the key comes from the operating system's generator, and ``torch.manual_seed`` does
    not affect it. With ``seed``, the key follows from this number, and anyone who knows the seed can subtract the
    noise: use a seed in tests only. The key is never saved, because a checkpoint with the key would reveal the noise.

    **After a resume**, `renew` mixes fresh bits into the key, even with a seed. A run that continues from an old
    checkpoint repeats steps that an earlier run has already taken. With the same noise on them, the difference of both
    results would be free of noise. For the same reason, an object can be neither copied nor pickled.

    **Secure.** Normal numbers in float32 are a deterministic function of few random bits, and rounded. This is
    sometimes enough to distinguish neighbouring sums (Mironov, 2012). ``secure=True`` takes every bit from the
    operating system, and adds four normal numbers of 52 bits each in float64. The set of possible results then has no
    gaps that an attacker could search (Holohan and Braghin). Drawing takes 20 to 250 times as long. This makes the
    attack harder, but it is no discrete mechanism with a proof.

    Args:
        seed: An integer from 0 to 2^64 - 1 for repeatable noise, or None.
        secure: Whether to take every bit from the operating system.

    Raises:
        InvalidValueError: If ``secure`` comes with a seed, or the seed is out of range.
        InvalidTypeError: If ``seed`` is not an integer.

    Example:
        >>> import torch
        >>> sums = [torch.zeros(2), torch.zeros(1)]
        >>> GaussianNoise().add_(sums, standard_deviation=3.0)
        >>> all(bool(total.all()) for total in sums)
        True

    References: Bernstein, ChaCha, a variant of Salsa20, 2008; Box and Muller, A note on the generation of random normal
    deviates, 1958; Holohan, Braghin, Secure random sampling in differential privacy, 2021, arXiv 2107.10138.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        if secure and seed is not None:
            raise InvalidValueError(
                f"secure=True with seed={seed}: secure noise takes every bit from the operating system and cannot be "
                f"repeated. Leave out seed, or secure."
            )
        self.secure = secure
        self._key = key_from(seed, "noise")
        self._generators: dict[torch.device, torch.Generator] = {}
        self._tile = 0  # the first unused tile (range of counters) of ChaCha20 under this key
        self._lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidValueError(
            "noise cannot be copied or pickled: the copy would draw the same numbers, and the difference of both "
            "results would be free of noise. Make a new GaussianNoise()."
        )

    def add_(
        self, sums: Sequence[Tensor], standard_deviation: float, *, unit: float = 1.0, divisor: float = 1.0
    ) -> None:
        """Add independent noise to every element of ``sums``, in place: ``(sums * unit + noise) / divisor``.

        Args:
            sums: float32 or float64 tensors.
            standard_deviation: Standard deviation of the noise on all elements, finite and >= 0. 0 adds nothing.
            unit: The factor of the sums before noise is added.
            divisor: The divisor of both the sum and the noise.

        Raises:
            InvalidValueError: If ``standard_deviation`` is negative, NaN or infinite.
            InvalidTypeError: If a sum is neither float32 nor float64.
        """
        deviation = check_number("standard_deviation", standard_deviation, "a finite number >= 0")
        for total in sums:
            if total.dtype not in (torch.float32, torch.float64):
                raise InvalidTypeError(
                    f"noise: expected float32 or float64 sums, got {total.dtype}. Sum in float32, add the noise, and "
                    f"round last."
                )
        factor, deviation = unit / divisor, deviation / divisor
        if deviation:
            sums = self._without_added_by_kernels(sums, factor, deviation)
        for total in sums:
            if factor != 1:
                total.mul_(factor)
            if deviation:
                total.add_(self._draw(total, deviation))

    def renew(self) -> None:
        """Mix fresh bits of the operating system into the key; call this method after every resume."""
        with self._lock:
            self._key = hashlib.sha256(self._key + os.urandom(32)).digest()
            self._generators.clear()
            self._tile = 0

    def _without_added_by_kernels(self, sums: Sequence[Tensor], factor: float, deviation: float) -> Sequence[Tensor]:
        """Let the compiled kernels scale and add noise to the sums that they support; return the other sums."""
        if self.secure or not (_LEAST < deviation < _MOST and _LEAST < factor < _MOST):
            return sums
        narrow = [total for total in sums if total.dtype is torch.float32]
        blocks = Blocks.of(narrow)
        if not narrow or blocks is None:
            return sums
        with self._lock:  # these tiles count as used even if the kernel fails
            key, first = self._key, self._tile
            self._tile += Blocks.tiles(narrow)
        blocks.add_normal_(hashlib.sha256(b"gradguard ChaCha20" + key).digest(), first, factor, deviation)
        return [total for total in sums if total.dtype is not torch.float32]

    def _draw(self, like: Tensor, deviation: float) -> Tensor:
        if self.secure:
            noise = secure_normal(like.numel()).mul_(deviation)
            return noise.view(like.shape).to(like.device, like.dtype)
        if like.device not in self._generators:
            self._generators[like.device] = keyed_generator(self._key, like.device)
        noise = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return noise.normal_(0.0, deviation, generator=self._generators[like.device])


def key_from(seed: int | None, purpose: str) -> bytes:
    """Return a key of 32 bytes, from ``seed`` and ``purpose``, or from the operating system without a seed.

    Raises:
        InvalidValueError: If ``seed`` is not from 0 to 2^64 - 1.
        InvalidTypeError: If ``seed`` is not an integer.
    """
    if seed is None:
        return os.urandom(32)
    check_whole("seed", seed, 0, 2**64 - 1)
    return hashlib.sha256(f"gradguard {purpose} {seed}".encode()).digest()


def keyed_generator(key: bytes, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator that is seeded by ``key``; equal keys give equal draws.

    On the CPU the state depends on every bit of the key; on other devices Philox uses a seed of 64 bits from it.
    """
    device = torch.device(device)
    stream = hashlib.shake_256(key + str(device.type).encode())
    generator = torch.Generator(device)
    if device.type != "cpu":  # Philox, whose key has 64 bits
        return generator.manual_seed(int.from_bytes(stream.digest(8), "little", signed=True))
    state = generator.manual_seed(0).get_state()
    words = state.view(torch.int64) if state.numel() % 8 == 0 else state.new_empty(0, dtype=torch.int64)
    if words[_FIRST_WORD : _FIRST_WORD + _MERSENNE_WORDS].tolist() != _mersenne_words(0):
        warnings.warn(
            f"torch {torch.__version__} stores the state of its generator in a new layout, so noise comes from a seed "
            f"of only 32 bits: use secure=True.",
            stacklevel=2,
        )
        return generator.manual_seed(int.from_bytes(stream.digest(4), "little"))
    fresh = torch.frombuffer(bytearray(stream.digest(4 * _MERSENNE_WORDS)), dtype=torch.int32)
    words[_FIRST_WORD : _FIRST_WORD + _MERSENNE_WORDS] = fresh.long() & 0xFFFFFFFF
    return generator.set_state(state)


@functools.cache
def _mersenne_words(seed: int) -> list[int]:
    """Return the initial state of the Mersenne Twister (Matsumoto and Nishimura) for ``seed``."""
    step: Callable[[int, int], int] = lambda word, i: (1812433253 * (word ^ (word >> 30)) + i) & 0xFFFFFFFF  # noqa: E731
    return list(itertools.accumulate(range(1, _MERSENNE_WORDS), step, initial=seed))


def secure_normal(count: int) -> Tensor:
    """Return ``count`` standard normal numbers in float64, each half the sum of four, from bits of `os.urandom`."""
    result = torch.empty(count, dtype=torch.float64, device="cpu")
    for block in result.split(_BLOCK) if count else ():
        bits = torch.frombuffer(bytearray(os.urandom(32 * len(block))), dtype=torch.int64).view(4, -1)
        # 52 bits plus a half: 0 and 1 cannot occur, and the middle of each cell has 53 bits, so float64 is exact.
        uniform = bits.bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
        torch.sum(torch.special.ndtri(uniform), 0, out=block).mul_(0.5)
    return result

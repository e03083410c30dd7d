"""The normal numbers of the compiled kernels once more, in NumPy: block by block, with whole arrays, written from the
papers. Every operation is one of integers or rounded as IEEE 754 says, so the bits must be the same."""

import numpy as np

TILE = 256
CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")


def chacha20(key: bytes, counters: np.ndarray, stream: int) -> np.ndarray:
    """Return the 16 words of each block: uint32, ``[len(counters), 16]``."""
    start = np.empty((len(counters), 16), np.uint32)
    start[:, :4], start[:, 4:12] = CONSTANTS, np.frombuffer(key, dtype="<u4")
    start[:, 12], start[:, 13] = counters & 0xFFFFFFFF, counters >> np.uint64(32)
    start[:, 14], start[:, 15] = stream & 0xFFFFFFFF, stream >> 32
    x = list(start.T.copy())
    for i in range(20):
        for k in range(4):  # columns, then diagonals
            shift = i % 2
            a, b, c, d = k, 4 + (k + shift) % 4, 8 + (k + 2 * shift) % 4, 12 + (k + 3 * shift) % 4
            for to, by, mixed, turn in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)]:
                x[to] = x[to] + x[by]
                word = x[mixed] ^ x[to]
                x[mixed] = word << np.uint32(turn) | word >> np.uint32(32 - turn)
    return np.stack(x, 1) + start


def logarithm(y: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """ln y, or ln(1 - y) where ``upper``, for 0 < y <= 1/2: float32."""
    f32 = np.float32
    mantissa, exponent = np.frexp(y)  # in [1/2, 1)
    small = mantissa < f32(0.70710677)
    f, e = np.where(small, mantissa * f32(2), mantissa) - f32(1), np.where(small, exponent - 1, exponent)
    near = y <= f32(0.29289323)
    f = np.where(upper, np.where(near, -y, f32(1) - (y + y)), f)
    e = np.where(upper, np.where(near, 0, -1), e).astype(f32)
    p = np.zeros_like(f)
    for c in (-0.07857349514961243, 0.1288098394870758, -0.13129232823848724, 0.14181305468082428, -0.1662452071905136,
              0.20002280175685883, -0.25000810623168945, 0.33333316445350647):  # fmt: skip
        p = p * f + f32(c)
    return (f + (p * ((f * f) * f) - f32(0.5) * (f * f))) + e * f32(0.6931471805599453)


def circle(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of (a + 1/2) / 2^32 of a turn: float32."""
    f32 = np.float32
    quadrant = (a + np.uint32(1 << 29)) >> np.uint32(30)
    offset = a.astype(np.int64) - (quadrant.astype(np.int64) << 30)
    offset = np.where(offset >= 1 << 31, offset - (1 << 32), offset)  # the last half quadrant belongs to the first axis
    x = (2 * offset + 1).astype(f32) * f32(2 * np.pi / 2**33)
    z = x * x
    s = x + x * z * ((z * f32(-0.00019517297914717346) + f32(0.008332177996635437)) * z - f32(0.16666655242443085))
    c = z * f32(2.443845005473122e-05) - f32(0.001388736767694354)
    c = (f32(1) - f32(0.5) * z) + z * z * (c * z + f32(0.04166664555668831))
    turned = [(c, s), (-s, c), (-c, -s), (s, -c)]
    return np.choose(quadrant, [one for one, _ in turned]), np.choose(quadrant, [one for _, one in turned])


def normal(key: bytes, tile: int, count: int) -> np.ndarray:
    """Return ``count`` standard normal numbers from tile number ``tile`` on: float32."""
    tiles = -(-count // TILE)
    counters = np.arange(tiles * 16, dtype=np.uint64) + np.uint64(16 * tile)
    words, more = (chacha20(key, counters, stream) for stream in (0, 1))
    first, rest = words[:, ::2], more[:, ::2]
    upper = first >= 1 << 31
    folded = np.where(upper, ~first, first)
    y = (folded.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    fine = (first.astype(np.uint64) << np.uint64(32) | rest.astype(np.uint64)).astype(np.float64) + 0.5
    y = np.where(first < 1 << 16, fine.astype(np.float32) * np.float32(2.0**-64), y)
    radius = np.sqrt(logarithm(y, upper) * np.float32(-2))
    cosine, sine = circle(words[:, 1::2])
    pairs = np.stack([radius * cosine, radius * sine], 2).reshape(tiles, 16, 16)  # tile, block in it, word
    return pairs.transpose(0, 2, 1).reshape(-1)[:count]

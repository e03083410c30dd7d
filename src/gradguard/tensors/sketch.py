"""A gradient in 32 numbers: signed sums whose signs are hashes of each element's index in the whole tensor.

A sketch is linear: sketches of shards and of partial sums add up to the sketch of the whole, and a factor of the
gradient is the same factor of its sketch. The root mean square of a sketch is the norm, to 13 %.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

SUMS = 32
"""The number of sums: one for each of the 32 hash bits that are used."""

ROW_SUMS = 8
"""The number of sums for a single row."""

HASH_VERSION = 1
"""Changes with the signs: files of two versions cannot be compared."""

CHUNK = 1 << 16
"""How many elements are hashed at once: temporaries stay in the cache, and never have the size of a tensor."""

_FIRST, _SECOND = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
_BELOW_SHIFT = (1 << 31) - 1


def hashed(places: Tensor) -> Tensor:
    """Return 64 hash bits for each place, an int64 tensor: MurmurHash3's finalizer; ``places`` is overwritten.

    Integer arithmetic wraps equally on every device, so the bits do not depend on layout or torch version.
    """
    places += 1  # the hash of 0 would be 0
    for factor in (_FIRST, _SECOND):
        places ^= (places >> 33) & _BELOW_SHIFT  # a logical shift: clear the copies of the sign bit
        places *= factor
    places ^= (places >> 33) & _BELOW_SHIFT
    return places


def sketch_of(pieces: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    r"""Return the sketch of a tensor that is passed in pieces.

    .. math:: s_j = \sum_i \sigma_j(i)\, g_i, \qquad \sigma_j(i) = 1 - 2\,\mathrm{bit}_j(\mathrm{hash}(i))

    Elements with the same byte of the hash are summed first, which takes 4 additions for each element instead of 32.

    Args:
        pieces: Values, and the index of each in the whole tensor, as int64 that is overwritten.
        device: The device of the pieces.

    Returns:
        32 float64 numbers; NaN if a value is not finite.
    """
    bins = torch.zeros(SUMS // 8, 256, dtype=torch.float64, device=device)
    for values, places in pieces:
        bits, doubles = hashed(places), values.double()
        for k in range(len(bins)):
            row = bins[k]
            which = (bits >> (8 * k)) & 255
            if torch.are_deterministic_algorithms_enabled():  # bincount on a GPU is not deterministic
                row.index_add_(0, which, doubles)
            else:
                row += torch.bincount(which, weights=doubles, minlength=len(row))
    byte, bit = torch.arange(256, device=device), torch.arange(8, device=device)
    signs = 1.0 - 2.0 * ((byte[:, None] >> bit) & 1).double()  # for each of the 8 bits of each byte
    return (bins @ signs).flatten()


def row_sketches(pieces: Iterable[tuple[Tensor, Tensor]], rows: int, length: int, device: torch.device) -> Tensor:
    """Return the sketch of each row: its first 8 signed sums.

    Args:
        pieces: As for `sketch_of`.
        rows: Length of the first dimension of the whole tensor.
        length: Elements in one row.
        device: The device of the pieces.

    Returns:
        A float64 tensor of shape ``[rows, 8]``.
    """
    sums = torch.zeros(rows, ROW_SUMS, dtype=torch.float64, device=device)
    for values, places in pieces:
        row = places // length
        bits, doubles = hashed(places), values.double()
        for j in range(ROW_SUMS):
            sums[:, j].index_add_(0, row, torch.where((bits >> j) & 1 == 1, -doubles, doubles))
    return sums


def in_chunks(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a tensor that is whole on this rank into the pieces of `sketch_of`; a contiguous one is not copied."""
    yield from ((part, torch.arange(at, at + len(part), device=part.device)) for at, part in flat_chunks(values))


def flat_chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield flat parts of up to 65,536 elements (or one row, if not contiguous), each after its start index."""
    if values.is_contiguous():
        flat = values.view(-1)
        yield from ((at, flat[at : at + CHUNK]) for at in range(0, len(flat), CHUNK))
        return
    at, rows = 0, max(1, CHUNK // values[0].numel())  # values[0] exists: an empty tensor is contiguous
    for part in values.split(rows):
        yield at, part.reshape(-1)
        at += part.numel()

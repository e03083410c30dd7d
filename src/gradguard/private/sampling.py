"""Poisson sampling: each sample joins each batch independently, as the accounting of privacy assumes."""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from gradguard.arguments import check_number, check_whole
from gradguard.errors import InvalidValueError
from gradguard.private.noise import key_from, keyed_generator


class PoissonBatches(Sampler[list[int]]):
    r"""Draw batches of random size: each of n samples joins each batch with probability q, independently.

    A batch has nq samples on average, with variance nq(1 − q), **and may be empty**. A ``DataLoader`` whose
    ``collate_fn`` cannot handle an empty list needs `make_private`, which handles empty batches itself. Shuffled
    batches of a fixed size differ: with them the same noise may protect ten times less (Chua et al.).

    The samples of step number t depend on a key and t alone. The key comes from the operating system, or from ``seed``.
    It is not saved, because the drawn samples must stay secret. A resumed run without a seed therefore draws new
    batches, which protect equally well. With a seed it draws the same batches as an uninterrupted run.

    **Several processes** draw the same sample from the same key, and each process takes an equal part of it, to within
    one sample. The union is one Poisson sample with the same q. Give all processes the same ``seed`` or ``key``.

    Args:
        size: Number of samples n, at least 1.
        sample_rate: Probability q, above 0, at most 1.
        steps: Number of batches in an epoch; None for 1/q, rounded.
        seed: An integer from 0 to 2^64 - 1 for repeatable batches, or None.
        rank: Number of this process.
        world_size: Number of processes.
        key: 32 secret bytes instead of a seed.

    Raises:
        InvalidValueError: If a number is out of its range, or several processes have neither seed nor key.
        InvalidTypeError: If an argument is of another type.

    Attributes:
        step: Number of the next batch, counted over all epochs.
        position: Number of the next batch in its epoch.

    Example:
        >>> batches = PoissonBatches(1000, sample_rate=0.1, seed=0)
        >>> len(batches), [len(batch) for batch in batches]
        (10, [113, 89, 120, 106, 116, 120, 88, 103, 109, 103])

    Reference: Chua et al., How private are DP-SGD implementations?, 2024, arXiv 2403.17673.
    """

    def __init__(
        self,
        size: int,
        sample_rate: float,
        steps: int | None = None,
        *,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        key: bytes | None = None,
    ) -> None:
        self.size = check_whole("size", size)
        self.sample_rate = check_number("sample_rate", sample_rate, "a number above 0 and at most 1")
        self.steps = max(1, round(1 / self.sample_rate)) if steps is None else check_whole("steps", steps)
        if not 0 <= rank < world_size:
            raise InvalidValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size.")
        if world_size > 1 and seed is None and key is None:
            raise InvalidValueError(
                f"world_size={world_size} without seed or key: all processes must draw the same sample, of which each "
                f"takes a part. Give all processes the same seed or key."
            )
        self.rank, self.world_size = rank, world_size
        self._repeatable = seed is not None
        self._key = key if key is not None else key_from(seed, "sampling")
        self.step, self.position = 0, 0

    def draw(self, step: int) -> Tensor:
        """Return the indices of all processes' samples in batch number ``step``, in ascending order."""
        generator = keyed_generator(hashlib.sha256(self._key + step.to_bytes(8, "little")).digest())
        # In float64, because the 24 bits of float32 would change a small rate by up to a thousandth.
        return (
            torch.rand(self.size, dtype=torch.float64, generator=generator, device="cpu")
            .lt(self.sample_rate)
            .nonzero()
            .flatten()
        )

    def remaining(self) -> Iterator[tuple[list[int], int]]:
        """Yield this process's part of each batch left in the epoch, and the size of the largest part of all."""
        for step in range(self.step, self.step + self.steps - self.position):
            indices = self.draw(step)
            yield indices[self.rank :: self.world_size].tolist(), -(-len(indices) // self.world_size)

    def advance(self) -> None:
        """Go on to the next batch."""
        self.step, self.position = self.step + 1, self.position + 1

    def start_epoch(self) -> None:
        """Let the next batch be the first of an epoch."""
        self.position = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for indices, _ in self.remaining():
            self.advance()
            yield indices
        self.start_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler, which contains no secret."""
        return {"step": self.step, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of a saved sampler; the next iteration yields the rest of its epoch only.

        Without a seed, all batches from here on are new draws.

        Raises:
            InvalidValueError: If the state does not belong to a sampler of this kind, or its position is beyond the
                epoch.
        """
        if set(state_dict) != {"step", "position"} or not 0 <= state_dict["position"] <= self.steps:
            raise InvalidValueError(
                f"expected the state of a PoissonBatches with {self.steps} batches in an epoch, got {state_dict}."
            )
        self.step, self.position = int(state_dict["step"]), int(state_dict["position"])
        if not self._repeatable:  # from the old key, not the operating system, so all processes get the same new key
            self._key = hashlib.sha256(self._key + b"resumed").digest()


class MicroBatches:
    """A batch sampler that cuts each logical batch into parts of at most ``max_size``, and records the parts.

    Every process cuts its part of a batch into the same number of micro-batches. Otherwise a model whose forward makes
    collectives would wait without end. Some micro-batches may be empty.

    Args:
        source: Called at the start of a pass; yields this process's indices of each batch and the size of the largest
            part of any process.
        max_size: The largest size of a micro-batch; None for no limit.
        stand_in: An index to yield instead of an empty micro-batch; None to yield nothing.
        parts: The number of micro-batches of each batch, whatever its size; None for as many as ``max_size`` needs.

    Attributes:
        plan: For each micro-batch, yielded or not, in order: its size, whether it has a batch of data, and whether it
            ends a logical batch.
    """

    def __init__(self, source: Any, max_size: int | None, stand_in: int | None, parts: int | None = None) -> None:
        self._source, self._max_size, self._stand_in, self._parts = source, max_size, stand_in, parts
        self.plan: deque[SampledMicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.plan = deque()  # a new deque, because an iterator that was left early may still append to the old one
        return self._cut(self.plan)

    def _cut(self, plan: "deque[SampledMicroBatch]") -> Iterator[list[int]]:
        for indices, largest in self._source():
            parts = self._parts
            if not parts:
                limit = self._max_size or max(1, largest)
                parts = max(1, -(-largest // limit))  # rounded up
            stand_in: list[int] = []
            if self._stand_in is not None and (largest or self._parts):
                stand_in = [self._stand_in]
            for k in range(parts):
                part = indices[k::parts]
                shown = part or stand_in
                plan.append(SampledMicroBatch(len(part), bool(shown), k == parts - 1))
                if shown:
                    yield shown


@dataclass(frozen=True, slots=True)
class SampledMicroBatch:
    """The properties of one micro-batch.

    Attributes:
        size: Number of samples that were drawn.
        has_data: Whether the loader yields a batch for it, which is a stand-in if ``size`` is 0.
        ends: Whether it is the last micro-batch of its logical batch.
    """

    size: int
    has_data: bool
    ends: bool

"""Poisson sampling: each sample joins each batch independently, which is what the accounting of privacy assumes."""

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
    r"""Batches whose size is random: each of n samples joins each batch with probability q, whatever else happens.

    A batch has nq samples on average, with variance nq(1 − q), **and may be empty**: a ``DataLoader`` whose
    ``collate_fn`` cannot take an empty list needs `make_private`, which deals with empty batches itself. Shuffled
    batches of a fixed size are something else: with them the same noise may protect ten times less (Chua et al.).

    Which samples step number t draws follows from a key and t alone. The key comes from the operating system, or from
    ``seed``; it is not saved, because which samples were drawn must stay secret. So a resumed run without a seed draws
    new batches, which are as good, and with a seed the batches that it would have drawn.

    **Several processes** draw the same sample from the same key, and take each an equal part of it, to within one.
    The union is one Poisson sample with the same q. Give all of them the same ``seed`` or ``key``.

    Args:
        size: Number of samples n, at least 1.
        sample_rate: Probability q, above 0, at most 1.
        steps: Batches in an epoch; None: 1/q, rounded.
        seed: An integer from 0 to 2^64 - 1 for repeatable batches, or None.
        rank: Number of this process.
        world_size: Number of processes.
        key: 32 secret bytes instead of a seed.

    Raises:
        InvalidValueError: If a number is out of its range, or there are several processes and neither seed nor key.
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
                f"takes a part. Give all of them the same."
            )
        self.rank, self.world_size = rank, world_size
        self._repeatable = seed is not None
        self._key = key if key is not None else key_from(seed, "sampling")
        self.step, self.position = 0, 0

    def draw(self, step: int) -> Tensor:
        """Return the indices of all processes' samples in batch number ``step``, in ascending order."""
        generator = keyed_generator(hashlib.sha256(self._key + step.to_bytes(8, "little")).digest())
        # float64: the 24 bits of a float32 would change a small rate by as much as a thousandth.
        return (
            torch.rand(self.size, dtype=torch.float64, generator=generator, device="cpu")
            .lt(self.sample_rate)
            .nonzero()
            .flatten()
        )

    def remaining(self) -> Iterator[tuple[list[int], int]]:
        """Yield this process's part of each batch that is left in the epoch, and the largest part of any process."""
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
        """Return where the sampler stands. There is no secret in it."""
        return {"step": self.step, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a saved sampler stood; the next epoch that is iterated over is only the rest of that one.

        Without a seed all batches from here on are new: what was drawn before is not drawn again.

        Raises:
            InvalidValueError: If the state is not one of this kind, or of longer epochs.
        """
        if set(state_dict) != {"step", "position"} or not 0 <= state_dict["position"] <= self.steps:
            raise InvalidValueError(
                f"expected the state of a PoissonBatches with {self.steps} batches in an epoch, got {state_dict}."
            )
        self.step, self.position = int(state_dict["step"]), int(state_dict["position"])
        if not self._repeatable:  # from the key, not from the operating system: all processes must do the same
            self._key = hashlib.sha256(self._key + b"resumed").digest()


class MicroBatches:
    """Cuts each logical batch into parts of at most ``max_size``, and remembers what it did; a batch sampler.

    Every process cuts its part of a batch into the same number of micro-batches, so that models whose forward talks
    to other processes do not wait for ever; some may be empty then.

    Args:
        source: Called at the start of a pass; gives this process's indices of each batch and the largest part of any
            process.
        max_size: None does not cut.
        stand_in: An index that is yielded instead of an empty micro-batch; None yields nothing then.
        parts: Into how many micro-batches each batch is cut, whatever its size; None: as many as ``max_size`` needs.

    Attributes:
        plan: For each micro-batch that was handed out or left out, in order: its size, whether a batch of data comes
            with it, and whether it ends a logical batch.
    """

    def __init__(self, source: Any, max_size: int | None, stand_in: int | None, parts: int | None = None) -> None:
        self._source, self._max_size, self._stand_in, self._parts = source, max_size, stand_in, parts
        self.plan: deque[SampledMicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.plan = deque()  # a new one: an iterator that was left early may still add to the old one
        return self._cut(self.plan)

    def _cut(self, plan: "deque[SampledMicroBatch]") -> Iterator[list[int]]:
        for indices, largest in self._source():
            parts = self._parts or max(1, -(-largest // (self._max_size or max(1, largest))))
            stand_in = [] if self._stand_in is None or not (largest or self._parts) else [self._stand_in]
            for k in range(parts):
                part = indices[k::parts]
                shown = part or stand_in
                plan.append(SampledMicroBatch(len(part), bool(shown), k == parts - 1))
                if shown:
                    yield shown


@dataclass(frozen=True, slots=True)
class SampledMicroBatch:
    """The facts of one micro-batch.

    Attributes:
        size: Number of samples that were drawn.
        has_data: Whether the loader yields something; a stand-in where ``size`` is 0.
        ends: Whether it is the last of its logical batch.
    """

    size: int
    has_data: bool
    ends: bool

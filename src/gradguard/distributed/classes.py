"""Which gradients of a list add up alike, so that the norm of all needs few numbers."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from gradguard.tensors.layout import meeting_device, move
from gradguard.tensors.norms import joined_norms, tensor_norms, total_norm


class Classes:
    """The gradients of one list in classes, each of which one number stands for in the all-reduce.

    Those of one group and one replication factor are together. A whole gradient may be missing on some processes, so
    that it needs a place of its own; and so has every gradient of a group whose rule asks for the norm of each.

    Args:
        weights: One over the number of processes that hold the same part of each.
        whole: Whether every process holds all of it.
        device: Where norms are added up.
        groups: The group of each gradient, the same on all processes; None if all are in one.
        each: For each group whether its gradients stay by themselves.

    Attributes:
        weights: Those of the classes.
        of_group: Which classes each group has.
        each: For each group whether its gradients are by themselves.
    """

    def __init__(
        self,
        weights: Sequence[float],
        whole: Sequence[bool],
        device: torch.device,
        groups: Sequence[int] | None = None,
        each: Sequence[bool] = (False,),
    ) -> None:
        self.each = each
        self._holders, self._is_whole, self._device = weights, whole, device
        by_key: dict[tuple[int, bool, float], list[int]] = {}
        for i, group in enumerate(groups or [0] * len(weights)):
            is_alone = each[group] or whole[i]
            by_key.setdefault((group, is_alone, i if is_alone else weights[i]), []).append(i)
        # Every process has the same classes, also a pipeline stage that has no parameter of some of them.
        keys = sorted(by_key)
        self._members = [by_key[key] for key in keys]
        counts = Counter(group for group, _, _ in keys)
        starts = [0, *accumulate(counts[group] for group in range(len(each)))]
        self.of_group = [slice(*ends) for ends in pairwise(starts)]
        class_of = [0] * len(weights)
        for k, members in enumerate(self._members):
            for i in members:
                class_of[i] = k
        self._class_of = torch.tensor(class_of, dtype=torch.int64, device=device)
        self.weights = torch.tensor([weights[m[0]] for m in self._members], dtype=torch.float64, device=device)
        self._several = {k: itemgetter(*members) for k, members in enumerate(self._members) if len(members) > 1}
        self._one = [k for k, members in enumerate(self._members) if len(members) == 1]
        self._last_shares: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Return how many classes there are."""
        return len(self._members)

    def grouped(self, groups: Sequence[int], each: Sequence[bool]) -> "Classes":
        """Return those of the same gradients in several groups.

        Args:
            groups: The group of each.
            each: For each group whether its gradients stay by themselves.
        """
        return Classes(self._holders, self._is_whole, self._device, groups, each)

    def norms(self, parts: Sequence[Tensor], order: float) -> Tensor:
        """Return the norm of what this process holds of each class: ``[len(self)]``, float64."""
        alone = tensor_norms([parts[self._members[k][0]] for k in self._one], order)
        if not self._several:
            return alone.double()
        several = [total_norm(members(parts), order) for members in self._several.values()]
        where = meeting_device([alone, *several])
        norms = torch.zeros(len(self), dtype=torch.float64, device=where)
        for k, norm in zip([*self._several, *self._one], [*several, *alone.unbind()], strict=True):
            norms[k] = move(norm, where, torch.float64)
        return norms

    def joined(self, norms: Tensor, order: float) -> Tensor:
        """Return the norm of each class from that of each gradient's part, of a finite order, without overflow."""
        return joined_norms(norms, move(self._class_of, norms.device), len(self), order)

    def of(self, positions: Tensor) -> Tensor:
        """Return the class of each of these gradients; a whole one is a class by itself."""
        return self._class_of[move(positions, self._class_of.device)]

    def shares(self, shares: Tensor) -> Tensor:
        """Return the shares of the classes from those of the gradients: not 0 where this process has any."""
        if self._last_shares is None or self._last_shares[0] is not shares:
            added = shares.new_zeros(len(self)).index_add(0, move(self._class_of, shares.device), shares)
            self._last_shares = shares, added
        return self._last_shares[1]

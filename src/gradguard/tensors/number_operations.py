"""The operations of `gradguard.threshold_formulas` on tensors, without a host sync."""

import torch
from torch import Tensor


class _Tensors:
    """The operations on tensors."""

    @staticmethod
    def where(condition: Tensor, yes: float | Tensor, no: float | Tensor) -> Tensor:
        return torch.where(condition, yes, no)

    @staticmethod
    def within(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def number(x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype)

    @staticmethod
    def possible(condition: Tensor) -> bool:
        del condition
        return True

    larger = staticmethod(torch.maximum)
    smaller = staticmethod(torch.minimum)
    ratio = staticmethod(torch.div)
    is_infinite = staticmethod(torch.isposinf)
    logical_not = staticmethod(torch.logical_not)
    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    sqrt = staticmethod(torch.sqrt)
    floor = staticmethod(torch.floor)


TENSORS = _Tensors()


def median_of_stored(rows: Tensor, stored: Tensor) -> Tensor:
    """Return the median of the ``stored`` smallest numbers of each row; for an even count the mean of the middle two.

    Args:
        rows: ``[..., length]``.
        stored: The number of stored numbers in each row, ``[...]``. All other entries must be larger, such as infinity.
            For 0 the result is the smallest entry of the row.
    """
    middle = torch.stack([(stored - 1) // 2, stored // 2], dim=-1).clamp(0, rows.shape[-1] - 1)
    return rows.sort(dim=-1).values.gather(-1, middle).mean(dim=-1)

"""Random draws of a batch, noted, and handed out again by sample: so that a sample alone meets the batch's dropout."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NoReplayError(Exception):
    """The run of one sample draws other random numbers than the batch did."""


class RecordedDraws(TorchDispatchMode):
    """Notes every random tensor that is drawn in a block.

    Attributes:
        draws: The tensors, in order.
        narrowed: A float64 value that has a gradient became float32: the code computes in float32 inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor] = []
        self.narrowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args):
            self.draws.append(_random_part(func, args, result).detach().clone())
        elif func is torch.ops.aten._to_copy.default:
            source = args[0]
            self.narrowed |= source.dtype == torch.float64 and result.dtype == torch.float32 and source.requires_grad
        return result


class ReplayedDraws(TorchDispatchMode):
    """Lets a run of one sample draw what the batch has drawn for it; also when a checkpoint runs it again.

    Args:
        draws: Of the batch.
        sample: Which sample.
        size: Number of samples in the batch.
    """

    def __init__(self, draws: list[Tensor], sample: int, size: int) -> None:
        super().__init__()
        self._draws, self._sample, self._size = draws, sample, size
        self._position: dict[bytes, int] = {}  # by the generator's state before: a checkpoint puts the state back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _draws(func, args):
            return func(*args, **(kwargs or {}))
        state = torch.get_rng_state().numpy().tobytes()
        position = self._position.setdefault(state, len(self._position))
        result = func(*args, **(kwargs or {}))
        if position >= len(self._draws):
            raise NoReplayError(f"draw {position} of {len(self._draws)}")
        drawn = _random_part(func, args, result)
        drawn.copy_(self._of_sample(self._draws[position], drawn))
        return _with_draw(func, args, result, drawn)

    def _of_sample(self, batch: Tensor, one: Tensor) -> Tensor:
        if batch.shape == one.shape:
            return batch
        dims = [d for d in range(one.dim()) if batch.dim() == one.dim() and batch.shape[d] != one.shape[d]]
        if len(dims) != 1 or batch.shape[dims[0]] != self._size * one.shape[dims[0]]:
            raise NoReplayError(f"the batch drew {tuple(batch.shape)}, one sample {tuple(one.shape)}")
        length = one.shape[dims[0]]
        return batch.narrow(dims[0], self._sample * length, length)


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _draws(func: Any, args: Any) -> bool:
    # Attention on the CPU drops nothing by itself: with dropout it is made of other operators.
    if _name(func) in ("rrelu_with_noise", "rrelu_with_noise_"):
        return len(args) > 4 and args[4]  # in training
    return torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in _name(func)


def _random_part(func: Any, args: Any, result: Any) -> Tensor:
    """What is random in the result: the mask, where there is one."""
    if _name(func) == "native_dropout":
        return result[1]
    return args[1] if _name(func) in ("rrelu_with_noise", "rrelu_with_noise_") else result


def _with_draw(func: Any, args: Any, result: Any, drawn: Tensor) -> Any:
    """The result for a replaced draw."""
    if _name(func) == "native_dropout":
        return args[0] * drawn * (1 / (1 - args[1]) if args[1] < 1 else 0.0), drawn
    if _name(func) == "rrelu_with_noise":
        return torch.where(args[0] <= 0, args[0] * drawn, args[0])
    return result

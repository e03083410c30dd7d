"""What a clip did, as one frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ClipResult:
    """What a clip did on one step. Every number stays on its device until it is read, so nothing waits for it.

    Attributes:
        norm: 2-norm of all gradients as one vector *before* the clip; 0-dim, float32 (float64 for float64 gradients).
        coefficient: The 2-norm after the clip over the 2-norm before, in [0, 1]; 0-dim float64. Under the norm rule
            it is what every gradient was multiplied by.
        clipped: Whether the clip binds on this step; 0-dim bool.
        nonfinite: Whether any gradient held NaN or infinity; 0-dim bool.
        tensor_norms: 2-norm of each gradient before the clip; ``[len(names)]``, float64.
        names: The parameter that each entry of ``tensor_norms`` belongs to.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> result = gg.apply_gradient_clipping(layer, "norm", 1.0)
        >>> float(result.norm), bool(result.clipped), result.names
        (5.0, True, ('weight',))
    """

    norm: Tensor
    coefficient: Tensor
    clipped: Tensor
    nonfinite: Tensor
    tensor_norms: Tensor
    names: Sequence[str]

"""Strategies for properties: gradients of any shape, dtype, layout and magnitude, missing and repeated ones."""

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor, nn

from cases import DTYPES, parameter

SHAPES = [(), (0,), (1,), (7,), (3, 4), (2, 3, 4, 5), (1025,), (17, 100)]
LAYOUTS = {
    "in one piece": lambda g: g,
    "transposed": lambda g: g.t().contiguous().t() if g.dim() == 2 else g,
    "channels last": lambda g: g.to(memory_format=torch.channels_last) if g.dim() == 4 else g,
    "every other element": lambda g: torch.stack([g, g], -1)[..., 0],
    "sparse": lambda g: g.to_sparse(1) if g.dim() and g.numel() and g.dtype in (torch.float32, torch.float64) else g,
}
SIZES = {"zero": 0.0, "tiny": 1e-25, "small": 1e-4, "one": 1.0, "large": 3e3, "huge": 1e25}
"""Magnitudes of the elements; each is limited to the range of the dtype."""


@dataclass(frozen=True)
class Recipe:
    """A gradient that can be created repeatedly: the same bits in memory of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    size: str
    seed: int

    def made(self) -> Tensor:
        values = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        largest = torch.finfo(self.dtype).max
        return LAYOUTS[self.layout]((values * SIZES[self.size]).clamp(-largest, largest).to(self.dtype))


gradients = st.builds(
    Recipe,
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from([*LAYOUTS]),
    st.sampled_from([*SIZES]),
    st.integers(0, 9),
)
"""One gradient, dense or with whole rows missing."""

lists_of_gradients = st.lists(gradients, min_size=1, max_size=5)
"""Gradients of mixed shapes, dtypes and layouts, as in a model."""


@dataclass(frozen=True)
class ParameterList:
    """Parameters by the recipes of their gradients, None without one; ``order`` may name one twice, or leave it out."""

    recipes: tuple[Recipe | None, ...]
    order: tuple[int, ...]

    def made(self) -> list[nn.Parameter]:
        """Create them, with weights of 0.1, in the order in which a clip receives them."""
        each = [
            nn.Parameter(torch.full((2,), 0.1)) if recipe is None else _parameter(recipe) for recipe in self.recipes
        ]
        return [each[i] for i in self.order]


def _parameter(recipe: Recipe) -> nn.Parameter:
    return parameter(recipe.made(), torch.full(recipe.shape, 0.1, dtype=recipe.dtype))


@st.composite
def parameter_lists(draw) -> ParameterList:
    """Lists of parameters, some without a gradient, some named twice."""
    recipes = draw(st.lists(st.none() | gradients, min_size=1, max_size=5))
    order = draw(st.lists(st.integers(0, len(recipes) - 1), min_size=1, max_size=6))
    return ParameterList(tuple(recipes), tuple(order))

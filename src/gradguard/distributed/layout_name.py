"""The layout of a DTensor as plain data: equal in all ranks and programs that lay a tensor out equally."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradguard.distributed.placements import is_sharded, sharded_as


class LayoutName(NamedTuple):
    """The name of a layout.

    Attributes:
        mesh: Shape of the device mesh, names of its dimensions or None, and its ranks.
        placements: The placement along each mesh dimension, as text.
    """

    mesh: tuple[Any, ...]
    placements: tuple[str, ...]

    def __str__(self) -> str:
        """Return the name as text."""
        return f"{', '.join(self.placements)} over {mesh_in_words(self.mesh)}"


def layout_name(laid_out: Any) -> LayoutName:
    """Return the name of the layout of a DTensor, or of its spec."""
    mesh = laid_out.device_mesh
    key = tuple(mesh.shape), mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist())
    return LayoutName(key, tuple(map(repr, laid_out.placements)))


def mesh_in_words(mesh: Sequence[Any]) -> str:
    """Describe a name's mesh as text."""
    shape, names, ranks = mesh
    return f"a device mesh of shape {list(shape)}{f' named {names}' if names else ''} over the ranks {list(ranks)}"


class KnownLayouts:
    """The layouts of this program, by name.

    Args:
        tensors: DTensors, whose device meshes other tensors may use.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        sharded: list[Any] = [t for t in tensors if is_sharded(t)]
        self._meshes = {layout_name(t).mesh: t.device_mesh for t in sharded}
        self._placements = (_usual_placements() if sharded else {}) | {
            repr(kind): kind for t in sharded for kind in t.placements
        }

    def has_mesh(self, mesh: Sequence[Any]) -> bool:
        """Tell whether this program has such a mesh."""
        return mesh in self._meshes

    def laid_out(self, local: Tensor, name: LayoutName, shape: Any, stride: Any) -> Tensor:
        """Return a DTensor whose shard on this rank is ``local``; nothing is compared or sent.

        Raises:
            ValueError: If the number of placements does not match the mesh.
        """
        mesh = self._meshes[name.mesh]
        if len(name.placements) != mesh.ndim:
            raise ValueError("a shard has another number of placements than its mesh has dimensions")
        return sharded_as(local, mesh, [self._placements[text] for text in name.placements], shape, stride)


def _usual_placements() -> dict[str, Any]:
    """Return Replicate and Shard of up to 8 dimensions, by their text."""
    from torch.distributed.tensor import Replicate, Shard

    return {repr(kind): kind for kind in (Replicate(), *(Shard(dim) for dim in range(8)))}

"""Short tensors put together: exactly the elements of the list, whatever has changed since the last one."""

import weakref

import pytest
import torch

from cases import GRADIENTS, ORDERS, random
from gradguard import native
from gradguard.tensors import side_by_side
from gradguard.tensors.norms import total_norm
from gradguard.tensors.side_by_side import SideBySide

pytestmark = pytest.mark.usefixtures("without_kernels")


def usual():
    """Two widths, two that are long, one without dimensions, and another dtype."""
    shapes = [(3, 4), (2, 4), (5,), (7,), (1, 4), (200, 100), (300, 100)]
    found = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    return [*found, torch.tensor(3.0), random(6, seed=8, dtype=torch.float16), random(2, seed=9, dtype=torch.float16)]


CHANGES = {
    "nothing": lambda t: t.clone(),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "length": lambda t: random(9, 4),
    "width": lambda t: random(3, 5),
    "dimensions": lambda t: random(2, 3, 4),
    "no dimension": lambda t: torch.tensor(2.0),
    "long": lambda t: random(5000, 4),
    "empty": lambda t: torch.empty(0),
    "strides": lambda t: random(4, 3).t(),
    "expanded": lambda t: random(1, 4).expand(3, 4),
    "float64": lambda t: random(3, 4, dtype=torch.float64),
    "huge float64": lambda t: torch.full((3, 4), 1e200, dtype=torch.float64),
    "bfloat16": lambda t: random(3, 4, dtype=torch.bfloat16),
    "complex": lambda t: torch.complex(random(3, 4), random(3, 4, seed=1)),
    "complex conjugate": lambda t: torch.complex(random(3, 4), random(3, 4, seed=1)).conj(),
    "sparse": lambda t: random(3, 4).to_sparse(),
    "huge": lambda t: torch.full((3, 4), 1e30),
    "NaN": lambda t: torch.full((3, 4), torch.nan),
}


def elements(tensors):
    dense = [(t.to_dense() if t.is_sparse else t).detach().to(torch.complex128).flatten() for t in tensors]
    values = torch.cat([x.resolve_conj() for x in dense])
    return values.abs().sort().values


@pytest.mark.parametrize("change", CHANGES)
def test_the_elements_are_those_of_the_list_whatever_changes(change):
    join, before = SideBySide(), usual()
    join(before)
    after = [CHANGES[change](before[0]), *(t.clone() for t in before[1:])]
    for tensors in (after, before, after, [*before, random(3, 4)], before[:-1]):
        joined = join(tensors)
        torch.testing.assert_close(elements(joined), elements(tensors), rtol=0, atol=0, equal_nan=True)
        for order in ORDERS:
            torch.testing.assert_close(
                total_norm(joined, order), total_norm(tensors, order), rtol=2e-6, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("case", GRADIENTS)
def test_awkward_gradients(case):
    join, tensors = SideBySide(), GRADIENTS[case]
    for _ in range(2):
        torch.testing.assert_close(elements(join(tensors)), elements(tensors), rtol=0, atol=0, equal_nan=True)


def test_a_known_list_is_joined_without_a_look(monkeypatch):
    join, looked = SideBySide(), []
    real = side_by_side._may_be_joined
    monkeypatch.setattr(side_by_side, "_may_be_joined", lambda t: looked.append(t) or real(t))
    assert len(join(usual())) == 6  # two widths of float32, one of float16, the long ones, that without dimensions
    assert len(looked) == len(usual())
    join([t + 1 for t in usual()])
    assert len(looked) == len(usual())
    join(usual()[1:])
    assert len(looked) == 2 * len(usual()) - 1


def test_copies_are_no_larger_than_a_block():
    tensors = [random(side_by_side.SHORT, seed=i) for i in range(2 * side_by_side.BLOCK // side_by_side.SHORT + 1)]
    joined = SideBySide()(tensors)
    assert sorted(map(len, joined)) == [side_by_side.SHORT, side_by_side.BLOCK, side_by_side.BLOCK]
    assert joined[-1] is tensors[-1]


def test_gradients_are_not_kept_alive():
    join, tensors = SideBySide(), usual()
    there = [weakref.ref(t) for t in tensors]
    join(tensors)
    tensors.clear()
    assert [t() for t in there] == [None] * len(there)


def test_compiled_kernels_need_no_copies(monkeypatch):
    monkeypatch.undo()
    tensors = usual()
    joined = SideBySide()(tensors)
    if native.library() is None:
        return
    assert all(a is b for a, b in zip(joined, tensors, strict=True))

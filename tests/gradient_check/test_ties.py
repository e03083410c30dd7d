"""At ties a gradient is right if it is that of one of the pieces that meet, as eigenvalues have it for any basis."""

import pytest
import torch

import gradguard as gg
from gradient_check.wrong_kernels import wrong

D = torch.float64
IDENTITY, TWO_ALIKE = torch.eye(4, dtype=D), torch.diag(torch.tensor([1.0, 1, 2, 3], dtype=D))


def eigenvalues(x):
    return torch.linalg.eigvalsh(x + x.T)


def of_eigenvalues(factors):
    """The backward of the eigenvalues with a factor for each."""
    return lambda v, y, x: gradient_of(eigenvalues, x, v * torch.tensor(factors, dtype=D))


def gradient_of(fn, x, v):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(fn(leaf), leaf, v)[0]


RIGHT = {
    "singular values of the identity": (torch.linalg.svdvals, IDENTITY),
    "eigenvalues of the identity": (eigenvalues, IDENTITY),
    "two equal eigenvalues": (eigenvalues, TWO_ALIKE),
    "spectral norm of the identity": (lambda x: torch.linalg.matrix_norm(x, 2), IDENTITY),
    "singular values, one of them 0": (torch.linalg.svdvals, torch.ones(3, 2, dtype=D)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RIGHT)
def test_a_limiting_gradient_is_right(name, seed):
    fn, x = RIGHT[name]
    assert gg.gradcheck(fn, x, seed=seed).verdict == "PASS"


OUTSIDE = [(IDENTITY, (1.01,) * 4), (TWO_ALIKE, (1.01,) * 4), (TWO_ALIKE, (1, 1, 1, 1.1)), (TWO_ALIKE, (1, -1, 1, 1))]


@pytest.mark.parametrize(("x", "factors"), OUTSIDE)
def test_one_outside_of_all_pieces_is_not(x, factors):
    """Between the pieces nothing can be told: several outputs may take theirs from different ones."""
    assert gg.gradcheck(wrong(eigenvalues, of_eigenvalues(factors)), x).verdict == "FAIL"


def test_nan_at_equal_eigenvalues_is_no_mistake_and_no_pass():
    report = gg.gradcheck(lambda x: torch.linalg.eigh(x + x.T), IDENTITY)
    assert report.verdict == "INCONCLUSIVE"
    assert "choose another point" in str(report)
    assert report.findings[0].input == "x"


def test_nan_where_nothing_jumps_still_fails():
    def backward(v, y, x):
        return torch.where(torch.arange(16).view(4, 4) == 5, torch.nan, gradient_of(eigenvalues, x, v))

    report = gg.gradcheck(wrong(eigenvalues, backward), TWO_ALIKE)
    assert [(one.kind, one.index) for one in report.findings] == [("nan", (1, 1))]

"""As many samples as rows and values: a constant of one entry for each sample fits along any dimension.

Along another than the samples' it couples them; that is refused. Each right loss has a wrong twin.
"""

import pytest
import torch
import torch.nn.functional as F
from generated_losses import TIME as B
from generated_losses import Checked, draw_squarely, glance
from torch import Tensor

from gradguard.errors import UnsupportedGradientError

OWN = {
    "[B, T]": lambda y: y[..., 0],
    "[B, 1]": lambda y: y.mean((1, 2))[:, None],
}
SHARED = "the same ones for every sample|which all samples share in the loss, has changed"
OF_OTHERS = {
    "[B]": lambda y: y.mean((1, 2)),
    "[1, B]": lambda y: y.mean((1, 2))[None],
    "repeated": lambda y: y.mean((1, 2)).repeat(B, 1),
    "expanded": lambda y: y.mean((1, 2)).expand(B, B),
}
BESIDE = {
    "mse_loss": lambda o, y: F.mse_loss(o, y.expand(B, B)),
    "l1_loss": lambda o, y: F.l1_loss(o, y.expand(B, B)),
    "smooth_l1_loss": lambda o, y: F.smooth_l1_loss(o, y.expand(B, B), reduction="none").mean(),
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": lambda o, y: F.binary_cross_entropy(o.sigmoid(), y.sigmoid().expand(B, B)),
    "weight=": lambda o, y: F.binary_cross_entropy_with_logits(o, o.detach().sigmoid(), weight=y.exp()),
    "poisson_nll_loss": lambda o, y: F.poisson_nll_loss(o, y.abs()),
    "squares": lambda o, y: (o - y).square().mean(),
    "of the target": lambda o, y: (y - 2 * o).square().sum() / B,
    "of probabilities": lambda o, y: (o.softmax(-1) - y).square().mean(),
    "softplus": lambda o, y: F.softplus(o - y).mean(),
    "norm": lambda o, y: (o - y).norm(dim=1).mean(),
    "variance": lambda o, y: F.gaussian_nll_loss(o, torch.zeros_like(o), y.exp().expand(B, B)),
    "weights": lambda o, y: (o.square() * y.exp()).mean(),
    "weights of outputs": lambda o, y: (o * y).mean(),
    "divisors": lambda o, y: (o.square() / y.exp()).mean(),
    "power": lambda o, y: o.sigmoid().pow(y.exp()).mean(),
    "where": lambda o, y: torch.where(y > 0, o, o.square()).mean(),
    "mask": lambda o, y: o.masked_fill(y > 0, 0.0).square().mean(),
    "maximum": lambda o, y: torch.maximum(o, y).mean(),
    "cosine": lambda o, y: F.cosine_similarity(o, y.expand(B, B), dim=1).mean(),
    "similarities": lambda o, y: (o.unsqueeze(1) @ y.expand(B, B).unsqueeze(-1)).square().mean(),
}
KEPT = [
    *["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "weight=", "weights"],
    *["weights of outputs", "divisors", "power", "maximum", "cosine"],
]
"""Those whose graph keeps the constant as it was given."""
TIME_FIRST = {
    "targets": lambda o, y: F.mse_loss(o.T, y.mT),
    "weights": lambda o, y: (o.T.square() * y.exp().mT).mean(),
}
OTHERS = {
    "targets [B, C] beside [B, T, C]": lambda out, y: F.mse_loss(out, y.mean(1).expand_as(out)),
    "distances to [B, C]": lambda out, y: torch.cdist(out, y.mean(1)[None]).mean(),
    "products with [B, C]": lambda out, y: (out @ y.mean(1)).square().mean(),
    "products with [B]": lambda out, y: (out[..., 0] @ y.mean((1, 2))).square().mean(),
    "an einsum": lambda out, y: torch.einsum("btc,tc->bt", out, y.mean(1)).square().mean(),
    "columns": lambda out, y: out.square()[:, y.mean((1, 2)) > 0].mean(),
    "a constant that the graph does not keep": lambda out, y: F.relu(out[..., 0] + y.mean((1, 2))).mean(),
    "hypot": lambda out, y: torch.hypot(out[..., 0], y.mean((1, 2))).mean(),
    "logaddexp": lambda out, y: torch.logaddexp(out[..., 0], y.mean((1, 2))).mean(),
    "remainder": lambda out, y: torch.remainder(out[..., 0], 1 + y.mean((1, 2)).abs()).square().mean(),
    "prelu": lambda out, y: F.prelu(out[..., 0], y.mean((1, 2))).mean(),
    "layer norm": lambda out, y: F.layer_norm(out[..., 0], (B,), y.mean((1, 2))).square().mean(),
    "a kernel": lambda out, y: F.conv1d(out[..., 0][:, None], y.mean((1, 2))[None, None]).square().mean(),
    "stack": lambda out, y: torch.stack([out[..., 0], y.mean((1, 2)).expand(B, B)]).norm(dim=0).mean(),
    "cat": lambda out, y: torch.cat([out[..., 0], y.mean((1, 2)).expand(B, B)], 1).logsumexp(1).mean(),
}

RIGHT = {
    "charbonnier": lambda o, y: ((o - y).square() + 1e-6).sqrt().mean(),
    "a constant in front": lambda o, y: (y.exp() * (o - y)).square().mean(),
    "normalized": lambda o, y: (F.normalize(o, dim=1) - y).square().mean(),
}


def checked(loss, *batches: list[int]) -> list[Tensor]:
    """Each sample's gradient in the first mini-batches of a run."""
    case = draw_squarely(0)
    case.reduction, case.private, case.dtype, case.autocast = "mean", False, torch.float64, False
    case.terms, case.others, case.inside = [lambda out, batch, step, case: loss(out, batch.y)], [], False
    case.divided, case.ragged, case.missing, case.hidden = False, "full", "no", False
    found = Checked(case)
    return [found.step(list(ids), 0) for ids in batches]


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("shape", OWN)
def test_a_constant_of_each_sample_is_exact(beside, shape):
    [one], [other] = (
        checked(lambda out, y: BESIDE[beside](out[..., 0], OWN[shape](y)), ids) for ids in ((0, 1, 2, 3), (0, 1, 2, 4))
    )
    torch.testing.assert_close(one[:3], other[:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_taken_in_the_first_batch(name):
    [one], [other] = (
        checked(lambda out, y: RIGHT[name](out[..., 0], y[..., 0]), ids) for ids in ((0, 1, 2, 3), (0, 1, 2, 4))
    )
    torch.testing.assert_close(one[:3], other[:3], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["soft_margin_loss", "mse_loss", "where", "weights"])
def test_constants_of_other_samples_are_refused_also_where_these_are_alike(name):
    with pytest.raises(UnsupportedGradientError, match="the same ones for every sample"):
        checked(lambda out, y: BESIDE[name](out[..., 0], torch.ones_like(y[:, 0, 0])), range(B))


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("shape", OF_OTHERS)
def test_a_constant_of_other_samples_is_refused(beside, shape):
    with pytest.raises(UnsupportedGradientError, match="a constant of 4 entries, the same ones for every sample"):
        checked(lambda out, y: BESIDE[beside](out[..., 0], OF_OTHERS[shape](y)), range(B))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_transposed_targets_are_refused(name, later):
    """The graph keeps views as they are; what is subtracted, or copied, does not show it."""
    lies = [lambda y: y, lambda y: y.T] if later else [lambda y: y.T, None]
    with pytest.raises(UnsupportedGradientError, match="transposed constant of shape"):
        checked(lambda out, y: BESIDE[name](out[..., 0], lies.pop(0)(y[..., 0])), range(B), range(B))


@pytest.mark.parametrize("name", TIME_FIRST)
def test_samples_may_lie_along_the_second_dimension(name):
    checked(lambda out, y: TIME_FIRST[name](out[..., 0], y.mean((1, 2)).expand(B, B).T), range(B))
    with pytest.raises(UnsupportedGradientError, match="the same ones for every sample"):
        checked(lambda out, y: TIME_FIRST[name](out[..., 0], y.mean((1, 2)).expand(B, B)), range(B))


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_reach_other_samples_are_refused(name):
    with pytest.raises(UnsupportedGradientError, match=r"constant of 4 entries|takes a constant beside|does not show"):
        checked(OTHERS[name], range(B))


@pytest.mark.parametrize("name", ["mse_loss", "squares", "weights"])
def test_a_constant_of_a_size_that_was_seen_before_is_no_sample(name):
    constant = torch.linspace(-1, 1, B, dtype=torch.float64)

    def loss(out, y):
        o = out[..., 0]
        return F.mse_loss(o, constant.expand_as(o)) if name == "mse_loss" else BESIDE[name](o, constant)

    checked(loss, range(B + 1), range(B))
    with pytest.raises(UnsupportedGradientError, match="begin with a batch of another size"):
        checked(loss, range(B))


@pytest.mark.parametrize("name", ["of the target", "squares", "weights"])
def test_beside_one_sample_nothing_is_learnt_of_constants(name):
    """Outputs ``[1, T]`` beside targets ``[1]``, and then ``[T, T]`` beside ``[T]``."""
    loss = lambda out, y: BESIDE[name](out[..., 0], y.mean((1, 2)))  # noqa: E731
    checked(loss, [0])
    with pytest.raises(UnsupportedGradientError, match=SHARED):
        checked(loss, [0], range(B))


@pytest.mark.parametrize("rows", [2, 3])
def test_more_rows_than_samples_along_the_first_dimension(rows):
    """Outputs ``[T, B]`` whose T is a multiple of B, beside targets that the graph does not keep."""
    for loss in (lambda o, y: (o - y).square().mean(), lambda o, y: (o - y).abs().mean()):
        made = [
            checked(
                lambda out, y, loss=loss: loss(*(one[..., 0].repeat(1, rows)[:, : 2 * rows].T for one in (out, y))), ids
            )[0]
            for ids in ((0, 1), (0, 2))
        ]
        torch.testing.assert_close(made[0][:1], made[1][:1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("shape", OF_OTHERS)
def test_a_constant_that_loses_its_dimension_later_is_refused(beside, shape):
    lies = [OWN["[B, T]"], OWN["[B, T]"], OF_OTHERS[shape]]
    with pytest.raises(UnsupportedGradientError, match="the same ones for every sample"):
        checked(lambda out, y: BESIDE[beside](out[..., 0], lies.pop(0)(y)), *[range(B)] * 3)
    assert not lies


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("shape", OF_OTHERS)
def test_a_constant_of_other_samples_is_refused_as_soon_as_these_differ(beside, shape):
    """The first constants have one value only, or lie along no samples."""
    for first in (lambda y: torch.full_like(y[:1, :1, 0], 0.5), lambda y: torch.full_like(y[:, :, 0], 0.5)):
        lies = [first, OF_OTHERS[shape]]
        with pytest.raises(UnsupportedGradientError, match=SHARED):
            checked(lambda out, y, lies=lies: BESIDE[beside](out[..., 0], lies.pop(0)(y)), range(B), range(B))


@pytest.mark.parametrize("values", [1, 2])
@pytest.mark.parametrize("name", ["mse_loss", "squares", "weights", "where"])
def test_targets_of_one_value_are_taken_and_of_two_that_coincide_refused(name, values):
    alike = [False, True]

    def loss(out, y):
        target = y[..., 0].gt(0).double()
        coinciding = target[:1] if values == 2 else torch.ones_like(target[:1])
        return BESIDE[name](out[..., 0], coinciding.repeat(B, 1) if alike.pop(0) else target)

    if values == 1:
        checked(loss, range(B), range(B))
        return
    with pytest.raises(UnsupportedGradientError, match="the same ones for every sample"):
        checked(loss, range(B), range(B))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 8000, 20))
def test_drawn_constants_are_exact_or_refused(first):
    cases = [draw_squarely(seed) for seed in range(first, first + 20)]
    outcomes = [(case, glance(case)) for case in cases if not case.through_the_network]
    assert not [f"{case}\n{o.kind}: {o.words}" for case, o in outcomes if o.kind in ("wrong", "crash")]

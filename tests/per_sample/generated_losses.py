"""Losses drawn by seed, what each sample's own gradient is by plain autograd, and what the clipper makes of them.

The weights stay what they are over the steps of a case. So a sample that comes again, in another batch, among other
samples, must have the gradient that it had before: that is what the clip promises, and needs no opinion of what a
sample's own loss is. Two accepted batches that disagree are wrong. So is a batch that gives a sample another gradient
than among copies of itself, unless a later step tells, or it is divided by a number ("doubtful"): one batch alone
cannot say whether that is the user's own constant.

`trial` runs the clipper on a network. `glance` runs the check of the loss alone, on what a network would have
returned, which takes less time. In private training no batch counts, drawn or not, in which one sample is replaced,
added or gone: where a batch gives a sample another gradient than among copies of itself, all of these are tried as
the first ones, and one that is accepted and gives it a third gradient is wrong.

``python tests/per_sample/generated_losses.py FIRST LAST [REDUCTIONS]`` prints what came of the cases; with ``wide`` in
front, of cases drawn from all reductions and everything that is here, a third of them private; with ``glance``, of what
the check alone says, where that is enough; with both, of the former by the latter. ``square`` draws batches of as many
samples as there are rows and values, with constants along any dimension. ``behind`` draws wide cases in which a
statistic of the batch acts on a function of the outputs.
"""

import contextlib
import random
import re
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.per_sample.capture import tap
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.loss.loss_check import LossCheck

TIME, WIDTH = 4, 3
POOL = 12
SCALE = 1024.0
REPORT_EVERY = 500

# ---------------------------------------------------------------------------------------------------------------- data


@dataclass
class Batch:
    """Samples side by side; ``size`` of them. ``valid`` marks rows that count and have a label."""

    size: int
    x: torch.Tensor
    y: torch.Tensor
    cls: torch.Tensor
    valid: torch.Tensor
    n: torch.Tensor
    w_sample: torch.Tensor
    w_row: torch.Tensor
    sign: torch.Tensor
    times: torch.Tensor
    keep: torch.Tensor

    def to(self, dtype):
        moved = {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in vars(self).items()
        }
        return Batch(**moved)


def pool(case):
    """Twelve samples. Those of the first half stay as the first batches must be, where trouble begins only later."""
    r = torch.Generator().manual_seed(case.seed)
    lead = (POOL, TIME) if case.sequence else (POOL, 1)
    x = torch.randn(*lead, WIDTH, generator=r, dtype=torch.float64)
    y = torch.randn(*lead, case.width, generator=r, dtype=torch.float64)
    cls = torch.randint(0, case.width, lead, generator=r)
    most = lead[1]
    ragged = torch.randint(1, most + 1, (POOL,), generator=r)
    with_none = torch.randint(0, most + 1, (POOL,), generator=r)
    with_none[::3] = 0
    equal = torch.full((POOL,), max(most // 2, 1))
    late = torch.where(torch.arange(POOL) < POOL // 2, equal, with_none if case.seed % 2 else ragged)
    n = {"full": torch.full((POOL,), most), "equal": equal, "ragged": ragged, "with none": with_none, "later": late}[
        case.ragged
    ]
    inside = torch.arange(most)[None] < n[:, None]
    missing = torch.rand(lead, generator=r) < 0.25
    missing = {"no": missing & False, "some": missing, "later": missing & (torch.arange(POOL) >= POOL // 2)[:, None]}[
        case.missing
    ]
    valid = inside & ~missing
    data = {
        "x": x,
        "y": y,
        "cls": cls.where(valid, torch.tensor(-100)),
        "valid": valid,
        "w_row": torch.rand(lead, generator=r).double() + 0.5,
        "sign": torch.randint(0, 2, lead, generator=r) * 2.0 - 1.0,
        "times": torch.randint(1, 4, lead, generator=r),
    }
    if not case.sequence:
        data = {k: v[:, 0] for k, v in data.items()}
    data["sign"] = data["sign"].double()
    data["n"] = n
    data["w_sample"] = torch.rand(POOL, generator=r).double() + 0.5
    data["keep"] = torch.rand(POOL, generator=r) < 0.7
    if case.missing == "later" or case.ragged == "later":
        data["keep"][: POOL // 2] = True
    return data


def collate(data, ids, length=TIME):
    """Put samples side by side, cut to ``length``."""
    found = {k: v[ids] for k, v in data.items()}
    if length < TIME:
        found = {k: v[:, :length] if v.ndim > 1 else v for k, v in found.items()}
    return Batch(size=len(ids), **found)


def length_of(case, data, ids):
    """The length to which the samples of a batch are padded."""
    return max(int(data["n"][ids].max()), 1) if case.collated else TIME


# ---------------------------------------------------------------------------------------------- which rows have a loss

ROWS = {}


def _rows(fn):
    ROWS[fn.__name__] = fn
    return fn


def _flat(t, b):
    return t.flatten(0, b.valid.ndim - 1)


@_rows
def all_rows(t, b):
    return _flat(t, b)


@_rows
def as_they_are(t, b):
    return t


@_rows
def bool_index(t, b):
    return t[b.valid]


@_rows
def nonzero_index(t, b):
    return t[b.valid.nonzero(as_tuple=True)]


@_rows
def index_select(t, b):
    return _flat(t, b).index_select(0, b.valid.flatten().nonzero().squeeze(1))


@_rows
def masked_select(t, b):
    if t.ndim == b.valid.ndim:
        return t.masked_select(b.valid)
    return t.masked_select(b.valid.unsqueeze(-1)).view(-1, t.shape[-1])


@_rows
def ragged_cat(t, b):
    return torch.cat([t[i][b.valid[i]] if b.valid.ndim > 1 else t[i : i + int(b.valid[i])] for i in range(b.size)])


@_rows
def packed(t, b):
    return nn.utils.rnn.pack_padded_sequence(t, b.n.clamp(min=1), batch_first=True, enforce_sorted=False).data


@_rows
def first_rows(t, b):
    return t[:, :2].flatten(0, 1)


@_rows
def shifted(t, b):
    return t[:, 1:].flatten(0, 1)


@_rows
def first_row(t, b):
    return t[:, 0]


@_rows
def last_row(t, b):
    return t[torch.arange(b.size), (b.n - 1).clamp(min=0)]


@_rows
def half_of_the_samples(t, b):
    return t[: max(1, b.size // 2)]


@_rows
def every_other_sample(t, b):
    return t[::2]


@_rows
def kept_samples(t, b):
    return t[b.keep]


@_rows
def repeated_unequally(t, b):
    return _flat(t, b).repeat_interleave(b.times.flatten(), 0)


@_rows
def repeated_twice(t, b):
    return _flat(t, b).repeat_interleave(2, 0)


@_rows
def repeated_index(t, b):
    flat = _flat(t, b)
    return flat[torch.cat([torch.arange(len(flat)), torch.zeros(1, dtype=torch.long)])]


@_rows
def sorted_by_length(t, b):
    return t[b.n.argsort(descending=True, stable=True)]


@_rows
def time_first(t, b):
    return t.transpose(0, 1).flatten(0, 1)


@_rows
def split_and_joined(t, b):
    return torch.cat(t.split(2))


@_rows
def stacked_one_by_one(t, b):
    return torch.stack([t[i] for i in range(b.size)])


@_rows
def two_gathered(t, b):
    index = torch.stack([b.times[:, 0], b.times[:, 1] - 1], 1)
    return t.gather(1, index.view(b.size, 2, *[1] * (t.ndim - 2)).expand(b.size, 2, *t.shape[2:])).flatten(0, 1)


@_rows
def multiplied_by_a_mask(t, b):
    return t * b.valid.view(*b.valid.shape, *[1] * (t.ndim - b.valid.ndim)).to(t.dtype) if t.is_floating_point() else t


@_rows
def masked_fill(t, b):
    if not t.is_floating_point():
        return t
    return t.masked_fill(~b.valid.view(*b.valid.shape, *[1] * (t.ndim - b.valid.ndim)), 0.0)


@_rows
def padded_again(t, b):
    parts = [t[i, : int(b.n[i])] for i in range(b.size)]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)


@_rows
def cut_to_the_longest(t, b):
    return t[:, : int(b.n.max())]


OF_SEQUENCES = {
    "packed", "first_rows", "shifted", "first_row", "last_row", "time_first", "two_gathered", "padded_again",
    "cut_to_the_longest",
}  # fmt: skip
BY_PLACE = {"half_of_the_samples", "every_other_sample", "repeated_index"}
BY_MASK = {
    "all_rows", "as_they_are", "bool_index", "nonzero_index", "index_select", "masked_select", "ragged_cat", "packed",
    "first_rows", "shifted", "last_row", "sorted_by_length", "time_first", "split_and_joined", "stacked_one_by_one",
}  # fmt: skip
SAMPLES_IN_FRONT = {
    "as_they_are", "multiplied_by_a_mask", "where", "stacked_one_by_one", "masked_fill", "split_and_joined", "all_rows",
    "first_row", "last_row",
}  # fmt: skip
COMMON_ROWS = ["all_rows", "as_they_are", "bool_index", "multiplied_by_a_mask"]

# ------------------------------------------------------------------------------------------------------- loss functions
# Each takes predictions [..., width], the same rows of the targets, and the reduction.


@dataclass
class Targets:
    y: torch.Tensor
    cls: torch.Tensor
    sign: torch.Tensor
    class_weight: torch.Tensor


def _classes(p, t):
    """Class losses want [rows, classes]."""
    return p.flatten(0, -2), t.cls.flatten()


def _cross_entropy(p, t, reduction, **options):
    if p.ndim == 3 and options.pop("channels", False):
        return F.cross_entropy(p.mT, t.cls, reduction=reduction, **options)
    options.pop("channels", None)
    rows, cls = _classes(p, t)
    return F.cross_entropy(rows, cls, reduction=reduction, **options)


def _reduce(values, reduction):
    return {"mean": torch.mean, "sum": torch.sum, "none": lambda v: v}[reduction](values)


def _multilabel_margin(p, t, reduction):
    rows, cls = _classes(p, t)
    target = torch.full(rows.shape, -1, dtype=torch.long)
    target[:, 0] = cls.clamp(min=0)
    return F.multilabel_margin_loss(rows, target, reduction=reduction)


def _hand_huber(p, t, reduction):
    d = p - t.y
    return _reduce(torch.where(d.abs() < 1, 0.5 * d * d, d.abs() - 0.5), reduction)


def _hand_likelihood(p, t, reduction):
    rows, cls = _classes(p, t)
    picked = rows.log_softmax(-1).gather(1, cls.clamp(min=0).unsqueeze(1)).squeeze(1)
    return _reduce(-picked * (cls >= 0), reduction)


def _one_hot(p, t, reduction):
    rows, cls = _classes(p, t)
    hot = F.one_hot(cls.clamp(min=0), rows.shape[-1]).to(rows.dtype) * (cls >= 0).unsqueeze(1)
    return _reduce(-(hot * rows.log_softmax(-1)).sum(-1), reduction)


def _focal(p, t, reduction):
    rows, cls = _classes(p, t)
    ce = F.cross_entropy(rows, cls, reduction="none")
    return _reduce((1 - torch.exp(-ce)) ** 2 * ce, reduction)


def _quantile(p, t, reduction):
    d = t.y - p
    return _reduce(torch.maximum(0.3 * d, -0.7 * d), reduction)


def _kl_batchmean(p, t, reduction):
    reduction = "batchmean" if reduction == "mean" else reduction
    return F.kl_div(p.log_softmax(-1), t.y.softmax(-1), reduction=reduction)


FUSED = {
    "mse": lambda p, t, r: F.mse_loss(p, t.y, reduction=r),
    "l1": lambda p, t, r: F.l1_loss(p, t.y, reduction=r),
    "smooth_l1": lambda p, t, r: F.smooth_l1_loss(p, t.y, reduction=r),
    "huber": lambda p, t, r: F.huber_loss(p, t.y, reduction=r, delta=0.7),
    "bce": lambda p, t, r: F.binary_cross_entropy(p.sigmoid(), t.y.sigmoid(), reduction=r),
    "bce_logits": lambda p, t, r: F.binary_cross_entropy_with_logits(p, (t.y > 0).to(p.dtype), reduction=r),
    "bce_pos_weight": lambda p, t, r: F.binary_cross_entropy_with_logits(
        p, (t.y > 0).to(p.dtype), pos_weight=t.class_weight, reduction=r
    ),
    "soft_margin": lambda p, t, r: F.soft_margin_loss(p, t.y.sign(), reduction=r),
    "multi_margin": lambda p, t, r: F.multi_margin_loss(p.flatten(0, -2), t.cls.flatten().clamp(min=0), reduction=r),
    "multilabel_margin": _multilabel_margin,
    "multilabel_soft_margin": lambda p, t, r: F.multilabel_soft_margin_loss(
        p.flatten(0, -2), (t.y.flatten(0, -2) > 0).to(p.dtype), reduction=r
    ),
    "cross_entropy": _cross_entropy,
    "cross_entropy_channels": lambda p, t, r: _cross_entropy(p, t, r, channels=True),
    "cross_entropy_weight": lambda p, t, r: _cross_entropy(p, t, r, weight=t.class_weight),
    "cross_entropy_smooth": lambda p, t, r: _cross_entropy(p, t, r, label_smoothing=0.1),
    "cross_entropy_smooth_weight": lambda p, t, r: _cross_entropy(p, t, r, label_smoothing=0.2, weight=t.class_weight),
    "cross_entropy_soft": lambda p, t, r: F.cross_entropy(
        p.flatten(0, -2), t.y.flatten(0, -2).softmax(-1), reduction=r
    ),
    "nll": lambda p, t, r: F.nll_loss(p.flatten(0, -2).log_softmax(-1), t.cls.flatten(), reduction=r),
    "nll_weight": lambda p, t, r: F.nll_loss(
        p.flatten(0, -2).log_softmax(-1), t.cls.flatten(), weight=t.class_weight, reduction=r
    ),
    "kl": lambda p, t, r: F.kl_div(p.log_softmax(-1), t.y.softmax(-1), reduction=r),
    "kl_batchmean": _kl_batchmean,
    "poisson": lambda p, t, r: F.poisson_nll_loss(p, t.y.abs(), reduction=r),
    "gaussian": lambda p, t, r: F.gaussian_nll_loss(p, t.y, torch.full_like(p, 0.5), reduction=r),
    "gaussian_learned": lambda p, t, r: F.gaussian_nll_loss(p, t.y, p.exp() + 0.1, reduction=r),
    "cosine_embedding": lambda p, t, r: F.cosine_embedding_loss(
        p.flatten(0, -2), t.y.flatten(0, -2), t.sign.flatten(), reduction=r
    ),
    "margin_ranking": lambda p, t, r: F.margin_ranking_loss(p[..., 0], p[..., 1], t.sign, margin=0.3, reduction=r),
    "hinge_embedding": lambda p, t, r: F.hinge_embedding_loss(p[..., 0], t.sign, reduction=r),
    "triplet": lambda p, t, r: F.triplet_margin_loss(p, t.y, t.y.flip(-1), margin=2.0, reduction=r),
    "hand squares": lambda p, t, r: _reduce((p - t.y) ** 2, r),
    "hand half squares": lambda p, t, r: _reduce(0.5 * (p - t.y).square().sum(-1), r),
    "hand distance": lambda p, t, r: _reduce((p - t.y).norm(dim=-1), r),
    "hand huber": _hand_huber,
    "hand likelihood": _hand_likelihood,
    "hand one hot": _one_hot,
    "hand focal": _focal,
    "hand quantile": _quantile,
    "hand output": lambda p, t, r: _reduce(p, r),
    "hand log cosh": lambda p, t, r: _reduce((p - t.y).cosh().log(), r),
}
BY_SAMPLE = {"ctc", "broadcast", "pairs", "vae"}
KINKED = {
    "l1", "multi_margin", "multilabel_margin", "margin_ranking", "hinge_embedding", "triplet", "cosine_embedding",
    "hand quantile", "hand distance", "hand focal",
}  # fmt: skip

DIVISORS = {
    "B": lambda b, losses: b.size,
    "B as float": lambda b, losses: float(b.size),
    "B as tensor": lambda b, losses: torch.tensor(float(b.size)),
    "rows": lambda b, losses: b.valid.numel(),
    "elements": lambda b, losses: max(losses.numel(), 1),
    "valid rows": lambda b, losses: b.valid.sum(),
    "valid rows, item": lambda b, losses: max(b.valid.sum().item(), 1),
    "valid rows, clamp": lambda b, losses: b.valid.sum().clamp(min=1),
    "valid rows, float": lambda b, losses: b.valid.float().sum() + 1e-8,
    "labels": lambda b, losses: (b.cls != -100).sum(),
    "constant": lambda b, losses: 4,
    "constant float": lambda b, losses: 2.5,
    "row weights": lambda b, losses: b.w_row.sum(),
    "row weights of valid rows": lambda b, losses: (b.w_row * b.valid).sum(),
    "sample weights": lambda b, losses: b.w_sample.sum(),
    "B times the longest": lambda b, losses: b.size * int(b.n.max().clamp(min=1)),
    "nothing": None,
    "reciprocal of B": lambda b, losses: 1 / (1 / b.size),
}
MORE_DIVISORS = {
    "twice the valid rows": lambda b, losses: 2 * b.valid.sum(),
    "valid rows and one": lambda b, losses: b.valid.sum().item() + 1,
    "samples with rows": lambda b, losses: max(int((b.n > 0).sum()), 1),
    "samples with rows, tensor": lambda b, losses: (b.n > 0).sum().clamp(min=1),
    "the longest": lambda b, losses: max(int(b.n.max()), 1),
    "time": lambda b, losses: TIME,
    "B times time": lambda b, losses: b.size * TIME,
    "root of B": lambda b, losses: b.size**0.5,
    "reciprocal of the valid rows": lambda b, losses: 1 / (1 / max(int(b.valid.sum()), 1)),
    "reciprocal of 2.5": lambda b, losses: 1 / 0.4,
    "reciprocal of twice the rows": lambda b, losses: 1 / (0.5 / max(int(b.valid.sum()), 1)),
}
FIRST_DIVISORS = list(DIVISORS)
DIVISORS |= MORE_DIVISORS
DIVIDED = ("fused sum", "sum", "dot", "einsum", "sum by sum")
WEIGHTS = ["none", "none", "none", "sample", "row", "valid", "row and valid", "normalised"]
MORE_COMBINED = [
    "own mean by mask", "own mean by mask, those with rows", "own mean by mask, sum", "own mean by mask, sum over B",
    "times 1 / B", "times 1 / rows", "times a float", "times a tensor", "sum by sum", "cumulated", "mean of the last",
    "largest row, mean",
]  # fmt: skip
COUPLED = [
    "root of the mean", "perplexity", "logsumexp", "softmax weighted", "hardest half", "above the mean",
    "largest of all", "median of all", "least half trimmed", "baseline", "norm", "variance", "group means",
    "cumulated over all", "at most the mean", "product",
]  # fmt: skip
TAKES_ONE_OF_EQUAL_ROWS = {"hardest half", "median of all", "least half trimmed"}
COMBINED = [
    "fused mean", "fused sum", "mean", "sum", "own mean, mean", "own mean, sum over B", "own sum, mean", "loop",
    "loop, stacked", "mean by mean", "dot", "einsum", "weighted mean", "nanmean", "mean of losses squared",
]  # fmt: skip


@dataclass
class Term:
    """One loss over some rows: ``combine`` says how rows become one number."""

    fn: str
    rows: str
    combine: str
    weight: str
    divisor: str
    factor: float = 1.0
    schedule: bool = False

    def __str__(self):
        words = [self.fn, self.rows, self.combine]
        if self.weight != "none":
            words.append(f"weight {self.weight}")
        if self.combine in DIVIDED:
            words.append(f"/ {self.divisor}")
        if self.factor != 1.0 or self.schedule:
            words.append(f"x {self.factor}{' scheduled' if self.schedule else ''}")
        return " | ".join(words)

    @property
    def has_a_kink(self):
        """Whether rounding of an output may turn a gradient over."""
        return (
            self.fn in KINKED | {"relu", "where", "largest", "masked"}
            or self.combine == "largest row, mean"
            or self.combine in COUPLED
        )

    def __call__(self, p, b, step, case):
        value = self.value(p, b, case)
        if self.factor == 1 and not self.schedule:
            return value
        if self.schedule:
            return value * case.constant(self.factor * (step + 1) / 3)
        return value * case.own(self.factor)

    def value(self, p, b, case):
        if self.fn in BY_SAMPLE:
            return _by_sample(self.fn, p, b, self.combine)
        select = ROWS.get(self.rows, as_they_are)
        if self.combine.startswith("loop"):
            return self.loop(p, b, case)
        weight = class_weight(p, b, case)
        p = of_the_batch(p, b, case)
        targets = Targets(select(b.y, b), select(b.cls, b), select(b.sign, b), weight)
        rows = torch.where(b.valid.unsqueeze(-1), p, b.y) if self.rows == "where" else select(p, b)
        if self.combine == "fused mean":
            return FUSED[self.fn](rows, targets, "mean")
        if self.combine == "fused sum":
            return self.divided(FUSED[self.fn](rows, targets, "sum"), b, rows)
        losses = FUSED[self.fn](rows, targets, "none")
        losses, w = self.weighted(losses, b, select)
        if self.combine == "mean":
            return losses.mean()
        if self.combine == "sum":
            return self.divided(losses.sum(), b, losses)
        if self.combine == "mean by mean":
            while losses.ndim:
                losses = losses.mean(-1)
            return losses
        if self.combine == "nanmean":
            return losses.nanmean()
        if self.combine == "mean of losses squared":
            return losses.mean() ** 2
        if self.combine == "dot":
            ones = torch.ones_like(losses.flatten())
            return self.divided(losses.flatten() @ ones, b, losses)
        if self.combine == "einsum":
            return self.divided(torch.einsum("i,i->", losses.flatten(), torch.ones_like(losses.flatten())), b, losses)
        if self.combine == "weighted mean":
            w = torch.ones_like(losses) if w is None else w.expand_as(losses)
            return losses.sum() / w.sum()
        if self.combine.startswith("own mean by mask"):
            return self.own_by_mask(losses, b)
        if self.combine in MORE_COMBINED:
            return self.more(losses, b, case)
        if self.combine in COUPLED:
            return self.coupled(losses, b)
        return self.own(losses, b)

    def divided(self, total, b, losses):
        divisor = DIVISORS[self.divisor]
        return total if divisor is None else total / divisor(b, losses)

    def own_by_mask(self, losses, b):
        valid = b.valid.view(b.size, -1)
        losses = losses.reshape(*valid.shape, -1).mean(-1) * valid
        mine = losses.sum(1) / valid.sum(1).clamp(min=1)
        if self.combine.endswith("those with rows"):
            return mine[valid.any(1)].mean()
        return (
            mine.mean() if self.combine == "own mean by mask" else mine.sum() / (b.size if "B" in self.combine else 1)
        )

    def more(self, losses, b, case):
        if self.combine == "largest row, mean":
            return losses.reshape(b.size, -1).amax(1).mean()
        if self.combine == "mean of the last":
            return losses.reshape(b.size, -1)[:, -1].mean()
        if self.combine == "cumulated":
            return losses.reshape(b.size, -1).cumsum(1)[:, -1].sum() / b.size
        if self.combine == "sum by sum":
            while losses.ndim:
                losses = losses.sum(-1)
            return self.divided(losses, b, losses)
        factor = {
            "times 1 / B": lambda: 1 / b.size,
            "times 1 / rows": lambda: 1 / max(int(b.valid.sum()), 1),
            "times a float": lambda: case.own(0.3),
            "times a tensor": lambda: torch.tensor(0.3, dtype=losses.dtype),
        }[self.combine]()
        return factor * losses.sum() if len(self.fn) % 2 else factor * losses.mean()

    def coupled(self, losses, b):
        """Reductions of all rows that are no sum of them."""
        losses = losses.flatten()
        half = max(1, len(losses) // 2)
        if self.combine == "group means":
            mine = losses.reshape(b.size, -1).mean(1)
            group = b.keep.long()
            sums = torch.zeros(2, dtype=mine.dtype).index_add(0, group, mine)
            return (sums / group.bincount(minlength=2).clamp(min=1)).mean()
        return {
            "root of the mean": lambda: losses.square().mean().sqrt(),
            "perplexity": lambda: losses.mean().exp(),
            "logsumexp": lambda: losses.logsumexp(0),
            "softmax weighted": lambda: (losses.softmax(0) * losses).sum(),
            "hardest half": lambda: losses.topk(half).values.mean(),
            "above the mean": lambda: losses[losses >= losses.mean()].mean(),
            "largest of all": lambda: losses.max(),
            "median of all": lambda: losses.median(),
            "least half trimmed": lambda: losses.sort().values[half - 1 :].mean(),
            "baseline": lambda: (losses - losses.mean()).abs().mean(),
            "norm": losses.norm,
            "variance": lambda: losses.var() + losses.mean(),
            "cumulated over all": lambda: losses.cumsum(0).mean(),
            "at most the mean": lambda: torch.minimum(losses, losses.mean()).mean(),
            "product": lambda: (1 + losses).prod(),
        }[self.combine]()

    def weighted(self, losses, b, select):
        if self.weight == "none":
            return losses, None
        w = {
            "sample": lambda: b.w_sample.view(-1, *[1] * (b.valid.ndim - 1)).expand(b.valid.shape),
            "row": lambda: b.w_row,
            "valid": lambda: b.valid.to(losses.dtype),
            "row and valid": lambda: b.w_row * b.valid,
            "normalised": lambda: b.w_row / b.w_row.sum() * b.w_row.numel(),
        }[self.weight]()
        w = select(w, b)
        if losses.ndim < w.ndim:  # one value a row
            w = w.flatten()
        if losses.ndim > w.ndim:
            w = w.unsqueeze(-1)
        return losses * w, w

    def own(self, losses, b):
        """Rows of each sample by themselves first; only where ``rows`` left samples in front."""
        losses = losses.reshape(b.size, -1) if losses.shape[0] != b.size or losses.ndim == 1 else losses.flatten(1)
        if self.combine == "own sum, mean":
            return losses.sum(1).mean()
        mine = losses.sum(1) / b.n.clamp(min=1)
        return mine.mean() if self.combine == "own mean, mean" else mine.sum() / b.size

    def loop(self, p, b, case):
        losses, weight = [], class_weight(p, b, case)
        for i in range(b.size):
            valid = b.valid[i : i + 1]
            if not valid.any():
                continue
            one = Targets(b.y[i : i + 1][valid], b.cls[i : i + 1][valid], b.sign[i : i + 1][valid], weight)
            losses.append(FUSED[self.fn](p[i : i + 1][valid], one, "mean"))
        if not losses:
            return p.sum() * 0
        return torch.stack(losses).mean() if self.combine == "loop, stacked" else sum(losses) / b.size


SHAPED = {
    "row": lambda p: p[..., 0],
    "mean": lambda p: p.mean(-1),
    "first": lambda p: p[:, 0],
    "whole": lambda p: p,
    "time first": lambda p: p[..., 0].T,
    "whole, time first": lambda p: p.transpose(0, 1),
    "flattened": lambda p: p.flatten(0, 1),
    "pairs": lambda p: p @ p.mT,
}
BEFORE = {
    "": lambda v: v,
    "doubled": lambda v: 2 * v,
    "sigmoid": torch.sigmoid,
    "shifted": lambda v: 1 - v,
    "softmax": lambda v: v.softmax(-1),
}
BESIDE = {
    "mse": lambda v, y: F.mse_loss(v, y, reduction="none"),
    "l1": lambda v, y: F.l1_loss(v, y, reduction="none"),
    "smooth_l1": lambda v, y: F.smooth_l1_loss(v, y, reduction="none"),
    "mse, mean": lambda v, y: F.mse_loss(v, y),
    "huber, mean": lambda v, y: F.huber_loss(v, y),
    "soft margin, mean": lambda v, y: F.soft_margin_loss(v, y.sign()),
    "bce, mean": lambda v, y: F.binary_cross_entropy_with_logits(v, y.sigmoid().expand_as(v)),
    "bce weight": lambda v, y: F.binary_cross_entropy_with_logits(v, v.detach().sigmoid(), weight=y.exp()),
    "squares": lambda v, y: (v - y).square(),
    "squares of less": lambda v, y: (y - v) ** 2,
    "squares from far": lambda v, y: (v - y - 1).square(),
    "softplus": lambda v, y: F.softplus(v - y),
    "relu": lambda v, y: F.relu(v + y),
    "product": lambda v, y: v * y,
    "square of product": lambda v, y: (v * y).square(),
    "quotient": lambda v, y: v.square() / (y.abs() + 1),
    "where": lambda v, y: torch.where(y > 0, v.square(), v),
    "masked": lambda v, y: v.masked_fill(y > 0, 0.0).square(),
    "largest": lambda v, y: torch.maximum(v, y),
    "kl": lambda v, y: F.kl_div(v.log_softmax(-1), y.softmax(-1), reduction="none"),
    "poisson": lambda v, y: F.poisson_nll_loss(v, y.abs(), reduction="none"),
    "distance": lambda v, y: (v - y).norm(dim=-1),
    "adjusted": lambda v, y: -(v + y).log_softmax(-1)[..., 0],
    "columns": lambda v, y: v.square()[:, y.flatten()[: v.shape[1]] > 0],
    "matrix": lambda v, y: (v @ y.expand(v.shape[-1], TIME)).square(),
}  # fmt: skip


@dataclass
class Beside(Term):
    """A loss of outputs beside a constant, made of each sample or of all, which lies along any of the dimensions."""

    shaped: str = "row"
    before: str = ""
    lies: tuple = ()
    weighs: tuple | None = None

    def __str__(self):
        words = [self.shaped, self.before, self.fn, f"along {self.lies}"]
        return " | ".join([*filter(None, words), f"weights along {self.weighs}" if self.weighs else "", self.combine])

    def value(self, p, b, case):
        v = BEFORE[self.before](SHAPED[self.shaped](p))
        losses = BESIDE[self.fn](v, self.placed(b.y, v, self.lies))
        if self.weighs is not None:
            losses = losses * self.placed(b.y, losses, self.weighs).abs()
        return losses.mean() if self.combine == "mean" else losses.sum() / b.size

    @property
    def by_place(self):
        """Whether a sample's constant is decided by its place in the batch."""
        if self.fn == "columns" and "time first" in self.shaped and sum(dim >= 0 for dim in self.lies) > 1:
            return True  # the first entries are those of the first sample
        dims = 3 if self.shaped.startswith(("whole", "pairs")) else 2
        of_losses = dims - (self.fn in ("distance", "adjusted"))
        return self._is_by_place(self.lies, dims) or bool(self.weighs and self._is_by_place(self.weighs, of_losses))

    def _is_by_place(self, lies, dims):
        lies = lies[-dims:]
        at = ("time first" in self.shaped) - (dims - len(lies))
        return 0 <= at < len(lies) and lies[at] not in (-1, 0)

    @staticmethod
    def placed(y, v, lies):
        """Targets ``[B, T, C]``, averaged over all dimensions but some, which come to lie along the last of values.

        Each of ``lies`` is a dimension of the targets, or -1 for one entry that is repeated. Without 0, which is that
        of the samples, they are the same ones in all batches.
        """
        y = y if 0 in lies else torch.linspace(-1, 1, TIME**3, dtype=y.dtype).view(TIME, TIME, TIME) ** 2
        lies = lies[len(lies) - v.ndim :] if len(lies) > v.ndim else lies
        kept = [dim for dim in lies if dim >= 0]
        mean = y.mean([dim for dim in range(3) if dim not in kept]) if len(kept) < 3 else y
        mean = mean.permute([sorted(kept).index(dim) for dim in kept]) if kept else mean
        return mean[tuple(None if dim < 0 else slice(None) for dim in lies)]


FUNCTIONS = {
    "itself": lambda v: v,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": lambda v: F.softshrink(v, 0.1),
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "erf": torch.erf,
    "abs": torch.abs,
    "square": torch.square,
    "root": lambda v: (v.square() + 1).sqrt(),
    "logarithm": lambda v: v.exp().log1p(),
    "reciprocal": lambda v: 1 / (v.square() + 1),
    "clamp": lambda v: v.clamp(-1, 1),
    "sort": lambda v: v.sort(-1).values,
    "largest first": lambda v: v.topk(v.shape[-1], -1).values,
    "gather": lambda v: v.gather(-1, torch.arange(v.shape[-1]).flip(0).expand_as(v)),
    "flip": lambda v: v.flip(-1),
    "roll": lambda v: v.roll(1, -1),
    "repeat": lambda v: v.repeat(*[1] * (v.ndim - 1), 2)[..., : v.shape[-1]],
    "cumsum": lambda v: v.cumsum(-1),
    "largest": lambda v: torch.maximum(v, v.flip(-1)),
    "largest so far": lambda v: v.cummax(-1).values,
    "maximum": lambda v: v.amax(-1, keepdim=True).expand_as(v),
    "softmax": lambda v: v.softmax(-1),
    "log_softmax": lambda v: v.log_softmax(-1),
    "logsumexp": lambda v: v.logsumexp(-1, keepdim=True).expand_as(v),
    "layer_norm": lambda v: F.layer_norm(v, v.shape[-1:]),
    "normalize": lambda v: F.normalize(v, dim=-1),
    "standard deviation": lambda v: v.std(-1, keepdim=True).expand_as(v),
    "product with itself": lambda v: v * v.flip(-1),
    "where": lambda v: torch.where(v > 0, v, v.square()),
    "doubled": lambda v: 2 * v + 1,
}
STATISTICS = {
    "column means": lambda y: y.flatten(0, -2).mean(0),
    "mean": torch.mean,
    "mean, number": lambda y: y.mean().item(),
    "deviation": torch.std,
    "deviations": lambda y: y.flatten(0, -2).std(0, correction=0) + 0.1,
    "deviation, number": lambda y: y.std().item(),
    "largest": torch.max,
    "largest of columns": lambda y: y.flatten(0, -2).amax(0),
    "largest, number": lambda y: y.max().item(),
    "sum, number": lambda y: float(y.sum()),
}
ACTS = {
    "plus": lambda v, s: v + s,
    "minus": lambda v, s: v - s,
    "from": lambda v, s: s - v,
    "times": lambda v, s: v * s,
    "over": lambda v, s: v / s,
    "twice minus": lambda v, s: torch.sub(v, s, alpha=2),
    "in place minus": lambda v, s: v.clone().sub_(s),
    "half way to": lambda v, s: torch.lerp(v, torch.as_tensor(s, dtype=v.dtype).expand_as(v), 0.5),
    "plus products": lambda v, s: torch.addcmul(v, torch.ones_like(v), torch.as_tensor(s, dtype=v.dtype)),
    "where": lambda v, s: torch.where(v.detach() > 0, v, v - s),
}


@dataclass
class Behind:
    """A statistic of the targets, or of the detached outputs, that acts on a function of the outputs."""

    inner: str
    statistic: str
    act: str
    outer: str
    of_outputs: bool

    def __str__(self):
        of = "outputs" if self.of_outputs else "targets"
        return f"{self.outer} of ({self.inner} {self.act} {self.statistic} of {of})"

    def __call__(self, p, b):
        statistic = STATISTICS[self.statistic]((p if self.of_outputs else b.y.to(p.dtype)).detach())
        return FUNCTIONS[self.outer](ACTS[self.act](FUNCTIONS[self.inner](p), statistic))


PLAIN = Term("hand squares", "as_they_are", "mean", "none", "B")
NORMALISED = Term("hand squares", "as_they_are", "sum", "normalised", "nothing")
OVER_ALL_ROWS = Term("hand squares", "bool_index", "mean", "none", "B")


def class_weight(p, b, case):
    """Weights of classes that are the user's, which private training is told, or a statistic of the batch."""
    if case.statistic == "weights":
        return b.y.detach().abs().flatten(0, -2).mean(0).to(p.dtype) + 0.5
    weight = torch.linspace(0.5, 2.0, p.shape[-1], dtype=p.dtype)
    return case.constant(weight) if case.private else weight


def of_the_batch(p, b, case):
    """Values of the samples after a statistic of the batch has acted on them, in some cases."""
    y = b.y.detach().to(p.dtype)
    if case.behind is not None:
        return case.behind(p, b)
    if case.statistic == "temperature":
        return p / (0.5 + float(y.abs().mean()))
    return p - y.flatten(0, -2).mean(0) if case.statistic == "centre" else p


def _by_sample(fn, p, b, combine):
    if fn == "ctc":
        reduction = {"fused mean": "mean", "fused sum": "sum"}.get(combine, "none")
        labels = b.times[:, :2] % (p.shape[-1] - 1) + 1
        lengths = (b.times[:, 2] % 2) + 1
        losses = F.ctc_loss(
            p.log_softmax(-1).transpose(0, 1), labels, torch.full((b.size,), p.shape[1]), lengths, reduction=reduction
        )
        return losses if combine.startswith("fused") else losses.mean()
    if fn == "broadcast":  # everybody's mistake: [B] beside [B, 1]
        out = p[..., 0] if p.ndim == 2 else p.mean((1, 2))
        y = b.y[..., :1] if p.ndim == 2 else b.y.mean((1, 2)).unsqueeze(1)
        if combine == "fused mean":
            return F.mse_loss(out, y)
        return (
            F.smooth_l1_loss(out, y, reduction="sum") / b.size if combine == "fused sum" else (out - y).square().mean()
        )
    if fn == "pairs":
        flat = p.flatten(1)
        return (flat[:, None] - flat[None]).square().sum() / b.size
    if fn == "vae":
        mu, logvar = p[..., 0], p[..., 1]
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp())
        return kl.sum() / b.size if combine == "fused sum" else kl.mean()
    raise KeyError(fn)


@dataclass
class Case:
    seed: int
    sequence: bool
    width: int
    ragged: str
    missing: str
    reduction: str
    mode: str
    dtype: torch.dtype
    autocast: bool
    micro: int
    divided: bool
    terms: list = field(default_factory=list)
    inside: bool = False
    hidden: bool = True
    private: bool = False
    others: list = field(default_factory=list)  # the loss of every other step
    scaled: bool = False  # by a GradScaler
    collated: bool = False  # each batch is as long as its longest sample
    time_first: bool = False  # the module is called with, and returns, [time, batch, ...]
    two: bool = False  # the second term is of a second output
    square: bool = False  # there are as many samples as rows, and as values
    constant: object = field(default=lambda value: value, repr=False)  # `PerSampleGradientClipper.constant`
    statistic: str = "no"  # what the loss takes that was made of the whole batch
    behind: Behind | None = None  # a statistic of the batch that acts on a function of the outputs
    given: list = field(default_factory=list)  # norms of samples that the clipper told, until they are looked at

    def __str__(self):
        words = [f"{self.seed}:", self.reduction, self.mode, "sequence" if self.sequence else "flat"]
        words += [f"lengths {self.ragged}", f"missing {self.missing}", "bf16" if self.autocast else str(self.dtype)[6:]]
        if self.micro > 1:
            words.append(f"micro {self.micro}{' divided' if self.divided else ''}")
        if self.inside:
            words.append("loss inside")
        words += [
            name for name in ("private", "scaled", "collated", "time_first", "two", "square") if getattr(self, name)
        ]
        words += [f"{self.statistic} of the batch"] if self.statistic != "no" else []
        words += [] if self.behind is None else [str(self.behind)]
        text = ", ".join(words) + " || " + "  ++  ".join(map(str, self.terms))
        return text + (" // " + "  ++  ".join(map(str, self.others)) if self.others else "")

    def own(self, number):
        """A number that is the user's: private training is told."""
        return self.constant(number) if self.private else number

    @property
    def through_the_network(self):
        """Whether more than the check of the loss is asked."""
        return self.inside or self.two or self.time_first or self.scaled or self.dtype == torch.bfloat16

    @property
    def wider(self):
        """Whether the loss is computed from float32 of outputs in 16 bits."""
        return self.autocast or self.dtype == torch.bfloat16

    @property
    def tolerance(self):
        return 0.06 if self.wider else 1e-8 if self.dtype == torch.float64 else 1e-3

    @property
    def may_keep_a_number(self):
        """Whether a number may be taken for the user's, or a count, until a batch in which it makes a difference."""
        constant = self.divided or any(
            t.combine in DIVIDED and t.divisor == "constant" for t in (*self.terms, *self.others)
        )
        return self.reduction == "token_mean" and (self.by_a_number or constant) and not self.private

    @property
    def moves_none(self):
        """Whether a sample's own loss is the mean over its rows by the reduction alone, in private training.

        Among copies of itself a batch may be none: a sum over one row is a mean. It must be accepted in no batch, then,
        in which it gives the sample another gradient.
        """
        return self.private and self.reduction == "token_mean"

    def phase(self, step):
        """A number for the loss of a step: equal ones give a sample one gradient."""
        if any(term.schedule for term in (*self.terms, *self.others)):
            return step
        return step % 2 if self.others else 0

    def loss(self, p, b, step):
        """The loss of what the network returned, and the second output beside it if there are two."""
        p, q = p if isinstance(p, tuple) else (p, p)
        if self.time_first:
            p, q = p.transpose(0, 1), q.transpose(0, 1)
        terms = self.others if self.others and step % 2 else self.terms
        total = terms[0](p, b, step, self)
        for term in terms[1:]:
            total = total + term(q, b, step, self)
        return total / self.micro if self.divided else total

    @property
    def out_of_sight(self):
        """What nobody can see: weights, masks or targets of the whole batch, rows chosen by their place in it."""
        return self.statistic == "centre" or any(
            term.weight == "normalised"
            or term.rows in BY_PLACE
            or term.combine == "above the mean"
            or (isinstance(term, Beside) and term.by_place)
            for term in (*self.terms, *self.others)
        )

    @property
    def adds_a_number(self):
        """Whether a statistic acts as a number, which no first batch tells from a constant, private or not."""
        return self.behind is not None and not (
            "column" in self.behind.statistic or self.behind.statistic == "deviations"
        )

    @property
    def takes_one_of_equal_rows(self):
        """Whether a term keeps some of the rows by their loss: among copies of one sample, those of some copies."""
        return any(term.combine in TAKES_ONE_OF_EQUAL_ROWS for term in (*self.terms, *self.others))

    @property
    def by_a_number(self):
        """Whether a number is made of the batch, or a length counted, which one batch cannot tell from a constant."""
        fixed = {"B", "B as float", "B as tensor", "rows", "constant", "constant float", "nothing", "reciprocal of B"}
        return self.behind is not None or any(
            term.combine in ("weighted mean", "own mean by mask, those with rows", "times 1 / rows")
            or term.rows in ("cut_to_the_longest", "padded_again")
            or (term.combine in DIVIDED and term.divisor not in fixed)
            for term in (*self.terms, *self.others)
        )

    @property
    def family(self):
        """What is unusual about it, most telling first, to count cases by."""
        found = []
        for term in (*self.terms, *self.others):
            if term.fn in BY_SAMPLE:
                found.append(term.fn)
            if term.weight == "normalised":
                found.append("normalised weights")
            if term.combine == "weighted mean" and term.weight != "none":
                found.append("weighted mean")
            if term.combine in DIVIDED:
                found.append(f"/ {term.divisor}")
            elif "weight" in term.fn and "mean" in term.combine:
                found.append("class weights")
            if term.rows not in ("all_rows", "as_they_are"):
                found.append(term.rows)
        if self.divided:
            found.append("divided by micro-batches")
        return " + ".join([self.reduction, *(["terms"] if len(self.terms) > 1 else []), *found])


def _term(r, sequence, token_means, wide=False):
    fn = (
        r.choice(sorted(FUSED))
        if r.random() > 0.04
        else r.choice(["broadcast", "pairs", "vae", *(["ctc"] * 3 if sequence else [])])
    )
    if r.random() < 0.25:
        fn = r.choice(["mse", "cross_entropy", "bce_logits", "l1", "hand squares"])
    names = [k for k in ROWS if sequence or k not in OF_SEQUENCES] + ["where"]
    if token_means:  # of rows that a sample has wherever it stands
        names = [k for k in names if k in BY_MASK]
    rows = r.choice(COMMON_ROWS) if r.random() < 0.45 else r.choice(names)
    combine = (
        r.choice(["fused mean", "fused mean", "fused sum", "mean", "sum"])
        if r.random() < 0.7
        else r.choice([*COMBINED, *MORE_COMBINED, *(COUPLED if r.random() < 0.4 else [])] if wide else COMBINED)
    )
    in_front = combine.startswith("own") or combine in (
        "cumulated", "mean of the last", "largest row, mean", "group means",
    )  # fmt: skip
    if in_front and rows not in SAMPLES_IN_FRONT:
        rows = "as_they_are"
    weights = [w for w in WEIGHTS if w != "normalised"] if token_means else WEIGHTS
    weight = r.choice(weights) if combine not in ("fused mean", "fused sum", "loop", "loop, stacked") else "none"
    divisors = sorted(FIRST_DIVISORS if not wide else DIVISORS)
    divisor = r.choice(divisors) if r.random() < 0.6 else r.choice(["B", "nothing", "valid rows"])
    return Term(fn, rows, combine, weight, divisor)


def draw_widely(seed):
    """Draw a case of any reduction and everything that is here."""
    case = draw(seed, ("token_mean",) if seed % 4 == 0 else ("mean", "sum"), wide=True)
    r = random.Random(seed + 10**7)
    if r.random() < 0.12:
        token_means = case.reduction == "token_mean"
        case.others = [_term(r, case.sequence, token_means, wide=True) for _ in range(r.choice([1, 1, 2]))]
        if r.random() < 0.4:  # the same loss of other rows, or with another number
            first = case.terms[0]
            case.others = [replace(first, **r.choice([{"factor": 2.0}, {"rows": "bool_index"}, {"weight": "valid"}]))]
            if first.combine.startswith(("own", "cumulated", "mean of the last", "largest", "group", "loop", "fused")):
                case.others = [replace(first, factor=2.0)]
    rounded = case.autocast or r.random() < 0.08
    case.dtype, case.autocast = (torch.float32, False) if case.autocast else (case.dtype, False)
    if rounded and not any(term.has_a_kink for term in (*case.terms, *case.others)):
        case.dtype, case.autocast = r.choice([(torch.bfloat16, False), (torch.float32, True)])
    case.scaled = r.random() < 0.1 and case.dtype == torch.float32
    case.collated = r.random() < 0.2 and case.sequence and not case.inside
    case.two = r.random() < 0.25 and len(case.terms) > 1 and not case.inside
    case.time_first = r.random() < 0.08 and case.sequence and not case.inside
    r = random.Random(seed + 3 * 10**7)
    if r.random() < 0.15 and not case.inside and case.reduction != "token_mean":
        case.statistic = r.choice(["weights", "centre"] if case.private else ["weights", "temperature", "centre"])
    return case


def draw_squarely(seed):
    """Draw a case in which all sizes are equal, so that a constant of one entry for each sample fits anywhere."""
    case, r = draw_widely(seed), random.Random(seed + 2 * 10**7)
    case.width, case.sequence, case.square, case.collated = TIME, True, True, False
    if r.random() < 0.3:  # the usual losses at equal sizes
        return case
    case.terms, case.others, case.reduction, case.two = (
        [_beside(r)],
        [],
        r.choice(["mean", "mean", "mean", "sum"]),
        False,
    )
    if r.random() < 0.2:
        case.others = [replace(case.terms[0], lies=_beside(r).lies)]
    case.divided = False
    return case


def draw_behind(seed):
    """Draw a case in which a statistic of the batch acts on a function of the outputs; half of them plain means."""
    case, r = draw(seed, wide=True), random.Random(seed + 4 * 10**7)
    case.inside, case.statistic, case.dtype, case.autocast = False, "no", torch.float64, False
    if r.random() < 0.5:
        names = ["hand squares", "hand output", "mse", "smooth_l1", "bce_logits", "cross_entropy", "hand log cosh"]
        case.terms = [Term(r.choice(names), "as_they_are", "mean", "none", "B")]
        case.reduction, case.ragged, case.missing = "mean", "full", "no"
    outer = "itself" if r.random() < 0.5 else r.choice(list(FUNCTIONS))
    acts = r.choice(["plus", "minus", "minus", *ACTS])
    case.private &= not any(term.fn in ("hinge_embedding", "margin_ranking") for term in case.terms)  # of one column
    case.behind = Behind(r.choice(list(FUNCTIONS)), r.choice(list(STATISTICS)), acts, outer, r.random() < 0.3)
    return case


def _beside(r):
    def lies(most):
        return tuple(r.sample([0, 1, 2, -1, -1], r.randint(1, most)))

    shaped = r.choice(list(SHAPED))
    dims = 3 if shaped.startswith(("whole", "pairs")) else 2
    return Beside(
        r.choice(list(BESIDE)), "as_they_are", r.choice(["mean", "sum"]), "none", "B",
        shaped=shaped, before=r.choice(["", "", *BEFORE]), lies=lies(dims),
        weighs=lies(dims) if r.random() < 0.2 else None,
    )  # fmt: skip


DRAWS = {"behind": draw_behind, "square": draw_squarely, "wide": draw_widely}


def draw(seed, reductions=("mean", "sum"), wide=False):
    """Draw a case; ``wide`` from more divisors and ways to reduce, and a third of them for private training."""
    r = random.Random(seed)
    sequence = r.random() < 0.6
    token_means = set(reductions) == {"token_mean"}
    first = _term(r, sequence, token_means, wide)
    terms = [first]
    if r.random() < 0.25:
        second = _term(r, sequence, token_means, wide)
        second.factor = r.choice([0.1, 0.5, 1.0, 2.0])
        second.schedule = r.random() < 0.4
        terms.append(second)
    dtype, autocast = r.choice([(torch.float64, False)] * 6 + [(torch.float32, False)] * 3 + [(torch.float32, True)])
    autocast &= not any(term.has_a_kink for term in terms)
    micro = r.choice([1, 1, 1, 2, 3])
    reduction = r.choice(reductions)
    if r.random() < 0.7 and set(reductions) == {"mean", "sum"}:
        adds = first.combine in ("fused sum", "sum", "dot", "einsum") and first.divisor in (
            "nothing",
            "constant",
            "constant float",
        )
        reduction = "sum" if adds else "mean"
    return Case(
        seed,
        sequence,
        WIDTH,
        r.choice(["full", "full", "equal", "ragged", "with none", "later", "later"]),
        r.choice(["no", "no", "no", "some", "later"]),
        reduction,
        r.choice(["exact", "exact", "fast"]),
        dtype,
        autocast,
        micro,
        micro > 1 and r.random() < 0.15,
        terms,
        r.random() < 0.03,
        r.random() < 0.7,
        wide and r.random() < 0.33,
    )


# ------------------------------------------------------------------------------------------------------- own gradients


class Network(nn.Module):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        self.case = [case]
        self.one = nn.Linear(WIDTH, 4 if case.hidden else case.width)
        self.two = nn.Linear(4, case.width) if case.hidden else None
        self.aside = nn.Linear(WIDTH, case.width) if case.two else None

    def forward(self, x, batch=None, step=None):
        h = self.one(x)
        out = h if self.two is None else self.two(h.tanh())
        if self.aside is not None:
            return out, self.aside(x).sin()
        if batch is None:
            return out
        return self.case[0].loss(out.float() if self.case[0].wider else out, Batch(len(x), x, **batch), step)


def parameters(model):
    return {k: p.detach().double() for k, p in model.named_parameters()}


def shares(case, weights, b, step):
    """Each sample's part of the gradient of this batch's loss, by parameter: each sample has weights of its own."""
    own = {k: v.expand(b.size, *v.shape).clone().requires_grad_() for k, v in weights.items()}
    x = b.x if b.x.ndim == 3 else b.x.unsqueeze(1)
    out = x @ own["one.weight"].mT + own["one.bias"].unsqueeze(1)
    if "two.weight" in own:
        out = out.tanh() @ own["two.weight"].mT + own["two.bias"].unsqueeze(1)
    aside = out
    if "aside.weight" in own:
        aside = (x @ own["aside.weight"].mT + own["aside.bias"].unsqueeze(1)).sin()
    out, aside = (each if b.x.ndim == 3 else each.squeeze(1) for each in (out, aside))
    if case.time_first:
        out, aside = out.transpose(0, 1), aside.transpose(0, 1)
    out = (out, aside)
    grads = torch.autograd.grad(case.loss(out, b, step), list(own.values()), allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(own.items(), grads, strict=True)}


def flat(grads):
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


# -------------------------------------------------------------------------------------------------------------- a trial


@dataclass
class Outcome:
    kind: str  # exact, refused, false refusal, wrong, doubtful, told later, out of sight, crash, invalid
    words: str = ""
    steps: int = 0


def batches(case):
    """Steps of micro-batches of sample numbers; often again with one sample replaced, added, or gone."""
    r = random.Random(case.seed + 10**6)
    steps = []
    for number in range(r.randint(3, 5)):
        early = number < 2 and "later" in (case.ragged, case.missing)
        members = range(POOL // 2) if early else range(POOL)
        step = [
            r.sample(members, min(len(members), TIME if case.square else r.choice([2, 3, 4, 5, 6, 7, 9, 1])))
            for _ in range(case.micro)
        ]
        if number == 0 and len(step[0]) == 1 and r.random() < 0.7:
            step[0] = r.sample(members, 4)
        steps.append((number, step))
        if r.random() < 0.6:
            changed = [list(part) for part in step]
            part = changed[0]
            others = [i for i in members if i not in part]
            kind = r.choice(["replace", "drop", "add"])
            if kind == "replace" and others:
                part[r.randrange(len(part))] = r.choice(others)
            elif kind == "drop" and len(part) > 1:
                part.pop(r.randrange(len(part)))
            elif others:
                part.append(r.choice(others))
            steps.append((number, changed))
    return steps


def close(a, b, tolerance):
    """Parameter by parameter and sample by sample, on the scale of the sample's whole gradient."""
    scale = torch.maximum(flat(a).norm(dim=1), flat(b).norm(dim=1))
    worst = torch.zeros_like(scale)
    for k in a:
        error = (a[k] - b[k]).flatten(1).norm(dim=1)
        worst = torch.maximum(worst, torch.where(error > 1e-12, error / scale.clamp(min=1e-300), 0.0))
    return worst.nan_to_num(0.0), worst.nan_to_num(0.0) > tolerance


def trial(case, check=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _trial(case, check)


def _trial(case, check):
    data = pool(case)
    model = Network(case).to(case.dtype)
    weights = parameters(model)
    clipper = None

    def run(number, parts, of):
        nonlocal clipper
        if clipper is None:
            norms = torch.cat([flat(part).norm(dim=1) for part in of])
            norms = norms[norms.isfinite() & (norms > 0)]
            bound = float(norms.median()) if len(norms) else 1.0
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=case.scaled)
            clipper = gg.PerSampleGradientClipper(
                model,
                gg.FlatNormClipper(bound),
                loss_reduction=case.reduction,
                mode=case.mode,
                check=check,
                batch_first=not case.time_first,
                scaler=scaler if case.scaled else None,
            )
            if case.private:
                clipper.refuse_ambiguous_losses()
            clipper.bound, clipper.scaler = bound, scaler
            case.constant = clipper.constant
        return one_step(case, model, clipper, data, number, parts, of, clipper.bound, case.tolerance)

    steps = batches(case)
    try:
        truth = Truth(
            case, data, steps, lambda ids, number, length: shares(case, weights, collate(data, ids, length), number)
        )
    except (RuntimeError, ValueError, IndexError) as error:
        return Outcome("invalid", str(error)[:80])
    try:
        return judged(case, truth, run)
    finally:
        with contextlib.suppress(Exception):
            clipper.detach()


class Truth:
    """What plain autograd says of every batch: each sample's gradient in it, and among copies of itself.

    A loss that plain PyTorch refuses in its first batch is no case.
    """

    def __init__(self, case, data, steps, parts_of):
        self.case, self.data, self.steps, self._parts_of = case, data, steps, parts_of
        self._batches, self._copies = {}, {}
        self.batch(0)

    def batch(self, at):
        """Each sample's gradient in the micro-batches of a step as it is expected, and in its own loss."""
        if at not in self._batches:
            number, parts = self.steps[at]
            found = [self._scaled(ids, number, length_of(self.case, self.data, ids)) for ids in parts]
            own = [self._own(ids, number, part) for ids, part in zip(parts, found, strict=True)]
            of_own = self.case.reduction == "token_mean" or self.case.inside
            self._batches[at] = own if of_own else found, own, found
        return self._batches[at]

    def _scaled(self, ids, number, length):
        scale = len(ids) if self.case.reduction != "sum" else 1
        return {k: g * scale for k, g in self._parts_of(ids, number, length).items()}

    def _own(self, ids, number, like):
        """What each sample has in a batch of as many samples that are all copies of it."""
        rows, length = [], length_of(self.case, self.data, ids)
        for place, i in enumerate(ids):
            size, at = (1, 0) if self.case.inside else (len(ids), place)
            if (number, size, i, length) not in self._copies:
                try:
                    copies = self._scaled([i] * size, number, length)
                except (RuntimeError, ValueError, IndexError):
                    copies = {k: torch.full((size, *v.shape[1:]), torch.nan) for k, v in like.items()}
                self._copies[number, size, i, length] = copies
            copies = self._copies[number, size, i, length]
            # Which copy is taken is PyTorch's choice, so that the sample's own gradient is the mean over all of them.
            rows.append({k: v.mean(0) if self.case.takes_one_of_equal_rows else v[at] for k, v in copies.items()})
        return {k: torch.stack([row[k] for row in rows]) for k in like}

    def right(self):
        """Whether each sample has one gradient in all steps, that of its own loss."""
        seen = Seen(self.case, self.data)
        for at, (number, parts) in enumerate(self.steps):
            scaled, own, found = self.batch(at)
            if seen.differs(number, parts, scaled) or seen.doubtful(parts, scaled, own):
                return False
            if self.case.reduction == "token_mean" and not all(map(is_mean_of_own, found, own)):
                return False
        return True


class Seen:
    """The gradients that samples have had: each has one only, whatever else is in the batch.

    A sample that was padded to another length before the model got it is another.
    """

    def __init__(self, case, data):
        self._case, self._data = case, data
        self._first, self._given = {}, {}

    def differs(self, number, parts, scaled):
        """Say which sample had another gradient before; "" if none had."""
        phase = self._case.phase(number)
        for ids, part in zip(parts, scaled, strict=True):
            rows, length = flat(part), length_of(self._case, self._data, ids)
            first = torch.stack(
                [
                    self._first.setdefault((phase, i, length), row) if good else row
                    for i, row, good in zip(ids, rows, rows.isfinite().all(1).tolist(), strict=True)
                ]
            )
            for at in unlike(rows, first):
                sizes = float(first[at].norm()), float(rows[at].norm())
                return f"sample {ids[at]}: norm {sizes[0]:.5g} in one batch, {sizes[1]:.5g} in another"
        return ""

    def moves(self, number, parts):
        """Say which sample got another norm before from the clipper; "" if none did."""
        phase, given = self._case.phase(number), list(self._case.given)
        self._case.given.clear()
        for ids, norms in zip(parts, given, strict=True):
            length = length_of(self._case, self._data, ids)
            for i, norm in zip(ids, norms.tolist(), strict=True):
                first = self._given.setdefault((phase, i, length), norm)
                if abs(norm - first) > 2 * self._case.tolerance * max(norm, first) + 1e-9:
                    return f"sample {i} was given a norm of {norm:.5g}, and {first:.5g} before"
        return ""

    def doubtful(self, parts, scaled, own):
        """Say which sample has another gradient among copies of itself; "" if none has."""
        for ids, part, mine in zip(parts, scaled, own, strict=True):
            rows, alone = flat(part), flat(mine)
            for at in unlike(rows, alone):
                sizes = float(rows[at].norm()), float(alone[at].norm())
                return f"sample {ids[at]} of {len(ids)}: {sizes[0]:.5g}, among copies {sizes[1]:.5g}"
        return ""


def unlike(rows, others):
    """The rows that are finite in both and differ."""
    scale = torch.maximum(rows.norm(dim=1), others.norm(dim=1))
    return ((rows - others).norm(dim=1) > 1e-7 * scale + 1e-12).nonzero().flatten().tolist()  # no NaN is greater


def is_mean_of_own(part, own):
    """Whether each sample's part is a multiple of its own loss's, and the multiples are shares of a mean."""
    part, own = flat(part), flat(own)
    there = own.isfinite().all(1) & (own.norm(dim=1) > 1e-12)
    part, own = part[there], own[there]
    if not len(own):
        return True
    factors = (part * own).sum(1) / own.square().sum(1)
    if ((part - factors.unsqueeze(1) * own).norm(dim=1) > 1e-7 * part.norm(dim=1) + 1e-12).any():
        return False
    return bool(((factors - 1).abs() < 1e-6).all()) or abs(float(factors.sum()) / len(there) - 1) < 1e-6


def judged(case, truth, run):
    """Run the steps until one is refused, and compare what was accepted."""
    reached, doubt, seen = 0, "", Seen(case, truth.data)
    far = case.out_of_sight
    try:
        for at, (number, parts) in enumerate(truth.steps):
            try:
                scaled, own, _ = truth.batch(at)
            except (RuntimeError, ValueError, IndexError):
                continue  # PyTorch refuses this batch
            bad = run(number, parts, scaled)
            reached += 1
            moves = seen.moves(number, parts)
            if case.moves_none and bad and not far:
                moves = moves or next(filter(None, (moved(case, ids, number) for ids in parts)), "")
            if case.may_keep_a_number or case.moves_none:  # what the sample's own loss is then, no batch can tell
                doubt = doubt or (f"step {at}: {bad}" if bad else "")
                bad = moves
            if bad:
                kind = "out of sight" if far and case.reduction == "token_mean" else "wrong"
                return Outcome(kind, f"step {at} ({parts}): {bad}", reached)
            if case.may_keep_a_number:
                continue
            if words := seen.differs(number, parts, scaled):
                return Outcome("out of sight" if far else "wrong", f"step {at}: {words}", reached)
            if words := "" if doubt else seen.doubtful(parts, scaled, own):
                if (
                    case.private
                    and not (far or case.adds_a_number)
                    and (moving := next(filter(None, (moved(case, ids, number) for ids in parts)), ""))
                ):
                    return Outcome("wrong", f"step {at}: {words}; {moving}", reached)
                doubt = f"step {at}: {words}"
    except gg.errors.GradguardError as error:
        words = f"step {reached}: {type(error).__name__}: {error}"
        if doubt:
            kind = "out of sight" if far else "told later"
            return Outcome(kind, f"{doubt}; told at {words}", reached)
        try:
            right = truth.right()
        except (RuntimeError, ValueError, IndexError):
            right = False
        return Outcome("false refusal" if right else "refused", words, reached)
    except Exception:
        return Outcome("crash", f"step {reached} ({parts}): " + traceback.format_exc()[-900:], reached)
    if doubt:  # among copies of itself the sample has another gradient, and nobody ever said so
        known = case.by_a_number or case.moves_none
        return Outcome("out of sight" if far else "doubtful" if known else "wrong", doubt, reached)
    return Outcome("exact", "", reached)


def glance(case):
    """Judge a case by the check of the loss alone, on what a network has returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _glance(case)


def _glance(case):
    checked = Checked(case)
    try:
        truth = Truth(case, checked.data, batches(case), checked.parts_of)
    except (RuntimeError, ValueError, IndexError) as error:
        return Outcome("invalid", str(error)[:80])

    def run(number, parts, of):
        bad = ""
        for ids, own in zip(parts, of, strict=True):
            rows, own = checked.step(ids, number), flat(own)
            case.given.append(rows.norm(dim=1))
            if case.reduction == "token_mean":
                error = (rows - own).norm(dim=1) / own.norm(dim=1).clamp(min=1e-9)
                error = error.where(own.isfinite().all(1), 0.0).nan_to_num(1.0)
                if (error > (1e-8 if case.dtype == torch.float64 else 0.05)).any():
                    i = int(error.argmax())
                    bad = bad or f"sample {ids[i]}: norm {float(rows[i].norm()):.5g}, own {float(own[i].norm()):.5g}"
        return bad

    return judged(case, truth, run)


class Checked:
    """The check of the loss around what a network would have returned for the samples of a case."""

    def __init__(self, case):
        self.case, self.data, self._sizes = case, pool(case), set()
        dtype = torch.bfloat16 if case.autocast else case.dtype
        with torch.no_grad():
            self._returned = Network(case).double()(self.data["x"]).to(dtype)
        self._fields = {k: v.to(case.dtype) if v.is_floating_point() else v for k, v in self.data.items()}
        self._check = LossCheck(case.reduction, True, lambda: 1.0)
        if case.private:
            self._check.refuse_ambiguous()

    def parts_of(self, ids, number, length):
        """Each sample's part of the gradient of the outputs, by plain autograd in float64."""
        out = self._outputs(ids, length).double().requires_grad_()
        return {"": torch.autograd.grad(self.case.loss(out, collate(self.data, ids, length), number), out)[0]}

    def _outputs(self, ids, length):
        return self._returned[ids][:, :length] if length < TIME else self._returned[ids]

    def step(self, ids, number):
        """The gradients of each sample's outputs that are clipped, in the scale of its own loss.

        Raises:
            UnsupportedGradientError: If the loss is refused.
        """
        case, check = self.case, self._check
        check.start(len(ids), [BatchAxis(0)], len(ids) not in self._sizes)
        length = length_of(case, self.data, ids)
        leaf = self._outputs(ids, length).clone().requires_grad_()
        [out] = tap(lambda saved, grads, task: None, [], torch.zeros((), requires_grad=True), [leaf])
        check.add_outputs([out], [BatchAxis(0)])
        case.constant = self._declare
        case.loss(out.float() if case.autocast else out, collate(self._fields, ids, length), number).backward()
        case.constant = lambda value: value
        if check.judge():
            self._sizes.add(len(ids))
        rows = leaf.grad.double().flatten(1)
        if case.reduction != "token_mean":
            return rows * (len(ids) if case.reduction == "mean" else 1)
        factors = torch.zeros(len(ids)) if check.factors is None else check.factors.double()
        return rows * torch.where(factors > 0, len(ids) / factors, 0.0).view(-1, 1)

    def _declare(self, number):
        self._check.declare(number)
        return number


def moved(case, ids=None, number=0):
    """Say which other sample's gradient moves as one sample is replaced, added or taken away; "" if none does.

    Both batches are the first that a check sees. So it is what private training promises: the sum of clipped gradients
    changes by what the one sample adds. All such batches are tried around ``ids``; three of them around ids that are
    drawn. None where that batch is refused. ``number`` is that of the step, which decides the loss.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = replace(case, collated=False)  # padded to another length a sample is another
        r = random.Random(case.seed)
        if ids is None:
            ids = r.sample(range(POOL), r.randint(2, 6))
            others = [i for i in range(POOL) if i not in ids]
            at = r.randrange(len(ids))
            neighbours = [_replaced(ids, at, r.choice(others)), [*ids, r.choice(others)], _replaced(ids, at)]
        else:
            others = [i for i in range(POOL) if i not in ids]
            neighbours = [[*ids, i] for i in others]
            neighbours += [_replaced(ids, at, i) for at in range(len(ids)) for i in others]
            neighbours += [_replaced(ids, at) for at in range(len(ids)) if len(ids) > 1]
        before = _accepted(case, ids, number)
        for neighbour in neighbours if before is not None else []:
            after = _accepted(case, neighbour, number)
            for i in set(ids) & set(neighbour) if after is not None else ():
                row, other = before[ids.index(i)], after[neighbour.index(i)]
                if (row - other).norm() > (1e-7 if case.dtype == torch.float64 else 1e-2) * row.norm() + 1e-9:
                    return f"{ids} to {neighbour}: sample {i} from {float(row.norm()):.5g} to {float(other.norm()):.5g}"
        return "" if before is not None else None


def farthest(case):
    """How far one sample moves the clipped sum, as a multiple of what is promised, by the whole clipper.

    Samples that are drawn are clipped, and the same with one replaced, added or taken away, each batch by a clipper
    that has seen no other. None where no two of these batches are accepted.
    """
    case, r = replace(case, collated=False), random.Random(case.seed)
    data, ids = pool(case), r.sample(range(POOL), r.randint(2, 6))
    others, at = [i for i in range(POOL) if i not in ids], r.randrange(len(ids))
    norms = _clipped(case, data, ids, torch.inf)
    if norms is None or not (bound := float(norms.statistics.norms.median())) > 0:
        return None
    before, found = _clipped_sum(case, data, ids, bound), []
    for neighbour in (_replaced(ids, at, r.choice(others)), [*ids, r.choice(others)], _replaced(ids, at)):
        after = None if before is None else _clipped_sum(case, data, neighbour, bound)
        if after is not None:
            found.append(float((after - before).norm()) / bound / (1 if len(neighbour) != len(ids) else 2))
    return max(found, default=None)


def _clipped_sum(case, data, ids, bound):
    """The sum of clipped gradients, as one vector; None where the batch is refused."""
    clipper = _clipped(case, data, ids, bound)
    return clipper and torch.cat([each.flatten().double() for each in clipper.take().sums])


def _clipped(case, data, ids, bound):
    """A private clipper after a first batch; None where that is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Network(case).to(case.dtype)
        rule, first = gg.FlatNormClipper(bound), not case.time_first
        clipper = gg.PerSampleGradientClipper(
            model, rule, loss_reduction=case.reduction, mode=case.mode, batch_first=first
        )
        clipper.refuse_ambiguous_losses()
        case.constant = clipper.constant
        try:
            loss_of(case, model, collate(data, ids), 0).backward()
            clipper.clip_and_accumulate()
        except (gg.errors.GradguardError, RuntimeError, ValueError, IndexError):
            return None
        return clipper


def _replaced(ids, at, *new):
    return [*ids[:at], *new, *ids[at + 1 :]]


def _accepted(case, ids, number=0):
    try:
        return Checked(case).step(ids, number)
    except (gg.errors.GradguardError, RuntimeError, ValueError, IndexError):
        return None


def loss_of(case, model, b, number):
    """The loss of a batch, by the network and the dtypes of a case."""
    b = b.to(torch.float32 if case.wider else case.dtype)
    x = b.x.to(case.dtype)
    context = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    if case.inside:
        with context:
            return model(x, {k: v for k, v in vars(b).items() if k not in ("size", "x")}, number)
    with context:
        out = model(x.transpose(0, 1) if case.time_first else x)
    if case.wider:
        out = tuple(each.float() for each in out) if case.two else out.float()
    return case.loss(out, b, number)


def one_step(case, model, clipper, data, number, parts, of, bound, tolerance):
    total, bad_words = None, ""
    for ids, expected in zip(parts, of, strict=True):
        loss = loss_of(case, model, collate(data, ids, length_of(case, data, ids)), number)
        clipper.scaler.scale(loss).backward()
        finite = flat(expected).isfinite().all(1)
        if case.mode == "exact":
            got = {k: g.double() for k, g in clipper.per_sample_gradients().items()}
            if not all(g.isfinite().all() for g in got.values()) and finite.all():
                bad_words = bad_words or "not finite"
            error, bad = close(
                {k: g.nan_to_num(0) for k, g in got.items()},
                {k: g.nan_to_num(0) for k, g in expected.items()},
                tolerance,
            )
            bad &= finite
            if bad.any():
                i = int(error.where(finite, 0.0).argmax())
                sizes = float(flat(got)[i].norm()), float(flat(expected)[i].norm())
                words = f"sample {ids[i]}: norm {sizes[0]:.5g}, own {sizes[1]:.5g}, error {error[i]:.2g}"
                bad_words = bad_words or words
        clipper.clip_and_accumulate()
        lengths = flat(expected).norm(dim=1)
        told = clipper.statistics.norms.double()
        case.given.append(told)
        off = ((told - lengths).abs() > 2 * tolerance * lengths + 1e-9) & finite
        if len(told) != len(ids):
            return f"{len(told)} norms of {len(ids)} samples"
        if off.any():
            i = int(off.nonzero()[0])
            bad_words = bad_words or f"sample {ids[i]}: norm told {float(told[i]):.5g}, own {float(lengths[i]):.5g}"
        factors = (bound / lengths.clamp(min=1e-300)).clamp(max=1.0).nan_to_num(0.0)
        part = {
            k: (g.nan_to_num(0) * factors.where(finite, 0.0).view(-1, *[1] * (g.ndim - 1))).sum(0)
            for k, g in expected.items()
        }
        total = part if total is None else {k: total[k] + part[k] for k in total}
    count = sum(map(len, parts)) if case.reduction != "sum" else 1
    clipper.pre_step()
    got = {k: p.grad.double() / (SCALE if case.scaled else 1) for k, p in model.named_parameters()}
    if not bad_words and all(flat(part).isfinite().all() for part in of):
        size = bound * sum(map(len, parts)) / count
        for k, g in got.items():
            error = float((g - total[k] / count).norm()) / size
            if error > max(2 * tolerance, 1e-5):
                size = float((total[k] / count).norm())
                bad_words = f"clipped average of {k}: {float(g.norm()):.5g}, should be {size:.5g}"
                break
    for p in model.parameters():
        p.grad = None
    return bad_words


def plain_words(text):
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", text.split(": ", 1)[-1])[:110]


def main(first, last, reductions=("mean", "sum"), modes=()):
    counts, messages, examples = Counter(), Counter(), {}
    families, reduced = Counter(), Counter()
    for seed in range(first, last):
        drawn = next((DRAWS[mode] for mode in modes if mode in DRAWS), None)
        case = drawn(seed) if drawn else draw(seed, reductions, "glance" in modes)
        outcome = glance(case) if "glance" in modes and not case.through_the_network else trial(case)
        counts[outcome.kind] += 1
        counts["private " + outcome.kind] += case.private
        families[outcome.kind, case.family] += 1
        reduced[outcome.kind, case.reduction] += 1
        if outcome.kind in ("wrong", "crash", "doubtful", "told later", "out of sight"):
            print(outcome.kind.upper(), case, "\n    ", outcome.words, flush=True)
        if outcome.kind in ("false refusal", "refused"):
            key = outcome.kind, plain_words(outcome.words)
            messages[key] += 1
            examples.setdefault(key, []).append(f"{case} -> {outcome.words[:300]}")
        if seed % REPORT_EVERY == REPORT_EVERY - 1:
            print(seed + 1, dict(counts), flush=True)
    print(dict(counts))
    print({" of ".join(key): count for key, count in sorted(reduced.items())})
    for (kind, family), count in families.most_common():
        if kind in ("wrong", "doubtful", "told later", "out of sight"):
            print(f"{count:5} {kind}: {family}")
    for key, count in messages.most_common():
        if key[0] == "false refusal":
            print(f"{count:5} {key[1]}")
            for line in examples[key][:6]:
                print("         ", line)
    print("refused:")
    for key, count in messages.most_common():
        if key[0] == "refused":
            print(f"{count:5} {key[1]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed = torch.default_generator.manual_seed  # which looks for no accelerator
    modes = [word for word in sys.argv[1:] if word in ("glance", *DRAWS)]
    first, last, *rest = sys.argv[1 + len(modes) :]
    main(int(first), int(last), tuple(rest[0].split(",")) if rest else ("mean", "sum"), modes)

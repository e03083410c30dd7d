"""Models in plain torch that a person would write: every kind of layer, and every way of holding and using weights."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from per_sample.case import Model
from per_sample.zoo.case import B, ZooCase

T, D = 5, 6
NO_BFLOAT16 = ("eval", "train", "float32")
"""The plain model cannot be run in bfloat16, or on some processors only."""


def one(forward: Callable[..., Any] | nn.Module, inputs: Callable[[], Any], **parts: Any) -> ZooCase:
    """A model from its forward and its parts, which are made anew for each build."""

    options = {key: parts.pop(key) for key in ("loss", "modes") if key in parts}

    def build() -> nn.Module:
        made = {
            name: part() if callable(part) and not isinstance(part, nn.Module) else part for name, part in parts.items()
        }
        return Model(forward, **made)  # type: ignore[arg-type]

    return ZooCase(build, inputs, **options)


def whole(build: Callable[[], nn.Module], inputs: Callable[[], Any], **options: Any) -> ZooCase:
    """A model that is built as a whole."""
    return ZooCase(build, inputs, **options)


def rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(B, *shape),)


def words(length: int = T, vocabulary: int = 11) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocabulary, (B, length)),)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(0.5 * torch.randn(shape))


def linear(inside: int = D, outside: int = D, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inside, outside, bias)


# Layers of torch.nn


def convolutions(m: Any, x: Tensor) -> Tensor:
    h = m.norm1(m.conv1(x)).relu()
    h = F.silu(m.group(m.conv2(h)) + h)
    return m.head(F.adaptive_avg_pool2d(m.up(h), 2).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, D), kind(D, D, 2, batch_first=True, **options)
        self.head = nn.Linear(D * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


class Packed(Recurrent):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=T)[0])


class Cells(nn.Module):
    """A recurrent cell, step by step, from a learned first state."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell, self.start, self.head = kind(D, D), nn.Parameter(torch.randn(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.start.expand(len(x), D)
        if isinstance(self.cell, nn.LSTMCell):
            state = (state, torch.zeros_like(state))
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs, 1))


class Translator(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(T, 8))
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        first, second = self.embed(source) + self.positions, self.embed(target) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=first.dtype)
        if self.transformer.batch_first:
            return self.head(self.transformer(first, second, tgt_mask=mask))
        return self.head(self.transformer(first.transpose(0, 1), second.transpose(0, 1), tgt_mask=mask).transpose(0, 1))


def attention(m: Any, x: Tensor) -> Tensor:
    h, _ = m.attention(m.norm(x), m.norm(x), m.norm(x), need_weights=False)
    return m.head(x + h)


LAYERS: dict[str, ZooCase] = {
    "multilayer perceptron": whole(
        lambda: nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)), rows(D)
    ),
    "convolutions": one(
        convolutions,
        rows(3, 8, 8),
        conv1=lambda: nn.Conv2d(3, 4, 3, padding=1),
        norm1=lambda: nn.InstanceNorm2d(4, affine=True),
        conv2=lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
        group=lambda: nn.GroupNorm(2, 4),
        up=lambda: nn.ConvTranspose2d(4, 3, 2, stride=2),
        head=linear(12, 3),
    ),
    "convolution in time": whole(
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, padding=2, dilation=2, padding_mode="reflect"),
            nn.PReLU(4),
            nn.ConvTranspose1d(4, 2, 3, output_padding=1, stride=2),
        ),
        rows(3, 9),
    ),
    "convolution in space": whole(
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.ELU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 2)),
        rows(2, 3, 4, 5),
    ),
    "fold and unfold": one(
        lambda m, x: F.fold(m.mix(F.unfold(x, 2, stride=2).mT).mT, (6, 6), 2, stride=2), rows(2, 6, 6), mix=linear(8, 8)
    ),
    "bilinear": one(
        lambda m, x, y: m.b(x, y).tanh(), lambda: (torch.randn(B, 3), torch.randn(B, 5)), b=lambda: nn.Bilinear(3, 5, 2)
    ),
    "embedding bag": one(lambda m, x: m.head(m.bag(x)), words(), bag=lambda: nn.EmbeddingBag(11, D), head=linear()),
    "batch norm": whole(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)),
        rows(2, 6, 6),
    ),
    "batch norm, then in place": whole(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)
        ),
        rows(2, 6, 6),
    ),
    "all norms": one(
        lambda m, x: m.rms(m.layer(x)) + m.local(x.unsqueeze(1)).squeeze(1),
        rows(T, D),
        layer=lambda: nn.LayerNorm(D),
        rms=lambda: nn.RMSNorm(D),
        local=lambda: nn.LocalResponseNorm(2),
    ),
    "lstm": whole(lambda: Recurrent(nn.LSTM, dropout=0.1), words(), modes=NO_BFLOAT16),
    "lstm, two directions": whole(lambda: Recurrent(nn.LSTM, bidirectional=True), words(), modes=NO_BFLOAT16),
    "lstm with a projection": whole(
        lambda: nn.LSTM(D, D, 1, batch_first=True, proj_size=3), rows(T, D), modes=NO_BFLOAT16
    ),
    "gru": whole(lambda: Recurrent(nn.GRU), words()),
    "rnn": whole(lambda: Recurrent(nn.RNN, nonlinearity="relu"), words()),
    "packed sequences": whole(
        lambda: Packed(nn.LSTM), lambda: (*words()(), torch.tensor([3, 5, 2, 4])), modes=NO_BFLOAT16
    ),
    "lstm cell": whole(lambda: Cells(nn.LSTMCell), rows(T, D)),
    "gru cell": whole(lambda: Cells(nn.GRUCell), rows(T, D)),
    "attention": one(
        attention,
        rows(T, 8),
        norm=lambda: nn.LayerNorm(8),
        head=linear(8, 3),
        attention=lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True),
    ),
    "attention, other keys": one(
        lambda m, x, y: m.a(x, y, y)[0],
        lambda: (torch.randn(B, T, 8), torch.randn(B, 7, 4)),
        a=lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True, batch_first=True),
    ),
    "transformer encoder": whole(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True), 2, enable_nested_tensor=False
        ),
        rows(T, 8),
    ),
    "transformer": whole(Translator, lambda: (*words()(), *words()())),
    "transformer, samples second inside": whole(lambda: Translator(False), lambda: (*words()(), *words()())),
    "adaptive softmax": one(
        lambda m, x: m.softmax.log_prob(m.inner(x)),
        rows(D),
        inner=linear(D, 16),
        softmax=lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8]),
    ),
}


# Weights that are bare, shared, computed or handed over


class Handed(nn.Module):
    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        self.inner, self.strength = nn.Linear(D, D), strength

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return (self.inner(x) + self.strength * shift).tanh()


class PositionBias(nn.Module):
    """Attention with a bias from a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return x + self.out((q @ k.mT + bias).softmax(-1) @ v)


class SharedBias(nn.Module):
    """Two blocks share a bias that is made from weights alone, as in T5."""

    def __init__(self, length: int = T) -> None:
        super().__init__()
        self.length, self.table = length, nn.Embedding(2 * length, 1)
        self.blocks = nn.ModuleList([PositionBias(), PositionBias()])

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length) + self.length
        bias = self.table(distance).squeeze(-1)
        for block in self.blocks:
            x = block(x, bias)
        return x


class LowRank(nn.Module):
    """A frozen layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(self.drop(x)))


class Hypernetwork(nn.Module):
    """One network makes the weights of another, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.code = nn.Linear(3, D * 2 + 2), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        made = self.make(condition * self.code)
        return torch.einsum("bti,bio->bto", x, made[:, : D * 2].view(-1, D, 2)) + made[:, None, D * 2 :]


class FixedHypernetwork(nn.Module):
    """A network makes weights from weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, D * 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.code).view(2, D).tanh())


class Spectral(nn.Module):
    """Complex weights multiply a spectrum, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 3)
        self.weights = nn.Parameter(torch.randn(3, 3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).mT
        spectrum = torch.fft.rfft(h)[..., :4]
        mixed = torch.einsum("bik,iok->bok", spectrum, torch.view_as_complex(self.weights.to(h.dtype).contiguous()))
        return torch.fft.irfft(mixed, n=h.shape[-1])


class Experts(nn.Module):
    """A soft mixture, by einsum over weights of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.first = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, 4))
        self.second = nn.Parameter(torch.randn(3, 4, D))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("btd,edh->bteh", x, self.first).relu()
        return torch.einsum("bte,bteh,ehd->btd", self.gate(x).softmax(-1), hidden, self.second)


class Routed(nn.Module):
    """Each token goes to the best of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, D)
        weight, best = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            mine = (best == i).nonzero().flatten()
            out = out.index_add(0, mine, (weight[mine, None] * expert(tokens[mine])).to(out.dtype))
        return out.view_as(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Nothing(nn.Module):
    """A layer of width zero, as a configuration may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(D, 0), nn.Linear(0, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.narrow(x))


def parametrized() -> nn.Module:
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(D, 2))


def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 2))  # type: ignore[deprecated]


def pruned() -> nn.Module:
    layer = nn.Linear(D, D)
    prune.l1_unstructured(layer, "weight", 0.3)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(D, 2))


def tied(m: Any, x: Tensor) -> Tensor:
    h = m.embed(x)
    return F.linear((m.inner(h) + h).tanh(), m.embed.weight)


def autoencoder(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.first(x).tanh(), m.first.weight.t(), m.bias)


def universal(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + m.block(x)
    return x


class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def latents(m: Any, x: Tensor) -> Tensor:
    """Learned queries, one set for each sample."""
    queries = m.queries.expand(x.shape[0], -1, -1)
    return m.out((queries @ m.key(x).mT).softmax(-1) @ x)


def repeated(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.cat([m.token.repeat(len(x), 1, 1), x + m.positions], 1))


def contrastive(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.scale.exp() * F.normalize(m.first(x), dim=-1) @ F.normalize(m.second(y), dim=-1).mT


def pairwise(logits: Tensor) -> Tensor:
    """The sigmoid loss: every text against every image."""
    return F.softplus(logits * (1 - 2 * torch.eye(len(logits), dtype=logits.dtype))).sum() / len(logits)


class Cosine(nn.Module):
    """A head on the sphere: normalized weights and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.temperature = nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=-1).mT


class Scan(nn.Module):
    """A linear state space, run step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.skip = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.inner = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, -1)
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.decay.sigmoid() * state + value[:, t]
            outputs.append(state * gate[:, t].sigmoid() + self.skip * x[:, t])
        return torch.stack(outputs, 1)


WEIGHTS: dict[str, ZooCase] = {
    "tied head": one(tied, words(), embed=lambda: nn.Embedding(11, D), inner=linear()),
    "tied autoencoder": one(autoencoder, rows(D), first=linear(D, 4), bias=weight(D)),
    "one weight in two layers": whole(Universal, rows(T, D)),
    "one block three times": one(
        universal, rows(T, D), block=lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Dropout(0.1))
    ),
    "bare weights": one(
        lambda m, x: (x @ m.first + m.shift).tanh() @ m.second,
        rows(T, D),
        first=weight(D, 4),
        shift=weight(4),
        second=weight(4, 2),
    ),
    "a weight as argument": one(
        lambda m, x: m.out(m.handed(x, m.shift)), rows(D), handed=Handed, shift=weight(D), out=linear()
    ),
    "a weight as argument, faint": one(
        lambda m, x: m.out(m.handed(x, m.shift)), rows(D), handed=lambda: Handed(1e-4), shift=weight(D), out=linear()
    ),
    "a function of a weight as argument": one(
        lambda m, x: m.out(m.handed(x, m.shift.exp() * 0.1)), rows(D), handed=Handed, shift=weight(D), out=linear()
    ),
    "shared position bias": whole(SharedBias, rows(T, D)),
    "low-rank updates": whole(
        lambda: nn.Sequential(LowRank(nn.Linear(D, 8)), nn.GELU(), LowRank(nn.Linear(8, 3))), rows(T, D)
    ),
    "hypernetwork": whole(Hypernetwork, lambda: (torch.randn(B, T, D), torch.randn(B, 3))),
    "hypernetwork from weights alone": whole(FixedHypernetwork, rows(T, D)),
    "complex spectrum": whole(Spectral, rows(9, 2)),
    "complex weights": one(
        lambda m, x: torch.view_as_real(torch.fft.fft(x) * m.w).flatten(1),
        rows(D),
        w=lambda: nn.Parameter(torch.randn(D, dtype=torch.complex64)),
    ),
    "complex layer": one(
        lambda m, x: m.out(torch.fft.irfft(m.mix(torch.fft.rfft(m.drop(m.lift(x)), dim=1)), T, dim=1)),
        rows(T, 2),
        lift=linear(2, D),
        mix=lambda: nn.Linear(D, D, dtype=torch.complex64),
        drop=lambda: nn.Dropout(0.1),
        out=linear(),
        modes=NO_BFLOAT16,
    ),
    "soft mixture of experts": whole(Experts, rows(T, D)),
    "routed mixture of experts": whole(Routed, rows(T, D)),
    "symmetric parametrization": whole(parametrized, rows(D)),
    "weight norm": whole(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2)), nn.Tanh(), nn.Conv1d(3, 2, 2)),
        rows(2, 6),
    ),
    "orthogonal": whole(
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(D, D)), nn.Linear(D, 2)),
        rows(D),
        perturbed=False,
    ),
    "linear to no features": whole(lambda: nn.Sequential(nn.Linear(D, D), Nothing()), rows(D)),
    "spectral norm": whole(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), nn.Linear(D, 2)), rows(D)
    ),
    "old weight norm": whole(old_weight_norm, rows(D)),
    "old spectral norm": whole(
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, D)), nn.Linear(D, 2)), rows(D)
    ),
    "pruned": whole(pruned, rows(D)),
    "learned queries": one(latents, rows(T, D), queries=weight(2, D), key=linear(), out=linear()),
    "class token": one(repeated, rows(T, D), token=weight(1, 1, D), positions=weight(T, D), out=linear()),
    "cosine head": one(lambda m, x: m.head(m.inner(x)), rows(D), inner=linear(), head=Cosine),
    "state space by hand": whole(Scan, rows(T, D)),
    "mixed by softmaxed weights": one(
        lambda m, x: sum(w * h for w, h in zip(m.mix.softmax(0), (m.a(x), m.b(x).tanh(), x), strict=True)),
        rows(T, D),
        mix=weight(3),
        a=linear(),
        b=linear(),
    ),
    "frozen below": one(
        lambda m, x: m.head(m.body(x).relu()),
        rows(D),
        body=lambda: nn.Linear(D, D).requires_grad_(False),
        head=linear(D, 3),
    ),
}


# What happens on the way


class NormByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h += x
        return self.weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


class Residual(nn.Module):
    """In-place residual after a normalization that has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return F.relu_(out)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(D, D), nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.3:
                x = x + layer(x).tanh()
        return x


class Counting(nn.Module):
    """A buffer that every forward in train mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(D, D), nn.Parameter(torch.ones(D))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x) * self.scale / (1 + self.calls)


class StochasticDepth(nn.Module):
    """Each sample skips the block by its own chance."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.block(x)
        return x + self.block(x) * torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.8)


def noisy(m: Any, x: Tensor) -> Tensor:
    h = m.inner(x)
    return m.out((h + 0.1 * torch.randn_like(h) if m.training else h).relu())


def gumbel(m: Any, x: Tensor) -> Tensor:
    logits = m.inner(x)
    chosen = F.gumbel_softmax(logits, tau=0.7) if m.training else logits.softmax(-1)
    return m.out(chosen)


def variational(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_variance = m.encode(x).chunk(2, -1)
    noise = torch.randn_like(mean) if m.training else torch.zeros_like(mean)
    return m.decode(mean + (0.5 * log_variance).exp() * noise), mean, log_variance


def dropped_beside(m: Any, x: Tensor) -> Tensor:
    return m.inner(F.dropout(x * m.scale, 0.1, m.training))


def dropped_positions(m: Any, x: Tensor) -> Tensor:
    """Dropout of what no sample owns."""
    return m.inner(x + m.drop(m.positions))


def dropped_at_the_rate_of_a_layer(m: Any, x: Tensor) -> Tensor:
    return m.inner(F.dropout(x * m.scale, m.drop.p if m.training else 0.0))


def random_features(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.cos(x @ m.directions + m.phase))


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(checkpoint(m.block, h, use_reentrant=reentrant))

    return forward


def dynamic(m: Any, x: Tensor) -> Tensor:
    """A layer for some batches only."""
    h = m.a(x)
    return m.b(h) if x.shape[1] > 3 else m.c(h)


BLOCK = lambda: nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, D))  # noqa: E731

WAYS: dict[str, ZooCase] = {
    "in place after a layer": one(lambda m, x: m.b(m.a(x).relu_()), rows(T, D), a=linear(), b=linear()),
    "+= after a layer": one(
        lambda m, x: m.b(itertools.accumulate([m.a(x)]).__next__().add_(x)), rows(T, D), a=linear(), b=linear()
    ),
    "+= after a layer, norm by hand": whole(NormByHand, rows(T, D)),
    "+= after batch norm": whole(Residual, rows(2, 4, 4)),
    "layerdrop": whole(LayerDrop, rows(T, D)),
    "a buffer that counts": whole(Counting, rows(T, D)),
    "stochastic depth": whole(StochasticDepth, rows(T, D)),
    "noise in forward": one(noisy, rows(T, D), inner=linear(), out=linear()),
    "gumbel": one(gumbel, rows(T, D), inner=linear(), out=linear()),
    "variational": one(variational, rows(D), encode=linear(D, 6), decode=linear(3, D)),
    "dropout beside a bare weight": one(dropped_beside, rows(T, D), inner=linear(), scale=weight(D)),
    "dropout of positions": one(
        dropped_positions, rows(T, D), inner=linear(), drop=lambda: nn.Dropout(0.1), positions=weight(T, D)
    ),
    "dropout at the rate of a layer": one(
        dropped_at_the_rate_of_a_layer, rows(T, D), inner=linear(), drop=lambda: nn.Dropout(0.1), scale=weight(D)
    ),
    "random features": one(
        random_features,
        rows(D),
        out=linear(8, 2),
        phase=weight(8),
        directions=lambda: nn.Parameter(torch.randn(D, 8), requires_grad=False),
    ),
    "checkpoint": one(checkpointed(False), rows(T, D), first=linear(), block=BLOCK, head=linear()),
    "checkpoint, reentrant": one(checkpointed(True), rows(T, D), first=linear(), block=BLOCK, head=linear()),
    "a layer that is not used": one(dynamic, rows(T, D), a=linear(), b=linear(), c=linear()),
    "noise instead of dropout": whole(
        lambda: nn.Sequential(nn.Linear(D, D), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(D, 2)), rows(D)
    ),
}


# Samples that lie in unusual places


def concatenated(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two views of each sample go through the encoder as one batch."""
    first, second = m.encode(torch.cat([x, y])).tanh().chunk(2)
    return m.head(first * second)


def several_views(m: Any, x: Tensor) -> Tensor:
    h = m.encode(x.repeat_interleave(3, 0)).tanh()
    return m.head(h.view(len(x), 3, D).amax(1))


def several_views_strided(m: Any, x: Tensor) -> Tensor:
    h = m.encode(x.repeat(3, 1)).tanh()
    return m.head(h.view(3, len(x), D).amax(0))


class ModulatedConvolution(nn.Module):
    """Weights made for each sample, applied as groups of one image, as in StyleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(3, 2), nn.Parameter(torch.randn(4, 2, 3, 3))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        n = len(x)
        weight = self.weight * (1 + self.style(style))[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum([2, 3, 4], keepdim=True) + 1e-8)
        out = F.conv2d(x.reshape(1, n * 2, *x.shape[2:]), weight.flatten(0, 1), padding=1, groups=n)
        return out.view(n, 4, *x.shape[2:])


def without_padding(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Only tokens that are no padding go through the layers."""
    hidden = m.b(m.a(x[mask]).relu())
    out = torch.zeros(*mask.shape, D, dtype=hidden.dtype)
    out[mask] = hidden
    return m.head(out)


def sorted_by_length(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.argsort(descending=True, stable=True)
    return m.b(m.a(x[order]).tanh()[order.argsort()])


def adaptive(m: Any, x: Tensor) -> Tensor:
    """Each sample takes as many steps as it needs, the batch as many as the slowest."""
    running = torch.ones(len(x), dtype=torch.bool)
    for _ in range(5):
        x = torch.where(running[:, None], x + m.step(x).tanh(), x)
        running = running & (x.detach().square().mean(1) < 2)
        if not bool(running.any()):
            break
    return m.head(x)


class Quantized(nn.Module):
    """The nearest of a table of codes, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(D, 3), nn.Embedding(5, 3), nn.Linear(3, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encode(x)
        nearest = self.codes(torch.cdist(h, self.codes.weight).argmin(-1))
        commitment = (h - nearest.detach()).square().mean(-1) + (nearest - h.detach()).square().mean(-1)
        return self.decode(h + (nearest - h).detach()), commitment


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


def adversarial(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = m.encode(x).tanh()
    return m.label(h), m.domain(Reversed.apply(h * m.scale))


def ensemble(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda w, b: (x @ w + b).tanh())(m.w, m.b).mean(0)


def prompted(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = m.token
    return m.b(h)


class RoutedWithDropout(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1)) for _ in range(3)])


class PythonLayerDrop(LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.training or random.random() > 0.3:
                x = x + layer(x).tanh()
        return x


class NumpyLayerDrop(LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.training or numpy.random.random() > 0.3:
                x = x + layer(x).tanh()
        return x


class Replacing(nn.Module):
    """Builds another layer in its first forward, which draws numbers, and moves its weights there, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Sequential(nn.Linear(D, D)), 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            inner, self.layer = self.layer[0], nn.Sequential(nn.Linear(D, D), nn.Tanh())
            self.layer[0] = inner
        self.calls += 1
        return self.layer(x) / self.calls


PLACES: dict[str, ZooCase] = {
    "two views in one batch": one(
        concatenated, lambda: (torch.randn(B, D), torch.randn(B, D)), encode=linear(), head=linear(D, 3)
    ),
    "three views of a sample": one(several_views, rows(D), encode=linear(), head=linear(D, 3)),
    "three views of a sample, strided": one(several_views_strided, rows(D), encode=linear(), head=linear(D, 3)),
    "modulated convolution": whole(ModulatedConvolution, lambda: (torch.randn(B, 2, 5, 5), torch.randn(B, 3))),
    "without padding": one(
        without_padding,
        lambda: (torch.randn(B, T, D), torch.arange(T) < torch.tensor([[3], [5], [2], [4]])),
        a=linear(),
        b=linear(),
        head=linear(),
    ),
    "sorted by length": one(
        sorted_by_length, lambda: (torch.randn(B, D), torch.tensor([3, 5, 2, 4])), a=linear(), b=linear()
    ),
    "adaptive computation": one(adaptive, rows(D), step=linear(), head=linear(D, 3)),
    "vector quantization": whole(Quantized, rows(T, D)),
    "a backward of its own": one(
        adversarial, rows(D), encode=linear(), label=linear(D, 3), domain=linear(D, 2), scale=weight(D)
    ),
    "ensemble by vmap": one(ensemble, rows(D), w=weight(3, D, 4), b=weight(3, 4)),
    "a token written into a layer's output": one(prompted, rows(T, D), a=linear(), b=linear(), token=weight(D)),
    "as many tokens as samples": whole(lambda: SharedBias(B), rows(B, D)),
    "as many features as samples": one(
        lambda m, x: m.b(m.a(x) + m.bias) @ m.w,
        rows(B, B),
        a=linear(B, B),
        b=linear(B, B),
        bias=weight(B),
        w=weight(B, B),
    ),
    "routed mixture of experts, dropout": whole(RoutedWithDropout, rows(T, D)),
    "layerdrop by Python's random": whole(PythonLayerDrop, rows(T, D)),
    "layerdrop by NumPy": whole(NumpyLayerDrop, rows(T, D)),
    "a layer that is replaced in forward": whole(Replacing, rows(T, D), clippers=("fast",), modes=("train",)),
    "sparse embedding": one(lambda m, x: m.b(m.a(x)), words(), a=lambda: nn.Embedding(11, D, sparse=True), b=linear()),
}


# What must be refused, and losses beside the output


def capacity(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    chosen = h.sum(1) >= h.sum(1).topk(min(2, len(x))).values[-1]
    return m.b(h * chosen[:, None])


def centred(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h - h.mean(0))


def squared(weight: Tensor) -> Tensor:
    return 0.1 * weight.square().sum()


class Beside(nn.Module):
    """Its penalty reaches the loss beside what it returns.

    Args:
        way: How.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.mu, self.inner = way, nn.Parameter(torch.randn(D)), nn.Linear(D, 3)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        penalty = squared(self.mu)
        if self.way == "attribute":
            self.penalty = penalty
        elif self.way == "private attribute":
            self._penalty = penalty
        elif self.way == "list":
            self.kept[:] = [penalty]
        elif self.way == "attribute of a layer":
            self.inner.penalty = penalty
        elif self.way == "object":
            return self.inner(x * self.mu), Holder(penalty)
        elif self.way == "output":
            return self.inner(x * self.mu), penalty
        return self.inner(x * self.mu)

    def taken(self, output: Any) -> Tensor:
        """The penalty."""
        if self.way in ("object", "output"):
            return output[1].value if self.way == "object" else output[1]
        holder = {"attribute": self, "private attribute": self, "list": self, "attribute of a layer": self.inner}
        names = {"private attribute": "_penalty", "list": "kept"}
        found = getattr(holder[self.way], names.get(self.way, "penalty"))
        return found[0] if isinstance(found, list) else found


def expert_choice(m: Any, x: Tensor) -> Tensor:
    """Each expert takes the samples that suit it best."""
    scores, out = m.gate(x).softmax(-1), torch.zeros_like(x)
    for i, expert in enumerate((m.a, m.b)):
        weight, mine = scores[:, i].topk((len(x) + 1) // 2)
        out = out.index_add(0, mine, (weight[:, None] * expert(x[mine])).to(out.dtype))
    return out


def mixed_up(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(0.7 * h + 0.3 * h.flip(0))


class RunningMean(nn.Module):
    """Centres by a mean over all samples so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = (0.9 * self.mean + 0.1 * x.detach().mean(0)).to(x.dtype)
        return self.inner(x - self.mean)


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def beside(way: str) -> ZooCase:
    def loss(model: nn.Module, inputs: Any) -> Tensor:
        assert isinstance(model, Beside)
        output = model(*inputs)
        logits = output[0] if isinstance(output, tuple) else output
        return logits.square().sum(1).mean() + model.taken(output)

    return ZooCase(lambda: Beside(way), rows(D), loss=loss)


def by_hook() -> ZooCase:
    kept: list[Tensor] = []

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))
        model[0].register_forward_hook(lambda m, args, out: kept.__setitem__(slice(None), [out.square().mean(1)]))
        return model

    return ZooCase(build, rows(D), loss=lambda m, i: m(*i).square().sum(1).mean() + kept.pop().mean())


def by_closure() -> ZooCase:
    kept: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        kept[:] = [squared(m.mu)]
        return m.inner(x * m.mu)

    def loss(model: nn.Module, inputs: Any) -> Tensor:
        return model(*inputs).square().sum(1).mean() + kept[0]

    return one(forward, rows(D), mu=weight(D), inner=linear(D, 3), loss=loss)


def balanced() -> ZooCase:
    """A term that couples the batch: how evenly experts are used."""

    def forward(m: Any, x: Tensor) -> Tensor:
        shares = m.gate(x).softmax(-1)
        m.balance = shares.mean(0).square().sum()
        return (shares[:, None] * m.experts(x).view(-1, 3, 2)[..., :2].mT).sum(-1)

    def loss(model: Any, inputs: Any) -> Tensor:
        return model(*inputs).square().sum(1).mean() + model.balance

    return one(forward, rows(D), gate=linear(D, 3), experts=linear(D, 6), loss=loss)


def penalised() -> ZooCase:
    def loss(model: Any, inputs: Any) -> Tensor:
        return model(*inputs).square().sum(1).mean() + squared(model.a.weight)

    return one(lambda m, x: m.b(m.a(x).tanh()), rows(D), a=linear(), b=linear(), loss=loss)


REFUSED: dict[str, ZooCase] = {
    "capacity over the batch": one(capacity, rows(D), a=linear(), b=linear()),
    "experts choose": one(expert_choice, rows(D), gate=linear(D, 2), a=linear(), b=linear()),
    "mixed up": one(mixed_up, rows(D), a=linear(), b=linear()),
    "a running mean": whole(RunningMean, rows(D)),
    "attention over the batch": one(lambda m, x: (m.a(x) @ m.b(x).mT).sigmoid() @ x, rows(D), a=linear(), b=linear()),
    "centred over the batch": one(centred, rows(D), a=linear(), b=linear()),
    "two towers": one(
        lambda m, x, y: m.a(x) @ m.b(y).mT,
        lambda: (torch.randn(B, D), torch.randn(B, D)),
        a=linear(),
        b=linear(),
        loss=lambda m, i: m(*i).square().sum() / len(i[0]),
    ),
    "contrastive": one(
        contrastive,
        lambda: (torch.randn(B, D), torch.randn(B, D)),
        first=linear(),
        second=linear(),
        scale=weight(),
        loss=lambda m, i: pairwise(m(*i)),
    ),
    **{
        f"penalty beside the output: {way}": beside(way)
        for way in ("attribute", "private attribute", "list", "attribute of a layer", "object", "output")
    },
    "penalty beside the output: closure": by_closure(),
    "penalty beside the output: hook": by_hook(),
    "penalty in the loss": penalised(),
    "load balance beside the output": balanced(),
    "compiled": whole(lambda: torch.compile(nn.Sequential(nn.Linear(D, D), nn.Tanh()), backend="eager"), rows(D)),
    "compiled inside": whole(
        lambda: nn.Sequential(torch.compile(nn.Linear(D, D), backend="eager"), nn.Tanh()), rows(D)
    ),
}

CASES: dict[str, ZooCase] = {**LAYERS, **WEIGHTS, **WAYS, **PLACES, **REFUSED}

"""Attention modules of every kind, each with the queries and keys that attend, and a twin of QK-Clip by hand."""

import math

import torch
import torch.nn.functional as F
from torch import nn

SIZE, HEADS, WIDTH = 4, 4, 16


def rotated(x):
    """A rotary embedding of all dimensions: x of shape (batch, heads, tokens, size)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] / 10.0 ** torch.arange(half, device=x.device)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attends with what `vectors` returns; ``settings`` are those of the call."""

    def __init__(self, **settings):
        super().__init__()
        self.settings = settings
        self.mask = None

    def forward(self, x):
        query, key, value = self.vectors(x)
        out = F.scaled_dot_product_attention(query, key, value, self.mask, **self.settings)
        return out.transpose(1, 2).flatten(2)


class Separate(Attention):
    """Own layers with biases and a rotary embedding; fewer key heads where ``keys`` says so."""

    def __init__(self, keys=HEADS, repeated=False, bias=True, **settings):
        super().__init__(enable_gqa=keys != HEADS and not repeated, **settings)
        self.keys, self.repeated = keys, repeated
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=bias)
        self.k_proj = nn.Linear(WIDTH, keys * SIZE, bias=bias)
        self.v_proj = nn.Linear(WIDTH, keys * SIZE)

    def vectors(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = rotated(heads_of(q, HEADS)), rotated(heads_of(k, self.keys)), heads_of(v, self.keys)
        if self.repeated:
            k, v = (one.repeat_interleave(HEADS // self.keys, 1) for one in (k, v))
        return q, k, v

    def rows(self):
        """What is rescaled: parameters with their rows of each head, its key head, and the power of gamma."""
        for layer, heads, kind in ((self.q_proj, HEADS, "q"), (self.k_proj, self.keys, "k")):
            for parameter in layer.parameters():
                for head in range(heads):
                    yield parameter, slice(head * SIZE, (head + 1) * SIZE), kind, head


class Fused(Attention):
    """One layer for queries, keys and values in this order; ``keys`` key heads."""

    def __init__(self, keys=HEADS, **settings):
        super().__init__(enable_gqa=keys != HEADS, **settings)
        self.keys = keys
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * SIZE)

    def vectors(self, x):
        q, k, v = self.qkv(x).split([HEADS * SIZE, self.keys * SIZE, self.keys * SIZE], -1)
        return heads_of(q, HEADS), heads_of(k, self.keys), heads_of(v, self.keys)

    def rows(self):
        for parameter in self.qkv.parameters():
            for head in range(HEADS):
                yield parameter, slice(head * SIZE, (head + 1) * SIZE), "q", head
            for head in range(self.keys):
                start = (HEADS + head) * SIZE
                yield parameter, slice(start, start + SIZE), "k", head


class Latent(Attention):
    """Multi-head latent attention: keys of a head beside a rotary key that all heads share."""

    keys, nope, rope, of_value = HEADS, 3, 2, 5

    def __init__(self, **settings):
        super().__init__(**settings)
        self.q_b = nn.Linear(WIDTH, HEADS * (self.nope + self.rope))
        self.kv_a = nn.Linear(WIDTH, 6 + self.rope)
        self.kv_b = nn.Linear(6, HEADS * (self.nope + self.of_value))

    def vectors(self, x):
        q_nope, q_rope = heads_of(self.q_b(x), HEADS).split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a(x).split([6, self.rope], -1)
        k_nope, v = heads_of(self.kv_b(F.rms_norm(latent, (6,))), HEADS).split([self.nope, self.of_value], -1)
        k_rope = rotated(k_rope[:, None]).expand(-1, HEADS, -1, -1)
        return torch.cat([q_nope, rotated(q_rope)], -1), torch.cat([k_nope, k_rope], -1), v

    def rows(self):
        for parameter in self.q_b.parameters():
            for head in range(HEADS):
                start = head * (self.nope + self.rope)
                yield parameter, slice(start, start + self.nope), "q", head
                yield parameter, slice(start + self.nope, start + self.nope + self.rope), "rotary", head
        for parameter in self.kv_b.parameters():
            for head in range(HEADS):
                start = head * (self.nope + self.of_value)
                yield parameter, slice(start, start + self.nope), "k", head


class Folded(Separate):
    """Batch and heads in one dimension, as of old."""

    def forward(self, x):
        query, key, value = (one.flatten(0, 1) for one in self.vectors(x))
        out = F.scaled_dot_product_attention(
            query, key, value, self.mask, is_causal=self.settings.get("is_causal", False)
        )
        return out.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


class Torch(Attention):
    """`torch.nn.MultiheadAttention`."""

    keys = HEADS

    def __init__(self, batch_first=True, kdim=None, **settings):
        super().__init__(**settings)
        self.batch_first = batch_first
        more = {} if kdim is None else {"kdim": kdim, "vdim": WIDTH}
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **more)

    def _inputs(self, x):
        return x, x[..., : self.inner.kdim], x

    def forward(self, x):
        inputs = [one if self.batch_first else one.transpose(0, 1) for one in self._inputs(x)]
        causal = self.settings.get("is_causal", False)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if causal else self.mask
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask  # which means the opposite there
        out = self.inner(*inputs, need_weights=False, attn_mask=mask)[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _blocks(self):
        inner, half = self.inner, WIDTH
        if inner.in_proj_weight is None:
            return [(inner.q_proj_weight, 0, "q"), (inner.k_proj_weight, 0, "k"), *self._of(inner.in_proj_bias, half)]
        return [*self._of(inner.in_proj_weight, half), *self._of(inner.in_proj_bias, half)]

    @staticmethod
    def _of(parameter, half):
        return [(parameter, 0, "q"), (parameter, half, "k")]

    def vectors(self, x):
        made = {"q": 0, "k": 0}
        queries, keys, _ = self._inputs(x)
        for parameter, start, kind in self._blocks():
            rows = parameter[start : start + WIDTH]
            made[kind] = made[kind] + ((queries if kind == "q" else keys) @ rows.T if rows.dim() == 2 else rows)
        return heads_of(made["q"], HEADS), heads_of(made["k"], HEADS), None

    def rows(self):
        for parameter, start, kind in self._blocks():
            for head in range(HEADS):
                yield parameter, slice(start + head * SIZE, start + (head + 1) * SIZE), kind, head


@torch.no_grad()
def largest_logits(attention, x):
    """The largest logit of each head by itself, in float64, and with every position of its own."""
    query, key, _ = attention.vectors(x)
    scale = attention.settings.get("scale") or 1 / math.sqrt(query.shape[-1])
    batch, heads, length, _ = query.shape
    mask, found = attention.mask, []
    for head in range(heads):
        best = -math.inf
        shared = key[:, head * key.shape[1] // heads].double()
        for one in range(batch):
            logits = query[one, head].double() @ shared[one].T * scale
            seen = torch.ones(logits.shape, dtype=torch.bool)
            if attention.settings.get("is_causal"):
                seen = seen.tril()
            if mask is not None:
                seen &= mask if mask.dtype == torch.bool else mask > -1000
            best = max(best, float(logits[seen].max()))
        found.append(best)
    assert length > 1
    return torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def rescale(attention, largest, threshold, alpha):
    """QK-Clip as published, row by row; heads that share a key by the largest logit of their group."""
    groups = largest.reshape(attention.keys, -1).amax(1)
    for parameter, rows, kind, head in attention.rows():
        of = head if kind == "k" else head * attention.keys // HEADS
        gamma = min(1.0, threshold / float(groups[of]))
        power = {"q": alpha, "k": 1 - alpha, "rotary": 1.0}[kind]
        parameter[rows] *= gamma**power


KINDS = {
    "separate": Separate,
    "separate, causal": lambda: Separate(is_causal=True),
    "separate, a scale": lambda: Separate(scale=0.9, bias=False),
    "grouped": lambda: Separate(keys=2),
    "one key head": lambda: Separate(keys=1, is_causal=True),
    "grouped, keys repeated": lambda: Separate(keys=2, repeated=True),
    "fused": Fused,
    "fused and grouped": lambda: Fused(keys=2, is_causal=True),
    "latent": Latent,
    "latent, causal": lambda: Latent(is_causal=True),
    "torch's": Torch,
    "torch's, tokens first": lambda: Torch(batch_first=False),
    "torch's, causal": lambda: Torch(is_causal=True),
    "torch's, keys of another width": lambda: Torch(kdim=9),
}
PROJECTIONS = {"latent": ("q_b", "kv_b", 2)}


def made(kind, dtype=torch.float64, seed=0, size=2.0):
    """An attention whose logits are large, by its kind, and the projections that tell its layers."""
    torch.manual_seed(seed)
    attention = KINDS[kind]().to(dtype)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, size / math.sqrt(WIDTH))
    told = PROJECTIONS.get(kind.split(",")[0])
    return attention, None if told is None else {"": told}

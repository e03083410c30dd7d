"""Small models round every layer that the clipper has a rule for, and its options."""

from collections.abc import Callable

import torch
from torch import nn

from per_sample.case import B, Case, Model, T, case, numbers, tokens

CONVOLUTION_OPTIONS = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "dilation, same": {"dilation": 2, "padding": "same"},
    "groups, no bias": {"groups": 2, "bias": False},
    "depthwise": {"groups": 4, "padding": 1},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate", "stride": 2},
    "circular": {"padding": 1, "padding_mode": "circular", "groups": 2},
    "circular, same": {"padding": "same", "padding_mode": "circular", "dilation": 2, "kernel_size": 2},
}
TRANSPOSED_OPTIONS = {
    "plain": {},
    "stride, output padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "groups, no bias": {"groups": 2, "bias": False},
    "dilation": {"dilation": 2},
}


def convolution(kind: type, dims: int, options: dict) -> Case:
    middle = kind(4, 4, **{"kernel_size": 3, **options})
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 4, 1)
    return case(nn.Sequential(first, nn.Tanh(), middle), numbers(B, 2, *(6, 5, 4)[:dims]))


def convolutions() -> dict[str, Callable[[], Case]]:
    table = {}
    for dims in (1, 2, 3):
        for kind, options in (("Conv", CONVOLUTION_OPTIONS), ("ConvTranspose", TRANSPOSED_OPTIONS)):
            layer = getattr(nn, f"{kind}{dims}d")
            for name, option in options.items():
                table[f"{layer.__name__} {name}"] = lambda a=layer, d=dims, o=option: convolution(a, d, o)
    return table


def last(outputs):
    return outputs[0]


def attention(call, d=4, **options) -> Case:
    options = {"batch_first": True, **options}
    model = Model(call, inner=nn.Linear(3, d), attention=nn.MultiheadAttention(d, 2, **options), out=nn.Linear(d, 2))
    nn.init.normal_(model.attention.in_proj_bias) if model.attention.in_proj_bias is not None else None
    return case(model, numbers(B, T, 3))


def self_attention(m, x, **options):
    h = m.inner(x)
    return m.out(last(m.attention(h, h, h, **options)))


def time_major_attention(m, x):
    h = m.inner(x).transpose(0, 1)
    return m.out(last(m.attention(h, h, h, need_weights=False))).transpose(0, 1)


def cross_attention(m, x):
    h = m.inner(x)
    return m.out(last(m.attention(h, x, x.square())))


def causal(x):
    return torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)


def padded_attention(m, x):
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = x[:, 0, 0] > 0
    return self_attention(m, x, key_padding_mask=padding)


def weights_of_attention(m, x):
    h = m.inner(x)
    out, weights = m.attention(h, h, h, average_attn_weights=False)
    return {"out": m.out(out), "weights": weights}


def square_attention(call, **options) -> Case:
    """As many positions as samples: sizes cannot tell one from the other."""
    made = attention(call, **options)
    made.inputs = (numbers(B, B, 3),)
    return made


def recurrent(kind: str, call=None, **options) -> Case:
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True, **options}
    layer = getattr(nn, kind)(3, 2, **options)
    width = (options.get("proj_size") or 2) * (2 if options["bidirectional"] else 1)
    model = Model(call or (lambda m, x: m.out(last(m.rnn(x)))), rnn=layer, out=nn.Linear(width, 2))
    return case(model, numbers(B, T, 3))


def time_major_recurrent(m, x):
    return m.out(last(m.rnn(x.transpose(0, 1)))).transpose(0, 1)


def packed(m, x):
    lengths = torch.where(x[:, 0, 0] > 0, x.shape[1], x.shape[1] - 1)
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    padded, _ = nn.utils.rnn.pad_packed_sequence(m.rnn(sequence)[0], batch_first=True, total_length=x.shape[1])
    return m.out(padded)


def cells(m, x):
    state = None
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    return m.out(state[0] if isinstance(state, tuple) else state)


def offsets(m, x):
    starts = torch.arange(0, x.numel(), x.shape[1])
    return m.out(m.bag(x.reshape(-1), starts))


def normalised(layer: nn.Module, *shape: int) -> Case:
    nn.init.normal_(layer.weight)
    return case(nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer, nn.Tanh()), numbers(B, *shape))


def embedding(**options) -> Case:
    table = nn.Embedding(7, 4, **options)
    return case(nn.Sequential(table, nn.Tanh(), nn.Flatten(), nn.Linear(4 * T, 2)), tokens(B, T))


def bag(weights=False, **options) -> Case:
    table = nn.EmbeddingBag(7, 4, **options)
    model = Model(lambda m, x, w=None: m.out(m.bag(x, per_sample_weights=w).tanh()), bag=table, out=nn.Linear(4, 2))
    return case(model, tokens(B, T), *([numbers(B, T)] if weights else []))


def conv1d() -> Case:
    from transformers.pytorch_utils import Conv1D

    return case(nn.Sequential(Conv1D(5, 3), nn.Tanh(), Conv1D(2, 5)), numbers(B, T, 3))


def decoder(m, x):
    return m.layer(m.inner(x), m.inner(x.flip(1)[:, :2]))


LAYER_CASES: dict[str, Callable[[], Case]] = {
    "linear 2-D": lambda: case(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), numbers(B, 5)),
    "linear 3-D": lambda: case(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), numbers(B, T, 5)),
    "linear 4-D": lambda: case(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), numbers(B, 2, 3, 5)),
    "linear, no bias": lambda: case(nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh()), numbers(B, T, 5)),
    "linear, more positions than features": lambda: case(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), numbers(B, 20, 2)),
    "bilinear": lambda: case(Model(lambda m, x: m.b(x, x.tanh()), b=nn.Bilinear(3, 3, 2)), numbers(B, 3)),
    "prelu": lambda: case(nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), numbers(B, 3)),
    "hugging face Conv1D": conv1d,
    **convolutions(),
    "embedding": embedding,
    "embedding padding_idx": lambda: embedding(padding_idx=2),
    "embedding sparse": lambda: embedding(sparse=True),
    "embedding of one id": lambda: case(nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 2)), tokens(B)),
    "embedding bag sum": lambda: bag(mode="sum"),
    "embedding bag mean, padding_idx": lambda: bag(mode="mean", padding_idx=2),
    "embedding bag max": lambda: bag(mode="max"),
    "embedding bag with weights": lambda: bag(weights=True, mode="sum"),
    "embedding bag sparse": lambda: bag(mode="sum", sparse=True),
    "embedding bag with offsets": lambda: case(
        Model(offsets, bag=nn.EmbeddingBag(7, 4), out=nn.Linear(4, 2)), tokens(B, T), either="EmbeddingBag"
    ),
    "layer norm": lambda: normalised(nn.LayerNorm(5), T, 5),
    "layer norm 2-D": lambda: normalised(nn.LayerNorm(7), 7),  # no batch is as wide
    "layer norm, no bias": lambda: normalised(nn.LayerNorm(5, bias=False), T, 5),
    "layer norm of two dimensions": lambda: normalised(nn.LayerNorm((T, 5)), 2, T, 5),
    "rms norm": lambda: normalised(nn.RMSNorm(5), T, 5),
    "group norm": lambda: normalised(nn.GroupNorm(2, 4), 4, 3, 5),
    "group norm 2-D": lambda: normalised(nn.GroupNorm(2, 8), 8),
    "instance norm 1d": lambda: normalised(nn.InstanceNorm1d(4, affine=True), 4, 5),
    "instance norm 2d": lambda: normalised(nn.InstanceNorm2d(4, affine=True), 4, 3, 5),
    "instance norm 3d": lambda: normalised(nn.InstanceNorm3d(4, affine=True), 4, 2, 3, 2),
    "attention": lambda: attention(self_attention),
    "attention, no bias": lambda: attention(self_attention, bias=False),
    "attention bias_kv": lambda: attention(self_attention, add_bias_kv=True, add_zero_attn=True),
    "attention time major": lambda: attention(time_major_attention, batch_first=False),
    "attention time major, T = B": lambda: square_attention(time_major_attention, batch_first=False),
    "attention kdim": lambda: attention(cross_attention, kdim=3, vdim=3),
    "attention causal mask": lambda: attention(lambda m, x: self_attention(m, x, attn_mask=causal(x))),
    "attention causal mask, T = B": lambda: square_attention(lambda m, x: self_attention(m, x, attn_mask=causal(x))),
    "attention key padding": lambda: attention(padded_attention),
    "attention weights": lambda: attention(weights_of_attention),
    "encoder layer": lambda: case(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), numbers(B, T, 4)),
    "encoder layer, norm first, time major": lambda: case(
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, norm_first=True), numbers(T, B, 4, dim=1), batch_first=False
    ),
    "decoder layer": lambda: case(
        Model(decoder, inner=nn.Linear(3, 4), layer=nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True)),
        numbers(B, T, 3),
    ),
    "lstm": lambda: recurrent("LSTM"),
    "lstm, projection": lambda: recurrent("LSTM", proj_size=1, bidirectional=False),
    "lstm time major": lambda: recurrent("LSTM", time_major_recurrent, batch_first=False),
    "lstm, last state": lambda: recurrent("LSTM", lambda m, x: m.out(m.rnn(x)[1][0][-2:].transpose(0, 1).flatten(1))),
    "lstm packed": lambda: _either(recurrent("LSTM", packed), "cannot be told apart"),
    "gru": lambda: recurrent("GRU"),
    "gru, no bias": lambda: recurrent("GRU", bias=False, num_layers=1),
    "gru time major, T = B": lambda: _square(recurrent("GRU", time_major_recurrent, batch_first=False)),
    "rnn": lambda: recurrent("RNN", nonlinearity="tanh"),
    "rnn relu": lambda: recurrent("RNN", nonlinearity="relu"),
    "lstm cell": lambda: case(Model(cells, cell=nn.LSTMCell(3, 4), out=nn.Linear(4, 2)), numbers(B, T, 3)),
    "gru cell": lambda: case(Model(cells, cell=nn.GRUCell(3, 4), out=nn.Linear(4, 2)), numbers(B, T, 3)),
    "rnn cell": lambda: case(Model(cells, cell=nn.RNNCell(3, 4), out=nn.Linear(4, 2)), numbers(B, T, 3)),
}


def _either(made: Case, words: str) -> Case:
    made.either = words
    return made


def _square(made: Case) -> Case:
    made.inputs = (numbers(B, B, 3),)
    return made

"""Small models that are called in every way: nested, by keyword, parts alone, twice, checkpointed; and refusals."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from per_sample.case import B, Case, Model, T, case, numbers, tokens

Table = dict[str, Callable[[], Case]]

ALIKE = "cannot be told apart"
"""Of an error where sizes that belong to no sample equal the batch's."""


def mlp(*middle: nn.Module, inside: int = 3, outside: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, 4), *middle, nn.Linear(4, outside))


def coder(encoder: nn.Module | None = None) -> Model:
    encoder = encoder or nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    return Model(lambda m, x: m.decoder(m.encoder(x)), encoder=encoder, decoder=nn.Linear(4, 3))


def keywords(m, x, *, scale):
    return m.b(input=m.a(input=x).tanh()) * scale


def nested(m, batch):
    h = m.a(batch["x"]["values"]).tanh()
    return {"logits": m.b(h), "extra": (m.c(h), [batch["y"]])}


def masked(size: int) -> Case:
    """A constant ``[T, T]`` bias goes in beside the samples."""
    mask = torch.tril(torch.ones(size, size, dtype=torch.float64))
    model = Model(lambda m, x, mask: m.b(mask @ m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    made = case(model, numbers(B, size, 3), call=lambda m, inputs: m(inputs[0], mask.to(inputs[0].dtype)))
    made.either = ALIKE if size == B else ""
    return made


def looked_up(size: int) -> Case:
    """A constant index goes into an embedding from outside."""
    model = Model(lambda m, x, ids: m.b(m.a(x) + m.pos(ids)), a=nn.Linear(3, 4), pos=nn.Embedding(9, 4))
    model.b = nn.Linear(4, 2)
    made = case(model, numbers(B, size, 3), call=lambda m, inputs: m(inputs[0], torch.arange(size)))
    made.either = ALIKE if size == B else ""
    return made


def residual(reentrant: bool) -> Case:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        h = h + checkpoint(m.block, h, use_reentrant=reentrant)
        return m.b(checkpoint(m.block, h, use_reentrant=reentrant))

    block = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), nn.LayerNorm(4))
    return case(Model(forward, a=nn.Linear(3, 4), block=block, b=nn.Linear(4, 2)), numbers(B, T, 3), either="reentrant")


def containers() -> Case:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.towers["first"]["inner"]:
            x = x + layer(x).tanh()
        return m.towers["second"](x)

    inner = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Sequential(nn.Linear(4, 4)))])})
    towers = nn.ModuleDict({"first": inner, "second": nn.Linear(4, 2)})
    return case(Model(forward, towers=towers), numbers(B, T, 4))


def lenet() -> Case:
    features = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 4, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 5)]
    labels = tokens(B, vocabulary=5)
    made = case(nn.Sequential(*features, *head), numbers(B, 1, 8, 8), labels, call=lambda m, inputs: m(inputs[0]))
    made.loss = lambda outputs, inputs: F.cross_entropy(outputs, inputs[1], reduction="none")
    return made


def siamese() -> Case:
    def distance(model: nn.Module, inputs) -> Tensor:
        return (model(inputs[0]) - model(inputs[1])).square().sum(1, keepdim=True)

    return case(mlp(nn.Tanh()), numbers(B, 3), numbers(B, 3), call=distance)


def two_heads() -> Case:
    """Two calls of one root whose losses are added."""
    return case(mlp(nn.Tanh()), numbers(B, 3), numbers(B, T, 3), call=lambda m, i: (m(i[0]), m(i[1])))


def parts(encoder: nn.Module | None = None) -> Case:
    return case(coder(encoder), numbers(B, 3), call=lambda m, i: m.decoder(m.encoder(i[0])))


def both(m, i):
    return m.decoder(m.encoder(i[0])), m(i[0].sin())


def recurrent_rows(m, x):
    return m.out(m.norm(m.rnn(m.inner(x))[0]))


def time_first() -> Case:
    model = Model(recurrent_rows, inner=nn.Linear(3, 4), rnn=nn.LSTM(4, 4), norm=nn.LayerNorm(4), out=nn.Linear(4, 2))
    return case(model, numbers(T, B, 3, dim=1), batch_first=False)


def dropped(*layers: nn.Module, **options) -> Case:
    return case(nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2)), numbers(B, T, 3), stochastic=True, **options)


CALLS: Table = {
    "keywords": lambda: case(
        Model(keywords, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), numbers(B, 3), call=lambda m, i: m(x=i[0], scale=2.0)
    ),
    "keywords to a convolution": lambda: case(
        Model(lambda m, x: m.c(input=x).tanh(), c=nn.Conv1d(2, 3, 2)), numbers(B, 2, 5)
    ),
    "nested": lambda: case(
        Model(nested, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 1)),
        {"x": {"values": numbers(B, 3)}, "y": numbers(B, 2)},
    ),
    "two inputs": lambda: case(
        Model(lambda m, x, y: m.a(x) * m.b(y), a=nn.Linear(3, 2), b=nn.Linear(5, 2)), numbers(B, 3), numbers(B, 5)
    ),
    "a constant mask": lambda: masked(T),
    "a constant mask, T = B": lambda: masked(B),
    "constant ids": lambda: looked_up(T),
    "constant ids, T = B": lambda: looked_up(B),
    "checkpoint": lambda: residual(reentrant=False),
    "checkpoint, reentrant": lambda: residual(reentrant=True),
    "containers": containers,
    "lenet": lenet,
    "siamese": siamese,
    "two calls of different shapes": two_heads,
    "parts alone": parts,
    "parts alone, embedding": lambda: case(
        coder(nn.Embedding(7, 4)), tokens(B, T), call=lambda m, i: m.decoder(m.encoder(i[0]))
    ),
    "parts and whole": lambda: case(coder(), numbers(B, 3), call=both),
    "samples second": time_first,
    "samples second, T = B": lambda: case(mlp(nn.LayerNorm(4)), numbers(B, B, 3, dim=1), batch_first=False),
    "samples second, lookup": lambda: case(
        nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), tokens(T, B), batch_first=False
    ),
    "dropout": lambda: dropped(nn.Dropout(0.5)),
    "dropout in attention": lambda: dropped(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)),
    "dropout in an lstm": lambda: case(
        Model(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 2, 2, dropout=0.5, batch_first=True)),
        numbers(B, T, 3),
        stochastic=True,
    ),
    "randomised relu": lambda: dropped(nn.RReLU()),
}


# Samples that a layer cannot be told to own: exact or refused, never wrong


def shuffled(m, x):
    order = x.flatten(1).sum(1).argsort()
    return m.b(m.a(x[order]).tanh()[order.argsort()])


def shuffled_in_one_layer(m, x):
    order = x.flatten(1).sum(1).argsort()
    return m.b(torch.empty(len(x), 4, dtype=x.dtype).index_copy(0, order, m.a(x[order])))


def routed(m, x):
    """Each sample goes to one of two experts, by its own values alone."""
    to_first = x[:, 0] > 0
    out = m.gate(x)
    for expert, mine in ((m.first, to_first), (m.second, ~to_first)):
        out = out.index_add(0, mine.nonzero().flatten(), expert(x[mine]))
    return out


def swapped(m, x):
    return m.b(m.a(x.flip(0)).flip(0).tanh())


def experts(forward) -> Model:
    return Model(forward, gate=nn.Linear(3, 2), first=nn.Linear(3, 2), second=nn.Linear(3, 2))


def half_and_half(m, x):
    evens = torch.arange(0, len(x), 2)
    odds = torch.arange(1, len(x), 2)
    return x.new_zeros(len(x), 2).index_copy(0, evens, m.a(x[::2])).index_copy(0, odds, m.a(x[1::2]))


def outside(m, i):
    return F.linear(m(i[0]), m.decoder.weight.t())


OWNERSHIP: Table = {
    "samples shuffled": lambda: case(
        Model(shuffled, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), numbers(B, 3), either="sample"
    ),
    "samples shuffled in one layer": lambda: case(
        Model(shuffled_in_one_layer, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), numbers(B, 3), either="sample"
    ),
    "samples reversed": lambda: case(
        Model(swapped, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), numbers(B, T, 3), either="sample"
    ),
    "routed to experts": lambda: case(experts(routed), numbers(B, 3), either="sample"),
    "in two halves": lambda: case(Model(half_and_half, a=nn.Linear(3, 2)), numbers(B, 3), either="sample"),
    "weight used outside": lambda: case(coder(), numbers(B, 3), call=outside, either="decoder.weight"),
}


# Models that must be refused


def centred(m, x):
    return m.b(m.a(x) - m.a(x).mean(0))


def capacity(m, x):
    """The half of the batch with the highest scores goes through the expert."""
    out = m.gate(x)
    best = out[:, 0].argsort(descending=True)[: len(x) // 2]
    return out.index_add(0, best, m.first(x[best])) + 0 * m.second(x)


REFUSED: Table = {
    "batch norm": lambda: case(mlp(nn.BatchNorm1d(4)), numbers(B, 3), refused="GroupNorm"),
    "batch norm 2d": lambda: case(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), numbers(B, 1, 4, 4), refused="GroupNorm"
    ),
    "batch norm without parameters": lambda: case(
        mlp(nn.BatchNorm1d(4, affine=False)), numbers(B, 3), refused="GroupNorm"
    ),
    "embedding max_norm": lambda: case(
        nn.Sequential(nn.Embedding(7, 4, max_norm=1.0)), tokens(B, T), refused="max_norm"
    ),
    "embedding scale_grad_by_freq": lambda: case(
        nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True)), tokens(B, T), refused="scale_grad_by_freq"
    ),
    "embedding bag scale_grad_by_freq": lambda: case(
        nn.Sequential(nn.EmbeddingBag(7, 4, scale_grad_by_freq=True, mode="sum")),
        tokens(B, T),
        refused="scale_grad_by_freq",
    ),
}

MIXING: Table = {
    "centred over the batch": lambda: case(
        Model(centred, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), numbers(B, 3), refused="sample"
    ),
    "attention over the batch": lambda: case(
        Model(lambda m, x: m.b(m.a(x) @ m.a(x).mT @ x), a=nn.Linear(3, 4), b=nn.Linear(3, 2)),
        numbers(B, 3),
        refused="sample",
    ),
    "experts with a capacity": lambda: case(experts(capacity), numbers(B, 3), refused="sample"),
}

CALL_CASES: Table = {**CALLS, **OWNERSHIP}

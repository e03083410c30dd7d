"""Small models with every way in which parameters are held, shared, skipped and called."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from per_sample.case import B, Case, Model, T, case, next_token, numbers, tokens

Table = dict[str, Callable[[], Case]]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


# Bare parameters


def vit(m, x):
    h = m.patch(x)
    h = torch.cat([m.cls_token.expand(len(x), -1, -1), h], dim=1) + m.pos_embed
    h = h + m.mlp(m.norm(h)) + h.mean(1, keepdim=True)
    return m.head(h[:, 0])


def vision_transformer() -> Model:
    return Model(
        vit,
        patch=nn.Linear(3, 4),
        cls_token=parameter(1, 1, 4),
        pos_embed=parameter(1, T + 1, 4),
        norm=nn.LayerNorm(4),
        mlp=nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)),
        head=nn.Linear(4, 2),
    )


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside).requires_grad_(False)
        self.down, self.up = parameter(2, inside), parameter(outside, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class ScaledLinear(nn.Linear):
    """A subclass whose forward is not its parent's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.square(), 2 * self.weight, self.bias) + self.weight.sum()


class QuietLinear(nn.Linear):
    """A subclass that changes nothing."""


class Gate(nn.Module):
    """Its own code mixes bare parameters and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.scale, self.temperature = nn.Linear(4, 4), parameter(4), parameter()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * self.scale).sigmoid() * x / (1 + self.temperature.square()) + self.scale


BARE: Table = {
    "a scale": lambda: case(
        Model(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(3, 4), scale=parameter(4)), numbers(B, T, 3)
    ),
    "only a scale": lambda: case(Model(lambda m, x: (x * m.scale).tanh(), scale=parameter(3)), numbers(B, 3)),
    "a scalar": lambda: case(
        Model(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(3, 4), scale=parameter()), numbers(B, 3)
    ),
    "x @ W": lambda: case(
        Model(lambda m, x: (x @ m.W).tanh() @ m.V, W=parameter(3, 4), V=parameter(4, 2)), numbers(B, T, 3)
    ),
    "a bias as large as the batch": lambda: case(
        Model(lambda m, x: m.layer(x) + m.bias, layer=nn.Linear(3, B), bias=parameter(B)), numbers(B, B, 3)
    ),
    "einsum": lambda: case(
        Model(lambda m, x: torch.einsum("bti,hio->bhto", x, m.W).tanh(), W=parameter(2, 3, 4)), numbers(B, T, 3)
    ),
    "vit": lambda: case(vision_transformer(), numbers(B, T, 3)),
    "learned positions": lambda: case(
        Model(
            lambda m, x: m.out(m.inner(x) + m.positions[: x.shape[1]]),
            inner=nn.Linear(3, 4),
            positions=parameter(9, 4),
            out=nn.Linear(4, 2),
        ),
        numbers(B, T, 3),
    ),
    "learned positions, T = B": lambda: case(
        Model(
            lambda m, x: m.out(m.inner(x) + m.positions),
            inner=nn.Linear(3, 4),
            positions=parameter(B, 4),
            out=nn.Linear(4, 2),
        ),
        numbers(B, B, 3),
    ),
    "learned queries": lambda: case(
        Model(
            lambda m, x: m.out((m.queries.expand(len(x), -1, -1) @ m.inner(x).mT).softmax(-1) @ x),
            queries=parameter(2, 4),
            inner=nn.Linear(3, 4),
            out=nn.Linear(3, 2),
        ),
        numbers(B, T, 3),
    ),
    "a parameter list": lambda: case(
        Model(lambda m, x: sum(x * w for w in m.weights), weights=nn.ParameterList([parameter(3), parameter(1)])),
        numbers(B, 3),
    ),
    "lora": lambda: case(nn.Sequential(LoRA(3, 4), nn.Tanh(), LoRA(4, 2)), numbers(B, T, 3)),
    "linear subclass": lambda: case(nn.Sequential(ScaledLinear(3, 4), nn.Tanh(), QuietLinear(4, 2)), numbers(B, T, 3)),
    "parameters and children": lambda: case(
        nn.Sequential(nn.Linear(3, 4), Gate(), nn.Tanh(), Gate()), numbers(B, T, 3)
    ),
    "weight norm": lambda: case(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        numbers(B, T, 3),
    ),
    "orthogonal": lambda: case(
        nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2)), numbers(B, 4)
    ),
}


# Shared weights


def nano_gpt(length: int, head: str) -> Case:
    """Positions are looked up once for all samples; the head is tied as a module, or as a function."""

    def forward(m: nn.Module, ids: Tensor) -> Tensor:
        h = m.emb(ids) + m.pos(torch.arange(ids.shape[1]))
        h = m.norm(h + m.mlp(h))
        return m.head(h) if head != "function" else F.linear(h, m.emb.weight)

    model = Model(forward, emb=nn.Embedding(7, 4), pos=nn.Embedding(8, 4), norm=nn.LayerNorm(4))
    model.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    if head != "function":
        model.head = nn.Linear(4, 7, bias=False)
    if head == "tied":
        model.head.weight = model.emb.weight
    return case(model, tokens(B, length), loss=next_token)


def gpt2(**options) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager", use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    return case(GPT2LMHeadModel(config), tokens(B, T, vocabulary=11), call=ask_gpt2, loss=next_token)


def ask_gpt2(model, inputs):
    return model(input_ids=inputs[0])


def shared_in_two_places() -> Case:
    layer = nn.Linear(4, 4)
    first = nn.Sequential(nn.Linear(3, 4), layer, nn.Tanh())
    return case(nn.Sequential(first, nn.Sequential(layer, nn.Linear(4, 2))), numbers(B, T, 3))


def three_ways() -> Case:
    def forward(m: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return m.head((m.encoder(source).mean(1, keepdim=True) + m.decoder(target)).tanh())

    model = Model(forward, encoder=nn.Embedding(7, 4), decoder=nn.Embedding(7, 4), head=nn.Linear(4, 7))
    model.decoder.weight = model.head.weight = model.encoder.weight
    return case(model, tokens(B, T), tokens(B, 3))


def transposed_tie() -> Case:
    """An autoencoder whose decoder is the encoder's weight transposed, which only a function can do."""
    return case(
        Model(lambda m, x: F.linear(m.encoder(x).tanh(), m.encoder.weight.t()), encoder=nn.Linear(4, 3)), numbers(B, 4)
    )


SHARED: Table = {
    "gpt-2": gpt2,
    "gpt-2, untied": lambda: gpt2(tie_word_embeddings=False),
    "nano gpt": lambda: nano_gpt(T, "tied"),
    "nano gpt, T = B": lambda: nano_gpt(B, "tied"),
    "nano gpt, T = 1": lambda: nano_gpt(1, "tied"),
    "nano gpt, untied, T = B": lambda: nano_gpt(B, "own"),
    "nano gpt, functional head": lambda: nano_gpt(T, "function"),
    "nano gpt, functional head, T = B": lambda: nano_gpt(B, "function"),
    "tied three ways": three_ways,
    "tied, transposed": transposed_tie,
    "used twice": lambda: case(Model(lambda m, x: m.layer(m.layer(x).tanh()), layer=nn.Linear(4, 4)), numbers(B, T, 4)),
    "used three times, 2-D": lambda: case(
        Model(lambda m, x: m.layer(m.layer(m.layer(x).tanh()).sin()), layer=nn.Linear(4, 4)), numbers(B, 4)
    ),
    "used twice, other shapes": lambda: case(
        Model(lambda m, x: m.layer(x).mean(1) + m.layer(x[:, 0].sin()), layer=nn.Linear(4, 3)), numbers(B, T, 4)
    ),
    "convolution used twice": lambda: case(
        Model(lambda m, x: m.conv(m.conv(x).tanh()), conv=nn.Conv2d(2, 2, 3, padding=1)), numbers(B, 2, 4, 5)
    ),
    "norm used twice": lambda: case(
        Model(lambda m, x: m.norm(m.layer(m.norm(x))), norm=nn.LayerNorm(4), layer=nn.Linear(4, 4)), numbers(B, T, 4)
    ),
    "lstm used twice": lambda: case(
        Model(lambda m, x: m.rnn(m.rnn(x)[0])[0], rnn=nn.LSTM(3, 3, batch_first=True)), numbers(B, T, 3)
    ),
    "shared in two places": shared_in_two_places,
}


# Frozen and unused parameters


def frozen(only: str) -> Case:
    """Only parameters whose names end in ``only`` are trained."""
    conv = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    for name, p in conv.named_parameters():
        p.requires_grad_(name.endswith(only))
    return case(conv, numbers(B, 1, 3, 4))


def frozen_inside(model: Case, *names: str) -> Case:
    for name in names:
        model.model.get_parameter(name).requires_grad_(False)
    return model


def detached(m, x):
    return m.second(m.first(x).detach()) + m.third(x)


FROZEN: Table = {
    "only biases": lambda: frozen("bias"),
    "only weights": lambda: frozen("weight"),
    "only the first layer": lambda: frozen("0.weight"),
    "only the last layer": lambda: frozen("4.weight"),
    "gpt-2, frozen embedding and head": lambda: frozen_inside(gpt2(), "transformer.wte.weight"),
    "vit, frozen token": lambda: frozen_inside(case(vision_transformer(), numbers(B, T, 3)), "cls_token", "norm.bias"),
    "a layer unused": lambda: case(Model(lambda m, x: m.a(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2)), numbers(B, 3)),
    "a layer run for nothing": lambda: case(
        Model(lambda m, x: (m.b(x), m.a(x))[1], a=nn.Linear(3, 2), b=nn.Linear(3, 2)), numbers(B, 3)
    ),
    "a bare parameter unused": lambda: case(
        Model(lambda m, x: m.a(x), a=nn.Linear(3, 2), w=parameter(3)), numbers(B, 3)
    ),
    "a layer detached": lambda: case(
        Model(detached, first=nn.Linear(3, 4), second=nn.Linear(4, 2), third=nn.Linear(3, 2)), numbers(B, 3)
    ),
    "run without gradients": lambda: case(
        Model(
            lambda m, x: m.a(x) + torch.no_grad()(m.b)(x) + torch.no_grad()(m.a)(x),
            a=nn.Linear(3, 2),
            b=nn.Linear(3, 2),
        ),
        numbers(B, 3),
    ),
}


# In-place operations and reshapes


def flattened(m, x):
    return m.out(m.inner(x.reshape(-1, x.shape[-1])).tanh()).view(len(x), x.shape[1], -1)


def flattened_ids(m, x):
    return m.out(m.emb(x.reshape(-1)).tanh()).view(*x.shape, -1)


def time_major(m, x):
    return m.out(m.inner(x.transpose(0, 1)).tanh()).transpose(0, 1)


def flattened_time_major(m, x):
    rows = x.transpose(0, 1).reshape(-1, x.shape[-1])
    return m.out(m.inner(rows).tanh()).view(x.shape[1], len(x), -1).transpose(0, 1)


def frames(m, x):
    """A video: each frame through the convolutions, then a sequence."""
    h = m.conv(x.flatten(0, 1)).flatten(1).view(len(x), x.shape[1], -1)
    return m.rnn(h)[0]


def inplace(layer: nn.Module, *shape: int) -> Case:
    return case(nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(2)), numbers(B, *shape))


def lazy(made: Case) -> Case:
    made.call(made.model, made.inputs)
    made.model.double()
    return made


def added_in_place(m, x):
    h = m.first(x)
    h += x
    h.mul_(2)
    return m.second(h)


def pair(forward, inner=(3, 4), out=(4, 2)) -> Model:
    return Model(forward, inner=nn.Linear(*inner), out=nn.Linear(*out))


SHAPES: Table = {
    "flattened": lambda: case(pair(flattened), numbers(B, T, 3)),
    "flattened, T = B": lambda: case(pair(flattened), numbers(B, B, 3)),
    "flattened, T = 1": lambda: case(pair(flattened), numbers(B, 1, 3)),
    "flattened ids": lambda: case(Model(flattened_ids, emb=nn.Embedding(7, 4), out=nn.Linear(4, 2)), tokens(B, T)),
    "time major": lambda: case(pair(time_major), numbers(B, T, 3)),
    "time major, T = B": lambda: case(pair(time_major), numbers(B, B, 3)),
    "flattened, time major": lambda: case(pair(flattened_time_major), numbers(B, T, 3)),
    "flattened, time major, T = B": lambda: case(pair(flattened_time_major), numbers(B, B, 3)),
    "frames": lambda: case(
        Model(frames, conv=nn.Conv2d(1, 2, 3), rnn=nn.GRU(8, 3, batch_first=True)), numbers(B, T, 1, 4, 4)
    ),
    "channels last": lambda: case(
        Model(lambda m, x: m.conv(x.to(memory_format=torch.channels_last)), conv=nn.Conv2d(2, 3, 2)),
        numbers(B, 2, 4, 4),
    ),
    "not contiguous": lambda: case(
        pair(lambda m, x: m.out(m.inner(x.mT).mT[..., :3].mT), inner=(T, 4), out=(4, 3)), numbers(B, T, 3)
    ),
    "in place after linear": lambda: case(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), numbers(B, 3)
    ),
    "in place after linear 3-D": lambda: case(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), numbers(B, T, 3)
    ),
    "in place after convolution": lambda: lazy(inplace(nn.Conv2d(1, 2, 3), 1, 4, 5)),
    "in place after instance norm": lambda: lazy(inplace(nn.InstanceNorm2d(2, affine=True), 2, 4, 5)),
    "in place after embedding": lambda: case(
        nn.Sequential(nn.Embedding(7, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), tokens(B, T)
    ),
    "in-place addition": lambda: case(
        Model(added_in_place, first=nn.Linear(4, 4), second=nn.Linear(4, 2)), numbers(B, T, 4)
    ),
    "batch of one": lambda: case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), numbers(1, T, 3)),
    "batch of one, 2-D": lambda: case(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), numbers(1, 3)),
    "batch of one, flattened": lambda: case(pair(flattened), numbers(1, T, 3)),
    "one position": lambda: case(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), numbers(B, 1, 3)),
    "a scalar for each sample": lambda: case(
        pair(lambda m, x: m.out(m.inner(x).tanh()).squeeze(1), out=(4, 1)), numbers(B, 3)
    ),
}

STRUCTURE_CASES: Table = {**BARE, **SHARED, **FROZEN, **SHAPES}

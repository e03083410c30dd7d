"""Calls of attention and recurrent layers as the engine records them, and the loop that they are compared with."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gradguard.per_sample.contributions import Contribution, row_squares
from gradguard.per_sample.layers.attention import attention
from gradguard.per_sample.layers.call import BatchAxis, LayerCall
from gradguard.per_sample.layers.recurrent import recurrent, recurrent_cell

B, T, S, E, H = 3, 4, 5, 8, 2
FIRST, SECOND = BatchAxis(0), BatchAxis(1)


def rule(call):
    if isinstance(call.module, nn.MultiheadAttention):
        return attention(call)
    return (recurrent_cell if isinstance(call.module, nn.RNNCellBase) else recurrent)(call)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def output_axes(module, count):
    """Where each output has its samples."""
    if isinstance(module, nn.RNNCellBase):
        return [FIRST] * count
    first = FIRST if module.batch_first else SECOND
    return [first] + [FIRST if isinstance(module, nn.MultiheadAttention) else SECOND] * (count - 1)


def made(module, args, kwargs=None, *, axes=None, size=B, unused=(), wanted=None, seed=0):
    """A call as the engine records it: every tensor detached on its own, and gradients of some outputs."""
    kwargs = kwargs or {}
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    outputs = [output.detach() for output in tensors(module(*args, **kwargs))]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    args, kwargs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (tuple(args), kwargs))
    axes = [output_axes(module, 1)[0]] * len(tensors((args, kwargs))) if axes is None else axes
    return LayerCall(
        module=module,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        grads=[None if i in unused else grad for i, grad in enumerate(grads)],
        batch_size=size,
        axes=axes,
        grad_axes=output_axes(module, len(outputs)),
        wanted=frozenset(name for name, _ in module.named_parameters()) if wanted is None else frozenset(wanted),
        generator_state=state,
    )


def one(values, axis, size, i):
    """Sample ``i`` of a tensor, which may own several rows."""
    if axis is None:
        return values
    rows = values.shape[axis.dim] // size
    if axis.last:
        return values.index_select(axis.dim, torch.arange(rows) * size + i)
    return values.narrow(axis.dim, i * rows, rows)


def sample(tree, call, i):
    """Sample ``i`` of all arguments."""
    axes = iter(call.axes)
    return tree_map(lambda leaf: one(leaf, next(axes), call.batch_size, i) if isinstance(leaf, Tensor) else leaf, tree)


def as_dtype(tree, dtype):
    return tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) else leaf, tree)


def grads_of(module, args, kwargs, grads):
    outputs = tensors(module(*args, **kwargs))
    used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad([o for o, _ in used], parameters, [g for _, g in used], materialize_grads=True)
    return dict(zip(names, found, strict=True))


def looped(call):
    """Every sample's gradient on its own, ``[B, *shape]``."""
    each = []
    for i in range(call.batch_size):
        args, kwargs = sample((call.args, dict(call.kwargs)), call, i)
        grads = [
            None if grad is None else one(grad, axis, call.batch_size, i)
            for grad, axis in zip(call.grads, call.grad_axes, strict=True)
        ]
        each.append(grads_of(call.module, args, kwargs, grads))
    return {name: torch.stack([sample[name] for sample in each]) for name in call.wanted}


def assert_rows(found, expected, tolerance=1e-12):
    """Rows, norms and sums of each contribution agree."""
    assert found.keys() == expected.keys()
    factors = torch.linspace(0.5, 1.5, len(next(iter(expected.values()))), dtype=torch.float64)
    for name, rows in expected.items():
        contribution, rows = found[name], rows.double()
        assert isinstance(contribution, Contribution)
        size = max(1e-300, rows.abs().max().item())
        options = {"rtol": tolerance, "atol": tolerance * size, "msg": lambda words, name=name: f"{name}: {words}"}
        assert contribution.shape == rows.shape[1:], name
        torch.testing.assert_close(contribution.rows(0, len(rows)).double(), rows, **options)
        norms = contribution.with_recomputed(contribution.squared_norms())
        torch.testing.assert_close(norms.sqrt(), row_squares(rows).sqrt(), rtol=10 * tolerance, atol=10 * tolerance)
        total = contribution.weighted_sum(factors).double()
        torch.testing.assert_close(total, torch.einsum("b,b...->...", factors, rows), **options | {"rtol": 1e3})


def check(call, tolerance=1e-12):
    assert_rows(rule(call), looped(call), tolerance)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(module):
    """The module in float64 with values everywhere; several parameters start at zero."""
    module = module.double()
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=i) * 0.5)
    return module


LAYERS = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"kdim": 3, "vdim": 6},
    "widths, appended": {"kdim": 3, "vdim": 6, "bias": False, "add_bias_kv": True},
    "appended": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "appended and zero": {"add_bias_kv": True, "add_zero_attn": True},
}
INPUTS = ("self", "memory", "three", "values differ")


def causal(length, dtype=torch.bool):
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return mask if dtype is torch.bool else torch.zeros(length, length, dtype=dtype).masked_fill(mask, -torch.inf)


def blocked(*shape, seed=3):
    """A mask that blocks about a third, and never the first key."""
    mask = randn(*shape, seed=seed) > 0.4
    mask[..., 0] = False
    return mask


MASKS = {
    "none": lambda source: ({}, {}),
    "bool 2-D": lambda source: ({"attn_mask": blocked(T, source)}, {"attn_mask": None}),
    "float 2-D": lambda source: ({"attn_mask": randn(T, source, seed=4)}, {"attn_mask": None}),
    "bool 3-D": lambda source: ({"attn_mask": blocked(B * H, T, source)}, {"attn_mask": FIRST}),
    "float 3-D": lambda source: ({"attn_mask": randn(B * H, T, source, seed=4)}, {"attn_mask": FIRST}),
    "padding": lambda source: ({"key_padding_mask": blocked(B, source)}, {"key_padding_mask": FIRST}),
    "float padding": lambda source: ({"key_padding_mask": randn(B, source, seed=5)}, {"key_padding_mask": FIRST}),
    "both": lambda source: (
        {"attn_mask": blocked(T, source), "key_padding_mask": blocked(B, source, seed=6)},
        {"attn_mask": None, "key_padding_mask": FIRST},
    ),
    "both 3-D": lambda source: (
        {"attn_mask": randn(B * H, T, source, seed=4), "key_padding_mask": randn(B, source, seed=6)},
        {"attn_mask": FIRST, "key_padding_mask": FIRST},
    ),
}
WEIGHTS = {
    "weights": {},
    "weights of heads": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
}


def attention_inputs(module, kind, size=B, length=T):
    """Query, key and value in the layout of ``module``."""
    query = randn(size, length, E, seed=10)
    key, value = randn(size, S, module.kdim, seed=11), randn(size, S, module.vdim, seed=12)
    inputs = {"self": (query,) * 3, "memory": (query, key, key), "values differ": (query, query, query.flip(0).clone())}
    chosen = inputs.get(kind, (query, key, value))
    layouts: dict[int, Tensor] = {id(x): x if module.batch_first else x.transpose(0, 1).contiguous() for x in chosen}
    return [layouts[id(x)] for x in chosen]


def attention_call(layer=None, kind="self", mask="none", weights="weights", first=True, extra=None, **options):
    module = seeded(nn.MultiheadAttention(E, H, batch_first=first, **(layer or {})))
    inputs = attention_inputs(module, kind)
    masks, axes = MASKS[mask](inputs[1].shape[1 if first else 0])
    kwargs = {**masks, **WEIGHTS[weights], **(extra or {})}
    return made(module, inputs, kwargs, axes=[FIRST if first else SECOND] * 3 + list(axes.values()), **options)


RECURRENT = {
    "LSTM": (nn.LSTM, {}),
    "LSTM projected": (nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, {}),
    "RNN tanh": (nn.RNN, {}),
    "RNN relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def sequence(module, size=B, length=T):
    x = randn(length, size, module.input_size, seed=20)
    return x.transpose(0, 1).contiguous() if module.batch_first else x


def states(module, size=B):
    """Initial states of a layer, as its forward takes them."""
    directions = module.num_layers * (2 if module.bidirectional else 1)
    hidden = randn(directions, size, module.proj_size or module.hidden_size, seed=21)
    return (hidden, randn(directions, size, module.hidden_size, seed=22)) if module.mode == "LSTM" else hidden


def recurrent_call(name, state=False, size=B, length=T, options=None, **more):
    kind, own = RECURRENT[name]
    module = seeded(kind(3, 5, **own, **(options or {})))
    args = [sequence(module, size, length)] + ([states(module, size)] if state else [])
    axes = [FIRST if module.batch_first else SECOND] + [SECOND] * (len(tensors(args)) - 1)
    return made(module, args, axes=axes, size=size, **more)


CELLS = [
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
    lambda *sizes, **options: nn.RNNCell(*sizes, **options, nonlinearity="relu"),
]


def every_call(size=B, length=T, first=True, **more):
    """One call of each kind."""
    for kind in ("self", "memory"):
        module = seeded(nn.MultiheadAttention(E, H, batch_first=first))
        yield made(module, attention_inputs(module, kind, size, length), size=size, **more)
    for name in RECURRENT:
        yield recurrent_call(name, True, size, length, {"num_layers": 2, "batch_first": first}, **more)
    for cell in CELLS:
        module = seeded(cell(3, 5))
        hidden = randn(size, 5, seed=30)
        state = (hidden, randn(size, 5, seed=31)) if isinstance(module, nn.LSTMCell) else hidden
        yield made(module, [randn(size, 3, seed=29), state], size=size, **more)

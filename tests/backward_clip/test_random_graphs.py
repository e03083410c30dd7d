"""Random graphs: each value is clipped once, bit for bit as by a hook at each node, also from roots beside the loss."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

import gradguard as gg

RULES = [
    gg.ErrorClipByValue(0.3),
    gg.ErrorClipByValue(0.5, min=0.0),
    gg.ErrorClipByValue(0.0, min=-0.5),
    gg.ErrorClipByValue(2.0, min=-1.0),
    gg.ErrorClipByValue(1.0, min=0.1),
    gg.ErrorClipByValue(-0.1, min=-0.2),
    gg.ErrorClipByNorm(0.3),
]
ALPHAS, SLOPES = (1, 0.5, -1, 3), (0.01, 1.0, 4.0, -0.5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Operation = Callable[[Tensor, Tensor, int], object]
OPERATIONS: dict[str, Operation] = {
    "scale": lambda a, b, k: a * (3.0, -2.0, 0.5, 1.5)[k % 4],
    "add": lambda a, b, k: torch.add(a, b, alpha=ALPHAS[k % 4]),
    "sub": lambda a, b, k: torch.sub(a, b, alpha=ALPHAS[k % 4]),
    "add a constant": lambda a, b, k: torch.add(a, torch.ones(1, a.shape[-1]), alpha=ALPHAS[k % 4]),
    "subtract from a constant": lambda a, b, k: torch.sub(torch.ones(3, 1, 1), a, alpha=ALPHAS[k % 4]),
    "sigmoid gate": lambda a, b, k: a * b.sigmoid(),
    "tanh gate": lambda a, b, k: b.tanh() * a,
    "softmax gate": lambda a, b, k: a * b.softmax(-1),
    "mul": lambda a, b, k: a * b,
    "twice": lambda a, b, k: a + a,
    "relu": lambda a, b, k: F.relu(a),
    "relu in place": lambda a, b, k: (a * 1.5).relu_(),
    "leaky_relu": lambda a, b, k: F.leaky_relu(a, SLOPES[k % 4]),
    "threshold": lambda a, b, k: F.threshold(a, 0.1, 2.0),
    "hardtanh": lambda a, b, k: F.hardtanh(a),
    "tanh": lambda a, b, k: a.tanh(),
    "sigmoid": lambda a, b, k: a.sigmoid(),
    "cat": lambda a, b, k: torch.cat([a, b], k % 2),
    "stack": lambda a, b, k: torch.stack([a, b], k % 2),
    "chunk": lambda a, b, k: a.chunk(2, k % 2)[: k % 3 + 1],
    "unbind": lambda a, b, k: a.unbind(k % 2)[: k % 3 + 1],
    "slice": lambda a, b, k: a[..., k % 3 :],
    "select": lambda a, b, k: a[-1],
    "view": lambda a, b, k: a.view(-1),
    "transpose": lambda a, b, k: a.transpose(0, -1),
    "unsqueeze": lambda a, b, k: a.unsqueeze(k % 2),
    "squeeze": lambda a, b, k: a.squeeze(),
    "diagonal": lambda a, b, k: a.diagonal(),
    "clone": lambda a, b, k: a.clone(),
    "expand": lambda a, b, k: a.expand(k % 3 + 1, *a.shape),
    "sum": lambda a, b, k: a.sum(k % 2, keepdim=k % 3 > 0),
    "mean": lambda a, b, k: a.mean(k % 2, keepdim=k % 3 > 0),
    "sum in another dtype": lambda a, b, k: a.sum(-1, keepdim=True, dtype=DTYPES[k % 3]),
    "cast": lambda a, b, k: a.to(DTYPES[k % 3]),
    "overwrite a row": lambda a, b, k: a.clone().index_put_((torch.tensor(0),), b[0]),
    "copy into a column": lambda a, b, k: _copied_into(a, b),
}
Program = list[tuple[str, int, int, int]]
steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 4), st.integers(0, 8), st.integers(0, 11))
programs = st.lists(steps, min_size=3, max_size=16)


def _copied_into(a: Tensor, b: Tensor) -> Tensor:
    changed = a * 1.0
    changed[..., 0] = b[..., 0]
    return changed


def leaves_of(batch: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(batch, 6), (1, 6), (batch, 1), (), (batch, 6)]
    dtypes = [dtype, dtype, dtype, dtype, torch.float32]
    return [
        (2 * torch.randn(s, generator=generator)).to(d).requires_grad_() for s, d in zip(shapes, dtypes, strict=True)
    ]


def run(program: Program, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a sum of losses of what the program makes, and the losses; operands that do not fit are passed over."""
    values = [leaf * 1.25 for leaf in leaves]
    for name, i, j, k in program:
        try:
            made = OPERATIONS[name](values[-1 - i % len(values)], values[-1 - j % len(values)], k)
        except (RuntimeError, IndexError, ValueError):
            continue
        made = made if isinstance(made, tuple | list) else [made]
        values += [value for value in made if 0 < value.numel() <= 300]
    losses = []
    for number, value in enumerate([value for value in values if value.dim()][-4:]):
        weight = torch.linspace(-2, 3, value.numel(), dtype=value.dtype).view(value.shape)
        losses.append([(value * weight).sum(), value.sum(), value.mean(), value.sum().square()][number])
    terms = [loss.double() for loss in losses]
    return (torch.stack(terms).sum() if len(program) % 2 else sum(terms[1:], terms[0]) * 8), losses


def clip_by_hand(losses: list[Tensor], rule: gg.BaseErrorClip) -> None:
    """Put a hook on each node behind ``losses``, which are terms of the loss: the slow twin of a block."""
    slots: dict[Node, set[int]] = {}
    nodes = [loss.grad_fn for loss in losses]
    for node in nodes:
        for child, number in node.next_functions:
            if child is not None and child.next_functions:
                if child not in slots:
                    nodes.append(child)
                slots.setdefault(child, set()).add(number)
    for node, numbers in slots.items():

        def clip(grads, numbers=numbers):
            return tuple(rule.clip(g) if i in numbers and g is not None else g for i, g in enumerate(grads))

        node.register_prehook(clip)


def backward(loss: Tensor, kind: int, inner: GradientEdge, start: Tensor) -> None:
    """Run backwards from the loss, from a value behind it, or from both."""
    if kind == 0:
        loss.backward()
    elif kind == 1:
        torch.autograd.backward([loss, inner], [None, start])
    elif kind == 2:
        torch.autograd.backward([inner], [start])
    else:
        loss.backward(retain_graph=True)
        torch.autograd.backward([loss, inner], [None, start])


def gradients(program: Program, rule: gg.BaseErrorClip | None, batch: int, dtype, by_hand: bool, kind=0, which=0):
    leaves = leaves_of(batch, dtype)
    loss, losses = run(program, leaves)
    nodes = [one.grad_fn for one in losses]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes and n.next_functions]
    inner = nodes[len(losses) + which % (len(nodes) - len(losses))]
    metadata = inner._input_metadata[0]
    start = torch.full(tuple(metadata.shape), 7.0, dtype=metadata.dtype)
    if by_hand and rule is not None:
        clip_by_hand(losses, rule)
    with nullcontext() if by_hand else gg.error_clip(loss, rule):
        backward(loss, kind, GradientEdge(inner, 0), start)
    return [leaf.grad for leaf in leaves]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


SITUATIONS = (programs, st.sampled_from(RULES), st.sampled_from(DTYPES), st.integers(0, 3), st.integers(0, 200))


def compare(program, rule, dtype, kind, which):
    for batch in (1, 4):
        ours = gradients(program, rule, batch, dtype, False, kind, which)
        assert_equal(ours, gradients(program, rule, batch, dtype, True, kind, which))


@given(*SITUATIONS)
def test_each_value_is_clipped_once_bit_for_bit(program, rule, dtype, kind, which):
    compare(program, rule, dtype, kind, which)


@pytest.mark.slow
def test_the_random_graphs_are_really_clipped():
    clipped, names = 0, sorted(OPERATIONS)
    for seed in range(100):
        draw = torch.randint(0, 1 << 30, (10, 4), generator=torch.Generator().manual_seed(seed)).tolist()
        program = [(names[a % len(names)], b % 5, c % 9, d % 12) for a, b, c, d in draw]
        free = gradients(program, None, 4, torch.float32, by_hand=True)
        bound = gradients(program, RULES[0], 4, torch.float32, by_hand=False)
        clipped += any(a is not None and not torch.equal(a, b) for a, b in zip(free, bound, strict=True))
    assert clipped > 80


def test_a_custom_function_named_like_a_view_does_not_make_a_value_a_parameter():
    class Clone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    x = torch.ones(3, requires_grad=True)
    loss = (Clone.apply(x) * 7).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.tolist() == [1.5, 1.5, 1.5]


def times(factor):
    return lambda made, *taken: tuple(None if one is None else one * factor for one in made)


HOOKS = {
    "hook of the operation above": lambda h, y: y.grad_fn.register_hook(times(100)),
    "prehook of the operation above": lambda h, y: y.grad_fn.register_prehook(times(100)),
    "prehook of the value's own operation": lambda h, y: h.grad_fn.register_prehook(times(100)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["before the block", "in the block"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_gradient_that_a_hook_on_a_node_enlarges_is_clipped(name, when):
    x = torch.ones(3, requires_grad=True)
    h = x * 3
    y = h.relu()
    if when == "before the block":
        HOOKS[name](h, y)
    loss = y.sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(1.0)):
        if when == "in the block":
            HOOKS[name](h, y)
        loss.backward()
    late = name == "prehook of the value's own operation" and when == "in the block"  # comes after the clip
    assert x.grad.tolist() == [300.0 if late else 3.0] * 3

"""The slow twin of the error clip: four networks with their backward passes written out, a clamp after every step.

Each function returns the loss and the gradients of the leaves that it was given, in their order. `Clamp` is called on
the gradient of every intermediate value, accumulated over all that use the value, and on nothing else.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


class Clamp:
    """Clamps to ±bound; counts elements that are not 0, those that end at the bound, and gradients that it changed."""

    def __init__(self, bound: float) -> None:
        self.bound, self.elements, self.at_bound, self.gradients_changed = bound, 0, 0, 0

    def __call__(self, grad: Tensor) -> Tensor:
        clamped = grad.clamp(-self.bound, self.bound)
        self.elements += int(grad.count_nonzero())
        self.at_bound += int((clamped.abs() == self.bound).sum())
        self.gradients_changed += not torch.equal(clamped, grad)
        return clamped

    @property
    def share(self) -> float:
        return self.at_bound / self.elements


def uniform(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """A float64 leaf in ±scale."""
    unit = 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    return (scale * unit).requires_grad_()


def mlp_leaves() -> list[Tensor]:
    sizes = [5, 7, 6, 3]
    weights = [uniform(o, i, seed=o, scale=1.5) for i, o in pairwise(sizes)]
    return [uniform(4, 5, seed=1), *weights, *(uniform(size, seed=10 + size) for size in sizes[1:])]


def mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, b1: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    h1 = torch.tanh(x @ w1.t() + b1)
    h2 = torch.tanh(h1 @ w2.t() + b2)
    return (h2 @ w3.t() + b3 - 2.0).pow(2).mean()


def mlp_by_hand(clamp: Clamp, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, b1: Tensor, b2: Tensor, b3: Tensor):
    h1 = torch.tanh(x @ w1.t() + b1)
    h2 = torch.tanh(h1 @ w2.t() + b2)
    error = h2 @ w3.t() + b3 - 2.0
    square = clamp(torch.ones_like(error) / error.numel())
    grad = clamp(2 * error * square)
    weights, biases = [], []
    for below, weight in ((h2, w3), (h1, w2), (x, w1)):
        grad = clamp(grad)  # of ... @ w.t() + b
        biases.append(grad.sum(0))
        grad = clamp(grad)  # of ... @ w.t()
        weights.append(grad.t() @ below)
        grad = grad @ weight
        if below is not x:
            grad = clamp(clamp(grad) * (1 - below**2))
    return error.pow(2).mean(), [grad, *reversed(weights), *reversed(biases)]


def conv_leaves() -> list[Tensor]:
    shapes = [(2, 2, 8, 8), (3, 2, 3, 3), (3,), (4, 3, 3, 3), (4,), (5, 16), (5,)]
    return [uniform(*shape, seed=20 + i, scale=2.0) for i, shape in enumerate(shapes)]


_TARGET = torch.tensor([1, 3])


def conv(x: Tensor, k1: Tensor, b1: Tensor, k2: Tensor, b2: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = F.max_pool2d(F.relu(F.conv2d(x, k1, b1, padding=1)), 2)
    h = F.avg_pool2d(F.relu(F.conv2d(h, k2, b2, padding=1)), 2)
    return F.cross_entropy(F.linear(h.flatten(1), w, b), _TARGET, reduction="sum") / 50


def conv_by_hand(clamp: Clamp, x: Tensor, k1: Tensor, b1: Tensor, k2: Tensor, b2: Tensor, w: Tensor, b: Tensor):
    z1 = F.conv2d(x, k1, b1, padding=1)
    h1, where = F.max_pool2d(z1.relu(), 2, return_indices=True)
    z2 = F.conv2d(h1, k2, b2, padding=1)
    h2 = F.avg_pool2d(z2.relu(), 2)
    logits = h2.flatten(1) @ w.t() + b
    loss = -logits.log_softmax(1)[torch.arange(2), _TARGET].sum() / 50

    # The root is the loss divided by a constant: neither it nor the loss before the division is clamped.
    grad = clamp(-F.one_hot(_TARGET, 5).to(x.dtype) / 50)  # of log_softmax
    grad = clamp(grad - logits.softmax(1) * grad.sum(1, keepdim=True))  # of the logits
    grad_w, grad_b = grad.t() @ h2.flatten(1), grad.sum(0)
    grad = clamp(grad @ w)  # of flatten
    grad = clamp(grad.reshape(h2.shape))  # of the average
    grad = clamp((grad / 4).repeat_interleave(2, 2).repeat_interleave(2, 3))  # of relu
    grad = clamp(grad * (z2 > 0))  # of the convolution
    grad_k2, grad_b2 = torch.nn.grad.conv2d_weight(h1, k2.shape, grad, padding=1), grad.sum((0, 2, 3))
    grad = clamp(torch.nn.grad.conv2d_input(h1.shape, k2, grad, padding=1))  # of the maximum
    grad = clamp(F.max_unpool2d(grad, where, 2))  # of relu
    grad = clamp(grad * (z1 > 0))  # of the convolution
    grad_k1, grad_b1 = torch.nn.grad.conv2d_weight(x, k1.shape, grad, padding=1), grad.sum((0, 2, 3))
    grad_x = torch.nn.grad.conv2d_input(x.shape, k1, grad, padding=1)
    return loss, [grad_x, grad_k1, grad_b1, grad_k2, grad_b2, grad_w, grad_b]


def lstm_leaves() -> list[Tensor]:
    shapes = [(6, 3, 4), (3, 5), (3, 5), (20, 4), (20, 5), (20,)]
    return [uniform(*shape, seed=40 + i, scale=1.2) for i, shape in enumerate(shapes)]


def _loudness(steps: int, hidden: int) -> Tensor:
    return torch.linspace(-2, 3, steps * 3 * hidden, dtype=torch.float64).reshape(steps, 3, hidden)


def lstm(x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b: Tensor) -> Tensor:
    outputs = []
    for t in range(len(x)):
        gates = x[t] @ w_x.t() + h @ w_h.t() + b
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return (torch.stack(outputs) * _loudness(len(x), h.shape[1])).mean()


def lstm_by_hand(clamp: Clamp, x: Tensor, h0: Tensor, c0: Tensor, w_x: Tensor, w_h: Tensor, b: Tensor):
    hs, cs, steps = [h0], [c0], []
    for t in range(len(x)):
        i, f, g, o = (x[t] @ w_x.t() + hs[-1] @ w_h.t() + b).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cs.append(f * cs[-1] + i * g)
        hs.append(o * cs[-1].tanh())
        steps.append((i, f, g, o))
    loudness = _loudness(len(x), h0.shape[1])

    grad_stack = clamp(clamp(torch.ones_like(loudness) / loudness.numel()) * loudness)
    grad_x, grad_w_x, grad_w_h, grad_b = (torch.zeros_like(leaf) for leaf in (x, w_x, w_h, b))
    grad_h, grad_c = torch.zeros_like(h0), torch.zeros_like(c0)
    for t in reversed(range(len(x))):
        (i, f, g, o), squashed = steps[t], cs[t + 1].tanh()
        grad_h = clamp(grad_stack[t] + grad_h)  # the sum of both uses, then one clamp
        grad_o, grad_squashed = clamp(grad_h * squashed), clamp(grad_h * o)
        grad_c = clamp(grad_squashed * (1 - squashed**2) + grad_c)
        kept, new = clamp(grad_c), clamp(grad_c)
        grad_f, grad_i, grad_g = clamp(kept * cs[t]), clamp(new * g), clamp(new * i)
        grad_c = kept * f
        sigmoids = [clamp(grad * y * (1 - y)) for grad, y in ((grad_i, i), (grad_f, f), (grad_o, o))]
        chunks = [*sigmoids[:2], clamp(grad_g * (1 - g**2)), sigmoids[2]]
        grad = clamp(torch.cat(chunks, 1))  # of ... + b
        grad_b += grad.sum(0)
        grad = clamp(grad)  # of the sum of the products
        from_x, from_h = clamp(grad), clamp(grad)
        grad_w_x += from_x.t() @ x[t]
        grad_w_h += from_h.t() @ hs[t]
        grad_x[t] = from_x @ w_x
        grad_h = from_h @ w_h
    return (torch.stack(hs[1:]) * loudness).mean(), [grad_x, grad_h, grad_c, grad_w_x, grad_w_h, grad_b]


def branching_leaves() -> list[Tensor]:
    return [uniform(6, 5, seed=60), uniform(6, 5, seed=61)]


def branching(x: Tensor, u: Tensor) -> Tensor:
    h = torch.tanh(x)
    product = h * u
    total = h + product
    return (total * torch.exp(h)).mean()


def branching_by_hand(clamp: Clamp, x: Tensor, u: Tensor):
    h = torch.tanh(x)
    total, power = h + h * u, torch.exp(h)
    grad = clamp(torch.ones_like(h) / h.numel())
    grad_total, grad_power = clamp(grad * power), clamp(grad * total)
    grad_product = clamp(grad_total)
    grad_h = clamp(grad_total + grad_product * u + grad_power * power)
    return (total * power).mean(), [grad_h * (1 - h**2), grad_product * h]


NETWORKS = {
    "MLP": (mlp_leaves, mlp, mlp_by_hand),
    "conv net": (conv_leaves, conv, conv_by_hand),
    "LSTM": (lstm_leaves, lstm, lstm_by_hand),
    "branching": (branching_leaves, branching, branching_by_hand),
}

"""What the tests of the guard share: optimizers, problems, and what an optimizer holds."""

import copy

import torch
from torch import Tensor, nn

from gradguard import ClipByGlobalNorm

MAX_NORM = 0.5

FOLDING = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
}


class Third(torch.optim.Optimizer):
    """A foreign optimizer that counts in its groups, in its state and on itself, gradients or not."""

    def __init__(self, params):
        super().__init__(list(params), {"lr": 0.05, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                self.state[p].setdefault("calls", torch.zeros(())).add_(1)
                if p.grad is not None:
                    self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad
                    p.sub_(group["lr"] * p.grad)
        return loss


PLAIN = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "Adam, loop": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "a foreign one": Third,
    "a subclass": lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.05, momentum=0.9),
}

ALL = {f"{name}, fused": make for name, make in FOLDING.items()} | PLAIN


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def put_gradients(net: nn.Module, step: int, scale: float = 1.0) -> None:
    """Gradients of norm about 3, 6, 9, ..."""
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * (0.6 * (step + 1) * scale)


def spoil(net: nn.Module, value: float = float("nan")) -> None:
    next(net.parameters()).grad.view(-1)[0] = value


def held(net: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """Copies of everything that a step may change."""
    weights = [p.detach().clone() for p in net.parameters()]
    state = [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in net.parameters()]
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [weights, state, groups, len(optimizer.state)]


def assert_same(ours, theirs, tolerance: float = 0.0) -> None:
    """Bit-identical, tensors and numbers alike; or within ``tolerance``."""
    if isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key], tolerance)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, tolerance)
    else:
        assert ours == theirs


def clipper() -> ClipByGlobalNorm:
    return ClipByGlobalNorm(MAX_NORM)

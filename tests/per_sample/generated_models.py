"""Models drawn by seed that change between steps: how they change, what the change does, and when.

A change may let samples meet, act in the backward alone, or be harmless. The oracle is a twin of the model that is
changed in the same way and runs each sample alone, in plain autograd. ``python tests/per_sample/generated_models.py
FIRST LAST`` prints what came of the cases.
"""

import contextlib
import copy
import enum
import os
import random
import sys
import traceback
import types
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import gradguard as gg

TIME, WIDTH = 3, 4
REPORT_EVERY = 100

# ------------------------------------------------------------------------------------ what a change does to activations


def _attention(h):
    rows = h.flatten(1)
    return (rows @ rows.mT).softmax(-1) @ rows


def _capacity(h):
    """The four samples of the largest sum are worked on, as experts of a capacity do."""
    kept = h.flatten(1).sum(1).topk(min(4, len(h))).indices
    return h * torch.zeros(len(h), dtype=h.dtype).index_fill(0, kept, 1.0).view(-1, *[1] * (h.ndim - 1))


class _NormalizedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g / (g.flatten(1).norm(dim=1).view(-1, *[1] * (g.ndim - 1)) + 1e-9)


def _hooked(hook):
    def change(h):
        h = h.clone()
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return change


MIXING = {
    "centred": lambda h: h - h.mean(0),
    "a little centred": lambda h: h - 0.05 * h.mean(0),
    "centred, detached": lambda h: h - h.mean(0).detach(),
    "scaled by the batch": lambda h: h / (h.std() + 1),
    "scaled by the largest": lambda h: h / (h.abs().amax() + 1),
    "scaled, detached": lambda h: h / (h.detach().abs().amax() + 1),
    "rolled": lambda h: h + h.roll(1, 0),
    "softmax of the batch": lambda h: h * h.softmax(0),
    "cumulated": lambda h: h.cumsum(0),
    "batch norm": lambda h: F.batch_norm(h.flatten(1), None, None, training=True).view_as(h),
    "attention": lambda h: h + _attention(h).view_as(h),
    "capacity": _capacity,
    "gate of all": lambda h: h * (1.0 if h.sum() > 0 else 0.5),
    "the first is added": lambda h: h + h[:1],
    "the last is added, detached": lambda h: h + h[-1:].detach(),
    "sorted": lambda h: h.sort(0).values,
    "random permutation": lambda h: h + 0.1 * h[torch.randperm(len(h))],
    "batch size": lambda h: h / len(h),
}
BACKWARD = {
    "gradient centred": _hooked(lambda g: g - g.mean(0)),
    "gradient clamped": _hooked(lambda g: g.clamp(-0.01, 0.01)),
    "gradient of norm one": _hooked(lambda g: g / (g.norm() + 1e-9)),
    "gradient's rows of norm one": _NormalizedRows.apply,
    "gradient's sign": _hooked(torch.sign),
    "small gradients cut": _hooked(lambda g: g * (g.abs() > 0.02)),
}
HARMLESS = {
    "doubled": lambda h: 2 * h,
    "tanh": torch.tanh,
    "layer norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "shifted": lambda h: h + 0.5,
    "turned": lambda h: h.flip(-1),
    "gradient doubled": _hooked(lambda g: 2 * g),
    "own largest": lambda h: h / (h.abs().flatten(1).amax(1).view(-1, *[1] * (h.ndim - 1)) + 1),
    "own centred": lambda h: h - h.mean(-1, keepdim=True),
}
CHANGES = {**MIXING, **BACKWARD, **HARMLESS}

# ----------------------------------------------------------------------------------------------- what turns a change on
# A switch has what it puts on the block at the start, whether it is on in a forward, and how it is turned.

SWITCHES = {}
GLOBAL = {"on": False, "calls": 0}


@dataclass
class Switch:
    start: object = lambda m: None
    on: object = lambda m, x, flag: False
    turn: object = lambda m, on: None
    both: bool = True  # turned on the twin as well; False for what they share


class Kind(enum.Enum):
    PLAIN = 0
    MIX = 1


@dataclass
class Options:
    mix: bool = False


def attribute(name, off, value, on=bool):
    return Switch(
        lambda m: setattr(m, name, off() if callable(off) else off),
        lambda m, x, flag: on(getattr(m, name)),
        lambda m, state: setattr(
            m, name, (value if state else off)() if callable(value if state else off) else value if state else off
        ),
    )


def inner(make, put, on):
    """A value inside an object that stays the same object."""
    return Switch(
        lambda m: setattr(m, "holder", make()), lambda m, x, flag: on(m.holder), lambda m, state: put(m.holder, state)
    )


SWITCHES |= {
    "bool": attribute("mix", False, True),
    "int": attribute("level", 0, 3),
    "float": attribute("alpha", 0.0, 0.7),
    "str": attribute("kind", "plain", "mix", lambda v: v == "mix"),
    "none": attribute("extra", None, "something", lambda v: v is not None),
    "numpy": attribute("level", np.int64(0), np.int64(1)),
    "enum": attribute("kind", Kind.PLAIN, Kind.MIX, lambda v: v is Kind.MIX),
    "tuple": attribute("pair", (False, 1), (True, 1), lambda v: v[0]),
    "list": inner(lambda: [False], lambda h, s: h.__setitem__(0, s), lambda h: h[0]),
    "list grows": inner(list, lambda h, s: h.append(1) if s else h.clear(), len),
    "dict": inner(dict, lambda h, s: h.update(mix=s), lambda h: h.get("mix", False)),
    "set": inner(set, lambda h, s: h.add("mix") if s else h.discard("mix"), lambda h: "mix" in h),
    "namespace": inner(types.SimpleNamespace, lambda h, s: setattr(h, "mix", s), lambda h: getattr(h, "mix", False)),
    "dataclass": inner(Options, lambda h, s: setattr(h, "mix", s), lambda h: h.mix),
    "dict in dict": inner(lambda: {"a": {}}, lambda h, s: h["a"].update(mix=s), lambda h: h["a"].get("mix", False)),
    "tensor": attribute("gate", lambda: torch.tensor(0.0), lambda: torch.tensor(1.0)),
    "tensor in place": inner(lambda: torch.zeros(()), lambda h, s: h.fill_(float(s)), lambda h: bool(h)),
    "class attribute": Switch(
        lambda m: setattr(type(m), "mixes", False),
        lambda m, x, flag: m.mixes,
        lambda m, s: setattr(type(m), "mixes", s),
    ),
    "global": Switch(
        lambda m: GLOBAL.update(on=False), lambda m, x, flag: GLOBAL["on"], lambda m, s: GLOBAL.update(on=s), both=False
    ),
    "environment": Switch(
        lambda m: os.environ.pop("GRADGUARD_TEST_MIX", None),
        lambda m, x, flag: "GRADGUARD_TEST_MIX" in os.environ,
        lambda m, s: (
            os.environ.__setitem__("GRADGUARD_TEST_MIX", "1") if s else os.environ.pop("GRADGUARD_TEST_MIX", None)
        ),
        both=False,
    ),
    "training": Switch(lambda m: m.eval(), lambda m, x, flag: m.training, lambda m, s: m.train(s)),
    "training of a child": Switch(
        lambda m: m.quiet.eval(), lambda m, x, flag: m.quiet.training, lambda m, s: m.quiet.train(s)
    ),
    "attribute of a child": Switch(
        lambda m: setattr(m.quiet, "mix", False),
        lambda m, x, flag: m.quiet.mix,
        lambda m, s: setattr(m.quiet, "mix", s),
    ),
    "keyword": Switch(on=lambda m, x, flag: flag),
    "counter": Switch(lambda m: setattr(m, "calls", 0), lambda m, x, flag: m.count() > 12),
    "counter in a list": Switch(lambda m: setattr(m, "holder", [0]), lambda m, x, flag: m.count_in_list() > 12),
    "more than 3 samples": Switch(on=lambda m, x, flag: len(x) > 3),
    "5 samples": Switch(on=lambda m, x, flag: len(x) == 5),
    "more than 6 samples": Switch(on=lambda m, x, flag: len(x) > 6),
    "a large value": Switch(on=lambda m, x, flag: bool(x.abs().amax() > 2.6)),
    "a sum": Switch(on=lambda m, x, flag: bool(x.sum() > 3)),
    "chance": Switch(on=lambda m, x, flag: bool(torch.rand(()) < 0.4)),
    "python's chance": Switch(on=lambda m, x, flag: random.random() < 0.4),
    "gradients are on": Switch(on=lambda m, x, flag: torch.is_grad_enabled()),
    "float32": Switch(on=lambda m, x, flag: x.dtype == torch.float32),
    "rows differ": Switch(on=lambda m, x, flag: not bool((x == x[:1]).all()) and len(x) > 3),
    "a weight": Switch(on=lambda m, x, flag: bool(m.layer.weight.detach().flatten()[0] > m.threshold)),
}


def _buffer_start(m):
    m.register_buffer("gate", torch.zeros(()))


SWITCHES["buffer"] = Switch(_buffer_start, lambda m, x, flag: bool(m.gate > 0), lambda m, s: m.gate.fill_(float(s)))
SWITCHES["buffer replaced"] = Switch(
    _buffer_start, lambda m, x, flag: bool(m.gate > 0), lambda m, s: setattr(m, "gate", torch.tensor(float(s)))
)

# Switches that put the change itself somewhere; the block applies nothing by itself.


@contextlib.contextmanager
def _nothing():
    yield


def _hook(kind):
    def turn(m, on):
        if not on:
            for handle in m.__dict__.pop("handles", []):
                handle.remove()
            return
        change = m.change[0]
        register = {
            "forward hook": lambda: m.layer.register_forward_hook(lambda _, args, out: change(out)),
            "forward hook on the block": lambda: m.register_forward_hook(lambda _, args, out: change(out)),
            "forward pre hook": lambda: m.layer.register_forward_pre_hook(lambda _, args: (change(args[0]),)),
            "forward hook with keywords": lambda: m.layer.register_forward_hook(
                lambda _, args, kwargs, out: change(out), with_kwargs=True
            ),
            "hook on an activation": lambda: m.act.register_forward_hook(lambda _, args, out: change(out)),
        }[kind]
        m.__dict__["handles"] = [register()]

    return Switch(turn=turn)


for _kind in (
    "forward hook",
    "forward hook on the block",
    "forward pre hook",
    "forward hook with keywords",
    "hook on an activation",
):
    SWITCHES[_kind] = _hook(_kind)


def _patched_forward(m, on):
    if on:
        m.layer.forward = lambda x, layer=m.layer, change=m.change[0]: change(type(layer).forward(layer, x))
    else:
        m.layer.__dict__.pop("forward", None)


def _patched_block(m, on):
    if on:
        plain = type(m).forward
        m.forward = lambda x, flag=False, m=m, change=m.change[0]: change(plain(m, x, flag))
    else:
        m.__dict__.pop("forward", None)


class _Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = [change]

    def forward(self, x):
        return self.change[0](x)


class _Appended(nn.Linear):
    change = (torch.tanh,)

    def forward(self, x):
        return self.change[0](super().forward(x))


def _class_of_the_layer(m, on):
    m.layer.__class__ = type("Changed", (_Appended,), {"change": (m.change[0],)}) if on else nn.Linear


def _replaced_layer(m, on):
    if on:
        new = type("Changed", (_Appended,), {"change": (m.change[0],)})(WIDTH, WIDTH).to(m.layer.weight.dtype)
        new.load_state_dict(m.layer.state_dict())
        m.layer = new


SWITCHES |= {
    "forward of the layer": Switch(turn=_patched_forward),
    "forward of the block": Switch(turn=_patched_block),
    "class of the layer": Switch(turn=_class_of_the_layer),
    "replaced layer": Switch(turn=_replaced_layer),
    "replaced activation": Switch(turn=lambda m, on: setattr(m, "act", _Changed(m.change[0]) if on else nn.Tanh())),
    "appended to a Sequential": Switch(turn=lambda m, on: m.tail.append(_Changed(m.change[0])) if on else None),
    "replaced in a Sequential": Switch(
        turn=lambda m, on: m.tail.__setitem__(0, _Changed(m.change[0]) if on else nn.Identity())
    ),
    "function attribute": Switch(
        lambda m: setattr(m, "function", [_identity]),
        None,
        lambda m, on: m.function.__setitem__(0, m.change[0] if on else _identity),
    ),
    "plain function attribute": Switch(
        lambda m: setattr(m, "plain_function", _identity),
        None,
        lambda m, on: setattr(m, "plain_function", m.change[0] if on else _identity),
    ),
}


def _identity(h):
    return h


# Switches that do the same operations whether on or off: what they blend in has no weight until then, or is another
# operand. The drawn change does not matter.


def _blend(make, put, blend):
    def start(m):
        m.__dict__["blending"] = [blend]
        make(m)

    return Switch(start, None, put)


def _own_mean(h):
    return h.mean(-1, keepdim=True)


OUTSIDE = {"tensor": torch.zeros(())}
BLENDS = {
    "weight in a dict": _blend(
        lambda m: setattr(m, "holder", {"a": {"b": 0.0}}),
        lambda m, s: m.holder["a"].update(b=0.7 * s),
        lambda m, h: h - m.holder["a"]["b"] * h.mean(0),
    ),
    "weight in a buffer": _blend(
        lambda m: m.register_buffer("gate", torch.zeros(())),
        lambda m, s: m.gate.fill_(0.7 * s),
        lambda m, h: h - m.gate * h.mean(0),
    ),
    "weight in a buffer of ones": _blend(
        lambda m: m.register_buffer("gate", torch.ones(WIDTH)),
        lambda m, s: m.gate.fill_(0.3 if s else 1.0),
        lambda m, h: h * m.gate + (1 - m.gate) * h.flip(0),
    ),
    "weight in a frozen parameter": _blend(
        lambda m: setattr(m, "frozen_gate", nn.Parameter(torch.zeros(()), requires_grad=False)),
        lambda m, s: m.frozen_gate.data.fill_(0.7 * s),
        lambda m, h: h - m.frozen_gate * h.mean(0),
    ),
    "weight in a tensor outside": _blend(
        lambda m: OUTSIDE["tensor"].zero_(),
        lambda m, s: OUTSIDE["tensor"].fill_(0.7 * s),
        lambda m, h: h - OUTSIDE["tensor"].to(h) * h.mean(0),
    ),
    "other operand": _blend(
        lambda m: setattr(m, "holder", {"of all": False}),
        lambda m, s: m.holder.update({"of all": s}),
        lambda m, h: h - (h.mean(0) + 0 * _own_mean(h) if m.holder["of all"] else 0 * h.mean(0) + _own_mean(h)),
    ),
    "chosen operand": _blend(
        lambda m: setattr(m, "holder", {"a": {"which": 0}}),
        lambda m, s: m.holder["a"].update(which=int(s)),
        lambda m, h: h - (_own_mean(h).expand_as(h), h.mean(0).expand_as(h))[m.holder["a"]["which"]],
    ),
    "index in a buffer": _blend(
        lambda m: m.register_buffer("shift", torch.zeros((), dtype=torch.long)),
        lambda m, s: m.shift.fill_(int(s)),
        lambda m, h: h + 0.3 * h[(torch.arange(len(h)) + m.shift) % len(h)],
    ),
    "where on a value": _blend(
        lambda m: None, lambda m, s: None, lambda m, h: torch.where(h.sum() > 4, h - h.mean(0), h)
    ),
    "rare clamp of the batch": _blend(
        lambda m: None, lambda m, s: None, lambda m, h: h / h.detach().abs().amax().clamp(min=2.5)
    ),
}
SWITCHES |= BLENDS


# Changes of the layer itself, none of which lets samples meet.
class _Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def _parametrized(m, on):
    if on and not parametrize.is_parametrized(m.layer):
        parametrize.register_parametrization(m.layer, "weight", _Twice())


def _batch_norm(m, on):
    m.tail[0] = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(WIDTH * (TIME if m.sequence else 1)).to(m.layer.weight.dtype)
    )
    if m.sequence:
        m.tail[0].append(nn.Unflatten(1, (TIME, WIDTH)))
    m.tail[0].train(on)


def _zero_gate(m, on):
    if on:
        m.strength.data.fill_(0.5)


LAYER_CHANGES = {
    "parametrized": Switch(turn=_parametrized),
    "tied": Switch(turn=lambda m, on: setattr(m.second, "weight", m.layer.weight) if on else None),
    "frozen": Switch(turn=lambda m, on: m.layer.requires_grad_(not on)),
    "bias frozen": Switch(turn=lambda m, on: m.second.bias.requires_grad_(not on)),
    "new data": Switch(turn=lambda m, on: setattr(m.layer.weight, "data", m.layer.weight.data * 2)),
    "new parameter": Switch(turn=lambda m, on: setattr(m.layer, "weight", nn.Parameter(m.layer.weight.detach() * 2))),
    "new layer": Switch(turn=lambda m, on: setattr(m, "layer", copy.deepcopy(m.second)) if on else None),
    "dropped layer": Switch(turn=lambda m, on: setattr(m, "second", nn.Identity()) if on else None),
    "batch norm put in": Switch(turn=_batch_norm),
    "used twice": Switch(turn=lambda m, on: setattr(m, "second", m.layer) if on else None),
    "strength of a mix": Switch(turn=_zero_gate),  # starts at zero, as ReZero does
}
SWITCHES |= LAYER_CHANGES


class Block(nn.Module):
    """Two layers, an activation, an empty tail; the switch applies the change behind the first layer."""

    def __init__(self, case):
        super().__init__()
        self.layer, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.tail, self.quiet = nn.Tanh(), nn.Sequential(nn.Identity()), nn.Identity()
        self.change, self.switch = [CHANGES[case.change]], [SWITCHES[case.switch]]
        self.sequence = case.sequence
        if case.bare or case.switch == "strength of a mix":
            self.bare = nn.Parameter(torch.ones(WIDTH))
        if case.switch == "strength of a mix":
            self.strength = nn.Parameter(torch.zeros(()), requires_grad=case.seed % 2 == 0)
        self.threshold = float(self.layer.weight.detach().flatten()[0]) + 0.01 * (case.seed % 5 - 2)

    def count(self):
        self.calls += 1
        return self.calls

    def count_in_list(self):
        self.holder[0] += 1
        return self.holder[0]

    def forward(self, x, flag=False):
        h = self.layer(x)
        on = self.switch[0].on
        if on is not None and on(self, x, flag):
            h = self.change[0](h)
        if "blending" in self.__dict__:
            h = self.blending[0](self, h)
        if hasattr(self, "function"):
            h = self.function[0](h)
        if hasattr(self, "plain_function"):
            h = self.plain_function(h)
        if hasattr(self, "strength"):
            h = h - self.strength * h.mean(0)
        if hasattr(self, "bare"):
            h = h * self.bare
        return self.tail(self.second(self.act(h)))


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        # A class of its own, so that what is put on the class goes with the case.
        self.block = type("OwnBlock", (Block,), {})(case)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, flag=False):
        return self.head(self.block(x, flag))


@dataclass
class Case:
    seed: int
    switch: str
    change: str
    sequence: bool
    bare: bool
    at: int
    off_at: int
    sizes: list
    loss: str
    mode: str
    dtype: torch.dtype
    parts: int = 1
    autocast: bool = False

    def __str__(self):
        words = [f"{self.seed}: {self.switch} -> {self.change}", f"on at step {self.at}, off at {self.off_at}"]
        words += [f"batches {self.sizes}", self.loss, self.mode, "sequence" if self.sequence else "flat"]
        words += [f"{self.parts} mini-batches a step"] * (self.parts > 1) + ["autocast"] * self.autocast
        return ", ".join([*words, *(["bare parameter"] if self.bare else []), str(self.dtype)[6:]])


def draw(seed):
    r = random.Random(seed)
    switch = r.choice(sorted(SWITCHES))
    change = r.choice(sorted(MIXING)) if r.random() < 0.6 else r.choice(sorted(BACKWARD) + sorted(HARMLESS))
    steps = r.choice([3, 4, 5, 6, 10])
    size = r.choice([2, 3, 4, 5, 6, 8])
    sizes = [size] * steps if r.random() < 0.6 else [r.randint(2, 8) for _ in range(steps)]
    at = r.randint(1, max(1, steps - 2))
    if r.random() < 0.3:
        switch = r.choice(sorted([*BLENDS, "global", "dict in dict", "a sum", "chance", "a large value", "counter"]))
    return Case(
        seed,
        switch,
        change,
        r.random() < 0.4,
        r.random() < 0.25,
        at,
        at + r.choice([1, 2, 100, 100]),
        sizes,
        r.choice(["mean", "sum"]),
        r.choice(["exact", "exact", "fast"]),
        torch.float32 if switch == "float32" or r.random() < 0.2 else torch.float64,
        r.choice([1, 1, 1, 2]),
        r.random() < 0.08,
    )


def loss_of(out, y, reduction):
    losses = (out.to(y) - y).square().flatten(1).sum(1)
    return losses.mean() if reduction == "mean" else losses.sum()


@dataclass
class Outcome:
    kind: str  # exact, refused, false refusal, wrong, wrong and told later, crash
    words: str = ""


def trial(case, check=True):
    GLOBAL.update(on=False, calls=0)
    os.environ.pop("GRADGUARD_TEST_MIX", None)
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _trial(case, check)
        finally:
            GLOBAL.update(on=False)
            os.environ.pop("GRADGUARD_TEST_MIX", None)


def _turn(case, model, twin, on):
    switch = SWITCHES[case.switch]
    switch.turn(model.block, on)
    if switch.both:
        switch.turn(twin.block, on)


def _trial(case, check):
    model = Model(case).to(case.dtype)
    SWITCHES[case.switch].start(model.block)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    clipper = gg.PerSampleGradientClipper(
        model, gg.FlatNormClipper(0.5), loss_reduction=case.loss, mode=case.mode, check=check
    )
    separable, bad = True, None
    generator = torch.Generator().manual_seed(case.seed)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.autocast)
    try:
        for step, part, size in [(i, k, n) for i, n in enumerate(case.sizes) for k in range(case.parts)]:
            last = part == case.parts - 1
            if step in (case.at, case.off_at) and part == 0:
                _turn(case, model, twin, step == case.at)
                known = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for p in model.parameters():
                    if id(p) not in known:
                        optimizer.add_param_group({"params": [p]})
            lead = (size, TIME) if case.sequence else (size,)
            x = torch.randn(*lead, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
            y = torch.randn(*lead, 2, generator=generator, dtype=torch.float64).to(case.dtype)
            flag = case.switch == "keyword" and case.at <= step < case.off_at
            arguments = {"flag": True} if flag else {}
            twin.load_state_dict(
                {**twin.state_dict(), **{k: v for k, v in model.state_dict().items() if k in twin.state_dict()}}
            )
            state, possible = (torch.get_rng_state(), random.getstate()), True
            try:
                with autocast:
                    separable &= all(
                        adds_up(case, twin, own, x, y, flag) for own in own_gradients(case, twin, x, y, flag)
                    )
            except (RuntimeError, ValueError):  # what no sample can do alone, such as a batch norm
                separable = possible = False
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            try:
                with autocast:
                    out = model(x, **arguments)
                loss_of(out, y, case.loss).backward()
                gradients = clipper.per_sample_gradients() if case.mode == "exact" else None
                clipper.clip_and_accumulate()
                norms = clipper.statistics.norms.double()
                if last:
                    clipper.pre_step()
                if not possible:
                    bad = bad or f"step {step}: accepted, although no sample can run alone"
                else:
                    with autocast:
                        found = [
                            compare(case, gradients, norms, own, step)
                            for own in own_gradients(case, twin, x, y, flag, out)
                        ]
                    bad = bad or (all(found) and found and found[0]) or None
            except gg.errors.GradguardError as error:
                if bad:
                    return Outcome("wrong and told later", f"{bad}; told at step {step}: {error}")
                words = f"step {step}: {type(error).__name__}: {error}"
                return Outcome("false refusal" if separable and harmless(case) else "refused", words)
            if last:
                optimizer.step()
    except Exception:
        return Outcome("crash", f"step {step}: " + traceback.format_exc()[-900:])
    finally:
        with contextlib.suppress(Exception):
            clipper.detach()
    return Outcome("wrong", bad) if bad else Outcome("exact")


def adds_up(case, twin, own, x, y, flag):
    """Whether the samples' own gradients make up that of the batch."""
    if case.switch in UNDECIDED:
        return harmless(case)
    whole = alone(case, twin, x, y, flag)
    scale = len(x) if case.loss == "mean" else 1
    return all(
        float((g.sum(0) / scale - whole[k]).norm())
        <= (0.1 if case.autocast else 1e-3) * float(g.norm() + whole[k].norm()) + 1e-9
        for k, g in own.items()
    )


def harmless(case):
    """Whether a refusal is one too many; a parameter that came or went asks for a new clipper, in words."""
    if case.switch in LAYER_CHANGES:
        return case.switch in ("frozen", "bias frozen", "new data")
    if case.switch in ("replaced layer", "gradients are on"):  # a new parameter, or a sample alone is another model
        return False
    return case.change in HARMLESS and case.switch not in BLENDS


def alone(case, twin, x, y, flag, i=None):
    """The gradient of sample i's own loss, or of the whole batch's, on the twin; what counts or draws is put back."""
    block = twin.block
    calls, holder = getattr(block, "calls", None), copy.deepcopy(getattr(block, "holder", None))
    state, python_state = torch.get_rng_state(), random.getstate()
    part = slice(None) if i is None else slice(i, i + 1)
    trained = {k: p for k, p in twin.named_parameters() if p.requires_grad}
    loss = loss_of(twin(x[part], flag) if flag else twin(x[part]), y[part], case.loss)
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    torch.set_rng_state(state)
    random.setstate(python_state)
    if calls is not None:
        block.calls = calls
    if holder is not None and case.switch == "counter in a list":
        block.holder = holder
    return {
        k: torch.zeros_like(p) if g is None else g.detach() for (k, p), g in zip(trained.items(), grads, strict=True)
    }


UNDECIDED = ("counter", "counter in a list", "chance", "python's chance")


def own_gradients(case, twin, x, y, flag, out=None):
    """The samples' own gradients. Where chance or a counter decides: those of what gives ``out``, or both."""
    if case.switch not in UNDECIDED:
        return [_own(case, twin, x, y, flag)]
    found = []
    plain = twin.block.switch
    for on in (True, False):
        twin.block.switch = [Switch(on=lambda m, x, flag, on=on: on)]
        if out is None or torch.allclose(twin(x), out, rtol=1e-3, atol=1e-6):
            with contextlib.suppress(ValueError):  # a batch norm of one sample
                found.append(_own(case, twin, x, y, flag))
    twin.block.switch = plain
    return found


def _own(case, twin, x, y, flag):
    grads = [alone(case, twin, x, y, flag, i) for i in range(len(x))]
    return {k: torch.stack([g[k].double() for g in grads]) for k in grads[0]}


def compare(case, gradients, norms, own, step):
    size = torch.cat([g.flatten(1) for g in own.values()], 1).norm(dim=1)
    tolerance = 0.1 if case.autocast else 1e-7 if case.dtype == torch.float64 else 1e-3
    for k in own if gradients is not None else []:
        if k not in gradients:
            return f"step {step}: no gradient of {k}"
        error = (gradients[k].double() - own[k]).flatten(1).norm(dim=1)
        if (error > tolerance * size + 1e-10).any():
            i = int((error / (size + 1e-12)).argmax())
            lengths = float(gradients[k][i].norm()), float(own[k][i].norm())
            return f"step {step}: {k}, sample {i}: norm {lengths[0]:.4g}, alone {lengths[1]:.4g}"
    off = (norms - size).abs() > 10 * tolerance * size + 1e-9
    if off.any():
        i = int(off.nonzero()[0])
        return f"step {step}: sample {i}: norm told {float(norms[i]):.5g}, alone {float(size[i]):.5g}"
    return None


def main(first, last):
    counts, table = Counter(), Counter()
    for seed in range(first, last):
        case = draw(seed)
        outcome = trial(case)
        counts[outcome.kind] += 1
        table[case.switch, outcome.kind] += 1
        if outcome.kind.startswith("wrong") or outcome.kind in ("crash", "false refusal"):
            print(outcome.kind.upper(), case, "\n    ", outcome.words[-700:], flush=True)
        if seed % REPORT_EVERY == REPORT_EVERY - 1:
            print(seed + 1, dict(counts), flush=True)
    print(dict(counts))
    for kind in ("wrong", "wrong and told later", "false refusal", "crash"):
        print(kind + ":", ", ".join(f"{s} {n}" for (s, k), n in table.most_common() if k == kind))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed = torch.default_generator.manual_seed  # which looks for no accelerator
    main(int(sys.argv[1]), int(sys.argv[2]))

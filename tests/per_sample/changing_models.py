"""A model that reads what it does from many places, and changes that are made to them between two steps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

NOTHING, DOUBLE, MIX = 0, 1, 2

GLOBAL = {"effect": NOTHING}

WEIGHTS = [torch.zeros(()) for _ in range(3)]
"""Of what doubles, of what mixes, and of what mixes in backward alone: the operations are the same for all values."""


def affect(h: Tensor, effect: int) -> Tensor:
    """Do nothing, something that treats samples apart, or something that mixes them."""
    if effect == MIX:
        return h - 0.5 * h.mean(0)
    return 2 * h if effect == DOUBLE else h


class Weighted(torch.autograd.Function):
    """Samples are mixed in backward alone, by a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - WEIGHTS[2].to(g) * g.mean(0)


class Mean(torch.autograd.Function):
    """Samples are mixed in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - 0.5 * g.mean(0)


class Act(nn.Module):
    """An activation with code of its own."""

    strength = NOTHING

    def forward(self, x: Tensor) -> Tensor:
        return affect(x.tanh(), self.strength)


class DoublingAct(Act):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.tanh()


class MixingAct(Act):
    def forward(self, x: Tensor) -> Tensor:
        return affect(x.tanh(), MIX)


class Changing(nn.Module):
    """Whatever it holds may change what it does."""

    of_class = NOTHING

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.norm, self.b = nn.Linear(4, 8), Act(), nn.LayerNorm(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.0)
        self.doubles = self.mixes = False
        self.level, self.weight, self.kind, self.other = 0, 0.0, "nothing", None
        self.items, self.table = [NOTHING, NOTHING], {"effect": NOTHING}
        self.settings = SimpleNamespace(effect=NOTHING, name="settings")
        self.deep = SimpleNamespace(inner=SimpleNamespace(effect=NOTHING), tensor=torch.zeros(1))
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.large, self.later, self.step = NOTHING, NOTHING, 0
        self.register_buffer("gate", torch.zeros(()))
        box = [NOTHING, object()]
        self.box = lambda: box

    def _effects(self, x: Tensor) -> list[int]:
        words = {"nothing": NOTHING, "double": DOUBLE, "mix": MIX, None: NOTHING}
        return [
            DOUBLE if self.doubles else NOTHING,
            MIX if self.mixes else NOTHING,
            self.level,
            int(self.weight),
            words[self.kind],
            words[self.other],
            self.of_class,
            self.items[0],
            self.table["effect"],
            self.settings.effect,
            self.deep.inner.effect,
            int(self.gate),
            self.box()[0],
            GLOBAL["effect"],
            getattr(self, "extra", NOTHING),
            int(self.norm.eps),
            NOTHING if self.drop.training else getattr(self, "when_off", MIX),
            self.large if len(x) > 4 else NOTHING,
            self.later if self.step >= 5 else NOTHING,
        ]

    def forward(self, x: Tensor) -> Tensor:
        self.step += int(bool(self.later))
        h = self.norm(self.act(self.a(x)))
        for effect in self._effects(x):
            h = affect(h, effect)
        double, mix = WEIGHTS[0].to(h), WEIGHTS[1].to(h)
        h = Weighted.apply(h + double * h - mix * h.mean(0))
        return self.b(self.function(h))


def _set(name: str, *values: Any) -> Callable[[Changing, int], None]:
    """Set an attribute, at a dotted name, to the value for each effect."""

    def change(model: Changing, effect: int) -> None:
        *path, last = name.split(".")
        holder: Any = model
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, last, values[effect - 1] if values else effect)

    return change


def _flag(model: Changing, effect: int) -> None:
    setattr(model, "mixes" if effect == MIX else "doubles", True)


def _hook(model: Changing, effect: int) -> None:
    model.act.register_forward_hook(lambda module, args, output: affect(output, effect))


def _pre_hook(model: Changing, effect: int) -> None:
    model.norm.register_forward_pre_hook(lambda module, args: (affect(args[0], effect),))


def _hook_replaced(model: Changing, effect: int) -> None:
    model.act._forward_hooks.popitem()
    _hook(model, effect)


def _backward_hook(model: Changing, effect: int) -> None:
    model.act.register_full_backward_hook(lambda module, into, out: (affect(into[0], effect),))


def _backward_of_output(model: Changing, effect: int) -> None:
    model.act.register_forward_hook(lambda module, args, output: Mean.apply(output) if effect == MIX else 2 * output)


def _forward_of_instance(model: Changing, effect: int) -> None:
    model.act.forward = lambda x: affect(x.tanh(), effect)


def _patched_class(model: Changing, effect: int) -> None:
    type(model.act).forward = lambda self, x: affect(x.tanh(), effect)


def _another_class(model: Changing, effect: int) -> None:
    model.act.__class__ = MixingAct if effect == MIX else DoublingAct


def _layer(model: Changing, effect: int) -> None:
    model.act = MixingAct() if effect == MIX else DoublingAct()


def _layer_in_sequence(model: Changing, effect: int) -> None:
    model.act = nn.Sequential(model.act, MixingAct() if effect == MIX else DoublingAct())


def _function(model: Changing, effect: int) -> None:
    model.function = lambda h: affect(h.tanh(), effect)


def _training(model: Changing, effect: int) -> None:
    model.when_off = effect
    model.drop.eval()


def _training_alone(model: Changing, effect: int) -> None:
    model.drop.train(mode=False)
    if effect == DOUBLE:
        model.when_off = DOUBLE


def _item(model: Changing, effect: int) -> None:
    model.items[0] = effect


def _entry(model: Changing, effect: int) -> None:
    model.table["effect"] = effect


def _other_settings(model: Changing, effect: int) -> None:
    model.settings = SimpleNamespace(effect=effect, name="settings")


def _deleted(model: Changing, effect: int) -> None:
    del model.function
    type(model).function = staticmethod(lambda h: affect(h.tanh(), effect))


def _of_class(model: Changing, effect: int) -> None:
    type(model).of_class = effect


def _of_base_class(model: Changing, effect: int) -> None:
    Changing.of_class = effect


def _method(model: Changing, effect: int) -> None:
    type(model)._effects = lambda self, x: [effect]


def _buffer(model: Changing, effect: int) -> None:
    model.gate.fill_(effect)


def _closure(model: Changing, effect: int) -> None:
    model.box()[0] = effect


def _global(model: Changing, effect: int) -> None:
    GLOBAL["effect"] = effect


def _weight_outside(model: Changing, effect: int) -> None:
    WEIGHTS[effect - 1] = torch.tensor(0.5)


def _weight_of_backward(model: Changing, effect: int) -> None:
    WEIGHTS[2 if effect == MIX else 0] = torch.tensor(0.5)


def _deep(model: Changing, effect: int) -> None:
    model.deep.inner.effect = effect


SEEN: dict[str, Callable[[Changing, int], None]] = {
    "bool": _flag,
    "int": _set("level"),
    "float": _set("weight", 1.5, 2.5),
    "str": _set("kind", "double", "mix"),
    "str in place of None": _set("other", "double", "mix"),
    "attribute that was not there": _set("extra"),
    "attribute deleted, found on the class": _deleted,
    "item of a list": _item,
    "entry of a dict": _entry,
    "attribute of settings": _set("settings.effect"),
    "other settings": _other_settings,
    "attribute of the class": _of_class,
    "attribute of a base class": _of_base_class,
    "attribute of a layer": _set("act.strength"),
    "eps of a norm": _set("norm.eps", 1.0, 2.0),
    "training flag of a layer": _training,
    "training flag alone": _training_alone,
    "forward hook": _hook,
    "forward pre-hook": _pre_hook,
    "forward hook replaced": _hook_replaced,
    "backward hook": _backward_hook,
    "hook whose backward mixes": _backward_of_output,
    "forward of an instance": _forward_of_instance,
    "forward of a class": _patched_class,
    "class of a layer": _another_class,
    "layer replaced": _layer,
    "layer put into a sequence": _layer_in_sequence,
    "function": _function,
    "method": _method,
    "number in a buffer": _buffer,
    "variable of a closure": _closure,
    "global variable": _global,
    "attribute of an object in an object": _deep,
}
"""Changes that the state of the model shows, or what its forward does: tried out on that very step."""

WITNESSED: dict[str, Callable[[Changing, int], None]] = {
    "number in a tensor outside": _weight_outside,
    "number that only a backward reads": _weight_of_backward,
}
"""Changes of values that leave the operations as they are: found by the next witness."""


def fresh() -> Changing:
    """A model of classes of its own, with a hook that changes nothing, in float64."""
    model = type("Changing", (Changing,), {})()
    model.act.__class__ = type("Act", (Act,), {"forward": Act.forward})
    model.act.register_forward_hook(lambda module, args, output: None)
    return model.double()


def restore() -> None:
    """Undo what a change has done beside the model."""
    GLOBAL["effect"] = NOTHING
    WEIGHTS[:] = [torch.zeros(()) for _ in range(3)]
    Changing.of_class = NOTHING

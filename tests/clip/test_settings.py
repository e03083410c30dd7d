"""What processes compare before they clip: every argument of every clipper, also of one that is yet to be written."""

import inspect

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.distributed.settings import digest

CPU = torch.device("cpu")

OTHER = {
    "ClipByValue": {"max": (1.0, 2.0), "min": (None, -0.5)},
    "ClipByNorm": {"max_norm": (1.0, 2.0), "norm_type": (2.0, 3.0)},
    "ClipByRMS": {"max_rms": (1.0, torch.tensor(2.0))},
    "ClipByGlobalNorm": {"max_norm": (1.0, torch.tensor(2.0)), "norm_type": (2.0, 1.0)},
    "ClipAdaptive": {"threshold": (0.01, 0.02), "eps": (1e-3, 1e-2), "exclude": ((), "head")},
    "ClipByMedian": {
        "k": (4.0, 5.0),
        "window": (100, 50),
        "warmup": (10, 5),
        "floor": (0.05, 0.1),
        "ceiling": (None, 9.0),
        "norm_type": (2.0, 1.0),
        "start": (0.1, 0.5),
        "update": (0.1, None),
    },
    "AutoClip": {"percentile": (10.0, 20.0), "window": (None, 7), "strict_paper": (False, True)},
    "ZClip": {
        "alpha": (0.97, 0.5),
        "z_threshold": (2.5, 3.0),
        "warmup": (25, 5),
        "ceiling": (1.0, None),
        "clip_factor": (1.0, 0.5),
        "mode": ("adaptive_scaling", "mean"),
        "skip_update_on_spike": (False, True),
        "strict_paper": (False, True),
    },
    "AdaGC": {
        "absolute": (1.0, 2.0),
        "relative": (1.05, 1.1),
        "beta": (0.98, 0.5),
        "warmup": (100, 5),
        "strict_paper": (False, True),
    },
    "ClipFraction": {
        "target": (0.1, 0.2),
        "learning_rate": (0.2, 0.1),
        "initial": (None, 3.0),
        "floor": (0.0, 0.1),
        "ceiling": (None, 9.0),
    },
    "Groups": {
        "groups": ({"a": gg.ClipByNorm(1.0)}, {"b": gg.ClipByNorm(1.0)}),
        "rest": (None, gg.ClipByNorm(1.0)),
    },
    "Chain": {"clippers": (gg.ClipByNorm(1.0), gg.ClipByNorm(2.0))},
}
"""The arguments of each clipper: a value, and another."""

ABSTRACT = {"Clipper", "ThresholdClipper"}


def clippers():
    return {name: kind for name in gg.__all__ if isinstance(kind := getattr(gg, name), type) and is_clipper(kind)}


def is_clipper(kind):
    return issubclass(kind, gg.rules.Clipper)


def number_of(clipper):
    return digest(clipper.settings(), CPU).tolist()


def made(name, values):
    kind = getattr(gg, name)
    return kind(*values.values()) if name == "Chain" else kind(**values)


def test_the_table_has_every_clipper_and_every_argument():
    given = {n: list(inspect.signature(kind).parameters) for n, kind in clippers().items() if n not in ABSTRACT}
    assert {name: list(arguments) for name, arguments in OTHER.items()} == given


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, them in OTHER.items() for argument in them])
def test_another_value_of_any_argument_is_seen(name, argument):
    usual = {key: pair[0] for key, pair in OTHER[name].items()}
    assert number_of(made(name, usual)) == number_of(made(name, usual))
    assert number_of(made(name, usual)) != number_of(made(name, usual | {argument: OTHER[name][argument][1]}))


class Halving(gg.rules.Clipper):
    """A rule of somebody's own, with an argument, one that is an object, and one that it does not keep."""

    def __init__(self, factor, schedule=None, hidden=0, *more, **options):
        self.factor, self.schedule, self.options = factor, schedule, options

    def decide(self, grads, scale=1.0):
        raise NotImplementedError


def test_a_rule_of_ones_own_has_its_arguments_compared():
    assert Halving.arguments == ("factor", "schedule", "hidden")
    assert Halving(0.5, lambda: 1.0).settings() == ("Halving", 0.5, "a function", None)
    assert number_of(Halving(0.5, lambda: 1.0)) == number_of(Halving(0.5, lambda: 2.0, state=torch.zeros(3)))
    assert number_of(Halving(0.5)) != number_of(Halving(0.25))
    assert number_of(Halving((0.5, 1.0))) != number_of(Halving((0.5, 2.0)))
    assert Halving([1.0, "a"]).settings()[1] == "(1.0, a)"


class Gentle(gg.ClipByNorm):
    """A rule that refines another."""

    def __init__(self, gentleness):
        super().__init__(1.0 / gentleness)
        self.gentleness = gentleness


class Silent(Gentle):
    """A rule that has nothing compared but its name."""

    arguments = ()

    def __init__(self, gentleness):
        super().__init__(gentleness)


def test_a_rule_that_refines_another_has_the_arguments_of_both():
    assert Gentle(4.0).settings() == ("Gentle", 4.0, 0.25, 2.0)
    assert Silent(4.0).settings() == ("Silent",)


def test_what_moves_during_training_is_not_compared():
    clipper, p = gg.ClipFraction(0.3), nn.Parameter(torch.zeros(2))
    before = number_of(clipper)
    p.grad = torch.ones(2)
    clipper([p])
    assert number_of(clipper) == before


def test_a_selection_is_told_in_words_that_do_not_differ_from_process_to_process():
    linear = nn.Linear(2, 3)
    clipper = gg.ClipAdaptive(exclude=["head", linear.bias, linear])
    assert clipper.settings() == ("ClipAdaptive", 0.01, 0.001, "head, a parameter of shape (3,), a Linear")
    groups = gg.Groups([((linear.weight, "a*"), None)], rest=gg.ClipByNorm(1.0))
    assert groups.settings() == (
        *("Groups", "group 0", "a*, a parameter of shape (3, 2)"),
        *("rest", "ClipByNorm", 1.0, 2.0),
    )

"""Objects of a class are found wherever they are kept, and new ones without another look at all objects."""

import copy
import gc
import inspect
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, StepLR

from gradguard import living
from gradguard.living import Living, alive


class Base:
    def __init__(self, size: int = 1) -> None:
        self.size = size


class Below(Base):
    pass


class Own(Base):
    """Whose __init__ does not call that of the base, as ReduceLROnPlateau's."""

    def __init__(self, *, name: str) -> None:
        self.name = name


def looks(monkeypatch):
    """Count the looks at all objects."""
    counted = []
    every = living.all_objects
    monkeypatch.setattr(living, "all_objects", lambda: counted.append(1) or every())
    return counted


@pytest.fixture
def bases():
    """Classes as they were before a test."""
    kept = {kind: vars(kind).get("__init__") for kind in (Base, Below, Own)}
    yield Living(Base)
    for kind, init in kept.items():
        if init is not None:
            kind.__init__ = init


def test_old_and_new_ones_of_every_class_are_known_in_order_and_looked_for_once(bases, monkeypatch):
    counted = looks(monkeypatch)
    old = [Base(), Own(name="a")]
    assert {*map(id, bases())} == {*map(id, old)}
    new = [Below(3), Own(name="b"), Base()]
    assert [*map(id, bases())][2:] == [*map(id, new)]
    assert len(counted) == 1


def test_a_copy_is_found_by_the_next_look(bases):
    one = Base()
    assert bases() == [one]
    other = copy.deepcopy(one)
    bases.look()
    assert bases() == [one, other]


def test_one_that_is_gone_is_forgotten(bases):
    kept, gone = Base(), Below()
    assert len(bases()) == 2
    del gone
    assert bases() == [kept]


def test_a_class_that_is_defined_later_is_noticed(bases, monkeypatch):
    assert bases() == []
    counted = looks(monkeypatch)

    class Later(Base):
        def __init__(self) -> None:
            pass

    first = Later()
    assert bases() == [first]
    second = Later()
    assert bases() == [first, second]
    assert len(counted) == 1


def test_what_the_collector_has_frozen_is_found(bases, monkeypatch):
    one = Below()
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # which conftest.py hides
    assert one in alive(Base)
    assert bases() == [one]


def test_schedulers_stay_what_they_were():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    signatures = [inspect.signature(kind) for kind in (LRScheduler, StepLR, ReduceLROnPlateau)]
    known = Living(LRScheduler)
    known()
    assert [inspect.signature(kind) for kind in (LRScheduler, StepLR, ReduceLROnPlateau)] == signatures
    made = [StepLR(optimizer, 2), ReduceLROnPlateau(optimizer)]
    made.append(ChainedScheduler([made[0]], optimizer))
    found = [one for one in known() if one.optimizer is optimizer]
    assert [*map(id, found)] == [*map(id, made)]
    assert pickle.loads(pickle.dumps(made[0].state_dict())) == made[0].state_dict()

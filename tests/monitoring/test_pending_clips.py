"""What was clipped and not yet stepped, against a dictionary with an entry for each gradient."""

import math
import random
import weakref

import pytest
import torch

from gradguard.monitoring.observe import clips
from gradguard.monitoring.observe.clips import PendingClips
from gradguard.monitoring.observe.measure import gradient_norms
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.observe.step import ScriptClip
from gradguard.monitoring.record.file import read_record
from gradguard.script_events import listening


class EachByItself:
    """The slow twin: of each gradient its norm before the first clip, and the clips since."""

    def __init__(self):
        self.entries = {}

    def drop_changed(self, changed):
        dropped = [k for k in self.entries if k in changed]
        for k in dropped:
            del self.entries[k]
        return bool(dropped)

    def add(self, clip, places, norms):
        for k, norm in zip(places, norms or [None] * len(places), strict=True):
            before, clips = self.entries.get(k, (None, []))
            self.entries[k] = (norm if before is None else before, [*clips, clip.threshold])

    def take(self, places, changed):
        self.drop_changed(changed)
        return [self.entries.pop(k, None) for k in places]


class Pending:
    """The table of clips as `HeardClips` keeps it: what has changed is dropped before each clip and each step."""

    def __init__(self):
        self.table = PendingClips()

    def drop_changed(self):
        before, self.table = self.table, self.table.unchanged()
        return before is not self.table

    def add(self, clip, gradients, norms):
        self.table.add(clip, gradients, norms)

    def take(self, gradients):
        own, self.table = self.table.unchanged().split(gradients)
        return own


def shown(found):
    entries = [None] * found.count
    for place, norm in zip(found.places, found.known, strict=True):
        entries[place] = (None if norm is None else float(norm), [])
    for clip, places, _ in found.clips:
        for place in places:
            entries[place][1].append(clip.threshold)
    return entries


@pytest.mark.parametrize("seed", range(40))
def test_clips_of_any_gradients_in_any_order(seed):
    draw = random.Random(seed)
    gradients = [torch.zeros(2) for _ in range(5)]
    pending, twin, changed = Pending(), EachByItself(), set()
    for number in range(60):
        places = draw.sample(range(5), draw.randint(1, 5)) if draw.random() < 0.5 else list(range(5))
        chosen = [gradients[k] for k in places]
        act = draw.choice(["clip", "clip", "take", "write", "replace"])
        if act == "clip":
            assert pending.drop_changed() == twin.drop_changed(changed)
            clip = ScriptClip("norm", float(number), None)
            norms = draw.choice([None, [number + k / 10 for k in places]])
            told = torch.tensor(norms, dtype=torch.float64) if norms and draw.random() < 0.5 else norms
            torch._foreach_mul_(chosen, 0.5)
            pending.add(clip, chosen, told)
            twin.add(clip, places, norms)
            changed.clear()
        elif act == "take":
            found = pending.take(chosen)
            assert shown(found) == twin.take(places, changed)
            changed.clear()
        elif act == "write":
            gradients[places[0]].add_(1)
            changed.add(places[0])
        else:
            del chosen
            gradients[places[0]] = torch.zeros(2)
            changed.add(places[0])


def test_gradients_are_not_kept_alive():
    pending, gradient = Pending(), torch.zeros(2)
    pending.add(ScriptClip("norm", 1.0, None), [gradient], [2.0])
    ref = weakref.ref(gradient)
    del gradient
    assert ref() is None
    assert not pending.take([torch.zeros(2)]).clips


def test_clips_whose_gradients_are_gone_are_not_kept():
    pending, gradients = Pending(), [torch.zeros(1) for _ in range(6)]
    for k, gradient in enumerate(gradients):
        pending.add(ScriptClip("norm", float(k), None), [gradient], None)
    del gradients[:4], gradient
    assert pending.drop_changed()
    assert len(pending.table.gradients) == len(pending.table.clips) == 2
    assert not pending.drop_changed()


@pytest.mark.parametrize("count", [2, 66, 200])
def test_a_clip_for_each_gradient_is_known_at_the_step(count):
    pending, gradients = Pending(), [torch.zeros(1) for _ in range(count)]
    for k, gradient in enumerate(gradients):
        assert not pending.drop_changed()
        pending.add(ScriptClip("norm", float(k), None), [gradient], [float(k)])
    assert shown(pending.take(gradients)) == [(float(k), [float(k)]) for k in range(count)]


def test_a_clip_of_one_view_of_a_buffer_is_no_write_to_the_others():
    pending, views = Pending(), list(torch.zeros(6).view(3, 2).unbind())
    for k, view in enumerate(views):
        pending.drop_changed()
        view.mul_(0.5)
        pending.add(ScriptClip("norm", float(k), None), [view], [float(k)])
    assert shown(pending.take(views)) == [(float(k), [float(k)]) for k in range(3)]
    pending.add(ScriptClip("norm", 1.0, None), views[:1], [2.0])
    views[1].add_(1)
    assert pending.drop_changed()  # nobody can tell which one was written


LAID_OUT = {
    "alone": lambda n: [torch.zeros(2) for _ in range(n)],
    "views": lambda n: list(torch.zeros(n, 2).unbind()),
    "the same memory, counted apart": lambda n: [view.data for view in torch.zeros(n, 2).unbind()],
    "aliases": lambda n: [alias for g in [torch.zeros(2) for _ in range(n // 2)] for alias in (g, g.detach())],
    "as autograd leaves them": lambda n: [view.detach() for view in torch.zeros(n, 2).unbind()],
}


@pytest.mark.parametrize("layout", LAID_OUT)
def test_clips_of_each_gradient_alone_are_known_at_the_step(layout):
    pending, gradients = Pending(), LAID_OUT[layout](8)
    for k, gradient in enumerate(gradients):
        assert not pending.drop_changed()
        gradient.mul_(0.5)
        pending.add(ScriptClip("norm", float(k), None), [gradient], [float(k)])
    assert shown(pending.take(gradients)) == [(float(k), [float(k)]) for k in range(8)]


@pytest.mark.parametrize("layout", LAID_OUT)
def test_a_write_between_two_clips_of_a_gradient_is_seen(layout):
    pending, gradients = Pending(), LAID_OUT[layout](8)
    pending.add(ScriptClip("norm", 1.0, None), gradients, [1.0] * 8)
    assert not pending.drop_changed()
    gradients[0].add_(1)
    assert pending.drop_changed()
    pending.add(ScriptClip("norm", 2.0, None), gradients[:1], [2.0])
    assert shown(pending.take(gradients))[0] == (2.0, [2.0])


def test_a_clip_that_raises_keeps_no_gradient_alive():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), torch.nan)
    gradient = weakref.ref(weight.grad)
    with listening(Observer(None, {})):
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
        weight.grad = None
        assert gradient() is None


FIRST_CLIPS = {
    "value": (lambda weights: torch.nn.utils.clip_grad_value_(weights, 3.0), [2, 2]),
    "only measures": (lambda weights: torch.nn.utils.clip_grad_norm_(weights, torch.inf), [2, 2]),
    "one of them": (lambda weights: torch.nn.utils.clip_grad_norm_(weights[0], 6.0), [1, 2, 2]),
}


@pytest.mark.parametrize("first", FIRST_CLIPS)
def test_a_second_clip_of_the_same_gradients_measures_nothing(first, monkeypatch, tmp_path):
    """A step's norms are those before its first clip: gradients are measured once more only if that left some out."""
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full((4,), 6.0)
    measured = []
    monkeypatch.setattr(clips, "gradient_norms", lambda given: measured.append(len(given)) or gradient_norms(given))
    observer = Observer(tmp_path / "run.jsonl", {}, diagnostics_every=0)
    clip, expected = FIRST_CLIPS[first]
    with listening(observer):
        clip(weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        torch.optim.SGD(weights, lr=0.1).step()
    observer.close(0, False)
    [step] = read_record(tmp_path / "run.jsonl").steps
    assert step["norm"] == pytest.approx(math.sqrt(8 * 36), rel=1e-3)
    assert step["post_norm"] == pytest.approx(1.0, rel=1e-3)
    assert measured == expected  # the last measurement is that of the step

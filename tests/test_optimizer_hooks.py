"""Once for each real step, with that step's gradients: the rows of the optimizer-hook table."""

import pytest
import torch
from torch import nn

from gradguard.optimizer_hooks import EveryStep, optimizers_in


@pytest.fixture
def seen():
    """What the hooks saw: ("before", gradient) and ("after", None)."""
    calls: list = []
    hooks = EveryStep(
        lambda opt, number: calls.append(("before", float(opt.param_groups[0]["params"][0].grad))),
        lambda opt: calls.append(("after", None)),
    )
    yield calls
    hooks.remove()


def scalar(value: float = 2.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def test_a_plain_step(seen):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        w.square().backward()
        opt.step()
    assert seen == [("before", 4.0), ("after", None), ("before", pytest.approx(3.2)), ("after", None)]


def test_a_subclass_that_calls_super_counts_once(seen):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    w = scalar()
    w.square().backward()
    Twice([w], lr=0.1).step()
    assert [kind for kind, _ in seen] == ["before", "after"]


@pytest.mark.parametrize("spelling", ["positional", "keyword"])
def test_a_closure_shows_the_gradients_of_its_own_backward(seen, spelling):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)

    def closure():
        opt.zero_grad()
        loss = w.square()
        loss.backward()
        return loss

    loss = opt.step(closure) if spelling == "positional" else opt.step(closure=closure)
    assert loss.item() == 4.0
    assert seen == [("before", 4.0), ("after", None)]


def test_lbfgs_acts_at_each_evaluation(seen):
    w = scalar()
    opt = torch.optim.LBFGS([w], lr=0.1, max_iter=3)

    def closure():
        opt.zero_grad()
        loss = w.square()
        loss.backward()
        return loss

    opt.step(closure)
    kinds = [kind for kind, _ in seen]
    assert kinds == ["before"] * (len(kinds) - 1) + ["after"]
    assert len(kinds) > 2


def test_accumulation_counts_real_steps(seen):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)
    for _ in range(4):
        w.square().backward()
    opt.step()
    assert seen == [("before", 16.0), ("after", None)]


def test_two_optimizers(seen):
    for w in (scalar(1.0), scalar(3.0)):
        w.square().backward()
        torch.optim.Adam([w]).step()
    assert [x for kind, x in seen if kind == "before"] == [2.0, 6.0]


def test_a_step_that_raises_does_not_end_the_watch(seen):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)

    def closure():
        raise ZeroDivisionError("in the closure")

    with pytest.raises(ZeroDivisionError, match="in the closure"):
        opt.step(closure)
    w.square().backward()
    opt.step()
    assert seen == [("before", 4.0), ("after", None)]


def test_a_grad_scaler_that_skips_the_step_fires_nothing(seen):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(w * float("inf")).backward()
    scaler.step(opt)
    scaler.update()
    assert seen == []


def test_remove_is_final_and_may_be_repeated():
    calls = []
    hooks = EveryStep(lambda opt, number: calls.append(opt), calls.append)
    hooks.remove()
    hooks.remove()
    w = scalar()
    w.square().backward()
    torch.optim.SGD([w], lr=0.1).step()
    assert calls == []


def test_hooks_of_one_optimizer_leave_others_alone():
    calls = []
    ours, other = (torch.optim.SGD([scalar()], lr=0.1) for _ in range(2))
    hooks = EveryStep(lambda opt, number: calls.append(opt), calls.append, optimizer=ours)
    other.step()
    ours.step()
    assert calls == [ours, ours]
    hooks.remove()
    ours.step()
    assert calls == [ours, ours]


@pytest.mark.parametrize("closure", [None, lambda: None], ids=["plain", "closure"])
def test_what_enter_returns_is_stepped_instead(closure):
    w, other = scalar(), scalar()
    opt, instead = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([other], lr=0.1)
    w.grad = other.grad = torch.tensor(1.0)
    entered = []

    def enter(optimizer, with_closure):
        entered.append((optimizer, with_closure))
        return instead if len(entered) == 1 else None

    hooks = EveryStep(lambda o, n: None, lambda o: None, optimizer=opt, enter=enter)
    opt.step(closure)
    assert (w.item(), other.item()) == (2.0, pytest.approx(1.9))
    opt.step(closure)
    assert (w.item(), other.item()) == (pytest.approx(1.9), pytest.approx(1.9))
    assert entered == [(opt, closure is not None)] * 2
    hooks.remove()


def test_who_replaces_nothing_leaves_what_another_has_put_there():
    w, stepped = scalar(), []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            stepped.append(self)
            return super().step(closure)

    optimizer, other = Noting([w], lr=0.1), Noting([scalar()], lr=0.1)
    w.grad = torch.ones(())
    nothing = lambda *_: None  # noqa: E731
    hooks = [EveryStep(nothing, nothing, optimizer=optimizer, enter=enter) for enter in (lambda *_: other, nothing)]
    optimizer.step()
    assert stepped == [other]
    for hook in hooks:
        hook.remove()


def test_threads_do_not_hide_each_other_s_steps(seen):
    import threading

    inside, go_on = threading.Event(), threading.Event()
    slow, quick = scalar(1.0), scalar(3.0)
    for w in (slow, quick):
        w.square().backward()

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            inside.set()
            assert go_on.wait(200)
            return super().step(closure)

    thread = threading.Thread(target=Slow([slow], lr=0.1).step)
    thread.start()
    assert inside.wait(200)
    torch.optim.SGD([quick], lr=0.1).step()
    go_on.set()
    thread.join()
    assert [x for kind, x in seen if kind == "before"] == [2.0, 6.0]
    assert [kind for kind, _ in seen].count("after") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_step_does_not_trace_the_hooks_of_who_watches_all(seen):
    w = scalar()
    opt = torch.optim.SGD([w], lr=0.1)
    compiled = torch.compile(opt.step, backend="eager")
    for _ in range(3):
        opt.zero_grad()
        w.square().backward()
        compiled()
    torch.compiler.reset()
    assert [kind for kind, _ in seen] == ["before", "after"] * 3
    assert seen[0] == ("before", 4.0)


def test_optimizers_inside_are_found_once_wherever_they_are_kept():
    p = torch.nn.Parameter(torch.ones(1))
    outer, a, b, c = (torch.optim.SGD([p], lr=0.1) for _ in range(4))
    outer.one, outer.more, b.inner, c.back = a, {"x": [(b,), a]}, c, outer
    outer.more["itself"] = outer.more
    assert [id(o) for o in optimizers_in(outer)] == [id(o) for o in (outer, a, b, c)]
    assert optimizers_in(a) == [a]

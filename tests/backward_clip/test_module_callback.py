"""`ModuleCallback`: one callback for each call of a module, against the same backward done call by call by hand."""

import random
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError


class Affine(nn.Module):
    """Uses its weight twice."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.t() + self.bias


class Pair(nn.Module):
    """Two inputs, two outputs; may get one tensor as both."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x, y):
        return x * y * self.scale, x.sin() + y


class InPlace(nn.Module):
    """Works in place, on a value of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x * self.scale).mul_(self.scale).relu_()


class Program(nn.Module):
    """Calls its children, some twice, on values made before, and returns some of what they made."""

    def __init__(self, draw: random.Random, depth: int):
        super().__init__()
        self.inputs, self.children_, self.steps = draw.choice([1, 2]), nn.ModuleList(), []
        made = self.inputs
        for _ in range(draw.randint(2, 4)):
            if len(self.children_) and draw.random() < 0.3:
                which = draw.randrange(len(self.children_))
            else:
                kinds = [Affine, Pair, InPlace, lambda: Program(draw, depth - 1)]
                self.children_.append(draw.choice(kinds if depth else kinds[:3])())
                which = len(self.children_) - 1
            child = self.children_[which]
            taken = [draw.randrange(made) for _ in range(_inputs_of(child))]
            self.steps.append((which, taken))
            made += _outputs_of(child)
        self.returned = sorted(draw.sample(range(self.inputs, made), min(2, made - self.inputs)))

    def forward(self, *values):
        values = [*values]
        for which, taken in self.steps:
            made = self.children_[which](*(values[i] for i in taken))
            values += made if isinstance(made, tuple) else (made,)
        return tuple(values[i] for i in self.returned)


def _inputs_of(module):
    return module.inputs if isinstance(module, Program) else 2 if isinstance(module, Pair) else 1


def _outputs_of(module):
    return len(module.returned) if isinstance(module, Program) else 2 if isinstance(module, Pair) else 1


class ByHand:
    """The slow twin: runs each call's forward alone, and its backward alone, in reverse, with `change` in between."""

    def __init__(self, change):
        self.change, self.seen = change, []

    def forward(self, module, name, values):
        """Return the values made, and a function of their gradients that returns those of inputs and parameters."""
        if isinstance(module, Program):
            return self._program(module, name, values)
        inputs = {id(v): v.detach().requires_grad_() for v in values}
        given = [inputs[id(v)] for v in values]
        made = module(*given)
        made = made if isinstance(made, tuple) else (made,)

        def backward(grads):
            used = [(out, g) for out, g in zip(made, grads, strict=True) if g is not None]
            parameters = list(module.parameters())
            found = torch.autograd.grad(
                [out for out, _ in used], [*given, *parameters], [g for _, g in used], allow_unused=True
            )
            first = {id(v): i for i, v in reversed(list(enumerate(values)))}
            by_input = [g if first[id(v)] == i else None for i, (v, g) in enumerate(zip(values, found, strict=False))]
            return self._tell(module, name, by_input, dict(zip(parameters, found[len(given) :], strict=True)), grads)

        return [out.detach() for out in made], backward

    def _program(self, module, name, values):
        inputs, values, tape = list(values), list(values), []
        for which, taken in module.steps:
            child = f"{name}.children_.{which}".lstrip(".")
            made, backward = self.forward(module.children_[which], child, [values[i] for i in taken])
            tape.append((taken, list(range(len(values), len(values) + len(made))), backward))
            values += made

        def backward(grads):
            at = {id(value): i for i, value in reversed(list(enumerate(values)))}
            total = dict.fromkeys(range(len(values)))
            for i, g in zip(module.returned, grads, strict=True):
                total[i] = g
            parameters = {}
            for taken, made, back in reversed(tape):
                if all(total[i] is None for i in made):
                    continue
                by_input, by_parameter, arrived = back([total[i] for i in made])
                total.update(zip(made, arrived, strict=True))  # those of uses within the call are among them
                for i, g in zip(taken, by_input, strict=True):
                    total[at[id(values[i])]] = _plus(total[at[id(values[i])]], g)
                for p, g in by_parameter.items():
                    parameters[p] = _plus(parameters.get(p), g)
            return self._tell(
                module, name, [total[i] for i in range(len(inputs))], parameters, [total[i] for i in module.returned]
            )

        return [values[i] for i in module.returned], backward

    def _tell(self, module, name, by_input, by_parameter, arrived):
        names = {p: n for n, p in module.named_parameters()}
        keys = [(f"input {i}", g) for i, g in enumerate(by_input)] + [(names[p], g) for p, g in by_parameter.items()]
        gradients = {key: g for key, g in keys if g is not None}
        self.seen.append((name, arrived, gradients))
        changed = {**gradients, **(self.change(name, gradients) or {})}
        by_input = [changed.get(f"input {i}") for i in range(len(by_input))]
        return by_input, {p: changed.get(names[p]) for p in by_parameter}, arrived


def _plus(a, b):
    return b if a is None else a if b is None else a + b


def _clip(name, gradients):
    return {key: g.clamp(-0.3, 0.3) for key, g in gradients.items()}


def _some(name, gradients):
    return {key: -3 * g for key, g in gradients.items() if len(name) % 2 == ("weight" in key)}


def _nothing(name, gradients):
    return None


CHANGES = {"clip": _clip, "some of them": _some, "nothing": _nothing}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("seed", range(20))
def test_random_nested_modules_as_by_hand(seed, change):
    torch.manual_seed(seed)
    model = Program(random.Random(seed), depth=2).double()
    given = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(model.inputs)]
    twin = ByHand(change)
    values, backward = twin.forward(model, "", [g.detach() for g in given])
    by_input, by_parameter, _ = backward([2 * v for v in values])

    seen = []
    callback = gg.ModuleCallback(model, lambda call, gs: seen.append((call, dict(gs))) or change(call.name, gs))
    loss = sum(v.square().sum() for v in model(*given))
    gg.append_backward(loss, callback=callback)

    expected = [(name, arrived, gs) for name, arrived, gs in twin.seen]
    assert [call.name for call, _ in seen] == [name for name, _, _ in expected]
    for (call, gs), (_, arrived, theirs) in zip(seen, expected, strict=True):
        assert call.module is model.get_submodule(call.name)
        assert gs.keys() == theirs.keys()
        torch.testing.assert_close(gs, {key: theirs[key] for key in gs}, rtol=1e-9, atol=1e-9)
        _assert_same(call.grad_outputs, arrived)
    _assert_same([g.grad for g in given], by_input)
    _assert_same([p.grad for p in model.parameters()], [by_parameter.get(p) for p in model.parameters()])


def _assert_same(ours, theirs):
    assert [g is None for g in ours] == [g is None for g in theirs]
    ours, theirs = ([g for g in gs if g is not None] for gs in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_a_callback_that_returns_what_it_got_changes_no_bit(seed):
    found = []
    for callback in (None, lambda call, gradients: gradients, lambda call, gradients: None):
        torch.manual_seed(seed)
        model = Program(random.Random(seed), depth=2)
        given = [torch.randn(3, 4) for _ in range(model.inputs)]
        watched = None if callback is None else gg.ModuleCallback(model, callback)
        for _ in range(2):  # gradients are added to those there are
            gg.append_backward(sum(v.square().sum() for v in model(*given)), model, callback=watched)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.ReLU(inplace=True))


def _calls(model, loss, change=lambda call, gs: None, **options):
    seen = []
    callback = gg.ModuleCallback(model, lambda call, gs: seen.append((call.name, call.number, gs)) or change(call, gs))
    pairs = gg.append_backward(loss(), model, callback=callback, **options)
    callback.detach()
    return seen, [gradient for _, gradient in pairs]


CLIP = gg.ErrorClipByValue(0.05)
RUNS = {
    "no checkpoint": lambda m, x: m(x),
    "checkpoint of the model": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "checkpoint of a part": lambda m, x: m[2:](checkpoint(m[:2], x, use_reentrant=False)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_checkpoints_change_nothing(run):
    def loss_of(model):
        x = torch.linspace(-1, 1, 12).view(3, 4)
        return lambda: run(model, x).square().sum() + run(model, x + 1).sum()

    clip = lambda call, gs: {name: g.clamp(-0.05, 0.05) for name, g in gs.items()}  # noqa: E731
    model = _mlp()
    expected, gradients = _calls(model, lambda: model(X).square().sum() + model(X + 1).sum(), clip)
    ours, found = _calls(again := _mlp(), loss_of(again), clip)
    inner = [(name, number, gs) for name, number, gs in expected if name]
    assert [c[:2] for c in ours if c[0]] == [c[:2] for c in inner]
    torch.testing.assert_close([c[2] for c in ours if c[0]], [c[2] for c in inner], rtol=0, atol=0)
    if run is not RUNS["checkpoint of a part"]:  # there the model itself is not called
        torch.testing.assert_close(found, gradients, rtol=0, atol=0)


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_a_module_that_is_called_twice_has_two_callbacks_each_with_its_own_contribution():
    cell = nn.Linear(2, 2, bias=False)
    x = torch.randn(3, 2)
    seen, [total] = _calls(cell, lambda: cell(cell(x)).sum())
    assert [(name, number) for name, number, _ in seen] == [("", 1), ("", 0)]
    torch.testing.assert_close(seen[0][2]["weight"] + seen[1][2]["weight"], total)
    hidden = x @ cell.weight.detach().t()
    torch.testing.assert_close(seen[0][2]["weight"], torch.ones(3, 2).t() @ hidden)


def test_a_rule_clips_what_leaves_a_module_and_nothing_in_it():
    x = torch.tensor([[2.0]], requires_grad=True)
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    callback = gg.ModuleCallback(layer, gg.ErrorClipByValue(1.0))
    gg.append_backward((layer(x) * 100).sum() + (layer(x) * 0.25).sum(), callback=callback)
    assert layer.weight.grad.item() == 1.0 + 0.5
    assert layer.bias.grad.item() == 1.0 + 0.25
    assert x.grad.item() == 1.0 + 0.75


def test_gradients_of_state_that_a_module_kept_are_other_ones():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.tensor([2.0])), None

        def forward(self, x):
            y = x * self.weight if self.state is None else x * self.weight + self.state
            self.state = 5 * y
            return y

    model = Stateful()
    seen, _ = _calls(model, lambda: model(torch.ones(1)) * 0 + model(torch.ones(1)))
    assert [(number, sorted(gs)) for _, number, gs in seen] == [(1, ["other 0", "weight"]), (0, ["weight"])]


def test_what_a_call_did_not_make_has_no_gradient_in_grad_outputs():
    class Both(nn.Module):
        def forward(self, x):
            return x, x * 2, torch.ones(1), (x * 3).detach(), x * 4

    found = []
    model, x = Both(), torch.ones(1, requires_grad=True) * 1
    callback = gg.ModuleCallback(model, lambda call, gs: found.append(call.grad_outputs))
    gg.append_backward(sum(model(x)[:2]), callback=callback)
    assert found == [(None, torch.ones(1), None, None, None)]


def test_inputs_given_by_name_and_twice():
    class Scale(nn.Module):
        def forward(self, x, *, others):
            return x * others["a"] * others["b"]

    x, y = (torch.tensor([v], requires_grad=True) for v in (2.0, 3.0))
    model = Scale()
    seen = []
    callback = gg.ModuleCallback(model, lambda call, gs: seen.append({name: g.item() for name, g in gs.items()}))
    gg.append_backward(model(x, others={"a": y, "b": x}), callback=callback)
    assert seen == [{"input 0": 12.0, "input 1": 4.0}]


def test_parameters_in_the_no_grad_set_and_not_listed_stay_without_gradient():
    model = _mlp()
    clip = lambda call, gs: {name: g * 0.5 for name, g in gs.items()}  # noqa: E731
    _, _ = _calls(model, lambda: model(X).sum(), clip, no_grad_set=["0.weight"])
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_forwards_without_gradients_keep_nothing():
    model = _mlp()
    callback = gg.ModuleCallback(model, CLIP)
    with torch.no_grad():
        model(X)
    assert callback._calls == []


def test_detach_takes_all_hooks_out():
    model = _mlp()
    gg.ModuleCallback(model, CLIP).detach()
    counts = Counter(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert set(counts) == {0}


def _with_tensor_hook(model):
    model[0].weight.register_hook(lambda g: g * 2)
    return model(X).sum()


def _with_interior_hook(model):
    hidden = model[0](X)
    hidden.register_hook(lambda g: g * 2)
    return model[2](hidden).sum()


def _in_a_reentrant_checkpoint(model):
    return checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).sum()


REFUSED = {
    "a tensor hook on a parameter": (_with_tensor_hook, InvalidValueError, "by something else too"),
    "a tensor hook on a value": (_with_interior_hook, InvalidValueError, "by something else too"),
    "a reentrant checkpoint": (_in_a_reentrant_checkpoint, InvalidValueError, "use_reentrant=False"),
}


@pytest.mark.parametrize(("loss", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_cannot_do_is_refused(loss, error, words):
    model = _mlp()
    callback = gg.ModuleCallback(model, gg.ErrorClipByValue(1e-3))
    with pytest.raises(error, match=words):
        gg.append_backward(loss(model), callback=callback)


def test_a_rule_on_a_sparse_gradient_is_refused():
    table = nn.Embedding(3, 4, sparse=True)
    callback = gg.ModuleCallback(table, CLIP)
    with pytest.raises(UnsupportedGradientError, match=r"weight.* is sparse"):
        gg.append_backward(table(torch.tensor([1])).sum(), callback=callback)


WRONG = {
    "no mapping": (lambda call, gs: [1], InvalidTypeError, "returned list: expected gradients by name"),
    "an unknown name": (lambda call, gs: {"input 7": None}, InvalidValueError, "'input 7': expected names among"),
    "no tensor": (lambda call, gs: {"bias": 3}, InvalidTypeError, "for 'bias' int: expected a tensor of shape"),
    "another shape": (
        lambda call, gs: {"bias": gs["bias"][:1]},
        InvalidTypeError,
        r"for 'bias' a tensor of shape \(1,\)",
    ),
}


@pytest.mark.parametrize(("callback", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_a_callback_may_not_return(callback, error, words):
    layer = nn.Linear(2, 3)
    watched = gg.ModuleCallback(layer, callback)
    with pytest.raises(error, match=words):
        gg.append_backward(layer(torch.ones(1, 2)).sum(), callback=watched)


ARGUMENTS = {
    "no module": (lambda: gg.ModuleCallback(3, CLIP), "model is int"),
    "no callback": (lambda: gg.ModuleCallback(nn.Linear(1, 1), 3), "callback is int"),
    "compiled": (lambda: gg.ModuleCallback(_compiled(nn.Linear(1, 1)), CLIP), "on compiled code"),
}


def _compiled(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(("make", "words"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_of_the_wrong_type_are_refused(make, words):
    with pytest.raises(InvalidTypeError, match=words):
        make()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what the compiler reads of its inputs
@pytest.mark.parametrize("first", ["compiled", "watched"])
def test_compiled_code_is_refused(first):
    model = _mlp()
    if first == "compiled":  # a function that is compiled does not show
        step = torch.compile(lambda x: model(x).sum(), backend="aot_eager")
        step(X)
        callback = gg.ModuleCallback(model, CLIP)
        loss = step(X)
    else:
        callback = gg.ModuleCallback(model, CLIP)
        loss = torch.compile(model, backend="aot_eager")(X).sum()
    with pytest.raises(InvalidTypeError, match="ModuleCallback on compiled code"):
        gg.append_backward(loss, callback=callback)


def test_made_after_the_forward_it_is_refused():
    model = _mlp()
    loss = model(X).sum()
    with pytest.raises(InvalidValueError, match="expected a forward after the ModuleCallback was made"):
        gg.append_backward(loss, callback=gg.ModuleCallback(model, CLIP))


def test_a_forward_in_another_thread_is_refused():
    model, losses = _mlp(), []
    callback = gg.ModuleCallback(model, CLIP)
    thread = threading.Thread(target=lambda: losses.append(model(X).sum()))
    thread.start()
    thread.join()
    with pytest.raises(InvalidValueError, match="in another thread"):
        gg.append_backward(losses[0], callback=callback)


def test_calls_too_long_ago_are_refused_rather_than_missed(monkeypatch):
    monkeypatch.setattr("gradguard.backward_clip.module_callback._LONGEST", 8)
    model = _mlp()
    callback = gg.ModuleCallback(model, CLIP)
    first = model(X).sum()
    for _ in range(3):
        last = model(X).sum()
    gg.append_backward(last, callback=callback)
    with pytest.raises(InvalidValueError, match="forgets the oldest of 8 module calls"):
        gg.append_backward(first, callback=callback)

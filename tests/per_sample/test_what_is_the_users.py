"""What belongs to the user stays as it is, and what fails is told as what it is."""

import collections
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.capture import silent_taps, tap
from gradguard.per_sample.rerun import frozen, undisturbed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)).square().sum(1).mean()


class Counted(collections.OrderedDict):
    """Notes which of its methods are called."""

    calls: list = []  # noqa: RUF012

    def __getattribute__(self, name):
        if name != "calls":
            self.calls.append(name)
        return super().__getattribute__(name)

    def __setitem__(self, key, value):
        self.calls.append("__setitem__")
        super().__setitem__(key, value)

    def __iter__(self):
        self.calls.append("__iter__")
        return super().__iter__()


CONTAINERS = {
    "dict": ({"a": 1, "b": 2}, lambda c: c.update(a=5)),
    "dict, order": ({"a": 1, "b": 2}, lambda c: c.update(a=c.pop("a"))),
    "dict, equal value": ({"a": 1}, lambda c: c.update(a=1.0)),
    "dict, a key more": ({"a": 1}, lambda c: c.update(c=5)),
    "dict, emptied": ({"a": 1}, lambda c: c.clear()),
    "defaultdict": (collections.defaultdict(list, a=[1]), lambda c: c["b"].append(2)),
    "OrderedDict": (collections.OrderedDict(a=1, b=2), lambda c: c.move_to_end("a")),
    "Counter": (collections.Counter("aab"), lambda c: c.update("b")),
    "list": ([1, 2, 3], lambda c: c.reverse()),
    "list, longer": ([1], lambda c: c.append(2)),
    "set": ({1, 2}, lambda c: c.add(3)),
    "deque": (collections.deque([1, 2], maxlen=2), lambda c: c.append(3)),
    "nested": ({"a": [{"b": {1}}]}, lambda c: c["a"][0]["b"].add(2)),
}


@pytest.mark.parametrize(("container", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_holds_the_same_again(container, change):
    model = network()
    model.held = container
    before = repr(container)
    with undisturbed(model):
        change(container)
        assert repr(container) != before
    assert model.held is container
    assert repr(container) == before


def test_a_container_that_did_not_change_is_not_called():
    model = network()
    held = Counted(a=1, b=[2])
    vars(model[0])["held"] = held
    held.calls.clear()
    before = frozen(model)
    held["b"].append(3)
    before.restore()
    assert held.calls in ([], ["__getitem__"])
    assert held == {"a": 1, "b": [2]}


def test_a_buffer_that_was_resized_in_place_is_as_before():
    model = network()
    model.register_buffer("cache", torch.tensor([1.0, 2.0]))
    cache = model.cache
    with undisturbed(model):
        cache.resize_(5).fill_(3.0)
        model.cache = torch.zeros(1)
    assert model.cache is cache
    assert cache.tolist() == [1.0, 2.0]


def test_what_a_hook_needs_is_left_in_place():
    model = network()
    hooks = model[0]._forward_hooks
    with undisturbed(model):
        handle = model[0].register_forward_hook(lambda *args: None)
    assert not hooks
    handle.remove()


@pytest.mark.parametrize("steps", [0, 1])
def test_detached_between_forward_and_backward(steps):
    model = network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    for _ in range(steps):
        loss(model).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()
    value = loss(model)
    clipper.detach()
    with pytest.raises(InvalidValueError, match="detached between a forward of the module and its backward"):
        value.backward()
    loss(model).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", [torch.clone, lambda v: nn.Parameter(v.detach() + 1), lambda v: v.detach() + 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_other_tensors_in_the_places_of_parameters(make, steps):
    model = network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    for _ in range(steps):
        loss(model).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        model.zero_grad()

    def step():
        others = {name: make(value).requires_grad_() for name, value in model.named_parameters()}
        x = torch.ones(4, 3, dtype=torch.float64)
        torch.func.functional_call(model, others, (x,)).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()

    with pytest.raises(UnsupportedGradientError, match=r"another tensor in the place of its parameter 0\.weight"):
        step()
    assert all(p.grad is None for p in model.parameters())
    clipper.detach()


class Raising(nn.Module):
    """Raises an error of its own where it gets fewer samples than it wants."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if len(x) < 4:
            raise ZeroDivisionError("four at least")
        return self.layer(x)


def test_an_error_of_the_model_in_a_trial_is_told_as_that():
    model = Raising().double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    with pytest.raises(UnsupportedGradientError, match="raised ZeroDivisionError when gradguard ran it on 2 of its 4"):
        loss(model)
    clipper.detach()


@pytest.mark.parametrize("kind", [ZeroDivisionError, RuntimeError, Exception])
def test_a_failure_of_gradguard_is_told_as_its_own(monkeypatch, kind):
    def fails(*args, **kwargs):
        raise kind("something within")

    monkeypatch.setattr("gradguard.per_sample.rehearsal._RehearsedPair.compare", fails)
    model = network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    words = rf"gradguard could not follow the module: its trial run of some samples ended in {kind.__name__}: something"
    with pytest.raises(UnsupportedGradientError, match=words) as raised:
        loss(model)
    assert isinstance(raised.value.__cause__, kind)
    assert "mix" not in str(raised.value)
    clipper.detach()


class Pairs(nn.Module):
    """Scores of all pairs, by code that uses no parameter itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.a(x) @ self.b(x).mT, self.a(x)


@pytest.mark.parametrize("check", [True, False])
def test_scores_of_pairs_in_the_loss_are_refused_without_a_check_too(check):
    torch.manual_seed(0)
    model, x = Pairs().double(), torch.randn(4, 3, dtype=torch.float64)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0), check=check)
    model(x)[1].square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    model.zero_grad()
    with pytest.raises(UnsupportedGradientError, match=r"samples cannot be told apart|belongs to samples alone"):
        model(x)[0].square().sum(1).mean().backward()
    clipper.detach()


@pytest.mark.parametrize("silent", [True, False])
def test_a_backward_that_reads_the_graph_in_another_thread_brings_nothing(silent):
    """As of a model on an accelerator, whose backwards run in threads of autograd's own."""
    received = []
    anchor, x = torch.zeros((), requires_grad=True), torch.randn(3, requires_grad=True)
    [tapped] = tap(lambda saved, grads, task: received.append(task), (), anchor, [x * 2])
    loss = tapped.sum()

    def pull():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.autograd.grad, loss, x, retain_graph=True).result()

    with silent_taps(loss.grad_fn) if silent else nullcontext():
        pull()
    assert len(received) == (not silent)
    pull()
    assert len(received) == 2 - silent


HELD = {
    "nothing": lambda gradient: None,
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient[1:3],
    "an array": lambda gradient: gradient.numpy(),
    "a storage": lambda gradient: gradient.untyped_storage(),
    "another tensor": lambda gradient: gradient.detach(),
    "DLPack": lambda gradient: torch.utils.dlpack.to_dlpack(gradient),
}


def values_of(held):
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held)
    return torch.from_dlpack(held) if type(held).__name__ == "PyCapsule" else torch.as_tensor(held)


@pytest.mark.parametrize("ways", ["one batch", "two batches", "take"])
@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_memory_of_gradients_is_used_again_only_where_nothing_else_refers_to_it(hold, ways):
    """Large weights and small batches: the next sums are written where the last gradients lay."""
    torch.manual_seed(0)
    model, twin = nn.Linear(512, 1024, bias=False), nn.Linear(512, 1024, bias=False)
    twin.load_state_dict(model.state_dict())
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    places, held, kept = [], [], []
    for _ in range(3):
        model.zero_grad()
        twin.zero_grad()
        for _ in range(2 if ways == "two batches" else 1):
            inputs = torch.randn(2, 512)
            model(inputs).square().sum(1).mean().backward()
            clipper.clip_and_accumulate()
            (twin(inputs).square().sum(1).mean() / (2 if ways == "two batches" else 1)).backward()
        gradient = clipper.take().sums[0] / 2 if ways == "take" else None
        if gradient is None:
            clipper.pre_step()
            gradient = model.weight.grad
        torch.testing.assert_close(gradient, twin.weight.grad)
        places.append(gradient.data_ptr())
        held.append(hold(gradient))
        kept.append(None if held[-1] is None else values_of(hold(gradient)).clone())
        del gradient
    for now, before in zip(held, kept, strict=True):
        assert now is None or torch.equal(values_of(now), before)
    if hold is HELD["nothing"] and ways != "take":
        assert places[0] == places[1] == places[2]


def test_no_memory_is_kept_where_activations_are_large():
    """What is kept between steps would raise the peak of the next one there."""
    torch.manual_seed(0)
    model = nn.Linear(512, 1024)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    freed = []
    for size in (2, 512):
        model.zero_grad()
        model(torch.randn(size, 512)).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        gradient = weakref.ref(model.weight.grad)
        model.zero_grad()
        assert gradient() is None  # the tensor itself is the user's, and only its memory is kept
        freed.append(clipper._accumulation.room("weight") is None)
    assert freed == [False, True]


class RootOfWeights(nn.Module):
    """Has no finite gradient where a weight is 0."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(3, 2), nn.Parameter(torch.tensor([0.0, 1.0]))

    def forward(self, x):
        return self.linear(x) + self.weight.abs().sqrt() * x[:, :1]


def test_a_gradient_that_is_not_finite_leaves_the_hooks_as_they_were():
    """The error is held, as a notebook holds it, and the next step counts."""
    torch.manual_seed(0)
    model, twin = RootOfWeights(), RootOfWeights()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    inputs = torch.randn(4, 3)
    with pytest.raises(UnsupportedGradientError, match="alone is not finite, though its inputs are") as held:
        model(inputs)
    with torch.no_grad():
        model.weight.fill_(0.25)
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        each(inputs).square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert "Nothing was clipped" in str(held.value)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


def outliers_from_the_batch(module, args):
    return (torch.where(args[0].abs() > 1.0, args[0].mean(0), args[0]),)


def scaled(module, args):
    return ((args[0] - 0.5) / 0.25,)


def by_keyword(module, args, kwargs):
    return (args[0].sin() + 1,), kwargs


def output_scaled(module, args, output):
    return output.tanh() * 2


def output_in_dict(module, args, output):
    return {"out": output, "square": output.square()}


def output_of_others(module, args, output):
    return output + 0.5 * output.detach().roll(1, 0)


def register(hook, **options):
    before = hook not in (output_scaled, output_in_dict, output_of_others)
    options |= {"with_kwargs": True} if hook is by_keyword else {}

    def put(model):
        return (model.register_forward_pre_hook if before else model.register_forward_hook)(hook, **options)

    return put


def of_samples(output) -> torch.Tensor:
    output = output["out"] + output["square"] if isinstance(output, dict) else output
    return output.square().sum(1)


@pytest.mark.parametrize("late", [0, 1, 3], ids=["before the clipper", "after it", "at a later step"])
@pytest.mark.parametrize(
    "hook", [outliers_from_the_batch, scaled, by_keyword, output_scaled, output_in_dict, output_of_others]
)
@pytest.mark.parametrize("kind", [network, lambda: nn.Linear(3, 2).double()], ids=["network", "layer"])
def test_hooks_of_the_outermost_module_are_a_part_of_it(kind, hook, late):
    torch.manual_seed(0)
    model, put = kind(), register(hook)
    if late == 0:
        put(model)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    for step in range(1, 6):
        if step == late:
            put(model)
        hooked, x = step >= late, 1.5 * torch.randn(6, 3, dtype=torch.float64)
        alone = kind()
        alone.load_state_dict(model.state_dict())
        if hooked:
            put(alone)
        if hooked and hook in (outliers_from_the_batch, output_of_others):
            with pytest.raises(UnsupportedGradientError, match="alone"):
                model(x)
            break
        of_samples(model(x)).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        for i in range(6):
            (of_samples(alone(x[i : i + 1])).sum() / 6).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    clipper.detach()


def test_a_hook_that_is_put_before_the_clippers_is_told_once():
    model = network()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    for hook in (scaled, by_keyword):
        register(hook, prepend=True)(model)
        with pytest.raises(UnsupportedGradientError, match=r"prepend=True.*Repeat this step"):
            loss(model)
        for _ in range(3):
            loss(model).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        plain = network()
        for one in (scaled,) if hook is scaled else (by_keyword, scaled):
            register(one)(plain)
        loss(plain).backward()
        for one, parameter in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-10, atol=1e-12)
    clipper.detach()
    assert len(model._forward_pre_hooks) == 2


def test_a_hook_that_fails_before_the_outermost_module_runs_leaves_no_call_behind():
    model, fails = network(), [True]

    def hook(module, args):
        if fails:
            raise KeyError("the user's")

    model.register_forward_pre_hook(hook)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1e9))
    with pytest.raises((KeyError, UnsupportedGradientError), match="the user's"):
        loss(model)
    fails.clear()
    loss(model).backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step().batch_size == 4
    clipper.detach()

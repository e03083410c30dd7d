"""`append_backward` and `minimize`: the letter of the document that the error clip began with."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import (
    FreedGraphError,
    GradguardError,
    InvalidTypeError,
    InvalidValueError,
    NonFiniteGradientError,
    UnsupportedGradientError,
)

ONE = gg.ErrorClipByValue(1.0)


def leaf(*values):
    return torch.tensor(values or (1.0, -2.0), requires_grad=True)


def lists(pairs):
    return [gradient.tolist() for _, gradient in pairs]


def _net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1))
    return model, torch.randn(4, 3)


def test_contributions_are_clipped_before_they_are_added_up():
    w = leaf(1.0)
    assert lists(gg.append_backward((w * 10 + w * 20).sum(), callback=ONE)) == [[2.0]]


def test_gradients_of_parameters_are_clipped_too():
    w, x = leaf(1.0, 1.0), torch.tensor([30.0, 0.5])
    assert lists(gg.append_backward((w * x).sum(), callback=ONE)) == [[1.0, 0.5]]


def test_without_a_callback_it_is_backward():
    (model, x), (plain, _) = _net(), _net()
    pairs = gg.append_backward(model(x).square().sum())
    plain(x).square().sum().backward()
    assert {id(p) for p, _ in pairs} == {id(p) for p in model.parameters()}
    assert all(gradient is p.grad for p, gradient in pairs)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0
    )


def test_gradients_are_added_to_those_there_are():
    w = leaf()
    w.grad = torch.tensor([100.0, 100.0])
    assert lists(gg.append_backward((w * 10).sum(), callback=ONE)) == [[101.0, 101.0]]


def test_a_parameter_that_the_loss_does_not_reach_has_no_pair_even_with_an_old_gradient():
    used, unused = leaf(), leaf()
    unused.grad = torch.ones(2)
    assert [p is used for p, _ in gg.append_backward((used * 2).sum(), [unused, used])] == [True]
    assert unused.grad.tolist() == [1.0, 1.0]


def test_pairs_come_in_the_order_of_the_parameter_list_each_once():
    a, b, c = leaf(1.0), leaf(2.0), leaf(3.0)
    pairs = gg.append_backward((a * b * c).sum(), [c, a, b, a, c])
    assert [p.item() for p, _ in pairs] == [3.0, 1.0, 2.0]
    assert lists(pairs) == [[2.0], [6.0], [3.0]]


def test_only_listed_parameters_get_a_gradient():
    a, b = leaf(1.0), leaf(2.0)
    assert lists(gg.append_backward((a * b).sum(), [b])) == [[1.0]]
    assert a.grad is None


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: m.named_parameters(),
        lambda m: dict(m.named_parameters()),
        lambda m: list(m.parameters()),
        lambda m: tuple(m.parameters()),
    ],
)
def test_forms_of_a_parameter_list(form):
    model, x = _net()
    pairs = gg.append_backward(model(x).sum(), form(model))
    assert [id(p) for p, _ in pairs] == [id(p) for p in model.parameters()]


def test_parameters_that_require_no_gradient_are_passed_over():
    model, x = _net()
    model[0].weight.requires_grad_(False)
    assert len(gg.append_backward(model(x).sum(), model)) == 5


@pytest.mark.parametrize("listed", [[], None, "all"])
def test_with_nothing_left_the_list_is_empty_and_nothing_has_a_gradient(listed):
    w = leaf()
    blocked = [] if listed == [] else [w]
    assert gg.append_backward((w * 2).sum(), [w] if listed == "all" else listed, blocked) == []
    assert w.grad is None


@pytest.mark.parametrize("collection", [list, set, tuple, iter])
@pytest.mark.parametrize("listed", [False, True])
def test_no_gradient_for_parameters_in_the_no_grad_set(collection, listed):
    a, b = leaf(2.0), leaf(3.0)
    pairs = gg.append_backward((a * b).sum(), [a, b] if listed else None, collection([b]))
    assert lists(pairs) == [[3.0]]
    assert b.grad is None


@pytest.mark.parametrize("callback", [None, gg.ErrorClipByValue(100.0)])
def test_no_gradient_flows_through_a_tensor_in_the_no_grad_set_but_round_it(callback):
    a, b = leaf(2.0), leaf(3.0)
    left, right = torch.cat([a * b, a]).split(1)
    pairs = gg.append_backward((left * 10 + right * 5 + a).sum(), no_grad_set=[left], callback=callback)
    gradients = {id(p): g.tolist() for p, g in pairs}
    assert gradients[id(a)] == [6.0]
    assert gradients.get(id(b), [0.0]) == [0.0]


@pytest.mark.parametrize(
    "names",
    [lambda m: m, lambda m: m.named_parameters(), lambda m: dict(m.named_parameters())],
)
def test_names_in_the_no_grad_set(names):
    model, x = _net()
    pairs = gg.append_backward(model(x).sum(), names(model), {"0.weight", "4.bias", model[2].weight})
    assert [id(p) for p, _ in pairs] == [id(model[0].bias), id(model[2].bias), id(model[4].weight)]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (lambda m: m, r"'0.wieght', which is not among the known ones, \['0.bias', '0.weight', '2.bias',"),
        (
            lambda m: list(m.parameters()),
            r"'0.wieght', which is not among the known ones: no parameter has a name. Give parameter_list",
        ),
        (lambda m: None, r"'0.wieght', which is not among the known ones: no parameter has a name"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(listed, message):
    model, x = _net()
    with pytest.raises(InvalidValueError, match=message):
        gg.append_backward(model(x).sum(), listed(model), ["0.wieght"])
    assert all(p.grad is None for p in model.parameters())


def test_the_callback_is_called_once_for_each_operation_with_its_name_and_gradients():
    w, seen = leaf(3.0), []
    h = w * torch.tensor([2.0])
    gg.append_backward((h * h + h.sin() * 0).sum(), callback=lambda op, grads: seen.append((op, len(grads))))
    assert sorted(seen) == sorted(
        [
            ("SumBackward0", 1),
            ("AddBackward0", 2),
            ("MulBackward0", 2),
            ("MulBackward0", 2),
            ("SinBackward0", 1),
            ("MulBackward0", 2),
        ]
    )
    assert seen[0][0] == "SumBackward0"
    assert seen[-1][0] == "MulBackward0"


def test_the_callback_sees_none_where_an_input_needs_no_gradient():
    seen = []
    gg.append_backward((leaf() * torch.tensor([2.0, 3.0])).sum(), callback=lambda op, grads: seen.append(grads))
    assert seen[1][0].tolist() == [2.0, 3.0]
    assert seen[1][1] is None


@pytest.mark.parametrize("kind", [tuple, list])
def test_the_callback_may_change_gradients(kind):
    def halve(op, grads):
        return kind(None if g is None else g / 2 for g in grads)

    w = leaf()
    assert lists(gg.append_backward((w * 8).sum(), callback=halve)) == [[2.0, 2.0]]


WRONG = {
    "a tensor": (lambda grads: grads[0], "SumBackward0 returned Tensor: expected 1 gradients"),
    "too many": (lambda grads: (*grads, None), "SumBackward0 returned tuple: expected 1 gradients"),
    "none inside": (lambda grads: (None,), r"returned None: expected a tensor of shape \(2,\), torch.float32"),
    "another shape": (
        lambda grads: (grads[0][:1],),
        r"of shape \(1,\), torch.float32, on cpu: expected a tensor of shape \(2,\)",
    ),
    "another dtype": (
        lambda grads: (grads[0].double(),),
        r"shape \(2,\), torch.float64, on cpu: expected a tensor of shape \(2,\)",
    ),
    "a number": (lambda grads: (1.0,), "SumBackward0 returned"),
    "a string": (lambda grads: "x", "SumBackward0 returned str: expected 1 gradients"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_callback_that_returns_something_else_is_an_error_and_nothing_stays_attached(case):
    change, message = WRONG[case]
    w = leaf()
    loss = (w * 10).sum()
    with pytest.raises(InvalidTypeError, match=message):
        gg.append_backward(loss, callback=lambda op, grads: change(grads))
    assert w.grad is None


def test_errors_of_the_callback_come_through():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        gg.append_backward((leaf() * 2).sum(), callback=lambda op, grads: 1 / 0)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_attached(fails):
    def callback(op, grads):
        if fails and op == "AddBackward0":
            raise ValueError("on purpose")
        return tuple(None if g is None else g * 0 for g in grads)

    w = leaf()
    h = w + w
    loss = h.sum()  # nothing is saved in this graph, so that it may be gone through again
    for options in ({}, {"no_grad_set": [h]}, {"no_grad_set": [w]}, {"parameter_list": [w]}):
        try:
            gg.append_backward(loss, callback=callback, **options)
        except ValueError:
            assert fails
        w.grad = None
        loss.backward()
        assert w.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("callback", [None, ONE, lambda op, grads: None])
def test_a_freed_graph_is_an_error_that_names_the_operation(callback):
    w = leaf()
    loss = (w * w).sum()
    loss.backward()
    with pytest.raises(FreedGraphError, match="freed by an earlier backward at MulBackward0: expected a graph"):
        gg.append_backward(loss, callback=callback)


def _in_a_checkpoint(call, checkpointed):
    model, x = _net()
    x.requires_grad_()
    body = lambda h: model[2](model[1](h)).tanh() * 50  # noqa: E731
    h = model[0](x)
    h = checkpoint(body, h, use_reentrant=False) if checkpointed else body(h)
    pairs = call(model, model[4](h).square().sum())
    return {name: [g.clone() for p, g in pairs if p is q] for name, q in model.named_parameters()}


CALLS = {
    "append_backward": lambda model, loss: gg.append_backward(loss, callback=ONE),
    "append_backward, names": lambda model, loss: gg.append_backward(loss, model, ["2.weight", "4.bias"], ONE),
    "append_backward, blocked": lambda model, loss: gg.append_backward(loss, None, [model[2].weight], ONE),
    "minimize": lambda model, loss: gg.minimize(torch.optim.SGD(model.parameters(), 0.1), loss, error_clip=ONE),
}


@pytest.mark.parametrize("call", CALLS)
def test_operations_and_parameters_within_a_checkpoint_are_found(call):
    expected = _in_a_checkpoint(CALLS[call], False)
    found = _in_a_checkpoint(CALLS[call], True)
    assert any(found.values())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 * i} for i, q in enumerate(p)], 0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", [None, gg.ErrorClipByValue(1e-2), gg.ErrorClipByNorm(0.1)])
def test_minimize_is_zero_grad_append_backward_and_step(optimizer, rule):
    (ours, x), (theirs, _) = _net(), _net()
    optimizers = [OPTIMIZERS[optimizer](list(m.parameters())) for m in (ours, theirs)]
    for _ in range(3):  # steps do not accumulate
        pairs = gg.minimize(optimizers[0], ours(x).square().sum(), error_clip=rule)
        optimizers[1].zero_grad()
        expected = gg.append_backward(theirs(x).square().sum(), list(theirs.parameters()), callback=rule)
        optimizers[1].step()
        torch.testing.assert_close(lists(pairs), lists(expected), rtol=0, atol=0)
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)


def test_minimize_updates_the_listed_parameters_alone():
    model, x = _net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pairs = gg.minimize(optimizer, model(x).square().sum(), None, [model[4].bias, model[0].weight])
    assert [id(p) for p, _ in pairs] == [id(model[4].bias), id(model[0].weight)]
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [True, False, False, False, False, True]


def test_minimize_takes_its_arguments_in_the_order_of_the_document():
    (ours, x), (theirs, _) = _net(), _net()
    theirs.load_state_dict(ours.state_dict())
    listed = [[model[0].weight, model[4].bias] for model in (ours, theirs)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    gg.minimize(optimizers[0], ours(x).square().sum(), None, listed[0], [ours[4].bias], ONE)
    gg.minimize(
        optimizers[1], theirs(x).square().sum(), parameter_list=listed[1], no_grad_set=[theirs[4].bias], error_clip=ONE
    )
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("given", [lambda model: model, lambda model: list(model.parameters()), lambda model: object()])
def test_minimize_refuses_a_start_up_program_by_name(given):
    model, x = _net()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InvalidTypeError, match=r"startup_program is .*write parameter_list="):
        gg.minimize(torch.optim.SGD(model.parameters(), 0.1), model(x).sum(), given(model))
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_minimize_knows_the_names_that_the_optimizer_was_given():
    model, x = _net()
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    old = model[0].weight.detach().clone()
    assert len(gg.minimize(optimizer, model(x).sum(), no_grad_set=["0.weight", model[2].bias])) == 4
    assert torch.equal(model[0].weight, old)
    with pytest.raises(InvalidValueError, match=r"the name 'nope', which is not among the known ones, \['0.bias',"):
        gg.minimize(optimizer, model(x).sum(), no_grad_set=["nope"])


def _refused(model, **changes):
    arguments = {
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss": model(torch.ones(1, 3)).sum(),
        **changes,
    }
    return lambda: gg.minimize(**arguments)


REFUSED = {
    "no optimizer": ({"optimizer": "sgd"}, TypeError, "optimizer is str: expected a torch.optim.Optimizer"),
    "no graph": ({"loss": torch.ones(())}, ValueError, "the loss has no graph behind it"),
    "no tensor": ({"loss": 1.0}, TypeError, "the loss is float: expected a tensor"),
    "no rule": ({"error_clip": 5.0}, TypeError, "error_clip is float: expected a rule or None"),
    "a rule class": ({"error_clip": gg.ErrorClipByValue}, TypeError, "error_clip is type: expected a rule or None"),
    "foreign": ({"parameter_list": [leaf()]}, ValueError, r"parameter_list has a tensor of shape \(2,\), which the"),
    "foreign, named": ({"parameter_list": {"w": leaf()}}, ValueError, "parameter_list has w, which the optimizer does"),
    "names": (
        {"parameter_list": ["0.weight"]},
        TypeError,
        "parameter_list has '0.weight': expected tensors, because a name",
    ),
    "one tensor": ({"parameter_list": leaf()}, TypeError, "parameter_list is Tensor: expected a module or a list"),
    "one name": ({"no_grad_set": "0.weight"}, TypeError, "no_grad_set is one str: expected a list or a set"),
    "one blocked": ({"no_grad_set": leaf()}, TypeError, "no_grad_set is one Tensor: expected a list or a set"),
    "a number": ({"no_grad_set": [1]}, TypeError, "no_grad_set has int: expected tensors or names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_minimize_refuses_changes_nothing(case):
    changes, kind, message = REFUSED[case]
    model, _ = _net()
    model[0].weight.grad = torch.ones(5, 3)
    call, old = _refused(model, **changes), model[0].weight.detach().clone()
    with pytest.raises(GradguardError, match=message) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert torch.equal(model[0].weight, old)
    assert model[0].weight.grad is not None


def test_lbfgs_is_refused():
    w = leaf()
    with pytest.raises(InvalidValueError, match=r"LBFGS evaluates the loss by itself: call its step\(closure\)"):
        gg.minimize(torch.optim.LBFGS([w]), (w * 2).sum())


@pytest.mark.parametrize("callback", [5.0, "clip"])
def test_a_callback_must_be_callable_or_a_rule(callback):
    with pytest.raises(InvalidTypeError, match=r"callback is \w+: expected a callable or a rule"):
        gg.append_backward((leaf() * 2).sum(), callback=callback)


def test_a_sparse_gradient_is_refused_naming_the_operation():
    weight = torch.ones(5, 2, requires_grad=True)
    loss = F.embedding(torch.tensor([0, 1]), weight, sparse=True).sum()
    with pytest.raises(UnsupportedGradientError, match="EmbeddingBackward0 is sparse"):
        gg.append_backward(loss, callback=ONE)


def test_the_raising_rule_names_the_operation():
    with pytest.raises(NonFiniteGradientError, match=r"SqrtBackward0: 2 NaN and 0 infinite|SqrtBackward0.*infinite"):
        gg.append_backward((leaf() * 0).sqrt().sum(), callback=gg.rules.ErrorClipNonfinite("raise"))


def test_nan_gradients_stay_visible():
    w = leaf(math.nan)
    assert math.isnan(lists(gg.append_backward((w * w).sum(), callback=ONE))[0][0])

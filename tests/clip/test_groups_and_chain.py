"""Groups and Chain: own rules for named groups over one measurement, and rules one after the other as one."""

import copy
import math

import pytest
import torch
from torch import nn

import gradguard as gg
from cases import GRADIENTS, gradients_in, parameter, random
from gradguard import Chain, ClipAdaptive, ClipByGlobalNorm, ClipByNorm, ClipByValue, Groups
from gradguard.clip import compose
from gradguard.clip import gradients as gradients_of_clip
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError
from gradguard.rules import Clipper, Decision, describe, norms_of
from reference import clip_norm as slow_clip
from reference import total_norm as slow_norm


def model_with_gradients(scale: float = 100.0) -> nn.Module:
    model = nn.Sequential()
    for i, name in enumerate(("encoder", "decoder", "head")):
        layer = nn.Linear(3, 3)
        layer.weight.data.fill_(0.5)
        layer.bias.data.fill_(0.5)
        layer.weight.grad = random(3, 3, seed=2 * i) * scale
        layer.bias.grad = random(3, seed=2 * i + 1) * scale
        model.add_module(name, layer)
    return model


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters()]


class Spy(Clipper):
    """Halves what it is shown and remembers the norm that it saw; its state counts finite steps."""

    def __init__(self, folds: bool = True) -> None:
        self.folds, self.seen, self.learned = folds, [], None
        self.steps = torch.zeros((), dtype=torch.int64)

    def learn(self, parameters):
        self.learned = parameters

    def decide(self, grads, scale=1.0):
        norms = norms_of(grads, scale)
        norm = norms.norm()
        self.seen.append(float(norm))
        self.steps = self.steps + norm.isfinite()
        half = torch.full_like(norm, 0.5)
        if self.folds:
            return Decision(grads, describe(grads, norms, half, half < 1), half)

        def write() -> None:
            for g in grads.gradients:
                g.mul_(0.5)

        return Decision(grads, describe(grads, norms, half, half < 1), None, write)

    def state_dict(self):
        return {"steps": self.steps.clone()}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"].clone()


BEYOND_A_SQUARE = ("huge float64", "tiny float64")  # only the CPU looks whether float64 has overflowed
EVERYWHERE = [(c, p) for c in GRADIENTS for p in ("host", "device") if p == "host" or c not in BEYOND_A_SQUARE]

# --- Groups -----------------------------------------------------------------------------------------------------------

SELECTIONS = {
    "name of a module": lambda m: "head",
    "glob": lambda m: "he*",
    "names": lambda m: ("head.weight", "head.bias"),
    "module": lambda m: m.head,
    "list": lambda m: list(m.head.parameters()),
    "generator": lambda m: m.head.parameters(),
    "param group": lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1).param_groups[0],
    "mixed": lambda m: ["head.weight", m.head.bias],
}


@pytest.mark.parametrize("kind", SELECTIONS)
def test_every_way_to_say_which(kind, path):
    model = model_with_gradients()
    body, head = gradients(model)[:4], gradients(model)[4:]
    clip = Groups([(SELECTIONS[kind](model), ClipByGlobalNorm(1.0))], rest=ClipByGlobalNorm(5.0))
    result = clip(model)
    expected = slow_clip(body, 5.0) + slow_clip(head, 1.0)
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.double(), e, rtol=1e-6, atol=1e-9)
    found = list(result.group_norms.values())
    assert [float(n) for n in found] == pytest.approx([slow_norm(head), slow_norm(body)], rel=1e-6, abs=0)
    assert float(result.norm) == pytest.approx(slow_norm(body + head), rel=1e-6, abs=0)
    assert float(result.coefficient) == pytest.approx(math.hypot(5, 1) / slow_norm(body + head), rel=1e-5, abs=0)
    assert bool(result.clipped)


def test_a_dict_may_have_patterns_modules_and_parameters_as_keys():
    model = model_with_gradients()
    names = list(
        Groups(
            {
                "encoder": ClipByGlobalNorm(1.0),
                model.decoder: ClipByNorm(1.0),
                model.head.bias: None,
                ("head.w*", "tail*"): ClipByValue(0.1),
            }
        ).members
    )
    assert names == ["encoder", "group 1", "group 2", "head.w*, tail*"]


def test_groups_of_an_optimizer_are_called_by_their_name():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(
        [{"params": model.encoder.parameters(), "name": "body"}, {"params": model.head.parameters()}], lr=0.1
    )
    rules = [(group, ClipByGlobalNorm(1.0)) for group in optimizer.param_groups]
    assert list(Groups(rules, rest=None)(model).group_norms) == ["body", "group 1", "rest"]


@pytest.mark.parametrize("named", [True, False])
def test_none_exempts(named, path):
    model = model_with_gradients()
    before = gradients(model)
    clip = Groups({"encoder" if named else model.encoder: ClipByGlobalNorm(1.0)}, rest=None)
    result = clip(model)
    torch.testing.assert_close(gradients(model)[2:], before[2:], rtol=0, atol=0)
    assert slow_norm(gradients(model)[:2]) == pytest.approx(1.0, rel=1e-5, abs=0)
    assert float(result.norm) == pytest.approx(slow_norm(before), rel=1e-6, abs=0)
    assert float(result.coefficient) == pytest.approx(slow_norm(gradients(model)) / slow_norm(before), rel=1e-5, abs=0)


MIXED = {
    "value": (ClipByValue(0.1), lambda params: gg.clip_grad_value_(params, 0.1)),
    "each": (ClipByNorm(0.2), lambda params: [gg.clip_grad_norm_(p, 0.2) for p in params]),
    "adaptive": (ClipAdaptive(0.01), lambda params: gg.clip_grad_adaptive_(params, 0.01)),
    "order": (ClipByGlobalNorm(0.1, math.inf), lambda params: gg.clip_grad_norm_(params, 0.1, math.inf)),
    "chain": (Chain(ClipByGlobalNorm(1.0), ClipByGlobalNorm(0.5)), lambda params: gg.clip_grad_norm_(params, 0.5)),
}


@pytest.mark.parametrize("kind", MIXED)
def test_groups_of_every_rule(kind, path):
    ours, theirs = model_with_gradients(), model_with_gradients()
    before = gradients(ours)
    member, function = MIXED[kind]
    result = Groups({"encoder": member}, rest=ClipByGlobalNorm(3.0))(ours)
    function(list(theirs.encoder.parameters()))
    gg.clip_grad_norm_([*theirs.decoder.parameters(), *theirs.head.parameters()], 3.0)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-5, atol=1e-9)
    assert float(result.coefficient) == pytest.approx(slow_norm(gradients(ours)) / slow_norm(before), rel=1e-3, abs=0)


@pytest.mark.parametrize(("case", "path"), EVERYWHERE, indirect=["path"])
def test_groups_over_the_table(case, path):
    params = [
        parameter(g.clone(), torch.zeros(g.shape)) if g.layout is not torch.strided else parameter(g.clone())
        for g in GRADIENTS[case]
    ]
    clip = Groups([(params[0], ClipByGlobalNorm(0.5))], rest=ClipByNorm(0.25))
    result = clip(params)
    assert float(result.norm.double()) == pytest.approx(slow_norm(GRADIENTS[case]), rel=1e-5, abs=1e-44)
    for i, p in enumerate(params):
        limit = 0.5 if i == 0 else 0.25
        expected = min(limit, slow_norm([GRADIENTS[case][i]]))
        assert slow_norm([p.grad.to_dense() if p.grad.is_sparse else p.grad]) == pytest.approx(
            expected, rel=5e-3 if p.dtype is torch.bfloat16 else 1e-4, abs=1e-44
        )


def test_one_measurement_for_all_groups(monkeypatch):
    measurements = []
    real = gradients_of_clip.tensor_norms

    def counted(tensors, p=2.0):
        measurements.append(len(tensors))
        return real(tensors, p)

    monkeypatch.setattr(gradients_of_clip, "tensor_norms", counted)
    rules = {"encoder": ClipByGlobalNorm(1.0), "decoder": Chain(ClipByGlobalNorm(2.0), ClipByNorm(1.0)), "head": None}
    Groups(rules)(model_with_gradients())
    assert measurements == [6]
    Chain(Groups({"encoder": ClipByGlobalNorm(1.0)}, rest=None))(model_with_gradients(), nonfinite="raise")
    assert measurements == [6, 6]


def test_places_are_worked_out_once(monkeypatch):
    model, clip = model_with_gradients(), Groups({"head": ClipByGlobalNorm(1.0)}, rest=None)
    model.decoder.bias.grad = None
    clip(model)
    monkeypatch.setattr(compose.Selector, "fits", lambda *_: pytest.fail("worked out again"))
    clip(model)


def test_a_parameter_in_two_groups_is_an_error_that_lists_it():
    rules = Groups({"head": ClipByGlobalNorm(1.0), "*.bias": None, "encoder.bias": ClipByNorm(1.0)}, rest=None)
    model = model_with_gradients()
    before = gradients(model)
    words = r"2 parameters are in two groups: encoder.bias \('\*.bias' and 'encoder.bias'\), head.bias \('head' and"
    with pytest.raises(InvalidValueError, match=words):
        rules(model)
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    optimizer_like = [(list(model.parameters()), None), (model.head.bias, ClipByNorm(1.0))]
    with pytest.raises(InvalidValueError, match=r"1 parameter is in two groups: .*parameter 5 \(shape \(3,\), no na"):
        Groups(optimizer_like)(list(model.parameters()))


def test_also_where_the_parameter_has_no_gradient_yet():
    with pytest.raises(InvalidValueError, match=r"1 parameter is in two groups: bias \('bias' and '\*'\)"):
        Groups({"bias": None, "*": ClipByNorm(1.0)})([("bias", nn.Parameter(torch.ones(1)))])


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (
            "tail",
            r"group 0 has 'tail', which matches no parameter; the parameters are encoder.weight, encoder.bias, de",
        ),
        (("head", "tail.*"), r"group 0 has 'tail.\*', which matches no parameter"),
        (nn.Linear(1, 1), "group 0 has a Linear, which matches no parameter; the parameters are encoder.weight"),
        (torch.ones(2), r"group 0 has a Tensor of shape \(2,\), which matches no parameter"),
        (nn.ReLU(), "group 0 has a ReLU, which matches no parameter"),
    ],
)
def test_a_group_that_matches_nothing_lists_the_names(selection, words):
    clip = Groups({selection: ClipByGlobalNorm(1.0)}, rest=None)
    with pytest.raises(InvalidValueError, match=words):
        clip(model_with_gradients())


def test_patterns_need_names():
    with pytest.raises(InvalidValueError, match=r"have no names: pass the module or model.named_parameters\(\)"):
        Groups({"head": None}, rest=None)(model_with_gradients().parameters())


def test_without_rest_every_parameter_must_be_in_a_group():
    with pytest.raises(InvalidValueError, match=r"2 parameters are in no group: head.weight, head.bias. Give rest="):
        Groups({"encoder": None, "decoder": ClipByNorm(1.0)})(model_with_gradients())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Groups([([], None)]), InvalidValueError, "group 0 is empty: expected a name pattern"),
        (lambda: Groups({"a": 1.0}), InvalidTypeError, r"the clipper of 'a' is 1.0: expected a clipper such as"),
        (lambda: Groups({}, rest="x"), InvalidTypeError, r"the clipper of 'rest' is 'x': expected"),
        (lambda: Groups({3: None}), InvalidTypeError, "group 0 has 3: expected a name or pattern"),
        (lambda: Groups([("a", None), ("a", None)]), InvalidValueError, "two groups have the same name, among a, a"),
        (lambda: Groups({"a": (c := ClipByNorm(1.0)), "b": c}), InvalidValueError, "the same clipper object"),
    ],
)
def test_groups_that_cannot_be_meant(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_group_without_gradients_is_not_asked():
    model, spy = model_with_gradients(), Spy()
    clip = Groups({"head": spy}, rest=ClipByGlobalNorm(1.0))
    model.head.zero_grad()
    result = clip(model)
    assert spy.seen == []
    assert float(result.group_norms["head"]) == 0
    model.head.weight.grad = torch.ones(3, 3)
    clip(model)
    assert spy.seen == [3.0]


def test_any_name_of_a_tied_parameter_fits():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.full((2, 2), 100.0)
    result = Groups({"1": ClipByGlobalNorm(1.0)}, rest=None)(model)
    assert slow_norm([model[0].weight.grad]) == pytest.approx(1.0, rel=1e-5, abs=0)
    assert float(result.group_norms["1"]) == 200


def test_groups_follow_another_model():
    clip = Groups({"head": ClipByGlobalNorm(1.0)}, rest=None)
    for _ in range(2):
        model = model_with_gradients()
        clip(model)
        assert slow_norm(gradients(model.head)) == pytest.approx(1.0, rel=1e-5, abs=0)


def test_nan_in_one_group_leaves_the_others_right(path):
    model = model_with_gradients()
    model.head.weight.grad[0, 0] = math.nan
    clip = Groups({"head": ClipByGlobalNorm(1.0)}, rest=ClipByGlobalNorm(2.0))
    result = clip(model)
    assert slow_norm(gradients(model)[:4]) == pytest.approx(2.0, rel=1e-5, abs=0)
    assert gradients(model.head)[0].isnan().all()
    assert bool(result.nonfinite)
    assert math.isnan(float(result.group_norms["head"]))


@pytest.mark.parametrize("exempt", [True, False])
def test_policies_cover_exempt_gradients_too(exempt, path):
    model = model_with_gradients()
    model.head.weight.grad[0, 0] = math.nan
    spy = Spy()
    clip = Groups({"head": None if exempt else ClipByNorm(1.0)}, rest=spy)
    before = gradients(model)
    with pytest.raises(NonFiniteGradientError, match=r"`head\.weight`: 1 of 9 elements NaN"):
        clip(model, nonfinite="raise")
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0, equal_nan=True)
    assert spy.seen == []
    result = clip(model, nonfinite="zero")
    assert slow_norm(gradients(model)) == 0
    assert (float(result.coefficient), bool(result.clipped)) == (0.0, True)
    assert result.culprits() == {"head.weight": 1}


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_groups_and_chains_know_the_loss_scale(kind, path):
    rules = Chain(
        ClipByGlobalNorm(50.0), Groups({"head": ClipByGlobalNorm(1.0), "encoder": ClipByValue(0.5)}, rest=None)
    )
    plain, scaled = model_with_gradients(), model_with_gradients(102_400.0)
    results = []
    for model, scale in ((plain, 1.0), (scaled, kind(1024.0))):
        rules.learn(model)
        decision = rules.decide(gradients_in(model), scale)
        decision.apply()
        results.append(decision.result)
    torch.testing.assert_close([g / 1024 for g in gradients(scaled)], gradients(plain), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(results[1].group_norms, results[0].group_norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(results[1].coefficient, results[0].coefficient, rtol=1e-5, atol=0)


def test_lock_in_of_a_group_is_told():
    model, clip = model_with_gradients(), Groups({"head": ClipByGlobalNorm(1e-9)}, rest=None)
    results = [clip(model_with_gradients()) for _ in range(100)]
    assert [bool(result.locked_in) for result in results[-2:]] == [False, True]
    assert Groups({"head": Spy()}, rest=None)(model).locked_in is None


def test_state_of_groups_survives_a_resumed_run():
    first, second = (Groups({"head": Spy(), "encoder": None}, rest=ClipByGlobalNorm(1.0)) for _ in range(2))
    first(model_with_gradients())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert int(second.members["head"].steps) == 1
    with pytest.raises(InvalidValueError, match=r"of the groups \['head', 'encoder', 'rest'\], but these are \['head"):
        Groups({"head": Spy()}, rest=None).load_state_dict(first.state_dict())


# --- Chain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(5.0, 1.0), (1.0, 5.0), (1e9, 1e9), (0.0, 1.0), (math.inf, 2.0)])
def test_coefficients_become_one(first, second, path):
    model = model_with_gradients()
    before = gradients(model)
    decision = Chain(ClipByGlobalNorm(first), ClipByGlobalNorm(second)).decide(gradients_in(model))
    expected = slow_norm(slow_clip(slow_clip(before, first), second)) / slow_norm(before)
    assert float(decision.coefficient) == pytest.approx(expected, rel=1e-6, abs=0)
    assert float(decision.result.coefficient) == pytest.approx(expected, rel=1e-6, abs=0)
    assert bool(decision.result.clipped) == (expected < 1)
    assert decision.write is None
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    decision.apply()
    assert slow_norm(gradients(model)) == pytest.approx(expected * slow_norm(before), rel=1e-5, abs=0)


@pytest.mark.parametrize("folds", [(True, True, True), (True, False, True), (False, True, True), (False, False, False)])
def test_each_member_sees_what_the_one_before_leaves(folds, path):
    spies = [Spy(f) for f in folds]
    p = parameter(torch.tensor([3.0, 4.0]))
    chain = Chain(*spies)
    result = chain([("p", p)])
    assert [s.seen for s in spies] == [[5.0], [2.5], [1.25]]
    assert p.grad.tolist() == [0.375, 0.5]
    assert (float(result.norm), float(result.coefficient), bool(result.clipped)) == (5.0, 0.125, True)
    assert all(s.learned == [("p", p)] for s in spies)


RULES = {
    "norm": lambda: ClipByGlobalNorm(20.0),
    "norm, p = 1": lambda: ClipByGlobalNorm(30.0, 1.0),
    "each": lambda: ClipByNorm(7.0),
    "value": lambda: ClipByValue(9.0, -4.0),
    "adaptive": lambda: ClipAdaptive(4.0),
    "groups": lambda: Groups({"head": ClipByGlobalNorm(3.0), "encoder": ClipByValue(1.0)}, rest=None),
}


@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", RULES)
def test_a_chain_of_any_two_is_one_after_the_other(first, second, path):
    ours, theirs = model_with_gradients(), model_with_gradients()
    before = slow_norm(gradients(ours))
    result = Chain(RULES[first](), RULES[second]())(ours)
    RULES[first]()(theirs)
    RULES[second]()(theirs)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-5, atol=1e-9)
    if "p = 1" not in first + second:
        assert float(result.coefficient) == pytest.approx(slow_norm(gradients(ours)) / before, rel=1e-4, abs=0)
    assert bool(result.clipped)


@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", [0.0, "nan", "inf"])
def test_behind_a_coefficient_that_is_zero_or_nan(first, second, path):
    ours, theirs = model_with_gradients(), model_with_gradients()
    if first:
        ours.head.bias.grad[0] = theirs.head.bias.grad[0] = float(first)
    limit = first or 0.0
    Chain(ClipByGlobalNorm(limit if limit == 0 else 1.0), RULES[second]())(ours)
    gg.clip_grad_norm_(theirs, limit if limit == 0 else 1.0)
    RULES[second]()(theirs)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        torch.testing.assert_close(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("folds", [True, False])
def test_what_is_not_finite_does_not_enter_the_state_of_a_chain(folds, path):
    chain, p = Chain(Spy(folds), Spy(folds)), parameter(torch.tensor([math.nan]))
    with pytest.raises(NonFiniteGradientError, match="1 of 1 elements NaN"):
        chain(p, nonfinite="raise")
    assert [s.seen for s in chain.members] == [[], []]
    result = chain(p, nonfinite="zero")
    assert [int(s.steps) for s in chain.members] == [0, 0]
    assert (p.grad.item(), float(result.coefficient), bool(result.nonfinite)) == (0.0, 0.0, True)


def test_a_chain_that_is_decided_and_not_applied_changes_nothing():
    model, last = model_with_gradients(), Spy()
    before = gradients(model)
    decision = Chain(ClipByValue(1.0), last).decide(gradients_in(model))
    assert decision.coefficient is None
    assert last.seen == []
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


def test_a_chain_tells_of_lock_in_and_groups():
    model = model_with_gradients()
    chain = Chain(Spy(), Groups({"head": ClipByGlobalNorm(1e-9)}, rest=None))
    late = Chain(ClipByValue(1e9), ClipByGlobalNorm(1e-30))
    for _ in range(100):
        result, other = chain(model), late(model)
        for p in model.parameters():
            p.grad.add_(1.0)
    assert bool(result.locked_in)
    assert bool(other.locked_in)
    assert list(result.group_norms) == ["head", "rest"]
    assert result.threshold is None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Chain(), InvalidValueError, "has no members: expected at least one clipper"),
        (lambda: Chain(ClipByNorm(1.0), 1.0), InvalidTypeError, r"member 1 of the chain is 1.0: expected clippers"),
        (lambda: Chain(c := ClipByNorm(1.0), c), InvalidValueError, "in the chain twice: make one for each place"),
    ],
)
def test_chains_that_cannot_be_meant(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_state_of_a_chain_survives_a_resumed_run():
    first, second = (Chain(Spy(), ClipByValue(1.0), Spy(False)) for _ in range(2))
    first(model_with_gradients())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert [int(s.steps) for s in (second.members[0], second.members[2])] == [1, 1]
    with pytest.raises(InvalidValueError, match="the state has 3 members, but this chain has 1"):
        Chain(Spy()).load_state_dict(first.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["groups", "chain", "chain of groups"])
def test_no_value_is_read_on_a_device(kind, dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Linear(2, 2)).to("meta", dtype)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    members = {"0": ClipByGlobalNorm(1.0), "1": ClipAdaptive(0.1), "2.weight": None, "2.bias": ClipByValue(1.0)}
    clip = {
        "groups": lambda: Groups(members),
        "chain": lambda: Chain(ClipByGlobalNorm(1.0), ClipByGlobalNorm(2.0), ClipByNorm(1.0), ClipByGlobalNorm(1.0)),
        "chain of groups": lambda: Chain(Groups(members), ClipByGlobalNorm(1.0), ClipByValue(2.0), ClipAdaptive(0.1)),
    }[kind]()
    scale = torch.empty((), device="meta")
    for policy in ("propagate", "zero"):
        result = clip(model, nonfinite=policy)
        assert result.coefficient.device.type == result.clipped.device.type == result.locked_in.device.type == "meta"
    clip.decide(gradients_in(model), scale).apply()


@pytest.mark.parametrize(
    "make", [lambda: Groups({}, rest=ClipByNorm(1.0)), lambda: Chain(ClipByNorm(1.0), ClipByValue(1))]
)
def test_nothing_to_clip(make, path):
    for params in ([], [nn.Parameter(torch.ones(2))], [parameter(torch.zeros(0))]):
        result = make()(params)
        assert (float(result.norm), float(result.coefficient), bool(result.clipped)) == (0.0, 1.0, False)


def test_members_of_groups_look_at_the_module():
    spy, model = Spy(), model_with_gradients()
    Groups({"head": spy}, rest=None)(model)
    assert spy.learned is model


def test_groups_tell_of_a_lock_in_that_is_known_only_after_writing():
    layer = torch.nn.Linear(4, 4)
    clip = Groups({"weight": ClipAdaptive(0.01)}, rest=None)
    for _ in range(150):
        layer.weight.grad, layer.bias.grad = torch.ones(4, 4), torch.ones(4)
        result = clip(layer)
    assert bool(result.locked_in)


def test_a_clipper_may_not_come_twice_at_any_depth():
    shared = gg.ClipByMedian()
    with pytest.raises(InvalidValueError, match="two groups have the same clipper object"):
        Groups({"a": Chain(shared), "b": Chain(shared)})
    with pytest.raises(InvalidValueError, match="two groups have the same clipper object"):
        Groups({"a": Groups({"a": shared}), "b": shared})
    with pytest.raises(InvalidValueError, match="the same clipper object is in the chain twice"):
        Chain(Chain(shared), Chain(shared))


@pytest.mark.parametrize("make", [lambda *members: Chain(*members), lambda a, b: Groups({"0": a, "1": b})])
def test_a_state_that_a_member_refuses_changes_no_member(make):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ours, other = make(gg.ClipByMedian(), gg.ZClip()), make(gg.ClipByMedian(), gg.AdaGC())
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step)
        other(model)
    before = repr(ours.state_dict())
    with pytest.raises(InvalidValueError, match="the state is not of this ZClip"):
        ours.load_state_dict(other.state_dict())
    assert repr(ours.state_dict()) == before
    guard = gg.Guard(torch.optim.SGD(model.parameters(), 0.1), ours, model=model)
    with pytest.raises(InvalidValueError, match="the state is not of this ZClip"):
        guard.load_state_dict(guard.state_dict() | {"clipper": other.state_dict(), "steps": 7})
    assert repr(ours.state_dict()) == before
    assert guard.steps == 0

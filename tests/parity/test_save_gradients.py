"""`save_gradients` in one process: what it leaves behind, what it refuses, healthy set-ups, bugs of real engines."""

import math
import random
from pathlib import Path

import pytest
import torch
from language_models import VOCABULARY, accumulated, batch, language_model, loss_of, step_of
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, ParityError, UnsupportedGradientError
from gradguard.parity import backward_replay as replay
from gradguard.parity.backward_replay import _flipped, _shift, epsilon_of
from gradguard.parity.compare import compare
from gradguard.testing import assert_parity

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def save(model, step, **options):
    return gg.save_gradients(None, model, step, **options)


def bits(model):
    return {name: t.clone().flatten().view(torch.uint8) for name, t in model.state_dict().items() if t.numel()}


# Perturbed weights.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("epsilon", [2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7, 2.0**-3])
def test_a_flip_is_its_own_inverse_and_of_the_size_of_epsilon(dtype, epsilon):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4000, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, math.inf, -math.inf, math.nan, info.max, info.min, info.tiny, info.eps]
    values = torch.cat([torch.tensor(special, dtype=dtype), drawn, drawn * info.tiny])
    which = torch.randint(0, 4, values.shape, generator=generator)
    shift = _shift(dtype, epsilon)
    flipped = _flipped(values, shift, which)
    again = _flipped(flipped, shift, which)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(flipped.isfinite(), values.isfinite())
    assert torch.equal(flipped[:2], values[:2])
    size = max(epsilon, info.eps)
    if size <= 0.01:
        relative = (flipped[13:4013].double() / drawn.double() - 1).abs()
        assert relative.max() <= 3.1 * size
        assert 0.4 * size < relative.square().mean().sqrt() < 1.8 * size


@pytest.mark.parametrize("order", [False, True])
def test_what_differs_by_rounding_is_restored_to_the_last_bit(order):
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 2))
    model[0].weight = nn.Parameter(torch.randn(6, 7).T)  # not contiguous
    model.shared = model[3].weight if order else None
    before, states = bits(model), (torch.get_rng_state(), random.getstate())
    save(model, lambda: (model(torch.randn(5, 6)).sum() * random.random()).backward())
    assert all(torch.equal(value, before[name]) for name, value in bits(model).items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(p.grad is None for p in model.parameters())


def test_also_when_a_perturbed_step_raises():
    model, calls = language_model(dtype=torch.bfloat16), []
    before = bits(model)

    def step():
        calls.append(1)
        step_of(model, batch())()
        if len(calls) == 4:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        save(model, step)
    assert all(torch.equal(value, before[name]) for name, value in bits(model).items())


def test_gradients_that_an_engine_keeps_in_main_grad_are_read():
    """As Megatron does: a hook adds each gradient to a buffer of float32, and ``grad`` is None."""
    torch.manual_seed(0)
    plain, engine, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(8, 3)
    engine.load_state_dict(plain.state_dict())
    for p in engine.parameters():
        p.main_grad = torch.full_like(p, 7.0)  # of a step before

    def moved(factor):
        def step():
            (engine(x).square().mean() * factor).backward()
            for p in engine.parameters():
                p.main_grad += p.grad
                p.grad = None

        return step

    right = save(plain, lambda: plain(x).square().mean().backward())
    assert_parity(right, save(engine, moved(1.0)))
    assert all(not p.main_grad.any() and p.grad is None for p in engine.parameters())
    report = compare(right, save(engine, moved(2.0)))
    assert report.verdict == "FAIL"
    assert "2 of 2 parameters × 2 ±" in str(report)


def test_a_step_runs_six_times_and_no_more():
    model, calls = nn.Linear(3, 2), []
    save(model, lambda: (calls.append(1), model(torch.ones(3)).sum().backward()))
    assert len(calls) == 6


def test_dropout_draws_the_same_masks_each_time():
    model = language_model(dropout=0.3)
    saved = save(model, step_of(model, batch()))
    assert saved.random
    first, again, *perturbed = saved.sketches["gradient"]
    assert first == again
    assert first not in perturbed
    assert max(o.bar for o in compare(saved, saved).parameters if "qkv.bias" not in o.name) < 1e-4
    assert not save(model.eval(), step_of(model, batch())).random


# Refusals.


REFUSED = {
    "no module": (lambda m: save(3, print), InvalidTypeError, "model is int: expected a torch.nn.Module"),
    "no step": (lambda m: save(m, 3), InvalidTypeError, "a step is int: expected a function"),
    "no runs": (lambda m: save(m, print, perturbed=0), InvalidValueError, "at least 1 run"),
    "a fact": (lambda m: save(m, print, facts={"tokens": 0}), InvalidValueError, "tokens is 0: expected a positive"),
    "rows": (lambda m: save(m, print, rows=["no*"]), InvalidValueError, "no parameter of several dimensions"),
    "no gradient": (lambda m: save(m, lambda: None), InvalidValueError, "left no gradient"),
    "frozen": (lambda m: save(m.requires_grad_(False), print), InvalidValueError, "nothing to save"),
    "an optimizer": (lambda m: save(m, stepping(m)), UnsupportedGradientError, "changes the weights"),
    "sparse": (lambda m: save(*sparse()), UnsupportedGradientError, "expected (a )?real and dense"),
    "complex": (lambda m: save(*complex_()), UnsupportedGradientError, "expected (a )?real and dense"),
}


def stepping(model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)

    def step():
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    return step


def sparse():
    model = nn.Embedding(5, 3, sparse=True)
    return model, lambda: model(torch.tensor([1, 2])).sum().backward()


def complex_():
    model = nn.Linear(3, 3, dtype=torch.complex64)
    return model, lambda: model(torch.ones(3, dtype=torch.complex64)).abs().sum().backward()


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_in_words(call, error, words):
    with pytest.raises(error, match=words):
        call(nn.Linear(3, 2))


# Healthy set-ups.


def permuted(model, data):
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(5))
    return step_of(model, tuple(part[order] for part in data))


def by_hand(model, data):
    for block in model.blocks:
        block.by_hand = True
    return step_of(model, data)


def checkpointed(model, data):
    model.checkpointed = True
    return step_of(model, data)


def compiled(model, data, backend="aot_eager"):
    return step_of(torch.compile(model, backend=backend), data)


HEALTHY = {
    "the same": step_of,
    "permuted": permuted,
    "accumulated": accumulated,
    "by tokens": lambda model, data: accumulated(model, data, weigh=True),
    "attention by hand": by_hand,
    "checkpointed": checkpointed,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(1, 16))])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("how", HEALTHY)
def test_healthy_set_ups_pass(how, dtype, seed, record_property):
    model, other = (language_model(seed, dtype) for _ in range(2))
    data = batch(seed)
    report = compare(save(model, step_of(model, data)), save(other, HEALTHY[how](other, data)))
    record_property("largest", report.largest)
    assert report.verdict == "PASS", str(report)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in Inductor itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_and_eager_are_equal(backend):
    data = batch()
    eager, model = (language_model(blocks=1) for _ in range(2))
    assert_parity(save(eager, step_of(eager, data)), save(model, compiled(model, data, backend), perturbed=1))


def test_a_file_of_torch_2_11_is_compared(record_property):
    """Written by torch 2.11.0: ``save_gradients(file, model, step, perturbed=1)`` of the model below."""
    model = language_model(blocks=1)
    report = compare(Path(__file__).with_name("saved_by_torch_2_11.safetensors"), save(model, step_of(model, batch())))
    record_property("largest", report.largest)
    assert report.verdict == "PASS", str(report)


class Routed(nn.Module):
    """Each token goes to one expert: where two are nearly as good, rounding may send it to the other."""

    def __init__(self, experts=8, width=16):
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        weight, which = self.router(x).softmax(-1).max(-1)
        y = sum((weight * (which == i))[..., None] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(x + F.gelu(y))


def routed(seed, dtype):
    torch.manual_seed(seed)
    return Routed().to(dtype)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(2, 40))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_that_go_to_another_expert_are_no_fault(dtype, seed, record_property):
    right, other = (routed(seed, dtype) for _ in range(2))
    report = compare(
        save(right, step_of(right, batch(seed)), perturbed=8), save(other, permuted(other, batch(seed)), perturbed=8)
    )
    record_property("largest", report.largest)
    assert report.verdict != "FAIL", str(report)
    assert dtype == torch.bfloat16 or report.verdict == "PASS"


def test_experts_that_are_counted_twice_are_found_beside_the_router():
    model = routed(0, torch.float32)
    wrong = save(model, times(2.0, "experts")(model, batch()), perturbed=8)
    report = compare(save(model, step_of(model, batch()), perturbed=8), wrong)
    assert report.verdict == "FAIL"
    assert all("experts" in p for f in report.findings for p in f.parameters)


@pytest.mark.parametrize("seed", range(3))
def test_float32_and_bfloat16_are_equal_by_the_bar_of_the_coarser(seed):
    single, half = language_model(seed), language_model(seed, torch.bfloat16)
    report = compare(*(save(m, step_of(m, batch(seed))) for m in (single, half)))
    assert report.verdict == "PASS", str(report)


def test_autocast_is_seen():
    model = language_model()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, *batch())
        loss.backward()

    saved = save(model, step)
    assert saved.epsilon == 2.0**-7
    assert_parity(save(model, step_of(model, batch())), saved)


@pytest.mark.parametrize(
    ("dtypes", "epsilon"), [((torch.float32,), 2.0**-23), ((torch.float32, torch.float16), 2.0**-10)], ids=str
)
def test_the_coarsest_dtype_is_what_counts(dtypes, epsilon):
    assert epsilon_of({*dtypes, torch.int64}, torch.device("cpu"), ["product"]) == epsilon


@pytest.mark.parametrize(
    ("net", "kinds"),
    [
        (nn.Linear(2, 2), {"product"}),
        (nn.Conv1d(2, 2, 1), {"product", "convolution"}),
        (nn.Sequential(nn.LSTMCell(2, 2), nn.Linear(2, 2)), {"product", "recurrent"}),
    ],
    ids=["Linear", "Conv1d", "LSTMCell"],
)
def test_tf32_counts_for_what_the_model_computes(net, kinds, monkeypatch):
    asked = set()
    monkeypatch.setattr(replay, "is_tf32_allowed", lambda device, *found: asked.update(found))
    save(net, lambda: sum(p.sum() for p in net.parameters()).backward())
    assert asked == kinds


# Bugs of real engines, in a few lines each: found, and named.

G = 4


class LostBetween:
    """The gradients are thrown away between micro-batches."""

    def __init__(self, model):
        self.model = model

    def __call__(self):
        for p in self.model.parameters():
            p.grad = None


class AddedToItself:
    def __init__(self, model):
        self.model = model

    def __call__(self):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad += p.grad


def times(factor, pattern):
    """After backward, the gradients of parameters with the pattern in their names are too large."""

    def change(model, data):
        def step():
            step_of(model, data)()
            for name, p in model.named_parameters():
                if pattern in name:
                    p.grad *= factor

        return step

    return change


FACTORS = {
    "not divided by the micro-batches (axolotl#2262, DeepSpeed#7773)": (
        lambda m, d: accumulated(m, d, G, scale=1.0),
        G,
        "micro-batches",
        None,
    ),
    "divided twice (unsloth-zoo#1023)": (
        lambda m, d: accumulated(m, d, G, scale=1 / G**2),
        1 / G,
        "1 / micro-batches",
        None,
    ),
    "divided once for each stage (DeepSpeed#8152)": (times(1 / G, "blocks.0"), 1 / G, "1 / micro-batches", "blocks.0"),
    "experts by the size of expert parallelism (Megatron#5956)": (times(8.0, "up"), 8, "expert parallel", "up"),
    "experts counted twice (pytorch#160285)": (times(2.0, "down"), 2, "√ micro-batches or counted twice", "down"),
    "clip before unscale (Lightning#9599)": (times(65536.0, ""), 65536, "loss scale", None),
    "not normalised by tokens (torchtitan#2972)": (times(96.0, ""), 96, "tokens", None),
}
FACTS = {"micro-batches": G, "expert parallel": 8, "loss scale": 65536, "tokens": 96}


@pytest.mark.parametrize(("bug", "factor", "name", "where"), FACTORS.values(), ids=FACTORS)
def test_factors_of_real_bugs(bug, factor, name, where):
    model = language_model()
    right, wrong = save(model, step_of(model, batch())), save(model, bug(model, batch()), facts=FACTS)
    report = compare(right, wrong)
    of_factor = [f for f in report.findings if f.kind == "factor"]
    assert report.verdict == "FAIL"
    (found,) = of_factor
    assert found.factor == pytest.approx(factor, rel=1e-4)
    assert found.factor_name == name
    assert where is None or all(where in p for f in report.findings for p in f.parameters)
    assert where is not None or len(found.parameters) == len(report.parameters)


def micro_batches(model, data):
    return {
        f"micro-batch {j}": step_of(model, one)
        for j, one in enumerate(zip(*(part.chunk(G) for part in data), strict=True))
    }


def test_a_mean_of_means_is_told_with_the_weight_of_each_micro_batch():
    """transformers#34191: unequal tokens, and micro-batch j counts N/(k·N_j) times as much as it should."""
    model, data = language_model(), batch(unequal=True)
    tokens = [(part >= 0).sum().item() for part in data[1].chunk(G)]
    assert len(set(tokens)) > 1
    right = save(model, accumulated(model, data, G, weigh=True), parts=micro_batches(model, data))
    assert_parity(right, save(model, step_of(model, data)))
    report = compare(right, save(model, accumulated(model, data, G)))
    told = {o.name: [w for w, _ in o.weights.values()] for o in report.parameters if o.kind == "mixture"}
    assert len(told) > 20
    for weights in told.values():
        assert weights == pytest.approx([1 / G] * G, abs=1e-3)
    assert {f.kind for f in report.findings} == {"mixture"}


def test_one_micro_batch_that_survives_is_told():
    """Automodel#3530, Megatron#7186: the loss is right, the gradient that of the last micro-batch."""
    model, data = language_model(), batch()
    right = save(model, step_of(model, data), parts=micro_batches(model, data))
    report = compare(right, save(model, accumulated(model, data, G, between=LostBetween(model))))
    assert report.findings[0].message == "only 0.25 × micro-batch 3 is left"


def test_a_buffer_added_to_itself_is_told():
    """Megatron#6660: each micro-batch doubles what was there."""
    model, data = language_model(), batch()
    right = save(model, step_of(model, data), parts=micro_batches(model, data))
    report = compare(right, save(model, accumulated(model, data, G, between=AddedToItself(model))))
    words = " + ".join(f"{w:.4g} × micro-batch {j}" for j, w in enumerate([2, 1, 0.5, 0.25]))
    assert report.findings[0].message == f"it is {words}"


def test_a_stale_gradient_is_told():
    model, data, before = language_model(), batch(), batch(seed=1)
    right = save(
        model,
        step_of(model, data),
        parts={"this step": step_of(model, data), "the step before": step_of(model, before)},
    )
    report = compare(right, save(model, step_of(model, before)))
    assert report.findings[0].message == "only 1 × the step before is left"


def test_a_lost_shard_of_the_vocabulary_is_told_by_its_rows():
    """`full_tensor()` without `grad_placements` (Automodel#1260)."""
    model, data = language_model(), batch()

    def step():
        step_of(model, data)()
        model.head.weight.grad[10:20] = 0

    right, wrong = (save(model, one, rows=["*head*"]) for one in (step_of(model, data), step))
    (found,) = compare(right, wrong).findings
    assert (found.kind, found.parameters, found.message) == ("rows", ("head.weight",), f"rows 10–19 of {VOCABULARY}")


def test_a_router_without_gradient_and_a_dead_one():
    model, data = language_model(), batch()

    def lost(value):
        def step():
            step_of(model, data)()
            model.blocks[1].up.weight.grad = value

        return step

    right = save(model, step_of(model, data))
    (missing,) = compare(right, save(model, lost(None))).findings
    (dead,) = compare(right, save(model, lost(torch.zeros(40, 16)))).findings
    assert (missing.kind, dead.kind) == ("missing", "dead")
    assert missing.parameters == dead.parameters == ("blocks.1.up.weight",)


def test_wrong_attention_is_different_from_where_it_is_on_down():
    """Context parallelism with stale keys (Megatron#1464)."""
    model, data = language_model(), batch()
    attend = F.scaled_dot_product_attention

    def step():
        F.scaled_dot_product_attention = lambda q, k, v, is_causal: attend(
            q, k + 0.01 * k.detach().roll(1, 2), v, is_causal=True
        )
        try:
            step_of(model, data)()
        finally:
            F.scaled_dot_product_attention = attend

    report = compare(save(model, step_of(model, data)), save(model, step))
    assert report.verdict == "FAIL"
    assert "different" in {f.kind for f in report.findings}


def test_other_dropout_masks_are_no_verdict():
    """Megatron#1256 and any two layouts: the masks are others, and nobody can tell whether that is all."""
    model, data = language_model(dropout=0.3), batch()
    right = save(model, step_of(model, data))
    torch.manual_seed(99)
    report = compare(right, save(model, step_of(model, data)))
    assert report.verdict == "INCONCLUSIVE"
    with pytest.raises(ParityError, match=r"other dropout masks would look like this"):
        assert_parity(right, save(model, accumulated(model, data)))


def test_one_part_in_a_hundred_thousand_shows_in_float32():
    model, data = language_model(), batch()
    report = compare(save(model, step_of(model, data)), save(model, times(1.00002, "up.weight")(model, data)))
    assert {(f.kind, f.factor_name) for f in report.findings} == {("factor", "")}
    assert {p for f in report.findings for p in f.parameters} == {"blocks.0.up.weight", "blocks.1.up.weight"}


@pytest.mark.parametrize("side", ["reference", "new"])
def test_a_gradient_added_to_that_of_the_step_before_is_told(side):
    """A forgotten zero_grad: what is right need not be passed as a part."""
    model, data, before = language_model(), batch(), batch(seed=1)
    parts = {"the step before": step_of(model, before)}

    def forgotten():
        step_of(model, before)()
        return step_of(model, data)()

    right = save(model, step_of(model, data), parts=parts if side == "reference" else None)
    report = compare(right, save(model, forgotten, parts=parts if side == "new" else None))
    assert report.findings[0].message == "it is 1 × the reference + 1 × the step before"

"""`QKClip` and `LogitWatch` against twins in float64 that look at every position and rescale row by row."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attentions import HEADS, KINDS, WIDTH, Folded, Separate, largest_logits, made, rescale, rotated

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError

THRESHOLD = 3.0


def batch(step, dtype=torch.float64, tokens=6):
    return torch.randn(3, tokens, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def backward(model, x):
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_that_of_the_published_rule(kind, alpha):
    model, projections = made(kind)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, twin))
    clip, clipped = gg.QKClip(ours, model, THRESHOLD, alpha, projections=projections), 0
    for step in range(4):
        x = batch(step)
        largest = largest_logits(twin, x)
        for m, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            backward(m, x)
            optimizer.step()
        rescale(twin, largest, THRESHOLD, alpha)
        (shown,) = clip.last.values()
        torch.testing.assert_close(shown, largest, rtol=1e-9, atol=0)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        clipped += int((largest > THRESHOLD).sum())
    assert clipped > 0, "a case that clips nothing shows nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batch_then_reaches_the_threshold_and_no_more(kind, dtype):
    model, projections = made(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip, x = gg.QKClip(optimizer, model, THRESHOLD, projections=projections), batch(0, dtype)
    shown = []
    for _ in range(2):
        backward(model, x)
        optimizer.step()
        shown.append(next(iter(clip.last.values())))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}[dtype]
    groups = [largest.reshape(model.keys, -1).amax(1) for largest in shown]
    assert bool((groups[0] > THRESHOLD).any())
    torch.testing.assert_close(groups[1], groups[0].clamp(max=THRESHOLD), rtol=tolerance, atol=tolerance)


MASKS = {
    "bool": lambda: torch.ones(6, 6, dtype=torch.bool).tril(1),
    "added": lambda: torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf),
    "added, of the dtype's least": lambda: torch.full((6, 6), -65504.0, dtype=torch.float64).triu(1),
    "a bias": lambda: torch.linspace(-5, 5, 36, dtype=torch.float64).reshape(6, 6),
    "one row for all": lambda: torch.tensor([[True, True, False, True, False, False]]),
}


@pytest.mark.parametrize("kind", ["separate", "grouped", "fused", "torch's"])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_positions_are_left_out(kind, mask):
    model, _ = made(kind)
    model.mask = MASKS[mask]()
    if kind == "torch's":
        model.mask = model.mask.expand(6, 6)
    clip, watch = gg.QKClip(torch.optim.SGD(model.parameters()), model), gg.LogitWatch(model)
    x, expected = batch(0), None
    expected = largest_logits(model, x)
    backward(model, x)
    clip.optimizer.step()
    torch.testing.assert_close(next(iter(clip.last.values())), expected)
    shown = next(iter(watch.max_logits.values()))
    torch.testing.assert_close(shown, expected)


def test_padding_by_sample_and_by_head_is_left_out():
    model, _ = made("separate")
    x, kept = batch(0), torch.tensor([6, 2, 4])
    padding = torch.arange(6) < kept[:, None]
    model.mask = padding[:, None, None, :].expand(3, HEADS, 6, 6)
    watch = gg.LogitWatch(model)
    backward(model, x)
    query, key, _ = model.vectors(x)
    by_hand = [
        max(
            float(query[b, h, i].detach() @ key[b, h, j].detach()) / 2
            for b in range(3)
            for i in range(6)
            for j in range(kept[b])
        )
        for h in range(HEADS)
    ]
    torch.testing.assert_close(watch.max_logits[""], torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["separate", "grouped, keys repeated", "latent", "torch's"])
def test_the_bound_is_never_below_the_largest_logit(kind):
    for seed in range(5):
        model, _ = made(kind, seed=seed)
        exact, bound = gg.LogitWatch(model), gg.LogitWatch(model, exact=False)
        backward(model, batch(seed))
        (largest,), (above,) = exact.max_logits.values(), bound.max_logits.values()
        assert bool((above >= largest).all())
        assert bool((above < 6 * largest.abs() + 6).all())


def test_long_sequences_are_looked_at_in_blocks(monkeypatch):
    monkeypatch.setattr("gradguard.clip.logits._BLOCK", 100)
    for kind in ("separate", "separate, causal", "grouped"):
        model, _ = made(kind)
        model.mask = None if "causal" in kind else torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.5
        watch, x = gg.LogitWatch(model), batch(0, tokens=17)
        expected = largest_logits(model, x)
        backward(model, x)
        torch.testing.assert_close(watch.max_logits[""], expected)


# What counts, and when.


class Block(torch.nn.Module):
    """An attention inside a model, that may be checkpointed or left out."""

    def __init__(self, kind="separate", reentrant=None):
        super().__init__()
        self.attention, self.reentrant, self.used = made(kind)[0], reentrant, True
        self.head = torch.nn.Linear(WIDTH, 2, dtype=torch.float64)

    def forward(self, x):
        if self.used and self.reentrant is not None:
            x = torch.utils.checkpoint.checkpoint(self.attention, x, use_reentrant=self.reentrant)
        elif self.used:
            x = self.attention(x)
        return self.head(x)


def stepped(model, batches, **options):
    """The largest logits of one step over ``batches``, and the clip."""
    clip = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, **options)
    for x in batches:
        backward(model, x)
    clip.optimizer.step()
    return clip


def test_the_maximum_is_over_micro_batches_and_begins_anew_at_each_step():
    model = Block()
    each = [largest_logits(model.attention, batch(i)) for i in range(5)]
    clip = stepped(model, [batch(0), batch(1), batch(2)], threshold=1e9)
    torch.testing.assert_close(clip.last["attention"], torch.stack(each[:3]).amax(0))
    backward(model, batch(3))
    clip.optimizer.step()
    torch.testing.assert_close(clip.last["attention"], each[3])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_attention_counts(reentrant):
    model, x = Block(reentrant=reentrant), batch(0).requires_grad_()
    clip = stepped(model, [x])
    torch.testing.assert_close(clip.last["attention"], largest_logits(model.attention, x))


def test_evaluations_do_not_count():
    model = Block()
    clip, watch = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, 1e9), gg.LogitWatch(model)
    with torch.no_grad():
        model(100 * batch(1))
    model.eval()
    model(100 * batch(1))
    assert watch.max_logits == {}
    model.train()
    backward(model, batch(0))
    clip.optimizer.step()
    torch.testing.assert_close(clip.last["attention"], largest_logits(model.attention, batch(0)))
    torch.testing.assert_close(watch.max_logits["attention"], clip.last["attention"])
    watch.reset()
    assert watch.max_logits == {}


def test_an_attention_that_a_step_leaves_out_is_left_alone():
    model = Block()
    clip = stepped(model, [batch(0)], threshold=1e-3)
    clip.optimizer.zero_grad()
    weight, model.used = model.attention.q_proj.weight.detach().clone(), False
    backward(model, batch(1))
    clip.optimizer.step()
    assert clip.last == {} or bool(clip.last["attention"].isneginf().all())
    assert torch.equal(model.attention.q_proj.weight, weight)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_leaves_out_rescales_nothing(fused):
    model = Block().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    clip, scaler = gg.QKClip(optimizer, model, THRESHOLD), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.attention.q_proj.weight.detach().clone()
    for step, factor in enumerate((float("inf"), 1.0)):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, torch.float32)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.attention.q_proj.weight, before) == (step == 0)
    both = torch.stack([largest_logits(Block().float().attention, batch(i, torch.float32)) for i in (0, 1)])
    torch.testing.assert_close(clip.last["attention"], both.amax(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip_first", [False, True])
def test_a_step_that_a_guard_skips_rescales_nothing(clip_first):
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    guard = None if clip_first else gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    clip = gg.QKClip(optimizer, model, THRESHOLD)
    guard = guard or gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    before = copy.deepcopy(model.state_dict())
    backward(model, batch(0))
    model.head.bias.grad[0] = float("nan")
    optimizer.step()
    assert guard.skipped_steps == 1
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    optimizer.zero_grad()
    backward(model, batch(1))
    optimizer.step()
    assert bool((clip.last["attention"] > THRESHOLD).any())
    assert not torch.equal(model.attention.q_proj.weight, before["attention.q_proj.weight"])


def test_logits_that_are_not_finite_enter_no_maximum():
    model, x = Block(), batch(0)
    x[0, 0, 0] = float("nan")
    watch, expected = gg.LogitWatch(model), largest_logits(model.attention, batch(1))
    clip = stepped(model, [x, batch(1)], threshold=1e9)
    torch.testing.assert_close(clip.last["attention"], expected)
    assert bool(watch.max_logits["attention"].isnan().all())


def test_heads_at_or_below_the_threshold_keep_their_bits():
    model = Block()
    middle = largest_logits(model.attention, batch(0)).sort().values[HEADS // 2]
    before = copy.deepcopy(model)
    stepped(model, [batch(0)], threshold=float(middle))
    above = largest_logits(before.attention, batch(0)) > middle
    for name in ("q_proj", "k_proj"):
        rows = [getattr(m.attention, name).weight.detach().unflatten(0, (HEADS, -1)) for m in (before, model)]
        assert [bool(torch.equal(a, b)) for a, b in zip(*rows, strict=True)] == (~above).tolist()
    assert torch.equal(before.attention.v_proj.weight, model.attention.v_proj.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler's own code
def test_a_forward_under_autocast_and_one_compiled_count():
    for make in (lambda m: m, lambda m: torch.compile(m, backend="eager")):
        model = Block().float()
        expected = largest_logits(model.attention, batch(0, torch.float32))
        clip, run = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, THRESHOLD), make(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(batch(0, torch.float32))
        out.float().sum().backward()
        clip.optimizer.step()
        torch.testing.assert_close(clip.last["attention"], expected, rtol=0.03, atol=0.1)


def test_products_are_of_full_precision_under_autocast():
    model = Changed(lambda v: v.float()).float()
    watch, x = gg.LogitWatch(model), batch(0, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        with torch.no_grad():
            query, key, _ = model.vectors(x)
    expected = (query.double() @ key.double().mT / 2).amax((0, 2, 3)).float()
    torch.testing.assert_close(watch.max_logits[""], expected, rtol=1e-5, atol=0)


def test_an_update_that_is_clipped_too_is_that_of_the_step_alone():
    weights = []
    for order in ((0, 1), (1, 0)):
        model = Block()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for which in order:
            gg.QKClip(optimizer, model, THRESHOLD) if which else gg.ClipUpdate(optimizer)
        backward(model, batch(0))
        optimizer.step()
        weights.append(model.attention.q_proj.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_torch_is_left_as_it_was(monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention
    model = Block()
    watch = gg.LogitWatch(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(1, 2, 3, dtype=torch.float64))
    assert torch.nn.functional.scaled_dot_product_attention is attention
    backward(model, batch(0))
    assert torch.nn.functional.scaled_dot_product_attention is attention
    other = copy.deepcopy(model)
    backward(other, 100 * batch(1))
    torch.testing.assert_close(watch.max_logits["attention"], largest_logits(model.attention, batch(0)))
    watch.detach()
    backward(model, 100 * batch(1))
    torch.testing.assert_close(watch.max_logits["attention"], largest_logits(model.attention, batch(0)))


# What cannot be rescaled rightly is refused.


class Changed(Separate):
    """Queries and keys are changed between their layers and the attention."""

    def __init__(self, change, which=(0, 1)):
        super().__init__()
        self.change, self.which = change, which

    def vectors(self, x):
        found = list(super().vectors(x))
        for place in self.which:
            found[place] = self.change(found[place])
        return found


CHANGES = {
    "normalised": lambda v: F.rms_norm(v, v.shape[-1:]),
    "of length one": lambda v: F.normalize(v, dim=-1),
    "a layer norm": lambda v: F.layer_norm(v, v.shape[-1:]),
    "a layer norm over heads": lambda v: (
        F.layer_norm(v.transpose(1, 2).flatten(2), (WIDTH,)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    ),
    "a position": lambda v: v + torch.linspace(-1, 1, v.shape[-2], dtype=v.dtype)[:, None],
    "clamped": lambda v: v.clamp(-1, 1),
    "other heads": lambda v: v.roll(1, 1),
    "interleaved": lambda v: v.transpose(1, 2).flatten(2).unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("change", CHANGES)
def test_vectors_that_are_not_those_of_the_layers_are_refused_before_the_step(change, which, dtype):
    torch.manual_seed(0)
    model = Changed(CHANGES[change], which).to(dtype)
    before = copy.deepcopy(model.state_dict())
    clip = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.1), model, threshold=0.01)
    backward(model, batch(0, dtype))
    with pytest.raises(UnsupportedGradientError, match="does not attend with what its projections return"):
        clip.optimizer.step()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


@pytest.mark.parametrize("hook", [lambda layer, args, out: out.clamp_(-1, 1), lambda layer, args, out: out.tanh()])
def test_outputs_that_are_changed_in_place_or_by_a_hook_are_refused(hook):
    model = Block()
    model.attention.k_proj.register_forward_hook(hook)
    with pytest.raises(UnsupportedGradientError, match="attention does not attend with what its projections return"):
        stepped(model, [batch(0)])


@pytest.mark.parametrize(
    "change", [lambda v: 3 * v, lambda v: -v, rotated, lambda v: v.flip(-1), lambda v: v.roll(1, 2)]
)
def test_vectors_that_are_turned_or_scaled_are_those_of_the_layers(change):
    model = Changed(change).double()
    clip = stepped(model, [batch(0)], threshold=0.01)
    assert bool((clip.last[""] > 0.01).any())


def test_healthy_vectors_of_any_shape_and_precision_are_not_refused():
    draws = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for trial in range(12):
            model, _ = made("separate" if trial % 2 else "grouped", dtype, seed=trial, size=0.3 * (1 + trial))
            samples, tokens = (int(torch.randint(1, 40, (), generator=draws)) for _ in range(2))
            clip = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model)
            model(torch.randn(samples, tokens, WIDTH, generator=draws).to(dtype)).sum().backward()
            clip.optimizer.step()
            assert clip.last[""].shape == (HEADS,)


def test_tokens_may_be_outside_of_the_batch():
    model, inner = Separate().double(), Separate.vectors
    model.vectors = lambda x: [v.transpose(0, 2) for v in inner(model, x)]  # x of shape (tokens, batch, width)
    model.forward = lambda x: F.scaled_dot_product_attention(*model.vectors(x))
    clip = stepped(model, [batch(0)])
    assert clip.last[""].shape == (HEADS,)


class Adapter(torch.nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) + x


def with_layer(layer):
    model = Block()
    model.attention.k_proj = layer
    return model


def tied():
    model = torch.nn.Sequential(Separate(), Separate())
    model[1].q_proj = model[0].q_proj
    return model


REFUSED = {
    "no attention": (
        lambda: torch.nn.Linear(2, 2),
        {},
        InvalidValueError,
        "has no attention whose projections are known",
    ),
    "frozen": (lambda: Block().requires_grad_(False), {}, InvalidValueError, "known and trained"),
    "an adapter": (
        lambda: with_layer(Adapter(WIDTH, WIDTH)),
        {},
        UnsupportedGradientError,
        "is a Adapter whose output",
    ),
    "weight_norm": (
        lambda: with_layer(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, WIDTH))),
        {},
        UnsupportedGradientError,
        "need not scale with its weight",
    ),
    "tied": (tied, {}, InvalidValueError, "0 has a projection in several places, 0.q_proj and 1.q_proj"),
    "a key of its own": (
        lambda: torch.nn.MultiheadAttention(8, 2, add_bias_kv=True),
        {},
        UnsupportedGradientError,
        "add_bias_kv=True",
    ),
    "no such module": (Block, {"projections": {"layers.*": None}}, InvalidValueError, "matches no module of the model"),
    "no such layer": (
        Block,
        {"projections": {"attention": ("q", "k")}},
        InvalidValueError,
        "projections of 'attention'",
    ),
    "no layers": (Block, {"projections": {"attention": ("q", 3)}}, InvalidTypeError, "expected 'qkv layer'"),
    "a threshold": (Block, {"threshold": 0.0}, InvalidValueError, "threshold=0.0: expected"),
    "a truth value": (Block, {"threshold": True}, InvalidTypeError, "threshold=True: expected a number, got bool"),
    "alpha": (Block, {"alpha": 1.5}, InvalidValueError, "alpha=1.5: expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_when_it_is_made(case):
    make, options, error, words = REFUSED[case]
    model = make()
    with pytest.raises(error, match=words):
        gg.QKClip(torch.optim.SGD(model.parameters()), model, **options)


def test_weights_of_another_optimizer_are_refused():
    model = Block()
    with pytest.raises(InvalidValueError, match="are not parameters of this AdamW"):
        gg.QKClip(torch.optim.AdamW(model.head.parameters()), model)
    with pytest.raises(InvalidTypeError, match="whose step\\(\\) runs no hooks"):
        gg.QKClip(object(), model)


def test_biases_may_be_another_optimizers():
    model, x = Block(), batch(0)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    clip = gg.QKClip(torch.optim.Muon(matrices, lr=0.0), model, THRESHOLD)
    for _ in range(2):
        backward(model, x)
        clip.optimizer.step()
    assert float(clip.last["attention"].max()) == pytest.approx(THRESHOLD)


def test_an_attention_that_nothing_tells_is_refused():
    model = torch.nn.Sequential(Separate(), Separate())
    model[1].own, model[1].q_proj = model[1].q_proj, torch.nn.Identity()
    model[1].vectors = lambda x: Separate.vectors(model[0], x)
    model = model.double()
    gg.QKClip(torch.optim.SGD(model.parameters()), model, projections={"1": None}).detach()
    clip = gg.QKClip(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(InvalidValueError, match="1 computes an attention, but the layers that make its"):
        model(batch(0))
    clip.detach()
    model(batch(0))


def test_logits_that_were_not_seen_are_refused_before_the_step():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    clip = gg.QKClip(torch.optim.SGD(attention.parameters(), lr=0.1), attention)
    before = attention.in_proj_weight.detach().clone()
    x = torch.randn(2, 3, 8)
    with pytest.raises(UnsupportedGradientError, match="need_weights=False"):
        attention(x, x, x)
    assert torch.equal(attention.in_proj_weight, before)
    attention.eval()
    attention(x, x, x, need_weights=False)[0].sum().backward()
    with pytest.raises(UnsupportedGradientError, match=r"model.train\(\)"):
        clip.optimizer.step()


def test_the_same_layers_may_not_attend_twice_with_one_output():
    model = Block()

    def twice(x):
        q, k, v = model.attention.vectors(x)
        return sum(F.scaled_dot_product_attention(q, k, v) for _ in range(2)).transpose(1, 2).flatten(2)

    model.attention.forward = twice
    gg.QKClip(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(UnsupportedGradientError, match="attends more than once"):
        model(batch(0))


def test_rows_that_are_not_whole_heads_are_refused():
    model = made("latent")[0]
    for layers, words in ((("q_b", "kv_b"), "not whole heads"), (("kv_b", "q_b", 2), "not whole heads")):
        clip = gg.QKClip(torch.optim.SGD(model.parameters()), model, projections={"": layers})
        with pytest.raises(UnsupportedGradientError, match=words):
            model(batch(0))
        clip.detach()


@pytest.mark.parametrize("make", [gg.LogitWatch, lambda m: gg.QKClip(torch.optim.SGD(m.parameters()), m)])
def test_nested_tensors_are_refused(make):
    model = Changed(lambda v: torch.nested.nested_tensor(list(v), layout=torch.jagged)).double()
    make(model)
    with pytest.raises(UnsupportedGradientError, match="nested tensors or DTensors"):
        model(batch(0))


def test_a_function_in_place_of_torchs_is_refused(monkeypatch):
    model, attention = Block(), F.scaled_dot_product_attention
    watch = gg.LogitWatch(model)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: attention(*args, **kwargs))
    with torch.no_grad():
        model(batch(0))
    with pytest.raises(
        UnsupportedGradientError, match="was replaced by a function of test_qk_clip, as context_parallel"
    ):
        model(batch(0))
    watch.detach()
    model(batch(0))


class OnTheWay(Separate):
    """Queries, keys and values are changed by ``change`` before they attend."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def vectors(self, x):
        return self.change(self, x, *super().vectors(x))


VALUES_OF_KEYS = {
    "the attending key": lambda m, x, q, k, v: (q, k, k),
    "the key as returned": lambda m, x, q, k, v: (q, k, m.k_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)),
    "by its weight": lambda m, x, q, k, v: (
        q,
        k,
        F.linear(x, m.k_proj.weight, m.k_proj.bias).unflatten(-1, (HEADS, -1)).transpose(1, 2),
    ),
    "a multiple": lambda m, x, q, k, v: (q, k, -0.5 * k),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", VALUES_OF_KEYS)
def test_values_that_are_keys_are_refused(case, dtype):
    model = OnTheWay(VALUES_OF_KEYS[case]).to(dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedGradientError, match=r"values that are its keys|run more than once in its forward"):
        stepped(model, [batch(0, dtype)], threshold=0.01)
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


def test_values_of_one_layer_that_are_its_keys_are_refused():
    model = made("fused")[0]
    inner = model.vectors
    model.vectors = lambda x: (lambda q, k, v: (q, rotated(k), k))(*inner(x))
    with pytest.raises(UnsupportedGradientError, match="values that are its keys"):
        stepped(model, [batch(0)])


@pytest.mark.parametrize("tie", ["v_proj", "v_proj.weight", "v_proj.bias", "q_proj.weight"])
def test_a_projection_in_several_places_is_refused(tie):
    model = Separate()
    layer, _, kind = tie.partition(".")
    if kind:
        setattr(getattr(model, layer), kind, getattr(model.k_proj, kind))
    else:
        setattr(model, layer, model.k_proj)
    with pytest.raises(InvalidValueError, match="has a projection in several places"):
        gg.QKClip(torch.optim.SGD(model.parameters()), model)


def test_an_attention_that_is_used_in_several_layers_is_not_tied():
    attention = Separate().double()
    clip = stepped(torch.nn.ModuleList([attention] * 2)[0], [batch(0)], threshold=1e9)
    clip.detach()
    gg.QKClip(torch.optim.SGD(attention.parameters()), torch.nn.Sequential(attention, attention))


WHOLE = {
    "a norm of each head": lambda v: 10 * v / v.square().sum((0, 2, 3), keepdim=True).sqrt(),
    "a deviation": lambda v: v / v.std(),
    "a deviation without its gradient": lambda v: v / v.std().detach(),
    "the largest norm": lambda v: v / v.norm(dim=-1).amax(),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("norm", WHOLE)
def test_a_norm_over_a_whole_tensor_is_refused_at_the_second_call(norm, place):
    model = Changed(WHOLE[norm], [place]).double()
    clip = stepped(model, [batch(0)], threshold=0.01)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        backward(model, batch(0))  # the same batch: its rescaled weights give it away
        with pytest.raises(UnsupportedGradientError, match="times a factor that differs between calls"):
            clip.optimizer.step()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


def test_a_norm_over_a_micro_batch_or_in_the_scale_is_refused():
    model = Changed(WHOLE["a deviation"]).double()
    with pytest.raises(UnsupportedGradientError, match="times a factor that differs between calls"):
        stepped(model, [batch(0), batch(1)], threshold=1e9)
    model = Separate().double()
    clip = stepped(model, [batch(0)], threshold=1e9)
    model.settings["scale"] = 0.7
    backward(model, batch(0))
    with pytest.raises(UnsupportedGradientError, match="times a factor that differs between calls"):
        clip.optimizer.step()


LATER = {
    "weight_norm": (lambda m: torch.nn.utils.parametrizations.weight_norm(m.q_proj), "computed from other parameters"),
    "spectral_norm": (lambda m: torch.nn.utils.spectral_norm(m.k_proj), "computed from other parameters"),
    "a layer": (lambda m: setattr(m, "q_proj", torch.nn.Linear(WIDTH, WIDTH).double()), "was replaced after"),
    "a weight": (
        lambda m: setattr(m.q_proj, "weight", torch.nn.Parameter(m.q_proj.weight.detach().clone())),
        "has another weight or bias",
    ),
    "frozen": (lambda m: m.q_proj.requires_grad_(False), "is frozen"),
}


@pytest.mark.parametrize("case", LATER)
def test_a_projection_that_changes_after_it_was_found_is_refused(case):
    model = Block()
    clip, (change, words) = stepped(model, [batch(0)], threshold=0.01), LATER[case]
    change(model.attention)

    def train():
        backward(model, batch(1))
        clip.optimizer.step()

    with pytest.raises(UnsupportedGradientError, match=f"attention .*{words}"):
        train()


@pytest.mark.parametrize("case", ["weight_norm", "spectral_norm", "frozen"])
def test_a_projection_that_is_not_plain_is_refused_at_first(case):
    model, (change, words) = Block(), LATER[case]
    change(model.attention)
    with pytest.raises(UnsupportedGradientError, match=words):
        gg.QKClip(torch.optim.SGD(model.parameters()), model)


def by_hand(attention):
    attention.forward = lambda x: (
        (lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(*attention.vectors(x)).transpose(1, 2).flatten(2)
    )


def with_weights(attention):
    attention.forward = lambda x: attention.inner(x, x, x)[0]


@pytest.mark.parametrize(("kind", "change"), [("separate", by_hand), ("torch's", with_weights)])
@pytest.mark.parametrize("heard_first", [False, True])
def test_a_forward_that_is_not_heard_is_refused_at_once(kind, change, heard_first):
    model = Block(kind)
    clip = gg.QKClip(torch.optim.SGD(model.parameters()), model, THRESHOLD)
    if heard_first:
        backward(model, batch(0))
    change(model.attention)
    with pytest.raises(UnsupportedGradientError, match=r"was trained, and no call of .*need_weights=False"):
        model(batch(1))
    del model.attention.forward
    clip.optimizer.zero_grad()
    backward(model, batch(1))
    clip.optimizer.step()
    expected = [largest_logits(Block(kind).attention, batch(i)) for i in range(1 - heard_first, 2)]
    torch.testing.assert_close(next(iter(clip.last.values())), torch.stack(expected).amax(0))


def test_a_second_clip_on_an_attention_is_refused():
    model = torch.nn.Sequential(Separate(), Separate())
    optimizer = torch.optim.SGD(model.parameters())
    first = gg.QKClip(optimizer, model, projections={"1": None})
    gg.QKClip(optimizer, model, projections={"0": None})
    with pytest.raises(InvalidValueError, match="the logits of 0 are clipped by another QKClip already"):
        gg.QKClip(optimizer, model, projections={"1": None})
    first.detach()
    gg.QKClip(optimizer, model, projections={"1": None})
    first.detach()
    with pytest.raises(InvalidValueError, match="the logits of 0 are clipped by another QKClip already"):
        gg.QKClip(optimizer, model, projections={"1": None})


@pytest.mark.parametrize("kind", ["separate", "latent", "fused"])
def test_an_empty_batch_counts_nothing(kind):
    model, projections = made(kind)
    watch = gg.LogitWatch(model)
    clip = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, THRESHOLD, projections=projections)
    backward(model, batch(0)[:0])
    assert watch.max_logits == {}
    clip.optimizer.step()
    expected = largest_logits(model, batch(1))
    for x in (batch(1), batch(0)[:0]):
        backward(model, x)
    clip.optimizer.step()
    torch.testing.assert_close(clip.last[""], expected)


def test_heads_beside_the_batch_are_refused_by_the_clip_and_one_number_to_the_watch():
    model, x = Folded().double(), batch(0)
    watch = gg.LogitWatch(model)
    expected = largest_logits(model, x)
    model(x)
    torch.testing.assert_close(watch.max_logits[""], expected.amax().reshape(1))
    gg.QKClip(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(UnsupportedGradientError, match="attends with batch and heads in one dimension"):
        model(x)


def test_another_number_of_heads_is_refused_in_words():
    model = Separate().double()
    model.forward = lambda x, heads=HEADS: F.scaled_dot_product_attention(
        *(f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (model.q_proj, model.k_proj, model.v_proj))
    )
    watch = gg.LogitWatch(model)
    model(batch(0))
    with pytest.raises(UnsupportedGradientError, match="attends with 2 heads, and has attended with 4"):
        model(batch(0), 2)
    watch.detach()
    gg.QKClip(torch.optim.SGD(model.parameters()), model)
    model(batch(0))
    with pytest.raises(UnsupportedGradientError, match="attends with 2 heads of 8, and has attended with other ones"):
        model(batch(0), 2)


def test_a_clip_is_not_copied():
    clip = stepped(Block(), [batch(0)])
    assert repr(clip) == "QKClip(optimizer, model, threshold=100, alpha=0.5)"
    with pytest.raises(InvalidTypeError, match="belongs to one optimizer"):
        copy.deepcopy(clip)
    optimizer = copy.deepcopy(clip.optimizer)
    optimizer.step()


def by_hand(attention):
    attention.forward = lambda x: (
        (lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(*attention.vectors(x)).transpose(1, 2).flatten(2)
    )


def test_a_list_of_another_module_that_has_a_projection_is_a_tie():
    model = torch.nn.Sequential(Block(), Block())
    model[1].attention.all = torch.nn.ModuleList([model[0].attention.q_proj])
    with pytest.raises(InvalidValueError, match=r"several places, 0.attention.q_proj and 1.attention.all.0,"):
        gg.QKClip(torch.optim.SGD(model.parameters()), model)
    del model[1].attention.all
    model[0].attention.k2 = model[0].attention.k_proj
    with pytest.raises(InvalidValueError, match=r"several places, 0.attention.k_proj and 0.attention.k2,"):
        gg.QKClip(torch.optim.SGD(model.parameters()), model)

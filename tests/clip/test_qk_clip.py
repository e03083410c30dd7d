"""`QKClip` and `LogitWatch` against twins in float64 that look at every position and rescale row by row."""

import copy

import pytest
import torch
from attentions import HEADS, KINDS, WIDTH, largest_logits, made, rescale

import gradguard as gg

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


@pytest.mark.parametrize("kind", ["separate", "grouped", "fused", "folded", "torch's"])
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
    torch.testing.assert_close(shown, expected.amax().reshape(1) if kind == "folded" else expected)


def test_padding_by_sample_and_by_head_is_left_out():
    model, _ = made("separate")
    x, kept = batch(0), torch.tensor([6, 2, 4])
    padding = torch.arange(6) < kept[:, None]
    model.mask = padding[:, None, None, :].expand(3, HEADS, 6, 6)
    watch = gg.LogitWatch(model)
    backward(model, x)
    query, key, _ = model.vectors(x)
    by_hand = [
        max(float(query[b, h, i].detach() @ key[b, h, j].detach()) / 2 for b in range(3) for i in range(6) for j in range(kept[b]))
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
    clip = stepped(model, [x, batch(1)], threshold=1e9)
    torch.testing.assert_close(clip.last["attention"], largest_logits(model.attention, batch(1)))
    watch = gg.LogitWatch(model)
    backward(model, x)
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


def test_a_forward_under_autocast_and_one_compiled_count():
    for make in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager")):
        model = Block().float()
        expected = largest_logits(model.attention, batch(0, torch.float32))
        clip, run = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, THRESHOLD), make(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(batch(0, torch.float32))
        out.float().sum().backward()
        clip.optimizer.step()
        torch.testing.assert_close(clip.last["attention"], expected, rtol=0.03, atol=0.1)


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

"""`LogitWatch` and `QKClip` on FlexAttention, whose kernel tells the largest logit: against logits by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from attentions import KINDS, PROJECTIONS, WIDTH, largest_logits, rescale
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import UnsupportedGradientError

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler's own look
]
HEADS, SIZE, LENGTH = 4, 8, 32


def causal(b, h, i, j):
    return i >= j


def with_a_slope(score, b, h, i, j):
    return score + (j - i) * 0.1 * (h + 1)


def capped(score, b, h, i, j):
    return torch.tanh(score / 2)


class Attention(nn.Module):
    def __init__(self, attend, keys=HEADS, **settings):
        super().__init__()
        self.attend, self.keys, self.settings = attend, keys, settings
        self.q_proj = nn.Linear(16, HEADS * SIZE)
        self.k_proj, self.v_proj = (nn.Linear(16, keys * SIZE) for _ in range(2))
        self.out = nn.Linear(HEADS * SIZE, 16)

    def vectors(self, x):
        return [layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x):
        made = self.attend(*self.vectors(x), enable_gqa=self.keys != HEADS, **self.settings)
        return self.out(made.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def largest(self, x):
        query, key, _ = self.vectors(x)
        logits = query @ key.repeat_interleave(HEADS // self.keys, 1).mT * self.settings.get("scale", SIZE**-0.5)
        head, i, j = torch.arange(HEADS)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        if "score_mod" in self.settings:
            logits = self.settings["score_mod"](logits, 0, head, i, j)
        if "block_mask" in self.settings:
            logits = logits.masked_fill(~causal(0, head, i, j), -math.inf)
        return logits.amax((0, 2, 3))


@pytest.fixture(autouse=True)
def _trained_on_a_cpu(monkeypatch):
    """Torch refuses the backward of FlexAttention on a CPU, where code that is not compiled to kernels has one."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()  # which compiles a function anew only so many times


def batch(seed=0):
    return torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(seed))


def made(attend=flex_attention, **settings):
    torch.manual_seed(0)
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    return nn.Sequential(Attention(attend), Attention(attend, block_mask=mask, **settings))


def expected(model, x):
    return {"0": model[0].largest(x), "1": model[1].largest(model[0](x).detach())}


ATTEND = {
    "eager": lambda: flex_attention,
    "compiled": lambda: torch.compile(flex_attention, backend="aot_eager", fullgraph=True),
}
SETTINGS = {"a mask": {}, "a bias": {"score_mod": with_a_slope}, "a cap": {"score_mod": capped, "scale": 3.0}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_largest_logits_are_those_that_the_softmax_gets(attend, settings):
    model, x = made(ATTEND[attend](), keys=2, **SETTINGS[settings]), batch()
    unwatched = model(x)
    shown = expected(model, x)
    watch = gg.LogitWatch(model, exact=False)  # which changes nothing here
    for _ in range(2):
        watch.reset()
        made_now = model(x)
        made_now.sum().backward()
        torch.testing.assert_close(watch.max_logits, shown)
        assert torch.equal(made_now, unwatched)


def test_a_model_that_is_compiled_is_seen():
    model, x = made(), batch()
    shown = expected(model, x)
    watch = gg.LogitWatch(model)
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(watch.max_logits, shown)


def test_the_largest_of_several_batches_counts_and_evaluations_do_not():
    model, big = made(), 3 * batch(1)
    shown = [expected(model, x) for x in (batch(0), big)]
    watch = gg.LogitWatch(model)
    model.eval()(big)
    with torch.no_grad():
        model.train()(big)
    assert watch.max_logits == {}
    for x in (batch(0), big):
        model(x)
    torch.testing.assert_close(watch.max_logits, {name: torch.maximum(shown[0][name], shown[1][name]) for name in "01"})
    watch.detach()
    watch.reset()
    model(big)
    assert watch.max_logits == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_seen(reentrant):
    model, x = made(), batch().requires_grad_()
    shown = expected(model, x)
    watch = gg.LogitWatch(model)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(watch.max_logits, shown)


def test_a_kernel_that_does_not_tell_is_refused():
    model = made(kernel_options={"BACKEND": "FLASH"})
    watch = gg.LogitWatch(model)
    with pytest.raises(UnsupportedGradientError, match="1 calls flex_attention with the kernel 'FLASH'"):
        model(batch())
    seen = dict(watch.max_logits)
    F.scaled_dot_product_attention(*torch.randn(3, 1, 4, 5, 2).requires_grad_())  # by no module of the model
    assert watch.max_logits == seen


def test_logits_that_do_not_change_and_empty_batches_are_not_seen():
    model = made()
    watch = gg.LogitWatch(model)
    model(batch()[:0])
    assert watch.max_logits == {}
    model.requires_grad_(False)
    model(batch())
    assert watch.max_logits == {}


@pytest.mark.parametrize("score_mod", [with_a_slope, capped])
def test_qk_clip_refuses_a_score_mod(score_mod):
    model = made(score_mod=score_mod)
    gg.QKClip(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(UnsupportedGradientError, match="1 calls flex_attention with a score_mod"):
        model(batch())


def with_flex(kind, attend):
    """An attention of `attentions.py` that calls FlexAttention, behind a block mask where it is causal."""
    attention = KINDS[kind]()
    mask = create_block_mask(causal, None, None, 6, 6, device="cpu") if attention.settings.get("is_causal") else None

    def forward(x):
        more = {key: attention.settings[key] for key in ("scale", "enable_gqa") if key in attention.settings}
        made = attend(*(one.contiguous() for one in attention.vectors(x)), block_mask=mask, **more)
        return made.transpose(1, 2).flatten(2)

    attention.forward = forward
    return attention


@pytest.mark.parametrize(
    ("kind", "attend"),
    [("separate, causal", "eager"), ("one key head", "eager"), ("fused and grouped", "compiled"), ("latent", "eager")],
)
def test_qk_clip_is_that_of_the_published_rule(kind, attend):
    torch.manual_seed(0)
    model, twin, clipped = with_flex(kind, ATTEND[attend]()), KINDS[kind]().double(), 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 2 / math.sqrt(WIDTH))
    told = {"": PROJECTIONS["latent"]} if kind == "latent" else None
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clip = gg.QKClip(optimizer, model, 0.5, projections=told)
    for step in range(3):
        x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        made = model(x)
        (made * torch.linspace(-1, 1, made.shape[-1])).sum().backward()
        twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        largest = largest_logits(twin, x.double())
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.sub_(0.01 * p.grad.double())
        optimizer.step()
        rescale(twin, largest, 0.5, 0.5)
        torch.testing.assert_close(clip.last[""], largest, rtol=1e-6, atol=0)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-6, atol=1e-7)
        clipped += int((largest > 0.5).sum())
    assert clipped > 0, "a case that clips nothing shows nothing"

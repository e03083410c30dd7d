"""PyTorch's operators and ordinary models in train mode: a block equals an attached clip, to the bit."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from test_random_graphs import assert_equal
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradient_check.operators import samples

RULES = [gg.ErrorClipByValue(0.05), gg.ErrorClipByValue(0.1, min=-0.01)]


def real(output: Tensor) -> Tensor:
    return torch.view_as_real(output.resolve_conj()) if output.is_complex() else output


def loss_of(fn, inputs: list[Tensor]) -> Tensor:
    """A loss that gives each element of the outputs another weight, of values that are intermediate, not leaves."""
    torch.manual_seed(0)
    outputs = fn(*[x * 1.0 for x in inputs])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weighted = []
    for output in map(real, outputs):
        if output.requires_grad:
            generator = torch.Generator().manual_seed(1)
            weight = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
            weighted.append((output * weight).sum().double())
    return sum(weighted[1:], weighted[0])


def check_operators(every: int, per_operator: int) -> tuple[int, int]:
    operators = clipped = 0
    for sample in samples(per_operator=per_operator, every=every):
        for rule in RULES:
            found = []
            for way in ("block", "attached", "free"):
                inputs = [x.detach().clone().requires_grad_() for x in sample.inputs]
                loss = loss_of(sample.fn, inputs)
                try:
                    if way == "attached":
                        gg.attach_error_clip(loss, rule)
                    with gg.error_clip(loss, rule) if way == "block" else nullcontext():
                        loss.backward()
                except (InvalidValueError, UnsupportedGradientError) as refused:
                    if not any(words in str(refused) for words in ("a modulus has one bound", "is sparse, and")):
                        raise
                    break
                found.append([x.grad for x in inputs])
            if len(found) < 3:
                continue
            try:
                assert_equal(*found[:2])
            except AssertionError as error:
                raise AssertionError(f"{sample.name} under {rule}") from error
            pairs = zip(found[0], found[2], strict=True)
            clipped += any(a is not None and not torch.equal(a, b) for a, b in pairs)
        operators += 1
    return operators, clipped


@pytest.mark.slow
def test_some_operators():
    operators, clipped = check_operators(every=30, per_operator=1)
    assert operators > 10
    assert clipped > operators // 2


@pytest.mark.exhaustive
def test_every_operator():
    operators, clipped = check_operators(every=1, per_operator=4)
    assert operators > 1000
    assert clipped > operators // 2


def small(name: str, **options: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}Model")(config)


TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 5, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(pack_padded_sequence(x * 2, [6, 3], batch_first=True))[0].data


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d())
        self.up, self.last = nn.ConvTranspose2d(8, 3, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        return self.last(torch.cat([self.up(h + self.middle(h)), x], 1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


MODELS = {
    "nn.TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda m: m(numbers(2, 5, 16))),
    "nn.Transformer": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), lambda m: m(numbers(2, 5, 16), numbers(2, 4, 16))),
    "nn.MultiheadAttention, a mask with a gradient": (
        lambda: nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True),
        lambda m: m(*[numbers(2, 5, 16)] * 3, attn_mask=numbers(5, 5).requires_grad_() * 2)[0]),
    "BERT": (lambda: small("Bert", **TEXT), lambda m: m(TOKENS)[0]),
    "GPT-2": (lambda: small("GPT2", vocab_size=40, n_embd=16, n_layer=2, n_head=2), lambda m: m(TOKENS)[0]),
    "Llama": (lambda: small("Llama", **TEXT, attention_dropout=0.1), lambda m: m(TOKENS)[0]),
    "T5": (
        lambda: small("T5", vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
        lambda m: m(input_ids=TOKENS, decoder_input_ids=TOKENS)[0]),
    "ViT": (
        lambda: small("ViT", image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=24, hidden_dropout_prob=0.1),
        lambda m: m(numbers(2, 3, 8, 8))[0]),
    "Whisper": (
        lambda: small("Whisper", vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, dropout=0.1,
                      encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                      num_mel_bins=8, max_source_positions=10, max_target_positions=10, pad_token_id=0,
                      decoder_start_token_id=1, bos_token_id=1, eos_token_id=2),
        lambda m: m(input_features=numbers(2, 8, 20), decoder_input_ids=TOKENS)[0]),
    "U-Net": (UNet, lambda m: m(numbers(2, 3, 8, 8))),
    "LSTM, packed": (lambda: Packed(nn.LSTM), lambda m: m(numbers(2, 6, 4))),
    "GRU, packed": (lambda: Packed(nn.GRU), lambda m: m(numbers(2, 6, 4))),
}  # fmt: skip


def gradients(model: nn.Module, call, within) -> list[Tensor | None]:
    model = copy.deepcopy(model).train()
    torch.manual_seed(3)
    within(model, lambda: (call(model) * 100).square().mean())
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_in_train_mode(name):
    make, call = MODELS[name]
    torch.manual_seed(0)
    model = make()

    def whole_graph(model, forward):
        loss = forward()
        with gg.error_clip(loss, gg.ErrorClipByValue(1e-2)):
            loss.backward()

    def scope_of_module(model, forward):
        with gg.error_clip(model, gg.ErrorClipByValue(1e-2)):
            forward().backward()

    def attached(model, forward):
        gg.attach_error_clip(forward(), gg.ErrorClipByValue(1e-2)).backward()

    everything = gradients(model, call, whole_graph)
    assert_equal(gradients(model, call, attached), everything)
    free = gradients(model, call, lambda model, forward: forward().backward())
    assert any(a is not None and not torch.equal(a, b) for a, b in zip(free, everything, strict=True))
    assert all(a is None or bool(a.isfinite().all()) for a in gradients(model, call, scope_of_module))

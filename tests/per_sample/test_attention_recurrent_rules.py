"""The rules of attention and recurrent layers, against autograd on one sample at a time."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Outer
from gradguard.per_sample.layers.call import BatchAxis, LayerCall
from per_sample.replayed_calls import (
    CELLS,
    FIRST,
    INPUTS,
    LAYERS,
    MASKS,
    RECURRENT,
    SECOND,
    WEIGHTS,
    B,
    E,
    H,
    S,
    T,
    as_dtype,
    assert_rows,
    attention_call,
    attention_inputs,
    blocked,
    causal,
    check,
    every_call,
    grads_of,
    looped,
    made,
    randn,
    recurrent_call,
    rule,
    seeded,
    sequence,
    tensors,
)

# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_attention_is_exact_for_every_layer_and_mask(layer, mask):
    kinds = ("three",) if "kdim" in LAYERS[layer] else INPUTS
    for kind, weights, first in product(kinds, WEIGHTS, (True, False)):
        check(attention_call(LAYERS[layer], kind, mask, weights, first))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("padding", [None, blocked(B, T)])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("layer", ["plain", "appended and zero"])
def test_causal_attention(layer, dtype, weights, padding):
    module = seeded(nn.MultiheadAttention(E, H, batch_first=True, **LAYERS[layer]))
    kwargs = {"attn_mask": causal(T, dtype), "is_causal": True, **WEIGHTS[weights]}
    axes = [FIRST] * 3 + [None]
    if padding is not None:
        kwargs["key_padding_mask"] = padding if dtype is torch.bool else padding.double()
        axes.append(FIRST)
    check(made(module, attention_inputs(module, "self"), kwargs, axes=axes))


@pytest.mark.parametrize("unused", [(0,), (1,), (0, 1)])
def test_gradients_of_some_outputs_of_attention(unused):
    call = attention_call(unused=unused)
    found = rule(call)
    if unused == (0, 1):
        assert all(not contribution.rows(0, B).any() for contribution in found.values())
    else:
        assert_rows(found, looped(call))


def test_self_attention_is_one_outer_product():
    found = rule(attention_call(kind="self"))
    assert isinstance(found["in_proj_weight"], Outer)
    assert found["in_proj_weight"].positions == T


@pytest.mark.sampled(6)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("kind", "first"), list(product(INPUTS, (True, False))))
def test_the_dropout_of_attention_is_drawn_again(kind, first, weights):
    module = seeded(nn.MultiheadAttention(E, H, dropout=0.4, batch_first=first))
    call = made(module, attention_inputs(module, kind), WEIGHTS[weights], seed=7)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    found = rule(call)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    expected = grads_of(module, call.args, call.kwargs, call.grads)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name].rows(0, B).sum(0), grad, rtol=1e-11, atol=1e-12)


def test_attention_in_eval_mode_draws_nothing():
    module = seeded(nn.MultiheadAttention(E, H, dropout=0.4, batch_first=True)).eval()
    check(replace(made(module, attention_inputs(module, "self")), generator_state=None))


@pytest.mark.parametrize("mask", ["none", "padding", "bool 2-D"])
def test_the_fused_kernel_that_eval_mode_may_take_is_repeated_by_parts(mask):
    module = seeded(nn.MultiheadAttention(E, H, batch_first=True)).eval().requires_grad_(False)
    inputs = attention_inputs(module, "self")
    masks, axes = MASKS[mask](T)
    call = made(module, inputs, masks, axes=[FIRST] * 3 + list(axes.values()))
    module.requires_grad_(True)
    check(call)


@pytest.mark.parametrize("last", [False, True])
def test_several_windows_of_one_sample_are_its_positions(last):
    module = seeded(nn.MultiheadAttention(E, H, batch_first=True))
    call = made(module, attention_inputs(module, "memory", size=2 * B), axes=[BatchAxis(0, last)] * 3)
    check(replace(call, grad_axes=[BatchAxis(0, last)] * 2))


def test_a_query_that_no_sample_owns():
    module = seeded(nn.MultiheadAttention(E, H, batch_first=True))
    query, key = randn(1, T, E).expand(B, -1, -1), randn(B, S, E, seed=1)
    call = made(module, [query, key, key], axes=[FIRST] * 3)
    assert_rows(rule(replace(call, axes=[None, FIRST, FIRST])), looped(call))


# --- recurrent layers and cells -------------------------------------------------------------------------------------


OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "bias", "batch_first"), values, strict=True))
    for values in product((1, 3), (False, True), (True, False), (False, True))
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_exact(name, state):
    for options in OPTIONS:
        check(recurrent_call(name, state, options=options))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("unused", [(0,), (1,), (0, 2), (1, 2), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_of_some_outputs(name, unused):
    call = recurrent_call(name, options={"num_layers": 2, "bidirectional": True}, unused=unused)
    found = rule(call)
    if not any(grad is not None for grad in call.grads):
        assert all(not contribution.rows(0, B).any() for contribution in found.values())
    else:
        assert_rows(found, looped(call))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_gradient_that_reaches_only_the_lower_layer(name):
    call = recurrent_call(name, options={"num_layers": 2}, unused=(0, 2))
    call.grads[1][1] = 0
    check(call)
    above = replace(call, wanted=frozenset({"weight_ih_l1", "bias_hh_l1"}))
    assert all(not contribution.rows(0, B).any() for contribution in rule(above).values())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_the_dropout_between_recurrent_layers_is_drawn_again(name, bidirectional, first):
    options = {"num_layers": 3, "bidirectional": bidirectional, "dropout": 0.4, "batch_first": first}
    call = recurrent_call(name, options=options, seed=7)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    found = rule(call)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    for parameter, grad in grads_of(call.module, call.args, call.kwargs, call.grads).items():
        torch.testing.assert_close(found[parameter].rows(0, B).sum(0), grad, rtol=1e-11, atol=1e-12)


def test_an_initial_state_that_no_sample_owns_and_keyword_arguments():
    module = seeded(nn.GRU(3, 5, batch_first=True))
    hidden = randn(1, 1, 5).expand(-1, B, -1)
    call = made(module, [], {"hx": hidden, "input": sequence(module)}, axes=[SECOND, FIRST])
    assert_rows(rule(replace(call, axes=[None, FIRST])), looped(call))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("unused", [(), (0,), (1,)])
@pytest.mark.parametrize(("cell", "bias", "state"), list(product(CELLS, (True, False), (True, False))))
def test_cells_are_exact(cell, bias, state, unused):
    module = seeded(cell(3, 5, bias=bias))
    count = 2 if isinstance(module, nn.LSTMCell) else 1
    hidden = [randn(B, 5, seed=30 + i) for i in range(count)]
    args = [randn(B, 3, seed=29)] + ([tuple(hidden) if count == 2 else hidden[0]] if state else [])
    call = made(module, args, unused=unused)
    found = rule(call)
    if any(grad is not None for grad in call.grads):
        assert_rows(found, looped(call))
    else:
        assert all(not contribution.rows(0, B).any() for contribution in found.values())


# --- every rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "length"), [(1, T), (1, 1), (B, 1)])
def test_one_sample_and_one_time(size, length):
    for first in (True, False):
        for call in every_call(size, length, first):
            check(call)


def test_an_empty_batch_contributes_nothing():
    for call in every_call():
        empty = replace(call, batch_size=0, outputs=[], grads=[None] * len(call.grads))
        found = rule(empty)
        for name, parameter in call.module.named_parameters():
            assert found[name].rows(0, 0).shape == (0, *parameter.shape)
            assert found[name].squared_norms().shape == (0,)
            assert not found[name].weighted_sum(torch.zeros(0)).any()


def test_only_what_is_wanted():
    for call in every_call():
        expected = looped(call)
        for name in call.wanted:
            found = rule(replace(call, wanted=frozenset({name})))
            assert_rows(found, {name: expected[name]})


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_float32_is_as_close_as_float32_can_be():
    for call in every_call():
        expected = looped(call)
        args, kwargs = as_dtype((call.args, call.kwargs), torch.float32)
        single = made(call.module.float(), args, kwargs, axes=call.axes)
        assert_rows(rule(replace(single, grads=[grad.float() for grad in call.grads])), expected, 1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_at_the_end(dtype):
    for call in every_call():
        expected = looped(call)
        args, kwargs = as_dtype((call.args, call.kwargs), dtype)
        half = made(call.module.to(dtype), args, kwargs, axes=call.axes)
        for name, contribution in rule(replace(half, grads=[grad.to(dtype) for grad in call.grads])).items():
            rows = contribution.rows(0, B)
            assert rows.dtype is torch.float32
            torch.testing.assert_close(rows.double(), expected[name], rtol=0.1, atol=0.1 * expected[name].abs().max())


@pytest.fixture
def bfloat16_lstm():
    """Some processors have no LSTM in bfloat16 in oneDNN, and PyTorch does not go round it by itself."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(3, 5, num_layers=2, batch_first=True)(torch.randn(2, 4, 3))
        enabled = True
    except RuntimeError:
        enabled = False
    with torch.backends.mkldnn.flags(enabled=enabled):
        yield


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN is available for Intel GPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_and_backward_under_autocast_are_repeated_in_float32_or_refused(dtype, bfloat16_lstm):
    exact = 0
    for call in every_call():
        call.module.float()
        args = as_dtype(call.args, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            lowered = made(call.module, args, axes=call.axes)
            if all(output.dtype is torch.float32 for output in lowered.outputs):
                with pytest.raises(UnsupportedGradientError, match=r"ran under torch\.autocast|could not be repeated"):
                    rule(lowered)
                continue
            found = rule(lowered)
        exact += 1
        single = replace(lowered, args=as_dtype(args, torch.float32), grads=as_dtype(lowered.grads, torch.float32))
        assert_rows(found, looped(single), 1e-5)
    assert exact >= 5


def test_a_sample_that_is_not_finite_leaves_the_others_alone():
    for call in every_call():
        clean = rule(call)
        axis = call.axes[0].dim
        poison = torch.zeros(call.input().movedim(0, axis).shape, dtype=torch.float64)
        poison.select(axis, 1).fill_(torch.nan)
        poisoned = {id(leaf): leaf + poison for leaf in tensors(call.args) if leaf.shape == poison.shape}
        args = tree_map(lambda leaf, poisoned=poisoned: poisoned.get(id(leaf), leaf), call.args)
        found = rule(replace(made(call.module, args, axes=call.axes), grads=call.grads))
        for name, contribution in found.items():
            rows = contribution.rows(0, B)
            torch.testing.assert_close(rows[[0, 2]], clean[name].rows(0, B)[[0, 2]], rtol=1e-12, atol=1e-13)
        assert any(not contribution.rows(1, 2).isfinite().all() for contribution in found.values())


class Recorder(torch.autograd.Function):
    """Runs a rule where the engine runs it: inside a backward."""

    @staticmethod
    def forward(ctx, call, found, *outputs):
        ctx.call, ctx.found = call, found
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.found.update(rule(replace(ctx.call, grads=list(grads))))
        return (None, None, *grads)


def test_rules_run_inside_a_backward():
    for call in every_call():
        found = {}
        outputs = tensors(call.module(*call.args))
        torch.autograd.backward(Recorder.apply(call, found, *outputs), call.grads)
        expected = looped(call)
        assert_rows(found, expected)
        for name, parameter in call.module.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].sum(0), rtol=1e-11, atol=1e-12)
            assert not found[name].rows(0, B).requires_grad


# --- refused --------------------------------------------------------------------------------------------------------


def test_a_parameter_changed_between_forward_and_backward_is_refused():
    for call in every_call():
        name = type(call.module).__name__
        with torch.no_grad():
            next(call.module.parameters()).mul_(1.001)
        with pytest.raises(UnsupportedGradientError, match=f"forward of {name} could not be repeated"):
            rule(call)


def test_outputs_that_were_not_recorded_are_refused():
    for call in every_call():
        with pytest.raises(UnsupportedGradientError, match="could not be repeated"):
            rule(replace(call, outputs=[None] * len(call.outputs)))


def dropout_calls():
    module = seeded(nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True))
    yield made(module, attention_inputs(module, "self"), seed=7)
    for name in RECURRENT:
        yield recurrent_call(name, options={"num_layers": 2, "dropout": 0.5}, seed=7)


def test_dropout_with_another_state_of_the_generator_is_refused():
    for call in dropout_calls():
        rule(call)
        state = torch.Generator().manual_seed(8).get_state()
        with pytest.raises(UnsupportedGradientError, match=r"could not be repeated.*use torch\.nn\.Dropout"):
            rule(replace(call, generator_state=state))
        with pytest.raises(UnsupportedGradientError, match=r"generator's state before the forward is not known"):
            rule(replace(call, generator_state=None))


def test_samples_in_another_dimension_are_refused():
    for first in (True, False):
        for call in every_call(first=first):
            if isinstance(call.module, nn.RNNCellBase):
                continue
            wrong = [SECOND if first else FIRST, *call.axes[1:]]
            with pytest.raises(UnsupportedGradientError, match=f"batch_first={first} takes its batch from dimension"):
                rule(replace(call, axes=wrong))


def test_inputs_of_different_numbers_of_samples_are_refused():
    call = attention_call(kind="memory")
    with pytest.raises(UnsupportedGradientError, match="got 3 rows for 2 samples"):
        rule(replace(call, batch_size=2))
    mixed = replace(attention_call(), axes=[BatchAxis(0, True), FIRST, FIRST], batch_size=1)
    with pytest.raises(UnsupportedGradientError, match="the same number of rows"):
        rule(mixed)


def test_unbatched_inputs_are_refused():
    module = nn.MultiheadAttention(E, H)
    with pytest.raises(UnsupportedGradientError, match=r"unbatched query of shape \(4, 8\)"):
        rule(made(module, [torch.zeros(T, E)] * 3, size=T))
    for kind, shape in ((nn.LSTM, (T, 3)), (nn.GRU, (T, 3)), (nn.LSTMCell, (3,)), (nn.RNNCell, (3,))):
        with pytest.raises(UnsupportedGradientError, match=rf"{kind.__name__} got an unbatched input"):
            rule(made(kind(3, 5), [torch.zeros(shape)], axes=[FIRST], size=T))


def test_a_packed_sequence_is_refused():
    module = nn.LSTM(3, 5)
    packed = pack_padded_sequence(torch.zeros(T, B, 3), torch.tensor([4, 3, 2]))
    call = LayerCall(module, (packed,), {}, [], [], B, [None], [], frozenset({"weight_ih_l0"}))
    with pytest.raises(UnsupportedGradientError, match="mask the padding in the loss"):
        rule(call)

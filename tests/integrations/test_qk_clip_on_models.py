"""`QKClip` on the attentions of Transformers' models: a second pass over the same batch stops at the threshold."""

import pytest
import torch

import gradguard as gg
from gradguard.errors import UnsupportedGradientError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MODELS = {
    "Llama": lambda **more: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **more)),
    "Llama, YaRN": lambda: MODELS["Llama"](rope_parameters={**YARN, "rope_theta": 1e4}),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "Phi-3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED)),
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "DeepSeek-V3": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **LATENT)),
}
REFUSED = {
    "Qwen3": (
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8)),
        "does not attend with what its projections return",
    ),
    "eager": (
        lambda: MODELS["Llama"](attn_implementation="eager"),
        "no call of torch.nn.functional.scaled_dot_product",
    ),
}


def set_up(make):
    torch.manual_seed(0)
    model = make().train()
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_", "k_", "query", "key", "qkv", "kv_b")) and parameter.dim() == 2:
            parameter.data.mul_(10)
    latent = (
        {"*.self_attn": ("q_b_proj", "kv_b_proj", 4)} if isinstance(model, transformers.DeepseekV3ForCausalLM) else None
    )
    clip = gg.QKClip(torch.optim.SGD(model.parameters(), lr=0.0), model, 0.5, projections=latent)
    words = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).long()

    def step():
        torch.manual_seed(0)  # of dropout
        model(input_ids=words, labels=words, attention_mask=mask).loss.backward()
        clip.optimizer.step()
        return dict(clip.last)

    return step


@pytest.mark.parametrize("name", MODELS)
def test_the_first_layer_then_stops_at_the_threshold(name):
    step = set_up(MODELS[name])
    first = step()
    assert len(first) == 2
    layer, before = next(iter(first.items()))
    after = step()[layer]
    assert float(before.max()) > 0.5
    assert float(after.max()) == pytest.approx(0.5, rel=1e-4)
    assert bool((after <= before * (1 + 1e-5)).all())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, words = REFUSED[name]
    with pytest.raises(UnsupportedGradientError, match=words):
        set_up(make)()

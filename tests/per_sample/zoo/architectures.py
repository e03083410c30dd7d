"""Architectures of transformers as the package builds them, two layers deep and 32 wide, with random weights."""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from per_sample.zoo.case import MODES, B, ZooCase
from per_sample.zoo.plain import NO_BFLOAT16, LowRank, pairwise

T, VOCABULARY, IMAGE, SOUND = 7, 67, 16, 800
"""Tokens, words, pixels along a side, and audio samples."""

NO_TRAIN = ("eval", "float32", "bfloat16")
"""One sample alone cannot be run in train mode."""

SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 4,
    # words
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 4,
    # experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    # state spaces
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "conv_kernel": 4,
    # images
    "image_size": IMAGE,
    "patch_size": 8,
    "num_channels": 3,
}  # fmt: skip
"""What is set where a configuration has it as a number."""

OPTIONAL = {"n_inner", "head_dim", "num_key_value_heads", "pad_token_id", "decoder_start_token_id"}
"""Set also where a configuration has it as None."""

DROPOUTS = {
    "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "activation_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "dropout_rate", "embedding_dropout", "residual_dropout",
    "emb_pdrop", "feat_proj_dropout", "drop_path_rate", "proj_dropout", "classifier_dropout", "embed_dropout",
}  # fmt: skip
"""0.1 wherever a configuration has it."""


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        base: Class of the model without a head.
        head: Class with a head that takes ``labels``; "" for none.
        inputs: Name in `INPUTS`.
        sizes: What differs from `SIZES`; ``...`` leaves what the package has.
        labels: Name in `LABELS`.
        experts: Implementation of mixtures of experts.
        attention: Implementation of attention; "" for the package's choice.
        modes: As in `ZooCase`.
        adapters: Names of linear layers that get a trained update of low rank; all else is frozen then.
    """

    base: str
    head: str = ""
    inputs: str = "text"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    labels: str = "tokens"
    experts: str = "eager"
    attention: str = ""
    modes: tuple[str, ...] = MODES
    adapters: tuple[str, ...] = ()

    def build(self, name: str) -> nn.Module:
        """Class ``name`` with random weights."""
        import transformers

        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = getattr(transformers, name)
            config = small(getattr(transformers, self.base).config_class, self.sizes)
            config._experts_implementation = self.experts
            options = {"attn_implementation": self.attention} if self.attention else {}
            return adapted(kind._from_config(config, **options), self.adapters)

    def case(self) -> ZooCase:
        """The base model: its outputs are projected."""
        return ZooCase(
            functools.partial(self.build, self.base),
            INPUTS[self.inputs],
            lambda m, i: m(**i),
            modes=self.modes,
            clippers=("fast",),
        )

    def labelled(self) -> ZooCase:
        """The model with a head, and the loss that it computes from labels."""
        make = INPUTS[self.inputs]
        return ZooCase(
            functools.partial(self.build, self.head),
            lambda: {**make(), "labels": LABELS[self.labels]()},
            lambda m, i: m(**i),
            loss=lambda m, i: m(**i).loss,
            modes=("eval",),
            clippers=("fast",),
        )


def small(kind: Any, sizes: Mapping[str, Any]) -> Any:
    """A configuration of class ``kind`` with `SIZES`, ``sizes`` and dropout."""
    default = kind()
    chosen: dict[str, Any] = {}
    for key, size in SIZES.items():
        value = getattr(default, key, 0.0)
        if type(value) is int or (value is None and key in OPTIONAL):
            chosen[key] = size
    chosen |= {key: 0.1 for key in DROPOUTS if type(getattr(default, key, None)) in (int, float)}
    return kind(**{key: value for key, value in {**chosen, **sizes}.items() if value is not ...})


def adapted(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The model, frozen but for updates of low rank to the layers of these names."""
    if names:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name in names:
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, LowRank(getattr(module, name)))
    return model


def ids(length: int = T) -> Tensor:
    return torch.randint(3, VOCABULARY, (B, length))


def image(size: int = IMAGE) -> Tensor:
    return torch.randn(B, 3, size, size)


INPUTS: dict[str, Any] = {
    "text": lambda: {"input_ids": ids()},
    "ended": lambda: {"input_ids": F.pad(ids(), (0, 1), value=SIZES["eos_token_id"])},
    "8 tokens": lambda: {"input_ids": ids(8)},
    "padded text": lambda: {
        "input_ids": ids(),
        "attention_mask": torch.tensor([[1] * n + [0] * (T - n) for n in (7, 5, 6, 3)]),
    },
    "two texts": lambda: {"input_ids": ids(), "decoder_input_ids": ids(5)},
    "image": lambda: {"pixel_values": image()},
    "large image": lambda: {"pixel_values": image(32)},
    "image of 64": lambda: {"pixel_values": image(64)},
    "video": lambda: {"pixel_values": torch.randn(B, 2, 3, IMAGE, IMAGE)},
    "sound": lambda: {"input_values": torch.randn(B, SOUND)},
    "spectrogram": lambda: {"input_features": torch.randn(B, 16, 24)},
    "frames": lambda: {"input_features": torch.randn(B, 24, 16)},
    "spectrogram and text": lambda: {"input_features": torch.randn(B, 16, 24), "decoder_input_ids": ids()},
    "frames and text": lambda: {"input_features": torch.randn(B, 24, 16), "decoder_input_ids": ids()},
    "text and image": lambda: {"input_ids": ids(), "pixel_values": image()},
    "text with boxes": lambda: {"input_ids": ids(), "bbox": torch.randint(0, 60, (B, T, 4)).sort(-1).values},
    "series": lambda: {"past_values": torch.randn(B, 16, 2)},
}

LABELS: dict[str, Any] = {
    "tokens": ids,
    "8 tokens": lambda: ids(8),
    "5 tokens": lambda: ids(5),
    "class": lambda: torch.randint(0, 2, (B,)),
}


def causal(name: str, model: str = "", **options: Any) -> Architecture:
    return Architecture(model or f"{name}Model", f"{name}ForCausalLM", **options)


def masked(name: str, **options: Any) -> Architecture:
    return Architecture(f"{name}Model", f"{name}ForMaskedLM", **options)


def classifier(name: str, **options: Any) -> Architecture:
    return Architecture(f"{name}Model", f"{name}ForSequenceClassification", labels="class", **options)


def pair(name: str, **options: Any) -> Architecture:
    return Architecture(
        f"{name}Model", f"{name}ForConditionalGeneration", **{"inputs": "two texts", "labels": "5 tokens", **options}
    )


def images(name: str, base: str = "", head: str = "ForImageClassification", **options: Any) -> Architecture:
    return Architecture(
        base or f"{name}Model", name + head if head else "", **{"inputs": "image", "labels": "class", **options}
    )


def sounds(name: str, **options: Any) -> Architecture:
    sizes = {
        "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
        "classifier_proj_size": 16, **options.pop("sizes", {}),
    }  # fmt: skip
    return Architecture(
        f"{name}Model", f"{name}ForSequenceClassification", inputs="sound", labels="class", sizes=sizes, **options
    )


ENCODERS: dict[str, Architecture] = {
    "albert": masked("Albert"),
    "bert": masked("Bert"),
    "bert, eager attention": masked("Bert", attention="eager"),
    "bert, padded": classifier("Bert", inputs="padded text"),
    "bert-generation": Architecture("BertGenerationEncoder", "BertGenerationDecoder"),
    "big_bird": masked("BigBird"),
    "bros": Architecture("BrosModel", inputs="text with boxes", sizes={"hidden_size": 64}),
    "camembert": masked("Camembert"),
    "clip_text_model": Architecture("CLIPTextModel"),
    "convbert": masked("ConvBert"),
    "data2vec-text": masked("Data2VecText"),
    "deberta": masked("Deberta", modes=NO_BFLOAT16, sizes={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": masked("DebertaV2", sizes={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "distilbert": masked("DistilBert"),
    "dpr": Architecture("DPRQuestionEncoder"),
    "electra": masked("Electra"),
    "ernie": masked("Ernie"),
    "esm": masked("Esm", sizes={"mask_token_id": 3, "token_dropout": False, "vocab_size": VOCABULARY}),
    "eurobert": masked("EuroBert"),
    "flaubert": Architecture("FlaubertModel", "FlaubertWithLMHeadModel"),
    "fnet": masked("FNet"),
    "funnel": masked("Funnel", sizes={"block_sizes": [1, 1], "num_decoder_layers": 1, "num_hidden_layers": ...}),
    "gte": masked("Gte"),
    "ibert": masked("IBert"),
    "jina_embeddings_v3": masked("JinaEmbeddingsV3"),
    "layoutlm": masked("LayoutLM", sizes={"max_2d_position_embeddings": 64}),
    "layoutlmv3": classifier(
        "LayoutLMv3", inputs="text with boxes",
        sizes={"max_2d_position_embeddings": 64, "coordinate_size": 6, "shape_size": 4, "input_size": IMAGE,
               "visual_embed": False},
    ),
    "lilt": classifier("Lilt", inputs="text with boxes", sizes={"hidden_size": 48, "max_2d_position_embeddings": 64}),
    "longformer": masked("Longformer", sizes={"attention_window": 4}, inputs="8 tokens", labels="8 tokens"),
    "luke": Architecture("LukeModel", sizes={"entity_vocab_size": 11, "entity_emb_size": 16}),
    "markuplm": classifier(
        "MarkupLM", sizes={"max_xpath_tag_unit_embeddings": 8, "max_xpath_subs_unit_embeddings": 8, "tag_pad_id": 7,
                           "subs_pad_id": 7, "xpath_unit_hidden_size": 4, "max_depth": 5},
    ),
    "megatron-bert": masked("MegatronBert"),
    "mobilebert": masked("MobileBert", sizes={"intra_bottleneck_size": 16, "embedding_size": 16}),
    "modernbert": masked("ModernBert"),
    "mpnet": masked("MPNet"),
    "nomic_bert": masked("NomicBert"),
    "nystromformer": masked("Nystromformer"),
    "reformer": Architecture(
        "ReformerModel", inputs="8 tokens", modes=("train",),
        sizes={"axial_pos_shape": (2, 4), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "local"],
               "local_attn_chunk_length": 4, "feed_forward_size": 48, "attention_head_size": 8, "is_decoder": False},
    ),
    "rembert": masked("RemBert", sizes={"input_embedding_size": 16, "output_embedding_size": 16}),
    "roberta": masked("Roberta"),
    "roberta-prelayernorm": masked("RobertaPreLayerNorm"),
    "roc_bert": masked(
        "RoCBert", sizes={"pronunciation_vocab_size": VOCABULARY, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
                          "shape_vocab_size": VOCABULARY},
    ),
    "roformer": masked("RoFormer"),
    "splinter": Architecture("SplinterModel"),
    "squeezebert": masked("SqueezeBert"),
    "tapas": masked("Tapas"),
    "xlm": Architecture("XLMModel", "XLMWithLMHeadModel"),
    "xlm-roberta": masked("XLMRoberta"),
    "xlm-roberta-xl": masked("XLMRobertaXL"),
    "xlnet": Architecture("XLNetModel", "XLNetLMHeadModel", sizes={"max_position_embeddings": ...}),
    "xmod": masked("Xmod", modes=NO_BFLOAT16, sizes={"default_language": "en_XX"}),
    "yoso": masked("Yoso"),
}  # fmt: skip

DECODERS: dict[str, Architecture] = {
    "apertus": causal("Apertus"),
    "arcee": causal("Arcee"),
    "beam": causal("Beam"),
    "biogpt": causal("BioGpt"),
    "bitnet": causal("BitNet"),
    "bloom": causal("Bloom"),
    "codegen": causal("CodeGen", sizes={"rotary_dim": 4}),
    "cohere": causal("Cohere"),
    "cohere2": causal("Cohere2"),
    "ctrl": Architecture("CTRLModel", "CTRLLMHeadModel", sizes={"dff": 48}),
    "cwm": causal("Cwm"),
    "diffllama": causal("DiffLlama", sizes={"attention_dropout": 0.0}),
    "doge": causal("Doge"),
    "ernie4_5": causal("Ernie4_5"),
    "exaone4": causal("Exaone4"),
    "falcon": causal("Falcon", sizes={"head_dim": ...}),
    "flint": causal("Flint"),
    "gemma": causal("Gemma"),
    "gemma2": causal("Gemma2"),
    "gemma3_text": Architecture("Gemma3TextModel", "Gemma3ForCausalLM"),
    "glm": causal("Glm"),
    "glm4": causal("Glm4"),
    "gpt2": Architecture("GPT2Model", "GPT2LMHeadModel"),
    "gpt2, eager attention": Architecture("GPT2Model", "GPT2LMHeadModel", attention="eager"),
    "gpt_bigcode": causal("GPTBigCode"),
    "gpt_neo": causal("GPTNeo", sizes={"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": causal("GPTNeoX"),
    "gpt_neox_japanese": causal("GPTNeoXJapanese"),
    "gptj": causal("GPTJ", sizes={"rotary_dim": 4}),
    "granite": causal("Granite"),
    "helium": causal("Helium"),
    "hrm_text": causal("HrmText"),
    "hunyuan_v1_dense": causal("HunYuanDenseV1"),
    "hyperclovax": causal("HyperCLOVAX"),
    "imagegpt": Architecture("ImageGPTModel", "ImageGPTForImageClassification", labels="class"),
    "jais2": causal("Jais2"),
    "llama": causal("Llama"),
    "llama, eager attention": causal("Llama", attention="eager"),
    "llama, low-rank updates": causal("Llama", adapters=("q_proj", "v_proj", "up_proj")),
    "llama, a classifier": classifier("Llama", inputs="padded text"),
    "ministral": causal("Ministral"),
    "mistral": causal("Mistral"),
    "modernbert-decoder": Architecture("ModernBertDecoderModel", "ModernBertDecoderForCausalLM"),
    "moshi": causal("Moshi"),
    "mpt": causal("Mpt"),
    "nanochat": causal("NanoChat"),
    "nemotron": causal("Nemotron"),
    "olmo": causal("Olmo"),
    "olmo2": causal("Olmo2"),
    "olmo3": causal("Olmo3"),
    "openai-gpt": Architecture("OpenAIGPTModel", "OpenAIGPTLMHeadModel"),
    "opt": causal("OPT", sizes={"word_embed_proj_dim": 32}),
    "persimmon": causal("Persimmon"),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3"),
    "seed_oss": causal("SeedOss"),
    "smollm3": causal("SmolLM3"),
    "stablelm": causal("StableLm"),
    "starcoder2": causal("Starcoder2"),
    "vaultgemma": causal("VaultGemma"),
    "xglm": causal("XGLM", modes=("float32",)),
}

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

STATE_SPACES: dict[str, Architecture] = {
    "bamba": causal("Bamba", sizes={"attn_layer_indices": [1]}),
    "falcon_h1": causal("FalconH1", sizes={"mamba_d_ssm": 64}),
    "falcon_mamba": causal("FalconMamba"),
    "jamba": causal("Jamba", sizes={"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                                    "expert_layer_offset": 1, "use_mamba_kernels": False}),
    "lfm2": causal("Lfm2"),
    "mamba": causal("Mamba"),
    "mamba2": causal("Mamba2", sizes={"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}),
    "nemotron_h": causal("NemotronH", sizes={"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
                                             "n_groups": 1, "chunk_size": 4,
                                             "moe_shared_expert_intermediate_size": 24}),
    "olmo_hybrid": causal("OlmoHybrid"),
    "qwen3_next": causal("Qwen3Next", sizes={**HYBRID, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                                             "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "recurrent_gemma": causal("RecurrentGemma", sizes={"lru_width": 32, "attention_window_size": 4,
                                                       "block_types": ["recurrent", "attention"]}),
    "rwkv": causal("Rwkv", sizes={"attention_hidden_size": 32}, modes=("train",)),
    "zamba2": causal("Zamba2", sizes={"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2,
                                      "n_mamba_heads": 4, "num_mem_blocks": 1,
                                      "mamba_headdim": 16, "hybrid_layer_ids": [1], "chunk_size": 4}),
}  # fmt: skip

LATENT = {"num_experts_per_tok": 2, "num_key_value_heads": 4, "qk_head_dim": 12, "head_dim": 4, "moe_layer_freq": 1}

GROUPED: Any = {"experts": "grouped_mm", "modes": ("float32", "bfloat16")}
"""A kernel that knows no float64."""

EXPERTS: dict[str, Architecture] = {
    "afmoe": causal("Afmoe"),
    "aria_text": causal("AriaText", sizes={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "cohere2_moe": causal("Cohere2Moe"),
    "deepseek_v2": causal("DeepseekV2", sizes=LATENT),
    "deepseek_v3": causal("DeepseekV3", sizes=LATENT),
    "ernie4_5_moe": causal("Ernie4_5_Moe", sizes={"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "flex_olmo": causal("FlexOlmo"),
    "glm4_moe": causal("Glm4Moe"),
    "gpt_oss": causal("GptOss"),
    "granitemoe": causal("GraniteMoe"),
    "granitemoeshared": causal("GraniteMoeShared", sizes={"shared_intermediate_size": 24}),
    "hunyuan_v1_moe": causal("HunYuanMoEV1", sizes={"moe_topk": 2}),
    "jetmoe": causal("JetMoe", sizes={"kv_channels": 8, "num_key_value_heads": 4}),
    "llama4_text": Architecture("Llama4TextModel", "Llama4ForCausalLM", sizes={
        "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}),
    "minimax": causal("MiniMax"),
    "minimax_m2": causal("MiniMaxM2"),
    "mixtral": causal("Mixtral"),
    "mixtral, grouped experts": causal("Mixtral", **GROUPED),
    "mixtral, batched experts": causal("Mixtral", experts="batched_mm"),
    "nllb-moe": Architecture("NllbMoeModel", inputs="two texts", sizes={
        "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64}),
    "olmoe": causal("Olmoe"),
    "phimoe": causal("Phimoe"),
    "qwen2_moe": causal("Qwen2Moe"),
    "qwen3_moe": causal("Qwen3Moe"),
    "qwen3_moe, grouped experts": causal("Qwen3Moe", **GROUPED),
    "deepseek_v3, grouped experts": causal("DeepseekV3", sizes=LATENT, **GROUPED),
    "gpt_oss, grouped experts": causal("GptOss", **GROUPED),
    "qwen3_vl_moe_text": Architecture("Qwen3VLMoeTextModel"),
    "solar_open": causal("SolarOpen"),
    "switch_transformers": pair("SwitchTransformers", sizes={"expert_capacity": 64, "num_sparse_encoder_layers": 1,
                                                             "num_sparse_decoder_layers": 1}),
}  # fmt: skip

PAIRS: dict[str, Architecture] = {
    "bart": pair("Bart"),
    "bart, a classifier": Architecture("BartModel", "BartForSequenceClassification", labels="class", inputs="ended"),
    "bigbird_pegasus": pair("BigBirdPegasus", sizes={"attention_type": "original_full"}),
    "blenderbot": pair("Blenderbot"),
    "blenderbot-small": pair("BlenderbotSmall"),
    "fsmt": pair("FSMT", sizes={"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}),
    "led": pair("LED", inputs="two texts", sizes={"attention_window": 4, "max_encoder_position_embeddings": 64,
                                                  "max_decoder_position_embeddings": 64}),
    "longt5": pair("LongT5", sizes={"local_radius": 3}),
    "m2m_100": pair("M2M100"),
    "marian": Architecture("MarianModel", "MarianMTModel", inputs="two texts", labels="5 tokens"),
    "mbart": pair("MBart"),
    "mt5": pair("MT5"),
    "mvp": pair("Mvp"),
    "pegasus": pair("Pegasus"),
    "pegasus_x": pair("PegasusX", sizes={"block_size": 4, "num_global_tokens": 2}, inputs="two texts"),
    "plbart": pair("PLBart"),
    "prophetnet": pair("ProphetNet", sizes={"num_hidden_layers": ..., "num_encoder_attention_heads": 4,
                                            "num_decoder_attention_heads": 4, "ngram": 2}),
    "t5": pair("T5"),
    "umt5": pair("UMT5"),
}  # fmt: skip

VISION: dict[str, Architecture] = {
    "aimv2_vision_model": images("Aimv2Vision", head=""),
    "beit": images("Beit", sizes={"use_relative_position_bias": True}),
    "beit, shared bias": images("Beit", sizes={"use_shared_relative_position_bias": True}),
    "bit": images("Bit", sizes={"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_groups": 2},
                  inputs="large image"),
    "clip_vision_model": Architecture("CLIPVisionModel", inputs="image"),
    "convnext": images("ConvNext", sizes={"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}),
    "convnextv2": images("ConvNextV2", sizes={"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
                                              "patch_size": 4}),
    # Not in evaluation: the gradient of batch norm that torch 2.13 computes for a batch of one is wrong there.
    "cvt": images("Cvt", inputs="large image", modes=("train",), sizes={
        "num_channels": 3, "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1],
        "embed_dim": [8, 16], "num_heads": [1, 2], "depth": [1, 2], "mlp_ratio": [2.0, 2.0],
        "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.1],
        "qkv_bias": [True, True], "cls_token": [False, True], "qkv_projection_method": ["dw_bn", "dw_bn"],
        "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}),
    "data2vec-vision": images("Data2VecVision"),
    "deit": images("DeiT"),
    "dinov2": images("Dinov2"),
    "dinov2_with_registers": images("Dinov2WithRegisters"),
    "dinov3_vit": images("DINOv3ViT", head=""),
    "donut-swin": images("DonutSwin", head="", sizes={"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                                                      "window_size": 2, "patch_size": 4}),
    "dpt": images("DPT", head="", sizes={"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8]}),
    "efficientnet": images("EfficientNet", inputs="large image", sizes={
        "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256, "image_size": 32,
        "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2],
        "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": []}),
    "focalnet": images("FocalNet", sizes={"embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
                                          "focal_levels": [1, 1], "focal_windows": [3, 3], "patch_size": 4}),
    "glpn": images("GLPN", head="", sizes={"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                                           "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
                                           "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
                                           "decoder_hidden_size": 8}),
    "hiera": images("Hiera", inputs="large image", sizes={
        "embed_dim": 8, "image_size": [32, 32], "depths": [1, 1], "num_heads": [1, 2], "patch_size": [7, 7],
        "query_stride": [2, 2], "num_query_pool": 1, "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False]}),
    "ijepa": images("IJepa"),
    "mgp-str": Architecture("MgpstrForSceneTextRecognition", inputs="large image", sizes={
        "image_size": [32, 32], "max_token_length": 5, "num_character_labels": 11, "num_bpe_labels": 13,
        "num_wordpiece_labels": 17}),
    "mlcd": images("MLCDVision", head=""),
    "mobilenet_v1": images("MobileNetV1", modes=NO_TRAIN,
                           inputs="large image", sizes={"depth_multiplier": 0.25, "min_depth": 8}),
    "mobilenet_v2": images("MobileNetV2", modes=NO_TRAIN,
                           inputs="large image", sizes={"depth_multiplier": 0.25, "min_depth": 8}),
    "mobilevit": images("MobileViT", inputs="image of 64", sizes={
        "hidden_sizes": [8, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "image_size": 64, "patch_size": 2}),
    "pixtral": images("PixtralVision", head="", modes=NO_TRAIN),
    "poolformer": images("PoolFormer", sizes={"hidden_sizes": [8, 16], "depths": [1, 1], "patch_sizes": [7, 3],
                                              "strides": [4, 2], "padding": [2, 1], "num_encoder_blocks": 2}),
    "pvt": images("Pvt", inputs="large image", sizes={
        "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
        "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2]}),
    "regnet": images("RegNet", inputs="large image", sizes={
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}),
    "resnet": images("ResNet", inputs="large image", sizes={
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "segformer": images("Segformer", inputs="large image", sizes={
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8}),
    "siglip_vision_model": images("SiglipVision", head=""),
    "swiftformer": images("SwiftFormer", inputs="large image", sizes={
        "image_size": 32, "depths": [1, 1], "embed_dims": [8, 16], "mlp_ratio": 2}),
    "swin": images("Swin", sizes={"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
                                  "patch_size": 4}),
    "swin, shifted": images("Swin", inputs="large image", sizes={
        "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4, "image_size": 32}),
    "swinv2": images("Swinv2", sizes={"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
                                      "patch_size": 4}),
    "timesformer": Architecture("TimesformerModel", inputs="video", sizes={"num_frames": 2, "drop_path_rate": 0}),
    "videomae": Architecture("VideoMAEModel", inputs="video", sizes={"num_frames": 2, "tubelet_size": 2}),
    "vit": images("ViT"),
    "vit, eager attention": images("ViT", attention="eager"),
    "vit, low-rank updates": images("ViT", adapters=("query", "value", "q_proj", "v_proj")),
    "vit_mae": Architecture("ViTMAEModel", inputs="image", sizes={"mask_ratio": 0.5}),
    "vit_msn": images("ViTMSN"),
    "vitdet": Architecture("VitDetModel", inputs="image", sizes={"pretrain_image_size": IMAGE}),
    "vivit": Architecture("VivitModel", inputs="video", sizes={"num_frames": 2, "tubelet_size": [2, 8, 8]}),
    "yolos": Architecture("YolosModel", inputs="image", sizes={"image_size": [16, 16], "num_detection_tokens": 3}),
}  # fmt: skip

AUDIO: dict[str, Architecture] = {
    "audio-spectrogram-transformer": Architecture(
        "ASTModel", "ASTForAudioClassification", inputs="mel", labels="class",
        sizes={"num_mel_bins": 16, "max_length": 24, "patch_size": 8, "time_stride": 8, "frequency_stride": 8}),
    "data2vec-audio": sounds("Data2VecAudio"),
    "hubert": sounds("Hubert"),
    "moonshine": Architecture("MoonshineModel", "MoonshineForConditionalGeneration", inputs="sound and text", sizes={
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}),
    "sew": sounds("SEW", sizes={"squeeze_factor": 2}),
    "speech_to_text": Architecture(
        "Speech2TextModel", "Speech2TextForConditionalGeneration", inputs="frames and text",
        sizes={"input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 64,
               "max_target_positions": 64}),
    "unispeech": sounds("UniSpeech", sizes={"num_codevectors_per_group": 8, "codevector_dim": 8}),
    "unispeech-sat": sounds("UniSpeechSat", sizes={"num_codevectors_per_group": 8, "codevector_dim": 8}),
    "wav2vec2": sounds("Wav2Vec2"),
    "wav2vec2, group norm": sounds("Wav2Vec2", sizes={"feat_extract_norm": "group"}),
    "wav2vec2, layer norm": sounds("Wav2Vec2", sizes={"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "wav2vec2-bert": Architecture("Wav2Vec2BertModel", inputs="frames", sizes={
        "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3, "mask_time_prob": 0.0, "layerdrop": 0.0}),
    "wav2vec2-conformer": sounds("Wav2Vec2Conformer", sizes={"conv_depthwise_kernel_size": 3}),
    "wavlm": sounds("WavLM"),
    "whisper": Architecture(
        "WhisperModel", "WhisperForConditionalGeneration", inputs="spectrogram and text",
        sizes={"num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 16}),
}  # fmt: skip

CLIP_TOWERS = {
    "text_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": IMAGE, "patch_size": 8},
    "projection_dim": 16,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
CLIP_VISION = {"model_type": "clip_vision_model", **CLIP_TOWERS["vision_config"]}

MULTIMODAL: dict[str, Architecture] = {
    "blip": Architecture("BlipModel", inputs="text and image", sizes={
        **CLIP_TOWERS, "text_config": {**CLIP_TOWERS["text_config"], "encoder_hidden_size": 32,
                                       "bos_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}}),
    "chinese_clip": Architecture("ChineseCLIPModel", inputs="text and image", sizes=CLIP_TOWERS),
    "clip": Architecture("CLIPModel", inputs="text and image", sizes=CLIP_TOWERS),
    "clipseg": Architecture("CLIPSegModel", inputs="text and image", sizes=CLIP_TOWERS),
    "flava": Architecture("FlavaModel", inputs="text and image", sizes={
        "text_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "vocab_size": VOCABULARY, "max_position_embeddings": 16},
        "image_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "image_size": IMAGE, "patch_size": 8},
        "multimodal_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                              "num_attention_heads": 4},
        "image_codebook_config": {"hidden_size": 4, "vocab_size": 16, "num_groups": 2, "num_blocks_per_group": 1}}),
    "git": Architecture("GitModel", "GitForCausalLM", inputs="text and image", sizes={
        "vision_config": CLIP_TOWERS["vision_config"]}),
    "llava": Architecture("LlavaModel", "LlavaForConditionalGeneration", inputs="text with an image", sizes={
        "text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_index": 3, "vision_feature_layer": -1},
        labels="9 tokens"),
    "owlvit": Architecture("OwlViTModel", inputs="text and image", sizes=CLIP_TOWERS),
    "paligemma": Architecture("PaliGemmaModel", "PaliGemmaForConditionalGeneration", labels="9 tokens", sizes={
        "text_config": {**LLAMA, "model_type": "gemma", "head_dim": 8}, "projection_dim": 32, "image_token_index": 3,
        "vision_config": {"model_type": "siglip_vision_model", **CLIP_TOWERS["vision_config"], "projection_dim": 32}},
        inputs="text with an image"),
    "siglip": Architecture("SiglipModel", inputs="text and image", sizes=CLIP_TOWERS),
    "vilt": Architecture("ViltModel", inputs="text and image", sizes={"max_position_embeddings": 16}),
    "visual_bert": Architecture("VisualBertModel", inputs="text and features", sizes={"visual_embedding_dim": 16}),
    "lxmert": Architecture("LxmertModel", inputs="text and boxes", sizes={
        "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "visual_pos_dim": 4}),
    "perceiver": Architecture("PerceiverModel", inputs="arrays", sizes={
        "num_latents": 5, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 2}),
    "decision_transformer": Architecture("DecisionTransformerModel", inputs="trajectories", sizes={
        "state_dim": 5, "act_dim": 3, "max_ep_len": 16}),
    "patchtst": Architecture("PatchTSTModel", inputs="series", sizes={
        "num_input_channels": 2, "context_length": 16, "patch_length": 8, "patch_stride": 8, "norm_type": "layernorm"}),
    "patchtsmixer": Architecture("PatchTSMixerModel", inputs="series", sizes={
        "num_input_channels": 2, "context_length": 16, "patch_length": 8, "patch_stride": 8,
        "norm_mlp": "LayerNorm"}),
    "time_series_transformer": Architecture("TimeSeriesTransformerModel", inputs="time series", sizes={
        "prediction_length": 3, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2,
        "scaling": False}),
}  # fmt: skip

INPUTS |= {
    "mel": lambda: {"input_values": torch.randn(B, 24, 16)},
    "sound and text": lambda: {"input_values": torch.randn(B, 1600), "decoder_input_ids": ids()},
    "text with an image": lambda: {
        "input_ids": torch.cat([torch.full((B, 4), 3), ids(5).clamp(min=4)], 1),
        "pixel_values": image(),
        "attention_mask": torch.ones(B, 9, dtype=torch.int64),
    },
    "text and features": lambda: {"input_ids": ids(), "visual_embeds": torch.randn(B, 3, 16)},
    "text and boxes": lambda: {
        "input_ids": ids(),
        "visual_feats": torch.randn(B, 3, 16),
        "visual_pos": torch.rand(B, 3, 4),
    },
    "arrays": lambda: {"inputs": torch.randn(B, 6, 16)},
    "trajectories": lambda: {
        "states": torch.randn(B, 5, 5),
        "actions": torch.randn(B, 5, 3),
        "rewards": torch.randn(B, 5, 1),
        "returns_to_go": torch.randn(B, 5, 1),
        "timesteps": torch.arange(5).expand(B, 5),
        "attention_mask": torch.ones(B, 5),
    },
    "time series": lambda: {
        "past_values": torch.randn(B, 10),
        "past_time_features": torch.randn(B, 10, 2),
        "past_observed_mask": torch.ones(B, 10),
        "future_values": torch.randn(B, 3),
        "future_time_features": torch.randn(B, 3, 2),
    },
}
LABELS |= {"9 tokens": lambda: ids(9)}

ARCHITECTURES: dict[str, Architecture] = {
    **ENCODERS, **DECODERS, **STATE_SPACES, **EXPERTS, **PAIRS, **VISION, **AUDIO, **MULTIMODAL,
}  # fmt: skip

CASES = {name: row.case() for name, row in ARCHITECTURES.items()}
CASES["clip, loss over pairs"] = ZooCase(
    functools.partial(ARCHITECTURES["clip"].build, "CLIPModel"),
    INPUTS["text and image"],
    loss=lambda m, i: pairwise(m(**i).logits_per_image),
    modes=("eval",),
)
LOSSES = [
    "albert", "bert, padded", "big_bird", "deberta", "electra", "flaubert", "fnet", "mobilebert", "modernbert",
    "xlnet", "bloom", "ctrl", "falcon", "gemma2", "gpt2", "gpt_neox", "imagegpt", "llama", "llama, a classifier",
    "mpt", "olmo2", "opt", "phi3", "qwen3", "bamba", "jamba", "lfm2", "mamba", "deepseek_v3", "gpt_oss",
    "granitemoe", "jetmoe", "llama4_text", "mixtral", "olmoe", "qwen2_moe", "switch_transformers", "bart",
    "bart, a classifier", "led", "marian", "prophetnet", "t5", "beit", "convnext", "resnet", "swin", "vit",
    "audio-spectrogram-transformer", "hubert", "whisper", "git", "llava", "paligemma",
]  # fmt: skip
"""Whose own loss from labels is tried too: at least one of each kind of head."""

LABELLED = {f"{name}, labels": ARCHITECTURES[name].labelled() for name in LOSSES}

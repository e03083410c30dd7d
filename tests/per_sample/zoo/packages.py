"""Models of timm, diffusers, peft and torch_geometric, with random weights and few of them.

``python tests/per_sample/zoo/packages.py --mode eval --only resnet`` prints what becomes of each; a package that is not
installed is left out, and torchvision, of which timm takes no more than a few names, is stood in for.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from per_sample.zoo.case import B, ZooCase  # noqa: E402
from per_sample.zoo.trial import trial  # noqa: E402

MODES = ("eval", "train", "float32", "float32, train")


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets ``import torchvision`` give modules in which every name is an empty class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def _empty_class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (nn.Module,), {"BILINEAR": 0, "BICUBIC": 1, "NEAREST": 2, "LANCZOS": 3, "HAMMING": 4, "BOX": 5})


def found(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def random(*shape: int) -> Tensor:
    return torch.randn(B, *shape)


# timm


def vision(name: str, side: int = 32, **options: Any) -> ZooCase:
    def build() -> nn.Module:
        return timm().create_model(name, pretrained=False, num_classes=5, **options)

    return ZooCase(build, lambda: (random(3, side, side),))


def timm() -> Any:
    """The package; torchvision is stood in for only while it is imported, for others look whether it is there."""
    if "timm" in sys.modules or found("torchvision"):
        return importlib.import_module("timm")
    stand_in = _StandIn()
    sys.meta_path.append(stand_in)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(stand_in)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


TINY = {"embed_dim": 24, "depth": 2, "num_heads": 4, "img_size": 32}
DROPPED = {"drop_rate": 0.1, "drop_path_rate": 0.2}

TIMM = {
    "vision transformer": vision("vit_tiny_patch16_224", **TINY, patch_size=8, drop_path_rate=0.2),
    "deit, distilled": vision("deit_tiny_distilled_patch16_224", **TINY, patch_size=8),
    "eva02": vision("eva02_tiny_patch14_224", **{**TINY, "num_heads": 3}, patch_size=8),
    "beit": vision("beit_base_patch16_224", **TINY, patch_size=8),
    "cait": vision("cait_xxs24_224", **TINY, patch_size=8),
    "xcit": vision("xcit_nano_12_p16_224", **TINY, patch_size=8),
    "resnet": vision("resnet10t"),
    "efficientnet": vision("tf_efficientnet_lite0"),
    "mobilenetv3": vision("mobilenetv3_small_050"),
    "convnext": vision("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), **DROPPED),
    "mixer": vision("mixer_s32_224", 64, img_size=64),
    "gmlp": vision("gmlp_ti16_224", img_size=32),
    "resmlp": vision("resmlp_12_224", img_size=32),
    "swin": vision(
        "swin_tiny_patch4_window7_224", img_size=32, patch_size=2, window_size=4, embed_dim=12, depths=(1, 2),
        num_heads=(2, 2),
    ),
    "poolformer": vision("poolformer_s12", drop_path_rate=0.2),
    "nfnet": vision("nf_resnet26"),
    "mobilevit": vision("mobilevitv2_050"),
    "ghostnet": vision("ghostnet_050"),
    "repvit": vision("repvit_m0_9"),
    "edgenext": vision("edgenext_xx_small", 64, depths=(1, 1, 2, 1), dims=(8, 16, 16, 16)),
    "davit": vision("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2)),
    "coat": vision("coat_lite_tiny", img_size=32, embed_dims=(8, 8, 16, 16), serial_depths=(1, 1, 1, 1)),
    "levit": vision("levit_128s", side=64, img_size=64, embed_dim=(16, 24, 32), num_heads=(2, 3, 4),
                    depth=(1, 1, 1), key_dim=8),
    "crossvit": vision("crossvit_tiny_240", side=48, img_size=48, img_scale=(1.0, 1.0)),
    "visformer": vision("visformer_tiny", side=64, img_size=64, embed_dim=48, depth=(1, 1, 1)),
    "densenet": vision("densenet121", growth_rate=4, block_config=(1, 1, 1, 1)),
}  # fmt: skip


# diffusers


def diffusion(
    name: str,
    inputs: Callable[[], dict[str, Any]],
    constants: Mapping[str, Tensor] = MappingProxyType({}),
    **config: Any,
) -> ZooCase:
    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**config)

    return ZooCase(build, inputs, lambda model, inputs: model(**inputs, **constants))


def times() -> Tensor:
    return torch.tensor([5, 20, 300, 7])


def noisy(channels: int = 3, side: int = 8, **others: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": random(channels, side, side), **{name: make() for name, make in others.items()}}


def hidden(channels: int = 4, side: int = 8, **others: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"hidden_states": random(channels, side, side), **{name: make() for name, make in others.items()}}


def flux() -> dict[str, Any]:
    return {
        "hidden_states": random(6, 4),
        "encoder_hidden_states": random(5, 12),
        "pooled_projections": random(10),
        "timestep": torch.rand(B),
    }


IDS = {"img_ids": torch.arange(18.0).view(6, 3), "txt_ids": torch.zeros(5, 3)}
"""Places of patches and words, the same for all samples."""


UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}

DIFFUSERS = {
    "unet": diffusion(
        "UNet2DModel", noisy(timestep=times), **UNET, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "unet, conditional": diffusion(
        "UNet2DConditionModel", noisy(4, timestep=times, encoder_hidden_states=lambda: random(5, 12)), **UNET,
        cross_attention_dim=12, attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "unet of sound": diffusion(
        "UNet1DModel", lambda: {"sample": random(2, 32), "timestep": times()}, sample_size=32,
        block_out_channels=(32, 32), extra_in_channels=64,  mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"), up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
    ),
    "dit": diffusion(
        "DiTTransformer2DModel", hidden(timestep=times, class_labels=lambda: torch.tensor([0, 2, 1, 3])), **TWO_HEADS,
        in_channels=4, sample_size=8, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    ),
    "sd3": diffusion(
        "SD3Transformer2DModel",
        hidden(timestep=times, encoder_hidden_states=lambda: random(5, 12), pooled_projections=lambda: random(10)),
        **TWO_HEADS, sample_size=8, in_channels=4, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8,
    ),
    "pixart": diffusion(
        "PixArtTransformer2DModel",
        hidden(timestep=times, encoder_hidden_states=lambda: random(5, 12),
               added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None}),
        **TWO_HEADS, sample_size=8, in_channels=4, out_channels=8, cross_attention_dim=16, caption_channels=12,
    ),
    "flux": diffusion(
        "FluxTransformer2DModel", flux, IDS, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=10,
        axes_dims_rope=(4, 2, 2),
    ),
    "autoencoder": diffusion(
        "AutoencoderKL", noisy(), block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "autoencoder, quantized": diffusion(
        "VQModel", noisy(), block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2, num_vq_embeddings=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "controlled unet": diffusion(
        "ControlNetModel",
        noisy(4, timestep=times, encoder_hidden_states=lambda: random(5, 12),
              controlnet_cond=lambda: random(3, 16, 16)),
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=12,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(4, 8),
    ),
}  # fmt: skip


# peft


def adapted(kind: str, **options: Any) -> ZooCase:
    """A small GPT-2 whose own weights are frozen, and what peft trains beside them."""

    def build() -> nn.Module:
        peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=32, use_cache=False,
            resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
        )  # fmt: skip
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), getattr(peft, kind)(**options))

    return ZooCase(build, lambda: {"input_ids": torch.randint(0, 67, (B, 7))}, lambda model, inputs: model(**inputs))


TARGETS = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
LORA = {**TARGETS, "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "init_lora_weights": False}

PEFT = {
    "lora": adapted("LoraConfig", **LORA),
    "lora, ranked": adapted("LoraConfig", **LORA, use_rslora=True, bias="lora_only"),
    "dora": adapted("LoraConfig", **LORA, use_dora=True),
    "lora of words": adapted("LoraConfig", **{**LORA, "target_modules": ["wte"], "fan_in_fan_out": False}),
    "ia3": adapted("IA3Config", **TARGETS, feedforward_modules=[]),
    "loha": adapted("LoHaConfig", r=3, target_modules=["lm_head"]),
    "oft": adapted("OFTConfig", r=0, oft_block_size=4, target_modules=["lm_head"]),
    "vera": adapted("VeraConfig", r=3, target_modules=["c_attn"], fan_in_fan_out=True),
    "prompts": adapted("PromptTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompts, by a network": adapted("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8,
                                     task_type="CAUSAL_LM"),
    "prefixes": adapted("PrefixTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "layer norms": adapted("LNTuningConfig", target_modules=["ln_1"]),
    "bone": adapted("MissConfig", r=4, target_modules=["lm_head"]),
    "adalora": adapted("AdaLoraConfig", **{**LORA, "r": 8}, init_r=4, target_r=2, total_step=10),
}  # fmt: skip


# torch_geometric


NODES = 6


class Graphs(nn.Module):
    """Convolutions on graphs of as many nodes each, which lie behind one another as in a batch of torch_geometric."""

    def __init__(self, layers: nn.ModuleList, pooled: str = "global_mean_pool", weighted: bool = False) -> None:
        super().__init__()
        self.layers, self.head, self.pooled, self.weighted = layers, nn.Linear(8, 3), pooled, weighted

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        """Take nodes ``[B, N, 8]`` and links ``[B, 2, E]`` within each graph."""
        starts = NODES * torch.arange(len(x))
        edges = (links + starts[:, None, None]).movedim(1, 0).flatten(1)
        h = x.flatten(0, 1)
        for layer in self.layers:
            h = layer(h, edges).relu()
        pool = getattr(importlib.import_module("torch_geometric.nn"), self.pooled)
        return self.head(pool(h, torch.arange(len(x)).repeat_interleave(NODES), len(x)))


def links() -> Tensor:
    ring = torch.arange(NODES)
    fixed = torch.stack([ring, ring.roll(1)])
    return torch.stack([torch.cat([fixed, torch.randint(0, NODES, (2, 4))], 1) for _ in range(B)])


def convolved(make: Callable[[Any], nn.Module], pooled: str = "global_mean_pool") -> ZooCase:
    def build() -> nn.Module:
        geometric = importlib.import_module("torch_geometric.nn")
        return Graphs(nn.ModuleList([make(geometric), make(geometric)]), pooled)

    return ZooCase(build, lambda: (random(NODES, 8), links()))


GEOMETRIC = {
    "graph convolution": convolved(lambda g: g.GCNConv(8, 8)),
    "graph attention": convolved(lambda g: g.GATConv(8, 4, heads=2, dropout=0.1)),
    "graph attention, second": convolved(lambda g: g.GATv2Conv(8, 4, heads=2)),
    "sage": convolved(lambda g: g.SAGEConv(8, 8)),
    "sage, largest": convolved(lambda g: g.SAGEConv(8, 8, aggr="max"), "global_max_pool"),
    "isomorphism": convolved(
        lambda g: g.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), train_eps=True),
        "global_add_pool",
    ),
    "transformer of graphs": convolved(lambda g: g.TransformerConv(8, 4, heads=2, dropout=0.1)),
    "gated": convolved(lambda g: g.GatedGraphConv(8, 2)),
    "residual gated": convolved(lambda g: g.ResGatedGraphConv(8, 8)),
    "chebyshev": convolved(lambda g: g.ChebConv(8, 8, K=3)),
    "arma": convolved(lambda g: g.ARMAConv(8, 8)),
    "edges": convolved(lambda g: g.EdgeConv(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)))),
    "general": convolved(lambda g: g.GENConv(8, 8, norm="layer")),
    "dense": ZooCase(
        lambda: importlib.import_module("torch_geometric.nn").DenseGCNConv(8, 8),
        lambda: (random(NODES, 8), (random(NODES, NODES) > 0).float()),
    ),
}  # fmt: skip

PACKAGES = {"timm": TIMM, "diffusers": DIFFUSERS, "peft": PEFT, "torch_geometric": GEOMETRIC}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, action="append", help="all, if none is given")
    parser.add_argument("--only", default="", help="a regular expression for names, such as 'timm: .*vit'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    for package, cases in PACKAGES.items():
        if not found(package):
            print(f"{package} is not installed")
            continue
        for (name, case), mode in [(row, mode) for row in cases.items() for mode in options.mode or MODES]:
            if not re.search(options.only, f"{package}: {name}"):
                continue
            outcome = trial(case, mode)
            counts[mode, outcome.kind] += 1
            numbers = f"{outcome.error:8.1e}{outcome.seconds:5.1f} s"
            words = outcome.words if outcome.oracle == "alone" else f"({outcome.oracle}) {outcome.words}"
            print(f"{mode:16}{package + ': ' + name:44}{outcome.kind:13}{numbers}  {words}", flush=True)
    for (mode, kind), count in sorted(counts.items()):
        print(f"{mode:16}{kind:13}{count:5}")


if __name__ == "__main__":
    main()

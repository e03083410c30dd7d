"""Decide which option values a record may show: values that look like settings, and none that could be a secret.

A list of the names of secret options is never complete: `--pat`, `--mysql-pass`, `--login`. The module therefore lists
what is harmless: a value is shown if it consists of numbers and known words, or names an existing file.
"""

import math
import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

_NUMBER = r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_UNIT = r"(?:%|[kmgtbx]i?b?|[hsdw]|min|ms|ep|ba|st|tok|dur)?"
_NUMERIC = re.compile(rf"{_NUMBER}{_UNIT}", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s,;:=/\\|@+()\[\]{}<>\"'*._~^$#!?&-]+")
_PARTS = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_LONGEST_DIGITS = 12
_LONGEST_SHOWN = 400
_SUFFIXES = (
    "bin ckpt csv cfg conf gz h5 hdf5 html ini ipynb jpg json jsonl log md npy npz onnx parquet pdf png pt pth py "
    "safetensors sh tar tfrecord toml tsv txt yaml yml zip zst"
)
_WORDS = frozenset(
    f"""{_SUFFIXES}
a ablation acc accelerate accelerator accum accumulate accumulation accuracy actor adadelta adafactor adagc
adagrad adam adamax adamw adamwfused adapter adaptive ade ademamix adult agc agent ai albert alexnet algo
algorithm all allenai alpaca alpha always amp an and annealing ant any aot apr arc artifact artifacts as asgd at
atari attention attn auc audio aug augment augmentation auto autoaugment autoclip autotune average avg b
backbone backend bart base baseline baselines batch batches bce begin beit bert best beta betas bf bfloat bias
biases big bigscience bit bits bleu blip block blocks bloom bookcorpus boolq both branch bs by byol c10d c4
cache cached california caltech captioning capturable cartpole cased causal ce celeba center cer channel
channels char chat checkpoint checkpointing checkpoints cheetah cifar cityscapes ckpts classification clearml
client clip clipnorm clipping cnn coco code cola color com comet commonvoice compile compiled conf config
configs conformer console constant context contrastive convnext cooldown core cores cosine count cp cpu cpus
criteo criterion critic critical crop cross csv ctc cuda cudnn custom cutmix cutout cyclic d data dataset
datasets day days db dcgan ddim ddp ddpm de deberta debug dec decay decoder deepseek deepspeed default deit demo
densenet depth detection detr dev device devices dice dict diffusion dim dims dino dinov dir dirs disabled
distilbert dolly dora double dp dpo draft dropout dry dryrun dummy dynamic dynamo each eager early edu efficient
efficientnet elastic electra eleutherai elu em embed embedding emnist en enabled encoder end english entropy env
enwik ep epoch epochs eps epsilon error es etc eval evaluate evaluation every example examples exp experiment
experiments exponential exps f1 facebook fake falcon false fashion fast faster feb fid file final finetune
finetuning fineweb first fit flan flash flip float float16 float32 float64 float8 flowers flux focal fold folder
folders folds food for foreach fp fp4 fp8 fpn fr french freq frequency from fsdp full fullgraph functional fused
gamma gan geglu gelu gemma generation german giant global gloo glu glue google gpt gptj gpu gpus grad gradient
gradients grads graph graphs gray group groups grpo gru gsm8k gym half hardswish head hellaswag hf hidden high
highest hinge hip home hopper horovod host hour hours housing hpu hsdp http https hub huber hubert huge
huggingface humaneval humanoid hybrid ia icefall id identity image imagenet imagenette images img in inception
index inductor inf infer inference info init initialization instruct int int4 int8 interval inverse io iou iris
it iter iters iwslt ja jan jax jitter jul jun k kaiming keras kernel kind kinetics kl kto l1 l2 lamb lambda
language large lars last latest layer layers lbfgs leaky left len length lib librispeech lightning limit linear
lion ljspeech llama llm lm load local localhost log logger logging logs long lora loss low lowest lr lstm lsun m
macro mae main mamba map mar mask masked master math max may mean median medium megatron meta method metric
metrics micro microsoft min mini mish mistral mistralai mixed mixtral mixup mlflow mlm mlp mmlu mnist mnli mnt
mobilenet mock moco mode model modeling models moe momentum monitor month moons movielens mpi mpirun mps mrpc
mse mujoco multistep muon mxfp8 my n nadam name names nan nano nccl neox neptune ner nerf nesterov net network
never new next nf4 nll nn no noam node nodes nograd noise none norm normal not notebook notebooks nov npu null
num number numpy nvidia oasst oct of off offline offload old olmo on one onecycle ones online openai openwebtext
opt optim optimizer or org orpo orthogonal our out output outputs overfit overhead own p paged param parameter
parameters params part parts pascal patch path patience peft per perplexity phase phi pile piqa plain plateau
policy poly polynomial pong port pp ppl ppo precision predict prediction prefix prelu pretrain pretrained
pretraining prev private process processes prodigy project projects prompt psnr ptb pythia pytorch q qa qlora
qnli qqp quant quantization quantized quarter quick quiet qwen radam randaugment random rank rank0 rate ratio
ray rcnn rdzv recall redpajama reduce reflect regnet regression relu report reports resize resnet resnext
restart restarts result results resume rev revision reward rgb right rlhf rmsprop rnn roberta rocm root rotate
rouge rprop rte ru run runs rwkv s sam same sanity save schedule schedulefree scheduler scratch script scripts
sdpa sdxl seed seeds segmentation selu sentence sep seq sequence server sft sgd sgdm shakespeare shampoo shard
sharded sharding share shared short shufflenet siglip sigmoid silent silu simclr simple single size sizes
sklearn slimpajama slow slurm small smoke smollm smooth soap softmax softplus sophia sp sparse speech spirals
split splits sqrt squad squeezenet src srun ssim sst sst2 stabilityai stable stage stages start state states
static std stderr stdout step steps stl stop stopper stopping strategy stride stsb stylegan suffix sum
summarization superglue svhn sweep swiglu swin swish synthetic t t5 tag tanh task tasks tcp tcpstore temp
temperature tensorboard tensorfloat test testing text text8 tf that the this thread threads timit timm tiny
tinyimagenet tinyllama titanic tmp to token tokenizer tokens top torch torchaudio torchrun torchtext torchvision
total toy tp tpu trackio train trained trainer training transformer transformers translation tree trial trials
triplet trivial true trunc tune tuning two type ucc uint ultrachat ultrafeedback uncased unet uniform up user
users usr v vae val valid validation value vanilla var verbose version vgg video vit voc vocab vqa w walker
wandb warmup warn warning wav wd week weight weights wer wgan whisper wide width wiki wikipedia wikitext window
wine with without wmt wnli word words work worker workers workspace world worst wsd www x xavier xformers xl xlm
xpu xs xxl y year yes yolo yolov yolox z zclip smoothed clean proj preds photo zero zeros zh
""".split()
)
"""Names of optimizers, data sets, models, devices and file types: settings, not secrets."""


def is_harmless(value: str) -> bool:
    """Return whether an option's value cannot be a secret.

    Args:
        value: The value as it was typed.

    Returns:
        Whether the value consists of numbers and known words, or names an existing file.

    Example:
        >>> [is_harmless(one) for one in ("0.1", "adamw", "[64,128]", "bert-base-uncased", "hunter2", "Xk29_qq")]
        [True, True, True, True, False, False]
    """
    if len(value) > _LONGEST_SHOWN:
        return False
    if not value or _NUMERIC.fullmatch(value):
        return len(value) <= 24
    return all(_is_known(piece) for piece in _SEPARATORS.split(value) if piece) or _is_there(value)


def has_entropy(text: str) -> bool:
    """Return whether a text contains a part that looks random: long, of mixed letters and digits.

    Args:
        text: Any text.

    Returns:
        Whether the text contains such a part.

    Example:
        >>> [*map(has_entropy, ("runs/2024-05-01_bert-large", "x=9f8a7c6b5d4e3f2a1b0c", "dGhpcyBpc0Eg1cmV0S2V5"))]
        [False, True, True]
    """
    return any(map(_is_random, re.findall(r"[A-Za-z0-9+]{14,}", text)))


def _is_known(piece: str) -> bool:
    if _NUMERIC.fullmatch(piece) or len(piece) <= 2:
        return len(piece) <= _LONGEST_DIGITS
    if piece.lower() in _WORDS:
        return True
    parts = _PARTS.findall(piece)
    known = all(part.lower() in _WORDS or (part.isdigit() and len(part) <= 6) for part in parts)
    return known and "".join(parts) == piece and sum(part.isdigit() for part in parts) <= 2 and len(parts) <= 6


def _is_there(value: str) -> bool:
    """Return whether ``value`` names an existing file or folder, and does not look random."""
    try:
        return os.path.lexists(Path(value).expanduser()) and not has_entropy(value)
    except (OSError, ValueError, RuntimeError):
        return False


def _is_random(run: str) -> bool:
    kinds = [any(map(str.islower, run)), any(map(str.isupper, run)), any(map(str.isdigit, run))]
    if sum(kinds) < 2:
        return len(run) >= 32 and _bits(run) > 3.2
    changes = sum(a.isdigit() != b.isdigit() for a, b in pairwise(run))
    return _bits(run) > 2.8 and (changes >= 4 or sum(kinds) == 3)


def _bits(run: str) -> float:
    """Return the entropy in bits per character, from the frequencies of the characters."""
    return -sum(n / len(run) * math.log2(n / len(run)) for n in Counter(run).values())

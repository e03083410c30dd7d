"""`gradguard env`: print the facts about the machine that a problem report needs."""

import argparse
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from gradguard.cli.program import Command

_NEIGHBOURS = (
    "numpy", "triton", "transformers", "accelerate", "trl", "lightning", "deepspeed", "keras", "torchtitan",
    "mosaicml", "opacus", "tensorboard", "wandb", "mlflow-skinny", "trackio",
)  # fmt: skip
_SETTINGS = (
    "GRADGUARD",
    "GRADGUARD_NATIVE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCHDYNAMO_DISABLE",
)


def _env(parsed: argparse.Namespace) -> int:
    del parsed
    import torch

    import gradguard

    cuda = torch.version.cuda or torch.version.hip or "none"
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    packages = []
    for name in _NEIGHBOURS:
        with suppress(PackageNotFoundError):
            packages.append(f"{name} {version(name)}")
    facts = {
        "gradguard": gradguard.__version__,
        "torch": f"{torch.__version__}, CUDA or ROCm: {cuda}, threads: {torch.get_num_threads()}",
        "Python": f"{platform.python_version()} ({sys.implementation.name})",
        "platform": f"{platform.platform(terse=True)} {platform.machine()}, {os.cpu_count()} cores",
        "compiled kernels": gradguard.native.status(),
        "devices": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "cpu",
        "packages": ", ".join(packages) or "none of those that gradguard works with",
        "settings": ", ".join(name for name in _SETTINGS if name in os.environ) or "none",
    }
    for name, value in facts.items():
        print(f"{name}: {value}")
    return 0


COMMAND = Command(
    "env",
    "index",
    _env,
    "print versions and devices, for a problem report",
    description="Lines to paste into an issue: versions, devices, and which settings are set, without their values. "
    "They contain no names of users, machines or folders.",
)

"""What PyTorch's float32 switches say after `full_float32`, beside a process that never entered it.

A program sets some switches, enters the block or not, and sets others later: both processes have to read the same at
every step. Prints each program in which something else is read, or in which the block does not compute in float32.
Each runs in a process of its own, since some switches cannot be put back by hand.
"""

import itertools
import json
import os
import random
import sys

import torch

from gradguard.tensors.matmul_precision import full_float32

B = torch.backends
PROGRAM = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cuda.matmul.allow_tf32": lambda: setattr(B.cuda.matmul, "allow_tf32", True),
    "not cudnn.allow_tf32": lambda: setattr(B.cudnn, "allow_tf32", False),
    "all tf32": lambda: setattr(B, "fp32_precision", "tf32"),
    "all ieee": lambda: setattr(B, "fp32_precision", "ieee"),
    "cudnn tf32": lambda: setattr(B.cudnn, "fp32_precision", "tf32"),
    "cudnn ieee": lambda: setattr(B.cudnn, "fp32_precision", "ieee"),
    "cuda.matmul tf32": lambda: setattr(B.cuda.matmul, "fp32_precision", "tf32"),
    "cudnn.conv ieee": lambda: setattr(B.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn.rnn tf32": lambda: setattr(B.cudnn.rnn, "fp32_precision", "tf32"),
    "mkldnn.matmul bf16": lambda: setattr(B.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn.conv bf16": lambda: setattr(B.mkldnn.conv, "fp32_precision", "bf16"),
    "mkldnn bf16": lambda: B.mkldnn.set_flags(_fp32_precision="bf16"),
}
LATER = (
    ("B.fp32_precision = ieee", lambda: setattr(B, "fp32_precision", "ieee")),
    ("B.fp32_precision = tf32", lambda: setattr(B, "fp32_precision", "tf32")),
    ("B.fp32_precision = none", lambda: setattr(B, "fp32_precision", "none")),
    ("cudnn.fp32_precision = ieee", lambda: setattr(B.cudnn, "fp32_precision", "ieee")),
)
CUDNN = {"cudnn.conv", "cudnn.rnn", "older cudnn"}
"""Of these the default of TF32 cannot be told from one that was set, and is written out."""

OLDER = {
    "older products": torch.get_float32_matmul_precision,
    "older cuda": lambda: B.cuda.matmul.allow_tf32,
    "older cudnn": lambda: B.cudnn.allow_tf32,
}
READ = {
    "all": lambda: B.fp32_precision,
    "mkldnn": lambda: B.mkldnn.fp32_precision,
    "mkldnn.matmul": lambda: B.mkldnn.matmul.fp32_precision,
    "mkldnn.conv": lambda: B.mkldnn.conv.fp32_precision,
    "mkldnn.rnn": lambda: B.mkldnn.rnn.fp32_precision,
    "cudnn": lambda: B.cudnn.fp32_precision,
    "cuda.matmul": lambda: B.cuda.matmul.fp32_precision,
    "cudnn.conv": lambda: B.cudnn.conv.fp32_precision,
    "cudnn.rnn": lambda: B.cudnn.rnn.fp32_precision,
    **OLDER,
}


def said():
    found = {}
    for name, read in READ.items():
        try:
            found[name] = read()
        except RuntimeError:  # older and newer switches were mixed
            found[name] = "raises"
    return found


def run(names, enters):
    """Return what is read before, in the block, after it, and after each later change."""
    for name in names:
        PROGRAM[name]()
    steps = [("before", said())]
    if enters:
        with full_float32():
            steps.append(("in the block", said()))
    else:
        steps.append(("in the block", {}))
    steps.append(("after", said()))
    for words, change in LATER:
        change()
        steps.append((words, said()))
    return steps


def in_a_process(names, enters):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as stream:
            json.dump(run(names, enters), stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return found


def wrong(names, has_gpu):
    entered, twin = in_a_process(names, True), in_a_process(names, False)
    before, inside = entered[0][1], entered[1][1]
    switches = [name for name in inside if "." in name and (has_gpu or name.startswith("mkldnn"))]
    found = [f"{name} is {inside[name]} in the block" for name in switches if inside[name] not in ("none", "ieee")]
    mixed = before["older products"] == "raises"  # then that of CUDA says nothing either
    older = {"older products"} if not has_gpu else {"older cudnn"} if mixed else set(OLDER)
    found += [f"{name} raises in the block" for name in older if inside[name] == "raises" != before[name]]
    for (words, mine), (_, theirs) in zip(entered, twin, strict=True):
        for name in theirs:
            is_default = has_gpu and name in CUDNN and words not in ("before", "after")
            if mine[name] != theirs[name] and not is_default:
                found.append(f"{words}: {name} is {mine[name]}, {theirs[name]} without the block")
    return found


def main(count):
    """Run all programs with a GPU and without, or ``count`` pairs and each switch alone, with one by turns."""
    programs = [(), *((name,) for name in PROGRAM), *itertools.permutations(PROGRAM, 2)]
    is_drawn = count < len(programs)
    if is_drawn:
        programs = programs[: 1 + len(PROGRAM)] + random.Random(0).sample(programs[1 + len(PROGRAM) :], count)
    for has_gpu in (False, True):
        torch.cuda.is_available = lambda has_gpu=has_gpu: has_gpu
        for names in programs[has_gpu::2] if is_drawn else programs:
            for one in wrong(names, has_gpu):
                print(f"{'with' if has_gpu else 'without'} a GPU, {list(names)}: {one}")
    print(len(programs), "programs")


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""What the audit says of real engines, each on processes of its own; the true norm is that of a twin in float64."""

import re
from pathlib import Path

import pytest

from forked_python import run_ranks

SCRIPT = Path(__file__).with_name("audited_training.py")

ENGINES = {
    "ddp": 0, "fsdp1": 1, "fsdp1_method": 0, "fsdp2": 0, "accelerate": 0, "trainer": 0, "lightning": 0, "fabric": 0,
    "torchtitan": 0, "torchtitan_experts": 0, "accelerate_two_meshes": 0, "trainer_two_meshes": 0,
    "zero0": 0, "zero1": 0, "zero2": 0, "zero3": 0, "zero1_bf16": 0, "zero0_fp16": 0, "zero_experts": 1,
    "zero_experts_fp16": 1,
}  # fmt: skip
"""The engine, and the verdict as an exit code."""

PACKAGES = {
    "accelerate": "accelerate", "accelerate_two_meshes": "accelerate", "trainer": "transformers",
    "trainer_two_meshes": "transformers", "lightning": "lightning", "fabric": "lightning",
}  # fmt: skip
"""Those that take seconds to import; DeepSpeed too."""

SAID = {
    "zero_experts": "mean: 1 tensor in 2 parts counts 0.5 times: the norms of the ranks are averaged",  # DeepSpeed#8475
    "zero_experts_fp16": "2 tensors in 2 parts count 0 times, the only explanation: it is left out",  # DeepSpeed#8613
}

SAMPLE = {"fsdp1", "lightning", "torchtitan_experts", "zero_experts_fp16"}
"""One of each package; those beside it import the same one and take nearly the same way."""


def audited(kind, processes, folder):
    settings = {"AUDIT_FOLDER": str(folder), "DS_ACCELERATOR": "cpu"}
    command = ["-m", "gradguard", "run", "--audit-norm", SCRIPT, kind]
    package = "deepspeed" if kind.startswith("zero") else PACKAGES.get(kind, "")
    ranks = run_ranks(processes, *command, cwd=folder, env=settings, check=False, timeout=500, preloaded=package)
    shown = "".join(rank.stdout for rank in ranks)
    said = re.search(r"^(PASS|FAIL|INCONCLUSIVE) +true norm ([\d.]+).*?(\d+) processes", shown, re.MULTILINE)
    twin = re.search(r"^twin ([\d.]+)$", shown, re.MULTILINE)
    assert said is not None, shown + "".join(rank.stderr[-3000:] for rank in ranks)
    assert twin is not None, shown
    return said[1], float(said[2]), float(twin[1]), int(said[3]), shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ENGINES]
)
def test_engines_on_two_processes(kind, tmp_path):
    verdict, true, twin, processes, shown = audited(kind, 2, tmp_path)
    assert (verdict, processes) == (("PASS", "FAIL")[ENGINES[kind]], 2), shown
    assert SAID.get(kind, "") in shown
    assert true == pytest.approx(twin, rel=1e-2 if "16" in kind else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_more_processes(world, tmp_path):
    verdict, true, twin, processes, shown = audited("fsdp2", world, tmp_path)
    assert (verdict, processes) == ("PASS", world), shown
    assert true == pytest.approx(twin, rel=2e-5)

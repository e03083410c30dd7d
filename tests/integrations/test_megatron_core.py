"""Megatron-core's own layers and norm, from torchrun to the verdict: `examples/megatron_core.py` and its page."""

from pathlib import Path

import pytest

from forked_python import run_ranks
from gradguard.parity.compare import compare

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

SCRIPT = Path(__file__).parents[2] / "examples/megatron_core.py"
SAID = {
    "": ("PASS", ""),
    "norm": ("count 2 times", ""),
    "gradient": ("INCONCLUSIVE", "ranks: a mean over 2 ranks is missing in the new run"),
    "step": ("PASS", "state before step 1: extra"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sick", SAID)
def test_one_rank_and_two(sick, tmp_path):
    run_ranks(1, SCRIPT, "one", cwd=tmp_path)
    (first, _) = run_ranks(2, SCRIPT, "two", *(("--sick", sick) if sick else ()), cwd=tmp_path)
    audit, parity = SAID[sick]
    assert audit in first.stdout
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.verdict == ("FAIL" if parity else "PASS"), str(report)
    assert parity in str(report)

"""Fixed seeds, samples of the long tables, and the device path of every kernel run on the CPU."""

import gc
import os
import sys
from collections import defaultdict
from pathlib import Path
from zlib import crc32

if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine need not be able to resolve its own name

import pytest
import torch
from hypothesis import HealthCheck, settings

from gradguard.tensors import layout
from gradguard.watch import names

settings.register_profile(  # however slow the machine is
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("repeatable")

SAMPLED = {
    "distributed/test_adaptive_on_shards.py": 3,
    "distributed/test_collectives.py": 3,
    "distributed/test_guard_on_shards.py": 3,
    "distributed/test_norm_on_shards.py": 3,
    "distributed/test_rules_on_shards.py": 3,
    "error_clip/test_compiled.py": 3,
    "error_clip/test_compiled_code.py": 3,
    "error_clip/test_distributed_training.py": 2,
    "gradient_check/test_sets.py": 2,
    "integrations/test_keras_optimizer.py": 2,
    "per_sample/test_bounds.py": 3,
    "per_sample/test_compiled_modules.py": 3,
    "per_sample/test_oracle.py": 3,
    "private/test_accounting.py": 2,
    "test_cli.py::test_observing_leaves_the_weights_bit_identical": 3,
    "watch/test_observer_processes.py": 3,
    "watch/test_report_browser.py": 2,
}
"""``make test`` runs one row in so many of the tables there, the same ones every time; ``make exhaustive`` runs all."""


def pytest_collection_modifyitems(items):
    assert all((Path(__file__).parent / key.partition("::")[0]).exists() for key in SAMPLED)
    tables = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and Path(__file__).parent in item.path.parents:
            file = item.path.relative_to(Path(__file__).parent).as_posix()
            tables[file, f"{file}::{item.originalname}"].append(item)
    for keys, rows in tables.items():
        one_in = max(SAMPLED.get(key, 1) for key in keys)
        kept = [row for row in rows if crc32(row.name.encode()) % one_in == 0] or rows[:1]
        for row in rows:
            if row not in kept:
                row.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish():
    """Millions of objects of imported packages are there for good: spare the collector from looking at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_terminal(monkeypatch):
    """80 columns without colours, whatever the tests are started from."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["host", "device"])
def path(request, monkeypatch) -> str:
    """Run a test twice: as on the CPU, and as on an accelerator, where Python may not look at values."""
    if request.param == "device":
        blind = lambda *tensors: False  # noqa: E731
        for name in ("norms", "scaling", "units", "nonfinite"):
            monkeypatch.setattr(f"gradguard.tensors.{name}.are_readable", blind)
        monkeypatch.setattr("gradguard.arguments.are_readable", blind)
    assert layout.are_readable(torch.zeros(1))
    return request.param


@pytest.fixture
def others_unseen(monkeypatch):
    """Let a watch see none of what other tests have left alive: compiled code, for one, keeps its globals for ever."""
    living = names._living
    left = {id(thing): thing for base in (torch.nn.Module, torch.optim.Optimizer) for thing in living(base)}
    monkeypatch.setattr(names, "_living", lambda base: [thing for thing in living(base) if id(thing) not in left])

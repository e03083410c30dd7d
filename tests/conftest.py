"""Fixed seeds, samples of the long tables, and the device path of every kernel run on the CPU."""

import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

if sys.platform != "win32":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup processes would inherit that it is ignored
if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine need not be able to resolve its own name

import pytest
import torch
from hypothesis import HealthCheck, settings

import pretend_device
from gradguard import native
from gradguard.tensors import layout
from samples import sample

# However slow the machine is. `make test` draws the same cases each time, `make exhaustive` new and more of them.
repeatable = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60, database=None
)
settings.register_profile("repeatable", repeatable)
settings.register_profile("deep", repeatable, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")

for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():  # it would keep each seed, with a stack in text, for the day when a device is there
        kind.manual_seed_all = lambda seed: None


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", default="1/1", help="run every N-th test, from the I-th on")
    parser.addoption("--device", default="", help="where tests make tensors and models: cuda, or lazy (pretend_device)")


def pytest_configure(config):
    device = config.getoption("device", "")
    if device == pretend_device.DEVICE.type:
        pretend_device.Makes().__enter__()
    elif device:
        torch.Generator = _generators(torch.Generator, device)
    if device:
        torch.set_default_device(device)


def _generators(original, device):
    """Replace `torch.Generator`: a generator that a test creates without a device is on the tests' device."""

    class OfAnyDevice(type):
        def __instancecheck__(cls, one):
            return isinstance(one, original)

        def __call__(cls, asked=None):
            in_a_test = Path(sys._getframe(1).f_code.co_filename).is_relative_to(Path(__file__).parent)
            return original(asked or (device if in_a_test else "cpu"))

    return OfAnyDevice("Generator", (), {})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid}: another process gives this test another name"
    _leave_rows_to_exhaustive(items)
    part, parts = map(int, config.getoption("part", "1/1").split("/"))
    assert 1 <= part <= parts, f"--part {part}/{parts}"
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1 :: parts]


def _leave_rows_to_exhaustive(items):
    """Mark the rows of tables that `make test` omits: rows each of whose values occurs in other rows too."""
    files = defaultdict(lambda: defaultdict(list))
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("exhaustive") is None:
            files[item.path][item.nodeid.partition("[")[0]].append(item)
    for tables in files.values():
        for number, rows in enumerate(tables.values()):
            asked = rows[0].get_closest_marker("sampled")
            drawn = sample([_values(row) for row in rows], *(asked.args if asked else ()), shift=number)
            for i in set(range(len(rows))).difference(drawn):
                rows[i].add_marker(pytest.mark.exhaustive)


def _values(item):
    """Return the content of a row: each parameter, and one entry for the row of each ``parametrize``."""
    return {**item.callspec.params, **{f"row {i}": name for i, name in enumerate(item.callspec._idlist)}}


def put_aside():
    """Hide millions of live objects from the collector, and from code that asks it for live objects."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # or gradguard would look among them all the same


def pytest_collection_finish():
    put_aside()


@pytest.fixture(scope="module", autouse=True)
def _what_other_files_have_imported():
    put_aside()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_program(monkeypatch):
    """Remove the modules that scripts of a test leave, which processes spawned later would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.fixture(autouse=True)
def _same_terminal(monkeypatch):
    """Set 80 columns without colours, independent of the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["native", "host", "device"])
def path(request, monkeypatch) -> str:
    """Run a test three times: with the compiled kernels, with torch's on the CPU, and as on an accelerator."""
    if not torch.zeros(()).is_cpu:
        if request.param != "device":
            pytest.skip("for the CPU")
        return request.param
    if request.param == "native":
        if not native.status().in_use:
            pytest.skip(str(native.status()))
        return "host"
    monkeypatch.setattr(native, "library", lambda: None)
    if request.param == "device":
        blind = lambda *tensors: False  # noqa: E731
        for name in ("norms", "scaling", "units", "nonfinite"):
            monkeypatch.setattr(f"gradguard.tensors.{name}.are_readable", blind)
        monkeypatch.setattr("gradguard.arguments.are_readable", blind)
    assert layout.are_readable(torch.zeros(1))
    return request.param


@pytest.fixture
def without_kernels(monkeypatch) -> None:
    """Run a test without the compiled kernels."""
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(params=["native", "torch"])
def kernels(request) -> str:
    """Run a test twice: with the compiled kernels, if there are any, and without."""
    if request.param == "native" and not torch.zeros(()).is_cpu:
        pytest.skip("for the CPU")
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return request.param


@pytest.fixture
def others_unseen():
    """Hide from a watch the objects that other tests have left alive, such as the globals of compiled code."""
    put_aside()

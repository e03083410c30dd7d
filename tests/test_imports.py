"""What is loaded when: the public list is lazy, and commands that read records do without PyTorch."""

import importlib
import json
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gradguard as gg
from gradguard.monitoring.record.file import RecordWriter

SOURCE = Path(gg.__file__)
ROOT = Path(__file__).parents[1]
LOADED = "; import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_after(code: str, *arguments: object) -> set[str]:
    """The names of all modules that a fresh Python has loaded after `code`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_gradguard(modules: set[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in modules if name.startswith("gradguard.")}


@pytest.mark.slow
def test_importing_gradguard_loads_nothing_else():
    before, after = modules_after("pass" + LOADED), modules_after("import gradguard" + LOADED)
    new = {name for name in after - before if not name.startswith("importlib")}
    assert {"gradguard"} <= new <= {"gradguard", "types", "warnings"}


@pytest.mark.slow
def test_a_clip_loads_clipping_alone():
    after = modules_after("import torch, gradguard as gg; gg.clip_grad_norm_" + LOADED)
    rooms = {"clip", "listeners", "living", "distributed", "module_hooks", "tensors", "threshold_formulas"}
    floors = {"arguments", "errors", "native", "policies", "replacements", "torch_private", "words"}
    assert of_gradguard(after) <= {f"gradguard.{name}" for name in rooms | floors}
    assert not {"rich", "jinja2", "plotly", "dp_accounting"} & after


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-h"],
        ["--version"],
        ["report", "-h"],
        ["report", "RECORD"],
        ["report", "--text", "--fail-on", "nonfinite_steps>1e9", "RECORD"],
        ["replay", "RECORD"],
        ["tail", "--once", "RECORD"],
        ["tune", "-h"],
        ["parity", "-h"],
    ],
    ids=" ".join,
)
def test_a_command_about_records_does_without_torch(tmp_path, command):
    path = tmp_path / "run.jsonl"
    if "RECORD" in command:
        with RecordWriter(path) as writer:
            writer.write("meta", params=[{"name": "weight", "numel": 4}])
            for i in range(60):
                writer.write("step", i=i, norm=1.0 + i % 7, loss=2.0)
                writer.write("tensors", i=i, norm=[1.0 + i % 7])
    code = "import sys, atexit; atexit.register(lambda: print(__import__('json').dumps(sorted(sys.modules)))); "
    run = code + "from gradguard.cli import main; sys.exit(main())"
    after = modules_after(run, *(path if word == "RECORD" else word for word in command))
    assert not {"torch", "numpy", "plotly"} & after
    known = (
        "cli",
        "errors",
        "files",
        "json_values",
        "named_rules",
        "monitoring",
        "threshold_formulas",
        "threshold_rules",
        "words",
    )
    assert of_gradguard(after) <= {f"gradguard.{name}" for name in known}


def test_no_public_name_hides_a_package():
    modules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules & set(gg.__all__) == {name for name, home in gg._MODULE_OF.items() if home == "gradguard"}


@pytest.mark.slow
def test_the_rooms_of_monitoring_are_imported_by_name_and_without_torch():
    rooms = "record", "record.file", "judge", "judge.judgement", "show", "show.live_tail"
    code = "; ".join(f"import gradguard.monitoring.{room}; gradguard.monitoring.{room}" for room in rooms)
    assert "torch" not in modules_after(code + LOADED)


def test_type_checkers_are_given_the_same_names():
    writer = runpy.run_path(str(ROOT / ".ci/public_list.py"))
    assert SOURCE.with_suffix(".pyi").read_text(encoding="utf-8") == writer["stub"](), "run python .ci/public_list.py"


def test_every_name_is_what_its_module_holds():
    for name, module in gg._MODULE_OF.items():
        home = importlib.import_module(module)
        assert getattr(gg, name) is (
            importlib.import_module(f"gradguard.{name}") if home is gg else getattr(home, name)
        )


def test_it_looks_like_any_module():
    assert set(gg.__all__) <= set(dir(gg))
    assert "__version__" in dir(gg)
    assert not hasattr(gg, "clip_grad_nrom_")
    with pytest.raises(AttributeError, match="module 'gradguard' has no attribute 'Gaurd'"):
        gg.Gaurd  # noqa: B018
    everything = {}
    exec("from gradguard import *", everything)
    assert set(gg.__all__) <= set(everything)
    for name in ("watch", "error_clip", "Guard", "Monitor"):
        assert pickle.loads(pickle.dumps(getattr(gg, name))) is getattr(gg, name)


WITHOUT_NUMPY = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["numpy"] = None
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import gradguard as gg
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
model(torch.randn(6, 4)).square().mean().backward()
clipper.clip_and_accumulate()
print(len(clipper.statistics.norms))
clipper.detach()
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
try:
    gg.audit_norm(model, lambda: 1.0)
except gg.errors.MissingPackageError as error:
    print(error)
"""


@pytest.mark.slow
def test_samples_are_clipped_without_numpy_and_processes_that_need_it_are_told():
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    norms, refusal = done.stdout.splitlines()
    assert norms == "6"
    assert refusal == "PyTorch needs NumPy to exchange objects between processes: pip install numpy"

"""`GRADGUARD=run.jsonl python train.py`, launchers, and processes that a script starts."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradguard as gg
from forked_python import run_python, run_pythons
from gradguard.monitoring.observe import start_up, termination
from gradguard.monitoring.observe import watch as process
from gradguard.monitoring.record.file import read_record

pytestmark = [pytest.mark.sampled(1), pytest.mark.slow]

TRAIN = """
import os, sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

def train(steps):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

if __name__ == "__main__":
    {main}
"""


@pytest.fixture
def python(tmp_path):
    """Run Python where gradguard's start-up file is installed, as a wheel installs it."""
    site, home = tmp_path / "site", Path(start_up.__file__).parent
    site.mkdir()
    shutil.copy(home / "start_up.py", site / "_gradguard_start_up.py")
    shutil.copy(home / "start_up.pth", site / "sitecustomize.py")  # run like the line of a .pth file

    def run(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        folders = os.pathsep.join([str(site), str(Path(gg.__file__).parents[1])])
        variables = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=variables,
            check=check,
            timeout=240,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def command(tmp_path):
    """Run ``gradguard`` with these arguments, forked, where Python's start is of no account."""
    return lambda *arguments, **more: run_python("-m", "gradguard", *arguments, cwd=tmp_path, **more)


def write(tmp_path: Path, main: str) -> None:
    tmp_path.joinpath("train.py").write_text(TRAIN.format(main=main))


def records(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("*.jsonl"))


@pytest.mark.exhaustive
def test_the_wheel_holds_all_that_the_package_imports(tmp_path):
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, timeout=240, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    imports = "import gradguard.cli; from gradguard import *"
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); {imports}; print(gradguard.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=240, capture_output=True, text=True)
    assert done.stdout.startswith(str(wheel)), done.stderr
    assert (process.VARIABLE, process.OWNER) == (start_up.VARIABLE, start_up.OWNER)


def test_the_variable_alone_watches_a_script(python, tmp_path):
    write(tmp_path, "train(4); import gradguard; raise ValueError('at the end')")
    assert python("train.py", check=False, GRADGUARD="run.jsonl").returncode == 1
    record = read_record(tmp_path / "run.jsonl")
    assert record.meta["argv"] == ["train.py"]
    assert [step["threshold"] for step in record.steps] == [0.5] * 4
    assert (record.end["steps"], record.end["exit"]) == (4, 1)


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_is_imported(python, value):
    code = "import sys; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'gradguard')], sys.meta_path[0])"
    done = python("-c", code, **({} if value is None else {"GRADGUARD": value}))
    assert done.stdout.startswith("[] ")
    assert "gradguard" not in done.stdout


def test_with_the_variable_torch_is_not_imported_before_the_script_does(python, tmp_path):
    done = python("-c", "import sys; print('torch' in sys.modules)", GRADGUARD="run.jsonl")
    assert done.stdout == "False\n"
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import gradguard",
        "import torch.optim, gradguard, torch",
        "import gradguard; gradguard.clip_grad_norm_",
        "import gradguard; gradguard.Monitor",
        "from gradguard import *",
    ],
)
def test_whichever_is_imported_first(python, tmp_path, first):
    train = "p = torch.nn.Parameter(torch.ones(1)); p.sum().backward(); torch.optim.SGD([p]).step()"
    code = f"{first}; import torch; {train}"
    done = python("-c", code, GRADGUARD="run.jsonl")
    assert done.stderr == ""
    assert read_record(tmp_path / "run.jsonl").end["steps"] == 1


@pytest.mark.exhaustive
def test_spawned_children_write_files_of_their_own(python, tmp_path):
    main = """import multiprocessing
    train(2)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pool.map(train, [3, 4], chunksize=1)
        pool.close()
        pool.join()"""
    write(tmp_path, main)
    python("train.py", GRADGUARD="run.jsonl")
    names = records(tmp_path)
    assert len(names) == 3
    assert sorted(len(read_record(tmp_path / name).steps) for name in names) == [2, 3, 4]
    assert len(read_record(tmp_path / "run.jsonl").steps) == 2


DISTRIBUTED = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive  # test_observer_sharded.py runs torchrun too
def test_torchrun_writes_one_record(python, tmp_path):
    tmp_path.joinpath("train.py").write_text(DISTRIBUTED)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(*launch, "-m", "gradguard", "run", "--out", "out", "train.py")
    assert done.stderr.count("report: ") == 1
    record = read_record(tmp_path / "out")
    assert (record.meta["world"], record.meta["rank"], len(record.steps)) == (2, 0, 3)
    python(*launch, "train.py", GRADGUARD="by_variable.jsonl")
    assert records(tmp_path) == ["by_variable.jsonl"]
    assert len(read_record(tmp_path / "by_variable.jsonl").steps) == 3


ACCELERATED = """
import torch
from accelerate import Accelerator
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model, optimizer = torch.nn.Linear(3, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 3)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_accelerate_s_own_clip_is_learnt(command, tmp_path):
    pytest.importorskip("accelerate")
    tmp_path.joinpath("train.py").write_text(ACCELERATED)
    command("run", "--out", "out", "train.py")
    assert [step["threshold"] for step in read_record(tmp_path / "out").steps] == [0.5] * 3


FSDP1 = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    norm = model.clip_grad_norm_(0.5)
    if dist.get_rank() == 0:
        print("norm", float(norm))
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_fsdp1_gives_the_norm_that_its_own_clip_tells(python, tmp_path):
    tmp_path.joinpath("train.py").write_text(FSDP1)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(*launch, "-m", "gradguard", "run", "--out", "out", "train.py")
    told = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("norm ")]
    record = read_record(tmp_path / "out")
    assert record.events == []
    assert [step["norm"] for step in record.steps] == pytest.approx(told, rel=1e-5)
    assert [step["threshold"] for step in record.steps] == [0.5] * 3
    (norms,) = {len(line["norm"]) for line in record.tensors}
    assert norms == len(record.meta["params"])
    for step, line in zip(record.steps, record.tensors, strict=True):
        assert sum(norm**2 for norm in line["norm"]) ** 0.5 == pytest.approx(step["norm"], rel=1e-3)


KILLED = """
import os, time, torch
p = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([p], lr=0.1)
for _ in range(120):
    p.sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_script_that_ends_without_a_word_leaves_what_was_flushed(command, tmp_path, end, code):
    tmp_path.joinpath("train.py").write_text(KILLED.format(end=end))
    assert command("run", "--out", "out", "train.py", check=False).returncode == code
    record = read_record(tmp_path / "out")
    assert len(record.steps) in (50, 100)  # the newest block may still be on its way to the file
    assert record.end is None
    assert not record.torn


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_an_end_in_a_record_that_the_variable_asked_for(python, tmp_path, number):
    tmp_path.joinpath("train.py").write_text(KILLED.format(end=f"os.kill(os.getpid(), {number:d}); time.sleep(60)"))
    assert python("train.py", check=False, GRADGUARD="run.jsonl").returncode == -number
    record = read_record(tmp_path / "run.jsonl")
    assert (len(record.steps), record.end["exit"], record.end["interrupted"]) == (120, 128 + number, True)


@pytest.mark.exhaustive
def test_a_second_run_at_the_same_path_keeps_the_first(python, tmp_path):
    write(tmp_path, "train(4)")
    python("train.py", GRADGUARD="run.jsonl")
    first = (tmp_path / "run.jsonl").read_bytes()
    assert (
        "run.jsonl exists and is kept: this run is recorded in run-2.jsonl"
        in python("train.py", GRADGUARD="run.jsonl").stderr
    )
    assert records(tmp_path) == ["run-2.jsonl", "run.jsonl"]
    assert (tmp_path / "run.jsonl").read_bytes() == first
    assert len(read_record(tmp_path / "run-2.jsonl").steps) == 4


SPAWNED = """
import torch
from train import train
from torch.utils.data import DataLoader

def work(rank):
    train(3 + rank)

if __name__ == "__main__":
    for _ in DataLoader(torch.ones(4), num_workers=1, multiprocessing_context="spawn"):
        pass
    torch.multiprocessing.spawn(work, nprocs=1)
    {main}
"""


@pytest.mark.parametrize(("main", "own"), [("train(2)", [2]), ("pass", [])])
def test_spawned_children_are_seen_by_the_command_too(command, tmp_path, main, own):
    write(tmp_path, "pass")
    tmp_path.joinpath("spawn.py").write_text(SPAWNED.format(main=main))
    done = command("run", "--out", "out", "--clip", "norm=1", "spawn.py")
    names = records(tmp_path / "out")
    assert sorted(len(read_record(tmp_path / "out" / name).steps) for name in names) == [*own, 3]
    assert done.stderr.count("a process that it started has the record out/run.") == 1
    first = next(name for name in names if name != "run.jsonl")
    no_step = f"this process made no optimizer step, others did; draw one: gradguard report out/{first}"
    assert (no_step in done.stderr) is not bool(own)
    assert len({read_record(tmp_path / "out" / name).meta["root"] for name in names}) == 1
    assert ("report: out/run.html" in done.stderr) is bool(own)
    assert "--clip acts in this process alone: the processes that it started were watched, not clipped" in done.stderr


AT_ONCE = """
import os, time
from pathlib import Path
from train import train

def both(pattern):
    while sum(path.stat().st_size > 0 for path in Path(".").glob(pattern)) < 2:
        time.sleep(0.02)

Path(f"{os.getpid()}.began").write_text("before a record is there")
both("*.began")
train(3)
both("out/*.jsonl")
"""


def test_two_runs_into_one_folder_tell_whose_records_are_there(tmp_path):
    write(tmp_path, "pass")
    tmp_path.joinpath("both.py").write_text(AT_ONCE)
    command = ("-m", "gradguard", "run", "--no-report", "--out", "out", "both.py")
    both = run_pythons([command, command], cwd=tmp_path, env=[{}, {}], timeout=240)
    assert [done.returncode for done in both] == [0, 0]
    pids = {name: read_record(tmp_path / "out" / name).meta["pid"] for name in records(tmp_path / "out")}
    said = sorted(line for done in both for line in done.stderr.splitlines() if " has the record " in line)
    told = sorted(f"gradguard: another run, process {pid}, has the record out/{name}" for name, pid in pids.items())
    assert said == told
    assert len(told) == 2


@pytest.mark.exhaustive
def test_workers_of_a_data_loader_and_a_compiled_model(command, tmp_path):
    main = """from torch.utils.data import DataLoader
    model = torch.compile(nn.Linear(3, 1), backend="eager", fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    for batch in DataLoader(torch.randn(12, 3), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch).sum().backward()
        step()"""
    write(tmp_path, main)
    command("run", "--out", "out", "train.py")
    record = read_record(tmp_path / "out")
    assert [step["i"] for step in record.steps] == [0, 1, 2]
    assert record.events == []


FORKED = """
import multiprocessing, os, time, torch
from train import train
from torch.utils.data import DataLoader

def killed(pipe):
    train(5)
    pipe.send("trained")
    time.sleep(60)

if __name__ == "__main__":
    train(2)
    for _ in DataLoader(torch.ones(4), num_workers=2, multiprocessing_context="fork"):
        pass
    context = multiprocessing.get_context("fork")
    process = context.Process(target=train, args=(7,))
    process.start()
    process.join()
    ours, theirs = context.Pipe()
    process = context.Process(target=killed, args=(theirs,))
    process.start()
    ours.recv()
    process.terminate()
    process.join()
    print("ended by", process.exitcode)
    train(1)
"""


@pytest.mark.parametrize(
    "by_command", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["run", "GRADGUARD"]
)
def test_a_forked_child_that_trains_has_a_record_of_its_own(python, command, tmp_path, by_command):
    write(tmp_path, "pass")
    tmp_path.joinpath("fork.py").write_text(FORKED)
    if by_command:
        done = command("run", "--no-report", "--out", ".", "fork.py")
    else:
        done = python("fork.py", GRADGUARD="run.jsonl")
    assert "ended by -15" in done.stdout  # as without us
    assert len(read_record(tmp_path / "run.jsonl").steps) == 3
    assert read_record(tmp_path / "run.jsonl").end is not None
    children = [read_record(tmp_path / name) for name in records(tmp_path) if name != "run.jsonl"]
    ended = {len(record.steps): record.end for record in children}
    assert sorted(ended) == [5, 7]
    assert [ended[7].get(key) for key in ("exit", "interrupted")] == [None, False]
    assert [ended[5].get(key) for key in ("exit", "interrupted")] == [143, True]


FORCED = """
import torch
from train import train

def work(rank, size):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    train(3)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
    {main}
"""


@pytest.mark.parametrize(("main", "names"), [("pass", ["run.jsonl"]), ("train(2)", ["run-2.jsonl", "run.jsonl"])])
def test_force_lets_a_child_of_rank_0_replace_the_record_and_then_keeps_it(command, tmp_path, main, names):
    write(tmp_path, "pass")
    tmp_path.joinpath("spawn.py").write_text(FORCED.format(main=main))
    tmp_path.joinpath("run.jsonl").write_text('{"t": "meta"}\n')
    done = command("run", "--force", "--no-report", "--out", ".", "spawn.py")
    assert records(tmp_path) == names
    assert len(read_record(tmp_path / "run.jsonl").steps) == 3
    assert "no record" not in done.stderr


GUESTS = {
    "watch": "watching = gg.watch('run.jsonl')",
    "Monitor": "watching = gg.Monitor(optimizer, sink='run.jsonl'); other = gg.Monitor(twin, sink='other.jsonl')",
}
TERMINATED = """
import os, signal, sys, time, torch
import gradguard as gg
optimizer, twin = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
{handler}
{guest}
for step in range(5):
    for one in (optimizer, twin):
        one.param_groups[0]["params"][0].sum().backward()
        one.step()
os.kill(os.getpid(), {number:d})
time.sleep(0.01)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize(
    ("handler", "code", "ended"),
    [
        ("", None, {"interrupted": True}),
        ("lambda *_: os._exit(7)", 7, None),
        ("lambda *_: print('saved', flush=True)", 0, {"interrupted": False}),
        ("signal.SIG_IGN", 0, {"interrupted": False}),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_completes_a_record_and_ends_the_process_as_without_it(tmp_path, guest, number, handler, code, ended):
    code = -number if code is None else code
    handled = handler and f"signal.signal({number:d}, {handler})"
    source = TERMINATED.format(guest=GUESTS[guest], handler=handled, number=number)
    done = run_python("-c", source, cwd=tmp_path, check=False)
    assert done.returncode == code, done.stderr
    assert ("saved" in done.stdout) == ("saved" in handler)
    for name, steps in {"run.jsonl": 5 if guest == "Monitor" else 10, "other.jsonl": 5}.items():
        if guest == "Monitor" or name == "run.jsonl":
            record = read_record(tmp_path / name)
            assert len(record.steps) == steps
            assert (record.end and {key: record.end.get(key) for key in ended or {}}) == ended
            assert record.end is None or record.end.get("exit") == (
                128 + number if code < 0 else None if guest == "watch" else 0
            )


def test_the_signal_is_given_back_with_the_last_watcher(monkeypatch):
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) for _ in range(2)]

    def mine(number, frame):
        raise AssertionError

    monkeypatch.setattr(termination, "_guests", {})
    before = signal.signal(signal.SIGTERM, mine)
    try:
        monitors = [gg.Monitor(optimizer, sink=[]) for optimizer in optimizers]
        assert signal.getsignal(signal.SIGTERM) is not mine
        monitors[0].close()
        assert signal.getsignal(signal.SIGTERM) is not mine
        monitors[1].close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


POOL = """
import concurrent.futures, sys, threading, time
if __name__ == "__main__":
    pool = concurrent.futures.ProcessPoolExecutor(1)
    print(pool.submit(abs, -3).result())
    threads = concurrent.futures.ThreadPoolExecutor(1)
    threads.submit(lambda: (time.sleep(0.2), print("later", flush=True)))
    sys.exit(4)
"""


@pytest.mark.exhaustive
def test_executors_that_a_script_leaves_open_do_not_keep_it(command, tmp_path):
    tmp_path.joinpath("train.py").write_text(POOL)
    done = command("run", "--out", "out", "train.py", check=False)
    assert done.returncode == 4
    assert done.stdout.split() == ["3", "later"]
    assert "there is no record" in done.stderr


@pytest.mark.exhaustive
def test_threads_that_train_at_once_have_each_their_own_clips(python, tmp_path):
    main = "\n    ".join([
        "import threading",
        "sys.setswitchinterval(1e-5)",
        "threads = [threading.Thread(target=train, args=(60,)) for _ in range(3)]",
        "[t.start() for t in threads]",
        "[t.join() for t in threads]",
    ])  # fmt: skip
    write(tmp_path, main)
    python("train.py", GRADGUARD="run.jsonl")
    steps = read_record(tmp_path / "run.jsonl").steps
    assert [step["i"] for step in steps] == list(range(180))
    assert [step.get("threshold") for step in steps] == [0.5] * 180
    assert all(step["post_norm"] <= 0.5001 for step in steps)

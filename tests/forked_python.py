"""Python as a command, without the seconds of importing PyTorch: a fork of a process that has imported it.

    done = run_python("train.py", "--steps", "3", cwd=folder)
    assert done.stdout == "trained\\n"

The fork has its own arguments, folder, environment, streams, signals and exit code; only the packages in ``PRELOADED``
are imported already. If that matters, for instance in a test of imports, start a real Python.

This file is also the program that forks.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = [
    "torch",
    "torch._dynamo",  # which the first step of an optimizer imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "jinja2",
    "rich.console",
]
"""Packages of others; each process imports gradguard itself."""

OURS = Path(__file__).parent
PATIENCE = 20
"""Seconds that the other processes get after one has failed."""


def run_python(
    *arguments: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    check: bool = True,
    timeout: float = 240,
    starts_more: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`` in a fork.

    A program that ``starts_more`` Pythons by ``[sys.executable, ...]`` gets forked ones too.
    """
    (done,) = run_pythons([arguments], cwd=cwd, env=[env or {}], timeout=timeout, starts_more=starts_more)
    assert done.returncode == 0 or not check, f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def run_ranks(
    world: int,
    *arguments: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    check: bool = True,
    timeout: float = 240,
    preloaded: str = "",
    starts_more: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``torchrun --standalone --nproc-per-node world *arguments`` in forks, and return each rank's result.

    When one of them fails, the others are killed unless they end soon. A ``preloaded`` package, which takes seconds to
    import, is imported once for all ranks.
    """
    from distributed.pool import rendezvous  # in the tests alone: what runs here shall find nothing of theirs

    with rendezvous() as meeting:
        common = {**(env or {}), **meeting, "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
        ranks = [{**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(world)]
        more = {"preloaded": preloaded, "starts_more": starts_more}
        done = run_pythons([arguments] * world, cwd=cwd, env=ranks, timeout=timeout, **more)
    assert [one.returncode for one in done] == [0] * world or not check, "\n".join(one.stderr for one in done)
    return done


def run_pythons(
    commands: list[tuple[str | Path, ...]],
    *,
    cwd: Path,
    env: list[dict[str, str]],
    timeout: float,
    preloaded: str = "",
    starts_more: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run several programs at once; ``env`` is added to the environment of each."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [[f"{folder}/{i}{name}" for name in ("out", "err")] for i in range(len(commands))]
        jobs = [
            {
                "arguments": [*map(str, command)],
                "cwd": str(cwd),
                "env": {**os.environ, **more},
                "streams": files,
                "python": f"{folder}/python{i}" if starts_more else "",
            }
            for i, (command, more, files) in enumerate(zip(commands, env, streams, strict=True))
        ]
        codes = _asked(jobs, timeout, preloaded)
        said = [[Path(file).read_text(encoding="utf-8", errors="replace") for file in files] for files in streams]
    return [
        subprocess.CompletedProcess([*map(str, command)], code, out, err)
        for command, code, (out, err) in zip(commands, codes, said, strict=True)
    ]


_server: subprocess.Popen[str] | None = None


def _asked(jobs: list[dict[str, Any]], timeout: float, preloaded: str) -> list[int]:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        atexit.register(_end, _server)
    assert _server.stdin is not None
    assert _server.stdout is not None
    _server.stdin.write(json.dumps([jobs, timeout, preloaded]) + "\n")
    _server.stdin.flush()
    codes = json.loads(_server.stdout.readline())
    if None in codes:
        raise subprocess.TimeoutExpired([job["arguments"] for job in jobs], timeout)
    return codes


def _end(server: subprocess.Popen[str]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


# -- the program that forks --------------------------------------------------------------------------------------------


def serve() -> dict[str, Any]:
    """Fork a process for each incoming job, and return the job in that process."""
    for line in sys.stdin:
        jobs, timeout, preloaded = json.loads(line)
        if preloaded and (with_package := os.fork()):
            os.waitpid(with_package, 0)
            continue
        if preloaded:
            preload(preloaded)
        children: list[int] = []
        for job in jobs:
            child = os.fork()
            if child == 0:
                return with_python(job) if job["python"] else job
            children.append(child)
        print(json.dumps(ended(children, timeout)), flush=True)
        if preloaded:
            break
    os._exit(0)


def preload(package: str) -> None:
    """Import a package without output, because standard output carries exit codes here."""
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    with suppress(ImportError):  # the jobs say it
        importlib.import_module(package)
    sys.stdout.flush()
    os.dup2(answers, 1)
    os.close(answers)
    os.close(nowhere)


def ended(children: list[int], timeout: float) -> list[int | None]:
    """Wait for all processes, or until one fails, and return the exit codes; ``None`` for those that took too long."""
    codes: dict[int, int] = {}
    late = set[int]()

    def give_up(*_: object) -> None:
        late.update(set(children) - codes.keys())
        for child in late:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(timeout))
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            signal.alarm(PATIENCE)  # the others may wait for it in vain
    signal.alarm(0)
    is_slow = not any(codes[child] for child in children if child not in late)
    return [None if child in late and is_slow else codes[child] for child in children]


PYTHON = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(server, [message.encode()], [0, 1, 2])
code = int(server.recv(20) or -9)
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""
"""A command whose arguments are run by a fork of a waiting process, and which exits like that fork."""


def with_python(job: dict[str, Any]) -> dict[str, Any]:
    """Create the command ``job["python"]``, this process' `sys.executable`; return, in its forks, what to run."""
    address = job["python"] + ".socket"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen()
    command = Path(job["python"])
    command.write_text(PYTHON.format(python=sys.executable, address=address), encoding="utf-8")
    command.chmod(0o700)
    end_of_job, alive = os.pipe()
    if os.fork():  # the end of `alive` that this process has is closed when it ends
        sys.executable = str(command)
        server.close()
        os.close(end_of_job)
        return job
    os.close(alive)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while end_of_job not in select.select([server, end_of_job], [], [])[0]:
        connection, _ = server.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            message, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
            if (child := os.fork()) == 0:
                return {**dict(zip(("arguments", "cwd", "env"), json.loads(message), strict=True)), "streams": streams}
            _, status = os.waitpid(child, 0)
            connection.send(f"{os.waitstatus_to_exitcode(status)}".encode())
            break
        connection.close()
    os._exit(0)


def become(job: dict[str, Any]) -> list[str]:
    """Make this process look like a new one, and return its arguments."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    streams = job["streams"]
    if isinstance(streams[0], str):
        written = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for file in streams]
        streams = [os.open(os.devnull, os.O_RDONLY), *written]
    for descriptor, own in enumerate(streams):
        os.dup2(own, descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return job["arguments"]


def run(arguments: list[str]) -> None:
    """Run ``python *arguments``: a file, ``-m module`` or ``-c code``, perhaps after ``-W error``."""
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    folders = [folder for folder in sys.path if Path(folder).resolve() != OURS]
    sys.path[:] = [str(Path(arguments[0]).resolve().parent) if arguments[0][0] != "-" else "", *folders]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def end(code: int) -> NoReturn:
    """End as Python does, but without unloading the preloaded packages, which takes longer than most scripts."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    if sys.modules["__main__"] is not PROGRAM:
        vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    PROGRAM = sys.modules["__main__"]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # or gradguard would look through them for what a script has made
    code = 0
    try:
        run(become(serve()))
    except SystemExit as ended_by:
        if not isinstance(ended_by.code, int | None):
            raise
        code = ended_by.code or 0
    end(code)

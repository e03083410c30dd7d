"""What other systems do not have: everything is imported, and a script is watched, without it."""

from pathlib import Path

import pytest

from forked_python import run_python

# Windows has none of these; torch is imported before they go.
WITHOUT = """
import importlib, os, pkgutil, signal, sys
import torch, torch.distributed.fsdp, torch.multiprocessing, rich.console, jinja2
for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "getpgid", "getuid", "geteuid", "killpg", "register_at_fork", "setsid", "fchmod"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"):
    if hasattr(signal, name):
        delattr(signal, name)
"""

EVERYTHING = """
import gradguard
for found in pkgutil.walk_packages(gradguard.__path__, "gradguard."):
    if ".integrations." in found.name or found.name.endswith(("__main__", "start_up")):
        continue  # the packages of others, and what runs when it is imported
    importlib.import_module(found.name)
print("imported")
"""

WATCHED = """
from gradguard.cli import main
sys.exit(main(["run", "--out", "out", "--clip", "norm=1", "train.py"]))
"""

SCRIPT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [EVERYTHING, WATCHED], ids=["imported", "watched"])
def test_nothing_of_posix_is_needed(tmp_path, code):
    Path(tmp_path, "train.py").write_text(SCRIPT, encoding="utf-8")
    done = run_python("-c", WITHOUT + code, cwd=tmp_path)
    if code == WATCHED:
        assert len(Path(tmp_path, "out/run.jsonl").read_text(encoding="utf-8").splitlines()) >= 5
        assert Path(tmp_path, "out/run.html").stat().st_size > 100_000
    else:
        assert done.stdout.splitlines() == ["imported"]


# A name that Windows cannot have, of what we write: <>:"|?* and a point or a space at the end.
def test_folders_and_files_of_ours_have_names_that_any_system_can_have(tmp_path):
    from gradguard.monitoring.tune.trials import TrialPlan, Trials
    from gradguard.named_rules import CLIPPERS

    trials = Trials(TrialPlan(["train.py"], tmp_path, 1, 1), print)
    for rule in [*CLIPPERS, "adaptive=0.01,exclude=fc", "value=0.5"]:
        assert not set('<>:"|?*') & set(trials.folder_of(rule, 1).name)

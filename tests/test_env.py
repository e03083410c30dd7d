"""`gradguard env` says what a report needs, and nothing private."""

import getpass
import os
import platform
import socket

import pytest
import torch

from gradguard.cli import main


def test_every_line_is_there_and_nothing_private(monkeypatch, capsys):
    monkeypatch.setenv("GRADGUARD", "/home/somebody/secret-project/run.jsonl")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    named = ["gradguard", "torch", "Python", "platform", "compiled kernels", "devices", "packages", "settings"]
    assert list(lines) == named
    assert all(lines.values())
    assert torch.__version__ in lines["torch"]
    assert platform.python_version() in lines["Python"]
    assert "GRADGUARD" in lines["settings"]
    for private in ("secret-project", "0123456789abcdef", os.getcwd()):
        assert private not in out
    words = set(out.replace(",", " ").split())
    assert not words & {getpass.getuser(), socket.gethostname()} - {platform.system()}


@pytest.mark.parametrize(("count", "shown"), [(0, "cpu"), (1, "1 x H100"), (8, "8 x H100")])
def test_devices_are_counted(monkeypatch, capsys, count, shown):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: "H100")
    main(["env"])
    assert f"devices: {shown}\n" in capsys.readouterr().out

"""A record from somebody else, or what stands where one is looked for: an answer, or one line that says why not."""

import json
import os

import pytest

from gradguard.cli import main

META = {"t": "meta", "argv": ["train.py"], "optimizers": ["Adam"], "params": [{"name": "w", "numel": 4}]}


def written(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("command", [["report", "--text"], ["report"], ["replay"], ["tail", "--once"]])
@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder"])
def test_what_is_no_file_is_one_line_and_not_waited_for(tmp_path, capsys, command, what):
    path = tmp_path / "run.jsonl"
    make = {"a pipe": os.mkfifo, "a device": lambda p: p.symlink_to("/dev/zero"), "a folder": os.mkdir}
    make[what](path)
    assert main([*command, str(path)]) == 2
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("eps", [[10**400], 10**400, [-1.0], "1e-8", [None, 1e-8], [1e-8], [[1e-8]]])
def test_an_eps_of_any_kind(tmp_path, capsys, eps):
    lines = []
    for i in range(40):
        lines.append({"t": "step", "i": i, "norm": 1.0, "coefficient": 1e-6, "rule": "norm", "threshold": 1e-6})
        lines.append({"t": "tensors", "i": i, "norm": [1.0]})
    path = written(tmp_path / "run.jsonl", {**META, "eps": eps}, *lines)
    assert main(["report", "--text", path]) == 0
    assert main(["report", "--json", path]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_walls_that_are_too_near_to_be_divided(tmp_path, capsys):
    steps = [{"t": "step", "i": i, "norm": 1.0, "wall": 0.0 if i == 0 else 5e-324} for i in range(4)]
    assert main(["tail", "--once", written(tmp_path / "run.jsonl", META, *steps)]) == 0
    assert "steps/s" not in capsys.readouterr().out


@pytest.mark.parametrize("depth", [3, 140, 400, 5000])
@pytest.mark.parametrize("many", [1, 40])
def test_fields_of_a_later_version_may_be_nested_but_not_deeply(tmp_path, capsys, depth, many):
    nested = "[" * depth + "]" * depth
    steps = [f'{{"t": "step", "i": {i}, "norm": 1.0, "later": {nested}}}' for i in range(many)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(META), *steps, '{"t": "step", "i": 99, "norm": 2.0}', ""]))
    assert main(["report", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == (many + 1 if depth < 150 else 1)

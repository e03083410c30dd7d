"""The museum: what its page says of each script is what the command at the script's head says; the twin passes."""

import re
import shlex
from pathlib import Path

import pytest

from forked_python import run_python, run_ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/museum.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1] for row in re.findall(r"^\| \[`(\w+)`\].* \| (.*?) \| \d+ s \|$", PAGE, re.M)}
SCRIPTS = {path.stem: path for path in (ROOT / "examples/museum").glob("*.py")}


def commands(name):
    """The two commands at the script's head: of the bug, and of its twin."""
    head = SCRIPTS[name].read_text(encoding="utf-8").split('"""')[1]
    return re.findall(r"^    (\S.*)$", head, re.M)


def said(command, folder):
    """What the parts of a command print, one after the other."""
    text = ""
    for part in command.split(" && "):
        program, *words = shlex.split(part)
        words = [str(SCRIPTS[word[:-3]]) if word.endswith(".py") else word for word in words]
        if program == "torchrun":
            done = run_ranks(2, *words[2:], cwd=folder, check=False)
        else:
            here = ROOT / "examples/museum" if words[0] == "check" else folder
            words = ["-m", "gradguard", *words] if program == "gradguard" else words
            done = [run_python(*words, cwd=here, check=False)]
        text += "".join(one.stdout + one.stderr for one in done)
    return " ".join(text.replace("│", " ").split())


def test_the_page_has_each_script_and_its_thread():
    assert ROWS.keys() == SCRIPTS.keys()
    assert f"Each of these {len(SCRIPTS)} was reported" in " ".join(PAGE.split())
    for name in SCRIPTS:
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| [`{name}`]")]
        text = SCRIPTS[name].read_text(encoding="utf-8")
        threads = re.findall(r"github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)", row)
        assert threads or "forums" in row
        assert all(f"#{number}" in text for _, number in threads), name
        assert len(commands(name)) == 2, name


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_bug_is_named_and_the_twin_is_not(name, tmp_path):
    sick, healthy = commands(name)
    assert " ".join(ROWS[name].split()) in said(sick, tmp_path)
    told = said(healthy, tmp_path)
    assert "FAIL" not in told
    assert "INCONCLUSIVE" not in told
    assert "PASS" in told or ("--out" in healthy and "error:" not in told and "not finite in" not in told)

"""The tutorials, and other pages that are one script: its blocks, one after the other, print what the page says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked_python import run_python, run_ranks
from test_docs import blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/distributed.md", ROOT / "docs/nan.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
LINE = re.compile(
    r"^\$ (?:(?P<name>\w+)=(?P<value>\w+) )?(?P<program>python|torchrun --nproc-per-node (?P<world>\d)) train\.py$",
    re.M,
)


LONG = {"private", "language_model", "mesh", "triton_kernel"}
"""Tutorials that train for tens of seconds, or whose kind another page or test has."""

DIFFERS_BY_PROCESSOR = {"language_model": r"\d\.\d\d", "private": r"accuracy \S+"}  # the end of a training


def printed_by(page: Path, folder: Path) -> str:
    """Run the blocks as ``train.py`` by the line that the page shows, or plainly."""
    (folder / "train.py").write_text("".join(blocks(page, "python")), encoding="utf-8")
    shown = LINE.search("".join(blocks(page, "console")))
    if shown is None:
        return run_python("-W", "error", "train.py", cwd=folder).stdout
    if shown["name"] is None and shown["world"] is None:
        return run_python("train.py", cwd=folder).stdout
    if shown["world"]:
        return "".join(rank.stdout for rank in run_ranks(int(shown["world"]), "train.py", cwd=folder))
    environment = os.environ | {shown["name"]: shown["value"]}  # which a package reads when it is imported
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.exhaustive if page.stem in LONG else ()) for page in PAGES],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_the_page_runs_and_prints_what_it_says(page, tmp_path):
    if "import triton\n" in page.read_text(encoding="utf-8") and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    varying = DIFFERS_BY_PROCESSOR.get(page.stem, r"(?!)")
    assert re.sub(varying, "#", printed_by(page, tmp_path)) == re.sub(varying, "#", "".join(blocks(page, "text")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_and_pictures_exist(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target

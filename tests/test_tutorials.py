"""The tutorials, and the page on NaN: each is one script whose blocks run one after the other and print what they say."""

import re
from pathlib import Path

import pytest
from test_docs import blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/nan.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]


def run(page, folder):
    """Run the blocks as parts of one file ``train.py``, so that what tells source lines tells those of the page."""
    script, namespace = folder / "train.py", {"__name__": "__main__", "__file__": str(folder / "train.py")}
    source = ""
    for block in blocks(page, "python"):
        before = source.count("\n")
        source += block
        script.write_text(source, encoding="utf-8")
        exec(compile("\n" * before + block, str(script), "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_and_prints_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, tmp_path)
    assert capsys.readouterr().out == "".join(blocks(page, "text"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target

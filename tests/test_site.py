"""`make docs` builds the site without a warning, and nothing of it needs the network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradguard as gg

if importlib.util.find_spec("mkdocs") is None:
    pytest.skip('mkdocs is not installed: pip install -e ".[docs]"', allow_module_level=True)

ROOT = Path(__file__).parents[1]
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs/mkdocs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_site_is_built_and_whole_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | NO_NETWORK, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {
        page.relative_to(tmp_path).as_posix(): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")
    }
    assert {"index.html", "findings.html", "benchmarks/LOG.html", "CHANGELOG.html"} <= {*pages}
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?([^\s\">]+)", page)
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], name
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
        left = re.findall(r":math:|\.\. math|={6,}|&gt;&gt;&gt; |\\[(_a-z]|arithmatex|^:::", prose, flags=re.MULTILINE)
        assert left == [], f"{name}: reST or TeX that was not turned into HTML"
    reference = "".join(page for name, page in pages.items() if name.startswith("reference/"))
    anchors = set(re.findall(r'id="gradguard\.(\w+)"', reference))
    assert anchors == {*gg.__all__} - {"errors", "native", "private", "resilience", "rules", "testing", "results"}
    index = json.loads((tmp_path / "search/search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"] == "findings.html#exploding" for entry in index["docs"])


TABLE = """\
    ======  ==========
    input   result
    ======  ==========
    one     a | b
    two     goes
            on
    ======  ==========
"""


@pytest.mark.parametrize(
    ("rest", "markdown"),
    [
        (r"A norm :math:`\lVert g \rVert`.", r"A norm $\lVert g \rVert$."),
        ("A.\n\n.. math:: a = 1, \\qquad\n          b = 2\n\nB.", "A.\n\n\n$$a = 1, \\qquad b = 2$$\n\n\nB."),
        ("A.\n\n.. math::\n\n    a = 1\n\nB.", "A.\n\n\n$$a = 1$$\n\n\nB."),
        (TABLE, "    | input | result |\n    | --- | --- |\n    | one | a \\| b |\n    | two | goes on |\n"),
        ("====  =====\na     b\n====  =====", "|  |  |\n| --- | --- |\n| a | b |"),
        (
            "Of `Guard` and `gradguard.gradcheck`, ``Guard``, `Guardian`.",
            "Of [`Guard`][gradguard.Guard] and [`gradguard.gradcheck`][gradguard.gradcheck], ``Guard``, `Guardian`.",
        ),
        ("So::\n\n    a = 1", "So:\n\n    a = 1"),
        ("Example:\n    >>> 1\n    1", "Examples:\n    >>> 1\n    1"),
        ("    a = 1  # == 2", "    a = 1  # == 2"),
    ],
)
def test_docstrings_become_markdown(rest, markdown, hooks):
    assert hooks.to_markdown(rest) == markdown


def test_a_table_that_runs_into_its_margin_is_refused(hooks):
    from docutils.parsers.rst.tableparser import TableMarkupError

    with pytest.raises(TableMarkupError, match="column margin"):
        hooks.to_markdown("====  =====\na     b\nlonger b\n====  =====")


class Page:
    """Of MkDocs' page, what the hook reads."""

    def __init__(self, name):
        self.file = self
        self.src_uri = name


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("watching.md", "[a](../benchmarks/LOG.md)", "[a](benchmarks/LOG.md)"),
        ("watching.md", "[a](clipping.md#x)", "[a](clipping.md#x)"),
        ("watching.md", "[a](../README.md)", "[a](index.md)"),
        ("trainers/ray.md", "[a](../../examples/ray_guard.py)", "[a](../examples/ray_guard.py)"),
        ("trainers/ray.md", "[a](../clippers.md)", "[a](../clippers.md)"),
        ("trainers/ray.md", "[a](../../README.md)", "[a](../index.md)"),
        ("CONTRIBUTING.md", "[a](docs/architecture.md)", "[a](architecture.md)"),
        ("benchmarks/LOG.md", "![a](../docs/report.png)", "![a](../report.png)"),
    ],
)
def test_links_fit_the_site_as_they_fit_the_repository(page, link, becomes, hooks):
    assert hooks.on_page_markdown(link, page=Page(page)) == becomes

"""What keeps a commit from being a release; building one is `make release`."""

import runpy
import subprocess
from pathlib import Path

import pytest

release = runpy.run_path(str(Path(__file__).parents[1] / ".ci/release.py"))

READY = {
    "pyproject.toml": '[project]\nversion = "0.1.0"\n',
    "src/gradguard/__init__.py": '__version__ = "0.1.0"\n',
    "CITATION.cff": "version: 0.1.0\ndate-released: 2026-01-31\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-31)\n\n- All of it.\n",
}
FAULTS = {
    "ready": ({}, []),
    "development": (
        {"pyproject.toml": '[project]\nversion = "0.1.0.dev0"\n'},
        ["pyproject.toml", "__init__", "first", "as"],
    ),
    "forgotten module": ({"src/gradguard/__init__.py": '__version__ = "0.0.9"\n'}, ["__init__"]),
    "no date": ({"CHANGELOG.md": "## Unreleased\n"}, ["first heading"]),
    "another date": ({"CITATION.cff": "version: 0.1.0\ndate-released: 2026-01-30\n"}, ["as date-released"]),
    "an older version": ({"CITATION.cff": "version: 0.0.9\ndate-released: 2026-01-31\n"}, ["as date-released"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_release_needs(tmp_path, name):
    changes, words = FAULTS[name]
    for path, text in (READY | changes).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for words_of_git in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "All")):
        subprocess.run([*git, *words_of_git], check=True)
    faults = release["unready"](tmp_path)
    assert len(faults) == len(words)
    assert all(word in fault for fault, word in zip(faults, words, strict=True)), faults
    (tmp_path / "CHANGELOG.md").write_text("changed", encoding="utf-8")
    assert any("uncommitted" in fault for fault in release["unready"](tmp_path))

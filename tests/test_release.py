"""What keeps a commit from being a release; building one is `make release`."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
release = runpy.run_path(str(ROOT / ".ci/release.py"))

READY = {
    "pyproject.toml": '[project]\nversion = "0.1.0"\nurls = {Source = "https://host/me/gradguard"}\n',
    "src/gradguard/__init__.py": '__version__ = "0.1.0"\n',
    "CITATION.cff": "version: 0.1.0\ndate-released: 2026-01-31\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-31)\n\n- All of it.\n",
}
FAULTS = {
    "ready": ({}, []),
    "development": (
        {"pyproject.toml": '[project]\nversion = "0.1.0.dev0"\nurls = {Source = "https://host/me/gradguard"}\n'},
        ["pyproject.toml", "__init__", "first", "as"],
    ),
    "no address": ({"pyproject.toml": '[project]\nversion = "0.1.0"\n'}, ["Source under"]),
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


NAMED = ("pyproject.toml", "src/gradguard/__init__.py", "CITATION.cff", "CHANGELOG.md", ".ci/conda/recipe.yaml")


def test_one_command_makes_the_repository_a_release_but_for_its_address(tmp_path):
    for name in NAMED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    set_version = runpy.run_path(str(ROOT / ".ci/version.py"))["set_version"]
    set_version(tmp_path, "9.8.7", "2031-02-03")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for words_of_git in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "All")):
        subprocess.run([*git, *words_of_git], check=True)
    assert ["Source" in fault for fault in release["unready"](tmp_path)] == [True]
    set_version(tmp_path, "9.9.0.dev0", None)
    assert (
        (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8").startswith("# Changelog\n\n## Unreleased\n\n## 9.8.7 (")
    )
    assert "date-released" not in (tmp_path / "CITATION.cff").read_text(encoding="utf-8")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for():
    recipe = (ROOT / ".ci/conda/recipe.yaml").read_text(encoding="utf-8")
    needed = re.findall(r"^    - (.*)$", recipe.partition("  run:\n")[2].partition("\ntests:")[0], re.MULTILINE)
    wheels = [re.sub(r"(\w+)>=", r"\1 >=", each) for each in PROJECT["project"]["dependencies"]]
    python = f"python {PROJECT['project']['requires-python']}"
    assert needed == [python, *(re.sub("^torch ", "pytorch ", each) for each in wheels)]
    for command in re.findall(r"^      - gradguard (\w+)", recipe, re.MULTILINE):
        assert (ROOT / f"src/gradguard/cli/{'pages' if command == 'explain' else command}.py").exists()


def test_an_index_gets_links_that_lead_somewhere():
    pytest.importorskip("hatchling")
    build = runpy.run_path(str(ROOT / "hatch_build.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = build["with_absolute_links"](readme, "https://host/me/gradguard/", "0.1.0")
    prose = re.sub(r"^```.*?^```", "", shown, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)", prose)
    assert len(links) > 25
    assert all(re.match("https://", link) for link in links)
    assert "](https://host/me/gradguard/raw/v0.1.0/docs/demo.svg)" in shown
    assert "](https://host/me/gradguard/blob/v0.1.0/docs/nan.md)" in shown
    back = re.sub(r"https://host/me/gradguard/(raw|blob)/v0\.1\.0/", "", shown)
    assert back == readme


def test_the_metadata_have_the_readme_with_and_without_an_address():
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["Readme"](str(ROOT), {})
    for urls, words in (
        ({}, "](docs/nan.md)"),
        ({"Source": "https://host/x"}, "](https://host/x/blob/v0.1.0/docs/nan.md)"),
    ):
        metadata = {"version": "0.1.0", "urls": urls}
        hook.update(metadata)
        assert words in metadata["readme"]["text"]
        assert metadata["readme"]["content-type"] == "text/markdown"


def test_the_wheels_of_the_index_are_built_by_what_is_configured():
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "python -m cibuildwheel" in workflow
    config = PROJECT["tool"]["cibuildwheel"]
    assert config["build"] == "cp311-manylinux_*"
    for script in re.findall(r"\{project\}/(\S+)", config["before-test"] + config["test-command"]):
        assert (ROOT / script).exists()

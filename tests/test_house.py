"""The floors of the house that import-linter cannot see."""

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/gradguard"
GROUND = sorted(SOURCE.glob("tensors/*.py"))


@pytest.mark.parametrize("file", GROUND, ids=lambda file: file.name)
def test_the_ground_floor_knows_tensors_only(file):
    modules = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    assert not {m for m in modules if m.startswith(("torch.nn", "torch.optim", "torch.distributed"))}


def test_each_test_file_has_a_name_of_its_own():
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))  # pytest takes them for modules
    assert [name for name, count in names.items() if count > 1] == []


def test_what_is_sampled_or_left_to_make_exhaustive_is_there():
    folder = Path(__file__).parent
    tree = ast.parse((folder / "conftest.py").read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = [text.split("[")[0].split("::") for text in texts if ".py::" in text]
    assert len(named) > 40
    for file, name in named:
        assert f"def {name}(" in (folder / file).read_text(encoding="utf-8"), f"{file} has no {name}"

"""No file of the package reads what could run code: no pickles, no eval; `exec` is of the user's own script."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/gradguard"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch.package", "code"}
CALLS = {"eval", "exec", "compile", "__import__"}
OWN_SCRIPT = {  # the program that the user asks to be run
    ("monitoring/observe/script.py", "exec"), ("monitoring/observe/script.py", "compile"),
}  # fmt: skip


def doubtful(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            yield from (f"torch.distributed.{one.name}" for one in node.names if one.name == "checkpoint")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            options = {one.arg: getattr(one.value, "value", None) for one in node.keywords}
            name = ast.unparse(node.func)
            if name in ("torch.load", "torch.serialization.load") and options.get("weights_only") is not True:
                yield "torch.load without weights_only=True"
            if options.get("allow_pickle") or name.split(".")[-1] in ("Unpickler", "read_metadata"):
                yield name


def found():
    for file in sorted(SOURCE.rglob("*.py")):
        for what in doubtful(ast.parse(file.read_text(encoding="utf-8"))):
            yield file.relative_to(SOURCE).as_posix(), what


def test_nothing_but_the_users_own_script_is_run():
    assert {*found()} <= OWN_SCRIPT


@pytest.mark.parametrize("line", [
    "import pickle", "from yaml import load", "eval(text)", "torch.load(file)", "torch.load(file, weights_only=False)",
    "numpy.load(file, allow_pickle=True)", "from torch.distributed import checkpoint", "reader.read_metadata()",
])  # fmt: skip
def test_the_search_finds(line):
    assert [*doubtful(ast.parse(line))]

"""The floors of the house that import-linter cannot see."""

import ast
import functools
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import gradguard

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/gradguard"
GROUND = sorted(SOURCE.glob("tensors/*.py"))


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("file", GROUND, ids=lambda file: file.name)
def test_the_ground_floor_knows_tensors_only(file):
    modules = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    assert not {m for m in modules if m.startswith(("torch.nn", "torch.optim", "torch.distributed"))}


LAYOUT = {
    "device_mesh", "get_coordinate", "to_local", "full_tensor", "redistribute", "from_local", "_local_tensor", "_spec",
    "tensor_model_parallel", "partition_dim", "partition_stride", "_flat_param",
}  # fmt: skip


def test_one_folder_talks_to_other_processes_and_asks_tensors_how_they_are_spread():
    """The import linter sees who imports `torch.distributed`, and not who uses it as an attribute of torch."""
    names = re.compile(r"torch\.distributed\b")
    found = {
        file.relative_to(SOURCE).as_posix()
        for file in sorted(SOURCE.rglob("*.py"))
        for node in nodes(file)
        if (
            isinstance(node, ast.Attribute)
            and (names.match(ast.unparse(node)) or (node.attr in LAYOUT and ast.unparse(node.value) != "self"))
        )
        or (
            (isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"))
            and getattr(node.args[1], "value", None) in LAYOUT
        )
    }
    others = {one for one in found if not one.startswith("distributed/")}
    assert others == {"torch_private.py", "clip/qk_clip.py"}, "which head's rows a process has, asks QK-clip itself"


def test_each_test_file_has_a_name_of_its_own():
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))  # pytest takes them for modules
    assert [name for name, count in names.items() if count > 1] == []


FACTORIES = {
    "arange", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_each_new_tensor_names_its_device():
    """Under `torch.set_default_device` it would be made elsewhere, and meet tensors of the CPU."""
    missing = [
        f"{file.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not missing, missing


def test_docstrings_begin_with_their_subject():
    """The first word of "What it does", "The same for a list", "That of a tensor" or "Of the mean" is not a subject."""
    clipped = re.compile(r'\s*(?:"""(?:Return )?|\w+: )(?:What|The same|the same|That) |\s+\w+: Of ')
    found = [
        f"{file.relative_to(SOURCE)}:{number}: {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if clipped.match(line)
    ]
    assert not found, found


def test_tests_use_the_public_names():
    """A test that imports `gradguard.clip.guard.Guard` breaks when the file moves, which users do not notice."""
    members = [getattr(gradguard, name) for name in gradguard.__all__]
    modules = [gradguard, *filter(inspect.ismodule, members)]
    public = {name: (one.__name__, getattr(one, name)) for one in modules for name in one.__all__}
    internal = [
        f"{file.name}:{node.lineno}: {alias.name} of {public[alias.name][0]} is taken from {node.module}"
        for file in sorted(Path(__file__).parent.rglob("*.py"))
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gradguard.")
        for alias in node.names
        if alias.name in public
        and node.module not in {one.__name__ for one in modules}
        and getattr(importlib.import_module(str(node.module)), alias.name, None) is public[alias.name][1]
    ]
    assert not internal, internal


ARCHAIC = re.compile(
    r"\b(?:told|came(?! from)|lies? alike|whoever|nobody|somebody|of late|dear|shall|in vain|for ever|as then)\b",
    re.IGNORECASE,
)
"""Words that name no subject, or are not of today; a page may quote what the program prints."""


def public_docstrings():
    modules = [gradguard, *filter(inspect.ismodule, (getattr(gradguard, name) for name in gradguard.__all__))]
    for module in modules:
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            yield name, value
            if inspect.isclass(value):
                yield from ((f"{name}.{key}", one) for key, one in vars(value).items() if not key.startswith("_"))


def test_public_docstrings_are_in_plain_words():
    found = {
        f"{name}: {line.strip()}"
        for name, value in public_docstrings()
        for line in str(getattr(value, "__doc__", "")).splitlines()
        if ARCHAIC.search(line)
    }
    assert not found, sorted(found)


def test_pages_are_in_plain_words():
    """What stands in a block, in a quotation or in code is what the program says, and has tests of its own."""
    quoted = re.compile(r"^```.*?^```|`[^`\n]*`|\"[^\"\n]*\"|^> [^\n]*", flags=re.MULTILINE | re.DOTALL)
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for line in quoted.sub("", page.read_text(encoding="utf-8")).splitlines()
        if ARCHAIC.search(line)
    ]
    assert not found, found


CALLBACKS = {"GradGuardCallback", "PerSampleCallback", "PrivateCallback", "ResilienceCallback"}
"""One name for one job, in the module of each trainer: a program imports those of its own."""


def test_one_name_is_one_class_and_one_file():
    files = [file for file in SOURCE.rglob("*.py") if file.name != "__init__.py"]
    classes = Counter(
        node.name for file in SOURCE.rglob("*.py") for node in nodes(file) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == CALLBACKS
    assert [name for name, count in Counter(file.name for file in files).items() if count > 1] == []

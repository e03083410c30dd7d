"""The public surface is a list: each name exists, has types, and says what it does with an example that runs."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import gradguard as gg
from gradguard import errors, native, private, resilience, results, rules, testing
from gradguard.errors import GradguardError

ROOT = Path(__file__).parents[1]
SOURCE, REFERENCE = ROOT / "src/gradguard", ROOT / "docs/reference"
AGAIN = (private, "MissingPackageError")  # that of gradguard.errors
MODULES = {"gradguard": gg, "native": native, "results": results, "rules": rules, "errors": errors}
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and value is not GradguardError]
NAMES = [
    *((gg, name) for name in gg.__all__),
    *((module, name) for module in (results, rules, native) for name in module.__all__),
    *((errors, name) for name in errors.__all__),
]
FUNCTIONS = [(module, name) for module, name in NAMES if inspect.isfunction(getattr(module, name))]


def named(values):
    return [f"{module.__name__}.{name}" for module, name in values]


def test_the_list_is_sorted_and_complete_and_short():
    assert sorted(gg.__all__) == gg.__all__
    public = {n for n, v in vars(gg).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == {n for n in gg.__all__ if not inspect.ismodule(getattr(gg, n))}
    assert len(gg.__all__) <= 60


def test_no_name_is_public_twice():
    assert len({name for _, name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=named(NAMES))
def test_every_name_has_a_docstring(module, name):
    assert inspect.getdoc(getattr(module, name))


@pytest.mark.parametrize(("module", "name"), [*FUNCTIONS, (results, "ClipResult")])
def test_every_function_has_an_example_and_types(module, name):
    thing = getattr(module, name)
    assert ">>>" in inspect.getdoc(thing)
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_gradguard_error(name):
    assert issubclass(getattr(errors, name), GradguardError)


def of_trainers():
    """What a file of an integration names as its public list, or defines without an underscore."""
    trainers = ("accelerate", "composer", "deepspeed", "keras", "lightning", "timm", "torchtitan", "transformers")
    for trainer in trainers:
        body = ast.parse((SOURCE / f"integrations/{trainer}.py").read_text(encoding="utf-8")).body
        lists = [
            node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        names = ast.literal_eval(lists[0]) if lists else [name for name in defined if not name.startswith("_")]
        yield from (f"gradguard.integrations.{trainer}.{name}" for name in names)


def test_the_reference_has_every_public_name_and_no_other():
    modules = (gg, results, rules, errors, testing, private, resilience, native)
    public = [(module, name) for module in modules for name in module.__all__]
    public = [(m, name) for m, name in public if not inspect.ismodule(getattr(m, name)) and (m, name) != AGAIN]
    pages = [page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
    assert sorted(shown) == sorted([*named(public), *of_trainers()])

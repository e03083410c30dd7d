"""The public surface is a list: each name exists, has types, and says what it does with an example that runs."""

import inspect
from pathlib import Path

import pytest

import gradguard as gg

FUNCTIONS = [name for name in gg.__all__ if inspect.isfunction(getattr(gg, name))]
ERRORS = [n for n in gg.__all__ if inspect.isclass(getattr(gg, n)) and issubclass(getattr(gg, n), Exception)]


def test_the_list_is_sorted_and_complete():
    assert sorted(gg.__all__) == gg.__all__
    public = {n for n, v in vars(gg).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public - {"TYPE_CHECKING"} == {n for n in gg.__all__ if not inspect.ismodule(getattr(gg, n))}


@pytest.mark.parametrize("name", gg.__all__)
def test_every_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(gg, name))


@pytest.mark.parametrize("name", [*FUNCTIONS, "ClipResult"])
def test_every_function_has_an_example_and_types(name):
    thing = getattr(gg, name)
    assert ">>>" in inspect.getdoc(thing)
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_gradguard_error(name):
    assert issubclass(getattr(gg, name), gg.GradguardError)


@pytest.mark.parametrize("name", gg.__all__)
def test_every_name_stands_in_the_docs(name):
    text = Path(__file__).parents[1].joinpath("docs/api.md").read_text(encoding="utf-8")
    assert f"`{name}" in text

"""What the README and the docs show is run, and what it prints is what they say."""

import contextlib
import functools
import io
import re
import runpy
from pathlib import Path

import pytest

from forked_python import run_python
from gradguard.cli import main

ROOT = Path(__file__).parents[1]
OF_KERAS = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
OF_LIGHTNING = (
    "ignore:.*treespec, LeafSpec.*:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
)
OF_TRANSFORMERS = r"^\{'train_runtime'.*\n"  # which a Trainer prints at its end
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_readme_runs_and_prints_what_it_says(capsys):
    namespace: dict = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(block, namespace)
    assert capsys.readouterr().out == blocks(ROOT / "README.md", "text")[0]


@pytest.mark.slow
def test_the_page_on_error_clip_runs_and_prints_what_it_says(capsys):
    namespace: dict = {}
    for block in blocks(ROOT / "docs/error_clip.md", "python"):
        exec(block.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'), namespace)  # Inductor takes long
    assert capsys.readouterr().out == "".join(blocks(ROOT / "docs/error_clip.md", "text"))


def test_the_page_on_the_gradient_check_runs_and_prints_what_it_says(capsys):
    namespace: dict = {}
    for block in blocks(ROOT / "docs/gradient_check.md", "python"):
        exec(block, namespace)
    printed, shown = capsys.readouterr().out, "".join(blocks(ROOT / "docs/gradient_check.md", "text"))
    rounding = r"± \S+|\(h \S+\)|\d+ forwards|from \S+ relative|numerical \S+"  # differs by processor
    assert re.sub(rounding, "", printed) == re.sub(rounding, "", shown)


def other_pages():
    of_themselves = {"README.md", "docs/error_clip.md", "docs/gradient_check.md"}  # tests of their own, above
    of_themselves |= {"docs/distributed.md", "docs/nan.md"}  # and in test_tutorials.py
    warnings = {"keras": (OF_KERAS,), "lightning": OF_LIGHTNING}
    for page in PAGES:
        if name_of(page) not in of_themselves and page.parent.name != "tutorials" and blocks(page, "python"):
            marks = pytest.mark.filterwarnings(*warnings.get(page.stem, ()))
            yield pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*other_pages()])
def test_the_other_pages_run_and_print_what_they_say(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a record
    namespace: dict = {}
    for block in blocks(page, "python"):
        exec(block, namespace)
    printed = re.sub(OF_TRANSFORMERS, "", capsys.readouterr().out, flags=re.MULTILINE)
    shown = blocks(page, "text")
    assert not shown or printed == "".join(shown)  # or the page leaves it to the reader


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_script_that_is_tuned_ends_as_the_page_says(tmp_path, monkeypatch, capsys):
    """One seed of it: without a clip it diverges, and either clip cures it."""
    from gradguard.cli import main

    page = ROOT / "docs/recommendation.md"
    (source,) = [block for block in blocks(page, "python") if "one batch in 50" in block]
    (shown,) = [block for block in blocks(page, "console") if block.startswith("$ gradguard tune --rule")]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source, encoding="utf-8")
    arguments = shown.splitlines()[0].removeprefix("$ gradguard ").split()
    assert main([arguments[0], "--seeds", "1", "--out", "out", *arguments[1:]]) == 0
    captured = capsys.readouterr()
    assert "is among the best" in captured.out
    assert "runs that diverged without a clip" in " ".join(captured.out.split())
    assert captured.out.splitlines()[-1] in (
        "gradguard run --clip norm=2.0 train.py",
        "gradguard run --clip norm=0.2 train.py",
    )


def test_the_readme_is_read_in_a_minute():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert lines[2].startswith("![")  # the picture comes first, then what PyTorch does with one NaN
    assert any("NaN" in line for line in lines[3:8])
    assert lines.index("## Install") < 40


QUESTION = re.compile(r'^\*\*"(.+?)"\*\*(.+?)(?=^\*\*"|^## )', flags=re.MULTILINE | re.DOTALL)


def test_each_of_six_questions_has_the_threads_that_asked_it_and_its_page():
    questions = QUESTION.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(questions) == 6
    for _, answer in questions:
        links = re.findall(r"\]\(([^)]+)\)", answer)
        threads = [
            link for link in links if re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", link)
        ]
        assert len(threads) >= 2
        assert [link for link in links if link.startswith("docs/")]
        assert {*links} == {*threads} | {link for link in links if link.startswith("docs/")}


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    from gradguard.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")  # which the demo would open
    train = "import torch\nx = torch.nn.Linear(2, 1)\no = torch.optim.SGD(x.parameters())\n"
    Path("train.py").write_text(train + "x(torch.ones(3, 2)).sum().backward()\no.step()\n", encoding="utf-8")
    lines = re.findall(r"^\$ (.*?)(?:\s+#.*)?$", "".join(blocks(ROOT / "README.md", "console")), flags=re.MULTILINE)
    commands = [line.split()[1:] for line in lines if line.startswith("gradguard ")]
    assert [line for line in lines if not line.startswith("gradguard ")] == ["pip install ."]  # by `make release`
    assert [words[0] for words in commands] == ["demo", "run", "explain"]
    for words in commands:
        assert main([*words, "--no-open"] if words == ["demo"] else words) == 0
    assert "gradguard run train.py" in capsys.readouterr().out


def test_the_options_and_commands_that_the_readme_names_exist(capsys):
    from gradguard.cli import main

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`gradguard ([\w-]+)((?: --[\w-]+)*)", text)
    assert len(named) >= 4
    for command, options in named:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert all(option in shown for option in options.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page):
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@functools.cache
def options_of(command):
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.getvalue()))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=name_of)
def test_every_option_that_is_shown_exists(page):
    calls = r"^(?:\$ |\t\$\(BIN\)/)gradguard ([a-z-]+) (.*)$"
    for command, arguments in re.findall(calls, page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        own = re.split(r" #|\S+\.py\b", re.sub(r"[\[\]]", " ", arguments))[0]
        options = {word for word in own.split() if word.startswith("-")}
        assert options <= options_of(command), (command, own)


def test_every_make_target_that_is_shown_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.slow
def test_the_example_knows_nothing_of_gradguard_and_runs_under_it(tmp_path):
    script = ROOT / "examples/char_lm.py"
    assert "gradguard" not in script.read_text(encoding="utf-8")
    outputs = []
    for command in ([], ["-m", "gradguard", "run", "--out", "out"]):
        done = run_python(*command, script, "--steps", "8", cwd=tmp_path)
        outputs.append(re.search(r"validation loss: .*", done.stdout))
    assert outputs[0] is not None
    assert outputs[1] is not None
    assert outputs[0].group() == outputs[1].group()
    assert (tmp_path / "out/run.html").exists()


def test_the_functions_that_the_page_on_architecture_names_are_there():
    import ast

    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(named) > 25
    for file, path in named:
        scope = ast.parse((ROOT / "src/gradguard" / file).read_text(encoding="utf-8")).body
        for name in path.split("."):
            found = [node for node in scope if getattr(node, "name", None) == name]
            assert found, f"docs/architecture.md names {file}:{path}, which is not there"
            scope = getattr(found[0], "body", [])


def test_the_page_on_architecture_has_every_room():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src/gradguard"
    rooms = [p for p in source.iterdir() if (p / "__init__.py").exists()]
    missing = [room.name for room in rooms if f"{room.name}/" not in page]
    assert not missing


def test_the_glossary_says_what_reports_say():
    from gradguard.monitoring.show.report.glossary import TERMS

    table = rows_below("In reports and here")
    assert table == [f"| {term.name} | {term.meaning} |" for term in sorted(TERMS, key=lambda term: term.name)]


def rows_below(heading: str) -> list[str]:
    section = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_the_pictures_are_what_their_script_draws():
    pictures = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    for name, draw in pictures.items():
        picture = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert picture == draw(), f"run docs/pictures.py: {name}"
        assert not re.search(r"(href|src)=.?http|url\(.?http", picture)  # nothing is loaded
        is_terminal = name in ("demo.svg", "tail.svg")
        assert re.search(rf"prefers-color-scheme: ?{'light' if is_terminal else 'dark'}", picture)
        assert is_terminal or "<title>" in picture


def test_every_picture_is_shown_and_has_words_for_who_cannot_see_it():
    shown = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            shown[(page.parent / target).resolve()] = words
    assert all(len(words) > 20 for words in shown.values()), shown
    drawn = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    assert {ROOT / "docs" / name for name in drawn} <= {*shown}

"""What the commands print in terminals of several widths, and what they say before a long run."""

import io
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic import write_char_rnn, write_gan

from gradguard.cli import main
from gradguard.cli.records import progress
from gradguard.monitoring.show.report import print_summary
from gradguard.monitoring.show.text_table import print_table

WIDTHS = (60, 80, 120)
COMMANDS = ("run", "tune", "report", "replay", "tail", "check")

PROGRAM = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
"""


@pytest.fixture
def columns(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def too_long(text: str, width: int) -> list[str]:
    # What somebody copies stands in one line: commands, and names of files.
    copied = ("gradguard ", "in train.py", "report: ", "record: ")
    return [line for line in text.splitlines() if cell_len(line) > width and not line.startswith(copied)]


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(columns, command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "-h"])
    assert too_long(capsys.readouterr().out, columns) == []


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "a_long_name_of_a_run.jsonl", "another.jsonl", "-o", "page.html"],
        ["replay", "a_long_name_of_a_run.jsonl", "another.jsonl"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_tables_fit_the_terminal_and_lose_nothing(columns, arguments, capsys, tmp_path):
    write_char_rnn(tmp_path / "a_long_name_of_a_run.jsonl", steps=400, threshold=0.5)
    write_gan(tmp_path / "another.jsonl", steps=300)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert too_long(printed, columns) == []
    assert "…" not in printed
    words = {"report": "run clip final loss best largest norm steps clipped", "replay": "binds on spikes cut locked in"}
    assert set(words[arguments[0]].split()) <= set(re.split(r"[\s┃]+", printed))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_summary_of_a_run_fits_the_terminal(width, tmp_path):
    console = Console(file=io.StringIO(), width=width)
    for write in (write_char_rnn, write_gan):
        print_summary(write(tmp_path / f"{write.__name__}.jsonl", steps=400), console)
    assert too_long(console.file.getvalue(), width) == []


def test_the_summary_of_a_short_run_says_once_that_it_is_too_short(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    print_summary(write_char_rnn(tmp_path / "run.jsonl", steps=24), console)
    said = console.file.getvalue()
    assert said.count("too few to say whether the run is well") == 1
    assert said.count("Record at least 60 steps") == 1


@pytest.mark.parametrize("width", [1, 20, 30, 50, 200])
def test_a_table_of_any_width_holds_every_number_and_every_letter(width):
    console = Console(file=io.StringIO(), width=width)
    rows = [["a_rather_long_name", "12 of 345", "3.5e+37"], ["模型" * 9, "–", "1"]]
    print_table(console, ("rule", "spikes cut", "largest"), rows)
    printed = console.file.getvalue()
    assert "…" not in printed
    assert "12 of 345" in printed
    assert "3.5e+37" in printed
    for name in ("a_rather_long_name", "模型" * 9):
        letters = re.sub(r"[^a-z_模型]", "", re.sub(r"rule|spikes|cut|largest|of|e\+", "", printed))
        assert name in letters


def test_a_module_gives_its_whole_name_to_the_folder_and_the_record_is_named_first(tmp_path, monkeypatch, capfd):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    source = PROGRAM + "import sys; print('trained', file=sys.stderr)"
    (tmp_path / "pkg/train.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", "--no-report", "-m", "pkg.train"]) == 0
    [folder] = Path("runs").iterdir()
    assert re.fullmatch(r"pkg\.train-\d{8}-\d{6}", folder.name)
    assert capfd.readouterr().err.splitlines() == [f"gradguard: recording to {folder / 'run.jsonl'}", "trained"]


@pytest.mark.parametrize("arguments", [["-h"], ["fails.py"], ["no_such.py"]], ids=" ".join)
def test_what_makes_no_step_leaves_nothing_behind(arguments, tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("import torch; raise ValueError('no data')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):  # which is how help ends
        main(["run", *arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["fails.py"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_a_line_of_progress(terminal, monkeypatch):
    stderr = (Terminal if terminal else io.StringIO)()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as say:
        say("judging 7 steps")
    assert ("judging 7 steps" in stderr.getvalue()) == terminal


@pytest.mark.parametrize("form", ["--text", "--json"])
def test_a_full_disk_below_the_output_is_said_in_one_line(form, tmp_path, monkeypatch, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    write_char_rnn(tmp_path / "run.jsonl", steps=20)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["report", form, str(tmp_path)]) == 2
    assert re.fullmatch(r"gradguard: error: .*No space left on device\n", capsys.readouterr().err)


def test_who_reads_no_further_is_no_error(tmp_path, monkeypatch, capsys):
    write_char_rnn(tmp_path / "run.jsonl", steps=20)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["report", "--text", str(tmp_path)]) == 141
    assert capsys.readouterr().err == ""

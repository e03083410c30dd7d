"""`gradguard tail`: a record that grows, what is known of the run, and the view of it in a real terminal."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import write_char_rnn

from gradguard.cli import main
from gradguard.errors import InvalidValueError, RecordError
from gradguard.monitoring.record import reader as follow
from gradguard.monitoring.record.reader import JsonlReader
from gradguard.monitoring.record.record_fields import parse_line
from gradguard.monitoring.show import live_tail as tail_module
from gradguard.monitoring.show import tail_view
from gradguard.monitoring.show.live_tail import Watched, tail
from gradguard.monitoring.show.run_state import MOST_BUCKETS, WINDOW, History, RunState

META = {"t": "meta", "argv": ["train.py"], "params": [{"name": "a.weight"}, {"name": "b.weight"}]}


def step(i: int, **more: object) -> dict:
    return {"t": "step", "i": i, "wall": 0.1 * i, "loss": 2.5, "norm": 2.0} | more


def clipped(i: int, coefficient: float) -> dict:
    return step(i, coefficient=coefficient, threshold=1.0, rule="norm")


def event(i: int, message: str = "gradients of a.weight are not finite", **more: object) -> dict:
    return {"t": "event", "i": i, "kind": "nonfinite", "severity": "error", "message": message} | more


END = {"t": "end", "steps": 3, "wall": 61.0, "exit": 0}


def text_of(*lines: dict) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def run_of(*lines: dict) -> RunState:
    """Take in lines as `tail` does; those that cannot be read are left out."""
    run = RunState()
    for entry in lines:
        with suppress(ValueError):
            run.add(parse_line(json.dumps(entry).encode())[0])
    return run


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_returned_and_a_torn_line_when_its_rest_comes(path):
    follower = JsonlReader(path)
    assert follower.poll() == []
    assert follower.missing
    append(path, "")
    assert follower.poll() == []
    assert not follower.missing
    append(path, text_of(META)[:10])
    assert follower.poll() == []
    whole = json.dumps(step(0, rule="ü"), ensure_ascii=False).encode()
    cut = whole.index("ü".encode()) + 1  # inside a character
    with path.open("ab") as file:
        file.write(text_of(META)[10:].encode() + whole[:cut])
    assert follower.poll() == [META]
    with path.open("ab") as file:
        file.write(whole[cut:] + b"\n" + text_of(step(1)).encode())
    assert follower.poll() == [step(0, rule="ü"), step(1)]
    assert follower.poll() == []
    assert (follower.restarts, follower.unreadable) == (0, 0)


def test_no_byte_is_read_twice_but_for_the_few_that_tell_a_new_run(path, monkeypatch):
    path.write_text(text_of(META, *map(step, range(5000))))
    follower = JsonlReader(path)
    follower.poll()
    reads = []
    original = Path.open

    def counted(self, *args, **kwargs):
        file = original(self, *args, **kwargs)
        return _Counting(file, reads) if self == path else file

    append(path, text_of(step(5000)))
    monkeypatch.setattr(Path, "open", counted)
    assert follower.poll() == [step(5000)]
    assert sum(reads) <= 1000


class _Counting:
    """A file that notes how many bytes were read from it."""

    def __init__(self, file, reads) -> None:
        self._file, self._reads = file, reads
        self.fileno, self.seek, self.tell = file.fileno, file.seek, file.tell

    def read(self, count: int) -> bytes:
        found = self._file.read(count)
        self._reads.append(len(found))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


REWRITTEN = {
    "truncated": text_of(META),
    "rewritten and longer than before": text_of(META, *(step(i, wall=0.2 * i) for i in range(50))),
    "rewritten with the same length": text_of(META, step(0), step(2)),
    "rewritten with another first line": text_of(META | {"version": "0.0.0"}, *(step(i) for i in range(9))),
}


@pytest.mark.parametrize("content", REWRITTEN.values(), ids=REWRITTEN)
@pytest.mark.parametrize("replaced", [False, True], ids=["same file", "another file"])
def test_a_new_run_in_the_same_place_is_read_from_its_start(path, content, replaced):
    path.write_text(text_of(META, step(0), step(1)))
    follower = JsonlReader(path)
    assert len(follower.poll()) == 3
    if replaced:
        (path.parent / "new").write_text(content)
        (path.parent / "new").replace(path)
    else:
        path.write_text(content)
    assert follower.poll() == [json.loads(line) for line in content.splitlines()]
    assert follower.restarts == 1
    assert follower.poll() == []


def test_a_record_that_is_deleted_is_waited_for(path):
    path.write_text(text_of(META, step(0)))
    watched = Watched(path)
    watched.look()
    path.unlink()
    assert watched.look() == []
    assert "was deleted: waiting for another run" in watched.status(time.time())[0]
    assert watched.run.last["i"] == 0
    path.write_text(text_of(META, step(0), step(1)))
    watched.look()
    assert watched.run.last["i"] == 1
    assert len(watched.run.state.recent) == 2  # the new run, not both


def test_a_folder_stands_for_the_record_in_it(tmp_path):
    follower = JsonlReader(tmp_path / "runs")
    assert follower.poll() == []
    (tmp_path / "runs").mkdir()
    assert follower.poll() == []
    (tmp_path / "runs" / "run.jsonl").write_text(text_of(META))
    assert follower.poll() == [META]


def test_a_long_record_is_read_from_near_its_end(path, monkeypatch):
    monkeypatch.setattr(follow, "READ_AT_ONCE", 4000)
    path.write_text(text_of(META, *map(step, range(1000))))
    follower = JsonlReader(path)
    lines = follower.poll()
    assert lines[0] == META
    assert [line["i"] for line in lines[1:]] == list(range(lines[1]["i"], 1000))
    assert len(text_of(*lines[1:])) <= 4000
    assert follower.skipped == len(text_of(*map(step, range(lines[1]["i"]))))
    append(path, text_of(step(1000)))
    assert follower.poll() == [step(1000)]


def test_a_line_that_cannot_be_read_is_counted_and_passed_over(path):
    path.write_text(text_of(META) + "{broken\n[1]\n\n" + text_of(step(0)) + '{"t": "step", "i": 1, "norm": NaN}\n')
    watched = Watched(path)
    watched.look()
    assert watched.run.last == {"t": "step", "i": 1, "norm": None}
    assert "2 unreadable lines" in watched.status(time.time())[0]


@pytest.mark.parametrize("content", ["epoch,loss\n1,2\n", text_of(step(0)), "\x00\x01\n"])
def test_what_is_no_record_is_refused(path, content):
    path.write_text(content)
    with pytest.raises(RecordError, match=r'is not a gradguard record: line 1 is not \{"t": "meta"'):
        JsonlReader(path).poll()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(RecordError, match=r"is no file: expected a record"):
        JsonlReader(path).poll()


def test_a_line_without_end_is_refused(path, monkeypatch):
    monkeypatch.setattr(follow, "LONGEST_LINE", 1000)
    path.write_text("{" * 2000)
    with pytest.raises(RecordError, match=r"a line is longer than 1000 bytes"):
        JsonlReader(path).poll()


@pytest.mark.parametrize(("head", "words"), [(b"\0\0", "line 1 is not"), (b"\x1f\x8b\x08", "is compressed: gunzip")])
def test_what_is_no_record_is_refused_by_its_first_bytes(path, head, words):
    path.write_bytes(head)
    os.truncate(path, 2**31)  # a hole
    with pytest.raises(RecordError, match=words):
        JsonlReader(path).poll()


def test_another_run_in_the_same_file_begins_anew(path):
    path.write_text(text_of(META, step(0), step(1), event(1)) + '{"t": "step", "i"' + text_of(META, step(0)))
    watched = Watched(path)
    watched.look()
    assert (watched.run.last, len(watched.run.events)) == (step(0), 0)


# --- what is known ----------------------------------------------------------------------------------------------------


def test_norms_that_cannot_be_squared_have_no_shares():
    run = RunState()
    run.add({"t": "tensors", "i": 0, "norm": [1e200, 1.0]})
    assert run.largest_layers(5) == []


def test_memory_does_not_grow_with_the_run():
    run = RunState()
    for i in range(3 * MOST_BUCKETS):
        run.add(step(i, norm=float(i + 1)))
        run.add(event(i))
    assert len(run.state.recent) == WINDOW
    assert len(run.state.history.columns(10**6)) <= MOST_BUCKETS
    assert len(run.events) < 100
    assert run.severities == {"error": 3 * MOST_BUCKETS}


def test_the_history_keeps_the_extremes_of_every_step():
    history = History()
    for i in range(5000):
        history.add({3333: 1000.0, 100: math.inf}.get(i, 1.0))
    columns = history.columns(50)
    assert [(k, norm) for k, norm in enumerate(columns) if norm != 1.0] == [(1, math.inf), (33, 1000.0)]
    assert History().columns(5) == []


CLIPPING = {
    "nothing clips": ([step(i) for i in range(10)], None, None),
    "never binds": ([clipped(i, 1.0) for i in range(10)], 0.0, "never"),
    "once": ([clipped(i, 0.5 if i == 90 else 1.0) for i in range(100)], 0.01, "guard"),
    "only the last 100 steps count": ([clipped(i, 0.5 if i < 100 else 1.0) for i in range(200)], 0.0, "never"),
    "one in four": ([clipped(i, 0.5 if i % 4 else 1.0) for i in range(8)], 0.75, "normalising"),
    "not the non-finite and skipped": (
        [clipped(0, 0.5), clipped(1, 1.0), step(2, norm=None, nonfinite=1), clipped(3, 0.1) | {"skipped": True}],
        0.5, "shaping",
    ),
    "nothing that counts": ([step(0, norm=None)], None, None),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "share", "regime"), CLIPPING.values(), ids=CLIPPING)
def test_the_share_of_clipped_steps_is_that_of_the_last_100(steps, share, regime):
    run = run_of(META, *steps)
    assert run.state.clip_share == share
    text = tail_view.line(run)
    assert ("clipped" not in text) if share is None else (f"({regime})" in text)


def test_rate_and_layers():
    run = run_of(META, *map(step, range(30)), {"t": "tensors", "i": 29, "norm": [1.0, 3.0, None, 0.0]})
    assert run.seconds_per_step == pytest.approx(0.1)
    assert run.largest_layers(5) == [("b.weight", 0.9), ("a.weight", 0.1)]
    assert run.largest_layers(1) == [("b.weight", 0.9)]
    assert run_of(META, step(0, top=[1, 0.7])).largest_layers(3) == [("b.weight", 0.7)]
    assert run_of(META, step(0, top=[7, 0.7])).largest_layers(3) == [("parameter 7", 0.7)]
    assert run_of(META, step(0)).largest_layers(3) == []
    assert run_of(META, step(0)).seconds_per_step is None


NOW = 1_700_000_000.0
STATES = {
    "running": (text_of(META, step(0), step(1)), 3, r"^running$"),
    "no step yet": (text_of(META), 3, r"^running$"),
    "empty file": ("", 3, r"^waiting for the first step$"),
    "silent": (text_of(META, step(0), step(1)), 90, r"^no new line since .*:.*:\d\d: killed, or busy"),
    "silent, but with steps as long": (text_of(META, step(0, wall=0), step(1, wall=60)), 90, r"^running$"),
    "ended": (text_of(META, END), 90, r"^finished after 3 steps in 1 min 1 s$"),
    "failed": (text_of(META, END | {"exit": 2}), 90, r"^failed with exit code 2 after 3 steps"),
    "interrupted": (text_of(META, END | {"exit": 130, "interrupted": True}), 0, r"^interrupted after 3 steps"),
    "a newer schema": (text_of(META | {"schema": 2}, step(0)), 0, r"^running; written by a newer gradguard \(schema 2"),
}


@pytest.mark.parametrize(("content", "silence", "words"), STATES.values(), ids=STATES)
def test_the_state_of_a_run(path, content, silence, words):
    path.write_text(content)
    os.utime(path, (NOW, NOW))
    watched = Watched(path)
    watched.look()
    said = watched.status(NOW + silence)[0]
    assert re.search(words, said)


# --- the view ---------------------------------------------------------------------------------------------------------


def shown(
    run: RunState,
    width: int = 80,
    height: int = 40,
    encoding: str = "utf-8",
    events: int = 5,
    status: tuple[str, str] = ("running", "green"),
) -> str:
    """The view as a terminal of that size would get it."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")  # as `tail` sets it
    console = Console(
        file=file, force_terminal=True, color_system=None, width=width, height=height, legacy_windows=False
    )
    console.print(tail_view.view(run, status, "gradguard train.py", events, console))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def unwrapped(text: str) -> str:
    """The words of a view in one line, wherever the terminal has broken them."""
    return " ".join(text.replace("│", " ").split())


EVERYTHING = [
    META,
    clipped(0, 0.5) | {"amp_scale": 65536.0, "lr": 3e-4},
    clipped(1, 1.0) | {"amp_scale": 65536.0, "lr": 3e-4, "norm": 0.02, "loss": None},
    {"t": "tensors", "i": 1, "norm": [1.0, 3.0]},
    event(0, "old", severity="warning", advice="first advice"),
    event(1, "gradients of a.weight[0] are not finite", advice="lower the learning rate"),
    {"t": "unknown kind", "i": 3},
]


def test_everything_that_is_known_is_shown():
    text = shown(run_of(*EVERYTHING))
    for words in (
        "gradguard train.py", "step 1", "10.0 steps/s", "loss not finite", "norm 0.0200", "threshold 1.0",
        "coefficient 1.00", "clipped 50 % of 2 (shaping)", "AMP scale 65536", "lr 0.0003", "steps 0 to 1, log scale",
        "b.weight   90 % ━━━", "a.weight   10 % ━", "2 events: 1 warning, 1 error",
        "step 0 warning: old (first advice)",
        "step 1 error: gradients of a.weight[0] are not finite", "lower the learning rate", "running",
    ):  # fmt: skip
        assert words in text


def test_what_was_not_measured_is_not_shown():
    text = shown(run_of(META, {"t": "step", "i": 0, "norm": 1.0}))
    for word in ("loss", "threshold", "clipped", "AMP", "lr", "event", "largest", "rate"):
        assert word not in text
    assert "no step yet" in shown(run_of(META))


def test_the_optimizers_of_a_gan_are_kept_apart():
    steps = [clipped(i, 0.5 if i % 2 else 1.0) | {"optimizer": i % 2, "norm": 10.0 ** (i % 2)} for i in range(40)]
    run = run_of(META | {"optimizers": ["Adam", "SGD"]}, *steps)
    text = unwrapped(shown(run))
    assert re.search(
        r"optimizer 0 \(Adam\) norm 1\.00 .*coefficient 1\.00 clipped 0 % of 20 \(never\) .*optimizer 1", text
    )
    assert re.search(r"optimizer 1 \(SGD\) norm 10\.0 .*coefficient 0\.500 clipped 100 % of 20 \(normalising\)", text)
    assert text.count("norm before any clip") == 2
    assert "optimizer 1 (SGD)  norm 10.0" in tail_view.line(run)


@pytest.mark.parametrize("events", [0, 1, 3])
def test_lines_says_how_many_events(events):
    text = shown(run_of(META, step(0), *(event(i, f"number {i}") for i in range(9))), events=events)
    assert text.count("number") == events
    assert ("9 events: 9 errors" in text) == (events > 0)


@pytest.mark.parametrize("length", [1, 20, 50, 60, 70, 76])
def test_the_path_that_is_waited_for_is_in_one_piece(length):
    path = Path("/" + "ü" * length)
    text = shown(RunState(), width=81, status=Watched(path).status(0.0))
    assert any(str(path) in line for line in text.splitlines())
    assert f"no record yet: waiting for {path}" in unwrapped(text)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 24), (24, 12), (12, 8)])
def test_the_view_fits_the_terminal(tmp_path, width, height, encoding):
    record = write_char_rnn(tmp_path / "run.jsonl", steps=200, threshold=1.0)
    run = run_of(record.meta, *record.steps, *record.tensors, *record.events)
    text = shown(run, width, height, encoding)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "step" in text
    assert any("running" in line for line in lines[:2])  # a terminal cuts off the end


def test_the_chart_goes_from_the_smallest_to_the_largest_norm():
    run = run_of(META, *(step(i, norm=norm) for i, norm in enumerate((1.0, 10.0, 100.0, 1000.0))))
    heading, row = tail_view.chart(run.state, 10).plain.splitlines()
    assert heading == "norm before any clip, 1.00 to 1,000, steps 0 to 3, log scale"
    assert row == "▁▃▆█"
    assert tail_view.chart(run.state, 2).plain.splitlines()[1] == "▁█"  # two steps in each character
    assert tail_view.chart(run_of(META, step(0, norm=None)).state, 10).plain == "no finite norm yet"


def test_a_step_that_was_not_finite_is_marked():
    run = run_of(META, step(0), step(1), step(2, norm=None, nonfinite=1), step(3))
    assert "✕" in tail_view.chart(run.state, 10).plain


@pytest.mark.parametrize(
    ("norms", "row"), [([0.0, 1.0], "▁▁"), ([1.0, 1.0], "▁▁"), ([1e-300, 1e300], "▁█"), ([0.0, 0.0], None)]
)
def test_zero_and_constant_norms_have_a_chart(norms, row):
    shown = tail_view.chart(run_of(META, *(step(i, norm=norm) for i, norm in enumerate(norms))).state, 10).plain
    assert shown.splitlines()[1:] == ([row] if row else [])


def test_a_record_cannot_command_the_terminal():
    evil = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\n\r"
    first = step(0, top=[0, 0.9], rule=evil, threshold=1.0)
    run = run_of({"t": "meta", "params": [{"name": evil}]}, first, event(0, evil, advice=evil, severity=evil))
    text = shown(run)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "[bold]x[/bold]" in text
    for plain in (tail_view.line(run), tail_view.event_line(run.events[0])):
        assert plain.isprintable()


def test_wrong_types_from_a_newer_version_are_passed_over():
    odd = {"t": "step", "i": "x", "norm": "1", "loss": [1], "coefficient": None, "top": "a", "lr": {}, "wall": True}
    run = run_of({"t": "meta", "params": 3, "argv": 5}, odd, {"t": "tensors", "norm": 4}, {"t": "event"}, {"t": "end"})
    assert "finished" in tail_view.ending(run.end)[0]
    assert shown(run)
    assert tail_view.line(run)


# --- as a command -----------------------------------------------------------------------------------------------------


def test_once_prints_plain_lines_where_there_is_no_terminal(path, capsys):
    path.write_text(text_of(*EVERYTHING))
    assert main(["tail", str(path), "--once", "--lines", "1"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("A value overflowed float16")
    assert others == [
        "step 1 error: gradients of a.weight[0] are not finite (lower the learning rate)",
        "step 1  rate 10.0 steps/s  time 0 s  loss not finite  AMP scale 65536  norm 0.0200  threshold 1.0  "
        "coefficient 1.00  clipped 50 % of 2 (shaping)  lr 0.0003  largest b.weight 90 %",
        "running",
    ]


def test_once_without_a_record_says_what_to_type(path, capsys):
    assert main(["tail", str(path), "--once"]) == 2
    error = capsys.readouterr().err
    assert f"no record at {path}" in error
    assert "gradguard run --out DIR train.py" in error


def test_bad_arguments_say_what_to_type(path):
    with pytest.raises(InvalidValueError, match=r"expected a number of events, 0 or more, got -1"):
        tail(path, events=-1)


def test_a_run_is_followed_line_by_line_until_its_end(path, capsys, monkeypatch):
    monkeypatch.setattr(tail_module, "LINE_SECONDS", 0.0)
    pieces = [
        text_of(META), text_of(step(0))[:20], text_of(step(0))[20:], text_of(event(0, advice="look")),
        text_of(step(1)), text_of(step(2)), text_of(END),
    ]  # fmt: skip
    monkeypatch.setattr(tail_module.time, "sleep", lambda _: append(path, pieces.pop(0)))
    assert tail(path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"no record yet: waiting for {path}",
        "running",
        "step 0  time 0 s  loss 2.50  norm 2.00",
        "step 0 error: gradients of a.weight are not finite (look)",
        "step 1  rate 10.0 steps/s  time 0 s  loss 2.50  norm 2.00",
        "step 2  rate 10.0 steps/s  time 0 s  loss 2.50  norm 2.00",
        "The record has 3 steps, too few to say whether the run is well. Record at least 60 steps, or better 200.",
        "finished after 3 steps in 1 min 1 s",
    ]


def test_a_fast_run_gets_a_line_every_few_seconds_and_its_last_step(path, capsys, monkeypatch):
    path.write_text(text_of(META))
    pieces = [text_of(step(i)) for i in range(20)] + [text_of(END)]
    monkeypatch.setattr(tail_module.time, "sleep", lambda _: append(path, pieces.pop(0)))
    assert tail(path) == 0
    steps = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step")]
    assert [text.split()[1] for text in steps] == ["0", "19"]


def test_ctrl_c_is_exit_code_130(path, capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    path.write_text(text_of(META, step(0)))
    monkeypatch.setattr(tail_module.time, "sleep", interrupt)
    assert main(["tail", str(path)]) == 130
    assert capsys.readouterr().out.startswith("step 0")


@pytest.mark.parametrize("terminal", [False, True])
def test_an_output_without_unicode_gets_question_marks(path, terminal):
    path.write_text(text_of(META | {"argv": ["träin.py"]}, step(0), event(0, "größer 梯度")), encoding="utf-8")
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert tail(path, once=True, console=Console(file=file, force_terminal=terminal, width=40)) == 0
    file.flush()
    assert b"gr??er ??" in file.buffer.getvalue()
    assert file.errors == "strict"


def test_it_works_outside_the_main_thread(path, capsys):
    path.write_text(text_of(META, END))
    codes = []
    thread = threading.Thread(target=lambda: codes.append(tail(path)))
    thread.start()
    thread.join()
    assert codes == [0]


# --- in a real terminal -----------------------------------------------------------------------------------------------

HANGS = 200
"""Seconds after which a process counts as hanging; how fast a machine is must not matter."""

needs_terminal = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")

WRITER = """
import json, sys, time
path, lines = sys.argv[1], json.loads(sys.argv[2])
time.sleep(0.2)
with open(path, "w") as file:
    for line in lines:
        text = json.dumps(line) + "\\n"
        for part in (text[:7], text[7:]):
            file.write(part)
            file.flush()
            time.sleep(0.02)
    sys.stdin.read()
"""

CHILD = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C of this terminal reaches this process
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a job in the background
from gradguard.cli import main
main()
"""


class Terminal:
    """A pseudo-terminal with ``gradguard tail`` in it."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (30, 90)) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(there)
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
            environment.pop(name, None)
        command = [sys.executable, "-c", CHILD, "tail", *arguments]
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
        )
        self.there = there
        self.output = b""

    def wait_for(self, words: str) -> None:
        """Read until the terminal has shown ``words``, in one line or over several."""
        deadline = time.monotonic() + HANGS
        while words not in unwrapped(self.text):
            assert time.monotonic() < deadline, f"never saw {words!r} in {self.text[-3000:]}"
            self._read()

    def _read(self) -> bool:
        """Whether there was something to read within a moment."""
        import select

        if not select.select([self.here], [], [], 0.1)[0]:
            return False
        self.output += os.read(self.here, 65536)
        return True

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.decode("utf-8", "replace"))

    def finish(self) -> int:
        """The exit code, once everything has been read."""
        deadline = time.monotonic() + HANGS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "tail did not end"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.here)
        os.close(self.there)

    def assert_restored(self) -> None:
        """The cursor is visible, the first screen is back, and the line settings are what they were."""
        import termios

        for on, off in ((b"\x1b[?25h", b"\x1b[?25l"), (b"\x1b[?1049l", b"\x1b[?1049h")):
            assert self.output.rfind(on) > self.output.rfind(off) >= 0
        assert termios.tcgetattr(self.there) == self.before
        assert b"Traceback" not in self.output


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@needs_terminal
def test_a_terminal_shows_a_run_while_another_process_writes_it_until_ctrl_c(path, terminal):
    lines = json.dumps([META, *(clipped(i, 0.5) for i in range(8)), event(7, "all is lost", advice="start again")])
    window = terminal(str(path))
    window.wait_for("no record yet: waiting for")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), lines], stdin=subprocess.PIPE)
    try:
        window.wait_for("step 7 rate")
        window.wait_for("all is lost")
        window.wait_for("start again")
        assert "clipped 100 % of 8 (normalising)" in unwrapped(window.text)
        os.write(window.here, b"\x03")
        assert window.finish() == -signal.SIGINT
    finally:
        writer.communicate(b"")
    window.assert_restored()
    last = window.output[window.output.rfind(b"\x1b[?1049l") :].decode()
    assert "all is lost" in last  # the last view stays
    assert "running" in last


@needs_terminal
def test_a_kill_leaves_the_terminal_as_it_was_and_a_finished_run_ends_it(path, terminal):
    path.write_text(text_of(META, step(0)))
    killed = terminal(str(path))
    done = terminal(str(path))
    killed.wait_for("running")
    done.wait_for("running")
    killed.process.send_signal(signal.SIGTERM)
    assert killed.finish() == -signal.SIGTERM
    killed.assert_restored()
    append(path, text_of(END))
    assert done.finish() == 0
    done.assert_restored()
    assert "finished after 3 steps in 1 min 1 s" in unwrapped(done.text)


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is told in another way on Windows")
def test_a_reader_that_leaves_ends_it_quietly(path):
    path.write_text(text_of(META, step(0)))
    command = [sys.executable, "-m", "gradguard", "tail", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"step 0")
    process.stdout.close()
    append(path, text_of(event(1), END))
    assert process.wait(HANGS) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()

import hashlib
import html
import io
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import changed, log_normal, make_record, steps_of, wide_meta, write_char_rnn, write_gan, write_sick

from gradguard.errors import InvalidValueError, RecordError
from gradguard.files import writing
from gradguard.monitoring.judge.diagnosis import diagnose, weighed_findings
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.recommend import Recommendation, recommend
from gradguard.monitoring.judge.rule_replay import what_if
from gradguard.monitoring.record.file import RecordWriter, read_record
from gradguard.monitoring.record.step_rows import by_optimizer
from gradguard.monitoring.show.live_tail import tail
from gradguard.monitoring.show.replay_table import print_replay
from gradguard.monitoring.show.report import figure as figure_module
from gradguard.monitoring.show.report import page as page_module
from gradguard.monitoring.show.report import print_comparison, print_summary, text_summary, write_report
from gradguard.monitoring.show.report.glossary import TERMS, explained
from gradguard.monitoring.show.report.summary import command, compared, labelled, sentence

EVIL = "</script><img src=x onerror=alert(1)>&'\""
EVENT = {"t": "event", "i": 0, "kind": "nonfinite", "severity": "error", "message": EVIL, "advice": EVIL}
NETWORK = re.compile(
    r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//""", re.IGNORECASE
)


def own_text(page: str) -> str:
    """The page without plotly.js, which is the script that starts with a comment."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, count=1, flags=re.DOTALL)


def page_of(*records) -> str:
    path = write_report(list(records), records[0].path.with_suffix(".html"))
    return path.read_text(encoding="utf-8")


def words_of(page: str) -> str:
    """The page without the links to what words mean and to its own parts."""
    page = re.sub(r' <a class="permalink".*?</a>', "", page)
    return html.unescape(re.sub(r'<a class="term".*?>(.*?)</a>', r"\1", page))


def params(*names):
    return {"t": "meta", "params": [{"name": name, "numel": 1} for name in names], "optimizers": [EVIL], "argv": [EVIL]}


def tensors(rows):
    return [{"t": "tensors", "i": i, "norm": row} for i, row in enumerate(rows)]


def constant(threshold):
    """A decision for a constant, so that a test needs no record that leads to one."""
    return Recommendation("constant", f"Clip at {threshold}.", "Because.", threshold, f"norm={threshold}")


CASES = {
    "0 steps": {},
    "1 step": {"steps": steps_of([1.0], loss=2.0, lr=0.1), "tensors": tensors([[1.0, 0.0]])},
    "all non-finite": {"steps": steps_of([None] * 300, nonfinite=4, loss=None), "tensors": tensors([[None, None]] * 9)},
    "no loss": {"steps": steps_of(log_normal(300)), "tensors": tensors([[1.0, 2.0]] * 9)},
    "no tensors": {"steps": steps_of(log_normal(300), loss=1.0)},
    "no norm": {"steps": [{"t": "step", "i": i, "loss": 1.0} for i in range(300)]},
    "zero norms": {"steps": steps_of([0.0] * 300), "tensors": tensors([[0.0, 0.0]] * 9)},
    "a zero and a non-finite cell": {"steps": steps_of(log_normal(9)), "tensors": tensors([[0.0, 1.0], [None, 2.0]])},
    "arrays of the wrong length": {"steps": steps_of(log_normal(9)), "tensors": tensors([[1.0], [1.0, 2.0, 3.0]])},
    "5,000 steps": {"steps": steps_of(log_normal(5000), loss=1.0), "tensors": tensors([[1.0, 2.0]] * 1000)},
    "by value": {"steps": steps_of(log_normal(300), threshold=5.0, rule="value", coefficient=0.9)},
    "constant": {"steps": steps_of([1.0] * 300, threshold=5.0, rule="norm", coefficient=1.0)},
    "hundreds of decades": {"steps": steps_of([10.0 ** (i % 300 - 150) for i in range(600)])},
    "overflowing squares": {"steps": steps_of([1e200] * 9), "tensors": tensors([[1e200, 1.0]])},
    "bare": {"meta": {"t": "meta"}, "events": [{"t": "event", "i": 0}], "torn": True},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_every_shape_of_record_gives_a_page_without_network(tmp_path, parts):
    more = {"meta": params("weight", EVIL), "events": [EVENT] * 60} | parts
    record = make_record(path=tmp_path / "run.jsonl", **more)
    page = page_of(record)
    assert verdict(record).sentence in words_of(page)
    assert not NETWORK.search(own_text(page))  # plotly.js itself holds links for map credits, which load nothing
    assert not re.search(r"<script[^>]+src|<link[^>]+href=\"(?!data:)", page)
    assert EVIL not in own_text(page)
    assert "<img" not in own_text(page)
    assert page.count("* plotly.js (") == 1
    assert diagnose(record).sentence in words_of(page)


def test_the_drawing_library_in_the_page_is_the_published_one():
    """`npm view plotly.js-cartesian-dist-min@4.1.1` names the package; its licence travels with it."""
    folder = Path(page_module.__file__).parent
    digest = hashlib.sha256((folder / "plotly-cartesian.min.js").read_bytes()).hexdigest()
    assert digest == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    assert (folder / "plotly-cartesian.LICENSE").read_text(encoding="utf-8").startswith("MIT License")


def test_the_network_pattern_can_find_something():
    for found in ('<script src="https://cdn.plot.ly/x.js">', "<link href=//cdn/x.css>", "@import 'x'", "url(http://x)"):
        assert NETWORK.search(found)


def test_one_run_has_every_figure(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl", threshold=1.0)
    page = words_of(page_of(record))
    assert [title.strip() for title in re.findall(r"<h2.*?>(.*?)</h2>", page)] == [
        "Norms over time",
        "How often clipping binds",
        "Along depth",
        "Layers",
        "Who dominates",
        "Findings",
        "Events",
        "Environment and cost",
        "Words",
    ]
    assert "0.5 % of the run" in page
    assert command(record, recommend(record).rule) in page


def test_an_unclipped_run_has_no_figure_of_a_clip(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "recommend", lambda record: constant(2.2))
    page = page_of(write_char_rnn(tmp_path / "run.jsonl"))
    assert "How often clipping binds" not in page
    assert "recommended: 2.2" in page


def test_several_runs_stand_side_by_side(tmp_path):
    plain = write_char_rnn(tmp_path / "plain" / "run.jsonl", steps=300)
    clipped = write_char_rnn(tmp_path / "clipped" / "run.jsonl", steps=300, threshold=1.0)
    page = words_of(page_of(plain, clipped))
    assert page.index("2 runs compared") < page.index('id="overlay"') < page.index('<h2 id="run-0">plain</h2>')
    assert '<h2 id="run-1">clipped</h2>' in page
    assert "<td>norm=1</td>" in page
    assert page.count("* plotly.js (") == 1


def test_refusals(tmp_path):
    with pytest.raises(InvalidValueError, match="needs at least one record, got none"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(RecordError, match=r"cannot write .*: gradguard report \S*run.jsonl -o PAGE"):
        write_report([make_record()], tmp_path)


def test_a_page_never_takes_the_place_of_its_record(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl", steps=20)
    link = tmp_path / "link.html"
    link.symlink_to(record.path)
    before = record.path.read_bytes()
    for path in (record.path, link):
        with pytest.raises(InvalidValueError, match="is the record itself, and a page would replace it"):
            write_report([record], path)
    assert record.path.read_bytes() == before


@pytest.mark.parametrize("before", [None, "the old page"])
def test_a_full_disk_leaves_the_old_page_or_none(tmp_path, monkeypatch, before):
    page = tmp_path / "run.html"
    if before is not None:
        page.write_text(before)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(RecordError, match=r"cannot write .*run\.html: No space left on device"):
        write_report([make_record()], page)
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_page_is_not_written_through_a_link_but_through_a_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "render", lambda records: "page")
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    with pytest.raises(
        RecordError, match=r"cannot write .*link\.html: it is a link to '.*target\.html': name the file"
    ):
        write_report([make_record()], link)
    target.write_text("of somebody", encoding="utf-8")
    with pytest.raises(RecordError, match=r"it is a link to"):
        write_report([make_record()], link)
    assert target.read_text(encoding="utf-8") == "of somebody"
    pipe = tmp_path / "pipe.html"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report([make_record()], pipe)
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "pipe.html", "target.html"]


def test_what_is_printed_moves_no_cursor_and_is_no_markup(tmp_path):
    name = "[bold]x[/bold] :smile: \x1b[2J\u202e\r"
    folder = tmp_path / "[red]a\x1b"
    with RecordWriter(folder / "run.jsonl") as writer:
        writer.write("meta", argv=[name], clip=name, optimizers=[name], params=[{"name": name}])
        for i in range(300):
            writer.write("step", i=i, norm=1.0 + i % 3, rule=name, threshold=2.0, coefficient=0.5)
        writer.write("event", i=3, kind=name, severity="error", message=name, advice=name)
    record, cleaned = read_record(folder), r"[bold]x[/bold] :smile: \x1b[2J\u202e\r"
    printed = {
        "summary": (cleaned, lambda console: print_summary(record, console)),
        "comparison": (cleaned, lambda console: print_comparison([record, record], console)),
        "replay": ("usable steps of", lambda console: print_replay(record, what_if(record, ["norm=1"]), console)),
        "tail": (cleaned, lambda console: tail(folder, once=True, console=console)),
        "text": (cleaned, lambda console: console.file.write(text_summary(record))),
    }
    for name, (words, show) in printed.items():
        output = io.StringIO()
        show(Console(file=output, width=400))
        assert words in output.getvalue(), name
        assert all(char.isprintable() or char == "\n" for char in output.getvalue()), name


def test_terminal_summary_is_short_and_ends_in_the_command(tmp_path):
    out, record = io.StringIO(), write_char_rnn(tmp_path / "run.jsonl", threshold=1.0)
    print_summary(record, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 20
    assert diagnose(record).sentence in lines[1]
    assert "Clipping at 1.0 bound on 9.7 %" in out.getvalue()
    assert lines[-2] == command(record, recommend(record).rule)
    assert recommend(record).headline in " ".join(line.strip("│ ") for line in lines)
    assert lines[-1].startswith("observing cost: ")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rule", "step", "optimizer", "words"),
    [
        ("norm=1", {}, "", "gradguard run --clip norm=1.0 train.py"),
        ("median", {}, "", "gradguard run --clip median train.py"),
        ("zclip=inf", {}, "", "gradguard run --clip zclip=inf train.py"),
        ("norm=34.0", {"user_max_norm": 1.0}, "", "in train.py, which clips itself: max_norm=34"),
        (
            "median",
            {"user_max_norm": 1.0},
            "",
            "in train.py, which clips itself: gg.Guard(optimizer, gg.ClipByMedian()) in place of its clip",
        ),
        (
            "clip_fraction=0.05",
            {"rule": "norm"},
            "",
            "in train.py, which clips itself: gg.Guard(optimizer, gg.ClipFraction(target=0.05)) in place of its clip",
        ),
        ("norm=2", {}, "optimizer 1 (SGD)", "in train.py, before the step of optimizer 1 (SGD): max_norm=2.0"),
        (
            "median",
            {},
            "optimizer 1 (SGD)",
            "in train.py, for optimizer 1 (SGD): gg.Guard(optimizer, gg.ClipByMedian())",
        ),
    ],
)
def test_the_command_for_a_rule(rule, step, optimizer, words):
    record = make_record(steps=[{"t": "step", "i": 0, "norm": 1.0} | step])
    assert command(record, rule, optimizer) == words


def test_terminal_summary_names_the_errors_first(tmp_path):
    out = io.StringIO()
    print_summary(write_sick(tmp_path / "run.jsonl"), Console(file=out, width=200))
    assert out.getvalue().index("error: The gradient norm stayed") < out.getvalue().index(
        "warning: Clipping bound on 100 %"
    )
    assert "and 1 remark, see the report" in out.getvalue()


def test_terminal_summary_of_nothing_and_without_a_console(capsys):
    print_summary(make_record(meta={"t": "meta", "argv": ["[bold]x[/]"]}))
    assert "No optimizer step was recorded." in (printed := capsys.readouterr().out)
    assert "record the run again with gradguard run" in " ".join(printed.split())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_text_summary_is_parseable(parts):
    record = make_record(**({"meta": params("weight", EVIL)} | parts))
    pairs = dict(line.split(": ", 1) for line in text_summary(record).splitlines())
    assert pairs["verdict"] == verdict(record).sentence
    assert int(pairs["steps"]) == len(record.steps)
    assert ("clip_share" in pairs) == (verdict(record).taken_steps > 0)
    assert 0 <= float(pairs.get("clip_share", 0)) <= 1
    assert pairs["decision_kind"] == recommend(record).kind


def test_the_template_ships_with_the_package():
    from gradguard.monitoring.show.report import page

    assert Path(page.__file__).with_name("template.html.jinja").is_file()


def test_two_optimizers_of_one_run_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "recommend", lambda record: constant(0.59))
    page = words_of(page_of(write_gan(tmp_path / "run.jsonl")))
    assert page.index('id="overlay"') < page.index("optimizer 0 (Adam)</h2>") < page.index("optimizer 1 (SGD)</h2>")
    assert "in gan.py, before the step of optimizer 1 (SGD): max_norm=0.59" in page
    assert "gradguard run --clip" not in page


def test_an_event_between_steps_is_told_with_the_first_optimizer(tmp_path):
    record = write_gan(tmp_path / "run.jsonl", steps=20)
    record.events.append({"t": "event", "i": 20, "kind": "observer_failed", "message": "the disk is full"})
    first, second = page_of(record).split('<h2 id="run-')[1:]
    assert "the disk is full" in first
    assert "the disk is full" not in second


def test_names_in_findings_keep_their_case():
    lines = [{"t": "tensors", "i": i, "norm": [1.0] * 8 + [0.0 if i > 9 else 1.0]} for i in range(300)]
    text = text_summary(make_record(meta=wide_meta(9), steps=steps_of([1.0] * 300), tensors=lines))
    assert "the gradient of transformer.h.2.attention.in_proj_weight was exactly 0" in text


def test_runs_of_one_name_are_told_apart_by_their_paths():
    records = [make_record(path=Path(folder) / "out" / "run.jsonl") for folder in ("a", "b")]
    assert [label for _, label in labelled(records)] == ["a/out/run.jsonl", "b/out/run.jsonl"]


@pytest.mark.parametrize("odd", [{"threshold": -1.0, "rule": "norm"}, {"norm": 0.0}, {"coefficient": 0.0}])
def test_odd_numbers_draw_something(tmp_path, odd):
    record = make_record(path=tmp_path / "run.jsonl", steps=steps_of(log_normal(300), loss=1.0))
    assert "Norms over time" in page_of(changed(record, lambda step: step.update(odd), slice(-1, None)))


def test_findings_stand_on_the_page_with_advice(tmp_path):
    record = write_sick(tmp_path / "run.jsonl")
    page, found = words_of(page_of(record)), weighed_findings(record)
    assert len(found) > 3
    for finding in found:
        assert finding.message[1:] in page
        assert finding.advice[1:] in page
    assert '<a href="#findings">2 errors, ' in page


def test_a_newer_record_is_shown_with_a_warning(tmp_path):
    record = make_record(path=tmp_path / "run.jsonl", meta=wide_meta(2) | {"schema": 99}, steps=steps_of([1.0] * 9))
    assert "written by a newer gradguard (schema 99" in page_of(record)
    assert "notes_1: The record was written by a newer gradguard" in text_summary(record)


def long_record(path, steps, rows, lines):
    """As much of everything as a record may have."""
    noise = log_normal(1000)
    spread = {"edges": [-9.0 + 0.5 * place for place in range(21)], "counts": [17] * 20}
    tensors = [
        {
            "t": "tensors",
            "i": i * (steps // lines),
            "norm": [noise[(i * 7 + row) % 1000] for row in range(rows)],
            "weight": [1.0] * rows,
            "update": [0.1] * rows,
            "histogram": spread,
        }
        for i in range(lines)
    ]
    numbers = steps_of(log_normal(steps), post_norm=0.1, threshold=0.1, coefficient=0.1, rule="norm")
    for step in numbers:
        step["loss"] = 1.2345 * step["norm"]
    return make_record(path=path, meta=wide_meta(rows), steps=numbers, tensors=tensors)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("runs", "steps", "rows", "lines", "limit"),
    [(1, 3000, 2000, 150, 2.6e6), (8, 2500, 200, 100, 3.6e6), (1, 20_000, 40, 2000, 2.6e6)],
    ids=["a very wide model", "eight runs", "a long run"],
)
def test_a_page_stays_below_its_limit(tmp_path, runs, steps, rows, lines, limit):
    record = long_record(tmp_path / "run.jsonl", steps, rows, lines)
    records = [replace(record, path=tmp_path / str(run) / "run.jsonl") for run in range(runs)]
    path = write_report(records, tmp_path / "report.html")
    assert 0.7 * limit < path.stat().st_size < limit


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_lines_and_text_are_seen_on_their_grounds(ground):
    """3:1 for lines and marks, 4.5:1 for text, as WCAG 2.2 has it."""
    exchanged = figure_module.DARK if ground == "dark" else {}

    def shown(colour):
        return exchanged.get(colour, colour)

    page = shown(figure_module.PAGE)
    for line in (*LINES, *figure_module.REGIMES.values()):
        assert contrast(shown(line), page) >= 3, line
    for text in (figure_module.INK, figure_module.GREEN, figure_module.BLACK):
        assert contrast(shown(text), page) >= 4.5, text
    style = styles(ground)
    assert style["page"].upper() == page.upper()
    for text in ("ink", "soft", "link", "note"):
        assert all(contrast(style[text], style[behind]) >= 4.5 for behind in ("page", "wash")), text
    for edge in ("rule", "blue", "green", "orange", "red", "focus"):
        assert all(contrast(style[edge], style[behind]) >= 3 for behind in ("page", "wash")), edge


LINES = (
    figure_module.BLUE, figure_module.ORANGE, figure_module.GREEN, figure_module.VERMILION, figure_module.PURPLE,
    figure_module.BLACK,
)  # fmt: skip


def styles(ground):
    """The colours of report.css by their names."""
    text = (Path(page_module.__file__).parent / "report.css").read_text(encoding="utf-8")
    block = re.search(r":root%s \{(.*?)\}" % ("" if ground == "light" else r'\[data-theme="dark"\]'), text, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block[1]))


def contrast(one, other):
    """The contrast ratio of two colours by WCAG 2.2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    shares = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_contrast_of_known_colours():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_run_of_a_comparison_has_a_line_of_its_own():
    assert len(set(figure_module.RUN_LINES)) == len(figure_module.RUN_LINES) >= 12


def test_the_command_of_a_lost_run_comes_with_its_learning_rate(tmp_path):
    steps = [{"t": "step", "i": i, "norm": 2.0**i if i < 19 else None, "loss": 2.0} for i in range(300)]
    record = make_record(meta=wide_meta(2) | {"optimizers": ["SGD"], "argv": ["train.py"]}, steps=steps)
    out = io.StringIO()
    print_summary(record, Console(file=out, width=80))
    said = "multiplied by 0.3 in the script:"
    assert out.getvalue().index(said) < out.getvalue().index("gradguard run --clip norm=0.1 train.py")
    page = write_report([record], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index(said) < page.index("gradguard run --clip norm=0.1 train.py")
    assert "decision_rate_factor: 0.3\n" in text_summary(record)


@pytest.mark.parametrize("optimizer", [0, 1])
def test_a_part_is_judged_as_it_is_beside_the_others(optimizer):
    """The losses of networks that work against each other rise: that is no explosion of either."""
    steps = [
        {"t": "step", "i": i, "norm": 4.0 if i > 100 else 1.0, "loss": 2.0 if i > 100 else 1.0, "optimizer": i % 2}
        for i in range(600)
    ]
    record = make_record(meta=wide_meta(2) | {"optimizers": ["SGD", "SGD"]}, steps=steps)
    alone = make_record(meta=wide_meta(2), steps=[step | {"i": place} for place, step in enumerate(steps[::2])])
    alone = changed(alone, lambda step: step.pop("optimizer"))
    assert recommend(alone).kind == "fix"
    part = by_optimizer(record)[optimizer].record
    assert recommend(part).kind == recommend(record).parts[optimizer][1].kind != "fix"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({}, ""),
        ({"a": 1.0}, ""),
        ({"a": None, "b": None}, "No run ended with a finite loss."),
        ({"a": 2.0, "b": 1.0}, "b has the lowest final loss, 1.00. With one run of each"),
        ({"a": 2.0, "b": None}, "a has the lowest final loss, 2.00. With one"),
    ],
)
def test_a_comparison_begins_with_the_lowest_loss(losses, words):
    runs = [(name, verdict(make_record(steps=steps_of([1.0] * 20, loss=loss)))) for name, loss in losses.items()]
    assert compared(runs).startswith(words)
    assert bool(compared(runs)) == bool(words)


def test_runs_of_different_length_are_said_to_be():
    runs = [
        (name, verdict(make_record(steps=steps_of([1.0] * count, loss=1.0)))) for name, count in (("a", 9), ("b", 20))
    ]
    assert "They have different numbers of steps." in compared(runs)


@pytest.mark.parametrize(
    ("argv", "title"),
    [
        (["examples/train.py", "--lr", "1"], "train.py: gradient report of out"),
        (["-m", "package.train"], "package.train: gradient report of out"),
        (["<b>.py"], "&lt;b&gt;.py: gradient report of out"),
        ([], "Gradient report: gradient report of out"),
    ],
)
def test_a_page_has_the_name_of_the_script_in_its_title(tmp_path, argv, title):
    (tmp_path / "out").mkdir()
    record = make_record(path=tmp_path / "out" / "run.jsonl", meta={"t": "meta", "argv": argv})
    assert f"<title>{title} · gradguard</title>" in page_of(record)


def test_the_diagnosis_comes_first_then_what_to_do_then_the_clip(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl")
    page, made, found = words_of(page_of(record)), recommend(record), diagnose(record)
    body = page[page.index("<main") :]
    places = [body.index(words) for words in (found.sentence, made.headline, verdict(record).sentence)]
    assert places == sorted(places)
    assert places[-1] < body.index('<nav class="contents"')
    folded = re.search(r"<details[^>]*><summary>Why</summary>(.*?)</details>", body, re.DOTALL)
    assert folded is not None
    assert all(one.words in folded.group(1) for one in found.cause.evidence)


def test_every_link_within_a_page_leads_somewhere(tmp_path):
    for record in (write_sick(tmp_path / "sick.jsonl"), write_gan(tmp_path / "gan.jsonl")):
        page = own_text(page_of(record))
        names = re.findall(r' id="([^"]+)"', page)
        assert len(names) == len(set(names))
        assert set(re.findall(r'href="#([^"]+)"', page)) <= set(names)


@pytest.mark.parametrize("write", [write_sick, write_gan])
def test_headings_skip_no_level_and_everything_stands_in_a_landmark(tmp_path, write):
    page = own_text(page_of(write(tmp_path / "run.jsonl")))
    levels = [1, *map(int, re.findall(r"<h([1-6])\b", page))]
    assert levels[1] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    body = page[page.index("<body") :]
    for landmark in ("header", "main", "footer"):
        body = re.sub(rf"<{landmark}\b.*</{landmark}>", "", body, flags=re.DOTALL)
    outside = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    assert re.findall(r"<(\w+)", outside) == ["body", "a"]  # the link to the decision


def test_contents_name_every_part(tmp_path):
    page = words_of(page_of(write_sick(tmp_path / "run.jsonl")))
    listed = re.findall(r'<li><a href="#(.*?)">', page[page.index('<nav class="contents"') : page.index("</nav>")])
    assert listed == re.findall(r'<h2 class="part" id="(.*?)">', page)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "width", "label"),
    [
        ("head.bias", 16, "head.bias"),
        ("transformer.encoder.layers.8.attention.query.weight", 38, "transformer…8.attention.query.weight"),
        ("transformer.encoder.layers.11.attention.query_projection.bias", 16, "…11…query_p…bias"),
        ("a" * 40, 16, "a" * 7 + "…" + "a" * 8),
        ("first.middle.", 8, "…middle."),
        ("a.<b>", 9, "a.&lt;b&gt;"),
    ],
)
def test_long_names_lose_their_middle(name, width, label):
    assert figure_module.short(name, width) == label
    assert len(html.unescape(label)) <= width


def test_what_a_word_means_is_linked_once_in_a_text_and_never_in_a_name():
    text = "A spike is a norm; spikes in norm.weight and encoder.norm, by --clip norm=1 <norm>"
    linked = re.findall(r'href="#(.*?)">(.*?)<', explained(text))
    assert linked == [("term-spike", "spike"), ("term-norm", "norm")]
    assert "&lt;norm&gt;" in explained(text)


def test_the_words_of_the_list_explain_each_other():
    assert len({term.id for term in TERMS}) == len(TERMS)
    for term in TERMS:
        assert f'href="#{term.id}"' in explained(f"The {term.name} here.")


def test_text_numbers_the_findings_and_the_optimizers(tmp_path):
    sick, gan = write_sick(tmp_path / "sick.jsonl"), write_gan(tmp_path / "gan.jsonl")
    pairs = dict(line.split(": ", 1) for line in text_summary(sick).splitlines())
    assert f"findings_{len(findings(sick))}_kind" in pairs
    assert f"findings_{len(findings(sick)) + 1}_kind" not in pairs
    assert (pairs["findings_1_severity"], pairs["findings_1_kind"]) == ("error", "exploding")
    assert (pairs["findings_1_first_step"], pairs["findings_1_last_step"]) == ("321", "397")
    assert pairs["findings_1_message"].startswith("the gradient norm stayed more than 10")
    assert "lower the learning rate" in pairs["findings_1_advice"]
    pairs = dict(line.split(": ", 1) for line in text_summary(gan).splitlines())
    assert [pairs[f"optimizers_{place}_name"] for place in (1, 2)] == ["optimizer 0 (Adam)", "optimizer 1 (SGD)"]
    assert [pairs[f"optimizers_{place}_decision_kind"] for place in (1, 2)] == [
        recommend(part.record).kind for part in by_optimizer(gan)
    ]


def test_a_script_with_two_rules_is_named_by_both(capsys):
    steps = steps_of([1.0], rule="norm", threshold=1.0) + steps_of([1.0], rule="value", threshold=None)
    print_comparison([make_record(steps=steps)])
    assert "script: norm" in (out := capsys.readouterr().out)
    assert "and value" in out


def test_norms_near_the_largest_number_make_a_page(tmp_path):
    steps = steps_of([1e308 if i % 2 else 1e-308 for i in range(300)], loss=1e308)
    page = write_report([make_record(path=tmp_path / "run.jsonl", steps=steps)], tmp_path / "report.html")
    assert "Norms over time" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it stood out (2 times)", "It stood out (2 times)."),
        ("clip by gg.ClipByMedian()", "Clip by gg.ClipByMedian()"),
        ("it ended!", "It ended!"),
        ("", ""),
    ],
)
def test_a_sentence_ends_before_the_next_one_begins(text, shown):
    assert sentence(text) == shown

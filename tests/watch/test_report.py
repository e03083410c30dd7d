import html
import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import log_normal, make_record, steps_of, write_char_rnn

from gradguard.errors import InvalidValueError, RecordError
from gradguard.watch.recommend import recommend
from gradguard.watch.report import print_summary, text_summary, write_report
from gradguard.watch.report.series import decimate, dominance, layer_matrix, loss_range
from gradguard.watch.verdict import verdict

EVIL = "</script><img src=x onerror=alert(1)>&'\""
EVENT = {"t": "event", "i": 0, "kind": "nonfinite", "severity": "error", "message": EVIL, "advice": EVIL}
NETWORK = re.compile(
    r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//""", re.IGNORECASE
)


def own_text(page: str) -> str:
    """The page without plotly.js, which is the first script."""
    return re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.DOTALL)


def page_of(*records) -> str:
    path = write_report(list(records), records[0].path.with_suffix(".html"))
    return path.read_text(encoding="utf-8")


def params(*names):
    return {"t": "meta", "params": [{"name": name, "numel": 1} for name in names], "optimizers": [EVIL], "argv": [EVIL]}


def tensors(rows):
    return [{"t": "tensors", "i": i, "norm": row} for i, row in enumerate(rows)]


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


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_every_shape_of_record_gives_a_page_without_network(tmp_path, parts):
    more = {"meta": params("weight", EVIL), "events": [EVENT] * 60} | parts
    record = make_record(path=tmp_path / "run.jsonl", **more)
    page = page_of(record)
    assert html.escape(verdict(record).sentence, quote=False).replace("'", "&#39;") in page
    assert not NETWORK.search(own_text(page))  # plotly.js itself holds links for map credits, which load nothing
    assert not re.search(r"<script[^>]+src|<link[^>]+href=\"(?!data:)", page)
    assert EVIL not in own_text(page)
    assert "<img" not in own_text(page)
    assert page.count("plotly.js v") == 1
    assert recommend(record).reason.split(";")[0] in html.unescape(page)


def test_the_network_pattern_can_find_something():
    for found in ('<script src="https://cdn.plot.ly/x.js">', "<link href=//cdn/x.css>", "@import 'x'", "url(http://x)"):
        assert NETWORK.search(found)


def test_one_run_has_every_figure(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl", threshold=1.0)
    page = page_of(record)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == [
        "Recommended threshold",
        "Norms over time",
        "How often clipping binds",
        "Layers",
        "Distribution of norms",
        "Who dominates",
        "Events",
        "Environment",
    ]
    assert "0.5 % of the run" in page
    assert "gradguard run --clip norm=2.2 examples/char_rnn.py --steps 600" in page


def test_an_unclipped_run_is_told_what_would_have_happened(tmp_path):
    page = page_of(write_char_rnn(tmp_path / "run.jsonl"))
    assert "How often 2.2 would have bound" in page
    assert "This run was not clipped." in page


def test_several_runs_stand_side_by_side(tmp_path):
    plain = write_char_rnn(tmp_path / "plain" / "run.jsonl", steps=300)
    clipped = write_char_rnn(tmp_path / "clipped" / "run.jsonl", steps=300, threshold=1.0)
    page = page_of(plain, clipped)
    assert page.index("Runs compared") < page.index('id="losses"') < page.index("<h2>plain</h2>")
    assert "<h2>clipped</h2>" in page
    assert "<td>norm=1</td>" in page
    assert page.count("plotly.js v") == 1


def test_refusals(tmp_path):
    with pytest.raises(InvalidValueError, match="needs at least one record, got none"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(RecordError, match=r"cannot write .*Name another file with -o"):
        write_report([make_record()], tmp_path)


def test_decimation_keeps_the_spike_and_the_gap():
    values = [1.0] * 50_000
    values[31_234] = 99.0
    values[:1000] = [None] * 1000
    x, y = decimate(range(50_000), values)
    assert len(x) <= 2000
    assert (x[y.index(99.0)], y[0]) == (31_234, None)
    assert x == sorted(set(x))


def test_layer_matrix_marks_zero_and_nonfinite():
    matrix = layer_matrix(make_record(meta=params("a", "b"), tensors=tensors([[0.0, 10.0], [None, 1.0], [1.0, 0.1]])))
    assert matrix is not None
    assert matrix.norms == [[0.0, None, 1.0], [10.0, 1.0, 0.1]]
    assert matrix.deviations == [[None, None, 0.0], [1.0, 0.0, -1.0]]


def test_layer_matrix_keeps_spikes_when_thinned():
    rows = [[1.0]] * 3000
    rows[1717] = [50.0]
    matrix = layer_matrix(make_record(meta=params("a"), tensors=tensors(rows)))
    assert matrix is not None
    assert len(matrix.steps) == 600
    assert max(matrix.norms[0]) == 50.0


def test_dominance_by_hand():
    rows = [[3.0, 4.0]] * 8 + [[0.0, 10.0]]
    record = make_record(meta=params("a", "b"), tensors=tensors(rows))
    shares = dominance(record, 9.0)
    assert shares is not None
    assert (shares["names"], shares["label"], shares["count"]) == (["a", "b"], "spike steps", 1)
    assert shares["ordinary"] == pytest.approx([0.36, 0.64])
    assert shares["spikes"] == pytest.approx([0.0, 1.0])
    assert dominance(record, 99.0)["label"] == "largest 5 % of steps"


def test_terminal_summary_is_short_and_ends_in_the_command(tmp_path):
    out = io.StringIO()
    print_summary(write_char_rnn(tmp_path / "run.jsonl", threshold=1.0), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 16
    assert "Clipping at 1.0 bound on 9.7 %" in lines[1]
    assert lines[-2] == "gradguard run --clip norm=2.2 examples/char_rnn.py --steps 600"
    assert lines[-1].startswith("observing cost: ")


def test_terminal_summary_of_nothing_and_without_a_console(capsys):
    print_summary(make_record(meta={"t": "meta", "argv": ["[bold]x[/]"]}))
    assert "Recommended threshold: none" in capsys.readouterr().out


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_text_summary_is_parseable(parts):
    record = make_record(**({"meta": params("weight", EVIL)} | parts))
    pairs = dict(line.split(": ", 1) for line in text_summary(record).splitlines())
    assert pairs["verdict"] == verdict(record).sentence
    assert int(pairs["steps"]) == len(record.steps)
    assert 0 <= float(pairs["clip_share"]) <= 1
    assert "recommended" in pairs


def test_the_template_ships_with_the_package():
    import gradguard.watch.report.page as page

    assert Path(page.__file__).with_name("template.html.jinja").is_file()


@pytest.mark.parametrize(
    ("losses", "cut"),
    [
        ([2.0, 1.5, 1.2, 1.0] * 20, False),
        ([4.0 - i / 30 for i in range(100)], False),
        ([2.5e8, *[2.0 - i / 100 for i in range(100)]], True),
        ([1.0] * 100, False),
        ([], False),
    ],
)
def test_an_axis_of_losses_is_cut_only_for_explosions(losses, cut):
    record = make_record(steps=[{"t": "step", "i": i, "loss": loss} for i, loss in enumerate(losses)])
    ends = loss_range([record])
    assert (ends is not None) == cut
    if ends:
        assert ends[0] < 1.02
        assert 1.9 < ends[1] < 3

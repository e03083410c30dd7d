"""`gradguard explain`, `skill` and `demo`: what a newcomer, or an assistant, types first."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch

import gradguard as gg
from gradguard import errors
from gradguard.cli import main
from gradguard.cli.pages import _page
from gradguard.integrations import timm
from gradguard.monitoring.judge import diagnosis
from gradguard.monitoring.judge.detectors import KINDS
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.file import read_record

ROOT = Path(__file__).parents[1]


def printed(capsys, *words):
    assert main([*words]) == 0
    return capsys.readouterr().out


PARTS = {
    "causes": ([*diagnosis.KEYS], ["**What it means.**", "**How it looks.**", "**What to do.**"]),
    "findings": ([*KINDS], ["**What it means.**", "**How it looks.**", "**What to do.**"]),
    "errors": (
        [name for name, value in vars(errors).items() if isinstance(value, type)],
        ["**What it means.**", "**What to do.**"],
    ),
}


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, (names, _) in PARTS.items() for name in names])
def test_every_name_is_explained_in_the_terminal(page, name, capsys):
    shown = printed(capsys, "explain", name)
    assert shown.startswith(f"# {name}\n")
    if name in PARTS["causes"][0] and name in PARTS["findings"][0]:
        as_cause, shown = shown.split("As a finding:")
        shown = as_cause if page == "causes" else shown
    places = [shown.index(heading) for heading in PARTS[page][1]]
    assert places == sorted(places)
    assert all(len(text.strip()) > 20 for text in re.split(r"\*\*[^*]+\*\*", shown[places[0] :])[1:])
    assert "](" not in shown  # neither a picture nor a link that leads nowhere


@pytest.mark.parametrize("page", PARTS)
def test_a_page_of_parts_explains_each_name_once_and_no_other(page, capsys):
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### `(\w+)`$", text, re.MULTILINE)) == sorted(PARTS[page][0])
    listed = printed(capsys, "explain")
    assert all(f"`{name}`" in listed for name in PARTS[page][0])


def test_the_list_of_what_one_sees_leads_to_every_cause():
    table = (ROOT / "docs/causes.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert set(re.findall(r"\(#(\w+)\)", table)) == {*diagnosis.KEYS}


def test_pages_are_printed_whole_and_say_where_links_lead(capsys):
    listed = re.findall(r"`([\w/]+)`", printed(capsys, "explain").split("Pages: ")[1])
    assert {"clipping", "nan", "trainers/lightning", "tutorials/nan"} <= {*listed}
    for name in listed:
        shown = printed(capsys, "explain", name)
        assert shown.startswith("# ")
        assert "](" not in re.sub(r"```.*?```|`[^`\n]*`", "", shown, flags=re.DOTALL)
        assert {*re.findall(r"\(`gradguard explain ([^`]*)`\)", shown)} <= {*listed}
    assert "(`gradguard explain nan`)" in printed(capsys, "explain", "nonfinite_data")
    assert "was tested (`gradguard explain trainers/index`)" in printed(capsys, "explain", "trainers/lightning")
    assert "forward_kernel[(triton.cdiv(x.numel(), TILE),)](x, y" in printed(
        capsys, "explain", "tutorials/triton_kernel"
    )


def test_a_page_of_a_folder_has_its_short_name_too(capsys):
    assert printed(capsys, "explain", "lightning") == printed(capsys, "explain", "trainers/lightning")
    assert printed(capsys, "explain", "index").startswith("# gradguard")


def test_every_command_names_its_page_in_its_help_and_in_its_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "`gradguard explain`" in shown
    commands = re.findall(r"^    ([\w-]+)", shown, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        (page,) = re.findall(r"`gradguard explain (\w+)`", capsys.readouterr().out)
        assert printed(capsys, "explain", page)
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.endswith(" (gradguard explain report)\n")


def test_every_error_of_a_call_names_its_page_below_the_message(capsys):
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters())
    model.weight.grad, model.bias.grad = torch.full((1, 2), float("nan")), torch.zeros(1)
    noise = gg.private.FixedNoise(noise_multiplier=1.0, delta=1e-5)
    private = lambda: gg.private.make_private(model, sgd, [], noise)  # noqa: E731
    calls = {
        "clippers": (lambda: gg.ClipByNorm(-1.0), r"max_norm=-1\.0: expected a number"),
        "nan": (lambda: gg.clip_grad_norm_(model, 1.0, nonfinite="raise"), r"`weight`: 2 of 2 elements NaN"),
        "per_sample_support": (lambda: gg.PerSampleGradientClipper(model, 1.0), r"norm_clipper=1\.0: expected"),
        "private_training": (private, r"loader: expected a torch"),
        "gradient_check": (lambda: gg.testing.assert_grad(lambda x: x.detach(), torch.ones(2)), r"have no graph"),
        "error_clip": (lambda: gg.ErrorClipByValue(max=-1.0), r"cannot clip to"),
        "resilience": (lambda: gg.SpikeRecovery(model, sgd, snapshot_every=-1), r"snapshot_every=-1: expected"),
        "watching": (lambda: gg.Monitor("run.jsonl"), r"expected a torch\.optim\.Optimizer"),
        "parity": (lambda: gg.save_gradients("a.safetensors", model, 3), r"step is int"),
        "norm_audit": (lambda: gg.audit_norm(model, "x"), r"norm is str: expected"),
        "trainers/timm": (lambda: timm.dispatch_clip_grad(model, 1.0, mode="x"), r"mode='x': expected"),
    }
    for page, (call, words) in calls.items():
        with pytest.raises(errors.GradguardError, match=words) as raised:
            call()
        assert raised.value.__notes__ == [f"`gradguard explain {page}` is the page on this."], page
        assert "gradguard explain" not in str(raised.value)
        assert pickle.loads(pickle.dumps(raised.value)).__notes__ == raised.value.__notes__
        assert printed(capsys, "explain", page)


def test_an_unknown_name_gets_the_nearest_ones(capsys):
    assert main(["explain", "spik"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("gradguard: error: 'spik' is not a cause, finding, error or page. Did you mean spike")
    assert main(["explain", "zzz"]) == 2
    assert "`gradguard explain` lists all. (" in capsys.readouterr().err
    assert main(["explain", "TRL"]) == 2
    assert re.search(r"Pages that contain it: .*trainers/transformers", capsys.readouterr().err)


def test_the_page_for_assistants_names_what_there_is(tmp_path, monkeypatch, capsys):
    text = printed(capsys, "skill")
    assert text == _page("skill.md")
    for command in re.findall(r"`gradguard (\w[\w-]*)", text):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
    known = {"certain", "likely", "possible", "error", *diagnosis.KEYS, *KINDS}
    known |= {"keep", "constant", "rule", "nothing", "fix", "unknown"}  # kinds of decisions
    monkeypatch.chdir(tmp_path)
    printed(capsys, "demo", "--no-open")
    known |= keys_of(json.loads(printed(capsys, "report", "--json", "gradguard-demo/unclipped")))
    assert set(re.findall(r"`([a-z_]+)`", text)) <= known


def keys_of(value):
    """All names in what was printed as JSON."""
    if isinstance(value, dict):
        return {*value, *(name for one in value.values() for name in keys_of(one))}
    return {name for one in value for name in keys_of(one)} if isinstance(value, list) else set()


def test_links_of_the_index_for_assistants_lead_somewhere():
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "docs/llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    for link in links:
        assert (ROOT / "docs" / link).is_file()


def test_the_demo_tells_the_story_of_its_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = printed(capsys, "demo", "--no-open")
    sick, healed = read_record(Path("gradguard-demo/unclipped")), read_record(Path("gradguard-demo/clipped"))
    assert (sick.dropped, sick.unreadable, healed.dropped, healed.unreadable) == (0, 0, 0, 0)
    assert diagnosis.diagnose(sick).cause.key == "exploding_time"
    words = " ".join(told.split())
    assert diagnosis.diagnose(sick).sentence in words
    assert " the advice helped: " in diagnosis.diagnose(healed).sentence
    assert diagnosis.diagnose(healed).sentence in words
    assert f"gradguard run --clip {recommend(sick).rule} char_lm.py" in told
    after, before = re.search(r"the loss is (\S+) at step \d+ in place of (\S+),", words).groups()
    assert float(after) < 0.9 * float(before)
    assert Path("gradguard-demo/demo.html").stat().st_size > 10_000
    assert len(told.splitlines()) < 20
    assert "gradguard run train.py" in told.splitlines()[-1]
    printed(capsys, "demo", "--no-open")  # again, over its own files


def test_the_demo_writes_over_nothing_of_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine/clipped").mkdir(parents=True)
    Path("runs/unclipped").mkdir(parents=True)
    Path("runs/unclipped/run.jsonl").write_text("a record of my own\n", encoding="utf-8")
    for folder in ("mine", "runs"):
        assert main(["demo", "--no-open", "--out", folder]) == 2
        assert "choose another --out" in capsys.readouterr().err
    assert Path("runs/unclipped/run.jsonl").read_text(encoding="utf-8") == "a record of my own\n"

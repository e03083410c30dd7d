"""`gradguard parity` as a person types it."""

import json

import pytest
import torch
from language_models import batch, language_model, step_of

import gradguard as gg
from gradguard.cli import main

CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, model, data = tmp_path_factory.mktemp("parity"), language_model(blocks=1), batch()

    def wrong():
        step_of(model, data)()
        for p in model.parameters():
            p.grad *= 8

    for name, step in (("ref", step_of(model, data)), ("new", step_of(model, data)), ("wrong", wrong)):
        gg.save_gradients(folder / name, model, step, facts={"micro-batches": 8})
    with torch.no_grad():
        model.head.weight *= 1.01
    gg.save_gradients(folder / "other", model, step_of(model, data))
    return folder


@pytest.mark.parametrize(
    ("new", "verdict", "words"),
    [
        ("new", "PASS", "parameters are equal"),
        ("wrong", "FAIL", "(micro-batches)"),
        ("other", "INCONCLUSIVE", "one checkpoint"),
    ],
)
def test_the_verdict_is_the_exit_code(files, new, verdict, words, capsys):
    assert main(["parity", str(files / "ref"), str(files / new)]) == CODES[verdict]
    said = capsys.readouterr().out
    assert said.startswith(verdict)
    assert words in said
    assert main(["parity", "--json", str(files / "ref"), str(files / new)]) == CODES[verdict]
    assert json.loads(capsys.readouterr().out)["verdict"] == verdict


def test_what_is_no_file_is_one_line(files, capsys):
    assert main(["parity", str(files / "ref"), str(files / "nowhere")]) == 2
    assert "gradguard: error: cannot read" in capsys.readouterr().err

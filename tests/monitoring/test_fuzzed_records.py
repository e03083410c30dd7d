"""Damaged records, drawn from a seed: whoever reads one gets a report, or one line that says why not."""

import copy
import io
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic import write_char_rnn, write_gan, write_sick

from gradguard.errors import CommandError, RecordError
from gradguard.monitoring.judge.conditions import QUANTITIES, holding, parse_conditions
from gradguard.monitoring.judge.rule_replay import what_if
from gradguard.monitoring.record.file import RecordWriter, read_record
from gradguard.monitoring.show.live_tail import Watched
from gradguard.monitoring.show.replay_table import print_replay
from gradguard.monitoring.show.report import page
from gradguard.monitoring.show.report.figures import overlay
from gradguard.monitoring.show.report.json_summary import text_summary
from gradguard.monitoring.show.report.summary import print_comparison, print_summary
from gradguard.monitoring.show.tail_view import event_line, line, view

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 2**53, -(2**63), 10**30, 10**200, 10**400, 0.0, -0.0, 0.5, 1e-320,
    1e-300, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf, "", "nan", "[bold]x[/bold]", "\ud800",
    "\x1b[2J\x9b\u202e\u2066\x00\r\n", "é" * 300, [], [[]], [None], [1, 2], [3, 0.5], [-1, 0.5], [10**30, 0.5],
    ["norm", None, None], [["norm", 1.0, 0.5]], [1e308] * 9, [10**200] * 9, {}, {"t": "meta"}, {"name": {}}, {"a": [1]},
    "</script><script>",
)  # fmt: skip
CONDITIONS = parse_conditions(",".join(f"{quantity}>0" for quantity in QUANTITIES))


def write_everything(path: Path) -> None:
    """A record with every field that there is, and some of a later version."""
    generator = random.Random(0)
    params = [
        {"name": f"layers.{k}.weight", "shape": [4, 4], "numel": 16, "dtype": "float32", "group": 0} for k in range(9)
    ]
    params[2] |= {"frozen": True, "optimizer": 0}
    with RecordWriter(path) as writer:
        writer.write(
            "meta", version="0.1.0", schema=1, argv=["train.py", "--lr", "0.1"], clip="norm=1", torch="2", python="3",
            host_platform="Linux", git="abc", device="cpu", world=2, rank=0, mesh={"dp": 2}, optimizers=["SGD"],
            params=params,
        )  # fmt: skip
        for i in range(40):
            norm = math.exp(generator.gauss(0, 1))
            writer.write(
                "step", i=i, wall=0.1 * i, loss=2 / (1 + i), lr=0.1, norm=norm, post_norm=min(norm, 1), nonfinite=0,
                coefficient=min(1, 1 / norm), threshold=1.0, rule="norm", user_max_norm=1.0, amp_scale=1024.0,
                clips=[["norm", 1.0, 0.5], ["value", None, None]], skipped=i % 9 == 0 or None, top=[i % 9, 0.4],
                batch_size=64, accuracy=0.5,
                optimizer=0,
            )  # fmt: skip
            norms = [generator.random() for _ in params]
            writer.write(
                "tensors", i=i, norm=norms, max=norms, zeros=norms, weight=norms, update=norms, absent=[3],
                zero_rows=[0.5, None], histogram={"edges": [-3.0, -2.5, -2.0], "counts": [2, 1]},
            )  # fmt: skip
            writer.write(
                "event",
                i=i,
                kind="spike",
                severity="warning",
                message="m",
                advice="a",
                params=["w"],
                value=1.0,
                optimizer=0,
            )
        writer.write("hologram", depth=3)
        writer.write("end", steps=40, wall=4.0, overhead_ms=9.0, exit=0, interrupted=False, clips=3)


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("sound")
    write_everything(folder / "everything.jsonl")
    write_char_rnn(folder / "char_rnn.jsonl", steps=260, threshold=0.5)
    write_sick(folder / "sick.jsonl", steps=60)
    write_gan(folder / "gan.jsonl", steps=50)
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def damaged(sound: list[bytes], generator: random.Random) -> bytes:
    """One of the records with some damage: to fields, to types, to lines, to bytes."""
    content = generator.choices(sound, weights=[1, 6, 2, 2])[0]
    lines = [json.loads(raw) for raw in content.splitlines()]
    for _ in range(generator.choice((0, 1, 1, 1, 2, 5, 30))):
        _damage_field(lines, generator)
    texts = [json.dumps(each, ensure_ascii=generator.random() < 0.8) for each in lines]
    for _ in range(generator.choice((0, 0, 0, 1, 2, 10))):
        _damage_lines(texts, generator)
    data = bytearray("\n".join(texts).encode("utf-8", "surrogatepass") + b"\n")
    for _ in range(generator.choice((0, 0, 0, 1, 3, 40))):
        place = generator.randrange(len(data))
        data[place : place + generator.choice((0, 1, 1, 9))] = generator.randbytes(generator.choice((0, 1, 1, 4)))
        data = data or bytearray(b" ")
    if generator.random() < 0.05:
        data += generator.choice(sound)
    if generator.random() < 0.05:
        data = data.replace(b"\n", b"\r\n")
    return (b"\xef\xbb\xbf" if generator.random() < 0.03 else b"") + bytes(data)


def _damage_field(lines: list[Any], generator: random.Random) -> None:
    # Half of the damage goes to the few lines at either end, which matter most.
    target: Any = generator.choice(lines[:4] + lines[-2:] if generator.random() < 0.5 else lines)
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        if not keys:
            return
        key = generator.choice(keys)
        if isinstance(target[key], dict | list) and generator.random() < 0.6:
            target = target[key]
        elif generator.random() < 0.1:
            del target[key]
            return
        else:
            target[key] = copy.deepcopy(generator.choice(NASTY))
            return


def _damage_lines(texts: list[str], generator: random.Random) -> None:
    place = generator.randrange(len(texts))
    kind = generator.randrange(6)
    if kind == 0:
        texts.insert(generator.randrange(len(texts)), texts[place])
    elif kind == 1 and len(texts) > 1:
        del texts[place]
    elif kind == 2:
        texts[place] = texts[place][: generator.randrange(len(texts[place]) + 1)]
    elif kind == 3:
        texts[place] = "[" * 3000 + texts[place]
    elif kind == 4:
        texts[place] = generator.choice(
            ("", "   ", "\x00" * 50, "{}", '{"t": "end"}', '{"t": "meta"}', texts[place] * 2)
        )
    else:
        other = generator.randrange(len(texts))
        texts[place], texts[other] = texts[other], texts[place]


def look_at(path: Path) -> None:
    """Everything that is done with a record, but the page's own template, which takes longer than all the rest."""
    output = io.StringIO()
    console = Console(file=output, width=100)
    _follow(path, console)
    try:
        record = read_record(path)
    except RecordError:
        return
    print_summary(record, console)
    print_comparison([record, record], console)
    print_replay(record, what_if(record), console)
    print(text_summary(record), file=output)
    for condition in CONDITIONS:
        try:
            holding([condition], record)
        except CommandError:
            continue
    for number, part in enumerate(page.by_optimizer(record)):
        subject = page._subject(part, record, "run", f"run-{number}", 1)
        json.dumps(subject["environment"])
    drawn = overlay([record, record], ["first", "second"], 300)
    assert drawn is None or page._json(drawn.figure)
    shown = output.getvalue()
    assert all(char.isprintable() or char == "\n" for char in shown), repr(shown)


def _follow(path: Path, console: Console) -> None:
    watched = Watched(path)
    try:
        watched.look()
    except RecordError:
        return
    print(line(watched.run), *map(event_line, watched.run.events), sep="\n", file=console.file)
    if watched.there:
        console.print(view(watched.run, watched.status(0.0), watched.title(), 5, console))


def fuzz(sound: list[bytes], path: Path, seeds: range) -> Iterator[int]:
    for seed in seeds:
        path.write_bytes(damaged(sound, random.Random(seed)))
        try:
            look_at(path)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        yield seed


def test_a_sound_record_loses_nothing(sound, tmp_path):
    path = tmp_path / "run.jsonl"
    for content in sound:
        path.write_bytes(content)
        look_at(path)
        record = read_record(path)
        assert (record.unreadable, record.dropped, record.first_fault, record.torn) == (0, 0, "", False)


def test_damaged_records_are_read_or_refused_in_words(sound, tmp_path):
    assert sum(1 for _ in fuzz(sound, tmp_path / "run.jsonl", range(60))) == 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
def test_many_damaged_records_are_read_or_refused_in_words(sound, tmp_path, part):
    assert sum(1 for _ in fuzz(sound, tmp_path / "run.jsonl", range(1000 + 250 * part, 1250 + 250 * part))) == 250

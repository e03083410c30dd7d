"""Whatever a run did, no two sentences about it contradict each other, and every share says of which steps.

What is counted here, in a few lines over the plain lines of the record, is held against every number that the verdict,
the findings, the page, the terminal summary, the text and the JSON print.
"""

import html
import io
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from synthetic import log_normal, make_record, steps_of, write_char_rnn, write_gan, write_sick

from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.numbers import number, percent
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.show.report import json_summary, print_summary, text_summary
from gradguard.monitoring.show.report import page as page_module
from gradguard.monitoring.show.report.page import render

CALM = log_normal(400)


def clipped(norms, threshold=1.0, rule="norm", **meta):
    steps = steps_of(norms, threshold=threshold, rule=rule, loss=2.0)
    for step in steps:
        step["coefficient"] = min(1.0, threshold / step["norm"])
    return make_record(meta={"t": "meta", "optimizers": ["SGD"], **meta}, steps=steps)


def with_lost(record, *, skipped=(), nonfinite=()):
    steps = list(record.steps)
    for i in skipped:
        steps[i]["skipped"] = True
    for i in nonfinite:
        steps[i] |= {"norm": None, "nonfinite": 1}
        steps[i].pop("coefficient", None)
    return replace(record, steps=steps)


def late(record, since):
    steps = list(record.steps)
    for step in steps[:since]:
        for key in ("threshold", "rule", "coefficient"):
            del step[key]
    return replace(record, steps=steps)


def two_clips(own, applied, count=300):
    """A script that clips at ``own`` under ``--clip norm=applied``, some of whose steps are skipped or not finite."""
    record = clipped([3.0 + 2 * (i % 3) for i in range(count)], own, clip=f"norm={applied:g}")
    steps = list(record.steps)
    for step in steps:
        first = min(1.0, own / step["norm"])
        second = min(1.0, applied / (step["norm"] * first))
        step["coefficient"], step["clips"] = first * second, [["norm", own, first], ["norm", applied, second]]
        step["threshold"] = own if first <= second else applied
    return with_lost(replace(record, steps=steps), skipped=[5, 6], nonfinite=[9])


def without_threshold(count=120):
    steps = [{"t": "step", "i": i, "norm": 1.0, "rule": "AdaGC", "threshold": None, "coefficient": 1 - 0.3 * (i % 2)}
             for i in range(count)]  # fmt: skip
    return make_record(meta={"t": "meta", "optimizers": ["AdamW"]}, steps=steps)


RECORDS: dict[str, Callable[..., Record]] = {
    "no step": lambda folder: make_record(),
    "one step": lambda folder: make_record(steps=steps_of([1.0], loss=1.0)),
    "one clipped step": lambda folder: clipped([2.0]),
    "one step, not finite": lambda folder: with_lost(clipped([2.0]), nonfinite=[0]),
    "not clipped": lambda folder: make_record(steps=steps_of(CALM, loss=1.0)),
    "not clipped, some lost": lambda folder: with_lost(make_record(steps=steps_of(CALM)), skipped=[1], nonfinite=[2]),
    "never binds": lambda folder: clipped(CALM, 90.0),
    "never binds, one skipped": lambda folder: with_lost(clipped(CALM, 90.0), skipped=[0]),
    "guards": lambda folder: clipped([9.0 if i % 50 == 7 else norm for i, norm in enumerate(CALM)], 3.0),
    "shapes": lambda folder: clipped(CALM, 1.1),
    "always binds": lambda folder: clipped([20.0] * 300),
    "87 % of 299": lambda folder: with_lost(clipped([2.0 if i % 8 else 0.5 for i in range(300)]), skipped=[4]),
    "skipped, not finite, both": lambda folder: with_lost(clipped(CALM), skipped=range(9), nonfinite=range(5, 60, 3)),
    "all skipped": lambda folder: with_lost(clipped(CALM), skipped=range(400)),
    "all not finite": lambda folder: with_lost(clipped(CALM), nonfinite=range(400)),
    "clips late": lambda folder: late(clipped([2.0] * 300), 120),
    "by value": lambda folder: clipped(CALM, 0.9, rule="value"),
    "without a threshold": lambda folder: without_threshold(),
    "two clips, the second idle": lambda folder: two_clips(4.0, 6.0),
    "two clips, both bind": lambda folder: two_clips(6.0, 4.0),
    "no norm": lambda folder: make_record(steps=[{"t": "step", "i": i, "loss": 1.0} for i in range(300)]),
    "a recurrent network": lambda folder: write_char_rnn(folder / "run.jsonl", threshold=1.0),
    "sick": lambda folder: write_sick(folder / "run.jsonl"),
    "two optimizers": lambda folder: write_gan(folder / "run.jsonl"),
    "two optimizers, some lost": lambda folder: with_lost(write_gan(folder / "run.jsonl"), skipped=[7], nonfinite=[8]),
}  # fmt: skip


class Counts:
    """What a run did, counted from the lines of its steps."""

    def __init__(self, steps):
        self.steps = len(steps)
        self.skipped = sum(bool(step.get("skipped")) for step in steps)
        lost = [bool(step.get("nonfinite")) or step.get("norm", 0.0) is None for step in steps]
        self.nonfinite = sum(lost)
        taken = [step for step, bad in zip(steps, lost, strict=True) if not bad and not step.get("skipped")]
        acted = [step for step in taken if "rule" in step or "threshold" in step or "coefficient" in step]
        self.taken, self.acted = len(taken), len(acted)
        bound = [step["coefficient"] for step in taken if step.get("coefficient", 1.0) < 1 - 1e-9]
        self.bound, self.coefficient = len(bound), statistics.median(bound) if bound else None
        warm_up = len(steps) // 10 if len(steps) < 1000 else max(len(steps) // 50, 100)
        self.usable = sum(
            bool(step.get("norm")) and not step.get("skipped") and not step.get("nonfinite") for step in steps[warm_up:]
        )
        norms = [step["norm"] for step in steps if step.get("norm") is not None]
        self.median = statistics.median(norms) if norms else None
        clips = [step["clips"] for step in taken if "clips" in step]
        self.each = [sum(clip[k][2] < 1 - 1e-9 for clip in clips) for k in range(2 if clips else 0)]

    def share(self, count, of):
        return percent(count / of) if of else "0 %"


def counts_of(record):
    """Of the whole run, and of each of its optimizers."""
    own = {step.get("optimizer") for step in record.steps}
    parts = [[step for step in record.steps if step.get("optimizer") == one] for one in own] if len(own) > 1 else []
    return [Counts(steps) for steps in (record.steps, *parts)]


STEPS = r"(?:the )?([\d,]+) steps?"
PATTERNS: dict[str, tuple[str, Callable[[Counts], list[tuple]]]] = {
    "bound on": (
        rf"lipping[^.;:|]*? bound on ([\d.e+]+ %) of {STEPS}",
        # the verdict speaks of all steps taken, a finding of those on which the clip acted
        lambda c: [(c.share(c.bound, c.taken), f"{c.taken:,}"), (c.share(c.bound, c.acted), f"{c.acted:,}")],
    ),
    "that it acted on": (
        r"\(([\d.e+]+ %) of the ([\d,]+) that it acted on\)",
        lambda c: [(c.share(c.bound, c.acted), f"{c.acted:,}")],
    ),
    "never bound": (rf"never bound in {STEPS}", lambda c: [(f"{c.taken:,}",), (f"{c.acted:,}",)]),
    "no clipping": (rf"No clipping in {STEPS}", lambda c: [(f"{c.steps:,}",)]),
    "together": (r"Together they bound on ([\d.e+]+ %)", lambda c: [(c.share(c.bound, c.taken),)]),
    "the script's own": (
        r"the script's own norm=\S+ bound on ([\d.e+]+ %)",
        lambda c: [(c.share(count, c.taken),) for count in c.each[:1]],
    ),
    "--clip": (
        r"--clip norm=\S+ bound on ([\d.e+]+ %)",
        lambda c: [(c.share(count, c.taken),) for count in c.each[1:]],
    ),
    "clips on": (rf"2 clips, on {STEPS}", lambda c: [(f"{c.taken:,}",)]),
    "spikes": (rf"([\d.e+]+ %) of {STEPS} after the warm-up were spikes", lambda c: [(f"{c.usable:,}",)]),
    "lost": (
        rf"Of {STEPS}: (?:([\d,]+) skipped\. )?([\d,]+) non-finite\.",
        lambda c: [(f"{c.steps:,}", f"{c.skipped:,}" if c.skipped else None, f"{c.nonfinite:,}")],
    ),
    "not finite": (r"gradients were not finite[^;|]*? on ([\d,]+) steps?,", lambda c: [(f"{c.nonfinite:,}",)]),
    "usable steps": (r"([\d,]+) usable steps", lambda c: [(f"{c.usable:,}",)]),
    "median norm": (r"(?:orms(?: before clipping)?: median|overall median) (\S+?),", lambda c: [(number(c.median),)]),
    "text: steps": (r"(?m)^(?:optimizer_\d_)?steps: (\d+)$", lambda c: [(f"{c.steps}",)]),
    "text: lost": (r"(?m)^(?:optimizer_\d_)?nonfinite_steps: (\d+)$", lambda c: [(f"{c.nonfinite}",)]),
    "text: skipped": (r"(?m)^(?:optimizer_\d_)?skipped_steps: (\d+)$", lambda c: [(f"{c.skipped}",)]),
    "text: share": (
        r"(?m)^(?:optimizer_\d_)?clip_share: (\S+)$",
        lambda c: [(f"{c.bound / c.taken:.4g}",)] if c.taken else [],
    ),
}


def surfaces(record):
    """All that is printed about a run, by where it stands."""
    page = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", render([record]))
    terminal = io.StringIO()
    print_summary(record, Console(file=terminal, width=10_000))
    return {
        "verdict": verdict(record).sentence,
        "findings": " | ".join(found.message for found in findings(record)),
        "text": text_summary(record),
        "terminal": terminal.getvalue(),
        "page": html.unescape(re.sub(r"<[^>]*>", " | ", page)) + " | ".join(re.findall(r'aria-label="(.*?)"', page)),
        "json": json_summary([record]),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each record, and what is printed about it."""
    with pytest.MonkeyPatch.context() as patch:
        read = page_module._text
        patch.setattr(page_module, "_text", lambda name: "" if name == page_module._PLOTLY_JS else read(name))
        records = {name: make(tmp_path_factory.mktemp("run")) for name, make in RECORDS.items()}
        return {name: (record, surfaces(record)) for name, record in records.items()}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", RECORDS)
def test_every_number_that_is_printed_is_the_one_that_was_counted(name, runs):
    record, printed = runs[name]
    counted = counts_of(record)
    for where, text in printed.items():
        for kind, (pattern, expected) in PATTERNS.items():
            allowed = [one for counts in counted for one in expected(counts)]
            for found in re.finditer(pattern, text):
                said = found.groups()[-1:] if kind == "spikes" else found.groups()
                assert said in allowed, f"{where}, {kind}: {found.group()}"


@pytest.mark.parametrize("name", RECORDS)
def test_every_share_says_of_which_steps(name, runs):
    _, printed = runs[name]
    for where in ("verdict", "findings"):
        assert not re.search(r"% of (the )?steps\b", printed[where])


@pytest.mark.parametrize("name", RECORDS)
def test_the_numbers_for_machines_are_those_that_were_counted(name, runs):
    record, printed = runs[name]
    whole, *parts = counts_of(record)
    found = json.loads(printed["json"])
    for told, counts in [(found, whole), *zip(found["optimizers"], parts, strict=True)]:
        assert (told["steps"], told["taken_steps"]) == (counts.steps, counts.taken)
        assert (told["skipped_steps"], told["nonfinite_steps"]) == (counts.skipped, counts.nonfinite)
        assert told["clip_share"] == (counts.bound / counts.taken if counts.taken else None)
        assert told["median_coefficient"] == counts.coefficient
        assert told["median_norm"] == counts.median
        if counts.each:
            assert [clip["bound_steps"] for clip in told["clips"]] == counts.each


def test_every_pattern_is_found_somewhere(runs):
    """Words that change would otherwise end the checks above without a sound."""
    text = "\n".join(text for _, printed in runs.values() for text in printed.values())
    assert [kind for kind, (pattern, _) in PATTERNS.items() if not re.search(pattern, text)] == []

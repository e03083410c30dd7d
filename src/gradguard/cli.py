"""The command line: parse, call, print, exit code; nothing else."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradguard import __version__
from gradguard.errors import CommandError, GradguardError
from gradguard.monitoring.record.text import on_stderr, printable

if TYPE_CHECKING:
    from gradguard.monitoring.judge.conditions import Condition
    from gradguard.monitoring.record.file import Record

_RUN_USAGE = "gradguard run [--out DIR] [--force] [--every N] [--clip RULE] [--argv] (script.py | -m module) [args ...]"
_INPUT_HELP = (
    "an input of standard normal numbers (integers: 0 and 1), as in x=2,3:float32; float32 without a dtype, x= for a "
    "single number, 0=2,3 for the first by position"
)
_RULES = ("norm", "value", "adaptive")
_FAIL_ON_HELP = (
    'exit code 1 if one of these holds, as in "nonfinite>0,clip_fraction>0.5"; 2 if one is not measured. Known: '
    "nonfinite, skipped, clip_fraction, max_norm, median_norm, spike_fraction, drift, lock_in, final_loss, overhead, "
    "errors, warnings"
)
_OUTPUT_HELP = "the HTML file; by default beside the record, with its name: run.html; report.html for several records"
_REPLAY_HELP = (
    "norm=1.0, median, autoclip, zclip (zclip=inf without its ceiling of 1.0), clip_fraction=0.05, icefall or adagc; "
    "may be given several times. Default: a choice of them and the recommended threshold"
)
_CLIP_HELP = (
    "clip before each step: norm=1.0, value=0.5, adaptive=0.01, or from=RECORD for the threshold that RECORD's report "
    "recommends. Default: observe only, the weights come out bit-identical"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``argv`` and return its exit code: 2 for what cannot be carried out, with no traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return _run(arguments[1:])
        parsed = _parser().parse_args(arguments)
        from gradguard.monitoring.show.tail import encodable

        with encodable(sys.stdout):
            if parsed.command == "check":
                return _check(parsed)
            if parsed.command == "tail":
                return _tail(parsed)
            if parsed.command == "replay":
                return _replay(parsed)
            return _report(parsed.records, parsed.output, parsed.text, parsed.fail_on)
    except GradguardError as error:
        shown = "\n".join(map(printable, str(error).splitlines()))
        print(f"gradguard: error: {shown}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradguard", description="Gradients you can trust.")
    parser.add_argument("--version", action="version", version=f"gradguard {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    commands.add_parser("run", usage=_RUN_USAGE, help="observe a training script without a change to it")
    report = commands.add_parser("report", help="draw the record of a run, or of several side by side")
    report.add_argument("records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or the folder it is in")
    report.add_argument("-o", "--output", type=Path, help=_OUTPUT_HELP)
    report.add_argument("--text", action="store_true", help="print a few lines of key: value instead of drawing")
    report.add_argument("--fail-on", metavar="CONDITIONS", help=_FAIL_ON_HELP)
    _add_replay(commands.add_parser("replay", help="show what other clipping rules would have done to a run"))
    _add_tail(commands.add_parser("tail", help="follow a run in progress in the terminal"))
    _add_check(commands.add_parser("check", help="check the backward of a function against numerical differences"))
    return parser


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.description = "Counterfactual: each rule is shown the recorded norms, without feedback into training."
    replay.add_argument("records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or the folder it is in")
    replay.add_argument("--rule", action="append", metavar="RULE", help=_REPLAY_HELP)


def _add_tail(tail: argparse.ArgumentParser) -> None:
    tail.description = "Exit code: 0 when the run has ended or with --once, 130 after Ctrl-C."
    tail.add_argument("record", type=Path, metavar="run.jsonl", help="a record, or its folder; waited for if not there")
    tail.add_argument("--once", action="store_true", help="show what is there now and return")
    tail.add_argument("--lines", type=int, default=5, metavar="N", help="how many of the last events to show, 5")


def _add_check(check: argparse.ArgumentParser) -> None:
    check.description = "Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 for what cannot be carried out."
    check.add_argument("target", metavar="package.module:name", help="a function, a module or its class")
    check.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE:DTYPE", help=_INPUT_HELP)
    check.add_argument(
        "--seed", type=int, default=0, metavar="N", help="what the inputs and the weights are drawn from"
    )
    check.add_argument("--exhaustive", action="store_true", help="check every element")
    check.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    check.add_argument("--rtol", type=float, default=0.0, help="the relative error of a solver that stops early")
    check.add_argument("--order", type=int, choices=(1, 2), default=1, help="2: check the second derivative too")
    check.add_argument("--reference", metavar="module:name", help="the same function in float64, for half precision")


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradguard run", usage=_RUN_USAGE, allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where run.jsonl and run.html go")
    parser.add_argument("--force", action="store_true", help="replace the record that DIR already holds")
    parser.add_argument("--argv", action="store_true", help="record the arguments as they are: secrets are not hidden")
    parser.add_argument("--every", type=int, metavar="N", help="record each parameter's norm every N steps")
    parser.add_argument("--clip", metavar="RULE", help=_CLIP_HELP)
    return parser


def _run(argv: Sequence[str]) -> int:
    own, target, is_module = _split(argv)
    parser = _run_parser()
    options = parser.parse_args(own)
    if not target:
        raise CommandError(f"nothing to run. Usage: {_RUN_USAGE}")
    if options.every is not None and options.every < 1:
        raise CommandError(f"--every {options.every}: expected a number of steps, at least 1.")
    rule = _parse_clip(options.clip) if options.clip is not None else None

    from gradguard.monitoring.observe.meta import rank_and_world
    from gradguard.monitoring.observe.script import load_module, load_script

    program = (load_module if is_module else load_script)(target[0], target[1:])
    folder = options.out or Path("runs") / f"{Path(target[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = "run.jsonl" if restarts == "0" else f"run.restart-{restarts}.jsonl"
    record = (folder / name).absolute()  # the script may change the working directory
    if rank_and_world()[0] > 0:  # another process writes
        record = None
    elif record.exists() and not options.force:
        raise CommandError(f"{record} exists: choose another --out, or add --force to replace it.")
    from gradguard.monitoring.observe.meta import program_facts

    clip = f"{rule[0]}={rule[1]:g}" if rule else None
    facts = program_facts([*["-m"] * is_module, *target], clip, keep_arguments=options.argv)
    return _observe(program, facts, record, rule, options.every, options.force)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Cut a command line into our own options and the program's, and tell whether it is a module."""
    takes_value = {"--out", "--every", "--clip"}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        if argv[i] in ("-m", "--"):
            return list(argv[:i]), list(argv[i + 1 :]), argv[i] == "-m"
        i += 2 if argv[i] in takes_value else 1
    return list(argv[:i]), list(argv[i:]), False


def _parse_clip(text: str) -> tuple[str, float]:
    """The rule and threshold in ``norm=1.0`` or ``from=run.jsonl``."""
    rule, _, value = text.partition("=")
    if rule == "from" and value:
        return "norm", _recommended(Path(value))
    try:
        threshold = float(value)
    except ValueError:
        threshold = math.nan
    if rule not in _RULES:
        raise CommandError(f"--clip {text}: unknown rule {rule!r}; expected norm=, value=, adaptive= or from=RECORD.")
    if not 0 < threshold < math.inf:
        raise CommandError(f"--clip {text}: expected a threshold above 0, as in {rule}=1.0.")
    return rule, threshold


def _recommended(path: Path) -> float:
    from gradguard.monitoring.judge.recommend import recommend
    from gradguard.monitoring.record.file import read_record

    record = read_record(path)
    _tell_notes([record])
    found = recommend(record)
    if found.threshold is None:
        raise CommandError(f"--clip from={path}: that record recommends no threshold: {found.reason}")
    return found.threshold


def _observe(
    program, facts: dict, record: Path | None, rule: tuple[str, float] | None, every: int | None, force: bool
) -> int:
    from gradguard.monitoring.observe.observer import AppliedClip, Observer, observe
    from gradguard.monitoring.observe.script import BY_SIGNAL, run
    from gradguard.monitoring.observe.watch import children_watched, records_beside, stop_watching

    stop_watching()  # where the environment variable asks for a watch, this one is it

    def opened() -> Path | None:  # at the first step: a program without one leaves nothing behind
        if record is not None and force:
            record.unlink(missing_ok=True)
        return record

    clip = AppliedClip(*rule, bind=_binder(*rule)) if rule else None
    observer = Observer(opened, facts, clip, every)
    code, process, here = 1, os.getpid(), Path.cwd()
    before = set(records_beside(record))
    try:
        with observe(observer), children_watched(record):
            code = run(program, in_order=record is not None)
    finally:
        observer.close(code, interrupted=code in BY_SIGNAL)
        if os.getpid() == process and record is not None:  # not in a child that the script forked
            new = [path for path in records_beside(record) if path not in before]
            shown = observer.path or (record if record in new else None)  # a process of rank 0 has written it
            others = [path for path in new if path != shown]
            if shown is not None:
                _show(shown, here)
            else:
                on_stderr(_no_step(code, observer.clip_calls, bool(others)))
            if rule is not None and [path for path in new if path != observer.path]:
                on_stderr("--clip acts in this process alone: the processes that it started were watched, not clipped.")
            for path in others:
                on_stderr(f"a process that it started has the record {_short(path, here)}")
    return code


def _no_step(code: int, clip_calls: int, elsewhere: bool) -> str:
    if elsewhere:
        return "this process made no optimizer step, others did; draw one: gradguard report RECORD."
    if code:
        return "it ended before its first optimizer step, so there is no record."
    seen = f"{clip_calls:,} clip calls were seen, but no optimizer step" if clip_calls else "no optimizer step was seen"
    return (
        f"{seen}, so there is no record. What is seen is step() of every torch.optim optimizer, and not weights that a "
        "script or an engine changes by itself."
    )


def _binder(rule: str, threshold: float):
    """What applies a clip to the parameters of a step, once the modules are known."""
    from gradguard.clip.adaptive import clip_adaptive
    from gradguard.clip.adaptive_units import unit_layouts
    from gradguard.clip.functional import clip_grad_norm_, clip_grad_value_

    def bind(modules):
        layouts = {key: layout for module in modules for key, layout in unit_layouts(module).items()}
        return {
            "norm": lambda parameters, scale: clip_grad_norm_(parameters, threshold * scale),
            "value": lambda parameters, scale: clip_grad_value_(parameters, threshold * scale),
            "adaptive": lambda parameters, scale: clip_adaptive(parameters, threshold * scale, layouts=layouts),
        }[rule]

    return bind


def _show(record: Path, here: Path) -> None:
    """Draw the report of a finished run and print its summary; a failure here must not hide the script's own."""
    from gradguard.monitoring.record.file import read_record
    from gradguard.monitoring.show.report import page_beside, print_summary, write_report
    from gradguard.monitoring.show.tail import encodable

    if not record.exists():  # somebody deleted it, of which they have been warned
        return
    try:
        found = read_record(record)
        if not found.steps:  # the page would say nothing
            why = "".join(f" {event.get('message', '')}." for event in found.events[-1:])
            on_stderr(f"no optimizer step was recorded, so there is no report.{why} See {_short(record, here)}")
            return
        page = write_report([found], page_beside(record))
        with encodable(sys.stdout):
            print_summary(found)
            print(f"record: {printable(_short(record, here))}\nreport: {printable(_short(page, here))}")
    except Exception as error:
        on_stderr(f"the record is in {record}, but its report failed: {error}")


def _short(path: Path, here: Path) -> str:
    """The path from ``here``, if it is below."""
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _check(parsed: argparse.Namespace) -> int:
    from gradguard.check.command import check_command

    report = check_command(
        parsed.target, parsed.input, parsed.reference, parsed.seed, parsed.exhaustive, parsed.order, parsed.rtol
    )
    print(json.dumps(report.as_dict(), allow_nan=False) if parsed.json else report)
    return {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[report.verdict]


def _tail(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.show.tail import tail

    return tail(parsed.record, once=parsed.once, events=parsed.lines)


def _report(paths: Sequence[Path], output: Path | None, text: bool, fail_on: str | None = None) -> int:
    from gradguard.monitoring.judge.conditions import parse_conditions
    from gradguard.monitoring.record.file import read_record
    from gradguard.monitoring.show.report import page_beside, print_comparison, text_summary, write_report

    conditions = parse_conditions(fail_on) if fail_on is not None else []
    records = [read_record(path) for path in paths]
    if text:
        print("\n\n".join(text_summary(record) for record in records))
    else:
        _tell_notes(records)
        if len(records) > 1:
            print_comparison(records)
        first = records[0].path
        page = output or (page_beside(first) if len(records) == 1 else first.with_name("report.html"))
        print(f"report: {printable(write_report(records, page))}")
    return _fails(records, conditions)  # after the report, which shows why


def _fails(records: Sequence["Record"], conditions: "list[Condition]") -> int:
    """Say which conditions hold of which record; 1 if one does."""
    from gradguard.monitoring.judge.conditions import holding

    said = [f"{record.path}: {words}" for record in records for words in holding(conditions, record)]
    for words in said:
        on_stderr(f"failed: {words}")
    return 1 if said else 0


def _tell_notes(records: Sequence["Record"]) -> None:
    """Say on stderr what is to be known before the numbers of a record are believed."""
    from gradguard.monitoring.show.report.summary import notes

    for record in records:
        for note in notes(record):
            on_stderr(f"{record.path}: {note}")


def _replay(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.judge.replay import print_replay, what_if
    from gradguard.monitoring.record.file import read_record

    records = [read_record(path) for path in parsed.records]
    _tell_notes(records)
    tables = [what_if(record, parsed.rule) for record in records]
    for record, rows in zip(records, tables, strict=True):
        print_replay(record, rows)
    return 0

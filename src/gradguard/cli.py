"""The command line: parse, call, print, exit code; nothing else."""

import argparse
import json
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
    from gradguard.clip.each_optimizer import ClipEachOptimizer
    from gradguard.monitoring.judge.conditions import Condition
    from gradguard.monitoring.record.file import Record
    from gradguard.monitoring.show.alerts import AlertCommand
    from gradguard.monitoring.tune.trials import Plan
    from gradguard.named_rules import NamedRule

_RUN_USAGE = (
    "gradguard run [--out DIR] [--force] [--every N] [--clip RULE] [--steps N] [--seed N] [--no-report] "
    "[--on-finding COMMAND] [--argv] (script.py | -m module) [args ...]"
)
_TUNE_USAGE = (
    "gradguard tune [--steps N] [--seeds K] [--rule RULE ...] [--record RECORD] [--out DIR] [--force] [--json] "
    "(script.py | -m module) [args ...]"
)
_INPUT_HELP = (
    "an input of standard normal numbers (integers: 0 and 1), as in x=2,3:float32; float32 without a dtype, x= for a "
    "single number, 0=2,3 for the first by position"
)
_FAIL_ON_HELP = (
    'exit code 1 if one of these holds, as in "exploding,nonfinite>0,clip_fraction>0.5"; 2 if one is not measured. The '
    "name of a finding holds if there is one. To compare with a number: nonfinite, skipped, clip_fraction, max_norm, "
    "median_norm, spike_fraction, drift, lock_in, final_loss, overhead, errors, warnings, or findings of a kind"
)
_ON_FINDING_HELP = (
    "run this in the background for each health finding: the finding as JSON on its stdin, and in words as its last "
    "argument. No shell sees it"
)
_TEXT_HELP = "print a few lines of key: value instead of drawing"
_JSON_HELP = "print the same as JSON: an object, of several records a list of them"
_OUTPUT_HELP = "the HTML file; by default beside the record, with its name: run.html; report.html for several records"
_REPLAY_HELP = (
    "norm=1.0, median, autoclip, zclip (zclip=inf without its ceiling of 1.0), clip_fraction=0.05, icefall or adagc; "
    "may be given several times. Default: a choice of them and the recommended threshold"
)
_CLIP_HELP = (
    "clip before each step: by a threshold (norm=1.0, value=0.5, adaptive=0.01), by a rule that follows the norms of "
    "each optimizer (median, autoclip, zclip=inf, clip_fraction=0.05, adagc=inf), or from=RECORD, as RECORD's report "
    "recommends. Default: observe only, the weights come out bit-identical"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``argv`` and return its exit code: 2 for what cannot be carried out, with no traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return _run(arguments[1:])
        if arguments[:1] == ["tune"]:
            return _tune(arguments[1:])
        parsed = _parser().parse_args(arguments)
        from gradguard.monitoring.show.tail import encodable

        with encodable(sys.stdout):
            if parsed.command == "check":
                return _check(parsed)
            if parsed.command == "tail":
                return _tail(parsed)
            if parsed.command == "serve":
                return _serve(parsed)
            if parsed.command == "replay":
                return _replay(parsed)
            return _report(parsed.records, parsed.output, parsed.form, parsed.fail_on)
    except GradguardError as error:
        shown = "\n".join(map(printable, str(error).splitlines()))
        print(f"gradguard: error: {shown}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradguard", description="Gradients you can trust.")
    parser.add_argument("--version", action="version", version=f"gradguard {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    commands.add_parser("run", usage=_RUN_USAGE, help="observe a training script without a change to it")
    commands.add_parser("tune", usage=_TUNE_USAGE, help="run a script briefly under several rules: which trains best?")
    report = commands.add_parser("report", help="draw the record of a run, or of several side by side")
    report.add_argument("records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or the folder it is in")
    report.add_argument("-o", "--output", type=Path, help=_OUTPUT_HELP)
    form = report.add_mutually_exclusive_group()
    form.add_argument("--text", dest="form", action="store_const", const="text", help=_TEXT_HELP)
    form.add_argument("--json", dest="form", action="store_const", const="json", help=_JSON_HELP)
    report.add_argument("--fail-on", metavar="CONDITIONS", help=_FAIL_ON_HELP)
    _add_replay(commands.add_parser("replay", help="show what other clipping rules would have done to a run"))
    _add_tail(commands.add_parser("tail", help="follow a run in progress in the terminal"))
    serve = commands.add_parser("serve", help="show runs in the browser, on a page that follows them")
    serve.description = "The report as a page on 127.0.0.1, which follows runs in progress until Ctrl-C."
    serve.add_argument(
        "records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or its folder; waited for if not there"
    )
    serve.add_argument("--port", type=int, default=0, metavar="N", help="where to listen; by default a free port")
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
    parser.add_argument("--steps", type=int, metavar="N", help="end the script after N optimizer steps")
    parser.add_argument("--seed", type=int, metavar="N", help="seed random, numpy and torch before the script starts")
    parser.add_argument("--no-report", action="store_true", help="write the record and nothing else")
    parser.add_argument("--on-finding", metavar="COMMAND", help=_ON_FINDING_HELP)
    return parser


def _run(argv: Sequence[str]) -> int:
    own, target, is_module = _split(argv)
    parser = _run_parser()
    options = parser.parse_args(own)
    if not target:
        raise CommandError(f"nothing to run. Usage: {_RUN_USAGE}")
    for name in ("every", "steps"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise CommandError(f"--{name} {number}: expected a number of steps, at least 1.")
    if options.seed is not None and not 0 <= options.seed < 2**32:
        raise CommandError(f"--seed {options.seed}: expected a number from 0 to 4294967295.")
    rule = _rule(options.clip) if options.clip is not None else None

    from gradguard.monitoring.observe.meta import rank_and_world
    from gradguard.monitoring.observe.script import load_module, load_script
    from gradguard.monitoring.show.alerts import AlertCommand

    command = options.on_finding if rank_and_world()[0] == 0 else None
    alert = None if command is None else AlertCommand(command)
    program = (load_module if is_module else load_script)(target[0], target[1:])
    folder = options.out or Path("runs") / f"{Path(target[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = "run.jsonl" if restarts == "0" else f"run.restart-{restarts}.jsonl"
    record = (folder / name).absolute()  # the script may change the working directory
    if rank_and_world()[0] > 0:  # another process writes
        record = None
    elif record.exists() and not options.force:
        raise CommandError(f"{record} exists: choose another --out, or add --force to replace it.")
    return _observe(program, [*["-m"] * is_module, *target], record, rule, options, alert)


def _tune_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradguard tune", usage=_TUNE_USAGE, allow_abbrev=False)
    parser.description = (
        "Runs the script as it is, by the rule that its record recommends and by two constants, with the same seeds, "
        "and compares their training losses. {seed} in an argument of the script stands for the seed."
    )
    parser.add_argument("--steps", type=int, default=250, metavar="N", help="optimizer steps of a run, 250")
    parser.add_argument("--seeds", type=int, default=3, metavar="K", help="runs of each rule, 3")
    parser.add_argument("--rule", action="append", metavar="RULE", help="a rule as for run --clip, in place of ours")
    parser.add_argument("--record", type=Path, metavar="RECORD", help="take the rules from this record")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the records of all runs go")
    parser.add_argument("--force", action="store_true", help="replace the records that DIR already holds")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return parser


def _tune(argv: Sequence[str]) -> int:
    own, target, is_module = _split(argv)
    options = _tune_parser().parse_args(own)
    if not target:
        raise CommandError(f"nothing to run. Usage: {_TUNE_USAGE}")
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            raise CommandError(f"--{name} {getattr(options, name)}: expected a whole number, at least 1.")
    folder = options.out or Path("runs") / f"tune-{Path(target[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not options.force and folder.exists() and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty: choose another --out, or add --force to replace its records.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CommandError("tune starts its runs itself: start it once, without torchrun or another launcher.")
    from gradguard.monitoring.tune.trials import Plan

    shown = [*["-m"] * is_module, *target]
    return _try(Plan(shown, folder, options.steps, options.seeds, options.rule, options.record), options.json)


def _try(plan: "Plan", as_json: bool) -> int:
    from gradguard.monitoring.show.tail import encodable
    from gradguard.monitoring.tune.show import print_summary, summary
    from gradguard.monitoring.tune.trials import Trials

    trials, code = Trials(plan, lambda line: print(line, file=sys.stderr, flush=True)), 0
    try:
        trials.run()
    except KeyboardInterrupt:
        code = 130
    if trials.runs:
        with encodable(sys.stdout):
            if as_json:
                print(json.dumps(summary(trials), allow_nan=False))
            else:
                print_summary(trials)
    return code


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Cut a command line into our own options and the program's, and tell whether it is a module."""
    takes_value = {"--on-finding", "--out", "--every", "--clip", "--steps", "--seed", "--seeds", "--rule", "--record"}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        if argv[i] in ("-m", "--"):
            return list(argv[:i]), list(argv[i + 1 :]), argv[i] == "-m"
        i += 2 if argv[i] in takes_value else 1
    return list(argv[:i]), list(argv[i:]), False


def _rule(text: str) -> "NamedRule":
    """The rule in ``norm=1.0``, or that which the record in ``from=run.jsonl`` recommends."""
    from gradguard.named_rules import clipping_rule

    name, _, path = text.partition("=")
    return clipping_rule(_recommended(Path(path)) if name == "from" and path else text)


def _recommended(path: Path) -> str:
    from gradguard.monitoring.judge.recommend import recommend
    from gradguard.monitoring.record.file import read_record

    record = read_record(path)
    _tell_notes([record])
    found = recommend(record)
    if found.rule is None:
        raise CommandError(
            f"--clip from={path}: that record recommends no rule. {found.headline} {found.reason} Or name a rule "
            "yourself, as in --clip median."
        )
    return found.rule


def _observe(
    program,
    shown: list[str],
    record: Path | None,
    rule: "NamedRule | None",
    options: argparse.Namespace,
    alert: "AlertCommand | None",
) -> int:
    from gradguard.monitoring.observe.meta import program_facts
    from gradguard.monitoring.observe.observer import Observer, observe
    from gradguard.monitoring.observe.script import BY_SIGNAL, run, seed_generators
    from gradguard.monitoring.observe.watch import children_watched, records_beside, stop_watching

    stop_watching()  # where the environment variable asks for a watch, this one is it

    def opened() -> Path | None:  # at the first step: a program without one leaves nothing behind
        if record is not None and options.force:
            record.unlink(missing_ok=True)
        return record

    clip = None if rule is None else _clip_by(rule)
    facts = program_facts(shown, None if rule is None else rule.text, keep_arguments=options.argv)
    observer = Observer(opened, facts, clip, options.every, last_step=options.steps, on_finding=alert)
    code, process, here = 1, os.getpid(), Path.cwd()
    before = set(records_beside(record))
    if options.seed is not None:
        seed_generators(options.seed)
    try:
        with observe(observer), children_watched(record):
            code = run(program, in_order=record is not None)
    finally:
        observer.close(code, interrupted=code in BY_SIGNAL)
        if os.getpid() == process and record is not None:  # not in a child that the script forked
            new = [path for path in records_beside(record) if path not in before]
            shown_record = observer.path or (record if record in new else None)  # a process of rank 0 has written it
            others = [path for path in new if path != shown_record]
            if shown_record is None:
                on_stderr(_no_step(code, observer.clip_calls, bool(others)))
            elif not options.no_report:
                _show(shown_record, here)
            if rule is not None and [path for path in new if path != observer.path]:
                on_stderr("--clip acts in this process alone: the processes that it started were watched, not clipped.")
            for path in others:
                on_stderr(f"a process that it started has the record {_short(path, here)}")
            if alert is not None and alert.failures:
                on_stderr(alert.report())
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


def _clip_by(rule: "NamedRule") -> "ClipEachOptimizer":
    """What applies the rule to the gradients of each optimizer."""
    import gradguard
    from gradguard.clip.each_optimizer import ClipEachOptimizer

    name, arguments = rule.clipper
    return ClipEachOptimizer(lambda: getattr(gradguard, name)(**arguments))


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


def _serve(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.show.serve import serve

    serve(parsed.records, parsed.port)
    return 0


def _report(paths: Sequence[Path], output: Path | None, form: str | None, fail_on: str | None = None) -> int:
    from gradguard.monitoring.judge.conditions import parse_conditions
    from gradguard.monitoring.record.file import read_record
    from gradguard.monitoring.show.report import (
        json_summary,
        page_beside,
        print_comparison,
        text_summary,
        write_report,
    )

    if form is not None and output is not None:
        raise CommandError(f"--{form} prints: redirect it to a file instead of -o {output}.")
    conditions = parse_conditions(fail_on) if fail_on is not None else []
    records = [read_record(path) for path in paths]
    if form == "text":
        print("\n\n".join(text_summary(record) for record in records))
    elif form == "json":
        print(json_summary(records))
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

"""`gradguard run`: observe a training script without a change to it, and draw what was seen."""

import argparse
import functools
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradguard.cli.program import RECORDING, ProgramLine, add_number, add_program, first_given, nothing_to_run
from gradguard.cli.records import progress, read, tell_notes
from gradguard.cli.save_gradients import save_gradients_of
from gradguard.cli.verdict import EXIT_CODES
from gradguard.errors import CommandError, GradguardError, RecordError, refuse
from gradguard.monitoring.record.text import encodable, on_stderr, printable

if TYPE_CHECKING:
    from gradguard.audit.in_script import ScriptAudit
    from gradguard.clip.guards_of_a_script import ClipEachOptimizer
    from gradguard.monitoring.observe.observer import Observer
    from gradguard.monitoring.observe.script import Program
    from gradguard.monitoring.observe.termination import SignalHandlers
    from gradguard.named_rules import NamedRule
    from gradguard.resilience.recovery_of_a_script import GuardEachOptimizer

_AUDIT_HELP = (
    "compare the norm that the script clips by with the true one, for 3 steps or --steps, record nothing, and then end "
    "the script; with an option of a record, such as --out, record the whole run too. "
    "Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 if the script fails before"
)
_CLIP_HELP = (
    "clip before each step: by a threshold (norm=1.0, value=0.5, adaptive=0.01, or adaptive=0.01,exclude=fc to leave "
    "the module or parameter fc alone), by a rule that follows the norms of "
    "each optimizer (median, autoclip, zclip=inf, clip_fraction=0.05, adagc=inf), or from=RECORD, as RECORD's report "
    "recommends. Default: observe only, the weights come out bit-identical"
)

_SAVE_HELP = (
    "save the gradients of the first optimizer step for `gradguard parity`: the script is started once, and forks "
    "for each of six runs that differ by rounding. With --at N those of step N, with "
    "--steps K whole steps: what a clip leaves, the optimizer's state and the weights; then nine runs. With another "
    "option, such as --out, it is then run as without this one"
)

_STEPS_HELP = "end the script after N optimizer steps; with --save-gradients, save N whole steps"

_SEED_HELP = "seed random, numpy and torch before the script starts"

_PERTURBED_HELP = "runs that differ by rounding (default: 4)"

_LAUNCH_HELP = (
    "with --save-gradients: start the processes with this command, such as 'torchrun --nproc-per-node 8', or "
    "'mpirun -n 8 python'"
)

_RESILIENT_HELP = (
    "skip the steps of each optimizer whose loss, or norm before any clip, stands far above its recent past, and those "
    "that are not finite; all others come out bit-identical"
)


def add_to(commands) -> None:
    """Add the command to those of the parser."""
    text = "observe a training script without a change to it"
    parser = commands.add_parser("run", help=text, allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where run.jsonl and run.html go")
    parser.add_argument("--force", action="store_true", help="replace the record that DIR already holds")
    parser.add_argument("--argv", action="store_true", help="record the arguments as they are: secrets are not hidden")
    steps = "a number of steps, at least 1"
    add_number(parser, "--every", steps, 1, metavar="N", help="record each parameter's norm every N steps")
    parser.add_argument("--clip", metavar="RULE", help=_CLIP_HELP)
    parser.add_argument("--resilient", action="store_true", help=_RESILIENT_HELP)
    add_number(parser, "--steps", steps, 1, metavar="N", help=_STEPS_HELP)
    add_number(parser, "--seed", "a number from 0 to 4294967295", 0, 2**32 - 1, metavar="N", help=_SEED_HELP)
    parser.add_argument("--no-report", action="store_true", help="write the record and nothing else")
    parser.add_argument("--audit-norm", action="store_true", help=_AUDIT_HELP)
    parser.add_argument("--save-gradients", type=Path, metavar="FILE", help=_SAVE_HELP)
    add_number(parser, "--at", steps, 1, metavar="N", help="save the gradients of optimizer step N (default: 1)")
    add_number(parser, "--perturbed", "a number of runs, 0 or more", 0, metavar="N", help=_PERTURBED_HELP)
    parser.add_argument("--launch", metavar="COMMAND", help=_LAUNCH_HELP)
    add_program(parser)
    parser.set_defaults(call=_run)


def _run(options: argparse.Namespace, program: ProgramLine) -> int:
    others, saves = first_given(options, *RECORDING, "audit_norm"), options.save_gradients is not None
    of_saving = first_given(options, "at", "perturbed", "launch")
    refuse(
        CommandError,
        (not program.words, nothing_to_run("run")),
        (of_saving and not saves, f"{of_saving} belongs to --save-gradients FILE, which is not there."),
        (
            saves and others and options.steps is not None,
            f"--steps with --save-gradients and {others}: steps that are saved, or the end of the script? Type a "
            f"command of its own with {others}.",
        ),
    )
    if saves:
        code = save_gradients_of(options, program, others)
        if code or not others:
            return code
    if others == "--audit-norm":  # which is the last of them, so that nothing is recorded
        return _audit_norm(options, program)
    return _recorded(options, program)


def _recorded(options: argparse.Namespace, program: ProgramLine) -> int:
    rule = _rule(options.clip) if options.clip is not None else None
    folder = options.out or Path("runs") / f"{program.name}-{time.strftime('%Y%m%d-%H%M%S')}"

    from gradguard.monitoring.observe.meta import rank_and_world
    from gradguard.monitoring.observe.script import load
    from gradguard.monitoring.observe.termination import BySignal, SignalHandlers

    writes = rank_and_world()[0] == 0  # else another process does
    loaded = load(program.words, program.is_module)
    record = _record_in(folder, options.force) if writes else None
    followed = _followed(options.clip or "", folder, program.typed) if writes else None
    with SignalHandlers(acting=writes) as signals:
        recording = _Recording(options, record, signals)
        code = recording.run(loaded, program.typed, rule, followed)
    return code if signals.second is None or isinstance(code, BySignal) else BySignal.of(signals.second)


def _record_in(folder: Path, replaces: bool) -> Path:
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = "run.jsonl" if restarts == "0" else f"run.restart-{restarts}.jsonl"
    record = (folder / name).absolute()  # the script may change the working directory
    if record.exists() and not replaces:
        raise CommandError(f"{record} exists: choose another --out, or add --force to replace it.")
    return record


def _audit_norm(options: argparse.Namespace, program: ProgramLine) -> int:
    from gradguard.monitoring.observe.script import load, run, seed_generators
    from gradguard.monitoring.observe.watch import stop_watching
    from gradguard.script_events import listening

    loaded = load(program.words, program.is_module)
    stop_watching()
    seed_generators(options.seed)
    audit = _audit_of(options.steps or 3)
    with listening(audit):
        code = run(loaded)
    return _audited(audit, code, sys.stdout)


def _audit_of(steps: int, *, goes_on: bool = False) -> "ScriptAudit":
    from gradguard.audit.in_script import ScriptAudit
    from gradguard.monitoring.observe.meta import living_modules

    return ScriptAudit(living_modules, steps, goes_on=goes_on)


def _audited(audit: "ScriptAudit", code: int, file: IO[str]) -> int:
    """Print what an audit found to ``file``, and return its exit code, or 2 where the script has failed before it."""
    from gradguard.monitoring.observe.meta import rank_and_world

    if code and not audit.done:
        on_stderr(f"the script ended with exit code {code} before its norm was audited.")
        return 2
    verdict, text = audit.outcome()
    rank, lines = rank_and_world()[0], list(map(printable, text.splitlines()))
    if rank == 0:
        with encodable(file):
            print("\n".join(lines), file=file)
    for line in lines:
        if rank and " unclipped: " in line:  # what this process alone knows
            on_stderr(f"rank {rank}: {line}")
    return EXIT_CODES[verdict]


def _rule(text: str) -> "NamedRule":
    """The rule in ``norm=1.0``, or that which the record in ``from=run.jsonl`` recommends."""
    from gradguard.named_rules import clipping_rule

    name, _, path = text.partition("=")
    if name != "from" or not path:
        return clipping_rule(text)
    from gradguard.monitoring.judge.recommend import recommend
    from gradguard.monitoring.record.file import read_record

    record = read_record(Path(path))
    tell_notes([record])
    found = recommend(record)
    if found.rule is None:
        raise CommandError(
            f"--clip from={path}: that record recommends no rule. {found.headline} {found.reason} Or name a rule "
            "yourself, as in --clip median."
        )
    return clipping_rule(found.rule)


def _followed(clip: str, folder: Path, typed: list[str]) -> dict[str, Any] | None:
    # The run that this one follows is that of the record of --clip from=, or the last of the script in the folders
    # beside that of the new record; a long record is not read.
    name, _, named = clip.partition("=")
    try:
        path = Path(named) if name == "from" else _last_record(folder, typed)
        if path is None or (path / "run.jsonl" if path.is_dir() else path).stat().st_size > _LONGEST_FOLLOWED:
            return None
        from gradguard.monitoring.judge.diagnosis import diagnose
        from gradguard.monitoring.judge.followed import facts_of
        from gradguard.monitoring.judge.recommend import recommend
        from gradguard.monitoring.record.file import read_record

        record = read_record(path)
        return facts_of(record, diagnose(record).cause, recommend(record).rule)
    except (OSError, GradguardError):  # a record that cannot be read is none to follow
        return None


def _last_record(folder: Path, typed: list[str]) -> Path | None:
    """Return the newest record of the same command in a folder beside this one.

    Numbers may differ: a learning rate is one, and so is a seed. Any other argument may name another task, whose losses
    are no others to compare with.
    """
    from gradguard.monitoring.observe.meta import program_facts
    from gradguard.monitoring.record.file import is_of_command

    argv = program_facts(typed)["argv"]
    known = [path for path in [folder, *folder.parent.glob("*")] if (path / "run.jsonl").is_file()]
    newest = sorted({path / "run.jsonl" for path in known}, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest[:_MOST_FOLLOWED] if is_of_command(path, argv)), None)


_LONGEST_FOLLOWED = 4 * 2**20
_MOST_FOLLOWED = 20


class _Recording:
    """One run of a script with its record and its closing messages.

    Args:
        options: Those of the command.
        record: The path of its record; None where another process writes it.
        signals: The handlers of signals during the run.
    """

    def __init__(self, options: argparse.Namespace, record: Path | None, signals: "SignalHandlers") -> None:
        from gradguard.monitoring.observe.watch import identity, records_beside, stop_watching

        stop_watching()  # where the environment variable asks for a watch, this one is it
        self.options, self.record, self.signals = options, record, signals
        self.here, self.process = Path.cwd(), os.getpid()
        self.replaced = identity(record) if options.force else ""
        self.before = set(records_beside(record))
        self.stepped = False

    def run(
        self,
        program: "Program",
        typed: list[str],
        rule: "NamedRule | None",
        followed: dict[str, Any] | None,
    ) -> int:
        """Run the script with all that listens to it; return its exit code, or that of the audit of its norm."""
        from gradguard.monitoring.observe.meta import program_facts
        from gradguard.monitoring.observe.observer import Observer
        from gradguard.monitoring.observe.script import run, seed_generators
        from gradguard.monitoring.observe.termination import BySignal
        from gradguard.monitoring.observe.watch import children_watched, record_of_fork
        from gradguard.script_events import listening

        options, record = self.options, self.record
        clip, text = (None, None) if rule is None else (_clip_by(rule), rule.text)
        guards = [_guards_of(clip)] if options.resilient else []
        audits = [_audit_of(min(options.steps or 3, 3), goes_on=True)] if options.audit_norm else []
        observer = Observer(
            self.opened,
            program_facts(typed, text, keep_arguments=options.argv) | {"followed": followed},
            guards[0].clip if guards and clip else clip,
            options.every,
            last_step=options.steps,
            in_child=None if record is None else functools.partial(record_of_fork, record),
        )
        seed_generators(options.seed)
        if record is not None:
            on_stderr(f"recording to {_short(record, self.here)}")
        code = 1
        try:
            with listening(*audits, observer, *guards), children_watched(record, self.replaced):
                code = run(program, self.signals)  # an audit hears of a step before a clip of ours
        finally:
            self.signals.hold()
            observer.close(code, interrupted=isinstance(code, BySignal))
            if os.getpid() == self.process:  # not in a child that the script forked
                for one in guards:
                    on_stderr(one.report())
                self.tell(observer, code)
        if not audits or isinstance(code, BySignal) or os.getpid() != self.process:
            return code
        verdict = _audited(audits[0], code, sys.stderr)  # beside a record standard output is the script's
        return code or verdict

    def opened(self) -> Path | None:
        """Return the record, at the first step: a program without one leaves nothing behind."""
        from gradguard.monitoring.observe.watch import remove_replaced

        self.stepped = True
        if self.record is not None:
            remove_replaced(self.record, self.replaced)
        return self.record

    def tell(self, observer: "Observer", code: int) -> None:
        """Draw the record of the run, and name the records that other processes have written."""
        if self.record is None:
            return
        others = self._records_of_others(observer.path)
        started = [path for path, owner in others.items() if owner == _STARTED]
        shown = observer.path or next((path for path in started if path == self.record), None)
        if shown and not self.options.no_report:
            _show(shown, self.here, self.signals)
        no_step = _no_step(code, observer.clip_calls, [_short(path, self.here) for path in started])
        table = [
            (not (shown or self.stepped), no_step),  # a record that could not be written has said so
            (started and self.options.clip, _NOT_CLIPPED),
            *((path != shown, f"{owner} has the record {_short(path, self.here)}") for path, owner in others.items()),
        ]
        for holds, words in table:
            if holds:
                on_stderr(words)

    def _records_of_others(self, own: Path | None) -> dict[Path, str]:
        """Return the records that appeared during the run, except our ``own``, with the words for the owner of each."""
        from gradguard.monitoring.observe.watch import identity, records_beside

        known = {*self.before, own}
        if own is None and self.replaced and identity(self.record) != self.replaced:
            known.discard(self.record)  # a process of rank 0 has replaced it
        return {path: _owner_of(path) for path in records_beside(self.record) if path not in known}


_STARTED = "a process that it started"
_NOT_CLIPPED = "--clip acts in this process alone: the processes that it started were watched, not clipped."


def _owner_of(record: Path) -> str:
    from gradguard.monitoring.observe.watch import process_of

    number, root = process_of(record)
    if root == os.getpid():
        return _STARTED
    return "another process" if number is None else f"another run, process {number},"


def _no_step(code: int, clip_calls: int, elsewhere: list[str]) -> str:
    if elsewhere:
        return f"this process made no optimizer step, others did; draw one: gradguard report {elsewhere[0]}"
    if code:
        return "it ended before its first optimizer step, so there is no record."
    seen = f"{clip_calls:,} clip calls were seen, but no optimizer step" if clip_calls else "no optimizer step was seen"
    return (
        f"{seen}, so there is no record. gradguard sees step() of every torch.optim optimizer, and no weights "
        "that a script or an engine changes by itself."
    )


def _clip_by(rule: "NamedRule") -> "ClipEachOptimizer":
    """Return the function that applies the rule to the gradients of each optimizer."""
    import gradguard
    from gradguard.clip.guards_of_a_script import ClipEachOptimizer

    name, arguments = rule.clipper
    return ClipEachOptimizer(functools.partial(getattr(gradguard, name), **arguments), rule.exclude)


def _guards_of(clip: "ClipEachOptimizer | None") -> "GuardEachOptimizer":
    """Return the function that skips the spikes of each optimizer, beside a clip or without one."""
    from gradguard.resilience.recovery_of_a_script import NO_ROLL_BACK, GuardEachOptimizer

    on_stderr(NO_ROLL_BACK)
    return GuardEachOptimizer(clip)


def _show(record: Path, here: Path, signals: "SignalHandlers") -> None:
    """Draw the report of a finished run and print its summary; a failure here must not hide the script's own."""
    from rich.console import Console

    from gradguard.monitoring.show.report import page_beside, print_summary, write_report

    if not record.exists():  # somebody deleted it, of which they have been warned
        return
    try:
        with signals.raised(), progress() as say:
            (found,) = read([record], say)
            say(f"judging {len(found.steps):,} steps")
            drawn = ""
            if found.steps:
                try:
                    drawn = f"report: {printable(_short(write_report([found], page_beside(record)), here))}"
                except RecordError as error:  # such as a full disk: what was found is printed all the same
                    drawn = printable(f"no report: {error}")
        if not drawn:  # the page would say nothing
            why = "".join(f" {event.get('message', '')}." for event in found.events[-1:])
            on_stderr(f"no optimizer step was recorded, so there is no report.{why} See {_short(record, here)}")
            return
        with encodable(sys.stderr):  # standard output is the script's
            print_summary(found, Console(stderr=True))
            print(f"record: {printable(_short(record, here))}\n{drawn}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        on_stderr(f"interrupted: the page is not drawn. Draw it: gradguard report {_short(record, here)}")
    except Exception as error:
        on_stderr(f"the record is in {record}, but its report failed: {error}")


def _short(path: Path, here: Path) -> str:
    """The path from ``here``, if it is below."""
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

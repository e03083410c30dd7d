"""Run a script with all its listeners: the part of `gradguard run` that loads PyTorch."""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradguard.cli.program import ProgramLine
from gradguard.cli.records import progress, read
from gradguard.cli.verdict import EXIT_CODES
from gradguard.errors import CommandError, GradguardError, RecordError
from gradguard.monitoring.observe.meta import living_modules, program_facts, rank_and_world
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.observe.script import Program, load, run, seed_generators
from gradguard.monitoring.observe.termination import BySignal, SignalHandlers
from gradguard.monitoring.observe.watch import (
    children_watched,
    identity,
    process_of,
    record_of_fork,
    records_beside,
    remove_replaced,
    stop_watching,
)
from gradguard.monitoring.record.file import is_of_command, read_record
from gradguard.monitoring.record.text import encodable, on_stderr, printable
from gradguard.script_events import listening

if TYPE_CHECKING:
    from gradguard.audit.in_script import ScriptAudit
    from gradguard.named_rules import NamedRule


def record(options: argparse.Namespace, program: ProgramLine, rule: "NamedRule | None", folder: Path) -> int:
    """Run the program, write its record and draw it; return the program's exit code, or that of its audit.

    Args:
        options: The options of ``gradguard run``.
        program: The program.
        rule: The rule to clip by.
        folder: The folder of the record.

    Returns:
        The exit code.

    Raises:
        CommandError: If there is no such program, or the record already exists.
    """
    writes = rank_and_world()[0] == 0  # other ranks write no record
    loaded = load(program.words, program.is_module)
    path = followed = None
    if writes:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = "run.jsonl" if restarts == "0" else f"run.restart-{restarts}.jsonl"
        path = (folder / name).absolute()  # the script may change the working directory
        if path.exists() and not options.force:
            raise CommandError(f"{path} exists: choose another --out, or add --force to replace it.")
        followed = _followed(options.clip or "", folder, program.typed)
    with SignalHandlers(acting=writes) as signals:
        code = _Recording(options, path, signals).run(loaded, program.typed, rule, followed)
    return code if signals.second is None or isinstance(code, BySignal) else BySignal.of(signals.second)


def audit_norm(options: argparse.Namespace, program: ProgramLine) -> int:
    """Run the program for some steps without a record, and compare the norms that it clips by with the true ones.

    Args:
        options: The options of ``gradguard run``.
        program: The program.

    Returns:
        The exit code of the verdict, or 2 if the program failed first.
    """
    loaded = load(program.words, program.is_module)
    stop_watching()
    seed_generators(options.seed)
    audit = _audit_of(options.steps or 3)
    with listening(audit):
        code = run(loaded)
    return _audited(audit, code, sys.stdout)


def _audit_of(steps: int, *, goes_on: bool = False) -> "ScriptAudit":
    from gradguard.audit.in_script import ScriptAudit

    return ScriptAudit(living_modules, steps, goes_on=goes_on)


def _audited(audit: "ScriptAudit", code: int, file: IO[str]) -> int:
    """Print an audit's result to ``file``, and return its exit code, or 2 if the script failed before the audit."""
    if code and not audit.done:
        on_stderr(f"the script ended with exit code {code} before its norm was audited.")
        return 2
    verdict, text = audit.outcome()
    rank, lines = rank_and_world()[0], list(map(printable, text.splitlines()))
    if rank == 0:
        with encodable(file):
            print("\n".join(lines), file=file)
    for line in lines:
        if rank and " unclipped: " in line:  # a finding that differs between processes
            on_stderr(f"rank {rank}: {line}")
    return EXIT_CODES[verdict]


def _followed(clip: str, folder: Path, typed: list[str]) -> dict[str, Any] | None:
    # The run that this one follows: the record of --clip from=, or else the script's last record in the folders
    # beside the new record. A long record is not read.
    name, _, named = clip.partition("=")
    try:
        path = Path(named) if name == "from" else _last_record(folder, typed)
        if path is None or (path / "run.jsonl" if path.is_dir() else path).stat().st_size > _LONGEST_FOLLOWED:
            return None
        from gradguard.monitoring.judge.diagnosis import diagnose
        from gradguard.monitoring.judge.followed import facts_of
        from gradguard.monitoring.judge.recommend import recommend

        record = read_record(path)
        return facts_of(record, diagnose(record).cause, recommend(record).rule)
    except (OSError, GradguardError):  # do not follow a record that cannot be read
        return None


def _last_record(folder: Path, typed: list[str]) -> Path | None:
    """Return the newest record of the same command in a folder beside this one.

    Numbers may differ: a learning rate is one, and so is a seed. Any other argument may name another task, whose losses
    cannot be compared.
    """
    argv = program_facts(typed)["argv"]
    known = {path / "run.jsonl" for path in [folder, *folder.parent.glob("*")]}
    newest = sorted(filter(Path.is_file, known), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest[:_MOST_FOLLOWED] if is_of_command(path, argv)), None)


_LONGEST_FOLLOWED = 4 * 2**20
_MOST_FOLLOWED = 20


class _Recording:
    """One run of a script with its record and its closing messages.

    Args:
        options: The options of the command.
        record: The path of its record; None if another process writes it.
        signals: The handlers of signals during the run.
    """

    def __init__(self, options: argparse.Namespace, record: Path | None, signals: SignalHandlers) -> None:
        stop_watching()  # this run replaces the watch that the environment variable asks for
        self.options, self.record, self.signals = options, record, signals
        self.here, self.process = Path.cwd(), os.getpid()
        self.replaced = identity(record) if options.force else ""
        self.before = set(records_beside(record))
        self.stepped = False

    def run(
        self,
        program: Program,
        typed: list[str],
        rule: "NamedRule | None",
        followed: dict[str, Any] | None,
    ) -> int:
        """Run the script with all its listeners; return its exit code, or that of the audit of its norm."""
        options, record = self.options, self.record
        clip, guards = None, []
        if rule is not None:
            import gradguard
            from gradguard.clip.guards_of_a_script import ClipEachOptimizer

            name, arguments = rule.clipper
            clip = ClipEachOptimizer(functools.partial(getattr(gradguard, name), **arguments), rule.exclude)
        if options.resilient:
            from gradguard.resilience.recovery_of_a_script import NO_ROLL_BACK, GuardEachOptimizer

            on_stderr(NO_ROLL_BACK)
            guards = [GuardEachOptimizer(clip)]
            clip = guards[0].clip if clip else None
        audits = [_audit_of(min(options.steps or 3, 3), goes_on=True)] if options.audit_norm else []
        observer = Observer(
            self.opened,
            program_facts(typed, rule and rule.text, keep_arguments=options.argv) | {"followed": followed},
            clip,
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
                code = run(program, self.signals)  # the audit comes first: it receives a step before our clip acts
        finally:
            self.signals.hold()
            observer.close(code, interrupted=isinstance(code, BySignal))
            if os.getpid() == self.process:  # not in a child that the script forked
                for one in guards:
                    on_stderr(one.report())
                if record is not None:
                    self.tell(observer, record, code)
        if not audits or isinstance(code, BySignal) or os.getpid() != self.process:
            return code
        verdict = _audited(audits[0], code, sys.stderr)  # with a record, standard output belongs to the script
        return code or verdict

    def opened(self) -> Path | None:
        """Return the path of the record, at the first step: a program without a step leaves nothing behind."""
        self.stepped = True
        if self.record is not None:
            remove_replaced(self.record, self.replaced)
        return self.record

    def tell(self, observer: Observer, record: Path, code: int) -> None:
        """Draw the record of the run, and name the records that other processes have written."""
        known = {*self.before, observer.path}
        if observer.path is None and self.replaced and identity(record) != self.replaced:
            known.discard(record)  # a process of rank 0 replaced it
        others = {path: _owner_of(path) for path in records_beside(record) if path not in known}
        started = [path for path, owner in others.items() if owner == _STARTED]
        shown = observer.path or (record if record in started else None)
        if shown and not self.options.no_report:
            _show(shown, self.here, self.signals)
        if not (shown or self.stepped):  # a record that could not be written has been reported already
            on_stderr(_no_step(code, observer.clip_calls, [_short(path, self.here) for path in started]))
        if started and self.options.clip:
            on_stderr("--clip acts in this process alone: the processes that it started were watched, not clipped.")
        for path, owner in others.items():
            if path != shown:
                on_stderr(f"{owner} has the record {_short(path, self.here)}")


_STARTED = "a process that it started"


def _owner_of(record: Path) -> str:
    number, root = process_of(record)
    if root == os.getpid():
        return _STARTED
    return "another process" if number is None else f"another run, process {number},"


def _no_step(code: int, clip_calls: int, elsewhere: list[str]) -> str:
    if elsewhere:
        return f"this process made no optimizer step, others did; draw one: gradguard report {elsewhere[0]}"
    if code:
        return "the script ended before its first optimizer step, so there is no record."
    seen = "no optimizer step was observed"
    if clip_calls:
        seen = f"{clip_calls:,} clip calls were observed, but no optimizer step"
    return (
        f"{seen}, so there is no record. gradguard observes step() of every torch.optim optimizer, but not weights "
        "that a script or an engine changes by itself."
    )


def _show(record: Path, here: Path, signals: SignalHandlers) -> None:
    """Draw the report of a finished run and print its summary; a failure here must not hide the script's own."""
    from rich.console import Console

    from gradguard.monitoring.show.report import page_beside, print_summary, write_report

    if not record.exists():  # it was deleted, and a warning has said so
        return
    try:
        with signals.raised(), progress() as say:
            (found,) = read([record], say)
            say(f"judging {len(found.steps):,} steps")
            drawn = ""
            if found.steps:
                try:
                    drawn = f"report: {printable(_short(write_report([found], page_beside(record)), here))}"
                except RecordError as error:  # for instance a full disk: the summary is printed all the same
                    drawn = printable(f"no report: {error}")
        if not drawn:  # the page would be empty
            why = "".join(f" {event.get('message', '')}." for event in found.events[-1:])
            on_stderr(f"no optimizer step was recorded, so there is no report.{why} See {_short(record, here)}")
            return
        with encodable(sys.stderr):  # standard output belongs to the script
            print_summary(found, Console(stderr=True))
            print(f"record: {printable(_short(record, here))}\n{drawn}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        on_stderr(f"interrupted: the page is not drawn. Draw it: gradguard report {_short(record, here)}")
    except Exception as error:
        on_stderr(f"the record is in {record}, but its report failed: {error}")


def _short(path: Path, here: Path) -> str:
    """Return the path relative to ``here``, if it is below."""
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

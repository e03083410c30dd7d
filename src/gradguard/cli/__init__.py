"""The command line: one file for each command, which parses its options, calls the package, prints, and returns a code.

Each file has a function that carries the command out, and a table of its options (`program.Command`). Commands that run
a user's script (`run`, `tune`) first separate their own options from the script's. `script_run` is the part of `run`
that loads PyTorch, `verdict` prints the reports that say PASS or FAIL, `records` reads the records that a command is
given, and `pages` holds the documentation that `explain` and `skill` print.

**Guarantees.** Exit code 2 means that a command cannot be carried out: one line says what to type, without a traceback.
A verdict is 0 (PASS), 1 (FAIL) or 3 (INCONCLUSIVE). A script that is run keeps its own exit code, and the signal that
ended it.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from gradguard import __version__
from gradguard.cli import check, demo, env, pages, parity, replay, replay_step, report, run, tail, tune
from gradguard.errors import CommandError, GradguardError
from gradguard.monitoring.observe.termination import BySignal, LastWord
from gradguard.monitoring.record.text import drop_output, encodable, printable

_ALL = (
    demo.COMMAND,
    run.COMMAND,
    tune.COMMAND,
    report.COMMAND,
    pages.EXPLAIN,
    pages.SKILL,
    replay.COMMAND,
    tail.COMMAND,
    check.COMMAND,
    parity.COMMAND,
    replay_step.COMMAND,
    env.COMMAND,
)
_COMMANDS = {command.name: command for command in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``argv`` and return its exit code: 2 if it cannot be carried out, without a traceback.

    Without ``argv`` it is the program of this process, which then ends by the signal that ended the command.

    Args:
        argv: The command and its arguments; None for those of this process.

    Returns:
        The exit code.
    """
    if argv is not None:
        return _code(list(argv))
    last_word = LastWord()
    return last_word.of(_code(sys.argv[1:]))


def _code(arguments: list[str]) -> int:
    try:
        command = _COMMANDS.get(arguments[0]) if arguments else None
        if command is not None and command.runs_program:
            own, program = command.cut(arguments)
            parsed = _parser().parse_args(own)
            if not program.words:
                raise CommandError(
                    f"nothing to run. Usage: gradguard {command.name} [options] (script.py | -m module) [args ...]"
                )
            return command.call(parsed, program)
        parsed = _parser().parse_args(arguments)
        with encodable(sys.stdout):
            code = _COMMANDS[parsed.command].call(parsed)
            sys.stdout.flush()
            return code
    except GradguardError as error:
        shown = "\n".join(map(printable, str(error).splitlines()))
        print(f"gradguard: error: {shown} (gradguard explain {_COMMANDS[arguments[0]].page})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return BySignal.of(signal.SIGINT)
    except SystemExit as stop:
        if isinstance(stop.code, BySignal):
            return stop.code
        raise
    except BrokenPipeError:  # `gradguard replay run.jsonl | head -3`
        drop_output()
        return 141
    except OSError as error:  # for instance a full disk that receives standard output
        drop_output()
        print(f"gradguard: error: {printable(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    more = "`gradguard explain` prints the documentation: causes, findings, errors and pages."
    parser = argparse.ArgumentParser(prog="gradguard", description="Gradients you can trust.", epilog=more)
    parser.add_argument("--version", action="version", version=f"gradguard {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for command in _ALL:
        command.add_to(commands)
    return parser

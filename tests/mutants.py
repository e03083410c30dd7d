"""Mutants of a package of gradguard: small changes to its code, each of which some test should notice.

    python tests/mutants.py clip --count 25 --seed 1

draws 25 of all mutants of `src/gradguard/clip`. For each it runs the tests of `tests/clip` that execute the changed
statement, until one fails. One row of each table comes before a second of any, the fastest first, as long as they
take less than half of `--seconds` together. PyTorch and the tests are imported once: a mutant runs in a fork of that
process, where its code replaces the function's own, and in the processes of `distributed/pool.py` that the fork
starts. Surviving mutants are printed, with the number of tests that execute them: such a mutant is equivalent, or no
test checks what it breaks.

Code outside functions, decorators, defaults of arguments, texts of errors and `strict=` are not changed. A statement
that no quick test executes is reported as such. Slow tests and those of other packages may execute it: name them as
further arguments.
"""

import argparse
import ast
import builtins
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

import gradguard

SOURCE = Path(gradguard.__file__).parent
TESTS = Path(__file__).parent
OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OTHER_OPERATION: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


# -- what is changed ---------------------------------------------------------------------------------------------------


class InFunctions(ast.NodeTransformer):
    """Tracks the current function, and skips docstrings, decorators and annotations."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.depth = 0
        self.statement = 0
        """The line on which the current statement begins."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return self._inside(node)
        if self.depth or isinstance(node, ast.Module):
            return super().visit(node)
        return node

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.names.append(node.name)
        self.depth += not isinstance(node, ast.ClassDef)
        start = ast.get_docstring(node, clean=False) is not None
        node.body[start:] = self.body([self.visit(statement) for statement in node.body[start:]], node)
        self.depth -= not isinstance(node, ast.ClassDef)
        self.names.pop()
        return node

    def body(self, statements: list[ast.stmt], node: ast.AST) -> list[ast.stmt]:
        return statements


class Mutation(InFunctions):
    """Makes the change with a given number, or only counts the changes.

    Attributes:
        count: Number of changes.
        made: The line, the function and the description of the change that was made.
        changed_statement: The line on which the changed statement begins.
    """

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.number, self.count = number, 0
        self.made: tuple[int, str, str] | None = None
        self.changed_statement = 0

    def here(self, node: ast.stmt | ast.expr, words: str) -> bool:
        self.count += 1
        if self.count - 1 != self.number:
            return False
        self.changed_statement = self.statement
        self.made = node.lineno, ".".join(self.names), f"{words}: {' '.join(ast.unparse(node).split())[:120]}"
        return True

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self.here(node, "left out") else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if self.here(node, "left out") else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self.here(node, "left out") else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if not isinstance(node.targets[0], ast.Name) and self.here(node, "left out"):
            return ast.copy_location(ast.Pass(), node)
        node.value = self.visit(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        if node.value is not None and not is_none and self.here(node, "returns None"):
            return ast.copy_location(ast.Return(ast.Constant(None)), node)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)  # of `zip`, which no correct call notices

    def visit_If(self, node: ast.If) -> ast.AST:
        if self.here(node.test, "if not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if self.here(node, "the other of"):
            node.body, node.orelse = node.orelse, node.body
            return node
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for i, operation in enumerate(node.ops):
            other = OTHER_COMPARISON[type(operation)]
            if self.here(node, f"{type(operation).__name__} is {other.__name__}"):
                node.ops[i] = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self.here(node, "and is or, or is and"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = OTHER_OPERATION.get(type(node.op))
        if other and self.here(node, f"{type(node.op).__name__} is {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not | ast.USub) and self.here(node, "no sign"):
            return self.visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool | int | float) and self.here(node, "another number"):
            value = node.value
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
            return ast.copy_location(ast.Constant(other), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node


class Marked(InFunctions):
    """Makes each statement of a function record that it was reached."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            if self.depth and isinstance(getattr(node, field, None), list):
                setattr(node, field, self.marked(getattr(node, field)))
        return node

    def body(self, statements: list[ast.stmt], node: ast.AST) -> list[ast.stmt]:
        return statements if isinstance(node, ast.ClassDef) else self.marked(statements)

    def marked(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [one for statement in statements for one in (self.mark(statement), statement)]

    def mark(self, statement: ast.stmt) -> ast.stmt:
        (mark,) = ast.parse(f"__reached__({self.file!r}, {statement.lineno})").body
        for part in ast.walk(mark):
            ast.copy_location(part, statement)
        return mark


# -- how it gets into a process ----------------------------------------------------------------------------------------


def files_of(room: str) -> list[Path]:
    return sorted(file for file in (SOURCE / room).rglob("*.py") if file.name != "__init__.py")


def living_functions(files: list[Path]) -> dict[str, list[FunctionType]]:
    """Return the functions of each file, including those inside decorators and properties."""
    for file in files:
        importlib.import_module(".".join(("gradguard", *file.relative_to(SOURCE).with_suffix("").parts)))
    names, found = {str(file) for file in files}, defaultdict(list)
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename in names:
            found[one.__code__.co_filename].append(one)
    gc.freeze()
    return found


def code_inside(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from code_inside(part)


def put_in(file: Path, tree: ast.Module, functions: list[FunctionType]) -> bool:
    """Give the functions of a file the code of ``tree``; return whether any has changed."""
    whole = compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in code_inside(whole)}
    changed = False
    for function in functions:
        old = function.__code__
        new = codes.get((old.co_qualname, old.co_firstlineno), old)
        if new != old and new.co_freevars == old.co_freevars:
            function.__code__ = new
            changed = True
    return changed


def mutate(file: Path, number: int) -> bool:
    """Apply a change in this process."""
    tree = Mutation(number).visit(ast.parse(file.read_text(encoding="utf-8")))
    return put_in(file, tree, living_functions([file])[str(file)])


_reached = set[tuple[str, int]]()


def mark(room: str) -> None:
    """Make each statement of a package record in this process that it was reached."""
    setattr(builtins, "__reached__", lambda *where: _reached.add(where))  # noqa: B010
    files = files_of(room)
    for name, functions in living_functions(files).items():
        put_in(Path(name), Marked(name).visit(ast.parse(Path(name).read_text(encoding="utf-8"))), functions)


def reached() -> list[tuple[str, int]]:
    found = list(_reached)
    _reached.clear()
    return found


def prepare_pools(first: Callable[..., Any], *arguments: Any, asks: bool = False) -> None:
    """Let processes of new pools begin with a call; with ``asks`` collect the statements that they reach."""
    from distributed import pool as by_package

    named = [sys.modules[name] for name in ("pool",) if name in sys.modules]
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined] # not our child
    for module in (by_package, *named):
        _prepare(module.Pool, first, arguments, asks)


def _prepare(kind: Any, first: Callable[..., Any], arguments: tuple, asks: bool) -> None:
    start, call = kind.__init__, kind._call

    def __init__(self: Any, *of_pool: Any) -> None:  # noqa: N807
        start(self, *of_pool)
        call(self, first, arguments, 200.0, 3.0)

    def _call(self: Any, *of_call: Any) -> list[Any]:
        try:
            return call(self, *of_call)
        finally:
            if asks and self.alive:
                for found in call(self, reached, (), 200.0, 3.0):
                    _reached.update(found if isinstance(found, list) else ())

    kind.__init__, kind._call = __init__, _call


# -- the run -----------------------------------------------------------------------------------------------------------


class Mutants:
    """A plugin of pytest that runs the tests for each mutant, instead of once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from distributed import pool

        living_functions(files_of(self.options.room))
        multiprocessing.get_context("forkserver").set_forkserver_preload(pool._PRELOADED)
        multiprocessing.forkserver.ensure_running()
        items = {item.nodeid: item for item in session.items}
        tests = self.tests_by_statement(items)
        drawn = [(file, k) for file in files_of(self.options.room) for k in range(count_of(file))]
        random.Random(self.options.seed).shuffle(drawn)
        kinds = defaultdict[str, int](int)
        for file, number in drawn[: self.options.count]:
            mutation = Mutation(number)
            mutation.visit(ast.parse(file.read_text(encoding="utf-8")))
            assert mutation.made is not None
            line, function, words = mutation.made
            reaching = tests[str(file), mutation.changed_statement]
            chosen = [items[name] for name in self.within_budget(reaching)]
            kind = self.outcome(file, number, chosen) if chosen else "reached by no test"
            kinds[kind] += 1
            if kind != "killed":
                run = f"{kind} {len(chosen)} of {len(reaching)} tests"
                print(f"\n{run}: {file.relative_to(SOURCE)}:{line} {function}: {words}", flush=True)
        print("\n" + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        return True

    def within_budget(self, reaching: list[tuple[float, str]]) -> Iterator[str]:
        """Yield tests until they take half of a mutant's time; a mutant that uses it all counts as hanging."""
        left = self.options.seconds / 2
        for seconds, name in in_turn(reaching):
            left -= seconds
            if left < 0:
                return
            yield name

    def tests_by_statement(self, items: dict[str, pytest.Item]) -> dict[tuple[str, int], list[tuple[float, str]]]:
        """Return the seconds and the name of each test that executes a statement, by its file and first line."""
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder, "reached.json")

            def note() -> int:
                mark(self.options.room)
                prepare_pools(mark, self.options.room, asks=True)
                found = [(seconds, item.nodeid, reached()) for item, seconds in self.runs(list(items.values()))]
                notes.write_text(json.dumps([found, self.failed]), encoding="utf-8")
                return 0

            assert in_fork(note) == 0
            found, failed = json.loads(notes.read_text(encoding="utf-8"))
        tests = defaultdict[tuple[str, int], list[tuple[float, str]]](list)
        for seconds, name, statements in found:
            for where in statements:
                if name not in failed:
                    tests[tuple(where)].append((seconds, name))
        return tests

    def outcome(self, file: Path, number: int, items: list[pytest.Item]) -> str:
        def trial() -> int:
            seconds = self.options.seconds
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            signal.alarm(3 * seconds)
            if not mutate(file, number):
                return 2
            prepare_pools(mutate, file, number)
            return int(any(self.failed for _ in self.runs(items)))

        ends = {0: "SURVIVED", 2: "not applied", -signal.SIGALRM: "OUT OF TIME"}
        return ends.get(in_fork(trial), "killed")  # also one that dies, or that uses up its processor time

    def runs(self, items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, float]]:
        """Run the mutants one after the other; yield each with its seconds."""
        for item, after in zip_longest(items, items[1:]):
            began = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            yield item, time.monotonic() - began


def in_turn(tests: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Sort tests so that the fastest row of each table comes before the second row of any."""
    tables = defaultdict[str, list[tuple[float, str]]](list)
    for seconds, name in sorted(tests):
        tables[name.split("[")[0]].append((seconds, name))
    return [one for turn in zip_longest(*sorted(tables.values())) for one in turn if one is not None]


def count_of(file: Path) -> int:
    mutation = Mutation()
    mutation.visit(ast.parse(file.read_text(encoding="utf-8")))
    return mutation.count


def in_fork(work: Callable[[], int]) -> int:
    """Run it in a fork of this process, and return the exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        os.setpgid(0, 0)
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutants of a room, and the tests that notice them.")
    parser.add_argument("room", help="a folder of src/gradguard, such as clip")
    parser.add_argument("tests", nargs="*", help="files of tests besides those of the room")
    parser.add_argument("--count", type=int, default=25, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="another number draws others")
    parser.add_argument("--seconds", type=int, default=40, help="of a processor for each mutant")
    options = parser.parse_intermixed_args()
    arguments = ["-m", "not exhaustive and not slow", "-p", "no:cacheprovider", "-s", str(TESTS / options.room)]
    return pytest.main([*arguments, *options.tests], plugins=[Mutants(options)])


if __name__ == "__main__":
    import mutants  # by this name the processes of pools find it

    sys.exit(mutants.main())

"""Run the tests against the oldest torch that pyproject.toml allows, and against the newest: ``make versions``.

Each torch has its own environment under .versions, of some 5 GB, which ``make clean`` removes. Everything else is
installed from constraints.txt, except the requirements of torch itself. Arguments are passed to pytest. A table at the
end has, for each version, the counts and the deprecations: here a warning of one is not an error, but a line.

This file is also the pytest plugin that collects them.
"""

import os
import platform
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".versions"
PIP = ("-m", "pip", "--disable-pip-version-check")


def allowed(listed: str, project: str) -> list[str]:
    """Return the releases that ``pip index versions`` printed and pyproject.toml allows, the oldest first."""
    requirement = next(r for r in tomllib.loads(project)["project"]["dependencies"] if re.match(r"torch\b", r))
    least = re.fullmatch(r"torch>=([\d.]+)", requirement)
    if least is None:
        raise SystemExit(f"versions: {requirement!r} in pyproject.toml: expected torch>=X, without an upper bound.")
    releases = re.search(r"Available versions: (.*)", listed)
    found = re.findall(r"(?<![\w.+])\d+(?:\.\d+)+(?![\w.+])", releases[1] if releases else "")  # no +cpu, no rc
    return sorted({v for v in found if _numbers(v) >= _numbers(least[1])}, key=_numbers)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def constraints(text: str, torch: str, its_own: list[str]) -> str:
    """Return constraints.txt for a version of torch, which determines the versions of its own requirements."""
    own = {"torch", *(re.match(r"[\w.-]+", requirement)[0].lower() for requirement in its_own)}
    lines = [line for line in text.splitlines() if line[:1] != "#" and line.partition("==")[0].lower() not in own]
    return "\n".join([*lines, f"torch=={torch}", ""])


def summary(output: str) -> tuple[str, list[str]]:
    """Return the line of counts at the end of pytest's output, and the deprecations that the plugin listed."""
    counts = re.findall(r"^=* ?(.*\b(?:passed|failed|error|skipped)\b.* in [\d.]+s.*?) ?=*$", output, re.MULTILINE)
    return counts[-1] if counts else "no result: see the log", re.findall(r"^deprecated: (.*)$", output, re.MULTILINE)


def cuda_build(system: str, machine: str) -> dict[str, str]:
    """Return the setting that makes tests/test_fake_cuda.py require a CUDA build of PyTorch: on Linux on x86-64."""
    return {"GRADGUARD_CUDA_BUILD": "1"} if (system, machine) == ("linux", "x86_64") else {}


def environment(torch: str) -> Path:
    """Return the path of a Python with that version of torch and everything that the tests need."""
    folder = FOLDER / torch
    python, ready, pinned = folder / "bin/python", folder / "ready", folder / "constraints.txt"
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + (ROOT / "constraints.txt").read_text(
        encoding="utf-8"
    )
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, *PIP, "install", "--quiet", f"torch=={torch}"], check=True)
    asked = [python, __file__, "--requirements-of-torch"]
    its_own = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
    pinned.write_text(constraints((ROOT / "constraints.txt").read_text(encoding="utf-8"), torch, its_own))
    install = [python, *PIP, "install", "--quiet", "--constraint", str(pinned)]
    subprocess.run([*install, "--editable", f"{ROOT}[dev]"], check=True)
    # Composer's wheel wants an older torch than its code does.
    subprocess.run([*install, "--no-deps", "mosaicml", "mosaicml-cli", "coolname"], check=True)
    ready.write_text(wanted)
    return python


def run(torch: str, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests with a version of torch; return whether they passed, and their output."""
    tests = ["-m", "pytest", "--numprocesses", "auto", "-m", "not exhaustive", "-rs", "-p", "versions", *arguments]
    told = ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | cuda_build(sys.platform, platform.machine())
    log = FOLDER / f"{torch}.log"
    with log.open("w") as output:
        done = subprocess.run(
            [environment(torch), *tests, *told],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return done.returncode == 0, log.read_text(encoding="utf-8")


def main() -> int:
    """Print a table; return 1 if a version fails."""
    listed = subprocess.run([sys.executable, *PIP, "index", "versions", "torch"], capture_output=True, text=True)
    versions = allowed(listed.stdout, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not versions:
        raise SystemExit(f"versions: no release of torch was found:\n{listed.stderr}")
    results = {version: run(version, sys.argv[1:]) for version in dict.fromkeys([versions[0], versions[-1]])}
    for version, (_, output) in results.items():
        counts, deprecated = summary(output)
        print(f"torch {version:10} {counts}", *(f"    deprecated: {line}" for line in deprecated), sep="\n")
    print("logs:", *(str(FOLDER / f"{version}.log") for version in results))
    return 0 if all(passed for passed, _ in results.values()) else 1


_deprecated: dict[str, str] = {}


def pytest_warning_recorded(warning_message, nodeid):
    """Keep the first test that shows a deprecation."""
    if issubclass(warning_message.category, DeprecationWarning | FutureWarning):
        where = f"{warning_message.filename}:{warning_message.lineno}"
        _deprecated.setdefault(f"{' '.join(str(warning_message.message).split())} ({where})", nodeid)


def pytest_terminal_summary(terminalreporter):
    """Print them where `summary` reads them."""
    for what, test in sorted(_deprecated.items()):
        terminalreporter.write_line(f"deprecated: {what}, first seen in {test}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--requirements-of-torch"]:
        print(*(requires("torch") or ()), sep="\n")
    else:
        sys.exit(main())

"""Build a release and check it: `make release`. Nothing is uploaded.

The source archive and the wheels (one with the compiled kernels for this kind of machine, one for every machine) are
built twice, each time from a fresh copy of the last commit, and must be the same to the last byte; the wheels that are
built from the source archive must be those too. `twine` checks what an index would show, `auditwheel` that the compiled
one runs on every Linux that its name promises. Then it is installed into an empty environment of each Python that is
found, with the pinned torch, and into one with each of --torch, and the other wheel into one more; `smoke.py` uses them
there. What is released is left in dist/.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
PLATFORM = f"manylinux_2_17_{platform.machine()}"  # glibc 2.17 is from 2012; torch itself wants a newer one


def main() -> None:
    """Read the options, and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch", action="append", default=[], metavar="VERSION", help="also with this one; each draws gigabytes"
    )
    parser.add_argument("--python", action="append", metavar="COMMAND", help=f"in place of {', '.join(PYTHONS)}")
    parser.add_argument(
        "--draft", action="store_true", help="uncommitted changes and a version without a date are fine"
    )
    arguments = parser.parse_args()
    faults = [] if arguments.draft else unready(ROOT)
    if faults:
        raise SystemExit("release: " + "\n         ".join(faults))
    with tempfile.TemporaryDirectory() as folder:
        built = build_twice(Path(folder))
        run(sys.executable, "-m", "twine", "check", "--strict", *built)
        (ROOT / "dist").mkdir(exist_ok=True)
        for path in built:
            shutil.copy(path, ROOT / "dist")
            print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name, flush=True)
        pure, wheel = sorted((path for path in built if path.suffix == ".whl"), key=lambda path: PLATFORM in path.name)
        audit(wheel)
        found = [python for python in arguments.python or PYTHONS if shutil.which(python)]
        for place, (python, torch) in enumerate(
            [(python, None) for python in found] + [(sys.executable, v) for v in arguments.torch]
        ):
            install_and_use(wheel, Path(folder, f"venv{place}"), python, torch)
        install_and_use(pure, Path(folder, "venv of the pure one"), sys.executable, None)
        missing = sorted({*(arguments.python or PYTHONS)} - {*found})
        print("dist/ is ready" + (f"; not found, and so not tried: {', '.join(missing)}" if missing else ""))


def unready(root: Path) -> list[str]:
    """Return what keeps the last commit from being a release."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    changelog, citation = ((root / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    module = (root / "src/gradguard/__init__.py").read_text(encoding="utf-8")
    faults = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        faults.append(f"version {version} in pyproject.toml: expected three numbers, like 0.1.0.")
    if f'__version__ = "{version}"' not in module:
        faults.append(f'src/gradguard/__init__.py: expected __version__ = "{version}".')
    heading = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    dated = heading and re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", heading[1])
    if not dated:
        faults.append(f"CHANGELOG.md: expected its first heading to be `## {version} (YEAR-MONTH-DAY)`.")
    if f"version: {version}\n" not in citation or (dated and f"date-released: {dated[1]}\n" not in citation):
        faults.append(f"CITATION.cff: expected version: {version}, and as date-released that of CHANGELOG.md.")
    if not project.get("urls", {}).get("Source", "").startswith("https://"):
        faults.append("pyproject.toml: expected Source under [project.urls]: links of the README lead there.")
    if git(root, "status", "--porcelain"):
        faults.append("there are uncommitted changes: commit or stash them.")
    return faults


def build_twice(folder: Path) -> list[Path]:
    """Return the source archive and the wheels, which two builds and the archive itself give to the last byte."""
    os.environ["SOURCE_DATE_EPOCH"] = git(ROOT, "log", "-1", "--format=%ct")
    builds = []
    for name, mask in (("first", 0o022), ("again", 0o077)):
        os.umask(mask)
        source = folder / name / "a tree"
        source.mkdir(parents=True)
        archive = folder / name / "tree.tar"
        run("git", "-C", ROOT, "archive", "--output", archive, "HEAD")
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        builds.append(build(source, folder / name / "dist"))
    os.umask(0o022)
    [sdist] = [path for path in builds[0] if path.name.endswith(".tar.gz")]
    with tarfile.open(sdist) as tar:
        tar.extractall(folder / "from archive", filter="data")
    [unpacked] = (folder / "from archive").iterdir()
    builds.append(build(unpacked, folder / "from archive dist"))
    for other in builds[1:]:
        different = [
            one.name for one, two in zip(builds[0], other, strict=True) if one.read_bytes() != two.read_bytes()
        ]
        if different:
            raise SystemExit(f"release: two builds of {', '.join(different)} differ; compare {builds[0]} and {other}.")
    return builds[0]


def build(source: Path, out: Path) -> list[Path]:
    """Return the source archive and the two wheels of a tree."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    run(*command, stdout=subprocess.DEVNULL, env=os.environ | {"GRADGUARD_PLATFORM": PLATFORM})
    run(*command, "--wheel", stdout=subprocess.DEVNULL, env=os.environ | {"GRADGUARD_NATIVE": "0"})
    built = sorted(out.iterdir())
    if not any(PLATFORM in path.name for path in built):
        raise SystemExit("release: the compiled kernels were not built; `python native/build.py` tells why.")
    return built


def audit(wheel: Path) -> None:
    """See that a wheel needs nothing of a system but what its name says."""
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, capture_output=True)
    if f'"{PLATFORM}"' not in " ".join(shown.stdout.decode().split()):
        raise SystemExit(f"release: {wheel.name} needs more than its name says:\n{shown.stdout.decode()}")


def install_and_use(wheel: Path, folder: Path, python: str, torch: str | None) -> None:
    """Install the wheel into a new environment, and use it there."""
    run(python, "-m", "venv", folder)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if torch is not None:  # which brings the versions of all that it needs
        constraints = ""
    pinned = folder / "constraints.txt"
    pinned.write_text(constraints, encoding="utf-8")
    wanted = [wheel, *([] if torch is None else [f"torch=={torch}"])]
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--constraint", pinned, *wanted)
    shutil.copy(ROOT / ".ci/smoke.py", folder)
    run(folder / "bin/python", "smoke.py", cwd=folder)
    print(f"{Path(python).name}, torch {torch or 'as pinned'}: the wheel works", flush=True)


def git(root: Path, *words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout.strip()


def run(*command: object, **more) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in command], check=True, **more)


if __name__ == "__main__":
    main()

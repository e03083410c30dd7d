"""How long each script of the museum takes until it is answered: the last column of docs/museum.md.

    python benchmarks/museum.py [NAME ...]

Each command is run as it stands at the script's head, with the bug. Counted is the processor time of all its processes,
which does not depend on what else the machine does, and rounded up to 10 s. The page is changed in place.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/museum.md"
MUSEUM = ROOT / "examples/museum"


def seconds(name: str) -> float:
    """Return the processor time of one script's command, with that of all processes it starts."""
    head = (MUSEUM / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    command = re.findall(r"^    (\S.*)$", head, re.MULTILINE)[0]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(MUSEUM, folder, dirs_exist_ok=True)
        environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
        started = subprocess.Popen(command, shell=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        _, _, used = os.wait4(started.pid, 0)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in MUSEUM.glob("*.py")))
    for name in parser.parse_args().names:
        took = seconds(name)
        print(f"{name} {took:.1f}", flush=True)
        row = rf"^(\| \[`{name}`\].* \| )[^|]*( \|)$"
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(re.sub(row, rf"\g<1>{10 * math.ceil(took / 10)} s\2", page, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    main()

"""What importing gradguard costs on top of torch, and a command from its start to its first output.

python benchmarks/start_up.py [--runs 10]: processor time of fresh processes, medians, with bytecode in place; what
importing PyTorch and starting Python cost stands above, so that machines can be compared.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradguard.monitoring.record.file import RecordWriter

COUNT = "; import sys; print(len(sys.modules), sum(n.partition('.')[0] == 'gradguard' for n in sys.modules))"
IMPORTS = {
    "start of Python": "pass",
    "import torch": "import torch",
    "import torch, gradguard": "import torch, gradguard",
    "… and gg.clip_grad_norm_": "import torch, gradguard as gg; gg.clip_grad_norm_",
    "… and gg.Monitor": "import torch, gradguard as gg; gg.Monitor",
    "every public name": "import torch; from gradguard import *",
}
COMMANDS = ("-h", "--version", "tail --once", "replay", "report --text", "report")
RUN = """
import atexit, sys
atexit.register(lambda: print(len(sys.modules), sum(n.partition('.')[0] == 'gradguard' for n in sys.modules)))
from gradguard.cli import main
sys.exit(main())
"""


def measure(command: list[str], runs: int) -> tuple[float, float, str]:
    """Seconds of processor time until the end and until the first output, and the last line that was printed."""
    whole, first, last = [], [], ""
    # Bytecode as in any installation, whatever the environment of this benchmark says.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
    for _ in range(runs + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            first.append(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))
            lines += process.stdout.readlines()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        last = lines[-1].strip()
    return statistics.median(whole[1:]), statistics.median(first[1:]), last  # the first run writes the bytecode


def write_record(path: Path, steps: int) -> None:
    with RecordWriter(path) as writer:
        writer.write("meta", params=[{"name": f"layer{k}.weight", "numel": 100} for k in range(10)])
        for i in range(steps):
            norm = 1.0 + i * 7919 % 100 / 100 + (20.0 if i % 97 == 0 else 0.0)
            writer.write("step", i=i, norm=norm, loss=2.0)
            if i % 4 == 0:
                writer.write("tensors", i=i, norm=[norm / 3] * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    table = Table("what", "first output", "whole", "modules", "of gradguard", title="processor time in seconds")

    def add(name: str, command: list[str]) -> None:
        whole, first, counts = measure(command, runs)
        table.add_row(name, f"{first:.2f}", f"{whole:.3f}", *counts.split())

    for name, code in IMPORTS.items():
        add(name, [sys.executable, "-c", code + COUNT])
    with tempfile.TemporaryDirectory() as folder:
        for steps in (500, 5000):
            record = Path(folder) / str(steps) / "run.jsonl"
            write_record(record, steps)
            for command in COMMANDS:
                if command.startswith("-") and steps > 500:
                    continue
                shown = command if command.startswith("-") else f"{command}, {steps:,} steps"
                paths = [] if command.startswith("-") else [str(record)]
                add(f"gradguard {shown}", [sys.executable, "-u", "-c", RUN, *command.split(), *paths])
    Console().print(table)


if __name__ == "__main__":
    main()

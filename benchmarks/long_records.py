"""What the commands that look at a record cost where it is long: processor time and the most memory that they held.

python benchmarks/long_records.py [--steps 100000] [--tensors 10]: fresh processes, over a record with the norm of each
tensor on as many steps as `gradguard run` writes it; what a loop in Python takes stands above, so that machines, and
their load, can be compared.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradguard.monitoring.record.file import RecordWriter

COMMANDS = ("report", "report --json", "report --text", "replay")
RUN = "import sys; from gradguard.cli import main; sys.exit(main())"


def write_record(path: Path, steps: int, tensors: int) -> None:
    draw = random.Random(0)
    params = [{"name": f"layers.{k}.weight", "shape": [64, 64], "numel": 4096} for k in range(tensors)]
    with RecordWriter(path) as writer:
        writer.write("meta", clip="norm=1", argv=["train.py"], optimizers=["AdamW"], params=params)
        for i in range(steps):
            level = (0.35 + 1.2 * math.exp(-8 * i / steps)) * math.exp(draw.gauss(0, 0.2))
            level *= draw.uniform(8, 20) if draw.random() < 0.002 else 1
            norms = [level * math.exp(draw.gauss(0, 0.15)) / math.sqrt(tensors) for _ in params]
            norm, loss = math.hypot(*norms), 1.5 + 3 * math.exp(-4 * i / steps) + draw.gauss(0, 0.05)
            place, coefficient = max(range(tensors), key=norms.__getitem__), min(1.0, 1 / norm)
            writer.write(
                "step", i=i, wall=0.1 * i, loss=loss, lr=0.001, norm=norm, post_norm=norm * coefficient,
                top=[place, norms[place] ** 2 / norm**2], coefficient=coefficient, threshold=1.0, rule="norm",
            )  # fmt: skip
            if i % (1 << (i // 50_000).bit_length()) == 0:  # as `gradguard run` writes them
                writer.write("tensors", i=i, norm=norms)
        writer.write("end", steps=steps, wall=0.1 * steps, overhead_ms=0.5 * steps)


def measure(command: str, record: Path) -> tuple[float, float]:
    """Seconds of processor time, and megabytes."""
    arguments = [sys.executable, "-c", RUN, *command.split(), str(record)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=10)
    parsed = parser.parse_args()
    begin = time.process_time()
    sum(i * i for i in range(10**7))
    table = Table("what", "seconds", "MB", title=f"{parsed.steps:,} steps x {parsed.tensors} tensors")
    table.add_row("ten million squares", f"{time.process_time() - begin:.2f}", "")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        write_record(record, parsed.steps, parsed.tensors)
        for command in COMMANDS:
            seconds, memory = measure(command, record)
            table.add_row(f"gradguard {command}", f"{seconds:.2f}", f"{memory:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

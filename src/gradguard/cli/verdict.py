"""The end of a command that judges: print its report as text or JSON, and return the exit code of the verdict."""

import json
from typing import Any

from gradguard.cli.program import flag
from gradguard.monitoring.record.text import printable

EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
"""Exit code 2 is reserved for commands that cannot be carried out."""


JSON = flag("--json", "print the report as one line of JSON")


def print_report(report: Any, as_json: bool) -> int:
    """Print a report, which has a ``verdict`` and ``as_dict()``; return the exit code."""
    lines = str(report).splitlines()  # names in the report may come from a file
    print(json.dumps(report.as_dict(), allow_nan=False) if as_json else "\n".join(map(printable, lines)))
    return EXIT_CODES[report.verdict]

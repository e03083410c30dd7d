"""`gradguard serve`: the report as a live page."""

import argparse
from pathlib import Path


def add_to(commands) -> None:
    """Add the command to those of the parser."""
    serve = commands.add_parser("serve", help="show runs in the browser, on a page that follows them")
    serve.description = "The report as a page on 127.0.0.1, which follows runs in progress until Ctrl-C."
    serve.add_argument(
        "records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or its folder; waited for if not there"
    )
    serve.add_argument("--port", type=int, default=0, metavar="N", help="where to listen; by default a free port")
    serve.set_defaults(call=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.show.serve import serve

    serve(parsed.records, parsed.port)
    return 0

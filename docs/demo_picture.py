"""Draw `demo.svg`, what a terminal shows of `gradguard demo`: ``python docs/demo_picture.py``."""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradguard.cli import main

PICTURE = Path(__file__).with_name("demo.svg")


def printed() -> str:
    """Return what the demo prints, as typed in an empty folder."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        os.chdir(folder)
        try:
            main(["demo", "--no-open"])
        finally:
            os.chdir(home)
    return out.getvalue()


def drawn() -> str:
    """Return the picture."""
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print("[bold green]$[/] [bold]gradguard demo[/]")
    for line in printed().splitlines():
        text = Text(line)
        text.stylize("bold yellow" if line.startswith("  ") else "")
        text.highlight_regex(r"gradguard run .*?(?=`|$)", "bold cyan")
        console.print(text, soft_wrap=False)
    svg = console.export_svg(title="gradguard demo", unique_id="demo")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no font from the network
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")

"""`gradguard explain` and `gradguard skill`: pages of the documentation, in the terminal."""

import argparse
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from gradguard.errors import CommandError


def add_to(commands) -> None:
    """Add the commands to those of the parser."""
    explain = commands.add_parser("explain", help="what a finding or a cause of a report means, and what to do")
    explain.add_argument("kind", nargs="?", metavar="NAME", help="such as spike or rate_too_high; without one, a list")
    explain.set_defaults(call=_explain)
    skill = commands.add_parser("skill", help="one page for an assistant: which command when, how to read --json")
    skill.set_defaults(call=_skill)


def _explain(parsed: argparse.Namespace) -> int:
    page = _page("findings.md")
    findings = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    causes = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    if parsed.kind is None:
        listed = [f"| `{name}` | {words} |" for name, words in causes.items()]
        names = ", ".join(f"`{name}`" for name in findings)
        _show("\n".join(["| cause | what the record shows |", "|---|---|", *listed, "", f"Findings: {names}."]))
        return 0
    if parsed.kind not in causes and parsed.kind not in findings:
        near = get_close_matches(parsed.kind, [*causes, *findings], n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`gradguard explain` lists all."
        raise CommandError(f"{parsed.kind!a:.80} is no finding and no cause. {hint}")
    text = findings.get(parsed.kind, "")
    if parsed.kind in causes:
        text = f"As the cause of a run: {causes[parsed.kind]}.\n{text}"
    _show(f"# {parsed.kind}\n{text}")
    return 0


def _skill(parsed: argparse.Namespace) -> int:
    del parsed
    print(_page("skill.md"), end="")
    return 0


def _page(name: str) -> str:
    """Return a page of docs/: of the installed package's copy, or of the checkout."""
    package = Path(__file__).parents[1]
    file = package / "pages" / name
    return (file if file.exists() else package.parents[1] / "docs" / name).read_text(encoding="utf-8")


def _show(text: str) -> None:
    """Print Markdown: drawn on a terminal, as it is elsewhere. Pictures and links to other pages are left out."""
    text = re.sub(r"^!\[.*?\]\(.*?\)\n+", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))

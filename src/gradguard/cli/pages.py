"""`gradguard explain` and `gradguard skill`: pages of the documentation, in the terminal."""

import argparse
import posixpath
import re
import sys
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from gradguard.cli.program import Command, option
from gradguard.errors import CommandError

_OF_PARTS = {"Causes": "causes", "Findings": "findings", "Errors": "errors"}
"""Pages that have a section for each name, with the name as its heading."""

_AS = {"Causes": "As the cause of a run:\n\n", "Findings": "As a finding:\n\n", "Errors": ""}
"""The start of a section whose name has one on both pages."""

_FILES = ("*.md", "trainers/*.md", "tutorials/*.md")


def _explain(parsed: argparse.Namespace) -> int:
    parts = {title: _parts(page) for title, page in _OF_PARTS.items()}
    lists, name = {**parts, "Pages": _names()}, parsed.name
    if name is None:
        _show("\n\n".join(f"{title}: {', '.join(f'`{one}`' for one in names)}." for title, names in lists.items()))
        return 0
    found = [(title, of[name]) for title, of in parts.items() if name in of]
    page = next((page for page in lists["Pages"] if name in (page, page.rpartition("/")[2])), "")
    if found:
        _show("\n".join([f"# {name}", *(_AS[title] * (len(found) > 1) + text for title, text in found)]))
    elif page:
        _show(_page(f"{page}.md"), page)
    else:
        near = get_close_matches(name, chain.from_iterable(lists.values()), n=3)
        word = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
        about = [page for page in lists["Pages"] if word.search(_page(f"{page}.md"))]
        hint = f"Did you mean {' or '.join(near)}?" if near else "`gradguard explain` lists all."
        more = f" Pages that contain it: {', '.join(about[:5])}." if about else ""
        raise CommandError(f"{name!a:.80} is not a cause, finding, error or page. {hint}{more}")
    return 0


def _skill(parsed: argparse.Namespace) -> int:
    del parsed
    print(_page("skill.md"), end="")
    return 0


def _parts(page: str) -> dict[str, str]:
    """Return the text below each heading that is a name, by name."""
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", _page(f"{page}.md"), re.MULTILINE | re.DOTALL))


def _folder() -> Path:
    """Return docs/: the copy in the installed package, or the folder of the checkout."""
    package = Path(__file__).parents[1]
    copy = package / "pages"
    return copy if copy.exists() else package.parents[1] / "docs"


def _names() -> list[str]:
    folder = _folder()
    found = [path for pattern in _FILES for path in sorted(folder.glob(pattern))]
    return [path.relative_to(folder).with_suffix("").as_posix() for path in found]


def _page(name: str) -> str:
    return (_folder() / name).read_text(encoding="utf-8")


def _show(text: str, page: str = "index") -> None:
    """Print a page's Markdown, rendered on a terminal; pictures are omitted, and links become commands to type."""
    text = re.sub(r"^!\[.*?\]\(.*?\)\n+", "", text, flags=re.MULTILINE | re.DOTALL)
    pages = _names()

    def typed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2])) if link[2] else page
        return f"{link[1]} (`gradguard explain {target}`)" if target in pages and target != page else link[1]

    text = re.sub(r"(?<![\w\]])\[([^]]*)\]\(([^)#]*?)(?:\.md)?(?:#[^)]*)?\)", typed, text)
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


EXPLAIN = Command(
    "explain",
    "causes",
    _explain,
    "what a cause, finding or error means and what to do; or a page",
    [
        option(
            "name",
            "such as rate_too_high, spike, NonFiniteGradientError or the page clipping; without one, a list",
            nargs="?",
            metavar="NAME",
        )
    ],
)
SKILL = Command("skill", "skill", _skill, "one page for an assistant: which command when, how to read --json")

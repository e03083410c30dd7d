"""What the site needs beyond MkDocs: files from outside docs/, and docstrings' reST as Markdown.

On GitHub the same pages are read in their folders. So links go from folder to folder of the repository; the site is
docs/ laid over the root, and the links are changed here to fit.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from docutils.parsers.rst.tableparser import SimpleTableParser
from docutils.statemachine import StringList
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = (
    "benchmarks/LOG.md",
    "benchmarks/gpu/NVIDIA_H100.md",
    "benchmarks/gpu/NVIDIA_H200.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
EXAMPLES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("examples", "examples/museum")
    for path in ROOT.glob(f"{folder}/*.py")
)

# What the reference has: a name in backticks leads there. Of the trainers some have one name in common.
_SHOWN = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md"))
_PUBLIC = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (gradguard\.(?!integrations).*)$", _SHOWN, re.M)}

_NAME = re.compile(r"(?<!`)`(?:gradguard\.|gg\.)?(\w+)`(?!`)")
_DISPLAYED = re.compile(r"^( *)\.\. math::(.*(?:\n+\1 +.*)*)", flags=re.MULTILINE)
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.DOTALL)
_TABLE = re.compile(r"^( *)=+(?: +=+)+ *\n(?:\1.*\S.*\n)+?\1=+(?: +=+)+ *(?=\n *\n|\n*\Z)", flags=re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    for name in (*FROM_ROOT, *EXAMPLES):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where the files lie in the site."""
    name = page.file.src_uri
    if name in FROM_ROOT:
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    up = "../" * name.count("/")
    return markdown.replace(f"](../{up}README.md", f"]({up}index.md").replace(f"](../{up}", f"]({up}")


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw without a script."""
    html = _INLINE.sub(lambda m: _mathml(m[1], "inline"), html)
    return _BLOCK.sub(lambda m: _mathml(m[1], "block"), html)


class RestructuredText(griffe.Extension):
    """Formulas and tables in docstrings are reST, as PyTorch's are; mkdocstrings takes Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring with its formulas and tables in Markdown."""
    text = _TABLE.sub(lambda m: _pipes(m[0].splitlines(), m[1]), text)
    text = _DISPLAYED.sub(lambda m: f"\n{m[1]}$${' '.join(m[2].split())}$$\n", text)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = _NAME.sub(lambda m: f"[{m[0]}][{_PUBLIC[m[1]]}]" if m[1] in _PUBLIC else m[0], text)
    text = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # or mkdocstrings takes `>>>` for a quotation


def _pipes(lines: list[str], indent: str) -> str:
    _, head, body = SimpleTableParser().parse(StringList([line.removeprefix(indent) for line in lines]))
    rows = [[" ".join(" ".join(cell[3]).split()).replace("|", r"\|") for cell in row] for row in head + body]
    if not head:
        rows.insert(0, [""] * len(rows[0]))
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"{indent}| {' | '.join(row)} |" for row in rows)


def _mathml(latex: str, display: str) -> str:
    return convert(unescape(latex), display=display).replace(r"\_", "_")  # of \text{max\_norm}

"""Write tutorials as notebooks: ``python docs/notebooks.py`` makes ``examples/notebooks/`` from docs/tutorials/.

A ``python`` block becomes a cell of code, all else a cell of text; links lead to the pages of the repository.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent / "examples" / "notebooks"
TUTORIALS = ("language_model", "private")
_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|#)((?:\.\./)*)([^)]*)\)")


def notebook(page: str) -> str:
    """Return the notebook of a page of Markdown, as JSON."""
    page = _LINK.sub(lambda link: f"](../../docs/{'' if link[1] else 'tutorials/'}{link[2]})", page)
    parts = _BLOCK.split(page.replace("Put the blocks into `train.py` one after the other.", ""))
    cells = [_cell("markdown" if place % 2 == 0 else "code", text) for place, text in enumerate(parts) if text.strip()]
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found = {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}}
    return json.dumps(found | {"nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict:
    cell = {"cell_type": kind, "id": "", "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in TUTORIALS:
        text = (HERE / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
        (FOLDER / f"{name}.ipynb").write_text(notebook(text), encoding="utf-8")

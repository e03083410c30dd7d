"""Set the version everywhere: `python .ci/version.py 0.1.0 2026-01-31`, or `python .ci/version.py 0.2.0.dev0`.

With a date, "Unreleased" in CHANGELOG.md becomes that version; without one a new "Unreleased" is put before the last.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def set_version(root: Path, version: str, date: str | None) -> None:
    """Write the version into all files that have it, and the date into two of them."""
    change(root / "pyproject.toml", r'^version = ".*"$', f'version = "{version}"')
    change(root / "src/gradguard/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"')
    citation = f"version: {version}" + (f"\ndate-released: {date}" if date else "")
    change(root / "CITATION.cff", r"^version: .*$(\ndate-released: .*$)?", citation)
    if date is None:
        change(root / "CHANGELOG.md", r"\A# Changelog\n", "# Changelog\n\n## Unreleased\n")
        return
    change(root / "CHANGELOG.md", r"^## Unreleased$", f"## {version} ({date})")
    change(root / ".ci/conda/recipe.yaml", r'^  version: ".*"$', f'  version: "{version}"')


def change(path: Path, pattern: str, text: str) -> None:
    """Replace what a pattern finds once."""
    changed, count = re.subn(pattern, lambda _: text, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{path}: expected one place that {pattern} finds, got {count}.")
    path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("date", nargs="?", help="YEAR-MONTH-DAY, of a release")
    arguments = parser.parse_args()
    set_version(ROOT, arguments.version, arguments.date)

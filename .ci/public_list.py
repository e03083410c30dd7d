"""Write `src/gradguard/__init__.pyi`, which type checkers and editors read, from the table of `__init__.py`."""

from pathlib import Path

import gradguard


def stub() -> str:
    """Return the text of the stub: an import for each public name, and `__all__`."""
    lines = ['"""Written by `python .ci/public_list.py` from the table of `__init__.py`: do not edit."""', ""]
    for module, names in sorted(gradguard._PUBLIC.items()):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names.split())]
    listed = [f'    "{name}",' for name in gradguard.__all__]
    return "\n".join([*lines, "", "__version__: str", "__all__ = [", *listed, "]", ""])


if __name__ == "__main__":
    (Path(gradguard.__file__).parent / "__init__.pyi").write_text(stub(), encoding="utf-8")

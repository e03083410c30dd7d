"""What a record may tell of a command line: no secrets, and no path from outside the working folder or the home."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

HIDDEN = "***"

# What may stand before a match keeps the search linear: an argument may have 100,000 characters.
_NAME = r"(?:api[-_]?key|access[-_]?key|private[-_]?key|key|token|pass(?:word|wd|phrase)|pwd|secret|credentials?|auth)"
_FIELD = rf"(?:[\w.+-]*[-_.])?{_NAME}"
_OPTION = re.compile(rf"-{{0,2}}{_FIELD}", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(-{{0,2}}{_FIELD}=).+", re.IGNORECASE | re.DOTALL)
_INSIDE = re.compile(rf"""(?<![\w.+-])({_FIELD}["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;&}}]+)""", re.IGNORECASE)
_HEADER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s]*@", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^\s:/@]{16,}@", re.IGNORECASE)
_TOKENS = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{16,}|hf_\w{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_\w{30,}|pypi-[\w-]{16,})"
)


def redacted_arguments(arguments: Sequence[object]) -> list[str]:
    """Return a command line without what should not stand in a report that is shown to others.

    Hidden are the values of options and assignments whose name ends in key, token, password, secret and the like,
    passwords in URLs, and tokens of known services wherever they stand. Paths are shown as by `redacted`.

    Args:
        arguments: The command line.

    Example:
        >>> redacted_arguments(["train.py", "--api-key", "abc", "--lr=0.1", "db=postgres://me:pw@host/x"])
        ['train.py', '--api-key', '***', '--lr=0.1', 'db=postgres://me:***@host/x']
    """
    shown, hide = list[str](), False
    for argument in map(str, arguments):
        if hide and not argument.startswith("--"):
            shown.append(HIDDEN)
            hide = False
            continue
        hide = argument.startswith("-") and _OPTION.fullmatch(argument) is not None
        assigned = _ASSIGNED.fullmatch(argument)
        shown.append(redacted(argument) if assigned is None else f"{assigned[1]}{HIDDEN}")
    return shown


def redacted(text: str) -> str:
    """Return a text without secrets, its absolute paths as they are seen from the working folder or the home.

    Args:
        text: An argument, or a message.

    Example:
        >>> redacted(f"{Path.cwd()}/data with token=1234 and sk-0123456789abcdef0123")
        'data with token=*** and ***'
    """
    text = _PASSWORD_IN_URL.sub(rf"\1:{HIDDEN}@", text)
    text = _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _INSIDE.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1 {HIDDEN}", text)
    return _shorter_paths(_TOKENS.sub(HIDDEN, text))


def _shorter_paths(text: str) -> str:
    """Write the working folder as nothing and the home as ``~``: neither says anything to others."""
    for folder, below, alone in ((_folder(Path.cwd), "", "."), (_folder(Path.home), f"~{os.sep}", "~")):
        if folder is not None:
            start = (
                rf"(?<![\w.~-])(?<![^/\\][/\\]){re.escape(folder)}"  # and not within another path; after // it begins
            )
            text = re.sub(rf"{start}{re.escape(os.sep)}(?=[^\s{re.escape(os.sep)}])", lambda _, new=below: new, text)
            text = re.sub(rf"{start}{re.escape(os.sep)}?(?![\w.-])", lambda _, new=alone: new, text)
    return text


def _folder(find) -> str | None:
    """A folder that is long enough to say something; None for the root, or where there is none."""
    try:
        folder = str(find())
    except (OSError, RuntimeError):  # it was deleted, or there is no home
        return None
    return folder if len(Path(folder).parts) > 1 else None

"""Redact a command line for a record: hide secrets, and shorten paths in the working folder and the home."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from gradguard.monitoring.record.harmless import has_entropy, is_harmless

HIDDEN = "***"

# The lookbehinds keep the search linear: an argument may have 100,000 characters.
_NAME = r"(?:api[-_]?key|access[-_]?key|private[-_]?key|key|token|pass(?:word|wd|phrase)|pwd|secret|credentials?|auth)"
_FIELD = rf"(?:[\w.+-]*[-_.])?{_NAME}"
_INSIDE = re.compile(rf"""(?<![\w.+-])({_FIELD}["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;&}}]+)""", re.IGNORECASE)
_HEADER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s]*@", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^\s:/@]{16,}@", re.IGNORECASE)
_TOKENS = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk)_(?:live|test)_\w{8,}|whsec_[\w+/=]{8,}|dapi[0-9a-f]{16,}|SG\.[\w-]{8,}\.[\w-]{8,}"
    r"|shp\w{2}_\w{16,}"
    r"|ya29\.[\w-]{16,}|hv[sb]\.[\w-]{16,}|dop_v1_\w{16,}|sk-[\w-]{16,}|hf_\w{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_\w{30,}|pypi-[\w-]{16,})"
)
_QUERY = re.compile(r"([?&][\w.%-]{1,64}=)([^&#\s\"']+)")
_HOOK = re.compile(r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/)[^\s\"']+", re.IGNORECASE)
_AZURE = re.compile(r"\b((?:Account|SharedAccess|Shared)\w{0,20}(?:Key|Signature)=)[^;\s\"']+", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)", re.DOTALL)

_SHORT_OPTION = re.compile(r"-[A-Za-z][\w-]*")
_LONG_OPTION = re.compile(r"--[\w.+/-]+")
_ASSIGNMENT = re.compile(r"(-{0,2}[+~]{0,2}[\w./@+-]{1,200}=)(.*)", re.DOTALL)
_SECRETS = r"pass|pw|pat|pin|otp|login|cookies?|session|sig|signature|webhook|dsn"
_SECRET = re.compile(
    rf"-{{0,2}}[+~]{{0,2}}(?:{_FIELD}|(?:[\w.+-]*[-_.])?(?:{_SECRETS}))"
    r"(?:[-_.](?:value|id|text|string))?",
    re.IGNORECASE,
)
_NAMING = re.compile(
    r"-{0,2}[+~]{0,2}(?:[\w.+-]*[-_./])?(?:dir|path|file|folder|root|dataset|datasets|data|model|arch|project|name|names|"
    r"experiment|exp|task|tasks|tags?|config|cfg|split|module|output|out|input|train|val|test|ckpt|checkpoint|resume)"
)
"""Options whose value is a name; the value is shown unless it looks random."""


def redacted_arguments(arguments: Sequence[object]) -> list[str]:
    """Return a command line without secrets, for a report that others may read.

    The value of an option or an assignment is shown if it looks like a setting: numbers, known words, and existing
    files. The value of an option for a name (``--output-dir``, ``--model``) is shown unless it looks random. All other
    values are hidden. Also hidden are the values of options with a secret's name, passwords in URLs, tokens of known
    services anywhere, and arguments that look random. `redacted` shortens the paths.

    Args:
        arguments: The command line, with the script or the module first.

    Example:
        >>> redacted_arguments(["train.py", "--api-key", "ab", "--lr=0.1", "db=postgres://me:pw@host/x", "--id", "xG7"])
        ['train.py', '--api-key', '***', '--lr=0.1', 'db=postgres://me:***@host/x', '--id', '***']
    """
    given = [str(argument) for argument in arguments]
    shown, option = list[str](), ""
    for place, argument in enumerate(given):
        is_option = _LONG_OPTION.fullmatch(argument) or (
            _SHORT_OPTION.fullmatch(argument) and not (option and _SECRET.fullmatch(option))
        )
        assigned = _ASSIGNMENT.fullmatch(argument)
        is_program = assigned is None and ((place == 0 and not is_option) or (place == 1 and given[0] == "-m"))
        if is_program:
            shown.append(redacted(argument))
        elif option and not argument.startswith("--") and not is_option:
            shown.append(_of_option(option, argument))
            option = ""
        elif assigned is not None:
            shown.append(f"{assigned[1]}{_of_option(assigned[1][:-1], assigned[2])}")
            option = ""
        elif is_option:
            shown.append(_option(argument))
            option = argument
        else:
            shown.append(HIDDEN if _is_random(argument) else redacted(argument))
            option = ""
    return shown


def _of_option(name: str, value: str, *, is_inner: bool = False) -> str:
    """Return an option's value, redacted; an assignment inside it, as in ``-o key=value``, counts as an option."""
    if _SECRET.fullmatch(name):
        return HIDDEN
    text = redacted(value)
    if is_harmless(value) and not (_TOKENS.search(value) and text != value):
        return text
    named = "://" in value or _NAMING.fullmatch(name) is not None
    inner = None if is_inner or named else _ASSIGNMENT.fullmatch(value)
    if inner is not None:
        return f"{inner[1]}{_of_option(inner[1][:-1], inner[2], is_inner=True)}"
    return text if named and not has_entropy(text) else HIDDEN


def _option(argument: str) -> str:
    """Return an option, redacted: a one-letter option may have its value attached, and a random text is no option."""
    if has_entropy(argument):
        return HIDDEN
    glued = not argument.startswith("--") and len(argument) > 2 and "-" not in argument[1:]
    return argument if not glued or argument[1:].isalpha() or is_harmless(argument[2:]) else f"{argument[:2]}{HIDDEN}"


def _is_random(argument: str) -> bool:
    return has_entropy(redacted(argument)) and not os.path.lexists(argument)


def redacted(text: str) -> str:
    """Return a text without secrets, with absolute paths made relative to the working folder or the home.

    Args:
        text: An argument or a message.

    Example:
        >>> redacted(f"{Path.cwd()}/data with token=1234 and sk-0123456789abcdef0123")
        'data with token=*** and ***'
    """
    text = _HOOK.sub(rf"\1{HIDDEN}", _AZURE.sub(rf"\1{HIDDEN}", _PEM.sub(HIDDEN, text)))
    text = _QUERY.sub(lambda found: found[0] if is_harmless(found[2]) else f"{found[1]}{HIDDEN}", text)
    text = _PASSWORD_IN_URL.sub(rf"\1:{HIDDEN}@", text)
    text = _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _INSIDE.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1 {HIDDEN}", text)
    return _shorter_paths(_TOKENS.sub(HIDDEN, text))


def _shorter_paths(text: str) -> str:
    """Remove the working folder from paths, and write the home as ``~``: other readers need neither."""
    for folder, below, alone in ((_folder(Path.cwd), "", "."), (_folder(Path.home), f"~{os.sep}", "~")):
        if folder is not None:
            start = rf"(?<![\w.~-])(?<![^/\\][/\\]){re.escape(folder)}"  # not inside another path, but allowed after //
            text = re.sub(rf"{start}{re.escape(os.sep)}(?=[^\s{re.escape(os.sep)}])", lambda _, new=below: new, text)
            text = re.sub(rf"{start}{re.escape(os.sep)}?(?![\w.-])", lambda _, new=alone: new, text)
    return text


def _folder(find) -> str | None:
    """Return the folder that ``find`` returns; None for the root, or if there is no such folder."""
    try:
        folder = str(find())
    except (OSError, RuntimeError):  # the working folder was deleted, or there is no home
        return None
    return folder if len(Path(folder).parts) > 1 else None

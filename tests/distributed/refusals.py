"""What every process says when it must refuse."""

import re


def refusal(function, *args):
    """The error's type and message; "no error" if there is none."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def check_refusals(found, kind, match):
    """Every process must refuse, all of them alike."""
    for name, said in found:
        assert name == kind, (name, said)
        assert re.search(match, said), said

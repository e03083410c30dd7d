"""Check that an integration runs with the versions of a package that it was tested with."""

import re
from importlib import metadata

from gradguard.errors import MissingPackageError, UnsupportedVersionError


def require(package: str, at_least: str, below: str, extra: str) -> None:
    """Return if ``package`` is installed in a version from ``at_least`` up to, but without, ``below``.

    Numbers are compared part by part, so 2.10 is newer than 2.9; a pre-release (2.7.0rc1) counts as its release.

    Args:
        package: Name of the package for pip.
        at_least: Oldest version known to work.
        below: First version that has not been tried.
        extra: The extra of gradguard that installs the package.

    Raises:
        MissingPackageError: If it is not installed.
        UnsupportedVersionError: If it is too old or too new.

    Example:
        >>> from gradguard.integrations.versions import require
        >>> require("torch", "2.11", "100", "lightning")
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            f"this part of gradguard needs {package}, which is not installed. "
            f'Type: pip install "gradguard[{extra}]", or pip install "{package}>={at_least},<{below}".'
        ) from error
    old, new = _numbers(found) < _numbers(at_least), _numbers(found) >= _numbers(below)
    if old or new:
        raise UnsupportedVersionError(
            f"{package} {found} is too {'old' if old else 'new'} for this part of gradguard: it is known to work from "
            f'{at_least} up to, but without, {below}. Type: pip install "{package}>={at_least},<{below}"'
            f"{', or look for a newer gradguard' if new else ''}."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release as numbers, without zeros at the end: 2.6 and 2.6.0 are one version."""
    release = re.match(r"\d+(\.\d+)*", version.removeprefix("v"))
    numbers = list(map(int, release[0].split("."))) if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

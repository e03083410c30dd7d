"""A package that is missing, too old or too new is named, with what was found and what to type."""

import re
from importlib import metadata

import pytest

from gradguard.errors import GradguardError, MissingPackageError, UnsupportedVersionError
from gradguard.integrations.versions import require


@pytest.fixture
def installed(monkeypatch):
    def set_version(version):
        monkeypatch.setattr(metadata, "version", lambda _: version)

    return set_version


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.6", "2.6.0rc1", "2.6.6+cpu", "v2.6.1", "2.9.9", "2.9.post1"])
def test_versions_in_the_range_pass(installed, version):
    installed(version)
    require("lightning", "2.6.0", "2.10", "lightning")


@pytest.mark.parametrize(
    ("version", "is_too"),
    [("2.5.9", "old"), ("1.9", "old"), ("", "old"), ("2.10", "new"), ("2.10.0rc1", "new"), ("3.0.0.dev1", "new")],
)
def test_versions_outside_the_range_fail_with_both(installed, version, is_too):
    installed(version)
    words = rf"lightning {version} is too {is_too} .* from 2\.6 up to, but without, 2\.10\. Type: pip install \""
    with pytest.raises(UnsupportedVersionError, match=words):
        require("lightning", "2.6", "2.10", "lightning")


def test_a_missing_package_names_the_extra():
    words = re.escape('pip install "gradguard[here]", or pip install "no-such-package-here>=1,<2".')
    with pytest.raises(MissingPackageError, match=words):
        require("no-such-package-here", "1", "2", "here")


@pytest.mark.parametrize("error", [MissingPackageError, UnsupportedVersionError])
def test_both_are_import_errors_of_gradguard(error):
    assert issubclass(error, ImportError)
    assert issubclass(error, GradguardError)

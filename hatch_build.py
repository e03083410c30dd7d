"""What hatchling calls for a wheel or an editable installation: pages, and compiled kernels if they can be built.

The pages of docs/ go into a wheel, where `gradguard explain` reads them. The README is what an index shows, where
relative links lead nowhere: with `Source` under `[project.urls]` they lead to that version of the repository.

Without them the wheel is one for every machine. ``GRADGUARD_NATIVE=0`` leaves them out; ``GRADGUARD_PLATFORM`` is the
platform that the wheel is named for, where that is a wider one than this machine: `make release` sees that it is true.
"""

import os
import re
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

NATIVE = Path(__file__).parent / "native"
DOCS = Path(__file__).parent / "docs"
PAGES = ("*.md", "trainers/*.md", "tutorials/*.md")


class NativeKernels(BuildHookInterface):
    """Adds ``gradguard/lib/libgradguard.so`` to a wheel, or to the source tree that an editable installation uses."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the pages; build the library, whose failure is told and leaves it out."""
        if version != "editable":
            pages = [page for pattern in PAGES for page in DOCS.glob(pattern)]
            force_include = build_data["force_include"]
            force_include |= {str(page): f"gradguard/pages/{page.relative_to(DOCS).as_posix()}" for page in pages}
        if os.environ.get("GRADGUARD_NATIVE") == "0":
            return
        try:
            builder = runpy.run_path(str(NATIVE / "build.py"))
            if version == "editable":
                builder["build_if_older"]()
            else:
                folder = tempfile.TemporaryDirectory()
                self._folder = folder  # until `finalize`
                library = Path(folder.name, "libgradguard.so")
                builder["build"](library)
                platform = os.environ.get("GRADGUARD_PLATFORM") or sysconfig.get_platform().replace("-", "_")
                build_data["force_include"][str(library)] = "gradguard/lib/libgradguard.so"
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform.replace('.', '_')}"
        except (OSError, RuntimeError) as error:
            self.app.display_warning(f"gradguard without its compiled kernels, slower and as right: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Throw away what was built."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


class Readme(MetadataHookInterface):
    """Sets the description that an index shows."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        shown = with_absolute_links(text, source, metadata["version"]) if source else text
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}


def with_absolute_links(text: str, source: str, version: str) -> str:
    """Let relative links of Markdown lead to the files of a version in a repository.

    Args:
        text: The Markdown.
        source: The address of the repository.
        version: The version, whose tag has a v before it.

    Returns:
        The Markdown with absolute links.
    """
    return re.sub(
        r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!https?:|#)([^)]*)\)",
        lambda link: f"{link[1]}[{link[2]}]({source.rstrip('/')}/{'raw' if link[1] else 'blob'}/v{version}/{link[3]})",
        text,
    )

"""What hatchling calls for a wheel or an editable installation: pages, and compiled kernels if they can be built.

The pages of docs/ go into a wheel, where `gradguard explain` reads them.

Without them the wheel is one for every machine. ``GRADGUARD_NATIVE=0`` leaves them out; ``GRADGUARD_PLATFORM`` is the
platform that the wheel is named for, where that is a wider one than this machine: `make release` sees that it is true.
"""

import os
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

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

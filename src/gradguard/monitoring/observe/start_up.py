"""Start of `GRADGUARD=run.jsonl python train.py`, before the script: nothing here imports torch.

The wheel installs this file as `_gradguard_start_up.py` beside the package and not in it, so that Python's start needs
nothing of `gradguard`, and a `.pth` file that calls `install` where the variable is set. So nothing of the package may
import it. When the script has imported torch itself, `watch_process` of `gradguard.monitoring.observe.watch` begins.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

VARIABLE = "GRADGUARD"
"""The environment variable that holds the path of the record."""

OWNER = "GRADGUARD_PROCESS"
"""The environment variable that tells children which process was the first, and when it began."""


def install():
    """Watch this process from the moment it has imported torch; harmless when called twice."""
    if not os.environ.get(VARIABLE) or any(type(finder).__name__ == "_Finder" for finder in sys.meta_path):
        return
    os.environ.setdefault(OWNER, f"{os.getpid()} {time.time()}")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that tells when torch is there."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch" and name.partition(".")[0] != "gradguard":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def begin(self):
        # A module of gradguard may be what imports torch: not before that module is there too, which we may need.
        if "torch" not in sys.modules or _importing:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from gradguard.monitoring.observe.watch import watch_process

            watch_process()
        except Exception as error:  # what watches never ends what is watched
            print(f"gradguard: not watching: {type(error).__name__}: {error}", file=sys.stderr)


class _Loader(importlib.abc.Loader):
    """Loads as ``loader`` does, and then lets ``finder`` begin."""

    def __init__(self, loader, finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name):
        return getattr(self._loader, name)  # `python -m gradguard` asks for the code

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # The module must look as it would without us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _importing.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            _importing.discard(module.__name__)
        self._finder.begin()


_importing = set()

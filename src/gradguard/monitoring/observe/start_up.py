"""Prepare the recording of `GRADGUARD=run.jsonl python train.py` before the script starts, without importing torch.

The wheel installs this file as `_gradguard_start_up.py` beside the package, with a `.pth` file that calls `install` if
the variable is set. The start of Python therefore needs no module of `gradguard`, and no module of `gradguard` may
import this file. After the script has imported torch, `gradguard.monitoring.observe.watch.watch_process` is called.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

VARIABLE = "GRADGUARD"
"""The environment variable that holds the path of the record."""

OWNER = "GRADGUARD_PROCESS"
"""The environment variable that passes the first process's PID and start time to its children."""


def install():
    """Record this process after it has imported torch; a second call does nothing."""
    if not os.environ.get(VARIABLE) or any(type(finder).__name__ == "_Finder" for finder in sys.meta_path):
        return
    os.environ.setdefault(OWNER, f"{os.getpid()} {time.time()}")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Find torch and gradguard's modules as `PathFinder` does, with a loader that calls `begin` after the import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch" and name.partition(".")[0] != "gradguard":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def begin(self):
        # A module of gradguard may be importing torch: wait until that module is complete, because `watch` needs it.
        if "torch" not in sys.modules or _importing:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from gradguard.monitoring.observe.watch import watch_process

            watch_process()
        except Exception as error:  # a failure of the recorder must not stop the script
            print(f"gradguard: not watching: {type(error).__name__}: {error}", file=sys.stderr)


class _Loader(importlib.abc.Loader):
    """Load a module with ``loader``, then call ``finder.begin``."""

    def __init__(self, loader, finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name):
        return getattr(self._loader, name)  # `python -m gradguard` calls `get_code`

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # The module must keep the loader that it would have without this finder.
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

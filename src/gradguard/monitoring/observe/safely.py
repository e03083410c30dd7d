"""How the observer's methods are called: nothing that they do may reach the script."""

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradguard.monitoring.observe.observer import Observer


def safely(method: Callable) -> Callable:
    """Time what the observer does, keep its failures away from the script, and do nothing in a forked child."""

    @functools.wraps(method)
    def safe(self: "Observer", *args: Any) -> Any:
        if self._broken or os.getpid() != self._process:
            return None
        started = time.perf_counter()
        try:
            return method(self, *args)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            self._overhead += time.perf_counter() - started

    return safe

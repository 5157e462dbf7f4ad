"""`library`: the package `longspan`, imported when a command needs it; and Ctrl-C while JAX is loaded or runs."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

RETRY_SECONDS = 0.1  # the delay after which a dropped interrupt is raised again


def library() -> Any:
    """The package `longspan`. Runs its module now if `_longspan_command` has deferred that."""
    package = sys.modules["longspan"]
    if not hasattr(package, "attention"):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        with _uninterrupted():
            package.__spec__.loader.exec_module(package)
    return package


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block: Python crashes at exit if it interrupts the import of JAX's modules."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def repeat_dropped_interrupts() -> None:
    """Raises an interrupt again that arrived while Python deleted an object: there Python only prints exceptions."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        with suppress(RuntimeError):  # Python is exiting and cannot start threads
            timer.start()

    sys.unraisablehook = hook

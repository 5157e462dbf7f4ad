"""`library`: Longspan itself, for a command that runs; and Ctrl-C while JAX is at work."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

AGAIN = 0.1  # seconds after which a dropped interrupt is raised again


def library() -> Any:
    """The package, run now if the command's door left that for later (`_longspan_command`)."""
    package = sys.modules["longspan"]
    if not hasattr(package, "attention"):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        with _uninterrupted():
            package.__spec__.loader.exec_module(package)
    return package


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end: Python crashes on its way out where it cuts JAX's native modules in half."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def repeat_dropped_interrupts() -> None:
    """Raises an interrupt again that came while Python cleaned up an object, where it only prints exceptions."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        timer = threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        with suppress(RuntimeError):  # Python is about to exit, and starts no threads
            timer.start()

    sys.unraisablehook = hook

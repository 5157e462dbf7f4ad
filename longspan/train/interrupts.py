"""Ctrl-C and SIGTERM during a run: the first one asks the loop to save and stop, the second one ends the process."""

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The run was interrupted, and its state was saved.

    Example:
        >>> from longspan import train
        >>> train.Interrupted(7).step
        7
    """

    def __init__(self, step: int):
        super().__init__(f"interrupted after step {step}")
        self.step = step


class Interrupts:
    """While entered, `requested` tells whether a signal came. Outside of the main thread nothing is caught."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

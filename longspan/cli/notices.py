"""Lines on stderr for people who watch: warnings, and what is compiled and for how long. Data goes to stdout."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

COMPILING = "/jax/core/compile/"  # how JAX names the events of tracing, lowering and compiling


def say(line: str) -> None:
    """One line on stderr, if somebody reads it."""
    if sys.stderr is not None:  # None: it was closed before we began, and print would write to stdout
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


@contextmanager
def compiling(what: str, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Says what is compiled in this block once JAX compiles, and at the end how long that took. Else it says nothing.

    Args:
        what: a noun, such as "the encoder".
        quiet: says nothing: for commands whose output is read by programs.

    Yields:
        A function for a block that goes on after everything is compiled: called there, it says so at once.
    """
    if quiet:
        yield lambda: None
        return
    from jax import monitoring

    spans: list[tuple[float, float]] = []
    done: list[bool] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        # Tracing comes first, and a program traces many small functions: the first event is soon there.
        if event.startswith(COMPILING) and not done:
            now = time.perf_counter()
            spans.append((now - duration_secs, now))
            if len(spans) == 1:
                say(f"compiling {what} ...")

    def compiled() -> None:
        if spans and not done:
            say(f"compiled {what} in {covered(spans):.1f} s")
        done.append(True)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
        compiled()
    finally:
        monitoring.unregister_event_duration_listener(listen)


def covered(spans: list[tuple[float, float]]) -> float:
    """The seconds that spans cover together: a function that is traced inside of another counts once.

    Example:
        >>> covered([(1.0, 2.0), (0.0, 3.0), (5.0, 6.0)])
        4.0
    """
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


class Held:
    """A stream of tokens that begins when both programs of a decoder are compiled.

    The first token of each row comes from one program and the next from another, so the first ones wait for those.

    Args:
        stream: called as stream(row, token), as `ls.generate` does.
        rows: how many there are.
        compiled: called once, before the first token is passed on.
    """

    def __init__(self, stream: Callable[[int, Any], Any], rows: int, compiled: Callable[[], None]):
        self.stream, self.rows, self.compiled = stream, rows, compiled
        self.waiting: list[tuple[int, Any]] = []
        self.count = 0

    def __call__(self, row: int, token: Any) -> None:
        self.waiting.append((row, token))
        self.count += 1
        if self.count > self.rows:
            self.release()

    def release(self) -> None:
        """Passes on what still waits: at the end, an answer may be of one token."""
        self.compiled()
        waiting, self.waiting = self.waiting, []
        for row, token in waiting:
            self.stream(row, token)

"""Lines on stderr: warnings, and the programs that JAX compiles with their compile times. Results go to stdout."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

COMPILING = "/jax/core/compile/"  # the prefix of JAX's events for tracing, lowering and compiling


def say(line: str) -> None:
    """Prints one line on stderr, if it is open."""
    if sys.stderr is not None:  # None: it was closed before the process started, and print would write to stdout
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


@contextmanager
def compiling(what: str, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Prints a line when JAX starts to compile in this block, and another with the seconds at the end of the block.

    Args:
        what: a noun, such as "the encoder".
        quiet: whether to print nothing, for commands with JSON output.

    Yields:
        A function that prints the second line at once, for a block that continues after everything is compiled.
    """
    if quiet:
        yield lambda: None
        return
    from jax import monitoring

    spans: list[tuple[float, float]] = []
    done: list[bool] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        # JAX reports each event when it ends. Small traced functions end early, so the first line appears early.
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
    """The total length of the union of time spans: a function that is traced inside another one counts once.

    Example:
        >>> covered([(1.0, 2.0), (0.0, 3.0), (5.0, 6.0)])
        4.0
    """
    total, covered_until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return total


class DelayedStream:
    """Delays a decoder's first tokens until both of its programs are compiled.

    The prefill program gives the first token of each row, and the decode program all others. So the first tokens wait
    until a second one arrives.

    Args:
        stream: called as stream(row, token), as by `ls.generate`.
        rows: the number of rows.
        compiled: called before the first token is passed on.
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
        """Passes on all waiting tokens; needed at the end too, since every answer may be of one token."""
        self.compiled()
        waiting, self.waiting = self.waiting, []
        for row, token in waiting:
            self.stream(row, token)

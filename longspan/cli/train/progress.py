"""The progress of a run on stderr: a bar on a terminal, otherwise a line now and then."""

import math
import sys
import time
from collections import deque
from typing import Any

from longspan.cli.notices import say
from longspan.train.report import Progress

LINE_SECONDS = 10  # between two lines without a terminal
RATE_STEPS = 20  # steps that the shown rate is the mean of
NOT_METRICS = ("step", "best")


def progress_here() -> Progress:
    """The progress for this process's stderr."""
    if sys.stderr is not None and sys.stderr.isatty():
        return BarProgress()
    return LineProgress()


class LineProgress(Progress):
    """Prints the first step, one line every ten seconds, and every evaluation."""

    def __init__(self) -> None:
        self.steps, self.done = 0, 0
        self.recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        self.printed = -math.inf

    def start(self, step: int, steps: int) -> None:
        self.done, self.steps = step, steps

    def note(self, line: str) -> None:
        say(line)

    def compiling(self, what: str) -> None:
        self.note(f"compiling {what} ...")

    def compiled(self, what: str, seconds: float) -> None:
        self.note(f"compiled {what} in {seconds:.1f} s")

    def step(self, record: dict[str, Any]) -> None:
        self.done = record["step"]
        self.recent.append((record["tokens"], record["seconds"]))
        if time.monotonic() - self.printed >= LINE_SECONDS or self.done == self.steps:
            self.printed = time.monotonic()
            self.note(f"step {self.done:,} of {self.steps:,}: {self.words(record)}, {self.left} left")

    def evaluation(self, record: dict[str, Any]) -> None:
        self.note(f"step {record['step']:,}: {metric_words(record)}")

    def words(self, record: dict[str, Any]) -> str:
        """The loss and the speed."""
        loss = record["loss"]
        shown = "not finite" if loss is None else f"{loss:.4f}"
        return f"loss {shown}, {self.rate:,.0f} tokens/s"

    @property
    def rate(self) -> float:
        """Tokens per second of the last steps."""
        return sum(tokens for tokens, _ in self.recent) / max(sum(seconds for _, seconds in self.recent), 1e-9)

    @property
    def left(self) -> str:
        """The expected time of the remaining steps."""
        mean = sum(seconds for _, seconds in self.recent) / max(len(self.recent), 1)
        minutes, seconds = divmod(round(mean * (self.steps - self.done)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


class BarProgress(LineProgress):
    """A bar with loss, tokens per second and the time left; notes and evaluations are printed above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self.bar = Bar(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self.line = self.bar.add_task("training", total=None, said="")

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self.bar.start()
        self.bar.update(self.line, total=steps, completed=step)

    def note(self, line: str) -> None:
        self.bar.console.print(line, soft_wrap=True, markup=False)

    def compiling(self, what: str) -> None:
        self.bar.update(self.line, said=f"compiling {what} ...")

    def compiled(self, what: str, seconds: float) -> None:
        self.note(f"compiled {what} in {seconds:.1f} s")

    def step(self, record: dict[str, Any]) -> None:
        self.done = record["step"]
        self.recent.append((record["tokens"], record["seconds"]))
        self.bar.update(self.line, completed=self.done, said=f"{self.words(record)}, {self.left} left")

    def close(self) -> None:
        self.bar.stop()


def metric_words(record: dict[str, Any]) -> str:
    """The metrics of an evaluation in one line; with a loss of words, the perplexity too.

    Example:
        >>> metric_words(dict(step=3, eval_loss=1.0, accuracy=0.5))
        'eval_loss 1.0000, accuracy 0.5000'
    """
    named = {name: value for name, value in record.items() if isinstance(value, float) and name not in NOT_METRICS}
    return ", ".join(f"{name} {value:.4f}" for name, value in named.items())

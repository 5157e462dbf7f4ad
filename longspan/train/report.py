"""What a run tells: metrics.jsonl, one line per step, and `Progress`, which shows it to a person."""

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspan.train.disk import disk_errors

METRICS = "metrics.jsonl"


class MetricsFile:
    """Appends a line per step and per evaluation to a file, and flushes each."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        with disk_errors(str(self.path)):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        # What could not be written before cannot be written now either.
        with suppress(OSError):
            self._file.close()


def cut_metrics(path: Path, step: int) -> None:
    """Removes the lines after a step, and a last line that a killed process did not finish."""
    if not path.exists():
        return
    kept = [line for line in path.read_text("utf-8").splitlines() if (at := _step_of(line)) is not None and at <= step]
    part = path.with_name(path.name + ".part")
    with disk_errors(str(part)):
        part.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        os.replace(part, path)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def finite(value: float) -> float | None:
    """The value, or None if it is infinite or NaN, which JSON cannot hold."""
    if math.isfinite(value):
        return value
    return None


class Progress:
    """Shows a run. Subclasses show more; this class prints notes on stderr and nothing else.

    `fit` calls these methods in the process with rank 0.

    Example:
        >>> from longspan import train
        >>> class Losses(train.Progress):
        ...     def step(self, record):
        ...         print(record["step"], record["loss"])
        >>> Losses().step(dict(step=1, loss=0.5))
        1 0.5
    """

    def start(self, step: int, steps: int) -> None:
        """The run starts after `step` steps, and ends after `steps`."""

    def note(self, line: str) -> None:
        """A line such as "resumed from step 40"."""
        say(line)

    def compiling(self, what: str) -> None:
        """A program is being compiled."""

    def compiled(self, what: str, seconds: float) -> None:
        """The program is compiled."""

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl of a step."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl of an evaluation."""

    def saved(self, step: int) -> None:
        """A checkpoint is complete on disk. Called from another thread."""

    def close(self) -> None:
        """The run is over."""


class NoProgress(Progress):
    """Shows nothing: the progress of all processes but the one with rank 0."""

    def note(self, line: str) -> None:
        """Nothing."""


def say(line: str) -> None:
    """Prints one line on stderr, if it is open."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)

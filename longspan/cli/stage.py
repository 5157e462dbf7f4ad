"""`Stage`: the demo's printed lines, progress bars, pictures and checks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.files import atomic_write
from longspan.optional import is_installed


class Stage:
    """Prints sections, writes pictures, and records the checks that failed.

    Args:
        folder: the folder for pictures.
    """

    def __init__(self, folder: Path):
        from rich.console import Console

        self.folder, self.console = folder, Console(highlight=False, markup=False)
        self.sections, self.failed, self.files = 0, [], []

    def title(self, text: str) -> None:
        """Starts a section."""
        self.sections += 1
        self.console.print(f"\n{self.sections}. {text}\n", style="bold", soft_wrap=True)

    def say(self, text: object = "") -> None:
        """Prints text without changing its lines."""
        self.console.print(str(text), soft_wrap=True)

    def check(self, claim: str, holds: bool) -> None:
        """Prints whether a claim holds. The demo exits with 1 if one does not."""
        if holds:
            self.console.print(f"✓ {claim}", style="green", soft_wrap=True)
        else:
            self.console.print(f"✗ NOT TRUE: {claim}", style="red", soft_wrap=True)
            self.failed.append(claim)

    @contextmanager
    def progress(self, what: str, total: float | None) -> Iterator[Callable[..., None]]:
        """A progress bar that disappears at the end; a line if there is no terminal.

        Yields `update(completed=..., description=...)`.
        """
        from rich.progress import Progress, TimeElapsedColumn

        if not self.console.is_terminal:
            self.say(f"({what} ...)")
        columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            yield lambda **changes: bar.update(task, **changes)

    def draw(self, name: str, mask: Any, length: int, *, tile: int) -> None:
        """Writes a mask's picture: a PNG if matplotlib is installed, otherwise an HTML page."""
        if is_installed("matplotlib"):
            self.save(name, mask.plot(length, length, tile=tile))
            return
        from longspan.render.html import document
        from longspan.render.notebook import mask_html

        with atomic_write(self.folder / f"{name}.html") as new:
            new.write_text(document(mask_html(mask, length, length), repr(mask)), "utf-8")
        self._wrote(f"{name}.html")

    def explore(self, name: str, mask: Any, length: int) -> None:
        """Writes the interactive page of a mask."""
        mask.explore(length, path=self.folder / f"{name}.html")
        self._wrote(f"{name}.html")

    def save(self, name: str, figure: Any) -> None:
        """Writes a matplotlib figure as a PNG."""
        with atomic_write(self.folder / f"{name}.png") as new:
            figure.savefig(new, format="png", dpi=110)
        self._wrote(f"{name}.png")

    def _wrote(self, name: str) -> None:
        self.files.append(name)
        self.say(f"  → {self.folder / name}")

    def letter(self, byte: int) -> None:
        """Prints one byte of a text at once; bytes that are not printable ASCII as a dot."""
        letter = chr(byte)
        if not (letter.isascii() and letter.isprintable()) and letter != "\n":
            letter = "·"
        if sys.stdout is not None:  # None: it was closed before the process started
            sys.stdout.write(letter)
            sys.stdout.flush()

"""`Stage`: where the demo speaks, draws, and keeps count of what it promised."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.cli.files import written
from longspan.optional import is_installed


class Stage:
    """Titles, lines, progress and pictures of a run; and the checks that failed.

    Args:
        folder: where pictures go.
    """

    def __init__(self, folder: Path):
        from rich.console import Console

        self.folder, self.console = folder, Console(highlight=False, markup=False)
        self.sections, self.failed, self.files = 0, [], []

    def title(self, text: str) -> None:
        """A new section."""
        self.sections += 1
        self.console.print(f"\n{self.sections}. {text}\n", style="bold", soft_wrap=True)

    def say(self, text: object = "") -> None:
        """Lines, as they are."""
        self.console.print(str(text), soft_wrap=True)

    def check(self, claim: str, holds: bool) -> None:
        """A claim that was put to the test; the demo fails in the end if one did not hold."""
        self.console.print(
            f"{'✓' if holds else '✗ NOT SO:'} {claim}", style="green" if holds else "red", soft_wrap=True
        )
        if not holds:
            self.failed.append(claim)

    @contextmanager
    def progress(self, what: str, total: float | None) -> Iterator[Callable[..., None]]:
        """A bar that is gone at the end; gives `update(completed=..., description=...)`. Without a terminal, a line."""
        from rich.progress import Progress, TimeElapsedColumn

        if not self.console.is_terminal:
            self.say(f"({what} ...)")
        columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            yield lambda **changes: bar.update(task, **changes)

    def draw(self, name: str, mask: Any, length: int, *, tile: int) -> None:
        """A mask's picture: a PNG where matplotlib is there, else a page."""
        if is_installed("matplotlib"):
            self.save(name, mask.plot(length, length, tile=tile))
            return
        from longspan.render.html import document
        from longspan.render.notebook import mask_html

        with written(self.folder / f"{name}.html") as new:
            new.write_text(document(mask_html(mask, length, length), repr(mask)), "utf-8")
        self._wrote(f"{name}.html")

    def save(self, name: str, figure: Any) -> None:
        """A figure of matplotlib's."""
        with written(self.folder / f"{name}.png") as new:
            figure.savefig(new, format="png", dpi=110)
        self._wrote(f"{name}.png")

    def _wrote(self, name: str) -> None:
        self.files.append(name)
        self.say(f"  → {self.folder / name}")

    def letter(self, byte: int) -> None:
        """One byte of a text as it comes; what is no letter of ASCII is a dot."""
        letter = chr(byte)
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.write(letter if (letter.isascii() and letter.isprintable()) or letter == "\n" else "·")
            sys.stdout.flush()

"""`explore`: the explorer's page of a mask, as a file or in a notebook."""

import base64
import gzip
import html
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from longspan.explorer.document import document
from longspan.explorer.page import page_html
from longspan.files import atomic_write, check_writable
from longspan.masks import Mask

HEIGHT = 720  # pixels of the frame in a notebook
UNPACKING = """<!doctype html><script>(async () => {
const bytes = Uint8Array.from(atob("PACKED"), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const page = await new Response(unpacked).text();
document.open(); document.write(page); document.close();
})();</script>"""


@dataclass(frozen=True)
class MaskExplorer:
    """The explorer's page of one mask. `save` writes it, `html` is its text, and notebooks show it in a frame.

    Example:
        >>> found = ls.Causal().explore(1024)
        >>> found
        <MaskExplorer of Causal(): 1,024 queries x 1,024 keys>
        >>> found.html[:15], found.save(f"{tempfile.mkdtemp()}/causal.html").name
        ('<!doctype html>', 'causal.html')
    """

    document: dict[str, Any] = field(repr=False)  # see `longspan.explorer.document`

    @cached_property
    def html(self) -> str:
        """One complete HTML file, which needs no server and no other file."""
        return page_html(self.document)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page completely or not at all, and returns the path."""
        path = Path(path)
        with atomic_write(path) as new:
            new.write_text(self.html, "utf-8")
        return path

    def _repr_html_(self) -> str:
        # Compressed, so that the saved notebook is small: the frame unpacks the page into itself.
        packed = base64.b64encode(gzip.compress(self.html.encode(), mtime=0)).decode()
        page = UNPACKING.replace("PACKED", packed)
        # Without `allow-same-origin`, the page cannot read or change the notebook that shows it.
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return (
            f'<iframe title="{html.escape(repr(self))}" sandbox="allow-scripts" allow="clipboard-write" loading="lazy" '
            f'style="{style}" srcdoc="{html.escape(page)}"></iframe>'
        )

    def __repr__(self) -> str:
        shown = self.document
        return f"<MaskExplorer of {shown['mask']['text']}: {shown['q_len']:,} queries x {shown['kv_len']:,} keys>"


def explore(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> MaskExplorer | Path:
    """The explorer of a mask, or the path that it was written to. `Mask.explore` describes the arguments."""
    if path is not None:
        check_writable(Path(path))
    found = MaskExplorer(document(mask, q_len, kv_len, **options))
    if path is None:
        return found
    return found.save(path)

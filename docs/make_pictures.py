"""Draws the pictures of gallery.md, writes its grid of thumbnails, and stores the documents of its explorers.

Run `python docs/make_pictures.py`. A test compares the pictures, the grid and the documents with the files.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan import Mask
from longspan.explorer.document import document
from longspan.render.notebook import mask_html

HERE = Path(__file__).parent
SCALE = 0.62  # relative to the size in notebooks
GAP = 8  # pixels between heads
GREY = "#808080"  # of numbers and frames: an image file cannot use its page's colour, and grey reads on any page
BLOCK = re.compile(
    r"(?:^!\[(?P<queries>\d+) queries, (?P<keys>\d+) keys\]\(pictures/(?P<name>[\w-]+)\.svg\)\n\n)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
GRID = re.compile(r'(?<=^<div class="thumbnails" markdown>\n).*?(?=^</div>$)', re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^### (?P<title>[^\n]+)\n\n[^\n]+\n\n!\[[^\n]*\]\(pictures/(?P<name>[\w-]+)\.svg\)$", re.MULTILINE)


def pictures(page: str) -> dict[str, str]:
    """Returns the SVG of each picture by name."""
    return {name: svg(*made) for name, *made in masks(page)}


def documents(page: str) -> dict[str, dict[str, Any]]:
    """Returns the document of each entry's explorer by name, without the version: docs/_explorers.py adds it."""
    found = {name: document(*made) | dict(longspan="") for name, *made in masks(page)}
    return json.loads(json.dumps(found))


def masks(page: str) -> Iterator[tuple[str, Mask, int, int]]:
    """Yields the name of each picture, its mask and both lengths. The code below a picture defines its `mask`."""
    names: dict[str, Any] = {}
    for block in BLOCK.finditer(page):
        exec(block["code"], names)
        if block["name"]:
            yield block["name"], names["mask"], int(block["queries"]), int(block["keys"])


def svg(mask: Mask, q_len: int, kv_len: int) -> str:
    """Returns the picture of a mask as an SVG file, with its heads side by side."""
    panels = re.findall(r'<svg [^>]*role="img".*?</svg>', mask_html(mask, q_len, kv_len), re.DOTALL)
    sizes = re.search(r'width="(\d+)" height="(\d+)"', panels[0])
    label = re.search(r'aria-label="([^"]*)"', panels[0])
    assert sizes is not None and label is not None
    width, height = int(sizes[1]), int(sizes[2])
    step = width + GAP
    total_width = step * len(panels) - GAP
    inside = "".join(
        f'<g transform="translate({number * step} 0)">{re.sub(r"^<svg [^>]*>|</svg>$", "", panel)}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {height}" '
        f'width="{SCALE * total_width:.0f}" height="{SCALE * height:.0f}" color="{GREY}">'
        f"<title>{label[1]}</title>{inside}</svg>\n"
    )


def thumbnails(page: str) -> str:
    """Returns the grid at the top of the page: one thumbnail per entry, linked to the entry."""
    lines = []
    for entry in ENTRY.finditer(page):
        anchor = re.sub(r"[^\w -]", "", entry["title"].lower()).replace(" ", "-")
        lines.append(f"[![](pictures/{entry['name']}.svg) {entry['title']}](#{anchor})\n")
    return "\n" + "".join(lines) + "\n"


def main() -> None:
    """Writes the pictures, the grid and the documents, and deletes pictures that the page no longer shows."""
    page = (HERE / "gallery.md").read_text("utf-8")
    grid = thumbnails(page)
    (HERE / "gallery.md").write_text(GRID.sub(lambda _: grid, page), "utf-8")
    drawn = pictures(page)
    for old in (HERE / "pictures").glob("*.svg"):
        if old.stem not in drawn:
            old.unlink()
    for name, content in drawn.items():
        (HERE / "pictures" / f"{name}.svg").write_text(content, "utf-8")
    stored = json.dumps(documents(page), separators=(",", ":")).encode()
    (HERE / "explorers.json.gz").write_bytes(gzip.compress(stored, mtime=0))
    print(f"{len(drawn)} pictures and explorers")


if __name__ == "__main__":
    main()

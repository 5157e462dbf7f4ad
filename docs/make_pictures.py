"""Draws the pictures of gallery.md anew: `python docs/make_pictures.py`. A test compares them with the files."""

import re
from pathlib import Path

from longspan import Mask
from longspan.render.notebook import mask_html

HERE = Path(__file__).parent
SHARE = 0.62  # of the size that notebooks show
GAP = 8  # pixels between heads
GREY = "#808080"  # numbers and frames: an image does not know the colour of its page, and this reads on any
BLOCK = re.compile(
    r"(?:^!\[(?P<queries>\d+) queries, (?P<keys>\d+) keys\]\(pictures/(?P<name>[\w-]+)\.svg\)\n\n)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def pictures(page: str) -> dict[str, str]:
    """SVG by name: below each picture of the page is the code that makes its `mask`."""
    found, names = {}, {}
    for block in BLOCK.finditer(page):
        exec(block["code"], names)
        if block["name"]:
            found[block["name"]] = svg(names["mask"], int(block["queries"]), int(block["keys"]))
    return found


def svg(mask: Mask, q_len: int, kv_len: int) -> str:
    """A mask's picture as a file, its heads side by side."""
    panels = re.findall(r'<svg [^>]*role="img".*?</svg>', mask_html(mask, q_len, kv_len), re.DOTALL)
    sizes = re.search(r'width="(\d+)" height="(\d+)"', panels[0])
    label = re.search(r'aria-label="([^"]*)"', panels[0])
    assert sizes is not None and label is not None
    across, down = (int(size) for size in sizes.groups())
    step = across + GAP
    whole = step * len(panels) - GAP
    inside = "".join(
        f'<g transform="translate({number * step} 0)">{re.sub(r"^<svg [^>]*>|</svg>$", "", panel)}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {down}" width="{SHARE * whole:.0f}" '
        f'height="{SHARE * down:.0f}" color="{GREY}"><title>{label[1]}</title>{inside}</svg>\n'
    )


def main() -> None:
    """Writes them all, and removes what the page no longer shows."""
    drawn = pictures((HERE / "gallery.md").read_text("utf-8"))
    for old in (HERE / "pictures").glob("*.svg"):
        if old.stem not in drawn:
            old.unlink()
    for name, content in drawn.items():
        (HERE / "pictures" / f"{name}.svg").write_text(content, "utf-8")
    print(f"{len(drawn)} pictures")


if __name__ == "__main__":
    main()

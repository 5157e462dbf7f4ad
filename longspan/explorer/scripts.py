"""The scripts and the styles of the page, in the order in which they are joined."""

from pathlib import Path

FOLDER = Path(__file__).parent
# Classic scripts that share one scope. A script uses names of those before it when it is loaded.
# The evaluator also runs in a worker and in Node, without a page.
EVALUATOR = (
    "numbers.js", "arrays.js", "terms.js", "rules.js", "program.js", "spans.js", "rows.js", "tiles.js", "products.js",
    "count.js", "plans.js", "difference.js", "explorer.js",
)  # fmt: skip
PAGE = (
    "dom.js", "view.js", "shades.js", "raster.js", "axes.js", "overlays.js", "map.js", "gestures.js", "hash.js",
    "background.js", "costs.js", "sliders.js", "panel_cell.js", "panel_tiles.js", "panel_cache.js", "panel_devices.js",
    "panel_diff.js", "main.js",
)  # fmt: skip

STYLES = ("colours.css", "page.css", "picture.css", "panels.css")


def evaluator() -> str:
    """The scripts that evaluate a document, as one script; `makeExplorer(document)` is their entry."""
    return _joined(EVALUATOR)


def page_scripts() -> str:
    """The scripts that draw the page, as one script. They use names of the evaluator."""
    return _joined(PAGE)


def page_styles() -> str:
    """The styles of the page."""
    return _joined(STYLES)


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((FOLDER / name).read_text("utf-8") for name in names)

"""The scripts of the page, in the order in which they are joined to one script."""

from pathlib import Path

FOLDER = Path(__file__).parent
# Classic scripts that share one scope. A script uses names of those before it when it is loaded.
EVALUATOR = (
    "numbers.js", "arrays.js", "terms.js", "rules.js", "program.js", "spans.js", "tiles.js", "count.js",
    "plans.js", "difference.js", "explorer.js",
)  # fmt: skip


def evaluator() -> str:
    """The scripts that evaluate a document, as one script; `makeExplorer(document)` is their entry."""
    return "\n".join((FOLDER / name).read_text("utf-8") for name in EVALUATOR)

"""`page_html`: the page of the mask explorer, one HTML file that loads nothing else."""

import html
import json
import re
from typing import Any

from longspan.explorer.scripts import FOLDER, evaluator, page_scripts, page_styles

# Characters that would end the script that contains the document, or begin a comment there.
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(document: dict[str, Any]) -> str:
    """The HTML of the page for a document of `document`.

    Example:
        >>> from longspan.explorer.document import document
        >>> page = page_html(document(ls.Causal() & ls.Window(511, 0), 4096))
        >>> page[:15], "<title>Causal() &amp; Window(511, 0)</title>" in page, len(page) < 300_000
        ('<!doctype html>', True, True)
    """
    text, sizes = document["mask"]["text"], document["sizes"]
    size = f"{_counted(document['q_len'], 'query', 'queries')} × {_counted(document['kv_len'], 'key')}"
    parts = dict(
        title=html.escape(text),
        expression=html.escape(text),
        facts=f"Mask explorer · {size} · longspan {html.escape(document['longspan'])}",
        label=html.escape(f"{text}: {size}"),
        sizes=_sizes(sizes),
        notes=_notes(document["notes"]),
        styles=page_styles(),
        evaluator=evaluator(),
        scripts=page_scripts(),
        document=json.dumps(document, ensure_ascii=True, separators=(",", ":")).translate(UNSAFE),
    )
    template = (FOLDER / "page.html").read_text("utf-8")
    return re.sub(r"@([a-z]+)@", lambda found: parts[found[1]], template)


def _notes(notes: list[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes" id="notes">{items}</ul>'


def _sizes(sizes: dict[str, Any]) -> str:
    rows, heads = sizes["batch"], sizes["heads"]
    return (
        f"For {_counted(rows, 'batch row')} and {_counted(heads, 'head')} of {sizes['head_dim']} numbers "
        f"({html.escape(sizes['dtype'])})"
    )


def _counted(number: int, noun: str, plural: str = "") -> str:
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"

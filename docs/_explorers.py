"""Hooks of mkdocs that build a page of the mask explorer for each entry of the gallery, and link it there.

`docs/make_pictures.py` stores the documents of the pages, because the site is built without JAX.
"""

import gzip
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
DOCUMENTS = ROOT / "docs" / "explorers.json.gz"
PICTURE = re.compile(r"^!\[[^\n]*\]\(pictures/(?P<name>[\w-]+)\.svg\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the explorer."""
    from mkdocs.structure.files import File

    for name, content in explorers().items():
        files.append(File.generated(config, f"explorers/{name}.html", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Adds a link to the explorer below each picture of the gallery."""
    return linked(markdown) if page.file.src_uri == "gallery.md" else markdown


def linked(gallery: str) -> str:
    """The gallery with its links."""
    return PICTURE.sub(lambda found: f"{found[0]}\n\n[Explore this mask](explorers/{found['name']}.html)", gallery)


def explorers() -> dict[str, str]:
    """The HTML of each page by name."""
    page_html = _page_html()
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "longspan" / "version.py").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    documents = json.loads(gzip.decompress(DOCUMENTS.read_bytes()))
    return {name: page_html(document | dict(longspan=version[1])) for name, document in documents.items()}


def _page_html() -> Callable[[dict[str, Any]], str]:
    """`longspan.explorer.page.page_html`, imported without the packages around it, which import JAX."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "longspan"]:
            del sys.modules[name]
        for name in ("longspan", "longspan.explorer"):
            package = ModuleType(name)
            package.__path__ = [str(ROOT / name.replace(".", "/"))]
            sys.modules[name] = package
        return importlib.import_module("longspan.explorer.page").page_html

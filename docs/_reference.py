"""Hooks of mkdocs: pages that are made of other files, so that nothing is said twice.

The reference has a page for each section of docs/api.md. Files of the folder above docs/ are shown where a page names
them.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Sections of api.md that are tables, and the modules that they are about.
TABLES = {
    "Flax modules": ("nn.nnx", "nn.linen"),
    "Models and checkpoints": ("models", "hf"),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the reference into the navigation, before the list of public names."""
    pages: list[Any] = [{title: _path(title)} for title in _sections()]
    nav = config["nav"]
    nav.insert(len(nav) - 1, {"Reference": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for title, names in _sections().items():
        content = f"# {title}\n\n" + "\n\n".join(_entry(name) for name in names) + "\n"
        files.append(File.generated(config, _path(title), content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Puts the files that a page names in its place; links to and from the folder above docs/ are mended."""
    markdown = markdown.replace("](../CONTRIBUTING.md", "](extending.md")
    return re.sub(r'^--8<-- "([\w.]+)(?::(\w+))?"$', lambda m: _file(m[1], m[2]), markdown, flags=re.MULTILINE)


def _file(name: str, section: str | None) -> str:
    text = (ROOT / name).read_text("utf-8")
    if section is not None:
        text = text.split(f"[start:{section}] -->\n")[1].split(f"<!-- --8<-- [end:{section}]")[0]
    return text.replace("](docs/", "](")


def _sections() -> dict[str, list[str]]:
    """The names of each section of api.md."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    found = {}
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        names = list(TABLES.get(title, ())) or re.findall(r"^- `([\w.]+)`", body, re.MULTILINE)
        # A module is described by its own section; where it is only pointed to, it has none here.
        names = [name for name in names if title in TABLES or not _is_elsewhere(name)]
        if names:
            found[title] = names
    return found


def _is_elsewhere(name: str) -> bool:
    return name in {module.partition(".")[0] for modules in TABLES.values() for module in modules}


def _entry(name: str) -> str:
    """The directive of a name. Of a module whose names have entries of their own, the docstring is enough."""
    listed = any(other.startswith(f"{name}.") for other in _bullets())
    options = "\n    options:\n      members: false" if listed else ""
    return f"::: longspan.{name}{options}"


def _bullets() -> list[str]:
    return re.findall(r"^- `([\w.]+)`", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)


def _path(title: str) -> str:
    return "reference/" + re.sub(r"\W+", "-", title.lower()).strip("-") + ".md"

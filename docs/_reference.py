"""Hooks of mkdocs that generate pages from other files.

- The reference has one page for each section of docs/api.md.
- Each executed notebook becomes a page with its code, text and pictures.
- `--8<-- "FILE"` in a page inserts a file of the repository's root.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Sections of api.md that are tables, with the modules that they describe.
TABLES = {
    "Flax modules": ("nn.nnx", "nn.linen"),
    "Models and checkpoints": ("models", "hf"),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the reference to the navigation, before the list of public names."""
    pages: list[Any] = [{title: _path(title)} for title in _sections()]
    nav = config["nav"]
    nav.insert(len(nav) - 1, {"Reference": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference and of the notebooks."""
    for title, names in _sections().items():
        content = f"# {title}\n\n" + "\n\n".join(_entry(name) for name in names) + "\n"
        files.append(File.generated(config, _path(title), content=content))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_notebook(path)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Inserts the files that a page names, and redirects links to the pages that this file generates."""
    markdown = markdown.replace("](../CONTRIBUTING.md", "](extending.md")
    markdown = re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    return re.sub(r'^--8<-- "([\w.]+)(?::(\w+))?"$', lambda m: _file(m[1], m[2]), markdown, flags=re.MULTILINE)


def _file(name: str, section: str | None) -> str:
    text = (ROOT / name).read_text("utf-8")
    if section is not None:
        text = text.split(f"[start:{section}] -->\n")[1].split(f"<!-- --8<-- [end:{section}]")[0]
    return text.replace("](docs/", "](")


def _notebook(path: Path) -> str:
    """Returns an executed notebook as Markdown; outputs with HTML, such as pictures, stay HTML."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    blocks = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"```python\n{source}\n```")
        blocks += [_output(output) for output in cell["outputs"]]
    blocks.append(f"[Download this page as a notebook]({path.name}).")
    return "\n\n".join(blocks) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(data.get("text/plain", output.get("text", ""))).rstrip("\n")
    return f"```text\n{text}\n```"


def _sections() -> dict[str, list[str]]:
    """Returns the names that each section of api.md lists."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    found = {}
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        names = list(TABLES.get(title, ())) or re.findall(r"^- `([\w.]+)`", body, re.MULTILINE)
        # A module with a section for its names is described there, not in sections that only mention it.
        names = [name for name in names if title in TABLES or not _has_own_section(name)]
        if names:
            found[title] = names
    return found


def _has_own_section(name: str) -> bool:
    return name in {module.partition(".")[0] for modules in TABLES.values() for module in modules}


def _entry(name: str) -> str:
    """Returns the directive of a name. A module shows only its docstring if api.md lists its names separately."""
    path, options = f"longspan.{name}", {}
    if any(other.startswith(f"{name}.") for other in _bullets()):
        options = {"members": "false"}
    elif name == "MaskInfo":
        options = {"inherited_members": "true"}  # its methods are in several base classes
    elif _is_shadowed(path):
        # griffe would take the module of the same name, as in `longspan.cache.plan`, for the function.
        options = {"heading": path, "separate_signature": "true"}
        path = _definition(path)
    lines = [f"::: {path}"]
    if options:
        lines += ["    options:", *(f"      {key}: {value}" for key, value in options.items())]
    return "\n".join(lines)


def _definition(path: str) -> str:
    """Follows the imports `from module import name as name` of the packages on a path to the definition."""
    package, _, name = path.rpartition(".")
    source = ROOT / package.replace(".", "/") / "__init__.py"
    if not source.exists():
        return path
    found = re.search(rf"^from ([\w.]+) import {name} as {name}$", source.read_text("utf-8"), re.MULTILINE)
    if found is None or found[1] == package:  # `from longspan import cache as cache` imports a module
        return path
    return _definition(f"{found[1]}.{name}")


def _is_shadowed(path: str) -> bool:
    """Whether a module on the way to a function's definition has the name of the function."""
    definition = _definition(path)
    name = path.rpartition(".")[2]
    folders = {path.rpartition(".")[0], definition.rsplit(".", 2)[0]}
    modules = [ROOT / folder.replace(".", "/") / f"{name}.py" for folder in folders]
    return definition != path and any(module.exists() for module in modules)


def _bullets() -> list[str]:
    return re.findall(r"^- `([\w.]+)`", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)


def _path(title: str) -> str:
    return "reference/" + re.sub(r"\W+", "-", title.lower()).strip("-") + ".md"

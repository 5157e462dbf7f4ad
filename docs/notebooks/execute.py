"""Runs the notebooks beside it in this process and writes their outputs: python docs/notebooks/execute.py

No Jupyter is needed for that. A test runs the same cells and compares what they print with what is written.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Executes and rewrites the notebooks that are named, or all."""
    folder = Path(__file__).parent
    for path in map(Path, sys.argv[1:] or sorted(folder.glob("*.ipynb"))):
        notebook = json.loads(path.read_text("utf-8"))
        for number, (cell, outputs) in enumerate(executed(notebook), start=1):
            cell["execution_count"] = number
            cell["outputs"] = [
                output | ({"execution_count": number} if output["output_type"] == "execute_result" else {})
                for output in outputs
            ]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def executed(notebook: dict[str, Any]):
    """Each code cell with the outputs that it has now, in order; names stay from cell to cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, _outputs("".join(cell["source"]), names)


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line, as notebooks show it."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        value = None if last is None else eval(compile(last, "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(dict(name="stdout", output_type="stream", text=printed.getvalue().splitlines(keepends=True)))
    if value is not None:
        outputs.append(dict(data=_shown(value), metadata={}, output_type="execute_result"))
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    shown = {"text/plain": repr(value).splitlines(keepends=True)}
    html = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return shown if html is None else {"text/html": html.splitlines(keepends=True)} | shown


if __name__ == "__main__":
    main()

"""Runs the notebooks of this folder and writes their outputs: `python docs/notebooks/execute.py`.

It needs no Jupyter. A test runs the same cells and compares their output with the output in the files.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Executes and rewrites the notebooks given as arguments, by default all notebooks of this folder."""
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
    """Yields each code cell with its new outputs, in order. All cells share one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, _outputs("".join(cell["source"]), names)


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the printed text of a cell and the value of its last line, in the notebook format."""
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

"""The notebooks under docs/ run from top to bottom and print the outputs stored in them."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.check
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_give_the_stored_outputs(path, execute):
    notebook = json.loads(path.read_text("utf-8"))
    for cell, outputs in execute.executed(notebook):
        assert readable(outputs) == readable(cell["outputs"]), "run docs/notebooks/execute.py"
        assert pictured(outputs) == pictured(cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_executed_and_have_format_4_5(path):
    notebook = json.loads(path.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert path.stat().st_size < 130_000  # 70 kB are the page of an explorer
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])


def test_there_are_two_and_one_shows_pictures():
    assert [path.stem for path in NOTEBOOKS] == ["decoding_and_generation", "masks_and_pictures"]
    assert NOTEBOOKS[1].read_text("utf-8").count("text/html") >= 3


def readable(outputs: list[dict]) -> list[list[str]]:
    return [output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs]


def pictured(outputs: list[dict]) -> list[bool]:
    return ["text/html" in output.get("data", {}) for output in outputs]

"""The Python blocks of the README and the docs run, and print the output shown below them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEED_DEVICES = ("scaling.md",)
# A python block, and the text block right below it, if there is one.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def marked(page):
    """`make test` runs the README and CONTRIBUTING. A page that makes meshes needs eight devices."""
    marks = [] if page.parent == ROOT else [pytest.mark.check]
    return pytest.param(page, id=page.name, marks=marks + [pytest.mark.mesh] * (page.name in NEED_DEVICES))


@pytest.mark.parametrize("page", [marked(p) for p in PAGES if BLOCK.search(p.read_text("utf-8"))])
def test_python_blocks_run_in_order(page, capsys):
    text, names = page.read_text("utf-8"), {"__name__": page.name}
    for block in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback shows the line of the page.
        source = "\n" * (text.count("\n", 0, block.start()) + 1) + block[1]
        exec(compile(source, page, "exec"), names)
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert (block[2] or "").strip("\n") in printed


def test_the_first_example_fits_in_ten_lines():
    first = BLOCK.search((ROOT / "README.md").read_text("utf-8"))
    assert first is not None
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 10


def test_the_readme_shows_a_picture_right_below_the_first_example():
    text = (ROOT / "README.md").read_text("utf-8")
    first = BLOCK.search(text)
    assert first is not None
    picture = re.match(r"\n+!\[.+\]\(([\w/.-]+)\)\n", text[first.end() :])
    assert picture is not None and (ROOT / picture[1]).exists()

"""The site's navigation and the links between its pages have targets. `make docs` builds the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SUBJECTS = ("jax-nn", "flexattention", "splash", "tokamax", "hugging-face", "ejkernel")


def test_the_navigation_names_existing_pages():
    named = re.findall(r"^ +- .+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert len(named) > 15 and len(set(named)) == len(named)
    # docs/_reference.py makes a page of each notebook.
    pages = [re.sub(r"^(notebooks/.+)\.md$", r"\1.ipynb", name) for name in named]
    assert not [page for page in pages if not (ROOT / "docs" / page).exists()]


def test_the_navigation_has_every_notebook():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    assert notebooks and all(f": notebooks/{path.stem}.md\n" in text for path in notebooks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_have_targets(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_pages_for_newcomers_show_a_whole_call_before_and_after(subject):
    text = (ROOT / "docs" / f"coming-from-{subject}.md").read_text("utf-8")
    before = re.search(r"\bbefore:\s+```(?:text|python)\n", text, re.IGNORECASE)
    assert before is not None
    after = text[text.lower().index("\nafter", before.end()) :]
    assert re.search(r"^```python\n.*?\bls\.(attention|generate)\(.*?^```$", after, re.MULTILINE | re.DOTALL)

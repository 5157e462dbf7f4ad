"""The site: the navigation and the links of its pages lead somewhere. `make docs` builds it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SUBJECTS = ("jax-nn", "flexattention", "splash", "tokamax", "hugging-face", "ejkernel")


def test_the_navigation_names_pages_that_are_there():
    named = re.findall(r"^ +- .+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert len(named) > 15 and len(set(named)) == len(named)
    assert not [name for name in named if not (ROOT / "docs" / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
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

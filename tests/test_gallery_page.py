"""docs/gallery.md: its expressions draw its pictures, and its attention-gym masks equal attention-gym's."""

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest

import longspan as ls
from tests.gallery import GALLERY

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "gallery.md").read_text("utf-8")
# What attention-gym has, by the name of its picture; the last ones are drawn at random there, or are another's size.
GYM = {
    "causal": ("causal", dict(length=24)),
    "window": ("sliding window", dict(length=24, window=5)),
    "window-dilated": ("dilated sliding window", dict(length=24, keys=4, dilation=3)),
    "longformer": ("global sliding window", dict(length=24, window=3, tokens=(0, 11))),
    "sinks": ("attention sinks", dict(length=24, window=5, sinks=3)),
    "prefix-lm": ("prefix LM", dict(length=24, prefix=7)),
    "segments": ("document", dict(lengths=(5, 9, 1, 9))),
    "packed-prefix": ("packed documents", dict(lengths=(5, 9, 1, 9), prefix=3)),
    "shared-prefix": ("shared prefix", dict(groups=((8, 6, 4, 6),))),
    "block-diffusion": ("block diffusion", dict(length=16, size=4)),
    "flamingo": ("flamingo", dict(text=24, image=5, intervals=[[0, 9], [3, 9], [9, 18], [15, 24]])),
    "natten": ("natten", dict(height=6, width=6, kernel=3)),
    "sliding-tiles": ("sliding tiles 2d", dict(canvas=(8, 4), kernel=(4, 4), tile=(2, 2), text=4)),
    "sparse-video-gen": ("sparse video gen", dict(prompt=3, frames=4, per_frame=7, width=1)),
    "tree": ("tree", dict(prefix=9, parents=(-1, 0, 1, 1, 3, 3, 0))),
    "draft-training": ("draft training", dict(prefix=8, blocks=3, size=4)),
}
OTHERS = {"chosen blocks", "natten, wide", "sliding tiles 3d"}


@pytest.fixture(scope="module")
def script():
    return loaded("make_pictures")


def loaded(name):
    """A script in docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def masks(script):
    """The mask of each picture, with both lengths."""
    return {name: tuple(made) for name, *made in script.masks(PAGE)}


def test_the_expressions_of_the_page_draw_its_pictures(script):
    drawn = script.pictures(PAGE)
    files = {path.stem: path.read_text("utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert set(files) == set(drawn) == set(re.findall(r"\(pictures/([\w-]+)\.svg\)", PAGE))
    changed = [name for name, content in drawn.items() if files[name] != content]
    assert not changed, f"python docs/make_pictures.py draws {changed} differently"


@pytest.mark.check
def test_the_documents_of_the_explorers_are_current(script):
    stored = json.loads(gzip.decompress((DOCS / "explorers.json.gz").read_bytes()))
    made = script.documents(PAGE)
    assert set(stored) == set(made) == {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    changed = [name for name, content in made.items() if stored[name] != content]
    assert not changed, f"python docs/make_pictures.py makes other documents of {changed}"
    assert (DOCS / "explorers.json.gz").stat().st_size < 100_000


def test_the_site_links_an_explorer_below_every_picture():
    hooks = loaded("_explorers")
    pages = hooks.explorers()
    made = ls.Causal().explore(24).html
    assert pages["causal"] == made and max(len(page.encode()) for page in pages.values()) < 300_000
    links = re.findall(r"^!\[.*\]\(pictures/([\w-]+)\.svg\)\n\n\[Explore this mask\]\(explorers/([\w-]+)\.html\)$",
                       hooks.linked(PAGE), re.MULTILINE)  # fmt: skip
    assert len(links) == len(pages) > 40 and all(picture == page for picture, page in links)
    assert {page for _, page in links} == set(pages)


def test_the_site_is_built_without_jax():
    program = "import sys; sys.modules['jax'] = sys.modules['numpy'] = None; import _explorers; _explorers.explorers()"
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(DOCS)!r}); {program}"], check=True
    )


def test_the_page_opens_with_a_thumbnail_of_every_entry(script):
    (grid,) = script.GRID.findall(PAGE)
    assert grid == script.thumbnails(PAGE), "run docs/make_pictures.py"
    assert PAGE.index(grid) < PAGE.index("\n## ")
    assert grid.count("](#") == PAGE.split("## Scores")[0].count("\n### ")


def test_pictures_are_small_and_read_by_parsers():
    for path in (DOCS / "pictures").glob("*.svg"):
        assert path.stat().st_size < 30_000
        root = xml.dom.minidom.parse(str(path)).documentElement
        assert root is not None and root.getElementsByTagName("title")


def test_every_mask_has_its_entry():
    leaves = [name for name, value in vars(ls).items() if isinstance(value, type) and issubclass(value, ls.Mask)]
    missing = [name for name in leaves if name != "Mask" and not re.search(rf"^### {name}\b", PAGE, re.MULTILINE)]
    assert not missing
    assert {"PerHead", "Custom", "Band"} <= set(leaves)


def test_every_entry_is_a_sentence_a_picture_and_an_expression():
    for entry in re.split(r"^### ", PAGE.split("## Scores")[0], flags=re.MULTILINE)[1:]:
        assert re.match(r".+\n\n[^\n]+\.\n\n!\[[^\n]+\)\n\n```python\n.*?mask = .*?```\n+", entry, re.DOTALL), entry


@pytest.mark.check
@pytest.mark.parametrize("name", GYM)
def test_those_of_attention_gym_mean_what_plain_loops_say(name, masks):
    exhibit, sizes = GYM[name]
    mask, q_len, kv_len = masks[name]
    made = GALLERY[exhibit].build(**sizes)
    assert (q_len, kv_len) == (made.q_len, made.kv_len)
    expected = np.zeros((1, made.mask.heads, q_len, kv_len), bool)
    for place in np.ndindex(*expected.shape):
        expected[place] = made.truth(*place[1:])
    np.testing.assert_array_equal(mask.dense(q_len, kv_len), expected)


def test_none_of_attention_gym_is_left_out():
    assert {exhibit for exhibit, _ in GYM.values()} | OTHERS == set(GALLERY)

"""`mask.explore`: a file or an object for notebooks, and the errors for wrong arguments."""

import base64
import gzip
import html
import json
import re
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.explorer.document import document
from longspan.explorer.explore import MaskExplorer
from tests.explorer.browser import CHROMIUM, Browser, Tab

MASK = ls.Causal() & ls.Window(3, 0)
LARGEST_PAGE = 300_000  # bytes, without the mask's arrays


def document_of(page):
    """The document in a page."""
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def test_with_a_path_the_page_is_written_whole_and_the_path_returned(tmp_path):
    path = tmp_path / "mask.html"
    path.write_text("the page before")
    path.chmod(0o640)
    assert MASK.explore(16, 9, path=str(path)) == path
    page = path.read_text("utf-8")
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert document_of(page) == json.loads(json.dumps(document(MASK, 16, 9)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [found.name for found in tmp_path.iterdir()] == ["mask.html"]


def test_a_page_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "mask.html"
    path.write_text("the page before")
    monkeypatch.setattr("longspan.explorer.explore.page_html", lambda found: "\ud800")  # is not UTF-8
    with pytest.raises(UnicodeEncodeError):
        MASK.explore(16, path=path)
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("mask.html", "the page before")]


def test_a_path_that_cannot_be_written_is_an_error_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr("longspan.explorer.explore.document", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(FileNotFoundError, match=r"missing is not a directory, so a\.html cannot be written there"):
        MASK.explore(16, path=tmp_path / "missing" / "a.html")
    with pytest.raises(IsADirectoryError, match=r"is a directory. Name a file"):
        MASK.explore(16, path=tmp_path)


def test_without_a_path_a_notebook_shows_the_page_in_a_frame_of_its_own():
    shown = MASK.explore(16, other=ls.Causal(), tokens=[f"</script>'\"&{i}" for i in range(16)])
    assert isinstance(shown, MaskExplorer)
    assert repr(shown) == "<MaskExplorer of Causal() & Window(3, 0): 16 queries x 16 keys>"
    frame = re.fullmatch(
        r'<iframe title="([^"]*)" sandbox="([^"]*)" [^<>]*srcdoc="([^"]*)"></iframe>', shown._repr_html_()
    )
    assert html.unescape(frame[1]) == repr(shown)
    assert frame[2] == "allow-scripts", "with the notebook's origin, the page could read the notebook"
    packed = re.search(r'atob\("([\w+/=]+)"\)', html.unescape(frame[3]))
    assert gzip.decompress(base64.b64decode(packed[1])).decode() == shown.html
    assert document_of(shown.html)["tokens"]["q"][3] == "</script>'\"&3"


@pytest.mark.check
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_frame_of_a_notebook_unpacks_the_page(tmp_path):
    text = MASK.explore(16)._repr_html_().replace("allow-scripts", "allow-scripts allow-same-origin")
    path, browser = tmp_path / "notebook.html", Browser(tmp_path / "profile")
    try:
        tab = Tab(browser)
        path.write_text(f"<!doctype html><html data-ready='true'>{text}", "utf-8")
        tab.open(path.as_uri())
        tab.wait("frames[0].document.documentElement?.dataset.ready === 'true'")
        assert tab.run("frames[0].longspan.count()") == 58
        assert not [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    finally:
        browser.close()


def test_the_page_is_small_and_names_no_other_file():
    page = MASK.explore(1 << 20).html
    assert len(page.encode()) < LARGEST_PAGE
    assert not re.search(r'\b(?:src|href)\s*=\s*"(?!data:|#)', page)
    assert not re.search(r"@import|url\((?!data:|#)|\bfetch\(|XMLHttpRequest|importScripts", page)


def test_a_head_and_a_row_are_selected():
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    mask = ls.PerHead((ls.Causal(), ls.Segments(ids)))
    found = document(mask, 4, batch=1, head=1)
    assert (found["batch"], found["rows"], found["head"], found["heads"]) == (1, 2, 1, 2)
    assert found["notes"] == [
        "This page shows head 1 of 2, counted from 0. The cache and the devices are those of all heads.",
        "This page shows batch row 1 of 2, counted from 0.",
    ]
    assert document(ls.Causal(), 4, batch=5, head=7)["head"] == 0, "all rows and heads are alike"


def test_tokens_of_both_sides():
    assert document(MASK, 2, tokens=["a", "b"])["tokens"] == dict(q=["a", "b"], kv=["a", "b"])
    assert document(MASK, 1, 2, tokens=(["a"], ("b", "c")))["tokens"] == dict(q=["a"], kv=["b", "c"])
    assert document(MASK, 0, tokens=[])["tokens"] == dict(q=[], kv=[])


ROWS = ls.Segments(np.zeros((2, 4), int))
WRONG = {
    "other": (dict(other="Causal()"), TypeError, "`other` must be a Mask, got str"),
    "info": (
        dict(other=ls.MaskInfo.from_segments(np.zeros((1, 4), np.int32))),
        TypeError,
        r"For a MaskInfo, pass `info\.mask`",
    ),
    "queries": (dict(q_len=5), ValueError, "Segments.q_ids covers 4 queries, but the call has 5"),
    "negative": (dict(q_len=-1), ValueError, "q_len must be >= 0"),
    "float": (dict(q_len=4.0), TypeError, "q_len must be a Python int"),
    "other's keys": (dict(other=ls.Segments(np.zeros((1, 3), int))), ValueError, "covers 3"),
    "other's rows": (dict(other=ls.Segments(np.zeros((3, 4), int))), ValueError, "has 3 batch rows, but"),
    "batch": (dict(batch=2), IndexError, "batch=2 is out of range: the mask has 2 batch rows, 0 to 1"),
    "negative batch": (dict(batch=-1), ValueError, "`batch` must be a Python int >= 0, got -1"),
    "head": (
        dict(other=ls.PerHead((ls.Causal(), ls.Full())), head=2),
        IndexError,
        "head=2 is out of range: the mask has 2 heads, 0 to 1",
    ),
    "text": (dict(tokens="abcd"), TypeError, "`tokens` must be a list of strings, or a pair of such lists"),
    "ints": (dict(tokens=[1, 2, 3, 4]), TypeError, "must be a list of strings.* got int at index 0 of the queries"),
    "no text": (dict(tokens=("abcd", ["a"] * 3 + [None])), TypeError, "`tokens` must be a list of strings"),
    "None": (dict(tokens=(["a"] * 4, ["a"] * 3 + [None])), TypeError, "got NoneType at index 3 of the keys"),
    "few tokens": (dict(tokens=["a"]), ValueError, "`tokens` must have one string for each of the 4 queries, got 1"),
    "few keys": (dict(tokens=(["a"] * 4, ["a"])), ValueError, "one string for each of the 4 keys, got 1"),
    "positions": (dict(q_positions=np.arange(5)), ValueError, "q_positions"),
    "rows of positions": (dict(kv_positions=np.zeros((3, 4), int)), ValueError, "kv_positions"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_errors_that_say_what_to_do(name, tmp_path):
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        ROWS.explore(**(dict(q_len=4, path=tmp_path / "a.html") | options))
    assert list(tmp_path.iterdir()) == []


def test_a_mask_without_values_is_an_error():
    def explored(ids):
        ls.Segments(ids).explore(4)
        return ids

    with pytest.raises(ValueError, match=r"needs the values of the arrays in Segments.*Call it outside of `jit`"):
        jax.jit(explored)(jnp.zeros((1, 4), int))

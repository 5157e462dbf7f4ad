"""The page's address and `window.longspan`: states, scripts, and what is wrong with others."""

import numpy as np
import pytest

import longspan as ls
from longspan.explorer.document import document
from tests.explorer import example
from tests.explorer.browser import CHROMIUM, is_shown, state, text

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
T = 96
MASK, _ = example.mask_of()


NARROWER = ls.Causal() & (ls.Window(4, 0) | ls.Global((0, 5), rows=False)) & ls.Segments(example.ids())


def error_of(tab, call):
    """The error that a call raises in the page."""
    return tab.run(f"(() => {{ try {{ {call} }} catch (error) {{ return String(error); }} }})()")


def test_the_address_stores_the_state(tab, url):
    address = "#q=20&k=14&zoom=4&tile=64,32&t=70&devices=2&order=zigzag&panel=cache&set.0=9"
    tab.open(url + address)
    shown = state(tab)
    assert {name: shown[name] for name in ("q", "k", "t", "devices", "order", "panel", "set.0", "tile")} == dict(
        q=20, k=14, t=70, devices=2, order="zigzag", panel="cache", tile=[64, 32], **{"set.0": 9}
    )
    assert shown["zoom"] == 4 and not is_shown(tab, "problem")
    tab.wait(f"location.hash === {address!r}")
    tab.run("location.hash = '#panel=tiles'")
    tab.wait("longspan.state.panel === 'tiles'")
    assert state(tab)["q"] is None and state(tab)["set.0"] == 7


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("q=96&k=3", "q must be an integer from 0 to 95, got 96."),
        ("q=5", "q and k must be given together."),
        ("zoom=0", "zoom must be a number from 1, got 0."),
        ("tile=128", "tile must be two numbers, as in 128,128, got 128."),
        ("tile=8,x", "tile must be an integer from 1 to 1073741823, got x."),
        ("tile=0,0", "tile must be an integer from 1 to 1073741823, got 0."),
        ("tile=8,", "tile must be an integer from 1 to 1073741823, got nothing."),
        ("zoom=NaN", "zoom must be a number from 1, got NaN."),
        ("zoom=0x10", "zoom must be a number from 1, got 0x10."),
        ("q=1&q=2&k=3", "q must be given once."),
        ("set.0=5&set.0=6", "set.0 must be given once."),
        ("set=5", '"set" is not one of q, k, zoom, tile, t, devices, order, panel, set.0, set.1, and so on.'),
        ("order=foo", "order must be one of contiguous, zigzag, got foo."),
        ("q=%4eaN&k=0", "q must be an integer from 0 to 95, got NaN."),
        (
            "__proto__=1",
            '"__proto__" is not one of q, k, zoom, tile, t, devices, order, panel, set.0, set.1, and so on.',
        ),
        ("t=1e9", "t must be an integer from 0 to 95, got 1e9."),
        ("devices=3", "devices must be one of 2, 4, 8, 16, got 3."),
        ("panel=cells", "panel must be one of cell, tiles, cache, devices, diff, got cells."),
        ("set.9=1", "The index after set. must be an integer from 0 to 3, got 9."),
        ("set.0=-1", "set.0 must be an integer from 0 to 1073741823, got -1."),
        (
            "constructor=1",
            '"constructor" is not one of q, k, zoom, tile, t, devices, order, panel, set.0, set.1, and so on.',
        ),
        ("<b>=1", '"<b>" is not one of q, k, zoom, tile, t, devices, order, panel, set.0, set.1, and so on.'),
    ],
)
def test_a_bad_address_gives_defaults_and_says_so(tab, url, address, message):
    tab.open(f"{url}#{address}")
    assert text(tab, "problem") == f"The address is not valid: {message} The page shows its defaults."
    shown = state(tab)
    assert (shown["q"], shown["zoom"], shown["panel"], shown["set.0"]) == (None, 1, "cell", 7)


def test_set_raises_errors(tab, url):
    tab.open(url)
    message = tab.run("(() => { try { longspan.set({panel: 'x'}); } catch (error) { return String(error); } })()")
    assert message == "RangeError: panel must be one of cell, tiles, cache, devices, diff, got x."
    tab.run("longspan.set({q: 9, k: 2, set: {0: 4}, tile: [8, 8]})")
    assert (state(tab)["q"], state(tab)["set.0"], state(tab)["tile"]) == (9, 4, [8, 8])
    pairs = int(np.asarray(NARROWER.dense(T, T)).sum())
    assert tab.run("[longspan.allowed(9, 2), longspan.why(9, 5).allowed, longspan.count()]") == [False, True, pairs]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("longspan.set(null)", "RangeError: set takes an object, for example {q: 5, k: 3}."),
        ("longspan.set(5)", "RangeError: set takes an object, for example {q: 5, k: 3}."),
        ("longspan.set({zoom: NaN})", "RangeError: zoom must be a number from 1, got NaN."),
        ("longspan.set({tile: null})", "RangeError: tile must be two numbers, as in 128,128, got null."),
        (
            "longspan.set({set: [1, 2, 3, 4, 5]})",
            "RangeError: The index after set. must be an integer from 0 to 3, got 4.",
        ),
        ("longspan.set({panel: 'diff', q: 1e99, k: 0})", "RangeError: q must be an integer from 0 to 95, got 1e+99."),
        ("longspan.allowed('1', 2)", 'RangeError: q must be an integer from 0 to 95, got "1".'),
        ("longspan.why(1)", "RangeError: k must be an integer from 0 to 95, got undefined."),
        ("longspan.tiles(0, 8)", "RangeError: q_tile must be an integer from 1 to 1073741823, got 0."),
        ("longspan.cache(96)", "RangeError: t must be an integer from 0 to 95, got 96."),
        ("longspan.diff(0, -2)", "RangeError: k must be an integer from -1 to 95, got -2."),
    ],
)
def test_questions_that_have_no_answer_raise_errors_and_change_nothing(tab, url, call, message):
    tab.open(url)
    before = state(tab)
    assert error_of(tab, call) == message
    assert state(tab) == before


def test_a_state_can_be_set_again(tab, url):
    tab.open(f"{url}#q=20&k=14&zoom=4&tile=64,32&t=70&devices=2&order=zigzag&panel=cache&set.0=9")
    before = state(tab)
    tab.run("window.before = longspan.state; longspan.set({panel: 'tiles', q: null, k: null, zoom: 1, set: [7]})")
    assert state(tab)["panel"] == "tiles"
    tab.run("longspan.set(window.before)")
    tab.drawn()
    assert state(tab) == before


def test_the_functions_for_scripts_answer_as_python(tab, url):
    tab.open(url)
    dense = np.asarray(MASK.dense(T, T))[0, 0]
    assert tab.run("longspan.allowed(30, 28)") is bool(dense[30, 28])
    assert tab.run("longspan.count()") == dense.sum()
    assert tab.run("longspan.devices(4, 'zigzag').sent_rows") == ls.parallel.plan(MASK, T, 4, "zigzag").sent_rows
    assert tab.run("longspan.cache(95).slots") == ls.cache.plan(MASK, T).capacity
    assert tab.run("longspan.diff().pair") == dict(q=8, k=0, allowed_by="first")
    assert tab.run("longspan.tiles(16).q_tile + longspan.tiles(16).kv_tile") == 32


def test_numbers_that_javascript_cannot_hold_keep_their_text(tab, save):
    mask = ls.Causal(10**30) & ls.Window(5, 0)
    tab.open(save(document(mask, 16), "huge"))
    assert text(tab, "expression") == repr(mask)
    tab.run("longspan.set({'set.1': 3, q: 4, k: 4})")
    assert text(tab, "expression") == repr(ls.Causal(10**30) & ls.Window(3, 0))
    assert f"Causal({10**30})" in text(tab, "cell-tree")

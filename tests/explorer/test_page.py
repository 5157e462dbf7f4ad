"""The page in a browser: headless Chromium opens it, and the tests use it as people do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import longspan as ls
from longspan.explorer.document import document
from longspan.layout import PARTIAL
from longspan.render.grid import grid_of
from longspan.testing import masks
from tests.explorer import example
from tests.explorer.browser import CHROMIUM, PANELS, TROUBLE, Tab, is_shown, state, text

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
T = 96
MASK, OTHER = example.mask_of()
DENSE = np.asarray(MASK.dense(T, T))[0, 0]
MILLION = 1 << 20


def narrower(left):
    """The example's mask with another window."""
    return ls.Causal() & (ls.Window(left, 0) | ls.Global((0, 5), rows=False)) & ls.Segments(example.ids())


def place(tab, q, k):
    return tab.run(f"longspan.place({q}, {k})")


def set_input(tab, name, value, event="input"):
    tab.run(
        f"(() => {{ const it = document.getElementById({name!r}); it.value = {value!r};"
        f" it.dispatchEvent(new Event({event!r}, {{bubbles: true}})); }})()"
    )
    tab.drawn()


def drawn_cells(tab, q_len, kv_len):
    """The colour in the middle of each cell that the canvas shows, [q_len, kv_len, rgba]."""
    pixels = tab.run(f"""(() => {{
      const canvas = document.getElementById("mask-canvas");
      const box = canvas.getBoundingClientRect();
      const [wide, high] = [canvas.width / box.width, canvas.height / box.height];
      const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const found = [];
      for (let q = 0; q < {q_len}; q++) for (let k = 0; k < {kv_len}; k++) {{
        const [x, y] = longspan.place(q, k);
        const at = (Math.floor((y - box.top) * high) * canvas.width + Math.floor((x - box.left) * wide)) * 4;
        found.push(...data.slice(at, at + 4));
      }}
      return found;
    }})()""")
    return np.array(pixels).reshape(q_len, kv_len, 4)


def test_the_page_is_drawn_without_errors_and_requests_nothing_else(browser, tab, url):
    browser.events.clear()
    tab.open(url)
    for panel in PANELS:
        tab.run(f"longspan.set({{panel: {panel!r}}})")
        tab.drawn()
    assert not [event for event in browser.events if event["method"] in TROUBLE]
    requests = {e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"}
    assert requests == {url}
    assert text(tab, "expression") == repr(MASK)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_canvas_shows_every_pair(tab, url, scheme):
    tab.prefer(scheme)
    tab.open(url)
    blue = {"light": [37, 99, 235, 255], "dark": [91, 150, 247, 255]}[scheme]
    np.testing.assert_array_equal((drawn_cells(tab, T, T) == blue).all(axis=-1), DENSE)
    tab.prefer("light")


@pytest.mark.check
@settings(max_examples=12)
@given(mask=masks(29, 41, batch=2, heads=2))
def test_random_masks_are_drawn_as_they_are(browser, tab, save, mask):
    found = document(mask, 29, 41, batch=mask.batch - 1, head=mask.heads - 1, other=ls.Causal())
    tab.open(save(found, "random") + "#panel=devices")
    for panel in PANELS:
        tab.run(f"longspan.set({{panel: {panel!r}, q: 5, k: 7}})")
    tab.run("longspan.set({panel: 'cell', q: null, k: null})")
    tab.drawn()
    dense = np.asarray(mask.dense(29, 41))[-1, -1]
    np.testing.assert_array_equal((drawn_cells(tab, 29, 41) == [37, 99, 235, 255]).all(axis=-1), dense)
    assert not [event for event in browser.events if event["method"] in TROUBLE]


def test_a_page_of_a_million_tokens_zooms_to_single_cells(tab, save):
    mask = ls.Causal() & (ls.Window(4095, 0) | ls.Prefix(4))
    url = save(document(mask, MILLION), "million")
    q, k = 700_001, 700_001 - 4095
    tab.open(url)
    assert state(tab)["zoom"] == 1
    x, y = place(tab, q, k)
    for _ in range(12):
        tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
        tab.drawn()
    assert state(tab)["zoom"] > 1000
    tab.open(f"{url}#q={q}&k={k}&zoom=40000")
    assert state(tab)["shown"]["allowed"] is True
    around = tab.run(f"""[[-1, 0], [0, 0], [0, -1], [1, 0], [1, 1]].map(([dq, dk]) => {{
      const canvas = document.getElementById("mask-canvas");
      const box = canvas.getBoundingClientRect();
      const [x, y] = longspan.place({q} + dq, {k} + dk);
      return canvas.getContext("2d").getImageData(x - box.left, y - box.top, 1, 1).data[2] > 100;
    }})""")
    assert around == [True, True, False, False, True]


def test_dragging_moves_the_picture(tab, url):
    tab.open(f"{url}#q=48&k=48&zoom=4")
    x, y = place(tab, 48, 48)
    tab.mouse("mousePressed", x, y, button="left", clickCount=1)
    for step in range(1, 6):
        tab.mouse("mouseMoved", x - 12 * step, y - 7 * step, button="left", buttons=1)
    tab.mouse("mouseReleased", x - 60, y - 35, button="left", clickCount=1)
    tab.drawn()
    np.testing.assert_allclose(place(tab, 48, 48), [x - 60, y - 35], atol=1)
    assert state(tab)["q"] == 48, "a drag selects no cell"


def test_two_fingers_zoom(tab, url):
    tab.open(url)
    x, y = place(tab, 48, 48)
    for spread in (40, 60, 80):
        points = [dict(x=x - spread, y=y, id=0), dict(x=x + spread, y=y, id=1)]
        tab.send("Input.dispatchTouchEvent", type="touchStart" if spread == 40 else "touchMove", touchPoints=points)
    tab.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.drawn()
    assert 1.9 < state(tab)["zoom"] < 2.1
    np.testing.assert_allclose(place(tab, 48, 48), [x, y], atol=2)


def test_the_cell_panel_says_why(tab, url):
    tab.open(url)
    tab.mouse("mouseMoved", *place(tab, 30, 28))
    tab.drawn()
    assert text(tab, "cell-answer").split("\n")[-1] == "Query 30 may attend to key 28."
    assert state(tab)["shown"]["allowed"] is True and state(tab)["q"] is None
    tab.click(*place(tab, 30, 19))
    tab.mouse("mouseMoved", 2, 2)
    tab.drawn()
    shown = state(tab)["shown"]
    assert (shown["q"]["slot"], shown["k"]["slot"], shown["allowed"]) == (30, 19, False)
    assert (shown["q"]["document"], shown["k"]["document"], shown["q"]["token"]) == (1, 0, "t30")
    marks = re.findall(r"([✓✗])\s*(.+)", text(tab, "cell-tree"))
    assert marks[:6] == [
        ("✗", "all of these"), ("✓", "Causal()"), ("✗", "any of these"), ("✗", "Window(7, 0)"),
        ("✗", "Global((0, 5), rows=False)"), ("✗", "Segments(i32[1,96])"),
    ]  # fmt: skip
    assert tab.run("location.hash") in ("", "#q=30&k=19")
    tab.wait("location.hash === '#q=30&k=19'")


def test_keys_move_the_cell_zoom_and_clear(tab, url):
    tab.open(f"{url}#q=40&k=38")
    tab.run("document.getElementById('mask-canvas').focus()")
    tab.press("ArrowDown")
    tab.press("ArrowLeft")
    assert (state(tab)["q"], state(tab)["k"]) == (41, 37)
    spoken = text(tab, "announcement")
    assert spoken.startswith("Query 41 may attend to key 37. Causal(): allowed; Window(7, 0): allowed; Global")
    for key, zoom in (("+", 2), ("+", 4), ("-", 2)):
        tab.press(key, key)
        tab.drawn()
        assert state(tab)["zoom"] == zoom
    tab.press("Escape")
    assert state(tab)["q"] is None
    assert tab.run("document.activeElement.id") == "mask-canvas"


def test_tabs_are_reached_by_keys(tab, url):
    tab.open(url)
    tab.run("document.getElementById('tab-cell').focus()")
    tab.press("ArrowRight")
    assert tab.run("document.activeElement.id") == "tab-tiles"
    assert [is_shown(tab, f"panel-{name}") for name in PANELS] == [False, True, False, False, False]
    assert tab.run("document.getElementById('tab-tiles').getAttribute('aria-selected')") == "true"


def test_controls_have_names_for_screen_readers(tab, url):
    tab.open(url)
    for panel in PANELS:
        tab.run(f"longspan.set({{panel: {panel!r}}})")
        nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
        named = [
            (node["role"]["value"], node["name"]["value"])
            for node in nodes
            if not node["ignored"]
            and node["role"]["value"] in ("button", "slider", "spinbutton", "tab", "tabpanel", "radio", "application")
        ]
        assert len(named) > 15
        assert all(name for _, name in named), named
        assert ("slider", "Window left") in named


def test_sliders_change_the_picture_and_the_expression(tab, url):
    tab.open(url)
    set_input(tab, "slider-0", 3)
    changed = narrower(3)
    assert text(tab, "expression") == repr(changed) == state(tab)["expression"]
    shown = (drawn_cells(tab, T, T)[..., :3] == [37, 99, 235]).all(axis=-1)
    np.testing.assert_array_equal(shown, np.asarray(changed.dense(T, T))[0, 0])
    tab.wait("location.hash === '#set.0=3'")
    set_input(tab, "number-3", 50)
    assert "Global((0, 50), rows=False)" in text(tab, "expression")
    set_input(tab, "number-0", -1)
    assert tab.run("document.getElementById('number-0').getAttribute('aria-invalid')") == "true"
    assert state(tab)["set.0"] == 3, "a window cannot be negative"
    tab.run("document.getElementById('reset').click()")
    assert text(tab, "expression") == repr(MASK)
    box = tab.run("document.getElementById('copy').getBoundingClientRect().toJSON()")
    tab.click(box["x"] + 5, box["y"] + 5)  # browsers copy only after a person's click
    tab.wait("document.getElementById('copy').textContent === 'Copied'")


@pytest.mark.parametrize(("q_tile", "kv_tile"), [(16, 8), (7, 13), (128, 128)])
def test_tiles_cost_what_explain_prints(tab, url, q_tile, kv_tile):
    x = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)
    report = ls.explain(x, x, x, mask=MASK.layout(T, T, q_tile=q_tile, kv_tile=kv_tile))
    tab.open(f"{url}#panel=tiles&tile={q_tile},{kv_tile}")
    shown = state(tab)["shown"]
    assert (shown["empty"], shown["partial"], shown["full"]) == (
        report.tiles_empty, report.tiles_partial, report.tiles_full,
    )  # fmt: skip
    for name in ("useful_flops", "executed_flops", "array_bytes", "dense_mask_bytes"):
        assert shown[name] == getattr(report, name), name
    assert shown["pairs"] == DENSE.sum()
    printed = dict(line.split("  ", 1) for line in str(report).splitlines() if line[0] != " ")
    table = dict(row.split("\t") for row in text(tab, "tiles-facts").splitlines())
    for name in ("executed FLOPs", "inputs and outputs", "dense mask (not allocated)"):
        assert table[name] == printed[name].strip(), name
    assert tab.run(f"JSON.stringify(longspan.tiles({q_tile}, {kv_tile}).partial)") == str(report.tiles_partial)


def test_partial_tiles_are_marked_in_the_picture(tab, url):
    size = 16
    tab.open(f"{url}#panel=tiles&tile={size},{size}")
    kinds = grid_of(MASK, T, T, size, size).kinds
    assert np.count_nonzero(kinds == PARTIAL) == 11
    shown = drawn_cells(tab, T, T)[:, :, :3].astype(int)
    washed = (shown[..., 0] - shown[..., 2] > 30) & ~DENSE  # orange over white
    for row, column in np.ndindex(T // size, T // size):
        tile = np.s_[size * row + 2 : size * row + size - 2, size * column + 2 : size * column + size - 2]
        not_allowed = ~DENSE[tile]
        assert (washed[tile][not_allowed] == (kinds[row, column] == PARTIAL)).all(), (row, column)


def test_sliders_set_the_tiles(tab, url):
    tab.open(f"{url}#panel=tiles")
    set_input(tab, "q-tile", 4)
    set_input(tab, "kv-tile-number", 12, "change")
    assert state(tab)["tile"] == [16, 12] and state(tab)["shown"]["q_tile"] == 16
    tab.wait("location.hash === '#tile=16,12&panel=tiles'")


def test_long_counts_run_in_the_background(tab, save):
    mask = ls.Causal() & ls.Window(511, 0)
    tab.open(save(document(mask, MILLION), "counted") + "#panel=tiles")
    tab.wait("longspan.state.shown.pending === false")
    assert state(tab)["shown"]["pairs"] == MILLION * 512 - 512 * 511 // 2
    assert state(tab)["shown"]["partial"] == 8192 + 8188


def test_without_workers_the_page_itself_counts(browser, save):
    tab = Tab(browser)
    tab.send("Page.addScriptToEvaluateOnNewDocument", source="window.Worker = class { constructor() { throw 0; } };")
    tab.open(save(document(ls.Causal(), 8192), "alone") + "#panel=tiles")
    tab.wait("longspan.state.shown.pending === false")
    assert state(tab)["shown"]["pairs"] == 8192 * 8193 // 2


def test_sampled_steps_are_named(tab, save):
    found = example.made()
    found["cache"] |= dict(runs=None, steps=[0, 40, 95], kept=[[0, 1], [0, 1, 33, 41], [0, 1, 88, 96]])
    tab.open(save(found, "sampled") + "#panel=cache&t=60")
    assert text(tab, "cache-sampled") == "The page has samples of the steps; this is step 40."
    assert state(tab)["shown"]["kept"] == [[0, 1], [33, 41]]


def test_the_cache_panel_shows_the_plan_of_a_step(tab, url):
    plan = ls.cache.plan(MASK, T)
    tab.open(f"{url}#panel=cache&t=60")
    shown = state(tab)["shown"]
    title, _, row = plan.show(60, max_cells=T).splitlines()[:3]
    kept = [key for start, stop in shown["kept"] for key in range(start, stop)]
    assert kept == [key for key, sign in enumerate(row) if sign == "#"]
    assert f"{shown['kept_count']} kept, {shown['evicted_count']} evicted; {shown['slots']} slots" in title
    assert "10 of 61: 0, 5, 53 to 60" in text(tab, "cache-facts")
    set_input(tab, "cache-step", 3)
    assert state(tab)["t"] == 3 and state(tab)["shown"]["kept"] == [[0, 4]]
    assert not is_shown(tab, "cache-note")
    set_input(tab, "slider-0", 5)
    assert state(tab)["shown"]["stale"] is True
    assert "Python computed this for the original numbers" in text(tab, "cache-note")
    assert tab.run("getComputedStyle(document.getElementById('cache-facts')).opacity") == "0.55"


def test_the_devices_panel_shows_who_holds_and_receives_what(tab, url):
    plan = ls.parallel.plan(MASK, T, 4, "zigzag")
    tab.open(f"{url}#panel=devices&devices=4&order=zigzag")
    assert state(tab)["shown"]["sent_rows"] == plan.sent_rows
    devices = tab.run("[...document.querySelectorAll('.device')].map((it) => it.innerText)")
    assert len(devices) == 4
    assert "holds 0 to 11, 84 to 95" in devices[0]
    tab.run("document.querySelectorAll('.device')[1].click()")
    assert tab.run("document.querySelectorAll('.device')[1].getAttribute('aria-pressed')") == "true"
    tab.run("document.getElementById('device-count-16').click()")
    tab.run("document.getElementById('device-order-contiguous').click()")
    assert (state(tab)["devices"], state(tab)["order"], len(state(tab)["shown"]["devices"])) == (16, "contiguous", 16)


def test_next_difference_visits_every_difference(tab, url):
    differing = np.argwhere(np.asarray(OTHER.dense(T, T))[0, 0] != DENSE).tolist()
    tab.open(f"{url}#panel=diff")
    assert state(tab)["shown"]["pair"] == dict(q=differing[0][0], k=differing[0][1], allowed_by="first")
    visited = []
    for _ in range(len(differing) + 1):
        tab.run("document.getElementById('next-difference').click()")
        visited.append([state(tab)["q"], state(tab)["k"]])
    assert visited == [*differing, differing[0]]
    assert text(tab, "readout") == "Query 8, key 0: only the first mask allows it."
    tab.run("longspan.set({q: 8, k: 8})")
    assert text(tab, "readout") == "Query 8, key 8: both masks allow it."
    tab.run("longspan.set({zoom: 1, q: null, k: null})")
    tab.drawn()
    colours = drawn_cells(tab, T, T)[..., :3]
    for q, k in differing:
        assert colours[q, k].tolist() == [37, 99, 235]
    both = np.asarray(OTHER.dense(T, T))[0, 0] & DENSE
    assert (colours[both] == [170, 179, 191]).all()


def test_a_page_with_one_mask_says_how_to_compare(tab, save):
    tab.open(save(document(ls.PerHead((ls.Causal(), ls.Window(3, 0))), 40, head=1), "heads") + "#panel=diff")
    assert "other=other_mask" in text(tab, "diff-none") and not is_shown(tab, "next-difference")
    assert "This page shows head 1 of 2" in text(tab, "notes")


def test_text_from_the_user_is_escaped(browser, tab, save):
    hostile = ["</script><script>alert(1)</script>", "<!--<script>", "<b>\"'&", "\u2028\u2029", "a\0b", "@title@"]
    tokens = hostile + ["x"] * (40 - len(hostile))

    def rule(q, k):
        return k <= q

    rule.__name__ = "</title></script><i id=injected>"
    browser.events.clear()
    found = document(ls.Custom(rule) & ls.Causal(), 40, tokens=tokens)
    tab.open(save(found, "hostile") + "#q=3&k=0&zoom=4")
    assert tab.run("document.getElementById('injected')") is None
    assert text(tab, "expression") == found["mask"]["text"] == tab.run("document.title")
    shown = state(tab)["shown"]
    assert (shown["q"]["token"], shown["k"]["token"]) == (hostile[3], hostile[0])
    assert hostile[0] in text(tab, "cell-facts")
    assert tab.run("JSON.parse(document.getElementById('document').textContent).tokens.q") == tokens
    assert "</script" not in tab.run("document.getElementById('state').textContent")
    assert not [event for event in browser.events if event["method"] in TROUBLE]


@pytest.mark.parametrize("q_len", [0, 1, 3000])
def test_rules_that_python_evaluated_and_short_masks_are_drawn(browser, tab, save, q_len):
    browser.events.clear()
    mask = ls.Custom(lambda q, k: (q * k) % 7 < 2) & ls.Causal() if q_len > 1 else ls.Causal()
    tab.open(save(document(mask, q_len), f"short{q_len}"))
    for panel in PANELS:
        tab.run(f"longspan.set({{panel: {panel!r}}})")
    tab.run("longspan.set({panel: 'cell'})")
    tab.drawn()
    assert not [event for event in browser.events if event["method"] in TROUBLE]
    if q_len == 1:
        assert drawn_cells(tab, 1, 1)[0, 0].tolist() == [37, 99, 235, 255]
    if q_len == 3000:
        tab.run("longspan.set({q: 2000, k: 1000})")
        assert text(tab, "cell-answer").endswith("the page does not know this pair.")
        assert "Python evaluated Custom(<lambda>) in cells of 6 x 6 pairs." in text(tab, "notes")
        assert "not known" in text(tab, "legend")


def test_a_narrow_page_does_not_scroll_sideways(tab, url):
    tab.open(url)
    scale = text(tab, "readout")
    tab.resize(400, 800)
    tab.wait(f"document.getElementById('readout').textContent !== {scale!r}")
    assert float(text(tab, "readout").split()[0]) < float(scale.split()[0])
    tab.open(f"{url}#q=93&k=92")
    for panel in PANELS:
        tab.run(f"longspan.set({{panel: {panel!r}}})")
        assert tab.run("document.documentElement.scrollWidth") == 400, panel
        tab.run("scrollTo(0, 1e6)")
        below = "document.getElementById('keys').getBoundingClientRect().bottom"
        assert tab.run(f"{below} <= document.querySelector('.tabs').getBoundingClientRect().top"), "they overlap"
    tab.resize(1200, 860)


def test_long_tuples_are_folded(tab, save):
    mask = ls.Global(tuple(range(0, 70, 10)), rows=False) & ls.Causal() & ls.Window(9, 0) | ls.Global((3, 4))
    tab.open(save(document(mask, 96), "folded"))
    assert text(tab, "numbers").split("\n") == ["Window left", "Window right", "Global indices 1", "Global indices 2"]
    assert tab.run("document.querySelector('.more-numbers').innerText") == "Global indices: 7 numbers"
    assert not is_shown(tab, "slider-6")
    tab.run("document.querySelector('.more-numbers').open = true")
    set_input(tab, "slider-6", 61)
    assert "(0, 10, 20, 30, 40, 50, 61)" in text(tab, "expression")


def test_rules_of_other_heads_are_listed_with_their_names(tab, save):
    tab.open(save(document(ls.PerHead((ls.Causal(1), ls.Window(3, 0))), 40, head=1), "fixed"))
    tab.run("document.getElementById('fixed-numbers').open = true")
    lines = [line for line in text(tab, "fixed-numbers").split("\n") if line]
    assert lines == ["1 number that cannot change here", "Causal offset", "Head 1 does not use this rule."]


def test_the_legend_explains_what_is_drawn(tab, url, save):
    tab.open(f"{url}#panel=cache")
    assert "kept key" in text(tab, "legend")
    set_input(tab, "slider-0", 5)
    assert "kept key" not in text(tab, "legend"), "the plan is of other numbers, and not drawn"
    mask = ls.Custom(lambda q, k: (q * k) % 7 < 2) & ls.Causal()
    tab.open(save(document(mask, 3000, other=ls.Causal()), "unknown") + "#panel=diff")
    assert "not known" in text(tab, "legend")


def test_a_difference_after_pairs_that_are_not_known_is_an_example(tab, save):
    mask = ls.Custom(lambda q, k: (q * k) % 7 < 2) & ls.Causal() | ~ls.Prefix(2000)
    tab.open(save(document(mask, 3000, other=ls.Causal()), "example_of_a_difference") + "#panel=diff")
    tab.wait("longspan.state.shown.pair")
    assert text(tab, "diff-answer") == (
        "The masks differ, for example in query 0, key 2,000: only the first mask allows it. The page cannot compare "
        "every pair before it."
    )

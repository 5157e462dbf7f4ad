"""The contents of pictures: shades, numbers, captions, documents and tiles, in characters, HTML and matplotlib."""

import inspect
import re
import shutil
import subprocess
import xml.dom.minidom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import longspan as ls
from longspan.layout import EMPTY, FULL, PARTIAL, plan_layout
from longspan.render import html, shares
from longspan.render.notebook import lengths
from longspan.render.picture import percent, picture_of, ticks
from longspan.render.shares import shares_of
from longspan.render.tiles import tiles_of
from longspan.testing import masks

B, N, T, S = 2, 2, 29, 41
MILLION = 1_000_000
IDS = np.concatenate([np.repeat(np.arange(4), [20, 9, 30, 11]), np.full(7, -1)])[None]
X = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)


def dense_pairs(mask, q_len, kv_len, q_cell, kv_cell, batch=0, head=0):
    q, kv = plan_layout(mask, q_len, kv_len, 1, 1, xp=np).sides(xp=np)
    truth = np.asarray(mask.allowed(q.slots(), kv.slots()))
    truth = np.broadcast_to(truth, np.broadcast_shapes(truth.shape, (1, 1, q_len, kv_len))).astype(int)
    truth = truth[min(batch, truth.shape[0] - 1), min(head, truth.shape[1] - 1)]
    rows, columns = np.arange(0, q_len, q_cell), np.arange(0, kv_len, kv_cell)
    return np.add.reduceat(np.add.reduceat(truth, rows, axis=0), columns, axis=1)


# `test_grid_equals_the_dense_mask` takes the same paths with more examples.
@settings(max_examples=settings.default.max_examples // 4)
@given(
    mask=masks(T, S, batch=B, heads=N),
    cells=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    batch=st.integers(0, B - 1),
    head=st.integers(0, N - 1),
)
def test_shares_are_counted_where_tiles_are_few(mask, cells, batch, head):
    found = shares_of(mask, T, S, *cells, batch=batch, head=head)
    assert found.exact
    np.testing.assert_allclose(found.pairs, dense_pairs(mask, T, S, *cells, batch, head), rtol=1e-12)


@pytest.mark.parametrize(
    "mask", [ls.Window(60, 60, dilation=3), ls.Custom(lambda q, k: k <= q), ls.Prefix(99)], ids=repr
)
def test_shares_of_many_tiles_are_estimated_well(mask, monkeypatch):
    monkeypatch.setattr(shares, "MAX_READ", 1 << 14)
    found = shares_of(mask, 500, 500, 50, 50)
    assert not found.exact
    error = np.abs(found.pairs - dense_pairs(mask, 500, 500, 50, 50)).max() / 50**2
    assert error < 0.1, "of 50 x 50 pairs, each from some hundreds"


def test_strides_and_random_blocks_are_visible():
    strided = ls.Window(64, 64, dilation=4).show(1024, 1024, max_cells=8, axes=False).split()
    assert strided[4] == "..:+++:.", "one key of four, where a whole window would be ######"
    table = np.arange(14)[::-1].reshape(1, 14, 1)
    drawn = ls.bigbird(16 * 32, block_size=32, rand_attn=table).show(512, 512, max_cells=8, axes=False).split()
    assert drawn[2:6] == ["++#+++.+", "+.+#+..+", "+.++#+.+", "+++.+#++"], "the window, the other diagonal, the edges"


def test_pictures_by_blocks_have_a_caption_token_numbers_and_a_legend():
    picture = (ls.Causal() & ls.Window(511, 0)).show(4096, 4096, max_cells=8)
    assert picture == (
        "Causal() & Window(511, 0)\n"
        "4,096 queries x 4,096 keys: 11.7% of the pairs are allowed, 14.6% of the 128 x 128 tiles are visited\n"
        "      0   2,048\n"
        "    0 +.......\n"
        "  512 ++......\n"
        "1,024 .++.....\n"
        "1,536 ..++....\n"
        "2,048 ...++...\n"
        "2,560 ....++..\n"
        "3,072 .....++.\n"
        "3,584 ......++\n"
        "each character stands for 512 x 512 pairs, and shows the allowed share:\n"
        ". none, : under a quarter, + about half, * over three quarters, # all"
    )
    bare = (ls.Causal() & ls.Window(511, 0)).show(4096, 4096, max_cells=8, axes=False)
    assert bare.split() == [line.split()[-1] for line in picture.splitlines()[3:-2]]
    assert ls.Causal().show(2, 2, axes=True).splitlines()[2:] == ["  0", "0 #.", "1 ##", "# may attend, . may not"]


def test_heads_that_differ_are_drawn_side_by_side():
    mask = ls.PerHead((ls.Causal(), ls.Window(0, 0), ls.Full()))
    assert mask.show(3, 3).splitlines() == ["#..  #..  ###", "##.  .#.  ###", "###  ..#  ###"]
    assert mask.show(3, 3, head=1).splitlines() == ["#..", ".#.", "..#"]
    assert mask.show(40, 40).splitlines()[2].split("head ") == ["   ", "0 of 3           ", "1                ", "2"]
    many = ls.PerHead(tuple(ls.Window(n, 0) for n in range(12)))
    assert "; heads 0 to 3 of 12<" in many._repr_html_()
    assert "; batch row 0 of 2<" in ls.KvLengths(np.array([30, 20]))._repr_html_()


def test_none_and_all_are_exact_and_everything_else_has_a_shade():
    rare = ls.Custom(lambda q, k: (q == 2500) & (k == 17))
    assert rare.show(4000, 4000, max_cells=4, axes=False).split() == ["....", "....", ":...", "...."]
    assert (~rare).show(4000, 4000, max_cells=4, axes=False).split() == ["####", "####", "*###", "####"]


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0%"), (1.0, "100%"), (0.5, "50.0%"), (0.00051234, "0.051%"), (0.99999, "99.99%")]
)
def test_shares_are_written_as_percentages(share, words):
    assert percent(share) == words


@given(length=st.integers(0, 10**7), cell=st.integers(1, 10**5), count=st.integers(1, 9))
def test_ticks_are_few_and_begin_cells(length, cell, count):
    places = ticks(length, cell, count)
    assert len(places) <= count + 1
    assert all(place < length and place % cell == 0 for place in places)
    assert not length or places[0] == 0


def test_a_mask_without_lengths_is_drawn_long_enough_for_its_numbers():
    assert lengths(ls.Causal()) == (64, 64)
    assert lengths(ls.Window(511, 0) | ls.Prefix(4)) == (2048, 2048)
    assert lengths(ls.Window(100, 0, dilation=4)) == (2048, 2048)
    assert lengths(ls.Prefix(2**29)) == (1 << 17, 1 << 17)
    assert lengths(ls.Segments(np.zeros((1, 7), int), np.zeros((1, 5), int)) & ls.Window(999, 0)) == (7, 5)
    assert lengths(ls.KvLengths(np.array([3]))) == (64, 64)
    assert lengths(ls.KvLengths(jnp.array([300, 200]))) == (2048, 2048)


NOTEBOOK = {
    "mask": lambda: ls.Causal() & ls.Window(511, 0),
    "heads": lambda: ls.PerHead((ls.Causal(), ls.Chunk(8))),
    "documents": lambda: ls.Causal() & ls.Segments(IDS),
    "empty": lambda: ls.Empty(),
    "info": lambda: ls.MaskInfo.from_segments(IDS).apply_causal(),
    "layout": lambda: (ls.Causal() & ls.Window(511, 0) | ls.Global((0,))).layout(4096, 4096),
    "transposed": lambda: ls.Causal().layout(300, 500).transpose(),
    "no tokens": lambda: ls.Causal().layout(0, 0),
    "explanation": lambda: ls.explain(X, X, X, mask=ls.Causal()),
    "plan": lambda: ls.parallel.plan(ls.Window(512, 512) | ls.Global((0, 9000)), 16384, 8, "zigzag"),
    "many devices": lambda: ls.parallel.plan(ls.Causal(), 1 << 20, 256),
}


@pytest.mark.parametrize("name", NOTEBOOK)
def test_notebooks_show_html_that_needs_nothing_else(name):
    page = NOTEBOOK[name]()._repr_html_()
    xml.dom.minidom.parseString(page)  # every tag is closed
    assert not re.search(r"<script|<link|<img|@import|url\(|on\w+=|href", page)
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in without_names
    assert len(page) < 60_000
    assert "currentColor" in page, "in the page's own colour, light or dark"


def test_html_contains_the_rule_escaped():
    page = (ls.Causal() & ls.Window(511, 0))._repr_html_()
    assert "Causal() &amp; Window(511, 0)" in page
    assert "2,048 queries x 2,048 keys" in page

    @ls.masks.rule
    class Sly(ls.Mask):
        def allowed(self, q, kv):
            return q.index >= kv.index

        def __repr__(self):
            return "<script>alert(1)</script>"

    assert "<script" not in Sly()._repr_html_()


def test_traced_masks_and_layouts_have_no_picture():
    shown = []

    @jax.jit
    def program(ids):
        mask = ls.Segments(ids)
        shown.append((mask._repr_html_(), mask.layout(77, 77)._repr_html_()))
        return ids

    program(jnp.asarray(IDS))
    assert shown == [(None, None)]
    assert ls.Segments(jax.ShapeDtypeStruct((1, 7), jnp.int32))._repr_html_() is None


def test_a_million_tokens_are_drawn_in_html_without_their_pairs():
    mask = ls.Causal() & (ls.Window(4095, 0) | ls.Prefix(4))
    page = mask.layout(MILLION, MILLION)._repr_html_()
    assert "1,000,000 queries x 1,000,000 keys in tiles of 128 x 128: 0.43% are visited" in page
    assert len(page) < 60_000


def test_documents_are_bands_along_the_edges():
    picture = picture_of(ls.Causal() & ls.Segments(IDS), 77, 77, cells=10)
    assert picture.bands is not None
    assert picture.bands.q == picture.bands.kv == [0, 0, None, 2, 2, None, 3, -1]
    page = (ls.Causal() & ls.Segments(IDS))._repr_html_()
    assert page.count('height="6"') >= 4, "four documents on top"
    assert ls.Causal().documents() is None


def test_tiles_are_shown_by_kind_as_they_are_visited():
    layout = (ls.Causal() & ls.Window(127, 0)).layout(256, 256, q_tile=64, kv_tile=64)
    (levels,) = tiles_of(layout).levels
    assert levels.tolist() == [
        [PARTIAL, EMPTY, EMPTY, EMPTY],
        [FULL, PARTIAL, EMPTY, EMPTY],
        [PARTIAL, FULL, PARTIAL, EMPTY],
        [EMPTY, PARTIAL, FULL, PARTIAL],
    ]
    (columns,) = tiles_of(
        (ls.Window(0, 0) | ls.Global((200,), rows=False)).layout(256, 256, q_tile=64, kv_tile=64)
    ).levels
    assert (columns[:, 3] != EMPTY).all() and columns[0, 1] == EMPTY


def test_positions_are_drawn_in_figures():
    figure = ls.Causal().plot(1, 8, q_positions=np.array([3]))
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]


def test_figures_have_shares_tiles_bands_and_a_legend(tmp_path):
    figure = (ls.Causal() & ls.Segments(IDS)).plot(77, tile=8)
    shares_axes, tile_axes = figure.axes[:2]
    assert shares_axes.get_xlabel() == "keys" and shares_axes.get_ylabel() == "queries"
    assert len(shares_axes.child_axes) == 2, "bands at the left and on top"
    assert set(np.unique(tile_axes.images[0].get_array())) == {EMPTY, PARTIAL, FULL}
    (legend,) = figure.legends
    assert [text.get_text().split(":")[0] for text in legend.get_texts()] == ["EMPTY", "PARTIAL", "FULL"]
    assert "77 queries x 77 keys" in figure.get_suptitle().replace("\n", " ")
    for name in ("mask.png", "mask.svg"):
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(ls.PerHead((ls.Causal(), ls.Full())).plot(64).axes) == 3, "two heads and the scale"
    ls.Empty().plot(0, 0).savefig(tmp_path / "empty.png")


def test_a_picture_without_cells_is_an_error():
    for draw in (lambda: ls.Causal().show(8, 8, max_cells=0), lambda: ls.Causal().plot(8, max_cells=0),
                 lambda: ls.cache.plan(ls.Causal(), 8).show(max_cells=0),
                 lambda: ls.MaskInfo.from_mask(ls.Causal(), 1, 8, 8).to_html(max_cells=0)):  # fmt: skip
        with pytest.raises(ValueError, match=r"max_cells`? must be"):
            draw()


def test_show_still_accepts_the_former_name_of_max_cells():
    mask = ls.Causal() & ls.Window(511, 0)
    show: Any = mask.show
    assert show(4096, 4096, most=8) == show(4096, 4096, max_cells=8)
    assert "most" not in inspect.signature(ls.Mask.show).parameters
    with pytest.raises(ValueError, match="`most` is the former name of `max_cells`: give only `max_cells`"):
        show(4096, 4096, most=8, max_cells=8)


def test_figures_leave_no_trace_in_pyplot():
    from matplotlib import pyplot

    ls.Causal().plot(8)
    assert pyplot.get_fignums() == []


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("longspan.optional.is_installed", lambda name: name != "matplotlib")
    with pytest.raises(ImportError, match=re.escape("Mask.plot needs matplotlib: pip install 'longspan[plot]'")):
        ls.Causal().plot(8)


PLANS = {
    "window": ls.Causal() & ls.Window(3, 0),
    "sinks": ls.Causal() & (ls.Window(3, 0) | ls.Prefix(2)),
    "chunks": ls.Causal() & ls.Chunk(5),
    "everything": ls.Causal(),
    "strides": ls.Causal() & ls.Window(3, 0, dilation=3),
    "nothing": ls.Empty() & ls.Causal(),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_draws_the_positions_its_cache_holds_after_each_step(name):
    length = 13
    plan = ls.cache.plan(PLANS[name], length)
    cache = ls.cache.init(plan, 1, 1, 2, jnp.float32)
    one = np.ones((1, 1, 1, 2), np.float32)
    append = jax.jit(lambda cache: cache.append(one, one)[0])
    history = plan.show().splitlines()
    for step in range(length):
        cache = append(cache)
        positions = np.asarray(cache.positions)[0]
        held = "".join("#" if p in positions else "." for p in range(step + 1))
        assert plan.show(step).splitlines()[2] == held, step
        assert cache.show().splitlines()[2] == held
        assert cache.show(step) == plan.show(step)
        assert history[-1 - length + step] == f"{step:>2} {held}"


def test_long_plans_are_drawn_by_cells():
    plan = ls.cache.plan(ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(4)), 10**5)
    title, _, row, legend = plan.show(50_000).splitlines()
    assert title == "50,001 of 100,000 positions: 1,028 kept, 48,973 evicted; 1,028 slots"
    assert re.fullmatch(r":\.+[:+*#]+", row) and len(row) == 32
    assert legend == (
        "one character is 1,563 positions: # all kept, '*' '+' ':' some kept, . all evicted, blank if not yet appended"
    )
    assert len(plan.show().splitlines()) == 2 + 1 + 32 + 1


def test_errors_of_cache_pictures():
    plan = ls.cache.plan(ls.Causal(), 8)
    cache = ls.cache.init(plan, 2, 1, 2, jnp.float32)
    with pytest.raises(ValueError, match=re.escape("step=8 is out of range: the plan has 8 positions, 0 to 7.")):
        plan.show(8)
    with pytest.raises(IndexError, match=re.escape("batch=2 is out of range: the cache has 2 rows.")):
        cache.show(batch=2)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x, x]), cache)
    with pytest.raises(ValueError, match=re.escape("stacks 3 layers. Draw one of them")):
        stacked.show()
    with pytest.raises(TypeError, match="Call `show` outside jit"):
        jax.jit(lambda cache: cache.show())(cache)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


LIGHT, DARK = "color:#111;background:#fff", "color:#ddd;background:#111"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_html_on_light_and_dark_pages_without_warnings(tmp_path):
    shown = "<hr>".join(build()._repr_html_() for build in NOTEBOOK.values())
    halves = "".join(f'<div style="width:50%;{colours}">{shown}</div>' for colours in (LIGHT, DARK))
    source = html.document(f'<div style="display:flex;position:absolute;left:0;top:0">{halves}</div>', "pictures")
    (tmp_path / "page.html").write_text(source, "utf-8")
    picture = tmp_path / "page.png"
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        *("--v=0", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,4000", f"--screenshot={picture}"),
        (tmp_path / "page.html").as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not re.findall(r".*CONSOLE.*", run.stderr)
    assert picture.exists(), run.stderr
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    for half, orange in ((pixels[:, :800], "#f6ad30"), (pixels[:, 800:], "#d3890c")):
        for name in (html.BLUE, orange):
            wanted = [int(name[at : at + 2], 16) for at in (1, 3, 5)]
            assert (np.abs(half - wanted).max(axis=-1) <= 3).sum() > 500, name

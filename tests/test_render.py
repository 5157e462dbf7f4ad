"""The grid under all pictures: equal to the dense mask, without its memory."""

import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.layout import plan_layout
from longspan.masks import rule
from longspan.masks.sides import Tiles
from longspan.render import grid, grid_of
from longspan.testing import masks

pytestmark = pytest.mark.quick

B, N, T, S = 2, 2, 29, 41
MILLION = 1_000_000


def dense_cells(mask, q_len, kv_len, q_cell, kv_cell, batch=0, head=0, **positions):
    """(some, every) of the dense mask."""
    q, kv = plan_layout(mask, q_len, kv_len, 1, 1, **positions, xp=np).sides(xp=np)
    truth = np.asarray(mask.allowed(q.slots(), kv.slots()))
    truth = np.broadcast_to(truth, np.broadcast_shapes(truth.shape, (1, 1, q_len, kv_len)))
    truth = truth[min(batch, truth.shape[0] - 1), min(head, truth.shape[1] - 1)]
    rows, columns = np.arange(0, q_len, q_cell), np.arange(0, kv_len, kv_cell)
    return tuple(f.reduceat(f.reduceat(truth, rows, axis=0), columns, axis=1) for f in (np.logical_or, np.logical_and))


def assert_same_grid(mask, q_len, kv_len, q_cell, kv_cell, **which):
    found = grid_of(mask, q_len, kv_len, q_cell, kv_cell, **which)
    some, every = dense_cells(mask, q_len, kv_len, q_cell, kv_cell, **which)
    np.testing.assert_array_equal(found.some, some, err_msg=repr(mask))
    np.testing.assert_array_equal(found.every, every, err_msg=repr(mask))


@contextmanager
def small_steps():
    """Makes small masks take the paths of large ones: coarser starts, batches, splits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(LEAF=2, FINENESS=(16, 4, 1), FEW=40, AT_ONCE=100).items():
            patch.setattr(grid, name, value)
        yield


def positions(length):
    growing = st.integers(-5, 5).map(lambda start: np.arange(length) + start)
    jumbled = st.permutations(range(length)).map(np.array)
    by_row = st.lists(st.integers(-3, length), min_size=B * length, max_size=B * length).map(
        lambda p: np.array(p).reshape(B, length)
    )
    return st.one_of(st.none(), growing, jumbled, by_row)


@given(
    mask=masks(T, S, batch=B, heads=N),
    cells=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    batch=st.integers(0, B - 1),
    head=st.integers(0, N - 1),
    q_positions=positions(T),
    kv_positions=positions(S),
)
def test_grid_equals_the_dense_mask(mask, cells, **which):
    with small_steps():
        assert_same_grid(mask, T, S, *cells, **which)


@pytest.mark.parametrize("cell", [1, 3, 16, 33, 64, 200])
@pytest.mark.parametrize(
    "mask",
    [
        ls.Causal() & ls.Window(40, 0),
        ls.Window(9, 9, dilation=3) | ls.Global((0, 77)),
        ~ls.Segments(np.repeat(np.arange(6), [20, 1, 50, 7, 60, 52])[None]),
        ls.bigbird(190, block_size=10, rand_attn=np.array([[[5]] * 17])),
        ls.Custom(lambda q, k: k != 150),
        ls.Custom(lambda q, k: (q == 131) & (k == 7)),
    ],
    ids=repr,
)
def test_cells_of_any_size_are_exact(mask, cell):
    assert_same_grid(mask, 190, 190, cell, cell)
    assert_same_grid(mask, 190, 190, cell, 2 * cell)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
def test_sides_without_tokens_have_no_cells(shape):
    assert_same_grid(ls.Causal(), *shape, 2, 2)
    assert ls.Causal().show(*shape) == "\n".join(["#" * shape[1]] * shape[0])


def rare_pair(q, k):
    return (q == 2500) & (k == 17)


def test_one_allowed_or_forbidden_pair_among_millions_is_found():
    rare = ls.Custom(rare_pair)
    cell = np.zeros((4, 4), bool)
    cell[2, 0] = True
    np.testing.assert_array_equal(grid_of(rare, 4000, 4000, 1000, 1000).some, cell)
    np.testing.assert_array_equal(grid_of(~rare, 4000, 4000, 1000, 1000).every, ~cell)


def test_positions_are_drawn():
    rolling = np.array([4, 5, 2, 3])
    assert ls.Causal().show(1, 4, q_positions=np.array([4]), kv_positions=rolling) == "#.##"
    by_row = np.array([[0, 1], [1, 0]])
    assert ls.Causal().show(2, 2, batch=1, q_positions=by_row).split() == ["##", "#."]
    with pytest.raises(IndexError, match=re.escape("batch=2 is out of range: the mask has 2 batch rows, 0 to 1.")):
        ls.Causal().show(2, 2, batch=2, q_positions=by_row)
    with pytest.raises(ValueError, match=re.escape("q_positions must have shape [2] or [B, 2]")):
        ls.Causal().show(2, 2, q_positions=np.arange(3))


def packed(length):
    """Documents of a few hundred tokens, then padding."""
    lengths = np.random.default_rng(0).integers(1, 900, size=length // 400)
    ids = np.repeat(np.arange(len(lengths)), lengths)[:length]
    return np.concatenate([ids, np.full(length - len(ids), -1)])[None].astype(np.int32)


def token_kinds(length):
    kinds = np.zeros((1, length), np.int8)
    kinds[0, [0, 1, length // 2]], kinds[0, -5000:] = 1, -1
    return kinds


LONG = {
    "window": lambda: ls.Causal() & ls.Window(511, 0),
    "causal": lambda: ls.Causal(),
    "documents": lambda: ls.Causal() & ls.Segments(packed(MILLION)),
    "global": lambda: ls.Global((0, 123_457)) | ls.Window(3, 3),
    "longformer": lambda: ls.longformer(256, token_kinds=token_kinds(MILLION)),
    "bigbird": lambda: ls.bigbird(MILLION, block_size=64, rand_attn=np.full((1, MILLION // 64 - 2, 1), 9_000)),
    "user's": lambda: ls.Custom(lambda q, k: (q + k) % 3 != 0),
}


@pytest.mark.check
@pytest.mark.parametrize("name", LONG)
def test_a_million_tokens_are_drawn_in_little_memory(name):
    mask = LONG[name]()
    tracemalloc.start()
    try:
        picture = mask.show(MILLION, MILLION, axes=False).split()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(row) for row in picture] == [64] * 64
    assert peak < 100e6, f"{peak / 1e6:.0f} MB; the pairs of one row of cells alone are 15 GB"


def test_pictures_of_a_million_tokens_are_right():
    picture = (ls.Causal() & ls.Window(511, 0)).show(MILLION, MILLION, max_cells=4, axes=False).split()
    assert picture == [":...", "::..", ".::.", "..::"]
    picture = (ls.Causal() | ls.Prefix(250_000)).show(MILLION, MILLION, max_cells=4, axes=False).split()
    assert picture == ["#...", "#+..", "##+.", "###+"]
    picture = (ls.Window(1, 1) | ls.Global((999_999,))).show(MILLION, MILLION, max_cells=4, axes=False).split()
    assert picture == ["::.:", "::::", ".:::", "::::"]


@rule
class Counted(ls.Mask):
    """A rule that counts the pairs and tiles it evaluates."""

    mask: ls.Mask
    count: Callable[[str, int], None]

    def allowed(self, q, kv):
        truth = self.mask.allowed(q, kv)
        self.count("pairs", truth.size)
        return truth

    def classify(self, q, kv):
        self.count("tiles", q.index.size)
        return self.mask.classify(q, kv)

    def kv_spans(self, q, kv):
        return self.mask.kv_spans(q, kv)


@pytest.mark.parametrize("mask", [ls.Causal(), ls.Causal() & ls.Window(511, 0), ls.Global((123_457,))], ids=repr)
def test_few_tiles_and_pairs_of_a_million_tokens_are_evaluated(mask):
    evaluated = Counter()
    counted = Counted(mask, lambda what, size: evaluated.update({what: size}))
    assert counted.show(MILLION, MILLION, axes=False) == mask.show(MILLION, MILLION, axes=False)
    assert 0 < evaluated["tiles"] < 1_000_000
    assert 0 < evaluated["pairs"] < 10_000_000  # of 10^12


def test_the_ids_of_a_tile_are_summarised_once(monkeypatch):
    inner, found = Tiles._summary, []

    def summary(tiles, *arguments):
        found.append(tiles.size)
        return inner(tiles, *arguments)

    monkeypatch.setattr(Tiles, "_summary", summary)
    ids = np.arange(MILLION)[None] // 100 % 1000
    assert {*"".join(ls.Segments(ids).show(MILLION, MILLION, axes=False).split())} == {*".:"}
    sizes = set(found)
    assert len(found) <= 2 * 14 * len(sizes), "two for spans, four kinds of bounds on both sides, for each size of tile"

"""`explain` against counts from the dense mask."""

import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan import tile_kinds
from longspan.engines import ENGINES, Request, tried
from longspan.masks.sides import Tiles
from longspan.pairs import count_by_query

pytestmark = pytest.mark.quick

IDS = np.repeat(np.arange(6), 70)[None, :389]
MASKS = [
    ls.Full(),
    ls.Causal(),
    ls.Causal() & ls.Window(100, 0),
    ls.Window(33, 12) | ls.Global((0, 300)),
    ls.Causal() & ls.Segments(IDS),
    ls.PerHead((ls.Causal(), ls.Window(5, 5))),
    ls.Chunk(64) & ls.KvLengths(np.array([200, 389, 0])),
]


def call(T=389, N=2, B=3, H=16, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((B, T, N, H), dtype)] * 3


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_counts_are_those_of_the_dense_mask(mask):
    report = ls.explain(*call(), mask=mask, engine="reference")
    dense = np.asarray(mask.dense(389, 389))
    whole = np.broadcast_to(dense, (3, 2, 389, 389))
    assert report.useful_flops == 4 * 16 * np.count_nonzero(whole)
    edges = range(0, 389, 128)
    tiles = [
        dense[b, n, i : i + 128, j : j + 128] for b, n in np.ndindex(*dense.shape[:2]) for i in edges for j in edges
    ]
    assert report.tiles_total == len(tiles)
    assert report.tiles_empty == sum(not t.any() for t in tiles)
    assert report.tiles_full == sum(bool(t.all()) for t in tiles)
    assert report.tiles_partial == report.tiles_total - report.tiles_empty - report.tiles_full
    copies = 6 // (dense.shape[0] * dense.shape[1])
    assert report.executed_flops == 4 * 16 * 128 * 128 * (report.tiles_full + report.tiles_partial) * copies
    assert report.dense_mask_bytes == dense.nbytes


def test_it_names_the_engine_and_why_others_were_refused():
    report = ls.explain(*call(), mask=ls.Causal())
    assert report.engine in ENGINES
    before = list(tried("cpu"))[: tried("cpu").index(report.engine)]
    assert list(report.refused) == before and all(report.refused.values())
    assert "fast" in report.reason and ls.explain(*call(), engine="xla").reason == "as requested"


def test_it_prints_as_a_table():
    text = str(ls.explain(*call(), mask=ls.Causal() & ls.Window(100, 0), engine="reference"))
    rows = dict(line.split("  ", 1) for line in (row.strip() for row in text.splitlines()))
    assert rows["engine"].strip() == "reference, as requested"
    assert rows["mask"].strip() == "Causal() & Window(100, 0)"
    assert rows["partial"].strip() == "7 (43.8%)"


def test_rows_name_their_bytes():
    report = ls.explain(*call(), mask=ls.Causal(), engine="reference")
    rows = dict(line.split("  ", 1) for line in str(report).splitlines())
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert {"inputs and outputs", "temporary memory", "dense mask (not allocated)"} <= set(rows)
    assert report.temporary_bytes == 3 * 2 * 389 * 389 * 4 and rows["temporary memory"] == "at least 3.463 MiB"
    assert "temporary memory" not in str(ls.explain(*call(), mask=ls.Causal(), engine="xla"))


def test_the_memory_of_mask_bits_is_reported():
    mask = ls.Segments(jax.ShapeDtypeStruct((3, 389), jnp.int32)) & ls.Custom(lambda q, k: q % 2 == 0)
    rows = 3 * 4  # of tiles
    assert ENGINES["cpu"].temporary_bytes(bind_mask(mask)) == rows * 4 * 128 * 128 // 8
    narrow = ls.Window(100, 0) & mask
    assert ENGINES["cpu"].temporary_bytes(bind_mask(narrow)) == rows * 2 * 128 * 128 // 8
    assert ENGINES["cpu"].temporary_bytes(bind_mask(ls.Causal())) is None


def bind_mask(mask, **sizes):
    q, k, v = call(**sizes)
    return Request.of(q=q, k=k, v=v, mask=mask)


WASTEFUL = {
    "ids appear again after other ids": ls.Segments(np.random.default_rng(0).integers(0, 50, (3, 1024))),
    "shorter than a tile": ls.Causal() & ls.Segments(np.arange(1024)[None] // 9),
}


@pytest.mark.parametrize("why", WASTEFUL)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_it_advises_where_far_more_is_executed_than_is_useful(why, array):
    mask = jax.tree.map(array, WASTEFUL[why])
    report = ls.explain(*call(T=1024), mask=mask, engine="xla")
    ratio = report.executed_flops / report.useful_flops
    assert ratio > 4
    (note,) = report.notes
    assert note.startswith(f"the executed FLOPs are {ratio:.0f} times the useful FLOPs: ") and why in note
    assert not ls.explain(*call(), mask=ls.Empty(), engine="xla").notes


def test_arrays_without_values_are_noted():
    mask = ls.Causal() & ls.Segments(jax.ShapeDtypeStruct((3, 389), jnp.int32))
    report = ls.explain(*call(), mask=mask)
    assert report.useful_flops is None and report.tiles_full is None
    assert "depends on data" in str(report) and any("not known" in note for note in report.notes)


def test_a_custom_rule_without_bounds_is_noted():
    report = ls.explain(*call(), mask=ls.Causal() & ls.Custom(lambda q, k: q % 2 == 0))
    assert any("Custom(<lambda>) has no `bounds`" in note for note in report.notes)
    assert not ls.explain(*call(), mask=ls.Causal()).notes


@ls.masks.rule
class Mine(ls.Mask):
    """A user's rule without `classify`."""

    def allowed(self, q, kv):
        return q.position >= kv.position


UNBOUNDED = ls.Custom(lambda q, k: q % 2 == 0)


@pytest.mark.parametrize(
    ("mask", "culprit", "effect"),
    [
        (UNBOUNDED, "Custom(<lambda>)", "no tile can be skipped"),
        (UNBOUNDED | ls.Window(3, 0), "Custom(<lambda>)", "no tile can be skipped"),
        (~(UNBOUNDED & ls.Window(3, 0)), "Custom(<lambda>)", "no tile can be skipped"),
        (UNBOUNDED & ls.Window(3, 0), "Custom(<lambda>)", "no tile is known to be full"),
        ((UNBOUNDED & ls.Window(3, 0)) | ls.Chunk(8), "Custom(<lambda>)", "tiles that depend on this rule are masked"),
        (ls.PerHead((ls.Causal(), Mine())), "Mine()", "tiles that depend on this rule are masked"),
        (ls.Full() & UNBOUNDED, "Custom(<lambda>)", "no tile can be skipped"),
        (ls.Causal() & Mine(), "Mine()", "no tile is known to be full"),
    ],
    ids=repr,
)
def test_the_effect_of_each_rule_without_bounds_is_noted(mask, culprit, effect):
    notes = ls.explain(*call(T=16), mask=mask, engine="xla").notes
    assert len(notes) == 1 and culprit in notes[0] and effect in notes[0], notes


def test_rules_that_the_native_kernel_cannot_evaluate_are_noted():
    request = bind_mask(ls.Causal() & Mine() & ls.Segments(np.zeros((1, 16), int)), T=16)
    notes = ENGINES["cpu"].notes(request)
    assert len(notes) == 1 and "the native kernel cannot evaluate Mine()" in notes[0]
    assert not ENGINES["cpu"].notes(bind_mask(ls.Causal() | ls.Global((0,)), T=16))


def test_the_reason_for_an_engine_holds_whichever_it_is(monkeypatch):
    assert ls.explain(*call()).reason.startswith("the first of cpu, xla, reference that 'auto' accepts")
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    report = ls.explain(*call())
    assert report.engine == "xla" and report.reason.startswith("the first of cpu, xla, reference that 'auto' accepts")


SHUFFLED = np.random.default_rng(0).integers(-1, 9, (3, 389))
BY_QUERY = [
    ls.Segments(SHUFFLED),
    ls.Causal() & ls.Segments(SHUFFLED),
    ls.Causal() & ls.Segments(SHUFFLED, SHUFFLED[:, ::-1].copy()) & ls.Window(100, 3),
    ls.Segments(SHUFFLED[:1]) & ls.TokenTypes(SHUFFLED % 3) & ls.TokenTypes(SHUFFLED % 4, zero="none"),
    ls.Chunk(50) & ls.KvLengths(np.array([200, 389, 0])) & ls.Segments(SHUFFLED),
    ls.Prefix(np.array([3, 0, 1000])) & ls.Causal(np.array([0, 5, -7])),
    ls.PerHead((ls.Empty(), ls.Band(-9, -2) & ls.Segments(SHUFFLED))),
    ls.Window(3, 70) | ls.Global((0, 388, 9), q_flags=SHUFFLED == 0, kv_flags=SHUFFLED[:1] == 1),
    ls.Global(kv_flags=SHUFFLED == 0, rows=False) & ls.Segments(SHUFFLED % 3),
    ls.Window(9, 5, dilation=np.array([3, 1, 50])) | ls.Prefix(3) | ls.Window(2, 2, dilation=2),
    ~(ls.Causal() & ~ls.Segments(SHUFFLED)) & ls.KvLengths(np.array([200, 389, 0])),
    (ls.Causal() | ls.FirstOfSegment(SHUFFLED, 2)) & ls.Segments(SHUFFLED) & ~ls.Window(9, 0),
    ls.Blocks(np.random.default_rng(1).integers(-1, 40, (2, 39, 4)), 10) | (ls.Causal() & ls.Chunk(100)),
    ls.KvLengths(np.array([200, 389, 0])).cut(None, np.arange(389)[::-1].copy()) | ls.TokenTypes(SHUFFLED),
]


@pytest.mark.parametrize("mask", BY_QUERY, ids=repr)
def test_pairs_counted_by_query_are_those_of_the_dense_mask(mask):
    q, kv = mask.layout(389, 389).sides(xp=np)
    dense = np.asarray(mask.dense(389, 389))
    for b, n in np.ndindex(*dense.shape[:2]):
        at = dict(batch=np.full((1, 1, 1, 1), b, np.int32), head=np.full((1, 1, 1, 1), n, np.int32))
        assert count_by_query(mask, q.at(**at), kv.at(**at)) == dense[b, n].sum()
    copies = 6 // (dense.shape[0] * dense.shape[1])
    assert ls.explain(*call(), mask=mask).useful_flops == 4 * 16 * dense.sum() * copies


@pytest.mark.parametrize("mask", [m for m in BY_QUERY if not any(isinstance(r, ls.Blocks) for r in m.walk())], ids=repr)
def test_pairs_are_counted_by_query_whatever_the_order_of_positions(mask):
    places = dict(q_positions=SHUFFLED * 20, kv_positions=np.random.default_rng(2).permutation(389) - 50)
    q, kv = mask.layout(389, 389, **places).sides(xp=np)
    dense = np.asarray(mask.dense(389, 389, **places))
    for b, n in np.ndindex(*dense.shape[:2]):
        at = dict(batch=np.full((1, 1, 1, 1), b, np.int32), head=np.full((1, 1, 1, 1), n, np.int32))
        assert count_by_query(mask, q.at(**at), kv.at(**at)) == dense[b, n].sum()


LONG = [ls.Band(-9 * i, -9 * i + i) for i in range(9)]


@pytest.mark.parametrize(
    "mask",
    [
        ls.Custom(lambda q, k: q >= k) & ls.Causal(),
        ls.Custom(lambda q, k: q >= k, bounds=lambda q, kv: (q.last >= kv.first, q.first >= kv.last)),
        ls.Dense(np.ones((389, 389), bool)) | ls.Causal(),
        Mine(),
        LONG[0] | LONG[1] | LONG[2] | LONG[3] | LONG[4] | LONG[5] | LONG[6] | LONG[7] | LONG[8],
    ],
    ids=["custom", "bounds", "dense", "mine", "long"],
)
def test_rules_that_are_not_intervals_are_not_counted_by_query(mask):
    q, kv = mask.layout(389, 389).sides(xp=np)
    assert count_by_query(mask, q, kv) is None
    assert ls.explain(*call(), mask=mask).useful_flops == 6 * 4 * 16 * np.asarray(mask.dense(389, 389)).sum()


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_documents_of_a_million_tokens_are_counted_without_reading_pairs(array, monkeypatch):
    def read(*_):
        raise AssertionError("pairs are read")

    monkeypatch.setattr("longspan.tile_kinds._allowed", read)
    ids = np.arange(2**20)[None] // 1000
    report = ls.explain(*call(T=2**20, B=1), mask=ls.Causal() & ls.Segments(array(ids)))
    sizes = np.bincount(ids[0])
    assert report.useful_flops == 2 * 4 * 16 * (sizes * (sizes + 1) // 2).sum()


LONG_IDS = np.random.default_rng(0).permutation(np.arange(2**20) // 1777)[None]
FLAGS = np.arange(2**20)[None] % 30_011 == 0
AT_A_MILLION = {
    "shuffled": ls.Segments(LONG_IDS),
    "recurring": ls.Causal() & ls.Segments(np.arange(2**20)[None] // 100 % 1000),
    "global": ls.Window(256, 256) | ls.Global(q_flags=FLAGS, kv_flags=FLAGS),
    "dilated": ~ls.Window(256, 256, dilation=3),
    "first": (ls.Causal() | ls.FirstOfSegment(LONG_IDS, 9)) & ls.Segments(LONG_IDS),
}


@pytest.mark.check
@pytest.mark.parametrize("mask", AT_A_MILLION.values(), ids=AT_A_MILLION.keys())
def test_a_million_tokens_take_little_work_and_memory(mask, monkeypatch):
    summaries, looked, read = [], [], []
    noting(monkeypatch, Tiles, "_summary", lambda tiles, *_: summaries.append(tiles.side.length))
    noting(monkeypatch, tile_kinds, "_classified", lambda mask, q, kv, visits: looked.append(math.prod(visits.shape)))
    noting(monkeypatch, tile_kinds, "_allowed", lambda *_: read.append(1))
    tracemalloc.start()
    report = ls.explain(*call(T=2**20, B=1), mask=mask, engine="xla")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not read and not report.useful_is_estimate
    assert sum(looked) <= 8 * 2**26 and max(looked) <= 2**20 and len(looked) <= 2**10
    assert len(summaries) <= 60, "what a tile holds is found once for all looks, in the layout and in one that is tried"
    assert peak < 250 * 2**20


def noting(monkeypatch, owner, name, note):
    """Calls `note` with the arguments of every call of a function."""
    inner = getattr(owner, name)

    def outer(*arguments, **more):
        note(*arguments)
        return inner(*arguments, **more)

    monkeypatch.setattr(owner, name, outer)


def test_too_many_pairs_to_read_are_estimated_with_a_note():
    mask = ls.Window(511, 0) & ls.Custom(lambda q, k: (q + k) % 3 == 0)
    report = ls.explain(*call(T=2**20, B=1), mask=mask, engine="xla")
    assert report.useful_is_estimate and type(report.useful_flops) is int
    assert report.useful_flops == pytest.approx(2 * 4 * 16 * 2**20 * 512 / 3, rel=0.03)
    assert report.tiles_partial == sum(min(i, 4) + 1 for i in range(8192))
    assert "about 22." in str(report) and any(note.startswith("useful FLOPs are an estimate") for note in report.notes)
    assert not ls.explain(*call(), mask=mask).useful_is_estimate


def test_a_million_tokens_are_explained_without_a_dense_mask():
    report = ls.explain(*call(T=2**20, B=1), mask=ls.Causal() & ls.Window(511, 0), engine="reference")
    assert report.useful_flops == 2 * 4 * 16 * (512 * 2**20 - 511 * 512 // 2)
    assert report.dense_mask_bytes == 2**40


def test_it_reports_the_size_of_a_cache_and_of_a_full_one():
    q, k, v = (jax.ShapeDtypeStruct((3, 389, heads, size), jnp.bfloat16) for heads, size in ((4, 16), (2, 16), (2, 8)))
    report = ls.explain(q, k, v, mask=ls.Causal() & (ls.Window(99, 0) | ls.Prefix(4)), engine="reference")
    assert report.cache_bytes == 104 * 3 * 2 * (16 + 8) * 2
    assert report.full_cache_bytes == 389 * 3 * 2 * (16 + 8) * 2
    assert "KV cache for decoding       29.25 KiB; a cache of all keys takes 109.4 KiB" in str(report)
    ids = jax.ShapeDtypeStruct((3, 389), jnp.int32)
    packed = ls.explain(q, k, v, mask=ls.Causal() & ls.Window(99, 0) & ls.Segments(ids), engine="reference")
    assert packed.cache_bytes == 100 * 3 * 2 * (16 + 8) * 2


@pytest.mark.parametrize("mask", [None, ls.Full(), ls.Window(3, 3), ls.Segments(IDS)], ids=repr)
def test_masks_that_cannot_be_decoded_have_no_cache(mask):
    report = ls.explain(*call(), mask=mask, engine="reference")
    assert report.cache_bytes is None and report.full_cache_bytes is None and "cache" not in str(report)


def test_calls_with_positions_or_cross_attention_have_no_cache():
    q, k, v = (jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32) for length in (5, 9, 9))
    assert ls.explain(q, k, v, mask=ls.Causal(), engine="reference").cache_bytes is None
    positions = np.arange(9)[::-1].copy()
    moved = ls.explain(k, k, v, mask=ls.Causal(), q_positions=positions, engine="reference")
    assert moved.cache_bytes is None

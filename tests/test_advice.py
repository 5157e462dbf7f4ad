"""Every advice of `explain` is followed here as printed, and must lower the executed FLOPs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_explain import BY_QUERY, Mine, call

import longspan as ls
from longspan import advice
from longspan.engines import ENGINES, Request
from longspan.work import short

pytestmark = pytest.mark.quick

SHUFFLED = np.random.default_rng(0).integers(0, 250, (3, 2048))
SORTED = np.arange(2048)[None] // 9
PADDED = np.where(np.arange(2048) % 9 == 4, -1, SORTED)
SORT, TILES, BOUNDS = "Sort the tokens by id", "Smaller tiles", "bounds would skip"
CODE = re.compile(r"`(.+?)`")


def near(q, k):
    return abs(q - k) <= 40


def near_bounds(q, kv):
    return (kv.first - q.last <= 40) & (q.first - kv.last <= 40), (kv.last - q.first <= 40) & (q.last - kv.first <= 40)


def explained(mask, engine="xla", T=2048, **more):
    return ls.explain(*call(T=T), mask=mask, engine=engine, **more)


def advised(report, which):
    (note,) = (note for note in report.notes if which in note)
    return note


@ls.masks.rule
class Far(Mine):
    """A user's rule with mostly empty tiles."""

    def allowed(self, q, kv):
        return abs(q.position - kv.position) > 1500


@ls.masks.rule
class BoundedFar(Far):
    """The same rule with the advised `classify`."""

    allowed = Far.allowed

    def classify(self, q, kv):
        least = np.maximum(kv.first - q.last, q.first - kv.last)
        return np.maximum(kv.last - q.first, q.last - kv.first) > 1500, least > 1500


FOLLOWED = {
    "custom": (ls.Custom(near), [ls.Custom(near, bounds=near_bounds), ls.Custom(near) & ls.Band(-40, 40)]),
    "causal": (ls.Causal() & ls.Custom(near), [ls.Causal() & ls.Custom(near, bounds=near_bounds)]),
    "either": (ls.Chunk(9) | ls.Custom(near), [(ls.Chunk(9) | ls.Custom(near)) & ls.Band(-40, 40)]),
    "negated": (~ls.Custom(lambda q, k: ~near(q, k)), [~ls.Custom(lambda q, k: ~near(q, k)) & ls.Band(-40, 40)]),
    "a rule of one's own": (Far(), [BoundedFar()]),
    "by head": (
        ls.PerHead((ls.Custom(near), ls.Causal())),
        [ls.PerHead((ls.Custom(near, bounds=near_bounds), ls.Causal()))],
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_bounds_that_are_advised_lower_the_executed_flops(name):
    mask, better = FOLLOWED[name]
    before = explained(mask)
    note = advised(before, BOUNDS)
    assert ("pass `bounds=` to Custom(" in note) or "define `classify` in Far" in note
    assert "add `& Band(lo, hi)` to the mask" in note and "tiles," not in note
    for bounded in better:
        after = explained(bounded)
        assert after.executed_flops < before.executed_flops and after.useful_flops == before.useful_flops


@pytest.mark.parametrize(
    "mask",
    [
        ls.Custom(lambda q, k: (q + k) % 16 == 0),
        ls.Segments(SHUFFLED) & ls.Custom(lambda q, k: q % 8 == k % 8),
        ls.Custom(near, bounds=near_bounds),
        ls.Custom(lambda q, k, n: q + k < n, jax.ShapeDtypeStruct((), jnp.int32)),
    ],
    ids=["everywhere", "ids", "bounds", "unknown"],
)
def test_bounds_are_not_advised_where_they_would_skip_nothing(mask):
    assert not [note for note in explained(mask).notes if BOUNDS in note or "Band(" in note]


def test_an_unbounded_rule_is_not_advised_smaller_tiles_that_change_nothing():
    sparse = ls.Custom(lambda q, k: (q + k) % 16 == 0)
    before, after = (explained(mask) for mask in (sparse, sparse.layout(2048, 2048, q_tile=32, kv_tile=32)))
    assert after.executed_flops == before.executed_flops
    assert not any(TILES in note for note in explained(ls.Custom(near)).notes)
    (_, note) = explained(ls.Custom(lambda q, k: (q == k) & (q % 128 < 3))).notes
    assert BOUNDS in note


SORTABLE = {
    "shuffled": (ls.Segments(SHUFFLED), SHUFFLED),
    "causal": (ls.Causal() & ls.Segments(SHUFFLED), SHUFFLED),
    "first": (ls.Causal() & ls.FirstOfSegment(SHUFFLED, 2) & ls.Segments(SHUFFLED), SHUFFLED),
    "types": (ls.TokenTypes(SHUFFLED, zero="none"), SHUFFLED),
    "one row": (ls.Segments(SHUFFLED[:1]) & ls.KvLengths(np.array([2048, 100, 7])), SHUFFLED[:1]),
}


@pytest.mark.parametrize("name", SORTABLE)
def test_tokens_sorted_as_advised_lower_the_executed_flops(name):
    mask, ids = SORTABLE[name]
    before = explained(mask)
    note = advised(before, SORT)
    statement, cut = CODE.findall(note)
    names = dict(np=np, ids=ids, mask=mask)
    exec(statement, names)
    places = {}
    if " and their positions" in note:
        places = dict(q_positions=names["order"], kv_positions=names["order"])
    after = explained(eval(cut, names), **places)
    assert after.executed_flops < before.executed_flops and after.useful_flops == before.useful_flops
    assert note.endswith(f"The call then executes {short(after.executed_flops, 'FLOP', 1000)}")
    assert ("position" in mask.reads) == bool(places)


def test_positions_of_the_call_are_sorted_with_the_tokens():
    positions = np.arange(2048)[::-1].copy()
    mask = ls.Causal() & ls.Segments(SHUFFLED)
    note = advised(explained(mask, q_positions=positions, kv_positions=positions), SORT)
    order = np.argsort(SHUFFLED, kind="stable")
    places = dict.fromkeys(("q_positions", "kv_positions"), positions[order])
    after = explained(mask.cut(order, order), **places)
    assert note.endswith(f"The call then executes {short(after.executed_flops, 'FLOP', 1000)}")


@pytest.mark.parametrize(
    "mask",
    [
        (ls.Window(3, 0) | ls.FirstOfSegment(SORTED, 1)) & ls.Causal() & ls.Segments(SORTED),
        ls.Segments(PADDED),
        ls.TokenTypes(np.where(PADDED < 0, 0, PADDED + 1)),
        ls.FirstOfSegment(SORTED, 2),
    ],
    ids=["first and near", "padding inside", "type 0 inside", "first"],
)
def test_sorted_ids_do_not_recur(mask):
    report = explained(mask)
    assert report.executed_flops > 4 * report.useful_flops
    assert not any("appear again" in note for note in report.notes)
    assert any(TILES in note for note in report.notes)


SHORT = ls.Causal() & ls.Segments(SORTED)
GIVEN = {
    "mask": SHORT,
    "first": (ls.Window(3, 0) | ls.FirstOfSegment(SORTED, 1)) & SHORT,
    "info": ls.MaskInfo.from_mask(SHORT, batch=3, q_len=2048),
    "layout": SHORT.layout(2048, 2048),
    "array": np.asarray(SHORT.dense(2048, 2048))[0, 0],
    "array of rank 4": np.asarray(SHORT.dense(2048, 2048)),
    "window and custom": ls.Window(3, 0) & ls.Custom(lambda q, k: q >= k),
}


@pytest.mark.parametrize("name", GIVEN)
def test_smaller_tiles_that_are_advised_lower_the_executed_flops(name):
    mask = GIVEN[name]
    before = explained(mask)
    note = advised(before, TILES)
    (code,) = CODE.findall(note)
    after = explained(eval(code.removeprefix("mask="), dict(ls=ls, mask=mask)))
    assert after.executed_flops < before.executed_flops and after.useful_flops == before.useful_flops
    assert f"execute {short(after.executed_flops, 'FLOP', 1000)}, but may take longer" in note
    assert not any(TILES in more for more in after.notes)


def test_smaller_tiles_are_planned_for_the_positions_of_the_call():
    places = dict.fromkeys(("q_positions", "kv_positions"), np.arange(2048) * 2)
    before = explained(SHORT, **places)
    (code,) = CODE.findall(advised(before, TILES))
    after = explained(eval(code.removeprefix("mask="), dict(mask=SHORT, **places)))
    assert after.executed_flops < before.executed_flops


def test_without_advice_the_note_is_only_the_ratio():
    comb = ls.Custom(lambda q, k: (q + k) % 16 == 0)
    (cost, note) = explained(comb).notes
    assert "no tile can be skipped" in cost
    assert note == "the executed FLOPs are 16 times the useful FLOPs: the mask forbids most pairs of the visited tiles"


@pytest.mark.parametrize("mask", [ls.Custom(near), SHORT, ls.Segments(SHUFFLED)], ids=["bounds", "tiles", "ids"])
def test_an_engine_that_computes_every_pair_is_not_advised_about_tiles(mask):
    notes = explained(mask, engine="reference").notes
    assert not any(said in note for note in notes for said in (SORT, TILES, BOUNDS))
    assert any(note.startswith("this engine is dense: it computes every pair") for note in notes)


def test_every_adviser_is_followed_above():
    assert [adviser.__name__ for adviser in (advice.bounds, *advice.WASTE)] == [
        "bounds", "sorted_by_id", "smaller_tiles",
    ]  # fmt: skip


@pytest.mark.parametrize("mask", BY_QUERY, ids=repr)
def test_the_advice_for_any_mask_lowers_its_executed_flops(mask):
    report = explained(mask, T=389)
    for note in report.notes:
        if SORT in note or TILES in note:
            assert report.executed_flops > 4 * report.useful_flops
            amount, letters = re.search(r"executes? ([\d.]+) (\w*)FLOP", note).groups()
            assert float(amount) * 1000 ** " kMG".index(letters or " ") < report.executed_flops


def test_a_static_window_or_chunk_reduces_mask_bits_as_advised():
    x = jax.ShapeDtypeStruct((1, 1 << 17, 1, 16), jnp.float32)
    refused = (
        ls.explain(x, x, x, mask=ls.Custom(near)).refused["cpu"]
        if ENGINES["cpu"].unsupported(Request.of(q=x, k=x, v=x, mask=ls.Causal())) is None
        else pytest.skip("needs the native library")
    )
    assert "or compose the rule with a static `Window` or `Chunk` by `&`" in refused
    cpu = ENGINES["cpu"]
    for beside in (ls.Window(40, 40), ls.Chunk(1024)):
        request = Request.of(q=x, k=x, v=x, mask=beside & ls.Custom(near))
        assert cpu.unsupported(request) is None
        assert cpu.temporary_bytes(request) < cpu.temporary_bytes(Request.of(q=x, k=x, v=x, mask=ls.Custom(near)))


def test_the_native_library_is_used_again_as_advised(monkeypatch):
    if ENGINES["cpu"].unsupported(Request.of(**dict(zip("qkv", call(), strict=True)))):
        pytest.skip("needs the native library")
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    assert "unset the variable to enable it" in ls.explain(*call()).refused["cpu"]
    monkeypatch.delenv("LONGSPAN_NATIVE")
    monkeypatch.setenv("LONGSPAN_CPU_ISA", "none")
    named = ls.explain(*call()).refused["cpu"].rpartition("support ")[2].split(", ")[0]
    monkeypatch.setenv("LONGSPAN_CPU_ISA", named)
    assert ls.explain(*call()).engine == "cpu"


def test_rules_that_hold_arrays_get_advice_too():
    far = ls.Custom(lambda b, h, q, k, by_head: q - k < by_head[h], np.array([5, 9]), heads=2)
    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)
    assert any("pass `bounds=` to Custom(" in note for note in ls.explain(x, x, x, mask=ls.Causal() & far).notes)

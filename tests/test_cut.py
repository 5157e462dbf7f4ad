"""`Mask.cut`: every mask cut to some slots of each side, and the tiles that it still skips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.layout import count, plan_layout
from longspan.masks import Compare, array, number, rule
from longspan.masks.by_slot import kv_flags
from longspan.masks.cut import CutMask
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv
from longspan.testing import masks as any_mask
from tests.selection import only
from tests.users_masks import LastKeys, Louder, Near, NearSlots, Wrapped

T, S, B, N = 7, 11, 2, 3
RNG = np.random.default_rng(0)
USERS = st.sampled_from(
    [Near(3), NearSlots(2), LastKeys(3), Louder(RNG.integers(0, 4, (B, T)), RNG.integers(0, 4, (1, S)))]
)
RULES = any_mask(T, S, batch=B, heads=N)
ANY_MASK = st.one_of(RULES, USERS, RULES.map(Wrapped), st.tuples(RULES, USERS).map(lambda p: p[0] | p[1]))
seeds = st.none() | st.integers(0, 2**32 - 1)
tile = st.integers(1, 6)


def some_slots(seed, length, xp=np):
    """Slots of a side: any number of them, sorted or not, repeated or not, for one or all batch rows."""
    if seed is None:
        return None
    rng = np.random.default_rng(seed)
    shape = (int(rng.choice([1, B])), int(rng.integers(0, length + 2)))
    slots = rng.integers(0, length, size=shape) if rng.random() < 0.5 else rng.random((B, length)).argsort(1)[:, :4]
    slots = np.sort(slots, axis=1) if rng.random() < 0.6 else slots
    return xp.asarray(slots[0] if rng.random() < 0.3 else slots, xp.int32)


def some_positions(seed, length):
    if seed is None:
        return None
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 12, size=(int(rng.choice([1, B])), length))
    return np.sort(found, axis=1) if rng.random() < 0.5 else found


def rows_of(slots, length):
    """All kept slots, [B, n]."""
    slots = np.arange(length) if slots is None else np.asarray(slots)
    return np.broadcast_to(slots, (B, slots.shape[-1]))


def cut_positions(positions, slots, length):
    positions = np.broadcast_to(np.arange(length) if positions is None else positions, (B, length))
    return np.take_along_axis(positions, rows_of(slots, length), axis=1)


def truth(mask, q_len, kv_len, q_positions, kv_positions):
    q, kv = mask._sides(q_len, kv_len, q_positions, kv_positions, np)
    return np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), (B, N, q_len, kv_len))


def wanted(mask, q, kv, q_positions, kv_positions):
    whole = truth(mask, T, S, q_positions, kv_positions)
    whole = np.take_along_axis(whole, rows_of(q, T)[:, None, :, None], axis=2)
    return np.take_along_axis(whole, rows_of(kv, S)[:, None, None, :], axis=3)


@given(ANY_MASK, seeds, seeds, seeds, seeds, tile, tile, st.sampled_from([np, jnp]))
def test_a_cut_allows_the_pairs_of_its_slots_and_obeys_the_laws(
    mask, q_seed, kv_seed, q_place, kv_place, q_tile, kv_tile, xp
):
    q, kv = some_slots(q_seed, T, xp), some_slots(kv_seed, S, xp)
    q_positions, kv_positions = some_positions(q_place, T), some_positions(kv_place, S)
    cut = mask.cut(q, kv, q_len=T, kv_len=S)
    places = cut_positions(q_positions, q, T), cut_positions(kv_positions, kv, S)
    sizes = places[0].shape[1], places[1].shape[1]
    np.testing.assert_array_equal(truth(cut, *sizes, *places), wanted(mask, q, kv, q_positions, kv_positions))
    assert_obeys_laws(cut, *sizes, q_tile=q_tile, kv_tile=kv_tile, q_positions=places[0], kv_positions=places[1])
    pairs = count(plan_layout(cut, *sizes, q_tile, kv_tile, q_positions=places[0], kv_positions=places[1], xp=np)).pairs
    assert pairs == np.count_nonzero(truth(cut, *sizes, *places)) * cut.heads // N


@given(ANY_MASK, seeds, seeds, seeds, seeds, tile, tile, st.sampled_from([np, jnp]), st.booleans())
@settings(max_examples=40)
def test_a_cut_of_a_cut_is_one_cut(mask, q_seed, kv_seed, q_again, kv_again, q_tile, kv_tile, xp, wrapped):
    q, kv = some_slots(q_seed, T), some_slots(kv_seed, S)
    once = mask.cut(q, kv, q_len=T, kv_len=S)
    sizes = rows_of(q, T).shape[1], rows_of(kv, S).shape[1]
    more = [some_slots(s, n, xp) if n else None for s, n in zip((q_again, kv_again), sizes, strict=True)]
    twice = (Wrapped(once) if wrapped else once).cut(*more, q_len=sizes[0], kv_len=sizes[1])
    assert not any(isinstance(m, CutMask) and isinstance(m.mask, CutMask) for m in twice.walk())
    both = [
        np.take_along_axis(rows_of(a, n), rows_of(b, size), axis=1)
        for a, b, n, size in zip((q, kv), more, (T, S), sizes, strict=True)
    ]
    places = cut_positions(None, both[0], T), cut_positions(None, both[1], S)
    sizes = both[0].shape[1], both[1].shape[1]
    np.testing.assert_array_equal(truth(twice, *sizes, *places), wanted(mask, *both, None, None))
    assert_obeys_laws(twice, *sizes, q_tile=q_tile, kv_tile=kv_tile, q_positions=places[0], kv_positions=places[1])


@given(ANY_MASK, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), tile, tile)
@settings(max_examples=20)
def test_traced_slots_are_planned_soundly(mask, q_seed, kv_seed, q_tile, kv_tile):
    q, kv = some_slots(q_seed, T), some_slots(kv_seed, S)
    sizes = q.shape[-1], kv.shape[-1]
    places = cut_positions(None, q, T), cut_positions(None, kv, S)

    @jax.jit
    def run(mask, q, kv):
        cut = mask.cut(q, kv, q_len=T, kv_len=S)
        layout = plan_layout(cut, *sizes, q_tile, kv_tile, q_positions=places[0], kv_positions=places[1], xp=jnp)
        sides = layout.sides(batch=B, heads=N)
        kinds = cut.classify(*(side.tiles(size) for side, size in zip(sides, (q_tile, kv_tile), strict=True)))
        return layout, layout.transpose(), kinds

    layout, transposed, (some, every) = run(mask, jnp.asarray(q), jnp.asarray(kv))
    allowed = wanted(mask, q, kv, None, None)
    shape = (B, N, layout.q_tiles, layout.kv_tiles)
    some, every = np.broadcast_to(some, shape), np.broadcast_to(every, shape)
    for b, n in np.ndindex(B, N):
        visited, mirrored = np.zeros(shape[2:], bool), np.zeros(shape[2:], bool)
        for rows, tiles in layout.entries(b, n):
            visited[rows, tiles] = True
        for rows, tiles in transposed.entries(b, n):
            mirrored[tiles, rows] = True
        for i, j in np.ndindex(*shape[2:]):
            part = allowed[b, n, i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile]
            assert not part.any() or (visited[i, j] and mirrored[i, j] and some[b, n, i, j])
            assert not every[b, n, i, j] or part.all()


IDS = np.repeat(np.arange(5), 100)[None, :389]
TABLE = np.stack([np.arange(25), np.roll(np.arange(25), 3)], -1)[None]
CUT = {
    "near": Near(40),
    "near slots": NearSlots(40) & ls.Segments(IDS),
    "louder": Louder(np.sort(RNG.integers(0, 40, (1, 389))), np.sort(RNG.integers(0, 40, (2, 389)))),
    "last keys": LastKeys(17),
    "lengths": ls.KvLengths(np.array([300, 111])) & ls.Causal(),
    "between": ls.Between(np.arange(389) - 30, np.arange(389) + RNG.integers(0, 30, (2, 4, 389))),
    "query lengths": ls.QLengths(np.array([300, 111])) & ls.BlockCausal(32),
    "dense at": ls.Dense(RNG.random((2, 1, 100, 150)) < 0.6, 90, np.array([50, 200])) | ls.Prefix(20),
    "blocks": ls.Blocks(TABLE, 16),
    "traced blocks": ls.Blocks(jnp.asarray(TABLE), 16) | ls.Global(kv_flags=np.arange(389)[None] % 100 == 0),
    "per head": ls.PerHead((Near(9), ls.TokenTypes(IDS), ~ls.Chunk(50), ls.Dense(RNG.random((389, 389)) < 0.1))),
    "pinned": (NearSlots(9) | ls.FirstOfSegment(IDS, np.array([30, 60]))) & ls.Causal(),
    "not": ~(NearSlots(20) | ls.KvLengths(200)),
}


@pytest.mark.parametrize("how", only(["traced, shuffled"], ["static, growing", "traced, growing", "traced, shuffled"]))
@pytest.mark.parametrize("mask", CUT.values(), ids=CUT)
def test_engines_attend_under_cut_masks(mask, how):
    shape = Shape(B=2, T=131, S=150, N=4, K=2, H=5)
    slots = [np.stack([RNG.permutation(389)[:n] for _ in range(2)]) for n in (shape.T, shape.S)]
    if "growing" in how:
        slots = [np.sort(slots[0]), np.sort(slots[1][:1])]
    rows, columns = (np.broadcast_to(some, (2, some.shape[1])) for some in slots)
    dense = np.broadcast_to(mask.dense(389, 389), (2, 4, 389, 389))
    dense = np.take_along_axis(dense, rows[:, None, :, None], axis=2)
    dense = np.take_along_axis(dense, columns[:, None, None, :], axis=3)

    def run(mask, operands, q, kv):
        cut = mask.cut(q, kv, q_len=389, kv_len=389)
        call = dict(mask=cut, q_positions=q, kv_positions=kv)
        return {engine: ls.attention(*operands, **call, engine=engine) for engine in ("cpu", "xla")}

    operands = make_qkv(shape, jnp.float32)
    if "traced" in how:
        out = jax.jit(run)(mask, operands, *slots)
    else:
        out = jax.jit(lambda operands: run(mask, operands, *slots))(operands)
    want = ls.attention(*operands, mask=jnp.asarray(dense), engine="reference")
    for engine, got in out.items():
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=engine)


def test_gradients_under_a_cut_mask_match_the_reference():
    slots = np.sort(RNG.permutation(60)[:31])
    mask = (Near(9) | ls.KvLengths(5)).cut(slots, jnp.asarray(slots), q_len=60, kv_len=60)
    operands = make_qkv(Shape(B=1, T=31, S=31, N=2, K=1, H=5), jnp.float32)
    assert_matches_reference(["cpu", "xla"], *operands, mask, q_positions=slots, kv_positions=slots)


@pytest.mark.parametrize("of", [lambda s: s, jnp.asarray, lambda s: jnp.asarray(s)[None]], ids=["numpy", "jax", "row"])
def test_a_users_mask_still_skips_tiles_after_a_cut(of):
    """It skips as many tiles as the built-in mask by position."""
    mine, built_in = Near(256), ls.Window(256, 0)
    assert mine.layout(4096, 4096).visits() == built_in.layout(4096, 4096).visits() == 93
    slots = np.arange(0, 4096, 2)
    for kept, positions in (
        ((of(slots), None), dict(q_positions=slots)),
        ((None, of(slots)), dict(kv_positions=slots)),
    ):
        sizes = [4096 if s is None else 2048 for s in kept]
        visits = built_in.layout(*sizes, **positions).visits()
        assert mine.cut(*kept).layout(*sizes, **positions).visits() == visits < 70
        by_slot = NearSlots(256).cut(*kept).layout(*sizes, **positions)
        assert by_slot.visits() == visits
        kinds = count(built_in.layout(*sizes, **positions))
        assert count(mine.cut(*kept).layout(*sizes, **positions)) == count(by_slot) == kinds


def test_a_cut_skips_tiles_under_jit():
    slots = np.arange(0, 4096, 2)

    @jax.jit
    def layout(slots):
        return NearSlots(256).cut(slots).layout(2048, 4096)

    assert layout(slots).visits() == NearSlots(256).cut(slots).layout(2048, 4096).visits() < 70


def test_a_maskinfo_skips_the_tiles_of_a_users_mask():
    infos = [
        ls.MaskInfo.from_mask(mask, batch=1, q_len=4096) for mask in (Near(256), NearSlots(256), ls.Window(256, 0))
    ]
    assert [info.layout().visits() for info in infos] == [93] * 3
    steps = [info.apply_kv_lengths(np.array([4000]), q_len=2048, sliding_window=3000) for info in infos]
    assert [step.layout().visits() for step in steps] == [steps[2].layout().visits()] * 3
    assert steps[2].layout().visits() < 70 < 16 * 24


def test_blocks_are_skipped_after_a_static_cut():
    table = np.stack([np.arange(64), np.roll(np.arange(64), 1)], -1)[None]
    mask, rows = ls.Blocks(table, 64), np.arange(1024, 2048)
    cut = mask.cut(rows)
    whole = mask.layout(4096, 4096).visits()
    assert cut.layout(1024, 4096).visits() == whole // 4
    assert count(cut.layout(1024, 4096)).pairs == 1024 * 128


def test_unsorted_slots_skip_no_tiles_and_allow_the_same_pairs():
    slots = np.random.default_rng(0).permutation(4096)[:512]
    assert NearSlots(9).cut(slots).layout(512, 4096).visits() == 4 * 32  # each tile's slots lie far apart
    mixed = np.stack([np.arange(512), slots])
    assert NearSlots(9).cut(None, mixed).layout(4096, 512).visits() < 2 * 32 * 4


def test_rules_by_position_are_not_changed_by_a_cut():
    for mask in (ls.Causal(), ls.Window(3, 1) | ls.Prefix(2), ~ls.Chunk(4), ls.Custom(lambda q, k: q == k), ls.Full()):
        assert mask.cut(np.arange(3), jnp.arange(2)) == mask
    assert ls.Global((0, 4)).cut([1, 2]) == ls.Global((0, 4))
    assert Near(3).cut(None, None) == Near(3)


def test_arrays_are_cut_and_stay_small():
    q, kv = np.array([4, 0]), np.array([[1, 2, 3], [3, 3, 0]])
    ids = np.array([[0, 0, 1, 1, -1]])
    cut = ls.Segments(ids).cut(q, kv)
    assert cut == ls.Segments(np.array([[-1, 0]]), np.array([[0, 1, 1], [1, 1, 0]]))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(cut))  # a static cut stays static
    assert ls.Segments(np.repeat(ids, 2, 0)).cut(q).q_ids.shape == (2, 2)
    assert ls.TokenTypes(ids + 1, zero="none").cut(None, [0]).kv_types.tolist() == [[1]]
    assert ls.KvLengths(np.array([2, 3])).cut(q, kv) == Compare(number(np.array([2, 3])), ">", array(kv))
    assert ls.KvLengths(2).cut(q) == ls.KvLengths(2)
    assert ls.KvLengths(2).cut(None, jnp.array([3, 1])).show(1, 2) == ".#"
    assert ls.QLengths(np.array([2, 3])).cut(q, kv) == Compare(array(q[None]), "<", number(np.array([2, 3])))
    assert ls.QLengths(2).cut(None, kv) == ls.QLengths(2)
    between = ls.Between(np.arange(5), np.arange(5) + 2)
    assert between.cut(q) == ls.Between([4, 0], [6, 2])
    assert between.cut(q, [0, 1, 1, 4]) == ls.Between([3, 0], [4, 3])
    starts, stops = array([[[4, 0]]]), array([[[6, 2]]])
    assert between.cut(q, kv) == Compare(starts, "<=", array(kv)) & Compare(stops, ">", array(kv))
    flags = np.array([[True, False, False, True, False]])
    assert ls.Global((7,), kv_flags=flags).cut(None, [3, 4]) == ls.Global((7,), kv_flags=np.array([[True, False]]))
    dense = RNG.random((1, 3, 5, 1)) < 0.5
    np.testing.assert_array_equal(ls.Dense(dense).cut(q, kv).array, dense[:, :, q])
    assert ls.Dense(RNG.random((5, 5)) < 0.5).cut(None, kv).array.shape == (2, 1, 5, 3)


def test_a_subclass_of_a_rule_stays_itself():
    @rule
    class Strict(ls.Segments):
        least: int = 0

        def lower(self):
            return super().lower() & Compare(array(self.q_ids), ">=", number(self.least))

    cut = Strict(np.array([[0, 0, 1, 1]]), least=1).cut([1, 2])
    assert type(cut) is Strict and cut.least == 1
    assert cut.show(2, 4).split() == ["....", "..##"]


def test_key_flags_span_from_the_first_to_the_last():
    flags = np.zeros((2, 40), bool)
    flags[0, [9, 21]] = True
    mask = kv_flags(flags)
    layout = mask.layout(8, 40, q_tile=4, kv_tile=4)
    assert layout.starts[:, 0, 0, 0].tolist() == [2, 10] and layout.stops[:, 0, 0, 0].tolist() == [6, 10]
    assert count(layout).pairs == 8 * 2
    assert_obeys_laws(mask, 8, 40, q_tile=3, kv_tile=4)


def test_static_slots_are_structure_and_jax_slots_are_data():
    static, data = NearSlots(3).cut(np.arange(4)), NearSlots(3).cut(jnp.arange(4))
    assert hash(static) == hash(NearSlots(3).cut(np.arange(4)))
    assert static != NearSlots(3).cut(np.arange(1, 5))
    assert not jax.tree.leaves(static) and len(jax.tree.leaves(data)) == 1
    traces = []

    @jax.jit
    def dense(slots):
        traces.append(1)
        return NearSlots(3).cut(slots, q_len=9).dense(4, 9)

    for start in range(3):
        np.testing.assert_array_equal(
            dense(jnp.arange(start, start + 4)), NearSlots(3).dense(9, 9)[:, :, start:][:, :, :4]
        )
    assert len(traces) == 1


def test_no_slots_and_unknown_lengths_work():
    for mask in (Near(3), NearSlots(3), ls.Segments(np.zeros((1, 9), int)), ls.Blocks(np.zeros((1, 3, 1), int), 3)):
        for none in (jnp.zeros((2, 0), int), []):
            assert mask.cut(none, None).dense(0, 9).shape[2:] == (0, 9)
            assert mask.cut(none, None).layout(0, 9).visits() == 0
            assert mask.cut(None, none).dense(9, 0).shape[2:] == (9, 0)
            assert mask.cut(None, none).layout(9, 0).visits() == 0
    # Lengths that are not given are those of the arrays, or bounds from the slots, or not known.
    some = jnp.array([1, 5])
    np.testing.assert_array_equal(NearSlots(3).cut(some, some).dense(2, 2)[0, 0], [[True, False], [False, True]])
    blocks = ls.Blocks(jnp.asarray(TABLE), 16).cut(some, some)
    assert blocks.dense(2, 2).all() and blocks.layout(2, 2, q_tile=1, kv_tile=1).transpose().visits() == 4
    assert LastKeys(2).cut(None, np.array([4, 5, 6])).dense(1, 3)[0, 0, 0].tolist() == [False, True, True]


def test_heads_that_share_a_mask_share_it_after_a_cut():
    shared = ls.Segments(np.zeros((1, 9), int))
    cut = ls.PerHead((shared, ls.Causal(), shared)).cut([1, 2])
    assert cut.masks[0] is cut.masks[2] and len(cut._groups()) == 2


def test_a_cut_mask_prints_and_survives_flattening():
    mask = NearSlots(3).cut([1, 2], jnp.arange(4))
    assert repr(mask) == "CutMask(NearSlots(left=3), i32[1,2], i32[1,4])"
    leaves, tree = jax.tree.flatten(mask)
    assert jax.tree.unflatten(tree, leaves) == mask
    assert mask.batch == 1 and NearSlots(3).cut(jnp.zeros((3, 2), int)).batch == 3


@pytest.mark.mesh
def test_cutting_along_a_sharded_batch_moves_nothing():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ids = jax.device_put(RNG.integers(0, 3, (16, 40)).astype(np.int32), rows)
    slots = jax.device_put(np.sort(RNG.integers(0, 40, (16, 9))).astype(np.int32), rows)

    def dense(ids, slots):
        return (ls.Segments(ids) & NearSlots(9) & Louder(ids, ids)).cut(slots, slots, q_len=40, kv_len=40).dense(9, 9)

    text = jax.jit(dense).lower(ids, slots).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def bad(error, words, call):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def test_invalid_slots_are_errors(unchecked):
    mask = ls.Segments(np.zeros((3, 9), int))
    bad(TypeError, "`q` must be the slots (array indices) to keep, ints [n] or [B, n], got int.", lambda: mask.cut(3))
    bad(TypeError, "`kv` must hold the indices of the slots to keep, got dtype bool", lambda: mask.cut(None, [True]))
    bad(ValueError, "`q` must be slots [n] or [B, n], got shape (1, 1, 1)", lambda: mask.cut(np.zeros((1, 1, 1), int)))
    bad(ValueError, "`q` keeps slots from 2 to 9, but the slots are numbered from 0 to 8.", lambda: mask.cut([2, 9]))
    bad(ValueError, "`kv` keeps slots from -1 to 2, but the slots are", lambda: Near(3).cut(None, [2, -1]))
    bad(ValueError, "numbered from 0 to 4.", lambda: Near(3).cut(None, [5], kv_len=5))
    bad(ValueError, "the same number of batch rows, or 1, got 2 and 3", lambda: mask.cut(np.zeros((2, 4), int)))
    bad(ValueError, "batch rows, or 1, got 2 and 4", lambda: Near(3).cut(np.zeros((2, 4), int), np.zeros((4, 1), int)))

"""Arrays that a jitted function closes over: tiles are planned when the program runs, not while XLA compiles it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.constants import constant, in_a_program, on_host, unfolded
from tests.engines import RUNNING
from tests.hlo_constants import MAX_FOLDED, assert_nothing_is_folded, assert_same_operations, folded

LONG = MAX_FOLDED + 64
DRAW = np.random.default_rng(0)
IDS = np.sort(DRAW.integers(0, 9, (1, LONG)), axis=1).astype(np.int32)
FLAGS = DRAW.random((1, LONG)) < 0.1
TABLE = DRAW.integers(0, LONG // 16, (1, LONG // 16, 20)).astype(np.int32)
ENDS = DRAW.integers(0, LONG, (2, LONG)).astype(np.int32)

# The masks that a function closes over, by leaf: each holds an array of more than MAX_FOLDED elements.
LEAVES = {
    "Dense": lambda xp: ls.Dense(xp.asarray(np.tri(LONG, dtype=bool))),
    "Dense at an offset": lambda xp: ls.Dense(xp.asarray(np.tri(80, LONG, dtype=bool)), q_offset=3),
    "Blocks": lambda xp: ls.Blocks(xp.asarray(TABLE), 16),
    "Segments": lambda xp: ls.Segments(xp.asarray(IDS)) & ls.Causal(),
    "TokenTypes": lambda xp: ls.TokenTypes(xp.asarray(IDS)),
    "FirstOfSegment": lambda xp: ls.FirstOfSegment(xp.asarray(IDS), 3),
    "Global": lambda xp: ls.Global(q_flags=xp.asarray(FLAGS), kv_flags=xp.asarray(FLAGS)),
    "Between": lambda xp: ls.Between(*map(xp.asarray, ENDS)),
    "KvLengths": lambda xp: ls.KvLengths(xp.asarray([LONG // 2])) & ls.Segments(xp.asarray(IDS)),
    "Custom": lambda xp: ls.Custom(lambda q, k, ids: ids[q] == ids[k], xp.asarray(IDS[0])) & ls.Window(63, 0),
}
X = jax.ShapeDtypeStruct((1, LONG, 2, 8), jnp.float32)


def total(q, k, v, **options):
    return ls.attention(q, k, v, **options).sum()


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_no_leaf_is_folded_by_any_engine(leaf, xp):
    mask = LEAVES[leaf](xp)
    for engine in RUNNING:

        def run(q, k, v, engine=engine):
            return total(q, k, v, mask=mask, engine=engine)

        assert_nothing_is_folded(run, X, X, X)
        assert_nothing_is_folded(jax.grad(run, (0, 1, 2)), X, X, X)


def test_plain_bools_and_positions_are_not_folded():
    seen, places = jnp.asarray(np.tri(LONG, dtype=bool)), jnp.arange(LONG)
    assert_nothing_is_folded(lambda q: total(q, q, q, mask=seen), X)
    assert_nothing_is_folded(lambda q: total(q, q, q, mask=ls.Causal(), q_positions=places, kv_positions=places), X)


@pytest.mark.mesh
@pytest.mark.parametrize("leaf", ["Segments", "Global", "Dense"])
def test_devices_that_share_a_sequence_fold_nothing(leaf):
    mask, mesh = LEAVES[leaf](jnp), ls.parallel.mesh(sp=8)
    assert_nothing_is_folded(lambda q, k, v: ls.parallel.attention(q, k, v, mask=mask, mesh=mesh), X, X, X)


WITHIN = {
    "layout": lambda q: total(q, q, q, mask=ls.Segments(jnp.asarray(IDS)).layout(LONG, LONG)),
    "transposed layout": lambda q: ls.Segments(jnp.asarray(IDS)).layout(LONG, LONG).transpose().stops,
    "FirstOfSegment": lambda q: total(q, q, q, mask=ls.FirstOfSegment(jnp.asarray(IDS), 3)),
    "positions_from_segments": lambda q: ls.positions_from_segments(jnp.asarray(IDS)),
    "segments of MaskInfo": lambda q: total(
        q, q, q, mask=ls.MaskInfo.from_segments(jnp.asarray(IDS)).apply_causal().apply_chunked(64)
    ),
    "a dense mask of MaskInfo": lambda q: total(
        q, q, q, mask=ls.MaskInfo.from_attention_mask(jnp.asarray(np.tri(LONG, dtype=bool))[None])
    ),
    "longformer_attention": lambda q: ls.longformer_attention(
        q, q, q, q, q, q, window=8, token_kinds=jnp.asarray(FLAGS).astype(int)
    ),
    "bigbird": lambda q: total(q, q, q, mask=ls.bigbird(LONG, block_size=16, rand_attn=TABLE[:, 2:])),
}


@pytest.mark.parametrize("what", WITHIN)
def test_results_computed_from_constants_are_not_folded(what):
    assert_nothing_is_folded(WITHIN[what], X)


def test_the_check_finds_folded_constants():
    ids = jnp.asarray(IDS)
    found = list(folded(lambda: jnp.argsort(ids)[:, 1:].sum() + jax.lax.cond(True, jnp.max, jnp.min, ids)))
    assert [each.split("(")[0] for each in found] == ["sort", "reduce_sum", "reduce_min", "reduce_max"]
    assert not list(folded(lambda x: jnp.argsort(ids + x), 1))
    assert not list(folded(lambda: jnp.argsort(ids[:, :MAX_FOLDED])))
    assert not list(folded(lambda: jnp.arange(LONG).sum()))
    assert list(folded(lambda: jax.lax.scan(lambda c, _: (c + ids.sum(), None), 0, None, 3)))


def test_a_constant_of_a_program_keeps_its_numbers():
    np.testing.assert_array_equal(constant(jnp, IDS), IDS)
    assert constant(np, IDS) is IDS


@contextlib.contextmanager
def nothing_compiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax._src.compiler, "backend_compile_and_load", None)  # would fail if it were called
        yield


@pytest.mark.parametrize("leaf", [name for name in LEAVES if name != "Custom"])
def test_outside_of_jit_known_arrays_are_planned_in_numpy(leaf):
    static = LEAVES[leaf](np).layout(LONG, LONG)
    places = jax.device_put(np.arange(LONG, dtype=np.int32))
    for mask in (LEAVES[leaf](np), jax.device_put(LEAVES[leaf](np))):
        with nothing_compiles():
            layout = mask.layout(LONG, LONG, q_positions=places)
            assert layout.visits() == static.visits()
            assert layout.transpose().visits() == static.transpose().visits()
        assert all(isinstance(table, jax.Array) for table in (layout.stops, layout.transpose().stops))
        assert layout.mask is mask and layout.transpose().forward is layout


def test_small_truth_tables_are_computed_in_numpy_and_large_ones_in_jax(monkeypatch):
    mask = jax.device_put(ls.Segments(IDS[:, ::99]) & ls.Causal())
    length = mask.parts()[0].q_ids.shape[1]
    with nothing_compiles():
        few = mask.dense(length, length)
    monkeypatch.setattr("longspan.masks.base.FEW_PAIRS", length**2 - 1)
    many = mask.dense(length, length)
    assert isinstance(few, jax.Array) and isinstance(many, jax.Array)
    np.testing.assert_array_equal(few, many)


def test_traced_and_mapped_arrays_are_not_known():
    ids = jnp.asarray(IDS)
    assert isinstance(on_host(ids), np.ndarray) and isinstance(unfolded(IDS), jax.Array)
    assert not in_a_program()
    inside = []

    def look(x):
        inside.append((in_a_program(), on_host(ids) is None, on_host(x) is None))
        return x

    jax.vmap(look)(ids)
    jax.jit(look)(ids)
    jax.jit(jax.vmap(look))(ids)
    jax.lax.scan(lambda c, x: (c, look(x)), 0, ids)
    assert inside == [(False, False, True), (True, True, True), (True, True, True), (True, True, True)]


SHORT = 256
CLOSED_OVER = {
    "bools": jnp.asarray(DRAW.random((SHORT, SHORT)) < 0.3),
    "Dense": ls.Dense(jnp.asarray(DRAW.random((1, 2, SHORT, SHORT)) < 0.3)),
    "Blocks": ls.Blocks(jnp.asarray(DRAW.integers(0, 16, (1, 16, 70))), 16),
    "Segments": ls.Segments(jnp.asarray(np.sort(DRAW.integers(0, 9, (1, SHORT)), axis=1))) & ls.Causal(),
}


@pytest.mark.optimised
@pytest.mark.parametrize("engine", ["cpu", "xla"])
@pytest.mark.parametrize("leaf", CLOSED_OVER)
def test_the_optimised_program_plans_constants_as_it_plans_arguments(leaf, engine):
    x = jax.ShapeDtypeStruct((1, SHORT, 2, 8), jnp.float32)

    def run(mask, q, k, v):
        return total(q, k, v, mask=mask, engine=engine)

    assert_same_operations(run, CLOSED_OVER[leaf], x, x, x)


@pytest.mark.optimised
@pytest.mark.parametrize("leaf", CLOSED_OVER)
def test_a_function_that_closes_over_a_mask_is_right(leaf):
    q, k, v = (jnp.asarray(DRAW.normal(size=(1, SHORT, 2, 8)), jnp.float32) for _ in range(3))
    mask = CLOSED_OVER[leaf]
    run = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sin(ls.attention(q, k, v, mask=mask)).sum(), (0, 1, 2)))
    dense = mask if isinstance(mask, jax.Array) else mask.dense(SHORT, SHORT)
    want = jax.value_and_grad(
        lambda q, k, v: jnp.sin(ls.attention(q, k, v, mask=dense, engine="reference")).sum(), (0, 1, 2)
    )(q, k, v)
    for got, expected in zip(jax.tree.leaves(run(q, k, v)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)

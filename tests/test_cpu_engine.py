"""The parts that only the `cpu` engine has: its library, instruction sets, partitioning, vmap, invalid calls.

The parity matrix, which runs on every engine, shows that its results are right.
"""

import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines.cpu import library
from longspan.engines.cpu.operands import ROLES, KernelPlan
from longspan.engines.cpu.program import max_visits
from longspan.layout import plan_layout
from longspan.testing import Shape, assert_matches_reference, make_qkv, masks

LIBRARY_MISSING = library.missing()
needs_library = pytest.mark.skipif(LIBRARY_MISSING is not None, reason=str(LIBRARY_MISSING))
COMMUNICATION = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute")

rng = np.random.default_rng(0)


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no compiler here")
def test_where_there_is_a_compiler_there_is_the_native_library():
    assert LIBRARY_MISSING is None, LIBRARY_MISSING


def test_an_engine_disabled_by_the_environment_gives_the_reason(monkeypatch):
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    q, k, v = make_qkv(Shape(B=1, T=3, S=5, N=2, K=1, H=4), jnp.float32)
    assert "LONGSPAN_NATIVE=0" in ls.explain(q, k, v).refused["cpu"]
    with pytest.raises(NotImplementedError, match="unset the variable"):
        ls.attention(q, k, v, engine="cpu")


def test_a_missing_library_is_reported_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library._load.cache_clear()
    try:
        assert re.search("was not built.*LONGSPAN_NATIVE=require pip install", library.missing() or "")
    finally:
        library._load.cache_clear()


@needs_library
def test_an_unsupported_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("LONGSPAN_CPU_ISA", "abacus")
    assert "this machine and build support " in (library.missing() or "")


@needs_library
@pytest.mark.parametrize("isa", library.instruction_sets() if LIBRARY_MISSING is None else ())
def test_every_instruction_set_of_this_machine_matches_the_reference(monkeypatch, isa):
    monkeypatch.setenv("LONGSPAN_CPU_ISA", isa)
    q, k, v = make_qkv(Shape(B=2, T=75, S=139, N=6, K=3, H=21), jnp.float32)
    features = dict(sinks=jnp.asarray(rng.normal(size=6), jnp.float32), soft_cap=3.0)
    assert_matches_reference("cpu", q, k, v, ls.Causal(offset=50) & ls.Window(70, 60), **features)


@needs_library
def test_the_same_call_gives_the_same_bits():
    q, k, v = make_qkv(Shape(B=2, T=300, S=300, N=4, K=2, H=32), jnp.float32)

    def gradients(q, k, v):
        return jax.grad(lambda *x: jnp.sum(ls.attention(*x, mask=ls.Window(90, 9), engine="cpu") ** 2), (0, 1, 2))(
            q, k, v
        )

    first = gradients(q, k, v)
    for _ in range(3):
        for a, b in zip(first, gradients(q, k, v), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.mesh
@needs_library
@pytest.mark.parametrize("kv_heads", [1, 4], ids=["K1", "K4"])
@pytest.mark.parametrize("rows, heads", [("x", None), (None, "x"), ("x", "y")], ids=["batch", "heads", "both"])
def test_sharded_rows_and_heads_need_no_gathering(rows, heads, kv_heads):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v = make_qkv(Shape(B=4, T=20, S=20, N=8, K=kv_heads, H=8), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=8), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(1, 1, 20, 20)), jnp.float32)

    def loss(q, k, v, sinks, bias, engine):
        return jnp.sum(ls.attention(q, k, v, mask=ls.Causal(), sinks=sinks, bias=bias, engine=engine) ** 2)

    wanted = jax.jit(jax.grad(loss, range(5)), static_argnums=5)(q, k, v, sinks, bias, "reference")
    kv_axis = heads if kv_heads > 1 else None
    specs = (P(rows, None, heads), P(rows, None, kv_axis), P(rows, None, kv_axis), P(heads), P())
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, v, sinks, bias), specs, strict=True)
    ]
    program = jax.jit(jax.grad(loss, range(5)), static_argnums=5).lower(*arguments, "cpu").compile()
    assert set(COMMUNICATION.findall(program.as_text())) <= {"all-reduce"}  # sums of shared gradients
    for got, want in zip(program(*arguments), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    forward = jax.jit(lambda q, k, v: ls.attention(q, k, v, mask=ls.Causal(), engine="cpu")).lower(*arguments[:3])
    assert not COMMUNICATION.findall(forward.compile().as_text())


@needs_library
def test_vmap_folds_into_the_batch_or_loops():
    q, k, v = (x.reshape(3, 2, *x.shape[1:]) for x in make_qkv(Shape(B=6, T=9, S=9, N=4, K=2, H=8), jnp.float32))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (3, 2, 9))), np.int32)
    sinks = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    for axes in ((0, 0, 0, 0, None), (0, None, None, 0, None), (0, 0, 0, None, 0)):
        arguments = [x if axis == 0 else x[0] for x, axis in zip((q, k, v, ids, sinks), axes, strict=True)]

        def call(q, k, v, ids, sinks, engine):
            return ls.attention(q, k, v, mask=ls.Segments(ids), sinks=sinks, engine=engine)

        got, want = (
            jax.vmap(lambda *x, engine=engine: call(*x, engine), axes)(*arguments) for engine in ("cpu", "reference")
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _rule(a, b, n):
    return (a + b) % n != 0


MAPPED = {
    "queries": ((0, None, None, None), lambda ids, n: ls.Causal(), {}),
    "keys": ((None, 0, None, None), lambda ids, n: ls.Causal(), {}),
    "all, dropout": ((0, 0, None, None), lambda ids, n: None, dict(dropout_rate=0.5, dropout_key=jax.random.key(0))),
    "ids beside global tokens": ((0, 0, 0, None), lambda ids, n: ls.Segments(ids) | ls.Global((3, 7)), {}),
    "a custom rule's number": ((0, 0, None, 0), lambda ids, n: ls.Causal() & ls.Custom(_rule, n), {}),
}


@pytest.mark.check
@needs_library
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ids_rows", [1, 2])
@pytest.mark.parametrize("what", MAPPED)
def test_vmap_with_operands_that_do_not_move(what, rows, ids_rows):
    axes, mask, features = MAPPED[what]
    q, k, _ = (x.reshape(3, rows, *x.shape[1:]) for x in make_qkv(Shape(3 * rows, 9, 9, 4, 2, 8), jnp.float32))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (3, min(rows, ids_rows), 9))), np.int32)
    numbers = jnp.asarray([2, 3, 5])
    arguments = [x if axis == 0 else x[0] for x, axis in zip((q, k, ids, numbers), axes, strict=True)]

    def loss(q, k, ids, n, engine):
        return jnp.sum(ls.attention(q, k, k, mask=mask(ids, n), engine=engine, **features) ** 2)

    got, want = (
        jax.jit(jax.vmap(jax.value_and_grad(partial(loss, engine=engine), (0, 1)), axes))(*arguments)
        for engine in ("cpu", "reference")
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.check
@needs_library
def test_a_mask_may_be_nested_deeply():
    q, k, v = make_qkv(Shape(B=1, T=8, S=8, N=1, K=1, H=4), jnp.float32)
    left = right = ls.Causal()
    for i in range(40):
        left = (ls.Prefix(i % 8) & left) | ls.Segments(jnp.zeros((1, 8), jnp.int32))
        right = ls.Segments(jnp.zeros((1, 8), jnp.int32)) | (~right & ls.Prefix(i % 8))
    for mask in (left, right):
        got, want = (ls.attention(q, k, v, mask=mask, engine=engine) for engine in ("cpu", "reference"))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@needs_library
def test_wrong_calls_are_errors_with_a_message():
    q = jnp.ones((1, 4, 2, 8))
    tables = [jnp.zeros((1, 1, 1, 1), jnp.int32), jnp.ones((1, 1, 1, 1), jnp.int32)]
    good = KernelPlan(1.0, 0.0, 0.0, 0, 4, 4, (0,), (-1,) * len(ROLES), ((),) * 2)
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), *[jax.ShapeDtypeStruct((1, 4, 2), jnp.float32)] * 2)

    def call(*operands, results=results, **changes):
        jax.block_until_ready(library.call("longspan_forward", results, operands, **(good.attributes() | changes)))

    call(q, q, q, *tables)
    ints, stack = library.static_ints, jnp.ones((3, *q.shape))

    def given(name):
        return dict(roles=ints([0 if role == name else -1 for role in ROLES]))

    for message, operands, changes in (
        ("too few operands", (q, q), {}),
        ("must have one type", (q, q.astype(jnp.bfloat16), q, *tables), {}),
        ("k and v must be", (q, q, q[:, :3], *tables), {}),
        ("not a multiple", (jnp.ones((1, 4, 3, 8)), q, q, *tables), {}),
        ("1 to 256", (*[jnp.ones((1, 4, 2, 257))] * 3, *tables), {}),
        ("B, T, S and N must be at least 1", (q[:, :0], q, q, *tables), {}),
        ("starts and stops", (q, q, q, tables[0][0], tables[1]), {}),
        ("at least 1", (q, q, q, *tables), dict(kv_tile=np.int64(0))),
        ("unknown op 99", (q, q, q, *tables), dict(program=ints([99]))),
        ("ends too early", (q, q, q, *tables), dict(program=ints([2, 3, 0]))),
        ("needs two values", (q, q, q, *tables), dict(program=ints([0, 8]))),
        ("leaves 2 values", (q, q, q, *tables), dict(program=ints([0, 0]))),
        ("no operand 7", (q, q, q, *tables), dict(program=ints([4, 7]))),
        ("a role names", (q, q, q, *tables), dict(roles=ints([5] * len(ROLES)))),
        (r"slopes must be float32 .* \[N\], got shape \[3\]", (q, q, q, *tables, jnp.ones(3)), given("slopes")),
        (r"table must be float32 .* got shape \[2,4\]", (q, q, q, *tables, jnp.ones((2, 4))), given("table")),
        (r"layer must be int32 \[\]", (q, stack, stack, *tables, jnp.ones(())), given("layer")),
        ("k and v of layers must be", (q, stack, q, *tables, jnp.int32(0)), given("layer")),
        ("there is no layer 3 in", (q, stack, stack, *tables, jnp.int32(3)), given("layer")),
        ("q must be", (q, stack, stack, *tables), {}),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(*operands, **changes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lse and lse_low must be"):
        call(q, q, q, *tables, results=(*results[:2], jax.ShapeDtypeStruct((1, 4), jnp.float32)))


@settings(max_examples=25)
@given(mask=masks(23, 31), wider=booleans())
def test_mask_bits_cover_every_tile_that_data_may_visit(mask, wider):
    mask = ls.Causal(8) & mask & ls.Window(6, 9) & ls.Custom(lambda q, k: q > k) if wider else ls.Window(5, 3) & mask
    widths = []

    def traced(mask):
        widths.append(max_visits(plan_layout(mask, 23, 31, 3, 2, xp=jnp)))

    jax.eval_shape(traced, mask)
    jax.eval_shape(lambda: traced(mask))  # NumPy arrays keep their values
    concrete = plan_layout(mask, 23, 31, 3, 2, xp=np)
    visits = [len(tiles) for b, n in concrete.planes() for tiles in _tiles_by_row(concrete, b, n)]
    assert max(visits) <= min(widths)


@needs_library
def test_mask_bits_cover_tiles_where_intervals_are_too_many_to_intersect():
    tables = [rng.permuted(np.tile(np.arange(16), (16, 1)), axis=1)[None, :, :width] for width in (9, 8)]
    many, more = (ls.Blocks(jnp.asarray(table, jnp.int32), 128) for table in tables)
    mask = ls.Window(130, 130) & many & more & ls.Custom(lambda a, b: (a + b) % 3 != 0)
    q, k, v = make_qkv(Shape(B=1, T=2048, S=2048, N=1, K=1, H=4), jnp.float32)
    got, want = (ls.attention(q, k, v, mask=mask, engine=engine) for engine in ("cpu", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _tiles_by_row(layout, batch, head):
    rows, tiles = (np.concatenate(part) for part in zip(*layout.entries(batch, head), strict=True))
    return [tiles[rows == row] for row in range(layout.q_tiles)]


LONG = 262144
UNKNOWN_RULE = ls.Custom(lambda q, k: (q + k) % 3 != 0)


@pytest.mark.parametrize("known", [False, True], ids=["shapes", "traced"])
def test_mask_bits_of_gigabytes_are_refused(known):
    q = jax.ShapeDtypeStruct((1, LONG, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, LONG), jnp.int32)

    def run(q, ids, engine="cpu", within=None):
        mask = ls.Segments(ids) & UNKNOWN_RULE
        mask = mask if within is None else within & mask
        return (ls.attention if known else ls.explain)(q, q, q, mask=mask, engine=engine)

    def lowered(**arguments):
        return jax.jit(partial(run, **arguments)).lower(q, ids) if known else run(q, ids, **arguments)

    with pytest.raises(
        NotImplementedError, match=r"cannot evaluate Custom\(<lambda>\).*The bits take 8.0 GiB, and the limit is 1 Gi"
    ):
        lowered()
    if LIBRARY_MISSING is None:
        lowered(within=ls.Window(255, 0))  # with a static window, the bits are few
    if known:
        assert "longspan_forward" not in lowered(engine="auto").as_text()
    else:
        assert lowered(engine="auto").engine == "xla"


@needs_library
def test_mask_bits_of_packed_documents_stay_within_the_window():
    T = 16384
    q = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)

    @jax.jit
    def run(q, ids):
        mask = ls.Causal() & ls.Window(255, 0) & ls.Segments(ids) & ls.Custom(lambda q, k: (q + k) % 3 != 0)
        return ls.attention(q, q, q, mask=mask, engine="cpu")

    needed = run.lower(q, jax.ShapeDtypeStruct((1, T), jnp.int32)).compile().memory_analysis().temp_size_in_bytes
    assert needed < T * T // 64  # a bit for every pair would be T * T // 8 bytes


@needs_library
@pytest.mark.parametrize("size", [1.0, 1e4, 1e5, 1e7])
@pytest.mark.parametrize("T", [1, 4, 200])
def test_gradients_of_few_queries_are_exact_where_scores_are_large(T, size):
    """Both passes must compute a score with the same bits: exp(score - lse) amplifies every difference."""
    q, k, v = make_qkv(Shape(B=1, T=T, S=300, N=2, K=1, H=64), jnp.float32)
    q = q * size / 20
    weights = np.random.default_rng(2).normal(size=q.shape).astype(np.float32)

    @partial(jax.jit, static_argnums=3)
    def gradients(q, k, v, engine):
        return jax.grad(lambda *x: jnp.vdot(ls.attention(*x, engine=engine), weights), (0, 1, 2))(q, k, v)

    got = gradients(q, k, v, "cpu")
    # The rounding unit of a score of 1e7 is 1, so the reference's weights are no better than anybody's. But whatever
    # they are, a query's weights add up to 1, and so dv adds up to the cotangents.
    total = np.asarray(got[2], np.float64).sum(axis=1)[0, 0]
    np.testing.assert_allclose(total, weights.sum(axis=(1, 2))[0], rtol=0, atol=1e-6 * np.abs(weights).sum())
    if size == 1.0:
        for mine, other in zip(got, gradients(q, k, v, "reference"), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-4, atol=1e-4)

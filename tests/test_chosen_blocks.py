"""`Blocks` tables by batch row and head: content-dependent selection, and the example that shows it."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines import ENGINES, Request
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv

EXAMPLE = Path(__file__).parent.parent / "examples" / "chosen_blocks.py"
SHAPE = Shape(B=3, T=37, S=29, N=4, K=2, H=5)
B, T, S, N, K, H, _ = SHAPE
SIZE, ROWS = 6, 7


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("chosen_blocks", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=ENGINES)
def engine(request):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    reason = ENGINES[request.param].unsupported(Request.of(q=q, k=k, v=v))
    if reason is not None:
        pytest.skip(reason)
    return request.param


def table(rows, heads, seed=0):
    return np.random.default_rng(seed).integers(-1, 5, (rows, heads, ROWS, 2)).astype(np.int32)


def plain(table):
    truth = np.zeros((*table.shape[:2], T, S), bool)
    for b, n, i, j in np.ndindex(*truth.shape):
        truth[b, n, i, j] = j // SIZE in table[b, n, i // SIZE]
    return truth


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("heads", [1, N])
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["static", "traced"])
def test_a_table_by_row_allows_the_blocks_listed_for_each_row_and_head(rows, heads, as_array):
    listed = table(rows, heads)
    mask = ls.Blocks(as_array(listed), SIZE)
    np.testing.assert_array_equal(mask.dense(T, S), plain(listed))
    assert repr(mask) == f"Blocks(i32[{rows},{heads},7,2], 6)"
    assert (mask.batch, mask.heads) == (rows, heads)
    assert_obeys_laws(mask, T, S)
    assert_obeys_laws(mask, T, S, q_tile=SIZE, kv_tile=SIZE)
    assert mask.show(T, S, batch=2, head=3) == ls.Blocks(listed[min(2, rows - 1)], SIZE).show(T, S, head=3)


def test_one_row_of_a_table_is_the_table_without_rows():
    listed = table(1, N)
    for transposed in (False, True):
        layouts = [ls.Blocks(t, SIZE).layout(T, S, q_tile=4, kv_tile=8) for t in (listed, listed[0])]
        a, b = (layout.transpose() if transposed else layout for layout in layouts)
        np.testing.assert_array_equal(a.starts, b.starts)
        np.testing.assert_array_equal(a.stops, b.stops)


@pytest.mark.check
@pytest.mark.parametrize("sizes", [(B, 1), (B, N)], ids=str)
def test_engines_read_tables_by_row_in_both_passes(engine, sizes):
    listed, qkv = table(*sizes), make_qkv(SHAPE, jnp.float32)
    assert_matches_reference(engine, *qkv, ls.Blocks(jnp.asarray(listed), SIZE).layout(T, S, q_tile=8, kv_tile=4))
    got, want = (
        ls.attention(*qkv, mask=m, engine=engine) for m in (ls.Blocks(listed, SIZE), jnp.asarray(plain(listed)))
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


def test_a_table_that_is_cut_keeps_its_rows_and_its_skipping():
    listed = table(B, N)
    mask, q, kv = ls.Blocks(listed, SIZE), np.array([3, 4, 20, 21]), np.arange(6, 24)
    np.testing.assert_array_equal(mask.cut(q, kv).dense(4, 18), plain(listed)[:, :, q][..., kv])
    rows = ls.Blocks(np.arange(64).reshape(1, 1, 64, 1).repeat(2, axis=0), 64)
    assert rows.cut(np.arange(1024, 2048)).layout(1024, 4096, q_tile=64, kv_tile=64).visits() == 2 * 16


def test_new_tables_do_not_retrace_under_vmap_and_gradients(engine):
    traces = []

    def loss(q, k, v, table, engine):
        traces.append(engine)
        return jnp.sum(ls.attention(q, k, v, mask=ls.Blocks(table, SIZE) & ls.Causal(9), engine=engine) ** 2)

    qkv = make_qkv(SHAPE, jnp.float32)
    run = jax.jit(jax.value_and_grad(loss), static_argnums=4)
    tables = jnp.stack([jnp.asarray(table(B, N, seed)) for seed in range(3)])
    want = [run(*qkv, one, "reference") for one in tables]
    got = [run(*qkv, one, engine) for one in tables]
    assert len(traces) == 1 + (engine != "reference")
    mapped = jax.vmap(lambda t: jax.value_and_grad(loss)(*qkv, t, engine))(tables)
    for i in range(3):
        for mine in (got[i], jax.tree.map(lambda x: x[i], mapped)):  # noqa: B023
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), mine, want[i])


@pytest.mark.mesh
def test_a_sharded_table_stays_with_its_rows_and_heads():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q, k, v = make_qkv(Shape(B=4, T=37, S=29, N=4, K=2, H=5), jnp.float32)
    listed = jnp.asarray(table(4, 4))

    def run(q, k, v, table):
        return ls.attention(q, k, v, mask=ls.Blocks(table, SIZE), engine="cpu")

    places = [P("x", None, "y")] * 3 + [P("x", "y")]
    operands = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip((q, k, v, listed), places, strict=True)]
    try:
        compiled = jax.jit(run).lower(*operands).compile()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    want = ls.attention(q, k, v, mask=ls.Blocks(listed, SIZE), engine="reference")
    np.testing.assert_allclose(compiled(*operands), want, rtol=0, atol=5e-6)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.check
def test_the_example_equals_dense_attention_over_the_same_choice(example, engine, capsys):
    lines = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        differences = example.compare(length=384, block_size=32, chosen=3, engine=engine, report=lines.append)
    assert max(differences) < 1e-5
    assert lines == ["33 tiles per head and batch row; causal attention visits 78"]
    said = capsys.readouterr().err.splitlines()
    assert said[::2] == ["compiling sparse attention ...", "compiling dense attention ..."]
    pattern = r"compiled (sparse|dense) attention and ran it once in \d+\.\d s"
    assert all(re.fullmatch(pattern, line) for line in said[1::2])


def test_the_example_is_read_in_one_sitting():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 110
